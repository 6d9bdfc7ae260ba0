"""Halos of blocks, compared with slices of the padded whole array; on any mesh, simulated or of MPI ranks."""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

import numpy
from numpy.testing import assert_allclose, assert_array_equal

import minidiff as md
import minidiff.numpy as np
import spmd
from spmd import P
from spmd.examples import heat, shallow_water, wave
from spmd.examples.fields import FIELD, bumps, grid_mesh, whole_halo
from spmd.halo import MODES
from spmd.parallel import conv
from tests.checks.meshes import mapped
from tests.checks.of_whole import check_agree, gradient
from tests.checks.properties import shows
from tests.checks.whole import whole


class Case(NamedTuple):
    """The arguments of a halo, and the shape of a rank's block."""

    shape: tuple[int, ...]
    widths: tuple[tuple[int, int], ...]
    axes: tuple
    mode: tuple[str, ...]


#: Blocks of two dimensions on axes "i" and "j": widths of one and of several blocks, of one side, of none.
CASES = [
    Case((3, 2), widths, axes, modes)
    for (widths, axes), modes in zip(
        itertools.product(
            [((1, 1), (1, 1)), ((0, 2), (1, 0)), ((7, 4), (0, 0)), ((2, 1), (5, 3))],
            [("i", "j"), ("j", "i"), (None, "i"), (("i", "j"), None), (None, None)],
        ),
        itertools.cycle(itertools.product(MODES, MODES)),
    )
]


def sizes_of(case: Case, mesh: spmd.Mesh) -> list[int]:
    """The number of ranks along each dimension."""
    return [spmd.mesh.specs.part_count(axes, mesh.shape) for axes in P(*case.axes).dims(len(case.shape))]


def blocks_with_halos(x: numpy.ndarray, case: Case, sizes: list[int]) -> numpy.ndarray:
    """The blocks with their halos, beside each other: slices of the padded whole."""
    padded = whole_halo(x, case.widths, None, case.mode)
    for dim, (n, (before, after)) in enumerate(zip(case.shape, case.widths)):
        places = [range(k * n, k * n + before + n + after) for k in range(sizes[dim])]
        padded = numpy.take(padded, list(itertools.chain(*places)), dim)
    return padded


def with_halo(case: Case, mesh: spmd.Mesh, typed: bool):
    spec = P(*case.axes)
    return mapped(lambda x: spmd.halo(x, case.widths, case.axes, case.mode), mesh, spec, spec, check_rep=typed)


@shows("reference", "derivatives", "adjoint", "modes", "types")
def check_halo(mesh: spmd.Mesh, case: Case, typed: bool) -> None:
    """Values, by all interpreters, and the transpose by the inner-product identity."""
    sizes, rng = sizes_of(case, mesh), numpy.random.default_rng(0)
    x, t = rng.standard_normal((2, *[n * m for n, m in zip(case.shape, sizes)]))
    f, expected = with_halo(case, mesh, typed), blocks_with_halos(x, case, sizes)
    assert_array_equal(whole(f(x)), expected)
    assert_array_equal(whole(md.jit(f)(x)), expected)
    value, tangent = md.jvp(f, (x,), (t,))
    assert_array_equal(whole(value), expected)
    assert_array_equal(whole(tangent), blocks_with_halos(t, case, sizes))
    both = whole(md.vmap(f)(numpy.stack([x, t])))
    assert_array_equal(both, [expected, blocks_with_halos(t, case, sizes)])
    y = rng.standard_normal(expected.shape)
    for transform in (lambda g: g, md.jit):
        back = transform(lambda x, y: md.vjp(f, x)[1](y)[0])(x, y)
        assert_allclose(numpy.vdot(expected, y), numpy.vdot(x, whole(back)), rtol=0, atol=1e-9)


