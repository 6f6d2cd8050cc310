"""Other people's optimizers, as they are published.

Each runs beside our recipe and beside the reference, on the same matrices and
gradients. The reference is in the table because it rounds as the package does: where
both use bfloat16, it shows that the mathematics is the same to 1e-6, and what is left
between the package and us is rounding.
"""

import dataclasses
import functools
import importlib.metadata
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import muon as muon_optimizer
import numpy as np
import optax
import pytorch_optimizer
import torch

import jax_muon as jm
from parity import problems
from parity.compare import distance, stepper
from parity.problems import Arrays
from parity.references import (
    JORDAN,
    Muon,
    NorMuon,
    compiled,
    newton_schulz,
    replay,
)

# Two axes, since torch.optim.Muon takes no others.
NAMES = ("square.weight", "tall.weight", "wide.weight", "odd.weight", "pool.0.weight")
STEPS = 10
LR, MOMENTUM, DECAY = 0.02, 0.95, 0.1
ORDERS = ("nanochat", "jordan", "addmm")  # of rounding; see `references.polar_express`

NOT_USED = {
    "timm 1.0.31": "it needs torchvision, whose build on the registry is for CUDA and "
    "does not load beside the CPU build of torch",
    "emerging-optimizers 0.3.0": "it needs an environment of its own: "
    "`make test-outside` compares it",
    "dion": "it is not on the registry",
    "heavyball 3.2.1": "it compiles its step for more than a minute, and in float32 "
    "and below it rounds at random",
}

Run = Callable[[Sequence[Arrays]], Arrays]  # gradients -> final parameters


@dataclasses.dataclass(frozen=True)
class Package:
    """A package's optimizer, our recipe and the reference for it."""

    name: str
    theirs: Run
    ours: optax.GradientTransformation
    reference: Callable[[Callable], Run] | None  # by the polar function
    dtype: str = "bfloat16"  # of the polar iteration
    order: str = "addmm"  # in which the package rounds
    same_mathematics: bool = True
    remark: str = "-"


@dataclasses.dataclass(frozen=True)
class Result:
    """Errors relative to the distance that the package travelled."""

    ours: float
    reference: float | None  # None where there is none
    spread: float | None  # the largest of the reference's own, in other orders


def compare(package: Package, compiled_end: Arrays | None = None) -> Result:
    """Run the three and measure.

    Args:
        package: the package.
        compiled_end: where `compiled_end` says that a compiled Muon ends, which widens
            the spread of packages that round in its order.
    """
    grads, start = gradients(), problems.weights()
    theirs = package.theirs(grads)
    ours = distance(_ours_run(package.ours)(grads), theirs, start)
    if package.reference is None:
        return Result(ours, None, None)
    ends = {
        order: package.reference(partial(newton_schulz, order=order))(grads)
        for order in ORDERS
    }
    if compiled_end is not None and package.order == "jordan":
        ends["compiled"] = compiled_end
    errors = {order: distance(end, theirs, start) for order, end in ends.items()}
    reference = errors.pop(package.order)
    return Result(ours, reference, max(errors.values()))


def gradients() -> list[Arrays]:
    """Gradients of the matrices in NAMES, at each step."""
    return [
        {name: grad[name] for name in NAMES}
        for grad in problems.gradients("gaussian", STEPS)
    ]


def compiled_end() -> Arrays:
    """Where the reference of Jordan's Muon ends through torch.compile, bfloat16."""
    return _reference(Muon, **JORDAN)(compiled(newton_schulz))(gradients())


def _torch_run(make: Callable[[list[dict]], torch.optim.Optimizer]) -> Run:
    """A PyTorch optimizer on the matrices that the gradients name."""

    def tensors(arrays: Arrays) -> dict[str, torch.Tensor]:
        return {name: torch.from_numpy(arrays[name]).float() for name in NAMES}

    def run(grads: Sequence[Arrays]) -> Arrays:
        groups = [{"params": list(NAMES)}]
        each = [tensors(grad) for grad in grads]
        after = replay(make, tensors(problems.weights()), groups, each)
        return {name: p.numpy() for name, p in after[-1].items()}

    return run


def _ours_run(tx: optax.GradientTransformation) -> Run:
    """An optax optimizer on the same matrices, as a flat tree {name: (in, out)}."""

    def cross(arrays: Arrays):
        return {name: jnp.asarray(arrays[name].T, "float32") for name in NAMES}

    def run(grads: Sequence[Arrays]) -> Arrays:
        after = stepper(tx)(cross(problems.weights()), [cross(grad) for grad in grads])
        return {name: np.asarray(p).T for name, p in after[-1].items()}

    return run


