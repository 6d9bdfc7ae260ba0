"""psums that are one call: those that do not need each other's results, in buckets, and copies that are multiplied."""

import functools

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

import minidiff as md
import spmd
from collectives import pbroadcast, psum
from collectives.passes import SETTINGS
from spmd import P
from tests.checks.meshes import mesh
from tests.checks.results import assert_trees_close, equations
from tests.checks.rewrites import (
    IJ,
    MESH,
    check_derivatives,
    check_rewrite,
    communicating,
    data,
    data_parallel,
    fused,
    mapped,
    parameters,
)
from tests.checks.samples import each
from tests.programs.rank import Instruction, RankProgram, random_program

PAIRS = [[0, 2], [3, 1]]
#: A body of blocks [4, 3], and the number of psums before and after.
CASES = {
    "apart": (lambda x: psum(x, "i") * psum(x * x, "i"), 2, 1),
    "apart, in groups": (
        lambda x: psum(x, IJ, axis_index_groups=PAIRS) * psum(x * x, IJ, axis_index_groups=PAIRS), 2, 1,
    ),
    "apart, and one before": (lambda x: psum(psum(x, "j") ** 2, "i") * psum(x * x, "i"), 3, 2),
    "one after the other": (lambda x: psum(psum(x, "i") * x, "i"), 2, 2),
    "over different axes": (lambda x: psum(x, "i") * psum(x, "j"), 2, 2),
    "of different dtypes": (
        lambda x: psum(x, "i") * psum((x.real * 0).astype(np.float16)[0], "i"), 2, 2,
    ),
    "two chains, crosswise": (
        lambda x: psum(np.sin(psum(x, "i")) * x, "j") * psum(np.cos(psum(x * x, "j")) * x, "i"), 4, 3,
    ),
}  # fmt: skip


@each("dtype", ["float64", "complex128", "int64"])
@each("case", CASES)
def test_psums_are_one_call(case, dtype):
    body, before, after = CASES[case]
    if not (case == "two chains, crosswise" and dtype == "int64"):
        check_rewrite("fuse psums", body, {"psum": before}, {"psum": after}, dtype)


@each("dtype", ["float64", "complex128", "int64"])
def test_a_sum_of_copies_is_a_product(dtype):
    copies = lambda x: psum(pbroadcast(psum(x, "i"), "i"), "i")  # noqa: E731
    check_rewrite("sum of copies", copies, {"psum": 2}, {"psum": 1}, dtype)


def test_the_tape(golden):
    f = mapped(lambda x: (psum(x, "i"), psum(x * x, "i")), out_specs=P("j"))
    golden("fused_psums", str(spmd.rewritten(f)(np.ones((8, 2)))))


@each("body", [lambda x: psum(x, "i") * psum(x * x, "i"), lambda x: psum(x, "i") + psum(x * x, "i")])
def test_without_types(body):
    x, f = data("float64"), mapped(body, check_rep=False)
    tape, smaller = md.make_tape(f)(x), spmd.rewritten(f)(x)
    assert (communicating(tape), communicating(smaller)) == ({"psum": 2}, {"psum": 1})
    tape.check(), smaller.check()
    assert_trees_close(smaller(x), [f(x)], rtol=1e-12)
    check_derivatives(tape, smaller, x, "float64")


def test_rewrites_have_names():
    f = mapped(lambda x: psum(x, "i"))
    for without, error in ((("fuse sums",), ValueError), ("fuse psums", TypeError)):
        with pytest.raises(error):
            spmd.rewritten(f, without=without)
    with pytest.raises(TypeError):
        md.jit(f, bucket=3)(data("float64"))


# ---------------------------------------------------------------- buckets


