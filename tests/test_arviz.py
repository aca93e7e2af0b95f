"""ArviZ trees: densities against dense algebra and quadrature, groups, names, plots."""

import importlib.util
import sys
from functools import partial

import arviz_stats
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
import xarray
from dense import rbf
from numpyro.infer import MCMC, NUTS, SVI
from numpyro.infer.autoguide import AutoMultivariateNormal
from programs import NOISE, X, Y, Z, deep, random_params, shallow
from scipy.stats import multivariate_normal, norm

import numpyro_dgp as dgp
from numpyro_dgp.diagnostics.ratios import draw

x, y, z = (np.asarray(a) for a in (X, Y, Z))
POINTS = dgp.guides.InducingPoint(shallow)
PARAMS = random_params(shallow, POINTS, X, Y)
FIT = dgp.Posterior(shallow, POINTS, PARAMS)
noisy = partial(deep, process_noise=0.2)
NOISY = dgp.guides.InducingPoint(noisy)


def layer(inputs, inducing, v, variance, lengthscale):
    """Moments of a layer given its whitened values, densely."""
    L = np.linalg.cholesky(rbf(inducing, inducing, variance, lengthscale))
    A = np.linalg.solve(L, rbf(inducing, inputs, variance, lengthscale)).T
    return A @ v, variance - (A**2).sum(1)


@pytest.fixture(scope="module")
def tree():
    params = random_params(noisy, NOISY, X, Y)
    posterior = dgp.Posterior(noisy, NOISY, params)
    return dgp.diagnostics.to_arviz(posterior, jax.random.key(0), X, Y, num_samples=100, losses=np.arange(7.0)), params


@pytest.mark.long
@pytest.mark.smoke
def test_densities_of_a_shallow_model_are_the_dense_ones(key):
    found = dgp.diagnostics.to_arviz(FIT, key, X, Y, num_samples=20)
    root = np.asarray(PARAMS["g_auto_scale_tril"])
    q = multivariate_normal(np.asarray(PARAMS["g_auto_loc"]), root @ root.T)
    for s, v in enumerate(found.posterior["g"].to_numpy()[0]):
        mean, c = layer(x, z, v, 1.2, 0.7)
        bound = norm(mean, NOISE).logpdf(y) - 0.5 * c / NOISE**2
        stats = found.sample_stats.isel(chain=0, draw=s)
        np.testing.assert_allclose(stats["log_q"], q.logpdf(v), rtol=1e-9)
        np.testing.assert_allclose(stats["lp"], norm.logpdf(v).sum() + bound.sum(), rtol=1e-6)
        np.testing.assert_allclose(found.log_likelihood_target["y"][0, s], bound, rtol=1e-6, atol=1e-7)
        exact = norm(mean, np.sqrt(c + NOISE**2)).logpdf(y)
        np.testing.assert_allclose(found.log_likelihood_uncorrected["y"][0, s], exact, rtol=1e-6, atol=1e-7)


@pytest.mark.long
def test_hidden_values_are_integrated(key):
    """Whatever q(h) is, the average over its draws is the integral over the model's p(h | v)."""
    guide = dgp.guides.MeanField(noisy)
    params = random_params(noisy, guide, X, Y) | {"h_auto_scale": jnp.full((30, 1), 0.5)}
    found = draw(dgp.Posterior(noisy, guide, params), key, 3, 4000, (X, Y), {}, lambda terms: terms)
    nodes, weights = np.polynomial.hermite_e.hermegauss(80)
    for s in range(3):
        mean, c = layer(x, z, np.asarray(found.values["f"][s, 0]), 0.3, 0.9)
        h = (mean + x[:, 0])[:, None] + np.sqrt(c + 0.2**2)[:, None] * nodes
        m, v = (a.reshape(h.shape) for a in layer(h.reshape(-1, 1), z, np.asarray(found.values["g"][s]), 1.2, 0.7))
        exact = (norm(m, np.sqrt(v + NOISE**2)).pdf(y[:, None]) @ weights) / weights.sum()
        terms = np.exp(np.asarray(found.predictive["y"][s]))
        assert (np.abs(terms.mean(0) - exact) < 4.5 * terms.std(0) / 4000**0.5 + 1e-6).all()


