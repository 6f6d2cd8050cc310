"""What is refused: with the argument or path, the value, and what to write instead."""

import functools
import inspect
import re
import warnings
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_muon as jm
from tests.matrices import toy
from tests.mesh import case, losses
from tests.mesh.case import AUTO, EXPLICIT, make_step, mesh_of
from tests.recipes import RECIPES

W = {"w": jax.ShapeDtypeStruct((8, 12), "float32")}
MUON = RECIPES["nanochat"](matrices=toy)


def on_mesh(specs=None, where=None, divide=(), params=W):
    where = where or case.at(mesh_of(8), P() if specs is None else specs)
    jax.eval_shape(jm.on_mesh(MUON, where, divide=divide).init, params)


def mixed_mesh():
    """On jax 0.12 its updates would not keep their sharding along Explicit axes."""
    mesh = jax.make_mesh((4, 2), ("data", "fsdp"), axis_types=(AUTO, EXPLICIT))
    on_mesh(where=mesh)


def step(out=0.0, x=np.ones(8), **given):  # noqa: B008
    given = {"loss_fn": lambda p, b: out, "microbatches": 2} | given
    given.setdefault("tx", jm.on_mesh(MUON, mesh_of(2, 2), divide="data"))
    step = jm.make_train_step(**given)
    step(*step.init({"w": jnp.ones((4, 6))}), x)


def scan(specs=P(), layers=np.ones((4, 8)), x=np.ones((8, 8)), output=None):  # noqa: B008
    block = lambda x, layer: (x, output and output(x))  # noqa: E731
    jm.scan_layers(block, x, layers, shardings=case.at(mesh_of(4), specs))


ALONE = jax.sharding.SingleDeviceSharding(jax.devices()[0])
TWO = {"v": case.at(mesh_of(8), P()), "w": case.at(mesh_of(4), P())}
OF_TYPES = NamedSharding(mesh_of(8).abstract_mesh, P())
AUX, WEIGHTED = {"has_aux": True, "max_aux": "largest"}, {"weighted": True}
REFUSED = [
    # --- specs ---
    (on_mesh, {"specs": P(None, "data")}, "'w' .*dimension size is 12.*; expected"),
    (on_mesh, {"specs": P(None, None, "data")}, "'w' .*rank at least 3.*; expected"),
    (on_mesh, {"where": {"w": "data"}}, "where for 'w'='data'; expected .*device_put("),
    (
        on_mesh,
        {"where": {"w": ALONE}},
        "where for 'w'=Single.*; expected .*device_put(",
    ),
    (on_mesh, {"where": {"w": None}}, "where=None; expected a mesh, or a jax.shard"),
    (
        on_mesh,
        {"where": OF_TYPES},
        "the mesh of where=AbstractMesh(.*; expected .*device_put(",
    ),
    (on_mesh, {"where": TWO}, "meshes of where=.*'v' on Mesh(.*'w' on Mesh("),
    (on_mesh, {"specs": {"up": P()}}, "has nothing for parameter 'w'; there are up"),
    (on_mesh, {"divide": ("data", "data")}, "axes of the mesh, .* each once"),
    # A bare array has no path.
    (
        on_mesh,
        {"specs": P(None, "data"), "params": W["w"]},
        "^the parameter of shape (8, 12)",
    ),
    (mixed_mesh, {}, "expected Auto for all, or Explicit for all"),
    # --- arguments of a train step ---
    (step, {"tx": MUON}, "tx=.*; expected what jax_muon.on_mesh returns, around all"),
    (step, {"tx": optax.chain(jm.on_mesh(MUON, mesh_of(4)))}, "tx=.* around all"),
    (step, {"reduce_dtype": "int8"}, "reduce_dtype='int8'; expected"),
    (step, {"x": {"y": np.ones((6, 3))}}, "batch['y'] has shape (6, 3); expected"),
    (step, {"x": {"y": np.ones(())}}, "shape (); .* a multiple of 8, the"),
    (step, {"x": np.ones((4, 3))}, "batch has shape .*(4) .* (2)"),
    # --- what a loss returns ---
    (step, AUX, "has_aux=True, and .*; expected .*(loss, aux"),
    (step, {"out": (0.0, 1.0, 2.0)} | WEIGHTED, "weighted=True, .*; expected (loss, w"),
    (step, {"out": (0.0, {})}, "the loss of loss_fn=.*; expected a real scalar"),
    (step, {"out": np.ones(3, "float32")}, "is float32 of shape (3,); expected"),
    (step, {"out": np.ones((), int)}, "loss of loss_fn is int.*; expected .* floating"),
    (step, {"out": (0.0, "1")} | WEIGHTED, "the weight of loss_fn='1'; expected"),
    (step, {"out": (0.0, {"y": 1.0})} | AUX, "max_aux=('largest',); .* has ['y']"),
    (step, {"max_aux": "largest"}, "max_aux=('largest',); expected entries .* []"),
    # --- layers ---
    (scan, {"specs": P("data")}, "along the axis of layers; use"),
    (scan, {"layers": {}}, "first axes of layers=[]; expected one"),
    (scan, {"layers": np.ones(())}, "first axes of layers=[()]; expected one"),
    (
        scan,
        {"layers": {"a": np.ones((4, 8)), "b": np.ones((3, 8))}},
        "first axes of layers=[(3,), (4,)]; expected one",
    ),
    # By `shard_map`:
    (scan, {"x": np.ones((6, 8))}, "args[0] of shape .*[6,8], .* not evenly divide 6"),
    (scan, {"x": (np.ones(8), 0.0)}, "args[0][1], .* 'carry: .* has rank 0"),
    (scan, {"output": jnp.sum}, "out_specs[1] is .*'data') .* has rank 1"),
]


