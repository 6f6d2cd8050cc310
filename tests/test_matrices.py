"""Reading parameters as matrices, and pooling them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optax.contrib import MuonDimensionNumbers

import jax_muon as jm
from jax_muon.axes import MatrixAxes
from jax_muon.paths import leaves_with_paths
from jax_muon.polar.stacks import map_stacks
from tests.lowered import depths_on


def matrix_axes(tree, numbers=None, *, context=None):
    """How each leaf of a tree is read, as a part of the whole model."""
    matrices = jm.read(context or tree, rules=numbers)
    return [matrices.axes(path) for path, _ in leaves_with_paths(tree)]


def axes_of(shape, spec=None, path="w"):
    (axes,) = matrix_axes({path: jnp.zeros(shape)}, spec)
    return axes


@pytest.mark.parametrize(
    ("path", "shape", "fan"),
    [
        ("mlp/kernel", (4, 6), (4, 6)),
        ("layers/mlp/kernel", (3, 4, 6), (4, 6)),
        ("moe/experts/up", (2, 8, 4, 6), (4, 6)),
        ("Conv_0/kernel", (3, 3, 4, 6), (36, 6)),
        ("conv1d/kernel", (5, 4, 6), (20, 6)),
    ],
)
def test_reading_by_path(path, shape, fan):
    assert axes_of(shape, path=path).fan(shape) == fan


def attention(*lead, embed=6, heads=2, kv_heads=2, dim=4):
    def kernel(*shape):
        return {"kernel": jnp.zeros((*lead, *shape))}

    return {
        "attn": {
            "query": kernel(embed, heads, dim),
            "key": kernel(embed, kv_heads, dim),
            "value": kernel(embed, kv_heads, dim),
            "out": kernel(heads, dim, embed),
        }
    }


@pytest.mark.parametrize("lead", [(), (3,)], ids=["plain", "scanned"])
@pytest.mark.parametrize("kv_heads", [2, 1])
def test_attention_with_heads_apart(lead, kv_heads):
    """DenseGeneral: query (embed, heads, dim), out (heads, dim, embed)."""
    params = attention(*lead, kv_heads=kv_heads)
    key, out, query, value = matrix_axes(params)
    shapes = [leaf.shape for leaf in jax.tree.leaves(params)]
    assert query.fan(shapes[2]) == (6, 8)
    assert out.fan(shapes[1]) == (8, 6)
    if kv_heads == 2:
        assert key.fan(shapes[0]) == value.fan(shapes[3]) == (6, 8)
    assert query.batch == tuple(range(len(lead)))


def test_scanned_plain_attention_is_a_batch():
    """(layers, in, out) under the same names."""
    query, out = jnp.zeros((5, 6, 8)), jnp.zeros((5, 8, 6))
    params = {"attn": {"query": {"kernel": query}, "out": {"kernel": out}}}
    for axes in matrix_axes(params):
        assert axes.batch == (0,)


def test_attention_that_changes_the_width():
    """embed 6 to 10: query (6, heads, dim), out (heads, dim, 10)."""
    params = attention()
    params["attn"]["out"] = {"kernel": jnp.zeros((2, 4, 10))}
    _, out, query, _ = matrix_axes(params)
    assert query.fan((6, 2, 4)) == (6, 8)
    assert out.fan((2, 4, 10)) == (8, 10)


@pytest.mark.parametrize(
    ("kernel", "bias", "batch", "fan"),
    [
        ((3, 3, 4, 6), (6,), (), (36, 6)),  # a convolution by another name
        ((5, 3, 3, 4, 6), (5, 6), (0,), (36, 6)),  # and a scanned one
        ((5, 4, 6), (5, 6), (0,), (4, 6)),  # a scanned Dense
        ((8, 2, 4), (2, 4), (), (8, 8)),  # a query, with its heads apart
        ((2, 4, 8), (8,), (), (8, 8)),  # and an output projection
        ((8, 8, 36, 6), (8, 8, 6), (0, 1), (36, 6)),  # ConvLocal
    ],
)
def test_a_bias_tells_batch_and_output_axes(kernel, bias, batch, fan):
    params = {"stem": {"bias": jnp.zeros(bias), "kernel": jnp.zeros(kernel)}}
    masked = {"stem": {"bias": None, "kernel": params["stem"]["kernel"]}}
    (axes,) = matrix_axes(masked, context=params)
    assert axes.batch == batch
    assert axes.fan(kernel) == fan


@pytest.mark.parametrize(
    ("kernel", "bias", "fan"),
    [
        ((3, 3, 4, 6), (6,), (36, 6)),
        ((3, 3, 6, 4), (6,), (36, 6)),  # transpose_kernel=True
        ((5, 3, 3, 6, 4), (5, 6), (36, 6)),  # and scanned
        ((3, 3, 6, 6), (6,), (54, 6)),
    ],
)
def test_a_bias_tells_the_outputs_of_a_transposed_convolution(kernel, bias, fan):
    module = {"bias": jnp.zeros(bias), "kernel": jnp.zeros(kernel)}
    masked = {"ConvTranspose_0": {"bias": None, "kernel": module["kernel"]}}
    (axes,) = matrix_axes(masked, context={"ConvTranspose_0": module})
    assert axes.fan(kernel) == fan
    assert kernel[axes.output[0]] == bias[-1]


@pytest.mark.parametrize(
    ("kernel", "scale", "batch", "fan"),
    [
        ((3, 3, 4, 6), (6,), (), (36, 6)),
        ((5, 3, 3, 4, 6), (5, 6), (0,), (36, 6)),
        ((5, 3, 4, 6), (5, 6), (0,), (12, 6)),  # one-dimensional, not two
        ((3, 3, 3, 4, 6), (6,), (), (108, 6)),  # three-dimensional, not scanned
    ],
)
def test_the_scale_of_a_norm_tells_layers_from_the_window(kernel, scale, batch, fan):
    context = {
        "stem": {"norm": {"scale": jnp.zeros(6)}},
        "blocks": {
            "Conv_0": {"kernel": jnp.zeros(kernel)},
            "BatchNorm_0": {"scale": jnp.zeros(scale)},
            "Gate_0": {"scale": jnp.zeros(scale[:-1])},  # a scalar for each layer
        },
    }
    masked = {"blocks": {"Conv_0": context["blocks"]["Conv_0"]}}
    (axes,) = matrix_axes(masked, context=context)
    assert axes.batch == batch
    assert axes.fan(kernel) == fan


def test_local_convolutions_have_a_matrix_for_each_place():
    params = {"ConvLocal_0": {"kernel": jnp.zeros((8, 8, 36, 6))}}
    (axes,) = matrix_axes(params)
    assert axes == MatrixAxes((0, 1), (2,), (3,))


def test_conv_in_the_name_of_a_parent_says_nothing():
    params = {"ConvFormer_0": {"Dense_0": {"kernel": jnp.zeros((5, 8, 6))}}}
    (axes,) = matrix_axes(params)
    assert axes.batch == (0,)


def test_a_scanned_convolution_without_bias_is_an_error():
    params = {"Conv_0": {"kernel": jnp.zeros((5, 3, 3, 4, 6))}}
    with pytest.raises(ValueError, match=r"'Conv_0/kernel'.*scanned layers"):
        matrix_axes(params)
    (axes,) = matrix_axes(params, MuonDimensionNumbers((1, 2, 3), 4))
    assert axes.batch == (0,)


def test_dimension_numbers_for_nothing_are_an_error():
    params = {"a": jnp.zeros((2, 3))}
    with pytest.raises(ValueError, match="'zzz' matches no parameter"):
        matrix_axes(params, {"zzz": MuonDimensionNumbers(0, 1)}, context=params)


SPEC = MuonDimensionNumbers((0, 1), 2)


@pytest.mark.parametrize(
    "rules",
    [SPEC, {"a": SPEC}, {"a": {"u": SPEC, "v": SPEC}}, {"a/u": SPEC, "*": SPEC}],
    ids=["one", "prefix", "tree", "patterns"],
)
def test_specs_as_one_as_tree_and_as_patterns(rules):
    params = {"a": {"u": jnp.zeros((2, 3, 4)), "v": jnp.zeros((2, 3, 4))}}
    assert matrix_axes(params, rules) == 2 * [MatrixAxes((), (0, 1), (2,))]


@st.composite
def shapes_and_specs(draw):
    ndim = draw(st.integers(2, 5))
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=ndim, max_size=ndim)))
    order = draw(st.permutations(range(ndim)))
    cut = draw(st.integers(1, ndim - 1))
    end = draw(st.integers(cut + 1, ndim))
    negative = draw(st.booleans())
    shift = ndim if negative else 0
    reduction = tuple(axis - shift for axis in order[:cut])
    output = tuple(axis - shift for axis in order[cut:end])
    return shape, MuonDimensionNumbers(reduction, output)


@given(shapes_and_specs())
@settings(max_examples=25, deadline=None)
def test_view_is_undone_exactly(case):
    shape, spec = case
    x = jnp.arange(np.prod(shape), dtype=jnp.float32).reshape(shape)
    axes = axes_of(shape, spec)
    view = axes.view(x)
    assert view.shape[1:] == axes.fan(shape)
    np.testing.assert_array_equal(axes.undo(view, shape), x)
    y = view[::-1, ::-1] + 1
    np.testing.assert_array_equal(axes.view(axes.undo(y, shape)), y)


@given(shapes_and_specs(), st.randoms(use_true_random=False))
@settings(max_examples=25, deadline=None)
def test_view_has_every_element_where_its_axes_say(case, random):
    """Against indices written out: x[i...] is view[batch, in, out], in C order."""
    shape, spec = case
    axes = axes_of(shape, spec)
    view = np.asarray(axes.view(jnp.arange(np.prod(shape)).reshape(shape)))
    index = tuple(random.randrange(size) for size in shape)
    places = []
    for group in (axes.batch, axes.reduction, axes.output):
        place = 0
        for axis in group:
            place = place * shape[axis] + index[axis]
        places.append(place)
    assert view[tuple(places)] == np.ravel_multi_index(index, shape)
    assert sorted(view.ravel()) == list(range(np.prod(shape)))


@given(shapes_and_specs(), st.sampled_from(["float32", "bfloat16", "float16"]))
@settings(max_examples=20, deadline=None)
def test_views_keep_dtype_and_trace(case, dtype):
    shape, spec = case
    axes = axes_of(shape, spec)
    x = jax.ShapeDtypeStruct(shape, dtype)
    back = jax.eval_shape(lambda x: axes.undo(axes.view(x), shape), x)
    assert (back.shape, back.dtype) == (x.shape, x.dtype)


@given(
    st.lists(
        st.tuples(st.integers(1, 4), st.sampled_from([(2, 3), (3, 2), (2, 2)])),
        min_size=1,
        max_size=6,
    ),
    st.integers(1, 5),
)
@settings(max_examples=20, deadline=None)
def test_pooling_is_undone_exactly_and_bounded(members, max_stack):
    rng = np.random.default_rng(0)
    batches = [jnp.asarray(rng.standard_normal((k, *mn))) for k, mn in members]

    def mapped(*batches):
        return map_stacks(jnp.tan, batches, max_stack=max_stack)

    for batch, result in zip(batches, mapped(*batches), strict=True):
        np.testing.assert_allclose(result, jnp.tan(batch), rtol=1e-6)

    gpu = {}  # a shape and its transpose together
    cpu = {}  # single matrices of exactly one shape together, and every other leaf
    for index, (k, mn) in enumerate(members):
        gpu[tuple(sorted(mn))] = gpu.get(tuple(sorted(mn)), 0) + k
        pool = mn if k == 1 else index
        cpu[pool] = cpu.get(pool, 0) + k
    for platform, total in (("cuda", gpu), ("cpu", cpu)):
        depths = depths_on(platform, mapped, *batches)
        assert max(depths) <= max_stack
        assert len(depths) == sum(-(-k // max_stack) for k in total.values())
        assert sum(depths) == sum(total.values())


@pytest.mark.parametrize(
    ("leaf", "rules", "words"),
    [
        (jnp.zeros(3), "muon", ["'a/w'", r"\(3,\)", "two axes"]),
        (jnp.zeros(()), "muon", ["'a/w'", r"\(\)"]),
        (jnp.zeros((0, 4)), "muon", ["'a/w'", r"\(0, 4\)", "empty"]),
        (jnp.zeros((2, 2)), MuonDimensionNumbers(None, 1), ["at least one"]),
        (jnp.zeros((2, 2), int), "muon", ["'a/w'", "int32", "real floating point"]),
        (jnp.zeros((2, 2), complex), "muon", ["'a/w'", "complex64"]),
        (jnp.zeros((2, 2)), MuonDimensionNumbers(0, 0), ["no axis twice"]),
        (jnp.zeros((2, 2)), MuonDimensionNumbers(0, -2), ["no axis twice"]),
        (
            jnp.zeros((2, 2)),
            MuonDimensionNumbers(0, 2),
            ["output_axis: axis 2 is out of bounds"],
        ),
        (jnp.zeros((2, 2)), MuonDimensionNumbers((), 1), ["at least one"]),
        (jnp.zeros((2, 2)), {"a": ["rows"]}, ["'a/0'", "which no parameter has"]),
    ],
)
def test_bad_input(leaf, rules, words):
    for word in words:
        with pytest.raises(ValueError, match=word):
            jm.read({"a": {"w": leaf}}, rules=rules)


def test_a_path_that_was_not_read():
    """Errors like those of a dictionary, with the paths that there are."""
    matrices = jm.read({"up": jnp.ones((4, 8))})
    assert "down" not in matrices
    assert matrices.get("down") is None
    with pytest.raises(ValueError, match=r"^parameter 'down' was not read.*are up;"):
        matrices["down"]
