"""Errors that leave the library show the user's lines, and none of the library's."""

import contextlib
import dataclasses
import logging
import math
import os
import pickle
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

#: The suite checks tapes, and so is a user.
SUITE = {"test_tracebacks.py", "conftest.py", "tapes.py"}

ROOT = Path(__file__).parents[3]

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


#: Names of the library's files.
OWN = {path.name for layer in ("minidiff", "collectives", "spmd") for path in (ROOT / layer).rglob("*.py")}


def written(path, name, end):
    path.write_text(START + MISTAKES[name].replace("\n    ", "\n")[1:] + end)
    return path


def run(*command, **environment):
    """Return a program's stdout and stderr."""
    command = [sys.executable, *map(str, command)]
    names = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run(command, env=names, capture_output=True, text=True, timeout=PATIENCE, cwd=ROOT / "notebooks")
    return re.sub(r"\x1b\[[0-9;]*m", "", done.stdout + done.stderr)


#: Python 3.10 adds the frame of the function that an exception has left to its traceback.
LEFT = {"tracebacks.py", "keywords.py", "jit.py", "lists.py", "dispatch.py", "elementwise.py", "operators.py"}


def files_shown(text):
    """The files of the frames that a traceback shows, in Python's form, in IPython's, in pytest's."""
    actual = re.findall(r'^ *File "?(.+?)"?(?:, line |:)\d+', text, re.M)
    names = [Path(name).name for name in actual + re.findall(r"^(\S+\.py):\d+: ", text, re.M)]
    return [name for name in names if sys.version_info >= (3, 11) or name not in LEFT]


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_show_the_users_frames(name, tmp_path):
    names = {}
    path = written(tmp_path / "program.py", name, "")
    exec(compile(path.read_text(), path, "exec"), names)
    with pytest.raises((TypeError, ValueError)) as caught:
        names["mistake"]()
    text = displayed(caught.value)
    frames = files_shown(text)
    local = [file for file in frames if file == "program.py"]
    assert 1 <= len(local) <= 3
    assert set(frames) <= {
        "program.py",
        "conftest.py",
        "tapes.py",
        "test_tracebacks.py",
    }  # the suite looks at tapes, and is a user
    assert text.splitlines()[-1].partition(": ")[2] == str(caught.value)


def displayed(error):
    """Return the text that Python displays of an exception."""
    return "".join(traceback.format_exception(error))


NAME = "a missing psum under jit(grad)"


def test_python(tmp_path):
    """Where the program ends, where a thread does; and all frames for those who ask."""
    thread = "\nimport threading\nt = threading.Thread(target=mistake)\nt.start()\nt.join()\nmistake()\n"
    path = written(tmp_path / "program.py", NAME, thread)
    in_thread, at_end = run(path).split("Traceback")[1:]
    assert files_shown(in_thread) == ["threading.py", "threading.py", "program.py", "program.py"]
    assert files_shown(at_end) == ["program.py"] * 3
    assert at_end.splitlines()[-1].startswith("minidiff.errors.VarianceError: the result has type f64[]{i}")
    whole = files_shown(run(path, MINIDIFF_TRACEBACK="full").split("Traceback")[-1])
    assert "shard_map.py" in whole and len(whole) > 20


def test_ipython(tmp_path):
    pytest.importorskip("IPython")
    path = written(tmp_path / "program.py", NAME, "\n")
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\nfrom program import mistake\nmistake()"
    quick = {"IPYTHONDIR": str(tmp_path), "PYTHONSTARTUP": "", "VIRTUAL_ENV": sys.prefix}  # it warns of another
    text = run("-m", "IPython", "--quick", "--colors=NoColor", "-c", program, **quick)
    assert files_shown(text) == ["program.py"] * 2
    assert re.search(r"Cell In\[1\], line 3", text) and "skipping hidden" not in text
    assert path.name in text and text.strip().splitlines()[-1].startswith("VarianceError: the result has type")


