"""Uses that would be silently wrong: errors with name, value and what is expected."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_muon as jm
from tests.reading import reader

PARAMS = {"wte": jnp.ones((5, 4)), "w": jnp.ones((4, 6)), "bias": jnp.ones(6)}
MATRIX = {"w": jnp.ones((4, 6))}
MESH = jax.make_mesh((1,), ("data",), (jax.sharding.AxisType.Auto,))
HEADS = jnp.ones((1, 8, 2, 4))
NAN = float("nan")
X = reader({"w": "x"})


def step(tx, grads=None, params=PARAMS, state=None):
    """What depends on a tree or a step is checked in these."""
    state = tx.init(params) if state is None else state
    return tx.update(params if grads is None else grads, state, params)


def loss(params, batch):
    return jnp.sum(params["w"]) * jnp.mean(batch)


def train(**settings):
    made = jm.make_train_step(settings.pop("loss", loss), jm.muon(), MESH, **settings)
    params, state = made.init(MATRIX)
    return made(params, state, jnp.ones((4, 2)))


def states(tx):
    return tx.init(PARAMS)


# A wrong use, and the words of the error.
NUMBERS = {
    "rate below 0": (lambda: jm.muon(-0.1), "learning_rate=-0.1; expected a finite"),
    "rate as text": (lambda: jm.muon("0.1"), "learning_rate='0.1'; expected a finite"),
    "rate is NaN": (lambda: jm.nanochat(weight_decay=NAN), "weight_decay=nan; exp"),
    "a rate per matrix": (lambda: jm.muon(jnp.ones(2)), "learning_rate=Array([1., 1.]"),
    "momentum of 1": (lambda: jm.muon(momentum=1.0), "momentum of a recipe)=1.0; exp"),
    "NumPy's momentum": (
        lambda: jm.muon(momentum=np.float32(1.5)),
        "recipe)=np.f",
    ),
    "decay of 1": (
        lambda: jm.nesterov(1),
        "decay (momentum of a recipe)=1; expected a number in [0, 1",
    ),
    "beta2 of 1": (lambda: jm.normuon(beta2=1.0), "beta2 of a recipe)=1.0; expected"),
    "eps of 0": (lambda: jm.scale_by_normuon(eps=0.0), "eps=0.0; expected a finite"),
    "rms of 0": (lambda: jm.normalize_frobenius(0.0), "rms=0.0; expected a finite num"),
    "a share above 1": (lambda: jm.clip_qk(1.0, balance=1.5), "balance=1.5; expected"),
    "threshold of 0": (lambda: jm.clip_qk(0.0), "threshold=0.0; expected a finite"),
    "no matrix in a stack": (
        lambda: jm.orthogonalize(max_stack=0),
        "max_stack=0; expected an integer of at least 1",
    ),
    "half a step": (lambda: jm.muon(steps=2.5), "steps=2.5; expected a Python integer"),
    "no step": (lambda: jm.PolarExpress(steps=0), "steps=0; expected an integer"),
    "a margin below 0": (
        lambda: jm.NewtonSchulz(norm_factor=-1.0),
        "norm_factor=-1.0; expected a finite number above 0",
    ),
    "a traced number of steps": (
        lambda: states(optax.inject_hyperparams(jm.nanochat)(0.5)),
        "static_args=('steps',)",
    ),
    "a schedule of arrays": (
        lambda: step(jm.muon(lambda count: jnp.ones(2))),
        "learning_rate(count) is float32 of shape (2,); expected a schedule of real",
    ),
    "a schedule without return": (
        lambda: step(jm.muon(momentum=lambda count: None)),
        "momentum of a recipe)(count)=None; expected a schedule of real",
    ),
    "a factor below 0": (
        lambda: jm.scale_by_path({"w": -1.0}),
        "factors['w']=-1.0; expected a finite number of at least 0",
    ),
    "a rule of shapes below 0": (
        lambda: step(jm.muon(shape_rule=lambda *fan: -1.0)),
        "rule(4, 6)=-1.0; expected",
    ),
    "an integer dtype": (
        lambda: jm.on_mesh(jm.muon(), MESH, gather_dtype="int8"),
        "gather_dtype='int8'; expected a dtype of real floating point",
    ),
    "momentum in float16": (
        lambda: jm.muon(momentum_dtype="float16"),
        "momentum_dtype of a recipe)='float16'; expected one of 'float64', 'float32'",
    ),
    "microbatches": (lambda: train(microbatches=0), "microbatches=0; expected an int"),
    "a loss per sample": (
        lambda: train(loss=lambda p, b: jnp.sum(p["w"]) * b[:, 0]),
        "the loss of loss_fn is float32 of shape (4,); expected a real scalar",
    ),
    "integer heads": (
        lambda: jm.max_attention_logits(HEADS.astype(int), HEADS),
        "expected an array of real floating point",
    ),
    "parts of 0": (lambda: jm.Split(0), "parts=0; expected"),
    "joins of half": (
        lambda: states(jm.muon(matrices=reader(joins={"w": 0.5}))),
        "joins['w']=0.5; expected a Python integer",
    ),
    "a count below 0": (lambda: jm.Moments(-1, {}), "count=-1; expected an integer of"),
}
WORDS = {
    "edition": (
        lambda: jm.nanochat(edition="2026"),
        "edition='2026'; expected one of '",
    ),
    "axis": (
        lambda: jm.scale_by_normuon(axis="outputs"),
        "axis='outputs'; expected one of 'longer', 'output'",
    ),
    "shape rule": (
        lambda: jm.muon(shape_rule="rms"),
        "shape_rule of a recipe)='rms'; expected one of 'max_ratio', 'rms_0.2'",
    ),
    "coefficients": (
        lambda: jm.NewtonSchulz(coefficients="jordn"),
        "coefficients='jordn'; expected",
    ),
    "a mask as text": (
        lambda: jm.muon(weight_decay_mask="w"),
        "weight_decay_mask='w'; expected True or False",
    ),
    "a polar factor without its brackets": (
        lambda: jm.muon(polar=jm.NewtonSchulz),
        "expected a function of arrays (..., m, n) such as PolarExpress()",
    ),
    "a polar factor of two results": (
        lambda: step(jm.muon(polar=lambda x: (x, x))),
        "made shape None out of (1, 4, 6)",
    ),
    "a flag as text": (
        lambda: jm.muon(lookahead="no"),
        "lookahead='no'; expected True or False",
    ),
    "a mesh axis": (
        lambda: jm.on_mesh(jm.muon(), MESH, divide="model"),
        "divide='model'; expected axes of the mesh",
    ),
    "how parameters lie": (
        lambda: train(parameters="sharded"),
        "parameters='sharded'; expected one of",
    ),
    "a pattern of factors": (
        lambda: states(jm.scale_by_path({"wq": 0.5})),
        "the pattern 'wq' matches no parameter; there are bias, w, wte",
    ),
    "a pattern of rules": (
        lambda: jm.read(PARAMS, rules={"up": "adamw"}),
        "'up' matches no parameter",
    ),
    "a pattern of splits": (
        lambda: states(jm.muon(matrices=reader(splits={"qkv": jm.Split(3)}))),
        "'qkv'",
    ),
    "a label without a group": (
        lambda: states(jm.nanochat(matrices=reader({"w": "moun"}))),
        "'w' of shape (4, 6) has the label 'moun'; expected one of 'muon', 'adamw'",
    ),
    "a group of its own name": (
        lambda: jm.muon(groups={"muon": optax.sgd(1.0)}),
        "groups has the labels ['muon']; expected others than 'muon'",
    ),
    "a group of no parameter": (
        lambda: states(jm.muon(groups={"experts": lambda matrices: optax.sgd(1.0)})),
        "'experts' is a function of its matrices, and no parameter has that label",
    ),
    "a group without return": (
        lambda: states(jm.muon(groups={"x": lambda matrices: None}, matrices=X)),
        "groups['x'](matrices)=None; expected an optax transform",
    ),
    "an optimizer without a call": (
        lambda: jm.muon(adamw=optax.adamw),
        "expected an optax transform",
    ),
    "labels as matrices": (
        lambda: states(jm.muon(matrices={"w": "muon"})),
        "matrices={'w': 'muon'}; expected jax_muon.read(params)",
    ),
    "a function that reads labels": (
        lambda: states(jm.muon(matrices=lambda params: {"w": "muon"})),
        "matrices={'w': 'muon'}; expected jax_muon.read(params), or a function",
    ),
}
TREES = {
    "a number of Python": (
        lambda: states_of({"up": jnp.ones((4, 8)), "scale": 1.0}),
        "params at 'scale'=1.0; expected arrays",
    ),
    "two parameters of one path": (
        lambda: states_of({"a/b": jnp.ones((4, 6)), "a": {"b": jnp.ones((4, 6))}}),
        "two parameters have the path 'a/b'",
    ),
    "a random key": (
        lambda: states_of({"w": jnp.ones((4, 6)), "z": jax.random.key(0)}),
        "'z' of shape () has dtype key<fry>, which AdamW cannot train; expected",
    ),
    "an 8-bit float": (
        lambda: states_of({"z": jnp.ones((4, 6), "float8_e4m3fn")}),
        "'z' of shape (4, 6) has dtype float8_e4m3fn, which AdamW cannot train",
    ),
    "a vector as a matrix": (
        lambda: states(jm.muon(matrices=reader({"bias": "muon"}))),
        "'bias'",
    ),
    "a vector in a piece": (
        lambda: states(jm.orthogonalize()),
        "'bias' of shape (6,): without `matrices` a piece treats every leaf as one",
    ),
    "a piece with splits": (
        lambda: states(
            jm.orthogonalize(matrices=jm.read(MATRIX, splits={"w": jm.Split(2)}))
        ),
        "matrices= splits w, which a piece would not apply; expected",
    ),
    "the reading of another tree": (
        lambda: states(jm.muon(matrices=jm.read(MATRIX))),
        "'bias' was not read; there are w; expected the tree",
    ),
    "the reading of other shapes": (
        lambda: step(jm.muon(matrices=jm.read({"w": jnp.ones((6, 4))})), params=MATRIX),
        "'w' of shape (4, 6) was read with (6, 4)",
    ),
    "no parameters": (
        lambda: jm.nanochat().update(PARAMS, states(jm.nanochat())),
        "params=None",
    ),
    "specs that do not fit": (
        lambda: states(jm.on_mesh(jm.muon(), MESH, {"wte": jax.P()})),
        "specs have nothing for parameter 'bias'",
    ),
}


def states_of(params):
    return jm.nanochat().init(params)


@pytest.mark.parametrize("name", NUMBERS | WORDS | TREES)
def test_wrong_uses(name):
    use, words = (NUMBERS | WORDS | TREES)[name]
    with pytest.raises(ValueError, match=re.escape(words)):
        use()


# --- gradients and state: once, in `partition` and `on_mesh` --------------------------

CHECKED = {
    "a recipe": lambda: jm.muon(matrices=reader("muon")),
    "partition": lambda: jm.partition({"adamw": optax.adamw(0.1)}, reader("adamw")),
    "on_mesh": lambda: jm.on_mesh(optax.adamw(0.1), MESH),
}
WRONG_GRADIENTS = {
    "broadcastable": ({"w": jnp.ones((1, 6))}, r"'w' has shape \(1, 6\); .*\(4, 6\)"),
    "missing": ({"w": None}, "no gradient at 'w'; expected"),
    "another": (
        {"z": jnp.ones(3)},
        "gradient at 'z'; expected none without a parameter",
    ),
    "integers": ({"w": jnp.ones((4, 6), int)}, "'w' has dtype int32; expected .*float"),
}


@pytest.mark.parametrize("name", CHECKED)
@pytest.mark.parametrize("wrong", WRONG_GRADIENTS)
def test_gradients_of_other_parameters(name, wrong):
    grads, words = WRONG_GRADIENTS[wrong]
    tx = CHECKED[name]()
    with pytest.raises(ValueError, match=words):
        step(tx, {**MATRIX, **grads}, MATRIX)


@pytest.mark.parametrize("name", CHECKED)
@pytest.mark.parametrize("sizes", [(1, 4), (4, 1)], ids=str)
def test_states_of_other_shapes(name, sizes):
    """optax.adamw alone would broadcast (1, 6) against (4, 6)."""
    tx, (old, new) = CHECKED[name](), sizes
    state, grads = tx.init({"w": jnp.ones((old, 6))}), {"w": jnp.ones((new, 6))}
    with pytest.raises(ValueError, match=rf"shape .*; expected \({new}, 6\)"):
        tx.update(grads, state, grads)


PIECES = {
    "nesterov": jm.nesterov,
    "int8 momentum": lambda: jm.nesterov(accumulator_dtype="int8"),
    "scale_by_normuon": jm.scale_by_normuon,
    "hyperball": lambda: jm.hyperball(0.1),
    "a recipe": lambda: jm.muon(adamw=optax.sgd(0.1)),
}


@pytest.mark.parametrize("name", PIECES)
def test_states_of_parameters_with_other_names(name):
    """By place, the second of two matrices would get what is known of the first."""
    tx = PIECES[name]()
    state = tx.init({"a": jnp.ones((4, 6)), "b": jnp.ones((4, 6))})
    renamed = {"b": jnp.ones((4, 6)), "c": jnp.ones((4, 6))}
    with pytest.raises((ValueError, KeyError), match=r"a'|c'"):
        tx.update(renamed, state, renamed)


@pytest.mark.parametrize("name", ["nesterov", "int8 momentum", "scale_by_normuon"])
def test_states_of_parameters_of_other_shapes(name):
    tx, stack = PIECES[name](), {"w": jnp.ones((1, 4))}
    state = tx.init(stack)
    with pytest.raises(ValueError, match=r"'w' has shape"):
        tx.update({"w": jnp.ones((8, 6))}, state)


OTHERS = {
    "no guard": (
        lambda: jm.skip_nonfinite(jm.muon()),
        jm.muon,
        "(?s)state=PartitionState.*expected a SkipNonfiniteState",
    ),
    "not observed": (
        lambda: jm.observe(jm.muon()),
        jm.muon,
        "(?s)state=PartitionState.*expected an ObserveState",
    ),
    "less": (jm.nanochat, jm.muon, "no array at 'inner_states/muon/.*/2/count'"),
    "more": (jm.muon, jm.nanochat, "array at 'inner_states/muon/.*; expected none"),
    "int8": (
        jm.muon,
        lambda: jm.muon(momentum_dtype="int8"),
        "array at '.*scale/w'; expected none",
    ),
    "not int8": (
        lambda: jm.muon(momentum_dtype="int8"),
        jm.muon,
        "no array at '.*scale/w'",
    ),
    "optax": (jm.muon, lambda: optax.sgd(0.1), "no array at 'inner_states"),
    "group": (
        jm.muon,
        lambda: jm.muon(groups={"x": optax.adam(0.1)}),
        "array at 'inner_states/x.*expected none",
    ),
    "no group": (
        lambda: jm.muon(groups={"x": optax.adam(0.1)}),
        jm.muon,
        "no array at 'inner_states/x",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_states_of_other_optimizers(name):
    tx, other, words = OTHERS[name]
    with pytest.raises(ValueError, match=words):
        step(tx(), state=other().init(PARAMS))


def test_a_polar_factor_that_turns_its_matrices():
    with pytest.raises(ValueError, match=r"shape \(1, 6, 4\) out of \(1, 4, 6\)"):
        step(jm.orthogonalize(lambda x: x.mT), params=MATRIX)
