"""A scan over sharded layers that gathers each of them while another one runs.

The gradient is written by hand:

  forward:  layer i + 1 is gathered while layer i runs;
  backward: layer i - 1 is gathered while layer i runs, and the gradient of layer i is
            scattered.

The backward pass keeps neither gathered layers nor what follows from them alone.

In two levels, between hosts and within a host, each transfer runs a layer ahead of the
one that needs its result:

  forward:  while layer i runs, hosts exchange shards of layer i + 2, and the devices of
            a host gather layer i + 1 from what the hosts have exchanged before;
  backward: layer i - 1 is gathered within the host, from shards that the forward pass
            has kept; the gradient of layer i + 1 is scattered within the host, and that
            of layer i + 2 between hosts.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from jax_muon import jaxprs


def scan(
    run: Callable[..., Any],
    gather: Callable[[list[Any]], list[Any]],
    scatter: Callable[[Any], list[Any]],
    *,
    keep_gathered: bool,
    late: bool,
    length: int,
    reverse: bool,
    unroll: int,
    update: Callable[..., Any] | None = None,
    together: int = 1,
    on_each: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda run: run,
) -> Callable[..., Any]:
    """A scan over layers: of (consts, carry, shards, xs) to (carry, ys).

    `gather` turns shards into a layer, `run` maps (consts, carry, layer, xs) to (carry,
    ys), and `scatter` turns a layer's gradient into those of its shards: array by array
    while the layer runs, or, if `late`, all at once while the next one runs.

    With `update`, the scan takes a state as well, and the gradients of shards and state
    are what `update` makes of (first index, gradients, shards, state) in the backward
    pass, of `together` layers at a time. Only then is a layer gathered while another
    one runs, if that is more than one. `on_each` turns a function of one device's
    values into one of what the scan is given.
    """
    loop = functools.partial(jax.lax.scan, unroll=unroll)
    numbers, first, on = np.arange(length), *((length - 1, -1) if reverse else (0, 1))
    is_ahead = update is None or together > 1

    def layer_at(shards: list[Any], i: Any) -> list[Any]:
        return gather(_at(shards, i, length))

    def forward(run: Callable[..., Any], given: Any) -> Any:
        consts, carry, shards, xs, *_ = given

        def step(state: Any, i_x: Any) -> Any:
            (carry, layer), (i, x) = state, i_x
            following = layer_at(shards, i + on) if is_ahead else None
            layer = layer if is_ahead else layer_at(shards, i)
            (carry, ys), saved = on_each(run)(consts, carry, layer, x)
            return (carry, following), (ys, saved)

        start = layer_at(shards, first) if is_ahead else None
        (carry, last), (ys, saved) = loop(
            step, (carry, start), (numbers, xs), reverse=reverse
        )
        return (carry, ys), (saved, last)

    def backward(residuals: Any, cotangents: Any) -> Any:
        (saved, last), (consts, _, shards, xs, *state) = residuals
        d_carry, d_ys = _only(cotangents, real=True)

        def pull(pull_of: Any, consts: Any, layer: Any, x: Any, d: Any) -> Any:
            return pull_of(consts, layer, x)(d)[0]

        def step(shards: list[Any], before: Any, inputs: Any) -> Any:
            d_carry, total, layer, waiting = before
            i, pull_of, x, d_ys = inputs
            if not is_ahead:
                layer, following = layer_at(shards, i), None
            else:
                following = layer if keep_gathered else layer_at(shards, i - on)
            d_consts, d_carry, d_layer, d_x = on_each(pull)(
                pull_of, consts, layer, x, (d_carry, d_ys)
            )
            total = jax.tree.map(jnp.add, total, d_consts)
            now, waiting = (waiting, d_layer) if late else (d_layer, None)
            return (d_carry, total, following, waiting), (scatter(now), d_x)

        def part(update: Any, before: Any, numbers: Any) -> Any:
            before, shards, state = before

            def step_at(before: Any, i: Any) -> Any:
                return step(shards, before, _at(inputs, i, length))

            before, (d_shards, d_xs) = loop(
                step_at, before, numbers, reverse=not reverse
            )
            return (before, *update(numbers[0], d_shards, shards, state)), d_xs

        zeros = jax.tree.map(jnp.zeros_like, _only(consts, real=True))
        nothing = jax.tree.map(jnp.zeros_like, last) if late else None
        start, inputs = (d_carry, zeros, last, nothing), (numbers, saved, xs, d_ys)
        if update:
            parts = numbers.reshape(-1, together)
            ((d_carry, d_consts, *_), shards, *state), d_xs = jax.lax.scan(
                functools.partial(part, update),
                (start, shards, *state),
                parts,
                reverse=not reverse,
            )
            d_xs = jax.tree.map(lambda x: x.reshape(length, *x.shape[2:]), d_xs)
            return d_consts, d_carry, shards, d_xs, *state
        (d_carry, d_consts, _, waiting), (d_shards, d_xs) = loop(
            functools.partial(step, shards), start, inputs, reverse=not reverse
        )
        if late:  # each layer's gradients are where those of the one before belong
            d_shards = [
                jnp.roll(those, on, axis=0).at[first].set(d)
                for those, d in zip(d_shards, scatter(waiting), strict=True)
            ]
        return d_consts, d_carry, d_shards, d_xs

    return _with_gradient(run, keep_gathered, forward, backward)


def scan_in_levels(
    run: Callable[..., Any],
    gathers: Sequence[Callable[[list[Any]], list[Any]]],
    scatters: Sequence[Callable[[Any], list[Any]]],
    *,
    keep_gathered: bool,
    length: int,
    reverse: bool,
    unroll: int,
) -> Callable[..., Any]:
    """`scan` with gathers between hosts and then within, and scatters the other way."""
    loop = functools.partial(jax.lax.scan, unroll=unroll)
    numbers, first, on = np.arange(length), *((length - 1, -1) if reverse else (0, 1))
    from_hosts, within = gathers
    scatter_within, to_hosts = scatters

    at = functools.partial(_at, length=length)

    def forward(run: Callable[..., Any], given: Any) -> Any:
        consts, carry, shards, xs = given

        def step(state: Any, i_x: Any) -> Any:
            (carry, layer, own, next_own), (i, x) = state, i_x
            after = from_hosts(at(shards, i + 2 * on))
            following = within(next_own)
            (carry, ys), saved = run(consts, carry, layer, x)
            return (carry, following, next_own, after), (ys, saved, own)

        own = from_hosts(at(shards, first))
        start = carry, within(own), own, from_hosts(at(shards, first + on))
        (carry, last, _, _), (ys, saved, kept) = loop(
            step, start, (numbers, xs), reverse=reverse
        )
        return (carry, ys), (saved, last, kept)

    def backward(residuals: Any, cotangents: Any) -> Any:
        (saved, last, kept), (consts, _, _, xs) = residuals
        d_carry, d_ys = _only(cotangents, real=True)

        def step(state: Any, inputs: Any) -> Any:
            d_carry, total, layer, waiting, on_host = state
            i, pull_of, x, d_ys = inputs
            before = layer if keep_gathered else within(at(kept, i - on))
            now, on_host = to_hosts(on_host), scatter_within(waiting)
            pull = pull_of(consts, layer, x)
            ((d_consts, d_carry, d_layer, d_x),) = pull((d_carry, d_ys))
            total = jax.tree.map(jnp.add, total, d_consts)
            return (d_carry, total, before, d_layer, on_host), (now, d_x)

        zeros = jax.tree.map(jnp.zeros_like, _only(consts, real=True))
        waiting = jax.tree.map(jnp.zeros_like, last)
        on_host = jax.tree.map(jnp.zeros_like, scatter_within(waiting))
        (d_carry, d_consts, _, waiting, on_host), (d_shards, d_xs) = loop(
            step,
            (d_carry, zeros, last, waiting, on_host),
            (numbers, saved, xs, d_ys),
            reverse=not reverse,
        )
        # Each layer's gradients are where those of the second one before belong. Of
        # one layer alone, the first of these three is all that counts.
        d_shards = [
            jnp.roll(those, 2 * on, axis=0).at[first + on].set(second).at[first].set(d)
            for those, d, second in zip(
                d_shards,
                to_hosts(scatter_within(waiting)),
                to_hosts(on_host),
                strict=True,
            )
        ]
        return d_consts, d_carry, d_shards, d_xs

    return _with_gradient(run, keep_gathered, forward, backward)


def _at(stacks: Any, i: Any, length: int) -> Any:
    """Element i of each stack; beyond an end, the last one there."""
    i = jnp.clip(i, 0, length - 1)
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, 0, False), stacks)


def _with_gradient(
    run: Callable[..., Any],
    keep_gathered: bool,
    forward: Callable[..., Any],
    backward: Callable[..., Any],
) -> Callable[..., Any]:
    """A scan with a gradient written by hand.

    `forward` is of (run, given), where run returns what the gradient needs beside its
    own results, and returns results and residuals; `backward` is of the residuals, with
    what was given, and of the cotangents.
    """

    @jax.custom_vjp
    def prefetching(*given: Any) -> Any:
        return forward(lambda *given: (run(*given), ()), given)[0]

    def save(*given: Any) -> Any:
        results, saved = forward(functools.partial(_vjp, run, keep_gathered), given)
        return results, (saved, given)

    prefetching.defvjp(save, backward)
    return prefetching


def _vjp(run: Callable[..., Any], keep_gathered: bool, *given: Any) -> Any:
    """`jax.vjp` of a layer: its results, and a tree of what JAX saves for the gradient.

    The tree omits what can be computed again from the layer alone, from constants
    alone, or from xs alone. So it is called with these three, and returns the function
    from cotangents of the results to those of the arguments, with None for integers.
    """

    def save(*given: Any) -> Any:
        def of_reals(reals: Any) -> Any:
            results = run(*_either(reals, _only(given, real=False)))
            return _only(results, real=True), _only(results, real=False)

        reals, pull, others = jax.vjp(of_reals, _only(given, real=True), has_aux=True)
        return _either(reals, others), pull

    closed, shapes = jax.make_jaxpr(save, return_shape=True)(*given)
    outs = jaxpr_as_fun(closed)(*jax.tree.leaves(given))
    results, pull = jax.tree.unflatten(jax.tree.structure(shapes), outs)
    found, treedef = jax.tree.flatten(pull)
    names = ("consts", "saved", "saved" if keep_gathered else "layer", "xs")
    kinds = [k for k, x in zip(names, given, strict=True) for _ in jax.tree.leaves(x)]
    # Nothing that has an effect, such as a print, happens again.
    jaxpr = closed.jaxpr
    effects = [v for eqn in jaxpr.eqns if eqn.effects for v in eqn.outvars]
    kinds += ["saved"] * len(effects)
    jaxpr = jaxpr.replace(
        invars=[*jaxpr.invars, *effects],
        outvars=jaxpr.outvars[len(outs) - len(found) :],
        eqns=[eqn for eqn in jaxpr.eqns if not eqn.effects],
        effects=frozenset(),
        debug_info=jaxpr.debug_info.with_unknown_names(),
    )

    def is_saved(place: int) -> bool:
        only = [place == other for other in range(len(found))]
        needed = jaxprs.needed_for(jaxpr, only)[1]
        sources = set(itertools.compress(kinds, needed))
        return "saved" in sources or len(sources) > 1

    saved = [is_saved(place) for place in range(len(found))]
    again, inputs = jaxprs.needed_for(jaxpr, [not x for x in saved])
    unused = jax.tree.map(lambda x: 0, given[1])

    def pull_of(kept: list[Any], consts: Any, layer: Any, xs: Any) -> Any:
        flat = jax.tree.leaves((consts, unused, layer, xs))
        computed = jaxpr_as_fun(ClosedJaxpr(again, closed.consts))(
            *itertools.compress(flat, inputs)
        )
        parts = {True: iter(kept), False: iter(computed)}
        return jax.tree.unflatten(treedef, [next(parts[x]) for x in saved])

    kept = list(itertools.compress(found, saved))
    return results, jax.tree_util.Partial(pull_of, kept)


def _only(tree: Any, real: bool) -> Any:
    """The leaves that have a gradient (`real`), or the others; None for the rest."""
    return jax.tree.map(
        lambda x: x if jnp.issubdtype(x.dtype, jnp.inexact) == real else None, tree
    )


def _either(tree: Any, other: Any) -> Any:
    """The tree with the other one's leaves for None."""
    return jax.tree.map(
        lambda x, y: y if x is None else x, tree, other, is_leaf=lambda x: x is None
    )
