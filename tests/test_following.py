"""The optimal posterior of hidden values given inducing values, against the whole family it is the optimum of."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize
from jax.flatten_util import ravel_pytree

from numpyro_dgp.bounds.collapsed import Observations, Quadratic, from_features
from numpyro_dgp.bounds.given_inducing import follow, follow_jointly
from numpyro_dgp.math.gaussians import kl_full

rng = np.random.default_rng(3)
N, J, M = 6, 3, 4


@pytest.fixture
def layer():
    """Inputs with J equally probable values each: features (N, J, M) and mean functions there."""
    return {
        "alpha": jnp.array(rng.normal(size=(N, J, M))) * 0.4,
        "mean": jnp.array(rng.normal(size=(N, J))),
        "noise": jnp.array(rng.uniform(0.3, 1.0, size=N)),
        "w": jnp.array(rng.uniform(0.5, 1.5, size=N)),
        "mu": jnp.array(rng.normal(size=N)),
    }


def own_term(layer, m, L, T, mu, sigma2):
    """E[log N(h; f(x), s^2)] + E[H(q(h | v))] - KL, any q(h | v) with means mu and variances sigma2; k(x, x) = 4."""
    alpha, s2 = layer["alpha"], layer["noise"] ** 2
    S = sigma2 - jnp.square(T @ L).sum(-1)
    residual = mu[:, None] - layer["mean"] - alpha @ m
    # Over v around m: the square of (T - alpha) L, and S.
    square = residual**2 + jnp.square((T[:, None] - alpha) @ L).sum(-1) + S[:, None] + 4 - jnp.square(alpha).sum(-1)
    terms = -0.5 * square.mean(1) / s2 - 0.5 * jnp.log(2 * np.pi * s2) + 0.5 * jnp.log(2 * np.pi * np.e * S)
    return (layer["w"] * terms).sum() - kl_full(m, L)


def quadratic(layer, mu, T=0.0, variance=0.0):
    """The same given v, at means mu + T v and conditional variances: the average over exact inputs."""
    data = []
    for j in range(J):
        alpha = layer["alpha"][:, j]
        variances = 4 - jnp.square(alpha).sum(-1) + jnp.square(alpha - T).sum(-1)
        target = mu - layer["mean"][:, j]
        observed = Observations(target, layer["noise"], y_variance=variance, weights=layer["w"])
        data.append(from_features(alpha - T, variances, observed))
    return Quadratic(*(sum(leaves) / J for leaves in zip(*data, strict=True)))


def maximum(function, *start):
    """Maximum by L-BFGS in unconstrained numbers; triangular factors with the logarithms of their diagonals."""
    flat, unravel = ravel_pytree(start)
    value = jax.jit(jax.value_and_grad(lambda x: -function(*unravel(x))))
    objective = lambda x: tuple(np.asarray(a, float) for a in value(jnp.asarray(x)))  # noqa: E731
    options = {"maxiter": 5000, "maxfun": 20_000, "ftol": 1e-15, "gtol": 1e-9}
    found = scipy.optimize.minimize(objective, np.asarray(flat), jac=True, method="L-BFGS-B", options=options)
    return -found.fun, unravel(jnp.asarray(found.x))


def triangular(R):
    return jnp.tril(R, -1) + jnp.diag(jnp.exp(jnp.diag(R)))


@pytest.mark.long
def test_no_other_weights_and_belief_do_better_at_the_same_moments(layer):
    """The maximum over T, m and the covariance of v, started at mean field."""
    ratio, mu = jnp.array(rng.uniform(0.1, 0.95, size=N)), layer["mu"]
    found = follow(quadratic(layer, mu), layer["alpha"].mean(1), layer["noise"], ratio, weights=layer["w"])
    sigma2 = found.marginal_variance
    value = own_term(layer, found.loc, found.scale_tril, found.weights, mu, sigma2)
    np.testing.assert_allclose(found.bound, value, rtol=1e-12)
    np.testing.assert_allclose(
        found.variance, sigma2 - jnp.square(found.weights @ found.scale_tril).sum(-1), rtol=1e-10
    )

    def family(m, R, C):  # weights such that S stays positive for any C
        white = C / jnp.sqrt(1 + jnp.square(C).sum(-1, keepdims=True)) * jnp.sqrt(sigma2)[:, None]
        L = triangular(R)
        return own_term(layer, m, L, jax.scipy.linalg.solve_triangular(L, white.T, lower=True, trans=1).T, mu, sigma2)

    mean_field = jnp.zeros(M), jnp.zeros((M, M)), jnp.zeros((N, M))
    best, (m, R, _) = maximum(family, *mean_field)
    np.testing.assert_allclose(best, found.bound, rtol=1e-9)
    np.testing.assert_allclose(m, found.loc, atol=1e-5)
    np.testing.assert_allclose(triangular(R), found.scale_tril, atol=1e-4)
    without = (
        quadratic(layer, mu, variance=sigma2).bound() + (layer["w"] * 0.5 * jnp.log(2 * np.pi * np.e * sigma2)).sum()
    )
    assert best > without + 0.1  # mean field with its own optimal q(v)


def joint_term(features, noise, w, m, L, T, mu, C):
    """The own term of P outputs at known inputs, for weights T (N, P, P, M); means mu and covariances C of h."""
    P = len(features)
    A = jnp.einsum("pnm,pq->npqm", features, jnp.eye(P)).reshape(len(w), P, -1)
    T = T.reshape(A.shape)
    Omega = C - (T @ L) @ (T @ L).mT
    # E[(h - A v)^2] = diag(Omega + (T - A) S (T - A)') + (mu - A m)^2, and k - a'a = 4 - a'a
    own = jnp.diagonal(Omega + ((T - A) @ L) @ ((T - A) @ L).mT, axis1=1, axis2=2)
    square = own + jnp.square(mu - A @ m) + 4 - jnp.square(features).sum(-1).T
    density = -0.5 * (square / noise**2 + jnp.log(2 * np.pi * noise**2)).sum(-1)
    return (w * (density + 0.5 * jnp.linalg.slogdet(2 * np.pi * np.e * Omega)[1])).sum() - kl_full(m, L)


@pytest.mark.slow
def test_outputs_together_are_at_the_optimum():
    """The own term is concave in the covariances of v with h and in that of v: its slopes vanish at the optimum."""
    P, rows, size = 2, 3, 2
    features, mu = 0.4 * jnp.array(rng.normal(size=(P, rows, size))), jnp.array(rng.normal(size=(rows, P)))
    noise, w = jnp.array([0.5, 0.8]), jnp.array(rng.uniform(0.5, 1.5, size=rows))
    W = jnp.array(np.tril(rng.normal(size=(rows, P, P))))
    root = jnp.linalg.cholesky(jnp.linalg.inv(jnp.eye(P) + W @ W.mT))

    def of_output(a, mu, s):
        return from_features(a, jnp.full(rows, 4.0), Observations(mu, s, weights=w))

    data = jax.vmap(of_output, (0, 1, 0))(features, mu, noise)
    found = follow_jointly(data, features, noise, root, weights=w)
    at = found.loc.reshape(-1), found.scale_tril, found.weights
    value, slopes = jax.value_and_grad(
        lambda m, L, T: joint_term(features, noise, w, m, L, T, mu, found.marginal_variance), (0, 1, 2)
    )(*at)
    np.testing.assert_allclose(found.bound, value, rtol=1e-12)
    for slope in (slopes[0], jnp.tril(slopes[1]), slopes[2]):
        np.testing.assert_allclose(slope, 0, atol=1e-10)


@pytest.mark.slow
def test_the_limit_of_no_share_is_mean_field(layer):
    ratio, mu = jnp.full(N, 1e-9), layer["mu"]
    found = follow(quadratic(layer, mu), layer["alpha"].mean(1), layer["noise"], ratio, weights=layer["w"])
    mean_field = quadratic(layer, mu, variance=found.marginal_variance)
    entropy = (layer["w"] * 0.5 * jnp.log(2 * np.pi * np.e * found.marginal_variance)).sum()
    np.testing.assert_allclose(found.bound, mean_field.bound() + entropy, rtol=1e-8)
    np.testing.assert_allclose(found.scale_tril, mean_field.optimum()[1], atol=1e-8)


@pytest.mark.long
def test_the_update_of_section_4_3_leaves_out_the_layer_above(layer):
    """At given T, M and S its q(v) is the optimum of the own term, and not of a bound in which another layer sees h."""
    T, shift = jnp.array(rng.normal(size=(N, M))) * 0.3, layer["mu"]
    S, prec = jnp.array(rng.uniform(0.1, 0.5, size=N)), layer["w"] / layer["noise"] ** 2
    first, alpha = layer["alpha"].mean(1), layer["alpha"]
    cross = (prec * T.T) @ first
    second = jnp.einsum("n,njm,njk->mk", prec, alpha, alpha) / J
    inverse = jnp.eye(M) + (prec * T.T) @ T - cross - cross.T + second  # 2 T'<A> symmetrised
    residual = shift[:, None] - layer["mean"]
    b = prec @ (jnp.einsum("nj,njm->nm", residual, alpha) / J - residual.mean(1)[:, None] * T)
    mean, root = jnp.linalg.solve(inverse, b), jnp.linalg.cholesky(jnp.linalg.inv(inverse))

    def term(m, L):
        return own_term(layer, m, L, T, T @ m + shift, S + jnp.square(T @ L).sum(-1))

    np.testing.assert_allclose(quadratic(layer, shift, T, S).optimum()[0], mean, rtol=1e-9)
    slopes = jax.grad(term, (0, 1))(mean, root)
    assert max(abs(jnp.tril(g)).max() if g.ndim == 2 else abs(g).max() for g in slopes) < 1e-10

    def whole(m, R):  # a layer above that prefers h near one and narrow
        L = triangular(R)
        belief_variance = jnp.square(T @ L).sum(-1)
        return term(m, L) - 0.5 * (jnp.square(T @ m + shift - 1) + S + belief_variance).sum()

    start = mean, jnp.tril(root, -1) + jnp.diag(jnp.log(jnp.diag(root)))
    best, (_, R) = maximum(whole, *start)
    assert best > whole(*start) + 0.05
    # Its covariance is that of the own term with the slopes of the layer above in sigma^2, here -1/2, added.
    np.testing.assert_allclose(jnp.linalg.inv(triangular(R) @ triangular(R).T), inverse + T.T @ T, rtol=1e-4, atol=1e-4)


@pytest.mark.long
def test_single_precision(x32):
    A, mu, ratio = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((30, 5), (30,), (30,)))
    ratio = jax.nn.sigmoid(3 * ratio)

    def bound(mu, ratio):
        return follow(from_features(A, jnp.full(30, 6.0), Observations(mu, 0.02)), A, 0.02, ratio).bound

    value, slopes = jax.value_and_grad(bound, (0, 1))(mu, ratio)
    assert value.dtype == jnp.float32
    assert all(np.isfinite(g).all() for g in (value, *slopes))
