"""Kernels of what a network makes of the inputs, with networks of Flax and Equinox."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.contrib.module import eqx_module, flax_module
from numpyro.infer import SVI

import numpyro_dgp as dgp
from numpyro_dgp import kernels as K

Z = np.linspace(-1, 1, 5)[:, None]


def equinox_kernel():
    eqx = pytest.importorskip("equinox")
    network = eqx_module("network", eqx.nn.MLP(1, 2, 4, 1, key=jax.random.key(0)))
    arrays, rest = eqx.partition(network, eqx.is_inexact_array)
    rows = lambda arrays, X: jnp.vectorize(eqx.combine(arrays, rest), signature="(d)->(q)")(X)  # noqa: E731
    return K.Transformed(K.RBF(), rows, arrays)


def flax_kernel():
    linen = pytest.importorskip("flax.linen")
    network = flax_module("network", linen.Sequential([linen.Dense(4), jnp.tanh, linen.Dense(2)]), input_shape=(1, 1))
    return K.Transformed(K.RBF(), lambda parameters, X: network.func(parameters, X), network.args[0])


def flax_parameters():
    linen = pytest.importorskip("flax.linen")
    network = linen.Sequential([linen.Dense(4), jnp.tanh, linen.Dense(2)])
    parameters = numpyro.param("network", lambda key: network.init(key, jnp.zeros((1, 1))))
    return K.Transformed(K.RBF(), network.apply, parameters)


@pytest.mark.long
@pytest.mark.parametrize("kernel", [equinox_kernel, flax_kernel, flax_parameters])
def test_networks_are_learned(kernel, tmp_path):
    def model(X, y=None):
        f = dgp.gp("f", kernel(), dgp.Points(Z))
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dgp.Likelihood(f(X), lambda v: dist.Normal(v, 0.1)), obs=y)

    X = jnp.linspace(-1, 1, 20)[:, None]
    guide = dgp.guides.InducingPoint(model)
    svi = SVI(model, guide, optax.adam(0.02), dgp.ELBO())
    result = svi.run(jax.random.key(0), 30, X, jnp.sign(X[:, 0]), progress_bar=False)
    assert result.losses[-1] < result.losses[0]
    start, end = (
        jax.tree.leaves({k: v for k, v in p.items() if k.startswith("network")}) for p in (first(svi, X), result.params)
    )
    assert len(start) >= 4
    assert any(np.abs(a - b).max() > 1e-3 for a, b in zip(start, end, strict=True))
    mean = dgp.Posterior(model, guide, result.params).predict(jax.random.key(1), X[:3]).mean
    assert np.isfinite(mean).all()
    # A fitted network in a file: the containers of its arrays are those of a new start.
    dgp.save(tmp_path / "fit.npz", result.params)
    loaded = dgp.load(tmp_path / "fit.npz", like=first(svi, X))
    again = dgp.Posterior(model, guide, loaded).predict(jax.random.key(1), X[:3]).mean
    np.testing.assert_array_equal(again, mean)


def first(svi, X):
    """The parameters that a fit begins with."""
    return svi.get_params(svi.init(jax.random.key(0), X, jnp.sign(X[:, 0])))


@pytest.mark.smoke
def test_an_encoder_of_flax():
    """Latents read off the observations by a network of the guide, with the JAX and flax that the extra brings."""
    linen = pytest.importorskip("flax.linen")

    def encoder(rows):
        network = linen.Sequential([linen.Dense(4), jnp.tanh, linen.Dense(2)])
        return flax_module("encoder", network, input_shape=(1, rows.shape[-1]))(rows)

    def model(y):
        f = dgp.gp("f", K.RBF(), dgp.Points(Z), outputs=2)
        with numpyro.plate("data", len(y)):
            w = dgp.latent("w", None, 1)
            numpyro.sample("y", dgp.Likelihood(f(w), lambda v: dist.Normal(v, 0.1).to_event(1)), obs=y)

    guide = dgp.guides.InducingPoint(model, latent=dgp.guides.Amortised(encoder))
    svi = SVI(model, guide, optax.adam(0.02), dgp.ELBO())
    result = dgp.fit(svi, jax.random.key(0), 20, jnp.ones((6, 2)), progress_bar=False)
    assert np.mean(result.losses[-3:]) < np.mean(result.losses[:3])
    assert any(name.startswith("encoder") for name in result.params)
