"""How is a parameter read? Paths, roles, labels, axes, joins."""
