"""``Basis``: functions that are finite sums of sines, against dense references and NumPyro's own HSGP."""

import itertools
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
import scipy.special
import scipy.stats
from numpyro.contrib.hsgp import spectral_densities
from numpyro.contrib.hsgp.laplacian import eigenfunctions, eigenfunctions_periodic
from numpyro.handlers import seed, substitute
from numpyro.infer import MCMC, NUTS, SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal
from programs import NOISE, X, Y, agree, draws_of_bound, random_params
from sizes import mostly_long

import numpyro_dgp as dgp
from numpyro_dgp.functions.sines import sums_of_sines, sums_of_sines_reference
from numpyro_dgp.kernels import RBF, Constant, Cosine, Linear, Matern12, Matern32, Matern52, Periodic
from numpyro_dgp.kernels.periodic import scaled_bessel

G = dgp.guides
KEY = jax.random.key(0)
SMALL = pytest.mark.filterwarnings("ignore:gp 'f'. in the middle of the Basis")  # too small for its kernel
BASIS = dgp.Basis(-4.0, 4.0, 12)
ROWS = np.random.default_rng(0).uniform(-1, 1, (9, 5))


def layer(kernel, basis, v=None, **options):
    """A function of a program, with given weights."""
    with seed(rng_seed=0), substitute(data={} if v is None else {"f": jnp.asarray(v)}):
        return dgp.gp("f", kernel, basis, **options)


def products(f, x):
    """A A^T."""
    A = np.asarray(f.features(x))
    return A @ A.mT if A.ndim == 2 else A @ np.swapaxes(A, -1, -2)


def shallow(X, y=None, *, kernel=RBF(1.2, 0.7), basis=BASIS):
    g = dgp.gp("g", kernel, basis)
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dgp.Likelihood(g(X), lambda v: dist.Normal(v, NOISE)), obs=y)


def deep(X, y=None, *, process_noise=None):
    variance = numpyro.param("variance", 0.3, constraint=dist.constraints.positive)
    f = dgp.gp("f", RBF(variance, 0.9), BASIS, outputs=1, mean=dgp.means.IdentityMean())
    g = dgp.gp("g", RBF(1.2, 0.7), BASIS)
    with numpyro.plate("data", len(X)):
        h = numpyro.sample("h", f(X, noise=process_noise))
        numpyro.sample("y", dgp.Likelihood(g(h), lambda v: dist.Normal(v, NOISE)), obs=y)


noisy = partial(deep, process_noise=0.1)


def with_latent(X, y=None):
    g = dgp.gp("g", RBF(1.2, 0.9), dgp.Basis(-4.0, 4.0, (10, 10)))
    with numpyro.plate("data", len(X)):
        x = dgp.latent("w", X, 1)
        numpyro.sample("y", dgp.Likelihood(g(x), lambda v: dist.Normal(v, NOISE)), obs=y)


# --- features


@pytest.mark.slow
@SMALL
@pytest.mark.parametrize("D", mostly_long([2], [1, 2, 3]))
def test_features_are_sines_with_the_spectral_density(D):
    """Number by number, from the formulas."""
    low, high, sizes = np.array([-1.5, -2.0, -1.0])[:D], np.array([1.2, 1.5, 2.0])[:D], (4, 3, 2)[:D]
    kernel = Matern32(1.3, np.array([0.4, 0.7, 0.9])[:D])
    f = layer(kernel, dgp.Basis(low, high, sizes))
    wanted = []
    for x in ROWS[:, :D]:
        row = []
        for j in itertools.product(*(range(1, m + 1) for m in sizes)):
            omega = np.array([math.pi * j[d] / (high[d] - low[d]) for d in range(D)])
            sine = [math.sqrt(2 / (high - low)[d]) * math.sin(omega[d] * (x - low)[d]) for d in range(D)]
            row.append(math.sqrt(kernel.spectral_density(omega)) * math.prod(sine))
        wanted.append(row)
    np.testing.assert_allclose(f.features(ROWS[:, :D]), wanted, atol=1e-14)
    assert f.size == math.prod(sizes)
    assert f.dims == D


