"""Rewrites of any program that change no value, and what they change in its reading.

What a loss computes decides which parameters are matrices, not how it is written: each
of `REWRITES` gives another form of a program, such as a batch of one, parameters that
are rolled and rolled back, or products by einsum. `changes(rewrite, program)` compares
its reading with that of the program as written, leaf by leaf.

`make test-rewrites` applies all of them to all programs of tests/programs, and
`tests/matrices/test_rewrites.py` each to a few.
"""

from tests.rewrites import (  # noqa: F401, they register rewrites
    arrays,
    containers,
    losses,
    operations,
    parameters,
    sizes,
)
from tests.rewrites.case import REWRITES, changes, programs, sample

__all__ = ["REWRITES", "changes", "programs", "sample"]
