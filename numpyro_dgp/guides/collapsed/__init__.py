"""The guide in which q(v) of every layer is at its optimum."""

from numpyro_dgp.guides.collapsed.collapsed_guide import Collapsed

__all__ = ["Collapsed"]
