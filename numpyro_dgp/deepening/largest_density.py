"""One layer at the largest density of its hyperparameters, with its function integrated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from scipy import optimize

from numpyro_dgp._typing import Array
from numpyro_dgp.guides.collapsed.collapsed_guide import Collapsed
from numpyro_dgp.guides.rules.single_numbers import Delta
from numpyro_dgp.predict import Posterior

__all__ = ["highest_end", "posterior_at"]

_MOST_STEPS = 300


def highest_end(slope: Callable[[np.ndarray], tuple[Array, Array]], starts: np.ndarray) -> np.ndarray:
    """The best end of ascents by L-BFGS from some points (S, n), which is not below any of them.

    Args:
        slope: value and gradient at a point (n,), of what is to be large.
        starts: the points, where it is finite.
    """

    def energy(point: np.ndarray) -> tuple[float, np.ndarray]:
        value, gradient = (np.asarray(a, float) for a in slope(point.astype(starts.dtype)))
        finite = np.isfinite(value) and np.isfinite(gradient).all()
        return (-float(value), -gradient) if finite else (np.inf, np.zeros(len(point)))

    options = {"maxiter": _MOST_STEPS}
    ends = [optimize.minimize(energy, start, jac=True, method="L-BFGS-B", options=options) for start in starts]
    return min(ends, key=lambda end: end.fun).x.astype(starts.dtype)


def posterior_at(model: Callable[..., Any], values: dict[str, Array], args: tuple[Any, ...]) -> Posterior:
    """The posterior of a program of one layer with these hyperparameters, the values of the layer in closed form."""
    guide = Collapsed(model, sites=dict.fromkeys(values, Delta()))
    return Posterior(model, guide.on(*args), {f"{name}_auto_loc": value for name, value in values.items()})
