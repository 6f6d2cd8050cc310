"""ZeRO-2 gives what one device gives, and sends what it says."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jax_muon as jm
from jax_muon.mesh.owned import MatrixLayout
from jax_muon.mesh.traffic import collectives
from tests.distributed import problems

# adamw_eps 1e-6: at 1e-10, Adam turns rounding noise on near-zero gradients into steps.
RECIPES = {
    "nanochat": jm.nanochat,
    "nanochat later": functools.partial(
        jm.nanochat, row_equilibration=True, renormalize=True, norm_factor=1.01
    ),
    "muon": jm.muon,
    "normuon": jm.normuon,
    "moonlight": jm.moonlight,
    "teon": functools.partial(
        jm.teon, joins={"*_{i}/q": 2, "scan/mlp": 2}, splits={"*/up": jm.Split(2)}
    ),
}


def recipe(name="nanochat", **settings):
    settings = {"dtype": "float32", "adamw_eps": 1e-6, **settings}
    return RECIPES[name](optax.linear_schedule(0.02, 0.01, 10), **settings)


def mesh_of(*shape, names=("data",), kind=AxisType.Auto):
    count = int(np.prod(shape))
    return jax.make_mesh(
        shape, names, axis_types=(kind,) * len(shape), devices=jax.devices()[:count]
    )


def train(tx, mesh, params, loss, data, axis="data", **settings):
    params = jax.device_put(params, NamedSharding(mesh, PartitionSpec()))
    params = jax.tree.map(jnp.copy, params)  # device_put may alias what we donate
    state = jm.init_optimizer(tx, params, mesh)
    step = jm.make_train_step(loss, tx, mesh, axis=axis, **settings)
    losses = []
    for batch in data:
        params, state, metrics = step(params, state, batch)
        losses.append(float(metrics["loss"]))
        assert_bit_identical_on_devices(params)
    return params, state, losses


def assert_bit_identical_on_devices(tree):
    for leaf in jax.tree.leaves(tree):
        first, *others = (np.asarray(shard.data) for shard in leaf.addressable_shards)
        for other in others:
            np.testing.assert_array_equal(first, other)


@pytest.mark.parametrize("problem", problems.PROBLEMS)
@pytest.mark.parametrize("devices", [1, 2, 4, 8])
def test_equals_one_device(problem, devices):
    params, weights = problems.draw(problem)
    loss, data = problems.loss_of(weights), problems.batches(20)
    expected, _, losses = problems.single_device(recipe(), loss, params, data)
    tx = recipe(zero2_axis="data")
    result, _, got = train(tx, mesh_of(devices), params, loss, data)
    assert problems.distance(result, expected, params) < 5e-6
    np.testing.assert_allclose(got, losses, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe(name):
    params, weights = problems.draw("mixed")
    loss, data = problems.loss_of(weights), problems.batches(20)
    expected, _, _ = problems.single_device(recipe(name), loss, params, data)
    tx = recipe(name, zero2_axis="data")
    result, _, _ = train(tx, mesh_of(4), params, loss, data)
    assert problems.distance(result, expected, params) < 5e-6


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_two_devices_in_both_axis_modes(kind):
    params, weights = problems.draw("mixed")
    loss, data = problems.loss_of(weights), problems.batches(5)
    expected, _, _ = problems.single_device(recipe(), loss, params, data)
    tx = recipe(zero2_axis="data")
    result, _, _ = train(tx, mesh_of(2, kind=kind), params, loss, data)
    assert problems.distance(result, expected, params) < 5e-6


def test_an_axis_may_be_several_mesh_axes():
    params, weights = problems.draw("mixed")
    loss, data = problems.loss_of(weights), problems.batches(5)
    expected, _, _ = problems.single_device(recipe(), loss, params, data)
    axis = ("host", "gpu")
    tx = recipe(zero2_axis=axis)
    mesh = mesh_of(2, 4, names=axis)
    result, _, _ = train(tx, mesh, params, loss, data, axis=axis)
    assert problems.distance(result, expected, params) < 5e-6


def test_float64_has_no_rounding_to_hide_behind(x64):
    params, weights = problems.draw("mixed", jnp.float64)
    loss, data = problems.loss_of(weights), problems.batches(5, dtype=jnp.float64)
    expected, _, _ = problems.single_device(recipe(dtype="float64"), loss, params, data)
    tx = recipe(dtype="float64", zero2_axis="data")
    result, _, _ = train(tx, mesh_of(8), params, loss, data)
    assert problems.distance(result, expected, params) < 1e-12


# --- gradients: microbatches, weights, aux --------------------------------------------


def test_microbatches_change_nothing():
    params, weights = problems.draw("mixed")
    loss, data = problems.loss_of(weights), problems.batches(5)
    expected, _, losses = problems.single_device(recipe(), loss, params, data)
    tx = recipe(zero2_axis="data")
    result, _, got = train(tx, mesh_of(4), params, loss, data, microbatches=4)
    assert problems.distance(result, expected, params) < 5e-6
    np.testing.assert_allclose(got, losses, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_weights_that_differ_between_devices(microbatches):
    """A masked mean: the devices' batches have 0 to 4 samples that count."""
    params, weights = problems.draw("mixed")
    plain = problems.loss_of(weights)
    data = problems.batches(5)
    mask = np.array([1, 1, 1, 1, 1, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0], np.float32)
    masked = [(batch, jnp.asarray(mask)) for batch in data]

    def loss(params, batch):
        samples, mask = batch
        count = jnp.sum(mask)
        scaled = samples * mask[:, None] * (len(mask) / jnp.maximum(count, 1))[None]
        return plain(params, scaled), count

    kept = [batch[mask == 1] for batch in data]
    expected, _, losses = problems.single_device(recipe(), plain, params, kept)
    tx = recipe(zero2_axis="data")
    result, _, got = train(
        tx, mesh_of(4), params, loss, masked, weighted=True, microbatches=microbatches
    )
    assert problems.distance(result, expected, params) < 5e-6
    # They pass zero: rounding is that of their terms, of the size of the largest.
    np.testing.assert_allclose(got, losses, rtol=0, atol=1e-6 * np.abs(losses).max())


