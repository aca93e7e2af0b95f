"""Patches of images, the kernel of sums over them, inducing patches, and layers of patches below others."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro import handlers
from numpyro.infer import MCMC, NUTS, SVI, Trace_ELBO
from programs import agree, draws_of_bound, random_params
from sizes import mostly_long, tune

import numpyro_dgp as dgp
from numpyro_dgp import guides as G
from numpyro_dgp.analysis.program import inspect_program

rng = np.random.default_rng(0)
RBF = dgp.kernels.RBF(1.3, 1.5)
PATCHES = dgp.kernels.Patches((3, 3), (2, 2))
PLACED = dgp.kernels.Patches((5, 6, 2), (2, 3), stride=2, places=True)
WEIGHTS = np.array([0.5, 1.0, -0.3, 0.7])
KERNEL = dgp.kernels.Convolutional(RBF, PATCHES, WEIGHTS)
IMAGES = rng.normal(size=(7, 9))
ALL = np.asarray(PATCHES(IMAGES)).reshape(-1, 4)
NOISE = 0.3
X, Y = jnp.asarray(IMAGES), jnp.asarray(rng.normal(size=7))


def taken_apart(images, patches):
    """Patches (N, R, D), one at a time."""
    (h, w), s = patches.patch, patches.stride
    pictures = np.asarray(images).reshape(len(images), *patches.image)
    found = []
    for row in range(0, patches.image[0] - h + 1, s):
        for column in range(0, patches.image[1] - w + 1, s):
            numbers = pictures[:, row : row + h, column : column + w].reshape(len(images), -1)
            place = np.tile([row, column], (len(images), 1))[:, : 2 * patches.places]
            found.append(np.concatenate([numbers, place], 1))
    return np.stack(found, 1)


def summed(k, A, B, w):
    """Sums over pairs of patches A (N, R, D) and B (M, R, D), one pair at a time."""
    return np.array(
        [[sum(w[r] * w[q] * k(a[r], b[q]) for r in range(len(w)) for q in range(len(w))) for b in B] for a in A]
    )


def rbf(x, z):
    return 1.3 * np.exp(-0.5 * np.square(x - z).sum() / 1.5**2)


def placed(x, z):
    return rbf(x[:12], z[:12]) * np.exp(-0.5 * np.square(x[12:] - z[12:]).sum() / 2.0**2)


def model(X, y=None, *, inducing=None, kernel=KERNEL, outputs=None):
    f = dgp.gp("f", kernel, inducing or dgp.functions.InducingPatches(jnp.asarray(ALL, X.dtype)), outputs=outputs)
    with numpyro.plate("images", len(X)):
        numpyro.sample("y", dgp.Likelihood(f(X), lambda v: dist.Normal(v, NOISE)), obs=y)


def opened(kernel=KERNEL, Z=ALL[:5], outputs=None):
    with handlers.seed(rng_seed=0):
        return dgp.gp("f", kernel, dgp.functions.InducingPatches(Z), outputs=outputs)


@pytest.mark.smoke
@pytest.mark.parametrize("patches", [PATCHES, PLACED, dgp.kernels.Patches((4, 5, 3), (3, 1))])
def test_patches_are_windows(patches):
    images = rng.normal(size=(2, 3, patches.pixels))
    found = patches(images)
    assert found.shape == (2, 3, patches.count, patches.size)
    assert patches.count == np.prod(patches.grid)
    np.testing.assert_array_equal(found[1], taken_apart(images[1], patches).astype(found.dtype))


def test_the_values_of_a_layer_are_an_image():
    """Values (N, R, C), flattened, have their places where the patches of the layer above look for them."""
    C = 3
    above = dgp.kernels.Patches((*PLACED.grid, C), (1, 2))
    h = rng.normal(size=(4, PLACED.count, C))
    wanted = h.reshape(4, *PLACED.grid, C)[:, :, 0:2].reshape(4, 2, -1)
    np.testing.assert_allclose(above(h.reshape(4, -1)), wanted.astype(np.float32))


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("dtype", mostly_long(["float64"], ["float32", "float64"]))
def test_kernel_is_the_sum_over_pairs_of_patches(dtype, blocks, monkeypatch):
    """At once, and in blocks of images: no two shapes are the same, since a compiled kernel would serve both."""
    if blocks:
        tune(monkeypatch, cells=40)
    with jax.enable_x64(dtype == "float64"):
        images = IMAGES[blocks:].astype(dtype)
        assert ("scan" in str(jax.make_jaxpr(KERNEL)(images, images))) == blocks
        A, tolerance = taken_apart(images, PATCHES), 1e-5 if dtype == "float32" else 1e-13
        wanted = summed(rbf, A, A, WEIGHTS)
        found = KERNEL(images, images[:5])
        assert found.dtype == dtype
        np.testing.assert_allclose(found, wanted[:, :5], atol=tolerance)
        np.testing.assert_allclose(KERNEL.diag(images), np.diag(wanted), atol=tolerance)
        mean = dgp.kernels.Convolutional(RBF, PATCHES)
        np.testing.assert_allclose(mean.diag(images), np.diag(summed(rbf, A, A, np.full(4, 0.25))), atol=tolerance)


def test_kernel_sees_places():
    kernel = RBF.on(*range(12)) * dgp.kernels.RBF(1.0, 2.0).on(12, 13)
    images = rng.normal(size=(3, 60))
    A = taken_apart(images, PLACED)
    found = dgp.kernels.Convolutional(kernel, PLACED, WEIGHTS)(images, images)
    np.testing.assert_allclose(found, summed(placed, A, A, WEIGHTS), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_kernel_is_the_covariance_of_sums_of_responses():
    """Responses linear in a patch, with explicit features, and the images of a batch."""
    kernel = dgp.kernels.Convolutional(dgp.kernels.Linear(0.7), PATCHES, WEIGHTS)
    phi = np.einsum("nrd,r->nd", taken_apart(IMAGES, PATCHES), WEIGHTS)
    np.testing.assert_allclose(kernel(IMAGES, IMAGES), 0.7 * phi @ phi.T, rtol=1e-4, atol=1e-5)
    batch = IMAGES[:6].reshape(2, 3, 9)
    np.testing.assert_allclose(kernel(batch, batch)[1], kernel(batch[1], batch[1]), atol=1e-5)
    np.testing.assert_allclose(kernel.diag(batch), kernel.diag(IMAGES[:6]).reshape(2, 3), atol=1e-5)


@pytest.mark.long
def test_kernel_keeps_the_promises_of_kernels():
    dgp.testing.check_kernel(KERNEL, IMAGES)
    key = jax.random.key(0)
    wanted = jnp.einsum("nrf,r->nf", RBF.features(key, PATCHES(X), 50), WEIGHTS)
    np.testing.assert_allclose(KERNEL.features(key, X, 50), wanted, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("blocks", mostly_long([True], [False, True]))
def test_features_are_covariances_with_whitened_responses(blocks, monkeypatch):
    """Against the dense joint covariance of the function and its responses, also for a multiple of a kernel."""
    if blocks:
        tune(monkeypatch, cells=60)
    with jax.enable_x64(True):
        f, A = opened(2.0 * KERNEL, ALL[:6]), taken_apart(IMAGES, PATCHES)
        cross = np.array(
            [[sum(w * 2 * rbf(p, z) for w, p in zip(WEIGHTS, a, strict=True)) for z in ALL[:6]] for a in A]
        )
        L = np.linalg.cholesky([[2 * rbf(z, s) for s in ALL[:6]] for z in ALL[:6]])
        wanted = cross @ np.linalg.inv(L).T
        np.testing.assert_allclose(f.features(X), wanted, atol=1e-8)
        C = 2 * summed(rbf, A, A, WEIGHTS) - wanted @ wanted.T
        np.testing.assert_allclose(f.joint(X).conditional_covariance[0], C, atol=1e-8)
        np.testing.assert_allclose(f(X).variance, np.diag(C), atol=1e-8)


@pytest.mark.long
def test_slopes_along_a_pixel():
    f = opened()
    slopes = jax.vmap(jax.grad(lambda x: f(x[None]).mean[0]))(X)[:, 4]
    np.testing.assert_allclose(f.grad(X, 4).mean, slopes, atol=1e-5)


@pytest.mark.long
def test_outputs_may_differ():
    """A kernel with weights of its own for every output, and separate inducing patches."""
    kernels = [KERNEL, dgp.kernels.Convolutional(RBF, PATCHES)]
    Z = np.stack([ALL[:5], ALL[5:10]])
    for given, points in ((kernels, Z[0]), (kernels, Z), (KERNEL, Z)):
        f = opened(given, points, outputs=2)
        for p in range(2):
            kernel = given[p] if isinstance(given, list) else given
            alone = opened(kernel, points if points.ndim == 2 else points[p])
            np.testing.assert_allclose(f.features(X)[p], alone.features(X), atol=1e-5)
            np.testing.assert_allclose(f(X).variance[:, p], alone(X).variance, atol=1e-5)


@pytest.mark.slow
def test_responses_to_all_patches_leave_nothing_open():
    with jax.enable_x64(True):
        X = jnp.asarray(IMAGES)
        v = jax.random.normal(jax.random.key(1), (len(ALL),))
        f = handlers.substitute(lambda: dgp.gp("f", KERNEL, dgp.functions.InducingPatches(ALL)), {"f": v})()
        np.testing.assert_allclose(f.joint(X).conditional_covariance, 0.0, atol=1e-8)
        np.testing.assert_allclose(f(X).mean, f.responses(PATCHES(X)).mean @ WEIGHTS, atol=1e-8)


@pytest.mark.long
def test_the_best_bound_with_all_patches_is_the_evidence():
    with jax.enable_x64(True):
        X, y = jnp.asarray(IMAGES), jnp.asarray(Y, float)
        cov = KERNEL.gram(X) + NOISE**2 * jnp.eye(len(X))
        guide = G.Collapsed(model)
        bound = -dgp.ELBO().loss(jax.random.key(0), {}, model, guide, X, y)
        np.testing.assert_allclose(bound, dist.MultivariateNormal(jnp.zeros(len(X)), cov).log_prob(y), rtol=1e-8)


def test_inducing_patches_of_images():
    found = dgp.initial.inducing_patches(IMAGES, PATCHES, 6)
    assert found.shape == (6, 4)
    everything = dgp.initial.inducing_patches(np.arange(60.0)[None], PLACED, 4)
    np.testing.assert_allclose(everything, taken_apart(np.arange(60.0)[None], PLACED)[0], rtol=1e-6)


def hidden(how, noise=0.1):
    """Two convolutional layers: values of the first, two at each of four patches, are the image of the second."""
    above = dgp.kernels.Patches((2, 2, 2), (2, 1))
    Z = jnp.asarray(rng.normal(size=(5, above.size)))

    def model(X, y=None):
        f = dgp.gp("f", RBF, dgp.Points(jnp.asarray(ALL[:6], X.dtype)), outputs=2, mean=lambda x: x[..., :2])
        g = dgp.gp("g", dgp.kernels.Convolutional(RBF, above), dgp.functions.InducingPatches(Z.astype(X.dtype)))
        with numpyro.plate("images", len(X)):
            if how == "joint":
                h = numpyro.sample("h", f.joint(PATCHES(X), noise=noise))
            elif how == "event":
                h = numpyro.sample("h", f(PATCHES(X), noise=noise).to_event(1))
            else:
                with numpyro.plate("patches", PATCHES.count):
                    h = numpyro.sample("h", f(jnp.moveaxis(PATCHES(X), -2, 0), noise=noise))
                h = jnp.moveaxis(h, -3, -2)
            likelihood = dgp.Likelihood(g(h.reshape(*h.shape[:-2], -1)), lambda v: dist.Normal(v, NOISE))
            numpyro.sample("y", likelihood, obs=y)

    return model


@pytest.mark.parametrize("how", ["joint", "event", "plate"])
def test_patches_of_an_image_are_seen_together(how):
    """Joint values may be integrated; values drawn patch by patch need one draw of the function."""
    assert inspect_program(hidden(how), (X, Y), {}).coupled == (set() if how == "joint" else {"f"})


@pytest.mark.long
@pytest.mark.parametrize("how", ["joint", "event", "plate"])
def test_the_bound_of_a_hidden_layer_is_the_stock_one(how):
    program = hidden(how)
    guide = G.InducingPoint(program)
    params = random_params(program, guide, X, Y)
    ours = draws_of_bound(dgp.ELBO(), params, program, guide, X, Y, num=1000)
    stock = draws_of_bound(Trace_ELBO(), params, program, guide, X, Y, num=4000)
    assert agree(ours, stock), (ours.mean(), stock.mean())
    assert ours.var() < stock.var()


GUIDES = {
    "InducingPoint": G.InducingPoint,
    "MeanField": G.MeanField,
    "GlobalInducing": lambda program: G.InducingPoint(program, inducing=G.GlobalInducing(5)),
}


FITTED = [
    ("InducingPoint", "one"),
    ("MeanField", "one"),
    ("GlobalInducing", "one"),
    ("GlobalInducing", "joint"),
    ("MeanField", "event"),
    ("MeanField", "plate"),
]


@pytest.mark.long
@pytest.mark.parametrize(("name", "how"), FITTED)
def test_guides_fit_and_predict(name, how):
    program = model if how == "one" else hidden(how)
    guide = GUIDES[name](program)
    svi = SVI(program, guide, optax.adam(0.01), dgp.ELBO())
    result = svi.run(jax.random.key(0), 3, X, Y, progress_bar=False)
    assert np.isfinite(result.losses).all()
    batch = 2 if how == "one" else None  # rows are known to be predicted one by one
    prediction = (
        dgp.Posterior(program, guide, result.params)
        .using(num_samples=5, batch_size=batch, progress_bar=False)
        .predict(jax.random.key(1), X[:3])
    )
    assert np.isfinite(prediction.variance).all()


@pytest.mark.long
@pytest.mark.parametrize("how", ["one", "event"])
def test_chains(how):
    program = dgp.for_mcmc(model if how == "one" else hidden(how))
    mcmc = MCMC(NUTS(program, max_tree_depth=3), num_warmup=5, num_samples=5, progress_bar=False)
    mcmc.run(jax.random.key(0), X, Y)
    assert all(np.isfinite(draws).all() for draws in mcmc.get_samples().values())


@pytest.mark.long
def test_guides_refuse_what_they_cannot_integrate():
    def whole_images(X, y=None):
        f = dgp.gp("f", dgp.kernels.RBF(), dgp.Points(X[:3]), outputs=9, mean=dgp.means.IdentityMean())
        g = dgp.gp("g", KERNEL, dgp.functions.InducingPatches(ALL[:5]))
        with numpyro.plate("images", len(X)):
            h = numpyro.sample("h", f(X, noise=0.1))
            numpyro.sample("y", dgp.Likelihood(g(h), lambda v: dist.Normal(v, NOISE)), obs=y)

    for program, match in (
        (hidden("joint", None), "expected process noise at hidden layer 'h'"),
        (hidden("event"), "expected the inputs of the layer at 'y' to be columns"),
        (whole_images, "expected known inputs of layer 'g', a ConvolvedFunction, got Gaussian ones"),
    ):
        with pytest.raises(ValueError, match=f"Collapsed: .*{match}"):
            SVI(program, G.Collapsed(program), optax.adam(0.01), dgp.ELBO()).init(jax.random.key(0), X, Y)
    with handlers.seed(rng_seed=0), pytest.raises(ValueError, match="ImportanceWeighted: expected a model with latent"):
        G.ImportanceWeighted(model, num_samples=3)(X, Y)


@pytest.mark.long
def test_natural_gradients_functions_and_new_data():
    """One natural step is exact; a draw of the function is one function; an update adds what new images say."""
    with jax.enable_x64(True):
        X, y = jnp.asarray(IMAGES), jnp.asarray(Y, float)
        guide = G.InducingPoint(model)
        svi = SVI(model, guide, dgp.optim.NaturalGradient(guide, 1.0, optax.sgd(0.0)), dgp.ELBO())

        def fit(rows):
            result = svi.run(jax.random.key(0), 2, X[rows], y[rows], progress_bar=False)
            return dgp.Posterior(model, guide, result.params)

        whole = fit(slice(None)).predict(jax.random.key(1), X)
        draws = fit(slice(None)).using(num_samples=2000).functions(jax.random.key(1), num_features=300)(X)["y"]
        np.testing.assert_allclose(draws.mean(0), whole.mean, atol=0.15)
        later = dgp.update(fit(slice(4)), jax.random.key(2), X[4:], y[4:], num_steps=1, progress_bar=False)
        assert later.predict(jax.random.key(1), X).mean.shape == (7,)


@pytest.mark.long
def test_digits():
    """Ones, sevens and fours of scikit-learn's digits, 150 for training: fewer errors than guessing, by far."""
    datasets = pytest.importorskip("sklearn.datasets")
    images, labels = datasets.load_digits(return_X_y=True)
    kept = np.isin(labels, (1, 4, 7))
    images, labels = (images[kept] / 16 - 0.3).astype(np.float32), np.searchsorted([1, 4, 7], labels[kept])
    patches = dgp.kernels.Patches((8, 8), (3, 3))
    Z = dgp.initial.inducing_patches(images[:150], patches, 20)

    def digits(X, y=None):
        variance = numpyro.param("variance", 20.0, constraint=dist.constraints.positive)
        w = numpyro.param("w", jnp.full(patches.count, 1 / patches.count))
        kernel = dgp.kernels.Convolutional(dgp.kernels.RBF(variance, 1.0), patches, w)
        f = dgp.gp("f", kernel, dgp.functions.InducingPatches(Z), outputs=3)
        with numpyro.plate("images", len(X)):
            numpyro.sample("y", dgp.Likelihood(f(X), dgp.likelihoods.RobustMax), obs=y)

    guide = G.InducingPoint(digits)
    svi = SVI(digits, guide, optax.adam(0.05), dgp.ELBO())
    result = dgp.fit(svi, jax.random.key(0), 100, images[:150], labels[:150], progress_bar=False)
    probs = dgp.Posterior(digits, guide, result.params).probs(jax.random.key(1), images[150:])
    assert (np.asarray(probs).argmax(-1) != labels[150:]).mean() < 0.1


