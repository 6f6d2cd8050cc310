"""Misuse that must raise an error: with the name, the value and what is expected."""

import functools
import re

import jax
import jax.numpy as jnp
import optax
import pytest

import jax_muon as jm
from tests.reading import reader, toy

muon, nanochat = (functools.partial(x, matrices=toy) for x in (jm.muon, jm.nanochat))

PARAMS = {"wte": jnp.ones((5, 4)), "w": jnp.ones((4, 6)), "bias": jnp.ones(6)}
MATRIX = {"w": jnp.ones((4, 6))}
MESH = jax.make_mesh((1,), ("data",), (jax.sharding.AxisType.Auto,))
NAN = float("nan")


def init(tx, params=PARAMS):
    return tx.init(params)


def step(tx, params=PARAMS, grads=None, state=None):
    state = tx.init(params) if state is None else state
    return tx.update(params if grads is None else grads, state, params)


def step_without_params(tx):
    return tx.update(MATRIX, tx.init(MATRIX))


def resumed(tx, other):
    """A step from the state of another optimizer."""
    return step(tx, state=other.init(PARAMS))


def loss(params, batch):
    return jnp.sum(params["w"]) * jnp.mean(batch)


def train(**settings):
    made = jm.make_train_step(loss, muon(), MESH, **settings)
    return made(*made.init(MATRIX), jnp.ones((4, 2)))


def read_as(rules, **recipe):
    """Muon with rules for the reading of its parameters."""
    return muon(matrices=reader(rules), **recipe)


# The words of an error, and the wrong use that raises it.
TABLE = {
    # numbers
    "learning_rate=-0.1; expected a finite number of": lambda: muon(-0.1),
    "learning_rate=Array([1., 1.]": lambda: muon(jnp.ones(2)),
    "weight_decay=nan; expected": lambda: nanochat(weight_decay=NAN),
    "(momentum of a recipe)=1.0; expected": lambda: muon(momentum=1.0),
    "(beta2 of a recipe)=1.0; expected": lambda: jm.normuon(beta2=1.0),
    "rms=0.0; expected a finite": lambda: jm.normalize_frobenius(0.0),
    "balance=1.5; expected a number in [0, 1]": lambda: jm.clip_qk(1.0, balance=1.5),
    "team=0; expected a Python int": lambda: jm.orthogonalize(team=0),
    "steps=2.5; expected a Python integer": lambda: muon(steps=2.5),
    "static_args=('steps',)": lambda: init(
        optax.inject_hyperparams(jm.nanochat)(0.5, steps=5)
    ),
    "microbatches=0; expected a Python": lambda: train(microbatches=0),
    "groups=['x']; expected a mapping of label": lambda: nanochat(groups=["x"]),
    "such as sgd(1e-3)": lambda: nanochat(groups={"x": optax.sgd}),
    "rules at '0', which no parameter has; expected a mapping of path": lambda: init(
        muon(matrices=reader(rules=["frozen"]))
    ),
    "joins['w']=0.5; expected a Python integer": lambda: init(
        muon(matrices=reader(joins={"w": 0.5}))
    ),
    "factors['w']=-1.0; expected a finite number of": lambda: jm.scale_by_path(
        {"w": -1.0}
    ),
    "rule(4, 6)=-1.0; expected": lambda: step(muon(shape_rule=lambda *fan: -1.0)),
    # schedules and dtypes
    "learning_rate(count) is float32 of shape (2,); expected a schedule": lambda: step(
        muon(lambda count: jnp.ones(2))
    ),
    "gather_dtype='int8'; expected a dtype of real floating point": lambda: jm.on_mesh(
        muon(), MESH, gather_dtype="int8"
    ),
    "(momentum_dtype of a recipe)='float16'; expected one of 'float64'": lambda: muon(
        momentum_dtype="float16"
    ),
    # words
    "(shape_rule of a recipe)='rms'; expected": lambda: muon(shape_rule="rms"),
    "lookahead='no'; expected True or False": lambda: muon(lookahead="no"),
    "'w' of shape (4, 6) with P('data', 'data'): a mesh axis twice": lambda: init(
        jm.on_mesh(muon(), MESH, jax.P("data", "data")), MATRIX
    ),
    "divide='model'; expected axes of": lambda: jm.on_mesh(
        muon(), MESH, divide="model"
    ),
    "specs have nothing for parameter 'bias'": lambda: init(
        jm.on_mesh(muon(), MESH, {"wte": jax.P()})
    ),
    # patterns and labels
    "'w' of shape (4, 6) has the label 'moun'; expected one of 'muon'": lambda: init(
        read_as({"w": "moun", "wte": "adamw"})
    ),
    "groups has the labels ['muon']; expected others than": lambda: muon(
        groups={"muon": optax.sgd(1.0)}
    ),
    "'x' is a function of its matrices, and no parameter has": lambda: init(
        muon(groups={"x": lambda matrices: optax.sgd(1.0)})
    ),
    # what is passed instead of a function, a transform, a reading
    "such as PolarExpress()": lambda: muon(polar=jm.NewtonSchulz),
    "expected what on_mesh returns": lambda: jm.verify(muon(), PARAMS),
    "made None of shape None out": lambda: step(muon(polar=lambda x: (x, x))),
    "of shape (1, 6, 4) out of float32 of shape (1, 4, 6)": lambda: step(
        jm.orthogonalize(lambda x: x.mT), MATRIX
    ),
    "groups['x'](matrices)=None; expected an optax transform": lambda: init(
        read_as({"w": "x", "wte": "adamw"}, groups={"x": lambda matrices: None})
    ),
    "expected an optax transform": lambda: muon(adamw=optax.adamw),
    "(params)={'w': 'adamw'}; expected jax_muon.read(params, loss": lambda: init(
        muon(matrices=lambda params: {"w": "adamw"})
    ),
    "expected jax_muon.read(params, loss_fn, batch), or a function of pa": lambda: muon(
        matrices="muon"
    ),
    "nothing says whether 2 of 3 parameters are matrices": lambda: init(jm.muon()),
    "'wq' matches no parameter; there are bias, w": lambda: init(
        muon(matrices={"wq": "muon"})
    ),
    "rules at 'w': 1; expected a label": lambda: init(muon(matrices={"w": 1})),
    "missing a required argument: 'batch'": lambda: jm.read(PARAMS, loss),
    "args at '0/x'='a'; expected arrays": lambda: jm.read(PARAMS, loss, {"x": "a"}),
    "matrices= splits w, which a piece would not apply": lambda: init(
        jm.orthogonalize(matrices=reader(splits={"w": jm.Split(2)})(MATRIX))
    ),
    # parameters
    "params at 'layers'=2; expected arrays": lambda: init(
        nanochat(), MATRIX | {"layers": 2}
    ),
    "two parameters have the path 'a/b'": lambda: init(
        nanochat(), {"a/b": jnp.ones((4, 6)), "a": {"b": jnp.ones((4, 6))}}
    ),
    "'z' of shape () has dtype int32, which AdamW cannot train; expected": lambda: init(
        nanochat(), MATRIX | {"z": jnp.zeros((), "int32")}
    ),
    "has dtype float8_e4m3fn, which AdamW cannot train": lambda: init(
        jm.nanochat(), {"z": jnp.ones((4, 6), "float8_e4m3fn")}
    ),
    "'bias' of shape (6,): with dtype": lambda: init(
        read_as({"bias": "muon", "*": "muon"})
    ),
    "'bias' was not read; there are w; expected the tree": lambda: init(
        muon(matrices=reader()(MATRIX))
    ),
    "'w' of shape (4, 6) was read with (6, 4)": lambda: step(
        muon(matrices=reader()({"w": jnp.ones((6, 4))})), MATRIX
    ),
    "params=None; expected them, or a recipe with weight_decay=0.0": (
        lambda: step_without_params(nanochat())
    ),
    "hyperball needs the parameters": lambda: step_without_params(jm.hyperball(0.1)),
    # the state of another optimizer
    "expected a SkipNonfiniteState": lambda: resumed(jm.skip_nonfinite(muon()), muon()),
    "no array at 'inner_states/muon/inner_state/2/count'": lambda: resumed(
        nanochat(), muon()
    ),
    "array at 'inner_states/muon/inner_state/2/count'; expected none": lambda: resumed(
        muon(), nanochat()
    ),
    "0/mu/w' has dtype float32; expected one like int8": lambda: resumed(
        muon(momentum_dtype="int8"), muon()
    ),
}


