"""Layers on spherical harmonics: the harmonics, kernels of directions, what is known given v, by dense algebra."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from dense import svgp_bound
from numpyro import handlers
from numpyro.infer import MCMC, NUTS, SVI, Trace_ELBO
from programs import agree, draws_of_bound, random_params
from scipy.integrate import quad
from scipy.special import eval_gegenbauer
from sizes import mostly_long

import numpyro_dgp as dgp
from numpyro_dgp import guides as G
from numpyro_dgp.kernels import RBF, ArcCosine, Chordal, GreatCircle, Matern52, Zonal
from numpyro_dgp.math.spherical_harmonics import degree_shares, harmonics, num_harmonics

rng = np.random.default_rng(4)
X = rng.normal(size=(11, 2))
EARTH = np.stack([rng.uniform(-80, 80, 11), rng.uniform(-170, 170, 11)], 1)
KERNELS = {
    "steps": ArcCosine(0.7, order=0),
    "rectified": ArcCosine(1.3, np.array([0.5, 2.0]), 0.8),
    "squared": ArcCosine(order=2),
    "zonal": Zonal(Matern52(1.3, 0.7), np.array([0.5, 2.0]), 0.8),
    "smooth": Zonal(RBF(0.9, 0.8), order=0),
    "chords": Chordal(Matern52(1.2, 3000.0), 6371.0),
    "arcs": GreatCircle(0.8, 0.6),
}


def inputs(name):
    return EARTH if name in ("chords", "arcs") else X


def polynomial(dims, degree, cosine):
    """P_l by SciPy; in the plane it is that of Chebyshev."""
    if dims == 2:
        return np.cos(degree * np.arccos(np.clip(cosine, -1, 1)))
    order = (dims - 2) / 2
    return eval_gegenbauer(degree, order, cosine) / eval_gegenbauer(degree, order, 1.0)


def opened(kernel, harmonics_, value, **kwargs):
    with handlers.substitute(data={"f": value}), handlers.seed(rng_seed=0):
        return dgp.gp("f", kernel, harmonics_, **kwargs)


@pytest.mark.smoke
@pytest.mark.parametrize("case", mostly_long([(3, 5)], [(2, 7), (3, 5), (5, 3), (9, 2), (4, 0), (2, 0)]))
def test_harmonics_reproduce_the_zonal_polynomial(case):
    dims, degree = case
    x = rng.normal(size=(8, dims))
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    B = harmonics(dims, degree, jnp.asarray(x))
    assert B.shape == (8, num_harmonics(dims, degree))
    np.testing.assert_allclose(B @ B.T, polynomial(dims, degree, x @ x.T), atol=1e-12)


@pytest.mark.long
@pytest.mark.parametrize("name", KERNELS)
def test_shares_are_the_expansion_of_the_kernel(name):
    kernel = KERNELS[name]
    with jax.enable_x64(True):
        kernel = kernel.cast(jnp.float64)
        found = degree_shares(3, 6, kernel.by_angle, jnp.float64)
        for degree in (0, 1, 4):
            inside = lambda t, d=degree: float(kernel.by_angle(t)) * polynomial(3, d, np.cos(t)) * np.sin(t) / 2  # noqa: E731
            np.testing.assert_allclose(found[degree], (2 * degree + 1) * quad(inside, 0, np.pi)[0], atol=1e-8)
        far = degree_shares(3, 200, kernel.by_angle, jnp.float64)
        np.testing.assert_allclose(far.sum(), kernel.by_angle(jnp.zeros(())), rtol=0.01)
        x = jnp.asarray(inputs(name))
        cosine = np.asarray(kernel.directions(x) @ kernel.directions(x).T)
        between = kernel.by_angle(jnp.arccos(np.clip(cosine, -1, 1)))
        between *= kernel.factor(x)[:, None] * kernel.factor(x)
        np.testing.assert_allclose(between, kernel(x, x), atol=1e-6)


@pytest.mark.long
@pytest.mark.parametrize("name", mostly_long(["zonal"], KERNELS))
def test_values_given_v_are_the_parts_that_are_kept(name):
    """Mean, variance and joint covariance, against sums over degrees by SciPy."""
    kernel, degrees = KERNELS[name], (0, 1, 3) if name == "steps" else (0, 1, 2)
    with jax.enable_x64(True):
        x, v = jnp.asarray(inputs(name)), jnp.asarray(rng.normal(size=11 if name == "steps" else 9))
        f = opened(kernel, dgp.Harmonics(2, degrees), v)
        cosine, r = np.asarray(kernel.directions(x) @ kernel.directions(x).T), np.asarray(kernel.factor(x))
        shares = np.asarray(degree_shares(3, 3, kernel.cast(jnp.float64).by_angle, jnp.float64))[list(degrees)]
        kept = r[:, None] * r * sum(a * polynomial(3, d, cosine) for d, a in zip(degrees, shares, strict=True))
        A = f.features(x)
        np.testing.assert_allclose(A @ A.T, kept, atol=1e-8)
        np.testing.assert_allclose(f(x).mean, A @ v, atol=1e-12)
        np.testing.assert_allclose(f(x).variance, np.diag(kernel(x, x)) - np.diag(kept), atol=1e-6)
        np.testing.assert_allclose(f.joint(x).conditional_covariance[0], kernel(x, x) - kept, atol=1e-8)
        assert np.linalg.eigvalsh(kernel(x, x) - kept).min() > -1e-10


def model(X, y=None, kernel=KERNELS["zonal"], noise=0.3):
    f = dgp.gp("f", kernel, dgp.Harmonics(2, 3))
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dgp.Likelihood(f(X), lambda v: dist.Normal(v, noise)), obs=y)


Y = np.sin(2 * X[:, 0]) + X[:, 1]


@pytest.mark.long
def test_bound_is_that_of_dense_algebra():
    with jax.enable_x64(True):
        x, y, kernel = jnp.asarray(X), jnp.asarray(Y), KERNELS["zonal"]
        A = np.asarray(opened(kernel, dgp.Harmonics(2, 3), jnp.zeros(16)).features(x))
        loc, S = rng.normal(size=16), np.tril(0.3 * rng.normal(size=(16, 16)), -1) + np.diag(rng.uniform(0.3, 1, 16))
        params = {"f_auto_loc": jnp.asarray(loc), "f_auto_scale_tril": jnp.asarray(S)}
        found = -dgp.ELBO().loss(jax.random.key(0), params, model, G.InducingPoint(model), x, y)
        wanted = svgp_bound(Y, 0.3, np.eye(16), A.T, np.asarray(kernel(x, x)), loc, S @ S.T)
        np.testing.assert_allclose(found, wanted, rtol=1e-6)


@pytest.mark.long
def test_the_best_bound_with_all_degrees_is_the_evidence():
    with jax.enable_x64(True):
        x, y, kernel = jnp.asarray(X), jnp.asarray(Y), Zonal(RBF(1.0, 0.7))
        program = lambda X, y=None: _with(kernel, 9, X, y)  # noqa: E731
        bound = -dgp.ELBO().loss(jax.random.key(0), {}, program, G.Collapsed(program), x, y)
        evidence = dist.MultivariateNormal(jnp.zeros(11), kernel.gram(x) + 0.09 * jnp.eye(11)).log_prob(y)
        np.testing.assert_allclose(bound, evidence, atol=1e-3)
        assert bound < evidence


def _with(kernel, degrees, X, y):
    f = dgp.gp("f", kernel, dgp.Harmonics(2, degrees))
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dgp.Likelihood(f(X), lambda v: dist.Normal(v, 0.3)), obs=y)


def deep(X, y=None):
    variance = numpyro.sample("variance", dist.LogNormal(0.0, 0.5))
    weights = numpyro.param("weights", jnp.ones(2), constraint=dist.constraints.positive)
    f = dgp.gp("f", Zonal(Matern52(0.3, 0.7), weights), dgp.Harmonics(2, 2), outputs=2, mean=dgp.means.IdentityMean())
    g = dgp.gp("g", ArcCosine(variance), dgp.Harmonics(2, (0, 1, 2, 4)))
    with numpyro.plate("data", len(X)):
        h = numpyro.sample("h", f(X))
        numpyro.sample("y", dgp.Likelihood(g(h), lambda v: dist.Normal(v, 0.3)), obs=y)


@pytest.mark.long
def test_objectives_agree_on_two_layers():
    guide = G.InducingPoint(deep)
    params = random_params(deep, guide, X, Y)
    assert agree(*(draws_of_bound(loss, params, deep, guide, X, Y, num=500) for loss in (dgp.ELBO(), Trace_ELBO())))


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_two_layers_fit_and_predict(dtype):
    with jax.enable_x64(dtype == "float64"):
        x, y = jnp.asarray(X, dtype), jnp.asarray(Y, dtype)
        guide = G.InducingPoint(deep)
        result = dgp.fit(
            SVI(deep, guide, optax.adam(0.03), dgp.ELBO()), jax.random.key(0), 300, x, y, progress_bar=False
        )
        assert result.losses[-20:].mean() < result.losses[:20].mean() - 5
        posterior = dgp.Posterior(deep, guide, result.params)
        assert posterior.predict(jax.random.key(1), x).mean.dtype == dtype
        assert abs(posterior.predict(jax.random.key(1), x).mean - y).mean() < 0.45
        curves = posterior.using(num_samples=200).functions(jax.random.key(2))(x)["y"]
        band = posterior.predict_function(jax.random.key(3), x)
        np.testing.assert_allclose(curves.mean(0), band.mean, atol=5 * np.sqrt(band.variance.max() / 200) + 0.05)


@pytest.mark.long
def test_chains_take_them():
    kernel = MCMC(
        NUTS(dgp.for_mcmc(deep, params={"weights": jnp.ones(2)}, collapse=False)),
        num_warmup=20,
        num_samples=20,
        progress_bar=False,
    )
    kernel.run(jax.random.key(0), X, Y)
    assert np.isfinite(kernel.get_samples()["g"]).all()


@pytest.mark.long
@pytest.mark.parametrize("name", ["rectified", "zonal", "chords"])
def test_draws_of_functions_have_the_covariance_of_the_kernel(name):
    """A draw of the prior: v at random, and of the other degrees random zonal functions."""
    kernel, x = KERNELS[name], jnp.asarray(inputs(name)[:4], jnp.float32)
    v = jnp.zeros(4)

    def draw(key):
        belief, function = jax.random.split(key)
        f = opened(kernel, dgp.Harmonics(2, (0, 1)), v)
        draw = f.prior_draw(function, jax.random.normal(belief, (1, 16)) / 4, x)
        return draw[0][:, 0]

    draws = np.asarray(jax.vmap(draw)(jax.random.split(jax.random.key(0), 20_000)))
    products = draws[:, :, None] * draws[:, None]
    errors = products.std(0) / np.sqrt(len(draws))
    assert (abs(products.mean(0) - kernel(x, x)) < 4.5 * errors + 2e-3 * np.asarray(kernel.diag(x)).max()).all()


@pytest.mark.long
def test_outputs_may_have_kernels_of_their_own():
    kernels = [KERNELS["zonal"], KERNELS["rectified"]]
    with jax.enable_x64(True):
        v = jnp.asarray(rng.normal(size=(2, 9)))
        both = opened(kernels, dgp.Harmonics(2, 2), v, outputs=2)(X)
        for p, kernel in enumerate(kernels):
            alone = opened(kernel, dgp.Harmonics(2, 2), v[p])(X)
            np.testing.assert_allclose(both.mean[:, p], alone.mean, atol=1e-12)
            np.testing.assert_allclose(both.variance[:, p], alone.variance, atol=1e-12)


@pytest.mark.long
@pytest.mark.parametrize("kernel", ["zonal", "rectified", "chords"])
def test_kernels_keep_the_promises_of_kernels(kernel):
    dgp.testing.check_kernel(KERNELS[kernel], inputs(kernel))


@pytest.mark.long
def test_slopes():
    f = opened(KERNELS["zonal"], dgp.Harmonics(2, 3), jnp.asarray(rng.normal(size=16), jnp.float32))
    slopes = jax.vmap(jax.grad(lambda x: f(x[None]).mean[0]))(jnp.asarray(X, jnp.float32))
    np.testing.assert_allclose(f.grad(X, 1).mean, slopes[:, 1], atol=1e-4)


WRONG = {
    "degrees": (lambda: dgp.Harmonics(2, (1, 1)), r"Harmonics: expected degrees to be different integers"),
    "negative": (lambda: dgp.Harmonics(2, -1), r"Harmonics: expected degrees to be different integers"),
    "columns": (lambda: dgp.Harmonics(0, 2), r"Harmonics: expected columns to be a positive integer"),
    "kernel": (lambda: opened(RBF(), dgp.Harmonics(2, 2), jnp.zeros(9)), r"gp 'f': expected a kernel of directions"),
    "many": (
        lambda: opened(Zonal(), dgp.Harmonics(30, 4), jnp.zeros(9)),
        r"expected at most 2000 harmonics of one degree, got \d+ of degree 4 with 30 columns",
    ),
    "spheres": (
        lambda: opened([Zonal(), GreatCircle()], dgp.Harmonics(3, 1), jnp.zeros((2, 4)), outputs=2),
        r"expected (all kernels on the same sphere|latitude and longitude)|latitude and longitude",
    ),
    "width": (lambda: opened(Zonal(), dgp.Harmonics(2, 1), jnp.zeros(4))(np.zeros((3, 3))), r"D = 2 columns"),
    "zonal": (lambda: Zonal(RBF(1.0, np.ones(2))), r"Zonal: expected a stationary kernel with a single lengthscale"),
    "order": (lambda: Zonal(order=3), r"Zonal: expected order to be 0, 1 or 2, got 3"),
    "traced": (
        lambda: jax.jit(lambda s: dgp.Harmonics.around(Zonal(RBF(1.0, s)), 2, 30).columns)(0.5),
        r"Harmonics.around: expected a kernel with known hyperparameters",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_calls(name):
    call, match = WRONG[name]
    with pytest.raises(ValueError, match=match):
        call()


@pytest.mark.slow
def test_degrees_without_variance_are_warned_of():
    with pytest.warns(UserWarning, match=r"its kernel has next to no variance in degrees \[3\] of its Harmonics"):
        opened(ArcCosine(), dgp.Harmonics(2, 3), jnp.zeros(16))
    # All degrees that are kept are empty: the variance, 3, is left out.
    with pytest.warns(UserWarning, match=r"its kernel has next to no variance in degrees \[3\] of its Harmonics"):
        f = opened(ArcCosine(), dgp.Harmonics(2, (3,)), jnp.zeros(7))
    np.testing.assert_allclose(f(jnp.ones((1, 2))).conditional_variance, 3.0, rtol=1e-6)
    assert dgp.Harmonics.around(ArcCosine(), 2, 40).degrees == (0, 1, 2, 4, 6)
