"""The code in the README runs as written, and the chain of a page is the recipe."""

import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax.contrib import MuonDimensionNumbers

import jax_muon as jm
from tests import trees

ROOT = pathlib.Path(__file__).parents[1]


def blocks(page):
    """Its text, and the code in it."""
    text = (ROOT / page).read_text()
    return text, re.findall(r"```python\n(.*?)```", text, re.S)


def test_code_blocks_run_in_order(capsys):
    """The table is what the page shows, and the optimizer trains on the mesh."""
    names, (text, code) = {}, blocks("README.md")
    for block in code:
        exec(compile(block, "model.py", "exec"), names)
    assert capsys.readouterr().out == re.search(r"```text\n(.*?)```", text, re.S)[1]
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


def test_the_chain_of_the_page_is_the_recipe_bit_for_bit():
    """Two steps, so that momentum and NorMuon's means count."""
    params, *grads = (
        trees.normal(
            {
                "wte": (9, 6),
                "layers": {"up": (3, 6, 8), "conv": (3, 3, 3, 4, 8), "scale": (3, 6)},
                "query": (6, 2, 4),
                "tall": (12, 5),
            },
            seed,
        )
        for seed in range(3)
    )
    labels = {
        "wte": "adamw",
        "up": MuonDimensionNumbers(-2, -1),
        "conv": MuonDimensionNumbers((-4, -3, -2), -1),
        "scale": "adamw",
        "query": MuonDimensionNumbers(0, (1, 2)),
        "tall": "muon",
    }
    chain = {"jm": jm, "optax": optax, "matrices": labels}
    exec(blocks("docs/chain.md")[1][1], chain)
    ends = [
        trees.run(tx, params, grads)[1]
        for tx in (chain["tx"], jm.nanochat(matrices=labels))
    ]
    jax.tree.map(np.testing.assert_array_equal, *ends)