@pytest.mark.parametrize("words", TABLE)
def test_wrong_uses(words):
    with pytest.raises(ValueError, match=re.escape(words)):
        TABLE[words]()


# --- gradients and states of other parameters: once, in `partition` and `on_mesh` -----

CHECKED = {
    "a recipe": lambda: read_as("muon"),
    "partition": lambda: jm.partition({"adamw": optax.adamw(0.1)}, {"*": "adamw"}),
    "on_mesh": lambda: jm.on_mesh(optax.adamw(0.1), MESH),
}
WRONG_GRADIENTS = {
    "'w' has shape (1, 6); expected (4, 6)": {"w": jnp.ones((1, 6))},
    "no gradient at 'w'; expected": {"w": None},
    "gradient at 'z'; expected none without a parameter": {"z": jnp.ones(3)},
    "'w' has dtype int32; expected one like float32": {"w": jnp.ones((4, 6), int)},
}


@pytest.mark.parametrize("name", CHECKED)
@pytest.mark.parametrize("words", WRONG_GRADIENTS)
def test_gradients_of_other_parameters(name, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        step(CHECKED[name](), MATRIX, MATRIX | WRONG_GRADIENTS[words])


@pytest.mark.parametrize("name", CHECKED)
@pytest.mark.parametrize(("old", "new"), [(1, 4), (4, 1)])
def test_states_of_other_shapes(name, old, new):
    """optax.adamw alone would broadcast (1, 6) against (4, 6)."""
    tx = CHECKED[name]()
    state = tx.init({"w": jnp.ones((old, 6))})
    with pytest.raises(ValueError, match=rf"shape .*; expected \({new}, 6\)"):
        step(tx, {"w": jnp.ones((new, 6))}, state=state)


PIECES = {
    "nesterov": jm.nesterov,
    "int8 momentum": lambda: jm.nesterov(accumulator_dtype="int8"),
    "scale_by_normuon": jm.scale_by_normuon,
    "hyperball": lambda: jm.hyperball(0.1),
    "a recipe": lambda: muon(adamw=optax.sgd(0.1)),
}


@pytest.mark.parametrize("name", PIECES)
def test_states_of_other_parameters(name):
    """By place, the second of two matrices would get what is known of the first."""
    tx = PIECES[name]()
    state = tx.init({"a": jnp.ones((4, 6)), "b": jnp.ones((4, 6))})
    with pytest.raises((ValueError, KeyError), match=r"a'|c'"):
        step(tx, {"b": jnp.ones((4, 6)), "c": jnp.ones((4, 6))}, state=state)
    if name != "hyperball":  # its radii have one shape for all matrices
        with pytest.raises(ValueError, match="has shape"):
            step(tx, {"a": jnp.ones((1, 1)), "b": jnp.ones((1, 1))}, state=state)
