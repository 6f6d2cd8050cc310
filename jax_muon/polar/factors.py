"""Polar factors: functions of arrays (..., m, n), one matrix independent of another.

A matrix X = U S V^T has the polar factor U V^T: the same directions, with every
singular value 1.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jax_muon.base import checks, facts
from jax_muon.base.dtypes import wide
from jax_muon.polar import iteration
from jax_muon.polar.coefficients import (
    NEWTON_SCHULZ,
    Coefficients,
    polar_express_coefficients,
    quintics,
)
from jax_muon.polar.hopper import takes_kernels
from jax_muon.polar.products import matmul


class Kernels(dict[tuple[int, int], bool]):
    """True if polar factors of (m, n), m <= n, take the kernels for Hopper GPUs."""


@dataclasses.dataclass(frozen=True)
class NewtonSchulz:
    """Approximate polar factors by an iteration with given quintics.

    An object holds settings alone, all of them static under `jax.jit`: objects with
    equal settings are equal and share a trace.

    Args:
      steps: number of quintics. None takes the whole sequence, and five where one
        quintic serves every step.
      coefficients: one (a, b, c) for every step, or a sequence, whose first `steps` are
        used. The default is Jordan's (https://kellerjordan.github.io/posts/muon/),
        which leaves singular values near 0.7 .. 1.2. A step with c = 0 takes two
        products instead of three.
      norm_factor: x is divided by `norm_factor * norm(x) + eps` before the first step.
      eps: see `norm_factor`. For norms below 2^-13 it shrinks with the norm, by up to
        2^-20, so that polar factors have their size down to norms of 1e-10.
      norm: "frobenius", or "schatten4", (sum of s^4)^(1/4): never larger, so that small
        singular values start nearer to 1.
      dtype: of the iteration: bfloat16, float32 or float64; None for that of the
        matrices, and float32 for float16. Sums are in at least float32, and rounded
        once. Matrices of one row or column take at least float32.
      form: "standard", "gram" (not in bfloat16, where singular values reach 28), or
        "auto": "gram" where it is faster.
      kernels: by kernels for H100s and H200s that compute one triangle of symmetric
        products, for bfloat16 matrices of 384 rows and columns or more. None takes them
        where every GPU is one of these; True raises an error where one is not, or JAX
        cannot compile them; False never takes them. Without a GPU, True is for programs
        that are compiled for another machine. `describe` shows the choice.

    Raises:
      ValueError: a setting is not one of these, or is traced; more steps than quintics;
        coefficients that are not finite.

    Examples:
      >>> x = jax.random.normal(jax.random.key(0), (3, 8, 16))
      >>> table = [*7 * [(3.4445, -4.775, 2.0315)], *3 * [(2.0, -1.5, 0.5)]]
      >>> y = NewtonSchulz(coefficients=table, dtype="float32")(x)
      >>> bool(jnp.allclose(y @ y.mT, jnp.eye(8)[None], atol=0.05))
      True
    """

    steps: int | None = None
    _: dataclasses.KW_ONLY
    coefficients: Coefficients | Sequence[Coefficients] = NEWTON_SCHULZ
    norm_factor: float = 1.0
    eps: float = 1e-7
    norm: str = "frobenius"
    dtype: jax.typing.DTypeLike | None = "bfloat16"
    form: str = "auto"
    kernels: bool | None = None

    def __post_init__(self) -> None:
        checks.check_choice("norm", self.norm, ("frobenius", "schatten4"))
        checks.check_choice("form", self.form, ("auto", "standard", "gram"))
        checks.check_kind("kernels", self.kernels, bool | None, "None, True or False")
        # float16 has too few exponents for Gram matrices.
        dtype = None if self.dtype is None else jnp.dtype(self.dtype).name
        if dtype not in (None, "bfloat16", "float32", "float64"):
            checks.refuse("dtype", self.dtype, "bfloat16, float32 or float64, or None")
        if self.kernels and dtype != "bfloat16":
            expected = "dtype=bfloat16, or kernels=None"
            raise ValueError(f"kernels=True with dtype={dtype}; expected {expected}")
        if self.form == "gram" and dtype == "bfloat16":
            raise ValueError(
                f"form='gram' with dtype={dtype}, where singular values reach 28; "
                "expected dtype=float32, or form='standard'"
            )
        table = quintics(self.coefficients, self.steps)
        normal = {"coefficients": table, "steps": len(table), "dtype": dtype}
        for name in ("norm_factor", "eps"):
            normal[name] = checks.as_number(name, getattr(self, name), "above 0")
        for name, value in normal.items():
            object.__setattr__(self, name, value)

    def __call__(self, x: Float[Array, "*batch m n"]) -> Float[Array, "*batch m n"]:
        """Approximate polar factors, in the dtype of x. Zero matrices give zeros.

        Args:
          x: matrices in the last two axes, tall or wide, any real floating dtype.
        """
        _check_matrices(x)
        stack = x.reshape(math.prod(x.shape[:-2]), *x.shape[-2:])
        return self.from_stacks([stack]).reshape(x.shape)

    def from_stacks(
        self, stacks: Sequence[Float[Array, "_ m n"]]
    ) -> Float[Array, "k m n"]:
        """The polar factors of several stacks of one shape and dtype, as one stack."""
        if not stacks[0].size:
            return jnp.concatenate(stacks)
        m, n = sorted(stacks[0].shape[-2:])
        dtype = self.dtype or stacks[0].dtype
        kernels = dtype == "bfloat16" and takes_kernels(self.kernels, m)
        facts.record(Kernels)[m, n] = kernels
        return iteration.iterate(tuple(stacks), self, kernels)


@dataclasses.dataclass(frozen=True)
class PolarExpress(NewtonSchulz):
    """A `NewtonSchulz` by the Polar Express, arXiv 2505.16932: optimal quintics.

    Args:
      steps: number of quintics.
      lower_bound: smallest relative singular value that is brought to 1.
      norm_factor: see `NewtonSchulz`, also for all other settings. For another cushion
        or safety, see `jax_muon.polar.coefficients`.
      eps: see `norm_factor`.

    Examples:
      >>> x = jax.random.normal(jax.random.key(0), (3, 8, 16))
      >>> y = PolarExpress(8, dtype="float32")(x)
      >>> bool(jnp.allclose(y @ y.mT, jnp.eye(8)[None], atol=1e-4))
      True
    """

    steps: int = 5
    _: dataclasses.KW_ONLY
    lower_bound: float = 1e-3
    coefficients: Any = dataclasses.field(init=False, repr=False)
    norm_factor: float = 1.02
    eps: float = 1e-6

    def __post_init__(self) -> None:
        table = polar_express_coefficients(self.steps, lower_bound=self.lower_bound)
        object.__setattr__(self, "coefficients", table)
        super().__post_init__()


@dataclasses.dataclass(frozen=True)
class ExactPolar:
    """Exact polar factors U V^T by the singular value decomposition.

    Examples:
      >>> x = jnp.array([[3.0, 0.0, 0.0], [0.0, 0.0, -2.0]])
      >>> bool(jnp.allclose(ExactPolar()(x), jnp.sign(x)))
      True
    """

    def __call__(self, x: Float[Array, "*batch m n"]) -> Float[Array, "*batch m n"]:
        """Exact polar factors, in the dtype of x, by an SVD in at least float32.

        Singular values become 1, or 0 if at most `max(m, n) * eps(dtype)` of the
        largest. A matrix with a NaN or an infinite entry gives NaN.
        """
        _check_matrices(x)
        # LAPACK does not return from some matrices with infinite entries.
        finite = jnp.isfinite(x).all(axis=(-2, -1), keepdims=True)
        u, s, vt = jnp.linalg.svd(wide(jnp.where(finite, x, 0)), full_matrices=False)
        rank_tol = max(x.shape[-2:]) * jnp.finfo(s.dtype).eps
        keep = s > rank_tol * s[..., :1]
        polar = matmul(u * keep[..., None, :], vt).astype(x.dtype)
        return jnp.where(finite, polar, jnp.nan)


def _check_matrices(x: Array) -> None:
    if x.ndim < 2:
        expected = "an array (..., m, n)" + (
            "" if x.ndim else checks.injected(x, "polar")
        )
        raise ValueError(f"shape {x.shape}; expected {expected}")
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"dtype {x.dtype}; expected real floating-point matrices")
