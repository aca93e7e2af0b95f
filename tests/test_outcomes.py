"""Every likelihood that people use: moments, probabilities, draws, densities and quantiles are finite, or refused."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from sizes import mostly_long

import numpyro_dgp as dgp
from numpyro_dgp.functions.function_values import FunctionValues
from numpyro_dgp.likelihoods.outcomes import moments
from numpyro_dgp.predict.quantities import Levels, label_probabilities, predictive

F = FunctionValues(jnp.array([0.3, -0.5, 1.1]), jnp.array([0.4, 1.2, 0.05]), event_dim=0)
VECTORS = FunctionValues(jnp.array([[0.3, -0.5, 0.1], [1.0, 0.0, -1.0], [0.2, 0.2, 0.9]]), jnp.full((3, 3), 0.4))
real, positive, part, count = [0.1, -0.2, 1.0], [0.1, 0.2, 1.0], [0.1, 0.4, 0.9], [0, 2, 3]
counts, parts = [[1, 2, 0], [0, 0, 3], [1, 1, 1]], [[0.1, 0.2, 0.7], [0.3, 0.3, 0.4], [0.2, 0.2, 0.6]]
censored = np.array([True, False, True])
sigmoid, exp = jax.nn.sigmoid, jnp.exp

# conditional, observations, what is refused
FAMILIES = {
    "Normal": (lambda v: dist.Normal(v, 0.3), real, "probs"),
    "Normal, scale": (lambda v: dist.Normal(0.0, exp(v)), real, "probs"),
    "StudentT": (lambda v: dist.StudentT(4.0, v, 0.3), real, "probs"),
    "Cauchy": (lambda v: dist.Cauchy(v, 0.3), real, "probs moments"),
    "Laplace": (lambda v: dist.Laplace(v, 0.3), real, "probs"),
    "AsymmetricLaplaceQuantile": (lambda v: dist.AsymmetricLaplaceQuantile(v, 0.3, 0.1), real, "probs"),
    "Logistic": (lambda v: dist.Logistic(v, 0.3), real, "probs"),
    "Gumbel": (lambda v: dist.Gumbel(v, 0.3), real, "probs"),
    "LogNormal": (lambda v: dist.LogNormal(v, 0.3), positive, "probs"),
    "Gamma": (lambda v: dist.Gamma(2.0, exp(v)), positive, "probs"),
    "InverseGamma": (lambda v: dist.InverseGamma(3.0, exp(v)), positive, "probs"),
    "Exponential": (lambda v: dist.Exponential(exp(v)), positive, "probs"),
    "Weibull": (lambda v: dist.Weibull(exp(v), 2.0), positive, "probs"),
    "HalfNormal": (lambda v: dist.HalfNormal(exp(v)), positive, "probs"),
    "HalfCauchy": (lambda v: dist.HalfCauchy(exp(v)), positive, "probs moments"),
    "TruncatedNormal": (lambda v: dist.TruncatedNormal(v, 0.3, low=0.0), positive, "probs"),
    "TruncatedNormal, two ends": (lambda v: dist.TruncatedNormal(v, 2.0, low=0.0, high=2.0), positive, "probs"),
    "Beta": (lambda v: dist.Beta(3 * sigmoid(v), 3 - 3 * sigmoid(v)), part, "probs"),
    "BetaProportion": (lambda v: dist.BetaProportion(sigmoid(v), 3.0), part, "probs"),
    "Poisson": (lambda v: dist.Poisson(exp(v)), count, "probs"),
    "NegativeBinomial2": (lambda v: dist.NegativeBinomial2(exp(v), 3.0), count, "probs"),
    "NegativeBinomialLogits": (lambda v: dist.NegativeBinomialLogits(3.0, v), count, "probs"),
    "GammaPoisson": (lambda v: dist.GammaPoisson(3.0, exp(v)), count, "probs"),
    "ZeroInflatedPoisson": (lambda v: dist.ZeroInflatedPoisson(0.1, exp(v)), count, "probs"),
    "ZeroInflatedNegativeBinomial2": (
        lambda v: dist.ZeroInflatedNegativeBinomial2(exp(v), 3.0, gate=0.1),
        count,
        "probs",
    ),
    "HurdlePoisson": (lambda v: dist.HurdlePoisson(rate=exp(v), gate=0.2), count, "probs"),
    "Geometric": (lambda v: dist.Geometric(logits=v), count, "probs"),
    "Bernoulli": (lambda v: dist.Bernoulli(logits=v), [0, 1, 1], ""),
    "Bernoulli, probabilities": (lambda v: dist.Bernoulli(probs=sigmoid(v)), [0, 1, 1], ""),
    "Binomial": (lambda v: dist.Binomial(5, logits=v), count, "probs"),
    "BetaBinomial": (lambda v: dist.BetaBinomial(exp(v), 2.0, 5), count, "probs"),
    "OrderedLogistic": (lambda v: dist.OrderedLogistic(v, jnp.array([-0.5, 0.5])), [0, 1, 2], "moments"),
    "VonMises": (lambda v: dist.VonMises(v, 4.0), [0.1, 3.0, -2.0], "probs moments quantiles"),
    "RightCensored": (
        lambda v: dist.RightCensoredDistribution(dist.Weibull(exp(v), 2.0), censored),
        positive,
        "probs",
    ),
    "LeftCensored": (
        lambda v: dist.LeftCensoredDistribution(dist.LogNormal(v, 0.5), censored),
        positive,
        "probs",
    ),
    "MixtureSameFamily": (
        lambda v: dist.MixtureSameFamily(
            dist.Categorical(jnp.array([0.3, 0.7])), dist.Normal(jnp.stack([v, v + 1], -1), 0.3)
        ),
        real,
        "probs",
    ),
    "Categorical": (lambda v: dist.Categorical(logits=v), [0, 1, 2], "moments quantiles"),
    "RobustMax": (lambda v: dgp.likelihoods.RobustMax(v), [0, 1, 2], "moments quantiles"),
    "Multinomial": (lambda v: dist.Multinomial(3, logits=v), counts, "probs"),
    "Dirichlet": (lambda v: dist.Dirichlet(exp(v)), parts, "probs"),
    "DirichletMultinomial": (lambda v: dist.DirichletMultinomial(exp(v), 3), counts, "probs"),
    "MultivariateNormal": (lambda v: dist.MultivariateNormal(v, jnp.eye(3)), parts, "probs"),
    "Normal, columns": (lambda v: dist.Normal(v, 0.3).to_event(1), parts, "probs"),
    "Poisson, columns": (lambda v: dist.Poisson(exp(v)).to_event(1), counts, "probs"),
}
OF_VECTORS = list(FAMILIES)[list(FAMILIES).index("Categorical") :]


@pytest.mark.slow
@pytest.mark.parametrize("name", mostly_long(["Normal", "VonMises"], FAMILIES))
def test_finite_or_refused(name, key):
    conditional, y, refused = FAMILIES[name]
    values, integrate = (VECTORS, dgp.likelihoods.MonteCarlo(20)) if name in OF_VECTORS else (F, None)
    likelihood = dgp.Likelihood(values, conditional, integrate=integrate)
    asked = {
        "moments": lambda: jnp.stack(moments(likelihood)),
        "probs": lambda: label_probabilities(likelihood),
        "draws": lambda: likelihood.sample(key, (2,)),
        "density": lambda: jnp.stack([likelihood.log_prob(jnp.array(y)), likelihood.log_marginal(jnp.array(y))]),
        "quantiles": lambda: Levels.of([0.1, 0.9])(jax.tree.map(lambda a: a[None], predictive(likelihood, key))),
    }
    for what, ask in asked.items():
        if what in refused.split():
            with pytest.raises(ValueError, match=r"posterior\.") as error:
                ask()
            assert len(str(error.value)) < 400
        else:
            found = np.asarray(ask())
            assert np.isfinite(found).all(), what
            if what == "quantiles":
                assert (found[0] <= found[1]).all()


@pytest.mark.long
def test_moments_that_do_not_exist_are_said(key):
    def model(X, y=None):
        f = dgp.gp("f", dgp.kernels.RBF(), dgp.Points(jnp.linspace(-2, 2, 5)[:, None]))
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dgp.Likelihood(f(X), lambda v: dist.StudentT(1.5, v, 0.3)), obs=y)

    posterior = dgp.Posterior(model, samples={"f": jnp.zeros((2, 5))})
    with pytest.warns(UserWarning, match="mean or variance of y is infinite or NaN at 3 of 3 entries"):
        posterior.predict(key, jnp.zeros((3, 1)))
    assert np.isfinite(posterior.quantile(key, 0.9, jnp.zeros((3, 1)))).all()
