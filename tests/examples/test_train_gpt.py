"""The main example, at a small size: it learns, resumes exactly, refuses bad input."""

import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest
import runs
import text
import train_gpt
from options import parse

SMALL = [
    "--width=32", "--depth=1", "--context=32", "--batch-size=8", "--evaluate-every=10",
    "--checkpoint-every=10", "--learning-rate=0.02", "--adamw-learning-rate=0.02",
]  # fmt: skip


def train(run: pathlib.Path, *more: str) -> pathlib.Path:
    train_gpt.main([*SMALL, f"--runs={run.parent}", f"--name={run.name}", *more])
    return run


def losses_of(folder: pathlib.Path, name: str = "loss") -> list[float]:
    return runs.curve(runs.read(folder / "metrics.jsonl"), name)[1]


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> pathlib.Path:
    """A folder with one finished run, "whole". Copy what you change."""
    folder = tmp_path_factory.mktemp("runs")
    train(folder / "whole", "--steps=30")
    return folder


@pytest.fixture
def copied(finished, tmp_path) -> pathlib.Path:
    """A copy of that run."""
    return shutil.copytree(finished / "whole", tmp_path / "whole")


def contents(folder: pathlib.Path) -> dict[str, bytes]:
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def checkpoints(folder: pathlib.Path) -> set[str]:
    return {path.name for path in (folder / "checkpoints").iterdir()}


def assert_same_run(folder: pathlib.Path, other: pathlib.Path) -> None:
    """Digit for digit, and with the same settings."""
    for name in ("metrics.jsonl", "sample.txt", "settings.json"):
        assert (folder / name).read_bytes() == (other / name).read_bytes()


def assert_close_runs(folder: pathlib.Path, other: pathlib.Path) -> None:
    """To 5e-6, as in all layouts."""
    for name in ("loss", "validation_loss"):
        found, expected = (losses_of(x, name) for x in (folder, other))
        np.testing.assert_allclose(found, expected, rtol=5e-6)


def fell(folder: pathlib.Path) -> bool:
    losses = losses_of(folder)
    return np.mean(losses[-5:]) < np.mean(losses[:5]) - 0.5


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
    assert checkpoints(folder) == {"20", "30"}
    assert "blocks/0/attn/q/kernel" in (folder / "parameters.txt").read_text()
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def interrupt_at(monkeypatch):
    """Sends a signal so many times while the batch of a step is made."""
    original = text.Text.batch

    def set_up(at: int, times: int = 1):
        def batch(self, seed, step, *more):
            for _ in range(times if step == at else 0):
                signal.raise_signal(signal.SIGINT)
            return original(self, seed, step, *more)

        monkeypatch.setattr(text.Text, "batch", batch)

    return set_up


def test_a_run_goes_on_in_every_layout(finished, tmp_path, interrupt_at, capsys):
    """Ctrl-C in each of them; the losses are those of one device without a stop.

    To 5e-6, as in all layouts. The first step needs it: all logits are zero, so every
    character has the loss log(105), and a sum of equal numbers always rounds alike.
    """
    *layouts, end = (
        "--sharding=zero2 --devices=2",
        "--sharding=hsdp --mesh=2,2 --devices=4",
        "",  # as in the beginning
        "--sharding=none",
        "--sharding=hsdp --mesh=1,4 --devices=4",
        "--sharding=fsdp --devices=2",
    )
    resume = []
    for number, layout in enumerate(layouts, start=1):
        interrupt_at(3 * number)
        with pytest.raises(SystemExit) as stopped:
            train(tmp_path / "run", "--steps=30", *layout.split(), *resume)
        assert stopped.value.code == 130
        saved = f"{tmp_path}/run/checkpoints/{3 * number}"
        said = capsys.readouterr().out
        assert f"step {3 * number}: saved in {saved}, continue with --resume" in said
        resume = ["--resume"]
        options = parse([*resume, f"--runs={tmp_path}", "--name=run"], None)
        assert (options.sharding, options.devices) == ("zero2", 2)
    folder = train(tmp_path / "run", "--steps=30", *end.split(), "--resume")
    assert_close_runs(folder, finished / "whole")
    assert checkpoints(folder) == {"20", "30"}


def test_a_second_interrupt_ends_a_run_at_once(copied, interrupt_at):
    before = contents(copied / "checkpoints" / "20")
    shutil.rmtree(copied / "checkpoints" / "30")
    interrupt_at(21, times=2)
    with pytest.raises(SystemExit, match=r"whole: ended at once; --resume restarts"):
        train(copied, "--resume")
    assert contents(copied / "checkpoints" / "20") == before


KILLED = """
import os, runpy, text
batch = text.Text.batch
text.Text.batch = lambda *x: os.kill(os.getpid(), 9) if x[2] == 27 else batch(*x)
runpy.run_path("train_gpt.py", run_name="__main__")
"""


