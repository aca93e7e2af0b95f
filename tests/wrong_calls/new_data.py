"""Wrong calls of ``dgp.update`` and ``dgp.condition``: fits that cannot go on, and rows that are none."""

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from numpyro.infer.autoguide import AutoMultivariateNormal, AutoNormal
from programs import X, Y, Z, deep, shallow
from wrong_calls.wrong import Wrong

import numpyro_dgp as dgp

KEY = jax.random.key(0)
GUIDE = dgp.guides.InducingPoint(shallow)
PARAMS = {"g_auto_loc": jnp.zeros(8), "g_auto_scale_tril": jnp.eye(8)}
FITTED = dgp.Posterior(shallow, GUIDE, PARAMS)
OPTIONS = {"num_steps": 1, "progress_bar": False}


def update(posterior=FITTED, X=X, y=Y, **options):
    return lambda: dgp.update(posterior, KEY, X, y, **OPTIONS | options)


def under(model, guide, params=PARAMS):
    return update(dgp.Posterior(model, guide(model), params))


def learned(X, y=None):
    """Hyperparameters that are sites, of which one is the lengthscale."""
    scale = numpyro.sample("scale", dist.LogNormal(0.0, 1.0))
    g = dgp.gp("g", dgp.kernels.RBF(1.2, scale), dgp.Points(Z))
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dgp.Likelihood(g(X), lambda v: dist.Normal(v, 0.1)), obs=y)


def noisy(X, y=None):
    noise = numpyro.param("noise", 0.1, constraint=dist.constraints.positive)
    shallow(X, y, noise=noise)


def of_rows(X, y=None):
    shallow(X, y, Z=X[:8])


def renamed(X, y=None):
    f = dgp.gp("f", dgp.kernels.RBF(), dgp.Points(Z))
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dgp.Likelihood(f(X), lambda v: dist.Normal(v, 0.1)), obs=y)


def wide(X, y=None):
    shallow(jnp.hstack([X, X]), y, Z=jnp.hstack([Z, Z]))


def on_a_ring(X, y=None):
    shallow_on_ring = dgp.gp("g", dgp.kernels.RBF(1.2, 0.7), dgp.Grid(-5.0, 5.0, 20))
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dgp.Likelihood(shallow_on_ring(X), lambda v: dist.Normal(v, 0.1)), obs=y)


def exact(X, y=None):
    f = dgp.gp("g", dgp.kernels.RBF(), None)
    with numpyro.plate("data", len(X)):
        pass
    numpyro.sample("y", dist.Normal(numpyro.sample("v", f(X)), 0.1).to_event(1), obs=y)


def with_latents(X, y=None):
    g = dgp.gp("g", dgp.kernels.RBF(), dgp.Points(jnp.hstack([Z, Z])))
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dgp.Likelihood(g(dgp.latent("w", X, 1)), lambda v: dist.Normal(v, 0.1)), obs=y)


def other(model, guide=None, y=Y, posterior=FITTED):
    return update(posterior, y=y, guide=guide or dgp.guides.InducingPoint(model))


MIXTURE = {f"g_auto_{i}_{name}": PARAMS[f"g_auto_{name}"] for i in range(2) for name in ("loc", "scale_tril")}
MIXTURE["g_auto_logits"] = jnp.zeros(2)


def by_hand(X, y=None):
    g = dgp.gp("g", dgp.kernels.RBF(1.2, 0.7), dgp.Points(Z))
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dist.Normal(g(X).loc, 0.1), obs=y)


ROW = {"w_auto_loc": jnp.zeros((30, 1)), "w_auto_scale": jnp.ones((30, 1))}
SCALE = {"scale_auto_loc": jnp.ones(()), "scale_auto_scale": jnp.ones(())}
RING = {"g_auto_loc": jnp.zeros(20), "g_auto_scale_tril": jnp.eye(20)}

