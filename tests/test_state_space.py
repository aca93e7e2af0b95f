"""State spaces against dense algebra: matrices of kernels, evidence and moments in O(N), layers on inducing states."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
import tinygp
from dense import log_normal
from numpyro.infer import MCMC, NUTS, SVI
from programs import agree, random_params
from scipy.linalg import expm
from sizes import mostly_long, tune

import numpyro_dgp as dgp
from numpyro_dgp import guides as G
from numpyro_dgp.functions.weights import FullBelief, FunctionDraw
from numpyro_dgp.kernels.state_space_forms import MaternState, StateSpaceForm
from numpyro_dgp.math.kalman import Element, join, shock_factors

K = dgp.kernels
rng = np.random.default_rng(3)
ORDER = 14
KERNELS = {
    "Matern12": K.Matern12(1.3, 0.7),
    "Matern32": K.Matern32(1.3, 0.7),
    "Matern52": K.Matern52(1.3, 0.7),
    "Cosine": K.Cosine(1.3, 0.7),
    "Periodic": K.Periodic(1.3, 1.1, 2.0),
    "Constant": K.Constant(0.4) + K.Matern12(0.5, 3.0),
    "two Materns": K.Matern32(1.0, 2.0) * K.Matern52(1.0, 3.0),
    "sum of products": K.Matern52(1.3, 5.0) * K.Cosine(1.0, 3.0) + 0.3 * K.Matern12(0.3) + 0.2,
    "one column": (K.Matern32(1.3, 0.7) + K.Matern12(0.2, 9.0)).on(0),
    "decaying period": K.Periodic(1.0, 1.3, 2.0) * K.Matern32(1.0, 8.0),
}


def series(n=40):
    """Irregular times with a gap and repetitions, and a different noise at each."""
    t = np.sort(np.random.default_rng(1).uniform(0, 6, n))
    t[n // 2 :] += 7
    t[5], t[n // 2 + 1 : n // 2 + 3] = t[4], t[n // 2]
    return t, np.sin(t) + 0.1 * np.random.default_rng(2).normal(size=n), np.linspace(0.05, 0.3, n)


def dense(kernel, t, y, noise, where):
    """Evidence, slope by y, and moments at other times, by dense algebra."""
    C = np.asarray(kernel.gram(t[:, None])) + np.diag(np.broadcast_to(noise**2, len(t)))
    cross, solved = np.asarray(kernel(where[:, None], t[:, None])), np.linalg.solve(C, y)
    variance = np.asarray(kernel.diag(where[:, None])) - (cross * np.linalg.solve(C, cross.T).T).sum(1)
    return log_normal(y, 0.0, C), -solved, cross @ solved, variance


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", mostly_long(["two Materns"], ["two Materns", "Matern12", "Matern52", "sum of products", "decaying period"])
)
def test_matrices_are_those_of_the_differential_equation(name):
    form = KERNELS[name].state_space(ORDER)
    h, P = np.asarray(form.observation()), np.asarray(form.covariance())
    times = np.array([0.0, 1e-4, 0.1, 1.0, 30.0])

    @jax.jit
    def matrices(t):
        return jax.jacfwd(form.transition)(0.0), form.transition(t), form.noise(t), StateSpaceForm.noise(form, t)

    drift, *found = map(np.asarray, matrices(times))
    Phi, Q, difference = (np.moveaxis(a, -1, 0) for a in found)
    np.testing.assert_allclose(Phi, expm(drift * times[:, None, None]), atol=1e-11)
    np.testing.assert_allclose(Q, P - Phi @ P @ Phi.mT, atol=1e-13)
    np.testing.assert_allclose(difference, Q, atol=1e-13)
    np.testing.assert_allclose(h @ Phi @ P @ h, KERNELS[name](np.zeros((1, 1)), times[:, None])[0], atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("order", mostly_long([3], [1, 2, 3]))
def test_process_noise_of_tiny_steps(order, x32):
    """Against the leading power of the time: in single precision the difference P - Phi P Phi' has no digit left."""
    form, time = MaternState(jnp.float32(1.0), jnp.float32(1.0), order), 1e-3
    size = {1: 2.0, 2: 4.0, 3: 16 / 3}[order]
    i = np.arange(order)
    factorial = np.array([1.0, 1.0, 2.0])[i[::-1]]
    power = 2 * order - 1 - i[:, None] - i
    expected = size * time**power / (factorial[:, None] * factorial * power)

    @jax.jit
    def matrices(t):
        slopes = jax.jacfwd(lambda rate: MaternState(1.0, rate, order).noise(t))(jnp.float32(1.0))
        return form.noise(t), form.transition(t), slopes

    Q = np.asarray(matrices(np.float32(time))[0])
    np.testing.assert_allclose(Q, expected, rtol=5e-3)
    factor, inverse = map(np.asarray, shock_factors(Q))
    np.testing.assert_allclose(factor @ factor.T, Q, rtol=1e-5)
    np.testing.assert_allclose(inverse @ factor, np.eye(order), atol=1e-4)
    for extreme in (0.0, 1e-30, 1e30):
        assert all(np.isfinite(a).all() for a in matrices(np.float32(extreme)))


