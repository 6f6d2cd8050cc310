"""Reading whole trees: models of many code bases, one class of leaf after the other."""

import json
import pathlib

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

import jax_muon as jm
from benchmarks import reading
from jax_muon.reading import axis_names
from jax_muon.reading.read import read_leaves
from jax_muon.reading.tree import Leaf

FIXTURES = sorted((pathlib.Path(__file__).parent / "fixtures/reading").glob("*.json"))
FROZEN = pathlib.Path(__file__).parent / "fixtures/frozen/readings.txt"


def read(shapes, names=None, **options):
    """Reads by path, of a model given as path to shape."""
    leaves = [
        Leaf(path, shape, jnp.float32, (names or {}).get(path))
        for path, shape in shapes.items()
    ]
    return dict(zip(shapes, read_leaves(leaves, **options), strict=True))


def letters(read):
    """Label and axes of one reading: "muon bio" is (batch, in, out)."""
    if read.doubt:
        return "doubt"
    if read.label == "adamw":
        return "adamw"
    roles = {axis: "b" for axis in read.axes.batch}
    roles |= {axis: "i" for axis in read.axes.reduction}
    roles |= {axis: "o" for axis in read.axes.output}
    return "muon " + "".join(roles[axis] for axis in sorted(roles))


@pytest.mark.parametrize("with_names", [True, False], ids=["names", "no names"])
@pytest.mark.parametrize("file", FIXTURES, ids=lambda file: file.stem)
def test_models(file, with_names):
    counts, kinds = reading.score(json.loads(file.read_text())["params"], with_names)
    assert not counts[reading.WRONG], kinds
    assert not counts[reading.REFUSED], kinds


def test_no_reading_changes_unseen():
    """Label and axes of every leaf are those of a file, which a diff shows.

    `python -m tests.test_reading` writes it.
    """
    assert FROZEN.read_text().splitlines() == readings()


def readings():
    """One line per leaf of all models: without axis names, and with them."""
    lines = []
    for file in FIXTURES:
        params = json.loads(file.read_text())["params"]
        shapes = {param["path"]: tuple(param["shape"]) for param in params}
        names = {p["path"]: tuple(p["names"]) for p in params if p.get("names")}
        plain, named = read(shapes), read(shapes, names)
        lines.append(file.stem)
        lines += [
            f"  {path}: {letters(plain[path])}"
            + (f", by names {letters(named[path])}" if names else "")
            for path in shapes
        ]
    return lines


def test_the_benchmark_says_what_is_wrong(tmp_path, capsys):
    wrong = {"path": "wte/embedding", "shape": [9, 4], "dtype": "float32"}
    wrong |= {"expect": {"label": "muon", "batch": [], "in": [0], "out": [1]}}
    (tmp_path / "toy.json").write_text(json.dumps({"params": [wrong]}))
    assert reading.main([str(tmp_path), "--no-names"]) == 1
    shown = capsys.readouterr().out
    assert "wte/embedding" in shown
    assert "TOTAL of 1 models: 1 leaves, 0 right" in shown


