"""A user's program with a deep Gaussian process, fully typed. ``test_typing.py`` checks it strictly and runs it."""

# The two rules that are off are about the types of JAX, NumPyro and optax, which are not complete.
# pyright: strict, reportMissingTypeStubs=false, reportUnknownMemberType=false

from pathlib import Path
from typing import cast

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
import optax
from jax import Array
from numpyro.infer import SVI

import numpyro_dgp as dgp


def data(rows: int) -> tuple[Array, Array]:
    """A step with noise."""
    X = jnp.linspace(-1.0, 1.0, rows)[:, None]
    return X, jnp.sign(X[:, 0]) + 0.1 * jax.random.normal(jax.random.key(0), (rows,))


def model(X: Array, y: Array | None = None, batch_size: int | None = None) -> None:
    """Two layers under Gaussian noise."""
    noise = numpyro.sample("noise", dist.LogNormal(-2.0, 1.0))

    def observed(v: Array) -> dist.Distribution:
        return dist.Normal(v, noise)

    inducing = dgp.Points(jnp.linspace(-1.0, 1.0, 8)[:, None])
    kernel: dgp.kernels.Kernel = dgp.kernels.RBF(lengthscale=0.5) + 0.1 * dgp.kernels.Matern52()
    f = dgp.gp("f", kernel, inducing, outputs=1, mean=dgp.means.IdentityMean())
    g = dgp.gp("g", dgp.kernels.RBF(), inducing)
    with numpyro.plate("data", X.shape[0], subsample_size=batch_size) as rows:
        h = numpyro.sample("h", f(X[rows]))
        likelihood = dgp.Likelihood(g(h), observed)
        numpyro.sample("y", likelihood, obs=None if y is None else y[rows])


def main(folder: Path) -> None:
    """Fit, save, load, predict and sample."""
    X, y = data(30)
    guide = dgp.guides.InducingPoint(model, sites={"g": dgp.guides.Diagonal()}, prefix="q")
    svi = SVI(model, guide, optax.adam(0.01), dgp.ELBO())
    result = dgp.fit(svi, jax.random.key(3), 20, X, y, batch_size=10, progress_bar=False)
    fitted = cast("dict[str, Array]", result.params)
    dgp.save(folder / "fit.npz", fitted)
    params: dict[str, Array] = dgp.load(folder / "fit.npz")
    posterior = dgp.Posterior(model, guide, params)
    prediction: dgp.densities.Mixture = posterior.predict(jax.random.key(1), X)
    mean: Array = prediction.mean
    low, high = prediction.interval(0.9)
    density: Array = posterior.log_density(jax.random.key(2), y, X)
    print(mean.shape, float(density.mean()), bool((low < high).all()))


if __name__ == "__main__":
    main(Path())
