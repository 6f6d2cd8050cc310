"""Operations on arrays in other words: sums, copies, parts, choices, convolutions."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.rewrites.case import is_float, register
from tests.rewrites.operations import (
    dtype_of,
    of_lookups,
    of_products,
    one_row,
    register_rules,
    run,
    scan_parts,
)

# --- sums and copies ------------------------------------------------------------------


def axis_by_axis(function):
    """A sum as `function` of rows, for each axis."""

    def rule(eqn, x):
        for axis in sorted(eqn.params["axes"], reverse=True) if is_float(x) else ():
            x = function(jnp.moveaxis(x, axis, 0))
        return x if is_float(x) else None

    return rule


def sum_in_a_scan(rows):
    return lax.scan(lambda y, row: (y + row, None), jnp.zeros_like(rows[0]), rows)[0]


def between_ones(eqn, x):
    """The operand of a broadcast, with an axis of one for each that is new."""
    shape = [1] * len(eqn.params["shape"])
    for place, size in zip(eqn.params["broadcast_dimensions"], x.shape, strict=True):
        shape[place] = size
    return x.reshape(shape)


def by_ones(eqn, x):
    return between_ones(eqn, x) * jnp.ones(eqn.params["shape"]) if is_float(x) else None


def of_one_element(function):
    """A broadcast as `function(x, size, axis)` where an axis has one element."""

    def rule(eqn, x):
        if not is_float(x) or max(eqn.params["shape"], default=0) > 40:
            return None
        x = between_ones(eqn, x)
        for axis, size in enumerate(eqn.params["shape"]):
            x = function(x, size, axis) if x.shape[axis] != size else x
        return x

    return rule


def by_outer_product(eqn, x):
    shape, places = eqn.params["shape"], eqn.params["broadcast_dimensions"]
    new = [a for a in range(len(shape)) if a not in places]
    same = [shape[a] for a in places] == [*x.shape]
    if not (is_float(x) and new and same and x.ndim):
        return None
    y = jnp.tensordot(jnp.ones([shape[a] for a in new], x.dtype), x, 0)
    return jnp.transpose(y, np.argsort([*new, *places]))


def where_by_products(eqn, which, *cases):
    if len(cases) != 2 or not is_float(cases[0]):
        return None
    which = jnp.broadcast_to(which, cases[0].shape).astype(cases[0].dtype)
    return which * cases[1] + (1 - which) * cases[0]


register_rules(
    "operations",
    {
        "sums by lax.reduce": {
            "reduce_sum": lambda eqn, x: lax.reduce(
                x, np.zeros((), x.dtype), lax.add, eqn.params["axes"]
            )
        },
        "sums as running sums": {
            "reduce_sum": axis_by_axis(lambda rows: jnp.cumsum(rows, 0)[-1])
        },
        "sums in a scan": {"reduce_sum": axis_by_axis(sum_in_a_scan)},
        "sums of one segment": {
            "reduce_sum": axis_by_axis(
                lambda rows: jax.ops.segment_sum(rows, np.zeros(len(rows), int), 1)[0]
            )
        },
        "copies by ones": {"broadcast_in_dim": by_ones},
        "copies by outer products": {"broadcast_in_dim": by_outer_product},
        "copies taken": {
            "broadcast_in_dim": of_one_element(
                lambda x, size, axis: jnp.take(x, jnp.zeros(size, int), axis)
            )
        },
        "where by products": {"select_n": where_by_products},
    },
)

# --- parts and choices ----------------------------------------------------------------


def by_dynamic_slice(eqn, x):
    starts, stops = eqn.params["start_indices"], eqn.params["limit_indices"]
    if eqn.params["strides"] is not None:
        return None
    sizes = [stop - start for start, stop in zip(starts, stops, strict=True)]
    return lax.dynamic_slice(x, [*map(jnp.int32, starts)], sizes)


def by_taking(eqn, x):
    starts, stops = eqn.params["start_indices"], eqn.params["limit_indices"]
    strides = eqn.params["strides"] or (1,) * x.ndim
    if not is_float(x):
        return None
    for axis, at in enumerate(zip(starts, stops, strides, strict=True)):
        x = x if at == (0, x.shape[axis], 1) else jnp.take(x, jnp.arange(*at), axis)
    return x


def top_k_by_argsort(eqn, x):
    at = jnp.argsort(-x, -1)[..., : eqn.params["k"]]
    dtype = eqn.outvars[1].aval.dtype
    return [jnp.take_along_axis(x, at, -1), at.astype(dtype)]


def of_last_axis(function):
    """An argmax along the last axis."""

    def rule(eqn, x):
        if eqn.params["axes"] != (x.ndim - 1,) or not is_float(x):
            return None
        return function(x).astype(dtype_of(eqn))

    return rule


def argmax_by_comparison(x):
    is_best = x == x.max(-1, keepdims=True)
    return (is_best * jnp.arange(x.shape[-1])).max(-1)


def of_rows(function):
    """A running sum forwards, as `function` of rows."""

    def rule(eqn, x):
        axis = eqn.params["axis"]
        if eqn.params["reverse"] or not is_float(x):
            return None
        return jnp.moveaxis(function(jnp.moveaxis(x, axis, 0)), 0, axis)

    return rule


def running_sums_by_a_triangle(rows):
    triangle = np.tri(len(rows), dtype=np.float32).astype(rows.dtype)
    return jnp.tensordot(triangle, rows, 1)


register_rules(
    "parts",
    {
        "by dynamic_slice": {"slice": by_dynamic_slice},
        "taken": {"slice": by_taking},
    },
)
register_rules(
    "choices",
    {
        "top-k by argsort": {"top_k": top_k_by_argsort},
        "argmax by top-k": {
            "argmax": of_last_axis(lambda x: lax.top_k(x, 1)[1][..., 0])
        },
        "argmax by comparison": {"argmax": of_last_axis(argmax_by_comparison)},
        "cumsum by a triangle": {"cumsum": of_rows(running_sums_by_a_triangle)},
    },
)


def sorted_and_back(table, ids):
    flat = ids.ravel()
    order = jnp.argsort(flat)
    rows = table[flat[order]][jnp.argsort(order)]
    return rows.reshape(*ids.shape, *table.shape[1:])


def one_id_more(table, ids):
    more = jnp.concatenate([ids.ravel(), jnp.zeros(1, ids.dtype)])
    return table[more][:-1].reshape(*ids.shape, *table.shape[1:])


register(
    "lookups",
    {
        "sorted and back": sorted_and_back,
        "one id more": one_id_more,
        "by comparison": lambda table, ids: jnp.tensordot(
            (ids[..., None] == jnp.arange(len(table))).astype(table.dtype), table, 1
        ),
    },
    of_lookups,
)

# --- loops ----------------------------------------------------------------------------


def body_of(eqn, consts):
    """A scan's body, as a function of its carry and rows."""

    def step(carry, row):
        out = run(eqn.params["jaxpr"], [*consts, *carry, *row], {})
        return out[: len(carry)], out[len(carry) :]

    return step


