"""Resuming runs of other optimizers: the same trajectory, to rounding.

Each case runs the other optimizer for some steps, takes it over, and continues both.
The bar is that of the parity suite, 2e-5 of the distance travelled after the takeover.
"""

import itertools
import re
from functools import partial

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
from parity.compare import BARS
from parity.references import JORDAN_SUM, Muon, Nanochat, NorMuon, newton_schulz
from tests.mesh.layouts import mesh_of
from tests.reading import reader

BEFORE, AFTER = 7, 6
# By PyTorch's name; three of one shape, so that two ranks need padding.
SHAPES = {
    "wte.weight": (40, 32),
    "norm.weight": (6,),
    **{f"blocks.{i}.up.weight": (24, 6) for i in range(3)},
    "blocks.0.down.weight": (6, 24),
}
MATRICES = [name for name in SHAPES if "blocks" in name]
OTHERS = [name for name in SHAPES if "blocks" not in name]
UP = {"up": {"kernel": np.zeros((6, 24))}}
DOWN = {"down": {"kernel": np.zeros((24, 6))}}
LIKE = {
    "wte": {"embedding": np.zeros((40, 32))},
    "norm": {"scale": np.zeros(6)},
    "blocks": {"0": UP | DOWN, "1": UP, "2": UP},
}
F32, LOW = {"dtype": "float32"}, {"weight_decay": 0.1, "dtype": torch.float32}
ADAMW = optax.adamw(0.01, 0.8, 0.95, 1e-10, weight_decay=0.1)
MUON = jm.muon(0.02, 0.95, 0.1, adamw=ADAMW, **F32)


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


