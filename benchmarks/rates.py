"""Where each recipe's best learning rate is, as a multiple of AdamW's.

    git clone --depth 1 --branch v0.12.7 https://github.com/google/flax
    python -m benchmarks.rates flax/examples      run what is not on record yet
    python -m benchmarks.rates --report           the tables of docs/rates.md

The models are those of Flax's examples lm1b, gemma and seq2seq, imported from that
folder and made small enough for one core. lm1b and gemma read the text of our own
example, character by character; seq2seq adds numbers and makes its data itself.

The question is that of a user whose AdamW works: embeddings, heads and vectors keep
AdamW with its best rate, and only the rate of the matrices is searched, in factors of
two. benchmarks/results/rates.jsonl has a line for every run, and rates.json what
follows from them.
"""

import functools
import importlib
import itertools
import json
import math
import pathlib
import random
import statistics
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen, nnx
from runs import read
from text import Text, read_text

import jax_muon as jm
from benchmarks import program

ROOT = pathlib.Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results"
SEEDS = (0, 1, 2)
SEEDS_OF_WIDTHS = SEEDS[:2]
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
    rules: dict[str, str] | None = None  # of a head that no name shows


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
        rules={"DecoderLSTMCell_0/Dense_0": "adamw"},
    )


EXAMPLES = {"lm1b": lm1b, "gemma": gemma, "seq2seq": seq2seq}
WIDTHS = {f"lm1b, width {x}": x for x in (32, 256)}  # for the optimizers in WIDE


# ---- The optimizers


def adamw(learning_rate: Any) -> optax.GradientTransformation:
    """AdamW as lm1b and gemma configure it."""
    return optax.adamw(learning_rate, b2=0.98, eps=1e-9, weight_decay=0.1)


BASELINE = "adamw"
ONE_RATE = "moonlight, one rate"  # its AdamW has the rate of the matrices
WIDE = (BASELINE, "nanochat", "moonlight")
FIRST = {  # where the search begins: the power of two
    BASELINE: -8,
    "nanochat": -5,
    "moonlight": -7,
    ONE_RATE: -7,
    "muon": -5,
    "normuon": -7,
    "muonh": -5,
    "normuonh": -5,
}


def make(
    optimizer: str, rate: Any, rest: Any, rules: dict[str, str] | None
) -> optax.GradientTransformation:
    """A recipe with its defaults beside the user's AdamW, or that AdamW alone."""
    if optimizer == BASELINE:
        return adamw(rate)
    name, _, one_rate = optimizer.partition(", ")
    own = {} if one_rate else {"adamw": adamw(rest)}
    matrices = functools.partial(jm.read, rules=rules)
    return getattr(jm, name)(rate, dtype="float32", matrices=matrices, **own)


# ---- A run


@functools.cache
def functions(folder: pathlib.Path, name: str, optimizer: str) -> Any:
    """Compiled: the first state, a step, and the loss of a batch without a key."""
    example = example_of(folder, name)

    def transform(rate: jax.Array, rest: jax.Array) -> optax.GradientTransformation:
        shape = optax.warmup_cosine_decay_schedule(
            0.0, 1.0, example.steps // 10, example.steps
        )
        scheduled = (lambda count, x=x: x * shape(count) for x in (rate, rest))
        return make(optimizer, *scheduled, rules=example.rules)

    def init(params: Any, rate: jax.Array, rest: jax.Array) -> Any:
        return transform(rate, rest).init(params)

    def step(
        params: Any,
        state: Any,
        batch: Batch,
        key: jax.Array,
        rate: jax.Array,
        rest: jax.Array,
    ) -> Any:
        grads = jax.grad(example.loss)(params, batch, key)
        updates, state = transform(rate, rest).update(grads, state, params)
        return optax.apply_updates(params, updates), state

    def evaluate(params: Any, batch: Batch) -> jax.Array:
        return example.loss(params, batch, None)

    return jax.jit(init), jax.jit(step, donate_argnums=(0, 1)), jax.jit(evaluate)


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
        params, state = step(params, state, batch, noise, rate, rest)
    loss = np.mean([float(evaluate(params, batch)) for batch in example.validation])
    return float(loss) if math.isfinite(loss) else math.inf


# ---- The search


