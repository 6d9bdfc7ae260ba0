"""Ranks that choose their own branch, or take as many steps as they need: as if each ran alone."""

import itertools
import warnings

import pytest

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import axis_index, pany, ppermute, pscatter, psum
from spmd import P
from tests.checks.meshes import mapped, mesh
from tests.checks.of_whole import check_kinds
from tests.checks.results import assert_trees_close, equations
from tests.checks.samples import each
from tests.programs import branch, loop
from tests.programs.branch import RANKS, W, X, check, closing_over, loss, on_ranks, whole

LINE, PLANE = mesh(RANKS), mesh(2, 2)
ALL = P(("i", "j"))
#: No rank meets values that it would not meet on real ranks.
pytestmark = pytest.mark.filterwarnings("error", "ignore:psum of a value that is already the same")


def on_line(f, **options):
    return mapped(f, LINE, P("i"), P("i"), **options)


def by_first(true_fun, false_fun=lambda x: x):
    return lambda x: md.cond(x[0] > 0, true_fun, false_fun, x)


def halved(x, limit):
    return md.while_loop(lambda c: np.abs(c).max() > limit, lambda c: c / 2, x)


def total(f):
    return lambda x: f(x).sum()


# ---------------------------------------------------------------- values and derivatives

#: All kinds of derivatives of some programs; of the others, those that take all their rules together.
FULLY = ("operands", "closed over", "in a step", "descent")


@pytest.mark.parametrize("name", branch.PROGRAMS)
def test_each_rank_takes_its_branch(name):
    branch.check_program(
        LINE, branch.PROGRAMS[name], branch.KINDS if name in FULLY else ("jvp of grad", "vmap of grad")
    )


@pytest.mark.parametrize("name", loop.PROGRAMS)
def test_each_rank_takes_its_steps(name):
    branch.check_program(LINE, loop.PROGRAMS[name], loop.KINDS if name in FULLY else ("jvp of jvp", "vmap of jvp"))
    if name not in loop.NEED_TYPES:
        branch.check_program(LINE, loop.PROGRAMS[name], ("jvp",), check_rep=False)


@each("name", ["closed over", "in a step", "grad", "descent", "nested"])
def test_values_from_outside_of_the_ranks(name):
    program, kinds = (branch.PROGRAMS | loop.PROGRAMS)[name], ("jvp",) if name in loop.PROGRAMS else ("grad",)
    check_kinds(closing_over(program, LINE), (W, X), lambda w, x: whole(program)(np.sin(w), x), kinds)


@each("name", branch.ELEMENTS)
def test_elements_of_a_batch_on_each_rank(name):
    branch.check_elements(mesh(2), name)


@each(
    "name, kinds, typed",
    [
        ("collectives", ("jvp of grad", "vmap of grad"), True),
        ("a shard_map", ("jvp of grad", "vmap of grad"), True),
        ("steps", loop.FEW, True),
        ("steps", loop.FEW, False),
    ],
)
def test_an_axis_along_which_ranks_choose_alike(name, kinds, typed):
    branch.check_other_axes(PLANE, name, kinds, typed)


def chosen_in_a_batch(v):
    return md.cond(axis_index("j") > 0, lambda c: np.sin(c + v), lambda c: c, np.zeros_like(v))


def until_all_are_small(x):
    """All ranks take part in the steps of the one that takes most."""
    going = lambda c: np.abs(c).max() > 0.1  # noqa: E731
    step = lambda c: np.where(going(c), c / 2 + 0.01 * psum(c, "i"), c)  # noqa: E731
    return md.while_loop(lambda c: pany(going(c), "i"), step, x)


def blocks_until_all_are_small(x):
    blocks = np.split(x, RANKS)
    while any(np.abs(b).max() > 0.1 for b in blocks):
        blocks = [np.where(np.abs(b).max() > 0.1, b / 2 + 0.01 * sum(blocks), b) for b in blocks]
    return np.concatenate(blocks)


def in_a_branch_along_i(f):
    """On the second row of ranks."""
    return mapped(lambda x: md.cond(axis_index("i") > 0, f, lambda x: x, x), PLANE, P("j"), ALL)


