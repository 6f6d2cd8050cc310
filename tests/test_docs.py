"""The code in the documentation runs as it stands there, page by page, in order.

A page may use what stands in `stage` besides its own imports: a small model, its
gradients, a mesh of eight devices, a loss, and a folder.
"""

import inspect
import pathlib
import re
import runpy

import jax
import jax.numpy as jnp
import optax
import pytest

import jax_muon as jm

DOCS = pathlib.Path(__file__).parents[1] / "docs"
BLOCK = re.compile(r"^```python\n(.*?)^```", re.S | re.M)
# tests/examples/test_frameworks.py runs that page, and looks at what comes of it.
PAGES = sorted(
    page.name
    for page in DOCS.glob("*.md")
    if BLOCK.search(page.read_text()) and page.name != "frameworks.md"
)


def stage(folder):
    """What pages use without saying it again."""
    params = {
        "attn": {"qkv": jnp.ones((64, 128)), "out": jnp.ones((64, 64))},
        "mlp": {"up": jnp.ones((64, 256)), "down": jnp.ones((256, 64))},
    }
    mesh = jax.make_mesh((8,), ("data",), (jax.sharding.AxisType.Auto,))

    def loss_fn(params, batch):
        return jnp.mean((batch @ params["mlp"]["up"] @ params["mlp"]["down"]) ** 2)

    return {
        "jax": jax,
        "jnp": jnp,
        "optax": optax,
        "jm": jm,
        "params": params,
        "grads": jax.tree.map(jnp.ones_like, params),
        "mesh": mesh,
        "specs": None,
        "loss_fn": loss_fn,
        "batch": jnp.ones((8, 64)),
        "folder": folder,
    }


@pytest.mark.parametrize("page", PAGES)
def test_the_code_of_a_page_runs_in_order(page, tmp_path, capsys):
    names = stage(tmp_path)
    text = (DOCS / page).read_text()
    for found in BLOCK.finditer(text):
        line = text[: found.start()].count("\n") + 2
        code = compile("\n" * (line - 1) + found[1], page, "exec")
        exec(code, names)


def test_every_link_between_pages_leads_somewhere():
    for page in DOCS.glob("*.md"):
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_files_that_pages_name_are_there():
    """Paths from the root, the package or docs; frameworks.md names files of others."""
    root = DOCS.parent
    named = re.compile(r"`((?:\w+/)+[\w*]+\.(?:py|md|json|ipynb))`")
    pages = {*DOCS.glob("*.md"), *root.glob("*.md")} - {DOCS / "frameworks.md"}
    for page in sorted(pages):
        for name in named.findall(page.read_text()):
            places = (root, root / "jax_muon", root / "docs")
            assert any(any(x.glob(name)) for x in places), f"{page.name}: {name}"


def test_every_public_name_is_in_the_reference():
    reference = (DOCS / "reference.md").read_text()
    named = re.findall(r"^::: jax_muon\.(?:\w+\.)*(\w+)$", reference, re.M)
    assert sorted(set(named) & set(jm.__all__)) == sorted(jm.__all__)


@pytest.mark.parametrize("name", jm.__all__)
def test_every_public_name_has_an_example(name):
    """Doctest runs them."""
    assert ">>> " in inspect.getdoc(getattr(jm, name))


def test_charts_and_tables_are_those_of_the_results():
    """`python docs/charts.py` would change nothing."""
    drawn = runpy.run_path(str(DOCS / "charts.py"))
    for name, chart in drawn["charts"]().items():
        assert (DOCS / "pictures" / name).read_text() == chart, name
    for page in drawn["PAGES"]:
        text = page.read_text()
        assert drawn["filled"](text) == text, page
    assert "| 8 x 1 |" in (DOCS / "speed.md").read_text()
