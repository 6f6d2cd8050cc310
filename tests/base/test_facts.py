"""Facts: each module records in a class of its own, and only while a tool listens."""

import jax
import jax.numpy as jnp

from jax_muon.base import facts


class Seen(dict):
    """A class of a module."""


class Others(list):
    """A class of another one."""


def noting(x):
    facts.record(Seen)["x"] = x.shape
    facts.record(Others).append(x.dtype)
    return 2 * x


def test_facts_are_recorded_by_class_while_a_function_is_traced():
    shapes, recorded = facts.eval_shape(noting, jnp.ones(3))
    assert shapes == jax.ShapeDtypeStruct((3,), "float32")
    assert recorded[Seen] == {"x": (3,)} and recorded[Others] == ["float32"]
    _, recorded = facts.eval_shape(noting, jnp.ones(3))  # also a second time
    assert recorded[Seen] == {"x": (3,)}


def test_nobody_listens_outside():
    noting(jnp.ones(3))
    assert not facts.record(Seen)
    with facts.recording() as recorded:
        noting(jnp.ones(4))
    assert recorded[Seen] == {"x": (4,)} and not facts.record(Seen)
