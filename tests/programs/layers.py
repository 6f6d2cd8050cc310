"""How layers follow each other, their names, and losses of several networks."""

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec as P

from tests.programs.parts import (
    BATCH,
    EMBED_AND_HEAD,
    HEADS,
    HIDDEN,
    LENGTH,
    MODEL,
    TOKENS,
    UP_DOWN,
    VOCAB,
    WIDTH,
    Leaf,
    attend,
    between,
    conv,
    cross_entropy,
    floats,
    integers,
    mlp,
    program,
    rms,
    squared_error,
    up_down,
    widths,
    with_attention,
)

LAYERS = 8


STACK = {
    "norm": Leaf("adamw", LAYERS, WIDTH),
    "up": Leaf("bio", LAYERS, WIDTH, HIDDEN),
    "down": Leaf("bio", LAYERS, HIDDEN, WIDTH),
}


def body(x, layer):
    """A residual MLP, as the body of a scan."""
    return x + up_down(rms(x) * layer["norm"], layer), None


@between(layers=STACK)
def scan_over_blocks_of_layers(x, p):
    """Eight layers are cut into two blocks of four: only blocks are checkpointed."""
    blocks = jax.tree.map(lambda w: w.reshape(2, 4, *w.shape[1:]), p["layers"])
    block = jax.checkpoint(lambda x, layers: lax.scan(body, x, layers))
    return rms(lax.scan(block, x, blocks)[0])


@between(layers=STACK)
def scan_over_numbers(x, p):
    """The scan counts, and its body picks the layer."""

    def step(x, number):
        return body(x, jax.tree.map(lambda w: w[number], p["layers"]))

    return rms(lax.scan(step, x, jnp.arange(LAYERS))[0])


@between(
    up=Leaf("ibo", WIDTH, LAYERS, HIDDEN),
    down=Leaf("ibo", HIDDEN, LAYERS, WIDTH),
)
def scan_along_the_second_axis(x, p):
    """As MaxText's `param_scan_axis=1`, by index."""

    def step(number, x):
        layer = {
            name: lax.dynamic_index_in_dim(p[name], number, 1, False)
            for name in ("up", "down")
        }
        return x + up_down(x, layer)

    return lax.fori_loop(0, LAYERS, step, x)


@program(floats(BATCH, WIDTH), **UP_DOWN, out=Leaf("head", WIDTH, 3))
def scan_over_parts_of_a_matrix(p, x):
    """A hidden axis in four chunks, whose results are added: these are no layers."""
    chunks = p["up"].reshape(WIDTH, 4, 10).swapaxes(0, 1)
    parts = chunks, p["down"].reshape(4, 10, WIDTH)
    y, _ = lax.scan(lambda y, w: (y + jnp.tanh(x @ w[0]) @ w[1], None), x, parts)
    return jnp.mean(y @ p["out"])


@program(
    TOKENS,
    floats(1),
    **EMBED_AND_HEAD,
    **dict.fromkeys("abc", Leaf("io", WIDTH, WIDTH)),
)
def loops_and_conditions(p, ids, flag):
    """A layer in each branch of a `cond`, and one that a `while` repeats."""
    x = lax.cond(
        flag[0] > 0,
        lambda x: x @ p["a"],
        lambda x: jnp.tanh(x @ p["b"]),
        p["emb"][ids],
    )

    def step(carry):
        count, x = carry
        return count + 1, rms(x + x @ p["c"])

    _, x = lax.while_loop(lambda carry: carry[0] < 3, step, (0, x))
    return cross_entropy(x @ p["head"], ids)


@between(f=dict.fromkeys("zx", Leaf("io", WIDTH, WIDTH)))
def deep_equilibrium(x, p):
    """A fixed point whose gradient is found by a second loop."""

    def f(p, z, x):
        return jnp.tanh(z @ p["f"]["z"] + x @ p["f"]["x"])

    @jax.custom_vjp
    def solve(p, x):
        step = lambda carry: (carry[0] + 1, f(p, carry[1], x))  # noqa: E731
        return lax.while_loop(lambda c: c[0] < 20, step, (0, jnp.zeros_like(x)))[1]

    def forward(p, x):
        z = solve(p, x)
        return z, (p, x, z)

    def backward(saved, g):
        p, x, z = saved
        _, pull = jax.vjp(lambda z: f(p, z, x), z)
        u = lax.fori_loop(0, 20, lambda _, u: g + pull(u)[0], g)
        return jax.vjp(lambda p, x: f(p, z, x), p, x)[1](u)

    solve.defvjp(forward, backward)
    return solve(p, x)


@program(integers(2 * BATCH, LENGTH), **MODEL, **UP_DOWN)
def loss_in_shard_map(p, ids):
    """Parameters are sharded over devices and gathered inside the loss (ZeRO-3)."""
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.sharding.AbstractMesh((2,), ("x",), axis_types=auto)

    def on_one_device(p, ids):
        p = jax.tree.map(lambda w: lax.all_gather(w, "x", axis=0, tiled=True), p)
        return lax.pmean(with_attention(up_down)(p, ids), "x")

    specs = {"mesh": mesh, "in_specs": (P("x"), P("x")), "out_specs": P()}
    return jax.shard_map(on_one_device, **specs, check_vma=False)(p, ids)


