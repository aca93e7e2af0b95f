"""Vecchia's approximation: against the exact process at all neighbours, against dense algebra at few."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from dense import log_normal
from numpyro import handlers
from numpyro.infer import MCMC, NUTS, SVI
from numpyro.infer.autoguide import AutoNormal
from numpyro.infer.util import log_density
from sizes import mostly_slow

import numpyro_dgp as dgp
from numpyro_dgp import guides as G
from numpyro_dgp.algebra.conditioning_sets import maxmin_order, nearest, schedule
from numpyro_dgp.algebra.vecchia import each_conditional
from numpyro_dgp.inference.block_plan import planned
from numpyro_dgp.inference.gaussian_blocks import latents
from numpyro_dgp.model.sites import site_kind

rng = np.random.default_rng(0)
N = 14
X = np.random.default_rng(1).normal(size=(N, 2))
NEW = np.random.default_rng(2).normal(size=(5, 2))
K = dgp.kernels.Matern32(1.3, 0.8)
TWO = (K, dgp.kernels.RBF(0.7, 0.5) + 0.3 * dgp.kernels.Linear())
FULL, FEW = dgp.Neighbours(X, num=N), dgp.Neighbours(X, num=3)


def values(noise=0.0):
    return np.stack([np.sin(X).sum(1), np.cos(X[:, 0])], 1) + noise


def pair(near, kernel=K, outputs=2, mean=dgp.means.Identity()):
    """The same function on neighbours, and exactly."""
    return tuple(dgp.gp("f", kernel, inducing, outputs=outputs, mean=mean) for inducing in (near, None))


def matrix(q):
    """The linear maps (P, N, N) from standard normal numbers to values less their mean."""
    return jax.vmap(lambda e: q.correlated(jnp.tile(e, (q.event_shape[1], 1))), out_axes=2)(jnp.eye(N))


def vecchia(K, neighbours):
    """B and d of a covariance matrix, one row after another."""
    B, d = np.zeros_like(K), np.empty(len(K))
    for i, others in enumerate(neighbours):
        c = others[others != i]
        B[i, c] = np.linalg.solve(K[np.ix_(c, c)], K[c, i])
        d[i] = K[i, i] - K[i, c] @ B[i, c]
    return B, d


# --- the sets


def test_the_order_is_maxmin():
    order = dgp.Neighbours(X).order
    distances = np.linalg.norm(X[:, None] - X, axis=-1)
    assert order == "maxmin"
    order = maxmin_order(X)
    assert order[0] == np.linalg.norm(X - X.mean(0), axis=1).argmin()
    for i in range(1, N):
        rest = np.setdiff1d(np.arange(N), order[:i])
        assert order[i] == rest[distances[np.ix_(rest, order[:i])].min(1).argmax()]


@pytest.mark.parametrize("order", ["maxmin", "coordinate", "random", tuple(range(N - 1, -1, -1))])
@pytest.mark.parametrize("num", [1, 3, N + 5])
def test_neighbours_are_the_nearest_before(order, num):
    sets = dgp.Neighbours(X, num, order).sets
    if order == "maxmin":
        rows = maxmin_order(X)
    elif order == "coordinate":
        rows = np.argsort(X[:, 0])
    else:
        rows = np.random.default_rng(0).permutation(N) if order == "random" else np.array(order)
    rank = np.argsort(rows)
    for i in range(N):
        before = rows[: rank[i]]
        expected = before[np.argsort(np.linalg.norm(X[before] - X[i], axis=1))][:num]
        found = sets.neighbours[i]
        np.testing.assert_array_equal(np.sort(found[found != i]), np.sort(expected))
    done = set()
    for step in sets.steps:
        step = step[step < N]
        assert all(set(sets.neighbours[i]) - {i} <= done for i in step)
        done |= set(step)
    assert sorted(done) == list(range(N))
    assert sets.steps.size <= 5 * N or num > 3


def test_duplicates_have_neighbours_too():
    """Rows at the same place are each other's neighbours, and nothing is divided by zero."""
    twice = np.repeat(X[:5], 3, 0)
    near = dgp.Neighbours(twice, num=4)
    assert len(near.sets.neighbours) == 15
    f = dgp.gp("f", K, near)
    density = jax.jit(jax.value_and_grad(lambda x: f(x).log_prob(jnp.sin(twice[:, 0]).astype(x.dtype))))
    for dtype in (jnp.float32, jnp.float64):
        found = density(jnp.asarray(twice, dtype))
        assert all(jnp.isfinite(a).all() and a.dtype == dtype for a in found)


