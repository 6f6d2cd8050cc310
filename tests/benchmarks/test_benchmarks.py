"""The benchmarks run, at tiny sizes, and what they compute without a clock is right."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import polar_errors, program, step
from benchmarks.reading_models import Model, flax
from benchmarks.reading_models.__main__ import read_model
from tests.programs.parts import floats

CONTENDERS = [
    step.Contender(name, layout, dtype)
    for name in step.NAMES
    for layout, dtype in [("separate", "float32"), ("scanned", "bfloat16")]
]


@pytest.mark.parametrize("contender", CONTENDERS, ids=str)
def test_contenders_move_every_parameter_and_orthogonalize_matrices(contender):
    """Of Gaussian numbers, the median singular value is 0.4 of the largest."""
    served = step.JaxContender(contender, "tiny")
    before = step.random_like(served.shapes, 0)
    assert served.step() > 0
    new = served.params
    for old, leaf in zip(jax.tree.leaves(before), jax.tree.leaves(new), strict=True):
        assert jnp.isfinite(leaf).all()
        assert (old != leaf).mean() > 0.99
    after, before = (x["blocks"].get("00", x["blocks"])["q"] for x in (new, before))
    values = jnp.linalg.svdvals(after - before)
    assert (jnp.median(values) / values.max() > 0.6) == (contender.name != "adamw")
    # Every product is in the dtype of the contender.
    wanted = {"bfloat16": "bf16", "float32": "f32"}[contender.dtype]
    products = re.findall(r"dot_general.* : \(tensor<[^>]*x(\w+)>", served.lowered_text)
    assert set(products) <= {wanted} and bool(products) == (contender.name != "adamw")


def test_errors_of_two_checkouts(capsys):
    """The same package twice: the ratio of each dtype is 1."""
    polar_errors.main(["--kinds", "1/k", "--old", str(step.ROOT)])
    *_, row = capsys.readouterr().out.splitlines()
    kind, *cells = row.strip("| ").split(" | ")
    assert (kind, cells[2::3]) == ("1/k", 3 * ["1.00"])


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


def test_another_checkout(tmp_path):
    """The package of that folder runs: this one has a recipe for nothing."""
    package = tmp_path / "jax_muon"
    package.mkdir()
    (package / "__init__.py").write_text(
        "import optax\n\n"
        "def nanochat(rate, **others):\n    return optax.set_to_zero()\n"
    )
    (pair, *_) = step.beside(str(tmp_path))
    assert str(pair[1]) == f"{pair[0]}, in {tmp_path.name}"
    with step.running(pair[1], "tiny", "cpu") as worker:
        assert worker.info["temporary_bytes"] == 0


def test_torch_contender(monkeypatch):
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    low = step.Contender(step.TORCH, dtype="bfloat16")
    contender = step.TorchContender(low, "tiny", "cpu")
    groups = [group for o in contender.optimizers for group in o.param_groups]
    after = [p for group in groups for p in group["params"]]
    before = [p.detach().clone() for p in after]
    assert contender.step() > 0
    assert len(after) == 2 * 6 + 2
    assert all((a != b).any() for a, b in zip(after, before, strict=True))


def test_stacked_nanochat_does_what_nanochat_does(monkeypatch):
    """One call for each of two shapes, and the numbers of one parameter at a time."""
    import torch

    from parity import references

    calls = []

    def update(w, *others):
        calls.append(tuple(w.shape))
        references.nanochat_update(w, *others)

    monkeypatch.setattr(references, "compiled", lambda function: update)
    rng = torch.Generator().manual_seed(0)
    sides = {"stacked": [], "single": []}
    for shape in 2 * [(8, 6), (6, 8)]:
        value, grad = (torch.randn(shape, generator=rng) for _ in range(2))
        for side in sides.values():
            side.append(torch.nn.Parameter(value.clone()))
            side[-1].grad = grad.clone()
    stacked = step.stacked_nanochat(sides["stacked"], "float32")
    single = references.Nanochat(sides["single"], dtype=torch.float32)
    for _ in range(2):
        stacked.step()
        single.step()
    assert calls == 2 * [(2, 8, 6), (2, 6, 8)]
    for a, b in zip(*sides.values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


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
