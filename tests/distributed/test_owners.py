"""Divided matrices are computed once each, by even shares, and nothing is gathered."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers

import jax_muon as jm
from benchmarks.schedule.hlo import Module
from jax_muon.mesh import owners
from jax_muon.mesh.collectives import collectives
from jax_muon.mesh.owners import Shard, make_pools
from tests.distributed.layouts import (
    AUTO,
    EXPLICIT,
    assert_bit_identical_on_devices,
    mesh_of,
)

# --- what travels, and who computes ---------------------------------------------------


def gpt(layers=8, width=32):
    """Shapes of a GPT's matrices, as many of each as eight devices divide."""
    square = dict.fromkeys("qkvo", (width, width))
    block = square | {"up": (width, 4 * width), "down": (4 * width, width)}
    return {
        f"{i}/{name}": shape for i in range(layers) for name, shape in block.items()
    }


def abstract(shapes, mesh, spec):
    """Shapes of parameters that lie on a mesh."""
    return {
        path: jax.ShapeDtypeStruct(shape, "float32", sharding=NamedSharding(mesh, spec))
        for path, shape in shapes.items()
    }


def compiled(mesh, spec):
    """The text of a compiled step of nanochat, and its jaxpr's collectives."""
    shapes, tx = gpt(), jm.on_mesh(jm.nanochat(dtype="float32"), mesh, spec)
    params = abstract(shapes, mesh, spec)
    state = jm.abstract_state(tx, params, mesh)

    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    sent = collectives(step, params, state, params)
    return jax.jit(step).lower(params, state, params).compile().as_text(), sent


LAYOUTS = [((8,), P("data")), ((8,), P(None, "data")), ((4, 2), P("data", "fsdp"))]


@pytest.mark.parametrize(("shape", "spec"), LAYOUTS)
def test_only_all_to_alls_and_an_even_share_of_the_work(shape, spec):
    """No matrix is gathered, and no product computed twice."""
    mesh = mesh_of(*shape)
    text, sent = compiled(mesh, spec)
    # Two shapes, each in two chunks, each there and back.
    assert [c.kind for c in sent] == ["all-to-all"] * 8
    module = Module.parse(text)
    kinds = {transfer.kind for transfer in module.transfers()}
    assert kinds <= {"all-to-all", "all-reduce"}
    largest = max(t.input_bytes for t in module.transfers() if t.kind == "all-reduce")
    assert largest <= 4 * 128 * len(gpt())  # NorMuon's means, not matrices

    single = {p: jax.ShapeDtypeStruct(s, "float32") for p, s in gpt().items()}
    tx = jm.nanochat(dtype="float32")
    one = jax.jit(tx.update).lower(single, jax.eval_shape(tx.init, single), single)
    whole = Module.parse(one.compile().as_text()).work().flops
    assert whole / 8 <= module.work().flops <= 1.1 * whole / 8


@pytest.mark.parametrize(("shape", "spec"), [*LAYOUTS, ((2, 4), P("data"))])
def test_describe_tells_what_is_sent(shape, spec):
    mesh = mesh_of(*shape)
    _, sent = compiled(mesh, spec)
    total = sum(c.sent_bytes for c in sent)
    params = {path: jax.ShapeDtypeStruct(s, "float32") for path, s in gpt().items()}
    tx = jm.on_mesh(jm.nanochat(dtype="float32"), mesh, spec)
    planned = jm.describe(tx, params)
    assert planned.imbalance == 1
    assert planned.sent_bytes["orthogonalize"] == total
    assert [c.kind for c in planned.collectives] == [c.kind for c in sent]
    assert sum(pool.sent_bytes(planned.sizes) for pool in planned.pools) == total
    table = str(planned)
    assert "the busiest does 1.00 of an even share" in table
    assert f"each sends {total / 1000:.1f} KB a step" in table


def test_describe_leaves_out_mesh_axes_of_one_device():
    names = ("data", "fsdp", *(f"axis_{i}" for i in range(9)))
    mesh = mesh_of(1, 8, *[1] * 9, names=names)
    spec = P(("data", *names[3:], "fsdp"), names[2])
    tx = jm.on_mesh(jm.muon(), mesh, spec)
    table = str(jm.describe(tx, {"up": jax.ShapeDtypeStruct((64, 256), "float32")}))
    assert "fsdp x -" in table.splitlines()[1]
    assert "axis_" not in table


