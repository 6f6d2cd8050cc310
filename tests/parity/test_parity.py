"""A part of `make parity` that fits into the tests, and proof that it can fail.

Each deliberate error (momentum, norm factor, NorMuon's axis) must turn the comparison
red: a suite that accepts those says nothing.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jax_muon as jm
from parity import compare, problems, run, third_parties, weights
from parity.compare import Check
from parity.problems import CONSTANT, MOVING, RECIPES

torch.set_num_threads(1)
STEPS = 10


def checked(name, kind, dtype, rates=MOVING, **changed):
    """The verdict over ours, whose arguments may be changed, and the reference."""
    recipe = RECIPES[name]
    tx = recipe.ours(problems.jax_rates(rates, dtype), dtype, **changed)
    grads = problems.gradients(kind, STEPS)
    ours = compare.runner(tx, dtype)(grads)
    return compare.check(recipe, kind, dtype, ours, grads, rates)


# ---- Weights cross orientation


@pytest.mark.parametrize(
    ("torch_shape", "flax_shape"),
    [
        ((6, 4), (4, 6)),
        ((6, 4), (4, 2, 3)),  # to 2 heads of 3
        ((4, 6), (2, 3, 4)),  # from 2 heads of 3
        ((6, 4, 3, 5), (3, 5, 4, 6)),
        ((6, 4, 3), (3, 4, 6)),
    ],
)
def test_kernels_cross_and_return(rng, torch_shape, flax_shape):
    weight = rng.standard_normal(torch_shape)
    kernel = weights.kernel_to_flax(weight, flax_shape)
    assert kernel.shape == flax_shape
    np.testing.assert_array_equal(weights.kernel_to_torch(kernel, torch_shape), weight)


def test_crossed_kernels_do_what_the_weights_do(rng):
    """PyTorch's Linear and Conv2d against the same contraction in JAX."""
    x, weight = rng.standard_normal((5, 4)), rng.standard_normal((6, 4))
    kernel = weights.kernel_to_flax(weight, (4, 2, 3))
    heads = np.einsum("bi,ihd->bhd", x, kernel).reshape(5, 6)
    np.testing.assert_allclose(heads, x @ weight.T, atol=1e-12)

    image, weight = rng.standard_normal((2, 3, 7, 8)), rng.standard_normal((5, 3, 2, 4))
    theirs = torch.nn.functional.conv2d(*map(torch.from_numpy, (image, weight)))
    with jax.enable_x64(True):
        ours = jax.lax.conv_general_dilated(
            jnp.asarray(image.transpose(0, 2, 3, 1)),
            jnp.asarray(weights.kernel_to_flax(weight, (2, 4, 3, 5))),
            (1, 1),
            "VALID",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
    np.testing.assert_allclose(ours.transpose(0, 3, 1, 2), theirs, atol=1e-12)


def test_a_whole_tree_crosses_and_returns():
    start = problems.weights()
    tree = weights.to_flax(start, problems.FLAX_SHAPES)
    back = weights.to_torch(tree, problems.SHAPES)
    assert back.keys() == start.keys()
    for name, value in start.items():
        np.testing.assert_array_equal(back[name], value)
    del start["row.weight"]
    with pytest.raises(ValueError, match=r"no counterpart for \['row\.weight'\]"):
        weights.to_flax(start, problems.FLAX_SHAPES)
    with pytest.raises(ValueError, match="cannot reshape array of size 576"):
        weights.to_torch({"kernel": np.zeros((24, 24))}, {"weight": (3, 3)})
    with pytest.raises(ValueError, match=r"shape \(2,\) does not become \(3,\)"):
        weights.to_torch({"bias": np.zeros(2)}, {"bias": (3,)})


# ---- Trajectories


@pytest.mark.parametrize(
    ("name", "kind", "dtype"),
    [
        ("nanochat, January", "gaussian", "float64"),
        ("nanochat, August", "sparse", "float32"),
        ("normuon", "gaussian", "float64"),
        ("muonh", "gaussian", "float64"),
        ("normuonh", "low_rank", "float32"),
    ],
)
def test_trajectory(name, kind, dtype):
    check = checked(name, kind, dtype)
    assert check.state == "within", check


# ---- Deliberate errors


@pytest.mark.parametrize(
    ("name", "changed"),
    [("muon", {"momentum": 0.94}), ("nanochat, January", {"beta2": 0.94})],
)
def test_a_wrong_constant_turns_red(name, changed):
    check = checked(name, "gaussian", "float32", CONSTANT, **changed)
    assert check.state == "FAIL", check


def test_normuon_on_the_wrong_axis_turns_red(monkeypatch):
    per_output = partial(jm.scale_by_normuon, axis="output")
    monkeypatch.setattr("jax_muon.recipes.scale_by_normuon", per_output)
    check = checked("nanochat, January", "gaussian", "float32", CONSTANT)
    assert check.state == "FAIL", check


def test_nothing_is_explained_by_flips_or_rounding_alone():
    """An error above the bar stays one if neither accounts for it."""
    found = {"w": compare.Difference(1e-3, flips=1, unflipped=1e-4)}
    assert not compare._flips(found, 2e-5)
    assert compare._flips(found, 2e-4)
    assert not compare._rounding(3e-5, 1e-5)
    assert Check("", "", 1e-3, 1e-5).state == "FAIL"
    assert Check("", "", float("nan"), 1e-5).state == "FAIL"
    nan = compare.difference(np.full(2, np.nan), np.ones(2), np.zeros(2))
    assert not compare._flips(found | {"nan": nan}, 2e-4)


def test_an_error_in_one_entry_is_not_taken_for_a_flip(rng):
    """A flip differs by the decay, lr wd W; an error of another size is an error."""
    start = rng.standard_normal((4, 3))
    reference = [start - 0.1, start - 0.2]
    lr, decay = [0.02, 0.02], [0.1, 0.1]
    flipped, wrong = (reference[0].copy(), reference[1].copy()), reference[1].copy()
    for after in flipped:
        after[1, 2] += 0.02 * 0.1 * start[1, 2] * (4 / 3) ** 0.5
    found = compare.flipped_entries(flipped, reference, start, lr, decay)
    assert found.sum() == 1
    assert found[1, 2]
    wrong[1, 2] += 3 * 0.02 * 0.1 * abs(start[1, 2])
    after = (reference[0], wrong)
    assert not compare.flipped_entries(after, reference, start, lr, decay).any()


# ---- Third parties, and the words of the report


def test_optax_muon_is_ours_but_for_the_bias_correction():
    by_name = {package.name: package for package in third_parties.packages()}
    with_dozat = by_name["the same, against ours with its Nesterov"]
    assert third_parties.compare(with_dozat).ours < compare.BARS["float32"]


def test_report_marks_failures():
    assert run.marked(Check("", "", 1e-6, 2e-5)) == "1.0e-06"
    assert run.marked(Check("", "", 1e-4, 2e-5, "why")) == "1.0e-04 *"
    assert run.marked(Check("", "", 1e-4, 2e-5)) == "1.0e-04 FAIL"
    assert run.table(["a", "b"], [["x", "1"]]).splitlines()[0] == "| a | b |"
