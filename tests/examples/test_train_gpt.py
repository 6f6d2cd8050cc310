"""The main example, at a small size: it learns, resumes exactly, refuses bad input."""

import json
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

import grid
import jax
import jax.numpy as jnp
import numpy as np
import optimizers
import pytest
import runs
import text
import train_gpt
from flax import nnx
from gpt import GPT, generate

SMALL = [
    "--width=32",
    "--depth=1",
    "--context=32",
    "--batch-size=4",
    "--evaluate-every=10",
    "--checkpoint-every=10",
    "--learning-rate=0.02",
    "--adamw-learning-rate=0.02",
]


def train(folder: pathlib.Path, name: str, *more: str) -> pathlib.Path:
    train_gpt.main([*SMALL, f"--runs={folder}", f"--name={name}", *more])
    return folder / name


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> pathlib.Path:
    """A folder with one finished run, "whole". Copy what you change."""
    folder = tmp_path_factory.mktemp("runs")
    train(folder, "whole", "--steps=30")
    return folder


@pytest.fixture
def copied(finished, tmp_path) -> pathlib.Path:
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    return tmp_path


def contents(folder: pathlib.Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_a_run_leaves_its_files(finished):
    folder = finished / "whole"
    assert {path.name for path in folder.iterdir()} == {
        "checkpoints", "loss.png", "metrics.jsonl", "parameters.txt", "sample.txt",
        "settings.json",
    }  # fmt: skip
    records = runs.read(folder / "metrics.jsonl")
    assert [record["step"] for record in records] == list(range(1, 31))
    assert runs.curve(records, "validation_loss")[0] == [10, 20, 30]
    assert fell(folder)
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {"20", "30"}
    table = (folder / "parameters.txt").read_text()
    assert "blocks/0/attn/q/kernel" in table
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("optimizer", ["muon", "normuon", "moonlight"])
def test_losses_fall(optimizer, tmp_path):
    assert fell(train(tmp_path, "run", f"--optimizer={optimizer}", "--steps=30"))


def fell(folder: pathlib.Path) -> bool:
    _, losses = runs.curve(runs.read(folder / "metrics.jsonl"), "loss")
    return np.mean(losses[-5:]) < np.mean(losses[:5]) - 0.5


def test_a_run_goes_on_in_every_layout(copied):
    """As on one device, whose 5e-6 a step may grow; from step 20 on in another one."""
    _, expected = runs.curve(runs.read(copied / "whole" / "metrics.jsonl"), "loss")
    many = train(copied, "many", "--steps=30", "--sharding=zero2", "--devices=4")
    for more in (
        ["--sharding=zero2", "--devices=2"],
        ["--sharding=fsdp,tp", "--mesh=2,4", "--devices=8"],
        ["--sharding=fsdp", "--devices=4"],
        [],
    ):
        _, losses = runs.curve(runs.read(many / "metrics.jsonl"), "loss")
        np.testing.assert_allclose(losses, expected, atol=2e-3)
        shutil.rmtree(many / "checkpoints" / "30")
        train(copied, "many", "--steps=30", "--resume", *more)
    _, losses = runs.curve(runs.read(many / "metrics.jsonl"), "loss")
    np.testing.assert_allclose(losses, expected, atol=2e-3)


def test_divided_parameters_on_owners_with_clipped_logits(tmp_path):
    """Large enough for owners; q, k and their heads lie divided where they are clipped.

    To 1e-3 in five steps, as with ZeRO-2 below.
    """
    flags = ["--steps=5", "--width=128", "--learning-rate=0.4", "--qk-clip=3"]
    sharded = ["--sharding=fsdp,tp", "--mesh=2,2", "--devices=4"]
    one = train(tmp_path, "one", *flags)
    many = train(tmp_path, "many", *flags, *sharded)
    table = (many / "parameters.txt").read_text()
    assert re.search(r"128x512_float32 +short fsdp; long tp +2 +4 +0 or 1", table)
    assert "owners" not in (one / "parameters.txt").read_text()
    one, many = (runs.read(folder / "metrics.jsonl") for folder in (one, many))
    assert one[0]["max_logit"] > 3  # clipped from the first step on
    for name in ("loss", "max_logit"):
        np.testing.assert_allclose(
            runs.curve(many, name)[1], runs.curve(one, name)[1], rtol=1e-3
        )


def test_clipped_logits_stay_at_the_threshold(tmp_path):
    """On one device and on four; a threshold that never clips shows how they grow."""
    flags = ["--steps=30", "--learning-rate=0.4"]
    zero2 = ["--sharding=zero2", "--devices=4"]
    free, one, four = (
        runs.read(train(tmp_path, name, *flags, *more) / "metrics.jsonl")
        for name, more in (
            ("free", ["--qk-clip=1e9"]),
            ("one", ["--qk-clip=3"]),
            ("four", ["--qk-clip=3", *zero2]),
        )
    )
    assert runs.curve(free, "max_logit")[1][-1] > 50
    _, logits = runs.curve(one, "max_logit")
    assert len(logits) == 30
    assert 3 < max(logits) < 8  # what a step adds, and another batch, before the clip
    assert logits[0] > 3  # the first step clips already; 5e-6 a step grows later on
    for name in ("loss", "max_logit"):
        np.testing.assert_allclose(
            runs.curve(four, name)[1][:5], runs.curve(one, name)[1][:5], rtol=1e-3
        )
    with pytest.raises(ValueError, match=r"began with qk_clip 3.0, not 6.0"):
        train(tmp_path, "one", "--resume", *flags, "--qk-clip=6")
    shutil.rmtree(tmp_path / "one" / "checkpoints" / "30")
    train(tmp_path, "one", "--resume", *flags)
    assert runs.read(tmp_path / "one" / "metrics.jsonl") == one


def test_devices_that_are_not_there(tmp_path):
    zero2 = ["--steps=10", "--sharding=zero2"]
    with pytest.raises(ValueError, match="--devices 64: this process has 8"):
        train(tmp_path, "run", *zero2, "--devices=64")
    with pytest.raises(ValueError, match="multiples of 3"):
        train(tmp_path, "run", *zero2, "--devices=3")
    with pytest.raises(ValueError, match=r"3 x 2 for 8 devices; valid .* is 8"):
        train(tmp_path, "run", "--sharding=fsdp,tp", "--mesh=3,2", "--devices=8")
    assert not (tmp_path / "run").exists()


def test_a_killed_run_goes_on_digit_for_digit(tmp_path, examples):
    flags = ["--steps=200", "--checkpoint-every=30"]
    whole = train(tmp_path, "whole", *flags)
    killed = tmp_path / "killed"
    command = [sys.executable, str(examples / "train_gpt.py"), *SMALL, *flags]
    process = subprocess.Popen([*command, f"--runs={tmp_path}", "--name=killed"])
    while len(runs.read(killed / "metrics.jsonl")) < 100:
        assert process.poll() is None
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert len(runs.read(killed / "metrics.jsonl")) < 200

    # The settings are those that the run began with.
    train_gpt.main(["--resume", f"--runs={tmp_path}", "--name=killed"])
    for name in ("metrics.jsonl", "sample.txt", "settings.json"):
        assert (killed / name).read_bytes() == (whole / name).read_bytes()


def test_steps_that_are_repeated_are_not_recorded_twice(copied):
    folder = copied / "whole"
    before = (folder / "metrics.jsonl").read_bytes()
    shutil.rmtree(folder / "checkpoints" / "30")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 31, "lo')
    train(copied, "whole", "--resume")
    assert (folder / "metrics.jsonl").read_bytes() == before


def test_a_run_killed_before_its_first_checkpoint_begins_again(copied):
    folder = copied / "whole"
    before = (folder / "metrics.jsonl").read_bytes()
    shutil.rmtree(folder / "checkpoints")
    train(copied, "whole", "--resume")
    assert (folder / "metrics.jsonl").read_bytes() == before


def test_a_new_run_keeps_the_old_one(copied):
    before = contents(copied / "whole")
    train(copied, "whole", "--steps=2")
    assert contents(copied / "whole.1") == before


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--width=64"],
            r"whole/checkpoints/30 is of another model: blocks/0/attn/k/kernel is "
            r"\(32, 32\) there and \(64, 64\) in this one. Valid are the --width",
        ),
        (["--depth=2"], r"blocks/1/attn/k/kernel is missing there and \(32, 32\)"),
        (["--steps=60"], r"began with steps 30, not 60"),
        (["--seed=1"], r"began with seed 0, not 1"),
        (["--optimizer=muon"], r"began with optimizer nanochat, not muon"),
        (["--name=other"], r"other holds no run to resume; .* has whole"),
    ],
)
def test_resuming_as_another_run_is_refused_and_nothing_lost(copied, flags, message):
    before = contents(copied)
    with pytest.raises(ValueError, match=message):
        train(copied, "whole", "--resume", *flags)
    assert contents(copied) == before


