"""The optax pieces of the Muon family, each one idea, made to be chained.

Leaves are parameters as Flax holds them; `reading/` says which axes are in and out.
Every piece keeps the dtype of the updates, and every rate takes a float, an array or
an optax schedule. All but `orthogonalize` are elementwise or small reductions, so that
they work however parameters are sharded.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Float

from jax_muon.checks import check_choice, check_count, check_positive
from jax_muon.mesh import owners
from jax_muon.mesh.global_view import Specs, find_view
from jax_muon.polar.factors import gram_exchanges, polar_express
from jax_muon.polar.iteration import power_of_two_scaled
from jax_muon.polar.products import wide
from jax_muon.polar.stacks import map_stacks
from jax_muon.reading import axes as matrices
from jax_muon.reading import paths
from jax_muon.reading.axes import DimensionNumbers, MatrixAxes
from jax_muon.reading.joins import Block, Factors, Joins, make_blocks, map_blocks

# Factor of the update, by the size (in, out) of the matrix.
SHAPE_RULES: dict[str, Callable[[int, int], float]] = {
    "max_ratio": lambda fan_in, fan_out: max(1.0, fan_out / fan_in) ** 0.5,
    "rms_0.2": lambda fan_in, fan_out: 0.2 * max(fan_in, fan_out) ** 0.5,
    "spectral": lambda fan_in, fan_out: max(fan_in, fan_out) ** 0.5,
    "sqrt_ratio": lambda fan_in, fan_out: (fan_out / fan_in) ** 0.5,
    "none": lambda fan_in, fan_out: 1.0,
}


class NesterovState(NamedTuple):
    """State of `nesterov`."""

    count: Array  # type: ignore[assignment]  # shape=(), dtype=int32
    mu: optax.Updates


def nesterov(
    decay: optax.ScalarOrSchedule = 0.95,
    *,
    accumulation: str = "ema",
    lookahead: bool = True,
    accumulator_dtype: jax.typing.DTypeLike | None = None,
) -> optax.GradientTransformation:
    r"""Momentum with Nesterov's look-ahead, and no bias correction.

    With gradient :math:`G`, momentum :math:`M` and decay :math:`\mu`, "ema" is
    :math:`M \leftarrow M + (1 - \mu)(G - M)` and gives :math:`G + \mu (M - G)`;
    "sum" is :math:`M \leftarrow \mu M + G` and gives :math:`G + \mu M`.

    Args:
      decay: momentum in [0, 1), or a schedule of it.
      accumulation: "ema" (nanochat, torch.optim.Muon) or "sum" (SGD).
      lookahead: False gives M itself: plain momentum.
      accumulator_dtype: of M; None for the dtype of the parameters.

    Returns:
      An `optax.GradientTransformation` for arrays of any shape.

    Raises:
      ValueError: decay outside [0, 1), an unknown accumulation.

    References:
      Jordan et al., Muon, https://kellerjordan.github.io/posts/muon/
    """
    _check_decay("decay", decay)
    check_choice("accumulation", accumulation, ("ema", "sum"))

    def init_fn(params: optax.Params) -> NesterovState:
        mu = optax.tree.zeros_like(params, dtype=accumulator_dtype)
        return NesterovState(jnp.zeros([], jnp.int32), mu)

    def update_fn(
        updates: optax.Updates, state: NesterovState, params: Any = None
    ) -> tuple[optax.Updates, NesterovState]:
        del params
        mu_t = _rate(decay, state.count)

        def accumulate(g: Array, m: Array) -> Array:
            wide_g, wide_m = wide(g), wide(m)
            if accumulation == "ema":
                new = wide_m + (1 - mu_t) * (wide_g - wide_m)
            else:
                new = mu_t * wide_m + wide_g
            return new.astype(m.dtype)

        def look_ahead(g: Array, m: Array) -> Array:
            wide_g, wide_m = wide(g), wide(m)
            if not lookahead:
                return m.astype(g.dtype)
            ahead = wide_m - wide_g if accumulation == "ema" else wide_m
            return (wide_g + mu_t * ahead).astype(g.dtype)

        mu = jax.tree.map(accumulate, updates, state.mu)
        updates = jax.tree.map(look_ahead, updates, mu)
        return updates, NesterovState(optax.safe_increment(state.count), mu)

    return optax.GradientTransformation(init_fn, update_fn)


def orthogonalize(
    polar: Callable[[Float[Array, "*b m n"]], Float[Array, "*b m n"]] = polar_express,
    *,
    dimension_numbers: DimensionNumbers = None,
    joins: Joins | None = None,
    mesh: Mesh | None = None,
    specs: Specs = None,
    small: int | None = None,
    travel: str = "auto",
    max_stack: int = 256,
) -> optax.GradientTransformationExtraArgs:
    """Replace every matrix by its polar factor: same directions, singular values one.

    Matrices of one shape, and those of the transposed shape, go into one stack. Under
    jit with parameters that are sharded over a mesh, each matrix is computed on one of
    its devices, to which the others send their pieces; see `mesh/owners.py`.

    Args:
      polar: any function of (..., m, n) that treats matrices independently and commutes
        with transposition: `polar_express`, `newton_schulz`, `svd_polar`, a
        `functools.partial` of one, or your own.
      dimension_numbers: how parameters are read as matrices; see `matrix_axes`.
      joins: path pattern to K: that many matrices, of consecutive layers, are laid side
        by side along `in` and orthogonalized as one (TEON); see `make_blocks`. K alone
        joins queries, keys and values.
      mesh: of sharded parameters; None: that of their types.
      specs: how parameters are sharded, where the mesh has Auto axes and types do not
        tell: a `PartitionSpec` or `NamedSharding` for all, a tree of them, or a
        function of the path.
      small: sharded matrices with fewer elements are gathered and computed by all
        devices that hold them; None for 65536.
      travel: what is sent of sharded matrices. "matrix": their pieces, to owners;
        "gram": where only the longer side is divided, Gram matrices; "auto": what costs
        less by a count of bytes and FLOPs. `polar_express` and `newton_schulz` can
        do with Gram matrices, and a `functools.partial` of these.
      max_stack: most matrices in one call of `polar`, which bounds temporary memory.

    Returns:
      An `optax.GradientTransformation` without state. Its update takes two optional
      extra arguments by path, which `zero2_matrices` gives. `filled`: a scalar boolean
      that says whether a leaf may be anything but zero; the others are not computed.
      `joined`: K for a leaf (batch, K, in, out), in place of `joins`.

    Raises:
      ValueError: at init and update, with path and shape, for a parameter that is no
        floating-point matrix, dimension numbers that do not fit, joins as in
        `make_blocks`, a mesh with Auto axes without specs, specs that do not divide
        parameters evenly; max_stack below 1.

    References:
      Jordan et al., Muon, https://kellerjordan.github.io/posts/muon/; TEON, arXiv
      2601.23261.
    """
    check_count("max_stack", max_stack)
    check_choice("travel", travel, owners.TRAVELS)
    if small is not None:
        check_count("small", small, least=0)

    def read(tree: Any) -> tuple[list[str], list[MatrixAxes]]:
        names = [path for path, _ in paths.leaves_with_paths(tree)]
        return names, matrices.matrix_axes(tree, dimension_numbers)

    def init_fn(params: optax.Params) -> optax.EmptyState:
        names, all_axes = read(params)
        leaves = jax.tree.leaves(params)
        shapes, dtypes = [x.shape for x in leaves], [x.dtype for x in leaves]
        make_blocks(names, shapes, all_axes, joins, dtypes=dtypes)
        return optax.EmptyState()

    def update_fn(
        updates: optax.Updates,
        state: optax.EmptyState,
        params: Any = None,
        *,
        filled: Mapping[str, Array] | None = None,
        joined: Mapping[str, int] | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, optax.EmptyState]:
        del params, extra_args
        names, all_axes = read(updates)

        def factors_of(
            leaves: list[Array], blocks: list[Block], factors: Factors
        ) -> list[Array]:
            views = [axes.view(x) for axes, x in zip(all_axes, leaves, strict=True)]
            return [
                axes.undo(view, x.shape).astype(x.dtype)
                for axes, view, x in zip(
                    all_axes, map_blocks(factors, blocks, views), leaves, strict=True
                )
            ]

        leaves, treedef = jax.tree.flatten(updates)
        shapes, dtypes = [x.shape for x in leaves], [x.dtype for x in leaves]
        blocks = make_blocks(names, shapes, all_axes, joins, dtypes=dtypes)
        if joined:
            blocks = [
                dataclasses.replace(block, joined=joined.get(name, 1))
                for block, name in zip(blocks, names, strict=True)
            ]
        view = find_view(updates, mesh, specs)
        if view is None:
            conditions = [(filled or {}).get(names[b.leaves[0]]) for b in blocks]
            local = functools.partial(_local_factors, polar, conditions, max_stack)
            leaves = factors_of(leaves, blocks, local)
        else:
            placed, blocks, placements = owners.local_blocks(
                view, names, shapes, all_axes, joins
            )
            sizes = view.sizes

            def on_owners(batches: list[Array]) -> list[Array]:
                pieces = [(x.shape, x.dtype) for x in batches]
                pools = owners.make_pools(
                    pieces,
                    placements,
                    sizes,
                    small=small,
                    exchanges=functools.partial(gram_exchanges, polar),
                    travel=travel,
                )
                return owners.map_pools(
                    polar, batches, pools, sizes, max_stack=max_stack
                )

            leaves = view.map(
                lambda pieces: factors_of(pieces, blocks, on_owners), leaves, placed
            )
        return jax.tree.unflatten(treedef, leaves), state

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _local_factors(
    polar: Callable[[Array], Array],
    conditions: Sequence[Array | None],
    max_stack: int,
    batches: list[Array],
) -> list[Array]:
    """Polar factors of batches (batch, in, out); zeros where a condition is false."""
    results: list[Any] = [None] * len(batches)
    always = [i for i, condition in enumerate(conditions) if condition is None]
    calls = [(polar, always)] + [
        (functools.partial(owners.compute_if, condition, polar), [index])
        for index, condition in enumerate(conditions)
        if condition is not None
    ]
    for function, members in calls:
        done = map_stacks(function, [batches[i] for i in members], max_stack=max_stack)
        for index, result in zip(members, done, strict=True):
            results[index] = result
    return results


def equilibrate_rows(
    *, eps: float = 1e-6, dimension_numbers: DimensionNumbers = None
) -> optax.GradientTransformation:
    r"""Scale the weights of every output neuron to the mean norm (MuonEq).

    For :math:`U` with :math:`m` outputs, row :math:`u` becomes
    :math:`u \, \|U\|_F / (\sqrt{m} \max(\|u\|, \epsilon))`. Rows are those of PyTorch's
    (out, in), so columns of a Flax kernel (in, out). Stands before `orthogonalize`.

    Args:
      eps: smallest row norm that is divided by.
      dimension_numbers: how parameters are read as matrices; see `matrix_axes`.

    Returns:
      An `optax.GradientTransformation` without state.

    Raises:
      ValueError: eps not above 0.

    References:
      MuonEq, arXiv 2603.28254.
    """
    check_positive("eps", eps)

    def scale(u: Array, axes: MatrixAxes) -> Array:
        _, fan_out = axes.fan(u.shape)
        scaled, unit = power_of_two_scaled(u, axes.matrix)  # gradients may be 1e30
        mean = _norm(scaled, axes.matrix) / fan_out**0.5
        return u * (mean / jnp.maximum(_norm(scaled, axes.reduction), eps * unit))

    return _stateless(scale, dimension_numbers)


def normalize_frobenius(
    rms: float | None = None,
    *,
    eps: float = 1e-6,
    dimension_numbers: DimensionNumbers = None,
) -> optax.GradientTransformation:
    r"""Set the Frobenius norm of every matrix, after `orthogonalize` (Muon+).

    Args:
      rms: root mean square of the elements to set; None sets the Frobenius norm to
        :math:`\sqrt{\min(m, n)}`, that of an orthogonal matrix.
      eps: smallest Frobenius norm that is divided by.
      dimension_numbers: how parameters are read as matrices; see `matrix_axes`.

    Returns:
      An `optax.GradientTransformation` without state.

    Raises:
      ValueError: eps not above 0.

    References:
      Muon+, arXiv 2602.21545. With rms=0.2 after `scale_by_normuon`, the step size of
      NorMuon's paper, arXiv 2510.05491.
    """
    check_positive("eps", eps)

    def scale(u: Array, axes: MatrixAxes) -> Array:
        fan_in, fan_out = axes.fan(u.shape)
        if rms is None:
            target: Any = min(fan_in, fan_out) ** 0.5
        else:
            target = rms * (fan_in * fan_out) ** 0.5
        return u * (target / jnp.maximum(_norm(u, axes.matrix), eps))

    return _stateless(scale, dimension_numbers)


class ScaleByNorMuonState(NamedTuple):
    """State of `scale_by_normuon`."""

    count: Array  # type: ignore[assignment]  # shape=(), dtype=int32
    nu: optax.Updates  # parameters' shape with 1 in the averaged axes, at least float32


def scale_by_normuon(
    decay: optax.ScalarOrSchedule = 0.95,
    *,
    axis: str = "longer",
    eps: float = 1e-10,
    dimension_numbers: DimensionNumbers = None,
) -> optax.GradientTransformation:
    r"""Divide neurons by a running root mean square, keeping the norm (NorMuon).

    :math:`V \leftarrow V + (1 - \beta)(\mathrm{mean}(X^2) - V)` from zero,
    :math:`s = \max(V, \epsilon)^{-1/2}`, and :math:`X` becomes
    :math:`X s \, \|X\|_F / \max(\|X s\|_F, \epsilon)`.

    Args:
      decay: :math:`\beta` in [0, 1), or a schedule of it.
      axis: "output": one mean for each output neuron, as in the paper; "longer": for
        each output if there are at least as many as inputs, else for each input, as in
        nanochat.
      eps: smallest mean square, and smallest norm, that is divided by.
      dimension_numbers: how parameters are read as matrices; see `matrix_axes`.

    Returns:
      An `optax.GradientTransformation`. Its state is one float for each neuron.

    Raises:
      ValueError: decay outside [0, 1), an unknown axis, eps not above 0; at init, with
        path and shape, a parameter that is no floating-point matrix.

    References:
      NorMuon, arXiv 2510.05491, Algorithm 1.
    """
    _check_decay("decay", decay)
    check_choice("axis", axis, ("longer", "output"))
    check_positive("eps", eps)

    def averaged(axes: MatrixAxes, shape: tuple[int, ...]) -> tuple[int, ...]:
        fan_in, fan_out = axes.fan(shape)
        return axes.reduction if axis == "output" or fan_out >= fan_in else axes.output

    def init_fn(params: optax.Params) -> ScaleByNorMuonState:
        def zeros(p: Array, axes: MatrixAxes) -> Array:
            # A sum, so that the state lies on the mesh as the parameter does.
            one = jnp.sum(p, axis=averaged(axes, p.shape), keepdims=True)
            return jnp.zeros_like(one, dtype=jnp.promote_types(p.dtype, jnp.float32))

        # A box names the axes of the parameter, over which (1, out) cannot be sharded.
        nu = _map_axes(zeros, dimension_numbers, paths.unbox(params))
        return ScaleByNorMuonState(jnp.zeros([], jnp.int32), nu)

    def update_fn(
        updates: optax.Updates, state: ScaleByNorMuonState, params: Any = None
    ) -> tuple[optax.Updates, ScaleByNorMuonState]:
        del params
        beta = _rate(decay, state.count)

        def mean_square(x: Array, axes: MatrixAxes) -> Array:
            return jnp.mean(wide(x) ** 2, axis=averaged(axes, x.shape), keepdims=True)

        def accumulate(mean: Array, v: Array) -> Array:
            return (v + (1 - beta) * (mean - v)).astype(v.dtype)

        def scale(x: Array, axes: MatrixAxes, mean: Array, v: Array) -> Array:
            # Both norms from the means, of which every one stands for as many entries:
            # two passes over x less, most of the time of this piece on a CPU.
            root = jax.lax.rsqrt(jnp.maximum(v, eps))
            count = x.size / mean.size
            norm = jnp.sqrt(count * _sum(mean, axes.matrix))
            new_norm = jnp.sqrt(count * _sum(mean * root * root, axes.matrix))
            factor = root * (norm / jnp.maximum(new_norm, eps))
            return (wide(x) * factor).astype(x.dtype)

        unboxed = paths.unbox(updates)
        means = _map_axes(mean_square, dimension_numbers, unboxed)
        nu = jax.tree.map(accumulate, means, state.nu)
        scaled = _map_axes(scale, dimension_numbers, unboxed, means, nu)
        updates = jax.tree.unflatten(
            jax.tree.structure(updates), jax.tree.leaves(scaled)
        )
        return updates, ScaleByNorMuonState(optax.safe_increment(state.count), nu)

    return optax.GradientTransformation(init_fn, update_fn)


def scale_by_shape(
    rule: str | Callable[[int, int], float] = "max_ratio",
    *,
    dimension_numbers: DimensionNumbers = None,
) -> optax.GradientTransformation:
    """Scale every matrix by a factor of its shape (in, out).

    Args:
      rule: "max_ratio" max(1, out/in)^0.5 (Jordan, nanochat); "rms_0.2"
        0.2 max(in, out)^0.5 (Moonlight: the size of AdamW's updates); "spectral"
        max(in, out)^0.5; "sqrt_ratio" (out/in)^0.5 (TEON); "none" 1; or a function of
        (in, out).
      dimension_numbers: how parameters are read as matrices; see `matrix_axes`.

    Returns:
      An `optax.GradientTransformation` without state.

    Raises:
      ValueError: an unknown rule.

    References:
      Jordan et al., https://kellerjordan.github.io/posts/muon/; Moonlight, arXiv
      2502.16982; TEON, arXiv 2601.23261.
    """
    factor = shape_rule(rule)

    def scale(u: Array, axes: MatrixAxes) -> Array:
        return u * factor(*axes.fan(u.shape))

    return _stateless(scale, dimension_numbers)


def shape_rule(rule: str | Callable[[int, int], float]) -> Callable[[int, int], float]:
    """The function of (in, out) that a rule of `scale_by_shape` names."""
    if callable(rule):
        return rule
    check_choice("rule", rule, tuple(SHAPE_RULES))
    return SHAPE_RULES[rule]


class AddCautiousDecayedWeightsState(NamedTuple):
    """State of `add_cautious_decayed_weights`."""

    count: Array  # type: ignore[assignment]  # shape=(), dtype=int32


def add_cautious_decayed_weights(
    weight_decay: optax.ScalarOrSchedule = 0.0, mask: Any = None
) -> optax.GradientTransformation:
    r"""Add decayed weights where the step moves the weight towards zero anyway.

    The update :math:`U` becomes :math:`U + \lambda W [U W \ge 0]`, elementwise. Stands
    before the learning rate, as `optax.add_decayed_weights`.

    Args:
      weight_decay: :math:`\lambda`, at least 0, or a schedule of it.
      mask: as in `optax.masked`: which parameters to decay; None for all.

    Returns:
      An `optax.GradientTransformation` that needs the parameters at update.

    Raises:
      ValueError: weight_decay below 0; at update, params=None.

    References:
      Cautious weight decay, arXiv 2510.12402.
    """
    if isinstance(weight_decay, (int, float)) and not weight_decay >= 0:
        raise ValueError(
            f"weight_decay={weight_decay}: valid is a number of at least 0"
        )

    def init_fn(params: optax.Params) -> AddCautiousDecayedWeightsState:
        del params
        return AddCautiousDecayedWeightsState(jnp.zeros([], jnp.int32))

    def update_fn(
        updates: optax.Updates,
        state: AddCautiousDecayedWeightsState,
        params: optax.Params | None = None,
    ) -> tuple[optax.Updates, AddCautiousDecayedWeightsState]:
        if params is None:
            raise ValueError(
                "add_cautious_decayed_weights needs the parameters: "
                "tx.update(updates, state, params), got params=None"
            )
        rate = _rate(weight_decay, state.count)

        def decay(u: Array, w: Array) -> Array:
            decayed = jnp.where(wide(u) * w >= 0, rate * wide(w), 0)
            return (wide(u) + decayed).astype(u.dtype)

        updates = jax.tree.map(decay, updates, params)
        return updates, AddCautiousDecayedWeightsState(
            optax.safe_increment(state.count)
        )

    tx = optax.GradientTransformation(init_fn, update_fn)
    return tx if mask is None else optax.masked(tx, mask)


def _rate(rate: optax.ScalarOrSchedule, count: Array) -> Any:
    return rate(count) if callable(rate) else rate


def _norm(x: Array, axes: tuple[int, ...]) -> Array:
    return jnp.sqrt(_sum(x * x, axes))


def _sum(x: Array, axes: tuple[int, ...]) -> Array:
    return jnp.sum(x, axis=axes, keepdims=True)


def _map_axes(
    function: Callable[..., Array],
    dimension_numbers: DimensionNumbers,
    tree: Any,
    *rest: Any,
) -> Any:
    """Map over leaves and their `MatrixAxes`."""
    axes = matrices.matrix_axes(tree, dimension_numbers)
    axes_tree = jax.tree.unflatten(jax.tree.structure(tree), axes)
    return jax.tree.map(function, tree, axes_tree, *rest)


def _stateless(
    scale: Callable[[Array, MatrixAxes], Array], dimension_numbers: DimensionNumbers
) -> optax.GradientTransformation:
    """A transform that applies `scale` to every leaf, in at least float32."""

    def init_fn(params: optax.Params) -> optax.EmptyState:
        matrices.matrix_axes(params, dimension_numbers)
        return optax.EmptyState()

    def update_fn(
        updates: optax.Updates, state: optax.EmptyState, params: Any = None
    ) -> tuple[optax.Updates, optax.EmptyState]:
        del params

        def scale_leaf(u: Array, axes: MatrixAxes) -> Array:
            return scale(wide(u), axes).astype(u.dtype)

        return _map_axes(scale_leaf, dimension_numbers, updates), state

    return optax.GradientTransformation(init_fn, update_fn)


def _check_decay(name: str, value: Any) -> None:
    concrete = isinstance(value, (int, float, np.number, jax.Array))
    if concrete and not isinstance(value, jax.core.Tracer) and not 0 <= value < 1:
        raise ValueError(f"{name}={value}: valid is a number in [0, 1) or a schedule")
