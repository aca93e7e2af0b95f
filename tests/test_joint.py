"""``f.joint(x)``: values with their correlations, where almost nothing is left given the inducing values."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from numpyro.distributions import kl_divergence
from numpyro.infer import MCMC, NUTS, Trace_ELBO
from numpyro.infer.util import log_density
from programs import X, Y, random_params
from sizes import mostly_long

import numpyro_dgp as dgp
from numpyro_dgp import kernels
from numpyro_dgp.functions.joint_values import JointValues, WhitenedValues
from numpyro_dgp.functions.weights import DiagonalBelief, FullBelief
from numpyro_dgp.math.linalg import conditional_cholesky, jitter, rounding_scale

rng = np.random.default_rng(0)
RBF = kernels.RBF()
KERNELS = {
    "RBF": RBF,
    "scaled": 2.0 * kernels.RBF(lengthscale=0.3),
    "Matern12": kernels.Matern12(),
    "Matern32": kernels.Matern32(),
    "Matern52": kernels.Matern52(),
    "Periodic": kernels.Periodic(),
    "Linear": kernels.Linear(),
    "Linear + RBF": kernels.Linear() + RBF,
    "Cosine": kernels.Cosine(),
    "ArcCosine": kernels.ArcCosine(),
    "Polynomial": kernels.Polynomial(),
}
# The jitter in single precision, for up to 100 inputs, is up to a hundred times the least: rounding of A grows with M.
SINGLE = 110 * jitter(jnp.float32, 100)
SIZES = [(M, N) for M in (5, 10, 20) for N in (5, 30, 100)]


def inputs(N):
    return jnp.linspace(-1, 1, N)[:, None]


def opened(kernel, M, outputs=None):
    with handlers.seed(rng_seed=0):
        return dgp.gp("f", kernel, dgp.Points(inputs(M)), outputs=outputs)


def factor_of(values):
    """The matrix that turns white noise into a draw, column by column; (P, N, N)."""
    N, P = values.loc.shape if values.event_dim == 2 else (len(values.loc), 1)
    columns = jnp.zeros((N, N, P)) + jnp.eye(N)[..., None]
    white = columns if values.event_dim == 2 else columns[..., 0]
    found = jax.vmap(values.from_white)(white) - values.loc
    return np.moveaxis(np.asarray(found).reshape(N, N, P), (0, 1, 2), (2, 1, 0))


def dense(M, N, dtype):
    """The conditional covariance of an RBF process, in double precision."""
    x, Z = np.linspace(-1, 1, N), np.linspace(-1, 1, M)
    k = lambda a, b: np.exp(-0.5 * (a[:, None] - b) ** 2)  # noqa: E731
    K = k(Z, Z) + jitter(dtype, M) * np.eye(M)
    return k(x, x) - k(x, Z) @ np.linalg.solve(K, k(Z, x))


def check_sizes(kernel, sizes, outputs=None):
    for M, N in sizes:
        values = opened(kernel, M, outputs).joint(inputs(N))
        draw = values.sample(jax.random.key(1))
        assert np.isfinite(draw).all(), (M, N)
        assert np.isfinite(values.log_prob(draw)), (M, N)


@pytest.mark.long
@pytest.mark.parametrize("size", mostly_long([(5, 5), (20, 100)], SIZES))
def test_draws_have_the_conditional_covariance(size):
    M, N = size
    values = opened(RBF, M).joint(inputs(N))
    L = factor_of(values)[0]
    np.testing.assert_allclose(L @ L.T, dense(M, N, jnp.float64), atol=3e-10)
    assert np.isfinite(values.log_prob(values.sample(jax.random.key(1))))


@pytest.mark.long
@pytest.mark.parametrize("size", mostly_long([(5, 100), (20, 30)], SIZES))
def test_draws_have_the_conditional_covariance_in_single_precision(size, x32):
    M, N = size
    values = opened(RBF, M).joint(inputs(N))
    L = factor_of(values)[0].astype(float)
    assert values.loc.dtype == jnp.float32
    np.testing.assert_allclose(L @ L.T, dense(M, N, jnp.float32), atol=SINGLE)
    assert np.isfinite(values.log_prob(values.sample(jax.random.key(1))))


@pytest.mark.parametrize("name", KERNELS)
def test_every_kernel_in_single_precision(name, x32):
    check_sizes(KERNELS[name], [(10, 30)])


@pytest.mark.long
@pytest.mark.parametrize("name", KERNELS)
def test_every_kernel_at_every_size(name):
    check_sizes(KERNELS[name], SIZES, outputs=2)


@pytest.mark.long
@pytest.mark.parametrize("name", KERNELS)
def test_every_kernel_at_every_size_in_single_precision(name, x32):
    check_sizes(KERNELS[name], SIZES, outputs=2)


@pytest.mark.long
@pytest.mark.parametrize("outputs", [pytest.param(None, marks=pytest.mark.long), 2])
def test_on_a_grid(outputs, x32):
    with handlers.seed(rng_seed=0):
        f = dgp.gp("f", kernels.RBF(lengthscale=0.5), dgp.Grid(-3.0, 3.0, 24), outputs=outputs)
    values = f.joint(inputs(30))
    L = factor_of(values).astype(float)
    expected = np.broadcast_to(values.conditional_covariance, L.shape)
    np.testing.assert_allclose(L @ L.swapaxes(-1, -2), expected, atol=SINGLE)
    assert np.isfinite(values.log_prob(values.sample(jax.random.key(1))))


@pytest.mark.slow
@pytest.mark.parametrize("noise", [None, 0.3])
def test_density_where_the_covariance_is_well_conditioned(noise):
    values = opened(kernels.Matern12(), 4, outputs=2).joint(inputs(7), noise=noise)
    draw = values.sample(jax.random.key(1))
    x, Z = np.linspace(-1, 1, 7), np.linspace(-1, 1, 4)
    k = lambda a, b: np.exp(-np.abs(a[:, None] - b))  # noqa: E731
    C = k(x, x) - k(x, Z) @ np.linalg.solve(k(Z, Z), k(Z, x)) + (noise or 1e-5) ** 2 * np.eye(7)
    residual = np.asarray(draw - values.loc)
    quadratic = np.trace(residual.T @ np.linalg.solve(C, residual))
    expected = -0.5 * quadratic - np.linalg.slogdet(2 * np.pi * C)[1]
    np.testing.assert_allclose(values.log_prob(draw), expected, rtol=1e-6 if noise else 0.05)


@pytest.mark.slow
def test_process_noise_needs_no_more_jitter(x32):
    """Noise that rounding cannot undo is not widened; noise below rounding is."""
    x, noise = inputs(30), 0.02
    values = opened(RBF, 10).joint(x, noise=noise)
    L = factor_of(values)[0]
    np.testing.assert_allclose(np.diag(L @ L.T), values.variance, rtol=1e-4)
    least = jitter(jnp.float32, 100)
    np.testing.assert_allclose(rounding_scale(jnp.array([1.0, 3.0]), jnp.array(0.5 * least)), [1.5], rtol=1e-6)
    assert rounding_scale(jnp.array([1.0, 3.0]), jnp.array(noise**2)) == 0
    small = opened(RBF, 10).joint(x, noise=1e-4)
    assert np.isfinite(small.log_prob(small.sample(jax.random.key(0))))


@pytest.mark.slow
@pytest.mark.parametrize("belief", ["full", "diagonal"])
@pytest.mark.parametrize("outputs", [None, 2])
def test_under_a_belief(belief, outputs, x32):
    M, shape = 10, (10,) if outputs is None else (outputs, 10)
    loc = jnp.array(rng.normal(size=shape), jnp.float32)
    full = FullBelief(loc, jnp.broadcast_to(0.1 * jnp.eye(M), (*shape, M)))
    q = full if belief == "full" else DiagonalBelief(loc, jnp.full(shape, 0.1))
    with handlers.substitute(data={"f": q}):
        values = opened(RBF, M, outputs).joint(inputs(30))
    L = factor_of(values).astype(float)
    expected = np.broadcast_to(values.covariance, L.shape)
    np.testing.assert_allclose(L @ L.swapaxes(-1, -2), expected, atol=SINGLE)
    assert np.isfinite(values.log_prob(values.sample(jax.random.key(1))))


@pytest.mark.long
@pytest.mark.parametrize("M", [20])
def test_gradients_are_finite(M, x32):
    def loss(lengthscale):
        values = opened(kernels.RBF(lengthscale=lengthscale), M).joint(inputs(30))
        draw = values.sample(jax.random.key(1))
        return jnp.square(draw).sum() + 1e-6 * values.log_prob(jax.lax.stop_gradient(draw))

    assert np.isfinite(jax.grad(loss)(1.0))


@pytest.mark.long
def test_the_scale_survives_what_is_done_to_distributions():
    values = opened(RBF, 20, outputs=2).joint(inputs(30))
    draw = values.sample(jax.random.key(1))
    expected = values.log_prob(draw)
    again = jax.tree.unflatten(*reversed(jax.tree.flatten(values)))
    np.testing.assert_allclose(again.log_prob(draw), expected)
    np.testing.assert_allclose(values.expand((3,)).log_prob(draw), [expected] * 3, rtol=1e-6)
    assert values.expand((3,)).scale.shape == (3, 1, 1)
    np.testing.assert_allclose(dist.ExpandedDistribution(values, (3,)).log_prob(draw), [expected] * 3)
    np.testing.assert_allclose(values.mask(True).log_prob(draw), expected)
    stacked = jax.vmap(lambda _: values)(jnp.arange(2))
    np.testing.assert_allclose(jax.vmap(lambda v: v.log_prob(draw))(stacked), [expected] * 2, rtol=1e-6)
    np.testing.assert_allclose(values.marginals().variance, values.variance)


@pytest.mark.slow
def test_divergence_from_a_prior_with_an_uncertain_mean_is_a_mean_over_inducing_values():
    root = rng.normal(size=(2, 4, 4))
    C, S = root[0] @ root[0].T + np.eye(4), root[1] @ root[1].T
    p = JointValues(jnp.zeros(4), jnp.array(C)[None], jnp.array(S)[None], event_dim=1)
    q = WhitenedValues(p, jnp.array(rng.normal(size=(1, 4))), jnp.array(np.tril(root[1])[None]))
    np.testing.assert_allclose(q.L @ q.L.mT, C[None], rtol=1e-8)
    m, Q = np.asarray(q.loc), np.asarray(q.covariance[0])
    inverse = np.linalg.inv(C)
    log_ratio = np.linalg.slogdet(C)[1] - np.linalg.slogdet(Q)[1]
    expected = 0.5 * (np.trace(inverse @ (Q + S)) + m @ inverse @ m - 4 + log_ratio)
    np.testing.assert_allclose(kl_divergence(q, p), expected, rtol=1e-6)


def areas(X, y=None):
    """Observations are sums over neighbouring inputs."""
    f = dgp.gp("f", kernels.RBF(lengthscale=numpyro.param("ls", jnp.array(0.7))), dgp.Points(inputs(8)), outputs=1)
    v = numpyro.sample("v", f.joint(X))
    with numpyro.plate("areas", len(X) // 3):
        numpyro.sample("y", dist.Normal(v[:, 0].reshape(-1, 3).sum(-1), 0.5), obs=y)


def areas_data():
    return inputs(24), jnp.sin(3 * jnp.linspace(-1, 1, 8))


@pytest.mark.parametrize("rule", [dgp.guides.Full(), pytest.param(dgp.guides.Diagonal(), marks=pytest.mark.long)])
@pytest.mark.long
def test_bound_in_marginal_mode(rule):
    """The values follow the model: their two densities cancel, and so do the derivatives of these."""
    guide = dgp.guides.InducingPoint(areas, inducing=rule)
    params = random_params(areas, guide, *areas_data())

    def several(objective):
        one = jax.value_and_grad(lambda p, k: -objective.loss(k, p, areas, guide, *areas_data()))
        return jax.lax.map(lambda k: one(params, k), jax.random.split(jax.random.key(2), 400), batch_size=100)

    (bounds, slopes), (drawn, others) = several(dgp.ELBO()), several(Trace_ELBO())
    for a, b in ((bounds, drawn), (slopes["ls"], others["ls"])):
        assert np.isfinite(a).all()
        assert abs(a.mean() - b.mean()) < 4 * jnp.sqrt((a.var() + b.var()) / 400)
        assert a.std() < 3 * b.std()


@pytest.mark.long
def test_bound_in_marginal_mode_in_single_precision(x32):
    guide = dgp.guides.InducingPoint(areas)
    params = random_params(areas, guide, *areas_data())
    loss, slopes = jax.value_and_grad(lambda p: dgp.ELBO().loss(jax.random.key(0), p, areas, guide, *areas_data()))(
        params
    )
    assert np.isfinite(loss)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(slopes))


@pytest.mark.long
def test_whole_functions(x32):
    guide = dgp.guides.InducingPoint(areas)
    params = random_params(areas, guide, *areas_data())
    functions = dgp.Posterior(areas, guide, params, site="y").using(num_samples=3).functions(jax.random.key(0))
    found = functions(areas_data()[0])["v"]
    assert np.isfinite(found).all()
    # The same function at other inputs, without jitter of its own.
    np.testing.assert_allclose(functions(areas_data()[0][::-1])["v"], found[:, ::-1], atol=2e-4)


@pytest.mark.long
def test_nuts(x32):
    """No divergence, and predictions take the draws of what is outside plates as the values are."""
    mcmc = MCMC(NUTS(dgp.for_mcmc(areas, {"ls": 0.7})), num_warmup=40, num_samples=40, progress_bar=False)
    mcmc.run(jax.random.key(0), *areas_data())
    assert np.isfinite(mcmc.get_samples()["v"]).all()
    assert not mcmc.get_extra_fields()["diverging"].any()
    draws = {**mcmc.get_samples(), "f": jnp.zeros((40, 1, 8))}
    given = dgp.Posterior(areas, params={"ls": 0.7}, samples=draws, site="y")
    assert abs(given.using(num_samples=40).predict(jax.random.key(0), areas_data()[0]).mean).max() < 0.2


@pytest.mark.slow
def test_a_failed_factor_blames_no_inducing_inputs():
    values = JointValues(jnp.zeros(3), jnp.full((1, 3, 3), jnp.nan), event_dim=1)
    with pytest.raises(ValueError, match="factorisation of the joint covariance of function values failed") as error:
        values.sample(jax.random.key(0))
    assert "inducing" not in str(error.value)


@pytest.mark.long
def test_scales_of_zero_are_no_obstacle():
    """A row whose prior variance is zero, as of a linear kernel at the origin."""
    C = jnp.array([[0.0, 0.0], [0.0, 1.0]])
    L = conditional_cholesky(C, rounding_scale(jnp.diagonal(C), jnp.zeros(())))
    np.testing.assert_allclose(L @ L.T, C, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("outputs", [None, 1, 2])
def test_observations_of_another_shape_are_refused(outputs):
    """By whatever runs the program: they would be broadcast."""

    def model(y=None):
        f = dgp.gp("f", dgp.kernels.RBF(), None, outputs=outputs)
        numpyro.sample("y", f(X, noise=numpyro.sample("s", dist.LogNormal(-1.0, 0.5))), obs=y)

    with handlers.seed(rng_seed=0), handlers.trace() as sites:
        model()
    prior, y = sites["y"]["fn"], Y if outputs is None else jnp.stack([Y] * outputs, -1)
    for value in (jnp.zeros(()), y[:1], y[:-1], y[..., None], y[:, None] if outputs is None else Y):
        message = f"f(x): expected observations y of shape {y.shape}, got {value.shape}: y is (N,)"
        with pytest.raises(ValueError, match=re.escape(message)):
            prior.log_prob(value)
        if value.shape == y[:1].shape:
            with pytest.raises(ValueError, match=re.escape(message)):
                log_density(model, (value,), {}, {"s": 0.3})
    draws = jnp.stack([y, 2 * y, y])
    found = prior.log_prob(draws)
    np.testing.assert_allclose(found, [prior.log_prob(draw) for draw in draws])
    np.testing.assert_allclose(prior.expand([3]).log_prob(draws), found)
    np.testing.assert_allclose(prior.expand([3]).log_prob(y), found[0])


def test_a_likelihood_integrates_joint_values_of_a_conditioned_process():
    """They depend on known values, and not on the prior alone: as those at each input on their own."""
    inputs, values = jnp.linspace(0, 1, 5)[:, None], jnp.linspace(-1, 1, 5)
    f = dgp.gp("f", kernels.RBF(), None).given(inputs, jnp.sin(values), noise=0.1)
    alone, joint = (dgp.Likelihood(f_x, lambda v: dist.Normal(v, 0.3)) for f_x in (f(inputs), f.joint(inputs)))
    np.testing.assert_allclose(joint.log_prob(values), alone.log_prob(values), rtol=1e-8)
