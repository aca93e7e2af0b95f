"""Tempered training: the divergence is multiplied, nothing else, and the end is that of the bound itself."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.infer import SVI, Trace_ELBO

import numpyro_dgp as dgp
from numpyro_dgp import guides
from numpyro_dgp.optim import NaturalGradient, Tempered, log_linear

KEY = jax.random.key(0)
X = jnp.linspace(-1, 1, 9)[:, None]
Y = jnp.sin(3 * X[:, 0])
Z = jnp.linspace(-1, 1, 4)[:, None]


def model(X, y=None):
    f = dgp.gp("f", dgp.kernels.RBF(1.3, 0.5), dgp.Points(Z))
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dgp.Likelihood(f(X), lambda v: dist.Normal(v, 0.3)), obs=y)


GUIDE = guides.InducingPoint(model)
START = {"f_auto_loc": jnp.array([0.3, -0.2, 0.5, 0.1]), "f_auto_scale_tril": 0.6 * jnp.eye(4)}


def divergence(params):
    m, root = params["f_auto_loc"], jnp.tril(params["f_auto_scale_tril"])
    return 0.5 * ((root**2).sum() + m @ m - 4) - jnp.log(jnp.diag(root)).sum()


def fitted(optimizer, steps, objective=None, init=None):
    svi = SVI(model, GUIDE, optimizer, objective or dgp.ELBO())
    return dgp.fit(svi, KEY, steps, X, Y, init_params=init or START, progress_bar=False)


@pytest.mark.long
def test_losses_and_steps_are_those_of_a_dense_formula():
    schedule = optax.linear_schedule(0.0, 1.0, 4)
    bound = -float(dgp.ELBO().loss(KEY, START, model, GUIDE, X, Y))
    expected = [-bound + (float(schedule(step)) - 1) * float(divergence(START)) for step in range(6)]
    found = fitted(Tempered(optax.sgd(0.0), schedule), 6)  # steps of length zero
    np.testing.assert_allclose(found.losses, expected, rtol=1e-6)

    def loss(loc):
        params = START | {"f_auto_loc": loc}
        return dgp.ELBO().loss(KEY, params, model, GUIDE, X, Y) + (0.3 - 1) * divergence(params)

    step = fitted(Tempered(optax.sgd(0.01), 0.3), 1).params["f_auto_loc"]
    expected = START["f_auto_loc"] - 0.01 * jax.grad(loss)(START["f_auto_loc"])
    np.testing.assert_allclose(step, expected, rtol=1e-6)


@pytest.mark.long
def test_one_is_no_temperature_and_natural_gradients_go_with_it():
    for make in (lambda: optax.adam(0.05), lambda: NaturalGradient(GUIDE, log_linear(0.01, 0.5, 10), optax.adam(0.05))):
        plain, same = fitted(make(), 20), fitted(Tempered(make(), 1.0), 20)
        np.testing.assert_allclose(same.losses, plain.losses, rtol=1e-9)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-9), same.params, plain.params)
        warm = fitted(Tempered(make(), optax.linear_schedule(0.0, 1.0, 10)), 20)
        assert not np.allclose(warm.losses[:5], plain.losses[:5])


@pytest.mark.slow
def test_a_constant_temperature_has_the_optimum_of_the_tempered_bound():
    """That of a Gaussian likelihood with the variance times the temperature; a natural step of 1 / 0.5 leads there."""
    result = fitted(Tempered(NaturalGradient(GUIDE, 2.0, optax.sgd(0.0)), 0.5), 2)
    A = np.linalg.solve(np.linalg.cholesky(dgp.kernels.RBF(1.3, 0.5).gram(Z) + 1.3e-6 * np.eye(4)),
                        np.asarray(dgp.kernels.RBF(1.3, 0.5)(Z, X))).T  # fmt: skip
    precision = np.eye(4) + A.T @ A / (0.5 * 0.3**2)
    mean = np.linalg.solve(precision, A.T @ np.asarray(Y) / (0.5 * 0.3**2))
    root = np.asarray(result.params["f_auto_scale_tril"])
    np.testing.assert_allclose(result.params["f_auto_loc"], mean, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(root @ root.T, np.linalg.inv(precision), rtol=1e-3, atol=1e-6)


@pytest.mark.long
def test_warm_up_ends_at_the_same_bound():
    rates = optax.cosine_decay_schedule(0.05, 1500)
    plain = fitted(optax.adam(rates), 1500)
    warm = fitted(Tempered(optax.adam(rates), optax.linear_schedule(0.0, 1.0, 300)), 1500)
    np.testing.assert_allclose(warm.losses[-1], plain.losses[-1], rtol=1e-4)


@pytest.mark.long
def test_particles_in_stages_end_at_the_same_bound():
    """Few particles first and more of them later, from the state of the first stage, as docs/bound.md shows it."""

    def deep(X, y=None):
        f, g = (dgp.gp(name, dgp.kernels.RBF(1.3, 0.5), dgp.Points(Z)) for name in "fg")
        with numpyro.plate("data", len(X)):
            h = numpyro.sample("h", f(X, noise=1e-2))
            numpyro.sample("y", dgp.Likelihood(g(h[:, None]), lambda v: dist.Normal(v, 0.3)), obs=y)

    guide = guides.InducingPoint(deep)

    def bounds(stages):
        svi, state = SVI(deep, guide, optax.adam(optax.cosine_decay_schedule(0.05, 1500)), dgp.ELBO()), None
        for particles, steps in stages:
            svi.loss = dgp.ELBO(particles)
            result = svi.run(KEY, steps, X, Y, init_state=state, progress_bar=False)
            state = result.state
        assert state.optim_state[0] == 1500
        keys = jax.random.split(KEY, 400)
        return -jax.vmap(lambda key: dgp.ELBO().loss(key, result.params, deep, guide, X, Y))(keys)

    staged, constant = bounds([(1, 1000), (8, 500)]), bounds([(8, 1500)])
    error = np.hypot(staged.std(), constant.std()) / np.sqrt(400)
    assert abs(staged.mean() - constant.mean()) < 4 * error + 0.02  # and what Adam leaves of its own noise


@pytest.mark.long
def test_predictive_objective_has_its_divergence_tempered():
    result = fitted(Tempered(optax.sgd(0.0), 0.25), 1, dgp.PredictiveObjective(regularisation=2.0))
    value = dgp.PredictiveObjective(regularisation=0.5).loss(KEY, START, model, GUIDE, X, Y)
    np.testing.assert_allclose(result.losses[0], value, rtol=1e-6)


@pytest.mark.slow
def test_what_has_no_temperature_is_refused():
    with pytest.raises(ValueError, match=r"expected an objective with a temperature, dgp.ELBO\(\)"):
        fitted(Tempered(optax.adam(0.1), 0.5), 1, Trace_ELBO())
    collapsed = guides.Collapsed(model)
    svi = SVI(model, collapsed, Tempered(optax.adam(0.1), 0.5), dgp.ELBO())
    with pytest.raises(ValueError, match="its q\\(v\\) is the optimum of the bound, leave Tempered out"):
        dgp.fit(svi, KEY, 1, X, Y, progress_bar=False)
    for temperature in (-0.1, float("nan"), float("inf"), "hot", lambda step: [1.0, 2.0]):
        with pytest.raises(ValueError, match="Tempered: expected a temperature that is finite and not negative"):
            Tempered(optax.adam(0.1), temperature)
    with pytest.raises(ValueError, match=r"Tempered: expected an optimiser of optax, NumPyro or dgp.optim, got float"):
        Tempered(0.1, 0.5)


@pytest.mark.long
def test_checkpoints_and_stable_updates(tmp_path):
    schedule = optax.linear_schedule(0.0, 1.0, 10)

    def run(steps, **options):
        svi = SVI(model, GUIDE, Tempered(optax.adam(0.05), schedule), dgp.ELBO())
        return dgp.fit(svi, KEY, steps, X, Y, progress_bar=False, stable_update=True, **options)

    run(8, checkpoint=tmp_path / "fit.npz")
    resumed, whole = run(16, checkpoint=tmp_path / "fit.npz"), run(16)
    np.testing.assert_array_equal(resumed.losses, whole.losses)
