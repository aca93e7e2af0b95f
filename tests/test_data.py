"""Data of every kind that users have, as numbers: tables, large offsets, whole numbers, what single precision holds."""

import decimal
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pandas as pd
import pytest
from numpyro.infer import MCMC, NUTS, SVI
from numpyro.infer.autoguide import AutoNormal
from numpyro.infer.util import potential_energy
from sizes import mostly_long

import numpyro_dgp as dgp
from numpyro_dgp import initial
from numpyro_dgp._data import as_array, as_numbers, require_apart, warn_of_units
from numpyro_dgp.initial import Standardizer

rng = np.random.default_rng(3)
PLAIN = np.array([[1.0, 0.5], [2.0, 1.5], [4.0, 0.25]])
TABLE = pd.DataFrame({"a": [1, 2, 4], "b": [0.5, 1.5, 0.25]})
SAME = {
    "list": PLAIN.tolist(),
    "table": TABLE,
    "nullable": TABLE.convert_dtypes(),
    "objects": TABLE.astype(object),
    "repeated names": TABLE.set_axis(["a", "a"], axis=1),
    "levels of names": TABLE.set_axis(pd.MultiIndex.from_tuples([("u", "a"), ("u", "b")]), axis=1),
    "other index": TABLE.set_axis([7, 3, 3], axis=0),
    "decimals": [[decimal.Decimal(str(v)) for v in row] for row in PLAIN.tolist()],
    "masked, nothing missing": np.ma.array(PLAIN),
    "JAX": jnp.asarray(PLAIN),
    "single": PLAIN.astype(np.float32),
}


@pytest.mark.parametrize("kind", SAME)
def test_every_kind_of_table_is_the_same_data(kind):
    np.testing.assert_array_equal(as_numbers("data", SAME[kind]), PLAIN)
    units, expected = Standardizer.fit(SAME[kind]), Standardizer.fit(PLAIN)
    np.testing.assert_allclose(units(SAME[kind]), expected(PLAIN), rtol=1e-6)
    np.testing.assert_array_equal(initial.kmeans(SAME[kind], 2), initial.kmeans(PLAIN, 2))
    assert [s.Z.shape for s in initial.layers(SAME[kind], [3], 2)] == [(2, 2), (2, 3)]


def test_columns_keep_what_they_are():
    """Whole numbers and truth values stay so; what is missing becomes NaN."""
    assert as_numbers("y", pd.Series([1, 2**53 + 1], dtype="Int64")).tolist() == [1, 2**53 + 1]
    assert as_numbers("y", pd.Series([True, False], dtype="boolean")).dtype == bool
    assert as_numbers("y", pd.RangeIndex(3)).dtype == np.int64
    np.testing.assert_array_equal(as_numbers("y", pd.Series([1, None], dtype="Int64")), [1.0, np.nan])
    np.testing.assert_array_equal(as_numbers("y", pd.Series([True, None], dtype="boolean")), [1.0, np.nan])
    np.testing.assert_array_equal(as_numbers("y", [1, None, 2.5]), [1.0, np.nan, 2.5])
    np.testing.assert_array_equal(Standardizer.fit(pd.Series([True, False]))(pd.Series([True, False])), [1.0, -1.0])
    assert initial.kmeans(np.array([[0], [1], [10], [11]]), 2).max() == 10.5  # not cut to a whole number


def test_traced_values_pass():
    values = jax.ShapeDtypeStruct((3, 2), float)
    assert jax.eval_shape(lambda x: as_array("x", x), values).shape == (3, 2)
    assert jax.eval_shape(lambda x: as_array("x", [x[0, 0], x[1, 1]]), values).shape == (2,)
    assert jax.eval_shape(Standardizer.fit(PLAIN), values).shape == (3, 2)


OFFSETS = {
    "seconds since 1970": 1.7e9 + 60 * np.arange(500),
    "a large offset": 1e9 + rng.normal(size=500),
    "whole milliseconds": 1_700_000_000_000 + 1000 * np.arange(500),
    "whole seconds": 1_700_000_000 + np.arange(500),
}


