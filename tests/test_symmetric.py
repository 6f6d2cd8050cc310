"""Symmetric products: kernels in Pallas's interpreter against float64.

The bound: products of 16-bit numbers are exact in float32; a sum of n terms in any
order is off by n u times the sum of magnitudes, u = 2^-24, and the two products and the
sum of b A + c A A by 3 u more; then comes one rounding to the type of the result.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, PartitionSpec

from benchmarks.h100s import lowering_for_h100
from jax_muon.polar.kernels import (
    Tiling,
    gram,
    gram_kernel,
    quadratic,
    quadratic_kernel,
    tile_of,
)

SMALL = Tiling(tile=16, depth=16)
B, C = -2.8, 0.5  # of a step of the Polar Express, rounded


def matrices(shape, dtype="bfloat16", seed=0):
    """Gaussian matrices."""
    values = np.random.default_rng(seed).standard_normal(shape)
    return jnp.asarray(values, dtype)


def symmetric(shape, dtype="bfloat16", seed=0):
    """Gaussian matrices, the upper triangle a copy of the lower."""
    lower = jnp.tril(matrices((*shape, shape[-1]), dtype, seed))
    return lower + jnp.tril(lower, -1).mT


def double(x):
    """As a NumPy array in float64."""
    return np.asarray(x).astype(np.float64)


def assert_close(found, exact, magnitudes, terms):
    """Within the bound above; `magnitudes` are those of all terms of a sum."""
    info = jnp.finfo(found.dtype)
    summed = (terms + 3) * 2.0**-24 * magnitudes
    rounded = float(info.eps) / 2 * (np.abs(exact) + summed)
    tiny = float(info.smallest_normal)
    np.testing.assert_array_less(np.abs(double(found) - exact), summed + rounded + tiny)


def check_gram(found, x):
    x = double(x)
    transposed, size = np.swapaxes(x, -1, -2), np.abs(x)
    magnitudes = size @ np.swapaxes(size, -1, -2)
    assert_close(found, x @ transposed, magnitudes, x.shape[-1])


def check_quadratic(found, a, b=B, c=C):
    a, (b, c) = double(a), double(np.array([b, c], np.float32))
    size = np.abs(a)
    magnitudes = abs(b) * size + abs(c) * (size @ size)
    assert_close(found, b * a + c * (a @ a), magnitudes, a.shape[-1])


def assert_symmetric(x):
    np.testing.assert_array_equal(double(x), np.swapaxes(double(x), -1, -2))


@pytest.mark.parametrize("rows", [*range(1, 9), 301])
def test_programs_cover_the_triangle_once(rows):
    """Each tile of the lower triangle has one program, and there are no others."""
    programs = np.arange(rows * (rows + 1) // 2, dtype=np.int32)
    row, column = tile_of(programs, rows)
    found = sorted(zip(row.tolist(), column.tolist(), strict=True))
    assert found == [(i, j) for i in range(rows) for j in range(i + 1)]


@settings(max_examples=6, deadline=None)
@given(
    batch=st.lists(st.integers(1, 2), max_size=3),
    m=st.integers(1, 50),
    n=st.integers(1, 50),
    dtype=st.sampled_from(["bfloat16", "float16"]),
    result=st.sampled_from([None, "float32"]),
)
@example(batch=[], m=1, n=1, dtype="bfloat16", result=None)
@example(batch=[2], m=48, n=16, dtype="bfloat16", result="float32")
@example(batch=[], m=17, n=47, dtype="float16", result=None)
def test_gram_of_any_shape(batch, m, n, dtype, result):
    """Tall, wide, not a multiple of the tile, any rank, both types."""
    x = matrices((*batch, m, n), dtype)
    found = gram_kernel(x, result, tiling=SMALL, interpret=True)
    assert found.dtype == gram(x, result).dtype == jnp.dtype(result or dtype)
    assert_symmetric(found)
    check_gram(found, x)
    check_gram(gram(x, result), x)


@settings(max_examples=5, deadline=None)
@given(
    batch=st.lists(st.integers(1, 2), max_size=3),
    m=st.integers(1, 50),
    dtype=st.sampled_from(["bfloat16", "float16"]),
)
@example(batch=[], m=1, dtype="bfloat16")
@example(batch=[2], m=48, dtype="bfloat16")
@example(batch=[], m=33, dtype="float16")
def test_quadratic_of_any_shape(batch, m, dtype):
    """The type of the input, rounded once."""
    a = symmetric((*batch, m), dtype)
    found = quadratic_kernel(a, B, C, tiling=SMALL, interpret=True)
    assert found.dtype == quadratic(a, B, C).dtype == a.dtype
    assert_symmetric(found)
    check_quadratic(found, a)
    check_quadratic(quadratic(a, B, C), a)


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0, 4, 5), (2, 0, 0)])
def test_no_elements(shape):
    """An empty sum is 0."""
    x = jnp.zeros(shape, jnp.bfloat16)
    found = gram_kernel(x, tiling=SMALL, interpret=True)
    np.testing.assert_array_equal(double(found), double(gram(x)))
    assert found.shape == gram(x).shape


def test_default_tiling():
    """The tile of the card, with an edge on every side."""
    x = matrices((130, 70))
    check_gram(gram_kernel(x, jnp.float32, interpret=True), x)


def test_the_lower_triangle_decides():
    """What stands above the diagonal, also inside its tiles, is a copy."""
    a = symmetric((40,))
    upper = jnp.tril(a) + jnp.triu(jnp.full_like(a, 7.0), 1)
    for each in (a, upper):
        found = quadratic_kernel(each, 1.0, 0.0, tiling=SMALL, interpret=True)
        np.testing.assert_array_equal(double(found), double(a))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_values_that_are_not_finite_stay_in_their_rows(value):
    """Padding is zero, and no other row or matrix is touched."""
    x = matrices((2, 20, 20)).at[1, 18, 3].set(value)
    found = double(gram_kernel(x, tiling=SMALL, interpret=True))
    outside = np.delete(np.delete(found[1], 18, axis=0), 18, axis=1)
    assert np.isfinite(found[0]).all()
    assert np.isfinite(outside).all()
    assert not np.isfinite(found[1, 18]).any()


def step(x):
    """Both kernels, one after the other."""
    return quadratic_kernel(
        gram_kernel(x, tiling=SMALL, interpret=True),
        B,
        C,
        tiling=SMALL,
        interpret=True,
    )


def test_transformations_change_no_bit():
    """Each matrix alone, jit, vmap, shard_map."""
    x = matrices((2, 20, 17))
    expected = double(step(x))
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    axis = PartitionSpec("data")
    # Pallas's interpreter itself does not mark its loops as varying.
    sharded = jax.shard_map(
        step, mesh=mesh, in_specs=axis, out_specs=axis, check_vma=False
    )
    for transformed in (jax.jit(step), jax.vmap(step), jax.jit(sharded)):
        np.testing.assert_array_equal(double(transformed(x)), expected)
    np.testing.assert_array_equal(double(step(x[1])), expected[1])


def test_gram_times_a_factor():
    """Before it is rounded: 3 X X^T is not what three times the rounded one is."""
    x = matrices((20, 17))
    found = gram_kernel(x, factor=3.0, tiling=SMALL, interpret=True)
    expected = (3 * gram(x, jnp.float32)).astype(x.dtype)
    np.testing.assert_allclose(double(found), double(expected), rtol=2**-8, atol=2**-8)
    assert (double(found) != double((3 * gram(x)).astype(x.dtype))).any()


def test_factors_may_be_traced_and_mapped():
    """Schedules of coefficients need no new kernel."""
    a = symmetric((2, 20))
    b, c = jnp.array([1.5, -2.0]), jnp.float32(0.25)
    found = jax.jit(
        jax.vmap(lambda a, b: quadratic_kernel(a, b, c, tiling=SMALL, interpret=True))
    )(a, b)
    for i in range(2):
        check_quadratic(found[i], a[i], float(b[i]), 0.25)


def test_lowering_for_a_gpu_under_shard_map():
    """One triangle of tiles is launched for each matrix that a device holds."""
    axis = PartitionSpec("data")
    x = jax.ShapeDtypeStruct((24, 700, 3000), jnp.bfloat16)
    with lowering_for_h100(data=8):
        function = jax.shard_map(
            lambda x: quadratic_kernel(gram_kernel(x), B, C),
            in_specs=axis,
            out_specs=axis,
        )
        lowered = jax.jit(function).trace(x).lower(lowering_platforms=("cuda",))
    text = lowered.as_text()
    assert text.count("custom_call @__gpu$xla.gpu.triton") == 2
    assert re.findall(r"grid_[xyz] = (\d+)", text) == ["21", "3", "1"] * 2


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: gram_kernel(matrices((3,))), "x of shape"),
        (lambda: gram_kernel(matrices((3, 3), "float32")), "x of dtype float32"),
        (lambda: gram_kernel(matrices((3, 3)), "int32"), "dtype=int32"),
        (lambda: quadratic_kernel(matrices((2, 3)), B, C), "a of shape"),
        (lambda: quadratic_kernel(matrices((3, 3), "float32"), B, C), "a of dtype"),
        (lambda: gram_kernel(matrices((3, 3)), tiling=Tiling(24)), "tiling.tile=24"),
        (lambda: gram_kernel(matrices((3, 3)), tiling=Tiling(16, 8)), "tiling.depth=8"),
    ],
)
def test_bad_input(call, message):
    """Each error says what was given and what is expected."""
    with pytest.raises(ValueError, match=f"{message}.*expected"):
        call()
