"""Gibbs sampling: its parts against formulas, the kernel against the joint distribution of parameters and data."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from numpyro.diagnostics import gelman_rubin
from numpyro.infer import MCMC
from numpyro.infer.util import log_density
from programs import NOISE, X, Y, Z, deep, explicit, shallow

import numpyro_dgp as dgp
from numpyro_dgp.inference.elliptical_slice import elliptical_slice
from numpyro_dgp.inference.integrated import integrated
from numpyro_dgp.inference.updates import NUTS, Conjugate, EllipticalSlice, Slice

x = jnp.linspace(-1, 1, 5)[:, None]


def run(model, *args, warmup=100, samples=400, chains=1, method="vectorized", extra=(), **options):
    mcmc = MCMC(
        dgp.Gibbs(model, **options),
        num_warmup=warmup,
        num_samples=samples,
        num_chains=chains,
        chain_method=method if chains > 1 else "sequential",
        progress_bar=False,
    )
    mcmc.run(jax.random.key(1), *args, extra_fields=extra)
    return mcmc


# --- the joint distribution of parameters and data stays as it is (Geweke, 2004)


def exact_layer(x, y=None):
    """One exact layer, drawn; hyperparameters of it and of the noise."""
    scale = numpyro.sample("scale", dist.LogNormal(0.0, 0.5))
    noise = numpyro.sample("noise", dist.LogNormal(-1.0, 0.5))
    f = dgp.gp("f", dgp.kernels.RBF(1.0, scale), None)
    v = numpyro.sample("v", f(x))
    numpyro.sample("y", dist.Normal(v, noise).to_event(1), obs=y)


def exact_layers(x, y=None):
    """The deep GP of Sauer et al.: the outer layer has no values of its own."""
    scales = numpyro.sample("scales", dist.LogNormal(0.0, 0.5).expand([2]).to_event(1))
    noise = numpyro.sample("noise", dist.LogNormal(-1.0, 0.5))
    f = dgp.gp("f", dgp.kernels.RBF(1.0, scales[0]), None, outputs=2)
    g = dgp.gp("g", dgp.kernels.RBF(1.0, scales[1]), None)
    h = numpyro.sample("h", f(x))
    numpyro.sample("y", g(h, noise=noise), obs=y)


def sparse_layers(x, y=None):
    scale = numpyro.sample("scale", dist.LogNormal(0.0, 0.5))
    f = dgp.gp("f", dgp.kernels.RBF(1.0, scale), dgp.Points(x[::2]), outputs=1)
    g = dgp.gp("g", dgp.kernels.RBF(1.0, 1.0), dgp.Points(x[::2]))
    with numpyro.plate("data", len(x)):
        h = numpyro.sample("h", f(x))
        numpyro.sample("y", dgp.Likelihood(g(h), lambda v: dist.Normal(2 * v + 1, 1.5)), obs=y)


def latent_inputs(x, y=None):
    shift = numpyro.sample("shift", dist.Normal(0.5, 1.0))
    g = dgp.gp("g", dgp.kernels.RBF(1.0, 1.0), dgp.Points(x[::2]))
    with numpyro.plate("data", len(x)):
        w = numpyro.sample("w", dist.Normal(shift, 0.7))
        v = numpyro.sample("v", g(w[:, None], noise=0.3))
        numpyro.sample("y", dist.Normal(v, 0.5), obs=y)


def statistics(model, z, y):
    """Moments of the latent values and of the data, and by how much a draw of the program has to be weighted."""
    sites = handlers.trace(handlers.seed(handlers.substitute(model, data=z), 0)).get_trace(x, y)
    numbers = jnp.concatenate([jnp.ravel(sites[name]["value"]) for name in sorted(z)] + [jnp.ravel(y)])
    numbers = jnp.arctan(numbers)  # of heavy tails no moments
    log_weight = 0.0
    fn = sites["y"]["fn"]
    if isinstance(fn, dgp.Likelihood):  # the bound is a density of y, N(y; a v + b, s), times a function of the rest
        slope, offset, scale = fn.normal_form()
        log_weight = (fn.log_prob(y) - dist.Normal(slope * fn.f_x.loc + offset, scale).log_prob(y)).sum()
    return jnp.concatenate([numbers, jnp.square(numbers), numbers[1:] * numbers[:-1]]), log_weight


def observations(model, key, z):
    """Data given the latent values, under the density of the program."""
    fn = handlers.trace(handlers.seed(handlers.substitute(model, data=z), key)).get_trace(x, jnp.zeros(len(x)))["y"]["fn"]
    if isinstance(fn, dgp.Likelihood):
        slope, offset, scale = fn.normal_form()
        fn = dist.Normal(slope * fn.f_x.loc + offset, scale)
    return fn.sample(key)


SHORT = NUTS(step_size=0.3)
SLICES = {"h": EllipticalSlice(repeat=2), "g": EllipticalSlice()}
CASES = {
    "exact layer": (exact_layer, dict(rest=SHORT)),
    "exact layer, slices": (exact_layer, dict(rest=Slice(0.7))),
    "exact layer, centred": (exact_layer, dict(noncentered=False, rest=SHORT)),
    "exact layers": (exact_layers, dict(rest=SHORT)),
    "exact layers, centred": (exact_layers, dict(noncentered=False, rest=Slice())),
    "sparse layers": (sparse_layers, dict(rest=SHORT)),
    "sparse layers, one block": (sparse_layers, dict(blocks={("f", "h"): EllipticalSlice(), "scale": Slice()})),
    "sparse layers, all sliced": (sparse_layers, dict(blocks=SLICES)),
    "sparse layers, trajectories": (sparse_layers, dict(blocks={"h": NUTS(dense_mass=True, step_size=0.4)})),
    "latent inputs": (latent_inputs, dict(rest=SHORT)),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_the_joint_distribution_is_invariant(case):
    """Chains that start at draws of the program, with data drawn anew after each sweep, stay draws of it."""
    model, options = CASES[case]
    chains, sweeps = 4000, 6
    kernel = dgp.Gibbs(model, **options)
    keys = jax.random.split(jax.random.key(0), chains)
    program = kernel.model

    def draw(key, data_key):
        sites = handlers.trace(handlers.seed(program, key)).get_trace(x, jnp.zeros(len(x)))
        z = {n: s["value"] for n, s in sites.items() if s["type"] == "sample" and n != "y"}
        y = observations(program, data_key, z)
        return z, y, *statistics(program, z, y)

    z, y, before, log_weights = jax.jit(jax.vmap(draw))(keys, jax.random.split(jax.random.key(3), chains))
    weights = np.asarray(jax.nn.softmax(log_weights))
    if weights.std() > 1e-6 / chains:  # chains start at draws of the density of the program itself
        rows = np.random.default_rng(0).choice(chains, chains, p=weights)
        z, y = jax.tree.map(lambda a: a[rows], (z, y))
        assert 1 / np.square(weights).sum() > chains / 3
    real = {n: s["fn"].support for n, s in sites_of(program).items() if n in z}
    unconstrained = {n: dist.transforms.biject_to(s).inv(z[n]) for n, s in real.items()}
    state = kernel.init(keys, 0, unconstrained, (x, y[0]), {})
    start = state.z

    def step(carry, key):
        states, ys = carry
        states = jax.vmap(lambda s, y: kernel.sample(s, (x, y), {}))(states, ys)
        values = {n: dist.transforms.biject_to(s)(states.z[n]) for n, s in real.items()}
        split = jax.random.split(key, chains)
        return (states, jax.vmap(lambda k, z: observations(program, k, z))(split, values)), None

    (end, ys), _ = jax.jit(lambda *a: jax.lax.scan(step, a, jax.random.split(jax.random.key(2), sweeps)))(state, y)
    values = {n: dist.transforms.biject_to(s)(end.z[n]) for n, s in real.items()}
    after = np.asarray(jax.vmap(lambda z, y: statistics(program, z, y)[0])(values, ys))
    expected = weights @ before
    spread = np.sqrt(weights @ np.square(before - expected) * np.square(weights).sum())
    error = np.sqrt(after.var(0) / chains + (1 + (weights.std() > 1e-6 / chains)) * spread**2)
    scores = np.abs(after.mean(0) - expected) / error
    assert scores.max() < 4.5, (case, scores.round(1))
    moved = [np.mean(np.any(np.asarray(end.z[n] != start[n]).reshape(chains, -1), -1)) for n in z]
    assert min(moved) > 0.9, (case, moved)


def sites_of(program):
    return handlers.trace(handlers.seed(program, 0)).get_trace(x, jnp.zeros(len(x)))
