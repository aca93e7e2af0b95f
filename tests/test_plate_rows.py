"""Every row counts once: what broadcasting or an index beyond the end of an array would repeat is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from numpyro.infer import MCMC, NUTS, Predictive, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal
from numpyro.infer.util import log_density
from programs import NOISE, X, Y, Z, bayesian, deep, explicit, shallow

import numpyro_dgp as dgp
from numpyro_dgp.analysis.program import inspect_program

N, KEY = len(X), jax.random.key(0)
POINTS = dgp.Points(Z)


def layer(outputs=None, name="f"):
    return dgp.gp(name, dgp.kernels.RBF(), POINTS, outputs=outputs)


def normal(v, scale=NOISE):
    return dist.Normal(v, scale)


def integrated(outputs, conditional):
    def model(X, y=None):
        f = layer(outputs)
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dgp.Likelihood(f(X), conditional), obs=y)

    return model


def drawn(outputs, conditional):
    def model(X, y=None):
        f = layer(outputs)
        with numpyro.plate("data", len(X)):
            v = numpyro.sample("v", f(X))
            numpyro.sample("y", conditional(v), obs=y)

    return model


def plate(size, batch=None, x=lambda X, i: X[i], y=lambda y, i: y[i]):
    """A program with another plate than its rows."""
    pick_x, pick_y = x, y

    def model(X, y=None):
        f = layer()
        with numpyro.plate("data", size, subsample_size=batch) as i:
            numpyro.sample("y", dgp.Likelihood(f(pick_x(X, i)), normal), obs=pick_y(y, i))

    return model


def under(handler, outputs=None):
    """A program with a handler around its observations."""

    def model(X, y=None):
        f = layer(outputs)
        with numpyro.plate("data", len(X)), handler:
            numpyro.sample("y", dgp.Likelihood(f(X), normal), obs=y)

    return model


def as_is(a, i):
    return a


COLUMN, TWICE = Y[:, None], "expected one log density for every observation, got .30, 30. log densities"
SHORT = r"expected arrays with a row for every index below its size"
WRONG = {
    "a column without to_event": (integrated(1, normal), X, COLUMN, TWICE),
    "a column of noise": (integrated(None, lambda v: normal(v, jnp.full((N, 1), NOISE))), X, Y, TWICE),
    "a column of y": (integrated(None, normal), X, COLUMN, r"observations y of shape \(30,\), got \(30, 1\)"),
    "a drawn function and a column of y": (drawn(None, normal), X, COLUMN, TWICE),
    "a drawn column and y": (drawn(1, normal), X, Y, TWICE),
    "a drawn column and a column of y": (drawn(1, normal), X, COLUMN, TWICE),
    "a drawn column, to_event, y": (drawn(1, lambda v: normal(v).to_event(1)), X, Y, r"event shape \(1,\)"),
    "a drawn function and a column of noise": (drawn(None, lambda v: normal(v, jnp.ones((N, 1)))), X, Y, TWICE),
    "a row of y": (drawn(None, normal), X, Y[None, :1], "for .30, 30. rows|expected observations for"),
    "one observation": (drawn(None, normal), X, Y[:1], r"expected observations for \(30,\) rows, got one row"),
    "a column of a mask": (under(handlers.mask(mask=jnp.ones((N, 1), bool))), X, Y, TWICE),
    "a column of weights": (
        under(handlers.scale(scale=jnp.ones((N, 1)))),
        X,
        Y,
        r"expected weights .*got \(30, 1\)",
    ),
    "a plate longer than the data": (plate(60), X, Y, f"plate 'data': {SHORT} 60, got one of shape .30, 1."),
    "a minibatch of more rows than there are": (plate(60, 5), X, Y, f"{SHORT} 60"),
    "y shorter than X": (plate(N, 5), X, Y[:20], rf"{SHORT} 30, got one of shape \(20,\) indexed along axis 0"),
    "y shorter than X, all rows": (plate(N), X, Y[:20], rf"{SHORT} 30, got one of shape \(20,\)"),
    "y shorter, taken": (plate(N, y=lambda y, i: jnp.take(y, i)), X, Y[:20], rf"{SHORT} 30, got one of shape \(20,\)"),
    "a column of a short y": (plate(N, y=lambda y, i: y[i, 0]), X, COLUMN[:20], rf"{SHORT} 30, got .* \(20, 1\)"),
    "not indexed, one row": (
        plate(N, 1, as_is, as_is),
        X,
        Y,
        r"expected 1 row.* as many .* 'data' has, got .*30.*use X\[i\] and y\[i\]",
    ),
    "a plate of one row": (
        plate(1, None, as_is, as_is),
        X,
        Y,
        "expected 1 row.* as many as plate 'data' has, got .*30",
    ),
    "not indexed": (plate(N, 5, as_is, as_is), X, Y, r"expected 5 rows.* as many .* got .*30.*use X\[i\] and y\[i\]"),
    "y not indexed": (plate(N, 5, y=as_is), X, Y[:5], "5 of 30, got observations that are not indexed"),
    "X not indexed": (plate(N, 5, x=as_is), X[:5], Y, "5 of 30, got inputs that are not indexed"),
}


@pytest.mark.filterwarnings("ignore:Likelihood. Normal has batch shape")
@pytest.mark.parametrize("name", WRONG)
def test_rows_that_count_several_times_are_refused(name):
    model, x, y, match = WRONG[name]
    with pytest.raises(ValueError, match=match):
        inspect_program(model, (x, y), {})


def outputs(X, y):
    f = layer(3)
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dgp.Likelihood(f(X), lambda v: normal(v).to_event(1)), obs=y)


def nested(X, y):
    f = layer()
    with numpyro.plate("tasks", 3, dim=-2), numpyro.plate("data", len(X), dim=-1):
        numpyro.sample("y", dgp.Likelihood(f(X), normal), obs=y)


def repeats(X, y):
    """Several observations at each input, each of which has a noise of its own."""
    f = layer()
    with numpyro.plate("data", len(X), dim=-2) as i, numpyro.plate("repeats", 4, dim=-1):
        v = numpyro.sample("v", f(X[i][:, None]))
        numpyro.sample("y", normal(v, jnp.ones((N, 1))), obs=y)


def ensemble(X, y):
    """Five functions that see the same y."""
    with numpyro.plate("members", 5, dim=-2):
        offset = numpyro.sample("offset", dist.Normal())
    f = layer()
    with numpyro.plate("data", len(X), dim=-1):
        v = numpyro.sample("v", f(X))
        with numpyro.plate("members", 5, dim=-2):
            numpyro.sample("y", normal(v + offset), obs=y)


def without_plates(X, y):
    f = layer()
    numpyro.sample("y", dgp.Likelihood(f(X), normal), obs=y)


def columns_without_plates(X, y):
    f = layer(3)
    numpyro.sample("y", dgp.Likelihood(f(X), normal), obs=y)


def exact(X, y):
    f = dgp.gp("f", dgp.kernels.RBF(), None)
    numpyro.sample("y", f(X, noise=0.1), obs=y)


def left(X, y):
    """Observations of one function with an axis outside of all plates."""
    f = layer()
    with numpyro.plate("data", len(X)):
        v = numpyro.sample("v", f(X))
        numpyro.sample("y", normal(v), obs=y)


def constant(X, y):
    f = layer()
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dgp.Likelihood(f(X), normal), obs=y)
        v = numpyro.sample("v", f(X + 5))
        numpyro.sample("zero", normal(v), obs=0.0)
        numpyro.factor("penalty", -(v**2))
        numpyro.factor("number", -1.0)


def groups(X, y):
    """Values per group, and half as many rows by i // 2."""
    f, g = layer(1), layer(name="g")
    with numpyro.plate("groups", 7):
        h = numpyro.sample("h", f(X[:7]))
    with numpyro.plate("data", len(X)) as i:
        numpyro.sample("y", dgp.Likelihood(g(h[i % 7] + X[:15][i // 2]), normal), obs=y[i])


def series(X, y):
    """A minibatch of series, all seen at the same times."""
    f = layer()
    with numpyro.plate("series", 6, subsample_size=2, dim=-2) as i, numpyro.plate("times", len(X), dim=-1):
        numpyro.sample("y", dgp.Likelihood(f(X), normal), obs=y[i])


def batches(X, y):
    """The rows of a batch come as arguments: nothing is indexed."""
    f = layer()
    with numpyro.plate("data", 1000, subsample_size=len(X)):
        numpyro.sample("y", dgp.Likelihood(f(X), normal), obs=y)


def only_latents(X, y):
    f = dgp.gp("f", dgp.kernels.RBF(), POINTS, outputs=1)
    with numpyro.plate("data", len(y), subsample_size=5) as i:
        w = dgp.latent("w", None, 1)
        numpyro.sample("y", dgp.Likelihood(f(w), lambda v: normal(v).to_event(1)), obs=y[i][:, None])


def classes(X, y):
    f = layer(3)
    with numpyro.plate("data", len(X), subsample_size=5) as i:
        numpyro.sample("y", dgp.Likelihood(f(X[i]), lambda v: dgp.likelihoods.RobustMax(v)), obs=y[i])


def masked(X, y):
    f = layer()
    with numpyro.plate("data", len(X)), handlers.mask(mask=jnp.arange(len(X)) > 3), handlers.scale(scale=2.0):
        numpyro.sample("y", dgp.Likelihood(f(X), normal), obs=y)


def scoped(X, y):
    with handlers.scope(prefix="a"):
        shallow(X, y, 5)


THREE = jnp.stack([Y, Y, Y])
RIGHT = {
    "outputs": (outputs, X, THREE.T),
    "nested plates": (nested, X, THREE),
    "nested plates, one y": (nested, X, Y),
    "repeats": (repeats, X, jnp.ones((N, 4))),
    "ensemble": (ensemble, X, Y),
    "no plates": (without_plates, X, Y),
    "no plates, columns": (columns_without_plates, X, THREE.T),
    "exact": (exact, X, Y),
    "an axis to the left": (left, X, THREE),
    "constants": (constant, X, Y),
    "groups": (groups, X, Y),
    "series": (series, X, jnp.ones((6, N))),
    "batches": (batches, X, Y),
    "latents only": (only_latents, X, Y),
    "classes": (classes, X, jnp.zeros(N, int)),
    "masks and scales": (masked, X, Y),
    "a scope": (scoped, X, Y),
    "one row": (plate(1), X[:1], Y[:1]),
    "one row of many": (plate(N, 1), X, Y),
    "one row, a column": (drawn(1, lambda v: normal(v).to_event(1)), X[:1], COLUMN[:1]),
    "more rows than the plate": (plate(20), X, Y),
    "no observations": (shallow, X, None),
    "shallow": (shallow, X, Y),
    "deep": (deep, X, Y),
    "explicit": (explicit, X, Y),
    "bayesian": (bayesian, X, Y),
    "minibatch": (dgp.minibatch(shallow, data=1000), X, Y),
}


@pytest.mark.parametrize("name", RIGHT)
def test_rows_that_count_once_pass(name):
    model, x, y = RIGHT[name]
    inspect_program(model, (x, y), {})


@pytest.mark.slow
@pytest.mark.parametrize("num_samples", [5, N])
def test_several_values_of_a_latent_pass(num_samples):
    def model(X, y):
        f = dgp.gp("f", dgp.kernels.RBF(), dgp.Points(jnp.hstack([Z, Z])))
        with numpyro.plate("data", len(X)):
            x = dgp.latent("w", X, 1)
            numpyro.sample("y", dgp.Likelihood(f(x), normal), obs=y)

    guide = dgp.guides.ImportanceWeighted(model, num_samples=num_samples)
    with handlers.seed(rng_seed=0), handlers.trace() as sites:
        guide(X, Y)
    params = {name: site["value"] for name, site in sites.items() if site["type"] == "param"}
    loss = jax.eval_shape(lambda: dgp.ELBO().loss(jax.random.key(0), params, model, guide, X, Y))
    assert loss.shape == ()


@pytest.mark.filterwarnings("ignore:Missing a plate statement")
@pytest.mark.parametrize("guide", [AutoNormal, dgp.guides.InducingPoint])
def test_the_bound_refuses_them_with_every_guide(guide):
    model = drawn(1, normal)
    loss = lambda: dgp.ELBO().loss(jax.random.key(0), {}, model, guide(model), X, Y)  # noqa: E731
    with pytest.raises(ValueError, match=TWICE), handlers.seed(rng_seed=0):
        jax.eval_shape(loss)


def test_programs_for_chains_refuse_them():
    with pytest.raises(ValueError, match=TWICE), handlers.seed(rng_seed=0):
        dgp.for_mcmc(drawn(None, normal))(X, COLUMN)
    mcmc = MCMC(NUTS(dgp.for_mcmc(plate(60))), num_warmup=1, num_samples=1, progress_bar=False)
    with pytest.raises(ValueError, match=SHORT):
        mcmc.run(jax.random.key(0), X, Y)


def test_numpy_arrays_in_a_chain_without_an_index():
    with handlers.seed(rng_seed=0):
        dgp.for_mcmc(integrated(None, normal))(np.asarray(X), np.asarray(Y))
        dgp.for_mcmc(shallow)(np.asarray(X), np.asarray(Y))


K = dgp.kernels.Matern32(1.0, 0.4)
TIMES = jnp.linspace(0.0, 1.0, N)
FEW = 4


def together(open_function, joint=False, **options):
    """Opens a function, and returns what makes its values at four rows."""
    f = open_function()
    return lambda: (f.joint if joint else f)(X[:FEW], **options)


def exact_layer(outputs=None):
    return dgp.gp("f", K, None, outputs=outputs)


RING = dgp.rings.regular(np.arange(float(FEW)), margin=4.0)
TOGETHER = {
    "an exact process": lambda: together(exact_layer, noise=NOISE),
    "an exact process, outputs": lambda: together(lambda: exact_layer(2), noise=NOISE),
    "a batch of one": lambda: lambda: exact_layer()(X[None, :FEW], noise=NOISE),
    "a mask": lambda: lambda: exact_layer()(X[:FEW], noise=NOISE).mask(True),
    "joint values": lambda: together(layer, joint=True, noise=NOISE),
    "joint values, outputs": lambda: together(lambda: layer(2), joint=True),
    "a grid": lambda: together(lambda: dgp.gp("f", K, dgp.Grid(-3.0, 3.0, 16)), joint=True),
    "a basis": lambda: together(lambda: dgp.gp("f", K, dgp.Basis(-2.0, 2.0, 16)), joint=True, noise=NOISE),
    "neighbours": lambda: together(lambda: dgp.gp("f", K, dgp.Neighbours(X[:FEW], 2)), noise=NOISE),
    "conditioned": lambda: together(lambda: exact_layer().condition(X[:3], Y[:3]), joint=True),
    "a state space": lambda: lambda: dgp.functions.StateSpaceNormal(K, X[:FEW], noise=NOISE),
    "a ring": lambda: lambda: dgp.rings.RingNormal(K, RING[0], NOISE, RING[1]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TOGETHER)
def test_values_drawn_together_are_refused_in_a_plate_of_their_rows(name):
    """Log densities of the plate would be N times that of the one draw."""

    def model(y=None, before=False, batch=None):
        values = TOGETHER[name]()
        fn = values() if before else None
        with numpyro.plate("data", 2 * FEW if batch else FEW, subsample_size=batch):
            numpyro.sample("y", values() if fn is None else fn, obs=y)

    y = jnp.zeros((FEW, 2) if "outputs" in name else FEW)
    match = rf"{FEW} rows in plate 'data', which would count all {FEW} times: write the site before"
    for given in [(y,), (None,), (y, True), (y, False, FEW)]:
        with pytest.raises(ValueError, match=match), handlers.seed(rng_seed=0):
            handlers.trace(model).get_trace(*given)


def test_every_path_refuses_values_drawn_together():
    def model(X, y=None):
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dgp.gp("f", K, None)(X, noise=NOISE), obs=y)

    chain = lambda program: MCMC(NUTS(program), num_warmup=1, num_samples=1).run(KEY, X, Y)  # noqa: E731
    paths = [
        lambda: dgp.ELBO().loss(KEY, {}, model, dgp.guides.InducingPoint(model), X, Y),
        lambda: Trace_ELBO().loss(KEY, {}, model, lambda X, y: None, X, Y),
        lambda: chain(model),
        lambda: chain(dgp.for_mcmc(model)),
        lambda: log_density(model, (X, Y), {}, {}),
        lambda: Predictive(model, num_samples=2)(KEY, X),
        lambda: dgp.Posterior(model, samples={"s": jnp.zeros(1)}).predict(KEY, X),
    ]
    for path in paths:
        with pytest.raises(ValueError, match="before the plate"):
            path()


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 3, FEW])
def test_groups_of_values_drawn_together_count_once(count):
    """Independent groups in a plate: the sum of their evidences, also where they are as many as rows."""
    x, y = X[:FEW], jnp.cos(jnp.arange(count * FEW)).reshape(count, FEW)
    K_y = np.asarray(K.gram(x)) + NOISE**2 * np.eye(FEW)
    evidence = -0.5 * (np.sum(y.T * np.linalg.solve(K_y, y.T)) + count * np.linalg.slogdet(2 * np.pi * K_y)[1])

    def model(fn):
        with numpyro.plate("groups", count):
            numpyro.sample("y", fn, obs=y)

    values = exact_layer()(x, noise=NOISE)
    same = [values] if count != FEW else [values.expand([count])]
    for fn in [*same, exact_layer()(jnp.broadcast_to(x, (count, *x.shape)), noise=NOISE)]:
        np.testing.assert_allclose(log_density(model, (fn,), {}, {})[0], evidence, rtol=1e-5)


@pytest.mark.slow
def test_a_normal_of_all_rows_is_refused_in_their_plate():
    def model(X, y):
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dist.MultivariateNormal(jnp.zeros(N), jnp.eye(N)), obs=y)

    with pytest.raises(ValueError, match="in front of plate 'data' of these rows"):
        inspect_program(model, (X, Y), {})
