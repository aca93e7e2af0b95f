"""Collapsed bounds against dense algebra, exact evidence, and sampled bounds."""

import dense
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from programs import NOISE, X, Y, Z, draws_of_bound, random_params, shallow
from sizes import mostly_long

import numpyro_dgp as dgp
from numpyro_dgp import kernels as k
from numpyro_dgp.bounds import collapsed as C
from numpyro_dgp.math.linalg import cholesky, matmul
from numpyro_dgp.math.whitening import inverse_cholesky

RBF = k.RBF(1.2, 0.7)
rng = np.random.default_rng(2)


def features(kernel, X, Z):
    whiten = inverse_cholesky(kernel.gram(Z))
    return whiten, matmul(kernel(X, Z), whiten.T), kernel.diag(X)


def grams(kernel, X, Z):
    factor = cholesky(kernel.gram(Z))
    return np.asarray(factor @ factor.T), np.asarray(kernel(Z, X)), np.asarray(kernel.gram(X))


@pytest.mark.smoke
def test_titsias_bound_optimum_and_predictions():
    whiten, A, variances = features(RBF, X, Z)
    data = C.from_features(A, variances, C.Observations(Y, NOISE))
    bound, mean, covariance = dense.titsias(np.asarray(Y), NOISE, *grams(RBF, X, Z))
    np.testing.assert_allclose(data.bound(), bound, rtol=1e-9)
    loc, root = data.optimum()
    L = np.linalg.inv(whiten)
    np.testing.assert_allclose(L @ loc, mean, atol=1e-7)
    np.testing.assert_allclose(L @ root @ root.T @ L.T, covariance, atol=1e-8)
    np.testing.assert_allclose(data.at(loc, root), bound, rtol=1e-9)
    other = dense.svgp_bound(np.asarray(Y), NOISE, *grams(RBF, X, Z), mean + 0.1, 1.3 * covariance)
    shifted = loc + whiten @ np.full(8, 0.1)
    np.testing.assert_allclose(data.at(shifted, np.sqrt(1.3) * root), other, rtol=1e-9)
    assert other < bound
    new = jnp.linspace(-3, 3, 9)[:, None]
    _, A_new, variances_new = features(RBF, new, Z)
    f, F = dense.svgp(*grams(RBF, new, Z), mean, covariance)
    predicted = C.predict(A_new, variances_new, loc, root)
    np.testing.assert_allclose(predicted[0], f, atol=1e-7)
    np.testing.assert_allclose(predicted[1], np.diag(F), atol=1e-7)


@pytest.mark.slow
def test_the_bound_of_the_program_at_the_optimum_and_below_it_elsewhere():
    """The collapsed bound is that of dgp.ELBO at the closed-form q(v), and one at random is below it."""
    _, A, variances = features(RBF, X, Z)
    data = C.from_features(A, variances, C.Observations(Y, NOISE))
    guide = dgp.guides.InducingPoint(shallow)
    loc, root = data.optimum()
    evaluate = lambda params: -dgp.ELBO().loss(jax.random.key(0), params, shallow, guide, X, Y)  # noqa: E731
    np.testing.assert_allclose(evaluate({"g_auto_loc": loc, "g_auto_scale_tril": root}), data.bound(), rtol=1e-9)
    assert evaluate(random_params(shallow, guide, X, Y)) < data.bound()


@pytest.mark.long
def test_evidence_between_the_bounds():
    exact = dense.log_normal(np.asarray(Y), np.zeros(30), np.asarray(RBF.gram(X)) + NOISE**2 * np.eye(30))
    for M in (2, 4, 8):
        points = jnp.linspace(-2, 2, M)[:, None]
        _, A, variances = features(RBF, X, points)
        lower = C.from_features(A, variances, C.Observations(Y, NOISE)).bound()
        upper = C.upper_bound(A, variances, Y, NOISE)
        np.testing.assert_allclose(upper, dense.titsias_upper(np.asarray(Y), NOISE, *grams(RBF, X, points)), rtol=1e-8)
        assert lower < exact < upper
    _, A, variances = features(RBF, X, X)
    np.testing.assert_allclose(C.from_features(A, variances, C.Observations(Y, NOISE)).bound(), exact, rtol=1e-6)
    np.testing.assert_allclose(C.upper_bound(A, variances, Y, NOISE), exact, rtol=1e-6)


