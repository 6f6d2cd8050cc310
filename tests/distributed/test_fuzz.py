"""Some cases of `python -m benchmarks.fuzz`, and those that it found."""

import json

import jax
import pytest

from benchmarks.fuzz import __main__ as command
from benchmarks.fuzz.cases import Case, Leaf, draw
from benchmarks.fuzz.minimize import as_test, minimize
from benchmarks.fuzz.run import check


@pytest.mark.parametrize("first", range(0, 100, 25))
def test_cases_are_right_or_refused_in_our_words(first):
    """More by the command; of these two in five have hostile numbers."""
    found = {number: check(draw(1, number)) for number in range(first, first + 25)}
    assert not [(n, x) for n, x in found.items() if x.is_wrong]
    assert sum(x.kind == "right" for x in found.values()) > 15


def test_two_shapes_gathered_in_bfloat16():
    """XLA moved the transpose of one into a product that no CPU runs."""
    layout = {"mesh": {"fsdp": 2}, "small": 65536, "axes": {"b": (1, 0)}}
    leaves = (Leaf("a", (24, 4), spec=(None, "fsdp")), Leaf("b", (24, 4)))
    case = Case(leaves, settings={"steps": 1, "dtype": "bfloat16"}, steps=1, **layout)
    assert check(case).kind == "right"


def test_a_batch_over_one_device_and_parameters_over_others():
    """XLA cannot sum over an axis of one device what lies divided over another."""
    case = Case(
        (Leaf("a", (16, 2), spec=("fsdp", None)),),
        mesh={"data": 1, "fsdp": 4},
        min_size=64,
        settings={"steps": 1, "dtype": "float32"},
        train_step={
            "axis": ("data",),
            "parameters": "as specs",
            "microbatches": 1,
            "accumulate": "local",
        },
        steps=1,
    )
    assert check(case).kind == "right"


def test_a_wrong_case_is_made_smaller_and_printed(monkeypatch, capsys, tmp_path):
    """Where every matrix of six rows learns faster on a mesh."""
    wrong = Leaf("blocks/0/attn/qkv/kernel", (6, 8), spec=(None, "data"))
    case = Case(
        (wrong, Leaf("wte", (8, 4)), Leaf("2/bias", (7,))),
        mesh={"data": 2, "fsdp": 4},
        settings={"momentum": 0.5},
        labels={"wte": "adamw"},
        numbers="tiny",
    )

    def fails(case):
        return any(leaf.shape[0] == 6 for leaf in case.leaves)

    small = minimize(case, fails)
    assert small == Case((Leaf("blocks/0/attn/qkv/kernel", (6, 2)),), steps=1)
    text = as_test(small, "it")
    scope = {"Case": Case, "Leaf": Leaf, "check": lambda case: pytest.fail(repr(case))}
    exec(text, scope)
    with pytest.raises(pytest.fail.Exception, match=r"shape=\(6, 2\)"):
        scope["test_it"]()


def test_a_campaign_goes_on_where_it_ended(monkeypatch, capsys, tmp_path):
    asked = []

    def checked(case):
        asked.append(case)
        return command.Outcome("finite" if len(asked) == 3 else "right")

    monkeypatch.setattr(command, "check", checked)
    words = ["--counts", str(tmp_path / "counts.json"), "--tries=0", "--seed=5"]
    assert command.main([*words, "--cases=2"]) == 0
    assert command.main([*words, "--cases=4"]) == 1
    assert asked == [draw(5, number) for number in range(4)]
    state = json.loads((tmp_path / "counts.json").read_text())
    assert state["counts"] == {"right": 3, "finite": 1}
    assert list(state["wrong"]) == ["2"]
    said = capsys.readouterr().out
    assert "def test_case_5_2():\n    assert not check(Case(leaves=(Leaf(" in said
    with pytest.raises(SystemExit):
        command.main([*words, "--seed=6"])
    assert jax.device_count() == 8
