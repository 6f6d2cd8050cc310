"""levanter's language models, by the loss of next tokens that it trains with."""

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from levanter.models.gemma import Gemma2Config, Gemma3Config, GemmaConfig
from levanter.models.gpt2 import Gpt2Config
from levanter.models.llama import LlamaConfig
from levanter.models.lm_model import LmExample
from levanter.models.mistral import MistralConfig
from levanter.models.mixtral import MixtralConfig
from levanter.models.olmo import Olmo2Config
from levanter.models.qwen import Qwen3Config, QwenConfig

from benchmarks.reading_models import Model, integers

VOCAB, BATCH = hax.Axis("vocab", 64), hax.Axis("batch", 2)
SMALL = {"max_seq_len": 16, "hidden_dim": 32, "num_layers": 3, "num_heads": 4}
LLAMA = {**SMALL, "intermediate_dim": 48, "num_kv_heads": 2}

# Linear layers are (out, in), but for GPT-2's; kernels of heads keep their axes.
ANSWERS = {
    r"embeddings|lm_head|norm|ln_|bias": "adamw",
    r"block_sparse_moe/gate/": "adamw",
    r"[qkv]_proj/weight": "oooi or bboi or ooi or boi",
    r"o_proj/weight": "oii",
    r"w[123]/weight": "bio or boi",
    r"(up|down|gate)_proj/weight": "oi",
}
GPT2_ANSWERS = {
    r"embeddings|ln_|bias": "adamw",
    r"c_attn/weight": "iooo or ibbo or iboo",
    r"attn/c_proj/weight": "iio",
    r"(c_fc|mlp/c_proj)/weight": "io",
}
CONFIGS = {
    "gpt2": Gpt2Config(**SMALL),
    "llama, one by one": LlamaConfig(**LLAMA, scan_layers=False),
    "llama": LlamaConfig(**LLAMA),
    "llama with QK-norm": LlamaConfig(**LLAMA, use_qk_norm=True),
    "mistral": MistralConfig(**LLAMA),
    "mixtral": MixtralConfig(**LLAMA),
    "qwen": QwenConfig(**LLAMA),
    "qwen3": Qwen3Config(**LLAMA),
    "gemma": GemmaConfig(**LLAMA),
    "gemma2": Gemma2Config(**LLAMA),
    "gemma3": Gemma3Config(**LLAMA),
    "olmo2": Olmo2Config(**LLAMA),
}
STACKED = {r"transformer/(layers|blocks)/stacked": (0,)}  # where layers are scanned


def _is_floating(x):
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.inexact)


def model(config):
    """The loss of next tokens of a model, whose floating-point leaves are trained."""
    module = eqx.filter_eval_shape(
        lambda: config.model_type.init(VOCAB, config, key=jax.random.key(0))
    )
    params, static = eqx.partition(module, _is_floating)
    # What is no parameter, such as a key, is not used without dropout.
    static = jax.tree.map(lambda x: False if hasattr(x, "shape") else x, static)
    positions = config.max_Pos
    automatic = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((1, 1), ("data", "model"), automatic)

    def loss(params, ids):
        module = eqx.combine(params, static)
        tokens = hax.NamedArray(ids, (BATCH, positions))
        example = hax.vmap(LmExample.causal, BATCH)(tokens)
        # The products of experts need a mesh.
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return module.compute_next_token_loss(example).scalar()

    return loss, params, (integers(BATCH.size, positions.size),)


def _entry(name, config):
    answers = GPT2_ANSWERS if name == "gpt2" else ANSWERS
    return Model(lambda: model(config), answers, STACKED)


MODELS = {name: _entry(name, config) for name, config in CONFIGS.items()}