FOURIER = dict.fromkeys(("real", "imag"), Leaf("adamw", 5, WIDTH, WIDTH))


FOURIER |= {"w": Leaf("io", WIDTH, WIDTH)}


@program(
    floats(BATCH, LENGTH, 2),
    floats(BATCH, LENGTH, 3),
    lift=Leaf("io or adamw", 2, WIDTH),
    layers=[FOURIER, FOURIER],
    out=Leaf("head", WIDTH, 3),
)
def fourier_neural_operator(p, x, y):
    """A complex matrix for each of the lowest frequencies."""
    h = x @ p["lift"]
    for layer in p["layers"]:
        spectrum = jnp.fft.rfft(h, axis=1)[:, :5]
        kernel = layer["real"] + 1j * layer["imag"]
        spectrum = jnp.einsum("bkc,kco->bko", spectrum, kernel)
        filtered = jnp.fft.irfft(spectrum, n=LENGTH, axis=1)
        h = jax.nn.gelu(filtered + h @ layer["w"])
    return squared_error(h @ p["out"], y)


# --- names ----------------------------------------------------------------------------

LLAMA_LAYER = {
    "input_layernorm": Leaf("adamw", 64),
    "self_attn.q_proj": Leaf("oi, query", 64, 64),
    "self_attn.k_proj": Leaf("oi, key", 64, 64),
    "self_attn.v_proj": Leaf("oi, value", 64, 64),
    "self_attn.o_proj": Leaf("oi", 64, 64),
    "post_attention_layernorm": Leaf("adamw", 64),
    "mlp.gate_proj": Leaf("oi", 96, 64),
    "mlp.up_proj": Leaf("oi", 96, 64),
    "mlp.down_proj": Leaf("oi", 64, 96),
}


LLAMA = {
    "model.embed_tokens.weight": Leaf("embedding", VOCAB, 64),
    "model.norm.weight": Leaf("adamw", 64),
    "lm_head.weight": Leaf("head", VOCAB, 64),
    **{
        f"model.layers.{layer}.{name}.weight": x
        for layer in range(LAYERS)
        for name, x in LLAMA_LAYER.items()
    },
}


@program(TOKENS, **LLAMA)
def pytorch_checkpoint(p, ids):
    """Llama with dotted names and matrices (out, in), as torchax has it."""

    def norm(x, name):
        return rms(x) * p[f"{name}.weight"]

    def dense(x, name):
        return x @ p[f"{name}.weight"].T

    x = p["model.embed_tokens.weight"][ids]
    for number in range(LAYERS):
        layer = f"model.layers.{number}"
        h = norm(x, f"{layer}.input_layernorm")
        q, k, v = (
            dense(h, f"{layer}.self_attn.{n}_proj").reshape(BATCH, LENGTH, HEADS, -1)
            for n in "qkv"
        )
        y = attend(q, k, v).reshape(x.shape)
        x = x + dense(y, f"{layer}.self_attn.o_proj")
        h = norm(x, f"{layer}.post_attention_layernorm")
        gate = jax.nn.silu(dense(h, f"{layer}.mlp.gate_proj"))
        up = gate * dense(h, f"{layer}.mlp.up_proj")
        x = x + dense(up, f"{layer}.mlp.down_proj")
    return cross_entropy(dense(norm(x, "model.norm"), "lm_head"), ids)


@program(TOKENS, emb=EMBED_AND_HEAD["emb"], layers=[UP_DOWN, UP_DOWN])
def encoder_without_a_head(p, ids):
    """The last product is in one of the layers, and no head."""
    x = p["emb"][ids]
    for layer in p["layers"]:
        x = jnp.tanh(x @ layer["up"]) @ layer["down"]
    return jnp.mean(x)


@between(
    inputs=Leaf("io", WIDTH, 2 * HIDDEN),
    window=Leaf("adamw", 4, HIDDEN),
    select=Leaf("io", HIDDEN, 3 + 2 * 5),
    step=Leaf("io", 3, HIDDEN),
    log_a=Leaf("adamw", HIDDEN, 5),
    skip=Leaf("adamw", HIDDEN),
    outputs=Leaf("io", HIDDEN, WIDTH),
)
def selective_state_space(x, p):
    """Mamba: data chooses what its states of five numbers a channel keep."""

    def per_time(y):
        return jnp.swapaxes(y, 0, 1)

    hidden, gate = jnp.split(rms(x) @ p["inputs"], 2, -1)
    before = jnp.pad(hidden, ((0, 0), (3, 0), (0, 0)))
    taps = [before[:, i : i + LENGTH] * p["window"][i] for i in range(4)]
    hidden = jax.nn.silu(sum(taps))
    step, b, c = jnp.split(hidden @ p["select"], [3, 8], -1)
    step = jax.nn.softplus(step @ p["step"])
    rates = -jnp.exp(p["log_a"])

    def turn(state, now):
        y, step, b, c = now
        kept = jnp.exp(step[..., None] * rates) * state
        state = kept + (step * y)[..., None] * b[:, None]
        return state, jnp.einsum("bdn,bn->bd", state, c)

    rows = [per_time(y) for y in (hidden, step, b, c)]
    states = jnp.zeros((x.shape[0], HIDDEN, 5))
    y = per_time(lax.scan(turn, states, rows)[1]) + hidden * p["skip"]
    return x + (y * jax.nn.silu(gate)) @ p["outputs"]


