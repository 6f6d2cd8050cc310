"""The models of `benchmarks.reading_models` as cases of a test in their environment."""

import importlib
import re
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


# Tables of relative positions, which need a rule, as "adamw" and "ioo".
LEFT = re.compile(
    r"refused xlnet_encoder_N/(rel_attn/encoding/kernel|segment_encoding) "
)


def check(model: Model) -> None:
    """No leaf is read wrongly, and none but those of `LEFT` is left to the user."""
    _, kinds = read_model(model)
    kinds = [x for x in kinds if x.startswith(("wrong", "refused"))]
    assert all(map(LEFT.match, kinds)), kinds
