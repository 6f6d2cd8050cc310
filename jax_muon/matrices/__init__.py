"""Which parameters are matrices, by rules and by a computation."""
