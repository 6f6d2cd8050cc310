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
from optax.contrib import MuonState, ReduceLROnPlateauState

from jax_muon import checks, jaxprs, notes, paths
from jax_muon.accumulators import Quantized
from jax_muon.momentum import NesterovState, QuantizedNesterovState
from jax_muon.parts import arrays_of_parts
from jax_muon.scaling import ScaleByNorMuonState

Arrays = Mapping[str, Any]

# The fields of states that hold moments, and of `Moments` that hold the same.
_MOMENTS: dict[type, dict[str, str]] = {
    NesterovState: {"mu": "first"},
    QuantizedNesterovState: {"mu": "first"},
    ScaleByNorMuonState: {"nu": "means"},
    optax.ScaleByAdamState: {"mu": "first", "nu": "second"},
    MuonState: {"mu": "first"},
}

# Their state has Adam's type, but holds other averages.
_UNLIKE_ADAM = ("scale_by_adamax", "scale_by_adopt", "scale_by_yogi")

# Fields that count the steps of a run.
_COUNTS = ("count", "gradient_step", "step")

# Arrays that `init` sets and `take_over` leaves: norms, sums of gradients, tables.
_AS_INIT = ("radius", "acc_grads", "ns_coeffs", "hyperparams")


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

    @classmethod
    def of(cls, state: Any) -> "Moments":
        """Read the state of a recipe, `optax.contrib.muon`, `optax.adamw`, or chains.

        Args:
          state: the optimizer's state, chained, masked or partitioned. The states of
            `optax.adamax`, adopt and yogi look like Adam's, but hold other averages.

        Raises:
          ValueError: a state without moments, or whose parts differ in their counts.
        """
        trees: dict[str, dict[str, Any]] = {"first": {}, "second": {}, "means": {}}
        nodes = jax.tree.leaves(state, is_leaf=_has_moments)
        nodes = [node for node in nodes if _has_moments(node)]
        for node in nodes:
            for field, name in _MOMENTS[type(node)].items():
                flat = paths.leaves_with_paths(getattr(node, field))
                if isinstance(node, QuantizedNesterovState):
                    both = zip(flat, jax.tree.leaves(node.scale), strict=True)
                    flat = [(path, Quantized().read(x, y)) for (path, x), y in both]
                trees[name] |= flat
        counts = {int(node.count) for node in nodes}
        if len(counts) != 1:
            raise ValueError(
                f"counts of steps in the state: {sorted(counts)}; expected one count, "
                "of an optimizer with moments"
            )
        return cls(counts.pop(), **trees)


