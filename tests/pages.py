"""The code of pages, for tests that run it.

A page defines the names that its code uses, or says that they are the reader's, in a
sentence such as "Here `params`, `loss_fn(params, batch)` and `batch` are yours".
"""

import pathlib
import re
import runpy

ROOT = pathlib.Path(__file__).parents[1]
PAGE = ROOT / "docs" / "frameworks.md"
YOURS = re.compile(r"\bHere ((?:`\w[^`]*`(?:, | and )?)+) (?:is|are) yours")


def yours(text):
    """The names that code uses without defining them, as its page says."""
    said = " ".join(text.split())
    return {x for names in YOURS.findall(said) for x in re.findall(r"`(\w+)", names)}


def section(heading):
    """The text under a heading of docs/frameworks.md."""
    return re.search(rf"\n## {heading}\n(.*?)(?=\n## |\Z)", PAGE.read_text(), re.S)[1]


def blocks(heading, language):
    """The blocks of a section; without a language, of those that name none."""
    return re.findall(rf"^```{language}\n(.*?)^```$", section(heading), re.S | re.M)


def run(heading, **given):
    """The names that the code of a section defines, which may be in a file.

    In docs/frameworks.md, or `outside/*/read.py`.
    """
    file = ROOT / "outside" / heading.lower() / "read.py"
    if file.exists():
        return runpy.run_path(str(file), given)
    (code,) = blocks(heading, "python")
    assert yours(section(heading)) == {*given}
    exec(code, given)
    return given
