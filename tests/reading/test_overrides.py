"""What users say of matrices: dimension numbers, optax's trees, doubts and warnings."""

import functools
import operator
import re
import warnings

import jax
import jax.numpy as jnp
import optax
import pytest
from optax.contrib import MuonDimensionNumbers as Numbers

import jax_muon as jm
from jax_muon.axes import MatrixAxes
from jax_muon.paths import leaves_with_paths
from tests.programs.parts import floats


def model():
    """Two blocks that are read well, with a table, a head and norms."""

    def block():
        return {
            "norm": {"scale": floats(8)},
            "attn": {"query": {"kernel": floats(8, 2, 4)}, "bias": floats(8)},
            "mlp": {"up": {"kernel": floats(8, 32)}},
        }

    return {
        "wte": {"embedding": floats(50, 8)},
        "blocks": {"0": block(), "1": block()},
        "head": {"kernel": floats(8, 50)},
    }


def read(rules, tree=None, **settings):
    return jm.read(model() if tree is None else tree, rules=rules, **settings)


# --- patterns -------------------------------------------------------------------------

PER_HEAD = MatrixAxes((1,), (0,), (2,))


def test_the_first_numbers_and_the_first_label_that_match_count():
    """Both kinds of rules stand in one mapping, and do not hide each other."""
    found = read(
        {
            "blocks/*/query/kernel": Numbers(0, 2),
            "blocks/0": "slow",
            "query": Numbers((0, 1), 2),
            "blocks/*/up": None,
        }
    )
    for block, label in (("blocks/0", "slow"), ("blocks/1", "muon")):
        query = found[f"{block}/attn/query/kernel"]
        assert (query.label, query.axes) == (label, PER_HEAD)
        assert query.reason == "dimension numbers"
    assert found["blocks/0/mlp/up/kernel"].label == "slow"
    assert found["blocks/1/mlp/up/kernel"].label == "adamw"


def test_numbers_that_name_a_parameter_make_it_a_matrix():
    found = read({"head/kernel": Numbers(0, 1), "blocks": Numbers(0, -1)})
    assert found["head/kernel"].label == "muon"
    assert found["wte/embedding"].label == "adamw"
    assert found.axes("blocks/1/mlp/up/kernel") == MatrixAxes((), (0,), (1,))
    assert found["blocks/1/norm/scale"].label == "adamw"  # a module is not named
    assert read({"blocks/*": Numbers(0, -1)})["blocks/1/norm/scale"].label == "adamw"


def test_the_whole_path_of_a_parameter_means_that_one_alone():
    tree = {"up": {"kernel": floats(8, 4)}, "0": {"up": {"kernel": floats(8, 4)}}}
    found = read({"up/kernel": "adamw"}, tree)
    assert found["up/kernel"].label == "adamw"
    assert found["0/up/kernel"].label == "muon"


SPEC = Numbers((0, 1), 2)


@pytest.mark.parametrize(
    "rules",
    [SPEC, {"a": SPEC}, {"a": {"u": SPEC, "v": SPEC}}, {"a/u": SPEC, "*": SPEC}],
    ids=["one", "prefix", "tree", "patterns"],
)
def test_numbers_as_one_as_tree_and_as_patterns(rules):
    found = read(rules, {"a": {"u": floats(2, 3, 4), "v": floats(2, 3, 4)}})
    assert {x.axes for x in found.values()} == {MatrixAxes((), (0, 1), (2,))}


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ({"attn/qeury": Numbers(0, 2)}, "'attn/qeury' matches no parameter.*attn/qu"),
        ({"blocks": {"2": Numbers(0, 1)}}, "'blocks/2', which no parameter has"),
        ({"blocks": {"0": 3}}, "'blocks/0': 3; expected a label"),
        ({"blocks": {"0": "slow"}}, "leave out parameter '.*'; expected a tree with"),
        (
            {"head": Numbers(0, 1)},
            "'head': .* all have the label 'adamw': head/kernel",
        ),
        (
            {"head": {"kernel": None}, "wte": Numbers(0, 1), "blocks": None},
            "'wte': .* all have the label 'adamw': wte/embedding",
        ),
        (
            {"head/kernel": Numbers(0, 1), "head": "adamw"},
            r"'head/kernel' of shape \(8, 50\) the label .adamw. and",
        ),
        ({"head/kernel": Numbers(None, 1)}, "no axis for the inputs.*at least one"),
        ({"head/kernel": Numbers(0, 0)}, "no axis twice"),
        ({"head/kernel": Numbers(0, -2)}, "no axis twice"),
        ({"head/kernel": Numbers(0, 2)}, "output_axis: axis 2 is out of bounds"),
    ],
)
def test_bad_rules(rules, words):
    with pytest.raises(ValueError, match=words):
        read(rules)


