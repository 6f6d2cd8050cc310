"""Wrong arguments of every public function: errors with name, value, what is expected.

A table: for each argument of each function its kind, and for each kind what is wrong.
"""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_muon as jm
from tests.reading import reader

NAN, INF = float("nan"), float("inf")
PARAMS = {"wte": jnp.ones((5, 4)), "w": jnp.ones((4, 6))}
LAYERS = {f"{i}/q": jnp.ones((4, 6)) for i in "01"}
ATTENTION = {"attn": {name: jnp.ones((4, 4)) for name in "qk"}}
MESH = jax.make_mesh((1,), ("data",), (jax.sharding.AxisType.Auto,))
HEADS = jnp.ones((1, 8, 2, 4))

NO_NUMBERS = ["1", None, NAN, INF, True, np.ones(2), jnp.ones(2)]
NO_RATES = [*NO_NUMBERS, lambda count: jnp.ones(2), lambda count: None, float]
NO_COUNTS = ["3", None, 1.5, True, NAN]
NO_TREES = ["x", None, {"w": "x"}]
WRONG = {
    "rate": [*NO_RATES, -1.0, np.float32(-1)],
    "decay": [*NO_RATES, -0.1, 1, jnp.float32(1.5)],
    "decay or None": ["1", NAN, True, jnp.ones(2), -0.1, 1, jnp.float32(1.5)],
    "number": NO_NUMBERS,
    "number or None": [x for x in NO_NUMBERS if x is not None],
    "at least 0": [*NO_NUMBERS, -1.0],
    "above 0": [*NO_NUMBERS, 0, -1.0],
    "above 0, or None": [*(x for x in NO_NUMBERS if x is not None), 0, -1.0],
    "share": [*NO_NUMBERS, -0.1, 1.1],
    "lower": [*NO_NUMBERS, 0.0, 1.1],
    "integer": NO_COUNTS,
    "count": [*NO_COUNTS, 0],
    "size": [*NO_COUNTS, -1],
    "steps": [*NO_COUNTS, 0, 10**6],
    "steps or None": ["3", 1.5, True, NAN, 0, 10**6],
    "flag": ["yes", None, 1],
    "flag or None": ["yes", 1],
    "choice": ["nonsense", None, 3],
    "anything": [],
    "stacked arrays": [None, "x", 3],
    "pattern": [None, 3, ("q",)],
    "dtype": ["int8", "nonsense", 3, jnp.int32],
    "momentum dtype": ["float16", "nonsense", 3, jnp.int32],
    "moments": [None, "x", 3],
    "transform": ["adam", None, 3, optax.adam],
    "transform or None": ["adam", 3, optax.adam],
    "function": ["f", None, 3],
    "function or None": ["f", 3],
    "mesh": ["x", None, 3, (1,)],
    "mesh or None": ["x", 3],
    "axes": ["nonsense", 3, (1,), ("data", "data"), None],
    "axis": ["nonsense", 3, (1,), ("data", "data"), None, ()],
    "axes or None": ["nonsense", 3, (1,), ("data", "data")],
    "specs": ["x", 3, {"w": 3}],
    "factors": ["w", 3, None, {"w": -1.0}, {"w": "1"}, {"w": NAN}, {3: 1.0}],
    "factors or None": ["w", 3, {"w": -1.0}, {"w": "1"}, {"w": NAN}, {3: 1.0}],
    "mask": ["w", 3, {"w": "yes"}],
    "groups": ["x", 3, None, {}, {"x": 3}, {3: optax.sgd(1.0)}],
    "groups or None": ["x", 3, {"x": 3}, {3: optax.sgd(1.0)}],
    "matrices": ["x", 3, {"w": "muon"}, jm.read],
    "reader": ["x", 3, {"w": "muon"}],
    "tree": NO_TREES,
    "rules": [3, {"w": 3}, {3: "muon"}],
    "splits": [None, "x", 3, {"w": 3}, {3: jm.Split(2)}],
    "splits or None": ["x", 3, {"w": 3}, {3: jm.Split(2)}],
    "parts": [None, 2.0, "qk", 0, True, {}, (), ("q", "q"), {"q": 1.5}, {"q": -1}],
    "joins": ["x", 0, 1.5, {"x": "2"}, {"x": 0}, {3: 2}],
    "names": ["x", 3, {"w": "in"}, {"w": (3, 4)}, {3: ("in", "out")}],
    "table": ["x", 3, {"d_model": 3}, {3: "embed"}],
    "out_in": ["x", 3],
    "coefficients": ["nonsense", None, 3, (1.0, 2.0), (NAN, 1.0, 1.0)],
    "heads": ["x", None, 3.0, HEADS.astype(int)],
    "seen": ["x", 3.0, HEADS],
    "max_aux": [3, None, (3,)],
    "options": ["x", 3, {3: 1}],
}

