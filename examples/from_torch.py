"""Read the optimizer state of a PyTorch run, to continue it with jax_muon.

Each function returns `jax_muon.Moments`, which `jax_muon.take_over` puts into the state
of an optimizer of ours: copy this file into your project. PyTorch is not imported; its
state dicts hold tensors that NumPy can read.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

import jax_muon as jm

# A state dict of PyTorch, and the names of its parameters in the order of its indices.
Named = tuple[Mapping[str, Any], Sequence[str]]
Arrays = Mapping[str, Any]
ToParams = Callable[[dict[str, np.ndarray]], Any]


def from_torch(
    optimizers: Sequence[Named],
    weights: Arrays,
    to_params: ToParams,
    *,
    accumulation: str = "ema",
    count: int | None = None,
) -> jm.Moments:
    """Read `torch.optim.Muon`, `torch.optim.AdamW` and optimizers like them.

    Args:
      optimizers: for each its `state_dict()`, and the names of its parameters in the
        order in which it was given them.
      weights: all weights of the model by name; only their shapes are used.
      to_params: the function that turns PyTorch's weights by name, as NumPy arrays,
        into parameters. It may transpose, reshape and stack them.
      accumulation: of the momentum: "ema" as in `torch.optim.Muon`, or "sum".
      count: number of steps made; None reads it from the states. Muon's have none.

    Raises:
      ValueError: no count, or several; names that are not in `weights`.
    """
    if accumulation not in ("ema", "sum"):
        raise ValueError(f"accumulation={accumulation!r}; expected 'ema' or 'sum'")
    found = Found(weights)
    for group, states in groups_of(optimizers):
        for name, state in states.items():
            if (buffer := state.get("momentum_buffer")) is not None:
                unit = 1 - group["momentum"] if accumulation == "sum" else 1
                found.add(name, "first", unit * as_numpy(buffer))
            found.add_rows(name, [state])
    return found.moments(to_params, count)


def from_nanochat(
    ranks: Sequence[Mapping[str, Any]],
    names: Sequence[str],
    weights: Arrays,
    to_params: ToParams,
) -> jm.Moments:
    """Read nanochat's optimizer files, one for each rank.

    A group of matrices is a stack that the ranks share, padded to a multiple of their
    number; AdamW's moments of at least 1024 elements are sharded by rows.

    Args:
      ranks: the state dicts of `optim_STEP_rank0.pt` and so on, in order; one for a run
        on one device.
      names: the names of the parameters, in the order in which the optimizer was given
        them.
      weights: all weights of the model by name; only their shapes are used.
      to_params: see `from_torch`.

    Raises:
      ValueError: files of another optimizer; no count, or several; shapes that do not
        make up the weights'.
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
    return found.moments(to_params)


def from_dion(
    optimizers: Sequence[Named], weights: Arrays, to_params: ToParams
) -> jm.Moments:
    """Read `dion.Muon` and `dion.NorMuon`, whose momentum is a sum.

    Args:
      optimizers: see `from_torch`; whole tensors, not DTensors.
      weights: see `from_torch`.
      to_params: see `from_torch`.

    Raises:
      ValueError: states of another optimizer or algorithm; no count, or several.
    """
    found = Found(weights)
    for group, states in groups_of(optimizers, "algorithm"):
        algorithm = group["algorithm"]
        if algorithm not in ("muon", "normuon", "adamw"):
            raise ValueError(f"{algorithm=}; expected 'muon', 'normuon' or 'adamw'")
        unit = 1 if algorithm == "adamw" else 1 - group["mu"]
        for name, state in states.items():
            if "momentum" in state:
                found.add(name, "first", unit * as_numpy(state["momentum"]))
            if "variance" in state:
                found.add(name, "second", as_numpy(state["variance"]))
            if "variance_neuron" in state:
                found.add(name, "means", as_numpy(state["variance_neuron"]))
        found.counts.add(int(group["step"]))
    return found.moments(to_params)


