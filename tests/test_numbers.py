"""What users say of matrices: dimension numbers, optax's trees, doubts and warnings."""

import functools
import warnings

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec
from optax.contrib import MuonDimensionNumbers as Numbers

import jax_muon as jm
from jax_muon.mesh.specs import entry_names
from jax_muon.reading.axes import MatrixAxes
from jax_muon.reading.paths import leaves_with_paths


def shape(*sizes):
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


def model():
    """Two blocks that are read well, with a table, a head and norms."""

    def block():
        return {
            "norm": {"scale": shape(8)},
            "attn": {"query": {"kernel": shape(8, 2, 4)}, "bias": shape(8)},
            "mlp": {"up": {"kernel": shape(8, 32)}},
        }

    return {
        "wte": {"embedding": shape(50, 8)},
        "blocks": {"0": block(), "1": block()},
        "head": {"kernel": shape(8, 50)},
    }


def read(numbers, tree=None, **settings):
    reading = jm.Reading(dimension_numbers=numbers, **settings)
    return reading.read(model() if tree is None else tree)


def axes(found, path):
    return found[path].axes


# --- patterns -------------------------------------------------------------------------

PER_HEAD = MatrixAxes((1,), (0,), (2,))


def test_a_pattern_counts_for_every_parameter_it_matches():
    found = read({"attn/query": Numbers(0, 2)})
    assert axes(found, "blocks/0/attn/query/kernel") == PER_HEAD
    assert axes(found, "blocks/1/attn/query/kernel") == PER_HEAD
    assert found["blocks/1/attn/query/kernel"].reason == "dimension numbers"


def test_the_first_pattern_that_matches_counts():
    found = read(
        {
            "blocks/0/*/query": None,  # as it is read otherwise
            "blocks/*/query/kernel": Numbers(0, 2),
            "query": Numbers((0, 1), 2),
        }
    )
    assert axes(found, "blocks/0/attn/query/kernel") == MatrixAxes((), (0,), (1, 2))
    assert axes(found, "blocks/1/attn/query/kernel") == PER_HEAD


def test_numbers_that_name_a_parameter_make_it_a_matrix():
    found = read({"head/kernel": Numbers(0, 1), "blocks": Numbers(0, -1)})
    assert found["head/kernel"].label == "muon"
    assert found["wte/embedding"].label == "adamw"
    assert axes(found, "blocks/1/mlp/up/kernel") == MatrixAxes((), (0,), (1,))
    assert found["blocks/1/norm/scale"].label == "adamw"  # a module is not named


def test_a_tree_and_a_function_are_prefixes_and_no_patterns():
    tree = {"blocks": {"0": {"attn": {"query": Numbers(0, 2)}}}}
    for numbers in (tree, lambda params: tree):
        found = read(numbers)
        assert axes(found, "blocks/0/attn/query/kernel") == PER_HEAD
        assert axes(found, "blocks/1/attn/query/kernel") != PER_HEAD


@pytest.mark.parametrize(
    ("numbers", "settings", "words"),
    [
        ({"attn/qeury": Numbers(0, 2)}, {}, "'attn/qeury' matches no parameter"),
        ({"blocks": {"2": Numbers(0, 1)}}, {}, "'blocks/2', which no parameter has"),
        ({"blocks": {"0": 3}}, {}, "'blocks/0': 3; expected optax"),
        (
            {"head": Numbers(0, 1)},
            {},
            "'head': every parameter there is labelled 'adamw': head/kernel",
        ),
        (
            {"head/kernel": Numbers(0, 1)},
            {"labels": jm.label_params},
            r"'head/kernel' of shape \(8, 50\) is labelled .adamw., and",
        ),
    ],
)
def test_bad_numbers(numbers, settings, words):
    with pytest.raises(ValueError, match=words):
        read(numbers, **settings)


# --- trees of optax.contrib.muon ------------------------------------------------------


