"""Trains a small GPT on characters with Muon, in one file to read from top to bottom.

    python examples/minimal.py      300 steps, in some minutes on a CPU

The model is in gpt.py. train_gpt.py trains it with options, logs, checkpoints,
comparisons and meshes.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from gpt import GPT, generate
from jaxtyping import Int

import jax_muon as jm

# --- Data. A window has one character more than the context: each has a next one.


def documentation() -> str:
    """The texts of Python's `help()`: 465,126 characters in 3.11.7."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def windows_at(
    starts: Int[np.ndarray, " windows"],
    tokens: Int[np.ndarray, " characters"],
    context: int,
) -> Int[np.ndarray, "windows context_plus_one"]:
    return tokens[starts[:, None] + np.arange(context + 1)]


def random_windows(
    tokens: Int[np.ndarray, " characters"], seed: list[int], size: int, context: int
) -> Int[np.ndarray, "size context_plus_one"]:
    """Windows at random places, such as (16, 129), which depend on the seed alone."""
    starts = np.random.default_rng(seed).integers(0, tokens.size - context, size)
    return windows_at(starts, tokens, context)


# --- Training


def trapezoid(peak: float, steps: int) -> optax.Schedule:
    """Up in a fiftieth of the run, level, and down to zero in the second half."""
    up, down = max(1, steps // 50), steps / 2
    return lambda done: (
        peak * jnp.clip(jnp.minimum((done + 1) / up, (steps - done) / down), 0, 1)
    )


def main(steps: int = 300, width: int = 128, depth: int = 4) -> list[float]:
    """Train, print, and return the losses of the steps."""
    size, context = 16, 128  # windows in a step, characters that the model sees
    vocabulary, tokens = np.unique(list(documentation()), return_inverse=True)
    train, validation = np.split(tokens.astype(np.int32), [tokens.size * 9 // 10])
    held_out = random_windows(validation, [0], 8 * size, context)  # (128, 129)

    model = GPT(vocabulary.size, width, depth, rngs=nnx.Rngs(0))
    graph, params = nnx.split(model, nnx.Param)

    def loss_fn(params, windows):  # (16, 129)
        return nnx.merge(graph, params).loss(windows)

    # Traces the loss and computes nothing. The matrices go to Muon, the embedding and
    # the head to AdamW, with 16 times the learning rate for the embedding.
    matrices = jm.find_matrices(params, loss_fn, held_out)
    print(matrices)
    adamw = optax.adamw(trapezoid(0.01, steps), 0.8, 0.95, 1e-10, weight_decay=0.0)
    recipe = jm.nanochat(
        trapezoid(0.056, steps),
        momentum=0.8,
        weight_decay=optax.linear_schedule(0.3, 0.0, steps),
        adamw=adamw,
        matrices=matrices,
        dtype="float32",  # on a CPU; bfloat16, the default, is for GPUs
    )
    tx = optax.chain(recipe, jm.scale_by_path({"embed*": 16.0}))

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, windows):
        gradient = jax.value_and_grad(loss_fn, has_aux=True)
        (loss, max_logits), grads = gradient(params, windows)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss, max_logits

    state, losses = tx.init(params), []
    for number in range(1, steps + 1):
        windows = random_windows(train, [0, number], size, context)
        params, state, loss, max_logits = step(params, state, windows)
        losses.append(float(loss))
        if number % 10 == 0 or number == steps:
            largest = max(float(x.max()) for x in max_logits.values())
            print(f"step {number}: loss {loss:.3f}, largest logit {largest:.2f}")
    loss, _ = jax.jit(loss_fn)(params, held_out)
    print(f"validation loss {loss:.4f} nats per character")

    model, prompt = nnx.merge(graph, params), validation[: context // 4]
    written = generate(model, prompt, 400, context=context, key=jax.random.key(0))
    print("".join(vocabulary[prompt]), "".join(vocabulary[written]), sep="|")
    return losses


if __name__ == "__main__":
    main()
