"""Names that the examples in docstrings use without importing them."""

import importlib

import pytest

NAMES = {
    "jax": "jax",
    "jnp": "jax.numpy",
    "optax": "optax",
    "jm": "jax_muon",
}


@pytest.fixture(scope="session", autouse=True)
def names_of_examples(doctest_namespace):
    """Imported late: tests/conftest.py sets the number of devices before."""
    for name, module in NAMES.items():
        doctest_namespace[name] = importlib.import_module(module)
