"""Going on with a run of another optimizer: its momentum, moments and counts as ours.

`Moments` is what a run remembers, by our paths and in one convention; each `from_*`
reads one format. `take_over` puts it into the state of an optimizer of this package.
What PyTorch's optimizers save is read in torch_states.py.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jax_muon import paths
from jax_muon.checks import (
    as_transform,
    check_arrays,
    check_choice,
    check_count,
    check_mapping,
    check_type,
)
from jax_muon.hyperball import HyperballState
from jax_muon.momentum import NesterovState, QuantizedNesterovState
from jax_muon.notes import listening
from jax_muon.splits import with_parts
from jax_muon.storage import Quantized
from jax_muon.torch_states import Arrays, Found, Named, ToParams, as_numpy, groups_of
from jax_muon.transforms import ScaleByNorMuonState

# Fields of states that hold the state of another transform.
_INNER = ("inner_state", "inner_states", "inner_opt_state", "hyperparams_states")

# Types of state whose moments, if they have any, are the run's, by the field that
# counts its steps. A state that is nothing but a count counts steps too.
_COUNTERS = {
    "count": (
        NesterovState,
        QuantizedNesterovState,
        ScaleByNorMuonState,
        HyperballState,
        optax.ScaleByAdamState,
        optax.AddNoiseState,
        optax.InjectHyperparamsState,
        optax.InjectStatefulHyperparamsState,
    ),
    "gradient_step": (optax.MultiStepsState,),
    "step": (optax.ConditionallyTransformState, optax.ConditionallyMaskState),
}


@dataclasses.dataclass(frozen=True)
class Moments:
    """What a run remembers of its gradients, by the paths of the parameters.

    Attributes:
      count: steps that were made.
      first: averages of gradients: the momentum of Muon as an exponential average, and
        Adam's first moment. A momentum that is a sum is (1 - momentum) times that sum.
      second: averages of squares: Adam's second moment.
      means: averages of NorMuon's mean squares, with the parameter's shape: the same
        for all elements that one of them is the mean of.
    """

    count: int
    first: Arrays
    second: Arrays = dataclasses.field(default_factory=dict)
    means: Arrays = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raise a ValueError for a count below 0, and for what is not a mapping."""
        check_count("count", self.count, least=0)
        for name in ("first", "second", "means"):
            value = getattr(self, name)
            check_mapping(name, value, "a mapping of paths to arrays")

    @classmethod
    def from_optax(cls, state: Any) -> "Moments":
        """Read the state of `optax.contrib.muon`, `optax.adamw`, or chains of them.

        Args:
          state: of the optimizer, chained, masked or partitioned.

        Raises:
          ValueError: a state without moments, or whose parts differ in their counts.
        """
        first: dict[str, Any] = {}
        second: dict[str, Any] = {}
        counts = []
        for node in jax.tree.leaves(state, is_leaf=_is_theirs):
            if _is_theirs(node):
                first |= dict(paths.leaves_with_paths(node.mu))
                second |= dict(paths.leaves_with_paths(getattr(node, "nu", ())))
                counts.append(int(node.count))
        return cls(_one_count(counts, None), first, second)

    @classmethod
    def from_torch(
        cls,
        optimizers: Sequence[Named],
        weights: Arrays,
        to_params: ToParams,
        *,
        accumulation: str = "ema",
        count: int | None = None,
    ) -> "Moments":
        """Read `torch.optim.Muon`, `torch.optim.AdamW` and optimizers like them.

        Args:
          optimizers: for each its `state_dict()`, and the names of its parameters in
            the order that it was given them.
          weights: all weights of the model by name; only their shapes are used.
          to_params: the function that turns PyTorch's weights by name, as NumPy arrays,
            into parameters. It may transpose, reshape and stack them.
          accumulation: of the momentum: "ema" as in `torch.optim.Muon`, or "sum".
          count: steps made; None looks for it in the states. Muon's have none.

        Raises:
          ValueError: no count, or several; names that are not in `weights`.
        """
        check_choice("accumulation", accumulation, ("ema", "sum"))
        found = Found(weights)
        for group, states in groups_of(optimizers):
            for name, state in states.items():
                if (buffer := state.get("momentum_buffer")) is not None:
                    unit = 1 - group["momentum"] if accumulation == "sum" else 1
                    found.add(name, "first", unit * as_numpy(buffer))
                found.add_rows(name, [state])
        return cls(_one_count(found.counts, count), *found.by_path(to_params))

    @classmethod
    def from_nanochat(
        cls,
        ranks: Sequence[Mapping[str, Any]],
        names: Sequence[str],
        weights: Arrays,
        to_params: ToParams,
    ) -> "Moments":
        """Read nanochat's optimizer files, one for each rank.

        A group of matrices is a stack that the ranks divide, padded to a multiple of
        their number; AdamW's moments of at least 1024 elements are divided by rows.

        Args:
          ranks: the state dicts of `optim_STEP_rank0.pt` and so on, in their order;
            one, for a run on one device.
          names: of the parameters, in the order that the optimizer was given them.
          weights: all weights of the model by name; only their shapes are used.
          to_params: as for `from_torch`.

        Raises:
          ValueError: files of another optimizer; no count, or several; shapes that do
            not make up the weights'.
        """
        found = Found(weights)
        read = [list(groups_of([(state, names)], "kind")) for state in ranks]
        for same in zip(*read, strict=True):
            states = [of_rank for _, of_rank in same]
            if same[0][0]["kind"] == "muon":
                found.add_stack(list(states[0]), states)
                continue
            for name in states[0]:
                found.add_rows(name, [state[name] for state in states])
        return cls(_one_count(found.counts, None), *found.by_path(to_params))

    @classmethod
    def from_dion(
        cls, optimizers: Sequence[Named], weights: Arrays, to_params: ToParams
    ) -> "Moments":
        """Read `dion.Muon` and `dion.NorMuon`, whose momentum is a sum.

        Args:
          optimizers: as for `from_torch`; tensors that are whole, not DTensors.
          weights: as for `from_torch`.
          to_params: as for `from_torch`.

        Raises:
          ValueError: states of another optimizer, or another algorithm; no count, or
            several.
        """
        found = Found(weights)
        for group, states in groups_of(optimizers, "algorithm"):
            algorithm = group["algorithm"]
            check_choice("algorithm", algorithm, ("muon", "normuon", "adamw"))
            unit = 1 if algorithm == "adamw" else 1 - group["mu"]
            for name, state in states.items():
                if "momentum" in state:
                    found.add(name, "first", unit * as_numpy(state["momentum"]))
                if "variance" in state:
                    found.add(name, "second", as_numpy(state["variance"]))
                if "variance_neuron" in state:
                    found.add(name, "means", as_numpy(state["variance_neuron"]))
            found.counts.append(int(group["step"]))
        return cls(_one_count(found.counts, None), *found.by_path(to_params))


