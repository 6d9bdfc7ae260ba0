"""Bodies of a shard_map over i alone, of values that are sharded along j: each with the whole-array function."""

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import (
    all_gather,
    all_gather_invariant,
    all_to_all,
    axis_size,
    pmax,
    pmean,
    ppermute,
    psum,
    psum_scatter,
)
from spmd import P
from tests.checks.meshes import mesh as simulated
from tests.checks.of_whole import check_values, summed
from tests.checks.properties import shows
from tests.checks.results import assert_trees_close, run_and_count

# ---------------------------------------------------------------- on a mesh (i, j), of rows of x [4, 4], and w [4, 4]


@md.custom_jvp
def doubled(x):
    return 2.0 * x


doubled.defjvp(lambda primals, tangents: (doubled(primals[0]), 3.0 * tangents[0]))


@md.custom_vjp
def clipped(x, scale):
    return x * scale, x.sum(0)


clipped.defvjp(
    lambda x, scale: ((x * scale, x.sum(0)), (x, scale)),
    lambda res, cts: (5.0 * cts[0] * res[1] + cts[1], None),
)


def columns(f, in_specs=P(None, "j"), out_specs=P(None, "j"), **options):
    return spmd.shard_map(f, in_specs=in_specs, out_specs=out_specs, **options)


def scanned(x):
    def step(c, row):
        c = np.sin(c) + row
        return c, c * row[::-1].sum()

    return md.scan(step, np.zeros(4), x)


def recomputed(x, w):
    f = md.checkpoint(lambda x: np.sin(np.sin(x) @ w))
    return f(x)


def inner_gradient(x):
    return md.grad(lambda x: (np.sin(x) * x.sum(1, keepdims=True)).sum())(x)


def branch(x):
    return md.cond(True, lambda x: (np.sin(x), x.sum(1)), lambda x: (x, x[:, 0]), x)


def turning(x, w):
    return md.scan(lambda c, k: (np.sin(c.T * k), c[0]), w, np.arange(1.0, 4.0))


def softmax(x):
    e = np.exp(x - md.stop_gradient(x.max(1, keepdims=True)))
    return e / e.sum(1, keepdims=True)


ROWS = P("i")


IJ = P("i", "j")


def program(body, *specs, out_specs=ROWS):
    """A body of a block of x and of w, its out_specs, and the specs of the results."""
    return body, out_specs, list(specs)


PROGRAMS = {
    "elementwise": program(lambda x, w: np.sin(x) * x + 1, IJ),
    "a contraction": program(lambda x, w: x @ w, ROWS),
    "einsum": program(lambda x, w: np.einsum("ab,bc,ab->ac", x, w, x), ROWS),
    "outer product": program(lambda x, w: np.outer(x[:, 0], w[:, 0]), IJ),
    "a sum over the split dimension": program(lambda x, w: x.sum(1), ROWS),
    "a sum over the other": program(lambda x, w: psum(x.sum(0), "i"), P("j"), out_specs=P()),
    "transpose": program(lambda x, w: np.sin(x.T), P("j", "i"), out_specs=P(None, "i")),
    "indices": program(lambda x, w: (x[:1], x[:, 3] * w[:, 1].sum(), x[:, ::2], x[:, ::-1]), IJ, ROWS, IJ, IJ),
    "reshape and stack": program(
        lambda x, w: (np.stack([x, x * x], -1), np.concatenate([x, w[:2]], 0), x[:, None]), IJ, IJ, P("i", None, "j")
    ),
    "softmax": program(lambda x, w: softmax(x), IJ),
    "collectives": program(
        lambda x, w: (psum(x, "i"), ppermute(x, "i", [(0, 1), (1, 0)]) * pmean(x.sum(), "i"), x / pmax(abs(x), "i")),
        *(P(None, "j"), IJ, IJ),
        out_specs=(P(), ROWS, ROWS),
    ),
    "joining rows": program(
        lambda x, w: (
            np.sin(all_gather(x, "i", tiled=True))[:2],
            psum_scatter(x, "i", tiled=True),
            all_gather(x, "i", axis=1).sum(1),
            all_to_all(x[:, None], "i", 0, 1),
        ),
        *(IJ, IJ, IJ, P("i", None, "j")),
    ),
    "scan": program(lambda x, w: scanned(x), P(("i", "j")), IJ),
    "cond": program(lambda x, w: branch(x), IJ, ROWS),
    "a while_loop": program(
        lambda x, w: md.while_loop(
            lambda c: psum(c.sum(), "i") < 50 * abs(w).sum(), lambda c: c + abs(np.sin(c)) + x[0] + 1, x
        ),
        IJ,
    ),
    "checkpoint": program(recomputed, ROWS),
    "custom_jvp": program(lambda x, w: doubled(np.sin(x)), IJ),
    "custom_vjp": program(lambda x, w: clipped(np.sin(x), w.sum())[0], IJ),
    "custom_vjp of a sum": program(lambda x, w: clipped(np.sin(x), w.sum()), IJ, P(("i", "j"))),
    "a gradient inside": program(lambda x, w: inner_gradient(x), IJ),
    "vmap inside": program(lambda x, w: md.vmap(lambda row: np.sin(row) @ w * row[0])(x), ROWS),
    "jit inside": program(lambda x, w: md.jit(lambda x: np.sin(x) @ w)(x), ROWS),
    "partial sums": program(lambda x, w: x.sum(0) * 2, P("j"), out_specs=P(sum="i")),
    "nested shard_maps": program(
        lambda x, w: (lambda f: f(f(x) + x))(columns(lambda x: np.sin(x) * axis_size("i"))), IJ
    ),
    "a nested shard_map": program(
        lambda x, w: columns(lambda x: psum(x.sum(), ("i", "j")) * np.sin(x))(np.cos(x)) + x, IJ
    ),
}
#: Those whose backward pass gathers: it transposes a split of what is whole, a broadcast value for example.
GATHERED = ("reshape and stack", "custom_vjp of a sum", "a gradient inside")