def optax_tree(params):
    """As its users write it: numbers for matrices, None for AdamW."""

    def numbers(key_path, x):
        path = jax.tree_util.keystr(key_path, simple=True, separator="/")
        if "query" in path:
            return Numbers(0, (1, 2))
        return Numbers(0, 1) if path.endswith("up/kernel") else None

    return jax.tree_util.tree_map_with_path(numbers, params)


@pytest.mark.parametrize(
    "numbers",
    [optax_tree(model()), optax_tree, None, {"blocks": None, "head": Numbers()}],
    ids=["tree", "function", "none", "prefix"],
)
def test_labels_and_axes_are_those_of_optax(numbers):
    """By its own labels: state of Muon exists where a label says so."""
    params = model()
    if isinstance(numbers, dict) and "wte" not in numbers:
        numbers = {**numbers, "wte": Numbers(1, 0)}
    theirs = optax.contrib.muon(0.1, muon_weight_dimension_numbers=numbers)
    state = jax.eval_shape(theirs.init, params)
    mu = state.inner_states["muon"].inner_state[0].mu
    matrices = {path for path, _ in leaves_with_paths(mu)}
    found = jm.Reading.from_optax(numbers).read(params)
    assert {p for p, x in found.items() if x.label == "muon"} == matrices
    given = numbers(params) if callable(numbers) else numbers
    if given is None:
        assert axes(found, "head/kernel") == MatrixAxes((), (0,), (1,))
    elif given.get("blocks"):
        query = "blocks/0/attn/query/kernel"
        assert axes(found, query) == MatrixAxes((), (0,), (1, 2))
    else:
        assert axes(found, "wte/embedding") == MatrixAxes((), (1,), (0,))


def test_an_optax_tree_has_to_speak_of_every_parameter():
    with pytest.raises(ValueError, match="'wte/embedding' has no label"):
        jm.Reading.from_optax({"blocks": None, "head": Numbers()}).read(model())


# --- doubts ---------------------------------------------------------------------------


def doubtful():
    """Two parameters in doubt among others."""
    return {
        "norm": {"scale": shape(64)},
        "proj": {"kernel": shape(64, 3, 8)},
        "mixing": {"kernel": shape(4, 64, 96)},
        "up": {"kernel": shape(64, 256)},
    }


def test_check_lists_all_doubts_at_once():
    params = doubtful()
    found = jm.check(jm.nanochat(), params)
    assert [one.path for one in found] == ["mixing/kernel", "proj/kernel"]
    for words in ("2 parameters are in doubt", "'mixing/kernel'", "'proj/kernel'"):
        assert words in str(found)
    numbers = {"proj/kernel": Numbers(0, (1, 2)), "mixing/kernel": Numbers(1, 2)}
    reading = jm.Reading(dimension_numbers=numbers)
    assert not jm.check(jm.nanochat(reading=reading), params)


@pytest.mark.parametrize(
    "tx",
    [
        optax.chain(optax.clip_by_global_norm(1.0), jm.muon()),
        optax.MultiSteps(jm.muon(), 2),
        jm.orthogonalize(),
        optax.multi_transform(
            {"a": jm.muon(), "b": jm.nanochat()},
            {"norm": "b", "proj": "a", "mixing": "b", "up": "a"},
        ),
    ],
    ids=["chain", "MultiSteps", "bare", "two recipes"],
)
def test_check_sees_through_compositions(tx):
    paths = {one.path for one in jm.check(tx, doubtful())}
    assert {"mixing/kernel", "proj/kernel"} <= paths


def test_a_second_check_and_an_init_after_it_see_the_same_doubts():
    """JAX keeps traces by function: that of `check` is not one of `tx.init`."""
    tx, params = jm.nanochat(), doubtful()
    assert len(jm.check(tx, params)) == len(jm.check(tx, params)) == 2
    with pytest.raises(ValueError, match="'mixing/kernel'"):
        jax.eval_shape(tx.init, params)
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    step = jm.make_train_step(lambda params, batch: 0.0, tx, mesh)
    assert len(jm.check(step.tx, params)) == len(jm.check(step.tx, params)) == 2
    with pytest.raises(ValueError, match="'mixing/kernel'"):
        step.abstract(params)


