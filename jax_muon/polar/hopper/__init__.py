"""Symmetric products as kernels for NVIDIA's Hopper GPUs (H100, H200).

A matrix product computes both triangles of X X^T and of a I + b R + c R R. The kernels
compute the tiles of the lower one and store each tile twice, the second time
transposed. Nothing but a polar factor that takes them imports them.
"""

import jax

# The newest jax that the kernels are tested with. Pallas's Mosaic GPU backend changes
# between versions, so a newer one takes them only with kernels=True.
NEWEST_JAX = (0, 12)
# Fewest rows for which the kernels win, of those tried. R and P of 48 matrices with
# 384 rows take 53 microseconds together on an H200, and 59 without kernels; with 768
# rows 146 and 201, with 2048 rows 3300 and 5700 of 96 matrices.
MIN_ROWS = 384


def takes_kernels(kernels: bool | None, m: int) -> bool:
    """Decide whether bfloat16 matrices (m, n), m <= n, take the kernels.

    With None they do where every GPU here is a Hopper, and jax is one that they are
    tested with. With True they do without a GPU, too, in programs for another machine.
    """
    gpus = jax.devices() if jax.default_backend() == "gpu" else []
    found = {getattr(gpu, "compute_capability", "unknown") for gpu in gpus}
    if kernels and found - {"9.0"}:
        raise ValueError(
            f"kernels=True on GPUs of compute capability {', '.join(sorted(found))}; "
            "expected 9.0 (H100, H200), or kernels=None"
        )
    if kernels is None:
        kernels = found == {"9.0"} and jax.__version_info__[:2] <= NEWEST_JAX
    return kernels and m >= MIN_ROWS
