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
    """Who asked for each collective: (collective, direction, text of the line)."""
    return [(r.collective, r.direction, r.source.text) for r in report.rows]


def test_an_unmapped_argument_is_summed_for_the_line_that_pbroadcast_it():
    def body(w, x):
        h = x @ w
        return psum(h.sum(), ("i", "j"))

    f = spmd.shard_map(body, mesh=MESH, in_specs=(P(), P("i", "j")), out_specs=P())
    args = np.ones((2, 3)), np.ones((4, 4))
    expected = [("psum", "forward", 'return psum(h.sum(), ("i", "j"))'), ("psum", "backward", "h = x @ w")]
    assert asked(spmd.communication(md.grad(f))(*args)) == expected
    assert asked(spmd.communication(md.grad(md.jit(f)))(*args)) == expected
    assert asked(spmd.communication(md.make_tape(md.grad(f))(*args))) == expected
    assert asked(spmd.communication(md.make_tape(md.make_tape(md.grad(f))(*args))(*args))) == expected
    optimized = md.jit(md.value_and_grad(f), without=["fuse psums"]).program(*args).tape
    assert sorted(asked(spmd.communication(optimized))) == sorted(expected)


def layers(params, x):
    h = np.tanh(x @ params[0])
    h = h @ params[1]
    return psum((h**2).sum(), ("i", "j"))


def test_one_call_for_several_lines_names_them_all():
    params, x = [np.ones((4, 4)), np.ones((4, 2))], np.ones((8, 4))
    f = md.value_and_grad(spmd.shard_map(layers, mesh=MESH, in_specs=(P(), P(("i", "j"))), out_specs=P()))
    first, second, last = "h = np.tanh(x @ params[0])", "h = h @ params[1]", 'return psum((h**2).sum(), ("i", "j"))'

    def lines(row):
        return [(line.text, line.backward) for line in row.lines]

    loss, gradient = spmd.communication(f)(params, x).rows
    assert lines(loss) == [(last, False)] and loss.direction == "forward"
    assert lines(gradient) == [(second, True), (first, True)] and gradient.direction == "backward"
    report = spmd.communication(f, optimized=True)(params, x)
    (row,) = report.rows
    assert lines(row) == [(last, False), (second, True), (first, True)] and row.direction == "both"
    assert (row.count, row.bytes) == (1, 8 + 128 + 64)
    assert [re.split(r"  +", line.strip())[:-1] for line in str(report).splitlines()[2:5]] == [
        ["psum", "i, j", "1", "200", "forward"],
        ["and for", "backward"],
        ["and for", "backward"],
    ]
    without = spmd.rewritten(f, without=["fuse psums"])(params, x)
    assert [lines(row) for row in spmd.communication(without).rows] == [
        [(last, False)],
        [(second, True)],
        [(first, True)],
    ]
    again = spmd.communication(lambda ps: md.grad(lambda ps: (f(ps, x)[1][0] ** 2).sum())(ps))(params)
    assert {line for row in again.rows for line, _ in lines(row)} >= {first, second}


@pytest.mark.parametrize("scaled", [False, True], ids=["added", "moved"])
def test_a_sum_that_stands_for_several_names_the_lines_of_all(scaled):
    """Those that asked for sums, not that which added them up; also where they are moved to where they meet."""

    def body(x):
        one = psum(np.sum(np.sin(x)), "i")
        two = psum(np.sum(np.cos(x)), "i")
        return 2.0 * one + two * 3.0 if scaled else one + two

    f = spmd.shard_map(body, mesh=MESH, in_specs=P("i"), out_specs=P())
    (row,) = spmd.communication(f, optimized=True)(np.ones(4)).rows
    texts = ['one = psum(np.sum(np.sin(x)), "i")', 'two = psum(np.sum(np.cos(x)), "i")']
    assert row.count == 1 and [line.text for line in row.lines] == texts


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


WITHIN = {
    pulled: [
        ("backward", "y, back = md.vjp(lambda w: np.tanh(x @ w).sum(), w)"),
        ("forward", 'return psum(y, ("i", "j")) + (g * w).sum()'),
    ],
    stepped: [("backward", "h = np.tanh(x @ w)"), ("forward", 'return psum(h.sum(), ("i", "j"))')],
    pushed: [("forward", 'loss = lambda w: psum((x @ w).sum(), ("i", "j"))  # noqa: E731')],
}


@pytest.mark.parametrize("body", WITHIN)
def test_derivatives_within_a_body(body):
    args = np.ones((4, 4)), np.ones((8, 4))
    f = spmd.shard_map(body, mesh=MESH, in_specs=(P(), P(("i", "j"))), out_specs=P())
    assert sorted(row[1:] for row in asked(spmd.communication(f)(*args))) == WITHIN[body]
    rows = spmd.communication(md.jit(f))(*args).rows  # one may have several lines, and unused sums are not taken
    compiled = {(direction_of(line), line.text) for row in rows for line in row.lines}
    assert compiled and compiled <= {*WITHIN[body]}
    of_gradient = [row[1:] for row in asked(spmd.communication(md.grad(f))(*args))]
    lines = {line for _, line in WITHIN[body]}
    assert {line for _, line in of_gradient} <= lines and "backward" in {direction for direction, _ in of_gradient}


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


