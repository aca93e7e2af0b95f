"""Many chains at once, ``chain_method="vectorized"``: the draws of the same chains one after the other."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import MCMC, NUTS
from programs import X, Y

import numpyro_dgp as dgp

x, y = X[::5], Y[::5]
Z = dgp.Points(jnp.linspace(-2, 2, 4)[:, None])
CHAINS = 16


def model(X, y=None):
    noise = numpyro.sample("noise", dist.LogNormal(-1.0, 0.5))
    f = dgp.gp("f", dgp.kernels.RBF(0.3, 0.9), Z, outputs=1, mean=dgp.means.IdentityMean())
    g = dgp.gp("g", dgp.kernels.RBF(1.2, 0.7), Z)
    with numpyro.plate("data", len(X)):
        h = numpyro.sample("h", f(X))
        numpyro.sample("y", dgp.Likelihood(g(h), lambda v: dist.Normal(v, noise)), obs=y)


KERNELS = {
    "NUTS": lambda: NUTS(dgp.for_mcmc(model), max_tree_depth=3),
    "Gibbs": lambda: dgp.mcmc.Gibbs(model, rest=dgp.mcmc.Slice()),
    "SGHMC": lambda: dgp.mcmc.SGHMC(model),
}


@pytest.mark.long
@pytest.mark.parametrize("name", KERNELS)
def test_sixteen_chains_are_the_chains_one_by_one(name):
    found = {}
    for method in ("vectorized", "sequential"):
        mcmc = MCMC(
            KERNELS[name](), num_warmup=3, num_samples=4, num_chains=CHAINS, chain_method=method, progress_bar=False
        )
        mcmc.run(jax.random.key(0), x, y)
        found[method] = mcmc.get_samples(group_by_chain=True)
    assert found["vectorized"].keys() == found["sequential"].keys() >= {"noise", "f", "g"}
    assert all(draws.shape[:2] == (CHAINS, 4) for draws in found["vectorized"].values())
    for site in found["vectorized"].keys() - ({"g"} if name != "SGHMC" else set()):
        draws, expected = found["vectorized"][site], found["sequential"][site]
        np.testing.assert_allclose(draws, expected, rtol=1e-6, atol=1e-6, err_msg=site)
    # An integrated layer has exact draws, with a key that is a hash of all bits of the position: rounding changes it.
    assert len(np.unique(found["vectorized"]["noise"][:, -1])) == CHAINS
    table = dgp.diagnostics.convergence(mcmc, x, y, test=(x[:2],), superchains=4).table
    assert np.isfinite(table.r_hat_nested[table.identified]).all()