@each("size, expected", [(1, [1] * 7), (64, [2, 2, 2, 1]), (100, [3, 3, 1]), (None, [7])])
def test_buckets(size, expected):
    """Each psum has 32 bytes. The setting is for all, or an option of one program."""
    x, f = np.arange(16.0), mapped(lambda x: [psum(np.sin(x * k), "i") for k in range(1, 8)], out_specs=P("j"))
    options = {} if size is None else {"bucket_bytes": size}
    tape = spmd.rewritten(f, **options)(x)
    tape.check()
    assert fused(tape) == expected
    assert_trees_close(md.jit(f, **options)(x), f(x))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SETTINGS, "bucket_bytes", 1 << 20 if size is None else size)
        assert fused(spmd.rewritten(f)(x)) == expected
        assert fused(spmd.rewritten(f, bucket_bytes=1 << 20)(x)) == [7]


def test_one_larger_array_has_a_bucket_of_its_own():
    f = mapped(lambda x: [psum(x[:1], "i"), psum(x, "i"), psum(x[:2], "i"), psum(x[2:], "i")], out_specs=P("j"))
    sums = [e for e in equations(spmd.rewritten(f, bucket_bytes=32)(np.arange(32.0))) if e.primitive.name == "psum"]
    assert [sum(a.type.nbytes for a in e.inputs) for e in sums] == [8, 64, 16, 48]


def test_sums_in_bodies_of_their_own():
    def body(x):
        def step(c, _):
            return c + psum((c * x).sum(), IJ) * psum((c - x).sum(), IJ) * 1e-3, None

        return md.scan(step, 1.0, None, length=20)[0]

    f, x = mapped(body, out_specs=P()), np.arange(16.0) / 16
    assert fused(spmd.rewritten(f)(x)) == [2]
    MESH.reset_calls()
    np.testing.assert_allclose(md.jit(f)(x), f(x))
    assert MESH.calls["psum"] == 20 + 40


@each("size, expected", [(200, [3, 1, 1, 1, 1]), (600, [5, 2]), (None, [7])])
def test_gradients_in_buckets(size, expected):
    """The last layer's come first: those are the first to be there. Each bucket is one call."""
    params, x, on = parameters(5, 7, 6, 3), data("float64", (8, 5)), mesh(2)
    step, options = md.value_and_grad(data_parallel(on)), {} if size is None else {"bucket_bytes": size}
    tape = spmd.rewritten(step, **options)(params, x)
    tape.check()
    shapes = [[v.type.shape for v in e.outputs] for e in equations(tape) if e.primitive.name == "psum"]
    assert [shape for bucket in shapes for shape in bucket] == [(), (3,), (6, 3), (6,), (7, 6), (7,), (5, 7)]
    assert [*map(len, shapes)] == expected
    compiled = md.jit(step, **options)
    assert_trees_close(compiled(params, x), step(params, x))
    on.reset_calls()
    compiled(params, x)
    assert on.calls == {"psum": len(shapes)}
    assert sum(on.bytes.values()) == spmd.communication(step)(params, x).bytes


# ---------------------------------------------------------------- random programs


def one_rank_along_i(*axes):
    return RankProgram({"i": 1, "j": 3}, (P(("i", "j")),), [Instruction("pmax", (0,), a) for a in axes])


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 10**6).map(functools.partial(random_program, redundant=True)), st.booleans())
@hypothesis.example(one_rank_along_i(("i", "j")), True)
@hypothesis.example(one_rank_along_i(("j",), ("j",)), False)
def test_random_programs(program, typed):
    """Optimized or not: the same values, types and derivatives, and never more collectives."""
    f, args = program.on_ranks(mesh(*program.shape.values()), check_rep=typed), program.example(0)
    for g in (f, md.value_and_grad(f, tuple(range(len(args))))):
        tape, smaller = md.make_tape(g)(*args), spmd.rewritten(g)(*args)
        tape.check(), smaller.check()
        assert tape.out_types == smaller.out_types
        assert sum(communicating(smaller).values()) <= sum(communicating(tape).values())
        assert_trees_close(smaller(*args), tape(*args), rtol=1e-8, atol=1e-8)
    assert_trees_close(md.jit(f)(*args), f(*args), rtol=1e-8, atol=1e-8)
