"""Write `shape_derivatives.txt`: derivatives of distribution functions in their shapes, by mpmath.

`python -m tests.minidiff.scipy.make_shape_derivatives` needs mpmath 1.4 and nothing else. They are differences, in 80
digits, of series of positive terms. A row has a function's name, its arguments, the order in each, and the derivative.
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


def derivative(f, args, orders):
    """The derivative by differences, one operand after the other."""
    for i, n in enumerate(orders):
        for _ in range(n):
            f = functools.partial(difference, f, i)
    return f(*map(mp.mpf, args))


def difference(f, i, *xs):
    h = xs[i] * STEP
    up, down = ([*xs[:i], xs[i] + d, *xs[i + 1 :]] for d in (h, -h))
    return (f(*up) - f(*down)) / (2 * h)


GAMMA = [(a, x) for a in (1e-9, 1e-3, 0.5, 1.0, 3.5, 200.0) for x in (1e-20, 1e-3, 0.5, 1.0, 4.0, 60.0)]
GAMMA += [(a, a + k * a**0.5) for a in (200.0, 1e5) for k in (-6, -1, 0.3, 2, 7)]
SHAPES = [
    (1e-3, 1e-3),
    (1e-6, 0.3),
    (1e-3, 7.0),
    (0.5, 0.5),
    (1.0, 4.0),
    (300.0, 7.0),
    (0.3, 1e3),
    (1e3, 1e3),
    (1e3, 2.5),
]
BETA = [(a, b, x) for a, b in SHAPES for x in (1e-20, 1e-3, 0.3, 0.5, 0.99, 1 - 1e-9)]
BETA += [(1e3, 1e3, 0.5 + k * 0.011) for k in (-5, -1, 0.2, 3)]
BETA += [(1e3, 2.5, 1 - k * 1e-3) for k in (0.1, 1, 5)]
T = [(df, t) for df in (1e-2, 0.5, 1.0, 4.0, 100.0, 1e5) for t in (-1e5, -30.0, -1.7, -1e-9, 0.3, 1.5, 6.0)]
SECOND = {"gammainc": ("20", "11"), "betainc": ("200", "110", "020", "101"), "stdtr": ("20", "11")}
CASES = {
    "gammainc": (gammainc, ("10",), GAMMA),
    "betainc": (betainc, ("100", "010"), BETA),
    "stdtr": (stdtr, ("10",), T),
}


def main():  # two minutes
    mp.mp.dps = 90
    with pathlib.Path(__file__).with_name("shape_derivatives.txt").open("w", 1) as file:
        for name, (f, firsts, points) in CASES.items():
            for order, args in [(o, p) for o in firsts for p in points] + [
                (o, p) for o in SECOND[name] for p in points[::4]
            ]:
                value = derivative(f, args, map(int, order))
                if abs(value) > 1e-40:  # where 90 digits suffice
                    print(name, ",".join(map(repr, args)), order, mp.nstr(value, 17), sep=";", file=file)


if __name__ == "__main__":
    main()
