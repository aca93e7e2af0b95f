"""One layer against dense algebra: moments, joint covariances, separate kernels and inputs, exact processes."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from dense import kl, log_normal, rbf, svgp
from numpyro.distributions import kl_divergence

import numpyro_dgp as dgp
from numpyro_dgp.functions.function_values import FunctionValues
from numpyro_dgp.functions.joint_values import JointValues, WhitenedValues
from numpyro_dgp.functions.points import SparseFunction
from numpyro_dgp.functions.weights import DiagonalBelief, FullBelief

rng = np.random.default_rng(0)
X, Z = rng.normal(size=(7, 2)), rng.normal(size=(4, 2))
KERNEL = dgp.kernels.RBF(1.3, np.array([0.8, 1.2]))
LS = np.array([0.8, 1.2])


def open_gp(value, *args, **kwargs):
    with numpyro.handlers.substitute(data={"f": value}), numpyro.handlers.seed(rng_seed=0):
        return dgp.gp("f", *args, **kwargs)


def beliefs(P=None, M=4):
    shape = (M,) if P is None else (P, M)
    m, L = rng.normal(size=shape), np.tril(rng.normal(size=(*shape, M)))
    return FullBelief(jnp.array(m), jnp.array(L))


def dense(belief_loc, belief_cov, k=rbf, Zp=Z, variance=1.3, lengthscale=LS):
    Kzz = k(Zp, Zp, variance, lengthscale)
    L = np.linalg.cholesky(Kzz)
    return svgp(
        Kzz, k(Zp, X, variance, lengthscale), k(X, X, variance, lengthscale), L @ belief_loc, L @ belief_cov @ L.T
    )


@pytest.mark.slow
def test_marginal_mode_is_svgp():
    """Mean and covariance of one layer are those of dense algebra; the diagonal is the marginal variance."""
    q = beliefs()
    f = open_gp(q, KERNEL, dgp.Points(Z))
    mean, covariance = dense(q.loc, q.covariance)
    np.testing.assert_allclose(f(X).mean, mean, atol=1e-7)
    np.testing.assert_allclose(f(X).variance, np.diag(covariance), atol=1e-7)
    np.testing.assert_allclose(f.joint(X).covariance[0], covariance, atol=1e-7)
    np.testing.assert_allclose(f.joint(X).variance, f(X).variance, atol=1e-9)
    np.testing.assert_allclose(f.joint(X).marginals().variance, f(X).variance, atol=1e-9)


@pytest.mark.slow
def test_draw_mode_is_the_conditional():
    v = rng.normal(size=4)
    f = open_gp(jnp.array(v), KERNEL, dgp.Points(Z))
    mean, covariance = dense(v, np.zeros((4, 4)))
    np.testing.assert_allclose(f(X).mean, mean, atol=1e-7)
    np.testing.assert_allclose(f.joint(X).covariance[0], covariance, atol=1e-7)
    values = rng.normal(size=7)
    np.testing.assert_allclose(
        f(X).log_prob(values), dist.Normal(mean, np.sqrt(np.diag(covariance))).log_prob(values), rtol=1e-6
    )
    np.testing.assert_allclose(
        f.joint(X, noise=0.1).log_prob(values), log_normal(values, mean, covariance + 0.01 * np.eye(7)), rtol=1e-6
    )


@pytest.mark.slow
def test_diagonal_belief_is_a_full_one():
    m, s = rng.normal(size=(2, 3, 4))
    full = open_gp(FullBelief(jnp.array(m), jax.vmap(jnp.diag)(jnp.array(s))), KERNEL, dgp.Points(Z), outputs=3)
    diagonal = open_gp(DiagonalBelief(jnp.array(m), jnp.array(s)), KERNEL, dgp.Points(Z), outputs=3)
    np.testing.assert_allclose(full(X).variance, diagonal(X).variance, rtol=1e-10)
    np.testing.assert_allclose(full.joint(X).covariance, diagonal.joint(X).covariance, rtol=1e-9, atol=1e-12)


def test_prior_belief_gives_the_prior():
    f = open_gp(FullBelief(jnp.zeros(4), jnp.eye(4)), KERNEL, dgp.Points(Z))
    np.testing.assert_allclose(f.joint(X).covariance[0], rbf(X, X, 1.3, LS), atol=1e-8)


@pytest.mark.smoke
def test_outputs_are_independent_copies():
    q = beliefs(3)
    f = open_gp(q, KERNEL, dgp.Points(Z), outputs=3, mean=dgp.means.LinearMean(np.ones((2, 3)), 0.5))
    assert f(X).batch_shape == (7,)
    assert f(X).event_shape == (3,)
    for p in range(3):
        mean, covariance = dense(q.loc[p], q.covariance[p])
        np.testing.assert_allclose(f(X).mean[:, p], mean + X.sum(1) + 0.5, atol=1e-7)
        np.testing.assert_allclose(f(X).variance[:, p], np.diag(covariance), atol=1e-7)
        np.testing.assert_allclose(f.joint(X).covariance[p], covariance, atol=1e-7)


@pytest.mark.parametrize("separate_inputs", [True, False])
@pytest.mark.parametrize("separate_kernels", [True, False])
def test_separate_kernels_and_inducing_inputs(separate_inputs, separate_kernels):
    q, Zs = beliefs(2), np.stack([Z, Z + 0.3])
    scales = [LS, 2 * LS] if separate_kernels else [LS, LS]
    kernel = [dgp.kernels.RBF(1.3, ls) for ls in scales] if separate_kernels else KERNEL
    f = open_gp(q, kernel, dgp.Points(Zs if separate_inputs else Z), outputs=2)
    for p in range(2):
        Zp = Zs[p] if separate_inputs else Z
        mean, covariance = dense(q.loc[p], q.covariance[p], Zp=Zp, lengthscale=scales[p])
        np.testing.assert_allclose(f(X).mean[:, p], mean, atol=1e-6)
        np.testing.assert_allclose(f(X).variance[:, p], np.diag(covariance), atol=1e-6)
        np.testing.assert_allclose(f.joint(X).covariance[p], covariance, atol=1e-6)


def test_mixed_kernel_types_per_output():
    kernels = [KERNEL, dgp.kernels.Matern32() + dgp.kernels.Linear()]
    f = open_gp(beliefs(2), kernels, dgp.Points(Z), outputs=2)
    single = open_gp(FullBelief(f.v.loc[1], f.v.scale_tril[1]), kernels[1], dgp.Points(Z))
    np.testing.assert_allclose(f(X).mean[:, 1], single(X).mean, rtol=1e-9)
    np.testing.assert_allclose(f(X).variance[:, 1], single(X).variance, rtol=1e-9)


@pytest.mark.long
@pytest.mark.parametrize("outputs", [None, 3])
def test_leading_dimensions_broadcast(outputs):
    f = open_gp(beliefs(outputs), KERNEL, dgp.Points(Z), outputs=outputs)
    batch = rng.normal(size=(2, 5, 7, 2))
    tail = () if outputs is None else (outputs,)
    assert f(batch).shape() == (2, 5, 7, *tail)
    np.testing.assert_allclose(f(batch).mean[1, 3], f(batch[1, 3]).mean, rtol=1e-8, atol=1e-10)
    np.testing.assert_allclose(f(batch).variance[1, 3], f(batch[1, 3]).variance, rtol=1e-8, atol=1e-10)
    joint = f.joint(batch)
    assert joint.batch_shape == (2, 5)
    assert joint.event_shape == (7, *tail)
    np.testing.assert_allclose(joint.covariance[1, 3], f.joint(batch[1, 3]).covariance, rtol=1e-7, atol=1e-9)
    assert joint.sample(jax.random.key(0), (4,)).shape == (4, 2, 5, 7, *tail)
    assert joint.log_prob(joint.loc).shape == (2, 5)
    separate = open_gp(beliefs(2), [KERNEL, dgp.kernels.Matern12()], dgp.Points(Z), outputs=2)
    np.testing.assert_allclose(
        separate.joint(batch).covariance[1, 3], separate.joint(batch[1, 3]).covariance, rtol=1e-7, atol=1e-9
    )


@pytest.mark.smoke
def test_process_noise():
    f = open_gp(beliefs(2), KERNEL, dgp.Points(Z), outputs=2)
    noise = np.array([0.1, 0.5])
    np.testing.assert_allclose(f(X, noise=noise).variance, f(X).variance + noise**2, rtol=1e-12)
    added = f.joint(X, noise=noise).covariance - f.joint(X).covariance
    np.testing.assert_allclose(added, noise[:, None, None] ** 2 * np.eye(7), atol=1e-12)


@pytest.mark.slow
def test_samples_have_the_moments(key):
    q = beliefs(2)
    f = open_gp(q, KERNEL, dgp.Points(Z), outputs=2)
    for values in (f(X), f.joint(X)):
        draws = values.sample(key, (20_000,))
        error = jnp.sqrt(values.variance / 20_000)
        assert (jnp.abs(draws.mean(0) - values.mean) < 5 * error).all()
        np.testing.assert_allclose(draws.var(0) / values.variance, 1, atol=0.06)
    centred = draws[..., 0] - values.mean[:, 0]
    empirical = centred.T @ centred / 20_000
    np.testing.assert_allclose(empirical, values.covariance[0], atol=0.1 * float(values.variance.max()))


@pytest.mark.slow
def test_log_prob_with_a_belief_is_the_expected_log_density(key):
    """In marginal mode log_prob is the expectation over q(u) of log p(h | u)."""
    q, h = beliefs(), rng.normal(size=7)
    marginal = open_gp(q, KERNEL, dgp.Points(Z))
    for name in ("__call__", "joint"):

        def given(v, name=name):
            return getattr(open_gp(v, KERNEL, dgp.Points(Z)), name)(X, noise=0.5).log_prob(h)

        draws = jax.vmap(given)(q.sample(key, (4000,))).reshape(4000, -1)
        error = draws.std(0) / np.sqrt(4000)
        expected = getattr(marginal, name)(X, noise=0.5).log_prob(h).reshape(-1)
        assert (jnp.abs(draws.mean(0) - expected) < 4 * error).all()


@pytest.mark.slow
def test_kl_divergences_against_dense_algebra():
    q = FunctionValues(jnp.array(rng.normal(size=(7, 2))), jnp.array(rng.gamma(2.0, size=(7, 2))))
    p = FunctionValues(jnp.array(rng.normal(size=(7, 2))), jnp.array(rng.gamma(2.0, size=(7, 2))))
    for n in range(7):
        S = [np.diag(np.asarray(d.variance[n])) for d in (q, p)]
        expected = kl(np.asarray(q.loc[n]), S[0], np.asarray(p.loc[n]), S[1])
        np.testing.assert_allclose(kl_divergence(q, p)[n], expected, rtol=1e-10)
    prior = JointValues(jnp.array(rng.normal(size=(5, 2))), jnp.array([rbf(X[:5], X[:5]), rbf(X[:5], X[:5], 2.0)]))
    shift, root = rng.normal(size=(2, 5)), np.tril(rng.normal(size=(2, 5, 5)))
    q = WhitenedValues(prior, jnp.array(shift), jnp.array(root))
    parts = [[np.asarray(a) for a in (d.loc[:, p], d.covariance[p])] for p in range(2) for d in (q, prior)]
    expected = kl(*parts[0], *parts[1]) + kl(*parts[2], *parts[3])
    np.testing.assert_allclose(kl_divergence(q, prior), expected, rtol=1e-6)
    value, white = q.sample_with_intermediates(jax.random.key(0))
    expected = sum(log_normal(value[:, p], *parts[2 * p]) for p in range(2))
    np.testing.assert_allclose(q.log_prob(value, white), expected, rtol=1e-7)
    np.testing.assert_allclose(q.log_prob(value), expected, rtol=1e-6)


@pytest.mark.slow
def test_belief_densities(key):
    full = beliefs(2)
    value, white = full.sample_with_intermediates(key)
    expected = sum(log_normal(value[p], full.loc[p], full.covariance[p]) for p in range(2))
    np.testing.assert_allclose(full.log_prob(value), expected, rtol=1e-9)
    np.testing.assert_allclose(full.log_prob(value, white), expected, rtol=1e-9)
    diagonal = DiagonalBelief(full.loc, full.loc + 2.0)
    value, white = diagonal.sample_with_intermediates(key)
    expected = dist.Normal(diagonal.loc, jnp.abs(diagonal.scale)).log_prob(value).sum()
    np.testing.assert_allclose(diagonal.log_prob(value), expected, rtol=1e-9)
    np.testing.assert_allclose(diagonal.log_prob(value, white), expected, rtol=1e-9)


def test_log_density_of_a_nearly_point_belief_keeps_its_digits(key):
    """With scale 1e-30 the value no longer remembers its noise; the draw behind it does."""
    belief = DiagonalBelief(jnp.ones(4), jnp.full(4, 1e-30))
    value, white = belief.sample_with_intermediates(key)
    expected = dist.Normal().log_prob(white[0]).sum() - 4 * jnp.log(1e-30)
    np.testing.assert_allclose(belief.log_prob(value, white), expected, rtol=1e-12)


def test_exact_process_is_the_gaussian_process():
    f = dgp.gp("f", KERNEL, None)
    y = rng.normal(size=7)
    expected = log_normal(y, np.zeros(7), rbf(X, X, 1.3, LS) + 0.01 * np.eye(7))
    np.testing.assert_allclose(f(X, noise=0.1).log_prob(y), expected, rtol=1e-8)
    assert f(X).event_shape == (7,)
    two = dgp.gp("f", [KERNEL, dgp.kernels.Matern12()], None, outputs=2, mean=dgp.means.IdentityMean())
    assert two(X).event_shape == (7, 2)
    np.testing.assert_allclose(two(X).variance, np.tile([1.3, 1.0], (7, 1)))
    np.testing.assert_allclose(two(X).mean, X)


@pytest.mark.slow
def test_conditioning_an_exact_process():
    f = dgp.gp("f", KERNEL, None, mean=dgp.means.ConstantMean(0.5))
    values, new = rng.normal(size=7), rng.normal(size=(5, 2))
    posterior = f.condition(X, values)
    assert isinstance(posterior, SparseFunction)
    gain = np.linalg.solve(rbf(X, X, 1.3, LS), rbf(X, new, 1.3, LS)).T
    np.testing.assert_allclose(posterior(new).mean, 0.5 + gain @ (values - 0.5), atol=1e-6)
    covariance = rbf(new, new, 1.3, LS) - gain @ rbf(X, new, 1.3, LS)
    np.testing.assert_allclose(posterior.joint(new).covariance[0], covariance, atol=1e-6)
    np.testing.assert_allclose(posterior(X).mean, values, atol=1e-6)


NOISES = {
    "a number": (0.3, None, KERNEL),
    "one output": (np.array([0.3]), 1, KERNEL),
    "one per output": (np.array([0.3, 0.1]), 2, KERNEL),
    "two kernels": (np.array([0.3, 0.1]), 2, [KERNEL, dgp.kernels.Matern32(0.8, 0.5)]),
    "two kernels, a number": (0.3, 2, [KERNEL, dgp.kernels.Matern32(0.8, 0.5)]),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", NOISES)
def test_conditioning_on_values_with_noise(case):
    """The posterior of f in regression, by an exact process and by one with all values as neighbours."""
    noise, outputs, kernel = NOISES[case]
    values, new = rng.normal(size=(7, outputs or 1)), rng.normal(size=(5, 2))
    y = values[:, 0] if outputs is None else values
    mean, covariance = np.zeros((5, outputs or 1)), np.zeros((outputs or 1, 5, 5))
    for p in range(outputs or 1):
        k = kernel[p] if isinstance(kernel, list) else kernel
        K = np.asarray(k.gram(X)) + np.ravel(noise)[p if np.size(noise) > 1 else 0] ** 2 * np.eye(7)
        gain = np.linalg.solve(K, k(X, new)).T
        mean[:, p] = 0.5 + gain @ (values[:, p] - 0.5)
        covariance[p] = k.gram(new) - gain @ np.asarray(k(X, new))
    variance = np.diagonal(covariance, axis1=1, axis2=2).T
    for inducing in (None, dgp.Neighbours(X, 7)):
        f = dgp.gp("f", kernel, inducing, outputs=outputs, mean=dgp.means.ConstantMean(0.5))
        found, noisy = f.condition(X, y, noise=noise)(new), f.condition(X, y, noise=noise)(new, noise=0.2)
        np.testing.assert_allclose(found.mean.reshape(mean.shape), mean, atol=1e-6)
        np.testing.assert_allclose(found.variance.reshape(mean.shape), variance, atol=1e-6)
        np.testing.assert_allclose(noisy.variance - found.variance, 0.04, atol=1e-12)
        if inducing is None:
            joint = f.condition(X, y, noise=noise).joint(new)
            np.testing.assert_allclose(np.broadcast_to(joint.covariance, covariance.shape), covariance, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("x64", [True, False])
@pytest.mark.parametrize("outputs", [None, 2])
def test_keeps_float32(x64, outputs, key):
    q, x, z = beliefs(outputs), np.float32(X), np.float32(Z)
    expected = open_gp(q, KERNEL, dgp.Points(Z), outputs=outputs)
    jax.config.update("jax_enable_x64", x64)
    try:
        q32 = FullBelief(jnp.float32(q.loc), jnp.float32(q.scale_tril))
        f = open_gp(q32, KERNEL, dgp.Points(z), outputs=outputs)
        drawn = open_gp(q32.sample(key), KERNEL, dgp.Points(z), outputs=outputs)
        values, joint = f(x), f.joint(x, noise=0.1)
        arrays = [
            values.mean,
            values.variance,
            joint.covariance,
            joint.sample(key),
            values.sample(key),
            values.log_prob(values.mean),
            drawn(x).mean,
        ]
    finally:
        jax.config.update("jax_enable_x64", True)
    assert {a.dtype for a in arrays} == {jnp.dtype("float32")}
    np.testing.assert_allclose(values.mean, expected(X).mean, rtol=2e-3, atol=2e-3)
    np.testing.assert_allclose(values.variance, expected(X).variance, rtol=5e-3, atol=5e-3)


NAN = np.where(np.arange(8).reshape(4, 2) == 3, np.nan, 0.0)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: dgp.Points(Z[:, 0]), r"Points: expected Z of shape \(M, D\).*got \(4,\): for one input column"),
        (lambda: dgp.Points(np.zeros((0, 2))), r"Points: expected Z of shape"),
        (lambda: dgp.Points(NAN), r"expected finite inducing inputs Z, got 1 NaN.*first at index \(1, 1\)"),
        (
            lambda: open_gp(jnp.zeros(4), KERNEL, Z),
            r"expected inducing=dgp.Points\(Z\), .*dgp.Grid\(.*\), or None, got ndarray",
        ),
        (lambda: open_gp(jnp.zeros(4), KERNEL, dgp.Points(Z), outputs=0), "expected outputs to be a positive integer"),
        (
            lambda: open_gp(jnp.zeros(4), [KERNEL] * 3, dgp.Points(Z), outputs=2),
            "one kernel per output, outputs=2, got 3",
        ),
        (lambda: open_gp(jnp.zeros(4), "rbf", dgp.Points(Z)), "expected a kernel, a callable"),
        (
            lambda: open_gp(jnp.zeros(4), KERNEL, dgp.Points(np.stack([Z] * 3)), outputs=2),
            r"Z \(P, M, D\) with P",
        ),
        (lambda: open_gp(jnp.zeros(4), KERNEL, dgp.Points(Z))(X[:, :1]), "expected inputs with D = 2 columns"),
        (lambda: open_gp(jnp.zeros(4), KERNEL, dgp.Points(Z))(X[0, 0]), r"expected inputs of shape \(..., N, D\)"),
        (lambda: open_gp(jnp.zeros(4), KERNEL, dgp.Points(Z))(NAN), r"expected finite inputs of f\(x\), got 1 NaN"),
        (
            lambda: open_gp(jnp.zeros(4), KERNEL, dgp.Points(Z))(X, noise=0.0),
            r"expected noise to be positive",
        ),
        (
            lambda: open_gp(jnp.zeros((2, 4)), KERNEL, dgp.Points(Z), outputs=2, mean=lambda x: x[:, :1] * jnp.ones(3))(
                X
            ),
            r"expected a mean function with 2 output\(s\), got one with 3",
        ),
    ],
)
def test_bad_input(build, message):
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.slow
def test_a_layer_inside_a_plate_is_refused():
    with (
        numpyro.handlers.seed(rng_seed=0),
        numpyro.plate("data", 3),
        pytest.raises(ValueError, match="outside every plate"),
    ):
        dgp.gp("f", KERNEL, dgp.Points(Z))(Z)
