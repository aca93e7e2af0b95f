"""Distributions of y given function values, and their integrals."""
