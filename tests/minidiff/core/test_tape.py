"""Printed tapes, and copies; `equal_tapes.md` shows which are equal, and how they are called."""

import copy
import keyword
import pickle
import re

import numpy as np
import pytest

import minidiff as md
from collectives import psum
from minidiff.printing import WIDTH
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
