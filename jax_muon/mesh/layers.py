"""Scanned layers whose arrays are divided: each is gathered while the one before runs.

`ByLayers` runs any function, traced with whole shapes, on divided arrays: they stay
divided (`Held`) through casts and transposes until a scan, or a slice, takes one layer
of them. Such a scan becomes `_Scan`, whose gradient is written by hand:

  forward:  layer i + 1 is gathered while layer i runs;
  backward: layer i - 1 is gathered while layer i runs, and the gradient of layer i + 1
            is scattered.

Gathered layers, and what depends on nothing else, are never kept for the backward pass.
How a layer is gathered and its gradient scattered is up to the caller (`Exchange`):
`gradients.py` does so inside shard_map, `scan_layers` in plain jit.
"""

import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.dtypes import float0
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, jaxpr_as_fun
from jax.interpreters import partial_eval
from jax.sharding import PartitionSpec

# Primitives whose jaxpr takes exactly their own operands.
_CALLS = ("jit", "pjit", "closed_call")
_REMATERIALIZED = ("remat2", "checkpoint", "remat")


class Exchange(Protocol):
    """How one layer of an array is gathered, and its gradient scattered."""

    def gather(self, x: Any, spec: PartitionSpec) -> Any:
        """The whole of an array, given this device's piece of it."""

    def scatter(self, g: Any, spec: PartitionSpec, dtype: Any, extra: Any) -> Any:
        """This device's piece of the gradient, in the dtype of the array."""


@dataclasses.dataclass(frozen=True)
class Held:
    """An array that is divided still, and what is done to it once it is gathered.

    Attributes:
      leaf: its place among the arguments of the function.
      x: this device's piece, or its shape.
      spec: how it is divided, an entry for each axis.
      casts: dtypes that it is cast to, one after another.
      is_layer: whether it is one layer of an argument.
    """

    leaf: int
    x: Any
    spec: tuple[Any, ...]
    casts: tuple[Any, ...] = ()
    is_layer: bool = False

    def layer(self) -> "Held":
        """A layer of it, without its piece."""
        return dataclasses.replace(self, x=None, spec=self.spec[1:], is_layer=True)

    def gathered(self, x: Any, exchange: Exchange) -> Any:
        """The whole array of a piece, which is sent in the narrowest dtype."""
        sizes = [jnp.dtype(d).itemsize for d in (x.dtype, *self.casts)]
        before = sizes.index(min(sizes))
        for dtype in self.casts[:before]:
            x = x.astype(dtype)
        x = exchange.gather(x, PartitionSpec(*self.spec))
        for dtype in self.casts[before:]:
            x = x.astype(dtype)
        return x

    def after(self, eqn: JaxprEqn, given: Sequence[Any]) -> "Held | None":
        """What an operation makes of it that needs no other device's piece."""
        name, params = eqn.primitive.name, eqn.params
        given_kind: Any = eqn.invars[0].aval
        kind: Any = eqn.outvars[0].aval
        shape = given_kind.shape
        whole = [entry is None for entry in self.spec]
        if name == "convert_element_type":
            if not jnp.issubdtype(kind.dtype, jnp.inexact):
                return None
            return dataclasses.replace(self, casts=(*self.casts, kind.dtype))
        if name == "transpose":
            order = params["permutation"]
            spec = tuple(self.spec[axis] for axis in order)
            return self._moved(lambda x: jnp.transpose(x, order), spec)
        if name == "reshape":  # of axes before all that are divided
            first = whole.index(False)
            lead = len(kind.shape) - len(shape[first:])
            if lead < 0 or kind.shape[lead:] != shape[first:]:
                return None
            spec = (None,) * lead + self.spec[first:]
            return self._moved(
                lambda x: x.reshape(*kind.shape[:lead], *x.shape[first:]), spec
            )
        if name == "squeeze" and all(whole[axis] for axis in params["dimensions"]):
            axes = params["dimensions"]
            spec = tuple(e for axis, e in enumerate(self.spec) if axis not in axes)
            return self._moved(lambda x: jnp.squeeze(x, axes), spec)
        if name in ("slice", "dynamic_slice"):  # one layer, in a Python loop
            cut = [
                a
                for a, (n, m) in enumerate(zip(shape, kind.shape, strict=True))
                if n != m
            ]
            if len(cut) != 1 or not whole[cut[0]] or kind.shape[cut[0]] != 1:
                return None
            if name == "slice":
                start = params["start_indices"][cut[0]]
            else:
                start = given[1 + cut[0]]
            held = self._moved(
                lambda x: jax.lax.dynamic_slice_in_dim(x, start, 1, cut[0]), self.spec
            )
            return dataclasses.replace(held, is_layer=True)
        return None

    def _moved(self, function: Callable[[Any], Any], spec: tuple[Any, ...]) -> "Held":
        x = None if self.x is None else function(self.x)
        return dataclasses.replace(self, x=x, spec=spec)


