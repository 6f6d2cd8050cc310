"""Momentum, in the parameters' dtype or in fewer bits.

bfloat16 and int8 are rounded stochastically, up or down at random with the odds that
keep the mean. Rounding to nearest loses every small change: with a slowly rotating,
noise-free gradient, int8 momentum is then off by 12 % (3 % with stochastic rounding).
With realistic gradient noise rounding to nearest is better (0.015 against 0.021).

The random bits are a hash of the step, the parameter's path and the element's position
in the whole array. So they need no key in the state and do not depend on the sharding,
and a resumed run continues bit for bit.
"""

import zlib
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, UInt32

from jax_muon.base import checks, dtypes, trees
from jax_muon.base.trees import step_leaves

DTYPES = ("float64", "float32", "bfloat16", "int8")

_LARGEST = 127  # of int8, so that both signs reach as far


class ScaleByMomentumState(NamedTuple):
    """State of `scale_by_momentum`."""

    count: Array  # type: ignore[assignment]  # shape=(), dtype=int32
    mu: optax.Updates


class QuantizedMomentumState(NamedTuple):
    """State of `scale_by_momentum` with `mu_dtype="int8"`."""

    count: Array  # type: ignore[assignment]  # shape=(), dtype=int32
    mu: optax.Updates  # int8
    scale: optax.Updates  # parameters' shape with 1 in the last axis, at least float32


def scale_by_momentum(
    decay: optax.ScalarOrSchedule = 0.95,
    *,
    nesterov: bool = True,
    bias_correction: bool = False,
    mu_dtype: jax.typing.DTypeLike | None = None,
) -> optax.GradientTransformation:
    r"""An exponential average of the gradients, with Nesterov's look-ahead.

    With gradient :math:`G`, momentum :math:`M` and decay :math:`\mu`,

    .. math::
       M \leftarrow M + (1 - \mu)(G - M), \qquad U = M + (1 - \mu)(G - M)

    Muon is often written with a sum, :math:`M \leftarrow \mu M + G`: at constant
    momentum the average times :math:`1 / (1 - \mu)`, which a polar factor does not
    depend on. For the sum under a schedule use `optax.trace(mu, nesterov=True)`.

    Args:
      decay: momentum in [0, 1), or a schedule of it.
      nesterov: False returns M itself: plain momentum, without look-ahead.
      bias_correction: return :math:`(1 - \mu) G / (1 - \mu^t) + \mu M / (1 -
        \mu^{t+1})` in step t (Dozat 2016), as in `optax.contrib.muon`, or
        :math:`M / (1 - \mu^t)` without look-ahead. It changes the direction of about
        the first hundred steps.
      mu_dtype: dtype of M between steps; it is computed in at least float32.
        None: the parameters', which for float16 needs a loss scale, since gradients
        near 1e-6 lose their direction; "float32" or "float64"; "bfloat16", rounded
        stochastically; "int8", rounded stochastically to 255 even steps, with a float32
        scale per row (the last axis of a parameter), as in arXiv 2509.23106. Query,
        key and value in one kernel share a scale: where the gradients of one are ten
        times larger, the others lose 22 % instead of 2 %. Within `as_matrices` each
        part has scales of its own.

    Raises:
      ValueError: at update, with the path, a gradient whose momentum is missing or
        would be broadcast.

    Examples:
      >>> grads = jnp.array([1.0, -4.0])
      >>> tx = jm.scale_by_momentum(0.5)
      >>> tx.update(grads, tx.init(grads))[0].tolist()
      [0.75, -3.0]
    """
    decay = checks.as_rate("decay", decay, "in [0, 1)")
    dtype = None if mu_dtype is None else jnp.dtype(mu_dtype).name
    if dtype is not None:
        checks.check_choice("mu_dtype", dtype, DTYPES)
    kind = QuantizedMomentumState if dtype == "int8" else ScaleByMomentumState

    def init_fn(params: optax.Params) -> optax.OptState:
        stored = [optax.tree.zeros_like(params, dtype=dtype)]
        if dtype == "int8":
            # A box names the axes of the parameter, over which (out, 1) cannot be
            # sharded. A maximum has the sharding of the rows.
            rows = jax.tree.map(dtypes.wide, trees.unbox(params))
            zeros = optax.tree.zeros_like(rows)
            stored.append(jax.tree.map(_largest_of_rows, zeros))
        return kind(jnp.zeros([], jnp.int32), *stored)

    def update_fn(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
    ) -> tuple[optax.Updates, optax.OptState]:
        count, *accumulator = state
        mu = checks.rate_at(decay, count)

        def step(path: str, g: Array, *old: Array) -> tuple[Array, ...]:
            wide_g, m = dtypes.wide(g), _read(*old)
            part = dtypes.in_dtype_of(m, mu)
            m = m + (1 - part) * (wide_g - m)
            if not bias_correction:
                u = m + (1 - part) * (wide_g - m) if nesterov else m
            else:
                # An average that starts at zero has weights that add up to these.
                now, next_step = (
                    1 - part ** dtypes.in_dtype_of(m, count + i) for i in (1, 2)
                )
                u = m / now
                if nesterov:
                    u = (1 - part) / now * wide_g + part / next_step * m
            return u.astype(g.dtype), *_stored(m, old, dtype, path, count)

        updates = trees.as_wide_as_params(updates, params)
        updates, *accumulator = step_leaves(step, updates, *accumulator)
        return updates, kind(optax.safe_increment(count), *accumulator)

    return optax.GradientTransformation(init_fn, update_fn)


