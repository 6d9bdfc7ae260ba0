"""Matrix products on ranks: the plain product's values and derivatives, and the communication that theory says."""

import numpy as np
import pytest

import minidiff as md
import minidiff.numpy as mnp
import spmd
from minidiff.compiler.codegen import CompiledTape
from spmd import P
from spmd.parallel import matmul
from tests.checks.samples import each
from tests.programs.matmul import PRODUCTS, K, M, N, operands, plain, plain_loss, sharded, sharded_loss
from tests.programs.on_blocks import equations

NAMES = each("name", PRODUCTS)
RANKS = each("n", [1, 2, 3, 4])
OPTIONS = {"typed": {}, "untyped": {"check_rep": False}, "explicit": {"auto_pbroadcast": False}}


def mesh_of(n):
    return spmd.make_mesh((n,), ("i",), backend="simulated")


def loss(product):
    return lambda lhs, rhs: mnp.sin(product(lhs, rhs)).sum()


@NAMES
@RANKS
@each("options", OPTIONS.values(), ids=OPTIONS)
def test_values_and_gradients_are_those_of_the_plain_product(name, n, options):
    product, args = sharded(name, mesh_of(n), **options), operands(n)
    np.testing.assert_allclose(np.asarray(product(*args)), plain(*args), rtol=1e-12)
    for actual, expected in zip(md.grad(loss(product), (0, 1))(*args), md.grad(plain_loss, (0, 1))(*args)):
        np.testing.assert_allclose(np.asarray(actual), expected, rtol=1e-10)


@NAMES
@each("dtype", ["f4", "c16"])
def test_other_numbers(name, dtype):
    args = operands(2, dtype)
    actual = sharded(name, mesh_of(2))(*args)
    assert actual.dtype == dtype
    np.testing.assert_allclose(np.asarray(actual), plain(*args), rtol=1e-4)


@NAMES
def test_tapes_compiled_programs_and_forward_mode(name):
    product, args = sharded(name, mesh_of(3)), operands(3)
    tape = md.make_tape(md.grad(loss(product), (0, 1)))(*args)
    tape.check()
    expected = md.grad(plain_loss, (0, 1))(*args)
    for actual in (tape(*args), md.jit(md.grad(loss(product), (0, 1)))(*args)):
        for a, e in zip(actual, expected):
            np.testing.assert_allclose(np.asarray(a), e, rtol=1e-10)
    tangents = tuple(map(np.cos, args))
    tangent = md.jvp(product, args, tangents)[1]
    np.testing.assert_allclose(np.asarray(tangent), md.jvp(plain, args, tangents)[1], rtol=1e-10)
    second = md.jvp(md.grad(loss(product), 1), args, tangents)[1]
    np.testing.assert_allclose(np.asarray(second), md.jvp(md.grad(plain_loss, 1), args, tangents)[1], rtol=1e-9)


@NAMES
@RANKS
def test_the_collectives_and_their_bytes_are_what_theory_says(name, n):
    product, args, theory = sharded(name, mesh_of(n)), operands(n), PRODUCTS[name]
    forward = spmd.communication(product)(*args)
    assert forward.counts == ({theory.collective: theory.calls(n)} if theory.calls(n) else {})
    assert forward.bytes == 8 * theory.calls(n) * theory.operand(n)
    both = spmd.communication(md.grad(loss(product), (0, 1)))(*args)
    back = [(r.collective, r.count) for r in both.rows if r.direction == "backward"]
    assert sum(count for _, count in back) == theory.calls(n)
    assert {collective for collective, _ in back} <= {theory.backward}


@NAMES
def test_step_by_step_no_rank_holds_the_whole(name):
    """The largest value that a body makes: one block of what is gathered or scattered, or all n of them."""
    n = 8
    mesh, one = mesh_of(n), PRODUCTS[name]
    args = np.ones((n * M, n * K)), np.ones((n * K, 60 * N))
    (body,) = md.make_tape(sharded(name, mesh))(*args).equations[0].bodies
    block = 60 * N * (K if "gather" in name else M)
    largest = max(v.type.size for eqn in equations(body) for v in eqn.outputs)
    if one.collective == "ppermute":
        assert largest <= max(block, 60 * M * N)
    else:
        assert largest == n * block


