"""Other people's optimizers, as they are published.

Each runs beside our recipe and beside the reference, on the same matrices and
gradients. The reference rounds as the package does: where both use bfloat16, it shows
that what is left between the package and us is rounding.
"""

import dataclasses
import importlib.metadata
from collections.abc import Callable
from functools import partial
from typing import Any

import muon as muon_optimizer
import optax
import pytorch_optimizer
import torch

from parity import problems
from parity.compare import NAMES, distance, our_end, torch_end
from parity.problems import CONSTANT, RECIPES, Arrays, Recipe
from parity.references import newton_schulz

ORDERS = ("nanochat", "jordan", "addmm")  # of rounding; see `references.polar_express`


@dataclasses.dataclass(frozen=True)
class Package:
    """A package's optimizer, and the recipe that corresponds."""

    name: str
    end: Callable[[], Arrays]  # of the package's run
    recipe: Recipe
    dtype: str = "bfloat16"  # of the polar iteration
    order: str = "addmm"  # in which the package rounds
    same_mathematics: bool = True
    remark: str = "-"


def compare(
    package: Package, compiled_end: Arrays | None = None
) -> tuple[float, float, float]:
    """Errors of ours, of the reference, and the largest of the reference's variants.

    The variants round in other orders. `compiled_end`, where the reference of "muon"
    ends through torch.compile, is one more for packages that round like it.
    """
    theirs, start = package.end(), problems.weights()
    theirs = {name: theirs[name] for name in NAMES}
    run = partial(torch_end, package.recipe, package.dtype)
    ends = {order: run(polar=partial(newton_schulz, order=order)) for order in ORDERS}
    if compiled_end is not None and package.order == "jordan":
        ends["compiled"] = compiled_end
    ours = our_end(package.recipe.ours(CONSTANT, package.dtype))
    errors = {order: distance(end, theirs, start) for order, end in ends.items()}
    reference = errors.pop(package.order)
    return distance(ours, theirs, start), reference, max(errors.values())


# ---- The table

MUON, RMS, NORMUON = (RECIPES[x] for x in ("muon", "muon, rms 0.2", "normuon"))


def _release(package: str) -> str:
    return f"{package} {importlib.metadata.version(package)}"


def _changed(recipe: Recipe, *, ours: dict, reference: dict) -> Recipe:
    """A recipe with other settings on both sides."""
    factory = partial(recipe.factory, **ours)
    settings = {**recipe.settings, **reference}
    return dataclasses.replace(recipe, factory=factory, settings=settings)


def _torch(make: Any, **settings: Any) -> Callable[[], Arrays]:
    """The run of an optimizer of PyTorch; settings are those of its group."""
    recipe = dataclasses.replace(MUON, reference=make, settings=settings)
    return partial(torch_end, recipe)


def _pytorch_optimizer(name: str, **settings: Any) -> Callable[[], Arrays]:
    """It wants a flag in each group."""
    return _torch(partial(getattr(pytorch_optimizer, name), **settings), use_muon=True)


def _optax(**settings: Any) -> Callable[[], Arrays]:
    lr, beta, decay = (CONSTANT[rate] for rate in ("lr", "momentum", "weight_decay"))
    tx = optax.contrib.muon(lr, beta=beta, weight_decay=decay, **settings)
    return partial(our_end, tx)


def packages() -> list[Package]:
    """All of them, with the recipe that corresponds."""
    plain, plain_rms = (
        _changed(one, ours={"nesterov": False}, reference={"nesterov": False})
        for one in (MUON, RMS)
    )
    float32 = partial(Package, dtype="float32", order="jordan")
    return [
        Package(f"{_release('torch')}, optim.Muon", _torch(torch.optim.Muon), MUON),
        Package(
            'the same, adjust_lr_fn="match_rms_adamw"',
            _torch(partial(torch.optim.Muon, adjust_lr_fn="match_rms_adamw")),
            RMS,
        ),
        Package(
            f"{_release('pytorch_optimizer')}, Muon", _pytorch_optimizer("Muon"), MUON
        ),
        Package(
            'pytorch_optimizer, NorMuon, update_scale="match_rms", nesterov=False',
            _pytorch_optimizer(
                "NorMuon", update_scale="match_rms", nesterov=False, eps=1e-8
            ),
            _changed(NORMUON, ours={}, reference={"eps": 1e-8}),
        ),
        Package(
            f"{_release('muon-optimizer')}, SingleDeviceMuon",
            _torch(muon_optimizer.SingleDeviceMuon),
            MUON,
            order="jordan",
            remark="multiplies with the shape's factor in bfloat16",
        ),
        float32(
            f"{_release('optax')}, contrib.muon",
            _optax(),
            MUON,
            same_mathematics=False,
            remark="other mathematics: bias-corrected Nesterov, see below",
        ),
        float32(
            "the same, against bias_correction=True",
            _optax(),
            _changed(MUON, ours={"bias_correction": True}, reference={}),
            remark="the reference has Jordan's Nesterov",
        ),
        float32("the same, nesterov=False", _optax(nesterov=False), plain),
        float32(
            "the same, nesterov=False, consistent_rms=0.2",
            _optax(nesterov=False, consistent_rms=0.2),
            plain_rms,
        ),
    ]
