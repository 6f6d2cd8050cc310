"""Misuse that must raise an error: with the name, the value and what is expected."""

import re

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_muon as jm
from jax_muon.polar.coefficients import polar_express_coefficients
from tests.matrices import reader, toy
from tests.recipes import RECIPES

muon, nanochat = RECIPES["muon"], RECIPES["nanochat"]

PARAMS = {"wte": jnp.ones((5, 4)), "w": jnp.ones((4, 6)), "bias": jnp.ones(6)}
MATRIX = {"w": jnp.ones((4, 6))}
MESH = jax.make_mesh((1,), ("data",), (jax.sharding.AxisType.Auto,))
ROW, NAN, NONE = jnp.ones((1, 6)), float("nan"), lambda matrices: None


def loss(params, batch):
    return jnp.sum(params["w"]) * jnp.mean(batch)


def read_as(rules, **recipe):
    """Muon with rules for the reading of its parameters."""
    return muon(matrices=reader(rules), **recipe)


def known(params, **settings):
    """What is read of other parameters."""
    return reader(**settings)(params)


def injected(recipe=nanochat, **settings):
    labels = {"wte": "adamw", "?*": "muon"}
    return optax.inject_hyperparams(recipe)(**{"matrices": labels} | settings)


def on_mesh(**settings):
    return jm.on_mesh(muon(), MESH, **settings)


def init(tx, params=PARAMS):
    tx.init(params)


def step(tx, params=MATRIX, grads=None, state=None):
    state = tx.init(params) if state is None else state
    return tx.update(params if grads is None else grads, state, params)


def resumed(tx, other):
    """A step from the state of another optimizer."""
    step(tx, PARAMS, state=other.init(PARAMS))


def as_matrices(matrices, piece=None):
    return jm.as_matrices(piece or jm.orthogonalize(), matrices)


