"""The figures of the recipes, drawn by their own code: ``python docs/recipe_figures.py [NAME ...]``.

The Python of a page ``recipes/NAME.md`` is one program, whose last lines leave a matplotlib figure in ``figure``. It is
saved as ``figures/recipe_NAME.png``.
"""

import re
import sys
from pathlib import Path

DOCS = Path(__file__).parent


def draw(page: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    names: dict = {}
    exec(compile("\n".join(blocks), page.name, "exec"), names)
    names["figure"].savefig(
        DOCS / "figures" / f"recipe_{page.stem}.png", dpi=110, bbox_inches="tight"
    )


if __name__ == "__main__":
    for name in sys.argv[1:] or [page.stem for page in sorted((DOCS / "recipes").glob("*.md"))]:
        draw(DOCS / "recipes" / f"{name}.md")