def test_compare_draws_both_and_counts_their_steps(tmp_path):
    folder = train(tmp_path, "both", "--compare=nanochat,adamw", "--steps=30")
    result = json.loads((folder / "compare.json").read_text())
    assert (folder / "compare.png").read_bytes().startswith(b"\x89PNG")
    assert result["baseline"] == "adamw"
    assert result["target"] == result["validation_loss"]["adamw"]
    assert result["steps_to_target"]["adamw"] <= 30
    assert fell(folder / "nanochat")
    assert fell(folder / "adamw")
    # They begin with the same weights on the same batch.
    first = [
        runs.read(folder / name / "metrics.jsonl")[0] for name in ("nanochat", "adamw")
    ]
    assert first[0] == first[1]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "there.txt cannot be read: No such file"),
        (b"short", "is too short: 5 characters. A context of 32 needs 330"),
        (b"\xff" * 999, r"\(999 bytes\) is not text in UTF-8: byte 0 is 0xff"),
    ],
)
def test_data_that_cannot_be_read_is_refused(content, message, tmp_path):
    path = tmp_path / "there.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        train(tmp_path, "run", f"--data={path}")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "flags",
    [
        ["--width=48"],
        ["--steps=0"],
        ["--qk-clip=0"],
        ["--compare=adamw"],
        ["--compare=a,b"],
        ["--sharding=fsdp,tp", "--mesh=8"],
        ["--sharding=fsdp", "--mesh=4,2"],
    ],
)
def test_impossible_options_are_refused(flags, tmp_path, capsys):
    with pytest.raises(SystemExit):
        train(tmp_path, "run", *flags)
    assert "valid are" in capsys.readouterr().err


