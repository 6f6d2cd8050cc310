"""A scan over sharded layers that gathers each of them while another one runs.

The gradient is written by hand:

  forward:  layer i + 1 is gathered while layer i runs;
  backward: layer i - 1 is gathered while layer i runs, and the gradient of layer i is
            scattered.

Unless layers are to be kept, the forward pass saves neither a gathered layer nor what
follows from it alone. `scan_and_update` also updates layers in the backward pass; see
`in_backward`.

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
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun

from jax_muon import jaxprs


class Loop(NamedTuple):
    """How `jax.lax.scan` goes over layers."""

    length: int
    reverse: bool
    unroll: int

    @property
    def numbers(self) -> np.ndarray:
        """Those of the layers, as they are stacked."""
        return np.arange(self.length)

    @property
    def first(self) -> int:
        """The layer that the forward pass begins with."""
        return self.length - 1 if self.reverse else 0

    @property
    def on(self) -> int:
        """From a layer to the next one in the forward pass."""
        return -1 if self.reverse else 1

    def forward(self, step: Callable[..., Any], carry: Any, xs: Any) -> Any:
        return jax.lax.scan(step, carry, xs, reverse=self.reverse, unroll=self.unroll)

    def backward(self, step: Callable[..., Any], carry: Any, xs: Any) -> Any:
        back = self._replace(reverse=not self.reverse)
        return back.forward(step, carry, xs)

    def at(self, stacks: Any, i: Any) -> Any:
        """Element i of each stack of a tree; beyond an end, the last one there."""
        i = jnp.clip(i, 0, self.length - 1)
        return jax.tree.map(
            lambda x: jax.lax.dynamic_index_in_dim(x, i, 0, keepdims=False), stacks
        )


def scan(
    run: Callable[..., Any],
    gathers: Sequence[Callable[[list[Any]], list[Any]]],
    scatters: Sequence[Callable[[list[Any]], list[Any]]],
    loop: Loop,
    *,
    keep_gathered: bool,
    late: bool,
) -> Callable[..., Any]:
    """A scan over layers: of (consts, carry, shards, xs) to (carry, ys).

    `run` maps (consts, carry, layer, xs) to (carry, ys). `gathers`, one after another,
    turn shards into a layer, and `scatters` a layer's gradient into those of its
    shards: one of each, or, in two levels, two. A layer's gradient is scattered array
    by array while the layer runs, or, if `late`, all at once while the next one runs.
    In two levels it must be late.
    """
    first, on = loop.first, loop.on
    *between_hosts, gather = gathers
    levels = len(between_hosts)

    def forward(run: Callable[..., Any], args: Any) -> Any:
        consts, carry, shards, xs = args

        def part(i: Any) -> list[Any]:
            """What is gathered last for layer i: shards, or a host's part of them."""
            return _chain(between_hosts, loop.at(shards, i))

        def step(state: Any, i_x: Any) -> Any:
            (carry, layer, parts), (i, x) = state, i_x
            # In two levels, those of this layer, the next one, and the one after it.
            parts = [*parts, part(i + (2 * levels or 1) * on)]
            following = gather(parts[levels])
            (carry, ys), saved = run(consts, carry, layer, x)
            return (carry, following, parts[1:]), (ys, saved, parts[:levels])

        parts = [part(first + ahead * on) for ahead in range(2 * levels)]
        start = carry, gather(parts[0] if parts else part(first)), parts
        (carry, last, _), (ys, saved, kept) = loop.forward(
            step, start, (loop.numbers, xs)
        )
        return (carry, ys), (saved, last, *kept)

    def backward(residuals: Any, cotangents: Any) -> Any:
        (saved, last, *kept), (consts, _, shards, xs) = residuals
        d_carry, d_ys = _only(cotangents, real=True)
        (parts,) = kept or [shards]

        def step(state: Any, inputs: Any) -> Any:
            d_carry, total, layer, waiting = state
            i, pull_of, x, d_ys = inputs
            # What keep_gathered has saved, pull_of takes from there.
            before = layer if keep_gathered else gather(loop.at(parts, i - on))
            pull = pull_of(consts, layer, x)
            ((d_consts, d_carry, d_layer, d_x),) = pull((d_carry, d_ys))
            total = jax.tree.map(jnp.add, total, d_consts)
            if late:  # each scatter takes what the one before it made a layer ago
                pairs = zip(scatters, waiting, strict=True)
                *waiting, now = d_layer, *(scatter(d) for scatter, d in pairs)
            else:
                now = _chain(scatters, d_layer)
            return (d_carry, total, before, waiting), (now, d_x)

        zeros = jax.tree.map(jnp.zeros_like, _only(consts, real=True))
        waiting = [jax.tree.map(jnp.zeros_like, last)] if late else []
        for scatter in scatters[:-1]:
            waiting.append(jax.tree.map(jnp.zeros_like, scatter(waiting[-1])))
        (d_carry, d_consts, _, waiting), (d_shards, d_xs) = loop.backward(
            step, (d_carry, zeros, last, waiting), (loop.numbers, saved, xs, d_ys)
        )
        if late:  # gradients are where those of a layer before belong
            d_shards = [jnp.roll(d, len(waiting) * on, axis=0) for d in d_shards]
        for j, d_layer in reversed([*enumerate(waiting)]):
            of_layer = _chain(scatters[j:], d_layer)
            pairs = zip(d_shards, of_layer, strict=True)
            d_shards = [those.at[first + j * on].set(d) for those, d in pairs]
        return d_consts, d_carry, d_shards, d_xs

    return _with_gradient(run, keep_gathered, forward, backward)


