"""Tables of what tests of recipes only bound: `python -m tests.tables`.

How far `contrib.muon` is from optax's in twenty steps; float16 parameters beside
float32, with and without residuals; the heads that `find_matrices` finds in a loss.
"""

import jax
import numpy as np
import optax

import jax_muon as jm
from jax_muon import contrib
from jax_muon.base.tables import aligned, sizes_text
from tests import test_contrib
from tests.matrices import test_heads
from tests.transforms import test_adamw


def largest(tree, like):
    """The largest difference of two elements."""
    gaps = jax.tree.map(lambda x, y: np.max(np.abs(np.float64(x) - y)), tree, like)
    return max(jax.tree.leaves(gaps))


def beside_optax():
    yield ["settings", "elements moved by", "from optax's"]
    for name, changed in test_contrib.SETTINGS.items():
        settings = {"learning_rate": 0.02} | changed
        ours, theirs = (
            test_contrib.end(muon(**settings))
            for muon in (contrib.muon, optax.contrib.muon)
        )
        moved = largest(theirs, test_contrib.START)
        yield [name, f"{moved:.2f}", f"{largest(ours, theirs):.1e}"]


def in_float16():
    """Distances from float32 as a part of an element, or of 0.05 of smaller ones."""
    yield ["recipe", "gradients", "float16", "keep_residual", "skipped"]
    for name in ("nanochat", "muon", "moonlight", "normuon", "muonh"):
        for gradient in (test_adamw.zero, test_adamw.unused_rows):
            expected, found, kept, skipped = test_adamw.ends(name, gradient)
            size = jax.tree.map(lambda x: np.abs(np.float64(x)) + 0.05, expected)
            parts = [
                largest(
                    jax.tree.map(lambda x, y: np.float64(x) / y, end, size),
                    jax.tree.map(lambda x, y: np.float64(x) / y, expected, size),
                )
                for end in (found, kept)
            ]
            yield [name, gradient.__name__, *(f"{x:.1e}" for x in parts), str(skipped)]


def heads():
    yield ["attention", "parameter", "role", "as matrices", "why"]
    for layer, params, _ in test_heads.LAYERS:
        matrices = test_heads.find(layer, params, heads="apart")
        tx = jm.muon(0.02, adamw=optax.adamw(1e-3), matrices=matrices)
        for x in jm.describe(tx, test_heads.TABLES | params).parameters:
            if x.matrices:
                read = x.parameter
                sizes = sizes_text(x.matrices)
                yield [layer.__name__, read.path, read.role, sizes, read.reason]


if __name__ == "__main__":
    for rows in (beside_optax, in_float16, heads):
        print("\n".join(aligned([*rows()])), end="\n\n")
