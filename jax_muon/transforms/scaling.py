"""Pieces that scale updates: matrices by their norms or shapes, parameters by paths."""

from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from jax_muon.base import checks, dtypes, facts, trees
from jax_muon.base.trees import map_leaves
from jax_muon.matrices.matrices import check_matrices

# The name of a factor below, or a function of (in, out).
AdjustLr: TypeAlias = str | Callable[[int, int], float] | None

# Factor of the update, by the size (in, out) of the matrix: the first two names are
# torch.optim.Muon's, "spectral_norm" is dion's.
ADJUST_LR: dict[str | None, Callable[[int, int], float]] = {
    None: lambda fan_in, fan_out: 1.0,
    "original": lambda fan_in, fan_out: max(1.0, fan_out / fan_in) ** 0.5,
    "match_rms_adamw": lambda fan_in, fan_out: 0.2 * max(fan_in, fan_out) ** 0.5,
    "spectral_norm": lambda fan_in, fan_out: (fan_out / fan_in) ** 0.5,
}

IN, OUT = -2, -1  # axes of arrays (..., in, out)
MATRIX = IN, OUT
_SMALLEST_NORM = 1e-6  # that a matrix or row is divided by


class Scales(dict[str, float]):
    """The factor of `scale_by_shape`, such as 2.0, by path: recorded for `describe`."""


def equilibrate_rows() -> optax.GradientTransformation:
    r"""Scale the weights of every output neuron to one norm (MuonEq, arXiv 2603.28254).

    For :math:`U` with :math:`m` outputs, the weights :math:`u` of one become
    :math:`u \, \|U\|_F / (\sqrt{m} \max(\|u\|, 10^{-6}))`: all get the root mean
    square of their norms. The :math:`10^{-6}` shrinks with norms of :math:`U` below
    :math:`2^{-13}`, as in `NewtonSchulz`. It goes before `orthogonalize`.

    Examples:
      >>> updates = jnp.array([[7.0, 0.0], [0.0, 1.0]])
      >>> tx = jm.equilibrate_rows()
      >>> tx.update(updates, tx.init(updates))[0].tolist()
      [[5.0, 0.0], [0.0, 5.0]]
    """

    def scale(_: str, u: Array) -> Array:
        unit = dtypes.unit_of(jnp.max(jnp.abs(u), MATRIX, keepdims=True))
        whole, rows = (_norm(u * unit, axes) for axes in (MATRIX, (IN,)))
        target = whole / u.shape[-1] ** 0.5  # the root mean square of the norms of rows
        norm = jnp.maximum(rows, dtypes.padded(whole, _SMALLEST_NORM, unit, 0.0))
        return u * jnp.minimum(target / norm, jnp.finfo(u.dtype).max)

    return _stateless(scale)


def normalize_frobenius(rms: float | None = None) -> optax.GradientTransformation:
    r"""Set the Frobenius norm of every matrix, after `orthogonalize`.

    Muon+, arXiv 2602.21545; with rms=0.2 after `scale_by_normuon`, the step size of
    NorMuon, arXiv 2510.05491.

    Args:
      rms: root mean square of the elements to set; None sets the Frobenius norm to
        :math:`\sqrt{\min(m, n)}`, as orthogonal matrices have. Norms below 1e-6 count
        as 1e-6.

    Examples:
      >>> updates = jnp.array([[3.0, 0.0], [0.0, 4.0]])
      >>> tx = jm.normalize_frobenius(rms=5.0)
      >>> tx.update(updates, tx.init(updates))[0].tolist()
      [[6.0, 0.0], [0.0, 8.0]]
    """
    if rms is not None:
        rms = checks.as_number("rms", rms, "above 0", others=", or None")

    def scale(_: str, u: Array) -> Array:
        fan_in, fan_out = u.shape[-2:]
        if rms is None:
            target: float | Array = min(fan_in, fan_out) ** 0.5
        else:
            target = dtypes.in_dtype_of(u, rms) * (fan_in * fan_out) ** 0.5
        return u * (target / jnp.maximum(_norm(u, MATRIX), _SMALLEST_NORM))

    return _stateless(scale)


