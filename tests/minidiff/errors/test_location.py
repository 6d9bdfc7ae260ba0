"""Where operations on tapes come from."""

import itertools

import minidiff as md
import minidiff.numpy as np
from minidiff.core.tape import Equation
from minidiff.errors import location
from minidiff.errors.location import Location
from tests.checks.samples import each


def lines(tape):
    """The text of each equation's line, and whether it is backward; bodies behind their equation."""
    results = []
    for eqn in tape.equations:
        results.append((eqn.source.text, eqn.source.backward))
        results += [line for body in eqn.bodies for line in lines(body)]
    return results


def f(x):
    y = np.sin(x)
    return y * y


SIN, SQUARE = "y = np.sin(x)", "return y * y"


def test_of_a_function_and_its_derivative():
    assert lines(md.make_tape(f)(1.0)) == [(SIN, False), (SQUARE, False)]
    results = lines(md.make_tape(md.grad(f))(1.0))
    assert results[:2] == [(SIN, False), (SQUARE, False)]
    assert set(results[2:]) == {(SQUARE, True), (SIN, True)}
    assert set(lines(md.make_tape(lambda x: md.jvp(f, (x,), (x,)))(1.0))) == {(SIN, False), (SQUARE, False)}
    assert set(lines(md.make_tape(md.vmap(f))(np.ones(3)))) == {(SIN, False), (SQUARE, False)}
    tape = md.make_tape(md.grad(f))(1.0)
    assert lines(md.make_tape(tape)(1.0)) == lines(tape) == results and {*lines(tape.close()[0])} == {*results}


def test_what_is_optimized_keeps_its_lines():
    tape = md.jit(md.grad(f)).program(1.0).tape
    assert {line for line, _ in lines(tape)} == {SIN, SQUARE}
    added = md.jit(lambda x: (x, x)).program(1.0).tape  # a result is copied, which nobody asked for
    assert all(isinstance(eqn, Equation) for eqn in added.equations)


BODIES = {
    "scan": lambda x: md.scan(lambda c, _: (f(c), None), x, None, length=3)[0],
    "cond": lambda x: md.cond(x > 0, lambda: f(x), lambda: x),
    "checkpoint": lambda x: md.checkpoint(f)(x),
    "jit": lambda x: md.jit(f)(x),
}


@each("g", BODIES.values(), BODIES)
def test_bodies(g):
    assert {*lines(md.make_tape(md.grad(g))(1.0))} >= {*itertools.product((SIN, SQUARE), (False, True))}


def test_functions_of_numpy_are_not_the_program():
    tape = md.make_tape(md.grad(lambda x: np.average(x) + np.linalg.norm(np.cov(x, x))))(np.ones(3))
    assert {line.partition("np.average")[0] for line, _ in lines(tape)} == {"tape = md.make_tape(md.grad(lambda x: "}


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


def test_how_a_line_is_written():
    here = Location(__file__, f.__code__.co_firstlineno + 1)
    assert str(here) == f"test_location.py:{here.line}: {SIN}"
    assert str(Location("/nowhere/model.py", 7)) == "model.py:7"
    assert str(Location("<stdin>", 2)) == "line 2"
    assert str(Location("/tmp/ipykernel_77/123.py", 2)) == "line 2"


def test_programs_that_come_with_a_library_are_programs():
    from spmd.parallel.network import dense

    tape = md.make_tape(dense)(np.ones((16, 8)), np.ones((8, 4)), np.zeros(4))
    assert lines(tape) == [("return x @ W + b", False)] * 2


A, B = Location("a.py", 1), Location("b.py", 2, True)


@each("locations, lines", [([A, B, A], [A, B, A]), ([A, A], [A]), ([None, A], [None]), ([A, None], [A, None])])
def test_lines_that_one_operation_serves(locations, lines):
    """Each operand's line; those of another operation are not its operands'."""
    fused, n = location.fuse_locations(locations), len(locations)
    assert location.lines_of(fused) == lines
    assert location.split_location(fused, n) == (lines if len(lines) == n else [fused] * n)
    assert fused is None or location.split_location(fused, 7) == [fused._replace(others=())] * 7
    back = [line and line.on_the_way_back() for line in location.split_location(fused, n)]
    assert location.split_location(fused and fused.on_the_way_back(), n) == back


def test_lines_of_an_operation_that_others_are_merged_into():
    both = location.merge_locations([location.fuse_locations([A, B, A]), A, None])
    assert location.lines_of(both) == [A, B, None]
    assert location.merge_locations([A, A]) == A and location.merge_locations([None]) is None
