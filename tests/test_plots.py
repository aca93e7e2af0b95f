import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from programs import X, Y, Z, bayesian, deep, random_params

import numpyro_dgp as dgp

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from numpyro_dgp import plots
from numpyro_dgp.rings.spectra import periodised

rng = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def close():
    yield
    plt.close("all")


@pytest.fixture(scope="module")
def posterior():
    guide = dgp.guides.InducingPoint(deep)
    return dgp.Posterior(deep, guide, random_params(deep, guide, X, Y))


MIXTURE = dgp.densities.Mixture(jnp.array([[0.0, 2.0], [2.0, 2.0]]), jnp.array([[1.0, 1.0], [1.0, 1.0]]))


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
    with pytest.raises(ValueError, match=r"fit: expected x of shape \(N,\) and one output, got \(2, 1\)"):
        plots.fit(np.zeros((2, 1)), MIXTURE)


def test_bounds_are_means_over_windows():
    figure = plots.bounds({"a": np.arange(8.0), "b": np.ones(8)}, size=2, window=2)
    a, b = figure.axes[0].lines
    np.testing.assert_allclose(a.get_xydata(), [[1, -0.25], [3, -1.25], [5, -2.25], [7, -3.25]])
    np.testing.assert_allclose(b.get_ydata(), -0.5)
    low, high = plots.bounds({"a": np.array([1000.0, 9.0, 9.0, 9.0, 5.0] + 11 * [1.0])}, window=1).axes[0].get_ylim()
    assert -6 < low < -4  # of the last three quarters: the first steps are far below
    assert -1 < high < 0


def test_observed_draws_into_given_axes():
    _, ax = plt.subplots()
    assert plots.observed([1.0, 2.0], MIXTURE, ax=ax) is ax.figure
    np.testing.assert_allclose(ax.lines[0].get_xydata(), [[1.0, 1.0], [2.0, 2.0]])


@pytest.mark.long
def test_layers_shows_every_function_with_its_inducing_points(posterior, key):
    figure = plots.layers(posterior, key, X, num_points=20)
    assert [ax.get_ylabel() for ax in figure.axes] == ["h", "y"]
    f, inputs = posterior.layers(key, X)["h"]
    np.testing.assert_allclose(inputs, X)
    curve, points = figure.axes[0].lines[0], figure.axes[0].containers[0]
    x = curve.get_xdata()
    np.testing.assert_allclose(curve.get_ydata(), f(jnp.array(x)[:, None]).mean[:, 0], rtol=1e-9)
    np.testing.assert_allclose(points.lines[0].get_xydata(), np.hstack([Z, f(Z).mean]), rtol=1e-9)
    hidden = posterior.using(num_samples=1).hidden(key, X)["h"]
    assert posterior.layers(key, X)["y"][1].shape == hidden[0].shape


@pytest.mark.long
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
    np.testing.assert_allclose(found["y"][0].v.loc, samples["g"][0])
    np.testing.assert_allclose(found["x"][0](X).mean, found["y"][1], atol=1e-5)
    figure = plots.layers(posterior, key, X, num_points=5)
    assert [ax.get_ylabel() for ax in figure.axes if ax.get_visible()] == ["x[0]", "x[1]", "y"]


@pytest.mark.slow
def test_inducing_points_beyond_the_inputs_are_arrows_at_the_edges(key):
    def model(X, y=None):
        f = dgp.gp(
            "f", dgp.kernels.RBF(), dgp.Points(places), mean=dgp.means.LinearMean(jnp.ones((1, 1)), jnp.zeros(1))
        )
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dgp.Likelihood(f(X), lambda v: dist.Normal(v, 0.1)), obs=y)

    places = jnp.array([-9.0, 0.0, 0.5, 1.02, 30.0, 40.0])[:, None]
    x = jnp.linspace(0, 1, 7)[:, None]
    (ax,) = plots.layers(dgp.Posterior(model, samples={"f": jnp.zeros((1, 6))}), key, x, num_points=5).axes
    np.testing.assert_allclose(ax.get_xlim(), [-0.05, 1.05])
    low, high = ax.get_ylim()
    assert -0.5 < low < 0
    assert 1 < high < 1.5
    np.testing.assert_allclose(ax.containers[0].lines[0].get_xdata(), [0.0, 0.5, 1.02], rtol=1e-6)
    left, right = (next(line for line in ax.lines if line.get_marker() == mark).get_xydata() for mark in "<>")
    np.testing.assert_allclose(left, [[-0.05, low]], atol=0.3)
    np.testing.assert_allclose(right, [[1.05, high]] * 2, atol=0.3)


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


def test_marginals_are_shares_of_all_draws():
    """Those beyond the levels too: the bars have the height of the density, here 0.4 to 0.24 of N(0, 1)."""
    y, draws = np.linspace(0, 1, 21), np.random.default_rng(0).normal(size=(5000, 1))
    ax = plots.marginals(draws, y, -0.5 * y[:, None] ** 2 - 0.919).axes[0]
    area = sum(bar.get_height() * bar.get_width() for bar in ax.patches)
    assert abs(area - 0.341) < 4 * (0.341 * 0.659 / 5000) ** 0.5


