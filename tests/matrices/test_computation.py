"""Reading from a function: reasons, roles, and what cannot be read so.

`test_programs.py` has the readings themselves.
"""

import functools
import inspect
import pathlib

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl
from optax.contrib import MuonDimensionNumbers

import jax_muon as jm
from jax_muon.matrices.matrices import MatrixAxes
from jax_muon.reading import trace
from jax_muon.reading.read import read_uses
from tests.programs import PROGRAMS
from tests.programs.parts import floats
from tests.recipes import RECIPES

pytestmark = pytest.mark.usefixtures("as_users_write")


IDS = jax.ShapeDtypeStruct((2, 8), jnp.int32)
WIDTH = 24


def at(function, text):
    """`test_computation.py:57`, the line of a function that has this text."""
    lines, start = inspect.getsourcelines(function)
    (number,) = (i for i, line in enumerate(lines) if text in line)
    return f"test_computation.py:{start + number}"


def attention(x, p):
    q, k, v = (x @ p[name] for name in ("a", "b", "c"))
    return jax.nn.softmax(q @ k.swapaxes(-1, -2)) @ v @ p["d"]


def language_model(params, ids):
    x = jnp.take(params["table"], ids, axis=0)
    for layer in params["layers"]:
        x = x + attention(x, layer)
        x = x + jax.nn.relu(x * layer["e"] @ layer["f"])
    return jnp.mean(x @ params["g"])


def model_params(layers=2):
    square = floats(WIDTH, WIDTH)
    layer = dict.fromkeys("abcdf", square) | {"e": floats(WIDTH)}
    return {
        "table": floats(90, WIDTH),
        "layers": [dict(layer) for _ in range(layers)],
        "g": floats(WIDTH, 90),
        "old": floats(WIDTH, 90),
    }


def test_reasons_name_the_use_and_the_line():
    with pytest.warns(UserWarning, match="depends on none of old, which"):
        read = jm.find_matrices(model_params(), language_model, IDS)
    product = at(language_model, 'layer["e"] @')
    expected = {
        "table": f"rows picked by integers at {at(language_model, 'jnp.take')}",
        "layers/1/a": f"contracted over axis 0 at {at(attention, 'x @ p[name]')}",
        "layers/1/e": f"elementwise at {product}",
        "layers/1/f": f"contracted over axis 0 at {product}",
        "g": f"last product before the result at {at(language_model, 'x @ params')}",
        "old": "the result does not depend on it",
    }
    assert {path: read[path].reason for path in expected} == expected


def test_joins_go_by_the_roles():
    rules = {"old": "adamw"}  # without a warning
    read = jm.find_matrices(model_params(4), language_model, IDS, joins=2, rules=rules)
    assert {join.paths for join in read.joins} == {
        (f"layers/{i}/{name}", f"layers/{i + 1}/{name}")
        for i in (0, 2)
        for name in "abc"
    }


def test_split_outputs_are_shown_unless_a_split_says_so():
    """Equal parts, alike in all layers, and others; `describe` shows the same."""
    layer = {"qkv": floats(16, 48), "out": floats(16, 16)}
    odd = {"fused": floats(16, 40), "out": floats(8, 16)}
    params = {"layers": [layer, layer], "odd": odd, "last": floats(16, 5)}

    def fused(params, x):
        layers = [(layer["qkv"], 3, layer["out"]) for layer in params["layers"]]
        layers += [(params["odd"]["fused"], [16, 32], params["odd"]["out"])]
        for w, parts, out in layers:
            q, k, v = jnp.split(x @ w, parts, axis=-1)
            x = x + jax.nn.softmax(q @ k.swapaxes(-1, -2)) @ v @ out
        return jnp.mean(x @ params["last"])

    read = functools.partial(jm.find_matrices, params, fused, floats(3, 9, 16))
    found, said = read(), "its outputs are split: splits="
    parts = {"part_0": 16, "part_1": 16, "part_2": 8}
    for table in map(
        str, (found, jm.describe(RECIPES["nanochat"](matrices=found), params))
    ):
        assert table.count(said) == 3
        assert table.count(f"{said}{{'qkv': Split({tuple(parts)})}}\n") == 2
        assert f"{said}{{'odd/fused': Split({parts})}}\n" in table
    known = read(splits={"fused": jm.Split(parts)})["odd/fused"]
    assert "splits" not in known.reason
    assert found["odd/fused"].role == known.role == "fused"


