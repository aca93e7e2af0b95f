"""Latents outside the plates of the rows of which a program uses row n at row n, in predictions at other rows."""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from programs import NOISE, X, Y, Z, random_params

import numpyro_dgp as dgp

N = len(X)
PLANE = jnp.hstack([Z, jnp.sin(9 * Z)])
REFUSED = (
    "Posterior.*: expected sites with a value per row in the plates of the rows, got 'w', of which '{}' uses row n"
)


def latent(size, how):
    """A number per row, outside the plate of the rows."""
    if how == "event":
        return numpyro.sample("w", dist.Normal().expand([size]).to_event(1))
    with numpyro.plate("rows", size):
        return dgp.latent("w", jnp.ones((size, 1)), 1)[:, 1] if how == "latent" else numpyro.sample("w", dist.Normal())


def program(X, y=None, use="added", how="plate", size=None):
    w = latent(len(X) if size is None else size, how)
    f = dgp.gp("f", dgp.kernels.RBF(), dgp.Points(PLANE if use in ("input", "below") else Z), outputs=None)
    g = dgp.gp("g", dgp.kernels.RBF(), dgp.Points(Z))
    with numpyro.plate("data", len(X)) as i:
        x = jnp.stack([X[:, 0], w], 1) if use in ("input", "below") else X
        if use == "below":
            h = numpyro.sample("h", f(x))
            numpyro.sample("y", dgp.Likelihood(g(h[:, None]), lambda v: dist.Normal(v, NOISE)), obs=y)
        elif use == "explicit":
            numpyro.sample("y", dist.Normal(numpyro.sample("v", f(X)) + w, NOISE), obs=y)
        else:
            shift = {"added": w, "input": 0.0, "indexed": w[i]}[use]
            numpyro.sample("y", dgp.Likelihood(f(x), lambda v: dist.Normal(v + shift, NOISE)), obs=y)


def nested(X, y=None):
    f = dgp.gp("f", dgp.kernels.RBF(), dgp.Points(Z))
    with numpyro.plate("data", len(X), dim=-2):
        w = numpyro.sample("w", dist.Normal())
        with numpyro.plate("outputs", 2, dim=-1):
            x = jnp.repeat(X[:, None], 2, 1)
            numpyro.sample("y", dgp.Likelihood(f(x), lambda v: dist.Normal(v + w, NOISE)), obs=y)


def drawn(model, **shapes):
    return dgp.Posterior(model, samples={n: jnp.zeros((2, *s)) for n, s in {"f": (8,), "g": (8,), **shapes}.items()})


@pytest.mark.parametrize("rows", [N, 7, 1])
@pytest.mark.parametrize(
    ("use", "how"),
    [
        ("added", "plate"),
        ("added", "event"),
        ("input", "plate"),
        ("input", "latent"),
        ("indexed", "plate"),
        ("explicit", "plate"),
        ("below", "plate"),
    ],
)
def test_values_of_the_rows_of_the_fit_are_not_used_at_other_rows(use, how, rows, key):
    posterior = drawn(program, w=(N, 1) if how == "latent" else (N,))
    with pytest.raises(ValueError, match=REFUSED.format("h" if use == "below" else "y") + ".*plate.s. 'data', as"):
        posterior.predict(key, X[:rows], use=use, how=how)


def test_a_plate_of_a_fixed_size(key):
    with pytest.raises(ValueError, match=REFUSED.format("y")):
        drawn(program, w=(N,)).predict(key, X, size=N)


@pytest.mark.slow
def test_a_guide_s_values_of_rows(key):
    guide = dgp.guides.InducingPoint(program)
    params = random_params(program, guide, X, Y)
    for method in ("predict", "sample", "hidden", "layers"):
        with pytest.raises(ValueError, match=REFUSED.format("y")):
            getattr(dgp.Posterior(program, guide, params), method)(key, X[:7])


