"""`while_loop` and `fori_loop` with `max_steps=`: reverse mode of loops whose length is not known."""

import numpy as np
import pytest

import minidiff as md
import minidiff.numpy as mnp
from tests.checks.meanings import MIXED, check_meaning
from tests.checks.samples import each
from tests.programs.control import over_rows

XS = np.array([3.0, 2.0, 11.0, 50.0])


def powers(x):
    """x to the power of the first one beyond 100, plus 1: as Python's loop."""
    return md.while_loop(lambda y: y < 100.0, lambda y: x * y, x, max_steps=10)


def powers_in_python(x):
    y = x
    while y < 100.0:
        y = x * y
    return y


def newton(a):
    """A square root: the condition depends on what is differentiated, and closes over it."""
    return md.while_loop(lambda x: abs(x * x - a) > 1e-10, lambda x: (x + a / x) / 2, a, max_steps=20)


def counted(x):
    return md.fori_loop(0, (x > 0) * 4, lambda i, y: y * x, 1.0, max_steps=20)


#: Loops, and what they mean. Newton's derivatives converge one step later than its values.
PROGRAMS = {
    "powers": (powers, powers_in_python, 1e-9),
    "root": (newton, np.sqrt, 1e-4),
    "counted": (counted, lambda x: x**4, 1e-9),
}
KINDS = ("value", "jvp", *MIXED, "grad", "grad of grad", "pullbacks")


@each("name", PROGRAMS)
def test_derivatives(name):
    f, meaning, rtol = PROGRAMS[name]
    check_meaning(md.vmap(f), over_rows(meaning), (XS,), KINDS, rtol=rtol)
    check_meaning(md.vmap(f), over_rows(meaning), (XS,), ["grad"], ["jit"], rtol=rtol)
    check_meaning(f, meaning, (XS[0, ...],), ["value", "grad", "grad of grad"], ["run", "of jit"], rtol=rtol)
    for of in (md.hessian, lambda f: md.grad(md.grad(md.grad(f)))):
        assert of(f)(3.0) == pytest.approx(of(meaning)(3.0), rtol)


@each("run", [lambda f: f, md.jit])
def test_trees_against_differences_to_second_order(run):
    """Carries in a dict, one of them an integer."""

    def shrink(w):
        step = lambda s: {"x": mnp.tanh(w @ s["x"]), "n": s["n"] + 1}  # noqa: E731
        init = {"x": np.ones(3), "n": 0}
        return md.while_loop(lambda s: mnp.sum(s["x"] ** 2) > 1e-3, step, init, max_steps=40)["x"].sum()

    md.testing.check_grads(run(shrink), (np.eye(3) * 0.5 + 0.1,), order=2)


def test_integers_that_the_body_closes_over():
    f = lambda x, i: md.while_loop(lambda y: y.sum() < 100.0, lambda y: y * x[i] + 1, x, max_steps=30).sum()  # noqa: E731
    x, expected = np.array([2.0, 3.0]), md.grad(f)(np.array([2.0, 3.0]), 1)
    np.testing.assert_allclose(md.jit(md.grad(f))(x, 1), expected)
    batch = md.jit(md.vmap(md.grad(f), in_axes=(None, 0)))(x, np.array([0, 1]))
    np.testing.assert_allclose(batch, [md.grad(f)(x, 0), expected])


@each("f", [powers, md.jit(powers), md.grad(powers), md.jit(md.grad(powers))])
def test_more_steps_are_an_error(f):
    for run, x in ((f, 1.01), (md.vmap(f), np.array([3.0, 1.01]))):
        with pytest.raises(RuntimeError):
            run(x)
