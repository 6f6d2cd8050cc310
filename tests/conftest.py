"""Settings of the whole suite: several CPU devices, and one place for randomness."""

import gc
import importlib.metadata
import os

# Most of the suite's time is compilation, of programs that run once or twice: LLVM
# optimizes nothing, a module is not split (that pays for large ones only), and fusions
# are written by XLA's older emitter, which is quick.
# XLA's own passes, which place collectives and divide the work, are as ever.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
if importlib.metadata.version("jaxlib").startswith(("0.10.", "0.11.0")):
    # jaxlib 0.11.2 does not know the first, and an unknown flag ends the process.
    os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"
    os.environ["XLA_FLAGS"] += " --xla_cpu_parallel_codegen_split_count=1"
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import hypothesis
import jax
import numpy as np
import pytest

from jax_muon.reading import trace

# The package broadcasts no array to more axes; what users write may.
jax.config.update("jax_numpy_rank_promotion", "raise")

trace.RAISES = True

# Programs are large trees of Python objects that live on; looking through them for
# garbage as often as Python does by itself is a tenth of the suite's time.
gc.set_threshold(50_000, 50, 100)

# No test asserts a time, and a processor that others use as well is slow.
hypothesis.settings.register_profile("any speed", deadline=None)
hypothesis.settings.load_profile("any speed")


@pytest.fixture(scope="session", autouse=True)
def compile_once(tmp_path_factory):
    """Tests share programs, also between the workers of pytest-xdist."""
    folder = tmp_path_factory.getbasetemp().parent / "jax_cache"
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)


@pytest.fixture(scope="module", autouse=True)
def forget_programs():
    """Few programs serve several files of tests; all of them together take 5 GB."""
    yield
    jax.clear_caches()


@pytest.fixture
def as_users_write():
    """Arrays of unlike numbers of axes may be added, as in `x @ w + b`."""
    with jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture
def rng():
    """A seeded NumPy generator."""
    return np.random.default_rng(0)


@pytest.fixture
def x64():
    """Double precision for the time of one test."""
    with jax.enable_x64(True):
        yield
