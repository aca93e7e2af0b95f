"""A new part is one file: toys of a representation, a rule, a kernel, a likelihood, an acquisition and a source."""

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.infer import MCMC, NUTS, SVI, Trace_ELBO
from programs import NOISE, X, Y, Z, agree, draws_of_bound, random_params
from scipy import stats
from toys.averages import Averages
from toys.batches import Rows
from toys.linear_below import LinearBelow
from toys.log_improvement import log_improvement
from toys.maxwell import Maxwell
from toys.maxwell_closed_form import MAXWELL
from toys.probit import probit
from toys.sloped_kernel import Sloped

import numpyro_dgp as dgp
from numpyro_dgp.bounds import Observations, from_moments
from numpyro_dgp.kernels.expectations import psi1, psi2

TOYS = Path(__file__).parent / "toys"
PAGE = Path(__file__).parent.parent / "docs" / "extending.md"
KERNEL = dgp.kernels.RBF(1.2, 0.7)


def shallow(X, y=None, *, inducing=Averages(-2.2, 2.2, 12), kernel=KERNEL):
    f = dgp.gp("f", kernel, inducing)
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dgp.Likelihood(f(X), lambda v: dist.Normal(v, NOISE)), obs=y)


def deep(X, y=None, *, process_noise=0.1):
    """Averages below, points with the toy kernel above."""
    f = dgp.gp(
        "f", dgp.kernels.RBF(0.3, 0.9), Averages(-2.2, 2.2, 6), outputs=2, mean=dgp.means.LinearMean(np.ones((1, 2)))
    )
    g = dgp.gp("g", Sloped(0.5, 1.5), dgp.Points(jnp.hstack([Z, -Z])))
    with numpyro.plate("data", len(X)):
        h = numpyro.sample("h", f(X, noise=process_noise))
        numpyro.sample("y", dgp.Likelihood(g(h), lambda v: dist.Normal(v, NOISE)), obs=y)


@pytest.mark.parametrize("name", sorted(path.stem for path in TOYS.glob("*.py")))
def test_the_page_shows_the_files(name):
    lines = (TOYS / f"{name}.py").read_text().strip().splitlines(keepends=True)
    shown = "".join(line for line in lines if not line.startswith("from toys."))  # defined further up on the page
    assert shown in PAGE.read_text()


@pytest.mark.slow
def test_the_representation_is_a_representation():
    with numpyro.handlers.seed(rng_seed=0):
        f = dgp.gp("f", KERNEL, Averages(-2.2, 2.2, 12))
    assert isinstance(f, dgp.extend.RandomFunction)
    assert f.site == "f"
    again = jax.tree.unflatten(jax.tree.structure(f), jax.tree.leaves(f))
    np.testing.assert_allclose(again(X).mean, f(X).mean)
    with numpyro.handlers.seed(rng_seed=0), pytest.raises(ValueError, match="expected one kernel for all outputs"):
        dgp.gp("f", [KERNEL, KERNEL], Averages(-2.2, 2.2, 12), outputs=2)


@pytest.mark.slow
def test_features_are_covariances_with_whitened_averages():
    """Against the dense joint covariance of values and averages."""
    bins = Averages(-2.2, 2.2, 5, points=3)
    with numpyro.handlers.seed(rng_seed=0):
        f = dgp.gp("f", KERNEL, bins)
    B = np.kron(np.eye(5), np.full(3, 1 / 3))  # averages of the points
    K = np.asarray(KERNEL(f.x, f.x))
    L = np.linalg.cholesky(B @ K @ B.T)
    A = np.asarray(KERNEL(X, f.x)) @ B.T @ np.linalg.inv(L).T
    np.testing.assert_allclose(f.features(X), A, atol=1e-6)
    wanted = np.asarray(KERNEL.gram(X)) - A @ A.T
    np.testing.assert_allclose(f.joint(X).conditional_covariance[0], wanted, atol=1e-6)
    np.testing.assert_allclose(f(X).variance, np.diag(wanted), atol=1e-6)