RECIPE = {
    "learning_rate": "rate",
    "momentum": "decay",
    "weight_decay": "rate",
    "steps": "steps or None",
    "dtype": "dtype",
    "polar": "function or None",
    "momentum_dtype": "momentum dtype",
    "weight_decay_mask": "mask",
    "adamw": "transform",
    "groups": "groups or None",
    "matrices": "reader",
}
SPHERE = {x: RECIPE[x] for x in RECIPE if not x.startswith("weight_decay")}
SPHERE["learning_rates"] = "factors or None"
POLAR = {
    "norm_factor": "above 0",
    "eps": "above 0",
    "norm": "choice",
    "dtype": "dtype",
    "form": "choice",
    "symmetric": "choice",
}
SCHEDULE = {"lower": "lower", "cushion": "share", "safety": "share"}
PIECE = {"eps": "above 0", "matrices": "matrices"}

# What a function is given else, and of which kind each of its arguments is.
TABLE = {
    "ExactPolar": ({}, {}),
    "Moments": (
        {"count": 0, "first": {}},
        {"count": "size", **dict.fromkeys(("first", "second", "means"), "anything")},
    ),
    "NewtonSchulz": (
        {},
        {"steps": "steps or None", "coefficients": "coefficients", **POLAR},
    ),
    "PolarExpress": ({}, {"steps": "steps", **SCHEDULE, **POLAR}),
    "Split": (
        {"parts": 2},
        {"parts": "parts", "axis": "integer", "learning_rates": "factors"},
    ),
    "abstract_state": (
        {"tx": optax.sgd(1.0), "params": PARAMS},
        {"tx": "transform", "params": "tree", "mesh": "mesh or None"},
    ),
    "add_cautious_decayed_weights": ({}, {"weight_decay": "rate", "mask": "mask"}),
    "clip_qk": (
        {"threshold": 1.0},
        {
            "threshold": "above 0",
            "query": "pattern",
            "key": "pattern",
            "balance": "share",
            "layers_axis": "size",
        },
    ),
    "describe": (
        {"tx": optax.sgd(1.0), "params": PARAMS},
        {"tx": "transform", "params": "tree"},
    ),
    "equilibrate_rows": ({}, PIECE),
    "gpu_options": (
        {"params": PARAMS, "mesh": MESH},
        {
            "params": "tree",
            "mesh": "mesh",
            "axis": "axes or None",
            "gathers_first": "flag",
            "layers": "flag or None",
        },
    ),
    "hyperball": (
        {"learning_rate": 0.1},
        {"learning_rate": "rate", "learning_rates": "factors or None", **PIECE},
    ),
    "make_train_step": (
        {"loss_fn": lambda p, b: 0.0, "tx": optax.sgd(1.0), "mesh": MESH},
        {
            "loss_fn": "function",
            "tx": "transform",
            "mesh": "mesh",
            "axis": "axis",
            "specs": "specs",
            "divide": "axes or None",
            "parameters": "choice",
            "min_size": "size",
            "has_aux": "flag",
            "max_aux": "max_aux",
            "weighted": "flag",
            "microbatches": "count",
            "accumulate": "choice",
            "reduce_dtype": "dtype",
            "gather_dtype": "dtype",
            "gather": "choice",
            "keep_gathered": "flag",
            "donate": "flag",
            "compiler_options": "options",
        },
    ),
    "max_attention_logits": (
        {"q": HEADS, "k": HEADS},
        {
            "q": "heads",
            "k": "heads",
            "scale": "number or None",
            "causal": "flag",
            "mask": "seen",
            "block_size": "count",
        },
    ),
    "moonlight": (
        {},
        RECIPE | {"adamw": "transform or None"},
    ),
    "muon": (
        {},
        RECIPE
        | {
            "lookahead": "flag",
            "bias_correction": "flag",
            "shape_rule": "choice",
        },
    ),
    "muonh": ({}, SPHERE),
    "nanochat": (
        {},
        RECIPE
        | {
            "beta2": "decay or None",
            "edition": "choice",
        },
    ),
    "nesterov": (
        {},
        {
            "decay": "decay",
            "lookahead": "flag",
            "bias_correction": "flag",
            "accumulator_dtype": "momentum dtype",
        },
    ),
    "normalize_frobenius": ({}, {"rms": "above 0, or None", **PIECE}),
    "normuon": ({}, RECIPE | {"beta2": "decay", "lookahead": "flag"}),
    "normuonh": ({}, SPHERE | {"beta2": "decay", "lookahead": "flag"}),
    "observe": (
        {"inner": optax.sgd(1.0)},
        {"inner": "transform", "matrices": "reader"},
    ),
    "on_auto_axes": ({"tx": optax.sgd(1.0)}, {"tx": "transform"}),
    "on_mesh": (
        {"tx": optax.sgd(1.0), "mesh": MESH},
        {
            "tx": "transform",
            "mesh": "mesh",
            "specs": "specs",
            "divide": "axes",
            "min_size": "size",
            "gather_dtype": "dtype",
        },
    ),
    "orthogonalize": (
        {},
        {
            "polar": "function",
            "matrices": "matrices",
            "small": "size",
            "max_stack": "count",
        },
    ),
    "partition": (
        {"groups": {"muon": optax.sgd(1.0), "adamw": optax.sgd(1.0)}},
        {"groups": "groups", "matrices": "reader"},
    ),
    "polar_express_coefficients": ({"steps": 5}, {"steps": "steps", **SCHEDULE}),
    "read": (
        {"params": PARAMS},
        {
            "params": "tree",
            "rules": "rules",
            "names": "names",
            "table": "table",
            "out_in": "out_in",
            "splits": "splits or None",
            "joins": "joins",
            "strict": "flag",
        },
    ),
    "scale_by_normuon": ({}, {"decay": "decay", "axis": "choice", **PIECE}),
    "scale_by_path": ({"factors": {}}, {"factors": "factors"}),
    "scan_layers": (
        {
            "block": lambda carry, layer: (carry, None),
            "carry": 0.0,
            "layers": LAYERS,
            "mesh": MESH,
        },
        {
            "block": "function",
            "carry": "anything",
            "layers": "stacked arrays",
            "mesh": "mesh",
            "specs": "specs",
            "axis": "axes or None",
            "keep_gathered": "flag",
            "reverse": "flag",
            "unroll": "count",
        },
    ),
    "scale_by_shape": ({}, {"rule": "choice", "matrices": "matrices"}),
    "skip_nonfinite": ({"inner": optax.sgd(1.0)}, {"inner": "transform"}),
    "take_over": (
        {"tx": optax.sgd(1.0), "params": PARAMS, "moments": jm.Moments(0, {})},
        {"tx": "transform", "params": "tree", "moments": "moments"},
    ),
    "teon": ({}, RECIPE | {"lookahead": "flag", "shape_rule": "choice"}),
    "verify": (
        {"tx": optax.sgd(1.0), "params": PARAMS, "mesh": MESH},
        {
            "tx": "transform",
            "params": "tree",
            "mesh": "mesh",
            "specs": "specs",
            "divide": "axes",
            "min_size": "size",
            "gather_dtype": "dtype",
            "steps": "count",
            "seed": "size",
            "bound": "above 0, or None",
        },
    ),
    "with_splits": (
        {"inner": optax.sgd(1.0), "splits": {}},
        {"inner": "transform", "splits": "splits"},
    ),
}
# Made by functions, with nothing for a user to say.
RESULTS = {
    "Matrices",
    "MatrixAxes",
    "Parameter",
    "TrainStep",
}