@pytest.mark.parametrize(("call", "given", "words"), REFUSED)
def test_refused(call, given, words):
    words = re.sub(r"[][()]", r"\\\g<0>", words)
    with pytest.raises(ValueError, match=words):
        call(**given)


def test_arrays_sharded_on_auto_axes_without_specs():
    """In `on_mesh` eagerly, and without it always."""
    mesh, whole = mesh_of(8), {"w": jnp.ones((8, 8))}
    divided = case.put(whole, P("data"), mesh)
    state, tx = MUON.init(divided), jm.on_mesh(MUON, mesh)
    for call in (MUON.update, jax.jit(MUON.update)):
        with pytest.raises(ValueError, match=r"'w' .* Auto axes.*jax_muon.on_mesh"):
            call(divided, state, divided)
    with pytest.raises(ValueError, match=r"'w' is sharded .* use jax_muon.on_m"):
        tx.init(divided)
    with pytest.raises(ValueError, match=r"'w' is sharded .* use jax_muon.on_m"):
        tx.update(divided, tx.init(case.put(whole, P(), mesh)), divided)
    # Over one device nothing is sharded, whatever the spec says.
    jm.on_mesh(MUON, mesh_of(1)).init(case.put(whole, P("data"), mesh_of(1)))


@pytest.mark.parametrize(
    "tx",
    [jm.orthogonalize(), jm.skip_nonfinite(optax.sgd(1.0))],
    ids=["orthogonalize", "guard"],
)
def test_what_differs_between_devices(tx):
    """Where JAX tracks it, and where it does not; never block by block in silence."""

    def update(grads):
        return tx.update(grads, tx.init(grads))[0]

    def run(**given):
        return jax.shard_map(
            update, mesh=mesh_of(8), in_specs=P("data"), out_specs=P("data"), **given
        )({"w": jnp.ones((32, 8))})

    with pytest.raises(ValueError, match=r"'w' differs .*\['data'\].*make_train_step"):
        run()
    with pytest.raises(ValueError, match=r"or in shard_map with check_vma=True"):
        run(check_vma=False)
    with pytest.raises(ValueError, match=r"inside jax.pmap, .*jax_muon.on_replicas"):
        jax.pmap(update)({"w": jnp.ones((8, 4, 8))})


