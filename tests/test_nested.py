"""Nested variational compression: the guide against quadrature, against its own draws, and below the evidence."""

from functools import partial

import dense
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax.scipy.special import logsumexp
from numpyro import handlers
from numpyro.infer import SVI, Predictive
from programs import agree, bound, draws_of_bound, random_params, shallow
from test_collapsed_following import PROGRAMS, sampled_bound, value

import numpyro_dgp as dgp
from numpyro_dgp import guides as G
from numpyro_dgp import kernels as k
from numpyro_dgp.math.quadrature import white_nodes

rng = np.random.default_rng(0)
N, M = 7, 4
X = jnp.array(rng.normal(size=(N, 1)))
Y = jnp.array(rng.normal(size=(N, 2)))
POINTS = [jnp.array(rng.normal(size=(M, D))) for D in (1, 2, 2)]
KERNELS = [k.RBF(0.8, 0.9), k.RBF(0.6, 1.1) + k.Linear(0.2), k.RBF(1.2, 0.8)]
MEANS = [
    dgp.means.LinearMean(jnp.array([[1.0, -0.5]]), jnp.array([0.1, 0.3])),
    dgp.means.LinearMean(jnp.array(rng.normal(size=(2, 2))), 0.2),
    dgp.means.ConstantMean(0.1),
]
NOISE = [0.4, 0.5, 0.6]


def program(depth, X, y=None, batch=None):
    """The first layers of three, and the last one."""
    which = [*range(depth - 1), 2] if depth > 1 else [0]
    functions = [
        dgp.gp(f"f{i}", KERNELS[i], dgp.Points(POINTS[i].astype(X.dtype)), outputs=2, mean=MEANS[i]) for i in which
    ]
    with numpyro.plate("data", len(X), subsample_size=batch) as rows:
        h = X[rows]
        for i, f in zip(which, functions[:-1], strict=False):
            h = numpyro.sample(f"h{i}", f(h, noise=NOISE[i]))
        conditional = lambda v: dist.Normal(v, NOISE[which[-1]]).to_event(1)  # noqa: E731
        numpyro.sample("y", dgp.Likelihood(functions[-1](h), conditional), obs=None if y is None else y[rows])


def by_quadrature(depth, params):
    """The bound with expectations over hidden values by Gauss-Hermite nodes, and dense matrices."""
    which = [*range(depth - 1), 2] if depth > 1 else [0]
    total, loc, variance = 0.0, np.asarray(X), np.zeros((N, 1))
    for i in which:
        m, R = params[f"f{i}_auto_loc"], np.tril(params[f"f{i}_auto_scale_tril"])
        S = R @ np.swapaxes(R, 1, 2)
        total -= sum(dense.kl(m[p], S[p], np.zeros(M), np.eye(M)) for p in range(2))
        white, log_weights = white_nodes(dgp.likelihoods.GaussHermite(40), loc.shape[1], jnp.float64)
        w = np.exp(log_weights)
        L = np.linalg.cholesky(
            np.asarray(KERNELS[i].gram(POINTS[i])) + 1e-10 * KERNELS[i].diag(POINTS[i]).mean() * np.eye(M)
        )
        means, variances = np.zeros((N, 2)), np.zeros((N, 2))
        for n in range(N):
            h = loc[n] + np.asarray(white) * np.sqrt(variance[n])
            a = np.linalg.solve(L, KERNELS[i](POINTS[i], h)).T
            left = w @ (KERNELS[i].diag(h) - (a**2).sum(1))
            prior = np.asarray(MEANS[i](h)) * np.ones((1, 2))
            for p in range(2):
                g = prior[:, p] + a @ m[p]
                second = w @ g**2 + np.trace(a.T @ (w[:, None] * a) @ S[p])  # E g(h)^2 over h and v
                if i == which[-1]:
                    y = Y[n, p]
                    square = y**2 - 2 * y * (w @ g) + second + left
                    total -= 0.5 * square / NOISE[i] ** 2 + np.log(np.sqrt(2 * np.pi) * NOISE[i])
                    continue
                centre = w @ a
                means[n, p], of_v = w @ g, centre @ S[p] @ centre
                total -= 0.5 * (left + second - means[n, p] ** 2 - of_v) / NOISE[i] ** 2
                variances[n, p] = of_v + NOISE[i] ** 2
        loc, variance = means, variances
    return total


RULES = {"full": G.Full(), "diagonal": G.Diagonal(), "low rank": G.LowRank(2)}


def dense_factors(params):
    """The parameters of any rule as those of ``Full()``."""
    found = {}
    for name, loc in params.items():
        if not name.endswith("_loc"):
            continue
        stem = name.removesuffix("_loc")
        if f"{stem}_scale_tril" in params:
            root = params[f"{stem}_scale_tril"]
        else:
            D = jnp.eye(M) * params[f"{stem}_scale"][..., None]
            F = params.get(f"{stem}_factor", jnp.zeros((2, M, 1)))
            root = jnp.linalg.cholesky(D @ jnp.linalg.inv(jnp.eye(M) + F @ F.mT) @ D)
        found |= {name: loc, f"{stem}_scale_tril": root}
    return found


