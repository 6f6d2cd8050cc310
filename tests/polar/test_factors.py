"""Polar factors against a float64 SVD oracle, in every form, norm, dtype and shape."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_muon as jm
from benchmarks import polar_errors
from benchmarks.schedule.h100s import lowering_for_h100
from jax_muon.polar import hopper, iteration, products
from jax_muon.polar.coefficients import NEWTON_SCHULZ, polar_express_coefficients
from jax_muon.polar.hopper.kernel import HopperProducts
from tests import oracle, trees

SHAPES = [(8, 8), (17, 6), (1, 9), (9, 1), (2, 3, 5, 12), (4, 40, 24), (1, 1)]
EXPRESS = polar_express_coefficients(5)


def express(x, norm="frobenius"):
    """The default Polar Express of every matrix, in float64."""
    return oracle_batch(x, EXPRESS, 1.02, 1e-6, norm)


def oracle_batch(x, *settings):
    x = np.asarray(x, np.float64)
    factors = [oracle.polar(m, *settings) for m in x.reshape(-1, *x.shape[-2:])]
    return np.reshape(factors, x.shape)


def lowered(polar, x, platform):
    """StableHLO of the polar factor on a platform that need not be here."""
    trace = jax.jit(polar).trace(x)
    with lowering_for_h100():
        return trace.lower(lowering_platforms=(platform,)).as_text()


def results_of_products(text):
    """The dtype of each matrix product's result."""
    return re.findall(r"stablehlo.dot_general.*-> tensor<.*x(\w+)>", text)


# Five cubics, arXiv 2606.00371: singular values above 7e-3 end in 0.77 .. 1.3.
CUBICS = [
    (3.3656576, -3.3420992, 0.0),
    (2.5744352, -1.4957376, 0.0),
    (2.5368962, -1.4312570, 0.0),
    (2.4418906, -1.2764040, 0.0),
    (2.2230472, -0.9630650, 0.0),
]
# x (5 - x^4) / 4, which has no cubic term, also with nearly none; x alone; x^5 alone.
BARE = [(1.25, 0, -0.25), (1.25, 1e-45, -0.25), (1.2, 0, 0), (0, 0, 0.4)]
POLARS = {  # settings, and what the oracle takes
    "express": (
        {"coefficients": EXPRESS, "norm_factor": 1.02, "norm": "schatten4"},
        (EXPRESS, 1.02, 1e-7, "schatten4"),
    ),
    "jordan": ({}, (5 * [NEWTON_SCHULZ], 1.0, 1e-7)),
    "cubics": ({"coefficients": CUBICS}, (CUBICS, 1.0, 1e-7)),
    "b or c of 0": ({"coefficients": BARE}, (BARE, 1.0, 1e-7)),
}


@pytest.mark.parametrize("name", POLARS)
@pytest.mark.parametrize("form", ["standard", "gram"])
def test_float64_equals_the_oracle(rng, x64, name, form):
    settings, expected = POLARS[name]
    polar = jm.NewtonSchulz(dtype="float64", form=form, **settings)
    for shape in SHAPES:
        x = jnp.asarray(rng.standard_normal(shape))
        y = (jax.vmap(polar) if name == "jordan" and x.ndim > 2 else polar)(x)
        assert y.dtype == jnp.float64
        np.testing.assert_allclose(y, oracle_batch(x, *expected), rtol=0, atol=1e-12)


def with_spectrum(rng, kind, shape):
    """A matrix with such singular values."""
    u, s, vt = np.linalg.svd(rng.standard_normal(shape), full_matrices=False)
    k = np.arange(1, len(s) + 1)
    of_kind = {"gaussian": s, "1/k": 1 / k, "1/k^2": 1 / k**2, "rank 1": k == 1}
    return (u * of_kind[kind]) @ vt


@pytest.mark.parametrize("kind", ["gaussian", "1/k", "1/k^2", "rank 1"])
@pytest.mark.parametrize("form", ["standard", "gram"])
def test_float32_error(rng, kind, form):
    """The bound is the worst of the form over ill-conditioned spectra.

    2e-4 in the Gram form, where small singular values carry the square of the
    condition number into rounding; 2e-5 in the standard form. Five quintics multiply
    what is near zero by 900, and so the rounding (6e-8) of a rank-1 matrix too.
    """
    x = with_spectrum(rng, kind, (64, 160)).astype(np.float32)
    y = jm.PolarExpress(dtype="float32", form=form)(jnp.asarray(x))
    bound = 2e-4 if form == "gram" or kind == "rank 1" else 2e-5
    assert trees.distance(y, express(x)) < bound


