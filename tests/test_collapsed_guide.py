"""The guide with optimal q(v): bounds without noise, equal to the sampled ones of explicit guides; predictions."""

import dense
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
from numpyro.infer.autoguide import AutoNormal
from programs import NOISE, X, Y, Z, agree, draws_of_bound, random_params, shallow

import numpyro_dgp as dgp
from numpyro_dgp import guides as G
from numpyro_dgp import kernels as k
from numpyro_dgp.analysis.sites import unwrap
from numpyro_dgp.functions.function_values import FunctionValues
from numpyro_dgp.functions.weights import InducingPrior
from numpyro_dgp.guides.record import record_of

Z2 = jnp.hstack([Z, jnp.cos(5 * Z)])
RBF = k.RBF(1.2, 0.7)


def deep(X, y=None, *, layers=2, last=k.RBF(1.1, 0.9), inner_mean=dgp.means.LinearMean(jnp.array([[1.0, -0.5]]), 0.1)):
    """Two outputs per hidden layer, data beside the hidden values, mean functions, unequal noise."""
    x = X
    functions = []
    for depth in range(1, layers):
        points = Z if depth == 1 else jnp.hstack([Z, Z2])
        mean = inner_mean if depth == 1 else dgp.means.LinearMean(0.3 * jnp.ones((3, 2)))
        functions.append(dgp.gp(f"f{depth}", k.RBF(0.5, 0.9), dgp.Points(points), outputs=2, mean=mean))
    g = dgp.gp("g", last, dgp.Points(jnp.hstack([Z, Z2])), mean=dgp.means.ConstantMean(0.2))
    with numpyro.plate("data", len(X)):
        for depth, f in enumerate(functions, 1):
            h = numpyro.sample(f"h{depth}", f(x, noise=0.2 + 0.1 * depth))
            x = jnp.concatenate([X, h], -1)
        numpyro.sample("y", dgp.Likelihood(g(x), lambda v: dist.Normal(0.8 * v + 0.1, NOISE)), obs=y)


def latents(X, y=None):
    g = dgp.gp("g", k.RBF(1.0, jnp.array([0.8, 1.2])), dgp.Points(Z2), outputs=2)
    with numpyro.plate("data", len(X)):
        x = dgp.latent("w", X, 1)
        mean = dgp.Likelihood(g(x), lambda v: dist.Normal(v, jnp.array([0.3, 0.5])).to_event(1))
        numpyro.sample("y", mean, obs=y)


def per_output(X, y=None):
    kernels = [k.RBF(1.2, 0.7), k.RBF(0.6, 1.5) + k.Linear(0.2)]
    points = jnp.stack([Z, Z + 0.1])
    f = dgp.gp("f", kernels, dgp.Points(points), outputs=2, mean=dgp.means.LinearMean(jnp.ones((1, 2))))
    g = dgp.gp("g", [k.RBF(1.0, 1.0), k.RBF(1.0, 2.0)], dgp.Points(Z2), outputs=2)
    with numpyro.plate("data", len(X)):
        h = numpyro.sample("h", f(X, noise=jnp.array([0.2, 0.4])))
        numpyro.sample("y", dgp.Likelihood(g(h), lambda v: dist.Normal(v, 0.3).to_event(1)), obs=y)


def reused(X, y=None):
    """One function in two layers, and a scalar hidden layer."""
    f = dgp.gp("f", k.RBF(0.5, 0.9), dgp.Points(Z), mean=dgp.means.IdentityMean())
    with numpyro.plate("data", len(X)):
        h = numpyro.sample("h", f(X, noise=0.2))
        numpyro.sample("y", dgp.Likelihood(f(h[:, None]), lambda v: dist.Normal(v, 0.3)), obs=y)


def latents_above_a_layer(X, y=None):
    f = dgp.gp("f", k.RBF(0.5, 0.9), dgp.Points(Z), outputs=1, mean=dgp.means.IdentityMean())
    g = dgp.gp("g", k.RBF(1.0, 1.2), dgp.Points(Z2))
    with numpyro.plate("data", len(X)):
        h = numpyro.sample("h", f(X, noise=0.2))
        numpyro.sample("y", dgp.Likelihood(g(dgp.latent("w", h, 1)), lambda v: dist.Normal(v, 0.3)), obs=y)


