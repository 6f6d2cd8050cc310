"""What users say of matrices: labels, dimension numbers, optax's trees, and errors."""

import re
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from optax.contrib import MuonDimensionNumbers as Numbers

import jax_muon as jm
from jax_muon.base.trees import leaves_with_paths, numberless
from jax_muon.matrices.matrices import MatrixAxes
from tests.programs.parts import floats
from tests.recipes import RECIPES

pytestmark = pytest.mark.usefixtures("as_users_write")


def model():
    """Two blocks that are read well, with a table, a head and norms."""
    block = {
        "norm": {"scale": floats(8)},
        "attn": {"query": {"kernel": floats(8, 2, 4)}, "bias": floats(8)},
        "mlp": {"up": {"kernel": floats(8, 32)}},
    }
    return {
        "wte": {"embedding": floats(50, 8)},
        "blocks": {"0": block, "1": block},
        "head": {"kernel": floats(8, 50)},
    }


def loss(params, tokens):
    """What `model` computes; norms, biases and tables are no matrices in it."""
    x = params["wte"]["embedding"][tokens]
    for block in params["blocks"].values():
        x = block["norm"]["scale"] * x
        query = jnp.einsum("td,dhk->thk", x, block["attn"]["query"]["kernel"])
        x = query.reshape(x.shape) + block["attn"]["bias"]
        x = jax.nn.relu(x @ block["mlp"]["up"]["kernel"])[:, : x.shape[1]]
    return jnp.sum(x @ params["head"]["kernel"])


def read(rules):
    """`model`, read by its loss and by rules."""
    return jm.find_matrices(model(), loss, jnp.arange(3), rules=rules)


def labels(tree, rules):
    """The labels that rules alone give."""
    return {path: x.label for path, x in jm.find_matrices(tree, rules=rules).items()}


# Some are parts of others, and a * would match several.
PATHS = [
    f"{start}{i}{end}"
    for start in ("a/", "a/b/", "w", "wx")
    for i in range(3)
    for end in ("", "/k", "/b/k", "/0")
]

# --- patterns -------------------------------------------------------------------------

PER_HEAD = MatrixAxes((1,), (0,), (2,))


