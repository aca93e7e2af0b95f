"""One compiled program for every fit of a model and guide and for many numbers of rows."""

import gc
import pickle
import weakref
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from programs import X, Y, Z, bayesian, deep, explicit, random_params, shallow
from sizes import mostly_long

import numpyro_dgp as dgp
from numpyro_dgp import _compiled as compiled
from numpyro_dgp.jaxprs.row_by_row import row_axes
from numpyro_dgp.predict import predictor
from numpyro_dgp.predict.predictor import round_up

NEW = jnp.linspace(-2.5, 2.5, 30)[:, None]


def compilations(caplog):
    """What was said of compilations of predictions."""
    return [r for r in caplog.records if r.getMessage().startswith("Compiling jit(_perform)")]


def fitted(model, **settings):
    guide = dgp.guides.InducingPoint(model, **settings)
    return dgp.Posterior(model, guide, random_params(model, guide, X, Y))


def moved(posterior, factor=1.01):
    """Another fit of the same model and guide."""
    params = {name: factor * value for name, value in posterior.params.items()}
    return dgp.Posterior(posterior.model, posterior.guide, params)


@pytest.mark.long
def test_fits_and_numbers_of_rows_share_one_program(key, caplog):
    posterior = fitted(shallow)  # all these numbers of rows are filled up to 40
    with jax.log_compiles():
        posterior.using(num_samples=3).predict(key, NEW)
    assert len(compilations(caplog)) == 1
    for again in (moved(posterior), pickle.loads(pickle.dumps(posterior))):
        for rows in (30, 21, 25, 40):
            with jax.log_compiles():
                found = again.using(num_samples=3).predict(key, jnp.linspace(-1, 1, rows)[:, None])
            assert isinstance(found.means, jax.Array)
            assert found.means.shape == found.variances.shape == (3, rows)
    assert len(compilations(caplog)) == 1
    assert not np.allclose(moved(posterior).using(num_samples=3).predict(key, NEW).mean, found.mean[:30])


@pytest.mark.long
def test_a_program_keeps_neither_model_nor_guide_nor_arrays(key):
    """Also those that the model closes over."""
    inducing = Z + 0
    model = (lambda Z: lambda X, y=None: shallow(X, y, Z=Z))(inducing)

    posterior = fitted(model)
    posterior.using(num_samples=2).predict(key, NEW)
    left = [weakref.ref(x) for x in (model, posterior, posterior.guide, inducing, *posterior.params.values())]
    del model, posterior, inducing
    gc.collect()
    assert [ref() for ref in left] == [None] * len(left)


@pytest.mark.long
def test_what_a_model_reads_from_outside_is_read_by_every_posterior(key):
    settings = {"noise": 0.1}

    def model(X, y=None):
        return shallow(X, y, noise=settings["noise"])

    posterior = fitted(model)
    before = posterior.using(num_samples=1).predict(key, NEW).variances
    settings["noise"] = 0.2
    after = moved(posterior, 1.0).using(num_samples=1).predict(key, NEW).variances
    np.testing.assert_allclose(after - before, 0.2**2 - 0.1**2, rtol=1e-6)


@pytest.mark.long
def test_derivatives_of_predictions(key):
    posterior = fitted(shallow)
    slope = jax.grad(lambda x: posterior.using(num_samples=1).predict(key, x[None, None]).mean[0])(0.3)
    a, b = (posterior.using(num_samples=1).predict(key, jnp.array([[x]])).mean[0] for x in (0.3 - 1e-5, 0.3 + 1e-5))
    np.testing.assert_allclose(slope, (b - a) / 2e-5, rtol=1e-4)


def test_rounding_up():
    sizes = np.arange(1, 5000)
    rounded = np.array([round_up(n) for n in sizes])
    assert (rounded >= sizes).all()
    assert (rounded[5:] < 2 * sizes[5:]).all()
    assert (rounded[100:] <= 1.25 * sizes[100:]).all()
    assert (np.array([round_up(n) for n in rounded]) == rounded).all()
    assert len(set(rounded)) < 32


def classes(X, y=None):
    f = dgp.gp("f", dgp.kernels.RBF(), dgp.Points(Z), outputs=3)
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dgp.Likelihood(f(X), lambda v: dgp.likelihoods.RobustMax(v, 0.1)), obs=y)


