"""Every operation: its values, derivatives, batching, types and transposes, all driven from one table."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import minidiff as md
from minidiff.checks.testing import check_grads
from minidiff.core.tracer import NUMPY_FUNCTIONS
from minidiff.core.types import Var
from minidiff.ops import declare_all, slices
from minidiff.ops.base import convert
from tests.checks.aliasing import arrays, check_apart, check_as_numpys
from tests.checks.as_numpy import agree, inner, random_like
from tests.checks.properties import shows
from tests.checks.samples import check_each, each
from tests.table import CONCRETE, DISCRETE, LINEAR, TABLE
from tests.table.rows import Row

#: They answer at once, from the type: nothing is traced.
STATIC = {np.shape: (2, 3), np.ndim: 2, np.size: 6}
STATIC |= {np.result_type: np.dtype(float), np.min_scalar_type: np.dtype(float), np.common_type: np.float64}

ROWS: dict[Any, list[Row]] = {}
for _row in TABLE:
    ROWS.setdefault(_row.function, []).append(_row)

#: One case of pytest for an operation, with all its rows.
OPERATIONS = pytest.mark.parametrize("rows", list(ROWS.values()), ids=[rows[0].name for rows in ROWS.values()])


def check_rows(rows: list[Row], checks_of: Callable[[Row], list[Callable]]) -> None:
    """Run the checks that hold for a row, for every row."""
    check_each(
        (f"{check.__name__} of {row.key}", functools.partial(check, row)) for row in rows for check in checks_of(row)
    )


#: As they are before doctests add some, and without those of other tests.
declare_all()
FUNCTIONS = frozenset(f for f in NUMPY_FUNCTIONS if not (getattr(f, "__module__", "") or "").startswith("tests."))


def test_the_table_has_every_function():
    assert FUNCTIONS - {r.function for r in TABLE} - set(STATIC) == CONCRETE
    assert {*slices.__all__} <= {r.function for r in TABLE} & {*md.__all__}


@pytest.mark.parametrize("function", STATIC, ids=lambda f: f.__name__)
def test_static_functions_answer_from_the_type(function):
    tape = md.make_tape(lambda x: x if function(x) == STATIC[function] else -x)(np.ones((2, 3)))
    assert not tape.equations


@shows("derivatives")
def check_derivatives(row):
    check_grads(*row.closed(), order=1)


@shows("derivatives")
def check_second_derivatives(row):
    check_grads(*row.closed())


def check_result(actual: Any, expected: Any, args: list) -> None:
    assert md.typeof(actual) == md.typeof(expected)
    agree(actual, expected)
    check_as_numpys(actual, expected, args)


@shows("reference", "types", "memory")
def check_values_and_memory(row: Row, order: str = "C") -> None:
    """Return the results of `jvp`, `vjp` and the tape of a row of the table, for arrays in this memory order."""
    f, args = row.closed()
    args = [np.array(x, order=order) if isinstance(x, np.ndarray) else x for x in args]
    expected = f(*args)
    check_as_numpys(md.make_tape(f)(*args)(*args), md.tree.leaves(expected), args)
    tangents = [np.ones_like(x) for x in args]
    value, tangent = md.jvp(f, args, tangents)
    check_result(value, expected, args)
    check_apart(tangent, value, args, tangents)
    value, pullback = md.vjp(f, *args)
    check_result(value, expected, args)
    ct = md.tree.map(np.ones_like, value)
    first = pullback(ct)
    check_apart(first, value, args, ct)
    copies = [np.copy(x) for x in md.tree.leaves(first)]
    for x in arrays([first, value, args]):  # whatever is written into what the caller has, the pullback stays
        if x.flags.writeable:
            x[...] = 7
    for x, e in zip(md.tree.leaves(pullback(ct)), copies, strict=True):
        np.testing.assert_allclose(x, e, rtol=1e-10, atol=1e-12)  # SciPy's logm draws random vectors


@shows("reference")
def check_is_scipys(row):
    """Functions that have a counterpart in SciPy have its values, too."""
    if callable(row.function) and (getattr(row.f.func, "__module__", None) or "").startswith("minidiff."):
        agree(row.f(*row.args), row.function(*row.args, **row.f.keywords))


def check_no_derivative(row):
    f, args = row.closed()
    value, pullback = md.vjp(f, *args)
    assert value.dtype.kind in "bi"
    assert all(not np.any(ct) for ct in pullback(value))


@shows("reference")
def check_lists_are_arrays(row):
    """In reverse mode, operands given as lists count as the arrays that NumPy makes of them."""
    for i, x in ((i, row.args[i]) for i in row.active if len(row.args) > 1):
        lists = [y.tolist() if isinstance(y, np.ndarray) and y.size else y for y in row.args]
        try:
            row.f(*lists[:i], x, *lists[i + 1 :])
        except (AttributeError, IndexError, TypeError, ValueError):
            continue  # NumPy takes no list there

        def gradient(others, i=i, x=x):
            value, pullback = md.vjp(lambda x: row.f(*others[:i], x, *others[i + 1 :]), x)
            return pullback(md.tree.map(np.ones_like, value))[0]

        try:
            expected = gradient(row.args)
        except TypeError:
            continue  # that other operand cannot be traced alone
        agree(gradient(lists), expected)


@shows("types")
def check_float32_stays(row):
    f, args = row.closed()
    args = [np.asarray(x, np.complex64 if np.iscomplexobj(x) else np.float32)[()] for x in args]
    dtype = f(*args).dtype  # float64 only if a float64 takes part that is no Python number, as NumPy has it
    value, tangent = md.jvp(f, args, args)
    assert (value.dtype, tangent.dtype) == (dtype, dtype)
    _, pullback = md.vjp(f, *args)
    assert [ct.dtype for ct in pullback(tangent)] == [x.dtype for x in args]


def check_what_shares_memory_says_so(tape: Any, args: list) -> None:
    """The compiler writes into memory that is not shared: an operation that shares its operand's must be known to."""
    env = dict(zip(tape.inputs, map(np.asarray, args), strict=True))
    for eqn in tape.equations:
        if eqn.primitive.is_higher_order:
            return
        operands = [env.get(a, a) if isinstance(a, Var) else a for a in eqn.inputs]
        out = eqn.primitive.impl(*operands, **eqn.params)
        outs = out if eqn.primitive.multiple_results else [out]
        env.update(zip(eqn.outputs, outs, strict=True))
        if not eqn.primitive.shares_memory:
            taken = [x for x in operands if isinstance(x, np.ndarray)]
            assert not any(np.shares_memory(x, y) for x, y in itertools.product(taken, outs)), eqn.primitive
            assert all(y.flags.writeable for y in outs if isinstance(y, np.ndarray)), eqn.primitive


