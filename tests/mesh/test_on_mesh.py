"""Every layout: one device's results, arrays sharded as promised, and what is sent."""

import functools
import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_muon as jm
from tests.mesh import layouts, problems
from tests.mesh.layouts import (
    AUTO,
    COMPOSITIONS,
    EXPLICIT,
    LAYOUTS,
    RECIPES,
    mesh_of,
    recipe,
)
from tests.mesh.problems import BOUND, assert_same_losses
from tests.reading import reader, toy

BOTH = pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=["auto", "explicit"])

# Every layout with one recipe, every recipe with two layouts, both kinds of axes.
TABLE = [
    *(("nanochat", where, AUTO) for where in LAYOUTS),
    *((name, "HSDP", AUTO) for name in RECIPES if name != "nanochat"),
    *((name, "FSDP x TP", EXPLICIT) for name in RECIPES),
    ("nanochat", "ZeRO-2 on 8", EXPLICIT),
    *((how, "HSDP", AUTO) for how in COMPOSITIONS if "alone" not in how),
    ("inside MultiSteps", "HSDP", EXPLICIT),
    ("injected rates alone", "FSDP", EXPLICIT),
]


@pytest.mark.parametrize(("name", "where", "kind"), TABLE)
def test_equals_one_device(name, where, kind):
    start, expected, losses = layouts.one_device(name)
    result, got = layouts.train_on_mesh(name, where, kind=kind)
    assert problems.distance(result, expected, start) < BOUND
    assert_same_losses(got, losses)


def test_float64_has_no_rounding_to_hide_behind(x64):
    where = "ZeRO-2 x FSDP x TP"
    start, expected, _ = layouts.one_device("nanochat", steps=5, dtype="float64")
    result, _ = layouts.train_on_mesh("nanochat", where, steps=5, dtype="float64")
    assert problems.distance(result, expected, start) < 1e-12


# --- around and inside other transforms -----------------------------------------------


def test_on_mesh_inside_injected_rates():
    """On Auto axes an error that says where it belongs, and never a wrong number."""

    def make(learning_rate, mesh=None):
        tx = jm.muon(learning_rate, dtype="float32", steps=2, matrices=toy)
        return tx if mesh is None else jm.on_mesh(tx, mesh, divide="data")

    def run(kind):
        mesh = mesh_of(8, kind=kind)
        start = jax.device_put(params, NamedSharding(mesh, P()))
        injected = optax.inject_hyperparams(make, static_args="mesh")
        tx = injected(learning_rate=0.1, mesh=mesh)
        with jax.set_mesh(mesh):
            state = jax.jit(tx.init)(start)
            for _ in range(2):
                updates, state = jax.jit(tx.update)(start, state, start)
        return updates

    params = {"w": jnp.sin(jnp.arange(64.0)).reshape(8, 8)}
    with pytest.raises(ValueError, match=r"it inside: on_mesh\(optax.inject_hyperp"):
        run(AUTO)
    # Types of Explicit axes are the same outside.
    alone = make(0.1)
    expected, _ = jax.jit(alone.update)(params, alone.init(params), params)
    np.testing.assert_allclose(run(EXPLICIT)["w"], expected["w"], atol=1e-6)


def test_gradients_of_an_update_eager_and_jitted():
    params = {"w": jnp.sin(jnp.arange(16.0 * 24)).reshape(16, 24)}
    plain = jm.muon(0.1, dtype="float32", steps=2, matrices=toy)

    def after(params, tx):
        updates, _ = tx.update(params, tx.init(params), params)
        return jnp.sum(jnp.sin(updates["w"]))

    on = jm.on_mesh(plain, mesh_of(8), divide="data", min_size=1)
    gradient = jax.grad(functools.partial(after, tx=on))
    expected = jax.jit(jax.grad(functools.partial(after, tx=plain)))(params)
    for found in (gradient(params), jax.jit(gradient)(params)):
        np.testing.assert_allclose(found["w"], expected["w"], rtol=1e-4, atol=1e-6)
    with jax.disable_jit():
        eager = on.update(params, on.init(params), params)
    jitted = on.update(params, on.init(params), params)
    chex.assert_trees_all_equal(eager, jitted)


