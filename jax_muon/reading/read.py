"""Read a whole tree of parameters: which are matrices, along which axes, and why.

What the user's rules say counts first (`overrides`), then how a function uses the
parameters (`computation/`). What neither decides is one error. Splits and joins are
resolved last.
"""

import dataclasses
import inspect
import sys
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jax_muon import checks, trees
from jax_muon.joins import Joins, check_joins, with_joins
from jax_muon.matrices import (
    ADAMW,
    MUON,
    Matrices,
    Parameter,
    list_doubts,
    not_a_matrix,
)
from jax_muon.reading import overrides
from jax_muon.splits import Splits


def read(
    params: Any,
    function: Callable[..., Any] | None = None,
    *args: Any,
    rules: overrides.Rules = None,
    splits: Splits | None = None,
    joins: Joins | None = None,
    strict: bool = True,
) -> Matrices:
    """Find out which parameters are matrices, and along which axes.

    With a function, such as the loss, its computation decides. A parameter that it
    contracts with data is a matrix: contracted axes are in; axes of scans, `vmap`,
    experts and batched products are the batch; all others are out. A parameter whose
    rows integers pick is an embedding. A kernel with no other product after it is the
    head. One whose outputs go to a top-k, or whose path has the word router, is a
    router. Elementwise use makes a norm, a bias or a position. The function is traced
    with shapes; nothing is computed, and no state changes.

    Without a function nothing is guessed: the rules say which parameters are matrices,
    such as {"embed": "adamw", "head": "adamw", "*": "muon"}. The label "muon" means a
    matrix (in, out), as in `x @ w`; a parameter of more than two axes needs
    `MuonDimensionNumbers`. Only what cannot be a matrix, and what is called bias or
    scale, gets the label "adamw" without a rule.

    Embeddings, heads, routers, vectors, single rows and columns, convolutions in
    groups, products of complex numbers, what the function does not use, and whatever is
    empty or not real floating point get the label "adamw", every other parameter
    "muon". Where use alone does not tell, this is the convention: kernels of patch
    embeddings, the first layers of networks and factors of LoRA are matrices; last
    products, such as CLIP's projections into a common space, learned queries, latents,
    prefixes and tables of relative positions are not.

    Args:
      params: the whole model, or the shapes of its parameters, in any Flax form: linen
        dict, FrozenDict, boxed, nnx.State; an NNX or Equinox module, of which what no
        loss trains is not listed; or another pytree of arrays.
      function: a function of the parameters, and of `args`, whose result depends on
        them: the loss, or a model's `apply`. None: the rules alone decide.
      *args: its other arguments, arrays or their shapes. Parameters that are not
        trained, such as the base of LoRA, may be among them, or closed over; if a
        parameter is added to one, close over it. Two uint32 count as a random key.
      rules: what you know better. Path pattern to a label, or to
        `optax.contrib.MuonDimensionNumbers`, such as {"stem": "adamw"}; the first
        pattern that matches wins, and the whole path of a parameter means that one
        alone. A pattern with the label "muon" passes over vectors. Dimension numbers
        given for a parameter's path make it a matrix; for a
        module's path they only say how its matrices are read. Or a tree of labels or of
        dimension numbers (a prefix will do), as `optax.contrib.muon` takes one. None
        means AdamW.
      splits: path pattern to `Split`, for parameters that hold several matrices side by
        side, such as a fused QKV kernel. Rules are about whole parameters, joins about
        the parts.
      joins: path pattern to K: K matrices of consecutive layers are orthogonalized as
        one. `{i}` in a pattern is the number of a layer, as in
        {"blocks/{i}/attn/q": 2}; a pattern without it joins along the scanned axis. Of
        two joins of one matrix the first counts. An integer K joins queries, keys and
        values (separately) across K consecutive layers of one shape.
      strict: False warns once about ambiguous parameters and gives them the label
        "adamw".

    Returns:
      A `Matrices`. Its reasons name the use and the line of your code.

    Raises:
      ValueError: one error with a line for each kind of parameters that neither the
        function nor a rule decides, and the rules that do; a function whose result
        depends on no parameter; arguments that are not its own, or no arrays; with the
        path, rules at paths that no parameter has, and dimension numbers that do not
        fit. What the function itself raises is passed on.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jax_muon as jm
      >>> def loss(params, tokens):
      ...     x = params["wte"][tokens]
      ...     return jnp.mean((x @ params["up"]) @ params["out"])
      >>> sizes = {"wte": (9, 4), "up": (4, 8), "out": (8, 3)}
      >>> params = {name: jnp.zeros(shape) for name, shape in sizes.items()}
      >>> matrices = jm.read(params, loss, jnp.arange(2))
      >>> [matrices[name].role for name in sizes]
      ['embedding', 'kernel', 'head']
      >>> rules = {"wte": "adamw", "out": "adamw", "*": "muon"}
      >>> jm.read(params, rules=rules).labels(params) == matrices.labels(params)
      True
    """
    if params is None:
        checks.refuse("params", params, "the parameters, or their shapes")
    tree = trained(params)
    shapes = _shapes(checks.arrays("params", tree))
    check_joins(joins)
    checks.flag("strict", strict)
    if function is None:
        readings = [_unread(path, x) for path, x in shapes.items()]
    else:
        from jax_muon.reading.computation.read import read_uses

        _check_call(function, params, args)
        whole = params if tree is not params else checks.arrays("params", params)
        readings = read_uses(function, whole, *args, splits=splits or ())
        readings = [x for x in readings if x.path in shapes]
    ruled = overrides.apply(rules, readings)
    doubtful = [x for x in ruled.values() if x.label == MUON and x.doubt is not None]
    if doubtful:
        text = list_doubts(doubtful, [*ruled.values()])
        if strict:
            raise ValueError(text)
        warnings.warn(f"{text}\nThey get the label {ADAMW!r}", stacklevel=2)
        ruled |= {x.path: dataclasses.replace(x, label=ADAMW) for x in doubtful}
    return with_joins(Matrices(ruled, dict(splits or {})), joins)


