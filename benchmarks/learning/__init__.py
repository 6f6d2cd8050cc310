"""How many steps each optimizer needs: every one at its best, on the example's model.

    python -m benchmarks.learning                  all runs, hours of them
    python -m benchmarks.learning --stages grid --optimizers nanochat muon
    python -m benchmarks.learning --report         table, picture and examples/best.json

The measure is that of speed runs: the length of the shortest run, with a schedule of
its own, that ends at or below AdamW's loss after 300 steps, as the mean of three seeds.
Every optimizer has the same model, initial weights, batches, form of the schedules and
number of tries in the search for its settings.

grid.py holds what is tried, training.py is one run, records.py keeps them, plan.py says
which come after which, report.py what came of it. A run that is stopped costs itself
alone: all others are in benchmarks/results/learning/, a line each, and are not made
again. Start it twice to use two cores: a run that the other is at is waited for.
"""
