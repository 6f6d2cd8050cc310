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
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, jaxpr_as_fun
from jax.interpreters import partial_eval
from jax.sharding import PartitionSpec

from jax_muon.mesh import prefetch

_CALLS = ("jit", "pjit", "closed_call")
_CHECKPOINTS = ("remat2", "checkpoint", "remat")


class Exchange(NamedTuple):
    """How one layer of an array is gathered, and its gradient scattered.

    Attributes:
      gather: of (shard, spec), the whole array.
      scatter: of (gradient of the whole, spec, dtype, extra), the shard's gradient.
      late: whether a scan scatters a layer's gradient all at once, one layer later.
    """

    gather: Callable[[Any, PartitionSpec], Any]
    scatter: Callable[[Any, PartitionSpec, Any, Any], Any]
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

    def gathered(self, shard: Any, exchange: Exchange) -> Any:
        """The whole array of a shard, which is sent in the narrower dtype."""

        def cast(x: Any) -> Any:
            return functools.reduce(lambda x, dtype: x.astype(dtype), self.casts, x)

        spec = PartitionSpec(*self.spec)
        if jax.eval_shape(cast, shard).dtype.itemsize <= shard.dtype.itemsize:
            return exchange.gather(cast(shard), spec)
        return cast(exchange.gather(shard, spec))

    def after(self, eqn: JaxprEqn, given: Sequence[Any]) -> "Held | None":
        """The result of an operation that needs no other device's shard, or None."""
        before: Any = eqn.invars[0].aval
        result: Any = eqn.outvars[0].aval
        old, new, spec = before.shape, result.shape, self.spec
        match eqn.primitive.name:
            case "convert_element_type" if jnp.issubdtype(result.dtype, jnp.inexact):
                return dataclasses.replace(self, casts=(*self.casts, result.dtype))
            case "transpose":
                order = eqn.params["permutation"]
                return self._moved(
                    lambda x: jnp.transpose(x, order), [spec[a] for a in order]
                )
            case "squeeze" if not any(spec[a] for a in eqn.params["dimensions"]):
                axes = eqn.params["dimensions"]
                rest = [entry for a, entry in enumerate(spec) if a not in axes]
                return self._moved(lambda x: jnp.squeeze(x, axes), rest)
            case "reshape":  # of axes before all sharded ones
                first = next(a for a, entry in enumerate(spec) if entry)
                lead = len(new) - len(old) + first
                if lead < 0 or new[lead:] != old[first:]:
                    return None
                return self._moved(
                    lambda x: x.reshape(*new[:lead], *x.shape[first:]),
                    [*[None] * lead, *spec[first:]],
                )
            case "slice" | "dynamic_slice" if not eqn.params.get("strides"):
                starts = eqn.params.get("start_indices", given[1:])
                cut = [a for a in range(len(old)) if old[a] != new[a]]
                if any(spec[a] for a in cut):
                    return None
                part = self._moved(lambda x: _slice(x, starts, new, cut), spec)
                return dataclasses.replace(
                    part, is_layer=any(new[a] == 1 for a in cut) or self.is_layer
                )
        return None

    def _moved(self, function: Callable[[Any], Any], spec: Sequence[Any]) -> "Held":
        x = None if self.x is None else function(self.x)
        return dataclasses.replace(self, x=x, spec=tuple(spec))


