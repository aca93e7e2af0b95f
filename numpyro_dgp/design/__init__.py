"""Surrogates of simulators: where to look next, designs, and what the function depends on (``dgp.design``)."""

from numpyro_dgp.design.replicates import Pooled, pooled, within_replicates

__all__ = ["Pooled", "pooled", "within_replicates"]
