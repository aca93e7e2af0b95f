"""Slopes of random functions: against finite differences and dense joint Gaussians of values and slopes."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from dense import rbf, svgp, svgp_bound, titsias
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.util import log_density
from programs import agree, bound, draws_of_bound, random_params
from sizes import mostly_long
from toys.averages import Averages

import numpyro_dgp as dgp
from numpyro_dgp import kernels as k
from numpyro_dgp.functions.weights import FullBelief

rng = np.random.default_rng(0)
X = jnp.array(np.sort(rng.uniform(-2, 2, size=(9, 1)), 0))
XS = jnp.array([[-1.5], [0.1], [0.1], [1.2]])
Y = jnp.sin(2 * X[:, 0])
DY = 2 * jnp.cos(2 * XS[:, 0])
Z = jnp.linspace(-2, 2, 6)[:, None]
V, L, NOISE, H = 1.2, 0.7, 0.3, 1e-5

KERNELS = {
    "RBF": k.RBF(1.3, 0.8),
    "Matern32": k.Matern32(1.3, 0.8),
    "Matern52": k.Matern52(1.3, 0.8),
    "RationalQuadratic": k.RationalQuadratic(1.3, 0.8, 0.6),
    "Periodic": k.Periodic(1.3, 0.8, period=2.0),
    "Cosine": k.Cosine(1.3, 3.0),
    "Linear": k.Linear(0.7),
    "Polynomial": k.Polynomial(0.7, 1.1, 3),
    "ArcCosine1": k.ArcCosine(1.1, order=1),
    "ArcCosine2": k.ArcCosine(1.1, order=2),
    "composed": 0.5 * k.RBF() * k.Linear() + k.Matern32().on(1) + k.Matern12().on(0),
}


def close(found, expected, tolerance):
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)


def opened(kernel, inducing, value=None, **options):
    data = {} if value is None else {"f": value}
    with numpyro.handlers.seed(rng_seed=0), numpyro.handlers.substitute(data=data):
        return dgp.gp("f", kernel, inducing, **options)


def model(X, XS, y=None, dy=None, *, inducing=dgp.Points(Z), kernel=k.RBF(V, L), noise=NOISE):
    f = dgp.gp("f", kernel, inducing, mean=lambda x: 0.5 * x)
    with numpyro.plate("values", len(X)):
        numpyro.sample("y", dgp.Likelihood(f(X), lambda v: dist.Normal(v, noise)), obs=y)
    with numpyro.plate("slopes", len(XS)):
        numpyro.sample("dy", dgp.Likelihood(f.grad(XS), lambda v: dist.Normal(v, noise)), obs=dy)


def dense(X, XS):
    """Covariances of inducing values, and of values at X and slopes at XS, with each other; residuals from the mean."""

    def across(a, b):  # Cov[f(a), f'(b)]
        return (a - b.T) / L**2 * rbf(a, b, V, L)

    def slopes(a, b):
        return (1 - (a - b.T) ** 2 / L**2) / L**2 * rbf(a, b, V, L)

    X, XS, at = np.array(X), np.array(XS), np.array(Z)
    K = np.block([[rbf(X, X, V, L), across(X, XS)], [across(X, XS).T, slopes(XS, XS)]])
    return rbf(at, at, V, L), np.hstack([rbf(at, X, V, L), across(at, XS)]), K


RESIDUAL = np.concatenate([Y - 0.5 * X[:, 0], DY - 0.5])


@pytest.mark.long
@pytest.mark.parametrize("width", mostly_long([5], [2, 5]))  # distances by columns, and by a product
@pytest.mark.parametrize("name", mostly_long(["Matern32"], KERNELS))
def test_covariances_of_slopes_are_those_of_differences(name, width):
    x, column = jnp.array(rng.normal(size=(4, width))), 1
    f = opened(KERNELS[name], dgp.Points(x[:2] + 0.3))
    step = H * jnp.eye(width)[column]
    up, down = x + step, x - step
    values = f.covariance
    expected = values(up, up) - values(up, down) - values(down, up) + values(down, down)
    slopes = f.grad(x, column, joint=True)
    df = slopes.function
    covariance = df.covariance(x)
    close(covariance, expected / (4 * H**2), 1e-3)
    close(df.covariance(x, x), covariance, 1e-6)
    close(df.prior_variance(x), jnp.diagonal(covariance[0]), 1e-9)
    close(df.features(x), (f.features(up) - f.features(down)) / (2 * H), 1e-6)
    close(slopes.mean, (f(up).mean - f(down).mean) / (2 * H), 1e-6)
    close(f.grad(x, column).variance, slopes.variance, 1e-6)


@pytest.mark.long
@pytest.mark.parametrize("kernel", [k.RBF(V, L), k.Matern32(V, L)])
def test_single_precision(kernel):
    wide, Z32 = opened(kernel, dgp.Points(Z)), Z.astype(jnp.float32)
    f = opened(kernel, dgp.Points(Z32), wide.v.loc.astype(jnp.float32))
    x = jnp.concatenate([X, X + 1e-4, Z])
    narrow = f.grad(x.astype(jnp.float32))
    assert narrow.loc.dtype == narrow.variance.dtype == jnp.float32
    close(narrow.mean, wide.grad(x).mean, 2e-3)
    close(narrow.variance, wide.grad(x).variance, 2e-3)
    assert (narrow.variance > 0).all()


@pytest.mark.long
def test_further_slopes():
    f = opened(k.RBF(V, [L, 2 * L]), dgp.Points(jnp.array(rng.normal(size=(5, 2)))), outputs=2)
    x, step = jnp.array(rng.normal(size=(4, 2))), 1e-4 * jnp.array([0.0, 1.0])
    twice = f.grad(x, 0).function.grad(x, 1)
    expected = (f.grad(x + step, 0).mean - f.grad(x - step, 0).mean) / 2e-4
    close(twice.mean, expected, 1e-6)
    close(twice.function.prior_variance(x), V / (L * 2 * L) ** 2, 1e-6)


@pytest.mark.long
@pytest.mark.parametrize(
    ("inducing", "kernels"),
    [
        (dgp.Grid(-4.0, 4.0, 24), k.RBF(V, L)),
        (Averages(-3.0, 3.0, 6), k.RBF(V, L)),
        (dgp.Points(Z), [k.RBF(), k.Matern32()]),
    ],
)
def test_every_representation(inducing, kernels):
    several = isinstance(kernels, list)
    f = opened(kernels, inducing, outputs=2 if several else None)
    slopes, difference = f.grad(X, noise=0.1), (f(X + H).mean - f(X - H).mean) / (2 * H)
    assert slopes.batch_shape + slopes.event_shape == f(X).mean.shape
    close(slopes.mean, difference, 1e-6)
    both = f.joint(jnp.concatenate([X + H, X - H])).covariance
    N = len(X)
    expected = jnp.diagonal(both[:, :N, :N] - both[:, N:, :N] - both[:, :N, N:] + both[:, N:, N:], axis1=-2, axis2=-1)
    variance = slopes.variance.T if several else slopes.variance[None]
    close(variance, expected / (4 * H**2) + 0.01, 1e-3)


def belief():
    """A guide with parameters, and the unwhitened q(u) of the dense Gaussian."""
    guide = dgp.guides.InducingPoint(model)
    params = random_params(model, guide, X, XS, Y, DY)
    factor = np.linalg.cholesky(dense(X, XS)[0])
    half = factor @ params["f_auto_scale_tril"]
    return guide, params, factor @ params["f_auto_loc"], half @ half.T


@pytest.mark.long
def test_bound_is_that_of_the_dense_gaussian():
    guide, params, m, S = belief()
    expected = svgp_bound(RESIDUAL, NOISE, *dense(X, XS), m, S)
    close(bound(dgp.ELBO(), params, model, guide, X, XS, Y, DY), expected, 1e-5)


@pytest.mark.long
def test_predictions_are_those_of_the_dense_gaussian():
    guide, params, m, S = belief()
    mean, covariance = svgp(*dense(X, XS), m, S)
    posterior = dgp.Posterior(model, guide, params, site="dy")
    found = posterior.using(num_samples=1).predict(jax.random.key(0), X, XS)
    close(found.mean, mean[len(X) :] + 0.5, 1e-6)
    close(found.variance, np.diag(covariance)[len(X) :] + NOISE**2, 1e-6)
    layers = posterior.layers(jax.random.key(0), X, XS)
    f, slopes = layers["y"][0], layers["dy"][0]
    close(slopes.function(XS).variance, f(XS).variance, 1e-12)
    close(f.grad(XS, joint=True).covariance[0], covariance[len(X) :, len(X) :], 1e-6)


@pytest.mark.long
def test_rows_of_slopes_are_predicted_apart():
    def program(X, dy=None):
        f = dgp.gp("f", k.RBF(V, L), dgp.Points(Z))
        with numpyro.plate("data", len(X)):
            numpyro.sample("dy", dgp.Likelihood(f.grad(X), lambda v: dist.Normal(v, NOISE)), obs=dy)

    posterior = dgp.Posterior(program, dgp.guides.Collapsed(program).on(XS, DY), {})
    parts = posterior.using(batch_size=4, num_samples=1, progress_bar=False).predict(jax.random.key(0), X)
    whole = posterior.using(num_samples=1).predict(jax.random.key(0), X)
    close(parts.mean, whole.mean, 1e-6)
    close(parts.variance, whole.variance, 1e-6)


@pytest.mark.long
def test_optimum_in_closed_form_is_that_of_the_dense_gaussian():
    expected, m, S = titsias(RESIDUAL, NOISE, *dense(X, XS))
    guide = dgp.guides.Collapsed(model)
    close(bound(dgp.ELBO(), {}, model, guide, X, XS, Y, DY), expected, 1e-5)
    mean, _ = svgp(*dense(X, XS), m, S)
    posterior = dgp.Posterior(model, guide.on(X, XS, Y, DY), {}, site="dy")
    close(posterior.using(num_samples=1).predict(jax.random.key(0), X, XS).mean, mean[len(X) :] + 0.5, 1e-5)


@pytest.mark.long
def test_integral_of_a_chain_is_that_of_the_dense_gaussian():
    def hyper(*args):
        model(*args, noise=numpyro.sample("noise", dist.LogNormal(0.0, 1.0)))

    expected, _, _ = titsias(RESIDUAL, NOISE, *dense(X, XS))
    program = dgp.for_mcmc(hyper, collapse=True)
    density, sites = log_density(program, (X, XS, Y, DY), {}, {"noise": jnp.array(NOISE)})
    prior = dist.LogNormal(0.0, 1.0).log_prob(NOISE)
    close(density, expected + prior, 1e-4)
    assert sites["f"]["type"] == "deterministic"


@pytest.mark.long
def test_functions_can_be_differentiated():
    """Draws of values under ``jvp``, ``jacfwd`` and ``jacrev`` have the slopes that draws of slopes have."""
    guide = dgp.guides.InducingPoint(model)
    params = random_params(model, guide, X, XS, Y, DY)
    draws = {}
    for site in ("y", "dy"):
        posterior = dgp.Posterior(model, guide, params, site=site)
        draws[site] = posterior.using(num_samples=2).functions(jax.random.key(1), num_features=50)
    values = lambda x: draws["y"](x, XS)["y"]  # noqa: E731
    x = X[:5]
    slopes = jax.jvp(values, (x,), (jnp.ones_like(x),))[1]
    close(slopes, (values(x + H) - values(x - H)) / (2 * H), 1e-5)
    close(slopes, draws["dy"](X, x)["dy"], 1e-8)
    for jacobian in (jax.jacfwd, jax.jacrev):
        full = jacobian(values)(x)[..., 0]
        close(jnp.diagonal(full, axis1=1, axis2=2), slopes, 1e-8)
        assert jnp.abs(full).sum() == pytest.approx(jnp.abs(slopes).sum())  # rows depend on their own inputs only


def deep(X, y=None, dy=None):
    f = dgp.gp("f", k.RBF(0.3, 0.9), dgp.Points(Z), outputs=1, mean=dgp.means.IdentityMean())
    g = dgp.gp("g", k.RBF(V, L), dgp.Points(Z))
    with numpyro.plate("data", len(X)):
        h = numpyro.sample("h", f(X, noise=0.05))
        numpyro.sample("y", dgp.Likelihood(g(h), lambda v: dist.Normal(v, NOISE)), obs=y)
        numpyro.sample("dy", dgp.Likelihood(g.grad(h), lambda v: dist.StudentT(4.0, v, NOISE)), obs=dy)


@pytest.mark.long
def test_deep_bound_is_that_of_numpyro():
    guide = dgp.guides.InducingPoint(deep)
    params = random_params(deep, guide, X, Y, 0 * Y, scale=0.1)
    ours, theirs = (draws_of_bound(o, params, deep, guide, X, Y, 0 * Y) for o in (dgp.ELBO(), Trace_ELBO()))
    assert agree(ours, theirs)
    assert ours.std() < theirs.std()


@pytest.mark.long
@pytest.mark.parametrize(
    "guide",
    [
        dgp.guides.MeanField(deep, hidden=dgp.guides.GivenInducing()),
        dgp.guides.InducingPoint(deep, inducing=dgp.guides.GlobalInducing(5)),
    ],
)
def test_guides(guide):
    dgp.testing.check_guide(deep, guide, X, Y, num=50, dy=0 * Y)


@pytest.mark.long
def test_a_hidden_layer_of_slopes():
    """Slopes that a layer above sees, under importance weights of a latent too."""

    def program(X, y=None):
        f = dgp.gp("f", k.RBF(V, L), dgp.Points(jnp.hstack([Z, 0 * Z])))
        g = dgp.gp("g", k.RBF(V, L), dgp.Points(Z))
        with numpyro.plate("data", len(X)):
            s = numpyro.sample("s", f.grad(dgp.latent("w", X, 1), 0))
            numpyro.sample("y", dgp.Likelihood(g(s[..., None]), lambda v: dist.Normal(v, NOISE)), obs=y)

    guide = dgp.guides.ImportanceWeighted(program, num_samples=4)
    dgp.testing.check_guide(program, guide, X, Y, num=50)


@pytest.mark.long
def test_natural_gradients_reach_the_optimum():
    guide = dgp.guides.InducingPoint(model)
    svi = SVI(model, guide, dgp.optim.NaturalGradient(guide, 1.0, optax.sgd(0.0)), dgp.ELBO())
    result = svi.run(jax.random.key(0), 5, X, XS, Y, DY, progress_bar=False)
    close(-result.losses[-1], titsias(RESIDUAL, NOISE, *dense(X, XS))[0], 1e-3)


@pytest.mark.long
def test_derivatives_of_moments():
    """By the inputs, which a hidden layer may be, in reverse mode."""
    f = opened(k.RBF(V, L), dgp.Points(Z), FullBelief(jnp.ones(6), jnp.eye(6)))

    @jax.jit
    def total(x):
        values = f.grad(x)
        return values.mean.sum() + jnp.square(values.variance).sum()

    found = jax.grad(total)(XS)
    step = H * jnp.eye(4)[:, :, None]
    expected = jnp.stack([(total(XS + s) - total(XS - s)) / (2 * H) for s in step])
    close(found[:, 0], expected, 1e-4)


def two(inducing=dgp.Points(jnp.zeros((1, 2))), kernel=k.RBF(), **options):
    return opened(kernel, inducing, **options)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: two().grad(jnp.zeros((3, 2))), r"f\.grad: expected the column .* to 1, got None: f\.grad\(x, 0\)"),
        (lambda: two().grad(jnp.zeros((3, 2)), 2), "from 0 to 1, got 2"),
        (lambda: two().grad(jnp.zeros((3, 2)), -1), "from 0 to 1, got -1"),
        (lambda: two().grad(jnp.zeros((3, 2)), True), "from 0 to 1, got True"),
        (lambda: two().grad(jnp.zeros((3, 3)), 1), r"expected inputs with D = 2 columns"),
        (lambda: two().grad(jnp.full((3, 2), jnp.nan), 1), "expected finite inputs of f"),
        (lambda: two().grad(jnp.zeros((3, 2)), 1, noise=-1.0), "noise to be positive"),
        (lambda: two(kernel=k.Matern12()).grad(jnp.zeros((3, 2)), 1), r"1 derivative\(s\), got Matern12.* have 0: M"),
        (lambda: two(kernel=k.RBF() + k.White(0.1)).grad(jnp.zeros((3, 2)), 1), "got White, whose functions have 0"),
        (lambda: two(kernel=[k.RBF(), k.Matern12()], outputs=2).grad(jnp.zeros((3, 2)), 1), "got Matern12"),
        (lambda: opened(k.Brownian(), dgp.Points(Z + 3)).grad(X), "got Brownian, whose functions have 0"),
        (lambda: two(kernel=k.Transformed(k.Matern12().on(1), jnp.sin)).grad(jnp.zeros((3, 2)), 0), "got Matern12"),
        (
            lambda: two(kernel=k.Matern32()).grad(jnp.zeros((3, 2)), 1).function.grad(jnp.zeros((3, 2)), 0),
            r"have 2 derivative\(s\), got Matern32.* have 1",
        ),
        (
            lambda: opened(k.RBF(), None).grad(X),
            r"f\.grad: expected a layer with inducing values.*exact process.*f\.condition\(X, values\)\.grad\(x\)",
        ),
    ],
)
def test_wrong_calls(call, match):
    with pytest.raises(ValueError, match=match):
        call()


@pytest.mark.slow
def test_slopes_of_a_part_that_is_smooth():
    kernel = k.RBF().on(0) * k.Matern12().on(1)
    assert two(kernel=kernel).grad(jnp.ones((3, 2)), 0).batch_shape == (3,)


@pytest.mark.long
def test_collapsed_refuses_slopes_at_gaussian_inputs():
    def program(X, y=None):
        f = dgp.gp("f", k.RBF(), dgp.Points(Z))
        with numpyro.plate("data", len(X)):
            numpyro.sample(
                "y", dgp.Likelihood(f.grad(dgp.latent("w", None, 1)), lambda v: dist.Normal(v, NOISE)), obs=y
            )

    with pytest.raises(ValueError, match="Collapsed: expected known inputs of layer 'f', a FunctionalOf, got Gaussian"):
        bound(dgp.ELBO(), {}, program, dgp.guides.Collapsed(program), X, Y)


@pytest.mark.long
def test_a_process_given_its_values():
    """The exact posterior of slopes, given values: that of the dense Gaussian."""
    f = opened(k.RBF(V, L), None).condition(X[::3], Y[::3])
    slopes = f.grad(XS)
    step = jnp.concatenate([XS + H, XS - H])
    values = f.joint(step)
    close(slopes.mean, (values.mean[:4] - values.mean[4:]) / (2 * H), 1e-6)


@pytest.mark.long
def test_slopes_outside_of_a_ring():
    with pytest.raises(ValueError, match="expected inputs on the ring, from"):
        opened(k.RBF(), dgp.Grid(-3.0, 3.0, 16)).grad(X + 9)


@pytest.mark.slow
@pytest.mark.parametrize("mean", [0.5, lambda x: 0.5, lambda x: jnp.concatenate([x, 2 * x], -1)])
def test_slopes_of_a_mean_of_several_outputs(mean):
    f = opened(k.RBF(V, L), dgp.Points(Z), outputs=2, mean=mean)
    close(f.grad(X).mean, (f(X + H).mean - f(X - H).mean) / (2 * H), 1e-6)
    A = jnp.array(rng.normal(size=(3, len(X))))
    close(f.linear(X, A).mean, A @ f(X).mean, 1e-9)
