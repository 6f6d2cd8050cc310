"""Transforms of others that need Auto axes inside `on_mesh`."""

import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jax_muon as jm
from tests.mesh import layouts
from tests.mesh.layouts import mesh_of

PARAMS = {"w": jnp.ones((16, 24)), "b": jnp.ones(16)}


def on_mesh(tx):
    return jm.on_mesh(tx, mesh_of(8), P("data"), min_size=1)


FOREIGN = {
    "adaptive_grad_clip": optax.adaptive_grad_clip(0.1),
    "scale_by_lbfgs": optax.scale_by_lbfgs(2),
    "prodigy": optax.contrib.prodigy(1.0, estim_lr0=1e-2),
    "dadapt_adamw": optax.contrib.dadapt_adamw(1.0, estim_lr0=1e-2),
}
if hasattr(optax.contrib, "scale_by_galore"):  # not in optax 0.2.6
    FOREIGN["scale_by_galore"] = optax.contrib.scale_by_galore(rank=4)


@pytest.mark.parametrize("name", FOREIGN)
def test_what_has_no_sharding_type_is_named_and_runs_on_auto_axes(name):
    on = on_mesh(FOREIGN[name])
    with pytest.raises(ValueError, match=rf"^{name} inside .*on_auto_axes\({name}"):
        on.update(PARAMS, on.init(PARAMS), PARAMS)
    layouts.assert_verified(on_mesh(jm.on_auto_axes(FOREIGN[name])), PARAMS)


def test_auto_axes_beside_orthogonalization():
    """Around a member of a chain, and around a group."""

    def muon(matrices):
        return jm.orthogonalize(jm.ExactPolar(), matrices=matrices, small=0)

    groups = {"muon": muon, "adamw": jm.on_auto_axes(FOREIGN["prodigy"])}
    clip = jm.on_auto_axes(optax.adaptive_grad_clip(0.1))
    tx = optax.chain(clip, jm.partition(groups, {"w": "muon"}))
    layouts.assert_verified(on_mesh(tx), PARAMS)
