"""Wrong calls of the newest parts: searches, scikit-learn's interface, harmonics; names and masks; rows of a fit."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from implicit import Implicit
from numpyro import handlers
from numpyro.infer import SVI, Predictive
from programs import X, Y, Z, shallow
from wrong_calls.wrong import Wrong

import numpyro_dgp as dgp
from numpyro_dgp import design, guides
from numpyro_dgp.sklearn import DeepGPClassifier, DeepGPRegressor

KEY = jax.random.key(0)
RBF = dgp.kernels.RBF()
GUIDE = guides.InducingPoint(shallow)
PARAMS = {"g_auto_loc": jnp.linspace(-1, 1, 8), "g_auto_scale_tril": 0.1 * jnp.eye(8)}
FITTED = dgp.Posterior(shallow, GUIDE, PARAMS)
BOX = [[-2.0, 2.0]]
INITIAL = [[-1.0], [0.0], [1.0]]


def improvement(posterior, seen, key):
    return design.LogExpectedImprovement(posterior, key, best=seen.best)


def search(acquisition=improvement, **settings):
    return design.Search(shallow, guides.InducingPoint, BOX, acquisition, initial=INITIAL, num_steps=1, **settings)


def proposing(acquisition):
    """A call that proposes points, with settings so small that it compiles little."""

    def call():
        found = search(acquisition, num_candidates=2, num_starts=1)
        return found.propose(found.start(KEY).add([0.0, 1.0, 0.5]))

    return call


def loop(**settings):
    mine = design.Search(shallow, guides.InducingPoint, BOX, improvement, initial=INITIAL)
    return design.loop(mine, lambda x: float(x[0]), KEY, **{"budget": 3, "progress_bar": False} | settings)


def regressor(cls=DeepGPRegressor, y=Y, **settings):
    return cls(layers=1, num_steps=1, num_inducing=5, **settings).fit(np.asarray(X), np.asarray(y))


def named(name, opens):
    """A program with a site of the name, which ``opens`` makes."""

    def model(X, y=None):
        noise = opens(name)
        g = dgp.gp("g", RBF, dgp.Points(Z))
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dgp.Likelihood(g(X), lambda v: dist.Normal(v, 0.1 + jnp.abs(noise).sum())), obs=y)

    return model


def start(model, *args, **options):
    return SVI(model, guides.InducingPoint(model, *args, **options), optax.adam(0.01), dgp.ELBO()).init(KEY, X, Y)


PARAM, ALONE = (lambda name: numpyro.param(name, jnp.ones(8))), (lambda name: numpyro.param(name, 1.0))
SITE = lambda name: numpyro.sample(name, dist.LogNormal())  # noqa: E731
BOTH = "names of the model's sites other than those of the guide's parameters, got 'g_auto_{}' for both"


def masked(mask):
    def model(X, y=None):
        g = dgp.gp("g", RBF, dgp.Points(Z))
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dgp.Likelihood(g(X), lambda v: dist.Normal(v, 0.1)).mask(mask), obs=y)

    return lambda: dgp.ELBO().loss(KEY, PARAMS, model, guides.InducingPoint(model), X, Y)


def around(mask):
    def model(X, y=None):
        with handlers.mask(mask=mask):
            shallow(X, y)

    return lambda: dgp.ELBO().loss(KEY, PARAMS, model, guides.InducingPoint(model), X, Y)


def exact(X, y=None):
    h = numpyro.sample("h", dgp.gp("f", RBF, None)(X))
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dist.Normal(h, 0.1), obs=y)


EXACT = {"h_auto_loc": jnp.zeros((1, 30)), "h_auto_scale_tril": jnp.eye(30)[None]}
ONES = np.ones(30, np.float32)
DRAWN = {"h_white": jnp.zeros((2, 30)), "h": jnp.zeros((2, 30))}


def of_classes(others):
    return lambda: dgp.likelihoods.OneVsEach(jnp.zeros((4, 3)), others=others)


def best(*args, **settings):
    """``dgp.fit_best`` of one shallow program."""
    return lambda: dgp.fit_best(lambda depth: shallow, *args, **{"depths": (1,), "num_draws": 2} | settings)


def known(values, points=None):
    return lambda: dgp.gp("f", RBF, points).condition(X[:3], values)


def of_layer(opens):
    """A program in which a site has the name of the inducing inputs that a layer learns."""

    def model(X, y=None):
        opens("g_Z")
        g = dgp.gp("g", RBF, dgp.Points(Z, learn=True))
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dgp.Likelihood(g(X), lambda v: dist.Normal(v, 0.1)), obs=y)

    return lambda: start(model)


WRONG = [
    Wrong("inducing inputs of two", of_layer(lambda name: numpyro.param(name, Z)), "gp 'g': .*got 'g_Z' for both"),
    Wrong("inducing inputs, a site", of_layer(SITE), "gp 'g': expected no other site .* got 'g_Z' for both"),
    Wrong("classes that are not there", of_classes([0, 7]), "others to be labels from 0 to 2, got one of 0 to 7"),
    Wrong("classes below zero", of_classes([-1]), "others to be labels from 0 to 2, got one of -1 to -1"),
    Wrong("no classes", of_classes(jnp.zeros(0, int)), r"others to be labels of shape \(B,\), got .* of shape \(0,\)"),
    Wrong("classes in a list", of_classes([0.5]), r"others to be labels of shape \(B,\), got float64"),
    Wrong("values with NaN", known(Y[:3] * jnp.nan), "expected finite values given to condition, got 3 NaN"),
    Wrong(
        "neighbours with NaN",
        known(Y[:3] * jnp.nan, dgp.Neighbours(X[:3], num=2)),
        "expected finite values given to condition, got 3 NaN",
    ),
    Wrong("best, transposed", best(KEY, X.T, Y), "fit_best: expected inputs first and observations last"),
    Wrong("best, shorter", best(KEY, X, Y[:5]), "fit_best: expected inputs first and observations last"),
    Wrong("best, a seed", best(0, X, Y), "fit_best: expected a PRNG key, got 0"),
    Wrong("best, NaN", best(KEY, X, Y.at[2].set(jnp.nan)), "expected finite data, got 1 NaN"),
    Wrong("best, in words", best(KEY, X, np.array(["a"] * 30)), "expected data to be numbers, got text"),
    Wrong("best, another weight", best(KEY, X, Y, weigh="loo"), 'weigh="stacking" or "evidence", got \'loo\''),
    Wrong("search for the largest", lambda: search(minimise="max"), "minimise to be True or False, got 'max'"),
    Wrong("search in units", lambda: search(standardise="no"), "standardise to be True or False, got 'no'"),
    Wrong(
        "an acquisition of nothing",
        proposing(lambda posterior, seen, key: None),
        r"expected acquisition\(posterior, seen, key\) to return a function of points x \(q, D\), got NoneType",
    ),
    Wrong(
        "an acquisition of NumPy",
        proposing(lambda posterior, seen, key: lambda x: np.sin(x).sum()),
        "expected an acquisition of JAX operations, got one that needs the values of x.*jnp.sin in place of np.sin",
    ),
    Wrong(
        "the class of an acquisition",
        lambda: design.LogExpectedImprovement(FITTED, (X, Y[:3]), KEY),
        r"LogExpectedImprovement: expected a PRNG key, got tuple",
    ),
    Wrong(
        "a loop without a search",
        lambda: design.loop(lambda x: float(x[0]), shallow, KEY, budget=3),
        r"design.loop: expected a dgp.design.Search, got function: loop\(dgp.design.Search\(model",
    ),
    Wrong("a number as path", lambda: loop(path=3), "design.loop: expected path to be a path, got 3"),
    Wrong("a budget that is a flag", lambda: loop(budget=True), "budget to be a positive integer, got True"),
    Wrong(
        "a record under a file",
        lambda: loop(path=f"{__file__}/search.npz"),
        r"design\.loop: expected path to be one that can be written, got .*choose another folder",
    ),
    Wrong(
        "negative squares",
        lambda: design.within_replicates(0.1, [1, 2], [0.0, -1.0]),
        "within_replicates: expected sums of squares of at least zero",
    ),
    Wrong(
        "one run in MICE",
        lambda: design.MICE(FITTED, KEY, X[:, 0]),
        r"MICE: expected .* of shape \(R, D\), one point a row, got \(30,\)",
    ),
    Wrong(
        "harmonics of no columns",
        lambda: dgp.Harmonics.around(dgp.kernels.ArcCosine(), -1, 9),
        "columns to be a positive integer, got -1",
    ),
    Wrong("a kernel, made", lambda: regressor(kernel=RBF), "kernel to be the name of one.*got a RBF that is made"),
    Wrong("a guide, made", lambda: regressor(guide=GUIDE), "guide to be the name of one.*got a InducingPoint that"),
    Wrong("a kernel of none", lambda: regressor(kernel="rbf"), "expected kernel to be one of RBF.*got 'rbf'"),
    Wrong("samples that are a flag", lambda: regressor(num_samples=True), "num_samples to be a positive integer, got"),
    Wrong("labels of one class", lambda: regressor(DeepGPClassifier, 0 * Y), "at least two classes, got one class"),
    Wrong(
        "quantiles of samples",
        lambda: guides.InducingPoint(shallow, inducing=Implicit(draws=2)).quantiles({}, [0.5], X, Y),
        "expected distributions with quantiles in closed form, got Sampled at 'g': take those of draws",
    ),
    Wrong("a parameter named as the guide's", lambda: start(named("g_auto_loc", PARAM)), BOTH.format("loc")),
    Wrong("one of another shape", lambda: start(named("g_auto_scale_tril", ALONE)), BOTH.format("scale_tril")),
    Wrong("a site named as the guide's", lambda: start(named("g_auto_loc", SITE)), BOTH.format("loc")),
    Wrong("another prefix too", lambda: start(named("g_q_loc", PARAM), prefix="q"), "'g_q_loc' for both"),
    Wrong("a mask of weights", masked(0.5 * ONES), r"Likelihood\.mask: expected a mask of booleans.* got float32"),
    Wrong("a mask with NaN", masked(np.nan * ONES), r"Likelihood\.mask: expected a mask of booleans"),
    Wrong("a mask of integers", masked(ONES.astype(int)), r"Likelihood\.mask: .*got int64: mask > 0\.5"),
    Wrong("a mask of weights around", around(jnp.asarray(0.5 * ONES)), "`mask` should be a bool array"),
    Wrong(
        "an exact process at other rows",
        lambda: Predictive(exact, guide=guides.InducingPoint(exact), params=EXACT, num_samples=2)(KEY, X[::-1]),
        "expected the rows of the fit, in their order, in a call without observations.* at 'h' are known there only",
        UserWarning,
    ),
    Wrong(
        "draws of a chain at other rows",
        lambda: Predictive(dgp.for_mcmc(exact), DRAWN)(KEY, X[::-1]),
        "for_mcmc: expected the rows of the chain, in their order.* draws of 'h' are values there only",
        UserWarning,
    ),
]
