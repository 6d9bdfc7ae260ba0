"""Whether ranks make the same calls, on the same values: where they do not, all of them raise one error."""

import contextlib
import itertools
import re
import warnings

import numpy as np
import pytest
from mpi4py import MPI

import minidiff as md
import spmd
from collectives import psum
from collectives.guards.mismatch import DisagreementError
from spmd import P
from tests.checks import all_ranks
from tests.checks.all_ranks import line
from tests.checks.meshes import mapped, mesh
from tests.checks.samples import each

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
OTHER = RANK == 1  # the rank that does something else
several = pytest.mark.parallel([2, 4])
two = pytest.mark.parallel(2)
new_sizes = itertools.count(3)  # of kinds of calls that no test has made
WRAPPED = {
    "eager": lambda f: f,
    "jit": md.jit,
    "grad": md.grad,
    "jit of grad": lambda f: md.jit(md.grad(f)),
    "vmap": lambda f: lambda *args: md.vmap(f)(*md.tree.map(lambda x: np.stack([x, x]), args)),
    "scan": lambda f: lambda *args: md.scan(lambda c, _: (c + f(*args), None), 0.0, None, length=2)[0],
}


def total_of(x):
    return psum(np.sum(x), "i")


def all_raise(do, match, error=ValueError):
    """All ranks raise one error, and afterwards they go on together."""
    all_ranks.all_raise(do, match, error)
    x = np.ones((SIZE, next(new_sizes)))
    assert mapped(total_of, line(), P("i"), P())(x) == x.size


def calls_differ(do, text, other):
    """The error names what rank 1 does, and what the rest do."""
    rest = ", ".join(str(r) for r in range(SIZE) if r != 1)
    named = f"rank{'s' * (SIZE > 2)} {rest}"
    match = rf"(?s)  {named}: {re.escape(text)}; \S+:.*  rank 1: {re.escape(other)}; \S+:"
    all_raise(do, match, DisagreementError)


def values(of, at=r"\[\d*(, \d+)*\]"):
    """An error about `of`, of which rank 0 has one value and all others another; `at` an index, or "" for a number."""
    others, value = ", ".join(map(str, range(1, SIZE))), r"[-+\d.eTrueFals]+" + f" at {at}" * bool(at)
    return rf"different values of {of}.*: rank 0: {value}; ranks? {others}: {value}\. Under mpirun .*seed"


def split(shape, spec):
    return spmd.distribute(np.ones(shape), line(), spec)


def seeded_by_rank(shape):
    return np.random.default_rng(min(RANK, 1)).normal(size=shape)


# ---------------------------------------------------------------- check_invariant


@two
def test_what_is_the_same_is_returned():
    x = {
        "w": [np.random.default_rng(0).normal(size=(3, 2)), 2.5],
        "b": spmd.distribute(np.arange(4.0 * SIZE), line(), P("i")),
        "n": np.float32(np.nan),
    }
    assert spmd.check_invariant(x, line()) is x
    assert spmd.check_invariant((), line()) == ()


@several
@each("other", [np.ones(4), np.ones(3, np.float32), [np.ones(3)], [], 1])
def test_another_type(other):
    wrong = lambda: spmd.check_invariant(other if OTHER else np.ones(3), line())  # noqa: E731
    all_raise(wrong, r"values of different types: ranks? 0.*: x: float64\[3\]; rank 1: ")


@several
def test_another_seed_or_spec():
    x = {"a": np.ones(3), "w": [np.zeros(2), seeded_by_rank((3, 2))]}
    match = values(r"x\['w'\]\[1\]: float64\[3, 2\] \(.*\)", at=r"\[0, 0\]")
    all_raise(lambda: spmd.check_invariant(x, line()), match)
    y = split((4, 4), P("i") if OTHER else P(None, "i"))
    match = r"x: float64\[4, 4\] split as P\(None, 'i'\); rank 1: x: .*P\('i'\)"
    all_raise(lambda: spmd.check_invariant(y, line()), match)


# ---------------------------------------------------------------- calls of shard_map


def summed(w, x, **options):
    """A call whose arguments, and options, may be others on rank 1."""
    options = {"in_specs": (P(), P("i")), "out_specs": P(), "check_rep": False, **options}
    return mapped(lambda w, x: (w[0] if type(w) is list else w) + total_of(x), line(), **options), w, x


