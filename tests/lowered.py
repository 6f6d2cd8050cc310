"""What a function would run on a platform that is not here: read from StableHLO."""

import re

import jax


def depths_on(platform, function, *args):
    """Depths of the stacks (k, m, n) whose `jnp.tan` is taken on a platform."""
    text = (
        jax.jit(function).trace(*args).lower(lowering_platforms=(platform,)).as_text()
    )
    return [int(depth) for depth in re.findall(r"stablehlo.tan .*tensor<(\d+)x", text)]
