"""`scipy.special`, differentiable: one rule for each function, in a table.

SciPy's own ufuncs accept traced values, too: `scipy.special.gammaln(x)` is `md.scipy.special.gammaln(x)`. A ufunc with
one result and without a rule works under `jit`, `vmap` and on ranks, and raises TypeError if it is differentiated. So
does a function with a rule in an operand in which it has no derivative that SciPy computes, as the order of a Bessel
function.

>>> import minidiff as md, numpy as np
>>> md.vmap(md.grad(jv, 1))(np.array([0.0, 1.0]), np.array([1.0, 1.0])).round(6)
array([-0.440051,  0.325147])

Source of the derivatives: NIST Digital Library of Mathematical Functions, https://dlmf.nist.gov.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import numpy
import scipy.special as sp

from minidiff import nn
from minidiff.core.tracer import Value, implements
from minidiff.diagnostics.other_libraries import missing_attribute_error
from minidiff.ops import elementwise
from minidiff.ops.base import Elementwise
from minidiff.ops.elementwise import ElementwiseFunction, equal, exp, log, log1p, sign, sin, sqrt, where

_ROOT_PI, _ROOT_2PI = math.sqrt(math.pi), math.sqrt(2 * math.pi)


def _without_rule(name: str, position: int) -> Callable:
    """The derivative in an operand that has no rule."""

    def derivative(*_: Any) -> NoReturn:
        raise TypeError(
            f"scipy.special.{name} has no derivative in its argument {position}, because SciPy has no function for it; "
            f"apply md.stop_gradient to that argument if it is a constant, or declare a rule: md.custom_jvp"
        )

    return derivative


def _beta_density(a: Value, b: Value, x: Value) -> Value:
    return exp(sp.xlogy(a - 1, x) + sp.xlog1py(b - 1, -x) - sp.betaln(a, b))


def _gamma_density(a: Value, x: Value) -> Value:
    return exp(sp.xlogy(a - 1, x) - x - sp.gammaln(a))


def _normal_density(x: Value) -> Value:
    return exp(-0.5 * x * x) / _ROOT_2PI


def _t_density(df: Value, t: Value) -> Value:
    return exp(-0.5 * (df + 1) * log1p(t * t / df) - sp.betaln(0.5 + 0 * df, 0.5 * df)) / sqrt(df)


def _reciprocal_in(x: Value, y: Value, z: Value) -> Value:
    """x / z where x is not 0, and 0 where it is."""
    return x / where(equal(x, 0), 1, z)


#: The derivative in each operand, of (result, *operands); an operand without one has None.
RULES: dict[str, tuple[Callable | None, ...]] = {
    # gamma and beta functions
    "gamma": (lambda out, x: out * sp.digamma(x),),
    "gammaln": (lambda out, x: sp.digamma(x),),
    "loggamma": (lambda out, x: sp.digamma(x),),
    "rgamma": (lambda out, x: -out * sp.digamma(x),),
    "gammasgn": (lambda out, x: 0 * x,),
    "psi": (lambda out, x: polygamma(1, x),),
    "polygamma": (None, lambda out, n, x: polygamma(n + 1, x)),
    "zeta": (None, lambda out, x, q: -x * zeta(x + 1, q)),
    "poch": (
        lambda out, z, m: out * (sp.digamma(z + m) - sp.digamma(z)),
        lambda out, z, m: out * sp.digamma(z + m),
    ),
    "binom": (
        lambda out, n, k: out * (sp.digamma(n + 1) - sp.digamma(n - k + 1)),
        lambda out, n, k: out * (sp.digamma(n - k + 1) - sp.digamma(k + 1)),
    ),
    "beta": (
        lambda out, a, b: out * (sp.digamma(a) - sp.digamma(a + b)),
        lambda out, a, b: out * (sp.digamma(b) - sp.digamma(a + b)),
    ),
    "betaln": (
        lambda out, a, b: sp.digamma(a) - sp.digamma(a + b),
        lambda out, a, b: sp.digamma(b) - sp.digamma(a + b),
    ),
    "betainc": (None, None, lambda out, a, b, x: _beta_density(a, b, x)),
    "betaincinv": (None, None, lambda out, a, b, y: 1 / _beta_density(a, b, out)),
    "gammainc": (None, lambda out, a, x: _gamma_density(a, x)),
    "gammaincc": (None, lambda out, a, x: -_gamma_density(a, x)),
    "gammaincinv": (None, lambda out, a, y: 1 / _gamma_density(a, out)),
    # the error function, and distributions
    "erf": (lambda out, x: 2 / _ROOT_PI * exp(-x * x),),
    "erfc": (lambda out, x: -2 / _ROOT_PI * exp(-x * x),),
    "erfcx": (lambda out, x: 2 * x * out - 2 / _ROOT_PI,),
    "erfi": (lambda out, x: 2 / _ROOT_PI * exp(x * x),),
    "erfinv": (lambda out, x: _ROOT_PI / 2 * exp(out * out),),
    "erfcinv": (lambda out, x: -_ROOT_PI / 2 * exp(out * out),),
    "dawsn": (lambda out, x: 1 - 2 * x * out,),
    "ndtr": (lambda out, x: _normal_density(x),),
    "log_ndtr": (lambda out, x: exp(-0.5 * x * x - out) / _ROOT_2PI,),
    "ndtri": (lambda out, y: _ROOT_2PI * exp(0.5 * out * out),),
    "stdtr": (None, lambda out, df, t: _t_density(df, t)),
    "stdtrit": (None, lambda out, df, p: 1 / _t_density(df, out)),
    "expit": (lambda out, x: out * (1 - out),),
    "log_expit": (lambda out, x: sp.expit(-x),),
    "logit": (lambda out, x: 1 / (x * (1 - x)),),
    # logarithms, and what is accurate near 0
    "xlogy": (lambda out, x, y: log(y), lambda out, x, y: _reciprocal_in(x, y, y)),
    "xlog1py": (lambda out, x, y: log1p(y), lambda out, x, y: _reciprocal_in(x, y, 1 + y)),
    "entr": (lambda out, x: -log(x) - 1,),
    "rel_entr": (lambda out, x, y: log(x / y) + 1, lambda out, x, y: -x / y),
    "kl_div": (lambda out, x, y: log(x / y), lambda out, x, y: 1 - x / y),
    "exp10": (lambda out, x: math.log(10) * out,),
    "cosm1": (lambda out, x: -sin(x),),
    # Bessel functions
    "j0": (lambda out, x: -sp.j1(x),),
    "j1": (lambda out, x: 0.5 * (sp.j0(x) - sp.jv(2, x)),),
    "y0": (lambda out, x: -sp.y1(x),),
    "y1": (lambda out, x: 0.5 * (sp.y0(x) - sp.yv(2, x)),),
    "i0": (lambda out, x: sp.i1(x),),
    "i1": (lambda out, x: 0.5 * (sp.i0(x) + sp.iv(2, x)),),
    "i0e": (lambda out, x: sp.i1e(x) - sign(x) * out,),
    "i1e": (lambda out, x: 0.5 * (sp.i0e(x) + sp.ive(2, x)) - sign(x) * out,),
    "k0": (lambda out, x: -sp.k1(x),),
    "k1": (lambda out, x: -0.5 * (sp.k0(x) + sp.kv(2, x)),),
    "k0e": (lambda out, x: out - sp.k1e(x),),
    "k1e": (lambda out, x: out - 0.5 * (sp.k0e(x) + sp.kve(2, x)),),
    "jv": (None, lambda out, v, x: 0.5 * (sp.jv(v - 1, x) - sp.jv(v + 1, x))),
    "yv": (None, lambda out, v, x: 0.5 * (sp.yv(v - 1, x) - sp.yv(v + 1, x))),
    "yn": (None, lambda out, v, x: 0.5 * (sp.yv(v - 1, x) - sp.yv(v + 1, x))),
    "iv": (None, lambda out, v, x: 0.5 * (sp.iv(v - 1, x) + sp.iv(v + 1, x))),
    "kv": (None, lambda out, v, x: -0.5 * (sp.kv(v - 1, x) + sp.kv(v + 1, x))),
    "kn": (None, lambda out, v, x: -0.5 * (sp.kv(v - 1, x) + sp.kv(v + 1, x))),
    "ive": (None, lambda out, v, x: 0.5 * (sp.ive(v - 1, x) + sp.ive(v + 1, x)) - sign(x) * out),
    "kve": (None, lambda out, v, x: out - 0.5 * (sp.kve(v - 1, x) + sp.kve(v + 1, x))),
    # integrals, and hypergeometric functions
    "exp1": (lambda out, x: -exp(-x) / x,),
    "expi": (lambda out, x: exp(x) / x,),
    "expn": (None, lambda out, n, x: -sp.expn(n - 1, x)),
    "spence": (lambda out, x: log(x) / (1 - x),),
    "ellipe": (lambda out, m: (out - sp.ellipk(m)) / (2 * m),),
    "ellipk": (lambda out, m: (sp.ellipe(m) / (1 - m) - out) / (2 * m),),
    "hyp0f1": (None, lambda out, v, z: sp.hyp0f1(v + 1, z) / v),
    "hyp1f1": (None, None, lambda out, a, b, x: a / b * sp.hyp1f1(a + 1, b + 1, x)),
    "hyp2f1": (None, None, None, lambda out, a, b, c, z: a * b / c * sp.hyp2f1(a + 1, b + 1, c + 1, z)),
    "wrightomega": (lambda out, z: out / (1 + out),),
}


#: Functions that NumPy has under another name or the same, with rules already.
_SAME = {"cbrt": "cbrt", "exp2": "exp2", "expm1": "expm1", "log1p": "log1p", "round": "rint"}


@functools.cache
def function_of(name: str) -> ElementwiseFunction:
    """Declare a function of SciPy by its name; its ufunc then takes traced values, too."""
    function: Any = getattr(sp, name)
    if name in _SAME:
        return implements(function)(getattr(elementwise, _SAME[name]))
    rules = RULES[name] if name in RULES else (None,) * function.nin
    derivatives = [rule or _without_rule(name, i) for i, rule in enumerate(rules)]
    declared = elementwise.function_of(Elementwise(name, function, derivatives))
    declared.__doc__ = f"`scipy.special.{name}`, differentiable."
    return implements(function)(declared) if isinstance(function, numpy.ufunc) else declared


globals().update({name: function_of(name) for name in (*RULES, *_SAME) if name != "round"})
polygamma, zeta = function_of("polygamma"), function_of("zeta")
digamma, jn = function_of("psi"), function_of("jv")
logsumexp = nn.logsumexp


def softmax(x: Value, axis: Any = None) -> Value:
    """`scipy.special.softmax`: `md.nn.softmax`, over the whole array by default.

    >>> softmax(numpy.zeros((2, 2)))
    array([[0.25, 0.25],
           [0.25, 0.25]])
    """
    return nn.softmax(x, axis)


def log_softmax(x: Value, axis: Any = None) -> Value:
    """`scipy.special.log_softmax`: `md.nn.log_softmax`, over the whole array by default.

    >>> log_softmax(numpy.array([1000.0, 0.0]))
    array([    0., -1000.])
    """
    return nn.log_softmax(x, axis)


def multigammaln(a: Value, d: int) -> Value:
    """`scipy.special.multigammaln`: the logarithm of the multivariate gamma function, of the shape of a.

    >>> round(float(multigammaln(3.0, 2)), 6)
    1.550195
    """
    terms = [sp.gammaln(a - 0.5 * j) for j in range(d)]
    return d * (d - 1) / 4 * math.log(math.pi) + functools.reduce(elementwise.add, terms)


__all__ = [*RULES, "digamma", "jn", "log_softmax", "logsumexp", "multigammaln", "softmax"]

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...

else:

    def __getattr__(name: str) -> Any:
        ufunc = getattr(sp, name, None)
        if not isinstance(ufunc, numpy.ufunc) or ufunc.nout != 1:
            raise missing_attribute_error(__name__, name, __all__)
        return function_of(name)
