"""The pages have the figures of the results, most of which nobody makes again."""

import collections
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
    (found,) = (
        text
        for text in (path.read_text() for path in [*ROOT.glob("docs/*.md"), README])
        if f"<!-- {name} -->" in text
    )
    lines = found.partition(f"<!-- {name} -->\n\n")[2].splitlines()
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
        head = settings["adamw_learning_rate"]
        embedding = head * settings.get("embedding_factor", 1)
        expected[optimizer] = [
            f"{settings['learning_rate']:g}",
            f"{head:g}, {embedding:g}",
            str(steps),
        ]
    assert table("learning_300_128") == expected
    ratios = sorted(pace[f"{x}, width 128"]["ratio"] for x in best if x != "adamw")
    most = math.ceil(100 * ratios[-1]) / 100
    assert f"is {ratios[0]:.2f} to {most:.2f} (" in page("benchmarks/NOTES.md")


def test_heads_joined_and_apart():
    """How much higher each of three seeds ends with heads apart."""
    ends = {}
    for line in (RESULTS / "learning" / "heads.jsonl").read_text().splitlines():
        run = json.loads(line)
        case = run["optimizer"], run["steps"], run["seed"]
        ends.setdefault(case, {})[run["heads"]] = run["validation_loss"]
    text = page("benchmarks/NOTES.md")
    for name, steps in (("nanochat", 300), ("muon", 150)):
        seeds = (ends[name, steps, seed] for seed in range(3))
        found = ", ".join(f"{x['apart'] - x['joined']:+.4f}" for x in seeds)
        assert f"`{name}` over {steps} steps {found}" in text
    assert len(ends) == 6


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


def page(name):
    """A page in one line."""
    return " ".join((ROOT / name).read_text().split())


def test_what_is_promised_of_first_rates():
    above, close, over = [set() for _ in COLUMNS], set(), {}
    for name, task in tasks().items():
        adamw, start, *_, best, _ = lists = [*columns(task)]
        for names, losses in zip(above, lists, strict=True):
            names |= {name} if mean(losses) > mean(adamw) else set()
        deviation = max(map(statistics.stdev, (adamw, start)))
        close |= {name} if mean(adamw) - mean(start) < deviation else set()
        over[name] = round(100 * (mean(start) / mean(best) - 1))
    assert above == [set(), set(), {"flow", "seq2seq"}, set(), set()]
    assert close == {"CNN", "flow"}
    flow, pinn = over.pop("flow"), over.pop("PINN")
    promise = f"{flow} % higher on the flow, {pinn} % on the PINN, and at most "
    assert f"{promise}{max(over.values())} % on the other six" in page("docs/rates.md")


def test_which_recipe_wins_where():
    """The lowest mean of three seeds, of all optimizers and rates that ran."""
    ends = {}
    for name, task in tasks().items():
        for optimizer, by_rate in task.items():
            for losses in by_rate.values() if isinstance(by_rate, dict) else ():
                if len(losses) == 3:
                    ends.setdefault(name, []).append((mean(losses), optimizer))
    first = [min(found)[1].partition(",")[0] for found in ends.values()]
    assert collections.Counter(first) == {"nanochat": 4, "moonlight": 3, "muonh": 1}
    text = "`nanochat`'s on four, `moonlight`'s on three and `muonh`'s on one"
    assert text in page("docs/rates.md")
    (muonh,) = (
        mean(losses)
        for rate, losses in tasks()["seq2seq"]["muonh"].items()
        if float(rate) == 0.0625
    )
    assert muonh > min(x for x in ends["seq2seq"] if x[1] == "adamw")[0]


def test_fine_tuning_in_bfloat16():
    ends = {}
    for row in results("finetune.json"):
        if row["optimizer"] == "moonlight":
            ends.setdefault(row["parameters"], []).append(row["after"])
    text = (ROOT / "docs/stability.md").read_text()
    section = text.partition("The example's GPT, fine-tuned")[2].partition("\n\n")[0]
    found = re.findall(r"\d\.\d{4}", section)
    assert found == [f"{mean(after):.4f}" for after in ends.values()]