@pytest.mark.slow
@SMALL
@pytest.mark.parametrize("D", mostly_long([1], [1, 2, 3]))
@pytest.mark.parametrize("kernel", mostly_long([RBF], [RBF, Matern32]))
def test_equal_to_numpyro(kernel, D):
    x, ell, m, scales = ROWS[:, :D], 1.5, [6, 4, 3][:D], np.array([0.4, 0.7, 0.9])[:D]
    if kernel is RBF:
        density = spectral_densities.diag_spectral_density_squared_exponential(1.3, scales, ell, m, D)
    else:
        density = spectral_densities.diag_spectral_density_matern(kernel.nu, 1.3, scales, ell, m, D)
    A = eigenfunctions(x, ell, m) * jnp.sqrt(density)
    f = layer(kernel(1.3, scales), dgp.Basis(-ell, ell, tuple(m)))
    np.testing.assert_allclose(products(f, x), A @ A.T, atol=1e-12)


@pytest.mark.smoke
def test_weights_determine_the_function():
    v = np.random.default_rng(1).normal(size=12)
    f = layer(RBF(), BASIS, v, mean=dgp.means.ConstantMean(0.5))
    A = f.features(X)
    np.testing.assert_allclose(f(X).mean, 0.5 + A @ v, rtol=1e-12)
    assert not f(X).variance.any()
    np.testing.assert_allclose(f(X).sample(KEY), f(X).mean)
    np.testing.assert_allclose(f(X, noise=0.2).variance, 0.04)
    assert not f.joint(X).covariance.any()
    np.testing.assert_allclose(f.joint(X).sample(KEY), f(X).mean)
    np.testing.assert_allclose(f.joint(X, noise=0.2).covariance[0], 0.04 * np.eye(len(X)), atol=1e-12)
    np.testing.assert_allclose(f.covariance(X, X[:3])[0], A @ A[:3].T, atol=1e-14)
    assert f(X).log_prob(f(X).mean).max() == 0
    assert f(X).log_prob(f(X).mean + 1).max() == -np.inf


@pytest.mark.long
def test_slopes_and_sums_are_those_of_the_sum():
    f = layer(RBF(), BASIS, np.random.default_rng(1).normal(size=12))
    slopes = jax.vmap(jax.grad(lambda x: f(x[None]).mean[0]))(X)[:, 0]
    np.testing.assert_allclose(f.grad(X).mean, slopes, rtol=1e-10)
    A = np.random.default_rng(2).normal(size=(4, len(X)))
    np.testing.assert_allclose(f.linear(X, A).mean, A @ f(X).mean, rtol=1e-10)
    assert not f.grad(X).variance.any()
    assert not f.linear(X, A, joint=True).covariance.any()


@pytest.mark.long
def test_outputs_have_kernels_of_their_own():
    kernels = [RBF(1.0, 0.5), Matern32(2.0, 0.8)]
    f = layer(kernels, BASIS, outputs=2)
    assert f.features(X).shape == (2, len(X), 12)
    for p, kernel in enumerate(kernels):
        np.testing.assert_allclose(f.features(X)[p], layer(kernel, BASIS).features(X))
    assert f(X[None]).batch_shape == (1, len(X))
    assert layer(RBF(), BASIS, outputs=3)(X).mean.shape == (len(X), 3)


# --- kernels


