"""Weight decay: of some parameters by a mask, and where the step shrinks weights."""

from collections.abc import Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from jax_muon.base import checks, dtypes, trees

# Which weights decay, as in `optax.add_decayed_weights`: a tree of booleans, or a
# prefix of one, or a function of the parameters that returns it. None: all of them.
Mask: TypeAlias = Any


def add_cautious_decayed_weights(
    weight_decay: optax.ScalarOrSchedule = 0.0, mask: Mask = None
) -> optax.GradientTransformation:
    r"""Add decayed weights where the step moves the weight towards zero anyway.

    The update :math:`U` becomes :math:`U + \lambda W [U W \ge 0]`, elementwise (arXiv
    2510.12402). It goes before the learning rate, like `optax.add_decayed_weights`.

    Args:
      weight_decay: :math:`\lambda`, at least 0, or a schedule of it.
      mask: which parameters decay: a tree of booleans with the paths of the parameters
        or of modules, or a function of the parameters that returns one; None for all.

    Raises:
      ValueError: at update, params=None, unless weight_decay is 0; with its path, a
        parameter that the mask does not have.

    Examples:
      >>> params, updates = jnp.array([2.0, -2.0]), jnp.array([1.0, 1.0])
      >>> tx = jm.add_cautious_decayed_weights(0.5)
      >>> tx.update(updates, tx.init(params), params)[0].tolist()
      [2.0, 1.0]
    """
    weight_decay = checks.as_rate("weight_decay", weight_decay)
    check_mask("mask", mask)

    def init_fn(params: optax.Params) -> optax.ScaleByScheduleState:
        del params
        return optax.ScaleByScheduleState(jnp.zeros([], jnp.int32))

    def update_fn(
        updates: optax.Updates,
        state: optax.ScaleByScheduleState,
        params: optax.Params | None = None,
    ) -> tuple[optax.Updates, optax.ScaleByScheduleState]:
        updates = trees.as_wide_as_params(updates, params)
        new_state = optax.ScaleByScheduleState(optax.safe_increment(state.count))
        if isinstance(weight_decay, float) and weight_decay == 0:
            return updates, new_state
        checks.check_params("weight_decay, unless it is 0.0,", params)
        now = checks.rate_at(weight_decay, state.count)

        def decay(u: Array, w: Array) -> Array:
            wide_u = dtypes.wide(u)
            wide_w = w.astype(wide_u.dtype)
            decayed = dtypes.in_dtype_of(wide_w, now) * wide_w
            decayed = jnp.where(wide_u * wide_w >= 0, decayed, 0)
            return (wide_u + decayed).astype(u.dtype)

        return jax.tree.map(decay, updates, params), new_state

    return _masked(optax.GradientTransformation(init_fn, update_fn), mask)


def add_decayed_weights(
    weight_decay: optax.ScalarOrSchedule, mask: Mask
) -> optax.GradientTransformation:
    """`optax.add_decayed_weights`; of 0, a transform that needs no parameters."""
    rate = checks.as_rate("weight_decay", weight_decay)
    check_mask("mask", mask)
    if isinstance(rate, float) and rate == 0:
        return optax.identity()

    tx = _masked(optax.add_decayed_weights(rate), mask)

    def update_fn(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
    ) -> tuple[optax.Updates, optax.OptState]:
        checks.check_params("weight_decay, unless it is 0.0,", params)
        updates, _ = tx.update(updates, state, params)
        # In optax 0.2.6 the count of a schedule does not change.
        return updates, jax.tree.map(optax.safe_increment, state)

    return optax.GradientTransformation(tx.init, update_fn)


def check_mask(name: str, mask: Mask) -> None:
    """A mask must not be one value, which `optax.inject_hyperparams` makes of one."""
    if isinstance(mask, (bool, jax.Array)):
        expected = "True and False, in a tree or from a function; under "
        expected += f"optax.inject_hyperparams name it in static_args=({name!r},)"
        checks.refuse(name, mask, expected)


def mask_by_path(mask: Mask, tree: optax.Params) -> dict[str, bool]:
    """The mask by path, after calling one that is a function with all parameters.

    Raises a ValueError for an entry that names no parameter, unless one is absent: in
    `optax.multi_transform` a MaskedNode replaces the parameters of other transforms.
    """
    mask = mask(tree) if trees.is_function(mask) else mask
    entries = dict(trees.leaves_with_paths(mask))
    leaves = dict(trees.leaves_with_paths(tree, is_leaf=_is_absent))
    absent = {path: x for path, x in leaves.items() if _is_absent(x)}
    used = {trees.nearest_prefix(entries, path) for path in leaves}
    unused = [x for x in entries if not (x in used or trees.nearest_prefix(absent, x))]
    if unused and leaves:
        raise ValueError(
            f"the mask of the weight decay has {', '.join(unused)}; expected "
            f"parameters, or modules around them: {', '.join(leaves)}"
        )
    return entries


def _is_absent(x: Any) -> bool:
    return x is None or isinstance(x, optax.MaskedNode)


def _masked(
    tx: optax.GradientTransformation, mask: Mask
) -> optax.GradientTransformation:
    """`optax.masked` by paths: an entry may be of a module, or a leaf in parts."""
    if mask is None:
        return tx

    def mask_of(tree: optax.Params) -> Mask:
        found = mask(tree) if trees.is_function(mask) else mask
        entries = dict(trees.leaves_with_paths(found))
        return trees.map_leaves(lambda path, _: _decays(entries, path), tree)

    return optax.masked(tx, mask_of)


def _decays(entries: Mapping[str, bool], path: str) -> bool:
    """True if a parameter decays.

    Parts of a split parameter, such as `qkv/kernel/query`, follow the entry of the
    whole one, `qkv/kernel`, or of a module around it.
    """
    where = trees.nearest_prefix(entries, path) or ""
    if where not in entries:
        raise ValueError(
            f"the mask of the weight decay says nothing of parameter {path!r}, but "
            f"of {', '.join(entries) or 'none'}; expected True or False for each "
            "parameter, or for a module that it is in"
        )
    if isinstance(entries[where], str):  # a label, say, which would be true
        checks.refuse(f"mask at {where!r}", entries[where], "True or False")
    return bool(entries[where])
