"""Exact regression on regular grids against the dense process."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from dense import kl, log_normal
from numpyro.distributions import CirculantNormal, kl_divergence
from numpyro.infer import MCMC, NUTS, SVI, Trace_ELBO
from sizes import mostly_long

import numpyro_dgp as dgp
from numpyro_dgp.rings.spectra import Ring, periodised

rng = np.random.default_rng(1)
KERNEL = dgp.kernels.RBF(1.2, 1.1)
GRIDS = [Ring(0.0, 12.0, 16), Ring(0.0, 12.0, 15), Ring([0.0, 0.0], [8.0, 9.0], (6, 5))]


def dense_ring(kernel, ring):
    return np.asarray(periodised(kernel, ring, ring.points(), ring.points()))


def masks(ring):
    size = int(np.prod(ring.sizes))
    gaps = rng.uniform(size=size) > 0.3
    padding = np.arange(size) < size - 5
    return {"all": None, "gaps": gaps, "padding": padding}


@pytest.mark.long
@pytest.mark.parametrize("ring", GRIDS)
@pytest.mark.parametrize("mask", mostly_long(["gaps"], ["all", "gaps", "padding"]))
@pytest.mark.parametrize("kernel", [KERNEL, pytest.param(dgp.kernels.Matern52(0.8, 1.5), marks=pytest.mark.long)])
def test_exact_regression(ring, mask, kernel):
    """Evidence, mean and variances are those of the dense process on the ring."""
    observed = masks(ring)[mask]
    keep = np.ones(int(np.prod(ring.sizes)), bool) if observed is None else observed
    K = dense_ring(kernel, ring)
    noisy = K[np.ix_(keep, keep)] + 0.09 * np.eye(keep.sum())
    y = rng.normal(size=keep.sum())
    d = dgp.rings.RingNormal(kernel, ring, noise=0.3, observed=observed, loc=0.5)
    atol = 1e-8 if len(ring.sizes) == 1 else 1e-6  # the spectrum's own accuracy (test_circulant)
    np.testing.assert_allclose(d.log_prob(y), log_normal(y, 0.5, noisy), atol=atol)
    mean, variance = jax.jit(d.posterior)(y)
    gain = np.linalg.solve(noisy, K[keep]).T
    np.testing.assert_allclose(mean, gain @ (y - 0.5), atol=atol)
    np.testing.assert_allclose(variance, np.diag(K) - np.einsum("ij,ji->i", gain, K[keep]), atol=atol)
    np.testing.assert_allclose(d.posterior_mean(y, tol=1e-11), mean, atol=1e-8)
    np.testing.assert_allclose(d.variance, np.diag(noisy), atol=atol)
    several = np.stack([y, 2 * y])
    np.testing.assert_allclose(d.log_prob(several)[0], d.log_prob(y), rtol=1e-12)
    np.testing.assert_allclose(d.posterior(several)[0][0], mean, atol=1e-12)


@pytest.mark.slow
def test_draws_have_the_covariance(key):
    ring, observed = GRIDS[0], np.arange(16) < 11
    d = dgp.rings.RingNormal(KERNEL, ring, noise=0.3, observed=observed)
    draws = d.sample(key, (20_000,))
    expected = (dense_ring(KERNEL, ring) + 0.09 * np.eye(16))[:11, :11]
    products = draws[:, :, None] * draws[:, None]
    error = products.std(0) / np.sqrt(20_000)
    assert (abs(products.mean(0) - expected) < 4.5 * error).all()


@pytest.mark.smoke
def test_no_margin_closes_the_ring_behind_the_last_point():
    x = np.delete(np.arange(101) * 0.5, [3, 50])  # a prime number of points
    ring, observed = dgp.rings.regular(x, margin=0.0)
    assert ring.sizes == (101,)
    assert list(np.flatnonzero(~observed)) == [3, 50]
    np.testing.assert_allclose(ring.length, 101 * 0.5)
    np.testing.assert_allclose(ring.points()[observed, 0], x)
    assert dgp.rings.regular(np.arange(88) * 0.1, margin=12 * 0.1)[0].sizes == (100,)  # 1.2000000000000002


@pytest.mark.smoke
@pytest.mark.parametrize("num", [2, 3, 50, 997, 9973, 100_003, 1_000_000])
@pytest.mark.parametrize("margin", [1.0, 17.0, 100.0])
def test_padding_costs_no_dense_solve(num, margin):
    """The margin, and no more points beyond it than make the transforms of the ring fast."""
    ring, observed = dgp.rings.regular(np.arange(float(num)), margin)
    (size,) = ring.sizes
    assert observed[:num].all()
    assert margin <= size - num <= margin + (100 if num == 1_000_000 and margin == 100.0 else 300)
    np.testing.assert_allclose(ring.length, size)
    cost = lambda m: min(m - num, num) ** 3 / 3 + 10 * m * transforms(m)  # noqa: E731
    least = num + int(margin)
    assert cost(size) <= min(cost(m) for m in range(least, least + 300)) * (1 + 1e-12)


def transforms(size):
    """Operations per point: the prime factors of a size, at most those of Bluestein's algorithm."""
    total, rest, p = 0, size, 2
    while rest > 1:
        while rest % p == 0:
            total, rest = total + p, rest // p
        p = p + 1 if p * p <= rest else max(rest, 2)
    return min(total, 12 * np.log2(size))


