"""MaxText's table of dimension numbers against our reading, on its own models."""

import jax
import pytest
from flax import nnx
from maxtext.utils.muon_utils import get_muon_weight_dimension_numbers
from models import model_of, parameters_of

import jax_muon as jm
from jax_muon.paths import path_string

# One for each family that MaxText allows for `opt_type: muon`, with its routers.
MODELS = {
    "llama2-7b": 0,
    "qwen3-0.6b": 0,
    "qwen3-30b-a3b": 1,
    "qwen3-next-80b-a3b": 2,
    "deepseek2-16b": 1,
    "gpt-oss-20b": 2,
    "gemma3-4b": 0,
}


@pytest.mark.parametrize("name", MODELS)
def test_same_axes_but_for_routers(name):
    """A router is Muon's there and AdamW's here."""
    config, _, model = model_of(f"model_name={name}", "attention=dot_product")
    dims = nnx.to_pure_dict(get_muon_weight_dimension_numbers(model, config))
    theirs = {
        path_string(path): found
        for path, found in jax.tree_util.tree_leaves_with_path(
            dims, is_leaf=lambda x: x is None or hasattr(x, "reduction_axis")
        )
    }
    boxed = parameters_of(model)
    routers = 0
    for path, found in jm.read(boxed).items():
        expected = theirs[path]
        if found.role == "router":
            routers += 1
            assert found.label == "adamw" and expected is not None, found.path
            continue
        assert (found.label == "muon") == (expected is not None), found.path
        if expected is not None:
            rank = len(found.shape)
            for ours, axes in (
                (found.axes.reduction, expected.reduction_axis),
                (found.axes.output, expected.output_axis),
            ):
                assert sorted(ours) == sorted(a % rank for a in axes), found.path
    assert routers == MODELS[name]
