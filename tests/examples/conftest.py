"""The examples import each other by name, as a script's neighbours do."""

import pathlib
import sys

import jax
import pytest

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))


@pytest.fixture(autouse=True, scope="module")
def as_users_write():
    """Models and Flax's layers add arrays of unlike numbers of axes."""
    with jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture
def examples() -> pathlib.Path:
    """The folder of the examples."""
    return EXAMPLES
