"""jax_muon: the Muon family of optimizers for JAX, as small optax pieces.

Examples in docstrings assume `import jax, optax`, `import jax.numpy as jnp` and
`import jax_muon as jm`.
"""

from jax_muon import contrib as contrib
from jax_muon import types as types
from jax_muon.matrices.as_matrices import as_matrices, with_splits
from jax_muon.matrices.matrices import Matrices
from jax_muon.matrices.splits import Split
from jax_muon.mesh.layout import fsdp
from jax_muon.mesh.on_mesh import on_mesh
from jax_muon.mesh.scan_layers import scan_layers
from jax_muon.mesh.train_step import make_train_step
from jax_muon.mesh.wrappers import on_replicas
from jax_muon.polar.factors import ExactPolar, NewtonSchulz, PolarExpress
from jax_muon.reading.find import find_matrices
from jax_muon.recipes import moonlight, muon, muonh, nanochat, normuon, teon
from jax_muon.tools.describe import describe
from jax_muon.tools.verify import verify
from jax_muon.transforms.adamw import adamw
from jax_muon.transforms.hyperball import hyperball
from jax_muon.transforms.keep_residual import keep_residual
from jax_muon.transforms.momentum import scale_by_momentum
from jax_muon.transforms.orthogonalize import orthogonalize
from jax_muon.transforms.qk_clip import clip_qk, max_attention_logits
from jax_muon.transforms.scaling import (
    equilibrate_rows,
    normalize_frobenius,
    scale_by_normuon,
    scale_by_path,
    scale_by_shape,
)
from jax_muon.transforms.skip_nonfinite import skip_nonfinite
from jax_muon.transforms.weight_decay import add_cautious_decayed_weights

__version__ = "0.1.0"

__all__ = [
    "ExactPolar",
    "Matrices",
    "NewtonSchulz",
    "PolarExpress",
    "Split",
    "adamw",
    "add_cautious_decayed_weights",
    "as_matrices",
    "clip_qk",
    "describe",
    "equilibrate_rows",
    "find_matrices",
    "fsdp",
    "hyperball",
    "keep_residual",
    "make_train_step",
    "max_attention_logits",
    "moonlight",
    "muon",
    "muonh",
    "nanochat",
    "normalize_frobenius",
    "normuon",
    "on_mesh",
    "on_replicas",
    "orthogonalize",
    "scale_by_momentum",
    "scale_by_normuon",
    "scale_by_path",
    "scale_by_shape",
    "scan_layers",
    "skip_nonfinite",
    "teon",
    "verify",
    "with_splits",
]
