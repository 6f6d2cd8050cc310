"""Every layout gives one device's results."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_muon as jm
from jax_muon.tools.verify import compare
from tests import trees
from tests.matrices import toy
from tests.mesh import case
from tests.mesh.case import AUTO, EXPLICIT, make_step, mesh_of, recipe
from tests.recipes import RECIPES


def inside(tx):
    """What may be around `on_mesh`; what may be inside is a feature of the fuzz."""
    tx = jm.skip_nonfinite(optax.chain(optax.clip_by_global_norm(1.0), tx))
    return optax.MultiSteps(tx, 2).gradient_transformation()


ON_MESH = [
    *((where, {}) for where in case.LAYOUTS),
    ("ZeRO-2 on 8", {"kind": EXPLICIT}),
    ("FSDP x TP", {"kind": EXPLICIT}),
    ("HSDP", {"around": inside}),
    ("HSDP", {"around": inside, "kind": EXPLICIT}),
]


def on_mesh(where, kind=AUTO, around=lambda tx: tx, dtype="float32", tx=None):
    """Four updates of "mixed" and the state after each, compared with one device."""
    layout = case.layout(where, kind)
    params, weights = jax.tree.map(np.asarray, case.draw("mixed", dtype))
    # Another sample's gradients for each step: whole numbers, whose sums are exact.
    grads = [
        {path: np.round(9 * x[i]) for path, x in weights.items()} for i in range(4)
    ]
    place = functools.partial(NamedSharding, layout.mesh)
    places = jax.tree.map(place, layout.specs(params))
    tx = tx or recipe(dtype=dtype)
    return compare(around(tx), around(layout.on(tx)), [(params, grads)], places)


@pytest.mark.parametrize(("where", "given"), ON_MESH)
def test_on_mesh(where, given):
    case.assert_close(on_mesh(where, **given))


def test_on_mesh_in_float64(x64):
    """Float64 has no rounding to hide behind."""
    case.assert_close(on_mesh("ZeRO-2 x FSDP x TP", dtype="float64"), 1e-12)


@pytest.mark.parametrize(
    ("dtype", "where", "kind"),
    [
        # Rows whole and divided, over the axis of a stack, divided over replicas.
        ("int8", "HSDP", AUTO),
        ("int8", "columns of FSDP", EXPLICIT),
        ("bfloat16", "FSDP x TP", AUTO),
    ],
)
def test_narrow_momentum_is_that_of_one_device_bit_for_bit(dtype, where, kind):
    tx = jm.scale_by_momentum(0.5, mu_dtype=dtype)
    found = on_mesh(where, kind, tx=tx)
    assert {apart for apart, _ in found.differences.values()} == {0}, found
    if dtype == "int8":  # rows are with their scales
        layout = case.layout(where, kind)
        placed = layout.place(case.draw("mixed")[0])
        state = layout.on(tx).abstract_state(placed)
        for x, scale in zip(*map(jax.tree.leaves, state[1:]), strict=True):
            rows, scales = (y.sharding.shard_shape(y.shape) for y in (x, scale))
            assert rows[:-1] == scales[:-1]


STEPS = {
    "ZeRO-2": ("ZeRO-2 on 8", {}),
    "two axes, gathered first": ("ZeRO-2 over two axes", {"divided": True}),
    "FSDP, Explicit": ("FSDP", {"kind": EXPLICIT}),
    "HSDP, microbatches": ("HSDP", {"microbatches": 2}),
    # Shapes that nothing divides, and no matrix at all.
    "one matrix only": ("ZeRO-2 on 8", {"problem": "one matrix only"}),
    "no matrices": ("ZeRO-2 on 8", {"problem": "no matrices"}),
}


@pytest.mark.filterwarnings("ignore:no parameter is a matrix")
@pytest.mark.parametrize("form", STEPS)
def test_train_steps(form):
    where, given = STEPS[form]
    expected = case.one_device(given.get("problem", "mixed"))
    step = make_step(where, **given)
    result, _, values = case.train_step_run(step, expected[0], case.batches(5))
    case.assert_same(result, values, expected)


@pytest.mark.parametrize("shape", [(400, 256), (256, 400), (300, 256)], ids=str)
@pytest.mark.parametrize("spec", [P("fsdp", "tp"), P(None, ("fsdp", "tp"))], ids=str)
def test_one_order_of_sums(rng, shape, spec):
    """Ill-conditioned tall matrices show by 3e-5 where sums have another order."""
    u, _, vt = np.linalg.svd(rng.standard_normal(shape), full_matrices=False)
    x = jnp.asarray((u / np.arange(1, 257)) @ vt, "float32")
    tx = jm.orthogonalize(jm.PolarExpress(dtype="float32"))
    update = jax.jit(lambda x: tx.update(x, tx.init(x))[0])
    mesh = mesh_of(1, 4, 2, kind=EXPLICIT)
    with jax.set_mesh(mesh):
        found = update(jax.device_put(x, NamedSharding(mesh, spec)))
    assert trees.distance(np.asarray(found), np.asarray(update(x))) < 1e-5


# --- weighted means -------------------------------------------------------------------


@pytest.mark.parametrize("weighted", [False, True])
def test_losses_with_a_collective(weighted, x64, as_users_write):
    """Gradients of samples on a device of weight 0 come from the losses of others."""

    def alone(params, x):
        return jnp.mean(jnp.sin(x * params["scale"]))

    def loss(params, x):
        mean = jax.lax.pmean(alone(params, x), "data")
        weight = jnp.where(jax.lax.axis_index("data") == 3, 0, 4)
        return (mean, weight) if weighted else mean

    args = case.drawn()
    found = case.gradients(case.sgd_step(loss, weighted=weighted), *args)
    case.assert_gradients(found, alone, args)


HALF = jnp.float16(2e4)  # four of them are infinite
WEIGHTS = {
    # Mean losses of four devices, their weights, and the mean of all. 2/3 of a
    # bfloat16 would be 0.66797.
    "bfloat16": ([3, 1, 1, 1], [3, 1, 1, 1], 2, "bfloat16"),
    "float16": ([HALF] * 4, [1e5] * 4, HALF, "float16"),
    "mean of no samples": ([np.nan, 2, 1, 1], [0, 3, 1, 2], 1.5, "float32"),
    "nothing counts": ([3, 1, 1, 1], [0] * 4, 0, "float32"),
    "one below zero": ([3, 1, 1, 1], [1, 2, 3, -1], np.nan, "float32"),
    "microbatches": (
        [3, 1, 1, np.nan, 1, 1, 1, 1],
        [3, 2, 1, 0, 3, 2, 1, 0],
        1.5,
        "float32",
    ),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_weights(name):
    """Weights are not rounded, do not overflow, may all be 0; one below 0 gives NaN."""
    means, weights, expected, dtype = WEIGHTS[name]

    def loss(params, batch):
        mean, weight = batch
        mean = mean[0].astype(dtype)
        return jnp.sum(params["w"] * mean).astype(dtype) + mean, weight[0]

    params = {"w": jnp.zeros((4, 8), "float16" if name == "float16" else "float32")}
    batch = jnp.asarray(means, "float32"), jnp.asarray(weights, float)
    given = {"specs": None, "microbatches": len(means) // 4}
    step = make_step(tx=optax.sgd(1.0), loss=loss, weighted=True, **given)
    after, _, metrics = step(*step.init(params), batch)
    np.testing.assert_allclose(after["w"], -expected, rtol=1e-6)
    np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-6)


# --- what else a step hands on --------------------------------------------------------


def remembering():
    """An optimizer whose state is the sum of what updates got besides gradients."""

    def update(updates, state, params=None, **extra_args):
        return updates, jax.tree.map(jnp.add, state, extra_args)

    start = {"value": jnp.zeros(()), "largest": jnp.zeros(case.FEATURES)}
    return optax.GradientTransformationExtraArgs(lambda params: start, update)


@pytest.mark.parametrize(("microbatches", "kind"), [(1, EXPLICIT), (2, AUTO)])
def test_auxiliary_outputs(microbatches, kind):
    """Means or maxima of all samples; the optimizer gets the loss and the maxima.

    The sums of two True, 100 and 60000 are True, -56 and infinite. A batch may have
    arrays of no elements, whose shape -1 cannot stand for.
    """
    params, weights = case.draw("one matrix only")
    plain, batch = case.loss_of(weights), case.batches(1)[0]
    alike = {"flag": True, "int8": np.int8(100), "float16": np.float16(60000)}

    def loss(params, batch):
        x, aux = batch["x"], jax.tree.map(jnp.asarray, alike)
        aux |= {"mean": jnp.mean(x), "largest": jnp.max(x, axis=0)}
        return plain(params, x) + jnp.sum(batch["none"]), aux

    given = {"has_aux": True, "max_aux": "largest", "microbatches": microbatches}
    step = make_step(tx=remembering(), loss=loss, kind=kind, **given)
    whole = {"x": batch, "none": jnp.zeros((len(batch), 0))}
    _, seen, metrics = step(*step.init(params), whole)
    expected = plain(params, batch), jnp.mean(batch), jnp.max(batch, axis=0)
    found = metrics["aux"]
    means = metrics["loss"], found.pop("mean"), found.pop("largest")
    chex.assert_trees_all_close(means, expected, rtol=1e-5)
    chex.assert_trees_all_equal(seen, {"value": means[0], "largest": means[2]})
    assert found == alike


WIDTH, CLASSES = 24, 8


def net(params, x, normed=lambda y: y):
    return jnp.tanh(normed(x @ params["up"])) @ params["head"]


def dropping(params, batch):
    x, labels, keys = batch
    keep = jax.vmap(lambda key: jax.random.bernoulli(key, 0.5, x.shape[1:]))(keys)
    return jnp.mean((net(params, jnp.where(keep, 2 * x, 0))[:, 0] - labels) ** 2), {}


def weighing(params, batch, weights, teacher):
    x, labels = batch
    apart = optax.squared_error(net(params, x), net(teacher, x))
    log = jax.nn.log_softmax(net(params, x))
    own = jnp.take_along_axis(log, labels[:, None], 1)[:, 0]
    return jnp.mean(apart) - jnp.mean(own * weights[labels]), {}


def normalizing(params, batch, stats, axes=("data",)):
    """Batch normalization over all devices, as Flax's with `axis_name`."""
    x, labels = batch
    seen = {}

    def normed(y):
        mean, square = (jax.lax.pmean(jnp.mean(z, 0), axes) for z in (y, y * y))
        seen.update(mean=0.9 * stats["mean"] + 0.1 * mean)
        return (y - mean) / jnp.sqrt(square - mean**2 + 1e-5)

    return jnp.mean((net(params, x, normed)[:, 0] - labels) ** 2), seen