def test_any_text_can_be_trained_on(tmp_path):
    path = tmp_path / "süß.txt"
    path.write_text("äöü ßé\n" * 300 + "東京" * 20, encoding="utf-8")
    data = text.read_text(str(path), context=32)
    assert data.train.size + data.validation.size == 2140
    assert data.vocabulary == text.UNKNOWN + "\n ßäéöü"
    assert data.decode(data.train[:7]) == "äöü ßé\n"
    assert data.decode(data.validation[-2:]) == 2 * text.UNKNOWN
    assert "40 of them unknown" in str(data)
    train(tmp_path, "run", f"--data={path}", "--steps=2")


def test_batches_depend_on_seed_and_step_alone():
    data = text.read_text(None, context=32)
    batch = data.batch(0, 7, 4, 32)
    assert batch.shape == (4, 33)
    np.testing.assert_array_equal(batch, data.batch(0, 7, 4, 32))
    assert (batch != data.batch(0, 8, 4, 32)).any()
    assert (batch != data.batch(1, 7, 4, 32)).any()


@pytest.fixture
def model() -> GPT:
    """A model whose head and projections are not zero."""
    graph, params = nnx.split(GPT(11, 32, 1, rngs=nnx.Rngs(0)))
    random = np.random.default_rng(0)
    params = jax.tree.map(lambda p: jnp.array(random.normal(size=p.shape)), params)
    return nnx.merge(graph, params)


def test_a_character_does_not_see_later_ones(model):
    tokens = np.arange(20).reshape(2, 10) % 11
    tokens[1] = tokens[0]
    tokens[1, 6] = 10
    first, changed = jax.jit(GPT.__call__)(model, tokens)
    np.testing.assert_allclose(first[:6], changed[:6], atol=1e-5)
    assert (abs(first[6:] - changed[6:]).max(axis=-1) > 1e-3).all()


def test_generate_looks_at_the_last_characters_only(model):
    prompt, length, context = np.array([3, 1, 4]), 12, 8
    draw = jax.jit(generate, static_argnames=("length", "context", "temperature"))
    written = draw(
        model,
        prompt,
        length=length,
        context=context,
        key=jax.random.key(0),
        temperature=1e-6,  # so that it takes the likeliest character
    )
    tokens = np.concatenate([prompt, written])
    ends = np.arange(context, tokens.size)
    windows = tokens[ends[:, None] - np.arange(context, 0, -1)]  # (7, 8)
    likeliest = jax.jit(GPT.__call__)(model, windows).argmax(axis=-1)
    np.testing.assert_array_equal(likeliest[:, -1], tokens[context:])
    np.testing.assert_array_equal(likeliest[0, 2:], tokens[3 : context + 1])


def test_rates_are_the_best_of_a_fair_grid():
    results = json.loads(optimizers.GRID.read_text())["results"]
    for name in optimizers.OPTIMIZERS:
        own = [result for result in results if result["optimizer"] == name]
        assert len(own) == len(grid.LEARNING_RATES[name]) + len(grid.OTHER_ADAMW)
        best = min(own, key=lambda result: result["validation_loss"])
        assert optimizers.best_rates(name).items() <= best.items()
