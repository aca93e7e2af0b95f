"""The example of quasi-random numbers for hidden layers: unbiased, even over particles, and worth it."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer.elbo import Trace_ELBO
from quasi_random import EvenELBO, EvenlyOverParticles
from scipy.special import ndtr
from scipy.stats import kstest
from scipy.stats.qmc import discrepancy

import numpyro_dgp as dgp
from numpyro_dgp import guides as G

KEY = jax.random.key(0)
X = jnp.linspace(-1, 1, 5)[:, None]
Y = jnp.sin(3 * X[:, 0])
Z = jnp.linspace(-1, 1, 4)[:, None]


def program(X, y=None):
    """Two hidden layers, of two columns and one, and a latent."""
    f = dgp.gp(
        "f", dgp.kernels.RBF(0.05, 0.5), dgp.Points(jnp.hstack([Z, -Z])), outputs=2, mean=dgp.means.IdentityMean()
    )
    g = dgp.gp("g", dgp.kernels.RBF(0.05, 0.5), dgp.Points(jnp.hstack([Z, Z**2])), outputs=1)
    e = dgp.gp("e", dgp.kernels.RBF(1.3, 0.5), dgp.Points(Z))
    with numpyro.plate("data", len(X)):
        h = numpyro.sample("h", f(dgp.latent("w", X, 1)))
        k = numpyro.sample("k", g(h))
        numpyro.sample("y", dgp.Likelihood(e(k), lambda v: dist.Normal(v, 0.3)), obs=y)


GUIDE = G.InducingPoint(program)


def fitted(dtype=float):
    rng = np.random.default_rng(1)
    params = {}
    for name, shape in (("f", (2, 4)), ("g", (1, 4)), ("e", (4,))):
        params[f"{name}_auto_loc"] = rng.normal(size=shape)
        params[f"{name}_auto_scale_tril"] = np.broadcast_to(0.3 * np.eye(4), (*shape, 4))
    params |= {"w_auto_loc": 0.3 * rng.normal(size=(5, 1)), "w_auto_scale": np.full((5, 1), 0.2)}
    return jax.tree.map(lambda a: jnp.array(a, dtype), params)


def losses(objective, repeats):
    params = fitted()
    loss = jax.jit(jax.value_and_grad(lambda p, key: objective.loss(key, p, program, GUIDE, X, Y)))
    found = [loss(params, key) for key in jax.random.split(KEY, repeats)]
    return np.array([value for value, _ in found]), np.array(
        [np.concatenate([g["f_auto_loc"][0], g["e_auto_loc"]]) for _, g in found]
    )


@pytest.mark.long
def test_unbiased_with_less_variance_of_bound_and_gradient():
    plain, plain_gradient = losses(dgp.ELBO(8), 150)
    even, even_gradient = losses(EvenELBO(8), 150)
    error = np.sqrt((plain.var() + even.var()) / 150)
    assert abs(plain.mean() - even.mean()) < 4 * error
    assert even.var() < 0.5 * plain.var()
    gradient_error = np.sqrt((plain_gradient.var(0) + even_gradient.var(0)) / 150)
    assert (np.abs(plain_gradient.mean(0) - even_gradient.mean(0)) < 4.5 * gradient_error).all()
    ratio = even_gradient.var(0) / plain_gradient.var(0)
    assert ratio[4:].mean() < 0.5  # of the last layer
    assert ratio[:4].mean() < 1.2  # of the first, whose gradient has products of the numbers of all layers


@pytest.mark.long
def test_numbers_are_standard_normal_and_particles_even():
    params = fitted()

    def draw(key, particle):
        guide = numpyro.handlers.substitute(EvenlyOverParticles(GUIDE, key, particle, 16), data=params)
        trace = numpyro.handlers.trace(numpyro.handlers.seed(guide, KEY)).get_trace(X, Y)
        values = {"w": trace["w"]["value"], "h": trace["h"]["value"]}
        white = [(values[n] - trace[n]["fn"].mean) / trace[n]["fn"].variance ** 0.5 for n in values]
        return jnp.concatenate(white, -1)  # (5, 3)

    keys = jax.random.split(KEY, 40)
    z = np.asarray(jax.vmap(lambda key: jax.vmap(lambda s: draw(key, s))(jnp.arange(16)))(keys))  # (40, 16, 5, 3)
    for column in range(3):
        assert kstest(z[:, 0, :, column].ravel(), "norm").pvalue > 1e-3  # of one particle: independent over keys, rows
    assert abs(np.corrcoef(z[:, 0].reshape(-1, 3).T)[np.triu_indices(3, 1)]).max() < 4 / np.sqrt(200)
    even = np.mean([discrepancy(ndtr(points), method="CD") for points in z.transpose(0, 2, 1, 3).reshape(-1, 16, 3)])
    rng = np.random.default_rng(0)
    random = np.mean([discrepancy(rng.uniform(size=(16, 3)), method="CD") for _ in range(200)])
    assert even < 0.6 * random


@pytest.mark.long
def test_particles_one_by_one_and_single_precision():
    params = fitted()
    both = [
        jax.jit(lambda p, objective=EvenELBO(4, vectorize): objective.loss(KEY, p, program, GUIDE, X, Y))(params)
        for vectorize in (True, False)
    ]
    np.testing.assert_allclose(*both, rtol=1e-9)
    objective = EvenELBO(4)
    data = X.astype(jnp.float32), Y.astype(jnp.float32)
    single = jax.jit(lambda p: objective.loss(KEY, p, program, GUIDE, *data))(fitted(jnp.float32))
    assert np.isfinite(single)


@pytest.mark.long
def test_same_expectation_as_numpyros_objective():
    params = fitted()
    loss = jax.jit(lambda key: Trace_ELBO(50).loss(key, params, program, GUIDE, X, Y))
    stock = np.array([loss(key) for key in jax.random.split(KEY, 40)])
    even, _ = losses(EvenELBO(8), 60)
    assert abs(stock.mean() - even.mean()) < 4 * np.sqrt(stock.var() / 40 + even.var() / 60)
