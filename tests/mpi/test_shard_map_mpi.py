"""Bodies on MPI ranks: what each rank has, prints and chooses, errors on all of them, and the memory of arrays."""

import numpy
import pytest
from mpi4py import MPI

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import all_gather, all_gather_invariant, all_to_all, axis_index, pmax, ppermute, psum
from collectives.guards.mismatch import DisagreementError
from spmd import P
from tests.checks.meshes import mapped, mesh
from tests.checks.samples import each
from tests.checks.whole import whole
from tests.minidiff.test_debug_print import body as printing
from tests.minidiff.test_debug_print import printed

WORLD = MPI.COMM_WORLD
RANKS, RANK = WORLD.size, WORLD.rank


def on_line(f, in_specs=P("i"), out_specs=P("i"), **options):
    return mapped(f, mesh(RANKS, backend="mpi"), in_specs, out_specs, **options)


@pytest.mark.parallel([1, 2, 4])
def test_a_sharded_array_is_a_block_here(capsys):
    x = np.arange(2.0 * RANKS)
    y = on_line(lambda x: print(x) or x)(x)
    block = x[2 * RANK : 2 * RANK + 2]
    assert capsys.readouterr().out == f"On rank {RANK} at mesh coordinates (i,) = ({RANK},):\n{block}\n\n"
    np.testing.assert_array_equal((2 * y + y).local, 3 * block)
    np.testing.assert_array_equal(y.gather(), x)
    if RANKS > 1:
        with pytest.raises(ValueError, match=r"Call .gather\(\) on every rank"):
            np.asarray(y)
    else:
        np.testing.assert_array_equal(np.asarray(y), x)


@pytest.mark.parallel(2)
def test_each_rank_prints_what_a_simulated_one_prints(capsys):
    x = np.arange(4.0)
    f, simulated = (mapped(printing, mesh(2, backend=on), (P(), P("i")), P()) for on in ("mpi", "simulated"))
    name = f"rank {RANK} at mesh coordinates (i,) = ({RANK},): "
    expected = [line for line in printed(simulated, 0.5, x) if line.startswith(name)]
    assert expected[0] == f"{name}x = {x[2 * RANK : 2 * RANK + 2]}" and len(expected) == 4
    for use in (f, md.jit(f), md.grad(f), md.jit(md.grad(f))):
        assert printed(use, 0.5, x) == expected
    loud = on_line(lambda x: md.cond(axis_index("i") > 0, lambda: md.debug.print("here") or x, lambda: x))
    for run in (loud, md.jit(loud)):
        capsys.readouterr()
        run(x)
        assert capsys.readouterr().out.count("here") == RANK  # of those that take the branch


# ---------------------------------------------------------------- errors on all ranks


@pytest.mark.parallel([2, 4])
def test_an_error_on_all_ranks_leaves_the_mesh_usable():
    on, x = mesh(RANKS, backend="mpi"), numpy.arange(float(RANKS))
    on.reset_calls()
    for f, error in (
        (lambda x: psum(x, "nowhere"), md.UnboundAxisError),
        (lambda x: x if x[0] else -x, md.VarianceError),
        (lambda x: md.cond(axis_index("i") > 0, lambda x: psum(x, "i"), lambda x: x, x), md.VarianceError),
        (lambda x: all_gather(x, {"i"}), TypeError),
    ):
        with pytest.raises(error):
            on_line(f)(x)
    assert on.calls == {}
    assert on_line(lambda x: psum(x, "i"), P("i"), P())(x) == x.sum()


@pytest.mark.parallel(2)
@each("dtype", [object, "M8[D]", "m8[s]"])
def test_arrays_that_are_not_of_numbers_are_refused(dtype):
    """Messages are bytes; those of an object are an address, which means nothing on another rank."""
    rows = numpy.array([1, 2]).astype(dtype)
    for f, x in ((lambda x: all_gather(x, "i"), rows), (lambda x: all_gather(rows, "i"), numpy.zeros(2))):
        with pytest.raises(TypeError, match=f"got one of dtype {rows.dtype.name[:6]}"):
            on_line(f)(x)


@pytest.mark.parallel(2)
def test_static_arguments_are_compared():
    x, f = np.arange(4.0), on_line(lambda x, n, g: g(x) * n, (P("i"), None, None))
    for n in (2, 3, 2):
        np.testing.assert_array_equal(f(x, n, lambda x: -x).gather(), -n * x)
    with pytest.raises(DisagreementError, match="static arguments: 1"):
        f(x, spmd.process_index(), abs)


@pytest.mark.parallel(2)
def test_the_rank_that_makes_a_nan_names_itself():
    """All raise, and so stay in step. Sums are compared with the operands of all ranks."""
    gradient = md.grad(lambda x: on_line(np.sqrt)(x).sum())
    total = on_line(lambda x: psum(x, "i"), P("i"), P())
    with md.debug_nans():
        for run in (gradient, md.jit(gradient)):
            with pytest.raises(FloatingPointError, match=f"on rank {RANK} at mesh coordinates"):
                run(numpy.zeros(2))
        assert numpy.isinf(total(numpy.array([numpy.inf, 1.0])))
        with pytest.raises(FloatingPointError, match=f"infinity.*, on rank {RANK} at"):
            total(numpy.array([6e4, 6e4], numpy.float16))


@pytest.mark.parallel(2)
def test_arrays_that_only_one_branch_closes_over_are_compared_by_all_ranks():
    constant, x = np.array([2.0, 3.0, 4.0, 5.0]), np.arange(8.0)
    with spmd.checking():
        actual = on_line(lambda x: md.cond(axis_index("i") > 0, lambda: x * np.sin(constant), lambda: x))(x)
    np.testing.assert_allclose(actual.gather(), np.concatenate([x[:4], x[4:] * np.sin(constant)]))


# ---------------------------------------------------------------- memory

#: A body, its specs, and what it gives of x.
BODIES = {
    "identity": (lambda x: x, P("i"), lambda x: x),
    "unmapped": (lambda x: x, P(), lambda x: x),
    "square": (lambda x: x * x, P("i"), lambda x: x * x),
    "maximum": (lambda x: pmax(x, "i"), P(), lambda x: x),
    "sum": (lambda x: psum(x, "i"), P(), lambda x: x * RANKS),
    "gather": (lambda x: all_gather_invariant(x, "i", tiled=True)[: len(x)], P(), lambda x: x),
    "permutation": (lambda x: ppermute(x, "i", [(0, 0)]), P("i"), lambda x: numpy.where(x < 2, x, 0)),
    "exchange": (lambda x: all_to_all(all_to_all(x, "i", 0, 0), "i", 0, 0), P(None, "i"), lambda x: x),
}


@pytest.mark.parallel([1, 2])
@each("compiled", [False, True])
@each("name", BODIES)
def test_results_are_not_the_arguments(name, compiled):
    """Written into, neither changes the other, nor what is computed again; a sharded argument stays, too."""
    body, spec, expected_of = BODIES[name]
    x = np.arange(2.0 * RANKS**2).reshape(RANKS, 2 * RANKS)
    x = x if name == "exchange" else x[0]
    f = md.jit(on_line(body, spec, spec)) if compiled else on_line(body, spec, spec)
    expected, inputs = expected_of(x.copy()), [x, spmd.distribute(x, mesh(RANKS, backend="mpi"), P("i"))]
    for argument in 2 * (inputs if spec.axes else inputs[:1]):
        result = f(argument)
        assert whole(result).tolist() == expected.tolist()
        if not spec.axes:
            result[...] = -1
    result = f(x)
    x[...] = 7.0
    assert whole(result).tolist() == expected.tolist()
