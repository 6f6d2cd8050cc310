"""The covering cases of `python -m benchmarks.fuzz`, and two bugs that it found."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers

import jax_muon as jm
from benchmarks import fuzz
from jax_muon.tools.verify import compare
from tests.distributed.layouts import mesh_of
from tests.reading import reader

CASES = fuzz.covering()


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.seed}")
def test_cases_are_those_of_one_device(case):
    fuzz.check(case).raise_if_wrong()


def test_every_two_values_of_two_features_meet():
    for one, other in itertools.combinations(fuzz.FEATURES, 2):
        met = {(case[one], case[other]) for case in CASES}
        wanted = itertools.product(fuzz.FEATURES[one], fuzz.FEATURES[other])
        assert met == set(wanted)


def test_two_shapes_gathered_in_bfloat16():
    """XLA moved the transpose of one into a product that no CPU runs."""
    grads = {"a": np.ones((24, 4), "float32"), "b": np.ones((24, 4), "float32")}
    matrices = reader({"b": MuonDimensionNumbers(1, 0)})
    tx = jm.muon(steps=1, dtype="bfloat16", matrices=matrices)
    mesh, specs = mesh_of(2, names=("fsdp",)), {"a": P(None, "fsdp"), "b": P()}
    many = jm.on_mesh(tx, mesh, specs)
    compare(tx, many, grads, [grads], mesh, specs).raise_if_wrong()


def test_a_batch_over_one_device_and_parameters_over_others():
    """XLA cannot sum over an axis of one device what is sharded over another."""
    params = {"a": jnp.ones((16, 2))}
    mesh, specs = mesh_of(1, 4), {"a": P("fsdp", None)}
    step = jm.make_train_step(
        lambda p, batch: jnp.mean(batch @ p["a"]),
        jm.muon(),
        mesh,
        specs=specs,
        min_size=64,
    )
    after, _, _ = step(*step.init(params), jnp.ones((4, 16)))
    assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(after))
