"""Draws the charts of the pages, and a row of the README, from benchmarks/results.

    python docs/charts.py

A test draws them again and compares, so the pages cannot disagree with the results.
Charts are plain SVG, which follows a reader's light or dark theme.
"""

import html
import json
import math
import pathlib
import re
import statistics
from typing import Any, NamedTuple

DOCS = pathlib.Path(__file__).parent
RESULTS = DOCS.parent / "benchmarks" / "results"
STYLE = """\
.t{fill:#24292f} .s{fill:#57606a;font-size:12px}
.blue{fill:#4c8eda} .grey{fill:#8c959f} .orange{fill:#e8a33d} .green{fill:#5aa469}
@media (prefers-color-scheme:dark){.t{fill:#e6edf3} .s{fill:#9aa4af}}"""
CPUS = {"step_cpu.json": "Zen 4", "step_cpu_zen5.json": "Zen 5"}
OPTAX = {
    "optax, float32, scanned": "optax.contrib.muon",
    "optax, float32, separate": "optax.contrib.muon",
}
MODELS = ["llama-1.3b", "llama-7b", "experts-7b", "llama-70b"]
LAYOUTS = {
    "zero2-divided": ("ZeRO-3", "blue"),
    "hsdp": ("HSDP", "green"),
    "fsdp-tp": ("FSDP x TP", "orange"),
}


class Bar(NamedTuple):
    """One bar: its name, its length, the text at its end and its colour."""

    name: str
    value: float
    text: str
    color: str


Groups = dict[str, list[Bar]]  # by heading


def results(name: str) -> list[dict[str, Any]]:
    """A committed file of results."""
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def step_times() -> Groups:
    """Seconds of a step of GPT-2 124M, optax's and ours, for each pair measured."""
    groups: Groups = {}
    for file, cpu in CPUS.items():
        for row in results(file):
            recipe, dtype, layout = row["ours"].split(", ")
            name = OPTAX.get(row["theirs"])
            if row["model"] == "gpt2-124m" and recipe == "nanochat" and name:
                theirs, ours = row["theirs_s"], row["ours_s"]
                text = f"{ours:.1f} s (ratio {row['ratio']:.2f})"
                groups.setdefault(f"{cpu}, {layout} layers, {dtype}", []).extend(
                    [
                        Bar(name, theirs, f"{theirs:.1f} s", "grey"),
                        Bar("jax_muon", ours, text, "blue"),
                    ]
                )
    return groups


MUONS = {
    "optax.contrib.muon": ("optax.contrib.muon", "orange"),
    "maxtext": ("MaxText, all-to-all", "grey"),
    "jax_muon": ("jax_muon", "blue"),
}


