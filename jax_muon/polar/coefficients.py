"""Numbers: the coefficients of the polynomial iterations that orthogonalize.

Everything here runs on the host in float64, once, while a program is traced; nothing
here touches an array of the model. `iteration.py` applies what this file computes.
"""

import functools

import numpy as np

from jax_muon.checks import check_count

# One odd quintic p(x) = a x + b x^3 + c x^5, written (a, b, c).
Coefficients = tuple[float, float, float]

# Jordan's Newton-Schulz quintic, used on every step. It maximizes the slope at zero and
# leaves singular values near 0.7 .. 1.2. https://kellerjordan.github.io/posts/muon/
NEWTON_SCHULZ: Coefficients = (3.4445, -4.7750, 2.0315)

# Where lower / upper is closer to 1 than this the Remez system is singular in float64,
# and its limit (a Taylor expansion at `upper`) is exact to rounding.
_NEARLY_ONE = 1 - 5e-6


@functools.cache
def polar_express_coefficients(
    steps: int, *, lower: float = 1e-3, cushion: float = 0.02, safety: float = 0.02
) -> tuple[Coefficients, ...]:
    """Optimal quintics for the matrix sign iteration, one for each step.

    Step after step, the quintic that minimizes the largest |p(x) - 1| over the interval
    [l, u] that holds the singular values, after which the interval is mapped by p.

    Args:
      steps: number of quintics, at least 1.
      lower: smallest singular value that is to reach 1, relative to the largest; in
        (0, 1].
      cushion: the interval of each step begins at no less than `cushion * u`, so that
        small singular values do not pay for the very smallest; in [0, 1].
      safety: every polynomial but the last is evaluated at x / (1 + safety), so that
        rounding does not push singular values out of the interval; at least 0.

    Returns:
      `steps` triples (a, b, c) of Python floats.

    Raises:
      ValueError: an argument is outside its range.

    Examples:
      >>> [round(a, 4) for a, b, c in polar_express_coefficients(5)]
      [8.1566, 4.0429, 3.8917, 3.2858, 2.3465]

    References:
      Amsel, Persson, Musco, Gower, The Polar Express, arXiv 2505.16932, Algorithm 1
      and section 4.4.
    """
    check_count("steps", steps)
    if not 0 < lower <= 1:
        raise ValueError(f"lower={lower}: valid is a number in (0, 1]")
    if not 0 <= cushion <= 1:
        raise ValueError(f"cushion={cushion}: valid is a number in [0, 1]")
    if safety < 0:
        raise ValueError(f"safety={safety}: valid is a number of at least 0")

    schedule = []
    low, high = lower, 1.0
    for step in range(steps):
        abc = _best_quintic(max(low, cushion * high), high)
        if low < cushion * high:
            # The optimum was for a shorter interval: recentre it on the true one.
            abc = abc * 2 / (_evaluate(abc, low) + _evaluate(abc, high))
        if step < steps - 1:
            abc = abc / (1 + safety) ** np.array([1, 3, 5])
        schedule.append((float(abc[0]), float(abc[1]), float(abc[2])))
        low = float(_evaluate(abc, low))
        high = 2 - low
    return tuple(schedule)


def _evaluate(abc: np.ndarray, x: float) -> float:
    a, b, c = abc
    return a * x + b * x**3 + c * x**5


def _best_quintic(low: float, high: float) -> np.ndarray:
    """Odd quintic nearest to 1 on [low, high] in the maximum norm, by Remez."""
    if low > _NEARLY_ONE * high:
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
