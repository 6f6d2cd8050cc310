"""What is refused: with the argument or path, the value, and what to write instead."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jax_muon as jm
from tests.matrices import toy
from tests.mesh import case, losses
from tests.mesh.case import AUTO, EXPLICIT, make_step, mesh_of
from tests.recipes import RECIPES

W = {"w": jax.ShapeDtypeStruct((8, 12), "float32")}
MUON = RECIPES["nanochat"](matrices=toy)


def on_mesh(specs=None, divide=(), params=W):
    jax.eval_shape(jm.on_mesh(MUON, mesh_of(8), specs, divide).init, params)


def mixed_mesh():
    """On jax 0.12 its updates would not keep their sharding along Explicit axes."""
    mesh = jax.make_mesh((4, 2), ("data", "fsdp"), axis_types=(AUTO, EXPLICIT))
    jm.on_mesh(MUON, mesh)


def step(out=0.0, x=np.ones(8), **given):  # noqa: B008
    given = {"loss_fn": lambda p, b: out, "microbatches": 2} | given
    step = jm.make_train_step(tx=MUON, mesh=mesh_of(2, 2), **given)
    step(*step.init({"w": jnp.ones((4, 6))}), x)


def scan(specs=P(), layers=np.ones((4, 8)), x=np.ones((8, 8)), output=None):  # noqa: B008
    block = lambda x, layer: (x, output and output(x))  # noqa: E731
    batch = specs == P()
    jm.scan_layers(block, x, layers, mesh_of(4), specs, local_batch=batch)


AUX, WEIGHTED = {"has_aux": True, "max_aux": "largest"}, {"weighted": True}
REFUSED = [
    # --- specs ---
    (on_mesh, {"specs": P("tp")}, "'w' of shape (8, 12) .*tp.* of the mesh {'data'"),
    (on_mesh, {"specs": P(None, "data")}, "'w' .*dimension size is 12.*; expected"),
    (on_mesh, {"specs": P(None, None, "data")}, "'w' .*rank at least 3.*; expected"),
    (on_mesh, {"specs": P(("data", "data"))}, "'w' .*at most one .*; expected"),
    (on_mesh, {"specs": {"w": "data"}}, "specs for parameter 'w'='data'; expect"),
    (on_mesh, {"specs": {"up": P()}}, "have nothing for parameter 'w'; there are up"),
    (on_mesh, {"divide": ("data", "data")}, "axes of the mesh, .* each once"),
    # A bare array has no path.
    (on_mesh, {"specs": P("tp"), "params": W["w"]}, "^the parameter of shape (8, 12)"),
    (mixed_mesh, {}, "expected Auto for all, or Explicit for all"),
    # --- arguments of a train step ---
    (step, {"scanned": "layers"}, "scanned: the pattern 'layers' matches no"),
    (step, {"reduce_dtype": "int8"}, "reduce_dtype='int8'; expected"),
    (step, {"x": {"y": np.ones((6, 3))}}, "batch['y'] has shape (6, 3); expected"),
    (step, {"x": {"y": np.ones(())}}, "shape (); .* a multiple of 8, the"),
    (step, {"x": np.ones((4, 3))}, "batch has shape .*(4) .* (2)"),
    # --- what a loss returns ---
    (step, AUX, "has_aux=True, and .*; expected .*(loss, aux"),
    (step, {"out": (0.0, 1.0, 2.0)} | WEIGHTED, "weighted=True, .*; expected (loss, w"),
    (step, {"out": (0.0, {})}, "the loss of loss_fn=.*; expected a real scalar"),
    (step, {"out": np.ones(3, "float32")}, "is float32 of shape (3,); expected"),
    (step, {"out": np.ones((), int)}, "loss of loss_fn=.*int.*; expected .* floating"),
    (step, {"out": (0.0, "1")} | WEIGHTED, "the weight of loss_fn='1'; expected"),
    (step, {"out": (0.0, {"y": 1.0})} | AUX, "max_aux=('largest',); .* has ['y']"),
    (step, {"max_aux": "largest"}, "max_aux=('largest',); expected entries .* []"),
    # --- layers ---
    (scan, {"specs": P("data")}, "along the axis of layers; expected"),
    (scan, {"layers": np.ones(())}, "first axes of layers=[()]; expected one"),
    (
        scan,
        {"layers": {"a": np.ones((4, 8)), "b": np.ones((3, 8))}},
        "first axes of layers=[(3,), (4,)]; expected one",
    ),
    (scan, {"x": np.ones((6, 8))}, "carry has shape (6, 8); expected a first"),
    (scan, {"x": (np.ones(8), 0.0)}, "carry[1] has shape (); expected a first"),
    (scan, {"output": jnp.sum}, "the output of block has shape (); expected a first"),
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
    with pytest.raises(ValueError, match=r"'w' is sharded .* expected specs"):
        tx.init(divided)
    with pytest.raises(ValueError, match=r"'w' is sharded .* expected specs"):
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


# --- parameters of `scanned` ----------------------------------------------------------


def stack_of(layers, x, scan):
    return jnp.mean(losses.layers_alone(layers, x, scan) ** 2)


def cast_in_jit(layers, x, scan):
    """A cast, a slice and a reshape on the way are not uses."""
    half = jax.jit(lambda w: w.astype(x.dtype)[1:])
    return stack_of(jax.tree.map(half, layers), x, scan)


def outer(layers, x, scan):
    """Blocks of two layers in a scan of its own."""
    block = lambda x, two: (losses.layers_alone(two, x, scan), None)  # noqa: E731
    two = jax.tree.map(lambda w: w.reshape(2, -1, *w.shape[1:]), layers)
    return jnp.mean(jax.lax.scan(block, x, two)[0] ** 2)


def norm(layers):
    return sum(jnp.sum(w**2) for w in jax.tree.leaves(layers))


# How a loss uses the layers, what else is given, and the error, if there is one.
USES = [
    (cast_in_jit, {}, None),
    (outer, {}, None),
    (lambda *x: stack_of(*x) + norm(x[0]), {}, "uses 'layers/b', .* integer_pow;"),
    (lambda *x: stack_of(*x) + jax.jit(norm)(x[0]), {}, "uses .*b.* integer_pow"),
    (lambda *x: 2 * stack_of(*x) + stack_of(*x), {}, r"uses .*\), scan_l"),
    (lambda w, x, scan: jnp.mean(x), {}, "b', .* for nothing; expected one scan_l"),
    (stack_of, {"scanned": ()}, r"whole parameters; .* make_train_step\(scanned="),
    (stack_of, {"specs": {"b": P()}}, "scanned=.*'layers'.*: loss_fn sees"),
]


@pytest.mark.parametrize(("use", "given", "words"), USES)
def test_uses_of_scanned_parameters(use, given, words, x64, as_users_write):
    """Each device has a part of them: any use but by the scan would be wrong."""
    args, given = case.drawn(), {"scanned": "layers", "specs": {}} | given

    def loss(params, x, scan=jax.lax.scan):
        return use(params["layers"], x, scan) + jnp.mean(x @ params["head"])

    scanning = case.scanning(loss, specs=case.LAYERS | given["specs"])
    step = case.sgd_step(scanning, scanned=given["scanned"])
    if words is None:
        case.assert_gradients(case.gradients(step, *args), loss, args)
        return
    with pytest.raises((TypeError, ValueError), match=words):
        case.gradients(step, *args)
