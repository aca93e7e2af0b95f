"""Wrong calls of ``dgp.initial``, ``dgp.densities``, ``plots`` and the calibration of ``dgp.diagnostics``, and data of
kinds that are not numbers."""

import datetime

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import pandas as pd
import scipy.sparse
from wrong_calls.wrong import Wrong

import numpyro_dgp as dgp
from numpyro_dgp.densities import kde_log_density, log_mean_exp, shapiro_wilk
from numpyro_dgp.diagnostics import Simulated, coverage, pit, uniformity
from numpyro_dgp.initial import Standardizer, kmeans, layers, mixing
from numpyro_dgp.means import pca, principal_directions
from numpyro_dgp.rings import Ring

matplotlib.use("Agg")

from numpyro_dgp import plots

rng = np.random.default_rng(0)
X = rng.normal(size=(20, 2))
GAPS = np.where(X > 1, np.nan, X)
DRAWS = rng.normal(size=(50, 20))
Y = X[:, 0]
UNITS = Standardizer.fit(X)
DAYS = pd.date_range("2024-01-01", periods=20)
TABLE = pd.DataFrame(X, columns=["a", "b"])
PREDICTION = dgp.densities.Mixture(DRAWS, np.ones((50, 20)))
TRANSPOSED = dgp.densities.Mixture(DRAWS.T, np.ones((20, 50)))
LEVELS = np.linspace(-3, 3, 7)
LOG = np.zeros((7, 20))
LINE = np.linspace(0, 1, 20)
KEY = jax.random.key(0)
RING = Ring(0.0, 8.0, 16)

TIMES = r"to be numbers, got times \(.*\){}: choose a unit, \(t - t\.min\(\)\) / np\.timedelta64\(1, 'D'\) counts days"

