"""Pallas kernels for GPUs, each beside the plain-JAX function that it replaces."""
