"""Several processes: a run that survives a kill, and ends as one on one device."""

import json
import pathlib
import socket
import subprocess
import sys

import numpy as np

from tests.mesh import case, worker

ROOT = pathlib.Path(__file__).parents[2]


def launch(processes, devices, folder, layout, *die_at):
    """Run the workers to their end, and return their exit codes and errors."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tests.mesh.worker"]
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
    start, expected, losses = case.one_device(steps=worker.STEPS)
    result = dict(np.load(tmp_path / "result.npz"))
    assert case.distance(result, expected, start) < 5e-6
    got = json.loads((tmp_path / "losses.json").read_text())
    assert [*map(int, got)] == [*range(last + 1, worker.STEPS + 1)]
    np.testing.assert_allclose([*got.values()], losses[last:], atol=1e-5, rtol=1e-5)