@pytest.mark.long
def test_additive_kernels_and_products():
    """Sums of terms on their own columns, in five columns; products of the functions of each factor."""
    kernel = 2.0 * RBF(1.0, 0.5).on(0) + Matern52().on(1, 2) + Matern32().on(0) + RBF().on(3) * Linear().on(4) + 0.5
    basis = dgp.Basis(-3.0, 3.0, (20, 14, 14, 10, 3))
    f = layer(kernel, basis)
    assert f.size == 20 + 14 * 14 + 10 + 1
    parts = [
        (2.0 * RBF(1.0, 0.5) + Matern32(), [0], 20),
        (Matern52(), [1, 2], (14, 14)),
    ]
    wanted = sum(products(layer(k, dgp.Basis(-3.0, 3.0, m)), ROWS[:, c]) for k, c, m in parts)
    with_linear = products(layer(RBF(), dgp.Basis(-3.0, 3.0, 10)), ROWS[:, [3]]) * np.outer(ROWS[:, 4], ROWS[:, 4])
    np.testing.assert_allclose(products(f, ROWS), wanted + with_linear + 0.5, atol=1e-12)
    np.testing.assert_allclose(f.covariance(ROWS)[0], kernel(ROWS, ROWS), atol=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("a", mostly_long([10.0], [1e-3, 10.0, 1e4]))
def test_bessel_functions(a):
    wanted = scipy.special.ive(np.arange(30), a)
    rtol = 1e-6 if a > 1e3 else 1e-12  # frequencies up to sqrt(a) matter
    np.testing.assert_allclose(scaled_bessel(jnp.array(a), 30), wanted, rtol=rtol, atol=1e-300)
    np.testing.assert_allclose(scaled_bessel(jnp.array(a, jnp.float32), 30), wanted, rtol=1e-5, atol=1e-30)
    slope = jax.grad(lambda a: scaled_bessel(a, 3)[2])(a)
    np.testing.assert_allclose(slope, 0.5 * (wanted[1] + wanted[3]) - wanted[2], rtol=100 * rtol)


@pytest.mark.long
@SMALL
def test_periodic_kernels_by_their_fourier_series(monkeypatch):
    """Exact but for frequencies beyond the size, in one and two columns; NumPyro has the same squares of weights."""
    monkeypatch.setattr(
        spectral_densities, "modified_bessel_first_kind", lambda j, a: scipy.special.iv(np.asarray(j), np.asarray(a))
    )
    kernel = Periodic(1.3, 0.7, period=0.8)
    f = layer(kernel, dgp.Basis(-1.0, 1.0, 12))
    assert f.size == 11
    squares = spectral_densities.diag_spectral_density_periodic(math.sqrt(1.3), 0.7, 6)
    cosines, sines = eigenfunctions_periodic(ROWS[:, 0], 2 * math.pi / 0.8, 6)
    np.testing.assert_allclose(
        products(f, ROWS[:, :1]), (cosines * squares) @ cosines.T + (sines * squares) @ sines.T, atol=1e-12
    )
    outside = 100 + ROWS[:, :1]  # no boundary
    np.testing.assert_allclose(products(layer(kernel, dgp.Basis(-1.0, 1.0, 31)), outside), kernel(outside, outside))


@pytest.mark.long
def test_periodic_kernels_in_two_columns():
    two = Periodic(1.3, np.array([0.7, 1.1]), np.array([0.8, 0.5]))
    g = layer(two, dgp.Basis(-1.0, 1.0, (25, 15)))
    assert g.size == 25 * 15
    np.testing.assert_allclose(products(g, ROWS[:, :2]), two(ROWS[:, :2], ROWS[:, :2]), atol=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("i", mostly_long([0], range(4)))
def test_kernels_of_finite_rank_are_exact(i):
    kernel = [Linear(0.7) + Constant(0.5), Cosine(1.3, 0.7), Constant(0.5), Periodic(1.0, 2.0) + Linear()][i]
    f = layer(kernel, dgp.Basis(-1.0, 1.0, (15, 15)))
    np.testing.assert_allclose(products(f, ROWS[:, :2]), kernel(ROWS[:, :2], ROWS[:, :2]), atol=1e-10)


# --- the interval and the size


@pytest.mark.slow
@pytest.mark.parametrize("kernel", mostly_long([RBF], [RBF, Matern12, Matern32, Matern52]))
@pytest.mark.parametrize("error", mostly_long([0.01], [0.1, 0.01]))
def test_around_keeps_the_error(kernel, error):
    ends, x = np.array([[-1.0], [1.0]]), np.linspace(-1, 1, 101)[:, None]
    basis = dgp.Basis.around(ends, 0.25, longest=0.6, error=error, kernel=kernel)
    for scale in (0.25, 0.4, 0.6):
        k = kernel(1.7, scale)
        wrong = np.abs(layer(k, basis).covariance(x)[0] - k(x, x)).max() / 1.7
        assert wrong < error
    assert wrong > 0.2 * error


@pytest.mark.long
@SMALL
def test_around_and_the_published_rules():
    for kernel, factor in ((RBF, 1.75), (Matern32, 3.42), (Matern52, 2.65)):
        basis = dgp.Basis.around(np.array([[-1.0], [1.0]]), 0.02, error=0.02, kernel=kernel)
        half = (basis.high - basis.low)[0] / 2
        assert abs(basis.size[0] / (factor * half / 0.02) - 1) < 0.1
    basis = dgp.Basis.around(ROWS.astype(np.float32), np.linspace(0.5, 1.0, 5))
    assert basis.dtype == jnp.float32
    assert sorted(basis.size, reverse=True) == list(basis.size)


@pytest.mark.long
@SMALL
def test_outside_the_function_is_its_mean():
    f = layer(RBF(), BASIS, np.ones(12), mean=dgp.means.ConstantMean(0.5))
    x = jnp.array([[-9.0], [-4.0], [0.0], [4.0], [5.0]])
    with pytest.warns(UserWarning, match=r"2 of 5 inputs of layer 'f', for example -9.0, are outside of its Basis"):
        f(x)
    compiled = jax.jit(lambda x: f(x).mean)(x)
    np.testing.assert_allclose(compiled[np.array([0, 1, 3, 4])], 0.5, atol=1e-12)
    assert abs(compiled[2] - 0.5) > 0.1
    slopes = jax.jit(jax.grad(lambda x: f(x).mean.sum()))(x)
    assert np.isfinite(slopes).all()
    assert not slopes[np.array([0, 4])].any()


@pytest.mark.long
def test_a_fit_begins_with_the_warning():
    model = partial(shallow, basis=dgp.Basis(-1.0, 4.0, 12))
    svi = SVI(model, G.InducingPoint(model, inducing=G.Diagonal()), optax.adam(0.01), dgp.ELBO())
    with pytest.warns(UserWarning, match="inputs of layer 'g', for example .* are outside of its Basis"):
        dgp.fit(svi, KEY, 2, X, Y, progress_bar=False)


@pytest.mark.parametrize("scale", [0.05, 20.0])
def test_lengthscales_that_do_not_fit_are_warned_of(scale):
    with pytest.warns(UserWarning, match=r"gp 'f': in the middle of the Basis its 12 functions have [0-9]+%"):
        layer(RBF(1.0, scale), BASIS)
    jax.eval_shape(lambda scale: layer(RBF(1.0, scale), BASIS)(X).mean, scale)  # unknown values


@SMALL
@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: dgp.Basis(1.0, -1.0, 5), "Basis: expected low < high, got 1.0 and -1.0"),
        (lambda: dgp.Basis(0.0, np.inf, 5), "expected finite high"),
        (lambda: dgp.Basis(0.0, 1.0, 0), "expected size to be a positive integer, or one for each column, got 0"),
        (lambda: dgp.Basis(0.0, 1.0, 2.5), "expected size to be a positive integer"),
        (lambda: dgp.Basis([0.0, 1.0], 2.0, (3, 3, 3)), r"got shapes \(2,\) and \(\) and size = \(3, 3, 3\)"),
        (lambda: dgp.Basis.around(X, -1.0), "Basis.around: expected lengthscale to be positive"),
        (lambda: dgp.Basis.around(X, 1.0, error=2.0), "expected error to be a share of the variance below one"),
        (lambda: dgp.Basis.around(X, [1.0, 2.0]), r"expected lengthscale to be of shape \(\) or \(1,\), got \(2,\)"),
        (lambda: dgp.Basis.around(X, 1.0, longest=0.5), "expected the longest lengthscale as longest, got 0.5"),
        (lambda: dgp.Basis.around(X, 1.0, kernel=RBF()), "Basis.around: expected a kernel class, got RBF"),
        (lambda: dgp.Basis.around(X, 1e-9), "expected lengthscales resolved by a million sines"),
        (lambda: dgp.Basis.around(X, 1.0, kernel=Periodic), "Periodic has no spectral density"),
        (lambda: layer(dgp.kernels.ArcCosine(), BASIS), "ArcCosine has no spectral density"),
        (lambda: layer(RBF().on(1), BASIS), r"gp 'f': expected a kernel on columns 0 to 0 of a Basis .* .on\(1,\)"),
        (lambda: layer(RBF(), dgp.Basis(0, 1, (2,) * 4)), "expected kernels on up to 3 columns of a Basis, got RBF"),
        (
            lambda: layer([RBF(), Constant()], BASIS, outputs=2),
            r"equally many weights for the kernels of all outputs, got \[12, 1\]",
        ),
        (lambda: layer(Matern12(), BASIS).grad(X), "functions have 0"),
        (lambda: layer(RBF(), BASIS)(ROWS), "expected inputs with D = 1|1 column"),
    ],
)
def test_wrong_calls(make, match):
    with pytest.raises(ValueError, match=match):
        make()


