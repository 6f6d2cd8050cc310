"""Copies of installed packages with the changes of an `upstream.patch`."""

import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]


def copy(package: str, root: pathlib.Path) -> None:
    """Copies a package to a folder and applies `outside/<package>/upstream.patch`."""
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.origin is not None
    installed = pathlib.Path(spec.origin).parent
    without_cache = shutil.ignore_patterns("__pycache__")
    shutil.copytree(installed, root / package, ignore=without_cache)
    patch = ROOT / "outside" / package / "upstream.patch"
    subprocess.run(["patch", "-p1", "--fuzz=0", "-i", patch], cwd=root, check=True)


def run(root: pathlib.Path, *command: str | pathlib.Path) -> str:
    """What a Python command prints, with the copies in a folder instead of the rest."""
    done = subprocess.run(
        [sys.executable, *command],
        env=os.environ | {"PYTHONPATH": f"{root}:{ROOT}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout + done.stderr
