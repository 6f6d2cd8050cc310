"""Matrices of tests are small, and would be gathered rather than sent to owners."""

import functools

import pytest

import jax_muon as jm


@pytest.fixture(autouse=True)
def owners_for_small_matrices(monkeypatch):
    """Recipes send matrices of any size to owners, as they do large ones."""
    owned = functools.partial(jm.orthogonalize, small=0)
    monkeypatch.setattr("jax_muon.recipes.orthogonalize", owned)