def on_meshes() -> dict[str, list[dict[str, Any]]]:
    """Orthogonalization of Llama 7B by optax, MaxText and us, by the mesh."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for row in results("maxtext_muon.json"):
        rows.setdefault(f"{row['shards']} x {row['replicas']}", []).append(row)
    for some in rows.values():
        some.sort(key=lambda row: [*MUONS].index(row["muon"]))
    return rows


def busiest() -> Groups:
    """The work of the busiest device, and the bytes that it sends."""

    def bar(name: str, color: str, flops: float, sent: str = "") -> Bar:
        return Bar(name, flops, f"{flops / 1e12:.1f} TFLOP{sent}", color)

    return {
        f"shards x replicas: {mesh}": [
            *(
                bar(*MUONS[r["muon"]], r["flops"], f", {r['sent_bytes'] / 1e9:.1f} GB")
                for r in rows
            ),
            bar("an even share", "green", rows[0]["even_flops"]),
        ]
        for mesh, rows in on_meshes().items()
    }


def waiting() -> Groups:
    """The share of a train step that waits for transfers, by layout."""
    order = [*LAYOUTS]
    rows = [
        r
        for r in results("gpu_schedule_scale.json")
        if r["model"] in MODELS and r["layout"] in order and r["gpus"] in (64, 1024)
        if r["microbatches"] == 1
    ]
    rows.sort(
        key=lambda r: (MODELS.index(r["model"]), r["gpus"], order.index(r["layout"]))
    )
    groups: Groups = {}
    for row in rows:
        seconds = row["seconds_with_latencies"]
        wait = seconds["step"] - seconds["products"]
        share = 100 * wait / seconds["step"]
        text = f"{share:.0f} %, {1000 * wait:.0f} ms; {row['peak_bytes'] / 1e9:.0f} GB"
        case = f"{row['model']}, {row['gpus']} GPUs"
        name, color = LAYOUTS[row["layout"]]
        bar = Bar(name, share, text, color)
        groups.setdefault(case, []).append(bar)
    return groups


KINDS = {  # of operations in a profile: name and colour
    "products": ("products by cuBLAS", "blue"),
    "kernels": ("products by kernels", "green"),
    "passes": ("passes over memory", "orange"),
    "copies": ("copies", "grey"),
}


def on_a_card(name: str) -> list[Any]:
    """The lines of a file of results/gpu."""
    lines = (RESULTS / "gpu" / name).read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def parts_of_steps() -> Groups:
    """How steps on the H200 divide into products and passes over memory.

    Bars are relative to the step of their model at 12c5a0b.
    """
    rows = {row.get("what"): row for row in on_a_card("h200.jsonl")}
    groups: Groups = {}
    for model in ("gpt2-124m", "gpt-1.3b"):
        profiles = {
            name: rows[f"{model} nanochat, bfloat16, scanned{where}, profile"]
            for name, where in (("12c5a0b", ", in old"), ("now", ""))
        }
        total = sum(profiles["12c5a0b"]["by_kind_ms"].values())
        for name, profile in profiles.items():
            all_ms = sum(profile["by_kind_ms"].values())
            heading = f"{MODEL_NAMES[model]}, {name}: {all_ms:.1f} ms"
            groups[heading] = [
                Bar(text, ms / total, f"{ms:.2f} ms", color)
                for kind, (text, color) in KINDS.items()
                if (ms := profile["by_kind_ms"].get(kind, 0)) > 0.01 * total
            ]
    return groups


MODEL_NAMES = {"gpt2-124m": "GPT-2 124M", "gpt-1.3b": "GPT 1.3B"}


def draw(title: str, groups: Groups) -> str:
    """Horizontal bars in groups: the name before each, the text behind it."""
    left, width = 165, 640
    longest = max(bar.value for bars in groups.values() for bar in bars)
    scale = (width - left - 150) / longest
    y, lines = 20, [f'<text class="t" y="16" font-weight="bold">{title}</text>']
    for heading, bars in groups.items():
        y += 28
        lines.append(f'<text class="t" y="{y}">{html.escape(heading)}</text>')
        for bar in bars:
            y += 21
            length = round(scale * bar.value, 1)
            end = round(left + length + 6, 1)
            lines += [
                f'<text class="s" x="{left - 8}" y="{y}" text-anchor="end">'
                f"{html.escape(bar.name)}</text>",
                f'<rect class="{bar.color}" x="{left}" y="{y - 12}" '
                f'width="{length}" height="15" rx="2"/>',
                f'<text class="s" x="{end}" y="{y}">{bar.text}</text>',
            ]
    return svg(width, y + 12, lines)


def svg(width: int, height: int, lines: list[str]) -> str:
    """A picture of these lines."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="13">'
    )
    return "\n".join([head, f"<style>\n{STYLE}\n</style>", *lines, "</svg>\n"])


LANES = {"products": "blue", "all-gather": "green", "reduce-scatter": "orange"}


def timeline() -> str:
    """One turn of the loops over layers, of two layers each: what is busy when."""
    result: Any = results("layer_timeline.json")
    left, width, y = 110, 640, 24
    scale = (width - left - 10) / max(loop["length"] for loop in result["loops"])
    title = f"Two layers of {result['model']} on {result['gpus']} H100s, estimated"
    lines = [f'<text class="t" y="16" font-weight="bold">{title}</text>']
    names = {"Forward": "layer i + 1", "Backward": "layer i - 1"}
    for (name, second), loop in zip(names.items(), result["loops"], strict=True):
        y += 24
        text = f"{name}: {loop['length'] / 1000:.1f} ms"
        lines.append(f'<text class="t" y="{y}">{text}</text>')
        for lane, color in LANES.items():
            busy = [x[1:3] for x in loop["transfers"] if x[0] == lane]
            if lane == "products":  # they leave no gaps
                (bar,) = loop["products"]
                half = sum(bar) / 2
                busy = [[bar[0], half], [half, bar[1]]]
            if not busy:
                continue
            y += 21
            place = f'x="{left - 8}" y="{y}" text-anchor="end"'
            lines.append(f'<text class="s" {place}>{lane}</text>')
            for start, end in busy:
                x, length = left + scale * start, max(1, scale * (end - start) - 1)
                lines.append(
                    f'<rect class="{color}" x="{x:.1f}" y="{y - 12}" '
                    f'width="{length:.1f}" height="15"/>'
                )
            if lane == "products":
                for text, (start, _) in zip(("layer i", second), busy, strict=True):
                    x = left + scale * start + 6
                    lines.append(f'<text fill="#fff" x="{x:.1f}" y="{y}">{text}</text>')
        y += 8
    return svg(width, y + 8, lines)