class Runs:
    """The runs on record, and those that are still to be made."""

    def __init__(self, path: pathlib.Path, folder: pathlib.Path | None = None):
        self.path, self.folder = path, folder
        self.losses = {
            (x["example"], x["optimizer"], x["seed"], x["rate"]): x["loss"]
            for x in read(path)
        }

    def loss(self, example: str, optimizer: str, seed: int, rate: float) -> float:
        """The loss of a run, from the record if it has one."""
        case = example, optimizer, seed, rate
        if case not in self.losses:
            if self.folder is None:
                raise ValueError(f"{case} is not on record; expected the examples")
            rest = rate if optimizer == BASELINE else self.rest(example)
            loss = train(self.folder, example, optimizer, rate, rest, seed)
            record = dict(
                zip(("example", "optimizer", "seed", "rate"), case, strict=True),
                rest=rest,
                loss=loss,
            )
            with self.path.open("a") as file:
                file.write(json.dumps(record) + "\n")
            program.print_row(*record.values())
            self.losses[case] = loss
        return self.losses[case]

    def rest(self, example: str) -> float:
        """AdamW's best rate, the median of the seeds, which the rest then keeps."""
        return statistics.median(self.best(example, BASELINE, seed) for seed in SEEDS)

    def best(self, example: str, optimizer: str, seed: int) -> float:
        """The best of the powers of two; its neighbours have been run too."""
        if seed == SEEDS[0]:
            best, factors = 2.0 ** FIRST[optimizer], [4.0, 2.0]
        else:
            best, factors = self.best(example, optimizer, SEEDS[0]), [2.0]
        for factor in factors:
            middle = None
            while middle != best:
                middle = best
                best = min(
                    (middle, middle / factor, middle * factor),
                    key=functools.partial(self.loss, example, optimizer, seed),
                )
        return best

    def multiple(self, example: str, optimizer: str, seed: int) -> float:
        """The best rate beside AdamW's, both from parabolas in the power of two."""
        ours, adamw = (
            lowest(self, example, name, seed) for name in (optimizer, BASELINE)
        )
        return ours / adamw


def lowest(runs: Runs, example: str, optimizer: str, seed: int) -> float:
    """Where a parabola through the best run and its neighbours is lowest."""
    best = runs.best(example, optimizer, seed)
    low, middle, high = (
        runs.loss(example, optimizer, seed, best * factor) for factor in (0.5, 1, 2)
    )
    return best * 2.0 ** ((low - high) / (2 * (low - 2 * middle + high)))


# ---- What follows from the runs

# What makes updates as large as AdamW's: 1, or 0.2 * 128**0.5 rounded to the grid.
EQUAL_SIZE = {"moonlight": 1, ONE_RATE: 1, "normuon": 1, "nanochat": 2, "muon": 2}
ANGLES = ("muonh", "normuonh")  # their rate is no length, and starts at a fixed value


def summary(runs: Runs, optimizer: str) -> dict[str, Any]:
    """The best rates of an optimizer, and its losses at three multiples of AdamW's."""
    multiples = {
        example: [runs.multiple(example, optimizer, seed) for seed in SEEDS]
        for example in EXAMPLES
    }
    every = [*itertools.chain(*multiples.values())]
    middle = statistics.geometric_mean(every)
    best_rates = {
        example: [lowest(runs, example, optimizer, seed) for seed in SEEDS]
        for example in EXAMPLES
    }
    of_rates = statistics.geometric_mean(itertools.chain(*best_rates.values()))
    start = power_of_two(of_rates if optimizer in ANGLES else middle)
    equal = EQUAL_SIZE.get(optimizer)

    def mean(rate: Callable[[str, int], float]) -> dict[str, float]:
        return {
            example: statistics.fmean(
                runs.loss(example, optimizer, seed, rate(example, seed))
                for seed in SEEDS
            )
            for example in EXAMPLES
        }

    return {
        "multiple": middle,
        "lowest": min(every),
        "highest": max(every),
        "multiples": multiples,
        "best_rates": best_rates,
        "start": start,
        "loss_at_best": mean(lambda example, seed: runs.best(example, optimizer, seed)),
        "loss_at_start": mean(
            lambda example, seed: (
                start if optimizer in ANGLES else start * runs.rest(example)
            )
        ),
        "loss_at_equal_size": equal
        and mean(lambda example, seed: equal * runs.rest(example)),
    }


def power_of_two(rate: float) -> float:
    """The nearest one."""
    return 2.0 ** round(math.log2(rate))


