"""What the package takes JAX's internals to be; it runs in each version of JAX."""

import gc
import inspect

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas  # noqa: F401
from jax.extend.core import Primitive

import jax_muon as jm
from jax_muon import jaxprs
from jax_muon.reading.computation import loops, moves, products  # noqa: F401
from jax_muon.reading.computation.trace import RULES

X = jnp.ones((2, 4))


def test_every_rule_is_for_a_primitive_of_jax():
    """That the usual calls are traced to them, `tests/programs` shows."""
    known = {x.name for x in gc.get_objects() if issubclass(type(x), Primitive)}
    only_in_some_versions = {
        *("all_gather_invariant", "expand_dims", "stack", "tile", "unstack")
    }
    assert set(RULES) - known <= only_in_some_versions


def test_only_what_results_need_is_traced(as_users_write):
    constant = jnp.ones(4)

    def function(x, unused):
        jnp.cos(x)
        return x + constant

    jaxpr, count = jaxprs.trace(function, X, 3.0)
    assert "cos" not in str(jaxpr)
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
        assert jm.read(X, loss, x)[""].reason.endswith(f" at {line}")
