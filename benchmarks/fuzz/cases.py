"""What a case of the fuzzer is, and how one is drawn.

A case is plain data, so that it can be printed as a test and made smaller. Most cases
are right; a few have a layout that cannot be, which must be refused in our words.
"""

import dataclasses
import inspect
import math
from typing import Any

import numpy as np

import jax_muon as jm

Entry = str | tuple[str, ...] | None


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One parameter: its path, shape and dtype, and where it lies."""

    path: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    spec: tuple[Entry, ...] = ()


@dataclasses.dataclass(frozen=True)
class Case:
    """One check.

    Attributes:
      leaves: the parameters. Of two with one path the second stands flat in the tree.
      recipe: its name in `jax_muon`.
      settings: of the recipe.
      polar: name of a polar factor instead of the recipe's; see `run.POLARS`.
      around: name of what is around the recipe; see `run.AROUND`.
      splits: path to the parts of its last axis: a number, or names.
      joins: of the reading; None for the recipe's own.
      labels: path to label, for some; "frozen" ones do not move.
      axes: path to axes (in, out) of some, as dimension numbers.
      out_in: of the reading.
      mesh: sizes of the mesh axes by name.
      explicit: whether these are Explicit.
      divide: mesh axes that further divide gradients and state.
      min_size: least elements of a leaf that is divided so.
      small: matrices of fewer elements are gathered, not sent to owners.
      train_step: of `make_train_step`, which then runs instead of `on_mesh`.
      numbers: kind of the gradients: "normal", or of `HOSTILE` or `UNBOUNDED`.
      size: of the parameters.
      steps: how many.
      seed: of the numbers.
    """

    leaves: tuple[Leaf, ...]
    recipe: str = "muon"
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    polar: str | None = None
    around: str = "nothing"
    splits: dict[str, Any] = dataclasses.field(default_factory=dict)
    joins: int | None = None
    labels: dict[str, str] = dataclasses.field(default_factory=dict)
    axes: dict[str, tuple[Any, Any]] = dataclasses.field(default_factory=dict)
    out_in: bool | None = None
    mesh: dict[str, int] = dataclasses.field(default_factory=lambda: {"data": 2})
    explicit: bool = False
    divide: tuple[str, ...] = ()
    min_size: int = 1
    small: int = 0
    train_step: dict[str, Any] | None = None
    numbers: str = "normal"
    size: float = 1e-4
    steps: int = 2
    seed: int = 0

    @property
    def fits(self) -> bool:
        """Whether the layout can be."""
        if len({leaf.path for leaf in self.leaves}) < len(self.leaves):
            return False  # specs go by path
        for leaf in self.leaves:
            if len(leaf.spec) > len(leaf.shape):
                return False
            used = [n for entry in leaf.spec for n in names_of(entry)]
            if len(set(used)) < len(used) or set(used) & set(self.divide):
                return False
            for size, entry in zip(leaf.shape, leaf.spec, strict=False):
                if size % math.prod(self.mesh[n] for n in names_of(entry)):
                    return False
        return True


def names_of(entry: Entry) -> tuple[str, ...]:
    """The mesh axes of one entry."""
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)


MESHES = [
    *({"data": n} for n in (1, 2, 3, 4, 5, 6, 7, 8)),
    *({"data": a, "fsdp": b} for a, b in ((1, 4), (2, 2), (2, 4), (4, 2), (3, 2))),
    {"data": 2, "fsdp": 2, "tp": 2},
    {"data": 1, "fsdp": 4, "tp": 2},
]
PATHS = [
    "{i}/attn/q", "blocks/{i}/attn/qkv/kernel", "blocks_{i}/mlp/up", "h/{i}/out",
    "{i}/mlp/down/kernel", "layers/{i}/w", "Conv_{i}/kernel", "{i}/bias",
    "{i}/norm/scale", "wte", "embed/embedding", "head", "gate", "experts/{i}/wi",
    "süß/{i}", "a b", "w", "[x]/*", "?", "layer.{i}", "{i}/lora_a", "attn/{i}/key",
]  # fmt: skip
SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24)
RECIPES = ("nanochat", "muon", "normuon", "moonlight", "teon", "muonh", "normuonh")
SETTINGS: dict[str, tuple[Any, ...]] = {
    "learning_rate": (0.02, 0.9),  # at 1, a step from 0 ends on the very sphere
    "momentum": (0.95, 0.0, 0.5),
    "weight_decay": (0.0, 0.1),
    "beta2": (0.95, 0.0),
    "edition": ("2026-01", "2026-08"),
    "lookahead": (True, False),
    "shape_rule": ("max_ratio", "sqrt_ratio", "rms_0.2"),
    "momentum_dtype": ("float32", "bfloat16"),
    "learning_rates": ({"*": 0.5},),
}
AROUND = ("nothing",) * 5 + (
    "skip", "skip", "clip", "clip outside", "if finite", "every two", "injected",
)  # fmt: skip
HOSTILE = (
    "zeros", "one leaf zero", "huge", "tiny", "denormal", "rank one", "one element",
    "equal", "rows apart", "leaves apart",
)  # fmt: skip
UNBOUNDED = ("overflow", "nan", "infinite")  # for `skip_nonfinite` to keep out


def draw(seed: int, number: int) -> Case:
    """The case of this number in the campaign of this seed."""
    return _Draw(np.random.default_rng([seed, number])).case()


class _Draw:
    """Draws one case."""

    def __init__(self, random: np.random.Generator) -> None:
        self.random = random

    def maybe(self, chance: float) -> bool:
        return bool(self.random.random() < chance)

    def one(self, choices: Any) -> Any:
        return choices[int(self.random.integers(len(choices)))]

    def case(self) -> Case:
        mesh = self.one(MESHES)
        divide = tuple(n for n in mesh if self.maybe(0.4))
        train_step = None
        if self.maybe(0.15):
            divide, train_step = (), self.train_step(mesh)
        free = [n for n in mesh if n not in divide]
        dtype = self.one(["float32"] * 7 + ["bfloat16", "float16"])
        recipe = self.one(RECIPES)
        joins = self.one([2, 3]) if self.maybe(0.1) else None
        leaves = self.leaves(mesh, free, dtype, layered=recipe == "teon" or bool(joins))
        around = self.one(AROUND)
        if train_step is not None and around == "clip outside":
            around = "clip"
        if any(leaf.dtype == "int32" for leaf in leaves) and "clip" in around:
            around = "nothing"  # optax clips no integers
        hostile = HOSTILE + (UNBOUNDED if around == "skip" else ())
        return Case(
            leaves,
            recipe,
            self.settings(recipe),
            self.one(["exact", "gram", "schatten"]) if self.maybe(0.15) else None,
            around,
            self.splits(leaves),
            joins,
            self.labels(leaves),
            self.axes(leaves),
            self.one([True, False]) if self.maybe(0.1) else None,
            mesh,
            # Train steps want Auto axes beside those of the batch.
            self.maybe(0.4) and train_step is None,
            divide,
            self.one([1, 1, 64, 1024]),
            self.one([0, 0, 0, 65536]),
            train_step,
            self.one(hostile) if self.maybe(0.4) else "normal",
            self.one([1e-4, 1e-4, 0.0, 1.0]),
            self.one([1, 2, 2, 3]),
            int(self.random.integers(1000)),
        )

    def leaves(
        self, mesh: dict[str, int], free: list[str], dtype: str, layered: bool
    ) -> tuple[Leaf, ...]:
        found: list[Leaf] = []
        while not found or (len(found) < 6 and self.maybe(0.5)):
            path = self.one(PATHS)
            rank = self.one([0, 1, 1, 2, 2, 2, 2, 2, 3, 3, 4])
            layers = self.one([1, 2, 3])
            if not found and self.maybe(0.95):  # a matrix for the recipe
                path, rank = self.one(PATHS[:6]), 2
            if not found and layered:
                path, rank, layers = "blocks_{i}/attn/q", 2, max(2, layers)
            sizes = SIZES if rank < 3 else SIZES[:8]
            even = [n for n in sizes if n % 2 == 0]  # which devices divide likelier
            shape = tuple(
                self.one(even if self.maybe(0.6) else sizes) for _ in range(rank)
            )
            if self.maybe(0.005):
                shape = (*shape, 0)
            own = self.one(["float32", "bfloat16", "int32"]) if self.maybe(0.05) else ""
            for i in range(layers if "{i}" in path else 1):
                name = path.format(i=i)
                twice = name in [x.path for x in found]
                if twice and ("/" not in name or not self.maybe(0.02)):
                    continue
                spec = self.spec(mesh, free, shape)
                found.append(Leaf(name, shape, own or dtype, spec))
        return tuple(found)

    def splits(self, leaves: tuple[Leaf, ...]) -> dict[str, Any]:
        leaf = self.one(leaves)
        parts = self.one([2, ("a", "b"), 3, ("a", "b", "c")])
        count = parts if isinstance(parts, int) else len(parts)
        fits = len(leaf.shape) > 1 and leaf.shape[-1] % count == 0
        if not self.maybe(0.2) or not (fits or self.maybe(0.05)):
            return {}
        return {leaf.path: parts}

    def labels(self, leaves: tuple[Leaf, ...]) -> dict[str, str]:
        found = {}
        for x in leaves:
            is_matrix = len(x.shape) > 1 or self.maybe(0.02)
            if x.dtype == "int32" or self.maybe(0.03):
                found[x.path] = "frozen"
            elif self.maybe(0.1):
                found[x.path] = self.one(["muon", "adamw"] if is_matrix else ["adamw"])
        return found

    def axes(self, leaves: tuple[Leaf, ...]) -> dict[str, tuple[Any, Any]]:
        """For most leaves of which nothing else may tell."""
        found = {}
        for x in leaves:
            rank = len(x.shape)
            if x.dtype == "int32" or not self.maybe(0.95 if rank > 2 else 0.05):
                continue
            order = [int(axis) for axis in self.random.permutation(rank)]
            cut, end = sorted(self.random.integers(1, max(rank, 2) + 1, 2))
            if rank > 1 and cut < end:
                found[x.path] = (tuple(order[:cut]), tuple(order[cut:end]))
            elif rank > 1:
                found[x.path] = (order[0], order[1])
        return found

    def spec(
        self, mesh: dict[str, int], free: list[str], shape: tuple[int, ...]
    ) -> tuple[Entry, ...]:
        entries: list[tuple[str, ...]] = [()] * len(shape)
        for name in free:
            axis = int(self.random.integers(-1, len(shape)))
            if axis < 0:
                continue
            devices = math.prod(mesh[n] for n in (*entries[axis], name))
            if shape[axis] % devices == 0 or self.maybe(0.005):
                entries[axis] = (*entries[axis], name)
        return tuple(e if len(e) > 1 else e[0] if e else None for e in entries)

    def settings(self, recipe: str) -> dict[str, Any]:
        known = inspect.signature(getattr(jm, recipe)).parameters
        found = {
            name: self.one(values)
            for name, values in SETTINGS.items()
            if name in known and self.maybe(0.25)
        }
        found["dtype"] = "bfloat16" if self.maybe(0.1) else "float32"
        found["steps"] = self.one([1, 2, 2, 2, 5])
        return found

    def train_step(self, mesh: dict[str, int]) -> dict[str, Any]:
        axis = tuple(n for n in mesh if n == "data" or self.maybe(0.6))
        return {
            "axis": axis,
            "parameters": self.one(["as specs", "divided"]),
            "microbatches": self.one([1, 1, 2]),
            "accumulate": self.one(["local", "scattered"]),
        }
