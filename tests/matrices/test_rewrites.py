"""A reading that no rewriting of a loss changes: each rewrite of four programs.

An answer may become a refusal, but no other answer. `make test-rewrites` takes all
programs, and prints a table.
"""

import pytest

from tests.rewrites import REWRITES, changes, programs, sample

pytestmark = pytest.mark.usefixtures("as_users_write")


@pytest.mark.parametrize("name", programs())
def test_same_reading(name):
    """By program, so that each is read as it is written by one process."""
    titles = [title for title in REWRITES if name in sample(title)]
    found = {title: changes(title, name) or [] for title in titles}
    assert not [x for of in found.values() for x in of if x[0] != "clear"], found


@pytest.mark.parametrize(
    ("title", "name"),
    [
        ("x @ w: map over outputs", "stored_patterns"),
        ("x @ w: an identity before", "one_hot_embedding"),
        ("x @ w: a sum of rank one", "decision_transformer"),
        ("operations: sums by ones", "smear"),
        ("loss: a step inside", "sharpness_aware"),
        ("members: vmap of checkpoint", "branches_kinds_and_a_power_iteration"),
        ("parameter: from devices", "contrastive_predictive_coding"),
        ("x @ w: a 1 x 1 convolution", "prototypes_times_a_matrix"),
        ("x @ w: map over outputs", "dora"),
        ("x @ w: normalized and back", "dora"),
        ("loss: a gradient inside", "one_task_after_another"),
        ("members: vmap", "moe_einsum_dispatch"),
        ("inserted: noise after gates", "triangular_and_low_rank_factors"),
        ("inserted: noise after gates", "a_table_that_queries_are_compared_with"),
        ("sizes: one sample", "prefixes_sinks_and_registers"),
    ],
)
def test_same_reading_of_one(title, name):
    """Pairs that alone need a few lines."""
    assert not [x for x in changes(title, name) if x[0] != "clear"]
