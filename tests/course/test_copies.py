"""Pages of the build, and the copy for students; `grading.md` and `graded_builds.md` have what the grader says."""

import re
from pathlib import Path

import nbformat

from notebooks import grade, handout
from notebooks.build.page import unfilled
from notebooks.build.solution import checks, holes
from tests.course.copies import answer_pages, run_pages

PAGES = sorted((Path(grade.HERE) / "build").glob("*.ipynb"))


def test_the_pages_are_in_step_with_the_solution():
    written = []
    for path in PAGES:
        for cell in nbformat.read(path, as_version=4).cells:
            if cell.source.startswith(holes.MAGIC):
                first, _, source = cell.source.partition("\n")
                written.append(first[len(holes.MAGIC) :].removesuffix(".py"))
                expected = holes.with_holes(holes.solution(written[-1]))
                assert source == expected.rstrip("\n"), "run `python -m notebooks.build.solution.holes`"
    assert written == list(checks.FILES) and set(written) == set(holes.names())
    empty = [number for name in written for number in unfilled(holes.with_holes(holes.solution(name)))]
    assert sorted(empty) == sorted(holes.holes())


def test_the_files_that_pages_name_exist():
    root = grade.HERE.parent
    named = set()
    for path in PAGES:
        text = "\n".join(
            cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "markdown"
        )
        named |= set(re.findall(r"`((?:minidiff|collectives|spmd|docs)/[\w/.]*)`", text))
        named |= {f"notebooks/build/{link}" for link in re.findall(r"\]\((\.\./[^)]*)\)", text)}
    assert len(named) > 25 and not [name for name in named if not (root / name).exists()]


def test_the_students_copy_has_no_solution_and_runs(tmp_path):
    written = handout.hand_out(tmp_path)
    assert {p.name for p in PAGES} <= {p.name for p in written}
    everything = "\n".join(p.read_text() for p in tmp_path.rglob("*") if p.is_file())
    for name in holes.names():
        for match in holes._HOLE.finditer(holes.solution(name)):
            longest = max(match["answer"].split("\n"), key=len).strip()
            if len(longest) > 40:
                assert longest not in everything.replace('\\"', '"'), f"hole {match['number']}: {longest}"
    assert not [p for name in ("solution", "answers", "grade.py") for p in tmp_path.rglob(name)]
    assert all(not cell.get("outputs") for p in tmp_path.rglob("*.ipynb") for cell in nbformat.read(p, 4).cells)

    links = 0
    for path in [*tmp_path.rglob("*.md"), *tmp_path.rglob("*.ipynb")]:
        cells = nbformat.read(path, 4).cells if path.suffix == ".ipynb" else []
        text = "\n".join(c.source for c in cells if c.cell_type == "markdown") if cells else path.read_text()
        for link in re.findall(r"\]\(([^):#]+)(?:#[^)]*)?\)", text):
            assert (path.parent / link).exists(), f"{path.name} links to {link}, which is not in the copy"
            links += 1
    assert links > 30 and "The architecture (`docs/architecture.md` in the course's repository)" in everything
    verdicts, message = run_pages(tmp_path / "build")
    assert all(verdict.startswith("your turn") for verdict in verdicts)
    assert "Empty still, on this page: hole 1.1, hole 1.2, " in message
    answer_pages(tmp_path / "build")
    verdicts, message = run_pages(tmp_path / "build")
    assert set(verdicts) == {"right"} and len(verdicts) > 16
    assert len(re.findall(r"^rank \d of 2: .* as on simulated ranks: True$", message, re.M)) == 2
