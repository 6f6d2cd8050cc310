"""Misuse that must raise an error: with the name, the value and what is expected."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_muon as jm
from tests.reading import reader, toy

muon, nanochat = (functools.partial(x, matrices=toy) for x in (jm.muon, jm.nanochat))

PARAMS = {"wte": jnp.ones((5, 4)), "w": jnp.ones((4, 6)), "bias": jnp.ones(6)}
MATRIX = {"w": jnp.ones((4, 6))}
MESH = jax.make_mesh((1,), ("data",), (jax.sharding.AxisType.Auto,))
NAN, NONE = float("nan"), lambda matrices: None


def loss(params, batch):
    return jnp.sum(params["w"]) * jnp.mean(batch)


def read_as(rules, **recipe):
    """Muon with rules for the reading of its parameters."""
    return muon(matrices=reader(rules), **recipe)


# The words of an error, and the wrong use that raises it.
AT_ONCE = {
    "learning_rate=-0.1; expected a finite number of": lambda: muon(-0.1),
    "learning_rate=Array([1., 1.]": lambda: muon(jnp.ones(2)),
    "learning_rate=True; expected": lambda: muon(True),
    "weight_decay=nan; expected": lambda: nanochat(weight_decay=NAN),
    "steps=True; expected a Python integer": lambda: muon(steps=True),
    "(momentum of a recipe)=1.0; expected": lambda: muon(momentum=1.0),
    "(beta2 of a recipe)=1.0; expected": lambda: jm.normuon(beta2=1.0),
    "rms=0.0; expected a finite": lambda: jm.normalize_frobenius(0.0),
    "balance=1.5; expected a number in [0, 1]": lambda: jm.clip_qk(1.0, balance=1.5),
    "team=0; expected a Python int": lambda: jm.orthogonalize(team=0),
    "steps=2.5; expected a Python integer": lambda: muon(steps=2.5),
    "groups=['x']; expected a mapping of label": lambda: jm.partition(["x"]),
    "such as sgd(1e-3)": lambda: nanochat(groups={"x": optax.sgd}),
    "['w']=-1.0; expected a finite number": lambda: jm.scale_by_path({"w": -1.0}),
    "gather_dtype='int8'; expected a dtype of real floating point": (
        lambda: jm.on_mesh(muon(), MESH, gather_dtype="int8")
    ),
    "='float16'; expected one of 'float64'": lambda: muon(momentum_dtype="float16"),
    "(shape_rule of a recipe)='rms'; expected": lambda: muon(shape_rule="rms"),
    "lookahead='no'; expected True or False": lambda: muon(lookahead="no"),
    "dtype='float32'; expected one of 'int8'": (
        lambda: jm.keep_residual(muon(), "float32")
    ),
    "divide='model'; expected axes": lambda: jm.on_mesh(muon(), MESH, divide="model"),
    "labels ['muon']; expected others than": lambda: muon(groups={"muon": muon()}),
    "such as PolarExpress()": lambda: muon(polar=jm.NewtonSchulz),
    "expected what on_mesh returns": lambda: jm.verify(muon(), PARAMS),
    "expected an optax transform": lambda: muon(adamw=optax.adamw),
    "(params, loss_fn, batch), or a function of pa": lambda: muon(matrices="muon"),
    "args at '0/x'='a'; expected an array; close over": lambda: jm.read(
        PARAMS, loss, {"x": "a"}
    ),
}
AT_INIT = {  # of PARAMS
    "static_args=('steps',)": lambda: optax.inject_hyperparams(jm.nanochat)(steps=5),
    "rules at '0', which no parameter has": lambda: read_as(["frozen"]),
    "joins['w']=0.5; expected a Python integer": (
        lambda: muon(matrices=reader(joins={"w": 0.5}))
    ),
    "specs have nothing for parameter 'bias'": (
        lambda: jm.on_mesh(muon(), MESH, {"wte": jax.P()})
    ),
    "'w' of shape (4, 6) has the label 'moun'; expected one of 'muon'": (
        lambda: read_as({"w": "moun", "wte": "adamw"})
    ),
    "'x' is a function of its matrices, and no par": lambda: muon(groups={"x": NONE}),
    "groups['x'](matrices)=None; expected an optax transform": (
        lambda: read_as({"w": "x", "wte": "adamw"}, groups={"x": NONE})
    ),
    "=None; expected jax_muon.read(params, loss": lambda: muon(matrices=NONE),
    "nothing says whether 2 of 3 parameters are matrices": jm.muon,
    "'wq' matches no parameter; there are bias, w": lambda: read_as({"wq": "muon"}),
    "rules at 'w': 1; expected a label": lambda: read_as({"w": 1}),
    "matrices= splits w, which a piece would not apply": lambda: jm.orthogonalize(
        matrices=reader(splits={"w": jm.Split(2)})(MATRIX)
    ),
    "'bias' of shape (6,): with dtype": lambda: read_as({"bias": "muon", "*": "muon"}),
    "'bias' was not read; there are w; expected": (
        lambda: muon(matrices=reader()(MATRIX))
    ),
}
TREES = {  # at init of nanochat
    "params at 'layers'=2; expected arrays": MATRIX | {"layers": 2},
    "two parameters have the path 'a/b'": {
        "a/b": jnp.ones((4, 6)),
        "a": {"b": jnp.ones((4, 6))},
    },
    "'z' of shape () has dtype int32, which AdamW cannot train; expected": (
        MATRIX | {"z": jnp.zeros((), "int32")}
    ),
}


def resumed(tx, other):
    """A step from the state of another optimizer."""
    return tx.update(PARAMS, other.init(PARAMS), PARAMS)


def step(tx, params=MATRIX, grads=None, state=None):
    state = tx.init(params) if state is None else state
    return tx.update(params if grads is None else grads, state, params)


AT_UPDATE = {
    "has dtype float8_e4m3fn, which AdamW cannot train": (
        lambda: jm.nanochat().init({"z": jnp.ones((4, 6), "float8_e4m3fn")})
    ),
    "rule(4, 6)=-1.0; expected": lambda: step(muon(shape_rule=lambda *fan: -1.0)),
    "learning_rate(count) is float32 of shape (2,); expected a schedule": (
        lambda: step(muon(lambda count: jnp.ones(2)))
    ),
    "made None of shape None out": lambda: step(muon(polar=lambda x: (x, x))),
    "of shape (1, 6, 4) out of float32 of shape (1, 4, 6)": (
        lambda: step(jm.orthogonalize(lambda x: x.mT))
    ),
    "'w' of shape (4, 6) was read with (6, 4)": (
        lambda: step(muon(matrices=reader()({"w": jnp.ones((6, 4))})))
    ),
    "hyperball needs the parameters": lambda: jm.hyperball(0.1).update(MATRIX, None),
    "keep_residual needs the parameters": (
        lambda: jm.keep_residual(muon()).update(MATRIX, None)
    ),
    "expected a SkipNonfiniteState": (
        lambda: resumed(jm.skip_nonfinite(muon()), muon())
    ),
    "no array at 'inner_states/muon/inner_state/2/count'": (
        lambda: resumed(nanochat(), muon())
    ),
    "array at 'inner_states/muon/inner_state/2/count'; expected none": (
        lambda: resumed(muon(), nanochat())
    ),
    "0/mu/w' has dtype float32; expected one like int8": (
        lambda: resumed(muon(momentum_dtype="int8"), muon())
    ),
}
ALL = AT_ONCE | AT_UPDATE
ALL |= {words: lambda make=make: make().init(PARAMS) for words, make in AT_INIT.items()}
ALL |= {words: lambda tree=tree: nanochat().init(tree) for words, tree in TREES.items()}


@pytest.mark.parametrize("words", ALL)
def test_wrong_uses(words):
    with pytest.raises(ValueError, match=re.escape(words)):
        ALL[words]()


def test_numbers_of_numpy_are_numbers():
    assert muon(np.float16(0.5), np.asarray(0.75), steps=np.int32(3))
    assert muon(jnp.float32(0.5), lookahead=np.bool_(True))


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
