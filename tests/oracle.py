"""The pieces and the recipes in plain float64 NumPy, on one matrix W of (out, in).

Written in PyTorch's orientation, as the papers are, so that a test which agrees has
checked the orientation too. The polynomial iterations act on singular values alone.
"""

import numpy as np

from jax_muon.polar.coefficients import NEWTON_SCHULZ, polar_express_coefficients
from tests.recipes import ON_SPHERES


def polar(x, coefficients, norm_factor, eps, norm="frobenius"):
    """U p(S) V^T, with the composed polynomials applied to the singular values."""
    u, s, vt = np.linalg.svd(x, full_matrices=False)
    size = np.sqrt(np.sum(s**2)) if norm == "frobenius" else np.sum(s**4) ** 0.25
    s = s / (norm_factor * size + small(eps, size))
    for a, b, c in coefficients:
        s = a * s + b * s**3 + c * s**5
    return (u * s) @ vt


def small(eps, norm):
    """The eps of a matrix of this norm: below 2^-13 in proportion to it."""
    return eps if norm >= 2.0**-13 else eps * (norm * 2.0**13 + 2.0**-20)


def equilibrate_rows(x, eps=1e-6):
    """MuonEq on the rows of (out, in)."""
    rows, norm = np.linalg.norm(x, axis=1, keepdims=True), np.linalg.norm(x)
    return x * (norm / np.sqrt(len(x))) / np.maximum(rows, small(eps, norm))


def normuon(x, v, beta2, axis, eps=1e-10):
    """One NorMuon step: the new x and the new mean squares v."""
    v = v + (1 - beta2) * (np.mean(x**2, axis=axis, keepdims=True) - v)
    scaled = x / np.sqrt(np.maximum(v, eps))
    size = np.linalg.norm(x) / max(np.linalg.norm(scaled), eps)
    return scaled * size, v


def hyperball(w, u, lr, radius):
    """One step on the sphere: the new w and radius, 0 inside a zero start's sphere."""
    target = radius or np.sqrt(len(w))
    w = w - lr * target * u / np.linalg.norm(u)
    if not radius and np.linalg.norm(w) < target:
        return w, 0.0
    return w * target / np.linalg.norm(w), target


TABLE = polar_express_coefficients(5)
JORDAN = ([NEWTON_SCHULZ] * 5, 1.0, 1e-7)
POLAR = {  # coefficients; factor and eps of the norm
    "nanochat": (TABLE, 1.02, 1e-6),
    "nanochat of March": (TABLE, 1.01, 1e-6),
    "nanochat later": (TABLE, 1.01, 1e-6),
    "nanochat of 3 steps": (TABLE[:3], 1.02, 1e-6),
}
FACTOR = {  # of a shape (in, out)
    "moonlight": lambda fan_in, out: 0.2 * max(fan_in, out) ** 0.5,
    "normuon": lambda fan_in, out: 0.2 * (fan_in * out) ** 0.5,
}


# Learning rate, momentum and weight decay of a step.
RATES = (
    lambda t: 0.02 / (1 + t),
    lambda t: 0.85 + 0.01 * t,
    lambda t: 0.1 / (1 + t),
)


def step(name, t, g, w, m, v, radius):
    """One step of a recipe, in its order: w, m, v and radius after it."""
    lr, mu, wd = (rate(t) for rate in RATES)
    out, fan_in = w.shape
    is_nanochat, later = name.startswith("nanochat"), name == "nanochat later"
    m = m + (1 - mu) * (g - m)
    x = m if name.startswith("normuon") else g + mu * (m - g)
    if later:
        x = equilibrate_rows(x)
    x = polar(x, *POLAR.get(name, JORDAN))
    if later:
        x = x * min(x.shape) ** 0.5 / np.linalg.norm(x)
    if is_nanochat:
        axis = 1 if out >= fan_in else 0
        x, v = normuon(x, v, 0.9 if later or "March" in name else 0.95, axis)
    elif name.startswith("normuon"):
        x, v = normuon(x, v, 0.95, axis=1, eps=1e-16)
    if name in ON_SPHERES:
        w, radius = hyperball(w, x, 30 * lr, radius)
        return w, m, v, radius
    if name == "normuon":
        x = x / np.linalg.norm(x)
    factor = FACTOR.get(name, lambda fan_in, out: max(1, out / fan_in) ** 0.5)
    x = factor(fan_in, out) * x
    # nanochat scales the decay, too, and decays only weights that the step shrinks.
    decay = factor(fan_in, out) * w * (x * w >= 0) if is_nanochat else w
    return w - lr * (x + wd * decay), m, v, radius
