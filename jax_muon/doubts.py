"""Which parameters cannot be read with certainty: all of them at once, for tests.

An optimizer refuses such parameters one after the other at init. `check` runs that init
abstractly and collects them, as `plan` collects what transforms do.
"""

from typing import Any

import jax
import optax

from jax_muon.checks import as_transform, check_arrays
from jax_muon.notes import collecting_doubts, listening
from jax_muon.reading.matrices import Parameter


class Doubts(tuple[Parameter, ...]):
    """Parameters in doubt, empty where there are none; prints as what to write."""

    def __str__(self) -> str:
        """One line a parameter, with its readings and what chooses one."""
        if not self:
            return "no parameter is in doubt"
        count = "1 parameter is" if len(self) == 1 else f"{len(self)} parameters are"
        return "\n".join([f"{count} in doubt:", *(f"  {one.doubt}" for one in self)])

    __repr__ = __str__


def check(tx: optax.GradientTransformation, params: Any) -> Doubts:
    """All parameters that an optimizer would refuse, for a user's own tests.

    Args:
      tx: any composition of this package's recipes and pieces with optax's.
      params: the parameters, or their shapes (`jax.ShapeDtypeStruct`).

    Returns:
      The parameters in doubt as a tuple: `path`, `shape` and `doubt`, which says what
      the readings are and what to write. A test is `assert not jm.check(tx, params)`,
      which prints them where it fails.

    Raises:
      ValueError: what else `tx` raises at init, such as a pattern without a parameter.

    Examples:
      >>> import jax_muon as jm
      >>> shapes = {"proj": {"kernel": jax.ShapeDtypeStruct((6, 2, 4), "float32")}}
      >>> [one.path for one in check(jm.nanochat(), shapes)]
      ['proj/kernel']
      >>> numbers = {"proj/kernel": optax.contrib.MuonDimensionNumbers(0, (1, 2))}
      >>> check(jm.nanochat(reading=jm.Reading(dimension_numbers=numbers)), shapes)
      no parameter is in doubt
    """
    tx = as_transform("tx", tx)
    check_arrays("params", params)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    error = None
    with listening() as notes, collecting_doubts():
        try:
            # A new function: JAX does not trace again what it has traced before, and
            # would take this trace, in which nothing is refused, for one of `tx.init`.
            jax.eval_shape(lambda params: tx.init(params), shapes)
        except ValueError as raised:
            error = raised
    found = {
        parameter.path: parameter
        for note in notes
        if note.kind == "doubts"
        for parameter in note.facts["doubts"]
    }
    if error is not None and not found:
        raise error
    return Doubts(found.values())