@dataclasses.dataclass
class Uses:
    """What a function does with the arrays that it is given divided.

    Attributes:
      scanned: the places of arguments that a scan takes a layer of at a time.
      others: of arguments that are used whole, the operation that does so.
    """

    scanned: set[int] = dataclasses.field(default_factory=set)
    others: dict[int, str] = dataclasses.field(default_factory=dict)

    def look(self, jaxpr: Jaxpr, given: Sequence[Held | None]) -> list[Held | None]:
        """Follow arguments through a function; which of its results are still held."""
        env = _Environment(jaxpr.invars, given)
        for eqn in jaxpr.eqns:
            held = [_if_held(env.get(v)) for v in eqn.invars]
            if any(held):
                env.set(eqn.outvars, self._look_at(eqn, held))
        return [_if_held(env.get(v)) for v in jaxpr.outvars]

    def _look_at(self, eqn: JaxprEqn, given: list[Held | None]) -> list[Held | None]:
        name = eqn.primitive.name
        if name in _CALLS or _is_rematerialized(eqn):
            results = self.look(_inner(eqn).jaxpr, given)
            return results if name in _CALLS else self.end(name, results)
        if name == "scan":
            taken = _scanned(eqn, given)
            self.scanned |= {
                held.leaf
                for place, held in enumerate(given)
                if held is not None and place in taken
            }
            rest = [x for place, x in enumerate(given) if place not in taken]
            self.look(_inner(eqn).jaxpr, _layers(given, taken))
            return self.end(name, rest, len(eqn.outvars))
        if given[0] is not None and (found := given[0].after(eqn, given)):
            return [found]
        return self.end(name, given, len(eqn.outvars))

    def end(self, name: str, given: Sequence[Held | None], results: int = 0) -> list:
        """What is used here is gathered: a layer, or else all layers at once."""
        for held in given:
            if held is not None and not held.is_layer:
                self.others.setdefault(held.leaf, name)
        return [None] * (results or len(given))


