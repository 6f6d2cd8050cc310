"""Trains a GPT on characters with an optimizer of the Muon family.

    python examples/train_gpt.py                            jax_muon.nanochat()
    python examples/train_gpt.py --optimizer adamw
    python examples/train_gpt.py --resume                   goes on where it was stopped
    python examples/train_gpt.py --compare nanochat,adamw   both, in one picture
    python examples/train_gpt.py --data FILE                on a text of your own
    python examples/train_gpt.py --sharding zero2 --devices 8
    python examples/train_gpt.py --sharding fsdp --devices 8
    python examples/train_gpt.py --sharding fsdp,tp --mesh 4,2 --devices 8
    python examples/train_gpt.py --qk-clip 30               in the place of QK-norm

This file is the story of a run. The model is in gpt.py, the data in text.py, optimizers
with their rates and schedules in optimizers.py, devices and processes in layouts.py,
and what lies in runs/NAME in runs.py.
"""

import argparse
import contextlib
import json
import pathlib
import time

import jax
import jax.numpy as jnp
from flax import nnx
from gpt import GPT, HEAD_WIDTH, generate
from layouts import Layout, connect
from optimizers import OPTIMIZERS, best_rates, make_optimizer, table
from runs import (
    Checkpoints,
    Metrics,
    curve,
    draw,
    first_step_at,
    read,
    set_aside,
    write,
)
from text import Text, read_text
from tqdm import tqdm

FETCH_EVERY = 10  # steps between two looks at the device's metrics


def main(argv: list[str] | None = None) -> None:
    options = parse(argv)
    layout = connect(options)
    folder = pathlib.Path(options.runs, options.name)
    text = read_text(options.data, options.context)
    if not layout.writes:
        with contextlib.redirect_stdout(None):
            return run(options, layout, text, folder)
    run(options, layout, text, folder)


def run(
    options: argparse.Namespace, layout: Layout, text: Text, folder: pathlib.Path
) -> None:
    """All that was asked for. Every process does the same, and the first one writes."""
    print(text)
    settings = {name: vars(options)[name] for name in SETTINGS}
    settings["sha256"] = text.sha256
    there = any(p.name.isdigit() for p in folder.rglob("checkpoints/*"))
    layout.wait("looked for checkpoints")
    if options.resume and there:
        saved = read_settings(folder)
        check_same(settings, saved, folder)
        rates = saved["rates"]
    else:
        rates = settings["rates"] = rates_of(options)
        if layout.writes:
            set_aside(folder)
            write(folder / "settings.json", json.dumps(settings, indent=2) + "\n")
        layout.wait("made the folder")

    if options.compare:
        for name in options.compare:
            train(name, rates[name], options, layout, text, folder / name)
        if layout.writes:
            compare(options.compare, folder)
    else:
        name = options.optimizer
        train(name, rates[name], options, layout, text, folder)


def train(
    optimizer: str,
    rates: dict[str, float],
    options: argparse.Namespace,
    layout: Layout,
    text: Text,
    folder: pathlib.Path,
) -> None:
    """One run, from the beginning or from the last checkpoint in its folder."""
    print(f"\n{folder}: {options.steps} steps of {optimizer} with {rates}")
    began = time.monotonic()
    clip = options.qk_clip
    model = GPT(
        len(text.vocabulary),
        options.width,
        options.depth,
        qk_norm=clip is None,
        rngs=nnx.Rngs(options.seed),
    )
    graph, params = nnx.split(model, nnx.Param)
    params = layout.place(params)
    where = layout.settings(params)
    tx = make_optimizer(optimizer, options.steps, qk_clip=clip, **rates, **where)
    loss, evaluate = make_losses(graph, clip is not None)
    train_step = layout.make_step(loss, tx, ("max_logits",) if clip else ())

    checkpoints = Checkpoints(folder / "checkpoints")
    done, saved = checkpoints.restore(layout.abstract(tx, params))
    if done:
        print(f"going on after step {done}")
        params, opt_state = layout.restore(tx, saved)
    else:
        opt_state = layout.init(tx, params)
    if layout.writes:
        plain = make_optimizer(optimizer, options.steps, **rates)
        shown = table(optimizer, plain, params, layout.mesh)
        write(folder / "parameters.txt", shown + "\n")
    metrics = Metrics(folder / "metrics.jsonl" if layout.writes else None, done)

    validation = layout.batch(
        text.validation_batches(options.batch_size, options.context)
    )
    tokens = options.batch_size * options.context  # in a step
    bar = tqdm(
        initial=done * tokens,
        total=options.steps * tokens,
        unit="tok",
        unit_scale=True,
        disable=not layout.writes,
    )
    for step in range(done + 1, options.steps + 1):
        batch = text.batch(options.seed, step, options.batch_size, options.context)
        batch = layout.batch(batch)
        params, opt_state, values = train_step(params, opt_state, batch)
        if max_logits := values.pop("aux"):
            values["max_logit"] = largest(max_logits)
        if step % options.evaluate_every == 0 or step == options.steps:
            values["validation_loss"] = evaluate(params, validation)
        metrics.add(step, **values)

        records = []
        if step % options.checkpoint_every == 0 or step == options.steps:
            records = metrics.flush()
            checkpoints.save(step, layout.save(params, opt_state))
        elif step % FETCH_EVERY == 0:
            records = metrics.flush(keep=FETCH_EVERY)
        if records:
            bar.set_description(f"step {records[-1]['step']}", refresh=False)
            shown = ("loss", "max_logit") if clip else ("loss",)
            last = {name: f"{records[-1][name]:.3f}" for name in shown}
            bar.set_postfix(last, refresh=False)
            bar.update(len(records) * tokens)
    bar.close()
    checkpoints.close()
    print(f"{options.steps - done} steps in {time.monotonic() - began:.0f} s")
    params = layout.gather(params)
    if layout.writes:
        report(optimizer, nnx.merge(graph, params), options, text, folder)


