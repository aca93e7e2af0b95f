"""Thompson sampling: draws of whole functions of one program, of a chain and of a mixture of programs; wrong calls."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs import X, Y, Z, deep, random_params, shallow

import numpyro_dgp as dgp
from numpyro_dgp import design
from numpyro_dgp.depth.integrated_fit import IntegratedFit
from numpyro_dgp.depth.weighted_posterior import WeightedPosterior

KEY = jax.random.key(3)


@pytest.mark.long
@pytest.mark.parametrize("chain", [False, True])
def test_thompson_sampling(chain):
    """A point each for q draws of whole functions; of a chain, draws that the key chooses."""
    guide = dgp.guides.InducingPoint(shallow)
    if chain:
        posterior = dgp.Posterior(shallow, samples={"g": jax.random.normal(KEY, (6, 8))})
    else:
        posterior = dgp.Posterior(shallow, guide, random_params(shallow, guide, X, Y))
    x = jnp.array([[0.3], [-1.0]])
    draw = design.ThompsonSampling(posterior, KEY, num_features=16)
    both = [draw(jnp.stack([a, b])) for a in x for b in x]
    np.testing.assert_allclose(both[0] + both[3], both[1] + both[2], rtol=1e-9)  # a sum of one function each
    up = design.ThompsonSampling(posterior, KEY, num_features=16, minimise=False)
    np.testing.assert_allclose(up(x), -both[1], rtol=1e-12)
    slope = jax.jit(jax.grad(draw))(x[:1])
    step = (draw(x[:1] + 1e-5) - draw(x[:1] - 1e-5)) / 2e-5
    np.testing.assert_allclose(slope[0, 0], step, rtol=1e-5)
    if chain:
        first = [float(design.ThompsonSampling(posterior, jax.random.key(i), num_features=16)(x[:1])) for i in range(6)]
        assert len(np.unique(np.round(first, 1))) > 2


@pytest.mark.long
def test_thompson_sampling_of_a_mixture():
    """Programs as often as their weights say, and the function under y where they have hidden layers too."""

    def mixture(model, **samples):
        parts = [dgp.Posterior(model, samples=samples | {"g": jnp.full((20, 8), v)}) for v in (0.0, 1.0)]
        parts.insert(0, dgp.Posterior(lambda: None, samples={"a": jnp.zeros(4)}))  # without a weight
        fits = {i: IntegratedFit(p, 0.0, 0.0, 5) for i, p in enumerate(parts)}
        return WeightedPosterior(fits, {0: 0.0, 1: 0.75, 2: 0.25})

    both = mixture(shallow)
    found = [float(design.ThompsonSampling(both, jax.random.key(i), num_features=16)(Z[:1])) for i in range(16)]
    assert 8 <= (np.abs(found) < 1e-3).sum() < 16
    hidden = mixture(deep, f=jnp.zeros((20, 1, 8)))
    assert np.isfinite(design.ThompsonSampling(hidden, KEY, num_features=16)(Z[:2]))
    with pytest.raises(ValueError, match="expected at most 20 points x, the draws of the chain, got 21"):
        design.ThompsonSampling(both, KEY)(jnp.zeros((21, 1)))


def test_draws_of_thompson_are_the_points():
    posterior = dgp.Posterior(shallow, samples={"g": jnp.ones((2, 8))})
    with pytest.raises(ValueError, match=r"ThompsonSampling: expected at most 2 points x, .* got 3: a smaller"):
        design.ThompsonSampling(posterior, KEY)(jnp.zeros((3, 1)))
    with pytest.raises(ValueError, match=r"ThompsonSampling: expected num_features to be a positive .* got 0"):
        design.ThompsonSampling(posterior, KEY, num_features=0)
