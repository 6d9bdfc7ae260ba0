"""Displayed errors and warnings show the user's lines, and none of the library's."""

import math
import os
import re
import subprocess
import sys
import traceback
import warnings
from pathlib import Path

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import psum
from minidiff.diagnostics import tracebacks
from spmd import P
from tests import PATIENCE

ROOT = Path(__file__).parents[2]

# ---------------------------------------------------------------- six mistakes

#: A program for each: its last line is at fault, or calls what is.
MISTAKES = {
    "a missing psum under jit(grad)": """
        mesh = spmd.make_mesh((4,), ("i",), backend="simulated")
        body = lambda x, w: (x * w).sum()
        loss = lambda w: spmd.shard_map(body, mesh=mesh, in_specs=(P("i"), P()), out_specs=P())(np.arange(8.0), w)
        md.jit(md.grad(loss))(2.0)""",
    "a condition under jit": """
        def relu(x):
            return x if x > 0 else 0.0
        md.jit(relu)(1.0)""",
    "shapes that do not fit under grad": """
        loss = lambda w: np.dot(w, np.ones(3)).sum()
        md.grad(loss)(np.ones((2, 4)))""",
    "an unknown keyword": """
        md.jit(abs, static_argnms=0)(1.0)""",
    "a result that is not an array": """
        md.grad(lambda x: "one")(1.0)""",
    "a leaked tracer": """
        kept = []
        md.grad(lambda x: kept.append(x) or x * x)(1.0)
        kept[0] + 1""",
}
START = """import numpy as np
import minidiff as md, spmd
from spmd import P
def mistake():
"""


def written(path, name, end):
    path.write_text(START + MISTAKES[name].replace("\n    ", "\n")[1:] + end)
    return path


def run(*command, **environment):
    """What a program prints to stdout and stderr."""
    command = [sys.executable, *map(str, command)]
    names = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run(command, env=names, capture_output=True, text=True, timeout=PATIENCE, cwd=ROOT / "notebooks")
    return re.sub(r"\x1b\[[0-9;]*m", "", done.stdout + done.stderr)


def files_shown(text):
    """The files of the frames that a traceback shows, in Python's form, in IPython's, in pytest's."""
    found = re.findall(r'^ *File "?(.+?)"?(?:, line |:)\d+', text, re.M)
    return [Path(name).name for name in found + re.findall(r"^(\S+\.py):\d+: ", text, re.M)]


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_show_the_users_frames(name, tmp_path):
    names = {}
    path = written(tmp_path / "program.py", name, "")
    exec(compile(path.read_text(), path, "exec"), names)
    with pytest.raises((TypeError, ValueError)) as caught:
        names["mistake"]()
    text = displayed(caught.value)
    frames = files_shown(text)
    own = [file for file in frames if file == "program.py"]
    assert 1 <= len(own) <= 3
    assert set(frames) <= {"program.py", "conftest.py", "test_tracebacks.py"}  # the suite looks at tapes, and is a user
    assert text.splitlines()[-1].partition(": ")[2] == str(caught.value)


def displayed(error):
    """What Python displays of an exception."""
    with tracebacks.short(error):
        return "".join(traceback.format_exception(error))


NAME = "a missing psum under jit(grad)"


def test_python(tmp_path):
    """Where the program ends, where a thread does; and all frames for those who ask."""
    thread = "\nimport threading\nt = threading.Thread(target=mistake)\nt.start()\nt.join()\nmistake()\n"
    path = written(tmp_path / "program.py", NAME, thread)
    in_thread, at_end = run(path).split("Traceback")[1:]
    assert files_shown(in_thread) == ["threading.py", "threading.py", "program.py", "program.py"]
    assert files_shown(at_end) == ["program.py"] * 3
    assert at_end.splitlines()[-1].startswith("minidiff.diagnostics.errors.VarianceError: the result has type f64[]{i}")
    whole = files_shown(run(path, MINIDIFF_TRACEBACK="full").split("Traceback")[-1])
    assert "shard_map.py" in whole and len(whole) > 20


def test_ipython(tmp_path):
    pytest.importorskip("IPython")
    path = written(tmp_path / "program.py", NAME, "\n")
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\nfrom program import mistake\nmistake()"
    quick = {"IPYTHONDIR": str(tmp_path), "PYTHONSTARTUP": ""}
    text = run("-m", "IPython", "--quick", "--colors=NoColor", "-c", program, **quick)
    assert files_shown(text) == ["program.py"] * 2
    assert re.search(r"Cell In\[1\], line 3", text) and "skipping hidden" not in text
    assert path.name in text and text.strip().splitlines()[-1].startswith("VarianceError: the result has type")


def test_pytest(tmp_path):
    warns = "\ndef test_warning():\n    md.jit(lambda x: np.exp(1000 * x))(np.ones(2))\n"
    path = written(tmp_path / "test_program.py", NAME, "\ntest_mistake = mistake\n" + warns)
    command = (
        "-m",
        "pytest",
        "-p",
        "minidiff.diagnostics.tracebacks",
        "-p",
        "no:cacheprovider",
        "-c",
        os.devnull,
        path,
    )
    alone = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    text = run(*command, **alone)
    assert set(files_shown(text)) == {"test_program.py"} and "1 failed, 1 passed" in text
    assert "RuntimeWarning: overflow encountered in exp" in text and "compiled by minidiff" not in text
    assert "shard_map.py" in files_shown(run(*command, "--full-trace", "--tb=short", **alone))


def test_the_plugin_is_declared():
    assert "minidiff.diagnostics.tracebacks = minidiff.diagnostics.tracebacks" in (ROOT / "setup.cfg").read_text()


# ---------------------------------------------------------------- any error, anywhere

