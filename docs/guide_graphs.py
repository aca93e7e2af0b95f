"""The graphical models of the guides: ``python docs/guide_graphs.py`` writes ``docs/figures/guide_graphs.png``.

Two hidden layers h of one datum n, inducing values u of all three layers. An arrow means that the distribution at its
head depends on its tail. Grey: known. Blue: a posterior with parameters of its own; white: the model's own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import Circle, FancyArrowPatch, FancyBboxPatch

RADIUS = 0.23
CHAIN = {
    "x": (0, 0),
    "h1": (1, 0),
    "h2": (2, 0),
    "y": (3, 0),
    "u1": (1, 1),
    "u2": (2, 1),
    "u3": (3, 1),
}
OUTPUTS = {
    "x": (0, 0),
    "ha": (1, 0),
    "hb": (2, 0),
    "y": (3, 0),
    "ua": (1, 1),
    "ub": (2, 1),
    "u2": (3, 1),
}
LATENT = {"x": (0, 0), "w": (1, 0), "h1": (2, 0), "y": (3, 0), "u1": (2, 1), "u2": (3, 1)}
LABELS = {
    "x": "$x_n$", "y": "$y_n$", "w": "$w_n$", "h1": "$h^1_n$", "h2": "$h^2_n$", "u1": "$u^1$", "u2": "$u^2$",
    "u3": "$u^3$", "ha": "$h^1_{n1}$", "hb": "$h^1_{n2}$", "ua": "$u^1_1$", "ub": "$u^1_2$",
}  # fmt: skip
FROM_U = ("u1 h1", "u2 h2")
ALONG = ("x h1", "h1 h2")


class Panel(NamedTuple):
    """One family: its arrows, which nodes have parameters, undirected edges, places of nodes, what is below."""

    title: str
    text: str
    arrows: tuple[str, ...]
    own: tuple[str, ...]
    edges: tuple[str, ...] = ()
    places: dict[str, tuple[float, float]] = CHAIN
    copies: bool = False


PANELS = (
    Panel("the program", r"$p(u)\;\prod_n\;\, p(h^1_n|u^1,x_n)\,p(h^2_n|u^2,h^1_n)\,p(y_n|u^3,h^2_n)$",
          (*FROM_U, *ALONG, "u3 y", "h2 y"), ()),
    Panel("InducingPoint", r"$q(h_n|u,h^-_n)=p(h_n|u,h^-_n)$", (*FROM_U, *ALONG), ("u1", "u2", "u3")),
    Panel("GivenInducing()", r"$N(K_{nm}K_{mm}^{-1}u+M_n,\; S_n)$", (*FROM_U, *ALONG), ("u1", "u2", "u3", "h1", "h2")),
    Panel("GivenInducing('free'), rank r", r"$N(T_nu+M_n,\; S_n)$", FROM_U, ("u1", "u2", "u3", "h1", "h2")),
    Panel("JointOutputs()", r"$N(T_n\,(u_1,u_2)+M_n,\; S_n)$, two outputs", ("ua ha", "ua hb", "ub ha", "ub hb"),
          ("ua", "ub", "u2", "ha", "hb"), ("ha hb",), OUTPUTS),
    Panel("MarkovInducing()", r"$q(u^l|u^{l-1})$, $q(h_n|u)=N(T_nu+M_n,\; S_n)$", (*FROM_U, "u1 u2", "u2 u3"),
          ("u1", "u2", "u3", "h1", "h2")),
    Panel("GivenBelow()", r"$N(B_n h^-_n+M_n,\; S_n)$", ALONG, ("u1", "u2", "u3", "h1", "h2")),
    Panel("MeanField, Collapsed", r"$N(M_n,\; S_n)$", (), ("u1", "u2", "u3", "h1", "h2")),
    Panel("ImportanceWeighted", r"$K$ values of $w_n$, weighted; $h$ as InducingPoint", ("x h1", "w h1", "u1 h1"),
          ("u1", "u2", "w"), (), LATENT, True),
)  # fmt: skip


def draw(panel: Panel, ax: Any) -> None:
    for arrow in (*panel.arrows, *panel.edges):
        tail, head = (panel.places[n] for n in arrow.split())
        bend = 0.35 if abs(tail[0] - head[0]) > 1 else 0.0  # around the node between
        style = "-|>" if arrow in panel.arrows else "-"
        colour = "C0" if arrow.split()[1] in panel.own or arrow in panel.edges else "0.25"
        ax.add_patch(
            FancyArrowPatch(tail, head, arrowstyle=style, mutation_scale=12, lw=1.3, color=colour,
                            shrinkA=15, shrinkB=15,
                            connectionstyle=f"arc3,rad={bend}")
        )  # fmt: skip
    for name, (across, up) in panel.places.items():
        model = not panel.own
        known, absent = name in "xy", name == "y" and not model
        face = "0.85" if known else "#cfe3f5" if name in panel.own else "white"
        line = "0.7" if absent else "C0" if name in panel.own else "0.25"
        ax.add_patch(
            Circle(
                (across, up), RADIUS, fc=face, ec=line, lw=1.3, ls=":" if absent else "-", zorder=3
            )
        )
        ax.text(across, up, LABELS[name], ha="center", va="center", fontsize=9, zorder=4,
                color="0.6" if absent else "black")  # fmt: skip
    plate = FancyBboxPatch(
        (-0.42, -0.45),
        3.84,
        0.84,
        boxstyle="round,pad=0,rounding_size=0.1",
        fc="none",
        ec="0.6",
        lw=0.8,
    )
    ax.add_patch(plate)
    ax.text(3.38, -0.42, "$N$", ha="right", va="bottom", fontsize=7, color="0.4")
    if panel.copies:
        ax.text(1.0, 0.25, r"$\times K$", ha="center", va="bottom", fontsize=8, color="C0")
    ax.set_title(panel.title, fontsize=10)
    ax.text(1.5, -0.78, panel.text, ha="center", va="center", fontsize=8.5)
    ax.set(xlim=(-0.55, 3.55), ylim=(-0.95, 1.35), aspect="equal")
    ax.axis("off")


def main() -> None:
    figure, axes = plt.subplots(3, 3, figsize=(10, 7.4), layout="constrained")
    for ax, panel in zip(axes.flat, PANELS, strict=True):
        draw(panel, ax)
    figure.savefig(Path(__file__).parent / "figures" / "guide_graphs.png", dpi=110)


if __name__ == "__main__":
    main()
