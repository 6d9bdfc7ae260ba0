"""Meshes, and how their backend is chosen."""

import gc
import subprocess
import sys
import weakref

import numpy as np
import pytest

import minidiff as md
import spmd
from collectives import axis_index, psum
from collectives.backends.one_rank import LauncherError
from spmd import P
from spmd.mesh import launch
from tests import PATIENCE
from tests.checks.samples import each

WITHOUT_MPI4PY = """
import sys
sys.modules["mpi4py"] = None  # as if it were not installed
import spmd
spmd.make_mesh((4,), ("i",))
"""


def test_a_mesh_says_what_it_is():
    mesh = spmd.make_mesh((4, 2), ("x", "y"), backend="simulated")
    assert mesh.shape == {"x": 4, "y": 2}
    assert mesh.axis_names == ("x", "y")
    assert (mesh.size, mesh.rank, mesh.backend) == (8, 0, "simulated")
    assert repr(mesh) == "Mesh(x: 4, y: 2; 8 ranks, simulated)"
    assert mesh.calls == {} and mesh.bytes == {}


BODIES = {
    "in an expression": lambda mesh, x: x * mesh.rank,
    "in a Python if": lambda mesh, x: x if mesh.rank == 0 else -x,
    "in a branch": lambda mesh, x: md.cond(True, lambda x: x * mesh.rank, lambda x: x, x),
    "in a loop": lambda mesh, x: md.scan(lambda c, _: (c * mesh.rank, None), x, None, length=2)[0],
    "in jit": lambda mesh, x: md.jit(lambda x: x * mesh.rank)(x),
    "under grad": lambda mesh, x: md.grad(lambda x: np.sum(x * mesh.rank))(x),
    "under vmap": lambda mesh, x: md.vmap(lambda x: x * mesh.rank)(x),
}


@each("wrap", [lambda f: f, md.jit, lambda f: md.grad(lambda x: np.sum(f(x)))])
@each("how", BODIES)
def test_the_rank_of_a_mesh_in_a_body(how, wrap):
    """It has no type that says that it differs from rank to rank: `axis_index` has."""
    mesh = spmd.make_mesh((2, 2), ("x", "y"), backend="simulated")
    f = spmd.shard_map(lambda x: BODIES[how](mesh, x), mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    with pytest.raises(md.VarianceError, match=r"mesh\.rank in the body .* collectives\.axis_index\(\('x', 'y'\)\)"):
        wrap(f)(np.ones(4))
    assert mesh.rank == 0
    along = spmd.make_mesh((2,), ("x",), backend="simulated")
    g = spmd.shard_map(lambda x: x * axis_index("x"), mesh=along, in_specs=P("x"), out_specs=P("x"))
    assert g(np.ones(2)).gather().tolist() == [0.0, 1.0]


@each(
    "arguments, error, message",
    [
        (({"x": 4, "y": 2},), TypeError, r"write make_mesh\(\(4, 2\), \('x', 'y'\)\), got \{'x': 4, 'y': 2\}"),
        (({"x": 4}, ("x",)), TypeError, r"write make_mesh\(\(4,\), \('x',\)\)"),
        (((4,),), ValueError, r"1 sizes for 0 axis names"),
        (("x", 4), TypeError, "takes a tuple of sizes and a tuple of names"),
        (([("x", 4)], None), TypeError, "takes a tuple of sizes and a tuple of names"),
        (((4, 2), ("x",)), ValueError, r"2 sizes for 1 axis names: \(4, 2\) and \('x',\)"),
        (((4, 2), ("x", "x")), ValueError, r"axis name 'x' occurs twice in \('x', 'x'\); rename one of them"),
        (((4, 2), ("x", 0)), TypeError, "the name of an axis must be a string, .* got 0"),
        (((4.0,), ("x",)), TypeError, "integer"),
        (((0,), ("x",)), ValueError, "'x' has size 0; it must be at least 1, or -1 for all remaining ranks"),
        (((-2, -1), ("x", "y")), ValueError, "'x' has size -2"),
        (((-1, -1), ("x", "y")), ValueError, r"the sizes \(-1, -1\) leave several axes open: at most one may be -1"),
        (
            ((-1, 2), ("x", "y"), "mpi"),
            ValueError,
            r"the 1 ranks .*other axes \(y: 2\): start .*a multiple of 2, as in",
        ),
        (((2.0,), ("x",)), TypeError, r"'x' has size 2.0; it must be an integer: write int\(2.0\)"),
        ((4, "x"), TypeError, r"make_mesh\(\(4, 2\), \('x', 'y'\)\)"),
        (((4,), ("x",), "gpu"), ValueError, "backend must be 'mpi', 'simulated' or None, got 'gpu'"),
    ],
)
def test_arguments_that_make_no_mesh(arguments, error, message):
    with pytest.raises(error, match=message):
        spmd.make_mesh(*arguments)


def test_the_devices_of_a_mesh_are_not_listed():
    with pytest.raises(TypeError, match=r"make a mesh with make_mesh.*make_mesh\(\(4, 2\), \('x', 'y'\)\)"):
        spmd.Mesh([0, 1, 2, 3], ("x",))


def test_without_a_launcher_ranks_are_simulated(monkeypatch):
    for variable in launch.LAUNCHERS:
        monkeypatch.delenv(variable, raising=False)
    assert spmd.make_mesh((4,), ("i",)).backend == "simulated"
    for sizes, expected in (((-1,), {"x": 1}), ((4, -1), {"x": 4, "y": 1}), ((-1, 2), {"x": 1, "y": 2})):
        mesh = spmd.make_mesh(sizes, ("x", "y")[: len(sizes)])
        assert (mesh.shape, mesh.backend) == (expected, "simulated")


@pytest.mark.parametrize(
    "variable, value, expected",
    [("PMI_SIZE", "4", 4), ("OMPI_COMM_WORLD_SIZE", "1", 1), ("SLURM_STEP_NUM_TASKS", "1", None)],
)
def test_launchers_are_recognized(monkeypatch, variable, value, expected):
    for name in launch.LAUNCHERS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, value)
    assert launch.launcher_size() == expected