def test_what_is_left_of_a_movement():
    """Where int8 loses steps of random matrices that int16 keeps."""
    rows = results("finetune_movement.json")["rows"]
    moved = collections.defaultdict(list)
    for row in rows:
        moved[row["learning_rate"]].append(row["moved"])
    (_, int8, _), (half, lost, int16) = moved[1e-5], moved[1e-6]
    assert int8 > 0.99 < int16 and half < 0.01 and lost < 0.5
    assert "Below a rate of 1e-5, at which int8 would lose" in page("docs/stability.md")


def on_a_gpu(name):
    """The lines of a file of results/gpu that say what ran, without the first."""
    first, *lines = (RESULTS / "gpu" / name).read_text().splitlines()
    run = json.loads(first)["run"]
    assert {"card", "versions", "date", "commit", "command"} <= {*run}
    return [json.loads(line) for line in lines]


OURS = "nanochat, bfloat16"
COLUMNS_ON_A_CARD = {  # of the tables: what ran, with {} for the layout
    "jax_muon": f"{OURS}, {{}}",
    "no kernels": f"{OURS}, {{}}, no kernels",
    "optax": "optax, bfloat16, {}",
    "optax, TF32": "optax, tensorfloat32, {}",
    "PyTorch": "torch-nanochat, bfloat16",  # an array for each layer
    "adamw": "adamw, float32, {}",
}


def times(what, name="h200.jsonl", field="flow_seconds"):
    """Milliseconds of a step in both turns, in a flow if no other field is named."""
    rows = {row["what"]: row for row in on_a_gpu(name)}
    found = (rows.get(f"{what}, turn {turn}") for turn in (1, 2))
    return [1e3 * x[field] for x in found if x and field in x]


def cells_on_a_card(model, layers, field="flow_seconds"):
    """A row of the tables by column: the mean of both turns, "-" where nothing ran."""
    row = {}
    for column, what in COLUMNS_ON_A_CARD.items():
        ran = column != "PyTorch" or layers == "separate"
        found = times(f"{model} {what.format(layers)}", field=field) if ran else []
        digits = 1 if found and mean(found) < 20 else 0
        row[column] = f"{mean(found):.{digits}f}" if found else "-"
    return row


def test_steps_on_a_gpu():
    """Like for like: layers of one kind in a row, in a flow or alone."""
    names = {"GPT-2 124M": "gpt2-124m", "GPT 1.3B": "gpt-1.3b"}
    fields = {"in a flow": "flow_seconds", "alone": "seconds"}
    rows = table("gpu_steps")
    for case, cells in rows.items():
        model, layers, how = case.split(", ")
        expected = cells_on_a_card(names[model], layers, fields[how])
        assert cells == [*expected.values()], case
    assert len(rows) == 6
    ours = mean(times("gpt2-124m nanochat, float32, scanned", "h200_forms.jsonl"))
    longer = ours / mean(times(f"gpt2-124m {OURS}, scanned"))
    assert round(longer) == 9
    assert "on an H200 takes nine times as long in float32" in page("docs/speed.md")


def test_the_readme_has_steps_on_a_gpu():
    names = {"GPT-2 124M": "gpt2-124m", "GPT 1.3B": "gpt-1.3b"}
    rows = table("gpu_readme")
    for case, cells in rows.items():
        model, layers = case.split(", ")
        row = cells_on_a_card(names[model], layers)
        names_of = ("jax_muon", "no kernels", "optax", "PyTorch", "adamw")
        assert cells == [row[x] for x in names_of]
    assert len(rows) == 3


def test_a_step_beside_optax_on_a_cpu():
    """The span of ratios of GPT-2 124M on two kinds of processors."""
    ratios = [
        row["ratio"]
        for file in ("step_cpu.json", "step_cpu_zen5.json")
        for row in results(file)
        if row["model"] == "gpt2-124m" and row["theirs"].startswith("optax, float32")
    ]
    assert len(ratios) == 4
    span = f"took {min(ratios):.1f} to {math.ceil(10 * max(ratios)) / 10} of `optax"
    assert span in page("benchmarks/NOTES.md")


