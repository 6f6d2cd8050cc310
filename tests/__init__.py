"""The tests, in the order in which to read them.

1. `oracle.py`: the mathematics in NumPy; all else is judged by it.
2. `test_recipes.py`, `transforms/`, beginning with its `test_pieces.py`, and `polar/`.
   A folder or file has the name of what it is about.
3. `matrices/`, with the answers of `programs/`.
4. `mesh/`: every layout beside one device.
5. The peers: `parity/` (PyTorch) and `outside/` (optax's own tests, Keras).
6. What users run: `test_docs.py`, `examples/`, `tools/`.
7. `benchmarks/`.

`trees.py` makes trees of arrays, runs an optimizer on one, and has the distance of two
of them; `recipes.py` has every recipe. Use these before you write a loop of your own.
"""
