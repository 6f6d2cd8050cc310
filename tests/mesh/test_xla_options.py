"""Options for XLA: buckets by the bytes of a model, loops, and what XLA knows."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jax_muon as jm
from jax_muon.mesh import xla_options
from jax_muon.mesh.layout import Placed
from jax_muon.mesh.xla_options import _known

FIELDS = ("platform", "id", "process_index", "device_kind")  # that a mesh asks for
Device = dataclasses.make_dataclass("Device", FIELDS, frozen=True)


def mesh_of(*shape, platform="gpu"):
    """Described devices."""
    devices = [Device(platform, i, 0, "") for i in range(math.prod(shape))]
    return jax.sharding.Mesh(np.reshape(devices, shape), tuple("ab"[: len(shape)]))


def thresholds(options):
    return [
        options[f"xla_gpu_{kind}_combine_threshold_bytes"]
        for kind in ("all_gather", "reduce_scatter")
    ]


def bfloat16(*shape):
    return jax.ShapeDtypeStruct(shape, "bfloat16")


def options(leaves, mesh, axes=("a",), by="", spec=("a",)):
    placed = Placed(mesh, [], [P(*spec)] * len(leaves), [], [], [], ())
    return xla_options.choose(placed, leaves, len(leaves) * [by], axes)


def test_options_by_bytes_and_platform():
    """Buckets by all bytes, on GPUs; nothing anywhere else, or on one GPU."""
    size = 2 * 64 * 8_000_000
    leaves = [bfloat16(64, 8_000_000)]
    rows = [
        (leaves, mesh_of(8), {}, [size / 64, size / 32 / 8]),
        (leaves, mesh_of(8), {"spec": ()}, [size / 16, size / 32 / 8]),
        # Over two of 16 devices each holds one half.
        (leaves, mesh_of(8, 2), {}, [size / 64 / 2, size / 32 / 16]),
        ([bfloat16(16)], mesh_of(8), {}, [4_000_000, 500_000]),
    ]
    for tree, mesh, given, expected in rows:
        assert thresholds(options(tree, mesh, **given)) == expected
    assert options(leaves, mesh_of(8)) == options(leaves, mesh_of(8, platform="cuda"))
    assert options(leaves, mesh_of(8, platform="cpu")) == {}
    assert options(leaves, mesh_of(1)) == {}


DOUBLE = "xla_gpu_enable_while_loop_double_buffering"


def test_options_for_layers_that_a_loop_gathers():
    """Two buffers for the loop, and one bucket for all of a layer."""
    layer, both = 3 * 4096 * 4096 * 2, ("a", "b")
    given = {"leaves": [bfloat16(4, 3 * 4096, 4096)], "by": "scan_layers"}
    found = options(mesh=mesh_of(16), **given)
    assert found[DOUBLE]
    # jaxlib 0.12 has no such option.
    assert not found.get("xla_gpu_enable_pipelined_reduce_scatter", False)
    for threshold, received in zip(thresholds(found), (layer, layer / 16), strict=True):
        assert received < threshold < 2 * received
    # Over a part of the mesh axes, as in HSDP, a device receives more of it.
    hsdp = thresholds(options(mesh=mesh_of(8, 2), axes=both, **given))
    assert layer / 2 < hsdp[1] < layer
    # Among few devices smaller ones, beside which others need not wait long.
    few = thresholds(options(mesh=mesh_of(8), **given))
    assert few == [layer / 2, 4_000_000 / 8]


def scanned_by(scan):
    """A loss of two layers, and their parameters."""
    block = lambda x, w: (jnp.tanh(x @ w["up"]) @ w["down"], None)  # noqa: E731
    shapes = {"up": (2, 64, 256), "down": (2, 256, 64)}
    layers = {name: jax.ShapeDtypeStruct(x, "float32") for name, x in shapes.items()}
    head = jax.ShapeDtypeStruct((64, 128), "float32")
    params = {"layers": layers, "head": head}
    return lambda p, x: jnp.mean(scan(block, x, p["layers"])[0] @ p["head"]), params


@pytest.mark.parametrize("scan", [jm.scan_layers, jax.lax.scan])
def test_options_of_an_optimizer_and_of_a_step(scan, monkeypatch):
    """The reading knows by which scan layers are gathered in plain jit."""
    loss, params = scanned_by(scan)
    mesh, x = mesh_of(16), jax.ShapeDtypeStruct((16, 64), "float32")
    matrices = jm.find_matrices(params, loss, x)
    recipe = jm.muon(0.02, matrices=matrices, adamw=optax.adamw(1e-3))
    by_layer = jm.on_mesh(recipe, jm.fsdp(params, mesh, matrices)).xla_options(params)
    assert by_layer[DOUBLE]
    by_scan_layers = "xla_gpu_graph_min_graph_size" in by_layer
    assert by_scan_layers == (scan is jm.scan_layers)
    if not by_scan_layers:
        assert by_layer == _known(xla_options.XLA_GATHERS_LAYERS)
    whole = jm.on_mesh(recipe, mesh, divide="a").xla_options(params)
    assert DOUBLE not in whole
    # In a step, what a plain scan takes is gathered whole, before the loss.
    on_cpus = jax.make_mesh((8,), ("a",), (jax.sharding.AxisType.Auto,))
    tx = jm.on_mesh(recipe, jm.fsdp(params, on_cpus, matrices))
    seen = []
    monkeypatch.setattr(xla_options, "choose", lambda *args: seen.append(args) or {})
    assert jm.make_train_step(loss, tx).xla_options(params, None, x) == {}
    by = "scan_layers" if by_scan_layers else ""
    assert seen[0][2] == ["", by, by]


def test_options_that_xla_does_not_know_are_left_out():
    known = {"xla_gpu_graph_min_graph_size": 1}
    unknown = {"xla_gpu_of_another_version": True, "xla_gpu_nor_this": 3}
    assert _known({**unknown, **known}) == known
