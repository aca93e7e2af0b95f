"""Collapsed bounds whose hidden layers follow their inducing values, against draws, mean field and the evidence."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro import handlers
from numpyro.distributions import kl_divergence
from numpyro.infer import SVI
from programs import X, Y, Z, agree, random_params

import numpyro_dgp as dgp
from numpyro_dgp import guides as G
from numpyro_dgp import kernels as k
from numpyro_dgp.bounds.collapsed import Observations, from_features
from numpyro_dgp.functions.function_values import FunctionValues
from numpyro_dgp.functions.weights import InducingPrior
from numpyro_dgp.math.whitening import inverse_cholesky

N = 12
X, Y = X[::3][:N], Y[::3][:N]
N = len(X)
Z2 = jnp.hstack([Z, jnp.cos(5 * Z)])


def deep(X, y=None, *, layers=2):
    """Two outputs per hidden layer, data beside the hidden values, mean functions, masks and scales."""
    x, functions = X, []
    for depth in range(1, layers):
        points = Z if depth == 1 else jnp.hstack([Z, Z2])
        mean = (
            dgp.means.LinearMean(jnp.array([[1.0, -0.5]]), 0.1)
            if depth == 1
            else dgp.means.LinearMean(0.3 * jnp.ones((3, 2)))
        )
        with handlers.scale(scale=1.0 if depth == 1 else 0.8):
            functions.append(dgp.gp(f"f{depth}", k.RBF(0.5, 0.9), dgp.Points(points), outputs=2, mean=mean))
    g = dgp.gp("g", k.RBF(1.1, 0.9), dgp.Points(jnp.hstack([Z, Z2])), mean=dgp.means.ConstantMean(0.2))
    keep = jnp.arange(len(X)) != 3
    with numpyro.plate("data", len(X)), handlers.mask(mask=keep), handlers.scale(scale=0.9):
        for depth, f in enumerate(functions, 1):
            h = numpyro.sample(f"h{depth}", f(x, noise=jnp.array([0.3, 0.1 + 0.1 * depth])))
            x = jnp.concatenate([X, h], -1)
        numpyro.sample("y", dgp.Likelihood(g(x), lambda v: dist.Normal(0.8 * v + 0.1, 0.3)), obs=y)


def scalar(X, y=None):
    """A scalar hidden layer, shared kernels, one noise."""
    f = dgp.gp("f", k.RBF(0.5, 0.9), dgp.Points(Z), mean=dgp.means.IdentityMean())
    g = dgp.gp("g", k.RBF(1.1, 0.9), dgp.Points(Z))
    with numpyro.plate("data", len(X)):
        h = numpyro.sample("h", f(X, noise=0.3))
        numpyro.sample("y", dgp.Likelihood(g(h[:, None]), lambda v: dist.Normal(v, 0.3)), obs=y)


def per_output(X, y=None):
    kernels = [k.RBF(1.2, 0.7), k.RBF(0.6, 1.5) + k.Linear(0.2)]
    f = dgp.gp("f", kernels, dgp.Points(jnp.stack([Z, Z + 0.1])), outputs=2)
    g = dgp.gp("g", k.RBF(1.0, 1.0), dgp.Points(Z2))
    with numpyro.plate("data", len(X)):
        h = numpyro.sample("h", f(X, noise=jnp.array([0.2, 0.4])))
        numpyro.sample("y", dgp.Likelihood(g(h), lambda v: dist.Normal(v, 0.3)), obs=y)


PROGRAMS = {
    "two layers": (deep, ["h1"]),
    "three layers": (lambda X, y=None: deep(X, y, layers=3), ["h1", "h2"]),
    "one of two": (lambda X, y=None: deep(X, y, layers=3), ["h2"]),
    "scalar": (scalar, ["h"]),
    "per output": (per_output, ["h"]),
}


def guide_of(name, hidden_density="bound"):
    model, sites = PROGRAMS[name]
    rules = {site: G.GivenInducing() for site in sites}
    return model, G.Collapsed(model, hidden_density=hidden_density, sites=rules)


def value(model, guide, params, key=0):
    return -dgp.ELBO().loss(jax.random.key(key), params, model, guide, X, Y)


def drawn(model, guide, params, key):
    """A draw of the guide, v included, as NumPyro sees it."""
    with handlers.seed(rng_seed=key), handlers.substitute(data=params), handlers.trace() as sites:
        guide(X, Y)
    return {n: s for n, s in sites.items() if s["type"] == "sample"}


def unwrapped(fn):
    while hasattr(fn, "base_dist"):
        fn = fn.base_dist
    return fn


def sampled_bound(model, guide, params, num=2500, marginal=()):
    """E[log N(h; f(x), s^2)] given v, or at the sites ``marginal`` log p(h | v, x), row by row, with v and h drawn from
    the guide, less log q(h | v) and KL[q(v)]."""

    def draw(key):
        posterior = drawn(model, guide, params, key)
        values = {n: s["value"] for n, s in posterior.items()}
        with handlers.seed(rng_seed=0), handlers.substitute(data=values), handlers.trace() as sites:
            model(X, Y)
        total = 0.0
        for name, site in sites.items():
            if site["type"] != "sample":
                continue
            fn, weight = unwrapped(site["fn"]), 1.0 if site["scale"] is None else site["scale"]
            if isinstance(fn, InducingPrior):
                term = -kl_divergence(posterior[name]["fn"], fn)
            elif isinstance(fn, FunctionValues):
                open_ = fn.conditional_variance - fn.noise**2
                term = dist.Normal(fn.loc, fn.noise).log_prob(site["value"]) - 0.5 * open_ / fn.noise**2
                if name in marginal:
                    term = dist.Normal(fn.loc, fn.conditional_variance**0.5).log_prob(site["value"])
                q = unwrapped(posterior[name]["fn"])
                term = (term - dist.Normal(q.loc, q.variance**0.5).log_prob(site["value"])).reshape(len(X), -1).sum(-1)
            else:
                term = fn.log_prob(site["value"])
            mask = site["fn"]._mask if isinstance(site["fn"], dist.MaskedDistribution) else True
            total = total + weight * jnp.where(mask, term, 0).sum()
        return total

    return jax.lax.map(jax.jit(draw), jax.random.split(jax.random.key(5), num), batch_size=200)


@pytest.mark.long
@pytest.mark.parametrize("name", PROGRAMS)
def test_bound_against_draws_of_everything(name):
    """The closed form for q(h | v) is the expectation of what the guide's own draws give."""
    model, guide = guide_of(name)
    params = random_params(model, guide, X, Y)
    params |= {n: jnp.clip(v, 0.05, 0.95) for n, v in params.items() if n.endswith("_ratio")}
    exact = jax.jit(lambda key: value(model, guide, params, key))(0)
    draws = sampled_bound(model, guide, params)
    assert agree(draws, np.array([exact]))
    assert draws.std() / np.sqrt(len(draws)) < 0.02 * abs(exact)