def take_over(
    tx: optax.GradientTransformation, params: optax.Params, moments: Moments
) -> Any:
    """The state of an optimizer that goes on with another one's run.

    Momentum, Adam's moments, NorMuon's means, their counts and those of schedules are
    the run's; everything else is as `tx.init` makes it, laid as it lays it. Moments of
    a parameter with splits are taken apart as it is.

    Args:
      tx: a recipe, or any composition of this package's pieces with optax's.
      params: the parameters that the run has come to.
      moments: of the run.

    Returns:
      A state for `tx.update`.

    Raises:
      ValueError: with the path, a parameter of which the run remembers nothing, or
        something of another shape, or NorMuon's means over another axis; one that AdamW
        has here, and did not have there; a type of state with moments that a run cannot
        fill, such as that of `optax.ema` or `optax.amsgrad`.
    """
    tx = as_transform("tx", tx)
    check_arrays("params", params)
    check_type("moments", moments, Moments, "jax_muon.Moments")
    with listening() as notes:
        state = tx.init(params)
    applied: list[Any] = []  # `on_mesh` traces an init twice, which tells all twice
    for note in notes:
        if note.kind == "splits" and note.facts["stages"] not in applied:
            applied.append(note.facts["stages"])
            whole = (moments.first, moments.second, moments.means)
            parts = [with_parts(arrays, note.facts["stages"]) for arrays in whole]
            moments = Moments(moments.count, *parts)

    def moments_of(node: Any) -> dict[str, Any]:
        if isinstance(node, NesterovState):
            return {"mu": _filled(node.mu, moments.first, "mean")}
        if isinstance(node, QuantizedNesterovState):
            return _quantized(node, moments)
        if isinstance(node, optax.ScaleByAdamState):
            return {
                "mu": _filled(node.mu, moments.first, "mean"),
                "nu": _filled(node.nu, moments.second, "mean square"),
            }
        if isinstance(node, ScaleByNorMuonState) and moments.means:
            return {"nu": _filled(node.nu, moments.means, "NorMuon mean")}
        return {}

    def fill(node: Any) -> Any:
        if node is None or type(node) in (tuple, list, dict):
            return jax.tree.map(fill, node, is_leaf=lambda x: x is not node)
        names = getattr(node, "_fields", ())
        new = {name: fill(getattr(node, name)) for name in names if name in _INNER}
        if counter := _counter(node):
            count = _placed(np.asarray(moments.count), getattr(node, counter))
            new |= {counter: count, **moments_of(node)}
        else:
            rest = set(names) - set(_INNER)
            _check_no_moments(node, [getattr(node, x) for x in rest] if names else node)
        return node._replace(**new) if new else node

    return fill(state)


