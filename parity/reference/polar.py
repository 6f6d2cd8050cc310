"""The polar factor of a matrix: by quintic iterations, and exactly by the SVD.

For X = U S V^T with S > 0 the polar factor is U V^T: the nearest matrix with
orthonormal rows (wide) or columns (tall). An odd quintic p, applied as
a X + b (X X^T) X + c (X X^T)^2 X, acts on the singular values alone, so a few of them
that drive [l, 1] to 1 give the polar factor from matrix products.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

Coefficients = Sequence[tuple[float, float, float]]  # one (a, b, c) for each step

# Amsel, Persson, Musco, Gower, "The Polar Express", arXiv 2505.16932, Algorithm 1.
# Singular values from 1e-3, 5 steps, cushion 0.02, safety 0.02: nanochat's table.
POLAR_EXPRESS: Coefficients = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)

# The same algorithm from 1e-3 with cushion 0.02407327424182761 and without safety: the
# table that the paper prints. The eighth step is the limit of all that follow.
POLAR_EXPRESS_PAPER: Coefficients = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542204, -2.947849916737912, 0.5448431082926606),
    (3.948690853482289, -2.908902115962943, 0.5518191394370123),
    (3.3184196573706037, -2.4884880243148757, 0.5100489401237204),
    (2.3006520199548186, -1.6689039845747504, 0.4188073119525674),
    (1.8913014077873995, -1.2679958271945901, 0.3768040894852499),
    (1.875001480814373, -1.2500016453218594, 0.3750001645084104),
    (1.875, -1.25, 0.375),
)


def with_safety(coefficients: Coefficients, safety: float) -> Coefficients:
    """Shrink the argument of each step but the last: p(x) becomes p(x / safety).

    Rounding may carry a singular value past the upper end that the step was made for,
    where the quintic grows fast; the last step has no successor to protect.
    """
    *steps, last = coefficients
    shrunk = [(a / safety, b / safety**3, c / safety**5) for a, b, c in steps]
    return (*shrunk, last)


POLAR_EXPRESS_PAPER_SAFE = with_safety(POLAR_EXPRESS_PAPER, 1.01)

# K. Jordan, "Muon", 2024: one quintic for all steps. It trades convergence for a steep
# start: singular values end in about [0.7, 1.2], not at 1.
NEWTON_SCHULZ: Coefficients = ((3.4445, -4.7750, 2.0315),)


def as_stack(x: Tensor) -> Tensor:
    """View (out, ...) as (1, out, rest): nanochat multiplies stacks, never one matrix.

    It matters to the last bit: the product of a (1, n) matrix rounds otherwise than
    that of a (1, 1, n) stack. A convolution kernel becomes a matrix, too.
    """
    return x.view(1, x.shape[0], -1)


# How the same step is written, and so where it rounds: see `polar_express`.
Order = Literal["nanochat", "jordan", "addmm"]


def polar_express(
    x: Tensor,
    steps: int = 5,
    *,
    coefficients: Coefficients = POLAR_EXPRESS,
    norm_factor: float = 1.02,
    eps: float = 1e-6,
    dtype: torch.dtype = torch.bfloat16,
    order: Order = "nanochat",
) -> Tensor:
    """Polar factor of each matrix by quintic steps, rounding in `dtype` throughout.

    X_0 = X / (norm_factor ||X||_F + eps); then for each (a, b, c)
    X <- a X + (b A + c A^2) X with A = X X^T (wide or square), or
    X <- a X + X (b A + c A^2) with A = X^T X (tall), A being the smaller Gram matrix.
    Steps past the end of `coefficients` repeat its last entry.

    Args:
        x: (..., m, n) matrices of any floating dtype.
        steps: number of quintic steps.
        coefficients: (a, b, c) of each step.
        norm_factor: head room above the Frobenius norm, against rounding past 1.
        eps: added to the norm, so that a zero matrix stays zero.
        dtype: dtype of the iteration and of the result.
        order: where bfloat16 rounds; a few per cent of the result there, nothing in
            float64. "nanochat" forms c (A A). "jordan" turns a tall matrix wide first
            and forms (c A) A. "addmm" turns it, too, and rounds each sum of the step
            once, as torch.optim.Muon does.

    Returns:
        (..., m, n) in `dtype`.

    Source: arXiv 2505.16932, Algorithm 1.
    """
    if order != "nanochat" and x.shape[-2] > x.shape[-1]:
        turned = polar_express(
            x.mT,
            steps,
            coefficients=coefficients,
            norm_factor=norm_factor,
            eps=eps,
            dtype=dtype,
            order=order,
        )
        return turned.mT
    x = x.to(dtype)
    norm = torch.linalg.matrix_norm(x, keepdim=True)  # (..., 1, 1), Frobenius
    x = x / (norm * norm_factor + eps)
    for step in range(steps):
        abc = coefficients[min(step, len(coefficients) - 1)]
        x = _quintic_step(x, *abc, order)
    return x


def _quintic_step(x: Tensor, a: float, b: float, c: float, order: Order) -> Tensor:
    tall = x.shape[-2] > x.shape[-1]
    gram = x.mT @ x if tall else x @ x.mT  # (..., k, k), k = min(m, n)
    if order == "addmm":
        shape, k = x.shape, gram.shape[-1]
        x, gram = x.reshape(-1, *shape[-2:]), gram.reshape(-1, k, k)
        poly = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        return torch.baddbmm(x, poly, x, beta=a).reshape(shape)
    square = (c * gram) @ gram if order == "jordan" else c * (gram @ gram)
    poly = b * gram + square
    return a * x + (x @ poly if tall else poly @ x)


def newton_schulz(
    x: Tensor,
    steps: int = 5,
    *,
    dtype: torch.dtype = torch.bfloat16,
    order: Order = "jordan",
) -> Tensor:
    """Jordan's Newton-Schulz: `polar_express` with his constants, eps 1e-7.

    Source: K. Jordan et al., "Muon: An optimizer for hidden layers", 2024.
    """
    return polar_express(
        x,
        steps,
        coefficients=NEWTON_SCHULZ,
        norm_factor=1.0,
        eps=1e-7,
        dtype=dtype,
        order=order,
    )


def svd_polar(x: Tensor) -> Tensor:
    """Polar factor U V^T by the SVD, in the dtype of `x`, which is (..., m, n).

    Singular values at rounding level (below max(m, n) eps times the largest) count as
    zero, and their directions are left out, as every odd polynomial leaves them out:
    the polar factor of zero is zero.
    """
    u, s, vh = torch.linalg.svd(
        x, full_matrices=False
    )  # (.., m, k), (.., k), (.., k, n)
    cutoff = max(x.shape[-2:]) * torch.finfo(x.dtype).eps * s.amax(-1, keepdim=True)
    return (u * (s > cutoff).unsqueeze(-2)) @ vh
