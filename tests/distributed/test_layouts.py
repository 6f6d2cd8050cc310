"""Every layout: one device's results, arrays sharded as promised, and what is sent."""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_muon as jm
from tests.distributed import layouts, problems
from tests.distributed.layouts import AUTO, EXPLICIT, LAYOUTS, RECIPES, mesh_of, recipe
from tests.reading import reader

BOTH = pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=["auto", "explicit"])

# Float32: rounding alone, which this problem does not amplify.
BOUND = 5e-6


def assert_same_losses(got, want):
    """To the same bound of the largest: near zero they are sums of large terms."""
    np.testing.assert_allclose(got, want, rtol=0, atol=BOUND * np.abs(want).max())


# Every layout with one recipe, every recipe with two layouts, both kinds of axes.
TABLE = [
    *(("nanochat", where, AUTO) for where in LAYOUTS),
    *((name, "HSDP", AUTO) for name in RECIPES if name != "nanochat"),
    *((name, "FSDP x TP", EXPLICIT) for name in RECIPES),
    ("nanochat", "ZeRO-2 on 8", EXPLICIT),
    ("teon", "HSDP", EXPLICIT),
]


@pytest.mark.parametrize(("name", "where", "kind"), TABLE)
def test_equals_one_device(name, where, kind):
    start, expected, losses = layouts.one_device(name)
    result, _, got = layouts.train_on_mesh(name, where, kind=kind)
    assert problems.distance(result, expected, start) < BOUND
    assert_same_losses(got, losses)


@pytest.mark.parametrize("where", ["ZeRO-2 on 8", "HSDP"])
def test_float64_has_no_rounding_to_hide_behind(x64, where):
    start, expected, _ = layouts.one_device("nanochat", steps=5, dtype="float64")
    result, _, _ = layouts.train_on_mesh("nanochat", where, steps=5, dtype="float64")
    assert problems.distance(result, expected, start) < 1e-12


@BOTH
def test_an_eager_init_lies_as_a_jitted_one(kind):
    _, state, _ = layouts.train_on_mesh(
        "nanochat", "HSDP", kind=kind, steps=1, eager=True
    )
    _, jitted, _ = layouts.train_on_mesh("nanochat", "HSDP", kind=kind, steps=1)
    for one, other in zip(*map(jax.tree.leaves, (state, jitted)), strict=True):
        assert one.sharding == other.sharding


@st.composite
def placements(draw):
    """A mesh, mesh axes drawn onto each parameter's axes, and some left to divide."""
    shape = draw(st.sampled_from([(8,), (4, 2), (2, 2, 2)]))
    mesh = mesh_of(*shape)
    names = list(mesh.shape)
    divide = draw(st.sampled_from([(), *((name,) for name in names)]))
    specs = {}
    for path, leaf in problems.PROBLEMS["mixed"].items():
        entries = [()] * len(leaf)
        for name in draw(st.permutations([n for n in names if n not in divide])):
            axis = draw(st.integers(-1, len(leaf) - 1))
            devices = mesh.shape[name] * int(
                np.prod([mesh.shape[n] for n in entries[axis]])
            )
            if axis >= 0 and leaf[axis] % devices == 0:
                entries[axis] = (*entries[axis], name)
        entries = [e if len(e) > 1 else e[0] if e else None for e in entries]
        specs[path] = P(*entries)
    return shape, specs, divide


@BOTH
@given(drawn=placements(), name=st.sampled_from(list(RECIPES)))
@settings(max_examples=3, deadline=None, derandomize=True)
def test_any_placement(kind, drawn, name):
    shape, specs, divide = drawn
    mesh = mesh_of(*shape, kind=kind)
    start, expected, _ = layouts.one_device(name, steps=4)
    _, weights = problems.draw("mixed")
    tx = jm.on_mesh(recipe(name), mesh, specs, divide, min_size=1)
    params = layouts.place(start, mesh, specs.__getitem__)
    step = layouts.plain_step(tx, problems.loss_of(weights))
    with jax.set_mesh(mesh):
        state = jax.jit(tx.init)(params)
        for batch in problems.batches(4):
            params, state, _ = step(params, state, batch)
    assert problems.distance(params, expected, start) < BOUND


