"""The evidence of a program: annealed importance sampling from a guide, and back from draws of the posterior."""

import functools
from functools import partial

import dense
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
import scipy.special
import scipy.stats
from numpyro.infer import MCMC, NUTS, SVI
from numpyro.infer.autoguide import AutoMultivariateNormal, AutoNormal
from programs import X, Y, Z, bayesian, deep, random_params, shallow

import numpyro_dgp as dgp
from numpyro_dgp import guides as G
from numpyro_dgp.diagnostics import Evidence, evidence
from numpyro_dgp.mcmc.annealing import anneal, first_path, tuned

KEY = jax.random.key(0)
FEW, TARGET = X[::3], Y[::3]
POINTS = Z[::3]  # three, so that their Gram matrix needs no jitter
LOG_NOISE = np.linspace(-4.0, 2.0, 1201)


def noisy(X, y=None):
    noise = numpyro.sample("noise", dist.LogNormal(-1.0, 0.7))
    shallow(X, y, Z=POINTS, noise=noise)


def titsias(noise):
    """The evidence of ``shallow`` with these points: the integral of its density over v."""
    k = partial(dense.rbf, variance=1.2, lengthscale=0.7)
    x, z = np.asarray(FEW), np.asarray(POINTS)
    return dense.titsias(np.asarray(TARGET), noise, k(z, z), k(z, x), k(x, x))[0]


def quadrature():
    """Log densities of the posterior of the logarithm of the noise of ``noisy``, times its evidence."""
    return np.array([titsias(np.exp(s)) for s in LOG_NOISE]) + scipy.stats.norm.logpdf(LOG_NOISE, -1.0, 0.7)


EXACT = scipy.special.logsumexp(quadrature()) + np.log(LOG_NOISE[1] - LOG_NOISE[0])
# A guide that is too narrow and beside the posterior.
ROUGH = {"noise_auto_loc": jnp.array(-0.4), "noise_auto_scale": jnp.array(0.15)} | {
    "g_auto_loc": jnp.zeros(3),
    "g_auto_scale_tril": 0.3 * jnp.eye(3),
}


def near(found, exact, upper=True, error=0.1):
    assert found.lower_se < error
    assert abs(found.lower - exact) < 4 * found.lower_se + 1e-3
    assert not upper or (found.upper_se < error and abs(found.upper - exact) < 4 * found.upper_se + 1e-3)


def fit(model, guide, *args, steps=1500):
    svi = SVI(model, guide, optax.adam(optax.cosine_decay_schedule(0.03, steps)), dgp.ELBO())
    return svi.run(jax.random.key(1), steps, *args, progress_bar=False).params


def chain(model, *args, draws=1000):
    mcmc = MCMC(NUTS(dgp.for_mcmc(model), target_accept_prob=0.9), num_warmup=500, num_samples=draws, num_chains=2,
                chain_method="sequential", progress_bar=False)  # fmt: skip
    mcmc.run(jax.random.key(2), *args)
    return mcmc


@functools.cache
def noisy_layers():
    """Two layers, and a chain."""
    model = partial(deep, process_noise=0.3)
    return model, chain(model, FEW, TARGET).get_samples(group_by_chain=True)


@pytest.mark.long
def test_weights_have_the_ratio_as_their_mean_where_the_target_ends():
    """A half-space without density, as zero and as NaN: runs that begin there count as zero, and runs downwards, which
    never get there, give an upper bound that is too high by that share of the normal."""

    def log_ratio(z):
        return jnp.where(z[0] > 1, jnp.where(z[1] > 0, jnp.nan, -jnp.inf), 1.5 * z[0] - jnp.square(z[1] - 1))

    exact = 1.5**2 / 2 + scipy.stats.norm.logcdf(1 - 1.5) - 0.5 * np.log(3) - 1 / 3
    of_all, chains = jax.vmap(jax.value_and_grad(log_ratio)), 20_000

    @jax.jit
    def run(path, starts, key, adapt):
        return anneal(of_all, path, starts, key, 3, adapt)

    starts = jax.random.normal(KEY, (chains, 2))
    path = first_path(20, 2, starts.dtype)
    trial = run(path, starts, jax.random.key(1), True)
    path = tuned(path, trial)
    assert path.betas[0] == 0
    assert path.betas[-1] == 1
    assert (jnp.diff(path.betas) > 0).all()
    assert not np.allclose(trial.step_sizes[0], trial.step_sizes[-1])
    up = run(path, starts, jax.random.key(2), False)
    assert jnp.isneginf(up.log_weights).any()
    assert up.acceptance.shape == (19,)
    np.testing.assert_allclose(up.step_sizes, path.step_sizes[:-1])
    # Exact draws: truncated normal with mean 1.5, and a normal.
    first = 1.5 + scipy.special.ndtri(np.asarray(jax.random.uniform(KEY, (chains,))) * scipy.special.ndtr(1 - 1.5))
    second = 2 / 3 + np.asarray(jax.random.normal(jax.random.key(3), (chains,))) / 3**0.5
    down = run(path.reversed(), jnp.stack([jnp.asarray(first), jnp.asarray(second)], 1), jax.random.key(4), False)
    found = Evidence(*(np.asarray(a) for a in (up.log_weights, up.acceptance, down.log_weights)))
    near(found, exact, upper=False, error=0.01)
    assert found.upper_se < 0.02
    assert abs(found.upper - (exact - scipy.stats.norm.logcdf(1))) < 4 * found.upper_se


