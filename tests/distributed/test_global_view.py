"""Experts, guards and QK-clip around sharded parameters, as on one device."""

import re

import jax
import numpy as np
import optax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_muon as jm
from jax_muon.mesh.traffic import collectives
from tests.distributed import problems
from tests.distributed.test_owners import BOTH, mesh_of, placing

SENDS = "all-to-all|all-gather|all-reduce|reduce-scatter|collective-permute"


@BOTH
def test_experts_on_devices_of_their_own_send_nothing(kind):
    """(8, 16, 24) over 8 devices: by experts no collective, by rows two all-to-alls."""
    mesh = mesh_of(8, kind=kind)
    shape = (8, 16, 24)
    params = {"experts/up": np.ones(shape, np.float32)}
    for spec, sent in (
        (P("a"), []),
        (P(None, "a"), [np.ones((8, 1, 2, 24)).size * 4] * 2),
    ):
        specs = {"experts/up": spec}
        given = {} if kind == AxisType.Explicit else {"mesh": mesh, "specs": specs}
        tx = jm.nanochat(0.02, steps=2, dtype="float32", small=0, **given)
        placed = placing(mesh, specs)(params)

        def step(params, state, grads, tx=tx):
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        with jax.set_mesh(mesh):
            args = (placed, jax.jit(tx.init)(placed), placed)
            program = jax.jit(step).lower(*args).compile().as_text()
            found = [(c.kind, c.input_bytes) for c in collectives(step, *args)]
        assert found == [("all-to-all", size) for size in sent]
        assert bool(re.search(SENDS, program)) == bool(sent)


@BOTH
def test_guards_around_a_sharded_recipe(kind):
    """Clipped norm, clipped logits, and a step with a NaN on one device, as on one."""
    mesh = mesh_of(4, 2, kind=kind)
    specs = {"attn/q": P("a", "b"), "attn/k": P("a", "b"), "norm": P("a")}
    rng = np.random.default_rng(0)
    shapes = {"attn/q": (24, 48), "attn/k": (24, 48), "norm": (24,)}
    start, *grads = (
        {path: np.float32(rng.standard_normal(shape)) for path, shape in shapes.items()}
        for _ in range(4)
    )
    grads[1]["attn/q"][13, 29] = np.nan
    largest = {"attn": np.float32([1, 5, 0.5, 1, 9, 2, 0.1, 1.1])}

    def run(place, **given):
        recipe = jm.nanochat(
            0.02, steps=2, dtype="float32", adamw_eps=1e-6, max_norm=1.0, **given
        )
        tx = jm.skip_nonfinite(optax.chain(recipe, jm.clip_qk(2.0)))

        @jax.jit
        def step(params, state, grads):
            updates, state = tx.update(grads, state, params, max_logits=largest)
            return optax.apply_updates(params, updates), state

        params = place(start)
        state = jax.jit(tx.init)(params)
        seen = []
        for g in grads:
            params, state = step(params, state, place(g))
            seen.append(jax.device_get(params))
        assert state.skipped == 1
        return seen

    expected = run(lambda tree: tree)
    given = {"small": 0}
    if kind == AxisType.Auto:
        given |= {"mesh": mesh, "specs": specs}
    with jax.set_mesh(mesh):
        got = run(placing(mesh, specs), **given)
    for have, want in zip(got, expected, strict=True):
        assert problems.distance(have, want, start) < 5e-6
    jax.tree.map(np.testing.assert_array_equal, got[1], got[0])
