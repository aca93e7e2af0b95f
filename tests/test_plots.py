import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from programs import X, Y, Z, deep, random_params

import numpyro_dgp as dgp

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from numpyro_dgp import plots


@pytest.fixture(autouse=True)
def close():
    yield
    plt.close("all")


@pytest.fixture(scope="module")
def posterior():
    guide = dgp.guides.InducingPoint(deep)
    return dgp.Posterior(deep, guide, random_params(deep, guide, X, Y))


MIXTURE = dgp.Mixture(jnp.array([[0.0, 2.0], [2.0, 2.0]]), jnp.array([[1.0, 1.0], [1.0, 1.0]]))


def test_fit_draws_two_standard_deviations_of_the_mixture():
    figure = plots.fit([1.0, 0.0], MIXTURE, data=([0.5], [1.0]), functions=np.zeros((3, 2)))
    ax = figure.axes[0]
    (band,) = ax.collections
    vertices = {tuple(v) for v in band.get_paths()[0].vertices.round(6).tolist()}
    assert {
        (1.0, round(1 + 2 * np.sqrt(2), 6)),
        (1.0, round(1 - 2 * np.sqrt(2), 6)),
        (0.0, 4.0),
        (0.0, 0.0),
    } <= vertices
    assert len(ax.lines) == 3 + 1 + 1
    np.testing.assert_allclose(ax.lines[-1].get_xydata(), [[0.0, 2.0], [1.0, 1.0]])


def test_fit_wants_one_input_and_one_output():
    with pytest.raises(ValueError, match=r"plots.fit: expected x of shape \(N,\) and one output, got \(2, 1\)"):
        plots.fit(np.zeros((2, 1)), MIXTURE)


def test_bounds_are_means_over_windows():
    figure = plots.bounds({"a": np.arange(8.0), "b": np.ones(8)}, size=2, window=2)
    a, b = figure.axes[0].lines
    np.testing.assert_allclose(a.get_xydata(), [[1, -0.25], [3, -1.25], [5, -2.25], [7, -3.25]])
    np.testing.assert_allclose(b.get_ydata(), -0.5)


def test_observed_draws_into_given_axes():
    _, ax = plt.subplots()
    assert plots.observed([1.0, 2.0], MIXTURE, ax=ax) is ax.figure
    np.testing.assert_allclose(ax.lines[0].get_xydata(), [[1.0, 1.0], [2.0, 2.0]])


def test_layers_shows_every_function_with_its_inducing_points(posterior, key):
    figure = plots.layers(posterior, key, X, num_points=20)
    assert [ax.get_ylabel() for ax in figure.axes] == ["h", "y"]
    f, inputs = posterior.layers(key, X)["h"]
    np.testing.assert_allclose(inputs, X)
    curve, points = figure.axes[0].lines[0], figure.axes[0].containers[0]
    x = curve.get_xdata()
    np.testing.assert_allclose(curve.get_ydata(), f(jnp.array(x)[:, None]).mean[:, 0], rtol=1e-9)
    np.testing.assert_allclose(points.lines[0].get_xydata(), np.hstack([Z, f(Z).mean]), rtol=1e-9)
    hidden = posterior.hidden(key, X, num_samples=1)["h"]
    assert posterior.layers(key, X)["y"][1].shape == hidden[0].shape


def test_layers_of_mcmc_draws_and_exact_processes(key):
    def model(X, y=None):
        e = dgp.gp("e", dgp.kernels.RBF(), None, outputs=2)
        x = numpyro.sample("x", e(X))
        g = dgp.gp("g", dgp.kernels.RBF(), dgp.Points(jnp.eye(2)))
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dgp.Likelihood(g(x), lambda v: dist.Normal(v, 0.1)), obs=y)

    samples = {"g": jax.random.normal(key, (3, 2)), "x": jnp.zeros((3, 30, 2))}
    posterior = dgp.Posterior(model, samples=samples)
    found = posterior.layers(key, X)
    np.testing.assert_allclose(found["y"][0].u, samples["g"][0])
    np.testing.assert_allclose(found["x"][0](X).mean, found["y"][1], atol=1e-5)
    figure = plots.layers(posterior, key, X, num_points=5)
    assert [ax.get_ylabel() for ax in figure.axes if ax.get_visible()] == ["x[0]", "x[1]", "y"]


def test_layers_needs_a_layer(key):
    def model(X, y=None):
        slope = numpyro.sample("slope", dist.Normal())
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dist.Normal(slope * X[:, 0]), obs=y)

    with pytest.raises(ValueError, match=r"expected a program with dgp\.gp layers, got none"):
        plots.layers(dgp.Posterior(model, samples={"slope": jnp.zeros(1)}), key, X)


def test_density_is_a_heat_map_of_the_density():
    x, y = np.linspace(0, 1, 5), np.linspace(-1, 1, 7)
    values = np.random.default_rng(0).normal(size=(7, 5))
    ax = plots.density(x, y, values, data=([0.5], [0.2])).axes[0]
    (mesh,) = ax.collections
    np.testing.assert_allclose(np.asarray(mesh.get_array()).reshape(7, 5), np.exp(values))
    np.testing.assert_allclose(ax.lines[0].get_xydata(), [[0.5, 0.2]])
    assert ax.get_xlim() == (0, 1)
    with pytest.raises(ValueError, match=r"expected log_density of shape \(7, 5\)"):
        plots.density(x, y, values.T)


def test_marginals_are_histograms_under_the_mixture():
    draws, y = np.random.default_rng(0).normal(size=(500, 3)), np.linspace(-4, 4, 50)
    values = np.tile(dist.Normal().log_prob(y)[:, None], 3)
    figure = plots.marginals(draws, y, values, observed=[0.0, 1.0, 2.0])
    assert len(figure.axes) == 3
    np.testing.assert_allclose(figure.axes[1].lines[0].get_ydata(), np.exp(values[:, 1]))
    assert sum(patch.get_height() * patch.get_width() for patch in figure.axes[1].patches) == pytest.approx(1)
    assert figure.axes[2].lines[1].get_xdata()[0] == 2.0
    with pytest.raises(ValueError, match=r"plots.marginals: expected draws \(S, N\) and log_density \(50, N\)"):
        plots.marginals(draws, y, values.T)