@pytest.mark.long
def test_latents_are_integrated_and_chosen_by_their_weights(key):
    """Also under a guide that weighs its latents; then the posterior is the one that the weights imply."""
    inducing = np.hstack([z, np.sin(9 * z)])

    def model(X, y=None):
        g = dgp.gp("g", dgp.kernels.RBF(1.2, 0.9), dgp.Points(inducing))
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dgp.Likelihood(g(dgp.latent("w", X, 1)), lambda v: dist.Normal(v, NOISE)), obs=y)

    guide = dgp.guides.ImportanceWeighted(model, num_samples=2)
    params = random_params(model, guide, X, Y) | {"w_auto_scale": jnp.full((30, 1), 1.1)}
    found = draw(dgp.Posterior(model, guide, params), key, 60, 400, (X, Y), {}, lambda terms: terms)
    nodes, weights = np.polynomial.hermite_e.hermegauss(60)
    rows = np.stack(np.broadcast_arrays(x, nodes), -1).reshape(-1, 2)
    centred, scaled = [], []
    for s in range(60):
        mean, c = (a.reshape(30, 60) for a in layer(rows, inducing, np.asarray(found.values["g"][s]), 1.2, 0.9))
        densities = norm(mean, np.sqrt(c + NOISE**2)).pdf(y[:, None]) * weights / weights.sum()
        terms = np.exp(np.asarray(found.predictive["y"][s]))
        centred.append((terms.mean(0) - densities.sum(1)) / (terms.std(0) / 400**0.5))
        target = np.exp(norm(mean, NOISE).logpdf(y[:, None]) - 0.5 * c / NOISE**2) * weights
        target /= target.sum(1, keepdims=True)
        scaled.append(np.asarray(found.values["w"][s, :, 0]) - target @ nodes)
    assert abs(np.mean(centred)) < 4 / 1800**0.5 + 0.05
    scaled = np.asarray(scaled)
    assert (np.abs(scaled.mean(0)) < 4.5 * scaled.std(0) / 60**0.5).all()


@pytest.mark.long
def test_groups_names_and_coordinates(tree):
    found, params = tree
    assert set(found.children) == {
        *(
            "posterior",
            "log_likelihood_uncorrected",
            "log_likelihood_target",
            "posterior_predictive",
            "prior",
            "prior_predictive",
        ),
        *("observed_data", "constant_data", "sample_stats", "fit"),
    }
    assert found.posterior["f"].dims == ("chain", "draw", "f_output", "f_inducing")
    assert found.posterior["g"].dims == ("chain", "draw", "g_inducing")
    assert found.posterior["h"].dims == ("chain", "draw", "data", "h_output")
    for group in ("log_likelihood_uncorrected", "posterior_predictive", "prior_predictive"):
        assert found[group]["y"].dims == ("chain", "draw", "data")
    np.testing.assert_array_equal(found.observed_data["y"], Y)
    np.testing.assert_array_equal(found.constant_data["X"], X)
    np.testing.assert_array_equal(found.fit["elbo"], -np.arange(7.0))
    error = found.posterior["g"].std("draw")[0] / 10
    assert (np.abs(found.posterior["g"].mean("draw")[0] - params["g_auto_loc"]) < 5 * error).all()


@pytest.mark.slow
def test_stock_calls_refuse_the_draws_of_a_guide(tree):
    """They would take them for draws from the posterior, and report good weights."""
    found, _ = tree
    for call in (arviz_stats.loo, arviz_stats.loo_pit):
        with pytest.raises(TypeError, match="log likelihood not found"):
            call(found)
    with pytest.raises(TypeError, match="Encountered error trying to compute ELPD from model fit"):
        arviz_stats.compare({"fit": found, "again": found})
    scores = {"fit": dgp.diagnostics.loo(found), "again": dgp.diagnostics.loo(found)}
    assert np.isfinite([score.elpd for score in scores.values()]).all()
    assert "log_likelihood" not in found.children


