"""Simulation-based calibration: guides and chains that are exact pass, wrong ones are found and named."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro import handlers
from numpyro.infer import MCMC, NUTS, SVI
from numpyro.infer.autoguide import AutoNormal

import numpyro_dgp as dgp
from numpyro_dgp.diagnostics import sbc
from numpyro_dgp.testing import assert_calibrated

X = jnp.linspace(-1, 1, 6)[:, None]
SD = 0.5


def line(X, y=None, sd=SD, prior=1.0):
    """A slope in closed form: N(m, s^2) with s^-2 = 1 + x'x / sd^2."""
    slope = numpyro.sample("slope", dist.Normal(0.0, prior))
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dist.Normal(slope * X[:, 0], sd), obs=y)


def posterior(X, y, sd=SD):
    precision = 1 + jnp.sum(X**2) / sd**2
    return X[:, 0] @ y / sd**2 / precision, precision**-0.5


def guide_of(shift=0.0, width=1.0):
    def guide(X, y=None):
        m, s = posterior(X, y)
        numpyro.sample("slope", dist.Normal(m + shift * s, width * s + 0 * numpyro.param("unused", 0.0)))

    return guide


def svi_of(**deviation):
    return SVI(line, guide_of(**deviation), optax.sgd(0.0), dgp.ELBO())


@pytest.mark.slow
def test_ranks_are_those_of_a_loop(key):
    """Without the compiled program: data, posterior and rank of one replication after the other."""
    found = sbc(svi_of(), key, X, num_replications=400, num_steps=1)
    assert {name: ranks.shape for name, ranks in found.ranks.items()} == {"slope": (400,), "log density": (400,)}
    assert found.num_samples == 99
    assert found.uniform["slope"] > 0.001
    rng = np.random.default_rng(0)
    x, ranks = np.asarray(X[:, 0]), []
    for _ in range(400):
        slope = rng.normal()
        y = slope * x + SD * rng.normal(size=6)
        m, s = posterior(np.asarray(X), y)
        draws = np.append(m + s * rng.normal(size=99), slope)
        squares = ((y - draws[:, None] * x) ** 2).sum(1)
        ranks.append([(draws < slope).sum(), (squares > squares[-1]).sum()])
    moments = np.mean(ranks, 0), np.std(ranks, 0)
    ours = np.stack([found.ranks["slope"], found.ranks["log density"]], -1)
    np.testing.assert_allclose(ours.mean(0), moments[0], atol=4 * 29 * (2 / 400) ** 0.5)
    np.testing.assert_allclose(ours.std(0), moments[1], rtol=0.12)


def test_an_exact_posterior_passes_early(key):
    found = assert_calibrated(svi_of(), key, X, num_steps=1)
    assert 50 <= len(found.ranks["slope"]) < 400