# --- around and inside other transforms -----------------------------------------------


def rates_injected(adamw=layouts.ADAMW):
    given = {"dtype": "float32", "adamw": adamw, "weight_decay": 0.0, "steps": 2}
    return optax.inject_hyperparams(jm.nanochat, static_args="steps")(**given)


COMPOSITIONS = {
    "inside a chain": lambda on, tx: optax.chain(
        optax.clip_by_global_norm(1.0), on(tx)
    ),
    "around a chain": lambda on, tx: on(
        optax.chain(optax.clip_by_global_norm(1.0), tx)
    ),
    "inside MultiSteps": lambda on, tx: optax.MultiSteps(on(tx), 2),
    "around MultiSteps": lambda on, tx: on(
        optax.MultiSteps(tx, 2).gradient_transformation()
    ),
    "around a guard": lambda on, tx: on(jm.skip_nonfinite(tx)),
    "around optax's guard": lambda on, tx: on(optax.apply_if_finite(tx, 3)),
    "around injected rates": lambda on, tx: on(rates_injected()),
}


@BOTH
@pytest.mark.parametrize("how", COMPOSITIONS)
def test_compositions_equal_one_device(how, kind):
    make = COMPOSITIONS[how]
    mesh, specs, divide = layouts.layout("HSDP", kind)
    params, weights = problems.draw("mixed")
    loss, data = problems.loss_of(weights), problems.batches(4)

    def on(tx):
        return jm.on_mesh(tx, mesh, specs, divide, min_size=1)

    expected, _, _ = problems.single_device(
        make(lambda tx: tx, recipe()), loss, params, data
    )
    tx = make(on, recipe())
    step = layouts.plain_step(tx, loss)
    with jax.set_mesh(mesh):
        got = layouts.place(params, mesh, specs)
        state = jax.jit(tx.init)(got)
        for batch in data:
            got, state, _ = step(got, state, batch)
    # MultiSteps's own sums are outside; on Auto axes JAX reshards them once.
    anew = how == "inside MultiSteps" and kind == AUTO
    assert step._cache_size() == 1 + anew
    assert problems.distance(got, expected, params) < BOUND


def test_injected_rates_change_without_a_new_program():
    """On Explicit axes without a wrapper, with a norm factor that is traced."""
    mesh, specs, _ = layouts.layout("FSDP", EXPLICIT)
    params, weights = problems.draw("mixed")
    tx = rates_injected(optax.inject_hyperparams(optax.adamw)(1e-3))
    step = layouts.plain_step(tx, problems.loss_of(weights))
    batch = problems.batches(1)[0]
    with jax.set_mesh(mesh):
        placed = layouts.place(params, mesh, specs)
        state = jax.jit(tx.init)(placed)
        placed, state, _ = step(placed, state, batch)
        before = layouts.copy(placed)
        of_adamw = state.inner_state.inner_states["adamw"].inner_state.hyperparams
        for name in ("learning_rate", "weight_decay"):
            of_adamw[name] = jnp.zeros_like(of_adamw[name])
        placed, state, _ = step(placed, state, batch)
    assert step._cache_size() == 1
    np.testing.assert_array_equal(placed["wte"], before["wte"])
    assert not np.array_equal(placed["h_0/q"], before["h_0/q"])


FOREIGN = {
    "adaptive_grad_clip": optax.adaptive_grad_clip(0.1),
    "scale_by_lbfgs": optax.scale_by_lbfgs(2),
    "prodigy": optax.contrib.prodigy(1.0, estim_lr0=1e-2),
    "dadapt_adamw": optax.contrib.dadapt_adamw(1.0, estim_lr0=1e-2),
}
if hasattr(optax.contrib, "scale_by_galore"):  # not in optax 0.2.6
    FOREIGN["scale_by_galore"] = optax.contrib.scale_by_galore(rank=4)


