"""Arrays (..., m, n) to arrays: the orthogonal factor of every matrix in a batch.

A matrix X = U S V^T has the polar factor U V^T: the same directions, every singular
value 1. `svd_polar` computes it exactly; `polar_express` and `newton_schulz` come close
with matrix products alone. Nothing here knows what a parameter or a mesh is.

The iterations share one body, in two forms with m <= n:

  standard: A = X X^T;  X <- X + (b/a A + c/a A A) X, and all a together at the end
  gram:     R = X X^T;  Z = b R + c R R;  Q <- a Q + Q Z;  R <- (aI + Z) R (aI + Z),
            and X <- Q X at the end. Cheaper for n > 1.5 m, less accurate: R squares the
            condition number, so X is refreshed once in three steps.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jax_muon.coefficients import (
    NEWTON_SCHULZ,
    Coefficients,
    polar_express_coefficients,
)
from jax_muon.kernels.symmetric import matmul
from jax_muon.products import (
    FusedProducts,
    KernelProducts,
    Products,
    exact_factors,
    outer_in_halves,
    wide,
)
from jax_muon.sharding.axes import AxisName, axis_names

# Steps of the Gram form between two refreshes of X. Without a refresh singular values
# reach 4 on inputs of condition 1e10, in float32; with one after step 3 the error stays
# below 5e-5.
_GRAM_REFRESH = 3

# FLOPs of five steps are 20 m^2 n + 10 m^3 (standard) and 8 m^2 n + 28 m^3 (Gram).
_GRAM_ASPECT = 1.5

# Below this m, products are too small for the Gram form to save time.
_GRAM_MIN_SIZE = 256

# X is held as X / s, its Gram matrix A as A / s^2 and A A as A A / s^4: with more than
# this s, or less than its inverse, they would leave the range of float32 (2^126). s is
# the product of the a of all steps so far, 2^13 after eight of the Polar Express.
_MAX_SCALE = 2.0**20

# On a CPU, symmetric products are computed by halves from this m on; below, the smaller
# products lose what their number saves.
_CPU_HALVES_MIN_SIZE = 512

_NORMS = ("frobenius", "schatten4")
_FORMS = ("auto", "standard", "gram")
_SYMMETRIC = ("plain", "kernel")
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
        a Gaussian (64, 256).
      form: "standard", "gram" (not in bfloat16, where it is useless: singular values
        reach 28), or "auto": "gram" where it is faster.
      symmetric: "plain", or "kernel": on an NVIDIA GPU, kernels that compute one
        triangle of symmetric products (`jax_muon.kernels.symmetric`), for bfloat16. No
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
    positive_int("steps", steps)
    coefficients = polar_express_coefficients(
        steps, lower=lower, cushion=cushion, safety=safety
    )
    return _checked(
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
    positive_int("steps", steps)
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
    return _checked(x, abcs, norm_factor, eps, norm, dtype, form, symmetric, axis_name)


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


def positive_int(name: str, value: int) -> None:
    """Raise a ValueError unless `value` is a Python integer of at least 1."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise ValueError(
            f"{name}={value!r}: valid is a Python integer, known while tracing; under "
            f"optax.inject_hyperparams name it in static_args=({name!r},)"
        )
    if value < 1:
        raise ValueError(f"{name}={value}: valid is an integer of at least 1")


def check_positive(name: str, value: Any) -> None:
    """Raise a ValueError unless a number that is known while tracing is above 0."""
    if not isinstance(value, jax.core.Tracer) and not value > 0:
        raise ValueError(f"{name}={value}: valid is a number above 0")


def _check_matrices(x: Array) -> None:
    if x.ndim < 2:
        raise ValueError(f"shape {x.shape}: valid are arrays (..., m, n)")
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"dtype {x.dtype}: valid are real floating-point matrices")