def steps(tx, params, state, grads, to_params=to_params):
    """Parameters and state after these gradients."""
    state = tx.init(params) if state is None else state
    update = jax.jit(tx.update)
    for grad in grads:
        updates, state = update(to_params(grad), state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def error(ours, end, middle):
    apart, travelled = (
        optax.tree.norm(jax.tree.map(np.subtract, end, x)) for x in (ours, middle)
    )
    assert travelled > 1e-2
    return apart / travelled


# --- optax ----------------------------------------------------------------------------


@pytest.mark.parametrize(("lookahead", "there"), [(True, True), (False, False)])
def test_optax_contrib_muon(lookahead, there):
    """Seven steps in, its bias correction still turns the direction."""
    rate = optax.linear_schedule(0.1, 0.01, 20)
    theirs = optax.contrib.muon(rate, weight_decay=0.1, nesterov=lookahead)
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
    taken = jm.take_over(after, middle, jm.Moments.of(state))
    moved, _ = steps(after, middle, taken, GRADS[BEFORE:])
    end, _ = steps(before, middle, state, GRADS[BEFORE:])
    assert error(moved, end, middle) < BARS["float32"]


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
    _, state = steps(optax.adamw(0.01), params, None, GRADS[:3])
    moments = jm.Moments.of(state)
    assert moments.count == 3
    taken = jm.take_over(jm.nanochat(), params, moments)
    muon, adamw = (taken.inner_states[x].inner_state for x in ("muon", "adamw"))
    for found, wanted, path in (
        (muon[0].mu, state[0].mu, ("blocks", "1", "up", "kernel")),
        (adamw[0].nu, state[0].nu, ("norm", "scale")),
    ):
        for key in path:
            found, wanted = found[key], wanted[key]
        np.testing.assert_array_equal(found, wanted)
    assert not np.any(jax.tree.leaves(muon[2].nu)[0])  # squares are none of NorMuon's


# --- PyTorch --------------------------------------------------------------------------


class Theirs:
    """PyTorch's parameters; some optimizer for the matrices, AdamW for the rest."""

    def __init__(self, make):
        self.params = {
            name: torch.nn.Parameter(torch.tensor(x)) for name, x in START.items()
        }
        matrices, others = ([self.params[n] for n in x] for x in (MATRICES, OTHERS))
        self.muon = make(matrices)
        self.adamw = torch.optim.AdamW(others, 0.01, (0.8, 0.95), 1e-10, 0.1)

    def run(self, grads):
        for grad in grads:
            for name, p in self.params.items():
                p.grad = torch.tensor(grad[name])
            self.muon.step()
            self.adamw.step()
        return {name: p.detach().numpy().copy() for name, p in self.params.items()}

    @property
    def optimizers(self):
        """State dicts, with names."""
        return (self.muon.state_dict(), MATRICES), (self.adamw.state_dict(), OTHERS)

    def state(self, name):
        optimizer = self.muon if name in MATRICES else self.adamw
        return optimizer.state[self.params[name]]


def read_torch(theirs, to_params):
    return from_torch(theirs.optimizers, START, to_params)


def read_sum(theirs, to_params):
    (muon, names), rest = theirs.optimizers
    states = muon["state"].items()
    muon["state"] = {i: {"momentum_buffer": x["momentum"][0]} for i, x in states}
    return from_torch([(muon, names), rest], START, to_params, accumulation="sum")


def read_dion(algorithm, theirs, to_params):
    """As dion saves it: whole tensors, a count for each group, momentum as a sum."""
    keys = {"momentum": "momentum", "second_moment": "variance_neuron"}
    keys |= {"exp_avg": "momentum", "exp_avg_sq": "variance"}
    optimizers = []
    for (saved, names), kind in zip(
        theirs.optimizers, (algorithm, "adamw"), strict=True
    ):
        states = {
            i: {
                keys[k]: x if kind == "adamw" else x[0]
                for k, x in one.items()
                if k in keys
            }
            for i, one in saved["state"].items()
        }
        (group,) = saved["param_groups"]
        given = {"algorithm": kind, "mu": 0.95, "step": BEFORE}
        groups = [{"params": group["params"], **given}]
        optimizers.append(({"state": states, "param_groups": groups}, names))
    return from_dion(optimizers, START, to_params)


GROUPS = (["wte.weight"], ["norm.weight"], MATRICES[:3], MATRICES[3:])
ORDER = [*itertools.chain(*GROUPS)]


def read_nanochat(ranks, theirs, to_params):
    """From what each rank saves, made from the state of one process."""
    saved = [{"state": {}, "param_groups": []} for _ in range(ranks)]
    for names in GROUPS:
        states = [theirs.state(name) for name in names]
        if names[0] in MATRICES:
            kind, each = "muon", {}
            for key, own in (
                ("momentum_buffer", "momentum"),
                ("second_momentum_buffer", "second_moment"),
            ):
                stack = torch.cat([state[own] for state in states])
                padded = torch.cat([stack, torch.zeros_like(stack)])
                each[key] = padded.split(-(-len(names) // ranks))
        else:
            kind, (each,) = "adamw", states
            each = {
                key: x.chunk(ranks) if x.numel() >= 1024 else [x] * ranks
                for key, x in each.items()
            }
        index = [ORDER.index(name) for name in names]
        for rank, file in enumerate(saved):
            file["param_groups"].append({"kind": kind, "params": index})
            file["state"][index[0]] = {key: x[rank] for key, x in each.items()}
    return from_nanochat(saved, ORDER, START, to_params)


def fused(arrays):
    """Three matrices there, three parts of one here, with NorMuon's means."""
    tree = to_params(arrays)
    ups = [tree["blocks"][str(i)].pop("up")["kernel"] for i in range(3)]
    return {**tree, "ups": {"kernel": np.concatenate(ups, axis=1)}}


nanochat = partial(jm.nanochat, adamw=ADAMW, **F32)
parts = reader(splits={"ups": jm.Split(("q", "k", "v"))})
RUNS = {  # theirs, ours, and how the state of theirs is read
    "torch.optim.Muon": (partial(torch.optim.Muon, lr=0.02), MUON, read_torch),
    "a sum": (partial(Muon, **JORDAN_SUM, **LOW), MUON, read_sum),
    "dion's Muon": (
        partial(Muon, accumulation="sum", **LOW),
        MUON,
        partial(read_dion, "muon"),
    ),
    "dion's NorMuon": (
        partial(NorMuon, accumulation="sum", **LOW),
        jm.normuon(0.02, 0.95, 0.1, adamw=ADAMW, **F32),
        partial(read_dion, "normuon"),
    ),
    "nanochat": (partial(Nanochat, **LOW), nanochat(), partial(read_nanochat, 1)),
    "nanochat on 2": (partial(Nanochat, **LOW), nanochat(), partial(read_nanochat, 2)),
    "nanochat, fused": (
        partial(Nanochat, **LOW),
        nanochat(matrices=parts),
        partial(read_nanochat, 1),
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_of_pytorch_goes_on(name, monkeypatch):
    def polar(update, coefficients, steps, eps):
        """torch.optim.Muon's is in bfloat16 only; the rest is as it is."""
        del coefficients, eps
        return newton_schulz(update[None], steps, dtype=torch.float32)[0]

    monkeypatch.setattr(torch.optim._muon, "_zeropower_via_newtonschulz", polar)
    make, tx, read = RUNS[name]
    theirs, convert = Theirs(make), fused if "fused" in name else to_params
    middle = convert(theirs.run(GRADS[:BEFORE]))
    moments = read(theirs, convert)
    assert moments.count == BEFORE
    assert bool(moments.means) == ("nor" in name.lower() or "nanochat" in name)
    taken = jm.take_over(tx, middle, moments)
    ours, state = steps(tx, middle, taken, GRADS[BEFORE:], convert)
    end = convert(theirs.run(GRADS[BEFORE:]))
    for leaves in zip(*map(jax.tree.leaves, (ours, end, middle)), strict=True):
        assert error(*leaves) < BARS["float32"]
    assert state.inner_states["muon"].inner_state[0].count == BEFORE + AFTER


# --- parts and other states -----------------------------------------------------------

ONES = {"up": jnp.ones((4, 8))}


def momentum(state):
    """Of a recipe."""
    return state.inner_states["muon"].inner_state[0].mu


def moments_of(first, second):
    """Ones of these shapes."""
    return jm.Moments(
        1, *({p: np.ones(s) for p, s in x.items()} for x in (first, second))
    )


OF_UP = moments_of({"up": (4, 8)}, {})


@pytest.mark.parametrize("devices", [None, 2])
def test_parts_that_are_a_batch(devices):
    """Heads, say: the momentum has their batch axis, and is sharded as in init."""
    tx = jm.muon(matrices=reader(splits={"up": jm.Split(2, axis=0)}))
    if devices is not None:
        tx = jm.on_mesh(tx, mesh_of(devices), divide="data", min_size=1)
    mean = np.arange(32.0).reshape(4, 8)
    empty = tx.init(ONES)  # which JAX then remembers
    taken = jm.take_over(tx, ONES, jm.Moments(3, {"up": mean}))
    mu, like = (momentum(state)["up"] for state in (taken, empty))
    np.testing.assert_array_equal(mu, mean.reshape(2, 2, 8))
    assert mu.sharding == like.sharding
    assert mu.sharding.is_fully_replicated == (devices is None)


def test_momentum_in_few_bits_is_rounded_as_by_the_last_step():
    grads = {"up": jnp.asarray(np.random.default_rng(0).standard_normal((4, 8)))}
    tx = jm.nesterov(0.75, accumulator_dtype="int8")
    _, state = tx.update(grads, tx.init(ONES), ONES)
    moments = jm.Moments(1, {"up": 0.25 * grads["up"]})
    taken = jm.take_over(tx, ONES, moments)
    np.testing.assert_array_equal(taken.mu["up"], state.mu["up"])


@pytest.mark.parametrize(
    ("wrap", "counter"),
    [
        (lambda tx: optax.chain(tx, optax.scale_by_schedule(lambda n: 1.0)), "count"),
        (lambda tx: optax.conditionally_mask(tx, lambda n: n < 9), "step"),
        (lambda tx: optax.chain(optax.add_noise(0.1, 0.5, 0), tx), "count"),
        (lambda tx: optax.MultiSteps(tx, lambda step: 1 + step), "gradient_step"),
    ],
    ids=["schedule", "condition", "noise", "multi steps"],
)
def test_counts_of_steps(wrap, counter):
    params = ONES | {"b": jnp.ones(8)}
    moments = moments_of({"up": (4, 8), "b": (8,)}, {"b": (8,)})
    taken = jm.take_over(wrap(jm.nanochat()), params, moments)
    for name in {"count", counter}:
        counts = optax.tree.get_all_with_path(taken, name)
        assert counts
        assert all(count == 1 for _, count in counts)


def test_counts_of_injected_schedules():
    tx = optax.inject_hyperparams(jm.muon, static_args=("steps",))(lambda n: 0.1 + n)
    taken = jm.take_over(tx, ONES, OF_UP)
    _, state = tx.update(ONES, taken, ONES)
    assert taken.count == 1
    np.testing.assert_allclose(state.hyperparams["learning_rate"], 1.1)


def test_a_plateau_counts_from_zero():
    """It lowers the rate by the losses that it has seen itself, and their number."""
    plateau = optax.contrib.reduce_on_plateau(accumulation_size=10)
    taken = jm.take_over(optax.chain(jm.muon(), plateau), ONES, OF_UP)
    assert taken[1] == plateau.init(ONES)


@pytest.mark.parametrize(
    ("other", "where"),
    {
        "ema": (optax.ema(0.9), r"\[1\].ema\['up'\] of shape \(4, 8\)"),
        "amsgrad": (optax.amsgrad(0.1), r"\[1\]\[0\].mu\['up'\]"),
        "masked": (
            optax.masked(optax.adafactor(0.1), {"up": True}),
            r"\[1\].inner_state",
        ),
    }.values(),
)
def test_moments_that_a_run_cannot_fill(other, where):
    with pytest.raises(ValueError, match=f"cannot fill state{where}.*; expected"):
        jm.take_over(optax.chain(jm.muon(), other), ONES, OF_UP)


# --- bad input ------------------------------------------------------------------------


@pytest.mark.parametrize("other", [optax.adamax, optax.contrib.adopt])
@pytest.mark.parametrize(
    "wrap", [lambda tx: tx, jm.skip_nonfinite, lambda tx: jm.on_mesh(tx, mesh_of(2))]
)
def test_states_of_adams_type_with_other_averages(other, wrap):
    """Their first step would be 63 times too long."""
    tx = wrap(jm.muon(adamw=optax.inject_hyperparams(other)(1e-3)))
    moments = moments_of({"up": (4, 8), "bias": (8,)}, {"bias": (8,)})
    with pytest.raises(ValueError, match=f"the state of scale_by_{other.__name__}, "):
        jm.take_over(tx, ONES | {"bias": jnp.ones(8)}, moments)


def test_momentum_of_scalars_cannot_be_filled_either():
    params = ONES | {"temperature": jnp.ones(())}
    tx = jm.muon(adamw=optax.inject_hyperparams(optax.sgd)(1e-3, momentum=0.9))
    with pytest.raises(ValueError, match=r"trace\['temperature'\] of shape \(\)"):
        jm.take_over(tx, params, OF_UP)


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
    params = ONES | {"b": jnp.ones(8)}
    with pytest.raises(ValueError, match=words):
        jm.take_over(jm.nanochat(), params, moments_of(first, second))


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
