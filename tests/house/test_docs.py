"""Examples in the docstrings of `collectives`, what texts say to install, and the links and files that pages name."""

import ast
import configparser
import doctest
import json
import re
import runpy
import shlex
from pathlib import Path

import numpy as np
import pytest

import collectives
import minidiff as md
import spmd
from collectives import algorithms, casts, cost, in_flight, ops, reductions, reference, rooted
from tests.house.code_lines import code_lines

NAMES = {
    "md": md,
    "np": np,
    "spmd": spmd,
    "P": spmd.P,
    "algorithms": algorithms,
    "mesh": spmd.make_mesh((2,), ("i",), backend="simulated"),
}


@pytest.mark.parametrize(
    "count, modules",
    [
        (2 * len(collectives.__all__), [ops, casts, reductions, in_flight, rooted]),
        (2 * len(algorithms.__all__), [algorithms]),
        (len({*reference.REFERENCES.values()}), [reference]),
        (1, [cost]),
    ],
)
def test_examples_of_collectives(count, modules):
    results = [doctest.testmod(module, extraglobs=NAMES) for module in modules]
    assert {r.failed for r in results} == {0} and sum(r.attempted for r in results) >= count


# ---------------------------------------------------------------- pip install

ROOT = Path(__file__).parents[2]


def texts_of(path):
    """Return the text of a file: a program's strings (parts of f-strings), a notebook's cells, or all."""
    if "install" not in path.read_text():
        return []
    if path.suffix == ".ipynb":
        return ["".join(cell["source"]) for cell in json.loads(path.read_text())["cells"]]
    if path.suffix != ".py":
        return [path.read_text()]
    nodes = ast.walk(ast.parse(path.read_text()))
    return [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]


FILES = [
    path
    for pattern in (
        "*.md",
        "docs/**/*.md",
        "Makefile",
        "setup.cfg",
        "notebooks/*",
        "minidiff/**/*",
        "collectives/**/*",
        "spmd/**/*",
    )
    for path in ROOT.glob(pattern)
    if path.suffix in (".md", ".py", ".ipynb", ".cfg", "")
    if path.is_file()
]


def commands(text):
    """The arguments of each `pip install`: up to the backquote around it, a comment, or the end of the line."""
    return [shlex.split(actual) for actual in re.findall(r"pip3? install\b([^`#\n]*)", text)]


