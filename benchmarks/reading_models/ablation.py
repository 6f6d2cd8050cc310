"""Which rules of the reading by computation do real models need?

    python -m benchmarks.reading_models.ablation [FRAMEWORK ...] [--rules 'top*']

Each rule of `RULES` is a piece of jax_muon/reading/computation that is replaced by
nothing: the modules are loaded again with that change, and read all models of the
frameworks, which are traced once. A row has the number of leaves that are no longer
right (or unused, or open), and the smallest of their models. Rows of several frameworks
add up in benchmarks/results/reading_ablation.json.
"""

import collections
import fnmatch
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import pathlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from benchmarks import program
from benchmarks.reading_models.__main__ import arguments, in_environments, verdict
from jax_muon import jaxprs
from jax_muon.paths import leaves_with_paths

MODULE = "benchmarks.reading_models.ablation"
PACKAGE = "jax_muon.reading.computation"

# Rule: module, its text, and the text in its place, if not that of `_without`.
RULES: Mapping[str, tuple[str, ...]] = {
    # What becomes of a leaf before its use.
    "one-hot lookups": (
        "follow",
        "result.one_hot = sum(value.data for value in values) == 1",
    ),
    "masks and scales of a leaf's shape": (
        "follow",
        "if (scaled and whole) or (given_floats and is_factor):",
        "if given_floats and is_factor:",
    ),
    "products of leaves added to frozen matrices": (
        "follow",
        "if (scaled and whole) or (given_floats and is_factor):",
        "if scaled and whole:",
    ),
    "scales of products of leaves": (
        "follow",
        "whole = is_factor or covers",
        "whole = covers",
    ),
    "scales of picked leaves": (
        "follow",
        "covers(factors, shape) or leaf in value.picked",
        "covers(factors, shape)",
    ),
    "rows picked by data, gather": (
        "follow",
        "return pick(follower, eqn, result) if index.data else result",
        "return result",
    ),
    "rows picked by data, dynamic slice": (
        "follow",
        "return pick(follower, eqn, value) if by_data else value",
        "return value",
    ),
    "picked matrices that the data multiplies": (
        "products",
        "(data[i] and not self._is_matrix(i))",
        "data[i]",
    ),
    "slices of parts of an axis": (
        "follow",
        "((BATCH, True), (PART, False))",
        "((BATCH, True),)",
    ),
    "concatenations": ("follow", '@rule("concatenate", ', '@rule("-", '),
    "dynamic updates": (
        "follow",
        '"concatenate", "dynamic_update_slice"',
        '"concatenate"',
    ),
    "stacks": ("follow", '"dynamic_update_slice", "stack")', '"dynamic_update_slice")'),
    "leaves concatenated with data": ("follow", "if beside_data:"),
    "gathers along a new axis": ("follow", "if len(new) > len(old):"),
    "constants that a leaf is multiplied by": (
        "products",
        "if not other.leaves and (other.one_hot or not other.data):",
    ),
    "repeated leaves and vectors are like data": (
        "products",
        "return not self._is_own(i) or (vectors[i] and not vectors[1 - i])",
        "return False",
    ),
    "vectors are like data": (
        "products",
        " or (vectors[i] and not vectors[1 - i])",
        "",
    ),
    "doubt about products of leaves": (
        "decide",
        "if INNER in x and shape",
        "if False and shape",
    ),
    # Uses.
    "grouped products": ("products", ', "ragged_dot_general")', ")"),
    "grouped convolutions": ("products", 'if params["feature_group_count"] > 1:'),
    "transposed convolutions without overlap": ("products", "if step == shape[a] > 1:"),
    "Pallas kernels by their widths": (
        "products",
        "if len(weights) == len(data) == len(eqn.outvars) == 1:",
    ),
    "complex products": ("decide", "if first.is_complex:"),
    "gradients in the function": (
        "follow",
        "use.is_gradient = use is not self.uses[leaf][0] and is_transposed",
        "use.is_gradient = False",
    ),
    "uses that contradict each other": (
        "decide",
        "[x for x in known if x not in either]",
        "[x for x in known if x not in either and False]",
    ),
    "one row or column": ("decide", "if 1 in axes.fan(shape):"),
    # Batches that later operations show.
    "outputs taken one by one": ("follow", "if len(x.use.taken[axis]) == old[a]:"),
    "outputs that are the next product's batch": (
        "products",
        "if all(x.use.roles.get(a) == {BATCH} for a in range(axis)):",
    ),
    "experts by the router's outputs": ("read", "decide.find_experts(follower)"),
    "mixtures of matrices": ("products", "_find_mixture(product, i, x, factors)"),
    # Roles.
    "heads": ("decide", "if not any(use.feeds for use in products):"),
    "frozen kernels behind": (
        "products",
        "if other.given_floats and summed",
        "if False and summed",
    ),
    "heads that are kernels in other layers": (
        "decide",
        'if x.role != "head" or other is None:',
        "if True:",
    ),
    "top-k": ("follow", "x.use.chooses |= bool(axes_in(value.results[x]))"),
    "sorts that rank": (
        "follow",
        'if eqn.primitive.name != "sort" or len(values) > 1:',
        'if eqn.primitive.name != "sort":',
    ),
    "argmax": ("follow", 'x.use.chooses |= bool(along) and name.startswith("arg")'),
    "tables of keys": ("decide", "if all(map(_is_table_of_keys, products)):"),
    "queries, keys and values": (
        "products",
        "elif x.soft and axes_in(factors, contract[i]) == x.keys:",
        "elif False:",
    ),
    # Control flow.
    "loops until nothing changes": (
        "loops",
        "for _ in range(4):",
        "for _ in range(1):",
    ),
    "while": ("loops", '@rule("while")'),
    "cond": ("loops", '@rule("cond")'),
    "shard_map": ("loops", '@rule("shard_map")'),
}


