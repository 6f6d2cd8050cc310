"""The code of docs/frameworks.md runs as it stands there, and does what it says."""

import re
import runpy

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.traverse_util import unflatten_dict
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers

import jax_muon as jm
from jax_muon.trees import leaves_with_paths
from tests import pages, trees


def relative(a, b):
    """Distance of two trees, relative to the second."""
    return float(optax.tree.norm(optax.tree.sub(a, b)) / optax.tree.norm(b))


# --- Flax -----------------------------------------------------------------------------


def test_flax():
    """tests/examples/test_flax.py trains the programs that the section names."""
    found = pages.run("Flax")
    model, x, y = found["model"], found["x"], found["y"]
    matrices = found["matrices"]
    assert {path: x.label for path, x in matrices.items() if len(x.shape) > 1} == {
        "up/kernel": "muon",
        "down/kernel": "adamw",
    }
    of_flax = dict(leaves_with_paths(nnx.state(model, nnx.Param)))
    assert set(matrices) == set(of_flax)  # no counts, keys or means
    assert model.dropout.rngs.count[...] == 0
    values = [found["train_step"](model, found["optimizer"], x, y) for _ in range(3)]
    assert values[2] < values[0]
    assert model.dropout.rngs.count[...] == 3

    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def loss(params, x, y):
        return found["loss_fn"](nnx.merge(graph, params, rest, copy=True), x, y)

    read = jm.read(params, loss, x, y)
    assert read.labels(params) == matrices.labels(params)


class Normed(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=False)(nn.Dense(16)(x))
        return nn.Dense(3)(nn.relu(x))


def test_linen_with_batch_norm():
    """The line of the page."""
    model, x = Normed(), jnp.ones((4, 8))
    params, stats = model.init(jax.random.key(0), x).values()
    (line,) = re.findall(r"`(model\.apply\(.*batch_stats.*)`", pages.PAGE.read_text())

    def apply(p, x):
        return eval(line, {"model": model, "p": p, "stats": stats, "x": x})

    matrices = jm.read(params, apply, x)
    assert matrices["Dense_0/kernel"].label == "muon"
    assert matrices["BatchNorm_0/scale"].role == "elementwise"


# --- MaxText --------------------------------------------------------------------------

# Logical axes of a scanned Llama 2 as MaxText has them, and sizes of a small one.
LLAMA = {
    "decoder/decoder_norm/scale": ("norm",),
    "decoder/layers/mlp/wi_0/kernel": ("embed", "layers", "mlp"),
    "decoder/layers/mlp/wi_1/kernel": ("embed", "layers", "mlp"),
    "decoder/layers/mlp/wo/kernel": ("mlp", "layers", "embed"),
    "decoder/layers/pre_self_attention_layer_norm/scale": ("norm", "layers"),
    "decoder/layers/self_attention/query/kernel": ("embed", "layers", "q_heads", "kv"),
    "decoder/layers/self_attention/key/kernel": (
        "embed", "layers", "kv_heads", "kv_head_dim",
    ),
    "decoder/layers/self_attention/out/kernel": ("heads", "layers", "kv", "embed"),
    "decoder/logits_dense/kernel": ("embed_vocab", "vocab"),
    "token_embedder/embedding": ("vocab", "embed_vocab"),
}  # fmt: skip
SIZES = {
    "embed": 16, "embed_vocab": 16, "norm": 16, "mlp": 32, "vocab": 24, "layers": 6,
    "q_heads": 4, "heads": 4, "kv_heads": 2, "kv": 4, "kv_head_dim": 4,
}  # fmt: skip
MATRICES = {
    "token_embedder": "adamw",
    "logits_dense": "adamw",
    "out": MuonDimensionNumbers((0, 2), 3),
    "mlp/*/kernel": MuonDimensionNumbers(0, 2),
    "self_attention/*/kernel": MuonDimensionNumbers(0, (2, 3)),
}
SHARDED = ("mlp", "q_heads", "heads", "vocab", "kv_heads")
RULES = [*((name, "tensor") for name in SHARDED), ("embed", "fsdp")]


def llama(seed=0):
    """Parameters in boxes that name their axes."""
    rng = np.random.default_rng(seed)
    leaves = {
        ("params", *path.split("/")): nnx.Param(
            jnp.asarray(rng.standard_normal([SIZES[name] for name in names])),
            out_sharding=names,
            eager_sharding=False,
        )
        for path, names in LLAMA.items()
    }
    return nnx.State(unflatten_dict(leaves))


