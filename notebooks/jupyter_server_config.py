"""Settings of `make lab`: a notebook that is saved keeps its committed form, but for outputs."""

import sys
from pathlib import Path
from typing import Any

import nbformat

sys.path.insert(0, str(Path(__file__).parent))

from execute import plain


def save_plain(model: dict[str, Any], **kwargs: Any) -> None:
    """Leave out of a notebook what the editor adds to its metadata."""
    if model["type"] == "notebook":
        model["content"] = plain(nbformat.from_dict(model["content"]))


c = get_config()  # noqa: F821  (Jupyter defines it)
c.FileContentsManager.pre_save_hook = save_plain
