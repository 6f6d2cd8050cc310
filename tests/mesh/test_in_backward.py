"""Layers updated inside the backward pass: the same numbers, in less room."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jax_muon as jm
from jax_muon import jaxprs
from tests.mesh import losses, models
from tests.mesh.layouts import AUTO, EXPLICIT, mesh_of

F64 = {"dtype": "float64"}


def step_of(loss, tx, update="in backward", kind=EXPLICIT, shape=(1,), **given):
    mesh = mesh_of(*shape, kind=kind)
    given = {"axis": mesh.axis_names} | given
    return jm.make_train_step(loss, tx, mesh, update=update, **given)


def run(loss, tx, params, batch, update, steps=3, **given):
    step = step_of(loss, tx, update, **given)
    params, state = step.init(params)
    for _ in range(steps):
        params, state, metrics = step(params, state, batch)
    return params, state, metrics


def assert_equal_steps(loss, tx, params, batch, atol=1e-13, **given):
    """Parameters of size 1 in float64, after steps of 0.02."""
    expected, found = (
        run(loss, tx, params, batch, update, **given)
        for update in ("after backward", "in backward")
    )
    chex.assert_trees_all_equal_shapes_and_dtypes(found, expected)
    chex.assert_trees_all_close(found, expected, rtol=0, atol=atol)


def model(dtype="float64", layers=6, width=8):
    keys = iter(jax.random.split(jax.random.key(0), 9))

    def draw(*shape):
        return jax.random.normal(next(keys), shape, dtype) / shape[-2] ** 0.5

    params = {
        "embed": draw(16, width),
        "layers": {
            "qkv": draw(layers, width, 3 * width),
            "up": draw(layers, width, 4 * width),
            "down": draw(layers, 4 * width, width),
            "scale": jnp.ones((layers, width), dtype),
        },
        "head": draw(width, 16),
    }
    return params, jax.random.randint(next(keys), (8,), 0, 16)


def block(x, layer):
    x = x * layer["scale"][None].astype(x.dtype)
    q, k, v = jnp.split(x @ layer["qkv"].astype(x.dtype), 3, axis=-1)
    x = x + jax.nn.softmax(q @ k.T) @ v
    return x + jax.nn.relu(x @ layer["up"].astype(x.dtype)) @ layer["down"], None


def loss(params, batch, block=block):
    x, _ = jax.lax.scan(jax.checkpoint(block), params["embed"][batch], params["layers"])
    logits = x @ params["head"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch).mean()


def reading(**given):
    return jm.read(
        *map(jax.eval_shape, [lambda: model()[0]]), loss, model()[1], **given
    )


OPTIMIZERS = {
    "nanochat": lambda m: jm.nanochat(matrices=m, **F64),
    "muon": lambda m: jm.muon(matrices=m, weight_decay=0.1, **F64),
    "moonlight": lambda m: jm.moonlight(0.02, matrices=m, **F64),
    "muonh": lambda m: jm.muonh(matrices=m, **F64),
    "normuon": lambda m: jm.normuon(matrices=m, **F64),
    "schedule": lambda m: jm.nanochat(
        optax.linear_schedule(0.02, 0, 3), matrices=m, **F64
    ),
    "in a chain": lambda m: optax.chain(jm.nanochat(matrices=m, **F64), optax.ema(0.9)),
    "every second step": lambda m: optax.MultiSteps(jm.muon(matrices=m, **F64), 2),
    "adamw": lambda m: optax.adamw(0.02),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_equals_the_ordinary_step(x64, name):
    params, batch = model()
    assert_equal_steps(loss, OPTIMIZERS[name](reading()), params, batch)


def test_parts_of_a_layer(x64):
    params, batch = model()
    matrices = reading(splits={"layers/qkv": jm.Split(("q", "k", "v"), axis=2)})
    assert_equal_steps(loss, jm.nanochat(matrices=matrices, **F64), params, batch)


def test_auxiliary_output_and_axes_of_either_kind(x64):
    params, batch = model()

    def with_aux(params, batch):
        return loss(params, batch), {"tokens": jnp.sum(batch)}

    for kind in (AUTO, EXPLICIT):
        tx = jm.muon(matrices=reading(), **F64)
        assert_equal_steps(with_aux, tx, params, batch, kind=kind, has_aux=True)


NO_SCAN, BESIDE = "has no scan", "used beside the scan"
REFUSED = {
    "python_loop": NO_SCAN,
    "chunked_cross_entropy": NO_SCAN,
    "while_loop": NO_SCAN,
    "fori_loop": NO_SCAN,
    "ends_in_pmean": NO_SCAN,
    "ends_in_psum": NO_SCAN,
    "marks_of_vma": NO_SCAN,
    "of_scans": BESIDE,
    "of_scans_of_others": BESIDE,
    "of_two_layers_at_once": NO_SCAN,
    "no_scan_but_dynamic_slices": NO_SCAN,
    "with_a_gradient_of_its_own": BESIDE,
    "after_the_first_layer": BESIDE,
    "with_memory_of_the_loss": NO_SCAN,
}


@pytest.mark.parametrize("devices", [1, 4])
@pytest.mark.parametrize("name", losses.LOSSES)
def test_losses_as_models_write_them(x64, as_users_write, name, devices):
    loss = losses.LOSSES[name][1]
    params, batch = losses.draw("float64"), losses.samples(dtype="float64")
    tx = jm.muon(matrices=jm.read(params, loss, batch), **F64)
    given = {"shape": (devices,), "parameters": "divided", "min_size": 1}
    given["kind"] = AUTO  # on Explicit axes JAX cannot lower the callbacks
    if name in REFUSED:
        with pytest.raises(ValueError, match=REFUSED[name]):
            run(loss, tx, params, batch, "in backward", **given)
    else:
        assert_equal_steps(loss, tx, params, batch, atol=1e-12, **given)


def test_a_linen_scan(x64):
    params, loss, batch = models.linen("float64")
    matrices = jm.read(params, loss, batch)
    assert_equal_steps(loss, jm.nanochat(matrices=matrices, **F64), params, batch)


# Parameters whole, in parts of layers, repeated on two hosts, and some of them small.
SPECS = {
    "layers": {
        "qkv": P(None, None, "fsdp"),
        "up": P(None, "fsdp"),
        "down": P(None, None, "fsdp"),
        "scale": P(),
    },
    "embed": P(None, "fsdp"),
    "head": P("fsdp"),
}
LAYOUTS = {
    "two": {"shape": (2,), "parameters": "divided", "min_size": 1},
    "four": {"shape": (4,), "parameters": "divided", "min_size": 500, "kind": AUTO},
    "eight": {"shape": (8,), "parameters": "divided", "min_size": 1, "kind": AUTO},
    "replicated": {"shape": (4,), "min_size": 1},
    "specs": {"shape": (1, 4), "specs": SPECS, "min_size": 1},
    "hosts": {"shape": (2, 2), "specs": SPECS, "min_size": 1, "kind": AUTO},
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["nanochat", "muon", "normuon"])
def test_several_devices(x64, name, layout):
    params, batch = model()
    assert_equal_steps(
        loss, OPTIMIZERS[name](reading()), params, batch, atol=1e-12, **LAYOUTS[layout]
    )


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_several_devices_in_float32(devices):
    params, batch = model("float32")
    matrices = jm.read(params, loss, batch)
    tx = jm.nanochat(matrices=matrices, dtype="float32", adamw=optax.adamw(3e-4))
    given = {"shape": (devices,), "parameters": "divided", "min_size": 1}
    assert_equal_steps(loss, tx, params, batch, atol=5e-6, **given)


def tied(params, batch):
    """Two scans, one of them from the last layer on, and an embedding used twice."""
    table = ROTATIONS[: len(batch)]

    def narrow(x, layer):
        return block(x + table.astype(x.dtype), layer)

    x = params["embed"][batch]
    x, _ = jax.lax.scan(jax.checkpoint(narrow), x, params["layers"])

    def last(x, xs):
        w, number, sample = xs
        return x + x @ w * sample / (1 + number), jnp.sum(w**2)

    xs = params["more"], jnp.arange(4), jnp.mean(x[:, :4], axis=0)
    x, norms = jax.lax.scan(last, x, xs, reverse=True)
    x = x / jnp.linalg.norm(x)
    return jnp.mean((x @ params["embed"].T) ** 2) + 1e-3 * jnp.mean(norms), norms


ROTATIONS = np.cos(np.arange(64.0)).reshape(8, 8)


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
def test_two_scans_and_a_tied_leaf_on_several_devices(x64, kind):
    params, batch = model()
    params["more"] = jax.random.normal(jax.random.key(1), (4, 8, 8), "float64") / 9
    matrices = jm.read(params, lambda *args: tied(*args)[0], batch)

    def loss(params, batch):
        loss, norms = tied(params, batch)
        return jax.lax.pmean(loss, "data"), {"norms": norms}

    tx = jm.muon(matrices=matrices, **F64)
    given = {"shape": (4,), "parameters": "divided", "min_size": 1, "has_aux": True}
    assert_equal_steps(loss, tx, params, batch, atol=1e-12, kind=kind, **given)


@pytest.mark.parametrize("devices", [2, 8])
def test_layers_are_gathered_one_at_a_time(devices):
    params, batch = model("float32", layers=16)
    tx = jm.muon(matrices=jm.read(params, loss, batch))
    given = {"shape": (devices,), "parameters": "divided", "min_size": 1}
    step = step_of(loss, tx, kind=AUTO, **given)
    program = jax.make_jaxpr(step._step)(*step.abstract(params), batch)
    gathered = {
        tuple(v.aval.shape)
        for eqn in jaxprs.operations(program.jaxpr)
        if eqn.primitive.name.startswith("all_gather")
        for v in eqn.outvars
    }
    layers = {x.shape[1:] for x in jax.tree.leaves(params["layers"])}
    whole = {params[name].shape for name in ("embed", "head")}
    assert gathered == layers | whole
    assert step.gathers(params, batch) == {
        "embed": "whole, for gather",
        "head": "whole, for dot_general",
        **{f"layers/{name}": "a layer at a time" for name in params["layers"]},
    }


@pytest.mark.parametrize("shape", [(1,), (4,)])
@pytest.mark.parametrize("momentum_dtype", [None, "int8"])
def test_state_of_integers_moves_on(x64, momentum_dtype, shape):
    """A residual, and int8 momentum: after one step the same to a few roundings."""
    params, batch = model("bfloat16")
    params["embed"] = params["embed"].astype("float32")  # as are all activations
    tx = jm.keep_residual(jm.muon(matrices=reading(), momentum_dtype=momentum_dtype))
    expected, found = (
        run(loss, tx, params, batch, update, steps=1, shape=shape)
        for update in ("after backward", "in backward")
    )
    for key in ("up", "down"):
        moved = found[0]["layers"][key] - params["layers"][key]
        wanted = expected[0]["layers"][key] - params["layers"][key]
        difference = jnp.linalg.norm(moved - wanted) / jnp.linalg.norm(wanted)
        assert difference < 0.05  # two bits of bfloat16
    residual = found[1].residual["layers"]["up"]
    assert residual.dtype == jnp.int8
    assert (residual != 0).any(axis=(1, 2)).all()


def test_gradients_of_all_layers_never_exist():
    """Without state: XLA copies that on CPUs, where it computes a product twice."""
    params, batch = model("float32", layers=64, width=64)[0], jnp.arange(8)
    size = sum(x.nbytes for x in jax.tree.leaves(params["layers"]))
    room = {}
    for update in ("after backward", "in backward"):
        step = step_of(loss, optax.sgd(0.02), update)
        compiled = step.lower(*step.abstract(params), batch).compile()
        room[update] = compiled.memory_analysis().temp_size_in_bytes / size
    assert room["after backward"] > 1
    assert room["in backward"] < 0.5


def taken_beside(params, batch):
    return loss(params, batch) + jnp.sum(params["layers"]["up"][0] ** 2)


ON_TWO, LEAVES = {"shape": (2,)}, jm.Transfers(gather="leaves")
JOINED = jm.muon(matrices=lambda p: jm.read(p, joins={"layers/up": 2}))
OF_STACKS = {
    "clip_by_block_rms": optax.clip_by_block_rms(1.0),
    "scale_by_trust_ratio": optax.lamb(0.1),
    "adaptive_grad_clip": optax.adaptive_grad_clip(0.1),
    "scale_by_factored_rms": optax.scale_by_factored_rms(),
    "add_noise": optax.add_noise(0.1, 0.5, key=jax.random.key(0)),
}
CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.02))


@pytest.mark.parametrize(
    ("loss", "tx", "given", "message"),
    [
        (loss, CLIPPED, {}, "needs the gradient of"),
        (loss, jm.skip_nonfinite(optax.sgd(0.1)), {}, "needs the gradient of"),
        *(
            (loss, tx, {}, f"{name} takes a parameter of several layers as one")
            for name, tx in OF_STACKS.items()
        ),
        (loss, JOINED, {}, "are joined"),
        (taken_beside, optax.sgd(0.1), {}, BESIDE),
        (loss, optax.sgd(0.1), {"microbatches": 2}, "expected one microbatch"),
        (loss, optax.sgd(0.1), {"weighted": True}, "expected one microbatch"),
        (
            loss,
            optax.sgd(0.1),
            {"axis": "data", "shape": (2, 2), "kind": AUTO},
            "beside",
        ),
        (loss, optax.sgd(0.1), ON_TWO | {"transfers": LEAVES}, "gather='leaves'"),
        (loss, optax.sgd(0.1), ON_TWO | {"specs": P("data")}, "divides its layers"),
    ],
)
def test_what_cannot_work_is_an_error(loss, tx, given, message):
    params, batch = model("float32")
    with pytest.raises(ValueError, match=message):
        run(loss, tx, params, batch, "in backward", **given)


def test_a_scan_of_one_layer_is_an_error():
    params, batch = model("float32", layers=1)
    with pytest.raises(ValueError, match=NO_SCAN):
        run(loss, optax.sgd(0.1), params, batch, "in backward")
