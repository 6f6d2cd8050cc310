"""A part of `make parity` that fits into the tests, and proof that it can fail.

The references themselves are compared with NumPy and with torch.optim.Muon.
"""

from functools import partial

import numpy as np
import pytest
import torch

import jax_muon as jm
from parity import compare, problems, run, third_parties
from parity.compare import BARS, Check
from parity.problems import CONSTANT, MOVING, RECIPES
from parity.references import (
    NEWTON_SCHULZ,
    POLAR_EXPRESS,
    TORCH,
    TORCH_MATCH_RMS,
    Muon,
    newton_schulz,
    polar_express,
    replay,
)
from tests import oracle

torch.set_num_threads(1)
STEPS = 10
NAMES = ("wide.weight", "conv.weight", "attn.query.weight", "attn.out.weight")
NAMES += ("square.weight", "tall.weight", "row.weight", "column.weight")
NAMES += ("pool.0.weight", "pool.1.weight", *problems.ADAMW_NAMES)


def checked(name, kind, dtype, rates=MOVING, **changed):
    """The verdict over ours, whose arguments may be changed, and the reference."""
    recipe, grads = RECIPES[name], problems.gradients(kind, STEPS)
    tx = recipe.ours(rates, dtype, **changed)
    ours = compare.runner(tx, dtype, NAMES)(grads)
    return compare.check(recipe, kind, dtype, ours, grads, rates)


SHAPES = pytest.mark.parametrize("shape", [(12, 12), (8, 20), (20, 8), (1, 9), (9, 1)])


@SHAPES
@pytest.mark.parametrize("order", third_parties.ORDERS)
def test_references_of_polar_factors_act_on_singular_values(rng, shape, order):
    x = torch.from_numpy(rng.standard_normal(shape))
    for found, *expected in (
        (polar_express(x, dtype=x.dtype, order=order), POLAR_EXPRESS, 1.02, 1e-6),
        (newton_schulz(x, 6, dtype=x.dtype, order=order), 6 * NEWTON_SCHULZ, 1.0, 1e-7),
    ):
        wanted = oracle.polar(x.numpy(), *expected)
        np.testing.assert_allclose(found, wanted, atol=1e-13)


@SHAPES
@pytest.mark.parametrize(
    ("preset", "rule"), [(TORCH, "original"), (TORCH_MATCH_RMS, "match_rms_adamw")]
)
def test_a_reference_is_torch_optim_muon(rng, shape, preset, rule):
    """torch takes the polar factor in bfloat16 only; the same sums round alike."""
    start, *grads = torch.from_numpy(rng.standard_normal((6, *shape))).float()
    ours, theirs = (
        replay(
            {"w": start},
            [{"make": make, "params": ["w"], "lr": 0.02, "weight_decay": 0.1}],
            [{"w": grad} for grad in grads],
        )[-1]["w"]
        for make in (
            partial(Muon, **preset, momentum=0.9),
            partial(torch.optim.Muon, adjust_lr_fn=rule, momentum=0.9),
        )
    )
    assert (ours - theirs).norm() / (theirs - start).norm() < 1e-6


TRAJECTORIES = [
    ("nanochat, January", "gaussian", "float64"),
    ("nanochat, January", "tiny", "float32"),
    ("nanochat, July", "sparse", "float32"),
    ("muon", "ill_conditioned", "float32"),
    ("moonlight", "zero", "float64"),
    ("normuon", "gaussian", "float64"),
    ("teon", "gaussian", "float64"),
    ("muonh", "low_rank", "float32"),
]


@pytest.mark.parametrize(("name", "kind", "dtype"), TRAJECTORIES)
def test_trajectory(name, kind, dtype):
    check = checked(name, kind, dtype)
    assert check.state == "within", check


# ---- Deliberate errors


def test_a_wrong_constant_or_axis_turns_red(monkeypatch):
    def is_red(name, **changed):
        check = checked(name, "gaussian", "float32", CONSTANT, **changed)
        return check.state == "FAIL"

    assert is_red("muon", momentum=0.94)
    assert is_red("nanochat, January", beta2=0.94)
    per_output = partial(jm.scale_by_normuon, axis="output")
    monkeypatch.setattr("jax_muon.transforms.scaling.scale_by_normuon", per_output)
    assert is_red("nanochat, January")


def test_nothing_is_explained_by_rounding_alone():
    """An error above the bar stays one if PyTorch's own is half of it; nan is one."""
    assert compare._rounding(2e-5, 1e-5)
    assert not compare._rounding(3e-5, 1e-5)
    assert not compare._rounding(float("nan"), 1e-5)
    start, end = np.zeros(2), np.array([1.0, np.nan])
    for error in (1e-3, compare.worst({"a": end}, {"a": end + 1}, {"a": start})):
        check = Check("", "", error, 1e-5)
        assert (check.state, run.marked(check)[-4:]) == ("FAIL", "FAIL")
    assert run.marked(Check("", "", 1e-6, 2e-5)) == "1.0e-06"
    assert run.marked(Check("", "", 1e-4, 2e-5, "why")) == "1.0e-04 *"
    assert compare.distance({"a": start}, {"a": start}, {"a": start}) == 0


def test_optax_muon_is_ours_with_its_bias_correction():
    by_name = {package.name: package for package in third_parties.packages()}
    corrected = by_name["the same, against bias_correction=True"]
    assert third_parties.compare(corrected)[0] < BARS["float32"]
