"""Programs with Python's own `if`, `while` and `for`: a table of functions, and of the arguments that they run on."""
# ruff: noqa: SIM108 (they are there for their statements)

import dataclasses

import numpy

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import psum
from spmd import P

#: Each program: the function, its examples (tuples of arguments), whether it has derivatives, and batches. Random
#: programs of `tests/minidiff/syntax/test_random_programs.py` have branches, loops and jumps in each other, too.
PROGRAMS = []


def program(*examples, smooth=False, vmap=True):
    return lambda f: PROGRAMS.append((f, examples, smooth, vmap)) or f


# ---------------------------------------------------------------- branches


@program((0.5,), (2.0,), (-1.0,), smooth=True)
def chained(x):
    return x * x if 0 < x < 1 else 3 * x


@program((1.0,), (-1.0,), smooth=True)
def pair(x):
    if x > 0:
        return x, {"a": 2 * x}
    return -x, {"a": x}


@program((1.0,), (-1.0,), smooth=True)
def closes_over(x):
    scale = 2.0

    def scaled(y):
        return scale * y

    if x > 0:
        scale = 3.0 * x
    return scaled(x)


@program((1.0,), (-1.0,))
def assigns_outside(x):
    count = 0

    def add(k):
        nonlocal count
        count += k

    if x > 0:
        add(2)
    else:
        add(1)
    return count


@program((2.0,), (-1.0,), smooth=True)
def lambdas(x):
    leaky = lambda y: y if y > 0 else 0.1 * y  # noqa: E731
    return leaky(x) * leaky(-x)


@program((2.0,), (-1.0,), smooth=True)
def comprehension(x):
    return sum([k * x if x > 0 else x / k for k in (1.0, 2.0, 3.0)])


@program((2.0, True), (2.0, False), vmap=False, smooth=True)
def static_flag(x, flag):
    if flag:
        return x**2
    return [x]


@program((1.0,), (-1.0,))
def unchanged_stays_known(x):
    n = 3
    if x > 0:
        n, x = 3, x + 1
    else:
        n = 3
    return [x] * n


@program((1.0,), (3.0,), smooth=True)
def containers(x):
    pair, state = [x, 0.0], {"x": x, "n": 0}
    if x > 2:
        pair[1] = x * 3
        state["n"] += 1
        state["x"] = state["x"] * 2
    else:
        pair[0] = 1.0
    return pair, state


@program((1.0,), (5.0,), smooth=True)
def deletes(x):
    y = x * 2
    if y > 4:
        y = y + 1
    z = y
    del y
    return z


# ---------------------------------------------------------------- while


@program((12, 18), (7, 5), (9, 9))
def gcd_by_subtraction(a, b):
    while True:
        if a == b:
            return a
        if a > b:
            a -= b
        else:
            b -= a


@program((0.5,), (3.0,), smooth=True)
def fixed_point(a):
    x, n = 1.0, 0
    while n < 30:
        new = np.cos(a * x) / 2
        done = abs(new - x) < 1e-9
        x, n = new, n + 1
        if done:
            break
    return x


@program((10,), (3,))
def walrus(n):
    total = 0
    while (n := n - 1) > 0:
        total += n
    return total


# ---------------------------------------------------------------- for over ranges


@program((2, 9), (5, 5), (9, 2))
def ranges_with_steps(a, b):
    total = 0
    for i in range(a, b, 3):
        total = total * 10 + i
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


# ---------------------------------------------------------------- for over arrays

XS = numpy.array([0.5, -1.0, 2.0, 4.0])


@program((XS, 1.0), (XS, 9.0))
def find_first(xs, limit):
    for k, x in zip(range(len(xs)), xs):
        if x > limit:
            return k
    return -1


@program((XS,), (2 * XS,), smooth=True)
def last_of_rows(xs):
    for x in xs:
        y = x**2
    return y + x


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


# ---------------------------------------------------------------- scopes, jumps and values that are rarer


@program((numpy.array([1.0, 1.5, 3.0]),), (numpy.array([1.0, 1.5, 1.0]),))
def guarded_index(xs):
    i = 0
    while i < len(xs) and xs[i] < 2:
        i += 1
    return i


@program((0.0, 2.0), (3.0, 2.0))
def values_of_and_and_or(x, y):
    return (x or y) + (x and y)


@program((1.0, 3), (2.0, 1), smooth=True)
def closures_see_the_loop_and_assign(x, n):
    scale, total = 1.0, 0.0

    def add(y):
        nonlocal total
        total = total + y * scale

    for i in range(n):
        scale = scale + 0.5
        add(x * i)
    return total


@program((1.0,), (-1.0,))
def writes_into_an_array(x):
    y = numpy.zeros(3)
    if x > 0:
        y[0] = 1.0
    return y


@program((3.0,), (0.5,))
def nested_targets(x):
    a, (b, *c) = 1.0, (2.0, 3.0, 4.0)
    while a < x:
        a, (b, *c) = a + 1, (b * 2, c[1], c[0])
    return a, b, c


@dataclasses.dataclass
class State:
    x: float
    n: int


@program((1.0,), (11.0,), smooth=True)
def dataclass_as_state(x):
    state = State(x, 0)
    while state.x < 10:
        state = State(state.x * 2, state.n + 1)
    return state.x, state.n


@program((numpy.array([1.0, -1, 1.5, 3, 1]),), (numpy.array([1.0, 4, 1.5, 1, 1]),), smooth=True)
def jumps_out_of_with(xs):
    total = 0.0
    for x in xs:
        with numpy.errstate(all="ignore"):
            if x > 3.5:
                return -total
            if x > 2:
                break
            if x < 0:
                continue
        total += x
    return total


@program((2.0, True), (-2.0, True), (2.0, False), vmap=False)
def matches(x, mode):
    match mode:
        case True:
            if x > 0:
                return x
            y = 1.0
        case _:
            y = 3.0
    return y + x


@program((1.0,), (-1.0,), smooth=True)
def finally_runs(x):
    try:
        y = x if x > 0 else 2 * x
    finally:
        z = 1
    return y + z


# ---------------------------------------------------------------- a body whose branch and loop differ between ranks


@md.autograph(max_steps=60)
def body(x, w):
    y = x.sum()
    if y > 2:
        y = y * w
    else:
        y = y + w
    n = 0
    while y < 50:
        y = y * 2
        n += 1
    return psum(y, "i"), psum(n, "i")


def total(x, w, ranks):
    y, n = 0.0, 0
    for block in numpy.split(x, ranks):
        y_block, n_block = block.sum(), 0
        y_block = y_block * w if y_block > 2 else y_block + w
        while y_block < 50:
            y_block, n_block = y_block * 2, n_block + 1
        y, n = y + y_block, n + n_block
    return y, n


def check_body(mesh):
    """Values and derivatives of the body, run and compiled, are those of a loop over blocks."""
    (ranks,) = mesh.shape.values()
    f = spmd.shard_map(body, mesh, in_specs=(P("i"), P()), out_specs=P())
    x = numpy.linspace(-1, 5, 12)
    for g in (f, md.jit(f)):
        numpy.testing.assert_allclose(g(x, 3.0), total(x, 3.0, ranks))
    slope = (total(x, 3.0 + 1e-6, ranks)[0] - total(x, 3.0 - 1e-6, ranks)[0]) / 2e-6
    for g in (md.grad, lambda h: md.jit(md.grad(h))):
        numpy.testing.assert_allclose(g(lambda w: f(x, w)[0])(3.0), slope, rtol=1e-6)