class Found:
    """Moments of PyTorch's parameters by name, as they are collected."""

    def __init__(self, weights: Arrays):
        self.weights = weights
        self.first: dict[str, np.ndarray] = {}
        self.second: dict[str, np.ndarray] = {}
        self.means: dict[str, np.ndarray] = {}
        self.counts: set[int] = set()

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self.weights:
            raise ValueError(
                f"the optimizer has a parameter {name!r}, and the weights are "
                f"{', '.join(self.weights)}; expected its names in its own order"
            )
        return tuple(self.weights[name].shape)

    def add(self, name: str, moment: str, value: np.ndarray) -> None:
        """One array, of the weight's shape, or with 1 for the axes of a mean."""
        shape = self.shape(name)
        fits = value.ndim == len(shape) and all(
            size in (1, whole) for size, whole in zip(value.shape, shape, strict=True)
        )
        if not fits:
            raise ValueError(
                f"the {moment} moment of {name!r} has shape {value.shape}, and the "
                f"weight {shape}; expected the same, or names in another order"
            )
        getattr(self, moment)[name] = np.broadcast_to(value, shape)

    def add_rows(self, name: str, ranks: Sequence[Arrays]) -> None:
        """Adam's moments, whole on every rank or divided by rows."""
        for moment, key in (("first", "exp_avg"), ("second", "exp_avg_sq")):
            if key in ranks[0]:
                rows = [as_numpy(state[key]) for state in ranks]
                whole = rows[0].shape == self.shape(name)
                self.add(name, moment, rows[0] if whole else np.concatenate(rows))
        self.counts |= {int(state["step"]) for state in ranks if "step" in state}

    def add_stack(self, names: list[str], ranks: Sequence[Mapping[str, Any]]) -> None:
        """A group of nanochat: its state is under its first parameter, divided."""
        states = [rank[names[0]] for rank in ranks]
        for moment, key in (
            ("first", "momentum_buffer"),
            ("means", "second_momentum_buffer"),
        ):
            if key in states[0]:
                stack = np.concatenate([as_numpy(state[key]) for state in states])
                for name, value in zip(names, stack, strict=False):  # not the padding
                    self.add(name, moment, value)

    def moments(self, to_params: ToParams, count: int | None = None) -> jm.Moments:
        """The moments by our paths, as `to_params` makes them.

        A path has a moment if all weights that it is made of have one.
        """

        def converted(arrays: dict[str, np.ndarray]) -> dict[str, Any]:
            def full(known: bool, name: str) -> np.ndarray:
                return np.full(self.shape(name), float(known), np.float32)

            zeros = {name: full(False, name) for name in self.weights}
            known = to_params({name: full(name in arrays, name) for name in zeros})
            whole = {path for path, x in by_path(known).items() if np.all(x == 1)}
            values = to_params({name: arrays.get(name, zeros[name]) for name in zeros})
            return {path: x for path, x in by_path(values).items() if path in whole}

        if count is None:
            if len(self.counts) != 1:
                raise ValueError(
                    f"counts of steps in the states: {sorted(self.counts)}; expected "
                    "one, and count= if the states have none"
                )
            (count,) = self.counts
        return jm.Moments(
            count, converted(self.first), converted(self.second), converted(self.means)
        )


def by_path(tree: Any) -> dict[str, Any]:
    """Leaves by path, such as `blocks/0/up/kernel`."""
    return {
        jax.tree_util.keystr(key_path, simple=True, separator="/"): x
        for key_path, x in jax.tree.leaves_with_path(tree)
    }


def groups_of(optimizers: Sequence[Named], has: str = "params") -> Any:
    """Every parameter group, which has this setting, and states of its parameters."""
    for state_dict, names in optimizers:
        states = state_dict["state"]
        for group in state_dict["param_groups"]:
            if has not in group:
                raise ValueError(
                    f"a parameter group has {', '.join(sorted(group))}; expected "
                    f"{has!r} too, as the groups of that optimizer have it"
                )
            if max(group["params"], default=-1) >= len(names):
                raise ValueError(
                    f"the optimizer has a parameter {max(group['params'])}, and there "
                    f"are {len(names)} names: {', '.join(names)}"
                )
            yield group, {names[i]: states.get(i, {}) for i in group["params"]}


def as_numpy(x: Any) -> np.ndarray:
    """A tensor or array as NumPy has it; bfloat16 of PyTorch becomes float32."""
    if hasattr(x, "detach"):
        x = x.detach().cpu()
        x = x.float() if str(x.dtype).endswith(("bfloat16", "float16")) else x
    return np.asarray(x)
