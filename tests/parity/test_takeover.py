"""Going on with other optimizers' runs: the same trajectory, to rounding.

Each case runs the other optimizer for some steps, takes it over, and goes on with both.
The bar is that of the parity suite, 2e-5 of the distance travelled after the takeover.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from optax.contrib import MuonDimensionNumbers

import jax_muon as jm
from examples.from_torch import from_dion, from_nanochat, from_torch
from jax_muon import paths
from parity import weights
from parity.references import JORDAN_SUM, Muon, MuonAdamW, NorMuon, newton_schulz
from tests.distributed.layouts import mesh_of
from tests.reading import reader

BEFORE, AFTER, BAR = 7, 6, 2e-5
# By PyTorch's name; three of one shape, so that two ranks need padding.
SHAPES = {
    "wte.weight": (40, 32),
    "blocks.0.up.weight": (24, 6),
    "blocks.1.up.weight": (24, 6),
    "blocks.2.up.weight": (24, 6),
    "blocks.0.down.weight": (6, 24),
    "norm.weight": (6,),
}
MATRICES = [name for name in SHAPES if "blocks" in name]
OTHERS = [name for name in SHAPES if "blocks" not in name]
KERNELS = {name: shape[::-1] for name, shape in SHAPES.items() if "blocks" in name}
LIKE = {
    "wte": {"embedding": jax.ShapeDtypeStruct((40, 32), jnp.float32)},
    "blocks": {
        str(i): {"up": {"kernel": jax.ShapeDtypeStruct((6, 24), jnp.float32)}}
        for i in range(3)
    },
    "norm": {"scale": jax.ShapeDtypeStruct((6,), jnp.float32)},
}
LIKE["blocks"]["0"]["down"] = {"kernel": jax.ShapeDtypeStruct((24, 6), jnp.float32)}
F32 = {"dtype": "float32"}
ADAMW = optax.adamw(0.01, 0.8, 0.95, 1e-10, weight_decay=0.0)  # nanochat's


def to_params(arrays):
    return weights.to_flax(arrays, LIKE)


def draws(seed, count):
    rng = np.random.default_rng(seed)
    return [
        {n: rng.standard_normal(s).astype(np.float32) for n, s in SHAPES.items()}
        for _ in range(count)
    ]


(START,) = draws(0, 1)
GRADS = draws(1, BEFORE + AFTER)


class Theirs:
    """PyTorch's parameters, and the optimizers that move them."""

    def __init__(self, *optimizers):
        """Each is a function of the parameters by name."""
        self.params = {
            name: torch.nn.Parameter(torch.tensor(x)) for name, x in START.items()
        }
        self.optimizers = [make(self.params) for make in optimizers]

    def run(self, grads):
        for grad in grads:
            for name, p in self.params.items():
                p.grad = torch.tensor(grad[name])
            for optimizer in self.optimizers:
                optimizer.step()
        return {name: p.detach().numpy().copy() for name, p in self.params.items()}


