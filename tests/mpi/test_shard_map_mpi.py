"""Bodies on MPI ranks: what each rank has, prints and chooses, errors on all of them, and the memory of arrays."""

import functools

import numpy
import pytest
from mpi4py import MPI

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import all_gather, axis_index, pmax, pmean, psum
from collectives.guards.mismatch import DisagreementError
from spmd import P
from tests.checks.samples import each
from tests.checks.whole import whole
from tests.programs import auto_axes
from tests.programs.on_blocks import assert_trees_close, run_and_count

WORLD = MPI.COMM_WORLD
RANKS = WORLD.size
few = pytest.mark.parallel([1, 2, 4])
everywhere = pytest.mark.parallel([1, 2, 3, 4, 8])


@functools.cache
def mesh_of(*shape, backend="mpi"):
    return spmd.make_mesh(shape, ("i", "j", "k")[: len(shape)], backend=backend)


def mapped(f, in_specs=P("i"), out_specs=P("i"), mesh=None, **options):
    return spmd.shard_map(f, mesh or mesh_of(RANKS), in_specs=in_specs, out_specs=out_specs, **options)


# ---------------------------------------------------------------- this rank's block


@everywhere
def test_blocks_are_those_of_simulated_ranks():
    """For results mapped in every way."""
    shape = {4: (2, 2), 8: (2, 2, 2)}.get(RANKS, (RANKS,))
    mesh, simulated = (mesh_of(*shape, backend=on) for on in ("mpi", "simulated"))
    last, x = mesh.axis_names[-1], np.arange(24.0 * 24).reshape(24, 24)
    for spec in (P(mesh.axis_names), P(None, last), P(last), P(mesh.axis_names[::-1], None)):
        real, other = (mapped(lambda x: np.sin(x) + psum(x, last), spec, spec, m)(x) for m in (mesh, simulated))
        np.testing.assert_allclose(real.local, other.local[mesh.rank])
        np.testing.assert_allclose(real.gather(), other.gather())


@everywhere
def test_one_psum_for_all_parameters():
    params, x = {"w": np.ones((3, 3)), "b": np.ones(3)}, np.ones((2 * RANKS, 3))
    body = lambda p, x: pmean(np.sum(np.tanh(x @ p["w"] + p["b"]) @ p["w"].T), "i")  # noqa: E731
    run_and_count(md.grad(lambda p, x: mapped(lambda x: body(p, x), P("i"), P())(x)), mesh_of(RANKS), params, x)
    assert mesh_of(RANKS).calls == ({"psum": 2} if RANKS > 1 else {})  # the loss, and the gradients of both parameters


@few
def test_equal_collectives_of_values_that_vary_along_other_axes():
    """The plan of the first call is cached, and executes others of its name, shape and dtype."""
    types = []

    def body(x):
        sums = [psum(v, "i") for v in (x, psum(x, "j"), x)]
        types.extend(md.typeof(v) for v in sums)
        return sums

    x, specs = np.arange(RANKS * 3.0).reshape(RANKS, 3), [P(None, "j"), P(), P(None, "j")]
    results = mapped(body, P("i", "j"), specs, mesh_of(RANKS, 1))(x)
    assert [set(t.variance) for t in types] == [{"j"}, set(), {"j"}]
    for y in results:
        np.testing.assert_allclose(whole(y), x.sum(0, keepdims=True))


@everywhere
def test_printing_shows_this_rank(capsys):
    mapped(lambda x: print(x) or x)(np.arange(RANKS))
    rank = WORLD.rank
    assert capsys.readouterr().out == f"On rank {rank} at mesh coordinates (i,) = ({rank},):\n[{rank}]\n\n"


@everywhere
def test_a_sharded_array_is_a_block_here():
    x = np.arange(2.0 * RANKS)
    y = mapped(lambda x: x)(x)
    np.testing.assert_array_equal((2 * y + y).local, 3 * x[2 * WORLD.rank : 2 * WORLD.rank + 2])
    np.testing.assert_array_equal(y.gather(), x)
    np.testing.assert_array_equal(y @ x, x @ x)  # a product of parts, summed
    if RANKS > 1:
        with pytest.raises(ValueError, match=r"is split over the ranks of .*Call .gather\(\) on every rank"):
            np.asarray(y)
    else:
        np.testing.assert_array_equal(np.asarray(y), x)


