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


# --- bad input ------------------------------------------------------------------------


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
    }.items():
        with pytest.raises(ValueError, match=re.escape(words)):
            read()