def test_refreshed_by_a_hidden_layer():
    h = values()
    near = FEW.refreshed(h)
    np.testing.assert_array_equal(near.sets.neighbours, dgp.Neighbours(h, 3).sets.neighbours)
    kept = dgp.Neighbours(X, 3, np.arange(N)).refreshed(h)
    assert kept.order == tuple(range(N))


def test_nearest_rows_of_traced_inputs():
    expected = np.argsort(np.linalg.norm(NEW[:, None] - X, axis=-1), 1)[:, :3]
    np.testing.assert_array_equal(nearest(X, NEW, 3), expected)
    np.testing.assert_array_equal(jax.jit(lambda x: nearest(jnp.asarray(X), x, 3))(NEW), expected)


# --- all neighbours: the exact process

CASES = [(K, (0.1, 0.3)), (K, None), (TWO, 0.2)]


@pytest.mark.parametrize(("kernel", "noise"), mostly_slow([CASES[0]], CASES))
def test_all_neighbours_are_the_exact_process(kernel, noise):
    noise = jnp.asarray(noise) if isinstance(noise, tuple) else noise
    y = jnp.asarray(values())

    @jax.jit
    def both(x):
        near, exact = (f(x, noise=noise) for f in pair(FULL, kernel))
        slopes = [jax.grad(lambda x, f=f: f(x, noise=noise).log_prob(y))(x) for f in pair(FULL, kernel)]
        L = matrix(near)
        C = jnp.broadcast_to(exact.covariance, (2, N, N))
        return [
            (near.log_prob(y), exact.log_prob(y)),
            slopes,
            (near.precision_times(y), exact.precision_times(y)),
            (L @ L.mT, C),
        ]

    for found, expected in both(X):
        np.testing.assert_allclose(found, expected, rtol=1e-8, atol=1e-8 * abs(expected).max())


@pytest.mark.parametrize("outputs", mostly_slow([2], [None, 2]))
def test_predictions_from_all_neighbours_are_exact(outputs):
    y = values()[:, 0] if outputs is None else values()
    near, exact = pair(FULL, outputs=outputs, mean=dgp.means.Constant(0.7))
    at = jax.jit(lambda x: (near.condition(X, y)(x, noise=0.1), exact.condition(X, y)(x, noise=0.1)))
    for x in (NEW, NEW[None], X):
        found, expected = at(x)
        assert found.shape() == expected.shape()
        np.testing.assert_allclose(found.mean, expected.mean, atol=1e-7)
        np.testing.assert_allclose(found.variance, expected.variance, atol=1e-8)
    joint, each = jax.jit(lambda x: (near.condition(X, y).joint(x), near.condition(X, y)(x)))(NEW)
    np.testing.assert_allclose(each.mean, at(NEW)[0].mean, atol=1e-10)
    value = jnp.ones(each.shape())
    np.testing.assert_allclose(joint.log_prob(value), each.log_prob(value).sum(), rtol=1e-10)


# --- few neighbours: dense algebra


def few(x, noise, y, white):
    q = pair(FEW, TWO)[0](x, noise=noise)
    drawn = q.from_white(white)
    numbers = q.log_prob(y), q.log_prob(drawn, [white]), q.log_prob(drawn), q.whitened((drawn - q.loc).T)
    return q, matrix(q), q.precision_times(y - x), numbers