@pytest.mark.long
def test_joining_is_associative():
    def element(d=3):
        A, B, C = rng.normal(size=(3, d, d))
        return Element(*map(jnp.asarray, (A, rng.normal(size=d), B @ B.T, rng.normal(size=d), C @ C.T, rng.normal())))

    a, b, c = element(), element(), element()
    together = jax.jit(lambda a, b, c: (join(join(a, b), c), join(a, join(b, c))))
    for one, other in zip(*together(a, b, c), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9)


WAYS = ["Matern32", "Matern52", "decaying period", "sum of products", "two Materns, scan"]


@pytest.mark.long
@pytest.mark.parametrize("way", mostly_long(["Matern32"], WAYS))
def test_evidence_and_moments_are_those_of_dense_algebra(way, monkeypatch):
    """With times that repeat, a gap, noise of each row and a mask; by chunks and by the parallel scan."""
    name, *scan = way.split(", ")
    if scan:
        tune(monkeypatch, chunk=4)
        jax.clear_caches()
    t, y, noise = series()
    observed = np.ones(40, bool)
    observed[[0, 7, 39]] = False
    where = np.array([30.0, t[4], -2.0, 3.3, t[20], 5.5, *t])
    o = observed
    evidence, slope, mean, variance = dense(KERNELS[name], t[o], y[o] - 0.3, noise[o], where)
    d = dgp.functions.StateSpaceNormal(KERNELS[name], t, noise[o], observed, loc=0.3, order=ORDER)
    found = jax.jit(lambda y: (jax.value_and_grad(d.log_prob)(y), d.posterior(y, where)))(y[o])
    np.testing.assert_allclose(found[0][0], evidence, rtol=1e-8)
    np.testing.assert_allclose(found[0][1], slope, rtol=1e-8, atol=1e-8)
    np.testing.assert_allclose(found[1][0], mean, atol=1e-8)
    np.testing.assert_allclose(found[1][1], variance, atol=1e-8)
    if scan:
        jax.clear_caches()


@pytest.mark.long
@pytest.mark.parametrize("name", ["Periodic"])
def test_slopes_of_the_evidence(name):
    """By the hyperparameters and the noise, against those of dense algebra."""
    t, y, _ = series(24)
    kind = type(KERNELS[name])

    def by_states(p):
        return dgp.functions.StateSpaceNormal(kind(p[0], p[1]), t, p[2], order=ORDER).log_prob(y)

    def by_matrices(p):
        C = kind(p[0], p[1]).gram(t[:, None]) + p[2] ** 2 * jnp.eye(24)
        return dist.MultivariateNormal(0.0, C).log_prob(y)

    p = jnp.array([0.8, 1.3, 0.2])
    expected, slopes = jax.jit(jax.value_and_grad(by_matrices))(p)
    found, by_chain = jax.jit(jax.value_and_grad(by_states))(p)
    np.testing.assert_allclose(found, expected, rtol=1e-9)
    np.testing.assert_allclose(by_chain, slopes, rtol=1e-7)


