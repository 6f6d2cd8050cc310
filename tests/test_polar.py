"""Polar factors against a float64 SVD oracle, in every form, norm, dtype and shape."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jax_muon as jm
from benchmarks.schedule.h100s import lowering_for_h100
from jax_muon.polar import iteration, products
from jax_muon.polar.coefficients import NEWTON_SCHULZ
from jax_muon.polar.hopper import products as hopper_products
from jax_muon.polar.products import exact_factors
from tests import oracle

SHAPES = [(8, 8), (6, 17), (17, 6), (1, 9), (9, 1), (2, 3, 5, 12), (4, 40, 24), (1, 1)]


def oracle_batch(x, *args, **kwargs):
    x = np.asarray(x, np.float64)
    factors = [oracle.polar(m, *args, **kwargs) for m in x.reshape(-1, *x.shape[-2:])]
    return np.reshape(factors, x.shape)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("form", ["standard", "gram", "auto"])
@pytest.mark.parametrize("norm", ["frobenius", "schatten4"])
def test_float64_equals_the_oracle(rng, x64, shape, form, norm):
    x = rng.standard_normal(shape)
    table = jm.polar_express_coefficients(5)
    expected = oracle_batch(x, table, 1.02, 1e-6, norm)
    y = jm.PolarExpress(dtype="float64", form=form, norm=norm)(jnp.asarray(x))
    assert y.dtype == jnp.float64
    np.testing.assert_allclose(y, expected, rtol=0, atol=1e-12)
    expected = oracle_batch(x, [NEWTON_SCHULZ] * 5, 1.0, 1e-7, norm)
    y = jm.NewtonSchulz(dtype="float64", form=form, norm=norm)(jnp.asarray(x))
    np.testing.assert_allclose(y, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_exact_polar_is_exact(rng, x64, shape):
    x = jnp.asarray(rng.standard_normal(shape))
    y = jm.ExactPolar()(x)
    u, _, vt = np.linalg.svd(x, full_matrices=False)
    np.testing.assert_allclose(y, u @ vt, rtol=0, atol=1e-12)


def test_polar_express_converges_to_the_exact_factor(rng, x64):
    x = jnp.asarray(rng.standard_normal((3, 20, 50)))
    y = jm.PolarExpress(steps=10, dtype="float64")(x)
    np.testing.assert_allclose(y, jm.ExactPolar()(x), rtol=0, atol=1e-12)


def with_spectrum(rng, kind, shape):
    """A matrix with such singular values."""
    u, s, vt = np.linalg.svd(rng.standard_normal(shape), full_matrices=False)
    k = np.arange(1, len(s) + 1)
    return (
        u * {"gaussian": s, "1/k": 1 / k, "1/k^2": 1 / k**2, "rank 1": k == 1}[kind]
    ) @ vt


@pytest.mark.parametrize("kind", ["gaussian", "1/k", "1/k^2", "rank 1"])
@pytest.mark.parametrize("form", ["standard", "gram"])
def test_float32_error(rng, kind, form):
    """The bound is the worst of the form over ill-conditioned spectra.

    2e-4 in the Gram form, where small singular values carry the square of the
    condition number into rounding; 2e-5 in the standard form. Five quintics multiply
    what is near zero by 900, and so the rounding (6e-8) of a rank-1 matrix too.
    """
    x = with_spectrum(rng, kind, (64, 160)).astype(np.float32)
    table = jm.polar_express_coefficients(5)
    expected = oracle.polar(x.astype(np.float64), table, 1.02, 1e-6)
    y = jm.PolarExpress(dtype="float32", form=form)(jnp.asarray(x))
    error = np.linalg.norm(y - expected) / np.linalg.norm(expected)
    assert error < (2e-4 if form == "gram" or kind == "rank 1" else 2e-5)


def test_bfloat16_rounds_once_a_product(rng):
    """Within a few roundings (2^-8 each) of float64 on a well-conditioned matrix."""
    x = jnp.asarray(rng.standard_normal((4, 64, 256)), jnp.float32)
    expected = oracle_batch(x, jm.polar_express_coefficients(5), 1.02, 1e-6)
    y = jm.PolarExpress()(x)
    assert y.dtype == jnp.float32
    error = np.linalg.norm(y - expected) / np.linalg.norm(expected)
    assert error < 2e-2  # 5e-2 where every term is rounded by itself
    # XLA for a CPU does so only where it is told that results are float32.
    traced = jax.jit(jm.PolarExpress()).trace(x)
    text = traced.lower(lowering_platforms=("cpu",)).as_text()
    results = re.findall(r"stablehlo.dot_general.*-> tensor<.*x(\w+)>", text)
    assert results == 15 * ["f32"]


@pytest.mark.parametrize("shape", [(1, 64), (3, 64, 1)], ids=str)
def test_a_single_row_is_not_rounded(rng, shape):
    """In bfloat16 it would end 0.22 away, within the 0.141 of 1 that hide it."""
    x = jnp.asarray(rng.standard_normal(shape), jnp.float32)
    expected = oracle_batch(x, jm.polar_express_coefficients(5), 1.02, 1e-6)
    np.testing.assert_allclose(jm.PolarExpress()(x), expected, rtol=0, atol=1e-4)


@pytest.fixture
def retrace():
    """For tests that change what `iteration` computes: no trace is kept."""
    jax.clear_caches()  # equal polar factors share their traces
    yield
    jax.clear_caches()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sums_that_a_gpu_adds(rng, x64, retrace, monkeypatch, shape):
    """As a GPU is told, on a CPU: float64 alike, and bfloat16 rounds every term."""
    monkeypatch.setattr(iteration, "_ON_CPU", products.FusedProducts())
    x = rng.standard_normal(shape)
    expected = oracle_batch(x, jm.polar_express_coefficients(5), 1.02, 1e-6)
    y = jm.PolarExpress(dtype="float64")(jnp.asarray(x))
    np.testing.assert_allclose(y, expected, rtol=0, atol=1e-12)
    y = jm.PolarExpress()(jnp.asarray(x))
    assert np.linalg.norm(y - expected) < 0.1 * np.linalg.norm(expected)


def test_products_of_a_gpu(rng):
    """In bfloat16 three a step, with results that need no pass to round them."""
    x = jnp.asarray(rng.standard_normal((4, 64, 256)), jnp.float32)
    traced = jax.jit(jm.PolarExpress()).trace(x)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    results = re.findall(r"stablehlo.dot_general.*-> tensor<.*x(\w+)>", text)
    assert results == ["f32"] + 14 * ["bf16"]  # the first one gives the norm


@settings(deadline=None)
@given(
    cubic=st.floats(1e-6, 1e6).flatmap(lambda x: st.sampled_from([x, -x])),
    ratio=st.floats(1e-3, 1e3).flatmap(lambda x: st.sampled_from([x, -x, 0.0])),
)
def test_factors_that_bfloat16_holds(cubic, ratio):
    """Rounded by themselves, two of them would be off by up to 2^-8 each."""
    g, p, q = exact_factors(cubic, cubic * ratio, jnp.dtype("bfloat16"))
    for number in (g, p, q):
        assert float(jnp.bfloat16(number)) == number
    assert 1 <= g < 2
    assert p * g == pytest.approx(cubic, rel=2**-9)
    assert q * g == pytest.approx(ratio, rel=2**-9)


def test_factors_of_the_quintics_in_use():
    scale = 1.0
    for a, b, c in jm.polar_express_coefficients(8):
        cubic, quintic = b / a * scale**2, c / a * scale**4
        g, p, q = exact_factors(cubic, quintic, jnp.dtype("bfloat16"))
        assert p * g == pytest.approx(cubic, rel=2**-11)
        assert p * q * g**2 == pytest.approx(quintic, rel=2**-11)
        scale *= a
    assert exact_factors(3.1, 0.7, jnp.dtype("float32")) == (1.0, 3.1, 0.7 / 3.1)


def test_no_two_steps_share_a_factor():
    """XLA would not hand it to cuBLASLt then, and add in passes of their own."""
    used = set()
    for step in range(10):
        found = exact_factors(-0.7, 0.12, jnp.dtype("bfloat16"), used)
        assert used.isdisjoint(found)
        g, p, q = found
        assert 1 <= g < 2
        assert p * g == pytest.approx(-0.7, rel=2**-9)
        assert p * q * g**2 == pytest.approx(0.12, rel=2**-8)
        used |= {*found}
        assert len(used) == 3 * (step + 1)
    everything = {float(g) for g in np.arange(1, 2, 2.0**-7)}
    assert exact_factors(-0.7, 0.12, jnp.dtype("bfloat16"), everything)[0] >= 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("quintic", [(1.875, -1.25, 0.375), (0.5, 1.5, -1.0)])
def test_any_number_of_steps(rng, quintic, dtype):
    """The a of all steps together would leave the range of A A, at either end."""
    x = jnp.asarray(np.linalg.qr(rng.standard_normal((20, 12)))[0], jnp.float32)
    y = jm.NewtonSchulz(36, coefficients=quintic, norm_factor=0.3, dtype=dtype)(x)
    s = np.linalg.svd(y, compute_uv=False)
    np.testing.assert_allclose(s, 1, atol=1e-5 if dtype == "float32" else 0.05)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("make", [jm.PolarExpress, jm.NewtonSchulz])
def test_a_matrix_in_a_stack_is_as_alone(rng, make, dtype):
    """A CPU takes one after another, in another shape in bfloat16 than in float32."""
    x = jnp.asarray(rng.standard_normal((5, 40, 60)), jnp.float32)
    run = jax.jit(make(dtype=dtype))
    whole = run(x)
    for index in (0, 2, 4):
        np.testing.assert_allclose(whole[index], run(x[index]), rtol=0, atol=1e-6)


@pytest.mark.parametrize("shape", [(40, 60), (384, 512)], ids=str)
def test_a_transpose_gets_the_same_products(rng, shape):
    """In bfloat16 as in float32: XLA for a CPU would multiply it in float32."""
    x = jnp.asarray(rng.standard_normal(shape), jnp.float32)
    run = jax.jit(jm.PolarExpress())
    np.testing.assert_array_equal(run(x.T), run(x).T)


@pytest.mark.parametrize("shape", [(7, 7), (5, 8, 13), (5, 13, 8), (4, 6)], ids=str)
@pytest.mark.parametrize("form", ["standard", "gram"])
def test_symmetric_products_by_halves(rng, x64, retrace, monkeypatch, shape, form):
    """What large matrices get on a CPU, here on small ones of odd and even size."""
    monkeypatch.setattr(products, "_HALVES_FROM", 2)
    x = rng.standard_normal(shape)
    expected = oracle_batch(x, jm.polar_express_coefficients(5), 1.02, 1e-6)
    y = jm.PolarExpress(dtype="float64", form=form)(jnp.asarray(x))
    np.testing.assert_allclose(y, expected, rtol=0, atol=1e-12)


def test_halves_in_bfloat16(rng):
    """In the size from which a CPU takes them: XLA cannot run every such product."""
    x = jnp.asarray(rng.standard_normal((2, 640, 384)), jnp.float32)
    expected = oracle_batch(x, jm.polar_express_coefficients(5), 1.02, 1e-6)
    error = np.linalg.norm(jax.jit(jm.PolarExpress())(x) - expected)
    assert error < 5e-2 * np.linalg.norm(expected)


@pytest.mark.parametrize("shape", [(6, 9), (7, 9, 6), (2, 3, 6, 9)], ids=str)
def test_every_batch_under_every_transform(rng, x64, shape):
    """Of a loop over matrices, vmap makes a loop over batches of them."""
    x = rng.standard_normal(shape)
    expected = oracle_batch(x, jm.polar_express_coefficients(5), 1.02, 1e-6)
    run = jm.PolarExpress(dtype="float64")
    mapped = jax.vmap(run) if len(shape) > 2 else run
    for function in (run, jax.jit(run), mapped):
        y = function(jnp.asarray(x))
        np.testing.assert_allclose(y, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("dtype", "n", "amx", "halved"),
    [
        ("float32", 640, False, 2),
        ("bfloat16", 640, False, 2),
        ("float32", 640, True, 2),
        ("bfloat16", 640, True, 0),
        ("bfloat16", 2048, True, 1),  # X X^T, and not A A
    ],
)
def test_halves_by_processor(retrace, monkeypatch, dtype, n, amx, halved):
    """How many of a step's three products are three smaller ones on a CPU."""
    monkeypatch.setattr(products, "has_amx", lambda: amx)
    function = jax.jit(jm.PolarExpress(1, dtype=dtype, form="standard"))
    lowered = function.trace(jnp.zeros((640, n))).lower(lowering_platforms=("cpu",))
    assert lowered.as_text().count("stablehlo.dot_general") == 3 + 2 * halved


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_order_of_execution_by_platform(retrace, monkeypatch, dtype):
    """On a CPU a loop over matrices, on a GPU one batched product after another."""
    monkeypatch.setattr(products, "has_amx", lambda: False)
    x = jnp.zeros((8, 640, 768))

    def lowered(platform):
        function = jm.PolarExpress(dtype=dtype)
        trace = jax.jit(function).trace(x)
        return trace.lower(lowering_platforms=(platform,)).as_text()

    gpu, cpu = lowered("cuda"), lowered("cpu")
    assert "stablehlo.while" not in gpu
    assert gpu.count("stablehlo.dot_general") == 15
    assert "tensor<8x640x640xf32>" in gpu
    assert "stablehlo.while" in cpu
    assert cpu.count("stablehlo.dot_general") == 5 * (3 + 3 + 1)  # two by halves
    assert "tensor<8x640x640xf32>" not in cpu


