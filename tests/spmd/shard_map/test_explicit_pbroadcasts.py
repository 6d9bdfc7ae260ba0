"""shard_map(auto_pbroadcast=False): what disagrees is an error, what is correct gives what the automatic mode gives."""

import functools
import itertools
import operator

import pytest

import collectives
import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import all_gather, axis_index, pbroadcast, pmax, pmean, psum, reduce
from spmd import P
from tests.checks.meshes import mapped, mesh
from tests.checks.results import assert_trees_close
from tests.checks.samples import each
from tests.programs.explicit import replayed, without_one
from tests.programs.rank import random_program
from tests.table import TABLE

PLANE = mesh(2, 2)
X, W = np.arange(4.0) + 1, np.array([0.5, -0.5])
explicit = functools.partial(mapped, over=PLANE, in_specs=(P("i"), P()), auto_pbroadcast=False)

WAYS = {
    "run": lambda f: f,
    "make_tape": md.make_tape,
    "jit": md.jit,
    "grad": lambda f: lambda *xs: md.vjp(f, *xs),
    "jvp": lambda f: lambda *xs: md.jvp(f, xs, xs),
    "vmap": lambda f: lambda *xs: md.vmap(f)(*[np.stack([x, x]) for x in xs]),
}

# ---------------------------------------------------------------- mistakes


def of_w(name, *args):
    return lambda x, w: getattr(collectives, name)(w, "i", *args)


def of_x(name):
    return lambda x, w: getattr(collectives, name)(x, "i")


#: Functions of x, which varies along i, and of w, which does not, without the cast that they need. Those that
#: `tests/messages/explicit_pbroadcasts.md` has are not repeated.
MISTAKES = {
    "the second": lambda x, w: w * x,
    "where, the condition": lambda x, w: np.where(w > 0, x, x),
    "concatenate": lambda x, w: np.concatenate([w, x, w]),
    "einsum": lambda x, w: np.einsum("i,j->j", x, w),
    "a varying index": lambda x, w: w[axis_index("i")],
    "grad": lambda x, w: md.grad(lambda x, w: np.sum(x * w))(x, w),
    "jit": md.jit(operator.mul),
    "checkpoint": md.checkpoint(operator.mul),
    "jvp": lambda x, w: md.jvp(operator.mul, (x, w), (x, w)),
    "cond that varies, of operands": lambda x, w: md.cond(x[0] > 0, lambda x, w: x, lambda x, w: w, x, w),
    "scan": lambda x, w: md.scan(lambda c, _: (pbroadcast(c, "i") * x, None), w, length=2)[0],
    "scan's result": lambda x, w: md.scan(lambda c, _: (w, None), x, length=2)[0],
    **{name: of_w(name) for name in ("psum", "pmean", "all_gather", "broadcast", "scatter")},
    **{name: of_x(name) for name in ("pscatter", "at_root", "pbroadcast")},
    "psum of a tree": lambda x, w: psum({"a": x, "b": [x, w]}, "i"),
    "psum in groups": lambda x, w: psum(w, "i", axis_index_groups=[[0, 1]]),
}


def in_a_scan(f):
    return lambda x, w: md.scan(lambda c, _: (c, f(x, w)), 0.0, length=2)[1]


@each("name, way", zip(MISTAKES, itertools.cycle(WAYS)))
def test_mistakes(name, way):
    for f, run in ((MISTAKES[name], WAYS["run"]), (MISTAKES[name], WAYS[way]), (in_a_scan(MISTAKES[name]), WAYS[way])):
        with pytest.raises(md.VarianceError):
            run(explicit(f, out_specs=P("i")))(X, W)


def test_mistakes_in_recorded_branches():
    choice = lambda x, w: md.cond(psum(x.sum(), "i") > 0, lambda: x, lambda: w)  # noqa: E731
    with pytest.raises(md.VarianceError):
        md.make_tape(explicit(choice, out_specs=P("i")))(X, W)