@shows("counts")
def check_messages(mesh: spmd.Mesh, case: Case) -> None:
    """Two messages an axis, forward and backward; more if the halo is wider than a block; none from one rank."""
    sizes = sizes_of(case, mesh)
    hops = sum(
        -(-width // n) for n, size, widths in zip(case.shape, sizes, case.widths) for width in widths if size > 1
    )
    f, x = with_halo(case, mesh, True), numpy.zeros([n * m for n, m in zip(case.shape, sizes)])
    assert spmd.communication(f)(x).counts.get("ppermute", 0) == hops
    counts = spmd.communication(gradient(f))(x).counts
    assert counts.get("ppermute", 0) == 2 * hops and set(counts) <= {"ppermute", "psum"}


@shows("types")
def check_types(mesh: spmd.Mesh) -> None:
    """A halo varies along the axes that it comes from, on one rank too; integers and trees keep their types."""

    def body(x, whole):
        actual = spmd.halo({"f": x, "n": np.arange(6).reshape(3, 2)}, 1, "i")
        assert md.typeof(actual["f"]).variance == {"i", "j"}
        assert md.typeof(actual["n"]).variance == {"i"} and md.typeof(actual["n"]).dtype == int
        assert md.typeof(spmd.halo(whole, 1, (None, "j"))).variance == {"j"}
        return actual["f"]

    x = numpy.ones((3 * mesh.shape["i"], 2 * mesh.shape["j"]))
    mapped(body, mesh, (P("i", "j"), P()), P("i", "j"))(x, numpy.ones((2, 2)))


@shows("reference", "derivatives", "modes", "types")
def check_conv(mesh: spmd.Mesh, typed: bool) -> None:
    """Values and gradients are those of whole images; the kernel's gradient is summed over the ranks."""
    rng, spec = numpy.random.default_rng(0), P(None, "i", "j")
    x, kernel = rng.standard_normal((2, 3 * mesh.shape["i"], 2 * mesh.shape["j"], 3)), rng.standard_normal((3, 2, 3, 4))
    mode = ("edge", "periodic")
    split = mapped(lambda x, kernel: conv(x, kernel, ("i", "j"), mode), mesh, (spec, P()), spec, check_rep=typed)
    of_whole = functools.partial(conv, axes=(None, None), mode=mode)
    padded = whole_halo(x, ((0, 0), (1, 1), (0, 1), (0, 0)), None, ("zeros", *mode, "zeros"))
    windows = numpy.lib.stride_tricks.sliding_window_view(padded, (3, 2), (1, 2))
    assert_allclose(of_whole(x, kernel), numpy.einsum("nhwcij,ijcf->nhwf", windows, kernel), rtol=1e-12)
    check_agree(split, of_whole, (x, kernel))


#: Strides, dilations and numbers of groups.
STRIDES = [(1, 1, 1), (2, 2, 2), (2, 1, 1), (1, 2, 2)]


@shows("reference", "derivatives", "modes", "counts")
def check_strided_conv(mesh: spmd.Mesh, options: tuple[int, int, int]) -> None:
    """A convolution over blocks is that of whole images by `md.nn.conv`; messages are those of the module's table."""
    rng, spec, (stride, dilation, groups) = numpy.random.default_rng(0), P(None, "i", "j"), options
    x = rng.standard_normal((2, 4 * mesh.shape["i"], 6 * mesh.shape["j"], 4))
    kernel = rng.standard_normal((3, 3, 4 // groups, 6))
    split = mapped(lambda x, kernel: conv(x, kernel, ("i", "j"), "zeros", *options), mesh, (spec, P()), spec)
    check_agree(split, lambda x, kernel: md.nn.conv(x, kernel, stride, "same", dilation, groups), (x, kernel))
    sent = [row for row in spmd.communication(gradient(split))(x, kernel).rows if row.bytes]
    hops = [row for row in sent if row.collective == "ppermute"]
    before = (2 * dilation + 1 - stride) // 2  # of the rest of a window beyond its stride, after it is the larger half
    sides = sum(n > 1 for n in mesh.shape.values()) * (2 if before else 1)
    for direction in ("forward", "backward"):
        assert sum(row.count for row in hops if row.direction == direction) == sides
    if mesh.shape["j"] == 1 and mesh.shape["i"] > 1:
        rows = 2 * dilation + 1 - stride
        assert sum(row.bytes for row in hops) == 2 * 8 * 2 * rows * 6 * 4


# ---------------------------------------------------------------- the examples


@shows("reference", "modes")
def check_fields(mesh: spmd.Mesh) -> None:
    """Each example is the same as plain NumPy to the last bit, eager and compiled."""
    mesh = grid_mesh(mesh.size, mesh.backend)
    for field, program, plain, spec in (
        (bumps((12, 8)), heat.plate(mesh, 5), heat.plain, FIELD),
        (bumps((16, 8)), wave.recorded(mesh, 5), wave.plain_recorded, FIELD),
        (shallow_water.jet((12, 24)), shallow_water.ocean(mesh, 5), shallow_water.plain, shallow_water.STATE),
    ):
        blocks = spmd.distribute(field, mesh, spec)
        for transform in (lambda f: f, md.jit):
            assert_array_equal(whole(transform(program)(blocks)), plain(field, 5))


@shows("derivatives", "modes")
def check_gradients(mesh: spmd.Mesh) -> None:
    """The adjoint through all steps, also by a schedule, is that of the program on one rank, and right."""
    mesh, alone = grid_mesh(mesh.size, mesh.backend), grid_mesh(1, "simulated")
    u, steps = bumps((16, 8)), 6
    record = wave.plain_recorded(u, steps)
    guess = 0.5 * u[::-1]
    value, gradient = md.value_and_grad(wave.misfit(alone))(guess, record)
    assert_allclose(value, 0.5 * numpy.sum((wave.plain_recorded(guess, steps) - record) ** 2))
    for slots in (None, 3):
        for transform in (lambda f: f, md.jit):
            actual = transform(md.value_and_grad(wave.misfit(mesh, slots)))(guess, record)
            assert_allclose(actual[0], value)
            assert_allclose(whole(actual[1]), whole(gradient), rtol=1e-10, atol=1e-12)
    if mesh.size == 1:
        md.testing.check_grads(lambda u: wave.misfit(mesh)(u, record), (guess,), order=1)


@shows("reference")
def check_recovered(mesh: spmd.Mesh) -> None:
    u, mesh = bumps((16, 16)), grid_mesh(mesh.size, mesh.backend)
    record = wave.recorded(mesh, 36)(spmd.distribute(u, mesh, FIELD))
    actual, misfits = wave.recover(mesh, record, u.shape, 12, 4)
    assert all(a > b for a, b in itertools.pairwise(misfits))
    assert numpy.linalg.norm(whole(actual) - u) < 0.05 * numpy.linalg.norm(u)
