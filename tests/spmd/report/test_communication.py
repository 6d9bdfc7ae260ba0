"""The communication report, and its comparison with the old recipe."""

import html
import linecache
import math
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
from spmd.show import direction_of
from tests.checks.meshes import mapped, mesh
from tests.checks.samples import each
from tests.programs.on_blocks import example, placements, programs

MESH = spmd.make_mesh((2, 2), ("i", "j"), backend="simulated")
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


def test_tables(golden):
    """Where the length of a loop, or the branch, is not known beforehand, a note says so."""
    reports = [spmd.communication(f)(X) for f in (program, BRANCHES["the first communicates more"], until_large)]
    golden("communication", re.sub(r":\d+:", ":", "\n\n".join(map(str, reports))))  # without numbers of lines


def test_a_notebook_shows_the_same_table():
    report = spmd.communication(program)(np.ones((4, 4)))
    cells = re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", report._repr_html_())
    header, *rows, total = [cells[i : i + 6] for i in range(0, len(cells), 6)]
    assert header[4:] == ["direction", "asked for by"] and total[:4] == ["total", "", "5", "208"]
    assert [html.unescape(r[5]) for r in rows] == [r.asked_for_by for r in report.rows]
    assert spmd.communication(np.sin)(1.0)._repr_html_() == "<p>no communication</p>"


def test_of_a_tape():
    x = np.ones((4, 4))
    assert str(spmd.communication(md.make_tape(program)(x))) == str(spmd.communication(program)(x))


def test_nothing_is_run():
    MESH.reset_calls()
    spmd.communication(md.grad(lambda x: program(x).sum()))(np.ones((4, 4)))
    assert MESH.calls == {}


def test_no_communication():
    assert str(spmd.communication(np.sin)(1.0)) == "no communication"


def of_scans(steps):
    def inner(s, x):
        return md.scan(lambda s, _: (s + psum(x, ("i", "j")).sum(), None), s, length=2)[0]

    return in_body(lambda x: md.scan(lambda s, _: (inner(s, x), None), 0.0, length=steps)[0])


ROW = spmd.make_mesh((1, 2), ("i", "j"), backend="simulated")


def along_an_axis_of_one_rank(x):
    y = ppermute(all_gather(psum(pbroadcast(psum(x, "i"), "i"), "i"), "j", tiled=True), "j", [(0, 1)])
    return psum(y, ("i", "j")[1:]), psum(x.sum(), ("j", "i"))


COUNTED = {
    "sums and a gathered array": (program, {"psum": 4, "all_gather": 1}),
    **{f"loops in a loop of {n} steps": (of_scans(n), {"psum": 2 * n} if n else {}) for n in (0, 1, 5)},
    "a gradient through a scan": (
        md.grad(in_body(lambda x: md.scan(lambda s, r: (s + psum(np.sin(s * r), ("i", "j")).sum(), None), 1.0, x)[0])),
        {"psum": 2 * 2},
    ),
    "along an axis of one rank": (
        spmd.shard_map(along_an_axis_of_one_rank, mesh=ROW, in_specs=P("i", "j"), out_specs=P()),
        {"all_gather": 1, "ppermute": 1, "psum": 2},
    ),
    "a partial sum of one rank": (
        spmd.shard_map(lambda x: x.sum(), mesh=ROW, in_specs=P(), out_specs=P(sum="i")),
        {},
    ),
}


@each("name", COUNTED)
def test_counts_and_bytes_are_those_of_the_backend(name):
    f, counts = COUNTED[name]
    mesh = ROW if "one rank" in name else MESH
    tape, report = md.make_tape(f)(X), spmd.communication(f)(X)
    mesh.reset_calls()
    tape(X)
    assert report.counts == mesh.calls == counts and report.bytes == sum(mesh.bytes.values()) and not report.notes


def one(x):
    return psum(x.sum(), ("i", "j"))


def three(x):
    return psum(psum(x, "i"), "j").sum()


