"""Reading whole trees: real models, one class of leaf after the other, Flax's forms."""

import collections
import json
import math
import pathlib
import re

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
from jax_muon.reading import axis_names
from jax_muon.reading.read import read_leaves
from jax_muon.reading.tree import Leaf

FOLDER = pathlib.Path(__file__).parent / "fixtures"
MODELS = sorted((FOLDER / "reading").glob("*.json"))
FROZEN = FOLDER / "frozen/readings.txt"


def read(shapes, names=None):
    """Readings by path, of a model given as path to shape."""
    leaves = [
        Leaf(path, shape, jnp.float32, (names or {}).get(path))
        for path, shape in shapes.items()
    ]
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
    """One line per leaf of a model: without axis names, and with them."""
    shapes = {param["path"]: tuple(param["shape"]) for param in params}
    names = {p["path"]: tuple(p["names"]) for p in params if p.get("names")}
    plain, named = read(shapes), read(shapes, names)
    return [
        f"  {path}: {letters(plain[path])}"
        + (f", by names {letters(named[path])}" if names else "")
        for path in shapes
    ]


@pytest.mark.parametrize("file", MODELS, ids=lambda file: file.stem)
def test_models(file):
    """Every leaf is read correctly, and as in a file, where a diff shows changes.

    `python -m tests.test_reading` writes it.
    """
    params = json.loads(file.read_text())["params"]
    for with_names in (False, True):
        counts, kinds = reading.score(params, with_names)
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


def test_the_benchmark_says_what_is_wrong(tmp_path, capsys):
    wrong = {"path": "wte/embedding", "shape": [9, 4], "dtype": "float32"}
    wrong |= {"expect": {"label": "muon", "batch": [], "in": [0], "out": [1]}}
    (tmp_path / "toy.json").write_text(json.dumps({"params": [wrong]}))
    assert reading.main([str(tmp_path), "--no-names"]) == 1
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


# --- logical axis names ---------------------------------------------------------------

NAMED = [
    ("attn/query/kernel", ("embed", "layers", "q_heads", "kv"), "iboo"),
    ("attn/out/kernel", ("heads", "layers", "kv", "embed"), "ibio"),
    ("attn/wq_a/kernel", ("embed", "layers", "q_lora"), "ibo"),
    ("attn/wq_b/kernel", ("q_lora", "layers", "q_heads", "kv"), "iboo"),
    ("mlp/wi/kernel", ("embed", "layers", "mlp"), "ibo"),
    ("mlp/wo/kernel", ("mlp", "layers", "embed"), "ibo"),
    ("moe/wo", ("exp", "layers", "mlp_moe", "embed_moe"), "bbio"),
    ("mlp/c_fc/lora_A/weight", ("LORA_R", "layers", "embed"), "obi"),
    ("mlp/c_fc/lora_B/weight", ("mlp", "layers", "LORA_R"), "obi"),
    # Simply's annotations: in, out, or a dot for a batch.
    ("block/mix/w", ("i", "o"), "io"),
    ("block/mix/w", (".", "o", "i"), "boi"),
    ("block/mix/w", ("i", "o", "o"), "ioo"),
    ("block/mix/w", ("i", "h"), "io"),
    ("block/mix/w", ("o", "embed"), "oi"),
]


@given(st.sampled_from(NAMED), st.randoms(use_true_random=False))
@settings(max_examples=50, deadline=None)
def test_axes_permuted_with_their_names_change_nothing(case, random):
    path, names, answer = case
    sizes = (64, 3, 8, 16)[: len(names)]
    order = random.sample(range(len(names)), len(names))
    one = read(
        {path: tuple(sizes[i] for i in order)}, {path: tuple(names[i] for i in order)}
    )
    assert letters(one[path]) == "muon " + "".join(answer[i] for i in order)


PATHS = [path for tree in TREES.values() for path, *_ in tree]
PARTS = sorted({part for path in PATHS for part in path.split("/")})
AXES = st.tuples(
    st.sampled_from([0, 1, 2, 3, 8, 64]),
    st.sampled_from(sorted({name for _, names, _ in NAMED for name in names})),
)


