"""The coefficients of the iterations: tables with their sources, and Remez.

Only numbers: everything here runs on the host in float64, before a program is traced.
"""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from jax_muon import checks

# One odd quintic p(x) = a x + b x^3 + c x^5, written (a, b, c).
Coefficients = tuple[float, float, float]

# Far more than any iteration needs.
MAX_STEPS = 1000

# Jordan's Newton-Schulz quintic, used on every step. It maximizes the slope at zero and
# leaves singular values near 0.7 .. 1.2. https://kellerjordan.github.io/posts/muon/
NEWTON_SCHULZ: Coefficients = (3.4445, -4.7750, 2.0315)

# J. You's five steps. https://github.com/KellerJordan/modded-nanogpt
_YOU: tuple[Coefficients, ...] = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)

# Chebyshev-optimized Newton-Schulz, arXiv 2506.10935.
_CANS: tuple[Coefficients, ...] = (
    (8.4703, -25.1081, 18.6293),
    (4.1828, -3.1087, 0.5806),
    (3.9619, -2.9541, 0.5630),
    (3.2866, -2.4647, 0.5074),
    (2.2737, -1.6447, 0.4162),
)

# DeepSeek-V4's technical report: Jordan's quintic until singular values are near 1,
# then two steps that bring them to 1.
_DEEPSEEK: tuple[Coefficients, ...] = 8 * (NEWTON_SCHULZ,) + 2 * ((2.0, -1.5, 0.5),)

# Five cubics, arXiv 2606.00371: no A A, two products a step instead of three. Its band
# is relaxed: singular values that begin above 7e-3 end in 0.77 .. 1.3.
_CUBIC5: tuple[Coefficients, ...] = (
    (3.3656576, -3.3420992, 0.0),
    (2.5744352, -1.4957376, 0.0),
    (2.5368962, -1.4312570, 0.0),
    (2.4418906, -1.2764040, 0.0),
    (2.2230472, -0.9630650, 0.0),
)

# Where lower / upper is closer to 1 than this the Remez system is singular in float64,
# and its limit (a Taylor expansion at `upper`) is exact to rounding.
_NEARLY_ONE = 1 - 5e-6


def _jordan(steps: int = 5) -> tuple[Coefficients, ...]:
    return steps * (NEWTON_SCHULZ,)


def _nanochat(steps: int = 5) -> tuple[Coefficients, ...]:
    """The five quintics of https://github.com/karpathy/nanochat, and what follows.

    nanochat keeps the five and takes the first of them, so that with fewer steps the
    last one has the safety margin that `polar_express_coefficients(steps)` omits.
    """
    return polar_express_coefficients(max(steps, 5))[:steps]


def _polar_express_paper(steps: int = 8) -> tuple[Coefficients, ...]:
    """The eight quintics that arXiv 2505.16932 prints, with a margin of 1 %.

    TEON (arXiv 2601.23261) uses them so: every step but the last of the table is
    evaluated at x / 1.01, even if fewer steps are taken.
    """
    table = np.array(
        polar_express_coefficients(
            max(steps, 8), lower=1e-3, cushion=0.02407327424182761, safety=0.0
        )
    )
    table[:-1] /= 1.01 ** np.array([1, 3, 5])
    return _as_tuples(table[:steps])


# A table, or a function of the number of steps.
_TABLES: dict[str, Any] = {
    "jordan": _jordan,
    "you": _YOU,
    "cans": _CANS,
    "deepseek": _DEEPSEEK,
    "cubic5": _CUBIC5,
    "nanochat": _nanochat,
    "polar_express_paper": _polar_express_paper,
}

# Names of the published tables.
TABLES = tuple(_TABLES)


