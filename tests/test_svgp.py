"""A one-layer program is the sparse variational Gaussian process of the textbooks."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from dense import kl, log_normal, rbf, svgp_bound, titsias, titsias_upper
from numpyro.infer import SVI
from programs import NOISE, X, Y, Z, bound, draws_of_bound, random_params, shallow
from scipy.optimize import minimize

import numpyro_dgp as dgp
from numpyro_dgp.functions.function_values import FunctionValues

x, y, z = (np.asarray(a) for a in (X, Y, Z))
KZZ, KZX, KXX = rbf(z, z, 1.2, 0.7), rbf(z, x, 1.2, 0.7), rbf(x, x, 1.2, 0.7)
L = np.linalg.cholesky(KZZ)


def optimum(Kzz, Kzx):
    """Parameters of the guide at the closed-form optimum of q(u), in whitened coordinates."""
    A = np.linalg.solve(np.linalg.cholesky(Kzz), Kzx)
    precision = np.eye(len(A)) + A @ A.T / NOISE**2
    root = np.linalg.cholesky(np.linalg.inv(precision))
    return {"g_auto_loc": jnp.array(np.linalg.solve(precision, A @ y) / NOISE**2), "g_auto_scale_tril": jnp.array(root)}


@pytest.mark.slow
def test_bound_is_hensmans():
    guide = dgp.guides.InducingPoint(shallow)
    params = random_params(shallow, guide, X, Y)
    m = L @ np.asarray(params["g_auto_loc"])
    root = L @ np.asarray(params["g_auto_scale_tril"])
    expected = svgp_bound(y, NOISE, KZZ, KZX, KXX, m, root @ root.T)
    np.testing.assert_allclose(bound(dgp.ELBO(), params, shallow, guide, X, Y), expected, rtol=1e-7)


@pytest.mark.slow
def test_dense_guide_equals_diagonal_guide():
    full, diagonal = (
        dgp.guides.InducingPoint(shallow, inducing=rule) for rule in (dgp.guides.Full(), dgp.guides.Diagonal())
    )
    params = random_params(shallow, diagonal, X, Y)
    tril = {"g_auto_loc": params["g_auto_loc"], "g_auto_scale_tril": jnp.diag(params["g_auto_scale"])}
    a = bound(dgp.ELBO(), params, shallow, diagonal, X, Y)
    np.testing.assert_allclose(a, bound(dgp.ELBO(), tril, shallow, full, X, Y), rtol=1e-10)


@pytest.mark.slow
def test_optimum_of_q_is_titsias_collapsed_bound():
    """The bound at the closed-form optimum of q(u) is the collapsed bound, and no q is better."""
    collapsed, m, S = titsias(y, NOISE, KZZ, KZX, KXX)
    guide, best = dgp.guides.InducingPoint(shallow), optimum(KZZ, KZX)
    np.testing.assert_allclose(L @ best["g_auto_loc"], m, atol=1e-7)
    np.testing.assert_allclose(L @ best["g_auto_scale_tril"] @ best["g_auto_scale_tril"].T @ L.T, S, atol=1e-7)
    np.testing.assert_allclose(bound(dgp.ELBO(), best, shallow, guide, X, Y), collapsed, rtol=1e-7)
    gradient = jax.grad(lambda p: bound(dgp.ELBO(), p, shallow, guide, X, Y))(best)
    for value in gradient.values():
        np.testing.assert_allclose(value, 0, atol=1e-4)


@pytest.mark.slow
def test_bounds_sandwich_the_evidence():
    """Lower bounds are below the evidence, the upper bound is above, both are tight at Z = X."""
    evidence = log_normal(y, np.zeros(30), KXX + NOISE**2 * np.eye(30))
    for inducing in (z[:3], z, x[::2], x):
        Kzz, Kzx = rbf(inducing, inducing, 1.2, 0.7) + 1.2e-10 * np.eye(len(inducing)), rbf(inducing, x, 1.2, 0.7)
        model = partial(shallow, Z=jnp.array(inducing))
        guide = dgp.guides.InducingPoint(model)
        lower = bound(dgp.ELBO(), optimum(Kzz, Kzx), model, guide, X, Y)
        assert lower <= evidence + 1e-6
        assert evidence <= titsias_upper(y, NOISE, Kzz, Kzx, KXX) + 1e-6
    # The last one is Z = X. The jitter, 1e-10 relative, is all that separates them.
    np.testing.assert_allclose(lower, evidence, atol=1e-6)


@pytest.mark.slow
def test_adam_reaches_the_collapsed_bound():
    collapsed, _, _ = titsias(y, NOISE, KZZ, KZX, KXX)
    guide = dgp.guides.InducingPoint(shallow)
    svi = SVI(shallow, guide, optax.adam(optax.exponential_decay(0.05, 500, 0.5)), dgp.ELBO())
    result = svi.run(jax.random.key(0), 6000, X, Y, progress_bar=False)
    np.testing.assert_allclose(-result.losses[-1], collapsed, atol=1e-2)


def test_kl_is_zero_at_the_prior():
    """With q = prior the divergence is zero, and the bound is the expected log likelihood alone."""
    guide = dgp.guides.InducingPoint(shallow)
    params = {"g_auto_loc": jnp.zeros(8), "g_auto_scale_tril": jnp.eye(8)}
    expected = (-0.5 * (y**2 + 1.2) / NOISE**2 - 0.5 * np.log(2 * np.pi * NOISE**2)).sum()
    np.testing.assert_allclose(bound(dgp.ELBO(), params, shallow, guide, X, Y), expected, rtol=1e-9)


def exact(X, y=None, noise=NOISE):
    """A latent Gaussian process with its values drawn, as generalised models need."""
    f = dgp.gp("f", dgp.kernels.RBF(1.2, 0.7), None)
    v = numpyro.sample("v", f(X))
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dist.Bernoulli(logits=v), obs=y)


LABELS = (Y > 0).astype(int)


def maximise(model, guide, loss, labels):
    """Best bound over a guide's parameters, by L-BFGS."""
    from jax.flatten_util import ravel_pytree

    params = random_params(model, guide, X, labels)
    flat, unravel = ravel_pytree(params)
    objective = jax.jit(jax.value_and_grad(lambda v: loss(unravel(v), guide)))
    result = minimize(
        lambda v: tuple(np.asarray(o, float) for o in objective(v)),
        flat,
        jac=True,
        method="L-BFGS-B",
        options={"maxiter": 3000, "ftol": 1e-13, "gtol": 1e-9},
    )
    return -result.fun, unravel(jnp.array(result.x))