@pytest.mark.long
@pytest.mark.parametrize("name", ["three layers", "one of two", "scalar"])
def test_densities_given_inducing_values_at_data_inputs(name):
    """The same expectation with log p(h | v, x) where x are data; it is above the bound with E[log N(h; f(x), s^2)]."""
    (model, guide), (_, lower) = guide_of(name, "marginal"), guide_of(name)
    params = random_params(model, guide, X, Y)
    params |= {n: jnp.clip(v, 0.05, 0.95) for n, v in params.items() if n.endswith("_ratio")}
    exact = jax.jit(lambda key: value(model, guide, params, key))(0)
    draws = sampled_bound(model, guide, params, marginal=("h", "h1"))
    assert agree(draws, np.array([exact]))
    assert draws.std() / np.sqrt(len(draws)) < 0.02 * abs(exact)
    if name == "one of two":  # the same q, as h1 has a posterior of its own
        assert exact >= value(model, lower, params)


def sparse(X, y=None):
    """A first layer that its three inducing values leave much open."""
    f = dgp.gp("f", k.RBF(0.5, 0.9), dgp.Points(Z[::3]), outputs=1)
    g = dgp.gp("g", k.RBF(1.1, 0.9), dgp.Points(Z))
    with numpyro.plate("data", len(X)):
        h = numpyro.sample("h", f(X, noise=0.1))
        numpyro.sample("y", dgp.Likelihood(g(h), lambda v: dist.Normal(v, 0.3)), obs=y)


@pytest.mark.long
def test_conditional_variance_is_not_paid_twice():
    """The optimum over q(h) and q(v) of the bound with log p(h | v, x), by hand, at means and variances of h."""
    loc, scale = 0.5 * X, 0.2 + 0.1 * X**2
    params = {"h_auto_loc": loc, "h_auto_scale": scale}
    marginal, bound = (value(sparse, G.Collapsed(sparse, hidden_density=d), params) for d in ("marginal", "bound"))
    inner, points = k.RBF(0.5, 0.9), Z[::3]
    A = inner(X, points) @ inverse_cholesky(inner.gram(points)).T
    open_ = inner.diag(X) - jnp.square(A).sum(-1)
    by_hand = [
        from_features(A, v, Observations(loc[:, 0], jnp.sqrt(s), y_variance=scale[:, 0] ** 2)).bound()
        for v, s in ((jnp.square(A).sum(-1), open_ + 0.01), (inner.diag(X), 0.01 * jnp.ones(N)))
    ]
    np.testing.assert_allclose(marginal - bound, by_hand[0] - by_hand[1], rtol=1e-7)
    assert marginal > bound + 10


