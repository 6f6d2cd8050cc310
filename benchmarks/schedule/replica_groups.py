"""Which devices take part in a collective, as the text of an HLO instruction says."""

import math
import re

import numpy as np

# Groups of devices are listed, {{0,1},{2,3}}, or rows of a range that may have been
# transposed, [2,4]<=[4,2]T(1,0), or axes of a mesh of such a range:
# mesh['x'=2,'y'=4], device_ids=([4,2]T(1,0)) {'y'}.
_RANGE = r"\[([0-9,]+)\](?:T\(([0-9,]+)\))?"
_LISTED = re.compile(r"replica_groups=\{\{([0-9,]*)\}")
_ROWS = re.compile(r"replica_groups=\[\d+,(\d+)\]<=" + _RANGE)
_MESH = re.compile(
    r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(" + _RANGE + r"\))? \{([^}]*)\}"
)


def first_group(text: str) -> tuple[int, ...]:
    """The first group of devices that a collective runs over."""
    if listed := _LISTED.search(text):
        return tuple(int(device) for device in listed[1].split(","))
    if rows := _ROWS.search(text):
        return tuple(_range(rows[2], rows[3])[: int(rows[1])].tolist())
    if mesh := _MESH.search(text):
        sizes = {name: int(n) for name, n in re.findall(r"'([^']+)'=(\d+)", mesh[1])}
        names = re.findall(r"'([^']+)'", mesh[4])
        all_devices = ",".join(str(size) for size in sizes.values())
        devices = _range(mesh[2] or all_devices, mesh[3]).reshape(*sizes.values())
        here = tuple(slice(None) if name in names else 0 for name in sizes)
        return tuple(devices[here].flat)
    raise ValueError(f"a collective without replica_groups that we can read: {text}")


def _range(shape: str, axes: str | None) -> np.ndarray:
    """0, 1, 2 ... in this shape, transposed to these axes, in one row."""
    sizes = [int(size) for size in shape.split(",")]
    numbers = np.arange(math.prod(sizes)).reshape(sizes)
    order = None if axes is None else [int(axis) for axis in axes.split(",")]
    return (numbers if order is None else numbers.transpose(order)).reshape(-1)