def _checked(
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
    """`_iterate` with arguments that are valid."""
    _check_matrices(x)
    if norm not in _NORMS:
        raise ValueError(f"norm={norm!r}: valid are {', '.join(_NORMS)}")
    if form not in _FORMS:
        raise ValueError(f"form={form!r}: valid are {', '.join(_FORMS)}")
    if symmetric not in _SYMMETRIC:
        raise ValueError(f"symmetric={symmetric!r}: valid are {', '.join(_SYMMETRIC)}")
    check_positive("norm_factor", norm_factor)
    check_positive("eps", eps)
    dtype = _dtype_of_iteration(x.dtype if dtype is None else dtype)
    if symmetric == "kernel" and dtype != jnp.bfloat16:
        raise ValueError(f"symmetric='kernel' with dtype={dtype}: valid is bfloat16")
    if x.size == 0:
        return x

    if form == "gram" and dtype == jnp.bfloat16:
        raise ValueError(
            f"form='gram' with dtype={dtype}: singular values reach 28 there; valid "
            "are dtype=float32 or form='standard'"
        )
    return _iterate(
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


# Traced once for matrices of a shape, however many parameters and calls have it.
@functools.partial(
    jax.jit,
    static_argnames=(
        "coefficients",
        "norm",
        "dtype",
        "form",
        "symmetric",
        "axis_name",
    ),
)
def _iterate(
    x: Array,
    norm_factor: Any,
    eps: Any,
    *,
    coefficients: tuple[Coefficients, ...],
    norm: str,
    dtype: jnp.dtype,
    form: str,
    symmetric: str,
    axis_name: tuple[str, ...] | None,
) -> Array:
    """Run the quintics on a batch, in the order that suits the platform."""
    *batch, rows, cols = x.shape
    if axis_name is None:
        m, n = sorted((rows, cols))
    else:
        m, n = rows, cols * jax.lax.axis_size(axis_name)
    turned = axis_name is None and rows > cols
    low_precision = dtype == jnp.bfloat16
    body = _gram_form if _uses_gram(form, dtype, m, n) else _standard_form

    def factor(y: Array, products: Products) -> Array:
        def summed(gram: Array) -> Array:
            return gram if axis_name is None else jax.lax.psum(gram, axis_name)

        def gram_of(y: Array, k: float) -> Array:
            if axis_name is None:
                return products.gram(y, k)
            return (k * summed(products.outer(y, y))).astype(y.dtype)

        y = y.mT if turned else y  # (..., m, n) with m <= n
        y, unit = power_of_two_scaled(y, axis_name=axis_name)
        y = y.astype(dtype)
        gram = summed(products.outer(y, y))
        y, gram = _normalize(y, gram, unit, norm, norm_factor, eps)
        y = body(y, gram, coefficients, products, gram_of).astype(x.dtype)
        return y.mT if turned else y

    halves = m >= _CPU_HALVES_MIN_SIZE
    on_cpu = functools.partial(factor, products=_HALVES if halves else _WHOLE)
    branches = {
        "cpu": functools.partial(_one_after_another, on_cpu, squeeze=not low_precision),
        "default": functools.partial(factor, products=_FUSED),
    }
    if symmetric == "kernel":
        branches["cuda"] = functools.partial(factor, products=_KERNELS)
    y = jax.lax.platform_dependent(x.reshape(-1, rows, cols), **branches)
    return y.reshape(*batch, rows, cols)


def _uses_gram(form: str, dtype: jnp.dtype, m: int, n: int) -> bool:
    if form == "auto":
        low_precision = jnp.finfo(dtype).bits < 32
        return not low_precision and m >= _GRAM_MIN_SIZE and n > _GRAM_ASPECT * m
    return form == "gram"


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
    gram = _uses_gram(settings["form"], dtype, m, n)
    return -(-steps // _GRAM_REFRESH) if gram else steps


def _one_after_another(
    function: Callable[[Array], Array], x: Array, *, squeeze: bool
) -> Array:
    """The function of each matrix in turn, written over its input.

    On a CPU a whole stack at once falls out of the cache, and batched products in
    bfloat16 run at half the rate of single ones. With `squeeze` a matrix is (m, n)
    instead of (1, m, n): faster in float32 by a tenth to a fifth. In bfloat16 it is the
    other way round, by a third: there XLA multiplies (m, k) by (k, n) in float32 in
    places.
    """
    shape = x.shape[1:] if squeeze else (1, *x.shape[1:])

    def body(index: Array, x: Array) -> Array:
        matrix = jax.lax.dynamic_slice_in_dim(x, index, 1).reshape(shape)
        matrix = function(matrix).reshape(1, *x.shape[1:])
        return jax.lax.dynamic_update_slice_in_dim(x, matrix, index, 0)

    return jax.lax.fori_loop(0, len(x), body, x)


def _normalize(
    x: Array, gram: Array, unit: Array, norm: str, norm_factor: float, eps: float
) -> tuple[Array, Array]:
    """X / (norm_factor * norm(X) + eps unit), and its Gram matrix X X^T.

    Both norms are read off the Gram matrix of the first step, which is computed anyway:
    ||X||_F^2 is its trace, and the Schatten-4 norm to the fourth is ||X X^T||_F^2.
    """
    if norm == "frobenius":
        squared = jnp.trace(gram, axis1=-2, axis2=-1)[..., None, None]
    else:
        squared = jnp.sqrt(jnp.sum(gram * gram, axis=(-2, -1), keepdims=True))
    scale = 1 / (norm_factor * jnp.sqrt(squared) + eps * unit.astype(gram.dtype))
    return (wide(x) * scale).astype(x.dtype), gram * scale * scale


def power_of_two_scaled(
    x: Array, axes: tuple[int, ...] = (-2, -1), *, axis_name: AxisName | None = None
) -> tuple[Array, Array]:
    """X with its largest element in [0.5, 1) by an exact factor, and that factor.

    Squares of elements near the ends of the exponent range (1e30, 1e-30 in float32)
    then neither overflow nor vanish. `axes` are those of one matrix, which lies divided
    over the mesh axes of `axis_name`.
    """
    x = wide(x)
    largest = jnp.max(jnp.abs(x), axis=axes, keepdims=True)
    if axis_name is not None:
        largest = jax.lax.pmax(largest, axis_name)
    _, exponent = jnp.frexp(largest)
    limit = jnp.finfo(x.dtype).maxexp - 2
    unit = jnp.ldexp(jnp.ones_like(largest), -jnp.clip(exponent, -limit, limit))
    return x * unit, unit


def _standard_form(
    x: Array,
    gram: Array,
    coefficients: Sequence[Coefficients],
    products: Products,
    gram_of: Callable[[Array, float], Array],
) -> Array:
    """Of X and its Gram matrix, which is in at least float32, as is the result."""
    scale = 1.0  # x is X / scale, so that a step need not multiply it
    for step, (a, b, c) in enumerate(coefficients):
        g, p, q = exact_factors(b / a * scale**2, c / a * scale**4, x.dtype)
        first = step == 0
        gram = (g * gram).astype(x.dtype) if first else gram_of(x, g)
        x = products.add_product(x, p, products.add_square(gram, q))
        scale *= a
        if not 1 / _MAX_SCALE <= abs(scale) <= _MAX_SCALE:
            x, scale = (wide(x) * scale).astype(x.dtype), 1.0
    return wide(x) * scale


def _gram_form(
    x: Array,
    gram: Array,
    coefficients: Sequence[Coefficients],
    products: Products,
    gram_of: Callable[[Array, float], Array],
) -> Array:
    # R, every polynomial of it and their products are symmetric and commute.
    eye = jnp.eye(x.shape[-2], dtype=x.dtype)
    factor = eye  # Q, where X now is Q X
    for step, (a, b, c) in enumerate(coefficients):
        if step > 0 and step % _GRAM_REFRESH == 0:
            x, factor = matmul(factor, x), eye
            gram = gram_of(x, 1.0)
        polynomial = a * eye + b * products.add_square(gram, c / b)
        factor = polynomial if factor is eye else products.outer(factor, polynomial)
        last = step == len(coefficients) - 1 or (step + 1) % _GRAM_REFRESH == 0
        if not last:
            gram = products.outer(products.outer(polynomial, gram), polynomial)
    return matmul(factor, x)


_WHOLE = Products()
_HALVES = Products(outer_in_halves)
_FUSED = FusedProducts()
_KERNELS = KernelProducts()