def masked(X, y=None):
    keep = jnp.arange(len(X)) < 20
    f = dgp.gp("f", k.RBF(0.5, 0.9), dgp.Points(Z), outputs=1)
    with handlers.scale(scale=0.7):
        g = dgp.gp("g", k.RBF(), dgp.Points(Z))
    with numpyro.plate("data", len(X)), handlers.mask(mask=keep), handlers.scale(scale=0.5):
        h = numpyro.sample("h", f(X, noise=0.2))
        numpyro.sample("y", dgp.Likelihood(g(h), lambda v: dist.Normal(v, 0.3)), obs=y)


Y2 = jnp.stack([Y, Y**2], -1)
PROGRAMS = {
    "two layers": (deep, Y),
    "three layers": (lambda X, y=None: deep(X, y, layers=3), Y),
    "latents": (latents, Y2),
    "per output": (per_output, Y2),
    "reused": (reused, Y),
    "masked": (masked, Y),
    "latents above a layer": (latents_above_a_layer, Y),
}


def with_optimum(model, guide, params, y):
    """Parameters of the same posterior in a guide with explicit q(v)."""
    with handlers.seed(rng_seed=0), handlers.substitute(data=params), handlers.trace() as sites:
        guide(X, y)
    beliefs = {n: s["fn"] for n, s in sites.items() if s["type"] == "sample" and record_of(s).kind == "inducing"}
    found = {f"{n}_auto_loc": q.loc for n, q in beliefs.items()}
    shapes = {n: (*q.loc.shape, q.loc.shape[-1]) for n, q in beliefs.items()}  # outputs may share a covariance
    full = {n: jnp.broadcast_to(q.scale_tril, shapes[n]) for n, q in beliefs.items()}
    return params | found | {f"{n}_auto_scale_tril": root for n, root in full.items()}


def sampled_bound(model, guide, params, y):
    """The same bound with hidden layers and latents drawn: E[log N(h; f(x), s^2)] row by row at each draw."""
    with handlers.seed(rng_seed=0), handlers.substitute(data=params), handlers.trace() as sites:
        guide(X, y)
    beliefs = {n: s["fn"] for n, s in sites.items() if s["type"] == "sample" and record_of(s).kind == "inducing"}
    others = {n: unwrap(s["fn"]) for n, s in sites.items() if s["type"] == "sample" and record_of(s).kind != "inducing"}
    scales = {n: s["scale"] or 1.0 for n, s in sites.items() if s["type"] == "sample"}
    fixed = -sum(scales[n] * kl_divergence(q, InducingPrior(q.event_shape, q.loc.dtype)) for n, q in beliefs.items())

    def draw(key):
        values = {n: q.sample(jax.random.fold_in(key, i)) for i, (n, q) in enumerate(others.items())}
        with handlers.seed(rng_seed=0), handlers.substitute(data=values | beliefs), handlers.trace() as sites:
            model(X, y)
        total = fixed
        for name, site in sites.items():
            fn = unwrap(site["fn"])
            if site["type"] != "sample" or name in beliefs:
                continue
            if isinstance(fn, FunctionValues):
                f = fn.function(fn.inputs)
                term = dist.Normal(f.loc, fn.noise).log_prob(site["value"]) - 0.5 * f.variance / fn.noise**2
                term = term - dist.Normal(others[name].loc, others[name].variance ** 0.5).log_prob(site["value"])
                term = term.sum(-1) if fn.event_dim else term
            else:
                term = fn.log_prob(site["value"])
                if not site["is_observed"]:
                    term = -kl_divergence(others[name], fn)
            mask = site["fn"]._mask if isinstance(site["fn"], dist.MaskedDistribution) else True
            total = total + (site["scale"] or 1.0) * jnp.where(mask, term, 0).sum()
        return total

    return jax.lax.map(draw, jax.random.split(jax.random.key(5), 4000), batch_size=200)


@pytest.mark.long
@pytest.mark.parametrize("name", PROGRAMS)
def test_bound_against_draws_of_hidden_layers(name):
    """The closed form is the mean of sampled bounds; an explicit guide with the same q has the same or a larger one."""
    model, y = PROGRAMS[name]
    guide, explicit = G.Collapsed(model), G.MeanField(model, inducing=G.Full())
    params = random_params(model, guide, X, y)
    evaluate = jax.jit(lambda key: -dgp.ELBO().loss(key, params, model, guide, X, y))
    value = evaluate(jax.random.key(0))
    np.testing.assert_allclose(evaluate(jax.random.key(1)), value, rtol=1e-12)
    draws = sampled_bound(model, guide, params, y)
    assert agree(draws, np.array([value]))
    optimum = with_optimum(model, guide, params, y)
    same = draws_of_bound(dgp.ELBO(), optimum, model, explicit, X, y, num=1000)
    error = same.std() / np.sqrt(len(same))
    assert value < same.mean() + 3 * error
    if name in ("two layers", "latents"):
        assert abs(value - same.mean()) < 3 * error + 0.1


