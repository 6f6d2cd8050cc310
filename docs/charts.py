"""Draws the charts of the pages from benchmarks/results.

    python docs/charts.py

A test draws them again and compares, so the pages cannot disagree with the results.
Charts are plain SVG, which follows a reader's light or dark theme.
"""

import dataclasses
import html
import json
import math
import pathlib
import statistics
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

DOCS = pathlib.Path(__file__).parent
RESULTS = DOCS.parent / "benchmarks" / "results"
STYLE = """\
.t{fill:#24292f} .s{fill:#57606a;font-size:12px}
.blue{fill:#4c8eda} .grey{fill:#8c959f} .orange{fill:#e8a33d} .green{fill:#5aa469}
@media (prefers-color-scheme:dark){.t{fill:#e6edf3} .s{fill:#9aa4af}}"""
BLUE, GREY, ORANGE, GREEN = "#4c8eda", "#8c959f", "#e8a33d", "#5aa469"
Points = Sequence[tuple[float, float]]


def results(name: str) -> Any:
    """A committed file of results: JSON, or a list of lines of JSON."""
    text = (RESULTS / name).read_text(encoding="utf-8")
    return (
        [*map(json.loads, text.splitlines())]
        if name.endswith(".jsonl")
        else json.loads(text)
    )


def svg(width: int, height: int, lines: Iterable[str]) -> str:
    """A picture of these lines."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="13">'
    )
    return "\n".join([head, f"<style>\n{STYLE}\n</style>", *lines, "</svg>\n"])


def label(x: float, y: float, text: str, anchor: str = "start", **more: str) -> str:
    """Small text; `style="t"` makes it a heading."""
    attributes = "".join(f' {k.replace("_", "-")}="{v}"' for k, v in more.items())
    attributes = attributes.replace(" style=", " class=")
    kind = "" if "style" in more else ' class="s"'
    return (
        f'<text{kind}{attributes} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">'
        f"{html.escape(text)}</text>"
    )


def title(text: str) -> str:
    """The heading of a picture."""
    return label(0, 16, text, style="t", font_weight="bold")


def legend(names: dict[str, str], x: float, y: float, step: float) -> list[str]:
    """Names beside short bars of their colours, `step` apart."""
    lines = []
    for i, (name, color) in enumerate(names.items()):
        at = x + step * i
        lines += [
            f'<rect fill="{color}" x="{at}" y="{y - 6}" width="14" height="4"/>',
            label(at + 20, y, name),
        ]
    return lines


@dataclasses.dataclass(frozen=True)
class Panel:
    """Axes in a box: `x_range` over its width, `y_range` up its height."""

    left: float
    upper: float
    wide: float
    high: float
    x_range: tuple[float, float]
    y_range: tuple[float, float]
    log_x: bool = False
    log_y: bool = False

    def place(self, x: float, y: float) -> tuple[float, float]:
        """Where a point is in the picture."""
        across = _share(x, self.x_range, self.log_x)
        up = _share(y, self.y_range, self.log_y)
        return self.left + self.wide * across, self.upper + self.high * (1 - up)

    def axes(
        self, x_ticks: Points, y_ticks: Points, x_title: str, y_title: str
    ) -> list[str]:
        """The box, its ticks as (value, shown) and the titles of both axes."""
        bottom, middle = self.upper + self.high, self.upper + self.high / 2
        lines = [
            f'<rect fill="none" stroke="{GREY}" x="{self.left}" y="{self.upper}" '
            f'width="{self.wide}" height="{self.high}"/>',
            label(self.left + self.wide / 2, bottom + 32, x_title, "middle"),
        ]
        if y_title:
            turned = f"rotate(-90 {self.left - 40:.1f} {middle:.1f})"
            lines.append(
                label(self.left - 40, middle, y_title, "middle", transform=turned)
            )
        for value, shown in x_ticks:
            x, _ = self.place(value, self.y_range[0])
            lines.append(label(x, bottom + 16, f"{shown:g}", "middle"))
        for value, shown in y_ticks:
            _, y = self.place(self.x_range[0], value)
            lines += [
                label(self.left - 6, y + 4, f"{shown:.3g}", "end"),
                f'<path stroke="{GREY}" stroke-opacity="0.3" '
                f'd="M{self.left},{y:.1f}h{self.wide}"/>',
            ]
        return lines

    def line(self, points: Points, color: str, dash: str = "") -> str:
        """A line through points."""
        dash = f' stroke-dasharray="{dash}"' if dash else ""
        return (
            f'<polyline fill="none" stroke="{color}" stroke-width="1.5"{dash} '
            f'points="{self._text(points)}"/>'
        )

    def band(self, low: Points, high: Points, color: str) -> str:
        """The area between two lines."""
        around = [*low, *reversed([*high])]
        return (
            f'<polygon fill="{color}" fill-opacity="0.25" '
            f'points="{self._text(around)}"/>'
        )

    def dot(self, x: float, values: Sequence[float], color: str) -> list[str]:
        """A mean, with a line from the least to the greatest value."""
        (at, low), (_, high) = self.place(x, min(values)), self.place(x, max(values))
        _, middle = self.place(x, statistics.fmean(values))
        return [
            f'<path stroke="{color}" d="M{at:.1f},{low:.1f}V{high:.1f}"/>',
            f'<circle fill="{color}" cx="{at:.1f}" cy="{middle:.1f}" r="2.5"/>',
        ]

    def _text(self, points: Points) -> str:
        return " ".join("{:.1f},{:.1f}".format(*self.place(*x)) for x in points)


def _share(value: float, between: tuple[float, float], log: bool) -> float:
    low, high = between
    if log:
        return math.log(value / low) / math.log(high / low)
    return (value - low) / (high - low)


# --- bars: how long a step waits -----------------------------------------------------


class Bar(NamedTuple):
    """One bar: its name, its length, the text at its end and its colour."""

    name: str
    value: float
    text: str
    color: str


MODELS = ["llama-1.3b", "llama-7b", "experts-7b", "llama-70b"]
LAYOUTS = {
    "zero2-divided": ("ZeRO-3", "blue"),
    "hsdp": ("HSDP", "green"),
    "fsdp-tp": ("FSDP x TP", "orange"),
}


def waiting() -> dict[str, list[Bar]]:
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
    groups: dict[str, list[Bar]] = {}
    for row in rows:
        seconds = row["seconds_with_latencies"]
        wait = seconds["step"] - seconds["products"]
        share = 100 * wait / seconds["step"]
        text = f"{share:.0f} %, {1000 * wait:.0f} ms; {row['peak_bytes'] / 1e9:.0f} GB"
        case = f"{row['model']}, {row['gpus']} GPUs"
        name, color = LAYOUTS[row["layout"]]
        groups.setdefault(case, []).append(Bar(name, share, text, color))
    return groups


def bars(heading: str, groups: dict[str, list[Bar]]) -> str:
    """Horizontal bars in groups: the name before each, the text behind it."""
    left, width = 165, 640
    longest = max(bar.value for some in groups.values() for bar in some)
    scale = (width - left - 150) / longest
    y, lines = 20, [title(heading)]
    for case, some in groups.items():
        y += 28
        lines.append(label(0, y, case, style="t"))
        for bar in some:
            y += 21
            length = scale * bar.value
            lines += [
                label(left - 8, y, bar.name, "end"),
                f'<rect class="{bar.color}" x="{left}" y="{y - 12}" '
                f'width="{length:.1f}" height="15" rx="2"/>',
                label(left + length + 6, y, bar.text),
            ]
    return svg(width, y + 12, lines)


# --- two layers in time --------------------------------------------------------------

LANES = {"products": "blue", "all-gather": "green", "reduce-scatter": "orange"}


def timeline() -> str:
    """One turn of the loops over layers, of two layers each: what is busy when."""
    result = results("layer_timeline.json")
    left, width, y = 110, 640, 24
    scale = (width - left - 10) / max(loop["length"] for loop in result["loops"])
    case = f"Two layers of {result['model']} on {result['gpus']} H100s, estimated"
    lines = [title(case)]
    names = {"Forward": "layer i + 1", "Backward": "layer i - 1"}
    for (name, second), loop in zip(names.items(), result["loops"], strict=True):
        y += 24
        lines.append(label(0, y, f"{name}: {loop['length'] / 1000:.1f} ms", style="t"))
        for lane, color in LANES.items():
            busy = [x[1:3] for x in loop["transfers"] if x[0] == lane]
            if lane == "products":  # they leave no gaps
                (bar,) = loop["products"]
                half = sum(bar) / 2
                busy = [[bar[0], half], [half, bar[1]]]
            if not busy:
                continue
            y += 21
            lines.append(label(left - 8, y, lane, "end"))
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


# --- losses by rate, on eight tasks --------------------------------------------------


def tasks() -> dict[str, dict[str, Any]]:
    """Of eight tasks their width, AdamW's best rate, and losses by rate, in order."""
    by_task: dict[str, dict[str, Any]] = results("rates_tasks.json")["tasks"]
    flax = [x for x in results("rates.jsonl") if "width" not in x["example"]]
    for x in sorted(flax, key=lambda x: (x["example"], x["rate"], x["seed"])):
        task = by_task.setdefault(x["example"], {"width": 128})
        by_rate = task.setdefault(x["optimizer"], {})
        by_rate.setdefault(f"{x['rate']:.4g}", []).append(x["loss"])
        if x["optimizer"] == "nanochat":
            task["lr"] = x["rest"]
    return by_task


