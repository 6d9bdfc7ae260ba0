"""The hidden checks of "Build it yourself": one function for each hole, and three for the whole build.

`python -m notebooks.grade` runs each in a process of its own, in a folder with the student's files in `mine/`. A check
is given `m`: `m.tape.make_tape` is `make_tape` of `mine/tape.py`. It asserts what is true of right answers, and its
messages say what to look at.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy import allclose, array_equal, isclose

from notebooks.build.page import FILES, MINE, fresh, last_line, ring_of, unfilled
from notebooks.build.solution.holes import holes

Check = Callable[[Any], None]
CHECKS: dict[str, Check] = {}

#: What the whole build must do, besides its holes: number -> (what, points).
WHOLE = {
    "8.6": ("the data-parallel network of notebook 12", 4),
    "8.7": ("the JEP's five examples, and their transposes", 5),
    "8.8": ("the network on 2 MPI ranks", 4),
}


def points() -> dict[str, int]:
    """The points of each question, in order."""
    return {**{n: hole.points for n, hole in holes().items()}, **{n: worth for n, (_, worth) in WHOLE.items()}}


class Modules:
    """The student's modules, imported when they are asked for."""

    def __getattr__(self, name: str) -> Any:
        return importlib.import_module(f"mine.{name}")


def judge(number: str) -> str:
    """Return the verdict on the answer to a question, from the files in `mine/`."""
    try:
        _import_pages(number)
        CHECKS[number](Modules())
    except NotImplementedError as error:
        return f"your turn: {error}" + ("" if number in str(error) else f", which {number} needs")
    except AssertionError as error:
        return f"not yet: {error}"
    except BaseException as error:
        missing = _missing(number)
        if missing:
            return f"your turn: {missing}"
        return f"not yet: {_described(number, error)}. {HINTS.get(number, '')}".strip()
    missing = _missing(number, itself=True)
    return f"your turn: {missing}" if missing else "right"


def _import_pages(number: str) -> None:
    """Import the files of the pages up to this question's; those of page 8 are imported when they are needed."""
    for name, page in FILES.items():
        if page <= min(int(number.split(".")[0]), 7):
            importlib.import_module(f"mine.{name}")


def first_wrong_before(number: str) -> str:
    """Return the first hole of the pages before this question's whose check fails, or "" if there is none.

    Each check runs in a process of its own, since one may leave something behind, and has two seconds.
    """
    page = number.split(".")[0]
    for earlier in itertools.takewhile(lambda hole: hole.split(".")[0] != page, holes()):
        child = os.fork()
        if child == 0:
            signal.alarm(2)
            fresh()
            os._exit(judge(earlier) != "right")
        if os.waitpid(child, 0)[1]:
            return earlier
    return ""


def _described(number: str, error: BaseException) -> str:
    """Return an error that an answer raised, and the last line of that answer's file, or of another, on its way."""
    lines = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).parent.name == MINE.name]
    file = holes()[number].file if number in holes() else ""
    lines = [f for f in lines if Path(f.filename).stem == file] or lines
    where = f" (mine/{Path(lines[-1].filename).name}, line {lines[-1].lineno}: {lines[-1].line})" if lines else ""
    return f"{type(error).__name__}: {error}{where}"


def _missing(number: str, itself: bool = False) -> str:
    """Return the empty holes of the pages so far, if this one's check fails; or this hole `itself`."""
    empty = []
    for name, page in FILES.items():
        path = MINE / f"{name}.py"
        if page <= int(number.split(".")[0]):
            if not path.exists():
                return f"{path} is missing: page {page} writes it"
            empty += unfilled(path.read_text())
    if itself:
        return f"hole {number}" if number in empty else ""
    return ", ".join(f"hole {n}" for n in empty)


#: What to look at where an answer raises an error of its own.
HINTS = {
    "1.1": "Each operand is an argument of op.run, and each param a keyword: op.run(*args, **params)",
    "1.3": "It is the current interpreter that processes an operation, with its params in one dictionary",
    "2.2": "NumPy was given a variable: is the recorder current while f runs, and above the *current* interpreter?",
    "2.3": "Apply eqn.op itself, which the current interpreter processes, to what `read` gives. An output may be 7.0",
    "3.2": "The rule runs under the interpreter below; its tangents may be None",
    "3.3": "The tangent goes through the same operation, with the same params",
    "3.4": "dx or dy may be None, which is zero: then there is no such term",
    "4.1": "`jvp` puts its interpreter above the current one: so the recorder is current while you call it",
    "4.2": "x is the operand's type: broadcast_to puts axes of x.shape in again, where `axes` says",
    "4.4": "z = x @ y with shapes [m,p] = [m,k] @ [k,p]: x's cotangent has [m,k], of [m,p] and y's transpose [p,k]",
    "4.6": "A variable that was never used has no cotangent: pop(v, None). Only this tape's own variables become types",
    "5.4": "A collective, one in self.collectives, has no use for `op.run`; it runs once, on all lists of blocks",
    "6.4": "pbroadcast only along axes that x does not vary along yet: axes - x.type.varying",
    "7.1": "NumPy is not needed here: what each rank needs of the whole is a pscatter, and mesh.collectives has it",
    "6.3": "Look at this axis alone: does `varying` have it, and should it? A value may vary along other axes, too",
    "7.2": "`blocks` has those of mesh.ranks alone: blocks[0] is the first of them, whichever rank that is",
    "7.4": "x may be a number or an array, without a `type`: ask typeof(x)",
    "7.5": "Residuals are what the linear tape uses and does not define, linear.free(). The body returns them all",
    "7.6": "The second tape's inputs are the residuals, then those of `linear`: so are its operands and its specs",
    "7.7": "values come in by their own specs, cotangents by out_specs; results leave by the specs of linear operands",
    "8.3": "x has any shape, and its size need not be divisible: ravel, pad, and cut off again at the end",
}


def of(number: str) -> Callable[[Check], Check]:
    """Decorate the check of a question."""

    def add(check: Check) -> Check:
        CHECKS[number] = check
        return check

    return add


class Spy:
    """An interpreter that notes what it is given."""

    def __init__(self) -> None:
        self.seen: list[tuple] = []

    def process(self, op: Any, args: Sequence, params: dict) -> str:
        self.seen.append((op, list(args), params))
        return "processed"


# ---------------------------------------------------------------- 1. tracer and operations


@of("1.1")
def _(m):
    actual = m.tracer.Evaluate().process(m.operations.add, [np.ones(3), 2.0], {})
    assert array_equal(actual, [3.0] * 3), (
        f"add(ones, 2.0) gives {actual}: op.run has each operand as an argument (*args)"
    )
    actual = m.tracer.Evaluate().process(m.operations.sum, [np.ones((2, 3))], {"axes": (0,)})
    assert array_equal(actual, [2.0] * 3), (
        f"sum(x, axes=(0,)) gives {actual}: the params are keyword arguments (**params)"
    )


@of("1.2")
def _(m):
    before, spy = m.tracer.current(), Spy()
    with m.tracer.using(spy):
        assert m.tracer.current() is spy, "in the block, another interpreter is current than the one given to `using`"
    assert m.tracer.current() is before, "after the block, the interpreter is still there: take it off the list"
    with m.tracer.using(spy):
        with m.tracer.using(before):
            pass
        assert m.tracer.current() is spy, (
            "an interpreter can be in the list twice, and the block that ends is that of the *last* one: pop it. "
            "(`remove` takes the first one)"
        )
    try:
        with m.tracer.using(spy):
            raise KeyError
    except KeyError:
        pass
    assert m.tracer.current() is before, (
        "after a block that raised an error, the interpreter is still current, and all that runs later is processed by "
        "it: put the `pop` into a `finally`"
    )