@pytest.mark.long
@SMALL
def test_single_precision(x32):
    """Values keep their dtype, and the gradient is finite where the spectral density underflows."""
    x = X.astype(jnp.float32)

    def total(scale):
        f = layer(RBF(1.0, scale), dgp.Basis.around(x, 0.1, longest=1.0), jnp.ones(100, jnp.float32)[:SIZE])
        assert f(x).mean.dtype == jnp.float32
        return jnp.square(f.features(x)).sum()

    SIZE = dgp.Basis.around(x, 0.1, longest=1.0).size[0]
    assert np.isfinite(jax.jit(jax.grad(total))(jnp.float32(1.0)))


@pytest.mark.parametrize("kernel", [RBF(1.0, 0.5) + Periodic(), Matern32() * Cosine() + 0.5])
def test_single_precision_beside_double(kernel):
    low, high, x = np.float32(-4), np.float32(4), X.astype(jnp.float32)
    found = jax.eval_shape(
        lambda: (lambda f: (f.v.loc, f.features(x), f(x).mean))(layer(kernel, dgp.Basis(low, high, 12)))
    )
    assert {a.dtype for a in found} == {jnp.dtype("float32")}


# --- inference


def evidence(X, Y, kernel=RBF(1.2, 0.7), basis=BASIS):
    """Of Bayesian linear regression on the features."""
    covariance = products(layer(kernel, basis), X) + NOISE**2 * np.eye(len(X))
    return scipy.stats.multivariate_normal.logpdf(Y, cov=covariance)


