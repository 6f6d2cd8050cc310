"""What a piece reads its parameters by: `Matrices`, a `Reading`, or nothing."""

import dataclasses
from typing import Any

from jax_muon.checks import check_type
from jax_muon.notes import note
from jax_muon.reading.labels import MUON
from jax_muon.reading.matrices import Matrices, Reading


def check_reading(name: str, reading: Any) -> None:
    """Refuse what is neither a `Reading` nor None."""
    check_type(name, reading, (Reading, type(None)), "a jax_muon.Reading, or None")


def check_matrices(matrices: Any) -> None:
    """Refuse what a piece cannot read its parameters by."""
    kinds = (Matrices, Reading, type(None))
    check_type("matrices", matrices, kinds, "Matrices, a Reading, or None")


def read_bare(matrices: "Matrices | Reading | None", tree: Any) -> Matrices:
    """The reading that a piece was given, or, used bare, that of its own tree."""
    if isinstance(matrices, Matrices):
        return matrices
    reading = Reading() if matrices is None else matrices
    if reading.labels is None:  # what a piece is given is to be matrices
        reading = dataclasses.replace(reading, labels=MUON)
    found = reading.read(tree)
    note("doubts", doubts=found.doubts([MUON]))
    return found.with_joins(reading.joins)