def in_two(eqn, *values):
    (consts, carry, xs), length = scan_parts(eqn, values), eqn.params["length"]
    if length < 2:
        return None
    half, reverse, step = length // 2, eqn.params["reverse"], body_of(eqn, consts)
    halves, ys = ([x[:half] for x in xs], [x[half:] for x in xs]), {}
    for i in (1, 0) if reverse else (0, 1):
        count = (half, length - half)[i]
        carry, ys[i] = lax.scan(step, carry, halves[i], count, reverse)
    return [*carry, *map(lambda *y: jnp.concatenate(y), ys[0], ys[1])]


def over_numbers(eqn, *values):
    (consts, carry, xs), length = scan_parts(eqn, values), eqn.params["length"]
    step, rows = body_of(eqn, consts), jnp.arange(length)
    carry, ys = lax.scan(
        lambda carry, i: step(carry, [x[i] for x in xs]),
        carry,
        rows,
        reverse=eqn.params["reverse"],
    )
    return [*carry, *ys]


def in_while_loop(eqn, *values):
    (consts, carry, xs), length = scan_parts(eqn, values), eqn.params["length"]
    avals, step = eqn.params["jaxpr"].out_avals[len(carry) :], body_of(eqn, consts)
    if any(jnp.issubdtype(x.dtype, jax.dtypes.prng_key) for x in avals):
        return None

    def turn(c):
        count, carry, ys = c
        i = length - 1 - count if eqn.params["reverse"] else count
        carry, rows = step(carry, [one_row(x, i) for x in xs])
        return count + 1, carry, [y.at[i].set(z) for y, z in zip(ys, rows, strict=True)]

    ys = [jnp.zeros((length, *a.shape), a.dtype) for a in avals]
    _, carry, ys = lax.while_loop(lambda c: c[0] < length, turn, (0, carry, ys))
    return [*carry, *ys]


register_rules(
    "control flow",
    {
        "scans in two": {"scan": in_two},
        "scans over numbers": {"scan": over_numbers},
        "scans as while_loop": {"scan": in_while_loop},
    },
)

# --- convolutions and products --------------------------------------------------------


def convolve(eqn, x, w, **more):
    """The same convolution of other operands, or with other settings."""
    names = ("window_strides", "padding", "lhs_dilation", "rhs_dilation")
    names += ("dimension_numbers", "feature_group_count", "batch_group_count")
    return lax.conv_general_dilated(x, w, **{n: eqn.params[n] for n in names} | more)


def of_plain(function):
    """A convolution without groups, `function(eqn, x, w, its axes)`."""

    def rule(eqn, x, w):
        groups = eqn.params["feature_group_count"], eqn.params["batch_group_count"]
        if groups != (1, 1) or not is_float(x):
            return None
        return function(eqn, x, w, eqn.params["dimension_numbers"])

    return rule