def known():
    """The extras of this project, and the packages of them all, by the names that PyPI has."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    extras = {name: lines.split() for name, lines in config["options.extras_require"].items()}
    packages = {re.match(r"[\w-]+", line)[0] for lines in extras.values() for line in lines} | {"numpy"}
    return set(extras), packages


def check(arguments):
    """Raise ValueError for what pip would not find: this project is on no index, it is installed from its folder."""
    extras, packages = known()
    wanted = [x for x in arguments if not x.startswith("-")]
    for x in wanted:
        folder = re.fullmatch(r"\.(?:\[([\w,]+|\$\(.*\))\])?", x)
        asked = (folder[1] or "").split(",") if folder and "$" not in (folder[1] or "") else []
        if not (set(asked) <= {*extras, ""} if folder else re.split("[=<>~]=", x)[0] in packages):
            raise ValueError(f"pip install {x}: there is no such package, or no such extra")
    if not wanted:
        raise ValueError(f"nothing to install in {arguments}")


def test_what_texts_say_to_install_exists():
    actual = [(path, arguments) for path in FILES for text in texts_of(path) for arguments in commands(text)]
    for path, arguments in actual:
        try:
            check(arguments)
        except ValueError as error:
            raise AssertionError(f"{path}: {error}") from None
    assert {path.suffix for path, _ in actual} == {".md", ".py", ".ipynb", ""}
    assert len(actual) >= 12


@pytest.mark.parametrize("text", ["'minidiff[draw]'", "minidiff", "'.[draws]'", "graphviz brings it", "", "--upgrade"])
def test_what_does_not_exist_is_found(text):
    with pytest.raises(ValueError, match=r"pip install|nothing to install"):
        check(*commands(f"pip install {text}"))


# ---------------------------------------------------------------- links

PAGES = [
    *ROOT.glob("*.md"),
    *ROOT.glob("docs/**/*.md"),
    *ROOT.glob("notebooks/**/*.md"),
    *ROOT.glob("notebooks/*.ipynb"),
]


def prose(path):
    """The text of a page without its code: of a notebook, the cells of text."""
    text = path.read_text()
    if path.suffix == ".ipynb":
        cells = json.loads(text)["cells"]
        text = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    return re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)


def anchors(path):
    """Return the anchors of a page: its headings as GitHub and Jupyter write them."""
    titles = re.findall(r"^#+ +(.+)$", prose(path), re.M)
    if path.suffix == ".ipynb":
        return {title.replace(" ", "-") for title in titles}
    return {re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-") for title in titles}


def broken_links(path, text):
    """The relative links in the text of a page that lead to no file, or to no heading of it."""
    for link in re.findall(r"\]\(([^()\s]+)\)", re.sub(r"`[^`\n]*`", "", text)):
        name, _, anchor = link.partition("#")
        if re.match(r"\w+:", link):
            continue
        target = path.parent / name if name else path
        if not target.exists() or (anchor and anchor not in anchors(target)):
            yield link


def missing_files(text):
    """The files of this project that a text names in backquotes, and that do not exist."""
    folders = "minidiff|collectives|spmd|tests|notebooks|docs"
    return [name for name in re.findall(rf"`((?:{folders})/[\w/]+\.\w+)`", text) if not (ROOT / name).exists()]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(path):
    assert list(broken_links(path, prose(path))) == []
    assert missing_files(prose(path)) == []


def test_broken_links_are_found():
    page = ROOT / "README.md"
    text = "[a](docs/guide.md) [b](docs/guid.md) [c](#install) [d](#instal) [e](https://mpi4py.readthedocs.io) `[f](g)`"
    assert list(broken_links(page, f"{text} [h](LICENSE#mit) ![i](docs/guide.md#the-guide)")) == [
        "docs/guid.md",
        "#instal",
        "LICENSE#mit",
    ]
    assert missing_files("`minidiff/core/interpreter.py` and `minidiff/kore.py`, `notebooks/`") == ["minidiff/kore.py"]


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 130


def test_the_picture_of_the_readme_is_drawn_from_the_tape():
    picture = runpy.run_path(str(ROOT / "docs" / "picture.py"))
    assert [row.remark for row in picture["rows_of"](picture["tape_of_gradient"]()) if row.sends] == [
        "the one all-reduce"
    ]
    for mode in picture["MODES"]:
        assert (picture["FOLDER"] / f"gradient_{mode}.svg").read_text() == picture["svg"](mode), "run docs/picture.py"
        assert f"docs/static/gradient_{mode}.svg" in (ROOT / "README.md").read_text()


def test_the_line_counts_of_the_readme():
    folder, checked = [], 0
    for line in (ROOT / "README.md").read_text().partition("```text\n")[2].partition("```")[0].splitlines():
        name, count = [*line.replace(",", "").split(), ""][:2]
        if count.isdecimal():
            (path,) = [p for f in folder for p in [*f.rglob(name.strip("/"))]]
            files = path.rglob("*.py") if path.is_dir() else [path]
            checked += 1
            files = [file for file in files if file.name not in ("checks.py", "holes.py")]
            assert sum(map(code_lines, files)) == pytest.approx(int(count), rel=0.1), name
        else:
            folder = [ROOT / part.strip(",") for part in line.split("  ")[0].split()]
    assert checked > 10


# ---------------------------------------------------------------- tools


def test_commits_are_checked_by_the_ruff_of_make_lint():
    (wanted,) = re.findall(r"^\s*(ruff[<>=].*)$", (ROOT / "setup.cfg").read_text(), re.M)
    used = re.findall(r'"(ruff[^"]*)"', (ROOT / ".pre-commit-config.yaml").read_text())
    assert {*used} == {wanted}
