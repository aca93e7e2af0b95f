"""Sphinx configuration."""

import sys
from importlib import metadata
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from inventories import compiled

project = "numpyro_dgp"
author = "The numpyro_dgp developers"
copyright = "2026, the numpyro_dgp developers"
release = metadata.version("numpyro-dgp")
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.intersphinx",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "bundled_mathematics",
    "source_links",
]
source_suffix = {".rst": "restructuredtext", ".md": "myst-nb"}  # autosummary writes the first
exclude_patterns = ["_build"]
templates_path = ["_templates"]
suppress_warnings = [
    "myst.strikethrough",
    "myst-nb.lexer",
]  # the second where notebooks are not run

myst_enable_extensions = ["dollarmath", "amsmath"]
myst_heading_anchors = 3

# Pages in notebooks/ are programs, run when the site is built; their results are kept in _build/.jupyter_cache.
nb_execution_mode = "cache"
nb_execution_cache_path = str(Path(__file__).parent / "_build" / ".jupyter_cache")
nb_execution_raise_on_error = True
nb_execution_timeout = 300
nb_merge_streams = True
nb_output_stderr = "remove"

autosummary_generate = True
# Classes beside functions of the same name, for file systems that see no difference.
autosummary_filename_map = {
    f"numpyro_dgp.diagnostics.{name}": f"numpyro_dgp.diagnostics.{name}-class"
    for name in ("Convergence", "Coverage", "Evidence")
}
autodoc_typehints = "none"
autodoc_member_order = "bysource"
autodoc_class_signature = "mixed"
napoleon_use_rtype = False

# Names of other projects are looked up in a list of our own, so that a build needs no network.
intersphinx_mapping = {
    "numpyro": ("https://num.pyro.ai/en/stable/", compiled("numpyro")),
    "jax": ("https://docs.jax.dev/en/latest/", compiled("jax")),
    "arviz_stats": ("https://python.arviz.org/projects/stats/en/stable/", compiled("arviz_stats")),
}

html_theme = "furo"
html_title = "numpyro_dgp"
html_static_path = ["_static"]
html_css_files = ["site.css"]
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
copybutton_exclude = ".linenos, .gp, .go"
