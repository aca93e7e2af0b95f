"""Hyperparameters of kernels are one number, or one per column of the inputs: no other shape broadcasts by accident."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sizes import mostly_long

from numpyro_dgp import kernels as K
from numpyro_dgp.extend import ZonalKernel
from numpyro_dgp.kernels.expectations import psi1

X = jnp.array([[0.3, 1.0], [1.0, -0.4], [0.1, 0.7]])
ONE = X[:, :1]
KEY = jax.random.key(0)
TWO = jnp.array([0.7, 1.3])

# Kernels by the hyperparameter that has one number per column, and kernels that pass it columns of their own.
ALONE = {
    "RBF lengthscale": lambda v: K.RBF(1.5, v),
    "Matern12 lengthscale": lambda v: K.Matern12(1.5, v),
    "Matern32 lengthscale": lambda v: K.Matern32(1.5, v),
    "Matern52 lengthscale": lambda v: K.Matern52(1.5, v),
    "RationalQuadratic lengthscale": lambda v: K.RationalQuadratic(1.5, v),
    "Periodic lengthscale": lambda v: K.Periodic(1.5, v),
    "Periodic period": lambda v: K.Periodic(period=v),
    "Cosine lengthscale": lambda v: K.Cosine(1.5, v),
    "Linear variance": lambda v: K.Linear(v),
    "Polynomial variance": lambda v: K.Polynomial(v),
    "ArcCosine weight_variances": lambda v: K.ArcCosine(weight_variances=v),
    "Zonal weight_variances": lambda v: K.Zonal(weight_variances=v),
}
INSIDE = {
    "Linear variance": lambda v: K.Transformed(K.Linear(v), jnp.sin) + 2.0 * K.RBF(),
    "Periodic period": lambda v: K.ChangePoint(K.RBF(), K.Periodic(period=v), 0.5),
    "Zonal weight_variances": lambda v: K.RBF() * K.Zonal(weight_variances=v),
}
TABLES = {"alone": ALONE, "inside": INSIDE}
every = pytest.mark.parametrize(
    ("name", "build"),
    [pytest.param(*item, id=f"{item[0]} {where}") for where, found in TABLES.items() for item in found.items()],
)
few = pytest.mark.parametrize(
    "name",
    mostly_long(["Periodic period", "Linear variance", "Polynomial variance", "Zonal weight_variances"], ALONE),
)
WAYS = {
    "matrix": lambda k, x: k(x, x),
    "diagonal": lambda k, x: k.diag(x),
    "gram": lambda k, x: k.gram(x),
    "features": lambda k, x: k.features(KEY, x, 4),
    "series": lambda k, x: k.series(x, (5,) * x.shape[-1]),
    "terms": lambda k, x: k.tilts(x.shape[-1])[0].log_scale,
    "psi1": lambda k, x: psi1(k, x, jnp.ones_like(x), x),
    "spectral density": lambda k, x: k.spectral_density(x),
    "directions": lambda k, x: k.directions(x) if isinstance(k, ZonalKernel) else None,
    "factor": lambda k, x: k.factor(x) if isinstance(k, ZonalKernel) else None,
}


def ways(build, x):
    """What a kernel can compute of inputs, by name."""
    found = {}
    for way, compute in WAYS.items():
        try:
            if jax.eval_shape(lambda v, compute=compute: compute(build(v), x), 1.0) is not None:
                found[way] = compute
        except ValueError as error:
            assert any(why in str(error) for why in ("has no", "in closed form")), error  # noqa: PT017
    return found


@pytest.mark.slow
@every
def test_other_shapes_are_refused_wherever_a_kernel_is_evaluated(name, build):
    owner, argument = name.split()
    for x, shapes in ((ONE, [(3,), (1, 1), (3, 1)]), (X, [(3,), (2, 1), (3, 2)])):
        found = ways(build, x)
        assert found.keys() >= {"matrix", "diagonal", "gram", "features"}
        for shape, compute in itertools.product(shapes, found.values()):
            expected = rf"{owner}: expected {argument} of shape \(\) or \({x.shape[-1]},\), got \({shape[0]},"
            with pytest.raises(ValueError, match=expected):
                compute(build(jnp.ones(shape)), x)
            with pytest.raises(ValueError, match=expected):
                jax.eval_shape(lambda v, compute=compute, x=x: compute(build(v), x), jnp.ones(shape))


@pytest.mark.slow
@few
def test_a_number_and_one_per_column(name):
    build = ALONE[name]
    found = ways(build, X)
    found.pop("psi1", None)  # of the terms

    @jax.jit
    def values(*given):
        return [{way: compute(build(v), X) for way, compute in found.items()} for v in given]

    number, *others = values(0.7, np.array([0.7]), jnp.full(2, 0.7))
    for other, way in itertools.product(others, found):
        np.testing.assert_allclose(other[way], number[way], rtol=1e-5, atol=1e-6)


@every
def test_lists(name, build):
    for listed in ([0.7, 1.3], (0.7, 1.3), [0.7, jnp.array(1.3)]):
        for one, other in zip(*map(jax.tree.leaves, (build(listed), build(TWO))), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-6)
    assert jax.eval_shape(lambda v: build([v, 1.3])(X, X), 0.7).shape == (3, 3)


@pytest.mark.slow
@few
def test_batches_of_kernels(name):
    build, values = ALONE[name], jnp.array([[0.7, 1.3], [0.4, 0.9], [1.1, 2.0]])
    batch = jax.vmap(lambda k: k(X, X))(jax.vmap(build)(values))
    np.testing.assert_allclose(batch, jnp.stack([build(v)(X, X) for v in values]), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(jax.vmap(lambda v: build(v).diag(X))(values)[1], build(values[1]).diag(X), rtol=1e-5)
    rows = jnp.concatenate([X, jnp.array([[0.0], [2.0], [2.0]])], -1)
    found = K.PerGroup(jax.vmap(build)(values))(rows, rows)
    np.testing.assert_allclose(found[1:, 1:], build(values[2])(X[1:], X[1:]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("build", "name"),
    [
        (lambda v: K.RationalQuadratic(alpha=v), "alpha of RationalQuadratic"),
        (lambda v: K.Polynomial(offset=v), "offset of Polynomial"),
        (lambda v: K.ArcCosine(bias_variance=v), "bias_variance of ArcCosine"),
        (lambda v: K.ArcCosine(v), "variance of ArcCosine"),
        (lambda v: K.Zonal(bias_variance=v), "bias_variance of Zonal"),
        (lambda v: K.GreatCircle(radius=v), "radius of GreatCircle"),
        (lambda v: K.GreatCircle(lengthscale=v), "lengthscale of GreatCircle"),
        (lambda v: K.Chordal(radius=v), "radius of Chordal"),
        (lambda v: K.Brownian(v), "variance of Brownian"),
        (lambda v: K.IntegratedBrownian(origin=v), "origin of IntegratedBrownian"),
        (lambda v: K.VaryingLengthscale(K.RBF(v)), "variance of RBF"),
        (lambda v: K.Categorical(3, v), "variance of Categorical"),
        (lambda v: K.ChangePoint(K.RBF(), K.RBF(), 0.0, v), "width of ChangePoint"),
        (lambda v: K.Constant(v), "variance of Constant"),
    ],
)
def test_what_is_one_number(build, name):
    for value, shape in ((TWO, r"\(2,\)"), ([1.0, 2.0], r"\(2,\)"), (np.ones((1, 3)), r"\(1, 3\)")):
        with pytest.raises(ValueError, match=rf"expected {name.split()[0]} to be a single number, got shape {shape}"):
            build(value)
    with pytest.raises(ValueError, match=f"expected {name.split()[0]} to be a single number"):
        jax.eval_shape(build, TWO)


@pytest.mark.slow
def test_kernels_that_check_their_columns_do_so_on_the_diagonal():
    """Also inside a kernel that changes the columns, where nobody else has looked at the inputs."""
    for kernel, x, match in (
        (K.SpectralMixture(TWO, jnp.ones((2, 2)), TWO), ONE, r"SpectralMixture: expected inputs with 2 column\(s\)"),
        (K.VaryingLengthscale(K.RBF(), places=2), ONE, r"VaryingLengthscale: expected 2 column\(s\) of places"),
        (
            K.VaryingLengthscale(K.RBF(1.0, [1.0, 2.0])),
            X,
            r"RBF: expected lengthscale of shape \(\) or \(1,\), got \(2,\)",
        ),
        (K.Categorical((3, 2)), jnp.zeros((3, 1)), r"expected 2 column\(s\) of labels"),
    ):
        inside = K.Transformed(kernel, lambda X: X)
        for compute in (WAYS["matrix"], WAYS["diagonal"], WAYS["features"]):
            with pytest.raises(ValueError, match=match.removeprefix("VaryingLengthscale: ")):
                compute(inside, x)


def test_lists_that_are_no_numbers():
    for build, what in (
        (lambda v: K.RBF(lengthscale=v), "RBF: expected lengthscale"),
        (lambda v: K.Linear(v), "Linear: expected variance"),
        (lambda v: K.Categorical(3, correlation=v), "Categorical: expected correlation"),
        (lambda v: K.SpectralMixture(v, [1.0], [1.0]), "SpectralMixture: expected variance"),
    ):
        for value in (["a"], [[1.0], [1.0, 2.0]]):
            with pytest.raises(ValueError, match=f"{what} to be "):
                build(value)
    with pytest.raises(ValueError, match="Linear: expected variance to be positive, got"):
        K.Linear([1.0, -1.0])


def test_arrays_of_numpy_beside_kernels():
    for operate in (
        lambda: np.array([2.0, 3.0]) * K.RBF(),
        lambda: np.array([2.0, 3.0]) + K.RBF(),
        lambda: K.RBF() * np.array([2.0, 3.0]),
    ):
        with pytest.raises(ValueError, match=r"expected a kernel, a callable .* or a number, got ndarray"):
            operate()
    expected = 2 * K.RBF()(X, X)
    for number in (np.float32(2), np.float64(2), np.int64(2), np.array(2.0)):
        for kernel in (number * K.RBF(), K.RBF() * number):
            assert isinstance(kernel, K.Product)
            np.testing.assert_array_equal(kernel(X, X), expected)
        assert isinstance(number + K.RBF(), K.Sum)


def test_sums_by_the_builtin():
    kernels = [K.RBF(), K.Linear(), K.Matern12()]
    total = sum(kernels)
    assert total.left.left is kernels[0]
    np.testing.assert_array_equal(total(X, X), (kernels[0] + kernels[1] + kernels[2])(X, X))
    assert sum(kernels[:1]) is kernels[0]
    for nothing in (lambda: K.RBF() + 0, lambda: 0.0 + K.RBF(), lambda: False + K.RBF(), lambda: 0 * K.RBF()):
        with pytest.raises(ValueError, match="expected variance to be positive"):
            nothing()


def test_column_numbers_of_numpy():
    kernel = K.RBF().on(np.int64(1), *np.array([0], np.uint8))
    assert kernel.dims == (1, 0)
    assert all(type(d) is int for d in kernel.dims)
    assert hash(jax.tree.structure(kernel)) == hash(jax.tree.structure(K.RBF().on(1, 0)))
    for wrong in (True, np.True_, 0.0, np.float64(0), "0", None, np.int64(-1), np.array([0])):
        with pytest.raises(ValueError, match=r"kernel.on\(\*dims\): expected columns counted from 0"):
            K.RBF().on(wrong)
        with pytest.raises(ValueError, match=r"ChangePoint: expected column to be a number counted from 0"):
            K.ChangePoint(K.RBF(), K.RBF(), 0.0, column=wrong)
    assert type(K.ChangePoint(K.RBF(), K.RBF(), 0.0, column=np.int64(1)).column) is int


@pytest.mark.parametrize("kernel", [K.Periodic(), K.Cosine()])
@pytest.mark.parametrize("sphere", [K.Zonal, K.Chordal])
def test_kernels_of_the_sphere_are_functions_of_the_distance(kernel, sphere):
    with pytest.raises(ValueError, match=r"a single lengthscale, got (Periodic|Cosine)"):
        sphere(kernel).by_angle(jnp.ones(()))
