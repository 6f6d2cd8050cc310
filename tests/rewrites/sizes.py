"""Other sizes of the same program: a batch of one, all equal, one head."""

import jax

from tests.programs.parts import BATCH
from tests.rewrites.case import (
    REWRITES,
    Case,
    Rewrite,
    S,
    dataclasses,
    has_samples,
    of_samples,
)

DOUBLED = {"BATCH": 4, "LENGTH": 32, "WIDTH": 48, "HIDDEN": 80, "VOCAB": 192}
DOUBLED |= {"EXPERTS": 10, "HEADS": 8}


def equal(size, **others):
    """As many axes as can be of one size."""
    names = ("BATCH", "LENGTH", "WIDTH", "HIDDEN", "VOCAB", "EXPERTS")
    return dict.fromkeys(names, size) | others


SIZES = {
    "one sample": {"BATCH": 1},
    "three samples": {"BATCH": 3},
    "one position": {"LENGTH": 1},
    "one position of one sample": {"BATCH": 1, "LENGTH": 1},
    "one position of three samples": {"BATCH": 3, "LENGTH": 1},
    "doubled": DOUBLED,
    "one head": {"HEADS": 1, "HEAD": 24},
    "heads of one element": {"HEADS": 24, "HEAD": 1},
    "one expert": {"EXPERTS": 1},
    "all 16": equal(16, HEADS=4, HEAD=4),
    "all 8 or 64": equal(64, BATCH=8, LENGTH=8, EXPERTS=8, HEADS=8, HEAD=8),
    "equal widths": {"WIDTH": 24, "HIDDEN": 24, "VOCAB": 24},
    "as many samples as widths": {"BATCH": 24, "LENGTH": 24, "HIDDEN": 24},
    "a vocabulary of samples": {"BATCH": 96},
    "the widest of all": {"WIDTH": 240, "HEAD": 60},
}
REWRITES |= {f"sizes: {name}": Rewrite(sizes=x) for name, x in SIZES.items()}


def first_axis(size):
    """The first axis of all arguments that have samples, also of fixed sizes."""

    def change(case: Case):
        pairs = zip(jax.tree.leaves(case.args), has_samples(case), strict=True)
        first = [x.shape[0] for x, has in pairs if has]
        if not first or first[0] in (BATCH, size):
            return None
        args = of_samples(case, case.args, lambda x: S((size, *x.shape[1:]), x.dtype))
        return dataclasses.replace(case, args=args)

    return change


for size, name in ((1, "one"), (3, "three")):
    REWRITES[f"sizes: {name} of each argument"] = Rewrite(first_axis(size))
