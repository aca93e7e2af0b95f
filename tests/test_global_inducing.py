"""Pseudo-observations at pseudo-inputs that go through all layers: their posterior, its bound, and what is refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro import handlers
from numpyro.distributions import kl_divergence
from numpyro.infer import SVI, Trace_ELBO
from programs import agree, bound, draws_of_bound
from scipy.stats import multivariate_normal

import numpyro_dgp as dgp
from numpyro_dgp import guides as G
from numpyro_dgp import kernels as k
from numpyro_dgp.analysis.program import inspect_program
from numpyro_dgp.guides.record import record_of

NOISE = 0.3
rng = np.random.default_rng(0)
X = jnp.asarray(np.linspace(-1.9, 2, 9)[:, None] + 0.05 * rng.normal(size=(9, 1)))
Y = jnp.sign(X[:, 0]) + 0.1 * rng.normal(size=9)
Z = np.linspace(-2, 2, 4)[:, None]


def one(X, y=None, *, points=X):
    g = dgp.gp("g", k.Matern32(1.2, 0.7), dgp.Points(points), mean=lambda x: 0.3 * x)
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dgp.Likelihood(g(X), lambda v: dist.Normal(v, NOISE)), obs=y)


KERNELS = {"f": (k.RBF(0.5, 0.9), k.RBF(0.4, 1.3)), "g": k.RBF(1.2, 0.7)}


def two(X, y=None, batch=None, *, dtype=None):
    """Two outputs with kernels of their own between the layers, process noise, X beside the hidden values."""
    points = jnp.asarray(np.hstack([Z, np.sin(3 * Z), Z]), dtype)
    f = dgp.gp(
        "f", KERNELS["f"], dgp.Points(points[:, :1]), outputs=2, mean=dgp.means.LinearMean(jnp.ones((1, 2), dtype))
    )
    g = dgp.gp("g", KERNELS["g"], dgp.Points(points))
    with numpyro.plate("data", len(X), subsample_size=batch) as i:
        h = numpyro.sample("h", f(X[i], noise=0.1))
        x = jnp.concatenate([h, X[i]], -1)
        numpyro.sample("y", dgp.Likelihood(g(x), lambda v: dist.Normal(v, NOISE)), obs=None if y is None else y[i])


def latents(X, y=None, batch=None):
    noise = numpyro.sample("noise", dist.LogNormal(-1.0, 0.5))
    f = dgp.gp("f", k.RBF(0.5, 0.9), dgp.Points(np.hstack([Z, np.cos(Z)])), outputs=1, mean=lambda x: x[..., :1])
    e = dgp.gp("e", k.RBF(0.3, 0.9), dgp.Points(Z, learn=True), outputs=1, mean=dgp.means.IdentityMean())
    g = dgp.gp("g", k.RBF(1.2, 0.7), dgp.Points(Z))
    with numpyro.plate("data", len(X), subsample_size=batch) as i:
        x = dgp.latent("w", X[i], 1)
        h = numpyro.sample("h", f(x))
        m = numpyro.sample("m", e(h))
        numpyro.sample("y", dgp.Likelihood(g(m), lambda v: dist.Normal(v, noise)), obs=None if y is None else y[i])


def initial(model, guide, *args, **kwargs):
    svi = SVI(model, guide, optax.sgd(0.0), dgp.ELBO())
    return svi.get_params(svi.init(jax.random.key(0), *args, **kwargs))


def moved(model, guide, *args, scale=0.3, **kwargs):
    """Parameters away from any special place, roots triangular with a positive diagonal; traced, not computed."""
    params = jax.eval_shape(lambda: initial(model, guide, *args, **kwargs))
    numbers = np.random.default_rng(1)
    found = {}
    for name, value in sorted(params.items()):
        noise = (scale * numbers.normal(size=value.shape)).astype(value.dtype)
        value = jnp.zeros(value.shape, value.dtype)
        if name.endswith("_root") and value.ndim > 1 and value.shape[-1] == value.shape[-2]:
            found[name] = jnp.asarray(np.tril(1.5 * np.eye(value.shape[-1], dtype=value.dtype) + noise))
        elif name.endswith(("_root", "_scale", "noise_auto_loc")):
            found[name] = jnp.asarray(0.7 + np.abs(noise))
        else:
            rows = jnp.linspace(-2, 2, len(value), dtype=value.dtype)[:, None] if value.ndim else 0
            found[name] = value + noise + (rows if name.endswith(("inputs", "_Z")) else 0)
    return found


def beliefs(model, guide, *args):
    """Compiled: from parameters to the sites of the guide, their draws and means and factors."""

    @jax.jit
    def run(params):
        given = handlers.substitute(handlers.seed(guide, 5), data=params)
        sites = handlers.trace(given).get_trace(*args)
        drawn = {n: s for n, s in sites.items() if s["type"] == "sample" and n in ("f", "g")}
        return {
            n: (s["value"], s["fn"].loc, s["fn"].scale_tril, s["fn"].log_prob(s["value"])) for n, s in drawn.items()
        }

    return run


@functools.cache
def of_two():
    guide = G.InducingPoint(two, inducing=G.GlobalInducing(5))
    return guide, moved(two, guide, X, Y), beliefs(two, guide, X, Y)


def dense_features(kernel, x, z):
    L = np.linalg.cholesky(np.asarray(kernel(z, z)) + 1e-10 * kernel.diag(z)[0] * np.eye(len(z)))
    return np.linalg.solve(L, np.asarray(kernel(z, x))).T


def dense_posterior(A, root, residual):
    """Of v from the joint Gaussian of v and the pseudo-observations, by conditioning."""
    S = A @ A.T + np.linalg.inv(root @ root.T)
    gain = np.linalg.solve(S, A).T
    return gain @ residual, np.eye(A.shape[1]) - gain @ A


@pytest.mark.long
def test_one_layer_holds_the_exact_posterior():
    """Pseudo-observations that are the data: the bound is the evidence."""
    guide = G.InducingPoint(one, inducing=G.GlobalInducing(len(X)))
    params = initial(one, guide, X, Y)
    order = np.argsort(X[:, 0])
    np.testing.assert_allclose(params["auto_pseudo_inputs"], X[order])
    params |= {"g_auto_pseudo_outputs": jnp.asarray(Y[order]), "g_auto_root": jnp.eye(len(X)) / NOISE}
    K = np.asarray(k.Matern32(1.2, 0.7)(X, X)) + NOISE**2 * np.eye(len(X))
    evidence = multivariate_normal(0.3 * X[:, 0], K).logpdf(Y)
    loss = jax.jit(lambda params: bound(dgp.ELBO(), params, one, guide, X, Y))
    np.testing.assert_allclose(loss(params), evidence, atol=1e-8)
    less = params | {"g_auto_pseudo_outputs": 0.9 * params["g_auto_pseudo_outputs"]}
    assert loss(less) < evidence - 1e-3


@pytest.mark.slow
def test_two_layers_have_the_density_of_the_dense_formula():
    _, params, run = of_two()
    found = run(params)
    x = np.asarray(params["auto_pseudo_inputs"])
    hidden = []
    for p, kernel in enumerate(KERNELS["f"]):
        A = dense_features(kernel, x, Z)
        root, t = (np.asarray(params[f"f_auto_{name}"]) for name in ("root", "pseudo_outputs"))
        mean, cov = dense_posterior(A, root[p], t[:, p] - x[:, 0])
        v = found["f"][0][p]
        np.testing.assert_allclose(found["f"][1][p], mean, atol=1e-8)
        hidden.append(x[:, 0] + A @ v)
        white = np.linalg.solve(np.linalg.cholesky(cov), found["f"][2][p])
        np.testing.assert_allclose(white @ white.T, np.eye(4), atol=1e-6)
    inputs = np.column_stack([*hidden, x])
    A = dense_features(KERNELS["g"], inputs, np.hstack([Z, np.sin(3 * Z), Z]))
    mean, cov = dense_posterior(A, np.asarray(params["g_auto_root"]), np.asarray(params["g_auto_pseudo_outputs"]))
    v, loc, _, density = found["g"]
    np.testing.assert_allclose(loc, mean, atol=1e-7)
    np.testing.assert_allclose(density, multivariate_normal(mean, cov).logpdf(v), atol=1e-6)


@pytest.mark.slow
def test_divergence_is_that_of_draws():
    _, params, run = of_two()
    _, loc, root, _ = (np.asarray(a) for a in run(params)["g"])
    q = dgp.functions.weights.FullBelief(loc, root)
    closed = kl_divergence(q, dgp.functions.weights.InducingPrior(loc.shape, loc.dtype))
    white = rng.normal(size=(100_000, len(loc)))
    v = loc + white @ root.T
    log_ratio = -0.5 * (white**2).sum(-1) - np.log(np.diag(root)).sum() + 0.5 * (v**2).sum(-1)
    assert abs(log_ratio.mean() - closed) < 4 * log_ratio.std() / np.sqrt(len(v))


@pytest.mark.slow
def test_the_order_of_pseudo_points_does_not_matter():
    _, params, run = of_two()
    order = np.array([3, 1, 4, 0, 2])
    other = dict(params)
    other["auto_pseudo_inputs"] = params["auto_pseudo_inputs"][order]
    for name in "fg":
        other[f"{name}_auto_pseudo_outputs"] = params[f"{name}_auto_pseudo_outputs"][order]
        root = params[f"{name}_auto_root"]
        precision = (root @ root.mT)[..., order[:, None], order]
        other[f"{name}_auto_root"] = jnp.linalg.cholesky(precision)
    for a, b in zip(jax.tree.leaves(run(params)), jax.tree.leaves(run(other)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-7)


CASES = {
    "two": (two, {}, {}),
    "minibatch": (two, {}, {"batch": 4}),
    "diagonal": (two, {"inducing": G.GlobalInducing(5, diagonal=True)}, {}),
    "three": (latents, {}, {}),
    "three, minibatch": (latents, {}, {"batch": 4}),
    "one rule apart": (two, {"sites": {"f": G.Full(0.3)}}, {}),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.long
def test_same_bound_as_with_everything_drawn(name):
    model, options, kwargs = CASES[name]
    guide = G.InducingPoint(model, **({"inducing": G.GlobalInducing(5)} | options))
    params = moved(model, guide, X, Y, scale=0.2, **kwargs)
    ours = draws_of_bound(dgp.ELBO(), params, model, guide, X, Y, **kwargs)
    stock = draws_of_bound(Trace_ELBO(), params, model, guide, X, Y, num=6000, **kwargs)
    assert agree(ours, stock)
    assert ours.std() < stock.std()


def test_only_what_others_depend_on_is_drawn():
    """Seen on shapes: v of the first layer is drawn, that of the last integrated, and depends on the draw."""
    assert inspect_program(two, (X, Y), {}).lower == {"f": frozenset(), "g": frozenset({"f"})}
    lower = inspect_program(latents, (X, Y), {}).lower
    assert lower == {"f": frozenset(), "e": frozenset({"f"}), "g": frozenset({"f", "e"})}


@pytest.mark.long
@pytest.mark.parametrize("model", [two, pytest.param(latents, marks=pytest.mark.long)])
def test_gradients_are_slopes_for_every_parameter(model):
    guide = G.InducingPoint(model, inducing=G.GlobalInducing(5))
    params = moved(model, guide, X, Y)
    loss = jax.jit(jax.value_and_grad(lambda params: bound(dgp.ELBO(), params, model, guide, X, Y)))
    _, gradient = loss(params)
    for name, value in params.items():
        direction = rng.normal(size=value.shape)
        direction = jnp.asarray(np.tril(direction) if name.endswith("_root") else direction)
        up, down = (loss(params | {name: value + step * direction})[0] for step in (1e-5, -1e-5))
        slope = (gradient[name] * direction).sum()
        assert abs(slope) > 1e-4, name
        np.testing.assert_allclose((up - down) / 2e-5, slope, rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.long
def test_single_precision_is_enough_at_the_start(x32):
    """Inner layers start with precisions of 10^4."""
    X32, Y32 = X.astype(np.float32), Y.astype(np.float32)
    model = functools.partial(two, dtype=jnp.float32)
    guide = G.InducingPoint(model, inducing=G.GlobalInducing(5))
    params = initial(model, guide, X32, Y32)
    assert {value.dtype for value in params.values()} == {np.dtype("float32")}
    np.testing.assert_allclose(params["f_auto_pseudo_outputs"], params["auto_pseudo_inputs"] * np.ones(2), atol=1e-6)
    loss, gradient = jax.jit(
        jax.value_and_grad(lambda params: dgp.ELBO().loss(jax.random.key(0), params, model, guide, X32, Y32))
    )(params)
    assert all(np.isfinite(value).all() for value in jax.tree.leaves((loss, gradient)))


def at_shapes(model, guide, *args, **kwargs):
    jax.eval_shape(lambda: handlers.seed(guide, 0)(*args, **kwargs))


@pytest.mark.slow
def test_single_precision_stays(x32):
    X32, Y32 = X.astype(np.float32), Y.astype(np.float32)
    model = functools.partial(two, dtype=jnp.float32)
    guide = G.InducingPoint(model, inducing=G.GlobalInducing(5))
    params, drawn = jax.eval_shape(lambda: (initial(model, guide, X32, Y32), handlers.seed(guide, 0)(X32, Y32)))
    assert {value.dtype for value in jax.tree.leaves((params, drawn))} == {np.dtype("float32")}


@pytest.mark.slow
def test_start_is_at_centres_of_the_data():
    """Also where the first step is compiled, as in dgp.fit."""
    guide = G.InducingPoint(one, inducing=G.GlobalInducing(3))
    eager, traced = initial(one, guide, X, Y), jax.jit(lambda X: initial(one, guide, X, Y))(X)
    expected = dgp.initial.kmeans(X, 3)
    for params in (eager, traced):
        np.testing.assert_allclose(params["auto_pseudo_inputs"], expected)
        np.testing.assert_allclose(params["g_auto_pseudo_outputs"], 0.3 * expected[:, 0])


def shared(X, y=None):
    f = dgp.gp("f", k.RBF(0.3, 0.9), dgp.Points(Z), outputs=1, mean=dgp.means.IdentityMean())
    g = dgp.gp("g", k.RBF(), dgp.Points(Z))
    with numpyro.plate("data", len(X)):
        h = numpyro.sample("h", f(X))
        m = numpyro.sample("m", f(h))
        numpyro.sample("y", dgp.Likelihood(g(m), lambda v: dist.Normal(v, NOISE)), obs=y)


def scoped(X, y=None):
    with handlers.scope(prefix="a"):
        f = dgp.gp("f", k.RBF(0.3, 0.9), dgp.Points(Z, learn=True), outputs=1)
    with handlers.scope(prefix="b"):
        g = dgp.gp("g", k.RBF(), dgp.Points(Z))
    with numpyro.plate("data", len(X)):
        h = numpyro.sample("h", f(X))
        numpyro.sample("y", dgp.Likelihood(g(h), lambda v: dist.Normal(v, NOISE)), obs=y)


def beside(y, X):
    """Two functions above one layer, one of them hidden; the inputs are not the first argument."""
    f = dgp.gp("f", k.RBF(0.3, 0.9), dgp.Points(Z), outputs=1)
    s = dgp.gp("s", k.RBF(), dgp.Points(Z))
    g = dgp.gp("g", k.RBF(), dgp.Points(Z))
    with numpyro.plate("data", len(X)):
        h = numpyro.sample("h", f(X))
        log_scale = numpyro.sample("log_scale", s(h))
        numpyro.sample("y", dgp.Likelihood(g(h), lambda v: dist.Normal(v, jnp.exp(log_scale))), obs=y)


ROOTS = {"f_auto_root": (1, 5, 5), "g_auto_root": (5, 5)}
KINDS = {
    "shared layer": (shared, {}, ROOTS, {"f"}),
    "scopes": (scoped, {}, {"a/f_auto_root": (1, 5, 5), "b/g_auto_root": (5, 5), "a/f_Z": (4, 1)}, {"a/f"}),
    "rows as arguments": (dgp.minibatch(shared, data=100), {}, ROOTS, {"f"}),
    "inputs named": (beside, {"inducing": G.GlobalInducing(5, inputs="X")}, ROOTS | {"s_auto_root": (5, 5)}, {"f"}),
}


@pytest.mark.parametrize("name", KINDS)
def test_programs_of_other_kinds(name):
    """On shapes: the parameters, and which inducing values are drawn and not integrated."""
    model, options, expected, drawn = KINDS[name]
    guide = G.InducingPoint(model, **({"inducing": G.GlobalInducing(5)} | options))
    params = jax.eval_shape(lambda: initial(model, guide, y=Y, X=X))
    outputs = {n.replace("_root", "_pseudo_outputs"): s[-1:] + s[:-2] for n, s in expected.items() if "root" in n}
    shapes = expected | outputs | {"auto_pseudo_inputs": (5, 1)}
    assert {n: value.shape for n, value in params.items()} == shapes
    found = set()

    def look(params):
        given = handlers.substitute(handlers.seed(guide, 0), data=params)
        sites = handlers.trace(given).get_trace(y=Y, X=X)
        found.update(n for n, site in sites.items() if record_of(site).sample_inducing)

    jax.eval_shape(look, params)
    assert found == drawn


def elsewhere(X, places, y=None):
    g = dgp.gp("g", k.RBF(), dgp.Points(Z))
    with numpyro.plate("places", len(places)):
        numpyro.sample("y", dgp.Likelihood(g(places), lambda v: dist.Normal(v, NOISE)), obs=y)


def test_layers_must_see_the_pseudo_inputs():
    """In the fit the layer sees four places, whatever the pseudo-inputs are, in the call six."""
    guide = G.InducingPoint(elsewhere, inducing=G.GlobalInducing(5))
    params = jax.eval_shape(lambda: initial(elsewhere, guide, X, X[:4], Y[:4]))
    with pytest.raises(ValueError, match=r"expected 4 pseudo-inputs at layer 'g', as in the fit, got 6: .* inputs='X'"):
        jax.eval_shape(lambda given: handlers.seed(handlers.substitute(guide, data=given), 0)(X, X[:6]), params)


@pytest.mark.slow
def test_natural_gradients_are_refused():
    guide = G.InducingPoint(two, inducing=G.GlobalInducing(5))
    svi = SVI(two, guide, dgp.optim.NaturalGradient(guide, 0.1, optax.adam(0.01)), dgp.ELBO())
    with pytest.raises(ValueError, match=r"the guide has none: give the site guides\.Full"):
        jax.eval_shape(lambda: svi.update(svi.init(jax.random.key(0), X, Y), X, Y))


def reversed_layers(X, y=None):
    g = dgp.gp("g", k.RBF(), dgp.Points(Z))
    f = dgp.gp("f", k.RBF(), dgp.Points(Z), outputs=1)
    with numpyro.plate("data", len(X)):
        h = numpyro.sample("h", f(X))
        numpyro.sample("y", dgp.Likelihood(g(h), lambda v: dist.Normal(v, NOISE)), obs=y)


def given_points(X, y=None, Z=None):
    g = dgp.gp("g", k.RBF(), dgp.Points(Z))
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dgp.Likelihood(g(X), lambda v: dist.Normal(v, NOISE)), obs=y)


def projected(X, y=None):
    project = dgp.projection("p", inputs=1, outputs=1)
    g = dgp.gp("g", k.RBF(), dgp.Points(Z))
    with numpyro.plate("data", len(X)):
        z = numpyro.sample("z", project(X))
        numpyro.sample("y", dgp.Likelihood(g(z), lambda v: dist.Normal(v, NOISE)), obs=y)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: G.GlobalInducing(0),
            "GlobalInducing: expected num_inducing to be a positive integer",
        ),
        (
            lambda: G.GlobalInducing(5, scale=-1.0),
            "GlobalInducing: expected scale to be positive, got -1",
        ),
        (
            lambda: initial(two, G.InducingPoint(two, inducing=G.GlobalInducing(5), hidden=G.Full()), X, Y),
            "expected site 'h' to be",
        ),
        (
            lambda: at_shapes(
                two,
                handlers.substitute(
                    G.InducingPoint(two, inducing=G.GlobalInducing(5)), data={"auto_pseudo_inputs": X[:4]}
                ),
                X,
                Y,
            ),
            "expected 5 pseudo-inputs at layer 'f', got 4 of 'auto_pseudo_inputs', which all layers",
        ),
        (
            lambda: at_shapes(reversed_layers, G.InducingPoint(reversed_layers, inducing=G.GlobalInducing(5)), X, Y),
            "layers opened in the order in which values go through them, got 'g' before .'f'., .*: move its dgp.gp",
        ),
        (
            lambda: at_shapes(one, G.InducingPoint(one, inducing=G.GlobalInducing(5, inputs="x")), X, Y),
            "expected one row per datum in argument 'x' of the model, got NoneType: the arguments are .'X', 'y'.",
        ),
        (
            lambda: at_shapes(given_points, G.InducingPoint(given_points, inducing=G.GlobalInducing(5)), X, Y, X),
            r"expected layer 'g' with inducing values of shape \(9,\) at any rows, got \(5,\) at 5 rows: arguments",
        ),
        (
            lambda: at_shapes(projected, G.InducingPoint(projected, inducing=G.GlobalInducing(5)), X, Y),
            "expected layer 'p' to be a function with features .*, got Projection: give it sites={'p': guides.Full",
        ),
        (
            lambda: initial(one, G.InducingPoint(one, inducing=G.GlobalInducing(20)), X, Y),
            "expected num_inducing of at most 9, the distinct rows of the inputs, got 20",
        ),
    ],
)
def test_wrong_calls_say_what_to_do(call, message):
    with pytest.raises(ValueError, match=message):
        call()
