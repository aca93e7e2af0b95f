"""The one-vs-each bound of the softmax against quadrature and the softmax itself."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import pytest
from numpyro import handlers
from scipy.integrate import quad
from scipy.stats import norm

import numpyro_dgp as dgp
from numpyro_dgp.functions.function_values import FunctionValues

rng = np.random.default_rng(0)
N, P = 3, 4
MEANS, VARIANCES, Y = rng.normal(size=(N, P)), rng.uniform(0.2, 2.0, (N, P)), np.array([2, 0, 3])
F = FunctionValues(jnp.array(MEANS), jnp.array(VARIANCES))


def by_quadrature():
    def term(n, c):
        mean, scale = MEANS[n, Y[n]] - MEANS[n, c], np.sqrt(VARIANCES[n, Y[n]] + VARIANCES[n, c])
        return quad(lambda d: -np.logaddexp(0, -d) * norm.pdf(d, mean, scale), mean - 12 * scale, mean + 12 * scale)[0]

    return np.array([sum(term(n, c) for c in range(P) if c != Y[n]) for n in range(N)])


@pytest.mark.slow
def test_the_bound_is_a_sum_over_pairs():
    likelihood = dgp.Likelihood(F, dgp.likelihoods.OneVsEach)
    assert repr(likelihood) == "Likelihood(OneVsEach, own integral)"
    np.testing.assert_allclose(likelihood.log_prob(jnp.array(Y)), by_quadrature(), atol=1e-4)


@pytest.mark.long
def test_single_classes_are_without_bias_and_all_are_below_the_softmax():
    exact = by_quadrature()
    one_each = [F_others([c]).log_prob(jnp.array(Y)) for c in range(P)]
    np.testing.assert_allclose(np.mean(one_each, 0), exact, atol=1e-4)
    draws = F.sample(jax.random.key(0), (20_000,))
    softmax = dgp.likelihoods.OneVsEach(draws).log_prob(jnp.array(Y)).mean(0)
    assert (exact < softmax).all()


def F_others(others):
    return dgp.Likelihood(F, lambda v: dgp.likelihoods.OneVsEach(v, jnp.array(others)))


@pytest.mark.long
def test_two_classes_are_the_logistic_model():
    two = FunctionValues(F.loc[:, :2], F.conditional_variance[:, :2])
    one = FunctionValues(F.loc[:, 1] - F.loc[:, 0], F.conditional_variance[:, :2].sum(1), event_dim=0)
    y = jnp.array([0, 1, 1])
    mine = dgp.Likelihood(two, dgp.likelihoods.OneVsEach).log_prob(y)
    theirs = dgp.Likelihood(one, lambda v: numpyro.distributions.Bernoulli(logits=v)).log_prob(y)
    np.testing.assert_allclose(mine, theirs, rtol=1e-6)


@pytest.mark.long
def test_a_program_with_a_part_of_the_classes():
    X = jnp.linspace(-1, 1, 12)[:, None]
    labels = jnp.arange(12) // 2

    def model(X, y=None, part=True):
        f = dgp.gp("f", dgp.kernels.RBF(), dgp.Points(np.linspace(-1, 1, 6)[:, None]), outputs=6)
        others = jax.random.randint(numpyro.prng_key(), (2,), 0, 6) if part else None
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dgp.Likelihood(f(X), lambda v: dgp.likelihoods.OneVsEach(v, others)), obs=y)

    guide = dgp.guides.InducingPoint(model)
    params = {
        "f_auto_loc": jnp.array(rng.normal(size=(6, 6))),
        "f_auto_scale_tril": jnp.broadcast_to(jnp.eye(6), (6, 6, 6)),
    }

    def loss(key, part):
        return handlers.seed(dgp.ELBO().loss, key)(key, params, model, guide, X, labels, part=part)

    draws = jax.jit(jax.vmap(lambda key: loss(key, True)))(jax.random.split(jax.random.key(0), 500))
    assert abs(draws.mean() - loss(jax.random.key(0), False)) < 5 * draws.std() / 500**0.5
    probs = dgp.Posterior(model, guide, params).probs(jax.random.key(1), X[:3])
    np.testing.assert_allclose(probs.sum(1), 1, rtol=1e-5)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: dgp.likelihoods.OneVsEach(jnp.zeros((3, 1))), "OneVsEach: expected values .* of two classes or more"),
        (
            lambda: dgp.likelihoods.OneVsEach(F.loc, jnp.ones(2)),
            r"labels of shape \(B,\), got float\d+ of shape \(2,\)",
        ),
        (lambda: dgp.likelihoods.OneVsEach(F.loc, 1), r"got int\d+ of shape \(\): jax.random.randint\("),
    ],
)
def test_refusals(build, message):
    with pytest.raises(ValueError, match=message):
        build()