@of("1.3")
def _(m):
    spy, order = Spy(), []
    m.tracer.casts[:] = [lambda op, args, params: order.append("first") or [2 * x for x in args]]
    m.tracer.casts.append(lambda op, args, params: order.append("second") or [x + 1 for x in args])
    with m.tracer.using(spy):
        result = m.operations.sin(5.0, scale=3)
    assert order == ["first", "second"], f"two casts should run, in order: {order or 'none'} did"
    assert spy.seen and spy.seen[0][1] == [11.0], f"casts 2x and x + 1 make 11 of 5; the operands are {spy.seen}"
    assert spy.seen == [(m.operations.sin, [11.0], {"scale": 3})], (
        f"the current interpreter should process (sin, [11.0], {{'scale': 3}}), not {spy.seen}"
    )
    assert result == "processed", f"an operation returns what the interpreter returns, not {result!r}"


@of("1.4")
def _(m):
    o = m.operations
    spy = Spy()
    x, b = (m.tracer.Tracer(spy, m.tracer.Type(shape)) for shape in ((4, 3), (3,)))
    with m.tracer.using(spy):
        args = o.same_shape(o.add, [x, b], {})
    assert args[0] is x, "x has the shape [4,3] already: leave it as it is"
    assert spy.seen, (
        "x:f64[4,3] and b:f64[3] disagree: nothing was inserted, so b's cotangent would have the wrong shape"
    )
    op, operands, params = spy.seen[0]
    assert op is o.broadcast_to and operands == [b], f"broadcast_to should be applied to b, not {op} to {operands}"
    assert tuple(params["shape"]) == (4, 3), f"the common shape is (4, 3), not {params['shape']}"
    assert tuple(params["axes"]) == (0,), (
        f"b:f64[3] becomes f64[4,3] by a new axis at position 0, not {params['axes']}: new axes are the leading ones"
    )
    assert args[1] == "processed", "the operand is replaced by what broadcast_to returns"
    with m.tracer.using(spy):
        args = o.same_shape(o.multiply, [2.0, x], {})
    assert args[0] == 2.0, "the number 2.0 is a constant: leave it"
    s, many = m.tracer.Tracer(spy, m.tracer.Type(())), np.ones((2, 3))
    with m.tracer.using(spy):
        o.same_shape(o.add, [s, many], {})
    assert spy.seen[-1][2] == {"shape": (2, 3), "axes": (0, 1)}, (
        f"a number and an array [2,3]: two new axes, (0, 1), for the number; not {spy.seen[-1][2]}"
    )


@of("1.5")
def _(m):
    class Trace:
        def process(self, op, args, params):
            values = [x.value if isinstance(x, m.tracer.Tracer) else x for x in args]
            return tracer(self, op.run(*values, **params))

    def tracer(interpreter, value):
        created = m.tracer.Tracer(interpreter, m.tracer.Type(np.shape(value)))
        created.value = value
        return created

    cases = {
        "x + 3": (lambda x: x + 3.0, 5.0),
        "3 + x": (lambda x: 3.0 + x, 5.0),
        "x * 3": (lambda x: x * 3.0, 6.0),
        "3 * x": (lambda x: 3.0 * x, 6.0),
        "x - 3": (lambda x: x - 3.0, -1.0),
        "3 - x": (lambda x: 3.0 - x, 1.0),
    }
    trace = Trace()
    with m.tracer.using(trace):
        for name, (f, right) in cases.items():
            try:
                actual = f(tracer(trace, 2.0)).value
            except TypeError as error:
                raise (
                    NotImplementedError("hole 1.5")
                    if _missing("1.5", itself=True)
                    else AssertionError(f"{name}: {error}. Which method does Python call for it?")
                ) from None
            assert isclose(actual, right), f"{name} is {actual} where x is 2, not {right}: which operand comes first?"
        a, b = np.arange(6.0).reshape(2, 3), np.arange(3.0).reshape(3, 1)
        assert array_equal((tracer(trace, a) @ tracer(trace, b)).value, a @ b), "x @ y is not the matrix product"


# ---------------------------------------------------------------- 2. tape


def ops(tape: Any) -> list[str]:
    """The names of the operations of a tape, with those of its bodies."""
    actual = []
    for eqn in tape.equations:
        actual.append(eqn.op.name)
        for body in eqn.params.values():
            actual += ops(body) if hasattr(body, "equations") else []
    return actual


@of("2.1")
def _(m):
    below = Spy()
    record = m.tape.Record(below)
    x, stranger = (m.tracer.Tracer(r, m.tracer.Type((3,))) for r in (record, m.tape.Record(below)))
    with m.tracer.using(record):
        assert record.process(m.operations.sin, [stranger], {}) == "processed" and not record.equations, (
            "a variable of another recorder is a constant here: sin of it should go to the interpreter below"
        )
        assert record.process(m.operations.sin, [2.0], {}) == "processed", "sin(2.0) should go to the interpreter below"
    y = record.process(m.operations.multiply, [x, 2.0], {})
    assert len(record.equations) == 1, f"x * 2.0 should be one equation; there are {len(record.equations)}"
    assert m.tracer.owner(y) is record and y.type == x.type, f"the result should be the recorder's f64[3], not {y!r}"
    (eqn,) = record.equations
    assert eqn.op is m.operations.multiply and eqn.inputs == [x, 2.0] and eqn.outputs == [y], (
        f"an Equation has op, inputs, params, outputs, here multiply, [x, 2.0], {{}}, [the result]; not {eqn}"
    )
    record.process(m.operations.multiply, [2.0, x], {})
    assert len(record.equations) == 2, "2.0 * x is recorded, too, though its first operand is a number"
    varying = m.tracer.Tracer(record, m.tracer.Type((3,), frozenset("i")))
    z = record.process(m.operations.sum, [varying], {"axes": (0,)})
    assert str(z.type) == "f64[]{i}", f"the sum of a f64[3]{{i}} is a f64[]{{i}}, not {z.type}: `result_types` says it"
    assert [eqn.params for eqn in record.equations] == [{}, {}, {"axes": (0,)}], (
        f"the equations, in order, have the params that `process` was given; not {record.equations}"
    )
    pair = m.tracer.Operation("pair", lambda x: [x, x], lambda x: [x, x], many=True)
    outs = record.process(pair, [x], {})
    assert isinstance(outs, list) and len(outs) == 2, "an operation with `many` results returns the list of tracers"
    assert len(below.seen) == 2, "what has a variable of this recorder is recorded, and not processed below as well"


