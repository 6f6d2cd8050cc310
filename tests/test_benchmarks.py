"""The benchmarks run, at tiny sizes, and what they compute without a clock is right."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import contenders, flops, machine, polar, step
from benchmarks.parameters import model_parameters
from benchmarks.schedule import tpu_schedule


@pytest.mark.parametrize(
    ("name", "layout"),
    [(name, "scanned") for name in contenders.NAMES]
    + [(name, "separate") for name in ("nanochat", "optax", "optax-scan")],
)
def test_contenders_move_every_parameter(name, layout):
    shapes = model_parameters("tiny", jnp.float32, scanned=layout == "scanned")
    params, grads = (contenders.random_like(shapes, seed) for seed in (0, 1))
    init, one_step = contenders.make_step(name, "float32", shapes)
    new, _ = jax.jit(one_step)(params, init(params), grads)
    for old, leaf in zip(jax.tree.leaves(params), jax.tree.leaves(new), strict=True):
        assert jnp.isfinite(leaf).all()
        assert (old != leaf).mean() > 0.99


def test_a_pair_of_processes(tmp_path, capsys):
    """The command as `make bench` gives it, and a second run that adds to its file."""
    words = ["--models", "tiny", "--rounds", "2", "--json", str(tmp_path), "--pairs"]
    step.main([*words, "scanned to optax-scan"])
    path = tmp_path / "step_cpu.json"
    (first,) = json.loads(path.read_text())
    other = first | {"ours": "nanochat, float32, separate"}
    other |= {"theirs": "nanochat, float32, scanned"}
    step.save([other], path)
    step.save([other | {"ratio": 1.5}], path)
    rows = json.loads(path.read_text())
    assert [(r["ours"], r["theirs"]) for r in rows] == [
        ("nanochat, float32, scanned", "optax-scan, float32, scanned"),
        ("nanochat, float32, separate", "nanochat, float32, scanned"),
    ]
    assert rows[1]["ratio"] == 1.5
    assert len(first["ratios"]) == 2
    assert first["ratio"] == pytest.approx(np.median(first["ratios"]))
    assert min(first["ours_s"], first["theirs_s"], *first["run"]["peaks"].values()) > 0
    assert first["ours_info"]["temporary_bytes"] > 0
    assert first["run"]["versions"]["jax"] == jax.__version__
    assert (tmp_path / "step_cpu.png").stat().st_size > 10_000
    assert "nanochat, float32, scanned   optax-scan" in capsys.readouterr().out


def test_torch_contender():
    from benchmarks.torch_contenders import TorchContender

    contender = TorchContender("torch-muon", "tiny", "bfloat16", "cpu")
    groups = [group for o in contender.optimizers for group in o.param_groups]
    after = [p for group in groups for p in group["params"]]
    before = [p.detach().clone() for p in after]
    assert contender.step() > 0
    assert len(after) == 2 * 6 + 2
    assert all((a != b).any() for a, b in zip(after, before, strict=True))
    with pytest.raises(ValueError, match="torch-nanochat"):
        TorchContender("torch-adam", "tiny", "bfloat16", "cpu")


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
    best = [points[i] for i in polar.pareto(points)]
    assert best == [(0.5, 9.0), (1.0, 5.0), (2.0, 4.0), (4.0, 1.0)]


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
