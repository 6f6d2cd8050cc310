"""What every kind of parameter gets: label, reading, and the step of that reading."""

import functools
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from optax.contrib import MuonDimensionNumbers

import jax_muon as jm
from jax_muon.paths import leaves_with_paths
from tests import oracle
from tests.reading import reader

# --- the table in the documentation ---------------------------------------------------

DOCS = pathlib.Path(__file__).parents[1] / "docs" / "parameters.md"
ROWS = [
    [cell.strip().strip("`") for cell in line.strip("|").split(" | ")]
    for line in DOCS.read_text().splitlines()
    if re.match(r"\| `(nn|nnx)\.|\| `{", line)
]


def zeros(*shape):
    return jnp.zeros(shape)


@functools.cache
def parameters(source):
    """Shapes of the parameters of a module, or of a tree, that is given as Python."""

    def make():
        return eval(source, {"nn": nn, "nnx": nnx, "rngs": nnx.Rngs(0), "zeros": zeros})

    if source.startswith("nnx."):
        return nnx.to_pure_dict(nnx.state(nnx.eval_shape(make), nnx.Param))
    made = make()
    if isinstance(made, dict):
        return made
    inputs = [zeros(1, 5, 6)]
    if isinstance(made, nn.Embed):
        inputs = [jnp.zeros((1, 5), int)]
    if isinstance(made, (nn.Conv, nn.ConvLocal, nn.ConvTranspose)):
        inputs = [zeros(1, 8, 8, 4)]
    if isinstance(made, nn.RNNCellBase):
        inputs = [made.initialize_carry(jax.random.key(0), (5, 6)), zeros(5, 6)]
    return jax.eval_shape(made.init, jax.random.key(0), *inputs)["params"]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]} {row[1]}")
def test_documented_row(row):
    source, path, *columns, why = row
    del why
    name = path.split("/")[0]
    if source.startswith("nn."):
        assert name == re.match(r"nn\.(\w+)", source)[1] + "_0"
    found = jm.read({name: parameters(source)})[path]
    shape = " x ".join(map(str, found.shape)) or "scalar"
    read = "-"
    if found.label == "muon":
        count, fan_in, fan_out = found.sizes
        read = f"{count} x ({fan_in}, {fan_out})"
    assert [shape, read, found.label] == columns


def test_the_table_is_there():
    assert len(ROWS) > 35
    assert all(len(row) == 6 for row in ROWS)


# --- one step of nanochat, in NumPy, on matrices read by hand -------------------------


def step(w, g):
    """The first step on one matrix (out, in): its new value and mean squares."""
    momentum = 0.05 * g
    u = g + 0.95 * (momentum - g)
    x = oracle.polar(u, jm.polar_express_coefficients(5), 1.02, 1e-6)
    out, fan_in = w.shape
    x, v = oracle.normuon(x, 0.0, 0.95, axis=1 if out >= fan_in else 0)
    rate = 0.02 * max(1, out / fan_in) ** 0.5
    return w - rate * (x + 0.1 * w * (x * w >= 0)), v


def matrices_last(x):
    return x.reshape(-1, *x.shape[-2:]).transpose(0, 2, 1)


