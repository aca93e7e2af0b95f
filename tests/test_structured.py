"""Hidden layers that keep dependencies: bounds equal to NumPyro's own, families that contain each other."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro import handlers
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal
from numpyro.infer.util import log_density
from programs import X, Y, Z, agree, bound, draws_of_bound, random_params

import numpyro_dgp as dgp
from numpyro_dgp import guides as G
from numpyro_dgp import kernels as k


def deep(X, y=None, batch=None):
    """Three layers, two outputs each, process noise."""
    f = dgp.gp("f", k.RBF(0.5, 0.9), dgp.Points(Z), outputs=2, mean=dgp.means.LinearMean(jnp.array([[1.0, 0.5]])))
    e = dgp.gp("e", [k.Matern52(0.5, 1.2)] * 2, dgp.Points(jnp.hstack([Z, Z**2 - 1])), outputs=2)
    g = dgp.gp("g", k.RBF(1.1, 0.9), dgp.Points(jnp.hstack([Z, jnp.cos(3 * Z)])))
    with numpyro.plate("data", len(X), subsample_size=batch) as i:
        h = numpyro.sample("h", f(X[i], noise=0.3))
        m = numpyro.sample("m", e(h, noise=0.3))
        mean = dgp.Likelihood(g(m), lambda v: dist.StudentT(4.0, v, 0.3))
        numpyro.sample("y", mean, obs=None if y is None else y[i])


def scalar(X, y=None):
    f = dgp.gp("f", k.RBF(0.5, 0.9), dgp.Points(Z), mean=dgp.means.IdentityMean())
    g = dgp.gp("g", k.RBF(1.1, 0.9), dgp.Points(Z))
    with numpyro.plate("data", len(X)):
        h = numpyro.sample("h", f(X, noise=0.3))
        numpyro.sample("y", dgp.Likelihood(g(h[:, None]), lambda v: dist.Normal(v, 0.3)), obs=y)


def amortised(x):
    slope = numpyro.param(f"network{x.shape[-1]}", 0.1 * jnp.ones((x.shape[-1], 2, 8)))
    return jnp.tensordot(jnp.tanh(x), slope, 1)


RULES = {
    "model": G.GivenInducing(),
    "free": G.GivenInducing("free"),
    "low rank": G.GivenInducing(3),
    "amortised": G.GivenInducing(amortised, scale=0.2),
    "joint": G.JointOutputs(),
    "joint low rank": G.JointOutputs(4),
    "below": G.GivenBelow(),
}


def moved(model, guide, *args, **kwargs):
    """Initial parameters, away from the special start, factors kept triangular."""
    params = random_params(model, guide, *args, scale=0.2, **kwargs)
    for name in params:
        if name.endswith("_scale_tril"):
            params[name] = jnp.tril(params[name]) * 0.5
        if name.endswith(("_weights", "_slopes", "_shift")):
            params[name] = params[name] + 0.1 * jax.random.normal(jax.random.key(len(name)), params[name].shape)
    return params


@pytest.mark.long
@pytest.mark.parametrize("belief", [G.Full(), G.Diagonal()])
@pytest.mark.parametrize("name", RULES)
def test_same_bound_as_with_drawn_inducing_values(name, belief):
    """Integrating v out, with the gap between the two means, against NumPyro's objective, which draws v."""
    guide = G.InducingPoint(deep, sites={"h": RULES[name], "m": RULES[name]}, inducing=belief)
    params = moved(deep, guide, X, Y)
    ours = draws_of_bound(dgp.ELBO(), params, deep, guide, X, Y, num=1500)
    stock = draws_of_bound(Trace_ELBO(), params, deep, guide, X, Y, num=6000)
    assert agree(ours, stock)
    assert ours.std() < stock.std()


