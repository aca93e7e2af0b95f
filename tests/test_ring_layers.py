"""Layers on rings against dense algebra with the periodic kernel: moments, beliefs, bounds, draws, optima."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from dense import kl, log_normal, svgp, svgp_bound
from numpyro import handlers
from numpyro.distributions import kl_divergence
from numpyro.infer import SVI, Trace_ELBO
from programs import agree, draws_of_bound, random_params
from sizes import mostly_long

import numpyro_dgp as dgp
from numpyro_dgp import guides as G
from numpyro_dgp import testing
from numpyro_dgp.functions.weights import DiagonalBelief, FullBelief
from numpyro_dgp.rings.circulant import CirculantMatrix, even_part, hartley
from numpyro_dgp.rings.features import RingFeatures
from numpyro_dgp.rings.optimum import optimal_gain, optimal_mean
from numpyro_dgp.rings.ring_beliefs import RingBelief, RingPrior
from numpyro_dgp.rings.spectra import Ring, periodised

rng = np.random.default_rng(2)
RBF = dgp.kernels.RBF
GRIDS = {"even": dgp.Grid(-6.0, 6.0, 12), "odd": dgp.Grid(-6.0, 6.0, 13), "plane": dgp.Grid(-5.0, 5.0, (6, 7))}
KERNELS = {"even": RBF(1.2, 1.1), "odd": RBF(1.2, 1.1), "plane": RBF(1.2, np.array([1.9, 1.5]))}


def open_gp(value, *args, **kwargs):
    with numpyro.handlers.substitute(data={"f": value}), numpyro.handlers.seed(rng_seed=0):
        return dgp.gp("f", *args, **kwargs)


def inputs(grid, n=9):
    return rng.uniform(-4, 4, (n, len(grid.sizes)))


def belief(family, prior, shape):
    """A random member of each family, and the covariance of u it should have, dense, for scalar functions."""
    positive = lambda: jnp.array(rng.uniform(0.3, 1.5, shape))  # noqa: E731
    loc, w, g, t = jnp.array(rng.normal(size=shape)), positive(), positive(), positive()
    made = {
        "circulant": RingBelief(prior, loc, gain=g),
        "scaled prior": RingBelief(prior, loc, outer=w),
        "scaled circulant": RingBelief(prior, loc, outer=w, gain=g),
        "scaled product": RingBelief(prior, loc, outer=w, gain=g, inner=t),
        "whitened sites": RingBelief(prior, loc, outer=w, powers=(0.0, 0.0)),
        "sites": RingBelief(prior, loc, outer=w, powers=(0.5, 0.0)),
    }[family]
    if len(shape) > 1:
        return made, None
    K = CirculantMatrix(prior.spectrum, prior.blocks).matrix()
    root = CirculantMatrix(jnp.sqrt(prior.spectrum), prior.blocks).matrix()
    g = even_part(g, prior.blocks)
    K2, posterior = (CirculantMatrix(x, prior.blocks).matrix() for x in (g, g**2 * prior.spectrum))
    W, T = jnp.diag(w), jnp.diag(t)
    return made, {
        "circulant": posterior,
        "scaled prior": W @ K @ W,
        "scaled circulant": W @ posterior @ W,
        "scaled product": W @ K2 @ T @ K @ T @ K2 @ W,
        "whitened sites": root @ W @ W @ root,
        "sites": W @ W,
    }[family]


@pytest.mark.long
@pytest.mark.parametrize("which", mostly_long(["plane"], GRIDS))
def test_a_multiple_on_either_side(which):
    """The layer of ``Constant(2.0) * k`` is that of ``k`` with twice the variance, draws included."""
    grid, k = GRIDS[which], KERNELS[which]
    value = jnp.array(rng.normal(size=int(np.prod(grid.sizes))))
    x = inputs(grid)
    expected = open_gp(value, RBF(2.0 * k.variance, k.lengthscale), grid)
    for kernel in (dgp.kernels.Constant(2.0) * k, k * dgp.kernels.Constant(2.0)):
        f = open_gp(value, kernel, grid)
        np.testing.assert_allclose(f(x).loc, expected(x).loc, rtol=1e-9)
        np.testing.assert_allclose(f(x).variance, expected(x).variance, rtol=1e-9)
        draws = [g.prior_draw(jax.random.key(0), jnp.ones((1, 8)), jnp.asarray(x)) for g in (f, expected)]
        for one, other in zip(*draws, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.long
def test_a_multiple_of_an_additive_kernel():
    grid = GRIDS["plane"]
    value = jnp.array(rng.normal(size=sum(grid.sizes)))
    f = open_gp(value, dgp.kernels.Constant(2.0) * (RBF(0.6, 1.9).on(0) + RBF(0.4, 1.5).on(1)), grid)
    expected = open_gp(value, RBF(1.2, 1.9).on(0) + RBF(0.8, 1.5).on(1), grid)
    x = inputs(grid)
    np.testing.assert_allclose(f(x).loc, expected(x).loc, rtol=1e-9)
    np.testing.assert_allclose(f(x).variance, expected(x).variance, rtol=1e-9)


FAMILIES = ["circulant", "scaled prior", "scaled circulant", "scaled product", "whitened sites", "sites"]
FEW = ["diagonal", "scaled circulant", "whitened sites"]


def prior_of(which):
    return open_gp(jnp.zeros(int(np.prod(GRIDS[which].sizes))), KERNELS[which], GRIDS[which]).prior_covariance()


def dense_layer(which, X, m, S):
    """Moments by the text-book formula with unwhitened q(u) = N(m, S)."""
    grid, k = GRIDS[which], KERNELS[which]
    Z, X = grid.points(), jnp.array(X)
    K = prior_of(which).matrix()
    return svgp(*(np.asarray(a) for a in (K, periodised(k, grid, Z, X), periodised(k, grid, X, X), m, S)))


def to_sites(which, v):
    prior = prior_of(which)
    return hartley(jnp.sqrt(prior.spectrum) * v, prior.blocks)


@pytest.mark.long
@pytest.mark.parametrize("which", mostly_long(["plane"], GRIDS))
@pytest.mark.parametrize("family", mostly_long(FEW, ["full", "diagonal", *FAMILIES]))
def test_a_layer_is_svgp_with_the_periodic_kernel(which, family):
    """Moments at inputs, joint covariance, and the divergence, for every family."""
    grid, k, X = GRIDS[which], KERNELS[which], inputs(GRIDS[which])
    C = prior_of(which)
    M = len(C.spectrum)
    prior = RingPrior((M,), C.spectrum, C.blocks)
    if family in FAMILIES:
        q, S = belief(family, prior, (M,))
    else:
        loc, L = jnp.array(rng.normal(size=M)), jnp.array(0.1 * np.tril(rng.normal(size=(M, M))) + np.eye(M))
        q = FullBelief(loc, L) if family == "full" else DiagonalBelief(loc, jnp.diagonal(L))
        half = to_sites(which, (L if family == "full" else jnp.diag(jnp.diagonal(L))).T)
        S = half.T @ half
    m = to_sites(which, q.loc)
    f = open_gp(q, k, grid)
    mean, covariance = dense_layer(which, X, m, S)
    # What the text-book formula itself loses when it solves with a matrix of this condition number.
    atol = 1e-14 * float(C.spectrum.max() / C.spectrum.min()) + 1e-9
    np.testing.assert_allclose(f(X).mean, mean, atol=atol)
    np.testing.assert_allclose(f(X).variance, np.diag(covariance), atol=5 * atol)
    np.testing.assert_allclose(f.joint(X).covariance[0], covariance, atol=5 * atol)
    np.testing.assert_allclose(f.joint(X).variance, f(X).variance, atol=1e-10)
    np.testing.assert_allclose(f.values_on_grid(), m, atol=1e-12)
    expected = kl(*(np.asarray(a) for a in (m, S, np.zeros(M), C.matrix())))
    np.testing.assert_allclose(kl_divergence(q, prior), expected, rtol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_densities_draws_and_moments_of_beliefs(family, key):
    C = prior_of("odd")
    prior = RingPrior((13,), C.spectrum, C.blocks)
    q, _ = belief(family, prior, (13,))
    value, white = q.sample_with_intermediates(key)
    expected = log_normal(np.asarray(value), np.asarray(q.loc), np.asarray(q.covariance))
    np.testing.assert_allclose(q.log_prob(value, white), expected, rtol=1e-8)
    np.testing.assert_allclose(q.log_prob(value), expected, rtol=1e-6)
    np.testing.assert_allclose(q.variance, jnp.diagonal(q.covariance), rtol=1e-9)
    draws = q.sample(key, (20_000,))
    products = (draws - q.loc)[:, :, None] * (draws - q.loc)[:, None]
    assert (abs(products.mean(0) - q.covariance) < 5 * products.std(0) / np.sqrt(20_000)).all()
    batched, _ = belief(family, RingPrior((2, 13), C.spectrum, C.blocks), (2, 13))
    assert batched.sample(key, (3,)).shape == (3, 2, 13)
    assert batched.log_prob(batched.sample(key, (3,))).shape == (3,)


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_several_outputs_with_kernels_of_their_own(family):
    grid, kernels = GRIDS["odd"], [RBF(1.2, 1.1), dgp.kernels.Matern52(0.5, 2.0)]
    f = open_gp(jnp.zeros((2, 13)), kernels, grid, outputs=2)
    prior = RingPrior((2, 13), f.prior_covariance().spectrum, f.prior_covariance().blocks)
    q, _ = belief(family, prior, (2, 13))
    f, X = open_gp(q, kernels, grid, outputs=2), inputs(grid)
    total = 0.0
    for p in range(2):
        one = RingPrior((13,), prior.spectrum[p], prior.blocks)
        part = lambda x, p=p: None if x is None else x[p]  # noqa: E731
        alone = RingBelief(one, q.loc[p], part(q.outer), part(q.gain), part(q.inner), q.powers)
        g = open_gp(alone, kernels[p], grid)
        np.testing.assert_allclose(f(X).mean[:, p], g(X).mean, rtol=1e-9, atol=1e-11)
        np.testing.assert_allclose(f(X).variance[:, p], g(X).variance, rtol=1e-9)
        np.testing.assert_allclose(f.joint(X).covariance[p], g.joint(X).covariance[0], rtol=1e-8, atol=1e-11)
        total = total + kl_divergence(alone, one)
    np.testing.assert_allclose(kl_divergence(q, prior), total, rtol=1e-10)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:gp 'f'. a grid with steps of")
def test_the_prior_comes_back():
    X = inputs(GRIDS["even"])
    f = open_gp(DiagonalBelief(jnp.zeros(12), jnp.ones(12)), dgp.kernels.Matern12(1.3, 0.8), GRIDS["even"])
    expected = periodised(f.kernels, GRIDS["even"], jnp.array(X), jnp.array(X))
    np.testing.assert_allclose(f.joint(X).covariance[0], expected, atol=1e-10)
    np.testing.assert_allclose(f(X).variance, jnp.diagonal(expected), atol=1e-10)


@pytest.mark.slow
def test_additive_kernels_have_one_ring_per_column():
    """Tebbutt (2016), section 3.5: two columns of 12 and 13 points need 25 values, not 156."""
    grid, X = dgp.Grid([-6.0, -6.0], 6.0, (12, 13)), rng.uniform(-4, 4, (9, 2))
    q = DiagonalBelief(jnp.array(rng.normal(size=25)), jnp.array(rng.uniform(0.2, 1.0, 25)))
    kernels = RBF(1.2, 1.1), dgp.kernels.Matern52(0.7, 1.5)
    f = open_gp(q, kernels[0].on(0) + kernels[1].on(1), grid)
    parts = [
        open_gp(DiagonalBelief(q.loc[s], q.scale[s]), k, GRIDS[g])(X[:, [d]])
        for d, (s, k, g) in enumerate([(slice(12), kernels[0], "even"), (slice(12, 25), kernels[1], "odd")])
    ]
    np.testing.assert_allclose(f(X).mean, parts[0].mean + parts[1].mean, rtol=1e-10)
    np.testing.assert_allclose(f(X).variance, parts[0].variance + parts[1].variance, rtol=1e-10)
    C = f.prior_covariance()
    q, S = belief("scaled circulant", RingPrior((25,), C.spectrum, C.blocks), (25,))
    np.testing.assert_allclose(
        kl_divergence(q, RingPrior((25,), C.spectrum, C.blocks)),
        kl(
            np.asarray(f.__class__.values_on_grid(open_gp(q, f.kernels, grid))), S, np.zeros(25), np.asarray(C.matrix())
        ),
        rtol=1e-7,
    )


@pytest.mark.long
@pytest.mark.parametrize("outputs", [None, 2])
def test_leading_dimensions_broadcast(outputs):
    value = jnp.array(rng.normal(size=(12,) if outputs is None else (2, 12)))
    f = open_gp(value, KERNELS["even"], GRIDS["even"], outputs=outputs)
    batch = rng.uniform(-4, 4, (2, 5, 7, 1))
    assert f(batch).shape() == (2, 5, 7, *(() if outputs is None else (2,)))
    np.testing.assert_allclose(f(batch).mean[1, 3], f(batch[1, 3]).mean, rtol=1e-9)
    np.testing.assert_allclose(f.joint(batch).covariance[1, 3], f.joint(batch[1, 3]).covariance, atol=1e-10)


X = np.sort(rng.uniform(-3, 3, (40, 1)), 0)
Y = np.sin(2 * X[:, 0]) + 0.2 * rng.normal(size=40)


def shallow(X, y=None, kernel=KERNELS["even"], grid=GRIDS["even"]):
    g = dgp.gp("g", kernel, grid)
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dgp.Likelihood(g(X), lambda v: dist.Normal(v, 0.2)), obs=y)


def bayesian(X, y=None):
    ls = numpyro.sample("ls", dist.LogNormal(jnp.zeros(2), 0.1).to_event(1))
    f = dgp.gp("f", RBF(0.3, ls[0]), dgp.Grid(-8.0, 8.0, 20), outputs=1, mean=dgp.means.IdentityMean())
    g = dgp.gp("g", dgp.kernels.Matern52(1.0, ls[1]), dgp.Grid(-9.0, 9.0, 15))
    with numpyro.plate("data", len(X)):
        h = numpyro.sample("h", f(X))
        numpyro.sample("y", dgp.Likelihood(g(h), lambda v: dist.Normal(v, 0.2)), obs=y)


RULES = [G.Circulant(), G.ScaledPrior(), G.ScaledCirculant(), G.ScaledProduct(), G.WhitenedSites()]
EVERY = mostly_long([RULES[0], RULES[3]], [G.Full(), G.Diagonal(), *RULES])


@pytest.mark.long
@pytest.mark.parametrize("rule", EVERY, ids=lambda r: type(r).__name__)
def test_the_bound_is_that_of_dense_algebra(rule):
    """One program, and any of the rules; the stock estimator agrees in expectation."""
    guide = G.InducingPoint(shallow, inducing=rule)
    params = random_params(shallow, guide, X, Y)
    program = numpyro.handlers.substitute(numpyro.handlers.seed(guide, 0), data=params)
    sites = numpyro.handlers.trace(program).get_trace(X, Y)
    q, C = sites["g"]["fn"], prior_of("even")
    half = to_sites("even", jnp.linalg.cholesky(q.covariance if hasattr(q, "covariance") else jnp.diag(q.variance)).T)
    Z, k, grid = GRIDS["even"].points(), KERNELS["even"], GRIDS["even"]
    K = [np.asarray(a) for a in (C.matrix(), periodised(k, grid, Z, X), periodised(k, grid, X, X))]
    expected = svgp_bound(Y, 0.2, *K, np.asarray(to_sites("even", q.loc)), np.asarray(half.T @ half))
    found = -dgp.ELBO().loss(jax.random.key(0), params, shallow, guide, X, Y)
    np.testing.assert_allclose(found, expected, rtol=2e-6)
    draws = draws_of_bound(Trace_ELBO(), params, shallow, guide, X, Y, num=400)
    assert agree(draws, np.full(400, float(found)), width=4.0)


@pytest.mark.long
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_rules_keep_the_contract_of_guides(rule):
    testing.check_guide(bayesian, G.InducingPoint(bayesian, inducing=rule), jnp.array(X), jnp.array(Y))


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_a_rule_starts_at_its_scale(rule):
    guide = G.InducingPoint(shallow, inducing=type(rule)(0.1))
    with numpyro.handlers.seed(rng_seed=0), numpyro.handlers.trace() as sites:
        guide(X, Y)
    np.testing.assert_allclose(jnp.mean(sites["g"]["fn"].variance), 0.01, rtol=1e-6)


def test_rules_need_a_ring():
    def on_points(X, y=None):
        shallow(X, y, grid=dgp.Points(X[::4]))

    with pytest.raises(ValueError, match=r"rule Circulant: expected site .g. to be the values of a layer on a"):
        dgp.ELBO().loss(jax.random.key(0), {}, on_points, G.InducingPoint(on_points, inducing=G.Circulant()), X, Y)
    with pytest.raises(ValueError, match="ScaledPrior: expected scale to be positive"):
        G.ScaledPrior(-1.0)


@pytest.mark.slow
def test_function_draws_have_the_noise_of_the_nugget(key):
    """Given v, whole functions vary as much as p(f(x) | v) says, where the nugget leaves much of f unknown."""

    def model(X, y=None):
        f = dgp.gp("f", RBF(1.3, 1.0), dgp.Grid([-5.0], [5.0], (20,), nugget=0.2))
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dgp.Likelihood(f(X), lambda v: dist.Normal(v, 0.1)), obs=y)

    S, x = 3000, np.array([[0.0], [0.3], [2.6]])
    posterior = dgp.Posterior(model, samples={"f": jnp.zeros((S, 20))}).using(num_samples=S, progress_bar=False)
    draws = posterior.functions(key, num_features=50)(x)["y"]
    f, _ = posterior.layers(key, x)["y"]
    error = np.square(draws).std(0) / np.sqrt(S)
    np.testing.assert_array_less(abs(np.square(draws).mean(0) - f(x).variance), 5 * error)


@pytest.mark.long
def test_function_draws_have_the_moments_of_the_posterior(key):
    """One draw is one function at any inputs; over draws, mean and covariance are those of q(f)."""
    guide = G.InducingPoint(shallow)
    svi = SVI(shallow, guide, optax.adam(0.05), dgp.ELBO())
    params = svi.run(jax.random.key(0), 300, X, Y, progress_bar=False).params
    posterior = dgp.Posterior(shallow, guide, params)
    paths, x = posterior.using(num_samples=3000).functions(key), np.array([[-5.5], [-1.0], [0.3], [4.0]])
    draws = paths(x)["y"]
    np.testing.assert_array_equal(draws, paths(x)["y"])
    np.testing.assert_allclose(paths(x[:2])["y"], draws[:, :2], atol=1e-10)
    f, _ = posterior.layers(key, X)["y"]
    joint = f.joint(x)
    assert (abs(draws.mean(0) - joint.mean) < 4.5 * np.sqrt(joint.variance / 3000)).all()
    centred = draws - joint.mean
    products = centred[:, :, None] * centred[:, None]
    assert (abs(products.mean(0) - joint.covariance[0]) < 5 * products.std(0) / np.sqrt(3000) + 1e-9).all()


@pytest.mark.long
@pytest.mark.parametrize("x64", [True, False])
def test_single_precision_data_stay_single(x64):
    jax.config.update("jax_enable_x64", x64)
    try:
        data = jnp.asarray(X, jnp.float32), jnp.asarray(Y, jnp.float32)
        grid = dgp.Grid.around(np.asarray(data[0]), 1.0)

        def model(X, y=None):
            shallow(X, y, kernel=RBF(1.0, 1.0), grid=grid)

        for rule in RULES:
            guide = G.InducingPoint(model, inducing=rule)
            svi = SVI(model, guide, optax.adam(0.02), dgp.ELBO())
            params = svi.get_params(svi.init(jax.random.key(0), *data))
            loss = lambda p, guide=guide: dgp.ELBO().loss(jax.random.key(0), p, model, guide, *data)  # noqa: E731
            value, slope = jax.jit(jax.value_and_grad(loss))(params)
            assert np.isfinite(value)
            for name in params:
                assert params[name].dtype == slope[name].dtype == jnp.float32, name
                assert np.isfinite(slope[name]).all(), name
    finally:
        jax.config.update("jax_enable_x64", True)


@pytest.mark.usefixtures("x32")
@pytest.mark.long
def test_two_layers_on_rings_train_in_single_precision():
    """Smooth kernels, many grid points per lengthscale; the fit explains a step that a stationary layer cannot."""
    x = np.linspace(-2, 2, 80, dtype=np.float32)[:, None]
    y = (np.tanh(8 * x[:, 0]) + 0.05 * np.random.default_rng(7).normal(size=80)).astype(np.float32)

    def model(X, y=None):
        noise = numpyro.param("noise", jnp.float32(0.3), constraint=dist.constraints.positive)
        f = dgp.gp("f", RBF(0.5, 0.7), dgp.Grid(-7.0, 7.0, 45), outputs=1, mean=dgp.means.IdentityMean())
        g = dgp.gp("g", RBF(1.0, 1.0), dgp.Grid(-9.0, 9.0, 45))
        with numpyro.plate("data", len(X)):
            h = numpyro.sample("h", f(X))
            numpyro.sample("y", dgp.Likelihood(g(h), lambda v: dist.Normal(v, noise)), obs=y)

    guide = G.InducingPoint(model)
    result = SVI(model, guide, optax.adam(0.02), dgp.ELBO()).run(jax.random.key(0), 500, x, y, progress_bar=False)
    assert all(value.dtype == jnp.float32 and np.isfinite(value).all() for value in result.params.values())
    assert np.isfinite(result.losses).all()
    assert result.params["noise"] < 0.12
    prediction = dgp.Posterior(model, guide, result.params).predict(jax.random.key(1), x)
    assert prediction.mean.dtype == jnp.float32
    assert np.sqrt(np.square(prediction.mean - np.tanh(8 * x[:, 0])).mean()) < 0.1


def toy(nugget=None, seed=0):
    """Tebbutt (2016), section 3.1.1: 750 inputs in three clusters, 75 inducing points; the whitened covariances A."""
    draw = np.random.default_rng(seed).uniform
    inputs = np.concatenate([draw(-10, -5, 250), draw(-3, 3, 250), draw(6, 10, 250)])
    features = RingFeatures.of(RBF(), Ring(-15.0, 15.0, 75), nugget)
    return features.whitened(jnp.array(inputs[:, None])), RingPrior((75,), features.spectrum, ((75,),))


def gap(q, prior, A):
    """How far the bound with covariance q is below the one with the best covariance, in nats (noise variance 0.1)."""
    loss = 0.5 * q.feature_variance(A).sum() / 0.1 + kl_divergence(q, prior)
    precision = jnp.eye(75) + A.T @ A / 0.1
    return loss - 0.5 * jnp.linalg.slogdet(precision)[1]


@jax.jit
def quadratic(prior, A, gain):
    """Q, where the loss of W circ W is w' Q w / 2 - sum log w and a constant."""
    ones = jnp.ones(75)
    loss = lambda w: gap(RingBelief(prior, jnp.zeros(75), outer=w, gain=gain), prior, A)  # noqa: E731
    return jax.hessian(loss)(ones) - jnp.eye(75)


