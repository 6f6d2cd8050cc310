"""Evidence that jax_muon computes what the PyTorch optimizers compute."""
