"""Programs that standardise by the rows of the call: predictions depend on the rows that are asked for together."""

import warnings

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from programs import NOISE, X, Z, bayesian, deep, explicit, shallow
from sizes import mostly_long

import numpyro_dgp as dgp
from numpyro_dgp.analysis.calls import inspect_call, warn_rows_together


def program(inputs=lambda X: X, hidden=lambda h: h, noise=lambda X: NOISE):
    def model(X, y=None):
        f = dgp.gp("f", dgp.kernels.RBF(), dgp.Points(Z), outputs=1)
        g = dgp.gp("g", dgp.kernels.RBF(), dgp.Points(Z))
        with numpyro.plate("data", len(X)):
            h = numpyro.sample("h", f(inputs(X)))
            scale = noise(X)
            numpyro.sample("y", dgp.Likelihood(g(hidden(h)), lambda v: dist.Normal(v, scale)), obs=y)

    return model


def call(model, rows):
    with handlers.seed(rng_seed=0):
        return inspect_call(model, None, (X[:rows],), {})


TOGETHER = {
    "mean": (program(lambda X: X - X.mean(0)), "inputs at 'h' computed from all rows of 'X'"),
    "standardised": (program(lambda X: (X - X.mean(0)) / X.std(0)), "inputs at 'h' computed from all rows of 'X'"),
    "range": (program(lambda X: (X - X.min()) / jnp.ptp(X)), "inputs at 'h' computed from all rows of 'X'"),
    "median": (program(lambda X: X - jnp.median(X, 0)), "inputs at 'h' computed from all rows of 'X'"),
    "hidden": (program(hidden=lambda h: h - h.mean(0)), "inputs at 'y' computed from all rows of 'h'"),
    "noise": (program(noise=lambda X: 0.1 * X.std() + 0.1), "a density at 'y' computed from all rows of 'X'"),
}


@pytest.mark.parametrize("rows", mostly_long([4], [4, 1]))
@pytest.mark.parametrize("name", TOGETHER)
def test_programs_that_standardise_are_named(name, rows):
    model, message = TOGETHER[name]
    with pytest.warns(UserWarning, match=f"Posterior: expected every row to be predicted by itself, got {message}"):
        warn_rows_together(call(model, rows))


def total(X, y=None):
    """A sum over rows that stays one, beside rows."""
    f = dgp.gp("f", dgp.kernels.RBF(), dgp.Points(Z))
    with numpyro.plate("data", len(X)):
        v = numpyro.sample("v", f(X))
        numpyro.sample("y", dist.Normal(v, NOISE), obs=y)
    numpyro.sample("total", dist.Normal(v.sum(), 0.1))


ALONE = {
    "by row": program(lambda X: X / jnp.linalg.norm(X, axis=-1, keepdims=True)),
    "constants": program(lambda X: (X - Z.mean(0)) / Z.std(0)),
    "lags": program(lambda X: jnp.concatenate([X[:1], X[:-1]])),
    "bins": lambda X: shallow(jnp.repeat(X, 2, 0).reshape(-1, 4, 1).mean(1) if len(X) > 1 else X),
    "total": total,
    "shallow": shallow,
    "deep": deep,
    "explicit": explicit,
    "bayesian": bayesian,
}


@pytest.mark.parametrize("rows", mostly_long([4], [4, 1]))
@pytest.mark.parametrize("name", ALONE)
def test_other_programs_are_not(name, rows):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = call(ALONE[name], rows)
    assert not found.together


@pytest.mark.slow
def test_a_prediction_warns():
    model = TOGETHER["mean"][0]
    posterior = dgp.Posterior(model, samples={"f": jnp.zeros((2, 1, 8)), "g": jnp.zeros((2, 8))})
    with pytest.warns(
        UserWarning, match=r"outside the model: units = dgp.initial.Standardizer.fit\(X\); X = units\(X\)"
    ):
        posterior.using(num_samples=1).predict(jax.random.key(0), X[:4])


def outputs_with(parameters):
    """As many outputs as rows, with one parameter for each output."""

    def model(X, scales=None, y=None):
        scale = parameters() if scales is None else scales / scales.mean()
        f = dgp.gp("f", dgp.kernels.RBF(), dgp.Points(Z), outputs=2)
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dgp.Likelihood(f(X), lambda v: dist.Normal(v, scale).to_event(1)), obs=y)

    return model


def in_a_plate():
    with numpyro.plate("outputs", 2):
        return numpyro.sample("scale", dist.LogNormal())


PARAMETERS = {
    "a plate": (in_a_plate, None),
    "expand": (lambda: numpyro.sample("scale", dist.LogNormal().expand([2])), None),
    "shares": (lambda: numpyro.sample("scale", dist.Dirichlet(jnp.ones(2))), None),
    "of their mean": (lambda: (s := in_a_plate()) / s.mean(), None),
    "an argument": (None, jnp.ones(2)),
}


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_that_are_as_many_as_rows_are_no_rows(name, rows):
    """No warning: the outputs of a row are added up, not rows."""
    parameters, scales = PARAMETERS[name]
    assert inspect_call(outputs_with(parameters), "y", (X[:rows], scales), {}).together == []


@pytest.mark.slow
def test_rows_are_still_found_beside_as_many_parameters():
    def model(X, y=None):
        scale = in_a_plate()
        f = dgp.gp("f", dgp.kernels.RBF(), dgp.Points(Z), outputs=2)
        with numpyro.plate("data", len(X)):
            v = f(X - X.mean(0))
            numpyro.sample("y", dgp.Likelihood(v, lambda v: dist.Normal(v, scale).to_event(1)), obs=y)

    for rows in (1, 2, 5):
        assert [(w.what, w.source) for w in inspect_call(model, "y", (X[:rows],), {}).together] == [("inputs", "X")]