def skip_step_on_spikes(inner, threshold):
    """As MaxText's, with a fixed threshold: the inner optimizer under `lax.cond`."""

    def update(updates, state, params, *, loss):
        zeros = jax.tree.map(jnp.zeros_like, updates)
        return jax.lax.cond(
            loss <= threshold,
            lambda: inner.update(updates, state, params),
            lambda: (zeros, state),
        )

    return optax.GradientTransformationExtraArgs(inner.init, update)


def test_maxtext(x64):
    """Specs from logical axes, as in `upstream.patch`; a spike changes nothing."""
    boxed = llama()
    params, grads = (nnx.to_pure_dict(llama(seed)) for seed in (0, 1))
    mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), 3 * (AxisType.Auto,))
    # In float64 a wrong layout shows.
    read, adamw = jm.read(params, rules=MATRICES), optax.adamw(0.02)
    one = jm.muon(0.02, adamw=adamw, dtype="float64", steps=2, matrices=read)
    with jax.set_mesh(mesh):
        specs = nn.logical_to_mesh(nnx.get_partition_spec(boxed), RULES)
        tx = jm.on_mesh(one, mesh, specs, divide=("data",))
        planned = {p.parameter.path: p for p in jm.describe(tx, params).parameters}
        for path, leaf in planned.items():
            assert leaf.parameter.axes == read[path].axes, path
            assert leaf.parameter.label == read[path].label, path
        wi = planned["params/decoder/layers/mlp/wi_0/kernel"]
        assert wi.parameter.axes.batch == (1,)
        assert tuple(wi.spec) == ("fsdp", None, "tensor")
        assert "data" in str(wi.state_spec)

        parts = {"params": {"decoder": "on", "token_embedder": "off"}}
        frozen = {"on": tx, "off": optax.set_to_zero()}
        jax.eval_shape(optax.multi_transform(frozen, parts).init, params)

        guarded = skip_step_on_spikes(tx, 1.0)
        state = jax.jit(guarded.init)(params)
        update = jax.jit(guarded.update)
        updates, after = update(grads, state, params, loss=0.5)
        skipped, same = update(grads, state, params, loss=2.0)
    assert float(optax.tree.norm(skipped)) == 0
    jax.tree.map(np.testing.assert_array_equal, same, state)
    expected, state = jax.jit(one.update)(grads, one.init(params), params)
    assert relative(updates, expected) < 1e-10
    for (_, a), (_, b) in zip(*map(leaves_with_paths, (after, state)), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-10)


# --- QK-clip of latent attention ------------------------------------------------------

LAYERS, HEADS, WIDTH, TIME = 3, 4, 8, 5
PARTS = {"nope": 4, "rope": 2, "value": 3, "latent": 6}


def latent_attention(rng, axis):
    """The kernels of MLA with layers on an axis, as MaxText has them."""
    nope, rope, value, latent = PARTS.values()
    shapes = {
        "wq_a": (WIDTH, 7),
        "wq_b": (7, HEADS, nope + rope),
        "wkv_a": (WIDTH, latent + rope),
        "wkv_b": (latent, HEADS, nope + value),
        "out": (HEADS, value, WIDTH),
    }
    return {
        name: {"kernel": rng.normal(size=(*shape[:axis], LAYERS, *shape[axis:]))}
        for name, shape in shapes.items()
    }


def latent_logits(attn, x, axis):
    """(layers, heads, time, time) in float64, and what the values are made of."""
    w = {n: np.moveaxis(np.asarray(p["kernel"]), axis, 0) for n, p in attn.items()}
    nope, latent = PARTS["nope"], PARTS["latent"]
    q = np.einsum("td,ldr,lrhn->lthn", x, w["wq_a"], w["wq_b"])
    compressed = np.einsum("td,ldr->ltr", x, w["wkv_a"])
    kv = np.einsum("ltr,lrhn->lthn", compressed[..., :latent], w["wkv_b"])
    own = np.einsum("lqhn,lkhn->lhqk", q[..., :nope], kv[..., :nope])
    shared = np.einsum("lqhn,lkn->lhqk", q[..., nope:], compressed[..., latent:])
    return own + shared, kv[..., nope:]


