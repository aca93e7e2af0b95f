"""What a representation, or an array of the program, has no values for: inputs and groups outside of it."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest

import numpyro_dgp as dgp
from numpyro_dgp.jaxprs.argument_indices import ArgumentIndices


def with_groups(X, group, y=None, how="plain"):
    """Effects of three groups beside a function on an interval."""
    with numpyro.plate("groups", 3):
        e = numpyro.sample("e", dist.Normal(0.0, 1.0))
    f = dgp.gp("f", dgp.kernels.RBF(), dgp.Basis(-1.0, 2.0, 4))
    with numpyro.plate("data", len(X)):
        picked = {
            "plain": lambda: e[group],
            "column": lambda: e[X[:, -1].astype(int)],
            "take": lambda: jnp.take(e, group),
            "matrix": lambda: jnp.stack([e, e], 1)[group, 0],
            "masked": lambda: jnp.where(group < 3, e[group], 0.0),
        }[how]()
        numpyro.sample("y", dgp.Likelihood(f(X[:, :1]), lambda v: dist.Normal(v + picked, 0.2)), obs=y)


GROUPED = {"f": jnp.zeros((2, 4)), "e": jnp.arange(6.0).reshape(2, 3)}


@pytest.mark.slow
@pytest.mark.parametrize("how", ["column", "take", "matrix"])
def test_an_unseen_group_is_an_error_and_not_the_last_one(how, key):
    posterior = dgp.Posterior(partial(with_groups, how=how), samples=GROUPED)
    group = jnp.array([0, 1, 2])
    X = jnp.stack([jnp.linspace(0.0, 1.0, 3), group.astype(float)], 1)
    np.testing.assert_allclose(posterior.predict(key, X, group).mean, [1.5, 2.5, 3.5], rtol=1e-6)
    for label in (3, 7, -1):
        other, inputs = group.at[1].set(label), X.at[1, 1].set(label)
        with pytest.raises(ValueError, match=rf"Posterior.*: expected indices from 0 to 2 .*, got {label} among"):
            posterior.predict(key, inputs, other)


@pytest.mark.slow
def test_every_method_refuses_an_unseen_group(key):
    posterior = dgp.Posterior(with_groups, samples=GROUPED)
    X, group = jnp.linspace(0.0, 1.0, 3)[:, None], jnp.array([0, 3, 2])
    for call in (
        lambda: posterior.log_density(key, jnp.zeros(3), X, group),
        lambda: posterior.using(batch_size=2, progress_bar=False).predict(key, X, group),
    ):
        with pytest.raises(ValueError, match=r"Posterior\.\w+: expected indices from 0 to 2 .*, got 3 among"):
            call()


@pytest.mark.slow
def test_a_program_may_say_what_other_groups_have(key):
    posterior = dgp.Posterior(partial(with_groups, how="masked"), samples=GROUPED)
    found = posterior.predict(key, jnp.linspace(0.0, 1.0, 3)[:, None], jnp.array([0, 3, 2]))
    np.testing.assert_allclose(found.mean, [1.5, 0.0, 3.5], atol=1e-6)


@pytest.mark.slow
def test_indices_that_arguments_determine():
    """Against the rows that NumPy refuses, with the programs that JAX makes of indices."""
    e, W, group = jnp.arange(3.0), jnp.ones((3, 4)), jnp.array([0, 2, 3])
    outside, fine = [3], []
    for program, expected in (
        (lambda g: e[g], outside),
        (lambda g: e[g - 1], [-1]),
        (lambda g: e[g // 2], fine),
        (lambda g: e[jnp.minimum(g, 2)], fine),
        (lambda g: W[g], outside),
        (lambda g: W[:, g], fine),
        (lambda g: W[:, g + 1], [4]),
        (lambda g: W[g, 0], outside),
        (lambda g: e[g[2]], outside),
        (lambda g: e.at[g].get(mode="clip"), fine),
        (lambda g: e.at[g].get(mode="fill", fill_value=0.0), fine),
        (lambda g: jnp.where(g < 3, 2 * e[g] + 1, 0.0), fine),
        (lambda g: jax.jit(lambda g: e[g])(g), outside),
        (lambda g: jax.checkpoint(lambda g: e[g])(g), outside),
        (lambda g: jax.lax.map(lambda a: a[g], jnp.ones((5, 3))), outside),
        (lambda g: jax.vmap(lambda a: a[g])(jnp.ones((5, 3))), outside),
        (lambda g: e[g[jax.random.randint(jax.random.key(0), (2,), 0, 3)]], outside),
        (lambda g: e[jnp.where(g[jax.random.randint(jax.random.key(0), (2,), 0, 3)] < 9, jnp.arange(2), 2)], fine),
        (lambda g: e[-1] * g, fine),
        (lambda g: e[jnp.arange(3) - 1] * g, fine),
    ):
        closed = jax.make_jaxpr(program)(group)
        assert [found.worst for found in ArgumentIndices(closed, [True]).outside([group])] == expected


@pytest.mark.slow
def test_a_fit_with_an_index_beyond_the_groups_is_an_error(key):
    guide = dgp.guides.InducingPoint(with_groups)
    svi = numpyro.infer.SVI(with_groups, guide, optax.adam(0.1), dgp.ELBO())
    X = jnp.linspace(0.0, 1.0, 3)[:, None]
    with pytest.raises(ValueError, match=r"fit: expected indices from 0 to 2 .* got 3 among the arguments"):
        dgp.fit(svi, key, 2, X, jnp.array([1, 2, 3]), X[:, 0], progress_bar=False)


@pytest.mark.slow
def test_predictions_outside_of_a_basis_are_warned_of(key):
    posterior = dgp.Posterior(with_groups, samples=GROUPED)
    group, X = jnp.array([0, 1, 2]), jnp.array([[0.0], [5.0], [1.0]])
    calls = {
        "predict": lambda X: posterior.predict(key, X, group),
        "log_density": lambda X: posterior.log_density(key, jnp.zeros(3), X, group),
        "functions": lambda X: posterior.functions(key)(X, group),
    }
    for call in calls.values():
        call(X / 5)
        with pytest.warns(UserWarning, match="inputs of layer 'f', for example 5.0, are outside of its Basis"):
            call(X)