@shows("modes", "types")
def check_tape(row):
    tape = md.make_tape(row.f)(*row.args)
    tape.check()
    expected = row.f(*row.args)
    assert tape.out_types == [md.typeof(expected)]
    agree(tape(*row.args)[0], expected)
    check_what_shares_memory_says_so(tape, row.args)


@shows("modes", "types")
def check_tape_of_derivatives(row):
    f, args = row.closed()
    ct = random_like(f(*args))

    def derivatives(*xs):
        return md.jvp(f, xs, args)[1], md.vjp(f, *xs)[1](ct)

    tape = md.make_tape(derivatives)(*args)
    tape.check()
    for actual, expected in zip(tape(*args), md.tree.leaves(derivatives(*args)), strict=True):
        agree(actual, expected)


def batched(x: Any) -> np.ndarray:
    """Two arguments like x: x itself, and other numbers, for indices valid ones."""
    x = np.asarray(x)
    return np.stack([x, x * 0.9 if x.dtype.kind in "fc" else np.roll(x, 1)])


def check_vmap(f: Callable, args: list, mapped: tuple[bool, ...], axis: int = 0) -> None:
    args = [batched(x) if b else x for x, b in zip(args, mapped)]
    expected = np.stack([f(*[x[i] if b else x for x, b in zip(args, mapped)]) for i in range(2)])
    args = [np.moveaxis(x, 0, axis) if b else x for x, b in zip(args, mapped)]
    actual = md.vmap(f, in_axes=tuple(axis if b else None for b in mapped), out_axes=axis)(*args)
    agree(actual, np.moveaxis(expected, 0, axis))
    check_apart(actual, args)


