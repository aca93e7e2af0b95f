"""Sobol' indices and main effects: closed forms of known functions, indices of each draw, two errors."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from programs import X, Y, deep, random_params, shallow

import numpyro_dgp as dgp
from numpyro_dgp.design import Integrals, main_effects, sobol_indices

PI = np.pi
KEY = jax.random.key(0)


def ishigami(X, a=7.0, b=0.1):
    X = np.asarray(X)
    return np.sin(X[:, 0]) * (1 + b * X[:, 2] ** 4) + a * np.sin(X[:, 1]) ** 2


def g_function(X, a=(0.0, 1.0, 4.5, 9.0)):
    return np.prod((np.abs(4 * np.asarray(X) - 2) + np.array(a)) / (1 + np.array(a)), -1)


def quiet(function, *args, **kwargs):
    return function(*args, progress_bar=False, **kwargs)


def require_near(found, expected, width=4.5):
    """Means over randomisations within their own standard errors, which are not so large that anything would pass."""
    error = found.values.std(0, ddof=1) / np.sqrt(len(found.values))
    assert error.max() < 0.03
    assert (np.abs(found.draws - expected) < width * error + 1e-7).all()


def test_ishigami():
    """First-order, closed and total indices of columns and of groups."""
    parts = {"1": (1 + 0.1 * PI**4 / 5) ** 2 / 2, "2": 49 / 8, "13": 0.01 * PI**8 * 8 / 225}
    groups = {"1": ["x0"], "2": [1], "3": [2], "12": [0, 1], "13": ["x0", 2], "all": range(3)}
    found = quiet(
        sobol_indices, ishigami, np.array([[-PI, PI]] * 3), KEY, groups=groups, num_points=1024, num_randomisations=16
    )
    total = sum(parts.values())
    one, two, both = (parts[name] / total for name in ("1", "2", "13"))
    assert found.names == tuple(groups)
    require_near(found.first, [one, two, 0, one + two, one + both, 1])
    require_near(found.total, [one + both, two, both, 1, one + both, 1])


def test_g_function():
    """Sums of first indices below one and of totals above it, totals above first ones."""
    own = 1 / 3 / (1 + np.array([0.0, 1.0, 4.5, 9.0])) ** 2
    total = np.prod(1 + own) - 1
    found = quiet(sobol_indices, g_function, [(0, 1)] * 4, KEY, num_points=1024, num_randomisations=16)
    require_near(found.first, own / total)
    require_near(found.total, own / (1 + own) * np.prod(1 + own) / total)
    error = 4 * np.hypot(found.first.integration_error, found.total.integration_error)
    assert (found.total.mean > found.first.mean - error).all()
    assert found.first.mean.sum() < 1 + error.sum()
    assert found.total.mean.sum() > 1 - error.sum()


@pytest.mark.slow
def test_inputs_by_their_distributions():
    """With x of N(0, 4), x and x^2 have variances of 4 and 32; with u of N(0, v), 3 exp(u) has 9 e^v (e^v - 1)."""
    inputs = {"a": dist.Normal(0.0, 2.0), "b": dist.Normal(0.0, 2.0), "c": dist.LogNormal(0.0, 0.5), "d": (0.0, 1.0)}
    parts = np.array([4.0, 32.0, 9 * np.exp(0.25) * (np.exp(0.25) - 1), 0.0])

    def function(X):
        return np.asarray(X) ** [1, 2, 1, 1] @ [1, 1, 3, 0]

    found = quiet(sobol_indices, function, inputs, KEY, num_points=1024)
    assert found.names == tuple("abcd")
    require_near(found.first, parts / parts.sum())
    require_near(found.total, parts / parts.sum())
    assert found.total.mean[3] == 0


def test_rows_in_blocks_are_the_same_rows():
    seen = []

    def function(X):
        seen.append(X.shape)
        return ishigami(X)

    whole = quiet(sobol_indices, ishigami, [(-PI, PI)] * 3, KEY, num_points=64, num_randomisations=2)
    blocks = quiet(sobol_indices, function, [(-PI, PI)] * 3, KEY, num_points=64, num_randomisations=2, batch_size=24)
    assert set(seen) == {(24, 3)}  # 320 rows, and copies of the last one
    np.testing.assert_allclose(blocks.first.values, whole.first.values, rtol=1e-6)


def linear(X, y=None):
    """A linear function of three columns."""
    f = dgp.gp("f", dgp.kernels.Linear(jnp.array([1.0, 0.5, 0.1])), dgp.Points(jnp.eye(3)))
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dgp.Likelihood(f(X), lambda v: dist.Normal(v, 0.1)), obs=y)


def require_closed_forms():
    """Shares w^2 var(x) of the slopes w of every draw, and lines w (x - E x) as main effects."""
    posterior = dgp.Posterior(linear, samples={"f": jax.random.normal(KEY, (5, 3))}).using(num_samples=5)
    inputs = {"a": (-1.0, 2.0), "b": dist.Normal(1.0, 1.5), "c": (0.0, 4.0)}
    mean, variance = np.array([0.5, 1.0, 2.0]), np.array([9 / 12, 2.25, 16 / 12])
    settings = dict(num_randomisations=4, batch_size=256)  # one program for both
    found = quiet(sobol_indices, posterior, inputs, KEY, num_points=256, **settings)
    effects = quiet(main_effects, posterior, inputs, KEY, num_values=4, num_points=64, **settings)

    draws = posterior.functions(jax.random.split(KEY)[0])
    corners = jnp.concatenate([jnp.zeros((1, 3)), jnp.eye(3), jnp.ones((252, 3))])
    values = np.asarray(draws(corners)["y"], float)
    slopes = values[:, 1:4] - values[:, :1]  # (S, D)
    assert np.ptp(slopes, axis=0).min() > 0.1
    parts = slopes**2 * variance
    shares = parts / parts.sum(1, keepdims=True)
    assert found.first.draws.shape == (5, 3)
    require_near(found.first, shares, width=9)  # standard errors of four numbers
    require_near(found.total, shares, width=9)
    np.testing.assert_allclose(found.total.emulator_error, shares.std(0, ddof=1), atol=0.01)
    np.testing.assert_allclose(found.total.mean, shares.mean(0), atol=0.01)

    low, high = 1 - 1.5 * 2.5758, 1 + 1.5 * 2.5758
    np.testing.assert_allclose(effects.x[:, [0, -1]], [[-1, 2], [low, high], [0, 4]], rtol=1e-4)
    lines = (slopes @ mean)[:, None, None] + slopes[:, :, None] * (effects.x - mean[:, None])
    error = effects.curves.values.std(0, ddof=1) / 2
    assert error.max() < 0.1 < lines.std(0).max()
    assert (np.abs(effects.curves.draws - lines) < 9 * error + 1e-4).all()


@pytest.mark.long
def test_every_draw_of_a_linear_function_has_its_own_indices():
    require_closed_forms()


@pytest.mark.long
def test_in_single_precision(x32):
    require_closed_forms()


def test_main_effects_of_ishigami():
    found = quiet(main_effects, ishigami, [(-PI, PI)] * 3, KEY, num_points=256, num_randomisations=16)
    x = found.x[0]
    np.testing.assert_allclose(x, np.linspace(-PI, PI, 21))
    expected = [np.sin(x) * (1 + 0.1 * PI**4 / 5) + 3.5, 7 * np.sin(x) ** 2, np.full(21, 3.5)]
    assert found.curves.integration_error.max() < 0.1
    assert (np.abs(found.curves.mean - expected) < 4.5 * found.curves.integration_error + 1e-5).all()
    assert found.curves.values.shape == (16, 1, 3, 21)
    np.testing.assert_array_equal(found.curves.emulator_error, 0)


def test_the_two_errors_are_those_of_an_analysis_of_variance():
    """Their squares have the right expectations: averages over many tables of known variances."""
    rng = np.random.default_rng(0)
    tables, R, S, sd = 4000, 4, 6, (0.5, 0.2, 0.4)  # of draws, of randomisations, of both
    functions, points, both = (s * rng.normal(size=(R, S, tables)) for s in sd)
    found = Integrals(functions[:1] + points[:, :1] + both)
    np.testing.assert_allclose((found.integration_error**2).mean(), (sd[1] ** 2 + sd[2] ** 2 / S) / R, rtol=0.05)
    np.testing.assert_allclose((found.emulator_error**2).mean(), sd[0] ** 2, rtol=0.05)
    low, high = found.interval(0.5)
    np.testing.assert_allclose(low, np.quantile(found.draws, 0.25, axis=0))
    assert ((low < found.mean) & (found.mean < high)).mean() > 0.9


@pytest.mark.long
def test_integration_errors_cover():
    """Averages over randomisations are as far from the truth as their standard errors say: t with R - 1 = 7."""
    inputs = [(0, 1)] * 4
    own = 1 / 3 / (1 + np.array([0.0, 1.0, 4.5, 9.0])) ** 2
    truth = own / (np.prod(1 + own) - 1)
    runs = [quiet(sobol_indices, g_function, inputs, k, num_points=256).first for k in jax.random.split(KEY, 60)]
    z = np.array([(found.mean - truth) / found.integration_error for found in runs])
    assert 0.9 < z.std() < 1.5  # sqrt(7 / 5) = 1.18


@pytest.mark.long
def test_of_a_deep_program_the_observed_function():
    """Among several layers, at the same draws as those of a function of X."""
    guide = dgp.guides.InducingPoint(deep)
    posterior = dgp.Posterior(deep, guide, random_params(deep, guide, X, Y)).using(num_samples=3)
    settings = dict(num_points=32, num_randomisations=2)
    found = quiet(sobol_indices, posterior, [(-2, 2)], KEY, **settings)
    assert found.first.values.shape == (2, 3, 1)
    np.testing.assert_allclose(found.total.mean, 1, atol=0.3)
    functions = posterior.functions(jax.random.split(KEY)[0])
    again = quiet(sobol_indices, lambda X: functions(X)["y"], [(-2, 2)], KEY, **settings)
    np.testing.assert_array_equal(found.first.values, again.first.values)
    other = quiet(sobol_indices, lambda X: functions(X)["h"][..., 0], [(-2, 2)], KEY, **settings)
    assert np.abs(found.first.values - other.first.values).max() > 1e-3


BOX = [(0, 1), (0, 1)]


def first(X):
    return X[:, 0]


def test_constant_functions_are_refused():
    def draws(X):
        return jnp.stack([X[:, 0], 3 + 0 * X[:, 0], 1e-9 * X[:, 1] + 1e6])

    with pytest.raises(
        ValueError, match=r"functions that vary with the inputs, got 2 of 3 draws .* first at 3: there is"
    ):
        quiet(sobol_indices, draws, BOX, KEY)
    flat = quiet(main_effects, lambda X: 0 * X[:, 0] + 3, BOX, KEY)
    np.testing.assert_allclose(flat.curves.mean, 3)


def test_of_an_event_the_probability():
    """x0 > 0.5 and x1 > 0.5: of a variance of 3/16, 1/16 each alone and together."""
    found = quiet(sobol_indices, lambda X: (X[:, 0] > 0.5) & (X[:, 1] > 0.5), BOX, KEY)
    np.testing.assert_allclose(found.first.mean, 1 / 3, atol=0.03)
    np.testing.assert_allclose(found.total.mean, 2 / 3, atol=0.03)
    effects = quiet(main_effects, lambda X: X[:, 0] > 0.5, BOX, KEY)
    assert effects.curves.mean.min() == 0
    assert effects.curves.mean.max() == 1


@pytest.mark.parametrize("function", [sobol_indices, main_effects])
@pytest.mark.parametrize(
    ("emulator", "inputs", "settings", "message"),
    [
        (first, [], {}, r"expected inputs with a pair \(low, high\) or a distribution for every column, got none"),
        (first, np.array([[0.0, 0.0, 0.0], [1.0, 1.0, 1.0]]), {}, r"for column 'x0', got shape \(3,\).*shape \(D, 2\)"),
        (first, {"a": (0, 1), "b": (1, 1)}, {}, "expected low < high for column 'b', got 1 and 1"),
        (first, {"a": (0, np.inf)}, {}, "expected finite ends of 'a'.*needs a distribution"),
        (first, [dist.Normal(jnp.zeros(2))], {}, r"single numbers for column 'x0', got Normal, of shape \(2,\)"),
        (first, [dist.DiscreteUniform(0, 3)], {}, "got DiscreteUniform, discrete.*round in the emulator"),
        (first, [dist.StudentT(3.0)], {}, "with quantiles for column 'x0', got StudentT, whose icdf is missing"),
        (first, BOX, {"num_points": 100}, "expected num_points, a power of two from 2, got 100"),
        (first, BOX, {"num_randomisations": 1}, "expected at least two randomisations, got 1"),
        (first, BOX, {"batch_size": 0.5}, "expected batch_size to be a positive integer, got 0.5"),
        ("gp", BOX, {}, "expected a posterior or a function of X, got str"),
        (lambda X: X, BOX, {}, r"or draws \(S, \d+\), at \d+ rows, got \(\d+, 2\)"),
        (lambda X: X[:, 0] / 0, BOX, {}, "expected finite values of the functions.*NaN in its losses"),
    ],
)
def test_wrong_calls(function, emulator, inputs, settings, message):
    with pytest.raises(ValueError, match=message) as raised:
        quiet(function, emulator, inputs, KEY, **settings)
    assert function.__name__ in str(raised.value)


@pytest.mark.parametrize("function", [sobol_indices, main_effects])
def test_complex_values_are_refused(function):
    with pytest.raises(ValueError, match=r"expected a function with real values, got complex(64|128): take .real"):
        function(lambda X: X[:, 0] + 2j * X[:, 1], [(0, 1), (0, 1)], jax.random.key(0), progress_bar=False)


@pytest.mark.parametrize("function", [sobol_indices, main_effects])
def test_fewer_draws_than_functions(function):
    chain = dgp.Posterior(shallow, samples={"g": jnp.ones((2, 8))})
    message = f"{function.__name__}: expected at most 2 draws of the function, .* got 50: posterior.using.num_samples=2"
    with pytest.raises(ValueError, match=message):
        quiet(function, chain, BOX, KEY)


def test_wrong_groups_keys_and_levels():
    for group in ([], [2], [0, 0], ["x0", 0], "x0", 0, [-1]):
        with pytest.raises(ValueError, match=r"group 'u' to be a list of columns among x0, x1 or 0 to 1"):
            quiet(sobol_indices, first, BOX, KEY, groups={"u": group})
    for groups, got in (({}, "none"), ([[0, 1]], "a list"), ("x0", "a str")):
        with pytest.raises(ValueError, match=f"expected groups as a dict of lists of columns, at least one, got {got}"):
            quiet(sobol_indices, first, BOX, KEY, groups=groups)
    with pytest.raises(ValueError, match="main_effects: expected a PRNG key, got 0"):
        quiet(main_effects, first, BOX, 0)
    with pytest.raises(ValueError, match="main_effects: expected num_values to be a positive integer"):
        quiet(main_effects, first, BOX, KEY, num_values=0)
    with pytest.raises(ValueError, match="expected levels between 0 and 1, got 90"):
        Integrals(np.zeros((2, 1))).interval(90)


@pytest.mark.slow
def test_a_posterior_without_an_observed_function():
    class Layers:
        """Has draws of two functions and no site."""

        def __init__(self, *names):
            self.names, self.options = names, SimpleNamespace(num_samples=None)

        def using(self, num_samples):
            self.options = SimpleNamespace(num_samples=num_samples)
            return self

        def functions(self, key):
            S = self.options.num_samples
            return lambda X: {name: np.tile(X[:, d], (S, 1)) for d, name in enumerate(self.names)}

    found = quiet(sobol_indices, Layers("f").using(num_samples=3), BOX, KEY)
    require_near(found.first, [1, 0])
    assert found.first.draws.shape == (3, 2)
    with pytest.raises(ValueError, match=r"function under an observed dgp.Likelihood, got functions of f, g: choose"):
        quiet(sobol_indices, Layers("f", "g"), BOX, KEY)
