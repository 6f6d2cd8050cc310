"""The search for rates: where it ends, what it repeats, and what the page says."""

import json
import math
import sys

import pytest

from benchmarks import flax_examples, rates


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """Runs whose loss is a parabola in the power of two, lowest at 2^-5.7."""

    def train(folder, example, optimizer, rate, rest, seed):
        made.append(rate)
        return 2.0 + (math.log2(rate) + 5.7) ** 2

    made = []
    monkeypatch.setattr(rates, "train", train)
    found = rates.Runs(tmp_path / "rates.jsonl", tmp_path)
    found.made = made
    return found


def test_the_search_ends_between_two_worse_rates(runs):
    assert runs.best("lm1b", "adamw", 0) == 2.0**-6
    assert set(runs.made) >= {2.0**-7, 2.0**-6, 2.0**-5}
    assert len(runs.made) == len(set(runs.made)) <= 6
    assert rates.lowest(runs, "lm1b", "adamw", 0) == pytest.approx(2**-5.7)


def test_other_seeds_begin_where_the_first_one_ended(runs):
    runs.best("lm1b", "adamw", 0)
    runs.made.clear()
    assert runs.best("lm1b", "adamw", 1) == 2.0**-6
    assert sorted(runs.made) == [2.0**-7, 2.0**-6, 2.0**-5]


def test_a_record_is_not_run_again(runs, tmp_path):
    best = runs.best("lm1b", "adamw", 0)
    again = rates.Runs(tmp_path / "rates.jsonl")  # without the examples
    assert again.best("lm1b", "adamw", 0) == best
    with pytest.raises(ValueError, match=r"'gemma', 'adamw', 0.*expected the examples"):
        again.best("gemma", "adamw", 0)


def test_examples_with_files_of_one_name(tmp_path):
    for name in ("one", "two"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "models_of_a_test.py").write_text(f"name = {name!r}")
        (module,) = flax_examples.from_folder(folder, "models_of_a_test")
        assert module.name == name
    assert "models_of_a_test" not in sys.modules
    assert not {str(tmp_path / "one"), str(tmp_path / "two")} & set(sys.path)


def test_the_page_has_the_tables_of_the_records():
    found = rates.results(rates.Runs(rates.RESULTS / "rates.jsonl"))
    saved = json.loads((rates.RESULTS / "rates.json").read_text())
    assert {name: saved[name] for name in found} == found
    page = (rates.ROOT / "docs" / "rates.md").read_text()
    for name, table in rates.tables(found).items():
        assert f"<!-- {name} -->\n\n{table}\n" in page