# --- gradients inside the loss --------------------------------------------------------

IMAGES = floats(4, BATCH, 8, 8, 3), integers(4, BATCH)


@program(
    *IMAGES,
    *IMAGES,
    first=Leaf("iiio or adamw", 3, 3, 3, 10),
    second=Leaf("iiio", 3, 3, 10, 14),
    third=Leaf("iiio", 4, 4, 14, 18),
    head=Leaf("head", 18, 7),
    bias=Leaf("adamw", 7),
)
def maml_with_convolutions(p, xs, ys, queries, labels):
    """One inner step for each task of a vmapped batch of tasks, with a bias."""

    def error(p, x, y):
        for name in ("first", "second"):
            x = jax.nn.leaky_relu(conv(x, p[name]))
        x = jnp.tanh(conv(x, p["third"])).mean((1, 2))
        return cross_entropy(x @ p["head"] + p["bias"], y)

    def task(x, y, query, label):
        grads = jax.grad(error)(p, x, y)
        adapted = optax.apply_updates(p, jax.tree.map(lambda g: -0.1 * g, grads))
        return error(adapted, query, label)

    return jax.vmap(task)(xs, ys, queries, labels).mean()


# --- nothing but derivatives ----------------------------------------------------------


@program(*[floats(BATCH, 2)] * 4, **widths(4, WIDTH, HIDDEN, 1, last="adamw"))
def hamiltonian_network(p, q, momentum, dq, dp):
    """The loss compares the gradients of a scalar with slopes of the data."""

    def hamiltonian(q, momentum):
        return mlp(p, jnp.concatenate([q, momentum]), jnp.tanh)[0]

    slopes = jax.vmap(jax.grad(hamiltonian, (0, 1)))(q, momentum)
    return squared_error(slopes[1], dq) + squared_error(-slopes[0], dp)


# --- several networks -----------------------------------------------------------------


@program(
    floats(BATCH, 7),
    floats(BATCH, 2),
    floats(BATCH, 2),
    floats(BATCH),
    actor=widths(7, WIDTH, HIDDEN, 4, last="head?"),
    critics={
        "w1": Leaf("bio or adamw", 2, 9, WIDTH),
        "w2": Leaf("bio", 2, WIDTH, HIDDEN),
        "w3": Leaf("adamw", 2, HIDDEN, 1),
    },
    log_alpha=Leaf("adamw"),
)
def soft_actor_critic(p, x, noise, actions, targets):
    """The actor's outputs go through the critics: its last layer is no last product."""
    mean, log_std = jnp.split(mlp(p["actor"], x, jax.nn.relu), 2, -1)
    action = jnp.tanh(mean + jnp.exp(log_std) * noise)

    def q(w, actions):
        return mlp(w, jnp.concatenate([x, actions], -1), jax.nn.relu)

    entropy = jnp.sum(noise**2 / 2 + log_std, -1)
    alpha = lax.stop_gradient(jnp.exp(p["log_alpha"]))
    frozen, both = lax.stop_gradient(p["critics"]), jnp.stack([action, action])
    lowest = jax.vmap(q)(frozen, both).min(0)
    actor = jnp.mean(-alpha * entropy - lowest[:, 0])
    critics = jax.vmap(q, (0, None))(p["critics"], actions)
    critic = squared_error(critics[..., 0], targets)
    return actor + critic + p["log_alpha"] * lax.stop_gradient(entropy).mean()


# --- inputs that no argument brings ---------------------------------------------------


@program(
    floats(8, 8, 3),
    **widths(2, WIDTH, HIDDEN, 3, first="io"),
    b1=Leaf("adamw", WIDTH),
    b2=Leaf("adamw", HIDDEN),
)
def image_by_its_coordinates(p, image):
    """SIREN on the grid of all pixels; only the colors are data."""
    lines = jnp.linspace(-1, 1, 8)
    grid = jnp.stack(jnp.meshgrid(lines, lines, indexing="ij"), -1).reshape(-1, 2)
    x = jnp.sin(30 * (grid @ p["w1"] + p["b1"]))
    x = jnp.sin(x @ p["w2"] + p["b2"])
    return squared_error((x @ p["w3"]).reshape(image.shape), image)
