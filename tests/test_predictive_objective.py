"""The example of a predictive objective: dense and quadrature references."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.infer import SVI
from predictive_objective import PredictiveObjective
from scipy.stats import norm

import numpyro_dgp as dgp
from numpyro_dgp import guides as G

KEY = jax.random.key(0)
X = jnp.linspace(-1, 1, 9)[:, None]
Y = jnp.sin(3 * X[:, 0])
Z = jnp.linspace(-1, 1, 4)[:, None]
NOISE = 0.3


def shallow(X, y=None):
    f = dgp.gp("f", dgp.kernels.RBF(1.3, 0.5), dgp.Points(Z))
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dgp.Likelihood(f(X), lambda v: dist.Normal(v, NOISE)), obs=y)


def deep(X, y=None, likelihood=lambda v: dist.Normal(v, NOISE)):
    f = dgp.gp("f", dgp.kernels.RBF(0.4, 0.5), dgp.Points(Z), outputs=1, mean=dgp.means.IdentityMean())
    g = dgp.gp("g", dgp.kernels.RBF(1.3, 0.5), dgp.Points(Z))
    with numpyro.plate("data", len(X)):
        h = numpyro.sample("h", f(X))
        numpyro.sample("y", dgp.Likelihood(g(h), likelihood), obs=y)


def parameters(*layers):
    rng = np.random.default_rng(1)
    found = {}
    for name, shape in layers:
        root = np.tril(0.2 * rng.normal(size=(*shape, shape[-1]))) + 0.5 * np.eye(shape[-1])
        found |= {
            f"{name}_auto_loc": jnp.array(rng.normal(size=shape)),
            f"{name}_auto_scale_tril": jnp.array(root),
        }
    return found


def marginals(x, m, root, lengthscale, variance):
    """Mean and variance of a layer at x (N, 1), by dense algebra, with Z as inducing inputs."""

    def k(a, b):
        return variance * np.exp(-0.5 * np.square(np.subtract.outer(a[:, 0], b[:, 0])) / lengthscale**2)

    Kzz = np.asarray(dgp.kernels.RBF(variance, lengthscale).gram(Z))
    A = np.linalg.solve(np.linalg.cholesky(Kzz + 1e-6 * variance * np.eye(4)), k(np.asarray(Z), x)).T
    S = A @ root
    return A @ m, variance - (A**2).sum(1) + (S**2).sum(1)


def divergence(m, root):
    return 0.5 * ((root**2).sum() + m @ m - len(m)) - np.log(np.abs(np.diag(root))).sum()


@pytest.mark.slow
def test_one_layer_is_the_dense_formula():
    params = parameters(("f", (4,)))
    m, root = (np.asarray(params[f"f_auto_{part}"]) for part in ("loc", "scale_tril"))
    mean, variance = marginals(np.asarray(X), m, root, 0.5, 1.3)
    scores = norm.logpdf(np.asarray(Y), mean, np.sqrt(variance + NOISE**2))
    for beta in (1.0, 0.2):
        expected = scores.sum() - beta * divergence(m, root)
        objective = PredictiveObjective(regularisation=beta)
        found = -objective.loss(KEY, params, shallow, G.InducingPoint(shallow), X, Y)
        np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.long
def test_two_layers_tend_to_quadrature_over_the_hidden_value():
    params = parameters(("f", (1, 4)), ("g", (4,)))
    first = [np.asarray(params[f"f_auto_{part}"])[0] for part in ("loc", "scale_tril")]
    second = [np.asarray(params[f"g_auto_{part}"]) for part in ("loc", "scale_tril")]
    mean, variance = marginals(np.asarray(X), *first, 0.5, 0.4)
    nodes, weights = np.polynomial.hermite_e.hermegauss(80)
    expected = -divergence(*first) - divergence(*second)
    for n in range(len(X)):
        h = X[n, 0] + mean[n] + np.sqrt(variance[n]) * nodes
        loc, variance_of_f = marginals(np.asarray(h)[:, None], *second, 0.5, 1.3)
        density = norm.pdf(float(Y[n]), loc, np.sqrt(variance_of_f + NOISE**2))
        expected += np.log((weights * density).sum() / weights.sum())

    def found(particles, repeats):
        objective = PredictiveObjective(particles)
        loss = jax.jit(lambda key: objective.loss(key, params, deep, G.InducingPoint(deep), X, Y))
        values = -np.array([loss(key) for key in jax.random.split(KEY, repeats)])
        return values.mean(), values.std() / repeats**0.5

    many, error = found(400, 30)
    assert abs(many - expected) < 4 * error + 9 * 0.5 * 3.0 / 400  # the bias of a logarithm of 400 draws
    few, error = found(2, 200)
    assert few < many - 3 * error  # and of two draws


@pytest.mark.long
def test_the_elbo_is_below_and_fits_trade_it_for_density():
    params, guide = parameters(("f", (1, 4)), ("g", (4,))), G.InducingPoint(deep)
    both = [
        -float(objective.loss(KEY, params, deep, guide, X, Y))
        for objective in (dgp.ELBO(200), PredictiveObjective(200))
    ]
    assert both[0] < both[1]
    likelihood = -float(PredictiveObjective(50).loss(KEY, params, deep_labels, G.InducingPoint(deep_labels), X, Y > 0))
    assert np.isfinite(likelihood)


def deep_labels(X, y=None):
    deep(X, y, lambda v: dist.Bernoulli(logits=3 * v))


@pytest.mark.long
def test_a_fit_has_a_higher_training_density_than_one_by_the_elbo():
    rng = np.random.default_rng(0)
    x = jnp.array(np.sort(rng.uniform(-1, 1, 80)))[:, None]
    y = jnp.array(np.sin(3 * x[:, 0]) + (0.05 + 0.4 * (x[:, 0] > 0)) * rng.normal(size=80))

    def density(objective):
        guide = G.InducingPoint(shallow)
        svi = SVI(shallow, guide, optax.adam(0.02), objective)
        result = dgp.fit(svi, KEY, 1500, x, y, progress_bar=False)
        return float(dgp.Posterior(shallow, guide, result.params).log_density(KEY, y, x).mean())

    assert density(PredictiveObjective(regularisation=0.1)) > density(dgp.ELBO()) + 0.02


@pytest.mark.long
def test_single_precision():
    params = jax.tree.map(lambda a: a.astype(jnp.float32), parameters(("f", (1, 4)), ("g", (4,))))
    guide, objective = G.InducingPoint(deep), PredictiveObjective(3)
    loss = jax.value_and_grad(
        lambda p: objective.loss(KEY, p, deep, guide, X.astype(jnp.float32), Y.astype(jnp.float32))
    )
    value, gradient = jax.jit(loss)(params)
    assert np.isfinite(value)
    assert all(np.isfinite(leaf).all() and np.any(leaf != 0) for leaf in jax.tree.leaves(gradient))
