"""Tables of coefficients against published ones and against their definition."""

import numpy as np
import pytest

from jax_muon.polar import coefficients
from jax_muon.polar.coefficients import (
    NEWTON_SCHULZ,
    polar_express_coefficients,
    quintics,
)

# nanochat's table (github.com/karpathy/nanochat).
NANOCHAT = [
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
]
# The first six quintics of arXiv 2505.16932; from the seventh on, it prints the limit.
PAPER = [
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
]


def evaluate(table, x):
    for a, b, c in table:
        x = a * x + b * x**3 + c * x**5
    return x


@pytest.mark.parametrize("steps", [5, 3])
def test_nanochats_table_is_the_published_one(steps):
    found = coefficients.nanochat(steps)
    np.testing.assert_allclose(found, NANOCHAT[:steps], rtol=0, atol=1e-12)
    assert coefficients.nanochat(7) == polar_express_coefficients(7)
    assert quintics(NEWTON_SCHULZ, 7) == ((3.4445, -4.7750, 2.0315),) * 7


def test_the_papers_table_has_a_margin_in_all_steps_but_the_last():
    margin, limit = 1.01 ** np.array([1, 3, 5]), np.array([1.875, -1.25, 0.375])
    paper = coefficients.polar_express_paper
    eight, nine = (np.array(paper(n)) for n in (8, 9))
    np.testing.assert_allclose(eight[:6], np.array(PAPER) / margin, rtol=0, atol=1e-12)
    np.testing.assert_allclose(eight[7:], [limit], atol=1e-8)
    np.testing.assert_allclose(nine[7:], [limit / margin, limit], atol=1e-8)
    assert paper(3) == paper(8)[:3]


@pytest.mark.parametrize("lower", [1e-6, 1e-3, 0.3, 0.9])
def test_first_quintic_is_optimal(lower):
    """Equioscillation: |p - 1| has the same maximum at four points, of turning sign."""
    table = polar_express_coefficients(1, lower_bound=lower, cushion=0, safety=0)
    error = evaluate(table, np.linspace(lower, 1, 200_001)) - 1
    turning = error[np.abs(error) > np.abs(error).max() * (1 - 1e-6)]
    signs = np.sign(turning)
    assert np.count_nonzero(np.diff(signs)) == 3
    assert signs[0] == -1


@pytest.mark.parametrize("safety", [0.0, 0.02])
@pytest.mark.parametrize("cushion", [0.0, 0.02, 1.0])
@pytest.mark.parametrize("lower", [1e-12, 1e-3, 1 - 1e-7, 1.0])
def test_long_schedules_converge_where_the_interval_says(lower, cushion, safety):
    table = polar_express_coefficients(
        60, lower_bound=lower, cushion=cushion, safety=safety
    )
    x = evaluate(table, np.geomspace(lower, 1, 1000))
    # With safety, the last step undoes a margin of 2 percent by one quintic.
    np.testing.assert_allclose(x, 1, atol=1e-4 if safety else 1e-12)
