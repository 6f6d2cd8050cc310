"""Whole optimizers: each a chain of pieces for matrices, and AdamW for the rest.

A recipe is one call of `partition`; to change more than its arguments, copy its chain.
Arguments mean the same in all recipes, and `nanochat` describes those that most share.

With `jax_numpy_dtype_promotion="strict"` optax's Adam cannot be traced; pass another
transform as `adamw`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax

from jax_muon.base import checks
from jax_muon.base.facts import note
from jax_muon.matrices.find import Reader, reader
from jax_muon.matrices.joins import with_joins
from jax_muon.matrices.matrices import ADAMW, MUON, Matrices
from jax_muon.partition import Group, partition
from jax_muon.polar import coefficients
from jax_muon.polar.factors import NewtonSchulz
from jax_muon.transforms.hyperball import hyperball
from jax_muon.transforms.momentum import nesterov as ema  # an argument's name, too
from jax_muon.transforms.orthogonalize import Polar, orthogonalize
from jax_muon.transforms.scaling import (
    equilibrate_rows,
    normalize_frobenius,
    scale_by_normuon,
    scale_by_shape,
)
from jax_muon.transforms.weight_decay import add_cautious_decayed_weights


def nanochat(
    learning_rate: optax.ScalarOrSchedule = 0.02,
    momentum: optax.ScalarOrSchedule = 0.95,
    weight_decay: optax.ScalarOrSchedule = 0.1,
    *,
    version: str = "2026-01",
    beta2: optax.ScalarOrSchedule | None = None,
    ns_steps: int | None = None,
    dtype: jax.typing.DTypeLike = "bfloat16",
    polar: Polar | None = None,
    mu_dtype: jax.typing.DTypeLike | None = None,
    adamw: optax.GradientTransformation | optax.ScalarOrSchedule | None = None,
    groups: Mapping[str, Group] | None = None,
    matrices: Reader = None,
) -> optax.GradientTransformationExtraArgs:
    """MuonAdamW of nanochat: Nesterov, Polar Express, NorMuon, cautious weight decay.

    Args:
      learning_rate: of the matrices, before the factor max(1, out/in)^0.5; a number or
        an optax schedule, like every rate below. If `optax.adamw(lr)` is tuned for a
        model, start with (lr * width)**0.5 / 40; see docs/rates.md.
      momentum: of the matrices, an exponential average, in [0, 1).
      weight_decay: of the matrices, times the learning rate, and here times the factor
        of the shape. It is cautious; see `add_cautious_decayed_weights`.
      version: "2026-01"; "2026-03", with a margin of 1.01 instead of 1.02 before the
        polar factor, and beta2 0.9; or "2026-07", which also equilibrates the rows
        before the polar factor (MuonEq) and sets its Frobenius norm (Muon+).
      beta2: decay of NorMuon's mean squares, in [0, 1). None for 0.9, and for 0.95 in
        "2026-01".
      ns_steps: of the polar iteration, a Python integer; None for 5.
      dtype: of the polar iteration; "bfloat16" is fast on a GPU, "float32" exact.
      polar: instead of `ns_steps` and `dtype`, a polar factor as for `orthogonalize`.
      mu_dtype: dtype of the momentum; None for the parameters'. See `nesterov`.
      adamw: the optimizer of all other parameters: the one that trains your model now,
        such as `optax.adamw(lr)`, or a learning rate for the recipe's own AdamW. None
        is 3e-4, which no model was tuned for.
      groups: transforms for further labels, such as {"frozen": optax.set_to_zero()}.
      matrices: which parameters are matrices; see `partition`.

    Raises:
      ValueError: at once, a number out of range; at init and update, as `partition`.

    Examples:
      >>> params = {"up": jax.numpy.ones((4, 8)), "bias": jax.numpy.ones(8)}
      >>> matrices = {"up": "muon"}  # or, by the loss, what jm.find_matrices returns
      >>> tx = jm.nanochat(0.02, adamw=optax.adamw(3e-3), matrices=matrices)
      >>> state = jax.jit(tx.init)(params)

    References:
      https://github.com/karpathy/nanochat; Polar Express arXiv 2505.16932; NorMuon
      arXiv 2510.05491; MuonEq arXiv 2603.28254; Muon+ arXiv 2602.21545.
    """
    checks.choice("version", version, ("2026-01", "2026-03", "2026-07"))
    first, last = version == "2026-01", version == "2026-07"
    decay = (0.95 if first else 0.9) if beta2 is None else beta2
    settings = {"norm_factor": 1.02 if first else 1.01, "eps": 1e-6}
    polar = _polar(polar, ns_steps, dtype, coefficients.nanochat, **settings)

    def chain(matrices: Matrices) -> optax.GradientTransformation:
        return optax.chain(
            ema(momentum, mu_dtype=mu_dtype),
            *([equilibrate_rows(matrices=matrices)] if last else []),
            orthogonalize(polar, matrices=matrices),
            *([normalize_frobenius(matrices=matrices)] if last else []),
            scale_by_normuon(decay, matrices=matrices),
            add_cautious_decayed_weights(weight_decay),
            scale_by_shape(matrices=matrices),
            optax.scale_by_learning_rate(checks.rate("learning_rate", learning_rate)),
        )

    return _recipe(chain, _adamw(adamw, b1=0.8, b2=0.95, eps=1e-10), groups, matrices)


def normuon(
    learning_rate: optax.ScalarOrSchedule = 1e-3,
    momentum: optax.ScalarOrSchedule = 0.95,
    weight_decay: optax.ScalarOrSchedule = 0.1,
    *,
    beta2: optax.ScalarOrSchedule = 0.95,
    ns_steps: int | None = None,
    dtype: jax.typing.DTypeLike = "bfloat16",
    polar: Polar | None = None,
    mu_dtype: jax.typing.DTypeLike | None = None,
    adamw: optax.GradientTransformation | optax.ScalarOrSchedule | None = None,
    groups: Mapping[str, Group] | None = None,
    matrices: Reader = None,
) -> optax.GradientTransformationExtraArgs:
    """NorMuon, arXiv 2510.05491: neurons normalized, and matrices to an RMS of 0.2.

    Args:
      learning_rate: of the matrices, before the factor 0.2 (in out)^0.5 / ||update||_F.
        If `optax.adamw(lr)` is tuned for a model, start with lr**0.5 / 8.
      beta2: of the mean squares of neurons, in [0, 1).
      ...: all other arguments as in `nanochat`; its decay is not cautious.

    Examples:
      >>> params = {"mlp": jnp.arange(8.0).reshape(2, 4)}
      >>> tx = jm.normuon(1.0, 0.95, 0.0, dtype="float32", matrices={"mlp": "muon"})
      >>> updates, _ = tx.update(params, tx.init(params), params)
      >>> round(float(jnp.sqrt(jnp.mean(updates["mlp"] ** 2))), 4)
      0.2
    """

    def chain(matrices: Matrices) -> optax.GradientTransformation:
        return optax.chain(
            ema(momentum, nesterov=False, mu_dtype=mu_dtype),
            orthogonalize(_polar(polar, ns_steps, dtype), matrices=matrices),
            # The paper adds 1e-8 to the root; here the root is at least 1e-8. The
            # default, 1e-5, would hold back neurons whose first updates are small.
            scale_by_normuon(beta2, axis="output", eps=1e-16, matrices=matrices),
            normalize_frobenius(0.2, matrices=matrices),
            _decay(weight_decay),
            optax.scale_by_learning_rate(checks.rate("learning_rate", learning_rate)),
        )

    return _recipe(chain, _adamw(adamw, b2=0.95), groups, matrices)


def muon(
    learning_rate: optax.ScalarOrSchedule = 0.02,
    momentum: optax.ScalarOrSchedule = 0.95,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    *,
    nesterov: bool = True,
    bias_correction: bool = False,
    adjust_lr_fn: str | Callable[[int, int], float] | None = "original",
    ns_steps: int | None = None,
    dtype: jax.typing.DTypeLike = "bfloat16",
    polar: Polar | None = None,
    mu_dtype: jax.typing.DTypeLike | None = None,
    adamw: optax.GradientTransformation | optax.ScalarOrSchedule | None = None,
    groups: Mapping[str, Group] | None = None,
    matrices: Reader = None,
) -> optax.GradientTransformationExtraArgs:
    """Jordan's Muon: Nesterov, Newton-Schulz, a factor for the shape, decoupled decay.

    See https://kellerjordan.github.io/posts/muon/. Start rates as for `nanochat`. With
    equal settings, the mathematics of torch.optim.Muon.

    Args:
      learning_rate: of the matrices, before the factor of the shape.
      weight_decay: of the matrices, decoupled: times the learning rate alone.
      nesterov: True for Nesterov's look-ahead; see `nesterov`.
      bias_correction: of the momentum, as in `optax.contrib.muon`; see `nesterov`.
      adjust_lr_fn: the factor for the shape of a matrix; see `scale_by_shape`.
      ...: all other arguments as in `nanochat`.

    Examples:
      >>> params = {"mlp": 3.0 * jnp.eye(2), "bias": jnp.ones(2)}
      >>> tx = jm.muon(0.5, polar=jm.ExactPolar(), matrices={"*": "muon"})
      >>> updates, _ = tx.update(params, tx.init(params), params)
      >>> updates["mlp"].tolist()
      [[-0.5, -0.0], [-0.0, -0.5]]
    """
    average = {"nesterov": nesterov, "bias_correction": bias_correction}

    def chain(matrices: Matrices) -> optax.GradientTransformation:
        return optax.chain(
            ema(momentum, **average, mu_dtype=mu_dtype),
            orthogonalize(_polar(polar, ns_steps, dtype), matrices=matrices),
            scale_by_shape(adjust_lr_fn, matrices=matrices),
            _decay(weight_decay),
            optax.scale_by_learning_rate(checks.rate("learning_rate", learning_rate)),
        )

    return _recipe(chain, _adamw(adamw, b2=0.95, eps=1e-10), groups, matrices)


def moonlight(
    learning_rate: optax.ScalarOrSchedule = 1e-3,
    momentum: optax.ScalarOrSchedule = 0.95,
    weight_decay: optax.ScalarOrSchedule = 0.1,
    *,
    ns_steps: int | None = None,
    dtype: jax.typing.DTypeLike = "bfloat16",
    polar: Polar | None = None,
    mu_dtype: jax.typing.DTypeLike | None = None,
    adamw: optax.GradientTransformation | optax.ScalarOrSchedule | None = None,
    groups: Mapping[str, Group] | None = None,
    matrices: Reader = None,
) -> optax.GradientTransformationExtraArgs:
    """Moonlight's Muon, arXiv 2502.16982: `muon` with AdamW's update RMS of 0.2.

    Args:
      learning_rate: of the matrices, before the factor 0.2 max(in, out)^0.5. Start as
        for `normuon`.
      adamw: None for AdamW with this learning rate and this weight decay; another rate
        for AdamW with this weight decay; or a transform, which is used as it is.
      ...: all other arguments as in `muon`.

    Examples:
      >>> params = {"mlp": jnp.eye(25)}
      >>> tx = jm.moonlight(1e-3, polar=jm.ExactPolar(), matrices={"mlp": "muon"})
      >>> updates, _ = tx.update(params, tx.init(params), params)
      >>> round(float(updates["mlp"][0, 0]), 6)  # 0.2 * 25**0.5 + 0.1 times the rate
      -0.0011
    """
    rate = checks.rate("learning_rate", learning_rate) if adamw is None else adamw
    return muon(
        learning_rate,
        momentum,
        weight_decay,
        adjust_lr_fn="match_rms_adamw",
        ns_steps=ns_steps,
        dtype=dtype,
        polar=polar,
        mu_dtype=mu_dtype,
        adamw=_adamw(rate, b2=0.95, weight_decay=weight_decay),
        groups=groups,
        matrices=matrices,
    )


def teon(
    learning_rate: optax.ScalarOrSchedule = 0.02,
    momentum: optax.ScalarOrSchedule = 0.95,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    *,
    ns_steps: int | None = None,
    dtype: jax.typing.DTypeLike = "bfloat16",
    polar: Polar | None = None,
    mu_dtype: jax.typing.DTypeLike | None = None,
    adamw: optax.GradientTransformation | optax.ScalarOrSchedule | None = None,
    groups: Mapping[str, Group] | None = None,
    matrices: Reader = None,
) -> optax.GradientTransformationExtraArgs:
    """TEON (arXiv 2601.23261): Muon on matrices that consecutive layers share.

    Orthogonalizes the queries of two consecutive layers as one matrix; likewise keys,
    and values. All other matrices, and a last layer without a partner, get plain Muon.
    The polar factor is the Polar Express with the coefficients of arXiv 2505.16932.

    Args:
      learning_rate: of the matrices, before the factor (out/in)^0.5.
      matrices: without `joins`, queries, keys and values are joined two by two; an
        error at init if the reading shows none of two layers.
      ...: all other arguments as in `muon`.

    Examples:
      >>> params = {"layers": [{"q": jnp.eye(4), "out": jnp.eye(4)}] * 2}
      >>> joins = {"layers/{i}/q": 2}
      >>> matrices = jm.find_matrices(params, rules={"*": "muon"}, joins=joins)
      >>> tx = jm.teon(1.0, polar=jm.ExactPolar(), matrices=matrices)
      >>> updates, _ = tx.update(params, tx.init(params), params)
      >>> [round(float(x[0, 0]), 3) for x in updates["layers"][0].values()]
      [-1.0, -0.707]
    """
    table = coefficients.polar_express_paper

    def in_pairs(params: Any) -> Matrices:
        single = reader(matrices)(params)
        return with_joins(single, 2) if single.joins is None else single

    return muon(
        learning_rate,
        momentum,
        weight_decay,
        nesterov=False,
        adjust_lr_fn="spectral_norm",
        polar=_polar(polar, ns_steps, dtype, table, norm_factor=1.01),
        mu_dtype=mu_dtype,
        adamw=_adamw(adamw, b2=0.95),
        groups=groups,
        matrices=in_pairs,
    )


def muonh(
    learning_rate: optax.ScalarOrSchedule = 0.02,
    momentum: optax.ScalarOrSchedule = 0.95,
    *,
    ns_steps: int | None = None,
    dtype: jax.typing.DTypeLike = "bfloat16",
    polar: Polar | None = None,
    mu_dtype: jax.typing.DTypeLike | None = None,
    adamw: optax.GradientTransformation | optax.ScalarOrSchedule | None = None,
    groups: Mapping[str, Group] | None = None,
    matrices: Reader = None,
) -> optax.GradientTransformationExtraArgs:
    """MuonH, arXiv 2606.16899: Jordan's Muon in steps of a fixed angle, without decay.

    Args:
      learning_rate: of the matrices, an angle; see `hyperball`. A first guess is the
        root of learning rate times weight decay of `muon`.
      ...: all other arguments as in `nanochat`.

    Examples:
      >>> params = {"mlp": jnp.array([[3.0, 0.0], [0.0, 4.0]])}
      >>> tx = jm.muonh(0.02, matrices={"mlp": "muon"})
      >>> updates, _ = tx.update(params, tx.init(params), params)
      >>> round(float(jnp.linalg.norm(params["mlp"] + updates["mlp"])), 4)
      5.0
    """

    def chain(matrices: Matrices) -> optax.GradientTransformation:
        return optax.chain(
            ema(momentum, mu_dtype=mu_dtype),
            orthogonalize(_polar(polar, ns_steps, dtype), matrices=matrices),
            hyperball(learning_rate, matrices=matrices),
        )

    return _recipe(chain, _adamw(adamw, b2=0.95), groups, matrices)


def _polar(
    polar: Polar | None,
    ns_steps: int | None,
    dtype: Any,
    table: Callable[[int], Any] = lambda steps: coefficients.NEWTON_SCHULZ,
    **settings: Any,
) -> Polar:
    """The polar factor that is given, or else the recipe's."""
    if polar is not None:
        return polar
    # Not a default of the recipes: `inject_hyperparams` would make an array of it.
    ns_steps = 5 if ns_steps is None else ns_steps
    checks.count("ns_steps", ns_steps)
    table_of_steps = table(ns_steps)
    return NewtonSchulz(ns_steps, coefficients=table_of_steps, dtype=dtype, **settings)