def linear_regression():
    """Means and variances of the values at X given Y."""
    A = np.asarray(layer(RBF(1.2, 0.7), BASIS).features(X))
    S = np.linalg.inv(np.eye(12) + A.T @ A / NOISE**2)
    return A @ S @ A.T @ Y / NOISE**2, np.diag(A @ S @ A.T)


@pytest.mark.slow
def test_the_evidence_is_that_of_linear_regression():
    """The bound has nothing to lose, as v determines the function."""
    bound = -dgp.ELBO().loss(KEY, {}, shallow, G.Collapsed(shallow), X, Y)
    np.testing.assert_allclose(bound, evidence(X, Y), rtol=1e-11)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", mostly_long([RBF], [RBF, Matern52]))
def test_the_evidence_tends_to_that_of_the_process(kernel):
    k = kernel(1.2, 0.7)
    exact = scipy.stats.multivariate_normal.logpdf(Y, cov=np.asarray(k.gram(X)) + NOISE**2 * np.eye(len(X)))
    gaps = [
        abs(evidence(X, Y, k, dgp.Basis.around(X, 0.7, error=error, kernel=kernel)) - exact)
        for error in (0.1, 0.01, 0.001)
    ]
    assert gaps[2] < 0.1
    assert gaps[2] < 0.3 * gaps[1] < 0.1 * gaps[0]