DEVIATIONS = {
    "narrow": (dict(width=0.6), "too narrow"),
    "wide": (dict(width=1.7), "too wide"),
    "low": (dict(shift=-0.8), "biased low"),
    "high": (dict(shift=0.8), "biased high"),
    "a point": (dict(width=1e-6), r"are 0 or S, as those of a point"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", DEVIATIONS)
def test_deviations_are_found_and_named(key, name):
    deviation, words = DEVIATIONS[name]
    only = dict(quantities=lambda values: {"twice": jnp.stack([values["slope"], 2 * values["slope"]])})
    with pytest.raises(AssertionError, match=rf"of 'twice'\[\d\] after \d+ replications: .*{words}"):
        assert_calibrated(svi_of(**deviation), key, X, num_steps=1, **only)


@pytest.mark.slow
def test_data_show_a_posterior_that_is_the_prior(key):
    """Whose slopes are calibrated, as they are on average; the log density of the data is not."""

    def ignorant(X, y=None):
        numpyro.sample("slope", dist.Normal(0.0, 1.0 + 0 * numpyro.param("unused", 0.0)))

    svi = SVI(line, ignorant, optax.sgd(0.0), dgp.ELBO())
    assert_calibrated(svi, key, X, num_steps=1, quantities=lambda values: {"slope": values["slope"]})
    with pytest.raises(AssertionError, match="'log density' after"):
        assert_calibrated(svi, key, X, num_steps=1)


def spread(X, y=None, error=1.0):
    """A precision in closed form: Gamma(5 + N / 2, 5 + y'y / 2)."""
    precision = numpyro.sample("precision", dist.Gamma(5.0, 5.0))
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dist.Normal(jnp.zeros(len(X)), error * precision**-0.5), obs=y)


def precision_guide(X, y=None):
    one = 1.0 + 0 * numpyro.param("unused", 0.0)
    numpyro.sample("precision", dist.Gamma(one * (5 + len(X) / 2), 5 + jnp.sum(y**2) / 2))


@pytest.mark.slow
def test_a_noise_off_by_a_factor_of_a_tenth_is_found(key):
    many = jnp.linspace(-1, 1, 60)[:, None]
    svi = SVI(spread, precision_guide, optax.sgd(0.0), dgp.ELBO())
    assert_calibrated(svi, key, many, num_steps=1)
    with pytest.raises(AssertionError, match=r"of 'precision' after \d\d replications: .* biased low"):
        assert_calibrated(svi, key, many, num_steps=1, simulator=lambda X, y=None: spread(X, y, error=1.1))


@pytest.mark.slow
def test_another_prior_is_found(key):
    with pytest.raises(AssertionError, match=r"of '(slope|log density)' after"):
        assert_calibrated(svi_of(), key, X[:2], num_steps=1, simulator=lambda X, y=None: line(X, y, prior=3.0))


@pytest.mark.slow
def test_given_data(key):
    """Of one data set, far from those of the prior, the posterior is right; one that is right only there is found."""
    y = 3.0 * X[:, 0] + 0.1
    found = assert_calibrated(svi_of(), key, X, y, num_steps=1)
    assert found.ranks["slope"].shape == found.ranks["log density"].shape
    with pytest.raises(AssertionError, match="too narrow"):
        assert_calibrated(svi_of(width=0.5), key, X, y, num_steps=1)

    def biased(X, y=None):
        m, s = posterior(X, y)
        large = jnp.where(m > 1.5, s, 0.0)
        numpyro.sample("slope", dist.Normal(m + large, s + 0 * numpyro.param("unused", 0.0)))

    svi = SVI(line, biased, optax.sgd(0.0), dgp.ELBO())
    assert_calibrated(svi, key, X, num_steps=1, budget=100)
    with pytest.raises(AssertionError, match="biased high"):
        assert_calibrated(svi, key, X, y, num_steps=1, quantities=lambda values: {"slope": values["slope"]})


# --- layers


def layer(X, y=None, sd=0.3):
    """As many inducing points as rows: f(x) has no conditional variance, and the bound is exact."""
    g = dgp.gp("g", dgp.kernels.RBF(1.0, 0.7), dgp.Points(jnp.linspace(-1, 1, 6)[:, None]))
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dgp.Likelihood(g(X), lambda v: dist.Normal(v, sd)), obs=y)


def exact():
    """One natural step gives the posterior."""
    guide = dgp.guides.InducingPoint(layer)
    return SVI(layer, guide, dgp.optim.NaturalGradient(guide, 1.0, optax.adam(0.01)), dgp.ELBO())


def test_an_exact_guide_of_a_layer_passes(key):
    found = assert_calibrated(exact(), key, X, num_steps=2, budget=25)
    assert {name: ranks.shape for name, ranks in found.ranks.items()} == {"f(x) of y": (25, 6), "log density": (25,)}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_an_exact_guide_of_a_layer_passes_early(seed):
    found = assert_calibrated(exact(), jax.random.key(seed), X, num_steps=2)
    assert len(found.ranks["log density"]) < 400


@pytest.mark.long
def test_an_exact_guide_passes_in_two_hundred_runs():
    """One compiled program, the ranks of which are judged in turn: no false alarm."""
    from numpyro_dgp.diagnostics.rank_test import judge

    found = sbc(exact(), jax.random.key(0), X, num_replications=200 * 200, num_steps=2)
    runs = [{n: r.reshape(200, 200, *r.shape[1:])[i] for n, r in found.ranks.items()} for i in range(200)]
    verdicts = [judge(ranks, 99, 1e-3, 1.4) for ranks in runs]
    assert [v for v in verdicts if v.alarm is not None] == []
    assert np.mean([v.cleared is not None for v in verdicts]) > 0.4


@pytest.mark.slow
def test_a_wrong_noise_of_a_layer_is_found(key):
    """By a factor of 1.1, which changes nothing but the width of the posterior, so that it takes many replications."""
    settings = dict(num_steps=2, tolerance=1.1, budget=1500)
    with pytest.raises(AssertionError, match="expected uniform ranks of true values"):
        assert_calibrated(exact(), key, X, simulator=lambda X, y=None: layer(X, y, sd=0.33), **settings)


