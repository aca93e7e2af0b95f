"""Wrong calls of ``dgp.rings`` and ``dgp.Grid``."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from wrong_calls.wrong import Wrong

import numpyro_dgp as dgp
from numpyro_dgp.rings import (
    Ring,
    RingNormal,
    Subsampled,
    optimal_gain,
    optimal_mean,
    regular,
    wraparound,
)

RBF = dgp.kernels.RBF()
RING = Ring(0.0, 8.0, 16)
PLANE = Ring([0.0, 0.0], [1.0, 1.0], (4, 2))
Y = np.sin(np.arange(16.0))
GAPS = np.where(Y > 0.5, np.nan, Y)
MASK = np.ones(16, bool)
X = np.linspace(0, 7, 9)[:, None]
# One observation every few hours, written down in thousandths of an hour.
ROUNDED = np.sort(np.round(np.random.default_rng(0).uniform(0, 1000, 100), 3))


def exact(**kwargs):
    return RingNormal(RBF, RING, **{"noise": 0.1, **kwargs})


def few():
    return Subsampled.of(RBF, RING, 2)


def function(outputs=None):
    with numpyro.handlers.seed(rng_seed=0):
        return dgp.gp("f", RBF, dgp.Grid(0.0, 8.0, 16), outputs=outputs)


ONE_NOISE = r"expected noise to be a single number, got shape \(\d+,\): for noise per row"
PER_POINT = r"RingNormal.*: expected {} of shape \(16,\), one number per observed point, got {}"
IS_MASK = r"RingNormal: expected observed to be a mask of shape \(16,\).*got {}.*mask\[indices\] = True"

WRONG = [
    # RingNormal
    Wrong("noise of other points", lambda: exact(noise=np.ones(15)), PER_POINT.format("noise", r"\(15,\)")),
    Wrong("noise in a list", lambda: exact(noise=jnp.ones(1)), PER_POINT.format("noise", r"\(1,\)")),
    Wrong("noise of zero", lambda: exact(noise=0.0), "expected noise to be positive, got 0.0"),
    Wrong("noise is complex", lambda: exact(noise=1j), "expected noise to be a positive number, got complex"),
    Wrong("noise is NaN", lambda: exact(noise=np.nan), "expected noise to be positive, got nan"),
    Wrong("loc is a column", lambda: exact(loc=Y[:, None]), PER_POINT.format("loc", r"\(16, 1\)")),
    Wrong("loc too short", lambda: exact(loc=Y[:5]), PER_POINT.format("loc", r"\(5,\)")),
    Wrong("loc is NaN", lambda: exact(loc=np.nan), "expected finite loc, got 1 NaN"),
    Wrong("indices", lambda: exact(observed=np.arange(5)), IS_MASK.format(r"int64 of shape \(5,\)")),
    Wrong("indices of all", lambda: exact(observed=np.arange(16)), IS_MASK.format("int64")),
    Wrong("list of indices", lambda: exact(observed=[0, 3]), IS_MASK.format(r"int64 of shape \(2,\)")),
    Wrong("mask too short", lambda: exact(observed=MASK[:5]), IS_MASK.format(r"bool of shape \(5,\)")),
    Wrong("mask of a column", lambda: exact(observed=MASK[:, None]), IS_MASK.format(r"bool of shape \(16, 1\)")),
    Wrong(
        "mask transposed",
        lambda: RingNormal(RBF, PLANE, 0.1, np.ones((2, 4), bool)),
        r"shape \(8,\) or \(4, 2\), True where .* got bool of shape \(2, 4\)",
    ),
    Wrong("mask of nothing", lambda: exact(observed=~MASK), "observed grid points among 16, got none"),
    Wrong("observations for a mask", lambda: exact(observed=Y), IS_MASK.format("float64")),
    Wrong(
        "mask traced",
        lambda: jax.eval_shape(lambda m: exact(observed=m).log_prob(Y), MASK),
        "expected observed to be known when the program is compiled, got a traced array: make the mask outside",
    ),
    Wrong("no ring", lambda: RingNormal(RBF, 16, 0.1), r"RingNormal: expected a dgp.rings.Ring, got int"),
    Wrong("several kernels", lambda: RingNormal([RBF, RBF], RING, 0.1), "expected a kernel.*got list"),
    Wrong("no kernel", lambda: RingNormal("rbf", RING, 0.1), "expected a kernel.*got str"),
    Wrong("not stationary", lambda: RingNormal(dgp.kernels.Linear(), RING, 0.1), "Linear has no spectral density"),
    Wrong("values in a column", lambda: exact().log_prob(Y[:, None]), PER_POINT.format("values", r"\(16, 1\)")),
    Wrong("one value", lambda: exact().log_prob(1.0), PER_POINT.format("values", r"\(\)")),
    Wrong("values too few", lambda: exact().log_prob(Y[:5]), PER_POINT.format("values", r"\(5,\)")),
    Wrong("values are NaN", lambda: exact().log_prob(GAPS), "expected finite values, got 6 NaN.*mark it"),
    Wrong(
        "values masked",
        lambda: exact().log_prob(np.ma.masked_invalid(GAPS)),
        r"expected values to be numbers, got 6 masked value\(s\): drop these rows",
    ),
    Wrong(
        "column while tracing",
        lambda: jax.eval_shape(exact().log_prob, jax.ShapeDtypeStruct((16, 1), jnp.float32)),
        PER_POINT.format("values", r"\(16, 1\)"),
    ),
    Wrong("posterior of a column", lambda: exact().posterior(Y[:, None]), PER_POINT.format("values", r"\(16, 1\)")),
    Wrong("posterior of the whole ring", lambda: exact().posterior(Y[:15]), PER_POINT.format("values", r"\(15,\)")),
    Wrong("posterior_mean too few", lambda: exact().posterior_mean(Y[:3]), PER_POINT.format("values", r"\(3,\)")),
    Wrong(
        "posterior_mean tol", lambda: exact().posterior_mean(Y, tol=-1.0), "posterior_mean: expected tol to be positive"
    ),
    # regular
    Wrong("two irregular", lambda: regular(np.array([0.0, 1.0, 2.4]), 6.0), r"got one .* \(spacings 1 to 1\.4\)"),
    Wrong(
        "rounded times",
        lambda: regular(ROUNDED, 10.0),
        r"a spacing 0\.158 \(median 8\.749\), 6295.* points, 100 data.* dgp\.Grid",
    ),
    Wrong("tiny step", lambda: regular(np.array([0.0, 1e-300, 1.0]), 1.0), "a spacing 1e-300"),
    Wrong("in milliseconds", lambda: regular(np.array([0, 1, 10**9]), 1.0), r"1e\+09 points, 3 data"),
    Wrong(
        "large margin", lambda: regular(np.arange(5.0), 1e9), r"a margin that leaves the ring at most 4194304 points"
    ),
    Wrong("negative margin", lambda: regular(np.arange(5.0), -1.0), "a finite margin of 0 or more"),
    Wrong("margin in words", lambda: regular(np.arange(5.0), "6"), "a finite margin .*got 6"),
    Wrong("margins", lambda: regular(np.arange(5.0), np.ones(2)), "a finite margin of 0 or more"),
    Wrong("margin forgotten", lambda: regular(np.arange(5.0), True), "a finite margin .*got True"),
    Wrong("times", lambda: regular(np.arange("2024-01", "2024-05", dtype="M8[M]"), 1.0), r"got times.*timedelta64\(1"),
    Wrong("a column", lambda: regular(X, 1.0), r"in increasing order, got shape \(9, 1\): take the column, x\[:, 0\]"),
    Wrong("repeated", lambda: regular(np.array([0.0, 0.0, 1.0]), 1.0), "sort them first, without repeated inputs"),
    Wrong("missing times", lambda: regular(np.array([0.0, np.nan, 1.0]), 1.0), "finite inputs x"),
    Wrong("one time", lambda: regular(np.array([1.0]), 1.0), r"expected inputs \(N,\) in increasing order"),
    Wrong("traced times", lambda: jax.eval_shape(lambda x: regular(x, 1.0)[1], X[:, 0]), "known values, got traced"),
    Wrong("no times", lambda: regular([], 1.0), r"expected inputs \(N,\) in increasing order, got shape \(0,\)"),
    # Ring and Grid
    Wrong(
        "far away", lambda: Ring(1.7e9, 1.7e9 + 1e-5, 200), r"ends whose steps float\d+ resolves.*subtract the first"
    ),
    Wrong("infinite ring", lambda: Ring(0.0, np.inf, 8), "expected finite high"),
    Wrong("ends in disorder", lambda: Ring(1.0, 0.0, 8), "expected low < high, got 1.0 and 0.0"),
    Wrong("size is a float", lambda: Ring(0.0, 1.0, 8.0), "expected size to be one, two or three integers.*got 8.0"),
    Wrong("size of one", lambda: Ring(0.0, 1.0, 1), "expected size to be one, two or three integers from 2"),
    Wrong("low is text", lambda: Ring("0", 1.0, 8), "expected low to be numbers, got text"),
    Wrong("low of two", lambda: Ring([0.0, 0.0], 1.0, 8), r"expected low to be a number or one per dimension.*\(2,\)"),
    Wrong("grid size is a float", lambda: dgp.Grid(0.0, 1.0, 8.0), "Grid: expected size to be one, two or three"),
    Wrong("around lengthscales", lambda: dgp.Grid.around(X, [1.0, 2.0]), r"shape \(1,\), got shape \(2,\)"),
    Wrong("around negative", lambda: dgp.Grid.around(X, -1.0), "lengthscale to be positive, got -1"),
    Wrong("around a vector", lambda: dgp.Grid.around(X[:, 0], 1.0), r"expected inputs of shape \(..., N, D\)"),
    Wrong("around text", lambda: dgp.Grid.around([["a"], ["b"]], 1.0), "inputs X to be numbers, got text"),
    Wrong("around too many", lambda: dgp.Grid.around(1e6 * X, 0.1), r"from 2 to 4194304, got \(\d+,\)"),
    Wrong("local tol", lambda: dgp.Grid(0.0, 8.0, 16).local(RBF, tol=0.0), "tol to be positive"),
    # wraparound
    Wrong("wraparound of 8", lambda: wraparound(RBF, 8, 1.0), r"wraparound: expected a dgp\.rings\.Ring, got int"),
    Wrong(
        "every second of nothing", lambda: Subsampled.of(RBF, None, 2), r"Subsampled\.of: expected a dgp\.rings\.Ring"
    ),
    Wrong("negative span", lambda: wraparound(RBF, RING, -1.0), r"a span .* from 0 to the length \[8\.\]"),
    Wrong("longer than the ring", lambda: wraparound(RBF, RING, 9.0), "got 9.0: pass the range of the data"),
    Wrong("spans of two", lambda: wraparound(RBF, RING, np.ones(2)), r"a span \(\) or \(1,\)"),
    Wrong("span is NaN", lambda: wraparound(RBF, RING, np.nan), "expected finite span"),
    # Subsampled
    Wrong("does not divide", lambda: Subsampled.of(RBF, RING, 3), r"every to divide the size \(16,\).* got 3"),
    Wrong("every is a float", lambda: Subsampled.of(RBF, RING, 2.0), r"every to divide the size \(16,\).* got 2.0"),
    Wrong("every of two", lambda: Subsampled.of(RBF, RING, (2, 2)), r"every to divide the size .* got \(2, 2\)"),
    Wrong("apply too long", lambda: few().apply(np.ones(17)), r"vectors of shape \(..., 16\).* got \(17,\)"),
    Wrong("solve too short", lambda: few().solve(np.ones(15), 0.1), r"vectors of shape \(..., 16\).* got \(15,\)"),
    Wrong("solve noise", lambda: few().solve(Y, -0.1), r"Subsampled\.\w+: expected noise to be positive"),
    Wrong("determinant noises", lambda: few().log_determinant(np.ones(16)), r"Subsampled\.\w+: " + ONE_NOISE),
    Wrong(
        "bound of a column", lambda: few().bound(Y[:, None], 0.1), r"at each of the 16 points .* got shape \(16, 1\)"
    ),
    Wrong("bound of gaps", lambda: few().bound(GAPS, 0.1), "expected finite observations y.*RingNormal"),
    Wrong("evidence noises", lambda: few().evidence(Y, np.ones(16)), r"Subsampled\.\w+: " + ONE_NOISE),
    Wrong(
        "gap without noise", lambda: few().expected_gap(0.0), r"Subsampled\.\w+: expected noise to be positive, got 0.0"
    ),
    Wrong("posterior of few", lambda: few().posterior(Y[:4], 0.1), "expected an observation at each of the 16 points"),
    # optimal_mean and optimal_gain
    Wrong("targets in a column", lambda: optimal_mean(function(), X, X, 0.1), r"y of shape \(9,\).* got \(9, 1\)"),
    Wrong("targets of one output", lambda: optimal_mean(function(2), X, X, 0.1), r"y of shape \(9, 2\).* got \(9, 1\)"),
    Wrong("targets too few", lambda: optimal_mean(function(), X, X[:4, 0], 0.1), r"y of shape \(9,\).* got \(4,\)"),
    Wrong("targets NaN", lambda: optimal_mean(function(), X, np.nan * X[:, 0], 0.1), "finite targets y"),
    Wrong("noises", lambda: optimal_mean(function(), X, X[:, 0], np.ones(9)), "optimal_mean: " + ONE_NOISE),
    Wrong(
        "tolerance",
        lambda: optimal_mean(function(), X, X[:, 0], 0.1, tol=0.0),
        "optimal_mean: expected tol to be positive",
    ),
    Wrong("a kernel", lambda: optimal_mean(RBF, X, X[:, 0], 0.1), r"a function on a dgp\.Grid .* got RBF"),
    Wrong("batches of inputs", lambda: optimal_mean(function(), X[None], X[:, 0], 0.1), r"x of shape \(N, D\)"),
    Wrong("gain noises", lambda: optimal_gain(function(), X, np.ones(16)), "optimal_gain: " + ONE_NOISE),
    Wrong("gain negative noise", lambda: optimal_gain(function(), X, -1.0), "noise to be positive"),
    Wrong("gain batches", lambda: optimal_gain(function(), X[None], 0.1), r"x of shape \(N, D\), got \(1, 9, 1\)"),
]
