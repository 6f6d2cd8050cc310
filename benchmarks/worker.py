"""One contender in a process of its own, for `benchmarks.step`.

    python -m benchmarks.worker '{"name": "nanochat", "model": "6x384", ...}'

It prints a line of JSON when it is ready, then the seconds of a step for each line that
it reads. Own processes: torch and JAX would share threads, and torch is tuned by
variables that only a new process reads.
"""

import json
import sys
from typing import Any


def main(settings: dict[str, Any]) -> None:
    """Serve until the input ends."""
    contender: Any
    if settings["name"].startswith("torch"):
        from benchmarks.torch_contenders import TorchContender

        contender = TorchContender(
            settings["name"], settings["model"], settings["dtype"], settings["device"]
        )
    else:
        from benchmarks.contenders import JaxContender

        contender = JaxContender(
            settings["name"],
            settings["model"],
            settings["layout"],
            settings["dtype"],
            in_train_step=settings.get("in_train_step", True),
            cublas=settings.get("cublas", False),
        )
    contender.step()  # the first touch of all memory
    contender.info["peak_bytes"] = contender.peak_bytes()
    print(json.dumps(contender.info), flush=True)
    for _ in sys.stdin:
        print(contender.step(), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
