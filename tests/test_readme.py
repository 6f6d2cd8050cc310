"""The code in the README runs as written, and the chain of a page is the recipe."""

import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from optax.contrib import MuonDimensionNumbers

import jax_muon as jm

ROOT = pathlib.Path(__file__).parents[1]
README, PAGE = (ROOT.joinpath(x).read_text() for x in ("README.md", "docs/chain.md"))
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.S)
CHAIN = re.findall(r"```python\n(.*?)```", (ROOT / "docs/chain.md").read_text(), re.S)[
    1
]


def test_code_blocks_run_in_order(capsys):
    """The table is what the page shows, and the optimizer trains on the mesh."""
    names = {}
    for block in BLOCKS:
        exec(compile(block, "model.py", "exec"), names)
    assert capsys.readouterr().out == re.search(r"```text\n(.*?)```", README, re.S)[1]
    params, tx, tokens = names["params"], names["tx"], jnp.arange(64)

    @jax.jit
    def step(params, state):
        value, grads = jax.value_and_grad(names["loss_fn"])(params, tokens)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    state, values = tx.init(params), []
    for _ in range(40):
        params, state, value = step(params, state)
        values.append(float(value))
    assert values[-1] < values[0] / 2


class Everything(nnx.Module):
    """Parameters of many kinds."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.wte = nnx.Embed(9, 6, rngs=rngs)
        self.up = nnx.Linear(6, 8, rngs=rngs)
        self.general = nnx.LinearGeneral(6, (2, 4), rngs=rngs)
        self.stem = nnx.Conv(4, 8, (3, 3), rngs=rngs)
        self.conv = nnx.Conv(4, 8, (3, 3), use_bias=False, rngs=rngs)
        self.attn = nnx.MultiHeadAttention(2, 6, decode=False, rngs=rngs)
        self.norm = nnx.LayerNorm(6, rngs=rngs)


class ScannedConv(linen.Module):
    """Stacked layers with a convolution and a norm."""

    @linen.compact
    def __call__(self, x, _):
        x = linen.Conv(4, (3, 3))(linen.LayerNorm()(x))
        return x, None


def scanned():
    layers = linen.scan(
        ScannedConv, variable_axes={"params": 0}, split_rngs={"params": True}, length=3
    )()
    return layers.init(jax.random.key(0), jnp.ones((1, 5, 5, 4)), None)["params"]


IMAGE = MuonDimensionNumbers((-4, -3, -2), -1)
HEADS = MuonDimensionNumbers(0, (1, 2))
LABELS = {
    "wte": "adamw",
    "stem": IMAGE,
    "conv": IMAGE,
    "attn/out": MuonDimensionNumbers((0, 1), 2),
    "attn/*/kernel": HEADS,
    "general": HEADS,
    "*": "muon",
}
MODELS = {
    "nnx": (lambda: nnx.to_pure_dict(nnx.state(Everything(), nnx.Param)), LABELS),
    "linen, scanned convolutions": (scanned, {"Conv_0": IMAGE}),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_chain_is_the_recipe_bit_for_bit(name):
    """Two steps, so that momentum and NorMuon's means count."""
    make, labels = MODELS[name]
    params = make()
    chain = {"jm": jm, "optax": optax, "matrices": labels}
    exec(CHAIN, chain)
    rng = np.random.default_rng(0)
    grads = jax.tree.map(
        lambda p: jnp.asarray(rng.standard_normal(p.shape), p.dtype), params
    )
    results = []
    for tx in (chain["tx"], jm.nanochat(matrices=labels)):

        @jax.jit
        def step(params, state, tx=tx):
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        moved, state = params, tx.init(params)
        for _ in range(2):
            moved, state = step(moved, state)
        results.append(moved)
    jax.tree.map(np.testing.assert_array_equal, *results)
