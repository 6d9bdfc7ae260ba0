"""Renew `shape_derivatives.txt`: derivatives of distribution functions in their shapes, by mpmath.

`python -m tests.minidiff.scipy.make_shape_derivatives` needs mpmath 1.4 and nothing else. They are differences, in 90
digits, of series of positive terms. A row has a function's name, its arguments, the order in each, and the derivative;
those below 1e-40, where these digits do not suffice, are left out. To add a point, write the first three into a line.
"""

import functools
import pathlib

import mpmath as mp

STEP = mp.mpf(10) ** -18


def series(ratio):
    """The sum of products of ratio(1), ..., ratio(k) over all k."""
    term = total = mp.mpf(1)
    for k in range(1, 10**6):
        term *= ratio(k)
        total += term
        if term < total * mp.mpf(10) ** -85:
            return total
    raise ValueError


def gammainc(a, x):
    return mp.exp(a * mp.log(x) - x - mp.loggamma(a + 1)) * series(lambda k: x / (a + k))


def betainc(a, b, x):
    if x > (a + 1) / (a + b + 2):
        return 1 - betainc(b, a, 1 - x)
    power = a * mp.log(x) + b * mp.log(1 - x) + mp.loggamma(a + b) - mp.loggamma(a + 1) - mp.loggamma(b)
    return mp.exp(power) * series(lambda k: x * (a + b + k - 1) / (a + k))


def stdtr(df, t):
    half = betainc(df / 2, mp.mpf(1) / 2, df / (df + t * t)) / 2
    return half if t < 0 else 1 - half


def difference(f, i, *xs):
    h = xs[i] * STEP
    up, down = ([*xs[:i], xs[i] + d, *xs[i + 1 :]] for d in (h, -h))
    return (f(*up) - f(*down)) / (2 * h)


def with_value(name, inputs, order):
    """The line of a derivative, by differences in one operand after the other."""
    f = {"gammainc": gammainc, "betainc": betainc, "stdtr": stdtr}[name]
    for i, n in enumerate(map(int, order)):
        for _ in range(n):
            f = functools.partial(difference, f, i)
    return ";".join([name, inputs, order, mp.nstr(f(*[mp.mpf(float(x)) for x in inputs.split(",")]), 17)])


def main():  # two minutes
    mp.mp.dps = 90
    path = pathlib.Path(__file__).with_name("shape_derivatives.txt")
    lines = [with_value(*line.split(";")[:3]) for line in path.read_text().splitlines()]
    path.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