@pytest.mark.long
def test_draws_are_not_from_the_posterior_of_a_narrow_guide(key):
    """What a stock call says of them without the ratio of densities, and what the ratio says."""
    narrow = dgp.Posterior(shallow, POINTS, PARAMS | {"g_auto_scale_tril": 0.02 * jnp.eye(8)})
    found = dgp.diagnostics.to_arviz(narrow, key, X, Y, num_samples=400)
    score = dgp.diagnostics.loo(found)
    assert (score.pareto_k > score.good_k).all()
    found["log_likelihood"] = found["log_likelihood_uncorrected"]
    assert (arviz_stats.loo(found, pointwise=True).pareto_k < score.good_k).mean() > 0.9


@pytest.mark.slow
def test_round_trip_to_a_file(tree, tmp_path):
    pytest.importorskip("h5netcdf")
    found, _ = tree
    found.to_netcdf(tmp_path / "fit.nc", engine="h5netcdf")
    with xarray.open_datatree(tmp_path / "fit.nc", engine="h5netcdf") as again:
        xarray.testing.assert_equal(again.load(), found)


@pytest.mark.long
def test_names_of_ones_own(key):
    names = [f"row {n}" for n in range(30)]
    found = dgp.diagnostics.to_arviz(
        {"fit": FIT}, key, X, Y, num_samples=5, losses={"fit": np.ones(3)},
        coords={"data": names}, dims={"g": ["knot"]},
    )["fit"]  # fmt: skip
    assert found.posterior["g"].dims[-1] == "knot"
    assert list(found.log_likelihood_uncorrected["data"].to_numpy()) == names
    assert found.fit.sizes == {"step": 3}


@pytest.mark.long
def test_single_precision(x32):
    model = partial(shallow, Z=np.float32(Z))
    fit = dgp.Posterior(model, dgp.guides.InducingPoint(model), jax.tree.map(np.float32, PARAMS))
    found = dgp.diagnostics.to_arviz(fit, jax.random.key(0), np.float32(X), np.float32(Y), num_samples=5)
    assert found.log_likelihood_uncorrected["y"].dtype == np.float32
    assert np.isfinite(found.sample_stats["lp"]).all()


@pytest.fixture(scope="module")
def chains():
    mcmc = MCMC(NUTS(dgp.for_mcmc(noisy)), num_warmup=30, num_samples=30, num_chains=2, chain_method="vectorized",
                progress_bar=False)  # fmt: skip
    mcmc.run(jax.random.key(0), X[::3], Y[::3])
    return mcmc


@pytest.mark.long
def test_chains(chains, key):
    found = dgp.diagnostics.to_arviz(chains, key, X[::3], Y[::3], num_samples=5, local_samples=300)
    assert found.posterior.sizes == {"chain": 2, "draw": 30, "f_output": 1, "f_inducing": 8, "g_inducing": 8,
                                     "data": 10, "h_output": 1, "h_white_output": 1}  # fmt: skip
    np.testing.assert_array_equal(found.posterior["g"], chains.get_samples(group_by_chain=True)["g"])
    assert "diverging" in found.sample_stats
    assert found.prior.sizes["draw"] == 5
    f, g = (np.asarray(found.posterior[name][1, 7]) for name in ("f", "g"))
    mean, c = layer(x[::3], z, f[0], 0.3, 0.9)
    nodes, weights = np.polynomial.hermite_e.hermegauss(80)
    h = (mean + x[::3, 0])[:, None] + np.sqrt(c + 0.2**2)[:, None] * nodes
    m, v = (a.reshape(h.shape) for a in layer(h.reshape(-1, 1), z, g, 1.2, 0.7))
    exact = np.log((norm(m, np.sqrt(v + NOISE**2)).pdf(y[::3, None]) @ weights) / weights.sum())
    np.testing.assert_allclose(found.log_likelihood_uncorrected["y"][1, 7], exact, atol=0.4)