def _without(module: str, old: str, new: str | None = None) -> tuple[str, str, str]:
    """A row of `RULES` with the text that turns a condition, or a rule, off."""
    if new is None:
        kinds = {"if ": "if False:", "@rule(": '@rule("-")'}
        new = next((kinds[kind] for kind in kinds if old.startswith(kind)), "pass")
    return module, old, new


class _Edited(importlib.machinery.SourceFileLoader):
    """Loads a module with one text in the place of another one."""

    def __init__(self, name: str, path: str, old: str, new: str) -> None:
        super().__init__(name, path)
        self.old, self.new = old, new

    def get_code(self, fullname: str) -> Any:
        source = pathlib.Path(self.path).read_text()
        if self.old not in source:
            raise ValueError(f"{self.path} has no text {self.old!r}")
        return compile(source.replace(self.old, self.new), self.path, "exec")


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the module that has a rule, to load it without."""

    def __init__(self, module: str, old: str, new: str) -> None:
        self.module, self.edit = f"{PACKAGE}.{module}", (old, new)

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != self.module:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        assert spec is not None and spec.origin is not None
        loader = _Edited(name, spec.origin, *self.edit)
        return importlib.util.spec_from_loader(name, loader)


def reader_without(rule: str | None) -> Callable[..., Any]:
    """`read_uses`, without a rule of `RULES`, or with all for None."""
    loaded = {name: sys.modules[name] for name in sys.modules if _is_ours(name)}
    finder = [_Finder(*_without(*RULES[rule]))] if rule else []
    for name in loaded:
        del sys.modules[name]
    sys.meta_path[:0] = finder
    try:
        return importlib.import_module(f"{PACKAGE}.read").read_uses
    finally:
        del sys.meta_path[: len(finder)]
        for name in [*filter(_is_ours, sys.modules)]:
            del sys.modules[name]
        sys.modules.update(loaded)
        if PACKAGE in loaded:
            sys.modules["jax_muon.reading"].computation = loaded[PACKAGE]  # type: ignore[attr-defined]


def _is_ours(name: str) -> bool:
    return name == PACKAGE or name.startswith(f"{PACKAGE}.")


def main(words: list[str] | None = None) -> int:
    """Print and keep the table."""
    parser = arguments(MODULE, __doc__, "reading_ablation.json")
    parser.add_argument("--rules", nargs="*", default=["*"], help="patterns of rules")
    options = parser.parse_args(words)
    rules = [
        rule
        for rule in RULES
        if any(fnmatch.fnmatch(rule, pattern) for pattern in options.rules)
    ]

    def here(framework: str) -> None:
        rows = dict(_rows(framework, options.models, rules))
        results = json.loads(options.json.read_text()) if options.json.exists() else {}
        for rule, row in rows.items():
            results.setdefault(rule, {})[framework] = row
        program.save(results, options.json)

    failed = in_environments(MODULE, options, here)
    if not options.here:
        print(summary(json.loads(options.json.read_text())))
    return int(failed)


def _rows(
    framework: str, pattern: str, rules: list[str]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """What becomes worse without each rule: leaves by outcome, and models."""
    module = importlib.import_module(f"benchmarks.reading_models.{framework}")
    cases, traces = {}, {}
    trace = jaxprs.trace
    for name, model in module.MODELS.items():
        if fnmatch.fnmatch(name, pattern):
            loss, params, args = model.build()
            traces[id(loss)] = trace(loss, params, *args)
            expected = {
                path: (tuple(x.shape), model.expected(path, tuple(x.shape)))
                for path, x in leaves_with_paths(params)
            }
            cases[name] = loss, params, args, expected
    jaxprs.trace = lambda loss, *_: traces[id(loss)]
    try:
        full = {
            name: _outcomes(reader_without(None), case) for name, case in cases.items()
        }
        for rule in rules:
            reader, worse = reader_without(rule), collections.Counter()
            models = []
            for name, case in cases.items():
                now = _outcomes(reader, case)
                count = collections.Counter(
                    now[path]
                    for path, before in full[name].items()
                    if now[path] != before and before[0] != "wrong"
                )
                worse += collections.Counter({key[0]: n for key, n in count.items()})
                if count:
                    models.append((len(case[3]), name))
            smallest = min(models)[1] if models else ""
            yield rule, {**worse, "models": len(models), "smallest": smallest}
            print(f"{framework}, without {rule}: {dict(worse)} {smallest}", flush=True)
    finally:
        jaxprs.trace = trace


def _outcomes(reader: Callable[..., Any], case: Any) -> dict[str, tuple[str, str]]:
    """By path: right, wrong, undecided or failed; and the role."""
    loss, params, args, expected = case
    try:
        uses = {x.path: x for x in reader(loss, params, *args)}
    except Exception:  # whatever a rule guards against
        return dict.fromkeys(expected, ("failed", ""))
    outcomes = {}
    for path, (shape, expect) in expected.items():
        use = uses[path]
        param = {"path": path, "shape": shape, "expect": expect}
        outcome = verdict(param, use)[0].replace("refused", "undecided")
        right = outcome == "right"
        outcomes[path] = ("other role", use.role) if right else (outcome, "")
    return outcomes


def summary(results: Mapping[str, Any]) -> str:
    """A Markdown table: what all frameworks lose without each rule."""
    kinds = ("wrong", "undecided", "failed", "other role", "open", "models")
    table = [["without", *kinds, "smallest"]]
    for rule, frameworks in results.items():
        totals = [
            str(sum(row.get(kind, 0) for row in frameworks.values())) for kind in kinds
        ]
        smallest = [
            f"{framework} {row['smallest']}"
            for framework, row in frameworks.items()
            if row["smallest"]
        ]
        table.append([rule, *totals, ", ".join(smallest[:2])])
    return program.markdown(table)


if __name__ == "__main__":
    sys.exit(main())
