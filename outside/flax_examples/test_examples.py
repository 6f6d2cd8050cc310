"""Flax's examples lm1b and gemma: their train loops, configurations and shardings.

The examples are as Flax's source distribution has them. Random tokens stand for their
data sets; sampling, evaluation and checkpoints are left out.
"""

import functools
import importlib
import pathlib
import sys
import types
from unittest import mock

import jax
import numpy as np
import optax
import pytest
from flax import linen, nnx

import jax_muon as jm

(EXAMPLES,) = pathlib.Path(sys.prefix).glob("sources/flax-*/examples")
VOCABULARY, BATCH, LENGTH, STEPS = 64, 8, 16, 8
RECIPES = {
    "nanochat": functools.partial(jm.nanochat, dtype="float32"),
    "muon": functools.partial(jm.muon, dtype="float32"),
}


class Encoder:
    """What the loops ask of a tokenizer."""

    def vocab_size(self):
        return VOCABULARY

    def pad_id(self):
        return 0

    def tokenize(self, text):
        del text
        return types.SimpleNamespace(numpy=lambda: np.ones(2, np.int32))


def tokens():
    """The same batch in every step; 0 would be padding."""
    return np.random.default_rng(0).integers(1, VOCABULARY, (BATCH, LENGTH + 1))


@pytest.fixture
def load(monkeypatch):
    """A function from an example's name to its modules `train` and `configs.*`."""

    def modules(example, config, datasets):
        folder = EXAMPLES / example
        monkeypatch.syspath_prepend(folder)
        pipeline = types.ModuleType("input_pipeline")
        pipeline.get_datasets = datasets
        monkeypatch.setitem(sys.modules, "input_pipeline", pipeline)
        before = set(sys.modules)
        train = importlib.import_module("train")
        settings = importlib.import_module(f"configs.{config}").get_config()
        files = {path.stem for path in folder.iterdir()}
        for name in set(sys.modules) - before:
            if name.split(".")[0] in files:  # the other example has such names too
                del sys.modules[name]
        monkeypatch.setattr(train, "evaluate", lambda **_: {"loss": np.zeros(())})
        return train, settings

    return modules


def run(train, settings, workdir, recipe):
    """Losses that an example writes, with a recipe where it says `optax.adamw`."""

    def adamw(learning_rate, **settings):
        rest = optax.adamw(learning_rate, **settings)
        return recipe(lambda count: 10 * learning_rate(count), adamw=rest)

    train.optax = types.SimpleNamespace(**{**vars(optax), "adamw": adamw})
    writer = mock.MagicMock()
    with mock.patch.object(
        train.metric_writers, "create_default_writer", return_value=writer
    ):
        train.train_and_evaluate(settings, str(workdir))
    written = [call.args[1] for call in writer.write_scalars.call_args_list]
    return [float(x["train_loss"]) for x in written if "train_loss" in x]


def compare(start, one, many):
    """To 1e-4 of the distance travelled."""
    moved = jax.tree.map(np.subtract, *jax.device_get((one, start)))
    apart = jax.tree.map(np.subtract, *jax.device_get((many, one)))
    assert float(optax.tree.norm(apart)) < 1e-4 * float(optax.tree.norm(moved))


# --- lm1b -----------------------------------------------------------------------------


def train_lm1b(load, monkeypatch, workdir, recipe, sizes):
    """The first parameters, the last state and the losses on a mesh of these sizes."""

    def datasets(**_):
        train = STEPS * [{"inputs": tokens()[:, 1:]}]
        return train, None, None, Encoder()

    train, settings = load("lm1b", "default", datasets)
    settings.update(
        num_train_steps=STEPS,
        learning_rate=0.005,
        warmup_steps=2,
        eval_every_steps=1,
        per_device_batch_size=BATCH,
        num_layers=2,
        qkv_dim=32,
        emb_dim=32,
        mlp_dim=64,
        num_heads=2,
        max_target_length=LENGTH,
        max_eval_target_length=LENGTH,
        use_bfloat16=False,
    )
    devices = np.array(jax.devices()[: np.prod(sizes)]).reshape(sizes)
    monkeypatch.setattr(train.utils, "create_device_mesh", lambda _: devices)
    monkeypatch.setattr(train, "generate_prediction", lambda **_: "")
    setup = train.utils.setup_initial_state
    models, states = [], []

    def read(params):
        (model,) = models
        inputs = jax.ShapeDtypeStruct((BATCH, LENGTH), np.int32)
        return jm.find_matrices(
            params, lambda p, x: model.apply({"params": p}, x), inputs
        )

    def setup_on_mesh(model, tx, config, key, mesh):
        """Shardings by logical axes, which the example unboxes before its steps."""
        models.append(model)
        boxed = jax.eval_shape(model.init, key, np.ones((1, LENGTH)))["params"]
        names, rules = linen.get_partition_spec(boxed), config.logical_axis_rules
        where = linen.logical_to_mesh_sharding(names, mesh, rules)
        state, shardings = setup(model, jm.on_mesh(tx, where), config, key, mesh)
        states.append(jax.device_get(state.params))
        return state, shardings

    monkeypatch.setattr(train.utils, "setup_initial_state", setup_on_mesh)
    monkeypatch.setattr(
        train.checkpoints,
        "save_checkpoint_multiprocess",
        lambda _, state, step: states.append(state),
    )
    losses = run(train, settings, workdir, functools.partial(recipe, matrices=read))
    return states[0], states[-1], losses


