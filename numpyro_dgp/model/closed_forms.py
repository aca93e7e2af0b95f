r"""Expectations of log densities under Gaussians that have a closed form.

With :math:`v \sim N(m, s^2)`:

- ``Normal(a v + b, c)``: :math:`\log N(y; am + b, c^2) - \tfrac12 a^2 s^2 / c^2`;
- a rate :math:`r = e^{av+b}` of ``Poisson``, ``Exponential`` or ``Gamma``: :math:`E[\log r] = am + b` and
  :math:`E[r] = e^{am + b + a^2 s^2/2}`.

The slope a and offset b are never asked for: they come from one forward-mode derivative at m.
Source: Salimbeni (2020), section 1.2.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax.scipy.special import gammaln

from numpyro_dgp._typing import Array
from numpyro_dgp.algebra.dependence import Dependence, dependence

__all__ = ["ClosedForm", "closed_form", "normal_form"]

# Maps (y, mean, variance) to an expectation, elementwise.
ClosedForm = Callable[[Array, Array, Array], Array]
Conditional = Callable[[Array], dist.Distribution]

_AFFINE, _LOG_AFFINE = (Dependence.CONSTANT, Dependence.AFFINE), (Dependence.CONSTANT, Dependence.LOG_AFFINE)


def _matches(conditional: Conditional, v: Array, **allowed: tuple[Dependence, ...]) -> bool:
    found = dependence(lambda u: [getattr(conditional(u), name) for name in allowed], v)
    return all(kind in kinds for kind, kinds in zip(found, allowed.values(), strict=True))


def _with_slope(function: Callable[[Array], Array], loc: Array) -> tuple[Array, Array]:
    return jax.jvp(function, (loc,), (jnp.ones_like(loc),))


def closed_form(conditional: Conditional, v: Array) -> tuple[ClosedForm | None, ClosedForm | None]:
    r"""Closed forms of :math:`E[\log p(y \mid v)]` and :math:`\log E[p(y \mid v)]`, each ``None`` if unknown.

    Args:
        conditional: from v to a distribution with the shape of v and no event dimensions.
        v: an example argument.
    """
    example = conditional(v)
    if _is_normal(conditional, v):
        return _normal(conditional)
    constant = (Dependence.CONSTANT,)
    if isinstance(example, dist.Poisson) and _matches(conditional, v, rate=_LOG_AFFINE):
        return _rate(conditional, lambda d, y, r, log_r: y * log_r - r - gammaln(y + 1)), None
    if isinstance(example, dist.Exponential) and _matches(conditional, v, rate=_LOG_AFFINE):
        return _rate(conditional, lambda d, y, r, log_r: log_r - y * r), None
    if isinstance(example, dist.Gamma) and _matches(conditional, v, concentration=constant, rate=_LOG_AFFINE):
        return _rate(conditional, _gamma), None
    return None, None


def _is_normal(conditional: Conditional, v: Array) -> bool:
    normal = isinstance(conditional(v), dist.Normal)
    return normal and _matches(conditional, v, loc=_AFFINE, scale=(Dependence.CONSTANT,))


def normal_form(conditional: Conditional, v: Array) -> tuple[Array, Array, Array] | None:
    """Slope a, offset b and scale c where the conditional is ``Normal(a v + b, c)``; else ``None``.

    They broadcast against v; the slope of ``Normal(v, c)`` is a single one.
    """
    if not _is_normal(conditional, v):
        return None
    example = conditional(v)
    if example.loc is v:
        return jnp.ones((), v.dtype), jnp.zeros((), v.dtype), example.scale
    offset, slope = _with_slope(lambda u: conditional(u).loc, jnp.zeros_like(v))
    return slope, offset, example.scale


def _gamma(d: dist.Distribution, y: Array, r: Array, log_r: Array) -> Array:
    a = d.concentration
    return a * log_r + (a - 1) * jnp.log(y) - y * r - gammaln(a)


def _normal(conditional: Conditional) -> tuple[ClosedForm, ClosedForm]:
    def moments(loc: Array) -> tuple[Array, Array, Array]:
        mean, slope = _with_slope(lambda v: conditional(v).loc, loc)
        return mean, slope, conditional(loc).scale

    def expected_log_prob(y: Array, loc: Array, variance: Array) -> Array:
        mean, slope, scale = moments(loc)
        penalty = 0.5 * jnp.square(slope / scale) * variance
        return dist.Normal(mean, scale, validate_args=False).log_prob(y) - penalty

    def log_marginal(y: Array, loc: Array, variance: Array) -> Array:
        mean, slope, scale = moments(loc)
        total = jnp.sqrt(jnp.square(scale) + jnp.square(slope) * variance)
        return dist.Normal(mean, total, validate_args=False).log_prob(y)

    return expected_log_prob, log_marginal


def _rate(conditional: Conditional, expected: Callable[[dist.Distribution, Array, Array, Array], Array]) -> ClosedForm:
    def expected_log_prob(y: Array, loc: Array, variance: Array) -> Array:
        rate, derivative = _with_slope(lambda v: conditional(v).rate, loc)
        slope = derivative / rate
        mean_rate = rate * jnp.exp(0.5 * jnp.square(slope) * variance)
        return expected(conditional(loc), y, mean_rate, jnp.log(rate))

    return expected_log_prob
