"""Renew `special_derivatives.txt`: derivatives of special functions, by mpmath in 40 digits.

`python -m tests.minidiff.scipy.make_special_derivatives` needs mpmath 1.4 and nothing else. A row has the name of a
function of `scipy.special`, its arguments, the order of the derivative in each argument, the derivative, and its
condition: the sum of |x_j| times the next derivative in x_j, by which it would change if all arguments changed by their
size. The test takes its tolerance from it. To add a point, write the first three into a line, and run the script.
"""

import pathlib

import mpmath as mp

DIGITS = 40
oo = mp.inf


def _normal(x):
    return mp.erfc(-x / mp.sqrt(2)) / 2


def _stdtr(df, t):
    half = mp.betainc(df / 2, mp.mpf(1) / 2, 0, df / (df + t * t), regularized=True) / 2
    return half if t < 0 else 1 - half


def _w(z):
    return mp.lambertw(mp.exp(z)).real if z < 500 else mp.findroot(lambda w: w + mp.log(w) - z, z - mp.log(z))


#: Functions of mpmath, the positions of arguments with derivatives, and the interval of the last argument; at its ends
#: derivatives are one-sided.
FUNCTIONS = {
    "gamma": (mp.gamma, (0,), (-oo, oo)),
    "gammaln": (lambda x: mp.log(abs(mp.gamma(x))), (0,), (-oo, oo)),
    "rgamma": (mp.rgamma, (0,), (-oo, oo)),
    "psi": (mp.digamma, (0,), (-oo, oo)),
    "polygamma": (lambda n, x: mp.psi(int(n), x), (1,), (-oo, oo)),
    "zeta": (lambda s, q: mp.zeta(s, q), (1,), (0, oo)),
    "poch": (lambda z, m: mp.gammaprod([z + m], [z]), (0, 1), (-oo, oo)),
    "binom": (lambda n, k: mp.gammaprod([n + 1], [k + 1, n - k + 1]), (0, 1), (-oo, oo)),
    "beta": (lambda a, b: mp.gammaprod([a, b], [a + b]), (0, 1), (-oo, oo)),
    "betaln": (lambda a, b: mp.log(abs(mp.gammaprod([a, b], [a + b]))), (0, 1), (-oo, oo)),
    "betainc": (lambda a, b, x: mp.betainc(a, b, 0, x, regularized=True), (2,), (0, 1)),
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
    "expi": (mp.ei, (0,), (-oo, oo)),
    "expn": (mp.expint, (1,), (0, oo)),
    "spence": (lambda x: mp.polylog(2, 1 - x).real, (0,), (0, oo)),
    "ellipe": (lambda m: mp.ellipe(m).real, (0,), (-oo, 1)),
    "ellipk": (lambda m: mp.ellipk(m).real, (0,), (-oo, 1)),
    "hyp0f1": (mp.hyp0f1, (1,), (-oo, oo)),
    "hyp1f1": (mp.hyp1f1, (2,), (-oo, oo)),
    "hyp2f1": (lambda a, b, c, z: mp.hyp2f1(a, b, c, z).real, (3,), (-oo, 1)),
    "wrightomega": (_w, (0,), (-oo, oo)),
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


def with_values(name, inputs, order):
    """The line of a derivative at a point: with its value, and its condition."""
    args, order = tuple(map(float, inputs.split())), tuple(map(int, order))
    nexts = [(*order[:i], order[i] + 1, *order[i + 1 :]) for i in range(len(args))]
    moved = [abs(args[i]) * abs(derivative(name, args, nexts[i])) for i in FUNCTIONS[name][1] if args[i]]
    value, condition = derivative(name, args, order), sum(moved, mp.mpf(0))
    return ";".join([name, inputs, "".join(map(str, order)), mp.nstr(value, 17), mp.nstr(condition, 2)])


def main():  # a few minutes
    mp.mp.dps = DIGITS
    path = pathlib.Path(__file__).with_name("special_derivatives.txt")
    lines = [with_values(*line.split(";")[:3]) for line in path.read_text().splitlines()]
    path.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