def quintics(
    coefficients: str | Coefficients | Sequence[Coefficients], steps: int | None
) -> tuple[Coefficients, ...]:
    """The quintics of an iteration, one for each step.

    Args:
      coefficients: the name of a published table, one of `TABLES`; one (a, b, c) for
        every step; or a sequence of them, whose first `steps` are used.
      steps: number of quintics; None for all that are published or given, and five
        where one quintic serves every step.

    Returns:
      Triples (a, b, c) of Python floats.

    Raises:
      ValueError: an unknown name; coefficients that are neither one triple nor a
        sequence of triples; more steps than there are quintics; |a| outside 0.01 to
        100, b = 0, or |b / a| or |c / b| above 1e6: the iteration divides by a and b.

    Examples:
      >>> quintics("deepseek", None)[-1]
      (2.0, -1.5, 0.5)
      >>> quintics((2, -1.5, 0.5), 1)
      ((2.0, -1.5, 0.5),)
    """
    if steps is not None:
        checks.count("steps", steps, most=MAX_STEPS)
    if isinstance(coefficients, str):
        checks.choice("coefficients", coefficients, TABLES)
        table = _TABLES[coefficients]
    else:
        table = _given(coefficients)
    if callable(table):
        found = table() if steps is None else table(int(steps))
    else:
        found = table[:steps]
    if steps is not None and len(found) < steps:
        what = repr(coefficients) if isinstance(coefficients, str) else "those given"
        raise ValueError(
            f"steps={steps} with coefficients={what}; expected an integer from 1 to "
            f"{len(found)}, as many as there are quintics"
        )
    for a, b, c in found:
        in_range = 0.01 <= abs(a) <= 100 and 0 < abs(b) <= 1e6 * abs(a)
        if not (in_range and abs(c) <= 1e6 * abs(b)):
            raise ValueError(
                f"coefficients ({a}, {b}, {c}); expected |a| from 0.01 to 100, b not "
                "0, and |b / a| and |c / b| up to 1e6"
            )
    return found


def _given(coefficients: Any) -> Any:
    """One triple for any number of steps, or a table, from whatever a user gives."""
    try:
        table = np.asarray(coefficients, dtype=np.float64)
    except (TypeError, ValueError):
        table = np.empty(0)
    if table.shape == (3,):
        return lambda steps=5: steps * _as_tuples(table[None])
    if table.ndim != 2 or table.shape[1] != 3 or len(table) == 0:
        raise ValueError(
            f"coefficients={coefficients!r}; expected one (a, b, c), a sequence of "
            f"them, or one of {', '.join(map(repr, TABLES))}"
        )
    return _as_tuples(table)


def _as_tuples(table: np.ndarray) -> tuple[Coefficients, ...]:
    return tuple((float(a), float(b), float(c)) for a, b, c in table)


def polar_express_coefficients(
    steps: int, *, lower: float = 1e-3, cushion: float = 0.02, safety: float = 0.02
) -> tuple[Coefficients, ...]:
    """Optimal quintics for the matrix sign iteration, one for each step.

    Step after step, the quintic that minimizes the largest |p(x) - 1| over the interval
    [l, u] that holds the singular values, after which the interval is mapped by p.

    Args:
      steps: number of quintics, a Python integer from 1 to 1000.
      lower: smallest singular value that is to reach 1, relative to the largest; in
        (0, 1].
      cushion: the interval of each step begins at no less than `cushion * u`, so that
        small singular values do not pay for the very smallest; in [0, 1].
      safety: every polynomial but the last is evaluated at x / (1 + safety), so that
        rounding does not push singular values out of the interval; in [0, 1].

    Returns:
      `steps` triples (a, b, c) of Python floats.

    Raises:
      ValueError: an argument is outside its range, or not a number.

    Examples:
      >>> [round(a, 4) for a, b, c in polar_express_coefficients(5)]
      [8.1566, 4.0429, 3.8917, 3.2858, 2.3465]

    References:
      Amsel, Persson, Musco, Gower, The Polar Express, arXiv 2505.16932, Algorithm 1
      and section 4.4.
    """
    checks.count("steps", steps, most=MAX_STEPS)
    lower = checks.number("lower", lower, "in (0, 1]", traced=False)
    cushion = checks.number("cushion", cushion, "in [0, 1]", traced=False)
    safety = checks.number("safety", safety, "in [0, 1]", traced=False)
    return _optimal_quintics(int(steps), lower, cushion, safety)


@functools.cache
def _optimal_quintics(
    steps: int, lower: float, cushion: float, safety: float
) -> tuple[Coefficients, ...]:
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


def evaluate(table: Sequence[Coefficients], x: np.ndarray) -> np.ndarray:
    """Singular values after all steps of an iteration, in exact arithmetic."""
    for abc in table:
        x = _evaluate(abc, x)
    return x


def _evaluate(abc: Any, x: Any) -> Any:
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
