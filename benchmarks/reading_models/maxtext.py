"""MaxText's models in NNX, at the sizes of their configurations.

With the layers stacked along axis 1, as by default, along axis 0, and one by one; of
mixtures of experts also with the three other ways to multiply.
"""

import os

import jax.numpy as jnp
from maxtext.configs import pyconfig
from maxtext.utils import maxtext_utils, model_creation_utils
from maxtext.utils.globals import MAXTEXT_PKG_DIR

from benchmarks.reading_models import (
    BATCH,
    LENGTH,
    Model,
    cross_entropy,
    integers,
    nnx_model,
)

BASE = os.path.join(MAXTEXT_PKG_DIR, "configs", "base.yml")

# Long enough for compressed blocks, and for indexers to leave tokens out.
LONG = {"deepseek3.2-671b": 4096, "deepseek4-284b": 4096}

ANSWERS = {
    r"token_embedder|position_embedder|logits_dense": "adamw",
    r"norm|bias$|_beta$|scale(_\d+)?$|layer_scalar|sinks|A_log|conv1d": "adamw",
    r"/gate/kernel$|shared_expert_gate": "adamw",
    # 4 to 16 outputs that mix the streams of hyper-connections.
    r"_alpha$|hc_fn$": "io or adamw",
    r"qkv_proj": "iooo or iboo or ibbo",
    r"(query|key|value|wkv|w(q|kv)_b)/kernel": "ioo or ibo or io",
    r"out/kernel$": "iio or io",
    r"o_a_proj": "bio",
    r"(wi_\d|wo)$": "bio",
    r"kernel$": "io",
}
# Three layers choose experts by a hash of the tokens: their gates only weigh them.
HASHED = {r"decoder/layers_[012]/mlp/MoeBlock_0/gate/kernel": "adamw?"}
ONE_BY_ONE = "one by one"
# The axes along which MaxText stacks layers.
FAMILIES = dict.fromkeys(("mistral-7b", "qwen2.5-7b"), (1,))
FAMILIES |= dict.fromkeys(
    ("gemma2-2b", "qwen3.5-35b-a3b", "deepseek3.2-671b", "deepseek4-284b"), (1, 0)
)
FAMILIES |= dict.fromkeys(
    [
        *("llama2-7b", "gpt3-6b", "gemma-2b", "gemma3-4b", "gemma4-26b", "olmo3-7b"),
        *("qwen3-0.6b", "qwen3-30b-a3b", "qwen3-next-80b-a3b", "mixtral-8x7b"),
        *("llama4-17b-16e", "gpt-oss-20b", "deepseek2-16b", "kimi-k2-1t"),
    ],
    (1, 0, ONE_BY_ONE),
)
PRODUCTS_OF_EXPERTS = {
    "dense": ("sparse_matmul=false", "megablox=false"),
    "capacity": ("sparse_matmul=false", "megablox=false", "capacity_factor=1.0"),
    "ragged": ("sparse_matmul=true", "megablox=false"),
}


def model_of(*settings):
    """A configuration, its mesh, and the model that it describes, without values."""
    argv = ["", BASE, "skip_jax_distributed_system=True", *settings]
    config = pyconfig.initialize(argv)
    mesh = maxtext_utils.get_mesh_from_config(config)
    _, model = model_creation_utils.create_nnx_abstract_model(config, mesh)
    return config, mesh, model


def model(family, layers, *settings):
    """A loss of one of MaxText's models."""
    length = LONG.get(family, LENGTH)
    if layers == ONE_BY_ONE:
        settings += ("scan_layers=false",)
    else:
        settings += (f"param_scan_axis={layers}",)
    if family == "gpt3-6b":
        settings += ("override_model_config=True",)
    _, mesh, module = model_of(
        f"model_name={family}",
        "attention=dot_product",
        f"per_device_batch_size={BATCH}",
        f"max_target_length={length}",
        *settings,
    )

    def loss(module, ids):
        positions = jnp.broadcast_to(jnp.arange(length), (BATCH, length))
        with mesh:
            logits = module(ids, positions, jnp.ones_like(ids), enable_dropout=False)
        return cross_entropy(logits, ids)

    return nnx_model(module, loss, integers(BATCH, length))


def _entry(family, layers, *settings):
    stacked = {}
    if layers != ONE_BY_ONE:
        stacked = {
            # Scans in a scan.
            r"decoder/\w+/local_layers/": (layers, layers + 1),
            r"decoder/((dense_|moe_)?layers|scanned_blocks)/": (layers,),
        }
    answers = {**HASHED, **ANSWERS} if family == "deepseek4-284b" else ANSWERS
    return Model(lambda: model(family, layers, *settings), answers, stacked)


MODELS = {
    f"{family}, {layers if layers == ONE_BY_ONE else f'axis {layers}'}": _entry(
        family, layers
    )
    for family, ways in FAMILIES.items()
    for layers in ways
} | {
    f"{family}, {name}": _entry(family, 1, *settings)
    for family in ("mixtral-8x7b", "deepseek2-16b")
    for name, settings in PRODUCTS_OF_EXPERTS.items()
}
