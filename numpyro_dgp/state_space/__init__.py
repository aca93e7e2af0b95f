"""Exact regression on long series of one input column, in time linear in their length."""

from numpyro_dgp.state_space.state_space_normal import StateSpaceNormal

__all__ = ["StateSpaceNormal"]