@pytest.mark.parametrize("noise", mostly_slow([0.2], [None, 0.2]))
def test_few_neighbours_match_dense_algebra(noise):
    y = jnp.asarray(values())
    white = jnp.asarray(rng.normal(size=(N, 2)))
    q, L, scores, (density, drawn, again, whitened) = jax.jit(few)(X, noise, y, white)
    expected = 0.0
    for p, kernel in enumerate(TWO):
        C = np.array(kernel.gram(X)) + (noise or 0.0) ** 2 * np.eye(N)
        B, d = vecchia(C, FEW.sets.neighbours)
        np.testing.assert_allclose(q.open_variance[p], d, atol=1e-8)
        np.testing.assert_allclose((np.eye(N) - B) @ L[p], np.diag(np.sqrt(d)), atol=1e-7)
        precision = (np.eye(N) - B).T @ np.diag(1 / d) @ (np.eye(N) - B)
        assert np.linalg.eigvalsh(precision).min() > 0  # a proper prior
        np.testing.assert_allclose(L[p] @ L[p].T @ precision, np.eye(N), atol=1e-6)
        residual = np.asarray(y - X)[:, p]
        expected += log_normal(residual, 0.0, L[p] @ L[p].T)
        np.testing.assert_allclose(scores[:, p], precision @ residual, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(density, expected, rtol=1e-8)
    np.testing.assert_allclose(whitened, white.T, atol=1e-8)
    np.testing.assert_allclose(drawn, again, rtol=1e-8)


@pytest.mark.slow
def test_predictions_from_few_neighbours():
    y = values()[:, 0]
    found = pair(FEW, outputs=None, mean=None)[0].condition(X, y)(NEW)
    for x, mean, variance in zip(NEW, found.mean, found.variance, strict=True):
        c = np.argsort(np.linalg.norm(X - x, axis=1))[:3]
        b = np.linalg.solve(K.gram(X[c]), K(X[c], x[None])[:, 0])
        np.testing.assert_allclose(mean, b @ y[c], atol=1e-6)
        np.testing.assert_allclose(variance, 1.3 - b @ K(X[c], x[None])[:, 0], atol=1e-6)


@pytest.mark.slow
def test_derivatives_of_draws():
    """By inputs and hyperparameters, twice: the solution by steps is differentiated as that of an equation."""
    white = jnp.asarray(rng.normal(size=(N,)))

    def total(scale):
        f = dgp.gp("f", dgp.kernels.Matern32(1.0, scale), FEW)
        return jnp.square(f(X * scale**2).from_white(white)).sum()

    first = jax.jit(jax.grad(total))
    second = jax.jit(jax.grad(jax.grad(total)))
    total = jax.jit(total)
    step = 1e-5
    np.testing.assert_allclose(first(0.7), (total(0.7 + step) - total(0.7 - step)) / (2 * step), rtol=1e-6)
    np.testing.assert_allclose(second(0.7), (first(0.7 + step) - first(0.7 - step)) / (2 * step), rtol=1e-6)


@pytest.mark.slow
def test_batches_of_inputs_and_draws():
    x = jnp.stack([X, X[::-1] * 0.9])
    q = pair(FEW)[0](x, noise=0.1)
    assert (q.batch_shape, q.event_shape) == ((2,), (N, 2))
    white = jnp.asarray(rng.normal(size=(2, N, 2)))
    each = [pair(FEW)[0](row, noise=0.1) for row in x]
    drawn = q.from_white(white)
    np.testing.assert_allclose(drawn, [one.from_white(w) for one, w in zip(each, white, strict=True)], atol=1e-10)
    np.testing.assert_allclose(q.log_prob(drawn), [one.log_prob(v) for one, v in zip(each, drawn, strict=True)])
    several = each[0].sample(jax.random.key(0), (3,))
    assert several.shape == (3, N, 2)
    np.testing.assert_allclose(each[0].expand((3,)).log_prob(several), each[0].log_prob(several))


@pytest.mark.slow
def test_blocks_of_rows_change_nothing():
    rows = jnp.arange(200.0)
    function = lambda a: (jnp.sin(a), jnp.stack([a, 2 * a]))  # noqa: E731
    for size in (1, 2**20):
        sines, pairs = each_conditional(function, size, rows)
        np.testing.assert_allclose(sines, jnp.sin(rows))
        assert pairs.shape == (200, 2)


def test_wide_steps_are_cut():
    """Values that all depend on the first one come in several steps of a moderate width."""
    neighbours = np.concatenate([[0], np.zeros(19, int)])[:, None]
    steps = schedule(neighbours, np.arange(20))
    assert steps.shape == (2, 19)
    chain = schedule(np.maximum(np.arange(20) - 1, 0)[:, None], np.arange(20))
    assert chain.shape[0] == 20
    assert chain.size <= 60


# --- programs


def layered(y=None, near=FEW, inducing=None, inputs=X[:, :1]):
    """Two layers, of which the outer one has no values of its own."""
    inducing = near if inducing is None else inducing
    inducing = None if inducing == "exact" else inducing
    scale = numpyro.sample("scale", dist.LogNormal(0.0, 0.3))
    f = dgp.gp("f", dgp.kernels.Matern52(1.0, scale), inducing, outputs=1, mean=dgp.means.Identity())
    g = dgp.gp("g", dgp.kernels.Matern52(1.0, 1.0), inducing)
    h = numpyro.sample("h", f(inputs))
    numpyro.sample("y", g(h, noise=0.3), obs=y)


def classed(labels=None, near=FEW):
    """One layer under a likelihood of single values."""
    v = numpyro.sample("v", dgp.gp("f", K, near)(X))
    with numpyro.plate("data", N):
        numpyro.sample("y", dist.Bernoulli(logits=v), obs=labels)


Y = jnp.sin(2 * X[:, 0])
LABELS = (X[:, 0] > 0) * 1


def test_sites_and_blocks():
    with handlers.seed(rng_seed=0), handlers.trace() as sites:
        layered(Y)
    assert site_kind(sites["h"]) == "exact"
    assert dgp.gp("f", K, FEW).site is None
    assert isinstance(dgp.gp("f", K, FEW), dgp.RandomFunction)
    found = planned(latents(lambda: handlers.seed(dgp.Gibbs(layered).model, 0)(Y)), {}, dgp.updates.NUTS())
    assert list(found) == ["rest", "h_white"]
    centred = dgp.Gibbs(layered, noncentered=False)
    found = planned(latents(lambda: handlers.seed(centred.model, 0)(Y)), {}, dgp.updates.NUTS())
    assert list(found) == ["rest", "h"]


def test_the_density_of_a_program_is_that_of_the_exact_one():
    """As it is and in the coordinates of for_mcmc, value and gradient."""
    z = {"scale": jnp.array(0.8), "h_white": 0.3 * jnp.asarray(rng.normal(size=(N, 1)))}
    order = dgp.Neighbours(X[:, :1], N, np.arange(N))

    def density(z, inducing):
        return log_density(handlers.seed(dgp.for_mcmc(layered), 0), (Y,), {"inducing": inducing}, z)[0]

    near, exact = (jax.jit(jax.value_and_grad(lambda z, i=i: density(z, i)))(z) for i in (order, "exact"))
    np.testing.assert_allclose(near[0], exact[0], rtol=1e-7)
    for name in z:
        np.testing.assert_allclose(near[1][name], exact[1][name], rtol=1e-5, atol=1e-5)


def fitted(model, guide, *args, steps=1, rate=0.05):
    import optax

    svi = SVI(model, guide, optax.adam(rate), dgp.ELBO())
    return svi.run(jax.random.key(0), steps, *args, progress_bar=False)