ASKED = {
    "what is transposed": md.grad(transposed),
    "what is computed once more": md.grad(recomputed),
    "bodies of loops and branches": md.grad(loops_and_branches),
    "a rule of one's own": md.grad(in_body(lambda x: psum(double(x).sum(), ("i", "j")))),
    "derivatives of derivatives": md.grad(lambda x: (md.grad(sines)(x) ** 2).sum()),
    "forward mode": lambda x: md.jvp(sines, (x,), (x,)),
    "vmap": lambda x: md.vmap(sines)(np.stack([x, x, x])),
    "the boundary, where there are no types": md.grad(without_types),
}


def test_each_line_is_told_what_it_asked_for(golden):
    """A collective that is transposed, by the line whose derivative needs it."""
    rows = {name: [f"  {' '.join(row)}" for row in asked(spmd.communication(f)(X))] for name, f in ASKED.items()}
    golden("asked_for", "\n".join("\n".join([name, *lines]) for name, lines in rows.items()))


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


ARGS = np.ones(2), np.ones((4, 4))


@pytest.mark.parametrize("f", [md.grad(weighted), md.grad(md.jit(weighted))])
def test_the_old_recipe_communicates_more(f):
    for _ in range(2):  # what jit keeps in mind must not be taken for the other
        comparison = spmd.compare(f, *ARGS)
        assert (comparison.typed.counts, comparison.untyped.counts) == ({"psum": 2}, {"psum": 3})
        assert comparison.ratio == (8 + 8 + 16) / (8 + 16) and comparison.same is True
        f(*ARGS)
    assert spmd.communication(f)(*ARGS).counts == {"psum": 2}
    assert str(comparison) == (
        "collective  axes  count  without types  bytes per rank  without types  ratio\n"
        "----------  ----  -----  -------------  --------------  -------------  -----\n"
        "psum        i, j      2              3              24             32   1.33\n"
        "----------  ----  -----  -------------  --------------  -------------  -----\n"
        "total                 2              3              24             32   1.33\n"
        "both give the same numbers"
    )
    cells = re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", comparison._repr_html_())
    assert cells[7:14] == ["psum", "i, j", "2", "3", "24", "32", "1.33"]
    assert comparison._repr_html_().endswith("<p>both give the same numbers</p>")
    for shown in (comparison, comparison.typed):
        ElementTree.fromstring(f"<div>{shown._repr_html_()}</div>")  # every tag is closed


def test_a_jitted_function_is_compared_as_the_program_that_it_runs():
    for _ in range(2):
        f = md.jit(md.grad(weighted))
        comparison = spmd.compare(f, *ARGS)
        assert (comparison.typed.counts, comparison.untyped.counts) == ({"psum": 1}, {"psum": 2})  # without the loss
        assert (comparison.typed.bytes, comparison.untyped.bytes, comparison.same) == (16, 8 + 16, True)
        f(*ARGS)
    assert spmd.communication(f)(*ARGS).counts == {"psum": 1}


def test_arguments_may_be_trees_of_numbers():
    def f(params):
        return weighted(params["w"] * np.ones(2), np.ones((4, 4))) * params["n"][0]

    comparison = spmd.compare(md.grad(f), {"w": 2.0, "n": [3.0]})
    assert comparison.same and comparison.ratio == 4 / 3


def test_where_nothing_is_communicated_there_is_no_ratio():
    f = spmd.shard_map(lambda x: np.sin(x), mesh=MESH, in_specs=P(), out_specs=P())
    comparison = spmd.compare(md.grad(lambda x: f(x).sum()), np.ones(3))
    assert comparison.ratio is None and comparison.typed.counts == {} and comparison.untyped.counts == {"psum": 1}
    assert re.search(r"psum +i, j +0 +1 +0 +24 +-\n", str(comparison))
    assert str(spmd.compare(np.sin, 1.0)) == "no communication, with types or without\nboth give the same numbers"


def test_a_program_that_needs_types():
    @in_body
    def f(x):
        if not md.typeof(x).variance:
            raise ValueError("this program reads its types")
        return psum(x, ("i", "j"))

    comparison = spmd.compare(f, np.ones((4, 4)))
    assert comparison.untyped is None and comparison.same is None and comparison.ratio is None
    assert "without types it does not run: ValueError: this program reads its types" in str(comparison)
    assert re.search(r"psum +i, j +1 +\? +32 +\? +\?\n", str(comparison))


def test_other_numbers_are_told():
    body = lambda x: x * len(md.typeof(x).variance)  # noqa: E731
    comparison = spmd.compare(spmd.shard_map(body, mesh=MESH, in_specs=P("i"), out_specs=P("i")), np.ones(4))
    assert comparison.same is False and "the two do not give the same numbers" in str(comparison)


def test_types_for_arguments_are_not_run():
    MESH.reset_calls()
    comparison = spmd.compare(md.grad(weighted), *[md.typeof(x) for x in ARGS])
    assert comparison.same is None and comparison.ratio == 4 / 3 and not MESH.calls
    assert "not run: the arguments are types, not values" in str(comparison)


def test_the_types_are_back_afterwards():
    spmd.compare(md.grad(weighted), *ARGS)
    with pytest.raises(md.VarianceError):
        spmd.shard_map(lambda x: x, mesh=MESH, in_specs=P("i"), out_specs=P())(np.ones(2))


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
