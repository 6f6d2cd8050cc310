"""The code in the README runs as it stands there."""

import pathlib
import re

import numpy as np

README = pathlib.Path(__file__).parents[1] / "README.md"


def test_code_blocks_run_in_order(capsys):
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.S)
    assert len(blocks) == 3
    names = {}
    exec(blocks[0], names)  # the quick start
    assert np.isfinite(names["value"])
    assert names["value"] < 0.5
    table, _, last = capsys.readouterr().out.strip().rpartition("\n")
    assert "embed" in table and "muon" in table
    assert last == str(names["value"])
    for block in blocks[1:]:
        exec(block, names)
    assert names["mesh"].axis_names == ("data",)
