"""The build: its checks, on the pages and hidden, tell right answers from wrong ones."""

import importlib
import re
import sys

import nbformat
import pytest

import minidiff as md
from notebooks.answers.build import WRONG, predicted
from notebooks.build.solution import checks, holes
from tests.checks.meshes import mesh
from tests.programs import jep_examples

HOLES = holes.holes()
NOTEBOOKS = holes.PAGES.parent


@pytest.fixture
def copy_of_build(tmp_path, monkeypatch):
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


@pytest.fixture
def on_page(copy_of_build, monkeypatch):
    """Return the verdicts of a page's checks on the files in `mine/`, except the one that starts MPI `ranks`."""
    monkeypatch.syspath_prepend(NOTEBOOKS)
    monkeypatch.syspath_prepend(NOTEBOOKS / "build")
    exercises = importlib.import_module("exercises")
    message = []
    monkeypatch.setattr(exercises, "display", lambda verdict: message.append(verdict.text))

    def run(number, ranks=False):
        message.clear()
        names = {}
        (path,) = holes.PAGES.glob(f"{number.split('.')[0]}_*.ipynb")
        for cell in nbformat.read(path, as_version=4).cells:
            runs = cell.cell_type == "code" and not cell.source.startswith(holes.MAGIC)
            if runs and (ranks or "run_script" not in cell.source):
                exec(predicted(cell.source), names)
        return list(message)

    return run


def test_questions_are_numbered_and_checked():
    assert list(checks.points()) == list(checks.CHECKS)
    assert set(WRONG) == set(HOLES)
    steps = [int(number.split(".")[0]) for number in checks.points()]
    assert steps == sorted(steps) and set(steps) == set(range(1, 9))


def test_an_error_is_located_in_the_file_of_the_answer(copy_of_build, on_page):
    wrong = WRONG["3.4"][0]  # it gives NumPy a None: NumPy is called in mine/tracer.py, of page 1
    assert re.search(r"\(mine/forward.py, line \d+: return op\(x, y\), plus", copy_of_build("3.4", wrong))
    assert "\nmine/forward.py, product: return op(x, y), plus" in "\n".join(on_page("3.4"))


def body(text):
    """The operations in the body of the printed program's shard_map, with the types of their results."""
    return [(op, type) for type, op in re.findall(r"^ {6}\w+:(\S+) = (\w+)\(", text, re.M)]


def test_the_jeps_examples_are_those_of_the_package(copy_of_build):
    assert copy_of_build("7.4") == "right"
    mine_examples = checks.jep(checks.Modules())
    for name, example in jep_examples.EXAMPLES.items():
        tape = example.tape(mesh(8))
        *_, forward, backward = mine_examples[name[0]]
        assert (forward, backward) == (body(str(tape)), body(str(md.transpose(tape, linear=0)))), name


def test_the_solution_passes_all_checks(copy_of_build):
    verdicts = {number: copy_of_build(number) for number in checks.points()}
    assert set(verdicts.values()) == {"right"}, verdicts


@pytest.mark.parametrize("number", HOLES)
def test_a_hole(copy_of_build, on_page, number):
    assert copy_of_build(number) == "right" and set(on_page(number)) == {"right"}
    assert copy_of_build(number, None).startswith(f"your turn: hole {number}")
    (message,) = {verdict.split(". ")[0] for verdict in on_page(number)} - {"right"}
    assert message in (f"your turn: hole {number}", f"your turn: still empty: hole {number}")
    assert len(set(WRONG[number])) >= 2
    for answer in WRONG[number]:
        verdict = copy_of_build(number, answer)
        print(number, verdict, sep=": ")
        incomplete = f"your turn: hole {number}: no"  # of a table that has some of its lines
        assert verdict.startswith(("not yet: ", incomplete)), answer
        assert len(verdict) > 40 and not verdict.endswith("). "), verdict  # it says what to look at
        message = [verdict for verdict in on_page(number) if verdict != "right"]
        assert message and message[0].startswith("not yet: "), f"the page says that this is right:\n{answer}"


@pytest.mark.parametrize("number", ["1.5", "3.5", "4.2", "6.1", "6.2"])
def test_a_later_page_names_the_table_that_is_empty(copy_of_build, on_page, number):
    copy_of_build(number, None)
    message = [verdict for verdict in on_page("7") if verdict != "right"]
    assert message and all(
        verdict.startswith(f"your turn: still empty: hole {number}. So far: ") for verdict in message
    )
    assert "KeyError" not in message[0]


def test_an_error_on_mpi_ranks_names_the_students_line(copy_of_build, on_page):
    answer = "return self.comm.sendrecv(x, destination=1)"
    where = r"TypeError: .*destination.*\nmine/mpi.py, line \d+: " + re.escape(answer)
    copy_of_build("8.4", answer)
    assert re.search(where, on_page("8", ranks=True)[-1])
    assert re.search(where, checks.judge("8.8"))


def test_a_rank_that_waits_names_the_students_line(copy_of_build, on_page):
    copy_of_build("8.2", "return np.concatenate([x] * size) if rank == 0 else shift(x)")
    assert "rank 0 does not send\nmine/ring.py, ring_all_gather: return np.concatenate" in on_page("8")[0]
