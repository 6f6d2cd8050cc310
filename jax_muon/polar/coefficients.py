"""The coefficients of the iterations: Jordan's, and the Polar Express by Remez.

Only numbers: everything here runs on the host in float64, before a program is traced.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_muon.base import checks

# One odd quintic p(x) = a x + b x^3 + c x^5, written (a, b, c), and one for each step.
Coefficients = tuple[float, float, float]
Table = tuple[Coefficients, ...]

# Jordan's Newton-Schulz quintic, used on every step. It maximizes the slope at zero and
# leaves singular values near 0.7 .. 1.2. https://kellerjordan.github.io/posts/muon/
NEWTON_SCHULZ: Coefficients = (3.4445, -4.7750, 2.0315)


def quintics(
    coefficients: Coefficients | Sequence[Coefficients], steps: int | None
) -> Table:
    """The quintics that `coefficients` and `steps` of a `NewtonSchulz` mean."""
    if steps is not None:
        checks.check_count("steps", steps)
    try:
        table = np.asarray(coefficients, dtype=np.float64)
    except (TypeError, ValueError):
        table = np.empty(0)
    if table.shape == (3,):
        table = np.tile(table, (steps or 5, 1))
    shaped = table.ndim == 2 and table.shape[1] == 3 and len(table) > 0
    if not (shaped and np.isfinite(table).all()):
        expected = "one finite (a, b, c) or a sequence of them"
        checks.refuse("coefficients", coefficients, expected)
    if len(table) < (steps or 1):
        expected = f"an integer from 1 to {len(table)}, the number of quintics"
        checks.refuse("steps", steps, expected)
    return _as_tuples(table[:steps])


def _as_tuples(table: Any) -> Table:
    return tuple((float(a), float(b), float(c)) for a, b, c in table)


def factored(a: Any, b: Any, c: Any) -> tuple[Any, Any, Any]:
    """The (a, b, q) of a + b (r + q r^2) = a + b r + c r^2.

    (2, 0, -1) becomes (2, -2^-60, 2^60): a b of 0 is one that rounds to nothing beside
    c, also in float64.
    """
    if isinstance(b, jax.Array):
        b = jnp.where(abs(b) > abs(c) * 2.0**-60, b, c * 2.0**-60)
        return a, b, jnp.where(b == 0, 0, c / jnp.where(b == 0, 1, b))
    b = b if abs(b) > abs(c) * 2.0**-60 else c * 2.0**-60
    return a, b, c / b if b else 0.0


def polar_express_coefficients(
    steps: int,
    *,
    lower_bound: float = 1e-3,
    cushion: float = 0.02,
    safety: float = 0.02,
) -> Table:
    """Optimal quintics for the polar factor, one for each step.

    Each step takes the quintic p that minimizes the largest |p(x) - 1| over the
    interval [l, u] of the singular values; p maps it to the interval of the next step.

    Args:
      steps: number of quintics.
      lower_bound: smallest singular value that is to reach 1, relative to the largest.
      cushion: the interval of each step begins at no less than `cushion * u`, so that
        small singular values do not pay for the very smallest.
      safety: every polynomial but the last is evaluated at x / (1 + safety), so that
        rounding does not push singular values out of the interval.

    Examples:
      >>> [round(a, 4) for a, b, c in polar_express_coefficients(5)]
      [8.1566, 4.0429, 3.8917, 3.2858, 2.3465]

    References:
      Amsel, Persson, Musco, Gower, The Polar Express, arXiv 2505.16932, Algorithm 1
      and section 4.4.
    """
    checks.check_count("steps", steps)
    lower_bound = checks.as_number("lower_bound", lower_bound, "in (0, 1]")
    cushion = checks.as_number("cushion", cushion, "in [0, 1]")
    safety = checks.as_number("safety", safety, "in [0, 1]")
    table = []
    low, high = lower_bound, 1.0
    for step in range(steps):
        abc = _best_quintic(max(low, cushion * high), high)
        if low < cushion * high:
            # The optimum was for a shorter interval: recentre it on the true one.
            abc = abc * 2 / (_evaluate(abc, low) + _evaluate(abc, high))
        if step < steps - 1:
            abc = abc / (1 + safety) ** np.array([1, 3, 5])
        table.append(abc)
        low = float(_evaluate(abc, low))
        high = 2 - low
    return _as_tuples(table)


def nanochat(steps: int) -> Table:
    """The quintics of https://github.com/karpathy/nanochat.

    It takes the first of five, so with fewer steps the last one has a safety margin.
    """
    return polar_express_coefficients(max(steps, 5))[:steps]


def polar_express_paper(steps: int) -> Table:
    """The eight quintics that arXiv 2505.16932 prints, with a margin of 1 %.

    TEON (arXiv 2601.23261) uses them so: all but the last of the table have it.
    """
    cushion = 0.02407327424182761
    table = np.array(
        polar_express_coefficients(max(steps, 8), cushion=cushion, safety=0.0)
    )
    table[:-1] /= 1.01 ** np.array([1, 3, 5])
    return _as_tuples(table[:steps])


def _evaluate(abc: np.ndarray, x: float) -> float:
    a, b, c = abc
    return a * x + b * x**3 + c * x**5


def _best_quintic(low: float, high: float) -> np.ndarray:
    """Odd quintic nearest to 1 on [low, high] in the maximum norm, by Remez."""
    if low > (1 - 5e-6) * high:
        # The system is singular in float64. Its limit, a Taylor expansion at `high`, is
        # exact to rounding.
        return np.array([15 / 8, -10 / 8, 3 / 8]) / high ** np.array([1, 3, 5])
    # The error 1 - p alternates in sign at low < q < r < high; q and r are inner
    # extrema of p, hence roots of its derivative.
    q, r = (3 * low + high) / 4, (low + 3 * high) / 4
    error = np.inf
    for _ in range(100):  # five or six are enough
        x = np.array([low, q, r, high])
        system = np.stack([x, x**3, x**5, [1, -1, 1, -1]], axis=1)
        *abc, new_error = np.linalg.solve(system, np.ones(4))
        if abs(error - new_error) <= 1e-15:
            break
        error = new_error
        a, b, c = abc
        squares = (-3 * b + np.array([-1, 1]) * np.sqrt(9 * b**2 - 20 * a * c)) / 10 / c
        q, r = np.sqrt(squares)
    return np.array(abc)
