"""Sharded parameters give what one device gives, and travel as they should."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jax_muon as jm
from benchmarks.hlo import Module
from jax_muon.mesh.owners import Placement, make_pools
from jax_muon.mesh.traffic import collectives
from tests.distributed import problems

P = PartitionSpec
BOTH = pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])

RECIPES = {
    "nanochat": jm.nanochat,
    "nanochat later": functools.partial(
        jm.nanochat, row_equilibration=True, renormalize=True, norm_factor=1.01
    ),
    "muon": functools.partial(jm.muon, max_norm=1.0),
    "normuon": jm.normuon,
    "moonlight": jm.moonlight,
    "teon": functools.partial(jm.teon, joins={"h_{i}/q": 2, "scan": 2}),
}
SHAPES = {
    "wte": (16, 24),
    "norm/scale": (24,),
    "h_0/q": (24, 24),
    "h_1/q": (24, 24),
    "h_2/q": (24, 24),
    "h_0/up": (24, 48),
    "h_0/down": (48, 24),
    "scan": (4, 24, 48),
    "experts/up": (8, 16, 8),
    "conv/kernel": (3, 3, 8, 16),
}


def mesh_of(*shape, kind=AxisType.Explicit):
    names = ("a", "b", "c")[: len(shape)]
    count = int(np.prod(shape))
    return jax.make_mesh(
        shape, names, axis_types=(kind,) * len(shape), devices=jax.devices()[:count]
    )


@functools.cache
def problem():
    """Parameters, and gradients for five steps."""
    rng = np.random.default_rng(0)

    def draw(scale):
        return {
            path: np.float32(scale * rng.standard_normal(shape))
            for path, shape in SHAPES.items()
        }

    return draw(0.1), [draw(1.0) for _ in range(5)]


def train(tx, params, grads, place=lambda tree: tree, mesh=None):
    params = place(params)
    explicit = mesh is not None and AxisType.Explicit in mesh.axis_types
    # JAX asks for the mesh of what it makes from shapes alone, if axes are Explicit.
    with jax.set_mesh(mesh) if explicit else contextlib.nullcontext():
        state = jax.jit(tx.init)(params)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for g in grads:
        params, state = step(params, state, place(g))
    if mesh is None or mesh.size > 1:  # JAX rewrites specs on a mesh of one device
        assert step._cache_size() == 1
    return params, state


@functools.cache
def expected(name):
    tx = RECIPES[name](0.02, steps=2, dtype="float32", adamw_eps=1e-6)
    params, grads = problem()
    return train(tx, jax.tree.map(jnp.asarray, params), grads)[0]


def placing(mesh, specs):
    def spec(path, x):
        """As JAX writes it: with an entry for each axis, or none where it is Auto."""
        given = specs.get(path, P())
        if AxisType.Explicit in mesh.axis_types:
            return P(*given, *[None] * (x.ndim - len(given)))
        while given and given[-1] is None:
            given = P(*given[:-1])
        return given

    def place(tree):
        return {
            path: jax.device_put(x, NamedSharding(mesh, spec(path, x)))
            for path, x in tree.items()
        }

    return place


def check(name, mesh, specs, small=0):
    """Every recipe, placed like this, ends where one device does."""
    params, grads = problem()
    given = {}
    if AxisType.Auto in mesh.axis_types:
        given = {"mesh": mesh, "specs": lambda path: specs.get(path, P())}
    tx = RECIPES[name](
        0.02, steps=2, dtype="float32", adamw_eps=1e-6, small=small, **given
    )
    result, state = train(tx, params, grads, placing(mesh, specs), mesh)
    start = problem()[0]
    assert problems.distance(result, expected(name), start) < 5e-6
    return result, state


FSDP = {
    path: P(*[None] * (len(shape) - 2), "a") if len(shape) > 1 else P("a")
    for path, shape in SHAPES.items()
} | {"conv/kernel": P(None, None, "a")}


@pytest.mark.parametrize(
    ("kind", "devices"),
    [*((AxisType.Explicit, n) for n in (1, 2, 4, 8)), (AxisType.Auto, 8)],
)
def test_fsdp(kind, devices):
    check("nanochat", mesh_of(devices, kind=kind), FSDP)


@BOTH
@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_with_both_axes_divided(kind, name):
    """(2, 2) over in and out, repeated over 2: each matrix is computed once."""
    specs = {
        path: P(*[None] * (len(shape) - 2), "a", "b") if len(shape) > 1 else P("a")
        for path, shape in SHAPES.items()
    }
    check(name, mesh_of(2, 2, 2, kind=kind), specs)


MESHES = [(8,), (4, 2), (2, 2, 2)]


@st.composite
def placements(draw):
    """A mesh, and for each parameter mesh axes drawn onto its axes, where they fit."""
    shape = draw(st.sampled_from(MESHES))
    sizes = dict(zip("abc", shape, strict=False))
    specs = {}
    for path, leaf in SHAPES.items():
        entries = [()] * len(leaf)
        for name in draw(st.permutations(list(sizes))):
            axis = draw(st.integers(-1, len(leaf) - 1))
            devices = sizes[name] * int(np.prod([sizes[n] for n in entries[axis]]))
            if axis >= 0 and leaf[axis] % devices == 0:
                entries[axis] = (*entries[axis], name)
        specs[path] = P(*(entry or None for entry in entries))
    return shape, specs, draw(st.sampled_from([0, 500, 65536]))


@BOTH
@given(drawn=placements(), name=st.sampled_from(list(RECIPES)))
@settings(max_examples=3, deadline=None, derandomize=True)
def test_any_placement(kind, drawn, name):
    """All placements of all parameters, on all meshes, for every recipe."""
    shape, specs, small = drawn
    check(name, mesh_of(*shape, kind=kind), specs, small)


# --- what travels, and who computes ---------------------------------------------------


def gpt(layers=8, width=32):
    """Shapes of a GPT's matrices, as many of each as eight devices divide."""
    square = dict.fromkeys("qkvo", (width, width))
    block = square | {"up": (width, 4 * width), "down": (4 * width, width)}
    return {
        f"{i}/{name}": shape for i in range(layers) for name, shape in block.items()
    }


