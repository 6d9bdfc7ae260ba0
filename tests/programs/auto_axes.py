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
from tests.checks.of_whole import check_values, summed
from tests.checks.properties import shows
from tests.programs.on_blocks import assert_trees_close, run_and_count

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


def same(f, out_specs=P("i"), specs=(P("i", "j"),)):
    """A program whose body is the function of whole arrays."""
    return f, out_specs, f, list(specs)


IJ = P("i", "j")

#: name -> body of a block of x and of w; out_specs; the same of whole arrays; the specs of the results
PROGRAMS = {
    "elementwise": same(lambda x, w: np.sin(x) * x + 1),
    "a contraction": same(lambda x, w: x @ w, specs=[ROWS]),
    "einsum": same(lambda x, w: np.einsum("ab,bc,ab->ac", x, w, x), specs=[ROWS]),
    "outer product": same(lambda x, w: np.outer(x[:, 0], w[:, 0])),
    "a sum over the split dimension": same(lambda x, w: x.sum(1), specs=[ROWS]),
    "a sum over the other": (lambda x, w: psum(x.sum(0), "i"), P(), lambda x, w: x.sum(0), [P("j")]),
    "transpose": same(lambda x, w: np.sin(x.T), P(None, "i"), [P("j", "i")]),
    "indices": (
        lambda x, w: (x[:1], x[:, 3] * w[:, 1].sum(), x[:, ::2], x[:, ::-1]),
        ROWS,
        lambda x, w: (x[::2], x[:, 3] * w[:, 1].sum(), x[:, ::2], x[:, ::-1]),
        [IJ, ROWS, IJ, IJ],
    ),
    "reshape and stack": (
        lambda x, w: (np.stack([x, x * x], -1), np.concatenate([x, w[:2]], 0), x[:, None]),
        ROWS,
        lambda x, w: (np.stack([x, x * x], -1), np.concatenate([x[:2], w[:2], x[2:], w[:2]], 0), x[:, None]),
        [IJ, IJ, P("i", None, "j")],
    ),
    "softmax": same(lambda x, w: softmax(x)),
    "collectives": (
        lambda x, w: (psum(x, "i"), ppermute(x, "i", [(0, 1), (1, 0)]) * pmean(x.sum(), "i"), x / pmax(abs(x), "i")),
        (P(), ROWS, ROWS),
        lambda x, w: (
            x[:2] + x[2:],
            np.concatenate([x[2:], x[:2]]) * x.sum() / 2,
            x / np.concatenate([np.maximum(abs(x[:2]), abs(x[2:]))] * 2),
        ),
        [P(None, "j"), IJ, IJ],
    ),
    "joining rows": (
        lambda x, w: (
            np.sin(all_gather(x, "i", tiled=True))[:2],
            psum_scatter(x, "i", tiled=True),
            all_gather(x, "i", axis=1).sum(1),
            all_to_all(x[:, None], "i", 0, 1),
        ),
        ROWS,
        lambda x, w: (
            np.sin(np.concatenate([x[:2], x[:2]])),
            x[:2] + x[2:],
            np.concatenate([x[:2] + x[2:]] * 2),
            np.stack([x[:1], x[2:3], x[1:2], x[3:]]).reshape(2, 2, 4),
        ),
        [IJ, IJ, IJ, P("i", None, "j")],
    ),
    "scan": (
        lambda x, w: scanned(x),
        ROWS,
        lambda x, w: [np.concatenate(parts) for parts in zip(scanned(x[:2]), scanned(x[2:]))],
        [P(("i", "j")), IJ],
    ),
    "cond": same(lambda x, w: branch(x), specs=[IJ, ROWS]),
    "a while_loop": (
        lambda x, w: md.while_loop(
            lambda c: psum(c.sum(), "i") < 50 * abs(w).sum(), lambda c: c + abs(np.sin(c)) + x[0] + 1, x
        ),
        ROWS,
        lambda x, w: md.while_loop(
            lambda c: c.sum() < 50 * abs(w).sum(), lambda c: c + abs(np.sin(c)) + x[np.array([0, 0, 2, 2])] + 1, x
        ),
        [IJ],
    ),
    "checkpoint": same(recomputed, specs=[ROWS]),
    "custom_jvp": same(lambda x, w: doubled(np.sin(x))),
    "custom_vjp": same(lambda x, w: clipped(np.sin(x), w.sum())[0]),
    "custom_vjp of a sum": (
        lambda x, w: clipped(np.sin(x), w.sum()),
        ROWS,
        lambda x, w: (clipped(np.sin(x), w.sum())[0], np.concatenate([np.sin(x[:2]).sum(0), np.sin(x[2:]).sum(0)])),
        [IJ, P(("i", "j"))],
    ),
    "a gradient inside": same(lambda x, w: inner_gradient(x)),
    "vmap inside": (
        lambda x, w: md.vmap(lambda row: np.sin(row) @ w * row[0])(x),
        ROWS,
        lambda x, w: np.sin(x) @ w * x[:, :1],
        [ROWS],
    ),
    "jit inside": (lambda x, w: md.jit(lambda x: np.sin(x) @ w)(x), ROWS, lambda x, w: np.sin(x) @ w, [ROWS]),
    "partial sums": (lambda x, w: x.sum(0) * 2, P(sum="i"), lambda x, w: 2 * x.sum(0), [P("j")]),
    "nested shard_maps": (
        lambda x, w: (lambda f: f(f(x) + x))(columns(lambda x: np.sin(x) * axis_size("i"))),
        ROWS,
        lambda x, w: (lambda f: f(f(x) + x))(lambda x: np.sin(x) * 2),
        [IJ],
    ),
    "a nested shard_map": (
        lambda x, w: columns(lambda x: psum(x.sum(), ("i", "j")) * np.sin(x))(np.cos(x)) + x,
        ROWS,
        lambda x, w: np.cos(x).sum() * np.sin(np.cos(x)) + x,
        [IJ],
    ),
}
#: Those whose backward pass gathers: it transposes a split of what is whole, a broadcast value for example.
GATHERED = ("reshape and stack", "custom_vjp of a sum", "a gradient inside")

