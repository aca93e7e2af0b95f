"""Inducing values with a diagonal and low-rank covariance: the same numbers as a dense Gaussian of that covariance."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from dense import kl, log_normal
from numpyro import handlers
from numpyro.distributions import kl_divergence
from numpyro.infer import SVI, Trace_ELBO
from programs import NOISE, X, Y, Z, agree, bound, deep, draws_of_bound, shallow, sizes
from sizes import mostly_long

import numpyro_dgp as dgp
from numpyro_dgp import guides as G
from numpyro_dgp.functions.weights import FullBelief, InducingPrior
from numpyro_dgp.guides.rules.low_rank_inducing import LowRankBelief

rng = np.random.default_rng(0)
RBF = dgp.kernels.RBF(1.2, 0.7)


def both(y):
    """Two columns of labels."""
    return None if y is None else jnp.stack([y > 0, y > 0.5], -1).astype(int)


def grid(X, y=None):
    f = dgp.gp("g", RBF, dgp.Grid(-3.0, 3.0, 12))
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dgp.Likelihood(f(X), lambda v: dist.Normal(v, NOISE)), obs=y)


def two_outputs(X, y=None):
    lengthscale = numpyro.param("lengthscale", 0.9)
    f = dgp.gp("g", dgp.kernels.RBF(1.2, lengthscale), dgp.Points(Z), outputs=2)
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dgp.Likelihood(f(X), lambda v: dist.Bernoulli(logits=v).to_event(1)), obs=both(y))


def separate(X, y=None):
    """Outputs with features of their own."""
    f = dgp.gp("g", (RBF, dgp.kernels.Matern52()), dgp.Points(Z), outputs=2)
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dgp.Likelihood(f(X), lambda v: dist.Bernoulli(logits=v).to_event(1)), obs=both(y))


def random(shape, rank):
    scale = rng.uniform(0.3, 1.0, shape) * rng.choice([-1, 1], shape)
    return jnp.array(rng.normal(size=shape)), jnp.array(scale), jnp.array(0.5 * rng.normal(size=(*shape, rank)))


def dense(loc, scale, factor, precision):
    """The Gaussian of the same covariance with a triangular factor."""
    inside = factor @ factor.mT + jnp.eye(scale.shape[-1])
    inside = jnp.linalg.inv(inside) if precision else inside
    return FullBelief(loc, jnp.linalg.cholesky(scale[..., None] * inside * scale[..., None, :]))


@pytest.mark.long
@pytest.mark.parametrize(
    "case", mostly_long([((3, 5), 2, True)], [((3, 5), 2, True), ((6,), 1, False), ((6,), 2, True), ((2, 3), 7, False)])
)
def test_a_belief_is_the_dense_gaussian(case):
    shape, rank, precision = case
    q = LowRankBelief(*random(shape, rank), precision)
    full, M = dense(q.loc, q.scale, q.factor, precision), shape[-1]
    close = partial(np.testing.assert_allclose, rtol=1e-10, atol=1e-10)
    P = shape[0] if len(shape) == 2 else 1
    for A in (jnp.array(rng.normal(size=(4, M))), jnp.array(rng.normal(size=(P, 4, M)))):
        close(q.feature_variance(A), full.feature_variance(A))
        close(q.feature_covariance(A), full.feature_covariance(A))
    close(q.variance, full.variance)
    close(kl_divergence(q, InducingPrior(shape, q.loc.dtype)), kl_divergence(full, InducingPrior(shape, q.loc.dtype)))
    S = np.asarray(full.covariance).reshape(P, M, M)
    m, v = np.asarray(q.loc).reshape(P, M), rng.normal(size=shape)
    zero = np.zeros(M), np.eye(M)
    close(kl_divergence(q, InducingPrior(shape, q.loc.dtype)), sum(kl(*pair, *zero) for pair in zip(m, S, strict=True)))
    close(q.log_prob(jnp.array(v)), sum(map(log_normal, v.reshape(P, M), m, S)))
    # A draw is affine in standard normal numbers, with a root of the covariance.
    root = jax.jacobian(q.from_white)(jnp.zeros(shape)).reshape(P, M, P, M)
    for p in range(P):
        close(root[p, :, p] @ root[p, :, p].T, S[p])
        assert not np.delete(root[p], p, 1).any()
    draw, white = q.sample_with_intermediates(jax.random.key(0))
    close(q.log_prob(draw, white), q.log_prob(draw))


@pytest.mark.slow
@pytest.mark.parametrize("of", mostly_long(["precision"], ["precision", "covariance"]))
@pytest.mark.parametrize("model", mostly_long([two_outputs], [shallow, two_outputs, separate, grid]))
def test_bound_and_gradient_are_those_of_the_dense_gaussian(model, of):
    low, full = (G.InducingPoint(model, inducing=rule) for rule in (G.LowRank(3, of), G.Full()))
    shape = {"shallow": (8,), "grid": (12,)}.get(model.__name__, (2, 8))
    loc, scale, factor = random(shape, 3)

    def ours(p):
        values = {f"g_auto_{name}": p[name] for name in ("loc", "scale", "factor")}
        return bound(dgp.ELBO(), values | {"lengthscale": p["lengthscale"]}, model, low, X, Y)

    def theirs(p):
        q = dense(p["loc"], p["scale"], p["factor"], of == "precision")
        values = {"g_auto_loc": q.loc, "g_auto_scale_tril": q.scale_tril, "lengthscale": p["lengthscale"]}
        return bound(dgp.ELBO(), values, model, full, X, Y)

    params = {"loc": loc, "scale": scale, "factor": factor, "lengthscale": jnp.array(0.8)}
    (one, by_one), (two, by_two) = (jax.jit(jax.value_and_grad(f))(params) for f in (ours, theirs))
    np.testing.assert_allclose(one, two, rtol=1e-10)
    for name in params:
        np.testing.assert_allclose(by_one[name], by_two[name], rtol=1e-8, atol=1e-8)


def start(guide):
    """Initial parameters."""
    with handlers.trace() as sites, handlers.seed(rng_seed=0):
        guide(X, Y)
    return {name: site["value"] for name, site in sites.items() if site["type"] == "param"}


@pytest.mark.long
def test_the_start_is_almost_diagonal_and_every_column_moves():
    guide = G.InducingPoint(shallow, inducing=G.LowRank(3))
    params = start(guide)
    F = params["g_auto_factor"]
    np.testing.assert_allclose(F.T @ F, 0.01 * jnp.eye(3), atol=1e-12)
    gradient = jax.jit(jax.grad(lambda p: bound(dgp.ELBO(), p, shallow, guide, X, Y)))
    assert (abs(gradient(params)["g_auto_factor"]).max(0) > 1e-3).all()
    at_zero = gradient(params | {"g_auto_factor": 0 * F})["g_auto_factor"]
    np.testing.assert_allclose(at_zero, 0, atol=1e-12)


@pytest.mark.long
def test_the_start_of_an_inner_layer():
    inner = start(G.InducingPoint(deep, inducing=G.LowRank(2)))
    np.testing.assert_allclose(inner["f_auto_scale"], 1e-2)
    np.testing.assert_allclose(jnp.linalg.norm(inner["f_auto_factor"], axis=1), 0.1)


@pytest.mark.slow
def test_no_square_matrix():
    """On a grid, where the representation needs none."""

    def model(X, y):
        f = dgp.gp("g", RBF, dgp.Grid(-3.0, 3.0, 1024))
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dgp.Likelihood(f(X), lambda v: dist.Normal(v, NOISE)), obs=y)

    guide = G.InducingPoint(model, inducing=G.LowRank(3))
    params = {"g_auto_loc": jnp.zeros(1024), "g_auto_scale": jnp.ones(1024), "g_auto_factor": jnp.ones((1024, 3))}
    closed = jax.make_jaxpr(jax.grad(lambda p: dgp.ELBO().loss(jax.random.key(0), p, model, guide, X, Y)))(params)
    assert max(sizes(closed.jaxpr)) < 1024**2 / 4


@pytest.mark.long
def test_predictions_and_whole_functions():
    guide = G.InducingPoint(deep, inducing=G.LowRank(2))
    posterior = dgp.Posterior(deep, guide, start(guide))
    assert np.isfinite(posterior.using(num_samples=3).predict(jax.random.key(0), X[:4]).mean).all()
    assert posterior.using(num_samples=2).functions(jax.random.key(0))(X[:4])["h"].shape == (2, 4, 1)


@pytest.mark.long
def test_natural_gradients_are_refused():
    from numpyro_dgp.optim import NaturalGradient

    guide = G.InducingPoint(shallow, inducing=G.LowRank(2))
    svi = SVI(shallow, guide, NaturalGradient(guide, 0.1, optax.adam(0.01)), dgp.ELBO())
    with pytest.raises(ValueError, match=r"the guide has none: give the site guides\.Full"):
        svi.run(jax.random.key(0), 1, X, Y, progress_bar=False)


@pytest.mark.long
def test_single_precision():
    """With the small scale of an inner layer, to the digits that single precision has."""
    shape, ones = (2, 6), jnp.ones((2, 6), jnp.float32)
    q = LowRankBelief(ones, 1e-4 * ones, jnp.stack([0.1 * ones, 0.3 * ones.at[:, 0].set(0)], -1), True)
    draw, white = q.sample_with_intermediates(jax.random.key(0))
    found = q.log_prob(draw, white), kl_divergence(q, InducingPrior(shape, draw.dtype))
    assert {value.dtype for value in (draw, *found, q.feature_variance(ones))} == {jnp.dtype("float32")}
    exact = LowRankBelief(*(a.astype(jnp.float64) for a in (q.loc, q.scale, q.factor)), True)
    np.testing.assert_allclose(found[0], exact.log_prob(draw, white), rtol=1e-5)
    np.testing.assert_allclose(found[1], kl_divergence(exact, InducingPrior(shape, jnp.float64)), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: G.LowRank(0), "LowRank: expected rank to be a positive integer, got 0"),
        (lambda: G.LowRank(2, of="both"), "expected of to be 'precision' or 'covariance', got 'both'"),
        (lambda: G.LowRank(2, scale=0.0), "LowRank: expected scale to be positive"),
        (lambda: G.InducingPoint(deep, sites={"h": G.LowRank(2)})(X, Y), "expected site 'h' to be inducing values"),
    ],
)
def test_wrong_calls(make, message):
    with handlers.seed(rng_seed=0), pytest.raises(ValueError, match=message):
        make()


@pytest.mark.long
def test_same_bound_as_with_everything_drawn():
    guide = G.InducingPoint(deep, inducing=G.LowRank(2))
    params = start(guide)
    params = {n: v + 0.2 * jax.random.normal(jax.random.key(i), v.shape) for i, (n, v) in enumerate(params.items())}
    ours = draws_of_bound(dgp.ELBO(), params, deep, guide, X, Y)
    assert agree(ours, draws_of_bound(Trace_ELBO(), params, deep, guide, X, Y, num=3000))


@pytest.mark.long
def test_a_higher_rank_is_closer_to_the_optimum():
    """Adam on one layer: between the independent and the full Gaussian, in the order of the ranks."""

    def fitted(rule):
        guide = G.InducingPoint(shallow, inducing=rule)
        svi = SVI(shallow, guide, optax.adam(optax.cosine_decay_schedule(0.05, 3000)), dgp.ELBO())
        return -svi.run(jax.random.key(0), 3000, X, Y, progress_bar=False).losses[-1]

    rules = G.Diagonal(), G.LowRank(2), G.LowRank(4), G.LowRank(8)
    bounds = [fitted(rule) for rule in rules]
    assert (np.diff(bounds) > 0).all()
    assert abs(bounds[-1] - fitted(G.Full())) < 0.1
