"""The example of tempered training: the divergence is multiplied, nothing else, and the end is that of the bound."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
import tempered
from numpyro.infer import SVI

import numpyro_dgp as dgp
from numpyro_dgp import guides
from numpyro_dgp.optim import NaturalGradient, log_linear

KEY = jax.random.key(0)
X = jnp.linspace(-1, 1, 9)[:, None]
Y = jnp.sin(3 * X[:, 0])
Z = jnp.linspace(-1, 1, 4)[:, None]


def model(X, y=None):
    f = dgp.gp("f", dgp.kernels.RBF(1.3, 0.5), dgp.Points(Z))
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dgp.Likelihood(f(X), lambda v: dist.Normal(v, 0.3)), obs=y)


GUIDE = guides.InducingPoint(model)
START = {"f_auto_loc": jnp.array([0.3, -0.2, 0.5, 0.1]), "f_auto_scale_tril": 0.6 * jnp.eye(4)}


def divergence(params):
    m, root = params["f_auto_loc"], jnp.tril(params["f_auto_scale_tril"])
    return 0.5 * ((root**2).sum() + m @ m - 4) - jnp.log(jnp.diag(root)).sum()


class Fit(NamedTuple):
    params: Any
    losses: Any


def fitted(optimizer, steps, schedule=lambda step: 1.0):
    svi = SVI(model, GUIDE, optimizer, tempered.TemperedELBO())
    state, losses = tempered.fit(svi, KEY, steps, schedule, X, Y, init_params=START)
    return Fit(svi.get_params(state), losses)


def plain_fit(optimizer, steps):
    return dgp.fit(SVI(model, GUIDE, optimizer, dgp.ELBO()), KEY, steps, X, Y, init_params=START, progress_bar=False)


@pytest.mark.long
def test_losses_and_steps_are_those_of_a_dense_formula():
    schedule = optax.linear_schedule(0.0, 1.0, 4)
    bound = -float(dgp.ELBO().loss(KEY, START, model, GUIDE, X, Y))
    expected = [-bound + (float(schedule(step)) - 1) * float(divergence(START)) for step in range(6)]
    found = fitted(optax.sgd(0.0), 6, schedule)  # steps of length zero
    np.testing.assert_allclose(found.losses, expected, rtol=1e-6)

    def loss(loc):
        params = START | {"f_auto_loc": loc}
        return dgp.ELBO().loss(KEY, params, model, GUIDE, X, Y) + (0.3 - 1) * divergence(params)

    step = fitted(optax.sgd(0.01), 1, lambda step: 0.3).params["f_auto_loc"]
    expected = START["f_auto_loc"] - 0.01 * jax.grad(loss)(START["f_auto_loc"])
    np.testing.assert_allclose(step, expected, rtol=1e-6)


@pytest.mark.long
def test_one_is_no_temperature_and_natural_gradients_go_with_it():
    for make in (lambda: optax.adam(0.05), lambda: NaturalGradient(GUIDE, log_linear(0.01, 0.5, 10), optax.adam(0.05))):
        plain, same = plain_fit(make(), 20), fitted(make(), 20)
        np.testing.assert_allclose(same.losses, plain.losses, rtol=1e-9)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-9), same.params, plain.params)
        warm = fitted(make(), 20, optax.linear_schedule(0.0, 1.0, 10))
        assert not np.allclose(warm.losses[:5], plain.losses[:5])


@pytest.mark.slow
def test_a_constant_temperature_has_the_optimum_of_the_tempered_bound():
    """That of a Gaussian likelihood with the variance times the temperature; a natural step of 1 / 0.5 leads there."""
    result = fitted(NaturalGradient(GUIDE, 2.0, optax.sgd(0.0)), 2, lambda step: 0.5)
    A = np.linalg.solve(np.linalg.cholesky(dgp.kernels.RBF(1.3, 0.5).gram(Z) + 1.3e-6 * np.eye(4)),
                        np.asarray(dgp.kernels.RBF(1.3, 0.5)(Z, X))).T  # fmt: skip
    precision = np.eye(4) + A.T @ A / (0.5 * 0.3**2)
    mean = np.linalg.solve(precision, A.T @ np.asarray(Y) / (0.5 * 0.3**2))
    root = np.asarray(result.params["f_auto_scale_tril"])
    np.testing.assert_allclose(result.params["f_auto_loc"], mean, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(root @ root.T, np.linalg.inv(precision), rtol=1e-3, atol=1e-6)


@pytest.mark.long
def test_warm_up_ends_at_the_same_bound():
    rates = optax.cosine_decay_schedule(0.05, 1500)
    plain = plain_fit(optax.adam(rates), 1500)
    warm = fitted(optax.adam(rates), 1500, optax.linear_schedule(0.0, 1.0, 300))
    np.testing.assert_allclose(warm.losses[-1], plain.losses[-1], rtol=1e-4)
