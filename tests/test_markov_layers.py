"""Markov dynamics across layers in closed form: one covariance for all outputs, thin couplings, three layers."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.infer import SVI, Trace_ELBO
from programs import X, Y, Z, agree, bound, draws_of_bound, random_params

import numpyro_dgp as dgp
from numpyro_dgp import guides as G
from numpyro_dgp import kernels as k
from numpyro_dgp.bounds import (
    HiddenLayer,
    InnerMarkovLayer,
    JointCovariance,
    LowRankCovariance,
    LowRankTransition,
    MarkovLayer,
    markov_bound,
)
from numpyro_dgp.functions.weights import InducingPrior
from numpyro_dgp.guides.rules.joint_inducing import JointInducing

N, M, P = 4, 3, 2
POINTS = jnp.linspace(-1, 1, M)[:, None]
rng = np.random.default_rng(4)


def normal(*shape, scale=0.4):
    return jnp.asarray(scale * rng.normal(size=shape))


def roots(*batch, size):
    return jnp.tril(normal(*batch, size, size)) + 0.5 * jnp.eye(size)


def layers(outputs=1, between=1, W=lambda P: roots(P, size=M)):
    """The first layer, ``between`` inner ones and the last."""
    hidden = HiddenLayer(
        k.RBF(0.5, 0.9), POINTS, normal(P, M), roots(P, size=M), normal(N, P, M), normal(N, P),
        jnp.exp(normal(N, P)), 0.4, normal(N, P),
    )  # fmt: skip

    def values(kernel, outputs, noise):
        return MarkovLayer(
            kernel, normal(M, P, scale=1.0), normal(outputs, M, P, M), normal(outputs, M), W(outputs), noise
        )

    inner = [
        InnerMarkovLayer(
            values(k.RBF(0.7, 1.2), P, 0.5), normal(N, P, M), normal(N, P), jnp.exp(normal(N, P)), normal(P, P)
        )
        for _ in range(between)
    ]
    return hidden, values(k.RBF(1.1, 0.9), outputs, 0.3), inner


def dense_covariance(W, P):
    """W (P M, P M) written out."""
    if isinstance(W, JointCovariance):
        return W.scale_tril @ W.scale_tril.T
    if isinstance(W, LowRankCovariance):
        D, F = jnp.diag(W.scale.reshape(-1)), W.factor.reshape(P * M, -1)
        return D @ (jnp.eye(P * M) + F @ F.T) @ D
    return jax.scipy.linalg.block_diag(*(W @ W.mT))


def dense_transition(U):
    return jnp.einsum("pmj,jqr->pmqr", U.left, U.right) if isinstance(U, LowRankTransition) else U


def sampled(hidden, last, inner, y, num=100_000):
    """Draws of the bound: all inducing and hidden values drawn, and log densities of the program written out."""

    def features(layer, h):
        L = jnp.linalg.cholesky(layer.kernel.gram(layer.Z))
        a = jnp.linalg.solve(L, layer.kernel(layer.Z, h)).T
        return a, layer.kernel.diag(h) - (a**2).sum(1)

    def gaussian(value, mean, C):
        return dist.MultivariateNormal(mean, C).log_prob(value)

    x = normal(N, 1, scale=1.0)

    def draw(key):
        key, a, b = jax.random.split(key, 3)
        v = hidden.loc + jnp.einsum("pij,pj->pi", hidden.scale_tril, jax.random.normal(a, (P, M)))
        total = dist.Normal().log_prob(v).sum()
        total -= gaussian(v.reshape(-1), hidden.loc.reshape(-1), dense_covariance(hidden.scale_tril, P))
        mean = hidden.shift + jnp.einsum("npm,pm->np", hidden.weights, v)
        h = mean + hidden.scale * jax.random.normal(b, mean.shape)
        A, open_ = features(hidden, x)
        prior = dist.Normal(hidden.mean + A @ v.T, jnp.sqrt(open_ + hidden.noise**2)[:, None])
        total += (prior.log_prob(h) - dist.Normal(mean, hidden.scale).log_prob(h)).sum()
        for layer in (*inner, last):
            key, a, b = jax.random.split(key, 3)
            own = layer.values if layer is not last else last
            Q = len(own.loc)
            C = dense_covariance(own.scale_tril, Q)
            loc = own.loc + jnp.einsum("pmqr,qr->pm", dense_transition(own.transition), v)
            v = (loc.reshape(-1) + jnp.linalg.cholesky(C) @ jax.random.normal(a, (Q * M,))).reshape(Q, M)
            total += dist.Normal().log_prob(v).sum() - gaussian(v.reshape(-1), loc.reshape(-1), C)
            A, open_ = features(own, h)
            f = A @ v.T
            if layer is last:
                t = y
            else:
                f = f + h @ layer.slope
                mean = layer.shift + jnp.einsum("npm,pm->np", layer.weights, v)
                t = mean + layer.scale * jax.random.normal(b, mean.shape)
                total -= dist.Normal(mean, layer.scale).log_prob(t).sum()
            total += dist.Normal(f, own.noise).log_prob(t).sum() - 0.5 * Q * open_.sum() / own.noise**2
            h = t
        return total

    return x, jax.lax.map(jax.jit(draw), jax.random.split(jax.random.key(0), num), batch_size=2000)


CASES = {
    "three layers": dict(outputs=1, between=1),
    "four layers, two outputs": dict(outputs=2, between=2),
    "one W for all outputs": dict(outputs=2, W=lambda P: JointCovariance(roots(size=P * M))),
    "diagonal and low rank": dict(
        outputs=2, W=lambda P: LowRankCovariance(0.5 + jnp.abs(normal(P, M)), normal(P, M, 2))
    ),
}


@pytest.mark.parametrize("name", list(CASES))
@pytest.mark.long
def test_against_draws_of_everything(name):
    hidden, last, inner = layers(**CASES[name])
    y = normal(N, len(last.loc), scale=1.0)
    x, draws = sampled(hidden, last, inner, y)
    value = jax.jit(markov_bound)(hidden, last, x, y, between=inner)
    assert abs(draws.mean() - value) < 4 * draws.std() / np.sqrt(len(draws))
    assert draws.std() / np.sqrt(len(draws)) < 0.05 * abs(value)


@pytest.mark.long
def test_thin_couplings_are_the_dense_ones():
    """At full rank every U is a product of two thin matrices, and every W a diagonal and a matrix of low rank."""
    hidden, last, _ = layers(outputs=2, between=0)
    x, y, n = normal(N, 1), normal(N, 2), 2 * M
    U = last.transition.reshape(n, P, M)
    thin = LowRankTransition(jnp.eye(n).reshape(2, M, n), U)
    R = jnp.eye(n) + 0.3 * normal(n, n) @ normal(n, n).T
    scale = 0.6 * jnp.ones((2, M))
    low_rank = LowRankCovariance(scale, R.reshape(2, M, n))
    joint = JointCovariance(jnp.linalg.cholesky(dense_covariance(low_rank, 2)))
    per_output = JointCovariance(jax.scipy.linalg.block_diag(*last.scale_tril))
    of = jax.jit(lambda **parts: markov_bound(hidden, dataclasses.replace(last, **parts), x, y))
    np.testing.assert_allclose(of(transition=thin), of(), rtol=1e-10)
    np.testing.assert_allclose(of(scale_tril=per_output), of(), rtol=1e-10)
    np.testing.assert_allclose(of(scale_tril=low_rank), of(scale_tril=joint), rtol=1e-10)
    assert thin.shape == last.transition.shape


@pytest.mark.long
def test_inner_layers_without_mean_function_have_slope_zero():
    hidden, last, inner = layers()
    x, y = normal(N, 1), normal(N, 1)
    without, zero = ([dataclasses.replace(inner[0], slope=slope)] for slope in (None, jnp.zeros((P, P))))
    np.testing.assert_array_equal(*(markov_bound(hidden, last, x, y, between=each) for each in (without, zero)))


@pytest.mark.long
def test_single_precision():
    wide = (*layers(2, 1, lambda P: JointCovariance(roots(size=P * M))), normal(N, 1), normal(N, 2))
    narrow = jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), wide)
    of = jax.jit(lambda hidden, last, inner, x, y: markov_bound(hidden, last, x, y, between=inner))
    assert of(*narrow).dtype == jnp.float32
    np.testing.assert_allclose(of(*narrow), of(*wide), rtol=1e-4)


def test_bad_inner_layers():
    hidden, last, inner = layers()
    x, y = normal(N, 1), normal(N, 1)
    wrong = dataclasses.replace(inner[0], weights=normal(N, M, P))
    with pytest.raises(ValueError, match=r"expected between\[0\].weights of shape \(4, 2, 3\), got \(4, 3, 2\)"):
        markov_bound(hidden, last, x, y, between=[wrong])
    wrong = dataclasses.replace(last, scale_tril=JointCovariance(jnp.eye(4)))
    with pytest.raises(ValueError, match=r"expected last.scale_tril of shape \(3, 3\), got \(4, 4\)"):
        markov_bound(hidden, wrong, x, y, between=inner)
    wrong = dataclasses.replace(last, transition=LowRankTransition(normal(1, M, 2), normal(2, P, 5)))
    with pytest.raises(ValueError, match=r"expected last.transition of shape \(1, 3, 2, 3\), got \(1, 3, 2, 5\)"):
        markov_bound(hidden, wrong, x, y, between=inner)


def three(X, y=None):
    f = dgp.gp("f", k.RBF(0.5, 0.9), dgp.Points(Z), outputs=2, mean=dgp.means.LinearMean(jnp.ones((1, 2), X.dtype)))
    e = dgp.gp("e", k.RBF(0.5, 1.2), dgp.Points(jnp.hstack([Z, Z**2 - 1])), outputs=2)
    g = dgp.gp("g", k.RBF(1.1, 0.9), dgp.Points(jnp.hstack([Z, jnp.cos(3 * Z)])))
    with numpyro.plate("data", len(X)):
        h = numpyro.sample("h", f(X, noise=0.2))
        m = numpyro.sample("m", e(h, noise=0.2))
        numpyro.sample("y", dgp.Likelihood(g(m), lambda v: dist.Normal(v, 0.3)), obs=y)


@pytest.mark.slow
def test_one_gaussian_over_all_outputs():
    """Density, divergence and draws against NumPyro's own multivariate normal."""
    loc, R = normal(P, M), jnp.tril(normal(P * M, P * M), -1) + 0.5 * jnp.eye(P * M)
    q, prior = JointInducing(loc, R), InducingPrior((P, M), loc.dtype)
    dense = dist.MultivariateNormal(loc.reshape(-1), scale_tril=R)
    v, (white,) = q.sample_with_intermediates(jax.random.key(0), (5,))
    np.testing.assert_allclose(q.log_prob(v), dense.log_prob(v.reshape(5, -1)), rtol=1e-10)
    np.testing.assert_allclose(q.log_prob(v, [white]), q.log_prob(v), rtol=1e-10)
    np.testing.assert_allclose(q.white(v), white, rtol=1e-8)
    np.testing.assert_allclose(q.variance.reshape(-1), dense.variance, rtol=1e-10)
    standard = dist.MultivariateNormal(jnp.zeros(P * M), jnp.eye(P * M))
    np.testing.assert_allclose(dist.kl_divergence(q, prior), dist.kl_divergence(dense, standard), rtol=1e-10)