@pytest.mark.parametrize("loss", [dropping, weighing, normalizing])
@pytest.mark.parametrize(("shape", "kind"), [((4,), AUTO), ((8,), EXPLICIT)])
def test_what_a_loss_needs_besides_samples(loss, shape, kind, rng, x64, as_users_write):
    """Keys of samples, and what is everywhere; a reading binds the names of axes."""
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape)) / 8  # noqa: E731
    params = {"up": draw(8, WIDTH), "head": draw(WIDTH, CLASSES)}
    batch, others = (draw(16, 8), jnp.asarray(rng.integers(0, CLASSES, 16))), ()
    if loss is dropping:
        batch = *batch, jax.random.split(jax.random.key(0), 16)
    if loss is weighing:
        others = jnp.linspace(0.5, 2, CLASSES), jax.tree.map(jnp.cos, params)
    if loss is normalizing:
        others = ({"mean": draw(WIDTH)},)
    matrices = jm.find_matrices(params, loss, batch, *others)
    assert [matrices[name].role for name in params] == ["kernel", "head"]
    alone = functools.partial(loss, axes=()) if loss is normalizing else loss
    gradient = jax.jit(jax.value_and_grad(alone, has_aux=True))
    (value, aux), expected = gradient(params, batch, *others)
    tx = jm.on_mesh(optax.sgd(1.0), mesh_of(*shape, kind=kind), divide="data")
    step = jm.make_train_step(loss, tx, has_aux=True, donate=False)
    placed, state = step.init(params)
    after, _, metrics = step(placed, state, batch, *others)
    found = jax.tree.map(lambda p, q: np.asarray(p) - np.asarray(q), params, after)
    for one, other in ((found, expected), (metrics, {"loss": value, "aux": aux})):
        chex.assert_trees_all_close(one, other, rtol=1e-15, atol=4e-15)
    assert step._jitted._cache_size() == 1