@of("2.2")
def _(m):
    o = m.operations
    tape = m.tape.make_tape(lambda x, y: [o.sin(x) * y, x], np.ones(3), np.ones(3))
    assert ops(tape) == ["sin", "multiply"], f"sin(x) * y is recorded as {ops(tape)}: is the recorder current?"
    assert [v.type.shape for v in tape.inputs] == [(3,), (3,)], f"two inputs f64[3]; not {tape.inputs}"
    assert tape.outputs == [tape.equations[1].outputs[0], tape.inputs[0]], (
        "the outputs are what f returns, in a list, as `as_list` makes it"
    )
    varying = m.tracer.Type((3,), frozenset("i"))
    (actual,) = m.tape.make_tape(o.sin, varying).inputs
    assert actual.type == varying, (
        f"for an argument of the type {varying}, there is an input of this type; not {actual.type}"
    )
    one = m.tape.make_tape(o.sin, 2.0)
    assert isinstance(one.outputs, list) and len(one.outputs) == 1, "one result is a list with one output: as_list"
    nested = m.tape.make_tape(lambda x: m.tape.make_tape(lambda y: y * o.sin(x), x).equations[0].inputs[1], 2.0)
    assert ops(nested) == ["sin"], (
        "the inner tape multiplies by sin(x), where x is a variable of the outer one: the recorder is above the "
        "*current* interpreter, so that the outer one records the sin"
    )
    assert type(m.tracer.current()) is m.tracer.Evaluate, "afterwards the recorder is still current"


@of("2.3")
def _(m):
    o = m.operations
    tape = m.tape.make_tape(lambda x, y: [o.sin(x) * y + 2.0 * x, 7.0, x], np.ones(3), 2.0)
    actual = m.tape.evaluate(tape, np.arange(3.0), 5.0)
    assert isinstance(actual, list) and len(actual) == 3, f"three outputs, in a list; not {actual}"
    assert allclose(actual[0], np.sin(np.arange(3.0)) * 5 + 2 * np.arange(3.0)), (
        f"sin(x) * y + 2 * x is wrong: {actual[0]}"
    )
    assert actual[1] == 7.0, "an output may be a constant: `read` gives that, too"
    x, y = np.arange(6.0).reshape(2, 3), np.ones((3, 1))
    (product,) = m.tape.evaluate(m.tape.make_tape(o.matmul, x, y), x, y)
    assert array_equal(product, x @ y), "x @ y: the operands of an equation have an order"
    pair = m.tracer.Operation("pair", lambda x: [x, 3 * x], lambda x: [x, x], many=True)
    actual = m.tape.evaluate(m.tape.make_tape(pair, 1.0), 2.0)
    assert actual == [2.0, 6.0], f"an operation with `many` results gives a list, one for each output; not {actual}"
    again = m.tape.make_tape(lambda x: m.tape.evaluate(tape, x, 3.0), np.ones(3))
    assert ops(again)[:1] == ["sin"], (
        "evaluated under a recorder, a tape should be recorded again: apply eqn.op(...), not NumPy's eqn.op.run(...)"
    )


# ---------------------------------------------------------------- 3. forward


def numerical(f: Callable, x: float, h: float = 1e-5) -> float:
    return (f(x + h) - f(x - h)) / (2 * h)


@of("3.1")
def _(m):
    forward, other = m.forward.JVP(None), m.forward.JVP(None)
    local, others = (m.tracer.Tracer(jvp, m.tracer.Type(), (x, 1.0)) for jvp, x in ((forward, 2.0), (other, 3.0)))
    primals, tangents = forward.split([local, 5.0, others])
    assert primals[0] == 2.0 and tangents[0] == 1.0, f"the content (2.0, 1.0): not {primals[0]}, {tangents[0]}"
    assert primals[1] == 5.0 and tangents[1] is None, "5.0 is a constant: its tangent is zero, which is None"
    assert primals[2] is others and tangents[2] is None, (
        "a tracer of another JVP is a constant to this one. Otherwise nested derivatives are confused"
    )


@of("3.2")
def _(m):
    o = m.operations
    (y,), (dy,) = m.forward.jvp(lambda x: o.sin(x), [2.0], [10.0])
    assert isclose(y, np.sin(2.0)), f"sin(2.0) is {y}: join the result and its tangent"
    assert isclose(dy, 10 * np.cos(2.0)), f"the derivative of sin at 2, times 10, is {10 * np.cos(2.0):.4f}; not {dy}"
    seen = []
    rules = m.forward.jvp_rules
    pair = m.tracer.Operation("pair", None, None, many=True)
    rules[pair] = lambda primals, tangents: seen.append(m.tracer.current()) or ([1.0, 2.0], [3.0, None])
    outs, tangents = m.forward.jvp(lambda x: pair(x), [2.0], [1.0])
    assert isinstance(seen[0], m.tracer.Evaluate), "a rule runs under the interpreter *below* this one: use `using`"
    assert (outs, tangents) == ([1.0, 2.0], [3.0, 0.0]), f"with many results, join each pair; not {outs}, {tangents}"
    assert isinstance(m.tracer.current(), m.tracer.Evaluate), "afterwards, another interpreter is current than before"


@of("3.3")
def _(m):
    o = m.operations
    out, tangent = m.forward.linear(o.sum, [np.ones(3)], [np.arange(3.0)], axes=(0,))
    assert out == 3.0, f"the sum of the primal is 3.0, not {out}"
    assert np.shape(tangent) == () and tangent == 3.0, (
        f"the tangent of sum(x) is the sum of the tangent, here 3.0, not {tangent}: the same operation, the same params"
    )
    assert m.forward.linear(o.sum, [np.ones(3)], [np.full(3, 5.0)], axes=(0,))[1] == 15.0, (
        "linear(sum): the tangent of the result is the sum of the tangent of x, and not the sum of x"
    )


@of("3.4")
def _(m):
    x, y, dx, dy = np.random.default_rng(0).normal(size=(4, 2, 2))
    rule = partial(m.forward.product, m.operations.matmul)
    out, tangent = rule([x, y], [dx, None])
    assert allclose(out, x @ y), "the result is op(x, y), with x in front, as for a product of matrices"
    assert allclose(tangent, dx @ y), "where only x has a tangent, it is op(dx, y)"
    assert allclose(rule([x, y], [None, dy])[1], x @ dy), "where only y has a tangent, it is op(x, dy), in this order"
    tape = m.tape.make_tape(lambda dx: rule([x, y], [dx, None])[1], dx)
    assert ops(tape) == ["matmul"], f"a tangent that is None, not 0, adds no term: op(dx, y), and not {ops(tape)}"
    assert allclose(rule([x, y], [dx, dy])[1], dx @ y + x @ dy), "where both have one, it is op(dx, y) + op(x, dy)"


@of("3.5")
def _(m):
    o, rules = m.operations, m.forward.jvp_rules
    names = ["broadcast_to", "transpose", "multiply", "matmul", "sin", "cos"]
    missing = [name for name in names if getattr(o, name) not in rules]
    if missing:
        raise NotImplementedError(f"hole 3.5: no rule for {', '.join(missing)}")
    cases = {
        "sin": (o.sin, np.sin),
        "cos": (o.cos, np.cos),
        "x * cos(x)": (lambda x: x * o.cos(x), lambda x: x * np.cos(x)),
    }
    for name, (f, numpys) in cases.items():
        (_, (actual,)), right = m.forward.jvp(f, [0.7], [1.0]), numerical(numpys, 0.7)
        assert isclose(actual, right, rtol=1e-6), f"the derivative of {name} at 0.7 is {right:.6f}, not {actual:.6f}"
    second = lambda x: m.forward.jvp(o.cos, [x], [1.0])[1][0]  # noqa: E731
    try:
        (_, (actual,)) = m.forward.jvp(second, [0.7], [1.0])
    except TypeError as error:
        raise AssertionError(
            f"the derivative of cos is differentiated again: write it with operations. {error}"
        ) from None
    assert isclose(actual, -np.cos(0.7)), f"the second derivative of cos at 0.7 is {-np.cos(0.7):.6f}, not {actual}"
    X, Y = np.random.default_rng(1).normal(size=(2, 2, 2))
    f = {
        "matmul": (lambda x: x @ Y, X @ Y),
        "broadcast_to": (lambda x: o.broadcast_to(x, shape=(3, 2, 2), axes=(0,)), np.stack([X] * 3)),
        "transpose": (lambda x: o.transpose(x), X.T),
    }
    for name, (g, right) in f.items():
        (_, (actual,)) = m.forward.jvp(g, [np.ones((2, 2))], [X])
        assert array_equal(actual, right), f"{name} is linear in x: its tangent is {name} of the tangent"


