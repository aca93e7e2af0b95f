"""Inducing values that follow those of the layer below: Markov dynamics, their bound, and its closed form."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro import handlers
from numpyro.distributions import kl_divergence
from numpyro.infer import SVI, Trace_ELBO
from programs import X, Y, Z, agree, bound, draws_of_bound, random_params

import numpyro_dgp as dgp
from numpyro_dgp import guides as G
from numpyro_dgp import kernels as k

NOISE, PROCESS = 0.3, 0.2


def two(X, y=None, batch=None, *, points=Z, outputs=2):
    """Two layers with process noise between them."""
    mean = dgp.means.Linear(jnp.ones((1, outputs), X.dtype))
    f = dgp.gp("f", k.RBF(0.5, 0.9), dgp.Points(points), outputs=outputs, mean=mean)
    g = dgp.gp("g", k.RBF(1.1, 0.9), dgp.Points(jnp.tile(points, outputs)))
    with numpyro.plate("data", len(X), subsample_size=batch) as i:
        h = numpyro.sample("h", f(X[i], noise=PROCESS))
        numpyro.sample("y", dgp.Likelihood(g(h), lambda v: dist.Normal(v, NOISE)), obs=None if y is None else y[i])


def three(X, y=None):
    f = dgp.gp("f", k.RBF(0.5, 0.9), dgp.Points(Z), outputs=2, mean=dgp.means.Linear(jnp.ones((1, 2))))
    e = dgp.gp("e", k.RBF(0.5, 1.2), dgp.Points(jnp.hstack([Z, Z**2 - 1])), outputs=2)
    g = dgp.gp("g", k.RBF(1.1, 0.9), dgp.Points(jnp.hstack([Z, jnp.cos(3 * Z)])))
    with numpyro.plate("data", len(X)):
        h = numpyro.sample("h", f(X, noise=PROCESS))
        m = numpyro.sample("m", e(h, noise=PROCESS))
        numpyro.sample("y", dgp.Likelihood(g(m), lambda v: dist.Normal(v, NOISE)), obs=y)


def guide_of(rule, hidden=G.GivenInducing("free"), model=two):
    return G.InducingPoint(model, sites={"g": rule, "h": hidden})


def moved(model, guide, *args, **kwargs):
    """Initial parameters, away from the special start, factors kept triangular."""
    params = random_params(model, guide, *args, scale=0.2, **kwargs)
    for name in params:
        if name.endswith(("_weights", "_shift", "_transition")):
            params[name] = params[name] + 0.1 * jax.random.normal(jax.random.key(len(name)), params[name].shape)
    return params


@pytest.mark.parametrize("conditional", [G.Full(), pytest.param(G.Diagonal(), marks=pytest.mark.slow)])
@pytest.mark.parametrize("rank", [None, pytest.param(3, marks=pytest.mark.slow)])
def test_without_transition_it_is_the_conditional_alone(conditional, rank):
    """The same numbers when v of the first layer is drawn at its mean; the same mean bound when it is not."""
    plain, guide = guide_of(conditional), guide_of(G.MarkovInducing("f", rank, conditional))
    params = random_params(two, plain, X, Y, scale=0.2)
    init = SVI(two, guide, optax.sgd(0.0), dgp.ELBO())
    start = init.get_params(init.init(jax.random.key(0), X, Y))
    assert set(start) - set(params) == {"g_auto_transition"} | ({"g_auto_basis"} if rank else set())
    params = start | params
    point = params | {"f_auto_scale_tril": 1e-9 * params["f_auto_scale_tril"]}
    # The key of h is the second of the guide with and without a draw of v, so that h is the same.
    np.testing.assert_allclose(
        bound(dgp.ELBO(), point, two, guide, X, Y), bound(dgp.ELBO(), point, two, plain, X, Y), rtol=1e-6
    )
    ours = draws_of_bound(dgp.ELBO(), params, two, guide, X, Y)
    assert agree(ours, draws_of_bound(dgp.ELBO(), params, two, plain, X, Y))


def test_draws_follow_the_dynamics():
    guide = G.InducingPoint(three, sites={"e": G.MarkovInducing(), "g": G.MarkovInducing("f", 2, G.Diagonal())})
    params = moved(three, guide, X, Y)
    draws = guide.sample_posterior(jax.random.key(0), params, X, Y, sample_shape=(20_000,))
    v = {n: draws[n].reshape(20_000, -1) for n in "feg"}
    root = {n: np.tril(params[f"{n}_auto_scale_tril"]) for n in "fe"}
    S = jax.scipy.linalg.block_diag(*(root["f"] @ root["f"].mT))
    for name, W in (
        ("e", jax.scipy.linalg.block_diag(*(root["e"] @ root["e"].mT))),
        ("g", jnp.diag(params["g_auto_scale"] ** 2)),
    ):
        U = params[f"{name}_auto_transition"].reshape(v[name].shape[1], -1)
        U = U @ params["g_auto_basis"] if name == "g" else U
        mean = U @ params["f_auto_loc"].reshape(-1) + params[f"{name}_auto_loc"].reshape(-1)
        C = jnp.block([[S, S @ U.T], [U @ S, U @ S @ U.T + W]])
        found = jnp.hstack([v["f"], v[name]])
        white = jnp.linalg.solve(jnp.linalg.cholesky(C), (found - jnp.r_[params["f_auto_loc"].reshape(-1), mean]).T)
        assert abs(white.mean(1)).max() < 5 / np.sqrt(20_000)
        assert abs(jnp.cov(white) - jnp.eye(len(C))).max() < 5 * np.sqrt(2 / 20_000)


RULES = {
    "dense": G.MarkovInducing("f"),
    "rank": G.MarkovInducing(rank=3),
    "diagonal": G.MarkovInducing(conditional=G.Diagonal()),
}


@pytest.mark.parametrize("name", ["dense", *(pytest.param(n, marks=pytest.mark.slow) for n in ("rank", "diagonal"))])
def test_same_bound_as_with_everything_drawn(name):
    guide = guide_of(RULES[name])
    params = moved(two, guide, X, Y)
    ours = draws_of_bound(dgp.ELBO(), params, two, guide, X, Y)
    stock = draws_of_bound(Trace_ELBO(), params, two, guide, X, Y, num=6000)
    assert agree(ours, stock)
    assert ours.std() < stock.std()


@pytest.mark.slow
@pytest.mark.parametrize("hidden", [G.Propagate(), G.GivenInducing(), G.JointOutputs(), G.GivenBelow()])
def test_beside_every_rule_for_hidden_values(hidden):
    guide = G.InducingPoint(three, sites={"e": RULES["dense"], "g": RULES["rank"], "h": hidden, "m": hidden})
    params = moved(three, guide, X, Y)
    ours = draws_of_bound(dgp.ELBO(), params, three, guide, X, Y)
    assert agree(ours, draws_of_bound(Trace_ELBO(), params, three, guide, X, Y, num=6000))


def test_bound_by_hand():
    """The average over draws of v and h, written out from the definition of the bound."""
    guide = guide_of(RULES["dense"])
    p = {n.replace("_auto", ""): v for n, v in moved(two, guide, X, Y).items()}
    Zg = jnp.tile(Z, 2)
    Lf, Lg = (jnp.linalg.cholesky(kernel.gram(z)) for kernel, z in ((k.RBF(0.5, 0.9), Z), (k.RBF(1.1, 0.9), Zg)))
    A = jnp.linalg.solve(Lf, k.RBF(0.5, 0.9)(Z, X)).T
    c = 0.5 - (A**2).sum(1)[:, None] + PROCESS**2
    q = {n: G.rules.FullBelief(p[f"{n}_loc"], jnp.tril(p[f"{n}_scale_tril"])) for n in "fg"}

    def draw(key):
        vf, h, vg = jax.random.split(key, 3)
        vf = q["f"].sample(vf)
        mean = p["h_shift"] + jnp.einsum("npm,pm->np", p["h_weights"], vf)
        h = mean + p["h_scale"] * jax.random.normal(h, mean.shape)
        loc = p["g_loc"] + p["g_transition"] @ vf.reshape(-1)
        vg = loc + q["g"].scale_tril @ jax.random.normal(vg, loc.shape)
        log_h = dist.Normal(X + A @ vf.T, jnp.sqrt(c)).log_prob(h) - dist.Normal(mean, p["h_scale"]).log_prob(h)
        a = jnp.linalg.solve(Lg, k.RBF(1.1, 0.9)(Zg, h)).T
        data = dist.Normal(a @ vg, NOISE).log_prob(Y) - 0.5 * (1.1 - (a**2).sum(1)) / NOISE**2
        prior = dist.Normal().log_prob
        return (
            log_h.sum()
            + data.sum()
            + prior(vf).sum()
            - q["f"].log_prob(vf)
            + prior(vg).sum()
            - q["g"].log_prob(vg - loc + q["g"].loc)
        )

    by_hand = jax.lax.map(jax.jit(draw), jax.random.split(jax.random.key(5), 20_000), batch_size=500)
    params = {f"{n[0]}_auto{n[1:]}": v for n, v in p.items()}
    assert agree(draws_of_bound(dgp.ELBO(), params, two, guide, X, Y, num=4000), by_hand)
