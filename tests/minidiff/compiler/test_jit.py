"""jit: the same results as without, for every operation, setting and tree; `traces.md` shows when it traces."""

import dataclasses
import functools
from typing import NamedTuple

import attrs
import numpy as np

import minidiff as md
from tests.checks.aliasing import check_apart
from tests.checks.as_numpy import agree, random_like
from tests.checks.meanings import check_meaning
from tests.checks.samples import check_each, each
from tests.minidiff.ops.test_ops import OPERATIONS
from tests.table import DISCRETE


def same(actual, expected):
    for a, e in zip(md.tree.leaves(actual), md.tree.leaves(expected), strict=True):
        assert md.typeof(a) == md.typeof(e)
        agree(a, e)


# ---------------------------------------------------------------- every operation


def check_row(row, forward):
    """Compiled, a function and its derivatives are the same, and arguments stay as they are."""
    f, args = row.closed()
    ct = random_like(f(*args))
    if row.function in DISCRETE:
        everything = lambda args, xs: row.f(*args)  # noqa: E731
    else:
        tangents = lambda xs: md.jvp(f, xs, args) if forward else ()  # noqa: E731
        everything = lambda args, xs: (row.f(*args), tangents(xs), md.vjp(f, *xs)[1](ct))  # noqa: E731
    inputs = [*row.args], [np.copy(x) for x in args]
    compiled, expected = md.jit(everything), everything(*inputs)
    results = [compiled(*inputs) for _ in range(2)]
    for out in results:
        same(out, expected)
    check_apart(results, inputs)
    assert all(np.array_equal(x, y, equal_nan=True) for x, y in zip(inputs[1], args, strict=True))


@OPERATIONS
def test_operation(rows):
    check_each((row.key, functools.partial(check_row, row, row is rows[0])) for row in rows)


@each("choice", [True, False])
def test_where_of_one_condition_copies_one_of_two_arrays(choice):
    f = lambda c, x, y: (np.where(c, x, y), np.where(c, x, 0.0), np.where(c, x[0], y[0]), np.where(c, x, y[0]))  # noqa: E731
    x, y = np.arange(6.0).reshape(2, 3), -np.ones((2, 3))
    compiled = md.jit(f)
    assert compiled.source(choice, x, y).count(".copy()") == 2
    for condition in (choice, np.bool_(choice), np.array(choice)):
        same(compiled(condition, x, y), f(condition, x, y))
        check_apart(compiled(condition, x, y)[1:], x, y)


def test_a_checkpointed_function_is_computed_once_more():
    f = lambda x: np.sin(np.exp(np.exp(x))).sum()  # noqa: E731
    for g, count in ((f, 2), (md.checkpoint(f), 4)):
        tape = md.jit(md.value_and_grad(lambda x, g=g: g(x))).program(np.ones(3)).tape
        assert sum(str(e.primitive) == "exp" for e in tape.equations) == count


# ---------------------------------------------------------------- settings, and calls in transformations


def test_a_jitted_function_reads_traced_values_anew_in_each_call():
    held = []
    product = md.jit(lambda x: (x * held[-1] * np.arange(3.0)).sum())
    gradient = md.grad(lambda w: held.append(w) or product(w))
    assert [gradient(w) for w in (1.0, 2.0)] == [6.0, 12.0]


class Pair(NamedTuple):
    left: object
    right: object = None


class Written:
    def __init__(self, n):
        self.n = n

    def __eq__(self, other):
        return isinstance(other, Written) and self.n == other.n

    def __hash__(self):
        return hash(self.n)


Frozen = dataclasses.make_dataclass("Frozen", ["n"], frozen=True)
Slotted = dataclasses.make_dataclass("Slotted", ["n"], frozen=True, slots=True)


@dataclasses.dataclass
class Scaled:
    x: object
    by: object = dataclasses.field(default=2.0, metadata={"static": True})


#: Settings that hold a number, and functions that read it.
HOLDERS = [
    (lambda n: n, lambda s: s),
    (lambda n: (n,), lambda s: s[0]),
    (lambda n: (1, ("a", n)), lambda s: s[1][1]),
    (lambda n: frozenset([n]), lambda s: next(iter(s))),
    *((holder, lambda s: s.n) for holder in (Frozen, Slotted, attrs.make_class("Attrs", ["n"], frozen=True), Written)),
    (Pair, lambda s: s.left),
    (lambda n: (Frozen((n,)),), lambda s: s[0].n[0]),
]


@each("hold, read", HOLDERS)
@each(
    "numbers", [(1, 1.0, True, 1 + 0j, np.float32(1), np.int64(1)), (0.0, -0.0, 0, False), (0j, -0j, complex(-0.0, 0))]
)
def test_settings_that_are_equal_and_not_the_same(hold, read, numbers):
    f = md.jit(lambda x, s: x * read(s), static_argnums=1)
    leaf = md.jit(lambda p: p.x * read(p.by))
    for n in numbers * 2:
        for result in (f(np.float32(0.5), hold(n)), leaf(Scaled(np.float32(0.5), hold(n)))):
            expected = np.float32(0.5) * n
            assert (repr(result), result.dtype) == (repr(expected), expected.dtype)
    assert len(f.programs) == len(leaf.programs) == len(numbers)


def test_jit_within_other_transformations():
    """Also a second time, when nothing is traced any more."""
    calls, args, f = [], (np.array([0.5, 2.0]), np.array([1.5, -0.3])), lambda x, y: np.sin(x) * y
    jitted = md.jit(lambda x, y: calls.append(1) or f(x, y))
    for _ in range(2):
        del calls[:]
        check_meaning(jitted, f, args)
        check_meaning(lambda x, y: md.scan(lambda c, e: (jitted(c, e), e), x, y[None])[0], f, args)
    assert not calls


# ---------------------------------------------------------------- many leaves, and trees of other types


def test_trees_of_every_type():
    f, x = md.jit(lambda t, y: (md.tree.map(lambda x: x * 2, t), {"y": y + 1})), np.ones(3)
    trees = [[x, (2.0, None)], {"b": x, "a": [x, x]}, Pair(x, Pair({}, 1)), [[[x]]], functools.reduce(Pair, [x] * 70)]
    for t in [*trees, *trees]:
        for argument in (t, md.tree.map(lambda x: x, t)):
            out, other = f(argument, 1.0)
            assert md.tree.structure(out) == md.tree.structure(t) and other == {"y": 2.0}
            for actual, expected in zip(md.tree.leaves(out), md.tree.leaves(t), strict=True):
                np.testing.assert_array_equal(actual, np.multiply(expected, 2))


def test_calls_with_trees_of_one_type_skip_everything_but_the_program():
    first = md.jit(lambda t: t["a"] - t["b"])
    first({"a": 3.0, "b": 1.0})
    skipped = lambda *args: any(read(args) for read, _ in first.trees)  # noqa: E731
    assert first({"b": 1.0, "a": 3.0}) == 2.0 and skipped({"b": 5.0, "a": 3.0})
    others = [{"a": 3, "b": 1.0}, {"a": 3.0}, {"a": [3.0], "b": 1.0}, [3.0, 1.0], {"a": np.ones(3), "b": 1.0}]
    assert not any(map(skipped, others)) and not skipped({"a": 3.0, "b": 1.0}, 1.0)
