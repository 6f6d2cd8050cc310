"""How parameters are read as matrices: layers, roles, axes, rules."""
