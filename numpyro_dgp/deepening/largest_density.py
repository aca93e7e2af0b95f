"""One layer at a largest density of its hyperparameters, with its function integrated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from scipy import optimize

from numpyro_dgp._typing import Array
from numpyro_dgp.guides.collapsed.collapsed_guide import Collapsed
from numpyro_dgp.guides.rules.single_numbers import Delta
from numpyro_dgp.predict import Posterior

__all__ = ["end_of_most", "posterior_at"]

_MOST_STEPS = 300
_SAME = 0.2
"""Nats between ends of ascents to one maximum, at most."""


def end_of_most(slope: Callable[[np.ndarray], tuple[Array, Array]], starts: np.ndarray) -> np.ndarray:
    """The local maximum at which most ascents by L-BFGS end that begin at some points (S, n).

    Where these are draws of a posterior, it is the maximum with most of the probability around it, and not always the
    highest one. Ends of nearly the same height are one maximum; of two that are reached as often, the higher counts.

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
    ends = sorted(ends, key=lambda end: end.fun)
    number = np.cumsum(np.diff([end.fun for end in ends], prepend=ends[0].fun) > _SAME)
    most = np.bincount(number).argmax()  # the first, which is the highest, of those with as many
    return ends[int(np.searchsorted(number, most))].x.astype(starts.dtype)


def posterior_at(model: Callable[..., Any], values: dict[str, Array], args: tuple[Any, ...]) -> Posterior:
    """The posterior of a program of one layer with these hyperparameters, the values of the layer in closed form."""
    guide = Collapsed(model, sites=dict.fromkeys(values, Delta()))
    return Posterior(model, guide.on(*args), {f"{name}_auto_loc": value for name, value in values.items()})
