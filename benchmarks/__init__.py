"""Measurements of jax_muon, each a command with its results next to it."""

import pathlib
import sys

# The scripts of the example import each other by name, and so does what uses them.
sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "examples"))
