"""jax_muon: the Muon family of optimizers for JAX, as small optax pieces."""
