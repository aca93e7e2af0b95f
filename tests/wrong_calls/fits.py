"""Wrong calls of ``fit``, ``fit_stream``, ``minibatch``, streams, parameter files and optimisers."""

import atexit
import shutil
import tempfile
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.infer import MCMC, NUTS, SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal
from wrong_calls.wrong import Wrong, of_numpyro

import numpyro_dgp as dgp
from numpyro_dgp.optim import NaturalGradient, log_linear, minimize

X = np.linspace(0.0, 1.0, 12)[:, None]
Y = np.sin(X[:, 0])
KEY = jax.random.key(0)
FOLDER = Path(tempfile.mkdtemp())
atexit.register(shutil.rmtree, FOLDER)


def line(X, y=None, *, site="slope", observed="y"):
    slope = numpyro.sample(site, dist.Normal())
    with numpyro.plate("data", len(X)):
        numpyro.sample(observed, dist.Normal(slope * X[:, 0], 0.5), obs=y)


def point(X, y=None, *, site="slope"):
    loc = numpyro.param(f"{site}_loc", jnp.zeros(()))
    scale = numpyro.param(f"{site}_scale", jnp.array(0.1), constraint=dist.constraints.positive)
    numpyro.sample(site, dist.Normal(loc, scale))


def local(X, y=None):
    """A latent per row."""
    with numpyro.plate("data", len(X)):
        w = numpyro.sample("w", dist.Normal())
        numpyro.sample("y", dist.Normal(w, 0.5), obs=y)


def with_list():
    """A file of parameters in a list."""
    dgp.save(FOLDER / "list.npz", {"net": [jnp.ones(2)]})
    return FOLDER / "list.npz"


def labelled(X, y=None):
    slope = numpyro.sample("slope", dist.Normal())
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dist.Bernoulli(logits=slope * X[:, 0]), obs=y)


def own_rows(X, y=None):
    """A guide with a parameter per row."""
    with numpyro.plate("data", len(X)):
        numpyro.sample("w", dist.Normal(numpyro.param("w_loc", jnp.zeros(len(X)), event_dim=0), 1.0))


def amortised(X, y=None):
    """A guide whose plate does not know that its rows are a minibatch."""
    with numpyro.plate("data", len(X)):
        numpyro.sample("w", dist.Normal(numpyro.param("slope", jnp.zeros(())) * X[:, 0], 1.0))


def unplated(X, y=None):
    numpyro.sample("y", dist.Normal(numpyro.param("loc", 0.0), jnp.ones(len(X))).to_event(1), obs=y)


def nothing(X, y=None):
    pass


def make(model=line, guide=point, loss=None, optimiser=None):
    return SVI(model, guide, optimiser or optax.adam(0.01), loss or dgp.ELBO())


def fit(svi=None, key=KEY, steps=2, *args, **kwargs):
    return dgp.fit(svi or make(), key, steps, *(args or (X, Y)), progress_bar=False, **kwargs)


def start(**values):
    return fit(init_params=values)


def stream(model=None, guide=point, source=None, steps=1, key=KEY, svi=None, **kwargs):
    model = dgp.minibatch(line, data=12) if model is None else model
    source = dgp.Stream((X, Y), 4) if source is None else source
    return dgp.fit_stream(svi or make(model, guide), key, steps, source, progress_bar=False, **kwargs)


def source(rows, *batch):
    return SimpleNamespace(num_rows=rows, batch=lambda step: batch)


def run(handler, program=line):
    with numpyro.handlers.seed(rng_seed=0), handler:
        program(X)


def least(svi=None, key=KEY, *args, **kwargs):
    return minimize(svi or make(), key, *(args or (X, Y)), progress_bar=False, **kwargs)


def natural(step_size=0.1, optimiser=None, **kwargs):
    return NaturalGradient(AutoNormal(line), step_size, optax.adam(0.01) if optimiser is None else optimiser, **kwargs)


def file(name, content):
    path = FOLDER / name
    path.write_bytes(content)
    return path


def other_arrays():
    np.savez(FOLDER / "plain.npz", plain=np.ones(2))
    return FOLDER / "plain.npz"


