"""The largest attention logits, for attention that does not keep its logits."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jax_muon import checks
from jax_muon.dtypes import wider


def max_attention_logits(
    q: Float[Array, "batch time heads d"],
    k: Float[Array, "batch key_time key_heads d"],
    *,
    scale: float | None = None,
    causal: bool = True,
    mask: Bool[Array, "#batch #heads #time #key_time"] | None = None,
    block_size: int = 128,
) -> Float[Array, " heads"]:
    """Largest attention logit of every head, for `clip_qk`, in blocks.

    Only the logits of one block of queries and one of keys exist at a time. Causal
    attention skips the blocks that it cannot see. No gradient flows.

    Args:
      q: queries, as they meet the keys: after rotary positions.
      k: keys. With fewer heads than `q`, consecutive query heads share one.
      scale: factor of the logits; None for d^-0.5.
      causal: whether a query sees no later keys; time and key_time are then equal.
      mask: True where a query sees a key; None for everywhere. Sizes may be 1.
      block_size: of queries and of keys.

    Returns:
      The maximum over batch, queries and the keys they see, in float32; -inf for a head
      that sees nothing.

    Raises:
      ValueError: shapes that do not fit, a mask of another dtype, block_size below 1.

    Examples:
      >>> import jax.numpy as jnp
      >>> import jax_muon as jm
      >>> q = jnp.ones((1, 5, 2, 4))  # batch, time, heads, head_dim
      >>> jm.max_attention_logits(q, 3.0 * q).tolist()
      [6.0, 6.0]
    """
    checks.count("block_size", block_size)
    checks.flag("causal", causal)
    if (
        q.ndim != 4
        or k.ndim != 4
        or q.shape[::3] != k.shape[::3]
        or q.shape[2] % k.shape[2]
        or (causal and q.shape[1] != k.shape[1])
    ):
        times = "the same time" if causal else "key_time"
        raise ValueError(
            f"q of shape {q.shape} and k of shape {k.shape}; expected (batch, time, "
            f"heads, d) and (batch, {times}, key_heads, d), with key_heads that divide "
            "heads"
        )
    batch, time, heads, d = q.shape
    _, key_time, key_heads, _ = k.shape
    full = (batch, heads, time, key_time)
    if mask is not None and (
        not jnp.issubdtype(mask.dtype, jnp.bool_)
        or mask.ndim != 4
        or any(m not in (1, n) for m, n in zip(mask.shape, full, strict=True))
    ):
        raise ValueError(
            f"mask is {mask.dtype} of shape {mask.shape}; expected booleans of shape "
            f"{full}, or 1 for any of these"
        )
    scale = d**-0.5 if scale is None else checks.number("scale", scale, "")
    grouped = q.reshape(batch, time, key_heads, heads // key_heads, d)
    grouped, k = jax.lax.stop_gradient((grouped, k))
    rows, columns = min(block_size, time), min(block_size, key_time)

    def starts(size: int, block: int) -> list[int]:
        # The last block overlaps the one before: a maximum may see a logit twice.
        return [min(i, size - block) for i in range(0, size, block)]

    blocks = [
        (i, j)
        for i in starts(time, rows)
        for j in starts(key_time, columns)
        if not causal or j < i + rows
    ]

    def largest(block: Array) -> Array:
        i, j = block
        logits = scale * jnp.einsum(
            "bqngd,bknd->bngqk",
            jax.lax.dynamic_slice_in_dim(grouped, i, rows, axis=1),
            jax.lax.dynamic_slice_in_dim(k, j, columns, axis=1),
            preferred_element_type=wider(q.dtype, jnp.float32),
        )
        logits = logits.reshape(batch, heads, rows, columns)
        if causal:
            ahead = (j + jnp.arange(columns))[None] > (i + jnp.arange(rows))[:, None]
            logits = jnp.where(ahead[None, None], -jnp.inf, logits)
        if mask is not None:
            # An axis of size 1 is sliced at 0, whatever the start.
            sizes = [min(pair) for pair in zip(mask.shape, logits.shape, strict=True)]
            seen = jax.lax.dynamic_slice(mask, (0, 0, i, j), sizes)
            logits = jnp.where(seen, logits, -jnp.inf)
        return jnp.max(logits, axis=(0, 2, 3)).astype(jnp.float32)

    return jnp.max(jax.lax.map(largest, jnp.array(blocks)), axis=0)