def counts(X, y=None):
    f = dgp.gp("f", dgp.kernels.RBF(), dgp.Points(Z), outputs=2)
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dgp.Likelihood(f(X), lambda v: dist.Poisson(jnp.exp(v)).to_event(1)), obs=y)


def on_a_ring(X, y=None):
    f = dgp.gp("f", dgp.kernels.RBF(), dgp.Grid(-6.0, 6.0, 24))
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dgp.Likelihood(f(X), lambda v: dist.StudentT(4.0, v, 0.1)), obs=y)


def of_groups(X, group=None, y=None):
    """A table with a row per group, and columns in a plate of their own."""
    f = dgp.gp("f", dgp.kernels.RBF(), dgp.Points(Z), outputs=2)
    with numpyro.plate("groups", 3):
        shift = numpyro.sample("shift", dist.Normal(0, 1))
    with numpyro.plate("data", len(X)) as i:
        v = numpyro.sample("v", f(X[i]))
        numpyro.sample("y", dist.Normal(v + shift[group[i], None], 0.1).to_event(1), obs=y)


def normalised(X, y=None):
    shallow(X - X.mean(0), y)


def by_number(X, y=None):
    shallow(X / len(X), y)


def in_time(X, y=None):
    shallow(jnp.linspace(-2, 2, len(X))[:, None], y)


def below_another(X, y=None):
    """Inputs of which each sees the one before."""
    shallow(X + jnp.roll(X, 1), y)


def summed(X, y=None):
    """A noise per row, of which all rows see the mean."""
    f = dgp.gp("f", dgp.kernels.RBF(), dgp.Points(Z))
    with numpyro.plate("data", len(X)):
        w = numpyro.sample("w", dist.Normal(0, 1))
        numpyro.sample("y", dgp.Likelihood(f(X), lambda v: dist.Normal(v + w.mean(), 0.1)), obs=y)


def joint(X, y=None):
    f = dgp.gp("f", dgp.kernels.RBF(), dgp.Points(Z))
    numpyro.sample("y", dist.Normal(numpyro.sample("v", f.joint(X)), 0.1).to_event(1), obs=y)


def draws_of(model, *args, num=4, key=jax.random.key(5)):
    """Draws of the shared sites, as a chain gives them."""
    shared = ("f", "g", "noise", "scales", "shift")
    found = numpyro.infer.Predictive(model, num_samples=num)(key, *args)
    return {name: value for name, value in found.items() if name in shared}


def posterior_of(model, *args):
    params = {"g_Z": Z} if model is bayesian else {}
    return dgp.Posterior(model, samples=draws_of(model, *args), params=params)


GROUP = jnp.arange(30) % 3
APART = {
    **{model.__name__: (model, X) for model in (shallow, deep, explicit, bayesian, classes, counts, on_a_ring)},
    "of_groups": (of_groups, X, GROUP),
}
TOGETHER = [normalised, by_number, in_time, below_another, summed, joint]
METHODS = ("predict", "sample", "hidden", "log_density", "functions")


def observed(model, *args):
    with numpyro.handlers.seed(rng_seed=0):
        site = jax.eval_shape(lambda: numpyro.handlers.trace(model).get_trace(*args)["y"]["value"])
    return jnp.zeros(site.shape, site.dtype)


def result(posterior, method, args, key=jax.random.key(0), **options):
    posterior = posterior.using(**options)
    if method == "functions":
        return posterior.functions(key)(*args)
    if method == "log_density":
        return posterior.log_density(key, observed(posterior.model, *args), *args)
    return getattr(posterior, method)(key, *args)


class _Stopped(Exception):
    pass


def rows_of(model, methods, *args):
    """Where the rows of predictions are, from runs on shapes only."""
    posterior = posterior_of(model, *args)

    def stop(*_):
        raise _Stopped

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled.Compiled, "__call__", stop)
        for method in methods:
            with pytest.raises(_Stopped):
                result(posterior, method, args)
    return [found.rows for found in posterior._predictor._rows.values()]


@pytest.mark.slow
@pytest.mark.parametrize("name", mostly_long(["counts"], APART))
def test_rows_that_are_apart_are_found(name):
    model, *args = APART[name]
    methods = METHODS if model is not classes else [*METHODS[1:], "probs"]
    found = rows_of(model, methods, *args)
    assert len(found) == len(methods)
    assert all(rows is not None and rows.in_plates for rows in found)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Posterior. expected every row to be predicted by itself")