def params_of(name):
    return {"teon": LAYERS, "clip_qk": ATTENTION}.get(name, PARAMS)


def use(name, made):
    """What depends on a tree or a step is checked in these."""
    params = params_of(name)
    if isinstance(made, optax.GradientTransformation):
        extra = {"max_logits": jnp.ones(2)} if name == "clip_qk" else {}
        state = made.init(params)
        jax.eval_shape(lambda s: made.update(params, s, params, **extra), state)


def shown(wrong):
    """How an error has to show a value: of a mapping, the entry that is wrong."""
    if isinstance(wrong, dict) and wrong:
        ((key, wrong),) = wrong.items()
        wrong = wrong if isinstance(key, str) else key
    return "" if callable(wrong) or np.ndim(wrong) > 1 else repr(wrong)


def complaint(name, good, argument, wrong):
    """What is not right with the error, or None."""
    what = f"{name}({argument}={wrong!r:.60})"
    try:
        use(name, getattr(jm, name)(**{**good, argument: wrong}))
    except (ValueError, TypeError) as error:
        missing = [
            x for x in (argument, shown(wrong), "expected") if x not in str(error)
        ]
        return f"{what}: no {missing} in {error}" if missing else None
    except Exception as error:
        return f"{what}: {type(error).__name__}: {error}"
    return f"{what}: no error"