def channels_first(eqn, x, w):
    axes = eqn.params["dimension_numbers"]
    x, w = jnp.transpose(x, axes.lhs_spec), jnp.transpose(w, axes.rhs_spec)
    y = convolve(eqn, x, w, dimension_numbers=None)
    return jnp.transpose(y, np.argsort(axes.out_spec))


def patches_by_a_matrix(eqn, x, w, axes):
    out, fan_in, *window = axes.rhs_spec
    names = ("window_strides", "padding", "lhs_dilation", "rhs_dilation")
    patches = lax.conv_general_dilated_patches(
        x,
        [w.shape[a] for a in window],
        **{name: eqn.params[name] for name in names},
        dimension_numbers=axes,
    )
    matrix = jnp.transpose(w, (fan_in, *window, out)).reshape(-1, w.shape[out])
    y = jnp.tensordot(jnp.moveaxis(patches, axes.out_spec[1], -1), matrix, 1)
    return jnp.moveaxis(y, -1, axes.out_spec[1])


def halves_of_outputs(eqn, x, w, axes):
    halves = jnp.split(w, [w.shape[axes.rhs_spec[0]] // 2], axes.rhs_spec[0])
    if not all(part.size for part in halves):
        return None
    return jnp.concatenate([convolve(eqn, x, v) for v in halves], axes.out_spec[1])


def a_ring_of_zeros(eqn, x, w, axes):
    """A window with zeros around it."""
    if {*eqn.params["rhs_dilation"], *eqn.params["lhs_dilation"]} != {1}:
        return None
    widths = [(1, 1) if a in axes.rhs_spec[2:] else (0, 0) for a in range(w.ndim)]
    padding = [(before + 1, after + 1) for before, after in eqn.params["padding"]]
    return convolve(eqn, x, jnp.pad(w, widths), padding=padding)


register_rules(
    "convolutions",
    {
        "channels first": {"conv_general_dilated": channels_first},
        "patches by a matrix": {"conv_general_dilated": of_plain(patches_by_a_matrix)},
        "halves of outputs": {"conv_general_dilated": of_plain(halves_of_outputs)},
        "a ring of zeros": {"conv_general_dilated": of_plain(a_ring_of_zeros)},
    },
)


def flattened(eqn, x, y):
    """All axes that are contracted as one, and all others."""
    (cx, cy), (bx, _) = eqn.params["dimension_numbers"]
    if bx or not is_float(x):
        return None
    fx, fy = ([a for a in range(z.ndim) if a not in c] for z, c in ((x, cx), (y, cy)))
    u = jnp.transpose(x, [*fx, *cx]).reshape(math.prod(x.shape[a] for a in fx), -1)
    v = jnp.transpose(y, [*cy, *fy]).reshape(-1, math.prod(y.shape[a] for a in fy))
    shape = [x.shape[a] for a in fx] + [y.shape[a] for a in fy]
    return (u @ v).reshape(shape).astype(dtype_of(eqn))


def a_zero_more(eqn, x, y):
    """A zero before what is contracted, in both operands."""
    (cx, cy), _ = eqn.params["dimension_numbers"]
    if not cx or not is_float(x):
        return None
    pairs = (x, cx[0]), (y, cy[0])
    x, y = (
        jnp.pad(z, [(int(a == axis), 0) for a in range(z.ndim)]) for z, axis in pairs
    )
    numbers = eqn.params["dimension_numbers"]
    return lax.dot_general(x, y, numbers, preferred_element_type=dtype_of(eqn))


register_rules(
    "products",
    {
        "flattened": {"dot_general": flattened},
        "a zero more": {"dot_general": a_zero_more},
    },
)


def two_roundings(x, w):
    high = w.astype(jnp.bfloat16).astype(w.dtype)
    return x @ high + x @ (w - high)


def a_matrix_for_each_sample(x, w):
    if x.ndim == 2:
        return jnp.einsum("bi,bio->bo", x, jnp.broadcast_to(w, (len(x), *w.shape)))
    return jnp.matmul(x, jnp.broadcast_to(w, (*x.shape[:-2], *w.shape)))


register(
    "x @ w",
    {
        "by a jvp": lambda x, w: jax.jvp(lambda x: x @ w, [x], [x])[1],
        "two roundings": two_roundings,
        "a matrix for each sample": a_matrix_for_each_sample,
        "scan over rows": lambda x, w: lax.scan(lambda c, r: (c, r @ w), 0, x)[1],
        "scan over rows, with it": lambda x, w: lax.scan(
            lambda w, row: (w, row @ w), w, x
        )[1],
        "cond": lambda x, w: lax.cond(
            jnp.ones(()) > 0,
            jnp.matmul,
            lambda x, w: jnp.zeros((*x.shape[:-1], w.shape[1]), x.dtype),
            x,
            w,
        ),
    },
    of_products,
)
