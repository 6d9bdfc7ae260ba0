"""The communication report, and its comparison with the old recipe."""

import html
import linecache
import re
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import all_gather, pbroadcast, ppermute, psum
from spmd import P
from tests.checks.meshes import mapped, mesh
from tests.checks.samples import each
from tests.programs.rank import random_program

MESH, ROW = mesh(2, 2), mesh(1, 2)
X = np.ones((4, 4))


def in_body(f):
    return spmd.shard_map(f, mesh=MESH, in_specs=P("i", "j"), out_specs=P())


def program(x):
    def body(x):
        y = psum(x, "i")
        y = all_gather(y, "j", tiled=True)
        for _ in range(2):
            z = psum(y, "j")
        return psum(z, "i") + psum(x.astype(np.float32), "i").sum()

    return spmd.shard_map(body, mesh=MESH, in_specs=P("i", "j"), out_specs=P(None, "j"))(x)


def check_cells(report):
    """Check that each cell that a notebook shows is in the text, and that every tag is closed."""
    page = report._repr_html_()
    ElementTree.fromstring(f"<div>{page}</div>")
    cells = [html.unescape(cell) for cell in re.findall(r"<(?:td|th|p)(?: [^>]*)?>(.*?)</", page)]
    lines = [row.asked_for_by for row in getattr(report, "rows", ())]  # which the text cuts off
    assert cells and all(cell in str(report) or cell in lines for cell in cells), cells


def test_tables(golden):
    """A note says so where the length of a loop, or the branch, is not known beforehand, and matters."""
    gradient = md.value_and_grad(mapped(layers, MESH, (P(), P(("i", "j"))), P()))
    reports = [spmd.communication(f)(X) for f in TABLES]
    reports.append(spmd.communication(gradient, optimized=True)([X, np.ones((4, 2))], np.ones((8, 4))))
    text = re.sub(r":\d+: (.{0,20}).*", r": \1", "\n\n".join(map(str, reports)))  # without numbers of lines,
    golden("communication", re.sub(r"-{30,}", "-" * 30, text))  # on whose width it depends where lines are cut off
    for report in reports:
        check_cells(report)


def layers(params, x):
    h = np.tanh(x @ params[0])
    h = h @ params[1]
    return psum((h**2).sum(), ("i", "j"))


def of_scans(steps):
    def inner(s, x):
        return md.scan(lambda s, _: (s + psum(x, ("i", "j")).sum(), None), s, length=2)[0]

    return in_body(lambda x: md.scan(lambda s, _: (inner(s, x), None), 0.0, length=steps)[0])


def along_an_axis_of_one_rank(x):
    y = ppermute(all_gather(psum(pbroadcast(psum(x, "i"), "i"), "i"), "j", tiled=True), "j", [(0, 1)])
    return psum(y, ("i", "j")[1:]), psum(x.sum(), ("j", "i"))


COUNTED = {
    "sums and a gathered array": program,
    **{f"loops in a loop of {n} steps": of_scans(n) for n in (0, 1, 5)},
    "a gradient through a scan": md.grad(
        in_body(lambda x: md.scan(lambda s, r: (s + psum(np.sin(s * r), ("i", "j")).sum(), None), 1.0, x)[0])
    ),
    "along an axis of one rank": mapped(along_an_axis_of_one_rank, ROW, P("i", "j"), P()),
    "a partial sum of one rank": mapped(lambda x: x.sum(), ROW, P(), P(sum="i")),
}


@each("name", COUNTED)
def test_counts_and_bytes_are_those_of_the_backend(name):
    """The tape of a function has the same report; nothing is run for it."""
    f, over = COUNTED[name], ROW if "one rank" in name else MESH
    over.reset_calls()
    tape, report = md.make_tape(f)(X), spmd.communication(f)(X)
    assert not over.calls and str(spmd.communication(tape)) == str(report)
    tape(X)
    assert report.counts == over.calls and report.bytes == sum(over.bytes.values()) and not report.notes


def one(x):
    return psum(x.sum(), ("i", "j"))


def three(x):
    return psum(psum(x, "i"), "j").sum()