def steps(tx, params, state, grads, to_params=to_params):
    """Parameters and state after these gradients."""
    state = tx.init(params) if state is None else state
    update = jax.jit(tx.update)
    for grad in grads:
        updates, state = update(to_params(grad), state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def go_on(tx, params, moments, grads, to_params=to_params):
    """Our parameters after more steps."""
    return steps(tx, params, jm.take_over(tx, params, moments), grads, to_params)


def assert_continued(tx, theirs, read, to_params=to_params):
    """Both from here on; `read` gives the moments of their state."""
    middle = to_params(theirs.run(GRADS[:BEFORE]))
    moments = read()
    ours, state = go_on(tx, middle, moments, GRADS[BEFORE:], to_params)
    end = to_params(theirs.run(GRADS[BEFORE:]))
    for (path, a), (_, b), (_, c) in zip(
        *map(paths.leaves_with_paths, (ours, end, middle)), strict=True
    ):
        travelled = np.linalg.norm(b - c)
        assert travelled > 1e-2, path
        assert np.linalg.norm(a - b) / travelled < BAR, path
    return moments, state


def params_of(params, names):
    return [params[name] for name in names]


def adamw(params, names=OTHERS, lr=0.01):
    return torch.optim.AdamW(
        params_of(params, names), lr, (0.9, 0.95), 1e-10, weight_decay=0.1
    )


def ours_beside_adamw(**settings):
    return jm.muon(
        0.02,
        0.95,
        0.1,
        adamw=optax.adamw(0.01, 0.9, 0.95, 1e-10, weight_decay=0.1),
        **F32,
        **settings,
    )


# --- optax ----------------------------------------------------------------------------


@pytest.mark.parametrize("there", [True, False], ids=["to ours", "back"])
@pytest.mark.parametrize("lookahead", [True, False], ids=["nesterov", "plain"])
def test_optax_contrib_muon(lookahead, there):
    """Seven steps in, its bias correction still turns the direction."""
    rate = optax.linear_schedule(0.1, 0.01, 20)
    theirs = optax.contrib.muon(
        rate,
        weight_decay=0.1,
        nesterov=lookahead,
        muon_weight_dimension_numbers=None,
    )
    ours = jm.muon(
        rate,
        0.95,
        0.1,
        lookahead=lookahead,
        bias_correction=True,
        polar=jm.NewtonSchulz(eps=1e-8, **F32),
        groups={"adam": optax.adamw(rate, weight_decay=0.0, nesterov=lookahead)},
        matrices=lambda params: jm.read(
            params,
            rules=jax.tree.map(
                lambda p: MuonDimensionNumbers() if p.ndim == 2 else "adam", params
            ),
        ),
    )
    before, after = (theirs, ours) if there else (ours, theirs)
    middle, state = steps(before, to_params(START), None, GRADS[:BEFORE])
    moved, _ = go_on(after, middle, jm.Moments.of(state), GRADS[BEFORE:])
    end, _ = steps(before, middle, state, GRADS[BEFORE:])
    distance, travelled = (
        optax.tree.norm(optax.tree.sub(a, b)) for a, b in ((moved, end), (middle, end))
    )
    assert distance / travelled < BAR


def test_int8_momentum_and_means_go_on_in_another_recipe_of_ours():
    """NorMuon's means and both moments of Adam are carried over bit for bit."""
    params = to_params(START)
    tx = jm.nanochat(adamw=ADAMW, momentum_dtype="int8", **F32)
    params, state = steps(tx, params, None, GRADS[:3])
    taken = jm.take_over(tx, params, jm.Moments.of(state))
    for (path, a), (_, b) in zip(
        *map(paths.leaves_with_paths, (taken, state)), strict=True
    ):
        if path.startswith("inner_states/muon/inner_state/0/"):  # rounded again
            continue
        np.testing.assert_array_equal(a, b, err_msg=path)
    mu, again = (
        jax.tree.map(lambda x, y: x * y, *s.inner_states["muon"].inner_state[0][1:])
        for s in (state, taken)
    )
    for a, b in zip(*map(jax.tree.leaves, (mu, again)), strict=True):
        np.testing.assert_allclose(a, b, atol=1.001 * float(jnp.abs(a).max()) / 127)


def test_optax_adamw_for_all():
    """AdamW as before, and its first moment as the momentum of matrices from now on."""
    params = to_params(START)
    adam = optax.adamw(0.01)
    state = adam.init(params)
    for grad in GRADS[:3]:
        _, state = adam.update(to_params(grad), state, params)
    moments = jm.Moments.of(state)
    assert moments.count == 3
    taken = jm.take_over(jm.nanochat(), params, moments)
    muon, adamw = taken.inner_states["muon"], taken.inner_states["adamw"]
    np.testing.assert_array_equal(
        muon.inner_state[0].mu["blocks"]["1"]["up"]["kernel"],
        state[0].mu["blocks"]["1"]["up"]["kernel"],
    )
    np.testing.assert_array_equal(
        adamw.inner_state[0].nu["norm"]["scale"], state[0].nu["norm"]["scale"]
    )
    means = muon.inner_state[2].nu["blocks"]["1"]["up"]["kernel"]
    assert not np.any(means)  # Adam's squares are none of NorMuon's


# --- PyTorch --------------------------------------------------------------------------


def in_float32(monkeypatch):
    """torch.optim.Muon has its polar factor in bfloat16 only; the rest is as it is."""

    def polar(update, coefficients, steps, eps):
        del coefficients, eps
        return newton_schulz(update[None], steps, dtype=torch.float32)[0]

    monkeypatch.setattr(torch.optim._muon, "_zeropower_via_newtonschulz", polar)


def state_dicts(theirs, *names):
    return [
        (optimizer.state_dict(), own)
        for optimizer, own in zip(theirs.optimizers, names, strict=True)
    ]


def test_torch_optim_muon(monkeypatch):
    in_float32(monkeypatch)
    theirs = Theirs(
        lambda p: torch.optim.Muon(
            params_of(p, MATRICES), 0.02, weight_decay=0.1, momentum=0.95
        ),
        adamw,
    )
    moments, state = assert_continued(
        ours_beside_adamw(),
        theirs,
        lambda: from_torch(state_dicts(theirs, MATRICES, OTHERS), START, to_params),
    )
    assert moments.count == BEFORE
    assert state.inner_states["muon"].inner_state[0].count == BEFORE + AFTER


def test_torch_momentum_as_a_sum():
    def muon(params):
        settings = {**JORDAN_SUM, "weight_decay": 0.1, "dtype": torch.float32}
        return Muon(params_of(params, MATRICES), **settings)

    theirs = Theirs(muon, adamw)

    def read():
        (muon, names), rest = state_dicts(theirs, MATRICES, OTHERS)
        states = {
            i: {"momentum_buffer": one["momentum"][0]}
            for i, one in muon["state"].items()
        }
        optimizers = [({**muon, "state": states}, names), rest]
        return from_torch(optimizers, START, to_params, accumulation="sum")

    assert_continued(ours_beside_adamw(), theirs, read)


# --- nanochat's files -----------------------------------------------------------------

ORDER = ["wte.weight", "norm.weight", *MATRICES]
GROUPS = [
    {"kind": "adamw", "params": ["wte.weight"], "lr": 0.01},
    {"kind": "adamw", "params": ["norm.weight"], "lr": 0.01},
    {"kind": "muon", "params": MATRICES[:3], "dtype": torch.float32},
    {"kind": "muon", "params": MATRICES[3:], "dtype": torch.float32},
]


def nanochat(params):
    return MuonAdamW([{**g, "params": params_of(params, g["params"])} for g in GROUPS])


def files(optimizer, params, ranks):
    """What each rank of nanochat saves, from the state of one process."""
    index = {name: i for i, name in enumerate(ORDER)}
    saved = [{"state": {}, "param_groups": []} for _ in range(ranks)]
    for group in GROUPS:
        names = group["params"]
        states = [optimizer.state[params[name]] for name in names]
        for rank, file in enumerate(saved):
            file["param_groups"].append(
                {"kind": group["kind"], "params": [index[name] for name in names]}
            )
            if group["kind"] == "muon":
                chunk = -(-len(names) // ranks)
                stacks = {}
                for key, own in (
                    ("momentum_buffer", "momentum"),
                    ("second_momentum_buffer", "second_moment"),
                ):
                    stack = torch.cat([state[own] for state in states])
                    padding = torch.zeros(chunk * ranks - len(names), *stack.shape[1:])
                    stack = torch.cat([stack, padding])
                    stacks[key] = stack[rank * chunk : (rank + 1) * chunk]
                file["state"][index[names[0]]] = stacks
                continue
            (state,) = states
            whole = params[names[0]].numel() < 1024
            moments = {
                key: state[own] if whole else state[own].chunk(ranks)[rank]
                for key, own in (("exp_avg", "mean"), ("exp_avg_sq", "square"))
            }
            file["state"][index[names[0]]] = {"step": state["count"], **moments}
    return saved


@pytest.mark.parametrize("ranks", [1, 2])
def test_nanochat(ranks):
    theirs = Theirs(nanochat)
    tx = jm.nanochat(adamw=ADAMW, **F32)
    moments, _ = assert_continued(
        tx,
        theirs,
        lambda: from_nanochat(
            files(theirs.optimizers[0], theirs.params, ranks), ORDER, START, to_params
        ),
    )
    assert set(moments.means) == {p for p in moments.first if "blocks" in p}


# --- splits ---------------------------------------------------------------------------


def test_parts_of_a_fused_parameter():
    """Three matrices there, three parts of one here, with NorMuon's means."""
    theirs = Theirs(nanochat)

    def fused(arrays):
        tree = to_params(arrays)
        ups = [tree["blocks"][str(i)].pop("up")["kernel"] for i in range(3)]
        return {**tree, "ups": {"kernel": np.concatenate(ups, axis=1)}}

    def read():
        saved = files(theirs.optimizers[0], theirs.params, 1)
        return from_nanochat(saved, ORDER, START, fused)

    splits = {"ups": jm.Split(("q", "k", "v"))}
    tx = jm.nanochat(adamw=ADAMW, matrices=reader(splits=splits), **F32)
    assert_continued(tx, theirs, read, fused)


@pytest.mark.parametrize("devices", [None, 2])
def test_parts_that_are_a_batch(devices):
    """Heads, say: the momentum gets the batch axis that the parameter gets."""
    tx = jm.muon(matrices=reader(splits={"up": jm.Split(2, axis=0)}))
    if devices is not None:
        tx = jm.on_mesh(tx, mesh_of(devices), divide="data", min_size=1)
    mean = np.arange(32.0).reshape(4, 8)
    tx.init(UP)  # which JAX then remembers
    taken = jm.take_over(tx, UP, jm.Moments(3, {"up": mean}))
    np.testing.assert_array_equal(momentum(taken)["up"], mean.reshape(2, 2, 8))


# --- dion -----------------------------------------------------------------------------


def dion_state(optimizer, algorithm, mu):
    """As dion saves it: whole tensors, a count for each group, momentum as a sum."""
    saved = optimizer.state_dict()
    keys = {"momentum": "momentum", "second_moment": "variance_neuron"}
    keys |= {"exp_avg": "momentum", "exp_avg_sq": "variance"}
    states = {
        i: {
            keys[k]: x.reshape(x.shape[-2:]) if algorithm != "adamw" else x
            for k, x in one.items()
            if k in keys
        }
        for i, one in saved["state"].items()
    }
    groups = [
        {"params": group["params"], "algorithm": algorithm, "mu": mu, "step": BEFORE}
        for group in saved["param_groups"]
    ]
    return {"state": states, "param_groups": groups}


@pytest.mark.parametrize("algorithm", ["muon", "normuon"])
def test_dion(algorithm):
    kind = {"muon": Muon, "normuon": NorMuon}[algorithm]
    settings = {"accumulation": "sum", "weight_decay": 0.1, "dtype": torch.float32}

    def muon(params):
        return kind(params_of(params, MATRICES), **settings)

    tx = ours_beside_adamw()
    if algorithm == "normuon":
        tx = jm.normuon(
            0.02,
            0.95,
            0.1,
            adamw=optax.adamw(0.01, 0.9, 0.95, 1e-10, weight_decay=0.1),
            **F32,
        )
    theirs = Theirs(muon, adamw)

    def read():
        muon, rest = theirs.optimizers
        optimizers = [
            (dion_state(muon, algorithm, 0.95), MATRICES),
            (dion_state(rest, "adamw", 0.95), OTHERS),
        ]
        return from_dion(optimizers, START, to_params)

    assert_continued(tx, theirs, read)


# --- other states ---------------------------------------------------------------------

UP = {"up": jnp.ones((4, 8))}


def momentum(state):
    """Of a recipe."""
    return state.inner_states["muon"].inner_state[0].mu


def moments_of(first, second=()):
    return jm.Moments(1, *({p: np.ones(s) for p, s in x} for x in (first, second)))


OF_UP = moments_of([("up", (4, 8))])


def test_momentum_in_few_bits_is_rounded_as_by_the_last_step():
    grads = {"up": jnp.asarray(np.random.default_rng(0).standard_normal((4, 8)))}
    tx = jm.nesterov(0.75, accumulator_dtype="int8")
    _, state = tx.update(grads, tx.init(UP), UP)
    moments = jm.Moments(1, {"up": 0.25 * grads["up"]})
    taken = jm.take_over(tx, UP, moments)
    np.testing.assert_array_equal(taken.mu["up"], state.mu["up"])


@pytest.mark.parametrize(
    ("wrap", "counter"),
    [
        (lambda tx: optax.chain(tx, optax.scale_by_schedule(lambda n: 1.0)), "count"),
        (lambda tx: optax.conditionally_mask(tx, lambda n: n < 9), "step"),
        (lambda tx: optax.chain(optax.add_noise(0.1, 0.5, 0), tx), "count"),
        (lambda tx: optax.MultiSteps(tx, lambda step: 1 + step), "gradient_step"),
        (jm.observe, "count"),
    ],
    ids=["schedule", "condition", "noise", "multi steps", "observe"],
)
def test_counts_of_steps(wrap, counter):
    params = UP | {"b": jnp.ones(8)}
    moments = moments_of([("up", (4, 8)), ("b", (8,))], [("b", (8,))])
    taken = jm.take_over(wrap(jm.nanochat()), params, moments)
    for name in {"count", counter}:
        counts = optax.tree.get_all_with_path(taken, name)
        assert counts
        assert all(count == 1 for _, count in counts)


def test_counts_of_injected_schedules():
    tx = optax.inject_hyperparams(jm.muon, static_args=("steps",))(lambda n: 0.1 + n)
    taken = jm.take_over(tx, UP, OF_UP)
    _, state = tx.update(UP, taken, UP)
    assert taken.count == 1
    np.testing.assert_allclose(state.hyperparams["learning_rate"], 1.1)


def test_what_counts_for_itself_starts_anew():
    """It lowers the rate by losses that it has seen, and by how many they were."""
    plateau = optax.contrib.reduce_on_plateau(accumulation_size=10)
    taken = jm.take_over(optax.chain(jm.muon(), plateau), UP, OF_UP)
    assert taken[1] == plateau.init(UP)


@pytest.mark.parametrize(
    ("other", "where"),
    {
        "ema": (optax.ema(0.9), r"\[1\].ema\['up'\] of shape \(4, 8\)"),
        "amsgrad": (optax.amsgrad(0.1), r"\[1\]\[0\].mu\['up'\]"),
        "adabelief": (optax.adabelief(0.1), r"\[1\]\[0\].mu"),
        "sgd": (optax.sgd(0.1, momentum=0.9), r"\[1\]\[0\].trace"),
        "lion": (optax.lion(0.1), r"\[1\]\[0\].mu"),
        "masked": (
            optax.masked(optax.adafactor(0.1), {"up": True}),
            r"\[1\].inner_state",
        ),
    }.values(),
)
def test_moments_that_a_run_cannot_fill(other, where):
    with pytest.raises(ValueError, match=f"cannot fill state{where}.*; expected"):
        jm.take_over(optax.chain(jm.muon(), other), UP, OF_UP)


def test_state_lies_as_the_optimizer_lays_it():
    tx = jm.moonlight(momentum=0.75)
    tx = jm.on_mesh(tx, mesh_of(4), divide="data", min_size=1)
    mu, empty = (momentum(x)["up"] for x in (jm.take_over(tx, UP, OF_UP), tx.init(UP)))
    assert mu.sharding == empty.sharding
    assert not mu.sharding.is_fully_replicated
    np.testing.assert_array_equal(mu, np.ones((4, 8)))


# --- bad input ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        ({}, {}, "moments.first has nothing for 'b'; it has nothing at all"),
        (
            {"up": (8, 4), "b": (8,)},
            {"b": (8,)},
            r"of 'up' has shape \(8, 4\), and the state \(4, 8\)",
        ),
        ({"up": (4, 8), "b": (8,)}, {}, "moments.second has nothing for 'b'"),
    ],
)
def test_a_run_that_is_not_of_these_parameters(first, second, words):
    params = UP | {"b": jnp.ones(8)}
    with pytest.raises(ValueError, match=words):
        jm.take_over(jm.nanochat(), params, moments_of(first.items(), second.items()))


