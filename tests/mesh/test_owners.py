"""Divided matrices are computed once each, by even shares, and nothing is gathered."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_muon as jm
from benchmarks.schedule.hlo import Module
from benchmarks.schedule.jaxpr import collectives
from jax_muon.mesh import hardware, owners
from jax_muon.mesh.owners import cost, pools_of, with_owners
from tests.matrices import toy
from tests.mesh.case import (
    EXPLICIT,
    assert_bit_identical_on_devices,
    at,
    gpt,
    mesh_of,
    put,
)
from tests.recipes import RECIPES

# --- what travels, and who computes ---------------------------------------------------


def step_of(tx, params, mesh=None, spec=None):
    """A step of an optimizer, and its arguments as shapes on a mesh."""
    if mesh is not None:
        place = NamedSharding(mesh, spec)
        params = {path: x.update(sharding=place) for path, x in params.items()}

    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = jax.eval_shape(tx.init, params)
    if mesh is not None:
        state = tx.abstract_state(params)
    return step, (params, state, params)


def compiled(step, args):
    """The program that XLA compiles."""
    text = jax.jit(step).lower(*args).compile().as_text()
    assert "collective-permute" not in text  # which is no transfer of `Module`
    return Module.parse(text)


LAYOUTS = [
    ((8,), P("data")),
    ((8,), P(None, "data")),
    ((4, 2), P("data", "fsdp")),
    ((2, 4), P("data")),
]


@pytest.mark.parametrize(("shape", "spec"), LAYOUTS)
def test_describe_tells_what_is_sent(shape, spec):
    """All-to-alls, and over an axis that repeats matrices all-gathers of the shares."""
    mesh = mesh_of(*shape)
    recipe = RECIPES["nanochat"](dtype="float32", matrices=toy)
    tx = jm.on_mesh(recipe, at(mesh, spec))
    step, args = step_of(tx, gpt(), mesh, spec)
    sent = collectives(step, *args)
    # Two shapes, each in two chunks, each there and back.
    there_and_back = [c for c in sent if c.kind == "all-to-all"]
    assert len(there_and_back) == 8
    gathers = [c for c in sent if c.kind == "all-gather"]
    assert len(sent) == 8 + len(gathers)
    if shape == (2, 4):
        assert {c.axes for c in gathers} == {("fsdp",)}
        shards = sum(x.size for x in gpt().values()) * 4 // 2
        assert sum(c.input_bytes for c in gathers) * 4 == shards
    else:
        assert not gathers
    total = sum(c.sent_bytes for c in sent)
    planned = jm.describe(tx, gpt())
    assert planned.imbalance == 1
    assert planned.sent_bytes["orthogonalize"] == total
    for per_host in (2, 4, 8):
        on = jm.on_mesh(recipe, at(mesh, spec), devices_per_host=per_host)
        found = jm.describe(on, gpt())
        between = sum(c.bytes_between_hosts(per_host) for c in sent)
        assert found.bytes_between_hosts["orthogonalize"] == between
        assert (between > 0) == ("between hosts: " in str(found)) == (per_host < 8)
    table = str(planned)
    assert "the busiest does 1.00 of an even share" in table
    assert f"what the loss sends: orthogonalize {total / 1000:.1f} KB" in table


def test_no_matrix_is_gathered_and_no_product_computed_twice():
    """In the program that XLA compiles."""
    mesh, spec = mesh_of(4, 2), P("data", "fsdp")
    tx = RECIPES["nanochat"](dtype="float32", matrices=toy)
    module = compiled(*step_of(jm.on_mesh(tx, at(mesh, spec)), gpt(), mesh, spec))
    kinds = {transfer.kind for transfer in module.transfers()}
    assert kinds <= {"all-to-all", "all-reduce"}
    largest = max(t.input_bytes for t in module.transfers() if t.kind == "all-reduce")
    assert largest <= 4 * 128 * len(gpt())  # NorMuon's means, not matrices
    whole = compiled(*step_of(tx, gpt())).flops()
    assert whole / 8 <= module.flops() <= 1.1 * whole / 8


def test_describe_leaves_out_mesh_axes_of_one_device():
    names = ("data", "fsdp", *(f"axis_{i}" for i in range(9)))
    mesh = mesh_of(1, 8, *[1] * 9, names=names)
    spec = P(("data", *names[3:], "fsdp"), names[2])
    tx = jm.on_mesh(RECIPES["muon"](matrices=toy), at(mesh, spec))
    table = str(jm.describe(tx, {"up": jax.ShapeDtypeStruct((64, 256), "float32")}))
    assert "fsdp x -" in table.splitlines()[1]
    assert "axis_" not in table


def test_odd_matrices_go_to_different_devices():
    """5 + 3 matrices of one work on 8 devices: one each."""
    shards = [
        ((5, 16, 64), np.float32, (), ("data",), ()),
        ((3, 16, 64), np.float64, (), ("data",), ()),
    ]
    pools = with_owners(pools_of(shards, {"data": 8}), {"data": 8})
    load = sum(pool.load({"data": 8}) for pool in pools)
    assert load.tolist() == [pools[0].flops] * 8


def test_groups_of_matrices_find_different_owners():
    """Four groups with one matrix each, on eight devices."""
    params = {k: jax.ShapeDtypeStruct((512, 512), "float32") for k in "abcd"}
    groups = {k: jm.orthogonalize() for k in "abcd"}
    tx = optax.multi_transform(groups, {k: k for k in "abcd"})
    planned = jm.describe(jm.on_mesh(tx, mesh_of(8), divide="data"), params)
    assert len(planned.pools) == 4
    flops = sum(pool.load(planned.sizes) for pool in planned.pools)
    assert sorted(flops) == [0] * 4 + [flops.max()] * 4


@pytest.mark.parametrize(
    ("tx", "shapes", "expected"),
    [
        # Small ones are gathered at once, by all devices.
        (jm.orthogonalize(), dict.fromkeys("abcde", (8, 8)), [("all-gather", 5 * 32)]),
        # Experts on devices of their own.
        (
            RECIPES["nanochat"](ns_steps=2, matrices=toy),
            {"experts/up": (8, 16, 24)},
            [],
        ),
    ],
)
def test_matrices_without_owners(tx, shapes, expected):
    params = {k: jax.ShapeDtypeStruct(v, "float32") for k, v in shapes.items()}
    mesh, spec = mesh_of(8), P("data")
    tx = jm.on_mesh(tx, at(mesh, spec))
    step, args = step_of(tx, params, mesh, spec)
    sent = collectives(step, *args)
    assert [(x.kind, x.input_bytes) for x in sent] == expected
    planned = jm.describe(tx, params).sent_bytes["orthogonalize"]
    assert planned == sum(x.sent_bytes for x in sent)
    assert len(compiled(step, args).transfers()) == len(expected)


# --- teams of devices as owners ------------------------------------------------------


@pytest.fixture
def sharing(monkeypatch):
    """A planner that shares whatever it can, since these matrices are small."""
    monkeypatch.setattr(owners, "cost", lambda pools, *_: -sum(p.team for p in pools))


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


@pytest.mark.parametrize(
    ("shape", "spec", "team", "used", "dtype"),
    [(*row, "float64") for row in GROUPS] + [(*GROUPS[0], "float32")],
)
def test_teams_share_matrices(rng, x64, sharing, shape, spec, team, used, dtype):
    """Tall, wide and square, as many as teams and not; `describe` shows the teams.

    Wide and tall matrices of one size share teams, three on a device of each.
    """
    mesh = mesh_of(*shape, kind=EXPLICIT)
    count = 12 if spec[0] else 9
    sizes = {"wide": (count, 16, 40), "turned": (count, 40, 16)}
    sizes |= {"tall": (4, 48, 16), "square": (2, 16, 16)}
    grads = {k: rng.standard_normal(size).astype(dtype) for k, size in sizes.items()}
    grads["wide"][1, 3, 5] *= float(np.finfo(dtype).max) / 4  # its square overflows
    # The second step has no term in X.
    polar = jm.NewtonSchulz(
        coefficients=[(3.4, -4.7, 2.0), (2.0, -1.5, 0.5)], dtype=dtype, norm="schatten4"
    )
    tx = jm.orthogonalize(polar, small=0, team=team)
    update = lambda g: tx.update(g, optax.EmptyState())[0]  # noqa: E731
    placed = put(grads, spec, mesh)
    result = jax.jit(update)(placed)
    bound = 5e-6 if dtype == "float32" else 1e-12
    chex.assert_trees_all_close(result, update(grads), rtol=0, atol=bound)
    for name, found in result.items():
        assert found.sharding.is_equivalent_to(placed[name].sharding, 3)
    assert_bit_identical_on_devices(result)
    planned = jm.describe(tx, placed)
    assert {pool.team for pool in planned.pools} == {used}
    assert (f"teams of {used}" in str(planned)) == (used > 1)
    sent = collectives(update, placed)
    total = sum(pool.load(planned.sizes) for pool in planned.pools)
    if used > 1:
        assert total.min() == total.max()  # some of it zeros
        devices = {c.devices for c in sent}
        assert used in devices and max(devices) <= max(used, mesh.size // used)
    else:
        counted = sum(c.sent_bytes for c in sent)
        assert planned.sent_bytes["orthogonalize"] == counted


@pytest.mark.parametrize(
    ("polar", "team"),
    [
        (jm.PolarExpress(), 8),
        (jm.PolarExpress(dtype="float32", form="gram"), 1),
        (jm.ExactPolar(), 1),
    ],
)
def test_what_cannot_be_shared_goes_to_owners_whole(sharing, polar, team):
    tx = jm.on_mesh(jm.orthogonalize(polar, small=0), at(mesh_of(8), P(None, "data")))
    shapes = {"w": jax.ShapeDtypeStruct((8, 64), "float32")}
    found = jm.describe(tx, shapes)
    assert [pool.team for pool in found.pools] == [team]
    assert f"the busiest does {8 / team:.2f} of an even share" in str(found)


@pytest.mark.parametrize("spec", [P("data"), P(None, "data")])
def test_what_a_team_sends_is_counted_roughly(sharing, spec):
    """Not counted: a first X X^T in float32, and the exchange of rows for columns."""
    tx = jm.on_mesh(jm.orthogonalize(), at(mesh_of(8), spec))
    shapes = {"w": jax.ShapeDtypeStruct((512, 2048), "float32")}
    planned = jm.describe(tx, shapes).sent_bytes["orthogonalize"]
    found = collectives(lambda g: tx.update(g, tx.init(g)), shapes)
    assert 0.75 < planned / sum(c.sent_bytes for c in found) < 1


LLAMA_7B, LLAMA_70B = (32, 4096, 1024, 14336), (80, 8192, 1024, 28672)


def stacks_of(layers, width, keys, inner, gpus):
    """Shards of a Llama's stacked matrices, whose rows are divided."""
    return [
        ((number, m // gpus, n), jnp.dtype("bfloat16"), (), ("data",), ())
        for number, m, n in (
            (2 * layers, width, width),
            (2 * layers, width, keys),
            (2 * layers, width, inner),
            (layers, inner, width),
        )
    ]


@pytest.mark.parametrize(
    ("sizes", "gpus", "team", "most"),
    [
        (LLAMA_7B, 64, 1, 11.1e12),
        (LLAMA_7B, 1024, 8, 0.96e12),
        (LLAMA_70B, 1024, 8, 15.2e12),
    ],
)
def test_the_planner_shares_where_that_takes_less_time(sizes, gpus, team, most):
    """Llama 7B and 70B: whole matrices as long as there are enough of them."""
    given = {"team": 8, "shared_dtype": jm.PolarExpress().shared_dtype, "small": 65536}
    shards, on = stacks_of(*sizes, gpus), {"data": gpus}
    pools = with_owners(pools_of(shards, on), on, **given)
    assert {pool.team for pool in pools} == {team}
    busiest = sum(pool.load(on) for pool in pools).max()
    assert busiest <= most


# Owners of (m, n): their number, the most and the fewest matrices of one, and its team.
PLANS = [
    # The up-projections (768, 3072) of GPT-2 124M, those down again, (768, 768).
    ((12, 768, 768, 3072), 8, [(8, 3, 3, 1), (8, 2, 1, 1), (8, 7, 5, 1)]),
    (LLAMA_7B, 64, [(64, 1, 1, 1), (64, 1, 0, 1), (64, 2, 0, 1), (64, 2, 0, 1)]),
    (LLAMA_7B, 256, [(32, 2, 2, 8), (32, 1, 1, 8), (32, 2, 2, 8), (256, 1, 0, 1)]),
    (LLAMA_70B, 1024, [(128, 2, 1, 8), (128, 1, 0, 8), (128, 2, 2, 8), (128, 2, 2, 8)]),
]
HEADS = (
    (432, 8, 768),
    jnp.dtype("bfloat16"),
    (),
    ("data",),
    (),
)  # (64, 768) on 8 devices


@pytest.mark.parametrize(("sizes", "gpus", "expected"), PLANS)
@pytest.mark.parametrize("more", [[], [((5, 1, 8), *HEADS[1:])]])
def test_plans_of_large_matrices_are_fixed(sizes, gpus, expected, more):
    """Whatever small ones there are: hundreds, or a few that are tiny."""
    given = {"team": 8, "shared_dtype": jm.PolarExpress().shared_dtype, "small": 65536}
    for small in (more, [*more, ((432, 1, 48), *HEADS[1:])]):
        pools = pools_of(stacks_of(*sizes, gpus) + small, {"data": gpus})
        plan = with_owners(pools, {"data": gpus}, **given)
        large = [pool for pool in plan if np.prod(pool.shape) >= 65536]
        counts = [(len(x.counts), max(x.counts), min(x.counts), x.team) for x in large]
        assert counts == expected


@pytest.mark.parametrize(
    ("shards", "owners"),
    [
        ([HEADS, ((12, 96, 3072), *HEADS[1:])], 8),  # with larger ones
        ([HEADS], 8),
        ([((5, 8, 768), *HEADS[1:])], 0),  # two transfers would take longer than one
        ([((5, 1, 8), *HEADS[1:])], 0),
    ],
)
def test_small_matrices_have_owners_where_that_takes_less_time(shards, owners):
    """All heads of GPT-2 124M, as matrices of their own."""
    sizes = {"data": 8}
    plan = with_owners(pools_of(shards, sizes), sizes, small=65536)
    assert len(plan[-1].counts) == owners
    everywhere = [
        dataclasses.replace(x, counts=()) if np.prod(x.shape) < 65536 else x
        for x in plan
    ]
    both = [cost(each, sizes, 8) for each in (plan, everywhere)]
    assert both[0] < both[1] if owners else both[0] == both[1]


@pytest.mark.parametrize(
    ("given", "most"),
    [({}, 0), ({"devices_per_host": 4}, 51e6), ({"devices_per_host": 16}, 0)],
)
def test_teams_are_the_devices_of_a_host(given, most):
    """Three (8192, 8192) under FSDP on 16 devices, which the planner shares.

    A plan for hosts of eight would send 2,047 MB between hosts of four.
    """
    shapes = {k: jax.ShapeDtypeStruct((8192, 8192), "bfloat16") for k in "abc"}
    where = at(described(16), P("data"))
    found = jm.describe(jm.on_mesh(jm.orthogonalize(), where, **given), shapes)
    per_host = given.get("devices_per_host", 8)
    assert {pool.team for pool in found.pools} == {per_host}
    between = found.bytes_between_hosts["orthogonalize"]
    assert 0 <= between <= max(most, 51e6)
    assert (between > 0) == (per_host < 16)


def described(count, slices=None):
    """A mesh of devices that are not there, in slices of this many."""
    fields = ("platform", "id", "process_index", "device_kind", "slice_index")
    device = dataclasses.make_dataclass("Device", fields, frozen=True)
    rows = [
        device("cpu", i, i, "", None if slices is None else slices[i])
        for i in range(count)
    ]
    return jax.sharding.Mesh(np.array(rows), ("data",))


@pytest.mark.parametrize(
    ("slices", "number"),
    [
        (None, 8),
        ([0] * 16, 8),  # one slice shows nothing
        ([i // 4 for i in range(16)], 4),
        ([i % 4 for i in range(16)], 8),  # no neighbours
        ([0] * 12 + [1] * 4, 8),
    ],
)
def test_devices_per_host_are_those_of_a_slice(slices, number):
    """Not those of a process: here each has one."""
    assert hardware.devices_per_host(described(16, slices)) == number
