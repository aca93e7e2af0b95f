"""Rings with many gaps, noise of their own at every point, and product grids, against dense processes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense import log_normal
from numpyro.distributions import kl_divergence
from scipy.linalg import toeplitz
from sizes import mostly_long

import numpyro_dgp as dgp
from numpyro_dgp.rings import Ring, RingNormal, Solver, regular
from numpyro_dgp.rings.gaps import toeplitz_log_determinant
from numpyro_dgp.rings.pattern import LONGEST, Pattern
from numpyro_dgp.rings.spectra import periodised

rng = np.random.default_rng(5)
KERNEL = dgp.kernels.RBF(1.2, 1.1)
LINE, PLANE = Ring(0.0, 36.0, 120), Ring([0.0, 0.0], [12.0, 10.0], (15, 12))
SCATTERED = rng.uniform(size=120) > 0.2
SCATTERED[60:75] = False  # and a long gap
GAP = np.arange(120) < 90
HOLES = rng.uniform(size=180) > 0.15
CASES = {
    "gaps": (LINE, SCATTERED, 0.3),
    "uneven": (LINE, SCATTERED, 0.3 * np.exp(0.4 * rng.normal(size=SCATTERED.sum()))),
    "plane": (PLANE, HOLES, 0.3),
    "uneven plane": (PLANE, HOLES, 0.3 * np.exp(0.4 * rng.normal(size=HOLES.sum()))),
    "uneven everywhere": (LINE, None, 0.3 * np.exp(0.4 * rng.normal(size=120))),
}
ESTIMATED = Solver(exact=0, tol=1e-12)


def dense(ring, observed, noise, kernel=KERNEL):
    """Which points are observed, the covariance of the process on the ring, that of the observations."""
    Z = ring.points()
    keep = np.ones(len(Z), bool) if observed is None else observed
    K = np.asarray(periodised(kernel, ring, Z, Z))
    return keep, K, K[np.ix_(keep, keep)] + np.diag(np.broadcast_to(np.square(noise), keep.sum()))


def exact_posterior(y, keep, K, noisy):
    gain = np.linalg.solve(noisy, K[keep]).T
    return gain @ y, np.diag(K) - np.einsum("ij,ji->i", gain, K[keep])


@pytest.mark.long
@pytest.mark.parametrize("case", mostly_long(["gaps"], CASES))
def test_conjugate_gradients_are_the_dense_process(case):
    """The density within its error, and the posterior on all points, exactly when the reach is the ring."""
    ring, observed, noise = CASES[case]
    keep, K, noisy = dense(ring, observed, noise)
    y = rng.normal(size=keep.sum())
    d = RingNormal(KERNEL, ring, noise, observed, 0.5, ESTIMATED)
    value, error = jax.jit(lambda d: d.log_prob_and_error(y))(d)  # the pattern of gaps stays known
    assert 0 < error < 5
    assert abs(value - log_normal(y, 0.5, noisy)) < 4 * error
    mean, variance = d.posterior(y, reach=max(ring.sizes))
    expected = exact_posterior(y - 0.5, keep, K, noisy)
    atol = 1e-8 if len(ring.sizes) == 1 else 1e-6  # the spectrum's own accuracy (test_circulant)
    np.testing.assert_allclose(mean, expected[0], atol=atol)
    np.testing.assert_allclose(variance, expected[1], atol=atol)


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_dense_ways_are_exact(case):
    ring, observed, noise = CASES[case]
    keep, K, noisy = dense(ring, observed, noise)
    y = rng.normal(size=keep.sum())
    d = RingNormal(KERNEL, ring, noise, observed)
    value, error = d.log_prob_and_error(np.stack([y, -2 * y]))
    atol = 1e-8 if len(ring.sizes) == 1 else 1e-6
    np.testing.assert_allclose(value[1], log_normal(-2 * y, 0.0, noisy), atol=4 * atol)
    np.testing.assert_array_equal(error, np.zeros(2))
    np.testing.assert_allclose(d.posterior(y), exact_posterior(y, keep, K, noisy), atol=atol)
    np.testing.assert_allclose(d.variance, np.diag(noisy), atol=atol)


@pytest.mark.long
def test_fewer_observations_than_gaps_are_factorised_themselves():
    observed = np.arange(120) % 7 == 0
    keep, K, noisy = dense(LINE, observed, 0.3)
    y = rng.normal(size=keep.sum())
    d = RingNormal(KERNEL, LINE, 0.3, observed, solver=Solver(exact=20))  # 18 observations, 102 gaps
    value, error = d.log_prob_and_error(y)
    assert error == 0
    np.testing.assert_allclose(value, log_normal(y, 0.0, noisy), atol=1e-9)
    np.testing.assert_allclose(d.posterior(y), exact_posterior(y, keep, K, noisy), atol=1e-9)


@pytest.mark.long
@pytest.mark.parametrize("roll", [0, -20])
def test_one_gap_has_an_exact_determinant(roll):
    """Wherever the gap is, round the back too."""
    observed = np.roll(GAP, roll)
    keep, _, noisy = dense(LINE, observed, 0.3)
    y = rng.normal(size=keep.sum())
    value, error = RingNormal(KERNEL, LINE, 0.3, observed, solver=ESTIMATED).log_prob_and_error(y)
    np.testing.assert_allclose(value, log_normal(y, 0.0, noisy), atol=1e-8)
    assert error < 1e-8  # what conjugate gradients left


@pytest.mark.slow
def test_determinants_of_toeplitz_matrices():
    column = jnp.asarray(np.exp(-np.arange(20) / 3.0)).at[0].add(0.1)
    value, slope = jax.value_and_grad(toeplitz_log_determinant)(column)
    inverse = np.linalg.inv(toeplitz(column))
    np.testing.assert_allclose(value, np.linalg.slogdet(toeplitz(column))[1], rtol=1e-12)
    sums = [(1 if k == 0 else 2) * np.trace(inverse, k) for k in range(20)]
    np.testing.assert_allclose(slope, sums, rtol=1e-9, atol=1e-11)


def evidence(case, solver, y):
    ring, observed, noise = CASES[case]

    def log_prob(h):
        kernel = dgp.kernels.RBF(h[0], h[1])
        return RingNormal(kernel, ring, h[2] * noise, observed, solver=solver).log_prob(y)

    return log_prob


@pytest.mark.long
@pytest.mark.parametrize("case", ["gaps", "uneven", "plane"])
def test_slopes_are_those_of_the_value(case):
    """Value and slope are of one function, that of the same probes, and the slope is near that of the exact density."""
    y = rng.normal(size=(CASES[case][0].points().shape[0] if CASES[case][1] is None else CASES[case][1].sum()))
    estimated = jax.jit(jax.value_and_grad(evidence(case, ESTIMATED, y)))
    h, step = jnp.array([1.2, 1.1, 1.0]), 1e-4
    value, slope = estimated(h)
    assert estimated(h)[0] == value
    for i in range(3):
        ahead, behind = (estimated(h.at[i].add(s))[0] for s in (step, -step))
        np.testing.assert_allclose(slope[i], (ahead - behind) / (2 * step), rtol=1e-3, atol=1e-3)
    exact = jax.grad(evidence(case, Solver(), y))(h)
    np.testing.assert_allclose(slope, exact, rtol=0.05, atol=5.0)


@pytest.mark.long
@pytest.mark.parametrize("case", ["gaps", "uneven"])
def test_the_error_is_that_of_the_estimate(case):
    """Over seeds, differences to the exact density have the size that is reported; more probes bring them down."""
    ring, observed, noise = CASES[case]
    keep, _, noisy = dense(ring, observed, noise)
    y = rng.normal(size=keep.sum())
    exact, found = log_normal(y, 0.0, noisy), []
    for seed in range(8):
        d = RingNormal(KERNEL, ring, noise, observed, solver=Solver(exact=0, seed=seed, probes=16))
        found.append([float(v) for v in d.log_prob_and_error(y)])
    value, error = np.array(found).T
    assert 0.4 < np.sqrt(np.square(value - exact).mean()) / error.mean() < 2
    more = RingNormal(KERNEL, ring, noise, observed, solver=Solver(exact=0, probes=144))
    np.testing.assert_allclose(more.log_prob_and_error(y)[1], error.mean() / 3, rtol=0.35)


@pytest.mark.long
def test_variances_from_points_nearby():
    """Below those of the whole ring, and the nearer the further they reach; by default to a thousandth."""
    size = 600
    ring, observed = Ring(0.0, 180.0, size), rng.uniform(size=size) > 0.2
    observed[300:400] = False
    exact = RingNormal(KERNEL, ring, 0.3, observed).posterior(np.zeros(observed.sum()))[1]
    d = RingNormal(KERNEL, ring, 0.3, observed, solver=ESTIMATED)
    y = np.zeros(observed.sum())
    found = {reach: d.posterior(y, reach=reach)[1] for reach in (4, None)}
    assert (found[4] <= exact + 1e-9).all()
    assert (exact - found[4]).max() > 1e-2
    np.testing.assert_allclose(found[None], exact, atol=2e-4)


@pytest.mark.long
def test_draws_with_uneven_noise_have_the_covariance(key):
    ring, observed = Ring(0.0, 12.0, 16), np.arange(16) < 11
    noise = np.linspace(0.2, 1.0, 11)
    d = RingNormal(KERNEL, ring, noise, observed)
    assert d.white_shape == (27,)
    draws = d.sample(key, (20_000,))
    products = draws[:, :, None] * draws[:, None]
    error = products.std(0) / np.sqrt(20_000)
    assert (abs(products.mean(0) - dense(ring, observed, noise)[2]) < 4.5 * error).all()
    with pytest.raises(NotImplementedError):
        kl_divergence(d, d)


def test_runs_of_gaps():
    """Shortest first, not across the ends of rows, and cut where they are long."""
    mask = np.array([1, 0, 1, 1, 0, 0, 1, 0, 1, 0], bool)
    order, runs = Pattern(mask, (10,)).runs()
    assert (order.tolist(), runs) == ([1, 7, 9, 4, 5], ((3, 1), (1, 2)))
    order, runs = Pattern(mask, (2, 5)).runs()
    assert (order.tolist(), runs) == ([1, 4, 5, 7, 9], ((5, 1),))
    observed = np.arange(3 * LONGEST) < 10
    _, runs = Pattern(observed, (3 * LONGEST,)).runs()
    assert runs == ((1, LONGEST - 10), (2, LONGEST))
    assert Pattern(mask, (10,)) == Pattern(mask.copy(), (10,)) != Pattern(~mask, (10,))


@pytest.mark.slow
@pytest.mark.parametrize("margin", [60.0, [6.0, 2.0]])
def test_product_grids(margin):
    """Rows of a table in order, some missing, on a torus; the evidence is that of the plane."""
    steps = np.stack(np.meshgrid(np.arange(9) * 1.0, np.arange(7) * 0.5, indexing="ij"), -1).reshape(-1, 2)
    x = np.delete(steps, [5, 17, 40], 0)
    ring, observed = regular(x, margin)
    least = np.array([9, 7]) + np.broadcast_to(margin, 2) / [1.0, 0.5]
    assert (ring.sizes >= least).all()
    np.testing.assert_allclose(ring.points()[observed], x, atol=1e-12)
    if margin == 60.0:
        return
    kernel, y = dgp.kernels.RBF(1.0, [1.0, 0.4]), rng.normal(size=len(x))
    line = np.asarray(kernel(x, x)) + 0.09 * np.eye(len(x))
    value = RingNormal(kernel, ring, 0.3, observed).log_prob(y)
    np.testing.assert_allclose(value, log_normal(y, 0.0, line), atol=1e-4)


def test_rings_of_series_with_many_gaps_have_fast_transforms():
    """Where a tenth is missing the padding costs next to nothing, and slow transforms hundreds of times as much."""
    x = np.flatnonzero(np.random.default_rng(0).uniform(size=100_000) > 0.1).astype(float)
    (size,) = regular(x, 60.0)[0].sizes
    assert x[-1] + 61 <= size <= x[-1] + 61 + 2000
    rest = size
    for p in (2, 3, 5, 7):
        while rest % p == 0:
            rest //= p
    assert rest == 1
    assert regular(np.arange(1e6), 100.0)[0].sizes[0] < 1_000_300  # and few gaps stay few


@pytest.mark.usefixtures("x32")
@pytest.mark.long
@pytest.mark.parametrize("case", ["gaps", "uneven"])
def test_single_precision(case):
    ring, observed, noise = CASES[case]
    ring, noise = Ring(np.float32(0), np.float32(36), 120), np.float32(noise)
    _, _, noisy = dense(ring, observed, noise.astype(float))
    y = np.sin(np.arange(observed.sum()) / 9).astype(np.float32)
    d = RingNormal(KERNEL, ring, noise, observed, solver=Solver(exact=0, probes=32))
    value, error = d.log_prob_and_error(y)
    assert value.dtype == error.dtype == jnp.float32
    assert abs(value - log_normal(y.astype(float), 0.0, noisy)) < 4 * error + 0.05


def test_bad_input():
    y = np.zeros(SCATTERED.sum())
    with pytest.raises(ValueError, match=r"RingNormal: expected noise of shape \(\d+,\), one number per observed"):
        RingNormal(KERNEL, LINE, np.ones(120), SCATTERED)
    with pytest.raises(ValueError, match=r"expected noise to be positive, got 0\.0"):
        RingNormal(KERNEL, LINE, np.append(y[1:] + 1.0, 0.0), SCATTERED)
    with pytest.raises(ValueError, match=r"got noise=None with \d+ values and \d+ gaps, .*: give the process a small"):
        RingNormal(KERNEL, LINE, None, SCATTERED, solver=ESTIMATED).log_prob(y)
    with pytest.raises(ValueError, match=r"RingNormal: expected solver to be a dgp\.rings\.Solver, got int"):
        RingNormal(KERNEL, LINE, 0.1, SCATTERED, solver=8)
    many = RingNormal(KERNEL, LINE, 0.3, SCATTERED, solver=ESTIMATED)
    with pytest.raises(ValueError, match=r"RingNormal.posterior: expected reach to be a positive integer, got 0"):
        many.posterior(y, reach=0)
    with pytest.raises(ValueError, match=r"expected known hyperparameters, or reach=, .* got traced ones"):
        jax.eval_shape(lambda d: d.posterior(y), many)
    for wrong, match in [
        ({"probes": 1}, "Solver: expected probes to be at least 2, got 1"),
        ({"steps": 0}, "Solver: expected steps to be a positive integer, got 0"),
        ({"exact": -1}, "Solver: expected exact, an integer of 0 or more, got -1"),
        ({"tol": 0.0}, "Solver: expected tol to be positive"),
        ({"seed": None}, "Solver: expected seed to be an integer, got None"),
    ]:
        with pytest.raises(ValueError, match=match):
            Solver(**wrong)
    grid = np.stack(np.meshgrid(np.arange(3.0), np.arange(4.0), indexing="ij"), -1).reshape(-1, 2)
    with pytest.raises(ValueError, match=r"expected rows in order, .* order = np.lexsort\(x.T\[::-1\]\)"):
        regular(grid[::-1], 6.0)
    with pytest.raises(ValueError, match="expected several values in every column, got one in column 1"):
        regular(grid[::4], 6.0)
    scattered = np.random.default_rng(0).uniform(size=(100, 2))
    with pytest.raises(ValueError, match="expected rows on a product grid, got 100 rows with 100 x 100 different"):
        regular(scattered, 6.0)
    with pytest.raises(ValueError, match="expected a finite margin of 0 or more, got"):
        regular(grid, [1.0, 2.0, 3.0])


@pytest.mark.slow
def test_a_compiled_posterior_of_known_hyperparameters_finds_its_reach():
    y = rng.normal(size=SCATTERED.sum())
    d = RingNormal(KERNEL, LINE, 0.3 + 0 * y, SCATTERED, solver=ESTIMATED)
    assert [a.shape for a in jax.eval_shape(d.posterior, y)] == [(120,), (120,)]


@pytest.mark.long
@pytest.mark.parametrize("case", ["gaps", "uneven"])
def test_second_derivatives_are_refused_where_the_determinant_is_estimated(case):
    y = rng.normal(size=SCATTERED.sum())
    h = jnp.array([1.2, 1.1, 1.0])
    with pytest.raises(ValueError, match=r"expected first derivatives .* got second ones: use solver="):
        jax.eval_shape(jax.hessian(evidence(case, ESTIMATED, y)), h)
    assert np.isfinite(jax.hessian(evidence(case, Solver(), y))(h)).all()


@pytest.mark.long
@pytest.mark.parametrize("case", ["gaps", "uneven"])
def test_near_hyperparameters_have_nearly_the_same_error(case):
    """The probes are the same, so that differences of densities are better than densities."""
    y = rng.normal(size=SCATTERED.sum())
    h = jnp.array([1.2, 1.1, 1.0])
    both = jax.jit(lambda h: evidence(case, ESTIMATED, y)(h) - evidence(case, Solver(), y)(h))
    ring, observed, noise = CASES[case]
    error = RingNormal(KERNEL, ring, noise, observed, solver=ESTIMATED).log_prob_and_error(y)[1]
    assert abs(both(h.at[1].mul(1.02)) - both(h)) < 0.3 * error
