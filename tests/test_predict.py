"""Predictions: exact mixture moments, densities, consistent function draws."""

import gc
import time
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import Predictive
from programs import NOISE, X, Y, Z, bayesian, deep, explicit, random_params, shallow
from sizes import mostly_long

import numpyro_dgp as dgp
from numpyro_dgp.functions.weights import FunctionDraw
from numpyro_dgp.guides.run import marginal

GUIDE = dgp.guides.InducingPoint(deep)
PARAMS = random_params(deep, GUIDE, X, Y)
POSTERIOR = dgp.Posterior(deep, GUIDE, PARAMS)
NEW = jnp.linspace(-2.5, 2.5, 9)[:, None]


@pytest.mark.long
def test_mixture_moments_exactly(key):
    """Mean of means; mean of variances plus variance of means; log of the mean density."""
    mixture = POSTERIOR.using(num_samples=7).predict(key, NEW)
    assert mixture.means.shape == mixture.variances.shape == (7, 9)
    m, v = np.asarray(mixture.means), np.asarray(mixture.variances)
    np.testing.assert_allclose(mixture.mean, m.mean(0), rtol=1e-12)
    np.testing.assert_allclose(mixture.variance, v.mean(0) + (m**2).mean(0) - m.mean(0) ** 2, rtol=1e-9)
    y = jnp.sin(NEW[:, 0])
    densities = np.exp(dist.Normal(m, np.sqrt(v)).log_prob(y))
    np.testing.assert_allclose(
        POSTERIOR.using(num_samples=7).log_density(key, y, NEW), np.log(densities.mean(0)), rtol=1e-9
    )


@pytest.mark.smoke
def test_prediction_of_a_shallow_model_is_analytic(key):
    guide = dgp.guides.InducingPoint(shallow)
    params = {k: v for k, v in PARAMS.items() if k[0] == "g"}
    mixture = dgp.Posterior(shallow, guide, params).using(num_samples=3).predict(key, NEW)
    np.testing.assert_allclose(mixture.means[0], mixture.means[2], rtol=1e-12)
    assert (mixture.variance > NOISE**2).all()
    np.testing.assert_allclose(mixture.variance, mixture.variances[0], rtol=1e-9)


@pytest.mark.slow
def test_fits_and_rules_keep_arrays_of_their_own():
    loc, slopes = np.ones((30, 1)), np.ones((1, 1))
    sites = {"h": dgp.guides.Normal(loc=loc)}, {"h": dgp.guides.GivenBelow(slopes=slopes)}
    params = {"g_auto_loc": np.ones(8), "g_auto_scale_tril": np.eye(8)}
    fits = (
        dgp.Posterior(shallow, dgp.guides.InducingPoint(shallow), params),
        dgp.Posterior(shallow, samples={"g": (draws := np.ones((3, 8)))}),
    )
    means = [fit.using(num_samples=3).predict(jax.random.key(0), NEW).mean for fit in fits]
    for array in (loc, slopes, draws, *params.values()):
        array[...] = 0
    for rules, name in zip(sites, ("h_auto_loc", "h_auto_slopes"), strict=True):
        with numpyro.handlers.trace() as found, numpyro.handlers.seed(rng_seed=0):
            dgp.guides.InducingPoint(deep, sites=rules)(X, Y)
        assert (found[name]["value"] == 1).all()
    for fit, mean in zip(fits, means, strict=True):  # other rows compile another program
        np.testing.assert_allclose(fit.using(num_samples=3).predict(jax.random.key(0), NEW[:2]).mean, mean[:2])


@pytest.mark.long
def test_mixture_agrees_with_stock_predictive(key):
    draws = Predictive(deep, guide=GUIDE, params=PARAMS, num_samples=8000, parallel=True)(key, NEW)["y"]
    mixture = POSTERIOR.using(num_samples=4000).predict(key, NEW)
    error = jnp.sqrt(mixture.variance / 8000 + mixture.means.var(0) / 4000)
    assert (jnp.abs(draws.mean(0) - mixture.mean) < 4 * error).all()
    np.testing.assert_allclose(draws.var(0) / mixture.variance, 1, atol=0.12)


