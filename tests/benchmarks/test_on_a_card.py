"""The program for a GPU, tried where there is none: results are kept as they come."""

import functools
import json
import math
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_muon as jm
from benchmarks import on_a_card
from benchmarks.gpt import loss
from benchmarks.on_a_card import Record
from benchmarks.parameters import llama_parameters, model_parameters


def test_each_result_is_written_as_it_ends(tmp_path, capsys):
    """One that fails, or needs what is missing, loses no other."""
    path = tmp_path / "kernels.json"

    def missing():
        import no_such_package

        return no_such_package

    def wrong():
        raise SystemExit("not symmetric")

    record = Record(path, time.monotonic() + 60)
    assert record.measure("right", lambda: {"ok": True}) == {"ok": True}
    assert [row["what"] for row in json.loads(path.read_text())["rows"]] == ["right"]
    record.measure("missing", missing)
    record.measure("wrong", wrong)
    record.deadline = time.monotonic() - 1
    record.measure("late", lambda: pytest.fail("begun too late"))
    rows = {row["what"]: row for row in json.loads(path.read_text())["rows"]}
    assert list(rows) == ["right", "missing", "wrong", "late"]
    assert rows["missing"]["skipped"] == "No module named 'no_such_package'"
    assert rows["wrong"]["failed"] == "SystemExit: not symmetric"
    assert rows["late"]["skipped"] == "no time left"
    assert "late: skipped no time left" in capsys.readouterr().out


def test_a_task_that_hangs_is_ended(monkeypatch):
    """With all that it started; the program goes on."""
    monkeypatch.setattr(on_a_card, "GRACE", 0.2)
    began = time.monotonic()
    hang = ["sh", "-c", "sleep 1000 & wait"]
    assert "took too long" in on_a_card.run_task("kernels", hang, 0.1)
    assert time.monotonic() - began < 100


def test_polar_factors_are_checked_against_float64():
    found = on_a_card.polar_of((2, 16, 48), {"dtype": "float32", "form": "standard"})
    assert found["ok"] and 0 < found["error"] < 5e-5


def random_like(shapes, rng):
    return jax.tree.map(
        lambda x: np.float32(0.1 * rng.standard_normal(x.shape)), shapes
    )


def test_the_loss_reads_scanned_and_separate_leaves_alike(rng):
    """At the start of a random model, near that of chance."""
    params = random_like(model_parameters("tiny", "float32", scanned=True), rng)
    layers = {
        f"{index:02}": {name: leaf[index] for name, leaf in params["blocks"].items()}
        for index in range(2)
    }
    tokens = rng.integers(0, 64, (2, 9))
    scanned, separate = (
        float(jax.jit(functools.partial(loss, head=16, **given))(tree, tokens))
        for tree, given in (
            (params, {}),
            (params | {"blocks": layers}, {"rematerialize": False}),
        )
    )
    assert scanned == pytest.approx(separate, rel=1e-6)
    assert scanned == pytest.approx(math.log(64), abs=0.5)


@pytest.mark.parametrize("model", ["llama-tiny", "experts-tiny"])
def test_llama_shapes_are_trained_whole(model, rng):
    """Grouped queries, a gated MLP, experts: every leaf has a gradient, and a role."""
    params = random_like(llama_parameters(model, "float32"), rng)
    tokens = rng.integers(0, 64, (2, 17))
    loss_fn = functools.partial(loss, head=16)
    value, grads = jax.jit(jax.value_and_grad(loss_fn))(params, tokens)
    assert float(value) == pytest.approx(math.log(64), abs=1)
    assert all(jnp.any(g != 0) for g in jax.tree.leaves(grads))
    labels = jm.read(params, loss_fn, tokens).labels(params)
    other = ["router"] if "router" in params["blocks"] else []
    assert [k for k, label in labels["blocks"].items() if label == "adamw"] == other
