"""MICE: the mutual information between an observation and the rest of the input space."""

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

__all__ = ["MICE"]


@dataclasses.dataclass(frozen=True, eq=False)
class MICE(PosteriorAcquisition):
    r"""Mutual information for computer experiments: uncertain given the data, and telling about the other candidates.

    .. math:: \mathrm{MICE}(x_1 \dots x_q) = \Bigl(\prod_{j=1}^q
              \frac{\sigma^2(x_j \mid \text{data}, x_{<j})}{\sigma^2_0(x_j \mid G \setminus x;\; \tau^2)}
              \Bigr)^{1/q}, \qquad
              \sigma^2_0 = k(x, x) - k(x, G) \bigl(k(G, G) + \tau^2 \operatorname{diag} k(G, G)\bigr)^{-1} k(G, x)

    Below the line is the variance of the process before any data, given values at all other candidates G with a nugget
    of :math:`\tau^2` times their variance, which keeps the ratio smooth. Above it a batch counts one point after the
    other, so that points which say the same count once. In a deep program k is the covariance of the last function at
    the values of the layers below, averaged over their draws.

    Args:
        posterior: a ``Posterior``, or anything with its method ``predict_jointly``.
        key: PRNG key; it fixes the draws of the posterior.
        candidates: G, points (R, D) all over the input space; one that equals a point x, in the lower of their
            precisions, is left out.
        nugget: :math:`\tau^2`, at least zero.
        num_samples: S, draws of the posterior.
        output: which column of a function of several outputs.

    Raises:
        ValueError: as :class:`ALM`, candidates that are not points, or a nugget below zero.

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
        >>> mice = dgp.design.MICE(posterior, jax.random.key(0), jnp.array([[0.0], [7.0], [8.0], [9.0]]))
        >>> print(mice(jnp.array([[8.0]])).round(2), mice(jnp.array([[12.0]])).round(2))
        1.53 1.0

    Source: Beck and Guillas (2016), section 3.
    """

    candidates: Any
    nugget: ArrayLike = 1.0

    __repr__ = brief

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "candidates", rows_of(self.owner, "candidates", self.candidates))
        require_spread(self.owner, "nugget", self.nugget)

    def __call__(self, x: ArrayLike, *args: Any, **kwargs: Any) -> Array:
        """The value at points x (q, D); further arguments are those of the program."""
        rows, G = self.points(x), self.candidates
        q, found = len(rows), self.jointly(rows, G, args, kwargs)
        coarse = min(rows.dtype, G.dtype, key=lambda dtype: jnp.finfo(dtype).bits)
        others = ~(G.astype(coarse)[:, None] == rows.astype(coarse)).all(-1).any(1)
        kept = jnp.concatenate([jnp.ones(q, bool), others])
        K = jnp.where(kept[:, None] & kept, found.prior_covariances.mean(0), 0.0)
        variances = jnp.diagonal(found.prior_covariances.mean(0))[q:]
        among = K[q:, q:] + jnp.diag(jnp.where(others, self.nugget, 1.0) * variances)
        half = solve_lower(lower_factors(among, jnp.zeros_like(variances)), K[q:, :q])
        before, info = jnp.diagonal(K)[:q], jnp.finfo(K.dtype)
        least = info.eps * before + float(info.tiny)  # their rounding errors
        given_others = jnp.maximum(before - jnp.square(half).sum(0), least)
        return geometric_mean_variance(found.covariance[:q, :q]) / jnp.exp(jnp.log(given_others).mean())
