"""Helpers for pieces: match state to updates by path, evaluate schedules."""

from collections.abc import Callable
from typing import Any

import jax
import optax
from jaxtyping import Array

from jax_muon import paths


def rate_at(rate: optax.ScalarOrSchedule, count: Array) -> Any:
    """The value of a number or a schedule at this step."""
    return rate(count) if callable(rate) else rate


def map_leaves(function: Callable[[str, Array], Array], tree: Any) -> Any:
    """The tree of `function(path, leaf)`."""
    return jax.tree_util.tree_map_with_path(
        lambda key_path, leaf: function(paths.path_string(key_path), leaf), tree
    )


def step_leaves(
    step: Callable[..., tuple[Array, ...]], updates: Any, *state: Any
) -> list[Any]:
    """Updates and trees of state after `step(path, update, *state of this leaf)`.

    State is found by path, so it may be in Flax boxes that gradients have lost, and a
    renamed parameter never gets the state of another.

    Raises:
      ValueError: with the path, for state without an update or the other way round, or
        of a shape that would be broadcast.
    """
    leaf_of, *kept = flat = [
        dict(paths.leaves_with_paths(tree)) for tree in (updates, *state)
    ]
    for leaves in kept:
        if others := sorted(leaves.keys() ^ leaf_of.keys()):
            raise ValueError(
                f"only the updates or only the state have the parameters {others}; "
                "expected the state of these parameters"
            )
    results = {}
    for path, u in leaf_of.items():
        old = [leaves[path] for leaves in kept]
        results[path] = step(path, u, *old)
        shapes = [x.shape for x in (u, *old)]
        if shapes != [x.shape for x in results[path]]:  # one of them was broadcast
            raise ValueError(
                f"parameter {path!r} has shape {u.shape}, and its state {shapes[1:]}; "
                "expected the state that init returns for this shape"
            )
    return [
        jax.tree.unflatten(
            jax.tree.structure(tree), [results[path][i] for path in leaves]
        )
        for i, (tree, leaves) in enumerate(zip((updates, *state), flat, strict=True))
    ]
