"""Symmetric products: kernels in Pallas's interpreter against float64.

The bound: products of 16-bit numbers are exact in float32; a sum of n terms in any
order is off by n u times the sum of magnitudes, u = 2^-24, and the two products and the
sum of b A + c A A by 3 u more; then comes one rounding to the type of the result.
"""

import subprocess
import sys
import types

import jax
import jax.experimental.pallas
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

import jax_muon as jm
from benchmarks.schedule.h100s import lowering_for_h100
from jax_muon.polar.hopper import gram, kernel, quadratic
from jax_muon.polar.hopper.kernel import Tiling
from jax_muon.polar.products import outer
from tests.interpreter import interpreted, needs_interpreter

NARROW = Tiling(columns=128, stages=2)
B, C = -2.8, 0.5  # of a step of the Polar Express, rounded


def matrices(shape, dtype="bfloat16"):
    """Gaussian matrices."""
    return jnp.asarray(np.random.default_rng(0).standard_normal(shape), dtype)


def symmetric(shape):
    """Gaussian matrices, the upper triangle a copy of the lower."""
    lower = jnp.tril(matrices((*shape, shape[-1])))
    return lower + jnp.tril(lower, -1).mT


def double(x):
    """As a NumPy array in float64."""
    return np.asarray(x).astype(np.float64)


def assert_close(found, exact, magnitudes, terms):
    """Symmetric, and within the bound; `magnitudes` are of all terms of a sum."""
    np.testing.assert_array_equal(double(found), np.swapaxes(double(found), -1, -2))
    info = jnp.finfo(found.dtype)
    summed = (terms + 3) * 2.0**-24 * magnitudes
    rounded = float(info.eps) / 2 * (np.abs(exact) + summed)
    tiny = float(info.smallest_normal)
    np.testing.assert_array_less(np.abs(double(found) - exact), summed + rounded + tiny)


def check_gram(found, x, factor):
    x = double(x)
    exact, magnitudes = (factor * y @ np.swapaxes(y, -1, -2) for y in (x, np.abs(x)))
    assert_close(found, exact, magnitudes, x.shape[-1])


def check_quadratic(found, a, b=B, c=C):
    a, (b, c) = double(a), double(np.array([b, c], np.float32))
    size = np.abs(a)
    magnitudes = abs(b) * size + abs(c) * (size @ size)
    assert_close(found, b * a + c * (a @ a), magnitudes, a.shape[-1])


