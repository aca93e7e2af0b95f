"""One contract over a table of guides, likelihoods and objectives; a newcomer adds a row."""

import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
import tinygp
from numpyro.infer import SVI
from numpyro.infer.autoguide import AutoMultivariateNormal, AutoNormal
from programs import X, Y, bayesian, deep, explicit, shallow
from sizes import mostly_long
from test_kernels import OWN
from test_likelihood import FEW, SCALAR

import numpyro_dgp as dgp
from numpyro_dgp import guides as G
from numpyro_dgp import testing

GUIDES = {
    "inducing-point": G.InducingPoint,
    "diagonal": partial(G.InducingPoint, inducing=G.Diagonal()),
    "mixture": partial(G.InducingPoint, inducing=G.MixtureOfGaussians(2)),
    "flow": partial(G.InducingPoint, inducing=G.Flow()),
    "normal-hyperparameters": partial(G.InducingPoint, other=G.Normal()),
    "autoguide-hyperparameters": partial(G.InducingPoint, other=AutoMultivariateNormal),
    "mean-field": G.MeanField,
    "amortised": partial(G.InducingPoint, latent=G.Amortised(hidden=(5,))),
    "importance-weighted": partial(G.ImportanceWeighted, num_samples=3),
    "quadrature": partial(G.InducingPoint, latent=G.Quadrature(10)),
    "full-joint": partial(G.InducingPoint, inducing=G.FullJoint()),
    "mean-field-full": partial(G.MeanField, inducing=G.Full()),
    "stock-auto-normal": AutoNormal,
}
MODELS = {"shallow": shallow, "deep": deep, "explicit": explicit, "bayesian": bayesian}
# Every guide on the richest program, every program under the default guide.
PAIRS = [pytest.param("bayesian", name, marks=pytest.mark.long) for name in GUIDES]
PAIRS += [pytest.param(name, "inducing-point", marks=pytest.mark.long) for name in ("shallow", "deep")]
PAIRS += [("explicit", "inducing-point")]
OBJECTIVES = {"one": dgp.ELBO(), "particles": dgp.ELBO(3), "sequential": dgp.ELBO(2, False)}


@pytest.mark.parametrize("name", [n for n in OWN if n != "white"])
def test_kernels(name):
    testing.check_kernel(OWN[name], np.random.default_rng(0).normal(size=(12, 3)))


@pytest.mark.long
def test_kernels_of_another_library():
    testing.check_kernel(tinygp.kernels.Matern52(0.7), np.linspace(0, 1, 9)[:, None])


@pytest.mark.slow
@pytest.mark.parametrize("name", mostly_long(FEW, [n for n in SCALAR if n != "laplace"]))
def test_likelihoods(name):
    conditional, y, _ = SCALAR[name]
    testing.check_likelihood(conditional, y)


@pytest.mark.long
def test_likelihoods_of_several_outputs():
    draws = dgp.likelihoods.MonteCarlo(20)
    testing.check_likelihood(lambda v: dist.Categorical(logits=v), [0, 2, 1], outputs=3, integrate=draws)
    testing.check_likelihood(lambda v: dgp.likelihoods.RobustMax(v), [0, 2, 1], outputs=3)
    two = lambda v: dist.Normal(v[..., 0], jnp.exp(v[..., 1]))  # noqa: E731
    testing.check_likelihood(two, [0.1, 0.2, 0.3], outputs=2, integrate=draws)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "guide"), PAIRS)
def test_guides(model, guide):
    model = MODELS[model]
    if guide == "stock-auto-normal":
        model = numpyro.handlers.substitute(model, data={})  # a stock guide cannot predict at other lengths
        svi = SVI(model, GUIDES[guide](model), optax.adam(0.01), dgp.ELBO())
        assert np.isfinite(svi.run(jax.random.key(0), 3, X, Y, progress_bar=False).losses).all()
        return
    testing.check_guide(model, GUIDES[guide](model), X, Y)


@pytest.mark.slow
def test_guides_that_break_a_promise_are_caught():
    def forgets(X, y=None):
        numpyro.sample("g", dist.Normal(jnp.zeros(8), 1.0).to_event(1))

    with pytest.raises(AssertionError, match="a draw of the latent sites"):
        testing.check_guide(deep, forgets, X, Y)
    with pytest.raises(AssertionError, match="no negative eigenvalue"):
        testing.check_kernel(lambda A, B: -jnp.ones((len(A), len(B))), np.eye(3))


