"""The best bound of every guide on one program: which couplings matter (Chamberlin, 2016, section 4.10).

``python benchmarks/guide_table.py --out FILE.jsonl`` runs on a step and a sum of sinusoids, with ``--data DIRECTORY``
also on yacht and energy (arrays X, y). One line per fit is appended to FILE.jsonl, fits found there are not repeated,
and the tables are printed. Layers have process noise between them, so that every guide applies.

With fixed hyperparameters the bounds of all guides are below one number, the log evidence of the program, and the
distance is the divergence of the guide from the posterior. The evidence lies between two annealed estimates, the upper
one from draws by NUTS; NUTS itself has no bound, and is compared by its log density of test rows. With learned
hyperparameters (a point each, under their priors) a guide also chooses the model that suits it.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from implementations.guide_fits import GUIDES, fit
from implementations.guide_programs import problem
from implementations.guide_scores import reference
from implementations.guide_tables import CHOSEN, SYNTHETIC, draw, scores, table

import numpyro_dgp as dgp


def agreed(records: list[dict[str, Any]], case: dict[str, Any]) -> dict[str, Any]:
    """The hyperparameters of the table where they are fixed: geometric means of what all guides learned, two digits.

    No guide chooses them alone. Once a fit has been made at some values, later ones take the same. Of the sets in
    ``CHOSEN`` they are given.
    """
    if case["set"] in CHOSEN:
        return {n: jnp.asarray(v) for n, v in CHOSEN[case["set"]].items()}
    mine = [r for r in records if case.items() <= r.items()]
    for r in mine:
        if "fixed" in r:
            return {n: jnp.asarray(v) for n, v in r["fixed"].items()}
    learned = [r["learned"] for r in mine if "learned" in r]
    if not learned:
        raise ValueError(f"expected fits with learned hyperparameters of {case} first: run --hyperparameters learned")
    means = {n: np.exp(np.mean([np.log(q[n]) for q in learned], 0)) for n in learned[0]}
    return {n: jnp.asarray(np.vectorize(lambda x: float(f"{x:.2g}"))(v)) for n, v in means.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="one line of JSON per fit")
    parser.add_argument("--data", type=Path, help="directory of .npz files with X and y")
    parser.add_argument(
        "--sets", nargs="+", help="default: step, sinusoids, and yacht and energy where there is --data"
    )
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=2, help="hidden columns")
    parser.add_argument("--num", type=int, default=60, help="training rows of the synthetic sets")
    parser.add_argument("--num-inducing", type=int, default=20)
    parser.add_argument("--hyperparameters", nargs="+", choices=("learned", "fixed"), default=["learned", "fixed"])
    parser.add_argument("--guides", nargs="+", choices=[*GUIDES, "NUTS"], default=["NUTS", *GUIDES])
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--draws", type=int, default=1000, help="of NUTS, after as many to warm up")
    parser.add_argument("--temperatures", type=int, default=4000, help="of the estimates of the evidence")
    parser.add_argument("--print", action="store_true", help="only print the tables of what is there")
    parser.add_argument("--figure", type=Path, help="draw the gaps to the evidence into this file")
    arguments = parser.parse_args()
    jax.config.update("jax_enable_x64", True)

    def records() -> list[dict[str, Any]]:
        return [json.loads(line) for line in arguments.out.read_text().splitlines()] if arguments.out.exists() else []

    sets = arguments.sets or [*SYNTHETIC, *(["yacht", "energy"] if arguments.data else [])]
    jobs = [(s, h, g) for h in arguments.hyperparameters for s in sets for g in arguments.guides]
    for name, hyperparameters, guide in [] if arguments.print else jobs:
        case = {"set": name, "layers": arguments.layers, "width": arguments.width}
        key = case | {"num_inducing": arguments.num_inducing} | {"hyperparameters": hyperparameters, "guide": guide}
        impossible = {"JointOutputs": arguments.width == 1}
        gaussian = [g for g in GUIDES if g in ("nested", "Markov, free") or g.startswith("Collapsed")]
        impossible |= {g: name == "labels" for g in gaussian}
        if impossible.get(guide) or any(key.items() <= r.items() for r in records()):
            continue
        p = problem(name, arguments.layers, arguments.width, arguments.data, arguments.num, arguments.num_inducing)
        fixed = agreed(records(), case) if hyperparameters == "fixed" else None
        if guide == "NUTS":
            found = {"draws": arguments.draws} | reference(p, fixed, arguments.draws, arguments.temperatures)
        else:
            found = {"steps": arguments.steps} | fit(p, guide, fixed, arguments.steps, arguments.starts)
        values = {} if fixed is None else {"fixed": {n: np.asarray(v).tolist() for n, v in fixed.items()}}
        found = key | {"version": dgp.__version__, "seed": 0} | values | found
        with arguments.out.open("a") as file:
            file.write(json.dumps(found) + "\n")
        print(found, flush=True)
        jax.clear_caches()
    print(table(records(), ("NUTS", *GUIDES)))
    print(scores(records(), ("NUTS", *GUIDES)))
    if arguments.figure:
        draw(records(), arguments.figure)


if __name__ == "__main__":
    main()
