"""Importance weighting and quadrature of latents, against dense algebra and one-dimensional integrals."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax.scipy.special import logsumexp
from numpyro.infer import SVI, Trace_ELBO
from programs import agree, draws_of_bound, random_params
from scipy.integrate import quad
from sizes import mostly_long

import numpyro_dgp as dgp
from numpyro_dgp.functions.weights import FullBelief
from numpyro_dgp.guides import Amortised, Importance, ImportanceWeighted, InducingPoint, Quadrature
from numpyro_dgp.guides.importance import ReplicatedValues
from numpyro_dgp.math.gaussians import kl_full

rng = np.random.default_rng(1)
X = jnp.array(rng.uniform(-1, 1, size=(6, 1)))
Y = jnp.array(rng.normal(size=6))
Z1, Z2 = jnp.array(rng.normal(size=(5, 2))), jnp.linspace(-2, 2, 5)[:, None]
NOISE = 0.4


def lv_gp(X, y=None, batch=None, dim=1):
    g = dgp.gp(
        "g", dgp.kernels.RBF(1.0, 1.2), dgp.Points(jnp.array(Z1) if dim == 1 else jnp.hstack([Z1, Z1[::-1, :1]]))
    )
    with numpyro.plate("data", len(X), subsample_size=batch) as i:
        x = dgp.latent("w", X[i], dim)
        numpyro.sample("y", dgp.Likelihood(g(x), lambda v: dist.Normal(v, NOISE)), obs=None if y is None else y[i])


def lv_gp_gp(X, y=None, batch=None, noise=None):
    f = dgp.gp("f", dgp.kernels.RBF(0.8, 1.1), dgp.Points(Z1), outputs=2, mean=lambda x: x[..., :1] * jnp.ones(2))
    g = dgp.gp("g", dgp.kernels.RBF(1.0, 1.2), dgp.Points(jnp.hstack([Z2, -Z2])))
    with numpyro.plate("data", len(X), subsample_size=batch) as i:
        h = numpyro.sample("h", f(dgp.latent("w", X[i], 1), noise=noise))
        numpyro.sample("y", dgp.Likelihood(g(h), lambda v: dist.Normal(v, NOISE)), obs=None if y is None else y[i])


def gp_lv_gp(X, y=None):
    f = dgp.gp("f", dgp.kernels.RBF(0.3), dgp.Points(Z2), outputs=1, mean=dgp.means.IdentityMean())
    g = dgp.gp("g", dgp.kernels.RBF(1.0, 1.2), dgp.Points(jnp.hstack([Z1, Z2])))
    with numpyro.plate("data", len(X)):
        h = numpyro.sample("h", f(X))
        x = dgp.latent("w2", dgp.latent("w1", h, 1), 1)
        numpyro.sample("y", dgp.Likelihood(g(x), lambda v: dist.Poisson(jnp.exp(v))), obs=y)


def toy(X, y=None):
    """One datum whose function ignores its latent: log p(y) is known."""
    g = dgp.gp("g", dgp.kernels.Constant(1.0), dgp.Points(jnp.zeros((1, 2))))
    with numpyro.plate("data", 1):
        h = numpyro.sample("h", g(dgp.latent("w", X, 1)))
        numpyro.sample("y", dist.Normal(h, jnp.sqrt(0.1)), obs=y)


def draws(model, guide, params, num=2000, y=Y, X=X, **kwargs):
    return draws_of_bound(dgp.ELBO(), params, model, guide, X, y, num=num, **kwargs)


PARAMS = random_params(lv_gp_gp, InducingPoint(lv_gp_gp), X, Y)
SHALLOW = random_params(lv_gp, InducingPoint(lv_gp), X, Y)


@pytest.mark.long
@pytest.mark.parametrize("noise", [None, 0.2])
def test_copies_have_the_covariance_of_one_function(noise):
    kernel = dgp.kernels.RBF(0.8, 1.1)
    xs = jnp.array(rng.normal(size=(4, 3, 2)))  # K = 4 inputs of each of 3 data
    with numpyro.handlers.substitute(data={"f": FULL}):
        f = dgp.gp("f", kernel, dgp.Points(Z1), outputs=2)
    copied = ReplicatedValues(f(xs, noise=noise).propagated())
    values = np.asarray(jax.vmap(copied.sample)(jax.random.split(jax.random.key(0), 40_000)))
    joint = f.joint(jnp.moveaxis(xs, 0, 1))
    for n in range(3):
        for p in range(2):
            got = np.cov(values[:, :, n, p].T)
            want = joint.covariance[n, p] + (0 if noise is None else noise**2) * np.eye(4)
            variances = np.diag(want)
            error = np.sqrt((np.outer(variances, variances) + want**2) / len(values))
            assert (np.abs(got - want) < 4.5 * error + 1e-9).all()
    assert np.abs(np.corrcoef(values[:, 0, 0, 0], values[:, 0, 1, 0])[0, 1]) < 0.02  # none across data
    assert np.allclose(values.mean(0), joint.loc.swapaxes(0, 1), atol=0.03)


FULL = FullBelief(jnp.array(rng.normal(size=(2, 5))), jnp.tril(jnp.array(0.3 * rng.normal(size=(2, 5, 5)))))


@pytest.mark.long
def test_copies_of_outputs_with_kernels_of_their_own():
    kernels = [dgp.kernels.RBF(0.8, 1.1), dgp.kernels.Matern32(1.3)]
    xs = jnp.array(rng.normal(size=(3, 1, 2)))
    with numpyro.handlers.substitute(data={"f": FULL}):
        f = dgp.gp("f", kernels, dgp.Points(Z1), outputs=2)
    values = jax.vmap(ReplicatedValues(f(xs).propagated()).sample)(jax.random.split(jax.random.key(1), 40_000))
    want = f.joint(xs[:, 0]).covariance
    for p in range(2):
        assert np.allclose(np.cov(np.asarray(values[:, :, 0, p]).T), want[p], atol=0.05)


@pytest.mark.long
def test_the_gradient_by_inputs_is_that_of_the_law():
    """Derivatives along the interpolant and along the factor of the covariance have the same expectation."""
    xs = jnp.array(rng.normal(size=(3, 2)))
    with numpyro.handlers.substitute(data={"f": jnp.zeros(5)}):
        f = dgp.gp("f", dgp.kernels.RBF(0.8, 0.9), dgp.Points(Z1))

    def cost(c):
        return logsumexp(jnp.array([1.0, -2.0, 0.5]) * c + jnp.square(c))

    def by_factor(x, key):
        L = jnp.linalg.cholesky(f.joint(x).covariance[0] + 1e-10 * jnp.eye(3))
        return cost(L @ jax.random.normal(key, (3,)))

    keys = jax.random.split(jax.random.key(2), 40_000)
    ours = jax.vmap(jax.grad(lambda x, k: cost(f.draw(k, x)[:, 0])), (None, 0))(xs, keys)
    theirs = jax.vmap(jax.grad(by_factor), (None, 0))(xs, keys)
    for a, b in zip(ours.reshape(len(keys), -1).T, theirs.reshape(len(keys), -1).T, strict=True):
        assert agree(a, b, width=4.0)


def exact_posterior_params():
    return {
        "g_auto_loc": jnp.full(1, 1 / 1.1),
        "g_auto_scale_tril": jnp.full((1, 1), jnp.sqrt(0.1 / 1.1)),
        "w_auto_loc": jnp.full((1, 1), 0.3),
        "w_auto_scale": jnp.full((1, 1), 0.8),
    }


@pytest.mark.long
@pytest.mark.parametrize("K", mostly_long([2, 20], [1, 2, 5, 20, 100]))
def test_toy_is_never_above_the_evidence(K, monkeypatch):
    """Joint draws of the function give log p(y) for every K; independent ones exceed it."""
    evidence = float(dist.Normal(0.0, jnp.sqrt(1.1)).log_prob(1.0))
    params = exact_posterior_params() | {"w_auto_loc": jnp.zeros((1, 1)), "w_auto_scale": jnp.ones((1, 1))}
    guide = ImportanceWeighted(toy, num_samples=K)
    found = draws(toy, guide, params, 20_000, X=jnp.zeros((1, 1)), y=jnp.ones(1))
    assert abs(found.mean() - evidence) < 4 * found.std() / np.sqrt(len(found)) + 1e-6
    if K > 1:
        monkeypatch.setattr("numpyro_dgp.guides.importance.ReplicatedValues", lambda values: values)
        apart = draws(toy, guide, params, 20_000, X=jnp.zeros((1, 1)), y=jnp.ones(1))
        assert apart.mean() > evidence + 4 * apart.std() / np.sqrt(len(apart))


@pytest.mark.long
def test_one_sample_is_the_plain_bound():
    """In mean, and that is also what the stock objective sees for any number of samples."""
    plain = draws(lv_gp_gp, InducingPoint(lv_gp_gp), PARAMS)
    one = draws(lv_gp_gp, ImportanceWeighted(lv_gp_gp, num_samples=1), PARAMS, key=jax.random.key(8))
    assert agree(plain, one)
    stock = draws_of_bound(Trace_ELBO(), PARAMS, lv_gp_gp, ImportanceWeighted(lv_gp_gp, num_samples=7), X, Y)
    assert agree(plain, stock)


@pytest.mark.long
@pytest.mark.parametrize("noise", [None, 0.3])
def test_more_samples_never_lower_the_bound(noise):
    """Within errors between neighbours, and by a clear gain from one sample to thirty."""
    means, errors = [], []
    for K in (1, 3, 10, 30):
        guide = ImportanceWeighted(lambda X, y=None: lv_gp_gp(X, y, noise=noise), num_samples=K)
        found = draws(guide.model, guide, PARAMS, 1500)
        means.append(found.mean())
        errors.append(found.std() / np.sqrt(len(found)))
    for i in range(3):
        assert means[i + 1] > means[i] - 3 * np.hypot(errors[i], errors[i + 1])
    assert means[3] > means[0] + 3 * np.hypot(errors[0], errors[3])


def integrals(params):
    """Of the one-layer model, by adaptive quadrature: the best bound over all q(w), datum by datum."""
    with (
        numpyro.handlers.block(),
        numpyro.handlers.substitute(data={"g": FullBelief(params["g_auto_loc"], params["g_auto_scale_tril"])}),
    ):
        g = dgp.gp("g", dgp.kernels.RBF(1.0, 1.2), dgp.Points(Z1))

    @jax.jit
    def integrand(w, n):
        v = g(jnp.stack([X[n, 0], w])[None])
        expected = dgp.Likelihood(v, lambda v: dist.Normal(v, NOISE)).log_prob(Y[n][None])[0]
        return jnp.exp(expected + dist.Normal(0.0, 1.0).log_prob(w))

    found = [quad(lambda w, n=n: float(integrand(w, n)), -10, 10, epsabs=1e-12, epsrel=1e-10)[0] for n in range(len(X))]
    return np.log(found), integrand


def divergence(params):
    return float(kl_full(params["g_auto_loc"], params["g_auto_scale_tril"]))


@pytest.mark.long
def test_quadrature_is_the_integral():
    """Equation 4.8; a Gaussian q(w) is below it, and weighting tends to it with an error of order 1/K."""
    want = integrals(SHALLOW)[0].sum() - divergence(SHALLOW)
    guide = InducingPoint(lv_gp, latent=Quadrature(100))
    found = draws(lv_gp, guide, SHALLOW, 3)
    assert np.allclose(found, want, atol=1e-9)
    assert want > draws(lv_gp, InducingPoint(lv_gp), SHALLOW).mean()
    gaps = []
    for K in (20, 80):
        gap = want - draws(lv_gp, ImportanceWeighted(lv_gp, num_samples=K, latent=dgp.guides.Prior()), SHALLOW, 4000)
        gaps.append((gap.mean(), gap.std() / np.sqrt(len(gap))))
    assert abs(gaps[0][0] / gaps[1][0] - 4) < 0.7 + 4 * gaps[1][1] / gaps[1][0]


@pytest.mark.long
def test_quadrature_over_two_columns():
    params = random_params(lv_gp, InducingPoint(lv_gp), X, Y, dim=2)
    fine = draws(lv_gp, InducingPoint(lv_gp, latent=Quadrature(60)), params, 1, dim=2)
    coarse = draws(lv_gp, InducingPoint(lv_gp, latent=Quadrature(40)), params, 1, dim=2)
    assert np.allclose(fine, coarse, atol=1e-4)
    weighted = draws(lv_gp, ImportanceWeighted(lv_gp, num_samples=300), params, 400, dim=2)
    assert weighted.mean() - 4 * weighted.std() / 20 < fine[0] < weighted.mean() + 1.0


@pytest.mark.long
def test_quadrature_under_a_second_layer_is_above_a_gaussian():
    """The best q(w) has a larger bound than a Gaussian, also with the inner layer drawn jointly over the nodes."""
    optimal = draws(lv_gp_gp, InducingPoint(lv_gp_gp, latent=Quadrature(30)), PARAMS, 500)
    gaussian = draws(lv_gp_gp, InducingPoint(lv_gp_gp), PARAMS)
    assert optimal.mean() > gaussian.mean() + 3 * gaussian.std() / np.sqrt(len(gaussian))


@pytest.mark.long
def test_draws_from_the_implied_posterior():
    """Section 5.2.4: moments of the exact posterior of every latent."""
    _, integrand = integrals(SHALLOW)
    grid = np.linspace(-6, 6, 2001)
    for guide in (
        InducingPoint(lv_gp, latent=Quadrature(60)),
        ImportanceWeighted(lv_gp, num_samples=200, latent=dgp.guides.Prior()),
    ):
        w = guide.sample_posterior(jax.random.key(5), SHALLOW, X, Y, sample_shape=(2000,))["w"]
        assert w.shape == (2000, 6, 1)
        for n in range(3):
            density = np.asarray(jax.vmap(integrand, (0, None))(grid, n))
            density = density / density.sum()
            mean = density @ grid
            sd = np.sqrt(density @ (grid - mean) ** 2)
            assert abs(w[:, n, 0].mean() - mean) < 5 * sd / np.sqrt(2000) + 0.01
            assert abs(w[:, n, 0].std() / sd - 1) < 0.08
    deep = ImportanceWeighted(lv_gp_gp, num_samples=4)
    values = deep.sample_posterior(jax.random.key(5), PARAMS, X, Y)
    assert {name: values[name].shape for name in "whf"} == {"w": (6, 1), "h": (6, 2), "f": (2, 5)}
    assert "w" not in deep.sample_posterior(jax.random.key(5), PARAMS, X[:1]), "left to the model without observations"


@pytest.mark.slow
@pytest.mark.parametrize(
    "weighted", [{"importance": Importance(3)}, {"latent": Quadrature(5)}], ids=["samples", "nodes"]
)
def test_draws_of_layers_are_those_of_the_functions_drawn(weighted):
    """h given the inducing values and latents of the same draw is the model's conditional, by dense algebra."""

    def uninformative(X, y=None):
        scale = numpyro.sample("scale", dist.LogNormal(0.0, 1.0))
        f = dgp.gp("f", dgp.kernels.RBF(0.8, 1.1), dgp.Points(Z1))
        g = dgp.gp("g", dgp.kernels.RBF(), dgp.Points(Z2))
        with numpyro.plate("data", len(X)):
            h = numpyro.sample("h", f(dgp.latent("w", X, 1)))
            numpyro.sample("y", dgp.Likelihood(g(scale * h[..., None]), lambda v: dist.Normal(v, 1e4)), obs=y)

    guide = InducingPoint(uninformative, **weighted, other=dgp.guides.Normal())
    params = {"f_auto_loc": jnp.ones(5), "f_auto_scale_tril": jnp.eye(5), "g_auto_loc": jnp.zeros(5)}
    params |= {"g_auto_scale_tril": jnp.eye(5), "scale_auto_loc": jnp.zeros(()), "scale_auto_scale": jnp.ones(())}
    if "importance" in weighted:
        params |= {"w_auto_loc": jnp.zeros((6, 1)), "w_auto_scale": jnp.ones((6, 1))}
    draws = guide.sample_posterior(jax.random.key(0), params, X, Y, sample_shape=(200,))
    x = np.concatenate([np.broadcast_to(X, (200, 6, 1)), draws["w"]], -1).reshape(-1, 2)

    def kernel(a, b):
        return 0.8 * np.exp(-0.5 * np.square((a[:, None] - b[None]) / 1.1).sum(-1))

    A = np.linalg.solve(np.linalg.cholesky(kernel(Z1, Z1)), kernel(Z1, x)).T.reshape(200, 6, 5)
    white = (draws["h"] - np.einsum("snm,sm->sn", A, draws["f"])) / np.sqrt(0.8 - np.square(A).sum(-1))
    squares = np.square(white).mean(1)  # rows of one draw are dependent under importance weights
    assert abs(squares.mean() - 1) < 4 * squares.std() / np.sqrt(200)
    assert squares.mean() < 2


