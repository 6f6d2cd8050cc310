"""Losses as models write them: loops from constants, and collectives of their own.

Each is a mean over its samples (batch, 8), and takes the parameters of `draw`.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import io_callback, pallas

from tests import trees

LAYERS, WIDTH, CLASSES = 4, 8, 24


def draw(dtype=jnp.float32):
    """Scanned layers, and leaves that are used outside of the scan."""
    shapes = {
        "layers": {"w": (LAYERS, WIDTH, WIDTH), "b": (LAYERS, WIDTH)},
        "head": (WIDTH, CLASSES),
        "scale": (WIDTH,),
    }
    return trees.normal(shapes, 3, dtype, 0.5)


def samples(count=16, dtype=jnp.float32):
    """Inputs (count, 8)."""
    return jnp.asarray(np.random.default_rng(4).standard_normal((count, WIDTH)), dtype)


def _layer(x, layer):
    return x + jnp.tanh(x @ layer["w"] + layer["b"])


def _classes(x):
    """A class for each sample, out of its first numbers."""
    return (jnp.abs(x[:, 0]) * 100).astype(int) % CLASSES


LOSSES = {}  # by name: a loss, and the same on one device
STACKS = {}  # losses with a scan over layers, which they take as an argument


def kept(alone=None):
    """Register a loss; `alone` is the same on one device, if it uses collectives."""

    def keep(loss):
        LOSSES[loss.__name__] = loss, alone or loss
        return loss

    return keep


def stacked(loss):
    """Register a loss with a scan over layers."""
    STACKS[loss.__name__] = loss
    return loss


@kept()
def python_loop(params, x):
    y = x * params["scale"]
    for i in range(LAYERS):
        y = _layer(y, jax.tree.map(lambda leaf, i=i: leaf[i], params["layers"]))
    logits = jax.nn.log_softmax(y @ params["head"])
    return -jnp.mean(jnp.take_along_axis(logits, _classes(x)[:, None], axis=1))


@kept()
def chunked_cross_entropy(params, x):
    """Logits of a part of the classes at a time, as large vocabularies want it."""
    chunks = params["head"].reshape(WIDTH, 4, -1).transpose(1, 0, 2)

    def body(carry, chunk):
        largest, total = carry
        logits = (x * params["scale"]) @ chunk
        new = jnp.maximum(largest, logits.max(axis=1))
        total = total * jnp.exp(largest - new)
        return (new, total + jnp.exp(logits - new[:, None]).sum(axis=1)), None

    start = (jnp.full(len(x), -1e9, x.dtype), jnp.zeros(len(x), x.dtype))
    (largest, total), _ = jax.lax.scan(jax.checkpoint(body), start, chunks)
    right = params["head"].T[_classes(x)]
    own = jnp.sum(x * params["scale"] * right, axis=1)
    return jnp.mean(largest + jnp.log(total) - own)


@kept()
def while_loop(params, x):
    """A number of rounds that each device finds by its own samples."""
    rounds = jax.lax.while_loop(
        lambda n: (n < 3) & (n < jnp.abs(x).max() * 10), lambda n: n + 1, 0
    )
    return jnp.mean(x @ params["head"]) * rounds.astype(x.dtype)


@kept(alone=python_loop)
def ends_in_pmean(params, x):
    return jax.lax.pmean(python_loop(params, x), "data")


@kept(alone=python_loop)
def ends_in_psum(params, x):
    total = jax.lax.psum(python_loop(params, x) * len(x), "data")
    return total / (len(x) * jax.lax.axis_size("data"))


@kept(alone=lambda params, x: jnp.mean(x * params["scale"]))
def marks_of_vma(params, x):
    """What a scan from a constant asks for where JAX checks the types."""
    start = jax.lax.pcast(jnp.zeros((), x.dtype), "data", to="varying")
    body = lambda total, row: (total + jnp.mean(row * params["scale"]), None)  # noqa: E731
    return jax.lax.scan(body, start, x)[0] / len(x)


# --- scans over layers, as models write them ------------------------------------------


def stack(
    params,
    x,
    layers,
    scan,
    body=_layer,
    *,
    around=lambda f: f,
    xs=None,
    **given,
):
    """What layers make of x, in a scan with outputs whose body closes over a scale."""

    def step(carry, layer_and_x):
        y, count = carry
        layer, extra = layer_and_x
        y = body(y * params["scale"], layer)
        y = y if extra is None else y * jax.random.bernoulli(extra, 0.9, y.shape[1:])
        return (y, count + 1), (jnp.mean(y**2), count)

    run = around(lambda start, layers: scan(step, start, (layers, xs), **given))
    (y, _), (means, counts) = run((x, jnp.zeros((), int)), layers)
    weights = 1 + jnp.arange(means.size).reshape(means.shape) / 4
    assert counts.shape == means.shape
    return jnp.mean(jnp.sin(y) @ params["head"]) + 0.1 * jnp.sum(means * weights)


@stacked
def plain(params, x, scan=jax.lax.scan):
    return stack(params, x, params["layers"], scan)


@stacked
def in_reverse(params, x, scan=jax.lax.scan):
    given = {"reverse": True, "unroll": 3}
    return stack(params, x, params["layers"], scan, **given)


@stacked
def within_jit_and_checkpoints(params, x, scan=jax.lax.scan):
    body = jax.checkpoint(jax.jit(_layer), prevent_cse=False)
    around = lambda f: jax.jit(jax.checkpoint(f))  # noqa: E731
    return stack(params, x, params["layers"], scan, body, around=around)


@stacked
def with_keys(params, x, scan=jax.lax.scan):
    keys = jax.random.split(jax.random.key(0), LAYERS)
    body = jax.checkpoint(_layer)
    return stack(params, x, params["layers"], scan, body, xs=keys)


@jax.custom_vjp
def _kernel(x):
    def kernel(x, y):
        y[...] = jnp.sin(x[...])

    kind = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pallas.pallas_call(kernel, out_shape=kind, interpret=True)(x)


_kernel.defvjp(lambda x: (_kernel(x), x), lambda x, g: (g * jnp.cos(x),))


@stacked
def of_all_kinds(params, x, scan=jax.lax.scan):
    """Branches, loops, and a kernel with a gradient by hand, as flash attention is."""

    @jax.checkpoint
    def body(x, layer):
        y = x + _kernel(jax.nn.relu(x @ layer["w"] + layer["b"]))
        y = jax.lax.cond(jnp.sum(y) > 1e9, jnp.negative, jnp.tanh, y)
        return jax.lax.fori_loop(0, 2, lambda i, y: jnp.sin(y @ layer["w"]), y)

    return stack(params, x, params["layers"], scan, body)


@stacked
def of_effects(params, x, scan=jax.lax.scan):
    """Prints, callbacks whose results are used, and memory of its own."""

    def body(x, layer):
        jax.debug.callback(lambda total: None, jnp.sum(x))
        first = jax.lax.stop_gradient(x[0, 0])
        kind = jax.ShapeDtypeStruct((), jnp.int32)
        one = io_callback(lambda x: np.ones((), np.int32), kind, first)
        ref = jax.new_ref(x)
        ref[...] += one.astype(x.dtype)
        return _layer(ref[...], jax.tree.map(jnp.sin, layer))

    return stack(params, x, params["layers"], scan, body)


@stacked
def with_names(params, x, scan=jax.lax.scan):
    """Values are kept by name, some of them on the host, in nested checkpoints."""
    names = {"names_which_can_be_saved": ["a"], "names_which_can_be_offloaded": ["b"]}
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        **names, offload_src="device", offload_dst="pinned_host"
    )

    def body(x, layer):
        x = checkpoint_name(jax.checkpoint(_layer)(x, layer), "a")
        return checkpoint_name(_layer(x, layer), "b")

    return stack(params, x, params["layers"], scan, jax.checkpoint(body, policy=policy))