# From `python -m benchmarks.polar_errors` of 12c5a0b, whose form held X without the
# factors a, in bfloat16, float32 and float64.
BEFORE = {
    "gaussian": (0.0144, 2.10e-6, 4.85e-15),
    "1/k": (0.0162, 1.35e-6, 3.24e-15),
    "1/k^2": (0.245, 7.72e-6, 2.22e-14),
    "rank m/4 + 1e-2": (0.224, 6.79e-6, 1.87e-14),
    "rank m/4 + 1e-3": (0.505, 1.48e-5, 4.07e-14),
    "rank m/4": (0.516, 1.52e-5, 4.14e-14),
    "rank 10": (0.737, 1.78e-5, 4.84e-14),
    "rank 1": (2.24, 7.01e-5, 2.04e-13),
    "geometric to 1e-3": (0.115, 3.17e-6, 8.56e-15),
    "geometric to 1e-6": (0.284, 7.15e-6, 1.94e-14),
    "5 of 100 times": (0.0860, 2.43e-6, 6.78e-15),
    "sparse rows": (0.0458, 3.58e-6, 9.90e-15),
    "2 huge entries": (0.0321, 3.47e-6, 1.40e-14),
    "t(1.5) entries": (0.0260, 2.45e-6, 5.09e-15),
}


@pytest.mark.parametrize("kind", polar_errors.KINDS)
def test_no_less_exact_than_the_form_before(kind):
    """In bfloat16 and float64. Float32 has room for another order of sums.

    Of "2 huge entries" only their two singular values, 0.93 and 0.31 of the norm, are
    off by more than 2e-7, in any form: there the quintics multiply relative changes by
    73 and 12.6, and a rounding to float32 is one of up to 6e-8.
    """
    dtypes = zip(polar_errors.DTYPES, BEFORE[kind], (1.2, 2, 1.5), strict=True)
    for dtype, before, factor in dtypes:
        assert polar_errors.error(kind, dtype) < factor * before


def test_bfloat16_rounds_once_a_product(rng):
    """Within a few roundings (2^-8 each) of float64 on a well-conditioned matrix."""
    x = jnp.asarray(rng.standard_normal((4, 64, 256)), jnp.float32)
    y = jm.PolarExpress()(x)
    assert y.dtype == jnp.float32
    assert trees.distance(y, express(x)) < 2e-2  # 5e-2 if every term were rounded
    # XLA for a CPU does so only where it is told that results are float32. On a GPU
    # only the polynomial takes a pass that sums and rounds.
    cuda = 5 * ["bf16", "f32", "bf16"]
    for platform, dtypes in (("cpu", 15 * ["f32"]), ("cuda", cuda)):
        assert results_of_products(lowered(jm.PolarExpress(), x, platform)) == dtypes


@pytest.mark.parametrize("shape", [(1, 64), (3, 64, 1)], ids=str)
def test_a_single_row_is_not_rounded(rng, shape):
    """In bfloat16 it would end 0.22 away, within the 0.141 of 1 that hide it."""
    x = jnp.asarray(rng.standard_normal(shape), jnp.float32)
    np.testing.assert_allclose(jm.PolarExpress()(x), express(x), rtol=0, atol=1e-4)


@pytest.fixture
def retrace():
    """For tests that change what `iteration` computes: no trace is kept."""
    jax.clear_caches()  # equal polar factors share their traces
    yield
    jax.clear_caches()


@pytest.fixture
def on_platform(retrace, monkeypatch):
    """A function that makes a CPU compute what a program for this platform does."""

    def use(platform):
        def chosen(*args, **branches):
            return branches.get(platform, branches["default"])(*args)

        monkeypatch.setattr(jax.lax, "platform_dependent", chosen)

    return use


@pytest.mark.parametrize("shape", [(1, 9), (7, 7), (5, 13, 8)], ids=str)
@pytest.mark.parametrize("form", ["standard", "gram"])
@pytest.mark.parametrize("way", ["at once", "by halves"])
def test_other_ways_to_compute_products(
    rng, x64, on_platform, monkeypatch, way, shape, form
):
    """Of a GPU, where tall matrices stay tall, and of large matrices on a CPU."""
    if way == "at once":
        on_platform("cuda")
    monkeypatch.setattr(products, "_HALVES_FROM", 2)
    x = jnp.asarray(rng.standard_normal(shape))
    for norm in ("frobenius", "schatten4"):
        polar = jm.PolarExpress(dtype="float64", form=form, norm=norm)
        np.testing.assert_allclose(polar(x), express(x, norm), rtol=0, atol=1e-12)
    assert trees.distance(jm.PolarExpress()(x), express(x)) < 0.1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("quintic", [(1.875, -1.25, 0.375), (0.5, 1.5, -1.0)])