@pytest.mark.parametrize("name", sorted(set(jm.__all__) - RESULTS))
def test_wrong_arguments(name):
    good, kinds = TABLE[name]
    parameters = inspect.signature(getattr(jm, name)).parameters.values()
    assert set(kinds) == {x.name for x in parameters if x.kind != x.VAR_KEYWORD}
    use(name, getattr(jm, name)(**good))
    complaints = [
        complaint(name, good, argument, wrong)
        for argument, kind in kinds.items()
        for wrong in WRONG[kind]
    ]
    assert not any(complaints), "\n".join(filter(None, complaints))


# --- trees ----------------------------------------------------------------------------

KEY = jax.random.key(0)


@pytest.mark.parametrize(
    "leaf", [KEY, jnp.ones(4, "float8_e4m3fn"), jnp.ones((4, 6), "float8_e4m3fn")]
)
def test_leaves_that_nothing_can_train(leaf):
    with pytest.raises(ValueError, match=f"'z' .*{leaf.dtype}.* expected .* label"):
        jm.nanochat().init({"w": jnp.ones((4, 6)), "z": leaf})


# With what is wrong, and the words about it.
WRONG_GRADIENTS = {
    "broadcastable": ({"w": jnp.ones((1, 6))}, r"'w' has shape \(1, 6\); .*\(4, 6\)"),
    "missing": ({"w": None}, "no gradient at 'w'; expected"),
    "another": ({"z": jnp.ones(3)}, "gradient at 'z'.* there are w"),
    "integers": ({"w": jnp.ones((4, 6), int)}, "'w' has dtype int32; expected .*float"),
}
TRANSFORMS = {
    "nesterov": jm.nesterov,
    "scale_by_normuon": jm.scale_by_normuon,
    "orthogonalize": jm.orthogonalize,
    "equilibrate_rows": jm.equilibrate_rows,
    "scale_by_path": lambda: jm.scale_by_path({}),
    "add_cautious_decayed_weights": jm.add_cautious_decayed_weights,
    "hyperball": lambda: jm.hyperball(0.1),
    "skip_nonfinite": lambda: jm.skip_nonfinite(optax.sgd(0.1)),
    "with_splits": lambda: jm.with_splits(optax.sgd(0.1), {}),
    "on_mesh": lambda: jm.on_mesh(optax.sgd(0.1), MESH),
    "a recipe": jm.muon,
}


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("wrong", WRONG_GRADIENTS)
def test_gradients_of_other_parameters(name, wrong):
    params = {"w": jnp.ones((4, 6))}
    grads, words = WRONG_GRADIENTS[wrong]
    tx = TRANSFORMS[name]()
    state = tx.init(params)
    with pytest.raises(ValueError, match=words):
        tx.update({**params, **grads}, state, params)


@pytest.mark.parametrize("factory", [jm.nesterov, jm.scale_by_normuon, jm.muon])
def test_states_of_others(factory):
    """Of another transform; and, without parameters at update, of other parameters."""
    tx, params = factory(), {"w": jnp.ones((4, 6)), "bias": jnp.ones(6)}
    params = params if factory is jm.muon else {"w": params["w"]}
    with pytest.raises(ValueError, match="the state is a EmptyState; expected"):
        tx.update(params, optax.EmptyState(), params)
    for path in params:
        others = {**params, path: jnp.concatenate([params[path], params[path]])}
        with pytest.raises(ValueError, match=f"'{path}'.* has shape .*; expected"):
            tx.update(params, tx.init(others), params)


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [(1, 4, r"state.*\['w'\]"), (4, 1, "update 'w'")],
)
def test_foreign_states_of_others(old, new, what):
    """optax.adamw would broadcast a state of (1, 6) against gradients of (4, 6)."""
    tx = jm.partition({"adamw": optax.adamw(0.1)}, reader("adamw"))
    state, grads = tx.init({"w": jnp.ones((old, 6))}), {"w": jnp.ones((new, 6))}
    with pytest.raises(
        ValueError, match=rf"{what} has shape .*; expected \({new}, 6\)"
    ):
        tx.update(grads, state, grads)


def test_a_polar_factor_that_turns_its_matrices():
    with pytest.raises(ValueError, match=r"shape \(1, 6, 4\) out of \(1, 4, 6\)"):
        tx = jm.orthogonalize(lambda x: x.mT)
        tx.update({"w": jnp.ones((4, 6))}, optax.EmptyState())
