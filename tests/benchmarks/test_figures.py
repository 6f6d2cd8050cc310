"""Tables of runs that nobody makes again: the pages have the figures of the results."""

import itertools
import json
import math
import pathlib
import statistics

ROOT = pathlib.Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
mean, geometric_mean = statistics.fmean, statistics.geometric_mean


def results(name):
    return json.loads((RESULTS / name).read_text())


def table(name):
    """The rows of the table with this mark, as lists of cells, by their first cell."""
    (page,) = (
        text
        for text in (path.read_text() for path in (ROOT / "docs").glob("*.md"))
        if f"<!-- {name} -->" in text
    )
    lines = page.partition(f"<!-- {name} -->\n\n")[2].splitlines()
    rows = [*itertools.takewhile(lambda line: line.startswith("|"), lines)][2:]
    cells = ([x.strip(" *`") for x in row.strip("|").split("|")] for row in rows)
    return {first: rest for first, *rest in cells}


def test_steps_that_each_recipe_needs():
    """The shortest runs whose mean over three seeds is at or below AdamW's."""
    pace, best = (results(f"learning/{name}.json") for name in ("pace", "best"))
    best = best["300 steps, width 128"]

    def losses(optimizer):
        """By length: the last losses of runs with its best settings, by seed."""
        lines = (RESULTS / f"learning/{optimizer}.jsonl").read_text().splitlines()
        found = {}
        for run in map(json.loads, lines):
            same = run["settings"] == best[optimizer]["settings"]
            if same and run["width"] == 128:
                by_seed = found.setdefault(run["steps"], {})
                by_seed[run["seed"]] = run["validation_loss"]
        return {n: [*x.values()] for n, x in sorted(found.items()) if len(x) == 3}

    target, expected = mean(losses("adamw")[300]), {}
    for optimizer, won in best.items():
        settings, by_length = won["settings"], losses(optimizer)
        steps = next(n for n, ends in by_length.items() if mean(ends) <= target)
        middle = mean(by_length[300])
        spread = max(abs(x - middle) for x in by_length[300])
        head = settings["adamw_learning_rate"]
        embedding = head * settings.get("embedding_factor", 1)
        decay = settings.get("weight_decay")
        ratio = pace.get(f"{optimizer}, width 128", {"ratio": 1})["ratio"]
        expected[optimizer] = [
            f"{settings['learning_rate']:g}",
            f"{settings['momentum']:g}",
            "-" if decay is None else f"{decay:g}",
            f"{head:g}, {embedding:g}",
            f"{middle:.4f} ± {spread:.4f}",
            str(steps),
            f"{steps / 300:.2f}",
            f"{steps / 300 * ratio:.2f}",
        ]
    assert table("learning_300_128") == expected


def test_first_rates_for_a_user_of_adamw():
    found, expected = results("rates.json")["optimizers"], {}
    for optimizer, x in found.items():
        recipe, _, one_rate = optimizer.partition(", ")
        is_angle = recipe == "muonh"
        rate = f"{x['start']:.1g}" if is_angle else f"{x['start']:g} * lr"
        best = [*itertools.chain(*x["best_rates"].values())]
        expected[f"jm.{recipe}({rate}{'' if one_rate else ', adamw=adamw'})"] = [
            f"{x['multiple']:.1f}** ({x['lowest']:.1f} to {x['highest']:.1f})",
            *(f"{geometric_mean(each):.1f}" for each in x["multiples"].values()),
            f"{min(best):.2g} to {max(best):.2g}",
        ]
        # A start is a power of two: the multiple of AdamW's rate, or itself an angle.
        middle = geometric_mean(best) if is_angle else x["multiple"]
        assert x["start"] == 2.0 ** round(math.log2(middle))
    del expected["jm.adamw(1 * lr, adamw=adamw)"]
    assert table("starts") == expected


def test_best_rates_by_width():
    found = results("rates.json")["lm1b_by_width"]
    assert table("widths") == {
        width: [
            f"{x['best_rate']:.2g}"
            + ("" if name == "adamw" else f", {x['multiple']:.1f} times AdamW's")
            for name, x in found[width].items()
        ]
        for width in found
    }


def test_fine_tuning_in_bfloat16():
    ends = {}
    for row in results("finetune.json"):
        name = {"adamw": "optax.adamw"}.get(row["optimizer"], row["optimizer"])
        by_parameters = ends.setdefault(name, {})
        by_parameters.setdefault(row["parameters"], []).append(row["after"])
    assert table("finetune") == {
        name: [f"{mean(after):.4f}" for after in by_parameters.values()]
        for name, by_parameters in ends.items()
    }


def test_what_is_left_of_a_movement():
    moved = {}
    for row in results("finetune_movement.json")["rows"]:
        moved.setdefault(row["learning_rate"], []).append(f"{row['moved']:.3f}")
    assert {float(rate): x for rate, x in table("movement").items()} == moved
