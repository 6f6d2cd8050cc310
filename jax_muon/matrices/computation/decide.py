"""From uses and edges to a reading: label, role, axes, and why.

First the edges between uses revise the sides of their axes, and give them roles. Then
the first rule that knows an answer decides about a leaf. Every rule is a function; a
test switches each of them off, and names the program that then is read wrongly.
"""

import collections
import functools
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax.numpy as jnp

from jax_muon.base import jaxprs, trees
from jax_muon.matrices.computation.trace import SUMS, Trace
from jax_muon.matrices.computation.values import (
    BATCH,
    CONSTANT,
    IN,
    INNER,
    OUT,
    Edge,
    Heads,
    Sides,
    Use,
)
from jax_muon.matrices.matrices import (
    ADAMW,
    MUON,
    MatrixAxes,
    Parameter,
    not_a_matrix,
    numbers_text,
)

# --- what follows from the edges ------------------------------------------------------


@dataclass
class Evidence:
    """Facts about every use, after the edges.

    Attributes:
      sides: of the axes of its leaf.
      marks: by kind of edge, the uses that it says something of, and of which axes.
      roles: in attention: query, key, value or table; "fused" for several.
      takers: products that take its result, so that it is no head; None is a frozen
        kernel.
      slices: parts of its outputs, by axis.
      heads: that an attention makes of its outputs.
    """

    sides: dict[Use, Sides] = field(default_factory=dict)
    marks: dict[str, dict[Use, frozenset[int]]] = field(
        default_factory=lambda: _of(dict)
    )
    roles: dict[Use, str] = field(default_factory=dict)
    takers: dict[Use, set[Use | None]] = field(default_factory=lambda: _of(set))
    slices: dict[Use, dict[int, set[tuple[int, int]]]] = field(
        default_factory=lambda: _of(lambda: _of(set))
    )
    heads: dict[Use, set[Heads]] = field(default_factory=lambda: _of(set))

    def marked(self, kind: str, use: Use) -> frozenset[int]:
        """The axes of a use that edges of a kind name."""
        return self.marks[kind].get(use, frozenset())

    def revise(self, use: Use, sides: dict[int, str]) -> None:
        """Override the sides of these axes."""
        new = {axis: frozenset({side}) for axis, side in sides.items()}
        self.sides[use] = {**self.sides[use], **new}

    def separate(self, use: Use, axes: Iterable[int], side: str = OUT) -> None:
        """Make axes a batch of matrices, where others of this side are left."""
        for axis in axes:
            sides = self.sides.get(use, {})
            others = [x for a, x in sides.items() if a != axis]
            is_left = {side} in others or {INNER} in others
            if sides.get(axis) == {side} and is_left:
                self.revise(use, {axis: BATCH})

    def separate_members(self, use: Use, axes: Iterable[int]) -> None:
        """Make outputs of members a batch: axis 0 of (members, in, out).

        And of members of members, but not of heads in (in, heads, head).
        """
        for axis in sorted(axes):
            sides = self.sides.get(use, {})
            if all(sides.get(a) == {BATCH} for a in range(axis)):
                self.separate(use, [axis])


def _of(make: Callable[[], Any]) -> Any:
    return collections.defaultdict(make)


def evidence(trace: Trace) -> Evidence:
    """What the edges say of all uses; later ones may decide what earlier ones mean."""
    found = Evidence(
        {x: x.sides for uses in trace.uses.values() for x in uses.values()}
    )
    while True:
        before = {**found.sides}
        for edge in trace.edges:
            if edge.about == "sum" and edge.other in trace.scaling:
                continue
            if edge.use in found.sides or not edge.use.path:
                EDGES[edge.kind](found, edge)
        if found.sides == before:
            return found


def _marks(found: Evidence, edge: Edge) -> None:
    """The kind and the axes say it all.

    "gated": gates (tokens, experts) multiply its outputs (tokens, experts, out).
    "scaled": other activations, such as sigmoids, multiply them in that way. "gates":
    its outputs are such gates. "by gates": its input are gates. "chooses": a top-k of
    its outputs chooses experts. "scales": its result scales its own leaf, as in a power
    iteration. "either": either of two leaves may be data. "multiplied": slices of its
    outputs multiply each other.
    """
    found.marks[edge.kind][edge.use] = edge.axes | found.marked(edge.kind, edge.use)