@pytest.mark.long
def test_evidence_and_moments_are_those_of_tinygp():
    q = tinygp.kernels.quasisep
    theirs = q.Matern32(0.7, np.sqrt(1.3)) + q.Matern52(0.7, np.sqrt(1.3))
    ours = KERNELS["Matern32"] + KERNELS["Matern52"]
    t, y, noise = series(300)
    where = np.linspace(-1, 15, 50)
    process = tinygp.GaussianProcess(theirs, t, diag=noise**2)
    expected = process.condition(y, where)
    d = dgp.functions.StateSpaceNormal(ours, t, noise)
    mean, variance = d.posterior(y, where)
    np.testing.assert_allclose(d.log_prob(y), expected.log_probability, rtol=1e-9)
    np.testing.assert_allclose(mean, expected.gp.loc, atol=1e-8)
    np.testing.assert_allclose(variance, expected.gp.variance, atol=1e-7)


@pytest.mark.long
def test_single_precision(x32):
    t, y, noise = series(200)
    d = dgp.functions.StateSpaceNormal(KERNELS["Matern52"], t, noise)
    assert d.log_prob(y).dtype == jnp.float32
    evidence, _, mean, variance = dense(KERNELS["Matern52"], t, y, noise, t)
    np.testing.assert_allclose(d.log_prob(y), evidence, rtol=1e-4)
    np.testing.assert_allclose(d.posterior(y), (mean, variance), atol=1e-4)


@pytest.mark.long
@pytest.mark.parametrize(("name", "noise"), [("Matern52", None), ("Constant", 0.3)])
def test_draws_have_the_covariance(name, noise, monkeypatch):
    t, _, _ = series(12)
    d = dgp.functions.StateSpaceNormal(KERNELS[name], t, noise, loc=0.5)
    draws = np.asarray(d.sample(jax.random.key(0), (20_000,)))
    C = np.asarray(KERNELS[name].gram(t[:, None])) + (0 if noise is None else noise**2) * np.eye(12)
    products = (draws - 0.5)[:, :, None] * (draws - 0.5)[:, None]
    assert (abs(products.mean(0) - C) < 5 * products.std(0) / np.sqrt(20_000) + 1e-9).all()
    np.testing.assert_allclose(d.mean, 0.5)
    np.testing.assert_allclose(d.variance, np.diag(C), rtol=1e-9)
    if noise:
        white = jax.random.normal(jax.random.key(1), (2, *d.white_shape))
        in_turn = d.from_white(white)
        tune(monkeypatch, chunk=4)
        jax.clear_caches()
        np.testing.assert_allclose(d.from_white(white), in_turn, atol=1e-9)
        jax.clear_caches()


@pytest.mark.long
def test_several_sets_of_values_and_own_times():
    t, y, _ = series()
    observed = np.arange(40) % 3 > 0
    d = dgp.functions.StateSpaceNormal(KERNELS["Matern12"], t, 0.1, observed)
    one = y[observed]
    sets = np.stack([one, 2 * one, one**2]).reshape(3, 1, -1)

    @jax.jit
    def found(sets):
        return d.log_prob(sets), d.posterior(sets), d.posterior(sets[1, 0], t[:, None])

    evidence, (mean, variance), others = found(sets)
    assert evidence.shape == (3, 1)
    assert mean.shape == (3, 1, 40)
    C = np.asarray(KERNELS["Matern12"].gram(t[observed, None])) + 0.01 * np.eye(len(one))
    np.testing.assert_allclose(evidence[2, 0], log_normal(one**2, 0.0, C), rtol=1e-9)
    np.testing.assert_allclose((mean[1, 0], variance), others, atol=1e-12)


@pytest.mark.long
def test_the_scan_goes_with_the_platform(monkeypatch, x32):
    """On an accelerator the only loops are those over the few steps of a chunk, and none is longer."""
    t = np.arange(1000.0)

    def text(platform):
        jax.clear_caches()
        monkeypatch.setattr(jax, "default_backend", lambda: platform)
        d = dgp.functions.StateSpaceNormal(K.Matern12(), t, 0.1)
        y = jax.ShapeDtypeStruct((1000,), jnp.float32)
        lowering = "cpu" if platform == "cpu" else "cuda"
        found = jax.jit(d.log_prob).trace(y).lower(lowering_platforms=(lowering,)).as_text()
        jax.clear_caches()
        return found.count("stablehlo.while"), {int(n) for n in re.findall(r"dense<(\d+)> : tensor<i32>", found)}

    _, numbers = text("cpu")
    assert 32 in numbers  # steps of a chunk, and chunks
    loops, numbers = text("gpu")
    assert loops == 1
    assert numbers == {0, 1, 16}