TABLES = [
    program,
    *(
        in_body(lambda x, branches=branches: md.switch(one(x).astype(int), branches, x))
        for branches in ([three, one], [one, three], [one, lambda x: one(-x)])  # the last send as much
    ),
    in_body(lambda x: md.while_loop(lambda s: s < 100.0, lambda s: s + psum(x.sum(), ("i", "j")), 0.0)),
    lambda x: md.while_loop(lambda s: s < 9.0, lambda s: s + 1.0, x[0, 0]),
]


# ---------------------------------------------------------------- who asked for it: `asked_for.md` has programs


def test_a_line_of_a_session_has_no_file():
    name, lines = "<session>", ["def f(x):\n", "    return g(psum(x, 'i'))\n"]
    linecache.cache[name] = 1, None, lines, name
    names = {"psum": psum, "g": np.sin}
    exec(compile("".join(lines), name, "exec"), names)
    mapped = spmd.shard_map(names["f"], mesh=MESH, in_specs=P("i"), out_specs=P())
    (row,) = spmd.communication(mapped)(np.ones(2)).rows
    assert row.asked_for_by == "line 2: return g(psum(x, 'i'))"
    del linecache.cache[name]
    assert row.asked_for_by == "line 2"


# ---------------------------------------------------------------- beside the old recipe


def weighted(w, x):
    def body(w, x):
        return psum((w * x).sum(), ("i", "j"))

    return spmd.shard_map(body, mesh=MESH, in_specs=(P(), P("i", "j")), out_specs=P())(w, x)


ARGS = np.ones(2), X


@in_body
def needs_types(x):
    if not md.typeof(x).variance:
        raise ValueError("this program reads its types")
    return psum(x, ("i", "j"))


#: Functions and arguments, whose comparisons are in one golden text.
COMPARED = {
    "the old recipe communicates more": (md.grad(weighted), *ARGS),
    "of a jitted function": (md.grad(md.jit(weighted)), *ARGS),
    "without the loss": (md.jit(md.grad(weighted)), *ARGS),
    "of trees of numbers": (
        md.grad(lambda p: weighted(p["w"] * np.ones(2), X) * p["n"][0]),
        *({"w": 2.0, "n": [3.0]},),
    ),
    "nothing is communicated": (md.grad(lambda x: mapped(np.sin, MESH, P(), P())(x).sum()), np.ones(3)),
    "nothing with types or without": (np.sin, 1.0),
    "a program that needs types": (needs_types, X),
    "other numbers": (mapped(lambda x: x * len(md.typeof(x).variance), MESH, P("i"), P("i")), np.ones(4)),
    "types for arguments": (md.grad(weighted), *[md.typeof(x) for x in ARGS]),
}


def test_comparisons(golden):
    golden("comparisons", "\n\n".join(f"{name}:\n{spmd.compare(f, *args)}" for name, (f, *args) in COMPARED.items()))


@each("name", COMPARED)
def test_a_comparison_leaves_no_trace(name):
    """Programs that jit remembers are not taken for the other, and types are back afterwards."""
    f, *args = COMPARED[name]
    before = spmd.communication(f)(*args)
    one, other = (spmd.compare(f, *args) for _ in range(2))
    assert one == other and one.typed == spmd.communication(f)(*args) == before
    assert one.ratio == (one.untyped.bytes / one.typed.bytes if one.untyped and one.typed.bytes else None)
    check_cells(one)
    with pytest.raises(md.VarianceError):
        mapped(lambda x: x, MESH, P("i"), P())(np.ones(2))


# ---------------------------------------------------------------- random programs


@settings(deadline=None, max_examples=12)
@given(st.integers(0, 10**6))
def test_of_random_programs(seed):
    program = random_program(seed)
    on, args = mesh(*program.shape.values()), program.example(seed)
    loss, untyped = program.on_ranks(on), program.on_ranks(on, check_rep=False)
    gradient = lambda loss: md.grad(loss, tuple(range(len(args))))  # noqa: E731
    plain, report = spmd.communication(loss)(*args), spmd.communication(gradient(loss))(*args)
    assert all(row.source.filename.endswith("rank.py") for row in report.rows)
    # The loss is the forward part of its gradient, line by line; all else is backward.
    assert {row.direction for row in plain.rows} <= {"forward"}
    assert [row for row in report.rows if row.direction == "forward"] == plain.rows
    comparison = spmd.compare(gradient(loss), *args)
    assert comparison.same and comparison.typed == report
    assert comparison.untyped == spmd.communication(gradient(untyped))(*args)