# Path, shape, what stands beside it, dimension numbers, the parameter as (batch, out,
# in), the shape of NorMuon's means.
STEPS = {
    "experts up": (
        "moe/up",
        (4, 3, 6),
        {},
        None,
        matrices_last,
        (4, 1, 6),
    ),
    "experts down": (
        "moe/down",
        (4, 6, 3),
        {},
        None,
        matrices_last,
        (4, 6, 1),
    ),
    "experts of scanned layers": (
        "moe/up",
        (2, 4, 3, 6),
        {},
        None,
        matrices_last,
        (2, 4, 1, 6),
    ),
    "scanned kernel": (
        "layers/dense/kernel",
        (5, 3, 6),
        {"bias": (5, 6)},
        None,
        matrices_last,
        (5, 1, 6),
    ),
    "scanned on axis 1": (
        "layers/dense/kernel",
        (3, 5, 6),
        {"bias": (6, 5)},
        {"layers": MuonDimensionNumbers(0, 2)},
        lambda x: x.transpose(1, 2, 0),
        (1, 5, 6),
    ),
    "convolution to few channels": (
        "Conv_0/kernel",
        (3, 3, 2, 4),
        {"bias": (4,)},
        None,
        lambda x: x.reshape(18, 4).T[None],
        (3, 3, 2, 1),
    ),
    "convolution to many channels": (
        "Conv_0/kernel",
        (2, 2, 2, 12),
        {},
        None,
        lambda x: x.reshape(8, 12).T[None],
        (1, 1, 1, 12),
    ),
    "transposed kernel": (
        "ConvTranspose_0/kernel",
        (2, 2, 4, 3),
        {"bias": (4,)},
        None,
        lambda x: x.transpose(2, 0, 1, 3).reshape(1, 4, 12),
        (2, 2, 1, 3),
    ),
    "transposed convolution by its patches": (
        "ConvTranspose_0/kernel",
        (2, 2, 3, 4),
        {"bias": (4,)},
        {"ConvTranspose_0/kernel": MuonDimensionNumbers(2, (0, 1, 3))},
        lambda x: x.transpose(0, 1, 3, 2).reshape(1, 16, 3),
        (2, 2, 1, 4),
    ),
    "local convolution": (
        "ConvLocal_0/kernel",
        (2, 2, 6, 3),
        {"bias": (2, 2, 3)},
        None,
        matrices_last,
        (2, 2, 6, 1),
    ),
    "LoRA (in, rank)": ("up/lora/lora_a", (6, 2), {}, None, matrices_last, (6, 1)),
    "LoRA (rank, out)": ("up/lora/lora_b", (2, 6), {}, None, matrices_last, (1, 6)),
}


@pytest.mark.parametrize("case", STEPS.values(), ids=STEPS)
def test_one_step(case, rng, x64):
    path, shape, beside, numbers, read, state_shape = case
    *modules, name = path.split("/")
    w, g = rng.standard_normal(shape), rng.standard_normal(shape)

    def tree(leaf, others):
        leaf = {name: leaf, **others}
        for key in reversed(modules):
            leaf = {key: leaf}
        return jax.tree.map(jnp.asarray, leaf)

    others = {key: np.ones(size) for key, size in beside.items()}
    tx = jm.nanochat(dtype="float64", matrices=reader(numbers))
    params = tree(w, others)
    state = tx.init(params)
    updates, state = jax.jit(tx.update)(tree(g, others), state, params)
    params = dict(leaves_with_paths(optax.apply_updates(params, updates)))
    (nu,) = (
        leaf
        for where, leaf in leaves_with_paths(state)
        if where.endswith(f"muon/inner_state/2/nu/{path}")
    )
    assert nu.shape == state_shape
    new, means = read(np.asarray(params[path])), read(np.broadcast_to(nu, shape))
    for one_w, one_g, one, mean in zip(read(w), read(g), new, means, strict=True):
        expected, v = step(one_w, one_g)
        np.testing.assert_allclose(one, expected, rtol=0, atol=1e-12)
        np.testing.assert_allclose(mean, np.broadcast_to(v, mean.shape), atol=1e-12)


# --- parameters that are not trained, or that are used twice --------------------------


def muon_paths(tx, params):
    """Paths of the parameters for which a recipe keeps a momentum."""
    state = jax.eval_shape(tx.init, params)
    found = (
        re.search(r"muon/inner_state/0/mu/(.*)", path)
        for path, _ in leaves_with_paths(state)
    )
    return {match[1] for match in found if match}


LORA_RULES = {"lora_a": "muon", "lora_b": "muon", "*": "frozen"}