def placed_gpt(mesh, spec, **settings):
    """A compiled step of nanochat, its jaxpr's collectives, and the pools."""
    shapes = gpt()
    params = {
        path: jax.ShapeDtypeStruct(shape, "float32", sharding=NamedSharding(mesh, spec))
        for path, shape in shapes.items()
    }
    tx = jm.nanochat(dtype="float32", mesh=mesh, specs=spec, small=0, **settings)
    with jax.set_mesh(mesh):
        state = jax.jit(tx.init).lower(params).compile().output_shardings
        state = jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(
                x.shape, x.dtype, sharding=sharding
            ),
            jax.eval_shape(tx.init, params),
            state,
        )

    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    sent = collectives(step, params, state, params)
    return jax.jit(step).lower(params, state, params).compile().as_text(), sent


LAYOUTS = [((8,), P("a")), ((8,), P(None, "a")), ((4, 2), P("a", "b"))]


@pytest.mark.parametrize(("shape", "spec"), LAYOUTS)
def test_only_all_to_alls_and_an_even_share_of_the_work(shape, spec):
    """No matrix is gathered, and no product computed twice."""
    mesh = mesh_of(*shape, kind=AxisType.Auto)
    text, sent = placed_gpt(mesh, spec)
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


@pytest.mark.parametrize(("shape", "spec"), [*LAYOUTS, ((2, 4), P("a"))])
def test_describe_tells_what_is_sent(shape, spec):
    mesh = mesh_of(*shape, kind=AxisType.Auto)
    _, sent = placed_gpt(mesh, spec)
    total = sum(c.sent_bytes for c in sent)
    params = {path: jax.ShapeDtypeStruct(s, "float32") for path, s in gpt().items()}
    table = jm.describe(params, mesh=mesh, specs=spec, small=0)
    assert "the busiest does 1.00 of an even share" in table
    assert f"each sends {total / 1000:.1f} KB a step" in table


