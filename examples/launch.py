"""Starts a script as several processes of this machine, which connect to each other.

    python examples/launch.py 2 examples/train_gpt.py --sharding zero2 --devices 4

A cluster does the same for real: see docs/many_devices.md. If one process fails, all
are stopped. Ctrl-C reaches all of them, a SIGTERM is passed on, and they end by
themselves.
"""

import signal
import socket
import subprocess
import sys
import tempfile
import time

WRONG_OPTION = 2  # the status that argparse exits with


def main() -> None:
    if len(sys.argv) < 3 or not sys.argv[1].isdecimal() or not int(sys.argv[1]):
        sys.exit(
            f"error: {' '.join(sys.argv)}; expected a number of processes, a script "
            "and its options"
        )
    count, *command = int(sys.argv[1]), *sys.argv[2:]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    flags = ["--distributed", f"--coordinator={address}", f"--processes={count}"]
    # All processes refuse a wrong option, and the first says so.
    others = [tempfile.TemporaryFile() for _ in range(1, count)]  # noqa: SIM115
    errors = [sys.stderr, *others]
    processes, asked = [], []

    def stop(number, frame):
        asked.append(number)
        if number == signal.SIGTERM:
            for process in processes:
                process.send_signal(number)

    for number in (signal.SIGINT, signal.SIGTERM):  # before there is a process
        signal.signal(number, stop)
    for number, file in enumerate(errors):
        words = [sys.executable, *command, *flags, f"--process-id={number}"]
        processes.append(subprocess.Popen(words, stderr=file))
    first = None
    while any(process.poll() is None for process in processes):
        failed = [i for i, process in enumerate(processes) if process.poll()]
        if failed and not asked:
            first = failed[0] if first is None else first
            for process in processes:
                process.kill()
        time.sleep(0.1)
    codes = [process.returncode for process in processes]
    if first is not None and codes[first] != WRONG_OPTION:
        if first:
            errors[first].seek(0)
            sys.stderr.write(errors[first].read().decode(errors="replace"))
        how = f"with status {codes[first]}"
        if codes[first] < 0:
            how = f"by {signal.Signals(-codes[first]).name}"
        sys.stderr.write(
            f"process {first} of {count} ended {how}, and the others were stopped; add "
            "--resume to continue from the last checkpoint\n"
        )
    sys.exit(max(abs(code) for code in codes))


if __name__ == "__main__":
    main()