def one(*x):
    return total_of(x[0])


def another(*x):
    return total_of(x[0])


#: A function and its arguments, of which rank 1 has others; and what is said of both. No other call has the size n.
CALLS = {
    "data of one rank": (
        lambda n: summed(np.ones(n), np.ones(0 if OTHER else n)), "args[1]: f64[{n}]", "args[1]: f64[0]",
    ),
    "one array of many": (
        lambda n: summed([np.ones(n, "f4" if OTHER and k == 234 else "f8") for k in range(500)], np.ones(n)),
        "args[0][234]: f64[{n}]", "args[0][234]: f32[{n}]",
    ),
    "in_specs": (
        lambda n: summed(np.ones((SIZE, n)), np.ones(SIZE), in_specs=(P(), P() if OTHER else P("i"))),
        "in_specs of args[1]: P('i')", "in_specs of args[1]: P()",
    ),
    "out_specs": (
        lambda n: summed(np.ones((SIZE, n)), np.ones(SIZE), out_specs=P("i") if OTHER else P()),
        "out_specs: P()", "out_specs: P('i')",
    ),
    "check_rep": (
        lambda n: summed(np.ones(n), np.ones(SIZE), check_rep=OTHER), "check_rep=False", "check_rep=True",
    ),
    "a function": (
        lambda n: (mapped(another if OTHER else one, line(), P("i"), P()), np.ones((SIZE, n))),
        "shard_map of one", "shard_map of another",
    ),
    "more arguments": (
        lambda n: (mapped(one, line(), P("i"), P()), *[np.ones((SIZE, n))] * (3 if OTHER else 1)),
        "arrays in the arguments: 1", "arrays in the arguments: 3",
    ),
    "a split": (
        lambda n: (mapped(one, line(), P("i"), P()), split((n, n), P(None, "i") if OTHER else P("i"))),
        "args[0]: f64[{n},{n}], a ShardedArray split as P('i')",
        "args[0]: f64[{n},{n}], a ShardedArray split as P(None, 'i')",
    ),
}  # fmt: skip


@several
@each("wrap", ["eager", "jit"])
@each("name", CALLS)
def test_other_calls(name, wrap):
    call, *texts = CALLS[name]
    n = SIZE * next(new_sizes)
    f, *args = call(n)
    calls_differ(lambda: WRAPPED[wrap](f)(*args), *[text.replace("{n}", str(n)) for text in texts])


@pytest.mark.parallel(4)
@each("sizes, other", [((2, 2), (4, 1)), ((2, 2, 1), (1, 2, 2))])
def test_another_mesh(sizes, other):
    names = [f"{axis}{next(new_sizes)}" for axis in "abc"[: len(sizes)]]
    shown, others = (f"axes ({', '.join(f'{a}: {n}' for a, n in zip(names, s))})" for s in (sizes, other))
    calls_differ(lambda: spmd.make_mesh(other if OTHER else sizes, names), shown, others)
    assert spmd.make_mesh(sizes, names).size == 4


@pytest.mark.parallel(4)
def test_another_call_in_the_body_of_one():
    spec = P("j") if OTHER else P(None, "j")

    def outer(x):
        return spmd.shard_map(lambda x: x, in_specs=spec, out_specs=spec, axis_names={"j"}, check_rep=False)(x)

    f = mapped(outer, mesh(2, 2, backend="mpi"), P("i"), P("i"), axis_names={"i"}, check_rep=False)
    calls_differ(lambda: f(np.ones((4, 4))), "in_specs of args[0]: P(None, 'j')", "in_specs of args[0]: P('j')")


@two
@each("values_too", [False, True])
def test_calls_of_known_types_communicate_nothing(values_too):
    """Nor does recording a program, which one rank may do alone. Values are compared at calls 1, 2, 4, 8, 16."""
    x, comm = np.ones((SIZE, next(new_sizes))), line().ranks.comm

    def doubled():  # a new one each time
        return mapped(lambda x: 2.0 * x, line(), P("i"), P("i"))

    f = doubled()
    if OTHER:
        md.make_tape(f)(x)
        md.jit(f).source(x)
    for _ in range(9 if values_too else 1):
        f(x)
    before = comm.begun
    with contextlib.nullcontext() if values_too else spmd.checking(False):
        f(x), doubled()(x), md.jit(doubled())(x), md.jit(f)(x)
    assert comm.begun == before


