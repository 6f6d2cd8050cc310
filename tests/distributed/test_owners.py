"""Sharded parameters give what one device gives, and travel as they should."""

import contextlib
import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jax_muon as jm
from tests.distributed import problems

P = PartitionSpec
BOTH = pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])

RECIPES = {
    "nanochat": jm.nanochat,
    "nanochat later": functools.partial(
        jm.nanochat, row_equilibration=True, renormalize=True, norm_factor=1.01
    ),
    "muon": functools.partial(jm.muon, max_norm=1.0),
    "normuon": jm.normuon,
    "moonlight": jm.moonlight,
    "teon": functools.partial(jm.teon, joins={"h_{i}/q": 2, "scan": 2}),
}
SHAPES = {
    "wte": (16, 24),
    "norm/scale": (24,),
    "h_0/q": (24, 24),
    "h_1/q": (24, 24),
    "h_2/q": (24, 24),
    "h_0/up": (24, 48),
    "h_0/down": (48, 24),
    "scan": (4, 24, 48),
    "experts/up": (8, 16, 8),
    "conv/kernel": (3, 3, 8, 16),
}


def mesh_of(*shape, kind=AxisType.Explicit):
    names = ("a", "b", "c")[: len(shape)]
    count = int(np.prod(shape))
    return jax.make_mesh(
        shape, names, axis_types=(kind,) * len(shape), devices=jax.devices()[:count]
    )


@functools.cache
def problem():
    """Parameters, and gradients for five steps."""
    rng = np.random.default_rng(0)

    def draw(scale):
        return {
            path: np.float32(scale * rng.standard_normal(shape))
            for path, shape in SHAPES.items()
        }

    return draw(0.1), [draw(1.0) for _ in range(5)]


def train(tx, params, grads, place=lambda tree: tree, mesh=None):
    params = place(params)
    explicit = mesh is not None and AxisType.Explicit in mesh.axis_types
    # JAX asks for the mesh of what it makes from shapes alone, if axes are Explicit.
    with jax.set_mesh(mesh) if explicit else contextlib.nullcontext():
        state = jax.jit(tx.init)(params)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for g in grads:
        params, state = step(params, state, place(g))
    if mesh is None or mesh.size > 1:  # JAX rewrites specs on a mesh of one device
        assert step._cache_size() == 1
    return params, state


@functools.cache
def expected(name):
    tx = RECIPES[name](0.02, steps=2, dtype="float32", adamw_eps=1e-6)
    params, grads = problem()
    return train(tx, jax.tree.map(jnp.asarray, params), grads)[0]


def placing(mesh, specs):
    def spec(path, x):
        """As JAX writes it: with an entry for each axis, or none where it is Auto."""
        given = specs.get(path, P())
        if AxisType.Explicit in mesh.axis_types:
            return P(*given, *[None] * (x.ndim - len(given)))
        while given and given[-1] is None:
            given = P(*given[:-1])
        return given

    def place(tree):
        return {
            path: jax.device_put(x, NamedSharding(mesh, spec(path, x)))
            for path, x in tree.items()
        }

    return place


def check(name, mesh, specs, small=0):
    """Every recipe, placed like this, ends where one device does."""
    params, grads = problem()
    given = {}
    if AxisType.Auto in mesh.axis_types:
        given = {"mesh": mesh, "specs": lambda path: specs.get(path, P())}
    tx = RECIPES[name](
        0.02, steps=2, dtype="float32", adamw_eps=1e-6, small=small, **given
    )
    result, state = train(tx, params, grads, placing(mesh, specs), mesh)
    start = problem()[0]
    assert problems.distance(result, expected(name), start) < 5e-6
    return result, state


FSDP = {
    path: P(*[None] * (len(shape) - 2), "a") if len(shape) > 1 else P("a")
    for path, shape in SHAPES.items()
} | {"conv/kernel": P(None, None, "a")}


@BOTH
@pytest.mark.parametrize("devices", [1, 2, 4, 8])
def test_fsdp(kind, devices):
    check("nanochat", mesh_of(devices, kind=kind), FSDP)


@BOTH
@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_with_both_axes_divided(kind, name):
    """(2, 2) over in and out, repeated over 2: each matrix is computed once."""
    specs = {
        path: P(*[None] * (len(shape) - 2), "a", "b") if len(shape) > 1 else P("a")
        for path, shape in SHAPES.items()
    }
    check(name, mesh_of(2, 2, 2, kind=kind), specs)


MESHES = [(8,), (4, 2), (2, 2, 2)]


@st.composite
def placements(draw):
    """A mesh, and for each parameter mesh axes drawn onto its axes, where they fit."""
    shape = draw(st.sampled_from(MESHES))
    sizes = dict(zip("abc", shape, strict=False))
    specs = {}
    for path, leaf in SHAPES.items():
        entries = [()] * len(leaf)
        for name in draw(st.permutations(list(sizes))):
            axis = draw(st.integers(-1, len(leaf) - 1))
            devices = sizes[name] * int(np.prod([sizes[n] for n in entries[axis]]))
            if axis >= 0 and leaf[axis] % devices == 0:
                entries[axis] = (*entries[axis], name)
        specs[path] = P(*(entry or None for entry in entries))
    return shape, specs, draw(st.sampled_from([0, 500, 65536]))


@BOTH
@given(drawn=placements(), name=st.sampled_from(list(RECIPES)))
@settings(max_examples=int(os.environ.get("N", 4)), deadline=None, derandomize=True)
def test_any_placement(kind, drawn, name):
    """All placements of all parameters, on all meshes, for every recipe."""
    shape, specs, small = drawn
    check(name, mesh_of(*shape, kind=kind), specs, small)
