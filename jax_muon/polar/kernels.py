"""The two symmetric products of an orthogonalization step, plain and as GPU kernels.

  gram(x)             X X^T
  quadratic(a, b, c)  b A + c A A, for symmetric A

A matrix product computes both triangles of these results. The kernels compute the tiles
of the lower one and store each tile twice, the second time transposed. They are written
for Hopper (sm_90: H100, H200) with Pallas's Mosaic GPU backend (`hopper`), for 16-bit
floats, whose products accumulate in float32 and are rounded once.

`PolarExpress(symmetric="kernel")` uses them on NVIDIA GPUs. It is not the default: they
are compiled and checked in Pallas's interpreter, but not yet run on a GPU
(docs/speed.md).
"""

import functools
import math
import re
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jax_muon.dtypes import wider

_INPUTS = (jnp.bfloat16, jnp.float16)


class Tiling(NamedTuple):
    """How a kernel cuts its work; docs/speed.md has the reasons.

    Each program computes a tile of 128 x `columns` elements, 64 columns of the matrices
    at a time, while the next `stages` - 1 pieces of that depth are loaded.
    """

    columns: int = 256
    stages: int = 4


HOPPER = Tiling()


def matmul(
    x: Float[Array, "*batch m k"],
    y: Float[Array, "*batch k n"],
    dtype: jax.typing.DTypeLike | None = None,
) -> Float[Array, "*batch m n"]:
    """X Y summed in at least float32, in a dtype; None: not rounded below that."""
    return jnp.matmul(x, y, **_accumulation(x.dtype, dtype))


def outer(
    x: Float[Array, "*batch m k"],
    y: Float[Array, "*batch n k"],
    dtype: jax.typing.DTypeLike | None = None,
) -> Float[Array, "*batch m n"]:
    """X Y^T, as `matmul`. With `y.mT` in place of y a CPU would copy the transpose."""
    return jnp.einsum("...mk,...nk->...mn", x, y, **_accumulation(x.dtype, dtype))


def _accumulation(
    operands: jnp.dtype, dtype: jax.typing.DTypeLike | None
) -> dict[str, Any]:
    wide = wider(operands, jnp.float32)
    return {
        # HIGHEST: on a GPU, float32 would otherwise run through TF32 with 10 bits.
        "precision": jax.lax.Precision.HIGHEST if operands == wide else None,
        "preferred_element_type": wide if dtype is None else dtype,
    }


def gram(
    x: Float[Array, "*batch m n"], dtype: jax.typing.DTypeLike | None = None
) -> Float[Array, "*batch m m"]:
    """X X^T, rounded once.

    Args:
      x: matrices in the last two axes, any floating dtype.
      dtype: of the result; None for the dtype of x.

    Returns:
      The symmetric matrices.
    """
    return outer(x, x).astype(x.dtype if dtype is None else dtype)


def quadratic(
    a: Float[Array, "*batch m m"],
    b: float | Float[Array, ""],
    c: float | Float[Array, ""],
) -> Float[Array, "*batch m m"]:
    """b A + c A A, rounded once.

    Args:
      a: matrices in the last two axes, any floating dtype.
      b: factor of A.
      c: factor of A A.

    Returns:
      An array with the shape and dtype of a.
    """
    square = matmul(a, a)
    return (b * a.astype(square.dtype) + c * square).astype(a.dtype)


def gram_kernel(
    x: Float[Array, "*batch m n"],
    dtype: jax.typing.DTypeLike | None = None,
    *,
    factor: float | Float[Array, ""] = 1.0,
    tiling: Tiling = HOPPER,
) -> Float[Array, "*batch m m"]:
    """X X^T as `gram` computes it, by a GPU kernel that computes one triangle.

    Args:
      x: matrices in the last two axes, bfloat16 or float16. float32 is refused: the
        tensor cores of a GPU do not multiply it without rounding.
      dtype: of the result, a floating dtype of at most 32 bits; None for that of x.
      factor: of the product, before it is rounded.
      tiling: sizes of the kernel.

    Returns:
      The matrices, equal to their transposes bit by bit.

    Raises:
      ValueError: x has fewer than two axes or another dtype, a size of the kernel is
        not one that it can have, or the GPU or the version of JAX cannot run it.

    Examples:
      >>> x = jnp.ones((3, 500, 2000), jnp.bfloat16)
      >>> jax.eval_shape(gram_kernel, x).shape
      (3, 500, 500)
    """
    _check_matrices("x", x)
    return _symmetric_product(x, dtype, (factor,), tiling)