def newton(Q, w):
    """The minimum of w' Q w / 2 - sum log w: damped Newton steps converge from anywhere."""
    for _ in range(5000):
        g, H = Q @ w - 1 / w, Q + np.diag(w**-2)
        step = np.linalg.solve(H, g)
        size = np.sqrt(g @ step)
        w = w - step / (1 + size * (size > 0.25))
        if size < 1e-6:  # and the next one would be 1e-12
            return w
    raise AssertionError("no convergence")


@pytest.fixture(scope="module")
def families():
    A, prior = toy(nugget=1e-6)
    zero, one = jnp.zeros(75), jnp.ones(75)
    precision = jnp.eye(75) + A.T @ A / 0.1
    H = hartley(jnp.eye(75), ((75,),))
    root = prior.spectrum**-0.5
    at_sites = jnp.diagonal(H @ (root[:, None] * precision * root) @ H)
    gain = 1 / jnp.sqrt(even_part(jnp.diagonal(precision), ((75,),)))
    w = newton(np.asarray(quadratic(prior, A, one)), np.full(75, 0.3))
    both, g = np.ones(75), gain
    for _ in range(60):  # alternately, each optimum exact
        both = newton(np.asarray(quadratic(prior, A, g)), both)
        left = H @ np.diag(both) @ H
        cost = jnp.diagonal(left @ (root[:, None] * precision * root) @ left) * prior.spectrum
        g = 1 / jnp.sqrt(even_part(cost, ((75,),)))
    return (
        A,
        prior,
        {
            "sites": RingBelief(prior, zero, outer=at_sites**-0.5, powers=(0.5, 0.0)),
            "scaled prior": RingBelief(prior, zero, outer=jnp.array(w)),
            "whitened": RingBelief(prior, zero, outer=jnp.diagonal(H @ precision @ H) ** -0.5, powers=(0.0, 0.0)),
            "circulant": RingBelief(prior, zero, gain=gain),
            "scaled circulant": RingBelief(prior, zero, outer=jnp.array(both), gain=g),
        },
    )


