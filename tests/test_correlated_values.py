"""One function at several inputs of a row: likelihoods against the joint Gaussian of its values."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from scipy import stats
from sizes import mostly_long

import numpyro_dgp as dgp

A, B = jnp.array([[-0.9], [0.1], [0.6], [2.5]]), jnp.array([[-0.8], [0.9], [0.6], [2.2]])
Z = jnp.array([[-1.0], [0.0], [1.0]])
KERNEL = dgp.kernels.RBF(1.3, 0.7)
PARAMS = {
    "f_auto_loc": jnp.array([0.4, -1.0, 0.7]),
    "f_auto_scale_tril": jnp.array([[0.3, 0, 0], [0.2, 0.1, 0], [-0.1, 0.3, 0.5]]),
}


def duel(conditional, noise=None):
    def model(a, b, y=None):
        f = dgp.gp("f", KERNEL, dgp.Points(Z))
        with numpyro.plate("data", len(a)):
            numpyro.sample("y", dgp.Likelihood((f(a, noise=noise), f(b)), conditional), obs=y)

    return model


def joint(inputs=(A, B), params=PARAMS):
    """Means (N, k) and covariances (N, k, k) of f at k inputs of a row under q(u), from the kernel alone."""
    L = jnp.linalg.cholesky(KERNEL(Z, Z) + 1e-10 * jnp.eye(3))
    each = jnp.stack(inputs, 1)  # (N, k, 1)
    features = jax.vmap(lambda x: jnp.linalg.solve(L, KERNEL(Z, x)).T)(each)
    prior = jax.vmap(lambda x: KERNEL(x, x))(each)
    root = features @ params["f_auto_scale_tril"]
    covariance = prior - features @ features.mT + root @ root.mT
    return features @ params["f_auto_loc"], covariance


def posterior(model):
    return dgp.Posterior(model, dgp.guides.InducingPoint(model), PARAMS)


@pytest.fixture(autouse=True)
def in_double_precision():
    with jax.enable_x64(True):
        yield


@pytest.mark.slow
@pytest.mark.parametrize("noise", [None, 0.3])
def test_differences_are_those_of_the_joint_gaussian(noise, key):
    program = duel(lambda v, w: dist.Normal(v - w, 0.2), noise=noise)
    trace = handlers.trace(handlers.seed(program, 0)).get_trace(A, B)
    assert repr(trace["y"]["fn"]) == "Likelihood(Normal, closed form)"
    post = posterior(program)
    loc, covariance = joint()
    variance = covariance[:, 0, 0] + covariance[:, 1, 1] - 2 * covariance[:, 0, 1] + (noise or 0) ** 2 + 0.04
    mixture = post.predict(key, A, B)
    np.testing.assert_allclose(mixture.mean, loc[:, 0] - loc[:, 1], atol=1e-5)
    np.testing.assert_allclose(mixture.variance, variance, rtol=1e-6)
    y = jnp.array([0.3, -0.2, 0.1, -0.4])
    expected = stats.norm(loc[:, 0] - loc[:, 1], np.sqrt(variance)).logpdf(y)
    np.testing.assert_allclose(post.log_density(key, y, A, B), expected, rtol=1e-6)
    draws = post.using(num_samples=20000).sample(key, A, B)
    np.testing.assert_allclose(draws.var(0), variance, rtol=0.05)


@pytest.mark.long
def test_duels(key):
    """Probabilities of labels, by quadrature of the difference."""
    post = posterior(duel(lambda v, w: dist.Bernoulli(logits=3 * (v - w))))
    loc, C = joint()
    rule = dgp.likelihoods.GaussHermite(60)
    nodes = rule.nodes(loc[:, 0] - loc[:, 1], C[:, 0, 0] + C[:, 1, 1] - 2 * C[:, 0, 1])
    np.testing.assert_allclose(post.probs(key, A, B)[:, 1], nodes.mean(jax.nn.sigmoid(3 * nodes.points)), atol=2e-5)


@pytest.mark.slow
def test_the_function_itself_is_as_before(key):
    loc, C = joint()
    mixture = posterior(duel(lambda v, w: dist.Normal(v - w, 0.2))).predict_function(key, A, B)
    np.testing.assert_allclose(mixture.mean, loc, atol=1e-5)
    np.testing.assert_allclose(mixture.variance, jnp.diagonal(C, axis1=1, axis2=2), rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_several_outputs_at_three_inputs(key):
    def program(a, b, y=None):
        f = dgp.gp("f", KERNEL, dgp.Points(Z), outputs=2)
        with numpyro.plate("data", len(a)):
            normal = lambda v, w, z: dist.Normal(v - 2 * w + z, 0.1).to_event(1)  # noqa: E731
            numpyro.sample("y", dgp.Likelihood((f(a), f(b), f(a + 0.1)), normal), obs=y)

    other = {name: value * (1 - 0.5 * value) for name, value in PARAMS.items()}
    params = {name: jnp.stack([value, other[name]]) for name, value in PARAMS.items()}
    mixture = dgp.Posterior(program, dgp.guides.InducingPoint(program), params).predict(key, A, B)
    for p, of_output in enumerate((PARAMS, other)):
        loc, C = joint((A, B, A + 0.1), of_output)
        weights = jnp.array([1.0, -2.0, 1.0])
        np.testing.assert_allclose(mixture.mean[:, p], loc @ weights, atol=1e-5)
        np.testing.assert_allclose(mixture.variance[:, p], weights @ C @ weights + 0.01, rtol=3e-4)


@pytest.mark.slow
def test_beside_another_function(key):
    """The noise of a difference."""

    def program(a, b, y=None):
        f = dgp.gp("f", KERNEL, dgp.Points(Z))
        s = dgp.gp("s", dgp.kernels.RBF(0.5, 2.0), dgp.Points(Z))
        with numpyro.plate("data", len(a)):
            normal = lambda v, s, w: dist.Normal(v - w, jnp.exp(s))  # noqa: E731
            numpyro.sample("y", dgp.Likelihood((f(a), s(a), f(b)), normal), obs=y)

    params = {**PARAMS, "s_auto_loc": jnp.zeros(3), "s_auto_scale_tril": 0.1 * jnp.eye(3)}
    post = dgp.Posterior(program, dgp.guides.InducingPoint(program), params)
    mixture, log_scale = post.predict(key, A, B), post.predict_function(key, A, B)
    loc, C = joint()
    variance = C[:, 0, 0] + C[:, 1, 1] - 2 * C[:, 0, 1]
    noise = jnp.exp(2 * log_scale.mean[:, 1] + 2 * log_scale.variance[:, 1])
    np.testing.assert_allclose(mixture.mean, loc[:, 0] - loc[:, 1], atol=1e-5)
    np.testing.assert_allclose(mixture.variance, variance + noise, rtol=1e-3)


@pytest.mark.slow
def test_the_bound_needs_no_draws(key):

    def program(a, b, y=None):
        f = dgp.gp("f", KERNEL, dgp.Points(Z))
        with numpyro.plate("data", len(a)):
            numpyro.sample("y", dgp.Likelihood((f(a), f(b)), lambda v, w: dist.Bernoulli(logits=v - w)), obs=y)

    guide, y = dgp.guides.InducingPoint(program), jnp.array([1, 0, 1, 1])
    ours = dgp.ELBO().loss(key, PARAMS, program, guide, A, B, y)
    assert dgp.ELBO().loss(jax.random.key(7), PARAMS, program, guide, A, B, y) == ours
    loc, C = joint()
    nodes = dgp.likelihoods.GaussHermite(60).nodes(loc[:, 0] - loc[:, 1], C[:, 0, 0] + C[:, 1, 1] - 2 * C[:, 0, 1])
    expected = nodes.mean(dist.Bernoulli(logits=nodes.points).log_prob(y)).sum()
    q = dist.MultivariateNormal(PARAMS["f_auto_loc"], scale_tril=PARAMS["f_auto_scale_tril"])
    kl = dist.kl_divergence(q, dist.MultivariateNormal(jnp.zeros(3), jnp.eye(3)))
    np.testing.assert_allclose(-ours, expected - kl, atol=1e-4)


@pytest.mark.slow
def test_values_that_determine_each_other():
    """At one input twice, between rows that differ, there is no difference; slopes are finite."""

    def difference(b):
        with handlers.seed(rng_seed=0):
            f = dgp.gp("f", KERNEL, dgp.Points(Z))
        return dgp.Likelihood((f(A), f(b)), lambda v, w: dist.Normal(v - w, 0.1))

    same = A.at[0].set(-0.5)
    np.testing.assert_allclose(difference(same).variance[1:], 0.01, rtol=1e-3)
    assert difference(same).variance[0] > 0.011
    assert np.isfinite(jax.grad(lambda b: difference(b).log_prob(jnp.zeros(4)).sum())(same)).all()


@pytest.mark.slow
def test_bounds_are_expectations_under_the_joint_gaussian():
    """Given u, values are correlated by what it leaves open."""
    model = duel(lambda v, w: dist.Bernoulli(logits=3 * (v - w)))
    y = jnp.array([1, 0, 1, 1])
    u_f = jnp.array([0.4, -1.0, 0.7])
    sites = handlers.trace(handlers.substitute(model, {"f": u_f})).get_trace(A, B, y)
    loc, C = joint((A, B), {"f_auto_loc": u_f, "f_auto_scale_tril": jnp.zeros((3, 3))})
    nodes = dgp.likelihoods.GaussHermite(60).nodes(loc[:, 0] - loc[:, 1], C[:, 0, 0] + C[:, 1, 1] - 2 * C[:, 0, 1])
    expected = nodes.mean(dist.Bernoulli(logits=3 * nodes.points).log_prob(y))
    np.testing.assert_allclose(sites["y"]["fn"].log_prob(y), expected, atol=2e-5)


DIFFERENCE = lambda v, w: dist.Normal(v - w, 0.1)  # noqa: E731
LINE, X1, X2 = jnp.linspace(-1, 1, 4), jnp.array([[-0.9], [0.1], [0.6]]), jnp.array([[-0.8], [0.7], [0.6]])
PATCHES = dgp.kernels.Patches((2, 2), (1, 2))
MATERN = dgp.kernels.Matern52(0.8, 0.7)
IMAGES = jnp.sin(jnp.arange(24.0)).reshape(2, 3, 4)
HELD = {
    "Points": (dgp.Points(LINE[:, None]), MATERN, X1, X2),
    "PointsAndSlopes": (dgp.functions.PointsAndSlopes.with_gradients(LINE[:, None]), MATERN, X1, X2),
    "InducingPatches": (
        dgp.functions.InducingPatches(IMAGES[0, :, :2]),
        dgp.kernels.Convolutional(MATERN, PATCHES),
        *IMAGES,
    ),
    "Grid": (dgp.Grid(-4.0, 4.0, 10), MATERN, X1, X2),
    "Basis": (dgp.Basis(-4.0, 4.0, 10), MATERN, X1, X2),
    "StateSpace": (dgp.StateSpace(LINE), MATERN, X1, X2),
    "Harmonics": (dgp.Harmonics(1, 4), dgp.kernels.Zonal(MATERN), X1, X2),
}


@pytest.mark.slow
@pytest.mark.parametrize("outputs", [None, 2])
@pytest.mark.parametrize("name", mostly_long(["Points", "Basis"], HELD))
def test_every_representation(name, outputs, key):
    """With a belief about inducing values, and given some."""
    inducing, kernel, a, b = HELD[name]
    shape = () if outputs is None else (outputs,)
    conditional = DIFFERENCE if outputs is None else lambda v, w: DIFFERENCE(v, w).to_event(1)

    def program(*inputs):
        f = dgp.gp("f", kernel, inducing, outputs=outputs)
        with numpyro.plate("data", len(inputs[0])):
            of_rows = conditional if len(inputs) == 2 else lambda v: conditional(v, 0.0)
            numpyro.sample("y", dgp.Likelihood([f(x) for x in inputs], of_rows))
        return f.joint(jnp.stack(inputs, 1))

    def require(found, loc, C):
        """Of means (N, 2, ...) and covariances (N, P, 2, 2)."""
        C = jnp.broadcast_to(C, (len(a), *(shape or (1,)), 2, 2))
        variance = C[..., 0, 0] + C[..., 1, 1] - 2 * C[..., 0, 1] + 0.01
        np.testing.assert_allclose(found.variance, variance if shape else variance[:, 0], rtol=1e-4)
        np.testing.assert_allclose(found.mean, loc[:, 0] - loc[:, 1], rtol=1e-4, atol=1e-12)

    with handlers.seed(rng_seed=2), handlers.trace() as sites:
        values = program(a, b)
    require(sites["y"]["fn"], values.loc, values.covariance)

    v = sites["f"]["value"]
    root = 0.5 * jnp.tril(jax.random.normal(key, (*v.shape, v.shape[-1])))
    guide, params = dgp.guides.InducingPoint(program), {"f_auto_loc": v, "f_auto_scale_tril": root}
    posterior, N = dgp.Posterior(program, guide, params), len(a)
    whole = posterior.predict_jointly(key, jnp.concatenate([a, b]))
    C = whole.covariance.reshape(-1, 2, N, 2, N)
    C = jnp.stack([C[:, :, n, :, n] for n in range(N)])
    require(posterior.predict(key, a, b), jnp.stack([whole.mean[:N], whole.mean[N:]], 1), C)


@pytest.mark.slow
def test_slopes_and_sums_beside_values():
    """Against finite differences of joint values, and against joint values of all points of a sum."""
    points, weights = jnp.array([[-0.3], [0.4]]), jnp.array([[0.5, 0.5], [1.0, -1.0], [2.0, 0.3]])
    with handlers.seed(rng_seed=0):
        f = dgp.gp("f", dgp.kernels.RBF(0.8, 0.7), dgp.Points(LINE[:, None]))
    h = 1e-3
    near = f.joint(jnp.stack([X1, X2 + h, X2 - h], 1)).covariance[:, 0]
    slope = jnp.array([[1.0, 0, 0], [0, 0.5 / h, -0.5 / h]])
    expected = slope @ near @ slope.T
    found = dgp.Likelihood((f(X1), f.grad(X2)), DIFFERENCE)
    variance = expected[:, 0, 0] + expected[:, 1, 1] - 2 * expected[:, 0, 1] + 0.01
    np.testing.assert_allclose(found.variance, variance, rtol=1e-3)
    assert (abs(expected[:, 0, 1]) > 1e-3).any()
    everywhere = f.joint(jnp.concatenate([jnp.broadcast_to(points, (3, 2, 1)), X2[:, None]], 1)).covariance[:, 0]
    both = jnp.stack([jnp.pad(weights, ((0, 0), (0, 1))), jnp.broadcast_to(jnp.array([0.0, 0, 1]), (3, 3))], 1)
    expected = both @ everywhere @ both.mT
    found = dgp.Likelihood((f.linear(points, weights), f(X2)), DIFFERENCE)
    variance = expected[:, 0, 0] + expected[:, 1, 1] - 2 * expected[:, 0, 1] + 0.01
    np.testing.assert_allclose(found.variance, variance, rtol=1e-3)


@pytest.mark.slow
def test_single_precision_at_inducing_inputs():
    """What v leaves open is rounding there: of all differences the variance is that in double precision."""
    at = jnp.array([[-1.0], [0.0], [0.999], [-1.0], [0.1]]), jnp.array([[1.0], [0.001], [1.0], [-0.99], [0.3]])

    def variances(dtype):
        with jax.enable_x64(dtype == "float64"), handlers.seed(rng_seed=0):
            f = dgp.gp("f", dgp.kernels.RBF(1.3, 0.7), dgp.Points(jnp.asarray(Z, dtype)))
            a, b = (jnp.asarray(x, dtype) for x in at)
            likelihood = dgp.Likelihood((f(a), f(b), f(a)), lambda v, w, z: dist.Normal(v - w, 0.01))
            assert likelihood.f_x.loc.dtype == dtype
            parts = likelihood.f_x.parts
            assert all((part.variance >= 0).all() for part in parts)
            return likelihood.variance

    np.testing.assert_allclose(variances("float32"), variances("float64"), atol=1e-5)
