"""The examples of JEP 17111, "Efficient transposition of replication-inducing collectives"."""

import pytest

import minidiff as md
import spmd
from tests.programs.jep_examples import EXAMPLES, UNTYPED_TRANSPOSES, check_on

MESH = spmd.make_mesh((8,), ("i",), backend="simulated")


def body_operations(tape):
    (equation,) = tape.equations
    return [eqn.primitive.name for eqn in equation.params["body"].equations]


@pytest.mark.parametrize("name", EXAMPLES)
def test_types(name):
    """The tapes, annotated with types as in the JEP."""
    example = EXAMPLES[name]
    tape = example.tape(MESH)
    assert str(tape) == example.text
    assert str(md.transpose(tape, linear=0)) == example.transposed


@pytest.mark.parametrize("name", EXAMPLES)
def test_transposing_twice_gives_the_tape(name):
    """t(t(f)) == f, as often as one likes: nothing grows."""
    tape = EXAMPLES[name].tape(MESH)
    once = current = md.transpose(tape, linear=0)
    for _ in range(3):
        current = md.transpose(current, linear=0)
        assert current == tape
        assert len(str(current)) == len(str(tape))
        current = md.transpose(current, linear=0)
        assert current == once
        assert len(str(current)) == len(str(once))


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("options", [{}, {"check_rep": False}], ids=["typed", "untyped"])
def test_numbers_and_communication(name, options):
    example = EXAMPLES[name]

    def calls():
        actual = MESH.calls
        MESH.reset_calls()
        return actual

    check_on(MESH, example, calls, **options)
    if not options:
        tape = example.tape(MESH)
        report = spmd.communication(lambda *args: md.transpose(tape, linear=0)(*args))
        assert report(md.ShapedArray(tape.out_types[0].shape, float), *tape.in_types[1:]).counts == example.backward


@pytest.mark.parametrize("name", EXAMPLES)
def test_without_types_transposes_are_inefficient(name):
    """The JEP's example of inefficient transposes: sums of values that all ranks know, after a division."""
    transposed = md.transpose(EXAMPLES[name].tape(MESH, check_rep=False), linear=0)
    assert body_operations(transposed) == UNTYPED_TRANSPOSES[name]


def test_without_types_the_identity_grows():
    tape = EXAMPLES["3: cursed identity"].tape(MESH, check_rep=False)
    for k in range(4):
        assert body_operations(tape) == ["divide", "psum"] * k
        tape = md.transpose(tape)