@pytest.mark.parametrize(
    ("family", "nats"),
    [("sites", 182.6), ("scaled prior", 75.7), ("whitened", 73.9), ("circulant", 24.9), ("scaled circulant", 22.1)],
)
@pytest.mark.long
def test_gaps_of_the_toy(families, family, nats):
    """How far each family is below the full covariance, with a nugget of 1e-6, to which the first two are sensitive."""
    A, prior, found = families
    np.testing.assert_allclose(gap(found[family], prior, A), nats, atol=0.6)


@pytest.mark.long
def test_the_optimal_circulant_cannot_be_improved(families):
    """Every circulant covariance near the closed form is worse, and its slope is zero."""
    A, prior, found = families
    best = found["circulant"]
    base = gap(best, prior, A)
    for _ in range(20):
        other = best.gain * jnp.exp(0.01 * even_part(jnp.array(rng.normal(size=75)), ((75,),)))
        assert gap(RingBelief(prior, best.loc, gain=other), prior, A) > base
    slope = jax.grad(lambda g: gap(RingBelief(prior, best.loc, gain=g), prior, A))(best.gain)
    np.testing.assert_allclose(slope * best.gain, 0, atol=1e-9)


@pytest.mark.long
def test_scaled_prior_is_concave(families):
    """From another start, the same optimum."""
    A, prior, found = families
    Q = np.asarray(quadratic(prior, A, jnp.ones(75)))
    np.testing.assert_allclose(newton(Q, rng.uniform(0.2, 1.0, 75)), found["scaled prior"].outer, atol=1e-6)
    assert (np.linalg.eigvalsh(Q) > 0).all()
    loss = lambda w: gap(RingBelief(prior, jnp.zeros(75), outer=w), prior, A)  # noqa: E731
    w = jnp.array(rng.uniform(0.2, 1.0, 75))
    np.testing.assert_allclose(loss(2 * w) - loss(w), 1.5 * w @ Q @ w - 75 * np.log(2), rtol=1e-9)