def gradients(guide, params, names, num, key=jax.random.key(3)):
    def one(k):
        def loss(p):
            return dgp.ELBO().loss(k, {**params, **p}, guide.model, guide, X, Y)

        return jnp.concatenate([g.ravel() for g in jax.grad(loss)({n: params[n] for n in names}).values()])

    return np.asarray(jax.lax.map(one, jax.random.split(key, num), batch_size=200))


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "params"),
    [(lv_gp, SHALLOW), pytest.param(lv_gp_gp, PARAMS, marks=pytest.mark.long)],
    ids=["one layer", "two layers"],
)
def test_doubly_reparameterised_gradients_have_the_same_mean(model, params):
    """Doubly reparameterised gradients have the mean of plain ones."""
    names = ["w_auto_loc", "w_auto_scale", "g_auto_loc"]
    plain = gradients(ImportanceWeighted(model, num_samples=4), params, names, 20_000)
    double = ImportanceWeighted(model, num_samples=4, doubly_reparameterised=True)
    doubly = gradients(double, params, names, 20_000, jax.random.key(4))
    for a, b in zip(plain.T, doubly.T, strict=True):
        assert agree(a, b, width=4.5)


@pytest.mark.long
def test_signal_to_noise_of_the_proposal():
    """Falls like K^(-1/2) for plain gradients, grows like K^(1/2) for doubly reparameterised ones."""
    params = SHALLOW | {"w_auto_loc": jnp.zeros((6, 1)), "w_auto_scale": jnp.full((6, 1), 0.9)}
    ratio = {}
    for doubly in (False, True):
        for K in (4, 64):
            guide = ImportanceWeighted(lv_gp, num_samples=K, doubly_reparameterised=doubly)
            found = gradients(guide, params, ["w_auto_loc"], 20_000 if K == 64 else 6000)
            ratio[doubly, K] = np.median(np.abs(found.mean(0)) / found.std(0))
    assert ratio[True, 64] / ratio[True, 4] > 2.0  # 4 in the limit
    assert ratio[False, 64] / ratio[False, 4] < 0.5  # 1/4