#: Those that exchange blocks: a slice of split rows stays split by rows, until it is joined with columns.
EXCHANGED = {"reshape and stack": [32]}

#: Programs that need blocks in other places.
MOVED = {
    "joining columns": (
        lambda x, w: all_gather(x, "i", axis=1, tiled=True)[:, :4],
        ROWS,
        lambda x, w: np.concatenate([x[:2]] * 2),
        [P(("i", "j"))],
    ),
    "rows of a nested shard_map": (
        lambda x, w: columns(np.sin, P("j"), P("j"))(x),
        ROWS,
        lambda x, w: np.sin(x),
        [P(("i", "j"))],
    ),
    "a nested shard_map that closes over a split value": (
        lambda x, w: columns(lambda y: (y[:, :, None] * x[:, None]).sum(2))(x),
        ROWS,
        lambda x, w: x * x.sum(1, keepdims=True),
        [IJ],
    ),
    "a nested shard_map that gathers": (
        lambda x, w: columns(lambda y: all_gather_invariant(y, "j", axis=1, tiled=True) * 2, out_specs=P())(x),
        ROWS,
        lambda x, w: 2 * x,
        None,
    ),
    "a loop over columns": (
        lambda x, w: md.scan(lambda c, col: (c + col, c * col), np.zeros(2), x.T)[1].T,
        ROWS,
        lambda x, w: md.scan(lambda c, col: (c + col, c * col), np.zeros(4), x.T)[1].T,
        None,
    ),
    "a carry that changes places": (*same(turning, P())[:3], None),
}
ALL = [*PROGRAMS, *MOVED]
FEW = ["a contraction", "softmax", "scan", "a nested shard_map", "joining columns"]
ARGS = np.sin(np.arange(16.0)).reshape(4, 4), np.cos(np.arange(16.0)).reshape(4, 4)


def mapped(name, mesh):
    """A program on blocks, its sharded arguments, and the specs of its results."""
    body, out_specs, _, specs = {**PROGRAMS, **MOVED}[name]
    f = spmd.shard_map(body, mesh=mesh, in_specs=(P("i"), P()), out_specs=out_specs, axis_names={"i"})
    return f, [spmd.distribute(x, mesh, spec) for x, spec in zip(ARGS, (P("i", "j"), P("j")))], specs


@shows("reference", "derivatives", "modes")
def check_program(mesh, name):
    """Values and derivatives are those of whole arrays, in both modes; results stay split, and are not gathered."""
    f, args, specs = mapped(name, mesh)
    whole, split = {**PROGRAMS, **MOVED}[name][2], mesh.shape["j"] == 2
    check_values(f, args, whole, ARGS)
    if specs is not None and split:
        assert list(map(spmd.spec_of, md.tree.leaves(f(*args)))) == specs
    if name in PROGRAMS and split:
        assert [row.bytes for row in gathers(f, args)] == EXCHANGED.get(name, [])
    if name == "a while_loop":  # it has no reverse mode, and the report counts one step
        assert_trees_close(md.jvp(f, args, args), md.jvp(whole, ARGS, ARGS))
        return
    run_and_count(f, mesh, *args)
    gradient = md.grad(summed(f), (0, 1))
    check_values(gradient, args, md.grad(summed(whole), (0, 1)), ARGS)
    assert [x.spec for x in gradient(*args)] == [x.spec for x in args]
    if "custom_vjp" not in name:  # it has no forward mode
        assert_trees_close(md.jvp(summed(f), args, args), md.jvp(summed(whole), ARGS, ARGS))
    if name in PROGRAMS and split:
        assert bool(gathers(gradient, args)) is (name in GATHERED)


def gathers(f, args):
    """The collectives over j that gather or exchange blocks."""
    names = ("all_gather", "all_gather_invariant", "all_to_all")
    return [row for row in spmd.communication(f)(*args).rows if row.collective in names and "j" in row.axes]
