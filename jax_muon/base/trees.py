"""Trees of parameters: the paths of their leaves, and functions of leaves by path.

A path is `blocks/0/attn/q/kernel`, the same for the same parameter in every Flax form
(linen dict, FrozenDict, boxed, nnx.State) and at init as at update: NNX boxes
parameters at init only. A box is therefore a leaf here, and its array the value.
"""

import fnmatch
import functools
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
from jax.tree_util import KeyPath
from jaxtyping import Array, PyTree

from jax_muon.base.dtypes import wider


@functools.lru_cache(2**16)  # a trace asks for each path up to 22 times
def path_string(key_path: KeyPath) -> str:
    """`a/b/0` for the key path (DictKey("a"), GetAttrKey("b"), SequenceKey(0))."""
    return jax.tree_util.keystr(key_path, simple=True, separator="/")


def is_box(x: object) -> bool:
    """True for a Flax box with one array in it, such as an nnx.Param.

    In a tree of specs it holds a spec or None instead of the array.
    """
    # Most nodes are one of the first, and no box.
    if isinstance(x, dict | list | tuple | jax.Array) or not isinstance(
        x, _box_types()
    ):
        return False
    # nnx.Param(x) holds one array; a Variable that holds a tree is no box.
    contents = _children(x)
    return len(contents) == 1 and (
        contents[0] is None or jax.tree_util.all_leaves(contents)
    )


def _box_types() -> tuple[type, ...]:
    """The types of boxes. A framework that nobody imported made none."""
    names = (("flax.nnx", "Variable"), ("flax.core.meta", "AxisMetadata"))
    modules = [(sys.modules.get(module), name) for module, name in names]
    return tuple(getattr(module, name) for module, name in modules if module)


def _children(x: PyTree) -> list[Any]:
    """The nodes one level below: [array] of nnx.Param(array)."""
    return jax.tree.leaves(x, is_leaf=lambda y: y is not x)


def unbox(tree: PyTree) -> PyTree:
    """The tree with each Flax box replaced by its array; metadata is dropped."""
    return jax.tree.map(unboxed, tree, is_leaf=is_box)


def unboxed(x: Any) -> Any:
    """The array in a box, or the array."""
    return _children(x)[0] if is_box(x) else x


def leaves_with_paths(
    tree: PyTree, is_leaf: Callable[[Any], bool] | None = None
) -> list[tuple[str, Any]]:
    """Leaves of a tree with their paths, in the order of `jax.tree.leaves`.

    {"up": nnx.Param(x)} gives [("up", x)]; JAX's own path would be "up/value".
    """
    # A box is a leaf first, and its array then has the path of the box.
    stops = is_leaf and (lambda x: is_box(x) or is_leaf(x))
    flat = jax.tree_util.tree_leaves_with_path(tree, is_leaf=stops or is_box)
    return [
        (path_string(key_path), leaf)
        for key_path, x in flat
        for leaf in (jax.tree.leaves(x, is_leaf=is_leaf) if is_box(x) else [x])
    ]


def is_function(x: object) -> TypeGuard[Callable[..., Any]]:
    """True for a function; False for a tree that can be called, like eqx.nn.MLP."""
    return callable(x) and jax.tree_util.all_leaves([x])


def slashed(path: str) -> str:
    """A path or pattern with its dots as slashes: PyTorch's blocks.0.attn.q.weight."""
    return path.replace(".", "/")


def numberless(text: str) -> str:
    """A path with 0 for every number: blocks/11/up becomes blocks/0/up."""
    return re.sub(r"\d+", "0", text)


def words(name: str) -> list[str]:
    """Words of a name, in lower case.

    Examples:
      >>> words("LayerNorm_0"), words("LMHead"), words("QKNorm")
      (['layer', 'norm'], ['lm', 'head'], ['qk', 'norm'])
    """
    # Capitals before the one that begins a word, LM of LMHead; or a whole word.
    return [x.lower() for x in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]


def nearest_prefix(entries: Mapping[str, Any], path: str) -> str | None:
    """The longest prefix of `path`, itself included, that has an entry, or None.

    {"blocks": 1, "blocks/0": 2} has "blocks/0" for blocks/0/up, None for wte.
    """
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
    # "/blocks/0/attn/qk/" does not contain "/attn/q/". A path with [ is no pattern.
    return pattern == path or fnmatch.fnmatchcase(f"/{path}/", f"*/{pattern}/*")


def ends_with(pattern: str, path: str) -> bool:
    """True if the last components of `path` match: "up/k*" for blocks/0/up/kernel."""
    return fnmatch.fnmatchcase(f"/{slashed(path)}", f"*/{slashed(pattern)}")


def check_patterns_match(what: str, patterns: Iterable[str], paths: list[str]) -> None:
    """Raise a ValueError for a pattern that matches no path."""
    for pattern in patterns:
        if paths and not any(matches(pattern, path) for path in paths):
            raise ValueError(
                f"{what}: the pattern {pattern!r} matches no parameter; expected a "
                f"pattern of {', '.join(paths)}"
            )


# --- leaves by path -------------------------------------------------------------------


def map_leaves(function: Callable[[str, Array], Any], tree: PyTree) -> PyTree:
    """The tree of `function(path, leaf)`; boxes stay boxes."""

    def apply(key_path: KeyPath, x: PyTree) -> PyTree:
        return jax.tree.map(lambda leaf: function(path_string(key_path), leaf), x)

    return jax.tree_util.tree_map_with_path(apply, tree, is_leaf=is_box)


def step_leaves(
    step: Callable[..., tuple[Array, ...]], updates: PyTree, *state: PyTree
) -> list[PyTree]:
    """Updates and trees of state after `step(path, update, *state of this leaf)`.

    State is found by path, so it may be in Flax boxes that gradients have lost, and a
    renamed parameter never gets the state of another. Nothing is broadcast.

    `step_leaves(step, {"w": g}, {"w": nnx.Param(mu)})` calls step("w", g, mu), which
    returns (update, mu), and returns [{"w": update}, {"w": nnx.Param(mu)}].
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
        # An update (4, 1) beside mu (4, 8) would become (4, 8) without a word.
        if shapes != [x.shape for x in results[path]]:
            raise ValueError(
                f"parameter {path!r} has shape {u.shape}, and its state {shapes[1:]}; "
                "expected the state that init returns for this shape"
            )
    return [
        jax.tree.unflatten(jax.tree.structure(tree), [results[x][i] for x in leaves])
        for i, (tree, leaves) in enumerate(zip((updates, *state), flat, strict=True))
    ]


def as_wide_as_params(updates: PyTree, params: PyTree) -> PyTree:
    """Updates in the dtype of their parameters, if that is the wider one.

    Otherwise steps of float32 parameters would have the 8 bits of bfloat16 gradients.
    Integers and masked None stay as they are.
    """

    def widen(u: Array | None, p: Array) -> Array | None:
        if u is None or u.dtype == p.dtype:
            return u
        floating = all(jnp.issubdtype(x.dtype, jnp.floating) for x in (u, p))
        widens = floating and wider(u.dtype, p.dtype) == p.dtype
        return u.astype(p.dtype) if widens else u

    if params is None:
        return updates
    return jax.tree.map(widen, updates, params, is_leaf=lambda x: x is None)
