r"""Further runs of Monte Carlo for the predictions of a program.

Where several hidden layers explain the data, each run ends at one or two of them, and more draws of it say no more.
Independent runs with fewer draws each end at several. Their evidence is known to a few nats, in which they differ by
more: by the evidence, and by stacking too, mostly one of them would count. So the short ones count alike.

Only predictions are made of all runs. What is said of the program, its evidence and the densities of rows that are left
out, is that of the first run: points of a short run are alike, and say too much of rows that are left out.

Source: Verge et al. (2015) and Yao et al. (2022), for runs that do not mix.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from numpyro_dgp._typing import Array
from numpyro_dgp.deepening.integrated_fit import IntegratedFit, fit_integrated
from numpyro_dgp.inference.population import evenly
from numpyro_dgp.predict import Posterior

__all__ = ["with_further_runs"]


def with_further_runs(
    fit: IntegratedFit,
    model: Callable[..., Any],
    rng_key: Array,
    args: tuple[Any, ...],
    num_draws: int,
    num_sweeps: int,
    num_runs: int,
) -> IntegratedFit:
    """The same fit, predicting by as many draws of R runs: half of them its own, half those of R - 1 short runs.

    Each of these has ``num_draws / R`` points. A point of largest density has no runs, and stays alone. Runs that find
    nothing have no share.

    Args:
        fit: of the program, one run.
        model: the program.
        rng_key: PRNG key.
        args: of the program, observations included.
        num_draws: of all runs together.
        num_sweeps: of moves of each chain at each temperature.
        num_runs: R.
    """
    first = fit.posterior.samples
    if not first or num_runs == 1:
        return fit
    points = -(-num_draws // num_runs)
    more = fit_integrated(model, rng_key, args, points, num_sweeps, num_runs - 1, False)
    assert more.ended is not None
    others = more.posterior.samples or {}
    found = np.flatnonzero(np.repeat(np.isfinite(more.ended.log_evidence), points))
    own = evenly(len(next(iter(first.values()))), -(-num_draws // 2))
    added = found[evenly(len(found), num_draws // 2)]
    joined = {name: jnp.concatenate([u[own], others[name][added]]) for name, u in first.items()}
    return fit._replace(posterior=Posterior(model, samples=joined))
