"""VIGF: the variance of the improvement for global fit."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from numpyro_dgp._checks import require_finite
from numpyro_dgp._data import as_floats, as_numbers
from numpyro_dgp._shown import brief
from numpyro_dgp._typing import Array, ArrayLike
from numpyro_dgp.algebra.linalg import matmul
from numpyro_dgp.design.posterior_acquisition import PosteriorAcquisition, geometric_mean_variance, rows_of

__all__ = ["VIGF"]


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
        num_samples: S, draws of the posterior.
        output: which column of a function of several outputs.

    Raises:
        ValueError: as :class:`ALM`, or runs that are not finite inputs (N, D) with values (N,), also in the default
            precision.

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
        >>> posterior = dgp.Posterior(model, samples={"f": jnp.ones((1, 1))})
        >>> vigf = dgp.design.VIGF(posterior, jax.random.key(0), jnp.array([[0.0]]), jnp.array([1.0]))
        >>> print(vigf(jnp.array([[0.0]])).round(2), vigf(jnp.array([[9.0]])).round(2))  # the mean is 0 there
        0.0 6.0

    Source: Mohammadi and Challenor (2022), section 3.
    """

    X: Any
    y: Any

    __repr__ = brief

    def __post_init__(self) -> None:
        super().__post_init__()
        X = rows_of(self.owner, "X", self.X)
        y = as_numbers(f"y of {self.owner}", self.y)
        if np.shape(y) != X.shape[:1]:
            raise ValueError(
                f"{self.owner}: expected values y of shape {X.shape[:1]}, one per run in X, got {np.shape(y)}: y[:, 0] "
                "of a single column"
            )
        require_finite(f"y of {self.owner}", y, "leave failed runs out, of X too")
        object.__setattr__(self, "X", X)
        object.__setattr__(self, "y", as_floats(f"y of {self.owner}", y))

    def __call__(self, x: ArrayLike, *args: Any, **kwargs: Any) -> Array:
        """The value at points x (q, D); further arguments are those of the program."""
        found = self.jointly(x, None, args, kwargs)
        nearest = jnp.square(self.points(x)[:, None] - self.X).sum(-1).argmin(1)
        gap, C = found.means - self.y[nearest].astype(found.means.dtype), found.covariances
        expected = jnp.square(gap) + jnp.diagonal(C, axis1=-2, axis2=-1)
        apart = expected - expected.mean(0)
        within = 4 * gap[:, :, None] * gap[:, None, :] * C + 2 * jnp.square(C)
        return geometric_mean_variance(within.mean(0) + matmul(apart.T, apart) / len(apart))
