"""Transposes of bodies: the examples of JEP 17111, "Efficient transposition of replication-inducing collectives"."""

import pytest

import collectives
import minidiff as md
import minidiff.numpy as np
import spmd
from spmd import P
from tests.checks.meshes import mapped, mesh
from tests.checks.samples import each
from tests.programs.jep_examples import EXAMPLES, check_on

EIGHT, TWO = mesh(8), mesh(2)


def body_operations(tape):
    return [eqn.primitive.name for eqn in tape.equations[0].params["body"].equations]


def test_tapes_have_the_types_of_the_jep_and_are_transposed_twice_to_themselves(golden):
    """Nothing grows, however often; without types, transposes sum what all ranks know."""
    shown = []
    for name, example in EXAMPLES.items():
        tape = example.tape(EIGHT)
        once = current = md.transpose(tape, linear=0)
        for _ in range(2):
            current = md.transpose(current, linear=0)
            assert current == tape and len(str(current)) == len(str(tape))
            current = md.transpose(current, linear=0)
            assert current == once and len(str(current)) == len(str(once))
        untyped = md.transpose(example.tape(EIGHT, check_rep=False), linear=0)
        shown.append(f"{name}\n\n{tape}\n\n{once}\n\nwithout types: {', '.join(body_operations(untyped))}")
    golden("jep", "\n\n".join(shown))


@each("name", EXAMPLES)
@each("options", [{}, {"check_rep": False}], ids=["typed", "untyped"])
def test_numbers_and_communication(name, options):
    def calls():
        actual = EIGHT.calls
        EIGHT.reset_calls()
        return actual

    example = EXAMPLES[name]
    check_on(EIGHT, example, calls, **options)
    tape = example.tape(EIGHT)
    report = spmd.communication(lambda *args: md.transpose(tape, linear=0)(*args))
    assert report(md.ShapedArray(tape.out_types[0].shape, float), *tape.in_types[1:]).counts == example.backward


def test_without_types_the_identity_grows():
    tape = EXAMPLES["3: cursed identity"].tape(EIGHT, check_rep=False)
    for k in range(4):
        assert body_operations(tape) == ["divide", "psum"] * k
        tape = md.transpose(tape)


# ---------------------------------------------------------------- between the four states outside of bodies

INVARIANT, VARYING, UNREDUCED, REDUCED = P(), P("i"), P(unreduced={"i"}), P(reduced={"i"})
ARROWS = {
    ("pbroadcast", INVARIANT, VARYING): "psum",
    ("reduced", INVARIANT, REDUCED): "psum",
    ("pbroadcast", REDUCED, VARYING): "unreduced",
    ("psum_scatter", UNREDUCED, VARYING): "all_gather_reduced",
}


@each("arrow", ARROWS, ids=str)
def test_tapes_between_states_are_transposed_with_their_specs(arrow):
    name, before, after = arrow
    options = {"tiled": True} if name == "psum_scatter" else {}
    f, ones = (lambda x: getattr(collectives, name)(x, "i", **options)), np.ones(4)
    x = spmd.from_local([ones] * 2, TWO, before) if before == UNREDUCED else spmd.distribute(ones, TWO, before)
    tape = md.make_tape(mapped(f, TWO, before, after))(x)
    transposed = md.transpose(tape)
    params = transposed.equations[0].params
    assert (params["in_specs"], params["out_specs"]) == ((after.transposed(),), (before.transposed(),))
    assert body_operations(transposed) == [ARROWS[arrow]]
    assert md.transpose(transposed) == tape


@pytest.mark.parametrize("w", [INVARIANT, REDUCED])
@pytest.mark.parametrize("sums", [{"sum": "i"}, {"unreduced": {"i"}}], ids=str)
def test_a_gradient_has_the_cotangent_s_spec(w, sums):
    ones, x = np.ones(3), np.arange(12.0).reshape(4, 3) / 12
    loss = lambda w, x: np.sum(np.tanh(x @ w))  # noqa: E731
    f, at = mapped(loss, TWO, (w, P("i")), P(**sums)), spmd.distribute(ones, TWO, w)
    for gradient in (md.grad(f)(at, x), md.vjp(lambda w: f(w, x), at)[1](1.0)[0]):
        assert spmd.spec_of(gradient) == w.transposed()
        np.testing.assert_allclose(gradient, md.grad(loss)(ones, x))
