"""Kernels: values against one pair at a time, and one contract over a table of all of them."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tinygp
from dense import gram
from sizes import mostly_long

from numpyro_dgp import kernels as K
from numpyro_dgp._typing import Number, pytree
from numpyro_dgp.kernels.stationary import Stationary
from numpyro_dgp.kernels.terms import Factor

D = 3
LS = np.array([0.7, 1.3, 2.0])


def r(x, z, ls=LS):
    return np.sqrt((((x - z) / ls) ** 2).sum())


def arc_cosine(order):
    def k(x, z):
        w, b = np.array([0.5, 1.0, 2.0]), 0.3
        xx, zz, xz = (w * x * x).sum() + b, (w * z * z).sum() + b, (w * x * z).sum() + b
        t = np.arccos(np.clip(xz / np.sqrt(xx * zz), -1, 1))
        J = {
            0: np.pi - t,
            1: np.sin(t) + (np.pi - t) * np.cos(t),
            2: 3 * np.sin(t) * np.cos(t) + (np.pi - t) * (1 + 2 * np.cos(t) ** 2),
        }[order]
        return 1.5 / np.pi * (xx * zz) ** (order / 2) * J

    return k


PERIOD = np.array([1.0, 2.0, 3.0])
V = np.array([0.5, 1.0, 2.0])
TABLE = {
    "rbf": (K.RBF(1.5, LS), lambda x, z: 1.5 * np.exp(-0.5 * r(x, z) ** 2)),
    "rbf-scalar": (K.RBF(1.5, 0.8), lambda x, z: 1.5 * np.exp(-0.5 * r(x, z, 0.8) ** 2)),
    "matern12": (K.Matern12(1.5, LS), lambda x, z: 1.5 * np.exp(-r(x, z))),
    "matern32": (
        K.Matern32(1.5, LS),
        lambda x, z: 1.5 * (1 + math.sqrt(3) * r(x, z)) * np.exp(-math.sqrt(3) * r(x, z)),
    ),
    "matern52": (
        K.Matern52(1.5, LS),
        lambda x, z: 1.5 * (1 + math.sqrt(5) * r(x, z) + 5 / 3 * r(x, z) ** 2) * np.exp(-math.sqrt(5) * r(x, z)),
    ),
    "rational-quadratic": (
        K.RationalQuadratic(1.5, LS, 0.7),
        lambda x, z: 1.5 * (1 + r(x, z) ** 2 / 1.4) ** -0.7,
    ),
    "periodic": (
        K.Periodic(1.5, LS, PERIOD),
        lambda x, z: 1.5 * np.exp(-2 * (np.sin(np.pi * (x - z) / PERIOD) ** 2 / LS**2).sum()),
    ),
    "cosine": (K.Cosine(1.5, LS), lambda x, z: 1.5 * np.cos(2 * np.pi * ((x - z) / LS).sum())),
    "linear": (K.Linear(V), lambda x, z: (V * x * z).sum()),
    "polynomial": (K.Polynomial(V, 0.3, 3), lambda x, z: ((V * x * z).sum() + 0.3) ** 3),
    "constant": (K.Constant(1.5), lambda x, z: 1.5),
    "white": (K.White(1.5), lambda x, z: 1.5 * np.all(x == z)),
    "sum": (K.RBF(1.5, LS) + K.Linear(V), lambda x, z: 1.5 * np.exp(-0.5 * r(x, z) ** 2) + (V * x * z).sum()),
    "product": (
        K.Matern12(1.5, LS) * K.Linear(V),
        lambda x, z: 1.5 * np.exp(-r(x, z)) * (V * x * z).sum(),
    ),
    "scaled": (0.5 * K.RBF(1.5, LS), lambda x, z: 0.75 * np.exp(-0.5 * r(x, z) ** 2)),
    "active-dims": (
        K.RBF(1.5, LS[[2, 0]]).on(2, 0),
        lambda x, z: 1.5 * np.exp(-0.5 * r(x[[2, 0]], z[[2, 0]], LS[[2, 0]]) ** 2),
    ),
    "tinygp": (
        K.as_kernel(1.5 * tinygp.kernels.ExpSquared(scale=0.8, distance=tinygp.kernels.distance.L2Distance())),
        lambda x, z: 1.5 * np.exp(-0.5 * r(x, z, 0.8) ** 2),
    ),
    "function": (K.as_kernel(lambda X1, X2: (X1 @ X2.T + 1.0) ** 2), lambda x, z: (x @ z + 1) ** 2),
} | {f"arc-cosine-{n}": (K.ArcCosine(1.5, np.array([0.5, 1.0, 2.0]), 0.3, n), arc_cosine(n)) for n in (0, 1, 2)}
OWN = {name: kernel for name, (kernel, _) in TABLE.items() if name not in ("tinygp", "function")}
every = pytest.mark.parametrize("name", TABLE)
own = pytest.mark.parametrize("name", OWN)
FEW = ["rbf", "matern32", "periodic", "linear", "product", "active-dims", "arc-cosine-1"]
few = pytest.mark.parametrize("name", mostly_long(FEW, OWN))


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("depth", [2, 3])
def test_arc_cosine_layers_on_top_of_each_other(order, depth, key):
    """By Cho and Saul's recursion; as a zonal kernel; by draws of units of Gaussian functions of the layer below."""
    kernel = K.ArcCosine(1.5, np.array([0.5, 1.0, 2.0]), 0.3, order, depth)
    X = inputs()
    C = K.Linear(np.array([0.5, 1.0, 2.0]))(X, X) + 0.3
    for _ in range(depth):
        size = np.sqrt(np.diag(C)[:, None] * np.diag(C))
        t = np.arccos(np.clip(C / size, -1, 1))
        J = [np.pi - t, np.sin(t) + (np.pi - t) * np.cos(t)]
        J.append(3 * np.sin(t) * np.cos(t) + (np.pi - t) * (1 + 2 * np.cos(t) ** 2))
        below, C = C, size**order * J[order] / np.pi
    np.testing.assert_allclose(kernel(X, X), 1.5 * C, rtol=1e-6)
    np.testing.assert_allclose(kernel.diag(X), 1.5 * np.diag(C), rtol=1e-6)
    angle = jnp.arccos(jnp.clip(kernel.directions(X) @ kernel.directions(X).T, -1, 1))
    zonal = kernel.factor(X)[:, None] * kernel.by_angle(angle) * kernel.factor(X)
    np.testing.assert_allclose(zonal, kernel(X, X), rtol=1e-6)
    draws = jax.random.normal(key, (200_000, len(X))) @ np.linalg.cholesky(below + 1e-9 * np.diag(np.diag(below))).T
    units = jnp.maximum(draws, 0) ** order
    products = 2 * 1.5 * units[:, :, None] * units[:, None]
    error = products.std(0) / math.sqrt(len(draws))
    assert (jnp.abs(products.mean(0) - kernel.gram(X)) < 5 * error + 1e-6).all()
    with pytest.raises(ValueError, match="ArcCosine has no features"):
        kernel.features(key, X, 3)