@pytest.mark.long
def test_chains_of_centred_layers_are_noticed(key):
    mcmc = MCMC(NUTS(deep, max_tree_depth=2), num_warmup=2, num_samples=3, progress_bar=False)
    mcmc.run(key, X[::3], Y[::3])
    with pytest.warns(UserWarning, match=r"got hidden layers \['h'\] as they are: such chains hardly move"):
        dgp.diagnostics.to_arviz(mcmc, key, X[::3], Y[::3], num_samples=2, local_samples=2)


@pytest.mark.long
def test_an_autoguide_over_all_sites_has_no_local_part(key):
    guide = AutoMultivariateNormal(noisy)
    svi = SVI(noisy, guide, optax.sgd(0.0), dgp.ELBO())
    params = svi.get_params(svi.init(key, X, Y))
    found = draw(dgp.Posterior(noisy, guide, params), key, 5, 50, (X, Y), {}, lambda terms: terms)
    assert found.target["y"].shape == (5, 1, 30)
    from numpyro.infer.util import log_density

    values = {name: found.values[name][0] for name in ("f", "g", "h")}
    exact = log_density(noisy, (X, Y), {}, values)[0]
    np.testing.assert_allclose(found.log_p[0] + found.target["y"][0].sum(), exact, rtol=1e-9)


def two_sources(X, coarse=None, fine=None):
    g = dgp.gp("g", dgp.kernels.RBF(1.2, 0.7), dgp.Points(Z), outputs=2)
    numpyro.factor("extra", 1.5)
    with numpyro.plate("rows", len(X)):
        numpyro.sample("coarse", dgp.Likelihood(g(X), lambda v: dist.Normal(v, 1.0).to_event(1)), obs=coarse)
    with numpyro.plate("few", 10), numpyro.handlers.mask(mask=jnp.arange(10) > 2):
        h = numpyro.sample("h", g(X[:10], noise=0.1))
        numpyro.factor("weight", -(h[:, 0] ** 2))
        numpyro.sample("fine", dist.Normal(h.sum(-1), NOISE), obs=fine)


@pytest.mark.long
def test_two_sources_of_data_masks_and_factors(key):
    guide = dgp.guides.InducingPoint(two_sources)
    args = X, jnp.stack([Y, -Y], -1), Y[:10]
    params = random_params(two_sources, guide, *args)
    found = dgp.diagnostics.to_arviz(dgp.Posterior(two_sources, guide, params), key, *args, num_samples=4)
    assert found.log_likelihood_uncorrected["coarse"].dims == ("chain", "draw", "rows")
    assert found.log_likelihood_uncorrected["fine"].dims == ("chain", "draw", "few")
    assert found.posterior_predictive["coarse"].dims[2:] == ("rows", "coarse_output")
    assert found.log_likelihood_uncorrected["few"].values.tolist() == list(range(3, 10))  # those that are not masked
    assert np.isnan(found.observed_data["fine"][:3]).all()
    assert (found.log_likelihood_uncorrected["fine"] < found.log_likelihood_uncorrected["fine"].max() + 1).all()
    exact = found.log_likelihood_target["coarse"].sum("rows") + found.log_likelihood_target["fine"].sum("few")
    prior = norm.logpdf(found.posterior["g"]).sum((-1, -2))
    np.testing.assert_allclose(found.sample_stats["lp"], exact + prior + 1.5, rtol=1e-9)


