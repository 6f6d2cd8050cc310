"""jax_muon: the Muon family of optimizers for JAX, as small optax pieces."""

from jax_muon.describe import describe
from jax_muon.guards import clip_by_global_norm, skip_nonfinite
from jax_muon.max_logits import max_attention_logits
from jax_muon.mesh.portable import (
    abstract_portable,
    from_portable,
    to_portable,
)
from jax_muon.mesh.train_step import init_optimizer, make_train_step
from jax_muon.mesh.zero2 import zero2_matrices, zero2_multi_transform, zero2_rows
from jax_muon.polar.coefficients import polar_express_coefficients
from jax_muon.polar.factors import newton_schulz, polar_express, svd_polar
from jax_muon.qk_clip import clip_qk
from jax_muon.reading.axes import MatrixAxes, matrix_axes
from jax_muon.reading.labels import label_params
from jax_muon.recipes import moonlight, muon, nanochat, normuon, teon
from jax_muon.splits import Split, with_splits
from jax_muon.transforms import (
    add_cautious_decayed_weights,
    equilibrate_rows,
    nesterov,
    normalize_frobenius,
    orthogonalize,
    scale_by_normuon,
    scale_by_shape,
)

__version__ = "0.1.0"

__all__ = [
    "MatrixAxes",
    "Split",
    "abstract_portable",
    "add_cautious_decayed_weights",
    "clip_by_global_norm",
    "clip_qk",
    "describe",
    "equilibrate_rows",
    "from_portable",
    "init_optimizer",
    "label_params",
    "make_train_step",
    "matrix_axes",
    "max_attention_logits",
    "moonlight",
    "muon",
    "nanochat",
    "nesterov",
    "newton_schulz",
    "normalize_frobenius",
    "normuon",
    "orthogonalize",
    "polar_express",
    "polar_express_coefficients",
    "scale_by_normuon",
    "scale_by_shape",
    "skip_nonfinite",
    "svd_polar",
    "teon",
    "to_portable",
    "with_splits",
    "zero2_matrices",
    "zero2_multi_transform",
    "zero2_rows",
]
