"""PyTorch references: the Muon family from its equations, in the plainest way.

Every matrix is a PyTorch weight, (out, in) = (m, n). Nothing here is fast: a reference
is read, believed, and then compared with. It follows the dtype of the parameters
(float64 too); only the polar iteration has a dtype of its own.
"""
