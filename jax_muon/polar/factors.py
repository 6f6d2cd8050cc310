"""Arrays (..., m, n) to arrays: the orthogonal factor of every matrix in a batch.

A matrix X = U S V^T has the polar factor U V^T: the same directions, every singular
value 1. `svd_polar` computes it exactly; `polar_express` and `newton_schulz` come close
with matrix products alone, in `iteration.py`. Nothing here knows what a parameter or a
mesh is.
"""

import inspect
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jax_muon.checks import check_choice, check_count, check_positive
from jax_muon.mesh.axes import AxisName, axis_names
from jax_muon.polar.coefficients import (
    NEWTON_SCHULZ,
    Coefficients,
    polar_express_coefficients,
)
from jax_muon.polar.iteration import (
    GRAM_REFRESH,
    iterate,
    power_of_two_scaled,
    uses_gram,
)
from jax_muon.polar.kernels import matmul

_DTYPES = ("bfloat16", "float32", "float64")


def polar_express(
    x: Float[Array, "*batch m n"],
    steps: int = 5,
    *,
    lower: float = 1e-3,
    cushion: float = 0.02,
    safety: float = 0.02,
    norm_factor: float = 1.02,
    eps: float = 1e-6,
    norm: str = "frobenius",
    dtype: jax.typing.DTypeLike | None = "bfloat16",
    form: str = "auto",
    symmetric: str = "plain",
    axis_name: AxisName | None = None,
) -> Float[Array, "*batch m n"]:
    """Polar factor by the Polar Express: an optimal quintic for each step.

    Args:
      x: matrices in the last two axes, tall or wide, any floating dtype.
      steps: number of quintics.
      lower: smallest relative singular value that is brought to 1; see
        `polar_express_coefficients`, also for `cushion` and `safety`.
      cushion: lower end of each step's interval, relative to its upper end.
      safety: margin for rounding in every step but the last.
      norm_factor: x is divided by `norm_factor * norm(x) + eps` before the first step.
      eps: see `norm_factor`. Matrices with a much smaller norm stay small.
      norm: "frobenius", or "schatten4", (sum of s^4)^(1/4): never larger, so that small
        singular values start nearer to 1.
      dtype: of the iteration: bfloat16, float32, float64; None for the dtype of x. In
        bfloat16, sums are in float32 and rounded once on a CPU and where XLA takes
        cuBLASLt. Elsewhere every term is rounded: an error of 0.04 instead of 0.016 on
        a Gaussian (64, 256). Matrices of one row or column take at least float32.
      form: "standard", "gram" (not in bfloat16, where it is useless: singular values
        reach 28), or "auto": "gram" where it is faster.
      symmetric: "plain", or "kernel": on an NVIDIA GPU, kernels that compute one
        triangle of symmetric products (`jax_muon.polar.kernels`), for bfloat16. No
        card has run them yet.
      axis_name: inside shard_map, the mesh axis, or axes, over which the last axis of x
        is divided, the longer one of the whole matrix. Gram matrices (m, m) are summed
        over it, `gram_exchanges` times; each device computes its piece of the factor.

    Returns:
      An array with the shape and dtype of x. Zero matrices give zeros.

    Raises:
      ValueError: x has fewer than two axes or is not real floating point, or an
        argument is none of the values above.

    Examples:
      >>> x = jax.random.normal(jax.random.key(0), (3, 8, 16))
      >>> y = polar_express(x, steps=8, dtype="float32")
      >>> bool(jnp.allclose(y @ y.mT, jnp.eye(8), atol=1e-4))
      True

    References:
      Amsel, Persson, Musco, Gower, The Polar Express, arXiv 2505.16932.
    """
    check_count("steps", steps)
    coefficients = polar_express_coefficients(
        steps, lower=lower, cushion=cushion, safety=safety
    )
    return _checked_factors(
        x, coefficients, norm_factor, eps, norm, dtype, form, symmetric, axis_name
    )


def newton_schulz(
    x: Float[Array, "*batch m n"],
    steps: int = 5,
    *,
    coefficients: Coefficients | Sequence[Coefficients] = NEWTON_SCHULZ,
    norm_factor: float = 1.0,
    eps: float = 1e-7,
    norm: str = "frobenius",
    dtype: jax.typing.DTypeLike | None = "bfloat16",
    form: str = "auto",
    symmetric: str = "plain",
    axis_name: AxisName | None = None,
) -> Float[Array, "*batch m n"]:
    """Approximate polar factor by an iteration with the given quintics.

    Args:
      x: matrices in the last two axes, tall or wide, any floating dtype.
      steps: number of quintics.
      coefficients: one (a, b, c) for every step, or a sequence of at least `steps`, of
        which the first `steps` are used. Default: Jordan's, which leaves singular
        values near 0.7 .. 1.2. A step divides by a and b, which must not be 0.
      norm_factor: see `polar_express`, also for `eps`, `norm`, `dtype` and `form`.
      eps: added to the norm.
      norm: "frobenius" or "schatten4".
      dtype: of the iteration.
      form: "standard", "gram" or "auto".
      symmetric: "plain" or "kernel".
      axis_name: see `polar_express`.

    Returns:
      An array with the shape and dtype of x. Zero matrices give zeros.

    Raises:
      ValueError: as `polar_express`, more steps than coefficients, |a| outside 1e-6 to
        1e6, b = 0, or |b / a| or |c / b| above 1e6.

    References:
      Jordan et al., Muon, https://kellerjordan.github.io/posts/muon/
    """
    check_count("steps", steps)
    table = np.asarray(coefficients, dtype=np.float64)
    if table.shape == (3,):
        table = np.tile(table, (steps, 1))
    if table.ndim != 2 or table.shape[1] != 3:
        raise ValueError(
            f"coefficients of shape {table.shape}: valid is one (a, b, c) or a "
            "sequence of them"
        )
    if not 1 <= steps <= len(table):
        raise ValueError(
            f"steps={steps} with {len(table)} given coefficients: valid is 1 to "
            f"{len(table)} steps"
        )
    for a, b, c in table[:steps]:
        if not (1e-6 <= abs(a) <= 1e6 and 0 < abs(b) <= 1e6 * abs(a)) or not (
            abs(c) <= 1e6 * abs(b)
        ):
            raise ValueError(
                f"coefficients ({a}, {b}, {c}): valid are |a| from 1e-6 to 1e6, b not "
                "0, and |b / a| and |c / b| up to 1e6"
            )
    abcs = [(float(a), float(b), float(c)) for a, b, c in table[:steps]]
    return _checked_factors(
        x, abcs, norm_factor, eps, norm, dtype, form, symmetric, axis_name
    )