NORM = {"norm/scale": (64,)}
# What is asked, what stands around it, the answer.
CLASSES = {
    "values narrower than queries": (
        ("attn/query/kernel", (64, 4, 24)),
        {"attn/out/kernel": (4, 16, 64)},
        "muon ioo",
    ),
    "their output": (
        ("attn/out/kernel", (4, 16, 64)),
        {"attn/query/kernel": (64, 4, 24)},
        "muon iio",
    ),
    "the second factor of a query": (
        ("attn/wq_b/kernel", (32, 4, 24)),
        {"attn/q_norm/scale": (32,), "attn/out/kernel": (4, 16, 64), **NORM},
        "muon ioo",
    ),
    "layers on axis 1": (
        ("layers/mlp/wi/kernel", (64, 6, 256)),
        {"layers/norm/scale": (64, 6), "layers/mlp/wo/kernel": (256, 6, 64), **NORM},
        "muon ibo",
    ),
    "one layer on axis 1": (
        ("layers/mlp/wi/kernel", (64, 1, 256)),
        {"layers/norm/scale": (64, 1), "layers/mlp/wo/kernel": (256, 1, 64), **NORM},
        "muon ibo",
    ),
    "layers beside a module of norms": (
        ("attn/wq", (6, 64, 48)),
        {
            "attn/wo": (6, 48, 64),
            "norms/attn_norm": (6, 64),
            "norms/mlp_norm": (6, 64),
            "embed": (1000, 64),
            "final_norm": (64,),
        },
        "muon bio",
    ),
    "a single key head": (
        ("attn/key/kernel", (64, 1, 16)),
        {"attn/query/kernel": (64, 4, 16), "attn/out/kernel": (4, 16, 64), **NORM},
        "muon ioo",
    ),
    "a convolution in a list": (
        ("conv_layers/3/kernel", (3, 3, 64, 64)),
        {"bn_layers/3/scale": (64,)},
        "muon iiio",
    ),
    "a convolution by its window": (
        ("neck/2/kernel", (3, 3, 64, 64)),
        NORM,
        "muon iiio",
    ),
    "heads in front": (
        ("attn/q_einsum/w", (4, 64, 16)),
        NORM,
        "muon oio",
    ),
    "keys and values in one": (
        ("attn/kv_einsum/w", (2, 1, 64, 16)),
        {"attn/q_einsum/w": (4, 64, 16), **NORM},
        "muon boio",
    ),
    "the output of such heads": (
        ("attn/attn_vec_einsum/w", (4, 16, 64)),
        NORM,
        "muon iio",
    ),
    "(out, in) by the bias": (
        ("mlp/c_fc/kernel", (256, 64)),
        {"mlp/c_fc/bias": (256,)},
        "muon oi",
    ),
    "a square kernel as those around it": (
        ("mlp/square/weight", (64, 64)),
        {"mlp/up/weight": (256, 64), "mlp/up/bias": (256,)},
        "muon oi",
    ),
    "equinox's convolution": (
        ("layers/0/weight", (8, 4, 3, 3)),
        {"layers/0/bias": (8, 1, 1)},
        "muon oiii",
    ),
    "paths that end in an index": (
        ("blocks/stacked/ln_1/weight/0", (12, 64)),
        {"blocks/stacked/mlp/weight/0": (12, 64, 256)},
        "adamw",
    ),
    "stacked sinks": (
        ("layers/attn/sinks", (6, 8)),
        {"layers/norm/scale": (6, 64), "layers/mlp/kernel": (6, 64, 256)},
        "adamw",
    ),
    "A_log of one layer": (("mixer/A_log", (128, 16)), NORM, "adamw"),
    "a head among layers of its own": (
        ("classifier/layers/6/kernel", (64, 10)),
        {"classifier/layers/0/kernel": (128, 64)},
        "adamw",
    ),
    "a hidden layer of a head": (
        ("classifier/layers/0/kernel", (128, 64)),
        {"classifier/layers/6/kernel": (64, 10)},
        "muon io",
    ),
    "the projection before a tied table": (
        ("lm_head/dense/kernel", (64, 64)),
        {"lm_head/layer_norm/scale": (64,), "lm_head/dense/bias": (64,)},
        "muon io",
    ),
    "a head at the top": (
        ("fc/kernel", (64, 10)),
        {"blocks/0/kernel": (64, 64), **NORM},
        "adamw",
    ),
    "a head by the rows of the table": (
        ("ff_out/kernel", (64, 1000)),
        {"wte/embedding": (1000, 64), "blocks/0/ff_out/kernel": (256, 64)},
        "adamw",
    ),
    "a value head": (("value/kernel", (64, 1)), {"value/bias": (1,)}, "adamw"),
    "the projection of a time embedding": (
        ("resnet/time_emb_proj/kernel", (64, 32)),
        {"resnet/time_emb_proj/bias": (32,)},
        "muon io",
    ),
    "LoRA of queries, whose outputs are heads": (
        ("0/q_einsum/w_lora_b", (4, 4, 16)),
        {"0/q_einsum/w_lora_a": (64, 4)},
        "muon ioo",
    ),
    "LoRA of out, whose inputs are heads": (
        ("0/o_proj/lora_A/weight/0", (4, 16, 3)),
        {"0/o_proj/lora_B/weight/0": (3, 64)},
        "muon iio",
    ),
    "LoRA of as many layers as its rank": (
        ("up/lora/lora_b", (4, 4, 16)),
        {"up/lora/lora_a": (4, 64, 4)},
        "muon bio",
    ),
    "LoRA (out, in)": (
        ("up/lora_A/weight", (2, 16)),
        {"up/lora_B/weight": (16, 2)},
        "muon oi",
    ),
    "LoRA in a module of its own": (
        ("0/q_einsum/lora/b", (4, 4, 16)),
        {"0/q_einsum/lora/a": (64, 4), "0/q_einsum/w": (4, 64, 16)},
        "muon ioo",
    ),
    "its first factor": (
        ("0/attn_vec_einsum/lora/a", (4, 16, 3)),
        {"0/attn_vec_einsum/lora/b": (3, 64)},
        "muon iio",
    ),
    "a factor of LoRA alone": (("up/lora_b", (4, 4, 16)), {}, "doubt"),
    "more matrices than either side": (("stem/w", (7, 4, 6)), {}, "doubt"),
    "no evidence in a tree with norms": (
        ("mixing/kernel", (4, 64, 96)),
        NORM,
        "doubt",
    ),
    "some (in, out), others (out, in)": (
        ("mlp/square/kernel", (64, 64)),
        {
            "mlp/up/kernel": (64, 256),
            "mlp/up/bias": (256,),
            "mlp/down/kernel": (64, 256),
            "mlp/down/bias": (64,),
        },
        "doubt",
    ),
    "a bare row": (("w", (1, 8)), {}, "adamw"),
    "heads beside norms of their width": (
        ("attn/q_proj/weight", (2, 3, 16, 64)),
        {
            "attn/q_norm/weight": (16,),
            "attn/o_proj/weight": (64, 6, 16),
            "embed/token_embeddings/weight": (512, 64),
            "norm/weight": (64,),
        },
        "muon oooi",
    ),
    "their output, to the first axis": (
        ("attn/o_proj/weight", (64, 6, 16)),
        {"attn/q_proj/weight": (6, 16, 64), **NORM},
        "muon oii",
    ),
    "an output under a longer name": (
        ("attn/attention_output/kernel", (6, 16, 64)),
        {"attn/query/kernel": (64, 6, 16), **NORM},
        "muon iio",
    ),
    "a projection of the query's shape beside it": (
        ("rel_attn/encoding/kernel", (64, 6, 16)),
        {"rel_attn/query/kernel": (64, 6, 16), **NORM},
        "muon ioo",
    ),
    "haiku's heads": (
        ("attention/query_w", (64, 8, 12)),
        {"attention/gate_w": (64, 8, 12), "attention/gate_b": (8, 12), **NORM},
        "muon ioo",
    ),
    "their biases": (
        ("attention/gate_b", (8, 12)),
        {"attention/gate_w": (64, 8, 12), **NORM},
        "adamw",
    ),
    "a bias of heads": (("attn/bq", (4, 16)), {"attn/wq": (64, 4, 16)}, "adamw"),
    "a second factor is no bias": (
        ("attn/q_b", (8, 64)),
        {"attn/q_w": (64, 64), "attn/q_a": (64, 8), **NORM},
        "muon io",
    ),
    "PyTorch's fused queries": (
        ("self_attn/in_proj_weight", (192, 64)),
        {"self_attn/in_proj_bias": (192,)},
        "muon oi",
    ),
    "a table whose name ends in w": (
        ("attn/rel_pos_w", (15, 16)),
        {"attn/rel_pos_h": (15, 16), "attn/proj/kernel": (64, 64), **NORM},
        "adamw",
    ),
    "a transposed convolution by its bias": (
        ("dec_2/w", (4, 4, 64, 128)),
        {"dec_2/b": (64,)},
        "muon iioi",
    ),
    "a bias that no reading fits": (
        ("conv/kernel", (3, 3, 64, 128)),
        {"conv/bias": (32,)},
        "doubt",
    ),
    "the first layer of an MLP by its number": (
        ("mlp/linear1_0/weight", (64, 256)),
        {"mlp/linear2/weight": (256, 64), **NORM},
        "muon io",
    ),
    "the second, (out, in)": (
        ("mlp/w2/weight", (64, 256)),
        {"mlp/w1/weight": (256, 64), **NORM},
        "muon oi",
    ),
    "a tied embedding": (("embed_linear/w", (256, 64)), NORM, "adamw"),
    "another": (("embedding_linear/w", (256, 64)), NORM, "adamw"),
    "a head called class_embed": (
        ("class_embed/kernel", (64, 92)),
        {"class_embed/bias": (92,), **NORM},
        "adamw",
    ),
    "frozen masks": (("coupling_masks-FREEZE_ME", (4, 48, 48)), {}, "adamw"),
    "positions of each layer": (
        ("couplings/posemb", (4, 1, 16, 96)),
        {"couplings/norm/scale": (4, 96), "couplings/dense/kernel": (4, 96, 48)},
        "adamw",
    ),
    "encodings of segments": (("xlnet/segment_encoding", (2, 6, 16)), NORM, "adamw"),
    "the output of a state-space layer": (
        ("seq/C1", (96, 16, 2)),
        {"seq/D": (96,), **NORM},
        "adamw",
    ),
}


