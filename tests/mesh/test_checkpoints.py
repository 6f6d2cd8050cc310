"""Orbax: saved in one layout, restored by `abstract_state` in another, bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_muon as jm
from tests.mesh import case
from tests.mesh.case import AUTO, EXPLICIT, recipe


def through_orbax(folder, saved, target):
    """Save a tree and restore it: the same bits, sharded as the target says."""
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "step", saved)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(folder / "step", target)
    assert jax.tree.structure(restored) == jax.tree.structure(saved)
    leaves = map(jax.tree.leaves, (restored, saved, target))
    for x, before, want in zip(*leaves, strict=True):
        assert (x.dtype, x.sharding) == (want.dtype, want.sharding)
        assert np.asarray(x).tobytes() == np.asarray(before).tobytes()
    return restored


def abstract(params, shardings):
    """Shapes, dtypes and shardings of parameters."""
    shape = lambda x, y: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=y)  # noqa: E731
    return jax.tree.map(shape, params, shardings)


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
def test_from_zero2_to_fsdp_x_tp(tmp_path, kind):
    """From eight devices to 4 x 2; then the run ends where one device does."""
    start, _, _ = expected = case.one_device(steps=4)
    loss, data = case.loss_of(case.draw("mixed")[1]), case.batches(4)
    layout = case.layout("ZeRO-2 on 8", kind)
    tx, params = layout.on(recipe()), layout.place(start)
    with jax.set_mesh(layout.mesh):
        run = params, tx.init(params), data[:2]
        params, state, values = case.run(case.plain_step(tx, loss), *run)
    layout = case.layout("FSDP x TP", kind)
    tx = layout.on(recipe())
    shapes = abstract(start, case.at(layout.mesh, layout.specs(start)))
    target = {"params": shapes, "state": tx.abstract_state(shapes)}
    assert any(x.sharding.spec == P("fsdp", "tp") for x in jax.tree.leaves(target))
    restored = through_orbax(tmp_path, {"params": params, "state": state}, target)
    with jax.set_mesh(layout.mesh):
        run = restored["params"], restored["state"], data[2:]
        params, _, more = case.run(case.plain_step(tx, loss), *run)
    case.assert_same(params, values + more, expected)


def test_nnx_optimizer_from_zero2_to_fsdp_x_tp(tmp_path):
    """The same for the variables of a model and of its `nnx.Optimizer`."""
    x, y = np.random.default_rng(0).standard_normal((2, 16, 64)).astype(np.float32)

    def build():
        layers = [nnx.Linear(64, 64, rngs=nnx.Rngs(seed)) for seed in range(3)]
        return nnx.Sequential(*layers)

    def loss_fn(model, x, y):
        return jnp.mean((model(x) - y) ** 2)

    @nnx.jit
    def train_step(model, optimizer):
        loss, grads = nnx.value_and_grad(loss_fn)(model, x, y)
        optimizer.update(model, grads)
        return loss

    def on(spec, *shape, **divide):
        """A model on a mesh, its optimizer, and what Orbax restores into them."""
        mesh, model = case.mesh_of(*shape, names=("fsdp", "tp")), build()
        params = nnx.state(model, nnx.Param)
        where = jax.tree.map(
            lambda x: NamedSharding(mesh, spec if x.ndim > 1 else P()), params
        )
        nnx.update(model, jax.device_put(params, where))
        tx = jm.on_mesh(recipe(matrices=matrices), where, min_size=1, **divide)
        target = {"params": abstract(params, where), "state": tx.abstract_state(params)}
        return model, nnx.Optimizer(model, tx, wrt=nnx.Param), nnx.as_pure(target)

    def of(model, optimizer):
        tree = {"params": nnx.state(model, nnx.Param), "state": optimizer.opt_state}
        return nnx.as_pure(tree)

    matrices = jm.find_matrices(build(), loss_fn, x, y)
    one = on(P(), 1)[:2]
    expected = [train_step(*one) for _ in range(4)]
    model, optimizer, _ = on(P(), 8, divide="fsdp")
    values = [train_step(model, optimizer) for _ in range(2)]
    saved = of(model, optimizer)
    model, optimizer, target = on(P("fsdp", "tp"), 4, 2)
    restored = through_orbax(tmp_path, saved, target)
    nnx.update(model, restored["params"])
    nnx.update(optimizer.opt_state, nnx.state(restored["state"]))
    values += [train_step(model, optimizer) for _ in range(2)]
    np.testing.assert_allclose(values, expected, rtol=case.BOUND)
