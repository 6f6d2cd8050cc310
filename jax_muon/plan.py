"""What an optimizer will do with each parameter, as data, observed while it is traced.

`plan` runs `init` and `update` abstractly and collects what the transforms tell about
themselves (`notes.py`): so it is right for any composition, and cannot describe another
optimizer than the one at hand. `describe.py` prints it.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

from jax_muon import paths
from jax_muon.checks import as_transform, check_arrays
from jax_muon.matrices import Parameter
from jax_muon.mesh.owners import Pool
from jax_muon.mesh.specs import (
    arrays_and_others,
    bytes_by_path,
    is_spec,
    own_sharding,
    spec_names,
)
from jax_muon.mesh.traffic import Collective, collectives_of, ring_bytes
from jax_muon.notes import Note, listening


@dataclasses.dataclass(frozen=True)
class PlannedParameter:
    """What happens to one parameter.

    Attributes:
      parameter: how it is read: path, shape, dtype, label, role, reason, axes.
      matrices: number of matrices, their inputs and outputs; None where it is none.
      joined: how many of its matrices are orthogonalized as one with others.
      scale: factor of `scale_by_shape`, or None.
      state_bytes: of its optimizer state, on one device; None where that is neither
        ours nor the only one.
      spec: where it lies on the mesh of `on_mesh`, or by its type; None where neither
        tells.
      state_spec: where its gradient and state lie, or None.
      summed: mesh axes that its gradient is summed over, as far as is known.
    """

    parameter: Parameter
    matrices: tuple[int, int, int] | None
    joined: int
    scale: float | None
    state_bytes: int | None
    spec: PartitionSpec | None = None
    state_spec: PartitionSpec | None = None
    summed: tuple[str, ...] = ()

    @property
    def repeated(self) -> bool:
        """Whether no axis of this leaf takes what its gradient is summed over."""
        if self.state_spec is None or not self.summed:
            return False
        return not set(self.summed) & set(spec_names(self.state_spec))


@dataclasses.dataclass(frozen=True)
class Plan:
    """What an optimizer does with a tree of parameters on the devices of a mesh.

    Attributes:
      parameters: one entry for each.
      pools: divided matrices of one shape and placement, and who computes them.
      sizes: devices along each mesh axis; empty on one device.
      divide: mesh axes that further divide gradients and state.
      summed: mesh axes that gradients are summed over, as far as is known: those of the
        batch of a train step, else `divide`.
      collectives: what `update` itself sends to orthogonalize, in order.
      state_bytes: of all optimizer state, on one device.
    """

    parameters: tuple[PlannedParameter, ...]
    pools: tuple[Pool, ...]
    sizes: Mapping[str, int]
    divide: tuple[str, ...]
    summed: tuple[str, ...]
    collectives: tuple[Collective, ...]
    state_bytes: int

    @property
    def devices(self) -> int:
        """Devices of the mesh."""
        return math.prod(self.sizes.values())

    @property
    def sent_bytes(self) -> dict[str, float]:
        """Bytes that a device sends in a step, by what they are.

        "orthogonalize": matrices to owners and back; "gradients": their sums over
        `summed`, by reduce-scatter as far as state is divided over these axes, else by
        all-reduce; "gathers": all-gathers of updates, or of parameters at the beginning
        of a step, from where state lies.
        """
        sent = {"orthogonalize": sum(c.sent_bytes for c in self.collectives)}
        gradients = gathers = 0.0
        for leaf in self.parameters:
            if leaf.state_spec is None or not self.summed:
                continue
            found = leaf.parameter
            names = spec_names(leaf.state_spec)
            others = math.prod(self.sizes[n] for n in names if n not in self.summed)
            parts = math.prod(self.sizes[n] for n in names if n in self.summed)
            rest = math.prod(self.sizes[n] for n in self.summed if n not in names)
            size = math.prod(found.shape) * np.dtype(found.dtype).itemsize // others
            gradients += ring_bytes("reduce-scatter", parts, size)
            gradients += ring_bytes("all-reduce", rest, size // parts)
            gathers += ring_bytes("all-gather", parts, size // parts)
        return sent | {"gradients": gradients, "gathers": gathers}

    @property
    def flops(self) -> np.ndarray:
        """FLOPs of five quintics of the matrices, by device along axes of the mesh.

        For divided matrices as the plan of owners counts them; matrices that are not
        divided are computed on every device.
        """
        names = [name for name, size in self.sizes.items() if size > 1]
        work = np.zeros([self.sizes[name] for name in names])
        for pool in self.pools:
            m, n = pool.fan
            each = (20 * m * m * n + 10 * m**3) / pool.flops
            work = work + pool.load(self.sizes) * each
        if not self.pools:
            for leaf in self.parameters:
                if leaf.matrices is not None:
                    count, fan_in, fan_out = leaf.matrices
                    m, n = sorted((fan_in * leaf.joined, fan_out))
                    work = work + count / leaf.joined * (20 * m * m * n + 10 * m**3)
        return work

    @property
    def imbalance(self) -> float:
        """Work of the busiest device over an even share of what one device would do."""
        alone = 0.0
        for pool in self.pools:
            m, n = pool.fan
            different = math.prod(self.sizes[name] for name in pool.batch)
            alone += pool.count * different * (20 * m * m * n + 10 * m**3)
        return float(self.flops.max() * self.devices / alone) if alone else 1.0


def plan(tx: optax.GradientTransformation, params: Any, **extra_args: Any) -> Plan:
    """What an optimizer will do with each parameter, as data for a user's own asserts.

    Args:
      tx: any composition of this package's recipes and pieces with optax's: `chain`,
        `MultiSteps`, `inject_hyperparams`, `on_mesh`.
      params: the parameters, or their shapes (`jax.ShapeDtypeStruct`).
      **extra_args: of `tx.update`, such as `max_logits`, or their shapes.

    Returns:
      A `Plan`.

    Raises:
      ValueError: a leaf that is not an array; what `tx` raises at init and update.
    """
    update = as_transform("tx", tx).update
    check_arrays("params", params)
    shapes = jax.tree.map(_shape, params)
    arrays, others = arrays_and_others(extra_args)
    with _mesh_of(params):
        with listening() as at_init:
            # A new function: JAX does not trace again what it has traced before.
            state = jax.eval_shape(lambda params: tx.init(params), shapes)
        with listening() as at_update:
            jaxpr = jax.make_jaxpr(
                lambda g, s, p, arrays: update(g, s, p, **others, **arrays)
            )(shapes, state, shapes, arrays)
    unread = {
        path: Parameter(path, tuple(x.shape), x.dtype, "-", "-", "", None)
        for path, x in paths.leaves_with_paths(shapes)
    }
    if not any(note.kind == "state" for note in at_init):
        at_init.append(Note("state", {"bytes": bytes_by_path(state, shapes)}))
    typed: dict[str, tuple[PartitionSpec, PartitionSpec | None]] = {
        path: (x.sharding.spec, None)
        for path, x in paths.leaves_with_paths(shapes)
        if x.sharding is not None
    }
    return _gathered(unread, typed, state, at_init, at_update, collectives_of(jaxpr))


def _shape(x: Any) -> Any:
    sharding = own_sharding(x)
    kind = {"sharding": sharding} if sharding and _explicit(sharding.mesh) else {}
    return jax.ShapeDtypeStruct(x.shape, x.dtype, **kind)


def _explicit(mesh: Any) -> bool:
    return any(kind == jax.sharding.AxisType.Explicit for kind in mesh.axis_types)


def _mesh_of(params: Any) -> Any:
    """The mesh on whose Explicit axes parameters lie, as a context."""
    for leaf in jax.tree.leaves(params):
        sharding = own_sharding(leaf)
        if sharding and _explicit(sharding.mesh):
            return jax.sharding.use_abstract_mesh(sharding.mesh.abstract_mesh)
    return jax.sharding.use_abstract_mesh(jax.sharding.get_abstract_mesh())


def _gathered(
    unread: dict[str, Parameter],
    specs: dict[str, tuple[PartitionSpec, PartitionSpec | None]],
    state: Any,
    at_init: Sequence[Note],
    at_update: Sequence[Note],
    sent: Sequence[Collective],
) -> Plan:
    read: dict[str, Parameter] = {}
    joined: dict[str, int] = {}
    scales: dict[str, float] = {}
    bytes_by_path: dict[str, int] = {}
    pools: dict[Any, list[Pool]] = {}
    sizes: dict[str, int] = {}
    divide: tuple[str, ...] = ()
    summed: tuple[str, ...] = ()
    for kind, facts in at_update:
        if kind == "matrices":
            read |= facts["all"]
            names = list(facts["joined"])
            blocks = facts["joined"].blocks(names)
            for block in sorted(blocks, key=lambda block: block.joined):
                joined |= {names[leaf]: block.joined for leaf in block.leaves}
        elif kind == "scale":
            scales |= facts["factors"]
        elif kind == "pools":
            pools[facts["names"]] = facts["pools"]  # a branch may be traced twice
            sizes |= facts["sizes"]
        elif kind == "on_mesh":
            sizes |= dict(facts["layout"].mesh.shape)
            divide, summed = facts["layout"].divide, facts["layout"].summed
            pairs = zip(
                paths.leaves_with_paths(facts["params"]),
                *(
                    jax.tree.leaves(x, is_leaf=is_spec)
                    for x in (facts["coarse"], facts["fine"])
                ),
                strict=True,
            )
            specs |= {path: (coarse, fine) for (path, _), coarse, fine in pairs}
    total = sum(_bytes_on_a_device(x) for x in jax.tree.leaves(state))
    for kind, facts in at_init:
        if kind == "state":
            bytes_by_path |= facts["bytes"]
        elif kind == "placed_state":
            total += facts["on_a_device"] - facts["whole"]
    parts = {path: paths.find_prefix(unread, path).path for path in read}
    others = {p: x for p, x in unread.items() if p not in parts.values()}
    order = {path: index for index, path in enumerate(unread)}
    rows = []
    for path, parameter in sorted(
        (others | read).items(), key=lambda item: order[parts.get(item[0], item[0])]
    ):
        coarse, fine = paths.find_prefix(specs, path) or (None, None)
        rows.append(
            PlannedParameter(
                parameter,
                parameter.sizes if path in joined else None,
                joined.get(path, 1),
                scales.get(path),
                bytes_by_path.get(path),
                coarse,
                fine,
                summed,
            )
        )
    return Plan(
        tuple(rows),
        tuple(itertools.chain(*pools.values())),
        sizes,
        divide,
        summed,
        tuple(sent),
        total,
    )


def _bytes_on_a_device(x: Any) -> int:
    """Size of one device's piece of what an abstract init gave."""
    sharding = getattr(x, "sharding", None)
    shape = x.shape if sharding is None else sharding.shard_shape(x.shape)
    return math.prod(shape) * jnp.dtype(x.dtype).itemsize
