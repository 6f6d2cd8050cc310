# Two commands do everything on a machine that has Python 3.11 and nothing else:
#   make train    trains a GPT on real text with jax_muon.nanochat()
#   make test     runs the tests
# and `make parity` compares every number with PyTorch and writes parity/report.md.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt
ARGS ?=

.PHONY: train train-multiprocess test parity venv docs lint gpu-schedule \
	symmetric-kernel clean

train: $(VENV)/examples
	$(BIN)/python examples/train_gpt.py $(ARGS)

# Two processes with four CPU devices each.
train-multiprocess: $(VENV)/examples
	$(BIN)/python examples/launch.py 2 examples/train_gpt.py \
		--sharding zero2 --devices 4 --name multiprocess $(ARGS)

test: venv
	$(BIN)/python -m pytest -n 2 $(ARGS)

parity: $(VENV)/parity
	$(BIN)/python -m parity.run $(ARGS)

venv: $(VENV)/test

docs: $(VENV)/docs
	$(BIN)/mkdocs build --quiet --site-dir runs/site

lint: $(VENV)/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# How XLA schedules the ZeRO-2 step for 8 and 64 H100s; no GPU is needed.
gpu-schedule: $(VENV)/gpu-schedule
	$(BIN)/python -m benchmarks.gpu_schedule $(ARGS)

# What the compiler makes of the kernels for symmetric products; ARGS=--time on a GPU.
symmetric-kernel: $(VENV)/gpu-schedule
	$(BIN)/python -m benchmarks.symmetric_kernel $(ARGS)

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
	rm -rf $(VENV) runs .pytest_cache .mypy_cache .ruff_cache
