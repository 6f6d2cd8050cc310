"""Arrays (..., m, n) to arrays: the orthogonal factor of every matrix in a batch.

A matrix X = U S V^T has the polar factor U V^T: the same directions, every singular
value 1. `ExactPolar` computes it by the SVD; `PolarExpress` and `NewtonSchulz` come
close with matrix products alone, in `iteration.py`. Each is an object that holds its
settings, checked when it is made, and is called on arrays. Nothing here knows what a
parameter or a mesh is.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jax_muon.checks import check_choice, check_count, number, refuse
from jax_muon.polar.coefficients import (
    MAX_STEPS,
    Coefficients,
    normal_coefficients,
    polar_express_coefficients,
    quintics,
)
from jax_muon.polar.iteration import (
    Settings,
    dtype_of,
    iterate,
    power_of_two_scaled,
    refreshes,
    uses_gram,
)
from jax_muon.polar.kernels import matmul

_DTYPES = ("bfloat16", "float16", "float32", "float64")

_Class = TypeVar("_Class", bound=type)


def _register(cls: _Class) -> _Class:
    """Make a dataclass a pytree whose leaves are `norm_factor` and `eps`.

    Unlike `jax.tree_util.register_dataclass`, it rebuilds objects without `__init__`:
    JAX puts placeholders in the place of leaves, which the checks would refuse.
    """
    names = [field.name for field in dataclasses.fields(cls)]
    data = [name for name in names if name in ("norm_factor", "eps")]
    meta = [name for name in names if name not in data]

    def flatten_with_keys(polar: Any) -> Any:
        keys = map(jax.tree_util.GetAttrKey, data)
        leaves = [getattr(polar, name) for name in data]
        return list(zip(keys, leaves, strict=True)), tuple(
            getattr(polar, name) for name in meta
        )

    def unflatten(static: Any, leaves: Any) -> Any:
        polar: Any = object.__new__(cls)
        for name, value in zip(data + meta, (*leaves, *static), strict=True):
            object.__setattr__(polar, name, value)
        return polar

    jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten)
    return cls


# With slots, since `jax.jit` copies the `__dict__` of the function that it wraps: the
# setting `lower` would hide the method `lower` of what `jax.jit` returns.
@dataclasses.dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class _Iteration:
    """What `PolarExpress` and `NewtonSchulz` share: all but their quintics."""

    steps: int | None = 5
    _: dataclasses.KW_ONLY
    norm_factor: float | Array = 1.0
    eps: float | Array = 1e-7
    norm: str = "frobenius"
    dtype: jax.typing.DTypeLike | None = "bfloat16"
    form: str = "auto"
    symmetric: str = "plain"

    def __post_init__(self) -> None:
        self._set(
            norm_factor=number("norm_factor", self.norm_factor, "above 0"),
            eps=number("eps", self.eps, "above 0"),
            dtype=_checked_dtype(self.dtype),
        )
        check_choice("norm", self.norm, ("frobenius", "schatten4"))
        check_choice("form", self.form, ("auto", "standard", "gram"))
        check_choice("symmetric", self.symmetric, ("plain", "kernel"))
        if self.dtype is not None:
            self._check_dtype(jnp.dtype(self.dtype))

    def table(self) -> tuple[Coefficients, ...]:
        """The quintics (a, b, c), one for each step, as Python floats."""
        raise NotImplementedError

    def __call__(
        self,
        x: Float[Array, "*batch m n"],
        *,
        axis_name: str | Sequence[str] | None = None,
    ) -> Float[Array, "*batch m n"]:
        """Approximate polar factors.

        Args:
          x: matrices in the last two axes, tall or wide, any real floating dtype.
          axis_name: inside shard_map, the mesh axis, or axes, over which the last axis
            of x is divided, the longer one of the whole matrix. Gram matrices (m, m)
            are summed over it, `gram_sums` times; each device computes its piece.

        Returns:
          An array with the shape and dtype of x. Zero matrices give zeros.

        Raises:
          ValueError: x has fewer than two axes or is not real floating point, or with
            dtype=None the iteration is not possible in its dtype; float64 without
            jax_enable_x64.
        """
        _check_matrices(x)
        dtype = jnp.dtype(_checked_dtype(x.dtype if self.dtype is None else self.dtype))
        self._check_dtype(dtype)
        if dtype != jax.dtypes.canonicalize_dtype(dtype):
            raise ValueError(
                f"dtype={dtype} without jax.config.update('jax_enable_x64', True); "
                "expected float32, float16 or bfloat16"
            )
        if x.size == 0:
            return x
        axes = (axis_name,) if isinstance(axis_name, str) else axis_name
        settings = Settings(
            self.table(),
            self.norm,
            dtype,
            self.form,
            self.symmetric,
            None if axes is None else tuple(axes),
        )
        return iterate(x, self.norm_factor, self.eps, settings)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Iteration) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def gram_sums(self, m: int, n: int) -> int | None:
        """How often Gram matrices are summed over the mesh for a matrix (m, n).

        Args:
          m: shorter side of the whole matrix.
          n: longer side, which is divided over the axes of `axis_name`.

        Returns:
          The number of sums; for dtype=None, that of float32.
        """
        table = self.table()
        dtype = dtype_of(jnp.dtype(self.dtype or "float32"), m)
        gram = uses_gram(self.form, dtype, m, n)
        return len(refreshes(table, dtype)) if gram else len(table)

    def _key(self) -> tuple[Any, ...]:
        """Equal for equal settings, where a traced number is equal to itself alone."""
        values = [getattr(self, field.name) for field in dataclasses.fields(self)]
        hashable = (int, float, str, tuple, type(None))
        known = [v if isinstance(v, hashable) else id(v) for v in values]
        return (type(self), *known)

    def _set(self, **normal: Any) -> None:
        """Replace settings by their normal form, while the object is being made."""
        for name, value in normal.items():
            object.__setattr__(self, name, value)

    def _check_dtype(self, dtype: jnp.dtype) -> None:
        if self.symmetric == "kernel" and jnp.finfo(dtype).bits != 16:
            raise ValueError(
                f"symmetric='kernel' with dtype={dtype}; expected dtype=bfloat16 or "
                "float16, or symmetric='plain'"
            )
        if self.form == "gram" and dtype == jnp.bfloat16:
            raise ValueError(
                f"form='gram' with dtype={dtype}, where singular values reach 28; "
                "expected dtype=float16 or float32, or form='standard'"
            )
        for a, b, c in self.table() if dtype == jnp.float16 else ():
            inside = 0.1 <= abs(a) <= 100 and 0.01 <= abs(b / a) <= 100
            if not (inside and abs(c / b) <= 100):
                raise ValueError(
                    f"coefficients ({a}, {b}, {c}) with dtype=float16, whose range is "
                    "short; expected |a| from 0.1 to 100, |b / a| from 0.01 to 100 and "
                    "|c / b| up to 100, or dtype=bfloat16"
                )


@_register
@dataclasses.dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class PolarExpress(_Iteration):
    """Polar factors by the Polar Express: an optimal quintic for each step.

    Args:
      steps: number of quintics, a Python integer from 1 to 1000.
      lower: smallest relative singular value that is brought to 1; see
        `polar_express_coefficients`, also for `cushion` and `safety`.
      cushion: lower end of each step's interval, relative to its upper end.
      safety: margin for rounding in every step but the last.
      norm_factor: x is divided by `norm_factor * norm(x) + eps` before the first step.
        It and `eps` may be traced: they are the leaves of this object as a pytree.
      eps: see `norm_factor`. Matrices with a much smaller norm stay small.
      norm: "frobenius", or "schatten4", (sum of s^4)^(1/4): never larger, so that small
        singular values start nearer to 1.
      dtype: of the iteration: bfloat16, float16, float32, float64; None for the dtype
        of x. In 16 bits, sums are in float32 and rounded once on a CPU and where XLA
        takes cuBLASLt. Elsewhere every term is rounded: an error of 0.04 instead of
        0.016 on a Gaussian (64, 256) in bfloat16. float16 is eight times as accurate;
        GPUs multiply both at one rate, which none has shown here yet, and CPUs convert
        it. Powers of two keep what it holds in its range, for singular values up to 1.2
        on their way. Matrices of one row or column take at least float32.
      form: "standard", "gram" (not in bfloat16, where it is useless: singular values
        reach 28), or "auto": "gram" where it is faster, which in float16 no GPU has
        shown yet.
      symmetric: "plain", or "kernel": on an H100 or H200, kernels that compute one
        triangle of symmetric products (`jax_muon.polar.kernels`), in 16 bits; other
        NVIDIA GPUs are refused. Not yet run on a GPU.

    Raises:
      ValueError: a setting is not one of these, or is not known while tracing, or
        coefficients are too far apart for float16.

    Examples:
      >>> x = jax.random.normal(jax.random.key(0), (3, 8, 16))
      >>> y = PolarExpress(8, dtype="float32")(x)
      >>> bool(jnp.allclose(y @ y.mT, jnp.eye(8), atol=1e-4))
      True

    References:
      Amsel, Persson, Musco, Gower, The Polar Express, arXiv 2505.16932.
    """

    steps: int = dataclasses.field(default=5, kw_only=False)
    lower: float = 1e-3
    cushion: float = 0.02
    safety: float = 0.02
    norm_factor: float | Array = 1.02
    eps: float | Array = 1e-6

    def __post_init__(self) -> None:
        check_count("steps", self.steps, most=MAX_STEPS)
        self.table()  # which checks the settings of the schedule
        self._set(
            steps=int(self.steps),
            lower=float(self.lower),
            cushion=float(self.cushion),
            safety=float(self.safety),
        )
        _Iteration.__post_init__(self)  # super() would name the class without slots

    def table(self) -> tuple[Coefficients, ...]:
        """The quintics (a, b, c), one for each step, as Python floats."""
        return polar_express_coefficients(
            self.steps, lower=self.lower, cushion=self.cushion, safety=self.safety
        )


@_register
@dataclasses.dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class NewtonSchulz(_Iteration):
    """Approximate polar factors by an iteration with given quintics.

    Args:
      steps: number of quintics, a Python integer from 1 to 1000, at most as many as
        there are. None takes all of a table: ten of "deepseek", whose last two differ
        from the others; five where one quintic serves every step.
      coefficients: one (a, b, c) for every step; a sequence of at least `steps`, of
        which the first are used; or the name of a published table: "jordan", which
        leaves singular values near 0.7 .. 1.2, "you", "cans", "deepseek", "cubic5" (c
        is 0: two products a step instead of three), "nanochat" or
        "polar_express_paper". `jax_muon.polar.coefficients` names their sources. A step
        divides by a and b, which must not be 0.
      norm_factor: see `PolarExpress`, also for all settings below.
      eps: added to the norm.
      norm: "frobenius" or "schatten4".
      dtype: of the iteration.
      form: "standard", "gram" or "auto".
      symmetric: "plain" or "kernel".

    Raises:
      ValueError: as `PolarExpress`; more steps than quintics, |a| outside 1e-6 to 1e6,
        b = 0, or |b / a| or |c / b| above 1e6.

    Examples:
      >>> x = jax.random.normal(jax.random.key(0), (3, 8, 16))
      >>> y = NewtonSchulz(coefficients="deepseek", dtype="float32")(x)
      >>> bool(jnp.allclose(y @ y.mT, jnp.eye(8), atol=0.05))
      True

    References:
      Jordan et al., Muon, https://kellerjordan.github.io/posts/muon/
    """

    steps: int | None = dataclasses.field(default=None, kw_only=False)
    coefficients: str | Coefficients | Sequence[Coefficients] = "jordan"

    def __post_init__(self) -> None:
        steps = len(self.table())
        coefficients = self.coefficients
        if not isinstance(coefficients, str):
            coefficients = normal_coefficients(coefficients)
        self._set(steps=steps, coefficients=coefficients)
        _Iteration.__post_init__(self)  # super() would name the class without slots

    def table(self) -> tuple[Coefficients, ...]:
        """The quintics (a, b, c), one for each step, as Python floats."""
        return quintics(self.coefficients, self.steps)


@_register
@dataclasses.dataclass(frozen=True, slots=True, weakref_slot=True)
class ExactPolar:
    """Exact polar factors U V^T by the singular value decomposition.

    Examples:
      >>> x = jnp.array([[3.0, 0.0, 0.0], [0.0, 0.0, -2.0]])
      >>> bool(jnp.allclose(ExactPolar()(x), jnp.sign(x)))
      True
    """

    def __call__(self, x: Float[Array, "*batch m n"]) -> Float[Array, "*batch m n"]:
        """Exact polar factors.

        Args:
          x: matrices in the last two axes, any real floating dtype. bfloat16 and
            float16 are decomposed in float32.

        Returns:
          An array with the shape and dtype of x. For a matrix of rank r it has r
          singular values 1 and the others 0, where the rank counts singular values
          above `max(m, n) * eps(dtype)` of the largest. Zero matrices give zeros.

        Raises:
          ValueError: x has fewer than two axes or is not real floating point.
        """
        _check_matrices(x)
        if x.size == 0:
            return x
        y, _ = power_of_two_scaled(x)
        u, s, vt = jnp.linalg.svd(y, full_matrices=False)
        rank_tol = max(x.shape[-2:]) * jnp.finfo(y.dtype).eps
        keep = s > rank_tol * s[..., :1]
        return matmul(u * keep[..., None, :], vt).astype(x.dtype)

    def gram_sums(self, m: int, n: int) -> int | None:
        """None: an SVD cannot work from summed Gram matrices."""
        del m, n
        return None


def _check_matrices(x: Array) -> None:
    if x.ndim < 2:
        raise ValueError(f"shape {x.shape}; expected an array (..., m, n)")
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"dtype {x.dtype}; expected real floating-point matrices")


def _checked_dtype(dtype: Any) -> str | None:
    """The name of a dtype in which an iteration is possible; None stays None."""
    if dtype is None:
        return None
    try:
        name = jnp.dtype(dtype).name
    except (TypeError, ValueError):
        name = ""
    if name not in _DTYPES:  # others have too few exponents
        refuse(
            "dtype",
            dtype,
            f"{', '.join(_DTYPES)}, in which an iteration is possible, or None where x "
            "has one of them; under optax.inject_hyperparams a string",
        )
    return name
