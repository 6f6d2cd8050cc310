"""Losses as models write them: a scan over layers.

Each is a mean over its samples (batch, 8), and takes the parameters of `draw`.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas

from tests import trees

LAYERS, WIDTH = 16, 8


def draw(dtype=jnp.float32):
    """Scanned layers, and leaves that are used outside of the scan."""
    shapes = {
        "layers": {"w": (LAYERS, WIDTH, WIDTH), "b": (LAYERS, WIDTH)},
        "head": (WIDTH, 24),
        "scale": (WIDTH,),
    }
    drawn = trees.normal(shapes, 3, dtype, 0.1)
    return drawn | {"scale": 1 + drawn["scale"]}


def samples(count=16, dtype=jnp.float32):
    """Inputs (count, 8)."""
    return jnp.asarray(np.random.default_rng(4).standard_normal((count, WIDTH)), dtype)


def layer(x, weights):
    """One layer."""
    return x + jnp.tanh(x @ weights["w"] + weights["b"])


def layers_alone(layers, x, scan=jax.lax.scan):
    """All layers in a scan without outputs."""
    return scan(lambda x, weights: (layer(x, weights), None), x, layers)[0]


# --- scans over layers, as models write them ------------------------------------------


def stack(params, x, scan, body=layer, *, around=lambda f: f, keys=None):
    """What layers make of x, in a scan with outputs whose body closes over a scale."""
    layers = params["layers"] | ({} if keys is None else {"keys": keys})

    def step(carry, weights):
        y, count = carry
        y = body(y * params.get("scale", 1.0), weights)
        if "keys" in weights:
            y *= jax.random.bernoulli(weights["keys"], 0.9, y.shape[1:])
        return (y, count + 1), (jnp.mean(y**2, axis=1), count)

    run = around(lambda start, layers: scan(step, start, layers))
    (y, _), (means, counts) = run((x, jnp.zeros_like(x[:, 0], int)), layers)
    weights = 1 + jnp.arange(len(means)) / 4
    assert counts.shape == means.shape
    return jnp.mean(jnp.sin(y) @ params["head"]) + 0.1 * weights @ jnp.mean(means, 1)


def plain(params, x, scan=jax.lax.scan):
    return stack(params, x, scan)


def with_keys(params, x, scan=jax.lax.scan):
    keys = jax.random.split(jax.random.key(0), LAYERS)
    return stack(params, x, scan, jax.checkpoint(layer), keys=keys)


@jax.custom_vjp
def _kernel(x):
    def kernel(x, y):
        y[...] = jnp.sin(x[...])

    kind = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pallas.pallas_call(kernel, out_shape=kind, interpret=True)(x)


_kernel.defvjp(lambda x: (_kernel(x), x), lambda x, g: (g * jnp.cos(x),))


def of_all_kinds(params, x, scan=jax.lax.scan):
    """Branches, loops, prints, a kernel with a gradient by hand, as flash attention is.

    In nested checkpoints, values are kept by name, some of them on the host.
    """
    names = {"names_which_can_be_saved": ["a"], "names_which_can_be_offloaded": ["b"]}
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        **names, offload_src="device", offload_dst="pinned_host"
    )

    @jax.jit
    def body(x, weights):
        jax.debug.callback(lambda total: None, jnp.sum(x))
        y = x + _kernel(jax.nn.relu(x @ weights["w"] + weights["b"]))
        y = checkpoint_name(jax.checkpoint(layer)(y, weights), "a")
        y = jax.lax.cond(jnp.sum(y) > 1e9, jnp.negative, jnp.tanh, y)
        y = jax.lax.fori_loop(0, 2, lambda i, y: jnp.sin(y @ weights["w"]), y)
        return checkpoint_name(y, "b")

    around = lambda f: jax.jit(jax.checkpoint(f))  # noqa: E731
    body = jax.checkpoint(body, policy=policy, prevent_cse=False)
    return stack(params, x, scan, body, around=around)


STACKS = [plain, with_keys, of_all_kinds]