def assert_like_one_device(on, tx, steps=3):
    """Updates and state of a few steps on 8 devices, and their shardings."""
    rng = np.random.default_rng(0)
    shapes = {"w": (16, 24), "b": (16,)}

    def draw():
        return {k: rng.standard_normal(s).astype("float32") for k, s in shapes.items()}

    params = draw()
    ours, own = on.init(params), tx.init(params)
    places = jax.tree.map(lambda x: x.sharding, ours)
    for _ in range(steps):
        grads = draw()
        got, ours = jax.jit(on.update)(grads, ours, params)
        expected, own = jax.jit(tx.update)(grads, own, params)
        pairs = zip(*map(jax.tree.leaves, ((got, ours), (expected, own))), strict=True)
        for one, other in pairs:
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    assert jax.tree.map(lambda x: x.sharding, ours) == places


@pytest.mark.parametrize("name", FOREIGN)
def test_what_has_no_sharding_type_is_named_and_runs_on_auto_axes(name):
    mesh, tx = mesh_of(8), FOREIGN[name]
    params = {"w": jnp.ones((16, 24))}
    on = jm.on_mesh(tx, mesh, P("data"), min_size=1)
    with pytest.raises(ValueError, match=rf"^{name} inside .*on_auto_axes\({name}"):
        on.update(params, on.init(params), params)
    wrapped = jm.on_mesh(jm.on_auto_axes(tx), mesh, P("data"), min_size=1)
    assert_like_one_device(wrapped, tx)


@pytest.mark.parametrize("place", ["group", "chain"])
def test_auto_axes_beside_orthogonalization(place):
    def make(wrap):
        def muon(matrices):
            return jm.orthogonalize(jm.ExactPolar(), matrices=matrices, small=0)

        if place == "group":
            prodigy = FOREIGN["prodigy"]
            return jm.partition({"muon": muon, "adamw": wrap(prodigy)})
        tx = jm.partition({"muon": muon, "adamw": optax.sgd(0.1)})
        return optax.chain(wrap(optax.adaptive_grad_clip(0.1)), tx)

    on = jm.on_mesh(make(jm.on_auto_axes), mesh_of(8), P("data"), min_size=1)
    assert_like_one_device(on, make(lambda tx: tx))


def test_on_mesh_inside_injected_rates():
    """On Auto axes an error that says where it belongs, and never a wrong number."""
    params = {"w": jnp.ones((8, 8))}

    def make(learning_rate, mesh):
        return jm.on_mesh(jm.muon(learning_rate), mesh, divide="data")

    injected = optax.inject_hyperparams(make, static_args="mesh")
    tx = injected(learning_rate=0.1, mesh=mesh_of(8))
    state = jax.jit(tx.init)(params)
    with pytest.raises(ValueError, match=r"it inside: on_mesh\(optax.inject_hyperp"):
        jax.jit(tx.update)(params, state, params)
    # Types of Explicit axes are the same outside.
    mesh = mesh_of(8, kind=EXPLICIT)
    params = jax.device_put(params, NamedSharding(mesh, P()))
    tx = injected(learning_rate=0.1, mesh=mesh)
    with jax.set_mesh(mesh):
        state = jax.jit(tx.init)(params)
        for _ in range(2):
            updates, state = jax.jit(tx.update)(params, state, params)
    expected, _ = jm.muon(0.1).update(params, jm.muon(0.1).init(params), params)
    np.testing.assert_allclose(updates["w"], expected["w"], rtol=1e-2)


