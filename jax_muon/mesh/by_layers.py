"""A function of whole arrays, run on shards: scanned layers are gathered one by one.

`ByLayers` traces the function with whole shapes. In its jaxpr a sharded array stays
sharded (`Held`) through casts, transposes, reshapes and slices until a scan takes one
layer of it. The scan becomes one that gathers each layer while another one runs; see
`prefetch`. All other operations get the whole array.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, jaxpr_as_fun
from jax.sharding import PartitionSpec

from jax_muon import jaxprs
from jax_muon.mesh import prefetch
from jax_muon.mesh.specs import entry_names


class Exchange(NamedTuple):
    """How one layer of an array is gathered, and its gradient scattered.

    Attributes:
      gather: of (shard, spec), the whole array; with mesh axes as a third argument,
        gathered over these alone.
      scatter: of (gradient of the whole, spec, dtype), the shard's gradient; with mesh
        axes as a fourth, scattered over these alone.
      keep_gathered: whether scans keep gathered layers for the backward pass.
      late: whether a scan scatters a layer's gradient all at once, one layer later.
      levels: mesh axes within a host and between hosts, if a scan gathers layers over
        one after the other.
      scan: makes the scan of (run, held arrays, loop, keep_gathered=), in the place of
        one that gathers and scatters; see `in_backward`.
      call: turns a function of one device's values into what is called with values.
    """

    gather: Callable[..., Any]
    scatter: Callable[..., Any]
    keep_gathered: bool = False
    late: bool = False
    levels: tuple[tuple[str, ...], ...] = ()
    scan: Callable[..., Any] | None = None
    call: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda function: function


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["x"],
    meta_fields=["leaf", "spec", "over", "casts", "is_layer", "in_scan"],
)
@dataclasses.dataclass(frozen=True)
class Held:
    """An array that is still sharded.

    Attributes:
      x: the shard; None while `_Look` only follows it.
      leaf: the index of the argument that it comes from.
      spec: how it is sharded, with an entry for each axis.
      over: the mesh axes over which it is gathered. An operation may end how it is
        sharded over others, which only XLA needs to know.
      casts: the dtypes that it is to be cast to, one after another.
      is_layer: whether it is one layer of that argument.
      in_scan: whether a scan took this layer.
    """

    x: Any
    leaf: int
    spec: tuple[Any, ...]
    over: frozenset[str]
    casts: tuple[Any, ...] = ()
    is_layer: bool = False
    in_scan: bool = False

    def is_divided(self, axis: int) -> bool:
        """Whether parts along this axis have to be gathered."""
        return not self.over.isdisjoint(entry_names(self.spec[axis]))

    def layer(self) -> "Held":
        """The same for one layer, after a scan has taken its shard."""
        spec = self.spec[1:]
        return dataclasses.replace(self, spec=spec, is_layer=True, in_scan=True)

    def gathered(self, exchange: Exchange, shard: Any, *hop: Any) -> Any:
        """Gather the whole array, sent in the narrower of its two dtypes.

        With a `hop`, one of `exchange.levels`, it is gathered over these mesh axes
        alone: first between hosts, so that the one within a host makes it whole.
        """
        spec = PartitionSpec(*self.spec)
        cast = functools.partial(functools.reduce, jax.lax.convert_element_type)
        if self.casts and self.casts[-1].itemsize > self.x.dtype.itemsize:
            whole = exchange.gather(shard, spec, *hop)
            is_whole = hop in ((), exchange.levels[:1])
            return cast(self.casts, whole) if is_whole else whole
        return exchange.gather(cast(self.casts, shard), spec, *hop)

    def scattered(self, exchange: Exchange, g: Any, *hop: Any) -> Any:
        """The shard's gradient, from the whole array's gradient g."""
        return exchange.scatter(g, PartitionSpec(*self.spec), self.x.dtype, *hop)

    def after(self, eqn: JaxprEqn, starts: Sequence[Any]) -> "Held | None":
        """The result of an operation that needs no other device's shard, or None."""
        before: Any = eqn.invars[0].aval
        result: Any = eqn.outvars[0].aval
        old, new, params, is_layer = before.shape, result.shape, eqn.params, False
        axes: Sequence[int | None]  # of the operand, for each axis of the result
        match eqn.primitive.name:
            case "convert_element_type" if jnp.issubdtype(result.dtype, jnp.inexact):
                return dataclasses.replace(self, casts=(*self.casts, result.dtype))
            case "transpose":
                axes = params["permutation"]
            case "reshape" | "squeeze":
                # An axis stays if its size does, and the product of sizes before it.
                places = {(math.prod(old[:a]), n): a for a, n in enumerate(old)}
                axes = [places.get((math.prod(new[:a]), n)) for a, n in enumerate(new)]
            case "slice" | "dynamic_slice" if not params.get("strides"):
                axes = [a if n == old[a] else None for a, n in enumerate(new)]
                is_layer = any(n < old[a] and n == 1 for a, n in enumerate(new))
            case _:
                return None
        if any(self.is_divided(a) and a not in axes for a in range(len(old))):
            return None
        spec = tuple(None if a is None else self.spec[a] for a in axes)
        x, is_layer = self.x, is_layer or self.is_layer
        if x is not None:
            kept = zip(axes, spec, new, strict=True)
            sizes = tuple(x.shape[a] if entry else n for a, entry, n in kept)
            match eqn.primitive.name:
                case "transpose":
                    x = x.transpose(axes)
                case "reshape" | "squeeze":
                    x = x.reshape(sizes)
                case _:  # it clamps starts; jax.lax.dynamic_slice wraps negative ones
                    starts = params.get("start_indices", starts)
                    x = jax.lax.dynamic_slice_p.bind(x, *starts, slice_sizes=sizes)
        return dataclasses.replace(self, x=x, spec=spec, is_layer=is_layer)


