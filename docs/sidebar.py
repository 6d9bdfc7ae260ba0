"""The site's sidebar: `docs/index.md` has its groups, and here is what opens below a page, at a click."""

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
#: A page -> pages below it, by their own titles or by "a shorter one <page>".
BELOW = {
    "docs/guide/derivatives": [
        "Backward, line by line <docs/guide/backward>",
        "if, while, for <docs/guide/autograph>",
        "docs/guide/taylor",
        "Sparse Jacobians <docs/guide/sparse>",
        "Linear systems <docs/guide/solvers>",
        "Long loops <docs/guide/schedules>",
        "NumPy's functions <docs/guide/functions>",
        "docs/guide/scipy",
        "docs/guide/corners",
        "Implementations <docs/implementations>",
    ],
    "docs/guide/ranks": [
        "docs/guide/types-elsewhere",
        "Halos <docs/guide/halos>",
        "Padding and masks <docs/guide/padding>",
        "The same bits <docs/guide/same-bits>",
    ],
    "docs/guide/parallel": ["Layers <docs/guide/layers>"],
    "docs/guide/mpi": ["docs/guide/tests", "docs/guide/leaving"],
    "docs/guide/training": ["docs/guide/random-streams"],
    "docs/guide/predict": ["docs/guide/timeline", "docs/guide/plan", "docs/guide/scoreboard"],
    "notebooks/teaching": [
        "Grading <notebooks/grading>",
        "Figures <notebooks/figures>",
        "Topics <docs/topics>",
    ],
    "CHANGELOG": ["0.1.0 <docs/changes/0.1.0>"],
}


def lectures() -> list[str]:
    """Return the lectures, with their numbers and the first words of their titles."""
    return [f"{path.stem[:2]} {title(path)} <notebooks/{path.stem}>" for path in notebooks("notebooks")]


def steps() -> list[str]:
    """Return the pages of the system to build."""
    return [f"{title(path)} <notebooks/build/{path.stem}>" for path in notebooks("notebooks/build")]


def notebooks(folder: str) -> list[Path]:
    return sorted((ROOT / folder).glob("[0-9]*.ipynb"))


def title(path: Path) -> str:
    """Return the title of a notebook, up to its first colon or comma; of a step to build, its number and name."""
    line = "".join(json.loads(path.read_text())["cells"][0]["source"]).partition("\n")[0]
    line = line.removeprefix("# ")
    if line.startswith("Build it yourself, "):
        return line.removeprefix("Build it yourself, ")
    return line.partition(":")[0].partition(",")[0]


def below() -> dict[str, list[str]]:
    """Return the pages below each page, with the notebooks of the course."""
    return {**BELOW, "notebooks/README": lectures(), "notebooks/build/README": steps()}


def append_contents(app: Any, page: str, source: list[str]) -> None:
    """Append a table of contents, which only the sidebar shows, to a page that has others below it."""
    if not app.config.slides and (pages := below().get(page)):
        entries = [f"{name[:-1].replace('<', '</')}>" if name.endswith(">") else f"/{name}" for name in pages]
        source[0] += "\n\n```{toctree}\n:hidden:\n\n" + "\n".join(entries) + "\n```\n"


def setup(app: Any) -> dict[str, bool]:
    app.connect("source-read", append_contents)
    return {"parallel_read_safe": True}
