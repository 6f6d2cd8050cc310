"""The code of docs/frameworks.md, also for the tests in outside/."""

import pathlib
import re

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "frameworks.md"


def blocks(heading, language="python"):
    """The code blocks under a heading."""
    section = re.search(rf"\n## {heading}\n(.*?)(?=\n## |\Z)", PAGE.read_text(), re.S)
    return re.findall(rf"```{language}\n(.*?)```", section[1], re.S)


def run(heading, **given):
    """The names that the only block of Python under a heading defines."""
    (block,) = blocks(heading)
    exec(block, given)
    return given
