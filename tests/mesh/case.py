"""One harness for tests on several devices: problem, layout, one device, distance.

An optimizer on a mesh is compared array by array, by `verify`; a train step by the run
that it makes of a problem. Gradients of the problems are almost independent of the
parameters, and every sample has its own: what a layout gets wrong shows, what float32
rounds differently does not grow.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_muon as jm
from tests.mesh import losses
from tests.recipes import RECIPES

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
BOUND = 5e-6  # of a distance in float32: rounding alone

# --- problems -------------------------------------------------------------------------

FEATURES = 24
PROBLEMS = {
    "mixed": {
        "wte": (67, 24),
        "big_bias": (1030,),
        "norm/scale": (24,),
        "h_0/q": (24, 24),
        "h_1/q": (24, 24),
        "h_2/q": (24, 24),
        "h_0/up": (24, 48),
        "h_0/down": (48, 24),
        "scan/mlp": (3, 24, 48),
        "Conv_0/kernel": (3, 3, 4, 6),
    },
    "one matrix only": {"w": (9, 14)},
    "no matrices": {"wte": (130, 8), "bias": (7,), "scale": (5,)},
}


def gpt(layers=8, width=32):
    """Shapes of a GPT's matrices, as many of each as eight devices divide."""
    block = dict.fromkeys("qkvo", (width, width))
    block |= {"up": (width, 4 * width), "down": (4 * width, width)}
    return {
        f"{i}/{name}": jax.ShapeDtypeStruct(shape, "float32")
        for i in range(layers)
        for name, shape in block.items()
    }


def draw(name, dtype=jnp.float32):
    """Parameters and the tensors that make each leaf's gradient from a sample."""
    rng, tree, weights = np.random.default_rng(1), {}, {}
    for path, shape in PROBLEMS[name].items():
        tree[path] = jnp.asarray(rng.standard_normal(shape) * 0.1, dtype)
        size = (FEATURES, *shape)
        weights[path] = jnp.asarray(rng.standard_normal(size), dtype)
    return tree, weights


def batches(steps, size=16, dtype=jnp.float32):
    """One batch of samples (size, FEATURES) for each step."""
    rng = np.random.default_rng(2)
    return jnp.asarray(rng.standard_normal((steps, size, FEATURES)), dtype)


def loss_of(weights):
    """Mean over samples x of the sum over leaves of <p, x . weights> + |p|^2 / 20."""

    def loss(params, batch):
        total = 0.0
        for path, p in params.items():
            slope = jnp.tensordot(batch, weights[path], axes=1)
            axes = tuple(range(1, slope.ndim))
            total += jnp.mean(jnp.sum(slope * p[None], axis=axes)) + jnp.sum(p * p) / 20
        return total

    return loss


# --- optimizers -----------------------------------------------------------------------

ADAMW = optax.adamw(3e-4, 0.8, 0.95, 1e-6, weight_decay=0.0)


def falling_rate(count):
    """From 0.02 to 0.01 in 10 steps, in float64 where that is on.

    `optax.linear_schedule` is float32 always, of which programs round the last bit
    differently.
    """
    return 0.02 - 0.001 * jnp.minimum(count, 10).astype(float)


def recipe(name="nanochat", **settings):
    """A recipe in float32, whose AdamW does not turn rounding noise into steps.

    At eps=1e-10 it would; and one flip of a cautious mask is 1e-3 by itself.
    """
    given = {"dtype": "float32", "adamw": ADAMW, "weight_decay": 0.0}
    given |= {"learning_rate": falling_rate, "ns_steps": 2}
    return RECIPES[name](**given | settings)


# --- layouts --------------------------------------------------------------------------


def mesh_of(*shape, names=("data", "fsdp", "tp"), kind=AUTO):
    """A mesh of as many devices as its axes ask for."""
    return jax.make_mesh(
        shape,
        names[: len(shape)],
        axis_types=(kind,) * len(shape),
        devices=jax.devices()[: int(np.prod(shape))],
    )


