"""Follow parameters through operations on each element: sums, scales, functions.

Leaves that meet each other here are followed on, as in `w * scale` or `a @ b + w`.
Where they meet data they are used: `x + bias`, `x * scale`. Under a mask, a scale of
all elements or an update of its shape a leaf may still be a matrix of other data.
"""

from collections.abc import Sequence
from dataclasses import replace

from jax.extend.core import JaxprEqn

from jax_muon.base.jaxprs import shape_of
from jax_muon.reading import attention
from jax_muon.reading import values as v
from jax_muon.reading.trace import ELEMENTWISE, Trace, rule
from jax_muon.reading.values import Parts, Shape, Value, View, axes_in

_ADDS, SCALES = {"add", "sub", "add_any"}, {"mul", "div"}
SUMS = _ADDS | {"select_n"}
LINEAR = SUMS | SCALES | {"neg", "convert_element_type", "stop_gradient", "conj"}
LINEAR |= {"real", "imag", "complex", "psum", "pvary", "reshard", "sharding_constraint"}
_FUNCTIONS = """
    abs sign floor ceil round sqrt rsqrt cbrt square exp exp2 expm1 log log1p logistic
    sin cos tan asin acos atan atan2 sinh cosh tanh asinh acosh atanh erf erfc erf_inv
    lgamma digamma pow max min integer_pow clamp rem nextafter is_finite not and or
    cumsum cumprod cummax cumlogsumexp bitcast_convert_type xor device_put pmax
    pmin pcast pbroadcast psum_invariant mesh_cast layout_constraint
"""
_GATES = {"exp", "exp2", "logistic"}
_COMPARISONS = {"eq", "ne", "lt", "le", "gt", "ge"}
# All others hide what they do with a leaf.
_KNOWN = {*LINEAR, *_FUNCTIONS.split(), *_COMPARISONS}
_OF_GATES = {"mul", "div", "sub", "max", "min", "select_n", "add"}


@rule(ELEMENTWISE, "reduce", "reduce_window")  # with bodies for two elements
def _elementwise(trace: Trace, eqn: JaxprEqn, values: list[Value]) -> list[Value]:
    """An operation on each element; or one without a rule."""
    name, shapes = eqn.primitive.name, [shape_of(x) for x in eqn.outvars]
    shape, given = shapes[0] if shapes else (), [*map(shape_of, eqn.invars)]
    is_known = name in _KNOWN or not any(x.leaves for x in values)
    if is_known and all(_fits(x, shape) for x in [*shapes, *given]):
        if name == "mul":
            _note_rows(trace, eqn, values, given)
        pairs = zip(values, given, strict=True)
        values = [_repeated(x, of, shape) for x, of in pairs]
        result = elementwise(trace, eqn, name, values, shape)
        if name == "mul" and all(x.data for x in values) and shape not in given:
            result = replace(result, gate=v.MIXED)  # x[:, None] * gates[..., None]
        return [result] * len(shapes)
    return trace.opaque(eqn, values, f"it goes into {name}")


def _note_rows(
    trace: Trace, eqn: JaxprEqn, values: Sequence[Value], given: Sequence[Shape]
) -> None:
    """Note rows times numbers: x[:, 2:3] * w[2] may be a part of x @ w."""
    for value, other, shape in zip(values, values[::-1], given[::-1], strict=True):
        for leaf, view in value.leaves.items():
            at = [a for a, _ in enumerate(view.parts) if shape[a : a + 1] == (1,)]
            if view.went(v.INDEX) and axes_in(view.parts, at):
                trace.doubt([leaf], "its rows multiply numbers, as a matrix's do", eqn)
                trace.take(other, leaf)


def _fits(old: Shape, new: Shape) -> bool:
    """Whether (2, 1, 24) or () can be repeated to (2, 16, 24)."""
    pairs = zip(old, new, strict=False)
    return not old or (len(old) == len(new) and all(m in (1, n) for m, n in pairs))


def _repeated(value: Value, old: Shape, new: Shape) -> Value:
    source = {a: a for a, n in enumerate(old) if n == new[a]}
    return value if old == new else value.moved(lambda x: v.placed(x, source, new))


def elementwise(
    trace: Trace, eqn: JaxprEqn, name: str, values: list[Value], shape: Shape
) -> Value:
    """The result of an operation on each element, such as "mul"."""
    if name in SCALES or name == "select_n":
        trace.routes(eqn, values)
    if name == "select_n" and values[1].leaves and values[1] == values[-1]:
        return values[1]  # of a branch under vmap
    scaled = _scaled(values) if name in SCALES else {}
    is_data = any(x.data for x in values)
    # Of w (24, 40) * scale (40,) + data the leaf w is whole and stays one, the scale is
    # used; of x (2, 24) + bias (24,) the bias is, as data has axes that it has not.
    whole = [x for x in values if x.covers(shape)]
    for i, value in enumerate(values) if is_data or whole else ():
        if value.leaves and not value.covers(shape):
            values = [*values]
            if any(value.leaves.keys() <= x.leaves.keys() for x in whole):
                values[i] = Value()  # its norm
                continue
            if name in SUMS and is_data:
                _note_distances(trace, eqn, value)
            values[i] = replace(trace.as_data(value, eqn), data=is_data)
    result = v.joined(values)
    gate = _gate(name, values, result)
    if name in _GATES and result.scores:
        # exp(q @ k.T + q @ table.T): the product with the table takes q, one of those
        # that are compared. The bias in exp(q @ k.T + table[distances]) does not.
        behind = {x for s in result.scores for of in s.operands for x in of}
        direct = result.sources.keys() - behind
        tables = [use.path for use in direct if use.by & behind]
        trace.doubt(tables, "queries are compared with it, as with a table", eqn)
        none = dict.fromkeys(result.sources, ((),) * len(shape))
        result = replace(result, sources=none)  # also of a bias for each head
    if name in _COMPARISONS and not result.scores and values[0] != values[1]:
        both = values[0].sources.keys() & values[1].sources.keys()
        of_both = {(x, False) for x in both if axes_in(result.sources[x])}
        result = replace(result, chosen=result.chosen | of_both)
    if name == "mul":
        _note_gates(trace, values)
        attention.note_multiplied(trace.facts.attention, values)
    scaled = {**result.scaled, **scaled} if name in LINEAR else {}
    leaves = _leaves(trace, eqn, name, values)
    return replace(result, gate=gate, scaled=scaled, leaves=leaves)