def calls(optimizer: str, start: float) -> str:
    """What a user writes."""
    name, _, one_rate = optimizer.partition(", ")
    rate = f"{start:.1g}" if optimizer in ANGLES else f"{start:g} * lr"
    return f"`jm.{name}({rate})`" if one_rate else f"`jm.{name}({rate}, adamw=adamw)`"


def starts(found: dict[str, Any]) -> str:
    """The table of first rates."""
    titles = ["start with", "best rate / `lr`", *EXAMPLES, "best rate"]
    rows = [titles]
    for optimizer, result in found.items():
        if optimizer == BASELINE:
            continue
        rates = [*itertools.chain(*result["best_rates"].values())]
        spread = f"{result['lowest']:.1f} to {result['highest']:.1f}"
        rows.append(
            [
                calls(optimizer, result["start"]),
                f"**{result['multiple']:.1f}** ({spread})",
                *(
                    f"{statistics.geometric_mean(each):.1f}"
                    for each in result["multiples"].values()
                ),
                f"{min(rates):.2g} to {max(rates):.2g}",
            ]
        )
    return program.markdown(rows)


def costs(found: dict[str, Any]) -> str:
    """The table of losses at the best rate, the start, and the rate of equal size."""
    kinds = ("loss_at_best", "loss_at_start", "loss_at_equal_size")
    titles = ["", *(f"{name}: best, start, equal size" for name in EXAMPLES)]
    rows = [titles]
    for optimizer, result in found.items():
        rows.append(
            [
                f"`{optimizer}`",
                *(
                    ", ".join(
                        f"{result[kind][example]:.2f}" if result[kind] else "-"
                        for kind in kinds
                    )
                    for example in EXAMPLES
                ),
            ]
        )
    return program.markdown(rows)


def by_width(runs: Runs) -> dict[str, Any]:
    """Best rates of lm1b, and multiples of AdamW's, as means over the seeds."""
    return {
        str(width): {
            optimizer: {
                "best_rate": mean_of(lowest, runs, example, optimizer),
                "multiple": mean_of(Runs.multiple, runs, example, optimizer),
            }
            for optimizer in WIDE
        }
        for example, width in {"lm1b": WIDTH, **WIDTHS}.items()
    }


def mean_of(
    rate: Callable[[Runs, str, str, int], float],
    runs: Runs,
    example: str,
    optimizer: str,
) -> float:
    """The geometric mean over the seeds."""
    return statistics.geometric_mean(
        rate(runs, example, optimizer, seed) for seed in SEEDS_OF_WIDTHS
    )


def widths(found: dict[str, Any]) -> str:
    """The table of best rates by width."""
    rows = [["width", *(f"`{optimizer}`" for optimizer in WIDE)]]
    for width in sorted(found, key=int):
        cells = (
            f"{result['best_rate']:.2g}"
            + ("" if name == BASELINE else f", {result['multiple']:.1f} times AdamW's")
            for name, result in found[width].items()
        )
        rows.append([width, *cells])
    return program.markdown(rows)


def results(runs: Runs) -> dict[str, Any]:
    """What rates.json keeps."""
    optimizers = {optimizer: summary(runs, optimizer) for optimizer in FIRST}
    return {"optimizers": optimizers, "lm1b_by_width": by_width(runs)}


def tables(found: dict[str, Any]) -> dict[str, str]:
    """The tables of docs/rates.md by the names of their places."""
    optimizers = found["optimizers"]
    return {
        "starts": starts(optimizers),
        "costs": costs(optimizers),
        "widths": widths(found["lm1b_by_width"]),
    }


def main(words: list[str]) -> None:
    """The command."""
    parser = program.parser("benchmarks.rates", __doc__)
    add = parser.add_argument
    add("folder", nargs="?", type=pathlib.Path, help="the examples of a clone of Flax")
    add("--report", action="store_true")
    args = parser.parse_args(words)
    runs = Runs(RESULTS / "rates.jsonl", args.folder)
    if args.folder:
        program.print_head("example", "optimizer", "seed", "rate", "rest", "loss")
    for seed in SEEDS:  # one seed of all gives a first answer
        for example in EXAMPLES:
            for optimizer in FIRST:
                runs.best(example, optimizer, seed)
    found = results(runs)
    if args.folder:
        about = program.describe("benchmarks.rates", ["flax/examples"])
        program.save(about | found, RESULTS / "rates.json")
    for name, table in tables(found).items():
        print(table)
        program.fill(ROOT / "docs" / "rates.md", name, table)


if __name__ == "__main__":
    main(sys.argv[1:])
