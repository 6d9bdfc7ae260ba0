"""Errors of rewritten programs, which have the lines of the program; `statements.md` shows what programs return."""

import traceback
from pathlib import Path

import numpy
import pytest

import minidiff as md
from tests.checks.samples import each


def only_one_branch(x):
    if x > 0:
        y = x
    return y


def fails_in_a_loop(x):
    for k in range(3):
        if k == 2:
            x = x + numpy.ones(2) @ numpy.ones(3)
    return x


def line_of(f, text):
    first = f.__code__.co_firstlineno
    return next(k for k, line in enumerate(Path(__file__).read_text().splitlines(), 1) if k > first and text in line)


@each("transform", [lambda f: f, md.jit, md.grad])
def test_tracebacks_have_the_lines_of_the_program(transform):
    with pytest.raises(ValueError) as caught:
        transform(md.autograph(fails_in_a_loop))(1.0)
    frames = traceback.extract_tb(caught.tb)
    assert frames[-1].lineno == line_of(fails_in_a_loop, "@")
    assert not [frame.filename for frame in frames if "/minidiff/syntax/o" in frame.filename]


def test_errors_name_the_file_and_the_line():
    """Where the condition is known, they are Python's."""
    with pytest.raises(UnboundLocalError):
        md.autograph(only_one_branch)(-1.0)
    with pytest.raises(NameError) as caught:
        md.jit(md.autograph(only_one_branch))(1.0)
    line = line_of(only_one_branch, "return y")
    assert f"test_autograph.py:{line}: " in str(caught.value)
    assert [x.lineno for x in traceback.extract_tb(caught.tb) if x.filename == __file__][-1] == line