@pytest.mark.parametrize("devices", [2, 8])
def test_a_batch_in_which_nothing_counts_moves_little(devices):
    """No gradient at all: finite, and no more than decay and rounding."""
    params, weights = problems.draw("one matrix only")
    plain = problems.loss_of(weights)
    tx, mesh = recipe(zero2_axis="data"), mesh_of(devices)
    step = jm.make_train_step(
        lambda p, b: (plain(p, b), 0.0), tx, mesh, weighted=True, donate=False
    )
    state = jm.init_optimizer(tx, params, mesh)
    after, _, metrics = step(params, state, problems.batches(1)[0])
    assert metrics["loss"] == 0
    assert jnp.max(jnp.abs(after["w"] - params["w"])) < 0.02 * 0.1


def test_weights_beyond_float16():
    """Weights that float16 cannot hold, beside a float16 loss."""
    params, weights = problems.draw("one matrix only")
    plain = problems.loss_of(weights)
    batch = problems.batches(1)[0]
    tx, mesh = recipe(zero2_axis="data"), mesh_of(4)
    state = jm.init_optimizer(tx, params, mesh)
    losses = []
    for weight in (1.0, 1e5):
        step = jm.make_train_step(
            lambda p, b, w=weight: (plain(p, b).astype(jnp.float16), w),
            tx,
            mesh,
            weighted=True,
            donate=False,
        )
        losses.append(float(step(params, state, batch)[2]["loss"]))
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)


def test_aux_is_averaged():
    params, weights = problems.draw("one matrix only")
    plain = problems.loss_of(weights)
    data = problems.batches(1)

    def loss(params, batch):
        return plain(params, batch), {"mean": jnp.mean(batch)}

    tx, mesh = recipe(zero2_axis="data"), mesh_of(4)
    step = jm.make_train_step(loss, tx, mesh, has_aux=True, microbatches=2)
    _, _, metrics = step(params, jm.init_optimizer(tx, params, mesh), data[0])
    np.testing.assert_allclose(metrics["aux"]["mean"], jnp.mean(data[0]), rtol=1e-5)


def test_dtypes_on_the_wire():
    params, weights = problems.draw("five of one shape")
    loss, data = problems.loss_of(weights), problems.batches(3)

    def tx(**wire):
        return jm.zero2_matrices(
            optax.chain(jm.nesterov(), optax.scale_by_learning_rate(0.1)),
            "data",
            **wire,
        )

    mesh = mesh_of(4)
    exact, _, _ = train(tx(), mesh, params, loss, data)
    for wire in ("reduce_dtype", "gather_dtype"):
        coarse, _, _ = train(tx(**{wire: jnp.bfloat16}), mesh, params, loss, data)
        error = problems.distance(coarse, exact, params)
        assert 1e-5 < error < 2e-2  # some roundings of 2^-9


# --- what is sent, what is kept -------------------------------------------------------


