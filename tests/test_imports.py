"""Each module loads by itself, pieces without the reading, most users without names."""

import pathlib
import re
import subprocess
import sys

import pytest

PACKAGE = pathlib.Path(__file__).parents[1] / "jax_muon"
MODULES = sorted(
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
    for path in PACKAGE.rglob("*.py")
    if not path.name.startswith("__")
)
# A line for each module, loaded without all others and without `jax_muon/__init__.py`:
# its name, and the modules of the reading that it loads, or the error.
ALONE = """
import importlib, sys, types
for name in sys.argv[2:]:
    for loaded in [x for x in sys.modules if x.partition(".")[0] == "jax_muon"]:
        del sys.modules[loaded]
    package = sys.modules["jax_muon"] = types.ModuleType("jax_muon")
    package.__path__ = [sys.argv[1]]
    try:
        importlib.import_module(f"jax_muon.{name}")
        print(name, *(x for x in sys.modules if x.startswith("jax_muon.reading")))
    except (ImportError, AttributeError) as error:
        print(name, repr(error))
"""
A_PIECE = """
import sys
import jax.numpy as jnp
import jax_muon as jm
tx = jm.orthogonalize(jm.ExactPolar())
tx.update({"up": jnp.ones((2, 3))}, tx.init({"up": jnp.ones((2, 3))}))
"""
LOADED = "print(*(x for x in sys.modules if x.startswith('jax_muon.reading')))"


def printed(program, *words):
    """What a program prints in a process of its own."""
    command = [sys.executable, "-c", program, *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="module")
def alone():
    """By module: what is printed when it is loaded alone."""
    lines = printed(ALONE, str(PACKAGE), *MODULES).splitlines()
    return {line.partition(" ")[0]: line.split(" ")[1:] for line in lines}


def test_each_module_loads_alone(alone):
    assert list(alone) == MODULES
    assert not {name: x for name, x in alone.items() if "Error" in str(x)}


def test_no_piece_loads_the_reading(alone):
    table = (PACKAGE.parent / "CONTRIBUTING.md").read_text()
    row = re.search(r"^\| pieces \| (.*?) \|", table, re.M)[1]
    pieces = re.findall(r"`(\w+)`", row)
    assert {"orthogonalize", "scaling", "qk_clip"} <= {*pieces}
    assert not [
        name for name in (*pieces, "matrices", "joins", "splits") if alone[name]
    ]
