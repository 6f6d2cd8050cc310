"""Files import from their own floor and from lower ones, and kernels by themselves."""

import ast
import pathlib
import re
import subprocess
import sys

PACKAGE = pathlib.Path(__file__).parents[1] / "jax_muon"


def test_no_file_imports_from_a_higher_floor():
    """The floors of the table in CONTRIBUTING.md, from the top to the ground."""
    table = (PACKAGE.parent / "CONTRIBUTING.md").read_text().partition("| floor |")[2]
    rows = re.findall(r"^\| [a-z ]+ \| (`.*?) \|", table.partition("\n\n")[0], re.M)
    floors = {
        file.rstrip("/"): -depth
        for depth, row in enumerate(rows)
        for file in re.findall(r"`([\w/]+)`", row)
    }

    def floor(parts):
        """That of a file, if the table names it, or of its folder."""
        return floors.get("/".join(parts[:2]), floors[parts[0]])

    for file in {*PACKAGE.rglob("*.py")} - {*PACKAGE.glob("__*__.py")}:
        here = floor(file.relative_to(PACKAGE).with_suffix("").parts)
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and "jax_muon" in node.module:
                _, *inside = node.module.split(".")
                for alias in node.names:
                    name = (*inside, alias.name)
                    assert floor(name) <= here, f"{file} imports {'.'.join(name)}"
                    # Pieces are told how parameters are read.
                    assert here != floors["momentum"] or name[0] != "reading", file


def test_kernels_are_imported_for_themselves_alone():
    """Pallas takes half a second to load; jax.extend brings 30 ms of it along."""
    code = (
        "import sys, jax.numpy as jnp, jax_muon as jm; jm.PolarExpress()(jnp.eye(3)); "
        "print(any('hopper' in x or 'experimental.pallas' in x for x in sys.modules))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert run.stdout == b"False\n"
