"""Each optax piece alone against its lines in the reference.

Both sides get the same three updates in turn, for every matrix of `problems.SHAPES`,
and their outputs are compared, relative to the size of the output.
"""

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch

import jax_muon as jm
from parity import problems, references, weights
from parity.problems import Arrays
from parity.references import accumulate, shape_scale, sphere_step

MATRICES = {name: problems.SHAPES[name] for name in problems.MATRIX_NAMES}
FLAX_MATRICES = {
    name: tree
    for name, tree in problems.FLAX_SHAPES.items()
    if name not in ("embed", "norm")
}
READ = jm.read(FLAX_MATRICES, rules="muon")
STEPS = 3

# (update (1, m, n), weight (1, m, n), state that the piece may fill) -> update
Reference = Callable[[torch.Tensor, torch.Tensor, dict], torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Piece:
    """One of our transforms, and its reference."""

    name: str
    ours: Callable[[str], optax.GradientTransformation]  # dtype -> transform
    reference: Reference
    inputs: tuple[str, ...] = ("gaussian", "low_rank", "ill_conditioned", "sparse")


def _momentum(accumulation: str, nesterov: bool) -> Reference:
    def reference(u, w, state):
        momentum = state.setdefault("momentum", torch.zeros_like(w))
        return accumulate(u, momentum, 0.95, accumulation, nesterov)

    return reference


def _nesterov_ema(u, w, state):
    momentum = state.setdefault("momentum", torch.zeros_like(w))
    return references.nesterov_ema(u, momentum, references.rate(0.95, w))


def _normuon(u, w, state):
    if "second_moment" not in state:
        state["second_moment"] = references.muon_state(w)["second_moment"]
    return references.normuon(u, state["second_moment"], references.rate(0.95, w))


def _cautious(u, w, state):
    del state
    new, one = w.clone(), references.rate(1.0, w)
    references.cautious_step(new, u, one, references.rate(0.1, w))
    return w - new


def _hyperball(u, w, state):
    new = w.clone()
    sphere_step(new, u, 0.02, state)
    return new - w


def _shape(rule: str) -> Reference:
    return lambda u, w, state: u * shape_scale(rule, *u.shape[-2:])


def _polar(function: Callable, **settings) -> Reference:
    return lambda u, w, state: function(u, dtype=w.dtype, **settings)


def _stateless(function: Callable) -> Reference:
    return lambda u, w, state: function(u)


_EASY = ("gaussian", "sparse")

PIECES = (
    Piece("nesterov, ema", lambda _: jm.nesterov(0.95), _nesterov_ema),
    # What the docs name for a momentum that is a sum.
    Piece(
        "optax.trace, nesterov",
        lambda _: optax.trace(0.95, nesterov=True),
        _momentum("sum", True),
    ),
    Piece(
        "momentum, ema",
        lambda _: jm.nesterov(0.95, lookahead=False),
        _momentum("ema", False),
    ),
    Piece(
        "equilibrate_rows",
        lambda _: jm.equilibrate_rows(matrices=READ),
        _stateless(references.equilibrate_rows),
    ),
    Piece(
        "PolarExpress",
        lambda dtype: jm.orthogonalize(jm.PolarExpress(dtype=dtype), matrices=READ),
        _polar(references.polar_express),
    ),
    Piece(
        "PolarExpress, 8 steps",
        lambda dtype: jm.orthogonalize(
            jm.PolarExpress(
                8,
                cushion=0.02407327424182761,
                safety=0.0,
                norm_factor=1.01,
                eps=1e-7,
                dtype=dtype,
            ),
            matrices=READ,
        ),
        _polar(
            references.polar_express,
            steps=8,
            coefficients=references.POLAR_EXPRESS_PAPER,
            norm_factor=1.01,
            eps=1e-7,
        ),
        _EASY,
    ),
    Piece(
        "NewtonSchulz",
        lambda dtype: jm.orthogonalize(jm.NewtonSchulz(dtype=dtype), matrices=READ),
        _polar(references.newton_schulz),
    ),
    # The exact polar factor depends on the smallest singular value as 1 / it: only
    # well-conditioned matrices have one that float32 can tell.
    Piece(
        "ExactPolar",
        lambda _: jm.orthogonalize(jm.ExactPolar(), matrices=READ),
        _stateless(references.svd_polar),
        ("gaussian",),
    ),
    Piece(
        "normalize_frobenius",
        lambda _: jm.normalize_frobenius(matrices=READ),
        _stateless(references.renormalize),
    ),
    Piece(
        "scale_by_normuon", lambda _: jm.scale_by_normuon(0.95, matrices=READ), _normuon
    ),
    Piece(
        "add_cautious_decayed_weights",
        lambda _: jm.add_cautious_decayed_weights(0.1),
        _cautious,
    ),
    Piece("hyperball", lambda _: jm.hyperball(0.02, matrices=READ), _hyperball),
    *(
        Piece(
            f"scale_by_shape, {rule}",
            lambda _, rule=rule: jm.scale_by_shape(rule, matrices=READ),
            _shape(rule),
            ("gaussian",),
        )
        for rule in ("max_ratio", "rms_0.2", "sqrt_ratio")
    ),
)


def error(
    piece: Piece, kind: str, dtype: str, ours: Callable[[list[Arrays]], Arrays]
) -> tuple[float, str]:
    """Largest error over all shapes at the last step, and the parameter that has it.

    Args:
        piece: the piece.
        kind: of gradients.
        dtype: "float64" or "float32".
        ours: `runner(piece, dtype)`.
    """
    updates = [
        {name: grads[name] for name in MATRICES}
        for grads in problems.gradients(kind, STEPS)
    ]
    result = ours(updates)
    theirs = _theirs(piece, updates, dtype)
    by_name = {name: relative(result[name], theirs[name]) for name in MATRICES}
    worst = max(by_name, key=by_name.__getitem__)
    return by_name[worst], worst


def rounding(piece: Piece, kind: str, ours: Callable[[list[Arrays]], Arrays]) -> str:
    """Why a piece in float32 is above the bar, if PyTorch is as far from itself.

    That is measured from PyTorch in float64 on the same updates. `ours` as in `error`.
    """
    updates = problems.gradients(kind, STEPS)
    exact, theirs = (
        _theirs(piece, updates, "float64"),
        _theirs(piece, updates, "float32"),
    )
    ours_exact, theirs_exact = (
        max(relative(found[name], exact[name]) for name in MATRICES)
        for found in (ours(updates), theirs)
    )
    if not ours_exact <= 2 * theirs_exact:
        return ""
    return (
        "rounding that the problem amplifies: from PyTorch in float64, PyTorch in "
        f"float32 is {theirs_exact:.1e} away, ours {ours_exact:.1e}"
    )


def relative(found: np.ndarray, expected: np.ndarray) -> float:
    """Size of the difference, relative to the reference; nan counts as infinite."""
    expected = expected.astype(np.float64)
    size = float(np.linalg.norm(found - expected) / np.linalg.norm(expected))
    return math.inf if math.isnan(size) else size


def runner(piece: Piece, dtype: str) -> Callable[[list[Arrays]], Arrays]:
    """A function from updates to our output at the last of them, compiled once."""
    start, tx = problems.weights(), piece.ours(dtype)

    def cross(arrays: Arrays):
        tree = weights.to_flax({k: arrays[k] for k in MATRICES}, FLAX_MATRICES)
        return jax.tree.map(lambda x: jnp.asarray(x, dtype), tree)

    step = jax.jit(tx.update)

    def run(updates: list[Arrays]) -> Arrays:
        with jax.enable_x64(dtype == "float64"):
            params = cross(start)
            state = tx.init(params)
            for update in updates:
                out, state = step(cross(update), state, params)
            return weights.to_torch(out, MATRICES)

    return run


def _theirs(piece: Piece, updates: list[Arrays], dtype: str) -> Arrays:
    start, result = problems.weights(), {}
    for name, shape in MATRICES.items():
        state: dict = {}
        w = torch.from_numpy(start[name]).to(getattr(torch, dtype))
        for update in updates:
            u = torch.from_numpy(update[name]).to(w.dtype)
            out = piece.reference(references.as_stack(u), references.as_stack(w), state)
        result[name] = out.reshape(shape).numpy()
    return result
