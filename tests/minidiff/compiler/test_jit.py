"""jit: the same results as without, from source that can be read, in memory that nobody else looks at."""

import dataclasses
import functools
import itertools
import sys
import tracemalloc
from collections import Counter
from typing import NamedTuple

import attrs
import numpy as np
import pytest

import minidiff as md
from collectives import axis_index, psum
from minidiff.compiler import buffers
from minidiff.compiler.buffers import copy_p
from minidiff.compiler.program import optimize
from spmd import P, make_mesh, shard_map
from tests.checks.aliasing import check_apart
from tests.checks.samples import each
from tests.minidiff.ops.test_ops import OPERATIONS, agree, check_rows, random_like
from tests.table import DISCRETE


def same(actual, expected):
    for a, e in zip(md.tree.leaves(actual), md.tree.leaves(expected), strict=True):
        assert md.typeof(a) == md.typeof(e)
        agree(a, e)


def check_values(row):
    compiled, expected = md.jit(row.f), row.f(*row.args)
    results = [compiled(*row.args) for _ in range(2)]
    for out in results:
        same(out, expected)
    check_apart(results, row.args)


def check_derivatives(row):
    """Compiled derivatives are the same, as are the types of the simplified tape."""
    f, args = row.closed()
    ct = random_like(f(*args))

    def pulled_back(*xs):
        return md.vjp(f, *xs)[1](ct)

    def derivatives(*xs):
        return md.jvp(f, xs, args), pulled_back(*xs)

    compiled, before = md.jit(derivatives), [np.copy(x) for x in args]
    expected = derivatives(*args)
    for _ in range(2):
        same(compiled(*args), expected)
    assert all(np.array_equal(x, y, equal_nan=True) for x, y in zip(args, before, strict=True))
    tape = md.make_tape(pulled_back)(*args)
    smaller = optimize(tape)
    smaller.check()
    assert (smaller.in_types, smaller.out_types) == (tape.in_types, tape.out_types)
    assert sum(e.primitive is not copy_p for e in smaller.equations) <= len(tape.equations)


@OPERATIONS
def test_operation(rows):
    check_rows(rows, lambda row: [check_values] if row.function in DISCRETE else [check_values, check_derivatives])


@pytest.mark.parametrize("same", [lambda x: md.checkpoint_name(x, "a"), md.stop_gradient])
def test_what_is_only_named_is_not_written_into(same):
    def f(x):
        y = np.sin(x)
        z = same(y)
        return z * np.exp(y + 1.0)

    x = np.linspace(0.0, 1.0, 2000)
    np.testing.assert_array_equal(md.jit(f, kernels=False)(x), f(x))


# ---------------------------------------------------------------- memory


@pytest.fixture
def every_size(monkeypatch):
    """Results of any size are written into memory that is there."""
    monkeypatch.setattr(buffers, "REUSED_BYTES", 0)


def shared(one, two):
    return any(np.shares_memory(x, y) for x, y in itertools.product(md.tree.leaves(one), md.tree.leaves(two)))


def check_memory(f, args):
    before, compiled = [x.copy() for x in args], md.jit(f)
    expected = f(*args)
    first, second = compiled(*args), compiled(*args)
    same(first, expected)
    same(second, expected)
    assert all(np.array_equal(x, y) for x, y in zip(args, before, strict=True))
    expected = md.tree.map(np.copy, expected)
    assert not shared(first, args)
    assert not shared(first, second)
    for x in md.tree.leaves(first):
        if isinstance(x, np.ndarray):
            x[...] = 7.0
    same(compiled(*args), expected)


def test_results_stand_alone(every_size):
    x, c = np.ones((2, 2)), np.arange(4.0).reshape(2, 2)
    for f in (
        lambda x: x * 1.0,
        lambda x: c,
        lambda x: c.T,
        lambda x: (np.sin(x), np.sin(x)),
        lambda x: np.negative(-x),
    ):
        compiled = md.jit(f)
        expected = list(map(np.copy, md.tree.leaves(f(x))))
        for _ in range(2):
            results = md.tree.leaves(compiled(x))
            for y, e in zip(results, expected, strict=True):
                np.testing.assert_array_equal(y, e)
                y[...] = -1.0
    np.testing.assert_array_equal(x, np.ones((2, 2)))
    assert not np.shares_memory(md.jit(lambda x: x)(x), x)