def _takes(found: Evidence, edge: Edge) -> None:
    """A product or a frozen kernel takes its result: it is no head."""
    found.takers[edge.use].add(edge.other)


def _sliced(found: Evidence, edge: Edge) -> None:
    """Some of its outputs, as q, k and v = split(x @ w, 3)."""
    start, stop = map(int, edge.about)
    for axis in edge.axes:
        found.slices[edge.use][axis].add((start, stop))


def _has_heads(found: Evidence, edge: Edge) -> None:
    """Attention takes its outputs (tokens, heads * 64) as (tokens, heads, 64)."""
    found.heads[edge.use].add(Heads(*map(int, edge.about)))


def _summed(found: Evidence, edge: Edge) -> None:
    """A sum over experts whose outputs (tokens, experts, out) gates multiplied."""
    found.separate(edge.use, edge.axes & found.marked("gated", edge.use))
    found.separate_members(edge.use, edge.axes & found.marked("scaled", edge.use))


def _contracts(found: Evidence, edge: Edge) -> None:
    """The next product (experts, in, out) also sums over the experts."""
    use, gated = edge.use, found.marked("gated", edge.use)
    if edge.other and edge.axes & (gated | found.marked("gates", use)):
        found.separate(use, edge.axes & gated)
        found.separate(edge.other, edge.others, IN)


def _apart(found: Evidence, edge: Edge) -> None:
    """Its outputs are of several experts, or members.

    "weighed": a product with gates sums over them. "grouped": `vmap` made groups of a
    convolution of them, one for each member.
    """
    found.separate(edge.use, edge.axes)


def _batched(found: Evidence, edge: Edge) -> None:
    """A later product has a batch along its outputs: members that share an input."""
    found.separate_members(edge.use, edge.axes)


def _in_turns(found: Evidence, edge: Edge) -> None:
    """Outputs one by one, as lax.map(lambda c: x @ c, w.T); rows of w in each turn.

    Or heads (24, 4, 6) one by one: what they give lies side by side again.
    """
    left = [x for x in found.sides[edge.use].values() if x != {BATCH}]
    if edge.about or all(x == {IN} for x in left) or left == [{INNER}]:
        found.revise(edge.use, dict.fromkeys(edge.axes, OUT))


def _mixed(found: Evidence, edge: Edge) -> None:
    """Gates mixed (experts, in, out), einsum("be,eio->bio"), into matrices of data."""
    if edge.use in found.marks["by gates"]:
        _kernel(found, edge)


def _kernel(found: Evidence, edge: Edge) -> None:
    """The same of any weights, einsum("e,ehwio->hwio"), that a convolution takes."""
    sides = found.sides[edge.use]
    inside, outside = (
        {a for a in axes if sides.get(a) != {BATCH}}
        for axes in (edge.axes, edge.others)
    )
    are_outputs = all(sides.get(axis) == {OUT} for axis in inside | outside)
    if inside and outside and not inside & outside and are_outputs:
        after = {a: BATCH if x & {IN, BATCH} else OUT for a, x in sides.items()}
        found.revise(edge.use, after | dict.fromkeys(inside, IN))


def _attends(found: Evidence, edge: Edge) -> None:
    """It makes queries, keys or values of an attention; a fused kernel, several."""
    role = str(edge.about)
    same = found.roles.get(edge.use, role) in ("table", role)
    found.roles[edge.use] = role if same else "fused"


def _compared(found: Evidence, edge: Edge) -> None:
    """Queries, or keys, are compared with it: a table, as of segments in XLNet.

    Positions (steps, in) @ w, of constants, are keys: then w is a matrix, not a table.
    """
    use = edge.use
    alone = {axis for axis in use.constant if use.sides[axis] == {CONSTANT}}
    if inside := use.constant & edge.axes | alone:
        outside = {a: OUT for a, x in use.sides.items() if x == {IN}}
        found.revise(use, outside | dict.fromkeys(inside, IN))
    else:
        found.roles.setdefault(use, "table")