class ByLayers:
    """A function of arrays, some of which are divided and gathered a layer at a time.

    Attributes:
      others: for each divided array that has to be whole, by its place among the
        arguments, the operation that uses it so.
      held: the places of all other divided ones.
    """

    def __init__(
        self, function: Callable[..., Any], args: Any, specs: Sequence[PartitionSpec]
    ) -> None:
        """Trace a function.

        Args:
          function: of whole arrays.
          args: its arguments, or their shapes.
          specs: how the first of them are divided, with an entry for each axis.
        """
        self._closed, results = jax.make_jaxpr(function, return_shape=True)(*args)
        self._treedef = jax.tree.structure(results)
        jaxpr = self._closed.jaxpr
        given: list[Held | None] = [None] * len(jaxpr.invars)
        self._as_held = {
            place: Held(place, None, tuple(spec))
            for place, spec in enumerate(specs)
            if any(spec)
        }
        for place, held in self._as_held.items():
            given[place] = held
        uses = Uses()
        uses.end("the results", uses.look(jaxpr, given))
        self.others = uses.others
        self.held = self._as_held.keys() - uses.others.keys()

    def __call__(
        self,
        exchange: Exchange,
        *args: Any,
        extra: Any = (),
        keep_gathered: bool = False,
    ) -> Any:
        """The function's results.

        Args:
          exchange: how layers are gathered, and their gradients scattered.
          *args: its arguments; of those in `held`, this device's pieces.
          extra: a tree of arrays that `exchange.scatter` is given.
          keep_gathered: whether scans keep gathered layers for the backward pass.
        """
        evaluation = _Evaluation(exchange, keep_gathered, extra)
        results = evaluation.run(self._closed, self._given(args))
        return jax.tree.unflatten(self._treedef, results)

    def result(self, place: int, exchange: Exchange, *args: Any) -> Any:
        """One of the results, of which nothing else is computed."""
        jaxpr = self._closed.jaxpr
        used = [place == other for other in range(len(jaxpr.outvars))]
        less, needed = partial_eval.dce_jaxpr(jaxpr, used)
        closed = ClosedJaxpr(less, self._closed.consts)
        given = list(itertools.compress(self._given(args), needed))
        return _Evaluation(exchange, False, ()).run(closed, given)[0]

    def _given(self, args: Any) -> list[Any]:
        flat = jax.tree.leaves(args)
        for place in self.held:
            flat[place] = dataclasses.replace(self._as_held[place], x=flat[place])
        return flat


@dataclasses.dataclass(frozen=True)
class _Evaluation:
    """Runs functions of arrays, some of which are `Held`."""

    exchange: Exchange
    keep_gathered: bool
    extra: Any

    def run(self, closed: ClosedJaxpr, given: Sequence[Any]) -> list[Any]:
        jaxpr = closed.jaxpr
        env = _Environment(jaxpr.invars, given)
        env.set(jaxpr.constvars, closed.consts)
        for eqn in jaxpr.eqns:
            inputs = [env.get(v) for v in eqn.invars]
            results = None
            if any(isinstance(x, Held) for x in inputs):
                results = self._of_held(eqn, inputs)
                if results is None:  # gathered once, if it is used again
                    env.set(eqn.invars, [self._whole(x) for x in inputs])
            env.set(eqn.outvars, _bind(eqn, jaxpr, env) if results is None else results)
        return [env.get(v) for v in jaxpr.outvars]

    def _of_held(self, eqn: JaxprEqn, given: list[Any]) -> list[Any] | None:
        name = eqn.primitive.name
        if name in _CALLS:
            return self.run(_inner(eqn), given)
        if _is_rematerialized(eqn):

            def function(extra: Any, pieces: Any) -> list[Any]:
                inner = dataclasses.replace(self, extra=extra)
                results = inner.run(_inner(eqn), _with_pieces(given, pieces))
                return [inner._whole(x) for x in results]

            again = {name: eqn.params[name] for name in ("prevent_cse", "policy")}
            return jax.checkpoint(function, **again)(self.extra, _pieces(given))
        if name == "scan" and _scanned(eqn, given):
            return self._scan(eqn, given)
        held = given[0].after(eqn, given) if isinstance(given[0], Held) else None
        return None if held is None else [held]

    def _whole(self, x: Any) -> Any:
        """A layer that is used by no scan: gathered, its gradient scattered."""
        if not isinstance(x, Held):
            return x
        dtype = x.x.dtype

        @jax.custom_vjp
        def gather(extra: Any, piece: Any) -> Any:
            return x.gathered(piece, self.exchange)

        def scatter(extra: Any, g: Any) -> Any:
            spec = PartitionSpec(*x.spec)
            piece = self.exchange.scatter(g, spec, dtype, extra)
            return jax.tree.map(jnp.zeros_like, extra), piece

        gather.defvjp(lambda extra, piece: (gather(extra, piece), extra), scatter)
        return gather(self.extra, x.x)

    def _scan(self, eqn: JaxprEqn, given: list[Any]) -> list[Any]:
        params, body = eqn.params, _inner(eqn)
        taken = _scanned(eqn, given)
        given = [x if i in taken else self._whole(x) for i, x in enumerate(given)]
        uses = Uses()
        uses.look(body.jaxpr, _layers(given, taken))
        # Those that a scan within this one takes stay divided here.
        constants, first = _before_layers(eqn)
        ours = [i for i in taken if given[i].leaf not in uses.scanned]
        others = [i for i in range(first, len(given)) if i not in ours]
        consts, carry = given[:constants], given[constants:first]
        xs = _pieces([given[i] for i in others])

        def run(consts: Any, carry: Any, layer: Any, xs: Any, extra: Any) -> Any:
            inputs = [*consts, *carry, *[None] * (len(given) - first)]
            for i, x in zip(ours, layer, strict=True):
                inputs[i] = x
            for i, x in zip(others, xs, strict=True):
                held = given[i].layer() if i in taken else None
                inputs[i] = x if held is None else dataclasses.replace(held, x=x)
            inner = dataclasses.replace(self, extra=extra)
            results = [inner._whole(x) for x in inner.run(body, inputs)]
            return results[: len(carry)], results[len(carry) :]

        if not ours:
            carry, ys = jax.lax.scan(
                lambda carry, xs: run(consts, carry, [], xs, self.extra),
                carry,
                xs,
                params["length"],
                params["reverse"],
                params["unroll"],
            )
            return [*carry, *ys]
        scan = _Scan(
            run,
            [given[i].layer() for i in ours],
            self.exchange,
            self.keep_gathered,
            params["length"],
            params["reverse"],
            params["unroll"],
        )
        pieces = [given[i].x for i in ours]
        carry, ys = scan(consts, carry, pieces, xs, self.extra)
        return [*carry, *ys]