def test_operands_write_over_themselves():
    source = md.jit(lambda x: np.tanh(np.sin(x) + 1), kernels=False).source(np.ones(1000))
    assert source.count("out=") == 2


def test_a_checkpointed_function_is_computed_once_more():
    def equations(f):
        tape = md.jit(md.value_and_grad(lambda x: f(x).sum())).program(np.ones(3)).tape
        return sum(str(e.primitive) == "exp" for e in tape.equations)

    def f(x):
        return np.sin(np.exp(np.exp(x)))

    assert (equations(f), equations(md.checkpoint(f))) == (2, 4)
    same(md.jit(md.grad(lambda x: md.checkpoint(f)(x).sum()))(np.ones(3)), md.grad(lambda x: f(x).sum())(np.ones(3)))


def test_a_checkpointed_function_keeps_less():
    def layer(x):
        for _ in range(6):
            x = np.sin(np.exp(-x))
        return x

    def peak(layer):
        f = md.jit(md.grad(lambda x: functools.reduce(lambda x, _: layer(x), range(6), x).sum()), kernels=False)
        x = np.ones(100_000)
        f(x)
        tracemalloc.start()
        f(x)
        size = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return size

    assert peak(md.checkpoint(layer)) < 0.6 * peak(layer)


def test_what_is_added_up_is_not_kept():
    """The parts of a sum go into memory of which there need not be more than of the sum."""
    ws, x = np.ones((12, 64, 64)) / 64, np.ones((8, 64))

    def loss(ws):
        return functools.reduce(lambda x, k: np.tanh(x @ ws[k]), range(12), x).sum()

    f = md.jit(md.grad(loss))
    same(f(ws), md.grad(loss)(ws))
    tracemalloc.start()
    f(ws)
    assert tracemalloc.get_traced_memory()[1] < 6 * ws.nbytes
    tracemalloc.stop()


# ---------------------------------------------------------------- loops and choices


def loop(x):
    return md.fori_loop(0, 3, lambda i, c: np.sin(c) * x + i, x)


def recurrence(x):
    carry, ys = md.scan(lambda c, e: (np.tanh(c * e + x), c * x), x, np.arange(4.0))
    return carry + ys.sum(0)


def choice(x):
    return md.cond(x.sum() > 0, lambda x: np.sin(x) * 2, lambda x: x * x, x)


def choices_in_a_loop(x):
    return md.scan(lambda c, e: (md.cond(e > 1, np.sin, lambda c: c * c, c), e), x, np.arange(4.0))[0]


def doubling(x):
    return md.while_loop(lambda c: c.sum() < 50, lambda c: 2 * c + 1, x)


CONTROL = [loop, recurrence, choice, choices_in_a_loop]


@pytest.mark.parametrize("f", [*CONTROL, doubling], ids=lambda f: f.__name__)
@pytest.mark.parametrize("x", [np.array([0.5, -0.2]), np.array([-0.5, 0.2])], ids=["one", "other"])
def test_control_flow(f, x):
    check_memory(f, [x])
    check_memory(lambda x: md.jvp(f, (x,), (x,)), [x])
    assert "_body(" in md.jit(f).source(x) or f in (choice,)


@pytest.mark.parametrize("f", CONTROL, ids=lambda f: f.__name__)
def test_derivatives_of_control_flow(f):
    for x in (np.array([0.5, -0.2]), np.array([-0.5, 0.2])):
        check_memory(md.grad(lambda x: f(x).sum()), [x])
        check_memory(md.grad(lambda x: md.grad(lambda x: (f(x) ** 2).sum())(x).sum()), [x])
        check_memory(lambda x, t: md.linearize(f, x)[1](t), [x, x])


# ---------------------------------------------------------------- calls


def test_a_function_is_traced_once_for_each_type():
    seen = []

    @md.jit
    def f(x, y=1.0):
        seen.append(md.typeof(x))
        return x * y

    for x in (1.0, 2.0, np.ones(2), np.zeros(2), np.ones(4)[::2], np.ones(2, ">f8")):
        np.testing.assert_array_equal(f(x), x)
    assert list(map(str, seen)) == ["f64[]", "f64[2]"]
    assert f(2.0, y=3.0) == 6.0
    assert len(seen) == 3
    assert (f(3), f(True), f(2j), f(2**63)) == (3, 1, 2j, 2**63)
    assert type(f(np.float32(2))) is np.float32