@pytest.mark.parametrize("axis", [0, 1])
def test_qk_clip_of_latent_attention(axis, rng, x64):
    """Logits of each head fall by threshold / maximum; values and shared keys stay."""
    found = runpy.run_path(str(pages.ROOT / "outside/maxtext/qk_clip.py"))
    attn, grads = (latent_attention(rng, axis) for _ in range(2))
    params, grads = ({"layers": {"self_attention": x}} for x in (attn, grads))
    maxima = np.array([[40.0, 9, 10, 80], [1, 2, 3, 4], [11, 1000, -5, 10]])
    sgd = optax.sgd(0.1)
    tx = found["with_qk_clip"](sgd, 10.0, **PARTS, axis=axis)
    update = jax.jit(tx.update)
    updates, _ = update(grads, tx.init(params), params, max_logits=maxima)
    plain, _ = sgd.update(grads, sgd.init(params), params)
    before, after = (
        optax.apply_updates(params, u)["layers"]["self_attention"]
        for u in (plain, updates)
    )
    for name in ("wq_a", "wkv_a", "out"):
        np.testing.assert_array_equal(after[name]["kernel"], before[name]["kernel"])
    x = rng.normal(size=(TIME, WIDTH))
    (old, values), (new, same) = (latent_logits(a, x, axis) for a in (before, after))
    np.testing.assert_array_equal(same, values)
    gamma = np.minimum(1, 10 / np.maximum(maxima, 10))
    # Some ten roundings of 1e-16, in sums that may cancel by a hundred.
    expected = gamma[..., None, None] * old
    np.testing.assert_allclose(new, expected, rtol=1e-12, atol=1e-12)


# --- state in the host's memory -------------------------------------------------------


@pytest.mark.skipif(
    (jax.__version__[:5], optax.__version__) == ("0.10.", "0.2.6"),
    reason="XLA cannot place this optax's counts; the page says so",
)
def test_state_in_the_hosts_memory():
    """Two steps, to the same numbers as with a state on the devices."""
    mesh = jax.make_mesh((8,), ("data",), (AxisType.Auto,))
    tx = jm.on_mesh(jm.muon(steps=2, matrices={"up": "muon"}), mesh, divide="data")
    params = {"up": jax.random.normal(jax.random.key(0), (16, 64)), "b": jnp.ones(16)}
    names = {"jax": jax, "jm": jm, "tx": tx, "params": params, "mesh": mesh}
    found = pages.run("State in the host's memory", **names)

    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    def offloaded(params, state, grads):
        return step(params, jax.device_put(state, found["there"]), grads)

    host = found["host"]
    beside = jax.jit(step)
    offloaded = jax.jit(offloaded, out_shardings=(None, host), donate_argnums=1)
    other, state = params, tx.init(params)
    kept = jax.jit(tx.init, out_shardings=host)(params)
    for _ in range(2):
        other, state = beside(other, state, other)
        params, kept = offloaded(params, kept, params)
    for (path, a), (_, b) in zip(
        *map(leaves_with_paths, ((params, kept), (other, state))), strict=True
    ):
        np.testing.assert_array_equal(a, b, err_msg=path)
    for leaf, beside in zip(*map(jax.tree.leaves, (kept, state)), strict=True):
        assert leaf.sharding.memory_kind == "pinned_host"
        assert leaf.sharding.spec == beside.sharding.spec


# --- equinox --------------------------------------------------------------------------


def test_equinox():
    found = pages.run("Equinox")
    model, state, matrices = (found[name] for name in ("model", "state", "matrices"))
    first, last = (matrices[f"layers/{i}/weight"] for i in (0, 2))
    assert first.label == "muon" and first.axes.reduction == (1,)
    assert last.label == "adamw"
    params = eqx.filter(model, eqx.is_inexact_array)
    tables = [str(jm.describe(found["tx"], tree)) for tree in (model, params)]
    assert tables[0] == tables[1]

    x, values = jax.random.normal(jax.random.key(1), (32, 6)), []
    for _ in range(5):
        model, state, value = found["step"](model, state, x, jnp.sin(x[:, :1]))
        values.append(float(value))
    assert values[-1] < values[0]


class Gated(eqx.Module):
    """With integers, flags, and a number that decides what is computed."""

    up: eqx.nn.Linear
    down: eqx.nn.Linear
    dropout: eqx.nn.Dropout
    ids: jax.Array
    threshold: float = 0.5

    def __call__(self, x, key):
        x = self.dropout(self.up(x), key=key)
        return self.down(x) if self.threshold > 0 else x


