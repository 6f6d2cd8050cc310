"""Optimizers and train steps on a mesh: shardings, owners, transfers."""