def fitting(mesh, *axes, shapes=PROBLEMS["mixed"]):
    """A function of the parameters: mesh axes on the last axes that they divide.

    As JAX writes them, on Auto axes without None at the end, since another spelling
    would compile again.
    """

    def spec(shape):
        entries = [None] * len(shape)
        for axis, name in zip(range(-len(axes), 0), axes, strict=True):
            if len(shape) >= -axis and name and shape[axis] % mesh.shape[name] == 0:
                entries[axis] = name
        while AxisType.Auto in mesh.axis_types and entries and entries[-1] is None:
            entries.pop()
        return P(*entries)

    return lambda params: {path: spec(shapes[path]) for path in params}


# Mesh, specs as arguments of `fitting`, and `divide`.
LAYOUTS = {
    "ZeRO-2 on 4": ((4,), (), "data"),
    "ZeRO-2 on 8": ((8,), (), "data"),
    "ZeRO-2 over two axes": ((2, 4), (), ("data", "fsdp")),
    "FSDP": ((1, 4), ("fsdp", None), ()),
    "HSDP": ((2, 4), ("fsdp", None), "data"),
    "FSDP x TP": ((1, 4, 2), ("fsdp", "tp"), ()),
    "ZeRO-2 x FSDP x TP": ((2, 2, 2), ("fsdp", "tp"), "data"),
    "columns of FSDP": ((1, 8), (None, "fsdp"), ()),
}


class Layout(NamedTuple):
    """A mesh, specs by path, and `divide` of `on_mesh`."""

    mesh: jax.sharding.Mesh
    specs: Callable
    divide: str | tuple[str, ...]

    def on(self, tx):
        """An optimizer on the mesh; types show the specs on Explicit axes."""
        explicit = AxisType.Explicit in self.mesh.axis_types
        where = self.mesh if explicit else at(self.mesh, self.specs)
        return jm.on_mesh(tx, where, divide=self.divide, min_size=1)

    def place(self, tree):
        """Arrays on the mesh."""
        return put(tree, self.specs(tree), self.mesh)


def layout(name, kind=AUTO, shapes=PROBLEMS["mixed"]):
    """One of the layouts."""
    shape, axes, divide = LAYOUTS[name]
    mesh = mesh_of(*shape, kind=kind)
    return Layout(mesh, fitting(mesh, *axes, shapes=shapes), divide)


def at(mesh, specs):
    """Shardings: of a spec, of a tree of them, or of a function of the parameters."""
    if callable(specs):
        return lambda params: at(mesh, specs(params))
    return jax.tree.map(functools.partial(NamedSharding, mesh), specs)


def put(tree, specs, mesh):
    """Arrays on a mesh, by a tree of specs or one for all."""
    place = lambda spec, x: jax.device_put(x, NamedSharding(mesh, spec))  # noqa: E731
    if isinstance(specs, P):
        return jax.tree.map(functools.partial(place, specs), tree)
    return jax.tree.map(place, specs, tree)


# --- runs -----------------------------------------------------------------------------


def run(step, params, state, data):
    """Parameters, state and losses of a loop over batches."""
    values = []
    for batch in data:
        params, state, value = step(params, state, batch)
        values.append(float(value["loss"] if isinstance(value, dict) else value))
    return params, state, values


def plain_step(tx, loss):
    """A jitted step of a user who knows nothing but optax."""

    @jax.jit
    def step(params, state, batch):
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return step


def alone(tx, loss, params, data):
    """A plain run on one device: parameters, state, losses."""
    return run(plain_step(tx, loss), params, tx.init(params), data)


@functools.cache
def one_device(problem="mixed", steps=5):
    """Start, end and losses of a recipe on one device."""
    params, weights = draw(problem)
    result, _, values = alone(recipe(), loss_of(weights), params, batches(steps))
    return params, jax.device_get(result), values


