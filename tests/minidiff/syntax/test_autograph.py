"""Python's own statements on traced values: rewritten programs return what Python's programs do, and raise so."""

import traceback
from pathlib import Path

import numpy
import pytest

import minidiff as md
from minidiff.checks.testing import check_grads
from tests.checks.results import assert_trees_close
from tests.checks.samples import each
from tests.programs import syntax

PROGRAMS = {row[0].__name__: row for row in syntax.PROGRAMS}


def check_equal(actual, expected):
    assert md.tree.structure(actual) == md.tree.structure(expected)
    assert_trees_close(actual, expected)
    for x, y in zip(md.tree.leaves(actual), md.tree.leaves(expected)):
        assert numpy.asarray(x).dtype == numpy.asarray(y).dtype


def dynamic(args):
    """The positions of arguments that a program computes with."""
    return [k for k, x in enumerate(args) if x is not None and type(x) is not bool]


@pytest.mark.parametrize("name", PROGRAMS)
@each("compiled", [False, True])
def test_values(name, compiled):
    f, examples, *_ = PROGRAMS[name]
    static = sorted({*range(len(examples[0]))} - {*dynamic(examples[-1])})
    g = md.jit(md.autograph(f), static_argnums=static) if compiled else md.autograph(f)
    for args in examples:
        check_equal(g(*args), f(*args))


@pytest.mark.parametrize("name", [name for name, row in PROGRAMS.items() if row[3]])
@each("transform", [lambda f: f, md.jit], ["eager", "jit"])
def test_batches_run_as_a_loop(name, transform):
    f, examples, *_ = PROGRAMS[name]
    outs = transform(md.vmap(md.autograph(f)))(*[numpy.stack(column) for column in zip(*examples)])
    expected = [md.tree.map(numpy.asarray, f(*args)) for args in examples]
    check_equal(outs, md.tree.map(lambda *xs: numpy.stack(xs), *expected))


@pytest.mark.parametrize("name", [name for name, row in PROGRAMS.items() if row[2]])
def test_derivatives(name):
    f, examples, *_ = PROGRAMS[name]
    g = md.autograph(f, max_steps=64)
    for args in examples[:2]:
        floats = [k for k in dynamic(args) if numpy.asarray(args[k]).dtype == float]

        def of_floats(*values, args=args, floats=floats):
            outs = g(*[values[floats.index(k)] if k in floats else x for k, x in enumerate(args)])
            return [x for x in md.tree.leaves(outs) if md.typeof(x).dtype == float]

        check_grads(md.jit(of_floats), [args[k] for k in floats], order=1)


# ---------------------------------------------------------------- errors


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