def test_differentiated_or_recorded_values_that_are_closed_over_are_checked():
    """They are unmapped inputs that the user did not write down; a plain array is a constant."""
    total = lambda vary: lambda w: explicit(lambda x: np.sum(x * vary(w)), in_specs=P("i"), out_specs=P(sum="i"))(X)  # noqa: E731
    for run in (md.grad, md.make_tape, md.jit):
        with pytest.raises(md.VarianceError):
            run(total(lambda w: w))(W)
    np.testing.assert_allclose(total(lambda w: w)(W), np.sum(X.reshape(2, -1) * W))
    md.testing.check_grads(total(lambda w: pbroadcast(w, "i")), (W,), order=2)


@pytest.mark.parametrize("outside, inside", [(True, False), (False, True), (False, False)])
def test_a_shard_map_in_an_explicit_one_is_explicit(outside, inside):
    def nested(vary):
        columns = lambda x, w: x * vary(w)  # noqa: E731
        specs = {"in_specs": (P("j"), P()), "out_specs": P("j")}
        f = lambda x, w: spmd.shard_map(columns, **specs, auto_pbroadcast=inside)(x, w)  # noqa: E731
        return mapped(f, PLANE, (P("i"), P()), P("i"), axis_names={"i"}, auto_pbroadcast=outside)

    for way in ("run", "make_tape"):
        with pytest.raises(md.VarianceError):
            WAYS[way](nested(lambda w: w))(X, W[:1])
    md.testing.check_grads(nested(lambda w: pbroadcast(w, ("i", "j"))), (X, W[:1]), order=2)


# ---------------------------------------------------------------- what is correct


def along_a_vmap(x, w):
    one = lambda a: psum(a, "v") + all_gather(a, "v").sum() + pmax(pbroadcast(a, "v"), "v")  # noqa: E731
    both = md.vmap(lambda a: psum(a, ("i", "v")), axis_name="v", out_axes=None)(x)
    return md.vmap(one, axis_name="v")(x) + pbroadcast(both + md.vmap(one, axis_name="v")(w), "i")


def with_numbers(x, w):
    counts = psum(1, "i") + psum(True, "i") + pmean(3, "i") + pmax(2, "i")
    return md.scan(lambda c, y: (c + y, None), 0.0, np.where(x > 0, x, 0.0))[0] * counts + np.float64(1)


def with_plain_arrays(x, w):
    ones = np.ones(2)
    return (
        x * ones + ones / x + np.at(ones)[0].add(x[0]) + np.convolve(x, [1.0, 2.0, 3.0])[:2] + np.where(x > 0, ones, x)
    )


def a_choice(x, w):
    """The predicate of a vmapped cond need not vary as the values do."""
    return md.vmap(lambda k: md.cond(k, lambda: x, lambda: pbroadcast(w, "i")))(np.array([True, False]))


#: Functions of x, which varies along i, and of w, which does not; results vary.
CORRECT = [
    *(along_a_vmap, with_numbers, with_plain_arrays, a_choice),
    lambda x, w: md.cond(x[0] > 0, lambda x, w: x, lambda x, w: w * np.ones(2), x, pbroadcast(w, "i")),
    lambda x, w: np.quantile(x, 0.3) + np.array([[x[0], 1.0], [2, x[1]]]) + np.concatenate([x, [1.0, 2.0]])[:2],
]
TRANSFORMED = {
    "grad": lambda f: md.grad(f, (0, 1)),
    "jit of grad": lambda f: md.jit(md.grad(f, (0, 1))),
    "tape of grad": lambda f: lambda x, w: md.make_tape(md.grad(f, (0, 1)))(x, w)(x, w),
    "grad of vmap": lambda f: lambda x, w: md.grad(lambda w: md.vmap(f)(np.stack([x, x]), w).sum())(np.stack([w, w])),
}


@each("name", TRANSFORMED)
@each("f", CORRECT)
def test_what_is_correct_gives_what_the_automatic_mode_does(f, name):
    """Derivatives too: rules may insert pbroadcasts, which are none of the user's."""
    body = lambda x, w: psum(np.sum(np.sin(f(x, w))), "i")  # noqa: E731
    written, automatic = (mapped(body, PLANE, (P("i"), P()), P(), auto_pbroadcast=auto) for auto in (False, True))
    assert_trees_close(TRANSFORMED[name](written)(X, W), TRANSFORMED[name](automatic)(X, W))


