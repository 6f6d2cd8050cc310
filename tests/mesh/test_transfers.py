"""How arrays are sent: in two levels, in narrow dtypes, as many bytes as planned."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jax_muon as jm
from tests.mesh import layouts, losses, problems
from tests.mesh.layouts import mesh_of
from tests.mesh.sgd import drawn, gradients, make
from tests.reading import reader

pytestmark = pytest.mark.usefixtures("as_users_write")


@pytest.mark.parametrize("wire", ["gather_dtype", "reduce_dtype"])
def test_dtypes_on_the_wire(wire):
    params, batch = drawn("float32")
    expected = jax.jit(jax.grad(losses.plain))(params, batch)
    found, _ = gradients(make(losses.plain, **{wire: "bfloat16"}), params, batch)
    error = optax.tree.norm(jax.tree.map(jnp.subtract, found, expected))
    assert 1e-5 < error / optax.tree.norm(expected) < 2e-2


# --- without layers -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "divided", "wire"),
    [
        ("HSDP", False, "reduce_dtype"),
        ("ZeRO-2 on 4", False, "gather_dtype"),
        ("ZeRO-2 on 4", True, "gather_dtype"),
    ],
)
def test_dtypes_of_whole_leaves(wire, where, divided):
    """A CPU cannot sum 16 bits over some axes of a mesh, nor take the maximum."""
    params, weights = problems.draw("mixed")
    data = problems.batches(3)
    plain = problems.loss_of(weights)

    def loss(params, batch):
        aux = {"mean": batch.mean(), "largest": batch.max()}
        return plain(params, batch), jax.tree.map(lambda x: x.astype("bfloat16"), aux)

    given = {"where": where, "loss": loss, "divided": divided}
    given |= {"has_aux": True, "max_aux": "largest"}
    given |= {"tx": optax.sgd(0.1, momentum=0.9)}
    exact, coarse = (
        layouts.train_step_run(layouts.make_step(**given, **how), params, data)[0]
        for how in ({}, {wire: jnp.bfloat16})
    )
    assert 1e-6 < problems.distance(coarse, exact, params) < 2e-2  # roundings of 2^-9


def test_complex_numbers_keep_their_imaginary_parts_on_the_wire():
    def loss(params, batch):
        return jnp.mean(jnp.abs(params["w"]) ** 2) * jnp.mean(batch)

    params = {"w": jnp.full((8, 16), 1 + 2j)}
    given = {"tx": optax.sgd(64.0), "loss": loss}
    given |= {"reduce_dtype": "bfloat16", "gather_dtype": "bfloat16"}
    for specs in (None, P("data")):
        step = jm.make_train_step(
            loss,
            given["tx"],
            mesh_of(8),
            specs=specs,
            min_size=1,
            reduce_dtype="bfloat16",
            gather_dtype="bfloat16",
        )
        after, _, _ = step(*step.init(params), jnp.ones(8))
        np.testing.assert_allclose(after["w"], 0 + 4j, atol=1e-6)


@pytest.mark.parametrize("sizes", [(1,), (1, 1)])
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
    narrow = {"reduce_dtype": "bfloat16", "gather_dtype": "bfloat16"}
    step = jm.make_train_step(loss, tx, mesh, min_size=1, **narrow)
    after, _, _ = step(*step.init(params), batch)
    # Products in another order; bfloat16 would be 1e-3 away.
    np.testing.assert_allclose(after["w"] - params["w"], expected["w"], atol=1e-6)


def test_a_piece_alone_plans_by_the_arrays():
    """Its reading has another shape; inside `partition` that is an error."""
    read = reader()({"w": jnp.ones((64, 256))})
    piece = jm.orthogonalize(jm.PolarExpress(dtype="float32"), matrices=read)
    tx = jm.on_mesh(piece, mesh_of(4), P("data"))
    grads = {"w": jax.random.normal(jax.random.key(0), (256, 64))}
    expected, _ = piece.update(grads, piece.init(grads))
    found, _ = jax.jit(tx.update)(grads, tx.init(grads), grads)
    np.testing.assert_allclose(found["w"], expected["w"], atol=problems.BOUND * 10)