def trained(model: Any) -> Any:
    """The parameters of a model: of an NNX module, `nnx.Param`s; of Equinox's, floats.

    Frameworks that are not imported made no module. Other trees stay as they are.
    """
    nnx, equinox = (sys.modules.get(name) for name in ("flax.nnx", "equinox"))
    if nnx and isinstance(model, nnx.Module):
        return nnx.state(model, nnx.Param)
    if equinox and isinstance(model, equinox.Module):
        return jax.tree.map(lambda x: x if _is_inexact(x) else None, model)
    return model


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


def _check_call(function: Any, params: Any, args: tuple[Any, ...]) -> None:
    """Raise a ValueError unless a function can be called with these arguments."""
    expected = "jax_muon.read(params, loss_fn, batch)"
    if not callable(function):
        checks.refuse("function", function, f"a function, as in {expected}")
    try:
        inspect.signature(function).bind(params, *args)
    except TypeError as error:
        raise ValueError(
            f"function={function} cannot be called with the parameters and {len(args)} "
            f"more arguments: {error}; expected all of its arguments, as in {expected}"
        ) from error
    except ValueError:  # built-in functions have no signature
        pass
    leaves = trees.leaves_with_paths(args)
    if not _are_arrays([leaf for _, leaf in leaves]):
        path, leaf = next(x for x in leaves if not _are_arrays([x[1]]))
        checks.refuse(
            f"args at {path!r}",
            leaf,
            "arrays or their shapes; close over anything else, as in "
            "jax_muon.read(params, lambda params, batch: loss_fn(params, batch, "
            "'train'), batch)",
        )


def _are_arrays(leaves: list[Any]) -> bool:
    """True if JAX can trace a function of these."""
    try:
        jax.eval_shape(lambda x: None, leaves)
    except TypeError:
        return False
    return True


def _shapes(params: Any) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape and dtype of every parameter by path.

    Raises:
      ValueError: two parameters with one path.
    """
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