@pytest.mark.usefixtures("x32")
@pytest.mark.parametrize("name", OFFSETS)
def test_single_precision_keeps_distances(name):
    """In standard units, where single precision has digits for them; and the way back is in double precision."""
    values = OFFSETS[name]
    units = Standardizer.fit(values)
    found = units(values)
    assert found.dtype == jnp.float32
    exact = (values - values.mean()) / values.std()
    np.testing.assert_allclose(found, exact, atol=3e-7)
    assert len(np.unique(found)) == 500
    back = units.inverse(found)
    assert back.dtype == np.float64
    np.testing.assert_allclose(back - values[0], values - values[0], atol=2e-7 * np.ptp(values))


@pytest.mark.usefixtures("x32")
def test_offsets_under_jit():
    """What arrives is the best that 32 bits have: whole numbers and offsets lose no more."""
    seconds = 1_700_000_000 + 7 * np.arange(50)
    units = Standardizer.fit(seconds)
    np.testing.assert_allclose(jax.jit(units)(seconds), units(seconds), atol=1e-6)
    near = 1e6 + 0.25 * np.arange(50)  # all of these are floats of 32 bits, the mean is not
    units = Standardizer.fit(near)
    np.testing.assert_allclose(jax.jit(units)(near), units(near), atol=1e-6)
    np.testing.assert_allclose(jax.jit(units.inverse)(units(near)), near, rtol=1e-6)
    as_argument = jax.jit(lambda units, x: units(x))(Standardizer.fit(PLAIN), PLAIN)
    np.testing.assert_allclose(as_argument, Standardizer.fit(PLAIN)(PLAIN), atol=1e-6)


@pytest.mark.usefixtures("x32")
def test_what_single_precision_cannot_hold_is_an_error():
    for name, match in [
        ("seconds since 1970", r"got 500 of which \d+ are left: subtract the offset"),
        ("a large offset", "distinct values of inputs to stay distinct in float32, got 500 of which 1 are left"),
        ("whole milliseconds", "within the whole numbers of int32, got 1700000000000 to 1700000499000"),
    ]:
        with pytest.raises(ValueError, match=match):
            as_array("inputs", OFFSETS[name])
    with pytest.raises(ValueError, match=r"within the range of float32, got 1e\+39"):
        as_array("inputs", [1e39, 1.0])
    outlier = np.append(np.linspace(0, 1, 50), 1e12)
    with pytest.raises(ValueError, match=r"distinct values of standardised values .* subtract the offset"):
        Standardizer.fit(outlier)(outlier)
    columns = np.stack([rng.normal(size=500), OFFSETS["a large offset"]], 1)
    with pytest.raises(ValueError, match="got 500 in column 1 of which 1 are left"):
        as_array("inputs", columns)
    assert as_array("labels", np.arange(5)).dtype == jnp.int32


@pytest.mark.usefixtures("x32")
@pytest.mark.parametrize(
    "values",
    [
        rng.normal(size=(100_000, 1)),  # two of a hundred coincide
        np.array([0.3, 0.1 + 0.2, 0.3 + 1e-16, 1.0]),  # equal but for rounding
        np.cumsum(np.full(500, 0.1)),
        np.zeros((5, 2)),
        np.array([np.nan, np.nan, 1.0]),
        np.array([np.inf, 1.0]),
        np.zeros((0, 3)),
        2020 + np.arange(500) / 365,
        np.float64(1e9),
    ],
    ids=str,
)
def test_ordinary_data_pass(values):
    assert as_array("data", values).dtype == jnp.float32


def test_what_stays_apart_is_counted_by_column():
    before = np.array([[1.0, 1.0], [1.0 + 1e-9, 2.0], [1.0 + 2e-9, 3.0]])
    with pytest.raises(ValueError, match="got 3 in column 0 of which 1 are left"):
        require_apart("x", before, before.astype(np.float32))
    require_apart("x", before[:2], before[:2].astype(np.float32))  # one of two: by chance


