"""Which optimizer each parameter gets, decided by its role and path.

Muon is for matrices that a model multiplies by. An embedding table is a matrix in shape
only: a lookup touches single rows. The output head, biases, norm scales and other
vectors go to AdamW too, also where scanned layers stack them to two axes and more.
"""

import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jax_muon import paths

MUON = "muon"
ADAMW = "adamw"

# Words in the name of a parameter, or of the module that owns it.
_EMBEDDING = {"embed", "embeds", "embedding", "embeddings", "embedder", "emb", "wte"}
_EMBEDDING |= {"wpe", "unembed", "unembedding", "unembedder"}
_HEAD = {"logit", "logits", "classifier", "readout", "router"}
_NORM = {"norm", "layernorm", "rmsnorm", "batchnorm", "groupnorm", "ln"}
# Words in the name of a parameter alone.
_VECTOR = {"bias", "biases", "b", "scale", "scales", "gain", "gamma", "beta", "alpha"}
_VECTOR |= {"lambda", "lambdas", "scalar", "scalars", "token", "tokens"}


def label_params(params: Any, rules: Mapping[str, str] | None = None) -> Any:
    """Label every parameter "muon" or "adamw", or as the rules say.

    To AdamW: vectors and scalars; biases and norm scales, also stacked by scanned
    layers; embeddings, output heads (`lm_head`, `head`, `logits`, `classifier`) and
    routers; depthwise convolution kernels (..., 1, out); whatever is not real floating
    point. To Muon: every other parameter, such as the kernels of Dense, DenseGeneral,
    Conv and Einsum, stacked by layer or expert or not. `describe` shows the outcome.

    Args:
      params: parameters in any Flax form: linen dict, FrozenDict, boxed, nnx.State. The
        updates of an optimizer get the same labels.
      rules: path pattern to label, tried in their order before the roles above. A
        pattern names whole components of the path, such as "router", "attn/q" or
        "blocks/0/*".

    Returns:
      A tree of strings with the structure of `params`, for `optax.multi_transform`.

    Raises:
      ValueError: a rule that matches no parameter, with the paths there are.

    Examples:
      >>> params = {"wte": jnp.zeros((9, 4)), "mlp": {"kernel": jnp.zeros((4, 8))}}
      >>> label_params(params)
      {'mlp': {'kernel': 'muon'}, 'wte': 'adamw'}
      >>> label_params(params, {"wte": "embedding"})
      {'mlp': {'kernel': 'muon'}, 'wte': 'embedding'}
    """
    rules = dict(rules or {})
    all_paths = [path for path, _ in paths.leaves_with_paths(params)]
    paths.check_patterns_match("rules of label_params", rules, all_paths)

    def label(key_path: tuple[Any, ...], leaf: Any) -> str:
        path = paths.path_string(key_path)
        for pattern, chosen in rules.items():
            if paths.matches(pattern, path):
                return chosen
        return _by_role(path, leaf)

    return jax.tree_util.tree_map_with_path(label, params)


def _by_role(path: str, leaf: Any) -> str:
    shape = getattr(leaf, "shape", ())
    owner, _, name = f"/{path}".rpartition("/")
    owner = owner.rpartition("/")[2]
    words = _words(name)
    near = words | _words(owner)
    vector = (
        len(shape) < 2
        or not jnp.issubdtype(jnp.result_type(leaf), jnp.floating)
        or words & _VECTOR
        or near & _NORM
    )
    ends_of_model = near & (_EMBEDDING | _HEAD) or _is_head(name) or _is_head(owner)
    depthwise = "conv" in path.lower() and len(shape) >= 3 and shape[-2:-1] == (1,)
    return ADAMW if vector or ends_of_model or depthwise else MUON


def _words(name: str) -> set[str]:
    """Words of a name: "LayerNorm_0" and "layer_norm1" give layer and norm."""
    spaced = re.sub(r"([a-z])([A-Z])", r"\1 \2", name)
    return set(re.split(r"[^a-z]+", spaced.lower())) - {""}


def _is_head(name: str) -> bool:
    """Whether a name ends in head: `head`, `lm_head`, `Head_0`, not `head_mlp`."""
    return re.fullmatch(r"(.*[_.])?head(_?\d+)?", name.lower()) is not None
