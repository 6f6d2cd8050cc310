"""Other people's optimizers, as they are on the package registry.

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

import jax
import jax.numpy as jnp
import muon as muon_optimizer
import numpy as np
import optax
import pytorch_optimizer
import torch

import jax_muon as jm
from parity import problems, weights
from parity.problems import Arrays
from parity.references import JORDAN, Muon, NorMuon, newton_schulz, replay
from parity.spread import compiled

# Two axes, since torch.optim.Muon takes no others.
NAMES = ("square.weight", "tall.weight", "wide.weight", "odd.weight", "pool.0.weight")
STEPS = 10
LR, MOMENTUM, DECAY = 0.02, 0.95, 0.1

NOT_USED = (
    (
        "timm 1.0.31",
        "it needs torchvision, whose build on the registry is for CUDA and does not "
        "load beside the CPU build of torch",
    ),
    (
        "emerging-optimizers 0.3.0",
        "it needs an environment of its own: `make test-outside` compares it",
    ),
    ("dion", "it is not on the registry"),
    (
        "heavyball 3.2.1",
        "it compiles its step for more than a minute, and in float32 and below it "
        "rounds at random",
    ),
)


@dataclasses.dataclass(frozen=True)
class Package:
    """A package's optimizer, our recipe and the reference for it."""

    name: str
    dtype: str  # of the polar iteration: bfloat16, float32 or float64
    theirs: Callable[[Sequence[Arrays]], Arrays]  # gradients -> final parameters
    ours: optax.GradientTransformation
    # polar function -> the reference, as an optimizer over groups
    reference: (
        Callable[[Callable], Callable[[list[dict]], torch.optim.Optimizer]] | None
    )
    order: str = "jordan"  # in which the package rounds, as the reference names it
    same_mathematics: bool = True
    remark: str = ""


@dataclasses.dataclass(frozen=True)
class Result:
    """Errors relative to the distance that the package travelled."""

    package: Package
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
    grads = gradients()
    theirs = package.theirs(grads)

    def error(end: Arrays) -> float:
        start = problems.weights()
        apart = sum(np.sum((end[k].astype(float) - theirs[k]) ** 2) for k in theirs)
        moved = sum(np.sum((theirs[k].astype(float) - start[k]) ** 2) for k in theirs)
        return float(np.sqrt(apart / moved))

    reference = spread = None
    if package.reference:
        of_order = {}
        for order in ("nanochat", "jordan", "addmm"):
            make = package.reference(partial(newton_schulz, order=order))
            of_order[order] = error(_torch_run(make, package.dtype)(grads))
        reference = of_order.pop(package.order)
        if compiled_end is not None and package.order == "jordan":
            of_order["compiled"] = error(compiled_end)
        spread = max(of_order.values())
    ours = error(_jax_run(package.ours, package.dtype)(grads))
    return Result(package, ours, reference, spread)


def gradients() -> list[Arrays]:
    """Gradients of the matrices in NAMES, at each step."""
    return [
        {name: grad[name] for name in NAMES}
        for grad in problems.gradients("gaussian", STEPS)
    ]


def compiled_end() -> Arrays:
    """Where the reference of Jordan's Muon ends through torch.compile, bfloat16."""
    make = _reference(Muon, "bfloat16", **JORDAN)(compiled(newton_schulz))
    return _torch_run(make, "bfloat16")(gradients())


def _wide(dtype: str) -> str:
    return "float64" if dtype == "float64" else "float32"


def _torch_run(make: Callable, dtype: str) -> Callable[[Sequence[Arrays]], Arrays]:
    """A PyTorch optimizer on the matrices that the gradients name."""

    def run(grads: Sequence[Arrays]) -> Arrays:
        def tensors(arrays: Arrays) -> dict[str, torch.Tensor]:
            wide = getattr(torch, _wide(dtype))
            return {k: torch.from_numpy(arrays[k]).to(wide) for k in grads[0]}

        after = replay(
            make,
            tensors(problems.weights()),
            [{"params": list(grads[0])}],
            [tensors(grad) for grad in grads],
        )
        return {name: p.numpy() for name, p in after[-1].items()}

    return run


def _jax_run(
    tx: optax.GradientTransformation, dtype: str
) -> Callable[[Sequence[Arrays]], Arrays]:
    """An optax optimizer on the same matrices, as a flat tree {name: (in, out)}."""

    def run(grads: Sequence[Arrays]) -> Arrays:
        def cross(arrays: Arrays):
            return {
                k: jnp.asarray(
                    weights.kernel_to_flax(arrays[k], arrays[k].shape[::-1]),
                    _wide(dtype),
                )
                for k in grads[0]
            }

        @jax.jit
        def step(params, state, grad):
            updates, state = tx.update(grad, state, params)
            return optax.apply_updates(params, updates), state

        with jax.enable_x64(_wide(dtype) == "float64"):
            params = cross(problems.weights())
            state = tx.init(params)
            for grad in grads:
                params, state = step(params, state, cross(grad))
            return {
                k: weights.kernel_to_torch(np.asarray(p), p.shape[::-1])
                for k, p in params.items()
            }

    return run