def test_a_trace_asks_no_tracer_for_its_sharding(monkeypatch):
    """JAX reads the whole trace to say that there is none."""
    asked = []

    def sharding(self):
        asked.append(sys._getframe(1).f_globals["__name__"])
        raise AttributeError

    monkeypatch.setattr(jax.core.Tracer, "sharding", property(sharding))
    mesh = mesh_of(8)
    tx = jm.on_mesh(jm.muon(matrices=toy), mesh, divide="data")

    def step(params):
        state = tx.init(params)
        jm.abstract_state(tx, params, mesh)
        jm.describe(tx, params)
        return tx.update(params, state, params)

    jax.eval_shape(step, {"w": jnp.ones((64, 64)), "b": jnp.ones(64)})
    assert not [name for name in asked if name.startswith("jax_muon")]


# --- how state is sharded -------------------------------------------------------------


def test_state_of_gpt2_is_an_even_share():
    """GPT-2 124M with an odd vocabulary: within 1 % of the whole over the devices."""
    width, layers = 768, 12
    block = dict.fromkeys(("q", "k", "v", "out"), (width, width))
    block |= {"up": (width, 4 * width), "down": (4 * width, width), "norm": (width,)}
    shapes = {"wte": (50257, width)}
    shapes |= {f"{i}/{n}": shape for i in range(layers) for n, shape in block.items()}
    params = {k: jax.ShapeDtypeStruct(v, "float32") for k, v in shapes.items()}
    tx, mesh = jm.nanochat(matrices=toy), mesh_of(8)
    on = jm.on_mesh(tx, mesh, divide="data")
    held = jm.describe(on, params).state_bytes
    assert held < 1.01 * jm.describe(tx, params).state_bytes / 8
    assert held == sum(
        np.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x in jax.tree.leaves(jm.abstract_state(on, params, mesh))
    )


@BOTH
@pytest.mark.parametrize("where", ["ZeRO-2 on 8", "HSDP", "FSDP x TP"])
def test_state_is_sharded_as_abstract_state_says(where, kind):
    """Whether `init` is jitted or not, and with `on_mesh` in a chain."""
    layout = layouts.layout(where, kind)
    params = layout.place(problems.draw("mixed")[0])
    tx = layout.on(recipe())
    chain = optax.chain(optax.identity(), tx)
    for init, whose in ((tx.init, tx), (jax.jit(tx.init), tx), (chain.init, chain)):
        expected = jm.abstract_state(whose, params, layout.mesh)
        pairs = zip(*map(jax.tree.leaves, (init(params), expected)), strict=True)
        for x, want in pairs:
            assert (x.shape, x.dtype) == (want.shape, want.dtype)
            assert x.sharding == want.sharding


# With state also divided over the replicas, it moves from anywhere to anywhere.
JOURNEY = ["ZeRO-2 on 8", "HSDP", "FSDP", None, "ZeRO-2 on 4"]


def test_a_checkpoint_travels(tmp_path):
    """Eight devices, 2 x 4, four, one and four: exact resume."""
    start, expected, want = layouts.one_device("nanochat", steps=10)
    loss, data = problems.loss_of(problems.draw("mixed")[1]), problems.batches(10)
    checkpointer, got = ocp.StandardCheckpointer(), []
    checkpointer.save(tmp_path / "0", {"params": start, "state": recipe().init(start)})
    for leg, where in enumerate(JOURNEY):
        mesh, tx, placed = None, recipe(), start
        if where is not None:
            layout = layouts.layout(where)
            mesh, tx, placed = layout.mesh, layout.on(tx), layout.place(start)
        checkpointer.wait_until_finished()
        target = {"params": placed, "state": jm.abstract_state(tx, start, mesh)}
        params, state = checkpointer.restore(tmp_path / str(leg), target).values()
        step, batches = problems.plain_step(tx, loss), data[2 * leg : 2 * leg + 2]
        params, state, losses = problems.run(step, params, state, batches)
        got += losses
        after = {"params": params, "state": state}
        checkpointer.save(tmp_path / str(leg + 1), after)
    checkpointer.close()
    assert_same_losses(got, want)
    assert problems.distance(params, expected, start) < BOUND


# --- errors ---------------------------------------------------------------------------


