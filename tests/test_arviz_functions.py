"""Every function of ArviZ that takes a tree, called on trees of a chain and of guides; the tables of docs/arviz.md."""

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

arviz_plots = pytest.importorskip("arviz_plots")

PAGE = pathlib.Path(__file__).parent.parent / "docs" / "arviz.md"
COLUMNS = "chains", "guide, corrected", "guide, not corrected"
X = jnp.linspace(-1, 1, 24)[:, None]
Y = 0.8 * X[:, 0] + 0.3 * jax.random.normal(jax.random.key(0), (24,))
KEY = jax.random.key(1)


def model(X, y=None, kind="normal"):
    noise = numpyro.sample("noise", dist.LogNormal(-1.0, 0.5))
    slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
    with numpyro.plate("data", len(X)):
        mean = numpyro.deterministic("mean", slope * X[:, 0])
        of = {
            "normal": dist.Normal(mean, noise),
            "counts": dist.Poisson(jnp.exp(1 + mean)),
            "labels": dist.Bernoulli(logits=3 * mean),
        }
        numpyro.sample("y", of[kind], obs=y)


DATA = {
    "normal": Y,
    "counts": dist.Poisson(jnp.exp(1 + X[:, 0])).sample(jax.random.key(2)),
    "labels": (Y > 0).astype(int),
}


def guide(of_kind, samples, width):
    """Near the posterior, in units of its scales."""
    centres = {name: (values.mean(), values.std()) for name, values in samples.items()}

    def run(X, y=None):
        numpyro.sample("slope", dist.Normal(centres["slope"][0], width * centres["slope"][1]))
        numpyro.sample("noise", dist.LogNormal(centres["noise"][0], width * centres["noise"][1]))

    return dgp.Posterior(of_kind, run, {})


def make_trees(kind):
    """By the columns of the table."""
    of_kind = partial(model, kind=kind)
    mcmc = MCMC(
        NUTS(of_kind), num_warmup=100, num_samples=300, num_chains=2, chain_method="sequential", progress_bar=False
    )
    mcmc.run(KEY, X, DATA[kind], extra_fields=("energy", "diverging"))
    samples = mcmc.get_samples()
    around = {"slope": samples["slope"], "noise": jnp.log(samples["noise"])}
    sources = dict(zip(COLUMNS, (mcmc, *(guide(of_kind, around, w) for w in (1.2, 0.15))), strict=True))
    trees = {
        name: dgp.diagnostics.to_arviz(source, KEY, X, DATA[kind], num_samples=600) for name, source in sources.items()
    }
    for tree in trees.values():
        tree["constant_data"]["column"] = tree["constant_data"]["X"][:, 0]
    return trees


