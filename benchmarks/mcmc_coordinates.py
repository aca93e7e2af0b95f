"""Why the coordinates of a guide do not pay: condition numbers of the posterior in them and in whitened coordinates.

``python benchmarks/mcmc_coordinates.py`` samples the step in two input columns (``implementations/mcmc_programs.py``)
with its last layer integrated. Of the inducing values v of the inner layer it takes the covariance C of the draws, and
their numbers in the coordinates of the fitted guide N(m, R R'), which are R^-1 (v - m). NUTS scales coordinates one by
one, so that it sees the matrix of correlations: its condition number says how long trajectories must be.
"""

from __future__ import annotations

import argparse

import numpy as np
import numpyro
from implementations import mcmc_programs
from implementations.mcmc_samplers import SAMPLERS, Run, run_chains, start_of


def described(values: np.ndarray) -> str:
    """Standard deviations, and eigenvalues of the correlations, of draws (S, n)."""
    spread, (least, *_, most) = values.std(0), np.linalg.eigvalsh(np.corrcoef(values.T))
    return f"{spread.min():.2g} to {spread.max():.2g} | {most / least:.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=200)
    parser.add_argument("--inducing", type=int, default=20)
    parser.add_argument("--draws", type=int, default=1000, help="of each of two chains, after half as many in warm-up")
    parser.add_argument("--steps", type=int, default=3000, help="of the fit")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    numpyro.enable_x64()
    target = mcmc_programs.step(options.rows, options.inducing, 0)
    start = start_of(target, options.steps)
    how = Run(options.draws, options.draws // 2, chains=2, vectorized=False, seed=options.seed)
    samples, *_ = run_chains(SAMPLERS["collapsed"](target, start), target.data, how)
    v = np.asarray(samples["f"]).reshape(-1, options.inducing)
    m, R = np.ravel(start.params["f_auto_loc"]), np.tril(start.params["f_auto_scale_tril"][0])
    ratios = np.linalg.eigvals(np.linalg.solve(R @ R.T, np.cov(v.T))).real
    print("| coordinates | standard deviations of the draws | condition number of the correlations |\n|---|---|---|")
    print(f"| whitened | {described(v)} |")
    print(f"| of the guide | {described(np.linalg.solve(R, (v - m).T).T)} |\n")
    print(f"The posterior is {np.sqrt(ratios.min()):.2g} to {np.sqrt(ratios.max()):.2g} times as wide as the guide.\n")
    print("| hyperparameter | log under the guide | log in the chain |\n|---|---|---|")
    for name in target.hyperparameters:
        fitted = [float(start.params[f"{name}_auto_{what}"]) for what in ("loc", "scale")]
        logs = np.log(samples[name])
        print(f"| {name} | {fitted[0]:.2f} ({fitted[1]:.2f}) | {logs.mean():.2f} ({logs.std():.2f}) |")


if __name__ == "__main__":
    main()