@pytest.mark.slow
def test_an_exact_guide_given_data(key):
    """Rows twice leave conditional variance nowhere, as the inducing points are at the rows."""
    assert_calibrated(exact(), key, X, jnp.cos(3 * X[:, 0]), num_steps=2)


def deep(X, y=None):
    noise = numpyro.sample("noise", dist.LogNormal(-1.0, 0.5))
    inside = dgp.Points(jnp.linspace(-1, 1, 4)[:, None])
    f = dgp.gp("f", dgp.kernels.RBF(1.0, 1.0), inside, outputs=1)
    g = dgp.gp("g", dgp.kernels.RBF(1.0, 1.0), inside)
    with numpyro.plate("data", len(X)):
        h = numpyro.sample("h", f(X))
        numpyro.sample("y", dgp.Likelihood(g(h), lambda v: dist.Normal(v, noise), collapse="marginal"), obs=y)


CHAINS = {
    "NUTS": lambda: MCMC(NUTS(dgp.for_mcmc(deep), max_tree_depth=6), num_warmup=200, num_samples=198, thinning=2),
    "Gibbs": lambda: MCMC(dgp.mcmc.Gibbs(deep), num_warmup=100, num_samples=990, thinning=10),
    "two chains": lambda: MCMC(
        NUTS(dgp.for_mcmc(deep), max_tree_depth=6), num_warmup=200, num_samples=100, thinning=2, num_chains=2,
        chain_method="vectorized",
    ),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("given", [False, True], ids=["prior", "data"])
def test_chains_of_two_layers_pass(key, name, given):
    mcmc = CHAINS[name]()
    data = (jnp.sin(3 * X[:, 0]),) if given else ()
    found = assert_calibrated(mcmc, key, X, *data, budget=100)
    assert set(found.ranks) == {"noise", "f(x) of y", "log density"}
    assert mcmc.last_state is None, "the user's object has not run"


@pytest.mark.slow
def test_a_chain_that_is_too_short_or_dependent(key):
    def run(**settings):
        return MCMC(NUTS(dgp.for_mcmc(line), step_size=0.02, adapt_step_size=False, max_tree_depth=2), **settings)

    with pytest.raises(AssertionError, match=r"have the correlation 0\.\d+: increase thinning="):
        assert_calibrated(run(num_warmup=5, num_samples=49), key, X)


@pytest.mark.slow
def test_guides_of_numpyro(key):
    """An autoguide, which sets itself up in its first call, on a posterior that is Gaussian."""
    svi = SVI(line, AutoNormal(line), optax.adam(0.05), dgp.ELBO())
    assert_calibrated(svi, key, X, num_steps=400)


@pytest.mark.slow
def test_a_fit_that_has_not_converged(key):
    svi = SVI(layer, dgp.guides.InducingPoint(layer), optax.adam(0.02), dgp.ELBO())
    with pytest.raises(AssertionError, match=r"the loss still fell at the end of \d+% of the fits: increase"):
        assert_calibrated(svi, key, X, num_steps=50)


@pytest.mark.slow
def test_the_same_in_single_precision(key, x32):
    short = jnp.asarray(np.asarray(X), jnp.float32)
    found = assert_calibrated(svi_of(), key, short, num_steps=1)
    assert found.ranks["slope"].dtype.kind == "i"


@pytest.mark.slow
def test_discrete_quantities_have_uniform_ranks(key):
    """Equal values are in random order: a quantity that is a constant, and the sign of the slope."""
    ranked = dict(quantities=lambda values: {"one": jnp.zeros(()), "sign": jnp.sign(values["slope"])})
    found = sbc(svi_of(), key, X, num_replications=200, num_steps=1, **ranked)
    assert min(found.uniform["one"], found.uniform["sign"]) > 0.001


@pytest.mark.long
def test_simuk_takes_a_prepared_program():
    """As in docs/diagnostics.md: ranks of the sites that the chain moves."""
    simuk = pytest.importorskip("simuk")
    short = {"num_warmup": 20, "num_samples": 20}
    kernel = NUTS(dgp.for_mcmc(deep, collapse=False), max_tree_depth=3)
    data = {"X": X, "y": X[:, 0]}
    found = simuk.SBC(kernel, num_simulations=2, sample_kwargs=short, seed=0, data_dir=data)
    found.run_simulations()
    assert {"noise", "f"} <= set(found.var_names)
    assert found.simulations["prior_sbc"]["noise"].shape == (1, 2)


# --- wrong calls


def renamed(X, targets=None):
    slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
    numpyro.sample("y", dist.Normal(slope * X[:, 0], SD).to_event(1), obs=targets)


def learned(X, y=None):
    return line(X, y, sd=numpyro.param("sd", 0.5))


def subsampled(X, y=None):
    slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
    with numpyro.plate("data", 6, subsample_size=3) as i:
        numpyro.sample("y", dist.Normal(slope * X[i, 0], SD), obs=None if y is None else y[i])


def at_rows(X, y=None):
    g = dgp.gp("g", dgp.kernels.RBF(), dgp.Points(X[::2]))
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dgp.Likelihood(g(X), lambda v: dist.Normal(v, SD)), obs=y)


