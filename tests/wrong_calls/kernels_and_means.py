"""Wrong calls of kernels and mean functions."""

import jax
import jax.numpy as jnp
import pandas as pd
from numpyro import handlers
from programs import X, Z
from wrong_calls.wrong import Wrong

import numpyro_dgp as dgp

K, M = dgp.kernels, dgp.means
RBF = K.RBF
TEXT = pd.DataFrame({"t": ["a"]})
NAN = X.at[0].set(jnp.nan)


def of_points(x, y):
    return jnp.exp(-((x - y) ** 2).sum())


def layer(mean, outputs=None):
    with handlers.seed(rng_seed=0):
        return dgp.gp("f", RBF(), dgp.Points(Z), mean=mean, outputs=outputs)(X)


SINGLE = [K.RBF, K.Matern12, K.Matern32, K.Matern52, K.RationalQuadratic, K.Periodic, K.Cosine, K.ArcCosine, K.White]
WRONG = [
    *(
        Wrong(f"{kernel.__name__}: {what}", lambda kernel=kernel, value=value: kernel(value), match)
        for kernel in [*SINGLE, K.Constant]
        for what, value, match in [
            ("negative", -1.0, f"{kernel.__name__}: expected variance to be positive, got -1.0"),
            ("NaN", jnp.nan, f"{kernel.__name__}: expected variance to be positive, got nan"),
            ("words", "a", f"{kernel.__name__}: expected variance to be a positive number, got str"),
            ("nothing", None, f"{kernel.__name__}: expected variance to be a positive number, got NoneType"),
            ("complex", 1j, f"{kernel.__name__}: expected variance to be a positive number, got complex"),
            ("a vector", jnp.ones(2), f"{kernel.__name__}: expected variance to be a single number"),
        ]
    ),
    *(
        Wrong(
            f"{kernel.__name__}: no lengthscale", lambda kernel=kernel: kernel(1.0, 0.0), "lengthscale to be positive"
        )
        for kernel in SINGLE[:7]
    ),
    Wrong(
        "complex lengthscale",
        lambda: RBF(1.0, 1j * jnp.ones(1)),
        "RBF: expected lengthscale to be a positive .*complex",
    ),
    Wrong(
        "complex lengthscale while tracing",
        lambda: jax.eval_shape(lambda ls: RBF(1.0, ls)(X, X), 1j * jnp.ones(1)),
        "RBF: expected lengthscale to be a positive number, got complex",
    ),
    Wrong("complex period", lambda: K.Periodic(1.0, 1.0, 1j), "Periodic: expected period to be a positive .*complex"),
    Wrong("many negative", lambda: RBF(1.0, -jnp.ones(50)), r"positive, got -1.0 in an array of shape \(50,\)"),
    Wrong("a vector of inputs", lambda: RBF()(X[:, 0], X), r"RBF: expected inputs of shape \(..., N, D\)"),
    Wrong("other columns", lambda: RBF()(X, jnp.ones((2, 3))), "same number of columns"),
    Wrong("three lengthscales", lambda: RBF(1.0, jnp.ones(3))(X, X), r"lengthscale of shape \(\) or \(1,\)"),
    Wrong("text", lambda: RBF()(TEXT, X), "expected inputs to be numbers, got text"),
    Wrong("diag of a vector", lambda: RBF().diag(X[:, 0]), "expected inputs of shape"),
    Wrong("on nothing", lambda: RBF().on(), "expected columns counted from 0"),
    Wrong("on the last", lambda: RBF().on(-1), "expected columns counted from 0"),
    Wrong("on True", lambda: RBF().on(True), "expected columns counted from 0"),
    Wrong("on a list", lambda: RBF().on([0]), "expected columns counted from 0"),
    Wrong("on a missing column", lambda: RBF().on(3)(X, X), "at least 4 input columns"),
    Wrong("plus a word", lambda: RBF() + "a", "a callable k.X1, X2. or a number, got str"),
    Wrong("plus nothing", lambda: RBF() + None, "a callable k.X1, X2. or a number, got NoneType"),
    Wrong("minus", lambda: -1.0 * RBF(), "expected variance to be positive"),
    Wrong("a class", lambda: K.as_kernel(RBF), "expected a kernel, .*got RBF: dgp.kernels.RBF.."),
    Wrong("of points", lambda: K.as_kernel(of_points)(X, X), "write it for arrays"),
    Wrong("of points, diagonal", lambda: K.as_kernel(of_points).diag(X), r"to a matrix \(1, 1\), got shape \(\)"),
    Wrong(
        "a diagonal",
        lambda: K.as_kernel(lambda a, b: jnp.ones(len(a)))(X, X),
        r"to a matrix \(30, 30\), got shape \(30,\)",
    ),
    Wrong("no features", lambda: K.as_kernel(of_points).features(jax.random.key(0), X, 3), "has no features"),
    Wrong("no spectrum", lambda: K.Linear().spectral_density(X), "Linear has no spectral density"),
    Wrong("no tilts", lambda: K.Matern12().tilts(1), "kernel with expectations in closed form"),
    Wrong("mean: a word", lambda: M.as_mean("a"), "expected a mean function, any callable .*got str"),
    Wrong("mean: yes", lambda: M.as_mean(True), "expected a mean function, any callable .*got bool"),
    Wrong("mean: NaN", lambda: M.as_mean(float("nan")), "expected finite mean, got 1 NaN"),
    Wrong("mean: a table", lambda: M.as_mean(jnp.ones((30, 1))), r"a number or one per output, .* \(30, 1\)"),
    Wrong("mean: three of one", lambda: layer(jnp.ones(3)), r"a mean function with 1 output.s., got one with 3"),
    Wrong("mean: a class", lambda: layer(M.IdentityMean), "expected a mean function, .*got IdentityMean"),
    Wrong("mean: a vector", lambda: layer(lambda x: x[:, 0]), r"to values \(..., P\), got \(30,\) for inputs"),
    Wrong(
        "mean: a vector, P = N", lambda: layer(lambda x: x[:, 0], 30), r"to values \(..., P\), got \(30,\) for inputs"
    ),
    Wrong("mean: one column for two outputs", lambda: layer(lambda x: x, 2), r"2 output\(s\), got one with 1.*repeat"),
    Wrong(
        "mean: identity for two outputs", lambda: layer(M.IdentityMean(), 2), r"2 output\(s\), got one with 1.*repeat"
    ),
    Wrong("mean: returns nothing", lambda: layer(lambda x: None), r"to values \(..., P\), got \(\)"),
    Wrong(
        "mean: two of three",
        lambda: layer(lambda x: jnp.ones((30, 2)), 3),
        "a mean function with 3 output.s., got one with 2",
    ),
    Wrong(
        "Linear: a vector", lambda: M.LinearMean(jnp.ones(3)), r"LinearMean: expected W of shape \(D, P\), got \(3,\)"
    ),
    Wrong("Linear: NaN", lambda: M.LinearMean(jnp.full((2, 1), jnp.nan)), "finite weights W"),
    Wrong("Linear: columns", lambda: M.LinearMean(jnp.ones((2, 1)))(X), "LinearMean: expected inputs with D = 2"),
    Wrong("Linear: offsets", lambda: M.LinearMean(jnp.ones((1, 2)), b=jnp.ones(3)), r"one per output, \(2,\), got"),
    Wrong("pca: a vector", lambda: M.pca(X[:, 0], 1), "means.pca: expected inputs of shape"),
    Wrong("pca: no outputs", lambda: M.pca(X, 0), "positive integer number of outputs, got 0"),
    Wrong("pca: 1.5", lambda: M.pca(X, 1.5), "positive integer number of outputs, got 1.5"),
    Wrong("pca: NaN", lambda: M.pca(NAN, 1), "finite inputs X"),
    Wrong("pca: text", lambda: M.pca(TEXT, 1), "inputs X to be numbers"),
    Wrong("directions: none", lambda: M.principal_directions(X, 0), "between 1 and 1 directions, got 0"),
    Wrong("directions: five", lambda: M.principal_directions(X, 5), "between 1 and 1 directions, got 5"),
]
