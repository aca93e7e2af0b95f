"""Wrong calls of ``Posterior``: what it is made of, and what it is called with."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.infer import SVI, Predictive
from numpyro.infer.svi import SVIRunResult, SVIState
from programs import X, Y, Z, bayesian, deep, explicit, shallow
from wrong_calls.wrong import Wrong

import numpyro_dgp as dgp

KEY = jax.random.key(0)
NEW = X[:4]
GUIDE = dgp.guides.InducingPoint(shallow)
LOC, TRIL = jnp.zeros(8), jnp.eye(8)
PARAMS = {"g_auto_loc": LOC, "g_auto_scale_tril": TRIL}
DRAWS = {"g": jnp.zeros((50, 8))}
METHODS = {
    "predict": lambda p, *args: p.predict(KEY, *args),
    "sample": lambda p, *args: p.sample(KEY, *args),
    "probs": lambda p, *args: p.probs(KEY, *args),
    "hidden": lambda p, *args: p.hidden(KEY, *args),
    "functions": lambda p, *args: p.functions(KEY)(*args),
    "layers": lambda p, *args: p.layers(KEY, *args),
    "log_density": lambda p, *args: p.log_density(KEY, jnp.zeros(4), *args),
}


def fitted(params=PARAMS, guide=GUIDE, model=shallow, **kwargs):
    return dgp.Posterior(model, guide, params, **kwargs)


def drawn(samples=DRAWS, model=shallow, **kwargs):
    return dgp.Posterior(model, samples=samples, **kwargs)


def learned(X, y=None):
    """Inducing inputs and noise that are ``numpyro.param`` sites."""
    f = dgp.gp("f", dgp.kernels.RBF(), dgp.Points(Z, learn=True))
    noise = numpyro.param("noise", 0.1, constraint=dist.constraints.positive)
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dgp.Likelihood(f(X), lambda v: dist.Normal(v, noise)), obs=y)


def labelled(conditional, outputs=None, likelihood=True):
    def model(X, y=None):
        f = dgp.gp("f", dgp.kernels.RBF(), dgp.Points(Z), outputs=outputs)
        with numpyro.plate("data", len(X)):
            integrate = dgp.likelihoods.MonteCarlo(5) if outputs else None
            if likelihood:
                numpyro.sample("y", dgp.Likelihood(f(X), conditional, integrate=integrate), obs=y)
            else:
                numpyro.sample("y", conditional(numpyro.sample("v", f(X))), obs=y)

    return dgp.Posterior(model, samples={"f": jnp.zeros((3, 8) if outputs is None else (3, outputs, 8))})


def of_keywords(X, y=None, **kwargs):
    shallow(X, y)


def two_ends(X, y=None, z=None):
    g = dgp.gp("g", dgp.kernels.RBF(), dgp.Points(Z))
    with numpyro.plate("data", len(X)):
        for name, value in (("y", y), ("z", z)):
            numpyro.sample(name, dgp.Likelihood(g(X), lambda v: dist.Normal(v, 0.1)), obs=value)


def uncertain(X, y=None):
    shallow(X, y, kernel=dgp.kernels.RBF(1.2, numpyro.sample("scale", dist.LogNormal(0.0, 1.0))))


def of_numpy(X, y=None, inducing=lambda X: np.sort(X, 0)[::4]):
    """Inducing inputs by NumPy, inside the model."""
    g = dgp.gp("g", dgp.kernels.RBF(), dgp.Points(inducing(X)))
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dgp.Likelihood(g(X), lambda v: dist.Normal(v, 0.1)), obs=y)


def other_rows(X, y=None):
    g = dgp.gp("g", dgp.kernels.RBF(), dgp.Points(X[:3]))
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dgp.Likelihood(g(X), lambda v: dist.Normal(v, 0.1)), obs=y)


def state():
    return SVI(shallow, GUIDE, optax.sgd(0.1), dgp.ELBO()).init(KEY, X, Y)


POISSON = labelled(lambda v: dist.Poisson(jnp.exp(v)))
BERNOULLI = labelled(lambda v: dist.Bernoulli(logits=v))
SOFTMAX = labelled(lambda v: dist.Categorical(logits=v), 3)
EXPLICIT = labelled(lambda v: dist.Categorical(logits=v), 3, likelihood=False)
ROBUST = labelled(lambda v: dgp.likelihoods.RobustMax(v), 3)
CAUCHY = labelled(lambda v: dist.Cauchy(v, 1.0))
NORMAL = labelled(lambda v: dist.Normal(v, 1.0))
COLUMNS = labelled(lambda v: dist.Bernoulli(logits=v).to_event(1), 2)
LABELS = jnp.array([0, 1, 2, 3])
NO_MEAN = "mean and variance: expected a distribution of y that has them, got {}: use posterior.probs"
NO_VALUE = "a value for every numpyro.param, got none for .*"

WRONG = [
    Wrong(
        "Predictive with the hidden values of a chain at one row",
        lambda: Predictive(deep, {"f": jnp.zeros((2, 1, 8)), "g": jnp.zeros((2, 8)), "h": jnp.zeros((2, 30, 1))})(
            KEY, X[:1]
        ),
        r"expected 1 row, as many as plate 'data' has, got f\(x\) at 30: .*predict at new rows by dgp.Posterior",
    ),
    Wrong(
        "Predictive with the hidden values of a chain at other rows",
        lambda: Predictive(deep, {"f": jnp.zeros((2, 1, 8)), "g": jnp.zeros((2, 8)), "h": jnp.zeros((2, 30, 1))})(
            KEY, X[:7]
        ),
        r"expected 7 rows, as many as plate 'data' has, got f\(x\) at 30: .*predict at new rows by dgp.Posterior",
    ),
    Wrong(
        "text as new observations",
        lambda: dgp.update(fitted(), KEY, X, ["low"] * 30, num_steps=1),
        "expected JAX arrays .* got text",
    ),
    Wrong(
        "neither guide nor samples",
        lambda: dgp.Posterior(shallow),
        "a guide with params, or samples, got (both|neither)",
    ),
    Wrong(
        "both",
        lambda: dgp.Posterior(shallow, GUIDE, PARAMS, DRAWS),
        "a guide with params, or samples, got (both|neither)",
    ),
    Wrong("no model", lambda: dgp.Posterior(None, GUIDE, PARAMS), "expected the model, a function, got NoneType"),
    Wrong("guide as model", lambda: dgp.Posterior(PARAMS, GUIDE), "expected the model, a function, got dict"),
    Wrong(
        "params as guide", lambda: dgp.Posterior(shallow, PARAMS), "the guide, a function, as second argument, got dict"
    ),
    Wrong(
        "result of svi.run",
        lambda: fitted(SVIRunResult(PARAMS, None, None)),
        "a dict of parameters by name, got SVIRunResult: pass result.params",
    ),
    Wrong(
        "state of SVI",
        lambda: fitted(SVIState(None, None, KEY)),
        r"a dict of parameters by name, got SVIState: pass svi.get_params\(state\)",
    ),
    Wrong("params of None", lambda: fitted(None), "a dict of parameters by name, got NoneType"),
    Wrong("params as a list", lambda: fitted([LOC, TRIL]), "a dict of parameters by name, got list"),
    Wrong("an array as samples", lambda: drawn(jnp.zeros((50, 8))), "a dict of draws, got .*get_samples"),
    Wrong("no samples", lambda: drawn({}), "the same number of draws of every site"),
    Wrong("a single draw", lambda: drawn({"g": jnp.zeros(8), "noise": 0.1}), "the same number of draws of every site"),
    Wrong("zero draws", lambda: drawn({"g": jnp.zeros((0, 8))}), "the same number of draws of every site"),
    Wrong(
        "draws of two lengths",
        lambda: drawn({"g": jnp.zeros((5, 8)), "noise": jnp.ones(6)}),
        r"the same number of draws .*'g': \(5, 8\), 'noise': \(6,\)",
    ),
    Wrong("site of a number", lambda: drawn(site=3), "expected site to be the name of a site, got int"),
    Wrong("no parameters", lambda: fitted({}).predict(KEY, NEW), NO_VALUE + "'g_auto_loc', 'g_auto_scale_tril'"),
    Wrong("no parameters, layers", lambda: fitted({}).layers(KEY, NEW), NO_VALUE + "'g_auto_loc'"),
    Wrong("no parameters, functions", lambda: fitted({}).functions(KEY)(NEW), NO_VALUE + "'g_auto_loc'"),
    Wrong("one parameter", lambda: fitted({"g_auto_loc": LOC}).layers(KEY, NEW), NO_VALUE + "'g_auto_scale_tril'"),
    Wrong(
        "misspelled parameter",
        lambda: fitted({"g_auto_loc": LOC, "g_auto_scale_trill": TRIL}).layers(KEY, NEW),
        r"'g_auto_scale_tril' \(nearest: 'g_auto_scale_trill'\)",
    ),
    Wrong(
        "another prefix",
        lambda: fitted({"g_q_loc": LOC, "g_q_scale_tril": TRIL}).layers(KEY, NEW),
        r"'g_auto_loc' \(nearest: 'g_q_loc'\), 'g_auto_scale_tril' \(nearest: 'g_q_scale_tril'\)",
    ),
    Wrong(
        "a model's parameter is missing",
        lambda: drawn({"f": jnp.zeros((2, 8))}, learned, params={"f_Z": Z}).layers(KEY, NEW),
        NO_VALUE + "'noise'",
    ),
    Wrong(
        "all of a model's parameters are missing",
        lambda: drawn({"f": jnp.zeros((2, 8))}, learned).layers(KEY, NEW),
        NO_VALUE + "'f_Z', 'noise'",
    ),
    Wrong(
        "parameters of another guide",
        lambda: fitted(
            {f"{n}_auto_{p}": LOC for n in "fgh" for p in ("loc", "scale_tril")}, dgp.guides.InducingPoint(deep), deep
        ).layers(KEY, NEW),
        "the params of this guide, got 'h_auto_loc', 'h_auto_scale_tril' too, of sites that follow the model",
    ),
    Wrong(
        "parameters of sites that do not exist",
        lambda: fitted(PARAMS | {"f_auto_loc": LOC}).layers(KEY, NEW),
        "values for sites that the model does not have, 'f_auto_loc'",
        UserWarning,
    ),
    Wrong(
        "NaN in a parameter",
        lambda: fitted(PARAMS | {"g_auto_loc": LOC.at[3].set(jnp.nan)}).layers(KEY, NEW),
        r"expected finite parameter 'g_auto_loc', got 1 NaN .* index \(3,\): the fit diverged",
    ),
    Wrong(
        "infinity in a parameter",
        lambda: fitted(PARAMS | {"g_auto_scale_tril": jnp.inf * TRIL}).predict(KEY, NEW),
        "expected finite parameter 'g_auto_scale_tril'",
    ),
    Wrong("draws lack a layer", lambda: drawn({"f": jnp.zeros((5, 1, 8))}, deep).layers(KEY, NEW), "got none for 'g'"),
    Wrong(
        "draws lack a hyperparameter",
        lambda: drawn(
            {"f": jnp.zeros((5, 1, 8)), "g": jnp.zeros((5, 8)), "scales": jnp.ones((5, 2))}, bayesian, params={"g_Z": Z}
        ).predict(KEY, NEW),
        "every site that all data share, got none for 'noise': without one it would be drawn from its prior",
    ),
    Wrong(
        "misspelled site in draws",
        lambda: drawn({"f": jnp.zeros((5, 1, 8)), "g_": jnp.zeros((5, 8))}, deep).sample(KEY, NEW),
        r"got none for 'g' \(nearest: 'g_'\)",
    ),
    *(
        Wrong(
            f"{method} by a guide of another program",
            lambda call=call: call(fitted(model=deep), NEW),
            "expected a guide with a value for every site that all data share, got none for 'f': without one",
        )
        for method, call in METHODS.items()
        if method != "probs"
    ),
    Wrong(
        "guide without a hyperparameter",
        lambda: fitted(model=uncertain).predict(KEY, NEW),
        "with a value for every site that all data share, got none for 'scale': without one it would be drawn from its",
    ),
    Wrong(
        "draws by chain",
        lambda: drawn({"g": jnp.zeros((4, 50, 8))}).layers(KEY, NEW),
        r"each draw of 'g' to have shape \(8,\), got \(50, 8\): join chains along one axis",
    ),
    Wrong(
        "draws of other inducing inputs",
        lambda: drawn({"g": jnp.zeros((4, 9))}).predict(KEY, NEW),
        r"each draw of 'g' to have shape \(8,\), got \(9,\)",
    ),
    Wrong(
        "NaN in draws",
        lambda: drawn({"g": DRAWS["g"].at[2, 1].set(jnp.nan)}).layers(KEY, NEW),
        r"expected finite draws of 'g', got 1 NaN .* index \(2, 1\): the chain diverged",
    ),
    Wrong("more than the draws", lambda: drawn().using(num_samples=51).predict(KEY, NEW), "num_samples of at most 50"),
    Wrong("unknown site", lambda: drawn(site="x").predict(KEY, NEW), "site= to be the name of a site, got 'x'"),
    Wrong("unknown site, hidden", lambda: drawn(site="yy").hidden(KEY, NEW), r"got 'yy' \(nearest: 'y'\)"),
    Wrong(
        "inducing values as site",
        lambda: fitted(site="g").predict(KEY, NEW),
        r"the name of an observed site, got the inducing values of layer 'g': the program observes \['y'\]",
    ),
    *(
        Wrong(
            f"a latent site as site of {name}",
            lambda call=call: call(drawn({"g": DRAWS["g"], "scale": jnp.ones(50)}, uncertain, site="scale"), NEW),
            r"the name of an observed site, got the latent site 'scale': the program observes \['y'\]",
        )
        for name, call in METHODS.items()
        if name != "functions"
    ),
    Wrong("unknown site, layers", lambda: drawn(site="yy").layers(KEY, NEW), r"got 'yy' \(nearest: 'y'\)"),
    Wrong("several observed sites", lambda: drawn(model=two_ends).predict(KEY, NEW), r"got \['y', 'z'\]: name it"),
    *(
        Wrong(
            f"observations in {name}",
            lambda call=call: call(drawn(), NEW, Y[:4]),
            "without the observations to predict",
        )
        for name, call in METHODS.items()
        if name != "layers"
    ),
    Wrong(
        "observations by keyword",
        lambda: fitted().sample(KEY, NEW, y=Y[:4]),
        r"got those of 'y': posterior.predict\(key, X\)",
    ),
    Wrong(
        "observations of an explicit program",
        lambda: drawn({"f": jnp.zeros((2, 1, 8)), "g": jnp.zeros((2, 8))}, explicit).sample(KEY, NEW, Y[:4]),
        "got those of 'y'",
    ),
    Wrong(
        "the other site is observed too",
        lambda: drawn(model=two_ends, site="y").sample(KEY, NEW, Y[:4], Y[:4]),
        "got those of 'y'",
    ),
    *(
        Wrong(f"an integer as key of {name}", call, "expected a PRNG key, got 0: jax.random.key")
        for name, call in {
            "predict": lambda: fitted().predict(0, NEW),
            "sample": lambda: fitted().sample(0, NEW),
            "probs": lambda: fitted().probs(0, NEW),
            "hidden": lambda: fitted().hidden(0, NEW),
            "functions": lambda: fitted().functions(0),
            "layers": lambda: fitted().layers(0, NEW),
            "log_density": lambda: fitted().log_density(0, Y[:4], NEW),
        }.items()
    ),
    Wrong("inputs as key", lambda: fitted().predict(NEW), r"expected a PRNG key, got .* of shape \(4, 1\)"),
    Wrong("several keys", lambda: fitted().predict(jax.random.split(KEY, 3), NEW), r"a PRNG key, .* shape \(3,\)"),
    Wrong(
        "a seed as an old key", lambda: fitted().predict(jnp.zeros(3, "uint32"), NEW), r"a PRNG key, .* shape \(3,\)"
    ),
    Wrong("a set", lambda: fitted().predict(KEY, {1.0}), "arrays and settings as arguments of the model, got a set"),
    Wrong("no key", lambda: fitted().predict(None, NEW), "expected a PRNG key, got NoneType"),
    Wrong("zero rows", lambda: fitted().predict(KEY, X[:0]), "at least one row to predict"),
    Wrong("zero rows, layers", lambda: fitted().layers(KEY, X[:0]), "at least one row to predict"),
    Wrong("NaN in inputs", lambda: fitted().predict(KEY, NEW.at[1].set(jnp.nan)), "expected finite inputs, got 1 NaN"),
    Wrong("NaN in inputs, layers", lambda: fitted().layers(KEY, NEW * jnp.nan), "expected finite inputs, got 4 NaN"),
    Wrong(
        "zero samples",
        lambda: fitted().using(num_samples=0).predict(KEY, NEW),
        "num_samples to be a positive integer, got 0",
    ),
    Wrong(
        "half samples", lambda: fitted().using(num_samples=2.5).sample(KEY, NEW), "num_samples to be a positive integer"
    ),
    Wrong(
        "half a batch",
        lambda: fitted().using(batch_size=0.5).predict(KEY, NEW),
        "batch_size to be a positive integer, got 0.5",
    ),
    Wrong("progress as a number", lambda: fitted().using(progress_bar=1), "progress_bar to be True or False, got 1"),
    *(
        Wrong(
            f"{option} among the arguments of {name}",
            lambda call=call, given={option: value}: call(**given),
            rf"expected arguments of the program, got '{option}', .* posterior.using\({option}=...\).predict",
        )
        for option, value in {"num_samples": 5, "progress_bar": False}.items()
        for name, call in {
            "predict": lambda **given: fitted().predict(KEY, NEW, **given),
            "log_density": lambda **given: fitted().log_density(KEY, Y[:4], NEW, **given),
            "a whole function": lambda **given: fitted().functions(KEY)(NEW, **given),
            "a program of any keywords": lambda **given: drawn(model=of_keywords).predict(KEY, NEW, **given),
        }.items()
    ),
    Wrong(
        "variances of the inputs of draws",
        lambda: fitted().sample(KEY, NEW, X_variance=0.1),
        "got 'X_variance', .*predict, predict_function, log_density, probs and quantile take X_variance",
    ),
    Wrong("a batch", lambda: fitted().predict(KEY, X, None, 3), "expected a program over all data, got plate 'data'"),
    Wrong(
        "inducing inputs of the call",
        lambda: drawn({"g": jnp.zeros((2, 3))}, other_rows).predict(KEY, X),
        "'g' that do not depend on the rows of the call, got some computed from X: .*outside the model: Z = X",
    ),
    Wrong(
        "NumPy in the model",
        lambda: drawn({"g": jnp.zeros((2, 3))}, of_numpy).predict(KEY, X),
        "a model of JAX operations on its arguments, .*compute inducing inputs and settings from the data once",
    ),
    Wrong(
        "k-means in the model",
        lambda: drawn({"g": jnp.zeros((2, 3))}, partial(of_numpy, inducing=lambda X: dgp.initial.kmeans(X, 3))).predict(
            KEY, X
        ),
        "kmeans: expected inputs X with known values, got traced ones: compute it once, outside of model",
    ),
    Wrong("mean of labels", lambda: SOFTMAX.predict(KEY, NEW), NO_MEAN.format("CategoricalLogits")),
    Wrong("mean of explicit labels", lambda: EXPLICIT.predict(KEY, NEW), NO_MEAN.format("CategoricalLogits")),
    Wrong("mean of robust-max", lambda: ROBUST.predict(KEY, NEW), NO_MEAN.format("RobustMax")),
    Wrong("mean of Cauchy", lambda: CAUCHY.predict(KEY, NEW), NO_MEAN.format("Cauchy")),
    Wrong(
        "probabilities of numbers", lambda: NORMAL.probs(KEY, NEW), r"one label of K per datum .*got Likelihood\(Normal"
    ),
    Wrong(
        "probabilities of counts", lambda: POISSON.probs(KEY, NEW), r"one label of K per datum .*got Likelihood\(Pois"
    ),
    Wrong("probabilities of columns", lambda: COLUMNS.probs(KEY, NEW), r"one label of K .*event shape \(2,\)"),
    Wrong("label K", lambda: SOFTMAX.log_density(KEY, LABELS, NEW), r"y from 0 to 2, got 3 at index \(3,\)"),
    Wrong(
        "negative label", lambda: SOFTMAX.log_density(KEY, LABELS - 1, NEW), r"y from 0 to 2, got -1 at index \(0,\)"
    ),
    Wrong("half a label", lambda: SOFTMAX.log_density(KEY, LABELS / 2, NEW), r"y from 0 to 2, got 0.5 at index \(1,\)"),
    Wrong("label K of explicit", lambda: EXPLICIT.log_density(KEY, LABELS, NEW), "y from 0 to 2, got 3"),
    Wrong("label K of robust-max", lambda: ROBUST.log_density(KEY, LABELS, NEW), "y from 0 to 2, got 3"),
    Wrong("signs as labels", lambda: BERNOULLI.log_density(KEY, LABELS - 1, NEW), "y from 0 to 1, got -1"),
    Wrong("negative count", lambda: POISSON.log_density(KEY, LABELS - 1, NEW), r"y from 0, got -1 at index \(0,\)"),
    Wrong(
        "observations of another shape",
        lambda: NORMAL.log_density(KEY, jnp.zeros((4, 1)), NEW),
        r"expected observations y of shape \(4,\), got \(4, 1\)",
    ),
    Wrong("NaN in observations", lambda: NORMAL.log_density(KEY, np.full(4, np.nan), NEW), "finite observations y"),
]


def likelihood(conditional, *shape):
    f_x = dgp.extend.FunctionValues(jnp.zeros(shape), jnp.ones(shape), event_dim=len(shape) - 1)
    return dgp.Likelihood(f_x, conditional, integrate=dgp.likelihoods.MonteCarlo(5))


WRONG += [
    Wrong(
        f"{name} of a likelihood of labels",
        lambda name=name: getattr(likelihood(lambda v: dist.Categorical(logits=v), 4, 3), name),
        NO_MEAN.format("CategoricalLogits"),
    )
    for name in ("mean", "variance")
]
WRONG += [
    Wrong(
        f"{name} of a label out of range",
        lambda name=name: getattr(likelihood(lambda v: dist.Categorical(logits=v), 4, 3), name)(LABELS),
        r"Likelihood\.\w+: expected observations y from 0 to 2, got 3 at index \(3,\) \(1 outside\)",
    )
    for name in ("log_prob", "log_marginal")
]
WRONG += [
    Wrong(
        f"{name} of a negative count",
        lambda name=name: getattr(likelihood(lambda v: dist.Poisson(jnp.exp(v)), 4), name)(LABELS - 2),
        r"Likelihood\.\w+: expected observations y from 0, got -2 at index \(0,\) \(2 outside\)",
    )
    for name in ("log_prob", "log_marginal")
]
WRONG += [
    Wrong(
        "a fit to labels out of range",
        lambda: numpyro.handlers.seed(dgp.guides.InducingPoint(SOFTMAX.model), KEY)(NEW, LABELS),
        "observed site 'y': expected observations y from 0 to 2, got 3",
    ),
]
