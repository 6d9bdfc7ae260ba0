"""Matrix products on ranks: the plain product's values and derivatives, and the communication that theory says."""

import numpy as np
import pytest

import minidiff as md
from minidiff.compiler.codegen import CompiledTape
from tests.checks.meshes import mesh
from tests.checks.of_whole import check_derivatives
from tests.checks.results import equations
from tests.checks.samples import each
from tests.programs.matmul import PRODUCTS, K, M, N, operands, plain, sharded, sharded_loss

NAMES = each("name", PRODUCTS)


@NAMES
def test_derivatives_in_both_modes(name):
    check_derivatives(sharded(name, mesh(3)), operands(3), plain)


@NAMES
def test_step_by_step_no_rank_holds_the_whole(name):
    """The largest value that a body makes: one block of what is gathered or scattered, or all n of them."""
    n = 8
    one = PRODUCTS[name]
    args = np.ones((n * M, n * K)), np.ones((n * K, 60 * N))
    (body,) = md.make_tape(sharded(name, mesh(n)))(*args).equations[0].bodies
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
    f = sharded(name, mesh(4)) if ways == 1 else md.value_and_grad(sharded_loss(name, mesh(4)), (0, 1))
    lines = compiled_lines(f, operands(4))
    starts = [k for k, line in enumerate(lines) if "ppermute_start" in line]
    waits = [k for k, line in enumerate(lines) if "ppermute_wait" in line]
    products = [k for k, line in enumerate(lines) if " @ " in line or "matmul(" in line]
    assert len(starts) == len(waits) == ways * PRODUCTS[name].calls(4)
    for start, wait in zip(starts, waits):
        assert any(start < k < wait for k in products)
