"""MaxText's own sharded Muon as an oracle for `jm.muon`, on eight devices."""

import functools

import jax
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from maxtext.optimizers.muon import ShardedMuonDimensionNumbers as Dims
from maxtext.optimizers.muon import muon as maxtext_muon
from optax.contrib import MuonDimensionNumbers

import jax_muon as jm

# Shape, reduction and output axes, spec. Scanned layers are on axis 1, None here.
# `dense` has no layers: theirs orthogonalizes it in pieces.
LEAVES = {
    "layers/mlp/wi_0/kernel": ((16, None, 32), (0,), (-1,), P("fsdp", None, "tensor")),
    "layers/mlp/wo/kernel": ((32, None, 16), (0,), (-1,), P("tensor", None, "fsdp")),
    "layers/self_attention/query/kernel": (
        (16, None, 4, 8),
        (0,),
        (-2, -1),
        P("fsdp", None, "tensor", None),
    ),
    "layers/self_attention/out/kernel": (
        (4, None, 8, 16),
        (0, -2),
        (-1,),
        P("tensor", None, None, "fsdp"),
    ),
    "layers/moe_block/wi_0": (
        (4, None, 16, 8),
        (-2,),
        (-1,),
        P("fsdp", None, None, "tensor"),
    ),
    "dense/kernel": ((16, 24), (0,), (-1,), P("fsdp", "tensor")),
    "layers/norm/scale": ((16, None), None, None, P("fsdp", None)),
}
RULES = {
    path: MuonDimensionNumbers(*axes) if (axes := leaf[1:3])[0] else "adamw"
    for path, leaf in LEAVES.items()
}
SETTINGS = [
    {},
    {"nesterov": False, "weight_decay": 0.1},
    {"consistent_rms": 0.2, "adam_weight_decay": 0.1},
]


def random_tree(rng, layers):
    """Values of every leaf."""
    return {
        path: rng.standard_normal([n or layers for n in leaf[0]])
        for path, leaf in LEAVES.items()
    }


def ours(nesterov=True, weight_decay=0.0, consistent_rms=None, adam_weight_decay=0.0):
    """MaxText's arguments as ours."""
    return jm.muon(
        0.02,
        weight_decay=weight_decay,
        bias_correction=True,
        nesterov=nesterov,
        adjust_lr_fn="original" if consistent_rms is None else "match_rms_adamw",
        polar=jm.NewtonSchulz(dtype="float64", eps=1e-8),
        # Theirs, like optax's, hands Muon's `nesterov` to its Adam.
        adamw=optax.adamw(0.02, weight_decay=adam_weight_decay, nesterov=nesterov),
        matrices=functools.partial(jm.find_matrices, rules=RULES),
    )


def run(tx, params, grads):
    """Parameters after one step for each tree of gradients, on the host."""
    state, update = jax.jit(tx.init)(params), jax.jit(tx.update)
    for gradient in grads:
        updates, state = update(gradient, state, params)
        params = optax.apply_updates(params, updates)
    return jax.device_get(params)


# Three layers do not divide over the mesh: theirs pads them, and fails if Explicit.
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize(
    ("axis_type", "layers"), [(AxisType.Auto, 3), (AxisType.Explicit, 8)], ids=str
)
def test_three_steps_agree(settings, axis_type, layers, rng, x64):
    """Theirs with its all-to-all, ours with `on_mesh`, both on a mesh of (4, 2)."""
    mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"), 2 * (axis_type,))
    where = {path: NamedSharding(mesh, leaf[3]) for path, leaf in LEAVES.items()}
    params, *grads = (
        {path: jax.device_put(x, where[path]) for path, x in t.items()}
        for t in (random_tree(rng, layers) for _ in range(4))
    )
    dims = {
        path: reduce and Dims(reduce, out, NamedSharding(mesh, spec))
        for path, (_, reduce, out, spec) in LEAVES.items()
    }
    with jax.set_mesh(mesh):
        theirs = maxtext_muon(0.02, muon_weight_dimension_numbers=dims, **settings)
        expected = run(theirs, params, grads)
        found = run(jm.on_mesh(ours(**settings), where), params, grads)
    for path, leaf in found.items():
        # Ten-odd roundings of 1e-16 a step, which five quintics grow by some 8 times.
        np.testing.assert_allclose(
            leaf, expected[path], rtol=0, atol=1e-12, err_msg=path
        )