MOUN, LABELS = {"w": "moun", "wte": "adamw"}, {"wte": "adamw", "?*": "muon"}
NORMUON = jm.scale_by_normuon()
# The words of an error, and the wrong use that raises it: at once,
WRONG = {
    "learning_rate=-0.1; expected a finite number of": lambda: muon(learning_rate=-0.1),
    "learning_rate=True; expected": lambda: muon(learning_rate=True),
    "learning_rate=Array([1., 1.]": lambda: muon(learning_rate=jnp.ones(2)),
    "weight_decay=nan; expected": lambda: nanochat(weight_decay=NAN),
    "momentum=1.0; expected": lambda: muon(momentum=1.0),
    "beta2=1.0; expected": lambda: RECIPES["normuon"](beta2=1.0),
    "rms=0.0; expected a finite": lambda: jm.normalize_frobenius(0.0),
    "balance=1.5; expected a finite number in [0, 1]": lambda: jm.clip_qk(
        1.0, balance=1.5
    ),
    "params=None; expected the parameters": lambda: jm.find_matrices(None),
    "function=3; expected a function, as in": lambda: jm.find_matrices(PARAMS, 3),
    "parts={'q'}; expected names in their order": lambda: jm.Split({"q"}),
    "parts='qkv'; expected names in their order": lambda: jm.Split("qkv"),
    "parts={'q': 1.5}; expected names in their order": lambda: jm.Split({"q": 1.5}),
    "beta2=1.0; expected a": lambda: nanochat(beta2=1.0),
    "labels of groups=['adamw']; expected others": lambda: nanochat(
        groups={"adamw": optax.sgd(0.1)}
    ),
    "parts=12; expected names in their order, or names with widths, or Split.heads": (
        lambda: jm.Split(12)
    ),
    "cushion=2.0; expected a finite": lambda: polar_express_coefficients(
        5, cushion=2.0
    ),
    "ns_steps=2.5; expected a Python integer": lambda: muon(ns_steps=2.5),
    "ns_steps=True; expected a Python integer": lambda: muon(ns_steps=True),
    "such as sgd(1e-3)": lambda: nanochat(groups={"x": optax.sgd}),
    "tx=sgd; expected an optax transform": lambda: jm.as_matrices(optax.sgd, toy),
    "an optax transform, such as orthogonalize(1e-3)": lambda: jm.as_matrices(
        jm.orthogonalize, toy
    ),
    "groups['x']=<lambda>; expected": lambda: nanochat(groups={"x": NONE}),
    "['w']=-1.0; expected a finite number": lambda: jm.scale_by_path({"w": -1.0}),
    "gather_dtype='int8'; expected a dtype of": lambda: on_mesh(gather_dtype="int8"),
    "='float16'; expected one of 'float64'": lambda: muon(mu_dtype="float16"),
    "norm=array(['a', 'b'], dtype='<U1'); expected one of": lambda: jm.NewtonSchulz(
        norm=np.array(["a", "b"])
    ),
    "adjust_lr_fn='rms'; expected": lambda: muon(adjust_lr_fn="rms"),
    "='float32'; expected one of 'int8'": lambda: jm.keep_residual(muon(), "float32"),
    "labels of groups=['muon']; expected others than": lambda: muon(
        groups={"muon": muon()}
    ),
    "such as PolarExpress()": lambda: muon(polar=jm.NewtonSchulz),
    "jax_muon.on_mesh returns, around all other transforms": lambda: jm.verify(
        muon(), PARAMS
    ),
    "expected an optax transform": lambda: muon(adamw=optax.adamw),
    "matrices='muon'; expected jax_muon.find_matrices(params": lambda: muon(
        matrices="muon"
    ),
    "matrices=None; expected jax_muon.find_matrices(params, loss_fn": lambda: jm.muon(
        0.1, matrices=None
    ),
    "adamw=0.001; expected an optax transform": lambda: muon(adamw=1e-3),
    "ns_steps=4; expected None beside polar=": lambda: muon(
        ns_steps=4, polar=jm.ExactPolar()
    ),
    "dtype='nonsense'; expected None beside polar=": lambda: muon(
        dtype="nonsense", polar=jm.ExactPolar()
    ),
    "version='2026-08'; expected one of '2026-01', '2026-03'": lambda: nanochat(
        version="2026-08"
    ),
}
WRONG |= {  # at init,
    "divide={'data'}; expected a string, or": lambda: init(on_mesh(divide={"data"})),
    "divide='model'; expected axes": lambda: init(on_mesh(divide="model")),
    "static_args=('ns_steps',)": lambda: init(injected(ns_steps=5)),
    "static_args=('polar',)": lambda: init(injected(polar=jm.PolarExpress())),
    "such as PolarExpress(); under optax.inject_hyperparams name it": lambda: init(
        injected(polar=jnp.tanh)
    ),
    "static_args=('matrices',)": lambda: init(injected(matrices=toy)),
    "static_args=('weight_decay_mask',)": lambda: init(
        injected(weight_decay_mask=lambda tree: tree)
    ),
    "static_args=('adjust_lr_fn',)": lambda: init(
        injected(muon, adjust_lr_fn=lambda *fan: max(fan) ** 0.5)
    ),
    "static_args=('mask',)": lambda: init(
        optax.inject_hyperparams(jm.adamw)(0.1, mask=lambda tree: tree)
    ),
    "no transform for the label 'adamw' of bias, wte; expected jax_muon.adamw(": (
        lambda: init(jm.nanochat(0.1, matrices=toy))
    ),
    "labels of groups=['frozn']; expected those of parameters, adamw, muon": lambda: (
        init(muon(groups={"frozn": optax.set_to_zero()}))
    ),
    "'bias' of shape (6,) has the label 'adamw', but a transform of matrices": (
        lambda: init(as_matrices(known(PARAMS, rules=LABELS)))
    ),
    "'bias' of shape (6,): with dtype float32 it cannot be": lambda: init(
        jm.orthogonalize()
    ),
    "use the piece within jax_muon.as_matrices(tx, matrices), on": lambda: init(
        jm.hyperball(0.1)
    ),
    "rules: 'wte' matches no parameter": lambda: init(as_matrices(LABELS), MATRIX),
    "matrices=None; expected jax_muon.find_matrices(params, lo": lambda: as_matrices(
        None
    ),
    "not a flat vector: unflatten it first": lambda: init(
        optax.flatten(muon(matrices=known(MATRIX))), MATRIX
    ),
    "one vector, as optax.flatten makes: unflatten before": lambda: init(
        optax.flatten(jm.orthogonalize()), MATRIX
    ),
    "of these: a tree that is one array, as inside optax.flatten": lambda: init(
        optax.flatten(muon(matrices={"w": "muon"})), MATRIX
    ),
    "rules=['frozen']; expected patterns with labels, such as {'embed': 'adamw'}": (
        lambda: init(read_as(["frozen"]))
    ),
    "joins={'w': 0.5}: K=0.5; expected a Python int": lambda: known(
        MATRIX, joins={"w": 0.5}
    ),
    "no transform for the label 'moun' of w; expected one in groups, or one of": (
        lambda: init(read_as(MOUN))
    ),
    "matrices(params)=None; expected jax_muon.find_matrices(params": lambda: init(
        muon(matrices=NONE)
    ),
    "'w': 'adamw or MuonDimensionNumbers(in, out)',  # (2": lambda: init(
        as_matrices(reader({"w": "x"})), {"w": jnp.ones((2, 4, 6))}
    ),
    "'bias' was not read, only w": lambda: init(muon(matrices=known(MATRIX))),
    "params at 'layers'=2; expected arrays": lambda: init(
        nanochat(), MATRIX | {"layers": 2}
    ),
    "two parameters have the path 'a/b'": lambda: init(
        nanochat(), {"a/b": jnp.ones((4, 6)), "a": {"b": jnp.ones((4, 6))}}
    ),
    "dtype int32, which AdamW cannot train; use": lambda: init(
        nanochat(), {"z": jnp.zeros((), "int32")}
    ),
    "dtype float8_e4m3fn, which AdamW cannot train": lambda: init(
        nanochat(matrices={}), {"z": jnp.ones((4, 6), "float8_e4m3fn")}
    ),
}
WRONG |= {  # or at update
    "adjust_lr_fn(4, 6)=-1.0; expected": lambda: step(
        muon(adjust_lr_fn=lambda *fan: -1.0)
    ),
    "made None of shape None out": lambda: step(muon(polar=lambda x: (x, x))),
    "made complex64 of shape (1, 4, 6) out": lambda: step(
        muon(polar=lambda x: x.astype("complex64"))
    ),
    "of shape (1, 6, 4) out of float32 of shape (1, 4, 6)": lambda: step(
        jm.orthogonalize(lambda x: x.mT)
    ),
    "'w' of shape (4, 6) was read with (6, 4)": lambda: step(
        muon(matrices=known({"w": jnp.ones((6, 4))}))
    ),
    "'w' of shape (3, 4, 6) was read with (4, 6)": lambda: init(
        muon(matrices=known(MATRIX)), {"w": jnp.ones((3, 4, 6))}
    ),
    "hyperball needs the parameters": lambda: jm.hyperball(0.1).update(MATRIX, None),
    "keep_residual needs the parameters": lambda: jm.keep_residual(muon()).update(
        MATRIX, None
    ),
    "array 'inner_states/muon/inner_state/1/1/count': none": lambda: resumed(
        nanochat(), muon()
    ),
    "inner_state/1/1/count': int32 of shape (); expected none": lambda: resumed(
        muon(), nanochat()
    ),
    "array 'count': none; expected int32 of shape ()": lambda: step(
        as_matrices(toy, jm.scale_by_normuon()), state=optax.EmptyState()
    ),
    "array 'nu/w': float32 of shape (1, 6); expected float32 of shape (2, 4, 1)": (
        lambda: step(
            as_matrices(known(MATRIX, splits={"w": jm.Split.heads(2)}), NORMUON),
            state=as_matrices(toy, NORMUON).init(MATRIX),
        )
    ),
    "gradient 'w': float32 of shape (1, 6); expected": lambda: step(
        jm.with_splits(optax.adamw(0.1), {"w": jm.Split.heads(2)}), grads={"w": ROW}
    ),
    "0/mu/w': float32 of shape (4, 6); expected int8": lambda: resumed(
        muon(mu_dtype="int8"), muon()
    ),
    "array 'inner_states/adamw/inner_state/0/count' is in dicts; expected": lambda: (
        step(
            muon(), PARAMS, state=flax.serialization.to_state_dict(muon().init(PARAMS))
        )
    ),
    "the weight decay says nothing of parameter 'w', but of wte": lambda: step(
        muon(weight_decay=0.1, weight_decay_mask={"wte": True}), PARAMS
    ),
    "the weight decay has x; expected parameters, or modules around them: ": lambda: (
        step(muon(weight_decay=0.1, weight_decay_mask={"x": True, "w": True}))
    ),
    "weight_decay_mask=False; expected True and False, in a tree": lambda: muon(
        weight_decay_mask=False
    ),
    "mask at 'w'='adamw'; expected True or False": lambda: step(
        muon(weight_decay=0.1, weight_decay_mask={"w": "adamw"})
    ),
}


