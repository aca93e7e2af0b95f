"""Inducing values that follow those of the layer below: Markov dynamics, their bound, and its closed form."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro import handlers
from numpyro.infer import SVI, Trace_ELBO
from programs import X, Y, Z, agree, bound, draws_of_bound, random_params
from sizes import tune

import numpyro_dgp as dgp
from numpyro_dgp import guides as G
from numpyro_dgp import kernels as k
from numpyro_dgp.bounds.markov_layers import Coupled, Target, expected_product, expected_square
from numpyro_dgp.functions.weights import FullBelief
from numpyro_dgp.math.quadrature import white_nodes
from numpyro_dgp.math.whitening import inverse_cholesky

NOISE, PROCESS = 0.3, 0.2


def two(X, y=None, batch=None, *, points=Z, outputs=2):
    """Two layers with process noise between them."""
    mean = dgp.means.LinearMean(jnp.ones((1, outputs), X.dtype))
    f = dgp.gp("f", k.RBF(0.5, 0.9), dgp.Points(points), outputs=outputs, mean=mean)
    g = dgp.gp("g", k.RBF(1.1, 0.9), dgp.Points(jnp.tile(points, outputs)))
    with numpyro.plate("data", len(X), subsample_size=batch) as i:
        h = numpyro.sample("h", f(X[i], noise=PROCESS))
        numpyro.sample("y", dgp.Likelihood(g(h), lambda v: dist.Normal(v, NOISE)), obs=None if y is None else y[i])


def three(X, y=None):
    f = dgp.gp("f", k.RBF(0.5, 0.9), dgp.Points(Z), outputs=2, mean=dgp.means.LinearMean(jnp.ones((1, 2))))
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


@pytest.mark.parametrize("conditional", [G.Full(), pytest.param(G.Diagonal(), marks=pytest.mark.long)])
@pytest.mark.parametrize("rank", [None, pytest.param(3, marks=pytest.mark.long)])
@pytest.mark.long
def test_without_transition_it_is_the_conditional_alone(conditional, rank):
    """The same numbers where both guides draw v of the first layer, the same mean where only one does."""
    plain, guide = guide_of(conditional), guide_of(G.MarkovInducing("f", rank, conditional))
    params = random_params(two, plain, X, Y, scale=0.2)
    init = SVI(two, guide, optax.sgd(0.0), dgp.ELBO())
    start = init.get_params(init.init(jax.random.key(0), X, Y))
    assert set(start) - set(params) == {"g_auto_transition"} | ({"g_auto_basis"} if rank else set())
    params = start | params
    for scale, loss, rtol in ((1.0, Trace_ELBO(), 1e-12), (1e-9, dgp.ELBO(), 1e-6)):
        at = params | {"f_auto_scale_tril": scale * params["f_auto_scale_tril"]}
        values = (bound(loss, at, two, g, X, Y) for g in (guide, plain))
        np.testing.assert_allclose(*values, rtol=rtol)
    ours = draws_of_bound(dgp.ELBO(), params, two, guide, X, Y)
    assert agree(ours, draws_of_bound(dgp.ELBO(), params, two, plain, X, Y))


@pytest.mark.long
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


@pytest.mark.parametrize("name", ["dense", *(pytest.param(n, marks=pytest.mark.long) for n in ("rank", "diagonal"))])
@pytest.mark.long
def test_same_bound_as_with_everything_drawn(name):
    guide = guide_of(RULES[name])
    params = moved(two, guide, X, Y)
    ours = draws_of_bound(dgp.ELBO(), params, two, guide, X, Y)
    stock = draws_of_bound(Trace_ELBO(), params, two, guide, X, Y, num=6000)
    assert agree(ours, stock)
    assert ours.std() < stock.std()


@pytest.mark.long
@pytest.mark.parametrize("hidden", [G.Propagate(), G.GivenInducing(), G.JointOutputs(), G.GivenBelow()])
def test_beside_every_rule_for_hidden_values(hidden):
    guide = G.InducingPoint(three, sites={"e": RULES["dense"], "g": RULES["rank"], "h": hidden, "m": hidden})
    params = moved(three, guide, X, Y)
    ours = draws_of_bound(dgp.ELBO(), params, three, guide, X, Y)
    assert agree(ours, draws_of_bound(Trace_ELBO(), params, three, guide, X, Y, num=6000))


@pytest.mark.long
def test_bound_by_hand():
    """The average over draws of v and h, written out from the definition of the bound."""
    guide = guide_of(RULES["dense"])
    p = {n.replace("_auto", ""): v for n, v in moved(two, guide, X, Y).items()}
    Zg = jnp.tile(Z, 2)
    Lf, Lg = (jnp.linalg.cholesky(kernel.gram(z)) for kernel, z in ((k.RBF(0.5, 0.9), Z), (k.RBF(1.1, 0.9), Zg)))
    A = jnp.linalg.solve(Lf, k.RBF(0.5, 0.9)(Z, X)).T
    c = 0.5 - (A**2).sum(1)[:, None] + PROCESS**2
    q = {n: FullBelief(p[f"{n}_loc"], jnp.tril(p[f"{n}_scale_tril"])) for n in "fg"}

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


@pytest.mark.long
def test_training_on_from_independent_layers_gains():
    """Never worse at the optimum: here from the optimum without a transition, with as many steps, on other draws."""

    def train(guide, key, start=None):
        svi = SVI(two, guide, optax.adam(optax.cosine_decay_schedule(0.02, 1500)), dgp.ELBO(4))
        return svi.run(key, 1500, X, Y, init_params=start, progress_bar=False).params

    plain, guide = guide_of(G.Full()), guide_of(RULES["dense"])
    base = train(plain, jax.random.key(0))
    longer, found = train(plain, jax.random.key(1), base), train(guide, jax.random.key(1), base)
    before = draws_of_bound(dgp.ELBO(), longer, two, plain, X, Y)
    after = draws_of_bound(dgp.ELBO(), found, two, guide, X, Y)
    assert after.mean() > before.mean() - 3 * np.sqrt((before.var() + after.var()) / len(after))


def fitted(model, guide, *args):
    """Parameters after a few steps, by the end of their names, and predictions with them."""
    svi = SVI(model, guide, optax.adam(0.01), dgp.ELBO(2))
    result = svi.run(jax.random.key(0), 20, X, Y, *args, progress_bar=False)
    assert np.isfinite(result.losses).all()
    posterior = dgp.Posterior(model, guide, result.params)
    assert posterior.using(num_samples=3).predict(jax.random.key(1), X[:4]).mean.shape == (4,)
    assert posterior.using(num_samples=3).sample(jax.random.key(1), X[:4]).shape == (3, 4)
    return result.params


@pytest.mark.long
def test_low_rank():
    params = fitted(three, G.InducingPoint(three, sites={"e": G.MarkovInducing("f", 3)}))
    assert params["e_auto_transition"].shape == (2, 8, 3)
    assert params["e_auto_basis"].shape == (3, 16)
    assert abs(params["e_auto_transition"]).min() > 0


@pytest.mark.long
def test_minibatches():
    guide = guide_of(RULES["dense"])
    params = fitted(two, guide, 10)
    assert params["g_auto_transition"].shape == (8, 16)
    whole = draws_of_bound(dgp.ELBO(), params, two, guide, X, Y, num=500)
    assert agree(whole, draws_of_bound(dgp.ELBO(), params, two, guide, X, Y, 10, num=4000))


@pytest.mark.long
def test_predictions_keep_the_dependence():
    """Moments of predictions against those of everything drawn by the guide, with a transition that matters."""
    guide = guide_of(RULES["dense"], G.Propagate())
    params = moved(two, guide, X, Y)
    params["g_auto_transition"] = 3 * params["g_auto_transition"]
    posterior, x = dgp.Posterior(two, guide, params), X[::10]

    def moments(key, other):
        """Of f at x, given draws of both v; those of one layer from another draw if ``other`` is another key."""
        drawn = [handlers.substitute(handlers.seed(guide, a), data=params)(x) for a in (key, other)]
        given = handlers.substitute(handlers.seed(two, key), data={"f": drawn[0]["f"], "g": drawn[1]["g"]})
        f_x = handlers.trace(given).get_trace(x)["y"]["fn"].f_x
        return f_x.loc, f_x.variance

    keys = jax.random.split(jax.random.key(0), 6000)
    loc, variance = jax.lax.map(jax.jit(lambda a: moments(a, a)), keys, batch_size=500)
    apart, _ = jax.lax.map(jax.jit(lambda a: moments(*a)), (keys, keys[::-1]), batch_size=500)
    found = posterior.using(num_samples=6000).predict(jax.random.key(1), x)
    error = np.sqrt(2 * found.variance / 6000)
    assert (abs(found.mean - loc.mean(0)) < 4 * error).all()
    assert (abs(apart.mean(0) - loc.mean(0)) > 4 * error).any()
    np.testing.assert_allclose(found.variance, loc.var(0) + variance.mean(0) + NOISE**2, rtol=0.15)
    curves = posterior.using(num_samples=2000).functions(jax.random.key(2), num_features=64)(x)["y"]
    assert (abs(curves.mean(0) - loc.mean(0)) < 4 * np.sqrt(2) * error).all()


@pytest.mark.long
def test_the_layer_above_is_integrated_given_the_draw():
    guide = guide_of(RULES["dense"])
    params = moved(two, guide, X, Y)
    layers = dgp.Posterior(two, guide, params).layers(jax.random.key(0), X)
    f, g = layers["h"][0], layers["y"][0]
    assert isinstance(g.v, FullBelief)
    U = params["g_auto_transition"]
    np.testing.assert_allclose(g.v.loc, params["g_auto_loc"] + U @ f.v.loc.reshape(-1), rtol=1e-10)


@pytest.mark.long
def test_medians_are_of_values_that_follow_nothing():
    guide = guide_of(RULES["dense"])
    params = moved(two, guide, X, Y)
    assert set(guide.median(params, X, Y)) == {"f"}, "h follows the draw of f"
    guide = guide_of(RULES["dense"], hidden=G.Normal())
    assert set(guide.median(moved(two, guide, X, Y), X, Y)) == {"f", "h"}


@pytest.mark.long
def test_natural_steps():
    guide = guide_of(RULES["dense"])
    optimiser = dgp.optim.NaturalGradient(guide, 0.1, optax.adam(0.01))
    result = SVI(two, guide, optimiser, dgp.ELBO(4)).run(jax.random.key(0), 200, X, Y, progress_bar=False)
    assert result.losses[-20:].mean() < result.losses[:20].mean() - 10


@pytest.mark.long
def test_single_precision(x32):
    x, y, points = (jnp.asarray(np.asarray(a), jnp.float32) for a in (X, Y, Z))
    model = lambda X, y=None: two(X, y, points=points)  # noqa: E731
    for rule in RULES.values():
        svi = SVI(model, guide_of(rule, model=model), optax.adam(0.01), dgp.ELBO())
        result = svi.run(jax.random.key(0), 5, x, y, progress_bar=False)
        assert result.losses.dtype == jnp.float32
        assert np.isfinite(result.losses).all()
        assert {v.dtype for v in result.params.values()} == {jnp.dtype(jnp.float32)}


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: G.MarkovInducing(rank=0), "expected rank to be a positive integer, got 0"),
        (lambda: G.MarkovInducing(rank=2.5), "expected rank to be a positive integer, got 2.5"),
        (
            lambda: G.MarkovInducing(conditional=G.Normal()),
            r"expected conditional to be Full\(\) or .*FullJoint\(\), got ",
        ),
    ],
)
def test_bad_rules(build, message):
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sites", "message"),
    [
        ({"g": G.MarkovInducing("k")}, r"expected below to be one of \['f'\].* come before 'g', got 'k'"),
        ({"g": G.MarkovInducing("g")}, r"expected below to be one of \['f'\].* come before 'g', got 'g'"),
        ({"f": G.MarkovInducing("g")}, r"expected a layer below 'f', got the first layer of \['f', 'g'\]"),
        ({"h": G.MarkovInducing("f")}, "expected site 'h' to be inducing values"),
    ],
)
def test_bad_sites(sites, message):
    with pytest.raises(ValueError, match=message):
        SVI(two, G.InducingPoint(two, sites=sites), optax.sgd(0.0), dgp.ELBO()).init(jax.random.key(0), X, Y)


D, M, N = 2, 4, 5
KERNELS = {"rbf": k.RBF(0.8, jnp.array([0.9, 1.3])), "sum": k.RBF(0.5, 1.1) + k.Linear(0.3).on(1)}


def coupled_gaussian(full):
    """A Gaussian over (h, t, v) for every datum, of which (v) is the same: its mean and covariance, (N, D + 1 + M)."""
    rng = np.random.default_rng(3)
    loc = np.concatenate([rng.normal(size=(N, D + 1)), np.tile(rng.normal(size=M), (N, 1))], 1)
    own = 0.4 * rng.normal(size=(M, M)) + 0.5 * np.eye(M)
    roots = np.zeros((N, D + 1 + M, D + 1 + M))
    roots[:, D + 1 :, D + 1 :] = own
    roots[:, : D + 1, D + 1 :] = 0.4 * rng.normal(size=(N, D + 1, M))
    roots[:, : D + 1, : D + 1] = 0.5 * rng.normal(size=(N, D + 1, D + 1))
    C = roots @ roots.transpose(0, 2, 1)
    if not full:  # inputs independent of each other
        h = np.linalg.cholesky(C[:, :D, :D])
        turn = np.tile(np.eye(D + 1 + M), (N, 1, 1))
        turn[:, :D, :D] = np.linalg.inv(h)
        C = turn @ C @ turn.transpose(0, 2, 1)
    return jnp.array(loc), jnp.array(C)


@pytest.mark.long
@pytest.mark.parametrize(("name", "full"), [("rbf", False), ("sum", True)])
def test_expectations_under_coupling(name, full):
    """Against quadrature over h, with v and t averaged given h by conditioning the dense joint Gaussian."""
    kernel, (loc, C) = KERNELS[name], coupled_gaussian(full)
    points = jnp.array(np.random.default_rng(1).normal(size=(M, D)))
    whiten = inverse_cholesky(kernel.gram(points))
    variance = C[:, :D, :D] if full else jnp.diagonal(C[:, :D, :D], axis1=1, axis2=2)
    v = Coupled(loc[0, D + 1 :], C[0, D + 1 :, D + 1 :], C[:, D + 1 :, :D])
    t = Target(loc[:, D], C[:, D, :D], C[:, D, D + 1 :])
    where = kernel, points, whiten, loc[:, :D], variance, v
    rule = white_nodes(dgp.likelihoods.GaussHermite(40), D, loc.dtype)
    weights = jnp.exp(rule[1])
    for n in range(N):
        S = C[n, :D, :D]
        h = loc[n, :D] + rule[0] @ jnp.linalg.cholesky(S).T
        B = jnp.linalg.solve(S, C[n, :D, D:]).T  # slopes of (t, v)
        mean, left = loc[n, D:] + (h - loc[n, :D]) @ B.T, C[n, D:, D:] - B @ S @ B.T
        a = kernel(h, points) @ whiten.T
        product = jnp.einsum("q,qm,qm->", weights, a, left[0, 1:] + mean[:, :1] * mean[:, 1:])
        square = weights @ (jnp.einsum("qm,ml,ql->q", a, left[1:, 1:], a) + jnp.square((a * mean[:, 1:]).sum(1)))
        np.testing.assert_allclose(expected_product(*where, t)[n], product, rtol=1e-6)
        np.testing.assert_allclose(expected_square(*where)[n], square, rtol=1e-6)


@pytest.mark.long
def test_expectations_against_draws():
    kernel, (loc, C) = KERNELS["rbf"], coupled_gaussian(False)
    points = jnp.array(np.random.default_rng(1).normal(size=(M, D)))
    whiten = inverse_cholesky(kernel.gram(points))
    draws = loc + (jnp.linalg.cholesky(C) @ jax.random.normal(jax.random.key(0), (100_000, N, D + 1 + M, 1)))[..., 0]
    f = ((kernel(draws[..., :D], points) @ whiten.T) * draws[..., D + 1 :]).sum(-1)
    v = Coupled(loc[0, D + 1 :], C[0, D + 1 :, D + 1 :], C[:, D + 1 :, :D])
    where = kernel, points, whiten, loc[:, :D], jnp.diagonal(C[:, :D, :D], axis1=1, axis2=2), v
    t = Target(loc[:, D], C[:, D, :D], C[:, D, D + 1 :])
    for found, values in ((expected_product(*where, t), draws[..., D] * f), (expected_square(*where), f**2)):
        assert (abs(found - values.mean(0)) < 4 * values.std(0) / np.sqrt(len(values))).all()


@pytest.mark.long
@pytest.mark.parametrize("name", list(RULES))
def test_closed_form_of_the_bound(name):
    """The mean of the drawn bound of the same program and rules."""
    guide, drawn = G.Markov(two, sites={"g": RULES[name]}), guide_of(RULES[name])
    params = moved(two, drawn, X, Y)
    value = jax.jit(lambda p: bound(dgp.ELBO(), p, two, guide, X, Y))(params)
    draws = draws_of_bound(dgp.ELBO(), params, two, drawn, X, Y, num=6000)
    assert abs(draws.mean() - value) < 3 * draws.std() / np.sqrt(len(draws))


@pytest.mark.long
def test_blocks_of_data(monkeypatch):
    guide = G.Markov(two)
    params = moved(two, guide, X, Y)
    of = lambda p: bound(dgp.ELBO(), p, two, guide, X, Y)  # noqa: E731
    value, slope = jax.jit(jax.value_and_grad(of))(params)
    tune(monkeypatch, cells=700)
    again, same = jax.jit(jax.value_and_grad(of))(params)
    np.testing.assert_allclose(again, value, rtol=1e-10)
    np.testing.assert_allclose(same["g_auto_transition"], slope["g_auto_transition"], rtol=1e-7, atol=1e-9)


@pytest.mark.long
def test_closed_form_in_single_precision():
    guide = G.Markov(two)
    params = moved(two, guide, X, Y)
    x, y, points = (jnp.asarray(a, jnp.float32) for a in (X, Y, Z))
    narrow = lambda X, y=None: two(X, y, points=points)  # noqa: E731
    single = bound(dgp.ELBO(), {n: v.astype(jnp.float32) for n, v in params.items()}, narrow, G.Markov(narrow), x, y)
    np.testing.assert_allclose(single, bound(dgp.ELBO(), params, two, guide, X, Y), rtol=1e-3)
