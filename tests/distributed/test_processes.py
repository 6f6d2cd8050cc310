"""Several processes: the parameters of one device, and runs that survive a kill."""

import json
import pathlib
import shutil
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest

from tests.distributed import problems, worker

ROOT = pathlib.Path(__file__).parents[2]


def launch(processes, devices, folder, layout, *die_at):
    """Run the workers to their end, and return their exit codes and errors."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tests.distributed.worker"]
    words = [processes, port, devices, folder, layout, *die_at]
    workers = [
        subprocess.Popen(
            [*command, str(i), *map(str, words)],
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(processes)
    ]
    errors = [worker.communicate(timeout=300)[1] for worker in workers]
    return [worker.returncode for worker in workers], errors


@pytest.fixture(scope="module")
def one_device():
    """Start, end and losses of the recipe on one device."""
    params, weights = problems.draw("mixed")
    loss, data = problems.loss_of(weights), problems.batches(worker.STEPS)
    result, _, losses = problems.single_device(worker.optimizer(), loss, params, data)
    return params, jax.device_get(result), losses


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """A ZeRO-2 run of two processes, killed while it writes the checkpoint of step 6.

    That of step 4 is whole.
    """
    folder = tmp_path_factory.mktemp("killed")
    codes, errors = launch(2, 2, folder, "zero2", 6)
    assert all(code != 0 for code in codes), errors
    assert not (folder / "result.npz").exists()
    names = [entry.name for entry in (folder / "checkpoints").iterdir()]
    assert "4" in names
    return folder, max(int(name) for name in names if name.isdigit())


@pytest.mark.parametrize(
    ("processes", "devices", "layout"), [(1, 8, "zero2"), (2, 4, "fsdp")]
)
def test_a_killed_run_goes_on_elsewhere(
    tmp_path, one_device, killed, processes, devices, layout
):
    """Steps on both sides of the kill, in one process and in two, are one device's."""
    folder, last = killed
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    codes, errors = launch(processes, devices, tmp_path, layout)
    assert codes == [0] * processes, errors
    start, expected, losses = one_device
    result = dict(np.load(tmp_path / "result.npz"))
    assert problems.distance(result, expected, start) < 5e-6
    got = json.loads((tmp_path / "losses.json").read_text())
    assert [*map(int, got)] == [*range(last + 1, worker.STEPS + 1)]
    np.testing.assert_allclose([*got.values()], losses[last:], atol=1e-5, rtol=1e-5)