Z4 = ALL[:5]
WRONG = {
    "no sizes": (lambda: dgp.kernels.Patches(28, (5, 5)), r"Patches: expected image=\(H, W\) or \(H, W, C\), got 28"),
    "a size of zero": (
        lambda: dgp.kernels.Patches((3, 0), (1, 1)),
        "every number of image to be a positive integer, got 0",
    ),
    "no stride": (lambda: dgp.kernels.Patches((3, 3), (2, 2), 0), "stride to be a positive integer, got 0"),
    "large patches": (lambda: dgp.kernels.Patches((3, 3), (2, 4)), r"no larger than the image, \(3, 3\), got \(2, 4\)"),
    "places as numbers": (lambda: dgp.kernels.Patches((3, 3), (2, 2), 1, 2), "places to be True or False, got 2"),
    "images as arrays": (
        lambda: PATCHES(np.ones((2, 3, 3))),
        r"images \(3, 3\) as rows of 9 numbers, got shape \(2, 3,",
    ),
    "a tuple for patches": (
        lambda: dgp.kernels.Convolutional(RBF, (2, 2)),
        r"expected dgp.kernels.Patches.* got tuple",
    ),
    "other weights": (
        lambda: dgp.kernels.Convolutional(RBF, PATCHES, np.ones(9)),
        r"Convolutional: expected weights of shape \(4,\), one per patch, got \(9,\)",
    ),
    "NaN in weights": (
        lambda: dgp.kernels.Convolutional(RBF, PATCHES, np.full(4, np.nan)),
        "finite weights",
    ),
    "other images": (lambda: KERNEL(np.ones((2, 8)), np.ones((2, 8))), "Convolutional: expected images"),
    "f of other images": (lambda: opened()(np.ones((2, 8))), r"expected inputs with D = 9 columns"),
    "patches as points": (
        lambda: dgp.gp("f", KERNEL, dgp.Points(Z4)),
        r"got patches \(5, 4\): pass them as dgp.functions.InducingPatches\(Z\)",
    ),
    "another kernel": (
        lambda: dgp.gp("f", RBF, dgp.functions.InducingPatches(Z4)),
        r"gp 'f': expected a kernel dgp.kernels.Convolutional\(kernel, patches\).* got RBF",
    ),
    "a sum": (
        lambda: dgp.gp("f", KERNEL + RBF, dgp.functions.InducingPatches(Z4)),
        "got Sum: for a sum of kernels of images open a layer",
    ),
    "other patches": (
        lambda: dgp.gp("f", KERNEL, dgp.functions.InducingPatches(IMAGES)),
        r"gp 'f': expected inducing patches Z of 4 columns.*got \(7, 9\)",
    ),
    "several patches": (
        lambda: dgp.gp(
            "f",
            [KERNEL, dgp.kernels.Convolutional(RBF, dgp.kernels.Patches((3, 3), (1, 1)))],
            dgp.functions.InducingPatches(Z4),
            outputs=2,
        ),
        "gp 'f': expected kernels with the same patches for all outputs",
    ),
    "a vector": (lambda: dgp.functions.InducingPatches(ALL[0]), r"InducingPatches: expected Z of shape \(M, D\)"),
    "learn what": (
        lambda: dgp.functions.InducingPatches(ALL, learn=1),
        r"learn to be True or False",
    ),
    "k-means of others": (
        lambda: dgp.initial.inducing_patches(np.ones((2, 8)), PATCHES, 3),
        "initial.inducing_patches: expected images",
    ),
    "too many": (
        lambda: dgp.initial.inducing_patches(np.ones((2, 9)), PATCHES, 3),
        "expected between 1 and 1 inducing points",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_calls(name):
    call, match = WRONG[name]
    with handlers.seed(rng_seed=0), pytest.raises(ValueError, match=match):
        call()