@pytest.mark.long
def test_closed_forms_are_the_optimum_of_the_bound():
    """The mean by conjugate gradients is that of a dense solve, and slopes are zero there and at equation 3.19."""
    f = open_gp(jnp.zeros(12), KERNELS["even"], GRIDS["even"])
    loc, gain = optimal_mean(f, X, Y, 0.2), optimal_gain(f, X, 0.2)
    A = f.features(jnp.array(X))
    dense = jnp.linalg.solve(jnp.eye(12) + A.T @ A / 0.04, A.T @ Y / 0.04)
    np.testing.assert_allclose(loc, dense, atol=1e-8)
    guide = G.InducingPoint(shallow, inducing=G.Circulant())
    loss = lambda p: dgp.ELBO().loss(jax.random.key(0), p, shallow, guide, X, Y)  # noqa: E731
    slopes = jax.grad(loss)({"g_auto_loc": loc, "g_auto_gain": gain})
    np.testing.assert_allclose(slopes["g_auto_loc"], 0, atol=1e-6)
    np.testing.assert_allclose(slopes["g_auto_gain"] * gain, 0, atol=1e-6)
    several = optimal_mean(
        open_gp(jnp.zeros((2, 12)), KERNELS["even"], GRIDS["even"], outputs=2), X, np.stack([Y, -Y], 1), 0.2
    )
    np.testing.assert_allclose(several, np.stack([loc, -loc]), atol=1e-8)


