"""Trees whose names mislead, or say nothing, each with the loss that explains it."""

import jax
import jax.numpy as jnp
from jax import lax

from tests.programs import program
from tests.programs.parts import (
    BATCH,
    HIDDEN,
    LENGTH,
    VOCAB,
    attend,
    cross_entropy,
    floats,
    integers,
    rms,
    squared_error,
)


def pair(width_in, width_out, out_first=False):
    """A matrix and its bias, as a tuple."""
    shape = (width_out, width_in) if out_first else (width_in, width_out)
    return floats(*shape), floats(width_out)


@program({"0/0": "io or adamw", "1/0": "io", "2/0": "head", "0/1 1/1 2/1": "adamw"})
def list_of_tuples():
    """`[(W, b), (W, b), ...]`, with matrices (in, out)."""

    def loss(p, x, labels):
        *hidden, (w_last, b_last) = p
        for w, b in hidden:
            x = jnp.tanh(x @ w + b)
        return cross_entropy(x @ w_last + b_last, labels)

    params = [pair(784, 512), pair(512, 512), pair(512, 10)]
    return loss, params, (floats(BATCH, 784), integers(BATCH))


@program({"0/0": "oi or adamw", "1/0": "oi", "2/0": "head", "0/1 1/1 2/1": "adamw"})
def list_of_tuples_out_first():
    """The same with `jnp.dot(w, x)` under a `vmap`, as in JAX's first tutorial."""

    def loss(p, x, labels):
        def predict(x):
            *hidden, (w_last, b_last) = p
            for w, b in hidden:
                x = jax.nn.relu(jnp.dot(w, x) + b)
            return jnp.dot(w_last, x) + b_last

        return cross_entropy(jax.vmap(predict)(x), labels)

    params = [pair(784, 512, True), pair(512, 512, True), pair(512, 10, True)]
    return loss, params, (floats(BATCH, 784), integers(BATCH))


@program({"W1": "io or adamw", "W2": "io", "W3": "head", "b1 b2 b3": "adamw"})
def numbered_letters():
    """`W1`, `b1`, `W2`, `b2`."""

    def loss(p, x, labels):
        for number in "12":
            x = jax.nn.relu(x @ p[f"W{number}"] + p[f"b{number}"])
        return cross_entropy(x @ p["W3"] + p["b3"], labels)

    sizes = {"1": (784, 512), "2": (512, 256), "3": (256, 10)}
    params = {}
    for number, shape in sizes.items():
        params |= {f"W{number}": floats(*shape), f"b{number}": floats(shape[1])}
    return loss, params, (floats(BATCH, 784), integers(BATCH))


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


@program(
    {
        "wte": "embedding",
        "layers/norm": "adamw",
        "layers": "bio",
    }
)
def stacked_layers_of_square_matrices():
    """Four layers of q (4, 64, 64) and norms (4, 64), and a table that is the head."""

    def loss(p, ids):
        def body(x, layer):
            h = rms(x) * layer["norm"]["scale"]
            return x + jax.nn.gelu(h @ layer["q"]) @ layer["up"], None

        x, _ = lax.scan(body, p["wte"][ids], p["layers"])
        return cross_entropy(x @ p["wte"].T, ids)

    layers = {
        "q": floats(4, 64, 64),
        "up": floats(4, 64, 64),
        "norm": {"scale": floats(4, 64)},
    }
    return (
        loss,
        {"layers": layers, "wte": floats(VOCAB, 64)},
        (integers(BATCH, LENGTH),),
    )


@program(
    {"embedder": "embedding", "moe/norm": "adamw", "moe/out": "biio", "moe": "bio"}
)
def deepseek_out_in_a_stack():
    """`out` (layers, heads, head, width) in a stack whose name says experts."""
    layers, heads, head, width = 3, 4, 8, 48

    def loss(p, ids):
        def body(x, layer):
            h = rms(x) * layer["norm"]
            q, k, v = (
                (h @ layer[name]).reshape(BATCH, LENGTH, heads, head)
                for name in ("query", "key", "value")
            )
            scores = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k))
            o = jnp.einsum("bhts,bshd->bthd", scores, v)
            return x + jnp.einsum("bthd,hdm->btm", o, layer["out"]), None

        x, _ = lax.scan(body, p["embedder"][ids], p["moe"])
        return cross_entropy(x @ p["embedder"].T, ids)

    stack = {
        "norm": floats(layers, width),
        **{n: floats(layers, width, heads * head) for n in ("query", "key", "value")},
        "out": floats(layers, heads, head, width),
    }
    return (
        loss,
        {"embedder": floats(VOCAB, width), "moe": stack},
        (integers(BATCH, LENGTH),),
    )


@program(
    {
        "tok": "embedding",
        "stack/g1 stack/g2": "adamw",
        "stack/o": "biio",
        "stack": "bio",
    }
)
def as_many_layers_as_heads():
    """Eight layers of eight heads, and norms called g1 and g2."""
    layers, heads, head, width = 8, 8, 6, 32

    def loss(p, ids):
        def body(x, layer):
            h = rms(x) * layer["g1"]
            q, k, v = (
                (h @ layer[name]).reshape(BATCH, LENGTH, heads, head) for name in "qkv"
            )
            scores = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k))
            o = jnp.einsum("bhts,bshd->bthd", scores, v)
            x = x + jnp.einsum("bthd,hdm->btm", o, layer["o"])
            h = rms(x) * layer["g2"]
            return x + jax.nn.gelu(h @ layer["fc"]) @ layer["proj"], None

        x, _ = lax.scan(body, p["tok"][ids], p["stack"])
        return cross_entropy(x @ p["tok"].T, ids)

    stack = {
        "g1": floats(layers, width),
        "g2": floats(layers, width),
        **{name: floats(layers, width, heads * head) for name in "qkv"},
        "o": floats(layers, heads, head, width),
        "fc": floats(layers, width, HIDDEN),
        "proj": floats(layers, HIDDEN, width),
    }
    return (
        loss,
        {"tok": floats(VOCAB, width), "stack": stack},
        (integers(BATCH, LENGTH),),
    )


@program({"encoder": "bio"})
def layers_in_an_encoder():
    """Eight layers (8, 64, 64), with nothing beside them that shows which axis."""

    def loss(p, x):
        layers = p["encoder"]["w"]
        x, _ = lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, layers)
        return jnp.mean(x**2)

    return loss, {"encoder": {"w": floats(8, 64, 64)}}, (floats(BATCH, 64),)
