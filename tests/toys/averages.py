"""A representation: inducing values that are averages over the bins of a histogram."""

import dataclasses

import jax
import jax.numpy as jnp

import numpyro_dgp as dgp
from numpyro_dgp.extend import (
    InducedFunction,
    InducingPrior,
    Weights,
    inverse_cholesky,
    matvec,
    pytree,
    static,
    whitened_values,
)


@pytree
class Averages:
    """Averages over ``bins`` bins between ``low`` and ``high``, by ``points`` points in each."""

    low: float
    high: float
    bins: int = static()
    points: int = static(default=8)

    def open(self, name, kernels, outputs, mean):
        if not isinstance(kernels, dgp.kernels.Kernel):
            raise ValueError(
                f"gp {name!r}: expected one kernel for all outputs of Averages, got {len(kernels)}"
            )
        cells = self.bins * self.points
        x = self.low + (self.high - self.low) * (jnp.arange(cells) + 0.5)[:, None] / cells
        between = self.average(self.average(kernels(x, x)).T)  # Cov[average, average]
        whiten = inverse_cholesky(between, f"the averages of gp {name!r}")
        shape = (self.bins,) if outputs is None else (outputs, self.bins)
        v, site = whitened_values(name, InducingPrior(shape, x.dtype))
        return AveragedFunction(kernels, v, outputs, mean, site, self, x, whiten)

    def average(self, values):
        """From the points (..., bins * points) to the bins (..., bins)."""
        return values.reshape(*values.shape[:-1], self.bins, self.points).mean(-1)


@pytree
class AveragedFunction(InducedFunction):
    kernels: dgp.kernels.Kernel
    v: Weights
    outputs: int | None = static()
    mean: dgp.means.Mean
    site: str | None = static()
    bins: Averages
    x: jax.Array
    whiten: jax.Array

    @property
    def size(self):
        return self.bins.bins

    @property
    def dims(self):
        return 1

    def features(self, rows):
        # Cov[f(x), average] L^-T
        return self.bins.average(self.kernels(rows, self.x)) @ self.whiten.T

    def prior_variance(self, rows):
        return self.kernels.diag(rows)

    def covariance(self, x, y=None):
        K = self.kernels.gram(x) if y is None else self.kernels(x, y)
        return K[..., None, :, :]  # shared by all outputs

    def held(self):
        kernels, whiten = jax.lax.stop_gradient((self.kernels, self.whiten))
        return dataclasses.replace(self, kernels=kernels, whiten=whiten)

    def prior_draw(self, key, weights, rows):
        def functions(x):
            return matvec(weights, self.kernels.features(key, x, weights.shape[-1]))  # (N, P)

        return functions(rows), self.bins.average(functions(self.x).T) @ self.whiten.T