# ---------------------------------------------------------------- values


@two
@each("wrap", WRAPPED)
def test_weights_of_another_seed(wrap):
    """Found at the first call without being asked for, and at any call where one asks."""
    x, n = np.ones(4 * SIZE), next(new_sizes)
    f = WRAPPED[wrap](mapped(lambda w, x: psum(np.sum(x) * np.sum(w["w"] ** 2), "i"), line(), (P(), P("i")), P()))
    wrong, match = seeded_by_rank(n), values(rf"args\[0\]\['w'\] of <lambda>: float64\[(2, )?{n}\] \(\w+.py:\d+: ")
    all_raise(lambda: f({"w": wrong}, x), match)
    with spmd.checking(False):
        f({"w": wrong}, x)  # nobody notices
    with spmd.checking():
        f({"w": np.ones(n)}, x)
        all_raise(lambda: f({"w": wrong}, x), match)


@two
@each("wrap", ["eager", "jit", "grad"])
def test_what_a_body_closes_over(wrap):
    w, x = seeded_by_rank(3), np.ones(SIZE)
    f = mapped(lambda x: psum(np.sum(x * w), "i"), line(), P("i"), P())
    label = "a closed-over array of <lambda>" if wrap == "jit" else "an array that the body closes over"
    with spmd.checking():
        all_raise(lambda: WRAPPED[wrap](f)(x), values(rf"{label}: float64\[3\]"))


