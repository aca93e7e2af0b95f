"""Inventories for intersphinx, from lists of the names that these pages and docstrings link to.

A list ``_inventories/PROJECT.txt`` has one name per line with its role and its page. Sphinx reads them compressed.
"""

import zlib
from pathlib import Path

LISTS = Path(__file__).parent / "_inventories"


def compiled(project):
    """The path of the inventory of ``project``."""
    rows = [line.split() for line in (LISTS / f"{project}.txt").read_text().splitlines()]
    body = "".join(f"{name} {role} 1 {page}#$ -\n" for name, role, page in rows)
    head = f"# Sphinx inventory version 2\n# Project: {project}\n# Version: \n"
    head += "# The remainder of this file is compressed using zlib.\n"
    path = LISTS.parent / "_build" / "inventories" / f"{project}.inv"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(head.encode() + zlib.compress(body.encode()))
    return str(path)