def test_integers_among_the_parameters_stay_as_they_are():
    """AdamW's decay would move them."""
    params = {"w": jnp.eye(8, 16), "count": jnp.asarray(3), "mask": jnp.eye(8) > 0}

    def loss(params, batch):
        y = batch @ jnp.where(params["mask"], 1, 0.5) @ params["w"]
        return jnp.mean(y**2) * params["count"]

    batch = jnp.asarray(np.random.default_rng(5).standard_normal((8, 8)))
    tx = optax.adamw(0.1, weight_decay=1.0)
    step = jm.make_train_step(
        loss, jm.on_mesh(tx, mesh_of(4), divide="data"), donate=False
    )
    after, _, _ = step(*step.init(params), batch)
    assert (after["w"] != params["w"]).any()
    np.testing.assert_array_equal(after["count"], 3)
    np.testing.assert_array_equal(after["mask"], params["mask"])


# --- other transforms, and other ways to call -----------------------------------------

PARAMS = {"w": jnp.ones((16, 24)), "v": jnp.ones((16, 24)), "b": jnp.ones(16)}
FOREIGN = {
    "adaptive_grad_clip": optax.adaptive_grad_clip(0.1),
    "scale_by_lbfgs": optax.scale_by_lbfgs(2),
    "prodigy": optax.contrib.prodigy(1.0, estim_lr0=1e-2),
    "dadapt_adamw": optax.contrib.dadapt_adamw(1.0, estim_lr0=1e-2),
}
if hasattr(optax.contrib, "scale_by_galore"):  # not in optax 0.2.6
    FOREIGN["scale_by_galore"] = optax.contrib.scale_by_galore(rank=4)


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
@pytest.mark.parametrize("name", FOREIGN)
def test_transforms_of_optax(name, kind):
    """Alone, and in a group beside one that orthogonalizes."""
    muon = jm.orthogonalize(jm.ExactPolar(), small=0)
    mesh = mesh_of(8, kind=kind)
    params = case.put(PARAMS, P("data"), mesh)
    on = functools.partial(jm.on_mesh, where=case.at(mesh, P("data")))
    case.assert_verified(on(FOREIGN[name]), params)
    groups = {"muon": muon, "adamw": FOREIGN[name]}
    labels = {"v": "muon", "w": "adamw", "b": "adamw"}
    case.assert_verified(on(optax.multi_transform(groups, labels)), params)