def quadratic_kernel(
    a: Float[Array, "*batch m m"],
    b: float | Float[Array, ""],
    c: float | Float[Array, ""],
    *,
    tiling: Tiling = HOPPER,
) -> Float[Array, "*batch m m"]:
    """b A + c A A as `quadratic` computes it, by a GPU kernel, for symmetric A.

    Args:
      a: symmetric matrices in the last two axes, bfloat16 or float16. Symmetry is not
        checked: of A A^T, which the kernel computes, the lower triangle decides.
      b: factor of A.
      c: factor of A A.
      tiling: sizes of the kernel.

    Returns:
      An array with the shape and dtype of a, equal to its transpose bit by bit.

    Raises:
      ValueError: a has fewer than two axes or is not square, or another dtype, a size
        of the kernel is not one that it can have, or the GPU or the version of JAX
        cannot run it.

    Examples:
      >>> a = jnp.ones((3, 500, 500), jnp.bfloat16)
      >>> jax.eval_shape(quadratic_kernel, a, 1.0, 2.0).shape
      (3, 500, 500)
    """
    _check_matrices("a", a)
    if a.shape[-2] != a.shape[-1]:
        raise ValueError(f"a of shape {a.shape}; expected square matrices (..., m, m)")
    return _symmetric_product(a, None, (c, b), tiling)


def _symmetric_product(
    x: Array,
    dtype: jax.typing.DTypeLike | None,
    factors: tuple[Any, ...],
    tiling: Tiling,
) -> Array:
    """c X X^T with factors (c,), or c X X^T + b X with (c, b)."""
    _check_tiling(tiling)
    *batch, m, n = x.shape
    wanted = jax.eval_shape(functools.partial(gram, dtype=dtype), x)
    if wanted.dtype not in (*_INPUTS, jnp.float32):
        raise ValueError(f"dtype={wanted.dtype}; expected bfloat16, float16 or float32")
    if x.size == 0:
        return gram(x, dtype)
    hopper = _hopper()
    _check_card()
    stack = _padded(x.reshape(math.prod(batch), m, n), hopper.SQUARE)
    result = jax.ShapeDtypeStruct((*stack.shape[:2], stack.shape[1]), wanted.dtype)
    # Factors are an operand, not constants of the kernel: all steps share one kernel.
    operand = jnp.stack([jnp.asarray(factor, jnp.float32) for factor in factors])
    product = hopper.symmetric_product(stack, operand, result, *tiling)
    return product[:, :m, :m].reshape(*batch, m, m)


def _padded(x: Array, multiple: int) -> Array:
    """With zeros up to multiples of a size in the last two axes."""
    pads = [(0, 0), *((0, -size % multiple) for size in x.shape[1:])]
    return jnp.pad(x, pads) if any(after for _, after in pads) else x


def _hopper() -> ModuleType:
    """The kernels, imported where one is called: Pallas takes half a second to load."""
    try:
        from jax_muon.polar import hopper
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"jax {jax.__version__} without Pallas's Mosaic GPU backend, which the "
            f"kernels need ({error}); expected jax 0.10.1 to 0.12, or symmetric='plain'"
        ) from error
    return hopper


def _check_card() -> None:
    """Refuse NVIDIA GPUs of other generations, which lack the kernels' instructions."""
    if jax.default_backend() != "gpu":
        return  # compiled for a GPU elsewhere, interpreted, or a branch not taken
    found = getattr(jax.devices()[0], "compute_capability", "")
    if re.fullmatch(r"\d+\.\d+", found) and found != "9.0":
        raise ValueError(
            f"a GPU of compute capability {found}; expected 9.0 (H100, H200), or "
            "symmetric='plain'"
        )


def _check_matrices(name: str, x: Array) -> None:
    if x.ndim < 2:
        raise ValueError(f"{name} of shape {x.shape}; expected an array (..., m, n)")
    if x.dtype not in _INPUTS:
        raise ValueError(f"{name} of dtype {x.dtype}; expected bfloat16 or float16")


def _check_tiling(tiling: Tiling) -> None:
    if tiling.columns not in (128, 256):
        raise ValueError(f"tiling.columns={tiling.columns}; expected 128 or 256")
    if tiling.stages < 2:
        raise ValueError(f"tiling.stages={tiling.stages}; expected at least 2")
