"""Benchmarks train models, as the examples do."""

from tests.examples.conftest import as_users_write

__all__ = ["as_users_write"]
