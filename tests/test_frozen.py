"""The states and the table of one recipe in every layout, and states of a release.

`tests/fixtures/frozen/nanochat.txt` holds the arrays of the state with their shardings,
and the table of `describe`, for each layout. `states_0.1.0.npz` holds states of version
0.1.0 after two steps, and the updates of the third step: later versions have to load
the states and return these updates.

To change the text on purpose, run

    FREEZE=1 python -m pytest -n 0 tests/test_frozen.py

look at `git diff`, and say in CHANGELOG.md what changed for users. Nothing writes the
states of a version again.
"""

import os
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_muon as jm
from jax_muon.base.tables import aligned, shape_text
from jax_muon.base.trees import leaves_with_paths
from tests import trees
from tests.mesh import case
from tests.recipes import RECIPES
from tests.recipes import SHAPES as SMALL

FOLDER = pathlib.Path(__file__).parent / "fixtures" / "frozen"
FREEZE = "FREEZE" in os.environ
EXAMPLES = ["ZeRO-2 on 4", "HSDP", "ZeRO-2 x FSDP x TP"]
SHAPES = {
    "wte": (50304, 768),
    **{f"h_{i}/q": (768, 768) for i in range(3)},
    "h_0/up": (768, 3072),
    "scan/down": (4, 3072, 768),
    "conv/kernel": (3, 3, 64, 128),
    **{"norm/scale": (768,), "bias": (6,)},
}
PARAMS = {path: jax.ShapeDtypeStruct(x, "float32") for path, x in SHAPES.items()}


def table(tx):
    """The table of `describe` without its last column, the reasons in words."""
    first, *rest = str(jm.describe(tx, PARAMS)).splitlines()
    width = first.index("why")
    of_parameters = [line[:width].rstrip() for line in (first, *rest[: len(SHAPES)])]
    return "\n".join([*of_parameters, *rest[len(SHAPES) :]])


def test_tables_and_states_are_those_that_are_committed():
    tx = RECIPES["nanochat"]()
    rows = {
        path: [shape_text(x.shape), str(x.dtype)]
        for path, x in leaves_with_paths(jax.eval_shape(tx.init, PARAMS))
    }
    tables = [f"one device\n\n{table(tx)}"]
    for where in EXAMPLES:
        mesh, specs, divide = case.layout(where, shapes=SHAPES)
        on = jm.on_mesh(tx, case.at(mesh, specs), divide=divide)
        for path, x in leaves_with_paths(on.abstract_state(PARAMS)):
            rows[path].append(str(tuple(x.sharding.spec)))
        tables.append(f"{where}\n\n{table(on)}")
    header = ("state", "shape", "dtype", *EXAMPLES)
    states = aligned([header, *((path, *row) for path, row in rows.items())])
    text = "\n\n\n".join(["\n".join(states), *tables]) + "\n"
    path = FOLDER / "nanochat.txt"
    if FREEZE:
        path.write_text(text)
    assert text == path.read_text(), f"to change it, read {__file__}"


# --- states of a release --------------------------------------------------------------


with np.load(FOLDER / "states_0.1.0.npz") as arrays:
    SAVED = dict(arrays)


@pytest.mark.parametrize("name", sorted({key.partition("/")[0] for key in SAVED}))
def test_a_state_of_version_0_1_0_goes_on(name):
    """Every array has its place, and the next update is the one it led to then."""
    own = [key for key in SAVED if key.startswith(f"{name}/")]
    saved = {key.removeprefix(f"{name}/"): SAVED[key] for key in own}
    tx, params = RECIPES[name](dtype="float32", ns_steps=3), trees.normal(SMALL)
    start = tx.init(params)
    state = [jnp.asarray(saved.pop(f"state/{x}")) for x, _ in leaves_with_paths(start)]
    loaded = jax.tree.unflatten(jax.tree.structure(start), state)
    updates, _ = tx.update(trees.normal(SMALL, 3), loaded, params)
    for path, x in leaves_with_paths(updates):
        expected = saved.pop(f"updates/{path}")
        np.testing.assert_allclose(x, expected, rtol=1e-4, atol=1e-7, err_msg=path)
    assert not saved  # nothing that a state had then is dropped
