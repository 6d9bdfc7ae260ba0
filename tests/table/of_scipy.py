"""Rows of `minidiff/scipy`: its table of rules, and matrix functions."""

from typing import Any

import numpy as np
import scipy.signal
import scipy.stats
from scipy import special as sp
from scipy.sparse import csr_array

from minidiff.scipy import linalg, signal, sparse, special, stats
from tests.table.rows import Row, complex_, form, over, positive, product, random, real, row

#: Products of a sparse matrix with 5 rows and 7 columns, and the shape of the operand.
SPARSE: dict[str, tuple] = {
    "sparse @ x": (lambda a, x: a @ x, (7,)),
    "sparse @ matrix": (lambda a, x: a @ x, (7, 3)),
    "x @ sparse": (lambda a, x: x @ a, (5,)),
    "matrix @ sparse": (lambda a, x: x @ a, (3, 5)),
}

LINEAR: dict = {name: [(0,), (1,)] for name in SPARSE} | {f"{name}, of SciPy": None for name in SPARSE}


def between(low: float, high: float, *shape: int) -> np.ndarray:
    return random.uniform(low, high, shape)


#: Functions of one argument, by the interval in which they are tested.
OF_ONE = {
    (0.3, 2.0): "gamma gammaln loggamma rgamma psi erfcx erfi entr exp1 expi y0 y1 k0 k1 k0e k1e log1p",
    (-1.5, 1.5): "erf erfc dawsn ndtr log_ndtr expit log_expit exp10 cosm1 j0 j1 i0 i1 i0e i1e wrightomega "
    "cbrt exp2 expm1",
    (-0.8, 0.8): "erfinv",
    (0.2, 0.8): "erfcinv ndtri logit spence ellipe ellipk",
}
#: Functions of several: the intervals of all arguments; an integer is an argument without a derivative.
OF_SEVERAL: dict[str, tuple] = {
    **dict.fromkeys(("beta", "betaln", "poch", "rel_entr", "kl_div", "xlogy", "xlog1py"), ((0.5, 2.0),) * 2),
    "binom": ((3.0, 5.0), (0.5, 2.0)),
    **dict.fromkeys(("betainc", "betaincc", "betaincinv", "betainccinv"), ((0.5, 3.0), (1.0, 3.0), (0.2, 0.8))),
    **dict.fromkeys(("gammainc", "gammaincc"), ((0.5, 3.0), (0.5, 2.0))),
    **dict.fromkeys(("gammaincinv", "gammainccinv"), ((0.5, 3.0), (0.2, 0.8))),
    "stdtr": ((2.0, 4.0), (-1.5, 1.5)),
    "stdtrit": ((2.0, 4.0), (0.2, 0.8)),
    **dict.fromkeys(("jv", "yv", "yn", "iv", "kv", "kn", "ive", "kve", "polygamma", "expn"), (2, (0.5, 2.0))),
    "zeta": (3, (0.5, 2.0)),
    "hyp0f1": (2, (-1.0, 1.0)),
    "hyp1f1": (2, 3, (-1.0, 1.0)),
    "hyp2f1": (2, 3, 4, (-0.5, 0.5)),
}


def _of_one(name: str, low: float, high: float) -> list[Row]:
    function = getattr(sp, name)
    return [row(function, between(low, high, *shape), f=getattr(special, name)) for shape in ((2, 3), (), (0, 2))]


def _of_several(name: str, arguments: tuple) -> Row:
    inputs = [np.array([k, k + 1, k]) if isinstance(k, int) else between(*k, 2, 3) for k in arguments]
    return row(getattr(sp, name), *inputs, f=getattr(special, name))


def by_differences(a: Any) -> Any:
    return linalg.matrix_function(np.sin, np.cos, a)


OF_MATRIX = [linalg.expm, linalg.cosm, linalg.sinm, linalg.sqrtm, linalg.logm, by_differences]

BANDS = [((1, 1), (5,)), ((2, 0), (5, 2)), ((0, 1), (2, 5, 1))]


def regular(*shape: int) -> np.ndarray:
    return 2 * np.eye(shape[-1]) + 0.5 * real(*shape)


def definite(*shape: int) -> np.ndarray:
    x = 0.5 * real(*shape)
    return x @ x.swapaxes(-1, -2) + np.diag(np.arange(1.0, shape[-1] + 1))


def definite_complex(*shape: int) -> np.ndarray:
    return definite(*shape) + 0.2j * real(*shape)


