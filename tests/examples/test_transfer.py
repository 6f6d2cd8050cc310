"""Best rates by width and depth, from made-up sweeps, and one short real run."""

import math

import pytest

from benchmarks import transfer
from benchmarks.learning import training
from benchmarks.learning.records import Records
from benchmarks.learning.training import Point


def made_up(point: Point) -> dict:
    """Best at 0.03 (128 / width)^0.5."""
    off = math.log(point.settings["learning_rate"] / 0.03 * (point.width / 128) ** 0.5)
    seen = {"blocks": 0.5, "stream": 1.0, "logits": 3.0}
    return point._asdict() | {
        "data": {"sha256": training.data().sha256},
        "validation_loss": 2 + off**2,
        "stopped": None,
        "seconds": 1.0,
        "activations": {str(step): seen for step in transfer.AT},
    }


def sweep(width: int) -> list[dict]:
    return [made_up(point) for point in transfer.points("muon", width, 2)]


def test_the_best_rate_is_between_those_of_the_sweep():
    assert transfer.best_rate(sweep(128)) == pytest.approx(0.03)
    assert transfer.best_rate(sweep(64)) == pytest.approx(0.03 * 2**0.5)
    assert transfer.best_rate(sweep(128 * 1024)) is None  # it is below all of them
    stopped = sweep(128)
    stopped[3] |= {"validation_loss": None, "stopped": "hopeless"}
    assert transfer.best_rate(stopped) is None


def test_the_slope_is_the_exponent_of_the_size():
    assert transfer.exponent({64: 0.4, 128: 0.2, 256: 0.1}) == pytest.approx(-1)
    assert transfer.exponent({64: 0.4}) is None


def test_sweeps_are_kept_and_reported(tmp_path, monkeypatch, capsys):
    points = []
    monkeypatch.setattr(
        transfer, "make", lambda point: points.append(point) or made_up(point)
    )
    words = [f"--results={tmp_path}", f"--docs={tmp_path}"]
    some = ["--optimizers", "muon", "--widths", "64", "128", "256", "--depths", "2"]
    transfer.main(words + some)
    transfer.main(words + some)
    assert len(points) == 3 * len(transfer.FACTORS)
    capsys.readouterr()
    (tmp_path / "rates.md").write_text("<!-- transfer -->\n\n| old |\n")
    transfer.main([*words, "--report"])
    row = "| `muon` | 2 | 64: 0.0424, 128: 0.03, 256: 0.0212 | -0.50 |"
    assert row in capsys.readouterr().out
    assert row in (tmp_path / "rates.md").read_text()
    assert (tmp_path / "transfer.png").read_bytes().startswith(b"\x89PNG")
    assert not list(transfer.sweeps(Records(tmp_path / "none")))


def test_activations_are_those_of_the_model():
    """A head of zeros passes no gradient on, so that the first step moves it alone."""
    first = transfer.points("muon-sqrt_ratio", 64, 2)[0]
    seen = transfer.make(first._replace(width=32, depth=1, steps=1))["activations"]
    assert seen["0"]["logits"] == seen["0"]["blocks"] == seen["1"]["blocks"] == 0
    assert seen["0"]["stream"] == pytest.approx(1, rel=1e-3)
    assert seen["1"]["logits"] > 0.01
