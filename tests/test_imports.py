"""What is loaded: pieces do without the reading, and most users without names."""

import pathlib
import re
import subprocess
import sys

PACKAGE = pathlib.Path(__file__).parents[1] / "jax_muon"
# Modules of the package one by one, without `jax_muon/__init__.py`, which loads all.
ALONE = """
import importlib, sys, types
package = types.ModuleType("jax_muon")
package.__path__ = [sys.argv[1]]
sys.modules["jax_muon"] = package
for name in sys.argv[2:]:
    importlib.import_module(f"jax_muon.{name}")
"""
A_PIECE = """
import sys
import jax.numpy as jnp
import jax_muon as jm
tx = jm.orthogonalize(jm.ExactPolar())
tx.update({"up": jnp.ones((2, 3))}, tx.init({"up": jnp.ones((2, 3))}))
"""
LOADED = "print(*(x for x in sys.modules if x.startswith('jax_muon.reading')))"


def loaded_by(program, *words):
    """The modules of the reading that a program loads in a process of its own."""
    command = [sys.executable, "-c", program + LOADED, *words]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    return run.stdout.split()


def test_no_piece_loads_the_reading():
    table = (PACKAGE.parent / "CONTRIBUTING.md").read_text()
    row = re.search(r"^\| pieces \| (.*?) \|", table, re.M)[1]
    pieces = re.findall(r"`(\w+)`", row)
    assert {"orthogonalize", "scaling", "parts", "qk_clip"} <= {*pieces}
    assert loaded_by(ALONE, str(PACKAGE), *pieces, "matrices", "splits") == []


def test_names_are_loaded_by_reading_them():
    names = "jax_muon.reading.names."
    assert not [x for x in loaded_by(A_PIECE) if x.startswith(names)]
    reading = A_PIECE + "jm.read({'up': jnp.ones((2, 3))})\n"
    assert [x for x in loaded_by(reading) if x.startswith(names)]