def tasks() -> dict[str, dict[str, Any]]:
    """Of eight tasks their width, AdamW's best rate, and losses by rate, in order."""
    found: Any = results("rates_tasks.json")
    by_task: dict[str, dict[str, Any]] = found["tasks"]
    lines = (RESULTS / "rates.jsonl").read_text(encoding="utf-8").splitlines()
    flax = [x for x in map(json.loads, lines) if "width" not in x["example"]]
    for x in sorted(flax, key=lambda x: (x["example"], x["rate"], x["seed"])):
        task = by_task.setdefault(x["example"], {"width": 128})
        by_rate = task.setdefault(x["optimizer"], {})
        by_rate.setdefault(f"{x['rate']:.4g}", []).append(x["loss"])
        if x["optimizer"] == "nanochat":
            task["lr"] = x["rest"]
    return by_task


CURVES = {"adamw": "#8c959f", "nanochat": "#4c8eda", "moonlight": "#e8a33d"}


def losses_by_rate() -> str:
    """A panel for each task: the mean loss by rate, both axes logarithmic."""
    wide, high, least, most = 250, 96, 7e-4, 0.7
    title = "Final loss by rate, mean of the seeds; a ring marks the first rate"
    lines = [f'<text class="t" y="16" font-weight="bold">{title}</text>']
    for i, (name, color) in enumerate(CURVES.items()):
        x = 46 + 110 * i
        lines += [
            f'<rect fill="{color}" x="{x}" y="28" width="14" height="4"/>',
            f'<text class="s" x="{x + 20}" y="34">{name}</text>',
        ]

    def share(value: float, low: float, top: float) -> float:
        return math.log(value / low) / math.log(top / low)

    for i, (task, found) in enumerate(tasks().items()):
        left, upper = (46, 376)[i % 2], 62 + 150 * (i // 2)
        lower = upper + high
        means = {
            name: {float(rate): statistics.fmean(x) for rate, x in found[name].items()}
            for name in CURVES
        }
        heights = [loss for curve in means.values() for loss in curve.values()]
        low, top = min(heights), max(heights)
        lines += [
            f'<text class="t" x="{left}" y="{upper - 6}">{task}</text>',
            f'<rect fill="none" stroke="#8c959f" x="{left}" y="{upper}" '
            f'width="{wide}" height="{high}"/>',
            f'<text class="s" x="{left - 6}" y="{upper + 12}" text-anchor="end">'
            f"{top:.2g}</text>",
            f'<text class="s" x="{left - 6}" y="{lower - 4}" text-anchor="end">'
            f"{low:.2g}</text>",
        ]
        for rate in (0.001, 0.01, 0.1):
            x = f"{left + wide * share(rate, least, most):.1f}"
            lines.append(
                f'<text class="s" x="{x}" y="{lower + 15}" text-anchor="middle">'
                f"{rate:g}</text>"
            )
        lr, width = found["lr"], found["width"]
        starts = {"nanochat": (lr * width) ** 0.5 / 40, "moonlight": lr**0.5 / 8}
        for name, curve in means.items():
            color, points = CURVES[name], []
            for rate, loss in sorted(curve.items()):
                x = f"{left + wide * share(rate, least, most):.1f}"
                y = f"{lower - 8 - (high - 16) * share(loss, low, top):.1f}"
                points.append(f"{x},{y}")
                lines.append(f'<circle fill="{color}" cx="{x}" cy="{y}" r="2.5"/>')
                if math.isclose(rate, starts.get(name, 0), rel_tol=1e-3):
                    lines.append(
                        f'<circle fill="none" stroke="{color}" stroke-width="2" '
                        f'cx="{x}" cy="{y}" r="6"/>'
                    )
            lines.append(
                f'<polyline fill="none" stroke="{color}" stroke-width="1.5" '
                f'points="{" ".join(points)}"/>'
            )
    return svg(640, 62 + 150 * 4 - 22, lines)


ON_A_CARD = {  # optimizer of a line: its name here, and its colour
    "nanochat": ("nanochat", "#4c8eda"),
    "optax_muon": ("optax.contrib.muon", "#e8a33d"),
    "adamw": ("AdamW", "#8c959f"),
}


def learned() -> dict[tuple[str, float, int], list[list[tuple[int, float]]]]:
    """Held-out losses by step: of each optimizer, rate and length, for each seed."""
    found: dict[Any, dict[int, list[tuple[int, float]]]] = {}
    for x in on_a_card("learn_h200.jsonl") + on_a_card("h200.jsonl"):
        if x.get("what") == "curve":
            curves = found.setdefault((x["kind"], x["lr"], x["steps"]), {})
            curves.setdefault(x.get("seed", 0), []).append((x["step"], x["val"]))
    return {case: [curves[s] for s in sorted(curves)] for case, curves in found.items()}


def learning_on_a_card() -> str:
    """Held-out loss by step, a line for each seed, the loss logarithmic."""
    left, right, upper, lower, least, most = 40, 365, 34, 330, 0.62, 3.0

    def place(step: float, loss: float) -> tuple[float, float]:
        share = math.log(loss / least) / math.log(most / least)
        return left + (right - left) * step / 600, lower - (lower - upper) * share

    title = "Nats per held-out byte by step: 85 M parameters on an H200"
    lines = [f'<text class="t" y="16" font-weight="bold">{title}</text>']
    for loss in (0.7, 1, 1.5, 2, 2.5):
        y = f"{place(0, loss)[1]:.1f}"
        lines += [
            f'<text class="s" x="{left - 6}" y="{y}" dy="4" text-anchor="end">'
            f"{loss:g}</text>",
            f'<path stroke="#8c959f" stroke-opacity="0.3" d="M{left},{y}H{right}"/>',
        ]
    for step in (0, 120, 240, 360, 480, 600):
        x = f"{place(step, 1)[0]:.1f}"
        lines.append(
            f'<text class="s" x="{x}" y="{lower + 18}" text-anchor="middle">'
            f"{step}</text>"
        )
    labels = []
    for (kind, rate, steps), curves in learned().items():
        name, color = ON_A_CARD[kind]
        dash = ' stroke-dasharray="5 3"' if steps < 600 else ""
        for curve in curves:
            points = " ".join("{:.1f},{:.1f}".format(*place(*x)) for x in curve)
            lines.append(
                f'<polyline fill="none" stroke="{color}" stroke-width="1.5"{dash} '
                f'points="{points}"/>'
            )
        ends = [f"{curve[-1][1]:.3f}" for curve in curves]
        text = f"{name} {rate:g}" + (f", {steps} steps" if dash else "")
        height = place(0, statistics.fmean(curve[-1][1] for curve in curves))[1]
        labels.append((height, color, f"{text}: {', '.join(ends)}"))
    y = float("inf")
    for height, color, text in sorted(
        labels, reverse=True
    ):  # from below, none over another
        y = min(height, y - 17)
        lines += [
            f'<rect fill="{color}" x="{right + 8}" y="{y - 2:.1f}" width="12" '
            'height="4"/>',
            f'<text class="s" x="{right + 25}" y="{y + 4:.1f}">{text}</text>',
        ]
    return svg(640, lower + 26, lines)


def charts() -> dict[str, str]:
    """All charts, by the names of their files in docs/pictures."""
    return {
        "step_optax.svg": draw(
            "Seconds of a step beside optax, GPT-2 124M on two CPU cores", step_times()
        ),
        "maxtext.svg": draw(
            "Llama 7B: work of the busiest device, and bytes it sends", busiest()
        ),
        "step_parts.svg": draw("A step on an H200 by part", parts_of_steps()),
        "layer_timeline.svg": timeline(),
        "rates.svg": losses_by_rate(),
        "learning_85m.svg": learning_on_a_card(),
        "layout_wait.svg": draw(
            "Estimated share of a step that waits, the wait, and peak memory", waiting()
        ),
    }


def filled(page: str) -> str:
    """The README with the row about Llama 7B as the results have it."""
    rows = on_meshes()["256 x 1"]
    cells = [f"{r['flops'] / 1e12:.1f}, {r['sent_bytes'] / 1e9:.1f}" for r in rows]
    row = r"(?m)^(\| Llama 7B on 256 devices[^|]*\|).*$"
    return re.sub(row, lambda found: f"{found[1]} {' | '.join(cells)} |", page)


README = DOCS.parent / "README.md"

if __name__ == "__main__":
    for name, chart in charts().items():
        (DOCS / "pictures" / name).write_text(chart, encoding="utf-8")
    README.write_text(filled(README.read_text(encoding="utf-8")), encoding="utf-8")
