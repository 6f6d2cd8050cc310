"""What is sent: as many bytes as planned, in narrow dtypes, and nothing twice."""

import functools
import math
import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jax_muon as jm
from benchmarks.schedule.jaxpr import collectives
from tests.matrices import toy
from tests.mesh import case
from tests.mesh.case import make_step, mesh_of
from tests.recipes import RECIPES

NARROW = dict.fromkeys(("reduce_dtype", "gather_dtype"), "bfloat16")


@pytest.mark.parametrize("where", ["ZeRO-2 on 8", "FSDP"])
def test_plan_counts_what_a_step_sends(where):
    params, _ = case.draw("mixed")
    step = make_step(where, min_size=200)
    shapes, state = step.abstract(params)
    planned = jm.describe(step, shapes, case.batches(1)[0])
    sent = collectives(step._step, shapes, state, case.batches(1)[0])
    (loss,) = (one for one in sent if one.shapes == ((),))
    total = sum(one.sent_bytes for one in sent) - loss.sent_bytes
    # What is gathered at the end, outside shard_map, is XLA's to place.
    late = 0
    for leaf in planned.parameters:
        if leaf.spec != leaf.state_spec:
            count = math.prod(planned.sizes.values())
            late += params[leaf.parameter.path].nbytes * (count - 1) / count
    assert total == pytest.approx(sum(planned.sent_bytes.values()) - late)


@pytest.mark.parametrize(
    ("where", "comm", "divided"),
    [
        ("HSDP", "reduce_dtype", False),
        ("ZeRO-2 on 4", "gather_dtype", False),
        ("ZeRO-2 on 4", "gather_dtype", True),
    ],
)
def test_narrow_dtypes(where, comm, divided):
    """A CPU cannot sum 16 bits over some axes of a mesh, nor take the maximum."""
    params, weights = case.draw("mixed")
    plain = case.loss_of(weights)

    def loss(params, batch):
        aux = {"mean": batch.mean(), "largest": batch.max()}
        return plain(params, batch), jax.tree.map(lambda x: x.astype("bfloat16"), aux)

    given = {"where": where, "loss": loss, "has_aux": True, "max_aux": "largest"}
    given |= {"tx": optax.sgd(0.1, momentum=0.9), "divided": divided}
    exact, coarse = (
        case.train_step_run(make_step(**given, **how), params, case.batches(3))[0]
        for how in ({}, {comm: jnp.bfloat16})
    )
    assert 1e-6 < case.distance(coarse, exact, params) < 2e-2  # roundings of 2^-9


EXTREME = [(9000, None), (3 * 2.0**-24, "float32")]


@pytest.mark.parametrize(("slope", "reduce_dtype"), EXTREME)
@pytest.mark.usefixtures("as_users_write")
def test_means_of_float16_neither_overflow_nor_vanish(slope, reduce_dtype):
    """Eight of 9000 are infinite; an eighth of the other is no float16, but 0."""
    layers = {"b": P(None, "fsdp"), "replicated": P()}
    given = {"specs": {"layers": layers, "head": P()}, "reduce_dtype": reduce_dtype}

    def loss(params, batch):
        block = lambda x, layer: (x + layer["b"] + layer["replicated"], None)  # noqa: E731
        y, _ = jm.scan_layers(block, batch, params["layers"])
        return jnp.sum(y + params["head"]) * jnp.float16(slope)

    zeros = functools.partial(jnp.zeros, dtype="float16")
    params = {"layers": {"b": zeros((3, 8)), "replicated": zeros((3, 8))}}
    step = case.sgd_step(loss, 2, 4, **given)
    found = case.gradients(step, params | {"head": zeros(8)}, zeros((8, 8)))
    for x in jax.tree.leaves(found):
        np.testing.assert_array_equal(x, np.float16(slope))


def test_complex_numbers_keep_their_imaginary_parts_on_the_wire():
    def loss(params, batch):
        return jnp.mean(jnp.abs(params["w"]) ** 2) * jnp.mean(batch)

    gather = {"gather_dtype": NARROW["gather_dtype"]}
    tx = jm.on_mesh(optax.sgd(64.0), case.at(mesh_of(8), P("data")), **gather)
    step = jm.make_train_step(loss, tx, reduce_dtype=NARROW["reduce_dtype"])
    after, _, _ = step(*step.init({"w": jnp.full((8, 16), 1 + 2j)}), jnp.ones(8))
    np.testing.assert_allclose(after["w"], 0 + 4j, atol=1e-6)


@pytest.mark.parametrize("sizes", [(1,), (1, 1)])
def test_what_is_not_sent_is_not_rounded(sizes):
    """Over mesh axes of one device nothing travels, and bfloat16 would round it."""
    mesh, tx = mesh_of(*sizes), optax.sgd(0.1)
    params, weights = case.draw("mixed")
    loss, batch = case.loss_of(weights), case.batches(1)[0]

    def trained(gather=None, reduce=None):
        given = {"divide": mesh.axis_names, "gather_dtype": gather, "min_size": 1}
        on = jm.on_mesh(tx, mesh, **given)
        step = jm.make_train_step(loss, on, reduce_dtype=reduce)
        return step(*step.init(params), batch)[0]

    def updated(gather=None):
        given = {"divide": mesh.axis_names[-1], "gather_dtype": gather}
        on = jm.on_mesh(tx, mesh, min_size=1, **given)
        return on.update(params, on.init(params), params)[0]

    chex.assert_trees_all_equal(trained("bfloat16", "bfloat16"), trained())
    chex.assert_trees_all_equal(updated("bfloat16"), updated())


def test_a_trace_asks_no_tracer_for_its_sharding(monkeypatch):
    """JAX reads the whole trace to say that there is none."""
    asked = []

    def sharding(self):
        asked.append(sys._getframe(1).f_globals["__name__"])
        raise AttributeError

    monkeypatch.setattr(jax.core.Tracer, "sharding", property(sharding))
    tx = jm.on_mesh(RECIPES["muon"](matrices=toy), mesh_of(8), divide="data")

    def step(params):
        tx.abstract_state(params)
        jm.describe(tx, params)
        return tx.update(params, tx.init(params), params)

    jax.eval_shape(step, {"w": jnp.ones((64, 64)), "b": jnp.ones(64)})
    assert not [name for name in asked if name.startswith("jax_muon")]


def test_a_trace_builds_each_path_once(monkeypatch):
    """It took 13 strings for a matrix on one device, and 22 on a mesh."""
    params = {"built_once": jnp.ones((64, 64)), "bias_built_once": jnp.ones(64)}
    built, keystr = [], jax.tree_util.keystr

    def counted(*args, **given):
        built.append(keystr(*args, **given))
        return built[-1]

    monkeypatch.setattr(jax.tree_util, "keystr", counted)
    recipe = RECIPES["nanochat"](matrices=toy)
    for tx in (recipe, jm.on_mesh(recipe, mesh_of(8), divide="data")):
        state = jax.eval_shape(tx.init, params)
        jax.eval_shape(tx.update, params, state, params)
    assert len(built) == len({*built})


def test_a_call_of_a_step_builds_no_paths(monkeypatch):
    """With 436 arrays they took 2.0 ms, and the jitted call 1.2."""
    params, _ = case.draw("mixed")
    step, batch = make_step(), case.batches(1)[0]
    params, state, _ = step(*step.init(params), batch)
    built = []
    monkeypatch.setattr(
        jax.tree_util, "keystr", lambda *args, **given: built.append(args) or "path"
    )
    step(params, state, batch)
    assert not built