BRANCHES = {
    "the first communicates more": in_body(lambda x: md.switch(one(x).astype(int), [three, one], x)),
    "the last communicates more": in_body(lambda x: md.switch(one(x).astype(int), [one, three], x)),
}


@each("name", BRANCHES)
def test_of_branches_the_one_that_communicates_most_counts(name):
    report = spmd.communication(BRANCHES[name])(X)
    assert report.counts == {"psum": 1 + 2} and report.bytes == 8 + 2 * 32 and len(report.notes) == 1


def test_branches_that_communicate_alike_need_no_note():
    @in_body
    def f(x):
        total = psum(x.sum(), ("i", "j"))
        return md.cond(total > 0, lambda: psum(x, ("i", "j")).sum(), lambda: psum(-x, ("i", "j")).sum())

    report = spmd.communication(f)(np.ones((4, 4)))
    assert report.counts == {"psum": 2} and not report.notes


@in_body
def until_large(x):
    return md.while_loop(lambda s: s < 100.0, lambda s: s + psum(x.sum(), ("i", "j")), 0.0)


def test_a_while_loop_that_does_not_communicate_needs_no_note():
    quiet = spmd.communication(lambda x: md.while_loop(lambda s: s < 9.0, lambda s: s + x, x))(1.0)
    assert str(quiet) == "no communication"


# ---------------------------------------------------------------- who asked for it


def asked(report):
    """Return a text for each collective: its name, and the lines that asked for it, each with its direction."""
    lines = [[f"{direction_of(line)}, {line.text}" for line in row.lines] for row in report.rows]
    return ["; ".join([row.collective, *texts]) for row, texts in zip(report.rows, lines)]


def unmapped(w, x):
    h = x @ w
    return psum(h.sum(), ("i", "j"))


def layers(params, x):
    h = np.tanh(x @ params[0])
    h = h @ params[1]
    return psum((h**2).sum(), ("i", "j"))


def added(w, x):
    one = psum(np.sum(np.sin(x @ w)), ("i", "j"))
    two = psum(np.sum(np.cos(x)), ("i", "j"))
    return one + two


def moved(w, x):
    one = psum(np.sum(np.sin(x @ w)), ("i", "j"))
    two = psum(np.sum(np.cos(x)), ("i", "j"))
    return 2.0 * one + two * 3.0


def pulled(w, x):
    y, back = md.vjp(lambda w: np.tanh(x @ w).sum(), w)
    (g,) = back(pbroadcast(1.0, ("i", "j")))
    return psum(y, ("i", "j")) + (g * w).sum()


def stepped(w, x):
    def loss(w):
        h = np.tanh(x @ w)
        return psum(h.sum(), ("i", "j"))

    g = md.grad(loss)(w)
    return (w - 0.1 * g).sum()


def pushed(w, x):
    loss = lambda w: psum((x @ w).sum(), ("i", "j"))  # noqa: E731
    return md.jvp(loss, (w,), (w,))[1]


@in_body
def transposed(x):
    total = psum(x, ("i", "j"))
    y = x @ total
    return psum(y.sum(), ("i", "j"))


@in_body
def recomputed(x):
    inner = md.checkpoint(lambda x: np.sin(psum(np.sin(x), "j")))
    return psum(inner(x).sum(), "i")


@in_body
def loops_and_branches(x):
    def step(s, row):
        s = s + psum(np.sin(s * row), ("i", "j")).sum()
        return s, None

    total = md.scan(step, 1.0, x)[0]
    other = lambda: psum((x * total).sum(), ("i", "j"))  # noqa: E731
    return md.cond(total > 0, other, lambda: total)


@md.custom_vjp
def double(x):
    return 2.0 * x


def pull_double(_, ct):
    mean = psum(ct, ("i", "j")) / 4
    return (2.0 * pbroadcast(mean, ("i", "j")),)


double.defvjp(lambda x: (double(x), None), pull_double)


