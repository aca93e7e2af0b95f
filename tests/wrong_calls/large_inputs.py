"""Inputs so far from zero that single precision cannot tell their rows apart: Unix seconds, milliseconds."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro import handlers
from numpyro.infer import SVI
from wrong_calls.wrong import Wrong

import numpyro_dgp as dgp
from numpyro_dgp import design, initial
from numpyro_dgp._data import as_array

KEY = jax.random.key(0)
RBF = dgp.kernels.RBF()
SECONDS = 1.7e9 + np.sort(np.random.default_rng(0).normal(size=20))
MILLISECONDS = (1.7e12 + 1000.0 * np.arange(20)).astype(np.int64)
Y = np.sin(np.arange(20) / 3)
SMALL = np.linspace(-2, 2, 20)[:, None]
PARAMS = {"g_auto_loc": jnp.zeros(8, jnp.float32), "g_auto_scale_tril": jnp.eye(8, dtype=jnp.float32)}
APART, WHOLE = (
    "expected distinct values of {} to stay distinct in float32, got 20 of which 1",
    "within the whole numbers",
)


def in_single_precision(wrong):
    """The same wrong call, in single precision."""

    def call():
        with jax.enable_x64(False):
            return wrong.call()

    return wrong._replace(call=call)


def seeded(model, *args):
    return handlers.seed(model, 0)(*args)


def plain(X, y=None):
    g = dgp.gp("g", RBF, dgp.Points(jnp.linspace(-2, 2, 8)[:, None]))
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dgp.Likelihood(g(X), lambda v: dist.Normal(v, 0.1)), obs=y)


def exact(X, y=None):
    numpyro.sample("y", dgp.gp("f", RBF, None)(X, noise=0.1), obs=y)


def on_points(Z):
    return lambda: seeded(lambda: dgp.gp("f", RBF, dgp.Points(Z)))


def improvement(posterior, seen, key):
    return design.LogExpectedImprovement(posterior, key, best=seen.best)


GUIDE = dgp.guides.InducingPoint(plain)
FITTED = dgp.Posterior(plain, GUIDE, PARAMS)
BOX = [[SECONDS.min(), SECONDS.max()]]
FIT = SVI(plain, GUIDE, optax.adam(0.01), dgp.ELBO())

CALLS = [
    wrong
    for name, times in (("seconds", SECONDS), ("milliseconds", MILLISECONDS))
    for X in [times[:, None]]
    for fitted in [WHOLE if name == "milliseconds" else APART.format(".*")]
    for wrong in [
        Wrong(f"svi.init with {name}", lambda X=X: FIT.init(KEY, X, Y), APART.format(r"inputs of f\(x\)")),
        Wrong(
            f"ELBO with {name}",
            lambda X=X: dgp.ELBO().loss(KEY, PARAMS, plain, GUIDE, X, Y),
            APART.format(r"inputs of f\(x\)"),
        ),
        Wrong(f"predict with {name}", lambda X=X: FITTED.predict(KEY, X), fitted),
        Wrong(f"draws of the prior with {name}", lambda X=X: seeded(plain, X), APART.format(r"inputs of f\(x\)")),
        Wrong(f"exact process with {name}", lambda X=X: seeded(exact, X, Y), APART.format(r"inputs of f\(x\)")),
        Wrong(f"inducing inputs of {name}", on_points(X), APART.format("inducing inputs Z")),
        Wrong(f"kernel of {name}", lambda X=X: RBF(X, X), APART.format("inputs")),
        Wrong(f"latent beside {name}", lambda X=X: seeded(lambda: dgp.latent("w", X, 1)), APART.format("inputs x")),
        Wrong(
            f"cumulative in {name}",
            lambda t=times: dgp.functions.cumulative(t, t[::4], np.ones(5)),
            APART.format("inputs"),
        ),
        Wrong(f"acquisition at {name}", lambda X=X: design.ALM(FITTED, KEY)(X), APART.format("points x")),
        Wrong(
            f"neighbours of {name}",
            lambda X=X: dgp.gp("f", RBF, dgp.Neighbours(X, num=3))(X),
            APART.format(r"inputs of f\(x\)"),
        ),
        Wrong(
            f"linear mean of {name}", lambda X=X: dgp.means.LinearMean(np.ones((1, 2)))(X), APART.format("inputs of .*")
        ),
        Wrong(f"layers of {name}", lambda X=X: initial.layers(X, [1], 3), fitted),
    ]
] + [
    Wrong(
        "maximise in seconds",
        lambda: design.maximise(lambda x: x.sum(), BOX, KEY),
        r"design\.maximise: expected bounds between which float32 tells values apart, got 1699999997",
    ),
    Wrong(
        "search in seconds",
        lambda: design.Search(plain, dgp.guides.InducingPoint, BOX, improvement),
        r"Search: expected bounds between which float32 tells values apart",
    ),
    Wrong(
        "search in large whole numbers",
        lambda: design.maximise(lambda x: x.sum(), design.Box([[0, 2**26]], integers=[0]), KEY),
        "for column 0, where it has steps of 8",
    ),
]

CALLS += [
    Wrong(
        "seconds in an array of JAX",
        lambda: as_array("inputs", jnp.asarray(SECONDS[:, None], jnp.float32)),
        "whose differences float32 holds, got an array of JAX of which they have values near 1.7e.09 in steps of 2e.02",
        UserWarning,
    )
]
WRONG = [in_single_precision(wrong) for wrong in CALLS]