def test_gradients_of_an_update_eager_and_jitted():
    params = {"w": jnp.sin(jnp.arange(16.0 * 24)).reshape(16, 24)}
    plain = jm.muon(0.1, dtype="float32")

    def after(params, tx):
        updates, _ = tx.update(params, tx.init(params), params)
        return jnp.sum(jnp.sin(updates["w"]))

    on = jm.on_mesh(plain, mesh_of(8), divide="data", min_size=1)
    gradient = jax.grad(functools.partial(after, tx=on))
    expected = jax.grad(after)(params, plain)
    for found in (gradient(params), jax.jit(gradient)(params)):
        np.testing.assert_allclose(found["w"], expected["w"], rtol=1e-4, atol=1e-6)
    with jax.disable_jit():
        eager = on.update(params, on.init(params), params)
    jitted = on.update(params, on.init(params), params)
    for one, other in zip(*map(jax.tree.leaves, (eager, jitted)), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("divide", ["data", ()])
def test_a_trace_asks_no_tracer_for_its_sharding(monkeypatch, divide):
    """JAX reads the whole trace to say that there is none."""
    asked = []

    def sharding(self):
        asked.append(sys._getframe(1).f_globals["__name__"])
        raise AttributeError

    monkeypatch.setattr(jax.core.Tracer, "sharding", property(sharding))
    mesh = mesh_of(8)
    tx = jm.on_mesh(jm.muon(), mesh, divide=divide)

    def step(params):
        state = tx.init(params)
        jm.abstract_state(tx, params, mesh)
        jm.describe(tx, params)
        return tx.update(params, state, params)

    jax.eval_shape(step, {"w": jnp.ones((64, 64)), "b": jnp.ones(64)})
    assert not [name for name in asked if name.startswith("jax_muon")]


def test_boxes_none_and_empty_groups():
    """Leaves that are not there, a group without leaves, a tree of trees."""
    mesh = mesh_of(4)
    params = {"a": {"w": jnp.ones((8, 12)), "no": None}, "norm": [jnp.ones(4)]}
    tx = jm.on_mesh(
        jm.nanochat(groups={"unused": optax.sgd(1.0)}), mesh, None, "data", min_size=1
    )
    state = tx.init(params)
    updates, _ = jax.jit(tx.update)(params, state, params)
    expected, _ = jm.nanochat().update(params, jm.nanochat().init(params), params)
    assert jax.tree.structure(updates) == jax.tree.structure(params)
    for one, other in zip(*map(jax.tree.leaves, (updates, expected)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-2)  # in bfloat16


# --- how state is sharded -------------------------------------------------------------


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_state_of_gpt2_is_an_even_share(devices):
    """GPT-2 124M with an odd vocabulary: within 1 % of the whole over the devices."""
    width, layers = 768, 12
    block = dict.fromkeys(("q", "k", "v", "out"), (width, width))
    block |= {"up": (width, 4 * width), "down": (4 * width, width)}
    shapes = {
        "wte": (50257, width),
        **{f"{i}/{n}": shape for i in range(layers) for n, shape in block.items()},
        **{f"{i}/norm": (width,) for i in range(layers)},
    }
    params = {k: jax.ShapeDtypeStruct(v, "float32") for k, v in shapes.items()}
    alone = jm.describe(jm.nanochat(), params)
    tx = jm.on_mesh(jm.nanochat(), mesh_of(devices), divide="data")
    divided = jm.describe(tx, params)
    assert divided.state_bytes < 1.01 * alone.state_bytes / devices
    state = jm.abstract_state(tx, params, mesh_of(devices))
    local = [
        np.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x in jax.tree.leaves(state)
    ]
    assert divided.state_bytes == sum(local)


def test_state_lies_as_abstract_state_says():
    for where in ("ZeRO-2 on 8", "HSDP", "FSDP x TP"):
        mesh, specs, divide = layouts.layout(where)
        params, _ = problems.draw("mixed")
        tx = jm.on_mesh(recipe(), mesh, specs, divide, min_size=1)
        state = jax.jit(tx.init)(layouts.place(params, mesh, specs))
        for outer in (tx, optax.chain(optax.identity(), tx)):
            abstract = jm.abstract_state(outer, params, mesh)
            pairs = zip(*map(jax.tree.leaves, (state, abstract)), strict=True)
            for x, want in pairs:
                assert (x.shape, x.dtype) == (want.shape, want.dtype)
                assert x.sharding == want.sharding


# With state also divided over the replicas, it moves from anywhere to anywhere.
JOURNEY = ["ZeRO-2 on 8", "HSDP", "FSDP", None, "ZeRO-2 on 2"]


def test_a_checkpoint_travels(tmp_path):
    """ZeRO-2 on 8, HSDP 2 x 4, FSDP on 4, one device, ZeRO-2 on 2: exact resume."""
    start, expected, losses = layouts.one_device("nanochat", steps=10)
    _, weights = problems.draw("mixed")
    loss, data = problems.loss_of(weights), problems.batches(10)
    saved, got = None, []
    for leg, where in enumerate(JOURNEY):
        if where is None:
            mesh, tx = None, recipe()
            placed = copied = layouts.copy(start)
        else:
            mesh, specs, divide = layouts.layout(where)
            tx = jm.on_mesh(recipe(), mesh, specs, divide, min_size=1)
            copied = placed = layouts.place(start, mesh, specs)
        if saved is None:
            params, state = placed, tx.init(placed)
        else:
            target = {
                "params": jax.tree.map(
                    lambda x: jax.ShapeDtypeStruct(
                        x.shape, x.dtype, sharding=x.sharding
                    ),
                    copied,
                ),
                "opt_state": jm.abstract_state(tx, start, mesh),
            }
            with ocp.StandardCheckpointer() as checkpointer:
                restored = checkpointer.restore(saved, target)
            params, state = restored["params"], restored["opt_state"]
        step = layouts.plain_step(tx, loss)
        for batch in data[2 * leg : 2 * leg + 2]:
            params, state, value = step(params, state, batch)
            got.append(float(value))
        saved = tmp_path / str(leg)
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(saved, {"params": params, "opt_state": state})
    assert_same_losses(got, losses)
    assert problems.distance(params, expected, start) < BOUND


# --- errors ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("specs", "divide", "match"),
    [
        (P("model"), (), r"'w' of shape \(8, 12\) .*model.* axes of the mesh {'data'"),
        (P(None, "data"), (), r"'w' of shape \(8, 12\) .* size is 12 .* divide the"),
        (P(None, None, "data"), (), "at most 2 entries"),
        ({"typo": P("data")}, (), "nothing for parameter 'w'; there are typo"),
        ({"w": "data"}, (), "specs have 'data' for parameter 'w'; expected a Part"),
        (P("data"), "data", r"'w' .* is divided over \['data'\] already"),
    ],
)
def test_specs_that_do_not_fit(specs, divide, match):
    params = {"w": jax.ShapeDtypeStruct((8, 12), "float32")}
    with pytest.raises(ValueError, match=match):
        tx = jm.on_mesh(jm.nanochat(), mesh_of(8), specs, divide)
        jax.eval_shape(tx.init, params)


def test_divide_over_an_axis_that_the_mesh_has_not():
    with pytest.raises(ValueError, match=r"divide='model'; expected axes of the mesh"):
        jm.on_mesh(jm.nanochat(), mesh_of(8), divide="model")


def test_auto_axes_without_a_wrapper():
    mesh = mesh_of(8)
    params = jax.device_put({"w": jnp.ones((8, 8))}, NamedSharding(mesh, P("data")))
    tx = jm.nanochat()
    state = tx.init(params)
    for call in (tx.update, jax.jit(tx.update)):
        with pytest.raises(ValueError, match=r"'w' .* Auto axes.*jax_muon.on_mesh"):
            call(params, state, params)


def test_specs_against_explicit_types():
    mesh = mesh_of(8, kind=EXPLICIT)
    sharding = NamedSharding(mesh, P("data", None))
    params = jax.device_put({"w": jnp.ones((8, 8))}, sharding)
    tx = jm.on_mesh(jm.nanochat(), mesh, P(None, "data"))
    state = tx.init(params)
    with pytest.raises(ValueError, match=r"'w' has the type .*, and specs say"):
        tx.update(params, state, params)


def test_inside_the_users_own_shard_map():
    """Never block by block in silence."""
    tx = jm.orthogonalize()

    @functools.partial(
        jax.shard_map, mesh=mesh_of(8), in_specs=P("data"), out_specs=P("data")
    )
    def update(grads):
        return tx.update(grads, tx.init(grads))[0]

    with pytest.raises(ValueError, match=r"'w' differs .*\['data'\].*make_train_step"):
        update({"w": jnp.ones((32, 8))})


def test_state_of_something_else():
    params, _ = problems.draw("mixed")
    tx = jm.on_mesh(recipe(), mesh_of(4), divide="data")
    update = jax.jit(tx.update)
    with pytest.raises(
        ValueError, match=r"not one of this optimizer .* no array at .*/muon/"
    ):
        update(params, jm.muon().init(params), params)
    other = {**params, "wte": jnp.zeros((3, 24))}
    with pytest.raises(ValueError, match=r"wte.* \(3, 24\); expected \(67, 24\)"):
        update(params, recipe().init(other), params)


def test_state_of_another_mesh():
    """JAX says so, with the devices, before anything is lost."""
    params, _ = problems.draw("one matrix only")
    state = jm.on_mesh(recipe(), mesh_of(2), divide="data").init(params)
    mesh = mesh_of(4)
    tx = jm.on_mesh(recipe(), mesh, divide="data")
    placed = layouts.place(params, mesh, lambda path: P())
    with pytest.raises(ValueError, match="incompatible devices"):
        jax.jit(tx.update)(placed, state, placed)


# --- corners --------------------------------------------------------------------------


@BOTH
def test_mesh_axes_of_one_device(kind):
    """They divide nothing, whatever specs say; and nothing compiles twice."""
    mesh = mesh_of(8, 1, kind=kind)
    specs = {"a": P("fsdp", None), "b": P("data", None), "c": P("data", "fsdp")}
    rng = np.random.default_rng(0)
    start = {k: jnp.asarray(rng.standard_normal((32, 64)), jnp.float32) for k in specs}
    tx = jm.on_mesh(jm.muon(dtype="float32"), mesh, specs)
    placed = layouts.place(start, mesh, specs.__getitem__)
    updates, state = jax.jit(tx.update)(placed, jax.jit(tx.init)(placed), placed)
    plain = jm.muon(dtype="float32")
    expected, _ = plain.update(start, plain.init(start), start)
    for k, x in updates.items():
        np.testing.assert_allclose(x, expected[k], atol=1e-6)
    step = jm.make_train_step(
        lambda p, b: jnp.sum(p["a"]) * jnp.mean(b),
        tx=plain,
        mesh=mesh_of(8, 1),
        specs=P("fsdp"),
    )
    params, state = step.init({"a": start["a"]})
    for _ in range(3):
        params, state, _ = step(params, state, jnp.ones((8, 1)))
    assert step.cache_size() == 1


def test_what_does_not_travel_is_not_rounded():
    mesh = mesh_of(8)
    params = {"w": jnp.ones((8, 8)), "b": jnp.ones(3)}
    grads = jax.tree.map(lambda p: jnp.full_like(p, 1 / 3), params)
    tx = jm.on_mesh(
        optax.sgd(1.0), mesh, None, "data", min_size=1, gather_dtype="bfloat16"
    )
    updates, _ = tx.update(grads, tx.init(params), params)
    np.testing.assert_array_equal(updates["b"], np.float32(-1 / 3))
    assert np.all(updates["w"] != np.float32(-1 / 3))
    with pytest.raises(ValueError, match="gather_dtype='int8'; expected"):
        jm.on_mesh(optax.sgd(1.0), mesh, gather_dtype="int8")


def test_groups_of_matrices_find_different_owners():
    """Four groups of one matrix each, on eight devices."""
    mesh = mesh_of(8)
    params = {k: jax.ShapeDtypeStruct((512, 512), "float32") for k in "abcd"}

    def group(matrices):
        return jm.orthogonalize(matrices=matrices)

    tx = jm.partition(dict.fromkeys("abcd", group), reader({k: k for k in "abcd"}))
    planned = jm.describe(jm.on_mesh(tx, mesh, None, "data"), params)
    assert len(planned.pools) == 4
    flops = sum(pool.load(planned.sizes) for pool in planned.pools)
    assert sorted(flops) == [0] * 4 + [flops.max()] * 4


def test_split_parts_that_devices_do_not_divide_are_divided_elsewhere():
    """(72, 64) in 64 + 4 + 4 rows over eight devices: by columns."""
    params = {"qkv": jnp.ones((72, 64))}
    splits = {"qkv": jm.Split({"q": 64, "k": 4, "v": 4}, axis=0)}
    tx = jm.on_mesh(
        jm.nanochat(matrices=reader(splits=splits)), mesh_of(8), None, "data"
    )
    for leaf in jax.tree.leaves(tx.init(params)):
        assert leaf.ndim < 2 or any(leaf.sharding.spec) or 1 in leaf.shape
    planned = jm.describe(tx, params)
    assert planned.sent_bytes["gathers"] > 0
    assert not any(leaf.repeated for leaf in planned.parameters)


def test_multi_steps_keeps_extra_arguments():
    def update(updates, state, params=None, *, value):
        return jax.tree.map(lambda u: u * value, updates), state

    inner = optax.GradientTransformationExtraArgs(optax.init_empty_state, update)
    params = {"w": jnp.ones(4)}
    tx = jm.on_mesh(optax.MultiSteps(inner, 1), mesh_of(4))
    updates, _ = tx.update(params, tx.init(params), params, value=jnp.float32(3))
    np.testing.assert_array_equal(updates["w"], 3)


def test_trees_without_arrays():
    tx = jm.on_mesh(optax.sgd(1.0), mesh_of(4))
    assert tx.update({}, tx.init({}), {})[0] == {}


def test_refusals():
    mixed = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AUTO, EXPLICIT))
    with pytest.raises(ValueError, match="expected Auto for all, or Explicit for all"):
        jm.on_mesh(optax.sgd(1.0), mixed)
    mesh = mesh_of(8)
    divided = jax.device_put({"w": jnp.ones((8, 8))}, NamedSharding(mesh, P("data")))
    with pytest.raises(ValueError, match=r"'w' is sharded .* expected specs"):
        jm.on_mesh(optax.sgd(1.0), mesh).init(divided)
    with pytest.raises(ValueError, match=r"axes of the mesh, .* each once"):
        jm.on_mesh(optax.sgd(1.0), mesh, divide=("data", "data"))
    with pytest.raises(ValueError, match="min_size=-5"):
        jm.on_mesh(optax.sgd(1.0), mesh, min_size=-5)
    with pytest.raises(ValueError, match="expected an optax transform"):
        jm.on_mesh("adam", mesh)


@pytest.mark.parametrize("piece", ["orthogonalize", "guard"])
def test_what_differs_between_devices_is_refused(piece):
    """Where JAX tracks it, and where it does not."""
    tx = (
        jm.orthogonalize()
        if piece == "orthogonalize"
        else jm.skip_nonfinite(optax.sgd(1.0))
    )

    def update(grads):
        return tx.update(grads, tx.init(grads))[0]

    def run(**given):
        return jax.shard_map(
            update, mesh=mesh_of(8), in_specs=P("data"), out_specs=P("data"), **given
        )({"w": jnp.ones((32, 8))})

    with pytest.raises(ValueError, match=r"'w' differs"):
        run()
    with pytest.raises(ValueError, match=r"or in shard_map with check_vma=True"):
        run(check_vma=False)
    with pytest.raises(ValueError, match=r"inside jax.pmap, .*make_train_step"):
        jax.pmap(update)({"w": jnp.ones((8, 4, 8))})
