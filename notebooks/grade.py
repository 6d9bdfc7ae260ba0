"""Grade notebooks: `python -m notebooks.grade FILE`, or a folder of submissions, `--csv points.csv`. See `grading.md`.

A lecture's exercises are judged by the check cells of this clone's notebook, not of the student's; a page of
"Build it yourself" by hidden checks. What students wrote runs in other processes, with a limit of time for each answer.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import runpy
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path

import nbformat
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbformat import NotebookNode

from notebooks.adapters import ADAPTER, answer_of, copy_own_code, stand_ins
from notebooks.build.page import FILES
from notebooks.build.solution import checks, holes
from notebooks.execute import executed, tagged
from notebooks.gradebooks import FORMATS, write_results

HERE = Path(__file__).parent
ANSWERS = HERE / "answers"
LIMIT = 60.0  # seconds for each answer


@dataclass
class Graded:
    """One question of a notebook: the points that the answer got, of how many, and what is to be said of it."""

    notebook: str
    question: str
    worth: int
    verdict: str

    @property
    def points(self) -> int:
        return self.worth if self.verdict == "right" else 0


def grade(path: Path, limit: float = LIMIT) -> list[Graded]:
    """Grade a notebook of a student, or an adapter file, which has the name of one of this course.

    It never raises for what is in it.
    """
    lecture, page = (folder / path.with_suffix(".ipynb").name for folder in (HERE, HERE / "build"))
    if not (lecture.exists() or page.exists()):
        raise ValueError(f"{path}: the course has no notebook of this name")
    if path.suffix == ".py":
        return grade_lecture(path, lecture, wrong_answers(lecture), limit)
    try:
        nbformat.read(path, as_version=4)
    except Exception as error:
        return [Graded(path.stem, "all", 0, f"not yet: this is not a notebook ({type(error).__name__}: {error})")]
    return grade_page(path, limit) if page.exists() else grade_lecture(path, lecture, wrong_answers(lecture), limit)


# ---------------------------------------------------------------- lectures


def exercises(notebook: NotebookNode) -> list[tuple[NotebookNode, NotebookNode]]:
    """The cells to be answered, with the check below each."""
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return [(a, b) for a, b in pairwise(code) if tagged(a, "exercise")]


def wrong_answers(lecture: Path) -> list[str]:
    """A wrong answer to each exercise: a check that accepts it has been tampered with."""
    path = ANSWERS / f"{lecture.stem}.py"
    return [answer["wrong"][0] for answer in runpy.run_path(str(path))["EXERCISES"]] if path.exists() else []


def grade_lecture(path: Path, lecture: Path, wrong: Sequence[str], limit: float) -> list[Graded]:
    """Run the lecture as it is here, then the student's answers, each followed by the lecture's own check."""
    asked = exercises(nbformat.read(lecture, as_version=4))
    inputs = answers_in(path, [cell for cell, _ in asked])
    verdicts = ["your turn" if inputs.get(cell.id, cell.source) == cell.source else "" for cell, _ in asked]
    lost: set[int] = set()  # answers that ended the kernel, or did not end
    while "" in verdicts:
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder, "notebooks")
            shutil.copytree(HERE, copy, ignore=shutil.ignore_patterns("*.ipynb", "build", "__pycache__"))
            notebook = nbformat.read(lecture, as_version=4)
            with executed(notebook, folder=copy) as client:
                run = _Answers(client, notebook, limit)
                for k, (cell, check) in enumerate(asked):
                    if verdicts[k] == "your turn" or k in lost:
                        continue
                    verdicts[k] = run.verdict(inputs[cell.id], check.source)
                    if run.over:
                        lost.add(k)
                        break
                else:
                    for k, answer in enumerate(wrong):
                        if verdicts[k] == "right" and run.verdict(answer, asked[k][1].source) == "right":
                            verdicts[k] = "not yet: after this notebook's answers, the check accepts wrong ones, too"
                    break
    return [Graded(path.stem, str(k), 1, verdict) for k, verdict in enumerate(verdicts, 1)]


def answers_in(path: Path, asked: Sequence[NotebookNode]) -> dict[str, str]:
    """Return the answers of a notebook, or of an adapter file, by the id of the cell that asks."""
    if path.suffix == ".py":
        answers = {cell.id: answer_of(path, cell.source) for cell in asked}
        return {id: answer for id, answer in answers.items() if answer}
    return {cell.get("id"): cell.source for cell, _ in exercises(nbformat.read(path, as_version=4))}


class _Answers:
    """A kernel in which a lecture has run, and answers are judged."""

    def __init__(self, client, notebook: NotebookNode, limit: float):
        self.client, self.notebook, self.over = client, notebook, False
        client.timeout = limit
        source = (HERE / "exercises.py").read_text()
        self.checker = (  # anew for each answer, since one can change it
            "import sys, types\nsys.modules['exercises'] = types.ModuleType('exercises')\n"
            f"exec({source!r}, sys.modules['exercises'].__dict__)\ncheck = sys.modules['exercises'].check"
        )

    def run(self, source: str) -> list[NotebookNode]:
        cell = nbformat.v4.new_code_cell(source)
        self.notebook.cells.append(cell)
        self.client.execute_cell(cell, len(self.notebook.cells) - 1)
        return cell.outputs

    def verdict(self, answer: str, check: str) -> str:
        """Return the check's verdict on an answer, or the reason for having none."""
        try:
            self.run(answer)
            self.run(self.checker)
            shown = [output for output in self.run(check) if output.output_type == "display_data"]
            return shown[-1].data["text/plain"]
        except CellExecutionError as error:
            return f"not yet: {error.ename}: {error.evalue}"
        except CellTimeoutError:
            self.over = True
            return f"not yet: after {self.client.timeout:g} seconds it had not ended"
        except (DeadKernelError, RuntimeError):
            self.over = True
            return "not yet: it ended the process in which it ran"


