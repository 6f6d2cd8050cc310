"""What the package takes JAX's internals to be; it runs in each version of JAX."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.extend.core import jaxprs_in_params
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import jax_muon as jm
from jax_muon import jaxprs
from jax_muon.reading.computation import loops, moves, products  # noqa: F401
from jax_muon.reading.computation.trace import RULES

X = jnp.ones((2, 4))
MESH = AbstractMesh((2,), ("d",), axis_types=(AxisType.Auto,))


def on_mesh(function, *out):
    return jax.shard_map(
        function, mesh=MESH, in_specs=P("d"), out_specs=P(*out), check_vma=False
    )


def while_loop(x):
    return lax.while_loop(lambda y: y.sum() < 9, lambda y: y + 1, x)


# For each primitive with a rule, a call that JAX traces to it.
CALLS = {
    "transpose": lambda x: x.T,
    "reshape": lambda x: x.reshape(8),
    "squeeze": lambda x: lax.squeeze(x[:1], [0]),
    "broadcast_in_dim": lambda x: jnp.broadcast_to(x, (3, 2, 4)),
    "pad": lambda x: jnp.pad(x, 1),
    "all_gather": on_mesh(lambda x: lax.all_gather(x, "d")),
    "all_to_all": on_mesh(lambda x: lax.all_to_all(x, "d", 1, 0, tiled=True), "d"),
    "reduce_scatter": on_mesh(
        lambda x: lax.psum_scatter(x, "d", scatter_dimension=1, tiled=True), "d"
    ),
    "ppermute": on_mesh(lambda x: lax.ppermute(x, "d", [(0, 1), (1, 0)]), "d"),
    "slice": lambda x: x[:1, 1:3],
    "split": lambda x: jnp.split(x, 2, axis=1),
    "dynamic_slice": lambda x: lax.dynamic_index_in_dim(x, x[0, 0].astype(int)),
    "gather": lambda x: x[jnp.array([1, 0])],
    "concatenate": lambda x: jnp.concatenate([x, x]),
    "dynamic_update_slice": lambda x: lax.dynamic_update_slice(x, x[:1], (1, 0)),
    "scatter": lambda x: x.at[jnp.array([1, 0])].set(1),
    "scatter-add": lambda x: x.at[jnp.array([1, 0])].add(1),
    "random_bits": lambda x: jax.random.normal(jax.random.key(0), x.shape),
    "rng_bit_generator": lambda x: lax.rng_bit_generator(
        x.reshape(-1)[:4].astype(jnp.uint32), (3,)
    ),
    "top_k": lambda x: lax.top_k(x, 2),
    "approx_top_k": lambda x: lax.approx_max_k(x, 2),
    "sort": jnp.argsort,
    "reduce_sum": jnp.sum,
    "reduce_max": jnp.max,
    "reduce_min": jnp.min,
    "reduce_prod": jnp.prod,
    "argmax": jnp.argmax,
    "argmin": jnp.argmin,
    "dot_general": lambda x: x @ x.T,
    "ragged_dot_general": lambda x: lax.ragged_dot(
        x, jnp.ones((1, 4, 3)), jnp.array([2])
    ),
    "conv_general_dilated": lambda x: lax.conv(x[None], x[None], (1,), "SAME"),
    "scan": lambda x: lax.scan(lambda c, y: (c, y), 0, x),
    "while": while_loop,
    "pallas_call": lambda x: pl.pallas_call(lambda i, o: None, x)(x),
    "cond": lambda x: lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x),
}
# Only some versions, or some ways of writing the above, have these.
SOMETIMES = {"expand_dims", "stack", "unstack", "tile", "all_gather_invariant"}


def primitives(jaxpr):
    """Names of all operations, those of functions that they call included."""
    inside = [f for eqn in jaxpr.eqns for f in jaxprs_in_params(eqn.params)]
    names = [eqn.primitive.name for eqn in jaxpr.eqns]
    return sum(map(primitives, inside), names)


def test_every_rule_is_for_a_primitive_of_jax():
    for name, function in CALLS.items():
        assert name in primitives(jax.make_jaxpr(function)(X).jaxpr), name
    assert set(RULES) == set(CALLS) | SOMETIMES


def test_functions_that_operations_call():
    def scanning(a, b, c, xs):
        return lax.scan(lambda carry, x: (carry + a * x, b), c, xs)

    eqns = jax.make_jaxpr(scanning)(1.0, 2.0, 3.0, jnp.ones(5)).jaxpr.eqns
    (scan,) = [eqn for eqn in eqns if eqn.primitive.name == "scan"]
    constants, start = jaxprs.scan_starts(scan)
    assert scan.invars[start].aval.shape == (5,)
    assert start - constants == 1 and len(scan.invars) - start == 1
    calls = [jax.jit(jnp.sin), jax.checkpoint(jnp.sin), jax.nn.silu]
    for eqn in [scan, *(jax.make_jaxpr(x)(X).jaxpr.eqns[0] for x in calls)]:
        assert len(jaxprs.called(eqn).in_avals) == len(eqn.invars)
    (eqn,) = jax.make_jaxpr(jnp.sin)(X).jaxpr.eqns
    assert jaxprs.called(eqn) is None


def test_only_what_results_need_is_traced(as_users_write):
    constant = jnp.ones(4)

    def function(x, unused):
        jnp.cos(x)
        return x + constant

    jaxpr, count = jaxprs.trace(function, X, 3.0)
    assert "cos" not in primitives(jaxpr)
    assert (count, len(jaxpr.invars)) == (2, 3)


def test_uses_of_an_input():
    """Moves and casts lead to a use; results of functions are followed."""

    def function(x, y):
        moved = jax.jit(lambda x: x.T.astype("float16"))(x)
        return jnp.sin(jaxprs.marked(moved, "here")), jax.checkpoint(jnp.cos)(y), x[:1]

    jaxpr = jax.make_jaxpr(function)(X, X).jaxpr
    x, y = jaxpr.invars
    assert jaxprs.uses(jaxpr, {x}) == (["here"], [False, False, True])
    assert jaxprs.uses(jaxpr, {y}) == (["cos"], [False, False, False])


def test_residuals_that_are_arguments():
    """`scan_layers` does not save them, and fills them in again."""

    def product(x, w):
        return jnp.sin(x @ w)

    def saving(x, w):
        y, pull = jax.vjp(product, x, w)
        assert isinstance(pull.args_res, list) and len(pull.args_res) == 2
        pull.args_res[1] = None
        return y, pull

    w = jnp.ones((4, 4))
    y, pull = jax.jit(saving)(X, w)
    assert (4, 4) not in [x.shape for x in jax.tree.leaves(pull)]
    pull.args_res[1] = w
    for found, right in zip(pull(y), jax.vjp(product, X, w)[1](y), strict=True):
        np.testing.assert_allclose(found, right, rtol=1e-6)


def test_lines_are_the_users():
    table = np.ones((5, 3), np.float32)

    def layer(x):
        return jnp.take(x, jnp.array([1]), axis=0)  # here

    layer(jnp.asarray(table))  # JAX traces `take` once

    def to_gather(jaxpr):
        """The calls on the way to the gather, which depend on the version of JAX."""
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "gather":
                return (eqn,)
            inner = jaxprs.called(eqn)
            if inner is not None and (found := to_gather(inner.jaxpr)):
                return (eqn, *found)
        return ()

    lines, start = inspect.getsourcelines(layer)
    number = start + next(i for i, line in enumerate(lines) if "# here" in line)
    calls = to_gather(jax.make_jaxpr(jax.jit(layer))(table).jaxpr)
    assert jaxprs.line_of(calls) == f"test_jaxprs.py:{number}"


def test_lines_are_the_users_rather_than_those_of_what_is_installed():
    names = {}
    code = "def loss(w, x):\n    return x @ w"
    exec(compile(code, "/site-packages/layer.py", "exec"), names)
    own = lambda w, x: names["loss"](w, x)  # noqa: E731
    here = f"test_jaxprs.py:{inspect.getsourcelines(own)[1]}"
    for loss, line in ((own, here), (names["loss"], "layer.py:2")):
        assert jm.read(X, loss, jnp.ones((3, 2)))[""].reason.endswith(f" at {line}")