@pytest.mark.parametrize("weights", ["model", *(pytest.param(w, marks=pytest.mark.long) for w in ("free", 3))])
@pytest.mark.long
def test_scalar_functions(weights):
    guide = G.InducingPoint(scalar, sites={"h": G.GivenInducing(weights)})
    params = moved(scalar, guide, X, Y)
    ours = draws_of_bound(dgp.ELBO(), params, scalar, guide, X, Y)
    assert agree(ours, draws_of_bound(Trace_ELBO(), params, scalar, guide, X, Y, num=6000))
    below = G.InducingPoint(scalar, sites={"h": G.GivenBelow(slopes=jnp.ones(1))})
    params = moved(scalar, below, X, Y)
    ours = draws_of_bound(dgp.ELBO(), params, scalar, below, X, Y)
    assert agree(ours, draws_of_bound(Trace_ELBO(), params, scalar, below, X, Y, num=6000))


def evaluate(guide, params, key=0, model=deep):
    return bound(dgp.ELBO(3), params, model, guide, X, Y, key=jax.random.key(key))


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (G.GivenInducing(lambda x: jnp.ones((len(x), 8, 2))), r"weights \(30, 2, 8\).*got \(30, 8, 2\)"),
        (G.GivenInducing(lambda x: jnp.ones((2, len(x), 8))), r"weights \(30, 2, 8\).*got \(2, 30, 8\)"),
        (G.JointOutputs(lambda x: jnp.ones((len(x), 2, 8, 2))), r"weights \(30, 2, 2, 8\).*got \(30, 2, 8, 2\)"),
        (G.GivenBelow(slopes=jnp.ones((2, 1))), r"slopes at 'h' of shape \(1, 2\).*got \(2, 1\)"),
        (G.GivenBelow(slopes=jnp.ones(2)), r"slopes at 'h' of shape \(1, 2\).*got \(2,\)"),
    ],
)
def test_transposed_weights_and_slopes_are_errors(rule, message):
    with pytest.raises(ValueError, match=message), handlers.seed(rng_seed=0):
        G.InducingPoint(deep, sites={"h": rule})(X, Y)


@pytest.mark.slow
@pytest.mark.parametrize("rule", [G.GivenInducing("free"), G.GivenInducing(3), G.JointOutputs()], ids=str)
def test_several_values_of_each_row(rule):
    """A second plate around the rows: the bound is that of the rows written out."""

    def program(X, y, shape):
        f = dgp.gp("f", k.RBF(0.5, 0.9), dgp.Points(Z), outputs=2)
        with numpyro.plate_stack("data", shape):
            h = numpyro.sample("h", f(X, noise=0.3))
            numpyro.sample("y", dist.Normal(h, 0.3).to_event(1), obs=y)

    guides = [
        G.InducingPoint(lambda X, y, shape=shape: program(X, y, shape), sites={"h": rule}) for shape in ((3, 4), (12,))
    ]
    y = jnp.array(np.random.default_rng(0).normal(size=(3, 4, 2)))
    params = moved(guides[0].model, guides[0], X[:4], y)
    flat = {n: v.reshape(12, *v.shape[2:]) if n[0] == "h" and "basis" not in n else v for n, v in params.items()}
    rows = jnp.tile(X[:4], (3, 1)), y.reshape(12, 2)
    draws = [
        draws_of_bound(dgp.ELBO(), p, guide.model, guide, *args)
        for p, guide, args in zip((params, flat), guides, ((X[:4], y), rows), strict=True)
    ]
    assert agree(*draws)


