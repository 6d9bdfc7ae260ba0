"""Distributions and special functions at edges of their parameters, beside SciPy, and derivatives beside identities."""

from __future__ import annotations

import random

#: The shapes of each distribution; integers are numbers of trials.
SHAPES = {
    **dict.fromkeys(("norm", "cauchy", "laplace", "logistic", "uniform", "expon"), ()),
    **{"t": ("positive",), "gamma": ("positive",), "chi2": ("positive",), "beta": ("positive", "positive")},
    **{"poisson": ("rate",), "binom": ("trials", "unit"), "bernoulli": ("unit",)},
}
DISCRETE = ("poisson", "binom", "bernoulli")
VALUES = {
    "positive": [1.0, 2.0, 3.0, 0.5, 1.5, 40.0],
    "rate": [0.0, 1e-12, 1.0, 3.5, 300.0],
    "unit": [0.0, 1.0, 1e-12, 0.5, 0.3],
    "trials": [0.0, 1.0, 5.0, 40.0],
    "x": [0.0, 1.0, -1.0, 2.0, 1e-12, 0.5, 3.7, -3.7, 50.0, -50.0, 800.0, -800.0],
    "k": [0.0, 1.0, 2.0, 5.0, 40.0, -1.0, 0.5, 700.0],
}
#: Functions of scipy.special with an identity for the derivative in their last argument.
IDENTITIES = {
    "gammaln": ([0.5, 1.0, 2.0, 1e-9, -0.5, 1e9], "sp.psi(x)"),
    "rgamma": ([0.0, -1.0, -2.0, -5.0, 0.5, 3.0, -3.3, 1e-12], "slope_of_rgamma(x)"),
    "erfcx": ([0.0, 1.0, -3.0, 6.4, 6.6], "2 * x * sp.erfcx(x) - 2 / numpy.sqrt(numpy.pi)"),
    "expit": ([0.0, 40.0, -40.0, 1e-9], "sp.expit(x) * sp.expit(-x)"),
    "log_ndtr": ([0.0, -1.0, -5.0, 5.0, -37.0], "numpy.exp(-x * x / 2 - sp.log_ndtr(x)) / numpy.sqrt(2 * numpy.pi)"),
    "ellipk": ([0.0, 0.499, 0.5, -3.0, 1e-12, 0.999], "sp.elliprd(0, 1, 1 - x) / 6"),
    "ellipe": ([0.0, 0.499, 0.5, -3.0, 1e-12, 0.999], "-sp.elliprd(0, 1 - x, 1) / 6"),
    "spence": ([0.5, 0.499, 1.5, 2.0, 1e-9], "numpy.log(x) / (1 - x)"),
    "wrightomega": ([0.0, 1.0, -30.0, 1e9], "sp.wrightomega(x) / (1 + sp.wrightomega(x))"),
    "dawsn": ([0.0, 1.0, 3.0, 6.4, -2.0], "1 - 2 * x * sp.dawsn(x)"),
    "entr": ([1.0, 1e-300, 2.0], "-numpy.log(x) - 1"),
}


def slope_of_rgamma(x):
    """By Cauchy's formula on a circle around x."""
    import numpy
    import scipy.special as sp

    z = numpy.exp(2j * numpy.pi * (numpy.arange(64) + 0.5) / 64)
    return numpy.mean(sp.rgamma(numpy.asarray(x)[..., None] + 0.25 * z) / (0.25 * z), -1).real


def edges(rng: random.Random) -> str:
    """Values are SciPy's; a density is the derivative of the cdf, and that of a logarithm is a quotient."""
    if rng.random() < 0.3:
        return _special(rng)
    name = rng.choice(list(SHAPES))
    size, discrete = rng.randint(1, 5), name in DISCRETE
    rows = [[rng.choice(VALUES["k" if discrete else "x"]) for _ in range(size)]]
    rows += [[rng.choice(VALUES[kind]) for _ in range(size)] for kind in SHAPES[name]]
    if rng.random() < 0.3:
        rows[-1] = [rng.choice([rows[-1][0], -1.0, float("nan")]) for _ in range(size)]
    rows.append([rng.choice([0.0, 0.0, 1.0, -2.0]) for _ in range(size)])
    rows += [] if discrete else [[rng.choice([1.0, 1.0, 2.0, 0.25]) for _ in range(size)]]
    nan, dtype = "float('nan')", rng.choice(["float64", "float64", "float32"])
    argnum = rng.choice([0, len(rows) - 2, len(rows) - 1]) if not discrete else len(SHAPES[name])
    return f"""
        import scipy.stats
        from minidiff.scipy import stats
        from tests.fuzz.routes.edges import check_distribution
        arrays = [numpy.array(row, "{dtype}") for row in {str(rows).replace("nan", nan)}]
        check_distribution(stats.{name}, scipy.stats.{name}, arrays, {discrete}, {argnum})
    """