MESH = spmd.make_mesh((2,), ("i",), backend="simulated")

TRANSFORMATIONS = {
    "grad": lambda f: lambda x: md.grad(lambda x: f(x).sum())(x),
    "jvp": lambda f: lambda x: md.jvp(f, (x,), (x,))[1],
    "vmap": lambda f: lambda x: md.vmap(f)(np.stack([x, x])).sum(0),
    "jit": md.jit,
    "checkpoint": md.checkpoint,
    "scan": lambda f: lambda x: md.scan(lambda c, _: (f(c), None), x, None, length=2)[0],
    "cond": lambda f: lambda x: md.cond(True, f, lambda x: x, x),
    "shard_map": lambda f: spmd.shard_map(f, mesh=MESH, in_specs=P(), out_specs=P()),
}


def own_error(x):
    raise KeyError("my own")


def handled_error(x):
    try:
        x + numpy.ones(5)
    except ValueError:
        return np.reshape(x, (7, 7))


WRONG = {
    "shapes": lambda x: x @ numpy.ones(5),
    "axis": lambda x: np.sum(x, axis=3),
    "a number": lambda x: math.sin(np.linalg.norm(x)) and own_error(x),
    "text": lambda x: x + "a",
    "an axis that does not exist": lambda x: psum(x, "nowhere"),
    "its own": own_error,
    "another one in a handler": handled_error,
}


@given(st.lists(st.sampled_from(sorted(TRANSFORMATIONS)), min_size=1, max_size=4), st.sampled_from(sorted(WRONG)))
@settings(max_examples=80, deadline=None)
def test_no_error_shows_a_frame_of_the_library(names, wrong):
    f = WRONG[wrong]
    for name in names:
        f = TRANSFORMATIONS[name](f)
    try:
        f(numpy.ones(3))
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        text = displayed(error)
        assert error.__traceback__ is not None and len(traceback.extract_tb(error.__traceback__)) == len(frames)
        assert set(files_shown(text)) <= {"test_tracebacks.py", "conftest.py"}
        assert "test_tracebacks.py" in files_shown(text)
        assert text.count("During handling") <= (wrong == "another one in a handler")
    else:
        raise AssertionError("it was to fail")


def error_with_a_cause(x):
    try:
        {}["rate"]
    except KeyError as error:
        raise ValueError("my own") from error


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_what_the_users_error_came_of_is_shown(name):
    """Also where a ValueError of the user's leaves the body of an operation, as one of NumPy's does."""
    for f, says in ((handled_error, "During handling of"), (error_with_a_cause, "was the direct cause of")):
        with pytest.raises(ValueError) as caught:
            md.grad(lambda x, f=f: TRANSFORMATIONS[name](f)(x).sum())(numpy.ones(3))
        text = displayed(caught.value)
        assert text.count(says) == 1 and text.count("Traceback (most recent call last)") == 2


def test_what_is_not_the_librarys_stays():
    """An error of NumPy on plain arrays is displayed as it always was; so is one of a program of the library's."""
    with pytest.raises(numpy.linalg.LinAlgError) as caught:
        numpy.linalg.inv(numpy.zeros((2, 2)))
    assert files_shown(displayed(caught.value)) == ["test_tracebacks.py", "_linalg.py", "_linalg.py"]
    with pytest.raises(TypeError) as caught:
        md.jit(abs, static_argnums=3)(1.0)
    called = caught.value.with_traceback(caught.value.__traceback__.tb_next)  # without the frame of this function
    assert set(files_shown(displayed(called))) == {"jit.py"}


# ---------------------------------------------------------------- warnings

OVERFLOWS = """
import numpy as np
import minidiff as md

def f(x):
    y = np.exp(1000 * x)
    for _ in range(3):
        y = y + np.exp(2000 * x)
    return (y + np.log(x - x)).sum()

{run}
"""
RUNS = {"grad": "md.grad(f)(np.ones(2))", "jit": "md.jit(f)(np.ones(2))", "vmap": "md.vmap(f)(np.ones((2, 2)))"}


@pytest.mark.parametrize("action", ["default", "once", "always", "module"])
@pytest.mark.parametrize("name", RUNS)
def test_numeric_warnings_are_at_the_users_line(name, action, monkeypatch):
    shown = []
    with warnings.catch_warnings():
        warnings.simplefilter(action)
        show = lambda message, category, file, line, *_: shown.append((str(message), file, line))  # noqa: E731
        monkeypatch.setattr(warnings, "showwarning", tracebacks._at_users_line(show))
        text = OVERFLOWS.format(run=RUNS[name])
        file = f"program of {name}, {action}"
        exec(compile(text, file, "exec"), {})
    assert {f for _, f, _ in shown} == {file}
    of_exp = [line for message, _, line in shown if message == "overflow encountered in exp"]
    lines = text.splitlines()
    first, second = (k + 1 for k, line in enumerate(lines) if "np.exp" in line)
    often = 3 if name != "jit" else len(of_exp) - 1
    expected = {
        "default": [first, second],
        "once": [first],
        "module": [first],
        "always": [first, *[second] * often],
    }
    assert of_exp == expected[action]


def test_warnings_in_a_program():
    """NumPy's own, at a line of the user's, stay as they are; the backward pass is at the line that asked for it."""
    program = OVERFLOWS.format(
        run="np.exp(numbers := np.ones(2) * 1e4)\nmd.grad(lambda x: np.sqrt(x).sum())(0 * numbers)"
    )
    text = run("-c", program)
    assert re.findall(r"<string>:(\d+): RuntimeWarning: (\w+)", text) == [("11", "overflow"), ("12", "divide")]
    assert "minidiff" in run("-c", program, MINIDIFF_TRACEBACK="full")