def test_a_transform_that_shows_others_another_shape():
    """Five of 16 rows, which eight devices do not divide."""
    inner = jm.orthogonalize(jm.ExactPolar(), small=0)

    def update(updates, state, params=None):
        rows = jax.tree.map(lambda g: g[:5], updates)
        rows, state = inner.update(rows, state)
        return jax.tree.map(lambda g, x: g.at[:5].set(x), updates, rows), state

    tx = optax.GradientTransformation(inner.init, update)
    params = {"w": PARAMS["w"], "v": PARAMS["v"]}
    where = case.at(mesh_of(8), P("data"))
    case.assert_verified(jm.on_mesh(tx, where), params)


def test_gradients_of_an_update_eager_and_jitted():
    params = {"w": jnp.sin(jnp.arange(16.0 * 24)).reshape(16, 24)}
    plain = RECIPES["muon"](
        learning_rate=0.1, dtype="float32", ns_steps=2, matrices=toy
    )
    on = jm.on_mesh(plain, mesh_of(8), divide="data", min_size=1)

    def update(params, tx=on):
        return tx.update(params, tx.init(params), params)[0]

    total = lambda *args: jnp.sum(jnp.sin(update(*args)["w"]))  # noqa: E731
    expected = jax.jit(jax.grad(lambda params: total(params, plain)))(params)
    for gradient in (jax.grad(total), jax.jit(jax.grad(total))):
        chex.assert_trees_all_close(gradient(params), expected, rtol=1e-4, atol=1e-6)
    with jax.disable_jit():
        eager = update(params)
    chex.assert_trees_all_equal(eager, update(params))


