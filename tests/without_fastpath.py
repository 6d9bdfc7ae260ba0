"""A pytest plugin that switches the fast paths off: `pytest -p tests.without_fastpath`."""

from minidiff.core.interpreter import Interpreter
from minidiff.fast import steps as fastpath


def walk_back(equations, cotangents, transpose_equation, consume):
    for eqn in reversed(equations):
        transpose_equation(eqn, cotangents, consume)


def pytest_configure():
    fastpath.RecordedSteps.process = Interpreter.process
    fastpath.walk_back = walk_back
