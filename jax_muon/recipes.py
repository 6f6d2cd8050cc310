"""Whole optimizers, each a chain of the pieces for matrices beside AdamW for the rest.

Every recipe is `optax.multi_transform` by label; what it does can be written out from
`transforms.py` in ten lines, and changed there. All rates take a float or a schedule.
"""

import functools
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from jax_muon.by_label import Groups, Labels, Options, Pieces, by_label
from jax_muon.checks import check_count
from jax_muon.mesh.axes import AxisName
from jax_muon.mesh.global_view import Specs
from jax_muon.polar.coefficients import polar_express_coefficients
from jax_muon.polar.factors import newton_schulz
from jax_muon.reading.axes import DimensionNumbers
from jax_muon.reading.joins import Joins
from jax_muon.splits import Splits
from jax_muon.transforms import (
    add_cautious_decayed_weights,
    equilibrate_rows,
    nesterov,
    normalize_frobenius,
    orthogonalize,
    scale_by_normuon,
    scale_by_shape,
)


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
    splits: Splits | None = None,
    joins: Joins | None = None,
    mesh: Mesh | None = None,
    specs: Specs = None,
    small: int | None = None,
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
      splits: path pattern to `Split`, for parameters that hold several matrices side by
        side, such as a fused QKV kernel; see `with_splits`. Labels, dimension numbers
        and `adamw_groups` speak of whole parameters, joins of parts.
      joins: path pattern to K: that many matrices of consecutive layers are
        orthogonalized as one; see `make_blocks`. K alone joins queries, keys, values.
      mesh: of sharded parameters, where `specs` are needed.
      specs: how parameters are sharded, on a mesh with Auto axes, whose types do not
        tell; see `orthogonalize`. Not for ZeRO-2.
      small: sharded matrices with fewer elements are gathered and computed by all
        devices that hold them, others by one; None for 65536.
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
    check_count("steps", steps)
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

    def pieces(view: Options, whole: Options) -> Pieces:
        return [
            nesterov(momentum),
            *([equilibrate_rows(**view)] if row_equilibration else []),
            orthogonalize(polar, **view, **whole),
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
    return by_label(
        pieces,
        adamw,
        adamw_groups,
        max_norm,
        labels,
        dimension_numbers,
        splits,
        joins,
        mesh,
        specs,
        small,
        zero2_axis,
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
    splits: Splits | None = None,
    joins: Joins | None = None,
    mesh: Mesh | None = None,
    specs: Specs = None,
    small: int | None = None,
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
      splits: path pattern to `Split`, for parameters that hold several matrices.
      joins: path pattern to K, the matrices that are orthogonalized as one.
      mesh: of sharded parameters, where `specs` are needed.
      specs: how parameters are sharded, on a mesh with Auto axes.
      small: sharded matrices with fewer elements are computed by all devices.
      zero2_axis: mesh axis over which state and work are divided.

    Returns:
      An `optax.GradientTransformation` whose updates are added to the parameters.

    Raises:
      ValueError: as `nanochat`.

    References:
      Jordan et al., Muon, https://kellerjordan.github.io/posts/muon/
    """
    check_count("steps", steps)
    polar = functools.partial(newton_schulz, steps=steps, dtype=dtype)

    def pieces(view: Options, whole: Options) -> Pieces:
        return [
            nesterov(momentum, accumulation=accumulation, lookahead=lookahead),
            orthogonalize(polar, **view, **whole),
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
    return by_label(
        pieces,
        adamw,
        adamw_groups,
        max_norm,
        labels,
        dimension_numbers,
        splits,
        joins,
        mesh,
        specs,
        small,
        zero2_axis,
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
    splits: Splits | None = None,
    joins: Joins | None = None,
    mesh: Mesh | None = None,
    specs: Specs = None,
    small: int | None = None,
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
      splits: path pattern to `Split`, for parameters that hold several matrices.
      joins: path pattern to K, the matrices that are orthogonalized as one.
      mesh: of sharded parameters, where `specs` are needed.
      specs: how parameters are sharded, on a mesh with Auto axes.
      small: sharded matrices with fewer elements are computed by all devices.
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
        splits=splits,
        joins=joins,
        mesh=mesh,
        specs=specs,
        small=small,
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
    splits: Splits | None = None,
    joins: Joins | None = None,
    mesh: Mesh | None = None,
    specs: Specs = None,
    small: int | None = None,
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
      splits: path pattern to `Split`, for parameters that hold several matrices.
      joins: path pattern to K, the matrices that are orthogonalized as one.
      mesh: of sharded parameters, where `specs` are needed.
      specs: how parameters are sharded, on a mesh with Auto axes.
      small: sharded matrices with fewer elements are computed by all devices.
      zero2_axis: mesh axis over which state and work are divided.

    Returns:
      An `optax.GradientTransformation` whose updates are added to the parameters.

    Raises:
      ValueError: as `nanochat`.

    References:
      NorMuon, arXiv 2510.05491, Algorithm 1.
    """
    check_count("steps", steps)
    polar = functools.partial(newton_schulz, steps=steps, dtype=dtype)

    def pieces(view: Options, whole: Options) -> Pieces:
        return [
            nesterov(momentum, lookahead=lookahead),
            orthogonalize(polar, **view, **whole),
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
    return by_label(
        pieces,
        adamw,
        adamw_groups,
        max_norm,
        labels,
        dimension_numbers,
        splits,
        joins,
        mesh,
        specs,
        small,
        zero2_axis,
    )


def teon(
    learning_rate: optax.ScalarOrSchedule = 0.02,
    momentum: optax.ScalarOrSchedule = 0.95,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    *,
    lookahead: bool = False,
    steps: int = 5,
    shape_rule: str = "sqrt_ratio",
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
    splits: Splits | None = None,
    joins: Joins | None = None,
    mesh: Mesh | None = None,
    specs: Specs = None,
    small: int | None = None,
    zero2_axis: AxisName | None = None,
) -> optax.GradientTransformationExtraArgs:
    """TEON: queries, keys and values of neighbouring layers orthogonalized as one.

    The scale is that of the single matrix; all other matrices are ordinary Muon, and so
    is a last layer without a partner.

    Args:
      learning_rate: of the matrices, before the factor (out/in)^0.5.
      momentum: in [0, 1), as an exponential average.
      weight_decay: decoupled, times the learning rate alone.
      lookahead: whether to use Nesterov's look-ahead, which the paper does not.
      steps: of the Polar Express with the coefficients of its paper; a Python integer.
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
      splits: path pattern to `Split`, for parameters that hold several matrices.
      joins: path pattern to K, the matrices that are orthogonalized as one; None for
        queries, keys and values two by two.
      mesh: of sharded parameters, where `specs` are needed.
      specs: how parameters are sharded, on a mesh with Auto axes.
      small: sharded matrices with fewer elements are computed by all devices.
      zero2_axis: mesh axis over which state and work are divided.

    Returns:
      An `optax.GradientTransformation` whose updates are added to the parameters.

    Raises:
      ValueError: as `nanochat`; at init, a model without numbered or scanned layers to
        join, and as `make_blocks`.

    References:
      TEON, arXiv 2601.23261.
    """
    check_count("steps", steps)
    # The table that the paper of the Polar Express prints, each step but the eighth,
    # its last, with a margin of 1 %.
    table = np.array(
        polar_express_coefficients(
            max(steps, 8), lower=1e-3, cushion=0.02407327424182761, safety=0.0
        )
    )
    table[:-1] /= 1.01 ** np.array([1, 3, 5])
    polar = functools.partial(
        newton_schulz,
        steps=steps,
        coefficients=tuple(map(tuple, table)),
        norm_factor=1.01,
        dtype=dtype,
    )

    def pieces(view: Options, whole: Options) -> Pieces:
        return [
            nesterov(momentum, lookahead=lookahead),
            orthogonalize(polar, **view, **whole),
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
    return by_label(
        pieces,
        adamw,
        adamw_groups,
        max_norm,
        labels,
        dimension_numbers,
        splits,
        2 if joins is None else joins,
        mesh,
        specs,
        small,
        zero2_axis,
    )
