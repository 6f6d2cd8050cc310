"""The comparison of optimizers: its search, its records, and what is made of them."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from optimizers import best_rates, make_optimizer

from benchmarks.learning import __main__ as command
from benchmarks.learning import grid, pace, plan, records, report, training
from benchmarks.learning.training import OPTIMIZERS, Point

RATES = {
    "learning_rate": 0.02,
    "adamw_learning_rate": 0.01,
    "momentum": 0.9,
    "weight_decay": 0.1,
}
TINY = Point("nanochat", RATES, steps=3, width=32, depth=1)


def made_up(point: Point) -> dict:
    """A record without a run: best at twice the first learning rate, less with steps.

    All but AdamW need half of its steps. A variant ends a bit above what it is one of.
    """
    variant = point.optimizer not in grid.BEGINNINGS
    name = point.optimizer.split("-")[0] if variant else point.optimizer
    first = grid.BEGINNINGS[name]["learning_rate"]
    off = math.log2(point.settings["learning_rate"] / first) - 1
    pace = 1.0 if point.optimizer == "adamw" else 0.5
    loss = 1 + 100 * pace / point.steps + off**2 + 0.01 * (point.seed - 1)
    loss += 0.001 * variant
    return point._asdict() | {
        "data": {"name": "made up", "sha256": training.data().sha256},
        "validation_losses": [[point.steps // 2, loss + 1], [point.steps, loss]],
        "validation_loss": loss,
        "stopped": None,
        "seconds": 1.0,
    }


@pytest.fixture
def made(monkeypatch) -> list[Point]:
    """The points that were run, in place of running them."""
    points = []
    monkeypatch.setattr(
        records, "train", lambda point: points.append(point) or made_up(point)
    )
    monkeypatch.setattr(pace, "measure", lambda optimizer, width: {"ratio": 1.34})
    return points


@pytest.mark.parametrize("near", [None, 5, 140, 295])
@pytest.mark.parametrize("first", [1, 5, 6, 131, 140, 295, 296])
def test_bisection_finds_the_first_length_and_asks_for_none_twice(first, near):
    asked = []
    found = plan.bisect(lambda n: asked.append(n) or n >= first, 295, 5, near)
    assert found == (-(-first // 5) * 5 if first <= 295 else None)
    assert len(asked) == len(set(asked)) <= 12


@pytest.mark.parametrize(
    ("longest", "grain", "near"), [(9, 2, None), (10, 0, 2), (8, 2, 3)]
)
def test_a_bisection_between_two_grains_is_refused(longest, grain, near):
    with pytest.raises(ValueError, match="expected positive whole numbers"):
        plan.bisect(lambda n: True, longest, grain, near)


@pytest.mark.parametrize("optimizer", grid.BEGINNINGS)
def test_no_optimizer_is_looked_at_more_than_the_baseline(optimizer):
    tried = []
    beginning = grid.BEGINNINGS[optimizer]
    twice = 2 * beginning["learning_rate"]
    best = grid.search(
        beginning,
        grid.lines(optimizer),
        lambda s: tried.append(s) or abs(math.log(s["learning_rate"] / twice)),
    )
    assert len({json.dumps(s, sort_keys=True) for s in tried}) == len(tried)
    assert len(tried) == (15 if optimizer in grid.LOOKED_AT_TWICE else 11)
    assert grid.BASELINE in grid.LOOKED_AT_TWICE
    assert best == beginning | {"learning_rate": twice}


@pytest.mark.parametrize("optimizer", ["adamw", "muonh", "nanochat"])
def test_a_longer_search_goes_on_from_the_shorter_one(tmp_path, made, optimizer):
    kept = records.Records(tmp_path)
    short = plan.grid(kept, optimizer, 300, 128)
    count = len(made)
    best = plan.grid(kept, optimizer, 1200, 128)
    tried = made[count:]
    assert {p.steps for p in tried} == {plan.searched(optimizer, 1200)}
    assert tried[0].settings == short.settings
    assert len(tried) <= (4 if "weight_decay" in short.settings else 2)
    assert best == short._replace(steps=1200)  # which is where `made_up` is best


@pytest.mark.parametrize("optimizer", ["adamw", "muonh", "nanochat"])
def test_a_wider_search_goes_on_from_the_width_that_was_searched(
    tmp_path, made, optimizer
):
    kept = records.Records(tmp_path)
    found = plan.grid(kept, optimizer, 300, 128)
    count = len(made)
    assert plan.grid(kept, optimizer, 300, 256) == found._replace(width=256)
    tried = made[count:]
    assert {(p.steps, p.width) for p in tried} == {(plan.searched(optimizer, 300), 256)}
    assert tried[0].settings == found.settings
    assert len(tried) == 5
    plan.grid(kept, optimizer, 1200, 256)
    assert {p.width for p in made[count:]} == {256}


def test_nothing_is_run_again_and_a_run_that_is_killed_costs_itself(
    tmp_path, made, monkeypatch
):
    kept = records.Records(tmp_path, "this test")
    first = kept.measure(TINY)
    assert first["command"] == "this test"
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(records, "train", lambda point: signal_of_a_kill())
        kept.measure(TINY._replace(seed=1))
    with kept.path("nanochat").open("a") as file:
        file.write('{"optimizer": "nano')  # as a full disk leaves it
    assert kept.measure(TINY) == first
    kept.measure(TINY._replace(seed=1))
    kept.measure(TINY._replace(settings=RATES | {"momentum": 0.8}))
    assert [p.seed for p in made] == [0, 1, 0]
    again = records.Records(tmp_path)
    assert len(again.all("nanochat")) == 3
    assert again.measure(TINY._replace(seed=1)) == kept.all("nanochat")[1]


def signal_of_a_kill():
    raise KeyboardInterrupt


def test_the_plan_from_grid_to_report(tmp_path, made, capsys):
    words = ["--optimizers", "adamw", "muon", f"--results={tmp_path / 'results'}"]
    command.main(words)
    assert "shortest of muon: 150" in capsys.readouterr().out
    count = len(made)
    command.main(words)
    assert len(made) == count  # all are there
    kept = records.Records(tmp_path / "results")
    plan.grid(kept, "adamw", 300, 256)  # whose searches began at width 128
    assert set(report.rows(kept, 300, 256)) == {"adamw"}
    page = tmp_path / "rates.md"
    page.write_text("a\n\n<!-- learning_300_128 -->\n\n| old |\n\nb\n")
    report.write_all(kept, docs=tmp_path, best=tmp_path / "best.json")
    lines = page.read_text().splitlines()
    assert [lines[0], lines[-1], len(lines)] == ["a", "b", 10]
    assert lines[6] == (
        "| `muon` | 11 | 0.08 | 0.95 | 0.1 | 0.02, 0.02 | 1.3233 (150 steps) "
        "| 1.1667 ± 0.0100 | 150 | 0.50 | 0.67 |"
    )
    assert lines[7].endswith("| 1.3333 ± 0.0100 | 300 | 1.00 | 1.00 |")
    assert (tmp_path / "learning_300_128.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "best.json").read_text())["muon"] == (
        grid.BEGINNINGS["muon"] | {"learning_rate": 0.08}
    )


def test_the_pace_is_that_beside_adamw(monkeypatch):
    monkeypatch.setattr(pace, "ROUNDS", 1)
    monkeypatch.setattr(pace, "STEPS", 1)
    found = pace.measure("muon", 32)
    assert found["seconds"] > 0
    ratio = found["seconds"] / found["baseline_seconds"]
    assert found["ratio"] == pytest.approx(ratio, rel=0.05)  # of rounded numbers


def test_variants_stand_beside_what_they_are_of(tmp_path, made, capsys):
    words = ["--stages", "variants", "--optimizers", "nanochat"]
    command.main([*words, f"--results={tmp_path}"])
    names = ["nanochat", *training.VARIANTS["nanochat"]]
    shown = capsys.readouterr().out
    assert all(f"'{name}': 1.33" in shown for name in names)
    kept = records.Records(tmp_path)
    found = plan.variants(kept, "nanochat", 300, 128)
    assert list(found) == names
    settings = [run["settings"] for runs in found.values() for run in runs]
    assert all(s == settings[0] for s in settings)
    lines = report.variants_table(found).splitlines()
    assert lines[2] == "| `nanochat` | 1.3333 ± 0.0100 | - |"
    assert lines[3] == (
        f"| `{names[1]}` | 1.3343 ± 0.0100 | +0.0010, +0.0010, +0.0010 |"
    )
    assert len(lines) == 2 + len(names)


@pytest.mark.parametrize(
    ("name", "value"), [("data", {"name": "another"}), ("width", 64), ("steps", 4)]
)
def test_runs_of_another_text_or_length_are_not_compared(name, value):
    runs = [made_up(TINY), made_up(TINY._replace(optimizer="muon")) | {name: value}]
    report.check_same(runs[:1] * 2, name)
    with pytest.raises(ValueError, match=f"{name} of the runs .* differs, .* of muon;"):
        report.check_same(runs, name)


def test_a_run_is_the_examples_own():
    """To rounding: the rates are arguments here, and functions of the count there."""
    settings = RATES | {"embedding_factor": 4.0}
    found = training.train(TINY._replace(settings=settings))
    params = nnx.state(training.model(32, 1, 0), nnx.Param)
    graph = nnx.graphdef(nnx.eval_shape(lambda: training.model(32, 1, 0)))
    tx = make_optimizer("nanochat", 3, **settings)
    _, evaluate = training.functions("nanochat", 32, 1)

    @jax.jit
    def step(params, state, windows):
        grads = jax.grad(lambda p: nnx.merge(graph, p).loss(windows))(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = jax.jit(tx.init)(params)
    for i in range(3):
        windows = training.data().batch(0, i + 1, 16, 128)
        params, state = step(params, state, windows)
    wanted = evaluate(params, training.data().validation_batches(16, 128))
    assert found["validation_losses"] == [[3, found["validation_loss"]]]
    np.testing.assert_allclose(found["validation_loss"], wanted, rtol=1e-5)


@pytest.mark.parametrize("name", ["adamw", "muonh"])
def test_the_embedding_has_a_rate_of_its_own(name):
    rates = RATES if name == "adamw" else RATES | {"weight_decay": 0.0}
    params = nnx.state(training.model(32, 1, 0), nnx.Param)
    ones = jax.tree.map(jnp.ones_like, params)
    txs = [make_optimizer(name, 3, **rates, embedding_factor=f) for f in (1.0, 4.0)]
    once, fourfold = (
        nnx.to_flat_state(tx.update(ones, tx.init(params), params)[0]) for tx in txs
    )
    for (path, step), (_, other) in zip(once, fourfold, strict=True):
        factor = 4 if path[0] == "embed" else 1
        np.testing.assert_array_equal(other[...], factor * step[...])


def test_a_decay_of_weights_whose_norms_stay_is_refused():
    with pytest.raises(ValueError, match=r"weight_decay=0.1: muonh keeps the norms"):
        make_optimizer("muonh", 3, **RATES)


def test_a_hopeless_run_is_stopped_and_says_so(monkeypatch):
    monkeypatch.setattr(training, "EVERY", 2)
    found = training.train(
        TINY._replace(
            settings=RATES | {"learning_rate": 1e3, "adamw_learning_rate": 1e3},
            steps=50,
        )
    )
    assert found["stopped"].startswith("hopeless: validation loss ")
    assert found["validation_loss"] is None
    assert found["validation_losses"][-1][0] < 50


def test_the_example_knows_all_and_takes_what_won():
    assert set(OPTIMIZERS) == set(grid.BEGINNINGS)
    kept = records.Records(report.DOCS.parent / records.FOLDER)
    for name, row in report.rows(kept, *report.SIZES[0]).items():
        assert best_rates(name) == row.best.settings
