"""A function of whole arrays, run on shards: scanned layers are gathered one by one.

`ByLayers` traces the function with whole shapes. In its jaxpr a sharded array stays
sharded (`Held`) through casts and transposes until a scan, or a slice, takes one layer
of it. The scan becomes one that gathers each layer while another one runs; see
`prefetch`. All other operations get the whole array.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, jaxpr_as_fun
from jax.sharding import PartitionSpec

from jax_muon.mesh import prefetch


class Exchange(NamedTuple):
    """How one layer of an array is gathered, and its gradient scattered.

    Attributes:
      gather: of (shard, spec), the whole array.
      scatter: of (gradient of the whole, spec, dtype), the shard's gradient.
      keep_gathered: whether scans keep gathered layers for the backward pass.
      late: whether a scan scatters a layer's gradient all at once, one layer later.
    """

    gather: Callable[[Any, PartitionSpec], Any]
    scatter: Callable[[Any, PartitionSpec, Any], Any]
    keep_gathered: bool = False
    late: bool = False


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["x"],
    meta_fields=["leaf", "spec", "casts", "is_layer"],
)
@dataclasses.dataclass(frozen=True)
class Held:
    """An array that is still sharded.

    Attributes:
      x: the shard; None while `_Look` only follows it.
      leaf: the index of the argument that it comes from.
      spec: how it is sharded, with an entry for each axis.
      casts: the dtypes that it is to be cast to, one after another.
      is_layer: whether it is one layer of that argument.
    """

    x: Any
    leaf: int
    spec: tuple[Any, ...]
    casts: tuple[Any, ...] = ()
    is_layer: bool = False

    def layer(self) -> "Held":
        """The same for one layer, after a scan has taken its shard."""
        return dataclasses.replace(self, spec=self.spec[1:], is_layer=True)

    def gathered(self, exchange: Exchange, shard: Any) -> Any:
        """Gather the whole array, sent in the narrower of its two dtypes."""
        spec = PartitionSpec(*self.spec)
        cast = functools.partial(functools.reduce, jax.lax.convert_element_type)
        if self.casts and self.casts[-1].itemsize > shard.dtype.itemsize:
            return cast(self.casts, exchange.gather(shard, spec))
        return exchange.gather(cast(self.casts, shard), spec)

    def scattered(self, exchange: Exchange, g: Any) -> Any:
        """The shard's gradient, from the whole array's gradient g."""
        return exchange.scatter(g, PartitionSpec(*self.spec), self.x.dtype)

    def after(self, eqn: JaxprEqn, starts: Sequence[Any]) -> "Held | None":
        """The result of an operation that needs no other device's shard, or None."""
        before: Any = eqn.invars[0].aval
        result: Any = eqn.outvars[0].aval
        old, new, spec, params = before.shape, result.shape, self.spec, eqn.params

        def moved(function: Callable[[Any], Any], spec: Sequence[Any]) -> Held:
            x = None if self.x is None else function(self.x)
            return dataclasses.replace(self, x=x, spec=tuple(spec))

        match eqn.primitive.name:
            case "convert_element_type" if jnp.issubdtype(result.dtype, jnp.inexact):
                return dataclasses.replace(self, casts=(*self.casts, result.dtype))
            case "transpose":
                order = params["permutation"]
                return moved(lambda x: x.transpose(order), [spec[a] for a in order])
            case "squeeze" if not any(spec[a] for a in params["dimensions"]):
                axes = params["dimensions"]
                rest = [entry for a, entry in enumerate(spec) if a not in axes]
                return moved(lambda x: jnp.squeeze(x, axes), rest)
            case "reshape":  # of axes before all sharded ones
                first = next(a for a, entry in enumerate(spec) if entry)
                lead = len(new) - len(old) + first
                if lead < 0 or new[lead:] != old[first:]:
                    return None
                return moved(
                    lambda x: x.reshape(*new[:lead], *x.shape[first:]),
                    [*[None] * lead, *spec[first:]],
                )
            case "slice" | "dynamic_slice" if not params.get("strides"):
                cut = [a for a in range(len(old)) if old[a] != new[a]]
                if any(spec[a] for a in cut):
                    return None
                at = params.get("start_indices", starts)

                def part(x: Any) -> Any:  # starts are clamped, as in the operation
                    for a in cut:
                        start = jnp.clip(at[a], 0, old[a] - new[a])
                        x = jax.lax.dynamic_slice_in_dim(x, start, new[a], a)
                    return x

                is_layer = self.is_layer or any(new[a] == 1 for a in cut)
                return dataclasses.replace(moved(part, spec), is_layer=is_layer)
        return None