def test_check_raises_what_is_no_doubt():
    reading = jm.Reading(dimension_numbers={"nowhere": Numbers(0, 1)})
    with pytest.raises(ValueError, match="'nowhere'"):
        jm.check(jm.nanochat(reading=reading), doubtful())


def test_the_error_says_that_there_are_more():
    with pytest.raises(ValueError, match=r"'mixing/kernel'.*check lists 1 more"):
        jax.eval_shape(jm.nanochat().init, doubtful())


def test_without_strict_doubts_are_warnings_and_go_to_adamw():
    params = jax.tree.map(lambda x: jnp.ones(x.shape), doubtful())
    tx = jm.nanochat(reading=jm.Reading(strict=False))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        state = jax.eval_shape(tx.init, params)
        jax.eval_shape(tx.update, params, state, params)
    texts = [str(one.message) for one in told]
    assert len(texts) == 2
    assert all(text.endswith("it goes to 'adamw'") for text in texts)
    adam = {p for p, _ in leaves_with_paths(state.inner_states["adamw"])}
    assert any(path.endswith("mu/proj/kernel") for path in adam)
    groups = {"muon": lambda found: jm.orthogonalize(matrices=found)}
    with pytest.raises(ValueError, match=r"groups are \['muon'\]; expected a group"):
        lenient = functools.partial(jm.partition, groups)
        lenient(jm.Reading(labels="muon", strict=False)).init({"w": jnp.ones(3)})


def test_leaves_of_one_kind_that_are_read_differently_are_in_doubt():
    """The second block's has a bias of its inputs' size, so it is (out, in)."""
    params = {
        "norm": {"scale": shape(16)},
        "0": {"up": {"kernel": shape(16, 64), "bias": shape(64)}},
        "1": {"up": {"kernel": shape(16, 64), "bias": shape(16)}},
    }
    found = jm.check(jm.nanochat(), params)
    assert [one.path for one in found] == ["0/up/kernel", "1/up/kernel"]
    assert "'0/up/kernel' of the same shape" in found[1].doubt


# --- axis names -----------------------------------------------------------------------


def test_names_in_no_table_are_an_error_and_those_of_a_mesh_are_not():
    tree = {"mix": {"wo": {"kernel": shape(4, 8)}}}
    mesh = jm.Reading(names={"mix/wo/kernel": ("fsdp", "tp")})
    assert axes(mesh.read(tree), "mix/wo/kernel") == MatrixAxes((), (0,), (1,))
    names = {"mix/wo/kernel": ("d_model", "d_ff")}
    with pytest.raises(
        ValueError,
        match=r"'d_model'.*'mix/wo/kernel'.*'d_model': 'stream', 'd_ff': 'hidden'",
    ):
        jm.Reading(names=names).read(tree)
    table = {"d_model": "stream", "d_ff": "hidden"}
    found = jm.Reading(names=names, table=table).read(tree)
    assert axes(found, "mix/wo/kernel") == MatrixAxes((), (1,), (0,))


def test_names_of_another_rank_and_names_against_the_bias_are_refused_with_both():
    tree = {"wi": {"kernel": shape(4, 8), "bias": shape(4)}}
    for names, words in {
        ("embed", "mlp"): ("embed, mlp", "'wi/bias'", "(4,)"),
        ("embed", "layers", "mlp"): ("3 axis names", "(4, 8)"),
    }.items():
        reading = jm.Reading(names={"wi/kernel": names})
        (found,) = jm.check(jm.nanochat(reading=reading), tree)
        for word in words:
            assert word in found.doubt


def test_names_against_those_that_the_tree_carries():
    tree = {"w": linen.LogicallyPartitioned(shape(4, 8), names=("embed", "mlp"))}
    jm.Reading(names={"w": ("embed", "mlp")}).read(tree)
    with pytest.raises(ValueError, match=r"\('embed', 'mlp'\), and .*\('mlp', 'embed'"):
        jm.Reading(names={"w": ("mlp", "embed")}).read(tree)


