"""`make_train_step` in every form: one device's results, and what is sent."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import PartitionSpec as P

import jax_muon as jm
from benchmarks.schedule.jaxpr import collectives
from tests.mesh import layouts, losses, problems
from tests.mesh.layouts import EXPLICIT, make_step, mesh_of, recipe
from tests.mesh.problems import BOUND, assert_same_losses
from tests.mesh.sgd import assert_gradients, drawn, make
from tests.reading import toy

STEPS = 5
FORMS = {
    "Explicit": ("ZeRO-2 on 8", {"kind": EXPLICIT}),
    "two axes": ("ZeRO-2 over two axes", {}),
    "two axes, gathered first": ("ZeRO-2 over two axes", {"divided": True}),
    "FSDP": ("FSDP", {}),
    "FSDP, Explicit": ("FSDP", {"kind": EXPLICIT}),
    "HSDP, microbatches": ("HSDP", {"microbatches": 2}),
    "HSDP": ("HSDP", {}),
    "microbatches": ("ZeRO-2 on 4", {"microbatches": 4}),
    # Few matrices for many devices, shapes that nothing divides.
    **{name: ("ZeRO-2 on 8", {"problem": name}) for name in problems.PROBLEMS},
}


@pytest.mark.filterwarnings("ignore:no parameter is a matrix")
@pytest.mark.parametrize("form", FORMS)
def test_equals_one_device(form):
    where, given = FORMS[form]
    problem = given.get("problem", "mixed")
    start, expected, values = layouts.one_device("nanochat", problem, steps=STEPS)
    result, _, got = layouts.train_step_run(
        make_step(where, **given), start, problems.batches(STEPS)
    )
    assert problems.distance(result, expected, start) < BOUND
    assert_same_losses(got, values)


@pytest.mark.parametrize("name", losses.LOSSES)
def test_losses_as_models_write_them(name, x64, as_users_write):
    """Loops from constants, and collectives of their own."""
    loss, alone = losses.LOSSES[name]
    params, batch = drawn()
    assert_gradients(make(loss), alone, params, batch)


def test_a_state_goes_on_in_another_form(tmp_path):
    """Saved by ZeRO-2, restored divided between steps: what `abstract` is for."""
    start, expected, _ = layouts.one_device("nanochat", steps=STEPS)
    data = problems.batches(STEPS)
    params, state, _ = layouts.train_step_run(make_step(), start, data[:3])
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "3", {"params": params, "state": state})
    step = make_step("ZeRO-2 on 8", divided=True)
    target = dict(zip(("params", "state"), step.abstract(start), strict=True))
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(tmp_path / "3", target)
    params, state = restored["params"], restored["state"]
    for batch in data[3:]:
        params, state, _ = step(params, state, batch)
    assert step._jitted._cache_size() == 1
    assert problems.distance(params, expected, start) < BOUND


def test_buffers_are_donated_and_the_users_own_stay():
    params, _ = problems.draw("mixed")
    step, batch = make_step(), problems.batches(1)[0]
    placed, state = step.init(params)
    step(placed, state, batch)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(placed))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(params))
    with pytest.raises(ValueError, match=r"params.* is deleted: an earlier call"):
        step(placed, state, batch)


# --- gradients: weights, aux, dtypes --------------------------------------------------


@pytest.mark.parametrize("least", [0, 1])
@pytest.mark.parametrize("given", [{}, {"microbatches": 2}])
def test_weights_that_differ_between_devices(given, least):
    """A masked mean: the devices' batches have 0 to 4 samples that count.

    The mean of no samples is NaN, or 0.
    """
    params, weights = problems.draw("mixed")
    plain, data = problems.loss_of(weights), problems.batches(STEPS)
    mask = np.array([1, 1, 1, 1, 1, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0], np.float32)
    masked = [(batch, jnp.asarray(mask)) for batch in data]

    def loss(params, batch):
        samples, mask = batch
        count = jnp.sum(mask)
        parts = mask[:, None] * (len(mask) / jnp.maximum(count, least))
        return plain(params, samples * parts), count

    kept = [batch[mask == 1] for batch in data]
    expected, _, values = problems.single_device(recipe(), plain, params, kept)
    step = make_step(loss=loss, weighted=True, **given)
    result, _, got = layouts.train_step_run(step, params, masked)
    assert problems.distance(result, expected, params) < BOUND
    assert_same_losses(got, values)


def test_a_batch_in_which_nothing_counts_moves_little():
    """No gradient at all: finite, and no more than decay and rounding."""
    params, weights = problems.draw("one matrix only")
    plain = problems.loss_of(weights)
    step = make_step(loss=lambda p, b: (plain(p, b), 0.0), weighted=True)
    placed, state = step.init(params)
    after, _, metrics = step(placed, state, problems.batches(1)[0])
    assert metrics["loss"] == 0
    assert jnp.max(jnp.abs(after["w"] - params["w"])) < 0.02 * 0.1


def test_a_weight_below_zero_shows():
    step = make_step(loss=lambda p, b: (jnp.sum(p["w"]), jnp.min(b)), weighted=True)
    placed, state = step.init({"w": jnp.ones((9, 14))})
    after, _, metrics = step(placed, state, jnp.asarray([1.0, 2.0, 3.0, -1.0]))
    assert jnp.isnan(metrics["loss"])
    assert jnp.isnan(after["w"]).all()


def test_float16_means_and_weights_do_not_overflow():
    """Gradients of 9000 on eight devices: float16 cannot hold the sum, nor weights."""
    params = {"w": jnp.zeros((8, 16), jnp.float16)}
    batch = jnp.ones((8, 1), jnp.float16)

    def loss(p, b):
        return jnp.mean(b) * jnp.sum(p["w"]) * jnp.float16(9000), 1e5

    step = make_step("ZeRO-2 on 8", optax.sgd(1e-3), loss=loss, weighted=True)
    after, _, metrics = step(*step.init(params), batch)
    np.testing.assert_allclose(after["w"], -9.0, rtol=1e-2)
    assert metrics["loss"] == 0


def test_aux_is_averaged_whatever_its_dtype():
    """The sums of two True, 100 and 60000 are True, -56 and infinite."""
    params, weights = problems.draw("one matrix only")
    plain, batch = problems.loss_of(weights), problems.batches(1)[0]
    alike = {"flag": True, "int8": np.int8(100), "float16": np.float16(60000)}

    def loss(params, batch):
        aux = jax.tree.map(jnp.asarray, alike) | {"mean": jnp.mean(batch)}
        return plain(params, batch), aux

    step = make_step(loss=loss, has_aux=True, microbatches=2)
    _, _, metrics = step(*step.init(params), batch)
    mean = metrics["aux"].pop("mean")
    np.testing.assert_allclose(mean, jnp.mean(batch), rtol=1e-5)
    assert metrics["aux"] == alike


# --- what is sent ---------------------------------------------------------------------


def test_zero2_scatters_each_leaf_and_nothing_twice():
    """A device sends (N-1)/N of all bytes in reduce-scatters, but for small leaves."""
    params, _ = problems.draw("mixed")
    step = make_step("ZeRO-2 on 8", optax.adam(1e-3), min_size=200)
    sent = collectives(step._step, *step.abstract(params), problems.batches(1)[0])
    divided = [  # the others are small, or 8 does not divide them
        x.nbytes * 7 / 8
        for x in params.values()
        if x.size >= 200 and any(n % 8 == 0 for n in x.shape)
    ]
    scattered = [one.sent_bytes for one in sent if one.kind == "reduce-scatter"]
    assert sorted(scattered) == sorted(divided)
    summed = [one for one in sent if one.kind == "all-reduce"]
    assert len(summed) == len(params) - len(divided) + 1  # and the loss


@pytest.mark.parametrize("form", ["mixed", "FSDP"])
def test_plan_counts_what_a_step_sends(form):
    where, given = FORMS[form]
    params, _ = problems.draw("mixed")
    step = make_step(where, min_size=200, **given)
    shapes, state = step.abstract(params)
    planned = jm.describe(step.tx, shapes)
    sent = collectives(step._step, shapes, state, problems.batches(1)[0])
    scalars = sum(one.sent_bytes for one in sent if one.shapes == ((),))
    total = sum(one.sent_bytes for one in sent) - scalars
    # What is gathered at the end, outside shard_map, is XLA's to place.
    late = 0
    for leaf in planned.parameters:
        if leaf.spec != leaf.state_spec:
            count = planned.sizes["data"] if where == "HSDP" else planned.devices
            late += params[leaf.parameter.path].nbytes * (count - 1) / count
    assert total == pytest.approx(sum(planned.sent_bytes.values()) - late)
    if not late:
        planned = jm.describe(step.tx, shapes, devices_per_host=2)
        between = sum(c.bytes_between_hosts(2) for c in sent if c.shapes != ((),))
        assert between == pytest.approx(sum(planned.bytes_between_hosts.values()))


@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_batch_may_have_arrays_of_no_elements(microbatches):
    """As features of no width, whose shape -1 cannot stand for."""
    step = make_step(
        loss=lambda params, batch: jnp.sum(params["w"]) + jnp.sum(batch["none"]),
        microbatches=microbatches,
    )
    placed, state = step.init({"w": jnp.ones((4, 4))})
    _, _, metrics = step(placed, state, {"none": jnp.zeros((8, 0))})
    assert metrics["loss"] == 16


# --- errors ---------------------------------------------------------------------------


def test_errors_of_a_step_leave_its_arguments():
    params, _ = problems.draw("one matrix only")
    step = make_step(problem="one matrix only", microbatches=3)
    placed, state = step.init(params)
    with pytest.raises(ValueError, match=r"batch has shape \(16, 24\); .*4\) .* \(3\)"):
        step(placed, state, problems.batches(1)[0])
    with pytest.raises(ValueError, match="params and state are swapped"):
        step(state, placed, problems.batches(1, size=12)[0])
    with pytest.raises(ValueError, match="state is not one of this optimizer"):
        step(
            placed, jm.muon(matrices=toy).init(params), problems.batches(1, size=12)[0]
        )
    assert not placed["w"].is_deleted()


@pytest.mark.parametrize("tokens", [(6, 3), (), (4, 3)], ids=str)
def test_batches_that_do_not_divide(tokens):
    loss, batch = lambda p, b: jnp.sum(p["w"]), {"y": np.ones(8), "x": np.ones(tokens)}
    step = jm.make_train_step(loss, jm.muon(matrices=toy), mesh_of(4), microbatches=2)
    with pytest.raises(ValueError, match=r"batch\['x'\] has shape .* a multiple of 8,"):
        step(*step.init({"w": jnp.ones((4, 6))}), batch)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"loss_fn": None}, "loss_fn=None; expected a function"),
        ({"scanned": "layers"}, "scanned: the pattern 'layers' matches no param"),
        ({"reduce_dtype": "int8"}, "reduce_dtype='int8'; expected"),
        ({"gather_dtype": "int8"}, "gather_dtype='int8'; expected"),
        ({"weighted": "no"}, "weighted='no'; expected True or False"),
    ],
)
def test_arguments(given, match):
    given = {"loss_fn": lambda p, b: 0.0, "mesh": mesh_of(2, 2)} | given
    with pytest.raises(ValueError, match=match):
        step = jm.make_train_step(tx=jm.nanochat(matrices=toy), **given)
        step(*step.init({"w": jnp.ones((4, 6))}), jnp.ones(4))


@pytest.mark.parametrize(
    ("loss", "flags", "match"),
    [
        (0.0, {"has_aux": True}, r"has_aux=True, and loss_fn .*; expected \(loss, aux"),
        (
            (0.0, 1.0, 2.0),
            {"weighted": True},
            r"weighted=True, .*; expected \(loss, weight",
        ),
        ((0.0, {}), {}, "the loss of loss_fn=.*; expected a real scalar"),
        (jnp.ones(3), {}, r"the loss of loss_fn is float32 of shape \(3,\); expected"),
        (jnp.ones((), int), {}, "the loss of loss_fn is int32, which has no gradient"),
        ((0.0, "1"), {"weighted": True}, "the weight of loss_fn='1'; expected"),
        (
            (0.0, {"logits": 1.0}),
            {"has_aux": True, "max_aux": "max_logits"},
            r"has no \['max_logits'\]; expected .* got entries \['logits'\]",
        ),
        (0.0, {"max_aux": "max_logits"}, r"has no \['max_logits'\]"),
    ],
)
def test_loss_functions_without_what_they_promise(loss, flags, match):
    params = {"w": jnp.ones((4, 6))}
    step = jm.make_train_step(
        lambda p, b: loss, jm.muon(matrices=toy), mesh_of(2), **flags
    )
    with pytest.raises(ValueError, match=match):
        step(*step.init(params), jnp.ones((2, 3)))


def test_a_constant_loss_has_a_gradient_of_zero_as_in_jax():
    params = {"w": jnp.ones((4, 6))}
    step = jm.make_train_step(lambda p, b: 1.5, optax.sgd(1.0), mesh_of(2))
    after, _, metrics = step(*step.init(params), jnp.ones((2, 3)))
    assert metrics["loss"] == 1.5
    np.testing.assert_array_equal(after["w"], params["w"])


def test_the_optimizer_gets_the_loss():
    """`reduce_on_plateau` asks for it, here also of the mean over the devices."""
    given = {"rtol": 0.0, "atol": 1e9, "factor": 0.5, "patience": 1}
    plateau = optax.contrib.reduce_on_plateau(**given)
    params, _ = problems.draw("one matrix only")
    step = make_step(
        tx=optax.chain(jm.muon(matrices=toy), plateau), problem="one matrix only"
    )
    params, state = step.init(params)
    for batch in problems.batches(3):
        params, state, _ = step(params, state, batch)
    assert state[1].best_value < jnp.inf
    assert state[1].scale < 1


def test_an_on_mesh_within_the_optimizer_changes_nothing():
    problem = "no adamw leaves"
    params, _ = problems.draw(problem)
    clip, mesh = optax.clip_by_global_norm(1.0), mesh_of(4)

    def trained(tx):
        step = make_step(tx=optax.chain(clip, tx), problem=problem)
        return layouts.train_step_run(step, params, problems.batches(2))[0]["y"]

    on_mesh = trained(jm.on_mesh(recipe(), mesh, divide="data"))
    np.testing.assert_array_equal(on_mesh, trained(recipe()))


FROZEN = {"count": "frozen", "mask": "frozen", "w": "muon"}


@pytest.mark.parametrize(
    ("divided", "alone", "given"),
    [
        (False, optax.adamw(0.1, weight_decay=1.0), None),
        (
            True,
            jm.muon(polar=jm.ExactPolar(), matrices=toy),
            {"matrices": FROZEN, "groups": {"frozen": optax.set_to_zero()}},
        ),
    ],
    ids=["adamw", "muon"],
)
def test_integers_among_the_parameters_stay_as_they_are(divided, alone, given):
    tx = alone if given is None else jm.muon(polar=jm.ExactPolar(), **given)
    params = {"w": jnp.eye(8, 16), "count": jnp.asarray(3), "mask": jnp.eye(8) > 0}

    def loss(params, batch):
        y = batch @ jnp.where(params["mask"], 1, 0.5) @ params["w"]
        return jnp.mean(y**2) * params["count"]

    batch = jnp.asarray(np.random.default_rng(5).standard_normal((8, 8)))
    given = (
        {"specs": {"w": P(None, "data"), "count": P(), "mask": P()}} if divided else {}
    )
    step = jm.make_train_step(loss, tx, mesh_of(4), min_size=1, donate=False, **given)
    after, _, _ = step(*step.init(params), batch)
    np.testing.assert_array_equal(after["count"], 3)
    np.testing.assert_array_equal(after["mask"], params["mask"])
    w = {"w": params["w"]}
    grads = jax.grad(lambda w: loss(params | w, batch))(w)
    updates, _ = alone.update(grads, alone.init(w), w)
    np.testing.assert_allclose(after["w"], w["w"] + updates["w"], rtol=0, atol=5e-6)
