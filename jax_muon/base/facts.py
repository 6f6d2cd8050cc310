"""Facts that transforms record while they are traced, for tools and layouts.

A transform adds one by `facts.note()`, as in `note().residuals["up"] = "int16"`.
Outside of `recording`, as in a training run, facts are dropped.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import jax
from jaxtyping import PyTree

if TYPE_CHECKING:  # types of higher floors, whose modules record here
    from jax_muon.matrices.matrices import Parameter
    from jax_muon.mesh.layout import Placed
    from jax_muon.mesh.on_mesh import MeshOptimizer
    from jax_muon.mesh.plan import Pool


@dataclass
class Facts:
    """Facts about one optimizer. Keys are paths of parameters, unless a comment says
    otherwise; each comment ends with the files that write and read the fact.
    """

    # How each leaf was read; as one parameter, also if it is split into parts.
    # partition, matrices -> layout
    leaves: "dict[str, Parameter]" = field(default_factory=dict)
    # The same, but with parts in place of a split leaf: "qkv/q", "qkv/k", "qkv/v".
    # partition, matrices -> describe
    parameters: "dict[str, Parameter]" = field(default_factory=dict)
    # How many matrices are orthogonalized as one, mostly 1; only of parameters that
    # are orthogonalized. orthogonalize -> describe
    joined: dict[str, int] = field(default_factory=dict)
    # The factor of `scale_by_shape`, such as 2.0. scaling -> describe
    scales: dict[str, float] = field(default_factory=dict)
    # The dtype of a residual, such as "int16". keep_residual -> describe
    residuals: dict[str, str] = field(default_factory=dict)
    # True if polar factors of (m, n), m <= n, take the kernels for Hopper GPUs; by
    # (m, n). factors -> describe
    kernels: dict[tuple[int, int], bool] = field(default_factory=dict)
    # Pools by all the paths that one `orthogonalize` got.
    # orthogonalize -> describe, verify
    pools: "dict[tuple[str, ...], list[Pool]]" = field(default_factory=dict)
    # Devices along each axis of the mesh, by name. orthogonalize -> describe
    sizes: dict[str, int] = field(default_factory=dict)
    # Each `on_mesh`, with the specs of its leaves. on_mesh -> describe, verify
    on_mesh: "list[tuple[MeshOptimizer, Placed]]" = field(default_factory=list)


_recorded: contextvars.ContextVar[Facts | None] = contextvars.ContextVar(
    "jax_muon_facts", default=None
)


def note() -> Facts:
    """The record to add to; outside of `recording`, one that nobody reads."""
    return _recorded.get() or Facts()


@contextlib.contextmanager
def recording() -> Iterator[Facts]:
    """Facts that transforms record inside the `with` block.

    If one is traced twice, the later facts replace the earlier ones.
    """
    facts = Facts()
    token = _recorded.set(facts)
    try:
        yield facts
    finally:
        _recorded.reset(token)


def eval_shape(function: Callable[..., PyTree], *args: PyTree) -> tuple[PyTree, Facts]:
    """As `jax.eval_shape`, with the facts that the function records."""
    with recording() as facts:
        # A new function: JAX has no trace of it in its cache, which would record none.
        shapes = jax.eval_shape(lambda *args: function(*args), *args)
    return shapes, facts
