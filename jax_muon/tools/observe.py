"""A few numbers about every step, kept in the optimizer's state."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from jax_muon import checks, paths
from jax_muon.dtypes import wide
from jax_muon.partition import Reader, reader


class ObserveState(NamedTuple):
    """State of `observe`."""

    inner_state: optax.OptState
    observed: dict[str, Array]  # float32 scalars by name


def observe(
    inner: optax.GradientTransformation, matrices: Reader = None
) -> optax.GradientTransformationExtraArgs:
    r"""Keep numbers about every step in the state, without waiting for the device.

    `optax.tree.get(state, "observed")` is a dictionary of scalars. For every label of
    the parameters, such as "muon":

    - "muon/update_rms", "muon/weight_rms": root mean squares of the update and of the
      parameters before it; "muon/ratio": their quotient.
    - "muon/towards_zero": the fraction of entries that the update moves towards zero.
      With cautious weight decay these are the entries that decay.

    Counters that other transforms keep are in the same state: of `skip_nonfinite`
    `optax.tree.get(state, "skipped")`, of `clip_qk` "clipped".

    Args:
      inner: the optimizer: a recipe, a chain, `skip_nonfinite` around one. With
        `on_mesh`, `observe` goes inside: `on_mesh(observe(tx), mesh)`;
        `make_train_step` takes `observe(tx)` as it is.
      matrices: the reading whose labels group the parameters; see `partition`.

    Returns:
      An `optax.GradientTransformation` whose update needs the parameters, and whose
      updates are those of `inner`. Copy the numbers before the state is donated to the
      next step.

    Raises:
      ValueError: `inner` is not an optax transform; at update, params=None.

    Examples:
      >>> import jax_muon as jm
      >>> params = {"up": jnp.eye(4), "bias": jnp.ones(4)}
      >>> tx = observe(jm.muon(0.1, dtype="float32"))
      >>> _, state = tx.update(params, tx.init(params), params)
      >>> round(float(optax.tree.get(state, "observed")["muon/weight_rms"]), 3)
      0.5
    """
    inner = checks.as_transform("inner", inner)
    read_tree = reader(matrices)

    def by_label(params: Any, *trees: Any) -> dict[str, list[tuple[Array, ...]]]:
        """The floating-point leaves of each label, with those of other trees."""
        found = read_tree(params)
        labels: dict[str, list[tuple[Array, ...]]] = {}
        for (path, leaf), *others in zip(
            paths.leaves_with_paths(params), *map(jax.tree.leaves, trees), strict=True
        ):
            if jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.size:
                labels.setdefault(found[path].label, []).append((leaf, *others))
        return labels

    def init_fn(params: optax.Params) -> ObserveState:
        zeros = {
            f"{label}/{name}": jnp.zeros([], jnp.float32)
            for label in by_label(params)
            for name in ("update_rms", "weight_rms", "ratio", "towards_zero")
        }
        return ObserveState(inner.init(params), zeros)

    def update_fn(
        updates: optax.Updates,
        state: ObserveState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, ObserveState]:
        checks.params("observe", params)
        expected = "an ObserveState, as the init of observe returns it"
        checks.kind("state", state, ObserveState, expected)
        updates, new = inner.update(updates, state.inner_state, params, **extra_args)
        observed: dict[str, Array] = {}
        for label, leaves in by_label(params, updates).items():
            of_label = _measure([tuple(map(wide, pair)) for pair in leaves])
            observed |= {f"{label}/{name}": x for name, x in of_label.items()}
        return updates, ObserveState(new, observed)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _measure(pairs: list[tuple[Array, ...]]) -> dict[str, Array]:
    """The numbers about the parameters of one label and their updates."""
    size = sum(w.size for w, _ in pairs)
    weight = jnp.sqrt(sum(jnp.sum(w * w) for w, _ in pairs) / size)
    update = jnp.sqrt(sum(jnp.sum(u * u) for _, u in pairs) / size)
    towards = sum(
        jnp.sum(jnp.sign(u) * jnp.sign(w) < 0, dtype=jnp.float32) for w, u in pairs
    )
    measured = {
        "update_rms": update,
        "weight_rms": weight,
        "ratio": jnp.where(weight > 0, update / jnp.where(weight > 0, weight, 1), 0),
        "towards_zero": towards / size,
    }
    return {name: jnp.asarray(x, jnp.float32) for name, x in measured.items()}