# ---------------------------------------------------------------- 4. linearize and transpose


@of("4.1")
def _(m):
    o = m.operations
    results, tape = m.reverse.linearize(lambda x, y: o.sin(x) * y, 2.0, 3.0)
    assert isclose(results[0], 3 * np.sin(2.0)), f"the result is {results}: a list of values, here 3 sin 2"
    assert len(tape.inputs) == 2, f"one input for each tangent, two; not {len(tape.inputs)}"
    assert tape.outputs and m.tracer.owner(tape.outputs[0]), "the tape's output is the *tangent* of the result"
    assert "sin" not in ops(tape) and "cos" not in ops(tape), (
        f"the tape is {ops(tape)}: sin and cos are of primals, which are values, so they are not recorded. The "
        "JVP is above the recorder, and only the tangents are the recorder's variables"
    )
    (actual,) = m.tape.evaluate(tape, 1.0, 0.0)
    assert isclose(actual, 3 * np.cos(2.0)), (
        f"in the direction (1, 0) the derivative is {3 * np.cos(2.0):.4f}, not {actual}"
    )
    assert isclose(m.tape.evaluate(tape, 0.0, 1.0)[0], np.sin(2.0)), "in the direction (0, 1) it is sin 2"
    assert type(m.tracer.current()) is m.tracer.Evaluate, "afterwards, another interpreter is current than before"
    varying = m.tracer.Type((3,), frozenset("i"))
    types = []
    m.tape.make_tape(lambda x: types.extend(m.reverse.linearize(o.sin, x)[1].inputs) or x, varying)
    assert [v.type for v in types] == [varying], f"a tangent of {varying} has that type, not {types[0].type}"


def transposes(m: Any, number: str, name: str, f: Callable, *shapes: tuple) -> None:
    """The inner-product identity, for a function that is linear in each argument: one of them at a time."""
    if getattr(m.operations, name) not in m.reverse.transpose_rules:
        raise NotImplementedError(f"hole {number}: no rule for {name}")
    rng = np.random.default_rng(0)
    args = [rng.normal(size=shape) for shape in shapes]
    for k, x in enumerate(args):
        tape = m.tape.make_tape(lambda x, k=k: f(*args[:k], x, *args[k + 1 :]), x)
        (y,) = m.tape.evaluate(tape, x)
        ct = rng.normal(size=np.shape(y))
        (eqn,) = tape.equations
        operands = [v.type if m.tracer.owner(v) else v for v in eqn.inputs]
        actual = m.reverse.transpose_rules[eqn.op](ct, *operands, **eqn.params)
        assert isinstance(actual, list) and len(actual) == len(operands), f"{name}: a list, one an operand; {actual}"
        back = actual[k if len(operands) > 1 else 0]
        assert np.shape(back) == np.shape(x), (
            f"{name}: the operand has the shape {np.shape(x)}, its cotangent {np.shape(back)}. They must have the same"
        )
        left, right = np.vdot(ct, y), np.vdot(back, x)
        assert isclose(left, right), (
            f"{name}: <ct, f(x)> is {left:.4f}, <transposed(ct), x> is {right:.4f}: they must agree"
        )


@of("4.2")
def _(m):
    for axes in ((0,), (1,), (0, 2), (0, 1, 2)):
        transposes(m, "4.2", "sum", lambda x, axes=axes: m.operations.sum(x, axes=axes), (2, 3, 4))


@of("4.3")
def _(m):
    for axes, shape in (((0,), (3, 4)), ((1,), (2, 4)), ((0, 2), (3,))):

        def f(x, axes=axes):
            return m.operations.broadcast_to(x, shape=(2, 3, 4), axes=axes)

        transposes(m, "4.3", "broadcast_to", f, shape)


@of("4.4")
def _(m):
    transposes(m, "4.4", "matmul", lambda x, y: m.operations.matmul(x, y), (2, 3), (3, 4))


def a_linear_tape(m: Any, f: Callable, *shapes: tuple) -> Any:
    return m.tape.make_tape(f, *(m.tracer.Type(shape) for shape in shapes))


@of("4.5")
def _(m):
    tape = a_linear_tape(m, lambda x: x + x * 3.0, ())
    (actual,) = m.reverse.backward_pass(tape, [1.0])
    assert isclose(actual, 4.0), f"x + 3x: the cotangent of x is 1 + 3 = 4, not {actual}: *add* those of each use"
    tape = a_linear_tape(m, lambda x: [x * 3.0, x], ())
    assert m.reverse.backward_pass(tape, [2.0, None]) == [6.0], (
        "outputs 3x and x, cotangents 2 and None (zero): 6. If `known` has a cotangent, and the next is None, keep it"
    )
    assert m.reverse.backward_pass(tape, [None, 2.0]) == [2.0], "outputs 3x and x, cotangents None (zero) and 2: 2"


@of("4.6")
def _(m):
    o = m.operations
    tape = a_linear_tape(m, lambda x, y: (x * 2.0 + y) * 5.0, (3,), (3,))
    x, y = m.reverse.backward_pass(tape, [np.ones(3)])
    assert allclose(x, 10.0) and allclose(y, 5.0), (
        f"(2x + y) * 5: the cotangents are 10 and 5, not {x} and {y}. (Zeros? Go through the equations in reverse.)"
    )
    tape = a_linear_tape(m, lambda x, y: [x * 2.0, y * 3.0], (), ())
    assert m.reverse.backward_pass(tape, [1.0, None]) == [2.0, 0.0], (
        "an equation with a cotangent of None is passed over"
    )
    pair = m.tracer.Operation("pair", lambda x: [x, x], lambda x: [x, x], many=True)
    m.reverse.transpose_rules[pair] = lambda cts, x: [cts[0] + cts[1]]
    tape = a_linear_tape(m, lambda x: pair(x), ())
    assert m.reverse.backward_pass(tape, [1.0, 2.0]) == [3.0], (
        "an operation with `many` results has a list of cotangents"
    )
    assert m.reverse.backward_pass(tape, [1.0, None]) == [1.0], "in the list of cotangents, zeros are in place of None"
    outer = m.tape.make_tape(lambda w: m.reverse.backward_pass(a_linear_tape(m, lambda x: x * w, ()), [1.0]), 2.0)
    assert ops(outer) == ["multiply"], (
        "in `x * w`, where w is a variable of *another* tape, w is given as it is, and not as a type"
    )
    deep = m.reverse.grad(lambda x: o.sin(x * x))(1.5)[0] if not _missing("4.7") else None
    assert deep is None or isclose(deep, 3 * np.cos(2.25)), f"the gradient of sin(x²) at 1.5 is {3 * np.cos(2.25):.4f}"


