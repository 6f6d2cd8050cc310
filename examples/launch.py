"""Starts a script as several processes of this machine, which connect to each other.

    python examples/launch.py 2 examples/train_gpt.py --sharding zero2 --devices 4

A cluster does the same for real: see docs/many_devices.md. If one process fails, all
are stopped. Ctrl-C reaches all of them, and they end by themselves.
"""

import signal
import socket
import subprocess
import sys
import time


def main() -> None:
    count, *command = int(sys.argv[1]), *sys.argv[2:]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    flags = ["--distributed", f"--coordinator={address}", f"--processes={count}"]
    processes = [
        subprocess.Popen([sys.executable, *command, *flags, f"--process-id={number}"])
        for number in range(count)
    ]
    signal.signal(signal.SIGINT, lambda number, frame: None)
    while any(process.poll() is None for process in processes):
        if any(process.poll() for process in processes):
            for process in processes:
                process.kill()
        time.sleep(0.1)
    sys.exit(max(abs(process.returncode) for process in processes))


if __name__ == "__main__":
    main()