def take_over(
    tx: optax.GradientTransformation, params: optax.Params, moments: Moments
) -> Any:
    """The state of an optimizer that continues another one's run.

    Momentum, Adam's moments, NorMuon's means and all counts are the run's. Everything
    else is as `tx.init` returns it, with the same shardings. Moments of a parameter
    with splits are split as the parameter is.

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
        a state with moments of another kind, such as those of `optax.ema` and
        `optax.adamax` or `optax.yogi`.

    Examples:
      >>> import jax_muon as jm
      >>> params = {"up": jnp.ones((4, 8)), "bias": jnp.ones(8)}
      >>> theirs, ours = optax.contrib.muon(0.02), jm.muon(0.02, matrices={"*": "muon"})
      >>> _, state = ours.update(params, ours.init(params), params)
      >>> back = take_over(theirs, params, Moments.of(state))  # ours as optax's
      >>> int(back.inner_states["muon"].inner_state[0].count)
      1
    """
    tx = checks.as_transform("tx", tx)
    checks.kind("moments", moments, Moments, "jax_muon.Moments")
    with notes.listening() as heard:
        # A new function, so that JAX traces it.
        program = jax.make_jaxpr(lambda params: tx.init(params))(params)
    called = {*jaxprs.functions(program.jaxpr)}
    for name in _UNLIKE_ADAM:
        if any(function.startswith(f"{name}.") for function in called):
            raise ValueError(
                f"take_over cannot fill the state of {name}, whose moments are not "
                "averages as Adam's; expected a group of another optimizer, such as "
                "optax.adamw"
            )
    for fitted in heard["splits"].values():
        whole = (moments.first, moments.second, moments.means)
        parts = (arrays_of_parts(arrays, fitted) for arrays in whole)
        moments = Moments(moments.count, *parts)

    scalars = [path for path, p in paths.leaves_with_paths(params) if not np.ndim(p)]

    def fill(key_path: tuple[Any, ...], node: Any) -> Any:
        if _has_moments(node):
            return _filled(node, moments)
        fields = [getattr(key, "name", None) for key in key_path]
        # reduce_on_plateau counts the losses that it has seen itself.
        is_plateau = isinstance(node, ReduceLROnPlateauState)
        if is_plateau or not {*fields}.isdisjoint(_AS_INIT):
            return node
        if fields and fields[-1] in _COUNTS:
            return _placed(moments.count, node)
        path = f"/{paths.path_string(key_path)}"
        of_scalar = any(path.endswith(f"/{name}") for name in scalars)
        is_float = jnp.issubdtype(jnp.result_type(node), jnp.floating)
        if is_float and (np.ndim(node) or of_scalar):
            raise ValueError(
                f"take_over cannot fill state{jax.tree_util.keystr(key_path)} of shape "
                f"{node.shape}; expected no moments but those of nesterov, "
                "scale_by_normuon, optax.scale_by_adam and optax.contrib.scale_by_muon"
            )
        return node

    return jax.tree.map_with_path(
        fill,
        tx.init(params),
        is_leaf=lambda x: _has_moments(x) or isinstance(x, ReduceLROnPlateauState),
    )


def _has_moments(node: Any) -> bool:
    return type(node) in _MOMENTS


def _filled(node: Any, moments: Moments) -> Any:
    """A state with the run's moments and count."""
    new: dict[str, Any] = {"count": [moments.count]}
    for field, name in _MOMENTS[type(node)].items():
        flat = paths.leaves_with_paths(getattr(node, field))
        if name != "means" or moments.means:  # without them, of a run without NorMuon
            new[field] = [_array(moments, name, path, x.shape) for path, x in flat]
    if isinstance(node, QuantizedNesterovState):
        # Rounded as its last step would have rounded it.
        last = jnp.asarray(moments.count - 1)
        old = zip(*map(jax.tree.leaves, (node.mu, node.scale)), strict=True)
        rows = [
            Quantized().store(x, both, path, last)
            for (path, _), x, both in zip(flat, new["mu"], old, strict=True)
        ]
        new["mu"], new["scale"] = [row[0] for row in rows], [row[1] for row in rows]
    for field, arrays in new.items():
        leaves, treedef = jax.tree.flatten(getattr(node, field))
        new[field] = jax.tree.unflatten(treedef, map(_placed, arrays, leaves))
    return node._replace(**new)


def _array(moments: Moments, name: str, path: str, shape: tuple[int, ...]) -> Any:
    """The run's array of one parameter, which needs the shape of the state."""
    arrays = getattr(moments, name)
    if path not in arrays:
        raise ValueError(
            f"moments.{name} has nothing for {path!r}; it has "
            + (", ".join(arrays) or "nothing at all")
            + "; expected the labels that the run had"
        )
    new = whole = arrays[path]
    if name == "means" and np.ndim(whole) == len(shape):
        new = whole[tuple(slice(size) for size in shape)]
        if np.any(new != whole):
            raise ValueError(
                f"moments.means of {path!r} differ along axes for which the state, of "
                f"shape {shape}, has one mean; expected means over the same axes: "
                "'output' of normuon, 'longer' of nanochat"
            )
    if np.shape(new) != shape:
        raise ValueError(
            f"moments.{name} of {path!r} has shape {np.shape(whole)}, and the state "
            f"{shape}; expected the same"
        )
    return new


def _placed(new: Any, old: Any) -> Any:
    """An array with the dtype and the sharding of another."""
    sharding = getattr(old, "sharding", None)
    return jax.device_put(jnp.asarray(new, dtype=old.dtype), sharding)
