"""Typing rules of bodies: what operands of different variances give, and which pbroadcasts that takes."""

import pytest

import minidiff as md
import minidiff.numpy as np
from collectives import psum
from spmd import P
from tests.checks.meshes import mapped, mesh
from tests.checks.samples import each

SPECS = {"": P(), "i": P("i"), "j": P("j"), "ij": P(("i", "j"))}


def body_of(f, *variances):
    """The body's tape of a function of operands that vary along these axes; its result may vary along all."""
    args, specs = [np.ones(2 ** len(v)) for v in variances], tuple(SPECS[v] for v in variances)
    g = mapped(lambda *xs: f(*xs).reshape(1), mesh(2, 2), specs, P(("i", "j")))
    (equation,) = md.make_tape(g)(*args).equations
    return equation.params["body"]


def pbroadcasts(equations):
    return [e for e in equations if e.primitive.name == "pbroadcast"]


BINARY = [
    # variances of the operands, of the result, and along which axes each is pbroadcast
    ("", "", "", []),
    ("i", "i", "i", []),
    ("i", "", "i", ["i"]),
    ("", "j", "j", ["j"]),
    ("i", "j", "ij", ["j", "i"]),
    ("ij", "i", "ij", ["j"]),
    ("ij", "", "ij", ["ij"]),
]


@each("operation", [np.add, np.multiply, np.divide, np.matmul, np.maximum, np.less])
@each("left, right, result, casts", BINARY)
def test_operands_are_pbroadcast_to_their_union(operation, left, right, result, casts):
    tape = body_of(operation, left, right)
    tape.check()
    (at,) = [k for k, e in enumerate(tape.equations) if e.primitive.name == operation.__name__]
    assert tape.equations[at].outputs[0].type.variance == set(result)
    assert [set(e.params["axes"]) for e in pbroadcasts(tape.equations[:at])] == [set(x) for x in casts]


@each("variance", SPECS)
@each("operation", [np.sin, np.negative, lambda x: x * 2.0, lambda x: 1 / x, lambda x: x[0], np.sum])
def test_one_operand_keeps_its_variance(operation, variance):
    """Numbers agree with any variance."""
    equation = body_of(operation, variance).equations[0]
    assert equation.primitive.name != "pbroadcast" and equation.outputs[0].type.variance == set(variance)


@each(
    "f",
    [
        lambda x, w: (x * w + np.sin(x) * w) / (w + 2) + x * w,
        lambda x, w: x * w.reshape(1, 1)[0] + x * np.broadcast_to(w, (3, 1)).sum() + x @ w,
    ],
    ids=["itself", "by views of it"],
)
def test_a_value_is_pbroadcast_once(f):
    tape = body_of(f, "i", "")
    assert len([e for e in pbroadcasts(tape.equations) if e.inputs[0] is tape.inputs[1]]) == 1


def test_sums_take_variance_away():
    tape = body_of(lambda x: psum(psum(x, "j"), "i"), "ij")
    assert [e.outputs[0].type.variance for e in tape.equations[:2]] == [{"i"}, set()]


def test_checking_finds_wrong_types_and_operands_that_disagree():
    tape = body_of(np.sin, "i")
    tape.equations[0].outputs[0].type = md.ShapedArray((1,), float)
    with pytest.raises(TypeError):
        tape.check()
    tape = body_of(np.add, "i", "")
    (inserted,) = [e for e in pbroadcasts(tape.equations) if e.inputs[0] is tape.inputs[1]]
    (add,) = [e for e in tape.equations if e.primitive.name == "add"]
    add.inputs = list(tape.inputs)
    tape.equations.remove(inserted)
    with pytest.raises(md.VarianceError):
        tape.check()
