"""Which guide to begin with: ``python docs/guide_choice.py`` writes ``docs/figures/guide_choice.png``."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

QUESTIONS = [
    (
        "Small data, all rows at once, a Gaussian\nlikelihood; one layer, or process noise?",
        "Collapsed(model)",
        "with hidden layers hidden=GivenInducing()",
    ),
    (
        "A latent per datum,\ndgp.latent(...)?",
        "ImportanceWeighted(model, num_samples=5,\n                   latent=Amortised())",
        "",
    ),
    ("Layers on a Grid, Basis,\nStateSpace or Neighbours?", "", "the page Representations"),
    (
        "Process noise between layers,\nf(x, noise=s)?",
        'InducingPoint(model,\n              sites={"h": GivenInducing()})',
        "at every hidden site",
    ),
]
LEFT, RIGHT, HEIGHT = 0.0, 4.6, 1.25
BOX = {"boxstyle": "round,pad=0.5", "linewidth": 1.2}


def box(ax: Axes, x: float, y: float, text: str, colour: str, **options: object) -> None:
    ax.text(
        x,
        y,
        text,
        va="center",
        fontsize=10.5,
        bbox=BOX | {"facecolor": colour, "edgecolor": "0.35"},
        **options,
    )


def arrow(ax: Axes, start: tuple[float, float], end: tuple[float, float], text: str) -> None:
    ax.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": "0.3"})
    side = 0.12 if start[0] == end[0] else 0.0
    above = 0.0 if side else 0.12
    middle = ((start[0] + end[0]) / 2 + side, (start[1] + end[1]) / 2 + above)
    ax.text(*middle, text, fontsize=9.5, color="0.3", ha="left" if side else "center", va="center")


def figure() -> plt.Figure:
    made, ax = plt.subplots(figsize=(9.0, 5.6), layout="constrained")
    for row, (question, guide, note) in enumerate(QUESTIONS):
        y = -row * HEIGHT
        box(ax, LEFT + 1.4, y, question, "0.95", ha="center")
        arrow(ax, (LEFT + 3.2, y), (RIGHT - 0.25, y), "yes")
        arrow(ax, (LEFT + 1.4, y - 0.36), (LEFT + 1.4, y - HEIGHT + 0.38), "no")
        if guide:
            box(
                ax,
                RIGHT,
                y + (0.12 if note else 0.0),
                guide,
                "#dbe9f6",
                family="monospace",
                ha="left",
            )
            below = y - (0.4 if "\n" in guide else 0.3)
            ax.text(RIGHT, below, note, fontsize=9.5, color="0.2", va="center")
        else:
            box(ax, RIGHT, y, note, "0.95", ha="left")
    last = -len(QUESTIONS) * HEIGHT
    box(ax, LEFT + 1.4, last, "InducingPoint(model)", "#dbe9f6", family="monospace", ha="center")
    ax.text(
        RIGHT - 0.2,
        last,
        "any program, any likelihood, minibatches",
        fontsize=10,
        va="center",
        color="0.2",
    )
    ax.set(xlim=(-0.4, 9.0), ylim=(last - 0.5, 0.55))
    ax.axis("off")
    return made


if __name__ == "__main__":
    figure().savefig(Path(__file__).parent / "figures" / "guide_choice.png", dpi=130)