#: Functions on ranks, the same of whole arrays, and an argument.
OTHERS = {
    "a constant that comes to vary in a branch is of the branch": (
        in_a_branch_along_i(md.checkpoint(md.vmap(chosen_in_a_batch))),
        lambda x: np.concatenate([x, 0 * x[:2], np.sin(x[2:])]),
        np.arange(4.0),
    ),
    "a constant meets a value that varies along another axis": (
        in_a_branch_along_i(md.jit(lambda x: x * np.sum(2.0 * axis_index("j") + np.arange(2.0)))),
        lambda x: np.concatenate([x, x[:2], 5 * x[2:]]),
        np.arange(4.0),
    ),
    "a branch that no rank takes does not run": (
        on_line(by_first(lambda x: np.linalg.cholesky(x[:1, None])[0] * np.log(x), lambda x: 2 * x)),
        lambda x: 2 * x,
        -np.abs(X),
    ),
    "a constant is scattered in a branch": (
        on_line(by_first(lambda x: x * pscatter(np.arange(8.0), "i", tiled=True))),
        lambda x: x * np.where(np.repeat(x[::2], 2) > 0, np.arange(8.0), 1.0),
        X,
    ),
    "a step that no rank takes": (on_line(lambda x: halved(x, 100.0)), lambda x: x, X),
    "steps of all": (on_line(until_all_are_small), blocks_until_all_are_small, X),
}


@each("name", OTHERS)
def test_values_and_derivatives(name):
    f, of_whole, x = OTHERS[name]
    check_kinds(f, (x,), of_whole, ("value", "jvp" if "step" in name else "grad"))


def test_transposed_twice():
    """The transpose of a choice between linear branches is one between their transposes."""
    body = lambda w, x: md.cond(axis_index("i") == 0, lambda: 2 * x, lambda: x[::-1] + np.sum(w))  # noqa: E731
    tape = md.make_tape(mapped(body, LINE, (P(), P("i")), P("i")))(W, X)
    back = md.transpose(tape)
    back.check()
    assert md.transpose(back) == tape
    expected = [np.full(2, X[2:].sum()), np.array([*(2 * X[:2]), X[3], X[2], X[5], X[4], X[7], X[6]])]
    assert_trees_close(back(X), expected)


def test_a_gradient_in_the_first_step_is_the_ranks_own():
    """No type says before that step that ranks will take different numbers of them."""

    def body(x, grad=md.grad, while_loop=md.while_loop):
        slope = grad(lambda c: ((c - x) ** 2).sum())
        return while_loop(
            lambda s: s[1] < 0.5, lambda s: (s[0] - 0.1 * slope(s[0]), s[1] + x[0] ** 2), (np.zeros(2), 0.0)
        )[0]

    def one_by_one(goes_on, step, state):
        while goes_on(state):
            state = step(state)
        return state

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", md.VarianceWarning)
        check(on_line(body), lambda x: np.concatenate([body(b, while_loop=one_by_one) for b in np.split(x, RANKS)]), X)


@pytest.mark.parametrize("name", ["descent", "a loop of scans"])
def test_reverse_mode_of_at_most_so_many_steps(name):
    """The weight is summed over the ranks once: no step of theirs communicates."""

    class Bounded:
        scan, fori_loop, cond = md.scan, md.fori_loop, md.cond

        @staticmethod
        def while_loop(goes_on, step, init):
            return md.while_loop(goes_on, step, init, max_steps=30)

    on_each = lambda w, x: loop.PROGRAMS[name](Bounded, w, x, axis_index("i"))  # noqa: E731
    gradient = md.grad(loss(mapped(on_each, LINE, (P(), P("i")), P("i"))), (0, 1))
    check(gradient, md.grad(loss(whole(loop.PROGRAMS[name])), (0, 1)), W, X)
    LINE.reset_calls()
    md.jit(gradient)(W, X)
    assert LINE.calls["psum"] == 1


# ---------------------------------------------------------------- communication


def test_no_branch_and_no_step_communicates():
    """Values that branches use are summed outside of them, once each."""
    gradient = md.grad(loss(on_ranks(branch.PROGRAMS["closed over"], LINE)), (0, 1))
    descent = on_ranks(loop.PROGRAMS["descent"], LINE)
    tangent = lambda w, x: md.jvp(descent, (w, x), (w, x))  # noqa: E731
    for f, counts, kind in ((gradient, {"psum": 3}, "cond"), (tangent, {}, "while_loop")):
        report, tape = spmd.communication(f)(W, X), md.make_tape(f)(W, X)
        assert report.counts == counts and (not counts or not report.notes)
        bodies = [body for eqn in equations(tape) if eqn.primitive.name == kind for body in eqn.bodies]
        assert bodies and not {"psum", "pbroadcast"} & {e.primitive.name for body in bodies for e in equations(body)}


