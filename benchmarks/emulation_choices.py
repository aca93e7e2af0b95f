"""What ``fit_best`` weighs depths by, chosen on designs that are not those of the tables of ``emulation.py``.

``python benchmarks/emulation_choices.py --folder DIRECTORY`` fits the exact process and one to three layers to designs
with seeds from 1000, and keeps their predictions in the folder; what is there is not fitted again. It prints the mean
log ratio of the CRPS of mixtures to that of the exact process, with its standard error over designs: for stacking of
rows that are left out, by how many standard errors a program has to be better, and for weights by the evidence, prior
odds of a further layer and the least odds to the most probable program, 0 for no window. The last columns are the
deeper parts alone, and the part with the lowest CRPS. Where one layer has a part in a mixture it is the exact process.

``--runs 1`` predicts by the first run of each program, for a comparison.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import jax
import numpy as np
from emulation import KEY, NUM_DRAWS, NUM_RUNS, Design, crps, exact_gp, family, make_design
from simulators import SIMULATORS

import numpyro_dgp as dgp
from numpyro_dgp.depth.fit_best import left_out, with_further_runs
from numpyro_dgp.depth.weighted_posterior import evidence_weights, stacking_weights

CODES = "forrester step grlee booth branin franke sine ridge jump shubert hartmann3 ishigami detpep".split()
GAINS = (None, 0.0, 0.5, 1.0, 2.0)
ODDS = ((1.0, 0.0), (0.25, 0.0), (0.02, 0.0), (0.25, 0.05), (0.02, 0.05))


def predictions(design: Design, depths: tuple[int, ...], runs: int) -> dict[str, np.ndarray]:
    """Moments at the test points by part, 0 for the exact process; log densities of the rows that are left out (N, K)
    and the evidence."""
    ((_, exact),) = exact_gp(design, depths)
    programs, data = family(design.X, design.y, design.noise), (design.X, design.y)
    best = dgp.fit_best(programs, KEY, *data, depths=depths, weigh="evidence", num_draws=NUM_DRAWS, num_runs=1)
    rows = [left_out(programs(d), KEY, data, part.at) for d, part in best.parts.items()]
    evidence = [part.log_evidence for part in best.parts.values()]
    found = {"y": design.y_test, "left_out": np.stack(rows, 1), "evidence": np.array(evidence)}
    posteriors = {0: exact}
    for number, (depth, part) in enumerate(best.parts.items()):
        if number:
            key = jax.random.fold_in(KEY, depth)
            more = with_further_runs(part, programs(depth), key, data, NUM_DRAWS, 8, runs)
            posteriors[number] = more.posterior
    for number, posterior in posteriors.items():
        mixture = posterior.predict(jax.random.key(5), design.X_test)
        found |= {f"means{number}": np.asarray(mixture.means), f"variances{number}": np.asarray(mixture.variances)}
    return found


def scores(found: dict[str, np.ndarray]) -> list[float]:
    """Log ratios of the CRPS of each choice to that of the exact process."""
    y, number = found["y"], np.arange(len(found["evidence"]))

    def score(shares: np.ndarray) -> float:
        parts = [(found[f"means{k}"], found[f"variances{k}"]) for k in number]
        counted = [(m, v, w) for (m, v), w in zip(parts, shares, strict=True) if w > 1e-4]
        weights = np.concatenate([np.full(len(m), w / len(m)) for m, _, w in counted])
        means, variances = (np.concatenate([one[k] for one in counted]) for k in (0, 1))
        return float(crps(y, means, np.sqrt(variances), weights / weights.sum()).mean())

    alone = [score(np.eye(len(number))[k]) for k in number]
    choices = [score(stacking_weights(found["left_out"], least_gain=gain)) for gain in GAINS]
    for odds, least in ODDS:
        choices.append(score(evidence_weights(found["evidence"], math.log(odds) * number, least)))
    return [math.log(value / alone[0]) for value in [*choices, *alone[1:], min(alone)]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="of the predictions")
    parser.add_argument("--codes", nargs="+", default=CODES, choices=list(SIMULATORS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1000, 1001, 1002, 1003])
    parser.add_argument("--noise", type=float, default=0.0, help="standard deviation, in that of the training outputs")
    parser.add_argument("--depths", type=int, nargs="+", default=[1, 2, 3], help="numbers of layers")
    parser.add_argument("--runs", type=int, default=NUM_RUNS, help="of Monte Carlo, of each program")
    parser.add_argument(
        "--kept", action="store_true", help="designs that the folder has, of these codes, and no others"
    )
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    headings = [f"stacking, {'any gain' if gain is None else f'gain {gain:g}'}" for gain in GAINS]
    headings += [f"evidence, odds {odds:g}, least {least:g}" for odds, least in ODDS]
    headings += [f"{depth} layers" for depth in arguments.depths[1:]]
    print("| code | designs | " + " | ".join([*headings, "best part"]) + " |")
    print("|---" * (3 + len(headings)) + "|")
    ending = f"{arguments.noise:g}_{arguments.runs}_{'-'.join(map(str, arguments.depths))}.npz"
    means = []
    for code in arguments.codes:
        ratios = []
        paths = {seed: arguments.folder / f"{code}_{seed}_{ending}" for seed in arguments.seeds}
        if arguments.kept:
            paths = dict(enumerate(sorted(arguments.folder.glob(f"{code}_*_{ending}"))))
        for seed, path in paths.items():
            if not path.exists():
                design = make_design(code, 10, seed, arguments.noise)
                np.savez(path, **predictions(design, tuple(arguments.depths), arguments.runs))
            with np.load(path) as found:
                ratios.append(scores(dict(found)))
        if not ratios:
            continue
        means.append(np.mean(ratios, 0))
        errors = np.std(ratios, 0, ddof=1) / math.sqrt(len(ratios)) if len(ratios) > 1 else 0 * means[-1]
        cells = [f"{m:+.3f} ({e:.3f})" for m, e in zip(means[-1], errors, strict=True)]
        print(f"| {code} | {len(ratios)} | " + " | ".join(cells) + " |", flush=True)
    print("| mean | | " + " | ".join(f"{m:+.3f}" for m in np.mean(means, 0)) + " |")


if __name__ == "__main__":
    main()