@pytest.mark.long
def test_medians_are_not_those_given_a_draw():
    """Of layers that follow drawn values there are none; those over all draws are in ``sample_posterior``."""

    def program(X, y=None):
        scale = numpyro.sample("scale", dist.LogNormal(0.0, 1.0))
        f = dgp.gp("f", k.RBF(0.5, 0.9), dgp.Points(Z), outputs=2)
        g = dgp.gp("g", k.RBF(1.1, scale), dgp.Points(jnp.hstack([Z, jnp.cos(3 * Z)])))
        with numpyro.plate("data", len(X)):
            h = numpyro.sample("h", f(X, noise=0.3))
            m = numpyro.sample("m", g(h, noise=0.3))
            numpyro.sample("y", dist.Normal(m, 0.3), obs=y)

    guide = G.MeanField(program, sites={"m": G.GivenBelow()}, other=G.Normal())
    params = random_params(program, guide, X, Y)
    assert sorted(guide.median(params, X, Y)) == ["f", "g", "h", "scale"]
    for inducing, expected in ((G.Full(), ["f", "g", "h", "m", "scale"]), (G.FullJoint(), ["f", "g", "m", "scale"])):
        guide = G.InducingPoint(
            program, sites={"f": inducing, "h": G.GivenInducing("free"), "m": G.Normal()}, other=G.Normal()
        )
        params = random_params(program, guide, X, Y)
        assert sorted(guide.median(params, X, Y)) == expected


@pytest.mark.long
def test_zero_weights_are_mean_field():
    """Every family contains mean field, draw by draw."""
    plain = G.InducingPoint(deep, sites={"h": G.Normal(), "m": G.Normal()})
    params = random_params(deep, plain, X, Y, scale=0.2)
    value = evaluate(plain, params)
    for rule in (G.GivenInducing("free"), G.GivenInducing(3), G.GivenBelow(), G.JointOutputs()):
        guide = G.InducingPoint(deep, sites={"h": rule, "m": rule})
        same = random_params(deep, guide, X, Y, scale=0.0)
        for site in "hm":
            same[f"{site}_auto_shift"] = params[f"{site}_auto_loc"]
            scale = params[f"{site}_auto_scale"]
            if isinstance(rule, G.JointOutputs):
                same[f"{site}_auto_scale_tril"] = scale[..., None] * jnp.eye(2)
            else:
                same[f"{site}_auto_scale"] = scale
        same |= {n: params[n] for n in params if n[0] in "feg"}
        np.testing.assert_allclose(evaluate(guide, same), value, rtol=1e-9)


@pytest.mark.long
def test_dependencies_between_inducing_values_alone_change_nothing():
    """Chamberlin (2016), section 4.5: no term of the density joins the v of two layers when h is known, so that for
    any q(h) without v the optimal joint q(v) is a product, and every correlation costs its mutual information."""
    h = jax.random.normal(jax.random.key(0), (5, len(X)))

    def expected(v):  # of the log density given v, under a q(h) of five points
        value = lambda h: log_density(scalar, (X, Y), {}, {"f": v[:8], "g": v[8:], "h": h})[0]  # noqa: E731
        return jax.vmap(value)(h).mean()

    precision = -jax.hessian(expected)(jnp.zeros(16))
    assert abs(precision[:8, 8:]).max() == 0
    S = jnp.linalg.inv(precision)
    mean = S @ jax.grad(expected)(jnp.zeros(16))

    def bound(S):
        return expected(mean) - 0.5 * jnp.trace(precision @ S) + 0.5 * jnp.linalg.slogdet(S)[1]

    correlated = S.at[:8, 8:].add(0.3 * jnp.linalg.cholesky(S[:8, :8]) @ jnp.linalg.cholesky(S[8:, 8:]).T)
    correlated = jnp.triu(correlated) + jnp.triu(correlated, 1).T
    np.testing.assert_allclose(bound(S) - bound(correlated), -0.5 * 8 * jnp.log(1 - 0.3**2), rtol=1e-8)


@pytest.mark.long
def test_the_start_of_model_weights_is_propagation():
    guide, plain = G.InducingPoint(deep, sites={"h": G.GivenInducing(), "m": G.GivenInducing()}), G.InducingPoint(deep)
    params = random_params(deep, plain, X, Y)
    svi = SVI(deep, guide, optax.sgd(0.0), dgp.ELBO())
    start = svi.get_params(svi.init(jax.random.key(0), X, Y))
    np.testing.assert_allclose(evaluate(guide, start | params), evaluate(plain, params), rtol=1e-10)