def test_a_module_is_read_as_its_gradient_filters_it():
    keys = jax.random.split(jax.random.key(0), 3)
    up, down = eqx.nn.Linear(4, 8, key=keys[0]), eqx.nn.Linear(8, 4, key=keys[1])
    model = Gated(up, down, eqx.nn.Dropout(0.1), jnp.arange(3))
    matrices = jm.read(model, lambda model, x: model(x, keys[2]).sum(), jnp.ones(4))
    grads = eqx.filter_grad(lambda model: model(jnp.ones(4), keys[2]).sum())(model)
    assert set(matrices) == {path for path, _ in leaves_with_paths(grads)}
    assert matrices["up/weight"].label == "muon"


def test_init_refuses_an_unfiltered_module_with_the_leaf():
    found = pages.run("Equinox")
    with pytest.raises(ValueError, match=r"at 'activation'.*eqx\.filter"):
        found["tx"].init(found["model"])


# --- tunix: its trainer is in outside/tunix ------------------------------------------


def test_state_lies_as_the_metadata_of_nnx_says():
    """PeftTrainer lays the state so before its first step."""
    mesh = jax.make_mesh((4, 2), ("fsdp", "tp"), 2 * (AxisType.Auto,))
    divided = nnx.with_partitioning(nnx.initializers.ones, ("fsdp", "tp"))
    with jax.set_mesh(mesh):
        model = nnx.Linear(8, 16, kernel_init=divided, rngs=nnx.Rngs(0))
        tx = jm.nanochat(matrices={"kernel": "muon"})
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        state = nnx.state(optimizer, nnx.optimizer.OptState)
        laid = jax.tree.map(
            lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec or P())),
            state,
            nnx.get_partition_spec(state),
        )
    specs = {x.sharding.spec for x in jax.tree.leaves(laid) if x.shape == (8, 16)}
    assert specs == {P("fsdp", "tp")}


# --- DiLoCo ---------------------------------------------------------------------------


SHAPES = {
    "wte": {"embedding": (64, 16)},
    "mlp": {
        "norm": {"scale": (16,)},
        "up": {"kernel": (16, 64)},
        "down": {"kernel": (64, 16)},
    },
}


def tied(params, tokens):
    """The loss of one worker."""
    table, mlp = params["wte"]["embedding"], params["mlp"]
    x = table[tokens] * mlp["norm"]["scale"]
    x = jax.nn.relu(x @ mlp["up"]["kernel"]) @ mlp["down"]["kernel"]
    return jnp.mean((x @ table.T) ** 2)


def test_diloco():
    """Every worker as if it were alone, and on devices of its own."""
    found = pages.run("DiLoCo")
    mesh, inner = found["mesh"], found["inner"]
    workers = mesh.shape["worker"]
    stacked = trees.filled(SHAPES, lambda shape: (workers, *shape))
    grads, shared = trees.normal(stacked, 1), trees.normal(SHAPES)
    params = jax.tree.map(lambda x: jnp.stack(workers * [x]), shared)

    @jax.jit
    def inner_step(params, state, grads):
        updates, state = inner.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    with jax.set_mesh(mesh):
        plan = jm.describe(inner, params)
        assert {pool.batch_axes for pool in plan.pools} == {("worker",)}
        start, state = params, inner.init(params)
        for _ in range(2):
            params, state = inner_step(params, state, grads)
    read = jm.read(params, jax.vmap(tied), jnp.zeros((workers, 5), int))
    stated = jm.read(params, rules=found["matrices"])
    assert read.labels(params) == stated.labels(params)
    assert all(
        read[path].axes == stated[path].axes
        for path in ("mlp/up/kernel", "mlp/down/kernel")
    )
    alone = jm.nanochat(matrices={"wte": "adamw", "*": "muon"})

    @jax.jit
    def steps(params, grads):
        state = alone.init(params)
        for _ in range(2):
            updates, state = alone.update(grads, state, params)
            params = optax.apply_updates(params, updates)
        return params

    for worker in range(workers):
        own, begin, gradient = (
            jax.tree.map(lambda x, w=worker: np.asarray(x)[w], tree)
            for tree in (params, start, grads)
        )
        moved = optax.tree.sub(steps(begin, gradient), begin)
        # The polar factor runs in bfloat16, which has eight bits.
        assert relative(optax.tree.sub(own, begin), moved) < 2**-7
