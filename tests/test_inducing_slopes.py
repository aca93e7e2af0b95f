"""Inducing values and slopes: against dense joint Gaussians and against pairs of close-by inducing points."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from dense import rbf, svgp, svgp_bound, titsias
from numpyro.infer import SVI
from numpyro.infer.util import log_density
from programs import bound, random_params

import numpyro_dgp as dgp
from numpyro_dgp import guides as G
from numpyro_dgp import kernels as k
from numpyro_dgp.functions.weights import FunctionDraw

rng = np.random.default_rng(0)
V, L, NOISE = 1.2, 0.9, 0.3
X = rng.uniform(-2, 2, (12, 2))
Z, AT = rng.uniform(-2, 2, (4, 2)), rng.uniform(-2, 2, (3, 2))
E = rng.normal(size=(3, 2))
XS, ES = rng.uniform(-2, 2, (5, 2)), rng.normal(size=(5, 2))
Y, DY = np.sin(X[:, 0]) * X[:, 1], rng.normal(size=5)


def close(found, expected, tolerance):
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)


def across(a, b, e):
    """Cov[f(a), e . grad f(b)] of the RBF."""
    return np.einsum("nmd,md->nm", a[:, None] - b, e) / L**2 * rbf(a, b, V, L)


def between(a, ea, b, eb):
    """Cov[ea . grad f(a), eb . grad f(b)] of the RBF."""
    r = (a[:, None] - b) / L
    along = np.einsum("nmd,nd->nm", r, ea) * np.einsum("nmd,md->nm", r, eb)
    return (ea @ eb.T - along) / L**2 * rbf(a, b, V, L)


def block(values_a, a, ea, values_b, b, eb):
    """Covariances of values at ``values_a`` and slopes at a with values at ``values_b`` and slopes at b."""
    top = np.hstack([rbf(values_a, values_b, V, L), across(values_a, b, eb)])
    return np.vstack([top, np.hstack([across(values_b, a, ea).T, between(a, ea, b, eb)])])


INDUCING = block(Z, AT, E, Z, AT, E)
CROSS = block(Z, AT, E, X, XS, ES)
DATA = block(X, XS, ES, X, XS, ES)


def model(X, XS, y=None, dy=None, *, inducing=dgp.functions.PointsAndSlopes(Z, AT, E), kernel=k.RBF(V, L), noise=NOISE):
    f = dgp.gp("f", kernel, inducing)
    with numpyro.plate("values", len(X)):
        numpyro.sample("y", dgp.Likelihood(f(X), lambda v: dist.Normal(v, noise)), obs=y)
    with numpyro.plate("slopes", len(XS)):
        slopes = f.grad(XS, direction=ES[: len(XS)])
        numpyro.sample("dy", dgp.Likelihood(slopes, lambda v: dist.Normal(v, noise)), obs=dy)


def opened(kernel, inducing, value=None, **options):
    data = {} if value is None else {"f": value}
    with numpyro.handlers.seed(rng_seed=0), numpyro.handlers.substitute(data=data):
        return dgp.gp("f", kernel, inducing, **options)


@pytest.mark.long
def test_bound_and_moments_are_those_of_the_dense_gaussian():
    guide = G.InducingPoint(model)
    params = random_params(model, guide, X, XS, Y, DY)
    d = np.sqrt(np.diag(INDUCING))
    factor = d[:, None] * np.linalg.cholesky(INDUCING / np.outer(d, d))
    half = factor @ params["f_auto_scale_tril"]
    m, S = factor @ params["f_auto_loc"], half @ half.T
    expected = svgp_bound(np.concatenate([Y, DY]), NOISE, INDUCING, CROSS, DATA, m, S)
    close(bound(dgp.ELBO(), params, model, guide, X, XS, Y, DY), expected, 1e-5)
    layers = dgp.Posterior(model, guide, params, site="y").layers(jax.random.key(0), X, XS)
    mean, covariance = svgp(INDUCING, CROSS, DATA, m, S)
    f = layers["y"][0]
    close(f(X).mean, mean[:12], 1e-6)
    close(f.joint(X).covariance[0], covariance[:12, :12], 1e-6)
    close(f.grad(XS, direction=ES, joint=True).covariance[0], covariance[12:, 12:], 1e-6)


@pytest.mark.long
def test_collapsed_bound_is_that_of_the_dense_gaussian():
    expected, *_ = titsias(np.concatenate([Y, DY]), NOISE, INDUCING, CROSS, DATA)
    close(bound(dgp.ELBO(), {}, model, G.Collapsed(model), X, XS, Y, DY), expected, 1e-5)


@pytest.mark.long
def test_it_is_the_limit_of_pairs_of_points():
    near = 1e-3 * E / np.linalg.norm(E, axis=1, keepdims=True)
    collapsed = G.Collapsed(model)

    def of(inducing):
        return bound(dgp.ELBO(), {}, model, collapsed, X, XS, Y, DY, inducing=inducing)

    pairs = of(dgp.Points(np.concatenate([Z, AT + near, AT - near])))
    close(of(dgp.functions.PointsAndSlopes(np.concatenate([Z, AT]), AT, E)), pairs, 1e-3)
    assert of(dgp.functions.PointsAndSlopes(Z, AT, E)) > of(dgp.Points(Z)) + 0.1
    assert of(dgp.functions.PointsAndSlopes.with_gradients(Z)) > of(dgp.Points(Z)) + 0.1


@pytest.mark.long
def test_units_do_not_matter():
    """Rescaled columns with rescaled lengthscales, and longer directions."""
    scales = np.array([1e-3, 1e3])
    kernel, other = k.RBF(V, jnp.array([L, L])), k.RBF(V, L * scales)
    u = jnp.array(rng.normal(size=7))
    f, g = (
        opened(kernel, dgp.functions.PointsAndSlopes(Z, AT, E), u),
        opened(other, dgp.functions.PointsAndSlopes(Z * scales, AT * scales, 7 * E * scales), u),
    )
    close(g(X * scales).mean, f(X).mean, 1e-6)
    close(g(X * scales).variance, f(X).variance, 1e-6)


@pytest.mark.long
@pytest.mark.parametrize("kernel", [k.RBF(V, L), k.Matern32(V, L), k.Matern52(V, L) * k.Linear() + k.RBF().on(1)])
def test_single_precision(kernel):
    inducing = [
        dgp.functions.PointsAndSlopes(*(a.astype(dtype) for a in (Z, AT, E))) for dtype in (np.float32, np.float64)
    ]
    u = rng.normal(size=7)
    narrow, wide = (
        opened(kernel, i, jnp.array(u, t)) for i, t in zip(inducing, (jnp.float32, jnp.float64), strict=True)
    )
    x = jnp.asarray(np.concatenate([X, Z, AT]), jnp.float32)
    assert narrow(x).mean.dtype == narrow(x).variance.dtype == jnp.float32
    close(narrow(x).mean, wide(x.astype(float)).mean, 5e-3)
    close(narrow(x).variance, wide(x.astype(float)).variance, 5e-3)
    assert (narrow(x).variance > 0).all()


@pytest.mark.long
@pytest.mark.parametrize("Z", [Z, None])
@pytest.mark.parametrize("kernels", [k.Matern52(V, L), [k.RBF(), k.Matern32()]])
def test_draws_of_functions_have_the_inducing_slopes(kernels, Z):
    """A draw of the whole function passes through the values and the slopes at its site."""
    several = isinstance(kernels, list)
    f = opened(kernels, dgp.functions.PointsAndSlopes(Z, AT, E), outputs=2 if several else None)
    whole = dataclasses.replace(f, v=FunctionDraw(f.v.loc, jax.random.key(1), 50))
    close(whole.grad(AT, direction=E).mean, f.grad(AT, direction=E).mean, 1e-4)
    if Z is not None:
        close(whole(Z).mean, f(Z).mean, 1e-4)
    assert f.grad(AT, direction=E).variance.max() < 1e-5


@pytest.mark.long
def test_integral_of_a_chain_is_that_of_the_dense_gaussian():
    def hyper(*args):
        model(*args, noise=numpyro.sample("noise", dist.LogNormal(0.0, 1.0)))

    expected, _, _ = titsias(np.concatenate([Y, DY]), NOISE, INDUCING, CROSS, DATA)
    program = dgp.for_mcmc(hyper, collapse=True)
    density, _ = log_density(program, (X, XS, Y, DY), {}, {"noise": jnp.array(NOISE)})
    close(density, expected + dist.LogNormal(0.0, 1.0).log_prob(NOISE), 1e-4)


@pytest.mark.long
def test_natural_gradients_reach_the_optimum():
    guide = G.InducingPoint(model)
    svi = SVI(model, guide, dgp.optim.NaturalGradient(guide, 1.0, optax.sgd(0.0)), dgp.ELBO())
    result = svi.run(jax.random.key(0), 5, X, XS, Y, DY, progress_bar=False)
    expected, _, _ = titsias(np.concatenate([Y, DY]), NOISE, INDUCING, CROSS, DATA)
    close(-result.losses[-1], expected, 1e-3)


def deep(X, y=None):
    with_gradients = dgp.functions.PointsAndSlopes.with_gradients(Z)
    f = dgp.gp("f", k.RBF(0.3, 0.9), with_gradients, outputs=2, mean=dgp.means.IdentityMean())
    g = dgp.gp("g", k.RBF(V, L), dgp.functions.PointsAndSlopes(Z, AT, E, learn=True))
    with numpyro.plate("data", len(X)):
        h = numpyro.sample("h", f(X, noise=0.05))
        numpyro.sample("y", dgp.Likelihood(g(h), lambda v: dist.Normal(v, NOISE)), obs=y)


def latent(X, y=None):
    g = dgp.gp("g", k.RBF(V, L), dgp.functions.PointsAndSlopes(Z, AT, E))
    with numpyro.plate("data", len(X)):
        x = dgp.latent("w", X[:, :1], 1)
        numpyro.sample("y", dgp.Likelihood(g(x), lambda v: dist.Normal(v, NOISE)), obs=y)


def shallow(X, y=None):
    f = dgp.gp("f", k.RBF(V, L), dgp.functions.PointsAndSlopes(Z, AT, E), outputs=2)
    with numpyro.plate("data", len(X)):
        conditional = lambda v: dist.Normal(v, NOISE).to_event(1)  # noqa: E731
        numpyro.sample("y", dgp.Likelihood(f(X), conditional), obs=None if y is None else y[:, None] * jnp.ones(2))


GUIDES = {
    "InducingPoint": (deep, G.InducingPoint(deep)),
    "Diagonal": (shallow, G.InducingPoint(shallow, inducing=G.Diagonal())),
    "LowRank": (shallow, G.InducingPoint(shallow, inducing=G.LowRank(2))),
    "Flow": (shallow, G.InducingPoint(shallow, inducing=G.Flow())),
    "MixtureOfGaussians": (shallow, G.InducingPoint(shallow, inducing=G.MixtureOfGaussians(2))),
    "MeanField": (deep, G.MeanField(deep)),
    "GivenInducing": (deep, G.MeanField(deep, hidden=G.GivenInducing())),
    "GivenBelow": (deep, G.MeanField(deep, hidden=G.GivenBelow())),
    "JointOutputs": (deep, G.MeanField(deep, hidden=G.JointOutputs())),
    "MarkovInducing": (deep, G.InducingPoint(deep, sites={"g": G.MarkovInducing()})),
    "GlobalInducing": (deep, G.InducingPoint(deep, inducing=G.GlobalInducing(5))),
    "ImportanceWeighted": (latent, G.ImportanceWeighted(latent, num_samples=4)),
}


@pytest.mark.long
@pytest.mark.parametrize("name", GUIDES)
def test_guides(name):
    program, guide = GUIDES[name]
    dgp.testing.check_guide(program, guide, X, Y, num=10)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (
            lambda: dgp.functions.PointsAndSlopes(Z[:, :1], AT, E),
            r"same columns, got shapes \{'Z': \(4, 1\), 'at': \(3, 2\)",
        ),
        (lambda: dgp.functions.PointsAndSlopes(Z, AT[0]), r"'at': \(2,\)\}: for one column"),
        (lambda: dgp.functions.PointsAndSlopes(Z, AT[:0], E[:0]), r"dgp\.Points\(Z\) for values alone"),
        (
            lambda: dgp.functions.PointsAndSlopes(Z, AT),
            r"\(3, 2\), one for each slope.* got None: all slopes.*with_gradients",
        ),
        (lambda: dgp.functions.PointsAndSlopes(Z, AT, E[:2]), r"directions of shape \(3, 2\).* got \(2, 2\)"),
        (lambda: dgp.functions.PointsAndSlopes(Z, AT, 0 * E), "nonzero directions"),
        (lambda: dgp.functions.PointsAndSlopes(Z, AT * np.nan, E), "expected finite at"),
        (lambda: dgp.functions.PointsAndSlopes(Z, AT, E, learn=1), "learn to be True or False, got 1"),
        (
            lambda: dgp.functions.PointsAndSlopes.with_gradients(Z[0]),
            r"with_gradients: expected inputs Z of shape \(M, D\)",
        ),
        (
            lambda: opened(k.Matern12(), dgp.functions.PointsAndSlopes(Z, AT, E)),
            r"got Matern12.* have none: Matern32.*Points\(Z",
        ),
        (lambda: grouped(), r"outside of plates, got plate 'groups'.* dgp\.Points\(Z\)"),
        (lambda: two().grad(X, 0, direction=E[0]), "a column or direction, got column 0 and a direction"),
        (lambda: two().grad(X, direction=E), r"direction of shape \(2,\), or \(12, 2\).* got \(3, 2\): the gradient"),
        (lambda: two().grad(X, direction=np.array([np.nan, 1.0])), r"expected finite direction of f\.grad"),
        (lambda: two(k.Matern12().on(0) + k.RBF()).grad(X, direction=E[0]), r"1 derivative\(s\), got Matern12"),
        (
            lambda: two(k.Matern32()).grad(X, direction=E[0]).function.grad(np.hstack([X, X]), 0),
            "2 derivative.*Matern32",
        ),
    ],
)
def test_wrong_calls(call, match):
    with pytest.raises(ValueError, match=match):
        call()


def two(kernel=k.RBF()):
    return opened(kernel, dgp.Points(Z))


def grouped():
    with numpyro.handlers.seed(rng_seed=0), numpyro.plate("groups", 3):
        dgp.gp("f", k.RBF(), dgp.functions.PointsAndSlopes(Z, AT, E))


@pytest.mark.long
def test_gaussian_inputs_and_updates_are_refused_by_name():
    with pytest.raises(ValueError, match="Collapsed: expected known inputs of layer 'g', a SlopedFunction, got Gau"):
        bound(dgp.ELBO(), {}, latent, G.Collapsed(latent), X, Y)
    guide = G.InducingPoint(model)
    params = random_params(model, guide, X, XS, Y, DY)
    with pytest.raises(ValueError, match=r"SlopedFunction cannot tell the whitened values .* dgp\.Points\(Z\)"):
        dgp.update(dgp.Posterior(model, guide, params, site="y"), jax.random.key(0), X, XS, Y, DY)


@pytest.mark.long
@pytest.mark.parametrize("name", ["RBF", "Matern32", "Matern52", "sum"])
def test_slopes_along_a_direction(name):
    """The combination of slopes along columns, means, variances and further slopes."""
    kernel = {"sum": 0.5 * k.RBF() * k.Linear() + k.Matern32()}.get(name) or getattr(k, name)(V, L)
    f = opened(kernel, dgp.Points(Z))
    step = 1e-5 * ES
    slopes = f.grad(XS, direction=ES)
    close(slopes.mean, (f(XS + step).mean - f(XS - step).mean) / 2e-5, 1e-6)
    both = f.joint(np.concatenate([XS + step, XS - step])).covariance[0]
    expected = both[:5, :5] - both[:5, 5:] - both[5:, :5] + both[5:, 5:]
    close(f.grad(XS, direction=ES, joint=True).covariance[0], expected / 4e-10, 2e-3)
    along = np.array([0.0, 1.0])
    close(f.grad(XS, direction=along).variance, f.grad(XS, 1).variance, 1e-8)