def scan_and_update(
    run: Callable[..., Any],
    gather: Callable[[list[Any]], list[Any]],
    scatter: Callable[[list[Any]], list[Any]],
    update: Callable[[Any, list[Any], list[Any], Any], tuple[list[Any], Any]],
    loop: Loop,
    *,
    together: int,
    on_each: Callable[[Callable[..., Any]], Callable[..., Any]],
    keep_gathered: bool,
) -> Callable[..., Any]:
    """A scan of (consts, carry, shards, xs, state) whose gradient is an update.

    The gradients of shards and state are what `update` makes of (index of a
    layer, gradients, shards, state): in the backward pass, `together` layers from this
    one on at a time. If that is one, as on one device, no layer is gathered ahead.
    `on_each` turns a function of one device's values into one of all devices'.
    """
    is_ahead = together > 1

    def layer_at(shards: list[Any], i: Any) -> list[Any]:
        return gather(loop.at(shards, i))

    def forward(run: Callable[..., Any], args: Any) -> Any:
        consts, carry, shards, xs, _ = args

        def step(state: Any, i_x: Any) -> Any:
            (carry, layer), (i, x) = state, i_x
            following = layer_at(shards, i + loop.on) if is_ahead else None
            layer = layer if is_ahead else layer_at(shards, i)
            (carry, ys), saved = on_each(run)(consts, carry, layer, x)
            return (carry, following), (ys, saved)

        start = carry, layer_at(shards, loop.first) if is_ahead else None
        (carry, last), (ys, saved) = loop.forward(step, start, (loop.numbers, xs))
        return (carry, ys), (saved, last)

    def backward(residuals: Any, cotangents: Any) -> Any:
        (saved, last), (consts, _, shards, xs, state) = residuals
        d_carry, d_ys = _only(cotangents, real=True)

        def pull(pull_of: Any, consts: Any, layer: Any, x: Any, d: Any) -> Any:
            return pull_of(consts, layer, x)(d)[0]

        def several(before: Any, numbers: Any) -> Any:
            before, shards, state = before

            def step(before: Any, i: Any) -> Any:
                d_carry, total, layer = before
                pull_of, x, d_y = loop.at((saved, xs, d_ys), i)
                if not is_ahead:
                    layer, following = layer_at(shards, i), None
                else:
                    following = (
                        layer if keep_gathered else layer_at(shards, i - loop.on)
                    )
                d_consts, d_carry, d_layer, d_x = on_each(pull)(
                    pull_of, consts, layer, x, (d_carry, d_y)
                )
                total = jax.tree.map(jnp.add, total, d_consts)
                return (d_carry, total, following), (scatter(d_layer), d_x)

            before, (grads, d_xs) = loop.backward(step, before, numbers)
            return (before, *update(numbers[0], grads, shards, state)), d_xs

        zeros = jax.tree.map(jnp.zeros_like, _only(consts, real=True))
        ((d_carry, d_consts, _), shards, state), d_xs = jax.lax.scan(
            several,
            ((d_carry, zeros, last), shards, state),
            loop.numbers.reshape(-1, together),
            reverse=not loop.reverse,
        )
        d_xs = jax.tree.map(lambda x: x.reshape(loop.length, *x.shape[2:]), d_xs)
        return d_consts, d_carry, shards, d_xs, state

    return _with_gradient(run, keep_gathered, forward, backward)


