"""The benchmarks run, at tiny sizes, and what they compute without a clock is right."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import parameters, program, step
from benchmarks.parameters import model_parameters
from benchmarks.reading_models import Model, flax
from benchmarks.reading_models.__main__ import read_model
from tests.programs.parts import floats


@pytest.mark.parametrize("name", step.NAMES)
def test_contenders_move_every_parameter_and_orthogonalize_matrices(name):
    """Of Gaussian numbers, the median singular value is 0.4 of the largest."""
    shapes = model_parameters("tiny", jnp.float32, scanned=name != "nanochat")
    params, grads = (step.random_like(shapes, seed) for seed in (0, 1))
    init, one_step = step.make_step(name, "float32", shapes)
    new, _ = jax.jit(one_step)(params, init(params), grads)
    for old, leaf in zip(jax.tree.leaves(params), jax.tree.leaves(new), strict=True):
        assert jnp.isfinite(leaf).all()
        assert (old != leaf).mean() > 0.99
    after, before = (x["blocks"].get("00", x["blocks"])["q"] for x in (new, params))
    values = jnp.linalg.svdvals(after - before)
    assert (jnp.median(values) / values.max() > 0.6) == (name != "adamw")


def test_a_pair_of_processes(tmp_path, capsys):
    """The command as `make bench` gives it, and a second run that adds to its file."""
    words = ["--models", "tiny", "--rounds", "2", "--json", str(tmp_path), "--pairs"]
    step.main([*words, "scanned to optax"])
    path = tmp_path / "step_cpu.json"
    (first,) = json.loads(path.read_text())
    for ratio in (1.0, 1.5):
        other = first | {"theirs": "torch", "ratio": ratio}
        program.save_rows([other], path, step.CASE)
    assert [(r["theirs"], r["ratio"]) for r in json.loads(path.read_text())] == [
        ("optax, float32, scanned", first["ratio"]),
        ("torch", 1.5),
    ]
    assert first["ratio"] == pytest.approx(np.median(first["ratios"]))
    assert first["ours_info"]["temporary_bytes"] > 0
    assert first["run"]["versions"]["jax"] == jax.__version__
    assert "nanochat, float32, scanned | optax" in capsys.readouterr().out


def test_torch_contender():
    low = step.Contender("torch-muon", dtype="bfloat16")
    contender = step.TorchContender(low, "tiny", "cpu")
    groups = [group for o in contender.optimizers for group in o.param_groups]
    after = [p for group in groups for p in group["params"]]
    before = [p.detach().clone() for p in after]
    assert contender.step() > 0
    assert len(after) == 2 * 6 + 2
    assert all((a != b).any() for a, b in zip(after, before, strict=True))


def test_nominal_flops():
    """12 x (4 square, 2 of aspect 4): 5 (4 m m n + 2 m^3) each."""
    m = 768
    square, long = 30 * m**3, (20 * 4 + 10) * m**3
    assert parameters.nominal_flops("gpt2-124m") == 12 * (4 * square + 2 * long)


# --- models of Flax, read by their losses


@pytest.mark.parametrize("name", flax.MODELS)
def test_modules_of_flax(name):
    counts, kinds = read_model(flax.MODELS[name])
    assert {*counts} == {"right"}, kinds


def test_a_wrong_answer_is_counted_and_shown():
    def loss(params, x):
        return jnp.mean((jax.nn.relu(x @ params["up"]) @ params["down"]) ** 2)

    params = {"up": floats(4, 8), "down": floats(8, 3), "old": floats(3, 3)}
    answers = {"up": "oi", "down": "adamw", "old": "io"}
    counts, kinds = read_model(Model(lambda: (loss, params, (floats(2, 4),)), answers))
    assert counts == {"wrong": 1, "right": 1, "unused": 1}
    assert any("wrong up (4, 8): kernel, muon io; right is oi" in x for x in kinds)