def test_errors_of_the_optimizer_itself():
    def update(updates, state, params=None):
        raise KeyError("its own")

    tx = optax.GradientTransformation(optax.init_empty_state, update)
    params, tx = {"w": jnp.ones(4)}, jm.on_mesh(tx, mesh_of(2))
    with pytest.raises(KeyError, match="its own"):
        tx.update(params, tx.init(params))


def test_deleted_and_other_arguments():
    """Errors leave the arguments alone, and the first parameters are the user's."""
    params, _ = case.draw("one matrix only")
    step, batch = make_step(problem="one matrix only"), case.batches(1)[0]
    placed, state = step.init(params)
    with pytest.raises(ValueError, match="state is not one of this optimizer"):
        step(placed, RECIPES["muon"](matrices=toy).init(params), batch)
    step(placed, state, batch)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(params))
    with pytest.raises(ValueError, match=r"params.* is deleted: an earlier call"):
        step(placed, state, batch)


def test_on_mesh_twice():
    """In silence a step wrapped it again, with gathers of what was gathered."""
    tx, params = jm.on_mesh(MUON, mesh_of(4)), {"w": jnp.ones((8, 12))}
    for inner in (tx, optax.chain(optax.identity(), tx)):
        again = jm.on_mesh(inner, mesh_of(4))
        with pytest.raises(ValueError, match="on_mesh inside of on_mesh; use one"):
            again.init(params)


# --- arrays of a batch ----------------------------------------------------------------


def test_a_wrong_axis_is_refused_by_on_mesh_itself():
    for where in (mesh_of(8), {"w": case.at(mesh_of(8), P())}):
        with pytest.raises(ValueError, match="divide='batch'; expected axes of the m"):
            jm.on_mesh(MUON, where, divide="batch")


def test_text_in_a_batch_has_its_key():
    train = jm.make_train_step(lambda p, b: 0.0, jm.on_mesh(optax.sgd(1), mesh_of(8)))
    params, state = train.init({"w": jnp.ones((8, 12))})
    with pytest.raises(ValueError, match=r"batch\['name'\]='pile'; expected an array"):
        train(params, state, {"x": np.ones(8), "name": "pile"})


def test_arrays_of_a_batch_that_are_no_samples():
    """A weight for each of four outputs, which four devices divide: 1.5 for 6.0."""
    params, batch = {"w": jnp.zeros((16, 4))}, {"x": jnp.ones((8, 16))}
    weights = jnp.arange(4.0)

    def loss(params, batch, weights=None):
        weights = batch["w"] if weights is None else weights
        return jnp.mean(batch["x"] @ params["w"]) + jnp.sum(weights)

    tx = jm.on_mesh(optax.sgd(0.1), mesh_of(4), divide="data")
    step = jm.make_train_step(loss, tx, donate=False)
    placed, state = step.init(params)
    words = r"batch\['w'\] \(4,\) and batch\['x'\] \(8, 16\) .* in others"
    with pytest.warns(UserWarning, match=words):
        step(placed, state, batch | {"w": weights})
    _, _, metrics = step(placed, state, batch, weights)
    assert float(metrics["loss"]) == 6.0


# --- what a loss does with layers -----------------------------------------------------


def stack_of(layers, x, scan):
    return jnp.mean(losses.layers_alone(layers, x, scan) ** 2)


def cast_in_jit(layers, x, scan):
    """A cast and a slice on the way are no uses."""
    half = jax.jit(lambda w: w.astype(x.dtype)[1:])
    return stack_of(jax.tree.map(half, layers), x, scan)


def outer(layers, x, scan):
    """Blocks of two layers in a scan of its own."""
    block = lambda x, two: (losses.layers_alone(two, x, scan), None)  # noqa: E731
    two = jax.tree.map(lambda w: w.reshape(2, -1, *w.shape[1:]), layers)
    return jnp.mean(jax.lax.scan(block, x, two)[0] ** 2)


