"""What goes on inside an optimizer, as a few numbers in its state.

They are measured from outside, on updates, parameters and the state of any optimizer,
and stay on the device until somebody looks.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array, Float
from optax.tree_utils import NamedTupleKey, tree_get_all_with_path

from jax_muon.checks import as_transform, check_params, check_state
from jax_muon.dtypes import wide
from jax_muon.reading import paths
from jax_muon.reading.axes import MatrixAxes
from jax_muon.reading.bare import check_reading
from jax_muon.reading.labels import ADAMW
from jax_muon.reading.matrices import Matrices, Reading
from jax_muon.splits import Parts
from jax_muon.storage import random_bits
from jax_muon.transforms import sum_over

# Fields of states that count what `observe` shows under a name of its own.
_COUNTS = {
    "skipped_steps": ("skipped", "total_notfinite"),
    "clipped_heads": ("clipped",),
}
_MOMENTA = ("mu", "trace")


class ObserveState(NamedTuple):
    """State of `observe`."""

    count: Array  # type: ignore[assignment]  # shape=(), dtype=int32
    inner_state: optax.OptState
    observed: dict[str, Array]  # scalars by name
    # Of the momentum of each matrix, by path: about its largest singular vector on the
    # shorter side, of a norm from 1 on.
    largest: dict[str, Array]


def observe(
    inner: optax.GradientTransformation, reading: Reading | None = None
) -> optax.GradientTransformationExtraArgs:
    r"""Keep numbers about every step in the state, without waiting for the device.

    `optax.tree.get(state, "observed")` is a dictionary of scalars. For every label of
    the parameters, such as "muon":

    - "muon/update_rms", "muon/weight_rms": root mean squares of what is added to the
      parameters and of the parameters before that; "muon/ratio", of the two.
    - "muon/towards_zero": the share of entries that the update moves towards zero. With
      cautious weight decay these are the entries that decay.

    and for labels whose parameters are matrices with a momentum:

    - "muon/stable_rank": of the momentum, :math:`\|M\|_F^2 / \|M\|_2^2`, mean over
      matrices. The norm below is found by one step of the power method in each update,
      from where the last one ended: it is too small, and the rank too large, until some
      steps are done. 0 where float32 does not hold the squares of a momentum.
    - "muon/orthogonality_error": the sine of the angle between a random vector
      :math:`z` and :math:`U U^T z`, root mean square over matrices, for the update
      :math:`U`. It is 0 if all singular values are equal, and about the spread of their
      squares otherwise. The polar factor itself is not seen from outside: weight decay
      and the scale of single neurons (NorMuon) count as error.

    "skipped_steps" is there where `skip_nonfinite` or `optax.apply_if_finite` is
    inside, "clipped_heads", of the last step, where `clip_qk` is.

    Random vectors are a hash of step, path and place, so that the numbers are those of
    any layout. They take 20 FLOPs an element: of the products of a `nanochat` step
    0.6 % at width 128 and 0.1 % at 768, of a whole train step of the example 0.3 %.
    Sums over devices are one round of small all-reduces where stacks or the longer
    sides of matrices are divided, two where shorter sides are, four where both are.

    Args:
      inner: the optimizer: a recipe, a chain, a guard around one. Wrapped in `on_mesh`,
        `observe` stands inside: `on_mesh(observe(tx), mesh)`; `make_train_step` takes
        `observe(tx)` as it is.
      reading: how parameters are read: that of the recipe, where it has one. A
        parameter in doubt counts under the label that it is read with.

    Returns:
      An `optax.GradientTransformation` whose update needs the parameters, and whose
      updates are those of `inner`. A state that is donated to the next step takes its
      numbers with it: copy what is to be looked at later. Since it has entries by label
      and path, `optax.tree.map_params` takes `inner`, and not this.

    Raises:
      ValueError: `inner` is not an optax transform; at init, no parameters of floating
        point; at update, params=None.

    Examples:
      >>> import jax_muon as jm
      >>> params = {"up": jnp.eye(4), "bias": jnp.ones(4)}
      >>> tx = observe(jm.muon(0.1, dtype="float32"))
      >>> _, state = tx.update(params, tx.init(params), params)
      >>> round(float(optax.tree.get(state, "observed")["muon/weight_rms"]), 3)
      0.5

    References:
      Stable rank: Rudelson and Vershynin, arXiv math/0503442.
    """
    inner = as_transform("inner", inner)
    check_reading("reading", reading)
    reading = Reading() if reading is None else reading

    def init_fn(params: optax.Params) -> ObserveState:
        state = inner.init(params)
        matrices, leaves = read_parts(reading, params), float_parts(reading, params)
        if not leaves:
            raise ValueError(
                "observe: there are no parameters of floating point; expected at least "
                "one"
            )
        largest = {}
        for path in _momenta(state, leaves):
            if _is_matrix(matrices, path):
                sides = _Sides.of(matrices.axes(path), leaves[path].shape)
                start = sides.random(leaves[path], path, jnp.zeros([], jnp.int32))
                largest[path] = start / sides.short_size**0.5
        names = [
            f"{label}/{name}"
            for label, own in _by_label(matrices, leaves).items()
            for name in (*_ALWAYS, *(_MATRICES if set(own) & set(largest) else ()))
        ]
        zeros = {name: jnp.zeros([], jnp.float32) for name in names}
        count = jnp.zeros([], jnp.int32)
        return ObserveState(count, state, zeros | _counts(state), largest)

    def update_fn(
        updates: optax.Updates,
        state: ObserveState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, ObserveState]:
        check_params("observe", params)
        check_state("observe", state, ObserveState)
        updates, inner_state = inner.update(
            updates, state.inner_state, params, **extra_args
        )
        matrices, weights = read_parts(reading, params), float_parts(reading, params)
        steps, momenta = float_parts(reading, updates), _momenta(inner_state, weights)
        sides = {
            path: _Sides.of(matrices.axes(path), weights[path].shape)
            for path in state.largest
        }
        of_updates = [
            _Pair(own, wide(steps[path]), own.random(steps[path], path, state.count))
            for path, own in sides.items()
        ]
        of_momenta = [
            _Pair(own, wide(momenta[path]), state.largest[path])
            for path, own in sides.items()
        ]
        squares = iter(_squares(of_updates + of_momenta))
        errors = {path: next(squares).squared_sine() for path in sides}
        ranks = {path: next(squares) for path in sides}
        observed: dict[str, Array] = {}
        for label, own in _by_label(matrices, weights).items():
            found = _of_all([(wide(steps[path]), wide(weights[path])) for path in own])
            if on := [path for path in own if path in sides]:
                found["stable_rank"] = _mean([ranks[p].stable_rank() for p in on])
                error = _mean([errors[p] for p in on])
                found["orthogonality_error"] = jnp.sqrt(error)
            observed |= {
                f"{label}/{name}": jnp.asarray(x, jnp.float32)
                for name, x in found.items()
            }
        largest = {path: rank.nearer() for path, rank in ranks.items()}
        count = optax.safe_increment(state.count)
        return updates, ObserveState(
            count, inner_state, observed | _counts(inner_state), largest
        )

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


_ALWAYS = ("update_rms", "weight_rms", "ratio", "towards_zero")
_MATRICES = ("stable_rank", "orthogonality_error")


def _of_all(pairs: list[tuple[Array, Array]]) -> dict[str, Any]:
    """What there is to say of updates and parameters of any shape."""
    size = sum(w.size for _, w in pairs)
    update = jnp.sqrt(sum(jnp.sum(u * u) for u, _ in pairs) / size)
    weight = jnp.sqrt(sum(jnp.sum(w * w) for _, w in pairs) / size)
    towards = sum(
        jnp.sum(jnp.sign(u) * jnp.sign(w) < 0, dtype=jnp.float32) for u, w in pairs
    )
    return {
        "update_rms": update,
        "weight_rms": weight,
        "ratio": jnp.where(weight > 0, update / jnp.where(weight > 0, weight, 1), 0),
        "towards_zero": towards / size,
    }


class _Sides(NamedTuple):
    """The axes of the shorter and of the longer side of the matrices of a parameter."""

    short: tuple[int, ...]
    long: tuple[int, ...]
    short_size: int

    @classmethod
    def of(cls, axes: MatrixAxes, shape: tuple[int, ...]) -> "_Sides":
        fan_in, fan_out = axes.fan(shape)
        pair = (axes.reduction, axes.output)
        short, long = pair if fan_in <= fan_out else pair[::-1]
        return cls(short, long, min(fan_in, fan_out))

    def random(self, x: Array, path: str, count: Array) -> Array:
        """Random signs along the shorter side, which lie as the array does."""
        like = sum_over(wide(x), self.long)
        return jnp.where(random_bits(like, path, count) >> 31, 1, -1).astype(like.dtype)


class _Pair(NamedTuple):
    """Matrices X, and a vector z for each, along its shorter side."""

    sides: _Sides
    x: Array
    z: Array


class _Square(NamedTuple):
    """What X X^T tells of z."""

    pair: _Pair
    uu: Array  # |X^T z|^2; 0 if that, or its reciprocal, is out of range
    y: Array  # X X^T z / |X^T z|^2, so that z y is 1; 0 if |X^T z|^2 is
    zz: Array

    def squared_sine(self) -> Float[Array, "..."]:
        """Squared sine of the angle between z and X X^T z; 0 if that is zero."""
        yy = sum_over(self.y * self.y, self.pair.sides.short)
        cosine = 1 / jnp.where(yy > 0, self.zz * yy, 1)
        return jnp.clip(1 - cosine, 0, 1)

    def stable_rank(self) -> Float[Array, "..."]:
        """Stable rank of each X, if z is its largest singular vector; else above."""
        sides, x, _ = self.pair
        total = sum_over(x * x, sides.short + sides.long)
        # uu / zz is at most the square of the 2-norm.
        rank = total / jnp.where(self.uu > 0, self.uu, 1) * self.zz
        return jnp.where(self.uu > 0, jnp.minimum(rank, sides.short_size), 0)

    def nearer(self) -> Array:
        """A vector that is nearer to the largest singular vector than z."""
        z = self.pair.z
        return jnp.where(self.uu > 0, self.y * jnp.sqrt(self.zz), z).astype(z.dtype)


def _squares(pairs: list[_Pair]) -> list[_Square]:
    """Each X X^T z by sums of products, which work however X is divided.

    Every X^T z is there before anything goes on from one of them, so that sums over
    devices that wait for others are one for all matrices, not one for each.
    """
    us = lax.optimization_barrier([sum_over(x * z, s.short) for s, x, z in pairs])
    found = []
    for pair, u in zip(pairs, us, strict=True):
        (short, long, _), x, z = pair
        uu = sum_over(u * u, long)
        # With a reciprocal of its dtype, too, else a vector would be 0 or NaN for good.
        tiny = jnp.finfo(uu.dtype).tiny
        uu = jnp.where((uu > tiny) & (uu < 1 / tiny), uu, 0)
        y = sum_over(x * u, long) / jnp.where(uu > 0, uu, 1)
        y = jnp.where(uu > 0, y, 0)
        found.append(_Square(pair, uu, y, sum_over(z * z, short)))
    return found


def read_parts(reading: Reading, params: Any) -> Matrices:
    """How the parameters, or their parts, are read."""
    tree = paths.unbox(params)
    matrices = reading.read(tree)
    if reading.splits:
        matrices = Parts.of(tree, reading.splits).read(matrices)
    return matrices


def float_parts(reading: Reading, tree: Any) -> dict[str, Array]:
    """Arrays of floating point, or their parts, by path."""
    tree = paths.unbox(tree)
    if reading.splits:
        tree = Parts.of(tree, reading.splits).split(tree)
    return {
        path: x
        for path, x in paths.leaves_with_paths(tree)
        if jnp.issubdtype(jnp.result_type(x), jnp.floating) and math.prod(x.shape)
    }


def _is_matrix(matrices: Matrices, path: str) -> bool:
    found = matrices[path]
    return found.label != ADAMW and found.axes is not None and found.doubt is None


def _by_label(matrices: Matrices, leaves: Mapping[str, Array]) -> dict[str, list[str]]:
    """Paths by label."""
    found: dict[str, list[str]] = {}
    for path in leaves:
        found.setdefault(matrices[path].label, []).append(path)
    return found


def _momenta(state: Any, leaves: Mapping[str, Array]) -> dict[str, Array]:
    """The momentum of each parameter that has one, by path."""
    found: dict[str, Array] = {}
    scales: dict[str, Array] = {}
    for _, tree in _fields(state, ("scale",)):
        scales |= dict(paths.leaves_with_paths(tree))
    for _, tree in _fields(state, _MOMENTA):
        for path, m in paths.leaves_with_paths(tree):
            if path in leaves and m.shape == leaves[path].shape:
                is_integer = jnp.issubdtype(m.dtype, jnp.integer)
                found[path] = m * scales[path] if is_integer else m
    return found


def _counts(state: Any) -> dict[str, Array]:
    """What guards and `clip_qk` inside have counted."""
    found = {}
    for name, fields in _COUNTS.items():
        counts = [count for _, count in _fields(state, fields)]
        if counts:
            found[name] = sum(counts[1:], counts[0])
    return found


def _fields(state: Any, names: tuple[str, ...]) -> list[tuple[Any, Any]]:
    """All fields with these names in the states within a state."""
    return [
        (path, value)
        for name in names
        for path, value in tree_get_all_with_path(state, name)
        if isinstance(path[-1], NamedTupleKey)
    ]


def _mean(values: list[Array]) -> Any:
    """The mean over the matrices of several parameters."""
    return sum(jnp.sum(x) for x in values) / sum(x.size for x in values)
