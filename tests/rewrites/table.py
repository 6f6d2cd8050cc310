"""`python -m tests.rewrites.table [-v] [--values] [part of a rewrite's name ...]`.

Prints one line for each rewrite: the programs that it applies to, and among them those
in which it changes a label or axes, or makes the reading an error that says what to
write (clear), which is no mistake, or one that does not (bare). -v names what changes.
--values computes losses instead, of some programs whose parameters and arguments a
rewrite leaves as they are, and names those that differ.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")

import concurrent.futures
import contextlib
import multiprocessing
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np

from jax_muon.reading import trace
from tests.rewrites import REWRITES, changes, programs
from tests.rewrites.case import only, rewritten

trace.RAISES = True
KINDS = ("label", "axes", "clear", "bare")


def all_changes(title):
    """What a rewrite changes, by program; None where it does not apply."""
    warnings.simplefilter("ignore")
    found = {name: changes(title, name) for name in programs()}
    jax.clear_caches()
    return title, found


def example(x):
    """Values of a shape: random floats, and integers 0 and 1."""
    rng = np.random.default_rng(0)
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.key(0)
    if jnp.issubdtype(x.dtype, jnp.floating):
        return jnp.asarray(rng.normal(size=x.shape) * 0.3, x.dtype)
    return jnp.asarray(rng.integers(0, 2, x.shape), x.dtype)


def values(title):
    """Losses before and after, by program; of every sixtieth one."""
    warnings.simplefilter("ignore")
    found = {}
    for name in [*programs()][[*REWRITES].index(title) % 60 :: 60]:
        cases = programs()[name], rewritten(title, name)
        given = {str(case and (case.params, case.args)) for case in cases}
        if len(given) == 1:
            arrays = jax.tree.map(example, (cases[0].params, *cases[0].args))
            # A CPU runs no kernel, and no shard_map over one of its eight devices.
            run = contextlib.suppress(jax.errors.JaxRuntimeError, ValueError)
            with REWRITES[title].setting(), run:
                found[name] = [float(jax.jit(only(x.loss))(*arrays)) for x in cases]
    jax.clear_caches()
    return title, found


def compare_values(titles):
    """Print the losses that differ; their number."""
    differ, compared = 0, set()
    for title, found in map(values, titles):
        for name, (before, after) in found.items():
            compared.add(title)
            if not np.allclose(before, after, rtol=3e-2, atol=1e-3):
                differ += 1
                print(f"{title}: {name}: {before} and {after}")
    print(f"{len(compared)} rewrites compared, {differ} losses differ; not compared:")
    print(", ".join(x for x in titles if x not in compared))
    return differ


def compare_readings(titles):
    """Print the table; the number of silent changes and bare errors."""
    print(f"{'rewrite':40}{'programs':>9}" + "".join(f"{x:>7}" for x in KINDS))
    totals = dict.fromkeys(("programs", *KINDS), 0)
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(2, spawn) as pool:
        for title, found in pool.map(all_changes, titles):
            tried = {name: x for name, x in found.items() if x is not None}
            row = {"programs": len(tried)}
            for kind in KINDS:
                row[kind] = sum(kind in dict(x) for x in tried.values())
            totals = {name: totals[name] + n for name, n in row.items()}
            numbers = "".join(f"{n:7}" for n in [*row.values()][1:])
            print(f"{title:40}{row['programs']:9}{numbers}", flush=True)
            for name, of_one in tried.items() if "-v" in sys.argv else ():
                for kind, text in of_one:
                    print(f"    {name}: {kind}: {text}")
    print(f"{len(titles)} rewrites: {totals}")
    return totals["label"] + totals["axes"] + totals["bare"]


if __name__ == "__main__":
    words = [x for x in sys.argv[1:] if not x.startswith("-")]
    titles = [x for x in REWRITES if not words or any(w in x for w in words)]
    compare = compare_values if "--values" in sys.argv else compare_readings
    sys.exit(compare(titles) > 0)
