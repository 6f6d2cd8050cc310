"""QK-clip on eight devices gives what it gives on one, however weights are divided."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_muon as jm
from tests.mesh import case
from tests.mesh.case import AUTO, EXPLICIT, mesh_of
from tests.reading import toy

pytestmark = pytest.mark.usefixtures("as_users_write")

EMBED, HEADS, KEY_HEADS, HEAD_DIM = 16, 8, 4, 4
TIME = 24  # more than EMBED, so that gradients have full rank
WIDTHS = {"q": HEADS * HEAD_DIM, "k": KEY_HEADS * HEAD_DIM, "v": HEADS * HEAD_DIM}
SLOPES = {
    name: np.random.default_rng(3).normal(size=(TIME, width))
    for name, width in WIDTHS.items()
}
THRESHOLD = 4.2


def model(dtype=jnp.float32):
    rng = np.random.default_rng(0)
    attn = {
        name: {
            "kernel": jnp.asarray(rng.normal(size=(EMBED, width)) / 4, dtype),
            "bias": jnp.asarray(rng.normal(size=width), dtype),
        }
        for name, width in WIDTHS.items()
    }
    return {"0": {"attn": attn}}


def loss(params, batch):
    """A loss with gradients that hardly depend on the weights, and what was seen."""
    attn = params["0"]["attn"]
    made = {n: batch @ p["kernel"] + p["bias"] for n, p in attn.items()}
    q, k = (made[n].reshape(*batch.shape[:2], -1, HEAD_DIM) for n in "qk")
    slopes = {n: jnp.asarray(SLOPES[n], x.dtype) for n, x in made.items()}
    total = sum(jnp.mean(jnp.sum(x * slopes[n], (1, 2))) for n, x in made.items())
    largest = jm.max_attention_logits(q, k, block_size=8)
    return total, {"max_logits": {"0": largest}, "mean": jnp.mean(batch)}


def batches(steps, dtype=jnp.float32):
    rng = np.random.default_rng(1)
    # Samples of different sizes: one device alone sees the largest logit.
    size = np.linspace(0.2, 1, 16)[:, None, None]
    return jnp.asarray(rng.normal(size=(steps, 16, TIME, EMBED)) * size, dtype)


def recipe(dtype="float32"):
    tx = jm.nanochat(0.02, dtype=dtype, adamw=case.ADAMW, steps=2, matrices=toy)
    return jm.skip_nonfinite(optax.chain(tx, jm.clip_qk(THRESHOLD)))


def one_device(params, data):
    """Parameters after the run, and each step's largest logits."""
    tx = recipe("float64")

    @jax.jit
    def step(params, state, batch):
        (_, aux), grads = jax.value_and_grad(loss, has_aux=True)(params, batch)
        largest = aux["max_logits"]
        updates, state = tx.update(grads, state, params, max_logits=largest)
        return optax.apply_updates(params, updates), state, largest["0"]

    state, seen = tx.init(params), []
    for batch in data:
        params, state, largest = step(params, state, batch)
        seen.append(largest)
    return params, np.array(seen)


@pytest.mark.parametrize(("microbatches", "kind"), [(1, EXPLICIT), (2, AUTO)])
def test_zero2_takes_the_maximum_over_devices_and_microbatches(microbatches, kind, x64):
    """In double precision: rounding could move what depends on one logit.

    A NaN on one device leaves all weights alone in its step.
    """
    start, data = model(jnp.float64), batches(5, jnp.float64)
    data = data.at[1, 9, 3, 5].set(jnp.nan)
    expected, seen = one_device(start, data)
    assert (seen[0] > THRESHOLD).any() and (seen[0] <= THRESHOLD).any()
    given = {"has_aux": True, "max_aux": "max_logits", "microbatches": microbatches}
    step = case.make_step("ZeRO-2 on 8", recipe("float64"), kind, loss, **given)
    params, state = step.init(start)
    for batch, largest in zip(data, seen, strict=True):
        params, state, metrics = step(params, state, batch)
        aux = metrics["aux"]
        if jnp.isfinite(batch).all():  # XLA for a CPU may lose a NaN in a maximum
            np.testing.assert_allclose(aux["max_logits"]["0"], largest, rtol=1e-7)
        np.testing.assert_allclose(aux["mean"], jnp.mean(batch), atol=1e-12)
    assert state.skipped == 1
    assert case.distance(params, expected, start) < 1e-12
    case.assert_bit_identical_on_devices(params)


@pytest.mark.parametrize(
    ("kernel_spec", "bias_spec", "apart"),
    [
        # The key's four heads on eight devices: each has half a head.
        (P(None, ("a", "b")), P(("a", "b")), False),
        (P(None, "a", "b"), P("a", "b"), True),  # (embed, heads, head_dim)
        (P("a", "b"), P("b"), False),
        (P(("a", "b"), None), P(), True),
    ],
    ids=["heads", "heads apart", "both", "embed"],
)
def test_divided_weights(kernel_spec, bias_spec, apart):
    params = model()
    if apart:
        params = jax.tree.map(lambda p: p.reshape(*p.shape[:-1], -1, HEAD_DIM), params)
    specs = {n: {"kernel": kernel_spec, "bias": bias_spec} for n in WIDTHS}
    mesh = mesh_of(4, 2, names=("a", "b"))
    tx = jm.on_mesh(jm.clip_qk(THRESHOLD), mesh, {"0": {"attn": specs}})
    largest = {"0": jnp.asarray(THRESHOLD * np.array([1, 5, 0.5, 1, 9, 2, 0.1, 1.1]))}
    case.assert_verified(tx, params, max_logits=largest)


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
def test_the_largest_logit_of_divided_queries_and_keys(kind):
    mesh = mesh_of(4, 2, names=("a", "b"), kind=kind)
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(rng.normal(size=(4, 12, h, 5)), jnp.float32) for h in (8, 4))
    expected = jm.max_attention_logits(q, k, block_size=5)
    sharding = NamedSharding(mesh, P("a", None, "b"))
    with jax.set_mesh(mesh):
        got = jax.jit(jm.max_attention_logits, static_argnames="block_size")(
            *jax.device_put((q, k), sharding), block_size=5
        )
    np.testing.assert_allclose(got, expected, rtol=1e-6)
