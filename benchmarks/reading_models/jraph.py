"""jraph's networks of graphs, with linen's layers."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import jraph

from benchmarks.reading_models import Model
from benchmarks.reading_models.shapes import cross_entropy, floats, integers, zeros

NODES, EDGES, WIDTH = 9, 20, 24
GRAPH = (floats(NODES, 5), floats(EDGES, 3), integers(EDGES), integers(EDGES))


def model(module):
    """A loss of a class of the whole graph."""
    params = jax.eval_shape(lambda: module.init(jax.random.key(0), *zeros(GRAPH)))

    def loss(params, nodes, edges, senders, receivers, label):
        logits = module.apply(params, nodes, edges, senders, receivers)
        return cross_entropy(logits, label)

    return loss, params, (*GRAPH, integers(1))


def graph_of(nodes, edges, senders, receivers):
    """One graph with a global feature of zeros."""
    return jraph.GraphsTuple(
        nodes=nodes,
        edges=edges,
        senders=senders,
        receivers=receivers,
        globals=jnp.zeros((1, WIDTH)),
        n_node=jnp.array([NODES]),
        n_edge=jnp.array([EDGES]),
    )


class GraphNetwork(nn.Module):
    """Two rounds of updates of edges, nodes and the whole."""

    @nn.compact
    def __call__(self, *arrays):
        graph = graph_of(*arrays)
        embed = jraph.GraphMapFeatures(
            nn.Dense(WIDTH, name="embed_edges"), nn.Dense(WIDTH, name="embed_nodes")
        )
        graph = embed(graph)
        for _ in range(2):
            updates = [
                jraph.concatenated_args(
                    lambda x: nn.relu(nn.LayerNorm()(nn.Dense(WIDTH)(x)))
                )
                for _ in range(3)
            ]
            graph = jraph.GraphNetwork(*updates)(graph)
        return nn.Dense(4, name="head")(graph.globals)


class GraphAttention(nn.Module):
    """A graph convolution, and attention over the edges of a node."""

    @nn.compact
    def __call__(self, nodes, edges, senders, receivers):
        graph = graph_of(nodes, edges, senders, receivers)
        embed = nn.Dense(WIDTH, name="embed_nodes")
        graph = jraph.GraphConvolution(lambda x: nn.relu(embed(x)))(graph)
        graph = jraph.GAT(
            attention_query_fn=nn.Dense(WIDTH, name="query"),
            attention_logit_fn=lambda sent, received, _: nn.Dense(1, name="logit")(
                nn.leaky_relu(jnp.concatenate([sent, received], -1))
            ),
            node_update_fn=lambda x: nn.relu(nn.Dense(WIDTH, name="update")(x)),
        )(graph._replace(edges=edges[:, :1]))
        return nn.Dense(4, name="head")(graph.nodes.mean(0, keepdims=True))


ANSWERS = {r"embed_": "io or adamw", r"head": "adamw", r"kernel": "io"}

MODELS = {
    "graph network": Model(lambda: model(GraphNetwork()), ANSWERS),
    "graph attention": Model(lambda: model(GraphAttention()), ANSWERS),
}
