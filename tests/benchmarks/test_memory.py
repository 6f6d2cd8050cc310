"""The page on speed and memory has the figures of the compilations."""

import json
import pathlib

ROOT = pathlib.Path(__file__).parents[2]


def tables():
    """The cells of each table of the page, by its mark."""
    page = (ROOT / "docs" / "speed.md").read_text()
    for part in page.split("<!-- ")[1:]:
        rows = part.split("\n\n")[1].splitlines()[2:]
        cells = [[y.strip(" *") for y in row.strip("|").split("|")] for row in rows]
        yield part.split()[0], cells


def test_figures_of_the_page():
    results = json.loads((ROOT / "benchmarks/results/memory.json").read_text())
    of_table = {
        name: [x for x in results if x["table"] == name]
        for name in ("models", "updates")
    }
    pages = dict(tables())
    peaks = {
        (row[0], row[1], gpus): cell
        for row in pages["models"]
        for gpus, cell in zip((1, 8, 64, 256), row[2:], strict=True)
    }
    assert peaks == {
        (x["model"].removeprefix("llama-").upper(), x["dtype"], x["gpus"]): (
            f"{x['peak'] / 1e9:.1f}"
        )
        for x in of_table["models"]
    }
    found = {
        x["optimizer"]: f"{x['peak'] / x['elements']:.1f}" for x in of_table["updates"]
    }
    for name, _, peak in pages["updates"]:
        assert found[name.removeprefix("jm.")] == peak
