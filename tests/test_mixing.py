"""Linear mixtures of functions (Salimbeni, 2020, sections 4.2.3 and 5.1.5), against dense multi-output GPs."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from dense import log_normal, rbf
from numpyro import handlers
from numpyro.infer import SVI, Trace_ELBO
from programs import agree, bound, draws_of_bound, random_params

import numpyro_dgp as dgp
from numpyro_dgp import guides as G
from numpyro_dgp.functions.function_values import FunctionValues
from numpyro_dgp.functions.joint_values import JointValues
from numpyro_dgp.guides.run import marginal
from numpyro_dgp.optim import NaturalGradient

rng = np.random.default_rng(0)
X = jnp.array(rng.uniform(-2, 2, size=(12, 1)))
P = jnp.array(rng.normal(size=(4, 2)))
ORTHOGONAL = jnp.array(np.linalg.qr(P)[0] * [1.5, 0.7])
NOISE = 0.3
Y = jnp.array(np.sin(np.asarray(X) * [1.0, 2.0, 1.0, 0.5]) + 0.1 * rng.normal(size=(12, 4)))
INNER_Z = rng.normal(size=(8, 3))
KERNEL = dgp.kernels.RBF(1.2, 0.7)
G_X = FunctionValues(
    jnp.array(rng.normal(size=(3, 2))), jnp.array(rng.uniform(0.2, 1, (3, 2))), jnp.array(rng.uniform(0.2, 1, (3, 2)))
)


def normal(v):
    return dist.Normal(v, NOISE).to_event(1)


def coregionalised(X, y=None, batch=None, *, P=P, Z=X[:6]):
    g = dgp.gp("g", KERNEL, dgp.Points(Z), outputs=2)
    with numpyro.plate("data", len(X), subsample_size=batch) as i:
        numpyro.sample("y", dgp.Likelihood(g(X[i]).mix(P), normal), obs=None if y is None else y[i])


def hidden(X, y=None):
    """The recipe for a hidden layer: two shared functions, mixed to three columns, around the mean of the layer."""
    f = dgp.gp("f", dgp.kernels.RBF(0.3, 0.9), dgp.Points(jnp.linspace(-2, 2, 8)[:, None]), outputs=2)
    g = dgp.gp("g", KERNEL, dgp.Points(jnp.array(INNER_Z)))
    with numpyro.plate("data", len(X)):
        drawn = numpyro.sample("f_x", f(X))
        h = jnp.tile(X, 3) + drawn @ P[:3].T
        numpyro.sample("y", dgp.Likelihood(g(h), lambda v: dist.Normal(v, NOISE)), obs=y)


def test_moments_of_mixtures():
    mixed, W = G_X.mix(P), np.asarray(P)
    np.testing.assert_allclose(mixed.mean, np.asarray(G_X.loc) @ W.T, rtol=1e-12)
    for name in ("variance", "conditional_variance", "belief_variance"):
        dense = [np.diag(W @ np.diag(row) @ W.T) for row in np.asarray(getattr(G_X, name))]
        np.testing.assert_allclose(getattr(mixed, name), dense, rtol=1e-12)
    assert mixed.event_shape == (4,)
    assert mixed.expand((5, 3)).variance.shape == (5, 3, 4)
    leaves, treedef = jax.tree.flatten(mixed)
    np.testing.assert_array_equal(jax.tree.unflatten(treedef, leaves).variance, mixed.variance)


@pytest.mark.slow
def test_draws_have_the_covariance_of_mixtures(key):
    draws = G_X.mix(P).sample(key, (20_000,))
    centred = draws - draws.mean(0)
    products = centred[..., :, None] * centred[..., None, :]
    dense = np.einsum("pq,nq,rq->npr", P, G_X.variance, P)
    assert (jnp.abs(products.mean(0) - dense) < 4.5 * products.std(0) / np.sqrt(20_000)).all()
    y = dgp.Likelihood(G_X.mix(P), normal).sample(key, (20_000,))
    np.testing.assert_allclose(np.cov(y[:, 0].T), dense[0] + NOISE**2 * np.eye(4), atol=0.12)


def test_joint_values_are_mixed_datum_by_datum():
    covariance = jnp.array(rng.normal(size=(2, 3, 3)))
    covariance = covariance @ covariance.mT
    joint = JointValues(G_X.loc, covariance, 0.5 * covariance)
    np.testing.assert_allclose(joint.mix(P).variance, joint.marginals().mix(P).variance, rtol=1e-12)
    np.testing.assert_allclose(joint.mix(P).variance[1, 2], 1.5 * (P[2] ** 2) @ covariance[:, 1, 1], rtol=1e-12)


@pytest.mark.long
def test_bound_is_the_evidence_of_the_multi_output_process():
    """Columns of P orthogonal, Z = X: one natural step reaches log N(y; 0, (P P') x K + s2 I)."""

    def model(X, y=None):
        return coregionalised(X, y, P=ORTHOGONAL, Z=X)

    guide = G.InducingPoint(model)
    svi = SVI(model, guide, NaturalGradient(guide, 1.0, optax.adam(0.0)), dgp.ELBO())
    result = svi.run(jax.random.key(0), 1, X, Y, progress_bar=False)
    x, W = np.asarray(X), np.asarray(ORTHOGONAL)
    covariance = np.kron(W @ W.T, rbf(x, x, 1.2, 0.7)) + NOISE**2 * np.eye(48)
    evidence = log_normal(np.asarray(Y).T.ravel(), np.zeros(48), covariance)
    np.testing.assert_allclose(bound(dgp.ELBO(), result.params, model, guide, X, Y), evidence, rtol=1e-6)


@pytest.mark.long
def test_bound_agrees_with_mixing_in_the_conditional():
    """Closed form against the same model with the mixture written into the conditional, and against the stock ELBO."""

    def inside(X, y=None):
        g = dgp.gp("g", KERNEL, dgp.Points(X[:6]), outputs=2)
        with numpyro.plate("data", len(X)):
            likelihood = dgp.Likelihood(g(X), lambda g: normal(g @ P.T), integrate=dgp.likelihoods.MonteCarlo(20))
            numpyro.sample("y", likelihood, obs=y)

    guide = G.InducingPoint(coregionalised)
    params = random_params(coregionalised, guide, X, Y)
    exact = bound(dgp.ELBO(), params, coregionalised, guide, X, Y)
    for objective, model in ((dgp.ELBO(), inside), (Trace_ELBO(), coregionalised)):
        draws = draws_of_bound(objective, params, model, guide, X, Y)
        assert abs(draws.mean() - exact) < 3 * draws.std() / np.sqrt(len(draws))


@pytest.mark.slow
def test_log_marginal_of_several_outputs_is_joint():
    likelihood = dgp.Likelihood(
        G_X.mix(P), lambda v: dist.Normal(2 * v + 1, jnp.array([0.1, 0.2, 0.3, 0.4])).to_event(1)
    )
    dense = []
    for n in range(3):
        covariance = 4 * P @ jnp.diag(G_X.variance[n]) @ P.T + jnp.diag(jnp.array([0.1, 0.2, 0.3, 0.4]) ** 2)
        dense.append(log_normal(np.asarray(Y[n]), np.asarray(2 * G_X.loc[n] @ P.T + 1), np.asarray(covariance)))
    np.testing.assert_allclose(likelihood.log_marginal(Y[:3]), dense, rtol=1e-9)


@pytest.mark.slow
def test_log_marginal_of_other_conditionals(key):
    """Monte Carlo over the functions, against many draws."""
    counts = jnp.array([[0, 1, 2, 1], [3, 0, 0, 1], [1, 1, 1, 1]])

    def conditional(v):
        return dist.Poisson(jnp.exp(0.3 * v)).to_event(1)

    mixed = G_X.mix(P)
    log_p = jax.vmap(lambda v: conditional(v).log_prob(counts))(mixed.sample(key, (50_000,)))
    exact = jax.scipy.special.logsumexp(log_p, 0) - np.log(50_000)
    likelihood = dgp.Likelihood(mixed, conditional, integrate=dgp.likelihoods.MonteCarlo(50_000, jax.random.key(1)))
    np.testing.assert_allclose(likelihood.log_marginal(counts), exact, atol=0.03)


@pytest.mark.slow
def test_a_conditional_that_mixes_outputs_sees_the_correlations(key):
    labels = jnp.array([0, 3, 2])
    rule = dgp.likelihoods.MonteCarlo(50_000, jax.random.key(1))
    likelihood = dgp.Likelihood(G_X.mix(P), lambda v: dist.Categorical(logits=v), integrate=rule)
    log_p = jax.vmap(lambda v: dist.Categorical(logits=v).log_prob(labels))(G_X.mix(P).sample(key, (50_000,)))
    np.testing.assert_allclose(likelihood.log_prob(labels), log_p.mean(0), atol=0.05)
    np.testing.assert_allclose(
        likelihood.log_marginal(labels), jax.scipy.special.logsumexp(log_p, 0) - np.log(50_000), atol=0.03
    )
    with pytest.warns(UserWarning, match="Categorical mixes the 4 outputs of f"):
        dgp.Likelihood(G_X.mix(P), lambda v: dist.Categorical(logits=v))
    with pytest.raises(ValueError, match='expected collapse="bound" for mixed values, got "marginal"'):
        dgp.Likelihood(G_X.mix(P), normal, collapse="marginal")


@pytest.mark.long
def test_posterior_density_sees_the_correlations(key):
    guide = G.InducingPoint(coregionalised)
    params = random_params(coregionalised, guide, X, Y)
    posterior = dgp.Posterior(coregionalised, guide, params)
    with handlers.seed(rng_seed=0), handlers.substitute(data=params), handlers.trace() as sites:
        marginal(guide)(X)
    with handlers.substitute(data={"g": sites["g"]["value"]}), handlers.seed(rng_seed=0):
        g_x = dgp.gp("g", KERNEL, dgp.Points(X[:6]), outputs=2)(X)
    density = posterior.using(num_samples=2).log_density(key, Y, X)
    for n in (0, 7):
        covariance = P @ jnp.diag(g_x.variance[n]) @ P.T + NOISE**2 * jnp.eye(4)
        exact = log_normal(np.asarray(Y[n]), np.asarray(g_x.loc[n] @ P.T), np.asarray(covariance))
        np.testing.assert_allclose(density[n], exact, rtol=1e-8)
    assert posterior.predict(key, X).mean.shape == (12, 4)
    assert posterior.using(num_samples=3).functions(key)(X)["y"].shape == (3, 12, 4)


@pytest.mark.long
def test_weights_are_learned_or_random():
    def model(X, y=None):
        scale = numpyro.param("scale", jnp.ones(()))
        weights = numpyro.sample("weights", dist.Normal(0, 1).expand([4, 2]).to_event(2))
        return coregionalised(X, y, P=scale * weights)

    guide = G.InducingPoint(model, other=G.Normal())
    svi = SVI(model, guide, optax.adam(0.05), dgp.ELBO())
    result = svi.run(jax.random.key(0), 300, X, Y, progress_bar=False)
    assert result.losses[-20:].mean() < result.losses[:20].mean() - 10
    assert abs(result.params["scale"] - 1) > 1e-3


def used_as_hidden(X, y=None):
    f = dgp.gp("f", KERNEL, dgp.Points(X[:6]), outputs=2)
    with numpyro.plate("data", len(X)):
        numpyro.sample("h", f(X).mix(P))


@pytest.mark.long
def test_hidden_layer_recipe(key):
    """Draw the functions, mix the draw: correlated columns, the same bound as the stock ELBO."""
    guide = G.InducingPoint(hidden)
    y = Y[:, 0]
    params = random_params(hidden, guide, X, y)
    ours = draws_of_bound(dgp.ELBO(), params, hidden, guide, X, y)
    assert agree(ours, draws_of_bound(Trace_ELBO(), params, hidden, guide, X, y))
    draws = dgp.Posterior(hidden, guide, params).using(num_samples=2000).hidden(key, X)["f_x"]
    assert draws.shape == (2000, 12, 2)
    seeded = handlers.seed(G.InducingPoint(used_as_hidden), key)
    with pytest.raises(ValueError, match="for a hidden layer mix a draw"):
        seeded(X)


@pytest.mark.slow
def test_float32(x32):
    g_x = jax.tree.map(lambda a: a.astype(jnp.float32), G_X)
    mixed = g_x.mix(np.asarray(P))
    likelihood = dgp.Likelihood(mixed, normal)
    value = likelihood.log_marginal(Y[:3].astype(jnp.float32))
    assert mixed.variance.dtype == value.dtype == jnp.float32


def test_initial_weights_reproduce_the_kernel():
    pixels = np.stack(np.meshgrid(np.arange(5.0), np.arange(4.0)), -1).reshape(-1, 2)
    K = np.asarray(dgp.kernels.Matern52()(jnp.array(pixels), jnp.array(pixels)))
    full = dgp.initial.mixing(pixels, dgp.kernels.Matern52(), 20)
    np.testing.assert_allclose(full @ full.T, K, atol=1e-10)
    few = dgp.initial.mixing(pixels, dgp.kernels.Matern52(), 6)
    np.testing.assert_allclose(few, full[:, :6])
    eigenvalues = np.linalg.eigvalsh(K)[::-1]
    np.testing.assert_allclose(np.linalg.norm(K - few @ few.T, 2), eigenvalues[6], rtol=1e-8)
    assert dgp.initial.mixing(pixels.astype(np.float32), dgp.kernels.Matern52(), 3).dtype == np.float32


def test_principal_directions():
    data = rng.normal(size=(200, 4)) * [0.1, 3.0, 1.0, 2.0]
    W = dgp.means.principal_directions(data, 3)
    np.testing.assert_allclose(W.T @ W, np.eye(3), atol=1e-12)
    _, vectors = np.linalg.eigh(np.cov(data.T))
    np.testing.assert_allclose(np.abs(W.T @ vectors[:, ::-1][:, :3]), np.eye(3), atol=1e-10)
    np.testing.assert_array_equal(dgp.means.pca(data, 3).W, W)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: G_X.mix(P[:, 0]),
            r"mix: expected weights of shape \(P, Q\) for values of Q functions, got weights \(4,\)",
        ),
        (lambda: G_X.mix(P.T), r"got weights \(2, 4\) for values \(2,\)"),
        (lambda: FunctionValues(jnp.zeros(3), jnp.ones(3), event_dim=0).mix(P), r"for values \(\)"),
        (lambda: G_X.mix(P.at[0, 0].set(jnp.nan)), "expected finite weights of mix"),
        (lambda: G_X.mix(P).log_prob(jnp.zeros(4)), "mix: expected mixed values inside dgp.Likelihood"),
        (lambda: dgp.initial.mixing(np.ones((3, 1)), KERNEL, 4), "expected between 1 and 3 functions"),
        (lambda: dgp.initial.mixing(np.ones(3), KERNEL, 1), r"initial.mixing: expected inputs of shape \(..., N, D\)"),
        (lambda: dgp.initial.mixing(np.full((3, 1), np.nan), KERNEL, 1), "expected finite coordinates"),
        (lambda: dgp.means.principal_directions(np.ones((3, 2)), 3), "expected between 1 and 2 directions, got 3"),
        (lambda: dgp.means.principal_directions(np.full((3, 2), np.nan), 1), "expected finite inputs X"),
    ],
)
def test_bad_input(build, message):
    with pytest.raises(ValueError, match=message):
        build()
