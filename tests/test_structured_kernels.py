"""Kernels of waves, changing lengthscales, changes of regime, random walks, places on a sphere, and features."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from dense import gram
from numpyro.infer import SVI
from numpyro.infer.util import initialize_model
from sizes import mostly_long

import numpyro_dgp as dgp
from numpyro_dgp import kernels as K

VARIANCE, FREQUENCY = np.array([1.2, 0.5]), np.array([[0.3, -0.2], [0.0, 0.6]])
LENGTHSCALE = np.array([[0.7, 1.5], [2.0, 0.9]])


def waves(x, z):
    r = x - z
    decay = np.exp(-0.5 * (r**2 / LENGTHSCALE**2).sum(1))
    return (VARIANCE * decay * np.cos(2 * np.pi * FREQUENCY @ r)).sum()


def gibbs(base, places):
    def k(x, z):
        a = base * np.exp(np.broadcast_to(x[places:], places))
        b = base * np.exp(np.broadcast_to(z[places:], places))
        r2 = (x[:places] - z[:places]) ** 2
        return 1.3 * np.prod(np.sqrt(2 * a * b / (a**2 + b**2))) * np.exp(-(r2 / (a**2 + b**2)).sum())

    return k


def varying(rho, places):
    """Paciorek and Schervish's construction with matrices, sqrt(2 |S|^1/2 |S'|^1/2 ...) for diagonal ones."""

    def k(x, z):
        a, b = (np.diag((0.8 * np.exp(np.broadcast_to(v[places:], places))) ** 2) for v in (x, z))
        r, middle = x[:places] - z[:places], (a + b) / 2
        size = np.linalg.det(a) ** 0.25 * np.linalg.det(b) ** 0.25 / np.linalg.det(middle) ** 0.5
        return 1.3 * size * rho(math.sqrt(r @ np.linalg.solve(middle, r)))

    return k


ROWS = np.array([[0.9, -0.5], [0.3, 1.1]])


def precision(W):
    return lambda x, z: 1.3 * math.exp(-0.5 * (x - z) @ (W.T @ W) @ (x - z))


def matern32(r):
    return (1 + math.sqrt(3) * r) * math.exp(-math.sqrt(3) * r)


def sigmoids(x, z):
    s = lambda a, b: 2 * (0.7 * a @ b + 0.4)  # noqa: E731
    return 1.5 * 2 / np.pi * math.asin(s(x, z) / math.sqrt((1 + s(x, x)) * (1 + s(z, z))))


def change(x, z):
    w, v = (1 / (1 + np.exp(-(a[1] - 0.2) / 0.4)) for a in (x, z))
    before, after = np.exp(-0.5 * ((x - z) ** 2).sum()), 0.3 * x[0] * z[0]
    return (1 - w) * before * (1 - v) + w * after * v


def walk(x, z):
    a, b = x[0] - 0.5, z[0] - 0.5
    return 1.4 * min(abs(a), abs(b)) * (a * b > 0)


def integrated_walk(x, z):
    """By Cov = E[int W int W], a sum over cells of a grid."""
    a, b = abs(x[0] - 0.5), abs(z[0] - 0.5)
    u = (np.arange(20_000) + 0.5) * min(a, b) / 20_000
    return 1.4 * ((a - u) * (b - u)).mean() * min(a, b) * ((x[0] - 0.5) * (z[0] - 0.5) > 0)


def direction(x):
    latitude, longitude = np.radians(x)
    level = np.cos(latitude)
    return np.array([level * np.cos(longitude), level * np.sin(longitude), np.sin(latitude)])


def chordal(x, z):
    d = 2.0 * np.linalg.norm(direction(x) - direction(z)) / 0.8
    return (1 + math.sqrt(3) * d) * np.exp(-math.sqrt(3) * d)


def great_circle(x, z):
    return 1.2 * np.exp(-2.0 * np.arccos(np.clip(direction(x) @ direction(z), -1, 1)) / 1.5)


WEIGHTS = np.random.default_rng(3).normal(size=(2, 4))


def network(parameters, X):
    return jnp.tanh(X @ parameters["weights"])


def deep(x, z):
    return np.exp(-0.5 * np.square(np.tanh(x @ WEIGHTS) - np.tanh(z @ WEIGHTS)).sum() / 0.49)


def plane(n, seed):
    return np.random.default_rng(seed).normal(size=(n, 2))


def with_factors(columns):
    return lambda n, seed: np.random.default_rng(seed).normal(size=(n, columns)) * 0.5


def earth(n, seed):
    r = np.random.default_rng(seed)
    return np.stack([np.degrees(np.arcsin(r.uniform(-1, 1, n))), r.uniform(-180, 180, n)], 1)


def line(n, seed):
    return np.random.default_rng(seed).normal(size=(n, 1))


TABLE = {
    "spectral-mixture": (K.SpectralMixture(VARIANCE, FREQUENCY, LENGTHSCALE), waves, plane),
    "gibbs": (K.VaryingLengthscale(K.RBF(1.3, 0.8)), gibbs(0.8, 1), with_factors(2)),
    "gibbs-each": (K.VaryingLengthscale(K.RBF(1.3, [0.5, 1.2]), 2), gibbs(np.array([0.5, 1.2]), 2), with_factors(4)),
    "gibbs-shared": (K.VaryingLengthscale(K.RBF(1.3, 0.8), 2), gibbs(0.8, 2), with_factors(3)),
    "varying-matern": (K.VaryingLengthscale(K.Matern32(1.3, 0.8), 2), varying(matern32, 2), with_factors(4)),
    "varying-rational": (
        K.VaryingLengthscale(K.RationalQuadratic(1.3, 0.8, 0.7)),
        varying(lambda r: (1 + r**2 / 1.4) ** -0.7, 1),
        with_factors(2),
    ),
    "error-function": (K.ErrorFunction(1.5, 0.7, 0.4), sigmoids, plane),
    "change-point": (K.ChangePoint(K.RBF(), 0.3 * K.Linear().on(0), 0.2, 0.4, 1), change, plane),
    "brownian": (K.Brownian(1.4, 0.5), walk, line),
    "integrated-brownian": (K.IntegratedBrownian(1.4, 0.5), integrated_walk, line),
    "chordal": (K.Chordal(K.Matern32(1.0, 0.8), 2.0), chordal, earth),
    "great-circle": (K.GreatCircle(1.2, 1.5, 2.0), great_circle, earth),
    "transformed": (K.Transformed(K.RBF(1.0, 0.7), network, {"weights": WEIGHTS}), deep, plane),
    "full-precision": (K.Transformed(K.RBF(1.3), ROWS), precision(ROWS), plane),
    "low-rank-precision": (K.Transformed(K.RBF(1.3), ROWS[:1].tolist()), precision(ROWS[:1]), plane),
}
every = pytest.mark.parametrize("name", mostly_long(["gibbs", "spectral-mixture", "great-circle"], TABLE))


@every
def test_values(name):
    kernel, scalar, inputs = TABLE[name]
    X, Z = inputs(6, 0), np.vstack([inputs(3, 1), inputs(6, 0)[:1]])
    np.testing.assert_allclose(kernel(X, Z), gram(scalar, X, Z), rtol=1e-7, atol=3e-8)
    np.testing.assert_allclose(kernel.diag(X), [scalar(x, x) for x in X], rtol=1e-7)


@pytest.mark.long
@pytest.mark.parametrize("name", TABLE)
def test_leading_dimensions_broadcast(name):
    kernel, _, inputs = TABLE[name]
    X, Z = inputs(6, 0), inputs(4, 1)
    both = np.stack([X, X[::-1]])
    np.testing.assert_allclose(kernel(both, Z)[1], kernel(X[::-1], Z), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(kernel.diag(both)[1], kernel.diag(X[::-1]), rtol=1e-12)


@pytest.mark.long
@pytest.mark.parametrize("name", mostly_long(["gibbs"], TABLE))
@pytest.mark.parametrize("dtype", [pytest.param(np.float64, marks=pytest.mark.long), np.float32])
def test_is_a_kernel(name, dtype):
    kernel, _, inputs = TABLE[name]
    dgp.testing.check_kernel(kernel, inputs(25, 0).astype(dtype))


@pytest.mark.long
@pytest.mark.parametrize("name", TABLE)
def test_gradient_is_the_derivative_and_finite_where_inputs_coincide(name):
    kernel, _, inputs = TABLE[name]
    X, Z, way = (jnp.asarray(inputs(4, seed)) for seed in (0, 1, 2))
    f = lambda X: jnp.sin(kernel(X, Z)).sum()  # noqa: E731
    numeric = (f(X + 1e-6 * way) - f(X - 1e-6 * way)) / 2e-6
    np.testing.assert_allclose((jax.grad(f)(X) * way).sum(), numeric, rtol=1e-5, atol=1e-7)
    twice = jnp.vstack([X, X])
    total = lambda k, X: k(X, X).sum() + k.diag(X).sum()  # noqa: E731
    for leaf in jax.tree.leaves(jax.grad(total, (0, 1))(kernel, twice)):
        assert np.isfinite(leaf).all()


@pytest.mark.long
@pytest.mark.parametrize("name", TABLE)
def test_features_have_the_kernel_as_covariance(name, key):
    kernel, _, inputs = TABLE[name]
    X, num = jnp.asarray(inputs(5, 0)), 200_000
    features = kernel.features(key, X, num)
    products = features[:, None] * features[None]
    error = products.std(-1) / math.sqrt(num) + 1e-12
    assert jnp.abs((products.mean(-1) - kernel.gram(X)) / error).max() < 5
    assert jnp.abs(features.mean(-1) / (features.std(-1) / math.sqrt(num))).max() < 5


@pytest.mark.slow
@pytest.mark.parametrize("name", ["brownian", "integrated-brownian"])
def test_features_of_walks(name, key):
    """Zero at the origin, with finite slopes there; in single precision too."""
    kernel, X = TABLE[name][0], jnp.array([[0.5], [0.5 + 1e-6], [0.1], [3.0]])
    features = lambda X: kernel.features(key, X, 50)  # noqa: E731
    found, slopes = jax.jvp(features, (X,), (jnp.ones_like(X),))
    assert (found[0] == 0).all()
    assert np.isfinite(slopes).all()
    np.testing.assert_allclose(found[1:].std(1), jnp.sqrt(kernel.diag(X[1:])), rtol=0.5)
    assert np.isfinite(kernel.features(key, X.astype(jnp.float32), 50)).all()


@pytest.mark.parametrize("lengthscale", [20.0, 1e-4, np.nan])
def test_features_of_a_great_circle(lengthscale, key):
    """Nothing but signs; NaN where too many planes would be needed or the lengthscale is NaN; no slopes."""
    X = jnp.asarray(earth(4, 0))
    features = jax.jit(lambda length, X: K.GreatCircle(1.0, length).features(key, X, 5))
    found = features(lengthscale, X)
    assert (jnp.abs(found) == 1).all() if lengthscale > 1 else np.isnan(found).all()
    with pytest.raises(ValueError, match=r"expected draws .* got a derivative .* kernels.Chordal"):
        jax.grad(lambda X: features(lengthscale, X).sum())(X)


def test_gibbs_with_one_lengthscale_is_an_rbf():
    X = plane(5, 0)
    at = np.hstack([X, np.full((5, 1), math.log(0.7))])
    np.testing.assert_allclose(K.VaryingLengthscale(K.RBF(1.5, 2.0), 2)(at, at), K.RBF(1.5, 1.4)(X, X), rtol=1e-12)


def test_varying_lengthscales_have_the_slopes_of_their_kernel():
    assert [K.VaryingLengthscale(k).num_derivatives for k in (K.Matern12(), K.Matern52(), K.RBF())] == [0, 2, math.inf]


def test_far_inputs_of_an_error_function_keep_their_digits():
    """Where the argument of the arc sine is near one; slopes stay finite."""
    X, kernel = jnp.array([[20.0], [20.01], [40.0]], jnp.float32), K.ErrorFunction(1.0, 4.0, 1.0)
    exact = kernel(X.astype(jnp.float64), X.astype(jnp.float64))
    np.testing.assert_allclose(kernel(X, X), exact, atol=1e-5)
    assert np.isfinite(jax.grad(lambda X: kernel(X, X).sum())(X)).all()


def test_a_process_convolution_by_nodes():
    """The integral of two Gaussian smoothing functions of width a is a Gaussian of width sqrt(2) a."""
    a, nodes = 0.4, np.linspace(-6, 6, 121)
    weights = np.full(121, nodes[1] - nodes[0])
    smoothing = lambda X: jnp.exp(-0.5 * jnp.square((X - nodes) / a))  # noqa: E731
    kernel, x = K.Transformed(K.Linear(weights), smoothing), line(5, 0)
    expected = K.RBF(math.sqrt(math.pi) * a, math.sqrt(2) * a)(x, x)
    np.testing.assert_allclose(kernel(x, x), expected, rtol=1e-7)
    dgp.testing.check_kernel(kernel, x)


def test_one_wave_without_turns_is_an_rbf():
    X = plane(5, 0)
    wave = K.SpectralMixture([1.5], [[0.0, 0.0]], [0.7])
    np.testing.assert_allclose(wave(X, X), K.RBF(1.5, 0.7)(X, X), rtol=1e-12)


@pytest.mark.slow
def test_spectral_density_of_waves_inverts_to_the_kernel():
    kernel = TABLE["spectral-mixture"][0]
    edge, points = 25.0, 501
    grid = jnp.linspace(-edge, edge, points)
    mesh = jnp.stack(jnp.meshgrid(grid, grid, indexing="ij"), -1)
    cell = ((grid[1] - grid[0]) / (2 * np.pi)) ** 2
    for r in ([0.0, 0.0], [0.4, -0.7]):
        found = (kernel.spectral_density(mesh) * jnp.cos(mesh @ jnp.array(r))).sum() * cell
        np.testing.assert_allclose(found, kernel(np.array([r]), np.zeros((1, 2)))[0, 0], rtol=1e-8)
    both = 2.0 * kernel + K.RBF()
    expected = 2 * kernel.spectral_density(mesh[3]) + K.RBF().spectral_density(mesh[3])
    np.testing.assert_allclose(both.spectral_density(mesh[3]), expected, rtol=1e-12)


@pytest.mark.long
def test_a_wave_on_a_grid():
    kernel = K.SpectralMixture([1.0], [0.5], [2.0])
    x = jnp.linspace(1.0, 3.0, 4)[:, None]
    with numpyro.handlers.seed(rng_seed=0):
        f = dgp.gp("f", kernel, dgp.Grid(-20.0, 24.0, 180))
    np.testing.assert_allclose(f.covariance(x)[0], kernel(x, x), atol=1e-6)
    assert jnp.abs(f.conditional_variance(x, f.features(x))).max() < 1e-4


def one_layer(kernel, Z):
    def model(X, y=None):
        scale = numpyro.sample("scale", dist.LogNormal(0.0, 0.3))
        f = dgp.gp("f", scale * kernel, dgp.Points(Z))
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dgp.Likelihood(f(X), lambda v: dist.Normal(v, 0.3)), obs=y)

    return model


@pytest.mark.long
@pytest.mark.parametrize("name", [n for n in TABLE if n not in ("gibbs-each", "gibbs-shared", "integrated-brownian")])
def test_programs_with_it(name):
    kernel, _, inputs = TABLE[name]
    X = jnp.asarray(inputs(20, 0))
    y = jnp.sin(3 * X[:, 0])
    model = one_layer(kernel, X[::3])
    guide = dgp.guides.InducingPoint(model)
    svi = SVI(model, guide, optax.adam(0.05), dgp.ELBO())
    result = dgp.fit(svi, jax.random.key(0), 30, X, y, progress_bar=False)
    assert result.losses[-5:].mean() < result.losses[:5].mean()
    info = initialize_model(jax.random.key(0), dgp.for_mcmc(model), model_args=(X, y))
    gradient = jax.grad(info.potential_fn)(info.param_info.z)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))
    posterior = dgp.Posterior(model, guide, result.params)
    draws = posterior.using(num_samples=2).functions(jax.random.key(1))(X[:4])
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(draws))


@pytest.mark.long
def test_the_lengthscale_of_another_layer():
    X = jnp.linspace(-1, 1, 30)[:, None]
    y = jnp.sin(jnp.where(X[:, 0] < 0, 2, 15) * X[:, 0])
    Z = np.hstack([np.linspace(-1, 1, 12)[:, None], np.zeros((12, 1))])

    def model(X, y=None):
        s = dgp.gp("s", K.RBF(0.5), dgp.Points(Z[::2, :1]), outputs=1)
        f = dgp.gp("f", K.VaryingLengthscale(K.RBF(1.0, 0.3)), dgp.Points(Z, learn=True))
        with numpyro.plate("data", len(X)):
            log_factor = numpyro.sample("log_factor", s(X))
            v = f(jnp.concatenate([jnp.broadcast_to(X, log_factor.shape), log_factor], -1))
            numpyro.sample("y", dgp.Likelihood(v, lambda v: dist.Normal(v, 0.1)), obs=y)

    guide = dgp.guides.InducingPoint(model)
    svi = SVI(model, guide, optax.adam(0.02), dgp.ELBO())
    result = dgp.fit(svi, jax.random.key(0), 60, X, y, progress_bar=False)
    assert result.losses[-10:].mean() < result.losses[:10].mean() - 20
    dgp.testing.check_guide(model, guide, X, y, num=50)
    draws = dgp.Posterior(model, guide, result.params).using(num_samples=2).functions(jax.random.key(1))(X[:4])
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(draws))


def lengthscale_of_a_layer(X, y=None, *, thin=False, grid=False, noise=None):
    z = np.linspace(-1, 1, 6)[:, None]
    mean = (lambda x: jnp.ones_like(x)) if thin else None
    s = dgp.gp("s", K.RBF(0.5), dgp.Points(z), outputs=1, mean=mean)
    inducing = dgp.Grid(-2.0, 2.0, 8) if grid else dgp.Points(z if thin else np.hstack([z, 0 * z]))
    f = dgp.gp("f", K.RBF(1.0, 0.5) if thin else K.VaryingLengthscale(K.RBF(1.0, 0.5)), inducing)
    with numpyro.plate("data", len(X)):
        h = numpyro.sample("h", s(X, noise=noise))
        x = h * X if thin else jnp.concatenate([jnp.broadcast_to(X, h.shape), h], -1)
        numpyro.sample("y", dgp.Likelihood(f(x), lambda v: dist.Normal(v, 0.1)), obs=y)


@pytest.mark.long
@pytest.mark.parametrize("thin", [False, True])
@pytest.mark.parametrize(
    "guide",
    [
        dgp.guides.InducingPoint,
        dgp.guides.MeanField,
        lambda m: dgp.guides.InducingPoint(m, inducing=dgp.guides.GlobalInducing(5)),
    ],
)
def test_guides_of_a_lengthscale_from_a_layer(guide, thin):
    X = jnp.linspace(-1, 1, 12)[:, None]
    guide = guide(lambda X, y=None: lengthscale_of_a_layer(X, y, thin=thin))
    svi = SVI(guide.model, guide, optax.adam(0.02), dgp.ELBO())
    assert np.isfinite(svi.run(jax.random.key(0), 3, X, X[:, 0], progress_bar=False).losses).all()


@pytest.mark.long
def test_a_lengthscale_from_a_layer_elsewhere():
    X = jnp.linspace(-1, 1, 12)[:, None]
    program = dgp.for_mcmc(lengthscale_of_a_layer)
    info = initialize_model(jax.random.key(0), program, model_args=(X, X[:, 0]))
    gradient = jax.grad(info.potential_fn)(info.param_info.z)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))
    with (
        numpyro.handlers.seed(rng_seed=0),
        pytest.raises(ValueError, match="VaryingLengthscale has no spectral density"),
    ):
        lengthscale_of_a_layer(X, grid=True)
    noisy = lambda X, y=None: lengthscale_of_a_layer(X, y, noise=0.1)  # noqa: E731
    with pytest.raises(
        ValueError, match=r"closed form .*, got VaryingLengthscale: pass integrate=dgp.likelihoods.GaussHermite"
    ):
        SVI(noisy, dgp.guides.Collapsed(noisy), optax.adam(0.02), dgp.ELBO()).init(jax.random.key(0), X, X[:, 0])
    guide = dgp.guides.Collapsed(noisy, integrate=dgp.likelihoods.MonteCarlo(20, jax.random.key(1)))
    svi = SVI(noisy, guide, optax.adam(0.02), dgp.ELBO())
    assert np.isfinite(svi.evaluate(svi.init(jax.random.key(0), X, X[:, 0]), X, X[:, 0]))


@pytest.mark.long
def test_parameters_of_a_network_are_those_of_the_kernel():
    X = jnp.asarray(plane(5, 0))
    total = lambda kernel: jnp.sin(kernel(X, X)).sum()  # noqa: E731
    slope = jax.grad(total)(TABLE["transformed"][0]).parameters["weights"]
    by_closure = jax.grad(lambda W: total(K.Transformed(K.RBF(1.0, 0.7), lambda X: jnp.tanh(X @ W))))(
        jnp.asarray(WEIGHTS)
    )
    np.testing.assert_allclose(slope, by_closure, rtol=1e-10)
    assert jnp.abs(slope).max() > 0.01
    one_row = lambda W, x: jnp.tanh(x @ W)  # noqa: E731
    by_row = jnp.vectorize(one_row, excluded={0}, signature="(d)->(q)")
    kernel = K.Transformed(K.RBF(1.0, 0.7), by_row, WEIGHTS)
    np.testing.assert_allclose(kernel(X, X), TABLE["transformed"][0](X, X), rtol=1e-12)
    assert kernel(jnp.stack([X, X]), X).shape == (2, 5, 5)


X2, L1 = plane(4, 0), line(4, 0)
LABELS = np.hstack([X2[:, :1], 0.5 + np.zeros((4, 1))])


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: K.SpectralMixture(1.0, 1.0, 1.0),
            r"expected variance \(Q,\), frequency .*, got \(\), \(\), \(\)",
        ),
        (lambda: K.SpectralMixture([1.0], [1.0, 2.0], [1.0]), r"got \(1,\), \(2,\), \(1,\): one row per component"),
        (lambda: K.SpectralMixture([1.0], [[1.0, 2.0]], [[1.0]]), r"got \(1,\), \(1, 2\), \(1, 1\): one row per"),
        (lambda: K.SpectralMixture([-1.0], [1.0], [1.0]), "SpectralMixture: expected variance to be positive"),
        (lambda: K.SpectralMixture([1.0], [1.0], [0.0]), "SpectralMixture: expected lengthscale to be positive"),
        (lambda: K.SpectralMixture([1.0], [np.nan], [1.0]), "expected finite frequency, got 1 NaN"),
        (lambda: K.SpectralMixture([1.0], [1.0], [1.0])(X2, X2), r"expected inputs with 1 column\(s\), as of frequ"),
        (
            lambda: K.VaryingLengthscale(K.RBF(), places=0),
            "VaryingLengthscale: expected places to be a positive integer, got 0: try X.shape",
        ),
        (
            lambda: K.VaryingLengthscale(K.RBF())(L1, L1),
            r"expected 1 column\(s\) of places and 1 of log factors .* shape \(4, 1\)",
        ),
        (
            lambda: K.VaryingLengthscale(K.RBF(), places=2)(X2, X2),
            r"expected 2 column\(s\) of places and 1 or 2 of log factors",
        ),
        (
            lambda: K.VaryingLengthscale(K.RBF(1.0, [1.0, 2.0]))(X2, X2),
            r"expected lengthscale of shape \(\) or \(1,\), got \(2,\): one",
        ),
        (lambda: K.ChangePoint(K.RBF(), "after", 0.0), r"expected a kernel, a callable k\(X1, X2\) or a numb"),
        (lambda: K.ChangePoint(K.RBF(), K.RBF(), np.inf), "expected finite location, got 1 NaN or inf"),
        (lambda: K.ChangePoint(K.RBF(), K.RBF(), [0.0, 1.0]), "ChangePoint: expected location to be a single number"),
        (lambda: K.ChangePoint(K.RBF(), K.RBF(), 0.0, 0.0), "ChangePoint: expected width to be positive"),
        (
            lambda: K.ChangePoint(K.RBF(), K.RBF(), 0.0, column=-1),
            "expected column to be a number counted from 0",
        ),
        (lambda: K.ChangePoint(K.RBF(), K.RBF(), 0.0, column=2)(X2, X2), "at least 3 columns, for column=2, got shape"),
        (lambda: K.ChangePoint(K.RBF(), K.Categorical(2).on(1), 0.0)(LABELS, X2), "expected labels 0 to 1 .* got 0.5"),
        (lambda: K.Brownian(0.0), "Brownian: expected variance to be positive, got 0.0"),
        (lambda: K.IntegratedBrownian(1.0, np.nan), "expected finite origin"),
        (
            lambda: K.Brownian()(X2, X2),
            r"Brownian: expected one input column, got shape \(4, 2\): pick one, ker",
        ),
        (lambda: K.Chordal("RBF"), r"expected a kernel, a callable k\(X1, X2\) or a number, got str"),
        (lambda: K.Chordal(radius=-1.0), "Chordal: expected radius to be positive, got -1.0"),
        (lambda: K.GreatCircle(1.0, np.ones(2)), "GreatCircle: expected lengthscale to be a single number"),
        (
            lambda: K.Chordal()(L1, L1),
            r"Chordal: expected latitude and longitude in degrees, got",
        ),
        (
            lambda: K.GreatCircle().diag([[139.7, 35.7]]),
            r"latitudes from -90 to 90 degrees in column 0, got 139.7",
        ),
        (
            lambda: K.Chordal().on(1, 0)([[400.0, 5.0]], [[0, 0]]),
            "longitudes from -360 to 360 degrees in column 1",
        ),
        (
            lambda: K.Transformed(K.RBF(), K.RBF),
            r"expected a function from inputs \(..., N, D\) .*, got RBF: Trans",
        ),
        (
            lambda: K.Transformed(K.RBF(), np.ones(2)),
            r"expected a matrix W of shape \(Q, D\), got \(2,\): one row per feature",
        ),
        (
            lambda: K.Transformed(K.RBF(), ROWS + np.nan),
            "Transformed: expected finite entries of the matrix W, got 4 NaN",
        ),
        (lambda: K.Transformed(K.RBF(), ROWS, ROWS), "expected no parameters beside a matrix W, got some"),
        (lambda: K.Transformed(K.RBF(), ROWS)(L1, L1), r"a matrix W of shape \(Q, 1\), got \(2, 2\): one column"),
        (
            lambda: K.Transformed(K.RBF(), jnp.sum)(X2, X2),
            r"expected features of shape \(..., N, Q\) .* got \(\): of",
        ),
        (lambda: K.Transformed(K.RBF(), lambda X: X[:3])(X2, X2), r"of inputs of shape \(4, 2\), got \(3, 2\)"),
        (
            lambda: K.VaryingLengthscale(K.RBF()).spectral_density(X2),
            "VaryingLengthscale has no spectral density: expected a stationary kernel",
        ),
        (
            lambda: K.VaryingLengthscale(K.RBF()).tilts(2),
            "closed form .*, got VaryingLengthscale: pass integrate=dgp.likelihoods.GaussHermite",
        ),
    ],
)
def test_bad_input(build, message):
    with pytest.raises(ValueError, match=message):
        build()