class ByLayers:
    """A function of arrays, some of them sharded and gathered a layer at a time.

    Attributes:
      others: for each sharded array that must be whole, by its index among the
        arguments, the operation that uses it so.
      held: the indices of all other sharded arrays.
    """

    def __init__(
        self, function: Callable[..., Any], args: Any, specs: Sequence[PartitionSpec]
    ) -> None:
        """Trace a function.

        Args:
          function: of whole arrays.
          args: its arguments, or their shapes.
          specs: how the first leaves of args are sharded, with an entry for each axis.
        """
        self._closed, results = jax.make_jaxpr(function, return_shape=True)(*args)
        self._treedef = jax.tree.structure(results)
        self._sharded = {
            leaf: Held(None, leaf, tuple(spec))
            for leaf, spec in enumerate(specs)
            # Integers and keys have no gradient to scatter.
            if any(spec)
            and jnp.issubdtype(self._closed.in_avals[leaf].dtype, jnp.inexact)
        }
        look = _Look()
        given = map(self._sharded.get, range(len(self._closed.jaxpr.invars)))
        look.ends(look.run(self._closed, list(given)), "the results")
        self.others = look.others
        self.held = self._sharded.keys() - look.others.keys()

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
          *args: the arguments; of those in `held`, the shards.
          extra: arrays that `exchange.scatter` needs; it must not close over any.
          keep_gathered: whether scans keep gathered layers for the backward pass.
        """
        evaluation = _Evaluation(exchange, extra, keep_gathered)
        results = evaluation.run(self._closed, self._given(args))
        return jax.tree.unflatten(
            self._treedef, [evaluation.whole(x, "") for x in results]
        )

    def result(self, place: int, exchange: Exchange, *args: Any) -> Any:
        """One leaf of the results, without computing the others."""
        jaxpr = self._closed.jaxpr
        used = [place == other for other in range(len(jaxpr.outvars))]
        less, needed = partial_eval.dce_jaxpr(jaxpr, used)
        closed = ClosedJaxpr(less, self._closed.consts)
        given = list(itertools.compress(self._given(args), needed))
        return _Evaluation(exchange, (), False).run(closed, given)[0]

    def _given(self, args: Any) -> list[Any]:
        flat = jax.tree.leaves(args)
        for leaf in self.held:
            flat[leaf] = dataclasses.replace(self._sharded[leaf], x=flat[leaf])
        return flat


class _Evaluation:
    """Computes functions of arrays, some of them `Held`."""

    def __init__(self, exchange: Exchange, extra: Any, keep_gathered: bool) -> None:
        self._exchange, self._extra = exchange, extra
        self._keep_gathered = keep_gathered

    def run(self, closed: ClosedJaxpr, given: Sequence[Any]) -> list[Any]:
        """The function's results."""
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
                results = self.bind(jaxpr, eqn, read)
            env |= dict(zip(eqn.outvars, results, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def _of_held(self, eqn: JaxprEqn, given: list[Any]) -> list[Any] | None:
        name = eqn.primitive.name
        if name in _CALLS:
            return self.run(_inner(eqn), given)
        if name in _CHECKPOINTS and not eqn.params["differentiated"]:
            return self.checkpoint(eqn, given)
        if name == "scan":
            constants, first = _before_layers(eqn)
            taken = [
                place >= first and isinstance(x, Held) and not x.spec[0]
                for place, x in enumerate(given)
            ]
            kinds = (type(v.aval) for v in eqn.invars)
            if not any(taken) or any(
                kind is not jax.core.ShapedArray for kind in kinds
            ):
                return None
            given = [
                x if is_taken else self.whole(x, name)
                for x, is_taken in zip(given, taken, strict=True)
            ]
            return self.scan(eqn, given, constants, first)
        held = given[0].after(eqn, given) if isinstance(given[0], Held) else None
        return None if held is None else [held]

    def whole(self, x: Any, by: str) -> Any:
        """Gathered here, and its gradient scattered, outside of any scan's prefetch."""
        if not isinstance(x, Held):
            return x
        spec, dtype = PartitionSpec(*x.spec), x.x.dtype

        @jax.custom_vjp
        def gather(shard: Any, extra: Any) -> Any:
            return x.gathered(shard, self._exchange)

        gather.defvjp(
            lambda shard, extra: (gather(shard, extra), extra),
            lambda extra, g: (self._exchange.scatter(g, spec, dtype, extra), None),
        )
        return gather(x.x, self._extra)

    def bind(self, jaxpr: Jaxpr, eqn: JaxprEqn, read: Callable[[Any], Any]) -> list:
        names = list({v: None for v in eqn.invars if not isinstance(v, Literal)})
        one = jaxpr.replace(
            constvars=(),
            invars=names,
            outvars=eqn.outvars,
            eqns=[eqn],
            effects=eqn.effects,
            debug_info=jaxpr.debug_info.with_unknown_names(),
        )
        return jaxpr_as_fun(ClosedJaxpr(one, ()))(*map(read, names))

    def checkpoint(self, eqn: JaxprEqn, given: list[Any]) -> list[Any]:
        def function(given: list[Any]) -> list[Any]:
            return [self.whole(x, "") for x in self.run(_inner(eqn), given)]

        again = {name: eqn.params[name] for name in ("prevent_cse", "policy")}
        results: list[Any] = jax.checkpoint(function, **again)(given)
        return results

    def scan(
        self, eqn: JaxprEqn, given: list[Any], constants: int, first: int
    ) -> list[Any]:
        body, params = _inner(eqn), eqn.params
        consts, rows = [*given[:constants], self._extra], given[first:]
        carry = given[constants:first]
        look = _Look()
        shapes = [isinstance(x, Held) and dataclasses.replace(x, x=None) for x in rows]
        look.run(body, _layers([*[None] * first, *shapes]))
        # Arrays that a scan within this one takes stay sharded here.
        ours = [isinstance(x, Held) and x.leaf not in look.scanned for x in rows]
        layers = list(itertools.compress(rows, ours))
        xs = [x for x, is_ours in zip(rows, ours, strict=True) if not is_ours]

        def run(consts: Any, carry: Any, layer: Any, xs: Any) -> Any:
            whole, others = iter(layer), iter(_layers(xs))
            row = [next(whole if is_ours else others) for is_ours in ours]
            *consts, extra = consts
            inner = _Evaluation(self._exchange, extra, self._keep_gathered)
            results = inner.run(body, [*consts, *carry, *row])
            results = [inner.whole(x, "") for x in results]
            return results[: len(carry)], results[len(carry) :]

        def gather(layers: list[Held]) -> list[Any]:
            return [held.gathered(held.x, self._exchange) for held in _layers(layers)]

        def scatter(grads: list[Any], layers: list[Held], consts: Any) -> list[Held]:
            return [
                dataclasses.replace(
                    held,
                    x=self._exchange.scatter(
                        g, PartitionSpec(*held.spec[1:]), held.x.dtype, consts[-1]
                    ),
                )
                for g, held in zip(grads, layers, strict=True)
            ]

        loop = {name: params[name] for name in ("length", "reverse", "unroll")}
        if not layers:
            step = lambda carry, xs: run(consts, carry, [], xs)  # noqa: E731
            carry, ys = jax.lax.scan(step, carry, xs, **loop)
        else:
            scan = prefetch.scan(
                run, gather, scatter, self._keep_gathered, self._exchange.late, **loop
            )
            carry, ys = scan(consts, carry, layers, xs)
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

    def ends(self, given: Sequence[Any], by: str) -> list[Any]:
        """Nothing stays held."""
        return [self.whole(x, by) for x in given]

    def bind(self, jaxpr: Jaxpr, eqn: JaxprEqn, read: Callable[[Any], Any]) -> list:
        return [None] * len(eqn.outvars)

    def checkpoint(self, eqn: JaxprEqn, given: list[Any]) -> list[Any]:
        return self.ends(self.run(_inner(eqn), given), eqn.primitive.name)

    def scan(
        self, eqn: JaxprEqn, given: list[Any], constants: int, first: int
    ) -> list[Any]:
        self.scanned |= {x.leaf for x in given if isinstance(x, Held)}
        return self.ends(self.run(_inner(eqn), _layers(given)), "scan")


def _slice(
    x: Any, starts: Sequence[Any], shape: Sequence[int], axes: Sequence[int]
) -> Any:
    """The part of an array that has this shape along some axes."""
    for axis in axes:
        x = jax.lax.dynamic_slice_in_dim(x, starts[axis], shape[axis], axis)
    return x


def _inner(eqn: JaxprEqn) -> ClosedJaxpr:
    """The function that an operation calls."""
    found = eqn.params["jaxpr"]
    return found if isinstance(found, ClosedJaxpr) else ClosedJaxpr(found, ())


def _before_layers(eqn: JaxprEqn) -> tuple[int, int]:
    """Where the carry of a scan begins among its inputs, and where its layers do."""
    if "ft_in" in eqn.params:  # from JAX 0.11 on
        inputs = eqn.params["ft_in"].update(eqn.invars)
        consts, carry, _ = map(list, inputs.unpack())
        return len(consts), len(consts) + len(carry)
    constants = eqn.params["num_consts"]
    return constants, constants + eqn.params["num_carry"]


def _layers(given: Sequence[Any]) -> list[Any]:
    return [x.layer() if isinstance(x, Held) else x for x in given]
