"""levanter: its MuonH as an oracle for ours, and ours in its models and train state."""

import functools
import pathlib
import re

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from levanter.grug.grug_moe import MoEExpertMlp
from levanter.grug.sharding import compact_grug_mesh
from levanter.models.lm_model import LmExample
from levanter.optim.muonh import scale_with_muonh
from levanter.trainer_state import TrainerState
from levanter.utils.mesh import MeshConfig, create_mesh_from_axis_specs
from optax.contrib import MuonDimensionNumbers

import jax_muon as jm
from benchmarks.reading_models.levanter import CONFIGS as MODELS
from benchmarks.reading_models.levanter import VOCAB
from outside import patched
from outside.coefficients import YOU
from tests import pages

LINEAR = (hax.nn.Linear, hax.nn.MoELinear)


# --- MuonH ----------------------------------------------------------------------------

JORDAN = (3.4445, -4.7750, 2.0315)


class Model(eqx.Module):
    up: hax.nn.Linear
    down: hax.nn.Linear


def two_layers(key, bias=False):
    """A wide and a tall matrix, one of them stored (out, in) as levanter can."""
    width, hidden = hax.Axis("embed", 16), hax.Axis("mlp", 40)
    keys = jax.random.split(key)
    return Model(
        hax.nn.Linear.init(width, hidden, key=keys[0], use_bias=bias, out_first=True),
        hax.nn.Linear.init(hidden, width, key=keys[1], use_bias=bias, out_first=False),
    )


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize(("theirs", "ours"), [("simple", JORDAN), ("quintic", YOU)])
def test_hyperball_against_muonh(theirs, ours, nesterov):
    """Six steps in float32, to 1e-5 of the distance travelled.

    Its momentum is a sum and ours an average; their polar factors are equal. Theirs
    keeps the norm before each step, ours the norm at `init`. Theirs adds 1e-8 to the
    norm in Newton-Schulz, ours 1e-7. Zero matrices become NaN in theirs.
    """
    rate, momentum = 0.05, 0.9
    their = scale_with_muonh(momentum, nesterov, 5, 1e-8, rate, theirs)
    polar = jm.NewtonSchulz(5, coefficients=ours, dtype="float32")
    start = two_layers(jax.random.key(0))
    rules = {"up/weight/0": MuonDimensionNumbers(-1, -2), "down/weight/0": "muon"}
    matrices = jm.find_matrices(start, rules=rules)
    our = optax.chain(
        jm.scale_by_momentum(momentum, nesterov=nesterov),
        jm.as_matrices(
            optax.chain(jm.orthogonalize(polar), jm.hyperball(rate)), matrices
        ),
    )
    steps = {"theirs": their, "ours": our}
    ends = {}
    for name, tx in steps.items():
        params, state, update = start, tx.init(start), jax.jit(tx.update)
        for step in range(6):
            grads = two_layers(jax.random.key(step + 1))
            updates, state = update(grads, state, params)
            params = optax.apply_updates(params, updates)
        ends[name] = params
    moved = optax.tree.norm(optax.tree.sub(ends["theirs"], start))
    apart = optax.tree.norm(optax.tree.sub(ends["ours"], ends["theirs"]))
    assert float(apart) < 1e-5 * float(moved)
    for layer in ("up", "down"):
        before, after = (
            float(optax.tree.norm(getattr(tree, layer))) for tree in (start, params)
        )
        assert after == pytest.approx(before, rel=1e-5)


# --- models ---------------------------------------------------------------------------


def trainable(x):
    return eqx.is_inexact_array(x)


def shapes(config):
    model = eqx.filter_eval_shape(lambda: config.build(VOCAB, key=jax.random.key(0)))
    return eqx.filter(
        model, lambda x: hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)
    )


def linears(tree):
    """The Linear layers of a model by path: whose weights its own Muon takes."""
    flat = jax.tree_util.tree_leaves_with_path(
        tree, is_leaf=lambda x: isinstance(x, LINEAR)
    )
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): layer
        for path, layer in flat
        if isinstance(layer, LINEAR)
    }


@pytest.mark.parametrize("name", MODELS)
def test_readings(name):
    """As each Linear names its axes: In, Out, and batch for all others.

    GPT-2's "qkv" is in its Out, but cut in three: those are three matrices.
    """
    params = shapes(MODELS[name])
    mesh = jax.make_mesh((1, 1), ("data", "model"), 2 * (AxisType.Auto,))
    with hax.partitioning.set_mesh(mesh):  # the products of experts need one
        found = pages.run("levanter")["read"](params)
    layers = linears(params)
    assert {
        path.removesuffix("/weight/0") for path, p in found.items() if p.label == "muon"
    } == {
        path for path in layers if "lm_head" not in path and not path.endswith("gate")
    }
    for path, layer in layers.items():
        parameter = found[f"{path}/weight/0"]
        names = [axis.name for axis in layer.weight.axes]
        fan_in, fan_out = (
            tuple(
                sorted(
                    names.index(axis.name)
                    for axis in hax.axis.ensure_tuple(side)
                    if axis.name != "qkv"
                )
            )
            for side in (layer.In, layer.Out)
        )
        if parameter.label == "muon":
            read = parameter.axes
            assert (read.reduction, read.output) == (fan_in, fan_out), path