class ByLayers:
    """A function of arrays, some of them sharded and gathered a layer at a time.

    Attributes:
      others: for each sharded array that must be whole, by its index among the
        arguments, the operation that uses it so.
      held: the indices of all other sharded arrays.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        args: Any,
        specs: Sequence[PartitionSpec],
        gather: Callable[[Any, PartitionSpec], Any],
    ) -> None:
        """Trace a function of whole arrays for shards of them, or for their shapes.

        The first leaves of args have these specs, with an entry for each axis.
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
            leaf: Held(None, leaf, tuple(spec))
            for leaf, spec in enumerate(specs)
            # Integers and keys have no gradient to scatter.
            if any(spec) and jnp.issubdtype(kinds[leaf].dtype, jnp.inexact)
        }
        look = _Look()
        look.results(self._closed, [self._sharded.get(i) for i in range(len(kinds))])
        self.others = look.others
        self.held = self._sharded.keys() - look.others.keys()

    def __call__(self, exchange: Exchange, *args: Any) -> Any:
        """The function's results, of shards for those in `held`."""
        flat = jax.tree.leaves(args)
        for leaf in self.held:
            flat[leaf] = dataclasses.replace(self._sharded[leaf], x=flat[leaf])
        results = _Evaluation(exchange).results(self._closed, flat)
        return jax.tree.unflatten(self._treedef, results)


