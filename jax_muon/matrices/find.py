"""Read a whole tree of parameters: which are matrices, along which axes, and why.

What the user's rules say counts first (`rules`), then how a function uses the
parameters (`computation/`). What neither decides is one error. Splits and joins are
resolved last.
"""

import dataclasses
import sys
import warnings
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp

from jax_muon.base import checks, trees
from jax_muon.matrices.heads import heads_apart
from jax_muon.matrices.joins import Joins, with_joins
from jax_muon.matrices.matrices import (
    ADAMW,
    MUON,
    Matrices,
    Parameter,
    list_doubts,
    not_a_matrix,
    read_by,
)
from jax_muon.matrices.rules import BY_RULES, Rules, apply_rules
from jax_muon.matrices.splits import Splits

# How parameters are read: a `Matrices`; rules, as for `find_matrices`, or a tree of
# labels or dimension numbers; or a function of the tree that returns one of these.
Reader: TypeAlias = Any


def find_matrices(
    params: Any,
    function: Callable[..., Any] | None = None,
    *args: Any,
    rules: Rules = None,
    splits: Splits | None = None,
    joins: Joins | None = None,
    heads: Literal["joined", "apart"] = "joined",
    strict: bool = True,
) -> Matrices:
    """Find out which parameters are matrices, and along which axes.

    With a function, such as the loss, its computation decides. A parameter that it
    contracts with data is a matrix: contracted axes are in; axes of scans, `vmap`,
    experts and batched products are the batch; all others are out. Embeddings, heads,
    routers and what is used elementwise get AdamW, as the table of docs/parameters.md
    says. The function is traced with shapes; nothing is computed.

    Without a function the rules alone decide, such as {"embed": "adamw", "head":
    "adamw", "*": "muon"}. The label "muon" means a matrix (in, out), as in `x @ w`; a
    parameter of more than two axes needs `MuonDimensionNumbers`. Only what cannot be a
    matrix, and what is called bias or scale, gets the label "adamw" without a rule.

    Args:
      params: the whole model, or the shapes of its parameters: a pytree of arrays in
        any Flax form; an NNX or Equinox module, of which only what is trained counts.
      function: the loss, or a model's `apply`: a function of the parameters and `args`.
      *args: its other arguments, arrays or their shapes; close over all others.
        Parameters that are not trained, such as the base of LoRA, may be among them;
        close over one to which a parameter is added. Functions may be among them, too,
        such as a model's `apply`.
      rules: what you know better. Path pattern to a label, or to
        `optax.contrib.MuonDimensionNumbers`, such as {"stem": "adamw"}; the first
        pattern that matches wins, and the whole path of a parameter means that one
        alone. A pattern with the label "muon" passes over vectors. Dimension numbers
        make a parameter that they name a matrix; for a module they only say how its
        matrices are read. Or a tree of these, as for `optax.contrib.muon`, or a prefix
        of one, in which None means AdamW.
      splits: path pattern to `Split`, for parameters that hold several matrices, such
        as a fused QKV kernel. Rules are about whole parameters, joins about the parts.
      joins: path pattern to K >= 2: K matrices of consecutive layers are
        orthogonalized as one. `{i}` in a pattern is the number of a layer, as in
        {"blocks/{i}/attn/q": 2}; a pattern without it joins along the scanned axis. Of
        two joins of one matrix the first counts. An integer K joins queries, keys and
        values (separately) across K consecutive layers of one shape.
      heads: "apart" makes each attention head of a query, key or value, also of a fused
        kernel and of the up-projections of latents, a matrix of its own. The loss shows
        the heads. Output projections stay whole, and so do parameters that a pattern of
        `splits` matches.
      strict: False warns once about ambiguous parameters and gives them the label
        "adamw".

    Returns:
      A `Matrices`. Its reasons name the use and the line of your code.

    Raises:
      ValueError: one error with a line for each kind of parameters that neither the
        function nor a rule decides, and the rules that do; a function whose result
        depends on no parameter; with the path, rules at paths that no parameter has,
        and dimension numbers that do not fit; joins that join nothing; with "apart",
        queries without heads, or `joins`.

    Examples:
      >>> def loss(params, tokens):
      ...     x = params["wte"][tokens]
      ...     return jnp.mean((x @ params["up"]) @ params["out"])
      >>> sizes = {"wte": (9, 4), "up": (4, 8), "out": (8, 3)}
      >>> params = {name: jnp.zeros(shape) for name, shape in sizes.items()}
      >>> matrices = jm.find_matrices(params, loss, jnp.arange(2))
      >>> [matrices[name].role for name in sizes]
      ['embedding', 'kernel', 'head']
      >>> rules = {"wte": "adamw", "out": "adamw", "*": "muon"}
      >>> by_rules = jm.find_matrices(params, rules=rules)
      >>> by_rules.labels(params) == matrices.labels(params)
      True
    """
    scalar = getattr(params, "shape", None) == ()
    if params is None or (scalar and jnp.issubdtype(params.dtype, jnp.integer)):
        expected = "the parameters, or their shapes"
        checks.refuse("params", params, expected + checks.injected(params, "matrices"))
    tree = trained(params)
    shapes = _shapes(checks.as_arrays("params", tree))
    if function is None:
        readings = [_unread(path, x) for path, x in shapes.items()]
    else:
        from jax_muon.matrices.computation.read import read_uses

        if not callable(function):
            expected = (
                "a function, as in jax_muon.find_matrices(params, loss_fn, batch)"
            )
            checks.refuse("function", function, expected)
        whole = params if tree is not params else checks.as_arrays("params", params)
        function, whole = _of_variables(function, whole)
        function, arrays = _of_arrays(function, args)
        readings = read_uses(function, whole, *arrays, splits=splits or ())
        readings = [x for x in readings if x.path in shapes]
    ruled = apply_rules(rules, readings)
    if unused := [x.path for x in ruled.values() if _is_unused_matrix(x)]:
        warnings.warn(
            f"the result of the function depends on none of {', '.join(unused)}, which "
            f"get the label {ADAMW!r}; expected the loss that trains them, or a rule "
            "for them in rules=",
            stacklevel=2,
        )
    doubtful = [x for x in ruled.values() if x.label == MUON and x.doubt is not None]
    if doubtful:
        text = list_doubts(doubtful, [*ruled.values()])
        if strict:
            raise ValueError(text)
        warnings.warn(f"{text}\nThey get the label {ADAMW!r}", stacklevel=2)
        ruled |= {x.path: dataclasses.replace(x, label=ADAMW) for x in doubtful}
    splits = dict(splits or {})
    checks.check_choice("heads", heads, ("joined", "apart"))
    if heads == "apart":
        if joins is not None:
            checks.refuse("joins", joins, "None with heads='apart'")
        ruled, of_heads = heads_apart(ruled, splits)
        splits |= of_heads
    return with_joins(Matrices(ruled, splits), joins)


