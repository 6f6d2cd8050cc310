"""The mathematics of the pieces in plain float64 NumPy, on one matrix W of (out, in).

Written in PyTorch's orientation, as the papers are, so that a test which agrees has
checked the orientation too. The polynomial iterations act on singular values alone.
"""

import numpy as np


def polar(x, coefficients, norm_factor, eps, norm="frobenius"):
    """U p(S) V^T, with the composed polynomials applied to the singular values."""
    u, s, vt = np.linalg.svd(x, full_matrices=False)
    size = np.sqrt(np.sum(s**2)) if norm == "frobenius" else np.sum(s**4) ** 0.25
    s = s / (norm_factor * size + eps)
    for a, b, c in coefficients:
        s = a * s + b * s**3 + c * s**5
    return (u * s) @ vt


def equilibrate_rows(x, eps=1e-6):
    """MuonEq on the rows of (out, in)."""
    rows = np.linalg.norm(x, axis=1, keepdims=True)
    return x * (np.linalg.norm(x) / np.sqrt(len(x))) / np.maximum(rows, eps)


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
