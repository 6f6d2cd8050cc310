"""tunix's language models, whole and with adapters by qwix."""

import dataclasses
import functools
import importlib

import jax.numpy as jnp
import qwix
from flax import nnx

from benchmarks.reading_models import (
    BATCH,
    LENGTH,
    TOKENS,
    Model,
    cross_entropy,
    nnx_model,
)

SMALL = {
    "num_layers": 2,
    "vocab_size": 64,
    "embed_dim": 32,
    "hidden_dim": 64,
    "num_heads": 4,
    "head_dim": 8,
    "num_kv_heads": 2,
    "rope_theta": 10_000,
    "norm_eps": 1e-5,
}

ANSWERS = {
    r"embedder|embedding|lm_head|norm": "adamw",
    r"[qkv]_proj/w$": "ioo or ibo",
    r"o_proj/w$": "iio",
    r"router/kernel": "adamw",
    r"(gate|up|down)_proj/kernel": "io",
    r"(gate|up|down)_proj$": "bio",
}
GEMMA_ANSWERS = {
    r"input_embedding|norm|scale": "adamw",
    r"q_einsum": "bio or oio",
    r"qkv_einsum|kv_einsum": "bbio or boio",
    r"attn_vec": "iio",
    r"(gate|up|down)_proj": "io",
}
LORA_ANSWERS = {
    r"q_proj/w_lora_a": "io",
    r"q_proj/w_lora_b": "ioo or ibo",
    r"o_proj/w_lora_a": "iio",
    r"lora": "io",
    **ANSWERS,
}


def model(make, variables=None):
    """A loss of next tokens; only `variables` of the model are parameters."""

    def loss(module, ids):
        positions = jnp.broadcast_to(jnp.arange(LENGTH), (BATCH, LENGTH))
        mask = jnp.tril(jnp.ones((BATCH, LENGTH, LENGTH), bool))
        logits = module(ids, positions, None, mask)
        return cross_entropy(logits[0] if isinstance(logits, tuple) else logits, ids)

    return nnx_model(nnx.eval_shape(make), loss, TOKENS, variables=variables)


def small(family, name, **settings):
    """A function that makes a small model of a family."""
    module = importlib.import_module(f"tunix.models.{family}.model")
    config = module.ModelConfig(**SMALL, **settings)
    return lambda: getattr(module, name)(config, rngs=nnx.Rngs(params=0))


def gemma():
    """Gemma with two layers and a small vocabulary."""
    module = importlib.import_module("tunix.models.gemma.model")
    config = module.ModelConfig.gemma_2b()
    config = dataclasses.replace(config, num_layers=2, num_embed=64)
    return module.Gemma(config, rngs=nnx.Rngs(params=0))


def with_lora():
    """Llama with adapters beside four of its kernels."""
    llama = small("llama3", "Llama3")()
    provider = qwix.LoraProvider(
        module_path=".*q_proj|.*o_proj|.*gate_proj|.*down_proj", rank=4, alpha=8.0
    )
    inputs = llama.get_model_input()
    return qwix.apply_lora_to_model(llama, provider, rngs=nnx.Rngs(1), **inputs)


ROWS = {
    "llama3": (small("llama3", "Llama3"), ANSWERS),
    "qwen3 with experts": (
        small("qwen3", "Qwen3", num_experts=6, num_experts_per_tok=2),
        ANSWERS,
    ),
    "gemma": (gemma, GEMMA_ANSWERS),
    "llama3 with LoRA": (with_lora, LORA_ANSWERS),
    "llama3, LoRA alone": (with_lora, LORA_ANSWERS, nnx.LoRAParam),
}
MODELS = {
    name: Model(functools.partial(model, make, *variables), answers)
    for name, (make, answers, *variables) in ROWS.items()
}
