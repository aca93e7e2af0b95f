"""Acquisitions: closed forms of one Gaussian, averages over mixtures, batches by brute force, slopes, wrong calls."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs import X, Y, deep, random_params
from scipy import integrate, stats
from sizes import mostly_long

import numpyro_dgp as dgp
from numpyro_dgp import design
from numpyro_dgp.design.improvement import expected_gain, log_expected_excess

KEY = jax.random.key(3)
RUNS = np.array([[0.0, 0.1], [0.9, 0.3], [0.4, 0.8], [0.5, 0.2]])
VALUES = np.array([0.3, -0.8, 1.1, 0.2])
SPACE = np.random.default_rng(5).uniform(size=(6, 2))
ONE = np.array([[0.62, 0.45]])
TWO = np.array([[0.62, 0.45], [0.2, 0.6]])
THREE = np.array([[0.62, 0.45], [0.2, 0.6], [0.95, 0.75]])


class Emulator:
    """Exact Gaussian processes given the runs, one for each lengthscale: all of the posterior that is needed."""

    def __init__(self, *scales, known=False):
        self.scales, self.known = scales, known

    def predict_jointly(self, key, rows):
        parts = [self.given_runs(jnp.asarray(rows), scale) for scale in self.scales]
        return dgp.densities.JointMixture(*(jnp.stack(arrays) for arrays in zip(*parts, strict=True)))

    def given_runs(self, x, scale):
        def k(a, b):
            return jnp.exp(-0.5 * jnp.square((a[:, None] - b) / scale).sum(-1))

        runs, y = jnp.asarray(RUNS, x.dtype), jnp.asarray(VALUES, x.dtype)
        A = jnp.linalg.solve(k(runs, runs) + 1e-4 * jnp.eye(len(runs), dtype=x.dtype), k(runs, x)).T
        C = k(x, x) - A @ k(runs, x)
        return A @ y, 0 * C if self.known else C, k(x, x)


GP, MIXTURE = Emulator(0.35), Emulator(0.2, 0.35, 0.8)
# From a posterior to each acquisition.
MAKE = {
    "EI": lambda p, **o: design.ExpectedImprovement(p, KEY, -0.7, **o),
    "LogEI": lambda p, **o: design.LogExpectedImprovement(p, KEY, -0.7, **o),
    "UCB": lambda p, **o: design.UpperConfidence(p, KEY, 1.5, **o),
    "KG": lambda p, **o: design.KnowledgeGradient(p, KEY, SPACE, 0.1, **o),
    "ALM": lambda p, **o: design.ALM(p, KEY, **o),
    "ALC": lambda p, **o: design.ALC(p, KEY, SPACE, 0.1, **o),
    "MICE": lambda p, **o: design.MICE(p, KEY, SPACE, 0.5, **o),
    "VIGF": lambda p, **o: design.VIGF(p, KEY, RUNS, VALUES, **o),
    "contour": lambda p, **o: design.ContourEntropy(p, KEY, 0.4, **o),
}

DRAWS = {name: {"num_draws": 8} for name in ("EI", "LogEI", "UCB", "KG", "contour")}


def moments(x, scale=0.35):
    return tuple(np.asarray(a, float) for a in Emulator(scale).given_runs(jnp.asarray(x), scale))


def highest_of_lines(a, b):
    """E max(a + b Z) - max(a), between all places where two of the lines meet."""
    with np.errstate(divide="ignore", invalid="ignore"):
        meet = ((a[:, None] - a) / (b - b[:, None])).ravel()
    ends = np.concatenate([[-40.0], np.sort(meet[abs(meet) < 40]), [40.0]])
    top = (a + b * (0.5 * (ends[1:] + ends[:-1]))[:, None]).argmax(1)
    between, falls = np.diff(stats.norm.cdf(ends)), -np.diff(stats.norm.pdf(ends))
    return (a[top] * between + b[top] * falls).sum() - a.max()


def dense(name, x, scale=0.35):
    """The closed form of one Gaussian, by other algebra than the package's."""
    m, C, _ = moments(x, scale)
    mu, v = m[0], C[0, 0]
    sd = math.sqrt(v)
    both = np.concatenate([x, SPACE])
    m_all, C_all, K_all = moments(both, scale)
    q = len(x)
    if name in ("EI", "LogEI"):
        z = (-0.7 - mu) / sd
        ei = (-0.7 - mu) * stats.norm.cdf(z) + sd * stats.norm.pdf(z)
        return math.log(ei) if name == "LogEI" else ei
    if name == "UCB":
        return -(mu - 1.5 * sd)
    if name == "KG":
        return highest_of_lines(-m_all, C_all[:, 0] / math.sqrt(v + 0.01))
    if name == "ALM":
        return np.linalg.det(C) ** (1 / q)
    if name == "ALC":
        precision = np.linalg.inv(C_all[:q, :q] + 0.01 * np.eye(q))
        less = np.einsum("rq,qp,rp->r", C_all[q:, :q], precision, C_all[q:, :q])
        return less.mean()
    if name == "MICE":
        S = K_all[:q, :q] - K_all[:q, q:] @ np.linalg.inv(K_all[q:, q:] + 0.5 * np.eye(6)) @ K_all[q:, :q]
        return (np.linalg.det(C) / np.diag(S).prod()) ** (1 / q)
    if name == "VIGF":
        gap = mu - VALUES[np.square(RUNS - x[0]).sum(1).argmin()]
        return 4 * v * gap**2 + 2 * v**2
    p = stats.norm.cdf((0.4 - mu) / sd)
    return -p * math.log(p) - (1 - p) * math.log(1 - p)


