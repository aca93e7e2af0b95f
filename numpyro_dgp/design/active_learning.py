r"""Active learning: where an observation says most about the function, everywhere.

These criteria see the mean and the covariance of the mixture over draws. The variance that an observation takes away is
that of the best linear predictor: for a Gaussian posterior exactly the variance after it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from numpyro_dgp._shown import brief
from numpyro_dgp._typing import Array, ArrayLike
from numpyro_dgp.algebra.linalg import solve_lower
from numpyro_dgp.design.posterior_acquisition import (
    PosteriorAcquisition,
    geometric_mean_variance,
    require_spread,
    rows_of,
)
from numpyro_dgp.prediction.joint_mixture import lower_factors

__all__ = ["ALC", "ALM", "IMSE"]


class ALM(PosteriorAcquisition):
    r"""The variance of the function: active learning after MacKay.

    .. math:: \mathrm{ALM}(x) = \sigma^2(x), \qquad \bigl\lvert \operatorname{Cov} f(x_{1:q}) \bigr\rvert^{1/q}

    for one point, and for a batch, whose optimum is that of the entropy of its values. Points near to each other, of
    which one tells the other, have a determinant near zero.

    Args:
        posterior: a ``Posterior``, or anything with its method ``predict_jointly``.
        key: PRNG key; it fixes the draws of the posterior.
        num_samples: S, draws of the posterior.
        output: which column of a function of several outputs.

    Raises:
        ValueError: something else than a posterior or a key; where it is called, points that are not (q, D), or several
            outputs without ``output``.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import numpyro
        >>> import numpyro.distributions as dist
        >>> import numpyro_dgp as dgp
        >>> def model(X, y=None):
        ...     f = dgp.gp("f", dgp.kernels.RBF(), dgp.Points(jnp.array([[0.0]])))
        ...     with numpyro.plate("data", len(X)):
        ...         numpyro.sample("y", dgp.Likelihood(f(X), lambda v: dist.Normal(v, 0.1)), obs=y)
        >>> posterior = dgp.Posterior(model, samples={"f": jnp.zeros((1, 1))})
        >>> alm = dgp.design.ALM(posterior, jax.random.key(0))
        >>> print(alm(jnp.array([[9.0]])).round(2), alm(jnp.array([[9.0], [9.5]])).round(2))
        1.0 0.47

    Source: Seo et al. (2000), section 3, for the variance.
    """

    def __call__(self, x: ArrayLike, *args: Any, **kwargs: Any) -> Array:
        """The value at points x (q, D); further arguments are those of the program."""
        return geometric_mean_variance(self.jointly(x, None, args, kwargs).covariance)


@dataclasses.dataclass(frozen=True, eq=False)
class _AtReference(PosteriorAcquisition):
    """Variances at reference points, before and after observations.

    Args:
        reference: points (R, D).
        noise: of an observation.
    """

    reference: Any
    noise: ArrayLike = 0.0

    __repr__ = brief

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "reference", rows_of(self.owner, "reference", self.reference))
        require_spread(self.owner, "noise", self.noise)

    def variances(self, x: ArrayLike, args: Any, kwargs: Any) -> tuple[Array, Array]:
        """Variances at the reference points (R,), and what observations at x take away of them."""
        found = self.jointly(x, self.reference, args, kwargs)
        C = found.covariance
        q = len(C) - len(self.reference)
        noise = jnp.square(jnp.asarray(self.noise, C.dtype)) * jnp.eye(q, dtype=C.dtype)
        L = lower_factors(C[:q, :q] + noise, found.mean[:q])
        return jnp.diagonal(C)[q:], jnp.square(solve_lower(L, C[:q, q:])).sum(0)


class ALC(_AtReference):
    r"""How much an observation lowers the variance at reference points, on average: active learning after Cohn.

    .. math:: \mathrm{ALC}(x) = \tfrac1R \sum_r c(r, x)\, \bigl(c(x, x) + \sigma^2 I\bigr)^{-1} c(x, r)

    for one point or a batch, c being the covariance of the posterior.

    Args:
        posterior: a ``Posterior``, or anything with its method ``predict_jointly``.
        key: PRNG key; it fixes the draws of the posterior.
        reference: points (R, D) that the function is to be known at; their joint covariance is computed, (R + q)^2
            numbers for each draw. Quasi-random points of the input space stand for all of it.
        noise: :math:`\sigma`, the standard deviation of the noise of an observation; 0.0 for a code without noise.
        num_samples: S, draws of the posterior; of mixtures, covariances between distant points have an error of about
            1 / sqrt(S).
        output: which column of a function of several outputs.

    Raises:
        ValueError: as :class:`ALM`, reference points that are not points, or noise below zero.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import numpyro
        >>> import numpyro.distributions as dist
        >>> import numpyro_dgp as dgp
        >>> def model(X, y=None):
        ...     f = dgp.gp("f", dgp.kernels.RBF(), dgp.Points(jnp.array([[0.0]])))
        ...     with numpyro.plate("data", len(X)):
        ...         numpyro.sample("y", dgp.Likelihood(f(X), lambda v: dist.Normal(v, 0.1)), obs=y)
        >>> posterior = dgp.Posterior(model, samples={"f": jnp.zeros((1, 1))})
        >>> alc = dgp.design.ALC(posterior, jax.random.key(0), jnp.array([[8.0], [9.0]]))
        >>> print(alc(jnp.array([[8.5]])).round(2), alc(jnp.array([[4.0]])).round(2))
        0.78 0.0

    Source: Cohn (1994); Seo et al. (2000), section 4, for Gaussian processes.
    """

    def __call__(self, x: ArrayLike, *args: Any, **kwargs: Any) -> Array:
        """The value at points x (q, D); further arguments are those of the program."""
        return self.variances(x, args, kwargs)[1].mean()


class IMSE(_AtReference):
    r"""Minus the mean squared error that is left at reference points after an observation: it is to be made large.

    .. math:: -\mathrm{IMSE}(x) = -\tfrac1R \sum_r \Bigl[ c(r, r) -
              c(r, x)\, \bigl(c(x, x) + \sigma^2 I\bigr)^{-1} c(x, r) \Bigr]

    The sum stands for the integral over the input space. It is :class:`ALC` less the error now, so that both have the
    same optimum; this one says what error is left.

    Args:
        posterior: a ``Posterior``, or anything with its method ``predict_jointly``.
        key: PRNG key; it fixes the draws of the posterior.
        reference: points (R, D), as for :class:`ALC`.
        noise: :math:`\sigma`, the standard deviation of the noise of an observation; 0.0 for a code without noise.
        num_samples: S, draws of the posterior.
        output: which column of a function of several outputs.

    Raises:
        ValueError: as :class:`ALC`.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import numpyro
        >>> import numpyro.distributions as dist
        >>> import numpyro_dgp as dgp
        >>> def model(X, y=None):
        ...     f = dgp.gp("f", dgp.kernels.RBF(), dgp.Points(jnp.array([[0.0]])))
        ...     with numpyro.plate("data", len(X)):
        ...         numpyro.sample("y", dgp.Likelihood(f(X), lambda v: dist.Normal(v, 0.1)), obs=y)
        >>> posterior = dgp.Posterior(model, samples={"f": jnp.zeros((1, 1))})
        >>> imse = dgp.design.IMSE(posterior, jax.random.key(0), jnp.array([[8.0], [9.0]]))
        >>> print(imse(jnp.array([[8.5]])).round(2), imse(jnp.array([[4.0]])).round(2))
        -0.22 -1.0

    Source: Sacks et al. (1989), section 3.
    """

    def __call__(self, x: ArrayLike, *args: Any, **kwargs: Any) -> Array:
        """The value at points x (q, D); further arguments are those of the program."""
        now, less = self.variances(x, args, kwargs)
        return (less - now).mean()