@pytest.mark.slow
def test_bad_input():
    f = open_gp(jnp.zeros(12), KERNELS["even"], GRIDS["even"])
    with pytest.raises(ValueError, match=r"expected inputs on the ring, from -6.0 to 6.0, got 1 outside, .* 6.5"):
        f(np.array([[0.0], [6.5]]))
    inside, outside = jax.jit(lambda x: f(x).mean)(np.array([[-5.5], [6.5]]))
    assert np.isfinite(inside)
    assert np.isnan(outside)
    with pytest.raises(ValueError, match="expected inputs with D = 1 columns"):
        f(np.zeros((3, 2)))
    with pytest.raises(ValueError, match="expected kernels of all outputs to act on the same columns"):
        open_gp(jnp.zeros((2, 42)), [RBF(), RBF().on(0)], GRIDS["plane"], outputs=2)
    with pytest.raises(ValueError, match=r"expected whitened values of shape \(12,\), got \(5,\)"):
        open_gp(jnp.zeros(5), KERNELS["even"], GRIDS["even"])
    with pytest.raises(ValueError, match=r"Grid.around: expected lengthscale to be positive"):
        dgp.Grid.around(X, 0.0)
    with pytest.raises(ValueError, match=r"optimal_mean: expected a function on a dgp.Grid with one kernel"):
        optimal_mean(open_gp(jnp.zeros(10), RBF(), dgp.Points(X[::4])), X, Y, 0.1)
    with pytest.raises(ValueError, match="has no spectral density"):
        open_gp(jnp.zeros(12), dgp.kernels.Linear(), GRIDS["even"])


