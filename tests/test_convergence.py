"""R-hat and effective sizes of chains: what the data identify, and what a reflection of a hidden layer changes."""

import arviz_stats
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from dense import rbf
from numpyro import handlers
from numpyro.infer import MCMC, NUTS, init_to_sample
from programs import X, Y, deep, random_params

import numpyro_dgp as dgp
from numpyro_dgp.diagnostics import convergence

rng = np.random.default_rng(0)
x, y = X[::3], Y[::3]
TEST = jnp.linspace(-1.5, 1.5, 4)[:, None]
Z = jnp.linspace(-2, 2, 5)[:, None]
CORNERS = jnp.array([[a, b] for a in (-1.0, 0.0, 1.0) for b in (-1.0, 0.0, 1.0)])


def symmetric(X, y=None):
    """A hidden layer of two outputs, of which each may be reflected, and the two exchanged."""
    noise = numpyro.sample("noise", dist.LogNormal(-1.0, 0.5))
    f = dgp.gp("f", dgp.kernels.RBF(1.0, 0.8), dgp.Points(Z), outputs=2)
    g = dgp.gp("g", dgp.kernels.RBF(1.0, 1.0), dgp.Points(CORNERS))
    with numpyro.plate("data", len(X)):
        h = numpyro.sample("h", f(X))
        numpyro.sample("y", dgp.Likelihood(g(h), lambda v: dist.Normal(v, noise)), obs=y)


def draws_of(count):
    """Numbers in place of a chain, and the same in which the first output is reflected and the two exchanged."""
    factor = np.linalg.cholesky(rbf(CORNERS, CORNERS, 1.0, 1.0))
    moved = np.asarray(CORNERS * jnp.array([-1.0, 1.0]))[:, ::-1]
    order = [int(np.argmin(np.abs(CORNERS - row).sum(1))) for row in moved]
    f, g, h = rng.normal(size=(count, 2, 5)) + 1, rng.normal(size=(count, 9)) + 1, rng.normal(size=(count, 10, 2)) + 1
    of_f = np.array([-1.0, 1.0])
    u = np.empty_like(g)
    u[:, order] = g @ factor.T
    noise = np.exp(rng.normal(size=count))
    chain = {"noise": noise, "f": f, "g": g, "h": h}
    other = {
        "noise": noise,
        "f": (of_f[:, None] * f)[:, ::-1],
        "g": np.linalg.solve(factor, u.T).T,
        "h": (h * of_f)[..., ::-1],
    }
    return chain, other


@pytest.mark.long
def test_reflected_and_exchanged_outputs_are_the_same_function():
    chain, other = draws_of(60)
    samples = {name: jnp.concatenate([chain[name], other[name]]) for name in chain}
    posterior = dgp.Posterior(symmetric, samples=samples)
    found = convergence(posterior, x, y, test=(TEST,), num_chains=2, superchains=[5, 3])
    assert {name: value.shape for name, value in found.values.items()} == {
        "noise": (2, 60),
        "function at y": (2, 60, 10),
        "function at y, test": (2, 60, 4),
        "log density of the data": (2, 60),
    }
    for name, value in found.values.items():
        np.testing.assert_allclose(value[0], value[1], rtol=1e-4, atol=1e-4, err_msg=name)
        assert np.ptp(value) > 0.5
    table = found.table
    assert list(table.index[~table.identified]) == ["f", "g", "h"]
    assert list(table.kind) == [
        "hyperparameter",
        "function",
        "function",
        "log density",
        "inducing",
        "inducing",
        "hidden",
    ]
    assert min(table.r_hat[["f", "h"]]) > 1.5
    assert found.r_hat == table.r_hat[table.identified].max()
    assert found.r_hat < 1.15
    assert found.ess == table.ess_bulk[table.identified].min()
    # ArviZ itself, and the program itself
    np.testing.assert_allclose(found.values["noise"][0], np.log(chain["noise"]), rtol=1e-6)
    h = np.moveaxis(np.stack([chain["h"], other["h"]]).reshape(2, 60, -1), -1, 0)
    np.testing.assert_allclose(table.r_hat["h"], max(arviz_stats.rhat(column) for column in h))
    np.testing.assert_allclose(table.ess_bulk["h"], min(arviz_stats.ess(column) for column in h))
    nested = [arviz_stats.rhat_nested(column, superchain_ids=[0, 1]) for column in h]
    np.testing.assert_allclose(table.r_hat_nested["h"], max(nested))
    first = {name: jnp.asarray(value[0]) for name, value in chain.items()}
    sites = handlers.trace(handlers.seed(handlers.substitute(symmetric, data=first), 0)).get_trace(x, y)
    np.testing.assert_allclose(found.values["function at y"][0, 0], sites["y"]["fn"].f_x.loc, rtol=1e-6)
    np.testing.assert_allclose(
        found.values["log density of the data"][0, 0], sites["y"]["fn"].log_prob(y).sum(), rtol=1e-6
    )
    layer = handlers.substitute(lambda X: dgp.gp("f", dgp.kernels.RBF(1.0, 0.8), dgp.Points(Z), outputs=2)(X), first)
    with handlers.seed(rng_seed=0):
        mean = layer(TEST).mean
    there = handlers.substitute(symmetric, data=first | {"h": mean})
    f_x = handlers.trace(handlers.seed(there, 0)).get_trace(TEST)["y"]["fn"].f_x
    np.testing.assert_allclose(found.values["function at y, test"][0, 0], f_x.loc, rtol=1e-6)


