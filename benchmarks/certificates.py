"""Whether certificates are right: programs drawn at random, data drawn from them, and the true divergence of a guide.

``python benchmarks/certificates.py --out FILE.jsonl`` draws programs of one and two layers with normal, Bernoulli and
Poisson likelihoods and 30 to 150 rows, asks ``dgp.diagnostics.certify`` for a guide, and computes the log evidence of
each by a sampler from the prior that is ten times as long as that of the certificate, in eight runs. The divergence of
a guide is the evidence minus its bound.

A certificate is *wrong* if the guide is further away than was asked for, by more than two standard errors, and one for
the draws of the sampler if the evidence is above its upper bound. A refusal was *for nothing* if a guide that was tried
is close enough, by more than two standard errors. One line per program is appended to FILE.jsonl; programs found there
are not repeated. Two processes can share the work and the file, one with ``--num 50`` and one with ``--first 50``.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

import numpyro_dgp as dgp
from numpyro_dgp.depth.integrated_fit import fit_integrated

LIKELIHOODS = ("normal", "bernoulli", "poisson")


def program(layers: int, likelihood: str) -> Callable[..., None]:
    """Layers of one column on [-2, 2], with process noise between them."""
    Z = jnp.linspace(-2.0, 2.0, 12)[:, None]

    def model(X: Any, y: Any = None) -> None:
        lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 0.3))
        if layers == 2:
            f = dgp.gp("f", dgp.kernels.RBF(0.5, 1.0), dgp.Points(Z), outputs=1, mean=dgp.means.IdentityMean())
        g = dgp.gp("g", dgp.kernels.RBF(1.0, lengthscale), dgp.Points(Z))
        noise = numpyro.sample("noise", dist.LogNormal(-1.5, 0.5)) if likelihood == "normal" else None
        with numpyro.plate("data", len(X)):
            x = numpyro.sample("h", f(X, noise=0.1)) if layers == 2 else X
            of = {
                "normal": lambda v: dist.Normal(v, noise),
                "bernoulli": dist.BernoulliLogits,
                "poisson": lambda v: dist.Poisson(jnp.exp(v)),
            }[likelihood]
            numpyro.sample("y", dgp.Likelihood(g(x), of), obs=y)

    return model


def judge(index: int, rows: tuple[int, ...], gap: float, options: dict[str, int], draws: int) -> dict[str, Any]:
    """One program: what the certificate says, and what is true."""
    rng = np.random.default_rng(index)
    layers, likelihood = 1 + index % 2, LIKELIHOODS[index // 2 % 3]
    num = int(rng.choice(rows))
    model = program(layers, likelihood)
    X = jnp.asarray(np.sort(rng.uniform(-2, 2, num))[:, None])
    y = numpyro.infer.Predictive(model, num_samples=1)(jax.random.key(index), X)["y"][0]
    began = time.perf_counter()
    found = dgp.diagnostics.certify(model, (X, y), key=jax.random.key(index + 1000), gap=gap, **options)
    seconds = time.perf_counter() - began
    truth = fit_integrated(model, jax.random.key(index + 2000), (X, y), draws, 10, 8, False)
    table = found.table
    error = 2 * np.hypot(truth.error, table.bound_se)
    away = truth.log_evidence - table.bound  # the divergence of each guide
    near = bool((away + error <= gap).any())
    return {
        "program": index, "layers": layers, "likelihood": likelihood, "rows": num, "guide": found.guide,
        "reasons": found.reasons, "away": away.to_dict(), "error": truth.error, "seconds": seconds,
        "said": table.gap_high.to_dict(), "evidence": truth.log_evidence, "between": found.between,
        "khat": table.khat.to_dict(), "draws": found.draws_gap,
        "outside": bool(truth.log_evidence - 2 * truth.error > found.between[1]),
        "wrong": found.guide is not None and bool(away[found.guide] - error[found.guide] > gap),
        "for_nothing": found.guide is None and near,
    }  # fmt: skip


def summary(records: list[dict[str, Any]], gap: float) -> str:
    """How often certificates were given, wrong, and refused for nothing."""
    lines = [
        "| layers | likelihood | programs | guide certified | wrong | refused for nothing | draws instead | wrong | "
        "neither | seconds |",
        "|---|" + "---|" * 9,
    ]
    for layers in (1, 2):
        for likelihood in LIKELIHOODS:
            mine = [r for r in records if r["layers"] == layers and r["likelihood"] == likelihood]
            given = [r for r in mine if r["guide"] is not None]
            if mine:
                draws = [r for r in mine if r["guide"] is None and r["draws"] <= gap]
                lines.append(
                    f"| {layers} | {likelihood} | {len(mine)} | {len(given)} | {sum(r['wrong'] for r in given)} | "
                    f"{sum(r['for_nothing'] for r in mine)} | {len(draws)} | {sum(r['outside'] for r in draws)} | "
                    f"{len(mine) - len(given) - len(draws)} | "
                    f"{np.median([r['seconds'] for r in mine]):.0f} |"
                )
    return "\n".join(lines)


def ranges(records: list[dict[str, Any]]) -> str:
    """How far guides are away, how far certificates are off, and what Pareto's k says of it."""
    errors = [r["error"] for r in records]
    lines = [f"standard error of the evidence: {min(errors):.3f} to {max(errors):.2f}, median {np.median(errors):.2f}"]
    given = [(r["away"][r["guide"]], r["said"][r["guide"]]) for r in records if r["guide"] is not None]
    if given:
        away, said = np.transpose(given)
        lines.append(f"certified guides are up to {away.max():.2f} nats away, {(away - said).max():.2f} more than said")
    found: dict[tuple[int, str, str], list[float]] = {}
    for r in records:
        for guide, nats in r["away"].items():
            found.setdefault((r["layers"], r["likelihood"], guide), []).append(nats)
    for (layers, likelihood, guide), nats in sorted(found.items()):
        lines.append(f"{layers} {likelihood}, {guide}: {min(nats):.1f} to {max(nats):.1f} nats in {len(nats)} programs")
    k, nats = np.transpose([(r["khat"][guide], nats) for r in records for guide, nats in r["away"].items()])
    for low, high in ((-np.inf, 0.5), (0.5, 0.7), (0.7, 1.0), (1.0, np.inf)):
        mine = nats[(low <= k) & (k < high)]
        if mine.size:
            lines.append(
                f"k {low} to {high}: {100 * (mine <= 1).mean():.0f} % within a nat, median {np.median(mine):.1f}"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="one line of JSON per program")
    parser.add_argument("--num", type=int, default=100)
    parser.add_argument("--first", type=int, default=0, help="leave out the programs before this one")
    parser.add_argument("--gap", type=float, default=1.0)
    parser.add_argument("--print", action="store_true", help="only print the table of what is there")
    parser.add_argument("--smoke", action="store_true")
    arguments = parser.parse_args()
    numpyro.enable_x64()
    rows, options, draws = (30, 60, 100, 150), {}, 512
    if arguments.smoke:
        rows, options, draws, arguments.num = (10,), {"num_steps": 20, "num_starts": 1, "budget": 1}, 16, 1
    out = arguments.out
    records = [json.loads(line) for line in out.read_text().splitlines()] if out and out.exists() else []
    done = {r["program"] for r in records}
    for index in [] if arguments.print else [i for i in range(arguments.first, arguments.num) if i not in done]:
        records.append(judge(index, rows, arguments.gap, options, draws))
        print(records[-1], flush=True)
        if out:
            with out.open("a") as file:
                file.write(json.dumps(records[-1]) + "\n")
        jax.clear_caches()
    print(summary(records, arguments.gap), ranges(records), sep="\n\n")


if __name__ == "__main__":
    main()
