"""Subclasses of NumPyro's families with a density of their own, against quadrature of that density."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax.scipy.stats import norm

import numpyro_dgp as dgp
from numpyro_dgp.functions.function_values import FunctionValues
from numpyro_dgp.inference.white_numbers import coordinates_of
from numpyro_dgp.likelihoods.families import known_divergence
from numpyro_dgp.likelihoods.outcomes import moments
from numpyro_dgp.likelihoods.tails import log_density
from numpyro_dgp.mcmc.gaussian_blocks import _is_gaussian
from numpyro_dgp.predict.quantities import is_gaussian


class Tobit(dist.Normal):
    """Of what is below -0.4, only that it is."""

    def log_prob(self, value):
        return jnp.where(value <= -0.4, norm.logcdf(value, self.loc, self.scale), super().log_prob(value))


def tempered(family):
    """The family with half of its log density."""
    return type(f"Tempered{family.__name__}", (family,), {"log_prob": lambda self, y: 0.5 * family.log_prob(self, y)})


class Softer(dgp.likelihoods.RobustMax):
    """A density of its own, under the expectation of the class above."""

    def log_prob(self, value):
        return jax.nn.log_softmax(self.values)[..., 0] + 0.0 * value


CASES = {
    "Tobit": (lambda v: Tobit(v, 0.3), -0.4),
    "Poisson": (lambda v: tempered(dist.Poisson)(jnp.exp(v)), 2),
    "Exponential": (lambda v: tempered(dist.Exponential)(jnp.exp(-v)), 1.3),
    "Gamma": (lambda v: tempered(dist.Gamma)(2.0, jnp.exp(-v)), 1.3),
    "LogNormal": (lambda v: tempered(dist.LogNormal)(v, 0.5), 1.3),
    "VonMises": (lambda v: tempered(dist.VonMises)(v, 2.0), 0.4),
    "Weibull": (lambda v: tempered(dist.Weibull)(jnp.exp(v), 1.7), 1.3),
    "Laplace": (lambda v: tempered(dist.Laplace)(v, 1.5), 0.4),
    "censored": (lambda v: dist.RightCensoredDistribution(tempered(dist.Exponential)(jnp.exp(v)), 0), 1.3),
    "columns": (lambda v: Tobit(v, 0.3).to_event(1), -0.4),
}
MEAN, VARIANCE = 0.2, 0.5


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_expectations_are_those_of_the_density_of_the_subclass(name):
    conditional, y = CASES[name]
    columns = name == "columns"
    shape = (1, 1) if columns else (1,)
    f_x = FunctionValues(jnp.full(shape, MEAN), jnp.full(shape, VARIANCE), event_dim=int(columns))
    likelihood = dgp.Likelihood(f_x, conditional)
    z = jnp.linspace(-10, 10, 20_001)
    weights = norm.pdf(z) * (z[1] - z[0])
    v = MEAN + np.sqrt(VARIANCE) * z
    log_p = conditional(v[:, None, None] if columns else v[:, None]).log_prob(jnp.full((1, *shape), y)).reshape(-1)
    bound, density = likelihood.log_prob(jnp.full(shape, y)), likelihood.log_marginal(jnp.full(shape, y))
    np.testing.assert_allclose(bound, weights @ log_p, rtol=1e-2 if name == "Laplace" else 1e-4)
    np.testing.assert_allclose(density, jnp.log(weights @ jnp.exp(log_p)), atol=1e-6)
    assert "closed form" not in repr(likelihood)
    assert likelihood.normal_form() is None


@pytest.mark.slow
def test_two_functions():
    f, g = (FunctionValues(jnp.full(1, m), jnp.full(1, 0.2), event_dim=0) for m in (0.2, -1.0))
    nodes = dgp.likelihoods.GaussHermite(60).nodes(jnp.zeros(()), jnp.full((), 0.2))
    v, s = (a.ravel() for a in jnp.meshgrid(0.2 + nodes.points, nodes.points - 1.0))
    weights = jnp.add.outer(nodes.log_weights, nodes.log_weights).ravel()
    own = dgp.Likelihood((f, g), lambda v, s: Tobit(v, jnp.exp(s)), integrate=dgp.likelihoods.GaussHermite(30))
    expected = (jnp.exp(weights) * Tobit(v, jnp.exp(s)).log_prob(-0.4)).sum()
    np.testing.assert_allclose(own.log_prob(jnp.full(1, -0.4)), expected, rtol=1e-4)


def test_an_expectation_belongs_to_the_density_it_was_written_for():
    classes = FunctionValues(jnp.array([[0.3, -0.5]]), jnp.full((1, 2), 0.2))
    assert "own" in repr(dgp.Likelihood(classes, dgp.likelihoods.RobustMax))
    assert "own" not in repr(dgp.Likelihood(classes, Softer))


@pytest.mark.slow
def test_what_asks_for_a_gaussian_gets_one():
    for fn, known in (dist.Normal(), True), (tempered(dist.Normal)(), False):
        assert is_gaussian(fn.expand([3]).to_event(1)) == known
        assert _is_gaussian(fn.expand([3]).to_event(1)) == known
        assert (coordinates_of(fn) is not None) == known
    shifted = type("Shifted", (dist.Normal,), {"mean": property(lambda self: self.loc + 1.0)})
    f_x = FunctionValues(jnp.zeros(1), jnp.ones(1), event_dim=0)
    assert not is_gaussian(dgp.Likelihood(f_x, lambda v: shifted(v, 0.3)))
    np.testing.assert_allclose(dgp.Likelihood((f_x, f_x), lambda v, w: shifted(v + w, 0.3)).mean, 1.0, rtol=1e-6)
    known = type("Known", (dist.Cauchy,), {"mean": property(lambda d: d.loc), "variance": property(lambda d: d.scale)})
    assert moments(known(1.0, 2.0)) == (1.0, 2.0)


def test_divergences_are_those_of_the_families():
    q = dist.Normal(0.3, 0.5)
    np.testing.assert_allclose(known_divergence(q, dist.Normal()), dist.kl_divergence(q, dist.Normal()))
    for p in tempered(dist.Normal)(), tempered(dist.Normal)(jnp.zeros(2), 1.0).to_event(1):
        with pytest.raises(NotImplementedError):
            known_divergence(q.expand(p.shape()).to_event(p.event_dim) if p.event_dim else q, p)
    # of a point it is the density of the prior itself
    np.testing.assert_allclose(known_divergence(dist.Delta(0.4), Tobit()), -Tobit().log_prob(0.4))


def test_tails_belong_to_a_distribution_function():
    class Flat(dist.Normal):
        def cdf(self, value):
            return jnp.full_like(value, 0.25)

    truncated = dist.LeftTruncatedDistribution(Flat(), 0.0)
    np.testing.assert_allclose(log_density(truncated, 0.3), truncated.log_prob(0.3))


@pytest.mark.slow
def test_bounds_and_chains_see_the_density():
    """What a guide integrates in closed form for a Normal, it does not for the subclass."""
    X, y = jnp.linspace(0, 1, 4)[:, None], jnp.array([-0.4, 0.1, 0.5, -0.4])

    def program(conditional):
        def model(X, y=None):
            f = dgp.gp("f", dgp.kernels.RBF(), dgp.Points(X[::2]))
            with numpyro.plate("data", len(X)):
                numpyro.sample("y", dgp.Likelihood(f(X), conditional), obs=y)

        return model

    normal, tobit = program(lambda v: dist.Normal(v, 0.3)), program(lambda v: Tobit(v, 0.3))
    v = {"f": jnp.array([0.2, -0.3])}
    with numpyro.handlers.seed(rng_seed=0), numpyro.handlers.substitute(data=v):
        site = numpyro.handlers.trace(dgp.for_mcmc(tobit)).get_trace(X, y)["y"]
        fn = site["fn"]
        at_v = numpyro.handlers.trace(tobit).get_trace(X, y)["y"]["fn"]
    nodes = dgp.likelihoods.GaussHermite(100).nodes(at_v.f_x.loc, at_v.f_x.variance)
    np.testing.assert_allclose(fn.log_prob(y), nodes.mean(Tobit(nodes.points, 0.3).log_prob(y)), rtol=1e-3)
    optimum = dgp.guides.Collapsed(normal)
    assert jnp.isfinite(dgp.ELBO().loss(jax.random.key(0), {}, normal, optimum, X, y))
    with pytest.raises(ValueError, match="expected a Gaussian likelihood at 'y'"):
        dgp.ELBO().loss(jax.random.key(0), {}, tobit, dgp.guides.Collapsed(tobit), X, y)
