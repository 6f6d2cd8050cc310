"""The code of docs/frameworks.md runs, and does as the page says."""

import ast
import functools
import inspect
import re
import runpy
import shlex

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import yaml
from flax import linen as nn
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers

import jax_muon as jm
from jax_muon.base.trees import leaves_with_paths
from tests import pages, trees
from tests.recipes import RECIPES

# --- Flax -----------------------------------------------------------------------------


def test_flax():
    """tests/examples/test_flax.py trains the programs that the section names."""
    found = pages.run("Flax")
    model, x, y, matrices = (found[name] for name in ("model", "x", "y", "matrices"))
    labels = {path: x.label for path, x in matrices.items() if len(x.shape) > 1}
    assert labels == {"layers/0/kernel": "muon", "layers/4/kernel": "adamw"}
    values = [found["train_step"](model, found["optimizer"], x, y) for _ in range(3)]
    assert values[2] < values[0]
    assert (
        model.layers[3].rngs.count[...] == 3
    )  # of the steps alone, not of the reading

    graph, params, rest = nnx.split(model, nnx.Param, ...)
    assert set(matrices) == {path for path, _ in leaves_with_paths(params)}

    def loss(params, x, y):
        return found["loss_fn"](nnx.merge(graph, params, rest, copy=True), x, y)

    read = jm.find_matrices(params, loss, x, y)
    assert read.labels(params) == matrices.labels(params)


def test_linen_with_batch_norm():
    """The line of the page."""
    norm, x = nn.BatchNorm(use_running_average=False), jnp.ones((4, 8))
    model = nn.Sequential([nn.Dense(16), norm, nn.relu, nn.Dense(3)])
    params, stats = model.init(jax.random.key(0), x).values()
    (line,) = re.findall(r"`(model\.apply\(.*batch_stats.*)`", pages.PAGE.read_text())
    apply = eval(f"lambda p, x: {line}", {"model": model, "stats": stats})
    matrices = jm.find_matrices(params, apply, x)
    assert matrices["layers_0/kernel"].label == "muon"
    assert matrices["layers_1/scale"].role == "elementwise"


# --- QK-clip of latent attention ------------------------------------------------------

LAYERS, HEADS = 3, 4
KERNELS = {  # of MLA in MaxText, without the axis of layers
    "wq_a": (8, 7),
    "wq_b": (7, HEADS, 4 + 2),  # nope and rope
    "wkv_a": (8, 6 + 2),  # latent and rope
    "wkv_b": (6, HEADS, 4 + 3),  # nope and value
    "out": (HEADS, 3, 8),
}


@pytest.mark.parametrize("axis", [0, 1])
def test_qk_clip_of_latent_attention(axis, x64):
    """Both products of a logit fall by threshold / maximum, and values stay.

    That of nope by the root for queries and for keys; that of rope, whose keys all
    heads share, by the whole factor for queries.
    """
    found = runpy.run_path(str(pages.ROOT / "outside/maxtext/qk_clip.py"))
    shapes = {k: {"kernel": (*x[:axis], LAYERS, *x[axis:])} for k, x in KERNELS.items()}
    before = trees.normal(shapes, 0, "float64")
    params = {"layers": {"self_attention": before}}
    maxima = np.array([[40.0, 9, 10, 80], [1, 2, 3, 4], [11, 1000, -5, 10]])
    parts = {"nope": 4, "rope": 2, "value": 3, "latent": 6}
    tx = found["with_qk_clip"](optax.set_to_zero(), 10.0, **parts, axis=axis)
    updates, _ = jax.jit(tx.update)(params, tx.init(params), params, max_logits=maxima)
    gamma = 10 / np.maximum(maxima, 10)  # (layers, heads)
    root, one = gamma**0.5, np.ones_like(gamma)
    factors = {"wq_b": 4 * [root] + 2 * [gamma], "wkv_b": 4 * [root] + 3 * [one]}
    after = optax.apply_updates(params, updates)["layers"]["self_attention"]
    for name in before:
        old, new = (np.moveaxis(x[name]["kernel"], axis, 0) for x in (before, after))
        factor = np.stack(factors[name], -1)[:, None] if name in factors else 1
        np.testing.assert_allclose(new, factor * old, rtol=1e-12)


# --- state in the host's memory -------------------------------------------------------


