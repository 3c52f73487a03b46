"""How Sphinx builds the site from the pages that stage.py writes: `make site`.

Sphinx with MyST-NB and the PyData theme, and not Material for MkDocs: MkDocs 1 has had no release since August 2024,
Material for MkDocs has been in maintenance since November 2025, and its successor, Zensical, runs no plugin for
notebooks yet. Sphinx and this theme build the documentation of NumPy and SciPy, and both are released every few months.
"""

import sys
from pathlib import Path

import minidist

sys.path.insert(0, str(Path(__file__).parents[1]))

project = "minidist"
author = "The minidist authors"
copyright = "the minidist authors"
version = release = minidist.__version__
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.viewcode", "website.docstrings", "website.pictures"]

# The pages of the repository are Markdown as GitHub shows it; links to headings use GitHub's names.
source_suffix = {".md": "myst-nb", ".ipynb": "myst-nb"}
myst_heading_anchors = 4

# Notebooks are committed with their outputs, which their tests keep up to date.
nb_execution_mode = "off"
nb_mime_priority_overrides = [("html", "image/svg+xml", 0)]
suppress_warnings = ["misc.highlighting_failure"]  # a cell may hold what is not Python, such as `!` commands

# The reference: the names of each package's __all__, in the order of the source.
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "show-inheritance": True}
add_module_names = False
python_use_unqualified_type_names = True
maximum_signature_line_length = 88
viewcode_line_numbers = True

# Nothing is loaded from another host: the theme brings its fonts and scripts, and the search is Sphinx's own index.
html_theme = "pydata_sphinx_theme"
html_title = "minidist"
html_static_path = ["static"]
html_css_files = ["minidist.css"]
html_copy_source = False
html_context = {"default_mode": "auto"}  # light or dark, as the reader's system has it
# A page that is opened from a disk may not fetch the pages that the search has found.
html_show_search_summary = False
html_show_sourcelink = False
html_theme_options = {
    "show_prev_next": True,
    "navigation_with_keys": False,
    "show_toc_level": 2,
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": [],
}
html_sidebars = {"index": [], "source/**": [], "CHANGELOG": [], "CONTRIBUTING": []}