@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [((3,), float), ((), float), ((0, 4), float), ((2, 2), int), ((2, 2), complex)],
)
def test_what_cannot_be_a_matrix(sizes, dtype):
    leaf = jnp.zeros(sizes, dtype)
    words = (
        f"'a/w' of shape {sizes}: with dtype {leaf.dtype} it cannot be read as "
        "matrices, which have at least two axes, none of them empty, and real "
        "floating point"
    )
    with pytest.raises(ValueError, match=re.escape(words)):
        read("muon", {"a": {"w": leaf}})


def test_a_path_that_was_not_read():
    """Errors like those of a dictionary, with the paths that there are."""
    matrices = read(None, {"up": floats(4, 8)})
    assert "down" not in matrices
    assert matrices.get("down") is None
    with pytest.raises(ValueError, match=r"^parameter 'down' was not read.*are up;"):
        matrices["down"]


def test_rules_where_everything_is_hidden():
    """As where optax.multi_transform gives a recipe nothing at all."""
    assert not read({"up": Numbers(0, 1), "stem": None}, {"up": optax.MaskedNode()})


# --- trees of optax.contrib.muon ------------------------------------------------------


def optax_tree(params):
    """As its users write it: numbers for matrices, None for AdamW."""

    def numbers(key_path, x):
        path = jax.tree_util.keystr(key_path, simple=True, separator="/")
        if "query" in path:
            return Numbers(0, (1, 2))
        return Numbers(0, 1) if path.endswith("up/kernel") else None

    return jax.tree_util.tree_map_with_path(numbers, params)


PREFIX = {"blocks": None, "head": {"kernel": Numbers()}, "wte": {"embedding": None}}


@pytest.mark.parametrize(
    "numbers",
    [
        optax_tree(model()),
        PREFIX,
        PREFIX | {"wte": {"embedding": Numbers(1, 0)}},
        {"blocks": None, "head/kernel": Numbers(), "wte/embedding": None},
    ],
    ids=["tree", "prefix", "table", "flat"],
)
def test_labels_and_axes_are_those_of_optax(numbers):
    """By its own labels: state of Muon exists where a label says so."""
    params = model()
    if "head/kernel" in numbers:  # a flat mapping, which is ours alone
        theirs = optax.contrib.muon(0.1, muon_weight_dimension_numbers=PREFIX)
    else:
        theirs = optax.contrib.muon(0.1, muon_weight_dimension_numbers=numbers)
    state = jax.eval_shape(theirs.init, params)
    mu = state.inner_states["muon"].inner_state[0].mu
    matrices = {path for path, _ in leaves_with_paths(mu)}
    found = read(numbers)
    assert {p for p, x in found.items() if x.label == "muon"} == matrices
    expected = {
        "blocks/0/attn/query/kernel": MatrixAxes((), (0,), (1, 2)),
        "blocks/0/mlp/up/kernel": MatrixAxes((), (0,), (1,)),
        "head/kernel": MatrixAxes((), (0,), (1,)),
        "wte/embedding": MatrixAxes((), (1,), (0,)),
    }
    checked = {path: found.axes(path) for path in expected if path in matrices}
    assert checked and checked.items() <= expected.items()


# --- parameters in doubt --------------------------------------------------------------


def doubtful():
    """Two parameters in doubt among others."""
    return {
        "norm": {"scale": floats(64)},
        "proj": {"kernel": floats(64, 3, 8)},
        "mixing": {"kernel": floats(4, 64, 96)},
        "up": {"kernel": floats(64, 256)},
    }


