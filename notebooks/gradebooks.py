"""Results of the grader as other programs read them: Gradescope's and PrairieLearn's `results.json`. See `grading.md`.

Both take one file for each submission, with a list of tests: a test is a question of a notebook.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol


class Question(Protocol):
    """One graded question: `notebooks.grade.Graded`."""

    notebook: str
    question: str
    worth: int
    verdict: str

    @property
    def points(self) -> int: ...


def gradescope(graded: Sequence[Question]) -> dict[str, Any]:
    """Return what Gradescope reads from `/autograder/results/results.json`.

    Points are each test's `score`, of `max_score`; the verdict is its output.

    >>> from notebooks.grade import Graded
    >>> results = gradescope([Graded("06_shard_map", "1", 1, "right"), Graded("06_shard_map", "2", 1, "your turn")])
    >>> results["score"], results["tests"][1]["status"], results["tests"][1]["output"]
    (1, 'failed', 'your turn')
    """
    tests = [
        {
            "name": _name(q),
            "number": q.question,
            "score": q.points,
            "max_score": q.worth,
            "status": "passed" if q.verdict == "right" else "failed",
            "output": q.verdict,
            "output_format": "text",
        }
        for q in graded
    ]
    return {"score": sum(q.points for q in graded), "output": _sum(graded), "output_format": "text", "tests": tests}


def prairielearn(graded: Sequence[Question]) -> dict[str, Any]:
    """Return what PrairieLearn reads from `/grade/results/results.json`.

    The score is a share of 1, and each test has points. A submission with nothing to grade is not `gradable`, so that
    it does not use up an attempt.

    >>> from notebooks.grade import Graded
    >>> results = prairielearn([Graded("06_shard_map", "1", 1, "right"), Graded("06_shard_map", "2", 3, "your turn")])
    >>> results["gradable"], results["score"], results["tests"][0]["points"]
    (True, 0.25, 1)
    """
    worth = sum(q.worth for q in graded)
    tests = [
        {"name": _name(q), "points": q.points, "max_points": q.worth, "message": q.verdict, "output": ""}
        for q in graded
    ]
    results = {"gradable": worth > 0, "score": sum(q.points for q in graded) / worth if worth else 0.0}
    if not worth:
        return {**results, "format_errors": [q.verdict for q in graded] or ["there is no notebook of this course"]}
    return {**results, "message": _sum(graded), "tests": tests}


FORMATS = {"gradescope": gradescope, "prairielearn": prairielearn}


def write_results(path: Path, format: str, graded_of: Mapping[str, Sequence[Question]]) -> list[Path]:
    """Write the results of each student and return the files: `path` if it ends in .json, or `path`/<student>.json.

    Raises ValueError if there are several students, and a single file for them.
    """
    if path.suffix == ".json":
        if len(graded_of) != 1:
            raise ValueError(f"{path}: one file for {len(graded_of)} students. Name a folder, for a file for each")
        files = dict.fromkeys(graded_of, path)
    else:
        files = {student: path / f"{student}.json" for student in graded_of}
    for student, file in files.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(FORMATS[format](graded_of[student]), indent=2) + "\n")
    return list(files.values())


def _name(q: Question) -> str:
    return f"{q.notebook}: {q.question}"


def _sum(graded: Sequence[Question]) -> str:
    return f"{sum(q.points for q in graded)} of {sum(q.worth for q in graded)} points"
