"""Reading whole trees: real models, one class of leaf after the other, Flax's forms."""

import json
import math
import pathlib
import re
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from flax.core import FrozenDict
from hypothesis import given, settings
from hypothesis import strategies as st

import jax_muon as jm
from benchmarks import reading
from jax_muon.paths import is_box, leaves_with_paths
from jax_muon.reading.names.read import read_leaves
from jax_muon.reading.names.tree import Leaf

FOLDER = pathlib.Path(__file__).parents[1] / "fixtures"
MODELS = sorted((FOLDER / "reading").glob("*.json"))
FROZEN = FOLDER / "frozen/readings.txt"


def read(shapes):
    """Readings by path, of a model given as path to shape."""
    leaves = [Leaf(path, shape, jnp.float32) for path, shape in shapes.items()]
    return dict(zip(shapes, read_leaves(leaves), strict=True))


def letters(found):
    """Label and axes of one reading: "muon bio" is (batch, in, out)."""
    if found.doubt or found.label == "adamw":
        return "doubt" if found.doubt else "adamw"
    roles = dict.fromkeys(found.axes.batch, "b")
    roles |= dict.fromkeys(found.axes.reduction, "i")
    roles |= dict.fromkeys(found.axes.output, "o")
    return "muon " + "".join(roles[axis] for axis in sorted(roles))


# --- models ---------------------------------------------------------------------------


def lines_of(params):
    """One line per leaf of a model."""
    found = read({param["path"]: tuple(param["shape"]) for param in params})
    return [f"  {path}: {letters(one)}" for path, one in found.items()]


@pytest.mark.parametrize("file", MODELS, ids=lambda file: file.stem)
def test_models(file):
    """Every leaf is read correctly, and as in a file, where a diff shows changes.

    `python -m tests.test_reading` writes it.
    """
    params = json.loads(file.read_text())["params"]
    counts, kinds = reading.score(params)
    assert not counts[reading.WRONG] + counts[reading.REFUSED], kinds
    frozen = map(str.splitlines, re.split(r"\n(?! )", FROZEN.read_text().strip()))
    (lines,) = (lines for title, *lines in frozen if title == file.stem)
    assert lines_of(params) == lines


def test_the_order_of_leaves_changes_nothing():
    for file in MODELS[:6]:
        params = json.loads(file.read_text())["params"]
        leaves = [Leaf(p["path"], tuple(p["shape"]), p["dtype"]) for p in params]
        forward, backward = read_leaves(leaves), read_leaves(leaves[::-1])[::-1]
        assert [letters(r) for r in forward] == [letters(r) for r in backward]


def blocks(count):
    """Shapes of layers with a router, experts, attention and an MLP."""
    own = {
        "attn/q/kernel": (64, 4, 16),
        "attn/o/kernel": (4, 16, 64),
        "ln/scale": (64,),
    }
    own |= {
        "moe/gate/kernel": (64, 8),
        "moe/up": (8, 64, 96),
        "mlp/up/kernel": (64, 96),
    }
    return {f"layers_{i}/{path}": x for i in range(count) for path, x in own.items()}


def projections(count):
    """Shapes of many kernels in one module."""
    return {f"q{i}": (64, 4, 16) for i in range(6 * count)} | {"ln/scale": (64,)}


@pytest.mark.parametrize("model", [blocks, projections])
def test_reading_takes_time_in_proportion_to_the_leaves(model):
    """Four times the leaves run four times the lines of Python."""

    def lines_run(count):
        lines = 0

        def trace(frame, event, arg):
            nonlocal lines
            lines += event == "line"
            return trace

        leaves = [Leaf(path, x, jnp.float32) for path, x in model(count).items()]
        before = sys.gettrace()
        sys.settrace(trace)
        try:
            read_leaves(leaves)
        finally:
            sys.settrace(before)
        return lines

    assert lines_run(40) < 4.4 * lines_run(10)


def test_the_benchmark_says_what_is_wrong(tmp_path, capsys):
    wrong = {"path": "wte/embedding", "shape": [9, 4], "dtype": "float32"}
    wrong |= {"expect": {"label": "muon", "batch": [], "in": [0], "out": [1]}}
    (tmp_path / "toy.json").write_text(json.dumps({"params": [wrong]}))
    assert reading.main([str(tmp_path)]) == 1
    shown = capsys.readouterr().out
    assert "wte/embedding" in shown
    assert "TOTAL of 1 models: 1 leaves, 0 right" in shown


# --- classes of leaves ----------------------------------------------------------------


