"""What a step becomes on a device that is not here: its lowered text, read for loops, factorisations and callbacks."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.infer import SVI
from numpyro.infer.initialization import init_to_median
from numpyro.infer.util import initialize_model
from sizes import mostly_long

import numpyro_dgp as dgp
from numpyro_dgp import guides as G
from numpyro_dgp.math import tuning
from numpyro_dgp.optim import NaturalGradient

N, M, D = 5000, 30, 3
rng = np.random.default_rng(0)
Z = rng.normal(size=(M, D))


@pytest.fixture
def accelerator(monkeypatch, x32):
    """Programs are traced as where an accelerator is JAX's default backend."""
    jax.clear_caches()
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    yield
    jax.clear_caches()


def model(X, y=None, batch=None):
    noise = numpyro.sample("noise", dist.LogNormal(-2.0, 1.0))
    points = dgp.Points(jnp.asarray(Z, X.dtype), learn=True)
    scales = numpyro.sample("scales", dist.LogNormal(jnp.zeros(D), 1.0).to_event(1))
    f = dgp.gp("f", dgp.kernels.RBF(1.0, scales), points, outputs=D, mean=dgp.means.IdentityMean())
    g = dgp.gp("g", dgp.kernels.Matern52(1.0, scales), points)
    with numpyro.plate("data", len(X), subsample_size=batch) as rows:
        h = numpyro.sample("h", f(X[rows]))
        observed = dgp.Likelihood(g(h), lambda v: dist.Normal(v, noise))
        numpyro.sample("y", observed, obs=None if y is None else y[rows])


def lowered(platform, make=G.InducingPoint, batch=None):
    X, y = jnp.zeros((N, D), jnp.float32), jnp.zeros(N, jnp.float32)
    guide = make(model)
    svi = SVI(model, guide, optax.adam(0.01), dgp.ELBO())
    state = svi.init(jax.random.key(0), X, y, batch)
    step = jax.jit(lambda state, X, y: svi.update(state, X, y, batch))
    return step.trace(state, X, y).lower(lowering_platforms=(platform,)).as_text()


def calls(text):
    return re.findall(r"custom_call @(\w+)\(", text)


GUIDES = {
    "inducing points": G.InducingPoint,
    "diagonal": lambda model: G.InducingPoint(model, inducing=G.Diagonal()),
    "mean field": lambda model: G.MeanField(model, hidden=G.Normal(0.1)),
}


@pytest.mark.slow
@pytest.mark.parametrize("platform", mostly_long(["cuda"], ["cuda", "tpu"]))
@pytest.mark.parametrize("name", mostly_long(["inducing points"], GUIDES))
def test_a_step_on_an_accelerator(accelerator, platform, name):
    text = lowered(platform, GUIDES[name])
    assert "callback" not in text
    assert "stablehlo.while" not in text, "a loop over rows"
    assert "precision = [HIGHEST" in text
    assert not re.search(r"dot_general.*precision = \[DEFAULT", text)
    # Two layers of the same size. TPUs factorise by an operation of their own.
    factorisations = [name for name in calls(text) if "potrf" in name] or re.findall("stablehlo.cholesky", text)
    assert 1 <= len(factorisations) <= 2


def fit_step(program, optimiser=lambda guide: optax.adam(0.01)):
    guide = G.InducingPoint(program)
    svi = SVI(program, guide, optimiser(guide), dgp.ELBO())
    X, y = jnp.zeros((N, D), jnp.float32), jnp.zeros(N, jnp.float32)
    return svi.update, (jax.eval_shape(svi.init, jax.random.key(0), X, y), X, y)


def on_a_ring(X, y=None):
    f = dgp.gp("f", dgp.kernels.Matern52(1.0, 0.3), dgp.Grid(-3.0, 3.0, 64))
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dgp.Likelihood(f(X[:, :1]), lambda v: dist.Normal(v, 0.1)), obs=y)


