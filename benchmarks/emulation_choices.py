"""What three defaults of ``fit_best`` were chosen by, on designs that are not those of the tables of ``emulation.py``.

``python benchmarks/emulation_choices.py --folder DIRECTORY`` fits the exact process and draws of one to three layers to
designs with seeds from 1000, and keeps their predictions in the folder; what is there is not fitted again. It prints
the mean log ratio of the CRPS of mixtures to that of the exact process, with its standard error over designs, for
prior odds of a further layer, for a share of the exact process in the part of one layer, whose rest are draws, and for
the odds to the most probable program of Occam's window; 0 is no window.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import jax
import numpy as np
from emulation import KEY, NUM_DRAWS, Design, crps, exact_gp, family, make_design
from simulators import SIMULATORS

import numpyro_dgp as dgp
from numpyro_dgp.deepening.depth_weights import evidence_weights

CODES = ("forrester step grlee booth branin franke sine ridge jump shubert hartmann3 ishigami detpep").split()
CHOICES = [(odds, share, 0.0) for odds in (1.0, 0.25, 0.125, 0.02) for share in (0.0, 0.5, 1.0)]
CHOICES += [(0.25, 1.0, least) for least in (0.01, 0.05, 0.1, 0.2)]
SCORED = 200
"""Test points, and every second draw, are enough to choose by."""


def predictions(design: Design, depths: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Moments at the test points by part, 0 for the exact process, and the evidence of the others."""
    ((_, exact),) = exact_gp(design, depths)
    options = {"depths": depths, "one_layer": "draws", "num_draws": NUM_DRAWS}
    best = dgp.fit_best(family(design.X, design.noise), KEY, design.X, design.y, **options)
    found = {"y": design.y_test, "evidence": np.array([part.log_evidence for part in best.parts.values()])}
    for number, posterior in enumerate([exact, *(part.posterior for part in best.parts.values())]):
        mixture = posterior.predict(jax.random.key(5), design.X_test)
        found |= {f"means{number}": np.asarray(mixture.means), f"variances{number}": np.asarray(mixture.variances)}
    return found


def scores(found: dict[str, np.ndarray]) -> list[float]:
    """Log ratios of the CRPS of each choice to that of the exact process."""
    y, number = found["y"][:SCORED], np.arange(len(found["evidence"]))
    parts = [(found[f"means{k}"][::2, :SCORED], found[f"variances{k}"][::2, :SCORED]) for k in (0, *(number + 1))]

    def score(shares: np.ndarray) -> float:
        counted = [(m, v, w) for (m, v), w in zip(parts, shares, strict=True) if w > 1e-4]
        weights = np.concatenate([np.full(len(m), w / len(m)) for m, _, w in counted])
        means, variances = (np.concatenate([one[k] for one in counted]) for k in (0, 1))
        return float(crps(y, means, np.sqrt(variances), weights / weights.sum()).mean())

    exact = score(np.eye(len(parts))[0])
    ratios = []
    for odds, share, least in CHOICES:
        weights = evidence_weights(found["evidence"], math.log(odds) * number, least)
        shares = np.array([share * weights[0], (1 - share) * weights[0], *weights[1:]])
        ratios.append(math.log(score(shares) / exact))
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="of the predictions")
    parser.add_argument("--codes", nargs="+", default=CODES, choices=list(SIMULATORS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1000, 1001, 1002])
    parser.add_argument("--noise", type=float, default=0.0, help="standard deviation, in that of the training outputs")
    parser.add_argument("--depths", type=int, nargs="+", default=[1, 2, 3], help="numbers of layers")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    print("| code | designs | " + " | ".join("odds {:g}, share {:g}, at least {:g}".format(*c) for c in CHOICES) + " |")
    print("|---" * (2 + len(CHOICES)) + "|")
    means = []
    for code in arguments.codes:
        ratios = []
        for seed in arguments.seeds:
            path = arguments.folder / f"{code}_{seed}_{arguments.noise:g}.npz"
            if not path.exists():
                np.savez(path, **predictions(make_design(code, 10, seed, arguments.noise), tuple(arguments.depths)))
            with np.load(path) as found:
                ratios.append(scores(dict(found)))
        means.append(np.mean(ratios, 0))
        errors = (
            np.std(ratios, 0, ddof=1) / math.sqrt(len(ratios)) if len(ratios) > 1 else np.full(len(CHOICES), np.nan)
        )
        cells = [f"{m:+.2f} ({e:.2f})" for m, e in zip(means[-1], errors, strict=True)]
        print(f"| {code} | {len(ratios)} | " + " | ".join(cells) + " |", flush=True)
    print("| mean | | " + " | ".join(f"{m:+.3f}" for m in np.mean(means, 0)) + " |")


if __name__ == "__main__":
    main()