@pytest.mark.slow
@pytest.mark.parametrize("name", MAKE)
def test_one_gaussian_in_closed_form(name):
    np.testing.assert_allclose(MAKE[name](GP)(ONE), dense(name, ONE), rtol=1e-8)


@pytest.mark.long
@pytest.mark.parametrize("name", ["ALM", "ALC", "MICE"])
def test_batches_in_closed_form(name):
    np.testing.assert_allclose(MAKE[name](GP)(THREE), dense(name, THREE), rtol=1e-7)


@pytest.mark.long
@pytest.mark.parametrize("name", ["EI", "KG"])
def test_averages_over_a_mixture(name):
    expected = np.mean([dense(name, ONE, scale) for scale in MIXTURE.scales])
    np.testing.assert_allclose(MAKE[name](MIXTURE)(ONE), expected, rtol=1e-8)


@pytest.mark.long
def test_large_values_are_good_on_request():
    m, C, _ = moments(ONE)
    z = (m[0] - 0.9) / math.sqrt(C[0, 0])
    expected = (m[0] - 0.9) * stats.norm.cdf(z) + math.sqrt(C[0, 0]) * stats.norm.pdf(z)
    found = design.ExpectedImprovement(GP, KEY, 0.9, minimise=False)(ONE)
    np.testing.assert_allclose(found, expected, rtol=1e-8)
    upper = design.UpperConfidence(GP, KEY, 1.5, minimise=False)(ONE)
    np.testing.assert_allclose(upper, m[0] + 1.5 * math.sqrt(C[0, 0]), rtol=1e-8)


def brute(name, posterior, x, number=400_000):
    """The acquisition by plain draws from the mixture, with its standard error."""
    rng = np.random.default_rng(0)
    found = posterior.predict_jointly(None, x)
    means, C = np.asarray(found.means), np.asarray(found.covariances)
    f = np.concatenate(
        [rng.multivariate_normal(m, c, number // len(means), method="cholesky") for m, c in zip(means, C, strict=True)]
    )
    q = len(x)
    if name in ("EI", "LogEI"):
        gain = np.maximum(-0.7 - f.min(1), 0)
        value, error = gain.mean(), gain.std() / math.sqrt(number)
        return (math.log(value), error / value) if name == "LogEI" else (value, error)
    if name == "UCB":
        m, C = np.asarray(found.mean), np.asarray(found.covariance)
        away = rng.multivariate_normal(np.zeros(q), C, number)
        best = (-m + 1.5 * math.sqrt(math.pi / 2) * abs(away)).max(1)
        return best.mean(), best.std() / math.sqrt(number)
    if name == "VIGF":
        nearest = np.square(x[:, None] - RUNS).sum(-1).argmin(1)
        squares = np.square(f - VALUES[nearest])
        value = np.linalg.det(np.atleast_2d(np.cov(squares.T))) ** (1 / q)
        parts = [
            np.linalg.det(np.atleast_2d(np.cov(part.T))) ** (1 / q)
            for part in np.array_split(rng.permutation(squares), 20)
        ]
        return value, np.std(parts) / math.sqrt(20)
    if name == "KG":
        both = posterior.predict_jointly(None, np.concatenate([x, SPACE]))
        total, square, number = 0.0, 0.0, number // len(both.means)
        for m, C in zip(np.asarray(both.means), np.asarray(both.covariances), strict=True):
            L = np.linalg.cholesky(C[:q, :q] + 0.01 * np.eye(q))
            rises = np.linalg.solve(L, C[:q]).T
            best = (-m + rng.normal(size=(number, q)) @ rises.T).max(1) - (-m).max()
            total, square = total + best.mean() / len(both.means), square + best.var() / number / len(both.means) ** 2
        return total, math.sqrt(square)
    code = (f < 0.4) @ (2 ** np.arange(q))
    p = np.bincount(code, minlength=2**q) / number
    logs = np.log(np.maximum(p, 1e-9))
    return -(p * logs).sum(), math.sqrt((p * logs**2).sum() - (p * logs).sum() ** 2) / math.sqrt(number)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "q"), [(n, 3) for n in (*DRAWS, "VIGF")] + [(n, 1) for n in ("UCB", "VIGF", "contour")]
)
def test_brute_force(name, q):
    x = THREE[:q]
    value, error = brute(name, MIXTURE, x)
    found = float(jax.jit(MAKE[name](MIXTURE, **({"num_draws": 512} if name in DRAWS else {})))(x))
    assert abs(found - value) < 4 * error + 2e-3 * abs(value)