@pytest.mark.long
def test_chains_with_a_series_observed_and_latent():
    t, y, _ = series(30)

    def exact(y=None):
        lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 0.5))
        noise = numpyro.sample("noise", dist.LogNormal(-1.5, 0.5))
        numpyro.sample("y", dgp.functions.StateSpaceNormal(K.Matern32(1.0, lengthscale), t, noise), obs=y)

    mcmc = MCMC(NUTS(exact), num_warmup=100, num_samples=200, progress_bar=False)
    mcmc.run(jax.random.key(0), jnp.asarray(y))
    draws = mcmc.get_samples()
    # The posterior mean of the lengthscale on a grid of both hyperparameters, by dense algebra.
    lengths, noises = np.exp(np.linspace(-1.5, 2.5, 25)), np.exp(np.linspace(-4.0, 0.0, 25))
    log_weights = np.array(
        [
            [dense(K.Matern32(1.0, a), t, y, b, t[:1])[0] + log_prior(a, 0.0) + log_prior(b, -1.5) for b in noises]
            for a in lengths
        ]
    )
    weights = np.exp(log_weights - log_weights.max()).sum(1)
    assert abs(draws["lengthscale"].mean() - (weights * lengths).sum() / weights.sum()) < 0.1

    def counts(y=None):
        f = numpyro.sample("f", dgp.functions.StateSpaceNormal(K.Matern32(1.0, 2.0), t))
        numpyro.sample("y", dist.Poisson(jnp.exp(f)).to_event(1), obs=y)

    mcmc = MCMC(NUTS(dgp.for_mcmc(counts)), num_warmup=100, num_samples=100, progress_bar=False)
    mcmc.run(jax.random.key(0), jnp.asarray(rng.poisson(np.exp(np.sin(t)))))
    draws = mcmc.get_samples()
    assert draws["f_white"].shape == (100, 30, 2)
    assert np.corrcoef(draws["f"].mean(0), np.sin(t))[0, 1] > 0.5


def log_prior(value, loc):
    """LogNormal(loc, 0.5) of a point of a grid in the logarithm."""
    return -0.5 * ((np.log(value) - loc) / 0.5) ** 2


# Layers


def open_gp(value, *args, **kwargs):
    with numpyro.handlers.substitute(data={"f": value}), numpyro.handlers.seed(rng_seed=0):
        return dgp.gp("f", *args, **kwargs)


def states(kernel, times, inputs, order=ORDER):
    """Covariances of all states with each other and of values at inputs with them, one pair of times at a time."""
    form = kernel.state_space(order)
    P, h = np.asarray(form.covariance()), np.asarray(form.observation())
    apart = jnp.asarray(np.abs(np.concatenate([times, inputs])[:, None] - times))
    moved = np.moveaxis(np.asarray(jax.jit(form.transition)(apart)), (0, 1), (-2, -1)) @ P
    blocks = [
        [m if s >= t else m.T for t, m in zip(times, row, strict=True)]
        for s, row in zip([*times, *inputs], moved, strict=True)
    ]
    M = len(times)
    return np.block(blocks[:M]), np.stack([np.concatenate([h @ b for b in row]) for row in blocks[M:]])


