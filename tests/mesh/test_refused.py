"""What is refused: with the argument or path, the value, and what to write instead."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jax_muon as jm
from tests.mesh import case, losses
from tests.mesh.case import AUTO, EXPLICIT, make_step, mesh_of
from tests.reading import toy

W = {"w": jax.ShapeDtypeStruct((8, 12), "float32")}
MUON = jm.nanochat(matrices=toy)


def on_mesh(*given, **more):
    tx = jm.on_mesh(MUON, mesh_of(8), *given, **more)
    jax.eval_shape(tx.init, W)


def train_step(returned=0.0, batch=np.ones(8), **given):  # noqa: B008
    given = {"loss_fn": lambda p, b: returned, "microbatches": 2} | given
    step = jm.make_train_step(tx=MUON, mesh=mesh_of(2, 2), **given)
    step(*step.init({"w": jnp.ones((4, 6))}), batch)


def scan(spec=P(), layers=np.ones((4, 8)), carry=np.ones((8, 8)), output=None):  # noqa: B008
    block = lambda x, layer: (x, output and output(x))  # noqa: E731
    batch = spec == P()
    jm.scan_layers(block, carry, layers, mesh_of(4), spec, local_batch=batch)


AUX, WEIGHTED = {"has_aux": True, "max_aux": "max_logits"}, {"weighted": True}
REFUSED = [
    # --- specs ---
    (on_mesh, (P("model"),), {}, "'w' of shape (8, 12) .*model.* of the mesh {'data'"),
    (on_mesh, (P(None, "data"),), {}, "axis of 12 is not divided evenly; expected"),
    (on_mesh, (P(None, None, "data"),), {}, "at most 2 entries"),
    (on_mesh, (P(("data", "data")),), {}, "a mesh axis twice"),
    (
        on_mesh,
        ({"w": "data"},),
        {},
        "specs have 'data' for parameter 'w'; expected a P",
    ),
    (on_mesh, ({"up": P()},), {}, "specs have nothing for parameter 'w'; there are up"),
    (on_mesh, (None, ("data", "data")), {}, "axes of the mesh, .* each once"),
    # --- arguments of a train step ---
    (train_step, (), {"loss_fn": None}, "loss_fn=None; expected a function"),
    (train_step, (), {"scanned": "layers"}, "scanned: the pattern 'layers' matches no"),
    (train_step, (), {"reduce_dtype": "int8"}, "reduce_dtype='int8'; expected"),
    (train_step, (), {"weighted": "no"}, "weighted='no'; expected True or False"),
    (
        train_step,
        (0.0, {"x": np.ones((6, 3))}),
        {},
        "batch['x'] has shape (6, 3); expe",
    ),
    (train_step, (0.0, {"x": np.ones(())}), {}, "shape (); .* a multiple of 8, the"),
    (train_step, (0.0, np.ones((4, 3))), {}, "batch has shape .*(4) .* (2)"),
    # --- what a loss returns ---
    (train_step, (), AUX, "has_aux=True, and .*; expected (loss, aux"),
    (
        train_step,
        ((0.0, 1.0, 2.0),),
        WEIGHTED,
        "weighted=True, .*; expected (loss, wei",
    ),
    (train_step, ((0.0, {}),), {}, "the loss of loss_fn=.*; expected a real scalar"),
    (train_step, (np.ones(3, "float32"),), {}, "is float32 of shape (3,); expected"),
    (
        train_step,
        (np.ones((), int),),
        {},
        "the loss of loss_fn is int.* has no gradient",
    ),
    (train_step, ((0.0, "1"),), WEIGHTED, "the weight of loss_fn='1'; expected"),
    (train_step, ((0.0, {"x": 1.0}),), AUX, "['max_logits']; .* got entries ['x']"),
    (train_step, (), {"max_aux": "max_logits"}, "has no ['max_logits']"),
    # --- layers ---
    (scan, (P("data"),), {}, "along the axis of layers; expected"),
    (scan, (P(), np.ones(())), {}, "layers at '' is a scalar; expected"),
    (scan, (), {"carry": np.ones((6, 8))}, "carry has shape (6, 8); expected a first"),
    (scan, (), {"carry": (np.ones(8), 0.0)}, "carry[1] has shape (); expected a first"),
    (
        scan,
        (),
        {"output": jnp.sum},
        "the output of block has shape (); expected a firs",
    ),
]


@pytest.mark.parametrize(("call", "args", "given", "words"), REFUSED)
def test_refused(call, args, given, words):
    words = re.sub(r"[][()]", r"\\\g<0>", words)
    with pytest.raises(ValueError, match=words):
        call(*args, **given)


def test_specs_of_a_bare_array_name_no_path():
    tx = jm.on_mesh(MUON, mesh_of(8), P("model"))
    with pytest.raises(ValueError, match=r"^the parameter of shape \(8, 12\) with"):
        tx.init(jnp.ones((8, 12)))


def test_a_mesh_with_axes_of_both_kinds():
    """On jax 0.12 its updates would not keep their sharding along Explicit axes."""
    mesh = jax.make_mesh((4, 2), ("data", "fsdp"), axis_types=(AUTO, EXPLICIT))
    with pytest.raises(ValueError, match="expected Auto for all, or Explicit for all"):
        jm.on_mesh(MUON, mesh)


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


def test_deleted_swapped_and_other_arguments():
    """Errors leave the arguments alone, and the first parameters are the user's."""
    params, _ = case.draw("one matrix only")
    step, batch = make_step(problem="one matrix only"), case.batches(1)[0]
    placed, state = step.init(params)
    with pytest.raises(ValueError, match="params and state are swapped"):
        step(state, placed, batch)
    with pytest.raises(ValueError, match="state is not one of this optimizer"):
        step(placed, jm.muon(matrices=toy).init(params), batch)
    step(placed, state, batch)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(params))
    with pytest.raises(ValueError, match=r"params.* is deleted: an earlier call"):
        step(placed, state, batch)


