"""Inducing values under a normalising flow: where it starts, its density, what it gains on a skewed posterior."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro import handlers
from numpyro.distributions.transforms import AffineTransform, PowerTransform
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.util import log_density
from programs import X, Y, agree, bound, deep, draws_of_bound

import numpyro_dgp as dgp
from numpyro_dgp import guides as G
from numpyro_dgp.functions.weights import DiagonalBelief
from numpyro_dgp.guides.rules.strata import Flowed

x = jnp.array([[-0.5], [0.5]])
y = jnp.array([1, 1])


def labels(x, y=None):
    """Two ones under a wide prior: the posterior is cut off on one side."""
    f = dgp.gp("f", dgp.kernels.RBF(25.0, 1.0), dgp.Points(jnp.array([[-0.5], [0.5]], x.dtype)))
    with numpyro.plate("data", len(x)):
        numpyro.sample("y", dgp.Likelihood(f(x), lambda v: dist.Bernoulli(logits=v)), obs=y)


def evidence():
    line = jnp.linspace(-7, 7, 281)
    grid = jnp.stack(jnp.meshgrid(line, line), -1).reshape(-1, 2)
    log_p = jax.vmap(lambda v: log_density(labels, (x, y), {}, {"f": v})[0])(grid)
    return jax.nn.logsumexp(log_p) + 2 * jnp.log(line[1] - line[0])


def start(guide, *args):
    with handlers.trace() as sites, handlers.seed(rng_seed=0):
        guide(*args)
    return {name: site["value"] for name, site in sites.items() if site["type"] == "param"}


def moved(params, scale=0.2):
    """Parameters away from the start, factors kept triangular with a positive diagonal."""
    new = {n: v + scale * jax.random.normal(jax.random.key(i), v.shape) for i, (n, v) in enumerate(params.items())}
    return {n: jnp.tril(v) if n.endswith("tril") else abs(v) if n.endswith("scale") else v for n, v in new.items()}


def posterior_of(rule, params, shape=(2, 2)):
    """The distribution at a site of that shape."""

    def model():
        Z = jnp.linspace(0, 1, shape[1])[:, None]
        dgp.gp("f", dgp.kernels.RBF(), dgp.Points(Z), outputs=shape[0])

    with handlers.seed(rng_seed=0), handlers.trace() as sites, handlers.substitute(data=params or {}):
        G.InducingPoint(model, inducing=rule)()
    return sites["f"]["fn"], {name: site["value"] for name, site in sites.items() if site["type"] == "param"}


@pytest.fixture(scope="module")
def bent():
    """A flow with parameters that are not those of the start, and these."""
    params = moved(posterior_of(G.Flow(), None)[1])
    return posterior_of(G.Flow(), params)[0]


@pytest.mark.long
def test_it_starts_as_the_gaussian():
    """Draws and densities of ``Full()``, entry by entry."""
    q, params = posterior_of(G.Flow(), None)
    full, _ = posterior_of(G.Full(), {n: params[n] for n in ("f_auto_loc", "f_auto_scale_tril")})
    draw, inside = q.sample_with_intermediates(jax.random.key(0))
    np.testing.assert_allclose(draw, full.sample(jax.random.key(0)), rtol=1e-12)
    np.testing.assert_allclose(q.log_prob(draw, inside), full.log_prob(draw), rtol=1e-10)


@pytest.mark.long
def test_density_is_that_of_a_dense_jacobian(bent):
    """By a change of variables from the standard normal numbers, and of a given value by the inverse."""
    white = jax.random.normal(jax.random.key(1), (4,))

    def value(white):
        return bent.base.from_white(bent.transform(white).reshape(2, 2)).reshape(-1)

    expected = dist.Normal().log_prob(white).sum() - jnp.linalg.slogdet(jax.jacfwd(value)(white))[1]
    np.testing.assert_allclose(bent.log_prob(value(white).reshape(2, 2)), expected, rtol=1e-8)
    draw, inside = bent.sample_with_intermediates(jax.random.key(2))
    np.testing.assert_allclose(bent.log_prob(draw, inside), bent.log_prob(draw), rtol=1e-8)
    assert abs(bent.log_prob(draw) - bent.base.log_prob(draw)) > 0.01
    several = bent.sample(jax.random.key(3), (3,))
    np.testing.assert_allclose(bent.log_prob(several)[1], bent.log_prob(several[1]), rtol=1e-8)


@pytest.mark.long
def test_antithetic_draws_are_mirrored(bent):
    pair = Flowed(bent.base, bent.transform, (1, -1))
    white = [pair.stratum(k).sample_with_intermediates(jax.random.key(0))[1][0] for k in (0, 1)]
    np.testing.assert_allclose(white[0], -white[1])
    assert pair.num_strata * pair.weight(0) == 1


@pytest.mark.long
def test_single_precision():
    q, _ = posterior_of(G.Flow(), None)
    q = jax.tree.map(lambda a: a.astype(jnp.float32), q.base), q.transform
    draw, inside = Flowed(*q).sample_with_intermediates(jax.random.key(0))
    densities = Flowed(*q).log_prob(draw, inside), Flowed(*q).log_prob(draw)
    assert {value.dtype for value in (draw, *densities)} == {jnp.dtype("float32")}
    np.testing.assert_allclose(*densities, rtol=1e-5)


@pytest.mark.long
def test_every_parameter_has_a_gradient():
    guide = G.InducingPoint(labels, inducing=G.Flow())
    gradient = jax.jit(jax.grad(lambda p: bound(dgp.ELBO(), p, labels, guide, x, y)))(moved(start(guide, x, y)))
    assert all(abs(value).max() > 0 for value in gradient.values())
    assert len(gradient) == 2 + 2 * (2 + 4)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: G.Flow(depth=0), "Flow: expected depth to be a positive integer"),
        (lambda: G.Flow(hidden=0), "Flow: expected hidden to be a positive integer"),
        (lambda: G.Flow(bijector=3), "expected bijector to be a function of the number of values, got int"),
        (lambda: G.Flow(base=G.Normal()), "Flow: expected base to be"),
        (
            lambda: G.InducingPoint(labels, inducing=G.Flow(lambda n: n))(x, y),
            "expected the bijector to return a numpyro.*, got int",
        ),
        (
            lambda: G.InducingPoint(labels, inducing=G.Flow(lambda n: PowerTransform(2.0)))(x, y),
            "expected the bijector to return a transform of all real numbers, got PowerTransform",
        ),
        (lambda: G.InducingPoint(deep, sites={"h": G.Flow()})(X, Y), "expected site 'h' to be inducing values"),
    ],
)
def test_wrong_calls(make, message):
    with handlers.seed(rng_seed=0), pytest.raises(ValueError, match=message):
        make()


@pytest.mark.long
def test_natural_gradients_are_refused():
    from numpyro_dgp.optim import NaturalGradient

    guide = G.InducingPoint(labels, inducing=G.Flow())
    svi = SVI(labels, guide, NaturalGradient(guide, 0.1, optax.adam(0.01)), dgp.ELBO())
    with pytest.raises(ValueError, match=r"the guide has none: give the site guides\.Full"):
        svi.run(jax.random.key(0), 1, x, y, progress_bar=False)


@pytest.mark.slow
def test_a_bijector_of_ones_own():
    """An affine one, with a parameter, is a Gaussian again."""

    def stretch(n):
        return AffineTransform(0.0, numpyro.param("stretch", 2.0 * jnp.ones(n)), dist.constraints.real_vector)

    q, params = posterior_of(G.Flow(stretch, G.Diagonal()), None)
    assert params["stretch"].shape == (4,)
    v = jax.random.normal(jax.random.key(0), (2, 2))
    np.testing.assert_allclose(q.log_prob(v), DiagonalBelief(q.base.loc, 2 * q.base.scale).log_prob(v), rtol=1e-10)


@pytest.mark.long
def test_it_gains_on_a_skewed_posterior():
    """From the optimum of one Gaussian towards the evidence, by quadrature, and not above it."""
    truth = evidence()

    def fitted(rule, loss, steps=3000):
        guide = G.InducingPoint(labels, inducing=rule)
        svi = SVI(labels, guide, optax.adam(optax.cosine_decay_schedule(0.02, steps)), loss)
        params = svi.run(jax.random.key(0), steps, x, y, progress_bar=False).params
        draws = draws_of_bound(dgp.ELBO(), params, labels, guide, x, y, num=20_000)
        return draws.mean(), draws.std() / np.sqrt(len(draws))

    one, _ = fitted(G.Full(), dgp.ELBO())
    bent, error = fitted(G.Flow(antithetic=True), dgp.ELBO(4))
    assert bent < truth + 3 * error
    assert truth - bent + 3 * error < 0.5 * (truth - one)


@pytest.mark.long
def test_same_bound_as_with_everything_drawn():
    """Of a base that follows the layer below; antithetic draws have less variance."""
    bounds = {}
    for antithetic in (False, True):
        guide = G.InducingPoint(deep, sites={"g": G.Flow(base=G.MarkovInducing(), antithetic=antithetic)})
        params = moved(start(guide, X, Y), 0.1)
        bounds[antithetic] = draws_of_bound(dgp.ELBO(), params, deep, guide, X, Y, num=2000)
    stock = draws_of_bound(Trace_ELBO(), params, deep, guide, X, Y, num=5000)
    assert agree(bounds[True], bounds[False])
    assert agree(bounds[True], stock)
    assert bounds[True].var() < bounds[False].var()
    posterior = dgp.Posterior(deep, guide, params)
    assert posterior.using(num_samples=2).functions(jax.random.key(0))(X[:4])["h"].shape == (2, 4, 1)


@pytest.mark.long
def test_at_the_start_the_bound_is_that_of_the_gaussian():
    flow, full = (G.InducingPoint(labels, inducing=rule) for rule in (G.Flow(), G.Full()))
    params = start(flow, x, y)
    ours = draws_of_bound(dgp.ELBO(), params, labels, flow, x, y, num=5000)
    exact = bound(dgp.ELBO(), {n: params[n] for n in ("f_auto_loc", "f_auto_scale_tril")}, labels, full, x, y)
    assert abs(ours.mean() - exact) < 3 * ours.std() / np.sqrt(5000)
