"""Which guide to begin with: ``python docs/guide_choice.py`` writes ``docs/figures/guide_choice.png``."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

# Question, program and note, in the order of docs/guides.md.
QUESTIONS = [
    (
        "1. All rows at once, Gaussian likelihood;\none layer, or process noise?",
        "Collapsed(model)",
        "several layers: hidden=GivenInducing()",
    ),
    (
        "2. A latent per datum, dgp.latent?",
        "ImportanceWeighted(model,\n  num_samples=5, latent=Amortised())",
        "",
    ),
    (
        "3. Layers that are not on Points?",
        "",
        "the table of pairs: The families of guides",
    ),
    (
        "4. Process noise, f(x, noise=s)?",
        'InducingPoint(model,\n  sites={"h": GivenInducing()})',
        "",
    ),
]
HEIGHT, INDENT = 1.7, 0.7
EDGE = {"boxstyle": "round,pad=0.4", "linewidth": 1.2, "edgecolor": "0.35"}


def row(ax: Axes, y: float, question: str, guide: str, note: str) -> None:
    """A question, and below it what to take if the answer is yes."""
    ax.text(0.0, y, question, va="center", fontsize=11, bbox=EDGE | {"facecolor": "0.95"})
    ax.annotate(
        "",
        (INDENT - 0.12, y - 0.85),
        (0.3, y - 0.3),
        arrowprops={"arrowstyle": "-|>", "color": "0.3"},
    )
    ax.text(0.22, y - 0.68, "yes", fontsize=10, color="0.3", ha="right", va="center")
    style = (
        {"family": "monospace", "bbox": EDGE | {"facecolor": "#dbe9f6"}}
        if guide
        else {"style": "italic"}
    )
    ax.text(INDENT, y - 0.85, guide or note, va="center", fontsize=10, **style)
    if guide and note:
        ax.text(INDENT, y - 1.17, note, va="center", fontsize=9.5, color="0.2")


def figure() -> plt.Figure:
    made, ax = plt.subplots(figsize=(4.6, 7.4))
    made.subplots_adjust(0, 0, 1, 1)
    for number, texts in enumerate(QUESTIONS):
        row(ax, -number * HEIGHT, *texts)
    last = -len(QUESTIONS) * HEIGHT
    ax.text(0.0, last, "otherwise", fontsize=11, va="center", bbox=EDGE | {"facecolor": "0.95"})
    box = EDGE | {"facecolor": "#dbe9f6"}
    ax.text(
        1.3, last, "InducingPoint(model)", fontsize=10, va="center", family="monospace", bbox=box
    )
    ax.text(
        0.0, last - 0.5, "takes any program, any likelihood, minibatches", fontsize=9.5, color="0.2"
    )
    ax.set(xlim=(-0.25, 4.4), ylim=(last - 0.65, 0.5))
    ax.axis("off")
    return made


if __name__ == "__main__":
    figure().savefig(Path(__file__).parent / "figures" / "guide_choice.png", dpi=130)