@pytest.mark.long
def test_natural_step_goes_to_the_optimal_mean():
    """Tebbutt (2016) takes other steps for the mean; one of size 1 in natural coordinates is enough."""
    grid = dgp.Grid(-2.0, 6.0, 16)
    x = jnp.asarray(rng.uniform(0.0, 4.0, size=(40, 1)))
    y = jnp.sin(x[:, 0])

    def model(x, y=None):
        f = dgp.gp("f", dgp.kernels.RBF(), grid)
        with numpyro.plate("data", len(x)):
            numpyro.sample("y", dgp.Likelihood(f(x), lambda v: dist.Normal(v, 0.2)), obs=y)

    guide = G.InducingPoint(model)
    svi = SVI(model, guide, dgp.optim.NaturalGradient(guide, 1.0, optax.sgd(0.0)), dgp.ELBO())
    params = svi.run(jax.random.key(0), 1, x, y, progress_bar=False).params
    with numpyro.handlers.seed(rng_seed=0):
        f = dgp.gp("f", dgp.kernels.RBF(), grid)
    np.testing.assert_allclose(params["f_auto_loc"], dgp.rings.optimal_mean(f, x, y, 0.2), atol=1e-7)


def _on_ring(X, y=None):
    f = dgp.gp("f", dgp.kernels.RBF(), dgp.Grid(-2.0, 2.0, 16))
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dgp.Likelihood(f(jnp.sin(0.1 * X) * 10), lambda v: dist.Normal(v, 0.1)), obs=y)