@pytest.mark.long
def test_joint_outputs_with_block_diagonal_weights_are_factorised():
    """Weights that couple no outputs give the bound of outputs one by one."""
    free, joint = (G.InducingPoint(deep, sites={s: rule for s in "hm"}) for rule in (RULES["free"], RULES["joint"]))
    params = moved(deep, free, X, Y)
    blocks = {n: v for n, v in params.items() if n[0] in "feg" or n.endswith("_shift")}
    for site in "hm":
        blocks[f"{site}_auto_weights"] = jnp.eye(2)[:, :, None] * params[f"{site}_auto_weights"][:, :, None]
        blocks[f"{site}_auto_scale_tril"] = params[f"{site}_auto_scale"][..., None] * jnp.eye(2)
    np.testing.assert_allclose(evaluate(joint, blocks), evaluate(free, params), rtol=1e-8)


@pytest.mark.long
@pytest.mark.parametrize("name", ["model", "free", "joint", "below"])
def test_training_on_from_mean_field_gains(name):
    """Never worse at the optimum: here from the optimum of mean field, on draws not used in training."""
    plain = G.InducingPoint(deep, sites={"h": G.Normal(), "m": G.Normal()})
    svi = SVI(deep, plain, optax.adam(0.02), dgp.ELBO())
    base = svi.run(jax.random.key(0), 1200, X, Y, progress_bar=False).params
    rule = RULES[name]
    guide = G.InducingPoint(deep, sites={"h": rule, "m": rule})
    start = {n: v for n, v in base.items() if n[0] in "feg"}
    if name != "model":
        for s in "hm":
            start[f"{s}_auto_shift"] = base[f"{s}_auto_loc"]
            scale = base[f"{s}_auto_scale"]
            diagonal = scale[..., None] * jnp.eye(2)
            start |= {f"{s}_auto_scale_tril": diagonal} if name == "joint" else {f"{s}_auto_scale": scale}
    svi = SVI(deep, guide, optax.adam(0.02), dgp.ELBO())
    found = svi.run(jax.random.key(1), 600, X, Y, init_params=start, progress_bar=False).params
    before = draws_of_bound(dgp.ELBO(), base, deep, plain, X, Y, num=500)
    after = draws_of_bound(dgp.ELBO(), found, deep, guide, X, Y, num=500)
    error = np.sqrt((before.var() + after.var()) / 500)
    # The first hidden layer has no other layer below it, so that slopes along the data add little.
    assert after.mean() > before.mean() + (-3 * error if name == "below" else 1.0)


@pytest.mark.long
@pytest.mark.parametrize("name", RULES)
def test_minibatches_and_predictions(name):
    guide = G.InducingPoint(deep, sites={"h": RULES[name], "m": RULES[name]})
    svi = SVI(deep, guide, optax.adam(0.01), dgp.ELBO(2))
    result = svi.run(jax.random.key(0), 20, X, Y, 10, progress_bar=False)
    assert np.isfinite(result.losses).all()
    per_datum = [n for n in result.params if n.split("_")[0] in ("h", "m") and not n.endswith("basis")]
    assert all(result.params[n].shape[0] == 30 for n in per_datum)
    predicted = dgp.Posterior(deep, guide, result.params).using(num_samples=3).predict(jax.random.key(1), X[:4])
    assert predicted.mean.shape == (4,)
    rows = jnp.array([3, 20, 7])
    with (
        handlers.seed(rng_seed=0),
        handlers.substitute(data={**result.params, "data": rows}),
        handlers.trace() as sites,
    ):
        guide(X, Y, 3)
    assert sites["m"]["fn"].batch_shape == (3,)


