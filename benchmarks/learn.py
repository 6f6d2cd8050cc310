"""A GPT of 85 M parameters, trained by nanochat's recipe, optax's Muon and AdamW.

Twelve layers of width 768 on bytes of the Python sources that are on the machine, one
file of fifty held out; 32 x 1024 bytes a step, in bfloat16 with float32 masters. Every
program compiles first, side by side; then runs follow one another. `on_a_card` runs it:

    python3 -m benchmarks.on_a_card --parts learn --out FOLDER
    python3 -m benchmarks.on_a_card --parts learn --runs adamw:0.004:600:0 --out FOLDER

A run is an optimizer, the rate of its matrices, its steps and its seed, which draws
parameters and batches. Rates rise over a twentieth of a run, stay, and fall to zero
over its last two fifths. Where an optimizer leaves some parameters to AdamW, that has a
rate of 0.002. Curves of machines whose "data" lines agree can be compared.
"""

import concurrent.futures
import functools
import hashlib
import pathlib
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jax_muon as jm


class Run(NamedTuple):
    """What is trained.

    Attributes:
      kind: a recipe, "optax_muon" or "adamw".
      lr: the rate of its matrices, of "adamw" of everything.
      steps: its length.
      seed: draws parameters and batches.
    """

    kind: str
    lr: float
    steps: int
    seed: int

    @classmethod
    def parse(cls, text: str) -> "Run":
        """From "adamw:0.001:600:0"."""
        kind, lr, steps, seed = text.split(":")
        return cls(kind, float(lr), int(steps), int(seed))


# Those of results/gpu/h200.jsonl, five minutes with what they compile.
RUNS = (
    Run("nanochat", 0.02, 240, 2),
    Run("adamw", 0.001, 600, 1),
    Run("adamw", 0.002, 600, 2),
    Run("adamw", 0.001, 600, 2),
)


class Sizes(NamedTuple):
    """Of the model and of a batch; the largest text."""

    width: int = 768
    depth: int = 12
    head: int = 64
    length: int = 1024
    batch: int = 32
    text: int = 200_000_000


TINY = Sizes(32, 2, 16, 32, 4, 4_000_000)


def texts(most: int) -> tuple[np.ndarray, np.ndarray]:
    """Bytes of training and of held-out files, each followed by a zero byte."""
    root = pathlib.Path(np.__file__).parents[1]
    paths = [(str(path.relative_to(root)), path) for path in root.rglob("*.py")]
    paths.sort(key=lambda x: hashlib.md5(x[0].encode()).hexdigest())
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    seen, total = set(), 0
    for _, path in paths:
        if total > most:
            break
        text = path.read_bytes()
        digest = hashlib.md5(text).digest()
        if 500 <= len(text) <= 400_000 and digest not in seen:
            seen.add(digest)
            parts[digest[0] % 50 == 0].append(text + b"\0")
            total += len(text)
    train, held = (np.frombuffer(b"".join(some), np.uint8) for some in parts)
    return train, held


def init(key: jax.Array, sizes: Sizes) -> Any:
    """Parameters: layers in stacks, (in, out)."""
    layers, width = sizes.depth, sizes.width
    keys = iter(jax.random.split(key, 9))

    def matrices(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape) * shape[-2] ** -0.5

    return {
        "embed": jax.random.normal(next(keys), (256, width)) * 0.5,
        "head": jnp.zeros((width, 256)),
        "blocks": {
            "qkv": matrices(layers, 3, width, width),
            "out": matrices(layers, width, width) * 0.2,
            "up": matrices(layers, width, 4 * width),
            "down": matrices(layers, 4 * width, width) * 0.2,
        },
    }


def loss_fn(params: Any, tokens: jax.Array, head: int, attention: str) -> jax.Array:
    """Mean nats of the next byte; tokens are (batch, length + 1)."""

    def low(tree: Any) -> Any:
        return jax.tree.map(lambda x: x.astype(jnp.bfloat16), tree)

    def norm(x: jax.Array) -> jax.Array:
        square = jnp.square(x.astype(jnp.float32))
        return x * jax.lax.rsqrt(square.mean(-1, keepdims=True) + 1e-6).astype(x.dtype)

    def rotate(x: jax.Array) -> jax.Array:
        """Rotary positions of (batch, length, heads, head)."""
        half = x.shape[-1] // 2
        turns = 10000.0 ** (-jnp.arange(half) / half)
        angles = jnp.arange(x.shape[1])[:, None] * turns
        cos, sin = (
            f(angles).astype(x.dtype)[None, :, None] for f in (jnp.cos, jnp.sin)
        )
        u, v = jnp.split(x, 2, axis=-1)
        return jnp.concatenate([u * cos - v * sin, u * sin + v * cos], axis=-1)

    def layer(x: jax.Array, block: Any) -> tuple[jax.Array, None]:
        block, h = low(block), norm(x)
        q, k, v = (
            (h @ block["qkv"][i]).reshape(*h.shape[:2], -1, head) for i in range(3)
        )
        mixed = jax.nn.dot_product_attention(
            rotate(norm(q)),
            rotate(norm(k)),
            v,
            is_causal=True,
            implementation=attention,
        )
        x = x + mixed.reshape(x.shape) @ block["out"]
        up = jnp.square(jax.nn.relu(norm(x) @ block["up"]))
        return x + up @ block["down"], None

    x = norm(low(params["embed"])[tokens[:, :-1]])
    x, _ = jax.lax.scan(layer, x, params["blocks"])
    logits = (norm(x) @ low(params["head"])).astype(jnp.float32)
    nexts = tokens[:, 1:].astype(jnp.int32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, nexts).mean()