def _special(rng: random.Random) -> str:
    name = rng.choice(list(IDENTITIES))
    points, slope = IDENTITIES[name]
    xs = [rng.choice(points) for _ in range(rng.randint(1, 5))]
    return f"""
        import scipy.special as sp
        from minidiff.scipy import special
        from tests.fuzz.routes.edges import check_transformations, slope_of_rgamma
        x = numpy.array({xs})
        agree(special.{name}(x), sp.{name}(x), rtol=1e-14)
        agree(check_transformations(special.{name}, [x], 0), {slope}, rtol=1e-9, atol=1e-11)
    """


def check_transformations(f, arrays, argnum):
    """The derivatives of f at each point, the same by every transformation."""
    import numpy

    import minidiff as md
    from tests.fuzz.scripts import agree

    tangents = [numpy.ones_like(x) if i == argnum else numpy.zeros_like(x) for i, x in enumerate(arrays)]
    along = lambda x: f(*arrays[:argnum], x, *arrays[argnum + 1 :])  # noqa: E731
    gradient = lambda *xs: md.grad(lambda *xs: f(*xs).sum(), argnum)(*xs)  # noqa: E731
    expected, tolerances = gradient(*arrays), {"rtol": 1e-9 if tangents[0].dtype == float else 1e-3}
    agree(md.jit(gradient)(*arrays), expected, **tolerances)
    agree(md.vmap(md.grad(f, argnum))(*arrays), expected, **tolerances)
    agree(md.jvp(along, (arrays[argnum],), (tangents[argnum],))[1], expected, **tolerances)
    return expected


def check_distribution(ours, theirs, arrays, discrete, argnum):
    """Values of all methods, and derivatives in one argument: of the cdf the density, of logarithms the quotients."""
    import numpy

    import minidiff as md
    from tests.fuzz.scripts import agree

    density, single = "pmf" if discrete else "pdf", arrays[0].dtype == numpy.float32
    wide = [x.astype(float) for x in arrays]
    tolerances = {"rtol": 2e-3, "atol": 1e-5} if single else {"rtol": 1e-8, "atol": 1e-12}
    invalid = numpy.isnan(getattr(theirs, density)(*wide))  # SciPy's discrete logcdf of these is 0, or NaN
    infinite = numpy.isinf(getattr(theirs, density)(*wide))  # there a derivative in the scale is infinity times 0
    for name in (density, f"log{density}", "cdf", "sf", "logcdf", "logsf"):
        value, expected = (getattr(d, name)(*xs) for d, xs in ((ours, arrays), (theirs, wide)))
        assert value.dtype == arrays[0].dtype
        expected = numpy.where(invalid, numpy.nan, expected)
        known = (expected > -600) & (expected < 1e30) | numpy.isnan(expected)  # SciPy's logarithms end there
        known &= numpy.isfinite(value) | (not single)  # in single precision a number may be rounded to an edge
        agree(value[known], expected[known].astype(value.dtype), **tolerances)
        agree(md.jit(getattr(ours, name))(*arrays), value, **tolerances)
        if name == density or single:
            continue
        try:
            slope = check_transformations(getattr(ours, name), arrays, argnum)
        except TypeError:
            continue  # a shape in which SciPy has no derivative
        assert numpy.isnan(slope[invalid & ~numpy.isnan(arrays[0])]).all()
        assert not numpy.isnan(slope[~invalid & ~infinite & numpy.isfinite(value)]).any(), (name, slope)
        if argnum == 0 and not discrete and name in ("cdf", "sf"):
            at = ~numpy.isnan(arrays[0])
            agree(slope[at], getattr(ours, density)(*arrays)[at] * (1 if name == "cdf" else -1), rtol=1e-9)
        if argnum == 0 and not discrete and name in ("logcdf", "logsf"):
            tail = getattr(ours, name[3:])(*arrays)
            sure = (tail > 1e-200) & ~numpy.isnan(arrays[0])
            quotient = getattr(ours, density)(*arrays)[sure] / tail[sure]
            agree(slope[sure], quotient * (1 if name == "logcdf" else -1), rtol=1e-8)