def vgp_loss(params, guide):
    """Negative bound with the expectation by quadrature, from the guide's own distribution of v."""
    with (
        numpyro.handlers.block(),
        numpyro.handlers.seed(rng_seed=0),
        numpyro.handlers.substitute(data=params),
        numpyro.handlers.trace() as sites,
    ):
        guide(X, LABELS)
    q = sites["v"]["fn"]
    prior = dgp.gp("f", dgp.kernels.RBF(1.2, 0.7), None)(X)
    likelihood = dgp.Likelihood(q, lambda v: dist.Bernoulli(logits=v), integrate=dgp.likelihoods.GaussHermite(30))
    return dist.kl_divergence(q, prior) - likelihood.log_prob(LABELS).sum()


@pytest.mark.long
def test_opper_archambeau_reaches_the_full_rank_optimum():
    """2 N numbers are enough, for a likelihood that factorises."""
    full = dgp.guides.InducingPoint(exact)
    dual = dgp.guides.InducingPoint(exact, sites={"v": dgp.guides.OpperArchambeau()})
    diagonal = dgp.guides.MeanField(exact)
    best, params = maximise(exact, dual, vgp_loss, LABELS)
    assert sorted(params) == ["v_auto_alpha", "v_auto_lambda"]
    reference, _ = maximise(exact, full, vgp_loss, LABELS)
    np.testing.assert_allclose(best, reference, atol=1e-4)

    def mean_field_loss(params, guide):
        q = FunctionValues(params["v_auto_loc"], params["v_auto_scale"] ** 2, event_dim=0)
        likelihood = dgp.Likelihood(q, lambda v: dist.Bernoulli(logits=v), integrate=dgp.likelihoods.GaussHermite(30))
        K = dgp.kernels.RBF(1.2, 0.7).gram(X) + 1e-10 * 1.2 * jnp.eye(30)
        inverse = jnp.linalg.inv(K)
        divergence = 0.5 * (
            jnp.diag(inverse) @ q.variance
            + q.loc @ inverse @ q.loc
            - 30
            + jnp.linalg.slogdet(K)[1]
            - jnp.log(q.variance).sum()
        )
        return divergence - likelihood.log_prob(LABELS).sum()

    worse, _ = maximise(exact, diagonal, mean_field_loss, LABELS)
    assert worse < reference - 1.0


@pytest.mark.slow
def test_opper_archambeau_begins_alike_in_all_units():
    """Values in other units have the same posterior at the start, in these units, and their mean is the prior's."""

    def begins(unit):
        def model(X, y=None):
            v = numpyro.sample(
                "v", dgp.gp("f", dgp.kernels.RBF(1.2 * unit**2, 0.7), None, mean=dgp.means.ConstantMean(unit))(X)
            )
            with numpyro.plate("data", len(X)):
                numpyro.sample("y", dist.Normal(v, 0.1 * unit), obs=y)

        guide = dgp.guides.InducingPoint(model, exact=dgp.guides.OpperArchambeau())
        with numpyro.handlers.seed(rng_seed=0), numpyro.handlers.trace() as sites:
            guide(X, LABELS)
        return sites["v"]["fn"]

    plain, large = begins(1.0), begins(1e3)
    np.testing.assert_allclose(large.covariance, 1e6 * plain.covariance, rtol=1e-9)
    np.testing.assert_allclose(large.loc, 1e3 * plain.loc)


