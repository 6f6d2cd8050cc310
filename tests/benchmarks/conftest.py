"""Benchmarks train models, as the examples do, and compile for GPUs if they can."""

import importlib.util

import pytest

from tests.examples.conftest import as_users_write

__all__ = ["as_users_write"]

needs_gpu_compiler = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None,
    reason="the compiler for GPUs is not installed: make .venv/gpu-schedule",
)
