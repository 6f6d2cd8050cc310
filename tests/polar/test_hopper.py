"""Symmetric products: kernels in Pallas's interpreter against float64.

The bound: products of 16-bit numbers are exact in float32; a sum of n terms in any
order is off by n u times the sum of magnitudes, u = 2^-24, and the three products and
two sums of a I + b (R + q R R) by 5 u more; then comes one rounding to bfloat16.
"""

import functools
import pathlib
import re
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
from jax_muon.polar import hopper
from jax_muon.polar.hopper import kernel
from jax_muon.polar.hopper.kernel import HopperProducts
from jax_muon.polar.products import Products
from tests.interpreter import interpreted, needs_interpreter

WIDE, TALL = HopperProducts(), HopperProducts(tall=True)
QUINTIC = (3.9, -2.8, -0.18)  # of a step of the Polar Express, rounded


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
    summed = (terms + 5) * 2.0**-24 * magnitudes
    rounded = 2.0**-8 * (np.abs(exact) + summed)
    tiny = float(jnp.finfo(jnp.bfloat16).smallest_normal)
    np.testing.assert_array_less(np.abs(double(found) - exact), summed + rounded + tiny)


def check_gram(found, x):
    """X X^T."""
    x = double(x)
    exact, magnitudes = (y @ np.swapaxes(y, -1, -2) for y in (x, np.abs(x)))
    assert_close(found, exact, magnitudes, x.shape[-1])


def check_polynomial(found, r, abq=QUINTIC):
    """a I + b (R + q R R)."""
    r, (a, b, q) = double(r), double(np.array(abq, np.float32))
    size, unit = np.abs(r), np.eye(r.shape[-1])
    magnitudes = abs(a) * unit + abs(b) * (size + abs(q) * (size @ size))
    assert_close(found, a * unit + b * (r + q * (r @ r)), magnitudes, r.shape[-1])