def square(X, weights, y=None):
    with numpyro.plate("columns", 3, dim=-1), numpyro.plate("rows", 3, dim=-2):
        loc = numpyro.sample("loc", dist.Normal(0.0, 1.0).expand([1]).to_event(1))[..., 0]
        numpyro.sample("y", dist.Normal(loc + X.sum(-1)[:, None], 1.0), obs=y)


@pytest.mark.slow
def test_arguments_equal_to_the_observations_are_constants(key):
    """Of two equal arrays the one of the observed site is left out."""

    def model(X, before, y=None):
        f = dgp.gp("f", dgp.kernels.RBF(), dgp.Points(jnp.linspace(0, 1, 3)[:, None]))
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dgp.Likelihood(f(X), lambda v: dist.Normal(v + before, 0.3)), obs=y)

    guide, x, y = dgp.guides.InducingPoint(model), jnp.linspace(0, 1, 5)[:, None], jnp.arange(5.0)
    params = random_params(model, guide, x, y, y)
    tree = dgp.diagnostics.to_arviz(dgp.Posterior(model, guide, params), key, x, y, y, num_samples=30, local_samples=2)
    assert set(tree.constant_data) == {"X", "before"}
    assert tree.constant_data["before"].dims == ("data",)


@pytest.mark.slow
def test_constants_are_not_named_by_one_of_two_plates_of_a_size(key):
    """Three inputs are rows, and in a plate of three rows and one of three columns they were named columns."""
    args = jnp.arange(6.0).reshape(3, 2), jnp.arange(3.0), jnp.arange(9.0).reshape(3, 3)
    guide = dgp.guides.InducingPoint(square)
    params = random_params(square, guide, *args)
    found = dgp.diagnostics.to_arviz(dgp.Posterior(square, guide, params), key, *args, num_samples=4)
    assert found.observed_data["y"].dims == ("rows", "columns")
    assert found.constant_data["X"].dims == ("X_dim_0", "X_dim_1")
    assert found.constant_data["weights"].dims == ("weights_dim_0",)


def gplvm(X, y=None):
    g = dgp.gp("g", dgp.kernels.RBF(1.2, 0.7), dgp.Points(jnp.hstack([Z, Z**2])), outputs=2)
    with numpyro.plate("data", 30):
        w = dgp.latent("w", None, 2)
        numpyro.sample("y", dgp.Likelihood(g(w), lambda v: dist.Normal(v, NOISE).to_event(1)), obs=y)


def ring(X, y=None):
    g = dgp.gp("g", dgp.kernels.RBF(1.2, 0.7), dgp.Grid(-4, 4, 16))
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dgp.Likelihood(g(X), lambda v: dist.Poisson(jnp.exp(v))), obs=y)


def exact(X, y=None):
    v = numpyro.sample("v", dgp.gp("f", dgp.kernels.RBF(1.2, 0.7), None)(X))
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dist.Normal(v, NOISE), obs=y)


def regression(X, y=None):
    scale = numpyro.sample("scale", dist.LogNormal(0.0, 1.0))
    numpyro.sample("y", dgp.gp("f", dgp.kernels.RBF(1.2, scale), None)(X, noise=NOISE), obs=y)


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "make", "args", "dims"),
    [
        (gplvm, partial(dgp.guides.InducingPoint, latent=dgp.guides.Quadrature(8)), (None, jnp.stack([Y, -Y], -1)),
         {"w": ("data", "w_output")}),
        (ring, dgp.guides.InducingPoint, (X, jnp.round(3 * Y**2)), {"g": ("g_inducing",)}),
        (exact, dgp.guides.InducingPoint, (X, Y), {"v": ("v_row",)}),
        (regression, dgp.guides.InducingPoint, (X, Y), {"scale": ()}),
        (noisy, dgp.guides.Collapsed, (X, Y), {"h": ("data", "h_output"), "f": ("f_output", "f_inducing")}),
        (noisy, partial(dgp.guides.InducingPoint, sites={"h": dgp.guides.GivenInducing()}), (X, Y), {}),
    ],
)  # fmt: skip
def test_every_kind_of_program(model, make, args, dims, key):
    guide = make(model)
    svi = SVI(model, guide, optax.sgd(0.0), dgp.ELBO())
    fit = dgp.Posterior(model, guide, svi.get_params(svi.init(key, *args)))
    found = dgp.diagnostics.to_arviz(fit, key, *args, num_samples=20, local_samples=3)
    for group in found.children.values():
        assert all(np.isfinite(values).all() for values in group.data_vars.values())
    assert {name: found.posterior[name].dims[2:] for name in dims} == dims
    if model is regression:
        with pytest.raises(ValueError, match=r"expected data in a plate, got dimensions \('chain', 'draw'\)"):
            dgp.diagnostics.loo(found)
    else:
        assert found.log_likelihood_uncorrected["y"].dims == ("chain", "draw", "data")


