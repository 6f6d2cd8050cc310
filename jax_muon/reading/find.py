"""Read a whole tree of parameters: which are matrices, along which axes, and why.

The user's rules (`rules`) count before the function's uses (`read.py`). What
neither decides becomes one error. Splits and joins are resolved last.
"""

import dataclasses
import functools
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import PyTree

from jax_muon.base import checks, trees
from jax_muon.matrices.joins import Joins, with_joins
from jax_muon.matrices.matrices import (
    ADAMW,
    MUON,
    Matrices,
    Parameter,
    list_doubts,
    not_a_matrix,
)
from jax_muon.matrices.rules import BY_RULES, ONE_ROW, Rules, apply_rules
from jax_muon.matrices.splits import Splits
from jax_muon.reading.heads import heads_apart


def find_matrices(
    params: PyTree,
    function: Callable[..., PyTree] | None = None,
    *args: PyTree,
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
    routers and parameters that are used elementwise get AdamW; see the table of
    docs/parameters.md. The function is traced with shapes; nothing is computed.

    Without a function the rules alone decide, such as {"embed": "adamw", "head":
    "adamw", "*": "muon"}. The label "muon" means a matrix (in, out), as in `x @ w`; a
    parameter of more than two axes needs `MuonDimensionNumbers`. Without a rule, only
    vectors and parameters called bias or scale get the label "adamw".

    Args:
      params: the whole model, or the shapes of its parameters: a pytree of arrays in
        any Flax form; or an NNX or Equinox module, whose other arrays are left out.
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
      heads: "apart" makes each attention head of a query, key or value a separate
        matrix, also in fused kernels and in the up-projections of latents. The loss
        shows the heads. Output projections stay whole, and so do parameters that a
        pattern of `splits` matches.
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
    splits = dict(splits or {})
    scalar = getattr(params, "shape", None) == ()
    if params is None or (scalar and jnp.issubdtype(params.dtype, jnp.integer)):
        expected = "the parameters, or their shapes"
        checks.refuse("params", params, expected + checks.injected(params, "matrices"))
    shapes = _shapes(checks.as_arrays("params", checks.trained(params)))

    def read(like_data: Collection[str] = ()) -> dict[str, Parameter]:
        if function is None:
            found = [_unread(path, x) for path, x in shapes.items()]
        else:
            found = _by_function(params, function, args, splits, like_data)
        return apply_rules(rules, [x for x in found if x.path in shapes])

    ruled = read()
    known = {x.path: x for x in ruled.values() if x.doubt and x.label == ADAMW}
    if known:  # like data, which decides about others
        ruled = read(known)
        for path, x in known.items():  # data has no scans
            now = ruled[path]
            ruled[path] = dataclasses.replace(now, scanned=x.scanned, scan=x.scan)
    if unused := [x.path for x in ruled.values() if _is_unused_matrix(x)]:
        warnings.warn(
            f"the result of the function depends on none of {', '.join(unused)}, which "
            f"get the label {ADAMW!r}; use the loss that trains them, or a rule "
            "for them in rules=",
            stacklevel=2,
        )
    doubtful = [x for x in ruled.values() if x.label == MUON and x.doubt is not None]
    if doubtful:
        text = list_doubts(doubtful, [*ruled.values()])
        if strict:
            if function is not None:
                text += _deciding(doubtful, lambda paths: read([*known, *paths]))
            raise ValueError(text)
        warnings.warn(f"{text}\nThey get the label {ADAMW!r}", stacklevel=2)
        ruled |= {x.path: dataclasses.replace(x, label=ADAMW) for x in doubtful}
    checks.check_choice("heads", heads, ("joined", "apart"))
    if heads == "apart":
        if joins is not None:
            checks.refuse("joins", joins, "None with heads='apart'")
        ruled, head_splits = heads_apart(ruled, splits)
        splits |= head_splits
    return with_joins(Matrices(ruled, splits), joins)


def _by_function(
    params: PyTree,
    function: Callable[..., PyTree],
    args: tuple[PyTree, ...],
    splits: Collection[str],
    like_data: Collection[str] = (),
) -> list[Parameter]:
    """How a function uses each array of a model, also those that are not trained.

    Functions among `args`, such as the apply of `loss(params, apply, batch)`, are
    closed over: the traced function takes (params, batch).
    """
    from jax_muon.reading.read import read_uses

    if not callable(function):
        expected = "a function, as in jax_muon.find_matrices(params, loss_fn, batch)"
        checks.refuse("function", function, expected)
    merge, nnx = None, sys.modules.get("flax.nnx")
    if nnx and isinstance(params, nnx.Module):
        # After self.b = self.a, a module has two leaves for one variable; a state one.
        graph, params = nnx.split(params)
        merge = functools.partial(nnx.merge, graph)
    elif checks.trained(params) is params:  # Equinox's have leaves of other types
        params = checks.as_arrays("params", params)
    leaves, treedef = jax.tree.flatten(args)
    checks.check_no_text("args", args)
    arrays = [x for x in leaves if not callable(x)]

    @functools.wraps(function)  # errors name it
    def on_arrays(params: PyTree, *arrays: ArrayLike) -> PyTree:
        rest = iter(arrays)
        filled = [x if callable(x) else next(rest) for x in leaves]
        model = merge(params) if merge else params
        return function(model, *jax.tree.unflatten(treedef, filled))

    keywords = {"splits": splits, "like_data": like_data}
    return read_uses(on_arrays, params, *arrays, **keywords)


def _deciding(
    doubtful: Sequence[Parameter],
    read: Callable[[list[str]], dict[str, Parameter]],
) -> str:
    """Which rule "adamw" decides most, as of queries and the kernels they meet.

    Of those with one doubt: each kind of them is one more reading.
    """
    kinds: dict[str, list[Parameter]] = {}
    for x in doubtful:
        kinds.setdefault(trees.numberless(x.path), []).append(x)
    doubts = Counter(kind[0].doubt for kind in kinds.values())
    decided: dict[str, set[str]] = {}
    for kind in [x for x in kinds.values() if doubts[x[0].doubt] > 1]:
        paths = [x.path for x in kind]
        left = read(paths)
        known = {x.path for x in doubtful if not left[x.path].doubt}
        decided[paths[0]] = known - {*paths}
    best = max(decided, key=lambda path: len(decided[path]), default="")
    if not decided.get(best):
        return ""
    others = ", ".join(map(repr, sorted(decided[best])))
    return f"\nIf {{{best!r}: {ADAMW!r}}} is right, it decides {others} as well."


def _is_unused_matrix(x: Parameter) -> bool:
    """True for (64, 32) that the result does not depend on; False for (1, 32)."""
    could_be = not not_a_matrix(x.shape, x.dtype) and sum(n > 1 for n in x.shape) > 1
    return could_be and x.role == "unused" and x.reason != BY_RULES


def _unread(path: str, leaf: jax.ShapeDtypeStruct) -> Parameter:
    """A parameter that no function uses: only a rule can make a matrix of it.

    norm/scale (64, 8) is a vector by its name; (64,), and (64, 8) in int32, cannot be
    matrices; cls (1, 8) is one row; up (64, 8) is in doubt until a rule names it.
    """
    is_vector = trees.slashed(path).rpartition("/")[2] in ("bias", "scale")
    if is_vector or not_a_matrix(leaf.shape, leaf.dtype):
        label, role, reason, doubt = ADAMW, "vector", "a vector", None
    elif len(leaf.shape) == 2 and 1 in leaf.shape:
        label, role, reason, doubt = ADAMW, "vector", ONE_ROW, None
    else:
        label, role, reason, doubt = MUON, "-", "", "nothing says how it is used"
    return Parameter(path, leaf.shape, leaf.dtype, label, role, reason, None, doubt)


def _shapes(params: PyTree) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape and dtype of every parameter by path; a ValueError if two have one path.

    {"a/b": x, "a": {"b": y}} has a/b twice.
    """
    flat = trees.leaves_with_paths(params)
    leaves = dict(flat)
    if len(leaves) < len(flat):
        twice = next(path for path, x in flat if leaves[path] is not x)
        raise ValueError(
            f"two parameters have the path {twice!r}; use different paths, since "
            "labels and rules go by them"
        )
    return {
        path: jax.ShapeDtypeStruct(tuple(x.shape), jnp.result_type(x))
        for path, x in flat
    }
