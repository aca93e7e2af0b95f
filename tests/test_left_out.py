"""What a program says of rows that are left out, by draws of a fit to all."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.handlers import seed, trace
from small_designs import family, log_evidence, without_plate

import numpyro_dgp as dgp
from numpyro_dgp.depth.fit_best import left_out, log_densities_given_draws, require_rows
from numpyro_dgp.depth.integrated_fit import fit_integrated
from numpyro_dgp.math.linalg import jitter
from numpyro_dgp.mcmc.for_mcmc import for_mcmc

KEY = jax.random.key(0)
ROWS = np.array([0.03, 0.1, 0.28, 0.4, 0.51, 0.66, 0.8, 0.97])[:, None]
VALUES = np.sin(6 * ROWS[:, 0]) + 0.3 * np.cos(25 * ROWS[:, 0])


def some_numbers(model, args, count):
    """Draws of the prior on the unconstrained scale: here logarithms, and whitened values."""
    sites = [trace(seed(for_mcmc(model), key)).get_trace(*args) for key in jax.random.split(KEY, count)]
    latent = [n for n, s in sites[0].items() if s["type"] == "sample" and not s["is_observed"]]
    positive = [n for n in latent if isinstance(sites[0][n]["fn"], dist.LogNormal)]
    stacked = {n: jnp.stack([drawn[n]["value"] for drawn in sites]) for n in latent}
    return {n: jnp.log(u) if n in positive else u for n, u in stacked.items()}


def dense_left_out(K, y):
    """Of each row given the others, by conditioning a Gaussian on them."""
    found = []
    for n in range(len(y)):
        others = np.delete(np.arange(len(y)), n)
        weights = np.linalg.solve(K[np.ix_(others, others)], K[others, n])
        found.append(dist.Normal(weights @ y[others], np.sqrt(K[n, n] - weights @ K[others, n])).log_prob(y[n]))
    return np.array(found)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("depth", [1, 2])
def test_densities_given_draws_are_those_of_dense_gaussians(depth, dtype):
    with jax.enable_x64(dtype == "float64"):
        X, y = jnp.asarray(ROWS, dtype), jnp.asarray(VALUES, dtype)
        model = family(depth, X)
        numbers = some_numbers(model, (X, y), 3) | {"noise": jnp.log(jnp.array([0.1, 0.2, 0.4], dtype))}
        found = log_densities_given_draws(model, KEY, (X, y), numbers)
        assert found.shape == (3, len(y))
        assert found.dtype == dtype
        for s in range(3):
            h, u = X, {n: v[s] for n, v in numbers.items()}
            if depth == 2:
                K = dgp.kernels.Matern52(jnp.exp(u["variance1"]), 0.4)(X, X)
                little = jitter(K.dtype, len(X)) * jnp.exp(u["variance1"])
                h = X + jnp.linalg.cholesky(K + little * jnp.eye(len(X))) @ u["f1"].reshape(-1, 1)
            K = dgp.kernels.Matern52(1.0, jnp.exp(u["scale"]))(h, h)
            K += (jnp.exp(2 * u["noise"]) + jitter(K.dtype, len(X))) * jnp.eye(len(X))
            expected = dense_left_out(np.asarray(K, float), np.asarray(y, float))
            np.testing.assert_allclose(found[s], expected, rtol=1e-4, atol=1e-4 if dtype == "float64" else 0.1)


@pytest.mark.slow
def test_layers_that_are_not_integrated_count_as_what_they_are():
    def counts(X, y=None):
        scale = numpyro.sample("scale", dist.LogNormal(-0.5, 1.0))
        f = dgp.gp("f", dgp.kernels.Matern52(1.0, scale), dgp.Points(X))
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dgp.Likelihood(f(X), lambda v: dist.Bernoulli(logits=v)), obs=y)

    X, y = jnp.asarray(ROWS), jnp.asarray(VALUES > 0).astype(int)
    numbers = some_numbers(counts, (X, y), 2)
    found = log_densities_given_draws(counts, KEY, (X, y), numbers)
    for s in range(2):
        K = dgp.kernels.Matern52(1.0, jnp.exp(numbers["scale"][s]))(X, X)
        values = jnp.linalg.cholesky(K + jitter(K.dtype, len(X)) * jnp.eye(len(X))) @ numbers["f"][s]
        np.testing.assert_allclose(found[s], dist.Bernoulli(logits=values).log_prob(y), atol=1e-3)


@pytest.mark.slow
def test_masked_rows_and_missing_entries_say_nothing():
    X, y = jnp.asarray(ROWS), jnp.stack([jnp.asarray(VALUES), jnp.cos(3 * jnp.asarray(ROWS[:, 0]))], 1)
    known = jnp.array([[1, 1], [1, 0], [0, 0], [1, 1], [0, 1], [1, 1], [1, 1], [1, 1]], bool)
    counted = jnp.arange(8) != 5

    def two(X, y=None, observed=None, rows=True):
        scale = numpyro.sample("scale", dist.LogNormal(-1.0, 0.7))
        f = dgp.gp("f", dgp.kernels.Matern52(1.0, scale), dgp.Points(jnp.asarray(ROWS)), outputs=2)
        with numpyro.plate("data", len(X)), numpyro.handlers.mask(mask=rows):
            likelihood = dgp.Likelihood(f(X), lambda v: dist.Normal(v, 0.1).to_event(1), observed=observed)
            numpyro.sample("y", likelihood, obs=y)

    args = X, y, known, counted
    numbers = some_numbers(two, args, 2)
    found = log_densities_given_draws(two, KEY, args, numbers)
    np.testing.assert_array_equal(found[:, jnp.array([2, 5])], 0.0)
    assert (found[:, jnp.array([0, 1, 3, 4, 6, 7])] != 0).all()
    kept = known & counted[:, None]
    for s in range(2):
        K = dgp.kernels.Matern52(1.0, jnp.exp(numbers["scale"][s]))(X, X)
        K = np.asarray(K + (0.1**2 + jitter(K.dtype, len(X))) * jnp.eye(len(X)))
        expected = np.zeros(8)
        for column in range(2):
            at = np.flatnonzero(kept[:, column])
            expected[at] += dense_left_out(K[np.ix_(at, at)], np.asarray(y)[at, column])
        np.testing.assert_allclose(found[s], expected, atol=2e-3)


@pytest.mark.slow
def test_it_has_to_be_plain_what_the_rows_are():
    X, y = jnp.asarray(ROWS), jnp.asarray(VALUES)

    def of_two_axes(X, y=None):
        with numpyro.plate("rows", 8, dim=-2), numpyro.plate("columns", 8):
            numpyro.sample("y", dist.Normal(numpyro.sample("a", dist.Normal()), 1.0), obs=jnp.outer(y, y))

    require_rows(family(1, X), (X, y))
    with pytest.raises(
        ValueError, match=r"a numpyro.plate of the 8 rows .* batch shapes \{'y': \(\)\}: write the plate"
    ):
        require_rows(without_plate, (X, y))
    with pytest.raises(ValueError, match=r"expected observations .* \{'y': \(8, 8\)\}: .* or weigh=\"evidence\""):
        require_rows(of_two_axes, (X, y))


@pytest.mark.slow
def test_a_point_is_a_draw():
    X, y = jnp.asarray(ROWS), jnp.asarray(VALUES)
    numbers = {n: u[:1] for n, u in some_numbers(family(1, X), (X, y), 1).items()}
    given = log_densities_given_draws(family(1, X), KEY, (X, y), numbers)
    np.testing.assert_allclose(left_out(family(1, X), KEY, (X, y), numbers), given[0], rtol=1e-6)


@pytest.mark.long
def test_draws_give_the_density_of_a_row_with_hyperparameters_integrated():
    """As a ratio of two integrals over a grid does."""
    with jax.enable_x64(True):
        X, y = jnp.asarray(ROWS), jnp.asarray(VALUES)
        without = [log_evidence(jnp.delete(X, n, 0), jnp.delete(y, n)) for n in range(len(y))]
        expected = log_evidence(X, y) - jnp.stack(without)
        model = family(1, X)
        runs = [fit_integrated(model, key, (X, y), 400, 8, 1, False) for key in jax.random.split(KEY, 4)]
        found = np.stack([left_out(model, KEY, (X, y), run.at) for run in runs])
        errors = found.std(0, ddof=1) / np.sqrt(len(runs))
        assert (errors < 0.15).all()
        assert (np.abs(found.mean(0) - expected) < 4 * errors + 0.05).all()
