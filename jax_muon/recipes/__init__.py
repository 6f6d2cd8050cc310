"""Whole optimizers: each a chain of pieces for matrices, and AdamW for the rest.

Every recipe is one call of `partition`; what it does can be written out in ten lines,
and changed there. Their arguments mean the same in all of them:

- `learning_rate`, `momentum`, `weight_decay`: of the matrices, a float or an optax
  schedule. Recipes that keep the norms of matrices have no weight_decay and no mask of
  it.
- `steps`: of the polar iteration; a Python integer.
- `dtype`: of the polar iteration; "bfloat16" is fast on a GPU, "float16" for GPUs eight
  times as exact (and slow on a CPU), "float32" exact.
- `polar`: another polar factor, any function of (..., m, n), instead of the recipe's;
  `steps` and `dtype` are then its own.
- `momentum_dtype`: of the momentum; None for the parameters'.
- `learning_rates`: path pattern to a factor of the learning rate of these matrices.
- `weight_decay_mask`: which matrices decay: a tree of booleans, or a function of the
  matrices that gives one, as in `optax.masked`; None for all.
- `adamw_learning_rate`, `adamw_b1`, `adamw_b2`, `adamw_eps`, `adamw_weight_decay`: of
  `optax.adamw`, for the parameters labelled "adamw".
- `groups`: further labels and what they get, as in `partition`: `{"embedding":
  optax.adamw(0.2), "frozen": optax.set_to_zero()}`.
- `reading`: how parameters are read; see `Reading`.

All give an `optax.GradientTransformation` whose updates are added to the parameters,
and raise a ValueError for a number out of range, at once, and what `partition` raises
at init. Updates have the dtype of the parameters: narrower gradients, such as bfloat16
for float32 parameters, are widened before anything is computed. Under
`optax.inject_hyperparams` all numbers may change from step to step except `steps`,
which has to be named in `static_args`, as has a `polar` that is given.

With `jax_numpy_dtype_promotion="strict"` recipes cannot be traced, since `optax.adamw`
cannot. `partition` with the pieces, and with another optimizer for the rest, can.
"""

from jax_muon.recipes.joined import teon
from jax_muon.recipes.neurons import nanochat, normuon
from jax_muon.recipes.plain import moonlight, muon
from jax_muon.recipes.sphere import muonh, normuonh

__all__ = [
    "moonlight",
    "muon",
    "muonh",
    "nanochat",
    "normuon",
    "normuonh",
    "teon",
]
