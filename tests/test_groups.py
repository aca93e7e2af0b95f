"""Layers opened in a plate of groups, against dense algebra group by group and against one layer for all labels."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from dense import rbf, svgp
from numpyro import handlers
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal
from numpyro.infer.util import log_density

import numpyro_dgp as dgp
from numpyro_dgp import guides as G
from numpyro_dgp import kernels as K
from numpyro_dgp.functions.weights import DiagonalBelief, FullBelief, KnownWeights

rng = np.random.default_rng(0)
L, M, NOISE = 3, 4, 0.3
Z = np.linspace(-1.0, 1.0, M)[:, None]
SCALES, VARIANCES = np.array([0.4, 0.7, 1.5]), np.array([0.5, 1.0, 2.0])
BATCHED = jax.vmap(K.RBF)(jnp.array(VARIANCES), jnp.array(SCALES))


def opened(kernel, points=Z, groups=L, u=None, **options):
    """The function of a layer in a plate of groups, given a value at its site."""

    def program():
        with numpyro.plate("groups", groups):
            return dgp.gp("f", kernel, dgp.Points(points), **options)

    with handlers.seed(rng_seed=0), handlers.substitute(data={} if u is None else {"f": u}):
        return program()


def rows(n=9):
    return np.stack([rng.uniform(-1.5, 1.5, n), rng.integers(0, L, n)], 1)


def known(u):
    """A Gaussian with almost no variance around draws of v, and one with a covariance that is not diagonal."""
    tril = np.tril(0.3 * rng.normal(size=(*u.shape, M)), -1) + 0.6 * np.eye(M)
    return {
        "draw": (u, np.zeros((*u.shape, M))),
        "full": (FullBelief(jnp.array(u), jnp.array(tril)), tril),
        "diagonal": (
            DiagonalBelief(jnp.array(u), jnp.full(u.shape, 0.5)),
            np.broadcast_to(0.5 * np.eye(M), tril.shape),
        ),
    }


SHARED = K.RBF(1.2, 0.8)
KERNELS = {
    "own": (K.PerGroup(BATCHED), lambda g: (VARIANCES[g], SCALES[g])),
    "shared": (SHARED, lambda g: (1.2, 0.8)),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "points", "belief"),
    [
        ("own", "shared", "full"),
        *(
            pytest.param(k, p, b, marks=pytest.mark.long)
            for k in KERNELS
            for p in ("shared", "own")
            for b in ("draw", "full", "diagonal")
            if (k, p, b) != ("own", "shared", "full")
        ),
    ],
)
def test_every_row_has_the_moments_of_its_group(kernel, points, belief):
    u, X = rng.normal(size=(L, M)), rows()
    Zs = Z if points == "shared" else np.stack([Z, 0.9 * Z, 0.8 * Z])
    value, tril = known(u)[belief]
    built, of = KERNELS[kernel]
    f = dataclasses.replace(opened(built, Zs), v=KnownWeights(jnp.array(value)) if belief == "draw" else value)
    values, joint = f(X), f.joint(X)
    mean, covariance = np.zeros(len(X)), np.zeros((len(X), len(X)))
    for g in range(L):
        at, z = X[:, 1] == g, Zs if points == "shared" else Zs[g]
        x = X[at, :1]
        Kzz, Kzx, Kxx = (rbf(a, b, *of(g)) for a, b in ((z, z), (z, x), (x, x)))
        root = np.linalg.cholesky(Kzz)
        moments = svgp(Kzz, Kzx, Kxx, root @ u[g], root @ tril[g] @ tril[g].T @ root.T)
        mean[at], covariance[np.ix_(at, at)] = moments
    np.testing.assert_allclose(values.mean, mean, atol=1e-5)
    np.testing.assert_allclose(values.variance, np.diag(covariance), atol=1e-5)
    np.testing.assert_allclose(joint.mean, mean, atol=1e-5)
    np.testing.assert_allclose(joint.covariance[0], covariance, atol=1e-5)


@pytest.mark.long
def test_one_group_is_the_plain_layer():
    u, X = rng.normal(size=M), rng.uniform(-1, 1, (6, 1))
    with handlers.seed(rng_seed=0), handlers.substitute(data={"f": jnp.array(u)}):
        plain = dgp.gp("f", SHARED, dgp.Points(Z))
    grouped = opened(SHARED, groups=1, u=jnp.array(u[None]))
    at = np.concatenate([X, np.zeros((6, 1))], 1)
    for mine, theirs in ((grouped(at), plain(X)), (grouped.joint(at), plain.joint(X))):
        np.testing.assert_allclose(mine.mean, theirs.mean, rtol=1e-10)
        np.testing.assert_allclose(mine.variance, theirs.variance, rtol=1e-10)


def hyperparameters():
    return {"lengthscale": jnp.array(SCALES), "variance": jnp.array(VARIANCES)}


def model(X, y=None, *, points):
    """A function per group whose hyperparameters are drawn in the same plate."""
    with numpyro.plate("groups", L):
        lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
        variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0))
        f = dgp.gp("f", K.PerGroup(jax.vmap(K.RBF)(variance, lengthscale)), dgp.Points(points))
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dgp.Likelihood(f(X), lambda v: dist.Normal(v, NOISE)), obs=y)


def dense_evidence(theta, X, y):
    """The log evidence, the sum of those of exact processes of the groups."""

    def of(g):
        x, z = X[X[:, 1] == g, :1], y[X[:, 1] == g]
        k = K.RBF(theta["variance"][g], theta["lengthscale"][g])(x, x) + NOISE**2 * jnp.eye(len(x))
        return dist.MultivariateNormal(jnp.zeros(len(x)), k).log_prob(z)

    return sum(of(g) for g in range(L))


def log_prior(theta):
    return sum(dist.LogNormal(0.0, 1.0).log_prob(v).sum() for v in theta.values())


def data(n=12):
    X = rows(n)
    X[:, 1] = np.arange(n) % L
    return jnp.array(X), jnp.array(np.sin(2 * X[:, 0]) + 0.5 * X[:, 1] + NOISE * rng.normal(size=n))


@pytest.mark.long
def test_the_collapsed_bound_is_the_evidence_of_every_group():
    X, y = data()
    points = np.array(X[:, :1])

    def bound(theta):
        program = handlers.condition(lambda X, y=None: model(X, y, points=points), theta)
        return -handlers.seed(dgp.ELBO().loss, 0)(jax.random.key(0), {}, program, G.Collapsed(program), X, y)

    def exact(theta):
        return dense_evidence(theta, X, y) + log_prior(theta)

    (mine, by_mine), (theirs, by_theirs) = (jax.value_and_grad(f)(hyperparameters()) for f in (jax.jit(bound), exact))
    np.testing.assert_allclose(mine, theirs, atol=1e-3)
    for name in by_theirs:
        np.testing.assert_allclose(by_mine[name], by_theirs[name], atol=2e-3)


@pytest.mark.long
def test_a_chain_integrates_the_functions_of_all_groups():
    X, y = data()
    theta, points = hyperparameters(), np.array(X[:, :1])
    program = dgp.for_mcmc(lambda X, y=None: model(X, y, points=points))
    density, sites = log_density(handlers.seed(program, 0), (X, y), {}, theta)
    np.testing.assert_allclose(density, dense_evidence(theta, X, y) + log_prior(theta), atol=1e-3)
    assert sites["f"]["value"].shape == (L, len(X))


@pytest.mark.long
def test_the_bound_at_the_optimal_posterior_is_the_evidence():
    X, y = data()
    theta, points = hyperparameters(), np.array(X[:, :1])
    program = handlers.condition(lambda X, y=None: model(X, y, points=points), theta)
    guide = G.InducingPoint(program)
    svi = SVI(program, guide, dgp.optim.NaturalGradient(guide, 1.0, optax.sgd(0.0)), dgp.ELBO())
    state = svi.init(jax.random.key(0), X, y)
    state, _ = svi.update(state, X, y)
    exact = dense_evidence(theta, X, y) + log_prior(theta)
    np.testing.assert_allclose(-svi.evaluate(state, X, y), exact, atol=1e-3)
    params = svi.get_params(state)
    assert params["f_auto_scale_tril"].shape == (L, len(X), len(X))
    plain = handlers.seed(Trace_ELBO(200).loss, 0)(jax.random.key(1), params, program, guide, X, y)
    np.testing.assert_allclose(-plain, exact, atol=1.0)


def deep(X, y=None, latent=False):
    """A hidden layer per group with a layer for all above; its function may have a latent column."""
    with numpyro.plate("groups", L):
        f = dgp.gp("f", SHARED, dgp.Points(np.concatenate([Z, Z], 1) if latent else Z), outputs=2)
    g = dgp.gp("g", SHARED, dgp.Points(np.concatenate([Z, -Z], 1)))
    with numpyro.plate("data", len(X)):
        x = X
        if latent:
            w = dgp.latent("w", X[:, :1], 1)
            x = jnp.concatenate([w, jnp.broadcast_to(X[:, 1:], (*w.shape[:-1], 1))], -1)
        h = numpyro.sample("h", f(x, noise=0.3))
        numpyro.sample("y", dgp.Likelihood(g(h), lambda v: dist.Normal(v, NOISE)), obs=y)


def flat(X, y=None):
    model(X, y, points=Z)


def with_latent(X, y=None):
    deep(X, y, latent=True)


GUIDES = {
    "InducingPoint": (flat, G.InducingPoint),
    "Diagonal": (flat, lambda m: G.InducingPoint(m, inducing=G.Diagonal(), latent=G.Delta())),
    "LowRank": (flat, lambda m: G.InducingPoint(m, inducing=G.LowRank(2))),
    "deep": (deep, G.InducingPoint),
    "GivenInducing": (deep, lambda m: G.InducingPoint(m, sites={"h": G.GivenInducing()})),
    "MeanField": (deep, G.MeanField),
    "Collapsed": (deep, G.Collapsed),
    "AutoNormal": (flat, AutoNormal),
    "ImportanceWeighted": (with_latent, lambda m: G.ImportanceWeighted(m, num_samples=3)),
}


@pytest.mark.long
@pytest.mark.parametrize("name", GUIDES)
def test_guides_take_groups(name):
    program, guide = GUIDES[name]
    assert np.isfinite(loss(program, guide(program)))


@pytest.mark.long
def test_a_guide_of_a_program_with_groups_is_a_guide():
    dgp.testing.check_guide(flat, G.InducingPoint(flat), *data(), num=100)


@pytest.mark.long
def test_a_group_without_rows_is_predicted_by_the_prior_of_groups():
    X, y = data()
    seen = X.at[:, 1].set(X[:, 1] % 2)  # nothing of group 2
    guide = G.InducingPoint(flat, latent=G.Delta())
    optimizer = dgp.optim.NaturalGradient(guide, 0.5, optax.adam(0.01))
    result = dgp.fit(SVI(flat, guide, optimizer, dgp.ELBO()), jax.random.key(0), 40, seen, y, progress_bar=False)
    posterior = dgp.Posterior(flat, guide, result.params)
    new = seen.at[:, 1].set(2.0)
    np.testing.assert_allclose(result.params["f_auto_loc"][2], 0.0, atol=1e-6)
    prediction = posterior.predict(jax.random.key(1), new)
    np.testing.assert_allclose(prediction.mean, 0.0, atol=1e-5)
    np.testing.assert_allclose(prediction.variance, result.params["variance_auto_loc"][2] + NOISE**2, rtol=1e-3)


@pytest.mark.long
def test_draws_of_functions_have_the_covariance():
    f, X, num = opened(K.PerGroup(BATCHED)), jnp.array(rows(5)), 5000
    draw = lambda key: f.prior_draw(key, jax.random.normal(key, (1, 64)) / 8, X)[0][:, 0]  # noqa: E731
    draws = jax.vmap(draw)(jax.random.split(jax.random.key(0), num))
    products = draws[:, :, None] * draws[:, None]
    error = products.std(0) / num**0.5
    assert jnp.abs((products.mean(0) - f.covariance(X)[0]) / error).max() < 5


@pytest.mark.long
def test_slopes_and_sums():
    f = opened(K.PerGroup(BATCHED), u=jnp.array(rng.normal(size=(L, M))))
    X = jnp.array(rows())
    slopes = jax.vmap(jax.grad(lambda x: f(x[None]).mean[0]))(X)[:, 0]
    np.testing.assert_allclose(f.grad(X, 0).mean, slopes, rtol=1e-6)
    A = rng.normal(size=(2, len(X)))
    np.testing.assert_allclose(f.linear(X, A).mean, A @ f(X).mean, rtol=1e-8)
    np.testing.assert_allclose(f.linear(X, A).variance, np.diag(A @ f.joint(X).covariance[0] @ A.T), rtol=1e-6)


@pytest.mark.long
def test_single_precision(x32):
    f = opened(K.PerGroup(jax.tree.map(jnp.float32, BATCHED)), np.float32(Z), u=jnp.ones((L, M), jnp.float32))
    values = f(jnp.array(rows(), jnp.float32))
    assert values.mean.dtype == values.variance.dtype == jnp.float32
    assert np.isfinite(values.variance).all()


def in_plates(kernel=SHARED, points=Z, **options):
    with handlers.seed(rng_seed=0), numpyro.plate("groups", **({"size": L} | options)):
        return dgp.gp("f", kernel, dgp.Points(points))


def nested():
    with numpyro.plate("schools", 2):
        in_plates()


def loss(program, guide):
    X, y = data()
    return handlers.seed(dgp.ELBO().loss, 0)(jax.random.key(0), {}, program, guide, X, y)


@pytest.mark.parametrize("kernel", [SHARED, K.PerGroup(BATCHED)])
@pytest.mark.parametrize("name", ["draw", "full", "diagonal"])
def test_traced_labels_that_are_none_have_no_mean(kernel, name):
    """Means were those of the nearest group, or of the last one for -1."""
    f = opened(kernel, u=known(rng.normal(size=(L, M)))[name][0])
    x = jnp.array([[0.1, 1.0], [0.1, -1.0], [0.1, float(L)], [0.1, 0.5]])
    found = jax.jit(lambda x: (f(x).mean, f(x).variance))(x)
    for values in found:
        assert np.isnan(values).tolist() == [False, True, True, True]
    np.testing.assert_allclose(found[0][0], f(x[:1]).mean[0], rtol=1e-12)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: K.PerGroup(K.RBF), r"PerGroup: expected a kernel with hyperparameters .* got type: jax.vmap\("),
        (
            lambda: K.PerGroup(K.RBF(1.0, jnp.ones(3))),
            r"PerGroup: expected hyperparameters .* got shapes \[\(\), \(3,\)\]",
        ),
        (lambda: K.PerGroup(BATCHED).diag(Z), r"the label of the group as the last column, got shape \(4, 1\)"),
        (
            lambda: K.PerGroup(BATCHED).diag([[0.0, 3.0]]),
            r"PerGroup\.\w+: expected labels 0 to 2 in the last column .* got 3",
        ),
        (lambda: in_plates(subsample_size=2), "gp 'f': expected a plate of all groups, got 2 of 3 in plate 'groups'"),
        (
            lambda: in_plates(K.PerGroup(BATCHED), size=4),
            "hyperparameters of 4 groups, as plate 'groups' has, got",
        ),
        (lambda: in_plates([SHARED]), "expected one kernel in plate 'groups', got 1: kernels with one per group"),
        (
            lambda: in_plates(points=np.stack([Z, Z])),
            r"or \(3, M, D\) for the groups of plate 'groups', got \(2,",
        ),
        (nested, "open the layer outside every plate, .* in a single plate of groups, a layer on dgp.Points"),
        (
            lambda: in_plates()(Z),
            r"1 column\(s\) and a label, for 'f' in a plate of",
        ),
        (lambda: in_plates()([[0.0, 0.5]]), "expected labels 0 to 2 in column 1 of its inputs, got 0.5"),
        (lambda: in_plates().whitened_values_of(in_plates()), "expected layers opened outside of plates"),
    ],
)
def test_refusals(build, message):
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.long
@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: loss(deep, G.Collapsed(deep, hidden=G.GivenInducing())),
            "Collapsed: expected hidden layer 'h', .* opened outside of plates, got a function for",
        ),
        (
            lambda: loss(flat, G.InducingPoint(flat, inducing=G.GlobalInducing(4, labels=[1]))),
            r"GlobalInducing: expected layer 'f' to be opened outside of plates, .* sites=\{'f': guides.Full\(\)\}",
        ),
        (
            lambda: loss(with_latent, G.Collapsed(with_latent)),
            "Collapsed: expected known inputs of layer 'f', a GroupedFunction, got Gaussian ones",
        ),
    ],
)
def test_guides_that_refuse_name_another(build, message):
    with pytest.raises(ValueError, match=message):
        build()