def test_lora_on_a_frozen_base(rng):
    model = nnx.LoRALinear(6, 8, lora_rank=2, rngs=nnx.Rngs(0))
    tx = jm.nanochat(
        matrices=reader(LORA_RULES),
        groups={"frozen": optax.set_to_zero()},
        dtype="float32",
    )
    before = jax.tree.map(np.array, nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    assert muon_paths(tx, before) == {"lora/lora_a", "lora/lora_b"}
    state = jax.eval_shape(tx.init, before)
    assert not [
        p for p, _ in leaves_with_paths(state) if p.endswith(("kernel", "bias"))
    ]

    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    x = rng.standard_normal((16, 6)).astype(np.float32)
    y = rng.standard_normal((16, 8)).astype(np.float32)

    @nnx.jit
    def step(model, optimizer):
        loss, grads = nnx.value_and_grad(lambda m: jnp.mean((m(x) - y) ** 2))(model)
        optimizer.update(model, grads)
        return loss

    losses = [float(step(model, optimizer)) for _ in range(20)]
    after = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    assert losses[-1] < losses[0] - 0.1
    np.testing.assert_array_equal(after["kernel"], before["kernel"])
    np.testing.assert_array_equal(after["bias"], before["bias"])
    for name in ("lora_a", "lora_b"):
        assert np.abs(after["lora"][name] - before["lora"][name]).max() > 0.01


def test_the_first_step_leaves_lora_a_in_place(rng):
    """Its gradient is zero while lora_b is, and the polar factor of zero is zero."""
    params = {"lora_a": jnp.ones((6, 2)), "lora_b": jnp.zeros((2, 8))}
    grads = {"lora_a": jnp.zeros((6, 2)), "lora_b": jnp.ones((2, 8))}
    tx = jm.nanochat(weight_decay=0.0, dtype="float32")
    updates, _ = tx.update(grads, tx.init(params), params)
    assert not updates["lora_a"].any()
    assert updates["lora_b"].all()


def test_lora_parameters_alone():
    """The optimizer of nnx.LoRAParam holds nothing of the base."""
    model = nnx.LoRALinear(6, 8, lora_rank=2, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, jm.nanochat(dtype="float32"), wrt=nnx.LoRAParam)
    state = [path for path, _ in leaves_with_paths(nnx.state(optimizer))]
    assert not [path for path in state if path.endswith(("kernel", "bias"))]
    before = np.array(model.kernel[...])

    def loss(model):
        return jnp.mean((model(jnp.ones((3, 6))) - 1) ** 2)

    grads = nnx.grad(loss, argnums=nnx.DiffState(0, nnx.LoRAParam))(model)
    optimizer.update(model, grads)
    np.testing.assert_array_equal(model.kernel[...], before)
    assert np.abs(model.lora.lora_b[...]).max() > 0


class Tied(nnx.Module):
    """An embedding and an output layer that share one parameter."""

    def __init__(self, first, second, rngs):
        embed = nnx.Embed(9, 6, rngs=rngs)
        self.mlp = nnx.Linear(6, 6, rngs=rngs)
        setattr(self, first, embed)
        setattr(self, second, nnx.Dict(kernel=embed.embedding))


@pytest.mark.parametrize(
    ("first", "second", "kept", "rules"),
    [
        ("embed", "lm_head", "embed/embedding", None),
        ("wte", "output", "output/kernel", {"output": "adamw"}),
    ],
)
def test_shared_parameters_appear_once(first, second, kept, rules):
    params = nnx.state(Tied(first, second, nnx.Rngs(0)), nnx.Param)
    matrices = jm.read(params, rules=rules)
    labels = dict(leaves_with_paths(matrices.labels(params)))
    assert labels == {kept: "adamw", "mlp/kernel": "muon", "mlp/bias": "adamw"}
    tx = jm.nanochat(matrices=matrices)
    assert "3 parameters" in str(jm.describe(tx, params))
    assert muon_paths(tx, params) == {"mlp/kernel"}


def test_linen_attend_has_one_leaf():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            embed = nn.Embed(9, 6)
            return embed.attend(nn.Dense(6)(embed(tokens)))

    params = Model().init(jax.random.key(0), jnp.zeros((1, 3), int))["params"]
    labels = jm.read(params).labels(params)
    assert labels["Embed_0"] == {"embedding": "adamw"}
    assert labels["Dense_0"]["kernel"] == "muon"


def test_frozen_parameters_keep_no_state():
    params = {"encoder": {"up": jnp.ones((4, 8))}, "decoder": {"up": jnp.ones((4, 8))}}
    tx = jm.nanochat(
        matrices=reader({"encoder": "frozen"}),
        groups={"frozen": optax.set_to_zero()},
    )
    assert muon_paths(tx, params) == {"decoder/up"}
    updates, _ = tx.update(params, tx.init(params), params)
    assert not updates["encoder"]["up"].any()
    assert updates["decoder"]["up"].all()
