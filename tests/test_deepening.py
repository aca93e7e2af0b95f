"""``dgp.initial.deepen``: a deeper program that begins at the fit of a shallower one, and what cannot."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.distributions import constraints
from numpyro.infer import SVI
from numpyro.infer.autoguide import AutoMultivariateNormal, AutoNormal
from programs import draws_of_bound

import numpyro_dgp as dgp

rng = np.random.default_rng(0)
X = jnp.array(np.sort(rng.uniform(-2, 2, (40, 1)), 0))
Y = jnp.sign(X[:, 0]) + 0.1 * jnp.array(rng.normal(size=40))
Z = np.linspace(-2, 2, 9)[:, None]
KEY = jax.random.key(0)


def program(
    depth,
    *,
    variance=True,
    mean=dgp.means.IdentityMean(),
    width=1,
    first="f0",
    learn=False,
    jitter=None,
    Z=Z,
    rows=False,
    priors=True,
):
    """Layers ``f0``, ``f1``, ...: a new one is the first; the variances of inner ones are parameters.

    With ``rows`` the last one has values (N, 1), as the others have. Without ``priors`` no number has one.
    """

    def positive(name, prior, shape=()):
        if priors:
            return numpyro.sample(name, prior.expand(shape).to_event(len(shape)))
        return numpyro.param(name, jnp.exp(jnp.full(shape, prior.loc)), constraint=constraints.positive)

    def model(X, y=None, batch=None):
        noise = positive("noise", dist.LogNormal(-1.5, 0.5))
        functions = []
        for i in range(depth):
            last, name = i == depth - 1, first if i == 0 else f"f{i}"
            size = numpyro.param(f"variance{i}", 1.0, constraint=constraints.positive) if variance or last else 0.3
            scale = positive(f"lengthscale{i}", dist.LogNormal(0.0, 0.5), (1,))
            points = dgp.Points(np.tile(Z, (1, width if i else 1)), learn=learn)
            layer = {"outputs": 1 if rows else None} if last else {"outputs": width, "mean": mean}
            functions.append(dgp.gp(name, dgp.kernels.RBF(size, scale), points, **layer))
        with numpyro.plate("data", len(X), subsample_size=batch) as index:
            h = X[index]
            for i, f in enumerate(functions[:-1]):
                h = numpyro.sample(f"h{i}", f(h, noise=jitter))
            seen = jnp.shape(index) + (1,) * rows
            likelihood = dgp.Likelihood(functions[-1](h), lambda v: dist.Normal(v, noise).to_event(int(rows)))
            numpyro.sample("y", likelihood, obs=None if y is None else y[index].reshape(seen))

    return model


def renamed(depth):
    """Names with ``depth`` layers, those with one less."""
    names = {f"{site}{i}": f"{site}{i - 1}" for site in ("f", "variance", "lengthscale") for i in range(1, depth)}
    return names | {f"h{i}": f"h{i - 1}" for i in range(1, depth - 1)}


def fit(model, guide, steps, *args, start=None):
    svi = SVI(model, guide, optax.adam(optax.cosine_decay_schedule(0.03, steps)), dgp.ELBO())
    result = dgp.fit(svi, KEY, steps, X, Y, *args, init_params=start, progress_bar=False)
    return dgp.Posterior(model, guide, result.params)


def deepen(posterior, depth, *args, guide=dgp.guides.InducingPoint, names=None, **kwargs):
    model = program(depth, **kwargs)
    names = renamed(depth) if names is None else names
    return dgp.initial.deepen(posterior, model, guide(model), KEY, X, Y, *args, names=names)


def bounds(posterior):
    return draws_of_bound(dgp.ELBO(), posterior.params, posterior.model, posterior.guide, X, Y, num=200)


def is_not_lower(found, reference, width=3.0):
    error = np.sqrt(np.var(found) / len(found) + np.var(reference) / len(reference))
    return np.mean(found) >= np.mean(reference) - width * error - 1e-3 * abs(np.mean(reference))


def near_the_data(**kwargs):
    """One layer close to the data without a fit of it."""
    model = program(1, **kwargs)
    guide = dgp.guides.InducingPoint(model)
    factor = np.linalg.cholesky(np.asarray(dgp.kernels.RBF()(Z, Z)) + 1e-6 * np.eye(9))
    mean = np.linalg.solve(factor, np.tanh(3 * Z[:, 0]))
    params = {"f0_auto_loc": mean, "f0_auto_scale_tril": 0.1 * np.eye(9)}
    params = {name: value[None] if kwargs.get("rows") else value for name, value in params.items()}
    numbers = {"variance0": 1.0, "lengthscale0_auto_loc": np.ones(1), "noise_auto_loc": 0.2}
    return dgp.Posterior(model, guide, {name: jnp.asarray(value) for name, value in (params | numbers).items()})


@pytest.fixture(scope="module")
def shallow():
    return near_the_data()


@pytest.mark.long
def test_begins_at_the_fit(shallow):
    """Parameters are taken over, q(v) of the new layer is the prior, and of its own numbers only the variance moves."""
    start = deepen(shallow, 2)
    sources = {"f1_auto_loc": "f0_auto_loc", "variance1": "variance0", "noise_auto_loc": "noise_auto_loc"}
    for name, source in sources.items():
        np.testing.assert_array_equal(start.params[name], shallow.params[source])
    np.testing.assert_array_equal(start.params["f0_auto_loc"], np.zeros((1, 9)))
    np.testing.assert_array_equal(start.params["f0_auto_scale_tril"], np.eye(9)[None])
    np.testing.assert_allclose(start.params["lengthscale0_auto_loc"], [1.0], rtol=0.1)  # the median of the prior
    np.testing.assert_allclose(start.params["variance0"], start.variance, rtol=1e-3)
    assert 1e-8 < start.variance < 0.1  # the largest that costs nothing: it must be able to grow
    assert start.bound >= start.fitted - 4 * start.error - 0.01


def wrong(name, match, build):
    return pytest.param(build, match, id=name)


@pytest.mark.parametrize(
    ("build", "match"),
    [
        wrong(
            "no names",
            r"'f0_auto_loc' to have the shape of 'f0_auto_loc' of the fit, \(9,\), got \(1, 9\): map layers by names",
            lambda s: deepen(s, 2, names={}),
        ),
        wrong(
            "no names, where all layers have the same shapes",
            "expected new layers below the last one, got 'f1', which is under the likelihood",
            lambda s: deepen(near_the_data(rows=True), 2, names={}, rows=True),
        ),
        wrong(
            "an unknown name",
            r"names of sites or parameters of the deeper program in names, got 'scale1' \(nearest: 'lengthscale1'\)",
            lambda s: deepen(s, 2, names={"scale1": "lengthscale0"}),
        ),
        wrong("a name twice", "fitted program once in names", lambda s: deepen(s, 2, names={"f1": "f0", "f0": "f0"})),
        wrong(
            "a forgotten layer",
            "every site of the fitted program in the deeper one, got none for 'f0'",
            lambda s: deepen(s, 2, names={}, first="g0"),
        ),
        wrong(
            "no new layer",
            r"a layer that the fitted program does not have, got the new sites \[\]",
            lambda s: deepen(s, 1),
        ),
        wrong(
            "another number of inducing points",
            r"expected 'f1_auto_loc' to have the shape of 'f0_auto_loc' of the fit, \(9,\), got \(7,\)",
            lambda s: deepen(s, 2, Z=Z[:7]),
        ),
        wrong(
            "other rules",
            "expected a parameter 'f0_auto_scale' in the fit, for 'f1_auto_scale', got none: take guides with the same",
            lambda s: deepen(s, 2, guide=lambda m: dgp.guides.InducingPoint(m, inducing=dgp.guides.Diagonal())),
        ),
        wrong(
            "hidden values with a posterior",
            r"values of a new layer that follow the model, got 'h0' with another posterior: give it sites=",
            lambda s: deepen(s, 2, guide=lambda m: dgp.guides.MeanField(m, inducing=dgp.guides.Full())),
        ),
        wrong(
            "a guide of NumPyro",
            "a guide of dgp.guides for the deeper model, got AutoNormal",
            lambda s: deepen(s, 2, guide=AutoNormal),
        ),
        wrong(
            "draws",
            "a Posterior with a guide of dgp.guides, got Posterior of NoneType",
            lambda s: deepen(dgp.Posterior(s.model, samples={"noise": np.ones(2)}), 2),
        ),
        wrong("parameters", "a Posterior with a guide of dgp.guides, got dict", lambda s: deepen(s.params, 2)),
        wrong("names as a list", "expected names as a dict .*, got list", lambda s: deepen(s, 2, names=["f0"])),
    ],
)
def test_refusals(shallow, build, match):
    with pytest.raises(ValueError, match=match):
        build(shallow)


@pytest.mark.long
@pytest.mark.parametrize(
    ("build", "match"),
    [
        wrong(
            "no mean",
            "layer 'f1' to have the inputs of 'f0' in the fitted program when the new layer is at its mean, got inputs "
            "that differ by up to .*: give 'f0' mean=dgp.means.IdentityMean",
            lambda s: deepen(s, 2, mean=None),
        ),
        wrong(
            "another width",
            r"to have the inputs of 'f0' in the fitted program, of shape \(40, 1\), got \(40, 2\): give 'f0'",
            lambda s: deepen(s, 2, width=2, mean=dgp.means.LinearMean(np.ones((1, 2)))),
        ),
        wrong("other inducing inputs", "to have the inducing inputs of 'f0'", lambda s: deepen(s, 2, Z=Z + 0.1)),
        wrong(
            "a fixed variance",
            "expected a variance of the new layer 'f0' that can start small, got one that no positive",
            lambda s: deepen(s, 2, variance=False),
        ),
        wrong(
            "fixed process noise",
            "expected a bound that is not lower than that of the fit, .* at a variance of 0.25",
            lambda s: deepen(s, 2, jitter=0.5),
        ),
    ],
)
def test_refusals_that_take_values(shallow, build, match):
    with pytest.raises(ValueError, match=match):
        build(shallow)


@pytest.mark.long
def test_depth_is_not_worse():
    """One layer, deepened twice: no start is below the fit it comes from, nor is the fit that begins there."""
    below = fit(model := program(1, priors=False), dgp.guides.InducingPoint(model), 600)
    for depth in (2, 3):
        start = deepen(below, depth, priors=False)
        assert start.densities == 0
        model = program(depth, priors=False)
        guide, reference = dgp.guides.InducingPoint(model), bounds(below)
        assert is_not_lower(bounds(dgp.Posterior(model, guide, start.params)), reference)
        below = fit(model, guide, 300, start=start.params)
        assert is_not_lower(bounds(below), reference)


@pytest.mark.long
@pytest.mark.parametrize(
    "guide",
    [
        lambda m, new: dgp.guides.InducingPoint(m, other=dgp.guides.Normal()),
        lambda m, new: dgp.guides.InducingPoint(m, other=AutoNormal),
        lambda m, new: dgp.guides.MeanField(m, sites={name: dgp.guides.Propagate() for name in new}),
    ],
    ids=["normal", "auto", "mean-field"],
)
def test_other_guides(guide):
    models = program(1, learn=True), program(2, learn=True)
    posterior = fit(models[0], guide(models[0], []), 100, 20)
    start = dgp.initial.deepen(posterior, models[1], guide(models[1], ["h0"]), KEY, X, Y, 20, names=renamed(2))
    assert start.bound >= start.fitted - 4 * start.error - 0.01
    np.testing.assert_array_equal(start.params["f1_Z"], posterior.params["f0_Z"])


@pytest.mark.long
def test_refuses_hyperparameters_that_share_a_guide():
    guide = lambda m: dgp.guides.InducingPoint(m, other=AutoMultivariateNormal)  # noqa: E731
    with pytest.raises(ValueError, match=r"to have the shape of 'auto_loc' of the fit, .* the same rules"):
        deepen(fit(model := program(1), guide(model), 2), 2, guide=guide)


@pytest.mark.long
def test_latents():
    """LV-GP, importance weighted, deepened to LV-GP-GP."""

    def latent(deep):
        def model(X, y=None):
            points = dgp.Points(np.random.default_rng(0).normal(size=(12, 2)))
            g = dgp.gp("g", dgp.kernels.RBF(), points)
            if deep:
                variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0))
                f = dgp.gp("f", dgp.kernels.RBF(variance), points, outputs=2, mean=dgp.means.IdentityMean())
            with numpyro.plate("data", len(X)):
                x = dgp.latent("w", X, 1)
                h = numpyro.sample("h", f(x)) if deep else x
                numpyro.sample("y", dgp.Likelihood(g(h), lambda v: dist.Normal(v, 0.2)), obs=y)

        return model, dgp.guides.ImportanceWeighted(model, num_samples=5)

    posterior = fit(*latent(False), 200)
    start = dgp.initial.deepen(posterior, *latent(True), KEY, X, Y)
    assert start.bound >= start.fitted - 4 * start.error - 0.01
    np.testing.assert_array_equal(start.params["w_auto_loc"], posterior.params["w_auto_loc"])
    assert start.params["variance_auto_loc"] < 0.1
    density = dist.LogNormal(0.0, 1.0).log_prob(start.params["variance_auto_loc"])
    assert start.densities == pytest.approx(float(density), rel=1e-5)


def carrying(depth):
    """A latent, and inner layers whose three functions are mixed into the columns of X; the latent is handed on.

    Parameters are named after the layers that they belong to.
    """
    mixing = jnp.array([[1.0], [0.5], [0.2]])

    def model(X, y=None, batch=None):
        functions = []
        for i in range(depth):
            name = "last" if i == depth - 1 else f"f{i}"
            size = numpyro.param(f"{name}_variance", 1.0, constraint=constraints.positive)
            points = dgp.Points(np.random.default_rng(0).normal(size=(12, 2)), learn=True)
            functions.append(dgp.gp(name, dgp.kernels.RBF(size), points, outputs=None if i == depth - 1 else 3))
        noise = numpyro.param("noise", 0.2, constraint=constraints.positive)
        with numpyro.plate("data", len(X), subsample_size=batch) as rows:
            h = dgp.latent("w", X[rows], 1)
            for i, f in enumerate(functions[:-1]):
                h = jnp.concatenate([h[..., :1] + numpyro.sample(f"h{i}", f(h)) @ mixing, h[..., 1:]], -1)
            likelihood = dgp.Likelihood(functions[-1](h), lambda v: dist.Normal(v, noise))
            numpyro.sample("y", likelihood, obs=None if y is None else y[rows])

    return model


@pytest.mark.long
def test_a_latent_that_is_handed_on():
    """Amortised proposals, weights, minibatches, functions that are mixed: LV-GP-GP begins at the bound of LV-GP, and
    after some steps its bound is not lower."""

    def guide(model):
        latent = dgp.guides.Amortised(hidden=(8,))
        return dgp.guides.ImportanceWeighted(model, num_samples=5, latent=latent, doubly_reparameterised=True)

    models = carrying(1), carrying(2)
    posterior = fit(models[0], guide(models[0]), 300, 20)
    start = dgp.initial.deepen(posterior, models[1], guide(models[1]), KEY, X, Y, 20)
    assert 1e-9 < start.variance < 0.5
    assert start.bound >= start.fitted - 4 * start.error - 0.01
    np.testing.assert_array_equal(start.params["last_variance"], posterior.params["last_variance"])
    np.testing.assert_array_equal(start.params["w_auto_W0"], posterior.params["w_auto_W0"])
    began = dgp.Posterior(models[1], guide(models[1]), start.params)
    assert is_not_lower(bounds(began), bounds(posterior))
    assert is_not_lower(bounds(fit(models[1], guide(models[1]), 200, 20, start=start.params)), bounds(posterior))