def exact(x, y=None):
    noise = numpyro.sample("noise", dist.LogNormal(-1.0, 0.5))
    f = dgp.gp("f", dgp.kernels.RBF(1.0, 1.2), None, outputs=1)
    g = dgp.gp("g", dgp.kernels.RBF(1.0, 0.9), None)
    h = numpyro.sample("h", f(x))
    numpyro.sample("y", g(h, noise=noise), obs=y)


@pytest.mark.long
def test_exact_layers_are_conditioned_on_their_values():
    """The functions of a draw at other inputs, by dense algebra."""
    ends = x[::2]
    h = np.linalg.cholesky(rbf(ends, ends, 1.0, 1.2)) @ rng.normal(size=(8, 5, 1))
    noise = np.exp(0.3 * rng.normal(size=8) - 1)
    posterior = dgp.Posterior(exact, samples={"noise": jnp.array(noise), "h": jnp.array(h)})
    found = convergence(posterior, ends, y[::2], test=(TEST,), num_chains=2)
    at_data, there = found.values["function at y"].reshape(8, -1), found.values["function at y, test"].reshape(8, -1)
    for i in range(8):
        mean = rbf(TEST, ends, 1.0, 1.2) @ np.linalg.solve(rbf(ends, ends, 1.0, 1.2), h[i])
        weights = np.linalg.solve(rbf(h[i], h[i], 1.0, 0.9) + noise[i] ** 2 * np.eye(5), y[::2])
        np.testing.assert_allclose(at_data[i], rbf(h[i], h[i], 1.0, 0.9) @ weights, rtol=1e-3, atol=1e-3)
        np.testing.assert_allclose(there[i], rbf(mean, h[i], 1.0, 0.9) @ weights, rtol=1e-3, atol=1e-3)


@pytest.mark.long
def test_a_latent_a_group_and_labels():
    """A latent is not identified, a hyperparameter in a plate is; the function is under Bernoulli labels."""

    def program(X, y=None):
        with numpyro.plate("groups", 2):
            shift = numpyro.sample("shift", dist.Normal(0.0, 1.0))
        g = dgp.gp("g", dgp.kernels.RBF(1.0, 0.9), dgp.Points(CORNERS))
        with numpyro.plate("data", len(X)):
            w = dgp.latent("w", X, 1)
            v = g(w)
            numpyro.sample("y", dgp.Likelihood(v, lambda v: dist.Bernoulli(logits=v + shift.sum())), obs=y)

    count = 12
    samples = {
        "shift": rng.normal(size=(count, 2)),
        "g": rng.normal(size=(count, 9)),
        "w": rng.normal(size=(count, 10, 1)),
    }
    samples = {name: jnp.asarray(value) for name, value in samples.items()}
    found = convergence(dgp.Posterior(program, samples=samples), x, (y > 0) * 1, test=(TEST,), num_chains=3)
    assert dict(found.table.kind)["shift"] == "hyperparameter"
    assert dict(found.table.kind)["w"] == "latent"
    assert dict(found.table.identified) == {name: name not in ("g", "w") for name in found.table.index}
    first = {"g": samples["g"][0], "shift": samples["shift"][0], "w": jnp.zeros((4, 1))}
    f_x = handlers.trace(handlers.seed(handlers.substitute(program, data=first), 0)).get_trace(TEST)["y"]["fn"].f_x
    np.testing.assert_allclose(found.values["function at y, test"][0, 0], f_x.loc, rtol=1e-6)


