"""QK-clip of multi-head latent attention, for kernels with MaxText's names.

In DeepSeek's attention a logit is the sum of two products: with a key for each head
(`nope`), and with one that all heads share (`rope`). With gamma = threshold / largest
logit of a head, Kimi K2 multiplies queries and keys of `nope` by the root of gamma, and
queries of `rope` by gamma. The functions stand alone: copy them.
"""

import optax

import jax_muon as jm


def with_qk_clip(
    tx,
    threshold=100.0,
    query="wq_b",
    *,
    nope=128,
    rope=64,
    value=128,
    latent=512,
    axis=1,
):
    """`axis`: where layers are scanned; `query` is "query" in models without `wq_b`."""
    parts = {
        query: jm.Split({"nope": nope, "rope": rope}),
        "wkv_b": jm.Split({"nope": nope, "value": value}),
        "wkv_a": jm.Split({"latent": latent, "rope": rope}),
    }

    def clip(part, key, balance):
        return jm.clip_qk(
            threshold,
            query=f"{query}/kernel/{part}",
            key=f"{key}/kernel/{part}",
            balance=balance,
            layers_axis=axis,
        )

    both = optax.chain(clip("nope", "wkv_b", 0.5), clip("rope", "wkv_a", 1.0))
    return optax.chain(tx, jm.with_splits(both, parts))
