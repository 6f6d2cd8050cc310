"""Which optimizer each parameter gets, decided by its role and path.

Muon is for matrices that a model multiplies by. An embedding table is a matrix in shape
only: a lookup touches single rows. The output head, biases, norm scales and other
vectors go to AdamW too, also where scanned layers stack them to two axes and more.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jax_muon.reading import paths

MUON = "muon"
ADAMW = "adamw"

# Words in the name of a parameter, or of the module that owns it.
_EMBEDDING = {"embed", "embeds", "embedding", "embeddings", "embedder", "emb", "wte"}
_EMBEDDING |= {"wpe", "unembed", "unembedding", "unembedder"}
_HEAD = {"logit", "logits", "classifier", "readout", "lmhead"}
# The last word of these names; `norm_mlp` is no norm, nor `head_mixer` a head.
_NORM_OR_HEAD = {"norm", "layernorm", "rmsnorm", "batchnorm", "groupnorm", "ln", "head"}
_EXPERTS = {"expert", "experts"}
# What tells a convolution whose groups of channels do not mix.
_DEPTHWISE = {"depthwise", "dwconv"}
_GROUPED = {"group", "grouped", "dw"}
# Words in the name of a parameter alone.
_VECTOR = {"bias", "biases", "scale", "scales", "gain", "gamma", "beta", "alpha"}
_VECTOR |= {"lambda", "lambdas", "scalar", "scalars", "token", "tokens"}


def label_params(params: Any, rules: Mapping[str, str] | None = None) -> Any:
    """Label every parameter "muon" or "adamw", or as the rules say.

    To AdamW: vectors and scalars; biases and norm scales, also stacked by scanned
    layers; embeddings, output heads (`lm_head`, `head`, `logits`, `classifier`) and
    routers (`router`, or a `gate` with experts beside it); convolution kernels called
    depthwise or grouped, and all others (..., 1, out) of three axes and more; whatever
    is empty or not real floating point. To Muon: every other parameter, such as the
    kernels of Dense, DenseGeneral, Conv and Einsum and the factors of LoRA, stacked by
    layer or expert or not. `describe` shows the outcome.

    What neither name nor shape tells, rules have to: a grouped convolution under
    another name, an embedding tied to a weight whose name the tree has.

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
    shapes = {
        path: tuple(getattr(leaf, "shape", ()))
        for path, leaf in paths.leaves_with_paths(params)
    }
    paths.check_patterns_match("rules of label_params", rules, list(shapes))

    def label(key_path: tuple[Any, ...], leaf: Any) -> str:
        path = paths.path_string(key_path)
        for pattern, chosen in rules.items():
            if paths.matches(pattern, path):
                return chosen
        return ADAMW if _is_router(path, shapes) else _by_role(path, leaf)

    return jax.tree_util.tree_map_with_path(label, params)


def _by_role(path: str, leaf: Any) -> str:
    shape = getattr(leaf, "shape", ())
    *modules, name = path.split("/")
    # The factors of LoRA have the role of what they adapt.
    modules = [module for module in modules if paths.words(module) != ["lora"]]
    owner = modules[-1] if modules else ""
    own_words, owner_words = paths.words(name), paths.words(owner)
    last_words = {*own_words[-1:], *owner_words[-1:]}
    vector = (
        len(shape) < 2
        or 0 in shape
        or not jnp.issubdtype(jnp.result_type(leaf), jnp.floating)
        or name == "b"
        or _VECTOR.intersection(own_words)
        or _NORM_OR_HEAD & last_words
    )
    ends_of_model = (_EMBEDDING | _HEAD).intersection(own_words + owner_words) or any(
        paths.words(module) == ["lm", "head"] for module in modules
    )
    both = {*own_words, *owner_words}
    named_grouped = _DEPTHWISE & both or ("conv" in both and _GROUPED & both)
    # Depthwise kernels (3, 3, 1, 64), class tokens (1, 1, 768), temperatures.
    grouped = len(shape) >= 3 and (shape[-2:-1] == (1,) or named_grouped)
    return ADAMW if vector or ends_of_model or grouped else MUON


def _is_router(path: str, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether a parameter chooses experts: in a router, or a gate beside experts.

    Experts are known by name, or by their shape: beside a router (in, experts), they
    are (experts, in, out). Any other gate is the projection of a gated MLP.
    """
    parts = path.split("/")
    *lead, fan_in, fan_out = (0, 0, *shapes[path])
    experts = (*lead[2:], fan_out, fan_in)
    for depth, part in enumerate(parts):
        if paths.words(part)[-1:] == ["router"]:
            return True
        if paths.words(part) != ["gate"]:
            continue
        for other, shape in shapes.items():
            *parents, name = other.split("/")[: depth + 1]
            beside = parents == parts[:depth] and name != part
            named = _EXPERTS.intersection(paths.words(name))
            if beside and (named or shape[:-1] == experts):
                return True
    return False