@pytest.mark.parametrize("recipe", RECIPES)
def test_lm1b(recipe, load, monkeypatch, tmp_path):
    """On (2, 2, 2) devices as on one, with momentum sharded as the parameters."""
    ends = {}
    for sizes in ((1, 1, 1), (2, 2, 2)):
        with monkeypatch.context() as context:
            ends[sizes] = train_lm1b(
                load, context, tmp_path / str(sizes), RECIPES[recipe], sizes
            )
    (start, one, losses), (_, many, found) = ends.values()
    assert len(losses) == STEPS
    assert losses[-1] < losses[0] - 0.5
    np.testing.assert_allclose(found, losses, rtol=1e-4)
    compare(start, one.params, many.params)
    check_state(many.params, many.opt_state)


def check_state(params, state):
    """Momenta and moments are sharded as the parameters of their paths."""
    keystr = functools.partial(jax.tree_util.keystr, simple=True, separator="/")
    flatten = jax.tree_util.tree_leaves_with_path
    specs = {keystr(path): (x.shape, x.sharding.spec) for path, x in flatten(params)}
    assert sum(any(spec) for _, spec in specs.values()) > 8
    seen = 0
    for path, x in flatten(state):
        for name, (shape, spec) in specs.items():
            if keystr(path).endswith(f"/{name}") and x.shape == shape:
                assert x.sharding.spec == spec, (path, x.sharding, spec)
                seen += 1
    assert seen >= len(specs)


# --- gemma ----------------------------------------------------------------------------


def train_gemma(load, monkeypatch, workdir, recipe, sizes):
    """The first and last parameters, the optimizer's last state, and the losses."""
    batches, models = [], []

    def datasets(*, data_sharding, **_):
        batch = {
            "inputs": tokens()[:, :-1],
            "inputs_position": np.tile(np.arange(LENGTH), (BATCH, 1)),
            "inputs_segmentation": np.ones((BATCH, LENGTH), np.int32),
            "targets": tokens()[:, 1:],
        }
        batches.extend(STEPS * [jax.device_put(batch, data_sharding)])
        return batches, None, Encoder()

    train, settings = load("gemma", "tiny", datasets)
    parameters = settings.transformer_params | {
        "num_layers": 2,
        "embed_dim": 32,
        "hidden_dim": 64,
        "num_heads": 4,
        "head_dim": 16,
        "num_kv_heads": 2,
        "attention_types": (1, 1),
    }
    settings = settings.replace(
        transformer_params=parameters,
        num_train_steps=STEPS,
        learning_rate=0.005,
        warmup_steps=2,
        eval_every_steps=1,
        use_bfloat16=False,
        restore_checkpoints=False,
        fsdp_parallelism=sizes[0],
        tensor_parallelism=sizes[1],
    )
    devices = jax.devices()[: np.prod(sizes)]
    monkeypatch.setattr(jax, "devices", lambda *_: devices)
    for module in ("tokenizer", "sampler_lib", "ocp"):
        monkeypatch.setattr(train, module, mock.MagicMock())
    starts, make = [], train.transformer_lib.Transformer

    def recorded_model(*args, **settings):
        models.append(make(*args, **settings))
        return models[-1]

    def read():
        """By the model, before the optimizer is made."""
        graph, params, rest = nnx.split(models[-1], nnx.Param, ...)

        def logits(params, rest, batch):
            mask = train.transformer_lib.make_causal_attn_mask(batch["inputs"] > 0)
            model = nnx.view(nnx.merge(graph, params, rest), deterministic=True)
            places = batch["inputs_position"]
            return model(
                batch["inputs"], positions=places, attention_mask=mask, cache=None
            )[0]

        return jm.find_matrices(params, logits, rest, batches[0])

    monkeypatch.setattr(train.transformer_lib, "Transformer", recorded_model)

    def recorded(*args, **settings):
        tx = recipe(*args, matrices=read(), **settings)

        def init(params):
            starts.append(jax.device_get(nnx.to_pure_dict(params)))
            return tx.init(params)

        return optax.GradientTransformation(init, tx.update)

    losses = run(train, settings, workdir, recorded)
    (saved,) = train.ocp.args.StandardSave.call_args.args
    states = (nnx.to_pure_dict(saved[name]) for name in ("model", "optimizer"))
    return *starts, *states, losses


@pytest.mark.parametrize("recipe", RECIPES)
def test_gemma(recipe, load, monkeypatch, tmp_path):
    """On (4, 2) devices as on one; on Explicit axes nothing goes around the recipe."""
    ends = {}
    for sizes in ((1, 1), (4, 2)):
        with monkeypatch.context() as context:
            ends[sizes] = train_gemma(
                load, context, tmp_path / str(sizes), RECIPES[recipe], sizes
            )
    (start, one, _, losses), (_, many, optimizer, found) = ends.values()
    assert losses[-1] < losses[0] - 0.5  # means over the steps so far
    np.testing.assert_allclose(found, losses, rtol=1e-4)
    compare(start, one, many)
    check_state(many, optimizer["opt_state"])
