r"""Predictive densities: mixtures, the kernel density estimate of published tables, a test of normality.

The prediction of a program is a mixture of densities in closed form, one per draw. A kernel density estimate from
samples of y is a biased estimate of that mixture; it is here to reproduce published numbers. Do not compare the one
with the other.

Distribution functions and quantiles of mixtures of Gaussians with equal weights, entry by entry.

.. math:: F(y) = \tfrac1S \sum_s \Phi\Big(\frac{y - \mu_s}{\sigma_s}\Big), \qquad F(y_q) = q

Mixtures of joint Gaussians, of values at several inputs together.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import logsumexp, ndtr, ndtri
from jax.scipy.stats import norm

from numpyro_dgp._checks import expect, expected, is_concrete, require_finite, require_key, require_levels
from numpyro_dgp._data import as_numbers
from numpyro_dgp._repr import brief, public_dir
from numpyro_dgp._typing import Array, ArrayLike
from numpyro_dgp.math.linalg import conditional_cholesky, einsum, matmul, safe_sqrt

__all__ = [
    "JointMixture",
    "Mixture",
    "MomentsOnly",
    "ShapiroWilk",
    "kde_log_density",
    "log_mean_exp",
    "shapiro_wilk",
]

_NARROW = 1e-12  # the standard deviation of a certain value, whose distribution function is a step
_FAR = 50.0  # standard deviations, beyond which a tail is zero in both precisions


@jax.jit
def mixture_cdf(means: Array, variances: Array, y: Array) -> Array:
    """The probability of at most y.

    Args:
        means: of the Gaussians (S, ...).
        variances: of them (S, ...); zero for a certain value.
        y: numbers that broadcast against (...,).

    Example:
        >>> print(mixture_cdf(jnp.array([-1.0, 1.0]), jnp.ones(2), jnp.array([-9.0, 0.0, 9.0])).round(3))
        [0.  0.5 1. ]
    """
    return _beyond(means, safe_sqrt(variances), y, 1)


def levels(q: ArrayLike) -> Any:
    """Levels in double precision where they are known, a NumPy array; traced ones below 1, to which some are rounded.

    Args:
        q: levels between 0 and 1, of any shape.

    Example:
        >>> bool(levels(1 - 1e-8) < 1)
        True
    """
    if is_concrete(q):
        return np.asarray(q, float)
    q = jnp.asarray(q)
    return jnp.where(q == 1, 1 - jnp.finfo(jnp.result_type(q, float)).epsneg, q)


@jax.jit
def mixture_quantiles(means: Array, variances: Array, tail: ArrayLike, upper: ArrayLike) -> Array:
    """The numbers beyond which there is the probability ``tail``. Their derivatives are those of the equation.

    The smaller tail has more digits: of the level q this is q up to a half, and 1 - q above.

    Args:
        means: of the Gaussians (S, ...).
        variances: of them (S, ...).
        tail: probabilities, of any shape; below the smallest normal number, that one.
        upper: whether they are those of larger numbers, of this shape too.

    Returns:
        Quantiles, (*tail.shape, ...).

    Example:
        >>> sides = jnp.array([False, True])
        >>> found = mixture_quantiles(jnp.array([-1.0, 1.0]), jnp.ones(2), jnp.array([0.1, 0.1]), sides)
        >>> print(f"{found[0]:.3f} {found[1]:.3f}")
        -1.849 1.849
    """
    dtype = jnp.result_type(means, variances, jnp.float32)
    means, scales = means.astype(dtype), safe_sqrt(variances.astype(dtype))
    tails, tiny = jnp.asarray(tail, dtype), jnp.finfo(dtype).tiny
    tails = jnp.where(jnp.abs(tails) < tiny, tiny, tails)
    sides = jnp.where(jnp.asarray(upper), -1, 1)
    found = jax.lax.map(lambda each: _quantile(means, scales, *each), (tails.ravel(), sides.ravel()))
    return found.reshape(*tails.shape, *means.shape[1:])


def _beyond(means: Array, scales: Array, y: Array, side: Array | int) -> Array:
    """The probability of less than y (``side`` 1), or of more (-1)."""

    def of_one(mean: Array, scale: Array) -> Array:
        away, certain = side * (y - mean), scale <= 0
        z = jnp.clip(away / jnp.where(certain, _NARROW, scale), -_FAR, _FAR)  # Φ is 0 or 1 beyond
        return jnp.where(certain, away >= 0, ndtr(z))

    return jax.vmap(of_one)(means, scales).mean(0)


def _quantile(means: Array, scales: Array, tail: Array, side: Array) -> Array:
    def excess(means: Array, scales: Array, y: Array) -> Array:
        return side * (_beyond(means, scales, y, side) - tail)  # increases in y, zero at the quantile

    fixed = jax.lax.stop_gradient((means, scales))
    y = jax.lax.stop_gradient(_root(partial(excess, *fixed), fixed, side * ndtri(tail)))
    # The theorem of implicit functions, in a term whose value is zero.
    step = -excess(means, scales, y) * _inverse(_density(*fixed, y))  # dy = -dF(y) / p(y)
    return y + step - jax.lax.stop_gradient(step)


def _density(means: Array, scales: Array, y: Array) -> Array:
    return jax.vmap(lambda mean, scale: norm.pdf(y, mean, scale))(means, scales).mean(0)


def _inverse(slope: Array) -> Array:
    return 1 / jnp.where(slope > jnp.finfo(slope.dtype).tiny, slope, jnp.inf)


def _root(excess: Callable[[Array], Array], gaussians: tuple[Array, Array], standard: Array) -> Array:
    """Newton's steps where they stay between the ends and get shorter, halves elsewhere; ``standard`` is the quantile
    of N(0, 1)."""
    of_each = gaussians[0] + gaussians[1] * standard  # mu_s + σ_s z_q, which enclose the quantile
    info = jnp.finfo(of_each.dtype)
    # Newton's error is squared by a step: one this short leaves rounding only.
    close = 0.1 * info.eps**0.5 * gaussians[1].min(0)

    def unfinished(state: tuple[Array, ...]) -> Array:
        _, low, high, _, step = state
        return (jnp.abs(step) > close) & (high - low > close)

    def some_unfinished(state: tuple[Array, ...]) -> Array:
        return (state[0] < info.nmant + 12) & unfinished(state).any()

    def halve_or_step(state: tuple[Array, ...]) -> tuple[Array, ...]:
        count, low, high, y, before = state
        above, going = excess(y), unfinished(state)
        low, high = jnp.where(going & (above < 0), y, low), jnp.where(going & (above >= 0), y, high)  # F increases
        slope = _inverse(_density(*gaussians, y))
        step = -above * slope
        newton = (slope > 0) & (y + step >= low) & (y + step <= high) & (jnp.abs(step) < 0.5 * jnp.abs(before))
        step = jnp.where(newton, step, low + 0.5 * (high - low) - y)
        return count + 1, low, high, jnp.where(going, y + step, y), jnp.where(going, step, 0)

    low, high = of_each.min(0), of_each.max(0)
    start: tuple[Array, ...] = jnp.zeros((), int), low, high, low + 0.5 * (high - low), high - low
    return jax.lax.while_loop(some_unfinished, halve_or_step, start)[3]


__dir__ = public_dir(globals())

# SciPy's p-values are accurate up to this many samples.
_SHAPIRO_LIMIT = 5000
# Test points whose distances to all draws are in memory at once.
_BLOCK = 500


class Mixture(NamedTuple):
    r"""A predictive mixture over S draws, by the moments of y given each draw.

    .. math:: p(y) = \tfrac1S \sum_s N(y; \mu_s, \sigma_s^2)

    with the means and variances of y given each draw, where y is Gaussian given each draw. Where it is not, they
    are moments and nothing more (:class:`MomentsOnly`).

    Args:
        means: of y given each draw (S, N, ...).
        variances: of y given each draw (S, N, ...), squared units of y.

    Raises:
        ValueError: by its methods, where means and variances are not of one shape.

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro_dgp.densities import Mixture
        >>> mixture = Mixture(means=jnp.array([[0.0], [2.0]]), variances=jnp.array([[1.0], [3.0]]))  # S = 2, N = 1
        >>> mixture
        Mixture(means=[[0], [2]], variances=[[1], [3]])
        >>> print(mixture.mean, mixture.variance)
        [1.] [3.]
        >>> print(mixture.interval(0.5).round(2).ravel(), mixture.cdf(1.0).round(2))
        [-0.25  2.08] [0.56]
    """

    means: Array
    variances: Array

    def __repr__(self) -> str:
        return brief(self)

    @property
    def mean(self) -> Array:
        """Mean of the mixture (N, ...)."""
        self._require_one_shape()
        return self.means.mean(0)

    @property
    def variance(self) -> Array:
        """Variance of the mixture (N, ...): mean of the variances plus variance of the means."""
        self._require_one_shape()
        return self.variances.mean(0) + self.means.var(0)  # E[σ_s^2] + Var[mu_s]

    def cdf(self, y: ArrayLike) -> Array:
        r"""The probability of at most y, entry by entry: :math:`\tfrac1S \sum_s \Phi((y - \mu_s) / \sigma_s)`.

        Args:
            y: numbers that broadcast against (N, ...), such as (G, N) for G numbers at each of N inputs.

        Returns:
            Probabilities, of the shape that y and (N, ...) have together.

        Raises:
            ValueError: moments of a y that is not Gaussian given each draw, or y that are no numbers.
        """
        self._require_gaussians("cdf")
        return mixture_cdf(*map(jnp.asarray, self), jnp.asarray(as_numbers("y", y)))

    def quantile(self, q: ArrayLike) -> Array:
        """The q-quantile of each entry of y, to rounding error.

        It lies between the smallest and the largest of the quantiles of the S Gaussians, where it is found by steps of
        Newton and bisection. Its derivatives with respect to means, variances and levels are exact. Known levels are
        taken in double precision, ``1 - 1e-8`` too; a traced one that is rounded to 1 is the number below it.

        Args:
            q: levels between 0 and 1, a number or an array.

        Returns:
            Quantiles (N, ...), for an array q behind the axes of q.

        Raises:
            ValueError: levels that are not between 0 and 1, or moments of a y that is not Gaussian given each draw.
        """
        self._require_gaussians("quantile")
        require_levels(q)
        below = levels(q)
        where, upper = np.where if is_concrete(below) else jnp.where, below > 0.5
        return mixture_quantiles(*map(jnp.asarray, self), where(upper, 1 - below, below), upper)

    def interval(self, level: float = 0.9) -> Array:
        """The central (equal-tailed) interval with probability ``level``.

        Args:
            level: between 0 and 1.

        Returns:
            Lower and upper ends (2, N, ...), as ``lower, upper = mixture.interval(0.9)``.

        Raises:
            ValueError: as :meth:`quantile`, or several levels.
        """
        require_levels(level)
        expect(not np.ndim(level), "one level", f"shape {np.shape(level)}", "mixture.quantile(q) takes several")
        self._require_gaussians("interval")
        tail = jnp.asarray(0.5 - 0.5 * levels(level))
        return mixture_quantiles(*map(jnp.asarray, self), jnp.stack([tail, tail]), jnp.array([False, True]))

    def _require_gaussians(self, method: str) -> None:
        self._require_one_shape()

    def _require_one_shape(self) -> None:
        shape = np.shape(self.means)
        expect(
            shape and shape == np.shape(self.variances),
            "means and variances of one shape (S, N, ...), draws along the first axis",
            f"{shape} and {np.shape(self.variances)}",
            "of a single Gaussian take means[None] and variances[None]",
        )


class MomentsOnly(Mixture):
    """A predictive mixture of distributions that are not Gaussian: mean and variance, but no quantiles.

    ``posterior.predict`` gives it where y is not Gaussian given each draw: counts, labels, Student-t.

    Args:
        means: of y given each draw (S, N, ...).
        variances: of y given each draw (S, N, ...), squared units of y.

    Raises:
        ValueError: by :meth:`cdf`, :meth:`quantile` and :meth:`interval`.

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro_dgp.densities import MomentsOnly
        >>> MomentsOnly(jnp.zeros((1, 1)), jnp.ones((1, 1))).quantile(0.9)
        Traceback (most recent call last):
        ValueError: Mixture.quantile: expected a y that is Gaussian given each draw, got only moments of ...
    """

    def _require_gaussians(self, method: str) -> None:
        raise expected(
            "a y that is Gaussian given each draw",
            "only moments of others",
            "use posterior.quantile(key, q, X), posterior.sample(key, X), or posterior.predict_function(key, X)",
            at=f"Mixture.{method}",
        )


def lower_factors(covariances: Array, means: Array) -> Array:
    """Lower factors of covariances (..., N, N) that rounding may have left singular, zero included.

    Variances below the rounding error of the ``means`` (..., N) count as that.
    """
    info = jnp.finfo(covariances.dtype)
    least = jnp.square(info.eps * jax.lax.stop_gradient(means)) + float(info.tiny / info.eps)
    C = covariances + least[..., None] * jnp.eye(covariances.shape[-1], dtype=covariances.dtype)
    return conditional_cholesky(C, jax.lax.stop_gradient(jnp.diagonal(C, axis1=-2, axis2=-1)))


class JointMixture(NamedTuple):
    r"""A mixture over S draws of Gaussians over the values of a function at N inputs together.

    .. math:: p(f) = \tfrac1S \sum_s N(f;\; \mu_s, C_s), \qquad
              E f = \bar\mu, \quad
              \operatorname{Cov} f = \tfrac1S \sum_s C_s + \tfrac1S \sum_s (\mu_s - \bar\mu)(\mu_s - \bar\mu)^\top

    ``posterior.predict_jointly`` gives it. Of a function with P outputs it has the covariances between inputs, output
    by output, and none between outputs.

    Args:
        means: given each draw (S, N), or (S, N, P).
        covariances: between inputs given each draw (S, N, N), or (S, P, N, N), squared units of f.
        prior_covariances: of the last function before any data, at the same inputs to it, of the same shape.

    Raises:
        ValueError: by :meth:`sample`, something else than a PRNG key.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from numpyro_dgp.densities import JointMixture
        >>> C = jnp.array([[[1.0, 0.5], [0.5, 1.0]]] * 2)
        >>> mixture = JointMixture(jnp.array([[0.0, 0.0], [2.0, 2.0]]), C, C)  # S = 2, N = 2
        >>> print(mixture.mean, mixture.covariance)
        [1. 1.] [[2.  1.5]
         [1.5 2. ]]
        >>> mixture.sample(jax.random.key(0)).shape
        (2, 2)
    """

    means: Array
    covariances: Array
    prior_covariances: Array

    def __repr__(self) -> str:
        return brief(self)

    @property
    def mean(self) -> Array:
        """Mean of the mixture (N,), or (N, P)."""
        return self.means.mean(0)

    @property
    def covariance(self) -> Array:
        """Covariance of the mixture (N, N), or (P, N, N): mean of the covariances plus covariance of the means."""
        apart = self.by_output - self.by_output.mean(0)
        return self.covariances.mean(0) + einsum("s...n,s...m->...nm", apart, apart) / len(apart)

    @property
    def by_output(self) -> Array:
        """Means with inputs last: (S, N), or (S, P, N)."""
        return self.means if self.means.ndim == 2 else self.means.mT

    @property
    def marginals(self) -> Mixture:
        """The same mixture input by input, without correlations, as :meth:`Posterior.predict_function` gives it."""
        variances = jnp.diagonal(self.covariances, axis1=-2, axis2=-1)
        return Mixture(self.means, variances if self.means.ndim == 2 else variances.mT)

    def factors(self) -> Array:
        """Lower factors of the covariances, (S, N, N) or (S, P, N, N)."""
        return lower_factors(self.covariances, self.by_output)

    def sample(self, key: Array) -> Array:
        """One draw of the values from every Gaussian, of the shape of ``means``.

        Args:
            key: PRNG key.
        """
        require_key(key)
        white = jax.random.normal(key, self.by_output.shape, self.means.dtype)
        draws = self.by_output + matmul(self.factors(), white[..., None])[..., 0]
        return draws if self.means.ndim == 2 else draws.mT


class ShapiroWilk(NamedTuple):
    """Tests of normality, one per test point.

    Example:
        >>> import jax
        >>> from numpyro_dgp.densities import ShapiroWilk, shapiro_wilk
        >>> tests = shapiro_wilk(jax.random.normal(jax.random.key(0), (100, 1)))
        >>> isinstance(tests, ShapiroWilk), tests.p_value.shape
        (True, (1,))
    """

    statistic: np.ndarray
    """W (N,): one for a perfect Gaussian, smaller the less Gaussian."""
    p_value: np.ndarray
    """Probability (N,) of a W this small under a Gaussian."""

    def __repr__(self) -> str:
        return brief(self)


def log_mean_exp(log_values: Array) -> Array:
    """Log of the mean, over the first axis, of numbers given by their logarithms.

    Args:
        log_values: logarithms (S, ...).

    Returns:
        Logarithms of the means (...,).

    Raises:
        ValueError: a number, or no values.

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro_dgp.densities import log_mean_exp
        >>> print(jnp.exp(log_mean_exp(jnp.log(jnp.array([[1.0], [3.0]])))))
        [2.]
    """
    expect(
        np.ndim(log_values) and len(log_values),
        "logarithms of shape (S, ...) with S >= 1",
        np.shape(log_values),
        "the mean is over the first axis",
    )
    return logsumexp(log_values, axis=0) - math.log(len(log_values))


def _require_draws(draws: ArrayLike, least: int) -> Any:
    draws = as_numbers("draws", draws)
    expect(
        np.ndim(draws) == 2 and np.shape(draws)[0] >= least,
        f"draws of shape (S, N) with S >= {least}",
        np.shape(draws),
        "take posterior.using(num_samples=2000).sample(key, X); of several outputs one at a time, draws[..., p]",
    )
    require_finite("draws", draws, "check the fit: NaN in its losses?")
    expect(
        not is_concrete(draws) or np.ptp(np.asarray(draws), axis=0).all(),
        "draws that differ at every test point",
        "equal ones",
        "draw y, not its mean",
    )
    return draws


@jax.jit
def _kde(draws: Array, y: Array) -> Array:
    def at(point: tuple[Array, Array]) -> Array:
        samples, value = point
        bandwidth = 1.06 * samples.std() * len(samples) ** -0.2  # δ = 1.06 σ S^(-1/5)
        squares = jnp.square((value - samples) / bandwidth)
        # log mean N(y; y_s, δ^2)
        return logsumexp(-0.5 * squares) - jnp.log(len(samples) * bandwidth) - 0.5 * math.log(2 * math.pi)

    return jax.lax.map(at, (draws.T, y), batch_size=_BLOCK)


def kde_log_density(draws: ArrayLike, y: ArrayLike) -> Array:
    r"""The metric of the tables of Salimbeni (2020), chapter 5: a Gaussian kernel density estimate from draws of y.

    .. math:: \log \tfrac1S \sum_s N(y; y_s, \delta^2), \qquad \delta = 1.06\, \hat\sigma\, S^{-1/5}

    with :math:`\hat\sigma` the standard deviation of the draws at that point; the published runs took S = 2000.

    It is biased: it widens every density by :math:`\delta` (a Gaussian by 1.06² S^(-2/5) of its variance, 5 % for
    S = 2000), blurs modes that are narrow next to :math:`\hat\sigma`, and beyond the outermost draw falls off like a
    Gaussian of standard deviation :math:`\delta`, so that outliers cost far too much. For any other purpose use
    ``posterior.log_density``.

    Args:
        draws: of y (S, N), from ``posterior.sample``.
        y: observations (N,).

    Returns:
        Log density of each observation (N,).

    Raises:
        ValueError: draws that are not a finite matrix, or all equal at a point, or observations of another length.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from numpyro_dgp.densities import kde_log_density
        >>> draws = jax.random.normal(jax.random.key(0), (2000, 2))
        >>> outlier = kde_log_density(draws, jnp.array([0.0, 5.0]))[1]  # the exact value is -13.4
        >>> bool(outlier < -20)
        True

    Source: Salimbeni (2020), section 5.3, and the code published with it.
    """
    draws, y = _require_draws(draws, 2), as_numbers("observations y", y)
    if np.shape(y) != np.shape(draws)[1:]:
        raise expected(
            f"observations y of shape {np.shape(draws)[1:]}, one per column of draws (S, N)",
            np.shape(y),
            "draws are transposed, draws.T, or of other rows than y",
        )
    require_finite("observations y", y, "drop the rows with missing values")
    draws = jnp.asarray(draws)
    return _kde(draws, jnp.asarray(y, draws.dtype))


def shapiro_wilk(draws: ArrayLike) -> ShapiroWilk:
    """Shapiro and Wilk's test of normality of the predictive distribution at every test point.

    Of more than 5000 draws, 5000 evenly spaced ones are used: SciPy's p-values are accurate up to there.

    Args:
        draws: of y (S, N), from ``posterior.sample``.

    Returns:
        Statistics W and p-values, each (N,).

    Raises:
        ValueError: draws that are not a finite matrix with at least three rows, or all equal at a point.

    Example:
        >>> import numpy as np
        >>> from numpyro_dgp.densities import shapiro_wilk
        >>> normal = np.random.default_rng(0).normal(size=(1000, 1))
        >>> tests = shapiro_wilk(np.hstack([normal, np.exp(normal)]))
        >>> print(tests.statistic.round(2), tests.p_value < 0.01)
        [1.   0.65] [False  True]

    Source: Salimbeni (2020), table 5.3.
    """
    from scipy.stats import shapiro  # imported here, because the import takes half a second

    found = np.asarray(_require_draws(draws, 3), float)
    total = len(found)
    rows = np.linspace(0, total - 1, min(total, _SHAPIRO_LIMIT)).astype(int)
    # The test does not depend on location and scale; standardised draws avoid rounding errors.
    kept = found[rows]
    tests = [shapiro((column - column.mean()) / column.std()) for column in kept.T]
    statistic, p_value = np.array(tests, float).reshape(-1, 2).T
    return ShapiroWilk(statistic, p_value)
