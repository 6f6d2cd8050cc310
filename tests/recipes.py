"""Every recipe on the toy trees of the tests, for tests that hold for all of them."""

import functools

import jax_muon as jm
from tests.matrices import toy

RECIPES = {
    "nanochat": functools.partial(jm.nanochat, matrices=toy),
    "nanochat later": functools.partial(jm.nanochat, version="2026-07", matrices=toy),
    "muon": functools.partial(jm.muon, matrices=toy),
    "normuon": functools.partial(jm.normuon, matrices=toy),
    "moonlight": functools.partial(jm.moonlight, matrices=toy),
    "teon": functools.partial(
        jm.teon, matrices=functools.partial(toy, joins={"*{i}/q": 2})
    ),
    "muonh": functools.partial(jm.muonh, matrices=toy),
}
# The smallest tree in which every recipe has something to do: TEON joins q and q.
SHAPES = {"wte": (5, 4), "0": {"q": (4, 6)}, "1": {"q": (4, 6)}, "bias": (6,)}
ON_SPHERES = ("muonh",)  # it takes no weight decay