def svd_polar(x: Float[Array, "*batch m n"]) -> Float[Array, "*batch m n"]:
    """Exact polar factor U V^T by the singular value decomposition.

    Args:
      x: matrices in the last two axes, any floating dtype. bfloat16 and float16 are
        decomposed in float32.

    Returns:
      An array with the shape and dtype of x. For a matrix of rank r it has r singular
      values 1 and the others 0, where the rank counts singular values above
      `max(m, n) * eps(dtype)` of the largest. Zero matrices give zeros.

    Raises:
      ValueError: x has fewer than two axes or is not real floating point.
    """
    _check_matrices(x)
    y, _ = power_of_two_scaled(x)
    u, s, vt = jnp.linalg.svd(y, full_matrices=False)
    rank_tol = max(x.shape[-2:]) * jnp.finfo(y.dtype).eps
    keep = s > rank_tol * s[..., :1]
    return matmul(u * keep[..., None, :], vt).astype(x.dtype)


def _check_matrices(x: Array) -> None:
    if x.ndim < 2:
        raise ValueError(f"shape {x.shape}: valid are arrays (..., m, n)")
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"dtype {x.dtype}: valid are real floating-point matrices")


def _checked_factors(
    x: Array,
    coefficients: Sequence[Coefficients],
    norm_factor: float,
    eps: float,
    norm: str,
    dtype: jax.typing.DTypeLike | None,
    form: str,
    symmetric: str,
    axis_name: AxisName | None,
) -> Array:
    """`iterate`, once it is known that all arguments are valid."""
    _check_matrices(x)
    check_choice("norm", norm, ("frobenius", "schatten4"))
    check_choice("form", form, ("auto", "standard", "gram"))
    check_choice("symmetric", symmetric, ("plain", "kernel"))
    check_positive("norm_factor", norm_factor)
    check_positive("eps", eps)
    dtype = _dtype_of_iteration(x.dtype if dtype is None else dtype)
    if symmetric == "kernel" and dtype != jnp.bfloat16:
        raise ValueError(f"symmetric='kernel' with dtype={dtype}: valid is bfloat16")
    if form == "gram" and dtype == jnp.bfloat16:
        raise ValueError(
            f"form='gram' with dtype={dtype}: singular values reach 28 there; valid "
            "are dtype=float32 or form='standard'"
        )
    if x.size == 0:
        return x
    return iterate(
        x,
        norm_factor,
        eps,
        coefficients=tuple(coefficients),
        norm=norm,
        dtype=dtype,
        form=form,
        symmetric=symmetric,
        axis_name=None if axis_name is None else axis_names(axis_name),
    )


def _dtype_of_iteration(dtype: jax.typing.DTypeLike) -> jnp.dtype:
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        found = None
    if found is None or found.name not in _DTYPES:  # others have too few exponents
        raise ValueError(
            f"dtype={dtype}: an iteration in it is not possible; valid are "
            f"{', '.join(_DTYPES)}, or None where x has one of them; under "
            "optax.inject_hyperparams a string"
        )
    if found != jax.dtypes.canonicalize_dtype(found):
        raise ValueError(
            f"dtype={found} without jax.config.update('jax_enable_x64', True): valid "
            "are float32 and bfloat16"
        )
    return found


def gram_exchanges(polar: Callable[..., Array], m: int, n: int) -> int | None:
    """How often `polar` with an `axis_name` sums Gram matrices over it.

    Args:
      polar: `polar_express`, `newton_schulz`, or a `functools.partial` of one.
      m: shorter side of the matrices.
      n: longer side.

    Returns:
      The number, or None for any other function.
    """
    try:
        parameters = inspect.signature(polar).parameters
    except (TypeError, ValueError):  # a function that shows no signature
        return None
    settings = {name: parameter.default for name, parameter in parameters.items()}
    if not settings.keys() >= {"axis_name", "steps", "dtype", "form"}:
        return None
    steps = settings["steps"]
    dtype = jnp.dtype(settings["dtype"] or jnp.float32)
    gram = uses_gram(settings["form"], dtype, m, n)
    return -(-steps // GRAM_REFRESH) if gram else steps
