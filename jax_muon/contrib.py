"""`optax.contrib.muon` with its signature: `from jax_muon import contrib` migrates.

The matrices take this package's path: each is orthogonalized once on a mesh, in
`on_mesh`, and `describe` and `verify` work. It is `jax_muon.muon` with other names.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import AxisType
from jaxtyping import Array, Float
from optax.contrib import MuonDimensionNumbers

from jax_muon import recipes
from jax_muon.base import checks, trees
from jax_muon.matrices.matrices import ADAMW, MUON, Matrices
from jax_muon.polar.coefficients import NEWTON_SCHULZ, Coefficients
from jax_muon.polar.factors import NewtonSchulz
from jax_muon.polar.iteration import Late, iterate
from jax_muon.reading.find import find_matrices
from jax_muon.transforms.weight_decay import Mask

_PRESETS: dict[str, Coefficients | Sequence[Coefficients]] = {
    "standard": NEWTON_SCHULZ,
    # J. You's five, https://github.com/KellerJordan/modded-nanogpt, which dion takes.
    "dion": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
}
_NORMS = {"frobenius": "frobenius", "schatten": "schatten4"}


def muon(
    learning_rate: optax.ScalarOrSchedule,
    ns_coeffs: Coefficients | Sequence[Coefficients] | str = NEWTON_SCHULZ,
    ns_steps: jax.typing.ArrayLike = 5,
    beta: jax.typing.ArrayLike = 0.95,
    eps: jax.typing.ArrayLike = 1e-8,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    weight_decay_mask: Mask = None,
    mu_dtype: jax.typing.DTypeLike | None = None,
    *,
    nesterov: bool = True,
    adaptive: bool = False,
    preconditioning: str = "frobenius",
    adam_b1: jax.typing.ArrayLike = 0.9,
    adam_b2: jax.typing.ArrayLike = 0.999,
    adam_eps_root: jax.typing.ArrayLike = 0.0,
    adam_weight_decay: optax.ScalarOrSchedule = 0.0,
    adam_learning_rate: optax.ScalarOrSchedule | None = None,
    muon_weight_dimension_numbers: Any = None,
    consistent_rms: jax.typing.ArrayLike | None = None,
) -> optax.GradientTransformationExtraArgs:
    """`optax.contrib.muon` of optax 0.2.8: the same arguments, and the same updates.

    In float32 twenty steps agree to 2e-6. The state is as in `jax_muon.muon`, so a
    checkpoint of optax's is refused.

    Args:
      learning_rate: of the matrices, a number or a schedule.
      ns_coeffs: (a, b, c) of every quintic, a sequence of them, "standard" or "dion".
      ns_steps: number of quintics; at least as many as a sequence has.
      beta: decay of the momentum, in [0, 1).
      eps: added to norms of matrices, and to Adam's root; above 0.
      weight_decay: of the matrices, times the learning rate.
      weight_decay_mask: which matrices decay: a tree of True and False, or a prefix of
        one, or a function of the parameters that returns it.
      mu_dtype: dtype of the momentum. bfloat16 is rounded stochastically.
      nesterov: look ahead, in the momentum and in Adam.
      adaptive: True is not implemented.
      preconditioning: "frobenius", or "schatten" for the Schatten-4 norm; "aol" and
        "spectral" are not implemented.
      adam_b1: decay of Adam's first moment.
      adam_b2: decay of Adam's second moment.
      adam_eps_root: added inside Adam's root.
      adam_weight_decay: of all other parameters.
      adam_learning_rate: of all other parameters; None for `learning_rate`.
      muon_weight_dimension_numbers: a tree of `MuonDimensionNumbers`, or a prefix of
        one, in which None means Adam; or a function of the parameters that returns it.
        None takes every parameter of two axes for a matrix, with a warning that lists
        them.
      consistent_rms: factor of max(in, out)^0.5, such as 0.2; None scales by
        max(1, out/in)^0.5.

    Raises:
      ValueError: an argument that is not implemented; at init, complex matrices.
      ValueError: what `optax.inject_hyperparams` makes arrays unless static_args names
        it: ns_steps with a sequence, and inside `on_mesh` ns_steps or eps.
      UserWarning: at init, without dimension numbers.

    Examples:
      >>> from jax_muon import contrib
      >>> from optax.contrib import MuonDimensionNumbers
      >>> numbers = {"up": MuonDimensionNumbers(), "bias": None}
      >>> tx = contrib.muon(0.02, muon_weight_dimension_numbers=numbers)
      >>> params = {"up": jnp.ones((4, 8)), "bias": jnp.ones(8)}
      >>> updates, state = tx.update(params, tx.init(params), params)
    """
    if adaptive:
        checks.refuse("adaptive", adaptive, "False; True is not implemented")
    if preconditioning not in _NORMS:
        expected = "'frobenius' or 'schatten'; others are not implemented"
        checks.refuse("preconditioning", preconditioning, expected)
    if isinstance(ns_coeffs, str):
        checks.check_choice("ns_coeffs", ns_coeffs, tuple(_PRESETS))
        ns_coeffs = _PRESETS[ns_coeffs]
    rms: Any = consistent_rms
    numbers = muon_weight_dimension_numbers
    adam = optax.adamw(
        learning_rate if adam_learning_rate is None else adam_learning_rate,
        b1=adam_b1,
        b2=adam_b2,
        eps=eps,
        eps_root=adam_eps_root,
        mu_dtype=mu_dtype,
        weight_decay=adam_weight_decay,
        nesterov=nesterov,
    )

    tx = recipes.muon(
        learning_rate,
        matrices=lambda tree: _read(numbers, tree),
        adamw=adam,
        momentum=beta,
        weight_decay=weight_decay,
        weight_decay_mask=weight_decay_mask,
        nesterov=nesterov,
        bias_correction=True,
        adjust_lr_fn="original" if rms is None else lambda *x: rms * max(x) ** 0.5,
        polar=_polar(ns_coeffs, ns_steps, eps, preconditioning),
        mu_dtype=mu_dtype,
    )

    def init_fn(params: optax.Params) -> optax.OptState:
        if numbers is None:
            flat = trees.leaves_with_paths(params)
            paths = ", ".join(path for path, x in flat if x.ndim == 2)
            # A function that is not static was called with a count, as a schedule.
            injected = checks.injected(beta, "muon_weight_dimension_numbers")
            warnings.warn(
                "without muon_weight_dimension_numbers every parameter of two axes is "
                f"a matrix: {paths}. Embeddings and heads may be among them: "
                "jax_muon.find_matrices(params, loss_fn, batch) shows which, and "
                "jax_muon.muon(..., matrices=) takes what it returns; or pass "
                f"muon_weight_dimension_numbers{injected}",
                stacklevel=2,
            )
        return tx.init(params)

    return optax.GradientTransformationExtraArgs(init_fn, tx.update)


def _read(numbers: Any, tree: optax.Params) -> Matrices:
    """How parameters are read by optax's argument."""
    rules = numbers(tree) if trees.is_function(numbers) else numbers
    if numbers is None:
        rules = jax.tree.map(lambda x: MUON if x.ndim == 2 else ADAMW, tree)
    # A value for each parameter, since a flat prefix would be path patterns.
    rules = jax.tree.broadcast(
        rules, tree, is_leaf=lambda x: x is None or isinstance(x, MuonDimensionNumbers)
    )
    return find_matrices(tree, rules=rules)