def report(
    optimizer: str,
    model: GPT,
    options: argparse.Namespace,
    text: Text,
    folder: pathlib.Path,
) -> None:
    """What a run ends with: its picture, a text that the model writes, its loss."""
    records = read(folder / "metrics.jsonl")
    draw(
        {
            "training": curve(records, "loss"),
            "validation": curve(records, "validation_loss"),
        },
        f"Loss with {optimizer}",
        folder / "loss.png",
    )
    prompt = text.validation[: max(1, options.context // 4)]
    written = jax.jit(generate, static_argnames=("length", "context"))(
        model,
        prompt,
        length=400,
        context=options.context,
        key=jax.random.key(options.seed),
    )
    sample = f"{text.decode(prompt)}|{text.decode(written)}"
    write(folder / "sample.txt", sample)
    print(f"\n{sample}\n")
    print(
        f"validation loss {records[-1]['validation_loss']:.4f} nats per character "
        f"after {options.steps} steps"
    )
    print(f"In {folder}: {', '.join(sorted(path.name for path in folder.iterdir()))}")


def make_losses(graph: nnx.GraphDef, with_max_logits: bool):
    """The loss of a batch, to learn from, and compiled that of many, to look at."""

    def loss(params, windows):  # windows: (16, 129)
        value, max_logits = nnx.merge(graph, params).loss_and_max_logits(windows)
        return value, {"max_logits": max_logits} if with_max_logits else {}

    def evaluate(params, batches):  # batches: (8, 16, 129)
        return jax.lax.map(lambda batch: loss(params, batch)[0], batches).mean()

    return loss, jax.jit(evaluate)


@jax.jit
def largest(tree):
    """The largest number in all arrays."""
    return jnp.max(jnp.concatenate(jax.tree.leaves(tree)))


def compare(optimizers: list[str], folder: pathlib.Path) -> None:
    """Draws the runs in one picture, with the steps that each needs to one loss.

    That loss is AdamW's final one, or that of the last optimizer where AdamW is none of
    them. A run reaches it at the first evaluation that is not above it.
    """
    curves = {
        name: curve(read(folder / name / "metrics.jsonl"), "validation_loss")
        for name in optimizers
    }
    baseline = "adamw" if "adamw" in optimizers else optimizers[-1]
    target = curves[baseline][1][-1]
    reached = {name: first_step_at(points, target) for name, points in curves.items()}
    result = {
        "baseline": baseline,
        "target": target,
        "steps_to_target": reached,
        "validation_loss": {name: losses[-1] for name, (_, losses) in curves.items()},
    }
    write(folder / "compare.json", json.dumps(result, indent=2) + "\n")
    draw(
        curves,
        "Validation loss",
        folder / "compare.png",
        target=(f"{baseline}'s final loss", target),
    )
    print(f"\nSteps to {baseline}'s final validation loss, {target:.4f}:")
    for name, step in reached.items():
        print(f"  {name:10} {step or 'not reached'}")
    print(f"In {folder}: compare.json, compare.png")


def rates_of(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """The learning rates of each optimizer: as given, or else the best of the grid."""
    given = {
        "learning_rate": options.learning_rate,
        "adamw_learning_rate": options.adamw_learning_rate,
    }
    given = {key: rate for key, rate in given.items() if rate is not None}
    return {
        name: given if len(given) == 2 else best_rates(name) | given
        for name in options.compare or [options.optimizer]
    }


# What may be asked for. Settings are what a run keeps from its beginning to its end;
# they lie in runs/NAME/settings.json and need not be given again to resume.

SETTINGS = (
    "optimizer", "compare", "steps", "width", "depth", "context", "batch_size", "seed",
    "data", "learning_rate", "adamw_learning_rate", "evaluate_every",
    "qk_clip",
)  # fmt: skip


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--optimizer", choices=OPTIMIZERS, default="nanochat")
    add("--compare", metavar="A,B", type=optimizers, help="train and draw all of these")
    add("--steps", type=positive, default=300, help="default 300")
    add("--width", type=positive, default=128, help="a multiple of 32, default 128")
    add("--depth", type=positive, default=4, help="blocks, default 4")
    add("--context", type=positive, default=128, help="characters seen, default 128")
    add("--batch-size", type=positive, default=16, help="windows in a step, default 16")
    add("--seed", type=int, default=0, help="of weights and batches, default 0")
    add("--data", metavar="FILE", help="text in UTF-8; else Python's documentation")
    add("--learning-rate", type=float, help="of matrices; else the best of grid.json")
    add("--adamw-learning-rate", type=float, help="of all the rest; likewise")
    add("--qk-clip", metavar="THRESHOLD", type=above_zero,
        help="largest attention logit; in the place of QK-norm")  # fmt: skip
    add("--evaluate-every", type=positive, default=10, metavar="STEPS")
    add("--checkpoint-every", type=positive, default=50, metavar="STEPS")
    add("--sharding", choices=("none", "zero2", "fsdp", "fsdp,tp"), default="none")
    add("--devices", type=positive, help="of each process; else all")
    add("--mesh", metavar="FSDP,TP", type=mesh_shape,
        help="devices along each; else 2 along tp")  # fmt: skip
    add("--distributed", action="store_true", help="this is one of several processes")
    add("--coordinator", metavar="HOST:PORT", help="else the cluster tells")
    add("--processes", type=positive, help="how many there are; likewise")
    add("--process-id", type=int, help="which of them this is; likewise")
    add("--runs", default="runs", metavar="FOLDER", help="where all runs are")
    add("--name", help="the run's folder there; else the optimizer's name")
    add("--resume", action="store_true", help="go on from the last checkpoint")
    options = parser.parse_args(argv)
    name = options.name or "-".join(options.compare or [options.optimizer])
    if options.resume:
        parser.set_defaults(**read_settings(pathlib.Path(options.runs, name)))
        options = parser.parse_args(argv)
    if options.width % HEAD_WIDTH:
        parser.error(f"--width {options.width}: valid are multiples of {HEAD_WIDTH}")
    if options.sharding == "none" and (options.devices or 1) > 1:
        parser.error("--devices: valid with --sharding zero2, fsdp or fsdp,tp")
    if options.sharding == "none" and options.distributed:
        parser.error("--distributed: valid with --sharding zero2, fsdp or fsdp,tp")
    if options.sharding != "fsdp,tp" and options.mesh:
        parser.error("--mesh: valid are runs with --sharding fsdp,tp")
    options.name = name
    return options


def positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: valid are positive whole numbers")
    return int(text)


def mesh_shape(text: str) -> tuple[int, int]:
    fsdp, comma, tp = text.partition(",")
    if not (comma and fsdp.isdecimal() and tp.isdecimal() and int(fsdp) and int(tp)):
        raise argparse.ArgumentTypeError(
            f"{text}: valid are two positive whole numbers with a comma, like 4,2"
        )
    return int(fsdp), int(tp)


def above_zero(text: str) -> float:
    if not float(text) > 0:
        raise argparse.ArgumentTypeError(f"{text}: valid are numbers above 0")
    return float(text)


def optimizers(text: str) -> list[str]:
    names = text.split(",")
    if not set(names) <= set(OPTIMIZERS) or len(names) < 2:
        raise argparse.ArgumentTypeError(
            f"{text}: valid are two or more of {', '.join(OPTIMIZERS)}, with commas"
        )
    return names


def read_settings(folder: pathlib.Path) -> dict:
    path = folder / "settings.json"
    if not path.exists():
        there = sorted(p.parent.name for p in folder.parent.glob("*/settings.json"))
        raise ValueError(
            f"{folder} holds no run to resume; {folder.parent} has "
            f"{', '.join(there) or 'none'}"
        )
    return json.loads(path.read_text())


def check_same(settings: dict, saved: dict, folder: pathlib.Path) -> None:
    """A run whose settings change on the way would no longer be that run.

    The model's size is checked against the checkpoint itself.
    """
    for name in settings.keys() - {"width", "depth"}:
        if settings[name] != saved.get(name):
            raise ValueError(
                f"{folder} began with {name} {saved.get(name)}, not {settings[name]}: "
                f"resume it with that, or begin another run with --name"
            )


if __name__ == "__main__":
    main()
