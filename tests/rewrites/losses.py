"""The loss in another form: wrapped, of several batches, of an ensemble, elsewhere."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import PartitionSpec as P

from tests.rewrites.case import (
    REWRITES,
    Case,
    Rewrite,
    S,
    dataclasses,
    has_samples,
    is_float,
    of_samples,
    only,
    register,
)

# --- one call of it -------------------------------------------------------------------


def of_loss(function):
    """A rewrite whose loss is `function(loss)`, of the same arguments."""
    return lambda case: dataclasses.replace(case, loss=function(only(case.loss)))


def of_value(function):
    """A rewrite whose loss is `function(its value, the parameters)`."""

    def wrap(loss):
        return lambda p, *args: function(loss(p, *args), p)

    return of_loss(wrap)


def floats(p):
    return [w for w in jax.tree.leaves(p) if is_float(w)]


def zero(loss, *args):
    """A zero of the loss's dtype."""
    return jnp.zeros((), jax.eval_shape(loss, *args).dtype)


def with_own_vjp(loss):
    function = jax.custom_vjp(lambda p, args: loss(p, *args))

    def forward(p, args):
        y, back = jax.vjp(lambda p: loss(p, *args), p)
        return y, (back, args)

    function.defvjp(forward, lambda kept, g: (*kept[0](g), None))
    return lambda p, *args: function(p, args)


def with_own_jvp(loss):
    function = jax.custom_jvp(lambda y: y)
    function.defjvp(lambda primals, tangents: (primals[0], tangents[0]))
    return lambda *args: function(loss(*args))


def with_gradient(loss):
    def new(p, *args):
        y, grads = jax.value_and_grad(loss)(p, *args)
        return y + 0 * optax.global_norm(grads)

    return new


def after_a_step(loss):
    def new(p, *args):
        grads = jax.grad(loss)(p, *args)
        return loss(jax.tree.map(lambda w, g: w - 0.0 * g, p, grads), *args)

    return new


def with_metrics(loss):
    def new(p, *args):
        y, first = loss(p, *args), floats(p)[0].ravel()
        ema = jax.tree.map(lambda w: 0.9 * w, p)
        metrics = {"ema": ema, "best": jnp.argmax(first), "sorted": jnp.sort(first)}
        return y, metrics | {"loss": y, "none": None, "n": 3}

    return new


def along_a_direction(loss):
    def new(p, *args):
        def of_scale(s):
            return loss(jax.tree.map(lambda w: w * s if is_float(w) else w, p), *args)

        return jax.jvp(of_scale, (1.0,), (1.0,))[0]

    return new


def of_both(other):
    """The mean of the loss and the loss of another tree of parameters."""
    return lambda loss: lambda p, *args: (loss(p, *args) + loss(other(p), *args)) / 2


def in_bfloat16(loss):
    def narrow(tree):
        return jax.tree.map(
            lambda w: w.astype(jnp.bfloat16) if is_float(w) else w, tree
        )

    return lambda p, *args: loss(narrow(p), *narrow(args))


def in_cond(loss):
    """Under a condition that a constant decides."""
    return lambda *args: lax.cond(jnp.ones(()) > 0, loss, loss, *args)


def in_fori_loop(loss):
    return lambda *args: lax.fori_loop(
        0, 1, lambda _, y: y + loss(*args), zero(loss, *args)
    )


def in_while_loop(loss):
    return lambda *args: lax.while_loop(
        lambda c: c[0] < 1,
        lambda c: (c[0] + 1, c[1] + loss(*args)),
        (0, zero(loss, *args)),
    )[1]


def carried_by_a_loop(loss):
    return lambda p, *args: lax.fori_loop(
        0, 1, lambda _, c: (c[0], c[1] + loss(c[0], *args)), (p, zero(loss, p, *args))
    )[1]