@pytest.mark.parametrize(
    "latent",
    [
        pytest.param(dgp.guides.Normal(0.5), id="per datum"),
        pytest.param(Amortised(hidden=(3,)), id="amortised", marks=pytest.mark.long),
    ],
)
@pytest.mark.long
def test_minibatches_are_unbiased(latent):
    guide = ImportanceWeighted(lv_gp_gp, num_samples=3, latent=latent)
    params = random_params(lv_gp_gp, guide, X, Y)
    whole = draws(lv_gp_gp, guide, params, 6000)
    part = draws(lv_gp_gp, guide, params, 6000, batch=2, key=jax.random.key(9))
    assert agree(whole, part)
    by_quadrature = InducingPoint(lv_gp, latent=Quadrature(20))
    whole = draws(lv_gp, by_quadrature, SHALLOW, 1)[0]

    def rows(i):
        substituted = numpyro.handlers.substitute(lv_gp, data={"data": jnp.array(i)})
        guide = InducingPoint(substituted, latent=Quadrature(20))
        return -dgp.ELBO().loss(jax.random.key(0), SHALLOW, substituted, guide, X, Y, 2)

    assert np.allclose(np.mean([rows([0, 1]), rows([2, 3]), rows([4, 5])]), whole, atol=1e-8)


@pytest.mark.long
def test_several_latents_between_layers_and_another_likelihood():
    counts = jnp.array([0, 1, 3, 2, 0, 5])
    guide = ImportanceWeighted(gp_lv_gp, num_samples=5)
    params = random_params(gp_lv_gp, guide, X, counts)
    five = draws(gp_lv_gp, guide, params, y=counts)
    one = draws(gp_lv_gp, InducingPoint(gp_lv_gp), params, y=counts)
    assert five.mean() > one.mean() - 3 * np.hypot(five.std(), one.std()) / np.sqrt(len(five))
    assert guide.sample_posterior(jax.random.key(0), params, X, counts)["w2"].shape == (6, 1)