@pytest.mark.slow
def test_a_multiple_on_either_side():
    ring, y = GRIDS[0], rng.normal(size=16)
    expected = dgp.rings.RingNormal(dgp.kernels.RBF(2.0, 1.1), ring, noise=0.3)
    for kernel in (dgp.kernels.Constant(2.0) * dgp.kernels.RBF(1.0, 1.1), dgp.kernels.RBF(1.0, 1.1) * 2.0):
        found = dgp.rings.RingNormal(kernel, ring, noise=0.3)
        np.testing.assert_allclose(found.log_prob(y), expected.log_prob(y), rtol=1e-10)
        np.testing.assert_allclose(found.posterior(y), expected.posterior(y), rtol=1e-10)


@pytest.mark.long
def test_padding_makes_it_the_process_on_the_line():
    """Six lengthscales of padding: the evidence of the plain kernel to the error that wraparound states."""
    x = np.delete(np.arange(60) * 0.25, [7, 8, 30])
    ring, observed = dgp.rings.regular(x, margin=6 * 1.1)
    y = np.sin(x) + 0.3 * rng.normal(size=len(x))
    d = dgp.rings.RingNormal(KERNEL, ring, noise=0.3, observed=observed)
    line = np.asarray(KERNEL(x[:, None], x[:, None])) + 0.09 * np.eye(len(x))
    error = float(dgp.rings.wraparound(KERNEL, ring, x[-1]))
    assert error < 2e-8
    np.testing.assert_allclose(d.log_prob(y), log_normal(y, np.zeros(len(x)), line), atol=1e4 * error)
    short, seen = dgp.rings.regular(x, margin=1.0)
    y = np.cos(np.pi * x / x[-1])  # the ends, neighbours on a ring that is too short, disagree
    wrong = dgp.rings.RingNormal(KERNEL, short, noise=0.3, observed=seen)
    assert dgp.rings.wraparound(KERNEL, short, x[-1]) > 0.5
    assert abs(wrong.log_prob(y) - log_normal(y, np.zeros(len(x)), line)) > 0.1


@pytest.mark.slow
def test_divergence_and_the_stock_distribution():
    ring = GRIDS[1]
    q = dgp.rings.RingNormal(KERNEL, ring, noise=0.3, loc=0.2)
    p = dgp.rings.RingNormal(dgp.kernels.Matern32(), ring, noise=0.5)
    covariances = [dense_ring(k, ring) + s**2 * np.eye(15) for k, s in ((KERNEL, 0.3), (dgp.kernels.Matern32(), 0.5))]
    expected = kl(np.full(15, 0.2), covariances[0], np.zeros(15), covariances[1])
    np.testing.assert_allclose(kl_divergence(q, p), expected, rtol=1e-9)
    stock = CirculantNormal(jnp.full(15, 0.2), covariance_row=jnp.array(covariances[0][0]))
    y = rng.normal(size=15)
    np.testing.assert_allclose(q.log_prob(y), stock.log_prob(y), rtol=1e-10)