@dataclasses.dataclass(frozen=True)
class _Scan:
    """A scan that gathers each layer while one before runs.

    Attributes:
      run: of (consts, carry, layer, xs, extra) to (carry, ys), all of them lists.
      layers: how each array of a layer is divided.
    """

    run: Callable[..., Any]
    layers: list[Held]
    exchange: Exchange
    keep_gathered: bool
    length: int
    reverse: bool
    unroll: int

    def __call__(
        self, consts: Any, carry: Any, pieces: Any, xs: Any, extra: Any
    ) -> Any:
        """The last carry, and the outputs, stacked."""
        loop = functools.partial(jax.lax.scan, unroll=self.unroll)
        step_on = -1 if self.reverse else 1
        every = np.arange(self.length)
        plan = _Kept()  # by tracing the forward pass

        def gather(pieces: Any, i: Any) -> Any:
            i = jnp.clip(i, 0, self.length - 1)
            return [
                held.gathered(
                    jax.lax.dynamic_index_in_dim(x, i, keepdims=False), self.exchange
                )
                for held, x in zip(self.layers, pieces, strict=True)
            ]

        def forward(
            save: bool, consts: Any, carry: Any, pieces: Any, xs: Any, extra: Any
        ) -> Any:
            def step(state: Any, i_x: Any) -> Any:
                (carry, layer), (i, x) = state, i_x
                following = gather(pieces, i + step_on)
                given = (consts, carry, layer, x)
                if save:
                    (carry, ys), kept = plan.trace(self, extra, *given)
                else:
                    (carry, ys), kept = self.run(*given, extra), []
                return (carry, following), (ys, kept)

            first = gather(pieces, self.length - 1 if self.reverse else 0)
            (carry, last), (ys, kept) = loop(
                step, (carry, first), (every, xs), reverse=self.reverse
            )
            return (carry, ys), (kept, last)

        @jax.custom_vjp
        def scan(consts: Any, carry: Any, pieces: Any, xs: Any, extra: Any) -> Any:
            return forward(False, consts, carry, pieces, xs, extra)[0]

        def scan_and_keep(*given: Any) -> Any:
            results, kept = forward(True, *given)
            return results, (kept, given)

        def backward(residuals: Any, cotangents: Any) -> Any:
            (kept, last), (consts, carry, pieces, xs, extra) = residuals
            d_carry, d_ys = (_real(x) for x in cotangents)
            zeros = [jnp.zeros_like(x) for x in consts if _is_real(x)]

            def step(state: Any, inputs: Any) -> Any:
                d_carry, layer, total = state
                i, x, kept, d_ys = inputs
                before = layer if self.keep_gathered else gather(pieces, i - step_on)
                pull = plan.pull(kept, extra, consts, layer, x)
                d_consts, d_carry, d_layer, d_x = (
                    _real(d) for d in pull(plan.cotangents(d_carry, d_ys))
                )
                d_pieces = [
                    self.exchange.scatter(d, PartitionSpec(*held.spec), x.dtype, extra)
                    for held, d, x in zip(self.layers, d_layer, pieces, strict=True)
                ]
                total = [a + b for a, b in zip(total, d_consts, strict=True)]
                return (d_carry, before, total), (d_pieces, d_x)

            (d_carry, _, d_consts), (d_pieces, d_xs) = loop(
                step,
                (d_carry, last, zeros),
                (every, xs, kept, d_ys),
                reverse=not self.reverse,
            )
            return (
                _as_cotangents(d_consts, consts),
                _as_cotangents(d_carry, carry),
                d_pieces,
                _as_cotangents(d_xs, xs),
                jax.tree.map(jnp.zeros_like, extra),
            )

        scan.defvjp(scan_and_keep, backward)
        return scan(consts, carry, pieces, xs, extra)


