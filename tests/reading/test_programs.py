"""Small programs in many styles, read by their losses."""

import re

import jax
import jax.numpy as jnp
import pytest

import jax_muon as jm
from benchmarks.reading import RIGHT, judge
from jax_muon.reading.computation.read import read_uses
from tests.programs import PROGRAMS

pytestmark = pytest.mark.usefixtures("as_users_write")


# Axes of layers, in whatever form the loop is.
SCANNED = {
    "scan_checkpointed_and_reversed": {(0,)},
    "scan_over_blocks_of_layers": {(0,)},
    "scan_over_numbers": {(0,)},
    "scan_along_the_second_axis": {(1,)},
}
# A parameter is multiplied by another one, and either may be like data.
UNDECIDED = {"prototypes_times_a_matrix": {"project", "prototypes"}}


@pytest.mark.parametrize("name", PROGRAMS)
def test_reading(name):
    """Every answer and role that the loss determines; a doubt where it does not."""
    program = PROGRAMS[name]()
    result = jax.eval_shape(program.loss, program.params, *program.args)
    value = result[0] if isinstance(result, tuple) else result  # others are metrics
    assert value.shape == () and jnp.issubdtype(value.dtype, jnp.floating)
    read = read_uses(program.loss, program.params, *program.args)
    assert {x.path for x in read} == set(program.answers)
    undecided = {x.path for x in read if x.doubt is not None}
    assert undecided == UNDECIDED.get(name, set())
    for x in read:
        answer = program.answers[x.path]
        if x.path not in undecided and not answer.endswith("?"):
            assert judge(answer, x) == (RIGHT, ""), x
    if name in SCANNED:
        layers = [x for x in read if x.path.startswith(("layers/", "up", "down"))]
        assert {x.scanned for x in layers} == SCANNED[name]
    roles = {x.path: x.role for x in read if x.path not in undecided}
    for path, role in program.roles.items():
        if path in roles and not program.answers[path].endswith("?"):
            assert roles[path] == role


# A leaf of each tree whose names mislead, and its row in the table that users see.
ROWS = {
    "pytorch_checkpoint": (
        "model.layers.0.mlp.up_proj.weight 96 x 64 kernel 1 x (64, 96) muon "
        "contracted over axis 1"
    ),
    "twin_critics": (
        "Dense_2/kernel 2 x 256 x 1 vector - adamw "
        "one row or column, contracted over axis 1"
    ),
    "layers_in_an_encoder": (
        "encoder/w 8 x 64 x 64 kernel 8 x (64, 64) muon contracted over axis 1"
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_row(name):
    """What is printed names the use and its line in the program."""
    program = PROGRAMS[name]()
    table = str(jm.read(program.params, program.loss, *program.args))
    rows = [re.sub(" +", " ", row) for row in table.splitlines()]
    assert any(
        re.fullmatch(rf"{re.escape(ROWS[name])} at trees.py:\d+", x) for x in rows
    )
