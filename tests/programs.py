"""Programs that several tests share."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI

import numpyro_dgp as dgp

rng = np.random.default_rng(0)
X = jnp.array(np.sort(rng.uniform(-2, 2, size=(30, 1)), 0))
Y = jnp.sin(2 * X[:, 0]) + 0.1 * jnp.array(rng.normal(size=30))
Z = jnp.linspace(-2, 2, 8)[:, None]
NOISE = 0.3


def shallow(X, y=None, batch=None, *, Z=Z, kernel=dgp.kernels.RBF(1.2, 0.7), noise=NOISE):
    g = dgp.gp("g", kernel, dgp.Points(Z))
    with numpyro.plate("data", len(X), subsample_size=batch) as i:
        numpyro.sample("y", dgp.Likelihood(g(X[i]), lambda v: dist.Normal(v, noise)), obs=None if y is None else y[i])


def deep(X, y=None, batch=None, *, inner=dgp.kernels.RBF(0.3, 0.9), process_noise=None, mean=dgp.means.IdentityMean()):
    f = dgp.gp("f", inner, dgp.Points(Z), outputs=1, mean=mean)
    g = dgp.gp("g", dgp.kernels.RBF(1.2, 0.7), dgp.Points(Z))
    with numpyro.plate("data", len(X), subsample_size=batch) as i:
        h = numpyro.sample("h", f(X[i], noise=process_noise))
        numpyro.sample("y", dgp.Likelihood(g(h), lambda v: dist.Normal(v, NOISE)), obs=None if y is None else y[i])


def explicit(X, y=None, batch=None):
    """As ``deep``, with the last function drawn instead of integrated: a proper joint density."""
    f = dgp.gp("f", dgp.kernels.RBF(0.3, 0.9), dgp.Points(Z), outputs=1, mean=dgp.means.IdentityMean())
    g = dgp.gp("g", dgp.kernels.RBF(1.2, 0.7), dgp.Points(Z))
    with numpyro.plate("data", len(X), subsample_size=batch) as i:
        h = numpyro.sample("h", f(X[i]))
        v = numpyro.sample("v", g(h))
        numpyro.sample("y", dist.Normal(v, NOISE), obs=None if y is None else y[i])


def bayesian(X, y=None, batch=None):
    """Hyperparameters from sample sites, a latent per datum, learned inducing inputs."""
    noise = numpyro.sample("noise", dist.LogNormal(-1.0, 0.5))
    scales = numpyro.sample("scales", dist.LogNormal(jnp.zeros(2), 0.3).to_event(1))
    f = dgp.gp("f", dgp.kernels.RBF(0.3, scales), dgp.Points(jnp.hstack([Z, jnp.sin(9 * Z)])), outputs=1)
    g = dgp.gp("g", dgp.kernels.Matern52(), dgp.Points(Z, learn=True))
    with numpyro.plate("data", len(X), subsample_size=batch) as i:
        x = dgp.latent("w", X[i], 1)
        h = numpyro.sample("h", f(x))
        numpyro.sample("y", dgp.Likelihood(g(h), lambda v: dist.Normal(v, noise)), obs=None if y is None else y[i])


def random_params(model, guide, *args, key=jax.random.key(7), scale=0.3, **kwargs):
    """Initial parameters of a guide, moved away from the special starting point."""
    import optax

    state = SVI(model, guide, optax.sgd(0.0), dgp.ELBO()).init(jax.random.key(0), *args, **kwargs)
    params = SVI(model, guide, optax.sgd(0.0), dgp.ELBO())
    params.init(jax.random.key(0), *args, **kwargs)
    params = params.get_params(state)
    moved = {}
    for (name, value), k in zip(sorted(params.items()), jax.random.split(key, len(params)), strict=True):
        noise = scale * jax.random.normal(k, value.shape, value.dtype)
        if name.endswith("scale_tril"):
            moved[name] = jnp.tril(0.5 * jnp.eye(value.shape[-1]) + noise)
        elif name.endswith("scale"):
            moved[name] = jnp.abs(0.5 + noise)
        elif name.endswith("_auto_loc") and name.split("_")[0] in ("f", "g", "h", "w"):
            moved[name] = value + noise
        else:
            moved[name] = value * jnp.exp(noise)
    return moved


def bound(loss, params, model, guide, *args, key=jax.random.key(0), **kwargs):
    return -loss.loss(key, params, model, guide, *args, **kwargs)


def draws_of_bound(loss, params, model, guide, *args, num=2000, key=jax.random.key(3), **kwargs):
    """Independent estimates of the bound, shape (num,)."""
    run = jax.jit(lambda k: bound(loss, params, model, guide, *args, key=k, **kwargs))
    return jax.lax.map(run, jax.random.split(key, num), batch_size=100)


def agree(a, b, width=3.0):
    """Whether two sets of independent estimates have the same mean, by their own standard errors."""
    error = np.sqrt(np.var(a) / len(a) + np.var(b) / len(b))
    return abs(np.mean(a) - np.mean(b)) < width * error + 1e-9


def sizes(jaxpr):
    """Of every array in a program and in those that it calls."""
    for equation in jaxpr.eqns:
        yield from (int(np.prod(v.aval.shape)) for v in equation.outvars)
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda p: hasattr(p, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from sizes(inner)