@pytest.mark.parametrize("values", [PLAIN, 100 * PLAIN, np.arange(10**6), np.zeros((0, 2)), np.zeros((3, 0)), "jit"])
def test_units_near_one_do_not_warn(values):
    if isinstance(values, str):
        jax.eval_shape(lambda x: warn_of_units("x", x), jax.ShapeDtypeStruct((3,), float))
    else:
        warn_of_units("x", values)


def test_messages_are_short_for_any_table():
    wide = pd.DataFrame({f"column {i}": ["u"] * 500 for i in range(200)})
    with pytest.raises(ValueError, match="got text in column 'column 0'") as raised:
        initial.layers(wide, [], 5)
    assert len(str(raised.value)) < 200


def line(X, y=None):
    f = dgp.gp("f", dgp.kernels.RBF(), dgp.Points(np.linspace(0.0, 1.0, 4)[:, None]))
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dgp.Likelihood(f(X), lambda v: dist.Normal(v, 0.1)), obs=y)


@pytest.mark.long
def test_tables_can_be_fitted_and_predicted():
    x = np.linspace(0.0, 1.0, 12)
    table = pd.DataFrame({"x": x, "y": np.sin(x)}).convert_dtypes()
    guide = dgp.guides.InducingPoint(line)
    svi = SVI(line, guide, optax.adam(0.05), dgp.ELBO())
    fits = [
        dgp.fit(svi, jax.random.key(0), 20, X, y, progress_bar=False)
        for X, y in ((table[["x"]], table["y"]), (x[:, None], np.sin(x)))
    ]
    np.testing.assert_array_equal(fits[0].losses, fits[1].losses)
    posterior = dgp.Posterior(line, guide, fits[0].params)
    key = jax.random.key(1)
    predicted = posterior.predict(key, table[["x"]]).mean
    np.testing.assert_array_equal(predicted, posterior.predict(key, x[:, None]).mean)
    again = pickle.loads(pickle.dumps(posterior))
    np.testing.assert_array_equal(predicted, again.predict(key, x[:, None]).mean)


# --- arrays of NumPy whose rows a plate picks


def indexed(X, y=None, batch=None):
    """The line of the README, with a number that has to be known when the program is compiled."""
    noise = numpyro.sample("noise", dist.LogNormal(-1.0, 0.5))
    f = dgp.gp("f", dgp.kernels.RBF(), dgp.Points(jnp.linspace(0.0, 1.0, 3)[:, None]))
    with numpyro.plate("data", len(X), subsample_size=batch) as rows:
        conditional = lambda v: dist.Normal(v, noise)  # noqa: E731
        numpyro.sample("y", dgp.Likelihood(f(X[rows]), conditional), obs=None if y is None else y[rows])


def one_step(kernel, *data):
    mcmc = MCMC(kernel, num_warmup=0, num_samples=1, progress_bar=False)
    mcmc.run(KEY, *data)
    return mcmc.get_samples()


def potential(program, *data):
    values = {"noise": jnp.zeros(()), "f": jnp.zeros(3)}
    return jax.jit(lambda z: potential_energy(program, data, {}, z))(values)


def trained(guide, *data):
    svi = SVI(indexed, guide, optax.adam(0.1), dgp.ELBO())
    return svi.run(KEY, 1, *data, progress_bar=False).losses


