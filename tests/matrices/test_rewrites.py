"""A reading that no rewriting of a loss changes: the fixed part.

`make test-rewrites` does the same for all programs, in ten minutes.
"""

import functools
import pathlib

import pytest

from tests.rewrites import REWRITES, changes, sample

pytestmark = pytest.mark.usefixtures("as_users_write")

PAGE = pathlib.Path(__file__).parents[2] / "docs/parameters.md"
# Programs whose reading a rewrite changes although it should not, by rewrite. One that
# does not fail any more must go from here: `make test-rewrites ARGS=--known` writes it.
KNOWN = pathlib.Path(__file__).with_name("known_rewrites.txt")


@functools.cache
def known():
    lines = KNOWN.read_text().splitlines() if KNOWN.exists() else []
    return {title: names.split() for title, names in (x.split(" | ") for x in lines)}


@pytest.mark.parametrize("title", [x for x, r in REWRITES.items() if not r.page])
def test_same_reading(title):
    found = {name: changes(title, name) for name in sample(title)}
    changed = {name: x for name, x in found.items() if x}
    assert sorted(changed) == sorted(known().get(title, [])), changed


@pytest.mark.parametrize("title", [x for x, r in REWRITES.items() if r.page])
def test_other_readings_are_on_the_page(title):
    """What is read in another way, and the sentence that says so."""
    assert REWRITES[title].page in " ".join(PAGE.read_text().split())
    assert any(changes(title, name) for name in sample(title))
