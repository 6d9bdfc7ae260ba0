"""A pytest plugin that switches the fast paths off: `pytest -p tests.without_fastpath`."""

from minidiff import fastpath
from minidiff.core import Interpreter


def walk_back(equations, cotangents, transpose_equation, consume):
    for eqn in reversed(equations):
        transpose_equation(eqn, cotangents, consume)


def pytest_configure():
    fastpath.RecordedSteps.process = Interpreter.process
    fastpath.walk_back = walk_back
