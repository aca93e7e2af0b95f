"""Tables of the records of ``emulation.py``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

Case = tuple[str, int, float]
"""A code, a number of points and the noise."""


def case_of(record: dict[str, Any]) -> Case:
    return record["code"], record["points"], record.get("noise", 0.0)


def table(records: list[dict[str, Any]]) -> str:
    """A Markdown table of means over designs."""
    lines = [
        "| code | points | noise | designs | method | RMSE | CRPS | coverage | seconds |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for case in dict.fromkeys(map(case_of, records)):
        mine = [r for r in records if case_of(r) == case]
        for method in dict.fromkeys(r["method"] for r in mine):
            rows = [r for r in mine if r["method"] == method]
            means = {key: np.mean([r[key] for r in rows]) for key in ("rmse", "crps", "coverage", "seconds")}
            lines.append(
                f"| {case[0]} | {case[1]} | {case[2]:g} | {len(rows)} | {method} | {means['rmse']:.4f} | "
                f"{means['crps']:.4f} | {means['coverage']:.2f} | {means['seconds']:.0f} |"
            )
    return "\n".join(lines)


def log_ratios(records: list[dict[str, Any]], case: Case, method: str, other: str, score: str) -> list[float]:
    """Of a score of two methods, for every design that both have."""
    first, second = (
        {r["seed"]: r[score] for r in records if case_of(r) == case and r["method"] == m} for m in (method, other)
    )
    return [math.log(first[seed] / second[seed]) for seed in first.keys() & second.keys()]


def relative(records: list[dict[str, Any]], score: str, other: str) -> str:
    """A Markdown table of mean log ratios of a score to that of another method, with standard errors over designs;
    below it the same over codes with several designs, and on how many of these a method is better or worse by more
    than one and two errors."""
    methods = [m for m in dict.fromkeys(r["method"] for r in records) if m != other]
    lines = [f"| log {score} to that of {other} | points | noise | " + " | ".join(methods) + " |"]
    lines.append("|---" * (3 + len(methods)) + "|")
    means: dict[str, list[tuple[float, float]]] = {m: [] for m in methods}
    for case in dict.fromkeys(map(case_of, records)):
        cells = []
        for m in methods:
            ratios = log_ratios(records, case, m, other, score)
            cells.append(_mean(ratios))
            means[m] += [(float(np.mean(ratios)), _error(ratios))] if len(ratios) > 1 else []
        lines.append(f"| {case[0]} | {case[1]} | {case[2]:g} | " + " | ".join(cells) + " |")
    several = [[a for a, _ in v] for v in means.values()]
    lines.append("| all with several designs | | | " + " | ".join(_mean(v) for v in several) + " |")
    for name, sign in (("better", -1), ("worse", 1)):
        for errors in (1, 2):
            counts = [f"{sum(sign * a > errors * e for a, e in v)} of {len(v)}" for v in means.values()]
            lines.append(f"| {name} by {errors} errors | | | " + " | ".join(counts) + " |")
    return "\n".join(lines)


def _error(values: list[float]) -> float:
    return float(np.std(values, ddof=1) / math.sqrt(len(values))) if len(values) > 1 else math.nan


def _mean(values: list[float]) -> str:
    """With its standard error, if there is one."""
    if not values:
        return ""
    return f"{np.mean(values):+.2f}" + (f" ({_error(values):.2f})" if len(values) > 1 else "")


def ranks(records: list[dict[str, Any]], score: str) -> str:
    """The mean rank of every method that has several designs of some case, over the designs that all of these have."""
    cases = {(case_of(r), r["method"]) for r in records if r["seed"] > 0}
    methods = [m for m in dict.fromkeys(r["method"] for r in records) if any(m == name for _, name in cases)]
    found = []
    for design in dict.fromkeys((case_of(r), r["seed"]) for r in records):
        scores = {r["method"]: r[score] for r in records if (case_of(r), r["seed"]) == design}
        if set(methods) <= scores.keys() and any((design[0], m) in cases for m in methods):
            found.append([1 + sum(scores[o] < scores[m] for o in methods) for m in methods])
    if not found:
        return "no design has all methods"
    means = ", ".join(f"{m} {rank:.2f}" for m, rank in zip(methods, np.mean(found, axis=0), strict=True))
    return f"mean rank by {score} over {len(found)} designs: {means}"


def by_code(records: list[dict[str, Any]], best_name: str = "fit_best") -> str:
    """A Markdown table with a row for each code: the CRPS of ``GP``, logarithms of the ratios of the others to it,
    gains and coverage of ``fit_best``, all on the designs that it has under this name; at the end the mean coverage
    over codes with several of these."""
    others = {"GP, scikit-learn": "scikit-learn", best_name: "`fit_best`", "fit_best by evidence": "by evidence"}
    others |= {"one layer": "one layer by draws", "two layers": "two layers", "three layers": "three"}
    others = {m: heading for m, heading in others.items() if any(r["method"] == m for r in records)}
    headings = ["code", "points", "noise", "designs", "CRPS of GP", *others.values()]
    headings += ["rows left out, log density to one layer: two, three", "log evidence"]
    headings += ["coverage of 90 %: GP, `fit_best`"]
    lines, coverages = ["| " + " | ".join(headings) + " |", "|---" * len(headings) + "|"], []
    for case in dict.fromkeys(map(case_of, records)):
        seeds = {r["seed"] for r in records if case_of(r) == case and r["method"] == best_name}
        mine = [r for r in records if case_of(r) == case and r["seed"] in seeds]
        gp, best = ([r for r in mine if r["method"] == name] for name in ("GP", best_name))
        if not gp or not best:
            continue
        cells = []
        for method in others:
            cells.append(_mean(log_ratios(mine, case, method, "GP", "crps")))
        held_out = [np.multiply(r["held_out"], case[1]) for r in best if r.get("held_out")]
        coverage = [float(np.mean([r["coverage"] for r in rows])) for rows in (gp, best)]
        coverages += [coverage] if len(best) > 1 else []
        cells += [_gains(held_out), _gains([r["log_evidence"] for r in best]), "{:.2f}, {:.2f}".format(*coverage)]
        crps = np.mean([r["crps"] for r in gp])
        label = f"{case[0]} | {case[1]} | {case[2]:g} | {len(best)}"
        lines.append(f"| {label} | {crps:.4f} | " + " | ".join(cells) + " |")
    means = "{:.2f}, {:.2f}".format(*np.mean(coverages, 0)) if coverages else "none"
    return "\n".join([*lines, "", f"mean coverage, {len(coverages)} codes with several designs: {means}"])


def _gains(values: Sequence[Any]) -> str:
    """Medians over designs of what the second and further programs have more than the first."""
    if not len(values):
        return ""
    first, *deeper = np.transpose(values)
    return ", ".join(f"{np.median(deep - first):+.1f}" for deep in deeper)


def differences(records: list[dict[str, Any]], score: str, method: str, other: str) -> str:
    """Mean differences of a score with standard errors over designs, a line for each code with several."""
    lines = []
    for case in dict.fromkeys(map(case_of, records)):
        first, second = (
            {r["seed"]: r[score] for r in records if case_of(r) == case and r["method"] == m} for m in (method, other)
        )
        found = [first[seed] - second[seed] for seed in first.keys() & second.keys()]
        if len(found) > 1:
            lines.append(f"{case[0]}: {score} of {method} less {other} {np.mean(found):+.4f} ({_error(found):.4f})")
    return "\n".join(lines)
