"""The grader: what it says of right, wrong, hanging, crashing and cheating notebooks; and the students' copy."""

import csv
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from notebooks import adapters, grade, gradebooks, handout
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


# ---------------------------------------------------------------- lectures


def notebook(*cells):
    result = nbformat.v4.new_notebook()
    for k, (source, *tags) in enumerate(cells):
        result.cells.append(nbformat.v4.new_code_cell(source, id=f"cell-{k}", metadata={"tags": tags}))
    return result


def write_lecture(path, answers):
    """A lecture with questions a, b, …, whose answers are 1, 2, …, as a student answers it."""
    cells = [("from exercises import check",)]
    for k, answer in enumerate(answers, 1):
        name = "abcdefgh"[k - 1]
        cells.append((answer.replace("ANSWER", name), "exercise"))
        test = f"assert {name}() == {k}, f'not {{{name}()}}'"
        cells.append((f"@check({name})\ndef _({name}):\n    {test}", "check"))
    nbformat.write(notebook(*cells), path)


def test_a_lecture_is_graded_whatever_is_in_it(tmp_path):
    inputs = [
        "def ANSWER():\n    return 1",
        "def ANSWER():\n    return 7",
        "def ANSWER():\n    while True:\n        pass",
        "import os\n\ndef ANSWER():\n    os._exit(0)",
        "def ANSWER(:\n    return 5",
        "raise KeyboardInterrupt",
        "def ANSWER():\n    raise NotImplementedError('your turn')",
        "def ANSWER():\n    return a() + 7",
    ]
    empty = "def ANSWER():\n    raise NotImplementedError('your turn')"
    write_lecture(tmp_path / "lecture.ipynb", [empty] * len(inputs))
    write_lecture(tmp_path / "student.ipynb", inputs)
    wrong = [f"def {name}():\n    return 0" for name in "abcdefgh"]
    graded = grade.grade_lecture(tmp_path / "student.ipynb", tmp_path / "lecture.ipynb", wrong, limit=4.0)
    message = [g.verdict for g in graded]
    assert message[0] == "right" and message[1] == "not yet: not 7"
    assert message[2] == "not yet: after 4 seconds it had not ended"
    assert message[3] == "not yet: it ended the process in which it ran"
    assert message[4].startswith("not yet: SyntaxError") and message[5].startswith("not yet: KeyboardInterrupt")
    assert message[6] == "your turn"
    assert message[7] == "right"  # it uses an answer that was given before the kernel was lost
    assert [g.points for g in graded] == [1, 0, 0, 0, 0, 0, 0, 1]


CHEATS = {
    "check is redefined": "check = lambda *answers: lambda test: print('right')\ndef ANSWER():\n    return 7",
    "the checker is changed": """
import exercises
exercises._judge = lambda *a: exercises.Verdict("right")
exercises.check = lambda *answers: lambda test: exercises.display(exercises.Verdict("right"))
check = exercises.check
def ANSWER():
    return 7
""",
    "the verdict is shown by the answer": """
import exercises
def ANSWER():
    exercises.display(exercises.Verdict("right"))
    raise SystemExit
""",
    "what displays is changed": """
import IPython.display
shows = IPython.display.display
IPython.display.display = lambda x: shows(type(x)("right"))
def ANSWER():
    return 7
""",
}


def test_cheating_gets_no_points(tmp_path):
    write_lecture(tmp_path / "lecture.ipynb", ["def ANSWER():\n    raise NotImplementedError"] * len(CHEATS))
    write_lecture(tmp_path / "student.ipynb", CHEATS.values())
    wrong = [f"def {name}():\n    return 0" for name in "abcd"]
    graded = grade.grade_lecture(tmp_path / "student.ipynb", tmp_path / "lecture.ipynb", wrong, LIMIT)
    assert [g.points for g in graded] == [0] * len(CHEATS), [g.verdict for g in graded]


def test_a_file_that_is_not_a_notebook(tmp_path):
    path = tmp_path / PAGES[0].name
    path.write_text("{")
    assert [g.points for g in grade.grade(path)] == [0]
    with pytest.raises(ValueError, match="no notebook of this name"):
        grade.grade(tmp_path / "99_other.ipynb")


def test_an_adapter_file_takes_the_place_of_a_lecture(tmp_path):
    empty = "def ANSWER():\n    raise NotImplementedError('your turn')"
    write_lecture(tmp_path / "lecture.ipynb", [empty] * 4)
    (tmp_path / "ada").mkdir()
    (tmp_path / "ada" / "numbers_of_ada.py").write_text("ONE = 1\ndef two():\n    return 3")
    path = tmp_path / "ada" / "lecture.py"
    path.write_text("import numbers_of_ada\nfrom numbers_of_ada import two as b\na = lambda: numbers_of_ada.ONE\nd = 4")
    wrong = [f"def {name}():\n    return 0" for name in "abcd"]
    graded = grade.grade_lecture(path, tmp_path / "lecture.ipynb", wrong, LIMIT)
    assert [g.verdict for g in graded[:3]] == ["right", "not yet: not 3", "your turn"]
    assert graded[3].verdict.startswith("not yet: TypeError: 'int' object is not callable")


def test_an_adapter_file_is_found_by_its_name(tmp_path):
    for name in ("ada/06_shard_map.py", "bob/06_shard_map.ipynb", "bob/06_shard_map.py", "eve/helpers.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    submitted = [(student, path.name) for student, path in grade.submissions(tmp_path)]
    assert submitted == [("ada", "06_shard_map.py"), ("bob", "06_shard_map.ipynb")]


def test_a_file_that_does_not_parse_answers_nothing():
    assert adapters.names_in("def f(:") == set()


# ---------------------------------------------------------------- results for other programs


def graded_students():
    rows = {"ada": ["right", "right"], "bob": ["not yet: not 3", "right"]}
    return {
        student: [grade.Graded("2_tape", f"2.{k}", k, verdict) for k, verdict in enumerate(verdicts, 1)]
        for student, verdicts in rows.items()
    }


def test_results_for_gradescope(tmp_path):
    paths = gradebooks.write_results(tmp_path / "results", "gradescope", graded_students())
    assert [path.name for path in paths] == ["ada.json", "bob.json"]
    results = json.loads(paths[1].read_text())
    assert results["score"] == 2 == sum(test["score"] for test in results["tests"])
    assert [(test["max_score"], test["status"]) for test in results["tests"]] == [(1, "failed"), (2, "passed")]
    assert results["tests"][0]["name"] == "2_tape: 2.1" and results["tests"][0]["output"] == "not yet: not 3"
    assert {test["output_format"] for test in results["tests"]} == {"text"}  # a verdict may look like HTML


def test_results_for_prairielearn(tmp_path):
    students = graded_students()
    (path,) = gradebooks.write_results(tmp_path / "results.json", "prairielearn", {"bob": students["bob"]})
    results = json.loads(path.read_text())
    assert results["gradable"] and results["score"] == 2 / 3
    assert [(test["points"], test["max_points"]) for test in results["tests"]] == [(0, 1), (2, 2)]
    with pytest.raises(ValueError, match="one file for 2 students"):
        gradebooks.write_results(tmp_path / "results.json", "prairielearn", students)
    broken = gradebooks.prairielearn([grade.Graded("2_tape", "all", 0, "not yet: this is not a notebook")])
    assert broken == {"gradable": False, "score": 0.0, "format_errors": ["not yet: this is not a notebook"]}


# ---------------------------------------------------------------- the build


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