#: Those that exchange blocks: a slice of split rows stays split by rows, until it is joined with columns.
EXCHANGED = {"reshape and stack": [32]}

#: Programs that need blocks in other places.
MOVED = {
    "joining columns": program(lambda x, w: all_gather(x, "i", axis=1, tiled=True)[:, :4], P(("i", "j"))),
    "rows of a nested shard_map": program(lambda x, w: columns(np.sin, P("j"), P("j"))(x), P(("i", "j"))),
    "a nested shard_map that closes over a split value": program(
        lambda x, w: columns(lambda y: (y[:, :, None] * x[:, None]).sum(2))(x), IJ
    ),
    "a nested shard_map that gathers": program(
        lambda x, w: columns(lambda y: all_gather_invariant(y, "j", axis=1, tiled=True) * 2, out_specs=P())(x)
    ),
    "a loop over columns": program(lambda x, w: md.scan(lambda c, col: (c + col, c * col), np.zeros(2), x.T)[1].T),
    "a carry that changes places": program(turning, out_specs=P()),
}
ALL = [*PROGRAMS, *MOVED]
FEW = ["a contraction", "softmax", "scan", "a nested shard_map", "joining columns"]
ARGS = np.sin(np.arange(16.0)).reshape(4, 4), np.cos(np.arange(16.0)).reshape(4, 4)


def mapped(name, mesh):
    """A program on blocks, as a function of x and w."""
    body, out_specs, _ = {**PROGRAMS, **MOVED}[name]
    return spmd.shard_map(body, mesh=mesh, in_specs=(P("i"), P()), out_specs=out_specs, axis_names={"i"})


def whole(name):
    """The same of arrays that are not split further: the other axis is of one rank."""
    f = mapped(name, simulated(2, 1))
    return lambda *args: spmd.gather(f(*args))


def distributed(mesh):
    return [spmd.distribute(x, mesh, spec) for x, spec in zip(ARGS, (IJ, P("j")))]


@shows("reference", "derivatives", "modes")
def check_program(mesh, name):
    """Values and derivatives are those of whole arrays, in both modes; results stay split, and are not gathered."""
    f, args, of_whole, specs = mapped(name, mesh), distributed(mesh), whole(name), (PROGRAMS | MOVED)[name][2]
    split = mesh.shape["j"] == 2
    check_values(f, args, of_whole, ARGS)
    if specs and split:
        assert list(map(spmd.spec_of, md.tree.leaves(f(*args)))) == specs
    if name in PROGRAMS and split:
        assert [row.bytes for row in gathers(f, args)] == EXCHANGED.get(name, [])
    if name == "a while_loop":  # it has no reverse mode, and the report counts one step
        assert_trees_close(md.jvp(f, args, args), md.jvp(of_whole, ARGS, ARGS))
        return
    run_and_count(f, mesh, *args)
    gradient = md.grad(summed(f), (0, 1))
    check_values(gradient, args, md.grad(summed(of_whole), (0, 1)), ARGS)
    assert [x.spec for x in gradient(*args)] == [x.spec for x in args]
    if "custom_vjp" not in name:  # it has no forward mode
        assert_trees_close(md.jvp(summed(f), args, args), md.jvp(summed(of_whole), ARGS, ARGS))
    if name in PROGRAMS and split:
        assert bool(gathers(gradient, args)) is (name in GATHERED)


def gathers(f, args):
    """The collectives over j that gather or exchange blocks."""
    names = ("all_gather", "all_gather_invariant", "all_to_all")
    return [row for row in spmd.communication(f)(*args).rows if row.collective in names and "j" in row.axes]
