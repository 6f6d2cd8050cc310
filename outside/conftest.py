"""Settings of the tests in other people's packages: eight CPU devices, one seed.

`make test` does not collect this folder. `make test-outside` runs each folder of it in
an environment of its own, with the versions that its `requirements.txt` pins.
"""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np
import pytest


@pytest.fixture
def rng():
    """A seeded NumPy generator."""
    return np.random.default_rng(0)


@pytest.fixture
def x64():
    """Double precision for the time of one test."""
    import jax

    with jax.enable_x64(True):
        yield