def test_pytest(tmp_path):
    path = written(tmp_path / "test_program.py", NAME, "\ntest_mistake = mistake\n")
    command = ("-m", "pytest", "-p", "no:cacheprovider", "-c", os.devnull, path)
    alone = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    text = run(*command, **alone)
    assert set(files_shown(text)) == {"test_program.py"} and "1 failed" in text
    assert "shard_map.py" in files_shown(run(*command, "--tb=short", MINIDIFF_TRACEBACK="full", **alone))


def test_doctest(tmp_path):
    path = tmp_path / "page.md"
    path.write_text(">>> import minidiff as md\n>>> md.grad(lambda x: 'one')(1.0)\n")
    text = run("-m", "doctest", path)
    assert "TypeError: grad" in text and not [name for name in files_shown(text) if name in OWN]


def test_logging(caplog):
    with contextlib.suppress(ValueError):
        try:
            md.grad(handled_error)(numpy.ones(3))
        except ValueError:
            logging.exception("it failed")
            raise
    assert set(files_shown(caplog.text)) <= SUITE and "reshape" in caplog.text


def test_a_handler_in_a_traced_function():
    """Also inside of another transformation."""
    texts = []

    def f(x):
        try:
            return md.vmap(lambda x: x @ numpy.ones(5))(x)
        except ValueError as error:
            texts.append(displayed(error))
        return x

    md.jit(f)(numpy.ones((2, 3)))
    (text,) = texts
    assert files_shown(text) == ["test_tracebacks.py"] * 2


def test_importing_changes_nothing_of_the_process():
    program = """
import sys, threading, warnings, numpy
def hooks():
    names = [*vars(numpy)]
    return sys.excepthook, threading.excepthook, warnings.showwarning, [*warnings.filters], numpy.geterr(), sys.exit
before = hooks()
import minidiff, collectives, spmd, minidiff.nn, minidiff.optim
print(before == hooks())"""
    assert run("-c", program) == "True\n"
    assert "pytest11" not in (ROOT / "setup.cfg").read_text()


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
        text = displayed(error)
        assert set(files_shown(text)) <= SUITE
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
    """An error of NumPy on plain arrays is displayed as it always was."""
    with pytest.raises(numpy.linalg.LinAlgError) as caught:
        numpy.linalg.inv(numpy.zeros((2, 2)))
    assert files_shown(displayed(caught.value)) == ["test_tracebacks.py", "_linalg.py", "_linalg.py"]


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_an_overflow_that_is_an_error_is_at_the_users_line(name):
    f = TRANSFORMATIONS[name](lambda x: np.exp(1000 * x) + x)
    with numpy.errstate(over="raise"), pytest.raises(FloatingPointError, match="overflow") as caught:
        f(numpy.ones(3))
    assert set(files_shown(displayed(caught.value))) <= SUITE


# ---------------------------------------------------------------- public functions

KEPT = []
md.grad(lambda x: KEPT.append(x) or x * x)(1.0)
LEAKED = []
md.grad(lambda x: LEAKED.append(x) or x.sum())(numpy.ones(3))
SHARDED = spmd.distribute(numpy.arange(8.0), MESH, P("i"))

