"""Which parameters are matrices, as data; rules, splits and joins; `as_matrices`."""