@pytest.mark.slow
@pytest.mark.parametrize("name", mostly_long(["Matern32"], ["Matern32", "Matern52", "sum of products"]))
def test_a_layer_conditions_on_its_states(name):
    """Inputs before, between, at and behind the times, two of which are the same."""
    kernel, times = KERNELS[name], np.array([0.0, 0.4, 0.4, 1.5, 6.0])
    x = np.array([-1.0, 0.0, 0.2, 0.4, 1.0, 3.0, 6.0, 8.0])
    between, cross = states(kernel, times, x)
    explained = cross @ np.linalg.pinv(between, rcond=1e-12, hermitian=True) @ cross.T
    v = jnp.asarray(rng.normal(size=len(between)))
    space = dgp.StateSpace(times, order=ORDER)
    L = np.tril(0.1 * rng.normal(size=between.shape)) + np.eye(len(between))

    @jax.jit
    def moments(x, v, L):
        f, q = (open_gp(u, kernel, space) for u in (v, FullBelief(v, L)))
        return f.features(x), f(x).mean, f(x).variance, q(x).mean, q(x).variance, f.joint(x).conditional_covariance[0]

    A, mean, variance, q_mean, q_variance, joint = map(np.asarray, moments(x[:, None], v, L))
    np.testing.assert_allclose(A @ A.T, explained, atol=1e-8)
    wanted = np.asarray(kernel.gram(x[:, None])) - explained
    np.testing.assert_allclose(mean, A @ v, atol=1e-10)
    np.testing.assert_allclose(variance, np.diag(wanted), atol=1e-8)
    np.testing.assert_allclose(joint, wanted, atol=1e-8)
    np.testing.assert_allclose(q_mean, A @ v, atol=1e-10)
    np.testing.assert_allclose(q_variance, np.diag(wanted + A @ L @ L.T @ A.T), atol=1e-8)


@pytest.mark.slow
def test_states_of_matern_12_are_values():
    """The layer is that on ``Points``: the same v, the same moments."""
    times, x = np.array([0.0, 0.3, 1.5, 2.0]), np.linspace(-1, 3, 9)[:, None]
    v = jnp.asarray(rng.normal(size=4))

    @jax.jit
    def moments(x):
        both = (open_gp(v, KERNELS["Matern12"], r) for r in (dgp.StateSpace(times), dgp.Points(times[:, None])))
        return [(f(x).mean, f(x).variance, f.features(x)) for f in both]

    for ours, theirs in zip(*moments(x), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-8)


@pytest.mark.long
def test_slopes_are_known_where_the_states_are():
    """At a time, behind it and after all of them, against differences of the mean."""
    f = open_gp(jnp.asarray(rng.normal(size=10)), K.Matern32(), dgp.StateSpace(np.arange(5.0)))
    x, step = jnp.array([[1.0], [1.5], [5.0]]), 1e-5

    @jax.jit
    def slopes(x):
        found = f.grad(x)
        return found.mean, found.variance, (f(x + step).mean - f(x - step).mean) / (2 * step)

    mean, variance, differences = slopes(x)
    np.testing.assert_allclose(mean, differences, rtol=1e-4)
    assert variance[0] < 1e-8 < 0.1 < variance[1] < variance[2] < 3.0


@pytest.mark.long
def test_several_outputs():
    times, x = np.array([0.0, 0.3, 1.5, 2.0]), np.linspace(-1, 3, 9)[:, None]
    kernels = [K.Matern32(1.3, 0.7), K.Matern32(0.4, 2.0)]
    v = jnp.asarray(rng.normal(size=(2, 8)))
    R = jnp.asarray(np.tril(rng.normal(size=(2, 8, 8))))

    @jax.jit
    def moments(x, v, R):
        space, found = dgp.StateSpace(times), []
        for both, each in [(v, v), (FullBelief(v, R), [FullBelief(*a) for a in zip(v, R, strict=True)])]:
            f = open_gp(both, kernels, space, outputs=2)(x)
            alone = [open_gp(u, k, space)(x) for u, k in zip(each, kernels, strict=True)]
            found += [(f.mean, jnp.stack([g.mean for g in alone], -1))]
            found += [(f.variance, jnp.stack([g.variance for g in alone], -1))]
        return found

    for ours, theirs in moments(x, v, R):
        np.testing.assert_allclose(ours, theirs, atol=1e-12)
    shared = open_gp(v, kernels[0], dgp.StateSpace(times), outputs=2)
    np.testing.assert_allclose(
        shared(x).mean[:, 1], open_gp(v[1], kernels[0], dgp.StateSpace(times))(x).mean, atol=1e-12
    )
    batch = shared(np.stack([x, x + 0.1]))
    assert batch.shape() == (2, 9, 2)
    np.testing.assert_allclose(batch.mean[0], shared(x).mean, atol=1e-12)