@pytest.mark.parametrize(
    ("small", "work"),
    [
        (65536, "8 devices: matrices too small for owners, computed by all that hold"),
        (0, "8 devices: the busiest does 8.00 of an even share"),
    ],
)
def test_describe_says_why_work_is_repeated(small, work):
    shapes = {"w": jax.ShapeDtypeStruct((64, 64), "float32")}
    tx = jm.on_mesh(jm.orthogonalize(small=small), mesh_of(8), P("data"))
    assert work in str(jm.describe(tx, shapes))


def test_replicas_send_their_shares_to_each_other():
    """Over (2, 4) with one axis divided: an all-gather of pieces over the other."""
    mesh, spec = mesh_of(2, 4), P("data")
    _, sent = compiled(mesh, spec)
    gathers = [c for c in sent if c.kind == "all-gather"]
    assert {c.axes for c in gathers} == {("fsdp",)}
    pieces = sum(np.prod(shape) for shape in gpt().values()) * 4 // 2
    assert sum(c.input_bytes for c in gathers) * 4 == pieces


def test_odd_matrices_go_to_different_devices():
    """5 + 3 matrices of one work on 8 devices: one each."""
    shards = [
        Shard((5, 16, 64), np.float32, rows=("data",)),
        Shard((3, 16, 64), np.float64, rows=("data",)),
    ]
    pools = make_pools(shards, {"data": 8})
    load = sum(pool.load({"data": 8}) for pool in pools)
    assert load.tolist() == [pools[0].flops] * 8


def test_small_matrices_are_gathered_once():
    mesh = mesh_of(8)
    params = {f"{i}": jax.ShapeDtypeStruct((8, 8), "float32") for i in range(5)}
    tx = jm.on_mesh(jm.orthogonalize(), mesh, P("data"))
    (sent,) = collectives(lambda g: tx.update(g, tx.init(g))[0], params)
    assert (sent.kind, sent.input_bytes) == ("all-gather", 5 * 8 * 4)


def test_a_polar_factor_of_the_users_own():
    """Any function; what it holds of arrays is its own affair."""

    def own(x):
        return jm.PolarExpress()(x)

    mesh = mesh_of(8, kind=EXPLICIT)
    w = jax.device_put(jnp.ones((8, 8)), NamedSharding(mesh, P("data", None)))
    tx = jm.orthogonalize(own, small=1)
    result = jax.jit(lambda g: tx.update(g, optax.EmptyState())[0])({"w": w})["w"]
    assert result.sharding == w.sharding
    assert jm.orthogonalize().update({}, optax.EmptyState())[0] == {}


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
def test_experts_on_devices_of_their_own_send_nothing(kind):
    """(8, 16, 24) over 8 devices: by experts no collective, by rows two all-to-alls."""
    mesh = mesh_of(8, kind=kind)
    params = {"experts/up": np.ones((8, 16, 24), np.float32)}
    for spec, sent in (
        (P("data", None, None), []),
        (P(None, "data", None), [np.ones((8, 1, 2, 24)).size * 4] * 2),
    ):
        tx = jm.on_mesh(jm.nanochat(0.02, steps=2, dtype="float32"), mesh, spec)
        placed = jax.device_put(params, NamedSharding(mesh, spec))
        args = (placed, jax.jit(tx.init)(placed), placed)

        def step(params, state, grads, tx=tx):
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        with jax.set_mesh(mesh):
            found = [(c.kind, c.input_bytes) for c in collectives(step, *args)]
            program = Module.parse(jax.jit(step).lower(*args).compile().as_text())
        assert found == [("all-to-all", size) for size in sent]
        assert bool(program.transfers()) == bool(sent)


# --- groups of devices as owners ------------------------------------------------------


@pytest.fixture
def sharing(monkeypatch):
    """A planner that shares whatever it can, since these matrices are small."""
    monkeypatch.setattr(owners, "cost", lambda pools, _: -sum(p.group for p in pools))


