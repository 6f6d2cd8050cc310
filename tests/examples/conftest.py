"""The examples import each other by name, as a script's neighbours do."""

import pathlib
import sys

import pytest

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))


@pytest.fixture(autouse=True)
def broadcast(as_users_write):
    """Flax's layers add arrays of unlike numbers of axes."""


@pytest.fixture
def examples() -> pathlib.Path:
    """The folder of the examples."""
    return EXAMPLES