@pytest.mark.long
@pytest.mark.parametrize("name", MAKE)
def test_slopes(name):
    """Compiled and mapped over batches; slopes by finite differences; single precision."""
    x = TWO
    acquisition = MAKE[name](MIXTURE, **DRAWS.get(name, {}))
    both = jax.jit(jax.vmap(jax.value_and_grad(acquisition)))
    stack = jnp.stack([x, x + 0.013])
    values, slopes = both(stack)
    np.testing.assert_allclose(values[1], acquisition(stack[1]), rtol=1e-9)
    for place in np.ndindex(*x.shape):
        step = np.zeros(x.shape)
        step[place] = 1e-5
        up, down = both(jnp.stack([x + step, x - step]))[0]
        np.testing.assert_allclose(slopes[0][place], (up - down) / 2e-5, rtol=2e-4, atol=1e-7)
    if name not in ("LogEI", "KG", "VIGF"):
        return
    single, slope = both(stack.astype(jnp.float32))
    assert single.dtype == slope.dtype == jnp.float32
    np.testing.assert_allclose(single, values, rtol=2e-3)
    np.testing.assert_allclose(slope, slopes, rtol=0.05, atol=0.02 * abs(slopes).max())


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "known"), [(n, False) for n in MAKE] + [(n, True) for n in ("LogEI", "KG", "contour")]
)
def test_nothing_to_learn(name, known, x32):
    """At a run, also twice, and under functions without variance: finite in single precision."""
    x = jnp.asarray(np.concatenate([RUNS[:1], RUNS[:1], ONE]), jnp.float32)
    acquisition = MAKE[name](Emulator(0.2, 0.8, known=known), **DRAWS.get(name, {}))
    value, slope = jax.jit(jax.value_and_grad(acquisition))(x)
    assert np.isfinite(value)
    assert np.isfinite(slope).all()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", mostly_long([jnp.float32], [jnp.float32, jnp.float64]))
def test_far_from_any_improvement(dtype):
    """At z standard deviations: the logarithm by an integral of positive numbers, its slope Phi(z) / h(z)."""
    z = np.array([-1e4, -200.0, -40.0, -8.0, -4.001, -3.999, -1.0, 0.0, 3.0, 40.0])

    def exact(z):
        if z > -1:
            h = stats.norm.pdf(z) + z * stats.norm.cdf(z)
            return math.log(h), stats.norm.cdf(z) / h
        # h(-t) is phi(t) times the integral of u exp(-t u - u^2 / 2), Phi(-t) the same without u.
        powers = [
            integrate.quad(lambda w: w**k * math.exp(-w - (w / z) ** 2 / 2), 0, 60, epsrel=1e-13)[0] / abs(z) ** (k + 1)
            for k in (0, 1)
        ]
        return stats.norm.logpdf(z) + math.log(powers[1]), powers[0] / powers[1]

    expected, expected_slopes = np.array([exact(value) for value in z]).T
    found, slopes = jax.vmap(jax.value_and_grad(log_expected_excess))(jnp.asarray(z, dtype))
    rtol = 2e-6 if dtype == jnp.float32 else 1e-12
    np.testing.assert_allclose(found, expected, rtol=rtol)
    np.testing.assert_allclose(slopes, expected_slopes, rtol=10 * rtol)


