"""The grader on pages of the build, and the copy for students; `grading.md` has what it says of lectures."""

import csv
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import nbformat

from notebooks import grade, handout
from notebooks.answers.build import WRONG, predicted
from notebooks.build.page import unfilled
from notebooks.build.solution import checks, holes

PAGES = sorted((Path(grade.HERE) / "build").glob("*.ipynb"))
LIMIT = 10.0  # for an answer that never ends; the others take no time

RUN_PAGES = """
import sys
from pathlib import Path
import nbformat

sys.path.insert(0, ".")
for path in sorted(Path(".").glob("*.ipynb")):
    names = {}
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.source.startswith("%%writefile "):
            first, _, source = cell.source.partition("\\n")
            Path(first.split()[1]).write_text(source)
        elif cell.cell_type == "code":
            exec(cell.source, names)
"""


def answer_pages(folder, changed=None):
    """Answer the pages of a students' copy: the solution's answers in the holes, but for those that are changed."""
    for path in sorted(folder.glob("*.ipynb")):
        page = nbformat.read(path, as_version=4)
        for cell in page.cells:
            if cell.source.startswith(holes.MAGIC):
                name = cell.source.split("\n")[0][len(holes.MAGIC) :].removesuffix(".py")
                source = holes.solution(name)
                for number, answer in (changed or {}).items():
                    if holes.holes()[number].file == name:
                        source = holes.fill(source, number, answer)
                cell.source = f"{holes.MAGIC}{name}.py\n{source}"
            elif "exercise" in cell.metadata.get("tags", []):
                cell.source = predicted(cell.source)
        nbformat.write(page, path)


def run_pages(folder):
    """Return the verdicts of the pages' checks, in order."""
    environment = {**os.environ, "PYTHONPATH": str(grade.HERE.parent)}
    done = subprocess.run(
        [sys.executable, "-c", RUN_PAGES], cwd=folder, capture_output=True, text=True, env=environment, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return [
        line for line in done.stdout.splitlines() if line.startswith(("right", "your turn", "not yet"))
    ], done.stdout


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


def test_a_page_says_where_in_the_students_file_an_error_was(tmp_path):
    handout.hand_out(tmp_path, ["build/1"])
    answer_pages(tmp_path / "build", {"1.1": "return op.run(args, params)"})
    _, message = run_pages(tmp_path / "build")
    assert re.search(r"^not yet: TypeError: .*\nmine/tracer.py, process: return op.run\(args, params\)$", message, re.M)


def test_the_build_is_graded(tmp_path, capsys):
    for student, changed in (
        ("ada", {}),
        ("bob", {"5.1": WRONG["5.1"][0], "5.2": "while True:\n    pass", "5.3": "import os\nos._exit(0)"}),
        ("eve", {"5.1": None, "5.2": "print('right')\nraise SystemExit", "5.3": "raise KeyboardInterrupt"}),
    ):
        handout.hand_out(tmp_path / student, ["build"])
        answer_pages(tmp_path / student / "build", changed)
    points = tmp_path / "points.csv"
    pages = sorted(map(str, tmp_path.rglob("5_*.ipynb")))
    results = tmp_path / "results"
    grade.main([*pages, "--limit", f"{LIMIT}", "--csv", str(points), "--gradescope", str(results)])
    scores = {path.stem: json.loads(path.read_text())["score"] for path in results.iterdir()}
    assert scores["ada"] == 6 and scores["bob"] < 6 and scores["eve"] < 6
    rows = list(csv.DictReader(points.open()))
    got = {(row["student"], row["question"]): (row["points"], row["verdict"]) for row in rows}
    assert len(rows) == 12 and all(row["points"] == row["of"] for row in rows if row["student"] == "ada")
    assert got["bob", "5.1"][1].startswith("not yet: psum: rank 0 has the shape ()")
    assert got["bob", "5.2"][1] == "not yet: after 10 seconds it had not ended"
    assert got["bob", "5.3"][1] == "not yet: it ended the process in which it ran"
    assert got["eve", "5.1"] == ("0", "your turn: hole 5.1")
    assert got["eve", "5.2"][0] == got["eve", "5.3"][0] == "0"
    assert re.search(r"^ada +6 of 6$", capsys.readouterr().out, re.M)


def test_an_adapter_takes_the_place_of_files_of_the_build(tmp_path):
    handout.hand_out(tmp_path / "ada", ["build/1", "build/2"])
    folder = tmp_path / "ada" / "build"
    answer_pages(folder)
    source = holes.solution("tape").replace("from .tracer", "from mine.tracer").replace("class Record", "class Noted")
    (folder / "ada").mkdir()
    (folder / "ada" / "__init__.py").write_text("")
    (folder / "ada" / "records.py").write_text(source.replace("Record(", "Noted("))
    (folder / "adapter.py").write_text("from ada import records as tape\n\ntape.Record = tape.Noted\n")
    tape = folder / "2_tape.ipynb"
    verdicts = {g.question: g.verdict for g in grade.grade(tape)}
    assert set(verdicts.values()) == {"right"}, verdicts
    (folder / "ada" / "records.py").write_text(source.replace("Record(", "Noted(").replace("def evaluate", "def run"))
    assert "not yet" in {g.verdict[:7] for g in grade.grade(tape)}  # so it is this file that was judged


def test_a_failure_that_comes_from_an_earlier_page_is_said_to(tmp_path):
    (tmp_path / "mine").mkdir()
    for name in holes.names():
        source = holes.solution(name)
        wrong = {"reverse": ("4.6", WRONG["4.6"][0])}.get(name)
        (tmp_path / "mine" / f"{name}.py").write_text(holes.fill(source, *wrong) if wrong else source)
    assert re.search(
        r" \(Hole 4\.\d, of page 4, is not right yet: begin there.\)$", grade.judge("8.7", str(tmp_path), 60)
    )
    assert grade.judge("4.6", str(tmp_path), 60).startswith("not yet: (2x + y)")


def test_a_page_that_was_left_out_is_named(tmp_path):
    handout.hand_out(tmp_path, ["build/2", "build/3"])
    answer_pages(tmp_path / "build")
    (first, *_) = grade.grade(tmp_path / "build" / "3_forward.ipynb")
    assert first.verdict == "your turn: mine/tracer.py is missing: page 1 writes it"


def test_a_lecture_of_the_course_is_graded(tmp_path):
    name = "01_three_ways_to_differentiate"
    answers = runpy.run_path(str(grade.ANSWERS / f"{name}.py"))["EXERCISES"]
    handout.hand_out(tmp_path, ["01"])
    path = tmp_path / f"{name}.ipynb"
    student = nbformat.read(path, as_version=4)
    for k, (cell, _) in enumerate(grade.exercises(student)):
        cell.source = answers[k]["right"] if k % 2 else answers[k]["wrong"][0]
    nbformat.write(student, path)
    assert [g.points for g in grade.grade(path)] == [0, 1, 0, 1]
