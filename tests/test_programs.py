"""Small programs in many styles, read by their losses."""

import jax
import jax.numpy as jnp
import pytest

from benchmarks.reading import RIGHT, expectation, judge
from jax_muon.paths import leaves_with_paths
from jax_muon.reading.computation.read import read_uses
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


# A parameter is multiplied by another one, and either may be like data; a kernel hides
# a parameter, and its widths do not tell in from out. Names decide these.
UNDECIDED = {
    "latents_not_repeated": {"att/q", "latents"},
    "latents_not_repeated_with_bias": {"att/q", "latents"},
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_reading(name):
    """Every answer and role that the loss determines; a doubt where it does not."""
    program = PROGRAMS[name]()
    read = read_uses(program.loss, program.params, *program.args)
    undecided = {x.path for x in read if x.doubt is not None}
    assert undecided == UNDECIDED.get(name, set())
    for x in read:
        expect = expectation(program.answers[x.path], x.shape)
        if x.path not in undecided and expect.get("knowable", True):
            param = {"path": x.path, "shape": x.shape, "expect": expect}
            assert judge(param, x) == (RIGHT, ""), x
    roles = {x.path: x.role for x in read if x.path not in undecided}
    for path, role in program.roles.items():
        if path in roles and not program.answers[path].endswith("?"):
            assert roles[path] == role
