"""Tools that look at an optimizer from outside. No recipe or piece imports them."""