def test_replicas_send_their_shares_to_each_other():
    """Over (2, 4) with one axis divided: an all-gather of pieces over the other."""
    _, sent = placed_gpt(mesh_of(2, 4, kind=AxisType.Auto), P("a"))
    gathers = [c for c in sent if c.kind == "all-gather"]
    assert {c.axes for c in gathers} == {("b",)}
    pieces = sum(np.prod(shape) for shape in gpt().values()) * 4 // 2
    assert sum(c.input_bytes for c in gathers) * 4 == pieces


def test_odd_matrices_go_to_different_devices():
    """5 + 3 matrices of one work on 8 devices: one each."""
    shapes = [((5, 16, 64), np.float32), ((3, 16, 64), np.float64)]
    places = [Placement((), ("a",), ())] * 2
    pools = make_pools(shapes, places, {"a": 8}, small=0)
    load = sum(pool.load({"a": 8}) for pool in pools)
    assert load.tolist() == [pools[0].flops] * 8


def test_small_matrices_are_gathered_once():
    mesh = mesh_of(8, kind=AxisType.Auto)
    params = {f"{i}": jax.ShapeDtypeStruct((8, 8), "float32") for i in range(5)}
    tx = jm.orthogonalize(mesh=mesh, specs=P("a"))
    (sent,) = collectives(lambda g: tx.update(g, optax.EmptyState())[0], params)
    assert (sent.kind, sent.input_bytes) == ("all-gather", 5 * 8 * 4)


# --- Gram matrices instead of matrices ------------------------------------------------


@pytest.mark.parametrize("form", ["standard", "gram"])
@pytest.mark.parametrize("norm", ["frobenius", "schatten4"])
def test_gram_sums_equal_whole_matrices(rng, x64, form, norm):
    """Long sides over the mesh: tall, wide, scanned and huge gradients."""
    mesh = mesh_of(4, 2)
    specs = {"wide": P(None, ("a", "b")), "tall": P("a"), "scan": P("b", None, "a")}
    shapes = {"wide": (6, 160), "tall": (80, 4), "scan": (4, 5, 40)}
    grads = {k: 1e60 * rng.standard_normal(shape) for k, shape in shapes.items()}
    polar = functools.partial(jm.polar_express, dtype=None, form=form, norm=norm)
    expected, _ = jm.orthogonalize(polar).update(grads, optax.EmptyState())
    tx = jm.orthogonalize(polar, travel="gram", small=0)
    placed = {
        k: jax.device_put(g, NamedSharding(mesh, specs[k])) for k, g in grads.items()
    }
    update = jax.jit(lambda g: tx.update(g, optax.EmptyState())[0])
    result = update(placed)
    assert {c.kind for c in collectives(update, placed)} == {"all-reduce"}
    for name in grads:
        np.testing.assert_allclose(result[name], expected[name], atol=1e-11)


@pytest.mark.parametrize(
    ("shape", "small", "kind"),
    [
        ((64, 256), 0, "all-to-all"),  # 4 x as wide: matrices go to owners
        ((64, 65536), 0, "all-reduce"),  # 1024 x: their Gram matrices
        ((16, 64), 65536, "all-gather"),
        ((4, 8192), 65536, "all-reduce"),  # factors of rank 4
    ],
)
def test_what_travels_costs_less(shape, small, kind):
    mesh = mesh_of(8, kind=AxisType.Auto)
    params = {f"{i}": jax.ShapeDtypeStruct(shape, "float32") for i in range(8)}
    specs = P(None, "a")
    tx = jm.orthogonalize(mesh=mesh, specs=specs, small=small)
    sent = collectives(lambda g: tx.update(g, optax.EmptyState())[0], params)
    assert {c.kind for c in sent} == {kind}
    table = jm.describe(params, mesh=mesh, specs=specs, small=small)
    assert ("Gram sums" in table) == (kind == "all-reduce")
    total = sum(c.sent_bytes for c in sent)
    assert f"each sends {total / 1000:.1f} KB" in table or total > 1e6


