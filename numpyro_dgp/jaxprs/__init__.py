"""Dependence analysis of traced functions, from their jaxprs."""