def overlapping(X, a=None, b=None):
    with numpyro.plate("data", len(X)):
        numpyro.sample("a", dist.Normal(0, 1), obs=a)
        with numpyro.plate("replicates", 1):
            numpyro.sample("b", dist.Normal(0, 1), obs=b)


def test_bad_input(key):
    with pytest.raises(ValueError, match=r"expected num_samples to be a positive integer, got 0"):
        dgp.diagnostics.to_arviz(FIT, key, X, Y, num_samples=0)
    with pytest.raises(ValueError, match=r"expected a program that observes data, got none"):
        dgp.diagnostics.to_arviz(FIT, key, X)
    with pytest.raises(ValueError, match=r"expected a program over all data, got plate 'data'"):
        dgp.diagnostics.to_arviz(FIT, key, X, Y, 10)
    with pytest.raises(ValueError, match=r"expected dgp.Posterior\(.*\) or an MCMC object that has run, got list"):
        dgp.diagnostics.to_arviz([FIT], key, X, Y)
    with pytest.raises(ValueError, match=r"an MCMC object that has run, got one that has not: call mcmc.run first"):
        dgp.diagnostics.to_arviz(MCMC(NUTS(shallow), num_warmup=1, num_samples=1), key, X, Y)
    with pytest.raises(
        ValueError, match=r"expected observed sites in the same plates or in plates of their own, got \['a', 'b'\]"
    ):
        dgp.diagnostics.to_arviz(dgp.Posterior(overlapping, dgp.guides.InducingPoint(overlapping)), key, X, Y, Y[None])
    with pytest.raises(ValueError, match=r"expected finite data, got 1 NaN"):
        dgp.diagnostics.to_arviz(FIT, key, X, Y.at[0].set(jnp.nan))


needs_plots = pytest.mark.skipif(
    importlib.util.find_spec("arviz_plots") is None,
    reason="arviz-plots comes with arviz on Python 3.12 and with the extras on 3.11",
)


not_by_old_plots = pytest.mark.skipif(
    sys.version_info < (3, 12), reason="arviz-plots 0.8, the last one for Python 3.11, does not draw it with new xarray"
)


@needs_plots
@pytest.mark.filterwarnings("ignore:The inplace keyword")  # of pandas, in arviz-stats
@pytest.mark.parametrize(
    "plot",
    [
        pytest.param("plot_trace_dist", marks=not_by_old_plots),
        *["plot_forest", "plot_khat", "plot_loo_pit", "plot_ppc_dist", "plot_compare"],
    ],
)
def test_plots_of_arviz(tree, plot):
    import arviz_plots
    import matplotlib

    matplotlib.use("Agg")
    found, _ = tree
    score = dgp.diagnostics.loo(found)
    options = {"var_names": ["g"]} if plot in ("plot_trace_dist", "plot_forest") else {}
    what = found
    if plot == "plot_khat":
        what = score
    if plot == "plot_loo_pit":  # as of chains
        what = found.copy()
        what["log_likelihood"] = found["log_likelihood_uncorrected"]
    if plot == "plot_compare":
        import arviz_stats

        what = arviz_stats.compare({"one": score, "other": score})
    drawn = getattr(arviz_plots, plot)(what, backend="matplotlib", **options)
    assert drawn is not None
    matplotlib.pyplot.close("all")


