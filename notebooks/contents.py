"""The contents manager of `make lab`: see `jupyter_server_config.py`."""

from typing import Any

from execute import add_kernels_metadata
from jupyter_server.services.contents.largefilemanager import AsyncLargeFileManager


class Notebooks(AsyncLargeFileManager):
    """Files, where a notebook that is read has what the editor would add when a kernel starts.

    The editor takes that for a change of the user's, and asks whether to save a notebook that was only looked at.
    """

    async def get(self, path: str, content: bool = True, type: str | None = None, **options: Any) -> dict[str, Any]:
        model = await super().get(path, content, type, **options)
        if content and model["type"] == "notebook":
            add_kernels_metadata(model["content"])
        return model
