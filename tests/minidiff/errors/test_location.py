"""Where operations on tapes come from; `lines.md` shows the lines of some."""

import minidiff as md
import minidiff.numpy as np
from minidiff.core.tape import Equation
from minidiff.errors.location import Location


def f(x):
    y = np.sin(x)
    return y * y


def test_a_derivative_that_is_not_recorded_takes_no_notice(monkeypatch):
    def derivatives(x):
        md.grad(lambda x: np.sort(f(x)).sum() + np.linalg.norm(x) + md.checkpoint(f)(x).sum())(x)
        md.grad(lambda x: (md.grad(lambda x: f(x).sum())(x) ** 2).sum())(x)
        md.vmap(md.grad(f))(x)

    def never():
        raise AssertionError("asked for a location where no tape of a program is written")

    x = np.linspace(0.1, 1.0, 4)
    derivatives(x)  # rules are read off their own tapes when they are first needed
    monkeypatch.setattr("minidiff.core.tape.current_location", never)
    derivatives(x)


def test_a_line_of_this_file():
    here = Location(__file__, f.__code__.co_firstlineno + 1)
    assert str(here) == f"test_location.py:{here.line}: y = np.sin(x)"


def test_an_operation_that_nobody_asked_for_has_no_line():
    added = md.jit(lambda x: (x, x)).program(1.0).tape  # a result is copied
    assert all(isinstance(eqn, Equation) for eqn in added.equations)