@pytest.mark.slow
def test_slopes_weights_and_sums():
    _, A, variances = features(RBF, X, Z)
    slope, noise = jnp.array(rng.normal(size=30)), jnp.array(rng.uniform(0.2, 0.5, size=30))
    data = C.from_features(A, variances, C.Observations(Y, noise, slope, 0.1))
    loc, root = data.b * 0.1, 0.3 * jnp.eye(8)
    mean, variance = C.predict(A, variances, loc, root)
    square = (Y - slope * mean) ** 2 + slope**2 * variance + 0.1
    expected = (-0.5 * square / noise**2 - np.log(np.sqrt(2 * np.pi) * noise)).sum()
    np.testing.assert_allclose(data.expected(loc, root), expected, rtol=1e-10)

    def part(weights):
        return C.from_features(A, variances, C.Observations(Y, noise, slope, 0.1, weights))

    keep = jnp.arange(30) < 12
    total = part(keep).plus(part(~keep))
    for a, b in zip(total, data, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-10)
    cut = C.from_features(A[:12], variances[:12], C.Observations(Y[:12], noise[:12], slope[:12], 0.1))
    np.testing.assert_allclose(part(keep).bound(), cut.bound(), rtol=1e-10)


@pytest.mark.parametrize("full", mostly_long([True], [False, True]))
@pytest.mark.long
def test_gaussian_inputs_against_draws_of_them(full):
    """Expectations of the quadratic over inputs, with a tilt: a mean function and observations linear in h."""
    kernel = RBF + k.Linear(0.4)
    N, D = 6, 2
    loc, points = jnp.array(rng.normal(size=(N, D))), jnp.array(rng.normal(size=(4, D)))
    roots = jnp.array(rng.normal(size=(N, D, D))) * 0.3
    roots = roots if full else roots * jnp.eye(D)
    variance = roots @ roots.mT
    y, tilt = jnp.array(rng.normal(size=N)), jnp.array(rng.normal(size=(N, D)))
    whiten = inverse_cholesky(kernel.gram(points))
    kwargs = {"slope": jnp.array(rng.normal(size=N)), "y_variance": 0.2}
    variance = variance if full else jnp.diagonal(variance, axis1=-2, axis2=-1)
    data = C.from_moments(kernel, points, whiten, loc, variance, C.Observations(y, 0.6, **kwargs), tilt=tilt)
    v, root = jnp.array(rng.normal(size=4)), 0.5 * jnp.eye(4)

    def draw(key):
        h = loc + (roots @ jax.random.normal(key, (N, D, 1)))[..., 0]
        A, variances = matmul(kernel(h, points), whiten.T), kernel.diag(h)
        return C.from_features(A, variances, C.Observations(y + (tilt * h).sum(-1), 0.6, **kwargs)).at(v, root)

    draws = jax.vmap(draw)(jax.random.split(jax.random.key(0), 20_000))
    assert abs(draws.mean() - data.at(v, root)) < 3 * draws.std() / np.sqrt(len(draws))
    assert draws.std() / np.sqrt(len(draws)) < 0.01 * abs(draws.mean())