def test_any_number_of_steps(rng, quintic, dtype):
    """The a of all steps together would leave the range of A A, at either end."""
    x = jnp.asarray(np.linalg.qr(rng.standard_normal((20, 12)))[0], jnp.float32)
    y = jm.NewtonSchulz(36, coefficients=quintic, norm_factor=0.3, dtype=dtype)(x)
    s = np.linalg.svd(y, compute_uv=False)
    np.testing.assert_allclose(s, 1, atol=1e-5 if dtype == "float32" else 0.05)


@pytest.mark.parametrize("shape", [(40, 60), (2, 384, 512)], ids=str)
def test_a_transpose_gets_the_same_products(rng, retrace, monkeypatch, shape):
    """Whole and by halves: XLA for a CPU cannot run every product in bfloat16.

    It would multiply some transposes in float32.
    """
    monkeypatch.setattr(products, "has_amx", lambda: False)
    x = jnp.asarray(rng.standard_normal(shape), jnp.float32)
    y = jm.PolarExpress()(x)
    np.testing.assert_array_equal(jm.PolarExpress()(x.mT), y.mT)
    assert trees.distance(y, express(x)) < 5e-2


@pytest.mark.parametrize(
    ("platform", "dtype", "n", "amx", "dots"),
    [
        ("cuda", "float32", 768, False, 3),
        ("cuda", "bfloat16", 768, False, 3),
        # On a CPU, large symmetric products are three smaller ones.
        ("cpu", "float32", 768, False, 3 + 3 + 1),
        ("cpu", "bfloat16", 768, False, 3 + 3 + 1),
        ("cpu", "float32", 768, True, 3 + 3 + 1),
        ("cpu", "bfloat16", 768, True, 3),
        ("cpu", "bfloat16", 2048, True, 3 + 1 + 1),  # X X^T, and not A A
    ],
)
def test_order_of_execution(retrace, monkeypatch, platform, dtype, n, amx, dots):
    """On a CPU a loop over matrices, on a GPU one batched product after another."""
    monkeypatch.setattr(products, "has_amx", lambda: amx)
    polar = jm.PolarExpress(1, dtype=dtype, form="standard")
    text = lowered(polar, jnp.zeros((8, 640, n)), platform)
    assert len(results_of_products(text)) == dots
    assert ("stablehlo.while" in text) == (platform == "cpu")
    assert ("tensor<8x640x640xf32>" in text) == (platform == "cuda")


@pytest.mark.parametrize("form", ["standard", "gram"])
def test_cubics_compute_no_square(form):
    """Two products a step instead of three."""
    for table, dots in ((CUBICS[:1], 2), ([NEWTON_SCHULZ], 3)):
        polar = jm.NewtonSchulz(coefficients=table, dtype="float32", form=form)
        text = lowered(polar, jnp.zeros((40, 70)), "cuda")
        assert len(results_of_products(text)) == dots


def test_kernels_on_a_gpu_alone(rng, retrace, monkeypatch):
    """They stand in the program for CUDA, two a step, and change nothing on a CPU.

    Matrices with few rows take plain products there, too.
    """
    x = jnp.asarray(rng.standard_normal((2, 40, 24)), jnp.float32)
    plain, kernels = (jm.PolarExpress(kernels=each) for each in (None, True))

    def calls(polar, platform):
        return lowered(polar, x, platform).count("call @symmetric_product")

    assert calls(kernels, "cuda") == 0
    monkeypatch.setattr(hopper, "MIN_ROWS", 24)
    jax.clear_caches()
    assert calls(plain, "cuda") == calls(kernels, "cpu") == 0
    assert calls(kernels, "cuda") == 10
    np.testing.assert_array_equal(kernels(x), plain(x))


@pytest.mark.parametrize(("kernels", "shapes"), [(True, ((768, 800),)), (None, ())])
def test_describe_shows_kernels(kernels, shapes):
    """Those of large matrices; on a CPU they are for programs of another machine."""
    params = {"up": jnp.ones((800, 768)), "low": jnp.ones((800, 64))}
    found = jm.describe(jm.orthogonalize(jm.PolarExpress(kernels=kernels)), params)
    assert found.kernels == shapes
    line = "polar factors by kernels for Hopper GPUs: 768 x 800"
    assert (line in str(found).splitlines()) == bool(shapes)