@pytest.mark.parametrize("devices", [1, 8])
def test_replicas_in_pmap(devices):
    """On one device nothing need be said; on eight `on_replicas` says it."""
    params, weights = case.draw("mixed")
    grads = {path: x[0] for path, x in weights.items()}
    tx = jm.skip_nonfinite(optax.chain(optax.clip_by_global_norm(1e9), recipe()))
    state = tx.init(params)
    expected = jax.jit(tx.update)(grads, state, params)
    update = jax.pmap((jm.on_replicas(tx) if devices > 1 else tx).update)
    found = update(
        *jax.tree.map(
            lambda x: jnp.broadcast_to(x, (devices, *x.shape)), (grads, state, params)
        )
    )
    for device in range(devices):
        of_device = jax.tree.map(lambda x, device=device: x[device], found)
        chex.assert_trees_all_close(of_device, expected, rtol=1e-5, atol=1e-6)


def test_leaves_that_are_not_there():
    """None, a group without leaves, a tree of trees, and one without arrays.

    The matrix has a weak type, which a cast would strip.
    """
    params = {"a": {"w": jnp.full((8, 12), 0.5), "no": None}, "b": [jnp.ones((4, 8))]}
    plain = RECIPES["nanochat"](dtype="float32")
    tx = jm.on_mesh(plain, mesh_of(4), divide="data", min_size=1)
    case.assert_verified(tx, params)
    updates, _ = tx.update(params, tx.init(params), params)
    assert updates["a"]["w"].dtype == "float32"
    assert tx.update({}, tx.init({}), {})[0] == {}


def test_other_arguments_of_an_update_reach_every_transform():
    """Arrays, Python floats, and in jit what is no array."""

    def update(updates, state, params=None, *, value, how):
        return jax.tree.map(lambda u: u * value[how], updates), state

    inner = optax.GradientTransformationExtraArgs(optax.init_empty_state, update)
    params = {"w": jnp.ones(8)}
    for tx in (optax.MultiSteps(inner, 1), inner):
        on = jm.on_mesh(tx, mesh_of(8), divide="data", min_size=1)
        for value in ({"by": 3.0}, {"by": jnp.float32(3)}):
            scaled = jax.jit(functools.partial(on.update, value=value, how="by"))
            updates, _ = scaled(params, on.init(params), params)
            np.testing.assert_array_equal(updates["w"], 3)


def test_on_mesh_inside_injected_rates():
    """The rate is an array that the optimizer closes over."""

    def make(learning_rate, mesh=None):
        tx = RECIPES["muon"](
            learning_rate=learning_rate, dtype="float32", ns_steps=2, matrices=toy
        )
        return tx if mesh is None else jm.on_mesh(tx, mesh, divide="data")

    def found(kind):
        mesh = mesh_of(8, kind=kind)
        injected = optax.inject_hyperparams(make, static_args="mesh")
        alone, many = (injected(learning_rate=0.1, mesh=x) for x in (None, mesh))
        params = {"w": np.sin(np.arange(64, dtype="float32")).reshape(8, 8)}
        where = {"w": NamedSharding(mesh, P())}
        with jax.set_mesh(mesh):
            return compare(alone, many, [(params, [params])], where)

    case.assert_close(found(AUTO))
    with pytest.raises(
        ValueError, match=r"(?s)no argument of its update.*use on_mesh\(optax.inject"
    ):
        found(EXPLICIT)


