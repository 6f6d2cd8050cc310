"""A scan over sharded layers that gathers each of them while another one runs.

The gradient is written by hand:

  forward:  layer i + 1 is gathered while layer i runs;
  backward: layer i - 1 is gathered while layer i runs, and the gradient of layer i is
            scattered.

The backward pass keeps neither gathered layers nor what follows from them alone.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun
from jax.interpreters import partial_eval


def scan(
    run: Callable[..., Any],
    gather: Callable[[Any], Any],
    scatter: Callable[[Any, Any, Any], Any],
    keep_gathered: bool,
    late: bool,
    *,
    length: int,
    reverse: bool,
    unroll: int,
) -> Callable[..., Any]:
    """A scan over sharded layers.

    Args:
      run: of (consts, carry, layer, xs) to (carry, ys).
      gather: of the shards of a layer to the layer.
      scatter: of (gradient of a layer, shards, consts) to the gradient of its shards.
      keep_gathered: whether layers are kept for the backward pass.
      late: whether a layer's gradient is scattered all at once while the next one runs,
        instead of array by array while it runs itself.
      length: number of layers.
      reverse: whether the last layer comes first.
      unroll: layers in one turn of the loop.

    Returns:
      A function of (consts, carry, shards, xs) to (carry, ys), where shards and xs have
      a leading axis of layers.
    """
    loop = functools.partial(jax.lax.scan, unroll=unroll)
    numbers, on = np.arange(length), -1 if reverse else 1

    def layer_at(shards: Any, i: Any) -> Any:
        i = jnp.clip(i, 0, length - 1)
        return gather(
            jax.tree.map(
                lambda x: jax.lax.dynamic_index_in_dim(x, i, keepdims=False), shards
            )
        )

    def forward(run: Callable[..., Any], given: Any) -> Any:
        consts, carry, shards, xs = given

        def step(state: Any, i_x: Any) -> Any:
            (carry, layer), (i, x) = state, i_x
            following = layer_at(shards, i + on)
            (carry, ys), saved = run(consts, carry, layer, x)
            return (carry, following), (ys, saved)

        first = layer_at(shards, length - 1 if reverse else 0)
        (carry, last), (ys, saved) = loop(
            step, (carry, first), (numbers, xs), reverse=reverse
        )
        return (carry, ys), (saved, last)

    @jax.custom_vjp
    def prefetching(*given: Any) -> Any:
        return forward(lambda *given: (run(*given), ()), given)[0]

    def save(*given: Any) -> Any:
        results, saved = forward(functools.partial(_vjp, run, keep_gathered), given)
        return results, (saved, given)

    def backward(residuals: Any, cotangents: Any) -> Any:
        (saved, last), (consts, _, shards, xs) = residuals
        d_carry, d_ys = _partition(cotangents)[0]

        def step(state: Any, inputs: Any) -> Any:
            d_carry, total, layer, d_layer = state
            i, pull_of, x, d_ys = inputs
            before = layer if keep_gathered else layer_at(shards, i - on)
            d_shards = scatter(d_layer, shards, consts) if late else None
            pull = pull_of(consts, layer, x)
            ((d_consts, d_carry, d_layer, d_x),) = pull((d_carry, d_ys))
            total = jax.tree.map(jnp.add, total, d_consts)
            if late:
                return (d_carry, total, before, d_layer), (d_shards, d_x)
            d_shards = scatter(d_layer, shards, consts)
            return (d_carry, total, before, None), (d_shards, d_x)

        zeros = jax.tree.map(jnp.zeros_like, _partition(consts)[0])
        nothing = jax.tree.map(jnp.zeros_like, last) if late else None
        (d_carry, d_consts, _, d_layer), (d_shards, d_xs) = loop(
            step,
            (d_carry, zeros, last, nothing),
            (numbers, saved, xs, d_ys),
            reverse=not reverse,
        )
        if late:  # those of a layer are where those of the one before should be
            d_shards = jax.tree.map(
                lambda ds, d: jnp.roll(ds, on, axis=0).at[-1 if reverse else 0].set(d),
                d_shards,
                scatter(d_layer, shards, consts),
            )
        return d_consts, d_carry, d_shards, d_xs

    prefetching.defvjp(save, backward)
    return prefetching


def _vjp(run: Callable[..., Any], keep_gathered: bool, *given: Any) -> Any:
    """Run a layer and save what its gradient needs.

    Of what JAX would save, inputs other than the carry need no copy. What follows from
    the layer alone, or from constants alone, is computed again.

    Args:
      run: of (consts, carry, layer, xs) to (carry, ys).
      keep_gathered: whether the layer itself is saved.
      *given: its arguments.

    Returns:
      The results, and a tree of arrays that can be called with (consts, layer, xs). It
      returns the function from cotangents of the results to those of the arguments,
      with None for integers.
    """

    def save(*given: Any) -> Any:
        reals, others = _partition(given)
        results, pull, rest = jax.vjp(
            lambda reals: _partition(run(*_combine(reals, others))),
            reals,
            has_aux=True,
        )
        return _combine(results, rest), pull

    closed, shapes = jax.make_jaxpr(save, return_shape=True)(*given)
    results: Any
    pull: Any
    results, pull = map(jax.tree.structure, shapes)
    count = results.num_leaves
    kinds = [
        kind
        for kind, x in zip(("consts", "carry", "layer", "xs"), given, strict=True)
        for _ in jax.tree.leaves(x)
    ]
    lost = {"carry", "effects", "layer" if keep_gathered else "carry"}
    # Nothing that has an effect, such as a print, happens again.
    effects = [v for eqn in closed.jaxpr.eqns if eqn.effects for v in eqn.outvars]
    kinds += ["effects"] * len(effects)
    jaxpr = closed.jaxpr.replace(
        invars=[*closed.jaxpr.invars, *effects],
        eqns=[eqn for eqn in closed.jaxpr.eqns if not eqn.effects],
        effects=frozenset(),
        debug_info=closed.jaxpr.debug_info.with_unknown_names(),
    )

    def needed(outputs: Sequence[bool]) -> tuple[Jaxpr, list[bool]]:
        return partial_eval.dce_jaxpr(jaxpr, [*[False] * count, *outputs])

    def is_saved(place: int) -> bool:
        outputs = [place == other for other in range(pull.num_leaves)]
        found = set(itertools.compress(kinds, needed(outputs)[1]))
        is_input = jaxpr.outvars[count + place] in jaxpr.invars
        alone = is_input or found in (set(), {"consts"}, {"layer"})
        return bool(found & lost) or not alone

    saved = [is_saved(place) for place in range(pull.num_leaves)]
    less, inputs = needed([not x for x in saved])

    def pull_of(kept: list[Any], consts: Any, layer: Any, xs: Any) -> Any:
        flat = jax.tree.leaves((consts, [0] * kinds.count("carry"), layer, xs))
        found = jaxpr_as_fun(ClosedJaxpr(less, closed.consts))(
            *itertools.compress(flat, inputs)
        )
        sources = {True: iter(kept), False: iter(found)}
        return jax.tree.unflatten(pull, [next(sources[x]) for x in saved])

    outs = jaxpr_as_fun(closed)(*jax.tree.leaves(given))
    kept = list(itertools.compress(outs[count:], saved))
    return (
        jax.tree.unflatten(results, outs[:count]),
        jax.tree_util.Partial(pull_of, kept),
    )


def _partition(tree: Any) -> tuple[Any, Any]:
    """The tree with None for whatever has no gradient, and with None for the rest."""
    is_real = jax.tree.map(lambda x: jnp.issubdtype(x.dtype, jnp.inexact), tree)
    return (
        jax.tree.map(lambda x, real: x if real else None, tree, is_real),
        jax.tree.map(lambda x, real: None if real else x, tree, is_real),
    )


def _combine(reals: Any, others: Any) -> Any:
    """The inverse of `_partition`."""
    return jax.tree.map(
        lambda x, y: y if x is None else x, reals, others, is_leaf=lambda x: x is None
    )