def test_kernels_on_a_gpu_alone(rng, retrace, monkeypatch):
    """They stand in the program for CUDA, two a step, and change nothing on a CPU.

    Matrices with few rows take plain products there, too.
    """
    x = jnp.asarray(rng.standard_normal((2, 40, 24)), jnp.float32)
    plain, kernel = (
        jax.jit(jm.PolarExpress(symmetric=symmetric))
        for symmetric in ("plain", "kernel")
    )

    def calls(function, platform):
        with lowering_for_h100():
            lowered = function.trace(x).lower(lowering_platforms=(platform,))
        return lowered.as_text().count("call @symmetric_product")

    assert calls(kernel, "cuda") == 0
    monkeypatch.setattr(hopper_products, "MIN_ROWS", 24)
    jax.clear_caches()
    assert calls(plain, "cuda") == calls(kernel, "cpu") == 0
    assert calls(kernel, "cuda") == 10
    np.testing.assert_array_equal(kernel(x), plain(x))


@pytest.mark.parametrize("norm", ["frobenius", "schatten4"])
@pytest.mark.parametrize("shape", [(40, 24), (2, 24, 40), (30, 30)], ids=str)
def test_the_iteration_on_kernels(rng, retrace, monkeypatch, shape, norm):
    """The algebra around them: plain products in their place, on a CPU."""
    x = jnp.asarray(rng.standard_normal(shape), jnp.float32)
    polar = jm.PolarExpress(norm=norm)
    plain = polar(x)
    called = set()

    def gram(x, dtype=jnp.bfloat16, *, factor=1.0):
        called.add("gram")
        return (factor * products.outer(x, x)).astype(dtype)

    def quadratic(a, b, c):
        called.add("quadratic")
        return (b * a + c * products.matmul(a, a)).astype(a.dtype)

    monkeypatch.setattr(hopper_products, "MIN_ROWS", 24)
    monkeypatch.setattr(hopper_products, "gram", gram)
    monkeypatch.setattr(hopper_products, "quadratic", quadratic)
    monkeypatch.setattr(iteration, "_ON_CPU", hopper_products.HopperProducts())
    jax.clear_caches()  # of what gave `plain`
    found = polar(x)
    assert called == {"gram", "quadratic"}
    # Sums that a GPU adds, of which the CPU rounds every term here.
    assert np.linalg.norm(found - plain) < 0.06 * np.linalg.norm(plain)


