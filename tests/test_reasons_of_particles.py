"""A loss of several particles that is not finite: outside compiled code, the reason is raised as for one particle."""

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
import pytest

import numpyro_dgp as dgp


def model(y):
    m = numpyro.sample("m", dist.Normal())
    if not isinstance(m, jax.core.Tracer):  # a check that looks at values where it has any
        raise ValueError("expected m to be another number")
    numpyro.sample("y", dist.Normal(jnp.where(m == m, jnp.nan, 0.0), 1.0, validate_args=False), obs=y)


def guide(y):
    numpyro.sample("m", dist.Normal())


@pytest.mark.slow
@pytest.mark.parametrize("particles", [1, 2])
def test_checks_of_values_raise(particles):
    with pytest.raises(ValueError, match="expected m to be another number"):
        dgp.ELBO(particles).loss(jax.random.key(0), {}, model, guide, jnp.ones(()))
