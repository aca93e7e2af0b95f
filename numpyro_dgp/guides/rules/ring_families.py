"""Rules for the values on a ring (``dgp.Grid``): covariance families of O(M) numbers and O(M log M) work."""

from __future__ import annotations

import dataclasses
import warnings
from functools import partial
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from numpyro.distributions import constraints

from numpyro_dgp._checks import violated
from numpyro_dgp._fields import scale
from numpyro_dgp._repr import brief
from numpyro_dgp._typing import Array
from numpyro_dgp.guides.rules.rule import Rule, SiteContext, initial_scale, require_site
from numpyro_dgp.rings.ring_beliefs import RingBelief, RingPrior

__all__ = [
    "Circulant",
    "ScaledCirculant",
    "ScaledPrior",
    "ScaledProduct",
    "WhitenedSites",
]


# Condition of the covariance of the values on the grid: of a smooth kernel the points per lengthscale over the nugget.
_STIFF = 1e8


@dataclasses.dataclass(frozen=True)
class _RingRule(Rule):
    """Base class of the families: their parameters are means and positive diagonals.

    Args:
        scale: initial standard deviation, relative to the prior; by default 1e-2 for inner layers, else 1.

    Raises:
        ValueError: a scale that is not positive, or a site that does not hold the values of a ``dgp.Grid``.
    """

    diagonals: ClassVar[tuple[str, ...]]  # of RingBelief; the first starts at the scale, the others at one
    powers: ClassVar[tuple[float, float]] = (0.5, 0.5)  # p, q of R

    scale: float | None = scale()

    __repr__ = brief

    def __call__(self, site: SiteContext) -> dist.Distribution:
        require_site(RingPrior, self, site, "the values of a layer on a dgp.Grid")
        prior: Any = site.fn
        if self.powers == (0.5, 0.5) and "outer" in self.diagonals:
            _warn_if_stiff(type(self).__name__, site.name, prior)
        shape, dtype = prior.event_shape, prior.dtype
        loc = site.param("loc", lambda: jnp.zeros(shape, dtype))

        def start(name: str) -> Array:
            first = initial_scale(self.scale, site)
            return jnp.full(shape, first if name == self.diagonals[0] else 1.0, dtype)

        found = {n: site.param(n, partial(start, n), constraint=constraints.positive) for n in self.diagonals}
        return RingBelief(prior, loc, **found, powers=self.powers)


def _warn_if_stiff(rule: str, name: str, prior: Any) -> None:
    r"""Warn of a nearly singular prior, under which first-order optimisers do not move scales on the grid.

    The divergence has :math:`\tfrac12 \mathrm{tr}(C^{-1} \Gamma C \Gamma)`: scales of neighbours that differ cost up to
    the condition number of C.
    """
    spectrum = prior.spectrum
    if violated(lambda s: s.max(-1) <= _STIFF * s.min(-1), spectrum):
        worst = float((np.asarray(spectrum).max(-1) / np.asarray(spectrum).min(-1)).max())
        warnings.warn(
            f"rule {rule}: the values of {name!r} on its dgp.Grid have a prior covariance of condition {worst:.0e}, so "
            "that the bound is stiff in scales on the grid, and optimisers like Adam end far from its optimum: leave "
            "dgp.Grid(..., nugget=) at its default, take fewer grid points per lengthscale, or another rule: "
            "Circulant(), WhitenedSites(), Full()",
            stacklevel=2,
        )


class Circulant(_RingRule):
    r"""A stationary posterior: the values on the grid have the covariance :math:`\mathrm{circ}(g^2 \lambda)`.

    It suits data that cover the ring evenly: its variance is the same everywhere. Under a Gaussian likelihood the
    optimum has a closed form, ``dgp.rings.optimal_gain``.

    Raises:
        ValueError: a scale that is not positive, or a site that does not hold the values of a ``dgp.Grid``.

    Example:
        >>> import numpyro_dgp as dgp
        >>> model = lambda: dgp.gp("f", dgp.kernels.RBF(), dgp.Grid(0.0, 2.0, 16))
        >>> guide = dgp.guides.InducingPoint(model, inducing=dgp.guides.Circulant())
        >>> dgp.testing.parameter_shapes(guide)
        {'f_auto_loc': (16,), 'f_auto_gain': (16,)}

    Source: Tebbutt (2016), section 3.3.
    """

    diagonals = ("gain",)  # R = diag(g)