def test_trees():
    f = md.jit(lambda p, q=None: {"sum": [p["a"] + p["b"][0]], "none": None, "empty": (), "q": q})
    p = {"a": 1.0, "b": (np.ones(2),)}
    same(f(p, q=2.0), {"sum": [2 * np.ones(2)], "none": None, "empty": (), "q": np.float64(2.0)})
    assert md.jit(lambda x: ())(1.0) == ()
    assert md.jit(lambda x: (x,))(1.0) == (1.0,)
    assert md.jit(lambda: 3.0)() == 3.0
    assert md.jit(np.zeros_like)(np.ones((0, 2))).shape == (0, 2)


def test_settings():
    seen = []

    @functools.partial(md.jit, static_argnums=(1, -1))
    def f(x, n, mode):
        seen.append(n)
        return x**n if mode == "power" else x

    assert [f(3.0, 2, "power"), f(3.0, 2, "power"), f(3.0, 3, "power"), f(3.0, 3, "")] == [9.0, 9.0, 27.0, 3.0]
    assert seen == [2, 3, 3]
    with pytest.raises(TypeError, match=r"not hashable.*leave arrays out of static_argnums"):
        f(1.0, [2], "power")
    with pytest.raises(TypeError, match=r"static_argnums names argument 4 of <lambda>, which was called with 1"):
        md.jit(lambda x: x, static_argnums=4)(1.0)
    with pytest.raises(TypeError, match=r"<lambda> was called with a non-array argument.*static_argnums"):
        md.jit(lambda x: x)("power")


@dataclasses.dataclass(frozen=True)
class Frozen:
    n: object


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    n: object


class Pair(NamedTuple):
    n: object


class Written:
    def __init__(self, n):
        self.n = n

    def __eq__(self, other):
        return isinstance(other, Written) and self.n == other.n

    def __hash__(self):
        return hash(self.n)


HOLDERS = {
    "itself": (lambda n: n, lambda s: s),
    "tuple": (lambda n: (n,), lambda s: s[0]),
    "nested": (lambda n: (1, ("a", n)), lambda s: s[1][1]),
    "frozenset": (lambda n: frozenset([n]), lambda s: next(iter(s))),
    "dataclass": (Frozen, lambda s: s.n),
    "dataclass with slots": (Slotted, lambda s: s.n),
    "named tuple": (Pair, lambda s: s.n),
    "attrs": (attrs.make_class("Attrs", ["n"], frozen=True), lambda s: s.n),
    "a class of one's own": (Written, lambda s: s.n),
    "a tuple of dataclasses": (lambda n: (Frozen((n,)),), lambda s: s[0].n[0]),
}


@each("hold, read", HOLDERS.values(), HOLDERS)
@each(
    "numbers", [(1, 1.0, True, 1 + 0j, np.float32(1), np.int64(1)), (0.0, -0.0, 0, False), (0j, -0j, complex(-0.0, 0))]
)
def test_settings_that_are_equal_and_not_the_same(hold, read, numbers):
    f = md.jit(lambda x, s: x * read(s), static_argnums=1)
    leaf = md.jit(lambda p: p.x * read(p.s))
    for _ in range(2):
        for n in numbers:
            for result in (f(np.float32(0.5), hold(n)), leaf(WithSetting(np.float32(0.5), hold(n)))):
                expected = np.float32(0.5) * n
                assert (repr(result), result.dtype) == (repr(expected), expected.dtype)
    assert len(f.programs) == len(leaf.programs) == len(numbers)


@dataclasses.dataclass
class WithSetting:
    x: object
    s: object = dataclasses.field(metadata={"static": True})


def test_methods():
    class Model:
        def __init__(self, w):
            self.w = w

        @functools.partial(md.jit, static_argnums=0)
        def apply(self, x):
            return self.w * x

    assert (Model(2.0).apply(3.0), Model(3.0).apply(3.0)) == (6.0, 9.0)