EDGES: dict[str, Callable[[Evidence, Edge], None]] = {
    "takes": _takes,
    "sliced": _sliced,
    "heads": _has_heads,
    "summed": _summed,
    "contracts": _contracts,
    "weighed": _apart,
    "grouped": _apart,
    "batched": _batched,
    "in turns": _in_turns,
    "mixed": _mixed,
    "kernel": _kernel,
    "attends": _attends,
    "compared": _compared,
    **dict.fromkeys(("gated", "scaled", "gates", "by gates", "chooses"), _marks),
    **dict.fromkeys(("scales", "either", "multiplied"), _marks),
}

# --- the uses of one leaf -------------------------------------------------------------

_PRODUCTS = ("contracted", "convolved", "grouped")  # kinds of uses
# Label, role, reason and axes; a matrix without axes is undecided.
Answer = tuple[str, str, str, MatrixAxes | None]


@dataclass
class Leaf:
    """The uses of a leaf that count, as the rules see them."""

    path: str
    shape: tuple[int, ...]
    trace: Trace
    found: Evidence

    @functools.cached_property
    def every(self) -> list[Use]:
        """All uses; without a power iteration's, if others are products."""
        uses = [*self.trace.uses[self.path].values()]
        scales = [x for x in uses if x in self.found.marks["scales"]]
        is_used = any(x.kind in _PRODUCTS and x not in scales for x in uses)
        return [x for x in uses if x not in scales] if is_used else uses

    @functools.cached_property
    def uses(self) -> list[Use]:
        """Uses in the loss itself; in its gradients, if the leaf is used only there."""
        least = _depth(self.every) if self.every else 0
        return [use for use in self.every if use.depth == least]

    @functools.cached_property
    def products(self) -> list[Use]:
        """Those that make it a matrix; first those that other products take."""
        products = [use for use in self.uses if use.kind in _PRODUCTS]
        return sorted(products, key=lambda use: not self.found.takers[use])

    @functools.cached_property
    def readings(self) -> list[MatrixAxes | str]:
        """The axes of each product, or why they are unknown."""
        return [_matrix_axes(self, use) for use in self.products]

    @property
    def known(self) -> list[MatrixAxes]:
        """The axes of each product that shows them."""
        return [x for x in self.readings if isinstance(x, MatrixAxes)]

    @functools.cached_property
    def axes(self) -> MatrixAxes | None:
        """The axes of the first product whose axes are known."""
        return next(iter(self.known), None)

    def at(self, *kinds: str) -> str:
        """The lines of the user's code, for a message."""
        uses = sorted(self.every, key=lambda use: use.number)
        lines = [use.line for use in uses if use.kind in kinds and use.line]
        return f" at {', '.join([*dict.fromkeys(lines)][:3])}" if lines else ""

    @property
    def first(self) -> str:
        """The kind of its first product, along which axes, and where."""
        inside = self.axes.reduction if self.axes else ()
        plural = "axis" if len(inside) == 1 else "axes"
        over = f" over {plural} {', '.join(map(str, inside))}" if inside else ""
        kind = min(self.products, key=lambda use: use.number).kind
        return f"{kind}{over}{self.at(*_PRODUCTS)}"


def parameter(
    path: str, leaf: Any, trace: Trace, found: Evidence, is_split: bool
) -> Parameter:
    """How a leaf is read, by its uses; with a doubt, if they do not decide.

    The reason says if a kernel holds several products side by side, unless `is_split`.
    """
    shape = tuple(leaf.shape)
    seen = Leaf(path, shape, trace, found)
    label, role, reason, axes = next(filter(None, (x(seen) for x in LABELS)))
    if path in trace.inputs:
        label, role, axes = ADAMW, "input", None
        reason = f"used like data, with matrices of its own at {trace.inputs[path]}"
    if not_a_matrix(shape, leaf.dtype):
        label, role, axes = ADAMW, "vector" if label == MUON else role, None
    elif role in ("kernel", "convolution") and "router" in trees.words(path):
        label, role, reason = ADAMW, "router", f"a router, by its name; {reason}"
    elif label == MUON and not is_split:
        reason += _split(seen, role) or _stacked(path, role, axes)
    scanned = {x for x in trace.scanned[path] if axes is None or x in axes.batch}
    doubt = reason if label == MUON and axes is None else None
    by = path, shape, leaf.dtype, label, role, reason, axes, doubt
    heads = _heads(seen) if axes and label == MUON else ()
    scan = trace.scans.get(path, "") if scanned else ""
    return Parameter(*by, scanned=tuple(sorted(scanned)), scan=scan, heads=heads)


