"""Typing rules, as a table: what operands of given variances give, and which pbroadcasts that takes."""

import pytest

import collectives
import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import psum
from spmd import P
from tests.checks.samples import each

MESH = spmd.make_mesh((2, 2), ("i", "j"), backend="simulated")
SPECS = {"": P(), "i": P("i"), "j": P("j"), "ij": P(("i", "j"))}


def body_of(f, *variances):
    """The body's tape of `f` of operands that vary along given axes."""
    specs = tuple(SPECS[v] for v in variances)
    args = [np.ones(2 ** len(v)) for v in variances]
    # Whatever the result varies along, all axes of the mesh may be named in its spec.
    mapped = spmd.shard_map(lambda *xs: f(*xs).reshape(1), mesh=MESH, in_specs=specs, out_specs=P(("i", "j")))
    (equation,) = md.make_tape(mapped)(*args).equations
    return equation.params["body"]


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
@each("left, right, result, pbroadcasts", BINARY)
def test_operands_are_pbroadcast_to_their_union(operation, left, right, result, pbroadcasts):
    tape = body_of(operation, left, right)
    tape.check()
    (equation,) = [e for e in tape.equations if e.primitive.name == operation.__name__]
    assert equation.outputs[0].type.variance == set(result)
    before = tape.equations[: tape.equations.index(equation)]
    assert [set(e.params["axes"]) for e in before if e.primitive.name == "pbroadcast"] == [set(x) for x in pbroadcasts]


@each("variance", SPECS)
@each("operation", [np.sin, np.negative, lambda x: x * 2.0, lambda x: 1 / x, lambda x: x[0], np.sum])
def test_one_operand_keeps_its_variance(operation, variance):
    """Numbers agree with any variance: nothing is varying for them."""
    tape = body_of(operation, variance)
    assert tape.equations[0].primitive.name != "pbroadcast"
    assert tape.equations[0].outputs[0].type.variance == set(variance)


def test_a_value_is_pbroadcast_once():
    tape = body_of(lambda x, w: (x * w + np.sin(x) * w) / (w + 2) + x * w, "i", "")
    pbroadcasts = [e for e in tape.equations if e.primitive.name == "pbroadcast"]
    of_w = [e for e in pbroadcasts if e.inputs[0] is tape.inputs[1]]
    assert len(of_w) == 1
    assert len(pbroadcasts) == 3  # w, w + 2, and the result along j


def test_a_view_is_pbroadcast_by_what_it_is_a_view_of():
    tape = body_of(lambda x, w: x * w.reshape(1, 1)[0] + x * np.broadcast_to(w, (3, 1)).sum() + x @ w, "i", "")
    pbroadcasts = [e for e in tape.equations if e.primitive.name == "pbroadcast" and e.inputs[0] is tape.inputs[1]]
    assert len(pbroadcasts) == 1


def test_sums_take_variance_away():
    tape = body_of(lambda x: psum(psum(x, "j"), "i"), "ij")
    assert [e.outputs[0].type.variance for e in tape.equations[:2]] == [{"i"}, set()]


def test_checking_finds_a_wrong_type():
    tape = body_of(np.sin, "i")
    tape.equations[0].outputs[0].type = md.ShapedArray((1,), float)
    with pytest.raises(TypeError, match=r"sin: the tape says f64\[1\], the rules say f64\[1\]\{i\}"):
        tape.check()


def test_checking_finds_operands_that_disagree():
    tape = body_of(np.add, "i", "i")
    wrong = body_of(np.add, "i", "")
    (inserted,) = [e for e in wrong.equations if e.primitive.name == "pbroadcast" and e.inputs[0] is wrong.inputs[1]]
    (add,) = [e for e in wrong.equations if e.primitive.name == "add"]
    add.inputs = [wrong.inputs[0], wrong.inputs[1]]
    wrong.equations.remove(inserted)
    tape.check()
    with pytest.raises(md.VarianceError, match=r"add: operands f64\[1\]\{i\} and f64\[1\] disagree in variance"):
        wrong.check()


# ---------------------------------------------------------------- the four states outside of bodies

INVARIANT, VARYING, UNREDUCED, REDUCED = P(), P("i"), P(unreduced={"i"}), P(reduced={"i"})
ARROWS = {
    ("pbroadcast", INVARIANT, VARYING): "psum",
    ("reduced", INVARIANT, REDUCED): "psum",
    ("pbroadcast", REDUCED, VARYING): "unreduced",
    ("psum_scatter", UNREDUCED, VARYING): "all_gather_reduced",
}


@pytest.mark.parametrize("arrow", ARROWS, ids=lambda arrow: "{}: {} -> {}".format(*arrow))
def test_tapes_between_states_are_transposed_with_their_specs(arrow):
    name, before, after = arrow
    mesh = spmd.make_mesh((2,), ("i",), backend="simulated")
    options = {"tiled": True} if name == "psum_scatter" else {}
    f = lambda x: getattr(collectives, name)(x, "i", **options)  # noqa: E731
    x = np.ones(4)
    x = spmd.from_local([x, x], mesh, before) if before == UNREDUCED else spmd.distribute(x, mesh, before)
    tape = md.make_tape(spmd.shard_map(f, mesh=mesh, in_specs=before, out_specs=after))(x)
    transposed = md.transpose(tape)
    (equation,) = transposed.equations
    assert equation.params["in_specs"] == (after.transposed(),)
    assert equation.params["out_specs"] == (before.transposed(),)
    assert [e.primitive.name for e in equation.params["body"].equations] == [ARROWS[arrow]]
    assert md.transpose(transposed) == tape


@pytest.mark.parametrize("w", [INVARIANT, REDUCED])
@pytest.mark.parametrize("result", [INVARIANT, UNREDUCED])
def test_a_gradient_has_the_cotangent_s_spec(w, result):
    mesh = spmd.make_mesh((2,), ("i",), backend="simulated")
    ones, x = np.ones(3), np.arange(12.0).reshape(4, 3) / 12
    loss = lambda w, x: np.sum(np.tanh(x @ w))  # noqa: E731
    sums = {"sum": "i"} if result == INVARIANT else {"unreduced": {"i"}}
    f = spmd.shard_map(loss, mesh=mesh, in_specs=(w, P("i")), out_specs=P(**sums))
    at = ones if w == INVARIANT else spmd.distribute(ones, mesh, w)
    for gradient in (md.grad(f)(at, x), md.vjp(lambda w: f(w, x), at)[1](1.0)[0]):
        assert spmd.spec_of(gradient) == w.transposed()
        np.testing.assert_allclose(gradient, md.grad(loss)(ones, x))