# The words of an error, and the specs and `divide` that raise it, for "w" of shape
# (8, 12) on eight devices.
DO_NOT_FIT = {
    r"'w' of shape \(8, 12\) .*model.* axes of the mesh {'data'": (P("model"),),
    r"'w' of shape \(8, 12\) .* axis of 12 is not .* divide the": (P(None, "data"),),
    "at most 2 entries": (P(None, None, "data"),),
    "specs have 'data' for parameter 'w'; expected a Part": ({"w": "data"},),
    r"axes of the mesh, .* each once": (None, ("data", "data")),
    "specs have 'up' for parameter 'w'": (lambda params: dict.fromkeys(params, "up"),),
}


@pytest.mark.parametrize("words", DO_NOT_FIT)
def test_specs_that_do_not_fit(words):
    params = {"w": jax.ShapeDtypeStruct((8, 12), "float32")}
    with pytest.raises(ValueError, match=words):
        tx = jm.on_mesh(jm.nanochat(matrices=toy), mesh_of(8), *DO_NOT_FIT[words])
        jax.eval_shape(tx.init, params)


def test_specs_of_a_bare_array_name_no_path():
    tx = jm.on_mesh(jm.nanochat(matrices=toy), mesh_of(8), P("model"))
    with pytest.raises(ValueError, match=r"^the parameter of shape \(8, 12\) with"):
        tx.init(jnp.ones((8, 12)))


def test_arrays_sharded_on_auto_axes_without_specs():
    mesh, tx = mesh_of(8), jm.nanochat(matrices=toy)
    params = jax.device_put({"w": jnp.ones((8, 8))}, NamedSharding(mesh, P("data")))
    state = tx.init(params)
    for call in (tx.update, jax.jit(tx.update)):
        with pytest.raises(ValueError, match=r"'w' .* Auto axes.*jax_muon.on_mesh"):
            call(params, state, params)
    with pytest.raises(ValueError, match=r"'w' is sharded .* expected specs"):
        jm.on_mesh(tx, mesh).init(params)
    # Over one device nothing is sharded, whatever the spec says.
    params = jax.device_put(params, NamedSharding(mesh_of(1), P("data")))
    jm.on_mesh(tx, mesh_of(1)).init(params)


@pytest.mark.parametrize(
    "tx",
    [jm.orthogonalize(), jm.skip_nonfinite(optax.sgd(1.0))],
    ids=["orthogonalize", "guard"],
)
def test_what_differs_between_devices_is_refused(tx):
    """Where JAX tracks it, and where it does not; never block by block in silence."""

    def update(grads):
        return tx.update(grads, tx.init(grads))[0]

    def run(**given):
        return jax.shard_map(
            update, mesh=mesh_of(8), in_specs=P("data"), out_specs=P("data"), **given
        )({"w": jnp.ones((32, 8))})

    with pytest.raises(ValueError, match=r"'w' differs .*\['data'\].*make_train_step"):
        run()
    with pytest.raises(ValueError, match=r"or in shard_map with check_vma=True"):
        run(check_vma=False)
    with pytest.raises(ValueError, match=r"inside jax.pmap, .*jax_muon.on_replicas"):
        jax.pmap(update)({"w": jnp.ones((8, 4, 8))})


def pmap_step(tx, loss):
    """A step of a trainer with `jax.pmap`, as brax and Flax's older examples are."""

    def step(params, state, batch):
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, state = tx.update(jax.lax.pmean(grads, "i"), state, params)
        return optax.apply_updates(params, updates), state, value

    return jax.pmap(step, axis_name="i")


@pytest.mark.parametrize("devices", [1, 8])
def test_replicas_in_pmap(devices):
    """On one device nothing need be said; on eight `on_replicas` says it."""
    params, weights = problems.draw("mixed")
    loss, data = problems.loss_of(weights), problems.batches(3)
    expected, _, _ = problems.single_device(recipe(), loss, params, data)
    tx = jm.skip_nonfinite(optax.chain(optax.clip_by_global_norm(1e9), recipe()))
    tx = jm.on_replicas(tx) if devices > 1 else tx
    step = pmap_step(tx, loss)
    copies = jax.tree.map(
        lambda x: jnp.broadcast_to(x, (devices, *x.shape)), (params, tx.init(params))
    )
    given = data.reshape(3, devices, -1, data.shape[-1])
    result, _, _ = problems.run(
        lambda *args: (*step(*args)[:2], 0.0), *copies, list(given)
    )
    for one in range(devices):
        own = jax.tree.map(lambda x, one=one: x[one], result)
        assert problems.distance(own, expected, params) < BOUND


