"""Which optimizer each parameter gets, decided by its role and path.

Muon is for matrices that a model multiplies by. An embedding table is a matrix in shape
only: a lookup touches single rows. The output head, biases, norm scales and other
vectors go to AdamW too, even where scanned layers stack them to two axes and more.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from jax_muon.checks import check_arrays, check_mapping, check_type
from jax_muon.reading import paths
from jax_muon.reading.roles import ADAMW, MUON, Leaf, Read, leaves_of, read_leaves

# A tree (or a prefix of one) of labels, or a function of the parameters that gives one.
Labels = Any | Callable[[Any], Any] | None

__all__ = ["ADAMW", "MUON", "label_params"]

# What a `Reading` with axis names makes of the leaves whose labels it asks for.
_known: contextvars.ContextVar[tuple[Sequence[Leaf], Sequence[Read]] | None]
_known = contextvars.ContextVar("jax_muon_known_reads", default=None)


def label_params(params: Any, rules: Mapping[str, str] | None = None) -> Any:
    """Label every parameter "muon" or "adamw", or as the rules say.

    To AdamW: vectors and scalars; biases and norm scales, even stacked by scanned
    layers; embeddings, output heads (`lm_head`, `head`, `logits`, `classifier`) and
    routers (`router`, or a `gate` with experts beside it); depthwise convolutions;
    matrices with a single row or column; whatever is empty or not real floating point.
    To Muon: every other parameter, such as the kernels of Dense, DenseGeneral, Conv and
    Einsum and the factors of LoRA, stacked by layer or expert or not. `describe` shows
    the outcome.

    What neither name nor shape tells, rules have to: a grouped convolution under
    another name, an embedding tied to a weight whose name the tree has. Within a
    `Reading` its axis names count too.

    Args:
      params: parameters in any Flax form: linen dict, FrozenDict, boxed, nnx.State. The
        updates of an optimizer get the same labels.
      rules: path pattern to label, tried in their order before the roles above. A
        pattern names whole components of the path, such as "router", "attn/q" or
        "blocks/0/*".

    Returns:
      A tree of strings with the structure of `params`, for `optax.multi_transform`.

    Raises:
      ValueError: a rule that matches no parameter, with the paths there are.

    Examples:
      >>> import jax.numpy as jnp
      >>> params = {"wte": jnp.zeros((9, 4)), "mlp": {"kernel": jnp.zeros((4, 8))}}
      >>> label_params(params)
      {'mlp': {'kernel': 'muon'}, 'wte': 'adamw'}
      >>> label_params(params, {"wte": "embedding"})
      {'mlp': {'kernel': 'muon'}, 'wte': 'embedding'}
    """
    check_arrays("params", params)
    rules = {} if rules is None else rules
    check_mapping("rules", rules, "a mapping of path patterns to labels", _check_label)
    leaves = leaves_of(params)
    known = [leaf.path for leaf in leaves]
    paths.check_patterns_match("rules of label_params", rules, known)
    reads = dict(zip(known, _reads_of(leaves), strict=True))

    def label(key_path: tuple[Any, ...], leaf: Any) -> str:
        del leaf
        path = paths.path_string(key_path)
        for pattern, chosen in rules.items():
            if paths.matches(pattern, path):
                return chosen
        return reads[path].label

    return jax.tree_util.tree_map_with_path(label, params)


@contextlib.contextmanager
def knowing(leaves: Sequence[Leaf], reads: Sequence[Read]) -> Iterator[None]:
    """Have `label_params` take these reads for these leaves, inside the `with` block.

    The names of a `Reading` are not in its tree, where `label_params` would look.
    """
    token = _known.set((leaves, reads))
    try:
        yield
    finally:
        _known.reset(token)


def _reads_of(leaves: Sequence[Leaf]) -> Sequence[Read]:
    if (known := _known.get()) is not None:
        mine, those = (
            [(x.path, x.shape, x.dtype) for x in y] for y in (leaves, known[0])
        )
        if mine == those:
            return known[1]
    return read_leaves(leaves)


def check_labels(labels: Any) -> None:
    """Refuse what is neither None, nor a tree of labels, nor a function of a tree."""
    for path, label in (
        [] if paths.is_function(labels) else paths.leaves_with_paths(labels)
    ):
        _check_label(f"labels at {path!r}", label)


def _check_label(name: str, label: Any) -> None:
    check_type(name, label, str, "a label, a text")


def lookup(
    given: Labels, tree: Any, names: Sequence[str], valid: Sequence[str] | None
) -> Callable[[str], str | None]:
    """Find the label of every parameter that the user gave; None where none was given.

    Args:
      given: what the user said: a tree, a prefix of one, or a function of the tree.
      tree: the parameters.
      names: their paths.
      valid: labels for the error.

    Raises:
      ValueError: for paths that no parameter has, two labels of one path, and, when
        it is looked up, a parameter without a label.
    """
    given = given(tree) if paths.is_function(given) else given
    if given is None:
        return lambda path: None
    flat = paths.leaves_with_paths(given)
    by_path = dict(flat)
    paths.check_known("labels", by_path, names)
    if len(by_path) < len(flat):
        listed = ", ".join(f"{path!r}: {label!r}" for path, label in flat)
        raise ValueError(f"two labels for one path among {listed}; expected one")

    def label(path: str) -> str:
        found = paths.find_prefix(by_path, path)
        if found is None:
            raise ValueError(
                f"parameter {path!r} has no label, or None; expected one of "
                + ", ".join(map(repr, valid or (MUON, ADAMW)))
            )
        return found

    return label