@pytest.mark.long
def test_hyperparameters_by_quadrature():
    """The layer is integrated; its draws are not needed. Exact draws of the noise, grouped by chain."""
    weights = np.exp(quadrature() - quadrature().max())
    draws = np.random.default_rng(0).choice(LOG_NOISE, 64, p=weights / weights.sum())
    guide = G.InducingPoint(noisy, other=G.Normal())
    samples = {"noise": np.exp(draws).reshape(2, 32)}
    found = evidence(dgp.Posterior(noisy, guide, ROUGH), KEY, FEW, TARGET, samples=samples, num_temperatures=100)
    assert found.log_weights.shape == found.reverse_log_weights.shape == (32,)
    near(found, EXACT, error=0.05)
    assert found.upper_ess > 16


@pytest.mark.long
@pytest.mark.parametrize("name", ["Delta", "AutoNormal", "AutoMultivariateNormal", "diagonal"])
def test_every_guide_gives_the_same_number(name):
    guides = {
        "Delta": lambda: G.InducingPoint(noisy),
        "AutoNormal": lambda: AutoNormal(noisy),
        "AutoMultivariateNormal": lambda: AutoMultivariateNormal(noisy),
        "diagonal": lambda: G.InducingPoint(noisy, inducing=G.Diagonal(), other=AutoNormal),
    }
    guide = guides[name]()
    samples = None if name == "AutoMultivariateNormal" else chain(noisy, FEW, TARGET).get_samples()
    params = fit(noisy, guide, FEW, TARGET)
    found = evidence(
        dgp.Posterior(noisy, guide, params), KEY, FEW, TARGET, samples=samples, collapse=False, num_temperatures=200
    )
    near(found, EXACT, upper=samples is not None)


@pytest.mark.long
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_fixed_hyperparameters(dtype, request):
    if dtype == jnp.float32:
        request.getfixturevalue("x32")
    model = partial(shallow, Z=jnp.asarray(POINTS, dtype))
    params = {name: jnp.asarray(ROUGH[name], dtype) for name in ("g_auto_loc", "g_auto_scale_tril")}
    data = jnp.asarray(FEW, dtype), jnp.asarray(TARGET, dtype)
    guide = G.InducingPoint(model)
    found = evidence(dgp.Posterior(model, guide, params), KEY, *data, num_temperatures=100)
    near(found, titsias(0.3), upper=False)
    many = evidence(dgp.Posterior(model, guide, params), KEY, *data, num_temperatures=10, num_chains=3000)
    assert many.lower_ess < 2000
    near(many, titsias(0.3), upper=False)