@pytest.mark.slow
@pytest.mark.parametrize("deep", [False, True])
def test_two_families_at_the_same_rows(deep):
    """Each has a variable, its density given the other of the row; densities by quadrature over the hidden value."""
    x, counts = jnp.array([[0.0], [0.4], [1.0]]), jnp.array([0, 2, 1])
    y = jnp.array([0.3, -0.2, 0.5])
    scale = 0.5

    def model(x, counts=None, y=None):
        f = dgp.gp("f", dgp.kernels.RBF(), dgp.Points(x))
        with numpyro.plate("data", len(x)):
            h = numpyro.sample("h", dist.Normal(x[:, 0], 0.3)) if deep else None
            v = f(x)
            numpyro.sample("counts", dist.Poisson(jnp.exp(h if deep else v.loc)), obs=counts)
            numpyro.sample("y", dist.Normal(h if deep else v.loc, scale), obs=y)

    draws = {"f": jax.random.normal(jax.random.key(1), (30, 3))}
    posterior = dgp.Posterior(model, samples=draws, site="y")
    tree = dgp.diagnostics.to_arviz(posterior, jax.random.key(0), x, counts, y, local_samples=4000 if deep else 1)
    found = tree["log_likelihood"]
    assert set(found.data_vars) == {"counts", "y"}
    assert dict(found.sizes) == {"chain": 1, "draw": 30, "data": 3}
    if deep:
        nodes, weights = np.polynomial.hermite_e.hermegauss(40)
        h = x[:, 0] + 0.3 * nodes[:, None]
        of_counts, of_y = dist.Poisson(jnp.exp(h)).log_prob(counts), dist.Normal(h, scale).log_prob(y)

        def integral(terms):
            return np.log((np.exp(terms) * weights[:, None]).sum(0) / weights.sum())

        both = integral(of_counts + of_y)
        expected, tolerance = {"counts": both - integral(of_y), "y": both - integral(of_counts)}, 0.05
    else:
        L = jnp.linalg.cholesky(dgp.kernels.RBF().gram(x) + 1e-6 * jnp.eye(3))
        v = draws["f"] @ L.T
        expected = {"counts": dist.Poisson(jnp.exp(v)).log_prob(counts), "y": dist.Normal(v, scale).log_prob(y)}
        tolerance = 1e-3
    for name, terms in expected.items():
        np.testing.assert_allclose(found[name].to_numpy()[0], np.broadcast_to(terms, (30, 3)), atol=tolerance)
    assert np.isfinite(dgp.diagnostics.loo(tree, site="counts").elpd)


def slope(X, y=None):
    b = numpyro.sample("b", dist.Normal())
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dist.Normal(b * X[:, 0], 0.5), obs=y)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("arviz_plots") is None, reason="needs arviz-plots")
@pytest.mark.filterwarnings("default")
def test_a_trace_plot():
    """With the extras on every Python: arviz-plots 0.8 does not import beside matplotlib 3.11."""
    import arviz_plots

    tree = dgp.diagnostics.to_arviz(dgp.Posterior(slope, samples={"b": np.zeros(30)}), jax.random.key(0), X, Y)
    assert {"b"} <= set(arviz_plots.plot_trace(tree, var_names=["b"], backend="matplotlib").viz["trace"].data_vars)


@pytest.mark.slow
def test_an_old_arviz_is_named(monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.23.4")
    posterior = dgp.Posterior(slope, samples={"b": np.zeros(30)})
    with pytest.warns(UserWarning, match=r'got arviz 0.23.4, .* pip install arviz-plots "matplotlib<3.11"'):
        dgp.diagnostics.to_arviz(posterior, jax.random.key(0), X, Y)
