"""What ufuncs of other packages are told of on traced values: SciPy's, and those of np.frompyfunc."""

import re
import sys
import types

import numpy
import pytest

import minidiff as md
import minidiff.numpy as np
from minidiff.diagnostics.other_libraries import COUNTERPARTS

X = numpy.array([0.5, 1.5])
COMPILED = numpy.linalg._umath_linalg.det  # a ufunc that is none of NumPy's public ones


def message_of(ufunc, transformation=md.grad):
    """What is said of a ufunc that is called on traced values."""
    with pytest.raises(TypeError, match=r"is not supported on traced values \(f64") as error:
        transformation(lambda x: ufunc(*[x] * ufunc.nin))(X)
    return str(error.value)


@pytest.mark.parametrize("transformation", [md.grad, md.jit, md.vmap, md.make_tape])
def test_a_ufunc_of_another_package(transformation, monkeypatch):
    """It is called by the name that it is imported by, and told how to get a derivative."""
    module = types.ModuleType("somewhere.special")
    module.det = COMPILED
    monkeypatch.setitem(sys.modules, "somewhere.special", module)
    text = message_of(COMPILED, transformation)
    assert text.startswith("somewhere.special.det is a compiled ufunc without a derivative rule")
    assert "md.custom_jvp(somewhere.special.det)" in text
    assert not re.search(r"np\.det|similar names|objects", text)


def test_a_ufunc_of_a_python_function():
    text = message_of(numpy.frompyfunc(abs, 1, 1))
    assert "arrays of objects" in text and "np.vectorize of minidiff.numpy" in text and "np.abs" not in text
    assert md.grad(lambda x: np.vectorize(abs)(x).sum())(X).tolist() == [1, 1]


@pytest.mark.parametrize("name", COUNTERPARTS)
def test_counterparts_exist(name):
    f = eval(COUNTERPARTS[name], {"md": md, "np": np})
    assert md.grad(lambda x: (1.0 * f(x)).sum())(X).shape == X.shape


# ---------------------------------------------------------------- where SciPy is installed


@pytest.fixture(scope="module")
def special():
    return pytest.importorskip("scipy.special")


def test_all_of_scipys(special):
    """The advice names a counterpart that computes the same, or is a program that runs once the slope is filled in."""
    ufuncs = {name: f for name, f in vars(special).items() if isinstance(f, numpy.ufunc)}
    assert len(ufuncs) > 150 and COUNTERPARTS.keys() <= ufuncs.keys()
    for f in ufuncs.values():
        text = message_of(f)
        assert text.startswith(f"scipy.special.{f.__name__} is a compiled ufunc")
        known = re.search(r": write (\S+)$", text)
        assert (known is not None) == (f.__name__ in COUNTERPARTS)
        assert known is not None or f"md.custom_jvp(scipy.special.{f.__name__})" in text


@pytest.mark.parametrize("name", COUNTERPARTS)
def test_counterparts_compute_the_same(name, special):
    f, x = eval(COUNTERPARTS[name], {"md": md, "np": np}), numpy.linspace(-3.2, 3.1, 40)
    x = x if name != "log1p" else numpy.abs(x)
    numpy.testing.assert_allclose(f(x), getattr(special, name)(x), rtol=1e-12, atol=1e-14)


def test_the_advice_works(special):
    f, define = re.search(r"f = (md.custom_jvp\(.*?\)), then (f.defjvps\(.*?\)),", message_of(special.gammaln)).groups()
    names = {"md": md, "scipy": sys.modules["scipy"]}
    names["f"] = eval(f, names)
    eval(define.replace("slope", "scipy.special.digamma(x)"), names)
    numpy.testing.assert_allclose(md.grad(lambda x: names["f"](x).sum())(X), special.digamma(X))
