"""Sparse processes with inducing points at every P-th point of a ring, against the dense bound of Titsias."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense import kl, log_normal, titsias
from sizes import mostly_long

import numpyro_dgp as dgp
from numpyro_dgp.rings.circulant import hartley
from numpyro_dgp.rings.every_pth import Subsampled
from numpyro_dgp.rings.spectra import Ring, periodised, spectrum

rng = np.random.default_rng(3)
CASES = {
    "line": (Ring(0.0, 20.0, 48), 4),
    "odd": (Ring(-2.0, 13.0, 45), 5),
    "all": (Ring(0.0, 10.0, 14), 1),
    "one": (Ring(0.0, 10.0, 12), 12),
    "plane": (Ring([0.0, -3.0], [8.0, 6.0], (12, 10)), (3, 2)),
    "cube": (Ring(0.0, [7.0, 6.0, 5.0], (4, 6, 4)), (2, 3, 1)),
}
KERNELS = {"rbf": dgp.kernels.RBF(1.3, 0.8), "matern": dgp.kernels.Matern32(0.7, 1.5)}
NOISE = 0.4


def dense(case, kernel):
    """K_DD built from the ring's own spectrum, and the indices of the inducing points."""
    ring, every = CASES[case]
    every = (every,) * len(ring.sizes) if isinstance(every, int) else every
    index = np.arange(int(np.prod(ring.sizes))).reshape(ring.sizes)
    Z = index[tuple(slice(None, None, p) for p in every)].ravel()
    H = np.asarray(hartley(jnp.eye(index.size), (ring.sizes,)))
    K = H @ np.diag(spectrum(KERNELS[kernel], ring)) @ H
    return K, Z, Subsampled.of(KERNELS[kernel], ring, every)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", mostly_long(["matern"], KERNELS))
@pytest.mark.parametrize("case", CASES)
def test_all_is_dense_algebra(case, kernel):
    """Bound, optimal posterior, solve, determinant, trace and the expected gap, to 1e-8."""
    K, Z, found = dense(case, kernel)
    N = len(K)
    y, x = rng.normal(size=N), rng.normal(size=(2, N))
    Kzz, Kzx = K[np.ix_(Z, Z)], K[Z]
    Q = Kzx.T @ np.linalg.solve(Kzz, Kzx)
    noisy, exact = Q + NOISE**2 * np.eye(N), K + NOISE**2 * np.eye(N)
    bound, m, S = titsias(y, NOISE, Kzz, Kzx, K)
    zero = np.zeros(N)
    expected = {
        "bound": bound,
        "evidence": log_normal(y, zero, exact),
        "apply": x @ Q,
        "solve": np.linalg.solve(noisy, x.T).T,
        "log_determinant": np.linalg.slogdet(noisy)[1],
        "lost_variance": np.trace(K - Q) / N,
        "expected_gap": kl(zero, exact, zero, noisy) + 0.5 * np.trace(K - Q) / NOISE**2,
    }
    arguments = {
        "bound": (y, NOISE),
        "evidence": (y, NOISE),
        "apply": (x,),
        "solve": (x, NOISE),
        "lost_variance": (),
        "posterior": (y, NOISE),
    }
    values = jax.jit(lambda f: {n: getattr(f, n)(*arguments.get(n, (NOISE,))) for n in [*expected, "posterior"]})(found)
    mean, variance = values["posterior"]
    for name, value in expected.items():
        np.testing.assert_allclose(values[name], value, atol=1e-8, rtol=1e-8, err_msg=name)
    W = np.linalg.solve(Kzz, Kzx).T
    np.testing.assert_allclose(mean, W @ m, atol=1e-8)
    np.testing.assert_allclose(variance, np.diag(K - Q + W @ S @ W.T), atol=1e-8)


@pytest.mark.slow
def test_the_spectrum_is_that_of_the_periodic_kernel():
    ring, _ = CASES["line"]
    K, *_ = dense("line", "matern")
    np.testing.assert_allclose(K, periodised(KERNELS["matern"], ring, ring.points(), ring.points()), atol=1e-10)


def test_blocks_are_of_rank_one():
    """Equation 2.14: Q in frequencies has its entries between aliases only, and there a a' / sum a."""
    K, Z, found = dense("line", "matern")
    H = np.asarray(hartley(jnp.eye(48), ((48,),)))
    block = H @ (K[:, Z] @ np.linalg.solve(K[np.ix_(Z, Z)], K[Z])) @ H
    aliases = np.arange(48) % 12
    np.testing.assert_allclose(block[aliases[:, None] != aliases[None]], 0, atol=1e-9)
    a = np.asarray(found.eigenvalues)
    for m in range(12):
        expected = np.outer(a[:, m], a[:, m]) / a[:, m].sum()
        np.testing.assert_allclose(block[np.ix_(aliases == m, aliases == m)], expected, atol=1e-9)


