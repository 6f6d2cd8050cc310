"""Continue a run with another optimizer: carry over momentum, moments and counts.

`Moments` holds the averages of a run's gradients, by path and in one convention.
`take_over` puts it into the state of another optimizer, ours or optax's. What PyTorch's
optimizers save is read in `examples/from_torch.py`.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jax_muon import checks, notes, paths
from jax_muon.accumulators import Quantized
from jax_muon.momentum import NesterovState, QuantizedNesterovState
from jax_muon.scaling import ScaleByNorMuonState
from jax_muon.splits import arrays_of_parts

Arrays = Mapping[str, Any]

# Fields that count the steps of a run.
_COUNTS = ("count", "gradient_step", "step")

# Arrays with which every optimizer may begin: norms, a sum of no gradients, a table.
_BEGIN_ANEW = ("radius", "acc_grads", "ns_coeffs")


@dataclasses.dataclass(frozen=True)
class Moments:
    """The averages of a run's gradients, by the paths of the parameters.

    Attributes:
      count: number of steps made.
      first: averages of gradients: the momentum of Muon as an exponential average, and
        Adam's first moment. A momentum that is a sum is (1 - momentum) times that sum.
      second: averages of squares: Adam's second moment.
      means: averages of NorMuon's mean squares, of the parameter's shape or with 1 in
        the axes of the mean.

    Examples:
      >>> import jax.numpy as jnp
      >>> import jax_muon as jm
      >>> jm.Moments(count=100, first={"mlp": jnp.zeros((4, 8))}).count
      100
    """

    count: int
    first: Arrays
    second: Arrays = dataclasses.field(default_factory=dict)
    means: Arrays = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raise a ValueError for a count that is not an integer of at least 0."""
        checks.count("count", self.count, least=0)

    @classmethod
    def of(cls, state: Any) -> "Moments":
        """Read the state of a recipe, `optax.contrib.muon`, `optax.adamw`, or chains.

        Args:
          state: the optimizer's state, chained, masked or partitioned.

        Raises:
          ValueError: a state without moments, or whose parts differ in their counts.
        """
        first: dict[str, Any] = {}
        second: dict[str, Any] = {}
        means: dict[str, Any] = {}
        counts = set()
        for node in jax.tree.leaves(state, is_leaf=_has_moments):
            if not _has_moments(node):
                continue
            counts.add(int(node.count))
            if isinstance(node, ScaleByNorMuonState):
                means |= paths.leaves_with_paths(node.nu)
                continue
            mu = node.mu
            if isinstance(node, QuantizedNesterovState):
                mu = jax.tree.map(Quantized().read, mu, node.scale)
            first |= paths.leaves_with_paths(mu)
            if isinstance(node, optax.ScaleByAdamState):
                second |= paths.leaves_with_paths(node.nu)
        if len(counts) != 1:
            raise ValueError(
                f"counts of steps in the state: {sorted(counts)}; expected one count, "
                "of an optimizer with moments"
            )
        return cls(counts.pop(), first, second, means)


def take_over(
    tx: optax.GradientTransformation, params: optax.Params, moments: Moments
) -> Any:
    """The state of an optimizer that continues another one's run.

    Momentum, Adam's moments, NorMuon's means and all counts are the run's. Everything
    else is as `tx.init` returns it, with the same shardings.
    Moments of a parameter with splits are split as the parameter is.

    Args:
      tx: a recipe, `optax.contrib.muon`, `optax.adamw`, or any composition of this
        package's pieces with optax's.
      params: the parameters that the run has reached.
      moments: of the run.

    Returns:
      A state for `tx.update`.

    Raises:
      ValueError: with the path, a parameter that is missing from `moments` or has
        another shape or another optimizer there, or NorMuon's means over another axis;
        a state with moments of another kind, such as `optax.ema` has.

    Examples:
      >>> import jax_muon as jm
      >>> params = {"up": jnp.ones((4, 8)), "bias": jnp.ones(8)}
      >>> theirs, ours = optax.contrib.muon(0.02), jm.muon(0.02)
      >>> _, state = ours.update(params, ours.init(params), params)
      >>> back = take_over(theirs, params, Moments.of(state))  # ours as optax's
      >>> int(back.inner_states["muon"].inner_state[0].count)
      1
    """
    tx = checks.as_transform("tx", tx)
    checks.arrays("params", params)
    checks.kind("moments", moments, Moments, "jax_muon.Moments")
    with notes.listening() as found:
        state = tx.init(params)
    applied: list[Any] = []  # `on_mesh` traces an init twice, which records it twice
    for note in found:
        if note.kind == "splits" and note.facts not in applied:
            applied.append(note.facts)
            whole = (moments.first, moments.second, moments.means)
            parts = [arrays_of_parts(arrays, **note.facts) for arrays in whole]
            moments = Moments(moments.count, *parts)
    return _fill(state, moments, "")