RULES = {
    "alone": {"e": G.FullJoint()},
    "given the layer below": {"e": G.MarkovInducing("f", conditional=G.FullJoint()), "g": G.MarkovInducing("e", 2)},
    "low rank": {"e": G.MarkovInducing("f", conditional=G.LowRank(2))},
}


@pytest.mark.parametrize("name", list(RULES))
@pytest.mark.long
def test_same_bound_as_with_everything_drawn(name):
    guide = G.InducingPoint(three, sites=RULES[name] | {"h": G.GivenInducing("free"), "m": G.GivenInducing("free")})
    params = random_params(three, guide, X, Y, scale=0.2)
    for each in params:
        if each.endswith(("_weights", "_shift", "_transition")):
            params[each] = params[each] + 0.1 * jax.random.normal(jax.random.key(len(each)), params[each].shape)
    ours = draws_of_bound(dgp.ELBO(), params, three, guide, X, Y)
    assert agree(ours, draws_of_bound(Trace_ELBO(), params, three, guide, X, Y, num=6000))


@pytest.mark.long
def test_block_diagonal_roots_are_those_of_single_outputs():
    """Drawn or integrated, a joint Gaussian without correlations between outputs is ``Full()``."""
    single, joint = (G.InducingPoint(three, sites={"e": rule}) for rule in (G.Full(), G.FullJoint()))
    params = random_params(three, single, X, Y, scale=0.2)
    wide = params | {"e_auto_scale_tril": jax.scipy.linalg.block_diag(*params["e_auto_scale_tril"])}
    np.testing.assert_allclose(
        bound(Trace_ELBO(), wide, three, joint, X, Y), bound(Trace_ELBO(), params, three, single, X, Y), rtol=1e-10
    )


