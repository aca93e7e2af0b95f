"""Guides are proper NumPyro guides: sites, parameters, plates, overrides, autoguides, quantiles, bad input."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro import handlers
from numpyro.infer import SVI, Trace_ELBO, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoDelta, AutoMultivariateNormal, AutoNormal
from programs import X, Y, Z, bayesian, deep, explicit, random_params, shallow
from sizes import mostly_long

import numpyro_dgp as dgp
from numpyro_dgp import guides as G


def params_of(model, guide, *args, loss=None, **kwargs):
    svi = SVI(model, guide, optax.adam(0.01), loss or dgp.ELBO())
    return svi.get_params(svi.init(jax.random.key(0), *args, **kwargs))


def shapes(params):
    return {name: jnp.shape(value) for name, value in params.items()}


@pytest.mark.long
def test_parameters_of_the_presets():
    assert shapes(params_of(deep, G.InducingPoint(deep), X, Y)) == {
        "f_auto_loc": (1, 8), "f_auto_scale_tril": (1, 8, 8), "g_auto_loc": (8,), "g_auto_scale_tril": (8, 8),
    }  # fmt: skip
    assert shapes(params_of(deep, G.MeanField(deep), X, Y, 7)) == {
        "f_auto_loc": (1, 8), "f_auto_scale": (1, 8), "g_auto_loc": (8,), "g_auto_scale": (8,),
        "h_auto_loc": (30, 1), "h_auto_scale": (30, 1),
    }  # fmt: skip
    assert shapes(params_of(bayesian, G.InducingPoint(bayesian, other=G.Normal(), prefix="q"), X, Y, 7)) == {
        "f_q_loc": (1, 8), "f_q_scale_tril": (1, 8, 8), "g_q_loc": (8,), "g_q_scale_tril": (8, 8), "g_Z": (8, 1),
        "noise_q_loc": (), "noise_q_scale": (), "scales_q_loc": (2,), "scales_q_scale": (2,),
        "w_q_loc": (30, 1), "w_q_scale": (30, 1),
    }  # fmt: skip


@pytest.mark.long
def test_where_parameters_start():
    """Inner layers nearly deterministic, the last at the prior, hidden means where the untrained model is."""
    params = params_of(deep, G.InducingPoint(deep), X, Y)
    np.testing.assert_allclose(params["f_auto_scale_tril"][0], 1e-2 * np.eye(8))
    np.testing.assert_allclose(params["g_auto_scale_tril"], np.eye(8))
    assert not params["f_auto_loc"].any()
    for batch in (None, 7):
        np.testing.assert_allclose(params_of(deep, G.MeanField(deep), X, Y, batch)["h_auto_loc"], X, atol=1e-9)
    params = params_of(explicit, G.InducingPoint(explicit), X, Y)
    np.testing.assert_allclose(params["f_auto_scale_tril"][0], 1e-2 * np.eye(8))
    np.testing.assert_allclose(params["g_auto_scale_tril"], np.eye(8))
    params = params_of(deep, G.InducingPoint(deep, sites={"f": G.Full(scale=0.5)}), X, Y)
    np.testing.assert_allclose(params["f_auto_scale_tril"][0], 0.5 * np.eye(8))
    median = np.exp(-1.0)
    np.testing.assert_allclose(params_of(bayesian, G.InducingPoint(bayesian), X, Y)["noise_auto_loc"], median, rtol=0.1)
    strategy = numpyro.infer.init_to_value(values={"noise": 0.123, "scales": jnp.ones(2)})
    params = params_of(bayesian, G.InducingPoint(bayesian, init_loc_fn=strategy), X, Y)
    np.testing.assert_allclose(params["noise_auto_loc"], 0.123)


@pytest.mark.smoke
def test_guide_returns_every_latent_and_hides_the_rest():
    guide = G.InducingPoint(bayesian)
    with handlers.seed(rng_seed=0), handlers.trace() as sites:
        drawn = guide(X, Y, 7)
    assert sorted(drawn) == ["f", "g", "h", "noise", "scales", "w"]
    assert "y" not in sites
    assert {n for n, s in sites.items() if s["type"] == "sample"} == set(drawn)
    assert drawn["w"].shape == (7, 1)
    for y in (Y, None):
        with handlers.seed(rng_seed=0), handlers.trace() as sites:
            assert "y" not in G.InducingPoint(explicit)(X, y)
        assert "y" not in sites


@pytest.mark.slow
def test_what_data_would_stand_for_is_left_to_the_program():
    """Without plates too, and whatever the guide was called on before."""

    def model(X, y=None):
        f = dgp.gp("f", dgp.kernels.RBF(), dgp.Points(Z))
        v = numpyro.sample("v", f.joint(X))
        numpyro.sample("y", dist.Normal(v, 0.1).to_event(1), obs=y)

    guide = G.InducingPoint(model)
    with handlers.seed(rng_seed=0):
        assert sorted(guide(X[:4])) == ["f", "v"]
        assert sorted(guide(X, Y)) == ["f", "v"]


@pytest.mark.slow
def test_hyperparameters_in_a_plate_of_their_own():
    """A plate over dimensions or groups is not a data plate: its sites keep their posterior at test inputs."""

    def model(X, y=None):
        with numpyro.plate("dimensions", 1):
            ls = numpyro.sample("ls", dist.LogNormal(0.0, 0.5))
        with numpyro.plate("groups", 3):
            offset = numpyro.sample("offset", dist.Normal(0.0, 1.0))
        f = dgp.gp("f", dgp.kernels.RBF(lengthscale=ls), dgp.Points(Z))
        group = jnp.arange(len(X)) % 3
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dgp.Likelihood(f(X), lambda v: dist.Normal(v + offset[group], 0.1)), obs=y)

    guide = G.InducingPoint(model)
    params = params_of(model, guide, X, Y) | {"offset_auto_loc": jnp.array([5.0, 6.0, 7.0])}
    with handlers.seed(rng_seed=0), handlers.substitute(data=params):
        drawn = guide(X[:4])
    np.testing.assert_allclose(drawn["offset"], [5.0, 6.0, 7.0], atol=1.0)
    assert sorted(drawn) == ["f", "ls", "offset"]


@pytest.mark.parametrize("autoguide", mostly_long([AutoNormal], [AutoMultivariateNormal, AutoNormal, AutoDelta]))
@pytest.mark.parametrize(
    "loss",
    [dgp.ELBO(), *(pytest.param(loss, marks=pytest.mark.long) for loss in (Trace_ELBO(), TraceMeanField_ELBO()))],
)
@pytest.mark.long
def test_stock_autoguides_run_on_the_same_program(autoguide, loss):
    for model in (deep, bayesian):
        svi = SVI(model, autoguide(model), optax.adam(0.01), loss)
        result = svi.run(jax.random.key(0), 10, X, Y, progress_bar=False)
        assert np.isfinite(result.losses).all()


@pytest.mark.long
@pytest.mark.parametrize(
    "other",
    mostly_long([AutoMultivariateNormal], [G.Normal(), AutoMultivariateNormal, G.Delta(), AutoNormal]),
)
def test_posteriors_for_hyperparameters(other):
    guide = G.InducingPoint(bayesian, other=other)
    svi = SVI(bayesian, guide, optax.adam(0.02), dgp.ELBO())
    result = svi.run(jax.random.key(0), 60, X, Y, 10, progress_bar=False)
    assert np.isfinite(result.losses).all()
    assert result.losses[-10:].mean() < result.losses[:10].mean()
    draws = guide.sample_posterior(jax.random.key(1), result.params, X, Y, sample_shape=(3, 2))
    assert draws["scales"].shape == (3, 2, 2)
    assert draws["f"].shape == (3, 2, 1, 8)
    assert (draws["noise"] > 0).all()
    median = guide.median(result.params, X, Y)
    assert median["scales"].shape == (2,)
    assert median["w"].shape == (30, 1)


@pytest.mark.long
def test_sites_override_single_rules():
    rules = {"noise": G.Normal(0.2), "w": G.Prior(), "f": G.Diagonal(), "h": G.Normal(0.3)}
    params = params_of(bayesian, G.InducingPoint(bayesian, sites=rules), X, Y)
    assert {"noise_auto_scale", "f_auto_scale", "h_auto_loc", "scales_auto_loc"} <= set(params)
    assert not [name for name in params if name.startswith("w_")]
    mixed = G.InducingPoint(bayesian, other=AutoMultivariateNormal, sites={"noise": G.Normal()})
    assert {"noise_auto_loc", "auto_loc"} <= set(params_of(bayesian, mixed, X, Y))


@pytest.mark.slow
def test_quantiles_are_of_probabilities():
    guide = G.InducingPoint(shallow, inducing=G.Diagonal())
    params = {"g_auto_loc": jnp.zeros(8), "g_auto_scale": jnp.ones(8)}
    assert guide.quantiles(params, 0.5, X, Y)["g"].shape == (1, 8)
    for levels in (1.5, [0.5, -0.1], [np.nan]):
        with pytest.raises(ValueError, match=r"InducingPoint\.quantiles"):
            guide.quantiles(params, levels, X, Y)


@pytest.mark.slow
@pytest.mark.parametrize("inducing", [G.Diagonal(), G.MixtureOfGaussians(1, G.Diagonal())], ids=["one", "mixture"])
def test_divergences_under_a_mask_count_nothing(inducing):
    def masked(counts, X, y):
        with handlers.mask(mask=counts):
            f = dgp.gp("f", dgp.kernels.RBF(), dgp.Points(Z))
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dgp.Likelihood(f(X), lambda v: dist.Normal(v, 0.3)), obs=y)

    stem = "f_auto_0" if isinstance(inducing, G.MixtureOfGaussians) else "f_auto"
    params = {f"{stem}_loc": jnp.ones(8), f"{stem}_scale": 0.5 * jnp.ones(8)}
    of_all, of_none = (
        dgp.ELBO().loss(jax.random.key(0), params, model, G.InducingPoint(model, inducing=inducing), X, Y)
        for model in (partial(masked, True), partial(masked, False))
    )
    np.testing.assert_allclose(of_all - of_none, 8 * 0.5 * (1 + 0.25 - 1 - np.log(0.25)), rtol=1e-6)


@pytest.mark.long
def test_quantiles_are_those_of_the_posterior():
    guide = G.MeanField(bayesian, other=G.Normal())
    params = random_params(bayesian, guide, X, Y)
    quantiles = guide.quantiles(params, [0.1, 0.5, 0.9], X, Y)
    assert sorted(quantiles) == ["f", "g", "h", "noise", "scales", "w"]
    draws = guide.sample_posterior(jax.random.key(0), params, X, Y, sample_shape=(20_000,))
    for name, values in quantiles.items():
        assert values.shape == (3, *draws[name].shape[1:])
        below = (draws[name][None] < values[:, None]).mean(1)
        np.testing.assert_allclose(
            below,
            np.broadcast_to(np.array([0.1, 0.5, 0.9]).reshape(-1, *[1] * (below.ndim - 1)), below.shape),
            atol=0.02,
        )
    np.testing.assert_allclose(guide.median(params, X, Y)["noise"], jnp.exp(params["noise_auto_loc"]))
    full = G.InducingPoint(bayesian)
    params = random_params(bayesian, full, X, Y)
    assert sorted(full.median(params, X, Y)) == ["f", "g", "noise", "scales", "w"]
    with pytest.raises(
        ValueError, match=r"median: expected the arguments of the model.*write guide.median\(params, X, y"
    ):
        G.InducingPoint(bayesian).median(params)
    with pytest.raises(ValueError, match=r"quantiles: expected the arguments of the model"):
        G.InducingPoint(bayesian).quantiles(params, [0.5], X, Y, unknown=1)


def test_scopes_outside_and_inside_the_program():
    """Two copies of one layer, and a scope around everything: names stay apart and parameters get one prefix."""

    def layer(x, y=None):
        f = dgp.gp("f", dgp.kernels.RBF(), dgp.Points(Z, learn=True))
        return f(x)

    def model(X, y=None):
        with handlers.scope(prefix="a"):
            first = layer(X)
        with handlers.scope(prefix="b", hide_types=["plate"]):
            second = layer(X)
            with numpyro.plate("data", len(X)):
                h = numpyro.sample("h", first)
                mean = dgp.Likelihood(second, lambda v: dist.Normal(v + h, 0.1))
                numpyro.sample("y", mean, obs=y)

    guide = G.InducingPoint(model)
    params = params_of(model, guide, X, Y)
    assert set(params) == {
        "a/f_Z",
        "b/f_Z",
        "a/f_auto_loc",
        "a/f_auto_scale_tril",
        "b/f_auto_loc",
        "b/f_auto_scale_tril",
    }
    np.testing.assert_allclose(params["a/f_auto_scale_tril"], 1e-2 * np.eye(8))
    np.testing.assert_allclose(params["b/f_auto_scale_tril"], np.eye(8))
    outer = handlers.scope(deep, prefix="model")
    assert sorted(params_of(outer, G.InducingPoint(outer), X, Y))[0] == "model/f_auto_loc"


@pytest.mark.slow
def test_lift_turns_parameters_into_latents():
    lifted = handlers.lift(bayesian, prior={"g_Z": dist.Normal(Z, 0.1).to_event(2)})
    params = params_of(lifted, G.InducingPoint(lifted), X, Y)
    assert "g_Z_auto_loc" in params
    assert "g_Z" not in params


@pytest.mark.long
def test_masked_data_do_not_count():
    keep = jnp.arange(30) < 20

    def model(X, y=None, mask=None):
        f = dgp.gp("f", dgp.kernels.RBF(), dgp.Points(Z), outputs=1, mean=dgp.means.IdentityMean())
        g = dgp.gp("g", dgp.kernels.RBF(), dgp.Points(Z))
        with numpyro.plate("data", len(X)), handlers.mask(mask=True if mask is None else mask):
            h = numpyro.sample("h", f(X))
            numpyro.sample("y", dgp.Likelihood(g(h), lambda v: dist.Normal(v, 0.3)), obs=y)

    for make in (G.InducingPoint, G.MeanField):
        guide = make(model, sites={"f": G.Full(0.2)})
        params = random_params(model, guide, X, Y, scale=0.0)
        masked = dgp.ELBO(300).loss(jax.random.key(0), params, model, guide, X, Y, keep)
        cut = {k: v[:20] if k.startswith("h_") else v for k, v in params.items()}
        direct = dgp.ELBO(300).loss(jax.random.key(0), cut, model, guide, X[:20], Y[:20])
        np.testing.assert_allclose(masked, direct, rtol=0.02)


@pytest.mark.slow
def test_kl_annealing_by_scale():
    """``handlers.scale`` on a layer scales its divergence, as it does for any NumPyro site."""
    from functools import partial

    def annealed(X, y=None, beta=1.0):
        with handlers.scale(scale=beta):
            g = dgp.gp("g", dgp.kernels.RBF(1.2, 0.7), dgp.Points(Z))
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dgp.Likelihood(g(X), lambda v: dist.Normal(v, 0.3)), obs=y)

    guide = G.InducingPoint(annealed)
    params = random_params(annealed, guide, X, Y)
    loss = partial(dgp.ELBO().loss, jax.random.key(0), params)
    values = [
        loss(partial(annealed, beta=b), G.InducingPoint(partial(annealed, beta=b)), X, Y) for b in (1.0, 0.5, 0.25)
    ]
    np.testing.assert_allclose(values[0] - values[1], 2 * (values[1] - values[2]), rtol=1e-9)


@pytest.mark.slow
def test_subsampled_per_datum_parameters_follow_the_batch():
    guide = G.MeanField(deep)
    params = random_params(deep, guide, X, Y)
    rows = jnp.array([3, 20, 7])
    with handlers.seed(rng_seed=0), handlers.substitute(data={**params, "data": rows}), handlers.trace() as sites:
        guide(X, Y, 3)
    np.testing.assert_array_equal(sites["h"]["fn"].loc, params["h_auto_loc"][rows])


@pytest.mark.long
def test_exact_layers():
    """inducing=None: values drawn at all inputs at once, full Gaussian or mean field, in any program."""

    def model(X, y=None):
        f = dgp.gp("f", dgp.kernels.RBF(), None, outputs=2, mean=dgp.means.ConstantMean([1.0, -1.0]))
        v = numpyro.sample("v", f(X))
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dist.Normal(v[:, 0] * v[:, 1], 0.3), obs=y)

    for make, names in ((G.InducingPoint, ["loc", "scale_tril"]), (G.MeanField, ["loc", "scale"])):
        guide = make(model)
        svi = SVI(model, guide, optax.adam(0.02), dgp.ELBO())
        result = svi.run(jax.random.key(0), 300, X, Y, progress_bar=False)
        assert sorted(result.params) == [f"v_auto_{n}" for n in names]
        assert result.losses[-50:].mean() < result.losses[:50].mean()
        assert guide.sample_posterior(jax.random.key(0), result.params, X, Y)["v"].shape == (30, 2)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: G.InducingPoint(deep, sites={"q": G.Delta()}),
            r"expected names of latent sites of the model, got \['q'\]",
        ),
        (
            lambda: G.InducingPoint(deep, sites={"y": G.Delta()}),
            r"expected names of latent sites of the model, got \['y'\]",
        ),
        (lambda: G.InducingPoint(deep, sites={"f": G.Delta}), "expected a rule for 'f', got type"),
        (lambda: G.InducingPoint(deep, sites={"h": G.Full()}), "expected site 'h' to be inducing values"),
        (lambda: G.InducingPoint(deep, sites={"h": G.Diagonal()}), "expected site 'h' to be inducing"),
        (
            lambda: G.InducingPoint(deep, sites={"g": G.OpperArchambeau()}),
            "expected site 'g' to be the values of an exact",
        ),
        (
            lambda: G.InducingPoint(deep, latent=G.GivenInducing()),
            "expected latent to be a rule for latent values, got GivenInducing, a rule for hidden ones: "
            r"InducingPoint.model, sites={'h': GivenInducing",
        ),
        (lambda: G.Collapsed(deep, latent=G.GivenInducing()), "for latent values, got GivenInducing, a rule"),
        (lambda: G.MeanField(deep, inducing=G.GivenBelow()), "expected inducing to be a rule for inducing values"),
        (lambda: G.Full(scale=0.0), "Full: expected scale to be positive"),
        (lambda: G.Normal(scale=-1.0), "Normal: expected scale to be positive"),
        (lambda: dgp.ELBO(0), "expected num_particles to be a positive integer, got 0"),
    ],
)
def test_bad_input(build, message):
    with pytest.raises(ValueError, match=message):
        params_of(deep, build(), X, Y)


@pytest.mark.parametrize(
    ("rule", "site", "suggested"),
    [
        (G.GivenInducing(), "f", "Full"),
        (G.SparseFactor(), "g", "Full"),
        (G.Circulant(), "f", "Full"),
        (G.LowRank(2), "h", "Propagate"),
        (G.OpperArchambeau(), "h", "Propagate"),
        (G.Flow(), "w", "Normal"),
        (G.GivenBelow(), "noise", "Normal"),
    ],
)
def test_a_rule_that_does_not_fit_names_one_that_does(rule, site, suggested):
    init = lambda rule: params_of(bayesian, G.InducingPoint(bayesian, sites={site: rule}), X, Y)  # noqa: E731
    with pytest.raises(ValueError, match=rf"choose another rule for it in sites=.'{site}': dgp.guides.{suggested}\(\)"):
        init(rule)
    assert all(np.isfinite(value).all() for value in init(getattr(G, suggested)()).values())


def test_discrete_sites_are_refused():
    def model(X, y=None):
        k = numpyro.sample("k", dist.Bernoulli(0.5))
        g = dgp.gp("g", dgp.kernels.RBF(), dgp.Points(Z))
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dgp.Likelihood(g(X), lambda v: dist.Normal(v + k, 0.3)), obs=y)

    with pytest.raises(ValueError, match="expected a continuous site, got 'k'"):
        params_of(model, G.InducingPoint(model), X, Y)


@pytest.mark.smoke
def test_bad_data_is_reported_before_any_step():
    guide = G.InducingPoint(shallow)
    params = random_params(shallow, guide, X, Y)
    loss = lambda *args: dgp.ELBO().loss(jax.random.key(0), params, shallow, guide, *args)  # noqa: E731
    with pytest.raises(ValueError, match=r"expected finite data in the model's \['args'\]\[1\], got 1 NaN"):
        loss(X, Y.at[3].set(jnp.nan))
    with pytest.raises(ValueError, match=r"\['args'\]\[0\], got 1 NaN or infinite"):
        loss(X.at[3].set(jnp.inf), Y)
    with pytest.raises(ValueError, match=r"expected observations y of shape \(30,\), got \(30, 1\)"):
        loss(X, Y[:, None])