def inputs(n=6, seed=0):
    return np.random.default_rng(seed).normal(size=(n, D))


@every
def test_values(name):
    kernel, scalar = TABLE[name]
    X, Z = inputs(), np.vstack([inputs(3, 1), inputs()[:1]])
    np.testing.assert_allclose(kernel(X, Z), gram(scalar, X, Z), rtol=1e-7, atol=3e-8)
    np.testing.assert_allclose(kernel.diag(X), [scalar(x, x) for x in X], rtol=1e-12)
    np.testing.assert_allclose(jnp.diagonal(kernel.gram(X)), kernel.diag(X), rtol=1e-14)


@every
def test_gram_is_positive_semidefinite(name):
    eigenvalues = np.linalg.eigvalsh(np.asarray(TABLE[name][0].gram(inputs(20))))
    assert eigenvalues.min() > -1e-9 * eigenvalues.max()


@own
def test_leading_dimensions_broadcast(name):
    kernel = OWN[name]
    X, Z = inputs(10).reshape(2, 5, D), inputs(4, 1)
    np.testing.assert_allclose(kernel(X, Z)[1], kernel(X[1], Z), rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(kernel.diag(X)[1], kernel.diag(X[1]), rtol=1e-12)


@every
def test_is_a_pytree_that_survives_transformations(name):
    kernel = TABLE[name][0]
    X = inputs()
    leaves, treedef = jax.tree.flatten(kernel)
    np.testing.assert_array_equal(jax.tree.unflatten(treedef, leaves)(X, X), kernel(X, X))
    np.testing.assert_allclose(jax.jit(lambda k, X: k(X, X))(kernel, X), kernel(X, X), rtol=1e-12, atol=1e-15)
    if leaves:
        stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, 2.0 * leaf]), kernel)
        batch = jax.vmap(lambda k: k(X, X))(stacked)
        np.testing.assert_allclose(batch[0], kernel(X, X), rtol=1e-9, atol=1e-9)