register(
    "loss",
    {
        "jit": jax.jit,
        "checkpoint": jax.checkpoint,
        "custom_vjp": with_own_vjp,
        "custom_jvp": with_own_jvp,
        "has_aux": with_metrics,
        "a gradient inside": with_gradient,
        "a gradient of checkpoint inside": lambda f: with_gradient(jax.checkpoint(f)),
        "a step inside": after_a_step,
        "a vjp inside": lambda f: lambda p, *args: jax.vjp(lambda p: f(p, *args), p)[0],
        "a jvp inside": along_a_direction,
        "added to one of a frozen copy": of_both(lax.stop_gradient),
        "cond of equal branches": in_cond,
        "fori_loop of one turn": in_fori_loop,
        "while_loop of one turn": in_while_loop,
        "parameters carried by a loop": carried_by_a_loop,
        "vmap without an axis": lambda f: (
            lambda *args: jax.vmap(lambda s: f(*args) * s)(jnp.ones(3)).mean()
        ),
        "in bfloat16": in_bfloat16,
    },
    of_loss,
)
register(
    "loss",
    {
        "L2": lambda y, p: y + 0 * sum(jnp.sum(w**2) for w in floats(p)),
        "a norm of all": lambda y, p: y + 0 * optax.global_norm(floats(p)),
        "L2 by products": lambda y, p: y + 0 * sum(jnp.vdot(w, w) for w in floats(p)),
        "orthogonality": lambda y, p: (
            y + 0 * sum(jnp.sum((w.T @ w - 1) ** 2) for w in floats(p) if w.ndim == 2)
        ),
        "the largest": lambda y, p: (
            y + 0 * sum(lax.top_k(w.ravel(), 1)[0].sum() for w in floats(p) if w.ndim)
        ),
        "where finite": lambda y, p: jnp.where(jnp.isfinite(y), y, 0),
    },
    of_value,
)

# --- several batches, and each sample -------------------------------------------------


def rows_of(args, moving):
    return [x for x, moves in zip(jax.tree.leaves(args), moving, strict=True) if moves]


def with_rows(args, moving, rows):
    """The arguments, with other leaves in the places of those that move."""
    leaves, tree = jax.tree.flatten(args)
    rows = iter(rows)
    pairs = zip(leaves, moving, strict=True)
    return tree.unflatten([next(rows) if moves else x for x, moves in pairs])


def of_batches(count):
    """The loss of several batches: `combine(one, p, rows)` of stacked arguments."""

    def rewrite(combine):
        def change(case: Case):
            moving = has_samples(case)
            if not any(moving):
                return None
            stack = lambda x: S((count, *x.shape), x.dtype)  # noqa: E731

            def loss(p, *args):
                def one(p, rows):
                    return only(case.loss)(p, *with_rows(args, moving, rows))

                return combine(one, p, rows_of(args, moving))

            args = of_samples(case, case.args, stack)
            return dataclasses.replace(case, loss=loss, args=args)

        return change

    return rewrite


def scanned(one, p, rows):
    step = lambda y, row: (y + one(p, row), None)  # noqa: E731
    return lax.scan(step, zero(one, p, [x[0] for x in rows]), rows)[0]


def accumulated(one, p, rows):
    def step(carry, row):
        y, grads = jax.value_and_grad(one)(p, row)
        return (carry[0] + y, jax.tree.map(jnp.add, carry[1], grads)), None

    start = zero(one, p, [x[0] for x in rows]), jax.tree.map(jnp.zeros_like, p)
    return lax.scan(step, start, rows)[0][0]


def vmapped_gradients(one, p, rows):
    y, grads = jax.vmap(lambda row: jax.value_and_grad(one)(p, row))(rows)
    return y.mean() + 0 * optax.global_norm(grads)


def sharded(one, p, rows):
    devices = jax.devices()[: len(rows[0])]
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((len(devices),), ("data",), auto, devices=devices)

    def local(p, rows):
        return lax.pmean(one(p, [x[0] for x in rows]), "data")

    specs = {"in_specs": (P(), P("data")), "out_specs": P(), "check_vma": False}
    return jax.shard_map(local, mesh=mesh, **specs)(p, rows)


