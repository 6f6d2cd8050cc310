"""Trees whose names mislead, or say nothing, each with the loss that explains it."""

import jax
import jax.numpy as jnp
from jax import lax

from tests.programs.parts import (
    BATCH,
    HEADS,
    LENGTH,
    TOKENS,
    VOCAB,
    attend,
    cross_entropy,
    floats,
    leaf,
    program,
    rms,
    squared_error,
)

LLAMA_LAYER = {
    "input_layernorm": leaf("adamw", 64),
    "self_attn.q_proj": leaf("oi, query", 64, 64),
    "self_attn.k_proj": leaf("oi, key", 64, 64),
    "self_attn.v_proj": leaf("oi, value", 64, 64),
    "self_attn.o_proj": leaf("oi", 64, 64),
    "post_attention_layernorm": leaf("adamw", 64),
    "mlp.gate_proj": leaf("oi", 96, 64),
    "mlp.up_proj": leaf("oi", 96, 64),
    "mlp.down_proj": leaf("oi", 64, 96),
}
LLAMA = {
    "model.embed_tokens.weight": leaf("embedding", VOCAB, 64),
    "model.norm.weight": leaf("adamw", 64),
    "lm_head.weight": leaf("head", VOCAB, 64),
    **{
        f"model.layers.{layer}.{name}.weight": x
        for layer in (0, 1)
        for name, x in LLAMA_LAYER.items()
    },
}


@program(TOKENS, **LLAMA)
def pytorch_checkpoint(p, ids):
    """Llama with dotted names and matrices (out, in), as torchax has it."""

    def norm(x, name):
        return rms(x) * p[f"{name}.weight"]

    def dense(x, name):
        return x @ p[f"{name}.weight"].T

    x = p["model.embed_tokens.weight"][ids]
    for number in range(2):
        layer = f"model.layers.{number}"
        h = norm(x, f"{layer}.input_layernorm")
        q, k, v = (
            dense(h, f"{layer}.self_attn.{n}_proj").reshape(BATCH, LENGTH, HEADS, -1)
            for n in "qkv"
        )
        y = attend(q, k, v).reshape(x.shape)
        x = x + dense(y, f"{layer}.self_attn.o_proj")
        h = norm(x, f"{layer}.post_attention_layernorm")
        gate = jax.nn.silu(dense(h, f"{layer}.mlp.gate_proj"))
        up = gate * dense(h, f"{layer}.mlp.up_proj")
        x = x + dense(up, f"{layer}.mlp.down_proj")
    return cross_entropy(dense(norm(x, "model.norm"), "lm_head"), ids)


def members(answer, *shape):
    """A Dense layer for each of two members."""
    return {"kernel": leaf(answer, 2, *shape), "bias": leaf("adamw", 2, shape[-1])}


@program(
    floats(BATCH, 17),
    floats(BATCH, 6),
    floats(BATCH),
    Dense_0=members("bio or adamw", 17 + 6, 256),
    Dense_1=members("bio", 256, 256),
    Dense_2=members("adamw", 256, 1),
)
def twin_critics(p, states, actions, targets):
    """Two critics by `nn.vmap`; the last kernel (2, 256, 1) has one output for each."""
    x = jnp.concatenate([states, actions], -1)

    def critic(p):
        h = x
        for number in range(3):
            layer = p[f"Dense_{number}"]
            h = h @ layer["kernel"] + layer["bias"]
            h = jax.nn.relu(h) if number < 2 else h
        return h[..., 0]

    return squared_error(jax.vmap(critic)(p), targets)


@program(floats(BATCH, 64), encoder={"w": leaf("bio", 8, 64, 64)})
def layers_in_an_encoder(p, x):
    """Eight layers (8, 64, 64), with nothing beside them that shows which axis."""
    layers = p["encoder"]["w"]
    x, _ = lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, layers)
    return jnp.mean(x**2)