def test_a_number_is_carried():
    f = explicit(lambda x, w: md.scan(lambda c, y: (c + y, None), 0.0, x)[0].reshape(1), out_specs=P("i"))
    for run in (f, lambda *xs: md.make_tape(f)(*xs)(*xs)[0]):
        np.testing.assert_array_equal(run(X, W), [3.0, 7.0])


def test_collectives_of_numbers_are_numbers():
    f = lambda x, w: (psum(True, "i"), pmean(3, "i"), pmax(2, "i"), psum(reduce(True, "i"), "i"))  # noqa: E731
    assert explicit(f, out_specs=P())(X, W) == (2, 3.0, 2, 2)


def test_pbroadcasts_are_those_that_are_written():
    """Each is one on the tape, and a psum on the way back: none is inserted, and none left out."""
    once = lambda x, w: (lambda v: psum((x * v + np.sin(x) * v).sum(), "i"))(pbroadcast(w, "i"))  # noqa: E731
    twice = lambda x, w: psum((x * pbroadcast(w, "i") + np.sin(x) * pbroadcast(w, "i")).sum(), "i")  # noqa: E731
    for f, count in ((once, 1), (twice, 2)):
        tape = str(md.make_tape(explicit(f, out_specs=P()))(X, W))
        assert tape.count("= pbroadcast(") == count and "auto_pbroadcast=False" in tape
        report = spmd.communication(md.grad(explicit(f, out_specs=P()), 1))(X, W)
        assert (report.counts, report.bytes) == ({"psum": 2}, 8 + count * W.nbytes)  # several are summed in one call


CALLS = [r for r in TABLE if isinstance(r.f, functools.partial) and r.f.func is r.function and r.args]
CALLS = [r for r in CALLS if not any(isinstance(x, np.ndarray) for x in md.tree.leaves(list(r.f.keywords.values())))]


def test_functions_pbroadcast_what_they_make_themselves():
    """NumPy's functions, as the table calls them, of arrays that all vary: nothing is left for the user to write."""
    assert len(CALLS) > 500
    for r in CALLS:
        is_block = [isinstance(x, (np.ndarray, np.generic)) for x in r.args]

        def body(*xs, r=r, is_block=is_block):
            blocks = iter([x[0] for x in xs])
            r.f(*[next(blocks) if flag else x for x, flag in zip(r.args, is_block)])
            return 0.0

        stacked = [np.stack([x, x]) for x, flag in zip(r.args, is_block) if flag]
        explicit(body, in_specs=P("i"), out_specs=P())(*stacked)


# ---------------------------------------------------------------- random programs, each of their pbroadcasts by hand


@each("kind", ["plain", "control"])
@each("seed", range(12))
def test_random_programs_written_out(kind, seed):
    program = random_program(seed, control=kind == "control")
    automatic, leaves = program.on_ranks(mesh(*program.shape.values())), program.example(seed)
    written, numbers = replayed(automatic, *leaves), tuple(range(len(leaves)))
    assert_trees_close(*[md.value_and_grad(f, numbers)(*leaves) for f in (written, automatic)], rtol=1e-12)
    (one,), (two,) = (md.make_tape(f)(*leaves).equations for f in (automatic, written))
    assert one.params["body"] == two.params["body"]
    assert (one.params["auto_pbroadcast"], two.params["auto_pbroadcast"]) == (True, False)
    gradients = [md.make_tape(md.grad(f, numbers))(*leaves) for f in (automatic, written)]
    for tape in gradients:
        tape.check()
        assert len(tape.equations) == len(gradients[0].equations)
    fewer, sums = (report.counts.get("psum", 0) for report in map(spmd.communication, gradients))
    assert fewer <= sums  # those that are written stay where they are
    for wrong in () if kind == "control" else without_one(automatic, *leaves):  # some of loops are hoisted
        with pytest.raises(md.VarianceError):
            wrong(*leaves)
