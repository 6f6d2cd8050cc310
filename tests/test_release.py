"""What has to agree before a release, and the page that an index shows."""

import pathlib
import re
import runpy
import shutil

import pytest

ROOT = pathlib.Path(__file__).parents[1]
release = runpy.run_path(str(ROOT / "docs" / "release.py"))
CHECKED = (
    *("README.md", "CHANGELOG.md", "CITATION.cff", "SECURITY.md"),
    *("docs/index.md", "docs/numbers.md", "jax_muon/__init__.py"),
)


def copy(folder, **changes):
    """The files that agree, after replacements by file: (old, new)."""
    for name in CHECKED:
        text = (ROOT / name).read_text()
        for old, new in changes.get(name, []):
            assert old in text, (name, old)
            text = text.replace(old, new)
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def released(date):
    """What a release on this date changes."""
    return {
        "README.md": [
            ("pip install .", "pip install jax-muon"),
            ("Not on an index", "On an index"),
        ],
        "CHANGELOG.md": [("not yet released", date)],
        "CITATION.cff": [("\nlicense:", f"\ndate-released: {date}\nlicense:")],
        "docs/index.md": [("pip install .", "pip install jax-muon")],
        "docs/numbers.md": [("is not released", "is released")],
    }


def test_what_is_here_agrees():
    assert release["check"]() == "0.1.0"


def test_a_release_changes_status_and_commands_together(tmp_path):
    date = "2026-12-24"
    changes = released(date)
    assert release["check"](copy(tmp_path, **changes)) == "0.1.0"
    for name in changes:
        without = {other: x for other, x in changes.items() if other != name}
        with pytest.raises(AssertionError):
            release["check"](copy(tmp_path, **without))
    version = {"jax_muon/__init__.py": [('"0.1.0"', '"0.2.0"')]}
    with pytest.raises(AssertionError, match="CHANGELOG"):
        release["check"](copy(tmp_path, **changes | version))


def test_an_index_shows_links_that_lead_somewhere(tmp_path):
    tree = tmp_path / "tree"
    release["stage"](tree, "https://repository.example/muon")
    readme = (tree / "README.md").read_text()
    links = re.findall(r"\]\(([^)]+)\)", readme)
    assert all(link.startswith(("https://", "#")) for link in links)
    for link in links:
        if link.startswith("https://repository.example/"):
            kind, path = re.fullmatch(r".*/muon/(raw|blob)/v0.1.0/(.*)", link).groups()
            assert (ROOT / path.partition("#")[0]).exists(), link
            assert (kind == "raw") == path.endswith((".svg", ".png"))
    assert (
        'Issues = "https://repository.example/muon/issues"'
        in (tree / "pyproject.toml").read_text()
    )
    shutil.rmtree(tree)
