"""The command line of train_gpt.py, and the settings that a run keeps.

Settings do not change during a run. They are stored in runs/NAME/settings.json and need
not be given again to resume it. A resumed run has the layout that it began with, unless
--sharding gives another.
"""

import argparse
import json
import math
import pathlib
from collections.abc import Callable

from gpt import HEAD_WIDTH
from layouts import AXES
from optimizers import OPTIMIZERS

SETTINGS = (
    "optimizer", "compare", "steps", "width", "depth", "context", "batch_size", "seed",
    "data", "learning_rate", "adamw_learning_rate", "embedding_factor", "momentum",
    "weight_decay", "evaluate_every", "qk_clip", "heads",
)  # fmt: skip
LAYOUT = ("sharding", "devices", "mesh")


def number(kind: type, expected: str, holds: Callable[[float], bool]) -> Callable:
    """Convert an option to a number; refuse it unless it meets a condition."""

    def convert(text: str) -> float:
        if not holds(kind(text)):
            raise argparse.ArgumentTypeError(f"{text}: expected {expected}")
        return kind(text)

    convert.__name__ = expected  # argparse names it where `kind` fails
    return convert


SEEDS = 2**32  # of a larger one, JAX's keys drop bits
positive = number(int, "a positive whole number", lambda x: x > 0)
seed = number(int, f"a whole number below {SEEDS}", lambda x: 0 <= x < SEEDS)
rate = number(float, "a number of at least 0", lambda x: 0 <= x < math.inf)
momentum = number(float, "a number in [0, 1)", lambda x: 0 <= x < 1)
above_zero = number(float, "a number above 0", lambda x: x > 0)


def parse(argv: list[str] | None, description: str | None) -> argparse.Namespace:
    """The options of a run; with --resume, those that it began with."""
    parser = argparse.ArgumentParser(
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--optimizer", choices=OPTIMIZERS, default="nanochat")
    add(
        "--compare",
        metavar="A,B",
        type=optimizers,
        help="train several and draw their losses",
    )
    add("--steps", type=positive, default=300, help="default 300")
    add("--width", type=positive, default=128, help="a multiple of 32, default 128")
    add("--depth", type=positive, default=4, help="blocks, default 4")
    add("--context", type=positive, default=128, help="characters seen, default 128")
    add("--batch-size", type=positive, default=16, help="windows in a step, default 16")
    add("--seed", type=seed, default=0, help="of weights and batches, default 0")
    add("--data", metavar="FILE", help="text in UTF-8; else Python's documentation")
    add("--learning-rate", type=rate, help="of the matrices; default best.json")
    add("--adamw-learning-rate", type=rate, help="of all else; default best.json")
    add("--embedding-factor", type=rate,
        help="times that rate for the embedding; default best.json")  # fmt: skip
    add("--momentum", type=momentum, help="of the matrices; default best.json")
    add("--weight-decay", type=rate,
        help="of the matrices in the first step; default best.json")  # fmt: skip
    add("--qk-clip", metavar="THRESHOLD", type=above_zero,
        help="largest attention logit; instead of QK-norm")  # fmt: skip
    add("--heads", choices=("joined", "apart"), default="joined",
        help="apart: each head of q, k, v is a matrix")  # fmt: skip
    add("--evaluate-every", type=positive, default=10, metavar="STEPS")
    add("--checkpoint-every", type=positive, default=50, metavar="STEPS")
    add("--sharding", choices=AXES, metavar="LAYOUT",
        help="none (default); zero2; fsdp; or hsdp")  # fmt: skip
    add("--devices", type=positive, help="per process; default all")
    add("--mesh", metavar="A,B", type=mesh_shape,
        help="replicas and fsdp (default: 2 replicas), for hsdp")  # fmt: skip
    add("--distributed", action="store_true", help="this is one of several processes")
    add("--coordinator", metavar="HOST:PORT", help="default: JAX finds it")
    add("--processes", type=positive, help="their number; default: JAX finds it")
    add("--process-id", type=int, help="its index; default: JAX finds it")
    add("--runs", default="runs", metavar="FOLDER", help="of all runs")
    add("--name", help="of the run; default the optimizer's")
    add("--resume", action="store_true", help="from the last checkpoint")
    options = parser.parse_args(argv)
    name = options.name or "-".join(options.compare or [options.optimizer])
    if options.resume:
        saved = read_settings(pathlib.Path(options.runs, name))
        layout = saved.pop("layout", {}) if options.sharding is None else {}
        parser.set_defaults(**saved, **layout)
        options = parser.parse_args(argv)
    options.sharding = options.sharding or "none"
    if options.width % HEAD_WIDTH:
        parser.error(f"--width {options.width}: expected a multiple of {HEAD_WIDTH}")
    many = "expected with --sharding zero2, fsdp or hsdp"
    if options.sharding == "none" and (options.devices or 1) > 1:
        parser.error(f"--devices {options.devices}: {many}")
    if options.sharding == "none" and options.distributed:
        parser.error(f"--distributed: {many}")
    if options.mesh and len(AXES[options.sharding]) < 2:
        parser.error("--mesh: expected with --sharding hsdp")
    options.name = name
    return options


def mesh_shape(text: str) -> tuple[int, int]:
    a, _, b = text.partition(",")
    if not (a.isdecimal() and b.isdecimal() and int(a) and int(b)):
        raise argparse.ArgumentTypeError(
            f"{text}: expected two positive whole numbers with a comma, like 4,2"
        )
    return int(a), int(b)


def optimizers(text: str) -> list[str]:
    names = text.split(",")
    different = set(names)
    if not different <= set(OPTIMIZERS) or not 2 <= len(names) == len(different):
        raise argparse.ArgumentTypeError(
            f"{text}: expected two or more of {', '.join(OPTIMIZERS)}, each once, with "
            "commas"
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
    """Raise a ValueError if settings differ from those the run began with."""
    for name in settings.keys() - {"layout"}:
        if settings[name] != saved.get(name):
            raise ValueError(
                f"{folder} began with {name} {saved.get(name)}, not {settings[name]}: "
                f"resume it with that, or begin another run with --name"
            )