@pytest.mark.parametrize("columns", [128, 256])
@pytest.mark.parametrize("m", [64, 128, 320, 768, 832, 19200])
def test_programs_cover_the_triangle_once(m, columns):
    """Each square of 64 x 64 on or below the diagonal, in one tile and no other."""
    tiles = np.arange(kernel.tiles_of(m, columns), dtype=np.int32)
    rows, lefts = (np.asarray(x) // 64 for x in kernel.corner(tiles, m, columns))
    count = np.zeros((m // 64 + 4,) * 2, int)  # with what tiles have beyond the edge
    for row, left in zip(rows, lefts, strict=True):
        count[row : row + 2, left : left + columns // 64] += 1
    inside = np.tril(np.ones((m // 64,) * 2, bool))
    assert (count[: m // 64, : m // 64][inside] == 1).all()


@needs_interpreter
@pytest.mark.parametrize(
    ("shape", "result", "tiling"),
    [
        ((2, 1, 130, 70), "bfloat16", Tiling()),
        ((2, 200, 300), "bfloat16", NARROW),
        ((320, 190), "float32", Tiling()),
        ((2, 0, 3), "bfloat16", Tiling()),
        ((4, 0), "bfloat16", Tiling()),  # an empty sum is 0
    ],
    ids=str,
)
def test_gram_of_any_shape(shape, result, tiling):
    """Tall, wide, not a multiple of a tile, any rank; reused memory.

    The factor comes before the rounding.
    """
    x = matrices(shape)
    with interpreted():
        found = gram(x, result, factor=3.0, tiling=tiling)
    assert (found.shape, found.dtype) == ((*shape[:-1], shape[-2]), result)
    check_gram(found, x, 3.0)


@needs_interpreter
@pytest.mark.parametrize("shape", [(1,), (2, 190), (330,)], ids=str)
def test_quadratic_of_any_shape(shape):
    """The type of the input, rounded once; with two stages parts of A take turns."""
    a = symmetric(shape)
    with interpreted():
        found = quadratic(a, B, C, tiling=Tiling(stages=2))
    assert found.dtype == a.dtype
    check_quadratic(found, a)


@needs_interpreter
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # NumPy, inf * 0
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_values_that_are_not_finite_stay_in_their_rows(value):
    """Padding is zero, and no other row or matrix is touched."""
    x = matrices((2, 80, 20)).at[1, 18, 3].set(value)
    with interpreted():
        found = double(gram(x, tiling=NARROW))
    outside = np.delete(np.delete(found[1], 18, axis=0), 18, axis=1)
    assert np.isfinite(found[0]).all()
    assert np.isfinite(outside).all()
    assert not np.isfinite(found[1, 18]).any()


@needs_interpreter
def test_transformations_change_no_bit():
    """Each matrix alone, jit, vmap, shard_map; factors that are traced and mapped."""
    a, b, c = symmetric((2, 70)), jnp.array([1.5, B]), jnp.float32(C)
    # The interpreter of jax 0.10 waits forever for a second device, and does not mark
    # its loops as varying.
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    axis = PartitionSpec("data")

    def kernel(a, b=B):
        return quadratic(a, b, c, tiling=NARROW)

    sharded = jax.shard_map(
        kernel, mesh=mesh, in_specs=axis, out_specs=axis, check_vma=False
    )
    with interpreted():
        expected = double(kernel(a))
        np.testing.assert_array_equal(double(jax.jit(sharded)(a)), expected)
        mapped = jax.vmap(kernel)(a, b)
        np.testing.assert_array_equal(double(mapped[1]), expected[1])
        check_quadratic(mapped[0], a[0], 1.5)


def test_lowering_for_a_gpu_under_shard_map(x64):
    """Both kernels for the matrices that a device holds, also beside plain products.

    They count with 32 bits where integers have 64.
    """
    axis = PartitionSpec("data")
    x = jax.ShapeDtypeStruct((24, 700, 3000), jnp.bfloat16)

    def steps(x):
        a = jax.lax.platform_dependent(
            x, cuda=gram, default=lambda x: outer(x, x).astype(x.dtype)
        )
        return quadratic(a, B, C)

    with lowering_for_h100(data=8):
        function = jax.shard_map(steps, in_specs=axis, out_specs=axis)
        lowered = jax.jit(function).trace(x).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("custom_call @mosaic_gpu") == 2


def test_kernels_are_imported_for_themselves_alone():
    """Pallas takes half a second to load; jax.extend brings 30 ms of it along."""
    code = (
        "import sys, jax.numpy as jnp, jax_muon as jm; jm.PolarExpress()(jnp.eye(3)); "
        "print(any('hopper' in x or 'experimental.pallas' in x for x in sys.modules))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert run.stdout == b"False\n"


def test_without_the_backend(monkeypatch):
    """A version of JAX that has none: plain products go on, kernels say what lacks."""
    name = "mosaic_gpu"
    monkeypatch.setitem(sys.modules, f"jax.experimental.pallas.{name}", None)
    monkeypatch.delattr(jax.experimental.pallas, name)
    for module in [x for x in sys.modules if x.startswith("jax_muon.polar.hopper")]:
        monkeypatch.delitem(sys.modules, module)
    x = matrices((4, 6), "float32")
    jm.PolarExpress()(x)
    with pytest.raises(ImportError, match=r"Mosaic GPU.*expected.*symmetric='plain'"):
        jm.PolarExpress(symmetric="kernel")(x)


def test_bad_input(monkeypatch):
    """Of an A100, too, which has none of the instructions."""
    wide, three = matrices((3, 3), "float32"), matrices((2, 3))
    with pytest.raises(ValueError, match=r"x of dtype float32; expected"):
        gram(wide)
    with pytest.raises(ValueError, match=r"a of shape .*; expected"):
        quadratic(three, B, C)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    for capability in ("9.0", "8.0"):
        card = types.SimpleNamespace(compute_capability=capability)
        monkeypatch.setattr(jax, "devices", lambda card=card: [card])
        if capability == "9.0":
            jax.eval_shape(gram, three)
    with pytest.raises(ValueError, match=r"capability 8.0; expected 9.0"):
        jax.eval_shape(lambda x: gram(x), three)