@pytest.mark.long
def test_a_latent_may_stand_beside_hidden_values():
    """Its prior does not depend on what it is appended to."""
    guide = G.Collapsed(latents_above_a_layer)
    start = {"h_auto_loc": X, "w_auto_loc": 0.1 * X} | {f"{n}_auto_scale": jnp.ones((30, 1)) for n in "hw"}
    loss = jax.eval_shape(lambda: dgp.ELBO().loss(jax.random.key(0), start, latents_above_a_layer, guide, X, Y))
    assert loss.shape == ()


@pytest.mark.long
def test_latents_as_numpyro_writes_them():
    """Their divergence is in closed form too: the bound has no noise, and that of dgp.latent for a standard normal."""

    def model(X, y=None, prior=(0.0, 1.0)):
        g = dgp.gp("g", k.RBF(1.0, jnp.array([0.8, 1.2])), dgp.Points(Z2), outputs=2)
        with numpyro.plate("data", len(X)):
            w = numpyro.sample("w", dist.Normal(*prior).expand([1]).to_event(1))
            mean = dgp.Likelihood(g(jnp.hstack([X, w])), lambda v: dist.Normal(v, jnp.array([0.3, 0.5])).to_event(1))
            numpyro.sample("y", mean, obs=y)

    def value(model, key=0, **kwargs):
        return -dgp.ELBO().loss(jax.random.key(key), params, model, G.Collapsed(model), X, Y2, **kwargs)

    params = random_params(latents, G.Collapsed(latents), X, Y2)
    np.testing.assert_allclose(value(model), value(latents), rtol=1e-10)
    np.testing.assert_allclose(value(model, key=1), value(latents), rtol=1e-10)
    q = dist.Normal(params["w_auto_loc"], params["w_auto_scale"])
    shift = kl_divergence(q, dist.Normal(0.0, 1.0)) - kl_divergence(q, dist.Normal(0.3, 2.0))
    np.testing.assert_allclose(value(model, prior=(0.3, 2.0)) - value(model), shift.sum(), rtol=1e-9)


@pytest.mark.long
def test_one_layer_is_titsias_bound_and_predicts_as_it():
    guide = G.Collapsed(shallow)
    SVI(shallow, guide, optax.sgd(0.0), dgp.ELBO()).init(jax.random.key(0), X, Y)
    Kzz, Kzx = np.asarray(RBF.gram(Z)) + 1.2e-10 * np.eye(8), np.asarray(RBF(Z, X))
    bound, mean, covariance = dense.titsias(np.asarray(Y), NOISE, Kzz, Kzx, np.asarray(RBF.gram(X)))
    for loss in (dgp.ELBO(), dgp.ELBO(3)):
        np.testing.assert_allclose(-loss.loss(jax.random.key(0), {}, shallow, guide, X, Y), bound, rtol=1e-9)
    new = jnp.linspace(-3, 3, 7)[:, None]
    f, F = dense.svgp(Kzz, np.asarray(RBF(Z, new)), np.asarray(RBF.gram(new)), mean, covariance)
    predicted = dgp.Posterior(shallow, guide.on(X, Y), {}).using(num_samples=2).predict(jax.random.key(0), new)
    np.testing.assert_allclose(predicted.mean, f, atol=1e-6)
    np.testing.assert_allclose(predicted.variance, np.diag(F) + NOISE**2, atol=1e-6)
    L = np.linalg.cholesky(Kzz)
    np.testing.assert_allclose(L @ guide.median({}, X, Y)["g"], mean, atol=1e-6)


@pytest.mark.long
def test_hyperparameters_by_quasi_newton():
    """Type-II maximum likelihood; no other q(v) does better at the same hyperparameters."""

    def model(X, y=None):
        ls = numpyro.param("ls", 1.5, constraint=dist.constraints.positive)
        noise = numpyro.sample("noise", dist.LogNormal(-1.0, 0.5))
        g = dgp.gp("g", k.RBF(1.0, ls), dgp.Points(Z, learn=True))
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dgp.Likelihood(g(X), lambda v: dist.Normal(v, noise)), obs=y)

    guide = G.Collapsed(model)
    svi = SVI(model, guide, optax.sgd(0.0), dgp.ELBO())
    found = dgp.optim.minimize(svi, jax.random.key(0), X, Y, progress_bar=False)
    assert found.converged
    assert sorted(found.params) == ["g_Z", "ls", "noise_auto_loc"]
    slope = jax.grad(lambda p: dgp.ELBO().loss(jax.random.key(0), p, model, guide, X, Y))
    assert max(abs(leaf).max() for leaf in slope(found.params).values()) < 0.05


