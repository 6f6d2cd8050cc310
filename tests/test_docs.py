"""Code in README and pages runs, and the links and files that they name exist.

The code of a page may use names that it does not define if a sentence of the page says
that they are the reader's; `stage` has them for all pages.
"""

import ast
import inspect
import pathlib
import pkgutil
import re
import runpy

import chex
import jax
import jax.numpy as jnp
import optax
import pytest

import jax_muon as jm
from tests import pages, trees
from tests.matrices import toy
from tests.recipes import RECIPES, SHAPES

ROOT = pathlib.Path(__file__).parents[1]
DOCS = ROOT / "docs"
# A block of code, and below it what it prints.
BLOCK = re.compile(
    r"^```python\n(.*?)^```(?:\n+(?:[^`\n]+\n+)?```text\n(.*?)^```)?", re.S | re.M
)
# tests/examples/test_frameworks.py runs that page, and checks the results.
PAGES = sorted(
    page.name
    for page in DOCS.glob("*.md")
    if BLOCK.search(page.read_text()) and page.name != "frameworks.md"
)


def stage(folder):
    """What a reader has: a small model with its loss, gradients and reading."""
    params = {
        "attn": {"qkv": jnp.ones((64, 128)), "out": jnp.ones((64, 64))},
        "mlp": {"up": jnp.ones((64, 256)), "down": jnp.ones((256, 64))},
    }

    def loss_fn(params, batch):
        attn, mlp = params["attn"], params["mlp"]
        q, v = jnp.split(batch @ attn["qkv"], 2, axis=-1)  # (8, 64) each
        x = batch + (jnp.tanh(q) * v) @ attn["out"]
        return jnp.mean((x + jax.nn.relu(x @ mlp["up"]) @ mlp["down"]) ** 2)

    batch = jnp.ones((8, 64))
    matrices = jm.find_matrices(params, loss_fn, batch)
    names = {"params": params, "grads": params, "loss_fn": loss_fn, "batch": batch}
    return names | {"matrices": matrices, "folder": folder}


def run(page, names, capsys):
    """Run the code of a page in order, which prints what the page says."""
    for found in BLOCK.finditer(page.read_text()):
        # Readings name the lines of this file.
        exec(compile(found[1], "model.py", "exec"), names)
        printed = capsys.readouterr().out
        assert found[2] is None or printed == found[2]


@pytest.mark.parametrize("page", PAGES)
def test_the_code_of_a_page_runs_in_order(page, tmp_path, capsys):
    """With what the page says is the reader's, and nothing else."""
    there, named = stage(tmp_path), pages.yours((DOCS / page).read_text())
    run(DOCS / page, {name: there[name] for name in named}, capsys)


def test_the_readme_runs_alone_and_its_optimizer_trains(capsys):
    names = {}
    run(ROOT / "README.md", names, capsys)
    loss = jax.jit(jax.value_and_grad(names["loss_fn"]))
    params, tx, values = names["params"], names["tx"], []
    state, update = tx.init(params), jax.jit(tx.update)
    for _ in range(40):
        value, grads = loss(params, jnp.arange(64))
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
        values.append(float(value))
    assert values[-1] < values[0] / 2


def test_the_chain_of_the_page_is_the_recipe_bit_for_bit():
    """Two steps, so that momentum and NorMuon's means count."""
    shapes = SHAPES | {"up": (3, 6, 8), "conv": (3, 3, 4, 8), "tall": (12, 5)}
    start, *grads = (trees.normal(shapes, seed) for seed in range(3))
    names = {"jm": jm, "optax": optax, "matrices": toy(start)}
    exec([*BLOCK.finditer((DOCS / "chain.md").read_text())][1][1], names)
    plain = RECIPES["nanochat"]()
    ends = [trees.run(tx, start, grads)[1] for tx in (names["tx"], plain)]
    chex.assert_trees_all_equal(*ends)