@pytest.mark.slow
@every
def test_gradients_are_finite_where_inputs_coincide(name):
    kernel = TABLE[name][0]
    X = np.vstack([inputs(3), inputs(3)])

    def total(kernel, X):
        return kernel(X, X).sum() + kernel.diag(X).sum() + kernel.gram(X).sum()

    gradients = jax.grad(total, argnums=1)(kernel, X), jax.grad(total)(kernel, X)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))


@own
def test_gradient_is_the_derivative(name):
    if name == "white":
        pytest.skip("not differentiable")
    kernel, X, Z = OWN[name], jnp.asarray(inputs(3)), jnp.asarray(inputs(4, 1))
    f = lambda X: jnp.sin(kernel(X, Z)).sum()  # noqa: E731
    direction = jnp.asarray(inputs(3, 2))
    numeric = (f(X + 1e-6 * direction) - f(X - 1e-6 * direction)) / 2e-6
    np.testing.assert_allclose((jax.grad(f)(X) * direction).sum(), numeric, rtol=1e-6, atol=1e-7)


@own
@pytest.mark.parametrize("x64", [True, False])
def test_keeps_float32(name, x64):
    kernel, scalar = OWN[name], TABLE[name][1]
    jax.config.update("jax_enable_x64", x64)
    try:
        X = jnp.asarray(inputs(), jnp.float32)
        value, diagonal = kernel(X, X[:4]), kernel.diag(X)
    finally:
        jax.config.update("jax_enable_x64", True)
    assert value.dtype == diagonal.dtype == jnp.float32
    X = np.asarray(X, float)
    tolerance = 3e-3 if name in ("matern12", "product", "arc-cosine-0") else 2e-5
    np.testing.assert_allclose(value, gram(scalar, X, X[:4]), rtol=tolerance, atol=tolerance)


@pytest.mark.long
@pytest.mark.parametrize("d", mostly_long([1, 2], [1, 2, 3]))
@pytest.mark.parametrize("cls", [K.RBF, K.Matern12, K.Matern32, K.Matern52])
def test_spectral_density_inverts_to_the_kernel(cls, d):
    # A separable sum over frequencies, along the first axis only: integrate the others out first.
    kernel = cls(1.3, np.array([0.7, 1.1, 0.9])[:d])
    edge = {1: 4000.0, 2: 600.0, 3: 80.0}[d] if cls is K.Matern12 else {1: 400.0, 2: 100.0, 3: 30.0}[d]
    points = {1: 400_001, 2: 3001, 3: 251}[d]
    grid = jnp.linspace(-edge, edge, points)
    mesh = jnp.stack(jnp.meshgrid(*[grid] * d, indexing="ij"), -1)
    density = kernel.spectral_density(mesh)
    cell = (grid[1] - grid[0]) / (2 * np.pi)
    along = density.sum(tuple(range(1, d))) * cell**d
    lags = jnp.array([0.5, 1.0])
    recovered = (along * jnp.cos(lags[:, None] * grid)).sum(-1)
    X = jnp.zeros((1, d)).at[0, 0].set(0.0)
    direct = [kernel(X, X.at[0, 0].set(lag))[0, 0] for lag in lags]
    np.testing.assert_allclose(recovered, jnp.array(direct), atol=2e-2 if cls is K.Matern12 else 2e-3)


def test_spectral_density_of_sums_and_multiples():
    omega = jnp.array([[0.3, -1.0]])
    a, b = K.RBF(1.5, 0.7), K.Matern32(0.5, 1.2)
    expected = a.spectral_density(omega) + 2.0 * b.spectral_density(omega)
    np.testing.assert_allclose((a + 2.0 * b).spectral_density(omega), expected, rtol=1e-12)
    with pytest.raises(ValueError, match="has no spectral density: expected a stationary kernel"):
        K.Periodic().spectral_density(omega)
    for kernel, name in (
        (a * b, r"RBF \* Matern32"),
        (2.0 * (a + a * b), r"RBF \* Matern32"),
        (a + 1.0, "Constant"),
        (a.on(0, 1), "ActiveDims"),
        (2.0 * a.on(0), r"RBF\.on\(0,\)"),
        (a + 2.0 * K.Periodic(), "Periodic"),
    ):
        with pytest.raises(ValueError, match=f"^{name} has no spectral density: expected a stationary kernel"):
            kernel.spectral_density(omega)