# --- corners --------------------------------------------------------------------------


def test_a_mesh_with_axes_of_both_kinds_is_refused():
    """On jax 0.12 its updates would not keep their sharding along Explicit axes."""
    mesh = jax.make_mesh((4, 2), ("data", "fsdp"), axis_types=(AUTO, EXPLICIT))
    with pytest.raises(ValueError, match="expected Auto for all, or Explicit for all"):
        jm.on_mesh(recipe(), mesh)


@pytest.mark.parametrize("shape", [(8, 1), (1, 4)])
def test_a_train_step_over_mesh_axes_of_one_device(shape):
    """One program; XLA cannot sum over one what is sharded over another axis."""
    step = jm.make_train_step(
        lambda p, b: jnp.mean(b @ p["a"]),
        jm.muon(matrices=toy),
        mesh_of(*shape),
        specs=P("fsdp"),
    )
    params, state = step.init({"a": jnp.ones((16, 2))})
    for _ in range(3):
        params, state, _ = step(params, state, jnp.ones((8, 16)))
    assert step._jitted._cache_size() == 1
    chex.assert_tree_all_finite(params)


def test_what_does_not_travel_is_not_rounded():
    params = {"w": jnp.ones((8, 8)), "b": jnp.ones(3)}
    grads = jax.tree.map(lambda p: jnp.full_like(p, 1 / 3), params)
    given = {"divide": "data", "min_size": 1, "gather_dtype": "bfloat16"}
    tx = jm.on_mesh(optax.sgd(1.0), mesh_of(8), **given)
    updates, _ = tx.update(grads, tx.init(params), params)
    np.testing.assert_array_equal(updates["b"], np.float32(-1 / 3))
    assert np.all(updates["w"] != np.float32(-1 / 3))


def test_split_parts_that_devices_do_not_divide_are_divided_elsewhere():
    """(72, 64) in 64 + 4 + 4 rows over eight devices: by columns."""
    params = {"qkv": jnp.ones((72, 64))}
    splits = {"qkv": jm.Split({"q": 64, "k": 4, "v": 4}, axis=0)}
    plain = jm.nanochat(matrices=reader(splits=splits))
    tx = jm.on_mesh(plain, mesh_of(8), divide="data")
    for leaf in jax.tree.leaves(tx.init(params)):
        assert leaf.ndim < 2 or any(leaf.sharding.spec) or 1 in leaf.shape
    planned = jm.describe(tx, params)
    assert planned.sent_bytes["gathers"] > 0
    assert not any(leaf.repeated for leaf in planned.parameters)


def test_leaves_that_are_not_there():
    """None, a group without leaves, a tree of trees, and one without arrays."""
    params = {"a": {"w": jnp.ones((8, 12)), "no": None}, "norm": [jnp.ones(4)]}
    plain = jm.nanochat(
        groups={"unused": optax.adam(1.0)}, dtype="float32", matrices=toy
    )
    tx = jm.on_mesh(plain, mesh_of(4), divide="data", min_size=1)
    layouts.assert_verified(tx, params)
    assert tx.update({}, tx.init({}), {})[0] == {}


def test_multi_steps_keeps_extra_arguments():
    def update(updates, state, params=None, *, value):
        return jax.tree.map(lambda u: u * value, updates), state

    inner = optax.GradientTransformationExtraArgs(optax.init_empty_state, update)
    params = {"w": jnp.ones(4)}
    tx = jm.on_mesh(optax.MultiSteps(inner, 1), mesh_of(4))
    updates, _ = tx.update(params, tx.init(params), params, value=jnp.float32(3))
    np.testing.assert_array_equal(updates["w"], 3)


def test_zeros_without_the_sharding_of_parameters():
    """State keeps the sharding that `init` gave it, so that no step compiles again."""

    def init(params):
        return jax.tree.map(lambda p: jnp.zeros(p.shape), params)

    def update(updates, state, params=None):
        state = jax.tree.map(jnp.add, state, updates)
        return state, state

    tx = optax.GradientTransformation(init, update)
    on = jm.on_mesh(tx, mesh_of(8), divide="data", min_size=1)
    state = on.init({"w": jnp.ones((16, 24))})
    _, after = jax.jit(on.update)(state, state)
    assert after["w"].sharding == state["w"].sharding
