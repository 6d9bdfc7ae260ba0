"""Ranks that choose their own branch, by `cond` and `switch`: as if each ran its branch alone."""

import warnings

import pytest

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import axis_index, pbroadcast, pmax, ppermute, pscatter, psum
from spmd import P
from tests.programs import branch as programs
from tests.programs.branch import PROGRAMS, RANKS, W, X, check, closing_over, loss, on_ranks, whole
from tests.programs.on_blocks import assert_trees_close, equations

LINE = spmd.make_mesh((RANKS,), ("i",), backend="simulated")
TWO = spmd.make_mesh((2,), ("i",), backend="simulated")
SQUARE = spmd.make_mesh((2, 2), ("i", "j"), backend="simulated")
ARGS = W, X


@pytest.fixture(autouse=True)
def no_warnings():
    """A branch meets no values that it would not meet on real ranks."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "psum of a value that is already the same")
        yield


@pytest.mark.parametrize("name", PROGRAMS)
def test_each_rank_takes_its_branch(name):
    programs.check_derivatives(name, LINE)


@pytest.mark.parametrize("name", PROGRAMS)
def test_values_from_outside_of_the_ranks(name):
    program, expected = closing_over(PROGRAMS[name], LINE), whole(PROGRAMS[name])
    check(md.grad(loss(program), (0, 1)), md.grad(loss(lambda w, x: expected(np.sin(w), x)), (0, 1)), *ARGS)


@pytest.mark.parametrize("name", programs.BY_ELEMENT)
def test_elements_of_a_batch_on_each_rank(name):
    programs.check_elements(name, TWO)


@pytest.mark.parametrize("wrapped", [lambda f: f, md.checkpoint], ids=["plain", "checkpoint"])
def test_a_choice_in_a_batch_in_a_branch_along_another_axis(wrapped):
    """A constant that comes to vary in the branch is of the branch."""
    inner = wrapped(
        md.vmap(lambda v: md.cond(axis_index("j") > 0, lambda c: np.sin(c + v), lambda c: c, np.zeros_like(v)))
    )
    f = spmd.shard_map(
        lambda x: md.cond(axis_index("i") > 0, inner, lambda x: x, x),
        mesh=SQUARE,
        in_specs=P("j"),
        out_specs=P(("i", "j")),
    )
    x = np.arange(4.0)
    check(f, lambda x: np.concatenate([x, 0 * x[:2], np.sin(x[2:])]), x)
    check(md.grad(lambda x: f(x).sum()), lambda x: np.concatenate([np.ones(2), 1 + np.cos(x[2:])]), x)


def test_a_branch_that_no_rank_takes_does_not_run():
    rooted = lambda x: np.linalg.cholesky(x[:1, None])[0] * np.log(x)  # noqa: E731
    f = spmd.shard_map(by_first(rooted, lambda x: 2 * x), mesh=LINE, in_specs=P("i"), out_specs=P("i"))
    xs = -np.abs(X)
    check(f, lambda x: 2 * x, xs)
    check(md.grad(lambda x: f(x).sum()), lambda x: np.full(8, 2.0), xs)


def test_what_branches_use_is_summed_outside_of_them():
    """Once for each value, and no branch communicates, forward or backward."""
    program = on_ranks(PROGRAMS["closed over"], LINE)
    tape = md.make_tape(md.grad(loss(program), (0, 1)))(*ARGS)
    conds = [eqn for eqn in equations(tape) if eqn.primitive.name == "cond"]
    assert len(conds) == 2
    inside = [inner for eqn in conds for body in eqn.bodies for inner in equations(body)]
    assert not any(eqn.primitive.name in ("psum", "pbroadcast") for eqn in inside)
    report = spmd.communication(md.grad(loss(program), (0, 1)))(*ARGS)
    assert report.counts == {"psum": 3} and not report.notes


@pytest.mark.parametrize("name", programs.OTHER_AXES)
def test_an_axis_along_which_ranks_choose_alike(name):
    programs.check_other_axes(name, SQUARE)


def test_transposed_twice():
    """The transpose of a choice between linear branches is one between their transposes."""

    def body(w, x):
        return md.cond(axis_index("i") == 0, lambda: 2 * x, lambda: x[::-1] + np.sum(w))

    tape = md.make_tape(spmd.shard_map(body, mesh=LINE, in_specs=(P(), P("i")), out_specs=P("i")))(*ARGS)
    back = md.transpose(tape)
    back.check()
    assert md.transpose(back) == tape
    expected = [np.full(2, X[2:].sum()), np.array([*(2 * X[:2]), X[3], X[2], X[5], X[4], X[7], X[6]])]
    assert_trees_close(back(X), expected)


@pytest.mark.parametrize("stages", [2, 4])
def test_a_pipeline(stages):
    programs.check_pipeline(spmd.make_mesh((stages,), ("stage",), backend="simulated"))


# ---------------------------------------------------------------- errors


def by_first(true_fun, false_fun):
    return lambda x: md.cond(x[0] > 0, true_fun, false_fun, x)


def by_index(*branches):
    return lambda x: md.switch(axis_index("i"), branches, x)


same = lambda x: x  # noqa: E731
halves = lambda f: lambda x: md.scan(lambda c, _: (f(c), None), x, length=2)[0]  # noqa: E731
COMMUNICATING = {
    "psum": (by_first(lambda x: psum(x, "i"), same), "the predicate of cond, .* true_fun has a psum over 'i'"),
    "pmax": (by_first(same, lambda x: pmax(x, ("i", "j"))), "false_fun has a pmax over .*'i'"),
    "ppermute": (
        by_index(same, same, lambda x: ppermute(x, "i", [(0, 1)])),
        r"the index of switch, i64\[\]\{i\}, .* branches\[2\] has a ppermute over 'i'",
    ),
    "in a loop": (by_first(same, halves(lambda x: x + psum(x, "i"))), "false_fun has a psum over 'i'"),
    "in a checkpoint": (by_first(md.checkpoint(lambda x: x * psum(x, "i")), same), "true_fun has a psum over 'i'"),
    "in a branch": (
        by_first(lambda x: md.cond(axis_index("j") > 0, lambda: psum(x, "i"), lambda: x), same),
        "true_fun has a psum over 'i'",
    ),
    "in a vmap": (
        lambda x: md.vmap(by_first(lambda x: psum(x, "i"), same))(np.stack([x, -x])).sum(0),
        "true_fun has a psum over 'i'",
    ),
}


@pytest.mark.parametrize("name", COMMUNICATING)
def test_a_branch_that_communicates(name):
    """The error names the collective, its branch, its line, and the ways out."""
    body, message = COMMUNICATING[name]
    f = spmd.shard_map(body, mesh=SQUARE, in_specs=P(("i", "j")), out_specs=P(("i", "j")))
    message += (
        r".*test_varying_cond\.py:\d+: .*Move the \w+ out of the branch; .*pmax or pmin of .* over \W*'i'.*np\.where"
    )
    for g in (f, md.jit(f), md.make_tape(f), md.grad(lambda x: f(x).sum())):
        with pytest.raises(md.VarianceError, match=message):
            g(X)


def test_a_backward_rule_that_communicates():
    f = md.custom_vjp(lambda x: np.sin(x))
    f.defvjp(lambda x: (np.sin(x), x), lambda x, ct: (ct * np.cos(x) + psum(ct, "i"),))
    mapped = spmd.shard_map(by_first(f, same), mesh=LINE, in_specs=P("i"), out_specs=P("i"))
    assert_trees_close(mapped(X), whole(lambda lax, w, x, rank: np.sin(x) if x[0] > 0 else x)(W, X))
    for g in (md.grad(lambda x: mapped(x).sum()), md.make_tape(md.grad(lambda x: mapped(x).sum()))):
        with pytest.raises(md.VarianceError, match=r"true_fun has a psum over 'i'.*defvjp"):
            g(X)


def test_without_types_nothing_says_that_branches_may_differ():
    f = spmd.shard_map(by_first(same, same), mesh=LINE, in_specs=P("i"), out_specs=P("i"), check_rep=False)
    with pytest.raises(md.VarianceError, match=r"the predicate of cond needs one value, but bool\[\]\{i\} varies"):
        f(X)


def test_tapes_that_do_not_check():
    """A recorded choice says along which axes ranks choose, and what its results vary along."""
    f = spmd.shard_map(by_first(same, lambda x: np.ones(2)), mesh=LINE, in_specs=P("i"), out_specs=P("i"))
    tape = md.make_tape(f)(X)
    (cond,) = [eqn for eqn in equations(tape) if eqn.primitive.name == "cond"]
    tape.check()
    for branch in cond.bodies:
        branch.outputs = [np.ones(2)]
    with pytest.raises(TypeError, match="cond: all results must vary along 'i', as the predicate of cond does"):
        tape.check()


# ---------------------------------------------------------------- what else runs on ranks


@pytest.mark.parametrize("run", [lambda f: f, md.jit, lambda f: md.make_tape(f)(X)], ids=["run", "jit", "tape"])
def test_only_the_ranks_of_a_branch_print(run, capsys):
    def loud(x):
        md.debug.print("{}", axis_index("i"))
        return md.cond(axis_index("i") > 1, quiet, same, x)

    def quiet(x):
        md.debug.print("inner")
        return x

    run(spmd.shard_map(by_first(loud, same), mesh=LINE, in_specs=P("i"), out_specs=P("i")))(X)
    ranks = [(line.split()[1], line.split()[-1]) for line in capsys.readouterr().out.splitlines()]
    assert ranks == [("0", "0"), ("2", "2"), ("2", "inner")]


def test_nan_checks_see_the_branch_that_is_taken():
    root = spmd.shard_map(by_first(np.sqrt, same), mesh=LINE, in_specs=P("i"), out_specs=P("i"))
    with md.debug_nans():
        root(np.abs(X) * np.sign(np.repeat(X[::2], 2)))
        with pytest.raises(FloatingPointError, match=r"sqrt .*on rank 0"):
            root(np.where(np.arange(8) == 1, -1.0, X))


def test_a_constant_is_scattered_in_a_branch():
    f = spmd.shard_map(
        by_first(lambda x: x * pscatter(np.arange(8.0), "i", tiled=True), same),
        mesh=LINE,
        in_specs=P("i"),
        out_specs=P("i"),
    )
    expected = np.where(np.repeat(X[::2], 2) > 0, X * np.arange(8.0), X)
    check(f, lambda x: expected, X)
    check(md.grad(lambda x: f(x).sum()), lambda x: np.where(np.repeat(X[::2], 2) > 0, np.arange(8.0), 1.0), X)


def test_values_that_vary_already_are_named():
    """In a branch, all it uses varies."""
    f = lambda w: md.cond(axis_index("i") > 0, lambda: pbroadcast(w, "i"), lambda: w)  # noqa: E731
    with pytest.raises(md.VarianceError, match=r"f64\[2\]\{i\} already varies along 'i': remove these axes"):
        spmd.shard_map(f, mesh=LINE, in_specs=P(), out_specs=P("i"))(W)


@pytest.mark.parametrize("wrapped", [lambda f: f, md.checkpoint, md.jit], ids=["plain", "checkpoint", "jit"])
def test_a_constant_meets_a_value_that_varies_along_another_axis_than_the_choice(wrapped):
    branch = wrapped(lambda x: x * np.sum(2.0 * axis_index("j") + np.arange(2.0)))
    f = spmd.shard_map(
        lambda x: md.cond(axis_index("i") == 0, branch, lambda x: x, x),
        mesh=SQUARE,
        in_specs=P(("i", "j")),
        out_specs=P(("i", "j")),
    )
    md.make_tape(f)(X).check()
    check(f, lambda x: x * np.array([1.0, 1.0, 5.0, 5.0, 1.0, 1.0, 1.0, 1.0]), X)
