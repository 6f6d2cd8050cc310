"""Read parameters from the computation: a matrix is what the loss contracts with data."""
