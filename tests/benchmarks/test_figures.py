"""The pages have the figures of the results, most of which nobody makes again."""

import itertools
import json
import math
import pathlib
import re
import runpy
import statistics

ROOT = pathlib.Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
README = ROOT / "README.md"
mean = statistics.fmean


def results(name):
    return json.loads((RESULTS / name).read_text())


def table(name):
    """The rows of the table with this mark, as lists of cells, by their first cell."""
    (page,) = (
        text
        for text in (path.read_text() for path in [*ROOT.glob("docs/*.md"), README])
        if f"<!-- {name} -->" in text
    )
    lines = page.partition(f"<!-- {name} -->\n\n")[2].splitlines()
    rows = [*itertools.takewhile(lambda line: line.startswith("|"), lines)][2:]
    cells = ([x.strip(" *`") for x in row.strip("|").split("|")] for row in rows)
    return {first: rest for first, *rest in cells}


def test_steps_that_each_recipe_needs():
    """The shortest runs whose mean over three seeds is at or below AdamW's."""
    pace = results("learning/pace.json")
    best = json.loads((ROOT / "examples" / "best.json").read_text())

    def losses(optimizer):
        """By length: the last losses of runs with its best settings, by seed."""
        found = {}
        lines = (RESULTS / f"learning/{optimizer}.jsonl").read_text().splitlines()
        for run in map(json.loads, lines):
            if (run["settings"], run["width"]) == (best[optimizer], 128):
                by_seed = found.setdefault(run["steps"], {})
                by_seed[run["seed"]] = run["validation_loss"]
        return {n: [*x.values()] for n, x in sorted(found.items()) if len(x) == 3}

    target, expected = mean(losses("adamw")[300]), {}
    for optimizer, settings in best.items():
        by_length = losses(optimizer)
        steps = next(n for n, ends in by_length.items() if mean(ends) <= target)
        middle = mean(by_length[300])
        spread = max(abs(x - middle) for x in by_length[300])
        head = settings["adamw_learning_rate"]
        embedding = head * settings.get("embedding_factor", 1)
        expected[optimizer] = [
            f"{settings['learning_rate']:g}",
            f"{head:g}, {embedding:g}",
            f"{middle:.4f} ± {spread:.4f}",
            str(steps),
        ]
    assert table("learning_300_128") == expected
    ratios = sorted(pace[f"{x}, width 128"]["ratio"] for x in best if x != "adamw")
    page = " ".join((ROOT / "docs" / "rates.md").read_text().split())
    most = math.ceil(100 * ratios[-1]) / 100
    assert f"takes {ratios[0]:.2f} to {most:.2f} of the time" in page


def test_heads_joined_and_apart():
    """Means of three seeds, and how far the furthest is."""
    ends = {}
    for line in (RESULTS / "learning" / "heads.jsonl").read_text().splitlines():
        run = json.loads(line)
        row = run["optimizer"], str(run["steps"])
        columns = ends.setdefault(row, {"joined": [], "apart": []})
        columns[run["heads"]].append(run["validation_loss"])

    def cell(losses):
        assert len(losses) == 3
        middle = mean(losses)
        return f"{middle:.4f} ± {max(abs(x - middle) for x in losses):.4f}"

    assert table("heads") == {
        name: [steps, *map(cell, columns.values())]
        for (name, steps), columns in ends.items()
    }


tasks = runpy.run_path(str(ROOT / "docs" / "charts.py"))["tasks"]


COLUMNS = (  # of the first rates: an optimizer and its rate, None for the best one
    ("adamw", lambda lr, width: lr),
    ("nanochat", lambda lr, width: (lr * width) ** 0.5 / 40),
    ("nanochat", lambda lr, width: 0.02),
    ("nanochat", None),
    ("moonlight", lambda lr, width: lr**0.5 / 8),
)


def columns(task):
    """The losses of three seeds in each column."""
    for optimizer, rate in COLUMNS:
        if rate:
            yield task[optimizer][f"{rate(task['lr'], task['width']):.4g}"]
        else:
            whole = [x for x in task[optimizer].values() if len(x) == 3]
            yield min(whole, key=mean)


def spread(losses):
    digits = 3 if mean(losses) > 0.1 else 4
    return f"{mean(losses):.{digits}f} ± {statistics.stdev(losses):.{digits}f}"


def test_first_rates_for_a_user_of_adamw():
    def row(task):
        adamw, nanochat, _, _, moonlight = map(spread, columns(task))
        size = [str(task["width"]), f"{task['lr']:.2g}"]
        return [*size, adamw, nanochat, moonlight]

    assert table("first_rates") == {x: row(task) for x, task in tasks().items()}


