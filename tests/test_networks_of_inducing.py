"""Examples of inducing values at the end of a diffusion, and of those that a network draws: where they start, their
densities."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import optax
import pytest
from diffusion import Diffusion
from implicit import Implicit
from numpyro import handlers
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.util import log_density
from programs import X, Y, agree, bound, deep, draws_of_bound
from test_flow_inducing import evidence, labels, posterior_of, start, x, y

import numpyro_dgp as dgp
from numpyro_dgp import guides as G
from numpyro_dgp.optim import NaturalGradient

RULES = {"diffusion": Diffusion(steps=4), "implicit": Implicit(draws=200)}


def moved(params, scale=0.3):
    """Parameters away from the start, factors kept triangular with a positive diagonal."""
    keys = dict(zip(params, jax.random.split(jax.random.key(7), len(params)), strict=True))
    new = {n: v + scale * jax.random.normal(keys[n], v.shape, v.dtype) for n, v in params.items()}
    return {n: jnp.tril(v) if n.endswith("tril") else v for n, v in new.items()}


def away_from_the_start(rule, scale=0.3):
    """The distribution at a site of shape (2, 2), with parameters that are not those of the start."""
    return posterior_of(rule, moved(posterior_of(rule, None)[1], scale))[0]


@pytest.mark.long
def test_they_start_as_the_gaussian():
    for rule in RULES.values():
        q, params = posterior_of(rule, None)
        full, _ = posterior_of(G.Full(), {n: params[n] for n in ("f_auto_loc", "f_auto_scale_tril")})
        draw, inside = q.sample_with_intermediates(jax.random.key(0))
        tolerance = 1e-10 if rule is RULES["diffusion"] else 0.3  # moments of draws, in four dimensions
        np.testing.assert_allclose(q.log_prob(draw, inside), full.log_prob(draw), atol=tolerance)
        several = q.sample(jax.random.key(1), (2000,)).reshape(2000, -1)
        covariance = jnp.cov(several.T)
        error = jnp.sqrt((covariance**2 + jnp.outer(jnp.diag(covariance), jnp.diag(covariance))) / 2000)
        np.testing.assert_array_less(abs(covariance - jnp.kron(jnp.eye(2), full.covariance[0])), 4.5 * error)


@pytest.mark.long
def test_paths_weigh_as_much_as_any_density():
    """The mean of p(v) / q~ over paths is the integral of p, whatever p: here of the Gaussian at the base."""
    bent = away_from_the_start(RULES["diffusion"], 0.1)
    draws, inside = bent.sample_with_intermediates(jax.random.key(0), (20_000,))
    weights = np.exp(bent.base.log_prob(draws) - bent.log_prob(draws, inside))
    assert abs(weights.mean() - 1) < 4 * weights.std() / np.sqrt(len(weights))
    assert weights.std() / np.sqrt(len(weights)) < 0.1
    assert abs(bent.log_prob(draws, inside) - bent.base.log_prob(draws)).mean() > 0.1


@pytest.mark.slow
def test_a_path_by_hand():
    """The densities of all steps one by one, in both directions."""
    bent = away_from_the_start(RULES["diffusion"])
    key = jax.random.key(3)
    draw, inside = bent.sample_with_intermediates(key)
    white = jax.random.normal(key, (5, 4))
    z, log_q, log_forward = white[0], _normal(white[0], 0.0, 1.0), 0.0
    for k, variance in enumerate(bent.variances):
        at = jnp.concatenate([z, jnp.eye(4)[k]])
        W0, b0, W1, b1 = bent.drift
        drift = jnp.tanh(at @ W0 + b0) @ W1 + b1
        a, s = np.sqrt(1 - variance), np.sqrt(variance)
        loc, scale = a * z + s * drift, s * jnp.exp(bent.log_scales[k])
        new = loc + scale * white[k + 1]
        log_q, log_forward = log_q + _normal(new, loc, scale), log_forward + _normal(z, a * new, s)
        z = new
    np.testing.assert_allclose(draw, bent.base.from_white(z.reshape(2, 2)), rtol=1e-10)
    log_det = jnp.linalg.slogdet(bent.base.scale_tril)[1].sum()
    np.testing.assert_allclose(bent.log_prob(draw, inside), log_q - log_forward - log_det, rtol=1e-8)


def _normal(value, loc, scale):
    return jax.scipy.stats.norm.logpdf(value, loc, scale).sum()


@pytest.mark.long
def test_the_critic_learns_the_ratio_of_two_gaussians():
    """Of a generator that makes two columns one, of z_0 + c z_1 and z_1: moments do not tell that they are correlated.

    Units of tanh are linear at small weights: ``size`` of them are used, and weights behind them are as large.
    """
    q, params = posterior_of(Implicit(draws=500), None)
    small, c = 1e-3, 1.0
    shifted = params | {
        "f_auto_generator_W0": jnp.zeros_like(params["f_auto_generator_W0"]).at[1, 0].set(small),
        "f_auto_generator_W1": jnp.zeros_like(params["f_auto_generator_W1"]).at[0, 0].set(c / small),
    }
    names = [n for n in params if "critic" in n]
    optimizer = optax.adam(optax.cosine_decay_schedule(0.02, 400))

    def loss(critic, key):
        return posterior_of(Implicit(draws=500), shifted | critic)[0].reference(key).loss

    def step(carry, key):
        critic, state = carry
        updates, state = optimizer.update(jax.grad(loss)(critic, key), state)
        return (optax.apply_updates(critic, updates), state), None

    critic = {n: params[n] for n in names}
    (critic, _), _ = jax.lax.scan(step, (critic, optimizer.init(critic)), jax.random.split(jax.random.key(0), 400))
    q = posterior_of(Implicit(draws=500), shifted | critic)[0]
    z = q.white(jax.random.key(1), (1000,))
    covariance = jnp.eye(4).at[:2, :2].set(jnp.array([[1 + c**2, c], [c, 1.0]]))
    truth = dist.MultivariateNormal(jnp.zeros(4), covariance).log_prob(z)
    value = q.base.from_white(z.reshape(-1, 2, 2))
    log_det = jnp.linalg.slogdet(q.base.scale_tril)[1].sum()
    error = q.log_prob(value) + log_det - truth
    without = dist.Normal(0, jnp.sqrt(jnp.diag(covariance))).to_event(1).log_prob(z) - truth
    assert np.sqrt(np.mean(error**2)) < 0.5 * np.sqrt(np.mean(without**2))
    assert abs(error.mean()) < 0.25 * abs(without.mean())


@pytest.mark.long
def test_density_and_critic_have_gradients_of_their_own():
    """The critic's is that of its loss, the others' that of the density with the critic fixed."""
    bent = away_from_the_start(RULES["implicit"])
    key = jax.random.key(0)

    def density(q):
        draw, inside = q.sample_with_intermediates(key)
        return q.log_prob(draw, inside)

    gradient = jax.grad(density)(bent)
    loss = jax.grad(lambda q: q.reference(jax.random.split(key)[1]).loss)(bent)
    for found, expected in zip(jax.tree.leaves(gradient.critic), jax.tree.leaves(loss.critic), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-8, atol=1e-12)
    assert all(not leaf.any() for leaf in jax.tree.leaves(loss.generator))


@pytest.mark.long
@pytest.mark.parametrize("name", list(RULES))
def test_every_parameter_has_a_gradient(name):
    """The network of the published code of diffusions had none."""
    guide = G.InducingPoint(labels, inducing=RULES[name])
    gradient = jax.jit(jax.grad(lambda p: bound(dgp.ELBO(), p, labels, guide, x, y)))(moved(start(guide, x, y)))
    assert all(abs(value).max() > 0 for value in gradient.values())
    assert len(gradient) == {"diffusion": 2 + 4 + 1, "implicit": 2 + 4 + 6}[name]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: start(G.InducingPoint(deep, sites={"h": Diffusion()}), X, Y),
            "expected site 'h' to be inducing values",
        ),
        (
            lambda: start(G.InducingPoint(deep, sites={"h": Implicit()}), X, Y),
            "expected site 'h' to be inducing values",
        ),
        (lambda: posterior_of(Diffusion(), None)[0].log_prob(jnp.zeros((2, 2))), "expected a draw with the path"),
    ],
)
def test_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.long
@pytest.mark.parametrize("name", list(RULES))
def test_natural_gradients_are_refused(name):
    guide = G.InducingPoint(labels, inducing=RULES[name])
    svi = SVI(labels, guide, NaturalGradient(guide, 0.1, optax.adam(0.01)), dgp.ELBO())
    with pytest.raises(ValueError, match=r"the guide has none: give the site guides\.Full"):
        svi.run(jax.random.key(0), 1, x, y, progress_bar=False)


@pytest.mark.long
@pytest.mark.parametrize("name", list(RULES))
def test_same_objective_as_with_everything_drawn(name):
    """Of a base that follows the layer below, at parameters away from the start."""
    rule = {"diffusion": Diffusion(G.MarkovInducing(), 3), "implicit": Implicit(G.MarkovInducing(), draws=5)}[name]
    guide = G.InducingPoint(deep, sites={"g": rule})
    params = moved(start(guide, X, Y), 0.1)
    ours = draws_of_bound(dgp.ELBO(), params, deep, guide, X, Y, num=10_000)
    stock = draws_of_bound(Trace_ELBO(), params, deep, guide, X, Y, num=10_000)
    assert agree(ours, stock)
    posterior = dgp.Posterior(deep, guide, params)
    assert posterior.using(num_samples=2).functions(jax.random.key(0))(X[:4])["h"].shape == (2, 4, 1)
    assert jnp.isfinite(posterior.using(num_samples=5).predict(jax.random.key(0), X[:4]).mean).all()


@pytest.mark.long
def test_single_precision():
    with jax.enable_x64(False):
        for rule in RULES.values():
            q, _ = posterior_of(rule, None)
            draw, inside = q.sample_with_intermediates(jax.random.key(0))
            assert draw.dtype == q.log_prob(draw, inside).dtype == jnp.float32


def fitted(rule, loss, steps):
    guide = G.InducingPoint(labels, inducing=rule)
    svi = SVI(labels, guide, optax.adam(optax.cosine_decay_schedule(0.01, steps)), loss)
    params = dgp.fit(svi, jax.random.key(0), steps, x, y, progress_bar=False).params
    draws = draws_of_bound(dgp.ELBO(), params, labels, guide, x, y, num=20_000)
    return guide, params, draws.mean(), draws.std() / np.sqrt(len(draws))


@pytest.mark.long
def test_a_diffusion_gains_on_a_skewed_posterior():
    """From the optimum of one Gaussian, -1.137, towards the evidence, -1.077, and not above it."""
    _, _, found, error = fitted(Diffusion(), dgp.ELBO(8), 3000)
    assert found - 3 * error > -1.13
    assert found < evidence() + 3 * error


@pytest.mark.long
def test_an_implicit_posterior_is_skewed_where_the_posterior_is():
    """By quadrature. What it maximises is close to the evidence, but may be above it."""
    guide, params, found, _ = fitted(Implicit(draws=200), dgp.ELBO(4), 2000)
    line = jnp.linspace(-7, 7, 281)
    grid = jnp.stack(jnp.meshgrid(line, line), -1).reshape(-1, 2)
    weights = jax.nn.softmax(jax.vmap(lambda v: log_density(labels, (x, y), {}, {"f": v})[0])(grid))
    draw = handlers.trace(handlers.substitute(guide, data=params))
    keys = jax.random.split(jax.random.key(1), 20_000)
    draws = jax.vmap(lambda key: handlers.seed(draw, key)(x, y)["f"])(keys)
    skewness = [_skewness(draws[:, 0], jnp.full(len(draws), 1 / len(draws))), _skewness(grid[:, 0], weights)]
    assert skewness[1] > 0.2
    assert 0.4 * skewness[1] < skewness[0] < 1.6 * skewness[1]
    assert abs(found - evidence()) < 0.05


def _skewness(values, weights):
    residual = values - weights @ values
    return weights @ residual**3 / (weights @ residual**2) ** 1.5


@pytest.mark.long
@pytest.mark.parametrize("name", list(RULES))
def test_diagnostics(name):
    guide = G.InducingPoint(labels, inducing=RULES[name])
    posterior = dgp.Posterior(labels, guide, start(guide, x, y))
    tree = dgp.diagnostics.to_arviz(posterior, jax.random.key(0), x, y, num_samples=200)
    assert np.isfinite(dgp.diagnostics.khat(tree))
