"""Steps for a momentum: errors against the SVD, and the cheapest that reaches one."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

import jax_muon as jm


def matrix(rng, s, shape):
    """A matrix (in, out) with these singular values."""
    m, n = sorted(shape)
    left, right = (np.linalg.qr(rng.standard_normal((k, k)))[0] for k in (m, n))
    x = left * s @ right[:m]
    return jnp.asarray(x if shape[0] <= shape[1] else x.T)


def test_errors_and_the_cheapest_by_label(rng, x64):
    """Early layers are well conditioned, late ones are not, one is still zero."""
    easy, hard = np.linspace(0.3, 1, 8), np.geomspace(0.004, 1, 8)
    momentum = {
        "early": {"up": matrix(rng, easy, (8, 20)), "down": matrix(rng, easy, (12, 8))},
        "late": {"up": matrix(rng, hard, (8, 20)), "down": matrix(rng, hard, (12, 8))},
        "zero": {"up": jnp.zeros((8, 20))},
        "wte": jnp.ones((9, 8)),
    }
    rules = {"early/*": "easy", "late/*": "hard"}
    reading = jm.Reading(functools.partial(jm.label_params, rules=rules))
    found = jm.suggest_steps(momentum, 0.1, reading=reading, dtype="float64")
    assert set(found) == {"easy", "hard"}
    for label, s in (("easy", easy), ("hard", hard)):
        got, x = found[label], s
        power = 2 if got.polar.norm == "frobenius" else 4
        x = x / (got.polar.norm_factor * np.sum(x**power) ** (1 / power) + 1e-6)
        for a, b, c in got.polar.table():
            x = a * x + b * x**3 + c * x**5
        error = np.sqrt(np.mean((x - 1) ** 2))
        assert got.predicted == pytest.approx(error, rel=1e-10)
        assert got.worst == pytest.approx(error, rel=1e-10)
        assert got.measured == pytest.approx(error, rel=1e-6)
        assert got.measured <= 0.1
        assert got.matrices == 2
        assert got.products == 3 * got.polar.steps
    assert found["easy"].products < found["hard"].products
    # Nothing cheaper reaches it: not at any lower bound.
    steps, u = found["hard"].polar.steps - 1, hard / np.sum(hard**4) ** 0.25 / 1.02
    for lower in np.geomspace(1e-4, 0.5, 40):
        x = u
        for a, b, c in jm.polar_express_coefficients(steps, lower=lower):
            x = a * x + b * x**3 + c * x**5
        assert np.sqrt(np.mean((x - 1) ** 2)) > 0.1


def test_published_tables_joins_splits_and_rank(rng):
    """A loose target takes five cubics; rank is that of the joined matrix."""
    s = np.geomspace(0.02, 1, 16)
    momentum = {"blocks": [{"q": matrix(rng, s, (16, 16))} for _ in range(4)]}
    loose = jm.suggest_steps(momentum, 0.3, dtype="float32", most=3)["muon"]
    assert loose.matrices == 3
    assert loose.products < 15
    reading = jm.Reading(joins=2, splits={"q": jm.Split(("a", "b"))})
    low = {"0": {"q": jnp.ones((6, 8))}, "1": {"q": jnp.eye(6, 8)}}
    joined = jm.suggest_steps(low, 0.2, reading=reading, dtype="float32")
    assert joined["muon"].measured < 0.25


def test_no_dtype_is_that_of_the_momentum(rng):
    x = matrix(rng, np.geomspace(0.02, 1, 16), (16, 32)).astype("bfloat16")
    measured = [
        jm.suggest_steps({"up": momentum}, 0.1, dtype=dtype)["muon"].measured
        for momentum, dtype in (
            (x, None),
            (x, "bfloat16"),
            (x.astype("float32"), None),
        )
    ]
    assert measured[0] == measured[1] != measured[2]


@pytest.mark.parametrize(
    ("momentum", "target", "match"),
    [
        ({"w": np.diag([1.0, np.nan])}, 0.1, "momentum at 'w' has elements that are"),
        ({"w": np.eye(4)}, 1.5, r"target=1.5; expected a number in \(0, 1\)"),
        ({"w": np.zeros((4, 4))}, 0.1, "no matrices .* other than zeros"),
        ({"wte": np.eye(4), "b": np.ones(3)}, 0.1, "no matrices"),
        (
            {"w": np.diag([1.0, 1e-6])},
            1e-3,
            r"not reached for the 1 matrices with the label 'muon'; expected at least",
        ),
    ],
)
def test_bad_input(momentum, target, match):
    with pytest.raises(ValueError, match=match):
        jm.suggest_steps(momentum, target)