def test_what_is_promised_of_first_rates():
    above, close, worst = [set() for _ in COLUMNS], set(), 0
    for name, task in tasks().items():
        adamw, start, *_, best, _ = lists = [*columns(task)]
        for names, losses in zip(above, lists, strict=True):
            names |= {name} if mean(losses) > mean(adamw) else set()
        deviation = max(map(statistics.stdev, (adamw, start)))
        close |= {name} if mean(adamw) - mean(start) < deviation else set()
        worst = max(worst, mean(start) - mean(best))
    assert above == [set(), set(), {"flow", "seq2seq"}, set(), set()]
    assert close == {"CNN", "flow"}
    for page in ("README.md", "docs/rates.md"):
        promise = f"within {math.ceil(100 * worst) / 100} of"
        assert promise in " ".join((ROOT / page).read_text().split())


def test_fine_tuning_in_bfloat16():
    ends = {}
    for row in results("finetune.json"):
        if row["optimizer"] == "moonlight":
            ends.setdefault(row["parameters"], []).append(row["after"])
    page = (ROOT / "docs/stability.md").read_text()
    section = page.partition("The example's GPT, fine-tuned")[2].partition("\n\n")[0]
    found = re.findall(r"\d\.\d{4}", section)
    assert found == [f"{mean(after):.4f}" for after in ends.values()]


def test_what_is_left_of_a_movement():
    moved = {}
    for row in results("finetune_movement.json")["rows"]:
        moved.setdefault(row["learning_rate"], []).append(f"{row['moved']:.3f}")
    assert {float(rate): x for rate, x in table("movement").items()} == moved


def on_a_gpu(name):
    """The lines of a file of results/gpu that say what ran, without the first."""
    first, *lines = (RESULTS / "gpu" / name).read_text().splitlines()
    run = json.loads(first)["run"]
    assert {"card", "versions", "date", "commit", "command"} <= {*run}
    return [json.loads(line) for line in lines]


OURS = "nanochat, bfloat16, scanned"
COLUMNS_ON_A_CARD = [
    *(OURS, f"{OURS}, no kernels"),
    *("optax, tensorfloat32, scanned", "optax, bfloat16, scanned"),
    *("torch-nanochat, bfloat16", "adamw, float32, scanned"),
]


def flows(what, name="h200.jsonl"):
    """Milliseconds of a step in a flow, in both turns."""
    rows = {row["what"]: row for row in on_a_gpu(name)}
    found = (rows.get(f"{what}, turn {turn}") for turn in (1, 2))
    return [1e3 * x["flow_seconds"] for x in found if x]


def test_steps_on_a_gpu():
    def cell(values):
        digits = 2 if mean(values) < 9 else 1
        return ", ".join(f"{x:.{digits}f}" for x in values)

    for name, model in (("GPT-2 124M", "gpt2-124m"), ("GPT 1.3B", "gpt-1.3b")):
        found = [flows(f"{model} {x}") for x in COLUMNS_ON_A_CARD]
        assert table("gpu_steps")[f"{name}, scanned"] == [cell(x) for x in found]
    whats = (x.replace("scanned", "separate") for x in COLUMNS_ON_A_CARD[::3])
    ours, optax = (cell(flows(f"gpt2-124m {x}")) for x in whats)
    separate = table("gpu_steps")["GPT-2 124M, separate"]
    assert separate == [ours, "-", "-", optax, "-", "-"]
    assert len(table("gpu_steps")) == 3
    page = " ".join((ROOT / "docs" / "speed.md").read_text().split())
    before = (mean(flows(f"{x} {OURS}, in old")) for x in ("gpt2-124m", "gpt-1.3b"))
    assert "{:.2f} and {:.0f} ms at commit 12c5a0b".format(*before) in page


def test_forms_of_a_step_that_a_gpu_decided():
    """Whether a pass divides X, the width of tiles, the size of parts of stacks."""

    def ms(model, where=""):
        return mean(flows(f"{model} {OURS}{where}", "h200_forms.jsonl"))

    small, large = "gpt2-124m", "gpt-1.3b"
    shares = [ms(x, ", in nodiv") / ms(x) for x in (small, large)]
    page = " ".join((ROOT / "docs" / "speed.md").read_text().split())
    assert "it steps take {:.2f} and {:.2f} of the time".format(*shares) in page
    polar = ROOT / "jax_muon" / "polar"
    text = " ".join((polar / "hopper" / "kernel.py").read_text().split())
    wide, chosen = ms(small, ", in wide"), ms(small)
    assert f"124M {wide:.2f} ms, not {chosen:.2f}" in text
    text = " ".join((polar / "iteration.py").read_text().replace("#", "").split())
    assert f"{ms(large, ', in parts'):.1f} ms, not {ms(large):.1f}" in text


