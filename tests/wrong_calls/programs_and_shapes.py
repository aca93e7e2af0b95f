"""Wrong calls that build programs: layers, latents, representations, likelihoods, guides, rules and bounds."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
from numpyro import handlers
from programs import X, Y, Z, shallow
from wrong_calls.wrong import Wrong, of_numpyro

import numpyro_dgp as dgp

G, RBF, POINTS = dgp.guides, dgp.kernels.RBF, dgp.Points(Z)
TEXT = pd.DataFrame({"t": ["a"] * 30})
DATES = pd.DataFrame({"t": pd.date_range("2020", periods=30)})
MASKED = np.ma.masked_array(np.ones((3, 1)), [[1], [0], [0]])
RAGGED = [[1.0], [1.0, 2.0]]
KEY = jax.random.key(0)
ROBUST = dgp.likelihoods.Robust(beta=1.5)


def seeded(program):
    with handlers.seed(rng_seed=0):
        return program()


def gp(name="f", kernel=RBF(), inducing=POINTS, **options):
    return seeded(lambda: dgp.gp(name, kernel, inducing, **options))


def in_plate(inducing=POINTS):
    with numpyro.plate("data", 3):
        return dgp.gp("f", RBF(), inducing)


def normal(v):
    return dist.Normal(v, 0.1)


def likelihood(conditional, outputs=None, **options):
    return dgp.Likelihood(gp(outputs=outputs)(X), conditional, **options)


def loss(model, *args, guide=None, key=KEY, params=None):
    guide = G.InducingPoint(model) if guide is None else guide
    params = {} if params is None else params
    return jax.eval_shape(lambda: handlers.seed(dgp.ELBO().loss, 0)(key, params, model, guide, *args))


def one_layer(X, y=None, *, outputs=None, conditional=normal, inducing=POINTS, **options):
    f = dgp.gp("g", RBF(), inducing, outputs=outputs)
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dgp.Likelihood(f(X), conditional), obs=y, **options)


def without_start(X, y=None):
    kernel = RBF(1.0, numpyro.param("l", constraint=dist.constraints.positive))
    f = dgp.gp("g", kernel, POINTS)
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dgp.Likelihood(f(X), normal), obs=y)


def several_right(X, y):
    f = dgp.gp("g", RBF(), POINTS)
    with numpyro.plate("data", len(X), dim=-2), numpyro.plate("replicates", 2, dim=-1):
        numpyro.sample("y", dgp.Likelihood(f(X[:, None]), normal), obs=jnp.stack([y, y], 1))


def several_left(X, y):
    f = dgp.gp("g", RBF(), POINTS)
    with numpyro.plate("replicates", 2, dim=-2), numpyro.plate("data", len(X), dim=-1):
        numpyro.sample("y", dgp.Likelihood(f(X), normal), obs=jnp.stack([y, y]))


def partly(X, y=None):
    one_layer(X, y, obs_mask=jnp.arange(30) > 3)


ARRAYS = [
    ("text", TEXT, "to be numbers, got text"),
    ("dates", DATES, r"to be numbers, got times \(datetime.*choose a unit"),
    ("masked", MASKED, r"got 1 masked value\(s\): drop these rows"),
    ("ragged", RAGGED, "got lists of unequal length"),
    ("complex", X + 1j, "to be real, got complex"),
    ("a word", "x", "to be numbers, got text"),
    ("a column of a table", TEXT.index.to_series(), r"shape .*got (shape )?\(30,\)"),
    ("a kernel", RBF(), "to be numbers, got a RBF"),
]
TAKERS = {
    "f": lambda x: gp()(x),
    "joint": lambda x: gp().joint(x),
    "exact": lambda x: gp(inducing=None)(x),
    "latent": lambda x: seeded(lambda: dgp.latent("w", x, 1)),
    "Points": dgp.Points,
    "Grid.around": lambda x: dgp.Grid.around(x, 1.0),
}
WRONG = [
    *(
        Wrong(f"{taker}: {what}", lambda take=take, value=value: take(value), match)
        for taker, take in TAKERS.items()
        for what, value, match in ARRAYS
    ),
    Wrong("gp: no outputs", lambda: gp(outputs=0), "outputs to be a positive integer or None, got 0"),
    Wrong("gp: outputs 2.0", lambda: gp(outputs=2.0), "outputs to be a positive integer or None, got 2.0"),
    Wrong("gp: outputs True", lambda: gp(outputs=True), "outputs to be a positive integer or None, got True"),
    Wrong("gp: a number as name", lambda: gp(3), "expected a name of the site, got 3"),
    Wrong("gp: one kernel of two", lambda: gp(kernel=[RBF()], outputs=2), "outputs=2, got 1 kernels"),
    Wrong("gp: an array", lambda: gp(inducing=Z), "wrap an array of inducing inputs as dgp.Points"),
    Wrong("gp: a number of points", lambda: gp(inducing=10), "expected inducing=dgp.Points.* got int"),
    Wrong("gp: the class Points", lambda: gp(inducing=dgp.Points), "expected inducing=dgp.Points.* got type"),
    Wrong("gp: a table", lambda: gp(inducing=TEXT), "got DataFrame: wrap"),
    Wrong("gp: in a plate", lambda: seeded(in_plate)(X), "for one function open the layer outside every plate"),
    Wrong(
        "gp: a grid in a plate", lambda: seeded(lambda: in_plate(dgp.Grid(0, 1, 8))), "the layer outside every plate"
    ),
    Wrong("gp: points per output", lambda: gp(inducing=dgp.Points(jnp.stack([Z] * 3)), outputs=2), "P = outputs = 2"),
    Wrong("f: more columns", lambda: gp()(jnp.ones((4, 2))), "D = 1 columns"),
    Wrong("f: a vector", lambda: gp()(X[:, 0]), r"a column is x\[:, None\]"),
    Wrong("f: nothing", lambda: gp()(None), "inputs of f.x. to be numbers, got a NoneType"),
    Wrong("f: NaN", lambda: gp()(X.at[0].set(jnp.nan)), "expected finite inputs of f.x., got 1 NaN"),
    Wrong("f: no rows", lambda: gp()(X[:0]), r"at least one row and column, got shape \(0, 1\)"),
    Wrong("f: values that were not drawn", lambda: gp()(gp()(X)), "got the distribution FunctionValues: draw it first"),
    Wrong("f: negative noise", lambda: gp()(X, noise=-1.0), "noise to be positive, got -1"),
    Wrong("f: no noise", lambda: gp()(X, noise=0.0), "noise to be positive, got 0"),
    Wrong("f: noise in words", lambda: gp()(X, noise="a"), "noise to be a positive number, got str"),
    Wrong(
        "f: a column of noise", lambda: gp()(X, noise=jnp.ones((30, 1))), r"noise to be a number, got shape \(30, 1\)"
    ),
    Wrong("f: noise of three outputs", lambda: gp(outputs=2)(X, noise=jnp.ones(3)), r"one per output, \(2,\), got .*3"),
    Wrong(
        "joint: noise per row", lambda: gp().joint(X, noise=jnp.ones(30)), r"noise to be a number, got shape \(30,\)"
    ),
    Wrong("exact: noise per row", lambda: gp(inducing=None)(X, noise=jnp.ones(30)), "noise to be a number"),
    Wrong("condition: fewer values", lambda: gp(inducing=None).condition(X, Y[:3]), r"shape \(30,\) at inputs"),
    Wrong(
        "condition: a column", lambda: gp(inducing=None).condition(X, Y[:, None]), r"got \(30, 1\): a scalar function"
    ),
    Wrong("values: as a mean", lambda: dist.Normal(gp()(X), 0.1), "expected an array, got the distribution"),
    *of_numpyro(
        "0.22",  # before, it takes what has a shape, and a later call ends in a TypeError
        Wrong("values: as a rate", lambda: dist.Poisson(gp()(X)), "expected an array, got the distribution"),
    ),
    Wrong("values: exp", lambda: jnp.exp(gp()(X)), "expected an array"),
    Wrong("values: plus one", lambda: gp()(X) + 1, "expected an array"),
    Wrong("values: one of them", lambda: gp()(X)[0], 'draw it, h = numpyro.sample."h", f.x.., or integrate it'),
    Wrong("mix: three functions", lambda: gp(outputs=2)(X).mix(jnp.ones((2, 3))), "weights of shape .P, Q."),
    Wrong(
        "latent: no columns", lambda: seeded(lambda: dgp.latent("w", X, 0)), "expected a positive integer dim, got 0"
    ),
    Wrong("latent: 1.0", lambda: seeded(lambda: dgp.latent("w", X, 1.0)), "expected a positive integer dim, got 1.0"),
    Wrong("Points: a vector", lambda: dgp.Points(Z[:, 0]), r"for one input column write Z\[:, None\]"),
    Wrong("Points: empty", lambda: dgp.Points(Z[:0]), r"got \(0, 1\)"),
    Wrong("Points: a number", lambda: dgp.Points(10), r"Points: expected Z of shape \(M, D\)"),
    Wrong("Points: NaN", lambda: dgp.Points(Z.at[0].set(jnp.nan)), "expected finite inducing inputs Z"),
    Wrong("Points: learn in words", lambda: dgp.Points(Z, learn="yes"), "learn to be True or False, got "),
    Wrong("Grid: high first", lambda: dgp.Grid(1.0, 0.0, 10), "expected low < high, got 1.0 and 0.0"),
    Wrong("Grid: no points", lambda: dgp.Grid(0.0, 1.0, 0), "size to be one, two or three integers from 2"),
    Wrong("Grid: half a point", lambda: dgp.Grid(0.0, 1.0, 10.5), "size to be one, two or three integers .*got 10.5"),
    Wrong("Grid: NaN", lambda: dgp.Grid(jnp.nan, 1.0, 10), "expected finite low"),
    Wrong("Grid: words", lambda: dgp.Grid("a", 1.0, 10), "expected low to be numbers"),
    Wrong("Grid: four dimensions", lambda: dgp.Grid([0.0] * 4, [1.0] * 4, (4,) * 4), "one, two or three integers"),
    Wrong(
        "Grid: two ends of three",
        lambda: dgp.Grid([0.0, 0.0], [1.0, 1.0], (4,) * 3),
        r"one per dimension, shape \(3,\)",
    ),
    Wrong("Grid: one neighbour", lambda: dgp.Grid(0.0, 1.0, 10, neighbours=1), "neighbours to be an integer from 2 on"),
    Wrong(
        "Grid: 2.5 neighbours", lambda: dgp.Grid(0.0, 1.0, 10, neighbours=2.5), "neighbours to be an integer .*got 2.5"
    ),
    Wrong(
        "Grid: of no spectrum", lambda: gp(kernel=dgp.kernels.Linear(), inducing=dgp.Grid(0.0, 9.0, 20)), "no spectral"
    ),
    Wrong("Grid.around: no lengthscale", lambda: dgp.Grid.around(X, 0.0), "lengthscale to be positive"),
    Wrong(
        "Grid.around: two lengthscales",
        lambda: dgp.Grid.around(X, jnp.ones(2)),
        r"one per column, shape \(1,\), got shape \(2,\)",
    ),
    Wrong("Grid.around: margin", lambda: dgp.Grid.around(X, 1.0, margin=-1.0), "margin to be positive"),
    Wrong("Grid.local: tol", lambda: dgp.Grid(0.0, 9.0, 20).local(RBF(), tol=0.0), "tol to be positive"),
    Wrong("Likelihood: a distribution", lambda: likelihood(dist.Normal(0, 0.1)), "function from v .*got a Normal"),
    Wrong("Likelihood: a number", lambda: likelihood(0.1), "a function from v to the distribution of y, got a float"),
    Wrong(
        "Likelihood: nothing", lambda: likelihood(None), "a function from v to the distribution of y, got a NoneType"
    ),
    Wrong("Likelihood: an array", lambda: dgp.Likelihood(X, normal), "expected the distribution f.x., got ArrayImpl"),
    Wrong("Likelihood: a function", lambda: dgp.Likelihood(gp(), normal), "f.x., got SparseFunction: pass g.h. itself"),
    Wrong(
        "Likelihood: exact",
        lambda: dgp.Likelihood(gp(inducing=None)(X), normal),
        r"expected values of a function with inducing points, got those of one .* draw v = .* outside the plate",
    ),
    Wrong(
        "Likelihood: by NumPy",
        lambda: likelihood(lambda v: dist.Poisson(np.exp(v))),
        "a conditional of JAX operations on v, got one that turns v into a NumPy array .*instead of np.exp",
    ),
    Wrong(
        "Likelihood: branches on v",
        lambda: likelihood(lambda v: normal(v if v.sum() > 0 else -v)),
        "a conditional of JAX operations on v, .* jnp.where instead of if",
    ),
    Wrong("Likelihood: complex y", lambda: likelihood(normal).log_prob(Y * 1j), "real observations y, got complex"),
    Wrong("f: 1e20", lambda: gp()(1e20 * X.astype("float32")), "f.x. with squared distances below 3e.38, .*Standardiz"),
    Wrong(
        "Points: 1e200", lambda: dgp.Points(1e200 * Z), r"inducing inputs Z with squared distances below 2e\+308, the"
    ),
    Wrong("f: complex noise", lambda: gp()(X, noise=1j), "noise to be a positive number, got complex"),
    Wrong("f: records", lambda: gp()(np.zeros(3, [("a", float)])), "to be numbers, got records: put their fields"),
    Wrong("Likelihood: returns an array", lambda: likelihood(lambda v: v), "conditional.v., a NumPyro distr"),
    Wrong("Likelihood: collapse", lambda: likelihood(normal, collapse="x"), 'collapse="bound" or "marginal", got .x'),
    Wrong(
        "Likelihood: 20",
        lambda: likelihood(normal, integrate=20),
        "integrate=dgp.likelihoods.GaussHermite.n. .*got int",
    ),
    Wrong(
        "Likelihood: draws a key",
        lambda: seeded(lambda: likelihood(lambda v: normal(v + jax.random.normal(numpyro.prng_key())))),
        r"without sites of its own, got numpyro.prng_key\(\)",
    ),
    Wrong(
        "Likelihood: a parameter",
        lambda: seeded(lambda: likelihood(lambda v: normal(numpyro.param("a", 1.0) * v))),
        "without sites of its own, got param 'a': draw or create it",
    ),
    Wrong("Likelihood: centred", lambda: likelihood(lambda v: normal(v - v.mean())), "every y depends on one row of v"),
    Wrong("Likelihood: a path", lambda: likelihood(lambda v: normal(jnp.cumsum(v))), "several rows of v by cumsum"),
    Wrong("Likelihood: y", lambda: likelihood(normal).log_prob(Y[:, None]), r"y of shape \(30,\), got \(30, 1\)"),
    Wrong("Robust: nothing", lambda: dgp.likelihoods.Robust(), "one of beta and gamma, .* got beta=None, gamma=None"),
    Wrong(
        "Robust: both",
        lambda: dgp.likelihoods.Robust(beta=1.2, gamma=1.2),
        "one of beta and gamma, greater than one, got beta=1.2, gamma=1.2",
    ),
    Wrong("Robust: one", lambda: dgp.likelihoods.Robust(beta=1.0), "greater than one, got beta=1.0, gamma=None"),
    Wrong("Robust: negative", lambda: dgp.likelihoods.Robust(gamma=-2.0), "expected gamma to be positive, got -2.0"),
    Wrong(
        "Robust: a density of the mean",
        lambda: likelihood(lambda v: dist.Normal(v, 1.0), integrate=ROBUST, collapse="marginal"),
        'collapse="bound" with a loss in place of the log density, got "marginal"',
    ),
    Wrong(
        "Robust: a curve",
        lambda: likelihood(lambda v: dist.Normal(v**2, 1.0), integrate=ROBUST),
        "of one function under integrate=Robust, got a Normal, or one that depends on v otherwise",
    ),
    Wrong(
        "Robust: of Student's t",
        lambda: likelihood(lambda v: dist.StudentT(4.0, v, 1.0), integrate=ROBUST),
        "Likelihood: expected dist.Normal.* under integrate=Robust, got a StudentT",
    ),
    Wrong(
        "Robust: of two functions",
        lambda: dgp.Likelihood((gp()(X), gp("s")(X)), lambda v, s: dist.Normal(v, jnp.exp(s)), integrate=ROBUST),
        "of one function under integrate=Robust, got a Normal",
    ),
    Wrong("RobustMax: one class", lambda: dgp.likelihoods.RobustMax(jnp.ones((3, 1))), "two classes or more"),
    Wrong("RobustMax: a number", lambda: dgp.likelihoods.RobustMax(1.0), "two classes or more"),
    Wrong("RobustMax: epsilon", lambda: dgp.likelihoods.RobustMax(jnp.ones((3, 2)), 0.0), "0 < epsilon < 1, got 0.0"),
    Wrong("RobustMax: no draw", lambda: dgp.likelihoods.RobustMax(gp(outputs=2)(X)), "an array"),
    Wrong("GaussHermite: none", lambda: dgp.likelihoods.GaussHermite(0), "size to be a positive integer, got 0"),
    Wrong("MonteCarlo: 2.5", lambda: dgp.likelihoods.MonteCarlo(2.5), "size to be a positive integer, got 2.5"),
    Wrong("ELBO: no particles", lambda: dgp.ELBO(0), "num_particles to be a positive integer, got 0"),
    Wrong(
        "ELBO: an integer as key",
        lambda: loss(shallow, X, Y, key=0),
        r"ELBO\.\w+: expected a PRNG key, got 0: jax.random",
    ),
    Wrong("ELBO: no key", lambda: dgp.ELBO().loss(None, {}, shallow, shallow, X), "a PRNG key, got NoneType"),
    Wrong("ELBO: no guide", lambda: loss(shallow, X, Y, guide=3), "expected a callable guide, got int"),
    Wrong("ELBO: no model", lambda: loss(None, X, Y, guide=shallow), "expected a callable model, got NoneType"),
    Wrong("ELBO: a list", lambda: loss(shallow, X, Y, params=[1.0]), "expected params as a dict, got list"),
    Wrong("ELBO: NaN", lambda: loss(shallow, X, Y.at[0].set(jnp.nan)), "expected finite data in the model's"),
    Wrong("ELBO: no y", lambda: loss(one_layer, X), "expected observations at 'y', got none: pass them to the call"),
    Wrong(
        "ELBO: obs_mask",
        lambda: loss(partly, X, Y),
        "site 'y': expected a Likelihood with observed=mask, got obs_mask=",
    ),
    Wrong("ELBO: no rows", lambda: loss(one_layer, X[:0], Y[:0]), "plates with at least one row, got one of size 0"),
    Wrong(
        "ELBO: a table that is indexed", lambda: loss(shallow, pd.DataFrame(np.asarray(X)), Y), "got a pandas DataFrame"
    ),
    Wrong("ELBO: a list that is indexed", lambda: loss(shallow, X.tolist(), Y), "got numbers in a list: while"),
    Wrong("ELBO: a guide of other layers", lambda: loss(shallow, X, Y, guide=lambda *a: None), "one without 'g'"),
    Wrong(
        "ELBO: a guide of other points",
        lambda: loss(lambda *a: one_layer(*a, inducing=dgp.Points(Z[:5])), X, Y, guide=G.InducingPoint(shallow)),
        r"inducing values of shape \(5,\), got \(8,\): the guide, parameters or draws are those of another program",
    ),
    Wrong("ELBO: a column of y", lambda: loss(one_layer, X, Y[:, None]), r"y of shape \(30,\), got \(30, 1\)"),
    Wrong("ELBO: y is a list", lambda: loss(one_layer, X, Y.tolist()), "got numbers in a list: .* no observations"),
    Wrong(
        "Likelihood: half a count",
        lambda: likelihood(lambda v: dist.Poisson(jnp.exp(v))).log_prob(jnp.full(30, 1.5)),
        r"observations y from 0, got 1.5 at index \(0,\) .* counts are whole",
    ),
    Wrong(
        "Likelihood: labels that are not integers",
        lambda: likelihood(lambda v: dist.Categorical(logits=v), 3, integrate=dgp.likelihoods.MonteCarlo(2)).log_prob(
            jnp.ones(30)
        ),
        r"labels y as integers, got float(32|64): write y.astype.int",
    ),
    Wrong("ELBO: no start", lambda: loss(without_start, X, Y), "initial value of numpyro.param .l., got none: write"),
    Wrong(
        "ELBO: no start, inspected",
        lambda: loss(without_start, X, Y, params={"l": 1.0}),
        r"an initial value of numpyro.param 'l', got none: write",
    ),
    Wrong("ELBO: several y right of f", lambda: loss(several_right, X, Y), r"plate left .*dim=-2\), .* shape .R, N."),
    Wrong(
        "Collapsed: several y of one f",
        lambda: loss(several_left, X, Y, guide=G.Collapsed(several_left)),
        r"expected one observation of every function value at 'y', shape \(30,\), got shape \(2, 30\)",
    ),
    Wrong("ELBO: N x N", lambda: loss(lambda *a: one_layer(*a, outputs=1), X, Y[:, None]), "30. log densities"),
    Wrong(
        "guide: no model", lambda: G.InducingPoint(None), "InducingPoint: expected the program, a function, got NoneT"
    ),
    Wrong("guide: hidden", lambda: G.InducingPoint(shallow, hidden=G.Normal), "a rule for 'hidden', got type"),
    Wrong("guide: two", lambda: G.InducingPoint(shallow, G.Full()), "takes 2 positional arguments but 3", TypeError),
    Wrong("guide: typo", lambda: G.InducingPoint(shallow, latnet=1), "keyword argument 'latnet'", TypeError),
    Wrong("guide: a class", lambda: G.InducingPoint(shallow, inducing=G.Full), "a rule for 'inducing', got type"),
    Wrong("guide: other, a class", lambda: G.InducingPoint(shallow, other=G.Delta), "a rule for 'other', got type"),
    Wrong("guide: other, a word", lambda: G.InducingPoint(shallow, other="delta"), "a rule for 'other', got str"),
    Wrong("guide: sites, a number", lambda: G.InducingPoint(shallow, sites={"g": 1}), "a rule for 'g', got int"),
    Wrong(
        "guide: sites, a list", lambda: G.InducingPoint(shallow, sites=[G.Full()]), "expected sites as a dict, got list"
    ),
    Wrong("guide: prefix", lambda: G.InducingPoint(shallow, prefix=3), "expected prefix to be a string, got 3"),
    Wrong("guide: init", lambda: G.InducingPoint(shallow, init_loc_fn=3), "init_loc_fn to be a function, got int"),
    Wrong(
        "guide: K", lambda: G.ImportanceWeighted(shallow, num_samples=0), "num_samples to be a positive integer, got 0"
    ),
    Wrong(
        "guide: a number for K", lambda: G.MeanField(shallow, importance=5), "expected a dgp.guides.Importance, got int"
    ),
    Wrong("guide: MeanField, typo", lambda: G.MeanField(shallow, hiden=1), "keyword argument 'hiden'", TypeError),
    Wrong(
        "guide: K, typo",
        lambda: G.ImportanceWeighted(shallow, num_samples=2, site={}),
        "keyword argument 'site'",
        TypeError,
    ),
    Wrong("guide: Guide, typo", lambda: G.Guide(shallow, inducings=1), "keyword argument 'inducings'", TypeError),
    Wrong(
        "guide: Collapsed, inducing",
        lambda: G.Collapsed(shallow, inducing=G.Full()),
        "keyword argument 'inducing'",
        TypeError,
    ),
    Wrong("guide: Nested, hidden", lambda: G.Nested(shallow, hidden=G.Normal()), "argument 'hidden'", TypeError),
    Wrong("guide: Markov, typo", lambda: G.Markov(shallow, rank=2), "keyword argument 'rank'", TypeError),
    Wrong("guide: Collapsed, typo", lambda: G.Collapsed(shallow, integrat=1), "keyword argument 'integrat'", TypeError),
    Wrong("guide: key", lambda: G.InducingPoint(shallow).sample_posterior(0, {}, X), "PRNG key, got 0"),
    Wrong("guide: median", lambda: G.InducingPoint(shallow).median({}), "expected the arguments of the model"),
    *(
        Wrong(
            f"rule {rule.__name__}: scale",
            lambda rule=rule: rule(scale=-1.0),
            f"{rule.__name__}: expected scale to be pos",
        )
        for rule in (G.Full, G.Diagonal, G.Normal, G.GivenInducing, G.GivenBelow, G.JointOutputs, G.Circulant)
    ),
    Wrong("rule Full: a program", lambda: G.Full(shallow), "scale .*got function.*; a program goes to a gui"),
    Wrong("rule Full: words", lambda: G.Full(scale="a"), "scale to be a positive number, got str"),
    Wrong("rule Amortised: a number", lambda: G.Amortised(hidden=20), "widths of layers, got 20"),
    Wrong("rule Amortised: no width", lambda: G.Amortised(hidden=(0,)), r"widths of layers, got \(0,\)"),
    Wrong("rule Quadrature: none", lambda: G.Quadrature(0), "to be a positive integer, got 0"),
    Wrong("rule MarkovInducing: rank", lambda: G.MarkovInducing(rank=0), "rank to be a positive integer, got 0"),
    Wrong(
        "rule GivenInducing: weights", lambda: G.GivenInducing(weights="x"), 'weights "free", "model", a positive rank'
    ),
    Wrong("for_mcmc: nothing", lambda: dgp.for_mcmc(None), "for_mcmc: expected a program, a function, got NoneType"),
    Wrong("minibatch: half a row", lambda: dgp.minibatch(shallow, data=3.5), "data to be a positive integer, got 3.5"),
]