@pytest.mark.long
@pytest.mark.parametrize("name", ["sum of products"])
def test_random_states_have_the_covariance(name):
    """Of prior draws: values and shocks together, as draws of whole functions need them."""
    kernel, times, x = KERNELS[name], np.array([0.0, 0.4, 1.5]), np.array([-1.0, 0.2, 1.0, 3.0])
    f = open_gp(jnp.zeros(3 * kernel.state_space(ORDER).size), kernel, dgp.StateSpace(times, order=ORDER))
    at_rows, v = f.prior_draw(jax.random.key(0), jnp.eye(8000), x[:, None])  # one weight each: the functions themselves
    A = f.features(x[:, None])
    for found, wanted in ((at_rows.T, kernel.gram(x[:, None])), (v, A.T)):
        products = at_rows.T[:, :, None] * found[:, None]
        error = products.std(0) / np.sqrt(8000)
        assert (abs(products.mean(0) - (wanted if found is not v else A)) < 5 * error + 1e-6).all()


@pytest.mark.long
def test_draws_of_functions_are_functions():
    f = open_gp(FunctionDraw(jnp.ones(6), jax.random.key(0)), KERNELS["Matern52"], dgp.StateSpace(np.array([0.0, 2.0])))
    x = np.linspace(-1, 3, 7)[:, None]
    value = jax.jit(lambda x: f(x).mean)
    np.testing.assert_allclose(value(x)[2:4], value(x[2:4]), atol=1e-9)
    space, ends = dgp.StateSpace(np.array([0.0, 2.0])), np.array([[0.0], [2.0]])
    at_times = open_gp(jnp.ones(6), KERNELS["Matern52"], space)(ends)
    np.testing.assert_allclose(value(ends), at_times.mean, atol=1e-6)


T = np.linspace(-2.2, 2.2, 8)
X = jnp.asarray(np.sort(np.random.default_rng(0).uniform(-2, 2, (30, 1)), 0))
Y = jnp.sin(2 * X[:, 0]) + 0.1 * np.random.default_rng(1).normal(size=30)


def shallow(X, y=None, batch=None, *, inducing=dgp.StateSpace(T), kernel=K.Matern32(1.2, 0.9)):
    g = dgp.gp("g", kernel, inducing)
    with numpyro.plate("data", len(X), subsample_size=batch) as i:
        numpyro.sample("y", dgp.Likelihood(g(X[i]), lambda v: dist.Normal(v, 0.2)), obs=None if y is None else y[i])


def deep(X, y=None, batch=None, *, inducing=dgp.StateSpace(T), kernel=K.Matern32(0.3, 0.9)):
    f = dgp.gp("f", kernel, inducing, outputs=1, mean=dgp.means.IdentityMean())
    g = dgp.gp("g", kernel, inducing)
    with numpyro.plate("data", len(X), subsample_size=batch) as i:
        h = numpyro.sample("h", f(X[i], noise=0.1))
        numpyro.sample("y", dgp.Likelihood(g(h), lambda v: dist.Normal(v, 0.2)), obs=None if y is None else y[i])


@pytest.mark.long
def test_with_all_inputs_among_the_times_the_bound_is_the_evidence():
    def program(X, y=None):
        shallow(X, y, inducing=dgp.StateSpace(X))

    guide = G.InducingPoint(program)
    svi = SVI(program, guide, dgp.optim.NaturalGradient(guide, 1.0, optax.sgd(0.0)), dgp.ELBO())
    losses = svi.run(jax.random.key(0), 2, X, Y, progress_bar=False).losses
    expected = dgp.functions.StateSpaceNormal(K.Matern32(1.2, 0.9), X, 0.2).log_prob(Y)
    np.testing.assert_allclose(-losses[1], expected, rtol=1e-6)


