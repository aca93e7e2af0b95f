"""Likelihoods: every NumPyro distribution, integrated in closed form, by quadrature and by draws."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from scipy import integrate, stats
from sizes import mostly_long

import numpyro_dgp as dgp
from numpyro_dgp.functions.function_values import FunctionValues
from numpyro_dgp.functions.joint_values import JointValues

LOC, VARIANCE = jnp.array([0.3, -0.5, 1.1]), jnp.array([0.4, 1.2, 0.05])
F = FunctionValues(LOC, VARIANCE, event_dim=0)
s = jnp.array([0.3, 0.5, 0.7])  # one per datum

# conditional, observations, whether an expectation in closed form is expected
SCALAR = {
    "normal": (lambda v: dist.Normal(v, 0.3), [0.1, 0.2, 1.0], True),
    "normal-affine": (lambda v: dist.Normal(2 * v - s, s), [0.1, 0.2, 1.0], True),
    "heteroscedastic": (lambda v: dist.Normal(0.0, jnp.exp(v)), [0.1, 0.2, 1.0], False),
    "student-t": (lambda v: dist.StudentT(3.0, v, 0.3), [0.1, 5.0, 1.0], False),
    "laplace": (lambda v: dist.Laplace(jnp.sin(v), 0.3), [0.1, 0.2, 1.0], False),
    "bernoulli-logits": (lambda v: dist.Bernoulli(logits=v), [0, 1, 1], False),
    "bernoulli-probit": (lambda v: dist.Bernoulli(probs=jax.scipy.stats.norm.cdf(v)), [0, 1, 1], False),
    "poisson-exp": (lambda v: dist.Poisson(s * jnp.exp(v)), [0, 2, 3], True),
    "poisson-softplus": (lambda v: dist.Poisson(jax.nn.softplus(v)), [0, 2, 3], False),
    "exponential": (lambda v: dist.Exponential(jnp.exp(-v)), [0.1, 2.0, 3.0], True),
    "gamma": (lambda v: dist.Gamma(2.0, 2.0 / jnp.exp(v)), [0.1, 2.0, 3.0], True),
    "gamma-shape": (lambda v: dist.Gamma(jnp.exp(v), 1.0), [0.1, 2.0, 3.0], False),
    "beta": (lambda v: dist.Beta(3 * jax.nn.sigmoid(v), 3 - 3 * jax.nn.sigmoid(v)), [0.1, 0.4, 0.9], False),
    "ordered-logistic": (lambda v: dist.OrderedLogistic(v, jnp.array([-0.5, 0.5])), [0, 1, 2], False),
    "negative-binomial": (lambda v: dist.NegativeBinomial2(jnp.exp(v), 3.0), [0, 2, 3], False),
    "zero-inflated": (lambda v: dist.ZeroInflatedPoisson(0.1, jnp.exp(v)), [0, 2, 3], False),
}
every = pytest.mark.parametrize("name", SCALAR)
FEW = ["normal-affine", "laplace", "bernoulli-logits", "poisson-exp", "ordered-logistic"]
few = pytest.mark.parametrize("name", mostly_long(FEW, SCALAR))


def adaptive(function, n, loc=LOC, variance=VARIANCE):
    """Expectation of a function of v_n by adaptive quadrature, one datum at a time."""
    m, sd = float(loc[n]), float(jnp.sqrt(variance[n]))
    integrand = jax.jit(lambda v: function(jnp.broadcast_to(v, loc.shape))[n])
    kinks = [m - 3 * sd, m, m + 3 * sd, 0.0, np.pi / 2]
    value = integrate.quad(
        lambda v: float(integrand(v)) * stats.norm.pdf(v, m, sd),
        m - 9 * sd,
        m + 9 * sd,
        points=[k for k in sorted(kinks) if abs(k - m) < 9 * sd],
        epsabs=1e-9,
        limit=200,
    )
    return value[0]


@pytest.mark.slow
@few
def test_expectations_against_adaptive_quadrature(name):
    conditional, y, _ = SCALAR[name]
    y = jnp.array(y)
    # A kink (Laplace) or a pole near the real axis (Student-t) costs Gauss-Hermite its exponential convergence.
    tolerance = {"laplace": 1e-2, "student-t": 1e-4}.get(name, 1e-6)
    likelihood = dgp.Likelihood(F, conditional, integrate=dgp.likelihoods.GaussHermite(200))
    for n in range(3):
        expected = adaptive(lambda v: conditional(v).log_prob(y), n)
        np.testing.assert_allclose(likelihood.log_prob(y)[n], expected, rtol=tolerance, atol=tolerance)
        expected = np.log(adaptive(lambda v: jnp.exp(conditional(v).log_prob(y)), n))
        np.testing.assert_allclose(likelihood.log_marginal(y)[n], expected, rtol=tolerance, atol=tolerance)


@pytest.mark.slow
@every
def test_default_rule_is_accurate(name):
    conditional, y, closed = SCALAR[name]
    likelihood = dgp.Likelihood(F, conditional)
    assert ("closed form" in repr(likelihood)) == closed
    assert isinstance(likelihood.rule, dgp.likelihoods.GaussHermite)
    fine = dgp.Likelihood(F, conditional, integrate=dgp.likelihoods.GaussHermite(300))
    tolerance = 0.1 if name == "laplace" else 2e-3
    np.testing.assert_allclose(likelihood.log_prob(jnp.array(y)), fine.log_prob(jnp.array(y)), atol=tolerance)


@pytest.mark.smoke
@few
def test_closed_form_equals_quadrature_equals_draws(name, key):
    conditional, y, _ = SCALAR[name]
    y = jnp.array(y)
    draws = jax.vmap(lambda v: conditional(v).log_prob(y))(F.sample(key, (100_000,)))
    error = draws.std(0) / np.sqrt(100_000)
    assert (
        jnp.abs(draws.mean(0) - dgp.Likelihood(F, conditional).log_prob(y))
        < 5 * error + (0.1 if name == "laplace" else 1e-3)
    ).all()


@pytest.mark.slow
@few
def test_samples_and_moments(name, key):
    conditional, _, _ = SCALAR[name]
    likelihood = dgp.Likelihood(F, conditional)
    y = likelihood.sample(key, (50_000,))
    assert y.shape == (50_000, 3)
    assert likelihood.sample(key).shape == (3,)
    if name in ("ordered-logistic", "student-t", "zero-inflated"):
        return  # no finite, or no implemented, moments
    y = jnp.asarray(y, float)
    error = y.std(0) / np.sqrt(50_000)
    assert (jnp.abs(y.mean(0) - likelihood.mean) < 5 * error).all()
    np.testing.assert_allclose(y.var(0) / likelihood.variance, 1, atol=0.25)


def test_normal_moments_and_densities_exactly():
    likelihood = dgp.Likelihood(F, SCALAR["normal-affine"][0])
    np.testing.assert_allclose(likelihood.mean, 2 * LOC - s, rtol=1e-12)
    np.testing.assert_allclose(likelihood.variance, s**2 + 4 * VARIANCE, rtol=1e-12)
    y = jnp.array([0.1, 0.2, 1.0])
    expected = dist.Normal(2 * LOC - s, jnp.sqrt(s**2 + 4 * VARIANCE)).log_prob(y)
    np.testing.assert_allclose(likelihood.log_marginal(y), expected, rtol=1e-12)


MEANS = jnp.array([[0.3, -0.5], [0.2, 1.0], [0.0, 0.1]])
VARIANCES = jnp.array([[0.4, 0.2], [1.0, 0.3], [0.1, 0.1]])
PAIRS = FunctionValues(MEANS, VARIANCES)


@pytest.mark.slow
def test_several_outputs_factorise():
    y = jnp.array([[0.0, 1.0], [0.5, 0.5], [1.0, 2.0]])
    together = dgp.Likelihood(PAIRS, lambda v: dist.StudentT(4.0, v, jnp.array([0.3, 0.5])).to_event(1))
    assert isinstance(together.rule, dgp.likelihoods.GaussHermite)
    assert (together.batch_shape, together.event_shape) == ((3,), (2,))
    for method in ("log_prob", "log_marginal"):
        parts = [
            getattr(
                dgp.Likelihood(
                    FunctionValues(MEANS[:, p], VARIANCES[:, p], event_dim=0),
                    lambda v, p=p: dist.StudentT(4.0, v, [0.3, 0.5][p]),
                ),
                method,
            )(y[:, p])
            for p in range(2)
        ]
        np.testing.assert_allclose(getattr(together, method)(y), sum(parts), rtol=1e-10)


@pytest.mark.slow
def test_mixed_outputs_are_integrated_by_draws(key):
    """A mean and a log scale from two functions: no rule over single outputs is correct."""
    y = jnp.array([0.1, 0.2, 0.3])
    conditional = lambda v: dist.Normal(v[..., 0], jnp.exp(v[..., 1]))  # noqa: E731
    likelihood = dgp.Likelihood(PAIRS, conditional, integrate=dgp.likelihoods.MonteCarlo(200_000, key))
    assert not likelihood.factorised
    m, g, a, b = MEANS[:, 0], MEANS[:, 1], VARIANCES[:, 0], VARIANCES[:, 1]
    exact = -0.5 * jnp.log(2 * jnp.pi) - g - 0.5 * ((y - m) ** 2 + a) * jnp.exp(-2 * g + 2 * b)
    np.testing.assert_allclose(likelihood.log_prob(y), exact, rtol=0.05)
    four = FunctionValues(jnp.zeros((3, 4)), jnp.ones((3, 4)))
    with pytest.raises(
        ValueError, match=r"Normal, which mixes the 4 outputs of f: use integrate=dgp\.likelihoods\.MonteCarlo"
    ):
        dgp.Likelihood(four, conditional, integrate=dgp.likelihoods.GaussHermite(5))


CLASSES = FunctionValues(jnp.array([[0.3, -0.5, 1.0], [0.2, 1.0, -2.0]]), jnp.array([[0.4, 0.2, 0.3], [1.0, 0.3, 0.1]]))


@pytest.mark.long
def test_softmax(key):
    y = jnp.array([2, 0])
    likelihood = dgp.Likelihood(
        CLASSES, lambda v: dist.Categorical(logits=v), integrate=dgp.likelihoods.MonteCarlo(200_000, key)
    )
    v = CLASSES.sample(jax.random.key(1), (200_000,))
    log_p = jnp.take_along_axis(jax.nn.log_softmax(v), y[None, :, None], -1)[..., 0]
    np.testing.assert_allclose(likelihood.log_prob(y), log_p.mean(0), atol=0.02)
    np.testing.assert_allclose(likelihood.log_marginal(y), jnp.log(jnp.exp(log_p).mean(0)), atol=0.02)
    assert likelihood.sample(key).shape == (2,)


@pytest.mark.long
@pytest.mark.parametrize("epsilon", [1e-3, 0.3])
def test_robust_max(key, epsilon):
    y = jnp.array([2, 0])
    likelihood = dgp.Likelihood(CLASSES, lambda v: dgp.likelihoods.RobustMax(v, epsilon))
    v = CLASSES.sample(key, (400_000,))
    probability = (v.argmax(-1) == y).mean(0)
    error = 5 * np.sqrt(0.25 / 400_000)
    expected = probability * np.log(1 - epsilon) + (1 - probability) * np.log(epsilon / 2)
    np.testing.assert_allclose(likelihood.log_prob(y), expected, atol=error * abs(np.log(epsilon)) + 1e-3)
    density = probability * (1 - epsilon) + (1 - probability) * epsilon / 2
    np.testing.assert_allclose(jnp.exp(likelihood.log_marginal(y)), density, atol=error + 1e-3)
    classes = likelihood.sample(key, (50_000,))
    np.testing.assert_allclose((classes == y).mean(0), density, atol=0.01)
    np.testing.assert_allclose(dgp.likelihoods.RobustMax(MEANS, epsilon).probs.sum(-1), 1, rtol=1e-12)


def test_marginal_collapse_keeps_the_belief_outside_the_logarithm():
    """log_prob = E_{q(u)} log E_{p(v|u)} p(y | v), a bound for the conditionally independent model."""
    y = jnp.array([0.1, 0.2, 1.0])
    f = FunctionValues(LOC, VARIANCE, jnp.array([0.5, 0.1, 0.2]), event_dim=0)
    likelihood = dgp.Likelihood(f, lambda v: dist.Normal(v, 0.3), collapse="marginal")
    total = 0.09 + VARIANCE
    expected = dist.Normal(LOC, jnp.sqrt(total)).log_prob(y) - 0.5 * f.belief_variance / total
    np.testing.assert_allclose(likelihood.log_prob(y), expected, rtol=1e-10)
    known = dgp.Likelihood(F, lambda v: dist.Normal(v, 0.3), collapse="marginal")
    np.testing.assert_allclose(known.log_prob(y), known.log_marginal(y), rtol=1e-12)


def test_joint_values_use_their_marginals():
    root = np.random.default_rng(0).normal(size=(3, 3))
    joint = JointValues(LOC, jnp.array(root @ root.T)[None], event_dim=1)
    y = jnp.array([0.1, 0.2, 1.0])
    a = dgp.Likelihood(joint, lambda v: dist.Normal(v, 0.3)).log_prob(y)
    b = dgp.Likelihood(
        FunctionValues(LOC, jnp.diag(jnp.array(root @ root.T)), event_dim=0), lambda v: dist.Normal(v, 0.3)
    )
    np.testing.assert_allclose(a, b.log_prob(y), rtol=1e-12)


@pytest.mark.slow
def test_conditional_may_index_its_argument_as_written():
    likelihood = dgp.Likelihood(
        PAIRS, lambda v: dist.Normal(v[:, 0] + v[:, 1], 0.5), integrate=dgp.likelihoods.MonteCarlo(10)
    )
    assert likelihood.log_prob(jnp.zeros(3)).shape == (3,)
    assert likelihood.sample(jax.random.key(0), (4, 5)).shape == (4, 5, 3)


@pytest.mark.smoke
def test_survives_jit_and_a_pytree_round_trip(key):
    y = jnp.array([0, 2, 3])
    likelihood = dgp.Likelihood(F, SCALAR["poisson-exp"][0])
    leaves, treedef = jax.tree.flatten(likelihood)
    np.testing.assert_allclose(jax.tree.unflatten(treedef, leaves).log_prob(y), likelihood.log_prob(y), rtol=1e-12)
    jitted = jax.jit(
        lambda loc: dgp.Likelihood(FunctionValues(loc, VARIANCE, event_dim=0), SCALAR["poisson-exp"][0]).log_prob(y)
    )
    np.testing.assert_allclose(jitted(LOC), likelihood.log_prob(y), rtol=1e-12)
    support = dgp.Likelihood(F, SCALAR["poisson-exp"][0]).support
    np.testing.assert_array_equal(support(jnp.array([2, -1])), [True, False])


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: dgp.Likelihood(LOC, lambda v: dist.Normal(v, 1)),
            r"expected the distribution f\(x\), got ArrayImpl: pass g",
        ),
        (lambda: dgp.Likelihood(F, lambda v: v), r"expected conditional\(v\), a NumPyro distribution"),
        (
            lambda: dgp.Likelihood(F, lambda v: dist.Normal(v, numpyro.param("noise", 1.0))),
            "expected a conditional without sites of its own, got param 'noise'",
        ),
        (
            lambda: dgp.Likelihood(F, lambda v: dist.Normal(v, 1), collapse="yes"),
            'expected collapse="bound" or "marginal"',
        ),
        (
            lambda: dgp.Likelihood(F, lambda v: dist.Normal(v, 1)).log_prob(jnp.zeros((3, 1))),
            r"expected observations y of shape \(3,\), got \(3, 1\): a scalar function",
        ),
        (
            lambda: dgp.Likelihood(F, lambda v: dist.Normal(v, 1)).log_prob(jnp.array([0.0, jnp.nan, 1.0])),
            "expected finite observations y, got 1 NaN",
        ),
        (lambda: dgp.likelihoods.RobustMax(jnp.zeros((3, 1))), "expected values .* of two classes or more"),
        (lambda: dgp.likelihoods.RobustMax(MEANS, 1.5), "expected 0 < epsilon < 1, got 1.5"),
    ],
)
def test_bad_input(build, message):
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.slow
@pytest.mark.parametrize("conditional", [lambda v: dgp.likelihoods.RobustMax(v), lambda v: dist.Categorical(logits=v)])
def test_every_label_at_every_row(conditional):
    """Labels with a batch dimension of their own, (classes, rows), give the probabilities of all classes."""
    likelihood = dgp.Likelihood(CLASSES, conditional, integrate=dgp.likelihoods.MonteCarlo(20))
    rows, classes = CLASSES.loc.shape
    labels = np.broadcast_to(np.arange(classes)[:, None], (classes, rows))
    each = [likelihood.log_marginal(np.full(rows, c)) for c in range(classes)]
    found = likelihood.log_marginal(labels)
    np.testing.assert_allclose(found, each, rtol=1e-10)
    np.testing.assert_allclose(np.exp(found).sum(0), 1.0, rtol=1e-5)  # quadrature
    np.testing.assert_allclose(likelihood.log_prob(labels)[0], likelihood.log_prob(np.zeros(rows, int)), rtol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["poisson-exp", "exponential", "gamma"])
def test_closed_forms_end_where_the_range_does(name):
    """While a step is compiled nothing can look at y: a minibatch with a negative number has no finite bound."""
    y = dgp.Likelihood(F, SCALAR[name][0])
    bound = jax.jit(jax.vmap(lambda v: y.log_prob(v).sum()))(jnp.array([[-2.5] * 3, [2.0] * 3]))
    assert bound[0] == -jnp.inf
    assert jnp.isfinite(bound[1])