@pytest.mark.parametrize(
    "kernel",
    [
        K.Constant(2.0) * K.RBF(0.7, 0.8),
        K.RBF(0.7, 0.8) * K.Constant(2.0),
        2.0 * (K.RBF(0.7, 0.8) + K.Matern52(1.3, 0.5)),
        (K.Constant(2.0) * K.RBF(0.7, 0.8)) * K.Constant(3.0),
        (K.Constant(2.0) + 0.5) * (K.Constant(3.0) * (K.RBF(0.7, 0.8) + K.Matern52() * 0.1)),
    ],
)
def test_spectral_density_of_multiples_is_the_fourier_transform(kernel):
    r = jnp.linspace(-40, 40, 80_001)
    k = kernel(r[:, None], jnp.zeros((1, 1)))[:, 0]
    for omega in (0.0, 0.4, 2.0):
        transform = jnp.trapezoid(k * jnp.cos(omega * r), r)
        density = jax.jit(lambda kernel, omega: kernel.spectral_density(omega))(kernel, jnp.array([omega]))
        np.testing.assert_allclose(density, transform, rtol=1e-7)


@pytree
class Tent(K.Kernel):
    """A kernel of somebody else, of the first column."""

    width: Number = 1.0

    def evaluate(self, X1, X2):
        return jnp.maximum(1 - abs(X1[..., :, None, 0] - X2[..., None, :, 0]) / self.width, 0)

    def diagonal(self, X):
        return jnp.ones(X.shape[:-1])


@pytest.mark.parametrize(
    ("kernel", "summands"),
    [
        (K.RBF(), ["RBF"]),
        (K.Constant(2.0), ["Constant"]),
        (2.0 * (K.RBF() + 3.0 * Tent(2.0)) * 0.5, ["RBF", "Tent"]),
        ((K.RBF() + K.Linear()) * (Tent() + 1.0), ["RBF * Tent", "RBF", "Linear * Tent", "Linear"]),
        (K.RBF().on(1).on(3, 0), ["RBF.on(0,)"]),
        (K.Linear(V[:2]).on(2, 0).on(3, 1, 2), ["Linear.on(2, 3)"]),
        (
            (K.RBF(1.0, LS[:2]).on(1, 0) * (2.0 * Tent()).on(2) + K.Linear() + 0.3).on(3, 0, 2),
            ["RBF.on(0, 3) * Tent.on(2,)", "Linear.on(3, 0, 2)", "Constant"],
        ),
        ((K.RBF().on(0, 0) + 1.0).on(2).on(1, 3, 0) * Tent(), ["RBF.on(0, 0) * Tent", "Tent"]),
    ],
)
def test_expanded_kernels(kernel, summands):
    X, Z = np.random.default_rng(0).normal(size=(2, 5, 4))
    found = kernel.expanded()
    assert [str(s) for s in found] == summands
    assert not any(
        isinstance(f.kernel, K.Sum | K.Product | K.ActiveDims | K.Constant) for s in found for f in s.factors
    )

    def evaluate(kernel):
        total = 0
        for s in kernel.expanded():
            product = s.scale * jnp.ones((5, 5))
            for f in s.factors:
                columns = slice(None) if f.columns is None else list(f.columns)
                product = product * f.kernel(X[:, columns], Z[:, columns])
            total = total + product
        return total

    np.testing.assert_allclose(evaluate(kernel), kernel(X, Z), rtol=1e-12)
    np.testing.assert_allclose(jax.jit(evaluate)(kernel), kernel(X, Z), rtol=1e-12)
    again = jax.tree.unflatten(jax.tree.structure(found), jax.tree.leaves(found))
    assert [str(s) for s in again] == summands
    assert all(isinstance(f, Factor) for s in again for f in s.factors)


def test_columns_of_fewer_columns():
    kernel = K.RBF().on(0, 2).on(1)
    with pytest.raises(ValueError, match=r"expected at least 3 input columns, got shape"):
        kernel(inputs(), inputs())
    with pytest.raises(
        ValueError, match=r"kernel.on\(0, 2\).on\(1,\): expected the outer .* at least 3 columns, got 1"
    ):
        kernel.expanded()