# ---------------------------------------------------------------- the build


def student_files(folder: Path, step: int) -> dict[str, str]:
    """The files that the cells of a student's pages write, up to this page's: name -> source."""
    files = {}
    for path in sorted(folder.glob("*.ipynb")):
        if not (HERE / "build" / path.name).exists():
            continue
        for cell in nbformat.read(path, as_version=4).cells:
            first, _, source = cell.source.partition("\n")
            name = first.removeprefix(holes.MAGIC).strip().removesuffix(".py")
            if first.startswith(holes.MAGIC) and FILES.get(name, 9) <= step:
                files[name] = source + "\n"
    return {**files, **stand_ins(folder, [name for name, page in FILES.items() if page <= step])}


def grade_page(path: Path, limit: float) -> list[Graded]:
    """Judge a page by the hidden checks: each in a process of its own, with the files of the pages so far."""
    step = path.name.split("_")[0]
    files = student_files(path.parent, int(step))
    worth = {number: points for number, points in checks.points().items() if number.split(".")[0] == step}

    def verdict(number: str) -> str:
        with tempfile.TemporaryDirectory() as folder:
            answers = Path(folder, "mine")
            answers.mkdir()
            if (path.parent / ADAPTER).exists():
                copy_own_code(path.parent, Path(folder), HERE / "build")
            for name, source in files.items():
                (answers / f"{name}.py").write_text(source)
            return judge(number, folder, limit)

    with ThreadPoolExecutor(os.cpu_count()) as several:
        verdicts = several.map(verdict, worth)
        return [Graded(path.stem, number, worth[number], message) for number, message in zip(worth, verdicts)]


def judge(number: str, folder: str, limit: float) -> str:
    """The verdict on one question, from a process that runs in a folder with the student's files."""
    word = secrets.token_hex(8)  # of which the answer does not know, so that it cannot say the verdict itself
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])}
    process = subprocess.Popen(
        [sys.executable, "-m", "notebooks.build.solution.checks"],
        cwd=folder,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    try:
        out, _ = process.communicate(f"{number} {word}\n", timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)  # with the ranks that it has started
        process.communicate()
        return f"not yet: after {limit:g} seconds it had not ended"
    message = [line for line in out.splitlines() if line.startswith(f"{word} ")]
    return json.loads(message[0].partition(" ")[2]) if message else "not yet: it ended the process in which it ran"


# ---------------------------------------------------------------- submissions


def submissions(path: Path) -> Iterator[tuple[str, Path]]:
    """The notebooks of the course in a file or folder: the name of the student (a folder's), and the notebook."""
    if path.is_file():
        folder = path.resolve().parent
        yield (folder.parent if folder.name == "build" else folder).name, path
        return
    lectures = {notebook.stem for notebook in HERE.glob("[0-9]*.ipynb")}
    for notebook in sorted([*path.rglob("*.ipynb"), *path.rglob("[0-9]*.py")]):
        known = (HERE / notebook.name).exists() or (HERE / "build" / notebook.name).exists()
        if notebook.suffix == ".py":  # an adapter takes the place of a notebook
            known = notebook.stem in lectures and not notebook.with_suffix(".ipynb").exists()
        if known and ".ipynb_checkpoints" not in notebook.parts:
            yield notebook.relative_to(path).parts[0], notebook


def table(graded: Sequence[Graded]) -> str:
    """The points of each question, in lines, and their sum."""
    lines = [
        f"{g.notebook:28} {g.question:>5} {g.points:3} of {g.worth}  {' '.join(g.verdict.split())}" for g in graded
    ]
    total = f"{'':28} total {sum(g.points for g in graded):3} of {sum(g.worth for g in graded)}"
    return "\n".join([*lines, total])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m notebooks.grade", description=__doc__.split("\n")[0])
    parser.add_argument("paths", nargs="+", type=Path, help="a notebook, or a folder with a folder for each student")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds for each answer")
    parser.add_argument("--csv", type=Path, help="write a row for each student, notebook and question")
    for name in FORMATS:
        parser.add_argument(
            f"--{name}", type=Path, metavar="PATH", help="write its JSON: a file, or a folder with a file each"
        )
    options = parser.parse_args(arguments)
    submitted = [pair for path in options.paths for pair in submissions(path)]
    if not submitted:
        parser.error(f"there is no notebook of this course in {', '.join(map(str, options.paths))}")
    graded_of: dict[str, list[Graded]] = {}
    for student, pairs in groupby(submitted, key=lambda pair: pair[0]):
        graded_of[student] = [g for _, path in pairs for g in grade(path, options.limit)]
        print(f"\n{student}\n{table(graded_of[student])}", flush=True)
    if options.csv:
        write_csv(options.csv, graded_of)
    for name in FORMATS:
        if path := getattr(options, name):
            write_results(path, name, graded_of)
    if len(graded_of) > 1:
        sums = {s: (sum(g.points for g in graded), sum(g.worth for g in graded)) for s, graded in graded_of.items()}
        print("\n" + "\n".join(f"{student:34} {points:3} of {of}" for student, (points, of) in sums.items()))


def write_csv(path: Path, graded_of: dict[str, list[Graded]]) -> None:
    """Write a row for each student, notebook and question."""
    rows = [
        (student, g.notebook, g.question, g.points, g.worth, g.verdict)
        for student, graded in graded_of.items()
        for g in graded
    ]
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("student", "notebook", "question", "points", "of", "verdict"), *rows])


if __name__ == "__main__":
    main()
