"""Trees whose names mislead, or say nothing, each with the loss that explains it."""

import jax
import jax.numpy as jnp
from jax import lax

from tests.programs import program
from tests.programs.parts import (
    BATCH,
    LENGTH,
    VOCAB,
    attend,
    cross_entropy,
    floats,
    integers,
    rms,
    squared_error,
)


@program(
    {
        "model.embed_tokens.weight": "embedding",
        "lm_head.weight": "head",
        "model.norm.weight": "adamw",
        **{
            f"model.layers.{layer}.{norm}.weight": "adamw"
            for layer in (0, 1)
            for norm in ("input_layernorm", "post_attention_layernorm")
        },
        **{
            f"model.layers.{layer}.{part}.weight": "oi"
            for layer in (0, 1)
            for part in (
                "self_attn.o_proj",
                *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
            )
        },
        **{
            f"model.layers.{layer}.self_attn.{role[0]}_proj.weight": f"oi, {role}"
            for layer in (0, 1)
            for role in ("query", "key", "value")
        },
    }
)
def pytorch_checkpoint():
    """Llama with dotted names and matrices (out, in), as torchax has it."""
    width, hidden, heads = 64, 96, 4

    def norm(x, p, name):
        return rms(x) * p[f"{name}.weight"]

    def dense(x, p, name):
        return x @ p[f"{name}.weight"].T

    def loss(p, ids):
        x = p["model.embed_tokens.weight"][ids]
        for number in range(2):
            layer = f"model.layers.{number}"
            h = norm(x, p, f"{layer}.input_layernorm")
            q, k, v = (
                dense(h, p, f"{layer}.self_attn.{name}_proj").reshape(
                    BATCH, LENGTH, heads, -1
                )
                for name in "qkv"
            )
            x = x + dense(attend(q, k, v), p, f"{layer}.self_attn.o_proj")
            h = norm(x, p, f"{layer}.post_attention_layernorm")
            gate = jax.nn.silu(dense(h, p, f"{layer}.mlp.gate_proj"))
            up = gate * dense(h, p, f"{layer}.mlp.up_proj")
            x = x + dense(up, p, f"{layer}.mlp.down_proj")
        x = norm(x, p, "model.norm")
        return cross_entropy(dense(x, p, "lm_head"), ids)

    params = {
        "model.embed_tokens.weight": floats(VOCAB, width),
        "model.norm.weight": floats(width),
        "lm_head.weight": floats(VOCAB, width),
    }
    for number in range(2):
        layer = f"model.layers.{number}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            params[f"{layer}.{name}.weight"] = floats(width)
        for name in "qkvo":
            params[f"{layer}.self_attn.{name}_proj.weight"] = floats(width, width)
        for name in ("gate", "up"):
            params[f"{layer}.mlp.{name}_proj.weight"] = floats(hidden, width)
        params[f"{layer}.mlp.down_proj.weight"] = floats(width, hidden)
    return loss, params, (integers(BATCH, LENGTH),)


@program(
    {
        "Dense_0/kernel": "bio or adamw",
        "Dense_1/kernel": "bio",
        "Dense_2/kernel": "adamw",
        "Dense_0/bias Dense_1/bias Dense_2/bias": "adamw",
    }
)
def twin_critics():
    """Two critics by `nn.vmap`; the last kernel (2, 256, 1) has one output for each."""

    def loss(p, states, actions, targets):
        x = jnp.concatenate([states, actions], -1)

        def critic(p):
            h = x
            for number in range(3):
                layer = p[f"Dense_{number}"]
                h = h @ layer["kernel"] + layer["bias"]
                h = jax.nn.relu(h) if number < 2 else h
            return h[..., 0]

        return squared_error(jax.vmap(critic)(p), targets)

    def layer(width_in, width_out):
        return {"kernel": floats(2, width_in, width_out), "bias": floats(2, width_out)}

    params = {
        "Dense_0": layer(17 + 6, 256),
        "Dense_1": layer(256, 256),
        "Dense_2": layer(256, 1),
    }
    return loss, params, (floats(BATCH, 17), floats(BATCH, 6), floats(BATCH))


@program({"encoder": "bio"})
def layers_in_an_encoder():
    """Eight layers (8, 64, 64), with nothing beside them that shows which axis."""

    def loss(p, x):
        layers = p["encoder"]["w"]
        x, _ = lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, layers)
        return jnp.mean(x**2)

    return loss, {"encoder": {"w": floats(8, 64, 64)}}, (floats(BATCH, 64),)
