"""Every recipe, for tests that hold for all of them."""

import functools

import jax_muon as jm

RECIPES = {
    "nanochat": jm.nanochat,
    "nanochat later": functools.partial(jm.nanochat, edition="2026-08"),
    "muon": jm.muon,
    "normuon": jm.normuon,
    "moonlight": jm.moonlight,
    "teon": jm.teon,
    "muonh": jm.muonh,
}
ON_SPHERES = ("muonh",)  # it takes no weight decay
