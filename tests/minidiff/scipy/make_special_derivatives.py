"""Write `special_derivatives.txt`: derivatives of special functions, by mpmath in 40 digits.

`python -m tests.minidiff.scipy.make_special_derivatives` needs mpmath 1.4 and nothing else. A row has the name of a
function of `scipy.special`, its arguments, the order of the derivative in each argument, the derivative, and its
condition: the sum of |x_j| times the next derivative in x_j, by which it would change if all arguments changed by their
size. The test takes its tolerance from it.
"""

import itertools
import pathlib

import mpmath as mp

DIGITS = 40
oo = mp.inf


def _expi(x):
    return mp.ei(x)


def _spence(x):
    return mp.polylog(2, 1 - x).real


def _normal(x):
    return mp.erfc(-x / mp.sqrt(2)) / 2


def _betainc(a, b, x):
    return mp.betainc(a, b, 0, x, regularized=True)


def _stdtr(df, t):
    half = mp.betainc(df / 2, mp.mpf(1) / 2, 0, df / (df + t * t), regularized=True) / 2
    return half if t < 0 else 1 - half


def _gammaln(x):
    return mp.log(abs(mp.gamma(x)))


def _w(z):
    return mp.lambertw(mp.exp(z)).real if z < 500 else mp.findroot(lambda w: w + mp.log(w) - z, z - mp.log(z))


#: Functions of mpmath, the positions of arguments with derivatives, and the interval of the last argument; at its ends
#: derivatives are one-sided.
FUNCTIONS = {
    "gamma": (mp.gamma, (0,), (-oo, oo)),
    "gammaln": (_gammaln, (0,), (-oo, oo)),
    "rgamma": (mp.rgamma, (0,), (-oo, oo)),
    "psi": (mp.digamma, (0,), (-oo, oo)),
    "polygamma": (lambda n, x: mp.psi(int(n), x), (1,), (-oo, oo)),
    "zeta": (lambda s, q: mp.zeta(s, q), (1,), (0, oo)),
    "poch": (lambda z, m: mp.gammaprod([z + m], [z]), (0, 1), (-oo, oo)),
    "binom": (lambda n, k: mp.gammaprod([n + 1], [k + 1, n - k + 1]), (0, 1), (-oo, oo)),
    "beta": (lambda a, b: mp.gammaprod([a, b], [a + b]), (0, 1), (-oo, oo)),
    "betaln": (lambda a, b: mp.log(abs(mp.gammaprod([a, b], [a + b]))), (0, 1), (-oo, oo)),
    "betainc": (_betainc, (2,), (0, 1)),
    "gammainc": (lambda a, x: mp.gammainc(a, 0, x, regularized=True), (1,), (0, oo)),
    "gammaincc": (lambda a, x: mp.gammainc(a, x, regularized=True), (1,), (0, oo)),
    "erf": (mp.erf, (0,), (-oo, oo)),
    "erfc": (mp.erfc, (0,), (-oo, oo)),
    "erfcx": (lambda x: mp.exp(x * x) * mp.erfc(x), (0,), (-oo, oo)),
    "erfi": (mp.erfi, (0,), (-oo, oo)),
    "erfinv": (mp.erfinv, (0,), (-1, 1)),
    "dawsn": (lambda x: mp.sqrt(mp.pi) / 2 * mp.exp(-x * x) * mp.erfi(x), (0,), (-oo, oo)),
    "ndtr": (_normal, (0,), (-oo, oo)),
    "log_ndtr": (lambda x: mp.log(_normal(x)), (0,), (-oo, oo)),
    "ndtri": (lambda p: mp.sqrt(2) * mp.erfinv(2 * p - 1), (0,), (0, 1)),
    "stdtr": (_stdtr, (1,), (-oo, oo)),
    "expit": (lambda x: 1 / (1 + mp.exp(-x)), (0,), (-oo, oo)),
    "log_expit": (lambda x: -mp.log1p(mp.exp(-x)), (0,), (-oo, oo)),
    "logit": (lambda p: mp.log(p / (1 - p)), (0,), (0, 1)),
    "xlogy": (lambda x, y: x * mp.log(y) if x else mp.mpf(0), (0, 1), (0, oo)),
    "xlog1py": (lambda x, y: x * mp.log1p(y) if x else mp.mpf(0), (0, 1), (-1, oo)),
    "entr": (lambda x: -x * mp.log(x), (0,), (0, oo)),
    "rel_entr": (lambda x, y: x * mp.log(x / y), (0, 1), (0, oo)),
    "kl_div": (lambda x, y: x * mp.log(x / y) - x + y, (0, 1), (0, oo)),
    "exp10": (lambda x: mp.mpf(10) ** x, (0,), (-oo, oo)),
    "exp2": (lambda x: mp.mpf(2) ** x, (0,), (-oo, oo)),
    "cosm1": (lambda x: mp.cos(x) - 1, (0,), (-oo, oo)),
    "expm1": (mp.expm1, (0,), (-oo, oo)),
    "log1p": (mp.log1p, (0,), (-1, oo)),
    "cbrt": (lambda x: mp.sign(x) * abs(x) ** (mp.mpf(1) / 3), (0,), (-oo, oo)),
    **{
        f"{f}{n}": (lambda x, f=f, n=n: getattr(mp, f"bessel{f}")(n, x), (0,), i)
        for f, i in (("j", (-oo, oo)), ("y", (0, oo)), ("i", (-oo, oo)), ("k", (0, oo)))
        for n in (0, 1)
    },
    **{f"i{n}e": (lambda x, n=n: mp.besseli(n, x) * mp.exp(-abs(x)), (0,), (-oo, oo)) for n in (0, 1)},
    **{f"k{n}e": (lambda x, n=n: mp.besselk(n, x) * mp.exp(x), (0,), (0, oo)) for n in (0, 1)},
    **{f"{f}v": (lambda v, x, f=f: getattr(mp, f"bessel{f}")(v, x), (1,), (0, oo)) for f in "jyik"},
    "ive": (lambda v, x: mp.besseli(v, x) * mp.exp(-abs(x)), (1,), (0, oo)),
    "kve": (lambda v, x: mp.besselk(v, x) * mp.exp(x), (1,), (0, oo)),
    "exp1": (mp.e1, (0,), (0, oo)),
    "expi": (_expi, (0,), (-oo, oo)),
    "expn": (mp.expint, (1,), (0, oo)),
    "spence": (_spence, (0,), (0, oo)),
    "ellipe": (lambda m: mp.ellipe(m).real, (0,), (-oo, 1)),
    "ellipk": (lambda m: mp.ellipk(m).real, (0,), (-oo, 1)),
    "hyp0f1": (mp.hyp0f1, (1,), (-oo, oo)),
    "hyp1f1": (mp.hyp1f1, (2,), (-oo, oo)),
    "hyp2f1": (lambda a, b, c, z: mp.hyp2f1(a, b, c, z).real, (3,), (-oo, 1)),
    "wrightomega": (_w, (0,), (-oo, oo)),
}