@pytest.mark.parametrize("model", mostly_long([normalised, by_number, summed], TOGETHER))
def test_rows_that_meet_are_left_as_they_are(model):
    assert set(rows_of(model, ["predict"], X)) <= {None}


@pytest.mark.long
def test_a_branch_on_the_number_of_rows_is_seen(key):
    def model(X, y=None):
        shallow(X, y, noise=0.1 if len(X) < 40 else 0.3)

    posterior = posterior_of(model, X)
    found = posterior.using(num_samples=1).predict(key, X)  # would be filled up to 40
    first = posterior.using(num_samples=1).predict(key, X[:20])
    np.testing.assert_allclose(found.variances[:, :20], first.variances, rtol=1e-9)


@pytest.mark.slow
def test_a_single_row_is_left_as_it_is():
    """An array of one row may be that of a table as well."""
    assert rows_of(shallow, ["predict"], X[:1]) == []


EXACT = [
    *((model, "predict") for model in (shallow, on_a_ring, counts)),
    *((model, "functions") for model in (deep, explicit)),
    (counts, "log_density"),
    (classes, "probs"),
]


@pytest.mark.long
@pytest.mark.parametrize("case", mostly_long([EXACT[0]], EXACT))
def test_rows_filled_up_change_nothing(case, monkeypatch):
    """Where all that is random is shared by the rows: the same numbers at 21 rows as at 40, and as at 21 alone."""
    model, method = case
    args, options = (X[:21],), {"num_samples": 4}
    found = result(posterior_of(model, X), method, args, **options)
    monkeypatch.setattr(predictor, "round_up", lambda count: count)
    alone = result(posterior_of(model, X), method, args, **options)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-10), found, alone)


@pytest.mark.long
@pytest.mark.parametrize("model", [deep, bayesian, explicit])
def test_rows_filled_up_have_the_distribution_of_rows_alone(model, monkeypatch):
    posterior = fitted(model)
    found = posterior.using(num_samples=4000).predict(jax.random.key(1), NEW[:9])
    monkeypatch.setattr(predictor, "round_up", lambda count: count)
    alone = moved(posterior, 1.0).using(num_samples=4000).predict(jax.random.key(2), NEW[:9])
    for moment in (lambda m: m.means, lambda m: m.variances + m.means**2):
        a, b = moment(found), moment(alone)
        assert (jnp.abs(a.mean(0) - b.mean(0)) < 4.5 * jnp.sqrt((a.var(0) + b.var(0)) / 4000) + 1e-12).all()


@pytest.mark.long
def test_batches_share_one_draw_of_what_rows_share(key):
    """Of a chain."""
    posterior = posterior_of(shallow, X)
    found = posterior.using(num_samples=3, batch_size=8, progress_bar=False).predict(key, NEW[:20])
    assert type(found.means) is np.ndarray
    np.testing.assert_allclose(found.means, posterior.using(num_samples=3).predict(key, NEW[:20]).means, rtol=1e-9)