@pytest.mark.long
def test_partition_of_the_data_gives_the_bound_of_all_of_it():
    """Averages over minibatches, with noise belonging to the data."""
    for name in ("free", "joint", "model"):
        guide = G.InducingPoint(deep, sites={"h": RULES[name], "m": RULES[name]})
        params = moved(deep, guide, X, Y)
        whole = draws_of_bound(dgp.ELBO(), params, deep, guide, X, Y, num=1500)
        parts = draws_of_bound(dgp.ELBO(), params, deep, guide, X, Y, 10, num=4000)
        assert agree(whole, parts)


@pytest.mark.long
def test_beside_an_autoguide_for_hyperparameters():
    def model(X, y=None):
        ls = numpyro.sample("ls", dist.LogNormal(0.0, 0.3))
        f = dgp.gp("f", k.RBF(0.5, ls), dgp.Points(Z), outputs=1, mean=dgp.means.IdentityMean())
        g = dgp.gp("g", k.RBF(), dgp.Points(Z))
        with numpyro.plate("data", len(X)):
            h = numpyro.sample("h", f(X, noise=0.3))
            numpyro.sample("y", dgp.Likelihood(g(h), lambda v: dist.Normal(v, 0.3)), obs=y)

    guide = G.InducingPoint(model, sites={"h": G.GivenInducing("free")}, other=AutoNormal)
    svi = SVI(model, guide, optax.adam(0.02), dgp.ELBO())
    params = svi.run(jax.random.key(0), 50, X, Y, progress_bar=False).params
    ours = draws_of_bound(dgp.ELBO(), params, model, guide, X, Y)
    assert agree(ours, draws_of_bound(Trace_ELBO(), params, model, guide, X, Y, num=6000))


@pytest.mark.long
def test_single_precision(x32):
    points, x, y = (np.asarray(a, np.float32) for a in (Z, X, Y))

    def model(X, y=None):
        f = dgp.gp("f", k.RBF(), dgp.Points(points), outputs=2, mean=dgp.means.LinearMean(np.ones((1, 2), np.float32)))
        g = dgp.gp("g", k.RBF(), dgp.Points(np.hstack([points, points])))
        with numpyro.plate("data", len(X)):
            h = numpyro.sample("h", f(X, noise=0.3))
            numpyro.sample("y", dgp.Likelihood(g(h), lambda v: dist.Normal(v, 0.3)), obs=y)

    for name in ("model", "free", "low rank", "joint", "below"):
        guide = G.InducingPoint(model, sites={"h": RULES[name]})
        result = SVI(model, guide, optax.adam(0.01), dgp.ELBO()).run(jax.random.key(0), 5, x, y, progress_bar=False)
        assert result.losses.dtype == jnp.float32
        assert np.isfinite(result.losses).all()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: G.GivenInducing("tied"), 'expected weights "free", "model", a positive rank or a function'),
        (lambda: G.GivenInducing(0), "a positive rank or a function of the inputs, got 0"),
        (lambda: G.GivenInducing(scale=-1.0), "GivenInducing: expected scale to be positive"),
        (lambda: G.JointOutputs("model"), "use GivenInducing"),
        (lambda: G.JointOutputs(scale=0.0), "JointOutputs: expected scale to be positive"),
        (lambda: G.GivenBelow(scale=0.0), "GivenBelow: expected scale to be positive"),
    ],
)
def test_bad_rules(build, message):
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize(
    ("sites", "message"),
    [
        ({"f": G.GivenInducing()}, "expected site 'f' to be the values of a hidden layer"),
        ({"f": G.GivenBelow()}, "expected site 'f' to be the values of a hidden layer"),
        ({"h": G.JointOutputs()}, "expected several outputs at 'h', got a scalar function"),
    ],
)
def test_bad_sites(sites, message):
    with pytest.raises(ValueError, match=message):
        SVI(scalar, G.InducingPoint(scalar, sites=sites), optax.sgd(0.0), dgp.ELBO()).init(jax.random.key(0), X, Y)
