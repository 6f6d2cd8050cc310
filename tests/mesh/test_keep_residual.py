"""keep_residual on a mesh: one device's bits, and checkpoints into another layout."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import jax_muon as jm
from jax_muon.keep_residual import _whole
from tests.mesh import layouts, problems
from tests.mesh.layouts import ADAMW, AUTO, EXPLICIT, make_step
from tests.reading import toy

DRAWN = problems.draw("mixed")


def narrow():
    """Parameters of the problem in 16 bits."""
    return jax.tree.map(lambda x: x.astype("bfloat16"), DRAWN[0])


def kept(tx=None):
    tx = (
        jm.nanochat(1e-4, adamw=ADAMW, dtype="float32", steps=2, matrices=toy)
        if tx is None
        else tx
    )
    return jm.keep_residual(tx)


def train(tx, params, steps, state=None, place=lambda tree: tree):
    """Steps with float32 gradients that do not depend on the parameters."""

    @jax.jit
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = jax.jit(tx.init)(params) if state is None else state
    for i in steps:
        keys = zip(
            params, jax.random.split(jax.random.key(i), len(params)), strict=True
        )
        grads = {path: jax.random.normal(k, params[path].shape) for path, k in keys}
        params, state = step(params, state, place(grads))
    return params, state


def assert_close(got, want):
    """Parameters with their residuals: a rounding may fall one unit to the other side.

    A unit is 2^-16 of a parameter, and few of them differ.
    """
    for path, p in want[0].items():
        one, other = (
            np.asarray(jax.device_get(_whole(x[path], s.residual[path])), np.float64)
            for x, s in (got, want)
        )
        unit = np.abs(np.asarray(p, np.float64)) * 2.0**-15 + 1e-9
        assert np.mean(np.abs(one - other) > 1e-7) < 0.01
        assert np.all(np.abs(one - other) <= 2 * unit + 1e-6)


@pytest.mark.parametrize(
    ("where", "kind"),
    [("HSDP", AUTO), ("ZeRO-2 x FSDP x TP", AUTO), ("FSDP x TP", EXPLICIT)],
)
def test_equals_one_device(where, kind):
    found = layouts.layout(where, kind)
    with jax.set_mesh(found.mesh):
        got = train(
            found.on(kept()), found.place(narrow()), range(4), place=found.place
        )
    layouts.assert_bit_identical_on_devices(got)
    chex.assert_trees_all_equal_dtypes(got[0], narrow())
    assert_close(got, train(kept(), narrow(), range(4)))
    for path, residual in got[1].residual.items():
        assert residual.dtype == jnp.int8
        mu = optax.tree.get_all_with_path(got[1], "mu")
        (like,) = [x[path] for _, x in mu if hasattr(x[path], "shape")]
        assert residual.sharding.is_equivalent_to(like.sharding, residual.ndim)


def test_a_checkpoint_goes_on_in_another_layout(tmp_path):
    first, then = layouts.layout("HSDP"), layouts.layout("FSDP x TP")
    params, state = train(first.on(kept()), first.place(narrow()), range(2))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "2", {"params": params, "state": state})
    tx = then.on(kept())
    placed = then.place(narrow())
    target = {
        "params": jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
            placed,
        ),
        "state": jm.abstract_state(tx, placed, then.mesh),
    }
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(tmp_path / "2", target)
    got = train(tx, restored["params"], range(2, 4), restored["state"])
    assert_close(got, train(kept(), narrow(), range(4)))


def drift(rate):
    """The same small step for every element, whatever its gradient."""
    return optax.GradientTransformation(
        lambda params: optax.EmptyState(),
        lambda g, state, params=None: (
            jax.tree.map(lambda p: jnp.full_like(p, rate), params),
            state,
        ),
    )


@pytest.mark.parametrize(
    "given",
    [
        {"where": "ZeRO-2 on 8"},
        {"where": "ZeRO-2 on 8", "kind": EXPLICIT},
        {"where": "HSDP", "microbatches": 2},
        {"where": "HSDP", "divided": True},
        {
            "where": "ZeRO-2 x FSDP x TP",
            "gather_dtype": "bfloat16",
        },
        {"where": "HSDP", "dtype": "float16"},
    ],
    ids=str,
)
def test_a_train_step_loses_no_small_step(given):
    """Where updates are gathered and applied in the same program."""
    given = dict(given)
    dtype = given.pop("dtype", "bfloat16")
    rate, steps = 2.0**-14, 16  # two units of a bfloat16 between 1 and 2
    step = make_step(tx=kept(drift(rate)), **given)
    start = jax.tree.map(lambda x: jnp.sign(x) * (1 + jnp.abs(x)), narrow())
    start = jax.tree.map(lambda x: x.astype(dtype), start)
    params, state, _ = layouts.train_step_run(step, start, problems.batches(steps))
    for path, p in start.items():
        got = np.asarray(jax.device_get(_whole(params[path], state.residual[path])))
        moved = got.astype(np.float64) - np.asarray(p, np.float64)
        # A tie between two float16 ends a unit beyond the range: 127 instead of 128.
        unit = 2.0**-18 if dtype == "float16" else 0
        np.testing.assert_allclose(moved, rate * steps, rtol=0, atol=unit)
        if dtype == "bfloat16":
            np.testing.assert_array_equal(p + jnp.asarray(rate, p.dtype), p)
