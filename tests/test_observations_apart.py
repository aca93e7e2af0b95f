"""Programs that look at the observations: a prediction has none, and is another program than that of the fit."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.infer import MCMC, NUTS, SVI
from numpyro.infer.autoguide import AutoNormal

import numpyro_dgp as dgp
from numpyro_dgp.analysis.observations_apart import require_observations_apart

KEY = jax.random.key(0)
Z = jnp.linspace(0.0, 1.0, 3)[:, None]
X = jnp.linspace(0.0, 1.0, 5)[:, None]
Y = jnp.sin(4 * X[:, 0]) + 5
ConstantMean = dgp.means.ConstantMean


def program(
    mean=lambda y: None,
    variance=lambda y: 1.0,
    conditional=lambda y: lambda v: dist.Normal(v, 0.1),
    inputs=lambda X, y: X,
    points=lambda X, y: Z,
    value=lambda y: y,
    exact=False,
):
    def model(X, y):
        kernel, at = dgp.kernels.RBF(variance(y), 0.4), inputs(X, y)
        if exact:
            numpyro.sample("y", dgp.gp("f", kernel, None, mean=mean(y))(at, noise=0.1), obs=value(y))
            return
        f = dgp.gp("f", kernel, dgp.Points(points(X, y)), mean=mean(y))
        with numpyro.plate("data", len(X)) as rows:
            numpyro.sample("y", dgp.Likelihood(f(at[rows]), conditional(y)), obs=value(y)[rows])

    return model


def hidden(X, y):
    f = dgp.gp("f", dgp.kernels.RBF(), dgp.Points(Z), outputs=1, mean=lambda x: x * y.std())
    g = dgp.gp("g", dgp.kernels.RBF(), dgp.Points(Z))
    with numpyro.plate("data", len(X)):
        h = numpyro.sample("h", f(X))
        numpyro.sample("y", dgp.Likelihood(g(h), lambda v: dist.Normal(v, 0.1)), obs=y)


LOOKS = {
    "the mean of y": program(mean=lambda y: ConstantMean(y.mean())),
    "a mean function that closes over it": program(mean=lambda y: lambda x: 0 * x + y.mean()),
    "a median": program(mean=lambda y: ConstantMean(jnp.median(y))),
    "the first one": program(mean=lambda y: ConstantMean(y[0])),
    "without NaN": program(mean=lambda y: ConstantMean(jnp.nanmean(y))),
    "a variance": program(variance=lambda y: y.var()),
    "a variance of an exact process": program(variance=lambda y: y.var(), exact=True),
    "noise": program(conditional=lambda y: lambda v: dist.Normal(v, 0.1 * y.std())),
    "an offset": program(conditional=lambda y: lambda v: dist.Normal(v + y.max(), 0.1)),
    "a quantile": program(conditional=lambda y: lambda v: dist.Normal(v + jnp.quantile(y, 0.9), 0.1)),
    "inputs": program(inputs=lambda X, y: X * y.std()),
    "inducing inputs": program(points=lambda X, y: X[jnp.argsort(y)[:3]]),
    "a hidden layer": hidden,
}


@pytest.mark.parametrize("name", LOOKS)
def test_what_all_rows_share_does_not_depend_on_observations(name):
    with pytest.raises(ValueError, match=r"only observed values depend on the observations, got .* of 'y'"):
        require_observations_apart(LOOKS[name], (X, Y), {})


def autoregression(X, y):
    f = dgp.gp("f", dgp.kernels.RBF(), dgp.Points(Z))
    with numpyro.plate("data", len(y) - 1):
        numpyro.sample("y", dgp.Likelihood(f(y[:-1, None]), lambda v: dist.Normal(v, 0.1)), obs=y[1:])


def priors(X, y):
    """Where the posterior has the values, nothing of a prediction depends on their prior or starting point."""
    m, scale = numpyro.sample("m", dist.Normal(y.mean(), y.std())), numpyro.param("scale", y.std())
    f = dgp.gp("f", dgp.kernels.RBF(), dgp.Points(Z), mean=ConstantMean(m))
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dgp.Likelihood(f(X), lambda v: dist.Normal(v, scale)), obs=y)


def in_turn(X, y):
    """A site below another observed one: a prediction draws the value."""
    f = dgp.gp("f", dgp.kernels.RBF(), dgp.Points(Z))
    with numpyro.plate("data", len(X)):
        value = numpyro.sample("y", dgp.Likelihood(f(X), lambda v: dist.Normal(v, 0.1)), obs=y)
    numpyro.sample("total", dist.Normal(value.mean(), 1.0), obs=0.0)


def equation(X, y):
    """Observations that are a function of the inputs."""
    f = dgp.gp("f", dgp.kernels.RBF(), dgp.Points(X[::2]))
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dgp.Likelihood(f(X), lambda v: dist.Normal(v, 0.1)), obs=jnp.sin(X[:, 0]))


def gaps(X, y):
    f, seen = dgp.gp("f", dgp.kernels.RBF(), dgp.Points(Z)), ~jnp.isnan(y)
    with numpyro.plate("data", len(X)), numpyro.handlers.mask(mask=seen):
        y = jnp.where(seen, y, 0.0)
        numpyro.sample("y", dgp.Likelihood(f(X), lambda v: dist.Normal(v, 0.1), observed=seen), obs=y)


APART = {
    "as most": program(),
    "exact": program(exact=True),
    "standardised values": program(value=lambda y: (y - y.mean()) / y.std()),
    "censored rows": program(conditional=lambda y: lambda v: dist.Normal(v, jnp.where(y < 5, 1.0, 2.0))),
    "autoregression": autoregression,
    "priors and starts": priors,
    "in turn": in_turn,
    "an equation": equation,
    "gaps": gaps,
}


@pytest.mark.parametrize("name", APART)
def test_other_programs_pass(name):
    require_observations_apart(APART[name], (X, Y), {})


def both(X, y=None):
    """The fit has the mean and the variance of y, a prediction 0 and 1."""
    m, v = (0.0, 1.0) if y is None else (y.mean(), y.var())
    scale = numpyro.sample("scale", dist.LogNormal())
    f = dgp.gp("f", dgp.kernels.RBF(v, 0.4), dgp.Points(Z), mean=ConstantMean(m))
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dgp.Likelihood(f(X), lambda v: dist.Normal(v, scale)), obs=y)


def without_hyperparameters(X, y=None):
    m = 0.0 if y is None else y.mean()
    f = dgp.gp("f", dgp.kernels.RBF(1.0, 0.4), dgp.Points(Z))
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dgp.Likelihood(f(X), lambda v: dist.Normal(v + m, 0.1)), obs=y)


def svi(guide, model=both):
    return SVI(model, guide(model), optax.adam(0.1), dgp.ELBO())


def chain(kernel):
    return lambda: MCMC(kernel(), num_warmup=1, num_samples=1, progress_bar=False).run(KEY, X, Y)


PATHS = {
    "fit": lambda: dgp.fit(svi(dgp.guides.InducingPoint), KEY, 1, X, Y, progress_bar=False),
    "no latents but v": lambda: svi(dgp.guides.InducingPoint, without_hyperparameters).init(KEY, X, Y),
    "points": lambda: svi(partial(dgp.guides.InducingPoint, inducing=dgp.guides.Delta()), both).init(KEY, X, Y),
    "svi.run of NumPy": lambda: svi(dgp.guides.MeanField).run(KEY, 1, np.array(X), np.array(Y), progress_bar=False),
    "an autoguide": lambda: svi(AutoNormal).run(KEY, 1, X, Y, progress_bar=False),
    "Collapsed": lambda: svi(dgp.guides.Collapsed).init(KEY, X, Y),
    "Collapsed.on": lambda: dgp.guides.Collapsed(both).on(X, Y),
    "for_mcmc": chain(lambda: NUTS(dgp.for_mcmc(both))),
    "Gibbs": chain(lambda: dgp.mcmc.Gibbs(both)),
    "SGHMC": chain(lambda: dgp.mcmc.SGHMC(both)),
}


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS)
def test_every_fit_refuses_a_program_that_looks(path):
    with pytest.raises(ValueError, match="only observed values depend on the observations"):
        PATHS[path]()