@pytest.mark.long
def test_optima_are_ordered():
    """At the optimum of each: the larger density and the larger family give the larger bound."""

    def best(**options):
        svi = SVI(sparse, G.Collapsed(sparse, **options), optax.sgd(0.0), dgp.ELBO())
        return -dgp.optim.minimize(svi, jax.random.key(0), X, Y, progress_bar=False).losses[-1]

    bound, marginal = best(), best(hidden_density="marginal")
    follows = best(hidden_density="marginal", hidden=G.GivenInducing())
    assert marginal > bound + 1
    assert follows > marginal


def test_bad_density():
    with pytest.raises(ValueError, match=r"expected hidden_density=.bound. or .marginal., got 'exact'"):
        G.Collapsed(sparse, hidden_density="exact")


@pytest.mark.long
def test_without_a_share_it_is_the_mean_field_bound():
    """At weights that tend to zero q(h | v) no longer depends on v."""
    follows = G.Collapsed(scalar, hidden=G.GivenInducing())
    params = random_params(scalar, follows, X, Y) | {"h_auto_ratio": jnp.full(N, 1e-9)}
    mean_field = {"h_auto_loc": params["h_auto_loc"], "h_auto_scale": jnp.full(N, 0.3 * 1e-9**0.5)}
    expected = value(scalar, G.Collapsed(scalar), mean_field)
    np.testing.assert_allclose(value(scalar, follows, params), expected, rtol=1e-7)


FEW = X[:8:2]


def few(X, y=None):
    f = dgp.gp("f", k.Matern32(1.0, 0.9), dgp.Points(FEW), outputs=1)  # at data, any kernel
    g = dgp.gp("g", k.RBF(1.1, 0.9), dgp.Points(jnp.linspace(-2, 2, 5)[:, None]))
    with numpyro.plate("data", len(X)):
        h = numpyro.sample("h", f(X, noise=0.3))
        numpyro.sample("y", dgp.Likelihood(g(h), lambda v: dist.Normal(v, 0.4)), obs=y)


@pytest.mark.long
def test_between_mean_field_and_the_evidence():
    """At the optimum. In the evidence, too, the last layer enters by its bound."""
    x, y = X[:8], 0.7 * Y[:8]

    def best(guide):
        svi = SVI(few, guide, optax.sgd(0.0), dgp.ELBO())
        found = dgp.optim.minimize(svi, jax.random.key(0), x, y, progress_bar=False)
        return -found.losses[-1], found.params

    follows = G.Collapsed(few, hidden=G.GivenInducing())
    (mean_field, _), (bound, params) = best(G.Collapsed(few)), best(follows)
    assert bound > mean_field + 0.5
    inner, outer = k.Matern32(1.0, 0.9), k.RBF(1.1, 0.9)
    points, last = FEW, jnp.linspace(-2, 2, 5)[:, None]
    A, whiten = inner(x, points) @ inverse_cholesky(inner.gram(points)).T, inverse_cholesky(outer.gram(last))
    scale = jnp.sqrt(inner.diag(x) - jnp.square(A).sum(-1) + 0.3**2)

    def log_weight(key):
        v, white = jax.random.normal(key, (4,)), jax.random.normal(jax.random.fold_in(key, 1), (8,))
        h = (A @ v + scale * white)[:, None]
        return from_features(outer(h, last) @ whiten.T, outer.diag(h), Observations(y, 0.4)).bound()

    keys = jax.random.split(jax.random.key(1), 100_000)
    weights = np.exp(np.asarray(jax.lax.map(log_weight, keys, batch_size=5000)))
    error = weights.std() / weights.mean() / np.sqrt(len(weights))
    assert error < 0.03
    assert bound < np.log(weights.mean()) + 3 * error
    draws = follows.sample_posterior(jax.random.key(2), params, x, y, sample_shape=(4000,))
    assert draws["f"].shape == (4000, 1, 4)
    np.testing.assert_allclose(follows.median(params, x, y)["h"], params["h_auto_loc"], atol=1e-12)
    quantiles = follows.quantiles(params, [0.5, 0.8413447], x, y)["h"]
    np.testing.assert_allclose(draws["h"].std(0), quantiles[1] - quantiles[0], rtol=0.06)
    np.testing.assert_allclose(draws["h"].mean(0), quantiles[0], atol=0.06)
    predicted = dgp.Posterior(few, follows.on(x, y), params).using(num_samples=20).predict(jax.random.key(3), X)
    assert predicted.mean.shape == (N,)


