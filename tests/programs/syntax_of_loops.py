"""Programs with Python's own `for`, over ranges and arrays: a table of functions, and of their arguments."""
# ruff: noqa: SIM108 (they are there for their statements)

import numpy

import minidiff.numpy as np
from tests.programs.syntax import table_of

PROGRAMS = []
program = table_of(PROGRAMS)


# ---------------------------------------------------------------- for over ranges


@program((2, 9), (5, 5))
def range_with_step(a, b):
    total = 0
    for i in range(a, b, 3):
        total = total * 10 + i
    return total


@program((9, 2), (5, 5), (4, 1))
def range_down(a, b):
    total = 0
    for i in range(a, b, -2):
        total = total * 10 + i
    return total


@program((6,), (3,))
def odd_sum(n):
    total = 0
    for i in range(n):
        if i % 2 == 0:
            continue
        for j in range(i):
            if j == 4:
                break
            total += j
    return total


@program((20, 0.5), (20, 3.0), smooth=True)
def range_with_break(n, x):
    for i in range(n):
        if x > 2:
            break
        x = x * 1.3 + 0.01 * i
    return x


@program((0.5,), (3.0,), smooth=True)
def known_range_with_break(x):
    for i in range(20):
        if x > 2:
            break
        x = x * 1.3 + 0.01 * i
    return x


@program((7,), (4,))
def for_else(n):
    answer = 0
    for k in range(2, 6):
        if n % k == 0:
            answer = k
            break
    else:
        answer = -1
    return answer


@program((4.0,), (0.1,), smooth=True)
def range_with_return(x):
    for i in range(10):
        x = x - 0.3
        if x < 0:
            return x * i
    return x


@program((1.0,), (-1.0,), smooth=True)
def unrolled_with_break(x):
    for k, a in enumerate([1.0, 2.0, 3.0]):
        if x > 2:
            break
        x = x + a * k
    return x


@program((1.0,), (-1.0,), smooth=True)
def dictionary_items(x):
    for name, rate in {"a": 0.5, "b": 2.0}.items():
        if name == "b":
            x = x * rate
        elif x > 0:
            x = x + rate
    return x


# ---------------------------------------------------------------- for over arrays

XS = numpy.array([0.5, -1.0, 2.0, 4.0])


@program((XS, 1.0), (XS, 9.0))
def find_first(xs, limit):
    for k, x in zip(range(len(xs)), xs):
        if x > limit:
            return k
    return -1


@program((XS, 1.0), (XS, 9.0), smooth=True)
def search(xs, limit):
    for x in xs:
        if x > limit:
            return x * 2
    return 0.0


@program((XS,), (2 * XS,), smooth=True)
def appended_rows(xs):
    ys, total = [], 0.0
    for x in xs:
        total = total + x
        if x > 0:
            y = total * 2
        else:
            y = total
        ys.append(y)
        ys.append(x)
    return np.stack(ys)


@program((XS,), (2 * XS,), smooth=True)
def last_of_rows(xs):
    for x in xs:
        y = x**2
    return y + x


@program((numpy.array([1, 3, 5, 9]), 5), (numpy.array([1, 3, 5, 9]), 4))
def binary_search(xs, x):
    low, high = 0, len(xs)
    while low < high:
        middle = (low + high) // 2
        if xs[middle] < x:
            low = middle + 1
        else:
            high = middle
    return low


@program((3.0, 2), (3.0, 9), (0.0, 3), max_steps=None)
def skips_and_returns(x, n):
    total = 0.0
    for i in range(n):
        if i % 2 == 0:
            continue
        if total > 10:
            return total
        total = total + x * i
    return total - 1


@program((numpy.array([1.0, -2.0, 3.0]),), smooth=True)
def appends_in_both_branches(xs):
    ys, zs = [], [0.5]
    for x in xs:
        ys.append(x)
        if x > 0:
            zs.append(x * 2)
            if x > 2:
                ys.append(np.sin(x))
            else:
                ys.append(x)
        else:
            zs.append(-x)
            ys.append(0.0)
    return np.stack(ys), np.stack(zs)


@program((numpy.array([[1.0, 2, -1], [3, -1, 4]]),), smooth=True)
def appends_in_an_inner_loop(m):
    ys = []
    for row in m:
        ys.append(row.sum())
        for x in row:
            if x > 0:
                x = x * 2
            ys.append(x)
    return np.stack(ys)


@program((numpy.array([1.0, -2.0, 3.0]),), smooth=True)
def appends_in_a_nested_function(xs):
    ys = []

    def push(x):
        ys.append(x * 2)

    for x in xs:
        push(x)
    return np.stack(ys)
