"""Symmetric products as kernels for NVIDIA's Hopper GPUs (H100, H200).

A matrix product computes both triangles of X X^T and of b A + c A A. These kernels
compute the tiles of the lower one and store each tile twice, the second time
transposed. `symmetric="kernel"` of a polar factor imports them, and nothing else does:
they are compiled and checked in Pallas's interpreter, but not yet run on a GPU.
"""

from jax_muon.polar.hopper.products import HopperProducts, gram, quadratic

__all__ = ["HopperProducts", "gram", "quadratic"]