WRONG = [
    # What is no number
    Wrong(
        "categories",
        lambda: Standardizer.fit(TABLE.assign(kind=pd.Categorical(["u", "v"] * 10))),
        r"data to standardise to be numbers, got categories in column 'kind': pandas\.get_dummies",
    ),
    Wrong("a categorical column", lambda: kmeans(pd.Categorical([1, 2]), 1), "inputs X to be numbers, got cat"),
    Wrong("a column of days", lambda: Standardizer.fit(TABLE.assign(day=DAYS)), TIMES.format(" in column 'day'")),
    Wrong("a series of days", lambda: Standardizer.fit(pd.Series(DAYS)), TIMES.format("")),
    Wrong("days with a zone", lambda: Standardizer.fit(pd.Series(DAYS.tz_localize("UTC"))), TIMES.format("")),
    Wrong("days of NumPy", lambda: layers(DAYS.to_numpy()[:, None], [], 5), TIMES.format("")),
    Wrong("days of Python", lambda: Standardizer.fit([datetime.date(2024, 1, 1)]), TIMES.format("")),
    Wrong("durations", lambda: Standardizer.fit(pd.Series(DAYS - DAYS[0])), r"got durations .* t / np\.timedelta64"),
    Wrong("text", lambda: Standardizer.fit(["1", "2"]), r"got text: convert .*values\.astype\(float\)"),
    Wrong("text in a table", lambda: Standardizer.fit(TABLE.assign(name="u")), "got text in column 'name'"),
    Wrong("text among numbers", lambda: Standardizer.fit(np.array([1.0, "u"], object)), "got text"),
    Wrong("complex", lambda: Standardizer.fit([1j, 2.0]), "got complex numbers"),
    Wrong("lists of unequal length", lambda: kmeans([[1.0, 2.0], [3.0]], 1), "got lists of unequal length"),
    Wrong("sparse", lambda: kmeans(scipy.sparse.eye_array(3), 1), r"got a dia_array: make it dense, \.toarray\(\)"),
    Wrong(
        "a dict", lambda: Standardizer.fit({"a": 1.0}), "to be numbers, got a dict: give an array, a list or a table"
    ),
    Wrong("nothing", lambda: Standardizer.fit(None), "to be numbers, got a NoneType"),
    Wrong("a function", lambda: UNITS(len), "values to standardise to be numbers, got a builtin_function"),
    Wrong("periods", lambda: UNITS(DAYS.to_period("D")), "to be numbers, got a Period"),
    Wrong("masked", lambda: kmeans(np.ma.masked_invalid(GAPS), 3), r"got \d masked value\(s\): drop these rows"),
    Wrong("a table without columns", lambda: kmeans(pd.DataFrame(index=[0, 1]), 1), "to have columns, got a DataFrame"),
    Wrong("missing in a table", lambda: kmeans(TABLE.convert_dtypes().mask(TABLE > 1), 3), "finite inputs X"),
    Wrong(
        "missing whole numbers", lambda: Standardizer.fit(pd.Series([1, None], dtype="Int64")), "finite data to stand"
    ),
    # Standardizer
    Wrong("fit NaN", lambda: Standardizer.fit(GAPS), r"expected finite data to standardise, got \d NaN"),
    Wrong("fit a number", lambda: Standardizer.fit(5.0), r"Standardizer\.fit: expected values of shape \(N, \.\.\.\)"),
    Wrong("fit no rows", lambda: Standardizer.fit(X[:0]), r"got \(0, 2\): it needs the rows of all data"),
    Wrong("fit traced", lambda: jax.eval_shape(lambda x: Standardizer.fit(x)(x), X), "known values, got traced ones"),
    Wrong("negative scale", lambda: Standardizer(0.0, -1.0), "Standardizer: expected scale to be positive, got -1"),
    Wrong("infinite loc", lambda: Standardizer(np.inf, 1.0), "expected finite loc"),
    Wrong("one column of two", lambda: UNITS(X[:, :1]), r"values of shape \(N, 2\), as those it was .* got \(20, 1\)"),
    Wrong("three columns of two", lambda: UNITS(np.ones((4, 3))), r"values of shape \(N, 2\).* got \(4, 3\)"),
    Wrong("a vector of rows", lambda: UNITS(Y), r"values of shape \(N, 2\).* got \(20,\)"),
    Wrong(
        "inverse of other columns", lambda: UNITS.inverse(np.ones((4, 3))), r"got \(4, 3\): fit one Standardizer for"
    ),
    Wrong("inverse_scale of rows", lambda: UNITS.inverse_scale(Y), r"values of shape \(N, 2\).* got \(20,\)"),
    Wrong(
        "columns while tracing", lambda: jax.eval_shape(UNITS, X[:, :1]), r"values of shape \(N, 2\).* got \(20, 1\)"
    ),
    # Inducing inputs, layers, weights, means
    Wrong("kmeans of a vector", lambda: kmeans(Y, 3), r"expected inputs of shape \(..., N, D\)"),
    Wrong("kmeans too many", lambda: kmeans(X, 21), "between 1 and 20 inducing points, the number of distinct rows"),
    Wrong("kmeans of a float", lambda: kmeans(X, 3.0), "between 1 and 20 inducing points.* got 3.0"),
    Wrong("kmeans negative seed", lambda: kmeans(X, 3, seed=-1), "seed to be an integer, zero or more, got -1"),
    Wrong("kmeans a key", lambda: kmeans(X, 3, seed=KEY), "kmeans: expected seed to be an integer"),
    Wrong("kmeans of times", lambda: kmeans(np.zeros(3, [("a", float)]), 3), "inputs X to be numbers, got rec"),
    Wrong("kmeans traced", lambda: jax.eval_shape(lambda x: kmeans(x, 3), X), "inputs X with known values"),
    Wrong("layers of a vector", lambda: layers(Y, [], 3), r"initial\.layers: expected inputs of shape"),
    Wrong("layers of gaps", lambda: layers(GAPS, [2], 3), "expected finite inputs"),
    Wrong("layers of width zero", lambda: layers(X, [0], 3), "expected a positive integer number of outputs"),
    Wrong(
        "layers of large inputs",
        lambda: layers(1e4 * X, [], 3),
        r"initial\.layers: inputs are not in standard units: column \d has mean .*Standardizer\.fit",
        UserWarning,
    ),
    Wrong(
        "layers of years",
        lambda: layers(2000 + X, [], 3),
        "not in standard units.*units = dgp.initial.Standardizer.fit",
        UserWarning,
    ),
    Wrong("mixing of a vector", lambda: mixing(Y, dgp.kernels.RBF(), 2), r"initial\.mixing: expected inputs of shape"),
    Wrong("mixing of gaps", lambda: mixing(GAPS, dgp.kernels.RBF(), 2), "expected finite coordinates of the outputs"),
    Wrong("mixing too many", lambda: mixing(X, dgp.kernels.RBF(), 21), "between 1 and 20 functions.* got 21"),
    Wrong("pca of times", lambda: pca(DAYS.to_numpy()[:, None], 1), "inputs X to be numbers, got times"),
    Wrong("pca of a vector", lambda: pca(Y, 1), "means.pca: expected inputs of shape"),
    Wrong("directions too many", lambda: principal_directions(X, 3), "expected between 1 and 2 directions, got 3"),
    # Mixture and densities
    Wrong(
        "mixture of two shapes",
        lambda: dgp.densities.Mixture(DRAWS, np.ones(20)).variance,
        r"Mixture\.\w+: expected means and variances of one shape .*got \(50, 20\) and \(20,\)",
    ),
    Wrong(
        "mixture transposed", lambda: dgp.densities.Mixture(DRAWS, np.ones((20, 50))).mean, r"\(50, 20\) and \(20, 50\)"
    ),
    Wrong(
        "mixture of numbers",
        lambda: dgp.densities.Mixture(0.0, 1.0).mean,
        r"draws along the first axis, got \(\) and \(\)",
    ),
    Wrong(
        "mean of no logarithms", lambda: log_mean_exp(jnp.zeros((0, 3))), r"shape \(S, ...\) with S >= 1, got \(0, 3\)"
    ),
    Wrong("mean of one logarithm", lambda: log_mean_exp(jnp.zeros(())), r"shape \(S, ...\) with S >= 1, got \(\)"),
    Wrong("kde transposed", lambda: kde_log_density(DRAWS.T, Y), r"of shape \(50,\), .* got \(20,\): .*draws\.T"),
    Wrong("kde of few", lambda: kde_log_density(DRAWS, Y[:5]), r"observations y of shape \(20,\), .* got \(5,\)"),
    Wrong("kde of a column", lambda: kde_log_density(DRAWS, Y[:, None]), r"of shape \(20,\), .* got \(20, 1\)"),
    Wrong(
        "kde of one draw", lambda: kde_log_density(DRAWS[:1], Y), r"draws of shape \(S, N\) with S >= 2, got \(1, 20\)"
    ),
    Wrong("kde of outputs", lambda: kde_log_density(DRAWS[..., None], Y), "several outputs one at a time"),
    Wrong("kde of means", lambda: kde_log_density(np.ones((9, 20)), Y), "draw y, not its mean"),
    Wrong("kde of NaN", lambda: kde_log_density(DRAWS, GAPS[:, 0]), "expected finite observations y"),
    Wrong("normality of a vector", lambda: shapiro_wilk(Y), r"draws of shape \(S, N\) with S >= 3, got \(20,\)"),
    # Calibration
    Wrong("pit transposed", lambda: pit(DRAWS.T, Y, KEY), r"over observations of shape \(20,\), got \(20, 50\)"),
    Wrong("pit of few", lambda: pit(DRAWS, Y[:5], KEY), r"over observations of shape \(5,\), got \(50, 20\)"),
    Wrong("pit of a column", lambda: pit(DRAWS, Y[:, None], KEY), r"observations of shape \(20, 1\), got \(50, 20\)"),
    Wrong("pit without key", lambda: pit(DRAWS, Y, "a"), "pit: expected a PRNG key, got str"),
    Wrong("pit of no draws", lambda: pit(DRAWS[:0], Y, KEY), r"got \(0, 20\)"),
    Wrong("pit of NaN", lambda: pit(DRAWS, GAPS[:, 0], KEY), "expected finite observations y"),
    Wrong(
        "pit of categories", lambda: pit(DRAWS, pd.Categorical(["u", "v"] * 10), KEY), "observations y to be numbers"
    ),
    Wrong("coverage of data", lambda: coverage(5 * Y), r"u in \[0, 1\] and levels in \(0, 1\), got -"),
    Wrong("coverage of NaN", lambda: coverage([np.nan]), "got NaN and levels"),
    Wrong("coverage of nothing", lambda: coverage([]), "got no values and levels"),
    Wrong("coverage in per cent", lambda: coverage(LINE, [90]), r"levels in \(0, 1\), got 0 to 1 and levels \[90\]"),
    Wrong("uniformity of data", lambda: uniformity(3 * X[:, 0], 2), r"expected values in \[0, 1\], got -"),
    Wrong("uniformity of NaN", lambda: uniformity(GAPS[:, 0], 2), r"expected values in \[0, 1\], got NaN"),
    Wrong("uniformity of few", lambda: uniformity(LINE, 10), "expected at least 50 rows for 10 bins"),
    Wrong("uniformity of no bins", lambda: uniformity(LINE, 0), "uniformity: expected bins to be a positive integer"),
    Wrong("ranks beyond", lambda: Simulated.of({"f": [0, 5]}, 4), "expected ranks from 0 to 4, got 0 to 5 at site 'f'"),
    Wrong("ranks are NaN", lambda: Simulated.of({"f": [0, np.nan]}, 4), "expected ranks from 0 to 4, got nan"),
    Wrong("no sites", lambda: Simulated.of({}, 4), "expected ranks by site, a row per replication"),
    Wrong("no samples", lambda: Simulated.of({"f": [0]}, 0), "expected num_samples to be a positive integer, got 0"),
    # Figures
    Wrong("fit transposed", lambda: plots.fit(LINE, TRANSPOSED), r"fit: expected x of shape \(50,\), got \(20,\)"),
    Wrong("fit of fewer inputs", lambda: plots.fit(LINE[:5], PREDICTION), r"expected x of shape \(20,\), got \(5,\)"),
    Wrong("fit of a column", lambda: plots.fit(LINE[:, None], PREDICTION), r"x of shape \(N,\) and one output, got"),
    Wrong("fit of outputs", lambda: plots.fit(LINE, dgp.densities.Mixture(X[None], X[None] ** 2)), "and one output"),
    Wrong("fit of a pair", lambda: plots.fit(LINE, (DRAWS, DRAWS)), r"expected a dgp\.densities\.Mixture, got tuple"),
    Wrong(
        "fit of NaN",
        lambda: plots.fit(LINE, dgp.densities.Mixture(GAPS.T, X.T**2)),
        "expected finite prediction",
    ),
    Wrong(
        "fit of logarithms",
        lambda: plots.fit(LINE, dgp.densities.Mixture(DRAWS, DRAWS - 5)),
        "expected variances of zero or more",
    ),
    Wrong("fit of y alone", lambda: plots.fit(LINE, PREDICTION, data=Y), r"a pair \(x, y\), got ndarray"),
    Wrong("fit of uneven data", lambda: plots.fit(LINE, PREDICTION, data=(LINE, Y[:5])), r"y of data of shape \(20,\)"),
    Wrong("fit of table data", lambda: plots.fit(LINE, PREDICTION, data=(X, Y)), r"x of data of shape \(any,\), got"),
    Wrong(
        "fit of functions", lambda: plots.fit(LINE, PREDICTION, functions=DRAWS.T), r"functions of shape \(any, 20\)"
    ),
    Wrong("observed of few", lambda: plots.observed(Y[:5], PREDICTION), r"y of shape \(20,\), got \(5,\)"),
    Wrong("observed of a column", lambda: plots.observed(Y[:, None], PREDICTION), r"y of shape \(20,\), got \(20, 1\)"),
    Wrong("observed of NaN", lambda: plots.observed(GAPS[:, 0], PREDICTION), "finite y, got"),
    Wrong("observed transposed", lambda: plots.observed(Y, TRANSPOSED), r"y of shape \(50,\), got \(20,\)"),
    Wrong(
        "observed of outputs",
        lambda: plots.observed(Y, dgp.densities.Mixture(X[None], X[None] ** 2)),
        "of one output.*one by",
    ),
    Wrong("density transposed", lambda: plots.density(LINE, LEVELS, LOG.T), r"shape \(7, 20\), .* got \(20, 7\)"),
    Wrong("density of NaN", lambda: plots.density(LINE, LEVELS, LOG * np.nan), "expected log densities, got NaN"),
    Wrong("density in disorder", lambda: plots.density(Y, LEVELS, LOG), "expected x to increase"),
    Wrong("marginals transposed", lambda: plots.marginals(DRAWS.T, LEVELS, LOG), r"expected draws \(S, N\) and log_de"),
    Wrong(
        "marginals observed",
        lambda: plots.marginals(DRAWS[:, :2], LEVELS, LOG[:, :2], observed=Y),
        r"observed of shape \(2,\), got \(20,\)",
    ),
    Wrong("bounds of an array", lambda: plots.bounds(LINE), "expected losses by name, got ndarray"),
    Wrong("bounds of NaN", lambda: plots.bounds({"q": LINE * np.nan}), "finite losses of 'q'"),
    Wrong("bounds of no data", lambda: plots.bounds({"q": LINE}, size=0), "size to be positive"),
    Wrong("latents of a matrix", lambda: plots.latent_space(DRAWS), r"expected draws \(S, N, 1\) or \(S, N, 2\)"),
    Wrong("latents are NaN", lambda: plots.latent_space(np.stack([GAPS] * 3)), "latent_space: expected finite draws"),
    Wrong(
        "spectra of a plane", lambda: plots.ring_spectra(Ring([0.0, 0.0], [1.0, 1.0], (4, 4)), {}), "of one dimension"
    ),
    Wrong("spectra of nothing", lambda: plots.ring_spectra(None, {}), r"expected a dgp.rings.Ring"),
    Wrong("spectra of other values", lambda: plots.ring_spectra(RING, {}, values=Y), r"at all 16 grid points"),
    Wrong("spectra of noises", lambda: plots.ring_spectra(RING, {}, noise=Y), "expected noise to be a single number"),
]