@pytest.mark.slow
@few
def test_features_have_the_kernel_as_covariance(name, key):
    if name == "white":
        with pytest.raises(ValueError, match="has no features, which function draws need"):
            OWN[name].features(key, jnp.asarray(inputs()), 8)
        return
    X, num = jnp.asarray(inputs()), 200_000
    features = OWN[name].features(key, X, num)
    products = features[:, None] * features[None]
    error = products.std(-1) / math.sqrt(num)
    z = (products.mean(-1) - OWN[name].gram(X)) / jnp.maximum(error, 1e-12)
    assert jnp.abs(z).max() < 5
    assert jnp.abs(features.mean(-1) / (features.std(-1) / math.sqrt(num))).max() < 5


def test_a_stationary_kernel_without_frequencies(key):
    class Gaussian(Stationary):
        def profile(self, r2):
            return jnp.exp(-r2)

    with pytest.raises(ValueError, match=r"Gaussian has no frequencies, which function draws need: define"):
        pytree(Gaussian)().features(key, jnp.asarray(inputs()), 8)


def test_no_three_dimensional_intermediate():
    """k(X1, X2) never builds an N1 x N2 x D array."""
    N, M, columns = 70, 50, 11
    for kernel in (K.RBF(), K.Matern52(), K.RationalQuadratic(), K.Periodic(), K.ArcCosine(), K.RBF() * K.Linear()):
        jaxpr = jax.make_jaxpr(lambda X, Z, kernel=kernel: kernel(X, Z))(jnp.ones((N, columns)), jnp.ones((M, columns)))
        sizes = [np.prod(v.aval.shape) for e in jaxpr.eqns for v in e.outvars]
        assert max(sizes) <= N * M


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: K.RBF(lengthscale=-1.0), r"RBF: expected lengthscale to be positive, got -1.0: give it a prior"),
        (lambda: K.Matern32(variance=jnp.array(0.0)), r"Matern32: expected variance to be positive"),
        (lambda: K.RBF(lengthscale=np.array([1.0, np.nan])), r"RBF: expected lengthscale to be positive"),
        (lambda: K.RationalQuadratic(alpha=0.0), "alpha"),
        (lambda: K.Periodic(period=-1), "period"),
        (lambda: K.Polynomial(degree=0), r"expected degree to be a positive integer, got 0"),
        (lambda: K.ArcCosine(order=3), r"expected order to be 0, 1 or 2, got 3"),
        (lambda: K.ArcCosine(order=0, depth=2), r"expected order 1 or 2 for several layers, got order=0, depth=2"),
        (lambda: K.RBF().on(), r"kernel.on\(\*dims\): expected columns counted from 0"),
        (lambda: K.RBF().on(5)(inputs(), inputs()), r"expected at least 6 input columns, got shape \(6, 3\)"),
        (lambda: K.RBF()(inputs()[:, 0], inputs()), r"expected inputs of shape \(..., N, D\), got shape \(6,\)"),
        (lambda: K.RBF()(inputs()[:, :2], inputs()), "same number of columns"),
        (lambda: K.RBF(lengthscale=np.ones(2))(inputs(), inputs()), r"expected lengthscale of shape \(\) or \(3,\)"),
        (lambda: K.RBF(np.ones(3)), r"RBF: expected variance to be a single number, got shape \(3,\)"),
        (lambda: K.RBF() + "linear", r"expected a kernel, a callable k\(X1, X2\) or a number, got str"),
        (lambda: K.RBF() * -1.0, r"expected variance to be positive"),
    ],
)
def test_bad_input(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_operators_accept_numbers_and_callables():
    X = inputs()
    for kernel in (2.0 * K.RBF(), K.RBF() * 2.0, K.RBF() + K.RBF(), K.RBF() + tinygp.kernels.ExpSquared()):
        assert kernel(X, X).shape == (6, 6)
    assert list(itertools.chain(jax.tree.leaves(K.RBF() + 1.0))) == [1.0, 1.0, 1.0]


@pytest.mark.slow
def test_lengthscales_as_a_list():
    x = np.random.default_rng(0).normal(size=(3, 2))
    kernel = K.RBF(1.0, [1.0, 2.0])
    np.testing.assert_array_equal(kernel(x, x), K.RBF(1.0, jnp.array([1.0, 2.0]))(x, x))
    assert jax.tree.leaves(kernel)[1].shape == (2,)