@pytest.mark.slow
def test_inputs_without_variance_are_exact_inputs():
    whiten, A, variances = features(RBF, X, Z)
    W, noise = 0.7, jnp.linspace(0.2, 0.5, 30)
    moments = C.from_moments(RBF, Z, whiten, X, 0 * X, C.Observations(Y, noise), tilt=jnp.full_like(X, -W))
    exact = C.from_features(A, variances, C.Observations(Y - W * X[:, 0], noise))
    for a, b in zip(moments, exact, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.long
def test_small_noise_and_a_smooth_kernel():
    """The precision of v has no negative eigenvalue beyond rounding, and the bound is that of q(v) in the layer."""
    points, inputs = jnp.linspace(-3, 3, 60)[:, None], jnp.array(rng.normal(size=(200, 1)))
    data = C.Observations(jnp.sin(inputs[:, 0]), 0.05)
    whiten, A, variances = features(k.RBF(), inputs, points)
    moments = C.from_moments(k.RBF(), points, whiten, inputs, 0 * inputs, data)
    assert jnp.linalg.eigvalsh(moments.Phi)[0] > -0.5
    exact = C.from_features(A, variances, data)
    np.testing.assert_allclose(moments.bound(), exact.bound(), rtol=1e-6)
    np.testing.assert_allclose(moments.bound(), exact.at(*moments.optimum()), rtol=1e-6)
    slope = jax.grad(lambda z: C.from_moments(
        k.RBF(), z, features(k.RBF(), inputs, z)[0], inputs, 0 * inputs + 0.1, data).bound()
    )(points)  # fmt: skip
    assert np.isfinite(slope).all()


def latent_model(X, y=None):
    g = dgp.gp("g", k.RBF(1.0, jnp.array([0.8, 1.2])), dgp.Points(jnp.hstack([Z, jnp.cos(5 * Z)])))
    with numpyro.plate("data", len(X)):
        x = dgp.latent("w", X, 1)
        numpyro.sample("y", dgp.Likelihood(g(x), lambda v: dist.Normal(v, NOISE)), obs=y)


@pytest.mark.long
def test_gplvm_bound_against_the_sampled_one():
    """For Gaussian latents beside inputs known exactly, the closed form is the mean of sampled bounds at that q(v)."""
    guide = dgp.guides.InducingPoint(latent_model)
    params = random_params(latent_model, guide, X, Y)
    points, kernel = jnp.hstack([Z, jnp.cos(5 * Z)]), k.RBF(1.0, jnp.array([0.8, 1.2]))
    w, s = params["w_auto_loc"], params["w_auto_scale"]
    whiten = inverse_cholesky(kernel.gram(points))
    inputs = jnp.hstack([X, w]), jnp.hstack([0 * X, s**2])
    data = C.from_moments(kernel, points, whiten, *inputs, C.Observations(Y, NOISE))
    loc, root = data.optimum()
    bound = data.bound() - 0.5 * (s**2 + w**2 - 1 - 2 * jnp.log(s)).sum()
    params = params | {"g_auto_loc": loc, "g_auto_scale_tril": root}
    draws = draws_of_bound(dgp.ELBO(), params, latent_model, guide, X, Y)
    assert abs(draws.mean() - bound) < 3 * draws.std() / np.sqrt(len(draws))


@pytest.mark.long
def test_single_precision(x32):
    single = [jnp.asarray(a, jnp.float32) for a in (X, Y, Z)]
    whiten, A, variances = features(RBF, single[0], single[2])
    observed = C.Observations(single[1], NOISE)
    data = C.from_features(A, variances, observed)
    bound, _, _ = dense.titsias(np.asarray(Y), NOISE, *grams(RBF, *single[::2]))
    assert data.bound().dtype == jnp.float32
    np.testing.assert_allclose(data.bound(), bound, rtol=1e-3)
    moments = C.from_moments(RBF, single[2], whiten, single[0], 0 * single[0], observed)
    assert moments.bound().dtype == jnp.float32
    np.testing.assert_allclose(moments.bound(), bound, rtol=1e-3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda A, v: C.from_features(A, v, C.Observations(Y[:, None], 0.1)),
            r"from_features: expected y of shape \(N,\) .* y \(30, 1\)",
        ),
        (
            lambda A, v: C.from_features(A, v[:3], C.Observations(Y, 0.1)),
            "from_features: expected y of .* 'variances': ",
        ),
        (lambda A, v: C.from_moments(RBF, Z, A, X, X[:3], C.Observations(Y, 0.1)), "from_moments: expected y of shape"),
        (lambda A, v: C.upper_bound(A[:4], v, Y, 0.1), "upper_bound: expected y of shape"),
        (lambda A, v: C.upper_bound(A, v, Y, Y), "upper_bound: expected noise to be a single number"),
    ],
)
def test_bad_input(call, message):
    _, A, variances = features(RBF, X, Z)
    with pytest.raises(ValueError, match=message):
        call(A, variances)