@pytest.mark.parametrize("words", WRONG)
def test_wrong_uses(words):
    with pytest.raises((KeyError, ValueError), match=re.escape(words)):
        WRONG[words]()


def test_numbers_of_numpy_are_numbers():
    rates = {"learning_rate": np.float16(0.5), "momentum": np.asarray(0.75)}
    assert muon(**rates, ns_steps=np.int32(3))
    assert muon(learning_rate=jnp.float32(0.5))


# --- gradients and states of other parameters, in recipes, `as_matrices`, `on_mesh` ---

CHECKED = {
    "a recipe": read_as({"w": "muon"}),
    "AdamW in a recipe": read_as("adamw", adamw=optax.adamw(0.1)),
    "as_matrices": as_matrices(toy, jm.scale_by_momentum()),
    "on_mesh": jm.on_mesh(optax.adamw(0.1), MESH),
}
WRONG_GRADIENTS = {
    "'w': float32 of shape (1, 6); expected float32 of shape (4, 6)": {
        "w": jnp.ones((1, 6))
    },
    "gradient 'w': none; expected": {"w": None},
    "'z': float32 of shape (3,); expected none, like the parameter": {"z": jnp.ones(3)},
    "'w': int32 of shape (4, 6); expected float32": {"w": jnp.ones((4, 6), int)},
}