@pytest.mark.long
@pytest.mark.parametrize("size", mostly_long([1], [30, 7, 1]))
@pytest.mark.parametrize("model", mostly_long([bayesian], [deep, explicit, bayesian]))
@pytest.mark.parametrize("make", [dgp.guides.InducingPoint, dgp.guides.MeanField])
def test_stock_predictive_on_inputs_of_any_length(model, make, size, key):
    """Per-datum parameters of the training data, 30 rows, must not leak into predictions; least of all for one row."""
    guide = make(model)
    params = random_params(model, guide, X, Y)
    predictive = Predictive(model, guide=guide, params=params, num_samples=400)
    y = predictive(key, X[:size])["y"]
    assert y.shape == (400, size)
    moved = {k: v + 100.0 if k in ("h_auto_loc", "w_auto_loc", "v_auto_loc") else v for k, v in params.items()}
    again = Predictive(model, guide=guide, params=moved, num_samples=400)(key, X[:size])["y"]
    np.testing.assert_array_equal(y, again)
    mixture = dgp.Posterior(model, guide, params).using(num_samples=5).predict(key, X[:size])
    assert mixture.mean.shape == (size,)


@pytest.mark.long
def test_guide_without_observations_uses_no_parameters_of_single_data(key):
    guide = dgp.guides.MeanField(bayesian)
    params = random_params(bayesian, guide, X, Y)
    drawn = numpyro.handlers.substitute(numpyro.handlers.seed(guide, key), data=params)(NEW)
    assert sorted(drawn) == ["f", "g", "h", "noise", "scales"]
    assert drawn["h"].shape == (9, 1)
    trained = numpyro.handlers.substitute(numpyro.handlers.seed(guide, key), data=params)(X, Y)
    assert sorted(trained) == ["f", "g", "h", "noise", "scales", "w"]


@pytest.mark.long
def test_function_draws_are_consistent_across_inputs(key):
    draws = POSTERIOR.using(num_samples=6).functions(key)
    first = draws(NEW)
    assert sorted(first) == ["h", "y"]
    assert first["h"].shape == (6, 9, 1)
    assert first["y"].shape == (6, 9)
    np.testing.assert_array_equal(first["y"], draws(NEW)["y"])
    parts = draws(NEW[2:5])
    np.testing.assert_allclose(parts["y"], first["y"][:, 2:5], rtol=1e-8, atol=1e-9)
    assert not np.allclose(first["y"], POSTERIOR.using(num_samples=6).functions(jax.random.key(9))(NEW)["y"])


KERNELS = [
    dgp.kernels.RBF(1.2, 0.7),
    dgp.kernels.Matern32(1.2, 0.7) + dgp.kernels.Linear(0.3),
    dgp.kernels.RBF(1.2, 0.9) * dgp.kernels.Periodic(1.0, 0.8, 1.5),
    dgp.kernels.ArcCosine(0.5, order=1),
]


@pytest.mark.long
@pytest.mark.parametrize("kernel", [KERNELS[0], *(pytest.param(k, marks=pytest.mark.long) for k in KERNELS[1:])])
@pytest.mark.parametrize("outputs", [None, pytest.param(2, marks=pytest.mark.long)])
def test_function_draws_have_the_moments_of_q(kernel, outputs, key):
    """Mean and covariance of q(f) over many draws, each with random functions of its own."""
    from numpyro_dgp.functions.weights import FullBelief

    shape = (8,) if outputs is None else (outputs, 8)
    m = 0.7 * jax.random.normal(key, shape)
    L = jnp.tril(0.3 * jax.random.normal(key, (*shape, 8))) + 0.4 * jnp.eye(8)
    q, S = FullBelief(m, L), 20_000

    def layer(value):
        with numpyro.handlers.substitute(data={"f": value}), numpyro.handlers.seed(rng_seed=0):
            return dgp.gp("f", kernel, dgp.Points(Z), outputs=outputs, mean=dgp.means.ConstantMean(0.5))

    def draw(key):
        u_key, path_key = jax.random.split(key)
        return layer(FunctionDraw(q.sample(u_key), path_key, 64))(NEW).loc

    draws = jax.lax.map(draw, jax.random.split(key, S), batch_size=1000)
    exact = layer(q).joint(NEW)
    z = (draws.mean(0) - exact.mean) / (draws.std(0) / np.sqrt(S))
    assert jnp.abs(z).max() < 4.5
    flat, centre = (draws, exact.mean) if outputs is None else (draws[..., 1], exact.mean[..., 1])
    products = (flat - centre)[:, :, None] * (flat - centre)[:, None, :]
    z = (products.mean(0) - exact.covariance[-1]) / (products.std(0) / np.sqrt(S))
    assert jnp.abs(z).max() < 4.5


