"""Mixtures of posteriors of several programs: shares of draws, probabilities and quantiles."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import numpyro_dgp as dgp
from numpyro_dgp.depth.integrated_fit import IntegratedFit
from numpyro_dgp.depth.weighted_posterior import WeightedPosterior, weighed_by_evidence

KEY = jax.random.key(0)
Z = jnp.linspace(0, 1, 3)[:, None]
NEW = jnp.array([[0.1], [2.0]])


def program(conditional, outputs=None, variance=1.0):
    def model(X, y=None):
        f = dgp.gp("f", dgp.kernels.RBF(variance), dgp.Points(Z), outputs=outputs)
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dgp.Likelihood(f(X), conditional), obs=y)

    return model


def weighted(posteriors, weights=(0.75, 0.25)):
    parts = {i: IntegratedFit(posterior, 0.0, 0.0, 5) for i, posterior in enumerate(posteriors, 1)}
    return WeightedPosterior(parts, dict(zip(parts, weights, strict=True)))


def drawn(*conditionals, outputs=None):
    """Programs with twenty draws each, of values at -1 and at 1."""
    shape = (20, 3) if outputs is None else (20, outputs, 3)
    values = jnp.full(shape, -1.0), jnp.full(shape, 1.0)
    programs = [program(conditional, outputs) for conditional in conditionals]
    return [dgp.Posterior(model, samples={"f": v}) for model, v in zip(programs, values, strict=True)]


@pytest.mark.long
def test_programs_without_draws_are_mixed_by_default():
    """Each is at its mode: of one draw only one would predict."""
    posteriors = []
    for value in (0.0, 1.0):
        model = program(lambda v, value=value: dist.Normal(v + value, 0.1), variance=1e-6)
        posteriors.append(dgp.Posterior(model, dgp.guides.Collapsed(model).on(Z, jnp.full(3, value))))
    mixture = weighted(posteriors, (0.7, 0.3))
    found = mixture.predict(KEY, NEW)
    assert found.means.shape == (100, 2)
    np.testing.assert_allclose(found.mean, 0.3, atol=1e-3)
    np.testing.assert_allclose(found.variance, 0.7 * 0.3 + 0.01, rtol=1e-2)
    assert mixture.sample(KEY, NEW).shape == (100, 2)
    assert weighted(posteriors, (0.0, 1.0)).predict(KEY, NEW).means.shape == (1, 2)


@pytest.mark.long
def test_probabilities_have_the_weights():
    posteriors = drawn(*2 * [lambda v: dist.Bernoulli(logits=2 * v)])
    mixture = weighted(posteriors)
    p, q = (posterior.probs(KEY, NEW) for posterior in posteriors)
    found = mixture.probs(KEY, NEW)
    np.testing.assert_allclose(found, 0.75 * p + 0.25 * q, rtol=1e-6)
    at = np.array([found[0, 0] - 0.01, found[0, 0] + 0.01])
    quantiles = mixture.quantile(KEY, at, NEW)
    np.testing.assert_array_equal(quantiles[:, 0], [0, 1])
    assert jnp.issubdtype(quantiles.dtype, jnp.integer)


@pytest.mark.long
def test_quantiles_of_counts():
    posteriors = drawn(*2 * [lambda v: dist.Poisson(20 * jnp.exp(v))])
    found = weighted(posteriors).quantile(KEY, [[0.05, 0.5, 0.99]], NEW, X_variance=0.01)
    assert found.shape == (1, 3, 2)
    assert jnp.issubdtype(found.dtype, jnp.integer)
    low, high = (posterior.quantile(KEY, [0.5, 0.96], NEW, X_variance=0.01) for posterior in posteriors)
    assert (found[0, 1] < low[1] + 3).all()  # two thirds of the program with the larger weight
    assert (found[0, 2, 0] > high[0, 0]).all()  # 0.96 of the other
    alone = weighted(posteriors, (1.0, 0.0)).quantile(KEY, 0.5, NEW)
    np.testing.assert_allclose(alone, posteriors[0].quantile(KEY, 0.5, NEW), atol=1)


def normal(v):
    return dist.Normal(v, 0.1)


def counts(v):
    return dist.Poisson(jnp.exp(v))


def classes(v):
    return dist.Categorical(logits=v)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "message"),
    [
        *(
            (call, r"^WeightedPosterior[.]\w+: expected a PRNG key, got 0: jax.random.key")
            for call in (
                lambda: weighted(drawn(normal, normal)).predict(0, NEW),
                lambda: weighted(drawn(normal, normal)).log_density(0, jnp.zeros(2), NEW),
                lambda: weighted(drawn(normal, normal)).quantile(0, 0.5, NEW),
                lambda: weighted(drawn(normal, normal)).functions(0),
            )
        ),
        (lambda: weighted(drawn(normal, normal)).quantile(KEY, 5, NEW), "expected levels between 0 and 1, got 5"),
        (lambda: weighted(drawn(normal, normal)).probs(KEY, NEW), "an observed site with one label of K per datum"),
        (lambda: weighted(drawn(classes, classes, outputs=3)).quantile(KEY, 0.5, NEW), ".*order"),
        (
            lambda: weighted(drawn(normal, counts)).quantile(KEY, 0.5, NEW),
            r"expected a y of one kind by all programs, .* take quantiles of posterior\.sample",
        ),
    ],
)
def test_wrong_calls(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.slow
def test_programs_with_hidden_columns_have_the_odds_of_their_layers():
    """A pair counts by its layers, and is shown as it is given."""
    posterior = dgp.Posterior(lambda: None, samples={"a": jnp.zeros(4)})
    parts = {d: IntegratedFit(posterior, 0.0, 0.0, 5) for d in (1, (2, 1), 2, (3, 2))}
    found = weighed_by_evidence(parts, 0.5, 0.0)
    np.testing.assert_allclose(list(found.weights.values()), np.array([0.5, 0.25, 0.25, 0.125]) / 1.125)
    assert list(found.weights) == list(parts)
    lines = repr(found).splitlines()
    assert [line[:6] for line in lines] == ["layers", "     1", "(2, 1)", "     2", "(3, 2)"]
    assert {len(line) for line in lines[1:]} == {len(lines[1])}