@pytest.mark.slow
@pytest.mark.parametrize("method", mostly_long(["predict"], ["predict", "functions", "batches"]))
def test_predictions_outside_of_the_ring_are_an_error(method):
    """Also where the program computes the layer's inputs, and where rows are filled up to a round number."""
    posterior, key = dgp.Posterior(_on_ring, samples={"f": jnp.zeros((10, 16))}), jax.random.key(0)
    calls = {
        "predict": lambda X: posterior.predict(key, X).mean,
        "functions": lambda X: posterior.functions(key)(X)["y"],
        "batches": lambda X: posterior.using(batch_size=2, progress_bar=False).predict(key, X).mean,
    }
    inside = jnp.array([[-1.0], [0.5], [1.9]])
    assert np.isfinite(calls[method](inside)).all()
    with pytest.raises(ValueError, match=r"inputs on the ring, from -2.0 to 2.0, got 1 outside, for example 3.89"):
        calls[method](inside.at[1].set(4.0))


@pytest.mark.long
def test_draws_of_counts_outside_of_the_ring_are_an_error():
    """Programs with loops that end by chance cannot be compiled with their checks."""

    def model(X, y=None):
        f = dgp.gp("f", dgp.kernels.RBF(), dgp.Grid(-2.0, 2.0, 16))
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dgp.Likelihood(f(X), lambda v: dist.Poisson(jnp.exp(v))), obs=y)

    posterior, key = dgp.Posterior(model, samples={"f": jnp.zeros((10, 16))}), jax.random.key(0)
    assert posterior.sample(key, jnp.array([[0.5]])).shape == (10, 1)
    with pytest.raises(ValueError, match=r"expected inputs on the ring, from -2.0 to 2.0"):
        posterior.sample(key, jnp.array([[4.5]]))


