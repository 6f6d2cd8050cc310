"""Runs of Flax's examples lm1b, gemma and seq2seq, for `benchmarks.rates`.

The models are imported from the folder of the examples and made small enough for one
core. lm1b and gemma read the text of our own example, character by character; seq2seq
adds numbers and makes its data itself. Matrices have an optimizer with a rate of its
own, and all else AdamW.
"""

import functools
import importlib
import math
import pathlib
import random
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen, nnx
from text import Text, read_text

import jax_muon as jm
from benchmarks import program

BATCH, CONTEXT, WIDTH, LAYERS = 8, 64, 128, 2
Batch = dict[str, Any]  # arrays
Loss = Callable[[Any, Batch, jax.Array | None], jax.Array]  # None: no dropout


# ---- The examples


class Example(NamedTuple):
    """A model and its data; the loss of a batch is that of training with a key."""

    steps: int
    init: Callable[[jax.Array], Any]
    loss: Loss
    batch: Callable[[int, int], Batch]  # of a seed and a step
    validation: list[Batch]


def from_folder(folder: pathlib.Path, *names: str) -> list[Any]:
    """Import modules that find each other in their folder, as scripts do."""
    sys.path.insert(0, str(folder))
    modules = [importlib.import_module(name) for name in names]
    sys.path.remove(str(folder))
    for name, module in list(sys.modules.items()):
        if str(folder) in (getattr(module, "__file__", None) or ""):
            del sys.modules[name]  # another example has a file of this name
    return modules


