"""What an index shows of a release, and what has to agree before there is one.

    python docs/release.py FOLDER REPOSITORY

checks that status, version and dates agree everywhere, and copies what the sdist has to
FOLDER, with the repository's address in front of README's links and in pyproject.toml:
an index shows README without the files around it.
"""

import pathlib
import re
import shutil
import sys
import tomllib

ROOT = pathlib.Path(__file__).parents[1]
# A link or picture of Markdown to something in the repository: [text](docs/index.md).
RELATIVE = re.compile(r"(!?)\[([^\]]*)\]\((?!https?://|#)([^)\s]+)\)")


def check(root: pathlib.Path = ROOT) -> str:
    """The version; an AssertionError where files disagree about it or its status.

    Until CHANGELOG has a date, README installs from a clone, and pages say that nothing
    is released. From then on README installs from the index, and CITATION has the date.
    """
    files = {
        name: (root / name).read_text(encoding="utf-8")
        for name in (
            *("README.md", "CHANGELOG.md", "CITATION.cff", "SECURITY.md"),
            *("docs/index.md", "docs/numbers.md", "jax_muon/__init__.py"),
        )
    }
    (version,) = re.findall(r'__version__ = "(.*)"', files["jax_muon/__init__.py"])
    heading = re.search(r"^## (\S+), (.+)$", files["CHANGELOG.md"], re.M)
    assert heading and heading[1] == version, f"CHANGELOG.md: {heading}, not {version}"
    date = heading[2] if re.fullmatch(r"\d{4}-\d\d-\d\d", heading[2]) else None
    assert date or heading[2] == "not yet released", f"CHANGELOG.md: {heading[2]}"
    assert f"\nversion: {version}\n" in files["CITATION.cff"], "CITATION.cff"
    assert f"| {version.rpartition('.')[0]}.x |" in files["SECURITY.md"], "SECURITY.md"
    said = re.search(r"^date-released: (.*)$", files["CITATION.cff"], re.M)
    assert (said and said[1]) == date, f"CITATION.cff: {said}, CHANGELOG.md: {date}"
    for page in ("README.md", "docs/index.md"):
        from_index = "pip install jax-muon" in files[page]
        assert from_index == bool(date), f"{page}: from the index is {from_index}"
        assert ("pip install ." in files[page]) != bool(date), page
    for page, words in (
        ("README.md", "Not on an index"),
        ("docs/numbers.md", "is not released"),
    ):
        assert (words in files[page]) != bool(date), f"{page}: {words!r} with {date}"
    return version


def absolute(text: str, repository: str, tag: str) -> str:
    """Markdown whose links lead to the repository at this tag."""

    def link(found: re.Match[str]) -> str:
        picture, words, target = found.groups()
        kind = "raw" if picture else "blob"
        return f"{picture}[{words}]({repository}/{kind}/{tag}/{target})"

    return RELATIVE.sub(link, text)


def stage(folder: pathlib.Path, repository: str) -> None:
    """Copy what a build needs, with the addresses that only the publisher knows."""
    tag = f"v{check()}"
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    project = tomllib.loads(text)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name in project["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]:
        if (ROOT / name).is_dir():
            caches = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, folder / name, ignore=caches)
        else:
            shutil.copy(ROOT / name, folder / name)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    readme = absolute(readme, repository, tag)
    assert not RELATIVE.search(readme), RELATIVE.search(readme)
    (folder / "README.md").write_text(readme, encoding="utf-8")
    urls = {
        "Repository": repository,
        "Documentation": f"{repository}/blob/{tag}/docs/index.md",
        "Changelog": f"{repository}/blob/{tag}/CHANGELOG.md",
        "Issues": f"{repository}/issues",
    }
    lines = "".join(f'{name} = "{url}"\n' for name, url in urls.items())
    (folder / "pyproject.toml").write_text(
        f"{text}\n[project.urls]\n{lines}", encoding="utf-8"
    )


if __name__ == "__main__":
    stage(pathlib.Path(sys.argv[1]), sys.argv[2].rstrip("/"))
