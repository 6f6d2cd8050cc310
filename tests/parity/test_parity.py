"""A part of `make parity` that fits into the tests, and proof that it can fail.

Each deliberate error (momentum, beta2, NorMuon's axis) must turn the comparison red: a
suite that accepts those says nothing.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
import torch.nn.functional as F

import jax_muon as jm
from parity import compare, problems, run, third_parties
from parity.compare import BARS, Check
from parity.problems import CONSTANT, MOVING, RECIPES
from parity.references import Nanochat

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


def test_crossed_kernels_do_what_the_weights_do(rng):
    """PyTorch's Linear and Conv2d against the same contraction in JAX."""
    x, weight = rng.standard_normal((5, 20)), rng.standard_normal((24, 20))
    (kernel,) = problems.to_jax({"attn.query.weight": weight}).values()
    heads = np.einsum("bi,ihd->bhd", x, kernel).reshape(5, 24)
    np.testing.assert_allclose(heads, x @ weight.T, atol=1e-12)

    image, weight = rng.standard_normal((2, 3, 7, 8)), rng.standard_normal((5, 3, 2, 4))
    (kernel,) = problems.to_jax({"conv.weight": weight}).values()
    theirs = F.conv2d(*map(torch.from_numpy, (image, weight)))
    with jax.enable_x64(True):
        ours = jax.lax.conv_general_dilated(
            jnp.asarray(image.transpose(0, 2, 3, 1)),
            jnp.asarray(kernel),
            (1, 1),
            "VALID",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
    np.testing.assert_allclose(ours.transpose(0, 3, 1, 2), theirs, atol=1e-12)


def test_all_parameters_cross_and_return():
    start = problems.weights()
    back = problems.to_torch(problems.to_jax(start))
    assert back.keys() == start.keys()
    for name, value in start.items():
        np.testing.assert_array_equal(back[name], value)


@pytest.mark.parametrize(
    ("name", "kind", "dtype"),
    [
        ("nanochat, January", "gaussian", "float64"),
        ("nanochat, January", "tiny", "float32"),
        ("nanochat, January", "zero", "float64"),
        ("nanochat, August", "sparse", "float32"),
        ("muon", "ill_conditioned", "float32"),
        ("moonlight", "gaussian", "float64"),
        ("moonlight", "zero", "float64"),
        ("normuon", "gaussian", "float64"),
        ("teon", "gaussian", "float64"),
        ("muonh", "gaussian", "float64"),
        ("muonh", "low_rank", "float32"),
    ],
)
def test_trajectory(name, kind, dtype):
    check = checked(name, kind, dtype)
    assert check.state == "within", check


def test_a_training_run_has_the_losses_of_pytorch(rng, x64):
    """Twenty steps of nanochat's optimizer, each side on gradients of its own.

    In float64 and to the bar of a trajectory there, where the gradients are given: the
    model is smooth, so losses follow the weights.
    """
    shapes = {"embed": (32, 16), "up": (64, 16), "down": (16, 64), "lm_head": (32, 16)}
    start = {name: rng.standard_normal(shape) / 4 for name, shape in shapes.items()}
    tokens = rng.integers(32, size=(20, 64))
    batches = [(x, (5 * x + 1) % 32) for x in tokens]
    adamw = {"eps": 1e-10, "weight_decay": 0.0}

    def in_torch():
        p = {name: torch.nn.Parameter(torch.tensor(x)) for name, x in start.items()}
        embed, up, down, head = p.values()
        muon = Nanochat([up, down], dtype=torch.float64)
        rest = torch.optim.AdamW([embed, head], 0.01, (0.8, 0.95), **adamw)
        for x, y in batches:
            h = F.embedding(torch.tensor(x), embed)
            h = h + F.linear(F.linear(h, up).relu().square(), down)
            loss = F.cross_entropy(F.linear(h, head), torch.tensor(y))
            for one in p.values():
                one.grad = None
            loss.backward()
            muon.step()
            rest.step()
            yield loss.item()

    def loss_of(p, x, y):
        h = p["embed"][x]
        h = h + jax.nn.relu(h @ p["up"]) ** 2 @ p["down"]
        logits = h @ p["lm_head"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    params = {k: jnp.array(x if k == "embed" else x.T) for k, x in start.items()}
    tx = jm.nanochat(
        adamw=optax.adamw(0.01, 0.8, 0.95, **adamw),
        dtype="float64",
        matrices=jm.read(params, loss_of, *batches[0]),
    )

    @jax.jit
    def step(params, state, x, y):
        loss, grads = jax.value_and_grad(loss_of)(params, x, y)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    state, losses = tx.init(params), []
    for batch in batches:
        params, state, loss = step(params, state, *batch)
        losses.append(float(loss))
    assert losses[-1] < losses[0] / 2
    np.testing.assert_allclose(losses, [*in_torch()], rtol=BARS["float64"])


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


def test_nothing_is_explained_by_rounding_alone():
    """An error above the bar stays one if PyTorch's own is half of it; nan is one."""
    assert compare._rounding(2e-5, 1e-5)
    assert not compare._rounding(3e-5, 1e-5)
    assert not compare._rounding(float("nan"), 1e-5)
    assert Check("", "", 1e-3, 1e-5).state == "FAIL"
    start = {"a": np.zeros(2), "b": np.zeros(2)}
    end = {"a": np.ones(2), "b": np.full(2, np.nan)}
    error = compare.worst(end, {"a": np.ones(2), "b": np.ones(2)}, start)
    assert Check("", "", error, 1e-5).state == "FAIL"
    assert compare.distance(end, {"a": np.zeros(2)}, start) == np.inf
    assert compare.distance(start, {"a": np.zeros(2)}, start) == 0


# ---- Third parties, and the words of the report


def test_optax_muon_is_ours_with_its_bias_correction():
    by_name = {package.name: package for package in third_parties.packages()}
    corrected = by_name["the same, against bias_correction=True"]
    assert third_parties.compare(corrected)[0] < BARS["float32"]


def test_report_marks_failures():
    assert run.marked(Check("", "", 1e-6, 2e-5)) == "1.0e-06"
    assert run.marked(Check("", "", 1e-4, 2e-5, "why")) == "1.0e-04 *"
    assert run.marked(Check("", "", 1e-4, 2e-5)) == "1.0e-04 FAIL"
    assert run.table(["a", "b"], [["x", "1"]]).splitlines()[0] == "| a | b |"