# --- what cannot be read --------------------------------------------------------------


def test_a_hidden_parameter_is_an_error():
    def loss(params, x):
        kernel = pl.pallas_call(lambda x, w, y: None, out_shape=floats(5, 9))
        return jnp.mean(kernel(x, params["mixing"]["w"]))

    params = {"mixing": {"w": floats(5, 7, 7, 9, 9)}}
    with pytest.raises(ValueError) as error:
        jm.find_matrices(params, loss, floats(5, WIDTH))
    line = at(loss, "kernel(x")
    assert f"(5, 7, 7, 9, 9): it goes into pallas_call at {line}" in str(error.value)
    with pytest.warns(UserWarning, match="mixing/w"):
        assert jm.find_matrices(params, loss, floats(5, WIDTH), strict=False).labels(
            params
        ) == {"mixing": {"w": "adamw"}}
    rules = {"mixing/w": MuonDimensionNumbers(3, 4)}
    read = jm.find_matrices(params, loss, floats(5, WIDTH), rules=rules)
    assert read["mixing/w"].sizes == (5 * 7 * 7, 9, 9)


def contradiction(params, x):
    y = jnp.tanh(x @ params["w"])  # (5, 24) to (5, 8)
    z = jnp.einsum("bio,io->bo", x[..., None] * y[:, None], params["w"])
    return jnp.mean((y + jnp.tanh(z)) @ params["last"])


def solve(params, x):
    """For a square right side all shapes are equal, as for a product of elements."""
    return jnp.mean(lax.linalg.triangular_solve(params["w"], x, left_side=True))


def factors(params, x):
    """Two factors whose product is compared with the data."""
    return jnp.mean((params["u"] @ params["v"] - x) ** 2)


def hidden(params, x):
    """Here as well."""
    kernel = pl.pallas_call(lambda x, w, y: None, out_shape=floats(8, 8))
    return jnp.mean(kernel(x, params["w"]))


def cayley(params, x):
    """A rotation by the inverse of a matrix times another function of it."""
    one = jnp.eye(len(params["w"]))
    turn = jnp.linalg.inv(one + params["w"]) @ (one - params["w"])
    return jnp.mean(jnp.tanh(x @ turn) @ params["last"])


def opaque_solve(params, x):
    """A solver without a transposition, by which JAX could tell what it solves."""
    y = lax.custom_linear_solve(lambda y: params["w"] @ y, x[0], lambda _, b: b)
    return jnp.sum(jnp.tanh(y @ params["last"]))


def summed(params, x):
    """An axis that is summed before the product has no side."""
    return jnp.sum(jnp.tanh(x @ params["w"].sum(1)) @ params["last"])


BOTH = f"{at(contradiction, 'x @')}, {at(contradiction, 'einsum')}"
UNREAD = [  # function, shapes of parameters and of x, words
    (contradiction, {"w": (24, 8), "last": (8, 3)}, (5, 24), f"'w': .*{BOTH}"),
    (solve, {"w": (8, 8)}, (8, 8), "it goes into triangular_solve"),
    (hidden, {"w": (8, 8)}, (8, 8), "it goes into pallas_call"),
    (cayley, {"w": (8, 8), "last": (8, 3)}, (5, 8), "it goes into lu"),
    (opaque_solve, {"w": (8, 8), "last": (8, 3)}, (5, 8), "into custom_linear_solve"),
    (summed, {"w": (6, 4, 8), "last": (8, 3)}, (5, 6), "axis 1 is "),
    (factors, {"u": (9, 3), "v": (3, 7)}, (9, 7), "not followed at"),
    (lambda p, x: x, {"a": (4, 4), "b": (4,)}, (3,), "on none of the 2 parameters"),
]