@pytest.mark.long
@pytest.mark.parametrize("objective", mostly_long(["one"], OBJECTIVES))
@pytest.mark.parametrize("x64", [True, pytest.param(False, marks=pytest.mark.long)])
def test_objectives_keep_the_dtype_of_the_data(objective, x64):
    """float32 data stay float32 in every parameter and gradient, whatever the global flag says."""
    jax.config.update("jax_enable_x64", x64)
    try:
        data = X.astype(jnp.float32), Y.astype(jnp.float32)

        def model(X, y=None):
            f = dgp.gp("f", dgp.kernels.RBF(), dgp.Points(X[::4], learn=True), outputs=1, mean=dgp.means.IdentityMean())
            g = dgp.gp("g", dgp.kernels.RBF(), dgp.Points(X[::4]))
            with numpyro.plate("data", len(X)):
                x = dgp.latent("w", X, 1)
                h = numpyro.sample("h", f(x[:, :1]))
                numpyro.sample("y", dgp.Likelihood(g(h), lambda v: dist.Normal(v, 0.1)), obs=y)

        for make in (G.InducingPoint, G.MeanField):
            guide = make(model)
            svi = SVI(model, guide, optax.adam(0.01), OBJECTIVES[objective])
            params = svi.get_params(svi.init(jax.random.key(0), *data))
            objective_of = OBJECTIVES[objective].loss
            loss = lambda p, guide=guide: objective_of(jax.random.key(0), p, model, guide, *data)  # noqa: E731
            gradient = jax.jit(jax.grad(loss))(params)
            for name in params:
                assert params[name].dtype == gradient[name].dtype == jnp.float32, name
                assert np.isfinite(gradient[name]).all(), name
    finally:
        jax.config.update("jax_enable_x64", True)


@pytest.mark.slow
def test_two_layers_of_one_kind_do_not_collide():
    def model(X, y=None):
        a, b = (dgp.gp(name, dgp.kernels.RBF(), dgp.Points(X[::4], learn=True)) for name in "ab")
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dgp.Likelihood(a(X), lambda v: dist.Normal(v, 0.1)), obs=y)
            numpyro.sample("z", dgp.Likelihood(b(X), lambda v: dist.Normal(v, 0.1)), obs=y)

    guide = G.InducingPoint(model)
    svi = SVI(model, guide, optax.adam(0.01), dgp.ELBO())
    params = svi.get_params(svi.init(jax.random.key(0), X, Y))
    assert len(params) == 6
    np.testing.assert_allclose(params["a_auto_scale_tril"], np.eye(8))
    np.testing.assert_allclose(params["b_auto_scale_tril"], np.eye(8))
    with numpyro.handlers.seed(rng_seed=0), numpyro.handlers.trace():
        dgp.gp("a", dgp.kernels.RBF(), dgp.Points(X[::4]))
        with pytest.raises(AssertionError, match="unique names"):
            dgp.gp("a", dgp.kernels.RBF(), dgp.Points(X[::4]))


@pytest.mark.long
def test_objectives_under_vmap():
    """A batch of parameter sets at once, as in population training."""
    guide = G.InducingPoint(deep)
    svi = SVI(deep, guide, optax.adam(0.01), dgp.ELBO())
    params = svi.get_params(svi.init(jax.random.key(0), X, Y))
    several = jax.tree.map(lambda p: jnp.stack([p, 1.01 * p + 0.01]), params)
    loss = lambda p: dgp.ELBO().loss(jax.random.key(0), p, deep, guide, X, Y)  # noqa: E731
    together = jax.vmap(loss)(several)
    np.testing.assert_allclose(together[0], loss(params), rtol=1e-9)
    assert together.shape == (2,)


@pytest.mark.long
def test_float32_without_the_global_flag_in_a_new_process():
    """As most users run it: no x64 anywhere in the process."""
    program = """
import jax, jax.numpy as jnp, numpyro, optax
import numpyro.distributions as dist
from numpyro.infer import SVI
import numpyro_dgp as dgp
X = jnp.linspace(-1, 1, 40)[:, None]
def model(X, y=None):
    f = dgp.gp("f", dgp.kernels.RBF(), dgp.Points(X[::4]), outputs=1, mean=dgp.means.IdentityMean())
    g = dgp.gp("g", dgp.kernels.Matern52(), dgp.Points(X[::4]))
    with numpyro.plate("data", len(X)):
        h = numpyro.sample("h", f(X))
        numpyro.sample("y", dgp.Likelihood(g(h), lambda v: dist.StudentT(4.0, v, 0.1)), obs=y)
result = SVI(model, dgp.guides.InducingPoint(model), optax.adam(0.02), dgp.ELBO()).run(
    jax.random.key(0), 300, X, jnp.sin(4 * X[:, 0]), progress_bar=False)
assert result.losses.dtype == jnp.float32 and jnp.isfinite(result.losses).all()
assert result.losses[-20:].mean() < result.losses[:20].mean() / 2
"""
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True)
