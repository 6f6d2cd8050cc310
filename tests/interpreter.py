"""Pallas's interpreter of Mosaic GPU kernels, with rules that jax before 0.12 lacks.

From jax 0.12 on it runs the kernels as they are, and its race detector is on. Those of
0.10.2 and 0.11.2 cannot read or write references that are transposed, do not know
layout casts, and compile the kernel anew for every program. What is added here is what
jax 0.12 does; the kernel itself is the same. Those of 0.11.0 and 0.11.1 lack more.
"""

import contextlib
import functools
from collections.abc import Iterator
from unittest import mock

import jax
import pytest

VERSION = jax.__version_info__[:3]
NATIVE = VERSION >= (0, 12)
needs_interpreter = pytest.mark.skipif(
    not (NATIVE or VERSION in ((0, 10, 2), (0, 11, 2))),
    reason=f"the interpreter of jax {jax.__version__} lacks rules for wgmma or TMA",
)


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """A context in which kernels are traced for the interpreter, and must be run."""
    from jax._src.pallas.mosaic_gpu.interpret import params

    options = params.InterpretGPUParams(
        out_of_bounds_reads="uninitialized",  # of TMA, which gives zeros there
        detect_races=NATIVE,
    )
    with contextlib.ExitStack() as stack:
        if not NATIVE:
            for owner, name, value in _missing_rules():
                stack.enter_context(mock.patch.object(owner, name, value))
        stack.enter_context(params.force_gpu_interpret_mode(options))
        yield
        jax.effects_barrier()  # kernels under way need these rules, too


class _Transposed(tuple):
    """A range of a buffer whose content is read and written transposed."""


@functools.cache
def _missing_rules() -> list[tuple[object, str, object]]:
    """(owner, name, value) for each thing that is replaced before jax 0.12."""
    from jax._src import core
    from jax._src.pallas.mosaic.interpret import thread_map, utils
    from jax._src.pallas.mosaic_gpu import core as mosaic
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, shared_memory
    from jax._src.state.types import TransposeTransform
    from jax.interpreters import mlir

    memory = shared_memory.GPUSharedMemory
    to_range, validate = utils.to_range, gpu_callbacks._validate_transforms
    get, swap = memory.get_buffer_content, memory.swap_buffer_content

    def split(transforms):
        turned = bool(transforms) and isinstance(transforms[-1], TransposeTransform)
        return (transforms[:-1] if turned else transforms), turned

    def to_turned_range(transforms):
        others, turned = split(transforms)
        return _Transposed(to_range(others)) if turned else to_range(others)

    def get_turned(self, key, part, *args, **kwargs):
        value, *others = get(self, key, part, *args, **kwargs)
        return (value.T if isinstance(part, _Transposed) else value), *others

    def swap_turned(self, key, part, value, *args, **kwargs):
        if not isinstance(part, _Transposed):
            return swap(self, key, part, value, *args, **kwargs)
        old, *others = swap(self, key, part, value.T, *args, **kwargs)
        return old.T, *others

    # Layouts say where in the registers values lie, of which there are none.
    mlir.register_lowering(
        mosaic.layout_cast_p, lambda ctx, x, **_: [x], platform="cpu"
    )

    # One program for all, as the jaxpr is its key; and each runs to its end. It is
    # compiled ahead: threads that call jit wait for each other.
    run_once = jax.jit(core.eval_jaxpr, static_argnums=0)

    def run(jaxpr, consts, *args):
        program = run_once.trace(jaxpr, consts, *args).lower().compile()
        jax.block_until_ready(program(consts, *args))

    return [
        (utils, "to_range", to_turned_range),
        (gpu_callbacks, "_validate_transforms", lambda t: validate(split(t)[0])),
        (memory, "get_buffer_content", get_turned),
        (memory, "swap_buffer_content", swap_turned),
        (thread_map, "_run_jaxpr", run),
    ]
