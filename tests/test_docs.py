"""Code in the pages runs, and the links, files and errors that they name exist.

The code of a page may use the names in `stage` in addition to its own imports: a small
model, its gradients, a loss and its reading, a mesh of eight devices, and a folder.
"""

import inspect
import pathlib
import pkgutil
import re
import runpy

import jax
import jax.numpy as jnp
import optax
import pytest

import jax_muon as jm

DOCS = pathlib.Path(__file__).parents[1] / "docs"
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
    """Names that pages use without defining them."""
    params = {
        "attn": {"qkv": jnp.ones((64, 128)), "out": jnp.ones((64, 64))},
        "mlp": {"up": jnp.ones((64, 256)), "down": jnp.ones((256, 64))},
    }
    mesh = jax.make_mesh((8,), ("data",), (jax.sharding.AxisType.Auto,))

    def loss_fn(params, batch):
        return jnp.mean((batch @ params["mlp"]["up"] @ params["mlp"]["down"]) ** 2)

    batch = jnp.ones((8, 64))
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
        "batch": batch,
        "matrices": jm.read(params, loss_fn, batch),
        "folder": folder,
    }


@pytest.mark.parametrize("page", PAGES)
def test_the_code_of_a_page_runs_in_order(page, tmp_path, capsys):
    names = stage(tmp_path)
    text = (DOCS / page).read_text()
    for found in BLOCK.finditer(text):
        # Readings name the lines of this file.
        exec(compile(found[1], "model.py", "exec"), names)
        printed = capsys.readouterr().out
        assert found[2] is None or printed == found[2]


def anchors(page):
    """The places in a page that a link can name."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M)
    headings = re.findall(r"^#+ (.+)$", text, re.M)
    words = (re.sub(r"[^\w\s-]", "", heading.lower()) for heading in headings)
    named = re.findall(r'<a id="(\w+)">', text) + re.findall(r"^::: (\S+)$", text, re.M)
    return {each.strip().replace(" ", "-") for each in words} | set(named)


def test_every_link_between_pages_leads_somewhere():
    root = DOCS.parent
    pages = [*DOCS.glob("*.md"), *root.glob("*.md"), *root.glob("benchmarks/*.md")]
    for page in pages:
        for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text()):
            name, _, anchor = target.partition("#")
            other = page.parent / name if name else page
            assert other.exists(), f"{page.name}: {target}"
            assert not anchor or anchor in anchors(other), f"{page.name}: {target}"


def test_the_files_that_pages_name_are_there():
    """Paths from the root, the package or docs; frameworks.md names files of others."""
    root = DOCS.parent
    named = re.compile(r"`((?:\w+/)+[\w*]+\.(?:py|md|json|ipynb))`")
    pages = {*DOCS.glob("*.md"), *root.glob("*.md")} - {DOCS / "frameworks.md"}
    for page in sorted(pages):
        for name in named.findall(page.read_text()):
            places = (root, root / "jax_muon", root / "docs")
            assert any(any(x.glob(name)) for x in places), f"{page.name}: {name}"


def test_the_reference_has_every_public_name_with_an_example():
    """Every name that it has is there; doctest runs the examples."""
    names = re.findall(r"^::: (\S+)$", (DOCS / "reference.md").read_text(), re.M)
    assert all(map(pkgutil.resolve_name, names))
    public = {name.rpartition(".")[2] for name in names if name.startswith("jax_muon.")}
    assert not {*jm.__all__} - public
    for name in jm.__all__:
        assert ">>> " in inspect.getdoc(getattr(jm, name)), name


def test_charts_and_the_readme_show_the_results():
    """`python docs/charts.py` would change nothing."""
    drawn = runpy.run_path(str(DOCS / "charts.py"))
    for name, chart in drawn["charts"]().items():
        assert (DOCS / "pictures" / name).read_text() == chart, name
    readme = drawn["README"].read_text()
    assert "| Llama 7B on 256 devices" in readme
    assert drawn["filled"](readme) == readme
