"""Models of these packages, read by their losses: no leaf is wrong."""

import importlib

import pytest

from benchmarks.reading_models import FRAMEWORKS
from benchmarks.reading_models.__main__ import READER, load, read_model

MODELS = [
    pytest.param(model, id=f"{framework} {name}")
    for framework, environment in FRAMEWORKS.items()
    if environment == "transformers"
    for name, model in importlib.import_module(
        f"benchmarks.reading_models.{framework}"
    ).MODELS.items()
]


@pytest.mark.parametrize("model", MODELS)
def test_no_leaf_is_wrong(model):
    """Undecided ones would be refused, unless names decide them: here all do."""
    row, kinds = read_model(model, load(READER))
    assert row["loss"]["wrong"] == row["loss"]["refused"] == 0, kinds