@pytest.mark.long
def test_hidden_values_outside_of_the_ring_are_an_error_in_predictions():
    def model(X, y=None):
        f = dgp.gp("f", RBF(), dgp.Points(jnp.linspace(-1, 1, 5)[:, None]), outputs=1, mean=dgp.means.IdentityMean())
        g = dgp.gp("g", RBF(), dgp.Grid(-6.0, 6.0, 20))
        with numpyro.plate("data", len(X)):
            h = numpyro.sample("h", f(X))
            numpyro.sample("y", dgp.Likelihood(g(h), lambda v: dist.Normal(v, 0.1)), obs=y)

    draws = {"f": jnp.zeros((10, 1, 5)), "g": jnp.ones((10, 20))}
    posterior, key = dgp.Posterior(model, samples=draws), jax.random.key(0)
    assert np.isfinite(posterior.predict(key, jnp.array([[0.5], [1.0]])).mean).all()
    with pytest.raises(ValueError, match=r"expected inputs on the ring, from -6.0 to 6.0"):
        posterior.predict(key, jnp.array([[0.5], [9.0]]))


@pytest.mark.long
def test_inputs_outside_of_a_ring_are_nan_where_they_are_traced():
    """Under ``jit`` no error can be raised; a wrapped input would have the value of another point."""

    def program(x):
        with handlers.seed(rng_seed=0):
            values = dgp.gp("f", dgp.kernels.RBF(), dgp.Grid(-2.0, 2.0, 12))(x)
        return jnp.stack([values.mean, values.variance])

    x = jnp.array([[0.3], [2.5], [-2.0]])
    found = jax.jit(program)(x)
    np.testing.assert_array_equal(np.isnan(found), [[False, True, False]] * 2)
    np.testing.assert_allclose(found[:, ::2], program(x[::2]), rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match=r"expected inputs on the ring, from -2\.0 to 2\.0, got 1 outside"):
        program(x)


@pytest.mark.long
def test_a_fit_whose_hidden_values_leave_a_ring_says_so(key):
    X = jnp.linspace(0, 1, 30)[:, None]

    def deep(X, y=None):
        f = dgp.gp("f", dgp.kernels.RBF(1.0, 0.3), dgp.Points(X[::4]), outputs=1, mean=dgp.means.IdentityMean())
        g = dgp.gp("g", dgp.kernels.RBF(1.0, 0.3), dgp.Grid(-0.1, 1.1, 20))
        with numpyro.plate("data", len(X)):
            h = numpyro.sample("h", f(X))
            numpyro.sample("y", dgp.Likelihood(g(h), lambda v: dist.Normal(v, 0.1)), obs=y)

    svi = SVI(deep, dgp.guides.InducingPoint(deep), optax.adam(0.05), dgp.ELBO())
    with pytest.raises(ValueError, match=r"fit: the loss became nan at step .*expected inputs on the ring"):
        dgp.fit(svi, key, 600, X, jnp.sin(25 * X[:, 0]), progress_bar=False)


@pytest.mark.slow
def test_the_nugget_is_the_same_in_both_precisions():
    """The prior of the values on the grid has the same condition in float32 and in float64."""
    grid = dgp.Grid(-6.0, 6.0, 24)
    spectra = []
    for dtype in (jnp.float32, jnp.float64):
        ends = [np.asarray(end, dtype) for end in (-6.0, 6.0)]
        with handlers.seed(rng_seed=0):
            f = dgp.gp("f", RBF(dtype(1.0), dtype(1.0)), dgp.Grid(*ends, 24))
        spectra.append(np.asarray(f.prior_covariance().spectrum, float))
        assert f.prior_covariance().spectrum.dtype == dtype
    np.testing.assert_allclose(spectra[0], spectra[1], rtol=1e-4)
    # The smallest eigenvalue is the nugget's.
    with handlers.seed(rng_seed=0):
        fine = dgp.gp("f", RBF(2.0, 1.0), dgp.Grid(-6.0, 6.0, 48, nugget=1e-8)).prior_covariance()
    np.testing.assert_allclose(fine.spectrum.min(), 2e-8, rtol=1e-3)
    assert dgp.Grid.around(np.zeros((2, 1)), 1.0, nugget=1e-3).nugget == 1e-3
    assert grid.local(RBF()).nugget == grid.nugget
    with pytest.raises(ValueError, match=r"Grid: expected a nugget between 0 and 1, .*, got 0"):
        dgp.Grid(-6.0, 6.0, 24, nugget=0.0)


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["ScaledPrior", "ScaledCirculant", "ScaledProduct", "Circulant"])
def test_scales_on_a_grid_with_a_tiny_nugget_are_stiff(rule):
    def program(X, nugget):
        f = dgp.gp("f", RBF(), dgp.Grid(-4.0, 4.0, 16, nugget=nugget))
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dgp.Likelihood(f(X), lambda v: dist.Normal(v, 0.3)), obs=X[:, 0])

    guide = dgp.guides.InducingPoint(program, inducing=getattr(dgp.guides, rule)())
    run = handlers.seed(guide, 0)
    run(jnp.zeros((2, 1)), 2.4e-5)
    if rule == "Circulant":
        run(jnp.zeros((2, 1)), 1e-10)
        return
    with pytest.warns(UserWarning, match=rf"rule {rule}: the values of 'f' on its dgp.Grid have a prior covariance of"):
        run(jnp.zeros((2, 1)), 1e-10)
