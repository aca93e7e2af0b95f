"""Sites inside JAX transformations, whose bodies run once for all steps."""

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
import optax
from numpyro import handlers
from numpyro.contrib.control_flow import scan
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal
from programs import NOISE, X, Y, Z
from wrong_calls.wrong import Wrong

import numpyro_dgp as dgp

KEY = jax.random.key(0)


def draw(*_):
    return numpyro.sample("e", dist.Normal(0.0, 1.0))


def shifted(shift):
    """A program of one layer, shifted by what ``shift`` draws from inputs (N,)."""

    def model(X, y=None):
        g = dgp.gp("g", dgp.kernels.RBF(), dgp.Points(Z))
        offset = shift(X[:, 0])
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dgp.Likelihood(g(X), lambda v: dist.Normal(v + offset, NOISE)), obs=y)

    return model


def above(hidden):
    """A program whose last layer is above the values that ``hidden`` makes of X."""

    def model(X, y=None):
        h = hidden(X)
        g = dgp.gp("g", dgp.kernels.RBF(), dgp.Points(Z))
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dgp.Likelihood(g(h), lambda v: dist.Normal(v, NOISE)), obs=y)

    return model


def layer():
    return dgp.gp("f", dgp.kernels.RBF(), dgp.Points(Z), outputs=1)


def layers_in_scan(X):
    return jax.lax.scan(lambda h, _: (layer()(h).loc, None), X, None, length=2)[0]


def values_in_scan(X):
    f = layer()
    return jax.lax.scan(lambda h, _: (numpyro.sample("h", f(h)), None), X, None, length=2)[0]


def observed_in_map(X, y=None):
    g = dgp.gp("g", dgp.kernels.RBF(), dgp.Points(Z))

    def row(xy):
        likelihood = dgp.Likelihood(g(xy[0][None]), lambda v: dist.Normal(v, NOISE))
        return numpyro.sample("y", likelihood, obs=None if y is None else xy[1][None])

    jax.lax.map(row, (X, X[:, 0] if y is None else y))


PROGRAMS = {
    "fori_loop": (shifted(lambda x: jax.lax.fori_loop(0, 3, lambda i, s: s + draw(), 0.0)), "e"),
    "scan": (shifted(lambda x: jax.lax.scan(lambda s, _: (s + draw(), None), 0.0, None, length=3)[0]), "e"),
    "map": (shifted(lambda x: jax.lax.map(draw, x)), "e"),
    "vmap": (shifted(jax.vmap(lambda x: x * draw())), "e"),
    "cond": (shifted(lambda x: jax.lax.cond(x[0] < 0.5, draw, lambda: 0.0)), "e"),
    "jit": (shifted(jax.jit(draw)), "e"),
    "checkpoint": (shifted(jax.checkpoint(draw)), "e"),
    "a layer in scan": (above(layers_in_scan), "f"),
    "values in scan": (above(values_in_scan), "h"),
    "observed in map": (observed_in_map, "y"),
}
NAMED = "expected sites outside JAX transformations, got one inside lax.scan.*write a Python loop"


def steps(model, guide, loss):
    dgp.fit(SVI(model, guide, optax.sgd(0.1), loss), KEY, 1, X, Y, progress_bar=False)


def start(model):
    dgp.for_mcmc(model)(X, Y)


def loop_of_numpyro(x):
    return scan(lambda c, x: (numpyro.sample("e", dist.Normal(c, 1.0)),) * 2, 0.0, x)[1]


WRONG = [
    *(
        Wrong(f"{taker}: {name}", lambda call=call, model=model: call(model), f"site '{site}': {NAMED}")
        for taker, call in {
            "ELBO": lambda model: jax.eval_shape(
                lambda: dgp.ELBO().loss(KEY, {}, model, dgp.guides.InducingPoint(model), X, Y)
            ),
            "for_mcmc": start,
            "SGHMC": lambda model: dgp.mcmc.SGHMC(model).init(KEY, 1, None, (X, Y), {}),
        }.items()
        for name, (model, site) in PROGRAMS.items()
    ),
    *(
        Wrong(
            f"Posterior: {name}",
            lambda model=model: dgp.Posterior(model, samples={"e": jnp.zeros(3)}).predict(KEY, X),
            f"site '{site}': {NAMED}",
        )
        for name, (model, site) in PROGRAMS.items()
    ),
    *(
        Wrong(
            f"fit, guide of NumPyro, {type(loss).__name__}: {name}",
            lambda loss=loss, model=PROGRAMS[name][0]: steps(model, AutoNormal(model), loss),
            f"site 'e': {NAMED}",
        )
        for name in ("fori_loop", "vmap")
        for loss in (dgp.ELBO(), Trace_ELBO())
    ),
    Wrong(
        "scan of NumPyro under a guide of this package",
        lambda: handlers.seed(dgp.guides.InducingPoint(shifted(loop_of_numpyro)), 0)(X, Y),
        "InducingPoint: expected sites outside of control flow, got those of numpyro.contrib.control_flow",
    ),
]