# Beside the program each guide gets which program it is: one layer or two.
GUIDES = {
    "InducingPoint": (G.InducingPoint, deep),
    "Diagonal": (lambda m: G.InducingPoint(m, inducing=G.Diagonal()), shallow),
    "LowRank": (lambda m: G.InducingPoint(m, inducing=G.LowRank(3)), shallow),
    "MixtureOfGaussians": (lambda m: G.InducingPoint(m, inducing=G.MixtureOfGaussians(2)), shallow),
    "Flow": (lambda m: G.InducingPoint(m, inducing=G.Flow()), shallow),
    "MeanField": (G.MeanField, deep),
    "GivenInducing": (lambda m: G.InducingPoint(m, sites={"h": G.GivenInducing()}), deep),
    "GivenInducing free": (lambda m: G.InducingPoint(m, sites={"h": G.GivenInducing("free")}), deep),
    "GivenBelow": (lambda m: G.InducingPoint(m, sites={"h": G.GivenBelow()}), deep),
    "JointOutputs": (lambda m: G.InducingPoint(m, sites={"h": G.JointOutputs()}), deep),
    "MarkovInducing": (
        lambda m: G.InducingPoint(m, sites={"g": G.MarkovInducing(below="f"), "h": G.GivenInducing("free")}),
        deep,
    ),
    "GlobalInducing": (lambda m: G.InducingPoint(m, inducing=G.GlobalInducing(5)), deep),
    "Collapsed": (G.Collapsed, shallow),
}


@pytest.mark.long
@pytest.mark.parametrize("name", GUIDES)
def test_guides_take_states(name):
    """The bound, on shapes."""
    make, program = GUIDES[name]
    found = jax.eval_shape(lambda X, Y: dgp.ELBO().loss(jax.random.key(0), {}, program, make(program), X, Y), X, Y)
    assert found.shape == ()


@pytest.mark.long
@pytest.mark.parametrize("name", ["GlobalInducing"])
def test_guides_have_the_bound_that_they_have_on_points(name):
    """States of a Matern 1/2 are values: with the same parameters and the same random numbers nothing differs."""
    make, program = GUIDES[name]

    def loss(inducing):
        model = partial(program, inducing=inducing, kernel=K.Matern12(0.5, 0.9))
        guide = make(model)
        params = random_params(model, guide, X, Y)
        return jax.jit(lambda p: dgp.ELBO().loss(jax.random.key(0), p, model, guide, X, Y))(params)

    np.testing.assert_allclose(loss(dgp.StateSpace(T)), loss(dgp.Points(T[:, None])), rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "match"),
    [
        pytest.param(
            G.Collapsed,
            r"expected known inputs of layer .g., a StateFunction, .*use guides.InducingPoint\(\)",
            marks=pytest.mark.long,
        ),
        (
            lambda m: G.InducingPoint(m, inducing=G.Circulant()),
            r"expected site .f. to be the values of",
        ),
    ],
    ids=["Collapsed above a hidden layer", "rules of rings"],
)
def test_guides_that_refuse_name_one_that_does(make, match):
    with pytest.raises(ValueError, match=match):
        jax.eval_shape(lambda: dgp.ELBO().loss(jax.random.key(0), {}, deep, make(deep), jnp.asarray(X), jnp.asarray(Y)))


@pytest.mark.long
def test_predictions_draws_and_chains():
    guide = G.InducingPoint(shallow)
    svi = SVI(shallow, guide, dgp.optim.NaturalGradient(guide, 1.0, optax.sgd(0.0)), dgp.ELBO())
    params = svi.run(jax.random.key(0), 2, X, Y, progress_bar=False).params
    posterior = dgp.Posterior(shallow, guide, params)
    x = np.linspace(-2, 2, 5)[:, None]
    found = posterior.predict(jax.random.key(1), x)
    (values,) = posterior.using(num_samples=400).functions(jax.random.key(2))(x).values()
    assert agree(values[:, 2], np.full(400, float(found.mean[2])), width=4.0)

    mcmc = MCMC(NUTS(dgp.for_mcmc(shallow)), num_warmup=50, num_samples=100, progress_bar=False)
    mcmc.run(jax.random.key(0), X, Y)
    chain = dgp.Posterior(shallow, samples=mcmc.get_samples()).predict(jax.random.key(1), x)
    np.testing.assert_allclose(chain.mean, found.mean, atol=0.1)
