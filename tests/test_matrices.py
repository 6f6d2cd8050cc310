"""Parameters as batches of matrices, and pools of matrices."""

import collections

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from optax.contrib import MuonDimensionNumbers

import jax_muon as jm
from jax_muon.joins import map_stacks
from tests import trees


@given(st.data(), st.randoms(use_true_random=False))
@settings(max_examples=30, deadline=None)
def test_views(data, random):
    """x[i...] is view[batch, in, out], in C order; `undo` is the inverse."""
    shape = data.draw(st.lists(st.integers(1, 4), min_size=2, max_size=5).map(tuple))
    order = data.draw(st.permutations(range(len(shape))))
    cut = data.draw(st.integers(1, len(shape) - 1))
    end = data.draw(st.integers(cut + 1, len(shape)))
    shift = data.draw(st.sampled_from([0, len(shape)]))  # negative axes
    groups = order[end:], order[:cut], order[cut:end]
    sides = [tuple(axis - shift for axis in group) for group in groups[1:]]
    x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    axes = jm.read({"w": x}, rules={"w": MuonDimensionNumbers(*sides)}).axes("w")
    assert axes.reduction == tuple(groups[1]) and axes.output == tuple(groups[2])
    view = np.asarray(axes.view(x))
    assert view.shape[1:] == axes.fan(shape)
    assert sorted(view.ravel()) == sorted(x.ravel())
    index = tuple(random.randrange(size) for size in shape)
    places = []
    for group in (axes.batch, axes.reduction, axes.output):
        place = 0
        for axis in group:
            place = place * shape[axis] + index[axis]
        places.append(place)
    assert view[tuple(places)] == x[index]
    y = view[::-1, ::-1] + 1
    np.testing.assert_array_equal(axes.view(axes.undo(y, shape)), y)


@given(
    st.lists(
        st.tuples(st.integers(1, 4), st.sampled_from([(2, 3), (3, 2), (2, 2)])),
        min_size=1,
        max_size=6,
    ),
)
@settings(max_examples=20, deadline=None)
def test_single_matrices_of_a_shape_share_a_stack(members):
    batches = trees.normal([(k, *mn) for k, mn in members])
    taken = []

    def double(stack):
        taken.append(stack.shape)
        return 2 * stack

    for batch, result in zip(batches, map_stacks(double, batches), strict=True):
        np.testing.assert_array_equal(result, 2 * batch)
    singles = collections.Counter(mn for k, mn in members if k == 1)
    expected = [(k, *mn) for k, mn in members if k > 1]
    expected += [(count, *mn) for mn, count in singles.items()]
    assert sorted(taken) == sorted(expected)