@pytest.mark.slow
def test_opper_archambeau_begins_where_values_are_known():
    """A linear function is zero at the origin: its variance there is no unit of anything."""

    def model(X, y=None):
        v = numpyro.sample("v", dgp.gp("f", dgp.kernels.Linear(4.0), None)(X))
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dist.Bernoulli(logits=v), obs=y)

    at = jnp.array([[0.0], [1.0]])
    guide = dgp.guides.InducingPoint(model, exact=dgp.guides.OpperArchambeau())
    svi = SVI(model, guide, optax.adam(0.1), dgp.ELBO())
    state = svi.init(jax.random.key(0), at, jnp.array([0, 1]))
    assert np.isfinite(svi.evaluate(state, at, jnp.array([0, 1])))
    np.testing.assert_allclose(svi.get_params(state)["v_auto_lambda"], 2**-0.5)


@pytest.mark.smoke
@pytest.mark.parametrize("rule", [dgp.guides.Full(), dgp.guides.OpperArchambeau()])
def test_guides_over_exact_values_match_dense_algebra(rule):
    guide = dgp.guides.InducingPoint(exact, sites={"v": rule})
    params = random_params(exact, guide, X, LABELS)
    with numpyro.handlers.seed(rng_seed=0), numpyro.handlers.substitute(data=params), numpyro.handlers.trace() as sites:
        guide(X, LABELS)
    q = sites["v"]["fn"]
    K = KXX + 1e-10 * 1.2 * np.eye(30)
    if isinstance(rule, dgp.guides.Full):
        root = np.linalg.cholesky(K) @ np.asarray(params["v_auto_scale_tril"][0])
        mean, covariance = np.linalg.cholesky(K) @ np.asarray(params["v_auto_loc"][0]), root @ root.T
    else:
        A = np.linalg.inv(K) + np.diag(np.asarray(params["v_auto_lambda"]) ** 2)
        mean, covariance = K @ np.asarray(params["v_auto_alpha"]), np.linalg.inv(A)
    np.testing.assert_allclose(q.loc, mean, atol=1e-6)
    np.testing.assert_allclose(q.covariance[0], covariance, atol=1e-6)
    prior = dgp.gp("f", dgp.kernels.RBF(1.2, 0.7), None)(X)
    assert dist.kl_divergence(q, prior) > 0
    # Through K, singular to ten digits, the reference has few digits left; the guide keeps them all.
    if isinstance(rule, dgp.guides.Full):
        root = np.asarray(params["v_auto_scale_tril"][0])
        expected, rtol = kl(np.asarray(params["v_auto_loc"][0]), root @ root.T, np.zeros(30), np.eye(30)), 1e-10
    else:
        alpha, lam = (np.asarray(params[f"v_auto_{name}"]) for name in ("alpha", "lambda"))
        A = lam[:, None] * K * lam + np.eye(30)
        expected = 0.5 * (np.linalg.slogdet(A)[1] + alpha @ K @ alpha + np.trace(np.linalg.inv(A)) - 30)
        rtol = 1e-7
    np.testing.assert_allclose(dist.kl_divergence(q, prior), expected, rtol=rtol)


@pytest.mark.smoke
def test_exact_regression_as_a_program():
    """``numpyro.sample("y", f(X, noise=s), obs=y)`` is the exact Gaussian process."""

    def model(X, y):
        numpyro.sample("y", dgp.gp("f", dgp.kernels.RBF(1.2, 0.7), None)(X, noise=NOISE), obs=y)

    value, _ = numpyro.infer.util.log_density(model, (X, Y), {}, {})
    np.testing.assert_allclose(value, log_normal(y, np.zeros(30), KXX + NOISE**2 * np.eye(30)), rtol=1e-8)


@pytest.mark.long
def test_marginal_collapse_is_fitc():
    """With collapse="marginal" and u integrated numerically, the evidence is that of FITC."""

    def model(X, y):
        g = dgp.gp("g", dgp.kernels.RBF(1.2, 0.7), dgp.Points(Z))
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dgp.Likelihood(g(X), lambda v: dist.Normal(v, NOISE), collapse="marginal"), obs=y)

    Q = KZX.T @ np.linalg.solve(KZZ, KZX)
    fitc = Q + np.diag(np.diag(KXX - Q)) + NOISE**2 * np.eye(30)
    A = np.linalg.solve(L, KZX)
    D = np.diag(KXX - Q) + NOISE**2
    # The exact posterior over whitened u makes log p(y, u) - log q(u) constant and equal to the evidence.
    precision = np.eye(8) + A @ (A / D).T
    mean = np.linalg.solve(precision, A @ (y / D))
    root = np.linalg.cholesky(np.linalg.inv(precision))
    guide = dgp.guides.InducingPoint(model)
    params = {"g_auto_loc": jnp.array(mean), "g_auto_scale_tril": jnp.array(root)}
    evidence = log_normal(y, np.zeros(30), fitc)
    np.testing.assert_allclose(bound(dgp.ELBO(), params, model, guide, X, Y), evidence, rtol=1e-7)
    stock = draws_of_bound(numpyro.infer.Trace_ELBO(), params, model, guide, X, Y, num=200)
    np.testing.assert_allclose(stock, evidence, rtol=1e-6)
