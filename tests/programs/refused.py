"""Programs that are refused as they are written: which leaves, and the rules to write.

A rule is "adamw", or the letters of axes as in an answer. The fewest that decide all.
"""

# By program: the refused leaves, and rules.
REFUSED: dict[str, tuple[set[str], dict[str, str]]] = {
    "a_table_that_queries_are_compared_with": ({"segments"}, {"segments": "adamw"}),
    "transformer_xl": ({"r"}, {"r": "ioo"}),
    "vision_transformer": ({"table"}, {"table": "adamw"}),
    "smear": (
        {"router", "down", "up"},
        {"down": "bio", "router": "adamw", "up": "bio"},
    ),
    "moe_dense_summed_in_the_product": ({"down", "up"}, {"down": "bio", "up": "bio"}),
    "conditional_convolutions": ({"kernels"}, {"kernels": "biiio"}),
    "test_time_training": ({"v"}, {"v": "io"}),
    "several_tokens_ahead": ({"medusa"}, {"medusa": "oio"}),
    "stored_patterns": ({"k", "patterns", "v"}, {"patterns": "adamw"}),
    "triangular_and_low_rank_factors": ({"middle"}, {"middle": "io"}),
    "latent_attention_and_pooling": ({"queries"}, {"queries": "adamw"}),
    "gates_first_and_stacked_layers": (
        {"router", "down", "up"},
        {"down": "bio", "router": "io", "up": "bio"},
    ),
    "sampled_rows_of_the_head": ({"filters"}, {"filters": "adamw"}),
    "a_memory_that_data_rewrites": ({"memory"}, {"memory": "adamw"}),
    "a_vector_after_the_last_matrices": ({"relations"}, {"relations": "bio"}),
    "branches_kinds_and_a_power_iteration": (
        {"branches/1", "branches/0", "of_kinds"},
        {"branches/0": "io", "branches/1": "io", "of_kinds": "bio"},
    ),
    "image_by_its_coordinates": ({"w1"}, {"w1": "io"}),
    "glow": ({"mix/1", "mix/0"}, {"mix/0": "io", "mix/1": "io"}),
    "orthogonal_and_inverted_matrices": (
        {"blocks", "back", "flow", "skew"},
        {"back": "oi", "blocks": "bio", "flow": "io", "skew": "io"},
    ),
    "deep_kernel_with_inducing_points": ({"inducing"}, {"inducing": "adamw"}),
    "forces_by_kinds": ({"net/w2"}, {"net/w2": "io"}),
    "multi_gate_experts_of_several_tasks": ({"experts"}, {"experts": "bio"}),
    "queries_and_hidden_units_make_gates": ({"experts"}, {"experts": "bio"}),
    "object_queries_of_one_image": (
        {"queries", *(f"layers/0/itself/{name}" for name in "qkv")},
        {"queries": "adamw"},
    ),
    "projected_positions_and_a_condition": (
        {"positions", "project"},
        {"positions": "adamw"},
    ),
}