GROUPS = [
    ((8,), P(None, "data"), 4, 4),
    ((8,), P(None, None, "data"), 8, 8),
    ((2, 4), P(None, ("data", "fsdp")), 4, 4),
    ((2, 4), P(None, None, ("fsdp", "data")), 4, 4),  # not in the order of the mesh
    ((2, 4), P(None, "fsdp"), 4, 4),  # the other axis repeats them
    ((2, 4), P("data", None, "fsdp"), 2, 2),  # other matrices along it
    ((4, 2), P(None, "data", "fsdp"), 4, 1),  # rows and columns: whole matrices
    ((4, 2), P(None, "data"), 4, 1),  # not neighbours
    ((8,), P(None, "data"), 3, 1),
]


@pytest.mark.parametrize(("shape", "spec", "group", "used"), GROUPS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_groups_share_matrices(rng, x64, sharing, shape, spec, group, used, dtype):
    """Tall, wide and square, as many as groups and not; `describe` shows the groups."""
    mesh = mesh_of(*shape, kind=EXPLICIT)
    sizes = {"wide": (6, 16, 40), "tall": (4, 48, 16), "odd": (2, 16, 40)}
    grads = {k: rng.standard_normal(size).astype(dtype) for k, size in sizes.items()}
    polar = jm.PolarExpress(dtype=dtype, norm="schatten4")
    matrices = jm.read(grads, rules=MuonDimensionNumbers(-2, -1))
    tx = jm.orthogonalize(polar, matrices=matrices, small=0, group=group)
    expected, _ = tx.update(grads, optax.EmptyState())
    placed = jax.device_put(grads, NamedSharding(mesh, spec))
    result = jax.jit(lambda g: tx.update(g, optax.EmptyState())[0])(placed)
    for name, found in result.items():
        assert found.sharding.is_equivalent_to(placed[name].sharding, 3)
        bound = 5e-6 if dtype == "float32" else 1e-12
        np.testing.assert_allclose(found, expected[name], rtol=0, atol=bound)
    assert_bit_identical_on_devices(result)
    planned = jm.describe(tx, placed)
    assert {pool.group for pool in planned.pools} == {used}
    assert (f"groups of {used}" in str(planned)) == (used > 1)
    total = sum(pool.load(planned.sizes) for pool in planned.pools)
    if used > 1:
        assert total.min() == total.max()  # some of it zeros
        devices = {c.devices for c in planned.collectives}
        assert used in devices and max(devices) <= max(used, mesh.size // used)


def test_what_cannot_be_shared_goes_to_owners_whole(sharing):
    """The Gram form, and polar factors of the user's own."""
    mesh = mesh_of(8, kind=EXPLICIT)
    params = {"w": jax.ShapeDtypeStruct((8, 64), "float32")}
    spec = NamedSharding(mesh, P(None, "data"))
    params = {k: x.update(sharding=spec) for k, x in params.items()}
    gram = jm.PolarExpress(dtype="float32", form="gram")
    for polar, group in ((jm.ExactPolar(), 1), (gram, 1), (jm.PolarExpress(), 8)):
        (pool,) = jm.describe(jm.orthogonalize(polar, small=0), params).pools
        assert pool.group == group


@pytest.mark.parametrize(
    ("gpus", "group", "most"), [(64, 1, 11.1e12), (1024, 8, 1.7e12)]
)
def test_the_planner_shares_where_that_takes_less_time(gpus, group, most):
    """Llama 7B: whole matrices as long as there are enough of them."""
    sizes = {"data": gpus}
    shards = [
        Shard((number, m // gpus, n), jnp.dtype("bfloat16"), rows=("data",))
        for number, m, n in (
            (64, 4096, 4096),
            (64, 4096, 1024),
            (64, 4096, 14336),
            (32, 14336, 4096),
        )
    ]
    pools = make_pools(
        shards, sizes, group=8, shared_dtype=jm.PolarExpress().shared_dtype, small=65536
    )
    assert {pool.group for pool in pools} == {group}
    busiest = sum(pool.load(sizes) for pool in pools).max()
    assert busiest <= most