def anchors(page):
    """The places in a page that a link can name."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M)
    headings = re.findall(r"^#+ (.+)$", text, re.M)
    words = (re.sub(r"[^\w\s-]", "", heading.lower()) for heading in headings)
    named = re.findall(r'<a id="(\w+)">', text) + re.findall(r"^::: (\S+)$", text, re.M)
    return {each.strip().replace(" ", "-") for each in words} | set(named)


def test_every_link_between_pages_leads_somewhere():
    folders = (DOCS, ROOT, ROOT / "benchmarks")
    for page in (x for folder in folders for x in folder.glob("*.md")):
        for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text()):
            name, _, anchor = target.partition("#")
            other = page.parent / name if name else page
            assert other.exists(), f"{page.name}: {target}"
            assert not anchor or anchor in anchors(other), f"{page.name}: {target}"


def test_every_row_of_a_table_has_the_cells_of_its_header():
    """A | in code ends a cell, too."""
    for page in [*DOCS.glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]:
        text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M)
        for table in re.findall(r"(?:^\|.*\n)+", text, re.M):
            cells = {len(re.findall(r"(?<!\\)\|", row)) for row in table.splitlines()}
            assert len(cells) == 1, f"{page.name}: {table}"


def test_the_files_that_pages_name_are_there():
    """Paths from the root, the package or docs; frameworks.md names files of others."""
    named = re.compile(r"`((?:\w+/)+[\w*]+\.(?:py|md|json|ipynb))`")
    others = {DOCS / "frameworks.md"}
    for page in sorted({*DOCS.glob("*.md"), *ROOT.glob("*.md")} - others):
        for name in named.findall(page.read_text()):
            places = (ROOT, ROOT / "jax_muon", DOCS)
            assert any(any(x.glob(name)) for x in places), f"{page.name}: {name}"


def test_no_file_imports_from_a_higher_floor():
    """The floors of the table in CONTRIBUTING.md, from the top to the ground."""
    table = (ROOT / "CONTRIBUTING.md").read_text().partition("| floor |")[2]
    rows = re.findall(r"^\| [a-z ]+ \| (`.*?) \|", table.partition("\n\n")[0], re.M)
    floors = {
        file.rstrip("/"): -depth
        for depth, row in enumerate(rows)
        for file in re.findall(r"`([\w/]+)`", row)
    }

    package = ROOT / "jax_muon"
    for file in {*package.rglob("*.py")} - {*package.glob("__*__.py")}:
        parts = file.relative_to(package).with_suffix("").parts
        here = floors[parts[0]]
        tree = ast.parse(file.read_text())
        types = [x for x in tree.body if ast.unparse(x).startswith("if TYPE_CHECKING:")]
        # The base may name types of higher floors, for what these set there.
        assert not types or parts[0] == "base", file
        for node in ast.walk(tree):
            if any(node in x.body for x in types):
                continue
            if isinstance(node, ast.ImportFrom) and "jax_muon" in node.module:
                _, *inside = node.module.split(".")
                for alias in node.names:
                    name = (*inside, alias.name)
                    assert floors[name[0]] <= here, f"{file} imports {'.'.join(name)}"
                    # Transforms are given a reading; they never make one.
                    assert (parts[0], name[0]) != ("transforms", "reading"), file


def test_ci_runs_every_environment_of_outside():
    """With the Python that the Makefile makes it with."""
    workflow = (ROOT / ".github" / "workflows" / "tests.yml").read_text()
    jobs = re.findall(r'- \{python: "([\d.]+)", name: (\w+)\}', workflow)
    makefile = (ROOT / "Makefile").read_text()
    older = re.search(r"^(.*): OUTSIDE_PYTHON = python3.11$", makefile, re.M)[1]
    there = {x.parent.name for x in ROOT.glob("outside/*/requirements.txt")}
    assert sorted(name for _, name in jobs) == sorted(there)
    assert {x for x in there if f"/{x}" in older} == {n for p, n in jobs if p == "3.11"}


def test_the_reference_has_every_public_name_with_an_example():
    """Every name that it has is there; doctest runs the examples."""
    names = re.findall(r"^::: (\S+)$", (DOCS / "reference.md").read_text(), re.M)
    assert all(map(pkgutil.resolve_name, names))
    public = {name.rpartition(".")[2] for name in names if name.startswith("jax_muon.")}
    assert not {*jm.__all__} - public
    for name in jm.__all__:
        assert ">>> " in inspect.getdoc(getattr(jm, name)), name


def test_the_changelog_has_every_public_name():
    text = (ROOT / "CHANGELOG.md").read_text()
    assert {*jm.__all__} <= set(re.findall(r"`(\w+)", text))


def test_charts_show_the_results():
    """`python docs/charts.py` would change nothing."""
    drawn = runpy.run_path(str(DOCS / "charts.py"))
    for name, chart in drawn["charts"]().items():
        assert (DOCS / "pictures" / name).read_text() == chart, name
