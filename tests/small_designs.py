"""Programs for small designs with one layer and more, and one layer integrated over a grid."""

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from jax.scipy.special import logsumexp

import numpyro_dgp as dgp

X = jnp.linspace(0, 1, 12)[:, None]


def family(depth, data=X):
    def model(X_, y=None):
        scale = numpyro.sample("scale", dist.LogNormal(-0.5, 1.0))
        noise, h, Z, layers = numpyro.sample("noise", dist.LogNormal(-4.0, 1.0)), X_, data, []
        for i in range(depth - 1, 0, -1):
            kernel = dgp.kernels.Matern52(numpyro.sample(f"variance{i}", dist.LogNormal(-3.0, 1.0)), 0.4)
            layers.append(dgp.gp(f"f{i}", kernel, dgp.Points(Z), outputs=1, mean=dgp.means.IdentityMean()))
            Z = layers[-1](Z).loc
        g = dgp.gp("f0", dgp.kernels.Matern52(1.0, scale), dgp.Points(Z))
        with numpyro.plate("data", len(X_)):
            for i, f in enumerate(layers):
                h = numpyro.sample(f"h{depth - 1 - i}", f(h))
            numpyro.sample("y", dgp.Likelihood(g(h), lambda v: dist.Normal(v, noise)), obs=y)

    return model


def without_plate(X_, y=None):
    """All rows are one observation: none can be left out."""
    numpyro.sample("y", dist.Normal(numpyro.sample("a", dist.Normal()), 1.0).expand([len(X_)]).to_event(1), obs=y)


def densities(X_, y):
    """Log densities of y and the logarithms of one layer's two hyperparameters, on a grid."""
    a, b = jnp.linspace(-4.5, 3.5, 120), jnp.linspace(-8.0, 0.0, 100)

    def at(log_scale, log_noise):
        K = dgp.kernels.Matern52(1.0, jnp.exp(log_scale))(X_, X_) + jnp.exp(2 * log_noise) * jnp.eye(len(X_))
        density = dist.MultivariateNormal(jnp.zeros(len(X_)), K + 1e-10 * jnp.eye(len(X_))).log_prob(y)
        return density + dist.Normal(-0.5, 1.0).log_prob(log_scale) + dist.Normal(-4.0, 1.0).log_prob(log_noise)

    return jax.vmap(lambda u: jax.vmap(lambda v: at(u, v))(b))(a), a, b


def log_evidence(X_, y):
    values, a, b = densities(X_, y)
    return logsumexp(values) + jnp.log((a[1] - a[0]) * (b[1] - b[0]))