class _Kept:
    """What the forward pass keeps for the backward one, and how the rest is had again.

    Of what JAX would keep of a layer's run, the gathered layer and what follows from
    nothing but it and constants is computed again; inputs of the layer are there still.
    """

    def trace(self, scan: _Scan, *given: Any) -> Any:
        """Run a layer: its results, and what is kept."""

        def run(extra: Any, *given: Any) -> Any:
            results, pull = jax.vjp(lambda *x: scan.run(*x, extra), *given)
            residuals, self.treedef = jax.tree.flatten(pull)
            return results, residuals

        closed, (self.types, _) = jax.make_jaxpr(run, return_shape=True)(*given)
        jaxpr, results = closed.jaxpr, len(jax.tree.leaves(self.types))
        extra, consts, carry, layer, xs = (len(jax.tree.leaves(x)) for x in given)
        known = [True] * (extra + consts) + [False] * carry
        known += [not scan.keep_gathered] * layer + [False] * xs
        there = {
            var: place
            for place, var in enumerate(jaxpr.invars)
            if known[place] or place >= len(known) - xs
        }

        def needed(outputs: set[int]) -> tuple[Jaxpr, list[bool]]:
            used = [place in outputs for place in range(len(jaxpr.outvars))]
            return partial_eval.dce_jaxpr(jaxpr, used)

        self.sources: list[tuple[str, int]] = []
        again: set[int] = set()
        kept: list[int] = []
        for place, var in enumerate(jaxpr.outvars[results:], start=results):
            if not isinstance(var, Literal) and var in there:
                source = ("given", there[var])
            elif all(map(operator.le, needed({place})[1], known)):
                source = ("again", len(again))
                again.add(place)
            else:
                source = ("kept", len(kept))
                kept.append(place)
            self.sources.append(source)
        less, self.needed = needed(again)
        self.again: Any = lambda *x: []
        if again:  # otherwise what has effects would be left, and run once more
            self.again = jaxpr_as_fun(ClosedJaxpr(less, closed.consts))
        outs = jaxpr_as_fun(closed)(*jax.tree.leaves(given))
        treedef = jax.tree.structure(self.types)
        return jax.tree.unflatten(treedef, outs[:results]), [outs[i] for i in kept]

    def pull(self, kept: Any, extra: Any, consts: Any, layer: Any, xs: Any) -> Any:
        """The function from cotangents of a layer's results to those of its inputs."""
        carry = [None] * len(self.types[0])
        given = [*jax.tree.leaves(extra), *consts, *carry, *layer, *xs]
        again = self.again(*itertools.compress(given, self.needed))
        found = {"kept": kept, "given": given, "again": again}
        residuals = [found[source][place] for source, place in self.sources]
        return jax.tree.unflatten(self.treedef, residuals)

    def cotangents(self, d_carry: Any, d_ys: Any) -> Any:
        """Those of a layer's results, also of integers."""
        carry, ys = self.types
        return _as_cotangents(d_carry, carry), _as_cotangents(d_ys, ys)


