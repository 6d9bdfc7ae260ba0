"""Tapes as values: printing, checking, evaluation, and which are unlike; `equal_tapes.md` has those that are equal."""

import copy
import keyword
import pickle
import re

import numpy as np
import pytest

import minidiff as md
from collectives import psum
from minidiff.printing import WIDTH
from minidiff.values.aliasing import read_only_copy
from spmd import P
from tests.checks.meshes import mapped, mesh
from tests.checks.results import assert_trees_close
from tests.checks.samples import each

TABLE = np.arange(3.0)


def f(x, y):
    return np.sin(x) * 2.0 + y @ TABLE, TABLE


def test_printing(golden):
    tapes = [
        *(md.make_tape(f)(1.0, TABLE), md.make_tape(lambda: 1.5)(), md.make_tape(lambda x: ())(1)),
        md.make_tape(md.grad(lambda x: np.sin(x) * 2.0))(1.0),
        md.make_tape(lambda p, n: {"b": [p["y"], None], "a": p["x"]})({"y": 1.0, "x": 2}, None),
        md.make_tape(lambda x: x * (np.arange(3.0) + 1).sum())(np.ones((2, 3))),  # plain NumPy is not recorded
        md.make_tape(lambda s, x: s * 2 * x)(0.1, np.ones(3, "f4")),  # where a Python number is converted
    ]
    golden("tapes", "\n\n".join(map(str, tapes)))


def test_lines_and_names_of_many_values():
    """Long lines are continued, and no name is a keyword."""
    text = str(md.make_tape(lambda *xs: np.concatenate(xs))(*[np.ones(1)] * 400))
    names = re.findall(r"(\w+):f64\[1\]", text)
    assert max(map(len, text.splitlines())) <= WIDTH
    assert len({*names}) == 400 and not any(map(keyword.iskeyword, names))


def test_a_tape_is_a_function_of_its_flat_inputs():
    tape = md.make_tape(lambda p, x: {"b": p["w"] * x, "a": x})({"w": 1.0}, TABLE)
    a, b = tape(3.0, TABLE)
    assert a is TABLE and b.tolist() == [0.0, 3.0, 6.0]
    with pytest.raises(TypeError):
        tape(1.0)


@pytest.mark.parametrize(
    "f", [lambda a: np.pad(a, 1), lambda a: np.tensordot(a, a, 0), lambda a: np.fmin(np.copy(a), np.ones(2, "u8"))]
)
def test_a_tape_takes_python_numbers_as_numpys(f):
    (actual,) = md.make_tape(f)(-3)(-3)
    assert actual.dtype == f(np.int64(-3)).dtype
    np.testing.assert_array_equal(actual, f(np.int64(-3)))


def test_closing_makes_inputs_of_constants():
    tape = md.make_tape(f)(1.0, TABLE)
    closed, (constant,) = tape.close()
    assert constant is read_only_copy(TABLE) and closed.constants == []
    assert closed.in_types == [md.typeof(TABLE), *tape.in_types]
    np.testing.assert_equal(closed(constant, 1.0, TABLE), tape(1.0, TABLE))


# ---------------------------------------------------------------- equality


M = np.array([True, False, True])
#: Functions of which no two have equal tapes.
UNLIKE = [
    lambda x, y: x + y,
    lambda x, y: x + x,
    lambda x, y: 2 * x,
    lambda x, y: x - y,
    lambda x, y: x,
    lambda x, y: x + y - y,
    lambda x, y: (x + y, x + y),
    lambda x, y: (x, y),
    lambda x, y: (y, x),
    lambda x, y: x + y * 2.0,
    lambda x, y: x + y * 3,
    lambda x, y: x + y * np.float32(3),
    lambda x, y: (x + y) * 2.0,
    lambda x, y: x * 2.0 + y * 2.0,
    lambda x, y: (x + y).sum(axis=0),
    lambda x, y: x[::-1],
    lambda x, y: x[:, ::-1],
    lambda x, y: x / np.zeros(3),
    lambda x, y: x / -np.zeros(3),
    lambda x, y: np.maximum(x, True),
    lambda x, y: np.maximum(x, 1),
    lambda x, y: x + y.astype("f4"),
    lambda x, y: x + y.astype("f4").astype("f8"),
    lambda x, y: x.astype("f4"),
    lambda x, y: x.astype("f4") + np.zeros((2, 3)),
    lambda x, y: (x.astype("f4") + y.astype("f4")) + x,
    lambda x, y: x.astype("f4") + (y.astype("f4") + x),
    lambda x, y: np.concatenate([x, y]),
    lambda x, y: np.concatenate([y, x]),
    lambda x, y: (x[0], x[1]),
    lambda x, y: (x[1], x[0]),
    lambda x, y: tuple(np.split(x, [1], 1)),
    lambda x, y: tuple(np.split(x, [2], 1)),
    lambda x, y: np.where(M, x, y),
    lambda x, y: np.where(M, y, x),
    lambda x, y: x @ y[0],
    lambda x, y: x @ y[1],
]


def test_unlike_programs_have_unlike_tapes():
    tapes = [md.make_tape(g)(*[np.ones((2, 3))] * 2) for g in UNLIKE]
    texts = [*map(str, tapes)]
    assert [(i, j) for i, s in enumerate(tapes) for j, t in enumerate(tapes) if (s == t) != (i == j)] == []
    assert [*map(str, tapes)] == texts  # which comparing does not change
    assert md.make_tape(np.sin)(1.0) != md.make_tape(np.sin)(np.float32(1)) != "a tape"


COPIED = {
    "constants": lambda x: np.sin(x) * 2 + np.arange(4.0),
    "checkpoint": md.grad(lambda x: md.checkpoint(np.tanh)(x) @ x),
    "cond": lambda x: md.cond(x[0] > 0, np.sin, np.cos, x),
    "while_loop": lambda x: md.while_loop(lambda c: c[0] < 3, lambda c: c + 1, x),
    "ranks": md.grad(mapped(lambda x: psum(np.sin(x).sum(), "i"), mesh(2), P("i"), P())),  # there is one mesh
}


@each("f", COPIED.values(), COPIED)
def test_a_deep_copy_is_an_equal_program(f):
    tape = md.make_tape(f)(np.ones(4))
    copied = copy.deepcopy(tape)
    assert copied == tape and copied.inputs[0] is not tape.inputs[0]
    assert_trees_close(copied(np.ones(4)), tape(np.ones(4)), rtol=0, atol=0)
    with pytest.raises(TypeError):
        pickle.dumps(tape)