def test_one_error_lists_all_doubts_with_what_to_write():
    with pytest.raises(ValueError, match=r"^2 of 4 parameters") as error:
        jm.read(doubtful())
    first, *lines = str(error.value).splitlines()
    assert "jax_muon.read(params, loss_fn, batch)" in first
    assert "MuonDimensionNumbers(1, 2) for 64 x (3, 8)" in lines[1]
    with pytest.raises(ValueError, match=r"^2 of 4 parameters"):
        jm.nanochat().init(doubtful())
    found = read(first_rules(lines), doubtful())
    assert found["proj/kernel"].sizes == (1, 64, 24)
    assert found["mixing/kernel"].sizes == (4, 64, 96)


def first_rules(lines):
    """The rules that an error suggests first, one for each of its lines."""
    written = (re.search(r"expected rules=(\{.*?\})", line)[1] for line in lines)
    rules = (eval(text, {"MuonDimensionNumbers": Numbers}) for text in written)
    return functools.reduce(operator.or_, rules)


# Leaves in doubt among others, and the right answer: the first one that is suggested.
SUGGESTIONS = {
    "an axis that all leaves around share is one of layers": (
        {"dec/q": (6, 64, 4, 16), "dec/v": (6, 64, 4, 16), "dec/alpha": (6, 64)},
        {"dec/q": (6, 64, 64), "dec/v": (6, 64, 64)},
    ),
    "also on axis 1": (
        {"dec/a": (64, 6, 4, 16), "dec/c": (64, 6, 8), "dec/alpha": (64, 6)},
        {"dec/a": (6, 64, 64), "dec/c": (6, 64, 8)},
    ),
    "few matrices of large sides": (
        {"up": (4, 64, 96), "n/scale": (9,)},
        {"up": (4, 64, 96)},
    ),
    "an output projection": (
        {"attn/o": (16, 8, 64), "n/scale": (9,)},
        {"attn/o": (1, 128, 64)},
    ),
    "a weight of PyTorch's convolutions": (
        {"stem/weight": (64, 32, 3, 5)},
        {"stem/weight": (1, 480, 64)},
    ),
    "a stack of vectors": (
        {"dec/up": (6, 64, 96), "dec/down": (6, 96, 64), "dec/before/v": (6, 64)},
        {"dec/before/v": None},
    ),
}


@pytest.mark.parametrize("name", SUGGESTIONS)
def test_the_first_suggestion(name):
    sizes, expected = SUGGESTIONS[name]
    tree = {path: floats(*own) for path, own in sizes.items()}
    with pytest.raises(ValueError, match="by names") as error:
        jm.read(tree)
    found = read(first_rules(str(error.value).splitlines()[1:]), tree)
    matrices = {path: found[path].label == "muon" for path in expected}
    got = {
        path: found[path].sizes if is_one else None for path, is_one in matrices.items()
    }
    assert got == expected


def test_a_kind_of_parameters_has_one_line_and_one_rule():
    def blocks(count):
        own = {"proj": {"kernel": floats(64, 3, 8)}, "norm": {"scale": floats(64)}}
        return {f"block_{i}": own for i in range(count)}

    with pytest.raises(ValueError, match=r"(?s)^12 of 24 .* 11 more") as error:
        jm.read(blocks(12))
    (line,) = str(error.value).splitlines()[1:]
    assert len(read(first_rules([line]), blocks(12))) == 24
    # The pattern would also match a parameter of another shape.
    other = {"block_13": {"proj": {"kernel": floats(64, 4, 8)}}}
    with pytest.raises(ValueError, match="'block_0/proj/kernel': Muon"):
        jm.read(blocks(12) | other)


def test_the_table_says_that_names_can_be_wrong():
    tree = {"up": jnp.ones((4, 8))}
    assert "Names can be wrong" in str(jm.read(tree)).splitlines()[-1]
    found = jm.read(
        tree, lambda params, x: x @ params["up"] @ jnp.ones((8, 2)), jnp.ones((3, 4))
    )
    assert "Names" not in str(found)


def test_without_strict_doubts_are_warnings_and_go_to_adamw():
    params = jax.tree.map(lambda x: jnp.ones(x.shape), doubtful())
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        matrices = jm.read(params, strict=False)
    (warning,) = seen
    assert warning.filename == __file__
    text = str(warning.message)
    assert "'proj/kernel'" in text
    assert "'mixing/kernel'" in text
    assert text.endswith("They get the label 'adamw'")
    state = jax.eval_shape(jm.nanochat(matrices=matrices).init, params)
    adam = {p for p, _ in leaves_with_paths(state.inner_states["adamw"])}
    assert any(path.endswith("mu/proj/kernel") for path in adam)