@pytest.mark.slow
def test_the_bound_is_below_the_evidence_and_near_it():
    guide = dgp.guides.InducingPoint(shallow)
    svi = SVI(shallow, guide, dgp.optim.NaturalGradient(guide, 1.0, optax.sgd(0.0)), dgp.ELBO())
    losses = svi.run(jax.random.key(0), 2, X, Y, progress_bar=False).losses
    K = np.asarray(KERNEL.gram(X)) + NOISE**2 * np.eye(len(X))
    y = np.asarray(Y)
    evidence = -0.5 * (y @ np.linalg.solve(K, y) + np.linalg.slogdet(2 * np.pi * K)[1])
    assert evidence - 1.0 < -losses[1] < evidence + 1e-6


GUIDES = {
    "propagate": dgp.guides.InducingPoint,
    "toy rule": lambda model: dgp.guides.InducingPoint(model, sites={"h": LinearBelow()}),
    "given inducing": lambda model: dgp.guides.InducingPoint(model, sites={"h": dgp.guides.GivenInducing()}),
    "free weights": lambda model: dgp.guides.InducingPoint(model, sites={"h": dgp.guides.GivenInducing("free")}),
}


@pytest.mark.long
@pytest.mark.parametrize("name", GUIDES)
def test_bounds_agree(name):
    guide = GUIDES[name](deep)
    params = random_params(deep, guide, X, Y)
    ours = draws_of_bound(dgp.ELBO(), params, deep, guide, X, Y, num=1000)
    assert agree(ours, draws_of_bound(Trace_ELBO(), params, deep, guide, X, Y))


@pytest.mark.long
def test_the_rule_keeps_the_promises_of_a_guide():
    dgp.testing.check_guide(deep, GUIDES["toy rule"](deep), X, Y)


@pytest.mark.slow
def test_the_kernel_is_a_kernel():
    dgp.testing.check_kernel(Sloped(0.5, 0.8), np.random.default_rng(0).normal(size=(9, 2)))


@pytest.mark.long
def test_psi_statistics_of_the_kernel():
    """In closed form against nodes."""
    rng = np.random.default_rng(0)
    kernel, loc, variance = Sloped(0.5, 0.8), rng.normal(size=(4, 2)), rng.uniform(0.1, 0.5, size=(4, 2))
    at, nodes = rng.normal(size=(3, 2)), dgp.likelihoods.GaussHermite(30)
    for statistic in (psi1, psi2):
        exact = statistic(kernel, loc, variance, at)
        np.testing.assert_allclose(exact, statistic(kernel, loc, variance, at, integrate=nodes), atol=1e-6)
    data = from_moments(kernel, at, jnp.eye(3), loc, variance, Observations(jnp.zeros(4), 0.5))
    assert np.isfinite(data.bound())


@pytest.mark.long
def test_predictions_and_function_draws():
    model = partial(deep, process_noise=None)
    guide = dgp.guides.InducingPoint(model)
    posterior = dgp.Posterior(model, guide, random_params(model, guide, X, Y))
    new = jnp.linspace(-2, 2, 7)[:, None]
    assert posterior.predict(jax.random.key(0), new).mean.shape == (7,)
    assert np.isfinite(posterior.log_density(jax.random.key(0), jnp.zeros(7), new)).all()
    functions = posterior.using(num_samples=3).functions(jax.random.key(1))
    np.testing.assert_allclose(functions(new[2:4])["y"], functions(new)["y"][:, 2:4], rtol=1e-9)
    assert set(posterior.layers(jax.random.key(2), new)) == {"h", "y"}


@pytest.mark.long
def test_draws_of_the_function_have_its_moments():
    guide = dgp.guides.InducingPoint(shallow)
    params = random_params(shallow, guide, X, Y)
    posterior, new = dgp.Posterior(shallow, guide, params), jnp.linspace(-2, 2, 5)[:, None]
    draws = posterior.using(num_samples=1000).functions(jax.random.key(1), num_features=200)(new)["y"]
    predicted = posterior.using(num_samples=2).predict(jax.random.key(0), new)
    variance = predicted.variance - NOISE**2
    np.testing.assert_array_less(abs(draws.mean(0) - predicted.mean), 4 * np.sqrt(variance / 1000))
    np.testing.assert_allclose(draws.var(0), variance, rtol=4 * np.sqrt(2 / 1000))