@pytest.mark.long
@pytest.mark.parametrize("source", [fitted, lambda model: posterior_of(model, X)], ids=["guide", "chain"])
def test_batches_share_one_draw_of_functions(source, key):
    """Inducing values drawn from a guide, too, and paths through several layers."""
    posterior = source(explicit)
    together = posterior.using(num_samples=3).functions(key)(NEW[:20])
    draw = posterior.using(num_samples=3, batch_size=8, progress_bar=False).functions(key)
    for name, values in draw(NEW[:20]).items():
        np.testing.assert_allclose(values, together[name], rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("model", mostly_long([], [shallow, bayesian]))
def test_rows_of_different_batches_are_independent(model, key):
    """Given what all rows share: the same row again and again, in batches of two."""
    posterior = posterior_of(bayesian, X)
    one = dgp.Posterior(
        bayesian, samples={n: v[:1].repeat(500, 0) for n, v in posterior.samples.items()}, params={"g_Z": Z}
    )
    y = one.using(num_samples=500, batch_size=2, progress_bar=False).sample(key, jnp.zeros((6, 1)))
    assert y.shape == (500, 6)
    correlations = np.corrcoef(y.T)[np.triu_indices(6, 1)]
    assert np.abs(correlations).max() < 4.5 / np.sqrt(500)


@pytest.mark.long
def test_rows_of_different_batches_are_independent_under_a_guide(key):
    """With inducing values known almost exactly, so that nothing is shared."""
    guide = dgp.guides.InducingPoint(bayesian)
    params = random_params(bayesian, guide, X, Y)
    params |= {name: 1e-6 * value for name, value in params.items() if name.endswith("scale_tril")}
    posterior = dgp.Posterior(bayesian, guide, params)
    y = posterior.using(num_samples=2000, batch_size=2, progress_bar=False).sample(key, jnp.zeros((6, 1)))
    assert np.abs(np.corrcoef(y.T)[np.triu_indices(6, 1)]).max() < 4.5 / np.sqrt(2000)
    mixture = posterior.using(num_samples=2000, batch_size=8, progress_bar=False).predict(key, NEW)
    together = posterior.using(num_samples=2000).predict(jax.random.key(4), NEW)
    error = np.sqrt((mixture.means.var(0) + together.means.var(0)) / 2000)
    assert (np.abs(mixture.mean - together.mean) < 4.5 * error).all()


@pytest.mark.long
@pytest.mark.parametrize("method", [*METHODS[1:], "probs"])
def test_batches_of_every_quantity(method, key, capsys):
    posterior = posterior_of(classes, X)
    together = result(posterior, method, (X,), num_samples=3)
    found = result(posterior, method, (X,), num_samples=3, batch_size=11)
    assert "batches of rows" in capsys.readouterr().err
    assert jax.tree.map(np.shape, found) == jax.tree.map(np.shape, together)
    if method != "sample":
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-9), found, together)


def with_columns(X, table, y=None):
    """Axes that are longer than a batch and not those of the rows: outputs in a plate, a table among the arguments."""
    f = dgp.gp("f", dgp.kernels.RBF(), dgp.Points(Z[:2]), outputs=3)
    with numpyro.plate("data", len(X), dim=-1), numpyro.plate("columns", 3, dim=-2):
        numpyro.sample("y", dist.Normal(f(X).mean.T + table.sum(), 0.1), obs=y)


FEW_ROWS = {name: APART[name] for name in ("shallow", "deep", "classes", "counts", "of_groups", "bayesian")} | {
    "with_columns": (with_columns, X, jnp.ones((4, 1)))
}


@pytest.mark.slow
@pytest.mark.parametrize("name", mostly_long(["with_columns"], FEW_ROWS))
def test_few_rows_by_every_method(name, key, monkeypatch):
    """With and without batches, also of one row; shapes only."""

    def on_shapes(self, *args):
        return jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), jax.eval_shape(self._jitted, *args))

    monkeypatch.setattr(compiled.Compiled, "__call__", on_shapes)
    model, *args = FEW_ROWS[name]
    posterior = posterior_of(model, *args)
    methods = {method: partial(result, posterior, method) for method in METHODS}
    methods["quantile"] = lambda args, **options: posterior.using(**options).quantile(key, [0.1, 0.2, 0.5, 0.9], *args)
    if name == "with_columns":  # y has its rows along the second axis
        del methods["log_density"]
    if name == "classes":
        methods = {name: methods[name] for name in ("sample", "log_density")}
        methods["probs"] = partial(result, posterior, "probs")
        methods["predict_function"] = partial(result, posterior, "predict_function")
    for method, call in methods.items():
        for rows in (0, 1, 2, 3):
            few = [a[:rows] if len(a) == len(X) else a for a in args]
            for size in (None, 1, 2, 5) if method == "predict" and rows else (1,):
                options = {} if size is None else {"batch_size": size, "progress_bar": False}
                if not rows and method == "log_density":  # ``observed`` needs a row itself
                    continue
                if not rows:
                    with pytest.raises(ValueError, match=r"expected (at least one row|plates with at least one row)"):
                        call(few, num_samples=4, **options)
                    continue
                found = call(few, num_samples=4, **options)
                shapes = {leaf.shape for leaf in jax.tree.leaves(found)}
                assert all(rows in shape for shape in shapes), (method, rows, size, shapes)
                assert size is None or all(type(leaf) is np.ndarray for leaf in jax.tree.leaves(found))


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 3])
def test_batches_of_one_row_have_the_values_of_all(rows, key):
    posterior = posterior_of(shallow, X)
    together = posterior.using(num_samples=2).predict(key, NEW[:rows])
    found = posterior.using(num_samples=2, batch_size=1, progress_bar=False).predict(key, NEW[:rows])
    np.testing.assert_allclose(found.means, together.means, rtol=1e-9)
    np.testing.assert_allclose(found.variances, together.variances, rtol=1e-9)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Posterior. expected every row to be predicted by itself")
