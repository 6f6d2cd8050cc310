"""Types that functions of this package return, for annotations and isinstance."""

from jax_muon.matrices.matrices import MatrixAxes, Parameter
from jax_muon.mesh.on_mesh import OnMesh
from jax_muon.mesh.train_step import TrainStep
from jax_muon.tools.describe import DescribedParameter, Description
from jax_muon.tools.verify import Verification

__all__ = [
    "DescribedParameter",
    "Description",
    "MatrixAxes",
    "OnMesh",
    "Parameter",
    "TrainStep",
    "Verification",
]
