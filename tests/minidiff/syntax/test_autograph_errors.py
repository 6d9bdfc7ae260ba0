"""Errors of rewritten programs name the line, the variable and its types, and say what to write."""

import functools
import re
import traceback
from pathlib import Path

import numpy
import pytest

import minidiff as md
import minidiff.numpy as np


def only_one_branch(x):
    if x > 0:
        y = x
    return y


def only_in_the_loop(x):
    while x > 1:
        y = x
        x = x / 2
    return y


def shapes(x):
    y = x
    if x > 0:
        y = np.ones(2)
    return y


def no_return(x):
    if x > 0:
        return x


def texts(x):
    return "a" if x > 0 else "b"


def changes_type(x):
    n = np.int64(0)
    while x > 0:
        n = n + 0.5
        x = x - 1
    return n


def changes_structure(x):
    y = (x, x)
    while x > 0:
        y = x
        x = x - 1
    return y


def raises(x):
    if x > 0:
        raise ValueError("no")
    return x


def handles(x):
    while x > 0:
        try:
            x = x - 1
        except ValueError:
            x = 0.0
    return x


COUNT = 0


def assigns_global(x):
    global COUNT
    if x > 0:
        COUNT = 1
    return x


def changes_attribute(x, state={}):  # noqa: B006
    if x > 0:
        only_one_branch.calls = 1
    return x


def grows(x):
    ys = []
    while x > 0:
        ys.append(x)
        x = x - 1
    return ys


def grows_until_break(xs):
    ys = []
    for x in xs:
        if x > 1:
            break
        ys.append(x)
    return ys


def grows_in_a_branch(x):
    ys = []
    if x > 0:
        ys.append(x)
    return ys


def reads_what_it_appends(xs):
    ys = [xs[0]]
    for x in xs:
        ys.append(ys[-1] + x)
    return ys


def many_booleans(x):
    if x * np.ones(2) > 0:
        x = x + 1
    return x


def traced_step(n):
    total = 0
    for i in range(0, 10, n):
        total += i
    return total


ROWS = numpy.array([0.5, 1.5])


def line_of(f, text):
    lines = Path(f.__code__.co_filename).read_text().splitlines()
    first = f.__code__.co_firstlineno
    return next(k for k in range(first, first + 20) if text in lines[k - 1])


@pytest.mark.parametrize(
    ("f", "x", "error", "line", "message"),
    [
        (
            only_one_branch,
            1.0,
            NameError,
            "return y",
            r"y has no value here, since only one branch of .*if x > 0 assig",
        ),
        (
            only_in_the_loop,
            1.0,
            NameError,
            "return y",
            "y has no value here, since .*while x > 1 assigns it, and may ta",
        ),
        (shapes, 1.0, TypeError, "if x", r"y is f64\[2\] if the condition holds and f64\[\] otherwise"),
        (no_return, 1.0, TypeError, "if x", r"the returned value is f64\[\] if the condition holds and None otherwise"),
        (texts, 1.0, TypeError, "return", "the value is 'a' if the condition holds and 'b' otherwise"),
        (changes_type, 1.0, TypeError, "while x", r"n has type i64\[\], but a step returns f64\[\]"),
        (changes_structure, 1.0, TypeError, "while x", r"y is \(f64\[\], f64\[\]\) before a step and f64\[\] after"),
        (raises, 1.0, TypeError, "if x", r"but line \d+ raises an exception"),
        (handles, 1.0, TypeError, "while x", r"but line \d+ handles exceptions"),
        (assigns_global, 1.0, TypeError, "if x", r"but line \d+ assigns COUNT, which is not a local variable"),
        (changes_attribute, 1.0, TypeError, "if x", r"but line \d+ changes only_one_branch.calls"),
        (grows, 1.0, TypeError, "while x", "the list ys grows by as many steps as the loop takes"),
        (grows_until_break, ROWS, TypeError, "if x", r"ys is \[\] if .* and \[f64\[\]\] otherwise; .* ys.at\[i\].set"),
        (grows_in_a_branch, 1.0, TypeError, "if x", r"ys is \[f64\[\]\] if the condition holds and \[\] otherwise"),
        (reads_what_it_appends, ROWS, TypeError, "ys.append", "its steps cannot read it"),
        (many_booleans, 1.0, ValueError, "if x", r"a condition must be one boolean, got bool\[2\]"),
        (traced_step, 2, TypeError, "for i", "the step of a range with traced bounds must be a number"),
    ],
)
def test_errors_of_traced_programs(f, x, error, line, message):
    with pytest.raises(error, match=message) as caught:
        md.jit(md.autograph(f))(x)
    assert f"test_autograph_errors.py:{line_of(f, line)}: " in str(caught.value)
    lines = [x.lineno for x in traceback.extract_tb(caught.tb) if x.filename == __file__]
    assert lines[-1] == line_of(f, line)


def test_known_conditions_raise_as_python_does():
    with pytest.raises(UnboundLocalError, match="y has no value here, since no statement has assigned it"):
        md.autograph(only_one_branch)(-1.0)
    with pytest.raises(ValueError, match="no"):
        md.autograph(raises)(1.0)
    assert md.autograph(handles)(2.0) == 0
    assert md.autograph(grows)(2.0) == [2.0, 1.0]
    assert len(md.autograph(reads_what_it_appends)(ROWS)) == 3


def generator(x):
    yield x


async def coroutine(x):
    return x


def from_exec():
    namespace = {}
    exec("def f(x):\n    return x", namespace)
    return namespace["f"]


@pytest.mark.parametrize(
    ("f", "message"),
    [
        (generator, "autograph takes no generator and no coroutine: generator, line"),
        (coroutine, "autograph takes no generator and no coroutine: coroutine, line"),
        (lambda x: x, "a function that `def` defines"),
        (md.jit(shapes), "@md.jit above @md.autograph"),
        (numpy.sin, "a function that `def` defines"),
        (functools.wraps(shapes)(lambda x: shapes(x)), "put it next to the function"),
        (from_exec(), "autograph reads the source of f, and finds none"),
    ],
)
def test_functions_without_statements(f, message):
    with pytest.raises(TypeError, match=re.escape(message)):
        md.autograph(f)


def test_a_condition_that_differs_between_ranks():
    import spmd
    from collectives import psum
    from spmd import P

    @md.autograph
    def body(x):
        if x.sum() > 2:
            x = psum(x, "i")
        return x

    mesh = spmd.make_mesh((2,), ("i",), backend="simulated")
    with pytest.raises(md.VarianceError, match="ranks that run it would wait forever for the others"):
        spmd.shard_map(body, mesh, P("i"), P("i"))(numpy.arange(4.0))


def fails_in_a_loop(x):
    for k in range(3):
        if k == 2:
            x = x + numpy.ones(2) @ numpy.ones(3)
    return x


@pytest.mark.parametrize("transform", [lambda f: f, md.jit, md.grad])
def test_tracebacks_have_the_lines_of_the_program(transform):
    with pytest.raises(ValueError) as caught:
        transform(md.autograph(fails_in_a_loop))(1.0)
    frames = traceback.extract_tb(caught.tb)
    assert frames[-1].lineno == line_of(fails_in_a_loop, "@")
    assert not [frame.filename for frame in frames if "/minidiff/syntax/o" in frame.filename]
