"""Trees of parameters: the paths of their leaves, and functions of leaves by path.

A path is `blocks/0/attn/q/kernel`, the same for the same parameter in every Flax form
(linen dict, FrozenDict, boxed, nnx.State) and at init as at update: NNX boxes
parameters at init only. A box is therefore a leaf here, and its array the value.
"""

import fnmatch
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jax_muon.base.dtypes import wider


def path_string(key_path: tuple[Any, ...]) -> str:
    """`a/b/0` for the key path of a leaf or a Flax box."""
    return jax.tree_util.keystr(key_path, simple=True, separator="/")


def is_box(x: Any) -> bool:
    """True for a Flax box with one array in it, such as an nnx.Param.

    In a tree of specs it holds a spec or None instead of the array.
    """
    if not isinstance(x, _box_types()):
        return False
    contents = _children(x)
    return len(contents) == 1 and (
        contents[0] is None or jax.tree_util.all_leaves(contents)
    )


def _box_types() -> tuple[type, ...]:
    """Those of NNX and linen, if they are imported: else there are no boxes."""
    names = (("flax.nnx", "Variable"), ("flax.core.meta", "AxisMetadata"))
    modules = [(sys.modules.get(module), name) for module, name in names]
    return tuple(getattr(module, name) for module, name in modules if module)


def _children(x: Any) -> list[Any]:
    return jax.tree.leaves(x, is_leaf=lambda y: y is not x)


def unbox(tree: Any) -> Any:
    """The tree with each Flax box replaced by its array; metadata is dropped."""
    return jax.tree.map(
        lambda x: _children(x)[0] if is_box(x) else x, tree, is_leaf=is_box
    )


def leaves_with_paths(tree: Any, is_leaf: Any = None) -> list[tuple[str, Any]]:
    """Leaves of a tree with their paths, in the order of `jax.tree.leaves`."""
    flat = jax.tree_util.tree_leaves_with_path(
        tree, is_leaf=lambda x: is_box(x) or (is_leaf is not None and is_leaf(x))
    )
    return [
        (path_string(key_path), leaf)
        for key_path, x in flat
        for leaf in (jax.tree.leaves(x, is_leaf=is_leaf) if is_box(x) else [x])
    ]


def is_function(x: Any) -> TypeGuard[Callable[..., Any]]:
    """True for a function, and not for a tree that can be called, like a module."""
    return callable(x) and jax.tree_util.all_leaves([x])


def slashed(path: str) -> str:
    """A path or pattern with its dots as slashes: PyTorch's blocks.0.attn.q.weight."""
    return path.replace(".", "/")


def numberless(text: str) -> str:
    """A path with 0 for every number: the same for all layers."""
    return re.sub(r"\d+", "0", text)


def words(name: str) -> list[str]:
    """Words of a name, in lower case.

    Examples:
      >>> words("LayerNorm_0"), words("LMHead"), words("QKNorm")
      (['layer', 'norm'], ['lm', 'head'], ['qk', 'norm'])
    """
    return [x.lower() for x in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]


def nearest_prefix(entries: Mapping[str, Any], path: str) -> str | None:
    """The longest prefix of `path`, itself included, that has an entry, or None."""
    while path and path not in entries:
        path = path.rpartition("/")[0]
    return path if path in entries else None


def matches(pattern: str, path: str) -> bool:
    """True if whole components of `path` match a shell-style pattern.

    `*` matches any text, `/` included, `?` one character, `[ab]` either.

    Examples:
      >>> matches("attn/q", "blocks/0/attn/q/kernel"), matches("attn/q", "attn/qk")
      (True, False)
      >>> matches("attn/q", "blocks.0.attn.q.weight"), matches("0/*/k", "0/attn/k")
      (True, True)
    """
    path, pattern = slashed(path), slashed(pattern)
    return pattern == path or fnmatch.fnmatchcase(f"/{path}/", f"*/{pattern}/*")


def ends_with(pattern: str, path: str) -> bool:
    """True if the last components of `path` match, as in `matches`."""
    return fnmatch.fnmatchcase(f"/{slashed(path)}", f"*/{slashed(pattern)}")


def check_patterns_match(what: str, patterns: Iterable[str], paths: list[str]) -> None:
    """Raise a ValueError for a pattern that matches no path."""
    for pattern in patterns:
        if paths and not any(matches(pattern, path) for path in paths):
            raise ValueError(
                f"{what}: the pattern {pattern!r} matches no parameter; there are "
                + ", ".join(paths)
            )


# --- leaves by path -------------------------------------------------------------------


def map_leaves(function: Callable[[str, Array], Any], tree: Any) -> Any:
    """The tree of `function(path, leaf)`."""

    def of_leaf(key_path: tuple[Any, ...], x: Any) -> Any:
        return jax.tree.map(lambda leaf: function(path_string(key_path), leaf), x)

    return jax.tree_util.tree_map_with_path(of_leaf, tree, is_leaf=is_box)


def step_leaves(
    step: Callable[..., tuple[Array, ...]], updates: Any, *state: Any
) -> list[Any]:
    """Updates and trees of state after `step(path, update, *state of this leaf)`.

    State is found by path, so it may be in Flax boxes that gradients have lost, and a
    renamed parameter never gets the state of another. Nothing is broadcast.
    """
    flat = [dict(leaves_with_paths(tree)) for tree in (updates, *state)]
    leaf_of, *kept = flat
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
        jax.tree.unflatten(jax.tree.structure(tree), [results[x][i] for x in leaves])
        for i, (tree, leaves) in enumerate(zip((updates, *state), flat, strict=True))
    ]


def as_wide_as_params(updates: Any, params: Any) -> Any:
    """Updates in the dtype of their parameters, if that is the wider one.

    Otherwise steps of float32 parameters would have the 8 bits of bfloat16 gradients.
    """

    def widen(u: Any, p: Any) -> Any:
        if u is None or not all(jnp.issubdtype(x.dtype, jnp.floating) for x in (u, p)):
            return u
        return u.astype(p.dtype) if wider(u.dtype, p.dtype) == p.dtype else u

    if params is None:
        return updates
    return jax.tree.map(widen, updates, params, is_leaf=lambda x: x is None)