def _chain(functions: Sequence[Callable[[Any], Any]], x: Any) -> Any:
    """The functions applied to x, one after another."""
    return functools.reduce(lambda x, function: function(x), functions, x)


def _with_gradient(
    run: Callable[..., Any],
    keep_gathered: bool,
    forward: Callable[..., Any],
    backward: Callable[..., Any],
) -> Callable[..., Any]:
    """A scan with a gradient written by hand.

    `forward` is of (run, args), where run returns what the gradient needs beside its
    own results, and returns results and residuals; `backward` is of the residuals, with
    what was given, and of the cotangents.
    """

    @jax.custom_vjp
    def prefetching(*args: Any) -> Any:
        return forward(lambda *args: (run(*args), ()), args)[0]

    def save(*args: Any) -> Any:
        results, saved = forward(functools.partial(_vjp, run, keep_gathered), args)
        return results, (saved, args)

    prefetching.defvjp(save, backward)
    return prefetching


def _vjp(run: Callable[..., Any], keep_gathered: bool, *args: Any) -> Any:
    """`jax.vjp` of a layer: its results, and what gives the function for its gradient.

    The latter is a tree of what JAX saves, without what can be computed again from the
    layer alone, from constants alone, or from xs alone. Called with (consts, layer, xs)
    it returns the function from cotangents of results to cotangents of arguments,
    with None for integers.
    """

    def save(*args: Any) -> Any:
        def of_reals(reals: Any) -> Any:
            results = run(*_either(reals, _only(args, real=False)))
            return _only(results, real=True), _only(results, real=False)

        reals, pull, others = jax.vjp(of_reals, _only(args, real=True), has_aux=True)
        return _either(reals, others), pull

    closed, shapes = jax.make_jaxpr(save, return_shape=True)(*args)
    outs = jaxpr_as_fun(closed)(*jax.tree.leaves(args))
    results, pull = jax.tree.unflatten(jax.tree.structure(shapes), outs)
    residuals, treedef = jax.tree.flatten(pull)
    names = ("consts", "saved", "saved" if keep_gathered else "layer", "xs")
    sources = [
        x for x, tree in zip(names, args, strict=True) for _ in jax.tree.leaves(tree)
    ]
    jaxpr, saved = _what_to_save(closed.jaxpr, sources, len(residuals))
    recompute, inputs = jaxprs.needed_for(jaxpr, [not x for x in saved])
    unused = jax.tree.map(lambda x: 0, args[1])

    def pull_of(kept: list[Any], consts: Any, layer: Any, xs: Any) -> Any:
        flat = jax.tree.leaves((consts, unused, layer, xs))
        computed = jaxpr_as_fun(ClosedJaxpr(recompute, closed.consts))(
            *itertools.compress(flat, inputs)
        )
        parts = {True: iter(kept), False: iter(computed)}
        return jax.tree.unflatten(treedef, [next(parts[x]) for x in saved])

    kept = list(itertools.compress(residuals, saved))
    return results, jax.tree_util.Partial(pull_of, kept)


def _what_to_save(
    jaxpr: Jaxpr, sources: Sequence[str], count: int
) -> tuple[Jaxpr, list[bool]]:
    """A function of the last `count` results alone, and which of them are saved.

    `sources` says what each argument is; what follows from several sources, or from
    one that is "saved", is saved. Nothing that has an effect, such as a print, happens
    again: its result is one more argument.
    """
    effects = [v for eqn in jaxpr.eqns if eqn.effects for v in eqn.outvars]
    sources = [*sources, *["saved"] * len(effects)]
    jaxpr = jaxprs.changed(
        jaxpr,
        invars=[*jaxpr.invars, *effects],
        outvars=jaxpr.outvars[len(jaxpr.outvars) - count :],
        eqns=[eqn for eqn in jaxpr.eqns if not eqn.effects],
        effects=frozenset(),
    )

    def is_saved(place: int) -> bool:
        only = [place == other for other in range(count)]
        needed = jaxprs.needed_for(jaxpr, only)[1]
        used = set(itertools.compress(sources, needed))
        return "saved" in used or len(used) > 1

    return jaxpr, [is_saved(place) for place in range(count)]


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