@pytest.mark.slow
def test_against_quadrature():
    model = partial(program, 2)
    guide = G.Nested(model)
    params = random_params(model, guide, X, Y)
    np.testing.assert_allclose(bound(dgp.ELBO(), params, model, guide, X, Y), by_quadrature(2, params), rtol=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("rule", list(RULES))
@pytest.mark.parametrize("depth", [1, 3])
def test_every_gaussian_against_quadrature(depth, rule):
    model = partial(program, depth)
    guide = G.Nested(model, inducing=RULES[rule])
    params = random_params(model, guide, X, Y)
    reference = by_quadrature(depth, dense_factors(params))
    np.testing.assert_allclose(bound(dgp.ELBO(), params, model, guide, X, Y), reference, rtol=1e-8)


def test_one_layer_is_that_of_inducing_points():
    guides = G.Nested(shallow), G.InducingPoint(shallow)
    params = random_params(shallow, guides[0], X, Y[:, 0])
    np.testing.assert_allclose(*(bound(dgp.ELBO(), params, shallow, g, X, Y[:, 0]) for g in guides), rtol=1e-10)


@pytest.mark.long
@pytest.mark.parametrize("name", ["two layers", "three layers", "scalar", "per output"])
def test_draws_of_the_guide_have_this_bound(name):
    """With masks, scales, affine observations, data beside hidden values and a kernel per output."""
    model, guide = PROGRAMS[name][0], G.Nested(PROGRAMS[name][0])
    from test_collapsed_following import X, Y

    params = random_params(model, guide, X, Y)
    draws = sampled_bound(model, guide, params)
    assert abs(draws.mean() - value(model, guide, params)) < 4 * draws.std() / np.sqrt(len(draws))


@pytest.mark.slow
def test_below_the_evidence():
    """Evidence by brute force: hidden values from their exact prior, likelihood with the last function integrated."""
    x, y = X[:3], jnp.sin(2 * X[:3, 0])
    first, last, points = k.RBF(0.8, 0.9), k.RBF(1.2, 0.8), dgp.Points(jnp.linspace(-2, 2, M)[:, None])

    def model(x, y=None):
        f = dgp.gp("f", first, points, outputs=1, mean=dgp.means.IdentityMean())
        g = dgp.gp("g", last, points)
        with numpyro.plate("data", len(x)):
            h = numpyro.sample("h", f(x, noise=0.4))
            numpyro.sample("y", dgp.Likelihood(g(h), lambda v: dist.Normal(v, 0.6)), obs=y)

    K = np.asarray(first.gram(x)) + 0.4**2 * np.eye(3)

    def log_likelihood(key):
        h = x + jnp.linalg.cholesky(K) @ jax.random.normal(key, (3, 1))
        C = last.gram(h) + 0.6**2 * jnp.eye(3)
        return jax.scipy.stats.multivariate_normal.logpdf(y, jnp.zeros(3), C)

    logs = jax.vmap(log_likelihood)(jax.random.split(jax.random.key(0), 100_000))
    evidence = logsumexp(logs) - np.log(len(logs))
    best = -dgp.optim.minimize(model, G.Nested(model), jax.random.key(0), x, y, progress_bar=False).losses[-1]
    assert evidence - 2.5 < best < evidence


@pytest.mark.slow
def test_minibatches():
    """Every term is a sum over data: the mean over batches is the bound of all rows."""
    model = partial(program, 3)
    guide = G.Nested(model)
    params = random_params(model, guide, X, Y)
    draws = draws_of_bound(dgp.ELBO(), params, model, guide, X, Y, 2, num=1000)
    assert agree(draws, np.full(2, bound(dgp.ELBO(), params, model, guide, X, Y)))
    assert len(np.unique(np.round(draws, 8))) == 21  # pairs of 7 rows: guide and model see the same ones


def with_latents(X, y=None):
    """A latent and a hyperparameter with posteriors, and a kernel without closed forms."""
    scale = numpyro.sample("scale", dist.LogNormal(0.0, 0.2))
    f = dgp.gp("f", k.RBF(scale, 0.9), dgp.Points(POINTS[1]), outputs=2)
    g = dgp.gp("g", k.Matern52(1.0, 1.5), dgp.Points(POINTS[2]))
    with numpyro.plate("data", len(X)):
        h = numpyro.sample("h", f(dgp.latent("w", X, 1), noise=0.4))
        numpyro.sample("y", dgp.Likelihood(g(h), lambda v: dist.Normal(v, 0.5)), obs=y)


@pytest.mark.slow
def test_latents_and_hyperparameters():
    """The divergence of the latents is in the bound, and their values are those that it was computed at."""
    guide = G.Nested(with_latents, other=G.Normal(), integrate=dgp.likelihoods.GaussHermite(20))
    params = random_params(with_latents, guide, X, Y[:, 0])
    found = draws_of_bound(dgp.ELBO(), params, with_latents, guide, X, Y[:, 0], num=500)

    def draw(key):
        with handlers.seed(rng_seed=key), handlers.substitute(data=params), handlers.trace() as q:
            guide(X, Y[:, 0])
        values = {n: s["value"] for n, s in q.items() if s["type"] == "sample"}
        with handlers.seed(rng_seed=0), handlers.substitute(data=values), handlers.trace() as p:
            with_latents(X, Y[:, 0])
        f, y = (s["fn"] for s in (p["h"], p["y"]))
        left = f.conditional_variance - 0.4**2
        total = (dist.Normal(f.loc, 0.4).log_prob(values["h"]) - 0.5 * left / 0.4**2).sum() - q["h"]["fn"].log_prob(
            values["h"]
        ).sum()
        for name in ("scale", "f", "g", "w"):
            total += (p[name]["fn"].log_prob(values[name])).sum() - q[name]["fn"].log_prob(values[name]).sum()
        return total + y.log_prob(Y[:, 0]).sum()

    assert agree(found, jax.lax.map(draw, jax.random.split(jax.random.key(1), 4000)))


@pytest.mark.parametrize(
    "dtype", [pytest.param(jnp.float32, marks=pytest.mark.slow), pytest.param(jnp.float64, marks=pytest.mark.long)]
)
def test_fit_and_predict(dtype):
    model, x, y = partial(program, 2), X.astype(dtype), Y.astype(dtype)
    guide = G.Nested(model)
    natural = dgp.optim.NaturalGradient(guide, 0.2, optax.adam(0.01))
    result = SVI(model, guide, natural, dgp.ELBO()).run(jax.random.key(0), 50, x, y, progress_bar=False)
    assert result.losses[-1] < result.losses[0]
    assert {value.dtype for value in result.params.values()} == {jnp.dtype(dtype)}
    posterior = dgp.Posterior(model, guide, result.params)
    assert np.isfinite(posterior.using(num_samples=3).predict(jax.random.key(1), x[:4]).mean).all()
    draws = Predictive(model, guide=guide, params=result.params, num_samples=3)(jax.random.key(2), x[:4])
    assert draws["y"].shape == (3, 4, 2)
    # At new rows, hidden values are those of the model given v, as under InducingPoint.
    same = dgp.Posterior(model, G.InducingPoint(model), result.params)
    np.testing.assert_array_equal(*(p.sample(jax.random.key(3), x[:4]) for p in (posterior, same)))
    tree = dgp.diagnostics.to_arviz(posterior, jax.random.key(4), x, y, num_samples=10)
    assert tree["posterior"]["h0"].shape[-2:] == (N, 2)


def twice(X, y=None):
    f = dgp.gp("f", k.RBF(), dgp.Points(POINTS[0]), outputs=1)
    with numpyro.plate("data", len(X)):
        h = numpyro.sample("h", f(X, noise=0.1))
        numpyro.sample("y", dgp.Likelihood(f(h), lambda v: dist.Normal(v, 0.1).to_event(1)), obs=y)


def noiseless(X, y=None):
    f, g = (dgp.gp(name, k.RBF(), dgp.Points(POINTS[0]), outputs=1) for name in "fg")
    with numpyro.plate("data", len(X)):
        h = numpyro.sample("h", f(X))
        numpyro.sample("y", dgp.Likelihood(g(h), lambda v: dist.Normal(v, 0.1).to_event(1)), obs=y)


DEEP = partial(program, 2)


@pytest.mark.parametrize(
    ("model", "settings", "message"),
    [
        (twice, {}, "expected hidden layer 'h' to be the only use of its function, got uses at \\['y'\\]"),
        (noiseless, {}, "expected process noise at hidden layer 'h'"),
        (DEEP, {"sites": {"h0": G.Normal()}}, "expected no rule for hidden layer 'h0'"),
        (DEEP, {"sites": {"f2": G.MarkovInducing()}}, "expected a Gaussian for 'f2' by itself"),
        (with_latents, {"latent": G.Quadrature(3)}, "expected a Gaussian rule for latents"),
        (DEEP, {"inducing": G.MixtureOfGaussians(2)}, "expected a Gaussian for 'f0' by itself"),
    ],
)
def test_bad_programs_and_rules(model, settings, message):
    y = {DEEP: Y, with_latents: Y[:, 0]}.get(model, Y[:, :1])
    with pytest.raises(ValueError, match=f"Nested.*: {message}"):
        SVI(model, G.Nested(model, **settings), optax.sgd(0.0), dgp.ELBO()).init(jax.random.key(0), X, y)
