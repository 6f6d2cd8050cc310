"""Steps of plain SGD on the losses of `losses`: the gradients that they used."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend.core import jaxprs_in_params
from jax.sharding import PartitionSpec as P

import jax_muon as jm
from tests.mesh import losses
from tests.mesh.layouts import AUTO, mesh_of

SPECS = {
    "layers": {"w": P(None, None, "data"), "b": P(None, "data")},
    "head": P("data"),
    "scale": P(),
}


def make(loss, *shape, specs=SPECS, names=("data", "fsdp"), kind=AUTO, **given):
    """A step of plain SGD, which moves parameters by their gradients."""
    mesh = mesh_of(*(shape or (4,)), names=names, kind=kind)
    given = {"min_size": 1, "donate": False} | given
    return jm.make_train_step(loss, optax.sgd(1.0), mesh, specs=specs, **given)


def gradients(step, params, batch):
    """Those that a step used, and its metrics."""
    after, _, metrics = step(*step.init(params), batch)
    assert step._jitted._cache_size() == 1
    moved = jax.tree.map(lambda p, q: np.array(p) - np.array(q), params, after)
    return moved, metrics


def drawn(dtype=jnp.float64):
    """Parameters and samples."""
    return losses.draw(dtype), losses.samples(dtype=dtype)


def assert_gradients(step, loss, params, batch, bound=1e-12):
    """Those of one device."""
    found, _ = gradients(step, params, batch)
    expected = jax.jit(jax.grad(loss))(params, batch)
    chex.assert_trees_all_close(found, expected, rtol=0, atol=bound)


def shapes_within(jaxpr):
    """Shapes and dtypes of all values of a program, and of those that are gathered."""
    found = [], []
    insides = [f for eqn in jaxpr.eqns for f in jaxprs_in_params(eqn.params)]
    for inside in map(shapes_within, insides):
        found[0].extend(inside[0])
        found[1].extend(inside[1])
    for eqn in jaxpr.eqns:
        kinds = [(v.aval.shape, str(v.aval.dtype)) for v in eqn.outvars]
        found[0].extend(kinds)
        found[1].extend(kinds if eqn.primitive.name == "all_gather" else [])
    return found


def program_of(step, batch, dtype=jnp.float32):
    """The shapes of the part of a step that computes gradients."""
    args = *step.abstract(losses.draw(dtype)), batch
    jaxpr = jax.make_jaxpr(lambda *args: step._step(*args))(*args).jaxpr
    (eqn,) = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "shard_map"][:1]
    return shapes_within(eqn.params["jaxpr"])