WHOLE = (-300.5, -20.25, -2.5, -1e-3, -1e-9, 0.0, 1e-30, 1e-9, 0.3, 1.0, 4.0, 30.0, 1e3)
POSITIVE = (1e-30, 1e-9, 0.01, 0.5, 1.0, 2.5, 8.0, 40.0, 600.0)
LARGE = (1e5, 1e10)
GAMMA = (-170.5, -20.5, -2.9999, -0.5, 1e-9, 0.5, 1.0, 1.4616321449683623, 2.0, 25.0)
UNIT = (1e-30, 1e-12, 0.02, 0.3, 0.5, 0.75, 1 - 1e-6, 1 - 2.0**-52)
NEAR_M = (-1e15, -1e6, -30.0, -1.0, -0.499, -0.1, -1e-4, -1e-8, 0.0, 1e-30, 1e-16, 1e-12, 1e-8, 1e-3, 0.3, 0.5, 0.9)


def orders(vs, xs):
    return (*itertools.product(vs, xs),)


#: Points of each function: numbers, or tuples of arguments.
POINTS = {
    "gamma": GAMMA,
    "gammaln": (*GAMMA, *LARGE, 1e20),
    "rgamma": (*GAMMA, 0.0, -1.0, -2.0, -3.0, -10.0, -30.0, -1 + 1e-9, -4 - 1e-5, -150.3, 1e-30),
    "psi": (*GAMMA, -1e4 - 0.5, *LARGE),
    "polygamma": [*orders((0, 1, 3), (-5.3, -0.5, 1e-9, 0.5, 3.0, 1e5, 1e10))],
    "zeta": [*orders((2.0, 3.5), (1e-9, 0.5, 3.0, 1e5))],
    "poch": [
        (0.5, 2.5),
        (3.0, 1e-9),
        (1e10, 1.0),
        (1e5, 2.5),
        (1e10, -1.5),
        (-2.0, 5.0),
        (-2.5, 1.25),
        (-2.0, 0.3),
        (-2 + 1e-9, 0.3),
        (0.0, 2.5),
        (-30.3, 0.6),
        (2.0, 0.0),
        (1e-30, 1.5),
        (150.5, 3.0),
    ],
    "binom": [
        (5.0, 20.0),
        (5.0, 6.0),
        (5.0, -1.0),
        (5.0, -4.0),
        (5.5, 2.0),
        (5.0, 2.0),
        (0.0, 0.0),
        (0.0, 3.0),
        (1e10, 2.0),
        (1e6, 3.0),
        (30.0, 15.0),
        (-2.5, 3.0),
        (-2.5, 0.3),
        (5.0, 6 + 1e-9),
        (0.5, 7.5),
        (40.0, 75.0),
    ],
    "beta": [
        (0.01, 2.0),
        (0.5, 0.5),
        (2.0, 3.0),
        (1e5, 2.0),
        (1e10, 1.5),
        (-0.5, 0.5),
        (-1.25, -0.75),
        (-2.75, 0.75),
        (-2.5, 1.5),
        (-2.5, 0.5 + 1e-9),
        (-0.3, 2.6),
        (0.5, 1e5),
        (-30.2, 25.7),
    ],
    "betaln": [
        (1e-30, 2.0),
        (0.5, 0.5),
        (2.0, 3.0),
        (1e5, 2.0),
        (1e10, 1.5),
        (1e12, 1e-3),
        (1e10, 1e10),
        (-0.3, 2.6),
        (-7.3, -0.4),
        (1e-9, 1e9),
        (300.0, 1e-9),
    ],
    "betainc": [
        (a, b, x)
        for a, b in ((1.0, 1.0), (2.0, 3.0), (3.0, 1.0), (0.5, 0.5), (50.0, 1.5), (1.0, 4.0), (2.5, 2.0))
        for x in (0.0, 1e-9, 0.3, 0.9, 1.0)
    ],
    **dict.fromkeys(
        ("gammainc", "gammaincc"),
        (
            *orders((0.5, 1.0, 2.0, 3.5, 40.0), (1e-9, 0.5, 5.0, 60.0, 300.0)),
            *orders((1.0, 2.0, 3.0, 4.5), (0.0,)),
        ),
    ),
    **dict.fromkeys(("erf", "erfc"), (-20.0, -5.0, -1e-9, 0.0, 1e-30, 0.3, 3.0, 20.0)),
    "erfcx": (-20.0, -3.0, -1e-9, 0.0, 0.3, 1.0, 3.0, 6.4, 6.6, 30.0, 1e3, 1e5, 1e10),
    "erfi": (-20.0, -1e-9, 0.0, 0.3, 3.0),
    "erfinv": (-1 + 1e-9, -0.5, -1e-9, 0.0, 1e-30, 0.3, 0.99),
    "dawsn": (-1e5, -8.0, -0.3, 0.0, 1e-9, 0.5, 2.0, 6.4, 6.6, 30.0, 1e3, 1e10),
    "ndtr": (-37.0, -8.0, -1e-9, 0.0, 1.0, 30.0),
    "log_ndtr": (-1e10, -1e5, -1e3, -40.0, -8.0, -1.0, 0.0, 1e-9, 1.0, 4.9, 5.1, 12.0, 30.0),
    "ndtri": (1e-30, 1e-12, 0.02, 0.3, 0.5, 0.75, 1 - 1e-6),
    "stdtr": [*orders((0.5, 1.0, 4.0, 100.0), (-1e5, -30.0, -1.5, 1e-9, 1.0, 3.0, 300.0)), (1e6, -1.5), (1e6, 3.0)],
    "expit": (-700.0, -40.0, -1.0, 0.0, 1e-9, 1.0, 25.0, 40.0, 700.0),
    "log_expit": (-1e5, -40.0, -1.0, 0.0, 1.0, 25.0, 700.0),
    "logit": UNIT,
    "xlogy": [(0.0, 2.0), (2.0, 1e-30), (1.0, 1.0), (1e-30, 1e30), (-3.0, 0.5), (0.0, 1e-9)],
    "xlog1py": [(0.0, 2.0), (2.0, 1e-30), (1.0, -0.5), (1e-30, 1e30), (-3.0, 1e-9), (0.0, -0.999), (2.0, 0.0)],
    "entr": (*POSITIVE, 1e10),
    **dict.fromkeys(
        ("rel_entr", "kl_div"),
        ((1.0, 1.0), (1.0, 1 + 1e-9), (1e-20, 1e20), (1e20, 1e-20), (0.3, 2.0), (5.0, 0.1), (1e-9, 1e-9), (0.0, 2.0)),
    ),
    **dict.fromkeys(("exp10", "exp2", "expm1"), (-300.5, -1.0, -1e-9, 0.0, 1e-30, 1.0, 200.0)),
    "cosm1": (-20.25, -1e-9, 0.0, 1e-30, 0.3, 30.0),
    "log1p": (-1 + 1e-9, -0.5, -1e-9, 0.0, 1e-30, 1.0, 1e10),
    "cbrt": (-30.0, -1e-9, 1e-9, 0.3, 1e10),
    **dict.fromkeys(("j0", "j1"), (-20.25, -1e-9, 0.0, 1e-30, 0.3, 2.404825557695773, 30.0, 1e3)),
    **dict.fromkeys(("y0", "y1"), (1e-9, 0.3, 0.8935769662791675, 30.0)),
    **dict.fromkeys(("i0", "i1"), (-20.25, -1e-9, 0.0, 1e-30, 0.3, 4.0, 30.0, 600.0)),
    **dict.fromkeys(("i0e", "i1e"), (-1e5, -29.0, -0.3, 1e-9, 0.3, 4.0, 29.0, 31.0, 600.0, 1e5, 1e10)),
    **dict.fromkeys(("k0", "k1"), (1e-9, 0.3, 4.0, 30.0, 600.0)),
    **dict.fromkeys(("k0e", "k1e"), (1e-9, 0.3, 4.0, 29.0, 31.0, 600.0, 1e5, 1e10)),
    "jv": [
        *orders((0.0, 1.0, 2.0, 3.0, -1.0, 0.5, 2.5, -0.5, 30.0), (1e-9, 0.3, 5.0, 40.0)),
        (0.0, 0.0),
        (1.0, 0.0),
        (2.0, 0.0),
        (3.0, 0.0),
    ],
    "iv": [
        *orders((0.0, 1.0, 2.0, -1.0, 0.5, 2.5, -0.5, 30.0), (1e-9, 0.3, 5.0, 40.0)),
        (0.0, 0.0),
        (1.0, 0.0),
        (2.0, 0.0),
        (3.0, 0.0),
    ],
    **dict.fromkeys(("yv", "kv"), orders((0.0, 1.0, 2.0, 0.5, 2.5, -0.5, 30.0), (1e-6, 0.3, 5.0, 40.0))),
    **dict.fromkeys(
        ("ive", "kve"),
        (*orders((0.0, 1.0, 3.0, 0.5, 2.5, 20.0), (1e-6, 0.3, 5.0, 40.0, 1e3, 1e6)), (100.0, 1e4), (100.0, 5e3)),
    ),
    "exp1": (1e-30, 1e-9, 0.3, 4.0, 30.0, 600.0),
    "expi": (-30.0, -1.0, -1e-9, 1e-9, 0.37250741078136663, 4.0, 600.0),
    "expn": [*orders((0.0, 1.0, 2.0, 3.0, 10.0), (1e-9, 0.3, 1.0, 30.0, 600.0)), (3.0, 0.0), (4.0, 0.0), (10.0, 0.0)],
    "spence": (
        1e-30,
        1e-9,
        0.1,
        0.499,
        0.501,
        0.999,
        1 - 1e-9,
        1 - 2.0**-53,
        1.0,
        1 + 1e-12,
        1 + 1e-5,
        1.499,
        1.501,
        4.0,
        1e5,
        1e10,
    ),
    "ellipe": (*NEAR_M, 1 - 1e-6, 1 - 1e-12),
    "ellipk": (*NEAR_M, 1 - 1e-6, 1 - 1e-12),
    "hyp0f1": [*orders((0.5, 2.0), (-30.0, -1.0, 0.0, 1e-9, 3.0, 60.0))],
    "hyp1f1": [
        (a, b, x) for a, b in ((0.5, 2.0), (1.0, 1.0), (0.0, 2.0), (-2.0, 0.5)) for x in (-20.0, -1.0, 0.0, 1e-9, 3.0)
    ],
    "hyp2f1": [
        (a, b, c, z)
        for a, b, c in ((0.5, 0.5, 2.0), (1.0, 2.0, 3.5), (-2.0, 1.0, 0.5), (0.0, 1.0, 2.0))
        for z in (-3.0, -1e-9, 0.0, 1e-9, 0.3, 0.8)
    ],
    "wrightomega": (-700.0, -40.0, -1.0, 0.0, 1e-9, 1.0, 30.0, 400.0, 1e5, 1e10),
}


