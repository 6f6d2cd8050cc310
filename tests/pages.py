"""The code for frameworks: of docs/frameworks.md, and of `outside/*/read.py`."""

import pathlib
import re
import runpy

ROOT = pathlib.Path(__file__).parents[1]
PAGE = ROOT / "docs" / "frameworks.md"


def blocks(heading, language="python"):
    """The code blocks under a heading."""
    section = re.search(rf"\n## {heading}\n(.*?)(?=\n## |\Z)", PAGE.read_text(), re.S)
    return re.findall(rf"```{language}\n(.*?)```", section[1], re.S)


def run(heading, **given):
    """The names that the code of a section defines, which may be in a file."""
    file = ROOT / "outside" / heading.lower() / "read.py"
    if file.exists():
        return runpy.run_path(str(file), given)
    (block,) = blocks(heading)
    exec(block, given)
    return given
