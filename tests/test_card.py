"""What only a GPU can show; `benchmarks/on_a_card.py` runs the same checks.

JAX_PLATFORMS=cuda python -m pytest tests/test_card.py -m card
"""

import pytest

from benchmarks import card_checks

pytestmark = pytest.mark.card


@pytest.mark.parametrize("recipe", card_checks.RECIPES)
def test_recipe_in_float32(recipe):
    """Against the PyTorch reference, within the bar of the parity suite."""
    found = card_checks.parity(recipe)
    assert found["ok"], found


@pytest.mark.parametrize("recipe", card_checks.LOW_PRECISION_RECIPES)
def test_recipe_in_bfloat16(recipe):
    """No farther from float64 than twice what the reference in bfloat16 is."""
    found = card_checks.low_precision_parity(recipe)
    assert found["ok"], found


@pytest.mark.parametrize("shape", card_checks.KERNEL_SHAPES, ids=str)
def test_kernels(shape):
    """Bit by bit symmetric, and within what rounding allows of plain products."""
    found = card_checks.kernels(shape)
    assert found["ok"], found


@pytest.mark.parametrize(
    "settings",
    [
        {"dtype": "bfloat16"},
        {"dtype": "bfloat16", "symmetric": "kernel"},
        {"dtype": "float32", "form": "standard"},
        {"dtype": "float32", "form": "gram"},
    ],
    ids=lambda settings: " ".join(settings.values()),
)
@pytest.mark.parametrize("shape", [(3, 768, 3072), (2, 1000, 520)], ids=str)
def test_polar_factors(shape, settings):
    """Against the same polynomials in float64."""
    found = card_checks.polar(shape, **settings)
    assert found["ok"], found