@pytest.mark.filterwarnings("ignore:no parameter is a matrix")
@pytest.mark.parametrize("tx", CHECKED.values(), ids=CHECKED)
def test_gradients_and_states_of_other_shapes(tx):
    """optax.adamw alone would broadcast (1, 6) against (4, 6)."""
    for words, wrong in WRONG_GRADIENTS.items():
        with pytest.raises(ValueError, match=re.escape(words)):
            step(tx, MATRIX, MATRIX | wrong)
    one = {"w": jnp.ones((1, 6))}
    for old, new, size in ((one, MATRIX, 4), (MATRIX, one, 1)):
        with pytest.raises(ValueError, match=rf"shape .*; expected .* \({size}, 6\)"):
            step(tx, new, state=tx.init(old))


PIECES = {
    "momentum": jm.scale_by_momentum(),
    "int8 momentum": jm.scale_by_momentum(mu_dtype="int8"),
    "scale_by_normuon": as_matrices(toy, jm.scale_by_normuon()),
    "hyperball": as_matrices(toy, jm.hyperball(0.1)),
    "a recipe": muon(adamw=optax.sgd(0.1)),
}


@pytest.mark.parametrize("name", PIECES)
def test_states_of_other_parameters(name):
    """By place, the second of two matrices would get what is known of the first."""
    tx, two, one = PIECES[name], jnp.ones((4, 6)), jnp.ones((1, 1))
    state = tx.init({"a": two, "b": two})
    with pytest.raises((ValueError, KeyError), match=r"a'|c'"):
        step(tx, {"b": two, "c": two}, state=state)
    if name != "hyperball":  # its radii have one shape for all matrices
        with pytest.raises(ValueError, match="shape"):
            step(tx, {"a": one, "b": one}, state=state)
