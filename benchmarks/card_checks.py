"""Whether what a GPU computes is right: for `on_a_card.py` and `tests/test_card.py`.

Each check returns a dictionary with the numbers, the most that they may be, and under
"ok" the verdict. PyTorch's side runs on the CPU, where no TF32 rounds its products.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_muon as jm
from benchmarks import polar as benchmark

RECIPES = (
    "nanochat, January",
    "nanochat, August",
    "muon",
    "moonlight",
    "normuon",
    "muonh",
    "normuonh",
    "muon, sum",
    "muon, rms 0.2",
    "teon",
)
LOW_PRECISION_RECIPES = RECIPES[:5]
STEPS = 10
KERNEL_SHAPES = ((2, 768, 768), (2, 768, 3072), (2, 1000, 3000), (1, 2048, 2048))


def parity(name: str) -> dict[str, Any]:
    """A recipe against its PyTorch reference, float32, 10 steps with moving rates."""
    import torch

    from parity import compare, problems

    torch.set_num_threads(1)  # matrices are small
    recipe, rates = problems.RECIPES[name], problems.MOVING
    tx = recipe.ours(problems.jax_rates(rates, "float32"), "float32")
    grads = problems.gradients("gaussian", STEPS)
    ours = compare.runner(tx, "float32")(grads)
    check, _ = compare.check(recipe, "gaussian", "float32", ours, grads, rates)
    return {
        "ok": check.state != "FAIL",
        "error": check.error,
        "bar": check.bar,
        "why": check.why,
    }


def low_precision_parity(name: str) -> dict[str, Any]:
    """A recipe in bfloat16, by its distance to the reference in float64.

    It may be twice as far as the reference in bfloat16: a GPU rounds the sums of a
    product as PyTorch does, and where XLA takes no cuBLASLt every term.
    """
    import torch

    from parity import spread

    torch.set_num_threads(1)
    found = spread.measure(name)
    return {
        "ok": found.ours_exact <= 2 * found.reference_exact,
        "error": found.ours_exact,
        "bar": 2 * found.reference_exact,
        "to_reference": found.ours,
        "between_references": max(found.variants.values()),
    }


def on_a_gpu() -> bool:
    """Whether kernels can run."""
    return jax.default_backend() == "gpu"


def kernels(shape: tuple[int, int, int]) -> dict[str, Any]:
    """Symmetric products by kernels against plain ones in float32.

    As a share of the bound that `symmetric_kernel.check` derives.
    """
    from benchmarks import symmetric_kernel
    from jax_muon.polar.hopper.kernel import TILING

    if not on_a_gpu():
        raise ImportError("kernels need a GPU; their tests interpret them")
    found = {}
    for product in symmetric_kernel.products([shape]):
        operand = symmetric_kernel.operand(product)
        found[product.name] = symmetric_kernel.check(product, TILING, operand)
    return {"ok": True, "bar": 1.0, **found}  # the check raises where it is above 1


def polar(shape: tuple[int, ...], **settings: Any) -> dict[str, Any]:
    """Five steps on Gaussian matrices against the same polynomials in float64.

    Args:
      shape: of the stack.
      **settings: of `PolarExpress`.

    Returns:
      The relative distance. The most that it may be: 5e-5 in float32; in bfloat16
      0.06, where plain bfloat16 code, which rounds every term, has 0.04.
    """
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    found = jax.jit(jm.PolarExpress(**settings))(jnp.asarray(x))
    error = benchmark.rounding(found, x)
    bar = {"float32": 5e-5, "bfloat16": 0.06}[settings["dtype"]]
    return {"ok": error <= bar, "error": error, "bar": bar}
