import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import integrate, stats

from numpyro_dgp.likelihoods import GaussHermite, MonteCarlo


@pytest.mark.parametrize("size", [1, 3, 20, 300])
def test_gauss_hermite_is_exact_for_polynomials(size):
    loc, variance = jnp.array([0.5, -1.0]), jnp.array([2.0, 0.0])
    nodes = GaussHermite(size).nodes(loc, variance)
    for degree in range(min(2 * size, 8)):
        exact = [stats.norm(m, np.sqrt(v) if v else 1e-300).moment(degree) for m, v in zip(loc, variance, strict=True)]
        np.testing.assert_allclose(nodes.mean(nodes.points**degree), exact, rtol=1e-9)


def test_log_mean_exp_against_adaptive_quadrature():
    def integrand(v):
        return np.exp(np.sin(v)) * stats.norm.pdf(v, 0.3, 0.7)

    nodes = GaussHermite(40).nodes(jnp.array(0.3), jnp.array(0.49))
    np.testing.assert_allclose(
        nodes.log_mean_exp(jnp.sin(nodes.points)), np.log(integrate.quad(integrand, -9, 9)[0]), rtol=1e-10
    )


def test_monte_carlo_is_within_its_error():
    nodes = MonteCarlo(100_000, jax.random.key(1)).nodes(jnp.array([0.5]), jnp.array([2.0]))
    values = nodes.points**2
    assert abs(nodes.mean(values)[0] - 2.25) < 4 * values.std() / np.sqrt(100_000)


def test_gradient_at_zero_variance_is_finite():
    def mean(variance):
        nodes = GaussHermite(5).nodes(jnp.array(1.0), variance)
        return nodes.mean(nodes.points**2)

    assert np.isfinite(jax.grad(mean)(0.0))


@pytest.mark.slow
def test_keeps_float32():
    loc = jnp.zeros(3, jnp.float32)
    for rule in (GaussHermite(), MonteCarlo()):
        nodes = rule.nodes(loc, loc + 1)
        assert (
            nodes.points.dtype
            == nodes.mean(nodes.points).dtype
            == nodes.log_mean_exp(nodes.points).dtype
            == jnp.float32
        )


@pytest.mark.slow
@pytest.mark.parametrize("rule", [GaussHermite, MonteCarlo])
def test_bad_size(rule):
    with pytest.raises(ValueError, match=r"expected size to be a positive integer, got 0"):
        rule(0)