@pytest.mark.parametrize("case", CLASSES.values(), ids=CLASSES)
def test_classes(case):
    (path, shape), around, answer = case
    assert letters(read({path: shape, **around})[path]) == answer


def test_a_doubt_shows_the_readings_and_what_to_write():
    one = read({"a/proj/kernel": (6, 2, 4)})["a/proj/kernel"]
    assert one.axes is None
    for words in ("'a/proj/kernel'", "(6, 2, 4)", "1 x (6, 8)", "6 x (2, 4)"):
        assert words in one.doubt
    assert "{'a/proj/kernel': MuonDimensionNumbers(0, (1, 2))}" in one.doubt


def test_the_order_of_leaves_changes_nothing():
    for file in FIXTURES[:6]:
        params = json.loads(file.read_text())["params"]
        leaves = [Leaf(p["path"], tuple(p["shape"]), p["dtype"]) for p in params]
        forward, backward = read_leaves(leaves), read_leaves(leaves[::-1])[::-1]
        assert [letters(r) for r in forward] == [letters(r) for r in backward]


def test_out_in_of_the_user():
    shapes = {"mlp/weight": (8, 4)}
    assert letters(read(shapes)["mlp/weight"]) == "doubt"
    assert letters(read(shapes, out_in=False)["mlp/weight"]) == "muon io"
    assert letters(read(shapes, out_in=True)["mlp/weight"]) == "muon oi"
    by_path = read(shapes, out_in=lambda path: path.startswith("mlp"))
    assert letters(by_path["mlp/weight"]) == "muon oi"


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
]