@pytest.mark.long
def test_limits():
    """With all points the bound is the evidence; more points never make it worse; the gap averages what it says."""
    _, _, everything = dense("all", "rbf")
    y = rng.normal(size=14)
    np.testing.assert_allclose(everything.bound(y, 0.3), everything.evidence(y, 0.3), rtol=1e-12)
    np.testing.assert_allclose(everything.expected_gap(0.3), 0, atol=1e-10)
    ring, kernel = CASES["line"][0], KERNELS["matern"]
    found = [Subsampled.of(kernel, ring, p) for p in (1, 2, 4, 8, 16, 48)]
    bounds = [float(f.bound(np.sin(np.arange(48)), 0.3)) for f in found]
    assert (np.diff(bounds) < 0).all()
    assert (np.diff([float(f.expected_gap(0.3)) for f in found]) > 0).all()
    few = found[2]
    white = rng.normal(size=(4000, 48))
    draws = hartley(jnp.sqrt(spectrum(kernel, ring) + 0.09) * white, ((48,),))
    gaps = jax.vmap(lambda y: few.evidence(y, 0.3) - few.bound(y, 0.3))(draws)
    assert (gaps > 0).all()
    assert abs(gaps.mean() - few.expected_gap(0.3)) < 4 * gaps.std() / np.sqrt(4000)


@pytest.mark.long
def test_derivatives_and_transforms():
    ring, y = CASES["line"][0], jnp.array(np.sin(np.arange(48.0)))

    def loss(ls, noise):
        return Subsampled.of(dgp.kernels.RBF(1.0, ls), ring, 4).bound(y, noise)

    slopes = jax.jit(jax.grad(loss, (0, 1)))(1.1, 0.3)
    step = 1e-5
    for slope, (a, b) in zip(slopes, [(step, 0), (0, step)], strict=True):
        numeric = (loss(1.1 + a, 0.3 + b) - loss(1.1 - a, 0.3 - b)) / (2 * step)
        np.testing.assert_allclose(slope, numeric, rtol=1e-6)
    several = jax.vmap(lambda ls: loss(ls, 0.3))(jnp.array([0.5, 1.1]))
    np.testing.assert_allclose(several[1], loss(1.1, 0.3), rtol=1e-12)


@pytest.mark.slow
@pytest.mark.usefixtures("x32")
@pytest.mark.parametrize("lengthscale", [0.5, 8.0])
def test_single_precision(lengthscale):
    """A spectrum that underflows at most frequencies is no problem, nor is its gradient."""
    ring, y = Ring(np.float32(0), np.float32(64), 256), np.sin(np.arange(256) / 9).astype(np.float32)
    loss = lambda ls: Subsampled.of(dgp.kernels.RBF(1.0, ls), ring, 8).bound(y, 0.3)  # noqa: E731
    value, slope = jax.value_and_grad(loss)(np.float32(lengthscale))
    assert value.dtype == slope.dtype == jnp.float32
    wide = np.linspace(0, 64, 256, endpoint=False)
    apart = abs(wide[:, None] - wide[None])
    apart = np.minimum(apart, 64 - apart)
    K = np.exp(-0.5 * (apart / lengthscale) ** 2)
    K += np.exp(-0.5 * ((64 - apart) / lengthscale) ** 2)
    eigen = np.maximum(np.fft.fft(K[0]).real, 1e-14).reshape(8, 32)
    signal = (eigen**2).sum(0) / eigen.sum(0)
    Q = np.fft.ifft(np.eye(256), norm="ortho")
    blocks = np.zeros((256, 256))
    for m in range(32):
        blocks[m::32, m::32] = np.outer(eigen[:, m], eigen[:, m]) / eigen[:, m].sum()
    dense_Q = (Q @ blocks @ np.conj(Q).T).real
    expected = log_normal(y.astype(float), np.zeros(256), dense_Q + 0.09 * np.eye(256))
    expected -= 0.5 * (256 - signal.sum()) / 0.09
    np.testing.assert_allclose(value, expected, rtol=1e-4, atol=0.05)
    assert np.isfinite(slope)


@pytest.mark.slow
def test_bad_input():
    ring = Ring(0.0, 10.0, 12)
    with pytest.raises(ValueError, match=r"expected every to divide the size \(12,\) of the ring, got 5"):
        Subsampled.of(dgp.kernels.RBF(), ring, 5)
    with pytest.raises(ValueError, match="expected every to divide"):
        Subsampled.of(dgp.kernels.RBF(), ring, (2, 2))
    with pytest.raises(ValueError, match="has no spectral density"):
        Subsampled.of(dgp.kernels.Linear(), ring, 2)
    found = Subsampled.of(dgp.kernels.RBF(), ring, 3)
    with pytest.raises(
        ValueError, match=r"expected an observation at each of the 12 points of the ring, got shape \(5"
    ):
        found.bound(np.zeros(5), 0.1)
    with pytest.raises(ValueError, match=r"Subsampled\.\w+: expected noise to be positive"):
        found.expected_gap(-1.0)