def _polar(
    coefficients: Any, steps: Any, eps: Any, preconditioning: str
) -> Callable[[Array], Array]:
    """Newton-Schulz in the dtype of the gradients, as there; float16 in float32."""
    each = np.ndim(coefficients[0]) > 0  # a quintic of its own in every step
    number = len(coefficients) if each else steps
    if each and (isinstance(steps, jax.Array) or steps < number):
        expected = f"at least {number}, the number of quintics"
        checks.refuse("ns_steps", steps, expected + checks.injected(steps, "ns_steps"))
    # What `optax.inject_hyperparams` made arrays is known at run time alone.
    given = coefficients if isinstance(coefficients, jax.Array) else None, steps, eps
    late = Late(*(x if isinstance(x, jax.Array) else None for x in given))
    is_late = any(x is not None for x in late)
    settings = NewtonSchulz(
        1 if late.steps is not None else number,
        coefficients=NEWTON_SCHULZ if late.quintic is not None else coefficients,
        eps=1.0 if late.eps is not None else eps,
        norm=_NORMS[preconditioning],
        dtype=None,
        form="standard" if is_late else "auto",
    )
    if not is_late:
        return settings

    def polar(x: Float[Array, "*b m n"]) -> Float[Array, "*b m n"]:
        if AxisType.Manual in jax.sharding.get_abstract_mesh().axis_types:
            raise ValueError(
                "ns_steps or eps is an array inside on_mesh; use numbers: under "
                'optax.inject_hyperparams pass static_args=("ns_steps", "eps")'
            )
        stack = x.reshape(-1, *x.shape[-2:])
        return iterate((stack,), settings, False, late).reshape(x.shape)

    return polar
