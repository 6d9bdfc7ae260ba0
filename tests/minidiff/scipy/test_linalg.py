"""Right-hand sides of SciPy's equations: in lists, in stacks, and those that do not fit."""

import numpy as np
import pytest
import scipy.linalg

import minidiff as md
from minidiff.checks.testing import check_grads
from minidiff.scipy import linalg
from tests.checks.samples import each

A = np.array([[2.0, 0.0, 0.0], [1.0, 4.0, 0.0], [3.0, 1.0, 5.0]])
BANDS = np.array([[2.0, 4.0, 5.0], [1.0, 1.0, 0.0]])
SOLVERS = {
    "solve_triangular": lambda b, module=linalg: module.solve_triangular(A, b, lower=True),
    "solve_banded": lambda b, module=linalg: module.solve_banded((1, 0), BANDS, b),
}


@each("name", SOLVERS)
def test_lists_are_right_hand_sides(name):
    b = [1.0, 2.0, 3.0]
    np.testing.assert_allclose(SOLVERS[name](b), SOLVERS[name](b, scipy.linalg), rtol=1e-14)


@each("name", SOLVERS)
@each("b", [3.0, np.ones(4), np.ones((4, 2)), np.ones((2, 4, 3))])
def test_a_right_hand_side_with_other_rows(name, b):
    with pytest.raises(ValueError):
        SOLVERS[name](b)


@each("name", SOLVERS)
def test_vmap_solves_for_the_columns_of_one_matrix(name):
    """The batch is in the columns, where one matrix serves all: SciPy is called once."""
    batch = np.arange(30.0).reshape(5, 3, 2)
    tape = md.make_tape(md.vmap(SOLVERS[name]))(batch)
    assert [e.outputs[0].type.shape for e in tape.equations if str(e.primitive) == name] == [(3, 10)]
    expected = np.stack([SOLVERS[name](b, scipy.linalg) for b in batch])
    np.testing.assert_allclose(md.vmap(SOLVERS[name])(batch), expected, rtol=1e-13)


def test_a_real_logarithm_in_single_precision():
    """SciPy's has imaginary parts of rounding errors: eager and compiled results are real."""
    a = np.array([[2.2, 0.4, 0.2], [-0.7, 2.5, 0.2], [-0.3, 0.3, 2.2]], np.float32)
    for x in (a, a.astype(float)):
        eager, compiled = linalg.logm(x), md.jit(linalg.logm)(x)
        assert eager.dtype == compiled.dtype == x.dtype
        np.testing.assert_allclose(scipy.linalg.expm(eager), a, rtol=1e-5)
        np.testing.assert_array_equal(eager, compiled)


@each("a", [A + A.T, A + A.T + 1j * (A - A.T)])
def test_functions_of_hermitian_matrices(a):
    f = lambda a: linalg.matrix_function(np.exp, np.exp, (a + a.conj().T) / 20)  # noqa: E731
    np.testing.assert_allclose(f(a), scipy.linalg.expm(a / 10), rtol=1e-12)
    check_grads(f, (a,))


@each("transform", [md.grad, lambda f: md.jit(md.grad(f)), md.jit])
def test_functions_of_matrices_close_over_no_traced_values(transform):
    """Not even through a function that they call: a derivative would be 0, in silence."""

    def f(s):
        power = lambda w: w**s  # noqa: E731
        return linalg.matrix_function(lambda w: power(w), lambda w: s * w ** (s - 1), np.eye(2)).sum()

    with pytest.raises(TypeError):
        transform(f)(0.5)
