"""Formulas of docstrings and pages as MathML, which browsers draw without a script.

Docstrings write them as Sphinx does; `Formulas` gives them the brackets that Markdown's
arithmatex keeps from being read as emphasis, and `on_page_content` draws what it kept.
Papers by their arXiv number, and addresses, become links. `...` in a list of arguments,
for those of another recipe, becomes a sentence before the list.
"""

import html
import re
from typing import Any

import griffe
from latex2mathml import converter

INLINE = re.compile(r":math:`([^`]+)`")
DISPLAY = re.compile(r"^( *)\.\. math::(.*(?:\n\1 +\S.*)*)", re.M)
PAPER = re.compile(r"\barXiv\s+(\d{4}\.\d{5})")
ADDRESS = re.compile(r"(?<![(<])https://[^\s;,)]+[^\s;,.)]")
OTHERS = re.compile(r"^Args:\n(.*?)^ +\.\.\.: all other arguments (.*?)\n", re.M | re.S)
KEPT = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.S)


class Formulas(griffe.Extension):
    """Brackets around the formulas of every docstring, and links."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Called by griffe for each object that it has read."""
        del kwargs
        if obj.docstring is None:
            return
        text = DISPLAY.sub(
            lambda found: found[1] + r"\[ " + " ".join(found[2].split()) + r" \]",
            obj.docstring.value,
        )
        text = INLINE.sub(
            lambda found: r"\(" + " ".join(found[1].split()) + r"\)", text
        )
        text = OTHERS.sub(r"All other arguments are \2\n\nArgs:\n\1", text)
        text = ADDRESS.sub(r"<\g<0>>", text)
        text = PAPER.sub(r"[arXiv \1](https://arxiv.org/abs/\1)", text)
        obj.docstring.value = text


def on_page_content(content: str, **kwargs: Any) -> str:
    """Called by MkDocs with the HTML of each page."""
    del kwargs

    def draw(found: re.Match[str]) -> str:
        text = html.unescape(found[3])
        if found[2] == "(":
            return converter.convert(text)
        if r"\\" in text:  # lines, which Sphinx aligns at & without being asked
            text = rf"\begin{{split}} {text} \end{{split}}"
        drawn = converter.convert(text, display="block")
        if "<mi>&</mi>" in drawn:
            raise ValueError(f"an & that aligns nothing: {text}")
        return f'<div class="formula">{drawn}</div>'

    return KEPT.sub(draw, content)
