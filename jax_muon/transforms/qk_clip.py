"""QK-clip: attention logits above a threshold shrink the weights that made them.

Muon's updates have full rank, and with them the logits of single attention heads may
grow without bound. `clip_qk` scales the query and key projections of these heads after
the step. `max_attention_logits` measures the logits.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from jax_muon.base import checks, trees
from jax_muon.base.dtypes import wide, wider
from jax_muon.base.trees import map_leaves

# Paths of queries and of keys, with their biases, by the path of an attention module.
Modules = dict[str, tuple[list[str], list[str]]]


class ClipQkState(NamedTuple):
    """State of `clip_qk`."""

    clipped: Array  # shape=(), dtype=int32: heads whose weights shrank in the last step


def clip_qk(
    threshold: float,
    *,
    query: str = "attn/q",
    key: str = "attn/k",
    balance: float = 0.5,
    layers_axis: int = 0,
) -> optax.GradientTransformationExtraArgs:
    r"""Scale query and key weights of heads whose attention logits are too large.

    The last transform of a chain. With :math:`S_h` the largest logit of head :math:`h`
    in this step's forward pass and the threshold :math:`t`, the logits of the head are
    scaled by :math:`\gamma_h = \min(1, t / S_h)`. Its weights after the update are
    scaled by

    .. math:: \kappa_g = \min_{h \in g} \gamma_h^{1 - \alpha} \quad (W_k)
       \qquad \gamma_h / \kappa_g \quad (W_q)

    where :math:`g` is the group of query heads that share a key head. With one query
    head to a key head both are :math:`\sqrt{\gamma_h}` for :math:`\alpha = 1/2`. In a
    group the key head takes the largest logit and each query head what remains, so the
    logits of heads below the threshold do not change. The updates of groups without a
    head above the threshold stay the same bit for bit.

    A maximum that is not finite clips nothing: `skip_nonfinite` around the chain skips
    that step whole. Inside `optax.MultiSteps` the maxima of its last step count.
    Behind QK-norm clipping changes the weights and not the logits.

    Args:
      threshold: largest logit that is left alone, above 0.
      query: pattern of the query projections, as in `find_matrices`: kernels, with
        their biases.
      key: pattern of the key projections. The components that it shares with `query`
        end the path of the attention module: `blocks/0/attn`.
      balance: :math:`\alpha` in [0, 1], the share of the query. 1 leaves keys alone, so
        only heads above the threshold change.
      layers_axis: first axis of scanned layers in every parameter that the patterns
        match; 1 for MaxText's default.

    Returns:
      A transform whose state counts the heads clipped in the last step. Update needs
      the parameters and `max_logits`: a tree of arrays (\*layers, heads), one for each
      attention module, with the largest logit of every query head over all devices (see
      `max_aux` of `make_train_step`). Its path is the module's, a prefix of it or
      below it, such as what linen's `sow` collects; of one module the array alone will
      do. Kernels have the shape (\*layers, embed, heads * head_dim), or (\*layers,
      embed, heads, head_dim), with layers at `layers_axis`; biases have no embed. The
      number of key heads follows, and divides the number of query heads.

    Raises:
      ValueError: at init, with paths, a pattern that matches nothing, a query or a key
        without the other, a parameter that both match; at update, no `params`, no
        `max_logits`, not one entry for each module, shapes that do not fit.

    Examples:
      >>> params = {"attn": {name: jnp.eye(4) for name in "qkv"}}
      >>> tx = optax.chain(optax.sgd(0.1), clip_qk(100.0))
      >>> grads = optax.tree.zeros_like(params)
      >>> logits = {"attn": jnp.array([400.0, 50.0])}  # two heads of two
      >>> updates, _ = tx.update(grads, tx.init(params), params, max_logits=logits)
      >>> jnp.diag(optax.apply_updates(params, updates)["attn"]["q"]).tolist()
      [0.5, 0.5, 1.0, 1.0]

    References:
      Kimi K2, arXiv 2507.20534, Section 2.1. For its latent attention chain two, of
      which the one for the key that all heads share has `balance=1.0`; if both are in
      one kernel, `with_splits` takes them apart.
    """
    threshold = checks.as_number("threshold", threshold, "above 0")
    balance = checks.as_number("balance", balance, "in [0, 1]")

    def init_fn(params: optax.Params) -> ClipQkState:
        _modules([path for path, _ in trees.leaves_with_paths(params)], query, key)
        return ClipQkState(jnp.zeros([], jnp.int32))

    def update_fn(
        updates: optax.Updates,
        state: ClipQkState,
        params: optax.Params | None = None,
        *,
        max_logits: Any = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, ClipQkState]:
        del state, extra_args
        checks.check_params("clip_qk", params)
        checks.check_gradients(updates, params)
        updates = trees.as_wide_as_params(updates, params)
        weights = dict(trees.leaves_with_paths(params))
        modules = _modules([*weights], query, key)
        factors: dict[str, Array] = {}
        clipped = jnp.zeros([], jnp.int32)
        for name, largest in _by_module(max_logits, list(modules)).items():
            largest = wide(largest)
            queries, keys = (
                {path: weights[path].shape for path in chosen}
                for chosen in modules[name]
            )
            key_heads, spread = _heads(name, queries, keys, largest.shape, layers_axis)
            above = (largest > threshold) & jnp.isfinite(largest)
            clipped += jnp.sum(above, dtype=jnp.int32)
            # Exactly 1 if nothing is clipped, and then so is every factor below.
            gamma = threshold / jnp.where(above, largest, threshold)
            grouped = gamma.reshape(*gamma.shape[:-1], key_heads, -1)
            kappa = jnp.min(grouped, axis=-1, keepdims=True) ** (1 - balance)
            per_query = (grouped / kappa).reshape(gamma.shape)
            factors |= {path: spread(per_query, path) for path in queries}
            factors |= {path: spread(kappa[..., 0], path) for path in keys}

        def clip(path: str, u: Array) -> Array:
            if path not in factors:
                return u
            w = wide(weights[path])
            factor = factors[path].astype(w.dtype) * jnp.ones_like(w)  # sharded as w is
            new = factor * (w + wide(u)) - w
            return jnp.where(factor == 1, u, new.astype(u.dtype))

        return map_leaves(clip, updates), ClipQkState(clipped)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _modules(names: Sequence[str], query: str, key: str) -> Modules:
    """Paths of the query and key projections in each attention module, by its path."""
    patterns = (query, key)
    trees.check_patterns_match("clip_qk", patterns, list(names))
    pairs = zip(*(trees.slashed(x).split("/") for x in patterns), strict=False)
    # The number of components in which the patterns begin alike.
    common = len([*itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)])
    modules: Modules = {}
    for path in names:
        roles = [which for which in (0, 1) if trees.matches(patterns[which], path)]
        if len(roles) > 1:
            raise ValueError(
                f"clip_qk: parameter {path!r} matches both query={query!r} and "
                f"key={key!r}; expected patterns of separate projections"
            )
        for which in roles:
            parts, pattern = trees.slashed(path).split("/"), patterns[which]
            until = (parts[:end] for end in range(1, len(parts) + 1))
            projection = next(x for x in until if trees.ends_with(pattern, "/".join(x)))
            above = projection[: common - len(trees.slashed(pattern).split("/"))]
            if above[-1:] in (["kernel"], ["bias"]):  # split into parts
                above.pop()
            modules.setdefault("/".join(above), ([], []))[which].append(path)
    for name, chosen in modules.items():
        if not all(chosen):
            lacking = f"key={key!r}" if chosen[0] else f"query={query!r}"
            raise ValueError(
                f"clip_qk: module {name!r} has {(chosen[0] + chosen[1])[0]!r} but "
                f"nothing that {lacking} matches; expected patterns that match a query "
                "and a key in each module; there are " + ", ".join(names)
            )
    return modules


def _by_module(max_logits: Any, modules: Sequence[str]) -> dict[str, Array]:
    """The one entry of each module: at its path, at a prefix of it, or below it."""
    flat = trees.leaves_with_paths(max_logits)
    entries = {trees.slashed(path): logits for path, logits in flat}
    matching = {
        name: [path for path in entries if _within(name, path) or _within(path, name)]
        for name in modules
    }
    matched = sorted(itertools.chain(*matching.values()))
    if matched != sorted(entries) or any(len(x) != 1 for x in matching.values()):
        shapes = [f"{path!r} of shape {jnp.shape(x)}" for path, x in entries.items()]
        raise ValueError(
            f"max_logits of tx.update has entries at {', '.join(shapes) or 'no path'}; "
            f"expected one for each attention module: {', '.join(map(repr, modules))}"
        )
    return {name: jnp.asarray(entries[path]) for name, (path,) in matching.items()}


def _within(path: str, parent: str) -> bool:
    return not parent or f"{path}/".startswith(f"{parent}/")


def _heads(
    name: str,
    queries: dict[str, tuple[int, ...]],
    keys: dict[str, tuple[int, ...]],
    logits: tuple[int, ...],
    start: int,
) -> tuple[int, Callable[[Float[Array, "*layers heads"], str], Array]]:
    """The number of key heads, and a function that broadcasts a number for each head.

    `logits` is the shape of the maxima; layers `start` at this axis of a parameter.

    With maxima (6, 12) of 6 layers, queries (6, 768, 12, 64) and keys (6, 768, 256):
    heads of 64, 4 key heads, and factors (6, 12) and (6, 4) of heads that become
    (6, 1, 12, 64) and (6, 1, 256).
    """
    layers, heads = logits[:-1], logits[-1] if logits else 0
    end = start + len(layers)
    shapes = queries | keys
    outputs = {
        path: (*shape[:start], *shape[end:])[0 if _is_bias(path) else 1 :]
        for path, shape in shapes.items()
    }
    sizes = [math.prod(outputs[next(iter(kernels))]) for kernels in (queries, keys)]
    head_dim = sizes[0] // max(heads, 1)
    key_heads = sizes[1] // max(head_dim, 1)
    for path, shape in shapes.items():
        count = heads if path in queries else key_heads
        fits = outputs[path] in ((count * head_dim,), (count, head_dim))
        if shape[start:end] != layers or not fits or heads % count:
            raise ValueError(
                f"clip_qk: parameter {path!r} of shape {shape} does not fit max_logits "
                f"of {name!r} of shape {logits}; expected max_logits (*layers, heads) "
                "and kernels (*layers, embed, heads * head_dim) or (*layers, embed, "
                f"heads, head_dim), biases without embed, with the layers {layers} "
                f"from axis {start} on, one head_dim, and key heads that divide the "
                "query heads"
            )

    def spread(factor: Float[Array, "*layers heads"], path: str) -> Array:
        inputs = [] if _is_bias(path) else [1]
        factor = jnp.repeat(factor, head_dim, axis=-1)
        factor = factor.reshape(*layers, *inputs, *outputs[path])
        return jnp.moveaxis(factor, range(len(layers)), range(start, end))

    return key_heads, spread


def _is_bias(path: str) -> bool:
    """True for a bias, or a part of one that `with_splits` cut out."""
    parent, _, name = trees.slashed(path).rpartition("/")
    is_part = f"/{parent}".endswith("/bias")
    return is_part or name == "b" or "bias" in name.lower()


def max_attention_logits(
    q: Float[Array, "batch time heads d"],
    k: Float[Array, "batch key_time key_heads d"],
    *,
    causal: bool,
    scale: float | None = None,
    block_size: int = 128,
) -> Float[Array, " heads"]:
    """Largest attention logit of every head, for `clip_qk`, in blocks.

    Only the logits of one block of queries and one of keys exist at a time. No gradient
    flows.

    Args:
      q: queries, as they meet the keys: after rotary positions.
      k: keys. With fewer heads than `q`, consecutive query heads share one.
      causal: True if a query sees no later keys, as in a decoder; time and key_time
        are then equal. False for encoders and cross-attention.
      scale: factor of the logits; None for d^-0.5.
      block_size: of queries and of keys.

    Returns:
      The maximum over batch, queries and the keys they see, in float32.

    Examples:
      >>> q = jnp.ones((1, 5, 2, 4))  # batch, time, heads, head_dim
      >>> jm.max_attention_logits(q, 3.0 * q, causal=True).tolist()
      [6.0, 6.0]
    """
    checks.check_count("block_size", block_size)
    batch, time, heads, d = q.shape
    _, key_time, key_heads, _ = k.shape
    same = q.shape[::3] == k.shape[::3] and (time == key_time or not causal)
    if not same or heads % key_heads:
        raise ValueError(
            f"q of shape {q.shape} and k of shape {k.shape}; expected the same batch "
            "and d, the same time or causal=False, and key heads that divide the heads"
        )
    scale = d**-0.5 if scale is None else scale
    grouped = q.reshape(batch, time, key_heads, heads // key_heads, d)
    grouped, k = jax.lax.stop_gradient((grouped, k))
    rows, columns = min(block_size, time), min(block_size, key_time)

    blocks = [
        (i, j)
        for i in range(0, time, rows)
        for j in range(0, key_time, columns)
        if not causal or j < i + rows
    ]

    def largest(block: Array) -> Array:
        # JAX moves a last block back into the array: a maximum may see a logit twice.
        i, j = block
        logits = scale * jnp.einsum(
            "bqngd,bknd->bngqk",
            jax.lax.dynamic_slice_in_dim(grouped, i, rows, axis=1),
            jax.lax.dynamic_slice_in_dim(k, j, columns, axis=1),
            preferred_element_type=wider(q.dtype, jnp.float32),
        )
        logits = logits.reshape(batch, heads, rows, columns)
        if causal:
            times = jnp.arange(time)
            queries = jax.lax.dynamic_slice_in_dim(times, i, rows)[:, None]
            keys = jax.lax.dynamic_slice_in_dim(times, j, columns)[None]
            logits = jnp.where((keys > queries)[None, None], -jnp.inf, logits)
        return jnp.max(logits, axis=(0, 2, 3)).astype(jnp.float32)

    return jnp.max(jax.lax.map(largest, jnp.array(blocks)), axis=0)