def norm(layers):
    return sum(jnp.sum(w**2) for w in jax.tree.leaves(layers))


def turned(layers, x, scan):
    """Square layers transposed: an axis that is not the one that is sharded."""
    return stack_of(layers | {"w": layers["w"].mT}, x, scan)


def carried(layers, x, scan):
    """Layers in the carry of a loop, whose second turn gets others."""

    def turn(carry, _):
        total, now, then = carry
        return (total + stack_of(now, x, scan), then, now), None

    twice = jax.tree.map(lambda w: 2 * w, layers)
    return jax.lax.scan(turn, (0.0, layers, twice), length=2)[0][0]


HERE = "test_refused.py"
FIRST = inspect.getsourcelines(norm)[1]
# How a loss uses the layers, and which are gathered one at a time; or the warning that
# says why they are gathered whole.
USES = [
    (stack_of, ["b", "w"], None),
    (cast_in_jit, ["b", "w"], None),
    (outer, ["b", "w"], None),
    (lambda w, x, scan: jnp.mean(x), [], None),
    (lambda *x: stack_of(x[0], x[1], jax.lax.scan), [], None),
    (
        lambda *x: stack_of(*x) + norm(x[0]),
        [],
        f"/b' .* at test_refused.py:{FIRST + 1}",
    ),
    (lambda *x: stack_of(*x) + jax.jit(norm)(x[0]), [], "'layers/b' is gathered whole"),
    (
        lambda *x: 2 * stack_of(*x) + stack_of(*x),
        [],
        "is used by scan_l.*, scan_layers",
    ),
    (turned, ["b"], None),
    (carried, [], None),
]


@pytest.mark.parametrize(("use", "by_layer", "words"), USES)
@pytest.mark.filterwarnings("ignore:parameter 'layers/w' is gathered whole")
def test_what_a_loss_does_with_layers(use, by_layer, words, x64, as_users_write):
    """Found by a trace: what scan_layers alone gets is gathered a layer at a time."""
    args = case.drawn()

    def loss(params, x, scan=jax.lax.scan):
        return use(params["layers"], x, scan) + jnp.mean(x @ params["head"])

    step = case.sgd_step(functools.partial(loss, scan=jm.scan_layers))
    warns = pytest.warns(UserWarning, match=words) if words else nullcontext()
    with warns:
        found = case.gradients(step, *args)
    case.assert_gradients(found, loss, args)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        described = jm.describe(step, *args)
    paths = [x.parameter.path for x in described.parameters if x.by_layer]
    assert paths == [f"layers/{name}" for name in by_layer]
    assert ("gathered a layer at a time: layers/b" in str(described)) == bool(by_layer)


@pytest.mark.filterwarnings("ignore:parameter 'layers/w' is gathered whole")
def test_layers_that_are_divided_along_their_axis(x64, as_users_write):
    specs = case.SPECS | {"layers": {"w": P("data"), "b": P("data")}}
    step = case.sgd_step(case.scanning(losses.plain, specs=None), specs=specs)
    with pytest.warns(UserWarning, match="layers/b' .* is sharded along its layers"):
        found = case.gradients(step, *case.drawn())
    case.assert_gradients(found, losses.plain, case.drawn())


def test_two_steps_of_one_jitted_function(x64, as_users_write):
    """JAX remembers its trace, in which `scan_layers` did what the first step says."""
    stack = jax.jit(lambda layers, x: losses.layers_alone(layers, x, jm.scan_layers))
    args = case.drawn()

    def loss(params, x):
        return jnp.mean((stack(params["layers"], x) @ params["head"]) ** 2)

    jax.jit(loss)(*args)
    for shape, specs in (((4,), case.SPECS), ((2, 4), case.SPECS), ((4,), P())):
        found = case.gradients(case.sgd_step(loss, *shape, specs=specs), *args)
        case.assert_gradients(found, loss, args)
