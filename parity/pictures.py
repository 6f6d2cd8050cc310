"""Two pictures: errors against the step, and loss curves side by side."""

from pathlib import Path

import matplotlib
import numpy as np

from parity import compare, gpt, problems
from parity.report import Results

matplotlib.use("Agg")

from matplotlib import pyplot as plt

STYLE = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "axes.labelsize": 9,
    "font.size": 9,
    "legend.frameon": False,
    "legend.fontsize": 8,
}


def errors(results: Results, path: Path) -> None:
    """Largest error over all shapes after every step, one panel a kind of gradient."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(
            1, len(problems.LONG), figsize=(9, 4), sharey=True, layout="constrained"
        )
        colors = plt.cm.viridis(np.linspace(0, 0.95, len(problems.RECIPES)))
        for axis, kind in zip(axes, problems.LONG, strict=True):
            for dtype, bar in compare.BARS.items():
                axis.axhline(bar, color="0.6", lw=1, ls=":")
                axis.text(
                    200, bar * 1.6, f"bar of {dtype}", color="0.4", size=8, ha="right"
                )
                for name, color in zip(problems.RECIPES, colors, strict=True):
                    curve = np.maximum(results.curves[name, kind, dtype], 1e-17)
                    steps = np.arange(1, len(curve) + 1)
                    first = dtype == "float32" and kind == problems.LONG[0]
                    label = name if first else None
                    axis.plot(steps, curve, color=color, lw=1.2, label=label)
            axis.axvline(10, color="0.6", lw=1, ls=":")
            axis.text(10.5, 2e-16, "bars hold here", color="0.4", size=8)
            axis.set(
                xscale="log",
                yscale="log",
                xlabel="step",
                title=f"{kind.replace('_', ' ').capitalize()} gradients",
                ylim=(1e-16, 1e-1),
            )
            axis.text(1, 5e-13, "float64", size=9)
            axis.text(1, 2e-4, "float32", size=9)
        axes[0].set_ylabel("largest error / distance travelled")
        figure.legend(loc="outside lower center", ncols=4)
        figure.suptitle("jax_muon against the PyTorch references", size=11)
        figure.savefig(path, dpi=130)
        plt.close(figure)


def losses(results: Results, path: Path) -> None:
    """Loss curves of both sides above, their difference below."""
    runs = results.trainings
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(
            2,
            len(runs),
            figsize=(2.6 * len(runs), 5),
            sharex=True,
            sharey="row",
            layout="constrained",
        )
        for (above, below), run in zip(axes.T, runs, strict=True):
            above.plot(run.torch, color="#ee9955", lw=4, label="PyTorch")
            above.plot(run.flax, color="#224466", lw=1.2, label="Flax, jax_muon")
            above.set_title(run.recipe)
            for losses, color, label in (
                (run.flax, "#224466", "Flax from PyTorch"),
                (run.torch_again, "#ee9955", "PyTorch transposed\nfrom PyTorch"),
            ):
                apart = np.abs(np.subtract(losses, run.torch))
                so_far = np.maximum.accumulate(np.maximum(apart, 1e-8))
                below.plot(so_far, color=color, lw=1.5, label=label)
            below.axhline(gpt.BAR, color="0.6", lw=1, ls=":")
            below.text(0, gpt.BAR * 1.3, "bar", color="0.4", size=8)
            below.set(yscale="log", ylim=(1e-8, 1e-2), xlabel="step")
        axes[0, 0].set_ylabel("loss, nats per character")
        axes[1, 0].set_ylabel("largest difference so far")
        axes[0, 0].legend(loc="upper right")
        axes[1, 0].legend(loc="center right", bbox_to_anchor=(1, 0.68))
        figure.savefig(path, dpi=130)
        plt.close(figure)