@everywhere
def test_meshes_of_some_of_the_ranks_and_that_are_alike():
    """A mesh takes a communicator's ranks. MPI has a few thousand of these: a script may make one in each step."""
    half = WORLD.Split(WORLD.rank % 2)
    some = spmd.make_mesh((half.size,), ("i",), comm=half)
    assert mapped(lambda x: psum(x, "i"), P("i"), P(), some)(np.ones(half.size)) == half.size
    with pytest.raises(ValueError, match=f"needs {RANKS + 1} ranks, but MPI has {RANKS}"):
        spmd.make_mesh((RANKS + 1,), ("i",), backend="mpi")
    one, two = (spmd.make_mesh((RANKS,), ("i",), backend="mpi") for _ in range(2))
    for mesh in (one, two):
        mapped(lambda x: psum(x, "i"), P("i"), P(), mesh)(np.ones(RANKS))
    assert one.ranks.along(("i",)) is two.ranks.along(("i",))
    assert one.calls == two.calls == ({"psum": 1} if RANKS > 1 else {})  # what they count is their own


@pytest.mark.parallel(2)
@each("in_spec", [P(), P("i")])  # the whole of x, or blocks of it that are summed
def test_python_numbers_promote_as_in_numpy(in_spec):
    x = np.arange(4, dtype="f4")
    expected = (x[:2] + x[2:]) * np.float32(0.1)
    f = mapped(lambda s, x: (x[:2] + x[2:] if in_spec == P() else psum(x, "i")) * s, (P(), in_spec), P())
    for g in (f, md.jit(f), lambda s, x: md.value_and_grad(lambda x: f(s, x).sum())(x)[0]):
        actual = g(0.1, x)
        assert actual.dtype == "f4"
        np.testing.assert_array_equal(actual, expected if actual.shape else expected.sum())


# ---------------------------------------------------------------- all ranks alike


@everywhere
def test_branching_on_what_all_ranks_know():
    def body(x):
        steps = 0
        while psum(x.sum(), "i") < 100:
            x, steps = 2 * x, steps + 1
        return x / 2**steps if pmax(axis_index("i"), "i") == RANKS - 1 else -x

    np.testing.assert_array_equal(mapped(body)(np.ones(RANKS)).gather(), np.ones(RANKS))
    with pytest.raises(md.VarianceError, match="varies along 'i'"):
        mapped(lambda x: x if x[0] else -x)(np.ones(RANKS))


@everywhere
def test_carries_that_begin_as_python_numbers():
    """They take float32 from what they meet, in whichever step."""

    def body(x):
        step = lambda c, x: ((c[0] + x, c[1] + psum(c[0], "i"), c[2] * 0.5), c[2] * x)  # noqa: E731
        (a, b, c), rows = md.scan(step, (0.0, 0, 1.0), x)
        return a.reshape(1), b, c, rows

    x, y, z, rows = mapped(body, P("i"), (P("i"), P(), P(), P("i")))(np.ones(4 * RANKS, "f4"))
    assert (x.dtype, y.dtype, z.dtype, rows.dtype) == ("f4", "f4", "f8", "f4")
    assert (x.gather().tolist(), y, z) == ([4.0] * RANKS, 6.0 * RANKS, 1 / 16)


@everywhere
def test_an_error_on_all_ranks_leaves_the_mesh_usable():
    x = numpy.arange(float(RANKS))
    with pytest.raises(md.UnboundAxisError, match="no axis 'nowhere' here"):
        mapped(lambda x: psum(x, "nowhere"), P("i"), P())(x)
    assert mapped(lambda x: psum(x, "i"), P("i"), P())(x) == x.sum()


@pytest.mark.parallel(2)
@each("dtype, advice", [(object, "to one of numbers"), ("M8[D]", "subtract a reference"), ("m8[s]", "divide it by a")])
def test_arrays_that_are_not_of_numbers_are_refused(dtype, advice):
    """Messages are bytes; those of an object are an address, which means nothing on another rank."""
    rows = numpy.array([1, 2]).astype(dtype)
    for mesh in (mesh_of(2), mesh_of(2, backend="simulated")):
        with pytest.raises(TypeError, match=rf"args\[0\]: .*got one of dtype {rows.dtype.name[:6]}.*{advice}"):
            mapped(lambda x: all_gather(x, "i"), mesh=mesh)(rows)
        with pytest.raises(TypeError, match=rf"got one of dtype {rows.dtype.name[:6]}.*{advice}"):
            mapped(lambda x: all_gather(rows, "i"), mesh=mesh)(numpy.zeros(2))


