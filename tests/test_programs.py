"""The programs themselves: each loss is one number, and each answer fits its leaf."""

import jax
import jax.numpy as jnp
import pytest

from benchmarks.reading import expectation
from jax_muon.paths import leaves_with_paths
from tests.programs import PROGRAMS


@pytest.mark.parametrize("name", PROGRAMS)
def test_program(name):
    """Some also return metrics. Not all have a gradient: `while` has none."""
    program = PROGRAMS[name]()
    result = jax.eval_shape(program.loss, program.params, *program.args)
    value = result[0] if isinstance(result, tuple) else result
    assert value.shape == () and jnp.issubdtype(value.dtype, jnp.floating)
    for path, leaf in leaves_with_paths(program.params):
        expectation(program.answers[path], leaf.shape)
