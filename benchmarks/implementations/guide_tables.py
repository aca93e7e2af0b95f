"""Tables and the figure of ``guide_table.py``, from the records of its fits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

SYNTHETIC = ("step", "sinusoids")
# Sets whose hyperparameters are chosen here and not learned by the guides: a classification, and a latent column.
CHOSEN: dict[str, dict[str, Any]] = {
    "labels": {"variance0": 0.5, "lengthscale0": [1.0], "variance1": 4.0, "lengthscale1": [1.0, 1.0], "process0": 0.1},
    "branches": {
        "noise": 0.1,
        "variance0": 0.1,
        "lengthscale0": [1.5, 1.5],
        "variance1": 1.0,
        "lengthscale1": [1.5, 1.0],
        "process0": 0.05,
    },
}
NOISES = ("noise", "process0", "process1")


def best(r: dict[str, Any]) -> float:
    return float(np.nanmax(r["bounds"]))


def cell(r: dict[str, Any] | None, what: str, evidence: float | None) -> str:
    """One number of one fit: its best bound or how far that is below the evidence, how far the worst start is below the
    best, the density of test rows, or noises."""
    if r is None:
        return ""
    if what == "log density of test rows":
        return f"{r['density']:.2f} ({r['density_error']:.2f})"
    if what == "noise, process noise":
        middle = {n: q[1] for n, q in r["quantiles"].items()} if "quantiles" in r else r.get("learned", {})
        return ", ".join(f"{middle[n]:.2f}" for n in NOISES if n in middle)
    if "bounds" not in r:
        return f"{r['lower']:.1f} to {r['upper']:.1f}" if "lower" in r and what.startswith("nats below") else ""
    if what == "worst start below the best":
        return f"{best(r) - np.nanmin(r['bounds']):.1f}"
    error = r["errors"][int(np.nanargmax(r["bounds"]))]
    return f"{best(r) if evidence is None else evidence - best(r):.1f} ({error:.1f})"


def table(records: list[dict[str, Any]], guides: Sequence[str]) -> str:
    """Guides by sets, for each number of layers, hyperparameters fixed or learned, and the evidence known or not."""
    evidence = _evidence(records)

    def group(r: dict[str, Any]) -> tuple[int, int, str, str]:
        known = r["hyperparameters"] == "fixed" and _program(r) in evidence
        main = "nats below the evidence" if known else "best bound"
        return r["layers"], r["num_inducing"], r["hyperparameters"], main

    lines: list[str] = []
    for layers, M, hyperparameters, main in sorted({group(r) for r in records}):
        mine = [r for r in records if group(r) == (layers, M, hyperparameters, main)]
        sets = list(dict.fromkeys(r["set"] for r in mine))
        whats = [main, "log density of test rows", "worst start below the best"]
        for what in [*whats, "noise, process noise"] if hyperparameters == "learned" else whats:
            heading = f"{layers} layers, M = {M}, hyperparameters {hyperparameters}"
            lines += ["", f"{heading}, {', '.join(sets)}: {what}", ""]
            lines += ["| guide | " + " | ".join(sets) + " |", "|---|" + "---|" * len(sets)]
            for guide in guides:
                fits = {r["set"]: r for r in mine if r["guide"] == guide}
                known = {s: evidence[s, layers, M] if main.startswith("nats") else None for s in sets}
                cells = [cell(fits.get(s), what, known[s]) for s in sets]
                if any(cells):
                    lines.append(f"| {guide} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def scores(records: list[dict[str, Any]], guides: Sequence[str]) -> str:
    """All that is known of the best fit of every guide, set by set: two layers, hyperparameters fixed."""
    lines: list[str] = []
    known = [r for r in records if r["layers"] == 2 and r["hyperparameters"] == "fixed" and "crps" in r]
    for name in dict.fromkeys(r["set"] for r in known):
        mine = {r["guide"]: r for r in known if r["set"] == name and r["num_inducing"] == 20}
        evidence = _evidence(list(mine.values())).get((name, 2, 20))
        below = "best bound" if evidence is None else "nats below the evidence"
        lines += ["", f"{name}:", ""]
        lines += [f"| guide | {below} | k-hat | log density | CRPS | coverage of 90 % | seconds | parameters |"]
        lines += ["|---|" + "---|" * 7]
        for guide in (g for g in guides if g in mine):
            r = mine[guide]
            cells = [cell(r, below, evidence), _number(r, "khat", ".1f"), cell(r, "log density of test rows", None)]
            cells += [_number(r, *which) for which in (("crps", ".3f"), ("coverage", ".2f"), ("seconds", ".0f"))]
            lines.append(f"| {guide} | " + " | ".join([*cells, _number(r, "parameters", "d")]) + " |")
    return "\n".join(lines)


def _number(r: dict[str, Any], what: str, form: str) -> str:
    return format(r[what], form) if what in r else ""


def _evidence(records: list[dict[str, Any]]) -> dict[tuple[str, int, int], float]:
    """By set, layers and inducing points. Where the bound from below is above that from above, the chain has missed
    modes, and neither says anything."""
    found = [r for r in records if "evidence" in r and r["evidence"] < r["evidence_down"] + 1]
    return {_program(r): r["evidence"] for r in found}


def _program(r: dict[str, Any]) -> tuple[str, int, int]:
    return r["set"], r["layers"], r["num_inducing"]


def draw(records: list[dict[str, Any]], path: Path) -> None:
    """A figure: how far the best bound of each guide is below the evidence, two layers, hyperparameters fixed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    def mine(r: dict[str, Any]) -> bool:
        return r["set"] in SYNTHETIC and r["layers"] == 2 and r["hyperparameters"] == "fixed"

    evidence = {r["set"]: r["evidence"] for r in records if mine(r) and "evidence" in r}
    gaps: dict[str, dict[str, float]] = {}
    for r in records:
        if mine(r) and "bounds" in r and r["set"] in evidence:
            gaps.setdefault(r["guide"], {})[r["set"]] = evidence[r["set"]] - best(r)
    names = sorted(gaps, key=lambda n: -np.mean(list(gaps[n].values())))
    figure, ax = plt.subplots(figsize=(7, 0.25 * len(names) + 0.9), layout="constrained")
    for name, marker in zip(SYNTHETIC, "os", strict=True):
        found = [(gaps[n][name], i) for i, n in enumerate(names) if name in gaps[n]]
        ax.plot(*zip(*found, strict=True), marker, ms=5, label=name)
    ax.set(xscale="log", xlabel="nats below the log evidence", yticks=range(len(names)), yticklabels=names)
    ax.set_xticks([5, 10, 20, 50, 100], ["5", "10", "20", "50", "100"])
    ax.set_xticks([], minor=True)
    ax.grid(axis="both", lw=0.4, alpha=0.5)
    ax.legend(edgecolor="none")
    figure.savefig(path, dpi=110)