@of("4.7")
def _(m):
    o = m.operations
    value, gradients = m.reverse.value_and_grad(lambda x, y: o.total(o.sin(x) * y), np.ones(3), np.arange(3.0))
    assert np.shape(value) == (), (
        f"the value is a number, not {value}: `linearize` returns a list of results, here of one"
    )
    assert isclose(value, 3 * np.sin(1.0)), f"the value is {value}, not {3 * np.sin(1.0):.4f}"
    assert len(gradients) == 2, "one gradient for each argument, in a list"
    assert allclose(gradients[0], np.cos(1.0) * np.arange(3.0)), (
        f"the gradient in x is cos(x) * y, not {gradients[0]}: the cotangent of the value is 1"
    )
    assert allclose(gradients[1], np.sin(1.0)), "the gradient in y is sin(x)"
    nth = lambda f: lambda x: m.reverse.grad(f)(x)[0]  # noqa: E731
    assert isclose(nth(nth(nth(lambda x: x * x * x * x)))(2.0), 48.0), "the third derivative of x⁴ at 2 is 48"
    confused = nth(lambda x: x * nth(lambda y: x + y)(x))(3.0)
    assert isclose(confused, 1.0), f"d/dx of x * (d/dy of x + y at y = x) is 1, not {confused}: perturbation confusion"


# ---------------------------------------------------------------- 5. ranks and collectives

BLOCKS = [np.arange(8.0).reshape(4, 2) + 100 * rank for rank in range(4)]


def blocks_agree(actual: Any, right: Sequence, label: str) -> None:
    assert isinstance(actual, (list, tuple)) and len(actual) == len(right), (
        f"{label}: a list with {len(right)} results, one for each rank; not "
        f"{f'{len(actual)} of them' if isinstance(actual, list) else type(actual).__name__}"
    )
    for rank, (a, b) in enumerate(zip(actual, right)):
        assert np.shape(a) == np.shape(b), f"{label}: rank {rank} has the shape {np.shape(a)}, not {np.shape(b)}"
        assert allclose(a, b), f"{label}: rank {rank} has\n{a}, not\n{b}"


@of("5.1")
def _(m):
    blocks_agree(m.ranks.run_psum(BLOCKS), [np.add.reduce(BLOCKS)] * 4, "psum")


@of("5.2")
def _(m):
    blocks_agree(m.ranks.run_all_gather(BLOCKS), [np.concatenate(BLOCKS)] * 4, "all_gather")


@of("5.3")
def _(m):
    total = np.add.reduce(BLOCKS)
    right = [total[r : r + 1] for r in range(4)]
    blocks_agree(m.ranks.run_psum_scatter(BLOCKS), right, "psum_scatter")


@of("5.4")
def _(m):
    o, mesh = m.operations, m.ranks.Mesh(4)
    (actual,) = mesh.run(lambda x: o.sin(x) * 2.0, BLOCKS)
    blocks_agree(actual, [2 * np.sin(x) for x in BLOCKS], "sin(x) * 2, on each rank alone")
    assert not mesh.calls, f"no collective ran, but {dict(mesh.calls)} were counted"
    (actual,) = mesh.run(lambda x: x + m.ranks.psum(x, axis="i"), BLOCKS)
    blocks_agree(actual, [x + np.add.reduce(BLOCKS) for x in BLOCKS], "x + psum(x)")
    assert mesh.calls == {"psum": 1}, f"one psum, counted once, not once a rank; {dict(mesh.calls)}"
    mesh.ranks = [1]
    (actual,) = mesh.run(lambda x: o.sin(x) * 2.0, BLOCKS[1:2])
    blocks_agree(actual, [2 * np.sin(BLOCKS[1])], "sin(x) * 2 where only rank 1 is in this process (`self.ranks`)")


# ---------------------------------------------------------------- 6. types and pbroadcast

#: What is right of each collective, and why.
SIX = {
    "psum": (True, False, "pbroadcast", "ranks have different terms, and the same sum"),
    "pbroadcast": (False, True, "psum", "from the same value to one that may differ"),
    "all_gather": (
        True,
        True,
        "psum_scatter",
        "all ranks have the same, but its type says `varying`: then its transpose is psum_scatter, which gives each "
        "rank its block of a *sum*",
    ),
    "psum_scatter": (True, True, "all_gather", "ranks have different terms, and different blocks of the sum"),
    "all_gather_invariant": (True, False, "pscatter", "ranks have different blocks, and the same whole"),
    "pscatter": (False, True, "all_gather_invariant", "ranks have the same whole, and different blocks"),
}


def all_in(m: Any, table: Any, names: Sequence[str], number: str) -> None:
    missing = [name for name in names if getattr(m.variance, name) not in table]
    if missing:
        raise NotImplementedError(f"hole {number}: nothing for {', '.join(missing)}")


@of("6.1")
def _(m):
    all_in(m, m.ranks.collectives, ["pbroadcast", "pscatter"], "6.1")
    same = [np.arange(8.0).reshape(4, 2)] * 4
    blocks_agree(m.ranks.collectives[m.variance.pbroadcast](same), same, "pbroadcast")
    right = [same[0][rank : rank + 1] for rank in range(4)]
    blocks_agree(m.ranks.collectives[m.variance.pscatter](same), right, "pscatter")


@of("6.2")
def _(m):
    all_in(m, m.variance.table, SIX, "6.2")
    words = {True: "varying", False: "invariant"}
    for name, (takes, returns, back, why) in SIX.items():
        *states, transpose = m.variance.table[getattr(m.variance, name)]
        assert states == [takes, returns], f"{name}: not {states}; {why}"
        assert transpose is getattr(m.variance, back), (
            f"{name} takes {words[takes]} values and returns {words[returns]} ones; its transpose takes "
            f"{words[returns]} ones and returns {words[takes]} ones. It is {back}, not {transpose}"
        )
        arguments = m.tracer.Type((4,), frozenset("i" if returns else ""))
        rule = partial(m.reverse.transpose_rules[getattr(m.variance, name)], x=None, axis="i")
        assert ops(m.ranks.Mesh(4).trace(rule, [arguments])) == [back], f"{name}: its transpose rule is not {back}"


@of("6.3")
def _(m):
    v = m.variance
    all_in(m, v.table, SIX, "6.2")
    psum, pbroadcast, scatter = (partial(v.collective_variance, op) for op in (v.psum, v.pbroadcast, v.psum_scatter))
    assert psum(frozenset({"i", "j"}), axis="i") == {"j"}, (
        f"psum over i of a value that varies along i and j varies along j; not {psum(frozenset('ij'), axis='i')}"
    )
    assert pbroadcast(frozenset({"j"}), axis="i") == {"i", "j"}, "pbroadcast along i adds i to the set, and keeps j"
    assert pbroadcast(frozenset({"j"}), axis="rows") == {"j", "rows"}, "an axis is one element of the set: {'rows'}"
    assert scatter(frozenset({"i"}), axis="i") == {"i"}, "psum_scatter: varying, and it stays varying"
    for name, f, wrong in (("psum", psum, frozenset()), ("pbroadcast", pbroadcast, frozenset({"i"}))):
        try:
            actual = f(wrong, axis="i")
        except TypeError as error:
            assert name in str(error) and re.search(r"\bi\b", str(error)), (
                f"the error should name {name} and the axis: {error}"
            )
        else:
            state = "varying" if wrong else "invariant"
            raise AssertionError(f"{name} of an {state} value should be a TypeError; its result is {set(actual)}")