def _decay(weight_decay: optax.ScalarOrSchedule) -> optax.GradientTransformation:
    """`optax.add_decayed_weights`; of 0, a transform that needs no parameters."""
    rate = checks.rate("weight_decay", weight_decay)
    if isinstance(rate, float) and rate == 0:
        return optax.identity()
    tx = optax.add_decayed_weights(rate)

    def update_fn(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        checks.params("weight_decay, unless it is 0.0,", params)
        updates, _ = tx.update(updates, state, params)
        # In optax 0.2.6 the count of a schedule stands still.
        return updates, jax.tree.map(optax.safe_increment, state)

    return optax.GradientTransformation(tx.init, update_fn)


def _adamw(
    adamw: Any, *, weight_decay: optax.ScalarOrSchedule = 0.0, **settings: Any
) -> optax.GradientTransformation:
    """The transform that is given, or else AdamW with this learning rate."""
    if isinstance(adamw, optax.GradientTransformation | optax.MultiSteps):
        return checks.as_transform("adamw", adamw)
    checks.no_factory("adamw", adamw)
    rate = checks.rate("adamw", 3e-4 if adamw is None else adamw)
    tx = optax.chain(  # `optax.adamw`, which needs the parameters without decay, too
        optax.scale_by_adam(**settings),
        _decay(weight_decay),
        optax.scale_by_learning_rate(rate),
    )

    def init_fn(params: Any) -> Any:
        if adamw is None:
            note().default_rates[ADAMW] = rate
        return tx.init(params)

    return optax.GradientTransformation(init_fn, tx.update)


def _recipe(
    chain: Callable[[Matrices], optax.GradientTransformation],
    adamw: optax.GradientTransformation,
    groups: Mapping[str, Group] | None,
    matrices: Reader,
) -> optax.GradientTransformationExtraArgs:
    """The chain for "muon", a transform for "adamw", and the user's groups."""
    groups = {} if groups is None else groups
    if MUON in groups or ADAMW in groups:
        expected = f"others than {MUON!r}, and {ADAMW!r}, whose transform is adamw="
        checks.refuse("labels of groups", [*groups], expected)
    chain(Matrices({}))  # a wrong setting of a piece is an error now
    return partition({MUON: chain, ADAMW: adamw, **groups}, matrices)