def test_forms_of_a_step_that_a_gpu_decided():
    """The width of tiles, the size of parts of stacks."""

    def ms(model, where=""):
        return mean(times(f"{model} {OURS}, scanned{where}", "h200_forms.jsonl"))

    small, large = "gpt2-124m", "gpt-1.3b"
    polar = ROOT / "jax_muon" / "polar"
    text = " ".join((polar / "hopper" / "kernel.py").read_text().split())
    wide, chosen = ms(small, ", in wide"), ms(small)
    assert f"124M {wide:.2f} ms, not {chosen:.2f}" in text
    text = " ".join((polar / "iteration.py").read_text().replace("#", "").split())
    assert f"{ms(large, ', in parts'):.1f} ms, not {ms(large):.1f}" in text


def test_losses_on_a_gpu():
    """The last of each of three seeds, as a range."""
    ends = {}
    for x in on_a_gpu("learn_h200.jsonl") + on_a_gpu("h200.jsonl"):
        if x["what"] == "curve" and x["step"] == x["steps"]:
            case = ends.setdefault((x["kind"], x["lr"], x["steps"]), {})
            case[x.get("seed", 0)] = x["val"]
    for case, text in (
        (("nanochat", 0.02, 240), "{}, for"),
        (("adamw", 0.001, 600), "{} at 0.001"),
        (("adamw", 0.002, 600), "{} at 0.002"),
    ):
        losses = ends[case].values()
        assert len(losses) == 3
        least, most = min(losses), max(losses)
        assert text.format(f"{least:.3f} to {most:.3f}") in page("docs/rates.md")
    assert max(ends["nanochat", 0.02, 240].values()) < min(
        *ends["adamw", 0.001, 600].values(), *ends["adamw", 0.002, 600].values()
    )


def test_what_was_right_on_a_gpu():
    text = page("docs/numbers.md")
    right = [x for x in on_a_gpu("h200.jsonl") if "ok" in x]
    (missed,) = (x for x in right if not x["ok"])
    assert missed["what"] == "card and CPU, 6x384 nanochat, float32"
    error = f"{missed['error']:.1e}".replace("e-0", "e-")
    bar = f"{missed['bar']:.0e}".replace("e-0", "e-")
    assert (
        f"its bar of {bar}: two steps of `nanochat` in float32 differ from the CPU's"
        in text
    )
    assert f"by {error}, since rounding decides" in text
    parity = [x for x in right if x["what"].startswith("parity")]
    low = [x for x in parity if x["what"].endswith("float32")]
    worst = f"{max(x['error'] for x in low):.1e}".replace("e-0", "e-")
    assert f"{worst} in float32" in text
    rows = on_a_gpu("h100.jsonl")
    assert all(x.get("ok", True) and not x.get("code", 0) for x in rows)


def test_bytes_that_a_step_moves():
    """GB in a step of GPT-2 124M, scanned and separate."""
    rows = [x for x in results("traffic.json") if x["model"] == "gpt2-124m"]
    cells = (
        "; ".join(
            f"{row['outside_products'] / 1e9:.3f}"
            for row in rows
            if row["kernels"] == kernels
        )
        for kernels in ("on", "off")
    )
    line = f"| now: 124M scanned; separate | {' | '.join(cells)} |"
    assert line in page("benchmarks/NOTES.md")


def test_memory_of_compiled_steps():
    """Peaks in GB by number of GPUs, and in bytes a parameter by optimizer."""
    rows = results("memory.json")
    peaks = {x["gpus"]: x["peak"] / 1e9 for x in rows if x["table"] == "models"}
    one, *others = (f"{peaks[gpus]:.1f}" for gpus in (1, 8, 64, 256))
    text = page("docs/speed.md")
    assert f"of 7B peaks at {one} GB on one device" in text
    assert "at {}, {} and {} on 8, 64 and 256".format(*others) in text
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
