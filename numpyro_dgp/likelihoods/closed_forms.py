r"""Expectations of log densities under Gaussians that have a closed form.

With function values :math:`v \sim N(\mu, \sigma^2)`, a slope :math:`\alpha` and an offset :math:`\beta`:

- a normal y of mean :math:`\alpha v + \beta` and scale :math:`\tau`:
  :math:`\log N(y; \alpha\mu + \beta, \tau^2) - \tfrac12 \alpha^2 \sigma^2 / \tau^2`;
- a rate :math:`e^{\alpha v + \beta}` of ``Poisson``, ``Exponential`` or ``Gamma``:
  :math:`E[\log \mathrm{rate}] = \alpha\mu + \beta` and
  :math:`E[\mathrm{rate}] = e^{\alpha\mu + \beta + \alpha^2 \sigma^2/2}`;
- a time t with the cumulative hazard :math:`e^{\alpha v + \beta} t^k`, of ``Weibull`` and of right-censored
  ``Exponential`` and ``Weibull``: the log hazard, if the time was observed, less the cumulative hazard, likewise;
- a Laplace y of location :math:`\alpha v + \beta`: that of its distance to y, with
  :math:`E|z| = \tau \sqrt{2/\pi}\, e^{-\delta^2/2\tau^2} + \delta\, \mathrm{erf}(\delta / \tau\sqrt2)` for
  :math:`z \sim N(\delta, \tau^2)`;
- an angle y of ``VonMises`` around :math:`\alpha v + \beta`:
  :math:`E[\cos(y - \alpha v - \beta)] = e^{-\alpha^2 \sigma^2/2} \cos(y - \alpha\mu - \beta)`.

The user does not pass the slope and the offset: they come from one forward-mode derivative at :math:`\mu`.
Source: Salimbeni (2020), section 1.2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax.scipy.special import erf, gammaln, i0e, xlogy

from numpyro_dgp._typing import Array
from numpyro_dgp.jaxprs.dependence import Dependence
from numpyro_dgp.likelihoods.families import is_family
from numpyro_dgp.math.linalg import safe_sqrt

__all__ = ["ClosedForm", "ClosedForms", "closed_forms", "normal_bound", "normal_density", "normal_form", "with_slope"]

# Maps (y, mean, variance) to an expectation, elementwise.
ClosedForm = Callable[[Array, Array, Array], Array]
Conditional = Callable[[Array], Any]

_CONSTANT = (Dependence.CONSTANT,)
_AFFINE, _LOG_AFFINE = (*_CONSTANT, Dependence.AFFINE), (*_CONSTANT, Dependence.LOG_AFFINE)


_POINTED = dist.StudentT, dist.Cauchy, dist.Logistic, dist.SoftLaplace, dist.AsymmetricLaplace
_LOCATED = {"loc": _AFFINE, "scale": _CONSTANT}
_NODES = 48
_REACH, _PLACED, _LEAST_ASIDE = 5.5, 3.0, 0.3
"""In standard deviations of v: where nodes end, how far out they gather, and around what is further out to how much."""


class ClosedForms(NamedTuple):
    r"""The closed forms of a conditional, ``None`` where there is none, and nodes around its location.

    Args:
        expected_log_prob: :math:`E[\log p(y \mid v)]`, from (y, mean, variance), elementwise.
        log_marginal: :math:`\log E[p(y \mid v)]`, likewise.
        normal: of ``Normal(slope * v + offset, scale)``, from v to its mean, its slope and its scale.
        around_location: the expected log density over nodes around the v whose location is y, where a log density
            has a point or a steep valley there.
    """

    expected_log_prob: ClosedForm | None = None
    log_marginal: ClosedForm | None = None
    normal: Callable[[Array], tuple[Array, Array, Array]] | None = None
    around_location: ClosedForm | None = None


class Form(NamedTuple):
    """A family of distributions whose expectations have a closed form: a row of ``FORMS``.

    Args:
        family: a class of distributions.
        parameters: how its parameters may depend on v, by name.
        forms: from the conditional to its closed forms.
        censored: whether y is censored from the right, a ``RightCensoredDistribution`` of the family.

    Example:
        >>> import numpyro.distributions as dist
        >>> from numpyro_dgp.extend import ClosedForms, Dependence, Form
        >>> row = Form(dist.Poisson, {"rate": (Dependence.LOG_AFFINE,)}, lambda conditional: ClosedForms())
        >>> row.fits(dist.Poisson(1.0), {"rate": Dependence.LOG_AFFINE}), row.fits(dist.Poisson(1.0), {})
        (True, False)
    """

    family: type
    parameters: Mapping[str, tuple[Dependence, ...]]
    forms: Callable[[Conditional], ClosedForms]
    censored: bool = False

    def fits(self, example: Any, kinds: Mapping[str, Dependence]) -> bool:
        """Whether it is the row of a distribution of one entry of y."""
        methods: tuple[str, ...] = ("log_prob",)
        if self.censored:
            if not is_family(example, dist.RightCensoredDistribution) or kinds.get("censored") not in _CONSTANT:
                return False
            example, methods = example.base_dist, ("log_prob", "cdf")
        depends = all(kinds.get(name) in among for name, among in self.parameters.items())
        return depends and is_family(example, self.family, methods=methods)


def closed_forms(
    conditional: Conditional, example: dist.Distribution, kinds: Mapping[str, Dependence], rows: Sequence[Form] = ()
) -> ClosedForms:
    """The closed forms of a conditional; each calls it once.

    Args:
        conditional: from v to a distribution with the shape of v and no event dimensions.
        example: one such distribution.
        kinds: how its parameters depend on v, by name.
        rows: looked up before those of this package.

    Example:
        >>> conditional = lambda v: dist.Poisson(jnp.exp(v))
        >>> forms = closed_forms(conditional, conditional(jnp.zeros(1)), {"rate": Dependence.LOG_AFFINE})
        >>> print(forms.expected_log_prob(jnp.zeros(1), jnp.zeros(1), jnp.ones(1)).round(3))  # -exp(1/2)
        [-1.649]
    """

    return next((row.forms(conditional) for row in (*rows, *FORMS) if row.fits(example, kinds)), ClosedForms())


def normal_form(conditional: Conditional, v: Array) -> tuple[Array, Array, Array]:
    """Slope, offset and scale of a conditional that is ``Normal(slope * v + offset, scale)``.

    They broadcast against v; the slope of ``Normal(v, scale)`` is a single one.
    """
    example = conditional(v)
    if example.loc is v:
        return jnp.ones((), v.dtype), jnp.zeros((), v.dtype), example.scale
    offset, slope, _ = with_slope(conditional, jnp.zeros_like(v), "loc")
    return slope, offset, example.scale


def with_slope(conditional: Conditional, v: Array, name: str, *others: str) -> tuple[Array, Array, list[Array]]:
    """A parameter at v, its elementwise derivative, and other parameters, in one call."""

    def parameters(v: Array) -> tuple[Array, list[Array]]:
        d = conditional(v)
        return getattr(d, name), [getattr(d, other) for other in others]

    return jax.jvp(parameters, (v,), (jnp.ones_like(v),), has_aux=True)


def _expected(form: Callable[..., Array]) -> Callable[[Conditional], ClosedForms]:
    """The expected log density alone, as a function of the conditional and its own arguments."""
    return lambda conditional: ClosedForms(partial(form, conditional))


def _around(conditional: Conditional) -> ClosedForms:
    return ClosedForms(around_location=partial(_around_location, conditional))


def _poisson(y: Array, r: Array, log_r: Array) -> Array:
    return jnp.where(y > 0, y * log_r, 0) - r - gammaln(y + 1)  # y E[log r] - E[r] - log y!


def _exponential(y: Array, r: Array, log_r: Array) -> Array:
    return log_r - y * r  # E[log r] - y E[r]


def _gamma(y: Array, r: Array, log_r: Array, a: Array) -> Array:
    return a * log_r + (a - 1) * jnp.log(y) - y * r - gammaln(a)  # a E[log r] + (a - 1) log y - y E[r] - log Gamma(a)


def normal_bound(y: Array, mean: Array, scale: Array, ratio: Array) -> Array:
    """The expected log density of y with a random mean, whose variance is ``ratio`` times that of the noise."""
    # E log N(y; m, s^2) = log N(y; E m, s^2) - var m / (2 s^2)
    return dist.Normal(mean, scale, validate_args=False).log_prob(y) - 0.5 * ratio


def normal_density(y: Array, mean: Array, variance: Array) -> Array:
    """The log density of y by its mean and variance."""
    return dist.Normal(mean, jnp.sqrt(variance), validate_args=False).log_prob(y)


def _normal_forms(conditional: Conditional) -> ClosedForms:
    """Those of ``Normal(slope * v + offset, scale)``."""

    def moments(v: Array) -> tuple[Array, Array, Array]:
        mean, slope, (scale,) = with_slope(conditional, v, "loc", "scale")
        return mean, slope, scale

    def expected_log_prob(y: Array, loc: Array, variance: Array) -> Array:
        mean, slope, scale = moments(loc)
        return normal_bound(y, mean, scale, jnp.square(slope / scale) * variance)  # ratio alpha^2 sigma^2 / tau^2

    def log_marginal(y: Array, loc: Array, variance: Array) -> Array:
        mean, slope, scale = moments(loc)
        # variance tau^2 + alpha^2 sigma^2
        return normal_density(y, mean, jnp.square(scale) + jnp.square(slope) * variance)

    return ClosedForms(expected_log_prob, log_marginal, moments)


def _log_normal(conditional: Conditional) -> ClosedForms:
    def of_times(form: ClosedForm | None) -> ClosedForm | None:
        return None if form is None else partial(_of_logarithm, form)

    of_logarithms = _normal_forms(conditional)
    return ClosedForms(of_times(of_logarithms.expected_log_prob), of_times(of_logarithms.log_marginal))


def _safe_log(x: Array) -> Array:
    """The logarithm, of the smallest normal number where x is not positive: its derivative there is zero."""
    return jnp.log(jnp.where(x > 0, x, jnp.finfo(jnp.result_type(x, float)).tiny))


def _of_logarithm(form: ClosedForm, y: Array, loc: Array, variance: Array) -> Array:
    log_y = _safe_log(y)
    return jnp.where(y > 0, form(log_y, loc, variance) - log_y, -jnp.inf)  # log p(log y) - log y, a change of variables


def _von_mises(conditional: Conditional, y: Array, loc: Array, variance: Array) -> Array:
    mean, slope, (kappa,) = with_slope(conditional, loc, "loc", "concentration")
    cosine = jnp.exp(-0.5 * jnp.square(slope) * variance) * jnp.cos(y - mean)  # E cos(y - alpha v - beta)
    # kappa E cos - log(2 pi I_0(kappa)), with i0e = e^-kappa I_0, which does not overflow.
    return kappa * (cosine - 1) - jnp.log(2 * jnp.pi * i0e(kappa))


def _laplace(conditional: Conditional, y: Array, loc: Array, variance: Array) -> Array:
    mean, slope, (scale,) = with_slope(conditional, loc, "loc", "scale")
    # z = y - alpha v - beta ~ N(delta, sd^2), with sd kept from zero, where E|z| = |delta|.
    sd = jnp.maximum(jnp.abs(slope) * safe_sqrt(variance), 1e-10 * scale)
    z = jnp.clip((y - mean) / sd, -40, 40)
    # E|z| = sd sqrt(2 / pi) e^(-delta^2 / 2 sd^2) + delta erf(delta / sd sqrt 2)
    distance = sd * math.sqrt(2 / math.pi) * jnp.exp(-0.5 * jnp.square(z)) + (y - mean) * erf(z / math.sqrt(2))
    return -distance / scale - jnp.log(2 * scale)


def _around_location(conditional: Conditional, y: Array, loc: Array, variance: Array) -> Array:
    """By the trapezoidal rule in u, with z = c + w sinh u: c is where the location is y, w the scale there."""
    if jnp.ndim(y) > jnp.ndim(loc):  # several y of one v
        return jax.vmap(lambda one: _around_location(conditional, one, loc, variance))(y)
    sd = safe_sqrt(variance)
    mean, slope, (scale,) = with_slope(conditional, loc, "loc", "scale")
    location_sd = jnp.abs(slope * sd) + 1e-30
    z = (y - mean) / jnp.where(slope < 0, -location_sd, location_sd)  # where alpha v + beta = y, v = mu + sigma z
    width = jnp.clip(scale / location_sd, jnp.where(jnp.abs(z) > _PLACED, _LEAST_ASIDE, 1e-4), 1e3)
    centre, width = jax.lax.stop_gradient((jnp.clip(z, -_PLACED, _PLACED), width))
    low, high = jnp.arcsinh((-_REACH - centre) / width), jnp.arcsinh((_REACH - centre) / width)
    u = low + (high - low) * jnp.linspace(0, 1, _NODES, dtype=low.dtype).reshape(-1, *(1,) * low.ndim)
    e = jnp.exp(u)
    points = centre + width * 0.5 * (e - 1 / e)  # z = c + w sinh u
    weights = jnp.exp(-0.5 * jnp.square(points)) * (e + 1 / e)  # N(z) dz/du, up to a factor
    values = jax.vmap(lambda v: conditional(v).log_prob(y))(loc + sd * points)
    return (weights * values).sum(0) / weights.sum(0)


class _Hazard(NamedTuple):
    """Of times with the cumulative hazard rate * t**power."""

    log_rate: Array
    power: Array | float
    censored: Array | bool


def _hazard(d: Any) -> _Hazard:
    base, censored = (d.base_dist, d.censored) if isinstance(d, dist.RightCensoredDistribution) else (d, False)
    if isinstance(base, dist.Exponential):
        return _Hazard(jnp.log(base.rate), 1.0, censored)
    return _Hazard(-base.concentration * jnp.log(base.scale), base.concentration, censored)  # H(t) = (t / scale)^k


def _times(conditional: Conditional, y: Array, loc: Array, variance: Array) -> Array:
    found = with_slope(lambda v: _hazard(conditional(v)), loc, "log_rate", "power", "censored")
    log_rate, slope, (power, censored) = found
    log_y = _safe_log(y)
    # E[H(y)] = e^(alpha mu + beta + alpha^2 sigma^2 / 2) y^k
    cumulative = jnp.where(y > 0, jnp.exp(log_rate + 0.5 * jnp.square(slope) * variance + power * log_y), 0)
    # E[log h(y)] = alpha mu + beta + log k + (k - 1) log y
    log_hazard = log_rate + jnp.log(power) + xlogy(power - 1, jnp.where(censored, 1, y))
    # log p = log h - H; a censored time is known to be later, log P(T > y) = -H.
    return jnp.where(y < 0, -jnp.inf, jnp.where(censored, 0, log_hazard) - cumulative)


def _rate(conditional: Conditional, expected: Callable[..., Array], other: str | None = None) -> ClosedForms:
    others = () if other is None else (other,)

    def expected_log_prob(y: Array, loc: Array, variance: Array) -> Array:
        rate, derivative, constants = with_slope(conditional, loc, "rate", *others)
        # alpha = (d rate / dv) / rate
        slope = derivative / jnp.where(rate > 0, rate, jnp.inf)  # it is zero where nothing was exposed
        # E[rate] = e^(alpha mu + beta + alpha^2 sigma^2 / 2)
        mean_rate = rate * jnp.exp(0.5 * jnp.square(slope) * variance)
        log_rate = jnp.where(rate > 0, _safe_log(rate), -jnp.inf)
        # As the distributions themselves: nothing else in a compiled step detects a y out of range.
        return jnp.where(y < 0, -jnp.inf, expected(y, mean_rate, log_rate, *constants))

    return ClosedForms(expected_log_prob)


FORMS: tuple[Form, ...] = (
    Form(dist.Normal, _LOCATED, _normal_forms),
    Form(dist.LogNormal, _LOCATED, _log_normal),
    Form(dist.Poisson, {"rate": _LOG_AFFINE}, partial(_rate, expected=_poisson)),
    Form(dist.Exponential, {"rate": _LOG_AFFINE}, partial(_rate, expected=_exponential)),
    Form(
        dist.Gamma,
        {"concentration": _CONSTANT, "rate": _LOG_AFFINE},
        partial(_rate, expected=_gamma, other="concentration"),
    ),
    Form(dist.VonMises, {"loc": _AFFINE, "concentration": _CONSTANT}, _expected(_von_mises)),
    Form(dist.Laplace, _LOCATED, _expected(_laplace)),
    *(Form(family, _LOCATED, _around) for family in _POINTED),
    *(
        Form(dist.Weibull, {"concentration": _CONSTANT, "scale": _LOG_AFFINE}, _expected(_times), c)
        for c in (False, True)
    ),
    Form(dist.Exponential, {"rate": _LOG_AFFINE}, _expected(_times), censored=True),
)
"""The families with closed forms. A further one is a row here, or an argument, ``dgp.Likelihood(integrate=row)``."""
