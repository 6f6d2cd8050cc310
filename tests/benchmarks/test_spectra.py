"""Steps for a momentum: errors against the SVD, and the cheapest that reaches one."""

import numpy as np
import pytest

import jax_muon as jm
from benchmarks.spectra import momentum, suggest


def matrix(rng, s, shape):
    """A matrix with these singular values."""
    m, n = sorted(shape)
    left, right = (np.linalg.qr(rng.standard_normal((k, k)))[0] for k in (m, n))
    x = left * s @ right[:m]
    return x if shape[0] <= shape[1] else x.T


def test_errors_and_the_cheapest(rng, x64):
    """Early layers are well conditioned, late ones are not, one is still zero."""
    easy, hard = np.linspace(0.3, 1, 8), np.geomspace(0.004, 1, 8)
    found = {}
    for name, s in (("easy", easy), ("hard", hard)):
        group = [matrix(rng, s, (8, 20)), matrix(rng, s, (12, 8)), np.zeros((3, 4))]
        found[name] = got = suggest(group, 0.1, dtype="float64")
        power = 2 if got.polar.norm == "frobenius" else 4
        x = s / (got.polar.norm_factor * np.sum(s**power) ** (1 / power) + 1e-6)
        for a, b, c in got.polar.coefficients:
            x = a * x + b * x**3 + c * x**5
        error = np.sqrt(np.mean((x - 1) ** 2))
        assert got.predicted == pytest.approx(error, rel=1e-10)
        assert got.worst == pytest.approx(error, rel=1e-10)
        assert got.measured == pytest.approx(error, rel=1e-6)
        assert got.measured <= 0.1
        assert got.products == 3 * got.polar.steps
    assert found["easy"].products < found["hard"].products
    # Nothing cheaper reaches it: not at any lower bound.
    steps, u = found["hard"].polar.steps - 1, hard / np.sum(hard**4) ** 0.25 / 1.02
    for lower in np.geomspace(1e-4, 0.5, 40):
        x = u
        for a, b, c in jm.polar_express_coefficients(steps, lower=lower):
            x = a * x + b * x**3 + c * x**5
        assert np.sqrt(np.mean((x - 1) ** 2)) > 0.1


def test_published_tables_and_rank(rng):
    """A loose target takes five cubics; missing rank is no error."""
    s = np.geomspace(0.02, 1, 16)
    matrices = [matrix(rng, s, (16, 16)).astype(np.float32) for _ in range(3)]
    assert suggest(matrices, 0.3, dtype="float32").products < 15
    low = np.concatenate([np.ones((6, 8)), np.eye(6, 8)], axis=1, dtype=np.float32)
    assert suggest([low[:, :8]], 0.2, dtype="float32").measured < 0.25


@pytest.mark.parametrize(
    ("matrices", "target", "match"),
    [
        ([np.zeros((4, 4))], 0.1, "all zero"),
        ([np.diag([1.0, 1e-6])], 1e-3, r"target=0.001 is not reached; expected at"),
    ],
)
def test_bad_input(matrices, target, match):
    with pytest.raises(ValueError, match=match):
        suggest(matrices, target)


def test_the_momentum_is_that_of_the_matrices():
    found = momentum(3, 32)
    assert len(found) == 4 * 6  # of four blocks
    assert {x.shape for x in found.values()} == {(32, 32), (32, 128), (128, 32)}
    assert all(np.any(x) for x in found.values())
