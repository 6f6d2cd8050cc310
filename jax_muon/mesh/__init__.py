"""Optimizers and train steps on a mesh: layouts, stacks, transfers."""
