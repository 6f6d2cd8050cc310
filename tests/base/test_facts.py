"""The comments in `facts.py` name the files that write and read each fact."""

import dataclasses
import pathlib
import re

import jax_muon
from jax_muon.base import facts

PACKAGE = pathlib.Path(jax_muon.__file__).parent
SOURCES = {path.stem: path.read_text() for path in PACKAGE.rglob("*.py")}


def files_with(pattern):
    found = {name for name, text in SOURCES.items() if re.search(pattern, text)}
    return found - {"facts"}  # its docstring has an example


def test_each_fact_names_its_writers_and_readers():
    comments = re.findall(
        r"((?:^    #.*\n)+)^    (\w+): ", SOURCES["facts"], re.MULTILINE
    )
    flat = ((field, re.sub(r"\s*#\s*", " ", comment)) for comment, field in comments)
    named = {field: comment.split(". ")[-1] for field, comment in flat}
    assert [*named] == [field.name for field in dataclasses.fields(facts.Facts)]
    for field, text in named.items():
        writers, readers = text.split("->")
        words = [{*re.findall(r"\w+", side)} for side in (writers, readers)]
        found = [
            files_with(rf"\bnote\(\)\.{field}\b"),
            files_with(rf"(\brecorded|\)\[1\])\.{field}\b"),
        ]
        assert words == found, field
