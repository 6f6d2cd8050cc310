"""Models of Flax with scanned layers, of width 8.

Each function returns parameters, a loss of them and of samples, and samples.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

from tests.mesh import losses


class Block(nn.Module):
    """A layer for `nn.scan`."""

    @nn.compact
    def __call__(self, x, _):
        y = nn.Dense(16)(nn.RMSNorm()(x))
        return x + nn.Dense(8)(nn.tanh(y)), None


class Linen(nn.Module):
    """Rematerialized, scanned blocks."""

    @nn.compact
    def __call__(self, x):
        layers = nn.scan(
            nn.remat(Block, prevent_cse=False),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=4,
        )
        x, _ = layers(name="blocks")(x, None)
        return nn.Dense(4, name="head")(x)


class NnxBlock(nnx.Module):
    """Attention and MLP."""

    def __init__(self, rngs):
        self.norm = nnx.RMSNorm(8, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs)
        self.up = nnx.Linear(8, 16, rngs=rngs)
        self.down = nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, x):
        mask = nnx.make_causal_mask(x[..., 0])
        x = x + self.attention(self.norm(x), mask=mask)
        return x + self.down(nnx.gelu(self.up(x)))


class Nnx(nnx.Module):
    """Blocks that are stacked by `nnx.vmap` and run by `nnx.scan`."""

    def __init__(self, rngs):
        self.blocks = nnx.vmap(NnxBlock)(rngs.split(4))
        self.head = nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x):
        forward = nnx.scan(
            nnx.remat(lambda x, block: block(x)),
            in_axes=(nnx.Carry, 0),
            out_axes=nnx.Carry,
        )
        return self.head(forward(x, self.blocks))


def of(apply, params, dtype):
    """What the functions return, in a dtype."""
    params = jax.tree.map(lambda x: x.astype(dtype), params)
    loss = lambda params, x: jnp.mean(jnp.sin(apply(params, x)))  # noqa: E731
    return params, loss, losses.samples(dtype=dtype)


def linen(dtype):
    model = Linen()
    return of(model.apply, model.init(jax.random.key(0), losses.samples()), dtype)


def of_nnx(dtype):
    graph, params, others = nnx.split(Nnx(nnx.Rngs(0)), nnx.Param, ...)

    def apply(params, x):
        return nnx.merge(graph, params, others)(jnp.stack([x, -x], axis=1))

    return of(apply, params, dtype)