def mean_cross_entropy(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """Nats per token."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens).mean()


def of_text(steps: int, loss: Loss, init: Callable[[jax.Array], Any]) -> Example:
    """A language model of the text of examples/train_gpt.py."""
    text = data()
    return Example(
        steps=steps,
        init=init,
        loss=loss,
        batch=lambda seed, step: {"tokens": text.batch(seed, step, BATCH, CONTEXT)},
        validation=[{"tokens": x} for x in text.validation_batches(BATCH, CONTEXT)],
    )


@functools.cache
def data() -> Text:
    """The text of the example."""
    return read_text(None, CONTEXT)


def lm1b(folder: pathlib.Path, width: int = WIDTH) -> Example:
    """A transformer in Linen, with the dropout of its configuration."""
    (models,) = from_folder(folder, "models")
    vocabulary = len(data().vocabulary)
    config = models.TransformerConfig(
        vocabulary,
        vocabulary,
        emb_dim=width,
        num_heads=width // 32,
        num_layers=LAYERS,
        qkv_dim=width,
        mlp_dim=4 * width,
        max_len=CONTEXT,
    )

    def loss(params: Any, batch: Batch, key: jax.Array | None) -> jax.Array:
        model = models.TransformerLM(config.replace(deterministic=key is None))
        tokens = batch["tokens"][:, 1:]  # the model shifts its inputs
        rngs = None if key is None else {"dropout": key}
        return mean_cross_entropy(
            model.apply({"params": params}, tokens, rngs=rngs), tokens
        )

    def init(key: jax.Array) -> Any:
        model = models.TransformerLM(config.replace(deterministic=True))
        boxed = model.init(key, jnp.ones((1, CONTEXT), int))["params"]
        return linen.unbox(boxed)

    return of_text(200, loss, init)


def gemma(folder: pathlib.Path) -> Example:
    """A Gemma transformer in NNX, with the proportions of its configuration tiny."""
    transformer, settings = from_folder(folder, "transformer", "transformer_cfg")
    config = settings.TransformerConfig.from_dict(
        num_layers=LAYERS,
        num_embed=len(data().vocabulary),
        embed_dim=WIDTH,
        hidden_dim=2 * WIDTH,
        num_heads=4,
        head_dim=WIDTH // 2,
        num_kv_heads=2,
        use_post_attn_norm=False,
        use_post_ffw_norm=False,
        attention_types=(settings.AttentionType.GLOBAL,) * LAYERS,
        final_logit_softcap=None,
    )

    def model(key: jax.Array) -> Any:
        return transformer.Transformer(config, rngs=nnx.Rngs(key))

    graph, _, rest = nnx.split(nnx.eval_shape(model, jax.random.key(0)), nnx.Param, ...)
    rest = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), rest)

    def loss(params: Any, batch: Batch, key: jax.Array | None) -> jax.Array:
        del key
        tokens = batch["tokens"]  # (8, 65)
        positions = jnp.broadcast_to(jnp.arange(CONTEXT), (len(tokens), CONTEXT))
        mask = transformer.make_causal_attn_mask(jnp.ones_like(positions, bool))
        logits, _ = nnx.merge(graph, params, rest)(
            tokens[:, :-1], positions, None, mask
        )
        return mean_cross_entropy(logits, tokens[:, 1:])

    return of_text(400, loss, lambda key: nnx.state(model(key), nnx.Param))


def seq2seq(folder: pathlib.Path) -> Example:
    """Two LSTMs that read and write sums, with teacher forcing."""
    models, pipeline = from_folder(folder, "models", "input_pipeline")
    table = pipeline.CharacterTable("0123456789+= ")
    vocabulary = table.vocab_size
    model = models.Seq2seq(
        teacher_force=True,
        hidden_size=WIDTH,
        vocab_size=vocabulary,
        eos_id=table.eos_id,
    )

    @functools.cache
    def batch(seed: int, step: int) -> Batch:
        random.seed(f"{seed}, {step}")
        return table.get_batch(8 * BATCH)

    def loss(params: Any, batch: Batch, key: jax.Array | None) -> jax.Array:
        labels = batch["answer"][:, 1:]
        rngs = {"lstm": jax.random.key(0) if key is None else key}
        logits, _ = model.apply(
            {"params": params}, batch["query"], batch["answer"], rngs=rngs
        )
        lengths = pipeline.get_sequence_lengths(labels, table.eos_id)
        each = optax.softmax_cross_entropy(logits, labels)
        return pipeline.mask_sequences(each, lengths).sum() / lengths.sum()

    def init(key: jax.Array) -> Any:
        shapes = table.encoder_input_shape, table.decoder_input_shape
        keys = {"params": key, "lstm": key}
        return model.init(keys, *map(jnp.ones, shapes))["params"]

    return Example(
        steps=200,
        init=init,
        loss=loss,
        batch=batch,
        validation=[batch(-1, step) for step in range(4)],
    )


EXAMPLES = {"lm1b": lm1b, "gemma": gemma, "seq2seq": seq2seq}
WIDTHS = {f"lm1b, width {x}": x for x in (32, 256)}  # for the optimizers in WIDE


# ---- The optimizers


def adamw(learning_rate: Any) -> optax.GradientTransformation:
    """AdamW as lm1b and gemma configure it."""
    return optax.adamw(learning_rate, b2=0.98, eps=1e-9, weight_decay=0.1)


BASELINE = "adamw"


def make(
    optimizer: str, rate: Any, rest: Any, example: Example
) -> optax.GradientTransformation:
    """A recipe with its defaults beside the user's AdamW, or that AdamW alone."""
    if optimizer == BASELINE:
        return adamw(rate)
    name, _, one_rate = optimizer.partition(", ")
    own = {} if one_rate else {"adamw": adamw(rest)}

    def matrices(params: Any) -> jm.Matrices:
        loss = functools.partial(example.loss, key=None)
        return jm.read(params, loss, example.validation[0])

    return getattr(jm, name)(rate, dtype="float32", matrices=matrices, **own)


# ---- A run


@functools.cache
def functions(folder: pathlib.Path, name: str, optimizer: str) -> Any:
    """Compiled: the first state, a step of a batch and a key, and a validation loss."""
    example = example_of(folder, name)

    def transform(rate: jax.Array, rest: jax.Array) -> optax.GradientTransformation:
        shape = optax.warmup_cosine_decay_schedule(
            0.0, 1.0, example.steps // 10, example.steps
        )
        scheduled = (lambda count, x=x: x * shape(count) for x in (rate, rest))
        return make(optimizer, *scheduled, example)

    def loss(params: Any, batch: tuple[Batch, jax.Array | None]) -> jax.Array:
        return example.loss(params, *batch)

    return *program.training(loss, transform), jax.jit(loss)


@functools.cache
def example_of(folder: pathlib.Path, name: str) -> Example:
    """An example by its name."""
    if name in WIDTHS:
        return lm1b(folder / "lm1b", WIDTHS[name])
    return EXAMPLES[name](folder / name)


def train(
    folder: pathlib.Path, name: str, optimizer: str, rate: float, rest: float, seed: int
) -> float:
    """The validation loss at the end of a run; infinity for NaN."""
    example = example_of(folder, name)
    init, step, evaluate = functions(folder, name, optimizer)
    key = jax.random.key(seed)
    params = jax.jit(example.init)(key)
    state = init(params, rate, rest)
    for done in range(example.steps):
        batch, noise = example.batch(seed, done), jax.random.fold_in(key, done)
        params, state = step(params, state, (batch, noise), rate, rest)
    loss = np.mean(
        [float(evaluate(params, (batch, None))) for batch in example.validation]
    )
    return float(loss) if math.isfinite(loss) else math.inf