def doubted(x: Parameter, trace: Trace) -> Parameter:
    """With a doubt, if constants or other parameters were multiplied by it."""
    uses = trace.uses[x.path].values()
    sides = [x for use in uses for x in use.sides.values()]
    inside = any(INNER in x for x in sides) or any(use.constant for use in uses)
    if x.role != "elementwise" or len(x.shape) < 2 or not inside:
        return x
    doubt = "nothing but parameters and constants is multiplied by it"
    return replace(x, label=MUON, role="unknown", doubt=doubt)


def agreeing(one: Parameter, three: Parameter) -> Parameter:
    """A reading by one sample, with a doubt if three samples are read otherwise."""
    if (one.label, one.axes) == (three.label, three.axes):
        return one
    doubt = f"one sample ({one.role}) and three ({three.role}) are read differently"
    return replace(one, label=MUON, axes=None, role="unknown", doubt=doubt)


def with_agreeing_layers(
    parameters: Sequence[Parameter], trace: Trace
) -> list[Parameter]:
    """Make the head of one layer a kernel, if it is a kernel in other layers.

    A function that ends before the model's head, such as an encoder, has its last
    kernels as its last products.
    """
    matrices = [x for x in parameters if len(x.shape) > 1]
    number = collections.Counter(x.path.rpartition("/")[0] for x in matrices)
    both = [(_places(x, trace, number), x) for x in parameters]
    kernels = {key: x for keys, x in both if x.label == MUON for key in keys}
    agreed = []
    for keys, x in both:
        like = next((kernels[key] for key in keys if key in kernels), None)
        if x.role == "head" and like:
            reason = f"{x.reason}, and like {like.path!r}"
            x = replace(x, label=MUON, role=like.role, reason=reason)
        agreed.append(x)
    return agreed


def _places(x: Parameter, trace: Trace, number: Mapping[str, int]) -> list[Any]:
    """What parameters of several layers have in common: a name, or the code.

    `layers/0/down` and `layers/1/down`, beside `up`, have a name. Of a list of matrices
    or of modules with one each, 0, 1 and 2 or Dense_0, Dense_1 and Dense_2, those are
    layers that the same place of the code uses, turn by turn of a loop.
    """
    above = x.path.rpartition("/")[0]
    if number[above] == 1:
        above = above.rpartition("/")[0]
    own = x.path.removeprefix(above)
    keys: list[Any] = [(trees.numberless(above), own, x.shape)]
    if re.search(r"\d", own):
        places = [jaxprs.places_of(use.calls) for use in trace.uses[x.path].values()]
        keys.append((trees.numberless(x.path), x.shape, *places))
    return keys


def _depth(uses: Collection[Use]) -> int:
    """How deep in gradients the uses are that count: 0, if the loss itself has some.

    Weight decay, a sum of squares or of the largest, and opaque kernels do not count
    beside others.
    """
    shown = [use for use in uses if use.kind != "opaque" and use.left]
    shown = [use for use in shown if use.primitive not in ("sort", "top_k")]
    return min(use.depth for use in shown or uses)


# --- labels: the first rule that knows an answer counts -------------------------------


def _unused(leaf: Leaf) -> Answer | None:
    """Nothing uses it."""
    if leaf.uses:
        return None
    return ADAMW, "unused", "the result does not depend on it", None


def _lost(leaf: Leaf) -> Answer | None:
    """v[order][:24] of several parameters in one vector v."""
    if not any(use.kind == "lost" for use in leaf.every):
        return None
    reason = "it is cut out of a vector, or of rows, whose order is not followed"
    return MUON, "unknown", f"{reason}{leaf.at('lost')}", None