WORKS = {
    "InducingPoint": (deep, G.InducingPoint),
    "Diagonal": (deep, partial(G.InducingPoint, inducing=G.Diagonal())),
    "LowRank": (deep, partial(G.InducingPoint, inducing=G.LowRank(2))),
    "MixtureOfGaussians": (deep, partial(G.InducingPoint, inducing=G.MixtureOfGaussians(2))),
    "Flow": (deep, partial(G.InducingPoint, inducing=G.Flow(depth=1))),
    "GlobalInducing": (deep, partial(G.InducingPoint, inducing=G.GlobalInducing(6))),
    "MarkovInducing": (deep, partial(G.InducingPoint, sites={"g": G.MarkovInducing(below="f")})),
    "MeanField, Propagate": (deep, partial(G.MeanField, hidden=G.Propagate())),
    "MeanField, noise": (noisy, G.MeanField),
    "GivenInducing, noise": (noisy, partial(G.InducingPoint, sites={"h": G.GivenInducing()})),
    "GivenInducing free, noise": (noisy, partial(G.InducingPoint, sites={"h": G.GivenInducing("free")})),
    "GivenInducing 3, noise": (noisy, partial(G.InducingPoint, sites={"h": G.GivenInducing(3)})),
    "JointOutputs, noise": (noisy, partial(G.InducingPoint, sites={"h": G.JointOutputs()})),
    "GivenBelow, noise": (noisy, partial(G.InducingPoint, sites={"h": G.GivenBelow()})),
    "ImportanceWeighted": (with_latent, partial(G.ImportanceWeighted, num_samples=3)),
    "Quadrature": (with_latent, partial(G.InducingPoint, sites={"w": G.Quadrature(5)})),
    "Collapsed": (shallow, G.Collapsed),
    "AutoNormal": (shallow, AutoNormal),
    "AutoNormal, for_mcmc": (dgp.for_mcmc(deep, {"variance": 0.3}), AutoNormal),
}
APART = "expected a guide under which values that v determines follow the model.*'h'"
FOLLOWS = APART + ".*Propagate.*noise=s"
REFUSES = {
    "MeanField": (deep, G.MeanField, FOLLOWS),
    "GivenInducing": (deep, partial(G.InducingPoint, sites={"h": G.GivenInducing()}), FOLLOWS),
    "JointOutputs": (deep, partial(G.InducingPoint, sites={"h": G.JointOutputs()}), FOLLOWS),
    "GivenBelow": (deep, partial(G.InducingPoint, sites={"h": G.GivenBelow()}), FOLLOWS),
    "Collapsed, no noise": (deep, G.Collapsed, "Collapsed: " + APART + ".*InducingPoint"),
    "Collapsed": (noisy, G.Collapsed, "expected known inputs of layer 'g', a BasisFunction.*guides.InducingPoint"),
    "Circulant": (deep, partial(G.InducingPoint, sites={"g": G.Circulant()}), "on a dgp.Grid.*choose another rule"),
    "AutoNormal": (deep, AutoNormal, "expected values that a BasisFunction determines.*dgp.for_mcmc"),
}


@pytest.mark.long
@pytest.mark.parametrize("name", WORKS)
def test_guides_that_work(name):
    model, make = WORKS[name]
    guide = make(model)
    svi = SVI(model, guide, optax.adam(0.02), dgp.ELBO())

    def step(X, Y):
        state, loss = svi.update(svi.init(KEY, X, Y), X, Y)
        return loss, svi.get_params(state)

    found = step(X, Y) if isinstance(guide, AutoNormal) else jax.jit(step)(X, Y)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(found))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["MeanField", *(pytest.param(n, marks=pytest.mark.long) for n in REFUSES)])
def test_guides_that_refuse(name):
    model, make, match = REFUSES[name]
    with pytest.raises(ValueError, match=match):
        SVI(model, make(model), optax.adam(0.02), dgp.ELBO()).init(KEY, X, Y)


@pytest.mark.long
@pytest.mark.parametrize("name", ["InducingPoint", "GivenInducing, noise"])
def test_bounds_agree(name):
    """With those of NumPyro, which draw the weights and take the density of hidden values where it is."""
    model, make = WORKS[name]
    guide = make(model)
    params = random_params(model, guide, X, Y)
    bounds = [draws_of_bound(loss, params, model, guide, X, Y) for loss in (dgp.ELBO(), Trace_ELBO())]
    assert agree(*bounds)


def chain(kernel, warmup=10, samples=10):
    mcmc = MCMC(kernel, num_warmup=warmup, num_samples=samples, progress_bar=False)
    mcmc.run(KEY, X, Y)
    return mcmc.get_samples()