def test_layers_that_are_read_differently_are_in_doubt():
    """The second block has a bias of its inputs' size, so it would be (out, in)."""
    params = {
        "norm": {"scale": floats(16)},
        "0": {"up": {"kernel": floats(16, 64), "bias": floats(64)}},
        "1": {"up": {"kernel": floats(16, 64), "bias": floats(16)}},
    }
    with pytest.raises(ValueError, match=r"^2 of 5(?s:.)*'0/up/kernel' as 'muon'"):
        jm.read(params)
    found = jm.read(params, rules={"up": "adamw"})
    assert {one.label for one in found.values()} == {"adamw"}


def test_dots_in_a_key_separate_modules_as_slashes_do():
    """As in PyTorch's checkpoints, for everything that takes patterns."""
    kinds = {"self_attn.qkv_proj": (192, 64), "mlp.up_proj": (256, 64)}
    params = {"lm_head.weight": jnp.ones((100, 64)), "model.norm.weight": jnp.ones(64)}
    params |= {
        f"model.layers.{i}.{name}.weight": jnp.ones(sizes)
        for i in range(2)
        for name, sizes in kinds.items()
    }
    qkv, up = (f"model.layers.0.{name}.weight" for name in kinds)
    rules = {"lm_head": "muon", "layers/*/mlp/up_proj": "slow", qkv: Numbers(1, 0)}
    found = read(rules, params, splits={"qkv_proj": jm.Split(("q", "k", "v"), 0)})
    assert found["lm_head.weight"].label == "muon"
    assert found[up].label == "slow"
    assert found[qkv].reason == "dimension numbers"
    found = read(None, params, joins={"layers.{i}.mlp.up_proj": 2})
    (join,) = found.joins
    assert join.paths == (up, up.replace("0", "1"))
    tx = jm.scale_by_path({"layers.1": 0.0})
    scaled, _ = tx.update(params, tx.init(params))
    assert {path for path, x in scaled.items() if not x.any()} == {
        path for path in params if ".layers.1." in path
    }


def test_the_path_of_a_parameter_is_no_pattern():
    """As names of a flat tree, where [0] would be one character."""
    tree = {"layers[0].norm": floats(4, 8), "layers[1].norm": floats(4, 8)}
    numbers = Numbers(0, 1)
    rules = {"layers[0].norm": numbers, "layers[1].norm": "adamw"}
    found = read(rules, tree)
    assert [one.label for one in found.values()] == ["muon", "adamw"]
    assert jm.read(tree, rules={"layers[0].norm": numbers})["layers[0].norm"].axes


def test_the_side_of_the_outputs():
    """`out_in` says it where nothing else does; against a bias it is refused."""
    bare = {"up": {"weight": floats(4, 8)}}
    assert "assumed" in jm.read(bare)["up/weight"].reason
    assert (
        "assumed" not in jm.read({"up": {"kernel": floats(4, 8)}})["up/kernel"].reason
    )
    io, oi = MatrixAxes((), (0,), (1,)), MatrixAxes((), (1,), (0,))
    assert jm.read(bare, out_in=False).axes("up/weight") == io
    assert jm.read(bare, out_in=True).axes("up/weight") == oi
    tree = {"up": {"weight": floats(4, 8), "bias": floats(8)}}
    assert jm.read(tree, out_in=False).axes("up/weight") == io
    words = r"out_in=True, which makes \(4,\) its outputs.*'up/bias' .* shape \(8,\)"
    with pytest.raises(ValueError, match=words):
        jm.read(tree, out_in=True)
    with pytest.raises(ValueError, match=r"out_in='in'; expected True or False"):
        jm.read(tree, out_in="in")


def test_the_reason_of_a_vector_that_rules_freeze_is_the_rule():
    params = {"up": {"lora_a": jnp.ones((8, 2)), "norm": {"scale": jnp.ones(8)}}}
    text = str(jm.read(params, rules={"lora_a": "muon", "*": "frozen"}))
    assert "cannot be read" not in text
    assert text.splitlines()[-2].endswith("frozen   by your rules")
