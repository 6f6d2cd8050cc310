"""The tests, in the order in which to read them.

1. `oracle.py`: the mathematics in NumPy; all else is judged by it.
2. The files of this folder, each about the module whose name it has, beginning with
   `test_recipes.py` and `test_pieces.py`; and `polar/`.
3. `reading/`, with the answers of `programs/`.
4. `mesh/`: every layout beside one device.
5. The peers: `parity/` (PyTorch) and `outside/` (optax's own tests, Keras).
6. What users run: `test_docs.py`, `examples/`, `tools/`.
7. `benchmarks/`.

`trees.py` makes trees of arrays, runs an optimizer on one, and has the distance of two
of them; `recipes.py` has every recipe. Use these before you write a loop of your own.
"""