class ScaleByNorMuonState(NamedTuple):
    """State of `scale_by_normuon`."""

    count: Array  # type: ignore[assignment]  # shape=(), dtype=int32
    nu: optax.Updates  # (..., 1, out) or (..., in, 1), at least float32


def scale_by_normuon(
    decay: optax.ScalarOrSchedule = 0.95,
    *,
    axis: str = "longer",
    eps: float = 1e-10,
) -> optax.GradientTransformation:
    r"""Divide neurons by a running root mean square, keeping the norm.

    Algorithm 1 of NorMuon, arXiv 2510.05491:
    :math:`V \leftarrow V + (1 - \beta)(\mathrm{mean}(X^2) - V)` from zero,
    :math:`s = \max(V, \epsilon)^{-1/2}`, and :math:`X` becomes
    :math:`X s \, \|X\|_F / \max(\|X s\|_F, \epsilon)`.

    Args:
      decay: :math:`\beta` in [0, 1), or a schedule of it.
      axis: "output": one mean for each output neuron, as in the paper; "longer": for
        each output if out >= in, else for each input, as in nanochat.
      eps: smallest mean square, and smallest norm, that is divided by.

    Examples:
      >>> updates = jnp.array([[1.0, 0.0], [0.0, 7.0]])
      >>> tx = jm.scale_by_normuon()
      >>> tx.update(updates, tx.init(updates))[0].round(3).tolist()
      [[5.0, 0.0], [0.0, 5.0]]
    """
    decay = checks.as_rate("decay", decay, "in [0, 1)")
    checks.check_choice("axis", axis, ("longer", "output"))
    eps = checks.as_number("eps", eps, "above 0")

    def mean(x: Array) -> Array:
        fan_in, fan_out = x.shape[-2:]
        along = IN if axis == "output" or fan_out >= fan_in else OUT
        return jnp.mean(x**2, along, keepdims=True)

    def zeros(p: Array) -> Array:
        # A mean has the sharding of the parameter.
        return jnp.zeros_like(mean(p), dtype=dtypes.wider(p.dtype, jnp.float32))

    def init_fn(params: optax.Params) -> ScaleByNorMuonState:
        check_matrices(params)
        nu = jax.tree.map(zeros, params)
        return ScaleByNorMuonState(jnp.zeros([], jnp.int32), nu)

    def update_fn(
        updates: optax.Updates,
        state: ScaleByNorMuonState,
        params: optax.Params | None = None,
    ) -> tuple[optax.Updates, ScaleByNorMuonState]:
        del params
        beta = checks.rate_at(decay, state.count)

        def average(new: Array, v: Array) -> Array:
            return (v + (1 - dtypes.in_dtype_of(v, beta)) * (new - v)).astype(v.dtype)

        def scale(u: Array, squares: Array, v: Array) -> Array:
            # Both norms come from the means, which cover equally many entries each:
            # (1, 3072) means of 768 entries, for (768, 3072). So two passes over x are
            # saved, most of this piece's time on a CPU.
            x, floor = dtypes.wide(u), dtypes.in_dtype_of(v, eps)
            root = jax.lax.rsqrt(jnp.maximum(v, floor))
            count = x.size / squares.size
            norm = dtypes.root(count * jnp.sum(squares, MATRIX, keepdims=True))
            scaled = jnp.sum(squares * root * root, MATRIX, keepdims=True)
            new_norm = dtypes.root(count * scaled)
            factor = root * (norm / jnp.maximum(new_norm, floor))
            return (x * factor).astype(u.dtype)

        means = jax.tree.map(lambda u: mean(dtypes.wide(u)), updates)
        nu = jax.tree.map(average, means, state.nu)
        updates = jax.tree.map(scale, updates, means, nu)
        return updates, ScaleByNorMuonState(optax.safe_increment(state.count), nu)

    return optax.GradientTransformation(init_fn, update_fn)


