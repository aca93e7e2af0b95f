r"""Active learning: inputs whose observation is most informative about the function, globally or near a level.

These criteria use the mean and covariance of the mixture over draws; the entropy of a level set uses each of its
Gaussians. The reduction of variance by an observation is that of the best linear predictor, exact for a Gaussian
posterior.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import ndtr, ndtri

from numpyro_dgp._checks import expect, require_finite
from numpyro_dgp._data import as_floats, as_numbers
from numpyro_dgp._fields import checked
from numpyro_dgp._repr import brief
from numpyro_dgp._typing import Array, ArrayLike
from numpyro_dgp.densities import lower_factors
from numpyro_dgp.design.posterior_acquisition import (
    PosteriorAcquisition,
    WithDraws,
    geometric_mean_variance,
    rows_of,
    standard_deviation,
    value,
)
from numpyro_dgp.math.linalg import matmul, solve_lower

__all__ = ["ALC", "ALM", "MICE", "VIGF", "ContourEntropy"]


class ALM(PosteriorAcquisition):
    r"""The variance of the function: active learning MacKay (ALM).

    .. math:: \mathrm{ALM}(x) = \sigma^2(x), \qquad \bigl\lvert \operatorname{Cov} f(x_{1:q}) \bigr\rvert^{1/q}

    for one point, and for a batch, whose optimum is that of the entropy of its values. Nearby points,
    whose values are highly correlated, have a determinant near zero.

    Args:
        posterior: a ``Posterior``, or anything with its method ``predict_jointly``.
        key: PRNG key; it fixes the draws of the posterior.
        output: which column of a function of several outputs.

    Raises:
        ValueError: something else than a posterior or a key; where it is called, points that are not (q, D), or several
            outputs without ``output``.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro_dgp as dgp
        >>> model, _, _ = dgp.testing.toy()
        >>> posterior = dgp.Posterior(model, samples={"f": jnp.zeros((1, 5))})
        >>> alm = dgp.design.ALM(posterior, jax.random.key(0))
        >>> print(alm(jnp.array([[9.0]])).round(2), alm(jnp.array([[9.0], [9.5]])).round(2))
        1.0 0.47

    Source: Seo et al. (2000), section 3, for the variance.
    """

    def __call__(self, x: ArrayLike, *args: Any, **kwargs: Any) -> Array:
        """The value at points x (q, D); further arguments are those of the program."""
        return geometric_mean_variance(self.jointly(x, None, args, kwargs).covariance)


@dataclasses.dataclass(frozen=True, eq=False)
class ALC(PosteriorAcquisition):
    r"""The mean reduction of variance at reference points by an observation: active learning Cohn (ALC).

    .. math:: \mathrm{ALC}(x) = \tfrac1R \sum_r c(r, x)\, \bigl(c(x, x) + \sigma^2 I\bigr)^{-1} c(x, r)

    for one point or a batch, c being the covariance of the posterior. It is what an observation takes away of the mean
    squared error at the reference points, so that its optimum is that of IMSE, the error that is left.

    Args:
        posterior: a ``Posterior``, or anything with its method ``predict_jointly``. Of its S draws,
            ``posterior.using(num_samples=S)``, covariances between distant points have an error of about 1 / sqrt(S).
        key: PRNG key; it fixes the draws of the posterior.
        reference: points (R, D) that the function is to be known at; their joint covariance is computed, (R + q)^2
            numbers for each draw. Quasi-random points represent the whole input space.
        noise: :math:`\sigma`, the standard deviation of the noise of an observation; 0.0 for a code without noise.
        output: which column of a function of several outputs.

    Raises:
        ValueError: as :class:`ALM`, reference points that are not points, or noise below zero.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro_dgp as dgp
        >>> model, _, _ = dgp.testing.toy()
        >>> posterior = dgp.Posterior(model, samples={"f": jnp.zeros((1, 5))})
        >>> alc = dgp.design.ALC(posterior, jax.random.key(0), jnp.array([[8.0], [9.0]]))
        >>> print(alc(jnp.array([[8.5]])).round(2), alc(jnp.array([[4.0]])).round(2))
        0.78 0.0

    Source: Cohn (1994); Seo et al. (2000), section 4, for Gaussian processes; Sacks et al. (1989), section 3, for IMSE.
    """

    reference: Any = checked(rows_of)
    noise: ArrayLike = standard_deviation()

    __repr__ = brief

    def __call__(self, x: ArrayLike, *args: Any, **kwargs: Any) -> Array:
        """The value at points x (q, D); further arguments are those of the program."""
        found = self.jointly(x, self.reference, args, kwargs)
        C = found.covariance
        q = len(C) - len(self.reference)
        noise = jnp.square(jnp.asarray(self.noise, C.dtype)) * jnp.eye(q, dtype=C.dtype)
        L = lower_factors(C[:q, :q] + noise, found.mean[:q])  # L L' = c(x, x) + sigma^2 I
        return jnp.square(solve_lower(L, C[:q, q:])).sum(0).mean()  # |L^-1 c(x, r)|^2, averaged over r


@dataclasses.dataclass(frozen=True, eq=False)
class MICE(PosteriorAcquisition):
    r"""Mutual information for computer experiments: uncertain given the data, and telling about the other candidates.

    .. math:: \mathrm{MICE}(x_1 \dots x_q) = \Bigl(\prod_{j=1}^q
              \frac{\sigma^2(x_j \mid \text{data}, x_{<j})}{\sigma^2_0(x_j \mid G \setminus x;\; \tau^2)}
              \Bigr)^{1/q}, \qquad
              \sigma^2_0 = k(x, x) - k(x, G) \bigl(k(G, G) + \tau^2 \operatorname{diag} k(G, G)\bigr)^{-1} k(G, x)

    Below the line is the variance of the process before any data, given values at all other candidates G with a nugget
    of :math:`\tau^2` times their variance, which keeps the ratio smooth. Above it a batch counts one point after the
    other, so that redundant points count once. In a deep program k is the covariance of the last function at
    the values of the layers below, averaged over their draws.

    Args:
        posterior: a ``Posterior``, or anything with its method ``predict_jointly``.
        key: PRNG key; it fixes the draws of the posterior.
        candidates: G, points (R, D) all over the input space; one that equals a point x, in the lower of their
            precisions, is left out.
        nugget: :math:`\tau^2`, at least zero.
        output: which column of a function of several outputs.

    Raises:
        ValueError: as :class:`ALM`, candidates that are not points, or a nugget below zero.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro_dgp as dgp
        >>> model, _, _ = dgp.testing.toy()
        >>> posterior = dgp.Posterior(model, samples={"f": jnp.zeros((1, 5))})
        >>> mice = dgp.design.MICE(posterior, jax.random.key(0), jnp.array([[0.0], [7.0], [8.0], [9.0]]))
        >>> print(mice(jnp.array([[8.0]])).round(2), mice(jnp.array([[12.0]])).round(2))
        1.53 1.0

    Source: Beck and Guillas (2016), section 3.
    """

    candidates: Any = checked(rows_of)
    nugget: ArrayLike = standard_deviation(1.0)

    __repr__ = brief

    def __call__(self, x: ArrayLike, *args: Any, **kwargs: Any) -> Array:
        """The value at points x (q, D); further arguments are those of the program."""
        rows, G = self.points(x), self.candidates
        q, found = len(rows), self.jointly(rows, G, args, kwargs)
        coarse = min(rows.dtype, G.dtype, key=lambda dtype: jnp.finfo(dtype).bits)
        others = ~(G.astype(coarse)[:, None] == rows.astype(coarse)).all(-1).any(1)
        kept = jnp.concatenate([jnp.ones(q, bool), others])
        # Candidates that are left out have covariance zero with all others, and so are not informative.
        K = jnp.where(kept[:, None] & kept, found.prior_covariances.mean(0), 0.0)
        variances = jnp.diagonal(found.prior_covariances.mean(0))[q:]
        among = K[q:, q:] + jnp.diag(jnp.where(others, self.nugget, 1.0) * variances)  # k(G, G) + tau^2 diag k(G, G)
        half = solve_lower(lower_factors(among, jnp.zeros_like(variances)), K[q:, :q])
        before, info = jnp.diagonal(K)[:q], jnp.finfo(K.dtype)
        least = info.eps * before + float(info.tiny)  # their rounding errors
        given_others = jnp.maximum(before - jnp.square(half).sum(0), least)  # sigma_0^2(x_j | G without x)
        # (|Cov f(x_1..q)| / prod_j sigma_0^2(x_j))^(1/q)
        return geometric_mean_variance(found.covariance[:q, :q]) / jnp.exp(jnp.log(given_others).mean())


def _values_of(name: str, y: Any) -> Array:
    y = as_numbers(name, y)
    require_finite(name, y, "leave failed runs out, of X too")
    return as_floats(name, y)


@dataclasses.dataclass(frozen=True, eq=False)
class VIGF(PosteriorAcquisition):
    r"""The variance of the squared distance between the function and the value at the nearest run so far.

    .. math:: I(x) = \bigl(f(x) - y_{*}\bigr)^2, \qquad
              \mathrm{VIGF}(x) = \operatorname{Var} I(x) = 4 \sigma^2 (\mu - y_*)^2 + 2 \sigma^4

    where :math:`y_*` is the value at the run nearest to x and f(x) is Gaussian. It is large where the function is
    uncertain and changes fast. For a mixture over draws it is the mean of these variances plus the variance of
    :math:`E_s I = \sigma_s^2 + (\mu_s - y_*)^2`. For a batch it is the determinant of the covariance of
    :math:`I(x_1) \dots I(x_q)` to the power 1/q, with
    :math:`\operatorname{Cov}(I_i, I_j) = 4 \delta_i \delta_j c_{ij} + 2 c_{ij}^2`, :math:`\delta = \mu - y_*`.
    The nearest run changes from place to place: there the criterion jumps.

    Args:
        posterior: a ``Posterior``, or anything with its method ``predict_jointly``.
        key: PRNG key; it fixes the draws of the posterior.
        X: inputs of the runs so far (N, D), by whose Euclidean distances the nearest is found. Rows may be repeated, so
            that arrays can keep one size while runs are added.
        y: their values (N,), in the units of the function under the ``Likelihood``.
        output: which column of a function of several outputs.

    Raises:
        ValueError: as :class:`ALM`, or runs that are not finite inputs (N, D) with values (N,), also in the default
            precision.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro_dgp as dgp
        >>> model, _, _ = dgp.testing.toy()
        >>> posterior = dgp.Posterior(model, samples={"f": jnp.ones((1, 5))})
        >>> vigf = dgp.design.VIGF(posterior, jax.random.key(0), jnp.array([[0.0]]), jnp.array([1.0]))
        >>> print(vigf(jnp.array([[0.0]])).round(2), vigf(jnp.array([[9.0]])).round(2))  # the mean is 0 there
        0.0 6.0

    Source: Mohammadi and Challenor (2022), section 3.
    """

    X: Any = checked(rows_of)
    y: Any = checked(_values_of)

    __repr__ = brief

    def __post_init__(self) -> None:
        super().__post_init__()
        what = f"values y of shape {self.X.shape[:1]}, one per run in X"
        expect(np.shape(self.y) == self.X.shape[:1], what, np.shape(self.y), "y[:, 0] of a single column")

    def __call__(self, x: ArrayLike, *args: Any, **kwargs: Any) -> Array:
        """The value at points x (q, D); further arguments are those of the program."""
        found = self.jointly(x, None, args, kwargs)
        nearest = jnp.square(self.points(x)[:, None] - self.X).sum(-1).argmin(1)
        gap, C = found.means - self.y[nearest].astype(found.means.dtype), found.covariances  # mu_s - y*
        expected = jnp.square(gap) + jnp.diagonal(C, axis1=-2, axis2=-1)  # E_s I
        apart = expected - expected.mean(0)
        within = 4 * gap[:, :, None] * gap[:, None, :] * C + 2 * jnp.square(C)  # Cov_s(I_i, I_j)
        # mean of Cov_s I + Cov of E_s I
        return geometric_mean_variance(within.mean(0) + matmul(apart.T, apart) / len(apart))


_MOST = 8


@dataclasses.dataclass(frozen=True, eq=False)
class ContourEntropy(WithDraws):
    r"""The entropy of whether the function is above a level, in nats.

    .. math:: H(x) = -p \log p - (1 - p) \log(1 - p), \qquad
              p(x) = P\bigl(f(x) < t\bigr) = \tfrac1S \sum_s \Phi\Bigl(\frac{t - \mu_s}{\sigma_s}\Bigr)

    It is largest, log 2, on the predicted contour wherever f is not known there. For a batch it is the entropy of all q
    answers together, :math:`-\sum_b p_b \log p_b` over their :math:`2^q` combinations, whose probabilities are
    estimated by drawing each value within its side, given those before it; these draws are smooth in the points.

    Args:
        posterior: a ``Posterior``, or anything with its method ``predict_jointly``.
        key: PRNG key; it fixes all random numbers.
        level: t, in the units of the function under the ``Likelihood``.
        num_draws: quasi-random draws given each of them, for batches; a power of two.
        output: which column of a function of several outputs.

    Raises:
        ValueError: as :class:`ExpectedImprovement`; where it is called, more than eight points.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro_dgp as dgp
        >>> model, _, _ = dgp.testing.toy()
        >>> posterior = dgp.Posterior(model, samples={"f": jnp.ones((1, 5))})
        >>> entropy = dgp.design.ContourEntropy(posterior, jax.random.key(0), level=0.0)
        >>> print(entropy(jnp.array([[0.0]])).round(2), entropy(jnp.array([[9.0]])).round(2))
        0.0 0.69

    Source: Cole et al. (2023), section 3; Marques et al. (2018) for contour entropy; Geweke (1991) for the draws.
    """

    level: ArrayLike = value()

    __repr__ = brief

    def __call__(self, x: ArrayLike, *args: Any, **kwargs: Any) -> Array:
        """The value at points x (q, D); further arguments are those of the program."""
        rows = self.points(x)
        expect(len(rows) <= _MOST, f"at most {_MOST} points (2^q combinations)", len(rows), "take several batches")
        found = self.jointly(rows, None, args, kwargs)
        means, L = found.means, found.factors()
        white = self.white(len(means), len(rows) - 1, means.dtype)
        tiny = float(jnp.finfo(means.dtype).tiny)
        draws = jnp.zeros((1, *white.shape[:2], 0), means.dtype)
        p = jnp.ones(draws.shape[:3], means.dtype)
        for j in range(len(rows)):
            centre = means[:, None, j] + (L[:, None, j, :j] * draws).sum(-1)  # E[f_j | f_<j]
            limit = (self.level - centre) / L[:, None, j, j]
            below, above = ndtr(limit), ndtr(-limit)  # P(f_j < t | f_<j), P(f_j > t | f_<j)
            if j + 1 < len(rows):
                part = ndtr(white[..., j])
                # normal numbers with f_j < t, with f_j > t
                sides = ndtri(jnp.maximum(part * below, tiny)), -ndtri(jnp.maximum(part * above, tiny))
                draws = jnp.concatenate([jnp.concatenate([draws, side[..., None]], -1) for side in sides])
            p = jnp.concatenate([p * below, p * above])  # p_b of 2^(j + 1) combinations b, first axis
        return jax.scipy.special.entr(jnp.maximum(p.mean((1, 2)), tiny)).sum()  # -sum_b p_b log p_b