class _Environment:
    """The values of a jaxpr's variables."""

    def __init__(self, names: Sequence[Any], values: Sequence[Any]) -> None:
        self._values: dict[Any, Any] = {}
        self.set(names, values)

    def get(self, name: Any) -> Any:
        return name.val if isinstance(name, Literal) else self._values.get(name)

    def set(self, names: Sequence[Any], values: Sequence[Any]) -> None:
        pairs = zip(names, values, strict=True)
        self._values |= {k: v for k, v in pairs if not isinstance(k, Literal)}


def _bind(eqn: JaxprEqn, jaxpr: Jaxpr, env: "_Environment") -> list[Any]:
    """The results of one operation of a jaxpr."""
    names = list({v: None for v in eqn.invars if not isinstance(v, Literal)})
    one = jaxpr.replace(
        constvars=(),
        invars=names,
        outvars=eqn.outvars,
        eqns=[eqn],
        effects=eqn.effects,
        debug_info=jaxpr.debug_info.with_unknown_names(),
    )
    return jaxpr_as_fun(ClosedJaxpr(one, ()))(*[env.get(v) for v in names])


def _inner(eqn: JaxprEqn) -> ClosedJaxpr:
    """The function that an operation calls."""
    found = eqn.params["jaxpr"]
    return found if isinstance(found, ClosedJaxpr) else ClosedJaxpr(found, ())


def _is_rematerialized(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name in _REMATERIALIZED and not eqn.params["differentiated"]


def _scanned(eqn: JaxprEqn, given: Sequence[Any]) -> list[int]:
    """The inputs of a scan that it takes a layer of at a time, and that are held."""
    _, first = _before_layers(eqn)
    return [
        place
        for place, x in enumerate(given)
        if place >= first and isinstance(x, Held) and x.spec[0] is None
    ]


def _before_layers(eqn: JaxprEqn) -> tuple[int, int]:
    """Where the carry of a scan begins among its inputs, and where its slices do."""
    if "ft_in" in eqn.params:  # newer than JAX 0.11.0
        inputs = eqn.params["ft_in"].update(eqn.invars)
        consts, carry, _ = map(list, inputs.unpack())
        return len(consts), len(consts) + len(carry)
    first = eqn.params["num_consts"]
    return first, first + eqn.params["num_carry"]


def _if_held(x: Any) -> Held | None:
    return x if isinstance(x, Held) else None


def _layers(given: Sequence[Any], taken: Sequence[int]) -> list[Held | None]:
    return [x.layer() if place in taken else None for place, x in enumerate(given)]


def _pieces(given: Sequence[Any]) -> list[Any]:
    return [x.x if isinstance(x, Held) else x for x in given]


def _with_pieces(given: Sequence[Any], pieces: Sequence[Any]) -> list[Any]:
    return [
        dataclasses.replace(x, x=piece) if isinstance(x, Held) else piece
        for x, piece in zip(given, pieces, strict=True)
    ]


def _is_real(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _real(cotangents: Sequence[Any]) -> list[Any]:
    """Without those of integers."""
    return [x for x in cotangents if x.dtype != float0]


def _as_cotangents(found: Sequence[Any], like: Sequence[Any]) -> list[Any]:
    """With those of integers."""
    reals = iter(found)
    return [next(reals) if _is_real(x) else np.zeros(x.shape, float0) for x in like]
