"""How parameters are read as matrices: axis names, layers, roles, axes, rules."""
