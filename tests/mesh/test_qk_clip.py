"""QK-clip on eight devices gives what it gives on one, however weights are divided."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_muon as jm
from tests import trees
from tests.mesh import case
from tests.mesh.case import AUTO, EXPLICIT, mesh_of


@pytest.mark.parametrize(
    ("kernel", "bias", "apart"),
    [
        # The key's four heads on eight devices: each has half a head.
        (P(None, ("a", "b")), P(("a", "b")), False),
        (P(None, "a", "b"), P("a", "b"), True),  # (embed, heads, head_dim)
        (P("a", "b"), P("b"), False),
        (P(("a", "b"), None), P(), True),
    ],
    ids=["heads", "heads apart", "both", "embed"],
)
def test_divided_weights(kernel, bias, apart):
    shapes, specs = {}, {}
    for name, heads in {"q": 8, "k": 4, "v": 8}.items():
        out = (heads, 4) if apart else (heads * 4,)
        shapes[name] = {"kernel": (16, *out), "bias": out}
        specs[name] = {"kernel": kernel, "bias": bias}
    mesh = mesh_of(4, 2, names=("a", "b"))
    tx = jm.on_mesh(jm.clip_qk(4.2), mesh, {"0": {"attn": specs}})
    largest = {"0": jnp.asarray(4.2 * np.array([1, 5, 0.5, 1, 9, 2, 0.1, 1.1]))}
    params = trees.normal({"0": {"attn": shapes}})
    case.assert_verified(tx, params, max_logits=largest)


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
def test_the_largest_logit_of_divided_queries_and_keys(kind):
    mesh = mesh_of(4, 2, names=("a", "b"), kind=kind)
    q, k = trees.normal([(4, 12, heads, 5) for heads in (8, 4)])
    expected = jm.max_attention_logits(q, k, block_size=5)
    sharding = NamedSharding(mesh, P("a", None, "b"))
    with jax.set_mesh(mesh):
        got = jax.jit(jm.max_attention_logits, static_argnames="block_size")(
            *jax.device_put((q, k), sharding), block_size=5
        )
    np.testing.assert_allclose(got, expected, rtol=1e-6)
