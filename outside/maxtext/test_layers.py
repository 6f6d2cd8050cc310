"""MaxText's decoder in `make_train_step`, unchanged, on eight devices."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from maxtext.utils import model_creation_utils

import jax_muon as jm
from benchmarks.reading_models.maxtext import model_of

LENGTH, WORDS = 16, 64
SETTINGS = f"""
base_emb_dim=32 base_num_query_heads=4 base_num_kv_heads=2 head_dim=8 base_mlp_dim=64
base_num_decoder_layers=4 vocab_size={WORDS} max_target_length={LENGTH}
per_device_batch_size=1 attention=dot_product dtype=float32 weight_dtype=float32
scan_layers=True ici_data_parallelism=8
"""


@pytest.mark.parametrize("remat", ["full", "minimal", "none"])
def test_gradients_with_divided_parameters(remat, rng):
    """Those of one device, by a step that gathers whole leaves."""
    config, mesh, _ = model_of(*SETTINGS.split(), f"remat_policy={remat}")
    with jax.set_mesh(mesh):
        model = model_creation_utils.from_config(
            config, mesh=mesh, rngs=nnx.Rngs(params=0, dropout=1)
        )
    graph, params, others = nnx.split(model, nnx.Param, ...)
    params, others = jax.device_get((nnx.to_pure_dict(params), others))

    def loss(params, tokens):
        model = nnx.merge(graph, params, others)
        x, y = tokens[:, :-1], tokens[:, 1:]
        places = jnp.broadcast_to(jnp.arange(LENGTH), x.shape)
        logits = model(x, places, jnp.ones_like(x), enable_dropout=False)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    tokens = rng.integers(0, WORDS, (16, LENGTH + 1), np.int32)
    value, expected = jax.jit(jax.value_and_grad(loss))(params, tokens)
    shardings = jm.fsdp(params, mesh, jm.find_matrices(params, loss, tokens), "data")
    step = jm.make_train_step(loss, jm.on_mesh(optax.sgd(1.0), shardings))
    after, _, metrics = step(*step.init(params), tokens)
    np.testing.assert_allclose(metrics["loss"], value, rtol=1e-5)
    jax.tree.map(
        lambda p, q, g: np.testing.assert_allclose(p - np.array(q), g, atol=2e-6),
        params,
        after,
        expected,
    )
