"""Posteriors of the summands of a kernel, against dense algebra."""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro import handlers
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoLaplaceApproximation

import numpyro_dgp as dgp
from numpyro_dgp.functions.weights import FullBelief

K = dgp.kernels
NEW = np.array([[0.3], [1.7], [4.0]])
x = np.linspace(0.0, 3.0, 6)[:, None]
y = np.sin(2 * x[:, 0])


def rbf(a, b, variance, scale):
    return variance * np.exp(-0.5 * ((a[:, None, 0] - b[:, 0]) / scale) ** 2)


KERNELS = [lambda a, b: rbf(a, b, 2.0, 1.5), lambda a, b: rbf(a, b, 0.5, 0.3), lambda a, b: 0.7 + 0 * a @ b.T]
SUM = K.RBF(2.0, 1.5) + K.RBF(0.5, 0.3) + K.Constant(0.7)


@pytest.mark.slow
def test_parts_given_noisy_data():
    """q(v) at the optimum for inducing inputs at the data: the parts of exact regression."""
    noise = 0.3
    C = sum(k(x, x) for k in KERNELS)
    L = np.linalg.cholesky(C + 1e-10 * 3.2 * np.eye(6))
    S = np.linalg.inv(np.eye(6) + L.T @ L / noise**2)
    belief = FullBelief(jnp.array(S @ L.T @ y / noise**2), jnp.linalg.cholesky(jnp.array(S)))
    for kernel, columns in ((SUM, 1), ((K.RBF(2.0, 1.5) + K.RBF(0.5, 0.3) + K.Constant(0.7)).on(0), 1)):
        with handlers.seed(rng_seed=0), handlers.substitute(data={"f": belief}):
            f = dgp.gp("f", kernel, dgp.Points(x), mean=dgp.means.ConstantMean(0.1))
        parts = f.summands()
        assert len(parts) == 3 * columns
        for part, k in zip(parts, KERNELS, strict=True):
            gain = np.linalg.solve(C + noise**2 * np.eye(6), k(x, NEW)).T
            np.testing.assert_allclose(part(NEW).mean, gain @ y, rtol=1e-5, atol=1e-6)
            covariance = k(NEW, NEW) - gain @ k(x, NEW)
            np.testing.assert_allclose(part(NEW).variance, np.diag(covariance), rtol=1e-5)
            np.testing.assert_allclose(part.joint(NEW).covariance[0], covariance, atol=1e-6)
        total = sum(part(NEW).mean for part in parts)
        np.testing.assert_allclose(total + 0.1, f(NEW).mean, rtol=1e-6)


@pytest.mark.slow
def test_parts_of_outputs_and_of_exact_processes():
    kernels = [K.RBF(2.0, 1.5) + K.RBF(0.5, 0.3), K.RBF(1.0, 1.0) + K.RBF(1.0, 2.0)]
    f = dgp.gp("f", kernels, None, outputs=2).condition(x, np.stack([y, -y], 1))
    first, second = f.summands()
    assert first(NEW).event_shape == (2,)
    gain = np.linalg.solve(KERNELS[0](x, x) + KERNELS[1](x, x) + 1e-10 * np.eye(6), KERNELS[0](x, NEW)).T
    np.testing.assert_allclose(first(NEW).mean[:, 0], gain @ y, rtol=1e-5)
    np.testing.assert_allclose((first(NEW).mean + second(NEW).mean), f(NEW).mean, rtol=1e-5)


@pytest.mark.slow
def test_wrong_calls():
    with handlers.seed(rng_seed=0):
        ring = dgp.gp("f", K.RBF(), dgp.Grid(-5.0, 5.0, 12))
        apart = dgp.gp("g", [SUM, K.RBF()], dgp.Points(x), outputs=2)
    with pytest.raises(ValueError, match=r"f.summands: expected a layer on dgp.Points, got RingFunction at site 'f'"):
        ring.summands()
    with pytest.raises(ValueError, match=r"kernels of all outputs with equally many summands, got \[3, 1\]"):
        apart.summands()


@pytest.mark.slow
def test_parts_from_a_fit(key):
    def model(X, y=None):
        f = dgp.gp("f", SUM, dgp.Points(x))
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dgp.Likelihood(f(X), lambda v: dist.Normal(v, 0.3)), obs=y)

    posterior = dgp.Posterior(model, dgp.guides.Collapsed(model).on(jnp.array(x), jnp.array(y)), {})
    f, _ = posterior.layers(key, jnp.array(x))["y"]
    C = sum(k(x, x) for k in KERNELS) + 0.09 * np.eye(6)
    for part, k in zip(f.summands(), KERNELS, strict=True):
        np.testing.assert_allclose(part(NEW).mean, np.linalg.solve(C, k(x, NEW)).T @ y, rtol=1e-5, atol=1e-6)


@pytest.mark.long
def test_parts_as_two_layers_depend_on_each_other_in_one_gaussian_of_all_sites(key):
    """As recipes/shapes.md says of AutoLaplaceApproximation: exact for a normal y with known hyperparameters."""
    noise, kernels = 0.3, (K.RBF(2.0, 1.5), K.RBF(0.5, 0.3))

    def functions():
        return [dgp.gp(f"part{i}", kernel, dgp.Points(x)) for i, kernel in enumerate(kernels)]

    def model(y=None):
        first, second = functions()
        with numpyro.plate("data", len(x)):
            numpyro.sample("y", dgp.Likelihood((first(x), second(x)), lambda a, b: dist.Normal(a + b, noise)), obs=y)

    guide = AutoLaplaceApproximation(model)
    svi = SVI(model, guide, optax.adam(optax.exponential_decay(0.1, 500, 0.3)), Trace_ELBO())
    result = svi.run(key, 4000, jnp.array(y), progress_bar=False)
    q = guide.get_posterior(result.params)
    C = sum(k(x, x) for k in KERNELS[:2]) + noise**2 * np.eye(6)
    for i, k in enumerate(KERNELS[:2]):
        A = np.linalg.cholesky(k(x, x) + 1e-10 * np.diag(k(x, x)) * np.eye(6))  # values are A v
        block = slice(6 * i, 6 * i + 6)
        gain = np.linalg.solve(C, k(x, x)).T
        np.testing.assert_allclose(A @ np.array(q.mean[block]), gain @ y, atol=1e-3)
        covariance = A @ np.array(q.covariance_matrix[block, block]) @ A.T
        np.testing.assert_allclose(covariance, k(x, x) - gain @ k(x, x), atol=1e-4)