@pytest.mark.long
def test_function_draws_need_features(key):
    kernel = dgp.kernels.as_kernel(lambda A, B: jnp.exp(-jnp.abs(A - B.T)))

    def model(X, y=None):
        g = dgp.gp("g", kernel, dgp.Points(Z))
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dgp.Likelihood(g(X), lambda v: dist.Normal(v, 0.1)), obs=y)

    guide = dgp.guides.InducingPoint(model)
    posterior = dgp.Posterior(model, guide, random_params(model, guide, X, Y))
    assert posterior.predict(key, NEW).mean.shape == (9,)
    with pytest.raises(ValueError, match="has no features, which function draws need"):
        posterior.functions(key)(NEW)


@pytest.mark.long
def test_hidden_layer_draws(key):
    values = POSTERIOR.using(num_samples=4000).hidden(key, NEW)["h"]
    assert values.shape == (4000, 9, 1)
    with numpyro.handlers.seed(rng_seed=0), numpyro.handlers.substitute(data=PARAMS), numpyro.handlers.trace() as sites:
        marginal(GUIDE)(NEW)
    q = sites["h"]["fn"]
    assert (jnp.abs(values.mean(0) - q.mean) < 5 * jnp.sqrt(q.variance / 4000)).all()


@pytest.mark.long
def test_inducing_values_drawn_once_for_every_draw(key):
    """The distribution at each input is the same as with inducing values integrated out draw by draw."""
    samples = GUIDE.sample_posterior(jax.random.key(3), PARAMS, X[:1], sample_shape=(4000,))
    drawn = dgp.Posterior(deep, samples=samples, params=PARAMS).using(num_samples=4000).predict(key, NEW)
    integrated = POSTERIOR.using(num_samples=4000).predict(key, NEW)
    for moment in (lambda m: m.means, lambda m: m.variances + m.means**2):
        first, second = moment(drawn), moment(integrated)
        error = jnp.sqrt((first.var(0) + second.var(0)) / 4000)
        assert (jnp.abs(first.mean(0) - second.mean(0)) < 4.5 * error).all()
    assert (drawn.means.var(0) > integrated.means.var(0)).all()


@pytest.mark.long
def test_from_mcmc_draws(key):
    """Draws of the global sites; per-datum sites among them, with 30 rows, are ignored."""
    guide = dgp.guides.InducingPoint(bayesian, other=dgp.guides.Normal())
    params = random_params(bayesian, guide, X, Y)
    samples = guide.sample_posterior(key, params, X, Y, sample_shape=(50,))
    assert samples["w"].shape == (50, 30, 1)
    posterior = dgp.Posterior(bayesian, samples=samples, params={"g_Z": params["g_Z"]})
    mixture = posterior.using(num_samples=20).predict(key, NEW)
    assert mixture.means.shape == (20, 9)
    assert posterior.using(num_samples=5).functions(key)(NEW)["y"].shape == (5, 9)
    direct = dgp.Posterior(bayesian, guide, params).using(num_samples=3000).predict(key, NEW)
    many = posterior.using(num_samples=50).predict(key, NEW)
    error = jnp.sqrt(many.means.var(0) / 50)
    assert (jnp.abs(many.mean - direct.mean) < 5 * error).all()


@pytest.mark.long
def test_several_outputs_and_other_likelihoods(key):
    def model(X, y=None):
        f = dgp.gp("f", dgp.kernels.RBF(), dgp.Points(Z), outputs=3)
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dgp.Likelihood(f(X), lambda v: dist.Poisson(jnp.exp(v)).to_event(1)), obs=y)

    counts = jnp.ones((30, 3), int)
    guide = dgp.guides.InducingPoint(model)
    posterior = dgp.Posterior(model, guide, random_params(model, guide, X, counts))
    assert posterior.predict(key, NEW).mean.shape == (9, 3)
    assert posterior.log_density(key, counts[:9], NEW).shape == (9,)
    y = Predictive(model, guide=guide, params=posterior.params, num_samples=3000)(key, NEW)["y"]
    np.testing.assert_allclose(y.mean(0), posterior.predict(key, NEW).mean, rtol=0.3)