HYPER = {"var_names": ["noise", "slope"]}
NAMES = {
    "arviz_stats": "diagnose ecdf ess eti hdi histogram iqr kde mad mcse mean median mode qds rhat std summary var "
    "psense psense_summary",
    "arviz_plots": "plot_autocorr plot_convergence_dist plot_dist plot_ess plot_ess_evolution plot_forest plot_mcse "
    "plot_pair plot_parallel plot_rank plot_rank_dist plot_ridge plot_trace plot_trace_dist plot_psense_dist "
    "plot_psense_quantities plot_dgof plot_dgof_dist plot_prior_posterior",
}
WHOLE = {
    "arviz_stats": "bfmi loo loo_influence loo_metrics loo_score loo_pit thin metrics",
    "arviz_plots": "plot_energy plot_loo_interval plot_loo_pit plot_ppc_dist plot_ppc_dist_pit plot_ppc_interval "
    "plot_ppc_pit plot_ppc_tstat",
}
OTHER = {
    "arviz_stats": {
        "bayes_factor": {"var_names": "slope", "ref_vals": 0.0},
        "bayesian_r2": {"pred_mean": "mean", "scale": "noise"},
        "generate_survival_curves": {"var_names": "y", "num_samples": 10},
        "kaplan_meier": {"var_names": "y"},
        "ci_in_rope": {"rope": (0.5, 1.5), "var_names": ["slope"]},
        "loo_expectations": {"kind": "mean"},
        "loo_r2": {"var_name": "y"},
        "loo_subsample": {"observations": 5},
        "residual_r2": {"pred_mean": "mean", "obs_name": "y"},
        "rhat_nested": {**HYPER, "superchain_ids": [0, 1]},
    },
    "arviz_plots": {
        "plot_lm": {"x": "column", "y": "y"},
        "plot_ppc_censored": {"num_samples": 10},
        "plot_bf": {"var_names": "slope", "ref_val": 0.0},
        "plot_pair_focus": {"focus_var": "slope", "var_names": ["noise"]},
    },
}
OF_KIND = {
    "counts": {"plot_ppc_rootogram": {}},
    "labels": {"plot_loo_pava": {}, "plot_ppc_pava": {}, "plot_ppc_pava_residuals": {"x_var": "column"}},
}
OF_SEVERAL = {
    "compare": lambda tree: arviz_stats.compare({"one": tree, "other": tree}),
    "kl_divergence": lambda tree: arviz_stats.kl_divergence(tree, tree, **HYPER),
    "loo_i": lambda tree: arviz_stats.loo_i(3, tree),
    "plot_compare": lambda tree: arviz_plots.plot_compare(
        arviz_stats.compare({"one": tree, "other": tree}), backend="matplotlib"
    ),
    "plot_khat": lambda tree: arviz_plots.plot_khat(arviz_stats.loo(tree), backend="matplotlib"),
    "update_subsample": lambda tree: arviz_stats.update_subsample(
        arviz_stats.loo_subsample(tree, observations=5, pointwise=True), tree, observations=2
    ),
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
    "at least 2 chains": "refuses a single chain",
    "Passing a Dataset as": "fails with xarray 2026.9",
}


def calls():
    """By the name of a function, the kind of data that it is for and a call with a tree."""
    found = {f"`{name}`": ("normal", call) for name, call in OF_SEVERAL.items()}
    for package in ("arviz_stats", "arviz_plots"):
        named = dict.fromkeys(NAMES[package].split(), HYPER) | {name: {} for name in WHOLE[package].split()}
        kinds = {"normal": named | OTHER[package]} | (OF_KIND if package == "arviz_plots" else {})
        backend = {"backend": "matplotlib"} if package == "arviz_plots" else {}
        for kind, each in kinds.items():
            for name, options in each.items():
                function = getattr(importlib.import_module(package), name, None)  # some came with version 1
                if function is not None:
                    found[f"`{name}`"] = kind, partial(function, **options, **backend)
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


def of_page(version):
    """Outcomes by the name of a function: the second table has what differs in version 0.8."""
    found = {}
    tables = PAGE.read_text().split(f"| functions | {' | '.join(COLUMNS)} |")[1:]
    for lines in tables if version == "0.8" else tables[:1]:
        for line in lines.split("\n\n")[0].splitlines()[2:]:
            names, *outcomes = line.strip("| ").split(" | ")
            found |= dict.fromkeys(names.split(", "), tuple(outcomes))
    return found


VERSION = ".".join(metadata.version("arviz-plots").split(".")[:2])


@pytest.mark.long
@pytest.mark.skipif(VERSION not in ("0.8", "1.3"), reason="the tables are of versions 0.8 and 1.3")
def test_the_tables_of_the_page_are_what_functions_do():
    trees = {kind: make_trees(kind) for kind in DATA}
    assert ["log_likelihood" in tree for tree in trees["normal"].values()] == [True, True, False]
    found = {
        name: tuple(outcome(call, tree) for tree in trees[kind].values()) for name, (kind, call) in calls().items()
    }
    page = of_page(VERSION)
    assert found == {name: page.get(name) for name in found}
    assert VERSION == "0.8" or page.keys() == found.keys()