WRONG = [
    Wrong("no posterior", update(PARAMS), r"update: expected a Posterior, got dict: dgp.Posterior\(model"),
    Wrong(
        "draws of MCMC",
        update(dgp.Posterior(shallow, samples={"g": jnp.zeros((5, 8))})),
        "update: expected a Posterior with a guide, got one with draws of MCMC",
    ),
    Wrong(
        "a guide of NumPyro",
        update(dgp.Posterior(shallow, AutoNormal(shallow), {})),
        "update: expected a guide of dgp.guides, got AutoNormal",
    ),
    Wrong(
        "an autoguide for hyperparameters",
        under(learned, lambda m: dgp.guides.InducingPoint(m, other=AutoMultivariateNormal)),
        "expected points for hyperparameters, got AutoMultivariateNormal",
    ),
    Wrong(
        "a posterior of a hyperparameter",
        under(learned, lambda m: dgp.guides.InducingPoint(m, other=dgp.guides.Normal()), PARAMS | SCALE),
        r"update: expected points for shared sites other than the layers, got a posterior at 'scale'.*Delta\(\)",
    ),
    Wrong(
        "a mixture",
        under(
            shallow,
            lambda m: dgp.guides.InducingPoint(m, inducing=dgp.guides.MixtureOfGaussians(2)),
            MIXTURE,
        ),
        r"expected a Gaussian q\(v\) of every layer by itself, got BeliefMixture at 'g'.*InducingPoint\(model\)",
    ),
    Wrong(
        "values used by hand",
        under(by_hand, dgp.guides.InducingPoint),
        "update: expected layers whose values are hidden sites or under a Likelihood, got 'g'",
    ),
    Wrong(
        "memory as text",
        update(memory=".5"),
        "update: expected memory above 0 and up to 1, got '.5'",
    ),
    Wrong(
        "memory above one",
        update(memory=1.5),
        "update: expected memory above 0 and up to 1, got 1.5",
    ),
    Wrong("no key", lambda: dgp.update(FITTED, X, Y, **OPTIONS), "update: expected a PRNG key, got .*of shape"),
    Wrong("no observations", update(y=None), r"update: expected the observations of the new rows, got none at 'y'"),
    Wrong("another width", update(X=jnp.hstack([X, X])), r"expected inputs with D = 1 columns"),
    Wrong("fewer observations", update(y=Y[:5]), "'y'|shape"),
    Wrong("missing observations", update(y=Y.at[3].set(jnp.nan)), r"expected finite data, got 1 NaN"),
    Wrong(
        "parameters of another program",
        update(dgp.Posterior(deep, dgp.guides.InducingPoint(deep), PARAMS)),
        "expected params with a value for every numpyro.param, got none for 'f_auto_loc'",
    ),
    Wrong("functions of the rows", under(of_rows, dgp.guides.InducingPoint), "do not depend on the rows of the call"),
    Wrong("a model without its guide", update(model=noisy), "update: expected the arguments of the model, got"),
    Wrong("a guide that is none", update(guide="full"), "update: expected guide= to be a function, got str"),
    Wrong("a misspelt setting", update(nun_steps=3), r"update: .* got 'nun_steps' \(nearest: 'num_steps'\)"),
    Wrong("transposed inputs", update(X=X.T), r"expected inputs with D = 1 columns"),
    Wrong("no memory", update(memory=0.0), "update: expected memory above 0 and up to 1, got 0.0"),
    Wrong("no steps", update(num_steps=0), "update: expected num_steps to be a positive integer, got 0"),
    Wrong("no particles", update(num_particles=0), "update: expected num_particles to be a positive integer, got 0"),
]

# These trace a second program or a step of the fit: tests/test_new_data.py has them among the long tests.
TRACED = [
    Wrong("a ring", under(on_a_ring, dgp.guides.InducingPoint, RING), r"RingFunction cannot tell.*dgp.Points\(Z\)"),
    Wrong(
        "an exact process",
        under(
            exact, dgp.guides.InducingPoint, {"v_auto_loc": jnp.zeros((1, 30)), "v_auto_scale_tril": jnp.eye(30)[None]}
        ),
        "update: expected layers with inducing points, got values without .* at 'v'",
    ),
    Wrong("another layer", other(renamed), r"with the layers of the fit, \['g'\], got \['f'\]"),
    Wrong("one layer more", other(deep), r"with the layers of the fit, \['g'\], got \['f', 'g'\].*initial.deepen"),
    Wrong("other inputs", other(wide), r"outputs of the fit, \(1, None\), got \(2, None\)"),
    Wrong(
        "a parameter that is lost",
        other(
            shallow, posterior=dgp.Posterior(noisy, dgp.guides.InducingPoint(noisy), PARAMS | {"noise": jnp.array(0.1)})
        ),
        "expected every parameter of the fit in the program of this guide, got none for 'noise'",
    ),
    Wrong(
        "q(v) from the rows",
        update(guide=dgp.guides.Collapsed(shallow)),
        r"update: expected a guide with parameters for q\(v\) of 'g', got Collapsed",
    ),
    Wrong(
        "condition: rows with parameters",
        lambda: dgp.condition(
            dgp.Posterior(with_latents, dgp.guides.InducingPoint(with_latents), PARAMS | ROW), KEY, X, Y, **OPTIONS
        ),
        "condition: expected parameters that all rows share, got 'w_auto_loc'",
    ),
    Wrong(
        "condition: low rank",
        lambda: dgp.condition(
            dgp.Posterior(
                shallow,
                dgp.guides.InducingPoint(shallow, inducing=dgp.guides.LowRank(2)),
                {"g_auto_loc": jnp.zeros(8), "g_auto_scale": jnp.ones(8), "g_auto_factor": jnp.zeros((8, 2))},
            ),
            KEY,
            X,
            Y,
            **OPTIONS,
        ),
        r"condition: expected a q\(v\) of layer 'g' that is Full\(\), got one with other parameters",
    ),
    Wrong(
        "condition: independent numbers",
        lambda: dgp.condition(
            dgp.Posterior(
                shallow,
                dgp.guides.InducingPoint(shallow, inducing=dgp.guides.Diagonal()),
                {"g_auto_loc": jnp.zeros(8), "g_auto_scale": jnp.ones(8)},
            ),
            KEY,
            X,
            Y,
            **OPTIONS,
        ),
        r"condition: expected a q\(v\) of layer 'g' that is Full\(\), got one of independent numbers, Diagonal\(\)",
    ),
]