@pytest.mark.long
def test_latents_without_inputs():
    def gplvm(y=None, n=6):
        f = dgp.gp("f", dgp.kernels.RBF(), dgp.Points(Z1), outputs=3)
        with numpyro.plate("data", n):
            x = dgp.latent("w", None, 2)
            numpyro.sample("y", dgp.Likelihood(f(x), lambda v: dist.Normal(v, NOISE).to_event(1)), obs=y)

    y = jnp.array(rng.normal(size=(6, 3)))
    guide = ImportanceWeighted(gplvm, num_samples=4, latent=Amortised())
    result = SVI(gplvm, guide, optax.adam(0.01), dgp.ELBO()).run(jax.random.key(0), 5, y, progress_bar=False)
    assert np.isfinite(result.losses).all()
    assert result.params["w_auto_W0"].shape == (3, 20)
    posterior = dgp.Posterior(gplvm, guide, result.params)
    assert posterior.using(num_samples=3).predict(jax.random.key(1), n=4).mean.shape == (4, 3)


@pytest.mark.long
def test_network_sees_inputs_and_observations_of_the_minibatch():
    seen = []

    def network(rows):
        seen.append(rows)
        return jnp.hstack([10 * rows[:, :1] + 100 * rows[:, 1:], jnp.zeros((len(rows), 1))])

    guide = InducingPoint(lv_gp, latent=Amortised(network))
    with numpyro.handlers.trace() as sites, numpyro.handlers.seed(rng_seed=3):
        guide(X, Y, 4)
    rows = sites["data"]["value"]
    assert np.allclose(sites["w"]["fn"].loc[:, 0], 10 * X[rows, 0] + 100 * Y[rows])
    assert np.allclose(jnp.sqrt(sites["w"]["fn"].variance), jax.nn.softplus(-3.0))
    assert len(seen) == 1
    with numpyro.handlers.seed(rng_seed=3):
        guide(X)
    assert len(seen) == 1, "called without observations"


