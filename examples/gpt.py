"""A small GPT in Flax NNX, in nanochat's shape (https://github.com/karpathy/nanochat).

Norms have no parameters and layers no biases, so all parameters but the embedding and
the head are matrices (in, out). Their paths read well: `blocks/0/attn/q/kernel`.

The shapes in comments are those of the default size: 16 windows of 128 characters,
width 128, 4 heads of 32, a vocabulary of 104 characters.
"""

import functools
import math

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Float, Int

HEAD_WIDTH = 32


def norm(x: Float[Array, "... d"]) -> Float[Array, "... d"]:
    """RMSNorm without a scale: the matrices around it can learn one."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def rotate(
    x: Float[Array, "batch time heads d"],
) -> Float[Array, "batch time heads d"]:
    """Rotary positions: turns pair i of a head by the angle time / 10000^(i / pairs).

    Su et al., RoFormer, https://arxiv.org/abs/2104.09864, equation 34. A query and a
    key then meet at an angle that depends on their distance only.
    """
    pairs = x.shape[-1] // 2
    frequency = 10_000.0 ** (-jnp.arange(pairs) / pairs)  # (16,)
    angle = jnp.arange(x.shape[1])[:, None, None] * frequency  # (128, 1, 16)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    a, b = jnp.split(x, 2, axis=-1)  # (16, 128, 4, 16) each
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def linear(inputs: int, outputs: int, rngs: nnx.Rngs, *, zero: bool = False):
    """A kernel (inputs, outputs): zero, or uniform with variance 1 / inputs."""
    init = nnx.initializers.zeros if zero else nnx.initializers.lecun_uniform()
    return nnx.Linear(inputs, outputs, use_bias=False, kernel_init=init, rngs=rngs)


class Attention(nnx.Module):
    """Causal attention over heads of 32; also returns the largest logit of each.

    With normalized queries and keys no logit exceeds 32^0.5, whatever the weights;
    without, QK-clip has to keep the weights small.
    """

    def __init__(self, width: int, qk_norm: bool, *, rngs: nnx.Rngs):
        self.q, self.k, self.v = (linear(width, width, rngs) for _ in range(3))
        self.out = linear(width, width, rngs, zero=True)
        self.qk_norm = qk_norm

    def __call__(self, x: Float[Array, "batch time width"]):
        heads = (*x.shape[:2], -1, HEAD_WIDTH)  # (16, 128, 4, 32)
        q = rotate(self.q(x).reshape(heads))
        k = rotate(self.k(x).reshape(heads))
        if self.qk_norm:
            q, k = norm(q), norm(k)
        v = self.v(x).reshape(heads)
        logits = jnp.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(HEAD_WIDTH)
        causal = jnp.tri(x.shape[1], dtype=bool)  # (128, 128)
        logits = jnp.where(causal, logits, -jnp.inf)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(logits), v)
        return self.out(mixed.reshape(x.shape)), logits.max(axis=(0, 2, 3))  # (4,)


class Block(nnx.Module):
    """Adds attention, and then an MLP with relu(x)^2; both begin as zero."""

    def __init__(self, width: int, qk_norm: bool, *, rngs: nnx.Rngs):
        self.attn = Attention(width, qk_norm, rngs=rngs)
        up = linear(width, 4 * width, rngs)
        self.mlp = nnx.Dict(up=up, down=linear(4 * width, width, rngs, zero=True))

    def __call__(self, x: Float[Array, "batch time width"]):
        mixed, max_logits = self.attn(norm(x))
        x = x + mixed
        hidden = jnp.square(jax.nn.relu(self.mlp.up(norm(x))))  # (16, 128, 512)
        return x + self.mlp.down(hidden), max_logits


class GPT(nnx.Module):
    """From characters (16, 128) to the logits (16, 128, 104) of each next one.

    Also returns the largest attention logits, {"blocks/0/attn": (4,), ...}.
    """

    def __init__(
        self, vocabulary: int, width: int, depth: int, qk_norm=True, *, rngs: nnx.Rngs
    ):
        init = nnx.initializers.normal(1.0)
        self.embed = nnx.Embed(vocabulary, width, embedding_init=init, rngs=rngs)
        blocks = (Block(width, qk_norm, rngs=rngs) for _ in range(depth))
        self.blocks = nnx.List(blocks)
        self.lm_head = linear(width, vocabulary, rngs, zero=True)

    def __call__(self, tokens: Int[Array, "batch time"]):
        x = norm(self.embed(tokens))  # (16, 128, 128)
        max_logits = {}
        for i, block in enumerate(self.blocks):
            x, max_logits[f"blocks/{i}/attn"] = block(x)
        logits = self.lm_head(norm(x))
        return 15.0 * jnp.tanh(logits / 15.0), max_logits  # no logit runs away

    def loss(self, windows: Int[Array, "batch time_plus_one"]):
        """Mean cross-entropy of each next character, in nats; the largest logits."""
        logits, max_logits = self(windows[:, :-1])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:])
        return losses.mean(), max_logits


@functools.partial(jax.jit, static_argnames=("length", "context"))
def generate(
    model: GPT,
    prompt: Int[Array, " prompt"],
    length: int,
    *,
    context: int,
    key: Array,
    temperature: float = 0.8,
) -> Int[Array, " length"]:
    """Writes `length` more characters, each drawn after the last `context` ones."""
    start = prompt.size
    tokens = jnp.pad(prompt, (0, max(start + length, context) - start))

    def write(i, tokens):
        # The window that holds the character before place i. Later places in it are
        # still empty, and a causal model does not look at them.
        first = jnp.maximum(i - context, 0)
        window = jax.lax.dynamic_slice(tokens, [first], [context])
        logits = model(window[None])[0][0, i - 1 - first]
        drawn = jax.random.categorical(jax.random.fold_in(key, i), logits / temperature)
        return tokens.at[i].set(drawn)

    tokens = jax.lax.fori_loop(start, start + length, write, tokens)
    return tokens[start : start + length]