class ScaledPrior(_RingRule):
    r"""The prior, scaled at every grid point: :math:`\Gamma C \Gamma`.

    Under a Gaussian likelihood the bound is concave in :math:`\Gamma`.

    Raises:
        ValueError: a scale that is not positive, or a site that does not hold the values of a ``dgp.Grid``.

    Example:
        >>> import numpyro_dgp as dgp
        >>> model = lambda: dgp.gp("f", dgp.kernels.RBF(), dgp.Grid(0.0, 2.0, 16))
        >>> guide = dgp.guides.InducingPoint(model, inducing=dgp.guides.ScaledPrior())
        >>> dgp.testing.parameter_shapes(guide)
        {'f_auto_loc': (16,), 'f_auto_outer': (16,)}

    Source: Tebbutt (2016), section 3.4.
    """

    diagonals = ("outer",)  # R = Lambda^-1/2 H Gamma H Lambda^1/2


class ScaledCirculant(_RingRule):
    r"""A scaled circulant, :math:`\Gamma\, \mathrm{circ}(g^2 \lambda)\, \Gamma`.

    The family contains :class:`Circulant` and :class:`ScaledPrior`.

    Raises:
        ValueError: a scale that is not positive, or a site that does not hold the values of a ``dgp.Grid``.

    Example:
        >>> import numpyro_dgp as dgp
        >>> model = lambda: dgp.gp("f", dgp.kernels.RBF(), dgp.Grid(0.0, 2.0, 16))
        >>> guide = dgp.guides.InducingPoint(model, inducing=dgp.guides.ScaledCirculant())
        >>> dgp.testing.parameter_shapes(guide)
        {'f_auto_loc': (16,), 'f_auto_gain': (16,), 'f_auto_outer': (16,)}

    Source: Tebbutt (2016), section 3.5.
    """

    diagonals = ("gain", "outer")  # R = Lambda^-1/2 H Gamma H diag(g) Lambda^1/2


class ScaledProduct(_RingRule):
    r"""The product :math:`\Gamma_2 C_2 \Gamma_1 C \Gamma_1 C_2 \Gamma_2` with all three fitted; its divergence costs
    O(M^2 log M), exactly.

    Raises:
        ValueError: a scale that is not positive, or a site that does not hold the values of a ``dgp.Grid``.

    Example:
        >>> import numpyro_dgp as dgp
        >>> model = lambda: dgp.gp("f", dgp.kernels.RBF(), dgp.Grid(0.0, 2.0, 16))
        >>> guide = dgp.guides.InducingPoint(model, inducing=dgp.guides.ScaledProduct())
        >>> dgp.testing.parameter_shapes(guide)
        {'f_auto_loc': (16,), 'f_auto_gain': (16,), 'f_auto_outer': (16,), 'f_auto_inner': (16,)}

    Source: Tebbutt (2016), equation 3.41, where the divergence is left to Monte Carlo.
    """

    diagonals = ("gain", "outer", "inner")  # R = Lambda^-1/2 H Gamma_2 H diag(g) H Gamma_1 H Lambda^1/2


class WhitenedSites(_RingRule):
    r"""Independent values at the grid points after whitening by :math:`C^{1/2}`: :math:`C^{1/2} \Gamma^2 C^{1/2}`.

    It suits data with gaps. On a ring the rule ``Diagonal()`` makes the whitened *frequencies* independent instead.

    Raises:
        ValueError: a scale that is not positive, or a site that does not hold the values of a ``dgp.Grid``.

    Example:
        >>> import numpyro_dgp as dgp
        >>> model = lambda: dgp.gp("f", dgp.kernels.RBF(), dgp.Grid(0.0, 2.0, 16))
        >>> guide = dgp.guides.InducingPoint(model, inducing=dgp.guides.WhitenedSites())
        >>> dgp.testing.parameter_shapes(guide)
        {'f_auto_loc': (16,), 'f_auto_outer': (16,)}
    """

    diagonals = ("outer",)  # R = H Gamma H
    powers = (0.0, 0.0)
