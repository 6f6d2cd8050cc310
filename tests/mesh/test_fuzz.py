"""The covering cases of `python -m benchmarks.fuzz`, and a bug that it found.

And wrong settings, which every recipe must refuse.
"""

import functools
import inspect
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers

import jax_muon as jm
from benchmarks import fuzz
from jax_muon.tools.verify import compare
from tests.mesh.layouts import mesh_of
from tests.recipes import RECIPES

CASES = fuzz.covering(1059)  # the seed with the fewest of them


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.seed}")
def test_cases_are_those_of_one_device(case):
    found = fuzz.check(case)
    assert found.ok, found


def test_two_shapes_gathered_in_bfloat16():
    """XLA moved the transpose of one into a product that no CPU runs."""
    grads = {"a": np.ones((24, 4), "float32"), "b": np.ones((24, 4), "float32")}
    matrices = {"a": "muon", "b": MuonDimensionNumbers(1, 0)}
    tx = jm.muon(steps=1, dtype="bfloat16", matrices=matrices)
    mesh, specs = mesh_of(2, names=("fsdp",)), {"a": P(None, "fsdp"), "b": P()}
    many = jm.on_mesh(tx, mesh, specs)
    places = {path: NamedSharding(mesh, spec) for path, spec in specs.items()}
    found = compare(tx, many, [(grads, [grads])], places)
    assert found.ok, found


# --- refusals -------------------------------------------------------------------------

PARAMS = {"0/q": jnp.ones((4, 8)), "1/q": jnp.ones((4, 8)), "scale": jnp.ones(4)}
SETTINGS = {
    "learning_rate": (-1.0, math.nan, math.inf, "0.1", [0.1], 1j, None, True),
    "momentum": (-0.1, 1.0, math.nan, "0.9", 1j, None, True),
    "weight_decay": (-0.1, math.inf, "0.1", None, True),
    "beta2": (-0.1, 1.0, math.nan, "0.9"),
    "steps": (0, -1, 2.5, "5", True),
    "dtype": ("int8", "complex64"),
    "momentum_dtype": ("uint8", "float16", "complex64"),
    "edition": ("2025-01", 2026, None),
    "shape_rule": ("max", -1.0, None),
    "polar": ("exact", 5, lambda x: x[..., :1]),
    "adamw": (-0.1, "adamw"),
    "groups": ({"muon": optax.sgd(1.0)}, {"a": 5}),
    "matrices": ("read", 5, {"up": "muon"}),
}


@pytest.mark.parametrize("name", RECIPES)
def test_wrong_settings_are_never_a_result(name):
    recipe = RECIPES[name]
    known = inspect.signature(getattr(recipe, "func", recipe)).parameters

    def step(**given):
        tx = recipe(**given)
        return tx.update(PARAMS, tx.init(PARAMS), PARAMS)

    jax.eval_shape(step)
    for setting in SETTINGS.keys() & known.keys():
        for wrong in SETTINGS[setting]:
            with pytest.raises(ValueError):
                jax.eval_shape(functools.partial(step, **{setting: wrong}))
