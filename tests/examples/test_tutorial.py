"""The tutorial's cells run in order, and end as its text says."""

import json
import os

import jax
import matplotlib.pyplot as plt
import pytest

SMALLER = {"16, 128": "16, 32", "width=128, depth=2": "width=64, depth=1"}
SMALLER["make_mesh((8,)"] = "make_mesh((4,)"


def test_cells_run(examples, monkeypatch, capsys):
    monkeypatch.setenv("TUTORIAL_STEPS", "3")
    monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))  # which it sets
    assert jax.device_count() == 8  # and which JAX does not read again from here on
    monkeypatch.setattr(plt, "show", plt.close)
    notebook = json.loads((examples / "tutorial.ipynb").read_text())
    names = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            source = "".join(cell["source"])
            for written, smaller in SMALLER.items():
                source = source.replace(written, smaller)
            exec(compile(source, cell["id"], "exec"), names)
    printed = capsys.readouterr().out.splitlines()
    assert set(names["curves"]) == {"AdamW", "nanochat", "nanochat, 3 steps"}
    assert all(curve[3] < curve[0] for curve in names["curves"].values())
    whole, divided = printed[-2:]
    loss = {line: float(line.split("loss ")[1].split(",")[0]) for line in printed[-2:]}
    held = {line: float(line.split(", ")[1].split()[0]) for line in printed[-2:]}
    assert loss[whole] == pytest.approx(loss[divided], abs=2e-4)
    assert held[divided] < held[whole] / 2
