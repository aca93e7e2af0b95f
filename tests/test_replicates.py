"""Several runs at the same input: the likelihood of the pooled rows is that of all rows."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro import handlers
from numpyro.infer import SVI

import numpyro_dgp as dgp
from numpyro_dgp.design import pooled, within_replicates

RNG = np.random.default_rng(0)
INPUTS = RNG.uniform(size=(5, 2))
GROUP = np.array([3, 0, 0, 1, 4, 2, 1, 1, 3, 0, 4])
RUNS = RNG.normal(size=len(GROUP))


def model(X, y=None, counts=1.0, squares=0.0, noise=0.3, layers=1):
    h = X
    for i in range(1, layers):
        f = dgp.gp(f"f{i}", dgp.kernels.RBF(0.1), dgp.Points(INPUTS[:3]), outputs=2, mean=dgp.means.IdentityMean())
        with numpyro.plate(f"rows{i}", len(X)):
            h = numpyro.sample(f"h{i}", f(h))
    g = dgp.gp("g", dgp.kernels.RBF(), dgp.Points(INPUTS[:4]))
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dgp.Likelihood(g(h), lambda v: dist.Normal(v, noise / jnp.sqrt(counts))), obs=y)
        if y is not None:
            numpyro.factor("within", within_replicates(noise, counts, squares + jnp.zeros_like(y)))


def test_statistics_are_those_of_each_input():
    found = pooled(INPUTS[GROUP], np.stack([RUNS, RUNS**2], -1))
    assert list(map(tuple, np.asarray(found.X))) == list(map(tuple, INPUTS[[3, 0, 1, 4, 2]].astype(found.X.dtype)))
    for row, which in enumerate([3, 0, 1, 4, 2]):
        runs = np.stack([RUNS, RUNS**2], -1)[which == GROUP]
        assert found.counts[row] == len(runs)
        np.testing.assert_allclose(found.y[row], runs.mean(0), rtol=1e-6)
        np.testing.assert_allclose(found.squares[row], len(runs) * runs.var(0), rtol=1e-5, atol=1e-6)


def test_pooled_numbers_are_those_of_the_rows_or_an_error(x32):
    """In single precision none of them wraps around or falls together with another."""
    for X, says in (
        (np.array([[1700000000000], [1700000000001]]), "expected X within the whole numbers of int32"),
        (1.7e9 + np.arange(3.0)[:, None], "expected distinct values of X to stay distinct in float32"),
    ):
        with pytest.raises(ValueError, match=says):
            pooled(X, np.ones(len(X)))
    with pytest.raises(ValueError, match="expected distinct values of means of y to stay distinct"):
        pooled(INPUTS[:3], 1.7e9 + np.arange(3.0))
    with pytest.raises(ValueError, match="expected y with squared distances below 3e"):
        pooled(INPUTS[[0, 0]], np.array([0.0, 1e20]))
    found = pooled(INPUTS[[0, 0, 1, 1]], 1.7e9 + 1e6 * np.array([0, 0, 1, 1]) + np.array([0.0, 1.0, 0.0, 1.0]))
    assert found.squares.tolist() == [0.5, 0.5]  # computed before anything is rounded


@pytest.mark.parametrize("noise", [(), (3,), (2, 3), (2, 1), (1, 3)])
@pytest.mark.parametrize("counts", [3.0, np.array([2.0, 5.0])])
def test_shapes_of_noise_and_counts(noise, counts):
    noise, squares = RNG.uniform(1, 2, noise), RNG.uniform(size=(2, 3))
    terms = lambda s, c, w: -0.5 * (c - 1) * np.log(2 * np.pi * s**2) - 0.5 * np.log(c) - 0.5 * w / s**2  # noqa: E731
    every = np.broadcast_to(noise, (2, 3))
    expected = [
        sum(terms(s, c, w) for s, w in zip(*row, strict=True))
        for *row, c in zip(every, squares, np.broadcast_to(counts, 2), strict=True)
    ]
    np.testing.assert_allclose(within_replicates(noise, counts, squares), expected, rtol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("noise", [0.3, 1e-3])
def test_one_layer_has_the_bound_of_all_rows(noise):
    """And its derivative by the noise."""
    with jax.enable_x64(True):
        guide = dgp.guides.Collapsed(model)

        def bound(noise, *rows):
            return -dgp.ELBO().loss(jax.random.key(0), {}, model, guide, *rows, noise=noise)

        every = jax.jit(jax.value_and_grad(bound))(noise, jnp.asarray(INPUTS[GROUP]), jnp.asarray(RUNS))
        few = jax.jit(jax.value_and_grad(bound))(noise, *pooled(INPUTS[GROUP], RUNS))
        np.testing.assert_allclose(few, every, rtol=1e-10)


@pytest.mark.slow
def test_two_layers_have_the_density_of_all_rows():
    """With the last layer integrated, at given values of the first, and its derivative by the noise."""
    with jax.enable_x64(True):
        program, rows = dgp.for_mcmc(model), pooled(INPUTS[GROUP], RUNS)
        white = RNG.normal(size=(5, 2))
        inverse = np.array([np.flatnonzero((np.asarray(rows.X) == x).all(1))[0] for x in INPUTS[GROUP]])

        def density(noise, white, *rows):
            values = {"f1": jnp.asarray(np.linspace(-1, 1, 6).reshape(2, 3)), "h1_white": white}
            given = handlers.seed(handlers.substitute(program, data=values), 0)
            sites = handlers.trace(given).get_trace(*rows, noise=noise, layers=2)
            return sum(sites[n]["fn"].log_prob(sites[n]["value"]).sum() for n in ("g_integrated", "within"))

        slope = jax.jit(jax.value_and_grad(density))
        every = slope(0.3, white[inverse], jnp.asarray(INPUTS[GROUP]), jnp.asarray(RUNS))
        np.testing.assert_allclose(slope(0.3, white, *rows), every, rtol=1e-10)


@pytest.mark.long
def test_pooled_rows_can_be_fitted_and_predicted():
    guide = dgp.guides.InducingPoint(model)
    result = SVI(model, guide, optax.adam(0.1), dgp.ELBO()).run(
        jax.random.key(0), 3, *pooled(INPUTS[GROUP], RUNS), progress_bar=False
    )
    assert dgp.Posterior(model, guide, result.params).predict(jax.random.key(1), INPUTS[:2]).mean.shape == (2,)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: pooled(INPUTS, RUNS), r"pooled: expected X of shape \(N, D\) and y of shape \(N,\) or \(N, P\), got"),
        (lambda: pooled(INPUTS, np.full(5, np.nan)), "finite y"),
        (lambda: jax.jit(pooled)(INPUTS, RUNS[:5]), "pooled: expected known arrays, got traced ones: pool the rows"),
        (lambda: within_replicates(-1.0, 1.0, 0.0), "noise to be positive"),
        (lambda: within_replicates(1.0, jnp.ones(3), jnp.ones(4)), r"expected counts \(U,\) and squares \(U,\) or"),
        (
            lambda: within_replicates(np.ones((3, 1)), np.ones(3), np.ones(3)),
            r"noise that broadcasts to squares, got counts \(3,\), squares \(3,\) and noise \(3, 1\): X",
        ),
        (lambda: within_replicates(np.ones((3, 3)), np.ones(3), np.ones(3)), r"squares \(3,\) and noise \(3, 3\)"),
        (lambda: within_replicates(np.ones(2), np.ones(3), np.ones(3)), r"squares \(3,\) and noise \(2,\)"),
        (lambda: within_replicates(np.ones(2), 1.0, 0.0), r"counts \(\), squares \(\) and noise \(2,\)"),
    ],
)
def test_wrong_calls(call, message):
    with pytest.raises(ValueError, match=message):
        call()