#: Bodies of which only some ranks would communicate: tests/messages/shard_map.md has others, and the texts.
WAITING = {
    "a scan": by_first(lambda x: x, lambda x: md.scan(lambda c, _: (c + psum(x, "i"), None), x, length=2)[0]),
    "a checkpoint": by_first(md.checkpoint(lambda x: x * psum(x, "i"))),
    "a branch": by_first(lambda x: md.cond(axis_index("j") > 0, lambda: psum(x, "i"), lambda: x)),
    "a vmap": lambda x: md.vmap(by_first(lambda x: psum(x, "i")))(np.stack([x, -x])).sum(0),
}
STEPPING = {
    "a step": lambda x: md.while_loop(lambda c: c[0] < 1, lambda c: c + psum(c, "i"), x),
    "steps of a bound": lambda x: md.fori_loop(0, axis_index("i"), lambda i, c: ppermute(c, "i", [(0, 1)]), x),
    "a condition": lambda x: md.while_loop(lambda c: c[0] < psum(c[1], ("i", "j")), lambda c: c + 1, x),
    "a loop in it": lambda x: md.while_loop(lambda c: c[0] < 1, lambda c: halved(c, pany(c[0] < 0, "i") * 1.0), x),
    "steps in a vmap": lambda x: md.vmap(
        lambda x: md.while_loop(lambda c: c < 1, lambda c: c + psum(c, "i") ** 2 + 1, x)
    )(x),
}
WAYS = [lambda f: lambda x: md.jvp(f, (x,), (x,)), md.make_tape, md.jit, lambda f: md.grad(total(f))]


@each("name, way", zip(WAITING | STEPPING, itertools.cycle(WAYS)))
def test_branches_and_steps_that_communicate(name, way):
    """The error names the line."""
    f = (WAITING | STEPPING)[name]
    for run, typed in [(lambda f: f, True), (way, True)] + [(lambda f: f, False)] * (name in STEPPING):
        with pytest.raises((md.VarianceError, TypeError), match=r"test_branches\.py:\d+|reverse mode"):
            run(mapped(f, PLANE, ALL, ALL, check_rep=typed))(X)


def test_a_backward_rule_that_communicates():
    f = md.custom_vjp(lambda x: np.sin(x))
    f.defvjp(lambda x: (np.sin(x), x), lambda x, ct: (ct * np.cos(x) + psum(ct, "i"),))
    g = on_line(by_first(f))
    assert_trees_close(g(X), whole(lambda lax, w, x, rank: np.sin(x) if x[0] > 0 else x)(W, X))
    for run in (md.grad(total(g)), md.make_tape(md.grad(total(g)))):
        with pytest.raises(md.VarianceError, match="defvjp"):
            run(X)


# ---------------------------------------------------------------- checks, prints, reports


def test_tapes_that_do_not_check():
    """A recorded choice says along which axes ranks choose, and what its results vary along."""
    for name, body in (("cond", by_first(lambda x: x, lambda x: np.ones(2))), ("while_loop", lambda x: halved(x, 0.1))):
        tape = md.make_tape(on_line(body))(X)
        (equation,) = [eqn for eqn in equations(tape) if eqn.primitive.name == name]
        tape.check()
        for body in equation.bodies[-2 if name == "cond" else -1 :]:
            body.outputs[:] = [np.ones(2)]
        with pytest.raises(TypeError, match=name):
            tape.check()


def loud(x):
    md.debug.print("{}", axis_index("i"))
    return md.cond(axis_index("i") > 1, lambda x: (md.debug.print("inner"), x)[1], lambda x: x, x)


def counted(i, c):
    md.debug.print("{}", i)
    return c


@pytest.mark.parametrize("run", [lambda f: f, md.jit, lambda f: md.make_tape(f)(X)], ids=["run", "jit", "tape"])
def test_only_the_ranks_of_a_branch_or_step_print(run, capsys):
    run(on_line(by_first(loud)))(X)
    run(on_line(lambda x: md.fori_loop(0, axis_index("i") // 2, counted, x)))(X)
    words = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [(w[1], w[-1]) for w in words] == [("0", "0"), ("2", "2"), ("2", "inner"), ("2", "0"), ("3", "0")]


@pytest.mark.parametrize("wrapped", [lambda f: f, md.jit], ids=["eager", "jit"])
def test_reports_count_one_step_and_say_so(wrapped):
    f = wrapped(on_ranks(loop.PROGRAMS["an adaptive solve"], LINE))
    prediction = spmd.predict(f, spmd.machines.A100)(W, X)
    assert prediction.seconds > 0 and "one step is counted" in str(prediction)
    assert "while_loop" in str(spmd.timeline(f, spmd.machines.A100)(W, X))
    assert spmd.memory(f)(W, X).peak.total > X.nbytes // RANKS
    report = spmd.communication(wrapped(mapped(branch.steps_along_one_axis, PLANE, (P(), ALL), ALL)))(W, X)
    assert set(report.counts) == {"psum"} and report.notes
