"""Whole optimizers: each a chain of transforms for matrices, and yours for the rest.

A recipe is a chain within `optax.multi_transform`; to change more than its arguments,
copy the chain.

With `jax_numpy_dtype_promotion="strict"` optax's Adam cannot be traced; pass another
transform as `adamw`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax

from jax_muon.base import checks
from jax_muon.by_label import by_label
from jax_muon.matrices.as_matrices import as_matrices
from jax_muon.matrices.joins import with_joins
from jax_muon.matrices.matrices import ADAMW, MUON, Matrices
from jax_muon.matrices.resolve import Reading
from jax_muon.polar import coefficients
from jax_muon.polar.factors import NewtonSchulz
from jax_muon.transforms import scaling
from jax_muon.transforms import weight_decay as decays
from jax_muon.transforms.hyperball import hyperball
from jax_muon.transforms.momentum import scale_by_momentum
from jax_muon.transforms.orthogonalize import Polar, orthogonalize
from jax_muon.transforms.weight_decay import Mask

VERSIONS = ("2026-01", "2026-03", "2026-07")  # of `nanochat`

# Transforms of (..., in, out), given how matrices are read and which of them decay.
Chain = Callable[[Matrices, Mask], optax.GradientTransformation]


def nanochat(
    learning_rate: optax.ScalarOrSchedule,
    *,
    matrices: Reading,
    adamw: optax.GradientTransformation | None = None,
    momentum: optax.ScalarOrSchedule = 0.95,
    weight_decay: optax.ScalarOrSchedule = 0.1,
    weight_decay_mask: Mask = None,
    beta2: optax.ScalarOrSchedule | None = None,
    ns_steps: int | None = None,
    dtype: jax.typing.DTypeLike | None = None,
    polar: Polar | None = None,
    version: str = "2026-01",
    mu_dtype: jax.typing.DTypeLike | None = None,
    groups: Mapping[str, optax.GradientTransformation] | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""nanochat's Muon: Nesterov, Polar Express, NorMuon, cautious weight decay.

    With :math:`G` the gradient of a matrix :math:`W` (in, out) and :math:`M` an average
    of gradients,

    .. math::
       M &\leftarrow M + (1 - \mu)(G - M) \\
       X &= \mathrm{NorMuon}(\mathrm{polar}(G + \mu (M - G))) \\
       W &\leftarrow W - \eta \max(1, \mathrm{out} / \mathrm{in})^{1/2} \,
       (X + \lambda W [X W \ge 0])

    Args:
      learning_rate: :math:`\eta` of the matrices, a number or a schedule. If
        `optax.adamw(lr)` is tuned for a model, start with (lr * width)**0.5 / 40; see
        docs/rates.md.
      matrices: which parameters are matrices: what
        `jax_muon.find_matrices(params, loss_fn, batch)` returns; its `rules`, such as
        {"embed": "adamw", "mlp*": "muon"}; or a function of the parameters' shapes that
        returns one of these.
      adamw: the optimizer of all other parameters, any optax transform: the one that
        trains your model now, or `jax_muon.adamw(3e-3)`. None if all are matrices, or
        in `groups`.
      momentum: decay of the average of gradients, in [0, 1), a number or a schedule.
      weight_decay: of the matrices, at least 0, times the learning rate and the
        factor of the shape, and only where the step shrinks a weight; a number
        or a schedule.
      weight_decay_mask: which matrices decay: a tree of True and False, of parameters
        or modules, or a function of the parameters that returns it; None for all.
      beta2: decay of NorMuon's mean squares of neurons, in [0, 1), a number or a
        schedule; None for the version's.
      ns_steps: number of quintics of the polar factor, a Python integer; None for 5.
      dtype: of the polar iteration; None for "bfloat16", fast on GPUs. "float32" is
        exact.
      polar: instead of these two, a polar factor as for `orthogonalize`, such as
        `PolarExpress(8)`.
      version: "2026-01": beta2 is 0.95, and norms before the polar factor get a margin
        of 2 %. "2026-03": 0.9, and 1 %. "2026-07": the same, with rows scaled to one
        norm before the polar factor (MuonEq), and its Frobenius norm set (Muon+).
      mu_dtype: dtype in which the momentum is stored; None for the parameters'. See
        `scale_by_momentum`.
      groups: label to a transform, for labels other than "muon" and "adamw", such as
        {"frozen": optax.set_to_zero()}.

    Raises:
      ValueError: at once, a number out of range, `polar` beside `ns_steps` or `dtype`;
        at init and update, with its path, a parameter whose label has no transform, or
        is "muon" although it is no matrix; gradients or state of other shapes.

    Examples:
      >>> params = {"up": jnp.ones((4, 8)), "bias": jnp.ones(8)}
      >>> matrices = {"up": "muon"}  # or, by the loss, what jm.find_matrices returns
      >>> tx = jm.nanochat(0.02, matrices=matrices, adamw=optax.adamw(3e-3))
      >>> state = jax.jit(tx.init)(params)

    References:
      https://github.com/karpathy/nanochat; Polar Express arXiv 2505.16932; NorMuon
      arXiv 2510.05491; MuonEq arXiv 2603.28254; Muon+ arXiv 2602.21545.
    """
    checks.check_choice("version", version, VERSIONS)
    first, last = version == "2026-01", version == "2026-07"
    decay = (0.95 if first else 0.9) if beta2 is None else beta2
    settings = {"norm_factor": 1.02 if first else 1.01, "eps": 1e-6}
    polar = _polar(polar, ns_steps, dtype, coefficients.nanochat, **settings)
    average = _averaged(momentum, mu_dtype=mu_dtype)

    def chain(matrices: Matrices, mask: Mask) -> optax.GradientTransformation:
        return optax.chain(
            *([scaling.equilibrate_rows()] if last else []),
            orthogonalize(polar, joins=matrices.joins),
            *([scaling.normalize_frobenius()] if last else []),
            scaling.scale_by_normuon(_beta2(decay)),
            decays.add_cautious_decayed_weights(weight_decay, mask),
            scaling.scale_by_shape(),
            _descend(learning_rate),
        )

    return _recipe(average, chain, matrices, weight_decay_mask, adamw, groups)


