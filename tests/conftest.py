"""Settings of the whole suite: several CPU devices, and one place for randomness."""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import chex
import jax
import numpy as np
import pytest


@pytest.fixture(autouse=True)
def count_traces_from_zero():
    """chex counts traces by the name of a function, over all tests."""
    chex.clear_trace_counter()


@pytest.fixture
def rng():
    """A seeded NumPy generator."""
    return np.random.default_rng(0)


@pytest.fixture
def x64():
    """Double precision for the time of one test."""
    with jax.enable_x64(True):
        yield