@pytest.mark.long
def test_improvement_in_the_tail(x32):
    """At -40 standard deviations EI is zero in single precision; its logarithm points the way."""
    x = jnp.asarray(ONE, jnp.float32)
    m, C, _ = moments(ONE)
    best = float(m[0] - 40 * math.sqrt(C[0, 0]))
    ei, slope = jax.jit(jax.value_and_grad(design.ExpectedImprovement(GP, KEY, best)))(x)
    assert ei == 0
    assert (slope == 0).all()
    for points in (x, jnp.asarray(TWO, jnp.float32)):
        value, slope = jax.jit(jax.value_and_grad(design.LogExpectedImprovement(GP, KEY, best)))(points)
        assert -900 < value < -400
        assert np.isfinite(slope).all()
        assert (slope != 0).any()


def test_gain_of_the_highest_of_lines():
    """Parallel lines, lines twice, a line that is never highest, none that rises."""
    cases = [
        ([0.0, 1.0, 0.5, 0.5], [1.0, -0.3, 0.2, 0.2]),
        ([0.0, 0.0, -5.0, -5.0], [1.0, 1.0, 0.0, 2.0]),
        ([3.0, 3.0, 0.0, 1.0], [0.0, 2.0, -1.0, -1.0]),
        ([1.0, 2.0, 2.0, 0.0], [0.4, 0.4, 0.4, 0.4]),
    ]
    gain = jax.jit(expected_gain)
    for a, b in np.array(cases):
        np.testing.assert_allclose(gain(a, b), highest_of_lines(a, b), atol=1e-12)
    tiny = gain(np.array([0.0, -30.0, -2.0, -1.0]), np.array([0.0, 1.0, 0.0, 0.0]))
    np.testing.assert_allclose(np.log(tiny), stats.norm.logpdf(30) + math.log(1 / 30**2 * (1 - 3 / 30**2)), rtol=1e-6)


@pytest.mark.slow
def test_a_point_twice_tells_nothing_new():
    mice, kg = design.MICE(GP, KEY, SPACE), design.KnowledgeGradient(GP, KEY, SPACE, num_draws=512)
    for x in (ONE, SPACE[:1]):
        assert mice(np.repeat(x, 2, 0)) < 0.1 * mice(x)
    np.testing.assert_allclose(kg(np.repeat(ONE, 2, 0)), kg(ONE), rtol=0.02)


@pytest.mark.long
def test_batches_of_different_points():
    mice = design.MICE(GP, KEY, SPACE)
    pair = design.maximise(mice, [[0, 1], [0, 1]], KEY, q=2, num_candidates=64, num_starts=2)
    assert np.linalg.norm(pair.x[0] - pair.x[1]) > 0.3


@pytest.mark.long
def test_no_knowledge_gradient_is_negative():
    """Near runs nothing is left to learn: all of the value would be the error of the draws."""
    kg = design.KnowledgeGradient(GP, KEY, SPACE, 0.1, num_draws=8)
    near = RUNS[np.random.default_rng(0).integers(4, size=(64, 2))] + 1e-3
    assert jax.vmap(kg)(near).min() >= 0


@pytest.mark.slow
@pytest.mark.parametrize("best", [np.uint8(3), np.int8(-128), jnp.uint32(3)])
def test_numbers_of_any_type(best):
    improvement = partial(design.LogExpectedImprovement, GP, KEY, minimise=False)
    assert improvement(best)(ONE) == improvement(float(best))(ONE)


@pytest.mark.slow
def test_noise_of_any_type():
    far = np.array([[50.0, 50.0], [60.0, 60.0]])
    whole, number = (design.KnowledgeGradient(GP, KEY, far, noise)(far[:1]) for noise in (np.uint8(20), 20.0))
    assert whole == number > 0


@pytest.mark.slow
def test_large_whole_numbers(x32):
    whole = np.array([3_000_000_000, -1, 0, 1])
    vigf = [design.VIGF(GP, KEY, RUNS, y)(RUNS[:1] + 0.01) for y in (whole, whole.astype(float))]
    assert vigf[0] == vigf[1]
    with pytest.raises(ValueError, match=r"values of y to stay distinct in float32, got 4 of which 1"):
        design.VIGF(GP, KEY, RUNS, 10**9 + np.arange(4))


