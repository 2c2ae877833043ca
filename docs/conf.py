"""Settings of the documentation site. ``make docs`` builds it into ``docs/_build``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import benchmark_plots
import datasets_pages
import figures
import reference

from replaykit import __version__

project = "replaykit"
author = "the replaykit authors"
release = __version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
copybutton_exclude = ".linenos, .gp, .go"
exclude_patterns = ["_build"]

myst_heading_anchors = 4
# No mathematics, because its script would come from another site.
myst_enable_extensions = ["colon_fence"]

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the signatures have them
autodoc_inherit_docstrings = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_attr_annotations = True
default_role = "code"

html_theme = "furo"
html_title = "replaykit"
html_copy_source = False
html_show_sphinx = False


def setup(app: Any) -> None:
    """Write the reference and the figures before Sphinx reads any page."""
    app.connect("builder-inited", _write)


def _write(app: Any) -> None:
    reference.write(Path(app.srcdir) / "reference")
    benchmark_plots.write(Path(app.srcdir) / "benchmarks")
    datasets_pages.write(Path(app.srcdir) / "datasets")
    figures.write(Path(app.srcdir) / "figures")