KEY = jax.random.key(0)
PARAMS = {"noise_auto_loc": jnp.array(0.3), "f_auto_loc": jnp.zeros(3), "f_auto_scale_tril": 0.1 * jnp.eye(3)}
ONE = {"noise": jnp.array([0.3]), "f": jnp.zeros((1, 3))}
FULL, INTEGRATED = dgp.guides.InducingPoint(indexed), dgp.guides.Collapsed(indexed)
NOISE_ONLY = {"noise_auto_loc": jnp.array(0.3)}
PATHS = {
    "svi": lambda *data: trained(FULL, *data),
    "svi, minibatch": lambda *data: trained(FULL, *data, 2),
    "svi, an autoguide": lambda *data: trained(AutoNormal(indexed), *data),
    "svi, collapsed": lambda *data: trained(INTEGRATED, *data),
    "a compiled bound": lambda *data: jax.jit(lambda p: dgp.ELBO().loss(KEY, p, indexed, FULL, *data))(PARAMS),
    "fit": lambda *data: dgp.fit(
        SVI(indexed, FULL, optax.adam(0.1), dgp.ELBO()), KEY, 1, *data, progress_bar=False
    ).losses,
    "minimize": lambda *data: dgp.optim.minimize(
        SVI(indexed, FULL, optax.sgd(0.1), dgp.ELBO()), KEY, *data, max_steps=1, progress_bar=False
    ).losses,
    "NUTS": lambda *data: one_step(NUTS(dgp.for_mcmc(indexed), max_tree_depth=1), *data),
    "for_mcmc": lambda *data: potential(dgp.for_mcmc(indexed, collapse=False), *data),
    "Gibbs": lambda *data: one_step(dgp.mcmc.Gibbs(indexed), *data),
    "SGHMC": lambda *data: one_step(dgp.mcmc.SGHMC(indexed), *data),
    "Collapsed.on": lambda *data: dgp.Posterior(indexed, INTEGRATED.on(*data), NOISE_ONLY).predict(KEY, data[0]).mean,
    "predict": lambda *data: dgp.Posterior(indexed, FULL, PARAMS).predict(KEY, data[0]).mean,
    "draws": lambda *data: dgp.Posterior(indexed, samples=ONE).log_density(KEY, data[1], data[0]),
    "sample_posterior": lambda *data: FULL.sample_posterior(KEY, PARAMS, *data, sample_shape=(2,)),
    "to_arviz": lambda *data: dgp.diagnostics.to_arviz(
        dgp.Posterior(indexed, FULL, PARAMS), KEY, *data, num_samples=2
    ).posterior.noise.values,
    "condition": lambda *data: dgp.condition(
        dgp.Posterior(indexed, FULL, PARAMS), KEY, *data, num_steps=1, progress_bar=False
    ).predict(KEY, data[0]).mean,
    "update": lambda *data: dgp.update(
        dgp.Posterior(indexed, FULL, PARAMS), KEY, *data, num_steps=1, progress_bar=False
    ).predict(KEY, data[0]).mean,
}  # fmt: skip
FAST = ["a compiled bound", "for_mcmc"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("path", mostly_long(FAST, PATHS))
def test_arrays_of_numpy_are_indexed_by_a_plate_everywhere(path):
    X, y = np.linspace(0.0, 1.0, 4)[:, None], np.array([0.1, 0.5, 0.4, -0.2])
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(PATHS[path](X, y)))


@pytest.mark.slow
def test_arrays_of_numpy_stay_known_while_a_program_is_compiled():
    """Rows that a plate picks and settings that are read are arguments of one program."""

    def model(X, groups, y=None):
        f = dgp.gp("f", dgp.kernels.RBF(), dgp.Points(np.unique(X, axis=0)[::2]))
        with numpyro.plate("groups", int(groups.max()) + 1):
            level = numpyro.sample("level", dist.Normal())
        with numpyro.plate("data", len(X), subsample_size=2) as rows:
            mean = level[groups[rows]]
            numpyro.sample("y", dgp.Likelihood(f(X[rows]), lambda v: dist.Normal(v + mean, 0.1)), obs=y[rows])

    X, groups, y = np.linspace(0.0, 1.0, 4)[:, None], np.array([0, 1, 1, 0]), np.zeros(4)
    guide = dgp.guides.InducingPoint(model)
    loss = lambda: numpyro.handlers.seed(dgp.ELBO().loss, 0)(KEY, {}, model, guide, X, groups, y)  # noqa: E731
    assert jax.eval_shape(loss).shape == ()
