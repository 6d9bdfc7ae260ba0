"""Settings of `make lab`: it opens the course's page, runs as any user, asks nothing, and saves plain notebooks."""

import atexit
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat

sys.path.insert(0, str(Path(__file__).parent))

from execute import plain


def save_plain(model: dict[str, Any], **kwargs: Any) -> None:
    """Leave out of a notebook what the editor adds to its metadata."""
    if model["type"] == "notebook":
        model["content"] = plain(nbformat.from_dict(model["content"]))


def ask_for_no_news(handler: Any, page: dict[str, Any]) -> dict[str, Any]:
    """Leave out the extension that asks each new user whether to fetch news."""
    disabled = page.get("disabledExtensions", [])
    return {**page, "disabledExtensions": [*disabled, "@jupyterlab/apputils-extension:announcements"]}


c = get_config()  # noqa: F821  (Jupyter defines it)
# The course's page, rendered, with links that open the lectures: `lab_settings` shows Markdown so. No other tab is
# restored beside it, since tabs are kept as long as the server runs. (`?reset` would do that too, but Jupyter then
# prints addresses whose token it does not read.)
tabs = tempfile.TemporaryDirectory(prefix="jupyter-tabs-")
atexit.register(tabs.cleanup)
c.LabApp.workspaces_dir = tabs.name
c.LabApp.default_url = "/lab/tree/README.md"
c.LabApp.app_settings_dir = str(Path(__file__).parent / "lab_settings")
c.ServerApp.contents_manager_class = "contents.Notebooks"
c.FileContentsManager.pre_save_hook = save_plain
c.ServerApp.allow_root = True  # in a container there often is no other user
c.ServerApp.tornado_settings = {"page_config_hook": ask_for_no_news}