def _embedding(leaf: Leaf) -> Answer | None:
    """emb[ids]: rows, not matrices w[expert] that data picks and multiplies by."""
    kinds = {use.kind for use in leaf.every}
    is_expert = any(x.is_picked and x.kind == "contracted" for x in leaf.every)
    if "picked" not in kinds or is_expert:
        return None
    reason = f"rows picked by integers{leaf.at('picked')}"
    return ADAMW, "embedding", reason, None


def _hidden(leaf: Leaf) -> Answer | None:
    """fft(filters), which takes a spectrum; an opaque kernel."""
    opaque = [use for use in leaf.uses if use.kind == "opaque"]
    if leaf.products or not opaque:
        return None
    at = leaf.at("opaque")
    if opaque[0].primitive == "fft":
        return ADAMW, "complex", f"its spectrum is taken{at}", None
    names = {use.primitive: None for use in opaque}
    return MUON, "unknown", f"it goes into {', '.join(names)}{at}", None


def _elementwise(leaf: Leaf) -> Answer | None:
    """x * scale + bias: no product."""
    if leaf.products:
        return None
    return ADAMW, "elementwise", f"elementwise{leaf.at('elementwise')}", None


def _convolved_in_groups(leaf: Leaf) -> Answer | None:
    """A depthwise kernel (3, 3, 1, channels)."""
    if leaf.products[0].kind != "grouped":
        return None
    return ADAMW, "grouped", f"a convolution in groups{leaf.at(*_PRODUCTS)}", None


def _complex(leaf: Leaf) -> Answer | None:
    """A product of complex numbers, as for each frequency of a spectrum."""
    dtypes = [getattr(v.aval, "dtype", int) for v in leaf.products[0].calls[-1].invars]
    if not any(jnp.issubdtype(x, jnp.complexfloating) for x in dtypes):
        return None
    reason = f"a product of complex numbers{leaf.at(*_PRODUCTS)}"
    return ADAMW, "complex", reason, None


def _unknown(leaf: Leaf) -> Answer | None:
    """No product shows the side of each axis."""
    if leaf.axes:
        return None
    return MUON, "unknown", f"{leaf.readings[0]}{leaf.at(*_PRODUCTS)}", None


def _vector(leaf: Leaf) -> Answer | None:
    """x @ w of (in, 1), in all its products."""
    if not all(1 in x.fan(leaf.shape) for x in leaf.known):
        return None
    return ADAMW, "vector", f"one row or column, {leaf.first}", leaf.axes


def _table(leaf: Leaf) -> Answer | None:
    """softmax(q @ k.T + q @ segments.T) v: queries are compared with its rows."""
    if {leaf.found.roles.get(use) for use in leaf.products} != {"table"}:
        return None
    reason = f"a table that queries are compared with{leaf.at(*_PRODUCTS)}"
    return ADAMW, "embedding", reason, leaf.axes


def _centers(leaf: Leaf) -> Answer | None:
    """(c ** 2).sum(-1) - 2 x @ c.T: a sum over the inputs alone, as of distances."""
    assert leaf.axes
    inside, batch, out = leaf.axes.reduction, {*leaf.axes.batch}, {*leaf.axes.output}
    sums = [x for x in leaf.uses if x.primitive in SUMS and x.left - batch == out]

    def is_summed(x: Use, axis: int) -> bool:  # also by einsum("ni,ni->n", c, c)
        by_itself = {INNER} if not leaf.trace.met[leaf.path, axis] else {*()}
        return x.sides.get(axis, by_itself) <= by_itself

    if not any(all(is_summed(x, a) for a in inside) for x in sums):
        return None
    reason = f"its rows' distances to data are taken{leaf.at(*_PRODUCTS)}"
    return ADAMW, "centers", reason, leaf.axes


def _router(leaf: Leaf) -> Answer | None:
    """top_k(softmax(x @ w)) says which experts are computed."""
    if not leaf.found.marks["chooses"].keys() & leaf.products:
        return None
    reason = f"a top-k chooses among its outputs{leaf.at(*_PRODUCTS)}"
    return ADAMW, "router", reason, leaf.axes


