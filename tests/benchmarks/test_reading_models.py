"""Models of Flax, read by their losses, and the answers of such models."""

import jax
import jax.numpy as jnp
import pytest

from benchmarks.reading_models import Model, flax
from benchmarks.reading_models.__main__ import read_model
from tests.programs.parts import floats

pytestmark = pytest.mark.usefixtures("as_users_write")


@pytest.mark.parametrize("name", flax.MODELS)
def test_modules_of_flax(name):
    counts, kinds = read_model(flax.MODELS[name])
    assert {*counts} == {"right"}, kinds


def test_a_wrong_answer_is_counted_and_shown():
    def loss(params, x):
        return jnp.mean((jax.nn.relu(x @ params["up"]) @ params["down"]) ** 2)

    params = {"up": floats(4, 8), "down": floats(8, 3), "old": floats(3, 3)}
    answers = {"up": "oi", "down": "adamw", "old": "io"}
    counts, kinds = read_model(Model(lambda: (loss, params, (floats(2, 4),)), answers))
    assert counts == {"wrong": 1, "right": 1, "unused": 1}
    assert any("wrong up (4, 8): kernel, muon io; right is oi" in x for x in kinds)