def test_marginals_are_histograms_under_the_mixture():
    draws, y = np.random.default_rng(0).normal(size=(500, 3)), np.linspace(-4, 4, 50)
    values = np.tile(dist.Normal().log_prob(y)[:, None], 3)
    figure = plots.marginals(draws, y, values, observed=[0.0, 1.0, 2.0])
    assert len(figure.axes) == 3
    np.testing.assert_allclose(figure.axes[1].lines[0].get_ydata(), np.exp(values[:, 1]))
    assert sum(patch.get_height() * patch.get_width() for patch in figure.axes[1].patches) == pytest.approx(1)
    assert figure.axes[2].lines[1].get_xdata()[0] == 2.0
    with pytest.raises(ValueError, match=r"expected draws \(S, N\) and log_density \(50, N\)"):
        plots.marginals(draws, y, values.T)


def test_latent_space_draws_two_standard_deviations():
    draws = rng.normal(size=(50, 6, 2)) @ np.array([[1.0, 0.6], [0.0, 0.3]]) + rng.normal(size=(6, 2))
    ax = plots.latent_space(draws, colours=list("aabbcc"), label="letter").axes[0]
    outlines, points = ax.collections
    np.testing.assert_allclose(points.get_offsets(), draws.mean(0))
    for n, path in enumerate(outlines.get_paths()):
        away = path.vertices - draws[:, n].mean(0)
        inverse = np.linalg.inv(np.cov(draws[:, n].T))
        np.testing.assert_allclose(np.einsum("vp,pq,vq->v", away, inverse, away), 4)
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["a", "b", "c"]
    assert ax.get_legend().get_title().get_text() == "letter"
    shades = [tuple(shade) for shade in points.get_facecolors()]
    assert shades[0] == shades[1] != shades[2]


def test_latents_of_one_column_lie_in_their_order():
    draws = rng.normal(size=(40, 5, 1)) + np.array([3.0, 1.0, 2.0, 5.0, 4.0])[:, None] * 10
    slope = np.array([0.3, 0.1, 0.2, 0.5, 0.4])
    figure = plots.latent_space(draws, colours=slope, label="slope, pixels per row")
    ax, bar = figure.axes
    bars, points = ax.collections
    mean, sd = draws.mean(0)[:, 0], draws.std(0, ddof=1)[:, 0]
    np.testing.assert_allclose(points.get_offsets(), np.stack([mean, [2, 0, 1, 4, 3]], -1))
    np.testing.assert_allclose([s[:, 0] for s in bars.get_segments()], np.stack([mean - 2 * sd, mean + 2 * sd], -1))
    assert bar.get_ylabel() == "slope, pixels per row"
    np.testing.assert_allclose(points.get_facecolors()[[1, 3]], plt.get_cmap("viridis")([0.0, 1.0]))


@pytest.mark.long
def test_latent_space_of_a_guide(key):
    """Draws of a latent as a guide gives them, of latents without variance too."""
    guide = dgp.guides.InducingPoint(bayesian)
    params = random_params(bayesian, guide, X, Y)
    draws = guide.sample_posterior(key, params, X, Y, sample_shape=(20,))["w"]
    assert draws.shape == (20, 30, 1)
    plots.latent_space(draws, colours=Y, label="y")
    ax = plots.latent_space(np.zeros((3, 4, 2))).axes[0]
    np.testing.assert_allclose(ax.collections[0].get_paths()[0].vertices, 0)


def test_latent_space_refuses_bad_input():
    with pytest.raises(ValueError, match=r"expected draws \(S, N, 1\) or \(S, N, 2\).*got shape \(9, 4, 3\)"):
        plots.latent_space(np.zeros((9, 4, 3)))
    with pytest.raises(ValueError, match=r"with S at least 3, got shape \(4, 2\)"):
        plots.latent_space(np.zeros((4, 2)))
    with pytest.raises(ValueError, match=r"expected colours of shape \(4,\), one per datum, got \(3,\)"):
        plots.latent_space(np.zeros((9, 4, 2)), colours=np.zeros(3))