@pytest.mark.parametrize("shape", [(2, 24, 40), (2, 40, 24)], ids=str)
@pytest.mark.parametrize("norm", ["frobenius", "schatten4"])
def test_the_iteration_on_kernels(rng, on_platform, monkeypatch, norm, shape):
    """The algebra around them: plain products in their place, on a CPU."""
    called = set()
    for name in ("gram", "polynomial"):

        def plain(self, *args, name=name):
            called.add(name)
            return getattr(products.Products(self.tall, on_cpu=True), name)(*args)

        monkeypatch.setattr(HopperProducts, name, plain)
    monkeypatch.setattr(hopper, "MIN_ROWS", 24)
    on_platform("cuda")
    x = jnp.asarray(rng.standard_normal(shape), jnp.float32)
    found = jm.PolarExpress(norm=norm, kernels=True)(x)
    assert called == {"gram", "polynomial"}
    assert trees.distance(found, express(x, norm)) < 0.05


def test_a_stack_is_written_in_place():
    """On a CPU a donated stack needs no second buffer: less than one stack of room."""
    x = jax.ShapeDtypeStruct((16, 256, 512), jnp.float32)
    polar = jm.PolarExpress(dtype="float32")

    def function(x):  # its `lower` would hide that of jit
        return polar(x)

    compiled = jax.jit(function, donate_argnums=(0,)).lower(x).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 16 * 256 * 512 * 4


@pytest.mark.parametrize(("count", "size"), [(4, 4), (5, 1), (6, 3), (61, 1)])
def test_accelerators_take_equal_parts_of_a_stack(rng, count, size):
    """The most matrices that a limit of four allows, in a loop; with equal results."""
    x, sizes = jnp.asarray(rng.standard_normal((count, 6, 9)), jnp.float32), []

    def factors(part):
        sizes.append(len(part))
        return jm.ExactPolar()(part)

    parts = iteration._in_parts(factors, x, most=4)
    assert {*sizes} == {size}
    np.testing.assert_allclose(parts, jm.ExactPolar()(x), atol=1e-6)