WITHOUT_KEY = "expected a PRNG key, got"
FINITE = "expected finite data, got 1 NaN"
POSITIVE = "to be a positive integer, got"
WRONG = [
    Wrong(
        "fit of MCMC", lambda: fit(MCMC(NUTS(line), num_warmup=1, num_samples=1)), r"a numpyro\.infer\.SVI, got MCMC"
    ),
    Wrong("fit of a model", lambda: fit(line), r"fit: expected a numpyro\.infer\.SVI, got function"),
    Wrong("fit of the class", lambda: fit(SVI), r"expected a numpyro\.infer\.SVI, got the class SVI"),
    Wrong(
        "minimize of MCMC",
        lambda: least(MCMC(NUTS(line), num_warmup=1, num_samples=1)),
        r"a numpyro\.infer\.SVI, got MCMC",
    ),
    Wrong("minimize without a guide", lambda: least(line), "a model, its guide and a key, .* got function, "),
    Wrong("minimize, the guide first", lambda: least(dgp.guides.MeanField(line), line, KEY, X), "got MeanField, func"),
    Wrong("minimize without a key", lambda: minimize(line, AutoNormal(line)), "got function, AutoNormal: minimize"),
    Wrong("minimize, no key", lambda: least(line, AutoNormal(line), X, Y), WITHOUT_KEY),
    Wrong("minimize, a guide class", lambda: least(line, AutoNormal, KEY, X), "the class AutoNormal"),
    Wrong(
        "a guide class", lambda: fit(make(guide=AutoNormal)), "expected a guide in the SVI, got the class AutoNormal"
    ),
    Wrong("an objective class", lambda: fit(make(loss=dgp.ELBO)), "an objective in the SVI, got the class ELBO"),
    Wrong("a function as objective", lambda: fit(make(loss=jnp.sum)), "an objective with a method loss"),
    Wrong(
        "fit under vmap",
        lambda: jax.vmap(lambda key: fit(None, key).losses)(jax.random.split(jax.random.key(0))),
        "fit: expected arrays, got traced ones: in jax.jit or vmap, svi.run",
    ),
    *(
        Wrong(
            f"nothing observed, {type(loss).__name__}",
            lambda loss=loss: fit(make(local, AutoNormal(local), loss), KEY, 1, X),
            "expected a program that observes data, got one that observes nothing, so that all of 'w', 'y' follow the",
            UserWarning,
        )
        for loss in (dgp.ELBO(), Trace_ELBO())
    ),
    *of_numpyro(
        "0.22",  # before, its densities of labels out of range are numbers
        Wrong(
            "a label out of range, guide by hand",
            lambda: fit(make(labelled, point), KEY, 2, X, jnp.where(X[:, 0] < 0.9, 1.0, 7.0)),
            "the loss became .* observed site 'y': expected observations y from 0 to 1, got 7.0 at index .10,",
        ),
    ),
    Wrong("a seed as key", lambda: fit(None, 0), rf"fit: {WITHOUT_KEY} 0: jax\.random\.key\(0\)"),
    Wrong("no key", lambda: fit(None, None), rf"{WITHOUT_KEY} None"),
    Wrong("several keys", lambda: fit(None, jax.random.split(KEY, 3)), rf"{WITHOUT_KEY} PRNGKeyArray of shape \(3,\)"),
    Wrong("three numbers as key", lambda: fit(None, jnp.zeros(3, "uint32")), rf"{WITHOUT_KEY} .* of shape \(3,\)"),
    Wrong("numbers as key", lambda: fit(None, jnp.zeros(2)), rf"{WITHOUT_KEY} .* of shape \(2,\)"),
    Wrong("half a step", lambda: fit(steps=2.5), rf"num_steps {POSITIVE} 2\.5"),
    Wrong("negative steps", lambda: fit(steps=-1), rf"num_steps {POSITIVE} -1"),
    Wrong("steps in words", lambda: fit(steps="10"), rf"num_steps {POSITIVE} '10'"),
    Wrong("data with NaN", lambda: fit(None, KEY, 2, X, np.append(Y[:-1], np.nan)), FINITE),
    Wrong("data with infinity", lambda: fit(None, KEY, 2, np.append(X[1:], [[np.inf]], 0), Y), FINITE),
    Wrong(
        "a guide of another model",
        lambda: fit(make(guide=partial(point, site="w"))),
        "no site 'slope', as the model has, but 'w'",
    ),
    Wrong(
        "targets in thousands",
        lambda: fit(None, KEY, 1, X, 5000.0 * Y),
        r"first loss is .* for 12 observations, and the values of array 2 are not in standard units",
        UserWarning,
    ),
    Wrong(
        "a guide with a site more",
        lambda: fit(make(guide=lambda *args: [point(*args), point(*args, site="w")])),
        "a site 'w' that the model does not sample",
    ),
    Wrong(
        "a rate that is NaN",
        lambda: fit(make(optimiser=optax.adam(np.nan)), steps=1),
        "expected finite parameters after 1 steps, got NaN or infinite values of 'slope_loc'",
    ),
    Wrong(
        "a rate that is NaN, bad steps skipped",
        lambda: fit(make(optimiser=optax.adam(np.nan)), steps=9, stable_update=True),
        "expected finite parameters after 9 steps",
    ),
    Wrong("checkpoint: a flag", lambda: fit(checkpoint=True), "expected checkpoint to be a path, got True"),
    Wrong("checkpoint: no name", lambda: fit(checkpoint=""), "expected checkpoint to be a path, got ''"),
    Wrong("checkpoint: a folder", lambda: fit(checkpoint=FOLDER), "path of a file, got the folder"),
    Wrong("checkpoint: under a file", lambda: fit(checkpoint=file("a", b"") / "b"), "a path that can be written, got"),
    Wrong("checkpoint: never written", lambda: fit(checkpoint=dgp.Checkpoint("a", every=0)), rf"every {POSITIVE} 0"),
    Wrong("checkpoint: empty file", lambda: fit(checkpoint=file("zero", b"")), "got an empty file, 0 bytes"),
    Wrong("checkpoint: text", lambda: fit(checkpoint=file("text", b"losses: 3")), r"got no \.npz file, 9 bytes"),
    Wrong("checkpoint: cut off", lambda: fit(checkpoint=file("cut", b"PK\3\4half")), "a damaged or truncated file"),
    Wrong(
        "checkpoint: other arrays",
        lambda: fit(checkpoint=other_arrays()),
        "a checkpoint of this fit in .*, got other arrays",
    ),
    Wrong(
        "init_params: a misspelled name", lambda: start(slope_lco=0.0), "got 'slope_lco': the nearest is 'slope_loc'"
    ),
    Wrong("init_params: a site", lambda: start(slope=0.0), "names of parameters in init_params, got 'slope'"),
    Wrong("init_params: a list", lambda: fit(init_params=[0.0]), "init_params to be a dict of arrays, got list"),
    Wrong("init_params: another shape", lambda: start(slope_loc=np.zeros(3)), r"to have shape \(\), got \(3,\)"),
    Wrong("init_params: a dict inside", lambda: start(slope_loc={"a": 0.0}), r"to have shape \(\), got \{'a': \(\)\}"),
    Wrong("init_params: an integer", lambda: start(slope_loc=1), r"\['slope_loc'\] to be floating-point, got int"),
    Wrong("init_params: NaN", lambda: start(slope_loc=np.nan), r"\['slope_loc'\] to be finite, got NaN"),
    Wrong(
        "init_params: outside", lambda: start(slope_scale=-0.1), "parameter's constraint Positive, got values outside"
    ),
    Wrong("init_params: text", lambda: start(slope_loc="0"), r"\['slope_loc'\] to be numbers, got str"),
    Wrong(
        "every step is skipped",
        lambda: fit(make(lambda X, y: numpyro.factor("bad", jnp.nan * X[0, 0]), nothing), stable_update=True),
        "expected stable_update to skip some steps, got all 2 skipped",
    ),
    Wrong(
        "fit_stream of a model", lambda: stream(svi=line), r"fit_stream: expected a numpyro\.infer\.SVI, got function"
    ),
    Wrong("fit_stream with a seed", lambda: stream(key=1), f"fit_stream: {WITHOUT_KEY} 1"),
    Wrong("fit_stream of arrays", lambda: stream(source=(X, Y)), "expected a source of batches.* got tuple"),
    Wrong("fit_stream without steps", lambda: stream(steps=0), rf"num_steps {POSITIVE} 0"),
    Wrong("a stream without a number of rows", lambda: stream(source=source(None, X, Y)), rf"num_rows {POSITIVE} None"),
    Wrong("batches of unequal arrays", lambda: stream(source=source(12, X, Y[:3])), "arrays with equally many rows"),
    Wrong("batches of numbers", lambda: stream(source=source(12, 1.0)), "arrays with equally many rows"),
    Wrong(
        "fit_stream with init_params of no parameter",
        lambda: stream(init_params={"slop_loc": 0.0}),
        "nearest is 'slope_loc'",
    ),
    Wrong(
        "no minibatch",
        lambda: stream(line),
        r"of a batch 12 / 4 times, got \['y'\] that count it once: wrap the program, .*data=stream\.num_rows",
    ),
    Wrong("no minibatch and no plate", lambda: stream(unplated, nothing), r"got \['y'\] that count it once: wrap"),
    Wrong(
        "another number of rows",
        lambda: stream(dgp.minibatch(line, data=24)),
        r"expected site 'y' to count every row of a batch 12 / 4 = 3 times, got 6 times: does dgp.minibatch",
        UserWarning,
    ),
    Wrong("a plate that is none", lambda: stream(dgp.minibatch(line, rows=12)), r"none named \['rows'\]"),
    Wrong("more rows than there are", lambda: stream(dgp.minibatch(line, data=3)), "a batch of at most 3 rows"),
    Wrong(
        "a parameter per row",
        lambda: stream(dgp.minibatch(local, data=12), own_rows),
        "no parameters per row in function, got 'w_loc'",
    ),
    Wrong(
        "a parameter per row of AutoNormal",
        lambda: stream(m := dgp.minibatch(local, data=12), AutoNormal(m)),
        "no parameters per row in AutoNormal, got 'w_auto_loc'",
    ),
    Wrong(
        "a parameter per row of all rows, in another order in every epoch",
        lambda: stream(local, own_rows, dgp.Stream((X, Y), 12)),
        "no parameters per row",
    ),
    Wrong(
        "a guide without minibatch",
        lambda: stream(dgp.minibatch(local, data=12), amortised),
        r"to scale site 'w' like the model, by 3 in plates \['data'\], got 1",
    ),
    Wrong("minibatch without rows", lambda: dgp.minibatch(line), "expected the number of rows of a plate, got none"),
    Wrong("minibatch of arrays", lambda: dgp.minibatch(X, data=12), "minibatch: expected a program, got ndarray"),
    Wrong("minibatch of no rows", lambda: dgp.minibatch(line, data=0), rf"minibatch: expected data {POSITIVE} 0"),
    Wrong("minibatch of half a row", lambda: dgp.minibatch(line, data=12.5), rf"expected data {POSITIVE} 12\.5"),
    Wrong("minibatch of the rows", lambda: dgp.minibatch(line, data=X), "expected data to be a positive integer"),
    Wrong(
        "minibatch twice",
        lambda: run(dgp.minibatch(data=24), dgp.minibatch(line, data=24)),
        r"one such handler around the plates \['data'\], got two",
    ),
    Wrong(
        "minibatch around minibatch",
        lambda: stream(dgp.minibatch(dgp.minibatch(line, data=12), data=12)),
        r"around the plates \['data'\], got two",
    ),
    Wrong(
        "a stream of one array",
        lambda: dgp.Stream(X, 1),
        "expected a tuple of arrays with a row per datum, got ndarray",
    ),
    Wrong(
        "a stream of paths",
        lambda: dgp.Stream(("X.npy", "y.npy"), 1),
        r"got \['str', 'str'\]: pass \(X, y\), or paths to Stream\.open",
    ),
    Wrong("a stream of numbers", lambda: dgp.Stream((1.0, 2.0), 1), r"a row per datum, got \['float', 'float'\]"),
    Wrong("a stream of a dict", lambda: dgp.Stream({"X": X}, 1), "a tuple of arrays with a row per datum, got dict"),
    Wrong("a stream of nothing", lambda: dgp.Stream((), 1), "expected arrays of equal length"),
    Wrong("a stream of unequal arrays", lambda: dgp.Stream((X, Y[:3]), 1), r"got lengths \[12, 3\]"),
    Wrong("a batch of half a row", lambda: dgp.Stream((X, Y), 0.5), rf"batch_size {POSITIVE} 0\.5"),
    Wrong("a batch of more than an epoch", lambda: dgp.Stream((X, Y), 13), "at most 12 rows per batch"),
    Wrong("blocks of no rows", lambda: dgp.Stream((X, Y), 4, block=0), rf"block {POSITIVE} 0"),
    Wrong("a window of no blocks", lambda: dgp.Stream((X, Y), 4, window=0), rf"window {POSITIVE} 0"),
    Wrong(
        "a negative seed", lambda: dgp.Stream((X, Y), 4, seed=-1), "seed to be an integer that is not negative, got -1"
    ),
    Wrong("a key as seed", lambda: dgp.Stream((X, Y), 4, seed=KEY), "seed to be an integer"),
    Wrong(
        "load: a list",
        lambda: dgp.load(with_list()),
        r"expected like= for parameters in other containers than dicts, got none for",
    ),
    Wrong(
        "save: a result",
        lambda: dgp.save(FOLDER / "a.npz", SimpleNamespace(params={})),
        "save: expected a dict of arrays, got SimpleNamespace",
    ),
    Wrong("save: an array", lambda: dgp.save(FOLDER / "a.npz", jnp.ones(2)), "save: expected a dict of arrays, got"),
    Wrong(
        "save: objects",
        lambda: dgp.save(FOLDER / "a.npz", {"a": "text"}),
        r"save: expected numbers at params\['a'\], got str",
    ),
    Wrong(
        "save: the arguments the other way round",
        lambda: dgp.save({"a": jnp.ones(2)}, "a.npz"),
        "save: expected a dict of arrays, got str",
    ),
    Wrong(
        "save: a folder",
        lambda: dgp.save(FOLDER, {"a": jnp.ones(2)}),
        "save: expected path to be the path of a file, got the folder",
    ),
    Wrong(
        "load: text", lambda: dgp.load(file("t.npz", b"hello")), r"load: expected a file of arrays, got no \.npz file"
    ),
    Wrong(
        "load: an empty file",
        lambda: dgp.load(file("e.npz", b"")),
        "load: expected a file of arrays, got an empty file",
    ),
    Wrong(
        "load: half a file", lambda: dgp.load(file("h.npz", b"PK\3\4" + bytes(40))), "got a damaged or truncated file"
    ),
    Wrong(
        "load: other arrays",
        lambda: dgp.load(other_arrays()),
        r"expected a file written by dgp\.save, got .* entry 'plain'",
    ),
    Wrong("load: a number", lambda: dgp.load(3), "load: expected path to be a path, got 3"),
    Wrong("load: a folder", lambda: dgp.load(FOLDER), "load: expected path to be the path of a file, got the folder"),
    Wrong("minimize with a seed", lambda: least(None, 3), f"minimize: {WITHOUT_KEY} 3"),
    Wrong("minimize by Adam", lambda: least(method="Adam"), 'method "L-BFGS" or "CG", got \'Adam\''),
    Wrong("minimize in no steps", lambda: least(max_steps=0), rf"max_steps {POSITIVE} 0"),
    Wrong("minimize to a negative tolerance", lambda: least(tol=-1.0), "expected tol to be positive, got -1.0"),
    Wrong("minimize NaN", lambda: least(None, KEY, X, np.full(12, np.nan)), "expected finite data, got 12 NaN"),
    Wrong(
        "minimize from no parameter", lambda: least(init_params={"loc": 0.0}), "minimize: expected names of parameters"
    ),
    Wrong("a negative step size", lambda: natural(-0.1), "NaturalGradient: expected a positive step_size, got -0.1"),
    Wrong("an infinite step size", lambda: natural(np.inf), "expected a positive step_size, got inf"),
    Wrong("a step size in words", lambda: natural("0.1"), "expected a positive step_size, got '0.1'"),
    Wrong("step sizes for several sites", lambda: natural(np.ones(2)), "expected a positive step_size, got array"),
    Wrong("a negative schedule", lambda: natural(lambda t: -0.1), "finite and not negative, got -0.1 at step 0"),
    Wrong("a schedule of NaN", lambda: natural(lambda t: jnp.nan * t), "finite and not negative, got nan at step 0"),
    Wrong("a schedule of arrays", lambda: natural(lambda t: jnp.ones(2)), "finite and not negative, got .* at step 0"),
    Wrong(
        "a rate for the other parameters",
        lambda: natural(optimiser=0.01),
        "an optax optimiser for the other parameters, got float",
    ),
    Wrong(
        "NumPyro's Adam",
        lambda: natural(optimiser=numpyro.optim.Adam(0.1)),
        "an optax optimiser for the other parameters, got Adam",
    ),
    Wrong("unknown coordinates", lambda: natural(coordinates="polar"), "'polar'"),
    Wrong(
        "natural gradients of a function",
        lambda: NaturalGradient(point, 0.1, optax.adam(0.1)),
        r"expected one of dgp\.guides.* got function",
    ),
    Wrong("a ramp from nothing", lambda: log_linear(0.0, 1.0, 5), r"log_linear: expected a positive initial, got 0\.0"),
    Wrong("a ramp to infinity", lambda: log_linear(0.1, np.inf, 5), "log_linear: expected a positive final, got inf"),
    Wrong("a ramp of no steps", lambda: log_linear(0.1, 1.0, 0), "log_linear: expected a positive steps, got 0"),
]
