"""Docstrings of functions that share arguments: each is described once."""

import inspect
import re
import textwrap
from collections.abc import Callable
from typing import Any, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])

_ARGS = re.compile(r"(?<=\n    Args:\n).*?(?=\n\n)", re.DOTALL)
_OWN = re.compile(r"^ {6}(\w+): .*(?:\n {8}.*)*", re.MULTILINE)
_SHARED = re.compile(r"^- `(\w+)`: (.*(?:\n  .*)*)", re.MULTILINE)


def with_shared_arguments(shared: str | None) -> Callable[[_Function], _Function]:
    """Complete the section "Args" of a function by the arguments it does not describe.

    Args:
      shared: a text with lines such as "- `steps`: of the polar iteration.", from
        which they are taken; None, as under `python -OO`, changes nothing.

    Returns:
      A decorator that returns the function itself, with arguments in their order.
    """
    texts = dict(_SHARED.findall(shared or ""))

    def complete(function: _Function) -> _Function:
        section = _ARGS.search(function.__doc__ or "")
        if section is None:
            return function
        documented = {match[1]: match[0] for match in _OWN.finditer(section[0])}
        args = "\n".join(
            documented[name] if name in documented else _entry(name, texts[name])
            for name in inspect.signature(function).parameters
            if name in documented or name in texts
        )
        doc = str(function.__doc__)
        function.__doc__ = doc[: section.start()] + args + doc[section.end() :]
        return function

    return complete


def _entry(name: str, text: str) -> str:
    return textwrap.fill(
        f"{name}: {' '.join(text.split())}",
        width=88,
        initial_indent=6 * " ",
        subsequent_indent=8 * " ",
    )