def test_a_stack_is_written_in_place():
    """On a CPU a donated stack needs no second buffer: less than one stack of room."""
    x = jax.ShapeDtypeStruct((16, 256, 512), jnp.float32)
    function = jm.PolarExpress(dtype="float32")
    compiled = jax.jit(function, donate_argnums=(0,)).lower(x).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 16 * 256 * 512 * 4


@pytest.mark.parametrize("value", [0.0, 1e-44, 1e-30, 1e-8, 1.0, 1e15])
@pytest.mark.parametrize("shape", [(1, 7), (7, 1), (5, 5), (3, 8)], ids=str)
@pytest.mark.parametrize("norm", ["frobenius", "schatten4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_numbers_of_any_size_are_finite(value, shape, norm, dtype):
    x = jnp.full(shape, value, jnp.float32)
    y = jm.PolarExpress(norm=norm, dtype=dtype)(x)
    assert jnp.isfinite(y).all()
    assert jnp.isfinite(jm.NewtonSchulz(norm=norm, dtype=dtype)(x)).all()
    assert jnp.isfinite(jm.ExactPolar()(x)).all()
    if value >= 1:  # a rank-1 matrix has one singular value, brought near 1
        assert abs(jnp.linalg.norm(y.astype(jnp.float32)) - 1) < 0.15


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("value", [np.nan, np.inf, 1e30])
def test_what_overflows_is_not_hidden(value, dtype):
    """A square that float32 cannot hold gives NaN, never a factor that looks right."""
    x = jnp.full((4, 4), value)
    assert jnp.isnan(jm.PolarExpress(dtype=dtype)(x)).all()


def test_rank_deficient(rng, x64):
    x = jnp.asarray(rng.standard_normal((12, 3)) @ rng.standard_normal((3, 20)))
    s = np.linalg.svd(jm.ExactPolar()(x), compute_uv=False)
    np.testing.assert_allclose(s, [1] * 3 + [0] * 9, atol=1e-12)
    s = np.linalg.svd(jm.PolarExpress(10, dtype="float64")(x), compute_uv=False)
    np.testing.assert_allclose(s, [1] * 3 + [0] * 9, atol=1e-9)


@pytest.mark.parametrize("polar", [jm.PolarExpress(), jm.ExactPolar()])
def test_empty_batch_and_empty_matrix(polar):
    assert polar(jnp.zeros((0, 3, 4))).shape == (0, 3, 4)
    assert polar(jnp.zeros((2, 0, 4))).shape == (2, 0, 4)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_keeps_dtype(dtype):
    x = jnp.eye(4, 6, dtype=dtype)
    for polar in (jm.PolarExpress(), jm.NewtonSchulz(), jm.ExactPolar()):
        assert polar(x).dtype == dtype


def test_dtype_none_is_that_of_x(rng, x64):
    x = jnp.asarray(rng.standard_normal((5, 7)))
    a = jm.PolarExpress(dtype=None)(x)
    np.testing.assert_array_equal(a, jm.PolarExpress(dtype="float64")(x))
