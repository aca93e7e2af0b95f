"""Programs of two layers: the bound by quadrature and by hand, limits, minibatches, stock objectives."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from dense import rbf, svgp
from numpyro.infer import Trace_ELBO, TraceMeanField_ELBO
from programs import NOISE, X, Y, Z, agree, bayesian, bound, deep, draws_of_bound, explicit, random_params, shallow

import numpyro_dgp as dgp
from numpyro_dgp.guides.run import marginal

x, y, z = (np.asarray(a) for a in (X, Y, Z))
JITTER = 1e-10


def layer(params, name, inputs, variance, lengthscale):
    """Mean and variance of q(f(x)) of one layer from guide parameters, by dense algebra."""
    Kzz = rbf(z, z, variance, lengthscale) + JITTER * variance * np.eye(len(z))
    L = np.linalg.cholesky(Kzz)
    m = np.asarray(params[f"{name}_auto_loc"]).reshape(-1)
    root = np.asarray(params[f"{name}_auto_scale_tril"]).reshape(len(z), len(z))
    mean, covariance = svgp(
        Kzz,
        rbf(z, inputs, variance, lengthscale),
        rbf(inputs, inputs, variance, lengthscale),
        L @ m,
        L @ root @ root.T @ L.T,
    )
    return mean, np.diag(covariance)


def divergence(params):
    total = 0.0
    for name in ("f", "g"):
        m, root = (
            np.asarray(params[f"{name}_auto_loc"]).ravel(),
            np.asarray(params[f"{name}_auto_scale_tril"]).reshape(8, 8),
        )
        total += 0.5 * ((root**2).sum() + m @ m - 8) - np.log(abs(np.diag(root))).sum()
    return total


def quadrature_bound(params, nodes=300):
    """The two-layer bound with the hidden layer integrated by Gauss-Hermite."""
    from scipy.special import roots_hermite

    points, weights = roots_hermite(nodes)
    mean, variance = layer(params, "f", x, 0.3, 0.9)
    h = (x[:, 0] + mean)[:, None] + np.sqrt(2 * variance)[:, None] * points
    g_mean, g_variance = (
        np.array(a) for a in zip(*[layer(params, "g", row[:, None], 1.2, 0.7) for row in h], strict=True)
    )
    expected = -0.5 * np.log(2 * np.pi * NOISE**2) - 0.5 * ((y[:, None] - g_mean) ** 2 + g_variance) / NOISE**2
    return (expected @ weights / np.sqrt(np.pi)).sum() - divergence(params)


GUIDE = dgp.guides.InducingPoint(deep)
PARAMS = random_params(deep, GUIDE, X, Y)


@pytest.mark.smoke
def test_bound_against_quadrature_over_the_hidden_layer():
    """Draws of the bound have the mean that Gauss-Hermite nodes for every hidden value give."""
    draws = draws_of_bound(dgp.ELBO(), PARAMS, deep, GUIDE, X, Y, num=4000)
    exact = quadrature_bound(PARAMS)
    np.testing.assert_allclose(exact, quadrature_bound(PARAMS, 200), rtol=1e-8)
    assert abs(draws.mean() - exact) < 3 * draws.std() / np.sqrt(4000)


@pytest.mark.slow
def test_bound_against_hand_written_loops():
    """The same hidden draw through dense algebra, one datum at a time."""
    with numpyro.handlers.seed(rng_seed=5), numpyro.handlers.substitute(data=PARAMS), numpyro.handlers.trace() as sites:
        marginal(GUIDE)(X, Y)
    h = np.asarray(sites["h"]["value"])
    total = 0.0
    for n in range(len(x)):
        mean, variance = layer(PARAMS, "g", h[n : n + 1], 1.2, 0.7)
        total += -0.5 * np.log(2 * np.pi * NOISE**2) - 0.5 * ((y[n] - mean[0]) ** 2 + variance[0]) / NOISE**2
    clamped = numpyro.handlers.substitute(deep, data={"h": sites["h"]["value"]})
    value = bound(dgp.ELBO(), PARAMS, clamped, dgp.guides.InducingPoint(clamped), X, Y)
    np.testing.assert_allclose(value, total - divergence(PARAMS), rtol=1e-7)


@pytest.mark.slow
def test_vanishing_inner_layer_is_the_shallow_model():
    """Inner variance to zero with an identity mean leaves the bound of one layer."""
    model = partial(deep, inner=dgp.kernels.RBF(1e-14, 0.9))
    guide, flat = dgp.guides.InducingPoint(model), dgp.guides.InducingPoint(shallow)
    expected = bound(dgp.ELBO(), {k: v for k, v in PARAMS.items() if k[0] == "g"}, shallow, flat, X, Y)
    inner = {"f_auto_loc": jnp.zeros((1, 8)), "f_auto_scale_tril": jnp.eye(8)[None]}
    for seed in range(3):
        value = bound(dgp.ELBO(), PARAMS | inner, model, guide, X, Y, key=jax.random.key(seed))
        np.testing.assert_allclose(value, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.long
@pytest.mark.parametrize("model", [deep, bayesian])
def test_minibatches_average_to_the_full_batch(model):
    """Over a partition, with common noise, local latents included."""
    guide = dgp.guides.InducingPoint(model)
    params = random_params(model, guide, X, Y)
    run = marginal(numpyro.handlers.substitute(guide, data=params))
    with numpyro.handlers.seed(rng_seed=5), numpyro.handlers.trace() as sites:
        run(X, Y)
    local = {name: sites[name]["value"] for name in ("h", "w") if name in sites}
    others = {name: params[f"{name}_auto_loc"] for name in ("noise", "scales") if f"{name}_auto_loc" in params}

    def value(rows, batch):
        fixed = {"data": rows} | {name: v[rows] for name, v in local.items()} | others
        clamped = numpyro.handlers.substitute(model, data=fixed)
        clamped_guide = numpyro.handlers.substitute(guide, data=fixed)
        return bound(dgp.ELBO(), params, clamped, clamped_guide, X, Y, batch)

    full = value(jnp.arange(30), None)
    parts = jax.random.permutation(jax.random.key(0), 30).reshape(3, 10)
    np.testing.assert_allclose(np.mean([value(rows, 10) for rows in parts]), full, rtol=1e-8)


@pytest.mark.long
def test_minibatch_bound_is_unbiased():
    full = draws_of_bound(dgp.ELBO(), PARAMS, deep, GUIDE, X, Y)
    batched = draws_of_bound(dgp.ELBO(), PARAMS, deep, GUIDE, X, Y, 7, num=6000)
    assert agree(full, batched, 4)


CASES = {
    "inducing-point": (deep, dgp.guides.InducingPoint),
    "diagonal": (deep, partial(dgp.guides.InducingPoint, inducing=dgp.guides.Diagonal())),
    "mean-field": (partial(deep, process_noise=0.4), dgp.guides.MeanField),
    "mean-field-full": (partial(deep, process_noise=0.4), partial(dgp.guides.MeanField, inducing=dgp.guides.Full())),
    "bayesian-delta": (bayesian, dgp.guides.InducingPoint),
    "bayesian-normal": (bayesian, partial(dgp.guides.InducingPoint, other=dgp.guides.Normal())),
    "bayesian-autoguide": (
        bayesian,
        partial(dgp.guides.InducingPoint, other=numpyro.infer.autoguide.AutoMultivariateNormal),
    ),
    "override": (
        bayesian,
        partial(dgp.guides.InducingPoint, sites={"w": dgp.guides.Prior(), "noise": dgp.guides.Normal()}),
    ),
    "explicit": (explicit, dgp.guides.InducingPoint),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.long
def test_stock_objectives_agree_in_expectation(name):
    """Three estimators of one bound, ours with the smallest variance."""
    model, make = CASES[name]
    guide = make(model)
    params = random_params(model, guide, X, Y, scale=0.15)
    ours = draws_of_bound(dgp.ELBO(), params, model, guide, X, Y)
    for loss in (Trace_ELBO(), TraceMeanField_ELBO()):
        stock = draws_of_bound(loss, params, model, guide, X, Y, num=6000)
        assert agree(ours, stock, 4), (ours.mean(), stock.mean(), stock.std() / np.sqrt(6000))
        assert ours.std() <= 1.05 * stock.std()


@pytest.mark.long
def test_particles_share_a_minibatch_and_average():
    one = draws_of_bound(dgp.ELBO(), PARAMS, deep, GUIDE, X, Y, num=2000)
    for vectorize in (True, False):
        many = draws_of_bound(dgp.ELBO(8, vectorize), PARAMS, deep, GUIDE, X, Y, num=500)
        assert agree(one, many, 4)
        np.testing.assert_allclose(many.var() / one.var(), 1 / 8, rtol=0.3)
    # With a single datum per minibatch, particles on different data would not agree even without a hidden layer.
    flat = dgp.guides.InducingPoint(shallow)
    params = {k: v for k, v in PARAMS.items() if k[0] == "g"}
    for seed in range(3):
        values = [bound(dgp.ELBO(n), params, shallow, flat, X, Y, 1, key=jax.random.key(seed)) for n in (1, 5)]
        np.testing.assert_allclose(*values, rtol=1e-10)


@pytest.mark.long
def test_explicit_draw_has_the_same_bound():
    """Design section 2: the explicit last draw is a proper density with the same bound, only noisier."""
    guide = dgp.guides.InducingPoint(explicit)
    collapsed = draws_of_bound(dgp.ELBO(), PARAMS, deep, GUIDE, X, Y)
    drawn = draws_of_bound(dgp.ELBO(), PARAMS, explicit, guide, X, Y, num=6000)
    assert agree(collapsed, drawn, 4)
    assert drawn.std() > 2 * collapsed.std()


@pytest.mark.slow
def test_linear_mean_alone_returns_the_projection():
    """With no variance left, a hidden layer is X W, and W holds the principal directions."""
    wide = np.random.default_rng(0).normal(size=(40, 3)) * [3.0, 1.0, 0.1]

    def model(X):
        f = dgp.gp("f", dgp.kernels.RBF(1e-20), dgp.Points(X[:5]), outputs=2, mean=dgp.means.pca(wide, 2))
        with numpyro.plate("data", len(X)):
            return numpyro.sample("h", f(X))

    h = numpyro.handlers.seed(model, 0)(jnp.array(wide))
    _, vectors = np.linalg.eigh(np.cov(wide.T))
    projected = wide @ vectors[:, ::-1][:, :2]
    np.testing.assert_allclose(np.abs(h), np.abs(projected), atol=1e-8)


@pytest.mark.smoke
def test_mean_field_bound_by_hand():
    """The mean-field bound, with q(u) integrated, against dense algebra for given hidden draws."""
    model = partial(deep, process_noise=0.4)
    guide = dgp.guides.MeanField(model, inducing=dgp.guides.Full())
    params = random_params(model, guide, X, Y)
    a, b = np.asarray(params["h_auto_loc"])[:, 0], np.asarray(params["h_auto_scale"])[:, 0]
    mean, total = layer(params, "f", x, 0.3, 0.9)
    prior = {"f_auto_loc": 0 * params["f_auto_loc"], "f_auto_scale_tril": 0 * params["f_auto_scale_tril"]}
    conditional = layer(prior, "f", x, 0.3, 0.9)[1] + 0.16
    belief_variance = total - layer(prior, "f", x, 0.3, 0.9)[1]
    hidden = 0.5 * ((b**2 + (a - x[:, 0] - mean) ** 2 + belief_variance) / conditional - 1 + np.log(conditional / b**2))
    from scipy.special import roots_hermite

    points, weights = roots_hermite(100)
    rows = a[:, None] + np.sqrt(2) * b[:, None] * points
    g = [layer(params, "g", row[:, None], 1.2, 0.7) for row in rows]
    expected = np.array(
        [-0.5 * np.log(2 * np.pi * NOISE**2) - 0.5 * ((y[n] - g[n][0]) ** 2 + g[n][1]) / NOISE**2 for n in range(30)]
    )
    exact = (expected @ weights / np.sqrt(np.pi)).sum() - hidden.sum() - divergence(params)
    draws = draws_of_bound(dgp.ELBO(), params, model, guide, X, Y, num=4000)
    assert abs(draws.mean() - exact) < 3.5 * draws.std() / np.sqrt(4000)


@pytest.mark.long
def test_gradient_is_the_derivative_of_the_bound():
    value = jax.jit(lambda p: bound(dgp.ELBO(), p, deep, GUIDE, X, Y, key=jax.random.key(2)))
    gradient = jax.grad(value)(PARAMS)
    for name, array in PARAMS.items():
        direction = jax.random.normal(jax.random.key(1), array.shape)
        direction = jnp.tril(direction) if name.endswith("tril") else direction
        ahead, behind = (value(PARAMS | {name: array + e * direction}) for e in (1e-6, -1e-6))
        np.testing.assert_allclose((gradient[name] * direction).sum(), (ahead - behind) / 2e-6, rtol=2e-5)


@pytest.mark.long
def test_five_layers_have_a_finite_gradient_in_float32(x32):
    def model(X, y):
        x = X
        layers = [
            dgp.gp(f"f{i}", dgp.kernels.RBF(), dgp.Points(X[:10]), outputs=2, mean=dgp.means.IdentityMean())
            for i in range(4)
        ]
        last = dgp.gp("g", dgp.kernels.RBF(), dgp.Points(X[:10]))
        with numpyro.plate("rows", len(X)):
            for i, f in enumerate(layers):
                x = numpyro.sample(f"h{i}", f(x))
            numpyro.sample("y", dgp.Likelihood(last(x), lambda v: dist.Normal(v, 0.1)), obs=y)

    key = jax.random.key(0)
    data = jax.random.normal(key, (50, 2)), jax.random.normal(key, (50,))
    guide = dgp.guides.InducingPoint(model)
    params = random_params(model, guide, *data, scale=0.0)
    gradient = jax.jit(jax.grad(lambda p: bound(dgp.ELBO(), p, model, guide, *data)))(params)
    assert all(g.dtype == jnp.float32 and jnp.isfinite(g).all() for g in gradient.values())