@pytest.mark.long
def test_chains_move_weights_only():
    program = dgp.for_mcmc(deep, {"variance": 0.3})
    for kernel in (NUTS(program), dgp.mcmc.Gibbs(deep, {"variance": 0.3})):
        draws = chain(kernel)
        assert set(draws) == {"f", "g", "h"}
        f = layer(RBF(0.3, 0.9), BASIS, draws["f"][-1], outputs=1, mean=dgp.means.IdentityMean())
        np.testing.assert_allclose(draws["h"][-1], f(X).mean, rtol=1e-9)
    with pytest.raises(ValueError, match=r"expected values that a BasisFunction determines.* dgp.for_mcmc\(model\)"):
        chain(NUTS(dgp.for_mcmc(deep, {"variance": 0.3}, noncentered=False)))


@pytest.mark.long
def test_draws_of_functions_are_sums_too():
    beliefs = {f"{name}_auto_loc": jnp.ones(shape) for name, shape in (("f", (1, 12)), ("g", (12,)))}
    beliefs |= {name.replace("loc", "scale"): 0.3 * value for name, value in beliefs.items()}
    guide = G.InducingPoint(deep, inducing=G.Diagonal())
    draws = dgp.Posterior(deep, guide, beliefs | {"variance": jnp.array(0.3)}).using(num_samples=2).functions(KEY)
    np.testing.assert_allclose(draws(X[:4])["h"], draws(X)["h"][:, :4], rtol=1e-9)


@pytest.mark.long
def test_a_chain_of_the_bare_program_lands_on_linear_regression():
    draws = chain(NUTS(shallow), 200, 1000)["g"]
    values, (mean, variance) = draws @ layer(RBF(1.2, 0.7), BASIS).features(X).T, linear_regression()
    np.testing.assert_allclose(values.mean(0), mean, atol=0.04)
    np.testing.assert_allclose(values.var(0), variance, rtol=0.3)


@pytest.mark.long
def test_new_rows_and_a_deeper_start():
    """One natural step reaches the evidence, new rows take it to that of all rows."""
    guide = G.InducingPoint(shallow)
    svi = SVI(shallow, guide, dgp.optim.NaturalGradient(guide, 1.0, optax.sgd(0.0)), dgp.ELBO())
    result = svi.run(KEY, 2, X[:20], Y[:20], progress_bar=False)
    np.testing.assert_allclose(result.losses[-1], -evidence(X[:20], Y[:20]), rtol=1e-9)
    posterior = dgp.Posterior(shallow, guide, result.params)
    more = dgp.condition(posterior, KEY, X[20:], Y[20:], num_steps=2, progress_bar=False)
    mean, variance = linear_regression()
    found = more.predict(KEY, X)
    np.testing.assert_allclose(found.mean, mean, atol=1e-6)
    np.testing.assert_allclose(found.variance, variance + NOISE**2, atol=1e-6)
    start = dgp.initial.deepen(more, deep, G.InducingPoint(deep), KEY, X, Y)
    assert abs(start.bound - start.fitted) < 0.01


