"""Monotone layers: integrals of positive rates between knots, and slopes whose sign is observed."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.infer import MCMC, NUTS, SVI

import numpyro_dgp as dgp

rng = np.random.default_rng(0)
KNOTS = jnp.array([0.0, 0.5, 0.8, 2.0])
RATES = jnp.array([1.0, 3.0, 0.2, 2.0])
X = jnp.array(np.sort(rng.uniform(0, 1, size=(20, 1)), 0))
Y = jnp.sin(12 * X[:, 0] ** 3)


@pytest.mark.smoke
def test_it_is_the_integral():
    x = jnp.array([-1.0, 0.0, 0.3, 0.5, 1.1, 2.0, 3.0])
    found, slopes = jax.jit(jax.vmap(jax.value_and_grad(lambda x: dgp.functions.cumulative(x, KNOTS, RATES))))(x)
    for end, value in zip(x, found, strict=True):
        grid = np.linspace(0, end, 20001)
        assert value == pytest.approx(np.trapezoid(np.interp(grid, KNOTS, RATES), grid), abs=1e-6)
    np.testing.assert_allclose(slopes, np.interp(x, KNOTS, RATES), atol=1e-12)  # also at the knots


@pytest.mark.parametrize(
    ("args", "match"),
    [
        (
            (X, KNOTS[:, None], RATES),
            r"knots \(Q,\) of one input and a rate for each, got \(4, 1\) and \(4,\)",
        ),
        ((X, KNOTS, RATES[1:]), r"got \(4,\) and \(3,\)"),
        ((X, KNOTS[:1], RATES[:1]), r"got \(1,\) and \(1,\)"),
        ((X, KNOTS[::-1], RATES), "expected knots that increase"),
        ((X.at[0].set(jnp.nan), KNOTS, RATES), "expected finite inputs"),
    ],
)
def test_wrong_calls(args, match):
    with pytest.raises(ValueError, match=match):
        dgp.functions.cumulative(*args)


def warped(X, y=None):
    """A two-layer model whose hidden layer is an increasing function of its input."""
    knots = jnp.linspace(0, 1, 12)
    rate = dgp.gp("rate", dgp.kernels.RBF(2.0, 0.4), dgp.Points(jnp.linspace(0, 1, 5)[:, None]))
    g = dgp.gp("g", dgp.kernels.RBF(1.0, 0.5), dgp.Points(jnp.linspace(0, 3, 10)[:, None]))
    log_rate = numpyro.sample("log_rate", rate.joint(knots[:, None]))
    h = numpyro.deterministic("h", dgp.functions.cumulative(X[:, 0], knots, jnp.exp(log_rate)))
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dgp.Likelihood(g(h[:, None]), lambda v: dist.Normal(v, 0.1)), obs=y)


@pytest.mark.slow
def test_of_increasing_rates_it_is_convex(key):
    """Where rates are integrals of positive numbers themselves, slopes rise; for any positive rates they do not."""
    knots, x = jnp.linspace(0, 1, 12), jnp.linspace(-0.5, 1.5, 60)
    bends = jnp.exp(jax.random.normal(key, knots.shape))
    slopes = jnp.diff(dgp.functions.cumulative(x, knots, dgp.functions.cumulative(knots, knots, bends) - 1.0))
    assert (jnp.diff(slopes) > -1e-12).all()
    assert slopes[0] < 0 < slopes[-1]
    assert (jnp.diff(jnp.diff(dgp.functions.cumulative(x, knots, bends))) < -1e-3).any()


@pytest.mark.long
def test_a_monotone_layer_under_a_guide():
    guide = dgp.guides.InducingPoint(warped)
    dgp.testing.check_guide(warped, guide, X, Y, num=50)


@pytest.mark.long
def test_a_monotone_layer_under_a_chain():
    program = dgp.for_mcmc(warped)
    mcmc = MCMC(NUTS(program), num_warmup=3, num_samples=3, progress_bar=False)
    mcmc.run(jax.random.key(0), X, Y)
    assert (jnp.diff(mcmc.get_samples()["h"], axis=1) > 0).all()


@pytest.mark.long
def test_signs_of_slopes_make_a_function_increasing():
    x = jnp.linspace(0, 1, 8)[:, None]
    y = jnp.array([0.0, 0.3, 0.2, 0.25, 0.15, 0.5, 0.9, 1.0])

    def model(x, y, at=None):
        f = dgp.gp("f", dgp.kernels.RBF(1.0, 0.3), dgp.Points(jnp.linspace(0, 1, 10)[:, None]))
        with numpyro.plate("data", len(x)):
            numpyro.sample("y", dgp.Likelihood(f(x), lambda v: dist.Normal(v, 0.1)), obs=y)
        if at is not None:
            with numpyro.plate("signs", len(at)):
                up = dgp.Likelihood(f.grad(at), lambda v: dist.Bernoulli(logits=10 * v))
                numpyro.sample("up", up, obs=jnp.ones(len(at)))

    lowest = []
    for at in (None, jnp.linspace(0, 1, 15)[:, None]):
        guide = dgp.guides.InducingPoint(model)
        svi = SVI(model, guide, dgp.optim.NaturalGradient(guide, 0.3, optax.sgd(0.0)), dgp.ELBO())
        params = svi.run(jax.random.key(0), 60, x, y, at, progress_bar=False).params
        f, _ = dgp.Posterior(model, guide, params, site="y").layers(jax.random.key(0), x, None, at)["y"]
        lowest.append(float(f.grad(jnp.linspace(0.05, 0.95, 30)[:, None]).mean.min()))
    assert lowest[0] < -0.5 < -0.05 < lowest[1]
