"""The role in attention that users give to a module or a part by its name."""

from jax_muon import paths

_WORDS = {
    "query": "q query queries wq",
    "key": "k key keys wk",
    "value": "v value values wv",
    "out": "o out output wo",
}
_ROLES = {word: role for role, words in _WORDS.items() for word in words.split()}


def projection(name: str) -> str | None:
    """The role that a name means, or None.

    Examples:
      >>> projection("q"), projection("to_k2"), projection("value_proj")
      ('query', 'key', 'value')
    """
    return next((_ROLES[word] for word in paths.words(name) if word in _ROLES), None)