def reader(matrices: Reader) -> Callable[[Any], Matrices]:
    """The function that reads a tree; `matrices` as in `partition`."""
    expected = (
        "jax_muon.find_matrices(params, loss_fn, batch); rules, such as "
        "{'embed': 'adamw', '*': 'muon'}, or a tree of labels; or a function of params "
        "alone that returns one of these" + checks.injected(matrices, "matrices")
    )
    by_function = trees.is_function(matrices)
    if not by_function:
        _check_reading("matrices", matrices, expected)

    def read_tree(tree: Any) -> Matrices:
        found = matrices
        if by_function:
            found = read_by(matrices, tree)
            _check_reading("matrices(params)", found, expected)
        if isinstance(found, Matrices):
            return found
        return find_matrices(tree, rules=found)

    return read_tree


def _check_reading(name: str, found: Any, expected: str) -> None:
    """It must be a `Matrices`, or rules in a container."""
    if found is None or jax.tree_util.all_leaves([found]):
        checks.check_kind(name, found, Matrices, expected)


def trained(model: Any) -> Any:
    """The parameters of a model: `nnx.Param`s of an NNX module, floats of Equinox's."""
    # A framework that is not imported made no module.
    nnx, equinox = (sys.modules.get(name) for name in ("flax.nnx", "equinox"))
    if nnx and isinstance(model, nnx.Module):
        return nnx.state(model, nnx.Param)
    if equinox and isinstance(model, equinox.Module):
        return jax.tree.map(lambda x: x if _is_inexact(x) else None, model)
    return model


def _of_variables(
    function: Callable[..., Any], model: Any
) -> tuple[Callable[..., Any], Any]:
    """The same of an NNX module's state, in which each variable has one leaf.

    In a module, a variable has a leaf for each of its names: self.b = self.a.
    """
    nnx = sys.modules.get("flax.nnx")
    if nnx is None or not isinstance(model, nnx.Module):
        return function, model
    graph, state = nnx.split(model)
    return lambda state, *args: function(nnx.merge(graph, state), *args), state


def _of_arrays(
    function: Callable[..., Any], args: tuple[Any, ...]
) -> tuple[Callable[..., Any], list[Any]]:
    """The same of the leaves of its arguments that are no functions."""
    leaves, tree = jax.tree.flatten(args)
    arrays = [x for x in leaves if not callable(x)]

    def of_arrays(params: Any, *arrays: Any) -> Any:
        of_order = iter(arrays)
        all_leaves = [x if callable(x) else next(of_order) for x in leaves]
        return function(params, *jax.tree.unflatten(tree, all_leaves))

    return of_arrays, arrays


def _is_unused_matrix(x: Parameter) -> bool:
    could_be = not not_a_matrix(x.shape, x.dtype) and sum(n > 1 for n in x.shape) > 1
    return could_be and x.role == "unused" and x.reason != BY_RULES


def _is_inexact(x: Any) -> bool:
    return hasattr(x, "shape") and jnp.issubdtype(x.dtype, jnp.inexact)


def _unread(path: str, leaf: jax.ShapeDtypeStruct) -> Parameter:
    """A vector, or a parameter that only a rule can make a matrix."""
    is_vector = trees.slashed(path).rpartition("/")[2] in ("bias", "scale")
    if is_vector or not_a_matrix(leaf.shape, leaf.dtype):
        label, role, reason, doubt = ADAMW, "vector", "a vector", None
    else:
        label, role, reason, doubt = MUON, "-", "", "nothing says how it is used"
    return Parameter(path, leaf.shape, leaf.dtype, label, role, reason, None, doubt)


def _shapes(params: Any) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape and dtype of every parameter by path; a ValueError if two have one path."""
    flat = trees.leaves_with_paths(params)
    leaves = dict(flat)
    if len(leaves) < len(flat):
        twice = next(path for path, x in flat if leaves[path] is not x)
        raise ValueError(
            f"two parameters have the path {twice!r}; expected different paths, since "
            "labels and rules go by them"
        )
    return {
        path: jax.ShapeDtypeStruct(tuple(x.shape), jnp.result_type(x))
        for path, x in flat
    }