@in_body
def sines(x):
    y = np.sin(psum(x, "i"))
    return psum((y * y).sum(), "j")


def without_types(x):
    body = lambda w, x: psum((w * x).sum(), ("i", "j"))  # noqa: E731
    mapped = spmd.shard_map(body, mesh=MESH, in_specs=(P(), P("i", "j")), out_specs=P(), check_rep=False)
    return mapped(2.0 + 0 * x[0, 0], x)


def of_weights(body):
    return mapped(body, MESH, (P(), P(("i", "j"))), P())


W, TALL = np.ones((4, 4)), np.ones((8, 4))
LAYERS = md.value_and_grad(of_weights(layers)), [W, np.ones((4, 2))], TALL

#: Functions and arguments; which line asked for a collective is in one golden text, also of the compiled program.
ASKED = {
    "what is transposed": (md.grad(transposed), X),
    "what is computed once more": (md.grad(recomputed), X),
    "bodies of loops and branches": (md.grad(loops_and_branches), X),
    "a rule of one's own": (md.grad(in_body(lambda x: psum(double(x).sum(), ("i", "j")))), X),
    "derivatives of derivatives": (md.grad(lambda x: (md.grad(sines)(x) ** 2).sum()), X),
    "forward mode": (lambda x: md.jvp(sines, (x,), (x,)), X),
    "vmap": (lambda x: md.vmap(sines)(np.stack([x, x, x])), X),
    "the boundary, where there are no types": (md.grad(without_types), X),
    "an argument that a line pbroadcast": (md.grad(of_weights(unmapped)), W, TALL),
    "one call for several lines": LAYERS,
    **{f"sums that are {f.__name__}": (of_weights(f), W, TALL) for f in (added, moved)},
    **{f"a derivative in a body, {f.__name__}": (of_weights(f), W, TALL) for f in (pulled, stepped, pushed)},
    **{f"its derivative, {f.__name__}": (md.grad(of_weights(f)), W, TALL) for f in (pulled, stepped, pushed)},
}


def test_each_line_is_told_what_it_asked_for(golden):
    """A collective that is transposed, by the line whose derivative needs it."""
    texts = []
    for name, (f, *args) in ASKED.items():
        rows, compiled = (asked(spmd.communication(f, optimized=flag)(*args)) for flag in (False, True))
        texts += [name, *(f"  {row}" for row in rows), *(f"  compiled: {row}" for row in compiled)]
    golden("asked_for", "\n".join(texts))


@each("name", ASKED)
def test_lines_are_the_same_however_a_tape_is_made(name):
    f, *args = ASKED[name]
    expected = spmd.communication(f)(*args)
    tape = md.make_tape(f)(*args)
    again = md.make_tape(tape)(*md.tree.leaves(args))
    assert asked(spmd.communication(tape)) == asked(spmd.communication(again)) == asked(expected)
    unfused = spmd.communication(spmd.rewritten(f, without=["fuse psums"])(*args)).rows
    assert {line.text for row in unfused for line in row.lines} <= {r.text for row in expected.rows for r in row.lines}


def test_a_jitted_function_in_a_gradient_has_its_lines():
    f = of_weights(unmapped)
    assert asked(spmd.communication(md.grad(md.jit(f)))(W, TALL)) == asked(spmd.communication(md.grad(f))(W, TALL))


def test_further_lines_have_rows_of_their_own():
    f, *args = LAYERS
    report = spmd.communication(f, optimized=True)(*args)
    assert [re.split(r"  +", line.strip())[:-1] for line in str(report).splitlines()[2:5]] == [
        ["psum", "i, j", "1", "200", "forward"],
        ["and for", "backward"],
        ["and for", "backward"],
    ]
    assert (report.rows[0].bytes, report.rows[0].direction) == (8 + 128 + 64, "both")
    again = spmd.communication(lambda ps, x: md.grad(lambda ps: (f(ps, x)[1][0] ** 2).sum())(ps))(*args)
    assert {*report.rows[0].lines[1:]} <= {line for row in again.rows for line in row.lines}


