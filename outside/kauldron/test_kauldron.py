"""kauldron: its Trainer, sharded over eight devices as on one, and the patch."""

import dataclasses
import pathlib
import re

import jax
import numpy as np
import pytest
from flax import linen as nn
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from kauldron import kd
from kauldron.train.metric_writer import NoopWriter

import jax_muon as jm
from outside import patched
from tests import pages

SHARDED = kd.sharding.FSDPSharding(min_size_to_shard_mb=0)


def zero2(tx, params):
    """Replicated parameters with sharded state."""
    del params
    return {"optimizer": jm.on_mesh(tx, kd.sharding.DEVICES_MESH, divide="devices")}


PAGE = pages.run("kauldron")
LAYOUTS = {"fsdp": PAGE["sharded"], "zero2": zero2}


def images():
    """Images of rank 4, which an autoencoder of width 32 can learn."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((64, 4)) @ rng.standard_normal((4, 64)) / 2
    return {"image": x.reshape(64, 8, 8, 1).astype(np.float32)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Losses(NoopWriter):
    """Keeps the loss of every step."""

    losses: list = dataclasses.field(default_factory=list)

    def write_step_metrics(self, *, aux, **others):
        del others
        self.losses.append(float(aux.compute().loss_values["losses/total"]))


MODEL = kd.nn.FlatAutoencoder(
    inputs="batch.image",
    encoder=nn.Sequential([nn.Dense(32), nn.relu, nn.Dense(32)]),
    decoder=nn.Dense(64),
)
IMAGES = kd.data.InMemoryPipeline(loader=images, batch_size=64)


def train(workdir, **arguments):
    """The first and the last state of `kd.train.Trainer`, and the losses."""
    trainer = kd.train.Trainer(
        seed=0,
        workdir=workdir,
        train_ds=IMAGES,
        model=MODEL,
        train_losses={"l2": kd.losses.L2(preds="preds.image", targets="batch.image")},
        num_train_steps=7,
        log_metrics_every=1,
        writer=Losses(),
        **arguments,
    )
    start = jax.device_get(trainer.init_state().params)
    state, _ = trainer.train()
    return start, state, trainer.writer.losses


@pytest.fixture
def on_one_device(monkeypatch):
    """A function like `train` with kauldron's meshes of one device."""

    def train_alone(optimizer, workdir):
        with monkeypatch.context() as context:
            mesh = Mesh(jax.devices()[:1], ("devices",))
            for name, spec in {"REPLICATED": P(), "FIRST_DIM": P("devices")}.items():
                context.setitem(vars(kd.sharding), name, NamedSharding(mesh, spec))
            context.setitem(vars(kd.sharding), "DEVICES_MESH", mesh)
            return train(workdir, optimizer=optimizer)

    return train_alone


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("recipe", [jm.nanochat, jm.muon])
def test_trainer(recipe, layout, on_one_device, tmp_path):
    """Eight steps on eight devices and on one, to 1e-4 of the distance travelled."""
    matrices = PAGE["reading"](MODEL, IMAGES)
    adamw = jm.adamw(3e-4, 0.8, 0.95, weight_decay=0.0)
    tx = recipe(0.02, adamw=adamw, dtype="float32", matrices=matrices)
    start, alone, losses = on_one_device(tx, tmp_path)
    again, state, found = train(tmp_path, **LAYOUTS[layout](tx, SHARDED))
    assert len(losses) == 8
    assert losses[-1] < 0.8 * losses[0]
    np.testing.assert_allclose(found, losses, rtol=1e-4)
    jax.tree.map(np.testing.assert_array_equal, again, start)
    one, many = jax.device_get((alone.params, state.params))
    moved = norm(jax.tree.map(np.subtract, one, start))
    assert norm(jax.tree.map(np.subtract, many, one)) < 1e-4 * moved
    smallest = 2 if layout == "fsdp" else 1024  # `min_size` of `on_mesh`
    large = [x for x in jax.tree.leaves(state.opt_state) if x.size >= smallest]
    assert len(large) > 3
    assert all("devices" in x.sharding.spec for x in large)
    assert all(
        ("devices" in leaf.sharding.spec) == (layout == "fsdp")
        for leaf in jax.tree.leaves(state.params)
    )


def norm(tree):
    return float(np.sqrt(sum(np.sum(x**2.0) for x in jax.tree.leaves(tree))))


def test_patch(tmp_path):
    """A configuration names the recipe and trains with parameters sharded."""
    patched.copy("kauldron", tmp_path)
    config = pathlib.Path(__file__).parent / "config.py"
    printed = patched.run(tmp_path, config, tmp_path / "work")
    losses = re.search("losses: (.*)", printed)[1]
    first, *_, last = map(float, losses.split())
    assert last < 0.8 * first
    momenta = dict(re.findall(r"muon/.*/mu/(\S+) .* spec=(.*), ", printed))
    assert momenta.keys() == {f"encoder/layers_{i}/kernel" for i in (0, 2)}
    assert all("devices" in spec for spec in momenta.values())
