"""Which parameters are matrices, by rules, by a computation, or by names."""
