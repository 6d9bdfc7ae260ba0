"""The types of values."""

import ml_dtypes
import numpy as np
import pytest

import minidiff as md
from minidiff.core.types import ShapedArray
from tests.checks.samples import each

TYPES = [
    (ShapedArray((3, 4), float, {"i"}), "f64[3,4]{i}"),
    (ShapedArray((), "float32"), "f32[]"),
    (ShapedArray((2,), "int32", {"j", "i"}), "i32[2]{i,j}"),
    (md.typeof(True), "bool[]"),
    (md.typeof(1), "i64[]"),
    (md.typeof(np.zeros(3, ml_dtypes.bfloat16)), "bf16[3]"),
    (md.typeof(np.zeros((2, 0), np.uint8)), "u8[2,0]"),
    (md.typeof(ShapedArray((5,), float)), "f64[5]"),
]


@each("type, shown", TYPES, ids=[shown for _, shown in TYPES])
def test_types_print_in_the_grammar(type, shown):
    assert repr(type) == shown


def test_types_are_values():
    t, same = ShapedArray([2, 3], "float32", ["i"]), ShapedArray((2, 3), np.float32, {"i"})
    assert t == same and hash(t) == hash(same)
    assert (t.ndim, t.size, t.nbytes) == (2, 6, 24)
    assert t.update(variance=()) == ShapedArray((2, 3), np.float32) != t
    assert t.update(shape=(6,), dtype=float) == ShapedArray((6,), float, {"i"})
    assert t != "f32[2,3]{i}"


@each("x", ["text", None, [1.0], {}])
def test_a_non_array_has_no_type(x):
    with pytest.raises(TypeError):
        md.typeof(x)


def test_tracers_have_the_type_of_what_they_stand_for():
    seen, x = [], np.ones((2, 3), np.float32)
    note = lambda x: seen.append((md.typeof(x), x.shape, x.dtype, x.ndim, x.size, repr(x))) or x  # noqa: E731
    md.make_tape(note)(x)
    md.jvp(note, (x,), (x,))
    md.vmap(note, in_axes=1)(np.ones((2, 1, 3), np.float32))
    assert {facts[:-1] for facts in seen} == {(ShapedArray((2, 3), np.float32), (2, 3), np.dtype("f4"), 2, 6)}
    assert seen[0][-1] == "Traced<f32[2,3]>" and seen[2][-1].startswith("Batched<f32[2,3]>(along axis 1 of array(")
