"""The puzzles' right answers are right on MPI ranks, too, by the command that judges a file."""

import runpy
from pathlib import Path

import pytest

import spmd

ROOT = Path(__file__).parent.parent.parent
IMPORTS = "import minidiff as md\nimport minidiff.numpy as np\nfrom collectives import *\n"


@pytest.mark.parallel(4)
def test_right_answers(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(ROOT / "notebooks"))
    import puzzles

    answers = runpy.run_path(str(ROOT / "notebooks" / "answers" / "puzzles.py"))["EXERCISES"]
    path = tmp_path / "answers.py"
    path.write_text("\n\n".join([IMPORTS, *(answer["right"] for answer in answers)]))
    puzzles.main(str(path))
    right = [f"{number:2} {puzzle.title}: right" for number, puzzle in puzzles.PUZZLES.items()]
    assert capsys.readouterr().out.splitlines() == (right if spmd.process_index() == 0 else [])
