"""Errors that leave the library show the user's lines, and none of the library's."""

import dataclasses
import os
import re
import subprocess
import sys
import traceback
from pathlib import Path

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import psum
from spmd import P
from tests import PATIENCE
from tests.checks.meshes import mesh
from tests.checks.samples import each

ROOT = Path(__file__).parents[3]

#: The suite checks tapes, and so is a user.
SUITE = {"test_tracebacks.py", "conftest.py", "tapes.py", "meshes.py"}

#: Python 3.10 adds the frame of the function that an exception has left to its traceback.
LEFT = {"tracebacks.py", "keywords.py", "jit.py", "lists.py", "dispatch.py", "elementwise.py", "operators.py"}


def files_shown(text):
    """The files of the frames that a traceback shows, in Python's form, and in IPython's."""
    names = [Path(name).name for name in re.findall(r'^ *File "?(.+?)"?(?:, line |:)\d+', text, re.M)]
    return [name for name in names if sys.version_info >= (3, 11) or name not in LEFT]


def displayed(error):
    """Return the text that Python displays of an exception."""
    return "".join(traceback.format_exception(error))


# ---------------------------------------------------------------- where a program ends

PROGRAM = """
import numpy as np
import minidiff as md, spmd
from spmd import P
def mistake():
    mesh = spmd.make_mesh((4,), ("i",), backend="simulated")
    body = lambda x, w: (x * w).sum()
    loss = lambda w: spmd.shard_map(body, mesh=mesh, in_specs=(P("i"), P()), out_specs=P())(np.arange(8.0), w)
    md.jit(md.grad(loss))(2.0)
"""


@pytest.fixture
def run(tmp_path):
    """A function that runs a Python command on the program, which ends with some lines, and returns its output."""

    def run_with(end, *command, **environment):
        path = tmp_path / "program.py"
        path.write_text(PROGRAM + end)
        settings = {**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}", "OMP_NUM_THREADS": "1", **environment}
        command = [sys.executable, *command] if "-c" in command[-2:] else [sys.executable, *command, str(path)]
        done = subprocess.run(command, env=settings, capture_output=True, text=True, timeout=PATIENCE, cwd=tmp_path)
        return re.sub(r"\x1b\[[0-9;]*m", "", done.stdout + done.stderr)

    return run_with


END = """
import os, threading
thread = threading.Thread(target=mistake)
thread.start()
thread.join()
try:
    mistake()
finally:
    os.environ["MINIDIFF_TRACEBACK"] = "full"
    mistake()
"""


def test_python(run):
    """Where a thread ends, where the program does; and all frames for those who ask."""
    in_thread, at_end, whole = map(files_shown, run(END).split("Traceback")[1:])
    assert in_thread == ["threading.py", "threading.py", "program.py", "program.py"]
    assert at_end == ["program.py"] * 3
    assert "shard_map.py" in whole and len(whole) > 20


def test_ipython(run, tmp_path):
    pytest.importorskip("IPython")
    quick = {"IPYTHONDIR": str(tmp_path), "PYTHONSTARTUP": "", "VIRTUAL_ENV": sys.prefix}  # it warns of another
    program = "from program import mistake\n\nmistake()"
    text = run("", "-m", "IPython", "--quick", "--colors=NoColor", "-c", program, **quick)
    assert files_shown(text) == ["program.py"] * 2
    assert re.search(r"Cell In\[1\], line 3", text) and "skipping hidden" not in text
    assert text.strip().splitlines()[-1].startswith("VarianceError: the result has type")


def test_importing_changes_nothing_of_the_process(run):
    program = """
import sys, threading, warnings, numpy
def hooks():
    names = [*vars(numpy)]
    return sys.excepthook, threading.excepthook, warnings.showwarning, [*warnings.filters], numpy.geterr(), sys.exit
before = hooks()
import minidiff, collectives, spmd, minidiff.nn, minidiff.optim
print(before == hooks())"""
    assert run("", "-c", program) == "True\n"
    assert "pytest11" not in (ROOT / "setup.cfg").read_text()


# ---------------------------------------------------------------- any error, anywhere


LEAKED = []
md.grad(lambda x: LEAKED.append(x) or x.sum())(numpy.ones(3))
SHARDED = spmd.distribute(numpy.arange(8.0), mesh(2), P("i"))

#: Calls that raise an error, by each way into the library.
CALLS = [
    lambda: LEAKED[0] + 1,
    lambda: LEAKED[0] @ LEAKED[0],
    lambda: numpy.sin(LEAKED[0]),
    lambda: bool(LEAKED[0] > 0),
    lambda: SHARDED + numpy.ones(5),
    lambda: SHARDED.foo,
    lambda: md.foo,
    lambda: np.dot(numpy.ones(3), numpy.ones(4)),
    lambda: np.at(numpy.ones(3))[7].set(1.0),
    lambda: md.jvp(numpy.sin, (1.0,), ()),
    lambda: md.vjp(numpy.sin, 1.0)[1](numpy.ones(2)),
    lambda: md.linearize(numpy.sin, 1.0)[1](numpy.ones(2)),
    lambda: md.make_tape(numpy.sin)(1.0)(1.0, 2.0),
    lambda: md.scan(1, 2),
    lambda: md.custom_vjp(lambda x: x)(1.0),
    lambda: md.hessian(numpy.sin)(1),
    lambda: md.tree.map(lambda x, y: x, [1], (1,)),
    lambda: md.nn.softmax(1.0, axis=4),
    lambda: md.optim.sgd("one"),
    lambda: md.testing.check_grads(numpy.sin, 3.0),
    lambda: psum(1.0, "i"),
    lambda: spmd.make_mesh((3,), (1,)),
    lambda: P(3),
    lambda: spmd.distribute(numpy.ones(3), mesh(2), P("i")),
    lambda: spmd.checkpoint.load("nowhere"),
]