@pytest.mark.long
def test_gradient_is_that_at_the_optimum_held_fixed():
    """The envelope theorem: q(v) need not be differentiated, and differentiating it changes nothing."""

    def model(X, y=None):
        g = dgp.gp("g", k.RBF(1.0, numpyro.param("ls", 1.5)), dgp.Points(Z, learn=True))
        noise = numpyro.param("noise", 0.4)
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dgp.Likelihood(g(X), lambda v: dist.Normal(v, noise)), obs=y)

    guide, explicit = G.Collapsed(model), G.InducingPoint(model)
    params = {"ls": jnp.array(0.9), "g_Z": Z + 0.03, "noise": jnp.array(0.2)}
    fixed = with_optimum(model, guide, params, Y)
    loss = lambda guide: jax.grad(lambda p: dgp.ELBO().loss(jax.random.key(0), p, model, guide, X, Y))  # noqa: E731
    ours, reference = loss(guide)(params), loss(explicit)(fixed)
    for name in params:
        np.testing.assert_allclose(ours[name], reference[name], rtol=1e-6, atol=1e-6)
    assert max(abs(reference[n]).max() for n in ("g_auto_loc", "g_auto_scale_tril")) < 1e-6


@pytest.mark.long
def test_mean_field_deep_bound_by_quasi_newton():
    guide = G.Collapsed(deep)
    svi = SVI(deep, guide, optax.sgd(0.0), dgp.ELBO())
    found = dgp.optim.minimize(svi, jax.random.key(0), X, Y, max_steps=40, progress_bar=False)
    assert found.losses[-1] < found.losses[0] - 10
    assert (np.diff(found.losses) <= 1e-9).all()
    posterior = dgp.Posterior(deep, guide.on(X, Y), found.params)
    predicted = posterior.using(num_samples=200).predict(jax.random.key(1), X)
    assert np.sqrt(((predicted.mean - Y) ** 2).mean()) < 0.5 * Y.std()
    assert posterior.using(num_samples=5).hidden(jax.random.key(1), X[:4])["h1"].shape == (5, 4, 2)
    assert posterior.using(num_samples=3).functions(jax.random.key(2))(X[:4])["y"].shape == (3, 4)


@pytest.mark.long
@pytest.mark.parametrize("other", [G.Normal(), AutoNormal])
def test_posteriors_of_hyperparameters_are_drawn(other):
    """The same bound in expectation as NumPyro's, given the same q(v) as a function of the hyperparameters."""

    def model(X, y=None):
        g = dgp.gp("g", RBF, dgp.Points(Z))
        noise = numpyro.sample("noise", dist.LogNormal(-1.0, 0.5))
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dgp.Likelihood(g(X), lambda v: dist.Normal(v, noise)), obs=y)

    guide = G.Collapsed(model, other=other)
    svi = SVI(model, guide, optax.adam(0.05), dgp.ELBO())
    params = svi.run(jax.random.key(0), 50, X, Y, progress_bar=False).params
    ours = draws_of_bound(dgp.ELBO(), params, model, guide, X, Y)
    stock = draws_of_bound(Trace_ELBO(), params, model, guide, X, Y)
    assert agree(ours, stock)
    draws = guide.on(X, Y).sample_posterior(jax.random.key(0), params, X[:3], sample_shape=(5,))
    assert draws["g"].shape == (5, 8)
    assert len(set(np.asarray(draws["noise"]).tolist())) == 5


@pytest.mark.slow
@pytest.mark.parametrize("W", [np.array([[0.9, -0.5]]), np.array([[0.9, -0.5], [0.3, 1.1]])], ids=["rank one", "full"])
def test_a_precision_matrix_in_closed_form(W):
    """Of an RBF on the known and the latent column: the closed form is the quadrature."""

    def one(X, y=None):
        g = dgp.gp("g", k.Transformed(k.RBF(1.2), W), dgp.Points(Z2))
        with numpyro.plate("data", len(X)):
            x = dgp.latent("w", X, 1)
            numpyro.sample("y", dgp.Likelihood(g(x), lambda v: dist.Normal(v, 0.3)), obs=y)

    params = random_params(one, G.Collapsed(one), X, Y)
    closed, nodes = (
        dgp.ELBO().loss(jax.random.key(0), params, one, G.Collapsed(one, integrate=integrate), X, Y)
        for integrate in (None, dgp.likelihoods.GaussHermite(40))
    )
    np.testing.assert_allclose(closed, nodes, rtol=1e-8)