BATCHES = {
    "scan": scanned,
    "vmap": lambda one, p, rows: jax.vmap(lambda row: one(p, row))(rows).mean(),
    "fori_loop": lambda one, p, rows: lax.fori_loop(
        0,
        2,
        lambda i, y: y + one(p, [x[i] for x in rows]),
        zero(one, p, [x[0] for x in rows]),
    ),
    "Python": lambda one, p, rows: sum(one(p, [x[i] for x in rows]) for i in range(2)),
    "gradients accumulated": accumulated,
    "gradients by vmap": vmapped_gradients,
}
register("batches", BATCHES, of_batches(2))
register("batches", {"vmap of one": BATCHES["vmap"]}, of_batches(1))
register("batches", {"eight devices": sharded}, of_batches(8))


def of_each_sample(combine):
    """The mean of the losses of batches of one sample, `combine(one, rows)`."""

    def change(case: Case):
        moving = has_samples(case)
        if not any(moving) or rows_of(case.args, moving)[0].shape[0] == 1:
            return None

        def loss(p, *args):
            def one(rows):
                batch = with_rows(args, moving, [x[None] for x in rows])
                return only(case.loss)(p, *batch)

            return combine(one, rows_of(args, moving))

        return dataclasses.replace(case, loss=loss)

    return change


register(
    "samples",
    {
        "vmap": lambda one, rows: jax.vmap(one)(rows).mean(),
        "map": lambda one, rows: lax.map(one, rows).mean(),
        "Python": lambda one, rows: sum(
            one([x[i] for x in rows]) for i in range(len(rows[0]))
        ),
    },
    of_each_sample,
)


def element(tree, i):
    """One element along the first axis of every leaf."""
    return jax.tree.map(lambda w: w[i], tree)


def of_members(combine):
    """An ensemble of three: each parameter has a first axis more, which is batch."""

    def back(axes):
        if 0 not in axes[0]:
            return axes  # wrong by the members' axis at least
        return tuple(tuple(a - 1 for a in side if a) for side in axes)

    def change(case: Case):
        if not all(map(is_float, jax.tree.leaves(case.params))):
            return None
        params = jax.tree.map(lambda w: S((3, *w.shape), w.dtype), case.params)

        def loss(p, *args):
            return combine(lambda p: only(case.loss)(p, *args), p)

        return dataclasses.replace(case, params=params, loss=loss, back=back)

    return change


register(
    "members",
    {
        "vmap": lambda one, p: jax.vmap(one)(p).mean(),
        "vmap of checkpoint": lambda one, p: jax.vmap(jax.checkpoint(one))(p).mean(),
        "scan": lambda one, p: lax.scan(lambda y, p: (y + one(p), None), 0.0, p)[0],
        "Python": lambda one, p: sum(one(element(p, i)) for i in range(3)),
        "fori_loop": lambda one, p: lax.fori_loop(
            0, 3, lambda i, y: y + one(element(p, i)), 0.0
        ),
    },
    of_members,
)

# --- arguments ------------------------------------------------------------------------


def array_of(x):
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.key(0)
    return np.zeros(x.shape, x.dtype)


def in_one_dict(case: Case):
    return dataclasses.replace(
        case,
        args=({str(i): x for i, x in enumerate(case.args)},),
        loss=lambda p, d: case.loss(p, *[d[str(i)] for i in range(len(case.args))]),
    )


def with_arguments(*more):
    """More arguments behind those of the loss: `function(loss, p, args, more)`."""

    def rewrite(function):
        def change(case: Case):
            n = len(case.args)

            def loss(p, *args):
                return function(case, p, args[:n], args[n:])

            return dataclasses.replace(case, loss=loss, args=(*case.args, *more))

        return change

    return rewrite