@each("call", CALLS, ids=lambda call: f"line {call.__code__.co_firstlineno}")
def test_public_functions(call):
    with pytest.raises(Exception) as caught:
        call()
    assert files_shown(displayed(caught.value)) == ["test_tracebacks.py"] * 2


@each("call", [lambda x: numpy.add(x, numpy.ones(5)), lambda x: x + numpy.ones(5), lambda x: np.reshape(x, (7, 7))])
def test_errors_that_a_traced_function_catches(call):
    def f(x):
        with pytest.raises(ValueError) as caught:
            call(x)
        assert files_shown(displayed(caught.value)) == ["test_tracebacks.py"] * 2
        return x.sum()

    for transform in (md.grad, md.make_tape):
        transform(f)(numpy.ones(3))


TRANSFORMATIONS = {
    "grad": lambda f: lambda x: md.grad(lambda x: f(x).sum())(x),
    "jvp": lambda f: lambda x: md.jvp(f, (x,), (x,))[1],
    "vmap": lambda f: lambda x: md.vmap(f)(np.stack([x, x])).sum(0),
    "jit": md.jit,
    "checkpoint": md.checkpoint,
    "scan": lambda f: lambda x: md.scan(lambda c, _: (f(c), None), x, None, length=2)[0],
    "cond": lambda f: lambda x: md.cond(True, f, lambda x: x, x),
    "shard_map": lambda f: spmd.shard_map(f, mesh=mesh(2), in_specs=P(), out_specs=P()),
}


def own_error(x):
    raise KeyError("my own")


def error_in_a_handler(x):
    try:
        x + numpy.ones(5)
    except ValueError:
        return np.reshape(x, (7, 7))


def error_with_a_cause(x):
    try:
        {}["rate"]
    except KeyError as error:
        raise ValueError("my own") from error


WRONG = {
    "shapes": lambda x: x @ numpy.ones(5),
    "axis": lambda x: np.sum(x, axis=3),
    "an axis that does not exist": lambda x: psum(x, "nowhere"),
    "its own": own_error,
    "another one in a handler": error_in_a_handler,
}


@given(st.lists(st.sampled_from(sorted(TRANSFORMATIONS)), min_size=1, max_size=4), st.sampled_from(sorted(WRONG)))
@settings(max_examples=40, deadline=None)
def test_no_error_shows_a_frame_of_the_library(transformations, wrong):
    f = WRONG[wrong]
    for name in transformations:
        f = TRANSFORMATIONS[name](f)
    with pytest.raises(Exception) as caught:
        f(numpy.ones(3))
    text = displayed(caught.value)
    assert {"test_tracebacks.py"} <= {*files_shown(text)} <= SUITE
    assert text.count("During handling") <= (wrong == "another one in a handler")


#: Functions whose errors have others before them, and the words between the two.
CHAINED = {"During handling of": error_in_a_handler, "was the direct cause of": error_with_a_cause}


@each("name", TRANSFORMATIONS)
@each("says", CHAINED)
def test_what_the_users_error_came_of_is_shown(name, says):
    """Also where a ValueError of the user's leaves the body of an operation, as one of NumPy's does."""
    with pytest.raises(ValueError) as caught:
        md.grad(lambda x: TRANSFORMATIONS[name](CHAINED[says])(x).sum())(numpy.ones(3))
    text = displayed(caught.value)
    assert text.count(says) == 1 and text.count("Traceback (most recent call last)") == 2


@each("name", TRANSFORMATIONS)
def test_an_overflow_that_is_an_error_is_at_the_users_line(name):
    f = TRANSFORMATIONS[name](lambda x: np.exp(1000 * x) + x)
    with numpy.errstate(over="raise"), pytest.raises(FloatingPointError) as caught:
        f(numpy.ones(3))
    assert {*files_shown(displayed(caught.value))} <= SUITE


Pair = dataclasses.make_dataclass("Pair", ["a"])


def test_a_frame_of_a_dataclass():
    """Its methods are written into no file."""
    with pytest.raises(md.VarianceError) as caught:
        spmd.shard_map(lambda x: x if Pair(x) == Pair(x + 1) else -x, mesh(2), P("i"), P("i"))(numpy.ones(2))
    text = displayed(caught.value)
    assert {*files_shown(text)} == {"test_tracebacks.py"} and "<string>" not in text