def test_one_batch_of_rows_that_meet(key):
    posterior = posterior_of(normalised, X)
    together = posterior.using(num_samples=2).predict(key, X[:4])
    found = posterior.using(num_samples=2, batch_size=4, progress_bar=False).predict(key, X[:4])
    np.testing.assert_allclose(found.means, together.means, rtol=1e-9)
    with pytest.raises(ValueError, match="expected rows predicted independently"):
        posterior.using(num_samples=2, batch_size=3, progress_bar=False).predict(key, X[:4])


@pytest.mark.slow
def test_batches_of_rows_on_a_device_stay_there(key, monkeypatch):
    seen = []

    def on_shapes(self, key, samples, arrays, batch):
        seen.append(arrays[0])
        return jax.tree.map(
            lambda a: np.zeros(a.shape, a.dtype), jax.eval_shape(self._jitted, key, samples, arrays, batch)
        )

    monkeypatch.setattr(compiled.Compiled, "__call__", on_shapes)
    placed = jax.device_put(X[:3], jax.devices()[0])
    posterior_of(shallow, X).using(num_samples=2, batch_size=2, progress_bar=False).predict(key, placed)
    assert [a.shape for a in seen] == [(2, 1), (2, 1)]
    assert all(a.committed for a in seen)


@pytest.mark.slow
def test_batches_of_traced_rows_are_refused(key):
    posterior = posterior_of(shallow, X)
    with pytest.raises(ValueError, match=r"expected arrays with batch_size=.*leave batch_size out"):
        jax.eval_shape(lambda x: posterior.using(batch_size=2).predict(key, x).mean, X)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Posterior. expected every row to be predicted by itself")
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda key: posterior_of(shallow, X).using(batch_size=0).predict(key, X),
            "expected batch_size to be a positive",
        ),
        (
            lambda key: posterior_of(classes, X).using(batch_size=8).predict(key, X),
            "expected a distribution of y that has them, got RobustMax",
        ),
        (
            lambda key: posterior_of(normalised, X).using(batch_size=8).predict(key, X),
            "expected rows predicted independently for batch_size=",
        ),
    ],
)
def test_bad_batches(call, message, key):
    with pytest.raises(ValueError, match=message):
        call(key)


TABLE = jnp.ones(6)


@pytest.mark.parametrize(
    ("program", "axes"),
    [
        (lambda X: jax.lax.map(lambda scale: jnp.sin(X) * scale, jnp.arange(3.0)), [1]),
        (lambda X: X[jnp.arange(len(X))], [0]),
        (lambda X: TABLE[X[:, 0].astype(int)], [0]),
        (lambda X: jnp.take_along_axis(X, jnp.zeros((len(X), 1), int), 1), [0]),
        (lambda X: jax.random.normal(jax.random.key(0), X.shape), [0]),
        (lambda X: np.arange(len(X)) * X[:, 0], [0]),
        (lambda X: (X.mean(0), X)[1], [0]),  # what is not used may mix rows
        (lambda X: X[jnp.arange(len(X)) - 1], None),
        (lambda X: jnp.arange(len(X)) + len(X), None),
        (lambda X: np.linspace(0, 1, len(X)) * X[:, 0], None),
        (lambda X: X ** len(X), None),
        (lambda X: X @ X.T, None),
        (lambda X: X[::-1], None),
        (lambda X: X[0], None),
        (lambda X: jnp.cumsum(X, 0), None),
        (lambda X: jax.lax.map(jnp.sin, X), None),
        (lambda X: jax.random.permutation(jax.random.key(0), X), None),
        (lambda X: X.at[0].set(1.0), None),
        (lambda X: X.reshape(-1), None),
    ],
)
def test_rows_of_programs(program, axes):
    few, many = (jax.make_jaxpr(program)(jnp.ones((n, 2))) for n in (3, 5))
    assert row_axes(few, many) == axes