class ByLayers:
    """A function of arrays, some of them sharded and gathered a layer at a time.

    Attributes:
      others: for each sharded array that must be whole, by its index among the
        arguments, the operation that uses it so.
      held: the indices of all other sharded arrays.
      scanned: the indices of those that a scan takes layer by layer.
      indexed: the indices of arguments that an operation takes a layer from.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        args: Any,
        specs: Sequence[PartitionSpec],
        over: Collection[str],
        gather: Callable[[Any, PartitionSpec], Any],
    ) -> None:
        """Trace a function of whole arrays for shards of them, or for their shapes.

        The first leaves of args have these specs: none if nothing has to be gathered
        over the mesh axes `over`, or an entry for each axis.
        """
        flat, treedef = jax.tree.flatten(args)
        for leaf, spec in enumerate(specs):
            if any(spec):
                flat[leaf] = jax.eval_shape(lambda x, s=spec: gather(x, s), flat[leaf])
        args = jax.tree.unflatten(treedef, flat)
        self._closed, results = jax.make_jaxpr(function, return_shape=True)(*args)
        self._treedef = jax.tree.structure(results)
        kinds = self._closed.in_avals
        self._sharded = {
            leaf: Held(None, leaf, tuple(spec), frozenset(over))
            for leaf, spec in enumerate(specs)
            # Integers and keys have no gradient to scatter.
            if any(spec) and jnp.issubdtype(kinds[leaf].dtype, jnp.inexact)
        }
        look = _Look()
        look.results(self._closed, [self._sharded.get(i) for i in range(len(kinds))])
        self.others, self.scanned, self.indexed = (
            look.others,
            look.scanned,
            look.indexed,
        )
        self.held = self._sharded.keys() - look.others.keys()

    @property
    def how(self) -> dict[int, str]:
        """How sharded arrays are gathered, in words, by their index."""
        how = dict.fromkeys(self.held, "a layer at a time")
        return how | {i: f"whole, for {name}" for i, name in self.others.items()}

    def __call__(self, exchange: Exchange, *args: Any) -> Any:
        """The function's results, of shards for those in `held`."""
        flat = jax.tree.leaves(args)
        for leaf in self.held:
            flat[leaf] = dataclasses.replace(self._sharded[leaf], x=flat[leaf])
        results = _Evaluation(exchange).results(self._closed, flat)
        return jax.tree.unflatten(self._treedef, results)