def test_jit_within_other_transformations():
    seen = []

    def f(x, y):
        seen.append(1)
        return np.sin(x) * y

    g, x = md.jit(f), np.array([0.5, 2.0])
    for _ in range(2):
        same(md.grad(lambda x: g(x, x).sum())(x), md.grad(lambda x: f(x, x).sum())(x))
    seen.clear()
    md.grad(lambda x: g(x, x).sum())(x)
    assert not seen
    same(md.vmap(g)(x, x), f(x, x))
    same(md.jvp(g, (x, x), (x, x)), md.jvp(f, (x, x), (x, x)))
    same(md.jit(g)(x, x), f(x, x))
    same(md.jit(md.grad(lambda x: g(x, x).sum()))(x), md.grad(lambda x: f(x, x).sum())(x))
    same(md.scan(lambda c, e: (g(c, e), e), x, np.ones((3, 2)))[0], f(f(f(x, 1.0), 1.0), 1.0))
    same(md.hessian(lambda x: g(x, x).sum())(x), md.hessian(lambda x: f(x, x).sum())(x))


def test_closed_over_values_are_differentiated():
    assert md.grad(lambda w: md.jit(lambda x: w * x)(3.0))(2.0) == 3.0
    assert md.grad(lambda w: md.grad(lambda x: md.jit(lambda y: w * x * y)(x))(2.0))(1.0) == 4.0


# ---------------------------------------------------------------- ranks


def mapped(check_rep=True, backend="simulated"):
    mesh = make_mesh((4,), ("i",), backend=backend)

    def body(w, x):
        y = md.scan(lambda c, _: (np.tanh(c @ w), None), x, None, length=2)[0]
        return psum((y**2).sum(), "i") + psum(y.sum(), "i"), y * axis_index("i")

    specs = {"in_specs": (P(), P("i")), "out_specs": (P(), P("i"))}
    return mesh, shard_map(body, mesh=mesh, check_rep=check_rep, **specs)


@pytest.mark.parametrize("check_rep", [True, False])
def test_shard_map(check_rep):
    mesh, f = mapped(check_rep)
    w, x = np.arange(9.0).reshape(3, 3) / 9, np.ones((8, 3))
    for g in (f, md.grad(lambda w, x: f(w, x)[0], argnums=(0, 1)), md.jit(f)):
        before = Counter(mesh.calls)
        expected = g(w, x)
        eager, compiled = Counter(mesh.calls) - before, md.jit(g)
        for _ in range(2):
            before = Counter(mesh.calls)
            for a, e in zip(md.tree.leaves(compiled(w, x)), md.tree.leaves(expected), strict=True):
                agree(np.asarray(a), np.asarray(e))
            assert all(n <= eager[name] for name, n in (Counter(mesh.calls) - before).items())


def test_the_loss_that_nobody_asked_for_is_not_summed():
    mesh, f = mapped()
    w, x = np.eye(3), np.ones((8, 3))
    gradient = md.jit(md.grad(lambda w: f(w, x)[0]))
    gradient(w)
    before = Counter(mesh.calls)
    gradient(w)
    assert (Counter(mesh.calls) - before)["psum"] == 1


def test_distributed_arguments_and_results():
    _, f = mapped()
    y = f(np.eye(3), np.ones((8, 3)))[1]
    double = md.jit(lambda y: 2 * y)
    np.testing.assert_allclose(np.asarray(double(y)), 2 * np.asarray(y))
    np.testing.assert_allclose(np.asarray(double(np.asarray(y))), 2 * np.asarray(y))


@pytest.mark.parametrize("name", ["class", "lambda", "def", "None", "import", "match", "sin", "two words", ""])
def test_functions_of_any_name(name):
    f = lambda x: np.sin(x) * 2  # noqa: E731
    f.__name__ = name
    assert md.jit(f)(1.0) == 2 * np.sin(1.0)
    assert md.jit(md.checkpoint(f))(1.0) == 2 * np.sin(1.0)


