"""What plans assume of devices: their rates, and how many of them share a host."""

import itertools

from jax.sharding import Mesh

# An H100 SXM in round figures: half of its peak in bfloat16, which is 989 TFLOP/s;
# NVLink, 900 GB/s both ways (https://www.nvidia.com/en-us/data-center/h100/); and one
# NIC of 400 Gb/s for each GPU, as in a DGX H100.
FLOPS = 500e12  # a second, of products
WITHIN_HOSTS = 450e9  # bytes a second, one way, between the GPUs of a host
BETWEEN_HOSTS = 50e9
SECONDS_TO_START = 10e-6  # of a collective
DEVICES_PER_HOST = 8


def devices_per_host(mesh: Mesh) -> int:
    """Neighbours on a mesh with fast links among them: a slice, or else eight.

    A slice counts if the mesh has several, of one size, each in one piece. The index of
    a process would not do: launchers may start one for each GPU.
    """
    slices = [getattr(device, "slice_index", None) for device in mesh.devices.flat]
    runs = [(index, len([*same])) for index, same in itertools.groupby(slices)]
    indices, sizes = ({*column} for column in zip(*runs, strict=True))
    in_pieces = None not in indices and len(indices) == len(runs) > 1
    return sizes.pop() if in_pieces and len(sizes) == 1 else DEVICES_PER_HOST