@pytest.mark.long
def test_chains_in_the_coordinates_of_a_guide():
    """Every site of the draws has a row, and the quantities are those of the program, not of the coordinates."""

    def model(X, y=None):
        noise = numpyro.sample("noise", dist.LogNormal(-1.0, 0.5))
        deep(X, y, inner=dgp.kernels.RBF(0.3, 0.9 + 0 * noise))
        numpyro.deterministic("twice", 2 * noise)

    guide = dgp.guides.InducingPoint(model, other=dgp.guides.Normal())
    params = random_params(model, guide, x, y, scale=0.1)
    kernel = NUTS(dgp.for_mcmc(model, params, guide=guide), init_strategy=init_to_sample())
    mcmc = MCMC(kernel, num_warmup=20, num_samples=20, num_chains=4, chain_method="vectorized", progress_bar=False)
    mcmc.run(jax.random.key(0), x, y)
    found = convergence(mcmc, x, y=y, test=(TEST,), superchains=2)
    samples = mcmc.get_samples()
    assert set(found.table.index) == set(samples) | set(found.values)
    kinds = dict(found.table.kind)
    assert (kinds["twice"], kinds["h"], kinds["h_white"]) == ("deterministic", "hidden", "coordinates")
    last = {name: value[-1] for name, value in samples.items() if name in ("noise", "f", "g", "h")}
    sites = handlers.trace(handlers.seed(handlers.substitute(deep, data=last), 0)).get_trace(x, y)
    np.testing.assert_allclose(found.values["function at y"][-1, -1], sites["y"]["fn"].f_x.loc, rtol=1e-5)
    assert "function at y, test" in found.values


def test_a_chain_that_never_moves_is_not_called_converged():
    def program(y):
        a = numpyro.sample("a", dist.Normal(0.0, 1.0))
        b = numpyro.sample("b", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Normal(a + b, 1.0), obs=y)

    samples = {"a": jnp.ones(16), "b": jnp.asarray(rng.normal(size=16))}
    found = convergence(dgp.Posterior(program, samples=samples), 0.0, num_chains=2)
    assert np.isnan(found.r_hat)
    assert np.isnan(found.ess)
    assert found.table.r_hat["b"] < 2


SAMPLES = {name: jnp.asarray(value) for name, value in draws_of(8)[0].items()}
CHAINS = dgp.Posterior(symmetric, samples=SAMPLES)
GUIDE = dgp.guides.InducingPoint(deep)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: convergence(MCMC(NUTS(symmetric), num_warmup=1, num_samples=1), x, y), "an MCMC object that has run"),
        (
            lambda: convergence(dgp.Posterior(deep, GUIDE, {}), x, y),
            "convergence: expected chains, an MCMC object or dgp.Posterior.*, got a fit with a guide",
        ),
        (lambda: convergence(CHAINS, x, y, num_chains=3), "chains of one length, 4 draws at least, got 8 draws in all"),
        (lambda: convergence(CHAINS, x, y, num_chains=4), "chains of one length, 4 draws at least, got 8 draws in all"),
        (
            lambda: convergence(CHAINS, x, y, superchains=2),
            "superchains of one size, two at least, for 1 chains, got 2",
        ),
        (
            lambda: convergence(CHAINS, x, y, num_chains=2, superchains=[0, 0]),
            "superchains of one size, two at least, for 2 chains, got \\[0, 0\\]",
        ),
        (lambda: convergence(CHAINS, x, y, test=TEST), "expected test=\\(X_test,\\), arguments without observations"),
        (lambda: convergence(CHAINS, x), "convergence: expected a program that observes data, got none"),
        (
            lambda: convergence(CHAINS, X, Y),
            "expected draws of 'h' of shape \\(30, 2\\), got \\(10, 2\\): pass the arg",
        ),
        (
            lambda: convergence(dgp.Posterior(symmetric, samples={"noise": SAMPLES["noise"]}), x, y),
            "convergence: expected draws of every site that all data share, got none of 'f'",
        ),
        (lambda: convergence(CHAINS, x, y, test=(TEST, y[:4])), "expected a call without the observations"),
    ],
)
def test_bad_input(build, message):
    with pytest.raises(ValueError, match=message):
        build()
