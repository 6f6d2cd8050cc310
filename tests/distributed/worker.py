"""One process of a training run over several, for test_processes.py.

    python -m tests.distributed.worker ID PROCESSES PORT DEVICES FOLDER [DIE_AT]

Trains a problem with `nanochat(zero2_axis="data")`, writes an orbax checkpoint after
every second step, goes on from the last one if there is one, and leaves losses.json
and result.npz in FOLDER. With DIE_AT, it is killed while it writes that checkpoint.
"""

import json
import os
import pathlib
import signal
import sys

import jax


def main(process, processes, port, devices, folder, die_at=None):
    """Train, from the last checkpoint in the folder if there is one."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices)
    jax.distributed.initialize(f"127.0.0.1:{port}", processes, process)

    import numpy as np
    import optax
    import orbax.checkpoint as ocp
    from jax.sharding import AxisType, NamedSharding, PartitionSpec

    import jax_muon as jm
    from tests.distributed import problems

    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    replicated = NamedSharding(mesh, PartitionSpec())
    divided = NamedSharding(mesh, PartitionSpec("data"))
    start, weights = problems.draw("mixed")
    data = np.asarray(problems.batches(20))
    tx = jm.nanochat(
        optax.linear_schedule(0.02, 0.01, 10),
        dtype="float32",
        adamw_eps=1e-6,
        zero2_axis="data",
    )
    params = jax.device_put(start, replicated)
    step = jm.make_train_step(problems.loss_of(weights), tx, mesh, donate=False)

    folder = pathlib.Path(folder)
    options = ocp.CheckpointManagerOptions(max_to_keep=2)
    manager = ocp.CheckpointManager(folder / "checkpoints", options=options)
    done = manager.latest_step() or 0
    if done:
        target = {
            "params": jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated),
                start,
            ),
            "opt_state": jm.abstract_portable(tx, start, mesh),
        }
        restored = manager.restore(done, args=ocp.args.StandardRestore(target))
        params = restored["params"]
        state = jm.from_portable(tx, start, restored["opt_state"], mesh)
    else:
        state = jm.init_optimizer(tx, params, mesh)

    losses = {}
    for number in range(done + 1, len(data) + 1):
        whole = data[number - 1]
        share = len(whole) // processes
        local = whole[process * share : (process + 1) * share]
        batch = jax.make_array_from_process_local_data(divided, local)
        params, state, metrics = step(params, state, batch)
        losses[number] = float(metrics["loss"])
        if number % 2 == 0:
            saved = {"params": params, "opt_state": jm.to_portable(state)}
            manager.save(number, args=ocp.args.StandardSave(saved))
            if number == die_at:
                os.kill(os.getpid(), signal.SIGKILL)
    manager.wait_until_finished()
    manager.close()
    if process == 0:
        (folder / "losses.json").write_text(json.dumps(losses))
        np.savez(folder / "result.npz", **jax.device_get(params))
    jax.distributed.shutdown()


if __name__ == "__main__":
    *numbers, folder = sys.argv[1:6]
    die_at = int(sys.argv[6]) if len(sys.argv) > 6 else None
    main(*map(int, numbers), folder, die_at)