def _head(leaf: Leaf) -> Answer | None:
    """Nothing takes its result, in the loss or in a gradient where either counts."""
    assert leaf.axes
    least, sides = leaf.uses[0].depth, [leaf.found.sides[x] for x in leaf.products]
    if any(INNER in x.get(a, ()) for x in sides for a in leaf.axes.output):
        return None  # h @ (a @ b), where b takes what a makes
    for use in leaf.every:
        for x in leaf.found.takers[use]:
            uses = leaf.trace.uses[x.path].values() if x else ()
            if not x or use.depth == x.depth == least or x.depth == _depth(uses):
                return None
    reason = f"last product before the result{leaf.at(*_PRODUCTS)}"
    return ADAMW, "head", reason, leaf.axes


def _contradictory(leaf: Leaf) -> Answer | None:
    """x @ w and einsum("io,io->o", y, w): other axes; both ways, x @ w.T, are one."""
    assert leaf.axes
    axes = leaf.axes
    either = axes, MatrixAxes(axes.batch, axes.output, axes.reduction)
    if not (others := [x for x in leaf.known if x not in either]):
        return None
    texts = [numbers_text(x.reduction, x.output) for x in (axes, others[0])]
    reason = f"it is used as {' and '.join(texts)}{leaf.at(*_PRODUCTS)}"
    return MUON, "contradictory", reason, None


def _fused(leaf: Leaf) -> Answer | None:
    """q, k, v = split(x @ w, 3); gate, up = split(x @ w, 2), silu(gate) * up."""
    found, products = leaf.found, leaf.products
    roles = {found.roles[use] for use in products if use in found.roles}
    parts = [
        found.sides[use].get(axis) == {OUT}
        for use in products
        if use in found.marks["multiplied"]
        for axis, slices in found.slices[use].items()
        if len(slices) > 1  # not x[:, :12], which a gate of the next layer takes
    ]
    if len(roles) > 1 or roles == {"fused"} or (any(parts) and not roles):
        return MUON, "fused", leaf.first, leaf.axes
    return None


def _kernel_of_role(leaf: Leaf) -> Answer | None:
    """All others."""
    roles = [leaf.found.roles[x] for x in leaf.products if x in leaf.found.roles]
    kind = min(leaf.products, key=lambda use: use.number).kind
    role = "convolution" if kind == "convolved" else "kernel"
    return MUON, roles[0] if roles else role, leaf.first, leaf.axes


LABELS: list[Callable[[Leaf], Answer | None]] = [
    _unused,
    _lost,
    _embedding,
    _hidden,
    _elementwise,
    _convolved_in_groups,
    _complex,
    _unknown,
    _vector,
    _table,
    _centers,
    _router,
    _head,
    _contradictory,
    _fused,
    _kernel_of_role,
]


def _stacked(path: str, role: str, axes: MatrixAxes | None) -> str:
    """What to say of a kernel that may be a stack of matrices with one input, or ""."""
    if axes is None or role != "kernel" or len(axes.output) < 2:
        return ""
    if axes.output[0] > axes.reduction[0]:
        return ""
    first, *others = axes.output
    numbers = numbers_text(axes.reduction, others)
    return f"; if axis {first} is a stack: rules={{{path!r}: {numbers}}}"


def _split(leaf: Leaf, role: str) -> str:
    """What to say of a kernel whose outputs are split, or ""."""
    shape, found = leaf.shape, leaf.found
    sliced = [(use, axis) for use in leaf.uses for axis in found.slices[use]]
    for use, axis in sliced if role == "fused" else ():
        if widths := _widths(found, use, axis, shape[axis]):
            split: Any = {f"part_{i}": width for i, width in enumerate(widths)}
            split = split if len({*widths}) > 1 else (*split,)
            last = "" if axis == len(shape) - 1 else f", axis={axis}"
            pattern = re.sub(r".*/\d+/", "", leaf.path)  # of all layers
            text = f"splits={{{pattern!r}: Split({split}{last})}}"
            return f"; its outputs are split: {text}"
    return ""