@pytest.mark.parallel([2, 4])
def test_a_set_of_axes_has_one_order_on_all_ranks():
    """A set's own order is that of hashes, which each process salts for itself."""
    mesh = mesh_of(RANKS // 2, 2)
    x, axes = numpy.arange(float(RANKS)), mesh.axis_names

    def body(x):
        actual = [psum(x, set(axes)), psum(x, md.typeof(x).variance), pmax(x, frozenset(axes))]
        with pytest.raises(TypeError, match=r"all_gather over the set \{'i'.*'i'"):
            all_gather(x, set(axes))
        return actual

    for f in (body, md.jit(body)):
        numpy.testing.assert_array_equal(mapped(f, P(axes), P(), mesh)(x), [[x.sum()], [x.sum()], [x.max()]])


@pytest.mark.parallel(2)
def test_static_arguments_are_compared():
    x = auto_axes.ARGS[0]
    f = mapped(lambda x, n, g: g(x) * n, (P("i"), None, None))
    for n in (2, 3, 2):
        assert_trees_close(f(x, n, lambda x: -x), -n * x)
    with pytest.raises(DisagreementError, match=r"static arguments: 1[\s\S]*All ranks pass the same static arguments"):
        f(x, spmd.process_index(), abs)


@pytest.mark.parallel(2)
def test_the_rank_that_makes_a_nan_names_itself():
    x = numpy.zeros(2)  # all raise, and so stay in step
    for gradient in (md.grad(lambda x: mapped(np.sqrt)(x).sum()), md.jit(md.grad(lambda x: mapped(np.sqrt)(x).sum()))):
        with (
            md.debug_nans(),
            pytest.raises(FloatingPointError, match=rf"backward pass of .*, on rank {WORLD.rank} at mesh coordinates"),
        ):
            gradient(x)


@pytest.mark.parallel(2)
def test_sums_are_compared_with_the_operands_of_all_ranks():
    total = mapped(lambda x: psum(x, "i"), P("i"), P())
    with md.debug_nans():
        assert numpy.isinf(total(numpy.array([numpy.inf, 1.0])))
        message = rf"psum of f16\[1\]{{i}} produced an infinity.*, on rank {WORLD.rank} at"
        with pytest.raises(FloatingPointError, match=message):
            total(numpy.array([6e4, 6e4], numpy.float16))


# ---------------------------------------------------------------- ranks that choose their own branch


@pytest.mark.parallel(4)
@each("groups", [[[0], [1]], [[1, 0]]], ids=str)
def test_branches_with_sums_in_groups_along_the_other_axis(groups):
    among = lambda x: psum(x, "j", axis_index_groups=groups)  # noqa: E731
    body = lambda x: md.cond(axis_index("i") > 0, among, lambda x: -x, x)  # noqa: E731
    f, x = mapped(body, P(("i", "j")), P(("i", "j")), mesh_of(2, 2)), np.sin(np.arange(8.0))
    second = x[4:] if len(groups) == 2 else np.tile(x[4:6] + x[6:], 2)
    for run in (f, md.jit(f)):
        assert_trees_close(run(x), np.concatenate([-x[:4], second]))


def of_choice(true_fun, false_fun=lambda x: x):
    return mapped(lambda x: md.cond(axis_index("i") > 0, true_fun, false_fun, x))


@pytest.mark.parallel(2)
def test_a_branch_that_communicates_raises_on_all_ranks():
    f = of_choice(lambda x: psum(x, "i"))
    for run in (f, md.jit(f)):
        with pytest.raises(md.VarianceError, match="true_fun has a psum over 'i'"):
            run(np.arange(8.0))


@pytest.mark.parallel(2)
def test_arrays_that_only_one_branch_closes_over_are_compared_by_all_ranks():
    constant, x = np.array([2.0, 3.0, 4.0, 5.0]), np.arange(8.0)
    with spmd.checking():
        actual = of_choice(lambda x: x * np.sin(constant))(x)
    assert_trees_close(actual, np.concatenate([x[:4], x[4:] * np.sin(constant)]))


@pytest.mark.parallel(2)
def test_only_the_ranks_of_a_branch_print(capsys):
    def loud(x):
        md.debug.print("here")
        return x

    for run in (of_choice(loud), md.jit(of_choice(loud))):
        run(np.arange(8.0))
        assert capsys.readouterr().out.count("here") == WORLD.rank


# ---------------------------------------------------------------- axes that are not mapped over


@pytest.mark.parallel(4)
def test_split_batches():
    mesh, (x, w) = mesh_of(2, 2), auto_axes.ARGS
    f = mapped(lambda x, w: psum(np.sin(x) @ w, "i"), (P("i"), P()), P(), mesh, axis_names={"i"})
    of_whole = lambda batch, w: (np.sin(batch) @ w)[:, :2] + (np.sin(batch) @ w)[:, 2:]  # noqa: E731
    batched, batch = md.vmap(f, (0, None), spmd_axis_name="j"), np.stack([x, x + 0.5])
    args = spmd.distribute(batch, mesh, P("j", "i")), w
    assert_trees_close(run_and_count(batched, mesh, *args), of_whole(batch, w))
    gradient, expected = (md.grad(auto_axes.summed(f), (0, 1)) for f in (batched, of_whole))
    assert_trees_close(run_and_count(gradient, mesh, *args), expected(batch, w))


@pytest.mark.parallel(2)
def test_gradients_of_a_choice_in_a_batch_of_one():
    f = mapped(lambda x: md.cond(np.sum(x) > 0, np.sin, lambda x: x, x), P(), P(), mesh_of(2, 1))
    batched, x = md.vmap(f, spmd_axis_name="j"), np.array([[0.5, 1.0]])
    assert_trees_close(md.grad(auto_axes.summed(batched))(x), md.grad(auto_axes.summed(np.sin))(x))


@pytest.mark.parallel(4)
def test_a_view_that_is_gathered_and_then_varies():
    mesh = mesh_of(1, 4)
    w = spmd.distribute(np.ones((2, 4)), mesh, P(None, "j"))
    body = lambda w: psum(np.sum(w.reshape(-1) + axis_index("i")), "i")  # noqa: E731
    assert mapped(body, P(), P(), mesh, axis_names={"i"})(w) == 8.0


# ---------------------------------------------------------------- memory

BODIES = {
    "identity": (lambda x: x, P("i")),
    "unmapped": (lambda x: x, P()),
    "maximum": (lambda x: pmax(x, "i"), P()),
    "square": (lambda x: x * x, P("i")),
}


@few
@each("compiled", [False, True])
@each("name", BODIES)
def test_results_are_not_the_arguments(name, compiled):
    (body, spec), x = BODIES[name], np.arange(2.0 * RANKS)
    f = mapped(body, spec, spec)
    result, expected = (md.jit(f) if compiled else f)(x), x * x if name == "square" else x.copy()
    x[...] = 7.0
    assert whole(result).tolist() == expected.tolist()


@few
def test_a_pullback_survives_writing_in_place():
    x, c = np.arange(2.0 * RANKS), np.full(2, 3.0)
    value, pullback = md.vjp(mapped(lambda x: psum(x * x * c, "i"), P("i"), P()), x)
    expected = 6.0 * x
    for a in (x, c, value):
        a[...] = 100.0
    for _ in range(2):
        assert whole(pullback(np.ones(2))[0]).tolist() == expected.tolist()


@pytest.mark.parallel(1)
@each("inside", [False, True])
def test_constants_are_values_when_the_program_is_recorded(inside):
    w, x = np.arange(2.0), np.ones((RANKS, 1))
    body = lambda x: psum(x[0] * w + w * 2, "i")  # noqa: E731
    f = mapped(md.jit(body), P("i"), P()) if inside else md.jit(mapped(body, P("i"), P()))
    assert f(x).tolist() == [0.0, 3.0 * RANKS]
    w[...] = 5.0
    assert f(x).tolist() == [0.0, 3.0 * RANKS]