class _Evaluation:
    """Computes functions of arrays, some of them `Held`."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    def results(self, closed: ClosedJaxpr, given: Sequence[Any]) -> list[Any]:
        """The function's results, whole."""
        return [self.whole(x, "the results") for x in self.run(closed, given)]

    def run(self, closed: ClosedJaxpr, given: Sequence[Any]) -> list[Any]:
        """The function's results; some may be held."""
        jaxpr = closed.jaxpr
        env = dict(zip(jaxpr.constvars, closed.consts, strict=True))
        env |= dict(zip(jaxpr.invars, given, strict=True))

        def read(v: Any) -> Any:
            return v.val if isinstance(v, Literal) else env[v]

        for eqn in jaxpr.eqns:
            inputs = [read(v) for v in eqn.invars]
            results = None
            if any(isinstance(x, Held) for x in inputs):
                results = self._of_held(eqn, inputs)
            if results is None:
                for v, x in zip(eqn.invars, inputs, strict=True):
                    if isinstance(x, Held):  # gathered once, if it is used again
                        env[v] = self.whole(x, eqn.primitive.name)
                names = list({v for v in eqn.invars if not isinstance(v, Literal)})
                one = jaxpr.replace(
                    constvars=(),
                    invars=names,
                    outvars=eqn.outvars,
                    eqns=[eqn],
                    effects=eqn.effects,
                    debug_info=jaxpr.debug_info.with_unknown_names(),
                )
                results = self.bind(ClosedJaxpr(one, ()), [env[v] for v in names])
            env |= dict(zip(eqn.outvars, results, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def _of_held(self, eqn: JaxprEqn, given: list[Any]) -> list[Any] | None:
        """Results of an operation that can take held arrays, or None."""
        name, params = eqn.primitive.name, eqn.params
        if name in ("jit", "pjit"):
            return self.run(_inner(eqn), given)
        if name in ("checkpoint", "remat", "remat2") and not params["differentiated"]:
            return self.checkpoint(eqn, given)
        if name != "scan":
            first = given[0]
            after = first.after(eqn, given[1:]) if isinstance(first, Held) else None
            return None if after is None else [after]
        constants, start = _before_layers(eqn)
        taken = [isinstance(x, Held) and not x.spec[0] for x in given[start:]]
        taken = [False] * start + taken
        has_refs = any(type(v.aval) is not jax.core.ShapedArray for v in eqn.invars)
        if has_refs or not any(taken) or not params["length"]:
            return None
        pairs = zip(given, taken, strict=True)
        given = [x if is_taken else self.whole(x, name) for x, is_taken in pairs]
        return self.scan(eqn, given, constants, start)

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

    def bind(self, closed: ClosedJaxpr, given: list[Any]) -> list[Any]:
        return jaxpr_as_fun(closed)(*given)

    def checkpoint(self, eqn: JaxprEqn, given: list[Any]) -> list[Any]:
        again = {name: eqn.params[name] for name in ("prevent_cse", "policy")}
        function = functools.partial(self.results, _inner(eqn))
        results: list[Any] = jax.checkpoint(function, **again)(given)
        return results

    def scan(
        self, eqn: JaxprEqn, given: list[Any], constants: int, start: int
    ) -> list[Any]:
        body, rows = _inner(eqn), given[start:]
        shapes = [isinstance(x, Held) and dataclasses.replace(x, x=None) for x in rows]
        look = _Look()
        look.results(body, _layers([*[None] * start, *shapes]))
        # Arrays that a scan within this one takes stay sharded here.
        ours = [isinstance(x, Held) and x.leaf not in look.scanned for x in rows]
        held = list(itertools.compress(_layers(rows), ours))
        xs = [x for x, is_ours in zip(rows, ours, strict=True) if not is_ours]

        def run(consts: Any, carry: Any, layer: Any, xs: Any) -> Any:
            parts = {True: iter(layer), False: iter(_layers(xs))}
            row = [next(parts[is_ours]) for is_ours in ours]
            results = self.results(body, [*consts, *carry, *row])
            return results[: len(carry)], results[len(carry) :]

        def each(function: Callable[..., Any], values: list[Any]) -> list[Any]:
            """Apply `Held.gathered` or `Held.scattered` to the arrays of a layer."""
            pairs = zip(held, values, strict=True)
            return [function(x, self._exchange, value) for x, value in pairs]

        scan = prefetch.scan(
            run,
            functools.partial(each, Held.gathered),
            functools.partial(each, Held.scattered),
            keep_gathered=self._exchange.keep_gathered,
            late=self._exchange.late,
            **{name: eqn.params[name] for name in ("length", "reverse", "unroll")},
        )
        carry, ys = scan(
            given[:constants], given[constants:start], [x.x for x in held], xs
        )
        return [*carry, *ys]


class _Look(_Evaluation):
    """Computes nothing: finds out what happens to arrays that are held.

    Attributes:
      scanned: the arguments that a scan takes a layer at a time.
      others: for each argument that is used whole, the operation that does so.
    """

    def __init__(self) -> None:
        self.scanned: set[int] = set()
        self.others: dict[int, str] = {}

    def whole(self, x: Any, by: str) -> Any:
        if isinstance(x, Held) and not x.is_layer:
            self.others.setdefault(x.leaf, by)

    def bind(self, closed: ClosedJaxpr, given: list[Any]) -> list[Any]:
        return [None] * len(closed.jaxpr.outvars)

    def checkpoint(self, eqn: JaxprEqn, given: list[Any]) -> list[Any]:
        return self.results(_inner(eqn), given)

    def scan(
        self, eqn: JaxprEqn, given: list[Any], constants: int, start: int
    ) -> list[Any]:
        self.scanned |= {x.leaf for x in given if isinstance(x, Held)}
        return self.results(_inner(eqn), _layers(given))


def _inner(eqn: JaxprEqn) -> ClosedJaxpr:
    """The function that an operation calls."""
    found = eqn.params["jaxpr"]
    return found if isinstance(found, ClosedJaxpr) else ClosedJaxpr(found, ())


def _before_layers(eqn: JaxprEqn) -> tuple[int, int]:
    """Where a scan's carry begins among its inputs, and where its layers do."""
    if "ft_in" in eqn.params:  # from JAX 0.11 on
        inputs = eqn.params["ft_in"].update(eqn.invars)
        consts, carry, _ = map(list, inputs.unpack())
        return len(consts), len(consts) + len(carry)
    constants = eqn.params["num_consts"]
    return constants, constants + eqn.params["num_carry"]


def _layers(given: Sequence[Any]) -> list[Any]:
    return [x.layer() if isinstance(x, Held) else x for x in given]
