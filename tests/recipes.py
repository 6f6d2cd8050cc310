"""Every recipe on the toy trees of the tests, for tests that hold for all of them."""

import functools

import jax_muon as jm
from tests.matrices import toy

PLAIN = functools.partial(jm.adamw, 3e-4, weight_decay=0.0)  # of the rest


def given(recipe, learning_rate, adamw, **settings):
    """A recipe with what it needs, which may be given again by name."""
    settings = {"adamw": adamw, "matrices": toy} | settings
    return functools.partial(recipe, learning_rate=learning_rate, **settings)


NANOCHATS, JORDANS = PLAIN(b1=0.8, b2=0.95, eps=1e-10), PLAIN(b2=0.95, eps=1e-10)
MOONLIGHTS = jm.adamw(1e-3, b2=0.95, weight_decay=0.1)
PAIRS = functools.partial(toy, joins={"*{i}/q": 2})
RECIPES = {
    "nanochat": given(jm.nanochat, 0.02, NANOCHATS),
    "nanochat later": given(jm.nanochat, 0.02, NANOCHATS, version="2026-07"),
    "muon": given(jm.muon, 0.02, JORDANS),
    "normuon": given(jm.normuon, 1e-3, PLAIN(b2=0.95)),
    "moonlight": given(jm.moonlight, 1e-3, MOONLIGHTS),
    "teon": given(jm.teon, 0.02, PLAIN(b2=0.95), matrices=PAIRS),
    "muonh": given(jm.muonh, 0.02, PLAIN(b2=0.95)),
}
NAMES = tuple({recipe.func.__name__: None for recipe in RECIPES.values()})
# The smallest tree in which every recipe has something to do: TEON joins q and q.
SHAPES = {"wte": (5, 4), "0": {"q": (4, 6)}, "1": {"q": (4, 6)}, "bias": (6,)}
ON_SPHERES = ("muonh",)  # it takes no weight decay
