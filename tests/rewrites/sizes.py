"""Other sizes of the same program: a batch of one, all equal, one head."""

from tests.rewrites.case import (
    REWRITES,
    Rewrite,
)

DOUBLED = {"BATCH": 4, "LENGTH": 32, "WIDTH": 48, "HIDDEN": 80, "VOCAB": 192}
DOUBLED |= {"EXPERTS": 10, "HEADS": 8}


def equal(size, **others):
    """As many axes as can be of one size."""
    names = ("BATCH", "LENGTH", "WIDTH", "HIDDEN", "VOCAB", "EXPERTS")
    return dict.fromkeys(names, size) | others


SIZES = {
    "one sample": {"BATCH": 1},
    "one position": {"LENGTH": 1},
    "one position of one sample": {"BATCH": 1, "LENGTH": 1},
    "doubled": DOUBLED,
    "one head": {"HEADS": 1, "HEAD": 24},
    "one expert": {"EXPERTS": 1},
    "all 16": equal(16, HEADS=4, HEAD=4),
    "equal widths": {"WIDTH": 24, "HIDDEN": 24, "VOCAB": 24},
    "as many samples as widths": {"BATCH": 24, "LENGTH": 24, "HIDDEN": 24},
    "the widest of all": {"WIDTH": 240, "HEAD": 60},
}
REWRITES |= {f"sizes: {name}": Rewrite(sizes=x) for name, x in SIZES.items()}