def dozat_nesterov(decay: float) -> optax.GradientTransformation:
    """Nesterov's look-ahead with the bias correction that optax.contrib.muon has.

    M / (1 - decay^(t + 2)) and G / (1 - decay^(t + 1)) are added with the weights decay
    and 1 - decay, t counted from 0. Ours, and nanochat's, and torch.optim.Muon's, adds
    M and G themselves. A common factor would not matter to the polar factor; but early
    on the two quotients differ. Source: Dozat, Incorporating Nesterov momentum into
    Adam, 2016.
    """

    def init_fn(params):
        return jnp.zeros([], jnp.int32), optax.tree.zeros_like(params)

    def update_fn(updates, state, params=None):
        del params
        t, m = state
        m = jax.tree.map(lambda m, g: decay * m + (1 - decay) * g, m, updates)
        of_m = decay / (1 - decay ** (t + 2))
        of_g = (1 - decay) / (1 - decay ** (t + 1))
        ahead = jax.tree.map(lambda m, g: of_m * m + of_g * g, m, updates)
        return ahead, (t + 1, m)

    return optax.GradientTransformation(init_fn, update_fn)


def _muon_with(momentum: optax.GradientTransformation) -> optax.GradientTransformation:
    """`jm.muon` with another momentum, written out."""
    return optax.chain(
        momentum,
        jm.orthogonalize(jm.NewtonSchulz(dtype="float32")),
        jm.scale_by_shape("max_ratio"),
        optax.add_decayed_weights(DECAY),
        optax.scale_by_learning_rate(LR),
    )


# ---- The table


def _release(package: str) -> str:
    return f"{package} {importlib.metadata.version(package)}"


def _ours(
    factory: Callable = jm.muon, dtype: str = "bfloat16", **settings: Any
) -> optax.GradientTransformation:
    read = functools.partial(jm.read, rules="muon")
    return factory(LR, MOMENTUM, DECAY, dtype=dtype, matrices=read, **settings)


def _reference(
    factory: Callable = Muon, dtype: str = "bfloat16", **settings: Any
) -> Callable[[Callable], Run]:
    given = {"lr": LR, "momentum": MOMENTUM, "weight_decay": DECAY, **settings}
    given["dtype"] = getattr(torch, dtype)
    return lambda polar: _torch_run(partial(factory, **given, polar=polar))


def _theirs(factory: Callable, **settings: Any) -> Run:
    given = {"lr": LR, "momentum": MOMENTUM, "weight_decay": DECAY, **settings}
    return _torch_run(lambda groups: factory(groups, **given))


def _flagged(factory: Callable, **settings: Any) -> Run:
    """pytorch_optimizer wants a flag in each group."""

    def make(groups: list[dict], **more):
        return factory([{**group, "use_muon": True} for group in groups], **more)

    return _theirs(make, **settings)


def _optax(name: str, reference: dict | None, ours: Any, **settings: Any) -> Package:
    """`optax.contrib.muon`, in float32."""
    tx = optax.contrib.muon(LR, beta=MOMENTUM, weight_decay=DECAY, **settings)
    run = None if reference is None else _reference(dtype="float32", **reference)
    return Package(name, _ours_run(tx), ours, run, "float32", "jordan")


def packages() -> list[Package]:
    """All of them, with the recipe and the reference that correspond."""
    rms, jordan = {"shape_rule": "rms_0.2"}, _reference(**JORDAN)
    match_rms = _reference(**{**JORDAN, "scale": "rms_0.2"})
    plain = {**JORDAN, "nesterov": False}
    ours32 = partial(_ours, dtype="float32")
    return [
        Package(
            f"{_release('torch')}, optim.Muon",
            _theirs(torch.optim.Muon),
            _ours(),
            jordan,
        ),
        Package(
            'the same, adjust_lr_fn="match_rms_adamw"',
            _theirs(torch.optim.Muon, adjust_lr_fn="match_rms_adamw"),
            _ours(**rms),
            match_rms,
        ),
        Package(
            f"{_release('pytorch_optimizer')}, Muon",
            _flagged(pytorch_optimizer.Muon),
            _ours(),
            jordan,
        ),
        Package(
            "the same, use_adjusted_lr=True",
            _flagged(pytorch_optimizer.Muon, use_adjusted_lr=True),
            _ours(**rms),
            match_rms,
        ),
        Package(
            'pytorch_optimizer, NorMuon, update_scale="match_rms", nesterov=False',
            _flagged(
                pytorch_optimizer.NorMuon,
                update_scale="match_rms",
                nesterov=False,
                eps=1e-8,
            ),
            _ours(jm.normuon),
            _reference(NorMuon, eps=1e-8),
        ),
        Package(
            f"{_release('muon-optimizer')}, SingleDeviceMuon",
            _theirs(muon_optimizer.SingleDeviceMuon),
            _ours(),
            jordan,
            order="jordan",
            remark="multiplies with the shape's factor in bfloat16",
        ),
        dataclasses.replace(
            _optax(f"{_release('optax')}, contrib.muon", JORDAN, ours32()),
            same_mathematics=False,
            remark="other mathematics: bias-corrected Nesterov, see below",
        ),
        _optax(
            "the same, against ours with its Nesterov",
            None,
            _muon_with(dozat_nesterov(MOMENTUM)),
        ),
        _optax(
            "the same, nesterov=False", plain, ours32(lookahead=False), nesterov=False
        ),
        _optax(
            "the same, nesterov=False, consistent_rms=0.2",
            {**plain, "scale": "rms_0.2"},
            ours32(lookahead=False, **rms),
            nesterov=False,
            consistent_rms=0.2,
        ),
    ]
