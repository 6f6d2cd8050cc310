"""Replay recorded trajectories of the public optimizers with our recipes.

    python -m parity.goldens DIRECTORY

The files are those of `parity.reference.goldens`, which shows that the references
reproduce them. Printed, relative to the distance travelled after all steps: the error
over the file; the worst parameter; how many entries flipped in a cautious mask, and the
error over all others. Beside bfloat16 files stands how far nanochat compiled is from
nanochat eager, the recording: the spread within which bfloat16 says something.

The exit status is 1 if a float32 file is above 2e-5, or a bfloat16 file above the
spread. The recordings are not part of this project.
"""

import dataclasses
import functools
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch

import jax_muon as jm
from parity import compare, problems, weights
from parity.problems import Arrays
from parity.reference.goldens import Recording, load, nanochat_setup, teon_setup
from parity.reference.replay import replay
from parity.reference.teon import paper_polar_express
from parity.spread import CompiledMuonAdamW, compiled


@dataclasses.dataclass(frozen=True)
class Row:
    """What is printed for one file."""

    error: float
    worst: float
    parameter: str  # the worst one
    flips: int
    unflipped: float
    spread: float | None = None

    @property
    def failed(self) -> bool:
        """Whether it is above its bar; nan is."""
        bar = compare.BARS["float32"] if self.spread is None else self.spread
        return not self.error <= bar


def our_teon(recording: Recording) -> optax.GradientTransformation:
    """`jm.teon` with the settings of the file."""
    meta = recording.meta
    joined = [name for group in meta["teon_groups"] for name in group]
    return jm.teon(
        meta["lr"],
        meta["momentum"],
        meta["weight_decay"],
        steps=meta["ns_steps"],
        dtype=_dtype(recording),
        matrices=functools.partial(
            jm.read,
            rules="muon",
            joins={name.rstrip("0123456789") + "{i}": 2 for name in joined},
        ),
    )


def our_nanochat(recording: Recording) -> optax.GradientTransformation:
    """`jm.nanochat` with the settings of the file."""
    meta = recording.meta
    _, (group, adamw), steps = nanochat_setup(recording)
    rates = {
        key: np.array([step[index][name] for step in steps], np.float32)
        for key, index, name in (
            ("lr", 0, "lr"),
            ("momentum", 0, "momentum"),
            ("weight_decay", 0, "weight_decay"),
            ("adamw_lr", 1, "lr"),
        )
    }
    rates = problems.jax_rates(rates, "float32")
    return jm.nanochat(
        rates["lr"],
        rates["momentum"],
        rates["weight_decay"],
        beta2=group["beta2"],
        steps=group["ns_steps"],
        edition="2026-08" if group["renormalize"] else "2026-01",
        adamw=optax.adamw(
            rates["adamw_lr"],
            *adamw["betas"],
            adamw["eps"],
            weight_decay=adamw["weight_decay"],
        ),
        dtype=_dtype(recording),
        matrices=lambda params: jm.read(
            params,
            rules={x: "muon" if x in meta["muon"] else "adamw" for x in params},
        ),
    )


def _dtype(recording: Recording) -> str:
    return {torch.float32: "float32", torch.bfloat16: "bfloat16"}[recording.dtype]


def ours(recording: Recording) -> list[Arrays]:
    """Parameters after every step of our recipe."""
    matrices = list(recording.meta["muon"])
    if "teon_groups" in recording.meta:
        tx = our_teon(recording)
        matrices += [name for group in recording.meta["teon_groups"] for name in group]
    else:
        tx = our_nanochat(recording)

    def cross(name: str, x: np.ndarray) -> np.ndarray:
        """Both ways: matrices are the transpose of each other."""
        return weights.kernel_to_flax(x, x.shape[::-1]) if name in matrices else x

    @jax.jit
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params = {k: jnp.asarray(cross(k, p.numpy())) for k, p in recording.start.items()}
    state, after = tx.init(params), []
    for named in recording.grads:
        grads = {k: jnp.asarray(cross(k, g.numpy())) for k, g in named.items()}
        params, state = step(params, state, grads)
        after.append({k: cross(k, np.asarray(p)) for k, p in params.items()})
    return after


def measure(recording: Recording) -> Row:
    """Compare our run with the recording."""
    after = ours(recording)
    is_teon = "teon_groups" in recording.meta
    steps = [] if is_teon else nanochat_setup(recording)[2]
    apart, unflipped, moved, flips = {}, 0.0, {}, 0
    for name, start in recording.start.items():
        reference = [p[name].numpy() for p in recording.after]
        off = after[-1][name].astype(np.float64) - reference[-1]
        flipped = np.zeros(off.shape, bool)
        if (
            steps
            and name in recording.meta["muon"]
            and recording.dtype == torch.float32
        ):
            flipped = compare.flipped_entries(
                [p[name] for p in after],
                reference,
                start.numpy(),
                [step[0]["lr"] for step in steps],
                [step[0]["weight_decay"] for step in steps],
            )
        flips += int(np.count_nonzero(flipped))
        apart[name] = np.sum(off**2)
        unflipped += np.sum(off[~flipped] ** 2)
        moved[name] = np.sum((reference[-1].astype(np.float64) - start.numpy()) ** 2)
    by_name = {name: float(np.sqrt(apart[name] / moved[name])) for name in apart}
    worst = max(by_name, key=by_name.__getitem__)
    distance = sum(moved.values())
    return Row(
        float(np.sqrt(sum(apart.values()) / distance)),
        by_name[worst],
        worst,
        flips,
        float(np.sqrt(unflipped / distance)),
        _spread(recording) if recording.dtype == torch.bfloat16 else None,
    )


def _spread(recording: Recording) -> float:
    """How far the reference ends from the recording when it is compiled."""
    if "teon_groups" in recording.meta:
        make, groups, rates = teon_setup(recording)
        polar = compiled(paper_polar_express)
        groups = [{**group, "polar": polar} for group in groups]
    else:
        make, (_, groups, rates) = CompiledMuonAdamW, nanochat_setup(recording)
    end = replay(make, recording.start, groups, recording.grads, rates)[-1]
    apart = moved = 0.0
    for name, reference in recording.after[-1].items():
        apart += (end[name] - reference).double().square().sum().item()
        distance = reference - recording.start[name]
        moved += distance.double().square().sum().item()
    return (apart / moved) ** 0.5


def main(directory: str) -> int:
    """Print the table for every .npz in the directory; 1 if a bar is passed."""
    torch.set_num_threads(1)
    paths = sorted(Path(directory).glob("*.npz"))
    if not paths:
        raise SystemExit(f"no .npz in {directory}")
    print(
        f"{'file':32} {'error':>8} {'worst':>8}  {'parameter':10} flips "
        f"{'without':>8} {'spread':>8}"
    )
    failed = False
    for path in paths:
        recording = load(path)
        row = measure(recording)
        failed |= row.failed
        spread = "-" if row.spread is None else f"{row.spread:.1e}"
        print(
            f"{path.stem:32} {row.error:8.1e} {row.worst:8.1e}  {row.parameter:10} "
            f"{row.flips:5} {row.unflipped:8.1e} {spread:>8}"
            f"{'  FAIL' if row.failed else ''}",
            flush=True,
        )
    return int(failed)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python -m parity.goldens DIRECTORY")
    raise SystemExit(main(sys.argv[1]))