def scale_by_shape(
    adjust_lr_fn: str | Callable[[int, int], float] | None = "original",
) -> optax.GradientTransformation:
    """Scale every matrix by a factor of its shape (in, out).

    Args:
      adjust_lr_fn: "original" is max(1, out/in)^0.5 (Jordan, nanochat),
        "match_rms_adamw" is 0.2 max(in, out)^0.5 (Moonlight, arXiv 2502.16982: the size
        of AdamW's updates), both as in `torch.optim.Muon`; "spectral_norm" is
        (out/in)^0.5 (dion; TEON, arXiv 2601.23261), as the spectral condition of muP
        has it; None is 1; or a function of (in, out).

    Examples:
      >>> updates = jnp.ones((2, 8))  # (in, out)
      >>> tx = jm.scale_by_shape("original")
      >>> tx.update(updates, tx.init(updates))[0][0, 0].item()
      2.0
    """
    known = isinstance(adjust_lr_fn, str | None) and adjust_lr_fn in ADJUST_LR
    if not known and not callable(adjust_lr_fn):
        names = ", ".join(map(repr, ADJUST_LR))
        expected = f"{names}, or a function (in, out)"
        expected += checks.injected(adjust_lr_fn, "adjust_lr_fn")
        checks.refuse("adjust_lr_fn", adjust_lr_fn, expected)
    factor_of = adjust_lr_fn if callable(adjust_lr_fn) else ADJUST_LR[adjust_lr_fn]

    def scale(path: str, u: Array) -> Array:
        fan = u.shape[-2:]
        factor = checks.as_number(
            f"adjust_lr_fn{fan}", factor_of(*fan), "of at least 0"
        )
        facts.record(Scales)[path] = factor
        return u * dtypes.in_dtype_of(u, factor)

    return _stateless(scale)


def scale_by_path(factors: Mapping[str, float]) -> optax.GradientTransformation:
    """Scale the updates of some parameters: a learning rate for each path pattern.

    Args:
      factors: path pattern to factor; see `find_matrices` for patterns. The first that
        matches counts. A parameter that none matches is left alone.

    Raises:
      ValueError: at init, with all paths, a pattern that matches no parameter.

    Examples:
      >>> updates = {"embed": jnp.ones(2), "head": jnp.ones(2)}
      >>> tx = jm.scale_by_path({"embed*": 16.0})
      >>> tx.update(updates, tx.init(updates))[0]["embed"].tolist()
      [16.0, 16.0]
    """
    for pattern, factor in factors.items():
        checks.as_number(f"factors[{pattern!r}]", factor, "of at least 0")

    def init_fn(params: optax.Params) -> optax.EmptyState:
        known = [path for path, _ in trees.leaves_with_paths(params)]
        trees.check_patterns_match("factors of the learning rate", factors, known)
        return optax.EmptyState()

    def scale(path: str, u: Array) -> Array:
        factor = next((f for p, f in factors.items() if trees.matches(p, path)), 1)
        return u if factor == 1 else (dtypes.wide(u) * factor).astype(u.dtype)

    scaled = optax.stateless(lambda updates, params: map_leaves(scale, updates))
    return optax.GradientTransformation(init_fn, scaled.update)


def _norm(x: Array, axes: tuple[int, ...]) -> Array:
    return dtypes.root(jnp.sum(x * x, axes, keepdims=True))


def _stateless(scale: Callable[[str, Array], Array]) -> optax.GradientTransformation:
    """A transform that applies `scale` to every leaf, in at least float32."""

    def init_fn(params: optax.Params) -> optax.EmptyState:
        check_matrices(params)
        return optax.EmptyState()

    def scaled(path: str, u: Array) -> Array:
        return scale(path, dtypes.wide(u)).astype(u.dtype)

    update = optax.stateless(lambda updates, params: map_leaves(scaled, updates)).update
    return optax.GradientTransformation(init_fn, update)