@pytest.mark.long
@pytest.mark.usefixtures("x32")
def test_single_precision():
    x = np.arange(200, dtype=np.float32)
    ring, observed = dgp.rings.regular(x, margin=48.0)
    d = dgp.rings.RingNormal(dgp.kernels.RBF(1.0, 8.0), ring, noise=0.1, observed=observed)
    y = np.sin(x / 9).astype(np.float32)
    line = np.exp(-0.5 * ((x[:, None] - x[None]) / 8.0).astype(float) ** 2) + 0.01 * np.eye(200)
    value = d.log_prob(y)
    assert value.dtype == jnp.float32
    np.testing.assert_allclose(value, log_normal(y.astype(float), np.zeros(200), line), atol=0.05)
    latent = dgp.rings.RingNormal(dgp.kernels.RBF(1.0, 8.0), Ring(np.float32(0), np.float32(64), 64))
    draw = latent.sample(jax.random.key(0))
    assert np.isfinite(jax.jit(latent.log_prob)(draw))
    assert np.isfinite(jax.grad(latent.log_prob)(draw)).all()


def series():
    x = np.arange(40) * 0.5
    return x, np.sin(x) + 0.2 * rng.normal(size=40)


def evidence_program(x, y=None):
    ls = numpyro.sample("ls", dist.LogNormal(0.0, 1.0))
    noise = numpyro.sample("noise", dist.LogNormal(-1.0, 1.0))
    ring, observed = dgp.rings.regular(x, margin=12.0)
    numpyro.sample("y", dgp.rings.RingNormal(dgp.kernels.RBF(1.0, ls), ring, noise, observed), obs=y)


@pytest.mark.long
def test_hyperparameters_by_maximum_a_posteriori():
    """The same optimum as the dense process on the line."""
    x, y = series()
    guide = numpyro.infer.autoguide.AutoDelta(evidence_program)
    svi = SVI(evidence_program, guide, optax.adam(0.05), Trace_ELBO())
    params = svi.run(jax.random.key(0), 300, x, y, progress_bar=False).params
    found = [float(params[f"{n}_auto_loc"]) for n in ("ls", "noise")]

    def dense(logs):
        ls, noise = jnp.exp(logs)
        K = dgp.kernels.RBF(1.0, ls).gram(x[:, None]) + noise**2 * jnp.eye(len(x))
        prior = dist.LogNormal(0.0, 1.0).log_prob(ls) + dist.LogNormal(-1.0, 1.0).log_prob(noise)
        return -prior - dist.MultivariateNormal(0.0, K).log_prob(y)

    slope = jax.grad(dense)(jnp.log(jnp.array(found)))
    assert (abs(slope) < 0.05).all()


@pytest.mark.long
def test_nuts_on_the_process_itself(key):
    """The non-centred latent gives the exact posterior, under a Gaussian likelihood."""
    x, y = series()
    x, y = x[:12], y[:12]
    ring, observed = dgp.rings.regular(x, margin=6.0)

    def model(y):
        f = numpyro.sample("f", dgp.rings.RingNormal(KERNEL, ring, observed=observed))
        numpyro.sample("y", dist.Normal(f, 0.4), obs=y)

    mcmc = MCMC(NUTS(dgp.for_mcmc(model)), num_warmup=300, num_samples=1500, progress_bar=False)
    mcmc.run(key, y)
    samples = mcmc.get_samples()
    assert samples["f_white"].shape == (1500, int(np.prod(ring.sizes)))
    mean, variance = dgp.rings.RingNormal(KERNEL, ring, noise=0.4, observed=observed).posterior(y)
    sd = np.sqrt(variance[:12])
    assert (abs(samples["f"].mean(0) - mean[:12]) < 0.15 * sd).all()
    np.testing.assert_allclose(samples["f"].std(0) / sd, 1, atol=0.1)


@pytest.mark.slow
def test_bad_input():
    with pytest.raises(ValueError, match="expected inputs on a regular grid, got one"):
        dgp.rings.regular(np.array([0.0, 1.0, 2.4]), 6.0)
    with pytest.raises(ValueError, match="increasing order"):
        dgp.rings.regular(np.array([0.0, 2.0, 1.0]), 6.0)
    for margin in (-1.0, np.nan, np.inf, np.ones(2)):
        with pytest.raises(ValueError, match=r"rings\.regular: expected a finite margin of 0 or more"):
            dgp.rings.regular(np.arange(3.0), margin)
    with pytest.raises(ValueError, match="expected observed grid points among 16"):
        dgp.rings.RingNormal(KERNEL, GRIDS[0], observed=np.zeros(16, bool))
    with pytest.raises(ValueError, match="expected noise to be positive"):
        dgp.rings.RingNormal(KERNEL, GRIDS[0], noise=-1.0)