@pytest.mark.skipif(
    (jax.__version__[:5], optax.__version__) == ("0.10.", "0.2.6"),
    reason="XLA cannot place this optax's counts; the page says so",
)
def test_state_in_the_hosts_memory():
    """A step keeps it there, sharded as on the devices."""
    mesh = jax.make_mesh((8,), ("data",), (AxisType.Auto,))
    tx = jm.on_mesh(
        RECIPES["muon"](ns_steps=2, matrices={"up": "muon"}), mesh, divide="data"
    )
    params = grads = trees.normal({"up": (16, 64), "b": (16,)})
    found = pages.run("State in the host's memory", tx=tx, params=params)
    kept = found["state"]

    @functools.partial(jax.jit, donate_argnums=1)
    def offloaded(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for _ in range(2):
        params, kept = offloaded(params, kept, grads)
    for leaf, there in zip(*map(jax.tree.leaves, (kept, found["there"])), strict=True):
        assert leaf.sharding.memory_kind == "pinned_host"
        assert leaf.sharding.spec == there.spec


# --- equinox --------------------------------------------------------------------------


def test_equinox():
    found = pages.run("Equinox")
    model, state, matrices = (found[name] for name in ("model", "state", "matrices"))
    first, last = (matrices[f"layers/{i}/weight"] for i in (0, 2))
    assert (first.label, last.label) == ("muon", "adamw")
    params = eqx.filter(model, eqx.is_inexact_array)
    tables = [str(jm.describe(found["tx"], tree)) for tree in (model, params)]
    assert tables[0] == tables[1]
    with pytest.raises(ValueError, match=r"at 'activation'.*eqx\.filter"):
        found["tx"].init(model)

    x, values = jax.random.normal(jax.random.key(1), (32, 6)), []
    for _ in range(5):
        model, state, value = found["step"](model, state, x, jnp.sin(x[:, :1]))
        values.append(float(value))
    assert values[-1] < values[0]


class Gated(eqx.Module):
    """With integers, and a number that decides what is computed."""

    up: eqx.nn.Linear
    ids: jax.Array
    threshold: float = 0.5

    def __call__(self, x):
        return jnp.tanh(self.up(x)) if self.threshold > 0 else x


def test_a_module_is_read_as_its_gradient_filters_it():
    def loss(model, x):
        return jnp.sum(model(x) ** 2)

    model = Gated(eqx.nn.Linear(4, 8, key=jax.random.key(0)), jnp.arange(3))
    matrices = jm.find_matrices(model, loss, jnp.ones(4))
    grads = eqx.filter_grad(loss)(model, jnp.ones(4))
    assert set(matrices) == {path for path, _ in leaves_with_paths(grads)}
    assert matrices["up/weight"].axes.reduction == (1,)


# --- DiLoCo ---------------------------------------------------------------------------

SHAPES = {"wte": (64, 16), "scale": (16,), "up": (16, 64), "down": (64, 16)}


def test_diloco():
    """Every worker gets the updates of one alone, on separate devices."""
    workers = 4
    mesh = jax.make_mesh((workers, 2), ("worker", "data"), 2 * (AxisType.Auto,))
    matrices = {"wte": "adamw", "*": MuonDimensionNumbers(-2, -1)}
    recipe = jm.nanochat(0.02, adamw=jm.adamw(3e-3), matrices=matrices)
    inner = jm.on_mesh(recipe, NamedSharding(mesh, P("worker")), divide="data")
    shared = trees.normal(SHAPES)
    grads = trees.normal({k: (workers, *shape) for k, shape in SHAPES.items()}, 1)
    start = jax.tree.map(lambda x: jnp.stack(workers * [x]), shared)
    with jax.set_mesh(mesh):
        stacks = jm.describe(inner, start).stacks
        _, params, _ = trees.run(inner, start, [grads, grads])
    assert {stack.shards.batch for stack in stacks} == {("worker",)}
    labels = {"wte": "adamw", "?*": "muon"}
    alone = jm.nanochat(0.02, adamw=jm.adamw(3e-3), matrices=labels)
    for worker in range(workers):
        own, gradient = (jax.device_get(x) for x in (params, grads))
        own, gradient = jax.tree.map(lambda x, w=worker: x[w], (own, gradient))
        _, after, _ = trees.run(alone, shared, [gradient, gradient])
        moved = optax.tree.sub(after, shared)
        # The polar factor runs in bfloat16, which has eight bits.
        assert trees.distance(optax.tree.sub(own, shared), moved) < 2**-7


# --- configurations -------------------------------------------------------------------


def test_configurations_name_what_the_patches_define():
    """`make test-outside` trains with the patches; here are the names of the page."""
    patch = {
        name: (pages.ROOT / "outside" / name / "upstream.patch").read_text()
        for name in ("maxtext", "levanter", "kauldron")
    }
    settings = inspect.signature(jm.nanochat).parameters

    (line,) = pages.blocks("MaxText", "")
    options = dict(word.split("=", 1) for word in shlex.split(line))
    assert all(f"\n+{name}: " in patch["maxtext"] for name in {*options} - {"opt_type"})
    assert f'JAX_MUON = "{options["opt_type"]}"' in patch["maxtext"]
    assert hasattr(jm, options["jax_muon_recipe"])
    assert {*yaml.safe_load(options["jax_muon_settings"])} <= {*settings}

    (text,) = pages.blocks("levanter", "yaml")
    config = yaml.safe_load(text)["optimizer"]
    assert f'register_subclass("{config.pop("type")}")' in patch["levanter"]
    assert hasattr(jm, config["recipe"])
    for name in {*config} - {"learning_rate"}:  # of every optimizer there
        assert f"\n+    {name}: " in patch["levanter"], name

    (text,) = pages.blocks("kauldron", "")
    (call,) = (
        x for x in ast.walk(ast.parse(text)) if isinstance(x, ast.Call) and x.keywords
    )
    defined = (
        patch["kauldron"].partition("+def jax_muon(")[2].partition("**settings")[0]
    )
    for name in {x.arg for x in call.keywords} - {*settings}:
        assert f"\n+    {name}: " in defined, name