@pytest.mark.long
def test_a_likelihood_without_closed_form_by_quadrature():
    counts = jnp.array([0.0, 2.0, 1.0, 4.0])

    def model(X, y=None):
        g = dgp.gp("g", dgp.kernels.RBF(1.2, 0.7), dgp.Points(jnp.zeros((1, 1))))
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dgp.Likelihood(g(X), lambda v: dist.Poisson(jnp.exp(v))), obs=y)

    x = np.linspace(-0.5, 1.0, 4)
    v, step = np.linspace(-9, 9, 4001, retstep=True)
    a = 1.2**0.5 * np.exp(-0.5 * (x / 0.7) ** 2)
    mean, variance = a * v[:, None], 1.2 - a**2
    y = np.asarray(counts)
    terms = y * mean - np.exp(mean + variance / 2) - scipy.special.gammaln(y + 1)
    exact = scipy.special.logsumexp(terms.sum(1) + scipy.stats.norm.logpdf(v)) + np.log(step)
    data = jnp.asarray(x)[:, None], counts
    guide = G.InducingPoint(model)
    params = random_params(model, guide, *data)
    found = evidence(
        dgp.Posterior(model, guide, params), KEY, *data, samples=chain(model, *data).get_samples(), num_temperatures=100
    )
    near(found, exact)


@pytest.mark.long
@pytest.mark.parametrize("name", ["InducingPoint", "GivenInducing", "MeanField"])
def test_two_layers_from_below_and_above(name):
    """The same number from both sides, integrated or not, by guides with bounds that are nats apart."""
    guides = {
        "InducingPoint": lambda m: G.InducingPoint(m),
        "GivenInducing": lambda m: G.InducingPoint(m, sites={"h": G.GivenInducing("free")}),
        "MeanField": lambda m: G.MeanField(m),
    }
    model, samples = noisy_layers()
    guide = guides[name](model)
    params = fit(model, guide, FEW, TARGET)
    run = partial(
        evidence, dgp.Posterior(model, guide, params), KEY, FEW, TARGET, samples=samples, num_temperatures=300
    )
    together, apart = run(collapse=True), run(collapse=False)
    for found in (together, apart):
        assert found.lower < found.upper + 4 * (found.lower_se + found.upper_se)
        assert found.upper - found.lower < 0.5 + 4 * (found.lower_se + found.upper_se)
        assert found.lower_se < 0.3
    assert abs(together.lower - apart.lower) < 4 * (together.lower_se + apart.lower_se)


@pytest.mark.long
def test_parameters_of_the_program_stay_and_latents_are_integrated():
    guide = G.InducingPoint(bayesian, other=G.Normal())
    params = fit(bayesian, guide, FEW, TARGET)
    lifted = numpyro.handlers.substitute(bayesian, data={"g_Z": params["g_Z"]})
    samples = chain(lifted, FEW, TARGET, draws=300).get_samples()
    found = evidence(dgp.Posterior(bayesian, guide, params), KEY, FEW, TARGET, samples=samples, num_temperatures=300)
    assert -1 < found.upper - found.lower < 2


@pytest.mark.long
def test_the_column_of_a_comparison(key):
    guide = G.InducingPoint(noisy, other=G.Normal())
    mcmc = chain(noisy, FEW, TARGET)
    fitted = dgp.Posterior(noisy, guide, fit(noisy, guide, FEW, TARGET))
    with pytest.warns(UserWarning, match=r"compare: no evidence from guides\['collapsed'\]: .* got Collapsed"):
        found = dgp.diagnostics.compare(
            noisy, {"fit": fitted, "collapsed": G.Collapsed(noisy)}, (FEW, TARGET), key=key, mcmc=mcmc,
            num_steps=300, num_samples=100, evidence=True,
        )  # fmt: skip
    row = found.table.loc["fit"]
    assert abs(row["evidence"] - EXACT) < 4 * row["evidence_se"] + 1e-3
    np.testing.assert_allclose(row["gap"], row["evidence"] - row["bound"])
    assert 0 < row["gap"] < 1
    assert abs(row["evidence_upper"] - EXACT) < 0.1
    assert found.table.loc[["collapsed", "mcmc"], "evidence"].isna().all()


def wrong(samples=None, model=shallow, args=(FEW, TARGET), guide=None, params=None, key=KEY, **options):
    guide = G.InducingPoint(model) if guide is None else guide
    params = {"g_auto_loc": jnp.zeros(8), "g_auto_scale_tril": jnp.eye(8)} if params is None else params
    return evidence(dgp.Posterior(model, guide, params), key, *args, samples=samples, **options)


