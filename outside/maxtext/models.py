"""MaxText's models as shapes, and the command line of a small one."""

import os

from flax import nnx
from maxtext.configs import pyconfig
from maxtext.utils import maxtext_utils, model_creation_utils
from maxtext.utils.globals import MAXTEXT_PKG_DIR

BASE = os.path.join(MAXTEXT_PKG_DIR, "configs", "base.yml")


def model_of(*settings):
    """A configuration, its mesh, and the model that it describes, without values."""
    argv = ["", BASE, "skip_jax_distributed_system=True", *settings]
    config = pyconfig.initialize(argv)
    mesh = maxtext_utils.get_mesh_from_config(config)
    _, model = model_creation_utils.create_nnx_abstract_model(config, mesh)
    return config, mesh, model


def parameters_of(model):
    """Abstract parameters in boxes, with their sharding metadata."""
    _, boxed, _ = nnx.split(model, nnx.Param, ...)
    return boxed
