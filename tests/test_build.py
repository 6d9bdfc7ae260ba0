"""The build: its hidden checks tell right answers from wrong ones, and students' copies have no answers."""

import re
import sys

import pytest

from notebooks.build.solution import checks, holes
from tests import jep_examples
from tests.build_answers import WRONG

HOLES = holes.holes()


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A folder with the solution's files in `mine/`, and how an answer to a question is judged there."""
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)

    def write(files):
        for name, source in files.items():
            (tmp_path / "mine" / f"{name}.py").write_text(source)

    def judge(number, answer=..., hole=None):
        """The verdict on `number` where a hole, this one unless told, has this answer: none is None."""
        hole = HOLES.get(hole or number)
        changed = {} if answer is ... else {hole.file: holes.fill(holes.solution(hole.file), hole.number, answer)}
        write({**{name: holes.solution(name) for name in holes.names()}, **changed})
        for name in set(sys.modules) - before:
            if name.split(".")[0] == "mine":
                del sys.modules[name]
        return checks.judge(number)

    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # files change faster than their times tell
    yield judge
    for name in set(sys.modules) - before:
        if name.split(".")[0] == "mine":
            del sys.modules[name]


def test_questions_are_numbered_and_checked():
    assert list(checks.points()) == list(checks.CHECKS)
    assert set(WRONG) == set(HOLES)
    steps = [int(number.split(".")[0]) for number in checks.points()]
    assert steps == sorted(steps) and set(steps) == set(range(1, 9))


def body(text):
    """The operations in the body of the printed program's shard_map, with the types of their results."""
    return [(op, type) for type, op in re.findall(r"^ {6}\w+:(\S+) = (\w+)\(", text, re.M)]


def test_the_jeps_examples_are_those_of_the_package(mine):
    assert mine("7.4") == "right"
    mine_examples = checks.jep(checks.Modules())
    for name, example in jep_examples.EXAMPLES.items():
        *_, forward, backward = mine_examples[name[0]]
        assert (forward, backward) == (body(example.text), body(example.transposed)), name


def test_the_solution_passes_all_checks(mine):
    verdicts = {number: mine(number) for number in checks.points()}
    assert set(verdicts.values()) == {"right"}, verdicts


@pytest.mark.parametrize("number", HOLES)
def test_a_hole(mine, number):
    assert mine(number, None).startswith(f"your turn: hole {number}")
    assert len(set(WRONG[number])) >= 2
    for answer in WRONG[number]:
        verdict = mine(number, answer)
        print(number, verdict, sep=": ")
        incomplete = f"your turn: hole {number}: no"  # of a table that has some of its lines
        assert verdict.startswith(("not yet: ", incomplete)), answer
        assert len(verdict) > 40 and not verdict.endswith("). "), verdict  # it says what to look at
