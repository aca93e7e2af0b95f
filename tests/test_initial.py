import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_dgp import initial, means

rng = np.random.default_rng(0)
X = rng.normal(size=(300, 4)) * [5.0, 1.0, 0.1, 1.0] + 3.0


@pytest.mark.smoke
def test_standardizer_round_trip():
    units = initial.Standardizer.fit(X)
    np.testing.assert_allclose(units(X).mean(0), 0, atol=1e-12)
    np.testing.assert_allclose(units(X).std(0), 1, rtol=1e-12)
    np.testing.assert_allclose(units.inverse(units(X)), X, rtol=1e-12)
    np.testing.assert_allclose(units.inverse_scale(jnp.ones(4)), X.std(0), rtol=1e-12)
    constant = initial.Standardizer.fit(np.full((5, 1), 1e8))
    np.testing.assert_array_equal(constant(np.full((2, 1), 1e8)), 0)
    huge = np.full((7, 1), 7.7e21)  # whose mean is another number
    np.testing.assert_array_equal(initial.Standardizer.fit(huge)(huge), 0)


@pytest.mark.parametrize("unit", [1e-15, 1e-30])
def test_standard_units_do_not_depend_on_the_unit(unit):
    """Femtoseconds in seconds, cross sections in square metres."""
    columns = np.concatenate([X, np.zeros((300, 1)), np.full((300, 1), 3.3)], 1)
    units = initial.Standardizer.fit(unit * columns)
    np.testing.assert_allclose(units(unit * columns), initial.Standardizer.fit(columns)(columns), atol=1e-9)
    np.testing.assert_array_equal(units.scale[4:], 1)
    np.testing.assert_allclose(units.scale[:4], unit * X.std(0), rtol=1e-12)


def test_what_float32_does_not_hold_is_constant(x32):
    units = initial.Standardizer.fit(1e-42 * X)
    np.testing.assert_array_equal(units.scale, 1)
    assert np.isfinite(jax.jit(units)(jnp.asarray(1e-42 * X))).all()


def test_kmeans_finds_clusters():
    centres = np.array([[0.0, 0.0], [10.0, 0.0], [0.0, 10.0]])
    data = np.concatenate([c + 0.1 * rng.normal(size=(50, 2)) for c in centres])
    found = initial.kmeans(data, 3)
    assert all(np.abs(found - c).sum(1).min() < 0.2 for c in centres)
    np.testing.assert_array_equal(found, initial.kmeans(data, 3))
    assert initial.kmeans(data.astype(np.float32), 5).dtype == np.float32


def test_kmeans_gives_distinct_rows_of_discrete_data():
    data = rng.integers(0, 3, size=(400, 3)).astype(float)
    Z = initial.kmeans(data, 20)
    assert len(np.unique(Z, axis=0)) == 20
    everything = initial.kmeans(data, 27)
    np.testing.assert_array_equal(everything, np.unique(data, axis=0))


def test_kmeans_of_many_rows():
    assert initial.kmeans(rng.normal(size=(50_000, 2)), 10).shape == (10, 2)


@pytest.mark.parametrize("widths", [[], [4], [2], [2, 3], [6]])
def test_layers_propagate_inducing_inputs(widths):
    starts = initial.layers(X, widths, 12)
    dims = [4, *widths]
    assert [start.Z.shape for start in starts] == [(12, d) for d in dims]
    assert [start.lengthscale for start in starts] == [pytest.approx(np.sqrt(d)) for d in dims]
    assert isinstance(starts[-1].mean, means.ZeroMean)
    inputs = jnp.asarray(X)
    for start in starts[:-1]:
        inputs = start.mean(inputs)
        low, high = np.asarray(inputs).min(0), np.asarray(inputs).max(0)
        following = starts[[s is start for s in starts].index(True) + 1]
        assert (low - 1e-9 <= following.Z).all()
        assert (high + 1e-9 >= following.Z).all()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: initial.kmeans(X, 301),
            "expected between 1 and 300 inducing points, the number of distinct rows of X, got 301",
        ),
        (lambda: initial.kmeans(np.tile(X[:10], (5, 1)), 11), "expected between 1 and 10 inducing points"),
        (lambda: initial.kmeans(X, 0), "expected between 1 and 300 inducing points"),
        (lambda: initial.kmeans(np.where(X > 5, np.nan, X), 5), "expected finite inputs X"),
        (lambda: initial.kmeans(X[:, 0], 5), r"expected inputs of shape \(..., N, D\)"),
        (lambda: initial.Standardizer.fit(np.array([1.0, np.inf])), "expected finite data to standardise"),
        (lambda: initial.layers(X, [0], 5), "expected a positive integer number of outputs"),
    ],
)
def test_bad_input(build, message):
    with pytest.raises(ValueError, match=message):
        build()
