"""Layers added to a fit, and fits of several depths together."""
