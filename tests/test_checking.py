"""`Tape.check` finds whatever is wrong on a tape: in every place, of every kind, in bodies too."""

import re

import pytest

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import all_gather, ppermute, pscatter, psum
from minidiff.tape import Equation, Var, bodies_of
from spmd import P

MESH = spmd.make_mesh((2, 2), ("i", "j"), backend="simulated")
TYPE = r"(?:f|i|c|bool)\d*\[[\d,]*\](?:\{[^}]*\})?"


def program(x, w, k):
    """Operations, collectives, and operations with bodies, in a body."""
    y = all_gather(x * w, "i", tiled=True) + ppermute(np.tanh(w @ w), "i", [(0, 1)])[0]
    _, rows = md.scan(lambda c, row: (c + psum(row, "i"), row * w[0]), w[0], y)
    z = md.cond(k[0] > 0, lambda rows: np.sin(rows), lambda rows: rows * 2.0, rows)
    z = md.checkpoint(lambda z: np.cos(z) + pscatter(w, "j", tiled=True).sum())(z)
    return psum(np.sum(z * k), ("i", "j")), x + np.sum(np.linalg.inv(w))


def tape_of_program():
    specs = P("i"), P(), P()
    f = spmd.shard_map(program, mesh=MESH, in_specs=specs, out_specs=(P(), P(("i", "j"))))
    return md.make_tape(lambda *args: [2.0 * y for y in f(np.sin(args[0]), *args[1:])])(
        np.ones((4, 2)), np.ones((2, 2)), np.arange(2)
    )


def names_on(tape):
    """All names, in order."""
    yield from tape.inputs
    for eqn in tape.equations:
        yield from eqn.outputs
        for body in bodies_of(eqn):
            yield from names_on(body)


def equations_on(tape):
    for eqn in tape.equations:
        yield eqn
        for body in bodies_of(eqn):
            yield from equations_on(body)


CORRUPTED = {
    "shape": lambda t: t.update(shape=(*t.shape, 7)),
    "a size": lambda t: t.update(shape=(t.shape[0] + 1, *t.shape[1:]) if t.shape else (3,)),
    "dtype": lambda t: t.update(dtype="complex64" if t.dtype.kind in "fc" else "float32"),
    "variance": lambda t: t.update(variance=t.variance ^ {"j"}),
    "another axis": lambda t: t.update(variance={"k"}),
}


@pytest.mark.parametrize("kind", CORRUPTED)
def test_a_wrong_type_is_found_in_every_place(kind):
    tape = tape_of_program()
    tape.check()
    places = list(names_on(tape))
    operations = {eqn.primitive.name for eqn in equations_on(tape)}
    assert len(places) > 50 and {"scan", "cond", "checkpoint", "psum", "pbroadcast"} <= operations
    for v in places:
        right, v.type = v.type, CORRUPTED[kind](v.type)
        with pytest.raises(TypeError) as error:
            tape.check()
        text = str(error.value)
        assert text.split(":")[0].split(" over ")[0] in operations, text
        assert re.search(TYPE, text), text
        v.type = right
    tape.check()


def test_the_error_names_the_operation_and_both_types():
    tape = tape_of_program()
    for eqn in equations_on(tape):
        for v in eqn.outputs:
            right = v.type
            for corrupt in CORRUPTED.values():
                v.type = corrupt(right)
                with pytest.raises(TypeError) as error:
                    tape.check()
                text = str(error.value)
                if not bodies_of(eqn):  # else the error may be found in the body, or where its result goes in
                    assert text.startswith(f"{eqn.primitive.name}: ") and f"the tape says {v.type}" in text
                    assert f"the rules say {right}" in text
            v.type = right


def test_a_wrong_body_is_found():
    one, two = (md.make_tape(f)(np.ones((2, 2)), np.ones(3)) for f in (lambda x, y: (x, y), lambda x, y: (y, x)))
    bodies = 0
    tape = tape_of_program()
    for eqn in equations_on(tape):
        for name, body in list(eqn.params.items()):
            if isinstance(body, md.Tape):
                bodies += 1
                for wrong in (one, two, md.Tape(body.inputs, body.equations, body.outputs[::-1] * 2)):
                    eqn.params[name] = wrong
                    with pytest.raises(TypeError, match=rf"^{eqn.primitive}: .*{TYPE}"):
                        tape.check()
                eqn.params[name] = body
    assert bodies == 6  # shard_map, scan, both branches of cond, checkpoint, and the shard_map that doubles a result
    tape.check()


def test_equations_in_disorder_are_found():
    tape = tape_of_program()
    for part in (tape, *[body for eqn in equations_on(tape) for body in bodies_of(eqn)]):
        if len(part.equations) > 1:
            part.equations.append(part.equations.pop(0))
            with pytest.raises(TypeError, match="is used before it is defined"):
                tape.check()
            part.equations.insert(0, part.equations.pop())
    tape.equations.append(tape.equations[0])
    with pytest.raises(TypeError, match=r"sin: its result of type f64\[4,2\] is defined twice"):
        tape.check()


def test_rules_that_do_not_fit_are_reported_with_the_operands():
    x, y = Var(md.ShapedArray((3,), float)), Var(md.ShapedArray((4,), float))
    (eqn,) = md.make_tape(np.add)(np.ones(3), np.ones(3)).equations
    wrong = md.Tape([x, y], [Equation(eqn.primitive, [x, y], {}, eqn.outputs)], eqn.outputs)
    with pytest.raises(TypeError, match=r"^add: the rules do not allow operands of types f64\[3\], f64\[4\]: "):
        wrong.check()


def test_untyped_bodies_are_checked_without_variances():
    """Also a loop's in such a body."""
    f = spmd.shard_map(
        lambda x: md.scan(lambda c, row: (psum(c * row, "i"), row), x[0], x)[1],
        mesh=MESH, in_specs=P("i"), out_specs=P("i"), check_rep=False,
    )  # fmt: skip
    tape = md.make_tape(f)(np.ones((4, 2)))
    tape.check()
    (shard_map,) = tape.equations
    body = shard_map.params["body"]
    (loop,) = [eqn for eqn in body.equations if eqn.primitive.name == "scan"]
    (product, _) = loop.params["body"].equations
    product.outputs[0].type = md.ShapedArray((5,), float)
    with pytest.raises(TypeError, match=r"^multiply: the tape says f64\[5\], the rules say f64\[2\]"):
        tape.check()
