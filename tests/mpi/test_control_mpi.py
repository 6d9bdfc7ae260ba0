"""Control flow in bodies on MPI ranks: the same numbers as Python's own on simulated ones."""

import functools

import pytest

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import psum
from spmd import P
from tests.control_programs import (
    ARGS,
    BODIES,
    RANKS,
    Unrolled,
    branch_by_values,
    loss_in_body,
    modulated,
    modulated_by_rules,
    on_ranks,
    stepwise_gradients,
)
from tests.programs import assert_trees_close


@functools.cache
def mesh_on(backend):
    return spmd.make_mesh((2, 2), ("i", "j"), backend=backend)


def loss(f):
    return lambda *args: sum((x * x).sum() for x in f(*args))


@pytest.mark.parallel(4)
@pytest.mark.parametrize("check_rep", [True, False], ids=["typed", "untyped"])
@pytest.mark.parametrize("name", RANKS)
def test_as_simulated(name, check_rep):
    f = on_ranks(RANKS[name], md, mesh_on("mpi"), check_rep=check_rep)
    meaning = on_ranks(RANKS[name], Unrolled, mesh_on("simulated"), check_rep=check_rep)
    assert_trees_close(md.jit(f)(*ARGS), md.tree.leaves(meaning(*ARGS)))
    for run in (f, md.make_tape(f)(*ARGS)):
        assert_trees_close(md.jvp(run, ARGS, ARGS), md.tree.leaves(md.jvp(meaning, ARGS, ARGS)))
        if name != "while_loop":
            gradient, expected = md.value_and_grad(loss(run), (0, 1)), md.value_and_grad(loss(meaning), (0, 1))(*ARGS)
            assert_trees_close(gradient(*ARGS), expected)
            assert_trees_close(md.jit(gradient)(*ARGS), expected)
            assert_trees_close(md.make_tape(gradient)(*ARGS)(*ARGS), md.tree.leaves(expected))


@pytest.mark.parallel(4)
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("compiled", [False, True], ids=["run", "compiled"])
def test_types_do_not_depend_on_values(compiled, sign):
    """Whichever branch is run, the result may differ from rank to rank: the same error, and the same gradient."""
    x, w = sign * np.arange(1.0, 9.0), np.ones(2)
    run = md.jit if compiled else lambda f: f

    def body(x, w):
        return branch_by_values(psum(x.sum(), ("i", "j")), x, w)

    def mapped(backend, out_specs):
        return spmd.shard_map(body, mesh=mesh_on(backend), in_specs=(P(("i", "j")), P()), out_specs=out_specs)

    with pytest.raises(md.VarianceError, match=r"the result\[0\] has type f64\[2\]\{i,j\}.*does not name 'i'"):
        run(mapped("mpi", P()))(x, w)
    gradient, expected = (md.value_and_grad(loss(mapped(on, P(("i", "j")))), (0, 1)) for on in ("mpi", "simulated"))
    assert_trees_close(run(gradient)(x, w), expected(x, w))


@pytest.mark.parallel(4)
@pytest.mark.filterwarnings("ignore:.*the gradient of the sum of the results")  # which is what is tested
@pytest.mark.parametrize("turns", [(0, 1, 2), (1, 0, 1)], ids=["straight", "turning"])
def test_derivatives_in_steps_are_of_the_types_that_stay(turns):
    """All ranks run the first step again, or none."""

    def mapped(backend):
        body = lambda w, x: stepwise_gradients(md.scan, md.grad, w, psum(x, "j"), turns)  # noqa: E731
        out_specs = (P(("i", "j")),) * 3, P(None, ("i", "j"))
        return spmd.shard_map(body, mesh=mesh_on(backend), in_specs=(P(), P(("i", "j"))), out_specs=out_specs)

    args = np.array([0.5, -0.3]), np.arange(8.0) / 3
    expected = md.tree.leaves(mapped("simulated")(*args))
    assert_trees_close(md.tree.leaves(mapped("mpi")(*args)), expected)
    assert_trees_close(md.make_tape(mapped("mpi"))(*args)(*args), expected)


@pytest.mark.parallel(2)
@pytest.mark.parametrize("name", BODIES)
def test_backward_rules_in_bodies(name):
    """In reverse mode all ranks run the rules in the body, and take the sums that these ask for."""
    real, simulated = (spmd.make_mesh((2, 1), ("i", "j"), backend=on) for on in ("mpi", "simulated"))
    args = np.array([0.5, -0.3]), np.arange(1.0, 5.0) / 3
    expected = md.tree.leaves(md.grad(loss_in_body(modulated, BODIES[name][1], simulated), (0, 1))(*args))
    loss = loss_in_body(modulated_by_rules(), BODIES[name][0], real)
    gradient = md.grad(loss, (0, 1))
    for run in (gradient, md.jit(gradient), md.grad(md.jit(loss), (0, 1)), md.make_tape(gradient)(*args)):
        assert_trees_close(run(*args), expected)