@of("6.4")
def _(m):
    mesh = m.ranks.Mesh(4)
    T = m.tracer.Type
    varying, invariant = T((3,), frozenset({"i"})), T((3,))
    tape = mesh.trace(lambda w, x: w * x + w, [invariant, varying])
    assert ops(tape).count("pbroadcast") >= 1, f"w * x, where x varies and w does not: no pbroadcast in {ops(tape)}"
    assert ops(tape).count("pbroadcast") == 1, (
        f"w is used twice, and gets {ops(tape).count('pbroadcast')} pbroadcasts, and so many all-reduces later. "
        "Keep the result in w.varied"
    )
    assert tape.outputs[0].type == varying, f"the result's type is {tape.outputs[0].type}, not {varying}"
    tape = mesh.trace(lambda w, v: w * v, [invariant, invariant])
    assert ops(tape) == ["multiply"], f"two invariant operands agree: nothing to insert, but it is {ops(tape)}"
    tape = mesh.trace(lambda x, y: x * y, [varying, varying])
    assert ops(tape) == ["multiply"], f"two varying operands agree: nothing to insert, but it is {ops(tape)}"
    for arguments in (invariant, varying):
        (both,) = mesh.trace(lambda w: m.variance.vary(w, {"i", "j"}), [arguments]).outputs
        assert both.type.varying == {"i", "j"}, f"vary({arguments}, {{'i', 'j'}}) is a f64[3]{{i,j}}, not {both.type}"
    w, v = (m.tracer.Tracer(m.tape.Record(Spy()), invariant) for _ in range(2))
    with m.tracer.using(w.interpreter):
        first = m.variance.vary(w, frozenset({"i"}))
    with m.tracer.using(v.interpreter):
        second = m.variance.vary(v, frozenset({"i"}))
    assert first.interpreter is w.interpreter and second.interpreter is v.interpreter, (
        "two values share a pbroadcast: what is kept belongs to one value, x.varied"
    )


# ---------------------------------------------------------------- 7. shard_map


@of("7.1")
def _(m):
    mesh, P, x = m.ranks.Mesh(2), m.shard_map.P, np.arange(24.0).reshape(4, 6)
    blocks_agree(m.shard_map.split(x, P("i"), mesh), [x[:2], x[2:]], "P('i') splits dimension 0")
    blocks_agree(m.shard_map.split(x, P(), mesh), [x, x], "P() gives every rank the whole")
    mesh.ranks, mesh.collectives = [1], {m.variance.pscatter: lambda blocks: [x[2:] for block in blocks]}
    blocks_agree(m.shard_map.split(x, P(), mesh), [x], "P(), where this process runs rank 1 alone")
    blocks_agree(
        m.shard_map.split(x, P("i"), mesh),
        [x[2:]],
        "where this process runs rank 1 alone (mesh.ranks is [1]), by the pscatter in mesh.collectives",
    )


@of("7.2")
def _(m):
    mesh, P, x = m.ranks.Mesh(2), m.shard_map.P, np.arange(24.0).reshape(4, 6)
    for spec, blocks in {P("i"): [x[:2], x[2:]], P(): [x, x]}.items():
        actual = m.shard_map.unsplit(blocks, spec, mesh)
        assert np.shape(actual) == x.shape, f"{spec}: the whole has the shape {x.shape}, not {np.shape(actual)}"
        assert array_equal(actual, x), f"{spec}: the blocks are not put together along dimension 0"
    mesh.ranks, mesh.collectives = [1], {m.ranks.all_gather: lambda blocks: [x for block in blocks]}
    assert array_equal(m.shard_map.unsplit([x], P(), mesh), x), "by P(), where this process runs rank 1 only: its block"
    assert array_equal(m.shard_map.unsplit([x[2:]], P("i"), mesh), x), (
        "where this process has one block only, the all_gather in mesh.collectives has those of all ranks"
    )


@of("7.3")
def _(m):
    mesh, P, T = m.ranks.Mesh(4, "rows"), m.shard_map.P, m.tracer.Type
    mesh.ranks = [1]  # as on page 8
    for spec, right in ((P("rows"), T((2, 12), frozenset({"rows"}))), (P(), T((8, 12)))):
        actual = m.shard_map.local_type(np.ones((8, 12)), spec, mesh)
        assert str(actual) == str(right), f"f64[8,12] by {spec} on 4 ranks: a block has the type {right}, not {actual}"


@of("7.4")
def _(m):
    mesh, P, T = m.ranks.Mesh(4), m.shard_map.P, m.tracer.Type
    promised = m.shard_map.as_promised
    tape = mesh.trace(lambda x: promised(x, P("i"), mesh), [T((3,))])
    assert ops(tape) == ["pbroadcast"], (
        "an invariant result whose spec is P('i') is made varying, because its cotangent comes in blocks that differ; "
        f"recorded is {ops(tape)}"
    )
    assert str(tape.outputs[0].type) == "f64[3]{i}", (
        f"the value that is made varying is returned, not {tape.outputs[0]}"
    )
    assert ops(mesh.trace(lambda x: promised(x, P(), mesh), [T((3,))])) == [], (
        "an invariant result by P() stays as it is"
    )
    assert promised(2.0, P("i"), mesh) == 2.0, "a constant is not a Tracer: it stays"
    assert array_equal(promised(np.ones(2), P(), mesh), np.ones(2)), "a constant by P() stays, too: return it as it is"
    try:
        mesh.trace(lambda x: promised(x, P(), mesh), [T((3,), frozenset("i"))])
    except TypeError as error:
        assert re.search(r"\bi\b", str(error).replace("{i}", "")) and str(P()) in str(error), (
            f"the error should name the axis and {P()}: {error}"
        )
    else:
        raise AssertionError(
            "a result of type f64[3]{i} may differ from rank to rank: P() promises that it does not. No error"
        )


def by_examples(m: Any, size: int = 4) -> tuple[Callable, np.ndarray]:
    """A loss of w, with the examples split over the ranks; and the examples."""
    o, P = m.operations, m.shard_map.P
    x = np.linspace(0.0, 1.0, 4 * size)
    loss = m.shard_map.shard_map(
        lambda w, x: m.ranks.psum(o.total(o.sin(w * x)), axis="i"), m.ranks.Mesh(size), [P(), P("i")], P()
    )
    return lambda w: loss(w, x), x


@of("7.5")
def _(m):
    loss, x = by_examples(m)
    (value,), (tangent,) = m.forward.jvp(loss, [0.5], [1.0])
    assert isclose(value, np.sum(np.sin(0.5 * x))), f"the loss is {np.sum(np.sin(0.5 * x)):.6f}, not {value}"
    right = np.sum(np.cos(0.5 * x) * x)
    assert tangent is not None and isclose(tangent, right), f"its derivative in w is {right:.6f}, not {tangent}"
    (first, second) = m.tape.make_tape(lambda w: m.forward.jvp(loss, [w], [1.0])[1], 0.5).equations
    body = second.params["tape"]
    assert "sin" not in ops(body) and "cos" not in ops(body), (
        f"the second shard_map is linear in tangents, and computes {ops(body)}: sin and cos are the first one's"
    )
    forward = ops(first.params["tape"])
    assert forward.count("sin") == 1, f"the body is run once, by `linearize`, which gives results, too; but: {forward}"
    f = m.shard_map.shard_map(
        lambda w, x: m.operations.sin(w * x), m.ranks.Mesh(4), [m.shard_map.P(), m.shard_map.P("i")], m.shard_map.P("i")
    )
    _, (tangent,) = m.forward.jvp(lambda x: f(0.5, x), [x], [np.ones(16)])
    assert allclose(tangent, 0.5 * np.cos(0.5 * x)), "sin(w * x), where x alone is active: `compress(blocks, active)`"
    names = list(body.inputs)
    assert len(names) == len(set(names)), "a residual that is used twice is one input, not two"
    assert len(first.outputs) == 1 + len(names) - 1, (
        f"the first shard_map returns the result and {len(first.outputs) - 1} residuals; the second one uses "
        f"{len(names) - 1}"
    )


