"""The benchmarks run, at tiny sizes, and what they compute without a clock is right."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_muon as jm
from benchmarks import (
    contenders,
    flops,
    machine,
    polar,
    spectra,
    step,
)
from benchmarks.parameters import model_parameters
from benchmarks.schedule import tpu_schedule


def arrays(shapes, seed):
    """Gradients and parameters that no rounding can mistake for zero."""
    return contenders.random_like(shapes, seed)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_fused_step_is_that_of_the_chain(dtype):
    """Three steps of the function written out by hand against jm.nanochat.

    They differ by the order of sums. An entry whose update is nearly zero may decay in
    one and not in the other: on one processor 1 of 26,624 does.
    """
    shapes = model_parameters("tiny", jnp.float32, scanned=True)
    params, grads = arrays(shapes, 0), arrays(shapes, 1)
    ends = []
    for name in ("nanochat", "fused"):
        init, one_step = contenders.make_step(name, dtype, shapes)
        one_step = jax.jit(one_step)
        p, state = params, init(params)
        for _ in range(3):
            p, state = one_step(p, state, grads)
        ends.append(p)
    moved = optax.tree.norm(optax.tree.sub(ends[0], params))
    differences = [np.ravel(x) for x in jax.tree.leaves(optax.tree.sub(*ends))]
    # Without the three entries furthest apart, whose signs may have been rounded away.
    apart = np.linalg.norm(np.sort(np.abs(np.concatenate(differences)))[:-3])
    # Rounding alone: 1e-7 in float32; in bfloat16 2^-8 where a last bit differs.
    assert apart / moved < {"float32": 1e-5, "bfloat16": 1e-2}[dtype]


@pytest.mark.parametrize(
    ("name", "layout"),
    [(name, "scanned") for name in contenders.NAMES]
    + [(name, "separate") for name in ("nanochat", "optax", "optax-scan")],
)
def test_contenders_move_every_parameter(name, layout):
    shapes = model_parameters("tiny", jnp.float32, scanned=layout == "scanned")
    params, grads = arrays(shapes, 0), arrays(shapes, 1)
    init, one_step = contenders.make_step(name, "float32", shapes)
    new, _ = jax.jit(one_step)(params, init(params), grads)
    for old, leaf in zip(jax.tree.leaves(params), jax.tree.leaves(new), strict=True):
        assert jnp.isfinite(leaf).all()
        assert (old != leaf).mean() > 0.99


def test_a_pair_of_processes(tmp_path, capsys):
    """The command as `make bench` gives it, and a second run that adds to its file."""
    words = ["--models", "tiny", "--rounds", "2", "--json", str(tmp_path), "--pairs"]
    step.main([*words, "float32, scanned to fused"])
    path = tmp_path / "step_cpu.json"
    (first,) = json.loads(path.read_text())
    other = first | {"ours": "nanochat, bfloat16, scanned"}
    other |= {"theirs": "fused, bfloat16, scanned"}
    step.save([other], path)
    step.save([other | {"ratio": 1.5}], path)
    rows = json.loads(path.read_text())
    assert [(r["ours"], r["theirs"]) for r in rows] == [
        (f"nanochat, {dtype}, scanned", f"fused, {dtype}, scanned")
        for dtype in ("float32", "bfloat16")
    ]
    assert rows[1]["ratio"] == 1.5
    assert len(first["ratios"]) == 2
    assert first["ratio"] == pytest.approx(np.median(first["ratios"]))
    assert min(first["ours_s"], first["theirs_s"], *first["run"]["peaks"].values()) > 0
    assert first["ours_info"]["temporary_bytes"] > 0
    assert first["run"]["versions"]["jax"] == jax.__version__
    assert (tmp_path / "step_cpu.png").stat().st_size > 10_000
    assert "nanochat, float32, scanned   fused" in capsys.readouterr().out


def test_torch_contender():
    from benchmarks.torch_contenders import TorchContender

    contender = TorchContender("torch-muon", "tiny", "bfloat16", "cpu")
    before = [p.detach().clone() for o in contender.optimizers for p in params_of(o)]
    assert contender.step() > 0
    after = [p for o in contender.optimizers for p in params_of(o)]
    assert len(after) == 2 * 6 + 2
    assert all((a != b).any() for a, b in zip(after, before, strict=True))
    with pytest.raises(ValueError, match="torch-nanochat"):
        TorchContender("torch-adam", "tiny", "bfloat16", "cpu")


def params_of(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


@pytest.mark.parametrize(
    ("main", "words"),
    [
        (step.main, ["--pairs", "nothing"]),
        (step.main, ["--rounds", "0"]),
        (step.main, ["--models", "gpt9"]),
        (polar.main, ["--shapes", "8"]),
        (polar.main, ["--rounds", "0"]),
    ],
)
def test_bad_words(main, words):
    with pytest.raises(SystemExit):
        main(words)


def test_quick_pairs():
    """With a bar for the model, or any pair where the model has none."""
    by_model = {
        model: [str(pair.theirs) for pair in step.pairs() if pair.is_quick(model)]
        for model in ("6x384", "gpt2-124m", "gpt2-350m")
    }
    assert (
        {"torch-muon, bfloat16"} < set(by_model["6x384"]) < set(by_model["gpt2-124m"])
    )
    here = [str(pair.theirs) for pair in step.pairs() if pair.gpu_only]
    assert sorted(by_model["gpt2-124m"] + here) == sorted(by_model["gpt2-350m"])
    (adamw,) = (pair for pair in step.pairs() if pair.ours.name == "adamw")
    assert not adamw.is_quick("gpt2-350m")


def test_nominal_flops():
    """12 x (4 square, 2 of aspect 4): 5 (4 m m n + 2 m^3) each."""
    m = 768
    square, long = 30 * m**3, (20 * 4 + 10) * m**3
    assert flops.nominal_flops("gpt2-124m") == 12 * (4 * square + 2 * long)
    # One triangle of symmetric products; the Gram form for those of aspect 4.
    square, long = 20 * m**3, (6 * 4 + 14) * m**3
    assert flops.least_flops("gpt2-124m") == 12 * (4 * square + 2 * long)


def test_orthogonalization(tmp_path, capsys, monkeypatch):
    some = [way for way in polar.ways() if "8 steps" not in way.family][::4]
    monkeypatch.setattr(polar, "ways", lambda: some)
    words = ["--shapes", "24x16", "--forms", "16x32", "--rounds", "1"]
    polar.main([*words, "--json", str(tmp_path)])
    result = json.loads((tmp_path / "polar_cpu.json").read_text())
    assert [r["shape"] for r in result["ways"]] == 3 * [[16, 24]]
    for r in result["ways"]:
        # Five quintics are made to come within 0.15 of a Gaussian matrix's factor,
        # where no singular value is below a thousandth; Newton-Schulz within 0.35.
        assert r["seconds"] > 0
        if "4 steps" not in r["family"]:
            assert r["errors"]["Gaussian"] < 0.35
    assert [r["shape"] for r in result["forms"]] == [[16, 32]]
    assert (tmp_path / "polar_cpu.png").stat().st_size > 10_000
    assert "16 x 32: standard" in capsys.readouterr().out


def test_pareto():
    points = [(1.0, 5.0), (2.0, 4.0), (2.0, 6.0), (3.0, 4.5), (0.5, 9.0), (4.0, 1.0)]
    assert pareto_points(points) == [(0.5, 9.0), (1.0, 5.0), (2.0, 4.0), (4.0, 1.0)]


def pareto_points(points):
    return [points[i] for i in polar.pareto(points)]


@pytest.mark.parametrize("kind", polar.SPECTRA)
def test_spectra_are_what_they_are_called(kind):
    x = polar.matrices(kind, 12, 20, 2)
    s = np.linalg.svd(x, compute_uv=False)
    if polar.SPECTRA[kind] is not None:
        expected = np.broadcast_to(polar.SPECTRA[kind](12), s.shape)
        np.testing.assert_allclose(s, expected, atol=1e-12)
    factor = polar.polar_factor(x)
    s = np.linalg.svd(factor, compute_uv=False)
    rank = 3 if kind == "rank m/4" else 12
    np.testing.assert_allclose(
        s, np.broadcast_to(np.arange(12) < rank, s.shape), atol=1e-9
    )


@pytest.mark.parametrize(("norm", "lower"), [("frobenius", 1e-3), ("schatten4", 5e-3)])
def test_quintics_on_scalars(rng, x64, norm, lower):
    """The singular values of PolarExpress are the quintics of the singular values."""
    x = jnp.asarray(rng.standard_normal((10, 15)))
    y = jm.PolarExpress(4, norm=norm, lower=lower, dtype="float64")(x)
    s = np.linalg.svd(x, compute_uv=False)
    expected = np.sort(spectra.after(s, norm, 4, lower))
    found = np.sort(np.linalg.svd(y, compute_uv=False))
    # eps=1e-6 stands beside the norm, and the quintics are steep.
    np.testing.assert_allclose(found, expected, atol=1e-5)
    error = spectra.error({"singular_values": s}, (norm, 4, lower))
    assert error == pytest.approx(np.sqrt(np.mean((found - 1) ** 2)), abs=1e-5)


def test_normalized_rows(rng):
    """Rows that are orthogonal are only scaled: that leaves the polar factor."""
    u, _, vt = np.linalg.svd(rng.standard_normal((6, 10)), full_matrices=False)
    x = np.geomspace(1, 1e-9, 6)[:, None] * (u @ vt)
    np.testing.assert_allclose(spectra.after_aol(x, 9, 1e-3), u @ vt, atol=1e-9)
    x = rng.standard_normal((6, 10))
    y = spectra.after_aol(x, 9, 1e-3)
    np.testing.assert_allclose(y @ y.T, np.eye(6), atol=1e-9)


def test_recorded_spectra():
    """Of the matrices that Muon gets, with the factor of each."""
    records = spectra.record(2, [2], 32, 0)
    assert len({r["parameter"] for r in records}) == len(records) > 0
    for r in records:
        x, s, factor = r["matrix"], r["singular_values"], r["polar_factor"]
        assert sorted(r["shape"]) == list(x.shape)
        np.testing.assert_allclose(np.sum(x * factor), s.sum(), rtol=1e-9)
        y = x / (1.02 * s.max())
        for a, b, c in jm.polar_express_coefficients(9, lower=2e-3):
            gram = y @ y.T
            y = a * y + (b * gram + c * gram @ gram) @ y
        expected = np.linalg.norm(y - factor) / np.linalg.norm(factor)
        found = spectra.error(r, ("spectral", 9, 2e-3))
        assert found == pytest.approx(expected, abs=1e-9)


def test_summary_of_spectra(rng):
    records = []
    for s in (np.linspace(0.5, 1, 8), np.geomspace(1e-6, 1, 8)):
        u, _, vt = np.linalg.svd(rng.standard_normal((8, 8)))
        made = {"singular_values": s, "matrix": (u * s) @ vt, "polar_factor": u @ vt}
        records.append({"step": 1, "parameter": "w", "shape": [8, 8], **made})
    summary = spectra.summarize(records)
    chosen = summary["chosen"]
    assert (chosen["norm"], chosen["steps"]) == ("schatten4", 4)
    same = [c for c in summary["candidates"] if c["norm"] == "schatten4"]
    assert chosen["mean"] == min(c["mean"] for c in same if c["steps"] == 4)
    assert [s["of_the_largest"][0] for s in summary["spectra"]] == [0.5, 1e-6]


def test_the_machine_says_what_it_is():
    found = machine.describe("benchmarks.step", ["--models", "tiny"])
    assert found["command"] == "python -m benchmarks.step --models tiny"
    assert found["device"] and found["cores"] >= 1
    assert machine.version("no-such-package") is None


@pytest.mark.parametrize("in_turn", [False, True])
def test_scattered_sums_of_a_torus(in_turn):
    """Over all dimensions at once or in turn: the sum of x + 0 to x + 7, in order."""
    rows = np.arange(tpu_schedule.GRADIENT[0])[:, None] % 16
    given = jnp.broadcast_to(jnp.asarray(rows, jnp.bfloat16), tpu_schedule.GRADIENT)
    grid = np.array(jax.devices()[:8]).reshape(2, 2, 2)
    lowered = tpu_schedule.scatter(grid, tpu_schedule.TORUS, in_turn=in_turn)
    mesh = jax.sharding.Mesh(grid, tpu_schedule.TORUS)
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    found = lowered.compile()(jax.device_put(given, everywhere))
    assert found.sharding.shard_shape(found.shape) == (384, 768)
    wanted = np.broadcast_to(8 * rows + 28, tpu_schedule.GRADIENT)
    np.testing.assert_array_equal(np.asarray(found, np.float32), wanted)