@pytest.mark.parallel(4)
def test_blocks_are_compared_along_the_axes_that_a_spec_does_not_name():
    on = mesh(2, 2, backend="mpi")
    f = mapped(lambda x: psum(x, "j"), on, P("i"), P("i"))
    block = np.full(2, 1.0 + RANK // 2)  # ranks 0 and 1 have the first half, 2 and 3 the other
    x, wrong = (spmd.from_local(lambda rank: b, on, P("i")) for b in (block, block + (RANK == 3)))  # noqa: B023
    with spmd.checking():
        assert f(x).gather().tolist() == [2.0, 2.0, 4.0, 4.0]
        all_raise(lambda: f(wrong), r"args\[0\] of <lambda>: float64\[2\] .*: rank 2: 2.0.*; rank 3: 3.0")
        double = mapped(lambda x: x * 2.0, on, P(), P(), axis_names={"j"})
        g = mapped(lambda x, w: double(x) * w, on, (P("i"), P()), P("i"), axis_names={"i"})
        assert g(x, 1.0).gather().tolist() == [2.0, 2.0, 4.0, 4.0]
        all_raise(lambda: g(x, 1.0 + RANK), r"args\[1\] of <lambda>: float64\[\] .*rank 2: 3.0; rank 3: 4.0")
    assert f(wrong).shape == (4,)  # blocks are not compared otherwise


@several
@each("seed", range(2))
def test_the_leaf_of_which_one_bit_is_not_the_same(seed):
    rng = np.random.default_rng(seed)
    params = {f"layer {k}": [rng.normal(size=rng.integers(0, 4, 2)), rng.integers(9, size=3)] for k in range(4)}
    leaves, _ = md.tree.flatten_with_paths(params, "args[0]")
    (path, x), rank = leaves[rng.choice([k for k, (_, x) in enumerate(leaves) if x.size])], rng.integers(SIZE)
    f = mapped(lambda p: [np.sum(x) for x in md.tree.leaves(p)], line(), P(), P())
    with spmd.checking():
        f(params)
        if rank == RANK:
            x.view(np.uint8).flat[0] ^= 1
        for call in (f, md.jit(f)):
            all_raise(lambda call=call: call(params), rf"{re.escape(path)} of .*: .*\brank {rank}: ")


def named(body, in_specs=P(), out_specs=P(), **options):
    """A `shard_map` of a function whose name, by which calls are counted, no other has had."""

    def f(*args):
        return body(*args)

    f.__name__ = f"f{next(new_sizes)}"
    return mapped(f, line(), in_specs, out_specs, **options)


@two
@each("wrap", ["eager", "jit", "scan"])
@each("begins", [1, 3, 5])
def test_values_are_compared_at_calls_1_2_4_8(wrap, begins):
    x, f = np.ones(3), WRAPPED[wrap](named(lambda w: np.sum(w)))
    for call in range(1, 9):
        if call >= begins:
            x = x + (SIZE - 1 == RANK)
        if call >= begins and call in (1, 2, 4, 8):
            all_raise(lambda x=x: f(x), rf"args\[0\].*rank {SIZE - 1}: \d+")
            break
        f(x)


@two
@each("wrap", ["eager", "jit"])
@each("n", [1, 5000])
def test_data_that_is_cut_from_other_wholes(wrap, n):
    """By `in_specs` and by `distribute`, which one rank may call alone; large ones too."""
    wrong = seeded_by_rank((SIZE * n, 2))
    f, g = (WRAPPED[wrap](named(total_of, P("i"))) for _ in range(2))
    all_raise(lambda: f(wrong), values(r"args\[0\] of f\d+", at=r"\[\d+, \d+\]"))
    x, y = (spmd.distribute(wrong, line(), P("i")) for _ in range(2))
    all_raise(lambda: g(x), values(r"(a sample of )?args\[0\] of f\d+"))
    all_raise(lambda: (y * y[:1]).sum(), values("(a sample of )?an array that was split"))
    for _ in range(2 if OTHER else 1):
        z = split((SIZE, 2), P("i"))
    assert float(z.sum()) == 2 * SIZE


@several
def test_a_set_has_another_order_on_each_rank():
    params = {name: np.full(2, float(i)) for i, name in enumerate("abcde")}
    names = [*params][RANK:] + [*params][:RANK]  # as sets of strings are iterated, without PYTHONHASHSEED
    total = md.jit(named(total_of, P("i") if SIZE == 2 else P()))
    all_raise(lambda: [total(params[name]) for name in names], r"0\.0.*Usual causes are .*the order of a set")


@two
def test_values_that_are_equal_or_differ_by_rounding():
    """Bits matter only where they are asked for: processors of two kinds may round differently."""
    f, other = md.jit(named(lambda x: np.sum(x))), min(RANK, 1)
    equal = np.array([-0.0 if other else 0.0, 1.0, -np.nan if other else np.nan])
    near = np.array([1.0, 1 / 3 * (1 + other * 2**-52), 1e-30 * other])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        f(equal)
        mapped(lambda x: x, line(), P(), P())(np.asfortranarray(np.eye(3)[:, ::-1]))
    with pytest.warns(RuntimeWarning, match="last digits") if RANK == 0 else contextlib.nullcontext():
        f(near)
    far = np.array([1.0, 1 / 3 + other * 1e-10])
    all_raise(lambda: named(lambda x: np.sum(x))(far), values("args", at=r"\[1\]"))
    for x in (equal, near):
        all_raise(lambda x=x: spmd.check_invariant(x, line()), "ranks have different values of x: ")


@two
def test_checking_off_and_on():
    wrong, x = seeded_by_rank((SIZE, 2)), split((SIZE, 2), P("i"))
    product = named(lambda w, x: w * x, (P(), P("i")), P("i"))
    untyped, y = mapped(lambda x: {"k": x}, line(), P("i"), P(), check_rep=False), np.arange(float(SIZE))
    with spmd.checking(False):
        product(1.0 + RANK, x), md.jit(product)(1.0 + RANK, x)
        spmd.distribute(wrong, line(), P("i")).sum()
    product(2.0, x), product(2.0, x)
    product(1.0 + RANK, x)  # the third call
    untyped(y), spmd.distribute(wrong, line(), P())
    with spmd.checking():
        for wrap in (lambda f: f, md.jit):
            wrap(product)(2.0, x)
            all_raise(lambda wrap=wrap: wrap(product)(1.0 + RANK, x), r"args\[0\]")
            all_raise(lambda wrap=wrap: wrap(untyped)(y), "result 0: .*rank 1: 1")
        for spec in (P(), P("i")):
            tree = {"a": [np.ones(SIZE), wrong]}
            all_raise(lambda s=spec, t=tree: spmd.distribute(t, line(), s), values(r"distribute: x\['a'\]\[1\]"))