@pytest.mark.long
def test_new_rows_compare_weights_at_other_hyperparameters():
    """The weights of an earlier fit are coefficients of the same sines."""
    v = np.random.default_rng(3).normal(size=12)
    now, before = layer(RBF(1.5, 0.6), BASIS, v), layer(RBF(1.0, 0.8), BASIS)
    mean, covariance = now.whitened_values_of(before)
    np.testing.assert_allclose(layer(RBF(1.0, 0.8), BASIS, mean[0])(X).mean, now(X).mean, rtol=1e-9)
    assert not covariance.any()
    for other in (layer(RBF(), dgp.Basis(-4.0, 4.0, 5)), layer(RBF(), BASIS, mean=dgp.means.ConstantMean(1.0))):
        with pytest.raises(ValueError, match=r"expected the Basis, the kernel .* as in the earlier fit"):
            now.whitened_values_of(other)
    with pytest.raises(ValueError, match="expected a kernel with a spectral density"):
        layer(Periodic(), BASIS).whitened_values_of(layer(Periodic(), BASIS))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(
    "case",
    mostly_long(
        [((50,), 1), ((25, 3), 2)],
        [((50,), 1), ((37,), 4), ((12,), 1), ((50,), 40), ((25, 3), 2), ((2, 3), 3), ((20, 5, 3), 2)],
    ),
)
def test_sums_of_sines_are_those_of_every_sine(case, dtype):
    """Values and derivatives by weights and angles; against sines of many digits where there is one column."""
    sizes, P = case
    rng = np.random.default_rng(5)
    turns = np.append(rng.uniform(size=(9, len(sizes))), np.eye(2, len(sizes)), 0).astype(dtype)
    weights, by = rng.normal(size=(P, math.prod(sizes))).astype(dtype), rng.normal(size=(11, P)).astype(dtype)

    def derivatives(sums):
        return jax.jit(jax.grad(lambda t, w: (sums(t, sizes, w) * by).sum(), (0, 1)))(turns, weights)

    ours, theirs = (derivatives(sums) for sums in (sums_of_sines, sums_of_sines_reference))
    eps = np.finfo(dtype).eps
    found = sums_of_sines(turns, sizes, weights)
    assert found.dtype == dtype
    assert found.shape == (11, P)
    np.testing.assert_allclose(found, sums_of_sines_reference(turns, sizes, weights), atol=100 * max(sizes) * eps)
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, atol=100 * max(sizes) ** 2 * eps * (1 + abs(b).max()))
    if len(sizes) == 1:
        angles = np.pi * np.asarray(turns, np.longdouble) * np.arange(1, sizes[0] + 1)
        np.testing.assert_allclose(found, np.sin(angles) @ weights.T.astype(float), atol=100 * sizes[0] * eps)


@pytest.mark.slow
def test_sums_of_sines_are_cheaper_than_sines():
    """Numbers that are kept and sines that are taken, in the lowered text: none for each row and weight."""
    turns, weights = jnp.zeros((100, 1)), jnp.zeros((1, 64))
    text = jax.jit(jax.grad(lambda t, w: sums_of_sines(t, (64,), w).sum(), (0, 1))).lower(turns, weights).as_text()
    assert "100x64x" not in text
    assert "100x64x" in jax.jit(lambda t, w: sums_of_sines_reference(t, (64,), w)).lower(turns, weights).as_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    "kernel",
    [
        dgp.kernels.Matern52(1.3, 0.4),
        2.0 * dgp.kernels.RBF(0.5, 0.3) + dgp.kernels.Linear(0.7),
        [dgp.kernels.RBF(1.0, 0.3), dgp.kernels.Matern32(2.0, 0.8)],
    ],
    ids=["one", "sum", "two outputs"],
)
def test_values_of_a_draw_are_features_times_weights(key, kernel):
    """The fast way, by weights that are scaled first, in values and slopes."""
    outputs = 2 if isinstance(kernel, list) else None
    x = jnp.linspace(-1, 1, 9)[:, None]

    def values(v, scale, fast):
        kernels = [scale * k for k in kernel] if isinstance(kernel, list) else scale * kernel
        f = substitute(seed(dgp.gp, 0), {"f": v})("f", kernels, dgp.Basis(-1.5, 1.5, 30), outputs=outputs)
        if fast:
            return f(x).mean
        A = f.features(x)
        found = jnp.einsum("pnm,pm->np", A, f.by_output(v)) if A.ndim == 3 else A @ f.by_output(v).T
        return found if outputs else found[:, 0]

    with seed(rng_seed=0):
        f = dgp.gp("f", kernel, dgp.Basis(-1.5, 1.5, 30), outputs=outputs)
    v = jax.random.normal(key, f.v.loc.shape)
    ours, slopes = (jax.jacobian(lambda v, s: values(v, s, True), argnums=i)(v, 1.7) for i in (0, 1))
    by_v, by_scale = (jax.jacobian(lambda v, s: values(v, s, False), argnums=i)(v, 1.7) for i in (0, 1))
    np.testing.assert_allclose(values(v, 1.7, True), values(v, 1.7, False), atol=1e-12)
    np.testing.assert_allclose(ours, by_v, atol=1e-12)
    np.testing.assert_allclose(slopes, by_scale, atol=1e-12)
