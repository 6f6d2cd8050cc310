"""Loops whose layers are gathered before their turn."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_muon.mesh import prefetch


@pytest.mark.parametrize("hops", [1, 2])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("length", [1, 2, 3])
def test_short_loops(x64, length, reverse, hops):
    """Gathers run ahead of the last layers there are, and scatters behind."""

    def run(consts, carry, layer, xs):
        h = jnp.tanh(carry[0] @ layer[0] + consts[0] * xs[0])
        return [h], [2 * h + xs[0]]

    def scanned(scan):
        def loss(consts, carry, layers, xs):
            (h,), (y,) = scan([consts], [carry], [layers], [xs])
            return jnp.sum(h**2) + jnp.sum(jnp.sin(y))

        return jax.grad(loss, (0, 1, 2, 3))

    def plain(consts, carry, layers, xs):
        step = functools.partial(run, consts)
        return jax.lax.scan(
            lambda carry, x: step(carry, *x), carry, (layers, xs), reverse=reverse
        )

    loop, same = prefetch.Loop(length, reverse, 1), [list] * hops
    ahead = prefetch.scan(run, same, same, loop, keep_gathered=False, late=hops == 2)
    draw = np.random.default_rng(0).standard_normal
    args = draw(3), draw(3), draw((length, 3, 3)), draw((length, 3))
    args = tuple(map(jnp.asarray, args))
    found, expected = scanned(ahead)(*args), scanned(plain)(*args)
    chex.assert_trees_all_close(found, expected, rtol=0, atol=1e-12)