@shows("modes")
def check_vmap_of_row(row):
    tape = md.make_tape(row.f)(*row.args)  # its operations take plain arrays beside batched ones, wherever they stand
    for mapped in itertools.product([True, False], repeat=len(row.args)):
        if any(mapped):
            check_vmap(lambda *xs: tape(*xs)[0], row.args, mapped)
    check_vmap(row.f, row.args, (True,) * len(row.args), axis=-1)


@shows("modes")
def check_vmap_of_derivatives(row):
    f, args = row.closed()
    for i, x in enumerate(args):

        def derivatives(x, i=i):
            xs = [*args[:i], x, *args[i + 1 :]]
            tangent = md.jvp(f, xs, args)[1]
            return np.concatenate([np.ravel(y) for y in (tangent, *md.vjp(f, *xs)[1](tangent))])

        check_vmap(derivatives, [x], (True,))


@shows("adjoint")
def check_transposes(row):
    for group in LINEAR[row.function] or [tuple(range(len(row.args)))]:
        group = [i for i in group if i in row.active]

        def f(*xs, group=group):
            at = dict(zip(group, xs))
            return row.f(*[at.get(i, x) for i, x in enumerate(row.args)])

        xs = [np.asarray(row.args[i]) for i in group]
        y = random_like(f(*xs))
        cts = md.linear_transpose(f, *xs)(y)
        assert [md.typeof(ct) for ct in cts] == [md.typeof(x) for x in xs]
        np.testing.assert_allclose(inner(cts, xs), inner([f(*xs)], [y]), rtol=1e-10, atol=1e-10)


CHECKS = [check_values_and_memory, check_is_scipys, check_tape, check_vmap_of_row]
OF_RANKS = [check_lists_are_arrays, check_float32_stays, check_tape_of_derivatives, check_vmap_of_derivatives]
DIFFERENTIABLE = [check_derivatives, check_second_derivatives, *OF_RANKS]


def checks_of(row: Row) -> list[Callable]:
    """The checks that hold for a row."""
    derivatives = [check_no_derivative] if row.function in DISCRETE else DIFFERENTIABLE
    return CHECKS + derivatives + [check_transposes] * (row.function in LINEAR)


def is_linear(row: Row) -> bool:
    return row.function in LINEAR and LINEAR[row.function] is None


def new_checks() -> Callable[[Row], list[Callable]]:
    """Return `checks_of`, without those that would see operations that they have seen in rows before."""
    seen: set = set()

    def checks(row: Row) -> list[Callable]:
        tape = md.make_tape(row.f)(*row.args)
        kinds = *(e.primitive.name for e in tape.equations), *(np.asarray(x).dtype.kind for x in row.args)
        ranks = (*kinds, *map(np.ndim, row.args))
        repeated = [check_second_derivatives if kinds in seen or is_linear(row) else check_derivatives]
        repeated += OF_RANKS * (ranks in seen)
        seen.update((kinds, ranks))
        return [check for check in checks_of(row) if check not in repeated]

    return checks


@OPERATIONS
def test_operation(rows):
    check_rows(rows, new_checks())


@each("number", [True, 1, 1.0, 1j])
@each("dtype", [int, float, np.float32, complex])
def test_python_numbers_are_converted(number, dtype):
    assert convert(number, dtype).dtype == dtype
