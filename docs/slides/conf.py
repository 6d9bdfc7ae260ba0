"""Configuration of `make slides`, which builds the lectures as slides: their sections are pages to turn."""

import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER.parent))

from conf import *

root_doc = "docs/slides/index"
include_patterns = ["docs/slides/index.md", "notebooks/[0-9]*.ipynb"]
exclude_patterns = ["notebooks/build"]
slides = True

# A link to a page of the site leads nowhere from here.
nitpicky = False
suppress_warnings = ["myst.xref_missing", "ref"]

html_theme = "basic"
html_title = "The course"
html_sidebars = {"**": []}
html_extra_path = []
html_static_path = [
    str(path) for path in (FOLDER / "slides.css", FOLDER / "slides.js", *FOLDER.parent.glob("static/*.woff2"))
]
html_css_files = ["slides.css"]
html_js_files = ["slides.js"]
html_use_index = False


def setup(app: Any) -> None:
    """Leave out what the site alone has."""
