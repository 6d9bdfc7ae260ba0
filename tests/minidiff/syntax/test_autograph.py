"""Python's own statements on traced values: rewritten programs return what Python's programs do."""

import numpy
import pytest

import minidiff as md
from minidiff.checks.testing import check_grads
from tests.programs.syntax import PROGRAMS

NAMES = [f.__name__ for f, *_ in PROGRAMS]


def equal(actual, expected):
    actual, a = md.tree.flatten(actual)
    expected, b = md.tree.flatten(expected)
    assert a == b
    for x, y in zip(actual, expected):
        numpy.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-12)
        assert numpy.asarray(x).dtype == numpy.asarray(y).dtype


def dynamic(args):
    """The positions of arguments that a program computes with."""
    return [k for k, x in enumerate(args) if x is not None and type(x) is not bool]


@pytest.mark.parametrize("row", PROGRAMS, ids=NAMES)
def test_rewritten_programs_run_as_pythons(row):
    f, examples, *_ = row
    for args in examples:
        equal(md.autograph(f)(*args), f(*args))


@pytest.mark.parametrize("row", PROGRAMS, ids=NAMES)
def test_compiled_programs_run_as_pythons(row):
    f, examples, *_ = row
    static = sorted({*range(len(examples[0]))} - {*dynamic(examples[-1])})
    g = md.jit(md.autograph(f), static_argnums=static)
    for args in examples:
        equal(g(*args), f(*args))


@pytest.mark.parametrize("row", [row for row in PROGRAMS if row[3]], ids=[n for n, r in zip(NAMES, PROGRAMS) if r[3]])
@pytest.mark.parametrize("transform", [lambda f: f, md.jit], ids=["eager", "jit"])
def test_batches_run_as_a_loop(row, transform):
    f, examples, *_ = row
    columns = [numpy.stack(column) for column in zip(*examples)]
    outs = transform(md.vmap(md.autograph(f)))(*columns)
    expected = [f(*args) for args in examples]
    equal(md.tree.map(lambda *xs: numpy.stack(xs), *[md.tree.map(numpy.asarray, x) for x in expected]), outs)


SMOOTH = [row for row in PROGRAMS if row[2]]


@pytest.mark.parametrize("row", SMOOTH, ids=[f.__name__ for f, *_ in SMOOTH])
def test_derivatives_of_compiled_programs(row):
    f, examples, _, _, max_steps = row
    g = md.autograph(f, max_steps=max_steps)
    for args in examples[:2]:
        floats = [k for k in dynamic(args) if numpy.asarray(args[k]).dtype == float]

        def of_floats(*values, args=args, floats=floats):
            changed = dict(zip(floats, values))
            outs = g(*[changed.get(k, x) for k, x in enumerate(args)])
            return [x for x in md.tree.leaves(outs) if md.typeof(x).dtype == float]

        check_grads(of_floats, [args[k] for k in floats], order=1)
        check_grads(md.jit(of_floats), [args[k] for k in floats], order=1)


def test_programs_are_many():
    assert len(PROGRAMS) >= 75
