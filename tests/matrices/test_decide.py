"""Every rule of the reading is needed: a program is read otherwise without it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.flatten_util import ravel_pytree

from jax_muon.matrices.computation import decide
from jax_muon.matrices.computation.read import read_uses
from jax_muon.matrices.computation.trace import ELEMENTWISE, RULES
from tests.programs import PROGRAMS
from tests.programs.parts import Program, floats

pytestmark = pytest.mark.usefixtures("as_users_write")


def outputs_in_turns(p, x):
    """One output of w in each turn."""
    y = lax.map(lambda column: x @ column, p["w"].T)  # (8, 5)
    return jnp.sum(jnp.tanh(y.T) @ p["out"])


def two_products(p, x):
    """The same matrix with other axes."""
    y = jnp.tanh(x @ p["w"])  # (5, 6) to (5, 8)
    z = jnp.einsum("bio,io->bo", x[..., None] * y[:, None], p["w"])
    return jnp.sum(jnp.tanh(y + z) @ p["out"])


def behind_a_barrier(p, x):
    """Both matrices go through one operation, and come out as two."""
    w, out = lax.optimization_barrier((p["w"], p["out"]))
    return jnp.sum(jnp.tanh(x @ w) @ out)


def set_in_a_buffer(p, x):
    """A matrix that is written into zeros, and taken out again."""
    w = jnp.zeros((3, 6, 8)).at[1].set(p["w"])[1]
    return jnp.sum(jnp.tanh(x @ w) @ p["out"])


def written_into_a_buffer(p, x):
    """The same by another operation, along an axis of the matrix."""
    w = lax.dynamic_update_slice(jnp.zeros((12, 8)), p["w"], (3, 0))[3:9]
    return jnp.sum(jnp.tanh(x @ w) @ p["out"])


def in_another_order(p, x):
    """Both matrices in one vector, whose elements are permuted."""
    vector, back = ravel_pytree(p)
    p = back(vector[np.arange(len(vector))[::-1]])
    return jnp.sum(jnp.tanh(x @ p["w"]) @ p["out"])


def weighed_experts(p, x):
    """Outputs of two experts, each times a number of each sample, added up."""
    y = jnp.einsum("ti,eio->eto", x, p["experts"]) * jax.nn.sigmoid(x.T[:2, :, None])
    return jnp.sum(jnp.tanh(y.sum(0)) @ p["out"])


SIZES = {"w": floats(6, 8), "out": floats(8, 3), "experts": floats(2, 6, 8)}
OWN = {
    loss: Program(loss, SIZES, (floats(5, 6),), {})
    for loss in (
        outputs_in_turns,
        two_products,
        behind_a_barrier,
        set_in_a_buffer,
        written_into_a_buffer,
        in_another_order,
        weighed_experts,
    )
}

# What follows from each kind of edge, and each label: a program that shows it.
EDGES = {
    "takes": "grouped_queries",
    "sliced": "fused_kernels",
    "heads": "grouped_queries",
    "gated": "moe_dense_summed_in_the_product",
    "scaled": weighed_experts,
    "gates": "branches_kinds_and_a_power_iteration",
    "summed": "multi_gate_experts_of_several_tasks",
    "contracts": "gates_first_and_stacked_layers",
    "weighed": "queries_and_hidden_units_make_gates",
    "grouped": "views_with_stems_and_a_kernel_resized",
    "batched": "soft_actor_critic",
    "in turns": outputs_in_turns,
    "mixed": "smear",
    "kernel": "conditional_convolutions",
    "attends": "rotary_positions_and_normalized_queries",
    "compared": "transformer_xl",
    "by gates": "smear",
    "chooses": "experts_in_a_python_loop",
    "scales": "branches_kinds_and_a_power_iteration",
    "either": "prototypes_times_a_matrix",
    "multiplied": "fused_kernels",
}
LABELS = {
    "_unused": "tied_embedding_and_mlp",
    "_lost": in_another_order,
    "_embedding": "grouped_queries",
    "_hidden": "sampled_rows_of_the_head",
    "_elementwise": "sharpness_aware",
    "_convolved_in_groups": "convolutions",
    "_complex": "fourier_neural_operator",
    "_unknown": "prototypes_times_a_matrix",
    "_vector": "soft_actor_critic",
    "_table": "segments_under_a_mask",
    "_centers": "deep_kernel_with_inducing_points",
    "_router": "moe_ragged_dot",
    "_head": "vision_transformer",
    "_contradictory": two_products,
    "_fused": "fused_kernels",
    "_kernel_of_role": "convolutions",
}

# What becomes of values in a primitive; without a rule it is elementwise.
PRIMITIVES = {
    "_cond": "loops_and_conditions",
    "_concatenate": "rotary_positions_and_normalized_queries",
    "_convolution": "critics_of_several_scales",
    "_dynamic_slice": "scan_over_numbers",
    "_gather": "grouped_queries",
    "_linear_solve": "orthogonal_and_inverted_matrices",
    "_move": "grouped_queries",
    "_pallas_call": "product_in_a_kernel",
    "_product": "grouped_queries",
    "_random": "bayes_by_backprop",
    "_reduce": "moe_gathered_weights_in_the_first_layer",
    "_same": behind_a_barrier,
    "_scan": "gates_first_and_stacked_layers",
    "_slice_replaced": written_into_a_buffer,
    "_slice": "rotary_positions_and_normalized_queries",
    "_top_k": "moe_einsum_dispatch",
    "_scatter": set_in_a_buffer,
    "_while": "deep_equilibrium",
}


def readings(program):
    """All parameters of a program as they are read, or the error."""
    program = OWN.get(program) or PROGRAMS[program]
    try:
        return read_uses(program.loss, program.params, *program.args)
    except ValueError as e:
        return repr(e)


def test_all_rules_are_here():
    assert decide.EDGES.keys() == EDGES.keys()
    assert [x.__name__ for x in decide.LABELS] == [*LABELS]
    names = {x.__name__ for x in RULES.values() if x is not RULES[ELEMENTWISE]}
    assert names == {*PRIMITIVES}


@pytest.mark.parametrize("name", PRIMITIVES)
def test_primitive(name, monkeypatch):
    with_rule = readings(PRIMITIVES[name])
    for primitive in [x for x in RULES if RULES[x].__name__ == name]:
        monkeypatch.delitem(RULES, primitive)
    assert readings(PRIMITIVES[name]) != with_rule


@pytest.mark.parametrize("kind", EDGES)
def test_edge(kind, monkeypatch):
    with_rule = readings(EDGES[kind])
    monkeypatch.setitem(decide.EDGES, kind, lambda found, edge: None)
    assert readings(EDGES[kind]) != with_rule


@pytest.mark.parametrize("name", LABELS)
def test_label(name, monkeypatch):
    with_rule = readings(LABELS[name])
    assert not isinstance(with_rule, str)
    others = [x for x in decide.LABELS if x.__name__ != name]
    monkeypatch.setattr(decide, "LABELS", others)
    assert readings(LABELS[name]) != with_rule
