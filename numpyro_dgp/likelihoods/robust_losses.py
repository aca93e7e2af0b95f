r"""Losses under which outliers have little influence, and their expectations under Gaussian function values.

Generalised Bayesian inference replaces :math:`\log p(y \mid v)` by another score. With
:math:`N = N(y; \alpha v + \beta_0, \tau^2)` and :math:`v \sim N(\mu, \sigma^2)` all follows from one expectation: for
:math:`c > 0`,

.. math:: \log E[N^c] = -\tfrac c2 \log 2\pi\tau^2 - \tfrac12 \log\Bigl(1 + \frac{c\, \alpha^2\sigma^2}{\tau^2}\Bigr)
          - \frac{c\, (y - \alpha\mu - \beta_0)^2}{2 (\tau^2 + c\, \alpha^2\sigma^2)} .
"""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp

from numpyro_dgp._checks import expect
from numpyro_dgp._fields import Checked, number
from numpyro_dgp._repr import brief
from numpyro_dgp._typing import Array, ArrayLike
from numpyro_dgp.likelihoods.integrals import Case, Integral, Integrand

__all__ = ["Robust", "log_power"]


def log_power(z: Array, scale: Array, ratio: ArrayLike, c: float) -> Array:
    r"""The logarithm of the expected power c of a normal density.

    Args:
        z: :math:`(y - \alpha\mu - \beta_0) / \tau`.
        scale: :math:`\tau`.
        ratio: :math:`\alpha^2 \sigma^2 / \tau^2`.
        c: the power.

    Example:
        >>> import jax.numpy as jnp
        >>> print(log_power(jnp.zeros(1), jnp.ones(1), 0.0, 2.0).round())  # 2 log N(0; 0, 1)
        [-2.]
    """
    wider = 1 + c * ratio
    return -c * (0.5 * math.log(2 * math.pi) + jnp.log(scale)) - 0.5 * jnp.log(wider) - 0.5 * c * jnp.square(z) / wider


@dataclasses.dataclass(frozen=True)
class Robust(Checked):
    r"""A robust loss in place of the log density of a normal y, ``dgp.Likelihood(f(X), ..., integrate=Robust(...))``.

    One of the two scores below replaces :math:`\log p(y \mid v)` in ``log_prob``, and so in ``dgp.ELBO()``:

    .. math:: \ell_\beta = \frac{p(y \mid v)^{\beta - 1} - 1}{\beta - 1}
              - \frac{\int p(t \mid v)^\beta\, dt - 1}{\beta}, \qquad
              \ell_\gamma = \frac{\gamma}{\gamma - 1} \Bigl(
              \frac{p(y \mid v)^{\gamma - 1}}{(\int p(t \mid v)^\gamma\, dt)^{(\gamma - 1)/\gamma}} - 1 \Bigr).

    Both approach :math:`\log p(y \mid v)` as β or γ go to one. Above one they are bounded from below, so that an
    observation far away has no influence: 1.1 changes little, 1.5 ignores what is three or four scales away. The
    expectation over v has a closed form. Both depend on the unit of y: standardise it. Start the scale at that of good
    rows: a large one takes outliers for noise, and a fit can stay there.

    The objective is **no bound of the evidence**. The optimal q is close to a generalised posterior, proportional to
    the prior times :math:`e^{\sum_n \ell}`, and values of the objective can be compared for one β or γ only.
    ``Collapsed``, importance weighting and ``diagnostics.evidence`` raise an error, and ``dgp.for_mcmc`` integrates no
    layer. Predictions, samples and ``log_marginal`` are those of ``conditional``, without outliers.

    Args:
        beta: of the β-divergence, or density power divergence; greater than one.
        gamma: of the γ-divergence; greater than one. Exactly one of the two is given.

    Raises:
        ValueError: neither or both of them, or one of at most one; in a ``Likelihood``, a conditional that is not
            ``Normal(a * v + b, scale)`` of one function, or ``collapse="marginal"``.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro.distributions as dist
        >>> import numpyro_dgp as dgp
        >>> from numpyro_dgp.functions.function_values import FunctionValues
        >>> f_x = FunctionValues(jnp.zeros(3), jnp.full(3, 0.1), event_dim=0)
        >>> y = jnp.array([0.0, 3.0, 30.0])
        >>> for rule in (None, dgp.likelihoods.Robust(beta=1.5), dgp.likelihoods.Robust(gamma=1.5)):
        ...     score = dgp.Likelihood(f_x, lambda v: dist.Normal(v, 1.0), integrate=rule).log_prob(y)
        ...     print([f"{s:.2f}" for s in score])
        ['-0.97', '-5.47', '-450.97']
        ['-0.44', '-1.53', '-1.68']
        ['-0.69', '-2.73', '-3.00']

    Source: Basu et al. (1998) for β; Fujisawa and Eguchi (2008) for γ; Knoblauch et al. (2022) for both in variational
    inference and deep Gaussian processes; Salimbeni (2020), chapter "Impact".
    """

    beta: float | None = number(None)
    gamma: float | None = number(None)

    __repr__ = brief

    def __post_init__(self) -> None:
        super().__post_init__()
        given = [value for value in (self.beta, self.gamma) if value is not None]
        expect(
            len(given) == 1 and given[0] > 1,
            "one of beta and gamma, greater than one",
            f"beta={self.beta}, gamma={self.gamma}",
            "Robust(beta=1.2)",
        )

    def __call__(self, case: Case) -> Integral:
        """The expected score of every entry of y; all other quantities are those of the conditional."""
        moments = case.closed.normal
        expect(
            moments is not None,
            "dist.Normal(a * v + b, scale) of one function under integrate=Robust",
            f"a {type(case.reading.example).__name__}, or one that depends on v otherwise",
            "leave integrate out; dist.StudentT(4.0, v, scale) is robust by itself",
        )
        assert moments is not None

        def expected_score(of: Integrand, y: Array, loc: Array, variance: Array) -> Array:
            mean, slope, scale = moments(loc)
            return of.total(self._score((y - mean) / scale, scale, jnp.square(slope / scale) * variance))

        return Integral(lambda _: f"{self!r}, no bound of the evidence", expected_score, exact=True, loss=True)

    def _score(self, z: Array, scale: Array, ratio: Array) -> Array:
        power = self.beta or self.gamma
        assert power is not None
        c = power - 1
        log_p = log_power(z, scale, ratio, c)
        # log int N^power dt, which does not depend on v
        log_total = -c * (0.5 * math.log(2 * math.pi) + jnp.log(scale)) - 0.5 * math.log(power)
        if self.gamma is None:
            return jnp.expm1(log_p) / c - jnp.expm1(log_total) / power
        return power * jnp.expm1(log_p - c / power * log_total) / c