@pytest.mark.parametrize("m", [64, 128, 320, 768, 832, 19200])
def test_programs_cover_the_triangle_once(m):
    """Each tile of 128 x 128 on or below the diagonal, and no other."""
    tiles = np.arange(kernel.tiles_of(m), dtype=np.int32)
    rows, columns = (np.asarray(x) // 128 for x in kernel.corner(tiles, m))
    below = np.tril(np.ones((-(-m // 128),) * 2, bool))
    np.testing.assert_array_equal(
        sorted(zip(rows, columns, strict=True)), np.argwhere(below)
    )


@pytest.fixture
def cut(monkeypatch):
    """A function that has kernels load so many pieces at a time."""

    def use(stages):
        by_kernel = functools.partial(kernel.symmetric_product, stages=stages)
        monkeypatch.setattr(kernel, "symmetric_product", by_kernel)

    return use


@needs_interpreter
@pytest.mark.parametrize(
    ("shape", "tall", "stages"),
    [
        ((2, 1, 130, 70), False, 6),
        ((130, 200), True, 6),
        ((2, 200, 300), False, 2),
        ((300, 200), True, 2),
        ((2, 0, 3), False, 6),
        ((4, 0), False, 6),  # an empty sum is 0
        ((0, 4), True, 6),
    ],
    ids=str,
)
def test_gram_of_any_shape(cut, shape, tall, stages):
    """Tall, wide, not a multiple of a tile, any rank; reused memory."""
    cut(stages)
    x = matrices(shape)
    with interpreted():
        found = HopperProducts(tall).gram(x)
    x = x.mT if tall else x
    assert (found.shape, found.dtype) == ((*shape[:-2], *2 * x.shape[-2:-1]), x.dtype)
    check_gram(found, x)


@needs_interpreter
@pytest.mark.parametrize("shape", [(1,), (2, 190), (330,)], ids=str)
def test_polynomial_of_any_shape(cut, shape):
    """Summed and rounded once; with two stages parts of R take turns."""
    cut(2)
    r = symmetric(shape)
    with interpreted():
        found = WIDE.polynomial(r, QUINTIC)
    assert found.dtype == r.dtype
    check_polynomial(found, r)


@needs_interpreter
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # NumPy, inf * 0
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_values_that_are_not_finite_stay_in_their_rows(cut, value):
    """Padding is zero, and no other row or matrix is touched."""
    cut(2)
    x = matrices((2, 80, 20)).at[1, 18, 3].set(value)
    with interpreted():
        found = double(WIDE.gram(x))
    outside = np.delete(np.delete(found[1], 18, axis=0), 18, axis=1)
    assert np.isfinite(found[0]).all()
    assert np.isfinite(outside).all()
    assert not np.isfinite(found[1, 18]).any()


@needs_interpreter
def test_transformations_change_no_bit(cut):
    """Each matrix alone, jit, vmap, shard_map; factors that are traced and mapped."""
    cut(2)
    r, first = symmetric((2, 70)), jnp.array([[[1.5]], [[QUINTIC[0]]]])
    # The interpreter of jax 0.10 waits forever for a second device, and does not mark
    # its loops as varying.
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    axis = PartitionSpec("data")

    def kernel(r, a=QUINTIC[0]):
        return WIDE.polynomial(r, (a, QUINTIC[1], jnp.float32(QUINTIC[2])))

    sharded = jax.shard_map(
        kernel, mesh=mesh, in_specs=axis, out_specs=axis, check_vma=False
    )
    with interpreted():
        expected = double(kernel(r))
        np.testing.assert_array_equal(double(jax.jit(sharded)(r)), expected)
        for mapped in (jax.vmap(kernel)(r, first), kernel(r, first)):
            np.testing.assert_array_equal(double(mapped[1]), expected[1])
            check_polynomial(mapped[0], r[0], (1.5, *QUINTIC[1:]))


def test_lowering_for_a_gpu_under_shard_map(x64):
    """Both kernels for the matrices that a device holds, also beside plain products.

    They count with 32 bits where integers have 64.
    """
    axis = PartitionSpec("data")
    x = jax.ShapeDtypeStruct((24, 3000, 700), jnp.bfloat16)

    def steps(x):
        plain = Products(tall=True).gram
        r = jax.lax.platform_dependent(x, cuda=TALL.gram, default=plain)
        return WIDE.polynomial(r, QUINTIC)

    with lowering_for_h100(data=8):
        function = jax.shard_map(steps, in_specs=axis, out_specs=axis)
        lowered = jax.jit(function).trace(x).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("custom_call @mosaic_gpu") == 2


def test_kernels_are_imported_for_themselves_alone():
    """Pallas takes half a second to load; jax.extend brings 30 ms of it along."""
    code = (
        "import sys, jax.numpy as jnp, jax_muon as jm; jm.PolarExpress()(jnp.eye(3)); "
        "print(any('hopper.' in x or 'experimental.pallas' in x for x in sys.modules))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert run.stdout == b"False\n"


def test_without_the_backend(monkeypatch):
    """A version of JAX that has none: plain products go on, kernels say what lacks."""
    name, x = "mosaic_gpu", matrices((800, 800), "float32")
    monkeypatch.setitem(sys.modules, f"jax.experimental.pallas.{name}", None)
    monkeypatch.delattr(jax.experimental.pallas, name)
    for module in [x for x in sys.modules if x.startswith("jax_muon.polar.hopper.")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.delattr(hopper, "kernel", raising=False)
    assert not jax.eval_shape(jm.PolarExpress(kernels=False), x).weak_type
    with pytest.raises(ImportError, match=r"Mosaic GPU.*expected.*kernels=False"):
        jax.eval_shape(jm.PolarExpress(kernels=True), x)


def pretend(monkeypatch, *capabilities):
    """GPUs of these generations are here."""
    cards = [types.SimpleNamespace(compute_capability=x) for x in capabilities]
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: cards)


def test_which_cards_take_kernels(monkeypatch):
    """H100s and H200s, from 384 rows on; an A100 has none of the instructions."""
    chosen = hopper.takes_kernels
    assert chosen(True, 384) and not chosen(None, 384) and not chosen(True, 383)
    pretend(monkeypatch, "9.0", "9.0")
    assert chosen(None, 384) and not chosen(None, 383) and not chosen(False, 384)
    pretend(monkeypatch, "9.0", "8.0")
    assert not chosen(None, 384) and not chosen(False, 384)
    with pytest.raises(ValueError, match=r"capability 8.0, 9.0; expected 9.0 \(H100"):
        chosen(True, 64)


def test_the_newest_jax_that_takes_kernels_unasked(monkeypatch):
    """It is the newest that `make test-versions` runs."""
    makefile = (pathlib.Path(__file__).parents[2] / "Makefile").read_text()
    versions = re.search(r"^VERSIONS \?= (.*)$", makefile, re.M)[1].split()
    tested = [tuple(map(int, x.split("_")[1].split(".")[:2])) for x in versions]
    assert max(tested) == hopper.NEWEST_JAX
    pretend(monkeypatch, "9.0")
    monkeypatch.setattr(jax, "__version_info__", (0, 13, 0))
    assert not hopper.takes_kernels(None, 384) and hopper.takes_kernels(True, 384)


def test_bad_input():
    """Tensor cores would round float32."""
    with pytest.raises(ValueError, match=r"x of dtype float32; expected"):
        WIDE.gram(matrices((3, 3), "float32"))
