"""Collapsed bounds whose inputs depend on each other: values given the layer below, joint outputs, projections.

The references are sums over quadrature nodes of the equations, with dense algebra."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro import handlers
from numpyro.infer import SVI
from programs import agree, draws_of_bound, random_params

import numpyro_dgp as dgp
from numpyro_dgp import guides as G
from numpyro_dgp import kernels as k
from numpyro_dgp.bounds import Observations, from_features
from numpyro_dgp.guides.record import record_of
from numpyro_dgp.math.whitening import inverse_cholesky

rng = np.random.default_rng(2)
N = 4
X = jnp.array(np.sort(rng.uniform(-2, 2, size=(N, 1)), 0))
Y = jnp.sin(2 * X[:, 0])
Z = jnp.linspace(-2, 2, 3)[:, None]
Z2, Z3 = (jnp.array(rng.normal(size=(4, D))) for D in (2, 3))
FIRST, SECOND, LAST = k.RBF(0.5, 0.9), k.RBF(0.8, 1.1), k.RBF(1.1, jnp.array([0.9, 1.2, 1.5]))
S2, NOISE = np.array([0.3, 0.2]), 0.35


def three(X, y=None):
    """A column, two columns above it, and both of them beside the data; a mean function in the middle."""
    f1 = dgp.gp("f1", FIRST, dgp.Points(Z), outputs=1)
    f2 = dgp.gp("f2", SECOND, dgp.Points(Z), outputs=2, mean=dgp.means.LinearMean(jnp.array([[1.0, -0.5]])))
    g = dgp.gp("g", LAST, dgp.Points(Z3))
    with numpyro.plate("data", len(X)), handlers.scale(scale=0.7):
        h1 = numpyro.sample("h1", f1(X, noise=0.4))
        h2 = numpyro.sample("h2", f2(h1, noise=jnp.array(S2)))
        x = jnp.concatenate([X, h2], -1)
        numpyro.sample("y", dgp.Likelihood(g(x), lambda v: dist.Normal(v, NOISE)), obs=y)


def value(model, guide, params, *data):
    return -dgp.ELBO().loss(jax.random.key(0), params, model, guide, *(data or (X, Y)))


def nodes(dims, count=30):
    """Nodes (Q, dims) and weights (Q,) of standard normal numbers."""
    points, weights = np.polynomial.hermite_e.hermegauss(count)
    weights = weights / weights.sum()
    product = list(itertools.product(range(count), repeat=dims))
    return points[product].reshape(-1, dims), np.prod(weights[product].reshape(-1, dims), -1)


def quadratic(kernel, Z, noise, x, h, weights, variance=0.0):
    """E[log N(h; f(x), noise^2)] as (Phi, b, c), at nodes x (N, Q, D), with targets h (N, Q) less the mean function."""
    flat = jnp.reshape(x, (-1, x.shape[-1]))
    A = np.asarray(kernel(flat, Z) @ inverse_cholesky(kernel.gram(Z)).T).reshape(*x.shape[:2], -1)
    square = h**2 + np.asarray(kernel.diag(flat)).reshape(h.shape) - (A**2).sum(-1)
    Phi = np.einsum("q,nqi,nqj->ij", weights, A, A) / noise**2
    b = np.einsum("q,nq,nqi->i", weights, h, A) / noise**2
    c = -0.5 * len(h) * math.log(2 * math.pi * noise**2) - 0.5 * (square @ weights + variance).sum() / noise**2
    return Phi, b, c


def optimum(Phi, b, c, scale=1.0):
    """Mean and covariance of the optimal q(v), and the bound."""
    P = np.eye(len(b)) + scale * Phi
    m = np.linalg.solve(P, scale * b)
    return m, np.linalg.inv(P), scale * c + 0.5 * scale * b @ m - 0.5 * np.linalg.slogdet(P)[1]


def entropy(variance):
    return 0.5 * np.log(2 * np.pi * np.e * variance).sum()


def given_below(scale=0.3):
    guide = G.Collapsed(three, sites={"h2": G.GivenBelow()})
    params = random_params(three, guide, X, Y, scale=scale)
    return guide, params | {"h2_auto_slopes": jnp.array(rng.normal(size=(N, 2, 1)))}


@pytest.mark.slow
def test_values_given_the_layer_below():
    """h1 and the two columns of h2 are jointly Gaussian; every expectation is over all three."""
    guide, params = given_below()
    m1, o1 = (np.asarray(params[f"h1_auto_{n}"])[:, 0] for n in ("loc", "scale"))
    G2, t, o2 = (np.asarray(params[f"h2_auto_{n}"]) for n in ("slopes", "shift", "scale"))
    x = np.asarray(X)
    _, _, first = optimum(*quadratic(FIRST, Z, 0.4, x[:, None], m1[:, None], np.ones(1), o1**2), 0.7)
    e, w = nodes(1, 60)
    h1 = (m1 + o1 * e).T  # (N, Q)
    total = first + 0.7 * (entropy(o1**2) + entropy(o2**2))
    for p, slope in enumerate((1.0, -0.5)):
        h2 = G2[:, p] * h1 + t[:, p, None]
        term = quadratic(SECOND, Z, S2[p], h1[..., None], h2 - slope * h1, w, o2[:, p] ** 2)
        total += optimum(*term, 0.7)[2]
    e, w = nodes(3, 24)
    h1 = m1[:, None] + o1[:, None] * e[:, 0]
    h2 = [G2[:, p] * h1 + t[:, p, None] + o2[:, p, None] * e[:, 1 + p] for p in range(2)]
    inputs = np.stack([np.broadcast_to(x, h1.shape), *h2], -1)
    mean, covariance, last = optimum(*quadratic(LAST, Z3, NOISE, inputs, np.asarray(Y)[:, None] + 0 * h1, w), 0.7)
    np.testing.assert_allclose(value(three, guide, params), total + last, rtol=1e-8)
    with handlers.seed(rng_seed=0), handlers.substitute(data=params), handlers.trace() as sites:
        guide(X, Y)
    np.testing.assert_allclose(sites["g"]["fn"].loc, mean, atol=1e-8)
    np.testing.assert_allclose(sites["g"]["fn"].covariance, covariance, atol=1e-8)
    apart = params | {"h2_auto_slopes": 0 * params["h2_auto_slopes"]}  # G = 0 is mean field
    rename = {"h2_auto_shift": "h2_auto_loc"}
    mean_field = {rename.get(n, n): v for n, v in apart.items() if n != "h2_auto_slopes"}
    np.testing.assert_allclose(value(three, guide, apart), value(three, G.Collapsed(three), mean_field), rtol=1e-12)


@pytest.mark.slow
def test_quadrature_of_kernels_takes_the_same_covariances():
    guide, params = given_below()
    by_nodes = G.Collapsed(three, sites={"h2": G.GivenBelow()}, integrate=dgp.likelihoods.GaussHermite(14))
    np.testing.assert_allclose(value(three, by_nodes, params), value(three, guide, params), rtol=1e-4)


def two(X, y=None):
    f = dgp.gp("f", FIRST, dgp.Points(Z), outputs=2, mean=dgp.means.ConstantMean(0.2))
    g = dgp.gp("g", LAST, dgp.Points(Z3))
    with numpyro.plate("data", len(X)), handlers.scale(scale=0.7):
        h = numpyro.sample("h", f(X, noise=jnp.array(S2)))
        x = jnp.concatenate([X, h], -1)
        numpyro.sample("y", dgp.Likelihood(g(x), lambda v: dist.Normal(v, NOISE)), obs=y)


JOINT = G.Collapsed(two, sites={"h": G.JointOutputs(scale=0.5)})


def joint_params(W):
    return {"h_auto_loc": jnp.array(rng.normal(size=(N, 2))), "h_auto_precision_tril": jnp.array(W)}


@pytest.mark.slow
def test_outputs_that_follow_together():
    """The terms of f over v ~ N(m, S) by dense algebra, those of g over both correlated columns by nodes."""
    W = np.tril(rng.normal(size=(N, 2, 2)))
    W[:, [0, 1], [0, 1]] = 0.3 + rng.uniform(size=(N, 2))
    params = joint_params(W)
    mu, root_s = np.asarray(params["h_auto_loc"]), np.diag(S2)
    Omega = [root_s @ np.linalg.inv(np.eye(2) + w @ w.T) @ root_s for w in W]
    a = np.asarray(FIRST(X, Z) @ inverse_cholesky(FIRST.gram(Z)).T)
    A = [np.kron(np.eye(2), row) for row in a]  # f_p(x_n) = a_n' v_p: (2, 2 M)
    precision = np.diag(1 / S2**2)
    T = [own @ precision @ An for own, An in zip(Omega, A, strict=True)]
    Phi = sum(0.7 * An.T @ precision @ An for An in A)
    m = np.linalg.solve(np.eye(6) + Phi, sum(0.7 * An.T @ precision @ (u - 0.2) for An, u in zip(A, mu, strict=True)))
    shared = sum(0.7 * An.T @ precision @ own @ precision @ An for An, own in zip(A, Omega, strict=True))
    Sigma = np.linalg.inv(np.eye(6) + Phi - shared)
    total = -0.5 * (np.trace(Sigma) + m @ m - 6 - np.linalg.slogdet(Sigma)[1])
    for An, Tn, own, u, row in zip(A, T, Omega, mu, a, strict=True):
        between = Tn - An
        square = np.diag(own + between @ Sigma @ between.T) + (u - 0.2 - An @ m) ** 2 + 0.5 - row @ row
        density = -0.5 * (np.log(2 * np.pi * S2**2) + square / S2**2).sum()
        total += 0.7 * (density + 0.5 * np.linalg.slogdet(2 * np.pi * np.e * own)[1])
    e, w = nodes(2, 40)
    C = [own + Tn @ Sigma @ Tn.T for own, Tn in zip(Omega, T, strict=True)]
    h = np.stack([u + e @ np.linalg.cholesky(c).T for u, c in zip(mu, C, strict=True)])
    inputs = np.concatenate([np.broadcast_to(np.asarray(X)[:, None], (*h.shape[:2], 1)), h], -1)
    last = optimum(*quadratic(LAST, Z3, NOISE, inputs, np.asarray(Y)[:, None] + 0 * h[..., 0], w), 0.7)[2]
    np.testing.assert_allclose(value(two, JOINT, params), total + last, rtol=1e-8)
    with handlers.seed(rng_seed=0), handlers.substitute(data=params), handlers.trace() as sites:
        JOINT(X, Y)
    np.testing.assert_allclose(sites["f"]["fn"].loc.reshape(-1), m, atol=1e-8)
    root = sites["f"]["fn"].scale_tril
    np.testing.assert_allclose(root @ root.T, Sigma, atol=1e-8)
    h = jax.vmap(lambda key: handlers.seed(handlers.substitute(JOINT, params), key)(X, Y)["h"])
    draws = np.asarray(h(jax.random.split(jax.random.key(0), 4000)))
    np.testing.assert_allclose(draws.mean(0), mu, atol=0.05)
    for n in range(N):
        np.testing.assert_allclose(np.cov(draws[:, n].T), C[n], atol=0.1 * np.trace(C[n]))


@pytest.mark.slow
def test_outputs_without_correlations_are_those_of_given_inducing():
    each = G.Collapsed(two, hidden=G.GivenInducing())
    w = 0.3 + rng.uniform(size=(N, 2))
    together = joint_params(w[..., None] * np.eye(2))
    apart = {"h_auto_loc": together["h_auto_loc"], "h_auto_ratio": jnp.array(1 / (1 + w**2))}
    np.testing.assert_allclose(value(two, JOINT, together), value(two, each, apart), rtol=1e-12)
    joint, each = (
        G.Collapsed(two, hidden=rule, hidden_density="marginal") for rule in (G.JointOutputs(), G.GivenInducing())
    )
    np.testing.assert_allclose(value(two, joint, together), value(two, each, apart), rtol=1e-12)


D = 3
WIDE = jnp.array(rng.normal(size=(N, D)))
SCALE = jnp.array([0.5, 1.0, 0.3])


def projected(X, y=None, outputs=2, columns=False):
    """A projection beside a latent."""
    A = dgp.projection("A", D, outputs, SCALE[: 1 if columns else D].sum() if columns else SCALE, mean=0.1)
    g = dgp.gp("g", LAST if outputs else SECOND, dgp.Points(Z3 if outputs else Z2))
    with numpyro.plate("data", len(X)):
        z = numpyro.sample("z", A.columns(X) if columns else A(X))
        x = dgp.latent("w", z if outputs else z[:, None], 1)
        numpyro.sample("y", dgp.Likelihood(g(x), lambda v: dist.Normal(v, NOISE)), obs=y)


def one_column(X, y=None):
    A = dgp.projection("A", 1, None, 0.8)
    g = dgp.gp("g", SECOND, dgp.Points(Z))
    with numpyro.plate("data", len(X)):
        z = numpyro.sample("z", A(X))
        numpyro.sample("y", dgp.Likelihood(g(z[:, None]), lambda v: dist.Normal(v, NOISE)), obs=y)


@pytest.mark.slow
def test_a_projection_by_nodes_of_its_matrix():
    """One input and one output: the expectation over the number that A is."""
    guide = G.Collapsed(one_column, sites={"A": G.Full()})
    params = {"A_auto_loc": jnp.array([0.4]), "A_auto_scale_tril": jnp.array([[0.6]])}
    e, w = nodes(1, 80)
    A = 0.8 * (0.4 + 0.6 * e)
    z = np.asarray(X)[:, None] * A  # (N, Q, 1)
    last = optimum(*quadratic(SECOND, Z, NOISE, z, np.asarray(Y)[:, None] + 0 * z[..., 0], w))[2]
    divergence = 0.5 * (0.4**2 + 0.6**2 - 1 - 2 * np.log(0.6))
    np.testing.assert_allclose(value(one_column, guide, params), last - divergence, rtol=1e-8)


@pytest.mark.parametrize(
    ("rule", "outputs"),
    [
        pytest.param(G.Full(), 2, marks=pytest.mark.slow),
        pytest.param(G.Diagonal(), None, marks=pytest.mark.slow),
        pytest.param(G.LowRank(1), 2, marks=pytest.mark.long),
        pytest.param(G.Full(), None, marks=pytest.mark.long),
    ],
)
def test_projections_against_draws_of_the_same_posterior(rule, outputs):
    """InducingPoint with q(v) at the optimum draws z from its marginals; the collapsed bound has no draws."""
    model = lambda X, y=None: projected(X, y, outputs)  # noqa: E731
    guide, explicit = G.Collapsed(model, sites={"A": rule}), G.InducingPoint(model, sites={"A": rule, "w": G.Normal()})
    params = random_params(model, guide, WIDE, Y)
    params["A_auto_loc"] = params["A_auto_loc"] + 0.5
    bound = value(model, guide, params, WIDE, Y)
    np.testing.assert_allclose(-dgp.ELBO().loss(jax.random.key(1), params, model, guide, WIDE, Y), bound, rtol=1e-12)
    with handlers.seed(rng_seed=0), handlers.substitute(data=params), handlers.trace() as sites:
        guide(WIDE, Y)
    q = sites["g"]["fn"]
    assert record_of(sites["A"]).gaussian == rule.gaussian
    optimal = params | {"g_auto_loc": q.loc, "g_auto_scale_tril": q.scale_tril}
    assert agree(draws_of_bound(dgp.ELBO(), optimal, model, explicit, WIDE, Y), np.array([bound]))
    nested = G.Nested(model, sites={"A": rule})  # the same integrals with q(v) given
    np.testing.assert_allclose(value(model, nested, optimal, WIDE, Y), bound, rtol=1e-9)
    ours = dgp.Posterior(model, guide.on(WIDE, Y), params).using(num_samples=4000)
    theirs = dgp.Posterior(model, explicit, optimal).using(num_samples=4000)
    new = WIDE[:2] + 0.3
    ours, theirs = (p.predict(jax.random.key(i), new) for i, p in enumerate((ours, theirs)))
    np.testing.assert_allclose(ours.mean, theirs.mean, atol=0.03)
    np.testing.assert_allclose(ours.variance, theirs.variance, rtol=0.1)
    draw = guide.sample_posterior(jax.random.key(0), params, WIDE, Y)
    np.testing.assert_allclose(draw["z"].reshape(N, -1), WIDE * SCALE @ draw["A"].reshape(-1, D).T + 0.1, rtol=1e-9)


@pytest.mark.slow
def test_labels_are_one_hot_rows():
    labels = jnp.array([0, 2, 2, 1])
    gathered = lambda labels, y=None: projected(labels, y, columns=True)  # noqa: E731

    def multiplied(labels, y=None):
        A = dgp.projection("A", D, 2, SCALE[0], mean=0.1)
        g = dgp.gp("g", LAST, dgp.Points(Z3))
        with numpyro.plate("data", N):
            x = dgp.latent("w", numpyro.sample("z", A(jnp.eye(D)[labels])), 1)
            numpyro.sample("y", dgp.Likelihood(g(x), lambda v: dist.Normal(v, NOISE)), obs=y)

    guides = [G.Collapsed(model, sites={"A": G.Diagonal()}) for model in (gathered, multiplied)]
    params = random_params(gathered, guides[0], labels, Y)
    values = [value(guide.model, guide, params, labels, Y) for guide in guides]
    np.testing.assert_allclose(*values, rtol=1e-10)


def twice(X, y=None):
    A = dgp.projection("A", D, 1)
    g = dgp.gp("g", SECOND, dgp.Points(Z2))
    with numpyro.plate("data", len(X)):
        x = jnp.hstack([numpyro.sample("z", A(X)), numpyro.sample("z2", A(X**2))])
        numpyro.sample("y", dgp.Likelihood(g(x), lambda v: dist.Normal(v, NOISE)), obs=y)


def of_hidden_values(X, y=None):
    f = dgp.gp("f", FIRST, dgp.Points(Z3), outputs=D)
    A = dgp.projection("A", D, 2)
    g = dgp.gp("g", SECOND, dgp.Points(Z2))
    with numpyro.plate("data", len(X)):
        z = numpyro.sample("z", A(numpyro.sample("h", f(X, noise=0.1))))
        numpyro.sample("y", dgp.Likelihood(g(z), lambda v: dist.Normal(v, NOISE)), obs=y)


def into_the_likelihood(X, y=None):
    A = dgp.projection("A", D, None)
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dgp.Likelihood(A(X), lambda v: dist.Normal(v, NOISE)), obs=y)


@pytest.mark.parametrize(
    ("model", "sites", "message"),
    [
        (projected, {}, r"a Gaussian rule for the matrix of projection 'A', got none: sites=\{'A': dgp.guides.Full"),
        (projected, {"A": G.FullJoint()}, "of projection 'A', got JointInducing"),
        (projected, {"A": G.Full(), "z": G.Normal()}, "a distribution of its own for 'z', which a Projection gives no"),
        (twice, {"A": G.Full()}, "one site of values of the projection 'A', got 'z' and 'z2': .*InducingPoint"),
        (of_hidden_values, {"A": G.Full()}, "Gaussian latents and hidden layers to be inputs of layers only"),
        (into_the_likelihood, {}, "expected the layer at 'y' to be on dgp.Points or a dgp.Basis, got Projection"),
    ],
)
def test_bad_input(model, sites, message):
    with pytest.raises(ValueError, match=message):
        SVI(model, G.Collapsed(model, sites=sites), optax.sgd(0.0), dgp.ELBO()).init(jax.random.key(0), WIDE, Y)


@pytest.mark.parametrize(
    ("sites", "message"),
    [
        ({}, "a distribution of its own for 'z', which a Projection gives no variance"),
        ({"z": G.Propagate()}, "Markov.*: expected layers on data, latents and hidden values, got .* 'z'"),
    ],
)
def test_markov_takes_no_projections(sites, message):
    with pytest.raises(ValueError, match=message):
        SVI(projected, G.Markov(projected, sites=sites), optax.sgd(0.0), dgp.ELBO()).init(jax.random.key(0), WIDE, Y)


def deep_step(X, y=None):
    """Two hidden layers of one column."""
    points, start = dgp.Points(jnp.linspace(-1.5, 1.5, 5)[:, None]), dgp.means.IdentityMean()
    f1 = dgp.gp("f1", k.RBF(0.5, 0.7), points, outputs=1, mean=start)
    f2 = dgp.gp("f2", k.RBF(0.5, 0.7), points, outputs=1, mean=start)
    g = dgp.gp("g", k.RBF(1.0, 0.6), points)
    with numpyro.plate("data", len(X)):
        h1 = numpyro.sample("h1", f1(X, noise=0.3))
        h2 = numpyro.sample("h2", f2(h1, noise=0.3))
        numpyro.sample("y", dgp.Likelihood(g(h2), lambda v: dist.Normal(v, 0.1)), obs=y)


@pytest.mark.long
def test_values_given_the_layer_below_have_the_larger_bound_and_it_is_below_the_evidence():
    """At the optimum of each, started at that of mean field. In the evidence, too, the last layer enters by its
    bound."""
    x = jnp.linspace(-1, 1, 10)[:, None]
    y = jnp.sign(x[:, 0]) + 0.1 * jnp.array(np.random.default_rng(3).normal(size=10))

    def best(guide, **start):
        svi = SVI(deep_step, guide, optax.sgd(0.0), dgp.ELBO())
        found = dgp.optim.minimize(svi, jax.random.key(0), x, y, max_steps=300, progress_bar=False, **start)
        return -found.losses[-1], found.params

    mean_field, params = best(G.Collapsed(deep_step))
    start = {n.replace("h2_auto_loc", "h2_auto_shift"): v for n, v in params.items()}
    start["h2_auto_slopes"] = jnp.zeros((10, 1, 1))
    below, _ = best(G.Collapsed(deep_step, sites={"h2": G.GivenBelow()}), init_params=start)
    assert below > mean_field + 0.02
    Z, inner, outer = jnp.linspace(-1.5, 1.5, 5)[:, None], k.RBF(0.5, 0.7), k.RBF(1.0, 0.6)
    whiten, last = (inverse_cholesky(kernel.gram(Z)).T for kernel in (inner, outer))

    def log_weight(key):
        h, keys = x, jax.random.split(key, 4)
        for v_key, e_key in (keys[:2], keys[2:]):
            A = inner(h, Z) @ whiten
            left = inner.diag(h) - jnp.square(A).sum(-1) + 0.3**2
            mean = h[:, 0] + A @ jax.random.normal(v_key, (5,))
            h = (mean + jnp.sqrt(left) * jax.random.normal(e_key, (10,)))[:, None]
        return from_features(outer(h, Z) @ last, outer.diag(h), Observations(y, 0.1)).bound()

    log_weights = jax.lax.map(log_weight, jax.random.split(jax.random.key(1), 200_000), batch_size=5000)
    weights = np.exp(np.asarray(log_weights) - log_weights.max())
    evidence, error = np.log(weights.mean()) + log_weights.max(), weights.std() / weights.mean() / np.sqrt(len(weights))
    print(f"mean field {mean_field:.3f}, given below {below:.3f}, evidence {evidence:.3f} ({error:.3f})")
    assert below < evidence + 3 * error