@pytest.mark.long
def test_any_kernel_by_quadrature():
    def one(X, y=None):
        f = dgp.gp("f", RBF, dgp.Points(Z), outputs=1, mean=dgp.means.IdentityMean())
        g = dgp.gp("g", k.Matern32(), dgp.Points(Z))
        with numpyro.plate("data", len(X)):
            h = numpyro.sample("h", f(X, noise=0.3))
            numpyro.sample("y", dgp.Likelihood(g(h), lambda v: dist.Normal(v, 0.3)), obs=y)

    guide = G.Collapsed(one, integrate=dgp.likelihoods.GaussHermite(60))
    params = random_params(one, guide, X, Y)
    value = -dgp.ELBO().loss(jax.random.key(0), params, one, guide, X, Y)
    assert agree(sampled_bound(one, guide, params, Y), np.array([value]))
    with pytest.raises(ValueError, match=r"closed form .* got Matern32: pass integrate="):
        dgp.ELBO().loss(jax.random.key(0), params, one, G.Collapsed(one), X, Y)


@pytest.mark.long
def test_delta_hidden_layers_are_inputs_known_exactly():
    guide = G.Collapsed(deep, hidden=G.Delta())
    params = random_params(deep, guide, X, Y)
    value = -dgp.ELBO().loss(jax.random.key(0), params, deep, guide, X, Y)
    narrow = {**params, "h1_auto_scale": jnp.full((30, 2), 1e-5)}
    entropy = 60 * (0.5 * np.log(2 * np.pi * np.e) + np.log(1e-5))
    other = -dgp.ELBO().loss(jax.random.key(0), narrow, deep, G.Collapsed(deep), X, Y)
    np.testing.assert_allclose(other - entropy, value, rtol=1e-5)


@pytest.mark.long
def test_single_precision(x32):
    points = np.asarray(Z, np.float32)

    def model(X, y=None):
        f = dgp.gp("f", k.RBF(0.5, 0.9), dgp.Points(points), outputs=1, mean=dgp.means.IdentityMean())
        g = dgp.gp("g", k.RBF(), dgp.Points(points))
        with numpyro.plate("data", len(X)):
            h = numpyro.sample("h", f(X, noise=0.3))
            numpyro.sample("y", dgp.Likelihood(g(h), lambda v: dist.Normal(v, 0.3)), obs=y)

    x, y = (jnp.asarray(np.asarray(a), jnp.float32) for a in (X, Y))
    svi = SVI(model, G.Collapsed(model), optax.adam(0.01), dgp.ELBO())
    result = svi.run(jax.random.key(0), 20, x, y, progress_bar=False)
    assert result.losses.dtype == jnp.float32
    assert result.losses[-1] < result.losses[0]


def variant(**changes):
    def model(X, y=None, batch=None):
        f = dgp.gp("f", RBF, dgp.Points(Z), outputs=1, mean=changes.get("mean"))
        points = changes.get("points", lambda f: Z)(f)
        g = dgp.gp("g", changes.get("kernel", lambda f: RBF)(f), dgp.Points(points), mean=changes.get("last_mean"))
        with numpyro.plate("data", len(X), subsample_size=changes.get("batch")) as i:
            h = numpyro.sample("h", f(X[i], noise=changes.get("noise", 0.3)))
            scale = changes.get("scale", lambda h: 0.3)(h)
            x = changes.get("inputs", lambda h: h)(h)
            numpyro.sample("y", dgp.Likelihood(g(x), lambda v: changes.get("y", dist.Normal)(v, scale)), obs=y[i])

    return model