def _read(stored: Array, scale: Array | None = None) -> Array:
    """The stored numbers in at least float32."""
    return dtypes.wide(stored) if scale is None else stored.astype(scale.dtype) * scale


def _stored(
    x: Array, old: Sequence[Array], dtype: str | None, path: str, count: Array
) -> tuple[Array, ...]:
    """x as it is stored after `count` steps, given the array stored before."""
    if dtype == "int8":
        # One scale for each row: a maximum is exact however the row is sharded.
        _, before = old
        x = x.astype(before.dtype)
        scale = _largest_of_rows(x) / _LARGEST
        steps = x / jnp.where(scale > 0, scale, 1)
        uniform = (random_bits(x, path, count) >> 8).astype(x.dtype) * 2.0**-24
        integers = jnp.clip(jnp.floor(steps + uniform), -_LARGEST, _LARGEST)
        return integers.astype(jnp.int8), scale
    if dtype != "bfloat16":
        return (x.astype(old[0].dtype),)
    single = x.astype(jnp.float32)
    bits = jax.lax.bitcast_convert_type(single, jnp.uint32)
    # bfloat16 is the upper half of float32: a carry from the lower one rounds up.
    up = bits + (random_bits(x, path, count) >> 16)
    kept = jax.lax.bitcast_convert_type(up & jnp.uint32(0xFFFF0000), jnp.float32)
    # Of the NaN that GPUs make, 0x7FFFFFFF, a carry would make 0.
    return (jnp.where(jnp.isfinite(single), kept, single).astype(jnp.bfloat16),)


def random_bits(like: Array, path: str, count: Array) -> UInt32[Array, "..."]:
    """32 random bits for each element, sharded like the array: a hash in two rounds."""
    first = _mixed(jnp.uint32(zlib.crc32(path.encode())) ^ count.astype(jnp.uint32))
    second = _mixed(first + jnp.uint32(0x9E3779B9))
    return _mixed(_mixed(_positions(like) ^ first) + second)


def _positions(like: Array) -> UInt32[Array, "..."]:
    """The index of every element in the flattened array, modulo 2^32."""
    position = jnp.zeros_like(like, dtype=jnp.uint32)
    for axis, size in enumerate(like.shape):
        along = jax.lax.broadcasted_iota(jnp.uint32, like.shape, axis)
        position = position * jnp.uint32(size) + along
    return position


def _mixed(x: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """A bijection, "lowbias32" of https://nullprogram.com/blog/2018/07/31/."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def _largest_of_rows(x: Array) -> Array:
    """The largest absolute value along the last axis, which keeps size 1."""
    last = (-1,) if x.ndim else ()
    return jnp.max(jnp.abs(x), axis=last, keepdims=True, initial=0)
