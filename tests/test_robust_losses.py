"""Robust losses of a normal y: closed forms against quadrature, their limits, and what refuses them."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.infer import SVI
from programs import X, Y, Z
from scipy import integrate, stats

import numpyro_dgp as dgp
from numpyro_dgp.functions.function_values import FunctionValues
from numpyro_dgp.likelihoods import Robust

LOC, VARIANCE = np.array([0.3, -0.5, 1.1]), np.array([0.4, 1.2, 0.05])
F = FunctionValues(jnp.array(LOC), jnp.array(VARIANCE), event_dim=0)
SLOPE, OFFSET, SCALE = -1.7, 0.2, np.array([0.3, 0.9, 2.5])
OBSERVED = np.array([0.5, -3.0, 40.0])


def affine(v):
    return dist.Normal(SLOPE * v + OFFSET, SCALE)


def total(power, s):
    """The integral of N(t; m, s^2)^power over t, which is the same for every m."""
    return integrate.quad(lambda t: stats.norm.pdf(t, 0.0, s) ** power, -12 * s, 12 * s, epsabs=1e-14)[0]


def beta_score(beta, y, m, s):
    """Basu et al. (1998), divided by beta, and with a constant that makes its limit log p."""
    return (np.exp((beta - 1) * stats.norm.logpdf(y, m, s)) - 1) / (beta - 1) - total(beta, s) / beta + 1 / beta


def gamma_score(gamma, y, m, s):
    """Fujisawa and Eguchi (2008), likewise."""
    ratio = np.exp((gamma - 1) * stats.norm.logpdf(y, m, s)) / total(gamma, s) ** ((gamma - 1) / gamma)
    return gamma / (gamma - 1) * (ratio - 1)


def by_quadrature(score, power, y, slope=SLOPE, offset=OFFSET, scale=SCALE):
    nodes, weights = np.polynomial.hermite_e.hermegauss(150)
    v = LOC[:, None] + np.sqrt(VARIANCE)[:, None] * nodes
    rows = zip(y, slope * v + offset, np.broadcast_to(scale, 3), strict=True)
    return [weights @ score(power, *row) / weights.sum() for row in rows]


@pytest.mark.parametrize("power", [1.3, 2.0])
@pytest.mark.parametrize(("which", "score"), [("beta", beta_score), ("gamma", gamma_score)])
def test_expectation_is_that_of_quadrature(which, score, power):
    found = dgp.Likelihood(F, affine, integrate=Robust(**{which: power})).log_prob(jnp.array(OBSERVED))
    np.testing.assert_allclose(found, by_quadrature(score, power, OBSERVED), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("which", ["beta", "gamma"])
def test_limit_is_the_expected_log_density(which):
    plain = dgp.Likelihood(F, affine).log_prob(jnp.array(OBSERVED))
    errors = []
    for c in (1e-4, 1e-6):
        found = dgp.Likelihood(F, affine, integrate=Robust(**{which: 1 + c})).log_prob(jnp.array(OBSERVED))
        errors.append(np.abs(found / plain - 1).max())
    assert errors[1] < 2e-4
    assert errors[1] < 0.02 * errors[0]  # of the first order in beta - 1


def test_an_outlier_has_no_influence():
    rows = dict(loc=jnp.zeros(1), conditional_variance=jnp.full(1, 0.1), event_dim=0)

    def slope(rule):
        def score(loc):
            f_x = FunctionValues(loc, rows["conditional_variance"], event_dim=0)
            return dgp.Likelihood(f_x, lambda v: dist.Normal(v, 0.5), integrate=rule).log_prob(jnp.full(1, 6.0)).sum()

        return float(jax.grad(score)(rows["loc"])[0])

    assert slope(None) == pytest.approx(24.0)
    assert abs(slope(Robust(beta=1.5))) < 1e-6
    assert abs(slope(Robust(gamma=1.5))) < 1e-6


def test_everything_else_is_that_of_the_normal():
    plain, robust = (dgp.Likelihood(F, affine, integrate=rule) for rule in (None, Robust(beta=1.5)))
    y = jnp.array(OBSERVED)
    assert (robust.log_marginal(y) == plain.log_marginal(y)).all()
    assert (robust.mean == plain.mean).all()
    assert (robust.variance == plain.variance).all()
    assert (robust.sample(jax.random.key(0)) == plain.sample(jax.random.key(0))).all()
    assert plain.normal_form() is not None
    assert robust.normal_form() is None
    assert repr(robust) == "Likelihood(Normal, Robust(beta=1.5), no bound of the evidence)"


def test_columns_and_missing_entries():
    """The sum over the observed entries of a row."""
    f_x = FunctionValues(jnp.array(LOC).reshape(3, 1) + jnp.zeros(2), jnp.array(VARIANCE).reshape(3, 1) + jnp.ones(2))
    y, observed = jnp.array(OBSERVED)[:, None] * jnp.array([1.0, -1.0]), np.array([[True, False]] * 3)
    normal = lambda v: dist.Normal(v, 0.5).to_event(1)  # noqa: E731
    found = dgp.Likelihood(f_x, normal, integrate=Robust(gamma=1.2), observed=observed).log_prob(y)
    first = FunctionValues(f_x.loc[:, 0], f_x.conditional_variance[:, 0], event_dim=0)
    alone = dgp.Likelihood(first, lambda v: dist.Normal(v, 0.5), integrate=Robust(gamma=1.2)).log_prob(y[:, 0])
    np.testing.assert_allclose(found, alone, rtol=1e-12)


@pytest.mark.parametrize(("which", "score", "power"), [("beta", beta_score, 1.001), ("gamma", gamma_score, 1.5)])
def test_float32(x32, which, score, power):
    f_x = FunctionValues(jnp.array(LOC, jnp.float32), jnp.array(VARIANCE, jnp.float32), event_dim=0)
    rule = Robust(**{which: power})
    found = dgp.Likelihood(f_x, lambda v: dist.Normal(v, 0.5), integrate=rule).log_prob(jnp.float32(OBSERVED))
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, by_quadrature(score, power, OBSERVED, 1.0, 0.0, 0.5), rtol=5e-5)


def model(X, y=None, batch=None, rule=Robust(beta=1.5), latent=False):
    noise = numpyro.sample("noise", dist.LogNormal(-1.0, 0.5))
    x = dgp.latent("w", X, 1) if latent else X
    g = dgp.gp("g", dgp.kernels.RBF(1.2, 0.7), dgp.Points(jnp.hstack([Z, Z])[:, : 1 + latent]))
    with numpyro.plate("data", len(X), subsample_size=batch) as i:
        v = g(x[i])
        numpyro.sample("y", dgp.Likelihood(v, lambda v: dist.Normal(v, noise), integrate=rule),
                       obs=None if y is None else y[i])  # fmt: skip


@pytest.mark.slow
def test_minibatches_are_unbiased():
    params = {"g_auto_loc": jnp.linspace(-1, 1, 8), "g_auto_scale_tril": 0.3 * jnp.eye(8), "noise_auto_value": 0.4}
    guide = dgp.guides.InducingPoint(model)
    loss = jax.jit(lambda key, batch: dgp.ELBO().loss(key, params, model, guide, X, Y, batch), static_argnums=1)
    losses = jax.vmap(lambda key: loss(key, 10))(jax.random.split(jax.random.key(0), 400))
    assert abs(losses.mean() - loss(jax.random.key(0), None)) < 4 * losses.std() / 20


def fit_of(program, steps=1500):
    guide = dgp.guides.InducingPoint(program)
    svi = SVI(program, guide, optax.adam(optax.cosine_decay_schedule(0.05, steps)), dgp.ELBO())
    result = svi.run(jax.random.key(0), steps, X, contaminated()[0], progress_bar=False)
    return dgp.Posterior(program, guide, result.params)


def contaminated():
    rng = np.random.default_rng(3)
    y = np.sin(2 * np.asarray(X)[:, 0]) + 0.1 * rng.normal(size=30)
    wrong = np.arange(30) % 10 == 4
    return jnp.asarray(np.where(wrong, y + 3.0, y)), wrong


@pytest.mark.slow
@pytest.mark.parametrize("rule", [Robust(beta=1.5), Robust(gamma=1.5)], ids=repr)
def test_a_tenth_of_outliers(rule):
    """The function is found, and the noise without the outliers; a normal y takes them for noise."""
    truth, errors = np.sin(2 * np.asarray(X)[:, 0]), {}
    for name, integral in (("robust", rule), ("normal", None)):
        posterior = fit_of(lambda X, y=None, integral=integral: model(X, y, rule=integral))
        f = posterior.predict_function(jax.random.key(1), X)
        errors[name] = float(np.sqrt(np.mean((f.mean - truth) ** 2))), float(posterior.params["noise_auto_loc"])
    assert errors["robust"][0] < 0.1 < 0.2 < errors["normal"][0]
    assert errors["robust"][1] < 0.2 < 0.5 < errors["normal"][1]


# --- refusals: what promises a bound of the evidence, or takes the log density for quadratic


GUIDE = dgp.guides.InducingPoint(model)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: dgp.ELBO().loss(jax.random.key(0), {}, model, dgp.guides.Collapsed(model), X, Y),
         "Collapsed: expected a Gaussian likelihood at 'y'.*Robust.beta=1.5., no bound of the evidence"),
        (lambda: numpyro.handlers.seed(dgp.for_mcmc(model, collapse=True), 0)(X, Y),
         "the likelihood at 'y' is Likelihood.Normal, Robust.beta=1.5., no bound"),
        (lambda: dgp.diagnostics.evidence(dgp.Posterior(model, GUIDE, {}), jax.random.key(0), X, Y),
         "evidence: expected the log density of the observations at 'y', whose integral is the evidence"),
        (lambda: dgp.fit_best(lambda depth: model, jax.random.key(0), X, Y, depths=(1,)),
         "fit_best: expected the log density of the observations at 'y'"),
    ],
)  # fmt: skip
def test_refusals(build, message):
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.slow
def test_importance_weights_are_refused():
    def program(X, y=None):
        g = dgp.gp("g", dgp.kernels.RBF(1.2, 0.7), dgp.Points(jnp.hstack([Z, Z])))
        with numpyro.plate("data", len(X)):
            x = dgp.latent("w", X, 1)
            numpyro.sample("y", dgp.Likelihood(g(x), lambda v: dist.Normal(v, 0.3), integrate=Robust(beta=1.5)), obs=y)

    guide = dgp.guides.ImportanceWeighted(program, num_samples=3)
    with pytest.raises(ValueError, match="expected the log density of the observations at 'y'"):
        SVI(program, guide, optax.adam(0.1), dgp.ELBO()).run(jax.random.key(0), 1, X, Y, progress_bar=False)


@pytest.mark.slow
def test_nuts_samples_the_generalised_posterior():
    """No layer is integrated, and the log density is that of the prior plus the scores."""
    values = {"g": jnp.linspace(-1, 1, 8), "noise": jnp.array(0.4)}
    program = dgp.for_mcmc(model)
    density, sites = numpyro.infer.util.log_density(numpyro.handlers.seed(program, 0), (X, Y), {}, values)
    assert sites["g"]["type"] == "sample"
    prior = dist.Normal().log_prob(values["g"]).sum() + dist.LogNormal(-1.0, 0.5).log_prob(0.4)
    with numpyro.handlers.seed(rng_seed=0), numpyro.handlers.substitute(data=values):
        v = dgp.gp("g", dgp.kernels.RBF(1.2, 0.7), dgp.Points(Z))(X)
    scores = dgp.Likelihood(v, lambda v: dist.Normal(v, 0.4), integrate=Robust(beta=1.5)).log_prob(Y)
    np.testing.assert_allclose(density, prior + scores.sum(), rtol=1e-10)
