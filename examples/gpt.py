"""A small GPT in Flax NNX, in nanochat's shape (https://github.com/karpathy/nanochat).

Normalization without parameters, rotary positions, normalized queries and keys, a
squared-ReLU MLP, and an untied output head. So nearly every parameter is a matrix
(in, out) without a bias, which is what Muon is for; the rest are the embedding and the
head. Parameters are named so that their paths read well: `blocks/0/attn/q/kernel`.

The shapes in comments are those of the default size: batches of 16 windows of 128
characters, width 128, 4 heads of 32, 104 characters in the vocabulary.
"""

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


def matrix(inputs: int, outputs: int, init, rngs: nnx.Rngs) -> nnx.Linear:
    return nnx.Linear(inputs, outputs, use_bias=False, kernel_init=init, rngs=rngs)


def uniform(width: int):
    """Entries of variance 1 / width, as nanochat begins."""
    bound = math.sqrt(3 / width)
    return lambda key, shape, dtype, **_: jax.random.uniform(
        key, shape, dtype, -bound, bound
    )


class Attention(nnx.Module):
    """Causal attention over heads of 32, and the largest logit of each.

    With normalized queries and keys no logit exceeds 32^0.5, whatever the weights;
    without, QK-clip has to keep the weights small.
    """

    def __init__(self, width: int, qk_norm: bool = True, *, rngs: nnx.Rngs):
        self.q = matrix(width, width, uniform(width), rngs)
        self.k = matrix(width, width, uniform(width), rngs)
        self.v = matrix(width, width, uniform(width), rngs)
        self.out = matrix(width, width, nnx.initializers.zeros, rngs)
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
        weights = jax.nn.softmax(logits)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v)  # (16, 128, 4, 32)
        max_logits = jax.lax.stop_gradient(logits).max(axis=(0, 2, 3))  # (4,)
        return self.out(mixed.reshape(x.shape)), max_logits


class MLP(nnx.Module):
    """Four times as wide inside, with relu(x)^2 between."""

    def __init__(self, width: int, *, rngs: nnx.Rngs):
        self.up = matrix(width, 4 * width, uniform(width), rngs)
        self.down = matrix(4 * width, width, nnx.initializers.zeros, rngs)

    def __call__(self, x: Float[Array, "batch time width"]):
        return self.down(jnp.square(jax.nn.relu(self.up(x))))


class Block(nnx.Module):
    """Attention, then the MLP, each added to the stream; both begin as zero."""

    def __init__(self, width: int, qk_norm: bool = True, *, rngs: nnx.Rngs):
        self.attn = Attention(width, qk_norm, rngs=rngs)
        self.mlp = MLP(width, rngs=rngs)

    def __call__(self, x: Float[Array, "batch time width"]):
        mixed, max_logits = self.attn(norm(x))
        x = x + mixed
        return x + self.mlp(norm(x)), max_logits


class GPT(nnx.Module):
    """From characters (16, 128) to the logits (16, 128, 104) of each next one."""

    def __init__(
        self,
        vocabulary: int,
        width: int,
        depth: int,
        qk_norm: bool = True,
        *,
        rngs: nnx.Rngs,
    ):
        self.embed = nnx.Embed(
            vocabulary, width, embedding_init=nnx.initializers.normal(1.0), rngs=rngs
        )
        self.blocks = nnx.List([Block(width, qk_norm, rngs=rngs) for _ in range(depth)])
        self.lm_head = matrix(width, vocabulary, nnx.initializers.zeros, rngs)

    def __call__(
        self, tokens: Int[Array, "batch time"]
    ) -> Float[Array, "batch time vocabulary"]:
        return self.forward(tokens)[0]

    def forward(self, tokens: Int[Array, "batch time"]):
        """The logits, and the largest of each head: {"blocks/0/attn": (4,), ...}."""
        x = norm(self.embed(tokens))  # (16, 128, 128)
        max_logits = {}
        for i, block in enumerate(self.blocks):
            x, max_logits[f"blocks/{i}/attn"] = block(x)
        logits = self.lm_head(norm(x))
        return 15.0 * jnp.tanh(logits / 15.0), max_logits  # no logit runs away

    def loss(self, windows: Int[Array, "batch time_plus_one"]) -> Float[Array, ""]:
        """Mean cross-entropy of each next character, in nats."""
        return self.loss_and_max_logits(windows)[0]

    def loss_and_max_logits(self, windows: Int[Array, "batch time_plus_one"]):
        """The loss, and the largest attention logits that `forward` gives."""
        logits, max_logits = self.forward(windows[:, :-1])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:])
        return losses.mean(), max_logits


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
        # The window that holds the character before place i; what stands after that one
        # is still empty, and a causal model does not look at it.
        first = jnp.maximum(i - context, 0)
        window = jax.lax.dynamic_slice(tokens, [first], [context])
        logits = model(window[None])[0, i - 1 - first]
        drawn = jax.random.categorical(jax.random.fold_in(key, i), logits / temperature)
        return tokens.at[i].set(drawn)

    tokens = jax.lax.fori_loop(start, start + length, write, tokens)
    return tokens[start : start + length]
