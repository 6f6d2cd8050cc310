"""Each module loads by itself, and pieces without the reading."""

import pathlib
import re
import subprocess
import sys

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


def test_each_module_loads_alone_and_no_piece_loads_the_reading():
    command = [sys.executable, "-c", ALONE, str(PACKAGE), *MODULES]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = (line.partition(" ") for line in done.stdout.splitlines())
    alone = {name: loaded for name, _, loaded in lines}
    assert list(alone) == MODULES
    assert not {name: x for name, x in alone.items() if "Error" in x}
    table = (PACKAGE.parent / "CONTRIBUTING.md").read_text()
    row = re.search(r"^\| pieces \| (.*?) \|", table, re.M)[1]
    pieces = re.findall(r"`(\w+)`", row)
    assert {"orthogonalize", "scaling", "qk_clip"} <= {*pieces}
    assert not [name for name in (*pieces, "matrices", "joins") if alone[name]]


def test_kernels_are_imported_for_themselves_alone():
    """Pallas takes half a second to load; jax.extend brings 30 ms of it along."""
    code = (
        "import sys, jax.numpy as jnp, jax_muon as jm; jm.PolarExpress()(jnp.eye(3)); "
        "print(any('hopper' in x or 'experimental.pallas' in x for x in sys.modules))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert run.stdout == b"False\n"
