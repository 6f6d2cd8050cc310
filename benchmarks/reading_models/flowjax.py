"""flowjax's normalizing flows, by the density of data."""

import equinox as eqx
import jax
import jax.numpy as jnp
from flowjax import flows
from flowjax.distributions import Normal
from paramax import unwrap

from benchmarks.reading_models import Model
from benchmarks.reading_models.shapes import floats, shapes_of

BATCH, WIDTH, CONDITION = 8, 5, 3
BASE = {"base_dist": Normal(jnp.zeros(WIDTH)), "cond_dim": CONDITION}


def model(make, **settings):
    """The negative log-likelihood of a flow with three layers, stacked."""
    flow = make(jax.random.key(0), flow_layers=3, **BASE, **settings)
    params, static = eqx.partition(flow, eqx.is_inexact_array)

    def loss(params, x, condition):
        return -unwrap(eqx.combine(params, static)).log_prob(x, condition).mean()

    return loss, shapes_of(params), (floats(BATCH, WIDTH), floats(BATCH, CONDITION))


# The first layer of each network sees data and the condition, the last one gives the
# parameters of an affine map or a spline, which meet no further product.
ANSWERS = {
    r"layers/0/weight": "oi or adamw",
    r"weight": "oi?",
    r"": "adamw",
}
STACKED = {r"bijection/": (0,)}

MODELS = {
    "coupling": Model(
        lambda: model(flows.coupling_flow, nn_width=40, nn_depth=2),
        ANSWERS,
        STACKED,
    ),
    "masked autoregressive": Model(
        lambda: model(flows.masked_autoregressive_flow, nn_width=40, nn_depth=2),
        ANSWERS,
        STACKED,
    ),
}
