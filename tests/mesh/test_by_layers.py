"""Scanned layers that are gathered one at a time: gradients, what is sent and kept."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_muon as jm
from benchmarks.schedule.hlo import Module
from jax_muon.mesh import transfers
from tests.mesh import losses, models
from tests.mesh.layouts import EXPLICIT
from tests.mesh.sgd import (
    LEVELS,
    SPECS,
    assert_gradients,
    drawn,
    gradients,
    make,
    program_of,
    shapes_within,
)

pytestmark = pytest.mark.usefixtures("as_users_write")


def bound_of(loss):
    """In float64, unless a loss casts to float32."""
    return 1e-7 if "casts" in loss.__name__ else 1e-12


# Of all layers' weights, as a loss may have reshaped them.
WHOLE = {(4, 8, 8), (3, 8, 8), (2, 2, 8, 8), (2, 2, 8), (8, 4, 8)}


def whole_layers(step, batch):
    return [shape for shape, _ in program_of(step, batch)[0] if shape in WHOLE]


@pytest.mark.parametrize("name", losses.LOSSES)
def test_gradients_in_float64(name, x64):
    """And no device has all layers: neither gathered at once, nor kept one by one."""
    loss, alone, others = losses.LOSSES[name]
    step, (params, batch) = make(loss), drawn()
    bound = bound_of(loss)
    whole = assert_gradients(step, alone, params, batch, bound)
    _, metrics, _ = gradients(step, params, batch)
    np.testing.assert_allclose(metrics["loss"], alone(params, batch), rtol=bound)
    assert whole - {"head"} == others
    assert bool(whole_layers(step, batch)) == bool(others)


@pytest.mark.parametrize("loss", [losses.in_reverse, losses.of_scans_of_others])
def test_gradients_that_many_devices_scatter_late(loss, x64, monkeypatch):
    """All of a layer's in one go, while the next layer runs."""
    monkeypatch.setattr(transfers, "MANY_DEVICES", 3)
    assert_gradients(make(loss), loss, *drawn())