@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (5, 5), (8, 3)], ids=str)
@pytest.mark.parametrize("norm", ["frobenius", "schatten4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_numbers_of_any_size_are_finite(shape, norm, dtype):
    """Also where squares overflow. What is not finite is not hidden: it gives NaN."""
    values = jnp.array([0.0, 1e-44, 1e-30, 1e-8, 1.0, 1e15, 1e30, np.nan, np.inf])
    x = jnp.broadcast_to(values[:, None, None], (9, *shape))
    y = jm.PolarExpress(norm=norm, dtype=dtype)(x)
    assert jnp.isfinite(y[:7]).all()
    # A rank-1 matrix has one singular value, brought near 1.
    sizes = jnp.linalg.norm(y[4:7].astype(jnp.float32), axis=(-2, -1))
    np.testing.assert_allclose(sizes, 1, atol=0.15)
    assert jnp.isnan(y[7:]).all()
    exact = jm.ExactPolar()(x)
    assert jnp.isfinite(exact[:7]).all() and jnp.isnan(exact[7:]).all()


def test_exact_polar(rng, x64):
    for shape in ((8, 8), (9, 1), (2, 3, 5, 12)):
        x = rng.standard_normal(shape)
        u, _, vt = np.linalg.svd(x, full_matrices=False)
        y = jm.ExactPolar()(jnp.asarray(x))
        np.testing.assert_allclose(y, u @ vt, rtol=0, atol=1e-12)
    # LAPACK alone does not return from this matrix with two infinite entries.
    x = np.random.default_rng(0).standard_normal((3, 8, 6)).astype(np.float32)
    x[1, [0, 4], 0] = np.inf
    y = jm.ExactPolar()(jnp.asarray(x))
    assert jnp.isnan(y[1]).all() and jnp.isfinite(y[::2]).all()
    # Of rank 3: what is in the null space stays there.
    x = jnp.asarray(rng.standard_normal((12, 3)) @ rng.standard_normal((3, 20)))
    s = np.linalg.svd(jm.ExactPolar()(x), compute_uv=False)
    np.testing.assert_allclose(s, [1] * 3 + [0] * 9, atol=1e-9)


@pytest.mark.parametrize("polar", [jm.PolarExpress(), jm.ExactPolar()])
def test_keeps_shape_and_dtype(polar):
    for shape, dtype in (((0, 3, 4), "float32"), ((2, 0, 4), "float16")):
        y = polar(jnp.ones(shape, dtype))
        assert (y.shape, y.dtype) == (shape, dtype)
    assert polar(jnp.ones((4, 6), "bfloat16")).dtype == "bfloat16"


# --- the scale of a matrix ------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("norm", ["frobenius", "schatten4"])
def test_polar_factors_do_not_depend_on_the_scale(rng, dtype, norm, x64):
    polar = jm.NewtonSchulz(norm=norm, dtype=dtype, eps=1e-30)
    x = jnp.asarray(rng.standard_normal((3, 7, 10)), dtype)
    scale = 2.0 ** (600 if dtype == "float64" else 124)
    stack = jnp.stack([x, x * scale, x * (x > 0) * scale])
    np.testing.assert_array_equal(polar(stack)[1], polar(x))
    np.testing.assert_array_equal(polar(stack.mT)[1], polar(x.mT))
    assert jnp.isfinite(polar(stack)).all()


@pytest.mark.parametrize("shape", [(1, 1), (3, 4)], ids=str)
@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_so_their_derivatives_shrink(rng, on_platform, platform, shape):
    """f(s X) = f(X) and so the derivative at s X is 1 / s of that at X."""
    on_platform(platform)
    polar = jm.NewtonSchulz(dtype="float32", eps=1e-30)
    x = jnp.asarray(rng.standard_normal(shape), jnp.float32)
    weights = jnp.asarray(rng.standard_normal(shape), jnp.float32)
    slope = jax.jit(jax.grad(lambda x: jnp.sum(weights * polar(x))))
    # Of one element the derivative is a difference of equal numbers, near 0.
    bound = 1e-5 * float(jnp.max(jnp.abs(weights / x)))
    for scale in (2.0**60, 2.0**100):
        np.testing.assert_allclose(slope(x * scale) * scale, slope(x), atol=bound)


@pytest.mark.parametrize("size", [3e15, 1e17])
def test_eps_is_in_the_units_of_a_large_matrix(rng, size):
    """From 3e14 on a matrix is first multiplied by a power of two, and so is eps."""
    x = jnp.asarray(rng.standard_normal((8, 12)), "float32")
    for polar in (jm.PolarExpress(dtype="float32"), jm.NewtonSchulz(dtype="float32")):
        np.testing.assert_allclose(polar(size * x), polar(x), atol=1e-5)


@pytest.mark.parametrize("norm", ["frobenius", "schatten4"])
def test_eps_shrinks_with_small_norms(rng, x64, norm):
    """In proportion below 2^-13, to 2^-20 of itself; from there on it is constant."""
    x = rng.standard_normal((7, 10))
    s = np.linalg.svd(x, compute_uv=False)
    x /= np.sum(s**4) ** 0.25 if norm == "schatten4" else np.linalg.norm(x)
    polar = jm.NewtonSchulz(dtype="float64", norm=norm, eps=1e-3)
    for size in (1.0, 2.0**-12, 2.0**-14, 1e-9, 2.0**-32, 2.0**-34, 1e-13):
        expected = oracle.polar(size * x, 5 * [NEWTON_SCHULZ], 1.0, 1e-3, norm)
        np.testing.assert_allclose(polar(jnp.asarray(size * x)), expected, 1e-9)


@pytest.mark.parametrize("size", [1e-14, 1e-15, 1e-16, 1e-17])
def test_norms_of_large_matrices_whose_squares_underflow(rng, size):
    """Such norms come out too small; divided by them the quintics would diverge."""
    x = jnp.asarray(rng.standard_normal((2048, 8192)) * size / 4096, jnp.float32)
    y = jm.NewtonSchulz(1, coefficients=(1.0, 0.0, 0.0), eps=1e-8)(x)
    assert jnp.linalg.norm(y) <= 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_matrices_of_float64_may_be_too_large_for_the_iteration(rng, dtype, x64):
    x = jnp.asarray(rng.standard_normal((3, 7, 10)), "float64")
    x = x.at[0].set(jnp.eye(7, 10))
    polar = jm.NewtonSchulz(dtype=dtype, eps=1e-30)
    for power in (133, 1000):  # 1e40, 1e301
        np.testing.assert_array_equal(polar(x * 2.0**power), polar(x))
