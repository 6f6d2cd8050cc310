"""How arrays are sent: in two levels, in narrow dtypes, as many bytes as planned."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jax_muon as jm
from benchmarks.schedule.jaxpr import collectives
from jax_muon.mesh.transfers import Wire
from tests.mesh import layouts, losses, problems
from tests.mesh.layouts import mesh_of
from tests.mesh.sgd import (
    LEVELS,
    SPECS,
    assert_gradients,
    drawn,
    gradients,
    make,
    program_of,
)

pytestmark = pytest.mark.usefixtures("as_users_write")


@pytest.mark.parametrize("spec", [P("fsdp", "data"), P("data", "fsdp")])
def test_two_levels_of_two_dimensions(spec):
    """Between hosts a device exchanges its part alone, whichever axis is divided so."""
    wire = Wire(("fsdp", "data"), jm.Transfers(gather="levels"), sum_wide=False)

    def exchange(x):
        whole = wire.gather(x, spec)
        return wire.scatter(whole, spec, x.dtype, wire.axis)

    x = np.arange(8 * 24, dtype=np.float32).reshape(8, 24)
    exchange = jax.jit(
        jax.shard_map(exchange, mesh=mesh_of(2, 2), in_specs=spec, out_specs=spec)
    )
    np.testing.assert_array_equal(exchange(x), 4 * x)
    sent = {c.kind: 0.0 for c in collectives(exchange, x)}
    for collective in collectives(exchange, x):
        sent[collective.kind] += collective.bytes_between_hosts(2)
    assert sent == {"all-gather": x.nbytes / 4, "reduce-scatter": x.nbytes / 4}


@pytest.mark.parametrize(
    ("given", "gathered", "summed"),
    [
        ({}, 1, 0),
        ({"transfers": jm.Transfers(keep_gathered=True)}, 1, 0),
        ({"microbatches": 2}, 2, 0),
        ({"transfers": jm.Transfers(gather="leaves")}, 0, 0),
        ({"transfers": jm.Transfers(gather="levels")}, 2, 2),
    ],
)
def test_plan_counts_what_layers_send(given, gathered, summed):
    """Between two hosts of two, but for the layers at an end, which are sent again."""
    given = {"axis": ("fsdp", "data"), "parameters": "divided"} | given
    step = make(losses.in_reverse, 2, 2, specs=None, **given)
    args = *step.abstract(losses.draw()), losses.samples()
    sent = collectives(step._step, *args)
    planned = jm.describe(step.tx, args[0], devices_per_host=2).bytes_between_hosts
    # Of a layer's (8, 8) and (8,): the ring over all four sends 3/4, through two cards.
    layer = 4 * (8 * 8 + 8) * (1 / 4 if summed else 3 / 8)
    for kind, what, again in (
        ("all-gather", "gathers", gathered),
        ("reduce-scatter", "gradients", summed),
    ):
        counted = sum(c.bytes_between_hosts(2) for c in sent if c.kind == kind)
        assert counted == planned[what] + again * layer > 0


def test_what_two_levels_cannot_do():
    """Hosts before devices in a spec, or one axis alone."""
    params, batch = drawn("float32")
    with pytest.raises(
        ValueError, match="expected with gather='levels' an axis within"
    ):
        make(losses.scan, transfers=jm.Transfers(gather="levels"))
    specs = SPECS | {"layers": {"w": P(None, ("data", "fsdp")), "b": P()}}
    step = make(losses.scan, 2, 2, specs=specs, **LEVELS)
    with pytest.raises(ValueError, match=r"'layers/w' has .* before 'fsdp'"):
        step(*step.init(params), batch)


@pytest.mark.parametrize(
    ("stored", "used"), [("float32", "bfloat16"), ("bfloat16", "float32")]
)
def test_casts_are_sent_in_the_narrower_dtype(stored, used):
    """And the sum of gradients of float32 masters is in their own dtype."""

    def loss(params, x):
        layers = jax.tree.map(lambda w: w.astype(used), params["layers"])
        x, _ = jax.lax.scan(lambda y, w: (losses._layer(y, w), None), x, layers)
        return jnp.mean(x.astype(jnp.float32) * params["scale"])

    batch, step = losses.samples().astype(used), make(loss)
    _, sent = program_of(step, batch, stored)
    assert {dtype for shape, dtype in sent if shape in ((8, 8), (8,))} == {"bfloat16"}
    bound = 1e-3 if stored == "float32" else 1e-2
    assert_gradients(step, loss, losses.draw(stored), batch, bound)


@pytest.mark.parametrize("wire", ["gather_dtype", "reduce_dtype"])
def test_dtypes_on_the_wire(wire):
    params, batch = drawn("float32")
    expected = jax.jit(jax.grad(losses.scan))(params, batch)
    how = jm.Transfers(**{wire: "bfloat16"})
    found, _, _ = gradients(make(losses.scan, transfers=how), params, batch)
    error = optax.tree.norm(jax.tree.map(jnp.subtract, found, expected))
    assert 1e-5 < error / optax.tree.norm(expected) < 2e-2


# --- without layers -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "parameters", "wire"),
    [
        ("ZeRO-2 x FSDP x TP", "as specs", "reduce_dtype"),
        ("ZeRO-2 on 4", "as specs", "gather_dtype"),
        ("ZeRO-2 on 4", "divided", "gather_dtype"),
    ],
)
def test_dtypes_of_whole_leaves(wire, where, parameters):
    """A CPU cannot sum 16 bits over some axes of a mesh, nor take the maximum."""
    params, weights = problems.draw("mixed")
    data = problems.batches(3)
    plain = problems.loss_of(weights)

    def loss(params, batch):
        aux = {"mean": batch.mean(), "largest": batch.max()}
        return plain(params, batch), jax.tree.map(lambda x: x.astype("bfloat16"), aux)

    given = {"where": where, "loss": loss, "parameters": parameters}
    given |= {"has_aux": True, "max_aux": "largest"}
    given |= {"tx": optax.sgd(0.1, momentum=0.9)}
    exact, coarse = (
        layouts.train_step_run(layouts.make_step(**given, transfers=how), params, data)[
            0
        ]
        for how in (jm.Transfers(), jm.Transfers(**{wire: jnp.bfloat16}))
    )
    assert 1e-6 < problems.distance(coarse, exact, params) < 2e-2  # roundings of 2^-9


def test_complex_numbers_keep_their_imaginary_parts_on_the_wire():
    def loss(params, batch):
        return jnp.mean(jnp.abs(params["w"]) ** 2) * jnp.mean(batch)

    params = {"w": jnp.full((8, 16), 1 + 2j)}
    given = {"tx": optax.sgd(64.0), "loss": loss}
    narrow = jm.Transfers(reduce_dtype="bfloat16", gather_dtype="bfloat16")
    given |= {"transfers": narrow}
    for parameters in ("as specs", "divided"):
        step = layouts.make_step("ZeRO-2 on 8", parameters=parameters, **given)
        after, _, _ = step(*step.init(params), jnp.ones(8))
        np.testing.assert_allclose(after["w"], 0 + 4j, atol=1e-6)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"gather": "always"}, "gather='always'; expected one of 'auto'"),
        ({"reduce_dtype": "int8"}, "reduce_dtype='int8'; expected"),
        ({"gather_dtype": "int8"}, "gather_dtype='int8'; expected"),
        ({"keep_gathered": 1}, "keep_gathered=1; expected True or False"),
    ],
)
def test_arguments_of_transfers(given, match):
    with pytest.raises(ValueError, match=match):
        jm.Transfers(**given)


@pytest.mark.parametrize("sizes", [(1,), (2, 1)])
def test_what_is_not_sent_is_not_rounded(sizes):
    """Over mesh axes of one device nothing travels, and bfloat16 would round it."""
    mesh = mesh_of(*sizes)
    one = mesh.axis_names[-1]
    params = {"w": jax.random.normal(jax.random.key(0), (8, 16))}
    batch = jax.random.normal(jax.random.key(1), (8, 8))
    tx = optax.sgd(0.1)

    def loss(params, batch):
        return jnp.mean((batch @ params["w"]) ** 2)

    grads = jax.grad(loss)(params, batch)
    expected = jax.jit(tx.update)(grads, tx.init(params), params)[0]
    on_mesh = jm.on_mesh(tx, mesh, P(), divide=one, min_size=1, gather_dtype="bfloat16")
    found = jax.jit(on_mesh.update)(grads, on_mesh.init(params), params)[0]
    np.testing.assert_array_equal(found["w"], expected["w"])
    narrow = jm.Transfers(reduce_dtype="bfloat16", gather_dtype="bfloat16")
    step = jm.make_train_step(loss, tx, mesh, axis=one, min_size=1, transfers=narrow)
    after, _, _ = step(*step.init(params), batch)
    # Products in another order; bfloat16 would be 1e-3 away.
    np.testing.assert_allclose(after["w"] - params["w"], expected["w"], atol=1e-6)


def test_a_piece_alone_plans_by_the_arrays():
    """Its reading has another shape; inside `partition` that is an error."""
    read = jm.read({"w": jnp.ones((64, 256))})
    piece = jm.orthogonalize(jm.PolarExpress(dtype="float32"), matrices=read)
    tx = jm.on_mesh(piece, mesh_of(4), P("data"))
    grads = {"w": jax.random.normal(jax.random.key(0), (256, 64))}
    expected, _ = piece.update(grads, piece.init(grads))
    found, _ = jax.jit(tx.update)(grads, tx.init(grads), grads)
    np.testing.assert_allclose(found["w"], expected["w"], atol=problems.BOUND * 10)