@of("7.6")
def _(m):
    mesh, P = m.ranks.Mesh(4), m.shard_map.P
    f = m.shard_map.shard_map(lambda W, x: x @ W, mesh, [P(), P("i")], P("i"))
    rng = np.random.default_rng(0)
    W, x = rng.normal(size=(3, 2)), rng.normal(size=(8, 3))
    for name, g, v, right in (
        ("W", lambda W: f(W, x), W, x @ W),
        ("x", lambda x: f(W, x), x, x @ W),
        ("both", lambda W: f(W, x @ (W @ m.operations.transpose(W))), W, 3 * x @ W @ W.T @ W),
    ):
        (y,), tape = m.reverse.linearize(g, v)
        assert allclose(y, g(v)), f"x @ W in {name}: the result is wrong. It is outs[:n]"
        (tangent,) = m.tape.evaluate(tape, v)
        assert np.shape(tangent) == (8, 2), (
            f"x @ W in {name}: its tangent has the shape (8, 2), not {np.shape(tangent)}"
        )
        assert allclose(tangent, right), f"x @ W in {name}: the tangent in the direction of {name} is wrong"
        (second,) = [eqn for eqn in tape.equations if eqn.op is m.shard_map.shard_map_p]
        assert m.shard_map.STAY in second.params["in_specs"] or name == "x", "a residual that varies comes in by STAY"
    square = m.shard_map.shard_map(lambda w: w * w, mesh, [P()], P())
    assert m.forward.jvp(square, [3.0], [1.0]) == ([9.0], [6.0]), "w * w, invariant: its residuals come in by `stay`"


@of("7.7")
def _(m):
    mesh, P = m.ranks.Mesh(4), m.shard_map.P
    f = m.shard_map.shard_map(lambda W, x: x @ W, mesh, [P(), P("i")], P("i"))
    rng = np.random.default_rng(0)
    W, x, ct = rng.normal(size=(3, 2)), rng.normal(size=(8, 3)), rng.normal(size=(8, 2))
    _, tape = m.reverse.linearize(lambda W: f(W, x), W)
    (actual,) = m.reverse.backward_pass(tape, [ct])
    assert np.shape(actual) == (3, 2), (
        f"the cotangent of W:f64[3,2] has the shape {np.shape(actual)}: by which spec does it leave?"
    )
    assert allclose(actual, x.T @ ct), "x @ W, linear in W: the cotangent of W is x.T @ ct, a sum over the ranks"
    _, tape = m.reverse.linearize(lambda x: f(W, x), x)
    (actual,) = m.reverse.backward_pass(tape, [ct])
    assert allclose(actual, ct @ W.T), "x @ W, linear in x: the cotangent of x is ct @ W.T, split as x is"
    loss, x = by_examples(m)
    nth = lambda f: lambda x: m.reverse.grad(f)(x)[0]  # noqa: E731
    assert isclose(nth(loss)(0.5), np.sum(np.cos(0.5 * x) * x)), "the gradient of sum(sin(w x)) in w is sum(cos(w x) x)"
    assert isclose(nth(nth(loss))(0.5), -np.sum(np.sin(0.5 * x) * x * x)), (
        "the second derivative is not -sum(sin(w x) x²)"
    )


# ---------------------------------------------------------------- 8. ring, MPI, and the whole


@of("8.1")
def _(m):
    for size in (1, 2, 3, 4):
        blocks = [np.random.default_rng(r).normal(size=(2 * size, 2)) for r in range(size)]
        actual, sent = ring_of(size, m.ring.ring_psum_scatter, blocks)
        total = np.add.reduce(blocks)
        blocks_agree(actual, np.split(total, size), f"on a ring of {size}")
        part = total.nbytes // size
        assert max(sent) == (size - 1) * part, (
            f"a ring of {size} sends {size - 1} pieces from each rank, not {max(sent) / part:g}"
        )


@of("8.2")
def _(m):
    for size in (1, 2, 3, 4):
        blocks = [np.random.default_rng(r).normal(size=(2, 2)) for r in range(size)]
        actual, sent = ring_of(size, m.ring.ring_all_gather, blocks)
        blocks_agree(actual, [np.concatenate(blocks)] * size, f"on a ring of {size}")
        part = blocks[0].nbytes
        assert max(sent) == (size - 1) * part, (
            f"a ring of {size} sends {size - 1} blocks from each rank, not {max(sent) / part:g}"
        )