@pytest.mark.slow
def test_network_does_not_see_what_is_masked():
    counted = jnp.arange(6) % 2 == 0

    def model(X, y=None):
        g = dgp.gp("g", dgp.kernels.RBF(1.0, 1.2), dgp.Points(Z1))
        with numpyro.plate("data", len(X)):
            x = dgp.latent("w", X, 1)
            with numpyro.handlers.mask(mask=counted):
                numpyro.sample("y", dgp.Likelihood(g(x), lambda v: dist.Normal(v, NOISE)), obs=y)

    guide = InducingPoint(model, latent=Amortised(lambda rows: jnp.stack([rows.sum(-1), rows[:, 0]], -1)))
    with numpyro.handlers.trace() as sites, numpyro.handlers.seed(rng_seed=3):
        guide(X, jnp.where(counted, Y, 1e3))
    np.testing.assert_allclose(sites["w"]["fn"].loc[:, 0], X[:, 0] + jnp.where(counted, Y, 0.0))


@pytest.mark.long
def test_single_precision(x32):
    data = X.astype(jnp.float32), Y.astype(jnp.float32)

    def model(X, y=None):
        f = dgp.gp("f", dgp.kernels.RBF(0.8, 1.1), dgp.Points(Z1.astype(jnp.float32)), outputs=2)
        g = dgp.gp("g", dgp.kernels.RBF(), dgp.Points(jnp.hstack([Z2, -Z2]).astype(jnp.float32)))
        with numpyro.plate("data", len(X)):
            h = numpyro.sample("h", f(dgp.latent("w", X, 1)))
            numpyro.sample("y", dgp.Likelihood(g(h), lambda v: dist.Normal(v, 0.4)), obs=y)

    for options in ({"latent": Amortised()}, {"doubly_reparameterised": True}):
        guide = ImportanceWeighted(model, num_samples=20, **options)
        result = SVI(model, guide, optax.adam(0.01), dgp.ELBO()).run(jax.random.key(0), 30, *data, progress_bar=False)
        assert np.isfinite(result.losses).all()
        assert result.losses[-1] < result.losses[0]
        assert all(value.dtype == jnp.float32 for value in result.params.values())


