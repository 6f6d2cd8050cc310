"""The example in one file, and the parts of the other: options, texts, optimizers."""

import re

import chex
import jax
import jax.numpy as jnp
import minimal
import numpy as np
import pytest
import step_inputs
import text
from flax import nnx
from gpt import GPT, generate
from optimizers import OPTIMIZERS, best_rates, make_optimizer
from options import parse

import jax_muon as jm


def test_the_example_in_one_file_learns(capsys):
    losses = minimal.main(steps=40, width=32, depth=1)
    assert np.mean(losses[-5:]) < np.mean(losses[:5]) - 0.5
    said = capsys.readouterr().out
    assert "blocks/0/mlp/up/kernel     32 x 128   kernel" in said
    assert re.search(r"validation loss \d\.\d{4} nats per character\n.*\|", said, re.S)


def test_what_a_loss_needs_besides_samples():
    """The first losses on eight devices are those of one, to rounding in float32."""
    one, eight = (step_inputs.main(jax.devices()[:n], steps=1) for n in (1, 8))
    assert [*one] == ["distill", "dropout", "batch_norm"]
    for name, metrics in one.items():
        np.testing.assert_allclose(eight[name]["loss"], metrics["loss"], rtol=1e-5)
    means = (x["batch_norm"]["aux"] for x in (one, eight))
    chex.assert_trees_all_close(*means, rtol=1e-5, atol=1e-6)


def test_a_character_is_drawn_from_those_before_it():
    """Of the context alone; no logit sees a later character."""
    graph, params = nnx.split(GPT(11, 32, 1, rngs=nnx.Rngs(0)))
    random = np.random.default_rng(0)  # no head and no projection of zeros
    params = jax.tree.map(lambda p: jnp.array(random.normal(size=p.shape)), params)
    model, logits = nnx.merge(graph, params), jax.jit(GPT.__call__)

    prompt, context = np.array([3, 1, 4]), 8
    given = {"context": context, "key": jax.random.key(0)}
    written = generate(model, prompt, 12, temperature=1e-6, **given)  # the likeliest
    tokens = np.concatenate([prompt, written])
    ends = np.arange(context, tokens.size)
    windows = tokens[ends[:, None] - np.arange(context, 0, -1)]  # (7, 8)
    likeliest = logits(model, windows)[0].argmax(axis=-1)
    np.testing.assert_array_equal(likeliest[:, -1], tokens[context:])
    # What stands behind a character changes nothing.
    np.testing.assert_array_equal(likeliest[0, 2:], tokens[3 : context + 1])


IMPOSSIBLE = [
    "--width=48", "--steps=0", "--qk-clip=0", "--compare=adamw", "--compare=a,b",
    "--compare=adamw,adamw", "--seed=4294967296", "--learning-rate=-1",
    "--optimizer=adamw --momentum=1.5", "--sharding=hsdp --mesh=8",
    "--sharding=fsdp --mesh=4,2", "--devices=2",
]  # fmt: skip


@pytest.mark.parametrize("flags", IMPOSSIBLE)
def test_impossible_options_are_refused(flags, capsys):
    with pytest.raises(SystemExit):
        parse(flags.split(), None)
    assert "expected" in capsys.readouterr().err


def test_any_text_can_be_read_and_batches_depend_on_seed_and_step_alone(tmp_path):
    path = tmp_path / "süß.txt"
    path.write_text("äöü ßé\n" * 300 + "東京" * 20, encoding="utf-8")
    data = text.read_text(str(path), context=32)
    assert data.train.size + data.validation.size == 2140
    assert data.vocabulary == text.UNKNOWN + "\n ßäéöü"
    assert data.decode(data.train[:7]) == "äöü ßé\n"
    assert data.decode(data.validation[-2:]) == 2 * text.UNKNOWN
    batch = data.batch(0, 7, 4, 32)
    assert batch.shape == (4, 33)
    np.testing.assert_array_equal(batch, data.batch(0, 7, 4, 32))
    assert (batch != data.batch(0, 8, 4, 32)).any()
    assert (batch != data.batch(1, 7, 4, 32)).any()


# --- optimizers


@pytest.fixture(scope="module")
def model():
    """Parameters, and what the loss says about them."""
    graph, params = nnx.split(GPT(9, 32, 2, rngs=nnx.Rngs(0)))
    windows = jax.ShapeDtypeStruct((1, 9), "int32")
    return params, jm.find_matrices(
        params, lambda p, x: nnx.merge(graph, p).loss(x), windows
    )


def test_every_optimizer_takes_its_settings(model):
    """Of best.json; tests/benchmarks/test_figures.py compares them with the page."""
    params, matrices = model
    for name in OPTIMIZERS:
        tx = make_optimizer(name, 3, matrices, **best_rates(name))
        jax.eval_shape(tx.init, params)
    with pytest.raises(ValueError, match=r"weight_decay=0.1: muonh keeps the norms"):
        make_optimizer("muonh", 3, matrices, **best_rates("muonh"), weight_decay=0.1)


def test_the_embedding_has_a_rate_of_its_own(model):
    (params, matrices), steps = model, []
    for factor in (1.0, 4.0):
        rates = best_rates("adamw") | {"embedding_factor": factor}
        tx = make_optimizer("adamw", 3, matrices, **rates)
        updates, _ = tx.update(params, tx.init(params), params)
        steps.append(nnx.to_flat_state(updates))
    for (path, once), (_, fourfold) in zip(*steps, strict=True):
        factor = 4 if path[0] == "embed" else 1
        np.testing.assert_array_equal(fourfold[...], factor * once[...])