@pytest.mark.parametrize("devices", [2, 3, 8])
def test_collectives_are_one_scatter_and_one_gather_a_stack(devices):
    """A device sends (N-1)/N of the padded bytes each way, but for what is small."""
    params, weights = problems.draw("mixed")
    loss, batch = problems.loss_of(weights), problems.batches(1, size=24)[0]
    tx, mesh = recipe(zero2_axis="data"), mesh_of(devices)
    state = jm.init_optimizer(tx, params, mesh)
    step = jm.make_train_step(loss, tx, mesh)
    sent = {}
    for one in collectives(step, params, state, batch):
        sent.setdefault(one.kind, []).append(one)

    def padded(count, *shape):
        return -(-count // devices) * devices * np.prod(shape) * 4

    owned = [
        padded(3, 24, 24),
        padded(4, 24, 48),  # (24, 48) and a stack of three
        padded(1, 48, 24),
        padded(1, 36, 6),
        padded(67, 24),
        padded(1030),
    ]
    for kind in ("reduce-scatter", "all-gather"):
        expected = sorted(size * (devices - 1) / devices for size in owned)
        np.testing.assert_allclose(
            sorted(one.sent_bytes for one in sent[kind]), expected, rtol=1e-12
        )
    small, *scalars = sorted(
        sent.pop("all-reduce"), key=lambda one: one.input_bytes, reverse=True
    )
    assert small.shapes == ((24,),)
    assert {one.input_bytes for one in scalars} == {4}  # loss, and sum of weights
    assert set(sent) == {"reduce-scatter", "all-gather"}


def test_state_is_divided():
    params, _ = problems.draw("mixed")
    mesh = mesh_of(8)
    tx = recipe(zero2_axis="data")
    state = jm.init_optimizer(tx, params, mesh)

    def bytes_on(device, tree):
        return sum(
            shard.data.nbytes
            for leaf in jax.tree.leaves(tree)
            for shard in leaf.addressable_shards
            if shard.device == device
        )

    layout = MatrixLayout.of(
        {k: v for k, v in params.items() if "q" in k or k in ("h_0/up", "h_0/down")},
        "data",
        8,
        None,
    )
    slots = {stack.name: stack.depth for stack in layout.stacks}
    assert slots == {"24x24_float32": 1, "24x48_float32": 1, "48x24_float32": 1}
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(recipe().init(params)))
    # Padding: one slot of each of four stacks, momentum and means, and a row of each
    # divided leaf, twice; and what is small and replicated.
    padding = 4 * (24 * 24 + 24 * 48 + 24 * 48 + 36 * 6 + 150) + 8 * (24 + 1)
    small = 8 * 24 + 64
    for device in mesh.devices:
        assert bytes_on(device, state) <= total / 8 + padding + small


@pytest.mark.parametrize("devices", [2, 3, 4, 8])
@pytest.mark.parametrize("count", [1, 3, 5, 8, 11])
def test_padding_goes_where_it_costs_least(devices, count):
    """Over two stacks, no device has two matrices more than another."""
    tree = {f"a{i}": jnp.zeros((4, 6)) for i in range(count)}
    tree |= {f"b{i}": jnp.zeros((4, 8)) for i in range(count)}
    layout = MatrixLayout.of(tree, "data", devices, None)
    loads = np.zeros(devices, int)
    for stack in layout.stacks:
        assert stack.depth == -(-count // devices)
        assert sum(
            run.stop - run.start for run in stack.runs if run.block is not None
        ) == (count)
        loads += stack.whole + np.array(stack.extra)
    assert loads.max() - loads.min() <= 1


def test_empty_slots_are_not_computed():
    """One matrix on four devices: the factor sits in a branch."""
    params, weights = problems.draw("one matrix only")
    calls = []

    def polar(x):
        calls.append(x.shape)
        return jm.svd_polar(x)

    tx = jm.zero2_matrices(jm.orthogonalize(polar), "data")
    mesh = mesh_of(4)
    state = jm.init_optimizer(tx, params, mesh)
    step = jm.make_train_step(problems.loss_of(weights), tx, mesh)
    text = step.lower(params, state, problems.batches(1)[0]).as_text()
    assert calls == [(1, 9, 14)]
    assert "stablehlo.case" in text or "stablehlo.if" in text


# --- composition ----------------------------------------------------------------------


def test_nothing_recompiles_and_buffers_are_donated():
    params, weights = problems.draw("mixed")
    mesh, tx = mesh_of(4), recipe(zero2_axis="data")
    params = jax.device_put(params, NamedSharding(mesh, PartitionSpec()))
    state = jm.init_optimizer(tx, params, mesh)
    step = jm.make_train_step(problems.loss_of(weights), tx, mesh)
    for batch in problems.batches(3):
        old = params
        params, state, _ = step(params, state, batch)
    assert step._cache_size() == 1
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(old))