def test_names_that_the_tree_carries_matter_for_matrices_alone():
    def named(names):
        return linen.LogicallyPartitioned(shape(8, 32), names=names)

    found = jm.Reading().read({"lm_head": {"weight": named(("vocab", "embed"))}})
    assert found["lm_head/weight"].label == "adamw"
    numbers = r"MuonDimensionNumbers\(1, 0\), and .*MuonDimensionNumbers\(0, 1\)"
    with pytest.raises(ValueError, match=numbers):
        jm.Reading().read({"up": {"kernel": named(("mlp", "embed"))}})


def test_names_count_where_rules_are_given_too():
    tree = {"shared": shape(32, 8), "up": shape(8, 16), "stem": shape(8, 4)}
    names = {"shared": ("tokens", "embed"), "up": ("embed", "mlp")}
    labels = functools.partial(jm.label_params, rules={"stem": "adamw"})
    reading = jm.Reading(labels, names=names, table={"tokens": "vocab"})
    found = {path: one.label for path, one in reading.read(tree).items()}
    assert found == {"shared": "adamw", "up": "muon", "stem": "adamw"}


def test_names_of_parameters_that_a_mask_hides():
    """As where optax.multi_transform freezes a part of the model, outside of ours."""
    names = {path: ("embed", "mlp") for path in ("a/wi", "b/wi", "c/wi")}
    tree = {"a": {"wi": shape(4, 8)}, "b": {"wi": optax.MaskedNode()}}
    reading = jm.Reading(names=names)
    assert list(reading.read(tree | {"c": optax.MaskedNode()})) == ["a/wi"]
    with pytest.raises(ValueError, match="names at 'c/wi', which no parameter has"):
        reading.read(tree)


def test_the_side_of_the_outputs_against_the_bias():
    tree = {"up": {"weight": shape(4, 8), "bias": shape(8)}}
    assert not jm.check(jm.nanochat(reading=jm.Reading(out_in=False)), tree)
    (found,) = jm.check(jm.nanochat(reading=jm.Reading(out_in=True)), tree)
    assert "out_in=True of the Reading makes its outputs 4" in found.doubt
    assert "'up/bias'" in found.doubt
    with pytest.raises(ValueError, match=r"out_in\('up/weight'\)='in'; expected True"):
        jm.Reading(out_in=lambda path: "in").read(tree)


# --- specs by names -------------------------------------------------------------------

NAMES = ("layers", "embed", "mlp", "heads", "kv", None)
MESH_AXES = (None, "fsdp", "tp", ("fsdp", "tp"), ("tp",))


@given(
    names=st.lists(st.sampled_from(NAMES), min_size=1, max_size=4).filter(
        lambda names: len({*names} - {None}) == len(names) - names.count(None)
    ),
    rules=st.lists(
        st.tuples(st.sampled_from(NAMES[:-1]), st.sampled_from(MESH_AXES)), max_size=6
    ),
    random=st.randoms(use_true_random=False),
)
@settings(max_examples=200, deadline=None)
def test_specs_are_those_of_flax_and_follow_permuted_names(names, rules, random):
    def entries(names):
        reading = jm.Reading(names={"w": tuple(names)})
        found = reading.specs(rules)("w")
        assert reading.specs(rules)("other") == PartitionSpec()
        return [entry_names(entry) for entry in found]

    theirs = linen.logical_to_mesh_axes(tuple(names), rules)
    assert entries(names) == [entry_names(entry) for entry in theirs]
    order = random.sample(range(len(names)), len(names))
    expected = [entries(names)[i] for i in order]
    assert entries([names[i] for i in order]) == expected


@pytest.mark.parametrize(
    ("names", "rules", "words"),
    [
        (None, [], "Reading without names"),
        (
            {"w": ("embed", "embed")},
            [("embed", "tp")],
            r"'w' has the axis names .*once",
        ),
        ({"w": ("embed",)}, ["embed"], "rules: 'embed'; expected a pair"),
        ({"w": ("embed",)}, [("embed", 3)], "'embed', 3"),
    ],
)
def test_bad_rules(names, rules, words):
    with pytest.raises(ValueError, match=words):
        jm.Reading(names=names).specs(rules)