@pytest.mark.long
def test_five_thousand_draws_in_under_a_second_once_compiled(key):
    rows = jnp.linspace(-2, 2, 200)[:, None]
    POSTERIOR.using(num_samples=5000).predict(key, rows).mean.block_until_ready()
    start = time.perf_counter()
    POSTERIOR.using(num_samples=5000).predict(jax.random.key(1), rows).mean.block_until_ready()
    assert time.perf_counter() - start < 3.0  # about 0.3 s; wide because test machines are shared


def two_ends(X, y=None):
    g = dgp.gp("g", dgp.kernels.RBF(), dgp.Points(Z))
    with numpyro.plate("data", len(X)):
        for name in ("y", "z"):
            numpyro.sample(name, dgp.Likelihood(g(X), lambda v: dist.Normal(v, 0.1)), obs=y)


@pytest.mark.slow
def test_the_observed_site_is_what_nothing_depends_on(key):
    """Of a program that draws its last function and then y."""
    draws = {"f": jnp.zeros((2, 1, 8)), "g": jnp.zeros((2, 8))}
    found = dgp.Posterior(explicit, samples=draws).using(num_samples=2).predict(key, NEW)
    np.testing.assert_array_equal(found.variances, jnp.full((2, 9), 0.3**2))


@pytest.mark.long
def test_a_posterior_goes_with_its_last_reference():
    """Compiled predictions keep neither it nor its parameters alive: folds of a cross-validation do not add up."""
    params = {name: value + 0 for name, value in POSTERIOR.params.items()}
    posterior = dgp.Posterior(POSTERIOR.model, dgp.guides.InducingPoint(POSTERIOR.model), params)
    posterior.using(num_samples=2).predict(jax.random.key(0), NEW)
    posterior.using(num_samples=2).functions(jax.random.key(0))(NEW)
    left = [weakref.ref(posterior), *map(weakref.ref, params.values())]
    del posterior, params
    gc.collect()
    assert [ref() for ref in left] == [None] * len(left)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda key: dgp.Posterior(deep), "expected a guide with params, or samples, got (both|neither)"),
        (lambda key: POSTERIOR.predict(key, NEW.at[0].set(jnp.nan)), "expected finite inputs, got 1 NaN"),
        (
            lambda key: POSTERIOR.using(num_samples=0).predict(key, NEW),
            "expected num_samples to be a positive integer, got 0",
        ),
        (
            lambda key: POSTERIOR.predict(key, NEW, None, 3),
            r"Posterior\.\w+: expected a program over all data, got plate 'data'",
        ),
        (lambda key: POSTERIOR.log_density(key, jnp.zeros((9, 1)), NEW), r"expected observations y of shape \(9,\)"),
        (lambda key: POSTERIOR.log_density(key, jnp.full(9, jnp.inf), NEW), "expected finite observations y"),
        (
            lambda key: (
                dgp.Posterior(two_ends, samples={"g": jnp.zeros((2, 8))}).using(num_samples=2).predict(key, NEW)
            ),
            r"expected one observed site, got \['y', 'z'\]: name it",
        ),
        (
            lambda key: (
                dgp.Posterior(deep, samples={"f": jnp.zeros((2, 1, 8)), "g": jnp.zeros((2, 8))})
                .using(num_samples=100)
                .predict(key, NEW)
            ),
            "expected num_samples of at most 2, the number of MCMC draws, got 100",
        ),
    ],
)
def test_bad_input(call, message, key):
    with pytest.raises(ValueError, match=message):
        call(key)


@pytest.mark.long
def test_what_is_the_same_in_all_draws_is_computed_once():
    """One layer whose posterior is integrated: one draw by default, and as many copies of it as are asked for."""

    guide = dgp.guides.InducingPoint(shallow)
    posterior = dgp.Posterior(shallow, guide, random_params(shallow, guide, X, Y))
    found, several = (posterior.using(num_samples=n).predict(jax.random.key(1), X) for n in (None, 3))
    assert found.means.shape == (1, *Y.shape)
    assert several.means.shape == (3, *Y.shape)
    np.testing.assert_array_equal(several.means, jnp.broadcast_to(found.means, several.means.shape))