def nowhere(X, y=None):
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dist.Normal(0 * X[:, 0], SD), obs=y)


def with_another(X, W, y=None):
    line(X, y)


def not_finite(X, y=None):
    numpyro.sample("slope", dist.Normal(0.0, jnp.inf + 0 * numpyro.param("unused", 0.0)))


def of(model, guide=None):
    return SVI(model, guide or dgp.guides.InducingPoint(model), optax.sgd(0.0), dgp.ELBO())


KEY = jax.random.key(0)
Y = X[:, 0]
WRONG = {
    "a class": (lambda: sbc(SVI, KEY, X), r"sbc: expected a numpyro\.infer\.SVI or MCMC, got the class SVI"),
    "a kernel": (lambda: sbc(NUTS(line), KEY, X), r"expected a numpyro\.infer\.SVI or MCMC, got NUTS"),
    "no key": (lambda: sbc(of(line), 0, X), "sbc: expected a PRNG key, got 0"),
    "no replications": (lambda: sbc(of(line), KEY, X, num_replications=0), "number of replications to be a positive"),
    "steps of a chain": (
        lambda: sbc(MCMC(NUTS(line), num_warmup=1, num_samples=1), KEY, X, num_steps=5),
        "expected num_steps for an SVI only, got 5",
    ),
    "no arguments": (lambda: sbc(of(line), KEY), "expected the arguments of the model, got 0 positional"),
    "a level": (lambda: assert_calibrated(of(line), KEY, X, level=5.0), "level to be a probability between 0 and 1"),
    "a tolerance": (lambda: assert_calibrated(of(line), KEY, X, tolerance=0.7), "a tolerance above 1, got 0.7"),
    "a simulator": (lambda: sbc(of(line), KEY, X, simulator=X), "expected simulator to be a function, got ArrayImpl"),
    "other names": (lambda: sbc(of(renamed), KEY, X), r"observed sites have the names of the arguments .*'targets'"),
    "parameters": (lambda: sbc(of(learned), KEY, X), r"a prior for every unknown .* numpyro\.param \['sd'\]"),
    "minibatches": (lambda: sbc(of(subsampled), KEY, X), "a program over all data, got plate 'data'"),
    "another simulator": (
        lambda: sbc(of(line), KEY, X, simulator=nowhere),
        r"a simulator that draws all latent sites of the program, got none of \['slope'\]",
    ),
    "no dict": (lambda: sbc(of(line), KEY, X, quantities=lambda v: v["slope"]), "a dict of arrays from quantities"),
    "inducing inputs at rows": (
        lambda: sbc(of(at_rows), KEY, X, Y),
        r"'g' to be shared by all rows.*shapes \(3,\)",
    ),
    "arrays without rows": (
        lambda: sbc(of(with_another), KEY, X, jnp.ones(2), Y),
        r"a row for each of the 6 observations, got one of shape \(2,\)",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_calls(name):
    call, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.slow
def test_fits_that_are_not_finite(key):
    with pytest.raises(ValueError, match="expected finite posterior samples in every replication, got NaN or infinite"):
        sbc(of(line, not_finite), key, X, num_replications=5, num_steps=1)


@pytest.mark.slow
def test_handlers_keep_the_names_of_arguments(key):
    """A program under a handler is called as the program is."""
    fixed = handlers.substitute(learned, data={"sd": jnp.array(SD)})
    svi = SVI(fixed, guide_of(), optax.sgd(0.0), dgp.ELBO())
    found = sbc(svi, key, X, num_replications=5, num_steps=1)
    assert set(found.ranks) == {"slope", "log density"}
