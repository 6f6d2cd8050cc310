"""Several processes of one machine: how they are asked for, and how they end."""

import signal
import subprocess
import sys

import pytest


def launch(examples, *words):
    command = [sys.executable, examples / "launch.py", *words]
    return subprocess.run(command, capture_output=True, text=True)


def test_a_number_of_processes_that_is_none(examples):
    said = launch(examples, "0", "script.py").stderr
    assert "expected a number of processes, a script" in said
    assert "Traceback" not in said


def test_sigterm_ends_all_processes(tmp_path, examples):
    script = tmp_path / "script.py"
    script.write_text("""import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
print("ready", flush=True)
time.sleep(60)
""")
    command = [sys.executable, examples / "launch.py", "2", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as launcher:
        # Two processes write to one pipe, and their lines can interleave.
        assert launcher.stdout.read(2 * len("ready\n")).count("ready") == 2
        launcher.send_signal(signal.SIGTERM)
        # Their end of the pipe is closed when both are gone.
        assert launcher.communicate(timeout=30) == ("", None)
    assert launcher.returncode == 7


@pytest.mark.parametrize(
    ("ending", "how"),
    [("os.kill(os.getpid(), 9)", "by SIGKILL"), ("sys.exit('oh')", "with status 1")],
)
def test_says_which_process_ended_and_how(tmp_path, examples, ending, how):
    script = tmp_path / "script.py"
    script.write_text(
        f"import os, sys, time\nif '--process-id=1' in sys.argv: {ending}\n"
        "time.sleep(60)"
    )
    said = launch(examples, "2", script).stderr
    assert f"process 1 of 2 ended {how}" in said
    assert "add --resume" in said
    assert ("oh\n" in said) == ("oh" in ending)
