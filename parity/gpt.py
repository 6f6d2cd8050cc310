"""The GPT of examples/gpt.py in PyTorch, and both in training side by side.

The two models start from the same weights, read the same batches of examples/text.py,
and are trained in float32 by our recipe and by its reference. The modules here have the
names of the Flax ones, so that `weights.py` can carry a whole model across.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
import torch.nn.functional as F
from flax import nnx
from torch import Tensor, nn

from examples import gpt as flax_gpt
from examples.text import Text, read_text
from parity import problems, spread, weights
from parity.problems import Recipe
from parity.references import MuonAdamW, groups_over

WIDTH, DEPTH, CONTEXT, BATCH, SEED = 64, 2, 64, 8, 0
STEPS = 200
BAR = 1e-3  # of the loss, at every step
ADAMW_NAMES = ("embed.weight", "lm_head.weight")


def norm(x: Tensor) -> Tensor:
    """Divide (..., d) by its root mean square."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def rotate(x: Tensor) -> Tensor:
    """Rotary positions on (batch, time, heads, d): entry i turns with entry i + d / 2.

    Source: Su et al., arXiv 2104.09864, equation 34.
    """
    half = x.shape[-1] // 2
    frequency = 10_000.0 ** (-torch.arange(half, dtype=x.dtype) / half)
    angle = torch.arange(x.shape[1], dtype=x.dtype)[:, None, None] * frequency
    turn = torch.polar(torch.ones_like(angle), angle)  # (time, 1, d / 2), complex
    turned = torch.complex(x[..., :half], x[..., half:]) * turn
    return torch.cat([turned.real, turned.imag], dim=-1)


class Attention(nn.Module):
    """Causal attention with normalized queries and keys."""

    def __init__(self, width: int):
        """Four square matrices."""
        super().__init__()
        for name in ("q", "k", "v", "out"):
            self.add_module(name, nn.Linear(width, width, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, time, width) to the same."""
        heads = (*x.shape[:2], -1, flax_gpt.HEAD_WIDTH)
        q = norm(rotate(self.q(x).view(heads))).transpose(1, 2)
        k = norm(rotate(self.k(x).view(heads))).transpose(1, 2)
        v = self.v(x).view(heads).transpose(1, 2)  # (batch, heads, time, 32)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(x.shape))


class MLP(nn.Module):
    """Squared ReLU between two matrices."""

    def __init__(self, width: int):
        """Four times as wide inside."""
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, time, width) to the same."""
        return self.down(F.relu(self.up(x)).square())


class Block(nn.Module):
    """Attention, then the MLP."""

    def __init__(self, width: int):
        """Both of this width."""
        super().__init__()
        self.attn = Attention(width)
        self.mlp = MLP(width)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, time, width) to the same."""
        x = x + self.attn(norm(x))
        return x + self.mlp(norm(x))


class GPT(nn.Module):
    """The twin of `examples.gpt.GPT`."""

    def __init__(self, vocabulary: int, width: int, depth: int):
        """Weights are PyTorch's own until `weights.to_torch` replaces them."""
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.lm_head = nn.Linear(width, vocabulary, bias=False)

    def loss(self, windows: Tensor) -> Tensor:
        """Mean cross-entropy of each next character, in nats."""
        x = norm(self.embed(windows[:, :-1]))
        for block in self.blocks:
            x = block(x)
        logits = 15.0 * torch.tanh(self.lm_head(norm(x)) / 15.0)
        return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


@functools.cache
def text() -> Text:
    """The training text, read once."""
    return read_text(None, CONTEXT)


@functools.cache
def flax_model() -> tuple[nnx.GraphDef, nnx.State]:
    """Graph and initial parameters.

    The example begins with zeros in `out`, `down` and `lm_head`. Then most gradients
    are exactly zero for two steps, and nothing is compared; so they begin as small
    normal numbers here.
    """
    model = flax_gpt.GPT(len(text().vocabulary), WIDTH, DEPTH, rngs=nnx.Rngs(SEED))
    graph, params = nnx.split(model, nnx.Param)
    random = np.random.default_rng(SEED)

    def fill(x):
        small = 0.02 * random.standard_normal(x.shape)
        return x if np.any(x) else jnp.asarray(small, x.dtype)

    return graph, jax.tree.map(fill, params)


def torch_model() -> GPT:
    """The same weights in PyTorch."""
    model = GPT(len(text().vocabulary), WIDTH, DEPTH)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    state = weights.to_torch(flax_model()[1], shapes)
    model.load_state_dict({k: torch.from_numpy(v.copy()) for k, v in state.items()})
    return model


def batch(step: int) -> np.ndarray:
    """The windows of one step, (8, 65)."""
    return text().batch(SEED, step, BATCH, CONTEXT)


RATES = problems.MOVING


@functools.cache
def _value_and_grad():
    graph, _ = flax_model()

    def loss(params, windows):
        return nnx.merge(graph, params).loss(windows)

    return jax.jit(jax.value_and_grad(loss))


def train_flax(recipe: Recipe, steps: int = STEPS) -> list[float]:
    """Losses of our recipe, float32, one a step."""
    _, params = flax_model()
    tx = recipe.ours(problems.jax_rates(RATES, "float32"), "float32", matrices=None)
    state = tx.init(params)

    @jax.jit
    def update(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    losses = []
    for step in range(steps):
        value, grads = _value_and_grad()(params, batch(step))
        params, state = update(params, state, grads)
        losses.append(float(value))
    return losses


def train_torch(recipe: Recipe, steps: int = STEPS, **settings) -> list[float]:
    """Losses of the reference, float32, one a step.

    Args:
        recipe: whose reference has the matrices; MuonAdamW's AdamW has the rest.
        steps: how many.
        settings: what differs in the reference's group, such as its "polar".
    """
    model = torch_model()
    params = dict(model.named_parameters())
    matrices = [name for name in params if name not in ADAMW_NAMES]
    group = {**recipe.settings, "dtype": torch.float32, **settings}
    muon = recipe.reference(groups_over(params, [{"params": matrices, **group}]))
    adamw = MuonAdamW(groups_over(params, [{"kind": "adamw", "params": ADAMW_NAMES}]))
    losses = []
    for step in range(steps):
        for rate in recipe.rates:
            muon.param_groups[0][rate] = problems.rate_at(RATES, rate, step)
        adamw.param_groups[0]["lr"] = problems.rate_at(RATES, "adamw_lr", step)
        loss = model.loss(torch.from_numpy(batch(step)).long())
        model.zero_grad()
        loss.backward()
        muon.step()
        adamw.step()
        losses.append(loss.item())
    return losses


def reference_losses(name: str) -> tuple[list[float], list[float]]:
    """The reference of this recipe, and again with its matrices transposed."""
    recipe = problems.RECIPES[name]
    transposed = spread.variants(recipe)["transposed"]
    return train_torch(recipe), train_torch(recipe, polar=transposed)


def largest_difference(a: list[float], b: list[float]) -> float:
    """Over all steps; nan counts as infinite."""
    largest = float(np.max(np.abs(np.subtract(a, b))))
    return math.inf if math.isnan(largest) else largest