def _counter(node: Any) -> str | None:
    """The field of a state that counts the steps of the run."""
    if getattr(node, "_fields", ()) == ("count",):
        return "count"
    found = (name for name, kinds in _COUNTERS.items() if isinstance(node, kinds))
    return next(found, None)


def _check_no_moments(node: Any, own: Any) -> None:
    """Refuse a state that would go on with new moments as if they were the run's.

    One of scalars alone, such as that of `optax.contrib.reduce_on_plateau`, may start
    anew: its counts belong to what it has seen itself.
    """
    arrays = [x for x in jax.tree.leaves(own) if x.ndim]
    if any(jnp.issubdtype(x.dtype, jnp.floating) for x in arrays):
        raise ValueError(
            f"take_over cannot fill the arrays of {type(node).__name__}; expected no "
            "moments but those of nesterov, scale_by_normuon and optax.scale_by_adam"
        )


def _one_count(counts: Sequence[int], given: int | None) -> int:
    if given is not None:
        return given
    if len(set(counts)) != 1:
        listed = ", ".join(map(str, sorted(set(counts)))) or "none"
        raise ValueError(
            f"counts of steps in the state: {listed}; expected one, or the state of an "
            "optimizer with moments, and count= where it has no count"
        )
    return counts[0]


def _is_theirs(node: Any) -> bool:
    return isinstance(node, (optax.contrib.MuonState, optax.ScaleByAdamState))


def _filled(tree: Any, found: Arrays, what: str) -> Any:
    """A tree of state with what was found for each of its parameters."""

    def value(key_path: tuple[Any, ...], old: Any) -> Any:
        path = paths.path_string(key_path)
        if path not in found:
            raise ValueError(
                f"the run has no {what} of the gradients of {path!r}; it has them of "
                + (", ".join(found) or "no parameter")
                + "; expected the labels that the run had"
            )
        new = found[path]
        if what == "NorMuon mean" and np.ndim(new) == old.ndim:
            new = new[tuple(slice(0, size) for size in old.shape)]  # all are the same
        if np.shape(new) != old.shape:
            raise ValueError(
                f"the run's {what} of the gradients of {path!r} has shape "
                f"{np.shape(found[path])}, and the state {old.shape}; expected the same"
            )
        known = not isinstance(new, jax.core.Tracer)
        if what == "NorMuon mean" and known and np.any(new != found[path]):
            raise ValueError(
                f"the run's NorMuon means of {path!r} differ along axes for which the "
                f"state, of shape {old.shape}, has one mean; expected means over the "
                "same axes: 'output' of normuon, 'longer' of nanochat"
            )
        return _placed(new, old)

    return jax.tree_util.tree_map_with_path(value, tree)


def _quantized(node: QuantizedNesterovState, moments: Moments) -> dict[str, Any]:
    """Momentum as `nesterov` stores it in int8, rounded as its last step would have."""
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32), node.mu)
    means = _filled(shapes, moments.first, "mean")
    count, stored = jnp.asarray(moments.count - 1), (node.mu, node.scale)
    rows = [
        Quantized().store(mean, old, path, count)
        for (path, mean), *old in zip(
            paths.leaves_with_paths(means), *map(jax.tree.leaves, stored), strict=True
        )
    ]
    mu, scale = (
        jax.tree.map(_placed, jax.tree.unflatten(jax.tree.structure(old), new), old)
        for old, new in zip(stored, zip(*rows, strict=True), strict=True)
    )
    return {"mu": mu, "scale": scale}


def _placed(new: Any, old: Any) -> Any:
    """An array with the dtype and the place of another."""
    new = jnp.asarray(new, dtype=old.dtype)
    concrete = isinstance(old, jax.Array) and not isinstance(old, jax.core.Tracer)
    return jax.device_put(new, old.sharding) if concrete else new
