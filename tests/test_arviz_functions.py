"""Every function of ArviZ that takes a tree, called on trees of a chain and of guides; the table of docs/arviz.md."""

import importlib
import pathlib
import warnings
from functools import partial
from importlib import metadata

import arviz_stats
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import MCMC, NUTS

import numpyro_dgp as dgp

pytest.importorskip("arviz_plots")

PAGE = pathlib.Path(__file__).parent.parent / "docs" / "arviz.md"
COLUMNS = "chains", "guide, corrected", "guide, not corrected"
X = jnp.linspace(-1, 1, 24)[:, None]
Y = 0.8 * X[:, 0] + 0.3 * jax.random.normal(jax.random.key(0), (24,))
KEY = jax.random.key(1)


def model(X, y=None):
    noise = numpyro.sample("noise", dist.LogNormal(-1.0, 0.5))
    slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
    with numpyro.plate("data", len(X)):
        mean = numpyro.deterministic("mean", slope * X[:, 0])
        numpyro.sample("y", dist.Normal(mean, noise), obs=y)


def guide(width):
    """Near the posterior, in units of its scales."""

    def run(X, y=None):
        slope = X[:, 0] @ Y / (X[:, 0] @ X[:, 0])
        numpyro.sample("slope", dist.Normal(0.98 * slope, width * 0.1))
        numpyro.sample("noise", dist.LogNormal(jnp.log(jnp.std(Y - slope * X[:, 0])), width * 0.14))

    return dgp.Posterior(model, run, {})


def make_trees():
    """By the columns of the table."""
    mcmc = MCMC(
        NUTS(model), num_warmup=100, num_samples=300, num_chains=2, chain_method="sequential", progress_bar=False
    )
    mcmc.run(KEY, X, Y, extra_fields=("energy", "diverging"))
    sources = dict(zip(COLUMNS, (mcmc, guide(1.2), guide(0.15)), strict=True))
    return {name: dgp.diagnostics.to_arviz(source, KEY, X, Y, num_samples=600) for name, source in sources.items()}


HYPER = {"var_names": ["noise", "slope"]}
NAMES = {
    "arviz_stats": "ecdf ess eti hdi histogram kde mcse mean median mode qds rhat summary psense psense_summary",
    "arviz_plots": "plot_autocorr plot_convergence_dist plot_dist plot_ess plot_ess_evolution plot_forest plot_mcse "
    "plot_pair plot_parallel plot_rank plot_rank_dist plot_ridge plot_trace plot_trace_dist plot_psense_dist "
    "plot_psense_quantities plot_dgof plot_dgof_dist plot_prior_posterior",
}
WHOLE = {
    "arviz_stats": "bfmi loo loo_metrics loo_score loo_pit thin metrics",
    "arviz_plots": "plot_energy plot_loo_pit plot_ppc_dist plot_ppc_interval plot_ppc_pit plot_ppc_tstat",
}
OTHER = {
    "arviz_stats": {
        "bayes_factor": {"var_names": "slope", "ref_vals": 0.0},
        "bayesian_r2": {"pred_mean": "mean", "scale": "noise"},
        "ci_in_rope": {"rope": (0.5, 1.5), "var_names": ["slope"]},
        "loo_expectations": {"kind": "mean"},
        "loo_r2": {"var_name": "y"},
        "loo_subsample": {"observations": 5},
        "residual_r2": {"pred_mean": "mean", "obs_name": "y"},
        "rhat_nested": {**HYPER, "superchain_ids": [0, 1]},
    },
    "arviz_plots": {
        "plot_bf": {"var_names": "slope", "ref_val": 0.0},
        "plot_pair_focus": {"focus_var": "slope", "var_names": ["noise"]},
    },
}
OF_SEVERAL = {
    "compare": lambda tree: arviz_stats.compare({"one": tree, "other": tree}),
    "kl_divergence": lambda tree: arviz_stats.kl_divergence(tree, tree, **HYPER),
    "loo_i": lambda tree: arviz_stats.loo_i(3, tree),
    "wasserstein": lambda tree: arviz_stats.wasserstein(tree, tree, **HYPER),
    "weight_predictions": lambda tree: arviz_stats.weight_predictions([tree, tree], weights=[0.5, 0.5]),
}
# What a message says of the reason that a call fails.
REASONS = {
    "log likelihood not found": "refuses: no `log_likelihood`",
    "trying to compute ELPD": "refuses: no `log_likelihood`",
    "log prior not found": "refuses: no `log_prior`",
    "energy": "refuses: no energies",
    "not available yet": "refuses trees, takes a group",
    "Passing a Dataset as": "fails in arviz-plots 0.8",
}


def calls():
    """By the name of a function, a call with a tree."""
    found = {f"`{name}`": call for name, call in OF_SEVERAL.items()}
    for package in ("arviz_stats", "arviz_plots"):
        named = dict.fromkeys(NAMES[package].split(), HYPER) | {name: {} for name in WHOLE[package].split()}
        backend = {"backend": "matplotlib"} if package == "arviz_plots" else {}
        for name, options in (named | OTHER[package]).items():
            function = getattr(importlib.import_module(package), name)
            found[f"`{name}`"] = partial(function, **options, **backend)
    return found


def outcome(call, tree):
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            call(tree)
    except Exception as error:
        (reason,) = {reason for text, reason in REASONS.items() if text in str(error)} or {repr(error)}
        return reason
    finally:
        plt.close("all")
    return "works"


def table(trees):
    """Functions with the same outcomes are in one row."""
    rows = {}
    for name, call in calls().items():
        rows.setdefault(tuple(outcome(call, tree) for tree in trees.values()), []).append(name)
    lines = [f"| {', '.join(sorted(names))} | {' | '.join(outcomes)} |" for outcomes, names in rows.items()]
    return "\n".join(
        [f"| functions | {' | '.join(COLUMNS)} |", "|---" * 4 + "|", *sorted(lines, key=len, reverse=True)]
    )


@pytest.mark.long
@pytest.mark.skipif(not metadata.version("arviz-plots").startswith("0.8."), reason="the table is of version 0.8")
def test_the_table_of_the_page_is_what_functions_do():
    trees = make_trees()
    assert ["log_likelihood" in tree for tree in trees.values()] == [True, True, False]
    assert table(trees) in PAGE.read_text()
