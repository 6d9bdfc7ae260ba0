"""Loops of which each rank takes as many steps as it needs: as if each ran its loop alone."""

import warnings

import pytest

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import axis_index, pany, pbroadcast, ppermute, psum
from spmd import P
from tests.programs import loop as programs
from tests.programs.branch import RANKS, W, X, check, closing_over, loss, on_ranks, whole
from tests.programs.on_blocks import assert_trees_close, equations

LINE = spmd.make_mesh((RANKS,), ("i",), backend="simulated")
SQUARE = spmd.make_mesh((2, 2), ("i", "j"), backend="simulated")


@pytest.fixture(autouse=True)
def no_warnings():
    """A step meets no values that it would not meet on real ranks."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "psum of a value that is already the same")
        yield


@pytest.mark.parametrize("name", programs.PROGRAMS)
def test_each_rank_takes_its_steps(name):
    programs.check_steps(name, LINE)


@pytest.mark.parametrize("name", [name for name in programs.PROGRAMS if name not in programs.NEED_TYPES])
def test_without_types(name):
    programs.check_steps(name, LINE, programs.FEW, typed=False)


@pytest.mark.parametrize("name", programs.PROGRAMS)
def test_values_from_outside_of_the_ranks(name):
    program = programs.PROGRAMS[name]
    tangents = lambda f: lambda w, x: md.jvp(f, (w, x), (np.cos(w), np.sin(x)))  # noqa: E731
    check(tangents(closing_over(program, LINE)), tangents(lambda w, x: whole(program)(np.sin(w), x)), W, X)


@pytest.mark.parametrize("typed", [True, False])
def test_an_axis_along_which_ranks_take_the_same_steps(typed):
    programs.check_one_axis(SQUARE, typed)


def test_no_rank_takes_a_step():
    f = spmd.shard_map(lambda x: halved(x, 100.0), mesh=LINE, in_specs=P("i"), out_specs=P("i"))
    check(f, lambda x: x, X)


def halved(x, limit):
    return md.while_loop(lambda c: np.abs(c).max() > limit, lambda c: c / 2, x)


@pytest.mark.parametrize("start", [0.0, 5.0])
def test_types_are_those_of_the_recorded_loop(start):
    """Even if the first condition is the same on all ranks, or false."""
    seen = []

    def body(x, n):
        step = lambda s: (s[0] + x[1] ** 2, np.ones(2) * s[1], s[2])  # noqa: E731
        out = md.while_loop(lambda s: s[0] < 2, step, (n, np.ones(2), 1))
        seen.append([str(md.typeof(y)) for y in out])
        return ()

    f = spmd.shard_map(body, mesh=LINE, in_specs=(P("i"), P()), out_specs=())
    f(X, start)
    md.make_tape(f)(X, start)
    assert seen[0] == seen[1] == ["f64[]{i}", "f64[2]{i}", "i64[]{i}"]


def test_a_gradient_in_the_first_step_is_the_ranks_own():
    """Though no type says before that step that ranks will take different numbers of them."""

    def body(x):
        def step(s):
            c, t = s
            return c - 0.1 * md.grad(lambda c: ((c - x) ** 2).sum())(c), t + x[0] ** 2

        return md.while_loop(lambda s: s[1] < 0.5, step, (np.zeros(2), 0.0))[0]

    def alone(x):
        c, t = np.zeros(2), 0.0
        while t < 0.5:
            c, t = c - 0.2 * (c - x), t + x[0] ** 2
        return c

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", md.VarianceWarning)
        f = spmd.shard_map(body, mesh=LINE, in_specs=P("i"), out_specs=P("i"))
        check(f, lambda x: np.concatenate([alone(b) for b in np.split(x, RANKS)]), X)


def test_no_step_communicates():
    program = on_ranks(programs.PROGRAMS["descent"], LINE)
    tape = md.make_tape(lambda w, x: md.jvp(program, (w, x), (w, x)))(W, X)
    (loop,) = [eqn for eqn in equations(tape) if eqn.primitive.name == "while_loop"]
    inside = [inner.primitive.name for body in loop.bodies for inner in equations(body)]
    assert "subtract" in inside and not {"psum", "pbroadcast"}.intersection(inside)
    assert not spmd.communication(program)(W, X).counts


def test_reverse_mode_is_refused():
    f = spmd.shard_map(lambda x: halved(x, 0.1), mesh=LINE, in_specs=P("i"), out_specs=P("i"))
    for run in (lambda f: f, md.jit):
        with pytest.raises(TypeError, match="while_loop cannot be differentiated in reverse mode"):
            run(md.grad(lambda x: f(x).sum()))(X)


@pytest.mark.parametrize("name", ["compiled", "descent", "a loop of scans"])
def test_reverse_mode_of_at_most_so_many_steps(name):
    """The weight is summed over the ranks once: no step of theirs communicates."""

    class Bounded:
        scan, fori_loop, cond = md.scan, md.fori_loop, md.cond

        @staticmethod
        def while_loop(goes_on, step, init):
            return md.while_loop(goes_on, step, init, max_steps=30)

    on_each = lambda w, x: programs.PROGRAMS[name](Bounded, w, x, axis_index("i"))  # noqa: E731
    f = spmd.shard_map(on_each, mesh=LINE, in_specs=(P(), P("i")), out_specs=P("i"))
    gradient = md.grad(loss(f), (0, 1))
    check(gradient, md.grad(loss(whole(programs.PROGRAMS[name])), (0, 1)), W, X)
    LINE.reset_calls()
    md.jit(gradient)(W, X)
    assert LINE.calls["psum"] == 1


# ---------------------------------------------------------------- errors

COMMUNICATING = {
    "a step": (
        lambda x: md.while_loop(lambda c: c[0] < 1, lambda c: c + psum(c, "i"), x),
        "the condition of while_loop, .* body_fun has a psum over 'i'",
    ),
    "a bound": (
        lambda x: md.fori_loop(0, axis_index("i"), lambda i, c: ppermute(c, "i", [(0, 1)]), x),
        r"the condition of fori_loop, bool\[\]\{i\}, .* body_fun has a ppermute over 'i'",
    ),
    "the condition": (
        lambda x: md.while_loop(lambda c: c[0] < psum(c[1], ("i", "j")), lambda c: c + 1, x),
        "cond_fun has a psum over .*'i', 'j'",
    ),
    "a loop in it": (
        lambda x: md.while_loop(lambda c: c[0] < 1, lambda c: halved(c, pany(c[0] < 0, "i") * 1.0), x),
        "body_fun has a pmax over 'i'",
    ),
    "a vmap": (
        lambda x: md.vmap(lambda x: md.while_loop(lambda c: c < 1, lambda c: c + psum(c, "i") ** 2 + 1, x))(x),
        "body_fun has a psum over 'i'",
    ),
}


@pytest.mark.parametrize("name", COMMUNICATING)
@pytest.mark.parametrize("typed", [True, False], ids=["types", "no types"])
def test_a_step_that_communicates(name, typed):
    """The error names the collective, its function, its line, and the way out."""
    body, message = COMMUNICATING[name]
    spec = P(("i", "j"))
    f = spmd.shard_map(body, mesh=SQUARE, in_specs=spec, out_specs=spec, check_rep=typed)
    message = message if typed else message.replace("fori_loop", "(fori|while)_loop")
    message += r".*test_divergent_loops\.py:\d+: .*take the steps of the one .* pany\(condition, .*'i'.*np\.where"
    for g in (f, md.jit(f), lambda x: md.jvp(f, (x,), (x,))):
        with pytest.raises(md.VarianceError, match=message):
            g(X)


def test_the_way_out():
    """All ranks take part in the steps of the one that takes most."""

    def body(x):
        going = lambda c: np.abs(c).max() > 0.1  # noqa: E731
        step = lambda c: np.where(going(c), c / 2 + 0.01 * psum(c, "i"), c)  # noqa: E731
        return md.while_loop(lambda c: pany(going(c), "i"), step, x)

    def together(x):
        blocks = np.split(x, RANKS)
        while any(np.abs(b).max() > 0.1 for b in blocks):
            total = sum(blocks)
            blocks = [np.where(np.abs(b).max() > 0.1, b / 2 + 0.01 * total, b) for b in blocks]
        return np.concatenate(blocks)

    check(spmd.shard_map(body, mesh=LINE, in_specs=P("i"), out_specs=P("i")), together, X)


def test_explicit_casts():
    """Without casts inserted, the error says what to cast."""

    def explicit(body):
        spec = {"mesh": LINE, "in_specs": (P(), P("i")), "out_specs": P("i"), "auto_pbroadcast": False}
        return spmd.shard_map(body, **spec)

    grows = lambda x: lambda c: c + x**2  # noqa: E731
    for body, message in (
        (lambda w, x: md.while_loop(lambda c: (c + x)[0] < 2, grows(x), w), r"pbroadcast\(x, 'i'\) for the first$"),
        (lambda w, x: md.while_loop(lambda c: x[0] < 2, grows(w), w), "for init_val, f64"),
        (lambda w, x: md.while_loop(lambda c: c[0] < 2, grows(w), x), "numbers of steps, .* for a value that a step c"),
    ):
        with pytest.raises(md.VarianceError, match=message):
            explicit(body)(W, X)
    f = explicit(lambda w, x: md.while_loop(lambda c: c[0] < 2, grows(pbroadcast(w, "i")), x))
    check(f, whole(lambda lax, w, x, rank: lax.while_loop(lambda c: c[0] < 2, grows(w), x)), W, X)


def test_tapes_that_do_not_check():
    f = spmd.shard_map(lambda x: halved(x, 0.1), mesh=LINE, in_specs=P("i"), out_specs=P("i"))
    tape = md.make_tape(f)(X)
    (loop,) = [eqn for eqn in equations(tape) if eqn.primitive.name == "while_loop"]
    tape.check()
    body, c = loop.params["body"], md.make_tape(lambda c: c / 2)(np.ones(2))
    assert body.out_types != c.out_types
    loop.params = {**loop.params, "body": c}
    with pytest.raises(TypeError, match="while_loop: its body takes"):
        tape.check()


# ---------------------------------------------------------------- what else runs on ranks


@pytest.mark.parametrize("run", [lambda f: f, md.jit, lambda f: md.make_tape(f)(X)], ids=["run", "jit", "tape"])
def test_only_the_ranks_of_a_step_print(run, capsys):
    def step(i, c):
        md.debug.print("{}", i)
        return c

    f = spmd.shard_map(
        lambda x: md.fori_loop(0, axis_index("i") // 2, step, x), mesh=LINE, in_specs=P("i"), out_specs=P("i")
    )
    run(f)(X)
    ranks = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [(words[1], words[-1]) for words in ranks] == [("2", "0"), ("3", "0")]


def test_nan_checks_see_the_steps_that_are_taken():
    bad = spmd.shard_map(
        lambda x: md.while_loop(lambda c: c[0] > -1, lambda c: np.log(c - 1), x),
        mesh=LINE,
        in_specs=P("i"),
        out_specs=P("i"),
    )
    with md.debug.debug_nans(), pytest.raises(FloatingPointError, match=r"log .*rank 0"):
        bad(X)
    good = on_ranks(programs.PROGRAMS["roots"], LINE)
    with md.debug.debug_nans():
        assert_trees_close(good(W, X), whole(programs.PROGRAMS["roots"])(W, X))


@pytest.mark.parametrize("wrapped", [lambda f: f, md.jit], ids=["eager", "jit"])
def test_reports(wrapped):
    """One step is counted, and they say so."""
    f = wrapped(on_ranks(programs.PROGRAMS["an adaptive solve"], LINE))
    one_step = "one step is counted"
    prediction = spmd.predict(f, spmd.machines.A100)(W, X)
    assert prediction.seconds > 0 and one_step in str(prediction)
    assert "while_loop" in str(spmd.timeline(f, spmd.machines.A100)(W, X))
    assert spmd.memory(f)(W, X).peak.total > X.nbytes // RANKS
    along = spmd.shard_map(programs.along_one_axis, mesh=SQUARE, in_specs=(P(), P(("i", "j"))), out_specs=P(("i", "j")))
    report = spmd.communication(wrapped(along))(W, X)
    assert set(report.counts) == {"psum"} and report.notes