def mixed(X, y=None):
    g = dgp.gp("g", RBF, dgp.Points(Z), outputs=2)
    with numpyro.plate("data", len(X)):
        v = g(X).mix(jnp.array([[1.0, 0.5], [0.0, 1.0], [1.0, -1.0]]))
        mean = dgp.Likelihood(v, lambda v: dist.Normal(v, 0.3).to_event(1))
        numpyro.sample("y", mean, obs=None if y is None else y[:, None] * jnp.ones(3))


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (mixed, {}, "expected independent functions under the likelihood at 'y', got mixtures, f.x..mix.W.: mixtures"),
        (variant(batch=7), {}, "Collapsed: expected a program over all data, got plate 'data' that takes 7 of 30"),
        (variant(noise=None), {}, "expected process noise at hidden layer 'h'.* got no noise"),
        (variant(y=dist.Laplace), {}, "expected a Gaussian likelihood at 'y'"),
        (variant(inputs=jnp.tanh), {}, "inputs of the layer at 'y' to be columns of data.* got the result of `tanh`"),
        (variant(inputs=lambda h: h + 1.0), {}, "got the result of `add`"),
        (variant(scale=lambda h: jnp.exp(h[:, 0])), {}, "to be inputs of layers only, got a program"),
        (variant(inputs=lambda h: jnp.hstack([h, h])[:, ::-1][:, :1]), {}, "got the result of `rev`"),
        (variant(last_mean=jnp.sin), {}, "expected a mean function among dgp.means.ZeroMean"),
        (variant(points=lambda f: f(Z).loc), {}, "do not depend on integrated inducing values.* the layer at 'y'"),
        (variant(points=lambda f: f(Z).loc), {"hidden": G.GivenInducing()}, "got such ones for the layer at 'y'"),
        (variant(kernel=lambda f: k.RBF(jnp.exp(f(Z).loc[0, 0]))), {}, "got such ones for the layer at 'y'"),
        (
            variant(),
            {"hidden": G.Propagate()},
            "expected a mean-field rule for hidden layer 'h'.* got one that follows the model",
        ),
        (variant(), {"hidden": G.Prior()}, "expected a mean-field rule for hidden layer 'h'"),
        (variant(), {"sites": {"f": G.Full()}}, "expected no rule for inducing values, got one for 'f'"),
    ],
)
def test_bad_input(model, options, message):
    with pytest.raises(ValueError, match=message):
        SVI(model, G.Collapsed(model, **options), optax.sgd(0.0), dgp.ELBO()).init(jax.random.key(0), X, Y)


def test_the_guide_keeps_its_own_data():
    """What is written to NumPy arrays after the fit does not change predictions; other objects stay what they are."""
    x, y, setting = np.array(X), np.array(Y), object()
    (x_, (y_, z_)), kwargs = G.Collapsed(shallow).on(x, [y, Z], width=3, setting=setting).data
    x[:], y[:] = 0.0, 5.0
    np.testing.assert_array_equal(x_, X)
    np.testing.assert_array_equal(y_, Y)
    assert z_ is Z
    assert kwargs == {"width": 3, "setting": setting}


def test_prediction_needs_the_data():
    with pytest.raises(ValueError, match=r"got a call without observations: .*guide.on\(X, y\)"):
        dgp.Posterior(shallow, G.Collapsed(shallow), {}).predict(jax.random.key(0), X)


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "noise", "found"), [(10, 1e-3, True), (5, 1e-4, False), (10, 1e-4, False)])
def test_bounds_that_are_rounding_error_are_errors(rows, noise, found, key):
    """With a smooth kernel, Z = X and single precision; without compilation a bound is right or an error."""
    x = np.linspace(0.0, 3.0, rows, dtype=np.float32)[:, None]
    y = np.sin(2 * x[:, 0])

    def program(X, y):
        f = dgp.gp("f", k.RBF(jnp.float32(1.0), jnp.float32(1.0)), dgp.Points(X))
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dgp.Likelihood(f(X), lambda v: dist.Normal(v, jnp.float32(noise))), obs=y)

    guide = dgp.guides.Collapsed(program)
    if not found:
        with pytest.raises(ValueError, match="Collapsed: expected a bound that is not lost in rounding, got NaN in fl"):
            dgp.ELBO().loss(key, {}, program, guide, x, y)
        return
    wide = x.astype(float)
    C = np.exp(-0.5 * (wide - wide.T) ** 2) + (noise**2 + 2 * rows * 2.0**-23) * np.eye(rows)  # the jitter of k(Z, Z)
    evidence = -0.5 * (y @ np.linalg.solve(C, y) + np.linalg.slogdet(C)[1] + rows * np.log(2 * np.pi))
    loss = dgp.ELBO().loss(key, {}, program, guide, x, y)
    assert abs(loss + evidence) < 1 + 0.1 * abs(evidence)
