"""Several processes: a run that survives a kill, and ends as one on one device.

    python -m tests.mesh.test_processes ID PROCESSES PORT DEVICES FOLDER LAYOUT [DIE_AT]

is one of the processes. It trains a problem with `nanochat`, by ZeRO-2 or with divided
parameters (LAYOUT zero2 or fsdp), writes an orbax checkpoint after every second step,
goes on from the last one if there is one, and leaves losses.json and result.npz in
FOLDER. With DIE_AT, it is killed while it writes that checkpoint.
"""

import json
import os
import pathlib
import signal
import socket
import subprocess
import sys

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_muon as jm
from tests.mesh import case

ROOT = pathlib.Path(__file__).parents[2]
STEPS = 10


def train(process, processes, port, devices, folder, layout, die_at=None):
    """Train, from the last checkpoint in the folder if there is one."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices)
    jax.distributed.initialize(f"127.0.0.1:{port}", processes, process)
    mesh = case.mesh_of(jax.device_count())
    divided = NamedSharding(mesh, P("data"))
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


def launch(processes, devices, folder, layout, *die_at):
    """Run the processes to their end, and return their exit codes and errors."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", __name__]
    words = [*map(str, (processes, port, devices, folder, layout, *die_at))]
    started = [
        subprocess.Popen(
            [*command, str(i), *words], cwd=ROOT, stderr=subprocess.PIPE, text=True
        )
        for i in range(processes)
    ]
    errors = [process.communicate(timeout=300)[1] for process in started]
    return [process.returncode for process in started], errors


def test_a_killed_run_goes_on_elsewhere(tmp_path):
    """Killed while it writes the checkpoint of step 6, ZeRO-2 goes on as FSDP."""
    codes, errors = launch(2, 2, tmp_path, "zero2", 6)
    assert all(code != 0 for code in codes), errors
    assert not (tmp_path / "result.npz").exists()
    names = [entry.name for entry in (tmp_path / "checkpoints").iterdir()]
    assert "4" in names
    last = max(int(name) for name in names if name.isdigit())

    codes, errors = launch(2, 4, tmp_path, "fsdp")
    assert codes == [0, 0], errors
    start, expected, losses = case.one_device(steps=STEPS)
    result = dict(np.load(tmp_path / "result.npz"))
    assert case.distance(result, expected, start) < case.BOUND
    got = json.loads((tmp_path / "losses.json").read_text())
    assert [*map(int, got)] == [*range(last + 1, STEPS + 1)]
    np.testing.assert_allclose([*got.values()], losses[last:], atol=1e-5, rtol=1e-5)


if __name__ == "__main__":
    *numbers, folder, layout = sys.argv[1:7]
    die_at = int(sys.argv[7]) if len(sys.argv) > 7 else None
    train(*map(int, numbers), folder, layout, die_at)
