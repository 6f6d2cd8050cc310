"""Flax linen: scanned layers, sharded parameters, and a checkpoint.

nn.scan gives every parameter of a block a leading axis of layers, so a kernel (4, 64,
128) is read as four matrices. Kernels have logical axes, which the rules map to the
mesh. Parameters stay in their nn.LogicallyPartitioned boxes: labels, recipes and the
table see through them, and the momentum keeps them, so that it is sharded like its
parameter. Training runs in plain jit. Halfway the state is saved, and a restored state
does the rest.

    python examples/flax/train_linen.py runs/linen

Eight CPU devices simulate accelerators.
"""

import pathlib
import sys
from functools import partial
from typing import Any

import jax
import orbax.checkpoint as ocp
from digits import IMAGE, STEPS, batches, cross_entropy, make_optimizer, report
from flax import linen as nn
from flax.training.train_state import TrainState
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import jax_muon as jm

LAYERS = 4
RULES = (("layers", None), ("embed", "data"), ("mlp", "model"))


class Block(nn.Module):
    """(batch, 64) to (batch, 64), in the form that nn.scan takes."""

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        init = nn.initializers.lecun_normal()
        up = nn.with_logical_partitioning(init, ("embed", "mlp"))
        down = nn.with_logical_partitioning(init, ("mlp", "embed"))
        y = nn.relu(nn.Dense(128, kernel_init=up, name="up")(nn.RMSNorm()(x)))
        return x + nn.Dense(64, kernel_init=down, name="down")(y), None


class Stack(nn.Module):
    """Images (batch, 64) to logits (batch, 10)."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        blocks = nn.scan(
            Block,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=LAYERS,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )
        x, _ = blocks(name="blocks")(x, None)
        return nn.Dense(10, name="head")(x)


def init(key: jax.Array) -> dict:
    return Stack().init(key, jax.numpy.zeros((1, 64)))["params"]


def divided(tree: Any, mesh: Mesh) -> Any:
    """A sharding for each parameter of a tree, by its logical axes."""
    return nn.logical_to_mesh_sharding(nn.get_partition_spec(tree), mesh, RULES)


def with_sharding(x: jax.ShapeDtypeStruct, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def train_step(
    state: TrainState, images: jax.Array, labels: jax.Array
) -> tuple[TrainState, jax.Array]:
    loss, grads = jax.value_and_grad(
        lambda params: cross_entropy(state.apply_fn({"params": params}, images), labels)
    )(state.params)
    return state.apply_gradients(grads=grads), loss


def main(folder: pathlib.Path) -> tuple[TrainState, list[float]]:
    """Trains; returns the state and the loss at each step."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=2 * (AxisType.Auto,))
    checkpointer = ocp.StandardCheckpointer()
    with jax.set_mesh(mesh), nn.logical_axis_rules(RULES), checkpointer:
        key = jax.random.key(0)
        params = jax.eval_shape(init, key)
        matrices = jm.find_matrices(
            params, lambda p, x: Stack().apply({"params": p}, x), IMAGE
        )
        tx = jm.on_mesh(make_optimizer(matrices), divided(params, mesh))
        print(jm.describe(tx, params))

        def create(key: jax.Array) -> TrainState:
            return TrainState.create(apply_fn=Stack().apply, params=init(key), tx=tx)

        shapes = jax.eval_shape(create, key)
        shardings = divided(shapes, mesh)
        structure = jax.tree.structure(shapes)
        target = jax.tree.unflatten(  # with its boxes, which shardings lack
            structure,
            map(with_sharding, jax.tree.leaves(shapes), jax.tree.leaves(shardings)),
        )
        state = jax.jit(create, out_shardings=shardings)(key)
        jitted = partial(jax.jit, out_shardings=(shardings, None))(train_step)
        losses = []
        for step, batch in enumerate(batches()):
            if step == STEPS // 2:
                saved = folder.absolute() / str(step)
                checkpointer.save(saved, state, force=True)
                checkpointer.wait_until_finished()
                state = checkpointer.restore(saved, target)
            state, loss = jitted(state, *jax.device_put(batch, P("data")))
            losses.append(loss)
        return state, report(losses)


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    main(pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "runs/linen"))