CURVES = {"adamw": GREY, "nanochat": BLUE, "moonlight": ORANGE}


def losses_by_rate() -> str:
    """A panel for each task: losses by rate, both axes logarithmic."""
    lines = [
        title("Final loss by learning rate; lines span one to three seeds"),
        *legend(CURVES, 46, 36, 110),
        label(380, 36, "ring: first rate of the table"),
    ]
    for i, (task, found) in enumerate(tasks().items()):
        by_rate = {
            name: {float(rate): x for rate, x in sorted(found[name].items())}
            for name in CURVES
        }
        losses = [x for curve in by_rate.values() for y in curve.values() for x in y]
        low, high = min(losses), max(losses)
        upper = 66 + 176 * (i // 2)
        span = (low / 1.05, high * 1.05)
        box = (46, 376)[i % 2], upper, 250, 96
        panel = Panel(*box, (7e-4, 0.7), span, log_x=True, log_y=True)
        middle = (low * high) ** 0.5
        ticks = [(x, float(f"{x:.2g}")) for x in (low, middle, high)]
        rates = [(x, x) for x in (0.001, 0.01, 0.1)]
        lines += [
            label(panel.left, upper - 6, task, style="t"),
            *panel.axes(rates, ticks, "learning rate", ""),
        ]
        lr, width = found["lr"], found["width"]
        firsts = {"nanochat": (lr * width) ** 0.5 / 40, "moonlight": lr**0.5 / 8}
        for name, curve in by_rate.items():
            color = CURVES[name]
            means = [(rate, statistics.fmean(x)) for rate, x in sorted(curve.items())]
            lines.append(panel.line(means, color))
            for rate, values in curve.items():
                lines += panel.dot(rate, values, color)
                if math.isclose(rate, firsts.get(name, 0), rel_tol=1e-3):
                    x, y = panel.place(rate, statistics.fmean(values))
                    lines.append(
                        f'<circle fill="none" stroke="{color}" stroke-width="2" '
                        f'cx="{x:.1f}" cy="{y:.1f}" r="6"/>'
                    )
    return svg(640, 66 + 176 * 4 - 36, lines)


# --- losses by step ------------------------------------------------------------------

SMALL = {"adamw": GREY, "nanochat": BLUE, "muon": GREEN, "moonlight": ORANGE}


def small_runs(optimizer: str) -> dict[int, list[dict[str, Any]]]:
    """Runs of the model of `make train` at the best settings, by length."""
    best = json.loads((DOCS.parent / "examples" / "best.json").read_text("utf-8"))
    found: dict[int, list[dict[str, Any]]] = {}
    for run in results(f"learning/{optimizer}.jsonl"):
        if (run["settings"], run["width"]) == (best[optimizer], 128):
            found.setdefault(run["steps"], []).append(run)
    return {n: runs for n, runs in sorted(found.items()) if len(runs) == 3}


def learning() -> str:
    """Held-out loss by step of the shortest runs, and by the length of a run."""
    target = [run["validation_loss"] for run in small_runs("adamw")[300]]
    goal = statistics.fmean(target)
    left = Panel(52, 60, 240, 230, (0, 300), (1.25, 2.5))
    right = Panel(362, 60, 240, 230, (130, 310), (1.21, 1.41))
    ticks = [(x, x) for x in (0, 100, 200, 300)]
    lengths = [(x, x) for x in (150, 200, 250, 300)]
    lines = [
        title("A GPT of 1 million parameters: three seeds, mean, least and most"),
        *legend(SMALL, 52, 36, 110),
        label(left.left, 54, "shortest runs to AdamW's loss", style="t"),
        label(right.left, 54, "whole runs, by their length", style="t"),
        *left.axes(
            ticks, [(x, x) for x in (1.5, 2, 2.5)], "step", "nats per character"
        ),
        *right.axes(
            lengths,
            [(x, x) for x in (1.25, 1.3, 1.35, 1.4)],
            "steps of the run",
            "nats per character at its end",
        ),
    ]
    ends = [(130, x) for x in target], [(310, x) for x in target]
    lines.append(
        right.band([min(x) for x in ends], [max(x) for x in ends], SMALL["adamw"])
    )
    lines.append(right.line([(130, goal), (310, goal)], SMALL["adamw"], "5 3"))
    for name, color in SMALL.items():
        by_length = small_runs(name)
        means = {
            n: statistics.fmean(run["validation_loss"] for run in runs)
            for n, runs in by_length.items()
        }
        shortest = next(n for n, loss in means.items() if loss <= goal)
        curves = zip(
            *(run["validation_losses"] for run in by_length[shortest]), strict=True
        )
        rows = [(at[0][0], [loss for _, loss in at]) for at in curves]
        low, middle, high = (
            [(step, f(x)) for step, x in rows] for f in (min, statistics.fmean, max)
        )
        lines += [left.band(low, high, color), left.line(middle, color)]
        for n, runs in by_length.items():
            if n <= 300:
                losses = [run["validation_loss"] for run in runs]
                lines += right.dot(n, losses, color)
    return svg(640, 330, lines)


ON_A_CARD = {  # optimizer of a line: its name here, and its colour
    "nanochat": ("nanochat", BLUE),
    "optax_muon": ("optax.contrib.muon", ORANGE),
    "adamw": ("AdamW", GREY),
}


def learned() -> dict[tuple[str, float, int], list[list[tuple[int, float]]]]:
    """Held-out losses by step: of each optimizer, rate and length, for each seed."""
    found: dict[Any, dict[int, list[tuple[int, float]]]] = {}
    for x in results("gpu/learn_h200.jsonl") + results("gpu/h200.jsonl"):
        if x.get("what") == "curve":
            curves = found.setdefault((x["kind"], x["lr"], x["steps"]), {})
            curves.setdefault(x.get("seed", 0), []).append((x["step"], x["val"]))
    return {case: [curves[s] for s in sorted(curves)] for case, curves in found.items()}


def learning_on_a_card() -> str:
    """Held-out loss by step, a line for each seed, the loss logarithmic."""
    panel = Panel(52, 34, 300, 296, (0, 600), (0.62, 3.0), log_y=True)
    lines = [
        title("A GPT of 85 million parameters on an H200, a line for each seed"),
        *panel.axes(
            [(x, x) for x in (0, 120, 240, 360, 480, 600)],
            [(x, x) for x in (0.7, 1, 1.5, 2, 2.5)],
            "step",
            "nats per held-out byte",
        ),
    ]
    labels = []
    for (kind, rate, steps), curves in learned().items():
        name, color = ON_A_CARD[kind]
        dash = "5 3" if steps < 600 else ""
        lines += [panel.line(curve, color, dash) for curve in curves]
        ends = ", ".join(f"{curve[-1][1]:.3f}" for curve in curves)
        text = f"{name} {rate:g}" + (f", {steps} steps" if dash else "")
        height = panel.place(0, statistics.fmean(curve[-1][1] for curve in curves))[1]
        labels.append((height, color, text, ends))
    y, right = float("inf"), panel.left + panel.wide
    # From below, none over another: the name, and under it the last losses.
    for height, color, text, ends in sorted(labels, reverse=True):
        y = min(height, y - 32)
        lines += [
            f'<rect fill="{color}" x="{right + 8}" y="{y - 10:.1f}" width="12" '
            'height="4"/>',
            label(right + 25, y - 4, text),
            label(right + 25, y + 10, f"ends at {ends}"),
        ]
    return svg(640, 370, lines)


def charts() -> dict[str, str]:
    """All charts, by the names of their files in docs/pictures."""
    return {
        "layer_timeline.svg": timeline(),
        "rates.svg": losses_by_rate(),
        "learning.svg": learning(),
        "learning_85m.svg": learning_on_a_card(),
        "layout_wait.svg": bars(
            "Estimated share of a step that waits, the wait, and peak memory", waiting()
        ),
    }


if __name__ == "__main__":
    for name, chart in charts().items():
        (DOCS / "pictures" / name).write_text(chart, encoding="utf-8")
