"""The compiled start of a fit: the state of ``svi.init``, and every check of values with its message."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.infer import SVI
from numpyro.infer.autoguide import AutoNormal

import numpyro_dgp as dgp
from numpyro_dgp.inference.fit import split_arguments
from numpyro_dgp.inference.fit_start import initial_state

X = jnp.linspace(-1, 1, 12)[:, None]
Y = jnp.sin(3 * X[:, 0])


def program(X, y=None, lengthscale=0.5, low=0.0):
    kernel = dgp.kernels.RBF(1.0, numpyro.param("lengthscale", jnp.full(1, lengthscale), constraint=positive(low)))
    g = dgp.gp("g", kernel, dgp.Points(X[::4]), outputs=1)
    f = dgp.gp("f", dgp.kernels.RBF(), dgp.Points(jnp.linspace(-2, 2, 4)[:, None]))
    with numpyro.plate("data", len(X)):
        h = numpyro.sample("h", g(X))
        numpyro.sample("y", dgp.Likelihood(f(h), lambda v: dist.Normal(v, 0.1)), obs=y)


def positive(low):
    return dist.constraints.greater_than(low)


def make(model=program, guide=None, *args):
    svi = SVI(model, guide or dgp.guides.InducingPoint(model), optax.adam(0.01), dgp.ELBO())
    arrays, rebuild = split_arguments((X, Y, *args), {})
    return svi, arrays, rebuild


def count_compilations(run):
    """How many programs JAX compiles in a call."""
    found = []
    jax.monitoring.register_event_duration_secs_listener(
        listener := lambda event, _, **__: found.append(event) if event.endswith("backend_compile_duration") else None
    )
    try:
        run()
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)
    return len(found)


@pytest.mark.long
def test_the_state_is_that_of_init():
    svi, arrays, rebuild = make()
    key, given = jax.random.key(3), {"lengthscale": jnp.array([0.3])}
    for init_params in (None, given):
        found = initial_state(svi, key, rebuild, arrays, init_params)
        expected = svi.init(key, X, Y, init_params=init_params)
        assert jax.tree.structure(found) == jax.tree.structure(expected)
        for a, b in zip(jax.tree.leaves(found.optim_state), jax.tree.leaves(expected.optim_state), strict=True):
            assert (a.dtype, a.weak_type) == (b.dtype, b.weak_type)
            np.testing.assert_allclose(a, b, rtol=1e-5)
        assert (jax.random.key_data(found.rng_key) == jax.random.key_data(expected.rng_key)).all()


@pytest.mark.slow
def test_one_program_is_compiled():
    svi, arrays, rebuild = make()
    assert count_compilations(lambda: initial_state(svi, jax.random.key(0), rebuild, arrays, None)) <= 3


@pytest.mark.slow
def test_values_that_only_a_compiled_program_knows_are_checked():
    with pytest.raises(ValueError, match="RBF: expected lengthscale to be positive, got"):
        dgp.fit(make(program)[0], jax.random.key(0), 2, X, Y, jnp.float32(-0.5), -1.0, progress_bar=False)
    with pytest.raises(ValueError, match="expected observations y from 0, got -2"):
        dgp.fit(make(counts)[0], jax.random.key(0), 2, X, jnp.round(3 * Y) - 0.0, progress_bar=False)


def counts(X, y=None):
    f = dgp.gp("f", dgp.kernels.RBF(), dgp.Points(X[::4]))
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dgp.Likelihood(f(X), lambda v: dist.Poisson(jnp.exp(v))), obs=y)


@pytest.mark.long
def test_a_coarse_grid_warns_under_learned_hyperparameters():
    def model(X, y=None):
        kernel = dgp.kernels.RBF(1.0, numpyro.param("lengthscale", 0.02, constraint=positive(0.0)))
        f = dgp.gp("f", kernel, dgp.Grid(-2.0, 2.0, 8))
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dgp.Likelihood(f(X), lambda v: dist.Normal(v, 0.1)), obs=y)

    with pytest.warns(UserWarning, match="of the variance of its kernel open between the points"):
        dgp.fit(make(model)[0], jax.random.key(0), 1, X, Y, progress_bar=False)


@pytest.mark.long
def test_constraints_that_are_computed_and_guides_with_a_state_are_not_compiled():
    def model(X, y=None):
        return program(X, y, low=0.1 * jnp.ptp(X))

    svi = make(model)[0]
    result = dgp.fit(svi, jax.random.key(0), 2, X, Y, progress_bar=False)
    assert result.params["lengthscale"].item() > 0.2
    svi = make(counts, AutoNormal(counts))[0]
    result = dgp.fit(svi, jax.random.key(0), 2, X, jnp.abs(jnp.round(3 * Y)), progress_bar=False)
    assert np.isfinite(result.losses).all()
