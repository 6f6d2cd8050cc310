"""Whole optimizers, each a chain of the pieces for matrices beside AdamW for the rest.

Every recipe is `optax.multi_transform` by label; what it does can be written out from
`transforms.py` in ten lines, and changed there. All rates take a float or a schedule.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax

from jax_muon import paths
from jax_muon.coefficients import polar_express_coefficients
from jax_muon.guards import clip_by_global_norm
from jax_muon.labels import ADAMW, MUON, label_params
from jax_muon.matrices import DimensionNumbers, as_dimension_numbers, matrix_axes
from jax_muon.polar import newton_schulz, positive_int
from jax_muon.sharding.axes import AxisName
from jax_muon.sharding.zero2 import (
    is_zero2,
    zero2_matrices,
    zero2_multi_transform,
    zero2_rows,
)
from jax_muon.transforms import (
    add_cautious_decayed_weights,
    equilibrate_rows,
    nesterov,
    normalize_frobenius,
    orthogonalize,
    scale_by_normuon,
    scale_by_shape,
)

Labels = Any | Callable[[optax.Params], Any] | None
Pieces = list[optax.GradientTransformation]
Groups = Mapping[str, optax.GradientTransformation] | None


def nanochat(
    learning_rate: optax.ScalarOrSchedule = 0.02,
    momentum: optax.ScalarOrSchedule = 0.95,
    weight_decay: optax.ScalarOrSchedule = 0.1,
    *,
    beta2: optax.ScalarOrSchedule = 0.95,
    steps: int = 5,
    norm_factor: float = 1.02,
    row_equilibration: bool = False,
    renormalize: bool = False,
    adamw_learning_rate: optax.ScalarOrSchedule = 3e-4,
    adamw_b1: float = 0.8,
    adamw_b2: float = 0.95,
    adamw_eps: float = 1e-10,
    adamw_weight_decay: optax.ScalarOrSchedule = 0.0,
    adamw_groups: Groups = None,
    max_norm: float | None = None,
    dtype: jax.typing.DTypeLike | None = "bfloat16",
    labels: Labels = None,
    dimension_numbers: DimensionNumbers = None,
    zero2_axis: AxisName | None = None,
) -> optax.GradientTransformationExtraArgs:
    """MuonAdamW of nanochat: Nesterov, Polar Express, NorMuon, cautious weight decay.

    The step of January 2026 by default; that of August 2026 with
    `row_equilibration=True, renormalize=True, norm_factor=1.01, beta2=0.9`.

    Args:
      learning_rate: of the matrices, before the factor max(1, out/in)^0.5.
      momentum: Nesterov momentum in [0, 1).
      weight_decay: cautious, times the learning rate and the factor of the shape.
      beta2: decay of NorMuon's mean squares, in [0, 1).
      steps: of the Polar Express: the first of its five quintics, or all of a longer
        table; a Python integer.
      norm_factor: margin of its first normalization.
      row_equilibration: whether to equilibrate the rows before it (MuonEq).
      renormalize: whether to set the Frobenius norm after it (Muon+).
      adamw_learning_rate: of the parameters labelled "adamw".
      adamw_b1: decay of AdamW's first moment.
      adamw_b2: decay of AdamW's second moment.
      adamw_eps: added to the root of AdamW's second moment.
      adamw_weight_decay: of AdamW.
      adamw_groups: further labels and their transforms, each with its learning rate:
        `{"embedding": optax.adamw(0.2), "frozen": optax.set_to_zero()}`. Under ZeRO-2
        they are divided by rows and must be elementwise, unless `zero2_matrices` or
        `zero2_rows` wraps them already.
      max_norm: clip gradients to this global norm before everything else, over all
        parameters and devices; None does not clip.
      dtype: of the polar iteration; "bfloat16" is fast on a GPU, "float32" exact.
      labels: a tree of labels or a function of the parameters; None: `label_params`.
      dimension_numbers: how parameters are read as matrices; see `matrix_axes`.
      zero2_axis: mesh axis, or axes, over which state and work are divided (ZeRO-2),
        for use with `init_optimizer` and `make_train_step`; see `zero2_matrices`.

    Returns:
      An `optax.GradientTransformation` whose updates are added to the parameters.

    Raises:
      ValueError: a rate out of range; at init, with path and shape, a label without a
        transform or a "muon" label on a parameter that is no floating-point matrix.

    References:
      https://github.com/karpathy/nanochat; Polar Express arXiv 2505.16932; NorMuon
      arXiv 2510.05491; MuonEq arXiv 2603.28254; Muon+ arXiv 2602.21545.
    """
    positive_int("steps", steps)
    # nanochat holds five quintics and takes the first: with fewer steps, the last has a
    # safety margin that polar_express(steps=steps) would leave out.
    polar = functools.partial(
        newton_schulz,
        steps=steps,
        coefficients=polar_express_coefficients(max(steps, 5)),
        norm_factor=norm_factor,
        eps=1e-6,
        dtype=dtype,
    )

    def pieces(numbers: DimensionNumbers) -> Pieces:
        view: dict[str, Any] = {"dimension_numbers": numbers}
        return [
            nesterov(momentum),
            *([equilibrate_rows(**view)] if row_equilibration else []),
            orthogonalize(polar, **view),
            *([normalize_frobenius(**view)] if renormalize else []),
            scale_by_normuon(beta2, **view),
            add_cautious_decayed_weights(weight_decay),
            scale_by_shape(**view),
            optax.scale_by_learning_rate(learning_rate),
        ]

    adamw = optax.adamw(
        adamw_learning_rate,
        adamw_b1,
        adamw_b2,
        adamw_eps,
        weight_decay=adamw_weight_decay,
    )
    return _by_label(
        pieces, adamw, adamw_groups, max_norm, labels, dimension_numbers, zero2_axis
    )


def muon(
    learning_rate: optax.ScalarOrSchedule = 0.02,
    momentum: optax.ScalarOrSchedule = 0.95,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    *,
    accumulation: str = "ema",
    lookahead: bool = True,
    steps: int = 5,
    shape_rule: str = "max_ratio",
    adamw_learning_rate: optax.ScalarOrSchedule = 3e-4,
    adamw_b1: float = 0.9,
    adamw_b2: float = 0.95,
    adamw_eps: float = 1e-10,
    adamw_weight_decay: optax.ScalarOrSchedule = 0.0,
    adamw_groups: Groups = None,
    max_norm: float | None = None,
    dtype: jax.typing.DTypeLike | None = "bfloat16",
    labels: Labels = None,
    dimension_numbers: DimensionNumbers = None,
    zero2_axis: AxisName | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Jordan's Muon: Nesterov, Newton-Schulz, a factor for the shape, decoupled decay.

    With the defaults, the mathematics of torch.optim.Muon; `shape_rule="rms_0.2"` is
    its adjust_lr_fn="match_rms_adamw".

    Args:
      learning_rate: of the matrices, before the factor of the shape.
      momentum: in [0, 1).
      weight_decay: decoupled, times the learning rate alone.
      accumulation: "ema" or "sum"; see `nesterov`.
      lookahead: Nesterov's; see `nesterov`.
      steps: of Newton-Schulz; a Python integer.
      shape_rule: see `scale_by_shape`.
      adamw_learning_rate: see `nanochat`, also for all arguments below.
      adamw_b1: decay of AdamW's first moment.
      adamw_b2: decay of AdamW's second moment.
      adamw_eps: added to the root of AdamW's second moment.
      adamw_weight_decay: of AdamW.
      adamw_groups: further labels and their transforms.
      max_norm: largest global norm of the gradients.
      dtype: of the iteration.
      labels: a tree of labels or a function of the parameters; None: `label_params`.
      dimension_numbers: how parameters are read as matrices.
      zero2_axis: mesh axis over which state and work are divided.

    Returns:
      An `optax.GradientTransformation` whose updates are added to the parameters.

    Raises:
      ValueError: as `nanochat`.

    References:
      Jordan et al., Muon, https://kellerjordan.github.io/posts/muon/
    """
    positive_int("steps", steps)
    polar = functools.partial(newton_schulz, steps=steps, dtype=dtype)

    def pieces(numbers: DimensionNumbers) -> Pieces:
        view: dict[str, Any] = {"dimension_numbers": numbers}
        return [
            nesterov(momentum, accumulation=accumulation, lookahead=lookahead),
            orthogonalize(polar, **view),
            scale_by_shape(shape_rule, **view),
            optax.add_decayed_weights(weight_decay),
            optax.scale_by_learning_rate(learning_rate),
        ]

    adamw = optax.adamw(
        adamw_learning_rate,
        adamw_b1,
        adamw_b2,
        adamw_eps,
        weight_decay=adamw_weight_decay,
    )
    return _by_label(
        pieces, adamw, adamw_groups, max_norm, labels, dimension_numbers, zero2_axis
    )