def test_latents_beside_a_plate_of_outputs(key):
    with pytest.raises(ValueError, match=REFUSED.format("y") + ".*plate.s. 'data', 'outputs', as"):
        drawn(nested, w=(N, 1)).predict(key, X)


def of_groups(X, group, y=None, groups=N):
    """As many groups as rows, by accident."""
    f = dgp.gp("f", dgp.kernels.RBF(), dgp.Points(Z))
    with numpyro.plate("groups", groups):
        w = numpyro.sample("w", dist.Normal())
    with numpyro.plate("data", len(X)) as i:
        shift = w[group[i]]
        numpyro.sample("y", dgp.Likelihood(f(X[i]), lambda v: dist.Normal(v + shift, NOISE)), obs=y)


def of_outputs(X, y=None, P=N):
    """A number per output, in a plate of the outputs or as an event, and as many outputs as rows."""
    width = numpyro.sample("width", dist.LogNormal(jnp.zeros(P), 1.0).to_event(1))
    with numpyro.plate("outputs", P, dim=-1):
        noise = numpyro.sample("noise", dist.LogNormal())
    f = dgp.gp("f", dgp.kernels.RBF(), dgp.Points(Z))
    with numpyro.plate("data", len(X), dim=-2), numpyro.plate("outputs", P, dim=-1):
        x = jnp.repeat(X[:, None], P, 1)
        numpyro.sample("y", dgp.Likelihood(f(x), lambda v: dist.Normal(v * width, noise)), obs=y)


def in_the_plate(X, y=None):
    f = dgp.gp("f", dgp.kernels.RBF(), dgp.Points(Z))
    with numpyro.plate("data", len(X)):
        w = numpyro.sample("w", dist.Normal())
        numpyro.sample("y", dgp.Likelihood(f(X), lambda v: dist.Normal(v + w, NOISE)), obs=y)


def scaled(X, y=None):
    """A number per column, and as many columns as rows."""
    scales = numpyro.sample("scales", dist.LogNormal(jnp.zeros(X.shape[1]), 1.0).to_event(1))
    f = dgp.gp("f", dgp.kernels.RBF(1.0, scales), dgp.Points(jnp.ones((8, X.shape[1]))))
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dgp.Likelihood(f(X / scales), lambda v: dist.Normal(v, NOISE)), obs=y)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "args", "shapes"),
    [
        (of_groups, (X, jnp.arange(N)[::-1]), {"w": (N,)}),
        (of_groups, (X[:7], jnp.arange(7)), {"w": (N,)}),
        (of_outputs, (X,), {"width": (N,), "noise": (N,)}),
        (in_the_plate, (X,), {"w": (N,)}),
        (in_the_plate, (X[:1],), {"w": (N,)}),
        (scaled, (jnp.eye(5),), {"scales": (5,)}),
    ],
)
def test_what_data_share_is_taken_from_the_fit(model, args, shapes, key):
    posterior = dgp.Posterior(model, samples={n: jnp.ones((2, *s)) for n, s in {"f": (8,), **shapes}.items()})
    assert set(posterior.layers(key, *args)) == {"y"}


def drawn_exactly(X, y=None):
    v = numpyro.sample("v", dgp.gp("f", dgp.kernels.RBF(), None)(X))
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dist.Normal(v, NOISE), obs=y)


def observed_exactly(X, y=None, inner=False):
    """Under a second exact layer, ``inner``, or alone."""
    scale = numpyro.sample("scale", dist.LogNormal())
    h = numpyro.sample("h", dgp.gp("f", dgp.kernels.RBF(), None, outputs=1)(X)) if inner else X
    numpyro.sample("y", dgp.gp("g", dgp.kernels.RBF(1.0, scale), None)(h, noise=NOISE), obs=y)


EXACT = (
    r"got values without .inducing=None or dgp.Neighbours. at '{}'.* give the data, posterior.on\(X, y\), or the "
    r"layer dgp.Points.X. and y a dgp.Lik"
)


