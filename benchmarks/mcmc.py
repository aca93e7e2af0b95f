"""MCMC on deep GPs, in one table: NUTS on the bare program, with its last layer integrated, in the coordinates of a
fitted guide, Gibbs sampling, SGHMC, and NumPyro's NUTS on dense programs written by hand.

``python benchmarks/mcmc.py`` samples the programs of ``implementations/mcmc_programs.py`` in double precision. All
chains of a program start from one fit, or at fixed values. Seconds are those of warm-up and sampling, without the fit
and the compilation. Every run is appended to ``--out`` as a line of JSON, runs found there are not repeated, and
``--table`` prints what is there. Without ``--data`` yacht and energy are left out.

Hidden layers can be reflected without changing the density of the data. R-hat and the smallest effective sample size
are therefore those of what the data identify: logarithms of hyperparameters, and means of the function at 20 test
inputs, each through the means of the hidden values there.

Gradients are those of the draws, without warm-up. A draw of ``dgp.mcmc.Gibbs`` is a sweep, and its gradients are all
its evaluations of the density, most of them without a gradient; one of ``dgp.mcmc.SGHMC`` is twenty steps.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpyro
from implementations import mcmc_programs, mcmc_ring
from implementations.mcmc_samplers import SAMPLERS, RefusedError, Run, measure, start_of
from implementations.mcmc_target import Target

SETS = ("yacht", "energy")
OUT = Path(__file__).parent / "mcmc.jsonl"
SMOKE = {
    "step 12": ["collapsed, guide", "SGHMC"],
    "Booth": ["Gibbs, 4 ellipses, slice"],
    "latent": ["collapsed"],
    "ring": ["collapsed", "stock, dense"],
}
HEADINGS = (
    "rows",
    "sampler",
    "chains x draws",
    "gradients per draw",
    "R-hat",
    "smallest ESS: hyperparameters, function",
    "ESS per second",
    "ESS per 1000 gradients",
    "divergences",
    "test log density",
    "CRPS",
    "RMSE",
)


def programs(options: argparse.Namespace) -> dict[str, Callable[[], Target]]:
    """By name; the step by its number of rows too."""
    M, seed = options.inducing, options.seed
    steps = {f"step {rows}": lambda rows=rows: mcmc_programs.step(rows, M, seed) for rows in options.rows}
    small = 12 if options.smoke else None

    def table(name: str, rows: int) -> Callable[[], Target]:
        return lambda: mcmc_programs.guide_table(name, small or rows, M, options.data)

    return {
        **steps,
        "step 1D": table("step", 60),
        "sinusoids": table("sinusoids", 60),
        "Booth": lambda: mcmc_programs.booth(small or 20, 100),
        "latent": lambda: mcmc_programs.latent(small or 60, M, seed),
        "ring": lambda: mcmc_ring.cox(16 if options.smoke else 64, seed),
        **{name: table(name, 200) for name in SETS if options.data is not None},
    }


def samplers_of(program: str, options: argparse.Namespace) -> list[str]:
    chosen = SMOKE.get(program, SMOKE["step 12"]) if options.smoke else list(SAMPLERS)
    return options.samplers or chosen


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def missing_runs(
    program: str, build: Callable[[], Target], options: argparse.Namespace, found: list[dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """Records of one program, of the samplers that none is found of."""
    setting = {"program": program, "chains": options.chains, "draws": options.draws, "seed": options.seed}
    setting |= {"vectorized": options.vectorized, "start": "anywhere" if options.anywhere else "near"}
    if options.warmup is not None:
        setting |= {"warmup": options.warmup}
    warmup = options.draws if options.warmup is None else options.warmup
    how = Run(options.draws, warmup, options.chains, options.vectorized, options.seed)
    keys = [setting | {"sampler": sampler} for sampler in samplers_of(program, options)]
    missing = [key for key in keys if not any(key.items() <= r.items() for r in found)]
    if not missing:
        return
    target = build()
    start = start_of(target, options.steps, options.anywhere)
    about = {"rows": len(target.data[-1]), "device": jax.devices()[0].device_kind}
    for key in missing:
        try:
            result = measure(key["sampler"], target, start, how)
        except RefusedError as refused:
            result = {"refused": str(refused)}
        yield key | about | result


def cells(r: dict[str, Any]) -> list[str]:
    ess, r_hat = min(r["ess_hyper"], r["ess_function"]), max(r["r_hat_hyper"], r["r_hat_function"])
    total = r["per_draw"] * r["draws"] * r["chains"]
    return [
        f"{r['rows']}",
        r["sampler"],
        f"{r['chains']} x {r['draws']}",
        f"{r['per_draw']:.0f}",
        f"{r_hat:.3f}",
        f"{r['ess_hyper']:.0f}, {r['ess_function']:.0f}",
        f"{ess / r['seconds']:.2f}",
        f"{1000 * ess / total:.2f}",
        f"{r['divergences']}",
        f"{r['density']:.2f} ({r['density_error']:.2f})",
        f"{r['crps']:.4f}",
        f"{r['rmse']:.4f}",
    ]


def table(records: list[dict[str, Any]]) -> str:
    """A table per program, of each sampler its longest run, and the sentences of those that do not apply."""
    lines: list[str] = []
    for program, start in dict.fromkeys((r["program"], r["start"]) for r in records):
        here = [r for r in records if (r["program"], r["start"]) == (program, start)]
        mine = {name: [r for r in here if r["sampler"] == name] for name in SAMPLERS}
        rows = [max(found, key=lambda r: r["draws"] * r["chains"]) for found in mine.values() if found]
        title = f"**{program}, from anywhere**" if start == "anywhere" else f"**{program}**"
        lines += ["", title, "", "| " + " | ".join(HEADINGS) + " |", "|" + "---|" * len(HEADINGS)]
        lines += ["| " + " | ".join(cells(r)) + " |" for r in rows if "refused" not in r]
        lines += ["", *(f"- {r['sampler']}: {r['refused']}" for r in rows if "refused" in r)]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", nargs="+", help="names of the tables; all by default")
    parser.add_argument("--samplers", nargs="+", choices=SAMPLERS, help="all by default")
    parser.add_argument("--rows", type=int, nargs="+", default=[200, 1000], help="of the step in two columns")
    parser.add_argument("--data", type=Path, help="directory of .npz files with X and y, for yacht and energy")
    parser.add_argument("--inducing", type=int, default=20)
    parser.add_argument("--draws", type=int, default=200, help="of each chain")
    parser.add_argument("--warmup", type=int, help="draws of each chain before those; as many by default")
    parser.add_argument("--chains", type=int, default=4)
    parser.add_argument("--vectorized", action="store_true", help="all chains at once, in place of one by one")
    parser.add_argument("--anywhere", action="store_true", help="start chains by NumPyro's default, not near a mode")
    parser.add_argument("--steps", type=int, default=3000, help="of the fit")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=OUT, help="one line of JSON per run")
    parser.add_argument("--table", action="store_true", help="only print the tables of what is there")
    parser.add_argument("--smoke", action="store_true", help="a few rows and draws, and nothing is kept")
    options = parser.parse_args()
    if options.smoke:
        options.rows, options.inducing, options.draws, options.chains, options.steps = [12], 4, 10, 2, 20
    numpyro.enable_x64()
    found = [] if options.smoke else read(options.out)
    known = programs(options)
    if options.data is None and not options.table:
        print(f"without --data there are no rows of {' and '.join(SETS)}", file=sys.stderr)
    if unknown := set(options.program or ()) - set(known):
        parser.error(f"expected programs among {', '.join(known)}, got {', '.join(sorted(unknown))}")
    for program in [] if options.table else options.program or (SMOKE if options.smoke else known):
        for record in missing_runs(program, known[program], options, found):
            found.append(record)
            print(record, file=sys.stderr, flush=True)
            if not options.smoke:
                with options.out.open("a") as file:
                    file.write(json.dumps(record) + "\n")
        jax.clear_caches()
    print(table(found))


if __name__ == "__main__":
    main()