def moonlight(
    learning_rate: optax.ScalarOrSchedule = 1e-3,
    momentum: optax.ScalarOrSchedule = 0.95,
    weight_decay: optax.ScalarOrSchedule = 0.1,
    *,
    steps: int = 5,
    adamw_learning_rate: optax.ScalarOrSchedule | None = None,
    adamw_b1: float = 0.9,
    adamw_b2: float = 0.95,
    adamw_eps: float = 1e-8,
    adamw_weight_decay: optax.ScalarOrSchedule | None = None,
    adamw_groups: Groups = None,
    max_norm: float | None = None,
    dtype: jax.typing.DTypeLike | None = "bfloat16",
    labels: Labels = None,
    dimension_numbers: DimensionNumbers = None,
    zero2_axis: AxisName | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Moonlight's Muon: sum momentum, updates with AdamW's root mean square of 0.2.

    One learning rate and one weight decay serve matrices and AdamW alike.

    Args:
      learning_rate: of the matrices, before the factor 0.2 max(in, out)^0.5.
      momentum: Nesterov momentum in [0, 1).
      weight_decay: decoupled, times the learning rate alone.
      steps: of Newton-Schulz; a Python integer.
      adamw_learning_rate: None for `learning_rate`.
      adamw_b1: see `nanochat`, also for all arguments below.
      adamw_b2: decay of AdamW's second moment.
      adamw_eps: added to the root of AdamW's second moment.
      adamw_weight_decay: None for `weight_decay`.
      adamw_groups: further labels and their transforms.
      max_norm: largest global norm of the gradients.
      dtype: of the iteration.
      labels: a tree of labels or a function of the parameters; None: `label_params`.
      dimension_numbers: how parameters are read as matrices.
      zero2_axis: mesh axis over which state and work are divided.

    Returns:
      An `optax.GradientTransformation` whose updates are added to the parameters.

    Raises:
      ValueError: as `nanochat`.

    References:
      Liu et al., Muon is scalable for LLM training, arXiv 2502.16982.
    """

    def first(value: Any, otherwise: Any) -> Any:
        return otherwise if value is None else value

    return muon(
        learning_rate,
        momentum,
        weight_decay,
        accumulation="sum",
        steps=steps,
        shape_rule="rms_0.2",
        adamw_learning_rate=first(adamw_learning_rate, learning_rate),
        adamw_b1=adamw_b1,
        adamw_b2=adamw_b2,
        adamw_eps=adamw_eps,
        adamw_weight_decay=first(adamw_weight_decay, weight_decay),
        adamw_groups=adamw_groups,
        max_norm=max_norm,
        dtype=dtype,
        labels=labels,
        dimension_numbers=dimension_numbers,
        zero2_axis=zero2_axis,
    )


def normuon(
    learning_rate: optax.ScalarOrSchedule = 1e-3,
    momentum: optax.ScalarOrSchedule = 0.95,
    weight_decay: optax.ScalarOrSchedule = 0.1,
    *,
    beta2: optax.ScalarOrSchedule = 0.95,
    lookahead: bool = False,
    steps: int = 5,
    adamw_learning_rate: optax.ScalarOrSchedule = 3e-4,
    adamw_b1: float = 0.9,
    adamw_b2: float = 0.95,
    adamw_eps: float = 1e-8,
    adamw_weight_decay: optax.ScalarOrSchedule = 0.0,
    adamw_groups: Groups = None,
    max_norm: float | None = None,
    dtype: jax.typing.DTypeLike | None = "bfloat16",
    labels: Labels = None,
    dimension_numbers: DimensionNumbers = None,
    zero2_axis: AxisName | None = None,
) -> optax.GradientTransformationExtraArgs:
    """NorMuon as in its paper: per output neuron, updates with root mean square 0.2.

    Args:
      learning_rate: of the matrices, before the factor 0.2 (in out)^0.5 / ||update||_F.
      momentum: in [0, 1), as an exponential average.
      weight_decay: decoupled, times the learning rate alone.
      beta2: decay of the mean squares, in [0, 1).
      lookahead: whether to use Nesterov's look-ahead, which the paper does not.
      steps: of Newton-Schulz; a Python integer.
      adamw_learning_rate: see `nanochat`, also for all arguments below.
      adamw_b1: decay of AdamW's first moment.
      adamw_b2: decay of AdamW's second moment.
      adamw_eps: added to the root of AdamW's second moment.
      adamw_weight_decay: of AdamW.
      adamw_groups: further labels and their transforms.
      max_norm: largest global norm of the gradients.
      dtype: of the iteration.
      labels: a tree of labels or a function of the parameters; None: `label_params`.
      dimension_numbers: how parameters are read as matrices.
      zero2_axis: mesh axis over which state and work are divided.

    Returns:
      An `optax.GradientTransformation` whose updates are added to the parameters.

    Raises:
      ValueError: as `nanochat`.

    References:
      NorMuon, arXiv 2510.05491, Algorithm 1.
    """
    positive_int("steps", steps)
    polar = functools.partial(newton_schulz, steps=steps, dtype=dtype)

    def pieces(numbers: DimensionNumbers) -> Pieces:
        view: dict[str, Any] = {"dimension_numbers": numbers}
        return [
            nesterov(momentum, lookahead=lookahead),
            orthogonalize(polar, **view),
            # The paper adds 1e-8 to the root; here the root is at least 1e-8. The
            # default, 1e-5, would hold back neurons whose first updates are small.
            scale_by_normuon(beta2, axis="output", eps=1e-16, **view),
            normalize_frobenius(0.2, **view),
            optax.add_decayed_weights(weight_decay),
            optax.scale_by_learning_rate(learning_rate),
        ]

    adamw = optax.adamw(
        adamw_learning_rate,
        adamw_b1,
        adamw_b2,
        adamw_eps,
        weight_decay=adamw_weight_decay,
    )
    return _by_label(
        pieces, adamw, adamw_groups, max_norm, labels, dimension_numbers, zero2_axis
    )


def _by_label(
    pieces: Callable[[DimensionNumbers], Pieces],
    adamw: optax.GradientTransformation,
    adamw_groups: Groups,
    max_norm: float | None,
    labels: Labels,
    dimension_numbers: DimensionNumbers,
    zero2_axis: AxisName | None,
) -> optax.GradientTransformationExtraArgs:
    """The pieces for "muon", AdamW for "adamw", and the user's groups.

    The optimizer is put together for the tree that it is given, since labels and the
    reading of a parameter depend on what stands beside it. Both depend on paths and
    shapes alone, so they are the same at every step.
    """
    groups = {ADAMW: adamw, **(adamw_groups or {})}
    if MUON in groups or ADAMW in (adamw_groups or {}):
        raise ValueError(
            f"adamw_groups has the labels {list(adamw_groups or {})}; valid are others "
            f"than {MUON!r} and {ADAMW!r}, which the recipe holds itself"
        )
    if zero2_axis is not None:
        groups = {
            label: tx if is_zero2(tx) else zero2_rows(tx, zero2_axis)
            for label, tx in groups.items()
        }
    pieces(None)  # a rate out of range is an error now
    before = optax.identity()
    if max_norm is not None:
        before = clip_by_global_norm(max_norm, axis=zero2_axis)

    def build(tree: Any) -> optax.GradientTransformationExtraArgs:
        label_tree = _labels_of(tree, labels, (MUON, *groups))
        masked = jax.tree.map(
            lambda label, leaf: leaf if label == MUON else optax.MaskedNode(),
            label_tree,
            tree,
        )
        names = [path for path, _ in paths.leaves_with_paths(masked)]
        axes = matrix_axes(masked, dimension_numbers, context=tree)
        numbers = as_dimension_numbers(dict(zip(names, axes, strict=True)))
        if zero2_axis is None:
            chain = optax.chain(*pieces(numbers))
            tx = optax.multi_transform({MUON: chain, **groups}, label_tree)
            return tx if max_norm is None else optax.chain(before, tx)
        # The wrapper does the reading, and the pieces see (k, in, out).
        chain = optax.chain(*pieces(None))
        owners = zero2_matrices(chain, zero2_axis, dimension_numbers=numbers)
        transforms = {MUON: owners, **groups}
        if max_norm is None:
            return optax.multi_transform(transforms, label_tree)
        return zero2_multi_transform(transforms, label_tree, before)

    def update_fn(
        updates: optax.Updates, state: Any, params: Any = None, **extra_args: Any
    ) -> tuple[optax.Updates, Any]:
        return build(updates).update(updates, state, params, **extra_args)

    return optax.GradientTransformationExtraArgs(
        lambda params: build(params).init(params), update_fn
    )


def _labels_of(tree: Any, labels: Labels, valid: tuple[str, ...]) -> Any:
    """A label for every leaf, on the structure of the tree."""
    given = label_params if labels is None else labels
    given = given(tree) if callable(given) else given
    by_path = dict(paths.leaves_with_paths(given))
    names = [path for path, _ in paths.leaves_with_paths(tree)]
    for path in by_path:
        if names and path and not any(f"{n}/".startswith(f"{path}/") for n in names):
            raise ValueError(
                f"labels at {path!r}, which no parameter has; there are "
                + ", ".join(names)
            )

    def label(key_path: tuple[Any, ...], leaf: Any) -> str:
        del leaf
        path = paths.path_string(key_path)
        found = paths.find_prefix(by_path, path)
        if found not in valid:
            raise ValueError(
                f"parameter {path!r} has the label {found!r}; valid are "
                + ", ".join(map(repr, valid))
            )
        return found

    return jax.tree_util.tree_map_with_path(label, tree)
