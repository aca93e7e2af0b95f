"""Vecchia's approximation: against the exact process at all neighbours, against dense algebra at few."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from dense import log_normal
from numpyro import handlers
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import MCMC, NUTS, SVI, autoguide
from numpyro.infer.util import log_density
from sizes import mostly_long

import numpyro_dgp as dgp
from numpyro_dgp import guides as G
from numpyro_dgp.analysis.sites import site_kind
from numpyro_dgp.math.vecchia import each_conditional, maxmin_order, nearest, schedule
from numpyro_dgp.mcmc.gaussian_blocks import latents
from numpyro_dgp.mcmc.gibbs import planned

rng = np.random.default_rng(0)
N = 14
X = np.random.default_rng(1).normal(size=(N, 2))
NEW = np.random.default_rng(2).normal(size=(5, 2))
K = dgp.kernels.Matern32(1.3, 0.8)
TWO = (K, dgp.kernels.RBF(0.7, 0.5) + 0.3 * dgp.kernels.Linear())
FULL, FEW = dgp.Neighbours(X, num=N), dgp.Neighbours(X, num=3)


def values(noise=0.0):
    return np.stack([np.sin(X).sum(1), np.cos(X[:, 0])], 1) + noise


def pair(near, kernel=K, outputs=2, mean=dgp.means.IdentityMean()):
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


@pytest.mark.smoke
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


@pytest.mark.smoke
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

CASES = {"noise of two sizes": (K, jnp.array([0.1, 0.3])), "none": (K, None), "two kernels": (TWO, 0.2)}


@pytest.mark.slow
@pytest.mark.parametrize("case", mostly_long(["noise of two sizes"], CASES))
def test_all_neighbours_are_the_exact_process(case):
    kernel, noise = CASES[case]
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


@pytest.mark.long
@pytest.mark.parametrize("outputs", mostly_long([2], [None, 2]))
def test_predictions_from_all_neighbours_are_exact(outputs):
    y = values()[:, 0] if outputs is None else values()
    near, exact = pair(FULL, outputs=outputs, mean=dgp.means.ConstantMean(0.7))
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


@pytest.mark.slow
@pytest.mark.parametrize("noise", mostly_long([0.2], [None, 0.2]))
def test_few_neighbours_match_dense_algebra(noise):
    y = jnp.asarray(values())
    white = jnp.asarray(rng.normal(size=(N, 2)))
    q, L, scores, (density, drawn, again, whitened) = jax.jit(few)(X, noise, y, white)
    expected = 0.0
    for p, kernel in enumerate(TWO):
        C = np.array(kernel.gram(X)) + (noise or 0.0) ** 2 * np.eye(N)
        B, d = vecchia(C, FEW.sets.neighbours)
        np.testing.assert_allclose(q.conditional_variance[p], d, atol=1e-8)
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


@pytest.mark.long
def test_predictions_from_few_neighbours():
    y = values()[:, 0]
    found = pair(FEW, outputs=None, mean=None)[0].condition(X, y)(NEW)
    for x, mean, variance in zip(NEW, found.mean, found.variance, strict=True):
        c = np.argsort(np.linalg.norm(X - x, axis=1))[:3]
        b = np.linalg.solve(K.gram(X[c]), K(X[c], x[None])[:, 0])
        np.testing.assert_allclose(mean, b @ y[c], atol=1e-6)
        np.testing.assert_allclose(variance, 1.3 - b @ K(X[c], x[None])[:, 0], atol=1e-6)


@pytest.mark.long
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


@pytest.mark.long
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


@pytest.mark.long
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
    f = dgp.gp("f", dgp.kernels.Matern52(1.0, scale), inducing, outputs=1, mean=dgp.means.IdentityMean())
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


@pytest.mark.slow
def test_sites_and_blocks():
    kinds = {}

    def run():
        with handlers.seed(rng_seed=0), handlers.trace() as sites:
            layered(Y)
        kinds.update({name: site_kind(site) for name, site in sites.items()})

    jax.eval_shape(run)
    assert kinds == {"scale": "other", "h": "exact", "y": "observed"}
    assert dgp.gp("f", K, FEW).site is None
    assert isinstance(dgp.gp("f", K, FEW), dgp.extend.RandomFunction)
    found = planned(latents(lambda: handlers.seed(dgp.mcmc.Gibbs(layered).model, 0)(Y)), {}, dgp.mcmc.BlockNUTS())
    assert list(found) == ["rest", "h_white"]
    centred = dgp.mcmc.Gibbs(layered, noncentered=False)
    found = planned(latents(lambda: handlers.seed(centred.model, 0)(Y)), {}, dgp.mcmc.BlockNUTS())
    assert list(found) == ["rest", "h"]


@pytest.mark.long
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
    svi = SVI(model, guide, optax.adam(rate), dgp.ELBO())
    return svi.run(jax.random.key(0), steps, *args, progress_bar=False)


# --- guides

WORKS = {
    "sparse factor": lambda model: G.InducingPoint(model, exact=G.SparseFactor()),
    "diagonal": lambda model: G.InducingPoint(model, exact=G.Diagonal(scale=0.1)),
    "mean field": G.MeanField,
    "points": lambda model: G.InducingPoint(model, exact=G.Delta()),
    "as the model": lambda model: G.InducingPoint(model, exact=G.Propagate()),
    "prior": lambda model: G.InducingPoint(model, exact=G.Prior()),
    "AutoNormal": autoguide.AutoNormal,
    "AutoMultivariateNormal": autoguide.AutoMultivariateNormal,
    "AutoLowRankMultivariateNormal": autoguide.AutoLowRankMultivariateNormal,
    "AutoDelta": autoguide.AutoDelta,
}
RULES = [G.Full(), G.OpperArchambeau(), G.LowRank(2), G.MixtureOfGaussians(2), G.Flow(), G.GivenInducing()]
RULES += [G.JointOutputs(), G.GivenBelow(), G.MarkovInducing(), G.Circulant(), G.ScaledPrior()]
REFUSES = {type(rule).__name__: lambda model, rule=rule: G.InducingPoint(model, sites={"v": rule}) for rule in RULES}
REFUSES |= {
    "InducingPoint": G.InducingPoint,
    "Collapsed": G.Collapsed,
    "GlobalInducing": lambda model: G.InducingPoint(model, inducing=G.GlobalInducing(4)),
    "ImportanceWeighted": lambda model: G.ImportanceWeighted(model, num_samples=2),
}


@pytest.mark.long
@pytest.mark.parametrize("name", WORKS)
@pytest.mark.parametrize(("model", "args"), [(classed, (LABELS,)), (layered, (Y,))])
def test_guides_that_serve(name, model, args):
    guide = WORKS[name](model)
    result = fitted(model, guide, *args, steps=3)
    assert jnp.isfinite(result.losses).all()
    with handlers.seed(rng_seed=0), handlers.substitute(data=result.params):
        draw = guide(*args)
    assert draw["h" if model is layered else "v"].shape == ((N, 1) if model is layered else (N,))


@pytest.mark.parametrize("name", REFUSES)
def test_guides_that_refuse(name):
    with (
        pytest.raises(ValueError, match=r"site 'v' to be .* NeighbourValues: .*\{'v': dgp.guides.SparseFactor\(\)\}"),
        handlers.seed(rng_seed=0),
    ):
        REFUSES[name](classed)(LABELS)


@pytest.mark.slow
@pytest.mark.parametrize("rule", mostly_long([G.SparseFactor()], [G.SparseFactor(), G.Diagonal()]))
def test_a_factor_given_all_neighbours_is_a_full_one(rule):
    """The same Gaussian over the values of the exact process: the same divergence, draws and densities."""
    R = np.tril(0.2 * rng.normal(size=(2, N, N)), -1 if isinstance(rule, G.SparseFactor) else N) * (
        rule != G.Diagonal()
    )
    R = R + np.eye(N) * rng.uniform(0.5, 1.5, size=(2, N, 1))
    near = dgp.Neighbours(X, N, np.arange(N))
    shift, numbers = jnp.asarray(rng.normal(size=(2, N))), near.sets.neighbours

    def model(inducing):
        numpyro.sample("v", dgp.gp("f", K, inducing, outputs=2, mean=dgp.means.IdentityMean())(X))

    params = {"v_auto_loc": shift, "v_auto_scale_tril": R, "v_auto_scale": np.diagonal(R, axis1=1, axis2=2)}
    params["v_auto_weights"] = np.take_along_axis(R, np.broadcast_to(numbers, (2, *numbers.shape)), 2)

    def of(rule, inducing):
        guide = G.InducingPoint(model, exact=rule)
        with handlers.trace() as q, handlers.seed(rng_seed=0), handlers.substitute(data=params):
            value = guide(inducing)["v"]
        with handlers.trace() as p, handlers.seed(rng_seed=0):
            model(inducing)
        q, p = q["v"]["fn"], p["v"]["fn"]
        return q.mean, value, q.log_prob(value), dist.kl_divergence(q, p)

    for found, expected in zip(jax.jit(lambda: of(rule, near))(), jax.jit(lambda: of(G.Full(), None))(), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.long
def test_the_sparse_factor_comes_near_the_evidence():
    """Of a Gaussian likelihood the evidence is known; independent numbers lose ten times as much."""
    near = dgp.Neighbours(X, num=4)

    def model(y=None):
        v = numpyro.sample("v", dgp.gp("f", K, near)(X))
        with numpyro.plate("data", N):
            numpyro.sample("y", dist.Normal(v, 0.3), obs=y)

    prior = dgp.gp("f", K, near)(X)
    L = np.asarray(jax.vmap(lambda e: prior.correlated(e[None])[0], out_axes=1)(jnp.eye(N)))
    evidence = log_normal(np.asarray(Y), 0.0, L @ L.T + 0.09 * np.eye(N))
    gaps = {}
    for rule in (G.SparseFactor(), G.Diagonal()):
        guide = G.InducingPoint(model, exact=rule)
        svi = SVI(model, guide, optax.adam(optax.cosine_decay_schedule(0.05, 3000)), dgp.ELBO(num_particles=4))
        params = svi.run(jax.random.key(0), 3000, Y, progress_bar=False).params
        bound = -dgp.ELBO(num_particles=40_000).loss(jax.random.key(1), params, model, guide, Y)
        gaps[type(rule).__name__] = evidence - bound
    assert -0.05 < gaps["SparseFactor"] < 0.15
    assert gaps["Diagonal"] > 5 * gaps["SparseFactor"]


@pytest.mark.long
def test_natural_gradients_of_independent_numbers():
    guide = G.InducingPoint(classed, exact=G.Diagonal())
    optimiser = dgp.optim.NaturalGradient(guide, 0.1, optax.adam(0.01))
    losses = SVI(classed, guide, optimiser, dgp.ELBO(num_particles=16)).run(
        jax.random.key(0), 60, LABELS, progress_bar=False
    )[2]
    assert losses[-10:].mean() < losses[:3].mean() - 1.0


# --- chains

SMALL = X[:7, :1]


def small(y, near):
    scale = numpyro.sample("scale", dist.LogNormal(0.0, 0.3))
    f = dgp.gp("f", dgp.kernels.Matern52(1.0, scale), near, outputs=1)
    g = dgp.gp("g", dgp.kernels.Matern52(1.0, 0.7), near)
    h = numpyro.sample("h", f(SMALL))
    numpyro.sample("y", g(h, noise=0.5), obs=y)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["NUTS", "Gibbs"])
def test_chains_agree_with_those_of_the_exact_process(kind):
    """Moments of what the data identify, at all neighbours: h² and the logarithm of the scale."""
    y = jnp.sin(3 * SMALL[:, 0])

    def moments(near):
        centred = dgp.mcmc.Gibbs(small, noncentered=False, rest=dgp.mcmc.Slice())
        kernel = NUTS(dgp.for_mcmc(small)) if kind == "NUTS" else centred
        settings = dict(num_warmup=200, num_samples=500, num_chains=4, chain_method="vectorized")
        mcmc = MCMC(kernel, progress_bar=False, **settings)
        mcmc.run(jax.random.key(1), y, near)
        draws = mcmc.get_samples(group_by_chain=True)
        assert draws["h"].shape == (4, 500, 7, 1)
        numbers = np.concatenate([draws["h"][..., 0] ** 2, np.log(draws["scale"])[..., None]], -1)
        return numbers.mean((0, 1)), numbers.std((0, 1)) / np.sqrt(effective_sample_size(numbers))

    near, exact = moments(dgp.Neighbours(SMALL, 7)), moments(None)
    scores = (near[0] - exact[0]) / np.hypot(near[1], exact[1])
    assert abs(scores).max() < 4.5, scores


# --- predictions


def predicting(X_new, y=None):
    """Two layers: at the data in a fit, and given these, at new rows in a prediction."""
    noise = numpyro.sample("noise", dist.LogNormal(-1.5, 0.2))
    f = dgp.gp("f", dgp.kernels.Matern52(), FEW, outputs=1, mean=dgp.means.IdentityMean())
    g = dgp.gp("g", dgp.kernels.Matern52() + dgp.kernels.White(noise**2), FEW)
    h = numpyro.sample("h", f(X[:, :1]))
    if y is not None:
        return numpyro.sample("y", g(h), obs=y)
    with numpyro.plate("new", len(X_new)):
        h_new = numpyro.sample("h_new", f.condition(X[:, :1], h)(X_new))
        v = g.condition(h, Y)(h_new)
        return numpyro.sample("y", dist.Normal(v.mean, jnp.sqrt(v.variance)), obs=None)


@pytest.mark.long
def test_predictions_at_new_rows():
    """A program that conditions on its data predicts anywhere, in batches of rows too."""
    samples = {"noise": jnp.full(400, 0.2), "h": jnp.tile(X[:, :1], (400, 1, 1))}
    posterior = dgp.Posterior(predicting, samples=samples, site="y")
    rows = jnp.linspace(-1, 1, 50)[:, None]
    found = posterior.using(num_samples=400).predict(jax.random.key(1), rows)
    f = dgp.gp("f", dgp.kernels.Matern52(), FEW, outputs=1, mean=dgp.means.IdentityMean()).condition(X[:, :1], X[:, :1])
    g = dgp.gp("g", dgp.kernels.Matern52() + dgp.kernels.White(0.04), FEW).condition(X[:, :1], Y)
    by_hand = g(f(rows).sample(jax.random.key(2), (400,))).mean
    error = by_hand.std(0) * np.sqrt(2 / 400)
    assert (abs(found.mean - by_hand.mean(0)) < 4.5 * error + 1e-3).all()
    batches = posterior.using(num_samples=400, batch_size=20, progress_bar=False).predict(jax.random.key(1), rows)
    assert (abs(batches.mean - found.mean) < 4.5 * error + 1e-3).all()
    assert posterior.hidden(jax.random.key(1), rows)["h_new"].shape == (100, 50, 1)


@pytest.mark.slow
def test_layers_of_a_fit():
    """Functions of a fit are conditioned on its draws, as those of exact processes are."""
    posterior = dgp.Posterior(lambda X, y=None: classed(y), samples={"v": Y[None]})
    f, inputs = posterior.layers(jax.random.key(0), X)["v"]
    np.testing.assert_allclose(f(X).mean, Y, atol=1e-6)
    np.testing.assert_array_equal(inputs, X)
    with pytest.raises(ValueError, match=r"the rows of Neighbours.X., got \(5, 2\)"):
        dgp.Posterior(lambda X: numpyro.sample("v", dgp.gp("f", K, FEW)(X)), samples={"a": Y[None]}).predict(
            jax.random.key(0), NEW
        )


# --- wrong calls


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: dgp.Neighbours(X[:, 0]), r"Neighbours: expected inputs of shape \(N, D\), .* got shape \(14,\)"),
        (lambda: dgp.Neighbours(X[:1]), r"two rows or more, got shape \(1, 2\)"),
        (lambda: dgp.Neighbours(X * np.nan), "expected finite inputs X, got 28 NaN"),
        (lambda: dgp.Neighbours(X, 0), "Neighbours: expected num to be a positive integer, got 0: try 25"),
        (lambda: dgp.Neighbours(X, order="middle"), "expected order to be one of 'maxmin', .* got 'middle'"),
        (lambda: dgp.Neighbours(X, order=np.zeros(N, int)), r"0 to N - 1 = 13, each once, got int64 of shape \(14,\)"),
        (lambda: jax.jit(lambda x: dgp.Neighbours(x).sets.steps)(X), "Neighbours: expected inputs that are known"),
        (lambda: FEW.refreshed(X[:5]), r"Neighbours.refreshed: expected values of shape .* N = 14 rows of X, got \(5"),
        (lambda: dgp.gp("f", K, FEW)(NEW), r"expected inputs of shape \(..., 14, D\), .* f.condition\(X, v\)\(x_new\)"),
        (lambda: dgp.gp("f", K, FEW)(X, noise=-1.0), "expected noise"),
        (lambda: dgp.gp("f", K, FEW)(X, noise=np.ones(2)), "expected noise to be a number"),
        (lambda: dgp.gp("f", K, FEW).grad(X), "f.grad: expected a layer with inducing values, got one of dgp.Neigh"),
        (lambda: dgp.gp("f", K, FEW).linear(X, X), "f.linear: expected a layer with inducing values"),
        (lambda: dgp.gp("f", K, FEW).condition(X, X), r"expected inputs \(N, D\) and values of shape \(14,"),
        (lambda: dgp.gp("f", K, FEW).condition(X, X[:, 0])(X[:, :1]), "expected inputs with D = 2 columns"),
        (lambda: dgp.Likelihood(dgp.gp("f", K, FEW)(X), dist.Bernoulli), "got those of one without .inducing=None or"),
        (lambda: dgp.guides.SparseFactor(-1.0), "SparseFactor: expected scale to be positive"),
        (lambda: dgp.gp("f", K, X), "expected inducing=dgp.Points.Z., .*, or None, got"),
    ],
)
def test_wrong_calls(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_the_sparse_factor_is_for_neighbours():
    def model():
        numpyro.sample("v", dgp.gp("f", K, None)(X))

    with (
        pytest.raises(ValueError, match=r"expected site 'v' to be the values of a process of dgp.Nei"),
        handlers.seed(rng_seed=0),
    ):
        G.InducingPoint(model, exact=G.SparseFactor())()


@pytest.mark.slow
@pytest.mark.parametrize("outputs", [None, 2])
def test_observations_of_another_shape_are_refused(outputs):
    """They would be broadcast."""
    f = dgp.gp("f", K, FEW, outputs=outputs)
    y = values()[:, 0] if outputs is None else values()
    prior = f(X, noise=0.1)
    assert np.isfinite(prior.log_prob(y))
    for value in (y[:1], y[..., None], y[:, :1] if outputs else y[:, None]):
        with pytest.raises(ValueError, match=r"f\(x\): expected observations y of shape \(14,"):
            prior.log_prob(value)