for_chains = dgp.for_mcmc(model, {"f_Z": jnp.asarray(Z, jnp.float32), "g_Z": jnp.asarray(Z, jnp.float32)})


def sampled(rows=200):
    """Data of a chain, and its first state."""
    X, y = jnp.asarray(rng.normal(size=(rows, D)), jnp.float32), jnp.zeros(rows, jnp.float32)
    options = {"init_strategy": init_to_median(num_samples=1)}
    return (X, y), initialize_model(jax.random.key(0), for_chains, model_args=(X, y), **options)


def potential():
    _, found = sampled()
    return jax.value_and_grad(found.potential_fn), (found.param_info.z,)


def langevin_draw():
    data, found = sampled()
    kernel = dgp.mcmc.SGHMC(for_chains, step_size=1e-3)
    state = kernel.init(jax.random.key(0), 1, found.param_info.z, data, {})
    return lambda state: kernel.sample(state, data, {}), (state,)


def prediction():
    guide = G.InducingPoint(model)
    svi = SVI(model, guide, optax.adam(0.01), dgp.ELBO())
    X, y = jnp.zeros((N, D), jnp.float32), jnp.zeros(N, jnp.float32)
    params = svi.get_params(jax.jit(svi.init)(jax.random.key(0), X, y))
    return lambda key: dgp.Posterior(model, guide, params).using(num_samples=20).predict(key, X).means, (
        jax.random.key(0),
    )


# A program, and the loops in it that are not over rows: those of steps that are halved, and of draws.
OTHERS = {
    "natural gradients": (
        lambda: fit_step(model, lambda g: NaturalGradient(g, 0.1, optax.adam(0.01), sites="all")),
        3,
    ),
    "a stream": (lambda: fit_step(dgp.minibatch(model, data=10 * N)), 0),
    "a ring": (lambda: fit_step(on_a_ring), 0),
    "NUTS": (potential, 0),
    "SGHMC": (langevin_draw, 0),
    "prediction": (prediction, 1),
}


@pytest.mark.parametrize("platform", mostly_long([], ["cuda", "tpu"]))
@pytest.mark.parametrize("name", OTHERS)
def test_other_programs_on_an_accelerator(accelerator, platform, name):
    make, loops = OTHERS[name]
    program, arguments = make()
    text = jax.jit(program).trace(*arguments).lower(lowering_platforms=(platform,)).as_text()
    assert "callback" not in text
    assert text.count("stablehlo.while") <= loops
    assert not re.search(r"dot_general.*precision = \[DEFAULT", text)


@pytest.mark.long
def test_a_step_on_the_cpu_has_blocks_of_rows(monkeypatch, x32):
    """The check above can fail: the same program, traced for a CPU."""
    jax.clear_caches()
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    assert "stablehlo.while" in lowered("cpu")


def test_constants_go_with_the_backend(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    assert tuning.tuned() is tuning.CPU
    assert tuning.tuned().rows(jnp.float32) > tuning.tuned().rows(jnp.float64)
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert tuning.tuned() is tuning.ACCELERATOR


@pytest.mark.long
def test_both_ways_give_the_same_bound(monkeypatch):
    """The way of an accelerator, run on a CPU."""
    X, y = jnp.asarray(rng.normal(size=(1500, D))), jnp.asarray(rng.normal(size=1500))
    guide = G.InducingPoint(model)
    svi = SVI(model, guide, optax.adam(0.01), dgp.ELBO())
    params = svi.get_params(svi.init(jax.random.key(0), X, y, 50))

    def bound():
        jax.clear_caches()
        return jax.value_and_grad(lambda p: dgp.ELBO().loss(jax.random.key(1), p, model, guide, X, y))(params)

    value, slopes = bound()
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    other, others = bound()
    np.testing.assert_allclose(other, value, rtol=1e-9)
    for name in slopes:
        scale = float(jnp.abs(slopes[name]).max()) + 1e-3 * abs(float(value))
        np.testing.assert_allclose(others[name], slopes[name], rtol=0, atol=1e-6 * scale, err_msg=name)
