"""``dgp.update`` and ``dgp.condition``: new rows without those of the fit, against all rows at once."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from dense import rbf
from numpyro.distributions import kl_divergence
from programs import NOISE, X, Y, Z, bayesian, deep, random_params, shallow
from sizes import mostly_long
from wrong_calls.new_data import TRACED

import numpyro_dgp as dgp
from numpyro_dgp.bounds import Observations, from_features
from numpyro_dgp.functions.weights import FullBelief, InducingPrior
from numpyro_dgp.inference.fit import split_arguments
from numpyro_dgp.math.gaussians import expected_log_ratio
from numpyro_dgp.math.linalg import with_jitter
from numpyro_dgp.new_data.continued_fit import StreamingBound, moved_parameters
from numpyro_dgp.new_data.fitted_layers import FittedLayer, fitted_layers, open_layers

rng = np.random.default_rng(0)
KEY = jax.random.key(0)
FIRST, LAST = slice(0, 18), slice(18, 30)
PRIOR = {"g_auto_loc": jnp.zeros(8), "g_auto_scale_tril": jnp.eye(8)}


def opened(model, guide, params, *args):
    posterior = dgp.Posterior(model, guide, params)
    arrays, rebuild = split_arguments(args, {})
    return open_layers("update", model, guide, posterior.seeded, rebuild, arrays)


def optimum(rows, kernel=dgp.kernels.RBF(1.2, 0.7), Z=Z, noise=NOISE):
    """The optimal q(v) of one layer given some of the rows, and its bound."""
    K = np.asarray(kernel.gram(Z))
    A = np.linalg.solve(np.linalg.cholesky(K + 1e-10 * K[0, 0] * np.eye(len(Z))), np.asarray(kernel(Z, X[rows]))).T
    data = from_features(jnp.array(A), kernel.diag(X[rows]), Observations(Y[rows], noise))
    loc, root = data.optimum()
    return {"g_auto_loc": loc, "g_auto_scale_tril": root}, data.bound()


def loss(objective, params, model, guide, *args, key=KEY):
    return jax.jit(lambda p: objective.loss(key, p, model, guide, *args))(params)


@pytest.mark.long
@pytest.mark.smoke
def test_bound_of_new_rows_and_a_fit_is_that_of_all_rows():
    """With the optimum of the first rows: at any q(v), up to the bound of the first rows, which no q changes. With a
    memory, they count that much."""
    guide = dgp.guides.InducingPoint(shallow)
    first, evidence = optimum(FIRST)
    params = random_params(shallow, guide, X, Y)
    fitted = fitted_layers(opened(shallow, guide, first, X[LAST], Y[LAST]), bounded=True)
    divergence = kl_divergence(FullBelief(*params.values()), InducingPrior((8,), jnp.result_type(float)))

    @jax.jit
    def bounds(params):
        forgetful = [(StreamingBound(fitted, memory=memory), LAST) for memory in (1.0, 0.3)]
        both = (*forgetful, (dgp.ELBO(), FIRST), (dgp.ELBO(), LAST))
        return [-bound.loss(KEY, params, shallow, guide, X[rows], Y[rows]) for bound, rows in both]

    *streams, before, now = bounds(params)
    for memory, stream in zip((1.0, 0.3), streams, strict=True):
        assert np.isclose(stream, now + memory * (before + divergence - evidence), rtol=0, atol=1e-7)


def dense_ratio(old, new, means=(0.0, 0.0)):
    """E log q(u) - log p(u) of the old inducing values, from unwhitened Gaussians; each is (Z, kernel, m, R)."""
    (Z0, k0, m0, R0), (Z1, k1, m1, R1) = old, new
    nugget = [1e-10 * k["variance"] for k in (k0, k1)]
    K0, K1 = (rbf(z, z, **k) + n * np.eye(len(z)) for (z, k, *_), n in zip((old, new), nugget, strict=True))
    W = np.linalg.solve(K1, rbf(Z1, Z0, **k1)).T @ np.linalg.cholesky(K1)
    mu = W @ m1 + means[1] - means[0]
    V = rbf(Z0, Z0, **k1) - W @ W.T + W @ R1 @ R1.T @ W.T
    L0 = np.linalg.cholesky(K0)
    q = L0 @ m0, L0 @ R0 @ R0.T @ L0.T

    def expected(mean, S):
        quadratic = (mu - mean) @ np.linalg.solve(S, mu - mean) + np.trace(np.linalg.solve(S, V))
        return -0.5 * (quadratic + np.linalg.slogdet(S)[1])

    return expected(*q) - expected(np.zeros(len(m0)), K0)


@pytest.mark.long
@pytest.mark.parametrize("per_output", mostly_long([True], [False, True]))
def test_ratio_with_other_inducing_points_and_hyperparameters(per_output):
    """Against dense Gaussians over the values at the old points, for three outputs."""
    P, ks = 3, [dict(variance=1.3, lengthscale=0.6), dict(variance=0.8, lengthscale=0.9)]
    Zs = np.linspace(-1, 1, 5)[:, None], np.concatenate([np.linspace(-1, 0.9, 3), [1.5]])[:, None]
    beliefs = [(rng.normal(size=(P, len(z))), np.tril(rng.normal(size=(P, len(z), len(z))))) for z in Zs]
    layers = []
    for z, k, q, mean in zip(Zs, ks, beliefs, (0.3, -0.2), strict=True):
        kernel = [dgp.kernels.RBF(**k)] * P if per_output else dgp.kernels.RBF(**k)
        points = np.broadcast_to(z, (P, *z.shape)) if per_output else z
        with numpyro.handlers.substitute(data={"f": FullBelief(*map(jnp.array, q))}):
            f = dgp.gp("f", kernel, dgp.Points(points), outputs=P, mean=mean)
        layers.append(FittedLayer(f, f.v.loc, jnp.linalg.inv(f.v.scale_tril)))
    expected = sum(
        dense_ratio(*((z, k, q[0][p], q[1][p]) for z, k, q in zip(Zs, ks, beliefs, strict=True)), means=(0.3, -0.2))
        for p in range(P)
    )
    assert np.isclose(layers[0].log_ratio(layers[1].function), expected, rtol=1e-6)


@pytest.mark.slow
def test_points_in_both_sets_leave_nothing_open():
    """Where old points are among the new ones, in any order and some of them twice, their values are known."""
    kernel, old = dgp.kernels.RBF(1.2, 0.7), jnp.array([[0.0], [1.0], [0.0]])
    with numpyro.handlers.seed(rng_seed=0):
        f, g = (dgp.gp("f", kernel, dgp.Points(z)) for z in (old, jnp.array([[1.0], [0.5], [0.0], [0.0]])))
    mean, covariance = g.whitened_values_of(f)
    np.testing.assert_allclose(covariance, np.zeros((1, 3, 3)), atol=1e-6)
    values = [np.linalg.solve(h.whiten, h.v.loc if h is g else mean[0]) for h in (g, f)]
    np.testing.assert_allclose(values[1], values[0][[2, 0, 3]], atol=1e-6)


@pytest.mark.long
def test_two_layers_remember_each_by_itself(key):
    """The difference to the bound of the new rows alone, against draws of the values at the old points."""
    guide = dgp.guides.InducingPoint(deep)
    old, new = (random_params(deep, guide, X, Y, key=k) for k in jax.random.split(key))
    fitted = fitted_layers(opened(deep, guide, old, X[LAST], Y[LAST]), bounded=False)
    assert fitted.keys() == {"f", "g"}
    losses = [loss(bound, new, deep, guide, X[LAST], Y[LAST]) for bound in (dgp.ELBO(), StreamingBound(fitted))]
    layers = opened(deep, guide, new, X[LAST], Y[LAST])

    @jax.jit
    def ratios(key):
        total = 0.0
        for name, layer in layers.items():
            f = layer.function
            u = f.joint(f.Z).sample(key, (20_000,)).reshape(20_000, -1)
            v = (u - f.mean(f.Z)[:, 0]) @ f.whiten.T
            q = FullBelief(old[f"{name}_auto_loc"].reshape(-1), old[f"{name}_auto_scale_tril"].reshape(8, 8))
            total += q.log_prob(v) - InducingPrior((8,), v.dtype).log_prob(v)
        return total

    draws = ratios(key)
    assert abs(losses[0] - losses[1] - draws.mean()) < 4 * draws.std() / np.sqrt(len(draws))


@pytest.mark.long
def test_what_is_wider_than_the_prior_counts_as_not_known():
    """Random steps leave it so; its ratio would grow without limit as values do."""
    layer = opened(shallow, dgp.guides.InducingPoint(shallow), PRIOR, X, Y)["g"]
    root = jnp.array(np.linalg.qr(rng.normal(size=(8, 8)))[0] * np.array([0.1, 0.5, 0.9, 1.0, 1.0, 1.0, 1.001, 1.2]))
    q = FullBelief(jnp.array(rng.normal(size=8)), jnp.linalg.cholesky(root @ root.T))
    layer = layer._replace(belief=q)
    ratios = []
    for bounded in (True, False):
        fitted = fitted_layers({"g": layer}, bounded=bounded)["g"]
        mean, covariance = root[:, -1] * jnp.array([[1.0], [1e4]]), jnp.zeros((2, 8, 8))
        ratios.append(expected_log_ratio(fitted.loc, fitted.inverse, mean, covariance))
    known = root[:, :3] / jnp.linalg.norm(root[:, :3], axis=0)
    own = known.T @ q.loc, jnp.diag(1 / jnp.array([0.1, 0.5, 0.9]))
    np.testing.assert_allclose(ratios[0], expected_log_ratio(*own, jnp.zeros(3), jnp.zeros((3, 3))), rtol=1e-6)
    assert ratios[1][1] > 1e6


@pytest.mark.long
def test_moved_points_start_as_the_fit(key):
    """At the new inducing inputs the function is that of the fit."""

    def other(X, y=None):
        shallow(X, y, Z=jnp.linspace(-1.8, 2.1, 11)[:, None])

    first, _ = optimum(FIRST)
    fitted = opened(shallow, dgp.guides.InducingPoint(shallow), first, X, Y)
    guide = dgp.guides.InducingPoint(other)
    nothing = {"g_auto_loc": jnp.zeros(11), "g_auto_scale_tril": jnp.eye(11)}
    params = moved_parameters(fitted, opened(other, guide, nothing, X, Y))
    new = opened(other, guide, params, X, Y)["g"].function
    here, there = (f.joint(new.Z) for f in (new, fitted["g"].function))
    np.testing.assert_allclose(here.loc, there.loc, atol=1e-6)
    np.testing.assert_allclose(here.covariance, there.covariance, atol=1e-6)


@pytest.mark.long
def test_condition_is_exact(key):
    guide = dgp.guides.InducingPoint(shallow)
    fitted = dgp.Posterior(shallow, guide, optimum(FIRST)[0])
    after = dgp.condition(fitted, key, X[LAST], Y[LAST], num_steps=1, progress_bar=False)
    for name, value in optimum(slice(None))[0].items():
        np.testing.assert_allclose(after.params[name], value, atol=1e-7)


@pytest.mark.long
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_pieces_in_any_order_are_the_whole(key, order):
    fitted = dgp.Posterior(shallow, dgp.guides.InducingPoint(shallow), PRIOR)
    for i in order:
        fitted = dgp.condition(fitted, key, X[i::3], Y[i::3], num_steps=2, progress_bar=False)
    for name, value in optimum(slice(None))[0].items():
        np.testing.assert_allclose(fitted.params[name], value, atol=1e-7)


def counts(X, y=None):
    g = dgp.gp("g", dgp.kernels.RBF(1.2, 0.7), dgp.Points(Z))
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dgp.Likelihood(g(X), lambda v: dist.Poisson(jnp.exp(v))), obs=y)


@pytest.mark.long
def test_counts_in_two_pieces_are_nearly_the_whole(key):
    """The ratio is Gaussian, the likelihood of the first rows is not: means differ by 0.16 standard deviations."""
    y = jnp.array(rng.poisson(np.exp(np.asarray(Y))))
    start = dgp.Posterior(counts, dgp.guides.InducingPoint(counts), PRIOR)
    whole = dgp.condition(start, key, X, y, progress_bar=False)
    pieces = start
    for i in range(2):
        pieces = dgp.condition(pieces, key, X[i::2], y[i::2], progress_bar=False)
    root = np.asarray(whole.params["g_auto_scale_tril"])
    distance = np.linalg.solve(root, np.asarray(pieces.params["g_auto_loc"] - whole.params["g_auto_loc"]))
    assert 1e-6 < np.abs(distance).max() < 0.25
    changes = np.linalg.solve(root, np.asarray(pieces.params["g_auto_scale_tril"]))
    np.testing.assert_allclose(np.linalg.svd(changes)[1], 1.0, atol=0.2)
    # What the steps converged to is the optimum: its gradient vanishes.
    natural = jax.grad(lambda p: dgp.ELBO().loss(KEY, p, counts, start.guide, X, y))(whole.params)
    assert max(float(jnp.abs(g).max()) for g in natural.values()) < 1e-2


@pytest.mark.long
def test_everything_is_learned_on(key):
    """Hyperparameters with priors, learned inducing inputs, a latent per row, minibatches."""
    guide = dgp.guides.ImportanceWeighted(bayesian, num_samples=2)
    fitted = dgp.Posterior(bayesian, guide, random_params(bayesian, guide, X[FIRST], Y[FIRST]))
    assert fitted.params["w_auto_loc"].shape == (18, 1)
    after = dgp.update(fitted, key, X[LAST], Y[LAST], batch=4, num_steps=3, progress_bar=False)
    assert after.params["w_auto_loc"].shape == (12, 1)
    for name in ("noise_auto_loc", "scales_auto_loc", "g_Z", "g_auto_loc", "f_auto_loc"):
        assert 0 < np.abs(after.params[name] - fitted.params[name]).max() < 1


@pytest.mark.long
def test_more_inducing_points_where_new_rows_are(key):
    """Rows to the right of the first ones: with points there the fit is that of all rows with all points."""
    low, high = (jnp.linspace(*ends, 6)[:, None] for ends in ((-2.0, 0.1), (0.4, 2.0)))
    both = jnp.concatenate([low, high])

    def program(Z):
        return lambda X, y=None: shallow(X, y, Z=Z)

    left, right = X[:, 0] < 0.1, X[:, 0] >= 0.1
    models = program(low), program(both)
    guides = [dgp.guides.InducingPoint(model) for model in models]
    first = dgp.Posterior(models[0], guides[0], optimum(left, Z=low)[0])
    natural = dgp.optim.NaturalGradient(guides[1], 1.0, optax.set_to_zero())
    after = dgp.update(
        first, key, X[right], Y[right], guide=guides[1], optimizer=natural, num_steps=2,
        progress_bar=False,
    )  # fmt: skip
    whole = dgp.Posterior(*(models[1], guides[1]), optimum(slice(None), Z=both)[0])
    here, there = (p.predict(key, X) for p in (after, whole))
    np.testing.assert_allclose(here.mean, there.mean, atol=0.02)
    np.testing.assert_allclose(here.variance, there.variance, atol=0.01)


@pytest.mark.long
def test_after_a_collapsed_fit(key):
    """Its q(v) is computed from the data bound to it, and goes on as parameters of another guide."""
    collapsed = dgp.guides.Collapsed(shallow)
    fitted = dgp.Posterior(shallow, collapsed.on(X[FIRST], Y[FIRST]), {})
    guide = dgp.guides.InducingPoint(shallow)
    natural = dgp.optim.NaturalGradient(guide, 1.0, optax.set_to_zero())
    after = dgp.update(
        fitted, key, X[LAST], Y[LAST], guide=guide, optimizer=natural, num_steps=1, progress_bar=False
    )  # fmt: skip
    for name, value in optimum(slice(None))[0].items():
        np.testing.assert_allclose(after.params[name], value, atol=1e-7)


@pytest.mark.long
def test_guides_with_other_gaussians(key):
    """Independent numbers, low rank, a posterior for every hidden value: the streaming bound rises from the fit on."""
    guide = dgp.guides.MeanField(deep, sites={"g": dgp.guides.LowRank(2)})
    params = random_params(deep, guide, X[FIRST], Y[FIRST], process_noise=0.1)
    fitted = dgp.Posterior(deep, guide, params)
    after = dgp.update(fitted, key, X[LAST], Y[LAST], process_noise=0.1, num_steps=30, progress_bar=False)
    layers = fitted_layers(
        opened(lambda X, y=None: deep(X, y, process_noise=0.1), guide, params, X[LAST], Y[LAST]), bounded=True
    )
    bound = StreamingBound(layers, num_particles=50)
    before = after.params | {name: value for name, value in params.items() if name[0] != "h"}
    losses = [bound.loss(KEY, p, deep, guide, X[LAST], Y[LAST], process_noise=0.1) for p in (before, after.params)]
    assert losses[1] < losses[0]


@pytest.mark.long
def test_condition_of_two_layers_averages_draws(key):
    """The layer below stays; the bound rises above that of the fit."""
    guide = dgp.guides.InducingPoint(deep)
    fitted = dgp.Posterior(deep, guide, random_params(deep, guide, X, Y))
    after = dgp.condition(fitted, key, X[LAST], Y[LAST], num_steps=200, progress_bar=False)
    for name in ("f_auto_loc", "f_auto_scale_tril"):
        np.testing.assert_allclose(after.params[name], fitted.params[name], rtol=1e-12)
    bound = StreamingBound(
        fitted_layers(opened(deep, guide, fitted.params, X[LAST], Y[LAST]), bounded=False), num_particles=200
    )
    slopes = [jax.grad(lambda p: bound.loss(KEY, p, deep, guide, X[LAST], Y[LAST]))(p.params) for p in (fitted, after)]
    before, now = (float(jnp.abs(slope["g_auto_loc"]).max()) for slope in slopes)
    assert now < 0.05 * before


@pytest.mark.long
def test_single_precision(x32):
    x, y, z = (np.asarray(a, np.float32) for a in (X, Y, Z))
    kernel = dgp.kernels.RBF(1.2, 0.7)

    def model(x, y=None):
        shallow(x, y, Z=z)

    key = jax.random.key(0)
    prior = {name: np.asarray(value, np.float32) for name, value in PRIOR.items()}
    fitted = dgp.Posterior(model, dgp.guides.InducingPoint(model), prior)
    for i in range(3):
        fitted = dgp.condition(fitted, key, x[i::3], y[i::3], num_steps=3, progress_bar=False)
    assert fitted.params["g_auto_loc"].dtype == jnp.float32
    A = jnp.linalg.solve(jnp.linalg.cholesky(with_jitter(kernel.gram(z))), kernel(z, x)).T
    loc, _ = from_features(A, kernel.diag(x), Observations(jnp.array(y), NOISE)).optimum()
    np.testing.assert_allclose(fitted.params["g_auto_loc"], loc, atol=1e-3)


@pytest.mark.long
@pytest.mark.parametrize("wrong", [pytest.param(wrong, id=wrong.name) for wrong in TRACED])
def test_message(wrong):
    with pytest.raises(wrong.raises, match=wrong.match):
        wrong.call()


@pytest.mark.slow
def test_condition_on_traced_rows(key):
    """Fantasies: many values of one row, against the closed form of each."""
    fitted = dgp.Posterior(shallow, dgp.guides.InducingPoint(shallow), PRIOR)
    rows, ys = X[:1], jnp.array([[-1.0], [0.5]])

    def mean(y):
        after = dgp.condition(fitted, key, rows, y, num_steps=1, progress_bar=False)
        return after.predict_function(key, X[:4]).mean

    found = jax.jit(jax.vmap(mean))(ys)
    prior = fitted.using(num_samples=1).predict_jointly(key, X[:4])
    gain = prior.covariances[0][:, 0] / (prior.covariances[0][0, 0] + NOISE**2)
    np.testing.assert_allclose(found, gain * ys, atol=1e-3)
    with pytest.raises(ValueError, match="update: expected arrays, got traced ones"):
        jax.jit(lambda y: dgp.update(fitted, key, rows, y).params)(ys[0])