def of_numpy(x):
    return np.average(x * 2.0) + np.var(x)


def test_only_tapes_of_programs_know_where_they_come_from():
    _, tape = md.core.reverse.engine.linearize_flat(lambda x: [np.sin(x) @ x], [np.ones(3)], [True])
    assert [eqn.source for eqn in tape.equations] == [None] * len(tape.equations)
    assert {eqn.source.filename for eqn in md.make_tape(md.grad(of_numpy))(np.ones(3)).equations} == {__file__}


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
    ElementTree.fromstring(f"<div>{one._repr_html_()}{one.typed._repr_html_()}</div>")  # every tag is closed
    with pytest.raises(md.VarianceError):
        mapped(lambda x: x, MESH, P("i"), P())(np.ones(2))


def test_a_notebook_shows_the_same_comparison():
    page = spmd.compare(md.grad(weighted), *ARGS)._repr_html_()
    cells = re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", page)
    assert cells[7:14] == ["psum", "i, j", "2", "3", "24", "32", "1.33"]
    assert page.endswith("<p>both give the same numbers</p>")


def test_types_for_arguments_are_not_run():
    MESH.reset_calls()
    spmd.compare(md.grad(weighted), *[md.typeof(x) for x in ARGS])
    assert not MESH.calls


# ---------------------------------------------------------------- random programs


@settings(deadline=None, max_examples=25)
@given(programs, placements(), st.booleans())
def test_of_random_programs(program, placement, closed_over):
    mesh, axes = placement
    args = example(program, rows=2 * math.prod(mesh.shape[a] for a in axes), seed=0)
    loss = program.sharded(mesh, axes, closed_over)
    plain, report = spmd.communication(loss)(*args), spmd.communication(md.grad(loss, (0, 1)))(*args)
    assert all(row.source.filename.endswith("on_blocks.py") for row in report.rows)
    # The loss is the forward part of its gradient, line by line; all else is backward.
    assert {row.direction for row in plain.rows} <= {"forward"}
    assert [row for row in report.rows if row.direction == "forward"] == plain.rows
    comparison = spmd.compare(md.grad(loss, (0, 1)), *args)
    untyped = md.grad(program.sharded(mesh, axes, closed_over, check_rep=False), (0, 1))
    assert comparison.same and comparison.typed == report
    assert comparison.untyped == spmd.communication(untyped)(*args)


# ---------------------------------------------------------------- a scan and a Python loop


def scanned(step, carry):
    return md.scan(lambda c, _: (step(c), None), carry, None, length=3)[0]


def looped(step, carry):
    for _ in range(3):
        carry = step(carry)
    return carry


@each("loop", [scanned, looped])
def test_gradients_of_values_that_steps_compute_from_invariant_ones(loop):
    body = lambda w, x: psum(loop(lambda c: np.tanh(c * (w * 2.0)), x).sum(), "i")  # noqa: E731
    gradient = md.grad(mapped(body, mesh(2), (P(), P("i")), P()))
    assert spmd.communication(gradient)(np.ones(4), X).counts == {"psum": 2}  # of w's gradient, once, after the loop
    assert spmd.communication(gradient, optimized=True)(np.ones(4), X).counts == {"psum": 1}  # and not of the loss


@each("loop, first", [(scanned, "all_gather_invariant"), (looped, "psum")])
def test_carries_are_resharded_before_the_first_step_or_in_it(loop, first):
    x = spmd.distribute(X, mesh(2), P("i"))
    step = lambda c: np.sin(c).sum(0) * np.ones((4, 4))  # noqa: E731
    assert spmd.communication(lambda c: loop(step, c))(x).counts == {first: 1}
    step = lambda c: np.sin(c) * np.sum(c)  # noqa: E731
    assert spmd.communication(lambda c: loop(step, c))(x).counts == {"psum": 3}