def test_gram_sums_only_where_the_polar_factor_can():
    mesh = mesh_of(8, kind=AxisType.Auto)
    params = {"w": jax.ShapeDtypeStruct((4, 65536), "float32")}
    tx = jm.orthogonalize(jm.svd_polar, mesh=mesh, specs=P(None, "a"), travel="gram")
    sent = collectives(lambda g: tx.update(g, optax.EmptyState())[0], params)
    assert {c.kind for c in sent} == {"all-to-all"}
    with pytest.raises(ValueError, match="travel='rows'"):
        jm.orthogonalize(travel="rows")


# --- errors ---------------------------------------------------------------------------


def test_auto_axes_without_specs():
    mesh = mesh_of(8, kind=AxisType.Auto)
    params = jax.device_put({"w": jnp.ones((8, 8))}, NamedSharding(mesh, P("a")))
    tx = jm.nanochat()
    for call in (tx.init, jax.jit(tx.init)):
        with pytest.raises(ValueError, match=r"'w' .* Auto axes.*valid are specs"):
            call(params)
    specs = jax.tree.map(lambda p: p.sharding, params)
    jm.nanochat(specs=specs).init(params)


@pytest.mark.parametrize(
    ("spec", "match"),
    [
        (P("b"), r"'w' of shape \(8, 12\) .* valid are the mesh axes \('a',\)"),
        (P(None, "a"), r"'w' of shape \(8, 12\) .* 8 devices do not divide 12"),
        (P(None, None, "a"), "at most 2 entries"),
    ],
)
def test_specs_that_do_not_fit(spec, match):
    params = {"w": jax.ShapeDtypeStruct((8, 12), "float32")}
    tx = jm.nanochat(mesh=mesh_of(8, kind=AxisType.Auto), specs=spec)
    with pytest.raises(ValueError, match=match):
        jax.eval_shape(tx.init, params)


def test_specs_without_an_entry():
    """A name that is wrong, and so another that is missing."""
    params = {"w": jax.ShapeDtypeStruct((8, 8), "float32")}
    mesh = mesh_of(8, kind=AxisType.Auto)
    tx = jm.nanochat(mesh=mesh, specs={"typo": P("a")})
    with pytest.raises(ValueError, match="nothing for parameter 'w'; there are typo"):
        jax.eval_shape(tx.init, params)
    jax.eval_shape(jm.nanochat(mesh=mesh, specs={"w": None}).init, params)


def test_small_corners():
    mesh = mesh_of(8)
    w = jax.device_put(jnp.ones((8, 8)), NamedSharding(mesh, P("a", None)))
    (mu,) = (x for x in jax.tree.leaves(jm.nanochat().init(w)) if x.shape == w.shape)
    assert mu.sharding == w.sharding  # a parameter without a tree around it
    assert jm.orthogonalize(mesh=mesh).update({}, optax.EmptyState())[0] == {}

    def own(x, *, axis_name=None):
        return jm.polar_express(x)

    tx = jm.orthogonalize(own, small=1)
    jax.jit(lambda g: tx.update(g, optax.EmptyState())[0])({"w": w})
    with pytest.raises(ValueError, match="small=-1"):
        jm.orthogonalize(small=-1)


def test_specs_against_explicit_types():
    mesh = mesh_of(8)
    params = jax.device_put({"w": jnp.ones((8, 8))}, NamedSharding(mesh, P("a")))
    with pytest.raises(ValueError, match="valid with Explicit axes are no specs"):
        jm.nanochat(specs=P(None, "a")).init(params)


def test_sharded_or_zero2():
    with pytest.raises(ValueError, match="valid is one of the two"):
        jm.nanochat(zero2_axis="a", specs=P("a"))