@given(
    st.dictionaries(
        st.lists(st.sampled_from(PARTS), min_size=1, max_size=4).map("/".join),
        st.lists(AXES, max_size=5),
        min_size=1,
        max_size=5,
    )
)
@settings(max_examples=300, deadline=None)
def test_every_tree_is_read(leaves):
    """Nothing fails, and the axes of a matrix are all axes."""
    shapes = {path: tuple(size for size, _ in axes) for path, axes in leaves.items()}
    names = {path: tuple(name for _, name in axes) for path, axes in leaves.items()}
    for given_names in ({}, names):
        for one in read(shapes, given_names).values():
            if one.label == "muon" and not one.doubt:
                assert math.prod(one.sizes) == math.prod(one.shape)


def test_a_table_has_no_outputs():
    table = read({"block/mix/w": (4, 8)}, {"block/mix/w": (".", "i")})
    assert letters(table["block/mix/w"]) == "adamw"


def test_kinds_by_the_words_of_a_name():
    names = {
        "heads": ["kv_head", "q_heads_per_group", "HeadSize"],
        "batch": ["scanned_blocks", "expert_only", "layers_outside_pipeline"],
        "hidden": ["expert_mlp"],
        "latent": ["kv_lora"],
        "stream": ["embed_no_exp_moe"],
        "vocab": ["vocab_size"],
        "position": ["relpos_buckets"],
        None: ["d_model", "fsdp"],
    }
    kinds = {name: kind for kind, own in names.items() for name in own}
    table = axis_names.table_with(None)
    assert {name: axis_names.kind_of(name, table) for name in kinds} == kinds


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
    """Boxed, unboxed and frozen trees have the same labels; boxes carry names."""
    boxed = LinenBlock().init(jax.random.key(0), jnp.zeros((1, 4), int))["params"]
    for tree in (boxed, nn.meta.unbox(boxed), FrozenDict(boxed)):
        labels = jm.read(tree).labels(tree)
        matrices = {path for path, x in leaves_with_paths(labels) if x == "muon"}
        assert matrices == {"Dense_0/kernel", "wo/kernel"}
        whole = jax.tree.structure(tree, is_leaf=is_box)  # a box gets one label
        assert jax.tree.structure(labels) == whole
    names = {"Dense_0/kernel": ("embed", "mlp"), "wo/kernel": ("mlp", None)}
    assert axis_names.of_tree(boxed) == names
    assert axis_names.of_tree(nn.meta.unbox(boxed)) == {}
    found = {path: one.names for path, one in jm.read(boxed).items()}
    assert {path: own for path, own in found.items() if own} == names


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


def test_names_of_nnx_variables():
    with nnx.use_eager_sharding(False):
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("embed", "mlp"))
        model = nnx.Linear(4, 8, kernel_init=init, rngs=nnx.Rngs(0))
    found = axis_names.of_tree(nnx.state(model, nnx.Param))
    assert found == {"kernel": ("embed", "mlp")}


Axis = collections.namedtuple("Axis", "name")


@jax.tree_util.register_pytree_node_class
class NamedArray:
    """As in haliax: a leaf that holds an array and `axes` with names."""

    def __init__(self, array, axes):
        self.array, self.axes = array, axes

    def tree_flatten(self):
        return (self.array,), self.axes

    @classmethod
    def tree_unflatten(cls, axes, children):
        return cls(*children, axes)


def test_names_of_haliax_arrays():
    weight = NamedArray(jnp.zeros((8, 4)), (Axis("mlp"), Axis("embed")))
    tree = {"up": {"weight": weight}}
    assert axis_names.of_tree(tree) == {"up/weight/0": ("mlp", "embed")}
    assert letters(jm.read(tree)["up/weight/0"]) == "muon oi"


if __name__ == "__main__":
    parts = ([x.stem, *lines_of(json.loads(x.read_text())["params"])] for x in MODELS)
    FROZEN.write_text("".join(f"{line}\n" for lines in parts for line in lines))