# --- parameters of `scanned` ----------------------------------------------------------


def run(layers, x, scan):
    return scan(lambda x, layer: (losses.layer(x, layer), None), x, layers)[0]


def stack_of(layers, x, scan):
    return jnp.mean(run(layers, x, scan) ** 2)


def cast_in_jit(layers, x, scan):
    """A cast, a slice and a reshape on the way are not uses."""
    half = jax.jit(lambda w: w.astype(x.dtype)[1:])
    return stack_of(jax.tree.map(half, layers), x, scan)


def outer(layers, x, scan):
    """Blocks of two layers in a scan of its own."""
    block = lambda x, two: (run(two, x, scan), None)  # noqa: E731
    two = jax.tree.map(lambda w: w.reshape(2, 2, *w.shape[1:]), layers)
    return jnp.mean(jax.lax.scan(block, x, two)[0] ** 2)


def norm(layers):
    return sum(jnp.sum(w**2) for w in jax.tree.leaves(layers))


USES = [
    (cast_in_jit, None),
    (outer, None),
    (lambda w, x, scan: stack_of(w, x, scan) + norm(w), "'layers/b', .* integer_pow;"),
    (lambda w, x, scan: stack_of(w, x, scan) + jax.jit(norm)(w), "b.* integer_pow"),
    (lambda w, x, scan: 2 * stack_of(w, x, scan) + stack_of(w, x, scan), r"\), scan_l"),
    (lambda w, x, scan: jnp.mean(x), "b', .* for nothing; expected one scan_layers"),
]


@pytest.mark.parametrize(("use", "words"), USES)
def test_uses_of_scanned_parameters(use, words, x64, as_users_write):
    """Each device has a part of them: any use but by the scan would be wrong."""
    args = case.drawn()

    def loss(params, x, scan=jax.lax.scan):
        return use(params["layers"], x, scan) + jnp.mean(x @ params["head"])

    step = case.sgd_step(case.scanning(loss), scanned="layers")
    if words is None:
        case.assert_gradients(case.gradients(step, *args), loss, args)
        return
    with pytest.raises(ValueError, match=f"scanned: loss_fn uses .*{words}"):
        case.gradients(step, *args)


@pytest.mark.parametrize(
    ("scanned", "specs", "words"),
    [
        ((), {}, r"got whole parameters; expected make_train_step\(scanned="),
        ("layers", {"b": P()}, "scanned=.*'layers'.*: loss_fn sees"),
    ],
)
def test_steps_that_scan_otherwise_than_their_loss(
    scanned, specs, words, as_users_write
):
    loss = case.scanning(losses.plain, specs=case.LAYERS | specs)
    step = case.sgd_step(loss, scanned=scanned)
    with pytest.raises((TypeError, ValueError), match=words):
        case.gradients(step, *case.drawn("float32"))


@pytest.mark.parametrize("local_batch", [False, True])
def test_layers_that_stay_sharded_over_explicit_axes(local_batch):
    mesh = jax.make_mesh((4, 2), ("a", "b"), 2 * (EXPLICIT,))
    x, layers = jnp.ones((8, 8)), jnp.ones((3, 8, 8))
    with jax.set_mesh(mesh), pytest.raises(Exception, match="illegally sharded"):
        jm.scan_layers(
            lambda x, w: (x @ w, None),
            jax.device_put(x, P(("a", "b"))),
            jax.device_put(layers, P(None, "a", "b")),
            mesh,
            axis="a",
            local_batch=local_batch,
        )
