"""Projections with an uncertain matrix (Salimbeni, 2020, section 4.2.3), against dense Bayesian linear regression."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from dense import log_normal
from numpyro import handlers
from numpyro.infer import MCMC, NUTS, SVI, Predictive, Trace_ELBO
from programs import agree, bound, draws_of_bound, random_params

import numpyro_dgp as dgp
from numpyro_dgp import guides as G
from numpyro_dgp import testing
from numpyro_dgp.functions.weights import DiagonalBelief, FullBelief
from numpyro_dgp.optim import NaturalGradient

rng = np.random.default_rng(0)
D, N = 5, 30
X = jnp.array(rng.normal(size=(N, D)))
Y = jnp.sin(X @ jnp.array([1.0, -0.5, 0.0, 0.3, 0.0])) + 0.1 * jnp.array(rng.normal(size=N))
SCALE = np.array([1.0, 0.5, 2.0, 0.3, 1.5])
Z = jnp.array(rng.normal(size=(8, 3)))
NOISE = 0.3


def given(u, outputs, **options):
    """The projection when ``u`` is known about its whitened entries."""
    with handlers.substitute(data={"A": u}), handlers.seed(rng_seed=0):
        return dgp.projection("A", D, outputs, **options)


def belief(rule, shape, key):
    m = jax.random.normal(key, shape)
    if rule == "diagonal":
        return DiagonalBelief(m, 0.3 + jax.random.uniform(key, shape))
    return FullBelief(m, jnp.tril(0.3 * jax.random.normal(key, (*shape, shape[-1]))) + 0.4 * jnp.eye(shape[-1]))


def linear(X, y=None):
    """Bayesian linear regression: a projection straight into the likelihood."""
    A = dgp.projection("A", D, None, SCALE)
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dgp.Likelihood(A(X), lambda v: dist.Normal(v, NOISE)), obs=y)


def layered(X, y=None, batch=None, *, Z=Z):
    """The model of Salimbeni (2020), figure 4.3: a projection, a latent, a function."""
    A = dgp.projection("A", D, 2, 0.5)
    g = dgp.gp("g", dgp.kernels.RBF(1.2, 0.9), dgp.Points(Z))
    with numpyro.plate("data", len(X), subsample_size=batch) as i:
        z = numpyro.sample("z", A(X[i]))
        x = dgp.latent("w", z, 1)
        numpyro.sample("y", dgp.Likelihood(g(x), lambda v: dist.Normal(v, NOISE)), obs=None if y is None else y[i])


def evidence(X, y):
    K = (np.asarray(X) * SCALE**2) @ np.asarray(X).T
    return log_normal(np.asarray(y), np.zeros(len(y)), K + NOISE**2 * np.eye(len(y)))


def entries_posterior(X, y):
    """Mean and covariance of the whitened entries of ``linear``."""
    F = np.asarray(X) * SCALE
    S = np.linalg.inv(np.eye(D) + F.T @ F / NOISE**2)
    return S @ F.T @ np.asarray(y) / NOISE**2, S


@pytest.mark.parametrize("outputs", [None, 2])
@pytest.mark.parametrize("rule", ["full", "diagonal"])
@pytest.mark.parametrize("scale", [0.7, SCALE])
def test_moments_are_those_of_the_matrix(outputs, rule, scale, key):
    """E[A x] and Cov[A x, A x'] from dense moments of A."""
    shape = (D,) if outputs is None else (outputs, D)
    q = belief(rule, shape, key)
    A = given(q, outputs, scale=scale, mean=dgp.means.ConstantMean(0.5))
    m = np.asarray(q.loc).reshape(-1, D) * scale
    S = np.asarray(q.covariance) if rule == "full" else np.asarray([np.diag(v) for v in q.variance.reshape(-1, D)])
    S = S.reshape(-1, D, D) * np.outer(np.ones(D) * scale, np.ones(D) * scale)
    values, x = A(X), np.asarray(X)
    mean, covariance = x @ m.T + 0.5, np.einsum("nd,qde,me->qnm", x, S, x)
    variance = np.einsum("qnn->nq", covariance)
    shaped = (lambda a: a[:, 0]) if outputs is None else (lambda a: a)
    np.testing.assert_allclose(values.mean, shaped(mean), rtol=1e-10)
    np.testing.assert_allclose(values.variance, shaped(variance), rtol=1e-10)
    np.testing.assert_array_equal(values.conditional_variance, 0)
    joint = A.joint(X)
    np.testing.assert_allclose(joint.mean, values.mean, rtol=1e-12)
    np.testing.assert_allclose(joint.covariance, covariance, rtol=1e-9, atol=1e-12)
    batch = jnp.stack([X[:4], X[4:8]])
    np.testing.assert_allclose(A(batch).variance[1], values.variance[4:8], rtol=1e-12)
    np.testing.assert_allclose(A.joint(batch).covariance[1], covariance[:, 4:8, 4:8], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("outputs", [None, 2])
@pytest.mark.parametrize("rule", ["full", "diagonal", "draw"])
def test_columns_are_one_hot_rows(outputs, rule, key):
    shape = (D,) if outputs is None else (outputs, D)
    u = jax.random.normal(key, shape) if rule == "draw" else belief(rule, shape, key)
    A = given(u, outputs, scale=SCALE, mean=dgp.means.LinearMean(jnp.ones((D, outputs or 1))))
    labels = jnp.array([[3, 0], [4, 4]])
    gathered, multiplied = A.columns(labels), A(jnp.eye(D)[labels])
    assert gathered.batch_shape == (2, 2)
    np.testing.assert_allclose(gathered.mean, multiplied.mean, rtol=1e-12)
    np.testing.assert_allclose(gathered.variance, multiplied.variance, rtol=1e-10)
    np.testing.assert_array_equal(gathered.inputs, multiplied.inputs)


@pytest.mark.slow
@pytest.mark.parametrize("rule", [G.Full(), G.Diagonal()])
def test_bound_and_divergence_in_closed_form(rule):
    """Expected log likelihood minus KL[q(A) || p(A)], both dense."""
    guide = G.InducingPoint(linear, inducing=rule)
    params = random_params(linear, guide, X, Y)
    params["A_auto_loc"] = params["A_auto_loc"] + jnp.linspace(-0.5, 0.5, D)
    m = np.asarray(params["A_auto_loc"])
    if "A_auto_scale" in params:
        S = np.diag(np.asarray(params["A_auto_scale"]) ** 2)
    else:
        S = np.asarray(params["A_auto_scale_tril"] @ params["A_auto_scale_tril"].T)
    F = np.asarray(X) * SCALE
    fit = -0.5 * np.sum((np.asarray(Y) - F @ m) ** 2 + np.diag(F @ S @ F.T)) / NOISE**2
    fit -= 0.5 * N * np.log(2 * np.pi * NOISE**2)
    divergence = 0.5 * (np.trace(S) + m @ m - D - np.linalg.slogdet(S)[1])
    np.testing.assert_allclose(bound(dgp.ELBO(), params, linear, guide, X, Y), fit - divergence, rtol=1e-10)


@pytest.mark.long
def test_one_natural_step_reaches_the_evidence():
    """Conjugate: at the optimum of q(A) the bound is the log evidence of Bayesian linear regression."""
    guide = G.InducingPoint(linear)
    svi = SVI(linear, guide, NaturalGradient(guide, 1.0, optax.adam(0.0)), dgp.ELBO())
    result = svi.run(jax.random.key(0), 1, X, Y, progress_bar=False)
    best = bound(dgp.ELBO(), result.params, linear, guide, X, Y)
    np.testing.assert_allclose(best, evidence(X, Y), rtol=1e-8)
    mean, S = entries_posterior(X, Y)
    np.testing.assert_allclose(result.params["A_auto_loc"], mean, atol=1e-8)
    mixture = dgp.Posterior(linear, guide, result.params).using(num_samples=2).predict(jax.random.key(1), X)
    F = np.asarray(X) * SCALE
    np.testing.assert_allclose(mixture.mean, F @ mean, atol=1e-8)
    np.testing.assert_allclose(mixture.variance, np.diag(F @ S @ F.T) + NOISE**2, rtol=1e-8)


@pytest.mark.long
def test_bound_agrees_with_stock_elbo():
    guide = G.InducingPoint(layered, sites={"A": G.Diagonal()})
    params = random_params(layered, guide, X, Y)
    params["A_auto_loc"] = params["A_auto_loc"] + 0.3 * jax.random.normal(jax.random.key(5), (2, D))
    ours = draws_of_bound(dgp.ELBO(), params, layered, guide, X, Y)
    stock = draws_of_bound(Trace_ELBO(), params, layered, guide, X, Y, num=4000)
    assert np.isfinite(stock).all()
    assert agree(ours, stock)
    assert np.var(ours) < np.var(stock)


@pytest.mark.long
def test_guide_keeps_its_promises():
    testing.check_guide(layered, G.InducingPoint(layered), X, Y, num=200)


@pytest.mark.long
def test_minibatches_estimate_the_full_bound():
    guide = G.InducingPoint(layered)
    params = random_params(layered, guide, X, Y)
    full = draws_of_bound(dgp.ELBO(), params, layered, guide, X, Y, num=1000)
    assert agree(full, draws_of_bound(dgp.ELBO(), params, layered, guide, X, Y, 10))


@pytest.mark.slow
def test_joint_draws_share_one_matrix(key):
    """Rows that are multiples of each other are drawn as multiples; given the matrix nothing is drawn."""
    A = given(belief("full", (2, D), key), 2)
    rows = jnp.stack([X[0], 2 * X[0], -X[0]])
    draws = A.joint(rows).sample(key, (500,))
    np.testing.assert_allclose(draws[:, 1], 2 * draws[:, 0], atol=2e-3)
    np.testing.assert_allclose(draws[:, 2], -draws[:, 0], atol=2e-3)
    v = jax.random.normal(key, (2, D))
    known = given(v, 2).joint(rows)
    np.testing.assert_array_equal(known.sample(key, (3,))[2], known.loc)
    np.testing.assert_allclose(known.expand((4,)).log_prob(known.loc), 0)
    assert known.log_prob(known.loc + 0.1) == -jnp.inf


@pytest.mark.long
def test_joint_values_as_a_hidden_site():
    def model(X, y=None):
        A = dgp.projection("A", D, 2, 0.5)
        g = dgp.gp("g", dgp.kernels.RBF(1.2, 0.9), dgp.Points(Z[:, :2]))
        z = numpyro.sample("z", A.joint(X))
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dgp.Likelihood(g(z), lambda v: dist.Normal(v, NOISE)), obs=y)

    guide = G.InducingPoint(model)
    params = random_params(model, guide, X, Y)
    ours = draws_of_bound(dgp.ELBO(), params, model, guide, X, Y, num=1000)
    assert agree(ours, draws_of_bound(Trace_ELBO(), params, model, guide, X, Y))


def run(model, *args, warmup=50, samples=50, **kwargs):
    mcmc = MCMC(NUTS(model), num_warmup=warmup, num_samples=samples, progress_bar=False)
    mcmc.run(jax.random.key(0), *args, **kwargs)
    return mcmc.get_samples()


@pytest.mark.long
def test_nuts_lands_on_bayesian_linear_regression():
    draws = run(linear, X, Y, warmup=300, samples=3000)["A"]
    mean, S = entries_posterior(X, Y)
    sd = np.sqrt(np.diag(S))
    assert (np.abs(draws.mean(0) - mean) < 0.1 * sd).all()
    np.testing.assert_allclose(draws.std(0), sd, rtol=0.07)


@pytest.mark.long
def test_nuts_through_a_hidden_projection():
    """Under ``for_mcmc`` the projected inputs are deterministic; on the bare program NUTS stops."""
    draws = run(dgp.for_mcmc(layered), X[:15], Y[:15])
    assert set(draws) == {"A", "g", "w", "z"}
    np.testing.assert_allclose(draws["z"], 0.5 * X[:15] @ draws["A"].mT, rtol=1e-10, atol=1e-12)
    posterior = dgp.Posterior(layered, samples=draws)
    values = posterior.using(num_samples=3).functions(jax.random.key(0))(X[:4])
    np.testing.assert_allclose(values["z"][0], 0.5 * X[:4] @ draws["A"][0].T, rtol=1e-10)
    with pytest.raises(ValueError, match=r"expected values that a Projection determines, .* dgp.for_mcmc"):
        run(layered, X, Y)


@pytest.mark.long
def test_prediction_and_function_draws(key):
    guide = G.InducingPoint(layered)
    params = random_params(layered, guide, X, Y)
    posterior = dgp.Posterior(layered, guide, params)
    draws = posterior.using(num_samples=4).functions(key)
    z = draws(X)["z"]
    assert z.shape == (4, N, 2)
    np.testing.assert_allclose(draws(2 * X)["z"], 2 * z, rtol=1e-9, atol=1e-9)  # one linear map per draw
    assert set(posterior.layers(key, X)) == {"y"}
    y = Predictive(layered, guide=guide, params=params, num_samples=4000)(key, X[:3])["y"]
    mixture = posterior.using(num_samples=4000).predict(key, X[:3])
    assert (jnp.abs(y.mean(0) - mixture.mean) < 5 * jnp.sqrt(mixture.variance / 2000)).all()


@pytest.mark.long
def test_mean_field_guides_need_a_rule():
    svi = SVI(layered, G.MeanField(layered), optax.adam(0.01), dgp.ELBO())
    with pytest.raises(
        ValueError,
        match=r"MeanField: expected a guide under which values that v .* 'z', .* Propagate",
    ):
        svi.run(jax.random.key(0), 1, X, Y, progress_bar=False)
    guide = G.MeanField(layered, sites={"z": G.Propagate()})
    svi = SVI(layered, guide, optax.adam(0.01), dgp.ELBO())
    assert np.isfinite(svi.run(jax.random.key(0), 3, X, Y, progress_bar=False).losses).all()


@pytest.mark.long
def test_labels_of_many_classes_are_learned(key):
    """Each class has a mean of its own; the projection to one column must order them."""
    centres = jnp.linspace(-1.5, 1.5, 6)[jnp.array([2, 5, 0, 3, 1, 4])]
    labels = jnp.tile(jnp.arange(6), 5)
    y = centres[labels] + 0.1 * jax.random.normal(key, (30,))

    def model(labels, y=None):
        A = dgp.projection("A", 6, 1)
        g = dgp.gp("g", dgp.kernels.RBF(2.0, 1.5), dgp.Points(jnp.linspace(-2.5, 2.5, 8)[:, None]))
        with numpyro.plate("data", len(labels)):
            z = numpyro.sample("z", A.columns(labels))
            numpyro.sample("y", dgp.Likelihood(g(z), lambda v: dist.Normal(v, 0.1)), obs=y)

    guide = G.InducingPoint(model, sites={"A": G.Diagonal()})
    result = SVI(model, guide, optax.adam(0.03), dgp.ELBO()).run(key, 1500, labels, y, progress_bar=False)
    mixture = dgp.Posterior(model, guide, result.params).predict(key, jnp.arange(6))
    np.testing.assert_allclose(mixture.mean, centres, atol=0.2)


@pytest.mark.long
def test_float32(x32):
    x, y = X.astype(jnp.float32), Y.astype(jnp.float32)
    guide = G.InducingPoint(layered)
    svi = SVI(layered, guide, optax.adam(0.01), dgp.ELBO())
    result = svi.run(jax.random.key(0), 5, x, y, Z=Z.astype(jnp.float32), progress_bar=False)
    assert result.losses.dtype == result.params["A_auto_loc"].dtype == jnp.float32
    assert np.isfinite(result.losses).all()


def in_plate():
    with numpyro.plate("data", 4):
        dgp.projection("A", 3, 2)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: dgp.projection("A", 0, 2), "projection 'A': expected inputs to be a positive integer, got 0"),
        (lambda: dgp.projection("A", 3, 2.0), "projection 'A': expected outputs to be a positive integer, got 2.0"),
        (lambda: dgp.projection("A", 3, 2, -1.0), "projection 'A': expected scale to be positive"),
        (
            lambda: dgp.projection("A", 3, 2, np.ones(2)),
            r"expected scale to be a number or of shape \(3,\), got \(2,\)",
        ),
        (lambda: dgp.projection("A", D, 2)(X[:, :3]), "expected inputs with D = 5 columns, got shape"),
        (lambda: dgp.projection("A", D, 2)(X[0]), r"expected inputs of shape \(..., N, D\)"),
        (lambda: dgp.projection("A", D, 2)(X.at[0].set(jnp.nan)), "expected finite inputs of a projection"),
        (lambda: dgp.projection("A", D, 2).columns(X), "expected integer labels, got float64"),
        (lambda: dgp.projection("A", D, 2).columns(jnp.array([0, 5])), "expected labels from 0 to 4, got 0 to 5"),
        (in_plate, r"projection 'A': expected inducing values of shape \(2, 3\), got \(4, 2, 3\)"),
    ],
)
def test_bad_input(build, message):
    with handlers.seed(rng_seed=0), pytest.raises(ValueError, match=message):
        build()


@pytest.mark.long
def test_the_dtype_is_that_of_the_scale():
    """float32 data stay float32 whatever the global flag says."""
    x, y, z = (a.astype(jnp.float32) for a in (X, Y, Z))

    def model(X, y=None):
        A = dgp.projection("A", D, 2, np.float32(0.5))
        g = dgp.gp("g", dgp.kernels.RBF(), dgp.Points(z[:, :2]))
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dgp.Likelihood(g(numpyro.sample("z", A(X))), lambda v: dist.Normal(v, 0.1)), obs=y)

    guide = G.InducingPoint(model)
    svi = SVI(model, guide, optax.adam(0.01), dgp.ELBO())
    params = svi.get_params(svi.init(jax.random.key(0), x, y))
    gradient = jax.jit(jax.grad(lambda p: dgp.ELBO().loss(jax.random.key(0), p, model, guide, x, y)))(params)
    assert {a.dtype for a in [*params.values(), *gradient.values()]} == {np.dtype("float32")}
    assert all(np.isfinite(a).all() for a in gradient.values())
