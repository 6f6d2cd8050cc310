"""Scanned layers that are gathered one at a time in plain jit."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_muon as jm
from tests.mesh import losses
from tests.mesh.layouts import AUTO, EXPLICIT, mesh_of
from tests.mesh.sgd import SPECS, assert_gradients, drawn, make

pytestmark = pytest.mark.usefixtures("as_users_write")


@pytest.mark.parametrize(("kind", "keep"), [(AUTO, False), (EXPLICIT, True)])
def test_gradients_in_float64(kind, keep, x64):
    """On Auto axes by specs, on Explicit ones by types; "tp" stays where it is."""
    mesh = mesh_of(4, 2, names=("data", "tp"), kind=kind)
    params, batch = drawn()
    expected = jax.jit(jax.grad(losses.with_keys))(params, batch)
    specs = {"w": P(None, "data"), "b": P(None, "data")}
    if kind == AUTO:
        specs["w"] = P(None, "data", "tp")
    places = {"layers": specs, "head": P(), "scale": P()}
    put = lambda spec, x: jax.device_put(x, NamedSharding(mesh, spec))  # noqa: E731
    placed = jax.tree.map(put, places, params)
    scan = functools.partial(jm.scan_layers, mesh=mesh, axis="data", keep_gathered=keep)
    if kind == AUTO:
        scan = functools.partial(scan, specs=(specs, P()))

    gradient = jax.jit(jax.grad(functools.partial(losses.with_keys, scan=scan)))
    with jax.set_mesh(mesh):
        found = gradient(placed, put(P("data"), batch))
    chex.assert_trees_all_close(found, expected, rtol=0, atol=1e-12)
    for name, x in found["layers"].items():
        assert x.sharding.is_equivalent_to(placed["layers"][name].sharding, x.ndim)


def test_within_a_train_step(x64):
    """A plain scan, which the step looks into: the same model does for both."""
    scan = functools.partial(jm.scan_layers, mesh=mesh_of(4))
    step = make(functools.partial(losses.with_keys, scan=scan))
    assert assert_gradients(step, losses.with_keys, *drawn()) == {"head"}


def test_integers_under_one_spec():
    """They have no gradient, so they are gathered before the scan."""
    x, w = jnp.ones(8), jnp.linspace(0.5, 1.5, 24).reshape(3, 8)
    places = jnp.arange(24).reshape(3, 8) % 8

    def block(x, layer):
        return jnp.sin(x * layer["w"])[layer["places"]], None

    def loss(w, scan):
        return jnp.sum(scan(block, x, {"w": w, "places": places})[0])

    scan = functools.partial(jm.scan_layers, mesh=mesh_of(4), specs=P(None, "data"))
    found = jax.jit(jax.grad(functools.partial(loss, scan=scan)))(w)
    expected = jax.grad(functools.partial(loss, scan=jax.lax.scan))(w)
    np.testing.assert_allclose(found, expected, rtol=0, atol=5e-6)


def test_no_layers_at_all(x64):
    """A model of zero layers, which tests of other parts of a program have."""
    params, batch = drawn()
    params["layers"] = jax.tree.map(lambda w: w[:0], params["layers"])

    def loss(params, x, scan=jax.lax.scan):
        step = lambda y, w: (losses._layer(y, w), None)  # noqa: E731
        x, _ = scan(step, x * params["scale"], params["layers"])
        return jnp.mean(x @ params["head"])

    assert_gradients(make(loss), loss, params, batch)
    scan = functools.partial(jm.scan_layers, mesh=mesh_of(4), specs=SPECS["layers"])
    found = jax.jit(jax.grad(functools.partial(loss, scan=scan)))(params, batch)
    expected = jax.grad(loss)(params, batch)
    chex.assert_trees_all_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ((4, 8, 8), "layers at 'x' .* along the axis of layers"),
        ((), "layers at 'x' is a scalar; expected"),
    ],
)
def test_layers_that_cannot_be_scanned(shape, words):
    layers = {"w": jnp.ones((4, 8)), "x": jnp.ones(shape)}
    specs = {"w": P(), "x": P("data") if shape else P()}
    with pytest.raises(ValueError, match=words):
        jm.scan_layers(losses._layer, jnp.ones(8), layers, mesh_of(2), specs)
