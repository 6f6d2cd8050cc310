"""Which conditions of the reading do real models need?

    python -m benchmarks.ablation FOLDER... [--modules shapes,kinds] [--lines]

Every `if` of jax_muon/reading and every operand of `and` and `or` is switched off in
turn: an `if` is never taken, an operand of `and` is true and one of `or` is false. A
condition is needed where a model of the folders (as `benchmarks.reading` has them) is
then read otherwise, or not at all. The table has a row for each function; `--lines`
adds the conditions that no model needs. They may be needed all the same, by the tests
of single leaves or by models that are not in the folders.
"""

import argparse
import ast
import collections
import importlib
import json
import pathlib
import sys
import types
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

from benchmarks import reading

MODULES = "layers,experts,names,kinds,heads,orientation,shapes,evidence,roles"
Model = tuple[str, list[dict[str, Any]], bool]  # name, parameters, by axis names
Functions = dict[str, types.FunctionType]


class Condition(NamedTuple):
    """A condition in a source file, and where it is in the tree of its syntax."""

    function: str
    line: int
    text: str
    off: bool  # its value when it is switched off
    node: Any
    operand: int | None  # None for a whole `if`


def main(arguments: list[str] | None = None) -> int:
    """Print the table, one row for each function."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", 1)[0])
    parser.add_argument("folders", type=pathlib.Path, nargs="+")
    parser.add_argument("--modules", default=MODULES, help="of jax_muon.reading")
    parser.add_argument("--lines", action="store_true", help="show what is not needed")
    options = parser.parse_args(arguments)
    models = [model for folder in options.folders for model in models_of(folder)]
    models.sort(key=lambda model: len(model[1]))
    print("| function | conditions | needed | by, for example |\n|---|---|---|---|")
    idle = []
    for name in options.modules.split(","):
        module = importlib.import_module(f"jax_muon.reading.{name}")
        rows: dict[str, list[str | None]] = collections.defaultdict(list)
        for condition, model in ablate(module, models):
            rows[condition.function].append(model)
            if model is None:
                idle.append(f"{name}.py:{condition.line} {condition.text}")
        for function, found in rows.items():
            needed = [model for model in found if model is not None]
            example = needed[0] if needed else "-"
            where = f"`{name}.{function}`"
            print(f"| {where} | {len(found)} | {len(needed)} | {example} |", flush=True)
    if options.lines:
        print("\nNeeded by no model:", *idle, sep="\n")
    return 0


def models_of(folder: pathlib.Path) -> list[Model]:
    """All models of a folder, those with axis names twice."""
    found: list[Model] = []
    for file in sorted(folder.glob("*.json")):
        params = json.loads(file.read_text())["params"]
        found.append((file.stem, params, False))
        if any(param.get("names") for param in params):
            found.append((f"{file.stem} by names", params, True))
    return found


def ablate(
    module: types.ModuleType, models: list[Model]
) -> Iterator[tuple[Condition, str | None]]:
    """Every condition of a module, with a model that is read otherwise without it."""
    file = pathlib.Path(str(module.__file__))
    functions = functions_of(module)
    conditions = conditions_of(ast.parse(file.read_text()))
    seen: set[int] = set()

    def watch(index: int, value: Any) -> Any:
        if bool(value) != conditions[index].off:
            seen.add(index)
        return value

    # Only models in which a condition is ever "on" can change when it is switched off.
    vars(module)["_watch"] = watch
    replace(functions, compiled(file, range(len(conditions)), watched=True))
    before, at_work = [], collections.defaultdict(list)
    for index, (_, params, by_names) in enumerate(models):
        seen.clear()
        before.append(outcome(params, by_names))
        for condition in seen:
            at_work[condition].append(index)
    for place, condition in enumerate(conditions):
        replace(functions, compiled(file, [place], watched=False))
        changed = (i for i in at_work[place] if outcome(*models[i][1:]) != before[i])
        first = next(changed, None)
        yield condition, None if first is None else models[first][0]
    replace(functions, compiled(file, [], watched=False))


def conditions_of(tree: ast.Module) -> list[Condition]:
    """All conditions of a source file, in a fixed order."""
    found = []
    functions = [x for x in ast.walk(tree) if isinstance(x, ast.FunctionDef)]
    for function in functions:
        for node in ast.walk(function):
            where = function.name
            if isinstance(node, ast.If):
                text = f"if {ast.unparse(node.test)}"
                found.append(Condition(where, node.lineno, text, False, node, None))
            elif isinstance(node, ast.BoolOp):
                is_and = isinstance(node.op, ast.And)
                for index, operand in enumerate(node.values):
                    text = f"{'and' if is_and else 'or'} {ast.unparse(operand)}"
                    line = operand.lineno
                    found.append(Condition(where, line, text, is_and, node, index))
    return found


def compiled(
    file: pathlib.Path, places: Collection[int], *, watched: bool
) -> types.CodeType:
    """A module's code with some conditions switched off, or under watch."""
    tree = ast.parse(file.read_text())
    conditions = conditions_of(tree)
    for place in places:
        _, _, _, off, node, operand = conditions[place]
        old = node.test if operand is None else node.values[operand]
        new: ast.expr = ast.Constant(off)
        if watched:
            new = ast.Call(
                ast.Name("_watch", ast.Load()), [ast.Constant(place), old], []
            )
        if operand is None:
            node.test = new
        else:
            node.values[operand] = new
    return compile(ast.fix_missing_locations(tree), str(file), "exec")


def functions_of(module: types.ModuleType) -> Functions:
    """Functions and methods of a module, by the qualified names of their code."""
    found = {}
    holders = [module, *(x for x in vars(module).values() if isinstance(x, type))]
    for value in [x for holder in holders for x in vars(holder).values()]:
        function = getattr(value, "func", getattr(value, "fget", value))
        own = getattr(function, "__module__", None) == module.__name__
        if own and isinstance(function, types.FunctionType):
            found[function.__code__.co_qualname] = function
    return found


def replace(functions: Functions, code: types.CodeType) -> None:
    """Give the functions of a module the code that they have in another version."""
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            if inner.co_qualname in functions:
                functions[inner.co_qualname].__code__ = inner
            replace(functions, inner)


def outcome(params: list[dict[str, Any]], by_names: bool) -> Any:
    """The score of one model, or the error that it ends in."""
    try:
        return reading.score(params, by_names)
    except Exception as error:  # whatever a condition guards against
        return repr(error)


if __name__ == "__main__":
    sys.exit(main())