CALLS = {
    "an operator": lambda: LEAKED[0] + 1,
    "a reversed operator": lambda: 1 - LEAKED[0],
    "a product": lambda: LEAKED[0] @ LEAKED[0],
    "a method": lambda: LEAKED[0].sum(),
    "an index": lambda: LEAKED[0][0],
    "a ufunc": lambda: numpy.sin(LEAKED[0]),
    "a function": lambda: numpy.sum(LEAKED[0]),
    "a Python number": lambda: 1 - KEPT[0],
    "a condition": lambda: bool(KEPT[0]),
    "a sharded operator": lambda: SHARDED + numpy.ones(5),
    "a sharded method": lambda: SHARDED.reshape(3),
    "an attribute": lambda: SHARDED.foo,
    "a module's attribute": lambda: md.foo,
    "minidiff.numpy": lambda: np.dot(numpy.ones(3), numpy.ones(4)),
    "a ufunc of minidiff.numpy": lambda: np.exp("one"),
    "np.at": lambda: np.at(numpy.ones(3))[7].set(1.0),
    "jvp": lambda: md.jvp(numpy.sin, (1.0,), ()),
    "a pullback": lambda: md.vjp(numpy.sin, 1.0)[1](numpy.ones(2)),
    "a linear function": lambda: md.linearize(numpy.sin, 1.0)[1](numpy.ones(2)),
    "a tape": lambda: md.make_tape(numpy.sin)(1.0)(1.0, 2.0),
    "scan": lambda: md.scan(1, 2),
    "while_loop": lambda: md.while_loop(1, 2),
    "custom_vjp": lambda: md.custom_vjp(lambda x: x)(1.0),
    "hessian": lambda: md.hessian(numpy.sin)(1),
    "tree": lambda: md.tree.map(lambda x, y: x, [1], (1,)),
    "nn": lambda: md.nn.softmax(1.0, axis=4),
    "random": lambda: md.random.normal(1),
    "optim": lambda: md.optim.sgd("one"),
    "testing": lambda: md.testing.check_grads(numpy.sin, 3.0),
    "collectives": lambda: psum(1.0, "i"),
    "make_mesh": lambda: spmd.make_mesh((3,), (1,)),
    "P": lambda: P(3),
    "distribute": lambda: spmd.distribute(numpy.ones(3), MESH, P("i")),
    "communication": lambda: spmd.communication(1),
    "data": lambda: spmd.data.batches(1, batch_size=0),
    "load": lambda: spmd.checkpoint.load("nowhere"),
}


@pytest.mark.parametrize("name", CALLS)
def test_public_functions(name):
    with pytest.raises(Exception) as caught:
        CALLS[name]()
    assert files_shown(displayed(caught.value)) == ["test_tracebacks.py"] * 2


@dataclasses.dataclass
class Doubled:
    """A class whose methods `dataclasses` writes, into no file."""

    x: object
    y: object = dataclasses.field(init=False)

    def __post_init__(self):
        self.y = float(self.x)


Pair = dataclasses.make_dataclass("Pair", ["a"])


@pytest.mark.parametrize("body", [lambda x: Doubled(x).y * x, lambda x: x if Pair(x) == Pair(x + 1) else -x])
def test_a_frame_of_a_dataclass(body):
    """Python writes __init__ and __eq__, which are in no file."""
    mesh = spmd.make_mesh((2,), ("i",), backend="simulated")
    with pytest.raises(md.VarianceError) as caught:
        spmd.shard_map(body, mesh=mesh, in_specs=P("i"), out_specs=P("i"))(numpy.ones(2))
    assert set(files_shown(displayed(caught.value))) == {"test_tracebacks.py"}
    assert "<string>" not in displayed(caught.value)


def test_writing_a_traced_value_into_an_array():
    """NumPy replaces the error that says what to do; it is the message nevertheless."""

    def f(x):
        y = numpy.zeros(3)
        y[0] = x
        return y.sum()

    with pytest.raises(ValueError, match=r"^y\[i\] = x cannot write a traced value") as caught:
        md.grad(f)(1.0)
    text = displayed(caught.value)
    assert text.count("Traceback") == 1 and "y[0] = x" in text and "sequence" not in text


def test_public_functions_can_be_pickled_and_have_one_identity():
    for function in (md.jvp, md.scan, md.grad, md.nn.relu, psum, spmd.make_mesh, np.dot):
        assert pickle.loads(pickle.dumps(function)) is function
    assert md.checkpoint is md.remat and md.nn.swish is md.nn.silu