def beside_settings(case, p, args, more):
    (config,) = more
    on = jnp.where(config["train"], 1.0, 0.0)
    return only(case.loss)(p, *args) * on + 0 * config["step"]


def masked(case, p, args, more):
    (weights,) = more
    return (only(case.loss)(p, *args) * weights).sum() / weights.sum()


def dropped(case, p, args, more):
    def drop(x):
        keep = jax.random.bernoulli(more[0], 1.0, x.shape)
        return jnp.where(keep, x, 0) if is_float(x) else x

    return case.loss(p, *of_samples(case, args, drop))


def beside_a_target(case: Case):
    def loss(p, target, *args):
        return only(case.loss)(p, *args) - only(case.loss)(target, *args)

    return dataclasses.replace(case, loss=loss, args=(case.params, *case.args))


def closed_over(make):
    def change(case: Case):
        data = jax.tree.map(make, case.args)
        return dataclasses.replace(case, args=(), loss=lambda p: case.loss(p, *data))

    return change


def in_another_form(shape, back):
    """Arguments with samples of `shape(theirs)`, and `back` to what they are."""

    def change(case: Case):
        if not any(has_samples(case)):
            return None
        args = of_samples(case, case.args, lambda x: S(shape(x.shape), x.dtype))

        def loss(p, *args):
            return case.loss(p, *of_samples(case, args, back))

        return dataclasses.replace(case, args=args, loss=loss)

    return change


def of_dtypes(**dtypes):
    """Arguments of other dtypes, which are cast."""

    def change(case: Case):
        def leaf(x):
            return S(x.shape, dtypes.get(str(x.dtype), x.dtype))

        def loss(p, *args):
            pairs = args, case.args
            return case.loss(p, *jax.tree.map(lambda x, y: x.astype(y.dtype), *pairs))

        dtypes_of = {str(x.dtype) for x in jax.tree.leaves(case.args)}
        if not dtypes_of & {*dtypes} or any("key" in x for x in dtypes_of):
            return None
        args = jax.tree.map(leaf, case.args)
        return dataclasses.replace(case, args=args, loss=loss)

    return change


config = {"step": 3, "none": None, "train": True, "rate": 0.5}
key = S((), jax.random.key(0).dtype)
register(
    "arguments",
    {
        "one dict": in_one_dict,
        "a target network": beside_a_target,
        "in a group of one": in_another_form(lambda x: (1, *x), lambda x: x.squeeze(0)),
        "samples last": in_another_form(
            lambda x: (*x[1:], x[0]), lambda x: jnp.moveaxis(x, -1, 0)
        ),
        "more samples, cut": in_another_form(
            lambda x: (x[0] + 3, *x[1:]), lambda x: x[:-3]
        ),
        "floats as bytes": of_dtypes(float32=jnp.uint8),
        "NumPy constants": closed_over(array_of),
        "settings": with_arguments(config)(beside_settings),
        "weights of samples": with_arguments(S((7,), jnp.float32))(masked),
        "a key that drops": with_arguments(key)(dropped),
        "arrays": lambda case: dataclasses.replace(
            case, args=jax.tree.map(array_of, case.args)
        ),
    },
)

# --- settings -------------------------------------------------------------------------


def wide(case: Case):
    """Every array in 64 bits."""

    def leaf(x):
        wider = {"float32": jnp.float64, "int32": jnp.int64}
        return S(x.shape, wider.get(str(x.dtype), x.dtype))

    params, args = jax.tree.map(leaf, (case.params, case.args))
    return dataclasses.replace(case, params=params, args=args)


x64 = lambda: jax.enable_x64(True)  # noqa: E731
REWRITES |= {
    "setting: x64": Rewrite(setting=x64),
    "setting: x64, wide arrays": Rewrite(wide, setting=x64),
    "setting: disable_jit": Rewrite(setting=jax.disable_jit),
    "setting: strict promotion": Rewrite(
        setting=lambda: jax.numpy_dtype_promotion("strict")
    ),
}
