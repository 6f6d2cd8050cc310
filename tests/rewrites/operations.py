"""Single operations of a traced loss in another form.

`of_operations` traces the loss, and runs the jaxpr again with other operations in the
places of some: loops and branches are built again around their bodies, functions are
inlined, and kernels, solvers and `shard_map` stay as they are.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from tests.rewrites.case import dataclasses, is_float, register

# --- a jaxpr, run with rules ----------------------------------------------------------

CALLS = ("jit", "checkpoint", "remat2", "closed_call", "core_call")
CALLS += ("custom_jvp_call", "custom_vjp_call")


def run(jaxpr, values, rules):
    """The results of a jaxpr; `rules` have a function(eqn, *values) by primitive.

    A rule returns the result in another form, a list if there are several, or None.
    """
    consts = ()
    if isinstance(jaxpr, ClosedJaxpr):
        jaxpr, consts = jaxpr.jaxpr, jaxpr.consts
    known = dict(zip(jaxpr.constvars, consts, strict=True))
    known |= zip(jaxpr.invars, values, strict=True)

    def value(v):
        return v.val if isinstance(v, Literal) else known[v]

    for eqn in jaxpr.eqns:
        operands = [value(v) for v in eqn.invars]
        rule = rules.get(eqn.primitive.name)
        with jax.named_scope(str(eqn.source_info.name_stack)):  # as JAX itself keeps it
            result = rule(eqn, *operands) if rule else None
            if result is None:
                result = _as_it_is(eqn, operands, rules)
        results = result if isinstance(result, list) else [result]
        known |= zip(eqn.outvars, results, strict=True)
    return [value(v) for v in jaxpr.outvars]


def _as_it_is(eqn, values, rules):
    """The same operation, with rules for what is in it."""
    name, params = eqn.primitive.name, eqn.params
    if name in CALLS:
        kinds = ClosedJaxpr | Jaxpr
        inner = next(x for x in params.values() if isinstance(x, kinds))
        return run(inner, values, rules)
    if name == "scan":
        (consts, carry, xs), body = scan_parts(eqn, values), params["jaxpr"]

        def step(carry, x):
            out = run(body, [*consts, *carry, *x], rules)
            return out[: len(carry)], out[len(carry) :]

        length, reverse = params["length"], params["reverse"]
        carry, ys = lax.scan(step, carry, xs, length, reverse)
        return [*carry, *ys]
    if name == "while":
        n, m = params["cond_nconsts"], params["body_nconsts"]
        of_cond, of_body, carry = values[:n], values[n : n + m], values[n + m :]
        return lax.while_loop(
            lambda c: run(params["cond_jaxpr"], [*of_cond, *c], rules)[0],
            lambda c: run(params["body_jaxpr"], [*of_body, *c], rules),
            carry,
        )
    if name == "cond":
        which, *operands = values
        branches = [
            functools.partial(lambda body, *x: run(body, x, rules), body)
            for body in params["branches"]
        ]
        return lax.switch(which, branches, *operands)
    with eqn.ctx.manager:
        return eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(params))


def scan_parts(eqn, values):
    """Constants, carry and rows of a scan."""
    n, m = eqn.params["num_consts"], eqn.params["num_carry"]
    return list(values[:n]), list(values[n : n + m]), list(values[n + m :])


def of_operations(**rules):
    """A rewrite with `rules` for primitives, in which _ is -."""

    def change(case):
        def loss(p, *args):
            closed, shape = jax.make_jaxpr(case.loss, return_shape=True)(p, *args)
            results = run(closed, jax.tree.leaves((p, args)), rules)
            return jax.tree.unflatten(jax.tree.structure(shape), results)

        return dataclasses.replace(case, loss=loss)

    return change


def register_rules(kind, changes):
    """Rewrites of some primitives each."""
    register(kind, {name: of_operations(**rules) for name, rules in changes.items()})


# --- products -------------------------------------------------------------------------


def dtype_of(eqn):
    return eqn.outvars[0].aval.dtype


def operands_swapped(eqn, x, y):
    (cx, cy), (bx, by) = eqn.params["dimension_numbers"]
    z = lax.dot_general(
        y, x, ((cy, cx), (by, bx)), preferred_element_type=dtype_of(eqn)
    )
    n, free = len(by), y.ndim - len(cy) - len(by)
    order = [*range(n), *range(n + free, z.ndim), *range(n, n + free)]
    return jnp.transpose(z, order)


def in_float32(eqn, x, y):
    if not is_float(x):
        return None
    numbers = eqn.params["dimension_numbers"]
    z = lax.dot_general(x, y, numbers, preferred_element_type=jnp.float32)
    return z.astype(dtype_of(eqn))


register_rules(
    "products",
    {
        "operands swapped": {"dot_general": operands_swapped},
        "preferred_element_type": {"dot_general": in_float32},
    },
)

# --- x @ w ----------------------------------------------------------------------------


def of_products(function):
    """A rewrite of products x (..., in) @ w (in, out), also written with w.T."""

    def rule(eqn, x, w):
        (cx, cw), (bx, _) = eqn.params["dimension_numbers"]
        is_last = len(cx) == 1 and cx[0] == x.ndim - 1 and x.ndim > 1
        if bx or not is_last or w.ndim != 2 or not is_float(x):
            return None
        return function(x, w if cw[0] == 0 else w.T).astype(dtype_of(eqn))

    return of_operations(dot_general=rule)


def factor(n):
    """Into how many equal parts n elements can be cut."""
    return next((k for k in (4, 3, 2, 5, 7) if n % k == 0), 1)


def flat(function):
    """`function` of rows (n, in)."""

    def of_any(x, w):
        rows = function(x.reshape(-1, x.shape[-1]), w)
        return rows.reshape(*x.shape[:-1], w.shape[1])

    return of_any


def by_conv(x, w):
    numbers = ("NWC", "WIO", "NWC")
    return lax.conv_general_dilated(
        x[None], w[None], (1,), "VALID", dimension_numbers=numbers
    )[0]


def by_matvec(x, w):
    function = lambda row: w.T @ row  # noqa: E731
    for _ in range(x.ndim - 1):
        function = jax.vmap(function)
    return function(x)


def halves_of_inputs(x, w):
    n = len(w) // 2
    return x[..., :n] @ w[:n] + x[..., n:] @ w[n:]


def halves_of_outputs(x, w):
    n = w.shape[1] // 2
    return jnp.concatenate([x @ w[:, :n], x @ w[:, n:]], -1) if n else x @ w


def blocks_of_inputs(x, w):
    count = factor(len(w))
    size = len(w) // count

    def turn(i, z):
        rows = lax.dynamic_slice_in_dim(w, i * size, size, 0)
        return z + lax.dynamic_slice_in_dim(x, i * size, size, x.ndim - 1) @ rows

    return lax.fori_loop(0, count, turn, jnp.zeros((*x.shape[:-1], w.shape[1])))


@jax.custom_vjp
def own_product(x, w):
    return x @ w


own_product.defvjp(
    lambda x, w: (x @ w, (x, w)),
    lambda kept, g: (g @ kept[1].T, jnp.einsum("...i,...o->io", kept[0], g)),
)


def empty(x, w):
    return jnp.zeros((*x.shape[:-1], w.shape[1]), x.dtype)


def rows_into_a_buffer_in_a_loop(x, w):
    turn = lambda i, z: z.at[i].set(x[i] @ w)  # noqa: E731
    return lax.fori_loop(0, len(x), turn, empty(x, w))


def into_a_cache(x, w):
    cache = jnp.zeros((len(x) + 2, *x.shape[1:-1], w.shape[1]), x.dtype)
    start = (1, *[0] * (x.ndim - 1))
    return lax.dynamic_update_slice(cache, x @ w, start)[1:-1]


def padded_inputs(x, w):
    wider = [(0, 0)] * (x.ndim - 1) + [(0, 3)]
    return jnp.pad(x, wider) @ jnp.pad(w, [(0, 3), (0, 0)])


def with_a_bias_row(x, w):
    ones, zeros = jnp.ones_like(x[..., :1]), jnp.zeros((1, w.shape[1]))
    return jnp.concatenate([x, ones], -1) @ jnp.concatenate([w, zeros])


def in_heads(x, w):
    heads = w.reshape(len(w), -1, factor(w.shape[1]))
    y = jnp.einsum("...i,iho->...ho", x, heads)
    return y.reshape(*x.shape[:-1], -1)


def normalized(x, w):
    norm = jnp.linalg.norm(w) + 1
    return x @ (w / norm) * norm


def rank_one_products(x, w):
    if len(w) > 40:
        return x @ w
    return sum(x[..., i : i + 1] * w[i] for i in range(len(w)))


register(
    "x @ w",
    {
        "tensordot": lambda x, w: jnp.tensordot(x, w, 1),
        "flattened": flat(jnp.matmul),
        "a 1 x 1 convolution": flat(by_conv),
        "vmap of a matvec": by_matvec,
        "vmap over outputs": lambda x, w: jnp.moveaxis(
            jax.vmap(lambda c: x @ c, 1)(w), 0, -1
        ),
        "map over rows": flat(lambda x, w: lax.map(lambda row: row @ w, x)),
        "map over outputs": lambda x, w: jnp.moveaxis(
            lax.map(lambda c: x @ c, w.T), 0, -1
        ),
        "halves of inputs": halves_of_inputs,
        "halves of outputs": halves_of_outputs,
        "blocks of inputs in a loop": blocks_of_inputs,
        "in heads": in_heads,
        "in bfloat16": lambda x, w: x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16),
        "jit": jax.jit(jnp.matmul),
        "checkpoint": jax.checkpoint(jnp.matmul),
        "custom_vjp": own_product,
        "normalized and back": normalized,
        "padded inputs": padded_inputs,
        "a row for a bias": with_a_bias_row,
        "an identity before": lambda x, w: x @ jnp.eye(len(w)) @ w,
        "an identity after": lambda x, w: x @ w @ jnp.eye(w.shape[1]),
        "rows into a buffer in a loop": rows_into_a_buffer_in_a_loop,
        "into a cache": into_a_cache,
        "broadcast and summed": lambda x, w: (x[..., None] * w).sum(-2),
        "a sum of rank one": rank_one_products,
    },
    of_products,
)

# --- lookups, and joins of arrays -----------------------------------------------------


def of_lookups(function):
    """A rewrite of rows table[ids]."""

    def rule(eqn, table, starts):
        numbers, k = eqn.params["dimension_numbers"], starts.ndim - 1
        of_rows = numbers.start_index_map == numbers.collapsed_slice_dims == (0,)
        last = numbers.offset_dims == tuple(range(k, k + table.ndim - 1))
        whole = tuple(eqn.params["slice_sizes"][1:]) == table.shape[1:]
        if not (of_rows and last and whole and is_float(table)):
            return None
        if numbers.operand_batching_dims or starts.shape[-1] != 1:
            return None
        return function(table, starts[..., 0])

    return of_operations(gather=rule)


def each_id(one):
    """`one(table, id)` for each."""

    def of_all(over):
        def rows(table, ids):
            found = over(functools.partial(one, table))(ids.ravel())
            return found.reshape(*ids.shape, *table.shape[1:])

        return rows

    return of_all


def by_one_hot(table, ids):
    return jnp.tensordot(jax.nn.one_hot(ids, len(table), dtype=table.dtype), table, 1)


def masked(table, ids):
    valid = (ids >= 0).astype(table.dtype)
    return table[ids] * valid.reshape(*ids.shape, *(1,) * (table.ndim - 1))


def one_row(table, i):
    return lax.dynamic_index_in_dim(table, i, 0, keepdims=False)


register(
    "lookups",
    {
        "by a one-hot": by_one_hot,
        "one by one": each_id(one_row)(lambda f: functools.partial(lax.map, f)),
        "by vmap": each_id(lambda table, i: table[i])(jax.vmap),
        "with a row of zeros": lambda table, ids: jnp.concatenate(
            [table, jnp.zeros_like(table[:1])]
        )[ids],
        "masked": masked,
    },
    of_lookups,
)


def places(eqn, parts):
    """Where each part of a concatenation begins and ends."""
    axis, start = eqn.params["dimension"], 0
    for x in parts:
        yield start, start + x.shape[axis]
        start += x.shape[axis]


def set_in_zeros(eqn, *parts):
    z = jnp.zeros(eqn.outvars[0].aval.shape, dtype_of(eqn))
    before = (slice(None),) * eqn.params["dimension"]
    for x, (start, end) in zip(parts, places(eqn, parts), strict=True):
        z = z.at[(*before, slice(start, end))].set(x)
    return z


register_rules(
    "concatenate",
    {
        "set in zeros": {"concatenate": set_in_zeros},
    },
)

# --- elementwise operations and sums --------------------------------------------------


def of_floats(function):
    return lambda eqn, *values: function(*values) if is_float(values[0]) else None


def square(x):
    return x * x


def by_ones(eqn, x):
    if not is_float(x):
        return None
    for axis in sorted(eqn.params["axes"], reverse=True):
        x = jnp.tensordot(x, jnp.ones(x.shape[axis], x.dtype), ((axis,), (0,)))
    return x


def by_mean(eqn, x):
    axes = eqn.params["axes"]
    count = math.prod(x.shape[axis] for axis in axes)
    return jnp.mean(x, axes) * count if is_float(x) else None


POWERS = {
    "rsqrt": lambda eqn, x: 1 / jnp.sqrt(x),
    "sqrt": lambda eqn, x: x**0.5,
    "square": lambda eqn, x: x * x,
    "integer_pow": lambda eqn, x: x * x if eqn.params["y"] == 2 else None,
}
register_rules(
    "operations",
    {
        "operands swapped": {
            "add": lambda eqn, x, y: lax.add(y, x),
            "mul": lambda eqn, x, y: lax.mul(y, x),
        },
        "a - b as a + -b": {"sub": of_floats(lambda x, y: x + -y)},
        "a / b as a (1 / b)": {"div": of_floats(lambda x, y: x * (1 / y))},
        "exp as exp2": {"exp": lambda eqn, x: jnp.exp2(x * math.log2(math.e))},
        "exp as a power": {"exp": lambda eqn, x: jnp.power(math.e, x)},
        "max as where": {"max": lambda eqn, x, y: jnp.where(x > y, x, y)},
        "logistic by exp": {"logistic": lambda eqn, x: 1 / (1 + jnp.exp(-x))},
        "powers": POWERS,
        "sums by ones": {"reduce_sum": by_ones},
        "sums as means": {"reduce_sum": by_mean},
    },
)

# --- one more operation ---------------------------------------------------------------


def after(primitives, function):
    """A rewrite in which `function` takes the results of these primitives."""

    def rule(eqn, *values):
        if not is_float(eqn.outvars[0].aval) or not eqn.outvars[0].aval.ndim:
            return None
        with eqn.ctx.manager:
            params = eqn.primitive.get_bind_params(eqn.params)
            return function(eqn.primitive.bind(*values, **params))

    return of_operations(**dict.fromkeys(primitives, rule))


def dropout_of_nothing(x):
    return jnp.where(jax.random.bernoulli(jax.random.key(0), 1.0, x.shape), x, 0)


def no_noise(x):
    return x + 0 * jax.random.normal(jax.random.key(0), x.shape, x.dtype)


PLACES = {
    "products": ("dot_general", "conv_general_dilated", "ragged_dot_general"),
    "gates": ("exp", "logistic"),
    "sums": ("add",),
    "elements": ("mul", "div"),
}
INSERTED = {
    "dropout": dropout_of_nothing,
    "noise": no_noise,
    "a gain": lambda x: x * jnp.ones(x.shape[-1:], x.dtype),
    "a clip": lambda x: jnp.clip(x, -1e9, 1e9),
}
for place, primitives in PLACES.items():
    changes = {
        f"{name} after {place}": after(primitives, function)
        for name, function in INSERTED.items()
    }
    register("inserted", changes)

# --- control flow ---------------------------------------------------------------------


def has_keys(values):
    return any(jnp.issubdtype(x.dtype, jax.dtypes.prng_key) for x in values)


def unrolled(eqn, *values):
    consts, carry, xs = scan_parts(eqn, values)
    length, count = eqn.params["length"], len(carry)
    if length > 8 or has_keys(values):
        return None
    order = range(length)[::-1] if eqn.params["reverse"] else range(length)
    ys = {}
    for i in order:
        row = [x[i] for x in xs]
        out = run(eqn.params["jaxpr"], [*consts, *carry, *row], {"scan": unrolled})
        carry, ys[i] = out[:count], out[count:]
    stacked = zip(*(ys[i] for i in range(length)), strict=True)
    return [*carry, *map(jnp.stack, stacked)]


def by_fori_loop(eqn, *values):
    (consts, carry, xs), length = scan_parts(eqn, values), eqn.params["length"]
    avals, count = eqn.params["jaxpr"].out_avals[len(carry) :], len(carry)
    if not length or has_keys(values):
        return None

    def turn(t, c):
        i = length - 1 - t if eqn.params["reverse"] else t
        row = [one_row(x, i) for x in xs]
        out = run(eqn.params["jaxpr"], [*consts, *c[0], *row], {})
        pairs = zip(c[1], out[count:], strict=True)
        ys = [lax.dynamic_update_index_in_dim(b, y, i, 0) for b, y in pairs]
        return out[:count], ys

    buffers = [jnp.zeros((length, *a.shape), a.dtype) for a in avals]
    carry, ys = lax.fori_loop(0, length, turn, (carry, buffers))
    return [*carry, *ys]


def by_where(eqn, which, *values):
    cases = [run(body, values, {}) for body in eqn.params["branches"]]
    results = []
    for first, *others in zip(*cases, strict=True):
        for i, y in enumerate(others, 1):
            first = jnp.where(which == i, y, first)
        results.append(first)
    return results


register_rules(
    "control flow",
    {
        "scans unrolled": {"scan": unrolled},
        "scans as fori_loop": {"scan": by_fori_loop},
        "cond as where": {"cond": by_where},
        "functions inlined": {},
    },
)
