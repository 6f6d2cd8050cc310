"""The programs for Flax train as the plain functional loop of optax does."""

import functools
import importlib
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_muon as jm
from jax_muon.trees import leaves_with_paths, unbox
from tests.mesh.case import mesh_of

mesh = functools.partial(mesh_of, names=("data", "model"))


@pytest.fixture
def load(examples, monkeypatch):
    """Imports a script of the folder flax, which is no package."""
    monkeypatch.syspath_prepend(str(examples / "flax"))
    yield importlib.import_module
    for path in (examples / "flax").glob("*.py"):
        sys.modules.pop(path.stem, None)


def functional(digits, apply, params, make_optimizer):
    """Plain JAX and optax: parameters in dicts, one device, one jitted step."""
    tx = make_optimizer(jm.read(params, apply, digits.IMAGE))

    @jax.jit
    def step(params, state, images, labels):
        loss, grads = jax.value_and_grad(
            lambda params: digits.cross_entropy(apply(params, images), labels)
        )(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    state = tx.init(params)
    losses = []
    for batch in digits.batches():
        params, state, loss = step(params, state, *batch)
        losses.append(float(loss))
    return params, losses


def pure(model):
    """The parameters of an NNX model as dicts, and the function of them."""
    graph, state = nnx.split(model, nnx.Param)

    def apply(params, images):
        filled = jax.tree.map(lambda x: x, state)
        nnx.replace_by_pure_dict(filled, params)
        return nnx.merge(graph, filled)(images)

    return nnx.to_pure_dict(state), apply


def assert_equal_trees(actual, expected, atol):
    actual = dict(leaves_with_paths(actual))
    expected = dict(leaves_with_paths(expected))
    assert actual.keys() == expected.keys()
    for path, leaf in actual.items():
        leaf, other = np.asarray(leaf), np.asarray(expected[path])
        np.testing.assert_allclose(leaf, other, rtol=0, atol=atol, err_msg=path)


def assert_divided(params, state, data):
    """Matrices and their momentum, over (data, 2): the layers' axis is whole."""
    weights, state = dict(leaves_with_paths(params)), dict(leaves_with_paths(state))
    rows = 64 // data
    for name, shard in (("up/kernel", (4, rows, 64)), ("down/kernel", (4, 64, rows))):
        (momentum,) = (
            x
            for p, x in state.items()
            if p.endswith(f"muon/inner_state/0/mu/blocks/{name}")
        )
        for leaf in (weights[f"blocks/{name}"], momentum):
            assert leaf.sharding.shard_shape(leaf.shape) == shard


@pytest.mark.parametrize("name", ["train_nnx", "train_linen"])
def test_a_program_learns_and_goes_on_from_its_checkpoint(
    load, name, tmp_path, capsys, monkeypatch
):
    """With a checkpoint at half of the steps, bit for bit as without one."""
    example, digits = load(name), load("digits")
    for module in (example, digits):
        monkeypatch.setattr(module, "STEPS", 30)
    *trained, losses = example.main(tmp_path)
    assert (tmp_path / "15").is_dir()
    assert losses[-1] < losses[0] / 4
    table = r"blocks/up/kernel +4 x 64 x 128 .* 4 x \(64, 128\) +muon +- x data x model"
    assert re.search(table, capsys.readouterr().out)
    if name == "train_nnx":
        assert_divided(*map(nnx.state, trained), 4)
    else:
        (state,) = trained
        assert isinstance(state.params["blocks"]["up"]["kernel"], nn.Partitioned)
        assert_divided(unbox(state.params), unbox(state.opt_state), 4)
    monkeypatch.setattr(example, "STEPS", 1000)  # half of them are never done
    *_, straight = example.main(tmp_path)
    assert straight == losses


def test_model_and_optimizer_in_one(load, monkeypatch):
    """To 1e-6: the same operations in float32, which a compiler may fuse otherwise."""
    example, digits = load("train_nnx"), load("digits")
    monkeypatch.setattr(digits, "STEPS", 5)

    @nnx.jit
    def step(both, images, labels):
        loss, grads = nnx.value_and_grad(
            lambda model: digits.cross_entropy(model(images), labels)
        )(both.model)
        both.update(grads)
        return loss

    with jax.set_mesh(mesh(1, 1)):
        model = example.Stack(rngs=nnx.Rngs(0))
        params, apply = pure(model)
        tx = digits.make_optimizer(jm.read(params, apply, digits.IMAGE))
        both = nnx.ModelAndOptimizer(model, tx)
        _, expected = functional(digits, apply, params, digits.make_optimizer)
        losses = [float(step(both, *batch)) for batch in digits.batches()]
    np.testing.assert_allclose(losses, expected, rtol=0, atol=1e-6)


# The order of the sums over devices shows in the last digits, and in float32 the polar
# factor carries those of the smallest singular values up to the size of the others.


def recipe(matrices):
    adamw = optax.adamw(0.003)
    return jm.nanochat(0.02, adamw=adamw, dtype="float64", steps=2, matrices=matrices)


def wide(tree):
    return jax.tree.map(lambda x: x.astype(jnp.float64), tree)


def three_steps_in_float64(digits, monkeypatch):
    monkeypatch.setattr(digits, "STEPS", 3)
    drawn = [(wide(images), labels) for images, labels in digits.batches()]
    monkeypatch.setattr(digits, "batches", lambda: drawn)
    monkeypatch.setattr(digits, "IMAGE", jax.ShapeDtypeStruct((1, 64), "float64"))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_nnx_is_right(load, monkeypatch, x64, kind):
    """Also with Explicit axes, if the model says where a sum over devices goes."""
    example, digits = load("train_nnx"), load("digits")
    three_steps_in_float64(digits, monkeypatch)
    explicit = kind == AxisType.Explicit

    class Block(example.Block):
        def __call__(self, x):
            to = {"out_sharding": P("data")} if explicit else {}
            return x + self.down(nnx.relu(self.up(self.norm(x))), **to)

    monkeypatch.setattr(example, "Block", Block)

    def create():
        model = example.Stack(rngs=nnx.Rngs(0))
        nnx.update(model, wide(nnx.state(model, nnx.Param)))
        return model

    with jax.set_mesh(mesh(1, 1, kind=kind)):
        params, apply = pure(create())
        matrices = jm.read(params, apply, digits.IMAGE)
        params, expected = functional(digits, apply, params, recipe)
    devices = mesh(2, 2, kind=kind)
    with jax.set_mesh(devices):
        model = create()
        tx = recipe(matrices)
        if not explicit:
            specs = nnx.get_partition_spec(nnx.state(model, nnx.Param))
            tx = jm.on_mesh(tx, devices, specs=specs)
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        losses = [
            float(example.train_step(model, optimizer, *jax.device_put(b, P("data"))))
            for b in digits.batches()
        ]
    np.testing.assert_allclose(losses, expected, rtol=0, atol=1e-10)
    assert_equal_trees(pure(model)[0], params, atol=1e-10)
    assert_divided(nnx.state(model), nnx.state(optimizer), 2)


def test_linen_is_right(load, monkeypatch, x64):
    example, digits = load("train_linen"), load("digits")
    three_steps_in_float64(digits, monkeypatch)
    model = example.Stack()
    boxed = wide(model.init(jax.random.key(0), jnp.zeros((1, 64)))["params"])

    def apply(params, images):
        return model.apply({"params": params}, images)

    matrices = jm.read(boxed, apply, digits.IMAGE)
    params, expected = functional(digits, apply, unbox(boxed), recipe)
    devices = mesh(2, 2)

    def create():
        specs = example.divided(boxed, devices)
        tx = jm.on_mesh(recipe(matrices), devices, specs)
        return TrainState.create(apply_fn=model.apply, params=boxed, tx=tx)

    with jax.set_mesh(devices), nn.logical_axis_rules(example.RULES):
        shardings = example.divided(jax.eval_shape(create), devices)
        state = jax.jit(create, out_shardings=shardings)()
        step = jax.jit(example.train_step, out_shardings=(shardings, None))
        losses = []
        for batch in digits.batches():
            state, loss = step(state, *jax.device_put(batch, P("data")))
            losses.append(float(loss))
    np.testing.assert_allclose(losses, expected, rtol=0, atol=1e-10)
    assert_equal_trees(unbox(state.params), params, atol=1e-10)