def example():
    position = hax.Axis("position", 16)
    batch = hax.Axis("batch", 8)
    tokens = hax.random.randint(jax.random.key(3), (batch, position), 0, VOCAB.size)
    return hax.vmap(LmExample.causal, batch)(tokens)


def train(config, optimizer, steps=2, mapping=None, compute=None):
    """Losses and the last state of levanter's own train state."""
    mapping = mapping or {}

    def init(key):
        model = hax.shard(config.build(VOCAB, key=key), mapping)
        return TrainerState.init(optimizer, model, key=key, is_trainable=True)

    def step(state, example):
        with hax.axis_mapping(compute or {}):
            loss, grads = eqx.filter_value_and_grad(
                lambda model: model.compute_next_token_loss(example).scalar()
            )(hax.shard(state.model, compute or {}))
        grads = hax.shard(grads, mapping)
        state, _ = state.take_step(grads, loss=loss, key=state.training_key)
        return hax.shard(state, mapping), loss

    jit = functools.partial(hax.named_jit, axis_resources=mapping)
    init, step = map(jit if mapping else eqx.filter_jit, (init, step))
    state, losses = init(jax.random.key(0)), []
    for _ in range(steps):
        state, loss = step(state, example())
        losses.append(float(loss))
    return losses, state


def train_on_a_mesh(config, make, steps=2):
    """Losses and the last state on (4, 2) devices; `make` gets the `MeshConfig`."""
    mesh_config = MeshConfig(axes={"data": 4, "model": 2})
    ici, dcn = mesh_config.axis_shapes(8, 1)
    mesh = create_mesh_from_axis_specs(ici_axes=ici, dcn_axes=dcn)
    with hax.partitioning.set_mesh(mesh):
        return train(
            config,
            make(mesh_config),
            steps,
            mapping=mesh_config.resolved_param_mapping,
            compute=mesh_config.resolved_compute_mapping,
        )


@pytest.mark.parametrize(
    ("recipe", "name"),
    [("nanochat", "llama"), ("moonlight", "gpt2"), ("muonh", "llama")],
)
def test_patch(tmp_path, recipe, name):
    """With `upstream.patch`, a file describes the optimizer.

    Losses on a mesh are those of one device, and momentum is sharded as the parameters.
    NorMuon and Hyperball keep norms (layers, 1, 1), which `named_jit` would divide.
    """
    patched.copy("levanter", tmp_path)
    program = pathlib.Path(__file__).with_name("patched_run.py")
    printed = patched.run(tmp_path, program, recipe, name)
    alone, losses = (
        [float(x) for x in re.search(f"{place}: (.*)", printed)[1].split()]
        for place in ("alone", "on a mesh")
    )
    assert alone[-1] < alone[0]
    np.testing.assert_allclose(losses, alone, rtol=1e-4)
    momenta = re.findall("momentum: (.*)", printed)
    assert len(momenta) > 3
    assert all("data" in spec for spec in momenta)


def test_patch_with_labels(tmp_path):
    """A model that has no loss of next tokens needs labels."""
    patched.copy("levanter", tmp_path)
    program = pathlib.Path(__file__).with_name("patched_run.py")
    printed = patched.run(tmp_path, program, "muon", "labels")
    assert "momenta: 2\nnothing says whether 2 of 2 parameters" in printed


def test_grug_experts():
    """Raw arrays on Explicit axes: nothing goes around the recipe."""
    mesh = compact_grug_mesh(expert_axis_size=2, model_axis_size=2)
    sizes = {"num_experts": 4, "hidden_dim": 16, "intermediate_dim": 24}
    inputs_outputs = MuonDimensionNumbers(-2, -1)
    tx = jm.moonlight(0.02, dtype="float32", matrices={"experts/*": inputs_outputs})

    def init(key):
        return {"experts": MoEExpertMlp.init(**sizes, initializer_std=0.1, key=key)}

    with jax.set_mesh(mesh):
        params = jax.jit(init)(jax.random.key(0))
        state = jax.jit(tx.init)(params)
        updates, state = jax.jit(tx.update)(params, state, params)
    found = jm.find_matrices(params, rules={"experts/*": inputs_outputs})
    assert [p.label for p in found.values()] == 3 * ["muon"]
    assert {p.axes.batch for p in found.values()} == {(0,)}
    specs = {x.sharding.spec for x in jax.tree.leaves(state) if x.ndim == 3}
    assert specs == {x.sharding.spec for x in jax.tree.leaves(params)}
    alone = jax.device_get(params)
    expected, _ = jax.jit(tx.update)(alone, tx.init(alone), alone)
    for update, one in zip(*map(jax.tree.leaves, (updates, expected)), strict=True):
        # Five quintics in float32, in which roundings grow by at most some 8 times.
        np.testing.assert_allclose(update, one, rtol=0, atol=2e-5 * np.abs(one).max())