@pytest.mark.slow
@pytest.mark.parametrize("size", [15, 16])
def test_spectra_are_the_eigenvalues_at_their_frequencies(size):
    """Against the dense covariance and its Fourier vectors; power of prior draws has them as its mean."""
    ring = dgp.rings.Ring(1.0, 6.0, size)
    kernel = dgp.kernels.Matern32(1.3, 0.4)
    C = np.asarray(periodised(kernel, ring, ring.points(), ring.points()))
    k = np.arange(1, size // 2 + 1)
    waves = np.exp(-2j * np.pi * np.outer(k, np.arange(size)) / size) / np.sqrt(size)
    expected = np.einsum("kj,jl,kl->k", waves, C, waves.conj()).real
    draws = rng.normal(size=(4000, size)) @ np.linalg.cholesky(C).T
    ax = plots.ring_spectra(ring, {"rough": kernel}, values=draws, noise=0.2, unit="day").axes[0]
    values, curve, noise = ax.lines
    np.testing.assert_allclose(curve.get_xdata(), k / 5)
    np.testing.assert_allclose(curve.get_ydata(), expected, rtol=1e-6)
    ordinary = slice(0, (size - 1) // 2)  # where the transform is complex, and its power exponential
    np.testing.assert_allclose(values.get_ydata()[ordinary], (expected * np.log(2))[ordinary], rtol=0.15)
    np.testing.assert_allclose(noise.get_ydata(), 0.04)
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("cycles per day", "power, squared unit of the output")


def test_spectrum_of_a_wave_is_a_line():
    ring = dgp.rings.Ring(0.0, 8.0, 64)
    values = 2 * np.sin(2 * np.pi * 1.5 * np.asarray(ring.points()[:, 0]))
    ax = plots.ring_spectra(ring, {}, values=values).axes[0]
    (curve,) = ax.lines
    assert curve.get_xdata()[np.argmax(curve.get_ydata())] == 1.5
    np.testing.assert_allclose(curve.get_ydata().max(), 64)  # half of the sum of squares, 2^2 / 2 * 64, at each sign


def test_ring_spectra_refuse_bad_input():
    with pytest.raises(ValueError, match=r"expected a ring of one dimension, got 2"):
        plots.ring_spectra(dgp.rings.Ring(0.0, 1.0, (4, 4)), {})
    with pytest.raises(ValueError, match=r"expected values at all 8 grid points.*got shape \(7,\)"):
        plots.ring_spectra(dgp.rings.Ring(0.0, 1.0, 8), {}, values=np.zeros(7))


BOX = {"speed, m/s": (0.0, 2.0), "mass, kg": (1.0, 3.0), "angle": (0.0, 1.0)}


def lines(X):
    return np.array([[1.0, 0.5, 0.0], [1.0, 0.9, 0.0]]) @ np.asarray(X).T


def test_indices_have_an_interval_and_the_error_of_the_integration(key):
    found = dgp.design.sobol_indices(lines, BOX, key, num_points=16, progress_bar=False)
    ax = plots.sobol_indices(found, reference=found, level=0.5).axes[0]
    first, total = (c for c in ax.containers if hasattr(c, "patches"))
    low, high = found.total.interval(0.5)
    np.testing.assert_allclose([bar.get_x() for bar in total], low)
    np.testing.assert_allclose([bar.get_width() for bar in total], high - low)
    points = [c for c in ax.containers if hasattr(c, "has_xerr")]
    ends = np.array(points[0].lines[2][0].get_segments())[:, :, 0]
    mean, error = found.first.mean, found.first.integration_error
    np.testing.assert_allclose(ends, np.stack([mean - 2 * error, mean + 2 * error], -1))
    assert [text.get_text() for text in ax.get_yticklabels()] == list(BOX)
    places = [bar.get_y() for bar in first]
    assert places == sorted(places, reverse=True)  # the first column on top
    assert {text.get_text() for text in ax.get_legend().get_texts()} == {"first order", "total", "reference"}


def test_main_effects_are_curves_with_two_bands(key):
    found = dgp.design.main_effects(lines, BOX, key, num_values=5, num_points=16, progress_bar=False)
    figure = plots.main_effects(found, reference=found, label="mean energy, J")
    assert [ax.get_xlabel() for ax in figure.axes] == list(BOX)
    assert figure.axes[0].get_ylabel() == "mean energy, J"
    for d, ax in enumerate(figure.axes):
        curve, reference = ax.lines
        np.testing.assert_allclose(curve.get_xydata(), np.stack([found.x[d], found.curves.mean[d]], -1))
        np.testing.assert_allclose(reference.get_xydata(), curve.get_xydata())
        emulator, integration = (c.get_paths()[0].vertices[:, 1] for c in ax.collections)
        low, high = found.curves.interval(0.9)
        assert (emulator.min(), emulator.max()) == pytest.approx((low[d].min(), high[d].max()))
        widest = found.curves.mean[d] + 2 * found.curves.integration_error[d]
        assert integration.max() == pytest.approx(widest.max())


@pytest.mark.slow
def test_figures_of_sensitivity_refuse_other_things(key):
    found = dgp.design.sobol_indices(lines, BOX, key, num_points=2, progress_bar=False)
    effects = dgp.design.main_effects(lines, BOX, key, num_points=2, num_values=2, progress_bar=False)
    with pytest.raises(ValueError, match=r"expected what dgp.design.sobol_indices returns, got MainEffects"):
        plots.sobol_indices(effects)
    with pytest.raises(ValueError, match=r"expected what dgp.design.main_effects returns, got SobolIndices"):
        plots.main_effects(effects, reference=found)
    with pytest.raises(
        ValueError, match=r"reference with the columns speed, m/s, mass, kg, angle, got x0, x1, x2: call"
    ):
        plots.sobol_indices(found, reference=found._replace(names=("x0", "x1", "x2")))