def derivative_of_bessel(kind, v, x, n):
    """By functions of other orders: mpmath is slow near integer orders."""
    f = mp.bessely if kind[0] == "y" else mp.besselk
    if kind.endswith("e"):
        terms = [(-1) ** (n + j) * mp.binomial(2 * n, j) * f(v + n - j, x) for j in range(2 * n + 1)]
        return mp.exp(x) * sum(terms) / 2**n
    signs = [(-1) ** (j if kind[0] == "y" else n) for j in range(n + 1)]
    return sum(s * mp.binomial(n, j) * f(v - n + 2 * j, x) for j, s in enumerate(signs)) / 2**n


def derivative(name, args, order):
    """The derivative in mpmath; it does not evaluate the function at the point, where poles may cancel."""
    function, _, (low, high) = FUNCTIONS[name]
    args = tuple(map(mp.mpf, args))
    if name[0] in "yk" and name != "kl_div":
        v = args[0] if len(args) == 2 else mp.mpf(name[1])
        with mp.workdps(80):
            return derivative_of_bessel(name, v, args[-1], order[-1])
    direction = 1 if args[-1] == low else -1 if args[-1] == high else 0
    if name in ("xlogy", "xlog1py", "rel_entr", "kl_div") and args[0] == 0 and order[0]:
        direction = 1
    point, orders_ = (args[0], order[0]) if len(args) == 1 else (args, order)
    options = {"direction": direction} if direction else {"singular": True}
    at = lambda digits: on_digits(digits, lambda: mp.diff(function, point, orders_, **options))  # noqa: E731
    value, scale = at(DIGITS), abs(function(*[a + mp.mpf("1e-9") * direction for a in args]))
    if abs(value) < mp.mpf(10) ** -(DIGITS // 2) * max(scale, 1):  # or 0, where other digits are rounding
        return at(400)
    return mp.inf if direction and abs(at(DIGITS + 10) - value) > 1e-9 * abs(value) else value


def on_digits(digits, f):
    with mp.workdps(digits):
        return f()


def unit(i, n):
    return tuple(int(i == j) for j in range(n))


def plus(*orders):
    return tuple(map(sum, zip(*orders)))


def rows():
    for name, points in POINTS.items():
        positions = FUNCTIONS[name][1]
        for args in points:
            args = args if isinstance(args, tuple) else (args,)
            first = [unit(i, len(args)) for i in positions]
            second = [plus(unit(i, len(args)), unit(j, len(args))) for i in positions for j in positions if i <= j]
            for order in first + second:
                value = derivative(name, args, order)
                if mp.isinf(value):
                    continue
                nexts = [
                    abs(args[i]) * abs(derivative(name, args, plus(order, unit(i, len(args)))))
                    for i in positions
                    if args[i]
                ]
                yield name, args, order, value, sum(nexts, mp.mpf(0))


def main():  # a few minutes
    mp.mp.dps = DIGITS
    path = pathlib.Path(__file__).with_name("special_derivatives.txt")
    with path.open("w", 1) as file:
        for name, args, order, value, condition in rows():
            inputs = " ".join(repr(float(a)) for a in args)
            print(name, inputs, "".join(map(str, order)), mp.nstr(value, 17), mp.nstr(condition, 2), sep=";", file=file)


if __name__ == "__main__":
    main()
