# Two commands do everything on a machine with Python 3.11 and a package index:
#   make train    trains a GPT on real text with jax_muon.nanochat()
#   make test     runs the tests
# and `make parity` compares every number with PyTorch and writes parity/report.md.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt
ARGS ?=
RESULTS ?= benchmarks/results
VERSIONS ?= 3.11_0.10.2_0.2.6 3.12_0.11.1_0.2.6 3.12_0.11.1_0.2.8 3.13_0.12.0.1_0.2.8
# All tests but those that need PyTorch or several processes.
VERSION_TESTS ?= tests jax_muon --ignore=tests/parity \
	--ignore=tests/examples/test_launch.py \
	--deselect=tests/benchmarks/test_benchmarks.py::test_torch_contender \
	--deselect=tests/benchmarks/test_benchmarks.py::test_stacked_nanochat_does_what_nanochat_does \
	--deselect=tests/benchmarks/test_on_a_card.py::test_the_command_at_tiny_sizes \
	--deselect=tests/examples/test_train_gpt.py::test_two_killed_processes_go_on_elsewhere
OUTSIDE ?= $(patsubst outside/%/requirements.txt,%,$(wildcard outside/*/requirements.txt))

# What `make test-types` checks in jax_muon/.
TYPED := polar transforms base.dtypes

# The environments of benchmarks/reading_models.
READING_MODELS := transformers maxtext levanter tunix keras_hub

.PHONY: train train-multiprocess test test-types test-versions test-outside test-rewrites \
	reading-models release-check parity venv docs lint bench gpu-schedule gpu-traffic clean

train: $(VENV)/examples
	$(BIN)/python examples/train_gpt.py $(ARGS)

# Two processes with four CPU devices each.
train-multiprocess: $(VENV)/examples
	$(BIN)/python examples/launch.py 2 examples/train_gpt.py \
		--sharding zero2 --devices 4 --name multiprocess $(ARGS)

test: venv
	$(BIN)/python -m pytest -n 2 $(ARGS)

# The shapes and dtypes in annotations, checked as these tests run.
test-types: venv
	packages=$$(printf 'jax_muon.%s,' $(TYPED))beartype.beartype && \
	$(BIN)/python -m pytest -n 2 --jaxtyping-packages=$$packages \
		tests/polar/test_factors.py tests/transforms/test_pieces.py \
		tests/transforms/test_momentum.py $(ARGS)

# Versions of Python, jax and optax, each in an environment of its own: the oldest,
# levanter's pins, MaxText's floor, and the newest.
test-versions: $(VERSIONS:%=runs/versions/%)
	for version in $^; do \
		PYTHONPATH=. $$version/bin/python -m pytest -n 2 $(VERSION_TESTS) $(ARGS) || exit 1; \
	done

runs/versions/%: pyproject.toml
	python$(word 1,$(subst _, ,$*)) -m venv $@
	$@/bin/pip install --quiet --disable-pip-version-check \
		jax==$(word 2,$(subst _, ,$*)) optax==$(word 3,$(subst _, ,$*)) \
		-e '.[examples]' chex equinox hypothesis keras pytest pytest-xdist
	touch $@

# Frameworks and other implementations as they are published: each folder of outside/ has
# tests and the whole environment that they need, every version pinned. Needs Python 3.11 and 3.12.
test-outside: $(OUTSIDE:%=runs/outside/%)
	for name in $(OUTSIDE); do \
		PYTHONPATH=. runs/outside/$$name/bin/python -m pytest outside/$$name $(ARGS) || exit 1; \
	done

# All programs of tests/programs in all forms of tests/rewrites: what changes their
# reading, in a table. `make test-rewrites ARGS="-v sizes"` names it, of some rewrites.
test-rewrites: venv
	$(BIN)/python -m tests.rewrites.table $(ARGS)

# How the parameters of these packages' models are read by their losses.
reading-models: venv $(READING_MODELS:%=runs/outside/%)
	$(BIN)/python -m benchmarks.reading_models $(ARGS)

# Without dependencies: several of these packages ask for CUDA libraries or TensorFlow,
# which their optimizers and models never import. Examples that no wheel has come from
# the source distributions in `sources.txt`.
runs/outside/%: OUTSIDE_PYTHON = python3.12
# PyTorch for CPUs has a wheel for 3.11.
runs/outside/emerging_optimizers runs/outside/sbx: OUTSIDE_PYTHON = python3.11
runs/outside/%: outside/%/requirements.txt
	$(OUTSIDE_PYTHON) -m venv $@
	$@/bin/pip install --quiet --disable-pip-version-check --no-deps \
		--ignore-requires-python -r $<
	if [ -f outside/$*/sources.txt ]; then \
		$@/bin/pip download --quiet --disable-pip-version-check --no-deps \
			--no-binary=$$(sed 's/==.*//' outside/$*/sources.txt) \
			--dest $@/sources -r outside/$*/sources.txt && \
		tar --extract --file $@/sources/*.tar.gz --directory $@/sources; fi
	touch $@

# All of a release but the upload: what must agree, the wheel with the links that an index
# shows, its metadata, and the self-test and README's code with nothing but it
# and what it depends on. The publisher knows its own address.
REPOSITORY ?= https://repository.example/jax_muon
release-check:
	rm -rf dist runs/release
	$(PYTHON) docs/release.py runs/release/tree $(REPOSITORY)
	$(PYTHON) -m venv runs/release/build
	runs/release/build/bin/pip install --quiet --disable-pip-version-check build twine==7.0.0
	runs/release/build/bin/python -m build --outdir dist runs/release/tree
	runs/release/build/bin/twine check --strict dist/*
	$(PYTHON) -m venv runs/release/bare
	runs/release/bare/bin/pip install --quiet --disable-pip-version-check dist/*.whl
	sed -n '/^```python/,/^```$$/{/^```/d;p}' README.md > runs/release/model.py
	cd runs/release && bare/bin/python model.py
	cd runs/release && JAX_NUM_CPU_DEVICES=8 bare/bin/python -m jax_muon

parity: $(VENV)/parity
	$(BIN)/python -m parity.run

venv: $(VENV)/test

# With --quiet mkdocs would count no warnings, and none would fail.
docs: $(VENV)/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --site-dir runs/site

lint: $(VENV)/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --follow-untyped-imports --follow-imports=silent tests/typed_program.py

# The step on this CPU, beside optax and torch; `make bench ARGS="--models gpt2-350m"`
# takes another model.
bench: $(VENV)/parity
	$(BIN)/python -m benchmarks.step --json $(RESULTS) $(ARGS)

# How XLA schedules whole train steps for 64 and 256 H100s, in three layouts; no GPU is
# needed. `make gpu-schedule ARGS="--models gpt2-124m --gpus 8"` is a small case.
gpu-schedule: $(VENV)/gpu-schedule
	$(BIN)/python -m benchmarks.schedule.gpu_schedule $(or $(ARGS),--json $(RESULTS)/gpu_schedule_scale.json)

# Bytes that an optimizer step moves on an H100, by kind, beside the least; no GPU is needed.
gpu-traffic: $(VENV)/gpu-schedule
	$(BIN)/python -m benchmarks.schedule.traffic $(ARGS)

# The extra of that name, without the CUDA libraries that its packages depend on: 250 MB
# for the compiler alone.
$(VENV)/gpu-schedule: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e .
	$(PIP) --no-deps jax-cuda13-plugin jax-cuda13-pjrt nvidia-cuda-nvcc nvidia-nvvm
	touch $@

# One stamp for each extra that is installed.
$(VENV)/examples $(VENV)/test $(VENV)/parity $(VENV)/docs $(VENV)/dev: $(VENV)/%: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e '.[$*]'
	touch $@

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

clean:
	rm -rf $(VENV) runs dist .pytest_cache .mypy_cache .ruff_cache