# Over one axis of the batch gradients are scattered by layers, over the other after.
FSDP = {"layers": {"w": P(None, "fsdp"), "b": P(None, "fsdp")}, "head": P("fsdp")}
BY_LEVELS = {
    "layers": {"w": P(None, None, ("fsdp", "data")), "b": P(None, "fsdp")},
    "head": P(("data", "fsdp")),
}
TP = {"layers": {"w": P(None, "data", "tp"), "b": P(None, "tp")}}
ON_BOTH = {"layers": {"w": P(None, ("data", "tp")), "b": P(None, ("tp", "data"))}}
KEPT = {"transfers": jm.Transfers(gather="levels", keep_gathered=True)}
OF_TP = {"names": ("data", "tp"), "axis": "data"}
IN_LEVELS = (
    losses.in_reverse,
    losses.of_casts_of_the_second_axis,
    losses.of_all_kinds,
    losses.of_scans,
)
FORMS = {
    "microbatches": (losses.scan, (4,), {"microbatches": 2}),
    "microbatches of several scans": (losses.of_scans, (4,), {"microbatches": 2}),
    "kept": (losses.of_scans, (4,), {"transfers": jm.Transfers(keep_gathered=True)}),
    "Explicit": (losses.scan, (4,), {"kind": EXPLICIT}),
    "divided": (
        losses.of_scans,
        (4,),
        {"parameters": "divided", "specs": {**SPECS, "head": P()}},
    ),
    "leaves": (losses.scan, (4,), {"transfers": jm.Transfers(gather="leaves")}),
    "HSDP": (losses.scan, (2, 2), {"specs": SPECS | FSDP}),
    "HSDP, divided": (
        losses.scan,
        (2, 2),
        {"specs": SPECS | FSDP, "parameters": "divided"},
    ),
    **{
        f"levels {how}, {loss.__name__}": (
            loss,
            (2, 2),
            LEVELS | {"specs": SPECS | BY_LEVELS} | kept,
        )
        for loss in IN_LEVELS
        for how, kept in (("again", {}), ("kept", KEPT))
    },
    "levels, divided": (
        losses.scan,
        (2, 2),
        LEVELS | {"specs": SPECS | FSDP, "parameters": "divided", "microbatches": 2},
    ),
    "TP": (losses.with_keys, (2, 2), OF_TP | {"specs": SPECS | TP}),
    "TP of the same dimension": (
        losses.scan,
        (4, 2),
        OF_TP | {"specs": SPECS | ON_BOTH},
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_forms(form, x64):
    loss, shape, given = FORMS[form]
    step = make(loss, *shape, **given)
    whole = assert_gradients(step, loss, *drawn(), bound_of(loss))
    outside = {"head", "scale"} if "divided" in form else {"head"}
    assert whole == (outside if form != "leaves" else set())


def test_other_axes_stay_divided():
    """Along "data" a device exchanges nothing but its own half of what "tp" divides."""
    specs = SPECS | TP | {"head": P("tp", "data")}
    step = make(losses.scan, 4, 2, specs=specs, **OF_TP)
    args = *step.abstract(losses.draw()), losses.samples()
    program = Module.parse(step.lower(*args).compile().as_text())

    def most(kind, of_layers):
        """Elements of the largest whole array that is gathered, or scattered."""
        return max(
            t.input_bytes // 4 * (t.devices if kind == "all-gather" else 1)
            for t in program.transfers()
            if t.kind == kind and ("/while" in t.name) == of_layers and 2 in t.members
        )

    for kind in ("all-gather", "reduce-scatter"):
        assert most(kind, of_layers=True) == 8 * 8 // 2
        assert most(kind, of_layers=False) == 8 * 24 // 2


def test_weights_that_differ_between_devices(x64):
    """The samples of one device do not count: the mean of none of them is NaN."""
    mask = jnp.ones(16).at[:4].set(0).at[9].set(0)
    params, samples = drawn()

    def loss(params, batch):
        x, mask = batch
        count = jnp.sum(mask)
        y, _ = jax.lax.scan(
            lambda y, w: (losses._layer(y, w), None), x, params["layers"]
        )
        terms = jnp.mean(jnp.sin(y * params["scale"]) @ params["head"], axis=1)
        return jnp.sum(terms * mask) / count, count

    step = make(loss, weighted=True, microbatches=2)
    alone = lambda *args: loss(*args)[0]  # noqa: E731
    assert assert_gradients(step, alone, params, (samples, mask)) == {"head"}


def test_kept_layers_are_gathered_once():
    step = make(losses.scan, transfers=jm.Transfers(keep_gathered=True))
    batch = losses.samples()
    assert (4, 8, 8) in whole_layers(step, batch)
    sent, more = (program_of(x, batch)[1] for x in (step, make(losses.scan)))
    assert len(more) > len(sent)


def test_prints_happen_once_for_each_layer(capfd):
    def loss(params, x):
        def step(x, layer):
            jax.debug.print("a layer of {}", x.size)
            return losses._layer(x, layer), None

        return jnp.mean(jax.lax.scan(step, x, params["layers"])[0])

    step = make(loss)
    jax.block_until_ready(step(*step.init(losses.draw()), losses.samples()))
    jax.effects_barrier()
    lines = capfd.readouterr().out.splitlines()
    assert lines.count("a layer of 32") == 4 * losses.LAYERS  # on each of 4 devices


# --- frameworks -----------------------------------------------------------------------


@pytest.mark.parametrize("framework", [models.linen, models.of_nnx])
def test_frameworks(framework):
    """Blocks, and no other parameters, are gathered a layer at a time."""
    params, loss, batch = framework("float32")
    step = make(loss, specs=None, parameters="divided")
    whole = assert_gradients(step, loss, params, batch, 5e-6)
    ways = step.gathers(params, batch)
    assert {path for path in ways if "blocks" not in path} == whole
    assert all("head" in path for path in whole)
    assert len(ways) > len(whole) > 0


def test_what_one_operation_uses_is_gathered_in_order():
    """Each process traces for itself, and all have to gather in one order."""
    sizes = range(1, 13)
    params = {"layers": [jnp.ones((2, 4, n)) for n in sizes]}

    def loss(params, x):
        layer = [w[0] for w in params["layers"]]
        total = jax.lax.cond(
            x[0, 0] > 0, lambda *ws: sum(map(jnp.sum, ws)), lambda *ws: 0.0, *layer
        )
        return total * jnp.mean(x)

    step = make(loss, specs=P(None, "data"))
    program = jax.make_jaxpr(step._step)(*step.abstract(params), jnp.ones((4, 2)))
    gathered = shapes_within(program.jaxpr)[1]
    assert [shape[-1] for shape, _ in gathered] == [*sizes]


# --- what a step says -----------------------------------------------------------------


def test_how_parameters_are_gathered():
    params, batch = jax.eval_shape(losses.draw), losses.samples()
    layers = dict.fromkeys(losses.LEAVES, "a layer at a time")
    expected = layers | {"head": "whole, for dot_general"}
    for gather in ("auto", "layers"):
        step = make(losses.scan, transfers=jm.Transfers(gather=gather))
        assert step.gathers(params, batch) == expected
    step = make(losses.scan, transfers=jm.Transfers(gather="leaves"))
    assert step.gathers(params, batch) == {}
    step = make(losses.fori_loop, transfers=jm.Transfers(gather="layers"))
    with pytest.raises(ValueError, match=r"scan uses .* 'layers/w' with .* outside"):
        step.gathers(params, batch)


def _normalized(params, x, mean):
    """Outputs (samples, classes) after a norm over the samples of all devices."""
    y, _ = jax.lax.scan(lambda y, w: (losses._layer(y, w), None), x, params["layers"])
    y = y * params["scale"]
    center = mean(jnp.mean(y, axis=0))
    y = (y - center) / jnp.sqrt(mean(jnp.mean((y - center) ** 2, axis=0)) + 1e-3)
    return y @ params["head"]


def _balance(logits, mean):
    """Of a router: how many samples a class gets, times its mean probability."""
    chosen = jax.nn.one_hot(jnp.argmax(logits, axis=-1), logits.shape[-1])
    return jnp.sum(
        mean(jnp.mean(chosen, axis=0)) * mean(jnp.mean(jax.nn.softmax(logits), axis=0))
    )


WEIGHTS = {
    "all devices": [1, 1, 1, 0, 1, 0, 0, 0, 1, 1, 0, 0, 1, 1, 1, 1],
    # The samples of the second device count in the norm and in the balance alone.
    "not the second": [1, 1, 1, 0, 0, 0, 0, 0, 1, 1, 0, 0, 1, 1, 1, 1],
}


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
@pytest.mark.parametrize("gather", ["auto", "leaves"])
def test_collectives_in_a_weighted_loss(weights, dtype, gather, x64):
    """A loss whose last cast is to bfloat16 has weights that are not rounded to it."""
    params, x = drawn()
    batch = x, jnp.asarray(WEIGHTS[weights], float)

    def loss_fn(params, batch, mean=lambda x: jax.lax.pmean(x, "data")):
        logits = _normalized(params, batch[0], mean)
        count = jnp.sum(batch[1])
        own = jnp.sum(batch[1] * jnp.sum(jnp.sin(logits), axis=1))
        loss = own / jnp.maximum(count, 1) + 10 * _balance(logits, mean)
        return loss.astype(dtype), count

    def alone(params, batch):
        return loss_fn(params, batch, lambda x: x)[0].astype(float)

    step = make(loss_fn, weighted=True, transfers=jm.Transfers(gather=gather))
    # In bfloat16 a device's cotangent has 8 bits where collectives take it to others.
    bound = 1e-12 if dtype == "float64" else 2e-2
    assert_gradients(step, alone, params, batch, bound)