DRAWS = jnp.zeros((5, 8))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: wrong(num_chains=0), "evidence: expected num_chains to be a positive integer, got 0"),
        (lambda: wrong(num_chains=1), "evidence: expected num_chains of two or more, got 1: a standard error needs"),
        (lambda: wrong(num_temperatures=2.5), "expected num_temperatures to be a positive integer, got 2.5"),
        (lambda: wrong(num_leapfrogs=0), "expected num_leapfrogs to be a positive integer, got 0"),
        (lambda: wrong(key=0), "evidence: expected a PRNG key, got 0"),
        (lambda: wrong(key=FEW), "evidence: expected a PRNG key"),
        (lambda: wrong(model=3, guide=shallow), "Posterior: expected the model, a function, got int"),
        (
            lambda: wrong(model=dgp.for_mcmc(shallow)),
            "evidence: expected the program that the guide is of, got what for_mcmc",
        ),
        (lambda: wrong(guide=3), "Posterior: expected the guide, a function, as second argument, got int"),
        (
            lambda: evidence(dgp.Posterior(shallow, samples={"g": DRAWS}), KEY, FEW, TARGET),
            "evidence: expected a fit with a guide, got draws of MCMC: evidence.dgp.Posterior",
        ),
        (lambda: evidence(shallow, KEY, FEW, TARGET), "evidence: expected a fit with a guide, got function"),
        (lambda: wrong(guide=G.Collapsed(shallow)), "got Collapsed: use"),
        (lambda: wrong(params={}), "expected the parameters of the guide, got none"),
        (lambda: wrong(params={"a": 1.0}), "got none for 'g_auto_loc'"),
        (lambda: wrong(collapse="yes"), 'expected collapse to be "auto", True or False'),
        (lambda: wrong(args=(FEW, TARGET, 5)), "over all data, got plate 'data' that takes 5 of 10 rows"),
        (lambda: wrong(args=(FEW,)), "evidence: expected a program that observes data, got none"),
        (lambda: wrong(args=(FEW, TARGET.at[1].set(jnp.nan))), "expected finite data"),
        (
            lambda: wrong(samples=DRAWS),
            r"expected samples as a dict of draws by site, got ArrayImpl: pass samples=mcmc",
        ),
        (lambda: wrong(samples={"f": DRAWS}), r"expected samples with draws of \['g'\], got none for \['g'\]: pass"),
        (lambda: wrong(samples={"g": DRAWS[0]}), r"samples of 'g' of shape \(S, ...\) or .* got \(8,\): pass"),
        (lambda: wrong(samples={"g": DRAWS[:, :7]}), r"with draws of shape \(8,\), got \(5, 7\)"),
        (lambda: wrong(samples={"g": DRAWS[:0]}), r"got \(0, 8\)"),
        (lambda: wrong(samples={"g": DRAWS[None, None]}), r"got \(1, 1, 5, 8\)"),
    ],
)
def test_wrong_calls(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.long
@pytest.mark.parametrize("bad", ["density", "samples", "ring"])
def test_wrong_calls_that_only_a_run_tells(bad):
    if bad == "ring":
        ring = dgp.rings.Ring(0.0, 8.0, 8)

        def model(y=None):
            h = numpyro.sample("h", dgp.rings.RingNormal(dgp.kernels.RBF(), ring))
            numpyro.sample("y", dist.Normal(h, 1.0).to_event(1), obs=y)

        def guide(y):
            numpyro.sample("h", dgp.rings.RingNormal(dgp.kernels.RBF(), ring))

        params = {"unused": jnp.zeros(())}
        with pytest.raises(ValueError, match=r"samples= of a program without RingNormal, got one at 'h'"):
            evidence(
                dgp.Posterior(model, guide, params),
                KEY,
                jnp.zeros(8),
                samples={"h": jnp.zeros((3, 8))},
                num_temperatures=2,
            )
        return

    def model(y=None):
        m = numpyro.sample("m", dist.LogNormal(0.0, 1.0))
        numpyro.factor("bad", jnp.nan * m if bad == "density" else 0.0)
        numpyro.sample("y", dist.Normal(m, 1.0), obs=y)

    guide, params = G.InducingPoint(model, other=G.Normal()), {n: jnp.ones(()) for n in ("m_auto_loc", "m_auto_scale")}
    run = partial(
        evidence, dgp.Posterior(model, guide, params), KEY, jnp.zeros(()), num_temperatures=2, num_leapfrogs=1
    )
    if bad == "density":
        with pytest.raises(ValueError, match="finite log density at draws of the guide, got none: are params"):
            run()
    else:
        with pytest.raises(ValueError, match="samples at which the density of this program is finite, got others"):
            run(samples={"m": jnp.array([1.0, -1.0])})
