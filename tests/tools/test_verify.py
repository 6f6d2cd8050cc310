"""`verify` passes a right layout, and names what is wrong in another, with numbers."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_muon as jm
from jax_muon import __main__ as command
from jax_muon.base.array_types import mesh_context
from jax_muon.tools.verify import _compared, compare
from tests import trees
from tests.mesh.case import AUTO, EXPLICIT, at, mesh_of
from tests.mesh.conftest import small_matrices_are_dealt_out  # noqa: F401
from tests.recipes import RECIPES

SHAPES = {"q": (16, 24), "stack/up": (2, 16, 32), "bias": (7,)}
SHAPES = {path: jax.ShapeDtypeStruct(x, "float32") for path, x in SHAPES.items()}
SPECS = {"q": P("fsdp"), "stack/up": P(None, "fsdp"), "bias": P()}
FAST = {"dtype": "float32", "ns_steps": 2}
ZEROS = {path: np.zeros(x.shape, x.dtype) for path, x in SHAPES.items()}
W = {"w": jax.ShapeDtypeStruct((4, 8), "float32")}


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
def test_a_right_layout(kind):
    mesh, tx = mesh_of(2, 4, kind=kind), jm.skip_nonfinite(RECIPES["nanochat"](**FAST))
    params, where = SHAPES, at(mesh, SPECS)
    if kind == EXPLICIT:  # types show the specs
        shardings, where = where, mesh
        params = jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(
                x.shape, x.dtype, sharding=sharding
            ),
            SHAPES,
            shardings,
        )
    with jax.set_mesh(mesh):
        on = jm.on_mesh(tx, where, divide="data", min_size=1)
        found = jm.verify(on, params)
    assert found.ok, found
    updates, state = [*found.differences][:3], [*found.differences][3:]
    assert updates == ["bias", "q", "stack/up"]
    # The same array, the same gradients: something was compared.
    assert 0 < max(found.differences[x][0] for x in updates) < 2e-6
    assert all(2e-5 <= found.differences[x][1] < 1e-4 for x in updates)
    assert len(state) == len(jax.tree.leaves(tx.init(ZEROS)))
    lines = str(found).splitlines()
    assert lines[0].split() == ["parameter", "difference", "bound"]
    assert [x.split()[0] for x in lines[1:4]] == updates
    assert "mesh data 2 x fsdp 4" in lines[-3]
    assert lines[-2] == (
        "sharded: 2 of 3 parameters, and the state of 2; 3 of 3 matrices were dealt out"
    )
    assert lines[-1] == "right"


def test_shapes_must_show_a_sharding_on_explicit_axes():
    """As they show none, "right" would be of whole parameters on every device."""
    tx = jm.on_mesh(RECIPES["nanochat"](**FAST), mesh_of(4, kind=EXPLICIT))
    for look in (jm.verify, jm.describe, type(tx).abstract_state, type(tx).xla_options):
        with pytest.raises(
            ValueError, match=r"'bias' of shape \(7,\) shows no sharding"
        ):
            look(tx, SHAPES)
    assert jax.eval_shape(tx.init, SHAPES)  # which returns no shardings


@pytest.mark.parametrize(
    "tx", [optax.sgd(0.0), optax.MultiSteps(optax.sgd(0.1), 4)], ids=["sgd", "four"]
)
def test_updates_that_are_zero_compare_nothing(tx):
    """A wrong optimizer would pass as well."""
    found = jm.verify(jm.on_mesh(tx, mesh_of(4), divide="data"), W)
    assert not found.ok
    assert "all updates are 0, so that nothing was compared" in str(found)


def test_a_tree_without_parameters():
    tx = jm.on_mesh(optax.sgd(0.1), mesh_of(4), divide="data")
    with pytest.raises(ValueError, match=r"params=\{\}; expected a tree"):
        jm.verify(tx, {})


def test_a_wrong_layout_is_named_with_number_and_bound():
    """One matrix learns 1 % faster on the mesh, and another is no number there."""
    mesh = mesh_of(4)
    places = dict.fromkeys(SHAPES, NamedSharding(mesh, P()))
    grads = [jax.device_get(trees.normal({k: x.shape for k, x in ZEROS.items()}))]
    even, faster = (
        optax.chain(RECIPES["muon"](**FAST), jm.scale_by_path({"q": x}))
        for x in (1.0, 1.01)
    )
    found = compare(even, jm.on_mesh(faster, mesh), [(ZEROS, 2 * grads)], places)
    assert not found.ok
    said = (
        r"WRONG: the update of 'q' of shape \(16, 24\) differs .* by 0.01 of its norm; "
    )
    assert re.search(said + "expected at most 2e-05$", str(found), re.MULTILINE)

    bad = optax.stateless(lambda g, p: {**g, "bias": g["bias"] / jnp.sum(p["bias"])})
    found = compare(optax.identity(), jm.on_mesh(bad, mesh), [(ZEROS, grads)], places)
    np.testing.assert_equal([x for x, _ in found.differences.values()], [np.nan, 0, 0])
    assert "'bias' of shape (7,) differs from that of one device by nan" in str(found)


def test_devices_that_hold_the_same_piece_hold_the_same_bits():
    mesh = mesh_of(2)
    pieces = [
        jax.device_put(np.float32([1, 2 + 1e-6 * i]), d)
        for i, d in enumerate(mesh.devices)
    ]
    x = jax.make_array_from_single_device_arrays((2,), NamedSharding(mesh, P()), pieces)
    want = (np.float32([1, 2]),)
    difference, _, same_bits = _compared((x,), want, want)
    assert difference < 2e-5
    assert not same_bits


WILD = optax.stateless(lambda g, p: jax.tree.map(lambda x: jnp.sin(1e4 * x), g))
GATHERED = {"divide": "data", "min_size": 1, "gather_dtype": "bfloat16"}
BOUNDS = {  # the optimizer, its layout, a dtype, and the bound, at least and at most
    "float64": (optax.sgd(0.1), {}, "float64", (1e-10, 1e-10)),
    "bfloat16 inside": (
        RECIPES["muon"](matrices={"?*": "muon"}),
        {},
        "float32",
        (0.1, 0.1),
    ),
    "rounded gathers": (optax.sgd(0.1), GATHERED, "float32", (0.0039, 0.004)),
    "ten times the last bits": (WILD, {}, "float32", (1e-4, 0.1)),
}


@pytest.mark.parametrize("name", BOUNDS)
def test_bounds(name, x64):
    tx, layout, dtype, (least, most) = BOUNDS[name]
    shapes = {"w": jax.ShapeDtypeStruct((4, 8), dtype)}
    found = jm.verify(jm.on_mesh(tx, mesh_of(2), **layout), shapes)
    difference, bound = found.differences["w"]
    assert least <= bound <= most and found.ok
    assert (difference > 1e-3) == (name == "rounded gathers")


# --- what a wrong mesh does -----------------------------------------------------------


BREAKAGES = {
    "own shards": lambda swap, x, *args, **given: x,
    "wrong senders": lambda swap, *args, **given: jnp.roll(swap(*args, **given), 1, 0),
    "a round lost": lambda swap, *args, **given: jnp.zeros_like(swap(*args, **given)),
}


@pytest.mark.parametrize("breakage", BREAKAGES)
def test_matrices_that_do_not_arrive_are_found(breakage, monkeypatch, capsys):
    """By `verify` and by the command, with matrices of 256 x 256."""
    monkeypatch.setattr("jax_muon.recipes.orthogonalize", jm.orthogonalize)
    broken = functools.partial(BREAKAGES[breakage], jax.lax.all_to_all)
    monkeypatch.setattr("jax.lax.all_to_all", broken)
    tx = jm.on_mesh(RECIPES["muon"](**FAST), mesh_of(4), divide="data")
    for size, small in ((248, True), (256, False)):
        shapes = {"mlp/up": jax.ShapeDtypeStruct((256, size), "float32")}
        found = jm.verify(tx, shapes)
        assert (
            found.ok == ("0 of 1 matrices were dealt out; use" in str(found)) == small
        )
    assert "the update of 'mlp/up' of shape (256, 256) differs" in found.problems[0]
    assert command.main() == 1
    assert "WRONG: the update of 'attn/q'" in capsys.readouterr().out


@pytest.mark.parametrize("decay", [0.1, 0.001])
@pytest.mark.parametrize("recipe", ["adamw", "nanochat"])
def test_a_decay_that_is_forgotten_on_the_mesh_is_found(recipe, decay):
    make = (
        optax.adamw if recipe == "adamw" else functools.partial(RECIPES[recipe], **FAST)
    )
    make = functools.partial(make, learning_rate=1e-3)
    right, wrong = (make(weight_decay=x) for x in (decay, 0.0))

    def update(*args):
        on_mesh = mesh_context().layout is not None
        return (wrong if on_mesh else right).update(*args)

    forgetful = optax.GradientTransformation(right.init, update)
    shapes = {"up": jax.ShapeDtypeStruct((64, 64), "float32")}
    found = jm.verify(jm.on_mesh(forgetful, mesh_of(2)), shapes)
    assert "the update of 'up' of shape (64, 64) differs" in found.problems[0]


def test_the_command_tests_the_installation(capsys):
    assert command.main() == 0
    said = capsys.readouterr().out
    assert f"jax_muon {jm.__version__}, Python" in said
    assert f"jax {jax.__version__}" in said and "8 x cpu" in said
