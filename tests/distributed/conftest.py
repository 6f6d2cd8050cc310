"""Settings of the tests on several devices."""

import jax
import pytest


@pytest.fixture(scope="module", autouse=True)
def compile_quickly():
    """LLVM does not optimize: machine code for many devices is most of these tests.

    XLA's own passes, which place collectives and divide work, are as ever.
    """
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