def test_the_readme_has_steps_on_a_gpu():
    """Means of both turns."""

    def row(model):
        means = (mean(flows(f"{model} {x}")) for x in COLUMNS_ON_A_CARD)
        ours, _, *theirs = (f"{x:.{1 if x < 20 else 0}f}" for x in means)
        return [ours, *theirs]

    names = {"GPT-2 124M": "gpt2-124m", "GPT 1.3B": "gpt-1.3b"}
    assert table("gpu_readme") == {name: row(model) for name, model in names.items()}
    ours, optax, low, torch, _ = table("gpu_readme")["GPT-2 124M"]
    first = " ".join((ROOT / "README.md").read_text().partition("```python")[0].split())
    assert f"took {ours} ms on an H200, [optax's Muon {optax}](" in first
    assert f"in float32 and {low} in bfloat16, nanochat's in PyTorch {torch}" in first


def test_losses_on_a_gpu():
    """The last of each of three seeds, as a range."""
    ends = {}
    for x in on_a_gpu("learn_h200.jsonl") + on_a_gpu("h200.jsonl"):
        if x["what"] == "curve" and x["step"] == x["steps"]:
            case = ends.setdefault((x["kind"], x["lr"], x["steps"]), {})
            case[x.get("seed", 0)] = x["val"]
    page = " ".join((ROOT / "docs" / "rates.md").read_text().split())
    for case, text in (
        (("nanochat", 0.02, 240), "{}, for"),
        (("adamw", 0.001, 600), "{} at 0.001"),
        (("adamw", 0.002, 600), "{} at 0.002"),
    ):
        losses = ends[case].values()
        assert len(losses) == 3
        least, most = min(losses), max(losses)
        assert text.format(f"{least:.3f} to {most:.3f}") in page
    assert max(ends["nanochat", 0.02, 240].values()) < min(
        *ends["adamw", 0.001, 600].values(), *ends["adamw", 0.002, 600].values()
    )


def test_what_was_right_on_a_gpu():
    rows = on_a_gpu("h100.jsonl")
    errors = {"f32": 0, "bf16": 0}
    for row in rows:
        if row["kind"] == "holdout":
            dtype = next(d for d in errors if f"_{d}_" in row["what"])
            errors[dtype] = max(errors[dtype], row["error"])
    both = {x["what"].split()[1]: x["error"] for x in rows if x["kind"] == "smoke"}
    page = " ".join((ROOT / "docs" / "numbers.md").read_text().split())
    assert f"{both['float32']:.1e}".replace("e-0", "e-") in page
    assert f"{both['bfloat16']:.3f} in bfloat16" in page
    assert f"to {errors['f32']:.1e}".replace("e-0", "e-") in page
    assert f"{errors['bf16']:.3f} in bfloat16" in page
    right = [x for x in on_a_gpu("h200.jsonl") if "ok" in x]
    # Where cautious decay took another side for some elements; see on_a_card.both.
    assert [x["error"] > 1e-4 for x in right if not x["ok"]] == [True]
    low = [x for x in right if x["what"].endswith("float32")]
    worst = max(x["error"] for x in low if x["what"].startswith("parity"))
    assert f"{worst:.1e} in float32".replace("e-0", "e-") in page
    assert len([x for x in rows if x["kind"] == "holdout"]) == 16
    assert all(x.get("ok", True) and not x.get("code", 0) for x in rows)


def test_bytes_that_a_step_moves():
    rows = [x for x in results("traffic.json") if x["kernels"] == "on"]
    small, large = (
        next(x for x in rows if (x["model"], x["layout"]) == (model, "scanned"))
        for model in ("gpt2-124m", "gpt-1.3b")
    )
    page = " ".join((ROOT / "docs" / "speed.md").read_text().split())
    for key, before, between in (
        ("outside_products", "moves ", " GB outside products for GPT-2 124M and "),
        ("least", "The least possible is ", " and "),
    ):
        digits = f"{small[key] / 1e9:.2f}{between}{large[key] / 1e9:.1f}"
        assert before + digits in page


def test_memory_of_compiled_steps():
    """Peaks in GB by number of GPUs, and in bytes a parameter by optimizer."""
    rows = results("memory.json")
    peaks = {x["gpus"]: x["peak"] / 1e9 for x in rows if x["table"] == "models"}
    of_7b = [f"{peaks[gpus]:.1f}" for gpus in (1, 8, 64, 256)]
    assert table("models") == {"7B": ["bfloat16", *of_7b]}
    found = {
        x["optimizer"]: f"{x['peak'] / x['elements']:.1f}"
        for x in rows
        if x["table"] == "updates"
    }
    for name, (_, peak) in table("updates").items():
        assert found[name.removeprefix("jm.")] == peak


def test_results_hold_nothing_else():
    """Each file is read here, drawn by charts.py, or named on a page."""
    readers = [pathlib.Path(__file__), *(ROOT / "docs").glob("*.py")]
    readers += [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    text = "".join(path.read_text() for path in readers)
    best = json.loads((ROOT / "examples" / "best.json").read_text())
    runs = {f"{optimizer}.jsonl" for optimizer in best}
    for path in filter(pathlib.Path.is_file, RESULTS.rglob("*")):
        of_a_run = path.parent.name == "learning" and path.name in runs
        assert of_a_run or path.name in text, path
