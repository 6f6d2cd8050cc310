"""Trains a GPT on characters with an optimizer of the Muon family.

    python examples/train_gpt.py                            jax_muon.nanochat()
    python examples/train_gpt.py --optimizer adamw
    python examples/train_gpt.py --resume                   resumes a stopped run
    python examples/train_gpt.py --compare nanochat,adamw   both, in one picture
    python examples/train_gpt.py --data FILE                on your text
    python examples/train_gpt.py --sharding zero2 --devices 8
    python examples/train_gpt.py --sharding fsdp --devices 8
    python examples/train_gpt.py --sharding hsdp --mesh 2,4 --devices 8
    python examples/train_gpt.py --qk-clip 30               instead of QK-norm

Ctrl-C saves the state before the run ends, and --resume continues it. A resumed run
keeps its --sharding unless you give another.

Read minimal.py first, which trains the same model without options. The model is in
gpt.py, the text in text.py, optimizers with their rates and schedules in optimizers.py,
devices and processes in layouts.py, the files in runs/NAME in runs.py, and the command
line in options.py.
"""

import argparse
import contextlib
import json
import pathlib
import sys
import time
import traceback

import jax
import jax.numpy as jnp
import optax
import runs
from flax import nnx
from gpt import GPT, generate
from jax.sharding import Mesh
from layouts import connect, gather, in_any, once, place, put, writes
from optimizers import RATES, best_rates, make_optimizer
from options import LAYOUT, SETTINGS, check_same, parse, read_settings
from text import Text, read_text
from tqdm import tqdm

import jax_muon as jm

FETCH_EVERY = 10  # steps between two transfers of metrics from the device


def main(argv: list[str] | None = None) -> None:
    options = parse(argv, __doc__)
    folder = pathlib.Path(options.runs, options.name)
    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(runs.stoppable())
        try:
            mesh = connect(options)
            text = read_text(options.data, options.context)
            if not writes():
                stack.enter_context(contextlib.redirect_stdout(None))
            run(options, mesh, text, folder, stop)
        except KeyboardInterrupt:
            sys.exit(f"{folder}: ended at once; --resume restarts from a checkpoint")


def run(
    options: argparse.Namespace,
    mesh: Mesh,
    text: Text,
    folder: pathlib.Path,
    stop: list[int],
) -> None:
    """Train one optimizer or compare several; the first process writes the files."""
    print(text)
    settings = {name: vars(options)[name] for name in SETTINGS}
    settings["sha256"] = text.sha256
    settings["layout"] = {name: vars(options)[name] for name in LAYOUT}
    there = in_any(any(p.name.isdigit() for p in folder.rglob("checkpoints/*")))
    if options.resume and there:
        saved = read_settings(folder)
        check_same(settings, saved, folder)
        rates = saved["rates"]
    else:
        rates = settings["rates"] = rates_of(options)
        once(begin, folder, settings)

    for name in options.compare or [options.optimizer]:
        inside = folder / name if options.compare else folder
        train(name, rates[name], options, mesh, text, inside, stop)
    if options.compare and writes():
        compare(options.compare, folder)


def begin(folder: pathlib.Path, settings: dict) -> None:
    """Start a new folder, with the settings of the run."""
    runs.set_aside(folder)
    runs.write(folder / "settings.json", json.dumps(settings, indent=2) + "\n")


def train(
    optimizer: str,
    rates: dict[str, float],
    options: argparse.Namespace,
    mesh: Mesh,
    text: Text,
    folder: pathlib.Path,
    stop: list[int],
) -> None:
    """One run, from step 1 or from the last checkpoint in its folder."""
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
    loss, evaluate = make_losses(graph, clip is not None)
    validation = text.validation_batches(options.batch_size, options.context)
    matrices = jm.find_matrices(params, loss, validation[0], heads=options.heads)
    recipe = make_optimizer(optimizer, options.steps, matrices, qk_clip=clip, **rates)
    where = place(params, mesh, matrices)
    tx = jm.on_mesh(recipe, where, divide=mesh.axis_names)
    train_step = jm.make_train_step(
        loss, tx, has_aux=True, max_aux="max_logits" if clip else ()
    )

    checkpoints = runs.Checkpoints(folder / "checkpoints")
    done, *saved = checkpoints.restore(*train_step.abstract(params))
    if done:
        print(f"continues after step {done}")
    params, state = saved if done else train_step.init(params)
    if writes():
        _, aux = jax.eval_shape(loss, params, validation[0])
        aux = jax.tree.map(lambda x: jnp.zeros(x.shape), aux)  # for clip_qk
        table = jm.describe(recipe if mesh.size == 1 else tx, params, **aux)
        runs.write(folder / "parameters.txt", f"{table}\n")
    metrics = runs.Metrics(folder / "metrics.jsonl" if writes() else None, done)

    validation = put(validation, mesh)
    tokens = options.batch_size * options.context  # in a step
    bar = tqdm(
        initial=done * tokens,
        total=options.steps * tokens,
        unit="tok",
        unit_scale=True,
        disable=not writes(),
    )
    # All processes must stop at the same step.
    ask_every = 1 if jax.process_count() == 1 else FETCH_EVERY
    step, last = done, options.steps
    while step < last:
        step += 1
        batch = text.batch(options.seed, step, options.batch_size, options.context)
        params, state, values = train_step(params, state, put(batch, mesh))
        if max_logits := values.pop("aux"):
            values["max_logit"] = largest(max_logits)
        if clip:  # copied, since the next step overwrites the state
            values |= copied({"clipped_heads": optax.tree.get(state, "clipped")})
        if step % options.evaluate_every == 0 or step == last:
            values["validation_loss"] = evaluate(params, validation)
        metrics.add(step, **values)
        if step % ask_every == 0 and in_any(bool(stop)):
            last = step

        records = []
        if step % options.checkpoint_every == 0 or step == last:
            records = metrics.flush()
            checkpoints.save(step, params, state)
        elif step % FETCH_EVERY == 0:
            records = metrics.flush(keep=FETCH_EVERY)
        if records:
            bar.set_description(f"step {records[-1]['step']}", refresh=False)
            shown = ("loss", "max_logit") if clip else ("loss",)
            newest = {name: f"{records[-1][name]:.3f}" for name in shown}
            bar.set_postfix(newest, refresh=False)
            bar.update(len(records) * tokens)
    bar.close()
    checkpoints.manager.close()  # once the last one is written
    if last < options.steps:
        saved_in = checkpoints.folder / str(last)
        print(f"stopped after step {last}: saved in {saved_in}, continue with --resume")
        sys.exit(130)  # as shells write Ctrl-C
    print(f"{last - done} steps in {time.monotonic() - began:.0f} s")
    params = gather(params, mesh)
    if writes():
        report(optimizer, nnx.merge(graph, params), options, text, folder)


