"""Divided matrices are computed once each, by even shares, and nothing is gathered."""

import chex
import jax
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_muon as jm
from benchmarks.schedule.hlo import Module
from benchmarks.schedule.jaxpr import collectives
from jax_muon.mesh.stacks import Shards, stacks_of
from jax_muon.tools.work import load
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
    # Three stacks in one exchange, there and back, with one side divided or both.
    there_and_back = [c for c in sent if c.kind == "all-to-all"]
    assert len(there_and_back) == 2
    gathers = [c for c in sent if c.kind == "all-gather"]
    assert len(sent) == len(there_and_back) + len(gathers)
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
    table = str(planned)
    assert "the busiest does 1.00 of an even share" in table
    assert f"what the loss sends: orthogonalize {total / 1000:.1f} KB" in table


def test_small_rounds_share_an_exchange():
    """A round of 64 MiB does not; those of 0.5 MiB, and of one matrix and zeros, do."""
    shapes = {f"large/{i}": (4096, 4096) for i in range(8)} | {"one": (512, 1024)}
    shapes |= {f"small/{i}": (256, 512) for i in range(8)}
    params = {k: jax.ShapeDtypeStruct(x, "float32") for k, x in shapes.items()}
    mesh, spec = mesh_of(8), P(None, "data")
    tx = jm.orthogonalize(jm.PolarExpress(dtype="float32"))
    step, args = step_of(jm.on_mesh(tx, at(mesh, spec)), params, mesh, spec)
    sent = collectives(step, *args)
    assert [x.input_bytes / 2**20 for x in sent] == [64, 64, 2.5, 2.5]


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
        Shards((5, 16, 64), *2 * [np.dtype("float32")], (), ("data",), ()),
        Shards((3, 16, 64), *2 * [np.dtype("float64")], (), ("data",), ()),
    ]
    stacks, rounds = stacks_of(shards, {"data": 8})
    loads = sum(load(x, {"data": 8}) for x in (*stacks, *rounds))
    assert loads.tolist() == [stacks[0].flops] * 8


# Numbers and shapes of matrices; of each round the counts and the devices, in order.
ALL = [*range(8)]
ROUNDS = [
    # GPT-2 124M: ups and downs, then queries, keys, values and outputs.
    (
        [(12, (96, 3072)), (12, (384, 768)), (48, (96, 768))],
        [((8,), ALL), ((8,), ALL), ((48,), ALL), ((4, 4), ALL)],
    ),
    # The last ones go to the devices with the least work.
    (
        [(5, (96, 3072)), (5, (96, 2048))],
        [((5, 3), ALL), ((2,), [5, 6])],
    ),
    # Small ones beside a large one, where zeros would travel otherwise.
    (
        [(1, (1024, 8192)), (12, (128, 1024))],
        [((8,), ALL), ((1, 4), [0, 1, 2, 3, 4])],
    ),
]


@pytest.mark.parametrize(("numbers", "expected"), ROUNDS)
def test_rounds_of_matrices(numbers, expected):
    float32 = np.dtype("float32")
    shards = [
        Shards((count, *shape), float32, float32, (), ("data",), ())
        for count, shape in numbers
    ]
    _, rounds = stacks_of(shards, {"data": 8})
    found = []
    for one in rounds:
        number = sum(one.counts) // one.each
        found.append((one.counts, [*one.order[:number]]))
        assert (one.kinds < len(one.stacks)).sum() == number
        assert one.kinds[one.order[0]] == 0
    assert found == expected


def test_groups_of_matrices_find_different_devices():
    """Four groups with one matrix each, on eight devices."""
    params = {k: jax.ShapeDtypeStruct((512, 512), "float32") for k in "abcd"}
    groups = {k: jm.orthogonalize() for k in "abcd"}
    tx = optax.multi_transform(groups, {k: k for k in "abcd"})
    planned = jm.describe(jm.on_mesh(tx, mesh_of(8), divide="data"), params)
    assert len(planned.stacks) == 4
    flops = sum(load(one, planned.sizes) for one in planned.rounds)
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
def test_matrices_that_are_not_dealt_out(tx, shapes, expected):
    params = {k: jax.ShapeDtypeStruct(v, "float32") for k, v in shapes.items()}
    mesh, spec = mesh_of(8), P("data")
    tx = jm.on_mesh(tx, at(mesh, spec))
    step, args = step_of(tx, params, mesh, spec)
    sent = collectives(step, *args)
    assert [(x.kind, x.input_bytes) for x in sent] == expected
    planned = jm.describe(tx, params).sent_bytes["orthogonalize"]
    assert planned == sum(x.sent_bytes for x in sent)
    assert len(compiled(step, args).transfers()) == len(expected)


# --- any layout -----------------------------------------------------------------------

SHARDED = [
    ((8,), P(None, "data")),
    ((8,), P(None, None, "data")),
    ((2, 4), P(None, ("data", "fsdp"))),
    ((2, 4), P(None, None, ("fsdp", "data"))),  # not in the order of the mesh
    ((2, 4), P(None, "fsdp")),  # the other axis repeats them
    ((2, 4), P("data", None, "fsdp")),  # other matrices along it
    ((4, 2), P(None, "data", "fsdp")),
    ((4, 2), P(None, "fsdp", "data")),
    ((2, 2, 2), P(None, "tp", "data")),
]


@pytest.mark.parametrize(
    ("shape", "spec", "dtype", "small"),
    [(*row, "float64", 0) for row in SHARDED]
    + [(*row, "float64", 10**6) for row in SHARDED[3:6]]
    + [(*SHARDED[0], "float32", 0)],
)
def test_stacks_of_any_layout(rng, x64, shape, spec, dtype, small):
    """Tall, wide and square, as many as devices divide and not."""
    mesh = mesh_of(*shape, kind=EXPLICIT)
    count = 12 if spec[0] else 9
    sizes = {"wide": (count, 16, 40), "turned": (count, 40, 16)}
    sizes |= {"tall": (4, 48, 16), "square": (2, 16, 16), "more": (6, 24, 16)}
    grads = {k: rng.standard_normal(size).astype(dtype) for k, size in sizes.items()}
    grads["wide"][1, 3, 5] *= float(np.finfo(dtype).max) / 4  # its square overflows
    # The second step has no term in X.
    polar = jm.NewtonSchulz(
        coefficients=[(3.4, -4.7, 2.0), (2.0, -1.5, 0.5)], dtype=dtype, norm="schatten4"
    )
    tx = jm.orthogonalize(polar, small=small)
    update = lambda g: tx.update(g, optax.EmptyState())[0]  # noqa: E731
    placed = put(grads, spec, mesh)
    result = jax.jit(update)(placed)
    bound = 5e-6 if dtype == "float32" else 1e-12
    chex.assert_trees_all_close(result, update(grads), rtol=0, atol=bound)
    for name, found in result.items():
        assert found.sharding.is_equivalent_to(placed[name].sharding, 3)
    assert_bit_identical_on_devices(result)
    planned = jm.describe(tx, placed)
    counted = sum(c.sent_bytes for c in collectives(update, placed))
    assert planned.sent_bytes["orthogonalize"] == pytest.approx(counted)
    loads = sum(load(x, planned.sizes) for x in (*planned.stacks, *planned.rounds))
    if not small:  # one matrix of the largest shape more or less
        assert loads.max() - loads.min() <= max(x.flops for x in planned.stacks)
