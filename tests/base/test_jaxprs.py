"""What the package takes JAX's internals to be; it runs in each version of JAX."""

import gc
import inspect

import jax
import jax.numpy as jnp
from jax.experimental import pallas  # noqa: F401
from jax.extend.core import Primitive

import jax_muon as jm
from jax_muon.base import jaxprs
from jax_muon.reading import (  # noqa: F401
    elementwise,
    loops,
    moves,
    products,
)
from jax_muon.reading.trace import ELEMENTWISE, RULES

X = jnp.ones((2, 4))


def test_every_rule_is_for_a_primitive_of_jax():
    """That the usual calls are traced to them, `tests/programs` shows."""
    known = {x.name for x in gc.get_objects() if issubclass(type(x), Primitive)}
    only_in_some_versions = {
        *("all_gather_invariant", "expand_dims", "stack", "tile", "unstack")
    }
    assert set(RULES) - known - {ELEMENTWISE} <= only_in_some_versions


def test_only_what_results_need_is_traced(as_users_write):
    constant = jnp.ones(4)

    def function(x, unused):
        jnp.cos(x)
        return x + constant

    jaxpr, constants = jaxprs.make_jaxpr(function, X, 3.0)
    assert "cos" not in str(jaxpr)
    assert (len(constants), len(jaxpr.invars)) == (1, 3)


def test_lines_are_the_users():
    """Those of JAX count never, those of what is installed if there are no others."""
    names = {}
    code = "def loss(w, x):\n    return x @ w"
    exec(compile(code, "/site-packages/layer.py", "exec"), names)
    own = lambda w, x: names["loss"](w, x)  # noqa: E731
    rows = lambda w, x: jnp.take(w, x, axis=0)  # noqa: E731
    jnp.take(X, jnp.array([1]), axis=0)  # JAX traces it once, here
    first = inspect.getsourcelines(own)[1]
    for loss, x, line in (
        (names["loss"], jnp.ones((3, 2)), "layer.py:2"),
        (own, jnp.ones((3, 2)), f"test_jaxprs.py:{first}"),
        (rows, jnp.array([1]), f"test_jaxprs.py:{first + 1}"),
    ):
        assert jm.find_matrices(X, loss, x)[""].reason.endswith(f" at {line}")


def dots(function, *args):
    """The operations of products in a function, behind those that call them."""

    def walk(jaxpr, calls=()):
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "dot_general":
                yield (*calls, eqn)
            for x in jax.tree.leaves([*eqn.params.values()]):
                inside = getattr(x, "jaxpr", x)
                if hasattr(inside, "eqns"):
                    yield from walk(inside, (*calls, eqn))

    return [*walk(jax.make_jaxpr(function)(*args).jaxpr)]


def test_transpositions():
    """Of a gradient once, of a penalty of it twice; checkpoint computes again.

    JAX transposes one function of a linear solve, which counts as the solve.
    """

    def loss(w, x):
        return jnp.sum(jnp.tanh(x @ w) ** 2)

    def penalty(w, x):
        return jnp.sum(jax.grad(loss, 1)(w, x) ** 2)

    def solve(w, x):
        return jnp.sum(jnp.linalg.solve(w @ w.T, x.T))

    w = jnp.ones((4, 3))
    for function, expected in (
        (jax.grad(loss), [0, 1]),
        (jax.grad(jax.checkpoint(loss)), [0, 0, 1]),
        (jax.grad(penalty), [0, 1, 2, 2, 1]),
        (jax.grad(jax.checkpoint(penalty)), [0, 1, 0, 1, 2, 2, 1]),
        (solve, [0, 0, 0]),
        (jax.grad(solve, 1), [0, 0, 0, 1, 1]),
    ):
        found = [jaxprs.transpositions(calls) for calls in dots(function, w, X)]
        assert found == expected


def test_places_tell_turns_of_a_loop_from_others_in_one_line():
    def loop(x, matrices):
        for w in matrices:
            x = x @ w
        return x

    def line(x, matrices):
        return x @ matrices[0] @ matrices[1]

    matrices = [jnp.ones((4, 4))] * 2
    for function, same in ((loop, True), (line, False)):
        one, two = map(jaxprs.places_of, dots(function, X, matrices))
        assert (one == two) is same


def test_operations_are_those_that_compute():
    """With one row JAX leaves out broadcasts, but no operation."""

    def function(x):
        return jax.jit(jnp.tanh)(x.reshape(-1, 4)) + x.mean(0, keepdims=True)

    names = [
        jaxprs.operations(jax.make_jaxpr(function)(jnp.ones((n, 4))).jaxpr)
        for n in (1, 3)
    ]
    assert names[0] == names[1]
    assert {"tanh", "add"} <= {*names[0]} and "reshape" not in names[0]
