"""``dgp.design.emulator_family``: programs for runs of simulators, in the units of the runs."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import pytest
from numpyro import handlers
from numpyro.infer.util import log_density
from scipy.stats import multivariate_normal, norm

import numpyro_dgp as dgp

KEY = jax.random.key(0)
RNG = np.random.default_rng(0)
BOUNDS = np.array([[-3.3, 17.1], [1e3, 1.7e3]])
U = RNG.random((9, 2))
X = BOUNDS[:, 0] + U * np.ptp(BOUNDS, axis=1)
Y = 250.0 + 7.0 * np.sin(5 * U[:, 0]) * U[:, 1]


@pytest.fixture(autouse=True)
def double():
    with jax.enable_x64(True):
        yield


def matern52(a, b, variance, lengthscale):
    r = np.sqrt(5) * np.linalg.norm((a[:, None] - b) / lengthscale, axis=-1)
    return variance * (1 + r + r**2 / 3) * np.exp(-r)


def settings(program, *args):
    """A draw of everything but y."""
    trace = handlers.trace(handlers.seed(program, 1)).get_trace(*args)
    return {n: s["value"] for n, s in trace.items() if s["type"] == "sample" and n != "y"}


def test_one_layer_is_an_exact_process_in_the_units_of_the_runs():
    """The bound of ``Collapsed`` is the evidence, with noise a hundred times below the jitter: the inducing inputs are
    the runs to the last bit. Scaling of the inputs and the priors are written out."""
    program = dgp.design.emulator_family(X, Y, bounds=BOUNDS)(1)
    values = {
        "log_noise": jnp.array(math.log(1e-6)),
        "mean": jnp.array(0.4),
        "log_variance0": jnp.array(0.3),
        "log_lengthscale0": jnp.array([-0.5, 0.2]),
    }
    given = dgp.for_mcmc(program, collapse=True)
    found = jax.jit(lambda x, y: log_density(handlers.seed(given, 0), (x, y), {}, values)[0])(X, Y)
    middle, unit = Y.mean(), Y.std()
    K = matern52(U, U, unit**2 * np.exp(0.3), np.exp([-0.5, 0.2]))
    K += np.eye(9) * (1e-10 * unit**2 * np.exp(0.3) + (unit * 1e-6) ** 2)
    dense = multivariate_normal(np.full(9, middle + unit * 0.4), K).logpdf(Y)
    dense += norm(math.log(1e-4), 2).logpdf(math.log(1e-6)) + norm(0, 1).logpdf(0.4) + norm(1, 6).logpdf(0.3)
    dense += norm(math.log(2) / 2, 2).logpdf([-0.5, 0.2]).sum()
    np.testing.assert_allclose(found, dense, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("follow", [True, False])
def test_deep_programs_are_those_of_standard_units(follow):
    """Densities differ by the logarithm of the unit of y for each run, hidden values not at all."""
    options = {"follow": follow, "process_noise": 1e-3, "last_kernel": dgp.kernels.RBF}
    standard = dgp.design.emulator_family(U, (Y - Y.mean()) / Y.std(), bounds=[[0, 1]] * 2, **options)(3)
    program = dgp.design.emulator_family(X, Y, bounds=BOUNDS, **options)(3)
    values = settings(standard, U)
    assert set(values) == settings(program, X).keys()
    of = [
        log_density(handlers.seed(model, 0), args, {}, values)
        for model, args in ((standard, (U, (Y - Y.mean()) / Y.std())), (program, (X, Y)))
    ]
    np.testing.assert_allclose(of[1][0], of[0][0] - 9 * math.log(Y.std()), rtol=1e-8)
    for name in ("h1", "h2"):
        np.testing.assert_allclose(*(found[1][name]["fn"].mean for found in of), atol=1e-9)
    moved = jnp.abs(of[1][1]["y"]["fn"].f_x.function.Z - U).max()
    assert moved > 0.01 if follow else moved < 1e-12


@pytest.mark.slow
def test_a_layer_without_variance_changes_nothing():
    """Two layers, the hidden one with a variance of zero nearly, are one layer."""
    family = dgp.design.emulator_family(X, Y, bounds=BOUNDS)
    shallow = settings(family(1), X)
    deep = settings(family(2), X) | shallow | {"log_variance1": jnp.array(-60.0)}
    deep["h1"] = jnp.asarray(U)
    ends = []
    for depth, values in ((1, shallow), (2, deep)):
        program = handlers.substitute(handlers.seed(family(depth), 0), data=values)
        ends.append(handlers.trace(program).get_trace(X)["y"]["fn"].f_x)
    np.testing.assert_allclose(ends[1].loc, ends[0].loc, rtol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(("depth", "width"), [(2, 1), (3, 1), (2, 3)])
def test_hidden_layers_of_a_width_are_directions_of_the_inputs(depth, width):
    """Where hidden processes are zero the density is that of an exact process of the columns of W."""
    program = dgp.for_mcmc(dgp.design.emulator_family(X, Y, bounds=BOUNDS)(depth, width), collapse=True)
    drawn = settings(program, X, Y)
    assert drawn["log_lengthscale1"].shape == (2 if depth == 2 else width,)
    still = {n: 0 * v for n, v in drawn.items() if n.startswith(("f", "h"))}
    still |= {f"log_variance{i}": jnp.array(-60.0) for i in range(1, depth)}
    own = {"log_noise": jnp.array(math.log(1e-2)), "log_variance0": jnp.array(0.3), "mean": jnp.array(0.4)}
    values = {n: v for n, v in drawn.items() if n != "f0_integrated"} | still | own
    seeded = handlers.substitute(handlers.seed(program, 0), data=values)
    found = handlers.trace(seeded).get_trace(X, Y)["f0_integrated"]
    z, unit = U @ np.asarray(values["weights"]), Y.std()
    assert z.shape == (9, width)
    K = matern52(z, z, unit**2 * np.exp(0.3), np.exp(np.asarray(values["log_lengthscale0"])))
    K += np.eye(9) * (1e-10 * unit**2 * np.exp(0.3) + (unit * 1e-2) ** 2)
    dense = multivariate_normal(np.full(9, Y.mean() + unit * 0.4), K).logpdf(Y)
    np.testing.assert_allclose(found["fn"].log_prob(found["value"]), dense, rtol=1e-5)


@pytest.mark.slow
def test_directions_have_the_prior_of_the_docstring():
    program = dgp.design.emulator_family(X, Y, bounds=BOUNDS)(2, 1)
    trace = handlers.trace(handlers.seed(program, 1)).get_trace(X)
    w = trace["weights"]
    np.testing.assert_allclose(w["fn"].log_prob(w["value"]), norm(0, 1).logpdf(w["value"]).sum(), rtol=1e-9)
    scale = trace["log_lengthscale0"]
    np.testing.assert_allclose(scale["fn"].log_prob(scale["value"]), norm(0, 2).logpdf(scale["value"]).sum(), rtol=1e-9)


@pytest.mark.long
def test_a_function_of_one_direction_is_found():
    """A program with one hidden column predicts a wave across three inputs, which one layer cannot by 25 runs."""
    w = np.array([1.0, -0.6, 0.3])
    x, new = RNG.random((25, 3)), RNG.random((100, 3))

    def wave(v):
        return np.sin(6 * v @ w)

    family = dgp.design.emulator_family(x, wave(x), bounds=[[0, 1]] * 3)
    best = dgp.fit_best(family, KEY, x, wave(x), depths=(1, (2, 1)), num_draws=200, num_runs=1)
    assert best.weights[2, 1] > 0.9
    errors = {
        depth: np.sqrt(np.mean((part.posterior.predict(KEY, new).mean - wave(new)) ** 2))
        for depth, part in best.parts.items()
    }
    assert errors[2, 1] < 0.2 * errors[1]
    drawn = best.parts[2, 1].posterior.samples["weights"][:, :, 0]
    cosines = abs(drawn @ w) / np.linalg.norm(drawn, axis=1) / np.linalg.norm(w)
    assert np.median(cosines) > 0.99
    assert "(2, 1)" in repr(best)


@pytest.mark.slow
def test_bounds_are_those_of_the_runs_if_none_are_given():
    own = np.stack([X.min(0), X.max(0)], 1)
    values = settings(dgp.design.emulator_family(X, Y)(2), X)
    found = [
        log_density(handlers.seed(dgp.design.emulator_family(X, Y, **options)(2), 0), (X, Y), {}, values)[0]
        for options in ({}, {"bounds": own}, {"bounds": BOUNDS})
    ]
    assert found[0] == found[1] != found[2]


@pytest.mark.long
def test_predictions_of_a_deep_emulator_are_in_units_of_the_runs():
    x = np.linspace(10.0, 30.0, 14)[:, None]
    y = 1e4 + 500.0 * np.where(x[:, 0] < 19.0, -1.0, 1.0)
    best = dgp.fit_best(dgp.design.emulator_family(x, y), KEY, x, y, depths=(1, 2), num_draws=100)
    assert best.weights[2] > 0.5  # a step is for depth
    predicted = best.predict(KEY, np.array([[12.3], [28.1]]))
    np.testing.assert_allclose(predicted.mean, [9500.0, 10500.0], atol=25)
    assert (predicted.variance**0.5 < 100).all()


@pytest.mark.long
def test_guides_take_deep_programs():
    """The one that integrates hidden layers, with inducing inputs at the runs, and one that draws them."""
    options = {"process_noise": 1e-2, "last_kernel": dgp.kernels.RBF, "noise": 0.1}
    for follow, make in ((False, dgp.guides.Collapsed), (True, dgp.guides.InducingPoint)):
        program = dgp.design.emulator_family(X, Y, follow=follow, **options)(2)
        guide = make(program, hidden=dgp.guides.GivenInducing()) if not follow else make(program)
        svi = numpyro.infer.SVI(program, guide, numpyro.optim.Adam(1e-2), dgp.ELBO())
        assert np.isfinite(svi.run(KEY, 2, X, Y, progress_bar=False).losses).all()


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((X[:, 0], Y), {}, r"inputs X of shape \(N, D\).*got \(9,\) and \(9,\): X\[:, None\]"),
        ((X, Y[:, None]), {}, r"outputs y of shape \(N,\), got \(9, 2\) and \(9, 1\)"),
        ((X, Y[:-1]), {}, r"got \(9, 2\) and \(8,\)"),
        ((X[:1], Y[:1]), {}, "expected two runs or more"),
        ((X, np.where(np.arange(9) == 3, np.nan, Y)), {}, r"finite y.*index \(3,\): leave out runs"),
        ((np.where(np.arange(18).reshape(9, 2) == 3, np.inf, X), Y), {}, "finite X.*leave out runs"),
        ((X, np.full(9, 3.0)), {}, "outputs y that vary, got 3 from all runs"),
        ((X * [1, 0], Y), {}, "columns of X that vary, got 0 in all rows of column 1: .*pass bounds"),
        ((X, Y), {"bounds": [[0.0, 1.0]] * 2}, "expected X within bounds"),
        ((X, Y), {"bounds": [[0.0, 1.0]]}, r"expected X of shape \(N, 1\)"),
        ((X, Y), {"bounds": dgp.design.Box([[-9, 20], [0, 2000]], categories=[1])}, r"got categories=\[1\]"),
        ((X, Y), {"noise": 0.0}, "noise to be positive"),
        ((X, Y), {"noise": 1e-9}, "expected noise of 1e-07 or more in float64.*got 1e-09"),
        ((X, Y), {"noise": [0.1, 0.1]}, "noise to be a single number"),
    ],
)
def test_what_does_not_fit_is_an_error(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        dgp.design.emulator_family(*arguments, **options)


@pytest.mark.slow
def test_numbers_of_layers_are_counts():
    with pytest.raises(ValueError, match=r"number of layers to be a positive integer, got 0: try 1"):
        dgp.design.emulator_family(X, Y)(0)
    with pytest.raises(ValueError, match=r"columns of hidden layers to be a positive integer, got 0.5: try 1"):
        dgp.design.emulator_family(X, Y)(2, 0.5)
    with pytest.raises(ValueError, match=r"two layers or more, got family\(1, 2\), .*family\(1\), or family\(2, 2\)"):
        dgp.design.emulator_family(X, Y)(1, 2)


@pytest.mark.slow
def test_single_precision_says_what_it_does_not_resolve():
    with jax.enable_x64(False):
        with pytest.raises(ValueError, match=r"noise of 0.003 or more in float32.*numpyro.enable_x64\(\)"):
            dgp.design.emulator_family(X, Y)
        x, y = X.astype("float32"), Y.astype("float32")
        values = settings(dgp.design.emulator_family(x, y, noise=0.01)(2), x)
    assert values["h1"].dtype == jnp.float32