def optimizer(run: Run, matrices: Any) -> optax.GradientTransformation:
    """AdamW for everything, or for what is no matrix beside a Muon."""

    def rate(peak: float) -> Callable[[Any], Any]:
        up, down = max(1, run.steps // 20), run.steps * 0.4
        return lambda t: (
            peak * jnp.clip(jnp.minimum((t + 1) / up, (run.steps - t) / down), 0, 1)
        )

    if run.kind == "adamw":
        return optax.adamw(rate(run.lr), 0.9, 0.95, weight_decay=0.1)
    if run.kind == "optax_muon":  # told which axes of the stacks are matrices
        matrix = optax.contrib.MuonDimensionNumbers(-2, -1)
        blocks = dict.fromkeys(("qkv", "out", "up", "down"), matrix)
        return optax.contrib.muon(
            rate(run.lr),
            weight_decay=0.1,
            adam_b2=0.95,
            adam_weight_decay=0.0,
            adam_learning_rate=rate(2e-3),
            muon_weight_dimension_numbers={
                "embed": None,
                "head": None,
                "blocks": blocks,
            },
        )
    adamw = optax.adamw(rate(2e-3), 0.9, 0.95, weight_decay=0.0)
    recipe = getattr(jm, run.kind)
    return recipe(rate(run.lr), weight_decay=0.1, adamw=adamw, matrices=matrices)


def train(
    say: Callable[..., None], deadline: float, runs: list[Run], tiny: bool
) -> None:
    """Train each in turn, and say the losses of every 50 steps, until the deadline."""
    sizes = TINY if tiny else Sizes()
    attention = "cudnn" if jax.default_backend() == "gpu" else "xla"
    loss = functools.partial(loss_fn, head=sizes.head, attention=attention)
    text, held = texts(sizes.text)
    digest = hashlib.md5(held.tobytes()).hexdigest()
    say("data", train=len(text), held=len(held), md5_of_held=digest)
    # Windows into the held-out text, four batches of them.
    starts = np.random.default_rng(5).integers(
        0, len(held) - sizes.length - 1, (4, sizes.batch)
    )
    windows = jnp.asarray(held[starts[..., None] + np.arange(sizes.length + 1)])
    shapes = jax.eval_shape(lambda: init(jax.random.key(0), sizes))
    matrices = jm.find_matrices(shapes, loss, windows[0])

    def compiled(run: Run) -> tuple[optax.GradientTransformation, Any]:
        """Ten steps in one call, whose batches are a function of seed and step."""
        tx = optimizer(run, matrices)

        @functools.partial(jax.jit, donate_argnums=(0, 1))
        def ten(params: Any, state: Any, text: Any, first: Any, seed: Any) -> Any:
            def one(carry: Any, i: jax.Array) -> Any:
                params, state = carry
                key = jax.random.fold_in(jax.random.key(7), seed)
                key = jax.random.fold_in(key, first + i)
                last = len(text) - sizes.length - 1
                at = jax.random.randint(key, (sizes.batch,), 0, last)
                places = at[:, None] + jnp.arange(sizes.length + 1)
                value, grads = jax.value_and_grad(loss)(params, text[places])
                updates, state = tx.update(grads, state, params)
                return (optax.apply_updates(params, updates), state), value

            carry, values = jax.lax.scan(one, (params, state), jnp.arange(10))
            return *carry, values.mean()

        number = jax.ShapeDtypeStruct((), jnp.int32)
        state = jax.eval_shape(tx.init, shapes)
        bytes_ = jax.ShapeDtypeStruct(text.shape, jnp.uint8)
        return tx, ten.lower(shapes, state, bytes_, number, number).compile()

    evaluate = jax.jit(lambda p: jax.lax.map(lambda b: loss(p, b), windows).mean())
    kinds = list(dict.fromkeys(run._replace(seed=0) for run in runs))
    with concurrent.futures.ThreadPoolExecutor(5) as pool:
        programs = dict(zip(kinds, pool.map(compiled, kinds), strict=True))
    say("compiled", programs=len(kinds))
    on_device = jnp.asarray(text)
    for run in runs:
        tx, ten = programs[run._replace(seed=0)]
        params = jax.jit(init, static_argnums=1)(jax.random.key(run.seed), sizes)
        state, seconds = jax.jit(tx.init)(params), 0.0
        for done in range(0, run.steps, 10):
            if time.monotonic() > deadline:
                say("stopped", **run._asdict(), step=done)
                return
            began = time.perf_counter()
            params, state, value = jax.block_until_ready(
                ten(params, state, on_device, np.int32(done), np.int32(run.seed))
            )
            seconds += time.perf_counter() - began
            step = done + 10
            if step % 50 == 0 or step >= run.steps:
                losses = {"train": float(value), "val": float(evaluate(params))}
                say(
                    "curve",
                    **run._asdict(),
                    step=step,
                    **losses,
                    ms=1e3 * seconds / step,
                )