def test_means_over_another_axis():
    """Of a kernel with more inputs nanochat has means by input, normuon by output."""
    means = np.broadcast_to(np.arange(8.0)[:, None], (8, 4))
    moments = jm.Moments(1, {"down": np.ones((8, 4))}, means={"down": means})
    params = {"down": jnp.ones((8, 4))}
    jm.take_over(jm.nanochat(), params, moments)
    with pytest.raises(ValueError, match=r"means of 'down' differ .* shape \(1, 4\)"):
        jm.take_over(jm.normuon(), params, moments)


def test_counts_and_names_that_do_not_fit():
    muon = {"state": {}, "param_groups": [{"params": [0, 1]}]}
    weights, names = {"a": np.ones(2)}, ["a", "b"]
    for words, read in {
        "has a parameter 1, and there are 1 names: a": lambda: from_torch(
            [(muon, ["a"])], weights, dict
        ),
        "states: []; expected one": lambda: from_torch([(muon, names)], weights, dict),
        "a parameter group has params; expected 'kind'": lambda: from_nanochat(
            [muon], names, weights, dict
        ),
        "has params; expected 'algorithm' too": lambda: from_dion(
            [(muon, names)], weights, dict
        ),
        "state: []; expected one count": lambda: jm.Moments.of(
            optax.sgd(0.1).init({"w": jnp.ones(2)})
        ),
    }.items():
        with pytest.raises(ValueError, match=re.escape(words)):
            read()