def small_trees():
    """The trees of a file: leaves as path, shape and answer, if one is asked for."""
    trees = {}
    text = (FOLDER / "small_trees.txt").read_text().replace("\n  ", " ")
    for line in filter(lambda line: line and line[0] != "#", text.splitlines()):
        title, leaves = line.rsplit(": ", 1)
        leaves = [leaf.split() for leaf in leaves.split(", ")]
        if title.startswith("each"):
            trees |= {" ".join(leaf): [leaf] for leaf in leaves}
        else:
            trees[title] = leaves
    return trees


TREES = small_trees()


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_small_trees(tree):
    shapes = {
        path: () if shape == "scalar" else tuple(map(int, shape.split("x")))
        for path, shape, *_ in tree
    }
    found = read(shapes)
    asked = {path: answer[0] for path, _, *answer in tree if answer}
    answers = {path: letters(found[path]).removeprefix("muon ") for path in asked}
    assert answers == asked


def test_integers_and_complex_go_to_adamw():
    params = {"a": jnp.zeros((2, 2), int), "b": jnp.zeros((2, 2), complex)}
    assert jm.read(params).labels(params) == {"a": "adamw", "b": "adamw"}


@pytest.mark.parametrize(
    ("path", "beside", "role"),
    [
        ("mlp/wo/kernel", "mlp/wi/kernel", "kernel"),
        ("mlp/c_proj/kernel", "mlp/c_fc/kernel", "kernel"),
        ("attn/wo/kernel", "attn/wi/kernel", "out"),
        ("mixer/wo/kernel", "mixer/wq/kernel", "out"),
    ],
)
def test_only_attention_has_projections_of_attention(path, beside, role):
    found = read({path: (64, 64), beside: (64, 64), "norm/scale": (64,)})[path]
    assert found.role == role
    assert ("attention" in found.reason) == (role == "out")


# --- all trees ---

PATHS = [path for tree in TREES.values() for path, *_ in tree]
PARTS = sorted({part for path in PATHS for part in path.split("/")})
SIZES = st.sampled_from([0, 1, 2, 3, 8, 64])


@given(
    st.dictionaries(
        st.lists(st.sampled_from(PARTS), min_size=1, max_size=4).map("/".join),
        st.lists(SIZES, max_size=5).map(tuple),
        min_size=1,
        max_size=5,
    )
)
@settings(max_examples=300, deadline=None)
def test_every_tree_is_read(shapes):
    """Nothing fails, and the axes of a matrix are all axes."""
    for one in read(shapes).values():
        if one.label == "muon" and not one.doubt:
            assert math.prod(one.sizes) == math.prod(one.shape)


# --- forms of trees -------------------------------------------------------------------


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(16, 8)(tokens)
        init = nn.initializers.lecun_normal()
        logical = nn.with_logical_partitioning(init, ("embed", "mlp"))
        x = nn.LayerNorm()(nn.Dense(8, kernel_init=logical)(x))
        partitioned = nn.with_partitioning(init, ("mlp", None))
        x = nn.Dense(8, kernel_init=partitioned, name="wo")(x)
        return nn.Dense(16, name="lm_head")(x)


def test_forms_of_linen():
    """Boxed, unboxed and frozen trees have the same labels."""
    boxed = LinenBlock().init(jax.random.key(0), jnp.zeros((1, 4), int))["params"]
    for tree in (boxed, nn.meta.unbox(boxed), FrozenDict(boxed)):
        labels = jm.read(tree).labels(tree)
        matrices = {path for path, x in leaves_with_paths(labels) if x == "muon"}
        assert matrices == {"Dense_0/kernel", "wo/kernel"}
        whole = jax.tree.structure(tree, is_leaf=is_box)  # a box gets one label
        assert jax.tree.structure(labels) == whole


def test_forms_of_nnx():
    """nnx.Optimizer boxes parameters at init and not at update: both must agree."""
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(nnx.Linear(8, 8, rngs=rngs), nnx.LayerNorm(8, rngs=rngs))
    seen = []

    def recording(params):
        matrices = jm.read(params)
        seen.append(dict(leaves_with_paths(matrices.labels(params))))
        return matrices

    tx = jm.nanochat(matrices=recording, dtype="float32")
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    optimizer.update(model, nnx.grad(lambda m: jnp.mean(m(jnp.ones((1, 8)))))(model))
    plain = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    labels = dict(leaves_with_paths(jm.read(plain).labels(plain)))
    assert labels["layers/0/kernel"] == "muon"
    assert len(seen) >= 2
    assert all(one == labels for one in seen)


if __name__ == "__main__":
    parts = ([x.stem, *lines_of(json.loads(x.read_text())["params"])] for x in MODELS)
    FROZEN.write_text("".join(f"{line}\n" for lines in parts for line in lines))
