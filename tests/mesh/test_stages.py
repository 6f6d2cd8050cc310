"""Parameters on disjoint meshes: one device's updates, checkpoints, what is refused."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_muon as jm
from tests import trees
from tests.mesh.layouts import AUTO, EXPLICIT, recipe
from tests.mesh.problems import BOUND

WIDTH = 16


def draw(seed=0):
    """Two blocks with an embedding before and a head after them."""
    shapes = {
        "embed": {"embedding": (40, WIDTH)},
        **{
            f"layers_{i}": {
                "attn": {name: {"kernel": (WIDTH, WIDTH)} for name in "qkvo"},
                "up": {"kernel": (WIDTH, 2 * WIDTH)},
                "norm": {"scale": (WIDTH,)},
            }
            for i in range(4)
        },
        "lm_head": {"kernel": (WIDTH, 40)},
    }
    return trees.normal(shapes, seed)


def place(tree, kind=AUTO, first=("embed", "layers_0", "layers_1")):
    """The first layers on four devices, the others on four more."""
    devices = np.array(jax.devices()).reshape(2, 4)
    meshes = [Mesh(d, ("fsdp",), axis_types=(kind,)) for d in devices]
    return {
        name: jax.device_put(x, NamedSharding(meshes[name not in first], P("fsdp")))
        for name, x in tree.items()
    }


def steps(update, state, params, numbers, put=lambda tree: tree):
    """Parameters and state after some steps."""
    for number in numbers:
        grads = jax.tree.map(lambda p, g: 0.1 * p + g, params, put(draw(number)))
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def assert_equal(found, expected):
    chex.assert_trees_all_close(found, expected, rtol=0, atol=BOUND * 10)


@functools.cache
def one_device():
    """The optimizer, and parameters after three steps."""
    whole = draw()
    tx = recipe(matrices=toy(whole))
    return tx, steps(jax.jit(tx.update), tx.init(whole), whole, (1, 2, 3))[0]


@pytest.mark.parametrize(
    ("kind", "given"),
    [(AUTO, {}), (EXPLICIT, {}), (AUTO, {"divide": "fsdp", "donate": True})],
)
def test_stages_equal_one_device(kind, given, tmp_path):
    """Also from a checkpoint on, which is restored to the shardings of `init`."""
    tx, expected = one_device()
    params = place(draw(), kind)
    staged = jm.on_stages(tx, **given)
    put = functools.partial(place, kind=kind)
    state = staged.init(params)
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
        (params, state),
    )
    params, state = steps(staged.update, state, params, (1, 2), put)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "2", (params, state))
    with ocp.StandardCheckpointer() as checkpointer:
        params, state = checkpointer.restore(tmp_path / "2", shapes)
    params, state = steps(staged.update, state, params, (3,), put)
    assert_equal(params, expected)
    assert all(
        x.sharding.is_equivalent_to(y.sharding, x.ndim)
        for x, y in zip(*map(jax.tree.leaves, ((params, state), shapes)), strict=True)
    )


def test_a_process_has_the_stages_of_its_devices_alone():
    tx, expected = one_device()
    own = ("lm_head", "layers_2", "layers_3")

    def mask(tree):
        rest = optax.MaskedNode()
        return {name: x if name in own else rest for name, x in tree.items()}

    params = mask(place(draw()))
    staged = jm.on_stages(tx)
    put = lambda tree: mask(place(tree))  # noqa: E731
    params, state = steps(staged.update, staged.init(params), params, (1, 2, 3), put)
    assert len(state) == 1
    assert_equal(params, mask(expected))


def test_what_needs_all_stages_is_refused():
    params = place(draw())
    for of_all, name in {
        optax.clip_by_global_norm(1.0): "clip_by_global_norm",
        optax.normalize_by_update_norm(): "normalize_by_update_norm",
        jm.on_auto_axes(optax.contrib.prodigy(1.0)): "tree_",
    }.items():
        tx = jm.on_stages(optax.chain(of_all, recipe()))
        state = tx.init(params)
        for _ in range(2):
            with pytest.raises(ValueError, match=f"{name}.* would see one stage's"):
                tx.update(params, state, params)
    joins = {"layers_{i}/attn/q": 4}
    joined = jm.on_stages(recipe(matrices=toy(draw(), joins=joins)))
    with pytest.raises(
        ValueError, match=r"layers_0/attn/q/kernel, .* not of one stage"
    ):
        joined.init(params)
    with pytest.raises(ValueError, match="'embed/embedding' has no mesh; expected"):
        jm.on_stages(recipe()).init(draw())
    with pytest.raises(ValueError, match="expected calls outside of jit"):
        jax.jit(jm.on_stages(recipe()).init)(draw())


def test_a_stage_that_alone_is_read_differently_is_refused():
    """`up` beside nothing is (in, out); beside the other kernels' biases (out, in)."""
    whole = {
        "a": {"weight": jnp.ones((8, 16)), "bias": jnp.ones(8)},
        "b": {"weight": jnp.ones((16, 8))},
    }
    params = place(whole, first=("a",))
    tx = jm.on_stages(recipe())
    for _ in range(2):  # traced or not
        with pytest.raises(
            ValueError, match=r"'b/weight' is read as .* in the whole model"
        ):
            tx.init(params)
    staged = jm.on_stages(recipe(matrices=toy(whole)))
    staged.init(params)


def test_updates_and_state_are_sharded_like_the_parameters():
    """Also where gradients are not."""
    params = place(draw())
    tx = jm.on_stages(recipe())
    state = tx.init(params)
    grads = jax.tree.map(
        lambda p: jax.device_put(p, NamedSharding(p.sharding.mesh, P())), params
    )
    updates, after = tx.update(grads, state, params)
    for new, old in ((updates, params), (after, state)):
        for x, y in zip(jax.tree.leaves(new), jax.tree.leaves(old), strict=True):
            assert x.sharding.is_equivalent_to(y.sharding, x.ndim)
