"""Options for XLA: buckets by the bytes of a model, loops, and what XLA knows."""

import dataclasses
import functools
import math

import jax
import numpy as np
import pytest

import jax_muon as jm
from jax_muon.mesh.xla_options import XLA_GATHERS_LAYERS, _known

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


X = bfloat16(2, 4096)


def _layer(x, layer):
    return x @ layer["w"] + (x @ layer["up"])[:, ::2], None


gpu_options = functools.partial(jm.gpu_options, matrices=None)


def test_options_by_bytes_and_platform():
    """Buckets by all bytes, on GPUs; nothing anywhere else, or on one GPU."""
    params, size = {"w": bfloat16(64, 8_000_000)}, 2 * 64 * 8_000_000
    rows = [
        (params, mesh_of(8), {}, [size / 64, size / 32 / 8]),
        (params, mesh_of(8), {"gathers_first": False}, [size / 16, size / 32 / 8]),
        # Over two of 16 devices each holds one half.
        (params, mesh_of(8, 2), {"axis": "a"}, [size / 64 / 2, size / 32 / 16]),
        ({"w": bfloat16(16)}, mesh_of(8), {}, [4_000_000, 500_000]),
    ]
    for tree, mesh, given, expected in rows:
        assert thresholds(gpu_options(tree, mesh, **given)) == expected
    options = gpu_options(params, mesh_of(8))
    assert options == gpu_options(params, mesh_of(8, platform="cuda"))
    assert gpu_options(params, mesh_of(8, platform="cpu")) == {}
    assert gpu_options(params, mesh_of(1)) == {}


def test_options_for_layers_that_a_loop_gathers():
    """Two buffers for the loop, and one bucket for all of a layer."""
    mesh = mesh_of(16)
    stack = {"layers": {"w": bfloat16(4, 4096, 4096), "up": bfloat16(4, 4096, 8192)}}
    layer = 3 * 4096 * 4096 * 2
    double = "xla_gpu_enable_while_loop_double_buffering"
    options = gpu_options(stack, mesh, scanned=["layers"])
    assert options[double]
    # jaxlib 0.12 has no such option.
    assert not options.get("xla_gpu_enable_pipelined_reduce_scatter", False)
    for threshold, received in zip(
        thresholds(options), (layer, layer / 16), strict=True
    ):
        assert received < threshold < 2 * received
    # Over a part of the mesh axes, as in HSDP, a device receives more of it.
    hsdp = thresholds(gpu_options(stack, mesh_of(8, 2), scanned=["layers"]))
    assert layer / 2 < hsdp[1] < layer
    # Among few devices smaller ones, beside which others need not wait long.
    few = thresholds(gpu_options(stack, mesh_of(8), scanned=["layers"]))
    assert few == [layer / 2, 4_000_000 / 8]
    matrices = jm.find_matrices(
        stack, lambda p, x: jax.lax.scan(_layer, x, p["layers"])[0], X
    )
    for given in ({}, {"matrices": matrices, "gathers_first": False}):
        assert double not in gpu_options(stack, mesh, **given)
    # In plain jit XLA gathers layers by itself: its own pipelining does most.
    known = _known(XLA_GATHERS_LAYERS)
    assert gpu_options(stack, mesh, matrices=matrices) == known
    with pytest.raises(ValueError, match="scanned: the pattern 'blocks' matches no"):
        gpu_options(stack, mesh, scanned="blocks")


def test_options_that_xla_does_not_know_are_left_out():
    known = {"xla_gpu_graph_min_graph_size": 1}
    unknown = {"xla_gpu_of_another_version": True, "xla_gpu_nor_this": 3}
    assert _known({**unknown, **known}) == known