@pytest.mark.parametrize("rows", [N, 7])
@pytest.mark.parametrize("method", ["predict", "hidden", "layers"])
def test_exact_processes_need_the_data_of_the_fit(method, rows, key):
    """At as many rows as in the fit they would be at the inputs of the fit."""
    scales = {"scale": jnp.ones(2)}
    fits = [
        (dgp.Posterior(observed_exactly, samples=scales), "y", {}),
        (dgp.Posterior(observed_exactly, samples=scales, site="y"), "y", {}),
        (dgp.Posterior(observed_exactly, samples=scales | {"h": jnp.zeros((2, N, 1))}), "h|y", {"inner": True}),
    ]
    if method != "layers":
        fits.append((dgp.Posterior(drawn_exactly, samples={"v": jnp.zeros((2, N))}), "v", {}))
    for posterior, name, options in fits:
        with pytest.raises(ValueError, match=EXACT.format(name)):
            getattr(posterior, method)(key, X[:rows], **options)


@pytest.mark.slow
def test_the_advice_for_exact_processes(key):
    f, inputs = dgp.Posterior(drawn_exactly, samples={"v": jnp.sin(X).T}).layers(key, X)["v"]
    np.testing.assert_allclose(f(X).mean, jnp.sin(X[:, 0]), atol=1e-4)
    np.testing.assert_array_equal(inputs, X)
    kernel, new = dgp.kernels.RBF(), jnp.linspace(-2.5, 2.5, 6)[:, None]
    posterior = dgp.Posterior(observed_exactly, samples={"scale": jnp.ones(1)}).on(X, Y)
    found = posterior.predict(key, new)
    weights = jnp.linalg.solve(kernel(X, X) + NOISE**2 * jnp.eye(N), kernel(X, new)).T
    np.testing.assert_allclose(found.mean, weights @ Y, atol=1e-6)
    variance = 1 + NOISE**2 - (weights * kernel(new, X)).sum(1)
    np.testing.assert_allclose(found.variance, variance, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("inducing", [None, dgp.Neighbours(X, N)], ids=["exact", "neighbours"])
@pytest.mark.parametrize("hidden", [False, True])
def test_layers_of_an_exact_process_with_noise(hidden, inducing, key):
    """The function without noise given its noisy values: dense regression."""
    scale = 0.4

    def model(X, y=None):
        noise = numpyro.sample("noise", dist.LogNormal())
        f = dgp.gp("f", dgp.kernels.Matern32(1.2, 0.7), inducing)
        h = numpyro.sample("h", f(X, noise=noise), obs=None if hidden else y)
        if hidden:
            with numpyro.plate("data", len(X)):
                numpyro.sample("y", dist.Normal(h, NOISE), obs=y)

    samples = {"noise": jnp.full(2, scale), **({"h": jnp.stack([Y, Y])} if hidden else {})}
    f, _ = dgp.Posterior(model, samples=samples).layers(key, X, Y)["h"]
    kernel, new = dgp.kernels.Matern32(1.2, 0.7), jnp.array([[0.11], [2.3]])
    gain = np.linalg.solve(kernel.gram(X) + scale**2 * np.eye(N), kernel(X, new)).T
    np.testing.assert_allclose(f(new).mean, gain @ np.asarray(Y), atol=1e-6)
    np.testing.assert_allclose(f(new).variance, 1.2 - (gain * np.asarray(kernel(new, X))).sum(1), atol=1e-6)


@pytest.mark.slow
def test_values_of_an_exact_process_at_fixed_inputs_are_shared(key):
    def model(X, y=None):
        f = dgp.gp("f", dgp.kernels.RBF(), None)
        g = f.condition(Z, numpyro.sample("v", f(Z)))
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dgp.Likelihood(g(X), lambda v: dist.Normal(v, NOISE)), obs=y)

    posterior = dgp.Posterior(model, samples={"v": jnp.ones((2, 8))})
    np.testing.assert_allclose(posterior.predict(key, Z[2:5]).mean, 1.0, atol=1e-3)
