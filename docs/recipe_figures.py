"""The figures of the recipes, drawn by their own code: ``python docs/recipe_figures.py [NAME ...]``.

A recipe shows its figure first. The Python between ``figures/recipe_NAME.png`` and the next such figure of the page is
one program, whose last lines leave a matplotlib figure in ``figure``.
"""

import re
import sys
from pathlib import Path

DOCS = Path(__file__).parent
FIGURE = re.compile(r"\(\.\./figures/recipe_(\w+)\.png\)")


def programs() -> dict[str, str]:
    """The name of each figure, and the code that draws it."""
    found = {}
    for page in sorted((DOCS / "recipes").glob("*.md")):
        _, *parts = FIGURE.split(page.read_text())
        for name, text in zip(parts[::2], parts[1::2], strict=True):
            found[name] = "\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))
    return found


def draw(name: str, code: str) -> None:
    names: dict = {}
    exec(compile(code, name, "exec"), names)
    names["figure"].savefig(DOCS / "figures" / f"recipe_{name}.png", dpi=110, bbox_inches="tight")


if __name__ == "__main__":
    known = programs()
    for name in sys.argv[1:] or known:
        draw(name, known[name])
