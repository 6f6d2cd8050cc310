"""Read a whole tree of parameters: which are matrices, along which axes, and why.

What the user's rules say counts first (`overrides`), then how a function uses the
parameters (`computation/`), then their names (`names/`): for what the function does not
decide, or for all of them without a function. What none can decide is one error.
Splits and joins are resolved last.
"""

import dataclasses
import warnings
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jax_muon import checks, doubts, paths
from jax_muon.axes import ADAMW, MUON, Parameter
from jax_muon.matrices import Matrices
from jax_muon.reading import joins as joining
from jax_muon.reading import overrides
from jax_muon.reading.parts import read_parts
from jax_muon.splits import Splits


def read(
    params: Any,
    function: Callable[..., Any] | None = None,
    *args: Any,
    rules: overrides.Rules = None,
    out_in: bool | None = None,
    splits: Splits | None = None,
    joins: joining.Joins | None = None,
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

    Without a function, paths and shapes suggest a reading, which can be wrong.

    Embeddings, heads, routers, vectors, single rows and columns, convolutions in
    groups, products of complex numbers, what the function does not use, and whatever is
    empty or not real floating point get the label "adamw", every other parameter
    "muon". Where use alone does not tell, this is the convention: kernels of patch
    embeddings, the first layers of networks, projections into a common space, as
    CLIP's, and factors of LoRA are matrices; learned queries, latents, prefixes and
    tables of relative positions are not.

    Args:
      params: the whole model, or the shapes of its parameters, in any Flax form: linen
        dict, FrozenDict, boxed, nnx.State; or another pytree of arrays.
      function: a function of the parameters, and of `args`, whose result depends on
        them: the loss, or a model's `apply`. None: names and shapes decide.
      *args: its other arguments, arrays or their shapes. Parameters that are not
        trained, such as the base of LoRA, may be among them, or closed over; if a
        parameter is added to one, close over it. Two uint32 count as a random key.
      rules: what you know better. Path pattern to a label, or to
        `optax.contrib.MuonDimensionNumbers`, such as {"stem": "adamw"}; the first
        pattern that matches wins, and the whole path of a parameter means that one
        alone. Dimension numbers given for a parameter's path make it a matrix; for a
        module's path they only say how its matrices are read. Or a tree of labels or of
        dimension numbers (a prefix will do), as `optax.contrib.muon` takes one. None
        means AdamW.
      out_in: without a function: True if kernels are (out, in), as in PyTorch and
        equinox, False if they are (in, out); None looks at biases and neighbours.
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
      ValueError: one error with a line for each kind of parameters that the function
        does not decide and names do not either, its likeliest readings and the rules
        that choose them; a function whose result depends on no parameter; with the
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
      >>> print(str(jm.read(params)).splitlines()[-1])
      Names can be wrong; jax_muon.read(params, loss_fn, batch) is sure.
    """
    checks.arrays("params", params)
    joining.check(joins)
    checks.flag("strict", strict)
    if out_in is not None:
        checks.flag("out_in", out_in)
    shapes = _shapes(params)
    if function is None:
        readings = _by_names(shapes, out_in)
    else:
        if out_in is not None:
            checks.refuse("out_in", out_in, "None: the function decides")
        readings = _by_computation(function, params, args, shapes, splits or ())
    ruled = overrides.apply(rules, readings)
    ambiguous = [x for x in ruled.values() if x.label == MUON and x.doubt is not None]
    if ambiguous:
        by_names = function is None and any(x.options for x in ambiguous)
        text = (
            f"{len(ambiguous)} of {len(ruled)} parameters cannot be read as matrices"
            + by_names * " by names; expected jax_muon.read(params, loss_fn, batch), or"
            + f":\n  {doubts.listed(ambiguous, list(ruled))}"
        )
        if strict:
            raise ValueError(text)
        warnings.warn(f"{text}\nThey get the label {ADAMW!r}", stacklevel=2)
        ruled |= {x.path: dataclasses.replace(x, label=ADAMW) for x in ambiguous}
    matrices = Matrices(ruled, dict(splits or {}), by_names=function is None)
    return with_joins(matrices, joins)


def with_joins(matrices: Matrices, joins: joining.Joins | None) -> Matrices:
    """The same parameters with other joins; `joins` as in `read`."""
    parts = read_parts(matrices, matrices.splits) if matrices.splits else matrices
    can_join = {
        path: parameter
        for path, parameter in parts.items()
        if parameter.axes is not None and parameter.label != ADAMW
    }
    resolved = None if joins is None else joining.find_joins(joins, can_join)
    return dataclasses.replace(matrices, joins=resolved)


def _by_computation(
    function: Callable[..., Any],
    params: Any,
    args: tuple[Any, ...],
    shapes: Mapping[str, jax.ShapeDtypeStruct],
    splits: Collection[str],
) -> list[Parameter]:
    """Parameters as a function uses them, or else by names, where those decide."""
    from jax_muon.reading.computation.read import read_uses

    readings = read_uses(function, params, *args, splits=splits)
    if not any(x.role == "unknown" for x in readings):
        return readings
    from jax_muon.reading.names.read import is_certain

    return [
        dataclasses.replace(by_name, reason=f"{by_use.reason}; so {by_name.reason}")
        if by_use.role == "unknown" and is_certain(by_name)
        else by_use
        for by_use, by_name in zip(readings, _by_names(shapes, None), strict=True)
    ]


def _by_names(
    shapes: Mapping[str, jax.ShapeDtypeStruct], out_in: bool | None
) -> list[Parameter]:
    """Parameters as their paths and shapes suggest."""
    # Only here: nothing else needs these modules.
    from jax_muon.reading.names.read import read_leaves
    from jax_muon.reading.names.tree import Leaf

    leaves = [Leaf(path, x.shape, x.dtype) for path, x in shapes.items()]
    return read_leaves(leaves, out_in)


def _shapes(params: Any) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape and dtype of every parameter by path.

    Raises:
      ValueError: two parameters with one path.
    """
    flat = paths.leaves_with_paths(params)
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