@pytest.mark.parametrize(("function", "shapes", "x", "words"), UNREAD)
def test_what_no_use_decides(function, shapes, x, words):
    params = {path: floats(*shape) for path, shape in shapes.items()}
    with pytest.raises(ValueError, match=words):
        jm.find_matrices(params, function, floats(*x))


def test_a_head_of_nothing_but_gradients_that_a_rule_makes_a_matrix():
    """The product that JAX made by transposing it goes from outputs to inputs."""

    def loss(params, x):
        def energy(x):
            return jnp.sum(jnp.tanh(x @ params["up"]) @ params["last"])

        return jnp.mean(jax.grad(energy)(x) ** 2)

    params = {"up": floats(4, 9), "last": floats(9, 3)}
    read = jm.find_matrices(params, loss, floats(5, 4), rules={"last": "muon"})
    axes = read["last"].axes
    assert (axes.reduction, axes.output) == ((0,), (1,))


def added(p, x):
    return sum(x[i] @ p["w"][i] for i in range(3))


def contracted(p, x):
    return jnp.einsum("kti,kio->to", x, p["w"])


@pytest.mark.parametrize(
    ("product", "words", "axes"),
    [
        (added, "the matrices are a batch", ((0,), (1,), (2,))),
        (contracted, "is one product over both axes", ((), (0, 1), (2,))),
    ],
)
def test_what_the_page_says(product, words, axes):
    """Two products whose axes the page names."""
    page = pathlib.Path(__file__).parents[2] / "docs/parameters.md"
    assert words in " ".join(page.read_text().split())
    params = {"w": floats(3, 6, 8), "out": floats(8, 4)}
    found = jm.find_matrices(
        params,
        lambda p, x: jnp.sum(jnp.tanh(product(p, x)) @ p["out"]),
        floats(3, 5, 6),
    )
    assert found["w"].axes == MatrixAxes(*axes)


def test_a_result_without_parameters():
    with pytest.raises(ValueError, match="depends on none of the 1 parameters"):
        jm.find_matrices({"w": floats(6, 8)}, lambda p, x: jnp.sum(x), floats(5, 6))


def test_numbers_from_an_unknown_operation_may_be_those_of_a_top_k(monkeypatch):
    monkeypatch.delitem(trace.RULES, "top_k")
    program = PROGRAMS["moe_einsum_dispatch"]
    read = read_uses(program.loss, program.params, *program.args)
    (doubt,) = [x.doubt for x in read if x.path == "choose"]
    assert doubt.startswith("its outputs may say what is computed")


def test_a_mistake_of_ours_says_what_to_write(monkeypatch):
    """An error in a rule loses the leaves of one operation, and is no bare KeyError."""

    def broken(trace, eqn, values):
        raise KeyError("tanh")

    monkeypatch.setitem(trace.RULES, "tanh", broken)
    words = r"'v': 'adamw or muon'.* a mistake of jax_muon, KeyError\('tanh'\), at test"

    def loss(p, x):
        return jnp.sum((x @ p["w"]) * jnp.tanh(p["v"]) @ p["out"])

    params = {"w": floats(6, 8), "v": floats(5, 8), "out": floats(8, 2)}
    with pytest.raises(KeyError):  # in tests
        jm.find_matrices(params, loss, floats(5, 6))
    monkeypatch.setattr(trace, "RAISES", False)
    with pytest.raises(ValueError, match=words):
        jm.find_matrices(params, loss, floats(5, 6))
    found = jm.find_matrices(params, loss, floats(5, 6), rules={"v": "adamw"})
    assert [x.role for x in found.values()] == ["head", "input", "kernel"]
