"""Read a whole tree of parameters: which are matrices, along which axes, and why.

A tree is read once and as a whole, since what a parameter is depends on its neighbours.
"""

import dataclasses
import warnings
from typing import Any

import jax.numpy as jnp

from jax_muon import checks, paths
from jax_muon.axes import leaf_axes, not_a_matrix
from jax_muon.joins import Joins, check_joins
from jax_muon.matrices import Matrices, Parameter
from jax_muon.reading import names as axis_names
from jax_muon.reading import overrides
from jax_muon.reading.overrides import Override
from jax_muon.reading.roles import ADAMW, MUON, Leaf, OutIn, Read, read_leaves
from jax_muon.splits import Parts, Splits


def read(
    params: Any,
    *,
    rules: overrides.Rules = None,
    names: axis_names.ByPath | None = None,
    table: axis_names.Table | None = None,
    out_in: OutIn = None,
    splits: Splits | None = None,
    joins: Joins | None = None,
    strict: bool = True,
) -> Matrices:
    """Find out which parameters are matrices, and along which axes.

    Embeddings, output heads, routers, biases, norms and other vectors get the label
    "adamw", stacked by scanned layers or not; so do depthwise convolutions, matrices
    with a single row or column, and whatever is empty or not real floating point. Every
    other parameter gets "muon", such as the kernels of Dense, DenseGeneral, Conv and
    Einsum and the factors of LoRA. `print` shows the result.

    Args:
      params: the whole model, or the shapes of its parameters, in any Flax form: linen
        dict, FrozenDict, boxed, nnx.State; or another pytree of arrays. Boxes, sharding
        metadata and haliax arrays that carry logical axis names are read by them.
      rules: what you know better. Path pattern to a label, or to
        `optax.contrib.MuonDimensionNumbers`, such as {"stem": "adamw"}; the first
        pattern that matches wins, and the whole path of a parameter means that one
        alone. Numbers that name a parameter make it a matrix; those of a module say how
        its matrices are read. Or a tree of labels or of dimension
        numbers (a prefix will do), as `optax.contrib.muon` takes one. None means AdamW.
      names: logical axis names by path, for a tree that does not carry them. A name or
        None for every axis.
      table: what axis names of your own mean, such as {"d_model": "stream"}; those of
        Flax, MaxText and haliax are known. The kinds are in `reading/names.py`.
      out_in: True if kernels are (out, in), as in PyTorch and equinox, False if they
        are (in, out), or a function of the path; None looks at biases and neighbours.
      splits: path pattern to `Split`, for parameters that hold several matrices side by
        side, such as a fused QKV kernel. Rules are about whole parameters, joins about
        the parts.
      joins: path pattern to K: K matrices of consecutive layers are orthogonalized as
        one. `{i}` in a pattern stands for the number of a layer, as in
        {"blocks/{i}/attn/q": 2}; a pattern without it joins along the scanned axis. An
        integer K joins queries, keys and values (separately) across K consecutive
        layers.
      strict: False warns about ambiguous parameters and gives them the label "adamw".

    Returns:
      A `Matrices`. It depends on paths, shapes, dtypes and axis names alone.

    Raises:
      ValueError: one error that lists every ambiguous parameter with its possible
        readings and the rule that chooses one; with the path, for rules and names at
        paths that no parameter has, dimension numbers that do not fit, and axis names
        that are in no table.

    Examples:
      >>> import jax_muon as jm
      >>> params = {"wte": jnp.zeros((9, 4)), "up": {"kernel": jnp.zeros((4, 8))}}
      >>> print(jm.read(params))
      parameter   shape   role        as matrices   label   why
      up/kernel   4 x 8   kernel      1 x (4, 8)    muon    a matrix (in, out)
      wte         9 x 4   embedding   -             adamw   an embedding, by its name
      >>> jm.read(params, rules={"up": "frozen"})["up/kernel"].label
      'frozen'
    """
    checks.check_arrays("params", params)
    axis_names.check_names(names)
    check_joins(joins)
    checks.check_flag("strict", strict)
    leaves = _leaves(params, names)
    reads = read_leaves(
        leaves, out_in=out_in, table=table, strict_names=names is not None
    )
    override_of = overrides.lookup(rules, [leaf.path for leaf in leaves])
    found = {
        leaf.path: _parameter(leaf, read, override_of(leaf.path))
        for leaf, read in zip(leaves, reads, strict=True)
    }
    overrides.check_used(rules, {path: x.label for path, x in found.items()})
    ambiguous = [x for x in found.values() if x.label == MUON and x.doubt is not None]
    if ambiguous and strict:
        listed = "\n  ".join(str(x.doubt) for x in ambiguous)
        raise ValueError(
            f"{len(ambiguous)} of {len(found)} parameters cannot be read as matrices:"
            f"\n  {listed}"
        )
    for one in ambiguous:
        warnings.warn(f"{one.doubt}; it gets the label {ADAMW!r}", stacklevel=2)
        found[one.path] = dataclasses.replace(one, label=ADAMW)
    if splits:
        Parts.of(params, splits)  # raises for patterns and widths that do not fit
    return Matrices(found, dict(splits or {}), joins)


def _leaves(params: Any, names: axis_names.ByPath | None) -> list[Leaf]:
    """Every parameter with its axis names."""
    carried, given = axis_names.names_of(params), dict(names or {})
    flat = paths.leaves_with_paths(params)
    paths.check_known("names", given, [path for path, _ in flat])
    for path, own in carried.items():
        if tuple(given.get(path, own)) != own:
            raise ValueError(
                f"parameter {path!r} carries the axis names {own}, and names= has "
                f"{tuple(given[path])}; expected the same"
            )
    if len({path for path, _ in flat}) < len(flat):
        every = [path for path, _ in flat]
        twice = next(path for path in every if every.count(path) > 1)
        raise ValueError(
            f"two parameters have the path {twice!r}; expected different paths, since "
            "labels and rules go by them"
        )
    both = {**carried, **given}
    return [
        Leaf(path, tuple(x.shape), jnp.result_type(x), both.get(path))
        for path, x in flat
    ]


def _parameter(leaf: Leaf, read: Read, given: Override) -> Parameter:
    """One parameter, by what the user says of it, else as it was read."""
    label, axes, doubt, reason = given.label, read.axes, read.doubt, read.reason
    if label == ADAMW and given.exact:
        raise ValueError(
            f"rules give parameter {leaf.path!r} of shape {leaf.shape} the label "
            f"{label!r} and the dimension numbers {given.numbers}; expected one of them"
        )
    if label not in (None, read.label):
        reason = "by your rules"
    if label is None:
        label = MUON if given.exact else read.label
    elif axes is not None:
        doubt = None  # such as a single row, which the user says is a matrix
    if axes is None and doubt is None:
        doubt = not_a_matrix(leaf.path, leaf.shape, leaf.dtype)
    if given.numbers is not None and label != ADAMW:
        axes = leaf_axes(leaf.path, leaf.shape, leaf.dtype, given.numbers)
        reason, doubt = "dimension numbers", None
    return Parameter(
        leaf.path,
        leaf.shape,
        leaf.dtype,
        label,
        read.role,
        reason,
        axes,
        doubt,
        leaf.names,
    )
