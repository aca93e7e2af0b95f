"""Observations with missing entries count as if the entries were dropped."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pandas as pd
import pytest
from numpyro import handlers
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal
from programs import X, Z, bound, random_params
from sizes import mostly_long

import numpyro_dgp as dgp
from numpyro_dgp import guides as G
from numpyro_dgp.functions.function_values import FunctionValues

rng = np.random.default_rng(3)
N, P = len(X), 3
Y = jnp.stack([jnp.sin(2 * X[:, 0]), jnp.cos(X[:, 0]), 0.3 * X[:, 0]], 1) + 0.1 * jnp.array(rng.normal(size=(N, P)))
KNOWN = rng.uniform(size=(N, P)) < 0.6
KNOWN[2], KNOWN[3] = False, True  # nothing of one row, all of another
OBSERVED = jnp.array(KNOWN)
GAPPY = jnp.where(OBSERVED, Y, 1e3)  # what stands in a gap must not matter
NOISE = jnp.array([0.2, 0.3, 0.4])
KEY = jax.random.key(0)


def normal(v, noise=NOISE):
    return dist.Normal(v, noise).to_event(1)


def columns(X, y=None, observed=None, batch=None, *, conditional=normal):
    f = dgp.gp("f", dgp.kernels.RBF(1.2, 0.7), dgp.Points(Z), outputs=P)
    with numpyro.plate("data", len(X), subsample_size=batch) as i:
        o = None if observed is None else observed[i]
        likelihood = dgp.Likelihood(f(X[i]), conditional, observed=o)
        numpyro.sample("y", likelihood, obs=None if y is None else y[i])


def dropped(X, y):
    """One plate per column, of the rows that it has."""
    f = dgp.gp("f", dgp.kernels.RBF(1.2, 0.7), dgp.Points(Z), outputs=P)
    for p in range(P):
        rows = np.flatnonzero(KNOWN[:, p])
        column = f(X[rows]).mix(jnp.eye(P)[p : p + 1])
        with numpyro.plate(f"data{p}", len(rows)):
            numpyro.sample(f"y{p}", dgp.Likelihood(column, partial(normal, noise=NOISE[p])), obs=y[rows, p : p + 1])


def one_by_one(X, y):
    """A function per column, and a plate per column."""
    for p in range(P):
        f, rows = dgp.gp(f"f{p}", dgp.kernels.RBF(1.2, 0.7), dgp.Points(Z)), np.flatnonzero(KNOWN[:, p])
        with numpyro.plate(f"data{p}", len(rows)):
            numpyro.sample(f"y{p}", dgp.Likelihood(f(X[rows]), partial(dist.Normal, scale=NOISE[p])), obs=y[rows, p])


def deep(X, y=None, observed=None, *, inside=False, latent=True):
    """Three outputs above a hidden layer; ``inside`` masks in the conditional, so that NumPyro drops the entries."""
    noise = numpyro.sample("noise", dist.LogNormal(-1.0, 0.3))
    wide = jnp.hstack([Z, jnp.sin(9 * Z)]) if latent else Z
    f = dgp.gp("f", dgp.kernels.RBF(0.3, 0.9), dgp.Points(wide), outputs=2)
    g = dgp.gp("g", dgp.kernels.RBF(1.2, 0.7), dgp.Points(jnp.hstack([Z, jnp.cos(7 * Z)])), outputs=P)

    def conditional(v):
        return (dist.Normal(v, noise).mask(observed) if inside else dist.Normal(v, noise)).to_event(1)

    with numpyro.plate("data", len(X)):
        h = numpyro.sample("h", f(dgp.latent("w", X, 1) if latent else X, noise=0.1))
        likelihood = dgp.Likelihood(g(h), conditional, observed=None if inside else observed)
        numpyro.sample("y", likelihood, obs=y)


# Data.


WITH_NAN = np.where(KNOWN, Y, np.nan)
DATA = {
    "numpy": WITH_NAN,
    "jax": jnp.array(WITH_NAN),
    "masked": np.ma.MaskedArray(np.asarray(Y), ~KNOWN),
    "pandas": pd.DataFrame(WITH_NAN),
    "pandas-nullable": pd.DataFrame(WITH_NAN).astype("Float64"),
    "list": np.where(KNOWN, Y, None).tolist(),
}


@pytest.mark.parametrize("data", DATA.values(), ids=DATA)
def test_gaps_in_data(data):
    y, observed = dgp.likelihoods.missing(data)
    np.testing.assert_array_equal(observed, KNOWN)
    np.testing.assert_allclose(y[KNOWN], Y[KNOWN], rtol=1e-6)
    for p in range(P):  # a number of the same column stands in the gaps
        assert np.isin(y[:, p], y[KNOWN[:, p], p]).all()


def test_gaps_in_labels_and_in_whole_columns():
    y, observed = dgp.likelihoods.missing(np.ma.MaskedArray([2, -1, 1], [False, True, False]))
    assert jnp.issubdtype(y.dtype, jnp.integer)
    assert (y.tolist(), observed.tolist()) == ([2, 2, 1], [True, False, True])
    y, observed = dgp.likelihoods.missing(np.array([[np.nan, 1.0], [np.nan, np.nan]]))
    assert (y.tolist(), observed.tolist()) == ([[0.0, 1.0], [0.0, 1.0]], [[False, True], [False, False]])
    with pytest.raises(ValueError, match="observations y to be numbers, got text"):
        dgp.likelihoods.missing(np.array(["a", "b"]))


# Densities.

VALUES = FunctionValues(jnp.array(rng.normal(size=(N, P))), jnp.array(rng.uniform(0.1, 1, (N, P))))
MIX = jnp.array([[1.0, 0.0], [0.5, 1.0], [0.3, -0.7]])
ONE_BY_ONE = {
    "normal": (lambda v: dist.Normal(v, NOISE), Y),
    "scaled-normal": (lambda v: dist.Normal(2 * v + 1, NOISE), Y),
    "poisson": (lambda v: dist.Poisson(jnp.exp(v)), jnp.round(jnp.abs(4 * Y))),
    "gamma": (lambda v: dist.Gamma(2.0, jnp.exp(v)), jnp.abs(Y) + 0.1),
    "student-t": (lambda v: dist.StudentT(4.0, v, NOISE), Y),
    "bernoulli": (lambda v: dist.Bernoulli(logits=v), jnp.array(Y > 0, int)),
}


@pytest.mark.slow
@pytest.mark.parametrize("method", ["log_prob", "log_marginal"])
@pytest.mark.parametrize("name", mostly_long(["gamma"], ONE_BY_ONE))
def test_entries_of_a_likelihood(name, method):
    """Against the sum of the densities of single entries; gradients are finite."""
    conditional, y = ONE_BY_ONE[name]
    gaps = jnp.where(OBSERVED, y, -7 if jnp.issubdtype(y.dtype, jnp.integer) else jnp.nan)

    def total(t):
        return getattr(dgp.Likelihood(VALUES, lambda v: conditional(t * v).to_event(1), observed=OBSERVED), method)(
            gaps
        )

    alone = getattr(dgp.Likelihood(FunctionValues(VALUES.loc, VALUES.variance, event_dim=0), conditional), method)(y)
    assert alone.shape == (N, P)
    np.testing.assert_allclose(total(1.0), jnp.where(OBSERVED, alone, 0).sum(1), rtol=1e-5, atol=1e-5)
    assert np.isfinite(jax.grad(lambda t: total(t).sum())(1.0))


@pytest.mark.slow
def test_ways_to_write_a_mask():
    likelihood = dgp.Likelihood(VALUES, normal)
    expected = dgp.Likelihood(VALUES, normal, observed=OBSERVED).log_prob(GAPPY)
    np.testing.assert_allclose(likelihood.mask(OBSERVED).log_prob(GAPPY), expected)
    with handlers.seed(rng_seed=0), handlers.trace() as sites, handlers.mask(mask=OBSERVED), numpyro.plate("data", N):
        numpyro.sample("y", likelihood, obs=GAPPY)
    np.testing.assert_allclose(sites["y"]["fn"].log_prob(GAPPY), expected)
    inside = dgp.Likelihood(VALUES, lambda v: dist.Normal(v, NOISE).mask(OBSERVED).to_event(1))
    np.testing.assert_allclose(inside.log_prob(GAPPY), expected, rtol=1e-5)
    for mask in (KNOWN, KNOWN.tolist(), pd.DataFrame(WITH_NAN).notna()):
        np.testing.assert_allclose(dgp.Likelihood(VALUES, normal, observed=mask).log_prob(GAPPY), expected)
    whole, twice = OBSERVED.all(1), OBSERVED & (jnp.arange(P) > 0)
    for one in (
        dgp.Likelihood(VALUES, normal, observed=whole),
        likelihood.mask(whole),
        likelihood.mask(whole[:, None]),
    ):
        np.testing.assert_allclose(one.log_prob(Y), jnp.where(whole, likelihood.log_prob(Y), 0))
    both = dgp.Likelihood(VALUES, normal, observed=OBSERVED).mask(jnp.broadcast_to(jnp.arange(P) > 0, (N, P)))
    np.testing.assert_allclose(both.log_prob(Y), dgp.Likelihood(VALUES, normal, observed=twice).log_prob(Y))


@pytest.mark.long
def test_entries_of_mixtures():
    """Marginal densities see the correlations of the columns that are there: against dense Gaussians."""
    mixed = FunctionValues(VALUES.loc[:, :2], VALUES.variance[:, :2]).mix(MIX)
    joint = dgp.Likelihood(mixed, normal)
    dense, found = mixed.observed(*joint.normal(mixed.loc)), joint.mask(OBSERVED).log_marginal(GAPPY)
    loc, covariance = np.asarray(dense.loc), np.asarray(dense.covariance_matrix)
    for n, o in enumerate(KNOWN):
        S, residual = covariance[n][np.ix_(o, o)], (np.asarray(Y) - loc)[n, o]
        expected = -0.5 * (residual @ np.linalg.solve(S, residual) + np.linalg.slogdet(2 * np.pi * S)[1])
        np.testing.assert_allclose(found[n], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.long
def test_a_conditional_that_mixes_outputs():
    """Entries of a conditional that is integrated by draws, and whole rows of one with a single density."""
    rule = dgp.likelihoods.MonteCarlo(5, jax.random.key(1))
    likelihood = dgp.Likelihood(VALUES, lambda v: normal(v @ MIX, NOISE[:2]), integrate=rule)
    found = likelihood.mask(OBSERVED[:, :2]).log_prob(GAPPY[:, :2])
    draws = jax.vmap(lambda v: dist.Normal(v @ MIX, NOISE[:2]).log_prob(Y[:, :2]))(
        likelihood.rule.nodes(VALUES.loc, VALUES.variance).points
    )
    np.testing.assert_allclose(found, jnp.where(OBSERVED[:, :2], draws, 0).sum(-1).mean(0), rtol=1e-5)
    one = partial(dgp.Likelihood, VALUES, lambda v: dist.MultivariateNormal(v, jnp.eye(P)), integrate=rule)
    kept = OBSERVED.all(1)
    np.testing.assert_allclose(one(observed=kept).log_prob(GAPPY)[kept], one().log_prob(Y)[kept], rtol=1e-5)
    assert (one(observed=kept).log_prob(GAPPY)[~kept] == 0).all()
    with pytest.raises(ValueError, match=r"of shape \(30,\), one per row, for MultivariateNormal.*f\(x\).mix"):
        one(observed=OBSERVED)


@pytest.mark.long
def test_own_integrals():
    classes = dgp.Likelihood(VALUES, dgp.likelihoods.RobustMax)
    labels, kept = jnp.arange(N) % P, OBSERVED[:, 0]
    masked = dgp.Likelihood(VALUES, dgp.likelihoods.RobustMax, observed=kept)
    for method in ("log_prob", "log_marginal"):
        found = getattr(masked, method)(jnp.where(kept, labels, -1))
        np.testing.assert_allclose(found, jnp.where(kept, getattr(classes, method)(labels), 0))


@pytest.mark.parametrize(
    ("observed", "says"),
    [
        (jnp.ones((N, P)), "observed as booleans, True where y has a value, got float.*dgp.likelihoods.missing"),
        (jnp.ones((N + 1, P), bool), r"observed of shape \(30, 3\), one number per entry.* got \(31, 3\): index it"),
        (jnp.ones(P, bool), r"or \(30,\), one per row, got \(3,\)"),
        (jnp.ones((2, N, P), bool), r"the rows of the observations, shape \(30, 3\), got \(2, 30, 3\)"),
    ],
    ids=["numbers", "rows", "columns", "replicates"],
)
def test_wrong_masks(observed, says):
    with pytest.raises(ValueError, match=says):
        dgp.Likelihood(VALUES, normal, observed=observed).log_prob(Y)


@pytest.mark.slow
def test_checks_see_what_is_observed():
    counts = dgp.Likelihood(VALUES, lambda v: dist.Poisson(jnp.exp(v)).to_event(1), observed=OBSERVED)
    counts.log_prob(jnp.where(OBSERVED, 1, -1))
    with pytest.raises(ValueError, match="expected observations y from 0, got -1"):
        counts.log_prob(jnp.where(OBSERVED, -1, 1))
    with pytest.raises(ValueError, match=r"expected finite observations y.*dgp.likelihoods.missing\(y\)"):
        counts.log_prob(jnp.full((N, P), jnp.nan))


# Bounds.


@pytest.mark.long
def test_bound_of_one_layer():
    guide, reference = G.InducingPoint(columns), G.InducingPoint(dropped)
    root = jnp.tril(0.5 * jnp.eye(len(Z)) + 0.1 * jax.random.normal(KEY, (P, len(Z), len(Z))))
    params = {"f_auto_loc": jax.random.normal(KEY, (P, len(Z))), "f_auto_scale_tril": root}
    expected = bound(dgp.ELBO(), params, dropped, reference, X, Y)
    np.testing.assert_allclose(bound(dgp.ELBO(), params, columns, guide, X, GAPPY, OBSERVED), expected, rtol=1e-5)


@pytest.mark.long
def test_optimum_of_one_layer():
    """Collapsed, and one natural step of size one, against a function per column."""
    expected = float(bound(dgp.ELBO(), {}, one_by_one, G.Collapsed(one_by_one), X, Y))
    np.testing.assert_allclose(bound(dgp.ELBO(), {}, columns, G.Collapsed(columns), X, GAPPY, OBSERVED), expected, 1e-5)
    guide = G.InducingPoint(columns)
    svi = SVI(columns, guide, dgp.optim.NaturalGradient(guide, 1.0, optax.sgd(0.0)), dgp.ELBO())
    state, _ = svi.update(svi.init(KEY, X, GAPPY, OBSERVED), X, GAPPY, OBSERVED)
    params = svi.get_params(state)
    np.testing.assert_allclose(bound(dgp.ELBO(), params, columns, guide, X, GAPPY, OBSERVED), expected, 1e-4)


def uncertain(X, y, observed, together):
    """Outputs of one function of a latent with gaps of their own, or a function per output with masked rows."""
    wide = dgp.Points(jnp.hstack([Z, jnp.sin(9 * Z)]))
    functions = [dgp.gp(f"g{p}", dgp.kernels.RBF(1.2, 0.7), wide, outputs=P if together else None)
                 for p in range(1 if together else P)]  # fmt: skip
    with numpyro.plate("data", len(X)):
        x = dgp.latent("w", X, 1)
        if together:
            numpyro.sample("y", dgp.Likelihood(functions[0](x), normal, observed=observed), obs=y)
            return
        for p, g in enumerate(functions):
            column = dgp.Likelihood(g(x), partial(dist.Normal, scale=NOISE[p])).mask(observed[:, p])
            numpyro.sample(f"y{p}", column, obs=y[:, p])


@pytest.mark.long
def test_optimum_above_gaussian_inputs():
    values = []
    for program in (partial(uncertain, together=True), partial(uncertain, together=False)):
        guide = G.Collapsed(program)
        svi = SVI(program, guide, optax.sgd(0.0), dgp.ELBO())
        params = svi.get_params(svi.init(KEY, X, GAPPY, OBSERVED))
        params |= {"w_auto_loc": 0.3 * jnp.ones((N, 1)), "w_auto_scale": 0.2 * jnp.ones((N, 1))}
        values.append(bound(dgp.ELBO(), params, program, guide, X, GAPPY, OBSERVED))
    np.testing.assert_allclose(*values, rtol=1e-5)


GUIDES = {
    "inducing-point": G.InducingPoint,
    "diagonal": partial(G.InducingPoint, inducing=G.Diagonal()),
    "low-rank": partial(G.InducingPoint, inducing=G.LowRank(2)),
    "mixture": partial(G.InducingPoint, inducing=G.MixtureOfGaussians(2)),
    "markov": partial(G.InducingPoint, sites={"g": G.MarkovInducing()}),
    "joint-outputs": partial(G.InducingPoint, sites={"h": G.JointOutputs()}),
    "given-inducing": partial(G.InducingPoint, sites={"h": G.GivenInducing()}),
    "given-below": partial(G.InducingPoint, sites={"h": G.GivenBelow()}),
    "normal-hyperparameters": partial(G.InducingPoint, other=G.Normal()),
    "mean-field": G.MeanField,
    "amortised": partial(G.InducingPoint, latent=G.Amortised(hidden=(5,))),
    "importance-weighted": partial(G.ImportanceWeighted, num_samples=3),
    "doubly-reparameterised": partial(G.ImportanceWeighted, num_samples=3, doubly_reparameterised=True),
    "quadrature": partial(G.InducingPoint, latent=G.Quadrature(4)),
    "global-inducing": partial(G.InducingPoint, inducing=G.GlobalInducing(6)),
    "autoguide-hyperparameters": partial(G.InducingPoint, other=AutoNormal),
    "stock-auto-normal": AutoNormal,
}
OBJECTIVES = {"elbo": dgp.ELBO(), "numpyro": Trace_ELBO()}


def same_bound(guide, objective, latent=True):
    model, inside = partial(deep, latent=latent), partial(deep, inside=True, latent=latent)
    # NumPyro's mask takes a number from the support wherever it leaves one out.
    reference, tested = guide(inside), guide(model)
    filled = jnp.where(OBSERVED, Y, 0.0)
    SVI(inside, reference, optax.sgd(0.0), objective).init(KEY, X, filled, OBSERVED)
    svi = SVI(model, tested, optax.sgd(0.0), objective)
    params = svi.get_params(svi.init(KEY, X, GAPPY, OBSERVED))
    expected = bound(objective, params, inside, reference, X, filled, OBSERVED)
    np.testing.assert_allclose(bound(objective, params, model, tested, X, GAPPY, OBSERVED), expected, rtol=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("name", GUIDES)
def test_every_guide(name):
    same_bound(GUIDES[name], dgp.ELBO())


@pytest.mark.long
@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective(name):
    same_bound(G.InducingPoint, OBJECTIVES[name], latent=False)


def minibatch_bounds(params, guide, batches):
    for i in batches:
        program = dgp.minibatch(columns, data=N)
        yield bound(dgp.ELBO(), params, program, dgp.minibatch(guide, data=N), X[i], GAPPY[i], OBSERVED[i])


@pytest.mark.long
def test_minibatches():
    """Their mean over a partition of the rows is the bound of all; the rows of a plate pick those of the mask."""
    guide = G.InducingPoint(columns)
    params = random_params(columns, guide, X, Y)
    whole = bound(dgp.ELBO(), params, columns, guide, X, GAPPY, OBSERVED)
    parts = jnp.array(list(minibatch_bounds(params, guide, np.arange(N).reshape(5, 6))))
    np.testing.assert_allclose(parts.mean(), whole, rtol=1e-5)
    draw = jax.jit(lambda k: bound(dgp.ELBO(), params, columns, guide, X, GAPPY, OBSERVED, 6, key=k))
    picked = jax.lax.map(draw, jax.random.split(KEY, 400), batch_size=100)
    assert abs(picked.mean() - whole) < 4 * picked.std() / 20


def latents(X, y=None, observed=None):
    g = dgp.gp("g", dgp.kernels.RBF(1.2, 0.7), dgp.Points(jnp.hstack([Z, jnp.sin(9 * Z)])))
    with numpyro.plate("data", len(X)):
        likelihood = dgp.Likelihood(g(dgp.latent("w", X, 1)), lambda v: dist.Normal(v, 0.3), observed=observed)
        numpyro.sample("y", likelihood, obs=y)


@pytest.mark.long
def test_rows_with_integrated_latents():
    """With quadrature a row without y contributes exactly nothing: against dropping it."""
    guide, kept = G.InducingPoint(latents, latent=G.Quadrature(6)), OBSERVED[:, 0]
    params = random_params(latents, guide, X, Y[:, 0])
    expected = bound(dgp.ELBO(), params, latents, guide, X[kept], Y[kept, 0])
    np.testing.assert_allclose(bound(dgp.ELBO(), params, latents, guide, X, GAPPY[:, 0], kept), expected, rtol=1e-5)


SEVERAL = {
    "normal": lambda v, s: dist.Normal(v, jnp.exp(s)),
    "softplus": lambda v, s: dist.Normal(v, jax.nn.softplus(s)),
    "student-t": lambda v, s: dist.StudentT(4.0, v, jnp.exp(s)),
}


@pytest.mark.long
@pytest.mark.parametrize("name", SEVERAL)
def test_entries_given_several_functions(name):
    """Columns whose mean and scale come from two layers, against the densities of single entries."""
    conditional, values = SEVERAL[name], (VALUES.loc, VALUES.variance)
    wide = (FunctionValues(*values), FunctionValues(*values))
    single = tuple(FunctionValues(*values, event_dim=0) for _ in wide)
    masked = dgp.Likelihood(wide, lambda v, s: conditional(v, s).to_event(1), observed=OBSERVED)
    alone = dgp.Likelihood(single, conditional)
    for method in ("log_prob", "log_marginal"):
        expected = jnp.where(OBSERVED, getattr(alone, method)(Y), 0).sum(1)
        np.testing.assert_allclose(getattr(masked, method)(GAPPY), expected, rtol=1e-5, atol=1e-5)
    rows = dgp.Likelihood(wide, lambda v, s: conditional(v, s).to_event(1), observed=OBSERVED.all(1))
    assert (rows.log_prob(GAPPY)[~OBSERVED.all(1)] == 0).all()