def normuon(
    learning_rate: optax.ScalarOrSchedule,
    *,
    matrices: Reading,
    adamw: optax.GradientTransformation | None = None,
    momentum: optax.ScalarOrSchedule = 0.95,
    weight_decay: optax.ScalarOrSchedule = 0.1,
    weight_decay_mask: Mask = None,
    beta2: optax.ScalarOrSchedule = 0.95,
    ns_steps: int | None = None,
    dtype: jax.typing.DTypeLike | None = None,
    polar: Polar | None = None,
    mu_dtype: jax.typing.DTypeLike | None = None,
    groups: Mapping[str, optax.GradientTransformation] | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""NorMuon, arXiv 2510.05491: neurons normalized, and matrices to an RMS of 0.2.

    With :math:`G` the gradient of a matrix :math:`W` (in, out) and :math:`M` an average
    of gradients,

    .. math::
       M &\leftarrow M + (1 - \mu)(G - M), \qquad
       X = \mathrm{NorMuon}(\mathrm{polar}(M)) \\
       W &\leftarrow W - \eta \left(0.2 \sqrt{\mathrm{in} \cdot \mathrm{out}} \,
       \frac{X}{\|X\|_F} + \lambda W\right)

    The polar factor has Jordan's coefficients, as in `muon`.

    Args:
      learning_rate: :math:`\eta` of the matrices, a number or a schedule. If
        `optax.adamw(lr)` is tuned for a model, start with lr**0.5 / 8.
      matrices: which parameters are matrices: what
        `jax_muon.find_matrices(params, loss_fn, batch)` returns; its `rules`, such as
        {"embed": "adamw", "mlp*": "muon"}; or a function of the parameters' shapes that
        returns one of these.
      adamw: the optimizer of all other parameters, any optax transform: the one that
        trains your model now, or `jax_muon.adamw(3e-3)`. None if all are matrices, or
        in `groups`.
      momentum: decay of the average of gradients, in [0, 1), a number or a schedule.
      weight_decay: of the matrices, at least 0, times the learning rate; a number or a
        schedule.
      weight_decay_mask: which matrices decay: a tree of True and False, of parameters
        or modules, or a function of the parameters that returns it; None for all.
      beta2: decay of NorMuon's mean squares of neurons, in [0, 1), a number or a
        schedule.
      ns_steps: number of quintics of the polar factor, a Python integer; None for 5.
      dtype: of the polar iteration; None for "bfloat16", fast on GPUs. "float32" is
        exact.
      polar: instead of these two, a polar factor as for `orthogonalize`, such as
        `PolarExpress(8)`.
      mu_dtype: dtype in which the momentum is stored; None for the parameters'. See
        `scale_by_momentum`.
      groups: label to a transform, for labels other than "muon" and "adamw", such as
        {"frozen": optax.set_to_zero()}.

    Raises:
      ValueError: at once, a number out of range, `polar` beside `ns_steps` or `dtype`;
        at init and update, with its path, a parameter whose label has no transform, or
        is "muon" although it is no matrix; gradients or state of other shapes.

    Examples:
      >>> params = {"mlp": jnp.arange(8.0).reshape(2, 4)}
      >>> muon = {"mlp": "muon"}
      >>> tx = jm.normuon(1.0, matrices=muon, weight_decay=0.0, dtype="float32")
      >>> updates, _ = tx.update(params, tx.init(params), params)
      >>> round(float(jnp.sqrt(jnp.mean(updates["mlp"] ** 2))), 4)
      0.2
    """
    polar = _polar(polar, ns_steps, dtype)
    average = _averaged(momentum, nesterov=False, mu_dtype=mu_dtype)

    def chain(matrices: Matrices, mask: Mask) -> optax.GradientTransformation:
        return optax.chain(
            orthogonalize(polar, joins=matrices.joins),
            # The paper adds 1e-8 to the root; here the root is at least 1e-8. The
            # default, 1e-5, would hold back neurons whose first updates are small.
            scaling.scale_by_normuon(_beta2(beta2), axis="output", eps=1e-16),
            scaling.normalize_frobenius(0.2),
            decays.add_decayed_weights(weight_decay, mask),
            _descend(learning_rate),
        )

    return _recipe(average, chain, matrices, weight_decay_mask, adamw, groups)


def muon(
    learning_rate: optax.ScalarOrSchedule,
    *,
    matrices: Reading,
    adamw: optax.GradientTransformation | None = None,
    momentum: optax.ScalarOrSchedule = 0.95,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    weight_decay_mask: Mask = None,
    nesterov: bool = True,
    bias_correction: bool = False,
    adjust_lr_fn: str | Callable[[int, int], float] | None = "original",
    ns_steps: int | None = None,
    dtype: jax.typing.DTypeLike | None = None,
    polar: Polar | None = None,
    mu_dtype: jax.typing.DTypeLike | None = None,
    groups: Mapping[str, optax.GradientTransformation] | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Jordan's Muon: Nesterov, Newton-Schulz, a factor for the shape, decoupled decay.

    With :math:`G` the gradient of a matrix :math:`W` (in, out), :math:`M` an average of
    gradients, and :math:`r` the factor of `adjust_lr_fn`,

    .. math::
       M &\leftarrow M + (1 - \mu)(G - M) \\
       W &\leftarrow W - \eta \, (r(\mathrm{in}, \mathrm{out}) \,
       \mathrm{polar}(G + \mu (M - G)) + \lambda W)

    With equal settings, the mathematics of `torch.optim.Muon`.

    Args:
      learning_rate: :math:`\eta` of the matrices, a number or a schedule. If
        `optax.adamw(lr)` is tuned for a model, start with (lr * width)**0.5 / 40; see
        docs/rates.md.
      matrices: which parameters are matrices: what
        `jax_muon.find_matrices(params, loss_fn, batch)` returns; its `rules`, such as
        {"embed": "adamw", "mlp*": "muon"}; or a function of the parameters' shapes that
        returns one of these.
      adamw: the optimizer of all other parameters, any optax transform: the one that
        trains your model now, or `jax_muon.adamw(3e-3)`. None if all are matrices, or
        in `groups`.
      momentum: decay of the average of gradients, in [0, 1), a number or a schedule.
      weight_decay: of the matrices, at least 0, times the learning rate; a number or a
        schedule.
      weight_decay_mask: which matrices decay: a tree of True and False, of parameters
        or modules, or a function of the parameters that returns it; None for all.
      nesterov: False takes the polar factor of :math:`M`, without look-ahead.
      bias_correction: divide the average by the sum of its weights, as
        `optax.contrib.muon` does; see
        `scale_by_momentum`.
      adjust_lr_fn: the factor of a shape: "original", max(1, out/in)^0.5;
        "match_rms_adamw", 0.2 max(in, out)^0.5; "spectral_norm", (out/in)^0.5; None, 1;
        or a function of (in, out), which `optax.inject_hyperparams` would call as a
        schedule, with one argument, unless static_args names it.
      ns_steps: number of quintics of the polar factor, a Python integer; None for 5.
      dtype: of the polar iteration; None for "bfloat16", fast on GPUs. "float32" is
        exact.
      polar: instead of these two, a polar factor as for `orthogonalize`, such as
        `PolarExpress(8)`.
      mu_dtype: dtype in which the momentum is stored; None for the parameters'. See
        `scale_by_momentum`.
      groups: label to a transform, for labels other than "muon" and "adamw", such as
        {"frozen": optax.set_to_zero()}.

    Raises:
      ValueError: at once, a number out of range, `polar` beside `ns_steps` or `dtype`;
        at init and update, with its path, a parameter whose label has no transform, or
        is "muon" although it is no matrix; gradients or state of other shapes.

    Examples:
      >>> params = {"mlp": 3.0 * jnp.eye(2)}
      >>> tx = jm.muon(0.5, matrices={"mlp": "muon"}, polar=jm.ExactPolar())
      >>> updates, _ = tx.update(params, tx.init(params), params)
      >>> updates["mlp"].tolist()
      [[-0.5, -0.0], [-0.0, -0.5]]

    References:
      https://kellerjordan.github.io/posts/muon/
    """
    average = _averaged(
        momentum, nesterov=nesterov, bias_correction=bias_correction, mu_dtype=mu_dtype
    )
    polar = _polar(polar, ns_steps, dtype)
    chain = _muon(polar, adjust_lr_fn, weight_decay, learning_rate)
    return _recipe(average, chain, matrices, weight_decay_mask, adamw, groups)


def moonlight(
    learning_rate: optax.ScalarOrSchedule,
    *,
    matrices: Reading,
    adamw: optax.GradientTransformation | None = None,
    momentum: optax.ScalarOrSchedule = 0.95,
    weight_decay: optax.ScalarOrSchedule = 0.1,
    weight_decay_mask: Mask = None,
    ns_steps: int | None = None,
    dtype: jax.typing.DTypeLike | None = None,
    polar: Polar | None = None,
    mu_dtype: jax.typing.DTypeLike | None = None,
    groups: Mapping[str, optax.GradientTransformation] | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Moonlight's Muon, arXiv 2502.16982: `muon` with AdamW's update RMS of 0.2.

    With :math:`G` the gradient of a matrix :math:`W` (in, out) and :math:`M` an average
    of gradients,

    .. math::
       M &\leftarrow M + (1 - \mu)(G - M) \\
       W &\leftarrow W - \eta \, (0.2 \max(\mathrm{in}, \mathrm{out})^{1/2} \,
       \mathrm{polar}(G + \mu (M - G)) + \lambda W)

    The paper takes one learning rate and one weight decay for all parameters:
    `adamw=jax_muon.adamw(lr, b2=0.95, weight_decay=0.1)`.

    Args:
      learning_rate: :math:`\eta` of the matrices, a number or a schedule. If
        `optax.adamw(lr)` is tuned for a model, start with lr**0.5 / 8.
      matrices: which parameters are matrices: what
        `jax_muon.find_matrices(params, loss_fn, batch)` returns; its `rules`, such as
        {"embed": "adamw", "mlp*": "muon"}; or a function of the parameters' shapes that
        returns one of these.
      adamw: the optimizer of all other parameters, any optax transform: the one that
        trains your model now, or `jax_muon.adamw(3e-3)`. None if all are matrices, or
        in `groups`.
      momentum: decay of the average of gradients, in [0, 1), a number or a schedule.
      weight_decay: of the matrices, at least 0, times the learning rate; a number or a
        schedule.
      weight_decay_mask: which matrices decay: a tree of True and False, of parameters
        or modules, or a function of the parameters that returns it; None for all.
      ns_steps: number of quintics of the polar factor, a Python integer; None for 5.
      dtype: of the polar iteration; None for "bfloat16", fast on GPUs. "float32" is
        exact.
      polar: instead of these two, a polar factor as for `orthogonalize`, such as
        `PolarExpress(8)`.
      mu_dtype: dtype in which the momentum is stored; None for the parameters'. See
        `scale_by_momentum`.
      groups: label to a transform, for labels other than "muon" and "adamw", such as
        {"frozen": optax.set_to_zero()}.

    Raises:
      ValueError: at once, a number out of range, `polar` beside `ns_steps` or `dtype`;
        at init and update, with its path, a parameter whose label has no transform, or
        is "muon" although it is no matrix; gradients or state of other shapes.

    Examples:
      >>> params = {"mlp": jnp.eye(25)}
      >>> tx = jm.moonlight(1e-3, matrices={"mlp": "muon"}, polar=jm.ExactPolar())
      >>> updates, _ = tx.update(params, tx.init(params), params)
      >>> round(float(updates["mlp"][0, 0]), 6)  # 0.2 * 25**0.5 + 0.1 times the rate
      -0.0011
    """
    average = _averaged(momentum, mu_dtype=mu_dtype)
    polar = _polar(polar, ns_steps, dtype)
    chain = _muon(polar, "match_rms_adamw", weight_decay, learning_rate)
    return _recipe(average, chain, matrices, weight_decay_mask, adamw, groups)


def teon(
    learning_rate: optax.ScalarOrSchedule,
    *,
    matrices: Reading,
    adamw: optax.GradientTransformation | None = None,
    momentum: optax.ScalarOrSchedule = 0.95,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    weight_decay_mask: Mask = None,
    ns_steps: int | None = None,
    dtype: jax.typing.DTypeLike | None = None,
    polar: Polar | None = None,
    mu_dtype: jax.typing.DTypeLike | None = None,
    groups: Mapping[str, optax.GradientTransformation] | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""TEON (arXiv 2601.23261): Muon on matrices that consecutive layers share.

    Orthogonalizes the queries of two consecutive layers as one matrix; likewise keys,
    and values. All other matrices, and a last layer without a partner, get plain Muon.
    With :math:`G` the gradient of a matrix (in, out) and
    :math:`[M_1; M_2]` the averages of two layers joined to (2 in, out),

    .. math::
       M_i &\leftarrow M_i + (1 - \mu)(G_i - M_i), \qquad
       [X_1; X_2] = \mathrm{polar}([M_1; M_2]) \\
       W_i &\leftarrow W_i - \eta \, ((\mathrm{out} / \mathrm{in})^{1/2} X_i +
       \lambda W_i)

    The polar factor is the Polar Express with the coefficients of arXiv 2505.16932.

    Args:
      learning_rate: :math:`\eta` of the matrices, a number or a schedule.
      matrices: which parameters are matrices: what
        `jax_muon.find_matrices(params, loss_fn, batch)` returns; its `rules`, such as
        {"embed": "adamw", "mlp*": "muon"}; or a function of the parameters' shapes that
        returns one of these. Without `joins`, queries, keys and values are joined two
        by two; if no two layers have them, init raises an error.
      adamw: the optimizer of all other parameters, any optax transform: the one that
        trains your model now, or `jax_muon.adamw(3e-3)`. None if all are matrices, or
        in `groups`.
      momentum: decay of the average of gradients, in [0, 1), a number or a schedule.
      weight_decay: of the matrices, at least 0, times the learning rate; a number or a
        schedule.
      weight_decay_mask: which matrices decay: a tree of True and False, of parameters
        or modules, or a function of the parameters that returns it; None for all.
      ns_steps: number of quintics of the polar factor, a Python integer; None for 5.
      dtype: of the polar iteration; None for "bfloat16", fast on GPUs. "float32" is
        exact.
      polar: instead of these two, a polar factor as for `orthogonalize`, such as
        `PolarExpress(8)`.
      mu_dtype: dtype in which the momentum is stored; None for the parameters'. See
        `scale_by_momentum`.
      groups: label to a transform, for labels other than "muon" and "adamw", such as
        {"frozen": optax.set_to_zero()}.

    Raises:
      ValueError: at once, a number out of range, `polar` beside `ns_steps` or `dtype`;
        at init and update, with its path, a parameter whose label has no transform, or
        is "muon" although it is no matrix; gradients or state of other shapes.

    Examples:
      >>> params = {"layers": [{"q": jnp.eye(4), "out": jnp.eye(4)}] * 2}
      >>> joins = {"layers/{i}/q": 2}
      >>> matrices = jm.find_matrices(params, rules={"layers": "muon"}, joins=joins)
      >>> tx = jm.teon(1.0, matrices=matrices, polar=jm.ExactPolar())
      >>> updates, _ = tx.update(params, tx.init(params), params)
      >>> [round(float(x[0, 0]), 3) for x in updates["layers"][0].values()]
      [-1.0, -0.707]
    """
    average = _averaged(momentum, nesterov=False, mu_dtype=mu_dtype)
    table = coefficients.polar_express_paper
    polar = _polar(polar, ns_steps, dtype, table, norm_factor=1.01)
    single = _muon(polar, "spectral_norm", weight_decay, learning_rate)

    def chain(matrices: Matrices, mask: Mask) -> optax.GradientTransformation:
        joined = matrices.joins is not None
        return single(matrices if joined else with_joins(matrices, 2), mask)

    return _recipe(average, chain, matrices, weight_decay_mask, adamw, groups)


def muonh(
    learning_rate: optax.ScalarOrSchedule,
    *,
    matrices: Reading,
    adamw: optax.GradientTransformation | None = None,
    momentum: optax.ScalarOrSchedule = 0.95,
    ns_steps: int | None = None,
    dtype: jax.typing.DTypeLike | None = None,
    polar: Polar | None = None,
    mu_dtype: jax.typing.DTypeLike | None = None,
    groups: Mapping[str, optax.GradientTransformation] | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""MuonH, arXiv 2606.16899: Jordan's Muon in steps of a fixed angle, without decay.

    With :math:`G` the gradient of a matrix :math:`W`, :math:`M` an average of
    gradients, :math:`R` the Frobenius norm of :math:`W` at init, and
    :math:`n(X) = X / \|X\|_F`,

    .. math::
       M &\leftarrow M + (1 - \mu)(G - M) \\
       W &\leftarrow R \, n(W - \eta R \, n(\mathrm{polar}(G + \mu (M - G))))

    Args:
      learning_rate: :math:`\eta`, an angle; see `hyperball`. A first guess is the root
        of learning rate times weight decay of `muon`. A number or a schedule.
      matrices: which parameters are matrices: what
        `jax_muon.find_matrices(params, loss_fn, batch)` returns; its `rules`, such as
        {"embed": "adamw", "mlp*": "muon"}; or a function of the parameters' shapes that
        returns one of these.
      adamw: the optimizer of all other parameters, any optax transform: the one that
        trains your model now, or `jax_muon.adamw(3e-3)`. None if all are matrices, or
        in `groups`.
      momentum: decay of the average of gradients, in [0, 1), a number or a schedule.
      ns_steps: number of quintics of the polar factor, a Python integer; None for 5.
      dtype: of the polar iteration; None for "bfloat16", fast on GPUs. "float32" is
        exact.
      polar: instead of these two, a polar factor as for `orthogonalize`, such as
        `PolarExpress(8)`.
      mu_dtype: dtype in which the momentum is stored; None for the parameters'. See
        `scale_by_momentum`.
      groups: label to a transform, for labels other than "muon" and "adamw", such as
        {"frozen": optax.set_to_zero()}.

    Raises:
      ValueError: at once, a number out of range, `polar` beside `ns_steps` or `dtype`;
        at init and update, with its path, a parameter whose label has no transform, or
        is "muon" although it is no matrix; gradients or state of other shapes.

    Examples:
      >>> params = {"mlp": jnp.array([[3.0, 0.0], [0.0, 4.0]])}
      >>> tx = jm.muonh(0.02, matrices={"mlp": "muon"})
      >>> updates, _ = tx.update(params, tx.init(params), params)
      >>> round(float(jnp.linalg.norm(params["mlp"] + updates["mlp"])), 4)
      5.0
    """
    polar = _polar(polar, ns_steps, dtype)
    average = _averaged(momentum, mu_dtype=mu_dtype)

    def chain(matrices: Matrices, _: Mask) -> optax.GradientTransformation:
        step = hyperball(learning_rate)
        return optax.chain(orthogonalize(polar, joins=matrices.joins), step)

    return _recipe(average, chain, matrices, None, adamw, groups)


def _polar(
    polar: Polar | None,
    ns_steps: int | None,
    dtype: jax.typing.DTypeLike | None,
    table: Callable[[int], Any] = lambda steps: coefficients.NEWTON_SCHULZ,
    **settings: Any,
) -> Polar:
    """The polar factor that is given, or else the recipe's."""
    if polar is None:
        # Not a default of the recipes: `inject_hyperparams` would make an array of it.
        ns_steps = 5 if ns_steps is None else ns_steps
        checks.check_count("ns_steps", ns_steps)
        dtype = "bfloat16" if dtype is None else dtype
        quintics = table(ns_steps)
        return NewtonSchulz(ns_steps, coefficients=quintics, dtype=dtype, **settings)
    for name, value in {"ns_steps": ns_steps, "dtype": dtype}.items():
        if value is not None:
            expected = "None beside polar=, such as PolarExpress(8, dtype=...)"
            checks.refuse(name, value, expected)
    return polar


def _muon(
    polar: Polar,
    adjust_lr_fn: scaling.AdjustLr,
    weight_decay: optax.ScalarOrSchedule,
    learning_rate: optax.ScalarOrSchedule,
) -> Chain:
    """The chain of `muon` and of recipes that only have other settings."""

    def chain(matrices: Matrices, mask: Mask) -> optax.GradientTransformation:
        return optax.chain(
            orthogonalize(polar, joins=matrices.joins),
            scaling.scale_by_shape(adjust_lr_fn),
            decays.add_decayed_weights(weight_decay, mask),
            _descend(learning_rate),
        )

    return chain


def _averaged(
    momentum: optax.ScalarOrSchedule, **settings: Any
) -> optax.GradientTransformation:
    """`scale_by_momentum`, whose decay is the momentum of a recipe."""
    return scale_by_momentum(
        checks.as_rate("momentum", momentum, "in [0, 1)"), **settings
    )


def _beta2(decay: optax.ScalarOrSchedule) -> optax.ScalarOrSchedule:
    """The decay of `scale_by_normuon`, as a recipe names it."""
    return checks.as_rate("beta2", decay, "in [0, 1)")


def _descend(learning_rate: optax.ScalarOrSchedule) -> optax.GradientTransformation:
    """Step against the direction.

    It stands within `as_matrices`: after the parts of a fused kernel are one again, it
    would read and write them once more.
    """
    rate = checks.as_rate("learning_rate", learning_rate)
    return optax.scale_by_learning_rate(rate)


def _recipe(
    average: optax.GradientTransformation,
    chain: Chain,
    matrices: Reading,
    mask: Mask,
    adamw: optax.GradientTransformation | None,
    groups: Mapping[str, optax.GradientTransformation] | None,
) -> optax.GradientTransformationExtraArgs:
    """For "muon" the average of gradients and a chain, and others for other labels."""
    others = dict(groups or {})
    if MUON in others or ADAMW in others:
        expected = f"others than {MUON!r}, and {ADAMW!r}, whose transform is adamw="
        checks.refuse("labels of groups", [*others], expected)
    for label, tx in others.items():
        others[label] = checks.as_transform(f"groups[{label!r}]", tx)
    if adamw is not None:
        others[ADAMW] = checks.as_transform("adamw", adamw)
    decays.check_mask("weight_decay_mask", mask)
    chain(Matrices({}), None)  # a wrong setting of a piece is an error now

    def transforms(
        read: Matrices, tree: optax.Params
    ) -> dict[str, optax.GradientTransformation]:
        # A mask is about whole parameters, also of other labels.
        by_path = None if mask is None else decays.mask_by_path(mask, tree)
        muon = optax.chain(average, as_matrices(chain(read, by_path), read))
        return {MUON: muon, **others}

    return by_label(transforms, matrices)
