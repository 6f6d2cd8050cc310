"""A configuration that asks for the patch's `kd.optim.jax_muon`, and its run."""

import sys

import jax
from kauldron import konfig

with konfig.imports():
    import optax
    import test_kauldron
    from flax import linen as nn
    from kauldron import kd


def get_config(workdir):
    """As kauldron's own examples have it."""
    cfg = kd.train.Trainer()
    cfg.seed = 0
    cfg.workdir = workdir
    cfg.train_ds = kd.data.InMemoryPipeline(loader=test_kauldron.images, batch_size=64)
    cfg.model = kd.nn.FlatAutoencoder(
        inputs="batch.image",
        encoder=nn.Sequential(
            layers=[
                nn.Dense(features=32),
                kd.nn.Dropout(rate=0.1),
                nn.Dense(features=32),
            ]
        ),
        decoder=nn.Dense(features=64),
    )
    cfg.train_losses = {"l2": kd.losses.L2(preds="preds.image", targets="batch.image")}
    cfg.num_train_steps = 7
    cfg.log_metrics_every = 1
    cfg.sharding = kd.sharding.ShardingStrategy(
        params=kd.sharding.FSDPSharding(min_size_to_shard_mb=0)
    )
    cfg.schedules = {"rate": optax.linear_schedule(0.03, 0.01, 8)}
    cfg.optimizer = kd.optim.jax_muon(
        recipe="nanochat",
        model=cfg.ref.model,
        train_ds=cfg.ref.train_ds,
        learning_rate=cfg.ref.schedules["rate"],
        adamw=optax.adamw(3e-4, b1=0.8, b2=0.95, weight_decay=0.0),
        sharding=cfg.ref.sharding.params,
        dtype="float32",
    )
    cfg.writer = test_kauldron.Losses()
    return cfg


if __name__ == "__main__":
    trainer = konfig.resolve(get_config(sys.argv[1]))
    state, _ = trainer.train()
    for path, leaf in jax.tree_util.tree_leaves_with_path(state.opt_state):
        print(jax.tree_util.keystr(path, simple=True, separator="/"), leaf.sharding)
    print("losses:", *trainer.writer.losses)