def without(X, y=None):
    g = dgp.gp("g", dgp.kernels.RBF(), dgp.Points(Z2))
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dgp.Likelihood(g(X), lambda v: dist.Normal(v, NOISE)), obs=y)


def wide(X, y=None):
    with numpyro.plate("data", len(X)):
        x = dgp.latent("w", X, 3)
        numpyro.sample("y", dist.Normal(x.sum(-1), NOISE), obs=y)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ImportanceWeighted(lv_gp, num_samples=0), "expected num_samples to be a positive integer, got 0"),
        (lambda: call(ImportanceWeighted(without, num_samples=5)), "expected a model with latent variables per datum"),
        (
            lambda: call(InducingPoint(wide, latent=Quadrature(5))),
            "expected at most two standard normal columns",
        ),
        (lambda: Quadrature(0), r"expected size to be a positive integer, got 0"),
        (
            lambda: call(InducingPoint(lv_gp, latent=Amortised(lambda rows: rows[:, :1]))),
            r"map rows of shape \(6, 2\) to \(6, 2\), got \(6, 1\)",
        ),
        (
            lambda: call(InducingPoint(lv_gp, sites={"g": Amortised()})),
            "'g' to be a vector of latents per datum",
        ),
        (lambda: bound(InducingPoint(gp_lv_gp, latent=Quadrature(5))), "expected one latent site in the plates"),
        (
            lambda: bound(ImportanceWeighted(lv_gp_gp, num_samples=3, sites={"h": dgp.guides.Normal()})),
            "expected hidden layer 'h' to follow the model",
        ),
        (lambda: dgp.latent("w", X, 0), "expected a positive integer dim, got 0"),
    ],
)
def test_errors(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def call(guide, **kwargs):
    with numpyro.handlers.seed(rng_seed=0):
        return guide(X, Y, **kwargs)


def bound(guide):
    svi = SVI(guide.model, guide, optax.sgd(0.0), dgp.ELBO())
    state = svi.init(jax.random.key(0), X, jnp.abs(Y).astype(int))
    return svi.evaluate(state, X, jnp.abs(Y).astype(int))


def skipping(X, y=None, widen=True):
    """The inputs beside the hidden values above a latent."""
    f = dgp.gp("f", dgp.kernels.RBF(), dgp.Points(Z1), outputs=1)
    g = dgp.gp("g", dgp.kernels.RBF(), dgp.Points(Z1))
    with numpyro.plate("data", len(X)):
        h = numpyro.sample("h", f(dgp.latent("w", X, 1)))
        x = jnp.broadcast_to(X, (*h.shape[:-1], 1)) if widen else X
        x = jnp.concatenate([x, h], -1)
        numpyro.sample("y", dgp.Likelihood(g(x), lambda v: dist.Normal(v, NOISE)), obs=y)


@pytest.mark.slow
@pytest.mark.parametrize(
    "rule", [{"importance": Importance(3)}, {"latent": Quadrature(4)}], ids=["importance", "quadrature"]
)
def test_inputs_beside_hidden_values(rule):
    """They have to be widened by the dimension of the values; the error says how."""

    def loss(model):
        guide = InducingPoint(model, **rule)
        params = {f"{n}_auto_{p}": a for n in "fg" for p, a in (("loc", Z1.T[:1]), ("scale_tril", jnp.eye(5)[None]))}
        params |= {"g_auto_loc": Z1[:, 0], "g_auto_scale_tril": jnp.eye(5)}
        params |= {"w_auto_loc": jnp.zeros((6, 1)), "w_auto_scale": jnp.ones((6, 1))}
        return jax.eval_shape(lambda: dgp.ELBO().loss(jax.random.key(0), params, model, guide, X, Y))

    assert loss(skipping).shape == ()
    with pytest.raises(ValueError, match=r"got an error above it .*concatenate.*widen X to h"):
        loss(partial(skipping, widen=False))
