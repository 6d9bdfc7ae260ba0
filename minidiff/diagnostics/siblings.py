"""The packages that are installed with this one, and are in the same folder: `collectives` and `spmd`.

Other packages have these names too, and a script may. What Python finds first hides ours.
"""

from __future__ import annotations

import importlib.util
import os

_FOLDER = os.path.dirname(os.path.dirname(os.path.dirname(os.path.realpath(__file__))))


def shadowing_message(name: str) -> str | None:
    """Return the error message if Python finds another package of this name than the one in this folder."""
    try:
        spec = importlib.util.find_spec(name)
    except ValueError:  # a module without a spec, as the notebook's own
        return None
    if spec is None:
        return None
    path = spec.origin if spec.has_location else next(iter(spec.submodule_search_locations or ()), None)
    package = os.path.join(_FOLDER, name)
    if path is None or os.path.realpath(path).startswith((package + os.sep, package + ".")):
        return None
    return (
        f"Python finds another {name!r} than minidiff's: {path} comes before {package}. If that file is yours, rename "
        f"it; if pip installed it, `pip uninstall {name}` and install minidiff again"
    )
