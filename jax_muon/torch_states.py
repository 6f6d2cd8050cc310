"""What PyTorch's optimizers remember: state dicts by name, then by our paths.

PyTorch is not imported: its state dicts hold tensors that NumPy can read.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jax_muon import paths

# A state dict of PyTorch, and the names of its parameters in the order of its indices.
Named = tuple[Mapping[str, Any], Sequence[str]]
Arrays = Mapping[str, Any]
ToParams = Callable[[dict[str, np.ndarray]], Any]


class Found:
    """Moments of PyTorch's parameters by name, as they are collected."""

    def __init__(self, weights: Arrays):
        self.weights = weights
        self.first: dict[str, np.ndarray] = {}
        self.second: dict[str, np.ndarray] = {}
        self.means: dict[str, np.ndarray] = {}
        self.counts: list[int] = []

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
        self.counts += [int(state["step"]) for state in ranks if "step" in state]

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

    def by_path(self, to_params: ToParams) -> list[dict[str, Any]]:
        """First moments, second ones and means by our paths.

        A path has one if all that it is made of have one.
        """

        def converted(arrays: dict[str, np.ndarray]) -> dict[str, Any]:
            def full(known: bool, name: str) -> np.ndarray:
                return np.full(self.shape(name), float(known), np.float32)

            zeros = {name: full(False, name) for name in self.weights}
            known = to_params({name: full(name in arrays, name) for name in zeros})
            whole = {p for p, x in paths.leaves_with_paths(known) if np.all(x == 1)}
            values = to_params({name: arrays.get(name, zeros[name]) for name in zeros})
            return {p: x for p, x in paths.leaves_with_paths(values) if p in whole}

        return [converted(arrays) for arrays in (self.first, self.second, self.means)]


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
