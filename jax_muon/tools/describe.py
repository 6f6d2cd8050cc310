"""What an optimizer will do with each parameter, observed while it is traced.

`describe` traces `init` and `update` abstractly and collects the facts that transforms
record (`notes.py`). So the result is right for any composition of transforms, and it
always belongs to the optimizer it was given.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, PartitionSpec

from jax_muon import checks, notes, trees
from jax_muon.joins import joined_matrices
from jax_muon.matrices import ADAMW, Parameter
from jax_muon.mesh import array_types, owners, plan
from jax_muon.mesh import specs as mesh_specs
from jax_muon.mesh.collectives import Collective, members_over
from jax_muon.mesh.on_mesh import abstract_state
from jax_muon.reading.read import trained
from jax_muon.tools.description import DescribedParameter, Description


def describe(
    tx: optax.GradientTransformation,
    params: Any,
    *,
    devices_per_host: int = owners.DEVICES_PER_HOST,
    **extra_args: Any,
) -> Description:
    """What an optimizer will do with each parameter: a table, and data to assert on.

    Args:
      tx: any composition of this package's recipes and pieces with optax's: `chain`,
        `MultiSteps`, `inject_hyperparams`, `on_mesh`.
      params: the model as in `read`, or shapes (`jax.ShapeDtypeStruct`).
      devices_per_host: how many neighbours on the mesh share a host, or whatever else
        has faster links inside, such as a pod; for the bytes between hosts.
      **extra_args: arguments of `tx.update`, such as `max_logits`, or their shapes.

    Returns:
      A `Description`. Printed, it is a table: "role" and "why" say how a parameter was
      read; "as matrices" is batch x (in, out); "scale" multiplies the update; "state"
      is memory on one device. On a mesh "sharding" has the mesh axes of the parameter
      and of its state, and a second table shows which devices compute the matrices,
      how much each sends, also between hosts, and what costs most. The attributes hold
      the same facts as data.

    Raises:
      ValueError: a leaf that is not an array; whatever `tx` raises at init and update.

    Examples:
      >>> import jax
      >>> import jax_muon as jm
      >>> shapes = {"wte": jax.ShapeDtypeStruct((96, 64), "float32"),
      ...           "up": jax.ShapeDtypeStruct((64, 256), "float32")}
      >>> tx = jm.nanochat(matrices={"wte": "adamw", "up": "muon"})
      >>> plan = describe(tx, shapes)
      >>> [x.parameter.label for x in plan.parameters]
      ['muon', 'adamw']
      >>> str(plan).splitlines()[0]
      'parameter   shape      role     as matrices     label   scale     state   why'
    """
    tx = checks.as_transform("tx", tx)
    params = checks.arrays("params", trained(params))
    checks.count("devices_per_host", devices_per_host)
    shapes = jax.tree.map(_shape, params)
    arrays, others = array_types.arrays_and_others(extra_args)

    def first_step(params: Any, arrays: Any) -> Any:
        state = tx.init(params)
        tx.update(params, state, params, **others, **arrays)
        return state

    with _mesh_of(shapes):
        state, heard = notes.traced(first_step, shapes, arrays)
    specs: dict[str, tuple[PartitionSpec, PartitionSpec | None]] = {
        path: (x.sharding.spec, None)
        for path, x in trees.leaves_with_paths(shapes)
        if x.sharding is not None
    }
    sizes, plans = heard["sizes"], heard["pools"].values()
    summed: tuple[str, ...] = ()
    for optimizer, (names, *both) in heard["on_mesh"].items():
        layout = optimizer.layout
        state = abstract_state(tx, shapes, layout.mesh)
        sizes |= layout.mesh.shape
        summed = layout.divide
        specs |= dict(zip(names, zip(*both, strict=True), strict=True))
    joined: dict[str, int] = {}
    for matrices in heard["matrices"].values():
        names = list(matrices)
        made = joined_matrices(matrices, names, [x.shape for x in matrices.values()])
        for made_of in sorted(made, key=lambda x: x.size):
            joined |= {names[leaf]: made_of.size for leaf in made_of.leaves}
    read = _rows(shapes, heard["parameters"])
    state_bytes = _bytes_by_path(state, [parameter.path for parameter in read])
    residuals = heard["residual"]

    def described(parameter: Parameter) -> DescribedParameter:
        path = parameter.path
        of_param, of_state = specs.get(
            trees.nearest_prefix(specs, path) or "", (None, None)
        )
        names = () if of_state is None else mesh_specs.spec_names(of_state)
        return DescribedParameter(
            parameter,
            parameter.sizes if path in joined else None,
            joined.get(path, 1),
            heard["scale"].get(path),
            state_bytes[path],
            of_param,
            of_state,
            of_state is not None and bool(summed) and set(summed).isdisjoint(names),
            residuals.get(trees.nearest_prefix(residuals, path)),
        )

    leaves = tuple(map(described, read))
    sent = [
        ("orthogonalize", "", transfer)
        for pools in plans
        for transfer in plan.transfers(pools, sizes)
    ]
    for leaf in leaves:
        path = leaf.parameter.path
        sent += [(what, path, x) for what, x in _transfers(leaf, sizes, summed)]
    return Description(
        leaves,
        tuple(itertools.chain(*plans)),
        sizes,
        summed,
        tuple(sent),
        devices_per_host,
        sum(map(_bytes_on_a_device, jax.tree.leaves(state))),
        heard["default"].get(ADAMW),
    )


def _transfers(
    leaf: DescribedParameter, sizes: Mapping[str, int], summed: Sequence[str]
) -> Iterator[tuple[str, Collective]]:
    """Gathers of a parameter and of its update, and the sum of its gradient.

    The gathers are along the axes that shard the parameter, and then along those that
    shard only its state; the gradient is summed over both at once.
    """
    if leaf.spec is None or leaf.state_spec is None:
        return
    of_param, names = (
        set(mesh_specs.spec_names(x)) for x in (leaf.spec, leaf.state_spec)
    )
    size = leaf.bytes // math.prod(sizes[n] for n in names.difference(summed))

    def rings(parts: Any) -> Iterator[tuple[Any, int]]:
        """Over which devices, and bytes of the shard that they divide."""
        shard = size
        for along, entry in itertools.product(parts, leaf.state_spec or ()):
            axes = {*mesh_specs.entry_names(entry)} & {*summed} & along
            members = members_over(axes, sizes)
            yield members, shard
            shard //= len(members)

    for members, shard in rings([of_param, names - of_param]):
        gather = Collective("all-gather", members, shard // len(members))
        yield "gathers", gather
    for members, shard in rings([names]):
        yield "gradients", Collective("reduce-scatter", members, shard)
    left = size // math.prod(sizes[n] for n in names.intersection(summed))
    rest = members_over({*summed} - names, sizes)
    yield "gradients", Collective("all-reduce", rest, left)


def _shape(x: Any) -> jax.ShapeDtypeStruct:
    """The shape of an array, with its sharding if its type shows that."""
    sharding = array_types.own_sharding(x)
    if sharding is not None and AxisType.Explicit not in sharding.mesh.axis_types:
        sharding = None
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def _mesh_of(shapes: Any) -> Any:
    """A context with the mesh whose Explicit axes shard the parameters."""
    meshes = (x.sharding.mesh for x in jax.tree.leaves(shapes) if x.sharding)
    mesh = next(meshes, jax.sharding.get_abstract_mesh())
    return jax.sharding.use_abstract_mesh(mesh.abstract_mesh)


def _rows(shapes: Any, read: Mapping[str, Parameter]) -> list[Parameter]:
    """The parameters of a tree as they are read, or the parts of those with splits."""
    rows: dict[str, list[Parameter]] = {}
    leaves = dict(trees.leaves_with_paths(shapes))
    for path, parameter in read.items():
        leaf = trees.nearest_prefix(leaves, path) or ""
        # `keep_residual` shows its optimizer a wider dtype.
        parameter = dataclasses.replace(parameter, dtype=leaves[leaf].dtype)
        rows.setdefault(leaf, []).append(parameter)
    for path, x in leaves.items():
        unread = Parameter(path, tuple(x.shape), x.dtype, "-", "-", "", None)
        rows.setdefault(path, [unread])
    return [parameter for path in leaves for parameter in rows[path]]


def _bytes_by_path(state: Any, names: Sequence[str]) -> dict[str, int]:
    """Bytes of state on a device. A parameter's path ends that of its state.

    Integers without axes are counts of steps. They belong to no parameter, not even to
    one called `count`.
    """
    total = dict.fromkeys(names, 0)
    for path, x in trees.leaves_with_paths(state):
        if not x.shape and jnp.issubdtype(x.dtype, jnp.integer):
            continue
        while path not in total and path:
            path = path.partition("/")[2]
        if path in total:
            total[path] += _bytes_on_a_device(x)
    return total


def _bytes_on_a_device(x: jax.ShapeDtypeStruct) -> int:
    shape = x.shape if x.sharding is None else x.sharding.shard_shape(x.shape)
    return math.prod(shape) * x.dtype.itemsize
