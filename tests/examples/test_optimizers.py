"""The optimizers of the example: best settings, and a rate for the embedding."""

import json
import pathlib

import jax
import numpy as np
import pytest
from flax import nnx
from gpt import GPT
from optimizers import BEST, OPTIMIZERS, best_rates, make_optimizer

import jax_muon as jm

RESULTS = pathlib.Path(__file__).parents[2] / "benchmarks" / "results"


@pytest.fixture(scope="module")
def model():
    """Parameters, and what the loss says about them."""
    graph, params = nnx.split(GPT(9, 32, 2, rngs=nnx.Rngs(0)))
    windows = jax.ShapeDtypeStruct((1, 9), "int32")
    return params, jm.read(params, lambda p, x: nnx.merge(graph, p).loss(x), windows)


def test_every_optimizer_takes_the_settings_that_won_the_search(model):
    found = json.loads((RESULTS / "learning/best.json").read_text())
    won = {k: x["settings"] for k, x in found["300 steps, width 128"].items()}
    assert won == json.loads(BEST.read_text())
    assert won.keys() == OPTIMIZERS.keys()
    params, matrices = model
    for name in OPTIMIZERS:
        tx = make_optimizer(name, 3, matrices, **best_rates(name))
        jax.eval_shape(tx.init, params)
    with pytest.raises(ValueError, match=r"weight_decay=0.1: muonh keeps the norms"):
        make_optimizer("muonh", 3, matrices, **won["muonh"] | {"weight_decay": 0.1})


def test_the_embedding_has_a_rate_of_its_own(model):
    (params, matrices), steps = model, []
    for factor in (1.0, 4.0):
        rates = best_rates("adamw") | {"embedding_factor": factor}
        tx = make_optimizer("adamw", 3, matrices, **rates)
        updates, _ = tx.update(params, tx.init(params), params)
        steps.append(nnx.to_flat_state(updates))
    for (path, once), (_, fourfold) in zip(*steps, strict=True):
        factor = 4 if path[0] == "embed" else 1
        np.testing.assert_array_equal(fourfold[...], factor * once[...])
