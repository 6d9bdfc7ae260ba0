"""The programs that say where sums are taken: what they communicate, and where their tapes have the psum."""

import pytest

import minidiff as md
import minidiff.numpy as np
import spmd
from spmd.examples.where_to_sum import AXIS, examples, gradient_at, main
from tests.programs.where_to_sum import CALLS

MESH = spmd.make_mesh((4,), (AXIS,), backend="simulated")


def test_the_docstring_names_every_program():
    assert set(CALLS) == set(examples(MESH)) and all(name in main.__globals__["__doc__"] for name in CALLS)


def test_the_script(capsys):
    main()
    shown = capsys.readouterr().out
    assert all(f"{name}, {version}:" in shown for name, versions in CALLS.items() for version in versions)


@pytest.mark.parametrize("place, after, nbytes", [("w", [], 24), ("scale", ["multiply"], 24), ("kernel", None, 72)])
def test_the_psum_is_where_the_value_is_reduced(place, after, nbytes):
    """`after`: the operations that follow it; None for the derivatives of the outer product and of exp."""
    tape = md.make_tape(gradient_at(MESH, place))(np.ones(3), np.ones((4, 3)))
    body = tape.equations[-1].params["body"].equations
    names = [eqn.primitive.name for eqn in body]
    k = names.index("psum")
    assert body[k].inputs[0].type.unreduced == {AXIS} and body[k].inputs[0].type.nbytes == nbytes
    assert names[k + 1 :] == after if after is not None else "matmul" not in names[k + 1 :] and len(names) > k + 2