@pytest.mark.parametrize("rows", [NamedSharding(mesh_of(8), P("data")), P("data")])
def test_a_loss_for_auto_axes_is_read_inside_on_mesh(rows):
    """Lookups and constraints that JAX refuses on the Explicit axes of `on_mesh`."""
    sizes = {"embed": (64, 32), "up": (32, 64), "head": (64, 24)}
    params = {name: jnp.ones(shape) for name, shape in sizes.items()}
    seen, mesh = [], mesh_of(8)

    def loss(params, tokens):
        x = jax.lax.with_sharding_constraint(params["embed"][tokens], rows)
        return jnp.mean(jax.nn.relu(x @ params["up"]) @ params["head"])

    def matrices(shapes):
        seen.extend(jax.tree.leaves(shapes))
        return jm.find_matrices(shapes, loss, jax.ShapeDtypeStruct((8, 4), jnp.int32))

    tx = RECIPES["nanochat"](matrices=matrices, dtype="float32")
    alone = RECIPES["nanochat"](matrices={"up": "muon", "*": "adamw"}, dtype="float32")
    expected, _ = alone.update(params, alone.init(params), params)
    with jax.set_mesh(mesh):
        sharded = jm.on_mesh(tx, case.at(mesh, P("data")), divide="data")
        state = jax.jit(sharded.init)(params)
        updates, _ = jax.jit(sharded.update)(params, state, params)
    assert all(isinstance(x, jax.ShapeDtypeStruct) for x in seen)
    for name, update in updates.items():
        np.testing.assert_allclose(update, expected[name], atol=1e-6)


@pytest.mark.parametrize("devices", [3, 6])
def test_joins_along_sharded_layers(devices):
    """Each device has whole pairs of layers, or else all layers."""
    matrices = functools.partial(toy, joins={"scan/mlp": 2})
    tx = RECIPES["teon"](
        learning_rate=0.1, dtype="float32", ns_steps=2, matrices=matrices
    )
    params = {"scan/mlp": jnp.ones((6, 8, 16))}
    on = jm.on_mesh(tx, case.at(mesh_of(devices), P("data")))
    case.assert_verified(on, params)


# --- QK-clip --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kernel", "bias", "apart"),
    [
        # The key's four heads on eight devices: each has half a head.
        (P(None, ("a", "b")), P(("a", "b")), False),
        (P(None, "a", "b"), P("a", "b"), True),  # (embed, heads, head_dim)
        (P("a", "b"), P("b"), False),
        (P(("a", "b"), None), P(), True),
    ],
    ids=["heads", "heads apart", "both", "embed"],
)
def test_clip_qk(kernel, bias, apart):
    shapes, specs = {}, {}
    for name, heads in {"q": 8, "k": 4, "v": 8}.items():
        out = (heads, 4) if apart else (heads * 4,)
        shapes[name] = {"kernel": (16, *out), "bias": out}
        specs[name] = {"kernel": kernel, "bias": bias}
    mesh = mesh_of(4, 2, names=("a", "b"))
    tx = jm.on_mesh(jm.clip_qk(4.2), case.at(mesh, {"0": {"attn": specs}}))
    largest = {"0": jnp.asarray(4.2 * np.array([1, 5, 0.5, 1, 9, 2, 0.1, 1.1]))}
    params = trees.normal({"0": {"attn": shapes}})
    case.assert_verified(tx, params, max_logits=largest)


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
def test_max_attention_logits(kind):
    mesh = mesh_of(4, 2, names=("a", "b"), kind=kind)
    q, k = trees.normal([(4, 12, heads, 5) for heads in (8, 4)])
    measure = functools.partial(jm.max_attention_logits, causal=True)
    expected = measure(q, k, block_size=5)
    sharding = NamedSharding(mesh, P("a", None, "b"))
    with jax.set_mesh(mesh):
        got = jax.jit(measure, static_argnames="block_size")(
            *jax.device_put((q, k), sharding), block_size=5
        )
    np.testing.assert_allclose(got, expected, rtol=1e-6)


@pytest.mark.parametrize("key", [jax.random.key(0), jax.random.PRNGKey(0)])
def test_a_key_for_all_devices_is_a_warning(key):
    """They would draw the same masks for other samples."""

    def loss(params, x, key):
        keep = jax.random.bernoulli(key, 0.5, x.shape)
        return jnp.mean(jnp.where(keep, x, 0) @ params["w"])

    tx = jm.on_mesh(optax.sgd(0.1), mesh_of(4))
    step = jm.make_train_step(loss, tx)
    args = *step.init({"w": jnp.ones((8, 2))}), jnp.ones((8, 8)), key
    with pytest.warns(UserWarning, match="use one key per sample in the batch"):
        step(*args)