def banded(*shape: int) -> np.ndarray:
    return 3.0 * (np.arange(shape[0])[:, None] == shape[0] // 2) + 0.3 * real(*shape)


def solve_by_cholesky(a: Any, b: Any, lower: bool) -> Any:
    return linalg.cho_solve(linalg.cho_factor(0.5 * (a + a.T), lower), b)


SIDES = over(side=("right", "left"))


def both_of_polar(x: Any, side: str) -> Any:
    return np.concatenate([np.ravel(y) for y in linalg.polar(x, side)])


#: Distributions, their shapes, and where they have most of their values.
DISTRIBUTIONS: dict[str, tuple] = dict.fromkeys(("norm", "cauchy", "laplace", "logistic"), ((), (-0.8, 0.3, 1.4)))
DISTRIBUTIONS |= dict.fromkeys(("uniform", "expon"), ((), (0.2, 0.6, 0.9)))
DISTRIBUTIONS |= {
    "t": ((3.5,), (-0.8, 0.3, 1.4)),
    "gamma": ((2.2,), (0.9, 1.9, 3.4)),
    "chi2": ((3.3,), (1.2, 2.6, 5.1)),
}
DISTRIBUTIONS |= {"beta": ((2.1, 1.7), (0.3, 0.5, 0.8))}
COUNTED = {"poisson": (2.3,), "binom": (5, 0.3), "bernoulli": (0.3,)}


def _of_distribution(name: str, shapes: tuple, points: tuple) -> list[Row]:
    methods = {"logpdf": points, "logsf": points, "ppf": (0.15, 0.6)}
    methods |= {} if shapes else {"cdf": points, "isf": (0.15, 0.6)}
    f = getattr(stats, name)
    return [form(f"{name}.{m}", "", getattr(f, m), np.array(x), *shapes, 0.05, 1.3) for m, x in methods.items()]


#: Arguments of the normal distribution of several numbers: of one, of vectors, and of variances in place of a matrix.
NORMAL: list[tuple] = [(0.5, 0.0, 2.0), (0.5,), (real(3), 0.5, 2.0), (real(1), 0.5, 2.0), (real(3, 1), real(1), 2.0)]
NORMAL += [(real(3), np.ones(3), positive(3)), (real(3), np.ones(3), 2.0), (real(2, 3), np.zeros(3), positive(3))]
NORMAL += [(real(3), np.zeros(1), np.array([2.0])), (real(3), np.zeros(1), np.array([[2.0]]))]
OF_NORMAL = {getattr(scipy.stats.multivariate_normal, m): m for m in ("logpdf", "pdf")}

#: Shapes of what is convolved.
CONVOLVED = [((4,), (3,)), ((3,), (4,)), ((5, 4), (2, 3)), ((4, 3, 2), (2, 3, 1))]


def _of_signals(name: str) -> list[Row]:
    pairs = [(real(*a), real(*b)) for a, b in CONVOLVED] + [(real(5, 4), complex_(2, 3))]
    modes = over(mode=("full", "same", "valid"))
    return product([getattr(scipy.signal, name)], pairs, modes, getattr(signal, name))


def of_bands(ab: Any, b: Any, bands: tuple[int, int]) -> Any:
    return linalg.solve_banded(bands, ab, b)


DENSE = np.where(real(5, 7) > 0.3, real(5, 7), 0.0)
TRIPLETS, CSR = sparse.coo_array(csr_array(DENSE)), csr_array(DENSE)


def of_values(f: Any) -> Any:
    return lambda v, x: f(TRIPLETS._replace(values=v), x)


ROWS = [
    *(r for name, (shapes, points) in DISTRIBUTIONS.items() for r in _of_distribution(name, shapes, points)),
    *(form(f"{n}.logpmf", "", getattr(stats, n).logpmf, np.array([0, 1]), *p) for n, p in COUNTED.items()),
    *(form(f"{n}.cdf", "", getattr(stats, n).cdf, np.array([0, 1]), *p) for n, p in COUNTED.items()),
    form("dirichlet.logpdf", "", stats.dirichlet.logpdf, np.array([[0.2, 0.5, 0.3], [0.3, 0.3, 0.4]]).T, positive(3)),
    *(
        r
        for of, m in OF_NORMAL.items()
        for r in product([of], NORMAL[: 10 if m == "logpdf" else 3], f=getattr(stats.multivariate_normal, m))
    ),
    *(r for f in ("convolve", "correlate") for r in _of_signals(f)),
    *(form(n, "", of_values(f), TRIPLETS.values, real(*s)) for n, (f, s) in SPARSE.items()),
    *(form(f"{n}, of SciPy", "", lambda x, f=f: f(CSR, x), real(*s)) for n, (f, s) in SPARSE.items()),
    *(r for (low, high), names in OF_ONE.items() for name in names.split() for r in _of_one(name, low, high)),
    *(_of_several(name, arguments) for name, arguments in OF_SEVERAL.items()),
    *(row(f, complex_(2, 3)) for f in (sp.erf, sp.erfc)),
    row(sp.gammasgn, real(2, 3), f=lambda x: x * sp.gammasgn(x)),
    row(sp.round, 3 * real(2, 3)),
    *(row(f, real(2, 3), axis=a) for f in (special.softmax, special.log_softmax) for a in (None, 0, (0, 1))),
    row(special.multigammaln, 2 + positive(2, 3), d=3),
    *product(OF_MATRIX, [definite(3, 3), definite_complex(2, 3, 3)]),
    *product([linalg.polar], [regular(3, 3), regular(2, 3, 3)[:, :2], definite_complex(2, 2)], SIDES, both_of_polar),
    *(row(linalg.solve_triangular, np.tril(regular(3, 3)), real(*b), lower=True) for b in ((3,), (3, 2), (2, 3, 1))),
    *(row(linalg.solve_triangular, regular(2, 3, 3), real(3, 2), trans=t) for t in (0, 1, 2)),
    row(linalg.solve_triangular, regular(3, 3), real(3, 2), unit_diagonal=True),
    row(linalg.solve_triangular, regular(3, 3) + 0.2j * real(3, 3), real(3, 2) + 1j * real(3, 2), trans="C"),
    *(row(linalg.cho_solve, definite(3, 3), real(3), f=solve_by_cholesky, lower=lower) for lower in (True, False)),
    *(row(linalg.solve_banded, banded(sum(bands) + 1, 5), real(*b), f=of_bands, bands=bands) for bands, b in BANDS),
    *(row(linalg.solve_sylvester, definite(*s, 3, 3), definite(*s, 2, 2), real(*s, 3, 2)) for s in ((), (2,))),
    row(linalg.solve_sylvester, definite(3, 3), definite(2, 2), real(4, 3, 2)),
    row(linalg.block_diag, real(2, 3), real(), real(2), f=lambda *xs: linalg.block_diag(*xs)),
]
