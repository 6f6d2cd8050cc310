"""Operations on arrays in other words: sums, copies, parts, choices, convolutions."""

import math

import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.rewrites.case import is_float, register
from tests.rewrites.operations import (
    dtype_of,
    of_products,
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


def where_by_products(eqn, which, *cases):
    if len(cases) != 2 or not is_float(cases[0]):
        return None
    which = jnp.broadcast_to(which, cases[0].shape).astype(cases[0].dtype)
    return which * cases[1] + (1 - which) * cases[0]


register_rules(
    "operations",
    {
        "sums in a scan": {"reduce_sum": axis_by_axis(sum_in_a_scan)},
        "copies by ones": {"broadcast_in_dim": by_ones},
        "where by products": {"select_n": where_by_products},
    },
)

# --- parts and choices ----------------------------------------------------------------


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


register_rules("parts", {"taken": {"slice": by_taking}})
register_rules("choices", {"top-k by argsort": {"top_k": top_k_by_argsort}})


# --- loops ----------------------------------------------------------------------------


def body_of(eqn, consts):
    """A scan's body, as a function of its carry and rows."""

    def step(carry, row):
        out = run(eqn.params["jaxpr"], [*consts, *carry, *row], {})
        return out[: len(carry)], out[len(carry) :]

    return step


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


register_rules(
    "control flow",
    {
        "scans over numbers": {"scan": over_numbers},
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


register_rules(
    "convolutions",
    {
        "channels first": {"conv_general_dilated": channels_first},
        "patches by a matrix": {"conv_general_dilated": of_plain(patches_by_a_matrix)},
        "halves of outputs": {"conv_general_dilated": of_plain(halves_of_outputs)},
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


register_rules(
    "products",
    {
        "flattened": {"dot_general": flattened},
    },
)


def a_matrix_for_each_sample(x, w):
    if x.ndim == 2:
        return jnp.einsum("bi,bio->bo", x, jnp.broadcast_to(w, (len(x), *w.shape)))
    return jnp.matmul(x, jnp.broadcast_to(w, (*x.shape[:-2], *w.shape)))


register(
    "x @ w",
    {
        "a matrix for each sample": a_matrix_for_each_sample,
        "scan over rows": lambda x, w: lax.scan(lambda c, r: (c, r @ w), 0, x)[1],
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
