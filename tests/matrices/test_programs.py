"""Small programs in many styles, read by their losses."""

import re

import jax
import jax.numpy as jnp
import pytest
from optax.contrib import MuonDimensionNumbers

import jax_muon as jm
from benchmarks.reading import RIGHT, judge
from jax_muon.reading.read import read_uses
from tests.programs import PROGRAMS
from tests.programs.refused import REFUSED

pytestmark = pytest.mark.usefixtures("as_users_write")


# Axes of layers, in whatever form the loop is.
SCANNED = {
    "scan_over_blocks_of_layers": {(0,)},
    "scan_over_numbers": {(0,)},
    "scan_along_the_second_axis": {(1,)},
    "scan_over_parts_of_a_matrix": {()},
}
# The roles that an answer may name.
ROLES = {"embedding", "head", "router", "unused", "query", "key", "value"}


def check(name, read, refused=()):
    """Every answer and role that the loss determines; a doubt where it does not."""
    answers = PROGRAMS[name].answers
    assert {x.path for x in read} == answers.keys()
    for x in read:
        answer = answers[x.path]
        role = answer.split(", ")[-1]
        if x.path in refused or answer == "refused":
            assert x.doubt is not None, x
        elif not answer.endswith("?"):
            assert x.doubt is None, x
            assert judge(answer, x) == (RIGHT, ""), x
            assert role not in ROLES or x.role == role, x


@pytest.mark.parametrize("name", PROGRAMS)
def test_reading(name):
    program = PROGRAMS[name]
    result = jax.eval_shape(program.loss, program.params, *program.args)
    value = result[0] if isinstance(result, tuple) else result  # others are metrics
    assert value.shape == () and jnp.issubdtype(value.dtype, jnp.floating)
    read = read_uses(program.loss, program.params, *program.args)
    check(name, read, REFUSED[name][0] if name in REFUSED else ())
    if name in SCANNED:
        layers = [x for x in read if x.path.startswith(("layers/", "up", "down"))]
        assert {x.scanned for x in layers} == SCANNED[name]


def test_most_leaves_are_right_at_once():
    leaves = sum(len(x.answers) for x in PROGRAMS.values())
    refused = sum(len(paths) for paths, _ in REFUSED.values())
    assert refused < 0.05 * leaves


@pytest.mark.parametrize("name", REFUSED)
def test_rules_decide(name):
    """What a refusal asks for decides about all parameters, also those without one."""
    program, letters = PROGRAMS[name], REFUSED[name][1]
    rules = {path: rule(x) for path, x in letters.items()}
    read = jm.find_matrices(program.params, program.loss, *program.args, rules=rules)
    answers = program.answers.items()
    for path in [x for x, answer in answers if "refused" not in answer]:
        assert judge(program.answers[path], read[path]) == (RIGHT, ""), read[path]


def test_a_refusal_names_the_rule_that_decides_most():
    """Learned patterns are like data, or else the matrices that they meet may be."""
    program = PROGRAMS["stored_patterns"]
    with pytest.raises(ValueError) as caught:
        jm.find_matrices(program.params, program.loss, *program.args)
    last = str(caught.value).splitlines()[-1]
    assert last == "If {'patterns': 'adamw'} is right, it decides 'k', 'v' as well."


def rule(letters):
    """A label, or the dimension numbers of "bio": (1, 2)."""
    if letters == "adamw":
        return letters
    inside, outside = ([a for a, x in enumerate(letters) if x == y] for y in "io")
    return MuonDimensionNumbers(tuple(inside), tuple(outside))


# A leaf of some programs, and its row in the table that users see.
ROWS = {
    "pytorch_checkpoint": (
        "model.layers.0.mlp.up_proj.weight 96 x 64 kernel 1 x (64, 96) muon "
        "contracted over axis 1 at layers.py:N"
    ),
    "soft_actor_critic": (
        "critics/w3 2 x 40 x 1 vector - adamw one row or column at parts.py:N"
    ),
    "scan_along_the_second_axis": (
        "up 24 x 8 x 40 kernel 8 x (24, 40) muon contracted over axis 0 at parts.py:N"
    ),
    "encoder_without_a_head": (
        "layers/1/down 40 x 24 kernel 1 x (40, 24) muon "
        "last product before the result at layers.py:N, and like 'layers/0/down'"
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_row(name):
    """What is printed names the use and its line in the program."""
    program = PROGRAMS[name]
    table = str(jm.find_matrices(program.params, program.loss, *program.args))
    rows = re.sub(r"\.py:\d+", ".py:N", re.sub(" +", " ", table)).splitlines()
    assert ROWS[name] in rows