def make_step(
    where="ZeRO-2 on 4", tx=None, kind=AUTO, loss=None, problem="mixed", **given
):
    """A train step for a layout, whose batches go over all axes."""
    shape, axes, _ = LAYOUTS[where]
    mesh = mesh_of(*shape, kind=kind)
    loss = loss or loss_of(draw(problem)[1])
    if given.pop("divided", False):  # also between steps
        axes = (None, mesh.axis_names[-1])
    specs = given.pop("specs", None) or (fitting(mesh, *axes) if axes else P())
    how = {"divide": mesh.axis_names, "min_size": given.pop("min_size", 1)}
    how["gather_dtype"] = given.pop("gather_dtype", None)
    tx = jm.on_mesh(tx or recipe(), at(mesh, specs), **how)
    return jm.make_train_step(loss, tx, **given)


def train_step_run(step, params, data):
    """Train by a `TrainStep`; parameters, state and losses."""
    params, state, values = run(step, *step.init(params), data)
    assert step._jitted._cache_size() == 1
    assert_bit_identical_on_devices((params, state))
    return params, state, values


# --- gradients of the losses in `losses` ----------------------------------------------

LAYERS = {"w": P(None, None, "data"), "b": P(None, "data"), "keys": P()}
SPECS = {"layers": LAYERS, "head": P("data"), "scale": P()}


def scanning(loss, mesh=None, specs=LAYERS, **how):
    """A loss whose scan is `scan_layers`."""
    mesh = mesh or mesh_of(4)
    shardings = None if specs is None else at(mesh, specs)
    scan = functools.partial(jm.scan_layers, shardings=shardings, **how)
    return functools.partial(loss, scan=scan)


def sgd_step(loss, *shape, specs=SPECS, **given):
    """A step of plain SGD, which moves parameters by their gradients."""
    mesh = mesh_of(*(shape or (4,)))
    where, divide = at(mesh, specs), mesh.axis_names
    tx = jm.on_mesh(optax.sgd(1.0), where, divide=divide, min_size=1)
    return jm.make_train_step(loss, tx, **{"donate": False} | given)


def gradients(step, params, batch):
    """The gradients that a step used."""
    after, _, _ = step(*step.init(params), batch)
    assert step._jitted._cache_size() == 1
    return jax.tree.map(lambda p, q: np.array(p) - np.array(q), params, after)


def drawn(dtype=jnp.float64):
    """Parameters and samples."""
    return losses.draw(dtype), losses.samples(dtype=dtype)


def assert_gradients(found, loss, args, bound=1e-12):
    """The gradients are those of one device."""
    expected = jax.jit(jax.grad(loss))(*args)
    chex.assert_trees_all_close(found, expected, rtol=0, atol=bound)


# --- distances ------------------------------------------------------------------------


def distance(a, b, start):
    """|a - b| relative to the distance travelled, |b - start|, over a whole tree."""
    a, b, start = (
        jax.tree.map(lambda x: np.asarray(x, np.float64), tree)
        for tree in (a, b, start)
    )
    norms = [optax.tree.norm(optax.tree.sub(x, b)) for x in (a, start)]
    return float(norms[0] / norms[1])


def assert_same(result, values, expected):
    """Parameters and losses of a run are those of one device.

    Losses to the same bound of the largest: near zero they are sums of large terms.
    """
    start, params, wanted = expected
    assert distance(result, params, start) < BOUND
    largest = np.abs(wanted).max()
    np.testing.assert_allclose(values, wanted, rtol=0, atol=BOUND * largest)


def assert_verified(tx, params, **extra_args):
    """Updates and state of an optimizer in `on_mesh` are those of one device."""
    assert_close(jm.verify(tx, params, **extra_args))


def assert_close(found, bound=BOUND):
    """Devices with one shard have the same bits, and arrays differ by rounding."""
    assert found.ok, found
    assert max(apart for apart, _ in found.differences.values()) < bound, found


def assert_bit_identical_on_devices(tree):
    """Devices that repeat a piece have the same bits."""
    for leaf in jax.tree.leaves(tree):
        seen = {}
        for shard in leaf.addressable_shards:
            piece = np.asarray(shard.data)
            first = seen.setdefault(str(shard.index), piece)
            np.testing.assert_array_equal(first, piece)
