"""Matrices of tests are small, and would be gathered rather than dealt out."""

import functools

import pytest

import jax_muon as jm


@pytest.fixture(autouse=True)
def small_matrices_are_dealt_out(monkeypatch):
    """Recipes deal out matrices of any size, as they do large ones."""
    dealing = functools.partial(jm.orthogonalize, small=0)
    monkeypatch.setattr("jax_muon.recipes.orthogonalize", dealing)