# ---- optax.contrib.muon


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


def _optax(nesterov: bool, **settings) -> Callable[[Sequence[Arrays]], Arrays]:
    tx = optax.contrib.muon(
        LR, beta=MOMENTUM, weight_decay=DECAY, nesterov=nesterov, **settings
    )
    return _jax_run(tx, "float32")


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


def _ours(factory: Callable, dtype: str, **settings) -> optax.GradientTransformation:
    return factory(
        LR,
        MOMENTUM,
        settings.pop("weight_decay", DECAY),
        dtype=dtype,
        matrices=functools.partial(jm.read, rules="muon"),
        **settings,
    )


def _reference(factory: Callable, dtype: str, **settings) -> Callable:
    settings = {"lr": LR, "momentum": MOMENTUM, "weight_decay": DECAY, **settings}
    return lambda polar: (
        lambda groups: factory(
            groups, dtype=getattr(torch, dtype), **{**settings, "polar": polar}
        )
    )


def _theirs(factory: Callable, dtype: str = "bfloat16", **settings) -> Callable:
    settings = {"lr": LR, "weight_decay": DECAY, **settings}
    return _torch_run(lambda groups: factory(groups, **settings), dtype)


def _with_use_muon(factory: Callable, **settings) -> Callable:
    """pytorch_optimizer wants a flag in each group."""

    def make(groups: list[dict], **more):
        return factory([{**group, "use_muon": True} for group in groups], **more)

    return _theirs(make, momentum=MOMENTUM, **settings)


def packages() -> list[Package]:
    """All of them, with the recipe and the reference that correspond."""
    bf16, f32 = "bfloat16", "float32"
    match_rms = {**JORDAN, "scale": "rms_0.2"}
    plain = {**JORDAN, "nesterov": False}
    return [
        Package(
            f"{_release('torch')}, optim.Muon",
            bf16,
            _theirs(torch.optim.Muon, momentum=MOMENTUM),
            _ours(jm.muon, bf16),
            _reference(Muon, bf16, **JORDAN),
            "addmm",
        ),
        Package(
            'the same, adjust_lr_fn="match_rms_adamw"',
            bf16,
            _theirs(
                torch.optim.Muon, momentum=MOMENTUM, adjust_lr_fn="match_rms_adamw"
            ),
            _ours(jm.muon, bf16, shape_rule="rms_0.2"),
            _reference(Muon, bf16, **match_rms),
            "addmm",
        ),
        Package(
            f"{_release('pytorch_optimizer')}, Muon",
            bf16,
            _with_use_muon(pytorch_optimizer.Muon),
            _ours(jm.muon, bf16),
            _reference(Muon, bf16, **JORDAN),
            "addmm",
        ),
        Package(
            "the same, use_adjusted_lr=True",
            bf16,
            _with_use_muon(pytorch_optimizer.Muon, use_adjusted_lr=True),
            _ours(jm.muon, bf16, shape_rule="rms_0.2"),
            _reference(Muon, bf16, **match_rms),
            "addmm",
        ),
        Package(
            'pytorch_optimizer, NorMuon, update_scale="match_rms", nesterov=False',
            bf16,
            _with_use_muon(
                pytorch_optimizer.NorMuon,
                update_scale="match_rms",
                nesterov=False,
                eps=1e-8,
            ),
            _ours(jm.normuon, bf16),
            _reference(NorMuon, bf16, eps=1e-8),
            "addmm",
        ),
        Package(
            f"{_release('muon-optimizer')}, SingleDeviceMuon",
            bf16,
            _theirs(muon_optimizer.SingleDeviceMuon, momentum=MOMENTUM),
            _ours(jm.muon, bf16),
            _reference(Muon, bf16, **JORDAN),
            remark="multiplies with the shape's factor in bfloat16",
        ),
        Package(
            f"{_release('optax')}, contrib.muon",
            f32,
            _optax(nesterov=True),
            _ours(jm.muon, f32),
            _reference(Muon, f32, **JORDAN),
            same_mathematics=False,
            remark="other mathematics: bias-corrected Nesterov, see below",
        ),
        Package(
            "the same, against ours with its Nesterov",
            f32,
            _optax(nesterov=True),
            _muon_with(dozat_nesterov(MOMENTUM)),
            None,
        ),
        Package(
            "the same, nesterov=False",
            f32,
            _optax(nesterov=False),
            _ours(jm.muon, f32, lookahead=False),
            _reference(Muon, f32, **plain),
        ),
        Package(
            "the same, nesterov=False, consistent_rms=0.2",
            f32,
            _optax(nesterov=False, consistent_rms=0.2),
            _ours(jm.muon, f32, lookahead=False, shape_rule="rms_0.2"),
            _reference(Muon, f32, **{**plain, "scale": "rms_0.2"}),
        ),
    ]
