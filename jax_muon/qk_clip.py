"""QK-clip: attention logits above a threshold shrink the weights that made them.

Muon's updates have full rank, and with them the logits of single attention heads may
grow without bound. `clip_qk` scales the query and key projections of these heads after
the step. `max_logits.py` measures the logits.
"""

import itertools
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from jax_muon import checks, paths
from jax_muon.dtypes import wide
from jax_muon.mesh import array_types


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

    A maximum that is not finite clips nothing: the gradients of such a step are not
    finite either, and `skip_nonfinite(optax.chain(..., clip_qk(...)))` skips it whole.
    Inside `optax.MultiSteps` the maxima of its last step count. With QK-norm between
    projection and logits, clipping changes the weights and not the logits.

    Args:
      threshold: largest logit that is left alone, above 0.
      query: pattern of the query projections, as in `read`: kernels, with their
        biases. `attn/q` matches `blocks/0/attn/q/kernel` and `blocks/0/attn/q/bias`.
      key: pattern of the key projections. The components that it shares with `query`
        end the path of the attention module: `blocks/0/attn`.
      balance: :math:`\alpha` in [0, 1], the share of the query. 1 leaves keys alone, so
        only heads above the threshold change.
      layers_axis: first axis of scanned layers in every parameter that the patterns
        match; 1 for MaxText's default.

    Returns:
      An `optax.GradientTransformationExtraArgs` whose state counts the heads clipped in
      the last step. Its update needs the parameters before the step, and the extra
      argument `max_logits`: a tree of arrays (\*layers, heads), one for each attention
      module, with the largest logit of every query head. The path of an array is that
      of its module, or a prefix of it, or continues below it: `{"blocks/0/attn": s0,
      "blocks/1/attn": s1}`, `{"blocks/0": ...}` or what linen's `sow` collects. A
      single array is enough for one module, such as scanned layers.

      Kernels have the shape (\*layers, embed, heads * head_dim), or (\*layers, embed,
      heads, head_dim), with layers at `layers_axis`; a parameter called bias has no
      embed. The number of key heads follows, and divides the number of query heads.

      Inside shard_map `max_logits` is the maximum over all devices: see `max_aux` of
      `make_train_step`.

    Raises:
      ValueError: threshold not above 0, balance outside [0, 1], patterns that do not
        differ; at init, with paths, a pattern that matches nothing, a query without its
        key or a key without its query, a parameter that both match; while tracing an
        update, no `params`, no `max_logits`, entries for no module or for several,
        modules without an entry or with several, shapes that do not fit.

    Examples:
      >>> params = {"attn": {name: jnp.eye(4) for name in "qkv"}}
      >>> tx = optax.chain(optax.sgd(0.1), clip_qk(100.0))
      >>> grads = jax.tree.map(jnp.zeros_like, params)
      >>> logits = {"attn": jnp.array([400.0, 50.0])}  # two heads of two
      >>> updates, _ = tx.update(grads, tx.init(params), params, max_logits=logits)
      >>> jnp.diag(optax.apply_updates(params, updates)["attn"]["q"]).tolist()
      [0.5, 0.5, 1.0, 1.0]

    References:
      Kimi K2, arXiv 2507.20534, Section 2.1. There a query has a part for a key of its
      own and one for a key that all heads share and that is left alone: chain
      `clip_qk(t, query="attn/q", key="attn/k")` and `clip_qk(t, query="attn/q_rotary",
      key="attn/k_rotary", balance=1.0)`, which take the same `max_logits`. If both
      parts are in one kernel, `with_splits` takes them apart; see docs/frameworks.md.
    """
    threshold = checks.number("threshold", threshold, "above 0")
    balance = checks.number("balance", balance, "in [0, 1]")
    checks.count("layers_axis", layers_axis, least=0)
    checks.kind("query", query, str, "a path pattern")
    checks.kind("key", key, str, "a path pattern")
    if query == key:
        checks.refuse("key", key, "another pattern than that of the query")

    def init_fn(params: optax.Params) -> ClipQkState:
        checks.arrays("params", params)
        _modules([path for path, _ in paths.leaves_with_paths(params)], query, key)
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
        if params is None or max_logits is None:
            missing = "params" if params is None else "max_logits"
            raise ValueError(
                "clip_qk needs the parameters and the largest logits of this step: "
                "tx.update(updates, state, params, max_logits=max_logits), got "
                f"{missing}=None"
            )
        checks.gradients(updates, params)
        weights = dict(paths.leaves_with_paths(params))
        modules = _modules([p for p, _ in paths.leaves_with_paths(updates)], query, key)
        factors: dict[str, Array] = {}
        clipped = jnp.zeros([], jnp.int32)
        for name, largest in _by_module(max_logits, modules).items():
            module, largest = modules[name], wide(array_types.replicated(largest))
            shapes = {p: weights[p].shape for p in module.query + module.key}
            heads = _heads(name, module, shapes, largest.shape, layers_axis)
            above = (largest > threshold) & jnp.isfinite(largest)
            clipped += jnp.sum(above, dtype=jnp.int32)
            # Exactly one if nothing is clipped, and so are its powers and quotients.
            gamma = threshold / jnp.where(above, largest, threshold)
            grouped = gamma.reshape(*gamma.shape[:-1], heads.key_heads, -1)
            kappa = jnp.min(grouped, axis=-1, keepdims=True) ** (1 - balance)
            per_query = (grouped / kappa).reshape(gamma.shape)
            for path in module.query:
                factors[path] = heads.spread(per_query, path)
            for path in module.key:
                factors[path] = heads.spread(kappa[..., 0], path)

        def clip(key_path: tuple[Any, ...], u: Array) -> Array:
            path = paths.path_string(key_path)
            if path not in factors:
                return u
            w = wide(weights[path])
            factor = factors[path].astype(w.dtype) * jnp.ones_like(w)  # sharded as w is
            new = factor * (w + wide(u)) - w
            return jnp.where(factor == 1, u, new.astype(u.dtype))

        updates = jax.tree_util.tree_map_with_path(clip, updates)
        return updates, ClipQkState(clipped)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


class _Module(NamedTuple):
    """Paths of the parameters that make queries and keys in one attention module."""

    query: list[str]
    key: list[str]


def _modules(names: list[str], query: str, key: str) -> dict[str, _Module]:
    """Attention modules by their path, with what the patterns match in each."""
    paths.check_patterns_match("clip_qk", (query, key), names)
    pairs = zip(query.split("/"), key.split("/"), strict=False)
    common = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))
    modules: dict[str, _Module] = {}
    for path in names:
        found = [paths.matched_prefix(pattern, path) for pattern in (query, key)]
        if None not in found:
            raise ValueError(
                f"clip_qk: parameter {path!r} matches both query={query!r} and "
                f"key={key!r}; expected patterns of separate projections"
            )
        for field, pattern, projection in zip((0, 1), (query, key), found, strict=True):
            if projection is not None:
                inside = len(pattern.split("/")) - common
                above = projection.split("/")[: -inside or None]
                if above[-1:] in (["kernel"], ["bias"]):  # of which this is a part
                    above.pop()
                module = modules.setdefault("/".join(above), _Module([], []))
                module[field].append(path)
    for name, module in modules.items():
        if not module.query or not module.key:
            here, pattern = ("key", key) if module.query else ("query", query)
            raise ValueError(
                f"clip_qk: module {name!r} has {(module.query + module.key)[0]!r} but "
                f"nothing that {here}={pattern!r} matches; expected patterns "
                "that match a query and a key in each module; there are "
                + ", ".join(names)
            )
    return modules


def _by_module(max_logits: Any, modules: Iterable[str]) -> dict[str, Array]:
    """The one entry of each module: its path or a part of it, or a path below it."""
    entries = paths.leaves_with_paths(max_logits)
    found: dict[str, tuple[str, Array]] = {}
    for path, leaf in entries:
        names = [name for name in modules if _within(name, path) or _within(path, name)]
        if len(names) != 1 or names[0] in found:
            raise ValueError(
                f"max_logits has an entry at {path!r} of shape {jnp.shape(leaf)} for "
                + (", ".join(map(repr, names)) or "no attention module")
                + (f", as has {found[names[0]][0]!r}" if len(names) == 1 else "")
                + "; expected one entry for each of "
                + ", ".join(map(repr, modules))
            )
        found[names[0]] = path, jnp.asarray(leaf)
    for name in modules:
        if name not in found:
            raise ValueError(
                f"max_logits has no entry for {name!r}; there are "
                + (", ".join(repr(path) for path, _ in entries) or "none")
            )
    return {name: leaf for name, (_, leaf) in found.items()}


def _within(path: str, parent: str) -> bool:
    return not parent or f"{path}/".startswith(f"{parent}/")


class _Heads(NamedTuple):
    """Where the heads of a module are in its parameters."""

    layers: int  # number of axes of layers
    start: int  # the first of them
    key_heads: int
    head_dim: int
    outputs: dict[str, tuple[int, ...]]  # by path, (heads * head_dim,) or both apart

    def spread(
        self, factor: Float[Array, "*layers heads"], path: str
    ) -> Float[Array, "..."]:
        """A number for each head, broadcast against a parameter."""
        if len(self.outputs[path]) == 2:
            factor = factor[..., None]
        else:
            factor = jnp.repeat(factor, self.head_dim, axis=-1)
        if not _is_bias(path):
            factor = jnp.expand_dims(factor, self.layers)
        layers = range(self.layers)
        return jnp.moveaxis(factor, layers, [self.start + axis for axis in layers])


def _heads(
    name: str,
    module: _Module,
    shapes: dict[str, tuple[int, ...]],
    logits: tuple[int, ...],
    start: int,
) -> _Heads:
    """How parameters hold their heads, given the shape of the module's maxima."""

    def misfit(path: str, expected: str) -> ValueError:
        return ValueError(
            f"clip_qk: parameter {path!r} of shape {shapes[path]} does not fit "
            f"max_logits of {name!r} of shape {logits}; expected {expected}"
        )

    if not logits:
        raise misfit(module.query[0], "max_logits of shape (*layers, heads)")
    layers, heads = logits[:-1], logits[-1]
    end = start + len(layers)
    outputs = {}
    for path, shape in shapes.items():
        inputs = [] if _is_bias(path) else ["embed"]
        outputs[path] = (*shape[:start], *shape[end:])[len(inputs) :]
        fits = shape[start:end] == layers and len(outputs[path]) in (1, 2)
        if not fits or 0 in shape:
            ways = []
            for apart in (["heads * head_dim"], ["heads", "head_dim"]):
                axes = inputs + apart
                axes[start:start] = map(str, layers)
                ways.append(f"({', '.join(axes)})")
            raise misfit(path, " or ".join(ways))
    dims: list[int] = []
    for path in module.query:
        first, *head_dim = outputs[path]
        if not heads or (first != heads if head_dim else first % heads):
            raise misfit(path, f"a query of {heads} heads")
        dims += head_dim or [first // heads]
        if dims[-1] != dims[0]:
            raise misfit(path, f"heads of {dims[0]}, as in {module.query[0]!r}")
    counts: list[int] = []
    for path in module.key:
        first, *head_dim = outputs[path]
        if head_dim != dims[:1] if head_dim else first % dims[0]:
            raise misfit(path, f"key heads of {dims[0]}, as in {module.query[0]!r}")
        counts.append(first if head_dim else first // dims[0])
        if counts[-1] != counts[0] or heads % counts[0]:
            raise misfit(path, f"a number of key heads that divides {heads}")
    return _Heads(len(layers), start, counts[0], dims[0], outputs)


def _is_bias(path: str) -> bool:
    """True for a bias, or a part of one that `with_splits` cut out."""
    parent, _, name = path.rpartition("/")
    is_part = f"/{parent}".endswith("/bias")
    return is_part or name == "b" or "bias" in paths.words(name)
