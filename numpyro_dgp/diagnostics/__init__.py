"""S4: diagnostics of posteriors: ArviZ, Pareto-smoothed importance sampling, calibration, comparison."""

from numpyro_dgp.diagnostics.arviz import to_arviz

__all__ = ["to_arviz"]
