"""The models of `benchmarks.reading_models` as cases of a test in their environment."""

import importlib
from typing import Any

import pytest

from benchmarks.reading_models import FRAMEWORKS, Model
from benchmarks.reading_models.__main__ import read_model


def models(environment: str) -> list[Any]:
    """The models of all frameworks that a folder of outside/ has the packages of."""
    return [
        pytest.param(model, id=f"{framework} {name}")
        for framework, where in FRAMEWORKS.items()
        if where == environment
        for name, model in importlib.import_module(
            f"benchmarks.reading_models.{framework}"
        ).MODELS.items()
    ]


def check(model: Model) -> None:
    """No leaf is read wrongly, and none is left to the user."""
    counts, kinds = read_model(model)
    assert counts["wrong"] == counts["refused"] == 0, kinds
