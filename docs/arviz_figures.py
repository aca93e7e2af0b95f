"""The figures of docs/arviz.md, of two layers under a guide and under NUTS: ``python docs/arviz_figures.py``.

It needs arviz-plots 1.0, hence Python 3.12: ``plot_psense_dist`` of version 0.8 fails with recent versions of xarray.
"""

from pathlib import Path

import arviz_plots
import jax
import jax.numpy as jnp
import matplotlib
import numpyro
import numpyro.distributions as dist
import numpyro_dgp as dgp
import optax
from numpyro.infer import MCMC, NUTS, SVI

FIGURES = Path(__file__).parent / "figures"
X = jnp.linspace(-1, 1, 24)[:, None]
Y = jnp.tanh(8 * X[:, 0]) + 0.2 * jax.random.normal(jax.random.key(0), (24,))
Z = jnp.linspace(-1, 1, 12)[:, None]
NAMES = ["noise", "inner", "outer"]


def model(X, y=None):
    noise = numpyro.sample("noise", dist.LogNormal(-1.5, 0.5))
    inner = numpyro.sample("inner", dist.LogNormal(-0.5, 0.5))
    outer = numpyro.sample("outer", dist.LogNormal(-0.5, 0.5))
    f = dgp.gp(
        "f", dgp.kernels.RBF(0.5, inner), dgp.Points(Z), outputs=1, mean=dgp.means.IdentityMean()
    )
    g = dgp.gp("g", dgp.kernels.RBF(1.0, outer), dgp.Points(1.5 * Z))
    with numpyro.plate("data", len(X)):
        h = numpyro.sample("h", f(X))
        numpyro.sample("y", dgp.Likelihood(g(h), lambda v: dist.Normal(v, noise)), obs=y)


def trees():
    guide = dgp.guides.InducingPoint(model, other=dgp.guides.Normal())
    svi = SVI(model, guide, optax.adam(optax.cosine_decay_schedule(0.02, 1500)), dgp.ELBO())
    result = dgp.fit(svi, jax.random.key(1), 1500, X, Y, progress_bar=False)
    mcmc = MCMC(
        NUTS(dgp.for_mcmc(model)),
        num_warmup=300,
        num_samples=300,
        num_chains=2,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(jax.random.key(2), X, Y, extra_fields=("energy", "diverging"))
    sources = {"guide": dgp.Posterior(model, guide, result.params), "NUTS": mcmc}
    return dgp.diagnostics.to_arviz(sources, jax.random.key(3), X, Y, num_samples=400)


def drawn(found):
    """By name, what ArviZ draws."""
    chains = found["NUTS"]
    both = {"var_names": NAMES, "backend": "matplotlib"}
    yield "ridge", arviz_plots.plot_ridge(found, combined=True, **both)
    yield "rank", arviz_plots.plot_rank(chains, **both)
    yield "energy", arviz_plots.plot_energy(chains, backend="matplotlib")
    yield "loo_pit", arviz_plots.plot_loo_pit(chains, backend="matplotlib")
    yield (
        "psense",
        arviz_plots.plot_psense_dist(chains, figure_kwargs={"figsize": (10, 7)}, **both),
    )
    for name, tree in found.items():
        yield f"ppc_{name.lower()}", arviz_plots.plot_ppc_dist(tree, backend="matplotlib")


if __name__ == "__main__":
    matplotlib.use("Agg")
    numpyro.enable_x64()
    found = trees()
    for name, tree in found.items():
        group = next(g for g in tree if g.startswith("log_likelihood"))
        print(name, {k: v for k, v in tree[group].attrs.items() if k in ("khat", "ess", "reason")})
    for name, figure in drawn(found):
        figure.savefig(FIGURES / f"arviz_{name}.png", dpi=70)
        print(name)