@pytest.mark.long
def test_chains():
    mcmc = MCMC(NUTS(dgp.for_mcmc(deep)), num_warmup=20, num_samples=20, progress_bar=False)
    mcmc.run(jax.random.key(0), X, Y)
    assert all(np.isfinite(values).all() for values in mcmc.get_samples().values())


@pytest.mark.long
def test_importance_weights():
    def model(X, y=None):
        f = dgp.gp("f", KERNEL, Averages(-4.0, 4.0, 6), outputs=1)
        g = dgp.gp("g", KERNEL, dgp.Points(Z))
        with numpyro.plate("data", len(X)):
            w = dgp.latent("w", None, 1)
            h = numpyro.sample("h", f(w))
            numpyro.sample("y", dgp.Likelihood(g(h), lambda v: dist.Normal(v, NOISE)), obs=y)

    guide = dgp.guides.ImportanceWeighted(model, num_samples=3)
    svi = SVI(model, guide, optax.adam(0.01), dgp.ELBO())
    assert np.isfinite(svi.run(jax.random.key(0), 3, X, Y, progress_bar=False).losses).all()


@pytest.mark.slow
def test_the_source():
    source = Rows(np.asarray(X), np.asarray(Y), size=10)
    assert isinstance(source, dgp.extend.BatchSource)
    program = dgp.minibatch(shallow, data=source.num_rows)
    svi = SVI(program, dgp.guides.InducingPoint(program), optax.adam(0.05), dgp.ELBO())
    losses = dgp.fit_stream(svi, jax.random.key(0), 200, source, progress_bar=False).losses
    assert losses[-50:].mean() < losses[:50].mean()


@pytest.mark.long
def test_the_acquisition_is_the_share_of_draws_that_improve():
    guide = dgp.guides.InducingPoint(deep)
    posterior = dgp.Posterior(deep, guide, random_params(deep, guide, X, Y))
    x, best = jnp.array([[0.3]]), 0.2
    value = jnp.exp(log_improvement(posterior.using(num_samples=1000), jax.random.key(1), best)(x))
    draws = posterior.using(num_samples=4000).functions(jax.random.key(2))(x)["y"]
    share = (draws < best).mean()
    assert 0.05 < share < 0.95
    np.testing.assert_allclose(value, share, atol=0.05)  # some four standard errors


@pytest.mark.slow
def test_the_acquisition_is_maximised_and_searched_by():
    guide = dgp.guides.InducingPoint(shallow)
    params = random_params(shallow, guide, X, Y)
    posterior = dgp.Posterior(shallow, guide, params).using(num_samples=1)
    log_pi = log_improvement(posterior, jax.random.key(1), -1.0)
    places = jnp.linspace(-2, 2, 401)[:, None, None]
    values = jax.vmap(log_pi)(places)
    found = dgp.design.maximise(log_pi, [[-2.0, 2.0]], jax.random.key(2), num_candidates=64)
    assert found.value >= values.max() - 1e-6

    def acquisition(posterior, seen, key):
        return log_improvement(posterior, key, seen.best)

    search = dgp.design.Search(
        shallow, dgp.guides.InducingPoint, [[-2.0, 2.0]], acquisition, initial=[[-1.0], [0.5]], num_steps=2
    )
    record = search.start(jax.random.key(0))
    assert np.isfinite(search.propose(record.add(record.pending[:, 0] ** 2)).pending).all()


