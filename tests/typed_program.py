"""A user's program whose types `make lint` checks; pyright finds the same.

optax has no `py.typed`: mypy sees its types with `--follow-untyped-imports` alone.
"""

from typing import TYPE_CHECKING, Any, assert_type

import jax
import jax.numpy as jnp
import optax

import jax_muon as jm
from jax_muon.mesh.on_mesh import OnMesh


def loss(params: Any, batch: jax.Array) -> jax.Array:
    """Of one layer."""
    return jnp.mean((batch @ params["up"]) ** 2)


params = {"up": jnp.ones((4, 8)), "bias": jnp.ones(8)}
read = jm.find_matrices(params, loss, jnp.ones((2, 4)), rules={"bias": "frozen"})
matrices = assert_type(read, jm.Matrices)
rate = optax.warmup_cosine_decay_schedule(0.0, 0.02, 10, 100)
recipe = jm.nanochat(
    rate,
    adamw=optax.adamw(3e-4),
    groups={"frozen": optax.set_to_zero()},
    matrices=matrices,
)
assert_type(recipe, optax.GradientTransformationExtraArgs)
stated = jm.moonlight(1e-3, adamw=jm.adamw(3e-4), matrices={"up": "muon"})
assert_type(stated, optax.GradientTransformationExtraArgs)
tx = jm.skip_nonfinite(optax.chain(optax.clip_by_global_norm(1.0), recipe))
assert_type(tx, optax.GradientTransformationExtraArgs)
mesh = jax.make_mesh((1,), ("data",))
sharded = assert_type(jm.on_mesh(tx, mesh), OnMesh)
updates, state = tx.update(params, tx.init(params), params)
step = jm.make_train_step(loss, sharded)
placed, optimizer_state = step.init(params)
placed, optimizer_state, metrics = step(placed, optimizer_state, jnp.ones((2, 4)))
assert_type(metrics, dict[str, Any])
if TYPE_CHECKING:
    wrong = jm.nanochat(0.1, version=2026, matrices={})  # type: ignore[arg-type]
