"""Errors of other packages' ufuncs and of np.frompyfunc on traced values; SciPy's have rules."""

import re
import sys
import types

import numpy
import pytest

import minidiff as md
import minidiff.numpy as np

X = numpy.array([0.5, 1.5])
COMPILED = numpy.linalg._umath_linalg.det  # a ufunc that is none of NumPy's public ones


def message_of(ufunc, transformation=md.grad):
    """Return the error message of a ufunc that is called on traced values."""
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
    assert not re.search(r"np\.det|Did you mean|objects", text)


def test_a_ufunc_of_a_python_function():
    text = message_of(numpy.frompyfunc(abs, 1, 1))
    assert "arrays of objects" in text and "np.vectorize of minidiff.numpy" in text and "np.abs" not in text
    assert md.grad(lambda x: np.vectorize(abs)(x).sum())(X).tolist() == [1, 1]


# ---------------------------------------------------------------- where SciPy is installed


@pytest.fixture(scope="module")
def special():
    return pytest.importorskip("scipy.special")


def test_every_ufunc_of_scipy_with_one_result_takes_traced_values(special):
    """Under `jit`, `vmap` and on tapes; it has a derivative, or the error names the argument that has none."""
    ufuncs = {f for f in vars(special).values() if isinstance(f, numpy.ufunc) and f.nout == 1}
    assert len(ufuncs) > 150
    without = []
    for f in ufuncs:
        args = [numpy.array([0.25, 0.5])] * f.nin
        if not any(set(types.partition("->")[0]) <= {"d"} for types in f.types):  # integers, or pairs of types
            continue
        with numpy.errstate(all="ignore"):
            for transformed in (md.jit(f), md.vmap(f), md.make_tape(f)(*args)):
                actual = transformed(*args)
                numpy.testing.assert_allclose(actual[0] if isinstance(actual, list) else actual, f(*args), rtol=1e-12)
            try:
                md.grad(lambda x, f=f, args=args: f(*args[:-1], x).sum())(args[-1])
            except TypeError as error:
                assert re.match(rf"scipy.special.{f.__name__} has no derivative in its argument", str(error)), f
                without.append(f.__name__)
    assert len(ufuncs) - len(without) > 70
    assert "voigt_profile" in without


def test_functions_of_several_results_have_no_rule(special):
    text = message_of(special.fresnel)
    assert text.startswith("scipy.special.fresnel is a compiled ufunc without a derivative rule")


def test_methods_of_its_ufuncs_are_refused(special):
    with pytest.raises(TypeError, match=r"scipy\.special\.xlogy\.reduce is not supported on traced values"):
        md.grad(special.xlogy.reduce)(X)