def compiled_lines(f, args):
    """Return the steps of the ranks' compiled programs, line by line."""
    compiled = md.jit(f)
    compiled(*args)
    lines = []
    for tape in compiled.program(*args).source.namespace.values():
        for source, _ in tape.lowered.values() if isinstance(tape, CompiledTape) else ():
            source.tape.check()
            lines += source.text.splitlines()
    return lines


@pytest.mark.parametrize("name", [name for name, product in PRODUCTS.items() if product.collective == "ppermute"])
@pytest.mark.parametrize("ways", [1, 2], ids=["forward", "and back"])
def test_compiled_a_block_is_on_its_way_while_another_is_multiplied(name, ways):
    f = sharded(name, mesh_of(4)) if ways == 1 else md.value_and_grad(sharded_loss(name, mesh_of(4)), (0, 1))
    lines = compiled_lines(f, operands(4))
    starts = [k for k, line in enumerate(lines) if "ppermute_start" in line]
    waits = [k for k, line in enumerate(lines) if "ppermute_wait" in line]
    products = [k for k, line in enumerate(lines) if " @ " in line or "matmul(" in line]
    assert len(starts) == len(waits) == ways * PRODUCTS[name].calls(4)
    for start, wait in zip(starts, waits):
        assert any(start < k < wait for k in products)


def test_a_ring_can_be_rolled_into_a_loop():
    """The overlapped product with its steps as one `fori_loop`, the tutorial's advice for long rings."""
    from collectives import axis_index, axis_size, ppermute

    def rolled(lhs, rhs):
        n, here = axis_size("i"), axis_index("i")
        width = rhs.shape[0]

        def step(s, state):
            out, block = state
            columns = md.dynamic_slice_in_dim(lhs, (here - s) % n * width, width, 1)
            return out + columns @ block, ppermute(block, "i", [(i, (i + 1) % n) for i in range(n)])

        return md.fori_loop(0, n, step, (mnp.zeros((lhs.shape[0], rhs.shape[1])), rhs))[0]

    mesh, args = mesh_of(4), operands(4)
    product = spmd.shard_map(rolled, mesh=mesh, in_specs=(P("i"), P("i")), out_specs=P("i"))
    for f in (product, md.jit(product)):
        np.testing.assert_allclose(np.asarray(f(*args)), plain(*args), rtol=1e-12)
    for actual, expected in zip(md.grad(loss(product), (0, 1))(*args), md.grad(plain_loss, (0, 1))(*args)):
        np.testing.assert_allclose(np.asarray(actual), expected, rtol=1e-10)


ERRORS = {
    "columns": (
        "matmul_all_gather",
        (4, 6),
        (4, 2),
        r"over 'i', of 2 ranks: rhs has 2 rows .* 4 together, so lhs needs 4",
    ),
    "halves": (
        "matmul_all_gather 2",
        (4, 6),
        (6, 2),
        r"rhs has 3 rows .* write directions=1",
    ),
    "contracted": ("matmul_psum_scatter", (4, 4), (6, 2), r"as many columns as rhs has rows; got f64\[4,2\]\{i\} and"),
    "rows": ("matmul_psum_scatter", (3, 4), (4, 2), r"the 3 rows of lhs, .* make them a multiple of 2"),
    "parts": ("matmul_psum_scatter 2", (6, 4), (4, 2), r"has 3 rows .* write directions=1"),
}


@pytest.mark.parametrize("case", ERRORS.values(), ids=ERRORS)
def test_errors(case):
    name, lhs, rhs, message = case
    with pytest.raises(ValueError, match=message):
        sharded(name, mesh_of(2))(np.ones(lhs), np.ones(rhs))


def test_a_vector_is_no_matrix():
    mesh = mesh_of(2)
    f = spmd.shard_map(lambda x, y: matmul.matmul_all_gather(x, y, "i"), mesh=mesh, in_specs=P("i"), out_specs=P("i"))
    with pytest.raises(
        ValueError, match=r"matmul_all_gather multiplies blocks of matrices; got f64\[2,4\]\{i\} and f64\[2\]"
    ):
        f(np.ones((4, 4)), np.ones(4))