@pytest.mark.slow
def test_the_distribution_is_that_of_a_length():
    """Density and moments against SciPy, draws against both, and the integrals over v against draws."""
    d, theirs = Maxwell(jnp.array([0.5, 2.0])), stats.maxwell(scale=[0.5, 2.0])
    np.testing.assert_allclose(d.log_prob(jnp.array([0.7, 1.2])), theirs.logpdf([0.7, 1.2]), rtol=1e-6)
    np.testing.assert_allclose((d.mean, d.variance), (theirs.mean(), theirs.var()), rtol=1e-6)
    draws = d.sample(jax.random.key(0), (4000,))
    np.testing.assert_array_less(abs(draws.mean(0) - d.mean), 4 * np.sqrt(d.variance / 4000))
    for integrate in (None, MAXWELL):
        dgp.testing.check_likelihood(lambda v: Maxwell(jnp.exp(v)), jnp.linspace(0.5, 3.0, 4), integrate=integrate)


F = dgp.extend.FunctionValues(jnp.linspace(-1.0, 1.0, 5), jnp.linspace(0.2, 2.0, 5), event_dim=0)


def test_a_row_of_closed_forms_is_quadrature():
    conditional, y = lambda v: Maxwell(jnp.exp(0.5 * v + 1)), jnp.linspace(0.1, 3.0, 5)
    ours = dgp.Likelihood(F, conditional, integrate=MAXWELL)
    assert repr(ours) == "Likelihood(Maxwell, closed form)"
    fine = dgp.Likelihood(F, conditional, integrate=dgp.likelihoods.GaussHermite(60))
    np.testing.assert_allclose(ours.log_prob(y), fine.log_prob(y), rtol=1e-5)
    np.testing.assert_allclose(ours.log_marginal(y), dgp.Likelihood(F, conditional).log_marginal(y))
    np.testing.assert_allclose(jax.jit(ours.log_prob)(y), ours.log_prob(y), rtol=1e-6)


def test_a_row_of_another_family_does_not_apply():
    y = jnp.ones(5)
    for conditional in (lambda v: Maxwell(jnp.exp(v**2)), lambda v: dist.StudentT(3.0, v, 0.1)):
        ours, theirs = (dgp.Likelihood(F, conditional, integrate=integrate) for integrate in (MAXWELL, None))
        assert repr(ours) == repr(theirs)
        np.testing.assert_array_equal(ours.log_prob(y), theirs.log_prob(y))


def test_a_strategy_comes_first_and_others_follow():
    conditional, y = lambda v: dist.Bernoulli(jax.scipy.special.ndtr(v)), jnp.array([0, 1, 1, 0, 1])
    ours, theirs = dgp.Likelihood(F, conditional, integrate=probit), dgp.Likelihood(F, conditional)
    exact = jax.scipy.special.log_ndtr((2 * y - 1) * F.loc / jnp.sqrt(1 + F.variance))
    np.testing.assert_allclose(ours.log_marginal(y), exact, rtol=1e-6)
    np.testing.assert_allclose(ours.log_marginal(y), theirs.log_marginal(y), rtol=1e-4)
    np.testing.assert_allclose(jax.jit(ours.log_marginal)(y), ours.log_marginal(y), rtol=1e-6)
    np.testing.assert_array_equal(ours.log_prob(y), theirs.log_prob(y))
    assert (
        repr(dgp.Likelihood(F, conditional, integrate=probit, collapse="marginal")) == "Likelihood(Bernoulli, probit)"
    )
    none = dgp.Likelihood(F, conditional, integrate=lambda case: None)
    np.testing.assert_array_equal(none.log_marginal(y), theirs.log_marginal(y))


@pytest.mark.parametrize(
    ("integrate", "message"),
    [
        (lambda case: 0.0, "to return an Integral or None, got float: dgp.extend.Integral"),
        (
            dgp.likelihoods.GaussHermite,
            "expected integrate=dgp.likelihoods.GaussHermite\\(n\\) or dgp.likelihoods.MonteCarlo\\(n\\), got type",
        ),
    ],
)
def test_what_is_no_integral(integrate, message):
    with pytest.raises(ValueError, match=message):
        dgp.Likelihood(F, lambda v: dist.Bernoulli(logits=v), integrate=integrate)