@pytest.mark.slow
def test_candidates_in_single_precision_are_left_out_too():
    found = [design.MICE(GP, KEY, SPACE.astype(dtype))(SPACE[:1]) for dtype in (np.float32, np.float64)]
    np.testing.assert_allclose(*found, rtol=1e-5)


@pytest.mark.long
def test_of_a_deep_program():
    """Averages over the draws of the posterior, the same at every call."""
    guide = dgp.guides.InducingPoint(deep)
    posterior = dgp.Posterior(deep, guide, random_params(deep, guide, X, Y))
    x = jnp.array([[0.3], [-1.0]])
    ei = design.ExpectedImprovement(posterior.using(num_samples=5), KEY, -0.7)
    found = posterior.using(num_samples=5).predict_jointly(KEY, x[:1])
    m, sd = np.asarray(found.means)[:, 0], np.sqrt(np.asarray(found.covariances)[:, 0, 0])
    z = (-0.7 - m) / sd
    np.testing.assert_allclose(ei(x[:1]), (sd * (stats.norm.pdf(z) + z * stats.norm.cdf(z))).mean(), rtol=1e-6)
    assert jax.jit(ei)(x) > ei(x[:1])


class Outputs(Emulator):
    """Two outputs, the second twice the first."""

    def predict_jointly(self, key, rows):
        m, C, K = super().predict_jointly(key, rows)
        return dgp.densities.JointMixture(jnp.stack([m, 2 * m], -1), jnp.stack([C, 4 * C], 1), jnp.stack([K, 4 * K], 1))


@pytest.mark.long
def test_one_of_several_outputs():
    np.testing.assert_allclose(design.ALM(Outputs(0.35), KEY, output=1)(TWO), 4 * design.ALM(GP, KEY)(TWO), rtol=1e-12)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: design.ALM(None, KEY), r"ALM: expected a posterior with a method predict_jointly, got NoneT"),
        (lambda: design.ALM(GP, 3), "ALM: expected a PRNG key, got 3"),
        (lambda: design.ALM(GP, KEY, output=1.0), "expected output to be the number of a column, got 1.0"),
        (lambda: design.ALM(GP, KEY)(ONE[0]), r"expected points x of shape \(q, D\), got \(2,\): a single point is"),
        (lambda: design.ALM(GP, KEY, output=0)(ONE), "got a scalar function and output=0: leave output out"),
        (lambda: design.ALM(Outputs(0.3), KEY)(ONE), "a function of 2 outputs and output=None: output= a number from"),
        (lambda: design.ExpectedImprovement(GP, KEY, VALUES), r"best to be a single num"),
        (lambda: design.ExpectedImprovement(GP, KEY, np.nan), "expected finite best"),
        (lambda: design.ExpectedImprovement(GP, KEY, 0.0, minimise="no"), "minimise to be True or False, got 'no'"),
        (lambda: design.ExpectedImprovement(GP, KEY, 0.0, num_draws=100), "num_draws, a power of two, got 100"),
        (lambda: design.UpperConfidence(GP, KEY, -1.0), "expected beta of at least zero, got -1.0: .* such as 2.0"),
        (lambda: design.UpperConfidence(GP, KEY, np.inf), "finite beta.* deviations, such"),
        (lambda: design.UpperConfidence(GP, KEY, VALUES), "beta to be a single number"),
        (lambda: design.ALC(GP, KEY, ONE[0]), r"expected reference of shape \(R, D\), one point a row, got \(2,\)"),
        (lambda: design.ALC(GP, KEY, SPACE)(ONE[:, :1]), r"expected points x with the 2 columns .* got \(1, 1\)"),
        (lambda: design.ALC(GP, KEY, SPACE, -0.1), "expected noise of at least zero, got -0.1"),
        (lambda: design.KnowledgeGradient(GP, KEY, [[np.inf]]), "expected finite candidates"),
        (lambda: design.MICE(GP, KEY, SPACE, -1.0), "expected nugget of at least zero, got -1.0"),
        (lambda: design.VIGF(GP, KEY, RUNS, VALUES[:2]), r"expected values y of shape \(4,\), one per run in X, got"),
        (lambda: design.ContourEntropy(GP, KEY, 0.0)(np.ones((9, 2))), "expected at most 8 points .*got 9"),
        (lambda: design.ThompsonSampling(GP, KEY), "expected a posterior with a method functions, got Emulator"),
    ],
)
def test_wrong_calls(wrong, message):
    with pytest.raises(ValueError, match=message):
        wrong()
