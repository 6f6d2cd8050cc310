"""From a loss to `Matrices`: which parameters it multiplies data by, and how."""