@of("8.3")
def _(m):
    for size, shape in ((2, (4, 3)), (3, (5,)), (4, ()), (1, (2,)), (3, (2, 2))):
        blocks = [np.random.default_rng(r).normal(size=shape) for r in range(size)]
        actual, sent = ring_of(size, m.ring.ring_psum, blocks)
        blocks_agree(actual, [np.add.reduce(blocks)] * size, f"psum of f64{list(shape)} on a ring of {size}")
        part = 8 * -(-blocks[0].size // size)
        assert max(sent) == 2 * (size - 1) * part, (
            f"f64{list(shape)} on a ring of {size}: each rank sends 2 * {size - 1} pieces of {part} bytes, "
            f"{2 * (size - 1) * part} in all; not {max(sent)}"
        )


def a_mesh_of(m: Any, rank: int, size: int, comm: Any) -> Any:
    """An MPIMesh without MPI: on a communicator that the check has made."""
    mesh = m.mpi.MPIMesh.__new__(m.mpi.MPIMesh)
    mesh.comm, mesh.size, mesh.bytes = comm, size, 0
    comm.rank, comm.size = rank, size
    return mesh


class Communicator:
    """It notes where a message goes, and where the other one comes from."""

    rank: int
    size: int

    def sendrecv(self, x: Any, dest: int, sendtag: int = 0, recvbuf: Any = None, source: int = -1, **_: Any) -> str:
        self.dest, self.source = dest, source
        return "what came"


@of("8.4")
def _(m):
    for rank, size in ((0, 4), (2, 4), (3, 4), (0, 1)):
        comm = Communicator()
        came = a_mesh_of(m, rank, size, comm).shift(np.ones(3))
        right = (rank + 1) % size, (rank - 1) % size
        assert (comm.dest, comm.source) == right, (
            f"rank {rank} of {size} sends to {right[0]}, and receives from {right[1]}; not {comm.dest}, {comm.source}"
        )
        assert isinstance(came, str), f"`shift` returns what came from the rank before, not {came}"


@of("8.5")
def _(m):
    mesh = a_mesh_of(m, 2, 4, Communicator())
    seen = []
    run = mesh.one(lambda *args: seen.append(args) or "result")
    actual = run(["block"])
    assert seen[0][0] == "block", f"`ring` is given the one block, not {seen[0][0]!r}"
    assert seen[0][2:] == (2, 4), f"`ring` is given (block, shift, rank, size), here rank 2 of 4; not {seen[0][2:]}"
    assert seen[0][1] == mesh.shift, "`ring` is given self.shift"
    assert actual == ["result"], f"a list with the one result, not {actual!r}"


def network(m: Any) -> Any:
    """The network that page 8 writes; the solution's, whatever is in that cell now."""
    source = (Path(__file__).parent / "network.py").read_text()
    (MINE / "network.py").write_text(source)
    return m.network


@of("8.6")
def _(m):
    net, mesh = network(m), m.ranks.Mesh(8)
    params, inputs, targets = net.network()
    value, gradients = net.loss_and_gradients(mesh)

    def by_hand():
        x, saved = inputs, []
        for W, b in zip(params[::2], params[1::2]):
            saved.append((x, W))
            outputs = x @ W + b
            x = np.maximum(outputs, 0.0)
        ct, actual = 2 * (outputs - targets) / len(inputs), []
        for k, (x, W) in reversed(list(enumerate(saved))):
            actual = [x.T @ ct, ct.sum(0), *actual]
            ct = (ct @ W.T) * (x > 0) if k else None
        return np.sum((outputs - targets) ** 2) / len(inputs), actual

    right, expected = by_hand()
    assert isclose(value, right), f"the loss on 8 ranks is {value}, not {right:.6f}"
    for k, (a, b) in enumerate(zip(gradients, expected)):
        assert allclose(a, b), f"the gradient in parameter {k} (0 is W of the first layer, 1 its b) is wrong"
    assert mesh.calls["psum"] == 13, (
        f"{mesh.calls['psum']} all-reduces: one for the loss, and one for each of 12 parameters, since each is used by "
        "ranks with different examples. The psum of the loss transposes to a pbroadcast"
    )


def jep(m: Any) -> dict[str, tuple]:
    """The JEP's examples: body, in_specs, out_specs, shapes on 8 ranks, and the bodies of both tapes."""
    P, o, r, v = m.shard_map.P, m.operations, m.ranks, m.variance
    i, none = "{i}", ""
    product = [("multiply", f"f64[3,4]{i}"), ("psum", "f64[3,4]"), ("pbroadcast", f"f64[3,4]{i}")]
    return {
        "1": (lambda x: r.psum(o.total(2.0 * x), axis="i"), [P("i")], P(), [(24, 4)],
              [("multiply", f"f64[3,4]{i}"), ("sum", f"f64[]{i}"), ("psum", "f64[]")],
              [("pbroadcast", f"f64[]{i}"), ("broadcast_to", f"f64[3,4]{i}"), ("multiply", f"f64[3,4]{i}")]),
        "2": (lambda x, y: r.psum(2.0 * x, axis="i") * y, [P("i"), P("i")], P("i"), [(24, 4), (24, 4)],
              [*product, ("multiply", f"f64[3,4]{i}")], [*product, ("multiply", f"f64[3,4]{i}")]),
        "3": (lambda x: x, [P()], P(), [(3, 4)], [], []),
        "4": (lambda x: v.all_gather_invariant(x, axis="i"), [P("i")], P(), [(8,)],
              [("all_gather_invariant", f"f64[8]{none}")], [("pscatter", f"f64[1]{i}")]),
        "5": (lambda x, y: r.all_gather(x, axis="i") * y, [P("i"), P("i")], P("i"), [(8,), (64,)],
              [("all_gather", f"f64[8]{i}"), ("multiply", f"f64[8]{i}")],
              [("multiply", f"f64[8]{i}"), ("psum_scatter", f"f64[1]{i}")]),
    }  # fmt: skip


def body_of(tape: Any) -> list[tuple[str, str]]:
    """The operations of the body of a tape's only shard_map, with the types of their results."""
    (eqn,) = tape.equations
    return [(eqn.op.name, str(eqn.outputs[0].type)) for eqn in eqn.params["tape"].equations]


@of("8.7")
def _(m):
    rng = np.random.default_rng(0)
    for name, (body, in_specs, out_specs, shapes, forward, backward) in jep(m).items():
        f = m.shard_map.shard_map(body, m.ranks.Mesh(8), in_specs, out_specs)
        x, *others = [rng.normal(size=shape) for shape in shapes]
        (y,), tape = m.reverse.linearize(lambda x, f=f, others=others: f(x, *others), x)  # f is linear in x
        ct = rng.normal(size=np.shape(y))

        def back(ct, tape=tape):
            return m.reverse.backward_pass(tape, [ct])[0]

        transposed = m.tape.make_tape(back, ct)
        assert body_of(tape) == forward, f"example {name}: the body is {body_of(tape)}, not {forward}"
        assert body_of(transposed) == backward, (
            f"example {name}: the transpose is {body_of(transposed)}, not {backward}"
        )
        assert isclose(np.vdot(ct, y), np.vdot(back(ct), x)), f"example {name}: <ct, f(x)> is not <transposed(ct), x>"
        _, linear = m.reverse.linearize(back, ct)
        again = m.tape.make_tape(lambda x, linear=linear: m.reverse.backward_pass(linear, [x]), x)
        assert body_of(again) == forward, f"example {name}: transposed twice, it is {body_of(again)}, not itself"


@of("8.8")
def _(m):
    network(m)
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PMI", "MPI_", "HYDRA", "OMPI_COMM"))}
    beside = Path(sys.executable).with_name("mpiexec")  # an MPI that is installed beside this Python is to be started
    command = [str(beside) if beside.exists() else "mpiexec", "-n", "2", sys.executable, "-m", "mine.network"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=100)
    lines = sorted(line for line in done.stdout.splitlines() if line.startswith("rank "))
    errors = [line for line in done.stderr.splitlines() if re.match(r"\w*(Error|Exception)\b", line)]
    assert len(lines) == 2, (
        f"two ranks should each print a line; {lines}, and {(errors or [done.stderr[-300:]])[-1]}"
        + last_line(done.stderr)
    )
    for rank, line in enumerate(lines):
        assert f"rank {rank} of 2" in line and line.endswith("as on simulated ranks: True"), (
            f"not as on simulated ranks: {line}"
        )
        (sent,) = re.findall(r"(\d+) bytes sent", line)
        numbers = sum(m * n + n for m, n in zip([784, *[128] * 5], [*[128] * 5, 8]))
        assert int(sent) == 8 * (numbers + 2), (
            f"on a ring of 2, an all-reduce of K bytes sends K from each rank: {8 * numbers} for the parameters, and "
            f"16 for the loss, which is filled up to 2 numbers; not {sent}"
        )


def main() -> None:
    """Judge one question, and write the verdict as JSON: number, and a word, are read from the input."""
    number, word = sys.stdin.readline().split()
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what answers print is not the verdict
    sys.path.insert(0, os.getcwd())
    verdict = judge(number)
    if verdict.startswith("not yet") and (earlier := first_wrong_before(number)):
        verdict += f" (Hole {earlier}, of page {earlier.split('.')[0]}, is not right yet: begin there.)"
    out.write(f"{word} {json.dumps(verdict)}\n")
    out.flush()
    os._exit(0)  # whatever threads an answer has left


if __name__ == "__main__":
    main()
