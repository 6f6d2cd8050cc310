"""The comparison of optimizers: what is made of its records, and one short run."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from optimizers import OPTIMIZERS, best_rates, make_optimizer

import jax_muon as jm
from benchmarks import learning
from benchmarks.learning import Point

RATES = {
    "learning_rate": 0.02,
    "adamw_learning_rate": 0.01,
    "momentum": 0.9,
    "weight_decay": 0.1,
}
TINY = Point("nanochat", RATES, steps=3, width=32, depth=1)


def test_the_page_has_the_tables_and_pictures_of_the_records(tmp_path, capsys):
    page = learning.ROOT / "docs" / "rates.md"
    committed = page.read_text(encoding="utf-8")
    mark = "<!-- learning_300_128 -->\n\n"
    before, table = committed.split(mark)
    table, _, after = table.partition("\n\n")
    (tmp_path / "docs").mkdir()
    copy = tmp_path / "docs" / "rates.md"
    copy.write_text(f"{before}{mark}| old |\n\n{after}", encoding="utf-8")
    learning.report(learning.RESULTS, tmp_path)
    assert copy.read_text(encoding="utf-8") == committed
    assert table in capsys.readouterr().out
    for steps, width in learning.SIZES:
        picture = tmp_path / "docs" / f"learning_{steps}_{width}.png"
        assert picture.read_bytes().startswith(b"\x89PNG")


def read(depth=1):
    """What the loss of a model says about its parameters."""
    graph, params = nnx.split(nnx.eval_shape(lambda: learning.model(32, depth, 0)))
    windows = learning.data().batch(0, 1, 1, 128)
    return jm.read(params, lambda p, x: nnx.merge(graph, p).loss(x), windows)


@pytest.fixture(scope="module")
def params():
    return nnx.state(learning.model(32, 1, 0), nnx.Param)


def test_the_example_knows_all_and_takes_what_won():
    params = nnx.state(learning.model(32, 2, 0), nnx.Param)
    found = learning.rows(learning.RESULTS, *learning.SIZES[0])
    assert set(found) == set(OPTIMIZERS)
    matrices = read(depth=2)
    for name, row in found.items():
        assert best_rates(name) == row.best["settings"]
        tx = make_optimizer(name, 3, matrices, **best_rates(name))
        jax.eval_shape(tx.init, params)


def test_a_run_is_the_examples_own(params):
    """To rounding: the rates are arguments here, and functions of the count there."""
    settings = RATES | {"embedding_factor": 4.0}
    ((steps, found),) = learning.train(TINY._replace(settings=settings))
    graph = nnx.graphdef(nnx.eval_shape(lambda: learning.model(32, 1, 0)))
    tx = make_optimizer("nanochat", 3, read(), **settings)
    _, _, evaluate = learning.functions("nanochat", 32, 1, 4.0)

    @jax.jit
    def step(params, state, windows):
        grads = jax.grad(lambda p: nnx.merge(graph, p).loss(windows))(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = jax.jit(tx.init)(params)
    for i in range(3):
        windows = learning.data().batch(0, i + 1, 16, 128)
        params, state = step(params, state, windows)
    wanted = evaluate(params, learning.data().validation_batches(16, 128))
    assert steps == 3
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


@pytest.mark.parametrize("name", ["adamw", "muonh"])
def test_the_embedding_has_a_rate_of_its_own(name, params):
    rates = RATES if name == "adamw" else RATES | {"weight_decay": 0.0}
    ones = jax.tree.map(jnp.ones_like, params)
    matrices = read()
    txs = [
        make_optimizer(name, 3, matrices, **rates, embedding_factor=factor)
        for factor in (1.0, 4.0)
    ]
    once, fourfold = (
        nnx.to_flat_state(tx.update(ones, tx.init(params), params)[0]) for tx in txs
    )
    for (path, step), (_, other) in zip(once, fourfold, strict=True):
        factor = 4 if path[0] == "embed" else 1
        np.testing.assert_array_equal(other[...], factor * step[...])


def test_a_decay_of_weights_whose_norms_stay_is_refused():
    with pytest.raises(ValueError, match=r"weight_decay=0.1: muonh keeps the norms"):
        make_optimizer("muonh", 3, read(), **RATES)
