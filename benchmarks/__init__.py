"""Measurements of jax_muon, each a command with its results next to it."""