def _has_moments(node: Any) -> bool:
    return isinstance(
        node,
        (
            NesterovState,
            QuantizedNesterovState,
            ScaleByNorMuonState,
            optax.ScaleByAdamState,
            optax.contrib.MuonState,
        ),
    )


def _fill(node: Any, moments: Moments, owner: str) -> Any:
    """A part of a state with the run's moments and counts; `owner` is its type."""
    if node is not None and jax.tree_util.all_leaves([node]):
        if np.ndim(node) and jnp.issubdtype(jnp.result_type(node), jnp.floating):
            raise ValueError(
                f"take_over cannot fill the arrays of {owner}; expected no moments but "
                "those of nesterov, scale_by_normuon and optax.scale_by_adam"
            )
        return node
    if not hasattr(node, "_fields"):
        return jax.tree.map(
            lambda x: _fill(x, moments, owner), node, is_leaf=lambda x: x is not node
        )
    new = _moments_of(node, moments)
    # reduce_on_plateau counts the losses that it has seen itself.
    own = isinstance(node, optax.contrib.ReduceLROnPlateauState)
    for name, value in zip(node._fields, node, strict=True):
        if name in _COUNTS and not own:
            new[name] = _placed(moments.count, value)
        elif name not in new and name not in _BEGIN_ANEW:
            new[name] = _fill(value, moments, type(node).__name__)
    return node._replace(**new)


def _moments_of(node: Any, moments: Moments) -> dict[str, Any]:
    """The fields of a state that hold moments, filled from the run."""
    if isinstance(node, QuantizedNesterovState):
        return _quantized(node, moments)
    if isinstance(node, ScaleByNorMuonState):
        filled = bool(moments.means)
        return {
            "nu": _filled(node.nu, moments.means, "NorMuon mean") if filled else node.nu
        }
    if not _has_moments(node):
        return {}
    found = {"mu": _filled(node.mu, moments.first, "mean")}
    if isinstance(node, optax.ScaleByAdamState):
        found["nu"] = _filled(node.nu, moments.second, "mean square")
    return found


def _filled(tree: Any, found: Arrays, what: str) -> Any:
    """A tree of state, filled with the array of each of its parameters."""

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
            new = new[tuple(slice(0, size) for size in old.shape)]
            if not isinstance(new, jax.core.Tracer) and np.any(new != found[path]):
                raise ValueError(
                    f"the run's NorMuon means of {path!r} differ along axes for which "
                    f"the state, of shape {old.shape}, has one mean; expected means "
                    "over the same axes: 'output' of normuon, 'longer' of nanochat"
                )
        if np.shape(new) != old.shape:
            raise ValueError(
                f"the run's {what} of the gradients of {path!r} has shape "
                f"{np.shape(found[path])}, and the state {old.shape}; expected the same"
            )
        return _placed(new, old)

    return jax.tree_util.tree_map_with_path(value, tree)


def _quantized(node: QuantizedNesterovState, moments: Moments) -> dict[str, Any]:
    """Momentum as `nesterov` stores it in int8, rounded as its last step would have."""
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32), node.mu)
    means = _filled(shapes, moments.first, "mean")
    count = jnp.asarray(moments.count - 1)

    def stored(key_path: tuple[Any, ...], mean: Any, *old: Any) -> tuple[Any, ...]:
        new = Quantized().store(mean, old, paths.path_string(key_path), count)
        return tuple(map(_placed, new, old))

    both = jax.tree_util.tree_map_with_path(stored, means, node.mu, node.scale)
    mu, scale = jax.tree.transpose(
        jax.tree.structure(means), jax.tree.structure((0, 0)), both
    )
    return {"mu": mu, "scale": scale}


def _placed(new: Any, old: Any) -> Any:
    """An array with the dtype and the sharding of another."""
    new = jnp.asarray(new, dtype=old.dtype)
    concrete = isinstance(old, jax.Array) and not isinstance(old, jax.core.Tracer)
    return jax.device_put(new, old.sharding) if concrete else new
