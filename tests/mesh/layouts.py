"""Recipes, layouts and runs that the tests on several devices share.

Layouts are compared with a run on one device, which is made once for each recipe,
problem and dtype, however many layouts there are.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_muon as jm
from benchmarks.schedule.hlo import Module
from tests import recipes
from tests.mesh import problems
from tests.reading import reader

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit


def without_decay(recipe):
    """A recipe on spheres, which takes no weight decay, called like the others."""
    return lambda *args, weight_decay, **settings: recipe(*args, **settings)


RECIPES = recipes.RECIPES | {
    "teon": functools.partial(
        jm.teon,
        matrices=reader(
            joins={"*_{i}/q": 2, "scan/mlp": 2}, splits={"*/up": jm.Split(2)}
        ),
    ),
    **{name: without_decay(recipes.RECIPES[name]) for name in recipes.ON_SPHERES},
}


ADAMW = optax.adamw(3e-4, 0.8, 0.95, 1e-6, weight_decay=0.0)


def recipe(name="nanochat", **settings):
    """A recipe in float32, whose AdamW does not turn rounding noise into steps.

    At eps=1e-10 it would; and one flip of a cautious mask is 1e-3 by itself.
    """
    given = {"dtype": "float32", "adamw": ADAMW, "weight_decay": 0.0, "steps": 2}
    return RECIPES[name](falling_rate, **given | settings)


def rates_injected():
    """Every number of nanochat, and of AdamW within, is an array."""
    given = {"dtype": "float32", "weight_decay": 0.0, "steps": 2}
    adamw = optax.inject_hyperparams(optax.adamw)(3e-4, 0.8, 0.95, 1e-6)
    return optax.inject_hyperparams(jm.nanochat, static_args="steps")(
        adamw=adamw, **given
    )


# Functions of `on`, which puts an optimizer on a mesh, and of nanochat.
COMPOSITIONS = {
    "inside a chain": lambda on, tx: optax.chain(
        optax.clip_by_global_norm(1.0), on(tx)
    ),
    "around a chain": lambda on, tx: on(
        optax.chain(optax.clip_by_global_norm(10.0), tx)
    ),
    "inside MultiSteps": lambda on, tx: optax.MultiSteps(on(tx), 2),
    "around MultiSteps": lambda on, tx: on(
        optax.MultiSteps(tx, 2).gradient_transformation()
    ),
    "inside a guard": lambda on, tx: jm.skip_nonfinite(on(tx)),
    "around injected rates": lambda on, tx: on(rates_injected()),
    "injected rates alone": lambda on, tx: rates_injected(),
}


def optimizer(name, on, dtype="float32"):
    """A recipe that `on` puts on a mesh, or nanochat in one of the compositions."""
    if name in COMPOSITIONS:
        return COMPOSITIONS[name](on, recipe(dtype=dtype))
    return on(recipe(name, dtype=dtype))


def falling_rate(count):
    """From 0.02 to 0.01 in 10 steps, in float64 where that is on.

    `optax.linear_schedule` is float32 always, of which programs round the last bit
    differently.
    """
    return 0.02 - 0.001 * jnp.minimum(count, 10).astype(float)


def mesh_of(*shape, names=("data", "fsdp", "tp"), kind=AUTO):
    """A mesh of as many devices as its axes ask for."""
    count = int(np.prod(shape))
    return jax.make_mesh(
        shape,
        names[: len(shape)],
        axis_types=(kind,) * len(shape),
        devices=jax.devices()[:count],
    )


def fitting(mesh, *axes, shapes=problems.PROBLEMS["mixed"]):
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

    def specs(params):
        return {path: spec(shapes[path]) for path in params}

    return specs


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
    """A mesh, specs by path, and `divide`, as `on_mesh` takes them."""

    mesh: jax.sharding.Mesh
    specs: Callable
    divide: str | tuple[str, ...]

    def on(self, tx):
        """An optimizer on the mesh; types show the specs on Explicit axes."""
        explicit = AxisType.Explicit in self.mesh.axis_types
        specs = None if explicit else self.specs
        return jm.on_mesh(tx, self.mesh, specs, self.divide, min_size=1)

    def place(self, tree):
        """Arrays on the mesh, which may be donated."""
        specs = self.specs(tree)
        shardings = {path: NamedSharding(self.mesh, specs[path]) for path in tree}
        return jax.device_put(jax.tree.map(np.array, tree), shardings)


def layout(name, kind=AUTO, shapes=problems.PROBLEMS["mixed"]):
    """One of the layouts."""
    shape, axes, divide = LAYOUTS[name]
    mesh = mesh_of(*shape, kind=kind)
    return Layout(mesh, fitting(mesh, *axes, shapes=shapes), divide)


@functools.cache
def one_device(name, problem="mixed", steps=20, dtype="float32"):
    """Start, end and losses of an optimizer on one device."""
    params, weights = problems.draw(problem, dtype)
    loss, data = problems.loss_of(weights), problems.batches(steps, dtype=dtype)
    tx = optimizer(name, lambda tx: tx, dtype)
    result, _, losses = problems.single_device(tx, loss, params, data)
    return params, jax.device_get(result), losses


def train_on_mesh(name, where, *, kind=AUTO, steps=20, dtype="float32"):
    """Train "mixed" by `on_mesh` in plain jit; the parameters and losses."""
    mesh, specs, _ = found = layout(where, kind)
    params, weights = problems.draw("mixed", dtype)
    tx, start = optimizer(name, found.on, dtype), found.place(params)
    step = problems.plain_step(tx, problems.loss_of(weights))
    data = problems.batches(steps, dtype=dtype)
    # The user's own loss names no axes of the mesh; on Explicit ones JAX asks for them.
    within = kind == EXPLICIT or name in COMPOSITIONS
    with jax.set_mesh(mesh) if within else contextlib.nullcontext():
        params, state, losses = problems.run(step, start, jax.jit(tx.init)(start), data)
    # Sums of MultiSteps itself are outside; on Auto axes JAX reshards them once.
    again = name == "inside MultiSteps" and kind == AUTO
    assert step._cache_size() == 1 + again
    for path, spec in specs(params).items():
        x = params[path]
        assert x.sharding.is_equivalent_to(NamedSharding(mesh, spec), x.ndim)
    assert_bit_identical_on_devices((params, state))
    return params, losses


def assert_verified(tx, params):
    """Updates and state of an optimizer in `on_mesh` are those of one device."""
    found = jm.verify(tx, params, steps=3)
    assert found.ok, found
    assert max(difference for difference, _ in found.differences.values()) < 5e-6
    return found


def assert_bit_identical_on_devices(tree):
    """Devices that repeat a piece have the same bits."""
    for leaf in jax.tree.leaves(tree):
        seen = {}
        for shard in leaf.addressable_shards:
            piece = np.asarray(shard.data)
            first = seen.setdefault(str(shard.index), piece)
            np.testing.assert_array_equal(first, piece)


def make_step(
    where="ZeRO-2 on 4", tx=None, kind=AUTO, loss=None, problem="mixed", **given
):
    """A step for a layout, whose batches go over the axes that repeat parameters."""
    shape, axes, divide = LAYOUTS[where]
    mesh = mesh_of(*shape, kind=kind)
    batch_axes = {"FSDP": "fsdp", "HSDP": ("data", "fsdp")}.get(where, divide or "data")
    if loss is None:
        loss = problems.loss_of(problems.draw(problem)[1])
    return jm.make_train_step(
        loss,
        recipe() if tx is None else tx,
        mesh,
        axis=batch_axes,
        specs=fitting(mesh, *axes) if axes else None,
        min_size=given.pop("min_size", 1),
        **given,
    )


def train_step_run(step, params, data):
    """Train by a `TrainStep`; parameters, state and losses."""
    params, state, losses = problems.run(step, *step.init(params), data)
    assert step._jitted._cache_size() == 1
    assert_bit_identical_on_devices((params, state))
    return params, state, losses


def compiled(step, args):
    """The program that XLA compiles."""
    text = jax.jit(step).lower(*args).compile().as_text()
    assert "collective-permute" not in text  # which is no transfer of `Module`
    return Module.parse(text)
