"""Wrong calls of MCMC's programs and kernels, of diagnostics, of comparisons and of conformance checks."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import xarray
from numpyro import handlers
from numpyro.infer import MCMC, NUTS, SVI, Predictive
from numpyro.infer.autoguide import AutoNormal
from programs import NOISE, X, Y, Z, bayesian, deep, shallow
from programs import explicit as drawn
from wrong_calls.wrong import Wrong

import numpyro_dgp as dgp
from numpyro_dgp import diagnostics, testing

KEY = jax.random.key(0)
GUIDE = dgp.guides.InducingPoint(shallow)
PARAMS = {"g_auto_loc": jnp.zeros(8), "g_auto_scale_tril": jnp.eye(8)}
FIT = dgp.Posterior(shallow, GUIDE, PARAMS)
CHAINS = dgp.Posterior(shallow, samples={"g": jnp.zeros((30, 8))})
STEPS = SVI(shallow, GUIDE, optax.adam(0.1), dgp.ELBO())
SHORT = MCMC(NUTS(shallow), num_warmup=1, num_samples=1, progress_bar=False)
DRAWS = {name: jnp.zeros((3, *shape)) for name, shape in (("f", (1, 8)), ("g", (8,)), ("h_white", (30, 1)))}


def tree(draws=30, **without):
    """A tree as ``to_arviz`` makes it of a fit, of nothing but zeros."""
    import arviz_base

    zeros = np.zeros((1, draws, 4))
    groups = {"log_likelihood_uncorrected": {"y": zeros}, "log_likelihood_target": {"y": zeros}} | {
        "posterior": {"g": zeros},
        "sample_stats": {"lp": zeros[..., 0], "log_q": zeros[..., 0]},
    }
    return arviz_base.from_dict({name: group for name, group in groups.items() if name not in without})


SCORE = types.SimpleNamespace(pareto_k=np.zeros(4))


def uncorrected():
    found = tree()
    found["log_likelihood_uncorrected"].attrs["reason"] = "a guide"
    return found


def two_sites():
    import arviz_base

    both = {name: np.zeros((1, 30, 4)) for name in "ab"}
    return arviz_base.from_dict({"log_likelihood": both, "log_likelihood_target": both})


def unindexed(X, y=None):
    g = dgp.gp("g", dgp.kernels.RBF(), dgp.Points(Z))
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dgp.Likelihood(g(X), lambda v: dist.Normal(v, NOISE)), obs=y)


def chain_of(model, *args):
    NUTS(model).init(KEY, 1, None, args, {})


def sghmc_of(model, *args, **options):
    dgp.mcmc.SGHMC(model, **options).init(KEY, 1, None, args, {})


def sghmc_state(**fields):
    state = dgp.mcmc.SGHMC(explicit).init(KEY, 1, None, (X, Y), {})
    return type(state)(**state._asdict() | fields)


def explicit(X, y=None):
    v = numpyro.sample("m", dist.Normal(0.0, 1.0))
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dist.Normal(v, 1.0), obs=y)


def partly(X, y=None, mask=None):
    g = dgp.gp("g", dgp.kernels.RBF(), dgp.Points(Z))
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dgp.Likelihood(g(X), lambda v: dist.Normal(v, NOISE)), obs=y, obs_mask=mask)


def discrete(y):
    numpyro.sample("k", dist.Bernoulli(0.5), infer={"enumerate": "parallel"})
    numpyro.sample("y", dist.Normal(0.0, 1.0), obs=y)


def counts(X, y=None):
    """Discrete values above a drawn function: not observed, there is nothing that a chain could move."""
    v = numpyro.sample("v", dgp.gp("g", dgp.kernels.RBF(), dgp.Points(Z))(X))
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dist.Poisson(jnp.exp(v)), obs=y)


def overlapping(X, a=None, b=None):
    m = numpyro.sample("m", dist.Normal(0.0, 1.0))
    with numpyro.plate("data", len(X)):
        numpyro.sample("a", dist.Normal(m, 1), obs=a)
        with numpyro.plate("replicates", 1):
            numpyro.sample("b", dist.Normal(m, 1), obs=None if b is None else b[None])


def compare(guides=None, data=(X, Y), model=shallow, **options):
    dgp.diagnostics.compare(model, {"fit": FIT} if guides is None else guides, data, **{"key": KEY} | options)


def check_guide(model=shallow, guide=GUIDE, X=X, y=Y, **options):
    testing.check_guide(model, guide, X, y, **options)


def normal(v):
    return dist.Normal(v, 0.1)


NO_DATA = "SGHMC: expected a program that observes data, got none: pass the observations"
NOT_OBSERVED = "Likelihood: expected observations in every run of a sampler or an autoguide"

FOR_MCMC = [
    Wrong(
        "fit: typo", lambda: dgp.fit(STEPS, KEY, 5, X, Y, progres_bar=False), "fit: .*'progres_bar' .*'progress_bar'"
    ),
    Wrong(
        "fit_stream: typo",
        lambda: dgp.fit_stream(STEPS, KEY, 5, dgp.Stream((X, Y), 5), device=None),
        r"fit_stream: expected its own keyword arguments or the program's, got 'device' \(nearest: 'devices'\)",
    ),
    Wrong("minimize: typo", lambda: dgp.optim.minimize(STEPS, KEY, X, Y, max_step=5), "'max_step' .nearest: 'max_st"),
    Wrong(
        "predict: typo",
        lambda: FIT.predict(KEY, X, num_sample=5),
        r"Posterior\.\w+: .*'num_sample'.*using\(num_samples=",
    ),
    Wrong("for_mcmc of a number", lambda: dgp.for_mcmc(3), "for_mcmc: expected a program, a function, got int"),
    Wrong("for_mcmc of a result", lambda: dgp.for_mcmc(FIT), "for_mcmc: expected a program, a function, got Posterior"),
    Wrong("for_mcmc twice", lambda: dgp.for_mcmc(dgp.for_mcmc(deep)), "got a prepared one"),
    Wrong("for_mcmc with a result", lambda: dgp.for_mcmc(deep, [1.0]), "expected params, a dict of arrays, got list"),
    Wrong(
        "for_mcmc with NaN",
        lambda: dgp.for_mcmc(bayesian, {"g_Z": jnp.full((8, 1), jnp.nan)}),
        "expected finite params at 'g_Z', got 8 NaN",
    ),
    Wrong("for_mcmc subsamples", lambda: chain_of(dgp.for_mcmc(deep), X, Y, 7), "over all data, got plate 'data' that"),
    Wrong("for_mcmc without params", lambda: chain_of(dgp.for_mcmc(bayesian), X, Y), "got none for 'g_Z'"),
    Wrong(
        "for_mcmc with a typo",
        lambda: chain_of(dgp.for_mcmc(bayesian, {"g_z": Z}), X, Y),
        "expected a value for every numpyro.param, got none for 'g_Z'",
    ),
    Wrong("no y under for_mcmc", lambda: chain_of(dgp.for_mcmc(deep), X), "site 'y': expected observations"),
    Wrong(
        "no y under for_mcmc, no likelihood",
        lambda: chain_of(dgp.for_mcmc(drawn), X),
        "site 'y': expected observations in every run of a sampler or an autoguide, got a site without: pass",
    ),
    Wrong(
        "no y of counts under for_mcmc",
        lambda: chain_of(dgp.for_mcmc(counts), X),
        "site 'y': expected observations in every run",
    ),
    Wrong("no y under NUTS", lambda: chain_of(shallow, X), NOT_OBSERVED),
    Wrong("obs_mask under NUTS", lambda: chain_of(partly, X, Y, Y > 0), "for missing entries .*observed=mask"),
    Wrong("no y in an autoguide", lambda: handlers.seed(AutoNormal(shallow), 0)(X), NOT_OBSERVED),
    Wrong(
        "Predictive at fewer rows",
        lambda: Predictive(dgp.for_mcmc(deep), DRAWS)(KEY, X[:7]),
        r"\(7, 1\) for 'h_white', one per datum, got \(30, 1\), those of the data of the chain: predict by dgp",
    ),
    Wrong(
        "Predictive at one row", lambda: Predictive(dgp.for_mcmc(deep), DRAWS)(KEY, X[:1]), "predict by dgp.Posterior"
    ),
    Wrong(
        "NonCentered of a parameter",
        lambda: handlers.seed(handlers.reparam(explicit, config={"m": dgp.mcmc.NonCentered()}), 0)(X, Y),
        "NonCentered: expected 'm' to hold unobserved function values, got a Normal",
    ),
    Wrong(
        "NonCentered of observations",
        lambda: handlers.seed(handlers.reparam(shallow, config={"y": dgp.mcmc.NonCentered()}), 0)(X, Y),
        "expected 'y' to hold unobserved function values, got an observed Likelihood",
    ),
]

SGHMC = [
    Wrong("SGHMC of a number", lambda: dgp.mcmc.SGHMC(3), "SGHMC: expected a program and an init_strategy, .* got int"),
    Wrong(
        "SGHMC from values",
        lambda: dgp.mcmc.SGHMC(shallow, init_strategy={"g": Z}),
        "both functions, got function and dict",
    ),
    Wrong("SGHMC no step", lambda: dgp.mcmc.SGHMC(shallow, step_size=0.0), "expected a positive step_size, got 0.0"),
    Wrong(
        "SGHMC negative step",
        lambda: dgp.mcmc.SGHMC(shallow, step_size=-1.0),
        "expected a positive step_size, got -1.0",
    ),
    Wrong(
        "SGHMC infinite step",
        lambda: dgp.mcmc.SGHMC(shallow, step_size=np.inf),
        "expected a positive step_size, got inf",
    ),
    Wrong(
        "SGHMC NaN step", lambda: dgp.mcmc.SGHMC(shallow, step_size=np.nan), "expected a positive step_size, got nan"
    ),
    Wrong("SGHMC step in words", lambda: dgp.mcmc.SGHMC(shallow, step_size="small"), "expected a positive step_size"),
    Wrong("SGHMC two steps", lambda: dgp.mcmc.SGHMC(shallow, step_size=jnp.ones(2)), "expected a positive step_size"),
    Wrong("SGHMC friction", lambda: dgp.mcmc.SGHMC(shallow, friction=1.5), "expected 0 < friction <= 1, got 1.5"),
    Wrong("SGHMC no friction", lambda: dgp.mcmc.SGHMC(shallow, friction=None), "expected 0 < friction <= 1, got None"),
    Wrong(
        "SGHMC with a result",
        lambda: dgp.mcmc.SGHMC(shallow, FIT),
        "SGHMC: expected params, a dict of arrays, got Post",
    ),
    Wrong(
        "SGHMC with NaN",
        lambda: dgp.mcmc.SGHMC(shallow, {"a": np.nan}),
        "expected finite params at 'a', got 1",
    ),
    Wrong(
        "SGHMC optim in words",
        lambda: dgp.mcmc.SGHMC(shallow, optim="adam"),
        "SGHMC: expected an optax optimiser of parameters, got str: optax.adam",
    ),
    Wrong(
        "SGHMC empty window",
        lambda: dgp.mcmc.SGHMC(shallow, window=0),
        "SGHMC: expected window to be a positive integer, got 0",
    ),
    Wrong(
        "SGHMC of no parameters",
        lambda: sghmc_of(shallow, X, Y, optim=optax.adam(0.1)),
        "expected a numpyro.param that optim learns, got none: leave optim out",
    ),
    Wrong("SGHMC without y", lambda: sghmc_of(shallow, X), NO_DATA),
    Wrong("SGHMC without y, no likelihood", lambda: sghmc_of(explicit, X), NO_DATA),
    Wrong("SGHMC without params", lambda: sghmc_of(bayesian, X, Y), "expected a value for every numpyro.param"),
    Wrong(
        "SGHMC of latents per datum",
        lambda: sghmc_of(bayesian, X, Y, 7, params={"g_Z": Z}),
        "expected global sites only under plate 'data', which takes minibatches, got the latent 'w'",
    ),
    Wrong(
        "SGHMC of a discrete site", lambda: sghmc_of(discrete, 0.0), "expected continuous sites, got the discrete 'k'"
    ),
    Wrong(
        "SGHMC before init",
        lambda: dgp.mcmc.SGHMC(shallow).postprocess_fn((), {}),
        "expected init before postprocess_fn",
    ),
    Wrong(
        "SGHMC step too large",
        lambda: sghmc_state(lost=jnp.array(3)),
        "expected draws with a finite density and gradient, got none at draw 3 after warm-up: halve",
    ),
    Wrong(
        "SGHMC runs away",
        lambda: sghmc_state(draws=jnp.full(2, 200), temperature=jnp.array([1.1, 17.0])),
        "expected velocities of temperature one, got 17 on average over 200 draws: the chain diverges",
    ),
]

TO_ARVIZ = [
    Wrong(
        "to_arviz of a pair",
        lambda: dgp.diagnostics.to_arviz((GUIDE, PARAMS), KEY, X, Y),
        "or an MCMC object that has run, got tuple",
    ),
    Wrong(
        "to_arviz of a guide",
        lambda: dgp.diagnostics.to_arviz(GUIDE, KEY, X, Y),
        r"expected dgp.Posterior\(model, guide, .*got Ind",
    ),
    Wrong(
        "to_arviz of two y in one plate",
        lambda: dgp.diagnostics.to_arviz(
            dgp.Posterior(unindexed, dgp.guides.InducingPoint(unindexed), PARAMS), KEY, X, jnp.stack([Y, Y])
        ),
        r"a plate for every axis of the observations 'y', got shape \(2, 30\) .* dim=-2\) around it",
    ),
    Wrong(
        "to_arviz before run",
        lambda: dgp.diagnostics.to_arviz(SHORT, KEY, X, Y),
        "got one that has not: call mcmc.run first",
    ),
    Wrong(
        "to_arviz of nothing",
        lambda: dgp.diagnostics.to_arviz({}, KEY, X, Y),
        r"expected several fits by name .* got \[\]",
    ),
    Wrong(
        "to_arviz of two pairs",
        lambda: dgp.diagnostics.to_arviz({"a": 1}, KEY, X, Y),
        "an MCMC object that has run, got int",
    ),
    Wrong("to_arviz key", lambda: dgp.diagnostics.to_arviz(FIT, 0, X, Y), "to_arviz: expected a PRNG key, got 0"),
    Wrong(
        "to_arviz no key", lambda: dgp.diagnostics.to_arviz(FIT, X, Y), "expected a PRNG key, got ArrayImpl of shape"
    ),
    Wrong(
        "to_arviz two keys",
        lambda: dgp.diagnostics.to_arviz(FIT, jax.random.split(KEY), X, Y),
        "to_arviz: expected a PRNG key, got .* of shape",
    ),
    Wrong(
        "to_arviz without y",
        lambda: dgp.diagnostics.to_arviz(FIT, KEY, X),
        "expected a program that observes data, got none",
    ),
    Wrong(
        "to_arviz y of two axes",
        lambda: dgp.diagnostics.to_arviz(FIT, KEY, X, Y[:, None]),
        r"expected observations y of shape \(30,\)",
    ),
    Wrong("to_arviz swapped", lambda: dgp.diagnostics.to_arviz(FIT, KEY, Y, X), "expected inputs of shape"),
    Wrong(
        "to_arviz minibatch",
        lambda: dgp.diagnostics.to_arviz(FIT, KEY, X, Y, 7),
        "expected a program over all data, got plate",
    ),
    Wrong(
        "to_arviz NaN",
        lambda: dgp.diagnostics.to_arviz(FIT, KEY, X, Y.at[3].set(jnp.nan)),
        "expected finite data, got 1 NaN",
    ),
    Wrong(
        "to_arviz draws",
        lambda: dgp.diagnostics.to_arviz(FIT, KEY, X, Y, num_samples=0),
        "num_samples to be a positive integer",
    ),
    Wrong(
        "to_arviz K",
        lambda: dgp.diagnostics.to_arviz(FIT, KEY, X, Y, local_samples=1.5),
        "local_samples to be a positive integer",
    ),
    Wrong(
        "to_arviz losses",
        lambda: dgp.diagnostics.to_arviz(FIT, KEY, X, Y, losses="l"),
        r"expected losses of shape \(steps,\), got str",
    ),
    Wrong(
        "to_arviz losses by name",
        lambda: dgp.diagnostics.to_arviz(FIT, KEY, X, Y, losses={"a": Y}),
        "expected losses of shape",
    ),
    Wrong(
        "to_arviz losses of several",
        lambda: dgp.diagnostics.to_arviz({"a": FIT}, KEY, X, Y, losses=Y),
        r"losses={name: losses} of some, got \['a'\] and ArrayImpl",
    ),
    Wrong(
        "to_arviz losses of others",
        lambda: dgp.diagnostics.to_arviz({"a": FIT}, KEY, X, Y, losses={"b": Y}),
        r"losses={name: losses} of some, got \['a'\] and \['b'\]",
    ),
    Wrong(
        "to_arviz coords of nothing",
        lambda: dgp.diagnostics.to_arviz(FIT, KEY, X, Y, coords={"rows": range(30)}),
        r"expected coords for some of the dimensions \['chain', 'data', .*\], got some for \['rows'\]",
    ),
    Wrong(
        "to_arviz few coords",
        lambda: dgp.diagnostics.to_arviz(FIT, KEY, X, Y, coords={"data": [1, 2]}),
        "expected coords of 'data' for each of its 30 rows, got 2 values",
    ),
    Wrong(
        "to_arviz many dims",
        lambda: dgp.diagnostics.to_arviz(FIT, KEY, X, Y, dims={"g": ["a", "b"]}),
        r"expected at most 1 names in dims\['g'\], as in \['g_inducing'\], got \['a', 'b'\]",
    ),
    Wrong(
        "to_arviz two observed sites",
        lambda: dgp.diagnostics.to_arviz(dgp.Posterior(overlapping, samples={"m": jnp.zeros(3)}), KEY, X, Y, Y),
        r"expected observed sites in the same plates or in plates of their own, got \['a', 'b'\]",
    ),
    Wrong(
        "to_arviz draws of another program",
        lambda: dgp.diagnostics.to_arviz(dgp.Posterior(deep, samples={"g": jnp.zeros((3, 8))}), KEY, X, Y),
        "got none for 'f': without one it would be drawn from its prior",
    ),
    Wrong(
        "to_arviz guide of another program",
        lambda: dgp.diagnostics.to_arviz(dgp.Posterior(deep, GUIDE, PARAMS), KEY, X, Y),
        r"sites \['f', 'g'\], got none of \['f'\]: was it made for another program",
    ),
]

RELIABILITY = [
    Wrong("khat of a fit", lambda: diagnostics.khat(FIT), "khat: expected the tree of a fit"),
    Wrong("khat of nothing", lambda: diagnostics.khat(None), "khat: expected the tree of a fit"),
    Wrong("khat of several", lambda: diagnostics.khat({"a": tree()}), "khat: expected the tree of a fit"),
    Wrong("khat of chains", lambda: diagnostics.khat(tree(sample_stats=True)), "chains have no importance weights"),
    Wrong("khat of few", lambda: diagnostics.khat(tree(24)), r"expected at least 25 weights, got shape \(24,\)"),
    Wrong("weights NaN", lambda: diagnostics.pareto_shape(np.full(50, np.nan)), "expected log weights, no NaN"),
    Wrong("weights infinite", lambda: diagnostics.pareto_shape(np.r_[np.inf, np.zeros(49)]), "no NaN or infinity"),
    Wrong("weights zero", lambda: diagnostics.pareto_shape(np.full(50, -np.inf)), "some of them finite, got others"),
    Wrong("weights, a number", lambda: diagnostics.pareto_shape(1.0), r"at least 25 weights, got shape \(\)"),
    Wrong(
        "loo of a fit",
        lambda: diagnostics.loo(FIT),
        "loo: expected a tree from dgp.diagnostics.to_arviz, got Posterior",
    ),
    Wrong(
        "loo of several",
        lambda: diagnostics.loo({"a": tree()}),
        "loo: expected a tree from dgp.diagnostics.to_arviz, got dict",
    ),
    Wrong(
        "loo of a stock tree",
        lambda: diagnostics.loo(tree(log_likelihood_target=True)),
        r"expected a tree from dgp.diagnostics.to_arviz, got one with groups \['log_likelihood_uncorrected', 'post",
    ),
    Wrong(
        "loo of an empty tree",
        lambda: diagnostics.loo(xarray.DataTree()),
        "from dgp.diagnostics.to_arviz, got DataTree",
    ),
    Wrong("loo of few", lambda: diagnostics.loo(tree(24)), "loo: expected at least 25 draws, got 24"),
    Wrong("loo site", lambda: diagnostics.loo(tree(), site="z"), r"expected site= one of \['y'\], got 'z'"),
    Wrong("loo no site", lambda: diagnostics.loo(two_sites()), r"expected site= one of \['a', 'b'\], got None"),
    Wrong("loo many", lambda: diagnostics.loo(tree(), observations=5), "as many observations as data, 4, got 5"),
    Wrong("loo none", lambda: diagnostics.loo(tree(), observations=0), "as many observations as data, 4, got 0"),
    Wrong("loo half", lambda: diagnostics.loo(tree(), observations=0.5), "as many observations as data, 4, got 0.5"),
    Wrong("loo rows", lambda: diagnostics.loo(tree(), observations=np.arange(3)), "as data, 4, got array"),
    Wrong("loo seed", lambda: diagnostics.loo(tree(), seed=KEY), "expected seed to be an integer, zero or more, got "),
    Wrong(
        "loo negative seed", lambda: diagnostics.loo(tree(), seed=-1), "expected seed to be an integer, zero or more"
    ),
    Wrong(
        "loo_moment_match of draws of a guide",
        lambda: diagnostics.loo_moment_match(SCORE, uncorrected(), FIT, KEY, X, Y),
        "expected draws that are corrected to the posterior, got a guide",
    ),
    Wrong(
        "loo_moment_match of no score",
        lambda: diagnostics.loo_moment_match(tree(), tree(), FIT, KEY, X, Y),
        r"expected a score of dgp.diagnostics.loo\(tree\), of all data, got DataTree",
    ),
    Wrong(
        "loo_moment_match of nothing",
        lambda: diagnostics.loo_moment_match(SCORE, FIT, FIT, KEY, X, Y),
        "loo_moment_match: expected a tree from dgp.diagnostics.to_arviz, got Posterior",
    ),
    Wrong(
        "loo_moment_match no key",
        lambda: diagnostics.loo_moment_match(SCORE, tree(), FIT, X, Y),
        "loo_moment_match: expected a PRNG key",
    ),
    Wrong("refits of nothing", lambda: diagnostics.refits(FIT, len, KEY, X, Y), "expected a tree from dgp.diag"),
    Wrong("refits by a fit", lambda: diagnostics.refits(tree(), FIT, KEY, X, Y), r"a function refit\(X, y\)"),
    Wrong(
        "refits of others",
        lambda: diagnostics.refits(tree(), len, KEY, X, Y),
        r"shape \(4,\) last, got 30 rows",
    ),
    Wrong("refits no key", lambda: diagnostics.refits(tree(), len, X, Y), "refits: expected a PRNG key"),
    Wrong(
        "local_khat of a tree", lambda: diagnostics.local_khat(tree(), KEY, X, Y), r"expected dgp.Posterior\(.*got Data"
    ),
    Wrong("local_khat of chains", lambda: diagnostics.local_khat(CHAINS, KEY, X, Y), "got draws of MCMC"),
    Wrong("local_khat key", lambda: diagnostics.local_khat(FIT, 1, X, Y), "local_khat: expected a PRNG key, got 1"),
    Wrong("local_khat no key", lambda: diagnostics.local_khat(FIT, X, Y), "local_khat: expected a PRNG key"),
    Wrong("local_khat without y", lambda: diagnostics.local_khat(FIT, KEY, X), "expected a program that observes data"),
    Wrong("local_khat few", lambda: diagnostics.local_khat(FIT, KEY, X, Y, num_samples=24), "at least 25, got 24"),
    Wrong(
        "local_khat no draw", lambda: diagnostics.local_khat(FIT, KEY, X, Y, num_globals=0), "num_globals to be a pos"
    ),
    Wrong(
        "local_khat guide of another program",
        lambda: diagnostics.local_khat(dgp.Posterior(deep, GUIDE, PARAMS), KEY, X, Y),
        r"got none of \['f'\]: was it made for another program",
    ),
]

COMPARE = [
    Wrong("compare list of guides", lambda: compare([GUIDE]), r'expected guides={"name": guide}.*got list'),
    Wrong("compare a guide", lambda: compare(GUIDE), r'expected guides={"name": guide}.*got InducingPoint'),
    Wrong("compare nothing", lambda: compare({}), "or mcmc=, got neither"),
    Wrong("compare a class", lambda: compare({"a": dgp.guides.InducingPoint}), "to be a guide, .* got type"),
    Wrong(
        "compare params", lambda: compare({"a": (GUIDE, PARAMS)}), "a pair of guide and SVIRunResult, or .* got tuple"
    ),
    Wrong("compare a number", lambda: compare({"a": 1}), r"expected guides\['a'\] to be a guide, .* got int"),
    Wrong(
        "compare chains as a fit", lambda: compare({"a": CHAINS}), "got draws of MCMC: pass the MCMC object as mcmc="
    ),
    Wrong("compare a model", lambda: compare(model="shallow"), "compare: expected a program, a function, got str"),
    Wrong("compare X", lambda: compare(data=X), r"expected data=\(X, y\).*got ArrayImpl"),
    Wrong("compare without y", lambda: compare(data=(X,)), r"expected data=\(X, y\)"),
    Wrong("compare a list", lambda: compare(data=[X, Y]), r"expected data=\(X, y\).*got list"),
    Wrong("compare test without y", lambda: compare(test=(X,)), "and test= of the same length"),
    Wrong("compare test X", lambda: compare(test=X[:2]), "and test= of the same length, got tuple and ArrayImpl"),
    Wrong("compare key", lambda: compare(key=0), "compare: expected a PRNG key, got 0"),
    Wrong("compare steps", lambda: compare(num_steps=0), "compare: expected num_steps to be a positive integer, got 0"),
    Wrong("compare draws", lambda: compare(num_samples=2.5), "expected num_samples to be a positive integer, got 2.5"),
    Wrong("compare K", lambda: compare(local_samples=0), "expected local_samples to be a positive integer, got 0"),
    Wrong("compare evidence", lambda: compare(evidence=-80.0), "expected evidence to be True or False, got float"),
    Wrong("compare level", lambda: compare(level=90), "expected a level between 0 and 1, got 90: 0.9 is usual"),
    Wrong("compare samples", lambda: compare(mcmc={"g": Z}), "expected mcmc to be a numpyro.infer.MCMC that has run"),
    Wrong("compare before run", lambda: compare(mcmc=SHORT), "an MCMC object that has run, got one that has not"),
    Wrong("compare a name twice", lambda: compare({"mcmc": FIT}, mcmc=SHORT), 'none of them called "mcmc"'),
]

TESTING = [
    Wrong("check_kernel of a name", lambda: testing.check_kernel("RBF", X), "kernel"),
    Wrong(
        "check_kernel inputs",
        lambda: testing.check_kernel(dgp.kernels.RBF(), Y),
        r"expected inputs of shape \(\.\.\., N",
    ),
    Wrong(
        "check_kernel one row", lambda: testing.check_kernel(dgp.kernels.RBF(), X[:1]), "at least two distinct inputs"
    ),
    Wrong("check_kernel equal rows", lambda: testing.check_kernel(dgp.kernels.RBF(), 0 * X), "1 distinct"),
    Wrong(
        "check_kernel a batch", lambda: testing.check_kernel(dgp.kernels.RBF(), X[None]), r"inputs \(N, D\), got shape"
    ),
    Wrong("check_kernel NaN", lambda: testing.check_kernel(dgp.kernels.RBF(), X * np.nan), "expected finite inputs X"),
    Wrong(
        "check_likelihood of a distribution",
        lambda: testing.check_likelihood(dist.Normal(0, 1), Y),
        "expected a function from v to a distribution, got Normal",
    ),
    Wrong(
        "check_likelihood y", lambda: testing.check_likelihood(normal, 1.0), r"of shape \(N,\) or \(N, P\), got \(\)"
    ),
    Wrong(
        "check_likelihood no y", lambda: testing.check_likelihood(normal, []), r"observations y of shape .* got \(0,\)"
    ),
    Wrong(
        "check_likelihood NaN", lambda: testing.check_likelihood(normal, Y * np.nan), "expected finite observations y"
    ),
    Wrong(
        "check_likelihood outputs", lambda: testing.check_likelihood(normal, Y, outputs=0), "outputs to be a positive"
    ),
    Wrong(
        "check_likelihood num",
        lambda: testing.check_likelihood(normal, Y, num=0),
        "num to be a positive integer, got 0",
    ),
    Wrong("check_guide of a number", lambda: check_guide(1), "expected a program and a guide of it, .* got int"),
    Wrong("check_guide without guide", lambda: check_guide(guide=X), "expected a program and a guide of it"),
    Wrong("check_guide num", lambda: check_guide(num=0), "check_guide: expected num to be a positive integer, got 0"),
    Wrong("check_guide no rows", lambda: check_guide(y=1.0), r"inputs \(N, D\) and y, got \(30, 1\) and"),
    Wrong(
        "check_guide observes nothing",
        lambda: check_guide(lambda X, y: explicit(X), lambda X, y: explicit(X)),
        "check_guide: expected a program that observes data, got none",
    ),
]

WRONG = [*FOR_MCMC, *SGHMC, *TO_ARVIZ, *RELIABILITY, *COMPARE, *TESTING]
