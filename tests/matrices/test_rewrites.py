"""A reading that no rewriting of a loss changes: each rewrite of five programs.

`make test-rewrites` takes all programs, and prints a table.
"""

import pathlib

import pytest

from tests.rewrites import DOCUMENTED, REWRITES, changes, is_documented, sample

pytestmark = pytest.mark.usefixtures("as_users_write")

PAGE = pathlib.Path(__file__).parents[2] / "docs/parameters.md"


@pytest.mark.parametrize("title", REWRITES)
def test_same_reading(title):
    names = [name for name in sample(title) if not is_documented(title, name)]
    found = {name: changes(title, name) for name in names}
    assert not any(found.values()), found


@pytest.mark.parametrize(
    ("title", "name"),
    [
        ("x @ w: map over outputs", "stored_patterns"),
        ("x @ w: an identity before", "one_hot_embedding"),
        ("operations: sums by ones", "smear"),
        ("loss: a gradient inside", "dora"),
        ("members: vmap", "codes_scale_features_of_a_grid"),
    ],
)
def test_same_reading_of_one(title, name):
    """Pairs that alone need a few lines."""
    assert changes(title, name) == []


@pytest.mark.parametrize("words", DOCUMENTED)
def test_other_readings_are_on_the_page(words):
    """What is read in another way, and the words that say so."""
    assert words in " ".join(PAGE.read_text().split())
    for title, name in DOCUMENTED[words]:
        assert any(changes(title, x) for x in ([name] if name else sample(title)))