def test_a_size_that_is_left_open(monkeypatch):
    """It takes what the launcher has, also where ranks are simulated."""
    monkeypatch.setenv("PMI_SIZE", "8")
    for sizes, expected in (((-1,), (8,)), ((-1, 2), (4, 2)), ((2, -1, 4), (2, 1, 4)), ((8, np.int64(-1)), (8, 1))):
        mesh = spmd.make_mesh(sizes, ("x", "y", "z")[: len(sizes)], backend="simulated")
        assert tuple(mesh.shape.values()) == expected and mesh.size == 8
    with pytest.raises(ValueError, match=r"the 8 ranks of the launcher cannot be divided by .*\(y: 3\)"):
        spmd.make_mesh((-1, 3), ("x", "y"), backend="simulated")


def test_one_process(monkeypatch):
    assert (spmd.process_index(), spmd.process_count(), spmd.barrier()) == (0, 1, None)
    monkeypatch.setenv("PMI_SIZE", "4")
    for f in (spmd.process_index, spmd.process_count, spmd.barrier):
        with pytest.raises(LauncherError, match="the launcher started 4 processes, but mpi4py sees 1"):
            f()


def test_the_number_of_a_process_in_a_body():
    mesh = spmd.make_mesh((2,), ("x",), backend="simulated")
    f = spmd.shard_map(lambda x: x * spmd.process_index(), mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    with pytest.raises(md.VarianceError, match=r"process_index\(\) in the body .* collectives\.axis_index\('x'\)"):
        f(np.ones(2))


def test_a_mesh_of_another_size_than_mpi_has():
    with pytest.raises(ValueError, match=r"4 x 2 needs 8 ranks, but MPI has 1.*mpirun -n 8.*backend='simulated'"):
        spmd.make_mesh((4, 2), ("x", "y"), backend="mpi")


def test_a_launcher_of_another_mpi(monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    with pytest.raises(LauncherError, match="the launcher started 4 processes, but mpi4py sees 1"):
        spmd.make_mesh((4,), ("i",))


def test_a_launcher_without_mpi4py():
    run = subprocess.run(
        [sys.executable, "-c", WITHOUT_MPI4PY], env={"PMI_SIZE": "4"}, capture_output=True, text=True, timeout=PATIENCE
    )
    assert run.returncode != 0
    assert "an MPI launcher started this process as one of 4, but mpi4py cannot be imported" in run.stderr
    assert "`pip install mpi4py mpich`" in run.stderr


def test_the_first_process_without_mpi4py_shows_where():
    first, other = (
        subprocess.run(
            [sys.executable, "-c", WITHOUT_MPI4PY],
            env={"PMI_SIZE": "4", "PMI_RANK": rank},
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        for rank in "02"
    )
    assert first.returncode == other.returncode == 1
    assert "Traceback" in first.stderr
    assert other.stderr.startswith("[rank 2] ImportError: an MPI launcher started this process as one of 4, but mpi4py")
    assert other.stderr.count("\n") == 1


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("backend", ["simulated", "mpi"])
def test_a_mesh_is_freed_with_its_last_user(backend, jit):
    """MPI has a few thousand communicators, and a script may make meshes in each step."""

    def use():
        mesh = spmd.make_mesh((1,) if backend == "mpi" else (2,), ("i",), backend=backend)
        f = spmd.shard_map(lambda x: (psum(x * 2, "i"), x), mesh=mesh, in_specs=P("i"), out_specs=(P(), P("i")))
        f = md.jit(f) if jit else f
        for x in (np.ones(4), spmd.distribute(np.ones(4), mesh, P("i"))):
            (f(x)[1] * 2).sum()
            md.grad(lambda x: f(x)[0].sum())(x)
        return weakref.ref(mesh), weakref.ref(mesh.ranks)

    references = use()
    gc.collect()
    assert [reference() for reference in references] == [None, None]
