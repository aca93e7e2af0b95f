"""MathJax from an installed package, so that formulas need no other server: one file is copied.

``sphinx-mathjax-offline`` ships MathJax 3 (Apache 2.0). ``tex-svg-full.js`` has all of TeX's macros
and draws its own letters, so that it loads neither fonts nor further scripts.
"""

import shutil
from importlib.util import find_spec
from pathlib import Path

PACKAGE, FILE = "sphinx-mathjax-offline", "tex-svg-full.js"


def copy(app, error):
    """Handler of ``build-finished``."""
    if error is None and app.builder.format == "html":
        source = Path(find_spec(PACKAGE).origin).parent / "static" / "mathjax" / FILE
        shutil.copyfile(source, Path(app.outdir) / "_static" / FILE)


def setup(app):
    """Connects the handler."""
    app.config.mathjax_path = FILE
    app.connect("build-finished", copy)
    return {"parallel_read_safe": True}