def test_compile_time_is_linear_in_the_number_of_leaves():
    """Ten times the leaves take at most twenty times the work, for sums over lists, dicts and views of one array."""

    def steps(f, n):
        counted = 0

        def count(frame, event, arg):
            nonlocal counted
            counted += 1

        leaves = [np.ones(2)] * n
        sys.setprofile(count)
        try:
            md.jit(f)(leaves, dict(enumerate(leaves)))
        finally:
            sys.setprofile(None)
        return counted

    loss = lambda xs, d: sum(np.sum(x * y) for x, y in zip(xs, d.values()))  # noqa: E731
    for f in (md.grad(loss, argnums=(0, 1)), lambda xs, d: ([x * 2 for x in xs], [xs[0][k:] for k in d])):
        assert steps(f, 500) < 20 * steps(f, 50)


def test_source_is_shown_line_by_line():
    source = md.jit(lambda x: np.sin(x) * 2).source(1.0)
    assert isinstance(source, str)
    assert repr(source) == str(source) == source
    assert repr(source).splitlines()[-1] == "    return c"


@pytest.mark.parametrize("choice", [True, False])
def test_where_of_one_condition_copies_one_of_two_arrays(choice):
    def f(c, x, y):
        return np.where(c, x, y), np.where(c, x, 0.0), np.where(c, x[0], y[0]), np.where(c, x, y[0])

    x, y = np.arange(6.0).reshape(2, 3), -np.ones((2, 3))
    compiled = md.jit(f)
    assert compiled.source(choice, x, y).count(".copy()") == 2
    for condition in (choice, np.bool_(choice), np.array(choice)):
        for actual, expected in zip(compiled(condition, x, y), f(condition, x, y), strict=True):
            np.testing.assert_array_equal(actual, expected)
            assert not any(np.may_share_memory(actual, z) for z in (x, y))


class Pair(NamedTuple):
    left: object
    right: object


@dataclasses.dataclass
class Scaled:
    x: object
    by: float = dataclasses.field(default=2.0, metadata={"static": True})


def test_calls_with_trees_of_one_type_skip_everything_but_the_program():
    f = md.jit(lambda t, y: (md.tree.map(lambda x: x * 2, t), {"y": y + 1}))
    x = np.ones(3)
    trees = [[x, (2.0, None)], {"b": x, "a": [x, x]}, Pair(x, Pair({}, 1)), [[[x]]], functools.reduce(Pair, [x] * 70)]
    for t in [*trees, *trees]:
        for argument in (t, md.tree.map(lambda x: x, t)):
            out, other = f(argument, 1.0)
            assert md.tree.structure(out) == md.tree.structure(t) and other == {"y": 2.0}
            for actual, expected in zip(md.tree.leaves(out), md.tree.leaves(t), strict=True):
                np.testing.assert_array_equal(actual, np.multiply(expected, 2))
    first = md.jit(lambda t: t["a"] - t["b"])
    first({"a": 3.0, "b": 1.0})
    skipped = lambda *args: any(read(args) for read, _ in first.trees)  # noqa: E731
    assert first({"b": 1.0, "a": 3.0}) == 2.0 and skipped({"b": 5.0, "a": 3.0})
    others = [{"a": 3, "b": 1.0}, {"a": 3.0}, {"a": [3.0], "b": 1.0}, [3.0, 1.0], {"a": x, "b": 1.0}]
    assert not any(map(skipped, others)) and not skipped({"a": 3.0, "b": 1.0}, 1.0)


def test_trees_of_other_types_have_other_programs():
    by = md.jit(lambda t: t.x * t.by)
    assert [by(Scaled(3.0, n)) for n in (2.0, 2.0, 5.0, 5.0, 2.0)] == [6.0, 6.0, 15.0, 15.0, 6.0]
    total = md.jit(lambda xs: sum(x.sum() for x in xs))
    arrays = [np.ones(n, kind) for n in (1, 2, 3) for kind in ("f4", "f8", ">f8", "i8")]
    for x in [*arrays, *arrays]:  # more types than are tried one after the other
        assert total([x, x]) == 2 * x.size and total([x, x]).dtype == x.sum().dtype.newbyteorder("=")
    exact = md.jit(lambda t: t[0] * 1)
    assert exact([3]) == 3 and exact([2**63]) == 2**63 and exact([4]) == 4
    assert md.vmap(total)([np.ones((2, 3))]).shape == (2,) and md.grad(total)([np.ones(3)])[0].sum() == 3.0
