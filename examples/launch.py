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
import time


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
    processes = [
        subprocess.Popen([sys.executable, *command, *flags, f"--process-id={number}"])
        for number in range(count)
    ]
    asked = []

    def stop(number, frame):
        asked.append(number)
        if number == signal.SIGTERM:
            for process in processes:
                process.send_signal(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    while any(process.poll() is None for process in processes):
        if any(process.poll() for process in processes) and not asked:
            for process in processes:
                process.kill()
        time.sleep(0.1)
    sys.exit(max(abs(process.returncode) for process in processes))


if __name__ == "__main__":
    main()