def test_map_params_needs_no_mesh():
    tx = recipe(zero2_axis="data")
    params, _ = problems.draw("mixed")
    state = jm.init_optimizer(tx, params, mesh_of(2))
    again = optax.tree.map_params(tx, lambda x: x, state)
    assert jax.tree.structure(again) == jax.tree.structure(state)


# --- bad input ------------------------------------------------------------------------


def test_summed_gradients_are_refused():
    params, weights = problems.draw("one matrix only")
    loss, data = problems.loss_of(weights), problems.batches(1)
    mesh, tx = mesh_of(4), recipe(zero2_axis="data")
    state = jm.init_optimizer(tx, params, mesh)

    def step(params, batch):
        grads = jax.grad(loss)(params, batch)  # summed over devices by jax
        tx.update(grads, tx.init(params), params)

    run = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(PartitionSpec(), PartitionSpec("data")),
        out_specs=PartitionSpec(),
    )
    with pytest.raises(ValueError, match=r"'w'.*jax\.lax\.pcast"):
        run(params, data[0])
    assert state is not None


def test_outside_shard_map_and_unknown_axis():
    params, weights = problems.draw("one matrix only")
    with pytest.raises(ValueError, match="'data' is not manual here"):
        recipe(zero2_axis="data").init(params)
    with pytest.raises(ValueError, match="'model' is not manual here"):
        jm.init_optimizer(recipe(zero2_axis="model"), params, mesh_of(2))
    with pytest.raises(ValueError, match="axis='model'"):
        jm.make_train_step(
            problems.loss_of(weights), recipe(), mesh_of(2), axis="model"
        )


def test_state_of_another_device_count_and_another_tree():
    params, weights = problems.draw("five of one shape")
    loss, data = problems.loss_of(weights), problems.batches(1)
    tx = recipe(zero2_axis="data")
    state = jax.device_get(jm.init_optimizer(tx, params, mesh_of(2)))
    step = jm.make_train_step(loss, tx, mesh_of(4))
    with pytest.raises(ValueError, match="state of 2 devices on 4 devices"):
        step(params, state, data[0])
    params["more"] = params["0/w"]
    weights["more"] = weights["0/w"]
    step = jm.make_train_step(problems.loss_of(weights), tx, mesh_of(2))
    with pytest.raises(ValueError, match="not one of its optimizer"):
        step(params, state, data[0])


def test_state_and_optimizer_that_do_not_fit_the_step():
    params, weights = problems.draw("one matrix only")
    loss, batch = problems.loss_of(weights), problems.batches(1)[0]
    mesh, tx = mesh_of(2), recipe(zero2_axis="data")
    step = jm.make_train_step(loss, tx, mesh)
    with pytest.raises(ValueError, match="from_portable"):
        step(params, recipe().init(params), batch)
    plain = recipe()
    step = jm.make_train_step(loss, plain, mesh)
    state = jm.init_optimizer(plain, params, mesh)
    with pytest.raises(ValueError, match="'w' differs between the devices"):
        step(params, state, batch)


def test_groups_of_the_user_under_zero2():
    """A group that is a wrapper itself is left as it is; others go by rows."""
    params, weights = problems.draw("five of one shape")
    loss, data = problems.loss_of(weights), problems.batches(3)
    labels = {k: "own" if k < "2" else "frozen" if k < "3" else "muon" for k in params}
    own = optax.chain(jm.nesterov(), jm.orthogonalize(jm.svd_polar), optax.scale(-0.01))
    frozen = optax.set_to_zero()
    tx = recipe(labels=labels, adamw_groups={"own": own, "frozen": frozen})
    expected, _, _ = problems.single_device(tx, loss, params, data)
    groups = {"own": jm.zero2_matrices(own, "data"), "frozen": frozen}
    tx = recipe(labels=labels, adamw_groups=groups, zero2_axis="data")
    result, _, _ = train(tx, mesh_of(4), params, loss, data)
    assert problems.distance(result, expected, params) < 5e-6


def test_batches_that_do_not_divide():
    params, weights = problems.draw("one matrix only")
    tx, mesh = recipe(zero2_axis="data"), mesh_of(4)
    state = jm.init_optimizer(tx, params, mesh)
    step = jm.make_train_step(problems.loss_of(weights), tx, mesh, microbatches=3)
    with pytest.raises(ValueError, match="4 devices x 3 microbatches"):
        step(params, state, problems.batches(1)[0])
    with pytest.raises(ValueError, match="microbatches=0"):
        jm.make_train_step(problems.loss_of(weights), tx, mesh, microbatches=0)
