"""One process of a training run over several, for test_processes.py.

    python -m tests.mesh.worker ID PROCESSES PORT DEVICES FOLDER LAYOUT [DIE_AT]

Trains a problem with `nanochat`, by ZeRO-2 or with divided parameters (LAYOUT zero2 or
fsdp), writes an orbax checkpoint after every second step, goes on from the last one if
there is one, and leaves losses.json and result.npz in FOLDER. With DIE_AT, it is killed
while it writes that checkpoint.
"""

import json
import os
import pathlib
import signal
import sys

import jax

STEPS = 10


def main(process, processes, port, devices, folder, layout, die_at=None):
    """Train, from the last checkpoint in the folder if there is one."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices)
    jax.distributed.initialize(f"127.0.0.1:{port}", processes, process)

    import numpy as np
    import orbax.checkpoint as ocp
    from jax.experimental import multihost_utils
    from jax.sharding import NamedSharding, PartitionSpec

    import jax_muon as jm
    from tests.mesh import case

    mesh = case.mesh_of(jax.device_count())
    divided = NamedSharding(mesh, PartitionSpec("data"))
    start, weights = case.draw("mixed")
    loss, data = case.loss_of(weights), np.asarray(case.batches(STEPS))
    specs = case.fitting(mesh, "data", None) if layout == "fsdp" else None
    step = jm.make_train_step(loss, case.recipe(), mesh, specs=specs, min_size=1)
    target = dict(zip(("params", "opt_state"), step.abstract(start), strict=True))

    folder = pathlib.Path(folder)
    options = ocp.CheckpointManagerOptions(max_to_keep=2)
    manager = ocp.CheckpointManager(folder / "checkpoints", options=options)
    done = manager.latest_step() or 0
    if done:
        restored = manager.restore(done, args=ocp.args.StandardRestore(target))
        params, state = restored["params"], restored["opt_state"]
    else:
        params, state = step.init(start)

    losses = {}
    for number in range(done + 1, STEPS + 1):
        local = np.split(data[number - 1], processes)[process]
        batch = jax.make_array_from_process_local_data(divided, local)
        params, state, metrics = step(params, state, batch)
        losses[number] = float(metrics["loss"])
        if number % 2 == 0:
            saved = {"params": params, "opt_state": state}
            manager.save(number, args=ocp.args.StandardSave(saved))
            if number == die_at:
                os.kill(os.getpid(), signal.SIGKILL)
    manager.wait_until_finished()
    manager.close()
    result = multihost_utils.process_allgather(params, tiled=True)
    if process == 0:
        (folder / "losses.json").write_text(json.dumps(losses))
        np.savez(folder / "result.npz", **result)
    jax.distributed.shutdown()


if __name__ == "__main__":
    *numbers, folder, layout = sys.argv[1:7]
    die_at = int(sys.argv[7]) if len(sys.argv) > 7 else None
    main(*map(int, numbers), folder, layout, die_at)
