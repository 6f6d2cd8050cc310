"""Read parameters from a computation: a matrix is what the loss contracts."""