def _gate(name: str, values: Sequence[Value], result: Value) -> str:
    """Which gates the result is; `values.py` lists them."""
    if name == "convert_element_type":
        return values[0].gate
    if name == "eq" and sum(x.data for x in values) < 2:  # or an identity
        return v.HOT
    if name in _GATES and result.data:
        return v.SOFT
    if {x.gate for x in values if x.data} == {v.HOT, ""}:
        return v.MASKED
    gates = {x.gate for x in values if x.data and (x.gate or x.sources)}
    if name in SCALES and gates == {v.SOFT}:
        return v.SOFT  # times a mask, as of dropout, or a learned number
    of_gates = v.joined(values[1:]) if name == "select_n" else result
    if name in _OF_GATES:
        return of_gates.gate
    return v.MASKED if of_gates.gate == v.HOT else ""  # as of round(one_hot)


def _leaves(
    trace: Trace, eqn: JaxprEqn, name: str, values: Sequence[Value]
) -> dict[str, View]:
    """The leaves of the result, which is a function of them if it is not linear.

    Of mean + softplus(rho) * noise and w * sigmoid(mask) the first leaf is followed.
    """
    found: dict[str, list[View]] = {}
    for leaf, view in [x for value in values for x in value.leaves.items()]:
        found.setdefault(leaf, []).append(view)
    leaves, is_data = {}, any(x.data for x in values)
    for leaf, views in found.items():
        if is_data and len(trace.wide(leaf)) < 2:
            trace.use({leaf: views[0]}, "elementwise", eqn)
            continue
        some = any if name in {*SCALES, "select_n"} else all
        activated = name not in LINEAR or some(x.activated for x in views)
        one = max(views, key=lambda x: len(axes_in(x.parts)))
        scaled = any(x.scaled for x in views) or (is_data and name not in _ADDS)
        leaves[leaf] = replace(one, activated=activated, scaled=scaled)
        are_rows = len(views) > 1 and one.went(v.INDEX)
        gone = [frozenset(x.gone.keys() - x.went(v.SUMMED)) for x in views]
        if are_rows or len({*gone}) > 1:
            trace.lose([leaf], "parts of it meet each other", eqn)
    # Of w * sigmoid(mask) the mask is a function and w is not: the mask is used here.
    plain = {x for x in leaves if not leaves[x].activated}
    beside = {x for value in values if plain & {*value.leaves} for x in value.leaves}
    if plain and (is_data or name not in SUMS):
        masks = {x: leaves.pop(x) for x in leaves.keys() - beside}
        trace.use(masks, "elementwise", eqn)
    if name in _ADDS and len({x.scaled for x in leaves.values()}) > 1:
        drawn = [x for x in leaves if leaves[x].scaled]  # mean + sigma * noise
        why = "data multiplies its elements, then a parameter is added"
        trace.doubt(drawn, why, eqn)
    wide = [x for x, view in leaves.items() if len(axes_in(view.parts)) > 1]
    if name in SCALES and len(wide) > 1:
        trace.doubt(wide, "another parameter multiplies its elements", eqn)
    return leaves


def _scaled(values: Sequence[Value]) -> dict[tuple[str, bool], Parts]:
    """Leaves that multiply data, and those of their axes that the data may not have.

    A sum along them may be a product with a matrix: (x[:, :, None] * w).sum(1).
    """
    scaled: dict[tuple[str, bool], Parts] = {}
    sources = [parts for x in values if x.data for parts in x.sources.values()]
    for value in values if any(x.data for x in values) else ():
        if value.data and all(x.kind == "picked" for x in value.sources):
            scaled |= {(x.path, False): of for x, of in value.sources.items()}
        for leaf, view in value.leaves.items() if not value.went(v.PICKED) else ():
            scaled[leaf, False] = view.parts
            scaled[leaf, True] = tuple(
                () if any(axes_in([of[a]]) for of in sources) else x
                for a, x in enumerate(view.parts)
            )
    return scaled


def _note_gates(trace: Trace, values: Sequence[Value]) -> None:
    """Note outputs (tokens, experts, out) that others (tokens, experts) multiply."""
    for value, gates in (values, values[::-1]):
        of_gates = [x for of in gates.sources.values() for x in enumerate(of)]
        met = {place for place, of_axis in of_gates if axes_in([of_axis])}
        are_gates = value.gate and not gates.gate  # whose own outputs are a batch
        for use, parts in value.sources.items() if not are_gates else ():
            inside = axes_in(parts, met)
            if axes_in(parts) - inside and use not in gates.sources:
                trace.facts.gated |= dict.fromkeys((use, axis) for axis in inside)


def _note_distances(trace: Trace, eqn: JaxprEqn, value: Value) -> None:
    """Note (c ** 2).sum(-1) in a sum with data: squared distances to centers."""
    for leaf, view in value.leaves.items():
        if view.activated and view.went(v.SUMMED) and axes_in(view.parts):
            trace.doubt([leaf], "distances to its rows may be taken", eqn)