@given(st.sampled_from(NAMED), st.randoms(use_true_random=False))
@settings(max_examples=40, deadline=None)
def test_axes_permuted_with_their_names_change_nothing(case, random):
    path, names, answer = case
    sizes = (64, 3, 8, 16)[: len(names)]
    order = random.sample(range(len(names)), len(names))
    one = read(
        {path: tuple(sizes[i] for i in order)}, {path: tuple(names[i] for i in order)}
    )
    assert letters(one[path]) == "muon " + "".join(answer[i] for i in order)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("kv_head", "heads"),
        ("q_heads_per_group", "heads"),
        ("HeadSize", "heads"),
        ("scanned_blocks", "batch"),
        ("local_layers", "batch"),
        ("expert_only", "batch"),
        ("layers_outside_pipeline", "batch"),
        ("expert_mlp", "hidden"),
        ("kv_lora", "latent"),
        ("embed_no_exp_moe", "stream"),
        ("vocab_size", "vocab"),
        ("relpos_buckets", "position"),
        ("d_model", None),
        ("fsdp", None),
    ],
)
def test_kinds_by_the_words_of_a_name(name, kind):
    assert axis_names.kind_of(name, axis_names.table_with(None)) == kind


@pytest.mark.parametrize(
    ("annotation", "answer"),
    [("io", "muon io"), (".oi", "muon boi"), ("ioo", "muon ioo"), (".i", "adamw")],
)
def test_annotations_of_simply(annotation, answer):
    """One letter an axis: in, out, or a dot for a batch; a table has no outputs."""
    shapes = {"block/mix/w": (4, 8, 16)[: len(annotation)]}
    names = {"block/mix/w": tuple(annotation)}
    one = read(shapes, names, strict_names=True)["block/mix/w"]
    assert letters(one) == answer