def report(
    optimizer: str,
    model: GPT,
    options: argparse.Namespace,
    text: Text,
    folder: pathlib.Path,
) -> None:
    """The end of a run: a picture of the loss, and a text that the model writes."""
    records = runs.read(folder / "metrics.jsonl")
    runs.draw(
        {
            "training": runs.curve(records, "loss"),
            "validation": runs.curve(records, "validation_loss"),
        },
        f"Loss with {optimizer}",
        folder / "loss.png",
    )
    prompt = text.validation[: max(1, options.context // 4)]
    key = jax.random.key(options.seed)
    written = generate(model, prompt, 400, context=options.context, key=key)
    sample = f"{text.decode(prompt)}|{text.decode(written)}"
    runs.write(folder / "sample.txt", sample)
    print(f"\n{sample}\n")
    print(
        f"validation loss {records[-1]['validation_loss']:.4f} nats per character "
        f"after {options.steps} steps"
    )
    print(f"In {folder}: {', '.join(sorted(path.name for path in folder.iterdir()))}")


def make_losses(graph: nnx.GraphDef, with_max_logits: bool):
    """The loss of a batch, for training; the compiled mean loss of many batches."""

    def loss(params, windows):  # windows: (16, 129)
        value, max_logits = nnx.merge(graph, params).loss(windows)
        return value, {"max_logits": max_logits} if with_max_logits else {}

    def evaluate(params, batches):  # batches: (8, 16, 129)
        return jax.lax.map(lambda batch: loss(params, batch)[0], batches).mean()

    return loss, jax.jit(evaluate)


@jax.jit
def copied(tree):
    return jax.tree.map(jnp.copy, tree)


@jax.jit
def largest(tree):
    """The largest element of all arrays."""
    return jnp.max(jnp.concatenate(jax.tree.leaves(tree)))


def compare(optimizers: list[str], folder: pathlib.Path) -> None:
    """Draws the runs in one picture, with the steps that each takes to reach one loss.

    That is AdamW's final loss, or the last optimizer's if AdamW is not compared. A run
    reaches it at the first evaluation that is not above it.
    """
    curves = {
        name: runs.curve(runs.read(folder / name / "metrics.jsonl"), "validation_loss")
        for name in optimizers
    }
    baseline = "adamw" if "adamw" in optimizers else optimizers[-1]
    target = curves[baseline][1][-1]
    reached = {
        name: runs.first_step_at(points, target) for name, points in curves.items()
    }
    result = {
        "baseline": baseline,
        "target": target,
        "steps_to_target": reached,
        "validation_loss": {name: losses[-1] for name, (_, losses) in curves.items()},
    }
    runs.write(folder / "compare.json", json.dumps(result, indent=2) + "\n")
    runs.draw(
        curves,
        "Validation loss",
        folder / "compare.png",
        target=(f"{baseline}'s final loss", target),
    )
    print(f"\nSteps to {baseline}'s final validation loss, {target:.4f}:")
    for name, step in reached.items():
        print(f"  {name:10} {step or 'not reached'}")
    print(f"In {folder}: compare.json, compare.png")


def rates_of(options: argparse.Namespace) -> dict[str, dict]:
    """The rates of each optimizer: those given, else the best found in a search."""
    given = {name: getattr(options, name) for name in RATES}
    given = {name: rate for name, rate in given.items() if rate is not None}
    return {
        name: best_rates(name) | given
        for name in options.compare or [options.optimizer]
    }


def program() -> None:
    """Runs `main`, and ends with one line on a wrong option, file or setting.

    Those are the ValueErrors that the example or jax_muon raises itself.
    """
    try:
        main()
    except ValueError as error:
        where = pathlib.Path(traceback.extract_tb(error.__traceback__)[-1].filename)
        ours = {pathlib.Path(file).parent for file in (__file__, jm.__file__)}
        if ours.isdisjoint(where.parents):
            raise
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    program()
