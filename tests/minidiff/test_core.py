"""Types, operations, tracers, and the interpreter that is current."""

import asyncio
import sys
import threading

import numpy as np
import pytest

import minidiff as md
from minidiff.checks.testing import check_grads
from minidiff.core.interpreter import EVALUATE, current_interpreter, running
from minidiff.core.primitive import Primitive
from minidiff.core.tape import Recorder
from minidiff.core.types import ShapedArray
from minidiff.ops.base import Elementwise
from tests.checks.samples import each
from tests.minidiff.refusals import refusals

# ---------------------------------------------------------------- types

TYPES = [
    (ShapedArray((3, 4), float, {"i"}), "f64[3,4]{i}"),
    (ShapedArray((), "float32"), "f32[]"),
    (ShapedArray((2,), "int32", {"j", "i"}), "i32[2]{i,j}"),
    (ShapedArray((0,), complex), "c128[0]"),
    (ShapedArray((1,), bool), "bool[1]"),
    (md.typeof(True), "bool[]"),
    (md.typeof(1), "i64[]"),
    (md.typeof(1.0), "f64[]"),
    (md.typeof(1j), "c128[]"),
    (md.typeof(np.float32(1)), "f32[]"),
    (md.typeof(np.zeros((2, 0), np.uint8)), "u8[2,0]"),
    (md.typeof(ShapedArray((5,), float)), "f64[5]"),
]


@each("type, shown", TYPES, ids=[shown for _, shown in TYPES])
def test_types_print_in_the_grammar(type, shown):
    assert repr(type) == shown


def test_types_are_values():
    t = ShapedArray([2, 3], "float32", ["i"])
    assert t == ShapedArray((2, 3), np.float32, {"i"}) and hash(t) == hash(ShapedArray((2, 3), np.float32, {"i"}))
    assert (t.ndim, t.size, t.nbytes) == (2, 6, 24)
    assert t.update(variance=()) == ShapedArray((2, 3), np.float32) != t
    assert t.update(shape=(6,), dtype=float) == ShapedArray((6,), float, {"i"})
    assert t != "f32[2,3]{i}"


@pytest.mark.parametrize("x", ["text", None, [1.0], {}])
def test_a_non_array_has_no_type(x):
    with pytest.raises(TypeError, match=rf"expected an array or a number, got {type(x).__name__}"):
        md.typeof(x)


def test_tracers_have_the_type_of_what_they_stand_for():
    seen = []

    def f(x):
        seen.append((md.typeof(x), x.shape, x.dtype, x.ndim, x.size))
        return x

    x = np.ones((2, 3), np.float32)
    md.jvp(f, (x,), (x,))
    md.make_tape(f)(x)
    md.vmap(f, in_axes=1)(np.ones((2, 4, 3), np.float32))
    assert seen == [(ShapedArray((2, 3), np.float32), (2, 3), np.float32, 2, 6)] * 3


# ---------------------------------------------------------------- operations

cube = Elementwise("cube", lambda x: x**3, (lambda out, x: 3 * x * x,))
mystery = Primitive("mystery", np.sin, lambda x: (x.shape, x.dtype))


def test_a_declared_operation_is_known_to_all_interpreters():
    x = np.array([1.0, 2.0])
    check_grads(cube.bind, (x,), order=3)
    assert md.vmap(cube.bind)(x).tolist() == cube.bind(x).tolist() == [1.0, 8.0]
    assert str(md.make_tape(cube.bind)(x)) == "lambda a:f64[2]:\n  b:f64[2] = cube(a)\n  return b"
    assert repr(cube) == "<Elementwise cube>"


test_a_missing_rule_is_named = refusals(
    [
        (lambda: md.grad(mystery.bind)(1.0), "mystery cannot be differentiated: it has no derivative rule"),
        (lambda: md.vmap(mystery.bind)(np.ones(2)), "mystery cannot be vectorized: it has no batching rule"),
        (lambda: md.linear_transpose(mystery.bind, 1.0)(1.0), r"mystery cannot be transposed: .* of type f64\[\]"),
    ],
    error=TypeError,
)


# ---------------------------------------------------------------- tracers


def test_len_and_iteration():
    tape = md.make_tape(lambda x: [row * len(x) for row in x])(np.ones((2, 3)))
    assert [str(t) for t in tape.out_types] == ["f64[3]"] * 2
    with pytest.raises(TypeError, match="len\\(\\) of a 0-d value"):
        md.grad(len)(1.0)


# ---------------------------------------------------------------- the current interpreter


def test_an_exception_restores_the_interpreter():
    def f(x):
        raise KeyError(current_interpreter().name)

    for transform in (md.grad, md.make_tape, lambda f: lambda x: md.vmap(f)(np.ones(2))):
        with pytest.raises(KeyError):
            transform(f)(1.0)
        assert current_interpreter() is EVALUATE


def test_each_thread_has_its_own_interpreter():
    seen = []

    def f(x):
        thread = threading.Thread(target=lambda: seen.append((current_interpreter() is EVALUATE, md.grad(np.sin)(0.0))))
        thread.start()
        thread.join()
        return x * x

    assert md.grad(f)(3.0) == 6.0
    assert seen == [(True, 1.0)]


def test_each_asynchronous_task_has_its_own_interpreter():
    async def work():
        with running(Recorder(EVALUATE)) as local:
            await asyncio.sleep(0)  # the other one goes on
            return current_interpreter() is local

    async def main():
        return await asyncio.gather(work(), work())

    assert asyncio.run(main()) == [True, True]


# ---------------------------------------------------------------- operations


def test_operations_are_complete_when_they_are_declared():
    modules = [m for name, m in sys.modules.items() if name.split(".")[0] in ("minidiff", "collectives", "spmd")]
    values = [getattr(x, "primitive", x) for m in modules for x in vars(m).values()]
    operations = {id(x): x for x in values if isinstance(x, Primitive)}.values()
    assert len(operations) > 150
    for operation in operations:
        for attribute in ("name", "transpose", "is_view", "of_my_own"):
            with pytest.raises(AttributeError, match=f"{attribute} cannot be set: pass it to the declaration"):
                setattr(operation, attribute, None)


def test_an_operation_has_eight_traits():
    traits = [name for name, x in vars(Primitive).items() if isinstance(x, bool)]
    assert len({*traits, "commutes"}) == 8


def test_what_an_operation_declares_is_a_rule_or_a_trait():
    with pytest.raises(TypeError, match="the operation probe: color is neither a rule nor a trait"):
        Primitive("probe", color="red")