@pytest.fixture
def python(examples):
    """Python with some words, in the folder of the examples; it keeps programs."""
    cache = {"JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir}
    given = {"cwd": examples, "env": os.environ | cache, "timeout": 300}
    return lambda *words: subprocess.run([sys.executable, *words], **given).returncode


def test_a_killed_run_goes_on_digit_for_digit(finished, tmp_path, python):
    """From its last checkpoint, and from the beginning if it had none."""
    run = tmp_path / "killed"
    words = [*SMALL, "--steps=30", f"--runs={tmp_path}", "--name=killed"]
    assert python("-c", KILLED, *words) == -signal.SIGKILL
    assert "10" in checkpoints(run) and "30" not in checkpoints(run)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 27, "lo')
    # The settings are those that the run began with.
    train_gpt.main(["--resume", f"--runs={tmp_path}", "--name=killed"])
    assert_same_run(run, finished / "whole")
    shutil.rmtree(run / "checkpoints")
    train(run, "--resume")
    assert_same_run(run, finished / "whole")


def test_two_killed_processes_go_on_elsewhere(finished, tmp_path, python):
    """From two devices in each to four, and from ZeRO-2 to FSDP."""
    words = [*SMALL, "--steps=30", f"--runs={tmp_path}", "--name=run"]
    zero2, fsdp = (
        ("--sharding=zero2", "--devices=2"),
        ("--sharding=fsdp", "--devices=4"),
    )
    killed = python("launch.py", "2", "-c", KILLED, *words, *zero2)
    resumed = python("launch.py", "2", "train_gpt.py", "--resume", *words, *fsdp)
    assert (killed, resumed) == (signal.SIGKILL, 0)
    assert_close_runs(tmp_path / "run", finished / "whole")


def test_clipped_logits_stay_at_the_threshold(tmp_path):
    """Also dealt out, with q, k and their heads divided; to 1e-3 in five steps."""
    flags = ["--width=128", "--learning-rate=0.4", "--embedding-factor=1"]
    flags += ["--steps=5", "--qk-clip=3"]
    one = train(tmp_path / "one", *flags)
    many = train(tmp_path / "many", *flags, "--sharding=fsdp", "--devices=4")
    assert losses_of(one, "max_logit")[0] > 3  # the first step clips already
    assert losses_of(one, "clipped_heads")[0] > 0
    tables = [(folder / "parameters.txt").read_text() for folder in (one, many)]
    assert re.search(r"(rows|columns) fsdp", tables[1])
    whole, part = (float(re.search(r"parameters ([\d.]+) KB", x)[1]) for x in tables)
    assert part == pytest.approx(whole / 4, rel=1e-3)
    for name in ("loss", "max_logit"):
        expected = losses_of(one, name)
        np.testing.assert_allclose(losses_of(many, name), expected, rtol=1e-3)


def test_what_is_refused_loses_nothing(copied):
    before = contents(copied)
    with pytest.raises(ValueError, match="began with width 32, not 64"):
        train(copied, "--resume", "--width=64")
    with pytest.raises(ValueError, match="holds no run to resume"):
        train(copied, "--resume", "--name=other")
    assert contents(copied) == before


def test_optimizers_learn_and_are_drawn_with_their_steps(tmp_path):
    """The matrices are heads of 32."""
    names = ["muonh", "adamw"]
    flags = [f"--compare={','.join(names)}", "--width=64", "--heads=apart"]
    folder = train(tmp_path / "all", *flags, "--steps=30")
    assert "2 x (64, 32)" in (folder / "muonh" / "parameters.txt").read_text()
    result = json.loads((folder / "compare.json").read_text())
    assert (folder / "compare.png").read_bytes().startswith(b"\x89PNG")
    assert result["target"] == result["validation_loss"]["adamw"]
    assert result["steps_to_target"]["adamw"] <= 30
    assert all(fell(folder / name) for name in names)
    # They begin with the same weights on the same batch.
    first = [runs.read(folder / name / "metrics.jsonl")[0] for name in names]
    assert all(record == first[0] for record in first)


REFUSED = {  # before a run begins: flags, with the folder of texts
    "--devices 64: this process has 8": "--sharding=zero2 --devices=64",
    "expected a multiple of 3": "--sharding=zero2 --devices=3",
    r"3 x 2 for 8 .*; expected .* is 8": "--sharding=hsdp --mesh=3,2 --devices=8",
    "none cannot be read: No such file": "--data={}/none",
    "is too short: 5 characters. A context of 32 needs 330": "--data={}/short",
    r"\(999 bytes\) is not text in UTF-8: byte 0 is 0xff": "--data={}/binary",
}


@pytest.mark.parametrize("message", REFUSED)
def test_devices_and_texts_that_are_refused(message, tmp_path):
    for name, content in {"short": b"short", "binary": b"\xff" * 999}.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        train(tmp_path / "run", *REFUSED[message].format(tmp_path).split())
    assert not (tmp_path / "run").exists()


def test_a_wrong_setting_is_one_line_and_other_errors_are_not(tmp_path, monkeypatch):
    words = ["train_gpt.py", *SMALL, f"--runs={tmp_path}", "--qk-clip=inf"]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit, match=r"error: threshold=inf; expected a finite"):
        train_gpt.program()
    monkeypatch.setattr(train_gpt, "main", lambda: int("no number"))
    with pytest.raises(ValueError, match="invalid literal"):
        train_gpt.program()


def test_a_new_run_on_another_text_keeps_the_old_one(copied, tmp_path):
    (tmp_path / "süß.txt").write_text("äöü ßé\n" * 300 + "東京" * 20, "utf-8")
    before = contents(copied)
    train(copied, f"--data={tmp_path}/süß.txt", "--steps=2")
    assert contents(copied.with_name("whole.1")) == before
