"""Projections of attention by the names that users give to modules and parts."""

import re
from collections.abc import Mapping

from jax_muon import trees


def _words(text: str) -> set[str]:
    return set(text.split())


# By their core, which leaves out the words around: `q`, not `q_proj`, `to_q` or `wq`.
ATTENTION = {"attn", "attention"}
_AROUND = ATTENTION | _words("self cross proj projection einsum to w linear mlp ffw")
_W_IN_FRONT = re.compile("^w(?=(q|k|v|kv|qkv|o|i)$)")
_GPT2 = {"c_attn": "qkv", "c_proj": "out"}
PROJECTIONS: Mapping[str, set[str]] = {
    "qkv": _words("qkv query_key_value in_qkvz in_qkv"),
    "query": _words("q query queries q_b q_up"),
    "kv": _words("kv kv_b kv_up"),
    "key": _words("k key keys k_b k_up"),
    "value": _words("v value values v_b v_up"),
    "out": _words("o out output vec o_b"),
}


def core(name: str) -> str:
    """The words of a name but for those around the name of a projection.

    Examples:
      >>> core("q_proj"), core("to_kv"), core("attention_output"), core("wo")
      ('q', 'kv', 'output', 'o')
    """
    words = [_W_IN_FRONT.sub("", word) for word in trees.words(name)]
    whole = _GPT2.get("_".join(words))
    return whole or "_".join(word for word in words if word not in _AROUND)


def projection(name: str) -> str | None:
    """Which projection of attention a name means: a key of `PROJECTIONS`, or None."""
    name_core, known = core(name), PROJECTIONS.items()
    return next((part for part, cores in known if name_core in cores), None)