class _Evaluation:
    """Computes functions of arrays, some of them `Held`.

    `_Look` replaces all that computes: `whole`, `bind`, `checkpoint`, `scan`, and
    `_constants`.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    def results(self, closed: ClosedJaxpr, operands: Sequence[Any]) -> list[Any]:
        """The function's results, whole."""
        return [self.whole(x, "the results") for x in self.run(closed, operands)]

    def run(self, closed: ClosedJaxpr, operands: Sequence[Any]) -> list[Any]:
        """The function's results; some may be held."""
        jaxpr = closed.jaxpr
        consts = self._constants(closed.consts)
        env = dict(zip(jaxpr.constvars, consts, strict=True))
        env |= dict(zip(jaxpr.invars, operands, strict=True))

        def read(v: Any) -> Any:
            return self._constants([v.val])[0] if isinstance(v, Literal) else env[v]

        for eqn in jaxpr.eqns:
            inputs = [v for v in eqn.invars if not isinstance(v, Literal)]
            results = None
            if any(isinstance(env[v], Held) for v in inputs):
                results = self._of_held(eqn, [read(v) for v in eqn.invars])
            if results is None:
                # In order, since all processes have to gather in the same one.
                names = list(dict.fromkeys(inputs))
                for v in names:  # gathered once, if it is used again
                    env[v] = self.whole(env[v], eqn.primitive.name)
                operation = jaxprs.changed(
                    jaxpr,
                    constvars=(),
                    invars=names,
                    outvars=eqn.outvars,
                    eqns=[eqn],
                    effects=eqn.effects,
                )
                results = self.bind(ClosedJaxpr(operation, ()), [env[v] for v in names])
            env |= dict(zip(eqn.outvars, results, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def _constants(self, constants: list[Any]) -> list[Any]:
        results: list[Any] = self._exchange.call(lambda: constants)()
        return results

    def _of_held(self, eqn: JaxprEqn, operands: list[Any]) -> list[Any] | None:
        """Results of an operation on held arrays, or None if it needs them whole."""
        name, params = eqn.primitive.name, eqn.params
        if name == "jit":
            return self.run(jaxprs.inner(eqn), operands)
        if name == "remat2":
            return self.checkpoint(eqn, operands)
        if name != "scan":
            first = operands[0]
            after = first.after(eqn, operands[1:]) if isinstance(first, Held) else None
            return None if after is None else [after]
        constants, start = jaxprs.scan_starts(eqn)
        rest = [isinstance(x, Held) and not x.is_divided(0) for x in operands[start:]]
        has_refs = any(type(v.aval) is not jax.core.ShapedArray for v in eqn.invars)
        if has_refs or not any(rest) or not params["length"]:
            return None
        taken = zip(operands, [False] * start + rest, strict=True)
        operands = [x if is_taken else self.whole(x, name) for x, is_taken in taken]
        return self.scan(eqn, operands, constants, start)

    def whole(self, x: Any, by: str) -> Any:
        """Gathered here, and its gradient scattered, outside of any scan's prefetch."""
        if not isinstance(x, Held):
            return x
        gather = jax.custom_vjp(functools.partial(x.gathered, self._exchange))
        gather.defvjp(
            lambda shard: (gather(shard), None),
            lambda _, g: (x.scattered(self._exchange, g),),
        )
        return gather(x.x)

    def bind(self, closed: ClosedJaxpr, operands: list[Any]) -> list[Any]:
        results: list[Any] = self._exchange.call(jaxpr_as_fun(closed))(*operands)
        return results

    def checkpoint(self, eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
        again = {name: eqn.params[name] for name in ("prevent_cse", "policy")}
        function = functools.partial(self.results, jaxprs.inner(eqn))
        results: list[Any] = jax.checkpoint(function, **again)(operands)
        return results

    def scan(
        self, eqn: JaxprEqn, operands: list[Any], constants: int, start: int
    ) -> list[Any]:
        body, rows, look = jaxprs.inner(eqn), operands[start:], _Look()
        shapes = [isinstance(x, Held) and dataclasses.replace(x, x=None) for x in rows]
        look.results(body, [*[None] * start, *_layers(shapes)])
        # Arrays that a scan within this one takes stay sharded here.
        ours = [isinstance(x, Held) and x.leaf not in look.scanned for x in rows]
        held = list(itertools.compress(_layers(rows), ours))
        xs = list(itertools.compress(rows, [not x for x in ours]))

        def run(consts: Any, carry: Any, layer: Any, xs: Any) -> Any:
            parts = {True: iter(layer), False: iter(_layers(xs))}
            row = [next(parts[is_ours]) for is_ours in ours]
            results = self.results(body, [*consts, *carry, *row])
            return results[: len(carry)], results[len(carry) :]

        exchange = self._exchange

        def gather(hop: Sequence[Any], shards: list[Any]) -> list[Any]:
            pairs = zip(held, shards, strict=True)
            return [x.gathered(exchange, shard, *hop) for x, shard in pairs]

        def scatter(hop: Sequence[Any], grads: list[Any]) -> list[Any]:
            pairs = zip(held, grads, strict=True)
            return [x.scattered(exchange, g, *hop) for x, g in pairs]

        keep, params = exchange.keep_gathered, eqn.params
        loop = prefetch.Loop(*(params[x] for x in prefetch.Loop._fields))
        if exchange.scan:
            scan = exchange.scan(run, held, loop, keep_gathered=keep)
        else:
            hops: list[tuple[Any, ...]] = [(axes,) for axes in exchange.levels]
            hops = hops or [()]
            scan = prefetch.scan(
                run,
                [functools.partial(gather, hop) for hop in reversed(hops)],
                [functools.partial(scatter, hop) for hop in hops],
                loop,
                keep_gathered=keep,
                late=exchange.late or len(hops) > 1,
            )
        carry, ys = scan(
            operands[:constants], operands[constants:start], [x.x for x in held], xs
        )
        return [*carry, *ys]


class _Look(_Evaluation):
    """Computes nothing: finds out what happens to arrays that are held.

    Attributes:
      scanned: the arguments that a scan takes a layer at a time.
      indexed: arguments that an operation takes a layer from.
      others: for each argument that is used whole, the operation that does so.
    """

    def __init__(self) -> None:
        self.scanned: set[int] = set()
        self.indexed: set[int] = set()
        self.others: dict[int, str] = {}

    def whole(self, x: Any, by: str) -> Any:
        if isinstance(x, Held) and not x.is_layer:
            self.others.setdefault(x.leaf, by)
        elif isinstance(x, Held) and not x.in_scan:
            self.indexed.add(x.leaf)

    def _constants(self, constants: list[Any]) -> list[Any]:
        return constants

    def bind(self, closed: ClosedJaxpr, operands: list[Any]) -> list[Any]:
        return [None] * len(closed.jaxpr.outvars)

    def checkpoint(self, eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
        return self.results(jaxprs.inner(eqn), operands)

    def scan(
        self, eqn: JaxprEqn, operands: list[Any], constants: int, start: int
    ) -> list[Any]:
        self.scanned |= {x.leaf for x in operands if isinstance(x, Held)}
        return self.results(jaxprs.inner(eqn), _layers(operands))


def _layers(operands: Sequence[Any]) -> list[Any]:
    return [x.layer() if isinstance(x, Held) else x for x in operands]
