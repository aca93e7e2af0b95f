"""Nested variational compression against draws of hidden values, and against the evidence."""

import dense
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.scipy.special import logsumexp

from numpyro_dgp.bounds.nested_compression import NestedLayer, nested_bound
from numpyro_dgp.kernels import RBF, Linear, Matern32
from numpyro_dgp.math.gaussians import kl_full
from numpyro_dgp.math.whitening import inverse_cholesky

rng = np.random.default_rng(0)
N, M = 7, 4
X = jnp.array(rng.normal(size=(N, 1)))
Y = jnp.array(rng.normal(size=(N, 2)))


def layer(kernel, D, P, noise, W=None, b=0.0):
    roots = 0.3 * jnp.tril(jnp.array(rng.normal(size=(P, M, M)))) + 0.4 * jnp.eye(M)
    return NestedLayer(
        kernel, jnp.array(rng.normal(size=(M, D))), jnp.array(rng.normal(size=(P, M))), roots, noise, W, b
    )


LAYERS = [
    layer(RBF(0.8, 0.9), 1, 2, 0.4, W=jnp.array([[1.0, -0.5]]), b=jnp.array([0.1, 0.3])),
    layer(RBF(0.6, 1.1) + Linear(0.2), 2, 2, 0.5, W=jnp.array(rng.normal(size=(2, 2))), b=0.2),
    layer(RBF(1.2, 0.8), 2, 2, 0.6),
]


def features(layer, h):
    whiten = inverse_cholesky(layer.kernel.gram(layer.Z))
    A = layer.kernel(h, layer.Z) @ whiten.T
    mean = jnp.zeros((len(h), len(layer.loc))) + layer.b + (0 if layer.W is None else h @ layer.W)
    return A, layer.kernel.diag(h) - (A**2).sum(-1), mean


def by_draws(key, layers, y, num):
    """Monte-Carlo form: means, penalties and likelihood from draws of h and v. From ``num`` draws of everything."""
    keys = iter(jax.random.split(key, 9))
    bound = -sum(kl_full(f.loc, f.scale_tril).sum() for f in layers)
    h = jnp.broadcast_to(X, (num, *X.shape))  # draws of the inputs of a layer
    for f in layers[:-1]:
        P = len(f.loc)
        v = f.loc + (f.scale_tril @ jax.random.normal(next(keys), (num, P, M, 1)))[..., 0]
        A, open_, mean = jax.vmap(lambda x, f=f: features(f, x))(h)
        # Given v, the layer's mean varies with h; all draws of h against all draws of v would be exact.
        moments = jnp.einsum("snm,snl->nml", A, A) / num
        across = jnp.einsum("snm,snp->nmp", A, mean) / num
        centre = jnp.einsum("nm,vpm->vnp", A.mean(0), v) + mean.mean(0)
        square = jnp.einsum("nml,vpm,vpl->vnp", moments, v, v) + 2 * jnp.einsum("nmp,vpm->vnp", across, v)
        variance = square + (mean**2).mean(0) - centre**2
        bound = bound - 0.5 * (variance.mean(0).sum() + P * open_.mean(0).sum()) / f.noise**2
        h = centre + f.noise * jax.random.normal(next(keys), centre.shape)
    f = layers[-1]
    v = f.loc + (f.scale_tril @ jax.random.normal(next(keys), (num, len(f.loc), M, 1)))[..., 0]
    A, open_, mean = jax.vmap(lambda x: features(f, x))(h)
    residual = y - mean - jnp.einsum("snm,spm->snp", A, v)
    log_p = -0.5 * (residual**2 + open_[..., None]) / f.noise**2 - np.log(np.sqrt(2 * np.pi) * f.noise)
    return bound + log_p.sum((-2, -1)).mean()


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.long
def test_monte_carlo_form(depth):
    """The closed form is the mean of the same bound with inducing and hidden values drawn."""
    layers = LAYERS[:1] + (LAYERS[1 - depth :] if depth > 1 else [])
    keys = jax.random.split(jax.random.key(0), 25)
    estimates = jax.lax.map(lambda key: by_draws(key, layers, Y, 10_000), keys)
    error = estimates.std() / 5
    assert abs(estimates.mean() - nested_bound(layers, X, Y)) < 3 * error
    assert error < 0.1


@pytest.mark.long
def test_below_the_evidence():
    """Evidence by brute force: hidden values from their exact prior, likelihood with the last function integrated."""
    x, y = X[:3], jnp.sin(2 * X[:3])
    first, last = RBF(0.8, 0.9), RBF(1.2, 0.8)
    K = np.asarray(first.gram(x)) + 0.4**2 * np.eye(3)

    def log_likelihood(key):
        h = x + jnp.linalg.cholesky(K) @ jax.random.normal(key, (3, 1))
        C = last.gram(h) + 0.6**2 * jnp.eye(3)
        return jax.scipy.stats.multivariate_normal.logpdf(y[:, 0], jnp.zeros(3), C)

    logs = jax.vmap(log_likelihood)(jax.random.split(jax.random.key(0), 100_000))
    evidence = logsumexp(logs) - np.log(len(logs))
    points = jnp.linspace(-2, 2, M)[:, None]

    def bound(params):
        (m1, L1), (m2, L2) = params
        layers = [NestedLayer(first, points, m1, jnp.tril(L1), 0.4, jnp.ones((1, 1))),
                  NestedLayer(last, points, m2, jnp.tril(L2), 0.6)]  # fmt: skip
        return nested_bound(layers, x, y)

    params = [(jnp.zeros((1, M)), jnp.eye(M)[None])] * 2
    step = jax.jit(lambda p: jax.tree.map(lambda a, g: a + 0.02 * g, p, jax.grad(bound)(p)))
    start = bound(params)
    for _ in range(500):
        params = step(params)
    assert start < bound(params) < evidence
    assert bound(params) > evidence - 2.5
    one = dense.log_normal(np.asarray(y[:, 0]), np.zeros(3), np.asarray(last.gram(x)) + 0.36 * np.eye(3))
    assert nested_bound([NestedLayer(last, points, *params[1], 0.6)], x, y) < one


@pytest.mark.long
def test_single_precision(x32):
    layers = jax.tree.map(lambda a: jnp.asarray(np.asarray(a), jnp.float32), LAYERS)
    value = nested_bound(layers, *(jnp.asarray(np.asarray(a), jnp.float32) for a in (X, Y)))
    assert value.dtype == jnp.float32
    assert np.isfinite(value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: nested_bound(LAYERS, X, Y[:, 0]), r"expected y of shape \(N, P\)"),
        (lambda: nested_bound(LAYERS[1:], X, Y), r"layers of widths \[2, 2, 2\], got .* widths \[1, 2, 2\]"),
        (lambda: nested_bound([LAYERS[0], layer(Matern32(), 2, 2, 0.3)], X, Y), "closed form .* got Matern32"),
        (lambda: layer(RBF(), 1, 2, 0.1, W=jnp.ones((2, 2))), "NestedLayer: expected shapes"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()