def _widths(found: Evidence, use: Use, axis: int, size: int) -> list[int]:
    """The widths of slices that outputs are cut into, in their order, if they are."""
    slices = found.slices[use][axis]
    # Slices of a slice count from its start, so another one contains them.
    parts = [
        (start, stop)
        for start, stop in sorted(slices)
        if not any(a <= start and stop <= b for a, b in slices - {(start, stop)})
    ]
    starts, stops = zip(*parts, strict=True) if parts else ((), ())
    is_all = (*starts, size) == (0, *stops) and found.sides[use].get(axis) == {OUT}
    return [stop - start for start, stop in parts] if is_all else []


def _heads(leaf: Leaf) -> tuple[tuple[int, int, int], ...]:
    """`Parameter.heads`: the heads of each slice of its outputs.

    A fused kernel (768, 1280) of 12, 4 and 4 heads of 64 has (1, 768, 12), (1, 256, 4)
    and (1, 256, 4): heads of one stride fill the whole width of a slice.
    """
    found, roles = leaf.found, leaf.found.roles
    uses = [use for use in leaf.uses if roles.get(use, "table") != "table"]
    heads = []
    for axis in leaf.axes.output if uses and leaf.axes else ():
        size = leaf.shape[axis]
        every = [x for use in uses for x in found.heads[use] if x.axis == axis]
        sliced = [_widths(found, use, axis, size) for use in uses]
        for width in next(filter(None, sliced), [size]):
            fitting = [x.number for x in every if x.number * x.stride == width]
            heads.append((axis, width, max(fitting, default=1)))
    return tuple(heads)


def _matrix_axes(leaf: Leaf, use: Use) -> MatrixAxes | str:
    """The axes of one use, or why they are unknown."""
    shape, found = leaf.shape, leaf.found
    # Outputs cut one by one are of members, or q, k and v in (24, 3, 40); of queries
    # alone, (24, heads, head), they are heads.
    are_heads = found.roles.get(use, "fused") != "fused"
    separate = found.separate_members if are_heads else found.separate
    for axis, slices in found.slices[use].items():
        if slices >= {(i, i + 1) for i in range(shape[axis])}:
            separate(use, [axis])
    sides = {axis: {*found.sides[use].get(axis, ())} for axis in range(len(shape))}
    for axis, x in sides.items():
        if INNER in x and use in found.marks["either"]:
            if not leaf.trace.met[leaf.path, axis]:
                return "it is multiplied by itself, and either factor may be data,"
            return "of two parameters multiplied with each other either may be data,"
        if INNER in x:
            inner = _inner_side(use, axis, leaf.trace, found, {use.path})
            sides[axis] = x = x - {INNER} | {inner}
    if len(alone := [axis for axis, x in sides.items() if x != {BATCH}]) == 1:
        sides[alone[0]] = {IN}  # a vector, whatever is done to it
    for axis, x in sides.items():
        if not x and shape[axis] == 1:
            x.add(BATCH)
        if len(x) != 1:
            both = f"both {' and '.join(sorted(x))}" if x else "neither in nor out"
            return f"axis {axis} is {both}"
    batch, fan_in, fan_out = (
        tuple(a for a in sides if sides[a] == {side}) for side in (BATCH, IN, OUT)
    )
    return MatrixAxes(batch, fan_in, fan_out)


def _inner_side(
    use: Use, axis: int, trace: Trace, found: Evidence, seen: set[str]
) -> str:
    """The side of an axis that was contracted with another leaf.

    In x @ (a @ b @ c), of (6, 5), (5, 4) and (4, 7), x makes axis 0 of a an input: axis
    1 is an output, so axis 0 of b, which meets it, is an input.
    """
    known = {IN, OUT} & set().union(*found.sides[use].values())
    if len(known) == 1:
        return OUT if IN in known else IN
    for path, at in sorted(trace.met[use.path, axis]):
        uses = trace.uses[path].values()
        twins = [x for x in uses if x.calls is use.calls]
        for twin in twins if path not in seen else ():
            sides = found.sides[twin]
            others = {IN, OUT} & set().union(*sides.values())
            if len(others) == 1:
                return IN if IN in others else OUT
            for a, x in sides.items():
                if a != at and INNER in x:
                    return _inner_side(twin, a, trace, found, {*seen, path})
            if not others:  # numbers (3,) of three matrices (3, 24, 40)
                return IN
    return OUT if known else IN