@pytest.mark.long
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_fit_and_predict(dtype):
    sites = {"e": G.MarkovInducing("f", conditional=G.FullJoint())}
    guide, x, y = G.InducingPoint(three, sites=sites), X.astype(dtype), Y.astype(dtype)
    result = SVI(three, guide, optax.adam(0.01), dgp.ELBO(2)).run(jax.random.key(0), 200, x, y, progress_bar=False)
    assert result.losses[-20:].mean() < result.losses[:20].mean()
    assert result.params["e_auto_scale_tril"].shape == (16, 16)
    posterior = dgp.Posterior(three, guide, result.params)
    assert np.isfinite(posterior.using(num_samples=5).predict(jax.random.key(1), x[:4]).mean).all()
    assert posterior.using(num_samples=5).sample(jax.random.key(1), x[:4]).shape == (5, 4)
    assert posterior.using(num_samples=3).functions(jax.random.key(2))(x[:4])["y"].shape == (3, 4)


@pytest.mark.slow
def test_bad_rules():
    with pytest.raises(ValueError, match="FullJoint: expected scale to be positive, got -1"):
        G.FullJoint(-1.0)
    guide = G.InducingPoint(three, sites={"h": G.FullJoint()})
    svi = SVI(three, guide, optax.sgd(0.0), dgp.ELBO())
    with pytest.raises(ValueError, match="rule FullJoint: expected site 'h' to be inducing values"):
        svi.init(jax.random.key(0), X, Y)