@pytest.mark.long
def test_any_kernel_by_quadrature():
    def model(X, y=None):
        f = dgp.gp("f", k.RBF(0.5, 0.9), dgp.Points(Z), outputs=1, mean=dgp.means.IdentityMean())
        g = dgp.gp("g", k.Matern32(), dgp.Points(Z))
        with numpyro.plate("data", len(X)):
            h = numpyro.sample("h", f(X, noise=0.3))
            numpyro.sample("y", dgp.Likelihood(g(h), lambda v: dist.Normal(v, 0.3)), obs=y)

    guide = G.Collapsed(model, hidden=G.GivenInducing(), integrate=dgp.likelihoods.GaussHermite(60))
    params = random_params(model, guide, X, Y)
    assert agree(sampled_bound(model, guide, params), np.array([value(model, guide, params)]))
    with pytest.raises(ValueError, match=r"closed form .* got Matern32: pass integrate="):
        value(model, G.Collapsed(model, hidden=G.GivenInducing()), params)


@pytest.mark.long
def test_three_layers_by_quasi_newton():
    """From the optimum of mean field, with its means, and shares that begin small."""
    model = PROGRAMS["three layers"][0]

    def best(guide, **options):
        svi = SVI(model, guide, optax.sgd(0.0), dgp.ELBO())
        found = dgp.optim.minimize(svi, jax.random.key(0), X, Y, max_steps=200, progress_bar=False, **options)
        assert (np.diff(found.losses) <= 1e-9).all()
        return -found.losses[-1], found.params

    mean_field, params = best(G.Collapsed(model))
    means = {n: v for n, v in params.items() if n.endswith("_loc")}
    assert best(G.Collapsed(model, hidden=G.GivenInducing(scale=0.1)), init_params=means)[0] > mean_field + 1


@pytest.mark.long
def test_single_precision(x32):
    points, x, y = (np.asarray(a, np.float32) for a in (Z, X, Y))

    def model(X, y=None):
        f = dgp.gp(
            "f", k.RBF(0.5, 0.9), dgp.Points(points), outputs=2, mean=dgp.means.LinearMean(np.ones((1, 2), np.float32))
        )
        g = dgp.gp("g", k.RBF(), dgp.Points(np.hstack([points, points])))
        with numpyro.plate("data", len(X)):
            h = numpyro.sample("h", f(X, noise=0.1))
            numpyro.sample("y", dgp.Likelihood(g(h), lambda v: dist.Normal(v, 0.3)), obs=y)

    svi = SVI(model, G.Collapsed(model, hidden=G.GivenInducing()), optax.adam(0.01), dgp.ELBO())
    result = svi.run(jax.random.key(0), 20, x, y, progress_bar=False)
    assert result.losses.dtype == jnp.float32
    assert result.losses[-1] < result.losses[0]
    assert all(np.isfinite(v).all() for v in result.params.values())


def reused(X, y=None):
    f = dgp.gp("f", k.RBF(0.5, 0.9), dgp.Points(Z))
    with numpyro.plate("data", len(X)):
        h = numpyro.sample("h", f(X, noise=0.2))
        numpyro.sample("y", dgp.Likelihood(f(h[:, None]), lambda v: dist.Normal(v, 0.3)), obs=y)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "rule", "message"),
    [
        (
            scalar,
            G.GivenInducing("free"),
            "GivenInducing.. with its default weights for 'h', got 'free': .* finds the best ones",
        ),
        (scalar, G.GivenInducing(3), "GivenInducing.. with its default weights for 'h', got 3"),
        (scalar, G.GivenInducing(scale=1.0), "expected a scale of GivenInducing.. for 'h' below 1.* got 1.0"),
        (
            scalar,
            G.JointOutputs(3),
            "expected JointOutputs.. with its default weights for 'h', got 3: JointOut",
        ),
        (scalar, G.JointOutputs(scale=1.0), "expected a scale of JointOutputs.. for 'h' below 1.* got 1.0"),
        (scalar, G.JointOutputs(), "expected several outputs at 'h', got a scalar function: use GivenInducing.."),
        (reused, G.GivenInducing(), "'h', which follows its inducing values, to be the only use of its function, got"),
    ],
)
def test_bad_input(model, rule, message):
    def start():
        SVI(model, G.Collapsed(model, sites={"h": rule}), optax.sgd(0.0), dgp.ELBO()).init(jax.random.key(0), X, Y)

    with pytest.raises(ValueError, match=message):
        start()
