"""Inducing values under a mixture of Gaussians, against one Gaussian, quadrature, and draws of everything."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro import handlers
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.util import log_density
from programs import X, Y, agree, bound, deep, draws_of_bound, shallow

import numpyro_dgp as dgp
from numpyro_dgp import guides as G
from numpyro_dgp.functions.weights import DiagonalBelief, FullBelief
from numpyro_dgp.guides.rules.strata import BeliefMixture

rng = np.random.default_rng(0)
x = jnp.array([[-0.2], [0.0], [0.3]])
y = jnp.array([0.9, 1.0, 1.1])


def squares(x, y=None):
    """The observations say nothing about the sign of the function: two modes."""
    f = dgp.gp("f", dgp.kernels.RBF(), dgp.Points(jnp.zeros((1, 1))))
    with numpyro.plate("data", len(x)):
        numpyro.sample("y", dgp.Likelihood(f(x), lambda v: dist.Normal(v**2, 0.4)), obs=y)


def evidence(q=None):
    """Of ``squares``, by a sum over a fine grid of its one inducing value; with ``q``, the bound of that q."""
    grid = jnp.linspace(-6, 6, 4001)
    log_p = jax.vmap(lambda v: log_density(squares, (x, y), {}, {"f": v[None]})[0])(grid)
    width = grid[1] - grid[0]
    if q is None:
        return jax.nn.logsumexp(log_p) + jnp.log(width)
    log_q = jax.vmap(lambda v: q.log_prob(v[None]))(grid)
    return (jnp.exp(log_q) * (log_p - log_q)).sum() * width


def start(guide, *args):
    with handlers.trace() as sites, handlers.seed(rng_seed=0):
        guide(*args)
    return {name: site["value"] for name, site in sites.items() if site["type"] == "param"}


def fitted(rule, steps=600):
    guide = G.InducingPoint(squares, inducing=rule)
    svi = SVI(squares, guide, optax.adam(optax.cosine_decay_schedule(0.05, steps)), dgp.ELBO())
    return guide, svi.run(jax.random.key(0), steps, x, y, progress_bar=False).params


@pytest.mark.long
@pytest.mark.parametrize("of", ["Full", "LowRank"])
def test_one_component_is_the_plain_rule(of):
    rule = {"Full": G.Full(), "LowRank": G.LowRank(2)}[of]
    plain, guide = (G.InducingPoint(shallow, inducing=r) for r in (rule, G.MixtureOfGaussians(1, rule)))
    params = start(plain, X, Y)
    mixed = {name.replace("auto", "auto_0"): value for name, value in params.items()}
    assert start(guide, X, Y).keys() == mixed.keys()
    one, by_one = jax.jit(jax.value_and_grad(lambda p: bound(dgp.ELBO(), p, shallow, plain, X, Y)))(params)
    two, by_two = jax.jit(jax.value_and_grad(lambda p: bound(dgp.ELBO(), p, shallow, guide, X, Y)))(mixed)
    np.testing.assert_allclose(one, two, rtol=1e-12)
    for name in params:
        np.testing.assert_allclose(by_one[name], by_two[name.replace("auto", "auto_0")], rtol=1e-9, atol=1e-9)


@pytest.mark.long
def test_bound_is_that_of_quadrature():
    """In expectation over the draws from the components, with its derivative by the weights."""
    guide = G.InducingPoint(squares, inducing=G.MixtureOfGaussians(2))
    params = {
        "f_auto_0_loc": jnp.array([0.8]),
        "f_auto_1_loc": jnp.array([-0.3]),
        "f_auto_0_scale_tril": jnp.array([[0.3]]),
        "f_auto_1_scale_tril": jnp.array([[0.6]]),
        "f_auto_logits": jnp.array([0.2, -0.5]),
    }

    def exact(logits):
        parts = (FullBelief(params[f"f_auto_{k}_loc"], params[f"f_auto_{k}_scale_tril"]) for k in (0, 1))
        return evidence(BeliefMixture(tuple(parts), logits))

    estimate = jax.jit(jax.value_and_grad(lambda p, key: bound(dgp.ELBO(), p, squares, guide, x, y, key=key)))
    values, gradients = jax.lax.map(partial(estimate, params), jax.random.split(jax.random.key(0), 500))
    for found, expected in ((values, exact), (gradients["f_auto_logits"][:, 0], lambda b: jax.grad(exact)(b)[0])):
        error = found.std() / np.sqrt(len(found))
        assert abs(found.mean() - expected(params["f_auto_logits"])) < 3 * error
    assert values.std() < 0.4


@pytest.mark.long
def test_two_modes_need_two_components():
    """One Gaussian finds one of the modes, and is log 2 below the evidence; two find both."""
    truth = evidence()
    gaps = []
    for rule in (G.Full(), G.MixtureOfGaussians(2), G.MixtureOfGaussians(1, reflected=True)):
        guide, params = fitted(rule)
        gaps.append(truth - draws_of_bound(dgp.ELBO(), params, squares, guide, x, y, num=500).mean())
    assert gaps[0] > 0.55
    assert abs(gaps[1]) < 0.1
    assert abs(gaps[2]) < 0.1


@pytest.mark.long
def test_a_reflected_component_is_a_pair():
    guide = G.InducingPoint(squares, inducing=G.MixtureOfGaussians(1, G.Diagonal(), reflected=True))
    params = start(guide, x, y)
    assert set(params) == {"f_auto_0_loc", "f_auto_0_scale"}
    params = {"f_auto_0_loc": jnp.array([3.0]), "f_auto_0_scale": jnp.array([0.1])}
    draws = guide.sample_posterior(jax.random.key(0), params, x, y, sample_shape=(2000,))
    np.testing.assert_allclose(abs(draws["f"]).mean(), 3.0, atol=0.02)
    assert abs(draws["f"].mean()) < 5 * 3 / np.sqrt(2000)


@pytest.mark.long
def test_density_moments_and_draws():
    shape = (2, 3)
    parts = tuple(
        DiagonalBelief(jnp.array(rng.normal(size=shape)), jnp.array(rng.uniform(0.2, 1, shape))) for _ in range(3)
    )
    q = BeliefMixture(parts, jnp.array([0.1, -0.5, 0.7]))
    weights = jax.nn.softmax(q.logits)
    v = jnp.array(rng.normal(size=shape))
    by_hand = sum(
        w * jnp.exp(dist.Normal(part.loc, part.scale).log_prob(v).sum()) for w, part in zip(weights, parts, strict=True)
    )
    np.testing.assert_allclose(q.log_prob(v), jnp.log(by_hand), rtol=1e-10)
    np.testing.assert_allclose(q.log_prob(jnp.stack([v, v + 1]))[0], q.log_prob(v), rtol=1e-12)
    draws = q.sample(jax.random.key(0), (20_000,))
    np.testing.assert_allclose(draws.mean(0), q.mean, atol=5 * float(jnp.sqrt(q.variance.max() / 20_000)))
    np.testing.assert_allclose(draws.var(0), q.variance, rtol=0.1)
    np.testing.assert_allclose(sum(q.weight(k) for k in range(3)), 1)
    # Parts far away from each other: every draw has the ratio of the weight, also in single precision.
    apart = BeliefMixture((parts[0], parts[0].around(parts[0].loc + 50)), jnp.array([0.0, 1.0]))
    apart = jax.tree.map(lambda a: a.astype(jnp.float32), apart)
    for k in (0, 1):
        ratio = apart.log_ratio(k, jax.random.key(k))
        assert ratio.dtype == jnp.float32
        np.testing.assert_allclose(ratio, jax.nn.log_softmax(apart.logits)[k], rtol=1e-6)


@pytest.mark.long
def test_components_start_apart():
    for rule, parts in ((G.MixtureOfGaussians(4), 4), (G.MixtureOfGaussians(2, reflected=True), 4)):
        with handlers.seed(rng_seed=0), handlers.trace() as sites:
            G.InducingPoint(squares, inducing=rule)(x, y)
        found = np.sort(np.ravel([part.loc for part in sites["f"]["fn"].parts]))
        assert len(found) == parts
        assert np.diff(found).min() > 0.05
        assert abs(found).max() < 0.5


@pytest.mark.long
def test_every_parameter_has_a_gradient():
    guide = G.InducingPoint(deep, sites={"f": G.MixtureOfGaussians(2)})
    gradient = jax.jit(jax.grad(lambda p: bound(dgp.ELBO(2), p, deep, guide, X, Y)))(start(guide, X, Y))
    assert "f_auto_logits" in gradient
    assert all(abs(value).max() > 0 for value in gradient.values())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: G.MixtureOfGaussians(0), "MixtureOfGaussians: expected components to be a positive integer"),
        (
            lambda: G.MixtureOfGaussians(2, G.Normal()),
            r"expected of to be Full\(\) or .*LowRank\(\), got Norm",
        ),
        (lambda: G.MixtureOfGaussians(apart=0.0), "apart to be positive"),
        (lambda: G.InducingPoint(deep, sites={"h": G.MixtureOfGaussians()})(X, Y), "'h' to be inducing values"),
    ],
)
def test_wrong_calls(make, message):
    with handlers.seed(rng_seed=0), pytest.raises(ValueError, match=message):
        make()


@pytest.mark.long
def test_other_doors():
    """Natural gradients, chains in the coordinates of a guide and quantiles want a Gaussian."""
    from numpyro_dgp.optim import NaturalGradient

    guide = G.InducingPoint(squares, inducing=G.MixtureOfGaussians())
    svi = SVI(squares, guide, NaturalGradient(guide, 0.1, optax.adam(0.01)), dgp.ELBO())
    with pytest.raises(ValueError, match=r"the guide has none: give the site guides\.Full"):
        svi.run(jax.random.key(0), 1, x, y, progress_bar=False)
    assert guide.quantiles(start(guide, x, y), [0.5], x, y) == {}


MOVED = {
    "two layers": {"f": G.MixtureOfGaussians(2), "g": G.MixtureOfGaussians(2, G.Diagonal())},
    "drawn": {"f": G.MixtureOfGaussians(2), "g": G.MarkovInducing()},
}


@pytest.mark.long
@pytest.mark.parametrize("name", MOVED)
def test_same_bound_as_with_everything_drawn(name):
    """Components of two layers in all pairs, and one that is drawn because another posterior depends on it."""
    guide = G.InducingPoint(deep, sites=MOVED[name])
    params = start(guide, X, Y)
    params = {
        n: value + 0.2 * (jnp.tril if n.endswith("tril") else abs)(jax.random.normal(jax.random.key(i), value.shape))
        for i, (n, value) in enumerate(params.items())
    }
    ours = draws_of_bound(dgp.ELBO(), params, deep, guide, X, Y)
    assert agree(ours, draws_of_bound(Trace_ELBO(), params, deep, guide, X, Y, num=5000))
    posterior = dgp.Posterior(deep, guide, params)
    assert posterior.using(num_samples=2).functions(jax.random.key(0))(X[:4])["h"].shape == (2, 4, 1)
