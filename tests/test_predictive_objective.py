"""The predictive objective: dense and quadrature references, and what it refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.infer import SVI
from scipy.stats import norm

import numpyro_dgp as dgp
from numpyro_dgp import PredictiveObjective
from numpyro_dgp import guides as G

KEY = jax.random.key(0)
X = jnp.linspace(-1, 1, 9)[:, None]
Y = jnp.sin(3 * X[:, 0])
Z = jnp.linspace(-1, 1, 4)[:, None]
NOISE = 0.3


def shallow(X, y=None, keep=None, batch_size=None):
    f = dgp.gp("f", dgp.kernels.RBF(1.3, 0.5), dgp.Points(Z))
    keep = jnp.ones(len(X), bool) if keep is None else keep
    with numpyro.plate("data", len(X), subsample_size=batch_size) as rows, numpyro.handlers.mask(mask=keep[rows]):
        observed = dgp.Likelihood(f(X[rows]), lambda v: dist.Normal(v, NOISE))
        numpyro.sample("y", observed, obs=None if y is None else y[rows])


def deep(X, y=None, likelihood=lambda v: dist.Normal(v, NOISE), noise=None):
    f = dgp.gp("f", dgp.kernels.RBF(0.4, 0.5), dgp.Points(Z), outputs=1, mean=dgp.means.IdentityMean())
    g = dgp.gp("g", dgp.kernels.RBF(1.3, 0.5), dgp.Points(Z))
    with numpyro.plate("data", len(X)):
        h = numpyro.sample("h", f(X, noise=noise))
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
def test_masked_rows_count_nothing_and_minibatches_are_scaled():
    params, guide = parameters(("f", (4,))), G.InducingPoint(shallow)
    keep = jnp.arange(9) % 3 != 1

    def value(*args, **kwargs):
        return -float(PredictiveObjective().loss(KEY, params, shallow, guide, *args, **kwargs))

    assert np.isclose(value(X, Y, keep), value(X[keep], Y[keep]), rtol=1e-9)
    batch = jax.jit(lambda key: -PredictiveObjective().loss(key, params, shallow, guide, X, Y, batch_size=8))
    singles = [batch(key) for key in jax.random.split(KEY, 200)]
    error = np.std(singles) / len(singles) ** 0.5
    assert abs(np.mean(singles) - value(X, Y)) < 4 * error


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
        loc, spread = marginals(np.asarray(h)[:, None], *second, 0.5, 1.3)
        density = norm.pdf(float(Y[n]), loc, np.sqrt(spread + NOISE**2))
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
    likelihood = -float(PredictiveObjective(50).loss(KEY, params, deep, guide, X, Y > 0, _bernoulli))
    assert np.isfinite(likelihood)


def _bernoulli(v):
    return dist.Bernoulli(logits=3 * v)


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


def latent(X, y=None):
    f = dgp.gp("f", dgp.kernels.RBF(), dgp.Points(jnp.linspace(-1, 1, 8).reshape(4, 2)))
    with numpyro.plate("data", len(X)):
        x = dgp.latent("w", X, 1)
        numpyro.sample("y", dgp.Likelihood(f(x), lambda v: dist.Normal(v, NOISE)), obs=y)


def noisy(X, y=None):
    deep(X, y, noise=0.1)


@pytest.mark.slow
def test_guides_with_a_posterior_for_every_row_are_refused():
    def evaluate(model, guide):
        svi = SVI(model, guide, optax.adam(0.1), PredictiveObjective())
        return jax.eval_shape(lambda: svi.evaluate(svi.init(KEY, X, Y), X, Y))

    assert evaluate(latent, G.InducingPoint(latent, latent=G.Prior())).shape == ()
    with pytest.raises(ValueError, match=r"got 'w', which has a posterior of its own for every row"):
        evaluate(latent, G.InducingPoint(latent))
    with pytest.raises(ValueError, match=r"got 'h', which has a posterior of its own for every row"):
        evaluate(noisy, G.MeanField(noisy))
    with pytest.raises(ValueError, match="integrates or weights observations itself: use"):
        evaluate(latent, G.ImportanceWeighted(latent, num_samples=3))
    with pytest.raises(ValueError, match="integrates or weights observations itself"):
        evaluate(shallow, G.Collapsed(shallow))
    with pytest.raises(ValueError, match="expected the regularisation of PredictiveObjective to be positive"):
        PredictiveObjective(regularisation=0.0)
    with pytest.raises(ValueError, match="num_particles"):
        PredictiveObjective(0)