def test_the_first_numbers_and_the_first_label_that_match_count():
    """Both kinds of rules stand in one mapping, and do not hide each other."""
    found = read(
        {
            "blocks/*/query/kernel": Numbers(0, 2),
            "blocks/0": "slow",
            "blocks": Numbers(0, 1),
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


LABELS = [  # paths of matrices, rules, labels
    # The whole path of a parameter means that one alone, and is no pattern.
    ("up/w 0/up/w", {"up/w": "adamw", "*": "muon"}, "adamw muon"),
    ("l[0].w l[1].w", {"l[0].w": Numbers(0, 1), "l[1].w": "adamw"}, "muon adamw"),
    # "muon" passes over vectors, unless their whole path is given.
    ("norm/scale up", {"*": "muon"}, "adamw muon"),
    ("scale", {"scale": "muon"}, "muon"),
    ("up/bias", {"*": "frozen"}, "frozen"),
]


@pytest.mark.parametrize(("paths", "rules", "expected"), LABELS)
def test_labels(paths, rules, expected):
    found = labels(dict.fromkeys(paths.split(), floats(4, 8)), rules)
    assert found == dict(zip(paths.split(), expected.split(), strict=True))


TABLES = {"head": {"kernel": None}, "wte": Numbers(0, 1), "blocks": None}
BAD = [
    ({"attn/qeury": Numbers(0, 2)}, "'attn/qeury' matches no parameter.*attn/query"),
    ({"blocks": {"2": Numbers(0, 1)}}, "'blocks/2' matches no parameter"),
    ({"blocks": {"0": 3}}, "'blocks/0': 3; expected a label"),
    ({"head": Numbers(0, 1)}, "'head': .* all have the label 'adamw': head/kernel"),
    (TABLES, "'wte': .* all have the label 'adamw': wte/embedding"),
    ({"head/kernel": Numbers(0, 1), "head": "adamw"}, r"\(8, 50\) the label .adamw. a"),
    ({"head/kernel": Numbers(None, 1)}, "no axis for the inputs.*at least one"),
    ({"head/kernel": Numbers(0, -2)}, "no axis twice"),
    ({"head/kernel": Numbers(0, 2)}, "output_axis: axis 2 is out of bounds"),
    ({"*": "muon", "head": "adamw"}, "'head': adamw never applies, since .* '\\*'"),
    ({"*": "muon", "wte": None}, "'wte': None never applies.*wte/embedding as well"),
    ({"attn": Numbers(0, 2), "blocks/*/query": Numbers(0, 1)}, "never applies.*'attn'"),
    ({"wte": "adamw or muon"}, "'wte': 'adamw or muon'; expected one of the two"),
    ({"norm/scale": "muon"}, "'norm/scale': muon for .* or a pattern of mat"),
]


@pytest.mark.parametrize(("rules", "words"), BAD)
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
        jm.find_matrices({"a": {"w": leaf}}, rules={"a/w": "muon"})
    assert labels({"a": {"w": leaf}}, None) == {"a/w": "adamw"}
    table = str(jm.find_matrices({"a": {"w": leaf}}, rules="frozen"))
    assert re.search(r"- +frozen +by your rules$", table)


def test_a_path_that_was_not_read():
    """Errors like those of a dictionary, with the paths that there are."""
    matrices = jm.find_matrices({"up": floats(4, 8)}, rules={"up": "muon"})
    assert "down" not in matrices
    assert matrices.get("down") is None
    with pytest.raises(KeyError, match=r"parameter 'down' was not read, only up;"):
        matrices["down"]


def test_rules_where_everything_is_hidden():
    """As where optax.multi_transform gives a recipe nothing at all."""
    rules = {"up": Numbers(0, 1), "stem": None}
    assert not jm.find_matrices({"up": optax.MaskedNode()}, rules=rules)


# --- trees of optax.contrib.muon ------------------------------------------------------


TABLE = {"embedding": Numbers(1, 0)}
PREFIX = {"blocks": None, "head": {"kernel": Numbers()}, "wte": {"embedding": None}}


@pytest.mark.parametrize("numbers", [PREFIX, PREFIX | {"wte": TABLE}], ids=str)
def test_labels_and_axes_are_those_of_optax(numbers):
    """By its own labels: state of Muon exists where a label says so."""
    theirs = optax.contrib.muon(0.1, muon_weight_dimension_numbers=numbers)
    state = jax.eval_shape(theirs.init, model())
    mu = state.inner_states["muon"].inner_state[0].mu
    matrices = {path for path, _ in leaves_with_paths(mu)}
    found = read(numbers)
    assert {p for p, x in found.items() if x.label == "muon"} == matrices
    assert found.axes("head/kernel") == MatrixAxes((), (0,), (1,))
    if "wte/embedding" in matrices:
        assert found.axes("wte/embedding") == MatrixAxes((), (1,), (0,))


def test_a_prefix_of_a_tree_means_what_is_below_it():
    """Layers by their numbers, which are numbers of other lists as well."""
    layers = [(floats(8, 8), floats(8))] * 3
    found = labels(layers, ["muon", None, ("frozen", None)])
    assert list(found.values()) == ["muon", "adamw"] + ["adamw"] * 2 + [
        "frozen",
        "adamw",
    ]


def test_a_tree_that_can_be_called():
    """An Equinox module with labels; None where parameters were filtered out."""
    model = eqx.nn.MLP(4, 3, 16, 2, key=jax.random.key(0))
    params = eqx.filter(model, eqx.is_inexact_array)
    matrix_labels = jax.tree.map(lambda x: "muon" if x.ndim == 2 else None, params)
    assert callable(matrix_labels)
    tx = jm.nanochat(0.02, adamw=jm.adamw(3e-3), matrices=matrix_labels)
    with pytest.warns(UserWarning, match=r"an equinox\.Module have weights"):
        table = jm.describe(tx, params)
    muon = [x.parameter.path for x in table.parameters if x.parameter.label == "muon"]
    assert muon == [f"layers/{i}/weight" for i in range(3)]


# --- without a loss -------------------------------------------------------------------


def undecided():
    """Kinds of parameters of which nothing says whether they are matrices."""
    block = {"up": {"kernel": floats(8, 32), "bias": floats(32)}, "scale": floats(4, 8)}
    return {
        "wte": floats(50, 8),
        "blocks": [block, block, {**block, "up": {"kernel": floats(8, 16)}}],
        "conv": {"kernel": floats(3, 3, 4, 8)},
    }


def choices(tree, rules=None):
    """The mapping in an error without a loss."""
    with pytest.raises(ValueError, match="nothing says whether") as error:
        jm.find_matrices(tree, rules=rules)
    return eval(re.search(r": (\{.*\})", str(error.value), re.DOTALL)[1])


def test_without_a_loss_one_error_lists_all_kinds():
    """The loss comes first, and a mapping second in which every choice is open."""
    with pytest.raises(ValueError, match=r"whether 5 of 10 parameters are") as error:
        RECIPES["nanochat"](matrices={}).init(undecided())
    first, *lines = str(error.value).splitlines()
    assert (
        "shows it, jax_muon.find_matrices(params, loss_fn, batch), or a rule" in first
    )
    assert lines[:4] == [
        "    'blocks/2/up/kernel': 'adamw or muon',  # (8, 16)",
        "    'conv/kernel': 'adamw or MuonDimensionNumbers(in, out)',  # (3, 3, 4, 8)",
        "    'wte': 'adamw or muon',  # (50, 8)",
        "    'blocks/*/up/kernel': 'adamw or muon',  # (8, 32), 2 of them",
    ]
    # Filled in, it decides everything; as it is, nothing (see BAD).
    rules = dict.fromkeys(choices(undecided()), "muon")
    rules |= {"wte": "adamw", "conv/kernel": Numbers((0, 1, 2), 3)}
    found = jm.find_matrices(undecided(), rules=rules)
    in_out = MatrixAxes((), (0,), (1,))
    kernels = {f"blocks/{i}/up/kernel": in_out for i in range(3)}
    kernels["conv/kernel"] = MatrixAxes((), (0, 1, 2), (3,))
    assert {k: x.axes for k, x in found.items() if x.label == "muon"} == kernels


@given(st.lists(st.sampled_from(PATHS), unique=True, min_size=1), st.data())
def test_every_line_of_the_mapping_is_about_its_own_kind(names, data):
    """Parameters that differ by more than numbers, or in shape, never share a label."""
    shapes = {name: data.draw(st.sampled_from([(2, 3), (2, 4)])) for name in names}
    tree = {name: floats(*shape) for name, shape in shapes.items()}
    lines = choices(tree)
    found = labels(tree, {pattern: f"label {i}" for i, pattern in enumerate(lines)})
    kinds = {}
    for name, label in found.items():
        kinds.setdefault(label, set()).add(numberless(name))
    assert all(len(kind) == 1 for kind in kinds.values())


def test_without_strict_doubts_are_warnings_and_go_to_adamw():
    params = {"proj": jnp.ones((64, 3, 8))}
    with pytest.warns(
        UserWarning, match="(?s)'proj'.*They get the label 'adamw'$"
    ) as seen:
        matrices = jm.find_matrices(params, strict=False)
    assert seen[0].filename == __file__ and matrices["proj"].label == "adamw"
    with pytest.warns(UserWarning, match="no parameter is a matrix"):
        jax.eval_shape(RECIPES["nanochat"](matrices=matrices).init, params)


def test_dots_in_a_key_separate_modules_as_slashes_do():
    """As in PyTorch's checkpoints, for everything that takes patterns."""
    up = [f"model.layers.{i}.mlp.up_proj.weight" for i in range(2)]
    qkv = "model.layers.0.self_attn.qkv_proj.weight"
    params = dict.fromkeys(up, floats(256, 64)) | {qkv: floats(192, 64)}
    rules = {"layers/0/mlp": "slow", qkv: Numbers(1, 0), "*": "muon"}
    splits = {"qkv_proj": jm.Split(("q", "k", "v"), 0)}
    found = jm.find_matrices(params, rules=rules, splits=splits)
    assert [x.label for x in found.values()] == ["slow", "muon", "muon"]
    assert found[qkv].reason == "dimension numbers"
    joins = {"layers.{i}.mlp.up_proj": 2}
    (join,) = jm.find_matrices(params, rules={"*": "muon"}, joins=joins).joins
    assert join.paths == (*up,)


def test_a_rule_of_one_array_whose_path_is_empty():
    assert jm.find_matrices(jnp.ones((4, 6)), rules="muon")[""].sizes == (1, 4, 6)
    assert jm.find_matrices(jnp.ones(3), rules="adamw")[""].label == "adamw"


def test_a_tree_of_labels_may_have_integers_as_keys():
    params = {0: {"w": floats(4, 8)}, 1: {"w": floats(4, 8)}}
    matrices = jm.find_matrices(params, rules={0: "muon", 1: "adamw"})
    assert {x.path: x.label for x in matrices.values()} == {
        "0/w": "muon",
        "1/w": "adamw",
    }


def test_dimension_numbers_leave_the_axis_of_a_scan():
    """Experts (layers, experts, in, out) are a batch of both, and a scan of layers."""

    def loss(params, x):
        def layer(x, w):
            return jnp.mean(jnp.einsum("bi,eio->ebo", x, w), axis=0), None

        return jnp.sum(jax.lax.scan(layer, x, params["up"])[0] ** 2)

    params = {"up": floats(3, 2, 8, 8)}
    rules = {"up": Numbers(-2, -1)}
    up = jm.find_matrices(params, loss, floats(5, 8), rules=rules)["up"]
    assert (up.axes.batch, up.scanned, up.scan) == ((0, 1), (0,), "lax.scan")


# --- what only a pattern makes a matrix -----------------------------------------------

STACKS = Numbers(1, 2)


@pytest.mark.parametrize(
    ("shapes", "rules", "listed"),
    [
        ({"up": (4, 16, 64), "ln1": (4, 16), "b": (4, 64)}, {}, ["b", "ln1"]),
        ({"l/mlp/up": (4, 16, 64), "l/ln": (4, 16), "out": (16, 4)}, {}, ["l/ln"]),
        ({"l/up": (4, 16, 64), "l/ln": (4, 16), "out": (16, 4)}, {}, ["l/ln"]),
        ({"up": (4, 16, 64), "ln1": (4, 16)}, {"ln1": "muon"}, None),
        ({"up": (4, 16, 64), "ln1": (4, 16)}, {"ln*": "muon"}, ["ln1"]),
    ],
)
def test_vectors_of_stacked_layers_need_a_rule(shapes, rules, listed):
    """(4, 16) beside (4, 16, 64): an error lists it, unless its path is given."""
    up = next(iter(shapes))
    params = {path: floats(*shape) for path, shape in shapes.items()}
    rules = {up: STACKS} | rules | {"*": "muon"}
    if listed is None:
        assert labels(params, rules)["ln1"] == "muon"
        return
    with pytest.raises(ValueError, match="may be vectors of stacked layers") as error:
        labels(params, rules)
    lines = [f"    {x!r}: 'adamw or muon',  # {shapes[x]}" for x in listed]
    assert [x for x in str(error.value).splitlines() if x.startswith("    ")] == lines


def test_one_row_or_column_is_a_vector_unless_its_path_is_given():
    params = {"cls": floats(1, 16), "column": floats(16, 1), "up": floats(16, 64)}
    assert [*labels(params, {"*": "muon"}).values()] == ["adamw", "adamw", "muon"]
    assert labels(params, {"cls": "muon", "*": "muon"})["cls"] == "muon"
    assert [*labels(params, Numbers(0, 1)).values()] == 3 * ["muon"]


@pytest.mark.parametrize(
    ("rules", "told"),
    [
        ({"*": "muon"}, "of mlp/up, positions. Positions, embeddings and heads"),
        ({"mlp": "muon", "*": "muon"}, "of positions. Positions"),
        ({"mlp": "muon", "positions": "adamw"}, None),
        ({"mlp/up": "muon", "positions": "muon"}, None),
    ],
)
def test_what_only_a_star_made_a_matrix_is_a_warning_at_init(rules, told, recwarn):
    params = {"mlp/up": jnp.ones((16, 64)), "positions": jnp.ones((8, 16))}
    warnings.simplefilter("always")
    RECIPES["moonlight"](matrices=rules).init(params)
    messages = [str(x.message) for x in recwarn]
    assert len(messages) == (told is not None)
    assert told is None or told in messages[0]


@pytest.mark.parametrize("rules", [{"*": "muon"}, {"weight": Numbers(1, 0)}])
def test_labels_of_an_equinox_module_are_a_warning_at_init(rules, recwarn):
    """Its weights are (out, in)."""
    params = {"up": eqx.nn.Linear(16, 64, use_bias=False, key=jax.random.key(0))}
    warnings.simplefilter("always")
    RECIPES["moonlight"](matrices=rules).init(params)
    told = ["MuonDimensionNumbers(1, 0)" in str(x.message) for x in recwarn]
    assert any(told) == ("*" in rules)
