"""MaxText's table of dimension numbers against our reading, on its own models."""

import jax
import pytest
from flax import nnx
from maxtext.utils.muon_utils import get_muon_weight_dimension_numbers
from optax.contrib import MuonDimensionNumbers

from benchmarks.reading_models.maxtext import model_of
from jax_muon.base.trees import path_string
from tests import pages

# One for each family that MaxText allows for `opt_type: muon`, with its routers, and
# with the modules of experts that a Pallas kernel multiplies.
MODELS = {
    "llama2-7b": (0, None),
    "qwen3-0.6b": (0, None),
    "qwen3-30b-a3b": (1, None),
    "qwen3-next-80b-a3b": (2, "routed_experts"),
    "deepseek2-16b": (1, None),
    "gpt-oss-20b": (2, "GptOssMlp"),
    "gemma3-4b": (0, None),
}


@pytest.mark.parametrize("name", MODELS)
def test_same_axes_but_for_routers(name):
    """A router is Muon's there and AdamW's here."""
    config, mesh, model = model_of(f"model_name={name}", "attention=dot_product")
    dims = nnx.to_pure_dict(get_muon_weight_dimension_numbers(model, config))
    theirs = {
        path_string(path): found
        for path, found in jax.tree_util.tree_leaves_with_path(
            dims, is_leaf=lambda x: x is None or hasattr(x, "reduction_axis")
        )
    }
    expected_routers, experts = MODELS[name]
    read, rules = pages.run("MaxText")["read"], {}
    if experts is not None:
        refused = rf"rule for each[^#]*{experts}.* pallas_call"
        with pytest.raises(ValueError, match=refused):
            read(config, model, mesh)
        inputs_outputs = MuonDimensionNumbers(-2, -1)
        rules = {f"{experts}/{name}": inputs_outputs for name in ("wi_0", "wi_1", "wo")}
    routers = 0
    for path, found in read(config, model, mesh, rules).items():
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
    assert routers == expected_routers
