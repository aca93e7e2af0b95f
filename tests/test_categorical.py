"""Columns of labels: kernels of categories, alone and beside columns of numbers, and programs with them."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from dense import gram
from numpyro.infer import SVI
from numpyro.infer.util import initialize_model
from sizes import mostly_long

import numpyro_dgp as dgp
from numpyro_dgp import kernels as K

rng = np.random.default_rng(0)
LEVELS = (3, 2)
TABLE = rng.normal(size=(3, 2))


def hamming(c, d):
    return 1.5 * np.prod(np.where(c == d, 1.0, np.array([0.2, 0.7])))


def embedded(c, d):
    return np.exp(-0.5 * np.square(TABLE[int(c[0])] - TABLE[int(d[0])]).sum())


def mixed(x, z):
    return (np.exp(-0.5 * (x[0] - z[0]) ** 2) + 0.5) * hamming(x[1:], z[1:]) + 2 * embedded(x[1:2], z[1:2])


HAMMING = K.Categorical(LEVELS, 1.5, [0.2, 0.7])
KERNELS = {
    "categorical": (K.Categorical(3, 1.3, 0.25).on(1), lambda x, z: 1.3 if x[1] == z[1] else 0.25 * 1.3),
    "unrelated": (K.Categorical(2, 1.0, 0.0).on(2), lambda x, z: float(x[2] == z[2])),
    "hamming": (HAMMING.on(1, 2), lambda x, z: hamming(x[1:], z[1:])),
    "embedding": (K.Embedding(TABLE).on(1), lambda x, z: embedded(x[1:2], z[1:2])),
    "coregional": (
        K.Embedding(TABLE, K.Linear()).on(1),
        lambda x, z: TABLE[int(x[1])] @ TABLE[int(z[1])],
    ),
    "mixed": ((K.RBF().on(0) + 0.5) * HAMMING.on(1, 2) + 2.0 * K.Embedding(TABLE).on(1), mixed),
}
each = pytest.mark.parametrize("name", mostly_long(["mixed"], KERNELS))


def rows(n=9, seed=1):
    r = np.random.default_rng(seed)
    return np.stack([r.normal(size=n), r.integers(0, 3, n), r.integers(0, 2, n)], 1)


@pytest.mark.slow
@each
def test_values(name):
    kernel, scalar = KERNELS[name]
    X, Z = rows(), rows(5, 2)
    np.testing.assert_allclose(kernel(X, Z), gram(scalar, X, Z), rtol=1e-12)
    np.testing.assert_allclose(kernel.diag(X), [scalar(x, x) for x in X], rtol=1e-12)
    np.testing.assert_allclose(kernel(np.stack([X, X[::-1]]), Z)[0], kernel(X, Z), rtol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("name", mostly_long(["hamming"], KERNELS))
@pytest.mark.parametrize("dtype", [pytest.param(np.float64, marks=pytest.mark.long), np.float32])
def test_is_a_kernel(name, dtype):
    dgp.testing.check_kernel(KERNELS[name][0], rows().astype(dtype))


@pytest.mark.long
@pytest.mark.parametrize("name", KERNELS)
def test_features_have_the_kernel_as_covariance(name, key):
    kernel, X, num = KERNELS[name][0], jnp.asarray(rows(6)), 200_000
    features = kernel.features(key, X, num)
    products = features[:, None] * features[None]
    error = products.std(-1) / num**0.5
    assert jnp.abs((products.mean(-1) - kernel.gram(X)) / error).max() < 5


@pytest.mark.slow
def test_gradients_where_categories_coincide():
    X = jnp.asarray(np.vstack([rows(4), rows(4)]))
    total = lambda k, X: k(X, X).sum() + k.diag(X).sum()  # noqa: E731
    by_kernel, by_rows = jax.grad(total, (0, 1))(KERNELS["mixed"][0], X)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(by_kernel))
    assert np.isfinite(by_rows).all()
    np.testing.assert_array_equal(by_rows[:, 1:], 0)  # learned inducing inputs keep their labels


@pytest.mark.slow
def test_compiled_values_of_what_is_no_label_are_nan():
    X = jnp.array([[0.0], [1.0], [1.5], [2.0], [-1.0]])
    good = np.array([True, True, False, False, False])
    for kernel in (K.Categorical(2), K.Embedding(TABLE[:2])):
        at = lambda X, k=kernel: (k(X, X), k.diag(X), k.features(jax.random.key(0), X, 3))  # noqa: E731
        K_, diagonal, features = jax.jit(at)(X)
        np.testing.assert_array_equal(np.isfinite(K_), good[:, None] & good)
        np.testing.assert_array_equal(np.isfinite(diagonal), good)
        np.testing.assert_array_equal(np.isfinite(features).all(1), good)


X3 = rows()
HALF = r"expected labels 0 to 2 in column 0 of its inputs, got 0.5 \(1 such value\(s\)\): name the columns of"


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: K.Categorical(0), r"Categorical: expected levels to be a positive integer, got 0: try int\("),
        (lambda: K.Categorical(()), r"Categorical: expected levels of at least one column, got \(\)"),
        (lambda: K.Categorical(3, -1.0), "Categorical: expected variance to be positive"),
        (lambda: K.Categorical(3, np.ones(2)), "Categorical: expected variance to be a single number"),
        (lambda: K.Categorical(3, 1.0, 1.1), r"a correlation between 0 and 1, got 1.1: give it a B"),
        (lambda: K.Categorical(3, 1.0, np.nan), "Categorical: expected finite correlation, got 1 NaN"),
        (lambda: K.Categorical((3, 2), 1.0, [0.1] * 3), r"a correlation of shape \(\) or \(2,\), got \(3,\): one per"),
        (
            lambda: K.Categorical(3)(X3, X3),
            r"expected 1 column\(s\) of labels, got inputs of shape \(9, 3\): kernel.on",
        ),
        (lambda: jax.jit(K.Categorical(3))(X3, X3), r"Categorical: expected 1 column\(s\) of labels, got inputs"),
        (lambda: K.Categorical(3)([[0.5]], [[1]]), HALF),
        (lambda: K.Categorical(2).on(1).diag(X3), r"labels 0 to 1 in column 1 of its inputs, got 2 .*count them with"),
        (lambda: HAMMING.on(1, 0)(X3, X3), r"expected labels 0 to 1 in column 0 of its inputs, got .* \(9 such value"),
        (lambda: (K.RBF() + 2.0 * K.Embedding(TABLE[:, :1]).on(1))(X3 - [[0, 1, 0]], X3), "got -1 .* -1 in pandas, is"),
        (lambda: K.Embedding(TABLE[:, 0]), r"expected a table of shape \(L, Q\), one row per category, got \(3,\)"),
        (lambda: K.Embedding(TABLE / 0), "expected finite table, got"),
        (lambda: K.Embedding(TABLE, K.RBF), "Embedding: expected a kernel of the places, got type: dgp.kernels.RBF"),
        (lambda: dgp.initial.Standardizer.fit(X3, keep=[3]), r"Standardizer.fit: expected keep to be numbers of colum"),
        (lambda: dgp.initial.kmeans(X3, 2, labels=[True]), r"kmeans: expected labels to be numbers of columns, .*True"),
        (
            lambda: dgp.initial.layers(X3[:, 1:], [1], 2, labels=[0, 1]),
            "expected a numeric column below a hidden layer",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:divide by zero")
def test_bad_input(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_columns_that_keep_their_units():
    X = rows(50)
    units = dgp.initial.Standardizer.fit(X, keep=(1, 2))
    np.testing.assert_array_equal(units(X)[:, 1:], X[:, 1:])
    np.testing.assert_allclose(units(X)[:, 0], dgp.initial.Standardizer.fit(X[:, :1])(X[:, :1])[:, 0], rtol=1e-12)
    np.testing.assert_allclose(units.inverse(units(X)), X, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("columns", [[0, 1, 2], [1, 2], [1]])
def test_centres_of_rows_with_labels_are_rows(columns):
    X = np.round(rows(300), 1)[:, columns]
    labels = [columns.index(d) for d in (1, 2) if d in columns]
    for count in (2, len(np.unique(X, axis=0))):
        Z = dgp.initial.kmeans(X, count, labels=labels)
        assert len(np.unique(Z, axis=0)) == count
        assert {tuple(z) for z in Z} <= {tuple(x) for x in X}


def test_starts_of_layers_with_labels():
    X = rows(80)
    first, last = dgp.initial.layers(X, [2], 6, labels=[1, 2])
    assert {tuple(z) for z in first.Z} <= {tuple(x) for x in X}
    np.testing.assert_array_equal(first.mean(jnp.asarray(X)), np.stack([X[:, 0], np.zeros(80)], 1))
    assert last.Z.shape == (6, 2)


def categories(X, y=None, *, Z, learn=False, noise=None):
    """A function of a number, a label and an hour, below one of its values and the label."""
    correlation = numpyro.sample("correlation", dist.Beta(2.0, 2.0))
    inner = K.RBF().on(0) * K.Categorical(3, 1.0, correlation).on(1) * K.Periodic(period=24.0).on(2)
    places = numpyro.sample("places", dist.Normal(0, 1).expand([3, 2]).to_event(2))
    f = dgp.gp("f", inner, dgp.Points(Z, learn=learn), outputs=1, mean=lambda x: x[..., :1])
    g = dgp.gp("g", K.RBF().on(0) * K.Embedding(places).on(1), dgp.Points(Z[:, :2]))
    with numpyro.plate("data", len(X)):
        h = numpyro.sample("h", f(X, noise=noise))
        x = jnp.concatenate([h, jnp.broadcast_to(X[:, 1:2], h.shape)], -1)
        numpyro.sample("y", dgp.Likelihood(g(x), lambda v: dist.Normal(v, 0.2)), obs=y)


def data(n=40):
    X = np.stack([rng.normal(size=n), rng.integers(0, 3, n), rng.uniform(0, 24, n)], 1)
    y = np.sin(2 * X[:, 0]) * (X[:, 1] - 1) + np.cos(2 * np.pi * X[:, 2] / 24)
    return jnp.asarray(X), jnp.asarray(y)


def losses(guide, X, y, steps, **kwargs):
    svi = SVI(guide.model, guide, optax.adam(0.02), dgp.ELBO())
    return dgp.fit(svi, jax.random.key(0), steps, X, y, progress_bar=False, **kwargs)


@pytest.mark.long
def test_a_deep_program_learns_and_predicts_with_labels():
    X, y = data()
    Z = dgp.initial.kmeans(X, 15, labels=[1])
    model = lambda X, y=None: categories(X, y, Z=Z, learn=True)  # noqa: E731
    guide = dgp.guides.InducingPoint(model)
    result = losses(guide, X, y, 80)
    assert result.losses[-10:].mean() < result.losses[:10].mean() - 20
    np.testing.assert_array_equal(result.params["f_Z"][:, 1], Z[:, 1])
    assert np.abs(result.params["f_Z"][:, 0] - Z[:, 0]).max() > 0.01
    posterior = dgp.Posterior(model, guide, result.params)
    assert np.isfinite(posterior.predict(jax.random.key(1), X[:5]).mean).all()
    with pytest.raises(ValueError, match="expected labels 0 to 2 in column 1 of its inputs, got 3"):
        posterior.predict(jax.random.key(1), X[:5].at[2, 1].set(3.0))
    draws = posterior.using(num_samples=3).functions(jax.random.key(2))(X[:5])
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(draws))


@pytest.mark.long
@pytest.mark.parametrize(
    ("guide", "noise"),
    [
        (dgp.guides.MeanField, None),
        (lambda m: dgp.guides.InducingPoint(m, inducing=dgp.guides.GlobalInducing(10, labels=[1])), None),
        (dgp.guides.Collapsed, 0.3),
        (lambda m: dgp.guides.Collapsed(m, integrate=dgp.likelihoods.MonteCarlo(20, jax.random.key(1))), 0.3),
    ],
)
def test_guides_that_take_labels(guide, noise):
    X, y = data()
    Z = dgp.initial.kmeans(X, 10, labels=[1])
    result = losses(guide(lambda X, y=None: categories(X, y, Z=Z, noise=noise)), X, y, 3)
    assert np.isfinite(result.losses).all()
    if "auto_pseudo_inputs" in result.params:
        labels = result.params["auto_pseudo_inputs"][:, 1]
        np.testing.assert_array_equal(labels % 1, 0)


@pytest.mark.long
def test_a_chain_takes_labels():
    X, y = data()
    Z = dgp.initial.kmeans(X, 10, labels=[1])
    program = dgp.for_mcmc(lambda X, y=None: categories(X, y, Z=Z))
    info = initialize_model(jax.random.key(0), program, model_args=(X, y))
    gradient = jax.grad(info.potential_fn)(info.param_info.z)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))
    with pytest.raises(ValueError, match="expected labels 0 to 2 in column 1 of its inputs"):
        initialize_model(jax.random.key(0), program, model_args=(X + 0.1, y))


@pytest.mark.long
@pytest.mark.parametrize(
    ("guide", "message"),
    [
        (
            lambda m: dgp.guides.InducingPoint(m, inducing=dgp.guides.GlobalInducing(7)),
            r"labels 0 to 2 .*GlobalInducing\(M, labels=",
        ),
        (
            lambda m: dgp.guides.InducingPoint(m, inducing=dgp.guides.GlobalInducing(7, labels=[9])),
            "GlobalInducing: expected labels to be numbers",
        ),
    ],
)
def test_guides_that_refuse_labels(guide, message):
    X, y = data()
    Z = dgp.initial.kmeans(X, 10, labels=[1])

    def model(X, y=None):
        f = dgp.gp("f", K.RBF().on(0), dgp.Points(Z), outputs=1)
        g = dgp.gp("g", K.RBF().on(0) * K.Categorical(3).on(1), dgp.Points(Z[:, :2]))
        with numpyro.plate("data", len(X)):
            h = numpyro.sample("h", f(X, noise=0.1))
            x = jnp.concatenate([h, X[:, 1:2]], -1)
            numpyro.sample("y", dgp.Likelihood(g(x), lambda v: dist.Normal(v, 0.2)), obs=y)

    with pytest.raises(ValueError, match=message):
        losses(guide(model), X, y, 2)


@pytest.mark.long
def test_standardised_labels_are_refused():
    X, _ = data()
    Z = dgp.initial.kmeans(X, 10, labels=[1])
    wrong = [(dgp.initial.Standardizer.fit(X)(X), Z), (X, dgp.initial.kmeans(X, 10))]
    for X, Z in wrong:
        with pytest.raises(ValueError, match=r"expected labels 0 to 2 .*Standardizer.fit\(X, keep="):
            numpyro.handlers.seed(categories, 0)(X, Z=Z)


@pytest.mark.long
def test_standardised_labels_are_refused_before_a_fit():
    X, y = data()
    Z = dgp.initial.kmeans(X, 10, labels=[1])
    guide = dgp.guides.InducingPoint(lambda X, y=None: categories(X, y, Z=Z))
    with pytest.raises(ValueError, match=r"expected labels 0 to 2 .*Standardizer.fit\(X, keep="):
        losses(guide, dgp.initial.Standardizer.fit(X)(X), y, 2)


@pytest.mark.slow
def test_no_grid_of_labels():
    with (
        numpyro.handlers.seed(rng_seed=0),
        pytest.raises(ValueError, match="Categorical has no spectral density: expected a stationary kernel"),
    ):
        dgp.gp("f", K.Categorical(3), dgp.Grid(0.0, 3.0, 8))


def with_gaps(X, y=None, gone=None):
    """A number that may be missing, drawn in its place, and a label."""
    f = dgp.gp(
        "f", K.RBF().on(0) * K.Categorical(3).on(1), dgp.Points(np.stack([np.linspace(-2, 2, 9), [0, 1, 2] * 3], 1))
    )
    with numpyro.plate("data", len(X)):
        if gone is not None:
            w = dgp.latent("w", None, 1)[..., 0]
            number = jnp.where(gone, w, X[:, 0])
            X = jnp.stack([number, jnp.broadcast_to(X[:, 1], number.shape)], -1)
        numpyro.sample("y", dgp.Likelihood(f(X), lambda v: dist.Normal(v, 0.3)), obs=y)


@pytest.mark.long
def test_numbers_that_are_missing_are_latents():
    X, y = data(20)
    X, gone = X[:, :2], jnp.arange(20) % 3 == 0
    other = X.at[:, 0].set(jnp.where(gone, 100.0, X[:, 0]))
    found = {}
    for latent in (dgp.guides.Normal(), dgp.guides.Quadrature(40)):
        guide = dgp.guides.InducingPoint(with_gaps, latent=latent)
        results = [
            dgp.fit(
                SVI(with_gaps, guide, optax.adam(0.05), dgp.ELBO()),
                jax.random.key(0),
                60,
                x,
                y,
                gone,
                progress_bar=False,
            )
            for x in (X, other)
        ]
        np.testing.assert_array_equal(results[0].losses, results[1].losses)  # what stands there is not looked at
        found[type(latent)] = results[0].losses[-20:].mean()
    assert found[dgp.guides.Quadrature] < found[dgp.guides.Normal] + 0.5
    # A prediction is the mixture over what may be missing.
    result = results[0]
    posterior = dgp.Posterior(with_gaps, guide, result.params)
    row, label = X[:1], jnp.ones(1, bool)
    mixed = posterior.using(num_samples=4000).log_density(jax.random.key(1), y[:1], row, gone=label)
    w = np.linspace(-5, 5, 401)
    rows = jnp.stack([jnp.asarray(w), jnp.full(401, row[0, 1])], 1)
    at = posterior.using(num_samples=1).log_density(jax.random.key(1), jnp.full(401, y[0]), rows)
    expected = np.log((np.exp(at) * np.exp(-0.5 * w**2) / np.sqrt(2 * np.pi)).sum() * (w[1] - w[0]))
    np.testing.assert_allclose(mixed[0], expected, atol=0.1)


@pytest.mark.long
def test_groups_have_lengthscales_of_their_own():
    """Within a group an RBF with its lengthscale, between groups nothing, and a slope by every lengthscale."""
    lengthscales = jnp.array([0.3, 1.0, 2.0])
    X = jnp.stack([jnp.linspace(0, 2, 9), jnp.arange(9.0) % 3], 1)

    def gram_of(lengthscales):
        scaled = K.Transformed(
            K.VaryingLengthscale(K.RBF(2.0)),
            lambda s, X: jnp.stack([X[..., 0], s[X[..., 1].astype(int)]], -1),
            jnp.log(lengthscales),
        )
        return (scaled * K.Categorical(3, correlation=0.0).on(1)).gram(X)

    for g, lengthscale in enumerate(lengthscales):
        rows = np.flatnonzero(X[:, 1] == g)
        expected = np.zeros((3, 9))
        expected[:, rows] = K.RBF(2.0, lengthscale)(X[rows, :1], X[rows, :1])
        np.testing.assert_allclose(gram_of(lengthscales)[rows], expected, rtol=1e-12)
    assert (jax.grad(lambda s: jnp.square(gram_of(s)).sum())(lengthscales) > 0).all()