def test_unknown_names_are_listed_together_with_what_to_write():
    shapes = {"a/kernel": (4, 8), "b/kernel": (4, 8)}
    names = {"a/kernel": ("d_model", "mid"), "b/kernel": ("n_mels", "mlp")}
    line = r"table=\{'d_model': 'stream', 'mid': 'hidden', 'n_mels': 'hidden'\}"
    with pytest.raises(ValueError, match=line):
        read(shapes, names, strict_names=True)


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
    found = read({path: (64, 64), beside: (64, 64), **NORM})[path]
    assert found.role == role
    assert ("attention" in found.reason) == (role == "out")


def test_names_of_a_mesh_say_nothing():
    shapes = {"mlp/up/kernel": (4, 8)}
    assert letters(
        read(shapes, {"mlp/up/kernel": ("fsdp", "tp")})["mlp/up/kernel"]
    ) == ("muon io")


def test_a_table_of_the_user():
    shapes, names = {"mix/wo/kernel": (4, 8)}, {"mix/wo/kernel": ("depth", "swirl")}
    table = {"depth": "stream", "swirl": "hidden"}
    assert letters(read(shapes, names)["mix/wo/kernel"]) == "muon io"
    by_table = read(shapes, names, table=table, strict_names=True)
    assert letters(by_table["mix/wo/kernel"]) == "muon oi"
    with pytest.raises(ValueError, match=r"'depth'.*'mix/wo/kernel'.*'swirl'"):
        read(shapes, names, strict_names=True)
    with pytest.raises(ValueError, match=r"table\['depth'\]='wide'; expected one"):
        read(shapes, names, table={"depth": "wide"})


def test_names_of_another_rank_are_a_doubt():
    one = read({"q/kernel": (4, 2, 8)}, {"q/kernel": ("embed", "kv")})["q/kernel"]
    assert "(4, 2, 8)" in one.doubt
    assert "('embed', 'kv')" in one.doubt


def test_names_against_the_bias_are_a_doubt():
    shapes = {"mlp/wi/kernel": (4, 8), "mlp/wi/bias": (4,)}
    one = read(shapes, {"mlp/wi/kernel": ("embed", "mlp")})["mlp/wi/kernel"]
    assert "embed, mlp" in one.doubt
    assert "'mlp/wi/bias'" in one.doubt


def test_names_of_linen_boxes():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            init = nn.initializers.lecun_normal()
            logical = nn.with_logical_partitioning(init, ("embed", "mlp"))
            x = nn.Dense(8, kernel_init=logical)(x)
            return nn.Dense(
                4, kernel_init=nn.with_partitioning(init, ("mlp", None)), name="wo"
            )(x)

    boxed = Model().init(jax.random.key(0), jnp.zeros((1, 4)))["params"]
    expected = {"Dense_0/kernel": ("embed", "mlp"), "wo/kernel": ("mlp", None)}
    assert axis_names.of_tree(boxed) == expected
    assert axis_names.of_tree(nn.meta.unbox(boxed)) == {}
    found = {path: one.names for path, one in jm.read(boxed).items()}
    assert {path: names for path, names in found.items() if names} == expected


def test_names_of_nnx_variables():
    with nnx.use_eager_sharding(False):
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("embed", "mlp"))
        model = nnx.Linear(4, 8, kernel_init=init, rngs=nnx.Rngs(0))
    assert axis_names.of_tree(nnx.state(model, nnx.Param)) == {
        "kernel": ("embed", "mlp")
    }


def test_names_of_haliax_arrays():
    """Any leaf that holds an array and `axes` with names."""

    class Axis:
        def __init__(self, name):
            self.name = name

    @jax.tree_util.register_pytree_with_keys_class
    class NamedArray:
        def __init__(self, array, axes):
            self.array, self.axes = array, axes

        def tree_flatten_with_keys(self):
            return [(jax.tree_util.SequenceKey(0), self.array)], self.axes

        @classmethod
        def tree_unflatten(cls, axes, children):
            return cls(children[0], axes)

    tree = {
        "up": {"weight": NamedArray(jnp.zeros((8, 4)), (Axis("mlp"), Axis("embed")))}
    }
    assert axis_names.of_tree(tree) == {"up/weight/0": ("mlp", "embed")}
    assert letters(jm.read(tree)["up/weight/0"]) == "muon oi"


if __name__ == "__main__":
    FROZEN.write_text("".join(f"{line}\n" for line in readings()))
