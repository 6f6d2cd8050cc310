"""The loss of a GPT whose parameters are a plain tree, for benchmarks of train steps.

Attention and MLP without biases and positions. The leaves of a block determine its
kind: there may be fewer heads of keys and values than of queries, or latent attention
as in DeepSeek-V3; an MLP with a `gate` is gated as in Llama; and leaves with a layer
axis, (layers, in, out), run in a scan.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

Scan = Callable[..., Any]  # of a body, a carry, layers, and their name in the tree


def plain_scan(body: Any, carry: Any, layers: Any, name: str) -> Any:
    """As models have it, for layers that need not be gathered."""
    del name
    return jax.lax.scan(body, carry, layers)


EXPERTS_PER_TOKEN = 8
QUERIES = 1024  # at a time, in sequences of more than four times as many


def loss(
    params: Any,
    tokens: jax.Array,
    *,
    head: int,
    dtype: jax.typing.DTypeLike | None = None,
    scan: Scan = plain_scan,
) -> jax.Array:
    """Mean cross-entropy of the next token.

    Args:
      params: a tree like `benchmarks.parameters.model_parameters`.
      tokens: (batch, length + 1); the first `length` are the input.
      head: width of a head of attention; of values, in latent attention.
      dtype: what parameters are cast to where they are used; None for their own.
      scan: runs layers with a layer axis.
    """

    def cast(tree: Any) -> Any:
        return jax.tree.map(lambda x: x.astype(dtype or x.dtype), tree)

    @jax.checkpoint
    def block(x: jax.Array, leaves: dict[str, Any]) -> jax.Array:
        return _block(x, cast(leaves), head=head)

    x = _norm(cast(params["wte"][tokens[:, :-1]]))
    for stack in [name for name in ("dense", "blocks") if name in params]:
        blocks = params[stack]
        if "out" in blocks:
            x, _ = scan(lambda x, leaves: (block(x, leaves), None), x, blocks, stack)
            continue
        for name in sorted(blocks):
            x = block(x, blocks[name])
    logits = (_norm(x) @ cast(params["lm_head"]).T).astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return losses.mean()


def _norm(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def _block(x: jax.Array, block: dict[str, jax.Array], *, head: int) -> jax.Array:
    """Attention and MLP, each added to the stream."""
    h = _norm(x)
    heads = (*x.shape[:2], -1, head)
    if "kv_down" in block:
        mixed = _latent_attention(h, block, head)
    else:
        q, k, v = ((h @ block[name]).reshape(heads) for name in ("q", "k", "v"))
        if x.shape[1] > 4 * QUERIES:
            mixed = _attention(q, k, v)
        else:
            mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    x = x + mixed.reshape(*x.shape[:2], -1) @ block["out"]
    h = _norm(x)
    if "shared" in block:
        x = x + _mlp(h, block["shared"])
    if "router" in block:
        return x + _experts(h, block["router"], block["experts"])
    return x + _mlp(h, block)


def _latent_attention(
    x: jax.Array, block: dict[str, jax.Array], head: int
) -> jax.Array:
    """Queries, and keys and values, by way of a narrow vector of each token.

    A part of the keys, for positions, is shared by all heads (arXiv 2405.04434).
    """
    q = _norm(x @ block["q_down"]) @ block["q_up"]
    rank = len(block["kv_up"])
    latent, shared = jnp.split(x @ block["kv_down"], [rank], axis=-1)
    kv = (_norm(latent) @ block["kv_up"]).reshape(*x.shape[:2], -1, 2 * head)
    k, v = jnp.split(kv, 2, axis=-1)
    shared = jnp.broadcast_to(shared[:, :, None], (*k.shape[:3], shared.shape[-1]))
    k = jnp.concatenate([k, shared], axis=-1)
    return _attention(q.reshape(*k.shape), k, v)


def _attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal attention of some queries at a time, so that scores fit into memory."""
    batch, length, heads, width = q.shape
    size = min(length, QUERIES)
    grouped = (batch, length // size, size, k.shape[2], -1, width)
    places = jnp.arange(length)

    @jax.checkpoint
    def of_some(q_places: tuple[jax.Array, jax.Array]) -> jax.Array:
        q, at = q_places
        scores = jnp.einsum("bqgrd,bkgd->bgrqk", q, k).astype(jnp.float32)
        scores = jnp.where(places <= at[:, None], scores * width**-0.5, -jnp.inf)
        weights = jax.nn.softmax(scores).astype(q.dtype)
        return jnp.einsum("bgrqk,bkgd->bqgrd", weights, v)

    parts = q.reshape(grouped).swapaxes(0, 1)
    mixed = jax.lax.map(of_some, (parts, places.reshape(-1, size)))
    return mixed.swapaxes(0, 1).reshape(batch, length, heads, -1)


def _mlp(x: jax.Array, block: dict[str, jax.Array]) -> jax.Array:
    """Squared ReLU, or gated by SiLU; one MLP, or a stack with a stack of inputs."""
    up = x @ block["up"]
    if "gate" in block:
        up *= jax.nn.silu(x @ block["gate"])
    else:
        up = jnp.square(jax.nn.relu(up))
    return up @ block["down"]


def _experts(
    x: jax.Array, router: jax.Array, experts: dict[str, jax.Array]
) -> jax.Array:
    """Each expert takes the tokens of a sequence that score highest with it.

    Expert choice (arXiv 2202.09368): work is even, and shapes are known. A token goes
    to `EXPERTS_PER_TOKEN` experts on average.
    """
    _, length, _ = x.shape
    scores = jax.nn.softmax((x @ router).astype(jnp.float32)).mT  # (batch, experts, t)
    most = max(1, length * EXPERTS_PER_TOKEN // router.shape[-1])
    weights, places = jax.lax.top_k(scores, most)  # (batch, experts, most)

    def of_sequence(x: jax.Array, weights: jax.Array, places: jax.Array) -> jax.Array:
        y = _mlp(x[places], experts) * weights[..., None].astype(x.dtype)
        return jnp.zeros_like(x).at[places].add(y)

    return jax.vmap(of_sequence)(x, weights, places)
