"""Configuration of `make docs`, which builds the site from this folder's pages and the notebooks."""

import sys
from pathlib import Path
from typing import Any

import minidiff

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # for autoreference

project = "minidiff"
version = release = minidiff.__version__
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
extensions += ["autoreference", "lecture_pages", "sidebar"]
napoleon_use_ivar = True  # attributes in a list, not each with a place of its own

# The source folder is that of the repository, so that links between its files are links between pages.
root_doc = "docs/index"
include_patterns = ["CONTRIBUTING.md", "CHANGELOG.md", "docs/**.md", "notebooks/*.ipynb", "notebooks/*.md"]
include_patterns += ["notebooks/build/*.md", "notebooks/build/*.ipynb", "spmd/examples/data/published.md"]
exclude_patterns = ["docs/_build", "docs/slides", "docs/description.md"]

# A link that leads nowhere is a warning, and `make docs` fails for one.
nitpicky = True
myst_heading_anchors = 4
myst_enable_extensions = ["dollarmath"]

# Notebooks have their outputs.
nb_execution_mode = "off"
nb_merge_streams = True

# The first lines of docstrings are in the tables of the reference. Signatures have types by their short names, of which
# public ones are links, and defaults as they are written.
autosummary_generate = False
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
nitpick_ignore_regex = [("py:class", ".*"), ("py:exc", ".*")]
autodoc_inherit_docstrings = False
python_maximum_signature_line_length = 120

html_theme = "furo"
html_title = f"{project} {release}"
html_static_path = ["static/site.css", "static/cheat-sheet.css"]
html_static_path += ["static/stix-two-math.woff2", "static/stix-two-math.LICENSE"]
html_css_files = ["site.css", "cheat-sheet.css"]
html_extra_path = ["static/index.html"]
html_search_scorer = str(HERE / "static" / "scorer.js")
html_copy_source = False
html_show_copyright = False
html_math_renderer = "mathml"
pygments_style = "tango"
pygments_dark_style = "monokai"


BACK = '<p><a style="color: inherit" href="../moving.html">← all animated pages</a></p>'


def write_moving_pages(app: Any, exception: Exception | None) -> None:
    """Write the pages that move beside the page that links to them."""
    if exception is None and app.builder.format == "html":
        sys.path.insert(0, str(HERE.parent / "notebooks"))
        from moving import write_pages

        for page in write_pages(Path(app.outdir) / "docs" / "moving"):
            page.write_text(page.read_text().replace("<h1>", f"{BACK}<h1>", 1))


def setup(app: Any) -> None:
    app.connect("build-finished", write_moving_pages)
