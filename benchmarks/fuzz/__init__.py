"""Random optimizers, trees, layouts and numbers, each checked against one device."""
