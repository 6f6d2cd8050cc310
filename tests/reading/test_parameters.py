"""What every kind of parameter gets: label, reading, and the step of that reading."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax.contrib import MuonDimensionNumbers

import jax_muon as jm
from jax_muon.trees import leaves_with_paths
from tests import oracle

# --- one step of nanochat, in NumPy, on matrices read by hand -------------------------


# Path, shape, the bias beside it, a letter for each axis (batch, in, out).
STEPS = {
    "experts of layers": ("moe/up", (2, 4, 3, 6), None, "bbio"),
    "scanned on axis 1": ("layers/a/kernel", (3, 5, 6), (6, 5), "ibo"),
    "to few channels": ("Conv_0/kernel", (3, 3, 2, 4), (4,), "iiio"),
    "patches": ("ConvTranspose_0/kernel", (2, 2, 3, 4), (4,), "ooio"),
}


@pytest.mark.parametrize("case", STEPS.values(), ids=STEPS)
def test_one_step(case, rng, x64):
    path, shape, bias, letters = case
    axes = {s: [i for i, x in enumerate(letters) if x == s] for s in "boi"}
    sizes = {s: math.prod(shape[i] for i in own) for s, own in axes.items()}
    numbers = MuonDimensionNumbers(tuple(axes["i"]), tuple(axes["o"]))
    averaged = axes["i" if sizes["o"] >= sizes["i"] else "o"]

    def matrices(x):
        """(batch, out, in)"""
        return np.transpose(x, [*axes["b"], *axes["o"], *axes["i"]]).reshape(
            *sizes.values()
        )

    def tree(leaf):
        *modules, name = path.split("/")
        found = {name: jnp.asarray(leaf)}
        if bias is not None:
            found["bias"] = jnp.ones(bias)
        return functools.reduce(lambda inner, key: {key: inner}, modules[::-1], found)

    w, g = rng.standard_normal(shape), rng.standard_normal(shape)
    tx = jm.nanochat(*oracle.RATES, dtype="float64", matrices={path: numbers})
    params = tree(w)
    state = tx.init(params)
    updates, state = jax.jit(tx.update)(tree(g), state, params)
    params = dict(leaves_with_paths(optax.apply_updates(params, updates)))
    (nu,) = (
        leaf
        for where, leaf in leaves_with_paths(state)
        if where.endswith(f"muon/inner_state/2/nu/{path}")
    )
    assert nu.shape == tuple(1 if i in averaged else n for i, n in enumerate(shape))
    new, means = matrices(params[path]), matrices(np.broadcast_to(nu, shape))
    steps = zip(matrices(w), matrices(g), new, means, strict=True)
    for one_w, one_g, one, mean in steps:
        expected, _, v, _ = oracle.step("nanochat", 0, one_g, one_w, 0.0, 0.0, 0.0)
        np.testing.assert_allclose(one, expected, rtol=0, atol=1e-12)
        np.testing.assert_allclose(mean, np.broadcast_to(v, mean.shape), atol=1e-12)


# --- parameters that are not trained --------------------------------------------------


def test_lora_on_a_frozen_base():
    """By a rule: no state, and no step."""
    factors = {"lora_a": jnp.ones((6, 2)), "lora_b": jnp.zeros((2, 8))}
    params = {"up": {"kernel": jnp.ones((6, 8)), "bias": jnp.ones(8), **factors}}
    rules = {"lora_a": "muon", "lora_b": "muon", "*": "frozen"}
    table = str(jm.read(params, rules=rules))
    assert "frozen   by your rules" in table and "cannot be read" not in table
    frozen = {"frozen": optax.set_to_zero()}
    tx = jm.nanochat(matrices=rules, groups=frozen, dtype="float32")
    state = tx.init(params)
    names = [path for path, _ in leaves_with_paths(state)]
    assert any(path.endswith("mu/up/lora_a") for path in names)
    assert not [path for path in names if path.endswith(("kernel", "bias"))]
    updates, _ = tx.update(params, state, params)
    assert {path for path, x in leaves_with_paths(updates) if x.any()} == {"up/lora_a"}
