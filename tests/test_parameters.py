import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpyro.distributions import biject_to

from numpyro_dgp.guides.rules.inducing_values import row_scaled_tril


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_round_trip(key, dtype):
    transform = biject_to(row_scaled_tril)
    raw = jax.random.normal(key, (3, 5, 5), dtype)
    L = transform(raw)
    assert row_scaled_tril(L).all()
    assert L.dtype == dtype
    np.testing.assert_allclose(transform.inv(L), jnp.tril(raw), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(transform(transform.inv(L)), L, rtol=1e-5, atol=1e-6)
    assert not row_scaled_tril(-L).any()
    assert row_scaled_tril(row_scaled_tril.feasible_like(L)).all()


@pytest.mark.slow
def test_jacobian(key):
    transform = biject_to(row_scaled_tril)
    raw = jax.random.normal(key, (4, 4))
    rows, columns = np.tril_indices(4)

    def flat(v):
        return transform(jnp.zeros((4, 4)).at[rows, columns].set(v))[rows, columns]

    expected = jnp.linalg.slogdet(jax.jacobian(flat)(raw[rows, columns]))[1]
    np.testing.assert_allclose(transform.log_abs_det_jacobian(raw, transform(raw)), expected, rtol=1e-10)


@pytest.mark.slow
def test_slope_of_the_divergence_is_bounded_at_tiny_scales():
    from numpyro_dgp.math.gaussians import kl_full

    transform = biject_to(row_scaled_tril)
    start = transform.inv(1e-5 * jnp.eye(6))
    slope = jax.grad(lambda raw: kl_full(jnp.zeros(6), transform(raw)))(start)
    assert jnp.abs(slope).max() <= 1
